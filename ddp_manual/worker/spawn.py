"""``spawn(train_fn, nprocs)``: a function of a script, run in N ranks that the script itself starts.

Each rank is a new Python that imports the script, joins the others, and calls the function with its world. Its own
agent sees to it that it leaves; what ends it comes back in a file, and the parent raises the error of the rank
that began it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ddp_manual import launchers, signals, terminal
from ddp_manual.errors import (
    BadOption,
    DdpManualError,
    PeerGone,
    PeerLost,
    Stopped,
    StopSignal,
    TrainingFailed,
    signal_name,
)
from ddp_manual.options import option_fields
from ddp_manual.training import own_code
from ddp_manual.worker.spawned import BEGAN, CAUSE, ERROR, HELD_BACK, START_AGAIN, Words, become
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

# What spawn decides: every rank is on this machine, and its number follows from the order in which they are started.
DECIDED = ("world_size", "rank", "local_rank", "master_addr", "master_port")
# Seconds. A rank that loses a peer leaves by itself, after it has finished a checkpoint that it is writing.
LEAVE_WITHIN = 45.0
TERM_GRACE = 3.0
# Ranks that are asked to stop agree on a step, save a checkpoint and leave in order.
STOP_IN_ORDER = 60.0
LOOK_EVERY = 0.02
# How a rank ends that was about to start ranks of its own, while it imported the script.
UNGUARDED = 77


def spawn(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any] = (), **world_options: Any) -> None:
    """Call ``train_fn(world, *args)`` in ``nprocs`` new processes on this machine, and wait until all have ended.

    The ranks meet as if they had been started by hand, and ``train_fn`` may do what the body of ``join`` may.
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
    own_code.refuse_while_importing("spawn")
    _check(train_fn, nprocs, args)
    with signals.as_errors(), launchers.reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        specs = [_spec(rank, nprocs, port, world_options) for rank in range(nprocs)]
        _run(specs, train_fn, tuple(args), Path(folder))


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


def _check(train_fn: Callable[..., object], nprocs: int, args: Sequence[Any]) -> None:
    """Whether a new Python could find the function, and call it in as many ranks; what else keeps ``args`` from being
    copied shows when they are."""
    _check_function(train_fn)
    if type(nprocs) is not int or nprocs < 1:
        what = f"nprocs {nprocs!r} is no number of ranks"
        why = "it is how many processes are started, each of them one rank"
        next = "give a whole number of at least 1; torch.cuda.device_count() is one per GPU"
    elif (launched := launchers.launched_as()) is not None:
        what = f"spawn was called where a launcher has started this script, as one of several ranks: {launched}"
        why = f"each of them would start {nprocs} ranks of its own, and they would not train together"
        next = (
            "start the script once, with python alone\n"
            "or have the launcher's ranks meet: with ddp_manual.join() as world\n"
            "or, where those variables are left over: unset RANK WORLD_SIZE"
        )
    elif isinstance(args, str) or not isinstance(args, Sequence):
        what = f"args is {type(args).__name__}, which is no sequence of arguments"
        why = f"each rank calls {_name(train_fn)}(world, *args)"
        next = "give a tuple: args=(value,)"
    else:
        return
    raise BadOption(what, why=why, next=next)


def _check_function(train_fn: Callable[..., object]) -> None:
    """Raise BadOption where a new Python could not find the function that each rank is to call."""
    function = getattr(train_fn, "func", train_fn)  # of a functools.partial
    name = function.__qualname__ if isinstance(function, FunctionType) else ""
    if not callable(train_fn):
        what = f"train_fn is {type(train_fn).__name__}, which cannot be called"
        why = "each rank calls train_fn(world, *args)"
        next = "give a function, by its name and without calling it"
    elif "<" in name:
        what = f"spawn cannot start {name}"
        why = "each rank is a new Python, which finds a function by the name it has in its module; this one has none"
        next = "write it as a def at the top level of a module, and give what it needs by args"
    elif name and function.__module__ == "__main__" and not _is_importable(sys.modules["__main__"]):
        what = f"spawn cannot start {name}, which was typed into a notebook or at a prompt"
        why = "each rank is a new Python, which finds a function in a file, and cannot see what was typed here"
        next = f"write it to a file beside the notebook (%%writefile training.py), then: from training import {name}"
    else:
        return
    raise BadOption(what, why=why, next=next)


def _is_importable(main: ModuleType) -> bool:
    """Tell whether the program that runs is a file or a module, which a new Python can import too."""
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")


def _name(train_fn: Callable[..., object]) -> str:
    return getattr(train_fn, "__qualname__", type(train_fn).__qualname__)


def _run(specs: Sequence[WorldSpec], train_fn: Callable[..., object], args: tuple[Any, ...], folder: Path) -> None:
    ranks: list[_Rank] = []
    try:
        with signals.deferred(), launchers.of_children(len(specs)):  # one that is being started is in no list yet
            for spec in specs:
                ranks.append(_start(spec, train_fn, args, Words(folder, spec.rank)))
        with signals.without_saving(instead=ranks[0].ask):  # which tells the others
            failed = _wait(ranks)
    except StopSignal as stop:
        with suppress(StopSignal):  # a second one: they are ended below
            _stop_in_order(ranks, stop.number)
        raise _stopped(ranks, stop.number) from None
    finally:
        with signals.deferred():
            _end(ranks)
    if failed is not None:
        raise _conclude(failed, ranks, _name(train_fn)) from failed.words.said(CAUSE)


def _wait(ranks: Sequence[_Rank]) -> _Rank | None:
    """Until all have ended, or one has failed and the others have had the time to leave.

    Returns:
        The one that began it: the first that lost no peer, since a rank that lost one may be reaped before that.
    """
    failed: list[_Rank] = []
    deadline = float("inf")
    running = list(ranks)
    while running and time.monotonic() < deadline:
        for rank in list(running):
            status = rank.status
            if status is None:
                continue
            running.remove(rank)
            if status != 0:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + LEAVE_WITHIN)
        time.sleep(LOOK_EVERY)
    return next((rank for rank in failed if rank.status != PeerGone.exit_code), failed[0]) if failed else None


def _stop_in_order(ranks: Sequence[_Rank], number: int) -> None:
    """Pass a signal on, once, and let the ranks end by themselves; a second signal comes out of here as it came in."""
    running = [rank for rank in ranks if rank.status is None]
    if running:
        terminal.say("stopping; once more ends it at once")
    for rank in running:
        rank.ask(number)
    began = time.monotonic()
    while any(rank.status is None for rank in ranks) and time.monotonic() < began + STOP_IN_ORDER:
        try:
            time.sleep(LOOK_EVERY)
        except StopSignal:
            if time.monotonic() - began > signals.ONCE_WITHIN:
                raise


def _end(ranks: Sequence[_Rank]) -> None:
    """Leave no process: SIGTERM, then SIGKILL."""
    for number, grace in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, float("inf"))):
        for rank in ranks:
            rank.end(number)
        deadline = time.monotonic() + grace
        while any(rank.status is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)


def _start(spec: WorldSpec, train_fn: Callable[..., object], args: tuple[Any, ...], words: Words) -> _Rank:
    """One rank. It is to hear of no signal before it can heed it: what comes meanwhile waits until then."""
    process = multiprocessing.get_context("spawn").Process(
        target=become, args=(spec, train_fn, args, words), name=f"rank {spec.rank}"
    )
    try:
        with signals.held_back(HELD_BACK):
            process.start()
    except Exception as error:  # whatever the copying of an argument raises
        if isinstance(error, RuntimeError) and "bootstrapping phase" in str(error):
            raise SystemExit(UNGUARDED) from None  # this is a rank, which imports the script that has started it
        raise BadOption(
            f"{_name(train_fn)} and its args cannot be copied to the ranks",
            why=f"{type(error).__name__}: {error}",
            next="give what can be copied, such as numbers, texts and paths, and open files or make locks in each rank",
        ) from error
    return _Rank(process, words)


@dataclass(frozen=True)
class _Rank:
    """A rank's process as its parent sees it."""

    process: SpawnProcess
    words: Words

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Its exit code. Not by its sentinel, which what it has forked holds open too."""
        return self.process.exitcode

    def ask(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, number: int) -> None:
        if self.status is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not got as far as to lead a group
                self.ask(number)


def _stopped(ranks: Sequence[_Rank], number: int) -> Stopped:
    """What the ranks say of how far they were; else that they were stopped."""
    said = [error for rank in ranks if isinstance(error := rank.words.said(ERROR), Stopped)]
    why = "the signal came to spawn, which has passed it on to all ranks"
    return said[0] if said else Stopped(number, why=why, next=START_AGAIN)


def _conclude(rank: _Rank, ranks: Sequence[_Rank], name: str) -> DdpManualError:
    """Why the rank that failed first has."""
    status = rank.status
    assert status is not None
    who = f"rank {rank.words.rank} (pid {rank.pid})"
    errors = {one.words.rank: error for one in ranks if (error := one.words.said(ERROR)) is not None}
    if status < 0:
        return PeerLost(
            f"{who} was killed by {signal_name(-status)}",
            why="\n".join(f"rank {number} said: {error.what}" for number, error in errors.items())
            or "it left no last words",
            next="if nobody has killed it, look at the last lines of its agent\nthen start the script again",
        )
    began = rank.words.said(BEGAN)
    if status == UNGUARDED and not began and rank.words.rank not in errors:
        return BadOption(
            "spawn was called by a rank, which was importing the script that had started it",
            why="each rank is a new Python that imports the script, and so comes to the call of spawn itself",
            next='put the call below a line: if __name__ == "__main__":',
        )
    return (
        errors.get(rank.words.rank)
        or next(iter(errors.values()), None)
        or TrainingFailed(
            f"{who} ended with exit code {status} "
            + ("without last words" if began else f"before it could call {name}"),
            why="its last lines on stderr say why" if began else "it imports the script first, and that failed there",
            next="mend what they say, then start the script again",
        )
    )
