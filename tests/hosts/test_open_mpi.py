"""Ranks that a real mpirun starts, on one host and by ssh on several, find each other and explain their end."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.hosts.conftest import SshInto
from tests.hosts.hosts import Host, run
from tests.hosts.sshd import SshHosts

pytestmark = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (on Debian: apt-get install openmpi-bin)")

# Without torch, which takes each rank of mpirun 2 s of a core to load. Rank 1 fails once rank 0 has spoken.
FAILS = """
import os, pathlib, sys, time

sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
sys.stdout.flush()
spoken = pathlib.Path(__file__).with_name("spoken")
if os.environ["RANK"] == "1":
    while not spoken.exists():
        time.sleep(0.02)
    raise ValueError("the file of rank 1 is damaged")
spoken.touch()
time.sleep(60)
"""
WAITS = """
import os, sys, time

sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
sys.stdout.flush()
time.sleep(60 if "wait" in sys.argv else 0)
"""
# The tests may run as root on a machine with fewer cores than ranks, which mpirun refuses without being told.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
RUN = (sys.executable, "-m", "ddp_manual", "run")
MET = re.compile(r"listening at (\S+):(\d+)")


@pytest.fixture
def program(tmp_path: Path) -> list[object]:
    """What mpirun starts: ranks that meet, say their number and end, or ``wait``."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    return [*RUN, "--no_python", sys.executable, script]


def over(reached: SshHosts, *hosts: Host) -> list[str]:
    """The words with which mpirun starts a rank on each of these hosts."""
    of_ssh = ["--mca", "plm_rsh_args", f"-F {reached.config} -o BatchMode=yes"]
    return [*MPIRUN, *of_ssh, "--host", ",".join(f"{host.name}:1" for host in hosts), "-n", str(len(hosts))]


def wait_until_gone(words: str, timeout: float = 10) -> None:
    """Wait until no process of this machine, thus of no host, has ``words`` in its command."""
    deadline = time.monotonic() + timeout
    while left := run("pgrep", "-f", "-a", "--", words, check=False).stdout.splitlines():
        if time.monotonic() > deadline:
            pytest.fail(f"still there after {timeout} s: {left}")
        time.sleep(0.1)


def test_two_mpiruns_on_one_host_do_not_meet_each_other_and_end_their_ranks_also_when_they_are_killed(
    start: Start, program: list[object]
) -> None:
    jobs = [start(*MPIRUN, "-n", 2, *program, "wait") for _ in range(2)]
    for job in jobs:
        job.wait_for("rank 0 of 2")
        job.wait_for("rank 1 of 2")
    places = [MET.search(job.err) for job in jobs]
    assert all(place and place[1] == "127.0.0.1" for place in places)
    assert len({place[2] for place in places if place}) == 2
    for job, number in zip(jobs, (signal.SIGTERM, signal.SIGKILL), strict=True):
        job.process.send_signal(number)
    wait_until_gone(str(program[-1]))


def test_where_mpiruns_host_has_no_rank_rank_0_says_what_to_type_and_that_works(
    ssh_into: SshInto, program: list[object]
) -> None:
    reached = ssh_into(3)
    login, first, second = reached.hosts
    words = over(reached, first, second)
    job = login.start(*words, *program)
    assert job.wait() == 2
    assert (
        f"error[bad-option]: rank 0 runs on {first.name}, and the other ranks look for it on mpirun's host" in job.err
    )
    assert f"or, for any program: mpirun -x MASTER_ADDR={first.name} ..." in job.err
    job = login.start(*words, "-x", f"MASTER_ADDR={first.name}", *program)
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_ranks_meet_on_mpiruns_host_in_any_order_of_hosts_and_a_failing_ranks_reason_comes_before_mpiruns_words(
    ssh_into: SshInto, tmp_path: Path
) -> None:
    reached = ssh_into(2)
    first, second = reached.hosts
    (tmp_path / "fails.py").write_text(FAILS)
    job = first.start(*over(reached, second, first), *RUN, "--no_python", sys.executable, tmp_path / "fails.py")
    assert job.wait() in (1, 14)  # of the failing rank, or of the other one, whichever mpirun saw end first
    assert sorted(job.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    place = MET.search(job.err)
    assert place and place[1] == first.address
    assert f"master_addr {first.address} (from OMPI_MCA_orte_hnp_uri)" in job.err
    said = job.err
    explained = [
        found.start() for found in re.finditer(r"error\[peer-lost\]: rank 1 \(hostB, pid \d+\) is gone: ", said)
    ]
    assert len(explained) == 2 and "its worker exited with code 1 without a word" in said
    assert explained[-1] < said.index("mpirun detected that one or more processes exited")
    assert "--rank " not in said
    wait_until_gone(str(tmp_path / "fails.py"))


def test_nothing_is_left_on_any_host_however_mpirun_is_ended(ssh_into: SshInto, program: list[object]) -> None:
    reached = ssh_into(2)
    jobs = [reached.hosts[0].start(*over(reached, *reached.hosts), *program, "wait") for _ in range(3)]
    for job in jobs:
        job.wait_for("rank 0 of 2")
        job.wait_for("rank 1 of 2")
    for job, number in zip(jobs, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), strict=True):
        job.process.send_signal(number)
    for job in jobs:
        assert job.wait(20) != 0
    wait_until_gone(str(program[-1]))
