"""``spawn(train_fn, nprocs)``: a function of a script, run in N ranks that the script itself starts.

Each rank is a new Python that imports the script, meets the others, and calls the function with its world. What ends a
rank comes back through a pipe of its own; the parent raises the error of the one that began it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ddp_manual import environment, signals, user_code
from ddp_manual.errors import BadOption, DdpManualError, PeerLost, Stopped, StopSignal, TrainingFailed
from ddp_manual.launching import children
from ddp_manual.launching.failure import Failure
from ddp_manual.options import option_fields
from ddp_manual.spawned import BEGAN, ERROR, HELD_BACK, START_AGAIN, become
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

# What spawn decides: every rank is on this machine, and its number follows from the order in which they are started.
DECIDED = ("world_size", "rank", "local_rank", "master_addr", "master_port")
# How a rank ends that was about to start ranks of its own, while it imported the script.
UNGUARDED = 77


def spawn(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any] = (), **world_options: Any) -> None:
    """Call ``train_fn(world, *args)`` in ``nprocs`` new processes on this machine, and wait until all have ended.

    The ranks meet as if they had been started by hand, and ``train_fn`` may do what the body of a ``rendezvous`` may.
    Ctrl-C and SIGTERM are passed on to them, and SIGUSR1 to rank 0.

    Args:
        train_fn: at the top level of a module or of the script, so that each rank finds it by its name.
        args: what it takes besides the world; copied to each rank.
        world_options: of WorldSpec, such as ``join_timeout=60`` or ``device="cpu"``; not those that spawn decides.

    Raises:
        BadOption: nothing was started, since the ranks could not have called this, or a launcher has started this
            process as one of several; or the ranks would start ranks again.
        DdpManualError: why the first rank has failed, with its own exception as ``__cause__`` if that can be copied.
            A rank that only lost another one is not the first.
        Stopped: by a signal, after all ranks have ended.
    """
    user_code.refuse_while_importing("spawn")
    _check_callable(train_fn)
    _check_nprocs(nprocs)
    _check_no_launcher(nprocs)
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise BadOption(
            f"args is {type(args).__name__}, which is no sequence of arguments",
            why=f"each rank calls {_name(train_fn)}(world, *args)",
            next="give a tuple: args=(value,)",
        )
    with signals.as_errors(), children.reserved_port() as port:
        specs = [_spec(rank, nprocs, port, world_options) for rank in range(nprocs)]
        _run(specs, train_fn, tuple(args))


def _spec(rank: int, nprocs: int, port: int, options: dict[str, Any]) -> WorldSpec:
    known = [field.name for field in option_fields(WorldSpec) if field.name not in DECIDED]
    for name in options:
        if name not in known:
            raise BadOption(
                f"spawn takes no {name}",
                why=f"it decides {', '.join(DECIDED)}; options are {', '.join(known)}",
                next=f"leave {name} out" + ("; how many ranks there are is nprocs" if name == "world_size" else ""),
            )
    return WorldSpec(world_size=nprocs, rank=rank, master_port=port, **options)


def _check_nprocs(nprocs: int) -> None:
    if type(nprocs) is not int or nprocs < 1:
        raise BadOption(
            f"nprocs {nprocs!r} is no number of ranks",
            why="it is how many processes are started, each of them one rank",
            next="give a whole number of at least 1; torch.cuda.device_count() is one per GPU",
        )


def _check_no_launcher(nprocs: int) -> None:
    launched = environment.launched_as()
    if launched is not None:
        raise BadOption(
            f"spawn was called where a launcher has started this script, as one of several ranks: {launched}",
            why=f"each of them would start {nprocs} ranks of its own, and they would not train together",
            next="start the script once, with python alone\n"
            "or have the launcher's ranks meet: with rendezvous(WorldSpec.from_environment()) as world\n"
            "or, where those variables are left over: unset RANK WORLD_SIZE",
        )


def _check_callable(train_fn: Callable[..., object]) -> None:
    """Whether a new Python could find it; what else keeps it from being copied shows when it is."""
    if not callable(train_fn):
        raise BadOption(
            f"train_fn is {type(train_fn).__name__}, which cannot be called",
            why="each rank calls train_fn(world, *args)",
            next="give a function, by its name and without calling it",
        )
    function = getattr(train_fn, "func", train_fn)  # of a functools.partial
    if not isinstance(function, FunctionType):
        return
    name = function.__qualname__
    if "<" in name:
        raise BadOption(
            f"spawn cannot start {name}",
            why="each rank is a new Python, which finds a function by the name it has in its module; this one has none",
            next="write it as a def at the top level of a module, and give what it needs by args",
        )
    if function.__module__ == "__main__" and not _script():
        raise BadOption(
            f"spawn cannot start {name}, which was typed into a notebook or at a prompt",
            why="each rank is a new Python, which finds a function in a file, and cannot see what was typed here",
            next=f"write it to a file beside the notebook (%%writefile training.py), then: from training import {name}",
        )


def _script() -> bool:
    """Whether what runs here is a file or a module, which a new Python can import too."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (file is not None and os.path.exists(file))


def _name(train_fn: Callable[..., object]) -> str:
    return getattr(train_fn, "__qualname__", type(train_fn).__qualname__)


def _run(specs: Sequence[WorldSpec], train_fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    ranks: list[_Rank] = []
    try:
        with children.signals_deferred(), environment.of_children(len(specs)):
            for spec in specs:
                ranks.append(_start(spec, train_fn, args))
        with children.saving_passed_on(ranks[0]):
            failure = children.wait(ranks)
    except StopSignal as stop:
        with suppress(StopSignal):  # a second one: they are ended below
            children.stop_in_order(ranks, stop.number)
        raise _stopped(ranks, stop.number) from None
    finally:
        with children.signals_deferred():
            children.end(ranks)
            for rank in ranks:
                rank.close()
    if failure is not None:
        raise _conclude(failure, ranks, _name(train_fn)) from ranks[failure.rank].cause


def _start(spec: WorldSpec, train_fn: Callable[..., object], args: tuple[Any, ...]) -> _Rank:
    """One rank. It is to hear of no signal before it can heed it: what comes meanwhile waits until then."""
    spawned = multiprocessing.get_context("spawn")
    receiving, sending = spawned.Pipe(duplex=False)
    process = spawned.Process(
        target=become,
        args=(spec, train_fn, args, sending),
        name=f"rank {spec.rank}",
    )
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        process.start()
    except RuntimeError as error:
        if "bootstrapping phase" in str(error):  # this is a rank, which imports the script that has started it
            raise SystemExit(UNGUARDED) from None
        raise _not_copied(train_fn, error) from error
    except Exception as error:  # whatever the copying of an argument raises
        raise _not_copied(train_fn, error) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        sending.close()
    return _Rank(spec.rank, process, receiving)


def _not_copied(train_fn: Callable[..., object], error: Exception) -> BadOption:
    return BadOption(
        f"{_name(train_fn)} and its args cannot be copied to the ranks",
        why=f"{type(error).__name__}: {error}",
        next="give what can be copied, such as numbers, texts and paths, and open files or make locks in each rank",
    )


@dataclass
class _Rank:
    """A rank's process as its parent sees it, and what it has said of itself."""

    number: int
    process: SpawnProcess
    receiving: Connection
    began: bool = False
    error: DdpManualError | None = None
    cause: BaseException | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def status(self) -> int | None:
        status = self.process.exitcode
        self._listen()
        return status

    def ask(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, number: int) -> None:
        if self.status() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not got as far as to lead a group
                self.ask(number)

    def close(self) -> None:
        """Once it has ended."""
        self.receiving.close()
        self.process.close()

    def _listen(self) -> None:
        """Take what it has said by now: one with much to say waits until it is read."""
        with suppress(OSError, EOFError):  # all is said
            while self.receiving.poll():
                kind, said = self.receiving.recv()
                if kind == BEGAN:
                    self.began = True
                elif kind == ERROR:
                    self.error = said
                else:
                    with suppress(Exception):  # whatever the user's class does when it is made anew
                        self.cause = ForkingPickler.loads(said)


def _stopped(ranks: Sequence[_Rank], number: int) -> Stopped:
    """What the ranks say of how far they were; else that they were stopped."""
    said = [rank.error for rank in ranks if isinstance(rank.error, Stopped)]
    why = "the signal came to spawn, which has passed it on to all ranks"
    return said[0] if said else Stopped(number, why=why, next=START_AGAIN)


def _conclude(failure: Failure, ranks: Sequence[_Rank], name: str) -> DdpManualError:
    """Why the rank that failed first has."""
    rank = ranks[failure.rank]
    who = f"rank {rank.number} (pid {failure.pid})"
    words = [f"rank {one.number} said: {one.error.what}" for one in ranks if one.error is not None]
    if failure.status < 0:
        return PeerLost(
            f"{who} was killed by {signal.Signals(-failure.status).name}",
            why="\n".join(words) or "it left no last words",
            next="if nobody has killed it, `dmesg` says whether memory had run out\nthen start the script again",
        )
    if rank.error is not None:
        return rank.error
    if failure.status == UNGUARDED and not rank.began:
        return BadOption(
            "spawn was called by a rank, which was importing the script that had started it",
            why="each rank is a new Python that imports the script, and so comes to the call of spawn itself",
            next='put the call below a line: if __name__ == "__main__":',
        )
    error = next((one.error for one in ranks if one.error is not None), None)
    return error or TrainingFailed(
        f"{who} ended with exit code {failure.status} "
        + ("without last words" if rank.began else f"before it could call {name}"),
        why="its last lines on stderr say why" if rank.began else "it imports the script first, and that failed there",
        next="mend what they say, then start the script again",
    )
