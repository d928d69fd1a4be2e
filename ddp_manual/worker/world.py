"""World: what a rank knows once it has met the others, and what it does together with them."""

from __future__ import annotations

import atexit
import builtins
import gc
import inspect
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store

from ddp_manual import from_agent, from_worker, signal_handlers, terminal
from ddp_manual.deadline import Waiting
from ddp_manual.errors import BadOption, DataMissing, DdpManualError, PeerGone, Stopped, escaped, from_dict
from ddp_manual.from_worker import HandlesSignals, Handling
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.join_steps import Step
from ddp_manual.messages import StopAfter
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import ENDED, SAVING, Place
from ddp_manual.run_folder import own_run_dir
from ddp_manual.training.ddp import gather_messages
from ddp_manual.wire import decode
from ddp_manual.wording import as_ranges, in_words
from ddp_manual.worker.explain_errors import as_ours, is_broken_collective
from ddp_manual.worker.reporter import Reporter

# Seconds until an agent has ended its rank because another one has failed.
SAID_WITHIN = 2.0
# The backend of a run without a process group.
NO_GROUP = "none"


class _ExitCode:
    """As a value of ``sys.modules``, which Python clears once all functions of atexit have returned: let go of what the
    script has, so that its files are written to their end, and exit with a code that Python would not choose."""

    def __init__(self, code: int) -> None:
        self._code, self._exit, self._script = code, os._exit, vars(sys.modules["__main__"])
        self._thaw, self._collect = gc.unfreeze, gc.collect

    def __del__(self) -> None:
        self._script.clear()
        self._thaw()
        self._collect()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._exit(self._code)


@dataclass(kw_only=True)
class World(Place):
    """A rank that has met all the others, or the only rank of its run."""

    spec: WorldSpec
    """The options of this rank."""
    device: torch.device
    backend: str
    """The backend of torch's default process group; "none" if the run has no process group."""
    host: str
    run_id: str
    rendezvous_seconds: float = 0.0
    """Seconds from the start of the agent to the end of the first collective; 0 in a run without other ranks."""
    progress: from_worker.Progress
    """What this rank is doing, which ``ddp-manual status`` shows; the body keeps it up to date with
    ``world.progress(step=120, epoch=2)``."""
    run_dir: Path | None
    """The folder of the run, the same on every rank; on disk only on rank 0's host, unless the hosts share it. None
    if the run keeps no files, or the ranks have not agreed on a folder. On other ranks it is the folder that rank 0
    has named, which may differ from their own option."""
    run_dir_is_own: bool = True
    """Whether this rank writes its failure there: rank 0 does, and a rank whose own option or default names it."""
    run_dir_of_join: Path | None
    """The folder that rank 0 gave to ``join``."""
    generation: int = 0
    """How often ranks were lost and others took their places, before this world."""
    held: HeldMemory | None = None
    """Where to hold the state of the training, so that it outlives this process; None: nowhere."""
    state_from: int | None = None
    """The rank from whose state to go on; None: no state is held."""
    result: Any = None
    """This rank's result, which the body may set: JSON. Rank 0's is the result of ``ddp-manual train``."""
    steps: Sequence[Step] = ()
    """The steps of joining since all ranks were here, with the time that each took."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The losses of ranks in this run so far: their ``count``, and the ``seconds`` until all ranks went on."""
    _store: Store = field(repr=False)
    _roster: Sequence[Mapping[str, Any]] = field(repr=False)
    """Complete on rank 0; the other ranks read it from the store."""
    _reporter: Reporter = field(repr=False)
    until_left: ExitStack = field(repr=False)
    """Contexts that end after this rank has left, or has failed and told the others, so that no rank waits for them."""
    _block: ExitStack = field(default_factory=ExitStack, repr=False)
    """Contexts that end when this rank leaves; empty once it has left."""
    _exit: SystemExit | None = field(default=None, repr=False)
    """The SystemExit by which the script has ended itself, if its exit code is not 0."""
    _takes_stops: bool = field(default=False, repr=False)
    _job_numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def begin(self, block: ExitStack) -> None:
        """Be one of the ranks until ``with`` or ``close`` ends ``block``, or the interpreter ends."""
        self._block = block
        atexit.register(self._leave_at_exit, os.getpid(), getattr(sys, "last_value", None))
        pid = os.getpid()

        def note(raised: SystemExit, name: str) -> Any:
            """Read an attribute. There is no frame of Python above the interpreter, which reads the code as it ends."""
            frame = inspect.currentframe()
            if name == "code" and frame is not None and frame.f_back is None and raised.args[0]:
                self._exit = SystemExit(*raised.args)
            return SystemExit.__getattribute__(raised, name)

        noted = type("SystemExit", (SystemExit,), {"__module__": "builtins", "__getattribute__": note})

        def note_exit(module: ModuleType, name: str) -> None:
            """Note the exit code that the function with this name is given: at exit, nothing else tells it."""
            exit = getattr(module, name)

            def exit_and_note(code: Any = None) -> NoReturn:
                ends_script = os.getpid() == pid and threading.current_thread() is threading.main_thread()
                if not ends_script or isinstance(code, SystemExit):
                    exit(code)
                raise noted(code)

            def give_back() -> None:
                if getattr(module, name) is exit_and_note:
                    setattr(module, name, exit)

            setattr(module, name, exit_and_note)
            block.callback(give_back)

        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(module, name) and not (module is builtins and hasattr(sys, "ps1")):  # a person at a prompt
                note_exit(module, name)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        atexit.unregister(self._leave_at_exit)
        try:
            return self._block.__exit__(*raised)
        except PeerGone as gone:  # errors that it caused here, and our frames, add nothing
            own = raised[1]
            follows = not isinstance(own, Exception) or isinstance(own, DdpManualError) or is_broken_collective(own)
            raise gone.with_traceback(None) from None if follows else own

    def close(self) -> None:
        """Leave in order, together with the other ranks, as at the end of a ``with`` block; the second time do nothing.

        Raises:
            DdpManualError: another rank has ended the run.
        """
        self.__exit__(None, None, None)

    def _leave_at_exit(self, pid: int, raised_before: BaseException | None) -> None:
        """Leave in order, or tell the agent what has ended the script; not in a fork, nor if it was told already."""
        if os.getpid() != pid or self._reporter.unwinding:
            return
        raised = getattr(sys, "last_value", None)
        if raised is raised_before or hasattr(sys, "ps1"):  # a person at a prompt has gone on after an exception
            raised = None
        raised = raised or self._exit
        try:
            self.__exit__(raised and type(raised), raised, raised and raised.__traceback__)
        except DdpManualError as error:
            terminal.print_error(error)
            if raised is None and not hasattr(sys, "ps1"):
                vars(sys)["modules"]["ddp_manual: the exit code"] = _ExitCode(error.exit_code)

    def check_open(self, call: str) -> None:
        """Raise BadOption if this rank has left, so that ``call`` comes too late."""
        if self.progress.phase == ENDED:
            raise BadOption(
                f"{call} was called after this rank had left",
                why="at the end of the with block the ranks leave, and the process group is closed",
                next=f"call {call} inside: with ddp_manual.join() as world:, or before world.close()",
            )

    def take_folder(self, named: str, *, own: str, chosen: bool) -> None:
        """Make the folder that rank 0 has named the ``run_dir``; this rank writes there only if ``own`` names it too.

        Args:
            chosen: whether the user has named ``own``.
        """
        mine = own_run_dir(named, own)
        self.run_dir, self.run_dir_is_own = Path(mine or named), mine is not None
        self._reporter.send(from_worker.RunFolder(str(self.run_dir), self.run_dir_is_own, chosen))

    def roster(self) -> list[Mapping[str, Any]]:
        """Describe all ranks: ``rank``, ``host``, ``pid``, ``device``, ``address``, ``since``, ``versions``, UUID."""
        if self.rank == 0:
            return list(self._roster)
        found: list[Mapping[str, Any]] = decode(self._store.get("ddp_manual/roster").decode())
        return found

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks in rank order, on every rank; a collective.

        Args:
            message: JSON of any length.

        Raises:
            BadOption: this rank has left; or there are other ranks, and no process group is open.
        """
        self.check_open("world.gather")
        if not dist.is_initialized():
            if self.world_size > 1:
                raise BadOption(
                    "world.gather was called without a process group",
                    why=f"join was called with open_group={self.backend != NO_GROUP}, and no group is open now",
                    next="call it while one is open, after init_process_group where join opens none",
                )
            return [json.loads(json.dumps(message))]
        return gather_messages(message, self.device)

    def once_per_host(self, job: str, action: Callable[[], None], *, timeout: float) -> None:
        """Call ``action`` on the first rank of each host, while the other ranks of that host wait for it.

        Every rank of a host must call this for the same jobs in the same order.

        Args:
            job: what ``action`` does, such as "download mnist", for the line that the other ranks show.
            timeout: seconds that the others wait.

        Raises:
            Exception: ``action`` raised it on this rank. DdpManualError: what it raised on the first rank of the host.
            DataMissing: the first rank took longer than ``timeout``.
        """
        if self.local_world_size == 1:
            action()
            return
        # The same on every rank of the host. The number tells a job from an earlier one of the same name.
        key = f"ddp_manual/once/{self.node}/{next(self._job_numbers)}"
        if self.rank == self.host_leader:
            try:
                action()
            except Exception as error:
                failed = json.dumps(as_ours(self.rank, error).as_dict(), ensure_ascii=False)
                self._store.set(key, failed.encode(errors="replace").decode())  # names of files need not be UTF-8
                raise
            self._store.set(key, "null")
            return
        leader = f"rank {self.host_leader} on {self.host}"
        waiting = Waiting(timeout, terminal.log)
        # Polls, because Python handles no signal inside torch's own wait.
        while not self._store.check([key]):
            if waiting.over:
                raise DataMissing(
                    f"{leader} did not {job} within {timeout:.0f} s",
                    why=f"rank {self.rank} waited for it, so that one rank per host writes the files",
                    next=f"look at the output of that rank, or {job} beforehand",
                )
            waiting.about(f"waiting for {leader} to {escaped(job)}")
            time.sleep(0.02)
        waiting.ends()
        if (found := decode(self._store.get(key).decode())) is not None:
            with suppress(TimeoutError):  # the run ends because that rank has failed, unless its program goes on
                self._reporter.wait(from_agent.RunEnds, SAID_WITHIN)
            raise from_dict(found)

    def stop_after_this_step(self) -> bool:
        """Return whether to save a checkpoint now and end the loop; all ranks call this after each step.

        It is True on all ranks after the same step, once Ctrl-C, SIGTERM or SIGHUP has come to any of them; from the
        first call on such a signal does nothing else until this rank has left. It is no collective: a call takes
        a microsecond, and only once a signal has come it waits until rank 0 has named the step.

        Raises:
            DdpManualError: the run ends meanwhile.
        """
        if not self._takes_stops:
            self.until_left.enter_context(self.take_stops())
        return self._reporter.stops.after_a_step()

    @property
    def stop(self) -> StopAfter | None:
        """What has stopped all ranks, after ``stop_after_this_step`` was True: the number of the signal and the ranks
        that have got one."""
        return self._reporter.stops.stopped

    def stopped(self) -> Stopped | None:
        """Return how this rank has been stopped, after ``stop_after_this_step`` was True; otherwise None."""
        if (stop := self.stop) is None:
            return None
        named = in_words(as_ranges(stop.ranks))
        return Stopped(stop.number, f"on {named} after the same step as all ranks", next="start all ranks again")

    def save_is_asked(self) -> bool:
        """Return whether SIGUSR1 has asked this rank for a checkpoint since the last call."""
        asked, self._reporter.save_is_asked = self._reporter.save_is_asked, False
        return asked

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Write files in the body: if the run ends, the process is ended only once they are finished, or after 30 s."""
        progress = self.progress
        progress.saving.append(progress.phase)
        progress.phase = SAVING
        try:
            yield
        finally:
            progress.phase = progress.saving.pop()

    @contextmanager
    def take_stops(self) -> Iterator[None]:
        """Have signals in the body ask to stop or to save, instead of their usual effect on this process."""
        if self._takes_stops:
            yield
            return
        tell = self._reporter.send

        def take(number: int) -> None:
            self._reporter.save_is_asked |= number == signal_handlers.SAVE
            tell(from_worker.Signalled(number))

        self._takes_stops = True
        with signal_handlers.handle_instead(take):
            tell(HandlesSignals(Handling.WITH_ALL))
            try:
                yield
            finally:
                self._takes_stops = False
                tell(HandlesSignals(Handling.BY_ITSELF))

    def stop_heeding_signals(self) -> None:
        """Have the agent answer further signals with a line that says: this rank is done, and is leaving."""
        if self._takes_stops:
            self._reporter.send(HandlesSignals(Handling.DONE))
