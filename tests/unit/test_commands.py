"""``commands``: the lines to type in the terminals of several hosts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ddp_manual.cli import main as cli
from ddp_manual.environment import command_line

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "typed_command", lambda: (["ddp-manual"], ["commands"]))


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


def test_each_word_reaches_the_rank_as_it_was_typed(capsys: Output) -> None:
    odd = ["a b", "it's", "$HOME", "c;", "--api_key", "secret", "--rank=5", "-m", "*", "{master_port}", ""]
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
    assert "the token in secret.txt" in printed(capsys, "--hosts", "a,b", "--token_file", "secret.txt", "train.py")


def test_json_has_the_same_lines(capsys: Output) -> None:
    words = ["--hosts", "hostA,hostB", "--", "--dataset", "folder:my pictures"]
    found = json.loads(printed(capsys, "--json", *words))
    lines = [line for line in printed(capsys, *words).splitlines() if line.startswith("ddp-manual")]
    assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, "hostA"), (1, "hostB")]
    assert [(rank["command"], shlex.join(rank["words"])) for rank in found["ranks"]] == [(line, line) for line in lines]
    assert found["world_size"] == 2 and found["master_addr"] == "hostA"
    rank = json.loads(printed(capsys, "--json", "--hosts", "hostA", "train.py", "a\nb"))["ranks"][0]
    assert rank["words"][-1] == "a\nb" and rank["command"].endswith(r" train.py $'a\nb'")


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.py"], "no hosts were given", "--hosts a:4,b:4"),
        (["train.py", "--hosts", "a"], "commands was given no hosts before train.py", "put --hosts a before train.py"),
        (["--hosts", "localhost,b", "train.py"], "b cannot reach rank 0 at localhost", "--master_addr"),
        (["--hosts", "a,b", "--master_port", "0", "train.py"], "rank 1 cannot join at port 0", "--master_port"),
        (["--hosts", "a,b", "--", "--rank", "1"], "--rank cannot come after the --", "leave --rank out"),
        (["--hosts", "a,b", "--", "--epoch", "1"], "No such option '--epoch'", "--help"),
        (["--hosts", "a,b", "--epochs", "1"], "No such option", "--help"),
        (["--hosts", "a,b", "--may_differ", "seed", "--", "--seed", "1"], "--may_differ is for a script", "leave"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_typed(
    words: list[str], what: str, hint: str, capsys: Output
) -> None:
    error = refused(capsys, *words)
    assert what in error and hint in error
