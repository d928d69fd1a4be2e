"""``spawn(train_fn, nprocs)``: call a function of a script in N ranks that the script itself starts.

Each rank is a new Python that imports the script, joins the others and calls the function with its world. Its own agent
ends it. The error that ends a rank comes back in a file, and the parent raises that of the rank that failed first.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any

from ddp_manual import errors, launchers, signals, terminal
from ddp_manual.options import option_fields
from ddp_manual.training import own_code
from ddp_manual.worker.device import keep_freed_memory
from ddp_manual.worker.join import joined
from ddp_manual.worker.main import as_ours
from ddp_manual.worker.reporter import end_process
from ddp_manual.world_spec import WorldSpec

# The options that spawn decides: every rank is on this machine, and they are numbered in the order they are started.
DECIDED = ("world_size", "rank", "local_rank", "master_addr", "master_port")
# Seconds. A rank that loses another one leaves by itself, after it has finished the checkpoint it is writing.
LEAVE_WITHIN = 45.0
TERM_GRACE = 3.0
# Ranks that are asked to stop agree on a step, save a checkpoint and leave in order.
STOP_WITHIN = 60.0
# Once the parent is gone, for a rank to stop in order.
WITHOUT_PARENT = 10.0
LOOK_EVERY = 0.02
# The exit code of a rank that called spawn while it imported the script.
UNGUARDED = 77
# A rank starts with these blocked, until it has set a handler.
BLOCKED_AT_START = (signal.SIGINT, signals.SAVE)
# What ranks are told to do about a missing rank, and to do next after a signal that did not stop ``train``.
COMMAND = "(spawn has started rank {rank} too: look at what it does)"
START_AGAIN = "start the script again"
# What a rank leaves for its parent.
BEGAN, ERROR, CAUSE = "began", "error", "cause"


def spawn(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any] = (), **world_options: Any) -> None:
    """Call ``train_fn(world, *args)`` in ``nprocs`` new processes on this machine, and wait until all have ended.

    The ranks meet as if they had been started by hand, and ``train_fn`` may do what the body of ``join`` may do.
    Ctrl-C and SIGTERM are passed on to all ranks, and SIGUSR1 to rank 0.

    Args:
        train_fn: at the top level of a module or of the script, so that each rank finds it by its name.
        args: its arguments after the world; copied to each rank.
        world_options: of WorldSpec, such as ``join_timeout=60`` or ``device="cpu"``, except those that spawn decides.

    Raises:
        BadOption: the ranks could not call the function, a launcher has started this process as one of several, or
            the ranks would start ranks again.
        DdpManualError: why the first rank failed, with its own exception as ``__cause__`` if that can be copied. A
            rank that only lost another one is not the first.
        Stopped: a signal stopped the ranks, and all have ended.
    """
    own_code.refuse_while_importing("spawn")
    _check(train_fn, nprocs, args)
    with signals.raise_on_stop(), launchers.reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        specs = [_spec(rank, nprocs, port, world_options) for rank in range(nprocs)]
        _run(specs, train_fn, tuple(args), Path(folder))


def _spec(rank: int, nprocs: int, port: int, options: dict[str, Any]) -> WorldSpec:
    known = [field.name for field in option_fields(WorldSpec) if field.name not in DECIDED]
    for name in options:
        if name not in known:
            raise errors.BadOption(
                f"spawn takes no {name}",
                why=f"it decides {', '.join(DECIDED)}; options are {', '.join(known)}",
                next=f"leave {name} out" + ("; how many ranks there are is nprocs" if name == "world_size" else ""),
            )
    sources = dict.fromkeys(options, "argument")
    return WorldSpec(world_size=nprocs, rank=rank, master_port=port, sources=sources, **options)


def _check(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any]) -> None:
    """Check that a new Python can find the function and call it in so many ranks; copying ``args`` checks the rest."""
    function = getattr(train_fn, "func", train_fn)  # of a functools.partial
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
    elif (launched := launchers.launched_as()) is not None:
        what = f"spawn was called in a script that a launcher has started as one of several ranks: {launched}"
        why = f"each of them would start {nprocs} ranks of its own, and they would not train together"
        next = (
            "start the script once, with python alone\n"
            "or have the launcher's ranks meet: with ddp_manual.join() as world\n"
            "or, if those variables are left over: unset RANK WORLD_SIZE"
        )
    elif isinstance(args, str) or not isinstance(args, Sequence):
        what = f"args is {type(args).__name__}, not a sequence of arguments"
        why = f"each rank calls {_name(train_fn)}(world, *args)"
        next = "give a tuple: args=(value,)"
    else:
        return
    raise errors.BadOption(what, why=why, next=next)


def _name(train_fn: Callable[..., object]) -> str:
    return getattr(train_fn, "__qualname__", type(train_fn).__qualname__)


def _run(specs: Sequence[WorldSpec], train_fn: Callable[..., object], args: tuple[Any, ...], folder: Path) -> None:
    ranks: list[RankProcess] = []
    try:
        with signals.defer_stop(), launchers.clean_variables(len(specs)):  # so that each rank started is listed
            for spec in specs:
                rank = RankProcess(spec, train_fn, args, folder)
                rank.start()
                ranks.append(rank)
        with signals.ignore_save(instead=ranks[0].send_signal):  # which tells the others
            failed = _wait_for_failure(ranks)
    except errors.StopSignal as stop:
        raise _stop_in_order(ranks, stop.number) from None
    finally:
        with suppress(errors.StopSignal), signals.defer_stop():  # the ranks end anyway, and why is known already
            for number, grace in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, math.inf)):
                for rank in ranks:
                    rank.send_signal(number, to_its_group=True)
                _wait_for_all(ranks, grace)
    if failed is not None:
        raise _conclude(failed, ranks, _name(train_fn)) from failed.read(CAUSE)


def _wait_for_failure(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Wait until all ranks have ended, or until LEAVE_WITHIN seconds after the first of them has failed.

    Returns:
        The rank to blame: the first to fail whose exit code does not say that it lost another rank. If all of them say
        so, the first that failed. None if all ranks ended with 0.
    """
    failed: list[RankProcess] = []
    deadline = math.inf
    running = list(ranks)
    while running and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
        running = [rank for rank in ranks if rank.exitcode is None]
        failed += [rank for rank in ranks if rank.exitcode and rank not in failed]
        if failed:
            deadline = min(deadline, time.monotonic() + LEAVE_WITHIN)
    return next((rank for rank in failed if rank.exitcode != errors.PeerGone.exit_code), failed[0]) if failed else None


def _wait_for_all(ranks: Sequence[RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)


def _stop_in_order(ranks: Sequence[RankProcess], number: int) -> errors.Stopped:
    """Pass a signal on, once, let the ranks end by themselves, and return how far they say they were.

    A second signal ends the wait, and the caller ends the ranks.
    """
    running = [rank for rank in ranks if rank.exitcode is None]
    if running:
        terminal.say("stopping; a second signal ends all ranks at once")
    with suppress(errors.StopSignal):
        for rank in running:
            rank.send_signal(number)
        _wait_for_all(ranks, STOP_WITHIN)
    said = [error for rank in ranks if isinstance(error := rank.read(ERROR), errors.Stopped)]
    why = "spawn got the signal, and passed it on to all ranks"
    return said[0] if said else errors.Stopped(number, why=why, next=START_AGAIN)


def _conclude(rank: RankProcess, ranks: Sequence[RankProcess], name: str) -> errors.DdpManualError:
    """Return why the rank that failed first has failed."""
    status = rank.exitcode
    assert status is not None
    who = f"rank {rank.spec.rank} (pid {rank.pid})"
    told = {other.spec.rank: error for other in ranks if (error := other.read(ERROR)) is not None}
    if status < 0:
        return errors.PeerLost(
            f"{who} was killed by {errors.signal_name(-status)}",
            why="\n".join(f"rank {number} said: {error.what}" for number, error in told.items())
            or "it reported no error",
            next="if nobody killed it, look at the last lines of its agent\nthen start the script again",
        )
    began = rank.read(BEGAN)
    if status == UNGUARDED and not began and rank.spec.rank not in told:
        return errors.BadOption(
            "spawn was called by a rank while it imported the script",
            why="each rank is a new Python that imports the script, and so comes to the call of spawn itself",
            next='put the call of spawn below a line: if __name__ == "__main__":',
        )
    return (
        told.get(rank.spec.rank)
        or next(iter(told.values()), None)
        or errors.TrainingFailed(
            f"{who} ended with exit code {status} "
            + ("and reported no error" if began else f"before it could call {name}"),
            why="its last lines on stderr say why" if began else "it imports the script first, and that failed",
            next="correct what they say, then start the script again",
        )
    )


def _end_without_parent() -> None:
    """Wait until the parent is gone, then stop in order, or after 10 s at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(WITHOUT_PARENT)
    end_process(128 + signal.SIGTERM)


class RankProcess(SpawnProcess):
    """A rank's process: a new Python, as the parent sees it and, in ``run``, as it lives.

    Each kind of what the rank leaves for its parent is in a file of its own. ``exitcode`` tells that the process has
    ended, but its sentinel does not, since processes that the rank has forked hold the sentinel open.
    """

    def __init__(self, spec: WorldSpec, train_fn: Callable[..., object], args: tuple[Any, ...], folder: Path) -> None:
        super().__init__(name=f"rank {spec.rank}")
        self.spec = spec
        self.train_fn = train_fn
        self.train_args = args
        self.folder = folder

    def start(self) -> None:
        """Start the process, which receives signals only once it can handle them."""
        try:
            with signals.block_in_children(BLOCKED_AT_START):
                super().start()
        except Exception as error:  # whatever the copying of an argument raises
            if isinstance(error, RuntimeError) and "bootstrapping phase" in str(error):
                raise SystemExit(UNGUARDED) from None  # this is a rank that is importing the script
            raise errors.BadOption(
                f"{_name(self.train_fn)} and its args cannot be copied to the ranks",
                why=f"{type(error).__name__}: {error}",
                next="pass numbers, texts or paths, which can be copied, and open files or make locks in each rank",
            ) from error

    def run(self) -> None:
        """Live as a rank, as long as the parent lives, and in a session of its own, since the parent passes on the
        terminal's Ctrl-C."""
        os.setsid()
        keep_freed_memory()
        threading.Thread(target=_end_without_parent, name="ddp_manual parent", daemon=True).start()
        with signals.raise_on_stop(), signals.ignore_save():
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)
                self.write(BEGAN, True)
                with joined(self.spec, command=COMMAND, tell=self.write_error) as world:
                    self.train_fn(world, *self.train_args)
            except BaseException as error:
                if isinstance(error, SystemExit) and not error.code:
                    return
                ours = as_ours(self.spec.rank, error, START_AGAIN, whole=self.spec.full_traceback)
                self.write_error(ours, None if ours is error else error)
                end_process(ours.exit_code)

    def write(self, kind: str, content: object) -> None:
        with suppress(Exception):  # of the user's own class, when it is copied
            self._file(kind).write_bytes(ForkingPickler.dumps(content))

    def read(self, kind: str) -> Any:
        """Return what was written; None if nothing was, or if the user's own class cannot be rebuilt."""
        with suppress(Exception):
            return ForkingPickler.loads(self._file(kind).read_bytes())

    def write_error(self, error: errors.DdpManualError, cause: BaseException | None = None) -> None:
        """Write why this rank ends, and the user's own exception if that is the reason."""
        # For the case that the error cannot be copied, such as a subclass in the user's code.
        self.write(ERROR, errors.TrainingFailed(error.what, why=error.why, next=error.next))
        self.write(ERROR, error)
        self.write(CAUSE, cause)

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}-rank{self.spec.rank}"

    def send_signal(self, number: int, *, to_its_group: bool = False) -> None:
        assert self.pid is not None
        if self.exitcode is None:
            try:
                (os.killpg if to_its_group else os.kill)(self.pid, number)
            except ProcessLookupError:
                if to_its_group:  # it does not lead a group yet
                    self.send_signal(number)
