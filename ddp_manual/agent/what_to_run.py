"""What the worker of a rank is to do, as the command that has started the rank says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_manual import run_folder
from ddp_manual.environment import torchrun
from ddp_manual.program import Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import RankInfo, RunInfo

# Characters of a command that rank 0 sends to the others: a line of the protocol has 256 KiB, and nobody types more.
LONGEST_COMMAND = 8000


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker is to do, and what of it all ranks must have in common."""

    program: Program | None = None
    """What the worker runs; None: it is a script that has started its agent itself."""
    resumes: bool = False
    """Whether the program saves checkpoints in the run's folder, and goes on from the newest with --resume auto."""
    source: Program | None = None
    """The user's own program, whose files and arguments must be the same on every rank; None: there is none."""
    name: str = ""
    """The name of what the worker runs, for lines that are printed; "" for a program that prints such lines itself."""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Option -> (value, source), for the options that all ranks must share and that are known without torch."""
    run_dir: str | None = None
    """The run's folder, with ``{run_id}`` for its name; all ranks use rank 0's. None: the run keeps no files."""
    chose_folder: bool = True
    """Whether somebody has named that folder, so that more may be in it than the run writes."""
    command: str
    """The command that starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers."""
    for_rank_0: str = ""
    """The options that only rank 0's command has: where rank 0 listens, and what it resumes from."""
    go_on: str | None = None
    """What was typed in this rank's terminal, without --run_dir and --resume; None if a launcher has started it."""
    restarts: tuple[int, int] = (0, 0)
    """How often the ranks of the program were started again, and how often they may be started again."""
    may_differ: Sequence[str] = ()
    """The arguments of the program that may differ between ranks."""
    launched: str | None = None
    """The command that resumes the run, if ``launch`` has started the ranks."""
    is_news: Callable[[str], bool] = lambda line: True
    """Whether to print a line that all ranks are told; False if another rank has printed it in the same terminal."""
    in_one_terminal: bool = False
    """Whether all ranks of the run share this rank's terminal."""
    waits_silently: bool = False
    """Whether another rank says in the same terminal which ranks are missing."""
    searches_silently: bool = False
    """Whether another rank of this host says in the same terminal why rank 0 is not found."""
    wait_until_ready: bool = False
    """Whether a rank that fails still waits until its worker has loaded torch and said what it found, for ``check``."""
    attempt: str = field(default_factory=lambda: f"{torchrun.restart_count()}.0")
    """A text that differs each time that the ranks of the same torchrun join."""

    def describe_run(self, spec: WorldSpec, rank_0: RankInfo, address: str, command: str) -> RunInfo:
        """Return the run, as rank 0 begins it.

        Args:
            address: the IP address that rank 0 listens on.
            command: the command that starts a rank, with ``{rank}`` for its number.
        """
        run_id = spec.run_id or run_folder.new_run_id()
        return RunInfo(
            run_id=run_id,
            run_dir=self.run_dir and self.run_dir.replace("{run_id}", run_id),
            world_size=spec.world_size,
            host=rank_0.host,
            pid=rank_0.pid,
            agent=rank_0.agent,
            address=address,
            since=rank_0.since,
            command=_cut(command),
            launched=_cut(self.launched) if self.launched else None,
            peer_timeout=spec.peer_timeout,
            stall_timeout=spec.stall_limit,
            stall_timeout_is_default=spec.stall_timeout is not None and "stall_timeout" not in spec.sources,
            resumes=self.resumes,
            on_loss=spec.on_loss,
            rejoin_timeout=spec.rejoin_timeout,
            shrink_after=spec.shrink_after,
            on_loss_of_own_code=spec.on_loss_of_own_code,
        )


def _cut(command: str) -> str:
    return command if len(command) <= LONGEST_COMMAND else f"{command[:LONGEST_COMMAND]} ..."
