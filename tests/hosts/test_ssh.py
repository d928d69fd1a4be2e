"""``launch --hosts``: ranks of two hosts from one terminal, through real sshds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ddp_manual
from tests.conftest import ALL_DIGITS, REPOSITORY, RankProcess, wait_until
from tests.hosts.conftest import SshInto
from tests.hosts.hosts import Host
from tests.hosts.sshd import SshHosts

PLAIN = Path("tests/scripts/plain_ddp.py").resolve()
# In its place, for a run of a few seconds: the first step of an optimizer takes each rank 2 s.
MEETS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {total.item():.0f}: met", flush=True)
dist.destroy_process_group()
"""
# A rank that loads no torch, and starts a process that the end of its rank does not end.
SLEEPS = '#!/bin/sh\nsetsid sleep 300 >/dev/null 2>&1 &\necho "rank $RANK sleeps $WORD"\nsleep 300\n'
# Seconds from a fault until no process is left on any host.
GONE_WITHIN = 10.0


def command(reached: SshHosts, hosts: str, *words: object) -> list[object]:
    return [sys.executable, "-m", "ddp_manual", "launch", "--hosts", hosts, "--ssh", reached.command, *words]


def processes(*hosts: Host) -> dict[int, str]:
    """The commands of all processes on these hosts, except those that sshd is itself."""
    found = {}
    for pid in (pid for host in hosts for pid in host.namespace.pids()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if line and "sshd" not in line.split()[0]:  # without words: it has ended
            found[int(pid)] = line
    return found


def wait_until_gone(reached: SshHosts) -> float:
    """Wait until nothing is left on any host; return how many seconds it took."""
    began = time.monotonic()
    while left := processes(*reached.hosts):
        if time.monotonic() - began > GONE_WITHIN:
            pytest.fail(f"still there after {GONE_WITHIN:.0f} s: {left}")
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.soak
def test_a_script_runs_on_two_ipv6_hosts_and_the_token_is_on_no_command_line(ssh_into: SshInto, tmp_path: Path) -> None:
    reached = ssh_into(2, ipv6=True)
    (tmp_path / "meets.py").write_text(MEETS)
    script = PLAIN if ALL_DIGITS else tmp_path / "meets.py"
    run = reached.hosts[0].start(*command(reached, "a:1,b:1", script), DDP_MANUAL_TOKEN="very-secret")
    run.wait_for("rank 1 of 2 on hostB")
    assert not any("very-secret" in line for line in processes(*reached.hosts).values())
    assert run.wait(60) == 0, run.err
    for rank, host in enumerate("ab"):
        assert f"[{host}] [rank {rank}] rank {rank} of 2: " in run.out
    wait_until_gone(reached)


Fault = Callable[[RankProcess, SshHosts], None]
# What happens, and what the launcher says of it with which exit code. Agents that are killed and a cut: see below.
FAULTS: dict[str, tuple[Fault, str, int]] = {
    "Ctrl-C": (lambda run, to: run.process.send_signal(signal.SIGINT), "stopped by Ctrl-C", 130),
    "kill -9 of the launcher": (lambda run, to: run.process.send_signal(signal.SIGKILL), "", -9),
    "kill -9 of b's sshd session": (lambda run, to: to.hosts[1].kill("sshd: root@notty"), "and rank 1 with it", 14),
}


@pytest.mark.timeout(180)
def test_nothing_is_left_on_any_host_10_s_after_a_death(ssh_into: SshInto, tmp_path: Path) -> None:
    reached = ssh_into(2)
    sleeps = tmp_path / "sleeps.sh"
    sleeps.write_text(SLEEPS)
    sleeps.chmod(0o755)
    for name, (happen, words, code) in FAULTS.items():
        run = reached.hosts[0].start(*command(reached, "a:1,b:1", "--export", "WORD=well", "--no_python", sleeps))
        for rank in range(2):
            run.wait_for(f"rank {rank} sleeps well")
        happen(run, reached)
        print(f"{name}: {wait_until_gone(reached):.1f} s, {run.wait(1)}\n{run.err}")
        assert run.wait(1) == code, f"{name}: {run.err}"
        assert words in run.err, name


# A rank that works until the file is there, and says which start of the programs this is. SIGUSR1 does not end it.
WORKS = """#!/bin/sh
trap 'echo "rank $RANK saves"' USR1
echo "rank $RANK works: $TORCHELASTIC_RESTART_COUNT"
until [ -e "$1" ]; do sleep 0.1; done
"""


@pytest.fixture
def works(tmp_path: Path) -> Path:
    works = tmp_path / "works.sh"
    works.write_text(WORKS)
    works.chmod(0o755)
    return works


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_lost_host_gets_another_session_or_its_rank_is_typed_elsewhere_where_the_seats_of_lost_ranks_are_kept(
    ssh_into: SshInto, works: Path, tmp_path: Path
) -> None:
    """A cut is noticed although the user has a connection to b that sessions may share, and nothing is left behind."""
    reached = ssh_into(2)
    a, b = reached.hosts
    reached.config.write_text(f"{reached.config.read_text()}  ControlPath {tmp_path / '%n'}\n")
    shared, done = a.start(*reached.command.split(), "-M", "-N", "b"), tmp_path / "done"
    wait_until((tmp_path / "b").exists)
    words = ["--on_loss", "wait", "--peer_timeout", 3, "--no_python", works, done]
    run = a.start(*command(reached, "a:1,b:1", *words))
    run.wait_for("rank 1 works: 0")
    b.kill("works.sh", parent=True)  # and with them the session
    run.wait_for("and rank 1 with it: its agents were ended by SIGKILL", 10)
    run.wait_for("rank 1 works: 1", 30)
    run.wait_for("rank 0 works: 1")
    b.cut_from(a)
    run.wait_for("it does not answer any more", 15)
    run.wait_for("has been silent for ")
    (typed,) = set(re.findall(r"^(?:.* )?(\S+ -m ddp_manual run --world_size 2 --rank 1 .*)$", run.err, re.MULTILINE))
    newcomer = a.start(*shlex.split(typed))
    run.wait_for("rank 0 works: 2", 30)
    done.touch()
    assert newcomer.wait(20) == 0, newcomer.err
    assert run.wait(20) == 0, run.err
    shared.kill()
    wait_until_gone(reached)


def test_sigusr1_reaches_all_hosts_and_all_ranks_start_again_after_a_worker_was_killed_on_another_host(
    ssh_into: SshInto, works: Path, tmp_path: Path
) -> None:
    reached, done = ssh_into(2), tmp_path / "done"
    (tmp_path / "hosts.txt").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "token").write_text("very-secret")
    meeting = ["--hostfile", tmp_path / "hosts.txt", "--ssh", reached.command, "--token_file", tmp_path / "token"]
    words = [*meeting, "--remote_dir", tmp_path, "--max_restarts", 1, "--no_python", works, done]
    run = reached.hosts[0].start(sys.executable, "-m", "ddp_manual", "launch", *words)
    for rank in range(2):
        run.wait_for(f"rank {rank} works: 0")
    assert not any("very-secret" in line for line in processes(*reached.hosts).values())
    run.process.send_signal(signal.SIGUSR1)
    for rank in range(2):
        run.wait_for(f"rank {rank} saves")
    reached.hosts[1].kill("works.sh")
    run.wait_for("restart 1 of 1 after error[peer-lost]")
    for rank in range(2):
        run.wait_for(f"rank {rank} works: 1")
    done.touch()
    assert run.wait(20) == 0, run.err
    wait_until_gone(reached)


# A host by its name, what is said of it, and a part of the remedy.
NOT_READY = {
    "silent": ("it does not answer: ", "whether a firewall drops its ssh port"),
    "nameless": ("its name has no address: ", "give its HostName in /"),
    "closed": ("it answers, but no sshd listens there: ", "start sshd there"),
    "unknown": ("its host key is not known", "accept its key: ssh -F /"),
    "changed": ("it has another host key than before", "ssh-keygen -f "),
    "nokey": ("it does not accept your key: ", "ssh-copy-id -F /"),
    "nofolder": ("it has no folder /", "rsync -a -e 'ssh -F /"),
    "nopython": ("it has no Python at /", "give --remote_python"),
    "older": ("its ddp_manual is version 0.0.9, here it is ", "install version "),
    "differs": ("its script.py is not the same as here", "copy it: rsync -a -e 'ssh -F /"),
}


def test_each_host_that_is_not_ready_is_named_with_the_remedy_before_anything_starts(
    ssh_into: SshInto, tmp_path: Path
) -> None:
    reached = ssh_into(2)
    first, second = reached.hosts
    folder, script = tmp_path / "home" / "work", tmp_path / "home" / "work" / "script.py"
    folder.mkdir(parents=True)
    script.write_text("print('it has started')\n")
    (tmp_path / "another.py").write_text("print('it has started, too')\n")
    shutil.copytree(REPOSITORY / "ddp_manual", tmp_path / "older" / "ddp_manual")
    package = tmp_path / "older" / "ddp_manual" / "__init__.py"
    package.write_text(package.read_text().replace(ddp_manual.__version__, "0.0.9"))
    for name, settings in {
        "silent": {"HostName": first.network.silent},
        "nameless": {"HostName": "no.such.host.invalid"},
        "closed": {"Port": 2},
        "unknown": {"HostKeyAlias": "unknown"},
        "changed": {"HostKeyAlias": f"[{first.address}]:2222"},
    }.items():
        reached.also_called(name, second, **settings)
    reached.also_serve("nofolder", second, f"mount -t tmpfs none {folder.parent}")
    reached.also_serve("nokey", second, f"mount --bind /dev/null {reached.authorized_keys}")
    reached.also_serve("nopython", second, f"mount --bind /dev/null {Path(sys.executable).resolve()}")
    reached.also_serve("older", second, PYTHONPATH=str(tmp_path / "older"))
    reached.also_serve("differs", second, f"mount --bind {tmp_path / 'another.py'} {script}")
    hosts = ",".join(f"{name}:1" for name in ("a", *NOT_READY))
    run = first.start(*command(reached, hosts, "script.py"), cwd=folder)
    assert run.wait(60) == 10
    wait_until_gone(reached)
    count = f"{len(NOT_READY)} of {len(NOT_READY) + 1} hosts"
    assert f"error[host-not-ready]: {count} cannot run their ranks: {', '.join(NOT_READY)}\n" in run.err
    lines = run.err.replace("\n          ", " ").splitlines()  # commands stand on lines of their own
    for name, (cause, remedy) in NOT_READY.items():
        assert f"{name}: {cause}" in run.err
        assert any(f"{name}: " in line and remedy in line for line in lines), name
    assert "has started" not in run.out


def test_rank_0_on_a_loopback_host_is_told_the_address_that_the_others_reach(ssh_into: SshInto, tmp_path: Path) -> None:
    reached = ssh_into(2)
    (tmp_path / "commands").mkdir()
    ssh = tmp_path / "commands" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/{reached.command} "$@"\n')
    ssh.chmod(0o755)
    words = [sys.executable, "-m", "ddp_manual", "launch", "--hosts", "localhost:1,b:1"]
    path = f"{ssh.parent}:{os.environ['PATH']}"
    run = reached.hosts[0].start(*words, "--no_python", "true", PATH=path)
    assert run.wait(60) == 2
    assert "error[bad-option]: localhost was reached at 127.0.0.1, where no other host reaches rank 0" in run.err
    assert f"next: give its address: --master_addr {reached.hosts[0].address}" in run.err


@pytest.mark.soak(only=True)
@pytest.mark.timeout(600)
def test_our_training_saves_on_a_signal_and_resumes_after_a_worker_was_killed_on_another_host(
    ssh_into: SshInto, digits: Path, tmp_path: Path
) -> None:
    reached = ssh_into(2)
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\n" if ALL_DIGITS else "a slots=1\nb slots=1\n")
    (tmp_path / "token").write_text("very-secret")
    meeting = ["--hostfile", tmp_path / "hosts.txt", "--ssh", reached.command, "--token_file", tmp_path / "token"]
    words = [*meeting, "--remote_dir", tmp_path, "--run_dir", "run", "--max_restarts", 1]
    training = ["--epochs", 1, "--data_dir", digits, "--log_every", 1, *([] if ALL_DIGITS else ["--batch_size", 10])]
    run = reached.hosts[0].start(sys.executable, "-m", "ddp_manual", "launch", *words, "--", *training)
    run.wait_for("] step ")
    assert not any("very-secret" in line for line in processes(*reached.hosts).values())
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("saved ")
    reached.hosts[1].kill("ddp_manual/worker")
    assert run.wait(500) == 0, run.err
    assert "restart 1 of 1 after error[peer-lost]" in run.err
    steps = re.findall(r"step (\d+)/", run.err)
    assert steps.count("1") == 1, "the second attempt has begun anew"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == (4 if ALL_DIGITS else 2)
    assert summary["final_test_accuracy"] >= (0.985 if ALL_DIGITS else 0.5)
    wait_until_gone(reached)


def test_a_rank_that_cannot_reach_rank_0_says_so_although_others_wait_silently(
    ssh_into: SshInto, tmp_path: Path
) -> None:
    reached = ssh_into(2)
    a, b = reached.hosts
    script = tmp_path / "sleeps.sh"
    script.write_text(SLEEPS)
    script.chmod(0o755)
    a.drop_from(b, 29777)
    launched = a.start(*command(reached, "a:1,b:2", "--master_port", 29777, "--no_python", script))
    launched.wait_for("no answer from", 20)
    assert "[b] [rank 1] no answer from" in launched.out + launched.err
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.wait() == 130
    assert "[b] [rank 2] no answer from" not in launched.out + launched.err
    wait_until_gone(reached)
