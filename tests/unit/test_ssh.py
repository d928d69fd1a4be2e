"""What ``launch --hosts`` refuses, what it reads from ssh's words, and what it passes on, without a session."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ddp_manual import signal_handlers
from ddp_manual.cli import main as cli
from ddp_manual.environment import command_line, machine, user_variables, variables_for_a_rank
from ddp_manual.launch import several_hosts
from ddp_manual.launch.session_messages import Order, read_from_launcher
from ddp_manual.launch.ssh_session import NO_FOLDER, Remote, why_not
from ddp_manual.launch.this_host import Ranks, prepared
from ddp_manual.wire import encode_local
from tests.conftest import Start

REMOTE = Remote(ssh=["ssh", "-F", "my config", "-p", "2222"], folder="/work/here", python="/opt/python")
LAUNCH = [sys.executable, "-m", "ddp_manual", "launch", "--hosts"]
PLAIN = Remote(ssh=None, folder="/work", python="/opt/python")


@pytest.mark.parametrize(
    ("code", "said", "cause", "remedy"),
    [
        # As OpenSSH 9.2 says it. Other hosts that are not ready: tests/hosts/test_ssh.py.
        (255, "ssh: connect to host b port 22: Connection refused", "no sshd listens there", "start sshd there"),
        (255, "Connection timed out during banner exchange", "it does not answer", "firewall"),
        (255, "Connection to b closed by remote host.", "its sshd has ended the connection", "who ended its sshd"),
        (255, "root@b: Permission denied (publickey).", "it does not accept your key", "ssh-copy-id -F 'my config'"),
        (255, "kex_exchange_identification: read: odd", "ssh has ended: kex_exchange", "2222 b true"),
        (NO_FOLDER, "", "it has no folder /work/here", "rsync -a -e 'ssh -F '"),
        (127, "sh: 1: exec: /opt/python: not found", "it has no Python at /opt/python", "--remote_python"),
        (1, "/opt/python: No module named ddp_manual", "/opt/python there has no ddp_manual", "pip install"),
        (2, "error[bad-option]: No such command 'hosted'", "its ddp_manual is too old", "install version"),
        (137, "", "its agents were ended by SIGKILL", "2222 b dmesg"),
        (-15, "", "ssh on this machine was ended by SIGTERM", "dmesg"),
        (1, "ImportError: odd", "its Python has ended with exit code 1: ImportError: odd", "log in"),
    ],
)
def test_each_end_of_a_session_has_a_cause_and_a_remedy_with_the_ssh_that_was_given(
    code: int, said: str, cause: str, remedy: str
) -> None:
    found = why_not("b", REMOTE, code, f"{said}\n")
    assert cause in found[0] and remedy in found[1]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("#!/bin/sh\nprintf '\\036ddp-manual {\"type\": 1}\\n'; exec sleep 60\n", "its ddp_manual is another version"),
        ("#!/not/there\n", "next: a: correct --ssh"),
    ],
)
def test_a_host_that_speaks_otherwise_and_an_ssh_that_cannot_be_started_are_told_apart(
    lines: str, says: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text(lines)
    (tmp_path / "ssh").chmod(0o755)
    run = start(*LAUNCH, "a:1", "--ssh", tmp_path / "ssh", "--no_python", "true")
    assert run.wait(20) == 10 and says in run.err, run.err


def test_without_options_of_ssh_the_remedies_are_as_short_as_they_can_be() -> None:
    assert why_not("me@b", PLAIN, NO_FOLDER, "")[1].splitlines()[1] == "  rsync -a ./ me@b:/work/"
    assert why_not("b", PLAIN, 255, "Permission denied")[1].splitlines()[1] == "  ssh-copy-id b"
    assert why_not("me@fe80::1", PLAIN, NO_FOLDER, "")[1].splitlines()[1] == "  rsync -a ./ 'me@[fe80::1]:/work/'"
    assert "~/.ssh/config" in why_not("b", PLAIN, 255, "Could not resolve hostname")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--hosts a:2 --nproc 2 x.py", "--nproc and --hosts exclude each other"),
        ("--hostfile f --node_rank 1 x.py", "--node_rank and --hostfile exclude each other"),
        ("--hostfile /dev/null x.py", "--hostfile /dev/null names no host"),
        ("--nproc 2 --num_processes 4 x.py", "--num_processes 4 cannot say how many ranks each machine has"),
        ("--nnodes 2 --num_processes 3 x.py", "and there are 2 machines"),
        ("--nproc 2 --run_dir= x.py", "--run_dir is empty"),
        ("--nproc 2 --remote_dir / x.py", "--remote_dir needs --hosts or --hostfile"),
        ("--hosts a:2 --remote_dir ~me/x x.py", "--remote_dir ~me/x cannot be found"),
        ("--hosts a:2 --export NOT_SET_ANYWHERE x.py", "--export NOT_SET_ANYWHERE is not set here"),
    ],
)
def test_options_that_cannot_be_meant_together_are_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["launch", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_dry_run_prints_what_would_be_run_on_each_host_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts", "a:2,me@b:1", "--remote_dir", "~/my run", "--remote_python", "/opt/python", "--dry_run"]
    assert cli.run(["launch", *words, "--export", "WORD=some word,API_KEY=secret", "--", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a: ranks 0-1\n  ssh -o BatchMode=yes ") and "\nme@b: rank 2\n" in out
    assert 'cd "$HOME"' in out and "exec /opt/python -m ddp_manual hosted" in out
    assert out.endswith("over standard input: --epochs 3\nvariables: 'WORD=some word' 'API_KEY=<hidden>'\n")


def test_ssh_copy_id_gets_only_options_that_it_has() -> None:
    for ssh_typed, options in {
        "ssh -J jump -v -l me": "-o ProxyJump=jump -o User=me ",
        "ssh -4Ai key -oPort=2": "-i key -o Port=2 ",
        "tsh ssh --proxy=x": "",
    }.items():
        _, remedy = why_not("b", Remote.of(ssh_typed, None, None), 255, "Permission denied")
        assert f"\n  ssh-copy-id {options}b\n" in remedy


@pytest.mark.parametrize(("folder", "found", "copied"), [("~", "", "."), ("~/", "", "."), ("~/a b", "a b", "a b")])
def test_the_remote_folder_may_be_below_the_home_of_each_host(
    folder: str, found: str, copied: str, tmp_path: Path
) -> None:
    (tmp_path / "home" / found).mkdir(parents=True)
    (tmp_path / "pwd").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "pwd").chmod(0o755)
    remote = Remote.of(None, folder, str(tmp_path / "pwd"))
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    said = subprocess.run(remote.command("localhost"), env=environment, capture_output=True, text=True, check=True)
    assert Path(said.stdout.strip()) == tmp_path / "home" / found
    assert shlex.split(why_not("b", remote, NO_FOLDER, "")[1].splitlines()[1])[-1] == f"b:{copied}/"


def order_of(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> Order:
    """What ``launch`` tells the second of the hosts a and b."""
    found: list[several_hosts.HostedLaunch] = []
    words = ["launch", "--hosts", "a:1,b:1", *typed]
    monkeypatch.setattr(command_line, "typed_command", lambda: (["ddp-manual"], words))
    monkeypatch.setattr(several_hosts.HostedLaunch, "run", lambda launched: found.append(launched) or 0)
    assert cli.run(words) == 0
    read = read_from_launcher(encode_local(found[0].parts[1].order()).decode())
    assert isinstance(read, Order)
    return read


def test_every_host_has_the_folder_that_the_command_to_go_on_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = map(str, itertools.count())  # so that a host that chooses a name itself chooses another one
    monkeypatch.setattr(time, "strftime", lambda form: f"20260101-{next(seconds):0>6}")
    monkeypatch.chdir(tmp_path)
    order = order_of(["--", "--dataset", "synthetic"], monkeypatch)
    job = prepared(order.job, order.hosts)
    folder = Path(str(job.run_dir))
    assert folder.is_dir()
    assert f"--run_dir {folder} -- --dataset synthetic --resume auto" in job.go_on
    with Ranks(job, order.hosts, ThreadPoolExecutor(1)).able_to_start():
        pass
    assert not folder.exists()


@pytest.mark.parametrize("after", [["--no_python", "true", "--export", "its own"], ["--", "--dataset", "synthetic"]])
def test_the_command_to_go_on_names_exported_variables_without_their_values(
    after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(user_variables.TOKEN_VARIABLE, "hidden")
    order = order_of(["--export", "A=hidden,more,B=2", "--export=API_KEY=hidden", *after], monkeypatch)
    token = {user_variables.TOKEN_VARIABLE: "hidden"}
    assert order.variables == {"A": "hidden,more", "B": "2", "API_KEY": "hidden", **token}
    go_on = order.job.go_on
    assert go_on.startswith("ddp-manual launch --export A,B,API_KEY --hosts a:1,b:1 ") and "hidden" not in go_on
    assert ("--export 'its own'" in go_on) == ("its own" in after)


def test_the_token_of_a_host_stays_where_none_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(user_variables.TOKEN_VARIABLE, raising=False)
    assert user_variables.exported(["A=1,2,B=3"]) == {"A": "1,2", "B": "3"}
    monkeypatch.setenv(user_variables.TOKEN_VARIABLE, "of the profile")
    variables_for_a_rank.put({})
    assert os.environ[user_variables.TOKEN_VARIABLE] == "of the profile"
    assert user_variables.exported([]) == {user_variables.TOKEN_VARIABLE: "of the profile"}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rank_0_can_listen_on_the_port_that_its_host_reserved_in_either_family(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        machine.reserved_port("") as port,
        socket.create_server((address, port), family=family),
        socket.socket(family) as another,
        pytest.raises(OSError, match="in use"),
    ):
        another.bind((address, port))


def test_arguments_and_variables_arrive_as_they_are_however_long_they_are(start: Start, tmp_path: Path) -> None:
    odd = ["a\tb", "\u202e\x1b[1m", "line\n\tline", os.fsdecode(b"\xff")]
    long = {f"LONG_{number}": "x" * 100_000 for number in range(3)}
    (tmp_path / "found.py").write_text(
        "import json, os, sys\n"
        "found = [sys.argv[2:], os.environ['ODD'], os.environ['MASTER_ADDR'], len(os.environ['LONG_2'])]\n"
        "open(sys.argv[1], 'w').write(json.dumps(found))\n"
    )
    program = [sys.executable, tmp_path / "found.py", tmp_path / "found", *odd]
    exported = ["--export", f"{','.join(long)},ODD={odd[2]}{odd[3]}"]
    run = start(*LAUNCH, "localhost:1", *exported, "--no_python", *program, **long)
    assert run.wait(30) == 0, run.err
    assert json.loads((tmp_path / "found").read_text()) == [odd, odd[2] + odd[3], "127.0.0.1", 100_000]


def test_a_program_on_a_host_that_goes_down_has_the_time_to_save_though_the_connection_ends(
    start: Start, tmp_path: Path
) -> None:
    """Longer than a host has whose connection is merely cut."""
    saved = tmp_path / "saved"
    saves = f"trap 'trap \"\" TERM; echo asked; sleep 6; touch {saved}; exit' TERM; echo ready; sleep 60 & wait"
    run = start(*LAUNCH, "localhost:1", "--no_python", "sh", "-c", saves)
    run.wait_for("ready")
    launcher = psutil.Process(run.process.pid)
    on_host = launcher.children(recursive=True)
    for process in on_host:
        process.terminate()
    run.wait_for("asked")
    time.sleep(signal_handlers.ONCE_WITHIN)  # sooner another signal would count as the same
    launcher.kill()
    left = psutil.wait_procs(on_host, timeout=15)[1]
    for process in left:
        process.kill()
    assert left == [] and saved.exists()


def test_ctrl_c_ends_at_once_while_a_host_has_not_answered_yet(start: Start, tmp_path: Path) -> None:
    began = tmp_path / "began"
    # In place of an ssh that waits for a host.
    ssh = f"sh -c 'touch {began}; exec sleep 30'"
    run = start(*LAUNCH, "a:1", "--ssh", ssh, "--no_python", "true")
    while not began.exists():
        assert run.process.poll() is None, run.err
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(8) == 130
    assert "before any rank was started" in run.err
