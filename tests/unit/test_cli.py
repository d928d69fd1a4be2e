from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ddp_manual import terminal
from ddp_manual.agent.rank_result import Ended
from ddp_manual.cli import main as cli
from ddp_manual.environment import command_line
from tests.conftest import log_to_root

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "lines", "shown"),
    [
        ("./bin/own", "#!/venv/bin/python\n", "./bin/own"),
        ("./bin/own", '#!/bin/sh\n\'\'\'exec\' "/my venv/bin/python" "$0" "$@"\n', "./bin/own"),
        ("./bin/own", "#!/usr/bin/env python3\n", "/venv/bin/python ./bin/own"),
        ("./bin/own", "import sys\n", "/venv/bin/python ./bin/own"),
        ("own.py", "#!/venv/bin/python\n", "/venv/bin/python own.py"),
    ],
)
def test_a_command_is_shown_without_its_interpreter_only_if_the_script_starts_with_it_by_itself(
    script: str, lines: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(script)
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [script, "--rank", "0"])
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", script, "--rank", "0"])
    assert command_line.typed_command() == (shown.split(), ["--rank", "0"])
    path.chmod(0o644)
    assert command_line.typed_command() == (["/venv/bin/python", script], ["--rank", "0"])


# By the headings of --help-all.
FLAGS = {
    "identity": "world_size rank local_rank device backend",
    "rendezvous": (
        "master_addr master_port listen_addr run_id join_timeout peer_timeout stall_timeout collectives token_file "
        "allow_mismatch full_traceback"
    ),
    "lost ranks": "on_loss rejoin_timeout shrink_after on_loss_of_own_code max_restarts standby_addr",
    "training": (
        "model epochs batch_size global_batch_size lr lr_scaling lr_schedule warmup_epochs momentum weight_decay "
        "clip_grad_norm shift flip normalization sync_bn no_ddp seed"
    ),
    "data": "dataset image_size classes data_dir",
    "output": "run_dir track log_every check_replicas",
    "checkpoints": "checkpoint_every checkpoint_steps hold_every keep resume",
}
SWITCHES = {"allow_mismatch", "full_traceback", "on_loss_of_own_code", "flip", "sync_bn", "no_ddp"}


def test_the_flags_of_train_are_these_under_these_headings_and_each_switch_has_an_opposite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["train", "--help-all"]) == 0
    found: dict[str, list[str]] = {}
    heading, switches = "", set()
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1].lower()
        elif line.startswith("  --") and heading in FLAGS:
            name = line.split()[0].removeprefix("--")
            found.setdefault(heading, []).append(name)
            switches |= {name} if " / --" in line else set()
    assert {heading: " ".join(names) for heading, names in found.items()} == FLAGS
    assert switches == SWITCHES


def test_the_help_of_all_commands_fits_on_a_screen_and_has_an_example_and_the_usual_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80 and "..." not in shown.replace("[ARGS]...", "")
    assert "    ddp-manual run --world_size 2 --rank 1 train.py\n" in shown
    for command in cli.ddp_manual.commands.values():
        assert command.hidden or f"{command.name} " in shown.partition("in the usual order:")[2]


def test_help_leaves_out_what_most_people_never_need_and_launch_begins_with_the_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {}
    for words in ("launch --help", "launch --help-all", "status --help"):
        assert cli.run(words.split()) == 0
        shown[words] = capsys.readouterr().out
    for name in ("--standby_addr", "--listen_addr", "--shrink_after", "--start", "--export"):
        assert name not in shown["launch --help"] and f"  {name} " in shown["launch --help-all"]
    assert shown["launch --help"].partition("\nRanks:\n")[2].startswith("  --nproc,")
    assert "--help-all" in shown["launch --help"] and "--help-all" not in shown["status --help"]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("launch --help", "says which. (default: a free one; with --nnodes 29500)"),
        ("check --help", "for all ranks to join. (default: 30)"),
        ("train --help", "for one that lives but does not come; rank 0's counts for all. (default: 300)"),
        ("run --help", "for one that lives but does not come; rank 0's counts for all. (default: 1800)"),
        ("launch --help", "(default: 300; of a script 1800)"),
    ],
)
def test_a_default_is_that_of_the_command(typed: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(typed.split()) == 0
    assert shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train --rank 4 --world_size 4", ["--rank 4 does not exist in a world of 4"]),
        ("train --master_port 65536", ["--master_port 65536 is above 65535"]),
        ("train --world_size two", ["'two' is not a valid integer"]),
        ("train --model MPL", ["--model MPL is not known", "next: did you mean --model mlp?"]),
        ("train --lr nan", ["--lr nan is not a finite number"]),
        ("train --global_batch_size 101 --world_size 2", ["--global_batch_size 101 cannot be divided"]),
        ("train stray", ["stray"]),
        ("train.py --lr a;b", ["next: ddp-manual run train.py --lr 'a;b'\n"]),
        ("script --lr 1", ["next: ddp-manual run script --lr 1\n"]),
        ("statsu", ["No such command 'statsu'"]),
        ("run --nproc 2 a.py", ["next: to start all ranks at once: ddp-manual launch --nproc ... SCRIPT\n"]),
        ("train --hosts a,b", ["next: to start all ranks at once: ddp-manual launch --hosts ... -- OPTIONS\n"]),
        ("launch --nproc 2 --max_restart 3 a.py", ["No such option '--max_restart'", "'--max_restarts'"]),
        ("launch --nproc 2 --no_such script", ["No such option '--no_such'", "or put --no_such after the script"]),
        ("launch --nproc 2 --device cpu a.py", ["No such option '--device'", "after a --, if it is one of the"]),
        ("launch --nproc 2 --log-dir logs a.py", ["no option --log_dir", "torchrun has it", "next: leave it out"]),
        ("launch --rdzv_backend=c10d --rdzv_id 1 a.py", ["--rdzv_backend", "--master_addr", "leave it out"]),
        ("launch --nproc 0", ["--nproc 0"]),
        ("launch --nproc 2 -- --world-size 3", ["--world_size cannot come after the --"]),
        ("launch --nproc 2 -- --epohcs 3", ["No such option", "--epochs", "train --help"]),
        ("launch --nproc 2 --may_differ seed -- --seed 1", ["--may_differ is for a script", "leave --may_differ"]),
        ("launch train.py --nproc-per-node=2", ["next: put --nproc_per_node 2 before train.py"]),
        ("launch --nproc 1 --nnodes 2 --master_addr a --master_port 0 script", ["needs a port to meet at"]),
        ("launch --hosts a:1 --export A, script", ["--export '' is no name of a variable"]),
        ('launch --hosts a:1 --ssh " script', ['--ssh " is no command', "why:  No closing quotation"]),
        (f"checkpoints {'x' * 300}", ["xxx cannot be read", "why:  File name too long"]),
    ],
)
def test_what_is_typed_wrongly_exits_2_and_is_named_with_what_to_type(
    typed: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").touch()
    monkeypatch.setattr(sys, "argv", ["ddp-manual", *typed.split()])
    assert cli.run(typed.split()) == 2
    printed = capsys.readouterr().err
    assert "error[bad-option]: " in printed and "\n  next: " in printed
    for words in said:
        assert words in printed, printed


def test_a_signal_before_there_is_a_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.ddp_manual, "main", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.run(["train", "x"]) == 130
    assert capsys.readouterr().err == "error[stopped]: stopped by Ctrl-C (SIGINT)\n"


SIGNALLED_AFTER_MESSAGE = """
import asyncio, os, signal, socket
from ddp_manual import signal_handlers

async def agent():
    ours, workers = socket.socketpair()
    asyncio.get_running_loop().add_reader(ours, lambda: print(ours.recv(100).decode(), end=""))
    with signal_handlers.handle_in_event_loop(lambda number: print(signal.Signals(number).name)):
        workers.send(b"a message\\n")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)

asyncio.run(agent())
"""


def test_a_signal_is_handled_after_what_the_process_was_sent_before() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_AFTER_MESSAGE], capture_output=True, text=True, check=False)
    assert done.stdout == "a message\nSIGTERM\n", done


SIGNALLED_AFTER_ITS_ERROR = """
import asyncio, atexit, os, signal, sys
from ddp_manual import errors, signal_handlers, terminal
from ddp_manual.cli import main as cli

async def agent():
    with signal_handlers.handle_in_event_loop(lambda number: None):
        terminal.print_error(errors.Stopped(signal.SIGINT, "at once, by a second signal"))

def signalled():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)

def command(**_):
    asyncio.run(agent())
    signalled()
    atexit.register(signalled)
    return 130

cli.ddp_manual.main = command
sys.exit(cli.run([]))
"""


def test_a_signal_after_the_error_that_ends_an_agent_prints_no_second_one() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SIGNALLED_AFTER_ITS_ERROR], capture_output=True, text=True, check=False
    )
    assert said.stderr == "error[stopped]: stopped by Ctrl-C (SIGINT) at once, by a second signal\n"
    assert said.returncode == 130


@pytest.fixture
def two_runs(tmp_path: Path) -> list[str]:
    """The folders of two runs; stdout may be unable to show the second one's name."""
    for name in ("one", "데이터"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [str(tmp_path / "one"), str(tmp_path / "데이터")]


def test_a_full_stdout_is_an_error_and_a_closed_pipe_ends_quietly(two_runs: list[str]) -> None:
    compare = [sys.executable, "-m", "ddp_manual", "compare", *two_runs]
    run = partial(subprocess.run, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, check=False)
    with open("/dev/full", "w") as full:
        for command in (compare, [*compare[:3], "--help"], compare[:3]):
            ended = run(command, stdout=full)
            assert ended.returncode == 15
            assert ended.stderr.startswith("error[disk-full]: stdout cannot be written\n")
            assert "Traceback" not in ended.stderr
    reader, writer = os.pipe()
    os.close(reader)
    for command in (compare, compare[:3]):
        ended = run(command, stdout=writer)
        assert (ended.returncode, ended.stderr) == (141, "")
    os.close(writer)
    ended = run(["sh", "-c", 'exec "$@" >&-', "sh", *compare])
    assert (ended.returncode, ended.stderr) == (0, "")
    ended = run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *compare[:3], "launch", "--nproc", "1", "--no_python", "true"])
    assert ended.returncode == 0 and "all ranks finished" in ended.stderr


def test_a_result_that_cannot_be_printed_does_not_fail_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(cli.click, "echo", mock.Mock(side_effect=full))
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # pytest's own would be closed
    ended = Ended(result={"run_dir": "runs/mine"})
    monkeypatch.setattr("ddp_manual.agent.by_hand.train_by_hand", lambda spec, config: ended)
    monkeypatch.setattr(terminal, "result_text", lambda summary: "99%")
    monkeypatch.setattr(terminal.LOGGER, "propagate", True)
    assert cli.run(["train"]) == 0
    assert "stdout cannot be written (No space left on device): the result is in runs/mine" in caplog.text


def test_a_name_that_stdout_cannot_show_is_escaped(two_runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.run(["compare", *two_runs]) == 0
    assert "\\ub370\\uc774\\ud130" in screen.buffer.getvalue().decode("latin-1")  # type: ignore[attr-defined]


def test_a_rank_that_nobody_has_numbered_says_that_it_is_rank_0_and_which_the_others_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ddp_manual.agent.by_hand.in_this_terminal", lambda spec, task: Ended(result={"run_dir": "r"}))
    monkeypatch.setattr(terminal, "result_text", lambda summary: "99%")
    log_to_root(monkeypatch)
    monkeypatch.setattr(terminal, "log_to_stderr", lambda rank, over_bar=False: None)
    monkeypatch.setattr(terminal, "log", terminal.LOGGER.warning)
    said = "no --rank was given: this is rank 0 of 3; the others have --rank 1 to 2"
    for options, lines in ((["--rank", "0"], []), ([], [said])):
        caplog.clear()
        assert cli.run(["train", "--world_size", "3", *options]) == 0
        assert [line for line in caplog.messages if line.startswith("no --rank")] == lines
