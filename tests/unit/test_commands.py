"""``commands``: the lines to type in the terminals of several hosts, and the panes of tmux that type them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_manual import cli, launchers
from ddp_manual.errors import BadOption
from ddp_manual.tools import tmux
from ddp_manual.tools.tmux import Pane
from tests.conftest import Start

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "typed_command", lambda: (["ddp-manual"], ["commands"]))


def printed(capsys: Output, *words: str) -> str:
    assert cli.run(["commands", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: Output, *words: str) -> str:
    assert cli.run(["commands", *words]) == 2
    return capsys.readouterr().err


def test_the_lines_are_grouped_by_host_with_rank_0_first(capsys: Output) -> None:
    assert printed(capsys, "--hosts", "hostA:2,me@hostB", "train.py", "--lr", "0.1") == (
        "# Type each line in a terminal of its own, in the folder of train.py. Any order will do.\n"
        "# Alike on each host: ddp_manual, Python's minor version, torch, train.py and what it imports.\n"
        "# Open between the hosts: port 29500 of hostA, and on each the ports of net.ipv4.ip_local_port_range.\n"
        "\n"
        "# hostA\n"
        "ddp-manual run --world_size 3 --rank 0 --master_addr hostA train.py --lr 0.1\n"
        "ddp-manual run --world_size 3 --rank 1 --master_addr hostA train.py --lr 0.1\n"
        "\n"
        "# me@hostB\n"
        "ddp-manual run --world_size 3 --rank 2 --master_addr hostA train.py --lr 0.1\n"
    )


def test_on_one_host_nothing_is_said_about_others(capsys: Output) -> None:
    assert printed(capsys, "--hosts", "localhost:1", "--", "--epochs", "1") == (
        "# Type each line in a terminal of its own. Any order will do.\n"
        "\n"
        "# localhost\n"
        "ddp-manual train --world_size 1 --rank 0 --master_addr localhost --epochs 1\n"
    )


def test_a_hostfile_says_the_same(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("hostA slots=2  # with the big disk\nme@hostB\n")
    from_file = printed(capsys, "--hostfile", str(tmp_path / "hosts"), "train.py")
    assert from_file == printed(capsys, "--hosts", "hostA:2,me@hostB", "train.py")


def test_each_word_reaches_the_rank_as_it_was_typed(capsys: Output) -> None:
    odd = ["a b", "it's", "$HOME", "c;", "--api_key", "secret", "--rank=5", "-m", "*", ""]
    options = ["--master_port", "3000", "--token_file", "my token", "--listen_addr", "0.0.0.0", "--allow_mismatch"]
    options += ["--run_dir", "~/runs", "--may_differ", "seed,name", "--join_timeout", "60"]
    lines = printed(capsys, "--hosts", "[fe80::1]:2", *options, "-m", "package.train", *odd).splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("ddp-manual")]
    assert [words[-len(odd) - 2 :] for words in commands] == [["-m", "package.train", *odd]] * 2
    for rank, words in enumerate(commands):
        read = cli.run_program.make_context("run", words[2:]).params
        assert {name: value for name, value in read.items() if value} == {
            "world_size": 2,
            **({"rank": 1} if rank else {"listen_addr": "0.0.0.0"}),
            "master_addr": "fe80::1",
            "master_port": 3000,
            "token_file": "my token",
            "allow_mismatch": True,
            "run_dir": "~/runs",
            "may_differ": "seed,name",
            "join_timeout": 60.0,
            "as_module": True,
            "script": ("package.train", *odd),
        }


def test_a_token_is_named_and_never_shown(capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDP_MANUAL_TOKEN", "of-the-run")
    text = printed(capsys, "--hosts", "a,b", "train.py")
    assert "the token in DDP_MANUAL_TOKEN" in text and "of-the-run" not in text
    error = refused(capsys, "--hosts", "localhost", "--tmux", "train.py")
    assert "--tmux does not pass DDP_MANUAL_TOKEN on" in error and "--token_file FILE" in error
    assert "the token in secret.txt" in printed(capsys, "--hosts", "a,b", "--token_file", "secret.txt", "train.py")


def test_json_has_the_same_lines(capsys: Output) -> None:
    found = json.loads(printed(capsys, "--hosts", "hostA,hostB", "--json", "--", "--dataset", "folder:my pictures"))
    lines = printed(capsys, "--hosts", "hostA,hostB", "--", "--dataset", "folder:my pictures").splitlines()
    assert [rank["command"] for rank in found["ranks"]] == [line for line in lines if line.startswith("ddp-manual")]
    assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, "hostA"), (1, "hostB")]
    assert [shlex.join(rank["words"]) for rank in found["ranks"]] == [rank["command"] for rank in found["ranks"]]
    assert found["world_size"] == 2 and found["master_addr"] == "hostA" and found["tmux"] is None


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.py"], "no hosts were given", "--hosts a:4,b:4"),
        (["train.py", "--lr", "1"], "no hosts were given", "--hosts a:4,b:4"),
        (["train.py", "--hosts", "a"], "commands was given no hosts before train.py", "put --hosts a before train.py"),
        (["--hosts", "a,b:0", "train.py"], "'0' is not a number of ranks", "leave the host out"),
        (["--hosts", "localhost,b", "train.py"], "b cannot reach rank 0 at localhost", "--master_addr"),
        (["--hosts", "a,b", "--master_port", "0", "train.py"], "rank 1 cannot join at port 0", "--master_port"),
        (["--hosts", "a,b", "--", "--rank", "1"], "--rank cannot come after the --", "leave --rank out"),
        (["--hosts", "a,b", "--", "--run_dir", "x"], "--run_dir cannot come after the --", "before the --"),
        (["--hosts", "a,b", "--", "--epoch", "1"], "No such option '--epoch'", "--help"),
        (["--hosts", "a,b", "--epochs", "1"], "No such option", "--help"),
        (["--hosts", "a,b", "--may_differ", "seed", "--", "--seed", "1"], "--may_differ is for a script", "leave"),
        (["--hosts", "a,b", "-m"], "Missing argument SCRIPT", "--help"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_typed(
    words: list[str], what: str, hint: str, capsys: Output
) -> None:
    error = refused(capsys, *words)
    assert what in error and hint in error


@pytest.fixture
def tmux_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux server of the test's own, without anybody's configuration; it ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux not found (on Debian and Ubuntu: apt-get install tmux)")
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)


def asked(*arguments: str) -> list[str]:
    return subprocess.run(["tmux", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def panes_of(session: str, form: str) -> list[str]:
    return asked("list-panes", "-s", "-t", f"={session}", "-F", form)


def wait_until_dead(session: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while panes_of(session, "#{pane_dead}") != ["1"] * count:
        assert time.monotonic() < deadline, panes_of(session, "#{@label} #{pane_dead}")
        time.sleep(0.02)


def on_screen(pane: str) -> str:
    return "\n".join(asked("capture-pane", "-p", "-J", "-t", pane))


@pytest.mark.usefixtures("tmux_server")
def test_panes_show_each_word_as_it_is_and_stay_after_the_end(tmp_path: Path) -> None:
    words = ["a b", "c;", ";", "$HOME", "it's", "#{pane_id}", "\\;", ""]
    # The first one ends before tmux could be told anything else.
    panes = [Pane("rank 0", ("false",))]
    panes += [Pane(f"rank {n}", (sys.executable, "-c", "import sys; print(sys.argv)", *words)) for n in range(1, 20)]
    session = tmux.open_session({"one": panes[:16], "two": panes[16:]}, tmp_path)
    wait_until_dead(session, 20)
    assert panes_of(session, "#{window_name}") == ["one"] * 16 + ["two"] * 4
    assert panes_of(session, "#{@label}") == [f"rank {number}" for number in range(20)]
    assert panes_of(session, "#{pane_start_path}") == [str(tmp_path)] * 20
    [last] = asked("display-message", "-p", "-t", f"={session}:two.{{bottom-right}}", "#{pane_id}")
    assert repr(["-c", *words]) in on_screen(last).replace("\n", "")
    border = asked("show-options", "-w", "-v", "-t", f"={session}:two", "pane-border-format")
    shown = asked("display-message", "-p", "-t", last, border[0])
    # tmux does not always learn the exit code.
    assert shown[0] in (" rank 19 (ended with exit code 0) ", " rank 19 (ended) ")
    # So is another one, and the first keeps its panes.
    assert tmux.open_session({"one": panes[:1]}, tmp_path) == f"{session}-2"
    assert len(panes_of(session, "x")) == 20


@pytest.mark.usefixtures("tmux_server")
def test_a_session_that_cannot_be_completed_is_closed(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="tmux did not open the panes") as caught:
        tmux.open_session({"one": [Pane("short", ("cat",)), Pane("long", ("echo", "x" * 100_000))]}, tmp_path)
    assert "tmux split-window: command too long" in caught.value.why
    # The server may still be ending.
    assert not subprocess.run(["tmux", "list-sessions"], capture_output=True).stdout


@pytest.mark.usefixtures("tmux_server")
def test_ranks_in_panes_leave_their_reasons_to_read(start: Start, tmp_path: Path) -> None:
    hosts = f"localhost,{launchers.host_name()}"
    env = {name: os.environ[name] for name in ("TMUX_TMPDIR", "HOME")}
    command = [sys.executable, "-m", "ddp_manual", "commands", "--hosts", hosts, "--master_addr", "127.0.0.1"]
    opened = start(*command, "--tmux", "missing.py", "a b", fresh=True, cwd=tmp_path, **env)
    assert opened.wait() == 0, opened.err
    assert opened.out.splitlines()[0] == "see them:  tmux attach -t ddp-manual"
    wait_until_dead("ddp-manual", 2)
    assert panes_of("ddp-manual", "#{@label}") == ["rank 0 on localhost", f"rank 1 on {launchers.host_name()}"]
    for pane in panes_of("ddp-manual", "#{pane_id}"):
        assert "error[bad-option]" in on_screen(pane) and "missing.py" in on_screen(pane)


def test_without_tmux_the_error_says_how_to_get_it(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    error = refused(capsys, "--hosts", "localhost:2", "--tmux", "train.py")
    assert "error[bad-option]: --tmux needs tmux, which was not found" in error
    assert "apt-get install tmux" in error
