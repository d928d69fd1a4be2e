"""``check`` measures with real torch; ``status`` looks at real runs, at a real terminal too."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_manual.cli.stdout import redrawing
from ddp_manual.tools import check, status
from tests.conftest import LONGER, REPOSITORY, SHORT, RankProcess, Start, age_of, clean_environment, wait_until

COMMAND = (sys.executable, "-m", "ddp_manual")
TOKEN = {"DDP_MANUAL_TOKEN": "a secret"}


def start_check(start: Start, port: int, rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
    identity = ["--world_size", world_size, "--rank", rank, "--master_port", port]
    return start(*COMMAND, "check", *identity, *options, **env)


def start_waiting(start: Start, port: int, rank: int, *options: object, **env: str) -> RankProcess:
    """Start one of three ranks of a program without torch."""
    identity = ["--world_size", 3, "--rank", rank, "--master_port", port]
    return start(*COMMAND, "run", *identity, *options, "--no_python", "true", **env)


def look(start: Start, port: int, *options: object, **env: str) -> RankProcess:
    return start(*COMMAND, "status", "--master_port", port, *options, **env)


def looked(start: Start, port: int) -> dict[str, Any]:
    process = look(start, port, "--json")
    assert process.wait(30) == 0, process.err
    seen: dict[str, Any] = json.loads(process.out)
    return seen


def test_check_shows_every_step_on_rank_0_and_measures_with_the_bus_bandwidth_of_nccl_tests(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [start_check(start, port, 0, 2, "--json"), start_check(start, port, 1, 2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    report = json.loads(ranks[0].out)
    measured = report["measured"]
    assert report["findings"] == []
    assert [one["bytes"] for one in measured["all_reduce"]] == [1 << 10, 1 << 20, 64 << 20]
    for one in measured["all_reduce"]:  # of two ranks 2 (n - 1) / n is 1
        assert one["bus_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"])
    assert [(pair["rank"], pair["other"]) for pair in measured["round_trips"]] == [(0, 1)]
    assert 0 < measured["barrier_seconds"] < 1

    assert re.fullmatch(r"rank 1 on \S+: all is well, \d+ steps in .* s\n", ranks[1].out)
    monkeypatch.setattr(check, "stdout_width", lambda: 100)
    text = check.text(report)
    assert re.fullmatch(r"rank 0 on \S+: all is well, \d+ steps in .* s", text.splitlines()[-1])
    for step in ("names", "open files", "device", "shared memory", "listen", "roll call", "reachability", "all-reduce"):
        assert f"\N{CHECK MARK}  {step} " in text
    assert re.search(rf"^  master_port +{port} +\(flag\)$", text, re.MULTILINE)
    assert "  peer_timeout" not in text  # which has its default
    assert "RES_OPTIONS" not in text  # ours, and not the user's
    assert "round trips in us:" in text
    assert all(f"  {rank.worker}  " in text for rank in ranks)


def test_check_of_a_rank_alone_shows_what_this_host_can_find_out_and_exits_with_3(start: Start, port: int) -> None:
    alone = start_check(start, port, 1, 2, "--join_timeout", 3, NCCL_DEBUG="WARN")
    assert alone.wait(30) == 3
    table, verdict = re.split("^rank 1 on ", alone.out, flags=re.MULTILINE)
    assert "\nerror[master-refused]: nothing has listened for 3 s at rank 0's address 127.0.0.1:" in verdict
    rest = table.splitlines()
    assert any(line.strip().startswith("\N{CHECK MARK}  device") for line in rest)
    assert any(line.strip().startswith("\N{BALLOT X}  rank 0 ") for line in rest)
    assert "NCCL_DEBUG" in alone.out


def test_status_shows_who_waits_who_is_missing_and_who_was_refused_and_watches_until_the_run_ends(
    start: Start, port: int
) -> None:
    nobody = look(start, port)
    assert nobody.wait(30) == 11
    assert nobody.err.startswith(f"error[master-refused]: nothing listens at rank 0's address 127.0.0.1:{port}")
    watching = look(start, port, "--watch")
    watching.wait_for(f"nothing listens at 127.0.0.1:{port}")
    ranks = [start_waiting(start, port, rank) for rank in (0, 2)]
    ranks[0].wait_for("waiting for rank 1; 2 of 3 here")
    assert start_waiting(start, port, 2).wait(30) == 13
    seen = looked(start, port)
    assert [line["rank"] for line in seen["ranks"]] == [0, 2]
    assert [line["pid"] for line in seen["ranks"]] == [rank.worker for rank in ranks]
    assert seen["missing"] == [[1, 1]] and "was refused: rank-taken" in seen["refused"][0] and not seen["complete"]
    text = look(start, port)
    assert text.wait(30) == 0
    assert "2 of 3 ranks are here" in text.out and f"--rank 1 --master_port {port}" in text.out
    ranks.append(start_waiting(start, port, 1))
    assert [rank.wait(30) for rank in ranks] == [0, 0, 0]
    assert watching.wait(30) == 0, watching.err
    assert "error[" not in watching.out + watching.err


def test_status_follows_the_training_until_a_rank_is_lost_and_ends_with_the_error(
    start: Start, port: int, small_data: Path, tmp_path: Path
) -> None:
    training = [*SHORT, "--data_dir", small_data, *LONGER, 1000, "--log_every", 20]
    launcher = start(*COMMAND, "launch", "--nproc", 2, "--master_port", port, "--", *training, cwd=tmp_path, **TOKEN)
    launcher.wait_for("step 20/")
    watching = look(start, port, "--watch", "--json", **TOKEN)
    wait_until(lambda: watching.out.count("\n") > 2)
    os.kill(workers_of(launcher)[-1], signal.SIGKILL)
    assert launcher.wait() == 137, launcher.err
    assert watching.wait(30) == 14, watching.err
    seen = [json.loads(line) for line in watching.out.splitlines()]
    progress = [look["progress"] for look in seen if look.get("progress")]
    for rank in range(2):
        steps = [lines[rank]["step"] for lines in progress]
        assert steps == sorted(steps) and steps[-1] > steps[0]
        assert progress[-1][rank]["samples_per_second"] > 0
    assert seen[-1]["error"]["identifier"] == "peer-lost"
    assert f"]: {seen[-1]['error']['what']}\n" in watching.err
    assert all("error" not in answer for answer in seen[:-1])
    written = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert "config.json" in [file.name for file in written]
    assert not any(TOKEN["DDP_MANUAL_TOKEN"].encode() in file.read_bytes() for file in written)


def workers_of(launcher: RankProcess) -> list[int]:
    """Return the pids of the workers in the order of their ranks, in which they are forked."""
    forker = min(psutil.Process(launcher.process.pid).children(), key=age_of)
    return [worker.pid for worker in sorted(forker.children(), key=age_of)]


def test_a_frozen_rank_0_is_not_taken_for_the_end_of_the_run(start: Start, port: int) -> None:
    rank_0 = start_waiting(start, port, 0)
    rank_0.wait_for("waiting for ranks 1-2")
    watching = look(start, port, "--watch", "--json")
    wait_until(lambda: watching.out.count("\n") > 1)
    rank_0.process.send_signal(signal.SIGSTOP)
    assert watching.wait(30) == 14
    assert "does not answer" in watching.err and "has ended" not in watching.err


def test_a_command_on_the_screen_of_status_watch_is_one_line_and_the_text_is_replaced_in_its_place(
    start: Start, port: int
) -> None:
    rank_0 = start_waiting(start, port, 0)
    rank_0.wait_for("waiting for ranks 1-2")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = clean_environment()
    command = [*COMMAND, "status", "--watch", "--master_port", str(port)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=REPOSITORY) as watching:
        os.close(theirs)
        said = b""
        while said.count(b"\x1b[J") < 2:
            said += os.read(ours, 65536)
        watching.send_signal(signal.SIGINT)
    os.close(ours)
    assert watching.returncode == 130
    (again,) = re.findall(r"to start one:\r\n  (.*)\r\n\x1b\[(\d+)F\x1b\[J", said.decode())[:1]
    assert f"--world_size 3 --rank 1 --master_port {port} " in again[0]
    first = said.decode().partition("\x1b[")[0].replace("\r", "").splitlines()
    assert int(again[1]) == sum(max(1, -(-len(line) // 80)) for line in first)


def test_a_text_that_is_higher_than_the_terminal_is_cut_until_it_is_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "5")
    text = "\n".join(["x" * 100, *"abcdef"])
    with redrawing() as draw:
        draw(text)
        assert capsys.readouterr().out == f"{'x' * 100}\na\nb\n"
        draw(text)
        assert capsys.readouterr().out == f"\x1b[4F\x1b[J{'x' * 100}\na\nb\n"
    assert capsys.readouterr().out == f"\x1b[4F\x1b[J{text}\n"


def test_a_script_reports_the_steps_of_its_own_loop_in_a_table_that_a_terminal_has_room_for(
    start: Start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, ddp_manual\n"
        "with ddp_manual.join(device='cpu') as world:\n"
        "    world.progress(epoch=3)\n"
        "    for step in range(1, 8):\n"
        "        world.progress(step=step, samples_per_second=50 + world.rank, loss=0.5)\n"
        "    with world.saving():\n"
        "        with world.saving(): pass\n"
        "        assert world.progress.saving\n"
        "    time.sleep(600)\n"
    )
    options = ["--nproc", 2, "--master_port", port, "--run_dir", tmp_path / "run"]
    launcher = start(*COMMAND, "launch", *options, script)
    launcher.wait_for("process group ready")
    wait_until(lambda: [now["step"] for now in looked(start, port)["progress"] or ()] == [7, 7])
    seen = looked(start, port)
    assert [(now["phase"], now["epoch"], now["step"]) for now in seen["progress"]] == [("running", 3, 7)] * 2
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (line["step"], line["epoch"], line["loss"], line["samples_per_second"]) == (1, 3, 0.5, 50), "one a second"
    assert "speed: 101 samples/s, of all ranks together\n" in status.text(seen)
    everything = ["rank", "host", "pid", "device", "address", "since"]
    everything += ["phase", "epoch", "step", "loss", "samples/s", "heard", "versions"]
    for width, kept in ((1000, everything), (80, everything[:2]), (45, ["rank"])):
        monkeypatch.setattr(status, "stdout_width", lambda width=width: width)
        table = status.text(seen).split("\n\n")[1].splitlines()
        assert len(table) == 3 and max(map(len, table)) <= width
        assert set(table[0].split()) >= {*kept, "phase", "step"}
    assert all(now["place"].startswith("script.py:9 in ") for now in seen["progress"])
    os.kill(workers_of(launcher)[1], signal.SIGKILL)
    assert launcher.wait(30) == 137
    assert "it was running, at step 7 of epoch 3, when it was last heard" in launcher.err
