"""A real Slurm starts ranks on two nodes, by srun and by the shipped batch script."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ALL_DIGITS, REPOSITORY, SHORT, Start, wait_until
from tests.hosts.slurm import Slurm

DDP_MANUAL = (sys.executable, "-m", "ddp_manual")
LAUNCH = (*DDP_MANUAL, "launch", "--nproc", 2)
# Without torch: that ranks of two nodes reach each other is shown by the jobs that train.
NUMBERS = ("--no_python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"')
# A model that one of the nodes cannot make.
DAMAGED = """
import os
from torch import nn

def network():
    if os.uname().nodename == "n2":
        raise ValueError("the disk of n2 is damaged")
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""


class Job:
    """A job of the shipped batch script, whose runs are below ``folder``; ``array`` are options such as --array=0-1."""

    def __init__(self, slurm: Slurm, folder: Path, *options: object, array: tuple[object, ...] = ()) -> None:
        self.slurm, self.folder = slurm, folder
        for name in ("run_multi_gpu_train.py", "ddp_manual"):
            (folder / name).symlink_to(REPOSITORY / name)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = ["env", f"PATH={path}", "OMP_NUM_THREADS=1", "sbatch", "--parsable", f"--chdir={folder}", *array]
        self.id = slurm.run(*words, REPOSITORY / "scripts" / "slurm.sbatch", *options).stdout.strip()

    def output(self, element: str = "") -> str:
        path = self.folder / f"slurm-{self.id}{element}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, element: str = "", within: float = 120) -> str:
        """Wait until the output has this text, and return the output."""
        deadline = time.monotonic() + within
        while text not in (said := self.output(element)):
            assert time.monotonic() < deadline, f"no {text!r} in:\n{said}"
            time.sleep(0.05)
        return said

    def wait(self, within: float = 120) -> None:
        """Wait until the job is over."""
        deadline = time.monotonic() + within
        while self.slurm.run("squeue", "-h", "-j", self.id, check=False).stdout:
            assert time.monotonic() < deadline, self.slurm.run("squeue").stdout
            time.sleep(0.1)


def processes(slurm: Slurm) -> list[str]:
    """Return the programs that run on the nodes, without Slurm's own."""
    pids = [pid for host in slurm.nodes for pid in host.namespace.pids()]
    names = [Path(f"/proc/{pid}/comm") for pid in pids]
    return [name for path in names if path.exists() and not (name := path.read_text().strip()).startswith("slurm")]


@pytest.mark.timeout(240)
def test_srun_starts_each_rank_or_launch_once_on_each_node(slurm: Slurm, start: Start) -> None:
    # In this order, which no variable tells, rank 0 is not on the first host of the list n[1-2].
    in_order = ["srun", "-m", "arbitrary", "-w", "n2,n1", "-n2", *DDP_MANUAL, "run", *NUMBERS]
    ranks = start(*in_order, place=slurm.place)
    assert ranks.wait() == 2
    assert ranks.err.count("error[bad-option]: no variable says on which host rank 0 is") == 2
    assert "or, for any program: MASTER_ADDR=n2 srun ..." in ranks.err
    ranks = start(*in_order, place=slurm.place, MASTER_ADDR="n2")
    assert ranks.wait() == 0, ranks.err
    assert sorted(ranks.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    nodes = start("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, *NUMBERS, place=slurm.place)
    assert nodes.wait() == 0, nodes.err
    assert sorted(nodes.out.splitlines()) == [f"[rank {rank}] rank {rank} of 4" for rank in range(4)]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_element_of_an_array_is_requeued_before_its_time_is_up_and_goes_on_until_it_is_cancelled_and_leaves_nothing(
    slurm: Slurm, small_data: Path, tmp_path: Path
) -> None:
    training = [*SHORT, "--data_dir", small_data, "--epochs", 10_000]
    # The last element: its SLURM_JOB_ID is also the number of the array.
    job = Job(slurm, tmp_path, *training, array=("--array=1", "--signal=B:USR1@90"))
    element = f"{job.id}_1"
    job.wait_for("step 30/", "_1")
    if ALL_DIGITS:  # Slurm looks each 30 s whether a job has less than 90 + 30 s
        slurm.run("scontrol", "update", f"JobId={element}", "TimeLimit=2")
    else:
        slurm.run("scancel", "--batch", "--signal=USR1", element)
    job.wait_for("is requeued", "_1", within=180)
    slurm.run("scontrol", "update", f"JobId={element}", "TimeLimit=60")
    job.wait_for("going on after step", "_1")
    wait_until(lambda: "] step " in job.output("_1").rpartition("going on after step")[2])
    slurm.run("scancel", element)
    job.wait()
    lines = job.output("_1").splitlines()
    assert any(f"rank 0 has saved a checkpoint in runs/slurm-{element}/checkpoints" in line for line in lines[-20:])
    assert "stopped" in lines[-2], lines
    assert processes(slurm) == []


@pytest.mark.timeout(240)
def test_a_failing_ranks_reason_stands_last_in_the_jobs_output(slurm: Slurm, small_data: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.py").write_text(DAMAGED)
    job = Job(slurm, tmp_path, *SHORT, "--data_dir", small_data, "--model", "damaged:network")
    job.wait()
    assert "ValueError: the disk of n2 is damaged" in job.output().splitlines()[-1], job.output()
    assert processes(slurm) == []
