"""``spawn(train_fn, nprocs)``: call a function of a script in N ranks that the script itself starts.

It is ``launch`` of a function. A separate process launches the ranks, ``launch/__main__.py``: the script may have an
event loop, as in a notebook, and threads. Each rank imports the script, and calls the function: ``launch/function.py``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from types import FunctionType
from typing import Any

from ddp_manual import signal_handlers
from ddp_manual.environment import launcher_variables, user_variables
from ddp_manual.environment.start_python import start_python
from ddp_manual.errors import BadOption, PeerLost, signal_name
from ddp_manual.launch.function import Call, name_of
from ddp_manual.option_fields import option_fields
from ddp_manual.protocol.stop_signals import LEAVING_OTHERS
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training import own_factory

# The options that spawn decides: every rank is on this machine, and they are numbered in the order they are started.
DECIDED = ("world_size", "rank", "local_rank", "master_addr", "master_port")
START_AGAIN = "start the script again"


def spawn(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any] = (), **world_options: Any) -> None:
    """Call ``train_fn(world, *args)`` in ``nprocs`` new processes on this machine, and wait until all have ended.

    The ranks meet as if they had been started by hand, and ``train_fn`` may do what the body of ``join`` may do.
    Ctrl-C, SIGTERM and SIGUSR1 are passed on to the ranks.

    Args:
        train_fn: at the top level of a module or of the script, so that each rank finds it by its name.
        args: its arguments after ``world``; each rank gets a copy.
        world_options: of WorldSpec, such as ``join_timeout=60`` or ``device="cpu"``, except those that spawn decides.

    Raises:
        BadOption: the ranks could not call the function, a launcher has started this process as one of several, or
            the ranks would start ranks again.
        DdpManualError: why the first rank failed, with its own exception as ``__cause__`` if that can be copied. A
            rank that only lost another one is not the first.
        Stopped: a signal stopped the ranks, and all have ended.
    """
    own_factory.refuse_while_importing("spawn")
    _check(train_fn, nprocs, args)
    spec = _spec(nprocs, world_options)
    with tempfile.TemporaryDirectory() as folder:
        call = Call(Path(folder))
        call.write(train_fn, args, spec)
        _launch(call)
        if (failed := call.get("failed")) is not None:
            rank, error = failed
            error.next = error.next.replace(f"start all ranks again{LEAVING_OTHERS}", START_AGAIN)
            error.next = error.next.replace("start all ranks again", START_AGAIN)
            cause = None
            with suppress(Exception):  # its class may be one that cannot be rebuilt
                cause = call.get(f"cause{rank}")
            raise error from cause


def _launch(call: Call) -> None:
    """Launch the ranks in a process that ends once this one closes its standard input; pass signals on to it.

    Raises:
        PeerLost: that process has failed, or was killed.
    """
    word = f"folder={call.folder}"
    starting = start_python(Path(__file__).parent, [], [word], stdin=PIPE, start_new_session=True)
    with starting as launcher, signal_handlers.handle_instead(launcher.send_signal):
        status = launcher.wait()
    if status:
        how = signal_name(-status) if status < 0 else f"exit code {status}"
        raise PeerLost(
            f"the process that launches the ranks has ended with {how}",
            why="its ranks have ended with it",
            next=f"if nobody killed it, look at the lines above\nthen {START_AGAIN}",
        )


def _spec(nprocs: int, options: dict[str, Any]) -> WorldSpec:
    known = [field.name for field in option_fields(WorldSpec) if field.name not in DECIDED]
    for name in options:
        if name not in known:
            raise BadOption(
                f"spawn takes no {name}",
                why=f"it decides {', '.join(DECIDED)}; options are {', '.join(known)}",
                next=f"leave {name} out" + ("; how many ranks there are is nprocs" if name == "world_size" else ""),
            )
    user_variables.token(options.get("token_file"))  # every rank reads it
    return WorldSpec(world_size=nprocs, sources=dict.fromkeys(options, "argument"), **options).of_script()


def _check(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any]) -> None:
    """Check that a new Python can find the function, and that nprocs is valid; ``Call.write`` checks the arguments."""
    function = getattr(train_fn, "func", train_fn)  # the function of a functools.partial
    name = function.__qualname__ if isinstance(function, FunctionType) else ""
    main = sys.modules["__main__"]
    is_importable = getattr(main, "__spec__", None) or os.path.exists(getattr(main, "__file__", None) or "")
    new_python = "each rank is a new Python, which finds a function"
    if not callable(train_fn):
        what = f"train_fn is {type(train_fn).__name__}, which cannot be called"
        why = "each rank calls train_fn(world, *args)"
        next = "give a function, by its name and without calling it"
    elif "<" in name:
        what = f"spawn cannot start {name}"
        why = f"{new_python} by the name it has in its module; this one has none"
        next = "write it as a def at the top level of a module, and give what it needs by args"
    elif name and function.__module__ == "__main__" and not is_importable:
        what = f"spawn cannot start {name}, which was typed into a notebook or at a prompt"
        why = f"{new_python} in a file, and cannot see what was typed here"
        next = f"write it to a file beside the notebook (%%writefile training.py), then: from training import {name}"
    elif type(nprocs) is not int or nprocs < 1:
        what = f"nprocs {nprocs!r} is not a number of ranks"
        why = "spawn starts that many processes, each of them one rank"
        next = "give a whole number of at least 1; torch.cuda.device_count() starts a rank per GPU"
    elif (launched := launcher_variables.launched_as()) is not None:
        what = f"spawn was called in a script that a launcher has started as one of several ranks: {launched}"
        why = f"each of them would start {nprocs} ranks of its own, and they would not train together"
        next = (
            "start the script once, with python alone\n"
            "or have the launcher's ranks meet: with ddp_manual.join() as world\n"
            "or, if those variables are left over: unset RANK WORLD_SIZE"
        )
    elif isinstance(args, str) or not isinstance(args, Sequence):
        what = f"args is {type(args).__name__}, not a sequence of arguments"
        why = f"each rank calls {name_of(train_fn)}(world, *args)"
        next = "give a tuple: args=(value,)"
    else:
        return
    raise BadOption(what, why=why, next=next)
