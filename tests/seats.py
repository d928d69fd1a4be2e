"""Ranks whose seats are kept (``--on_loss wait``): started by hand, lost in every way, and given back."""

from __future__ import annotations

import os
import re
import signal
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.conftest import RankProcess, Start, has_ended

# What rank 0 says once all ranks are there again.
BACK = re.compile(r"go on (?:after step|from the newest)")


class Kept:
    """The ranks of one run, each as its person's terminal sees it.

    Args:
        start_rank: starts one rank by hand.
        options: of every rank.
    """

    def __init__(self, start_rank: Start, world_size: int, *options: object) -> None:
        self._start_rank, self._world_size = start_rank, world_size
        self._options = ("--on_loss", "wait", *options)
        self.ranks = [self.type(rank) for rank in range(world_size)]

    def type(self, rank: int, *options: object) -> RankProcess:
        """Type one rank's command."""
        return self._start_rank(rank, self._world_size, *self._options, *options)

    def type_again(self, rank: int) -> RankProcess:
        """Type one rank's command again, once the process that was this rank has ended."""
        self.ranks[rank].wait(30)
        self.ranks[rank] = self.type(rank)
        return self.ranks[rank]

    def until_trained(self, step: int = 10) -> None:
        self.ranks[0].wait_for(f"[rank 0] step {step}/")

    def until_done(self, step: int) -> None:
        """Wait until some rank has done so many steps, or rank 0 has ended."""
        done = 0
        while done < step and self.ranks[0].process.poll() is None:
            time.sleep(0.005)
            for rank in self.ranks:
                with suppress(AssertionError, OSError):  # an agent that has only just begun, or has ended
                    done = max(done, steps_done(rank))

    def returns(self, rank: int) -> int:
        """How often this rank's terminal has said that all go on."""
        return len(BACK.findall(self.ranks[rank].err))

    def wait_for_return(self, rank: int, before: int, within: float = 60) -> None:
        """Wait until this rank's terminal says so once more than ``before``."""
        deadline = time.monotonic() + within
        while self.returns(rank) <= before:
            assert time.monotonic() < deadline, f"nobody went on; rank {rank} said:\n{self.ranks[rank].err}"
            if self.ranks[rank].process.poll() is not None and self.returns(rank) <= before:
                raise AssertionError(f"rank {rank} has ended:\n{self.ranks[rank].err}")
            time.sleep(0.01)

    def codes(self, within: float = 120) -> list[int]:
        return [rank.wait(within) for rank in self.ranks]


def worker_of(rank: RankProcess) -> int:
    """Return the pid of the process that trains: the child of the spare, which is the child of the agent."""
    return worker_below(rank.process.pid)


def worker_below(agent: int) -> int:
    workers = [worker for spare in psutil.Process(agent).children() for worker in spare.children()]
    alive = [worker.pid for worker in workers if not has_ended(worker.pid)]
    assert alive, f"agent {agent} has no worker"
    return alive[-1]


def steps_done(rank: RankProcess) -> int:
    """Return the steps that a rank's worker has done, as its agent's memory has them."""
    return steps_done_of(rank.process.pid)


def steps_done_of(agent: int) -> int:
    folder = Path(f"/proc/{agent}/fd")
    for descriptor in folder.iterdir():
        with suppress(OSError):
            if "ddp_manual state" in os.readlink(descriptor):
                with descriptor.open("rb") as memory:
                    return int(struct.unpack("<q", memory.read(8))[0])
    raise AssertionError(f"agent {agent} holds no memory")


def lose(kept: Kept, rank: int, how: str) -> None:
    """Lose a rank: ``worker`` and ``abort`` end its worker, ``agent`` its agent, ``both`` both at once, and ``stop``
    freezes its worker."""
    process = kept.ranks[rank]
    if how == "agent":
        os.kill(process.process.pid, signal.SIGKILL)
    elif how == "both":
        os.killpg(process.process.pid, signal.SIGKILL)
    else:
        number = {"worker": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}[how]
        os.kill(worker_of(process), number)


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the model's values without the batch statistics, which are those of one rank's own samples."""
    state = torch.load(run_dir / "model.pt", weights_only=True)
    return {name: value for name, value in state.items() if "running" not in name}


def differing(one: Path, other: Path) -> Sequence[str]:
    """Return the parameters that are not the same bit for bit in two runs."""
    mine, theirs = parameters(one), parameters(other)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]
