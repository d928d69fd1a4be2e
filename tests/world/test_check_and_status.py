"""``check`` meets the other ranks and measures; ``status`` looks at a run from outside."""

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
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_manual import terminal
from ddp_manual.tools import status
from tests.conftest import LONGER, REPOSITORY, RankProcess, Start, clean_environment
from tests.world.deaths import wait_until

COMMAND = (sys.executable, "-m", "ddp_manual")


def start_check(start: Start, port: int, rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
    identity = ["--world_size", world_size, "--rank", rank, "--master_port", port]
    return start(*COMMAND, "check", *identity, *options, **env)


def look(start: Start, port: int, *options: object, **env: str) -> RankProcess:
    return start(*COMMAND, "status", "--master_port", port, *options, **env)


def looked(start: Start, port: int) -> dict[str, Any]:
    process = look(start, port, "--json")
    assert process.wait(30) == 0, process.err
    seen: dict[str, Any] = json.loads(process.out)
    return seen


def test_check_shows_every_step_on_rank_0_and_a_line_on_the_others(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 3) for rank in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    text = ranks[0].out
    assert text.startswith("rank 0 on ")
    assert ": all is well, in " in text
    for step in ("names", "open files", "device", "shared memory", "listen", "roll call", "reachability", "all-reduce"):
        assert f"\N{CHECK MARK}  {step} " in text
    assert re.search(rf"^  master_port +{port} +\(flag\)$", text, re.MULTILINE)
    assert re.search(r"^  device +auto +\(default\)$", text, re.MULTILINE)
    assert "RES_OPTIONS" not in text  # ours, and not the user's
    assert "round trips in us:" in text
    for number, rank in enumerate(ranks):
        assert f"  {number}     " in text
        assert f"  {rank.worker}  " in text
        if number:
            assert rank.out.startswith(f"rank {number} on ")
            assert rank.out.count("\n") == 1


def test_check_of_one_rank_counts_one_of_each_and_shows_no_bandwidth(start: Start, port: int) -> None:
    alone = start_check(start, port, 0, 1)
    assert alone.wait(60) == 0
    assert re.search(r"^  . +roll call +\S+ s  the only rank is here, on 1 host$", alone.out, re.MULTILINE)
    assert re.search(r"^  1 KB +\S+ ms  -$", alone.out, re.MULTILINE)
    assert re.search(r"^  join_timeout +30.0 +\(check's default\)$", alone.out, re.MULTILINE)
    assert "(argument)" not in alone.out


def test_check_measures_with_the_bus_bandwidth_of_nccl_tests(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 2, "--json") for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    report = json.loads(ranks[0].out)
    assert report["findings"] == []
    measured = report["measured"]
    assert [one["bytes"] for one in measured["all_reduce"]] == [1 << 10, 1 << 20, 64 << 20]
    for one in measured["all_reduce"]:
        # Two ranks: 2 (n - 1) / n is 1.
        assert one["bus_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"])
    assert [(pair["rank"], pair["other"]) for pair in measured["round_trips"]] == [(0, 1)]
    assert 0 < measured["barrier_seconds"] < 1
    assert [line["pid"] for line in report["roster"]] == [rank.worker for rank in ranks]
    assert json.loads(ranks[1].out)["steps"][-1]["outcome"] == "ok"


def test_check_of_a_rank_alone_shows_what_this_host_can_find_out_and_exits_with_3(start: Start, port: int) -> None:
    alone = start_check(start, port, 1, 2, "--join_timeout", 3, NCCL_DEBUG="WARN")
    assert alone.wait(30) == 3
    first, *rest = alone.out.splitlines()
    assert first.startswith("error[master-refused]: nothing has listened for 3 s at rank 0's address 127.0.0.1:")
    assert any(line.strip().startswith("\N{CHECK MARK}  device") for line in rest)
    assert any(line.strip().startswith("\N{BALLOT X}  rank 0 ") for line in rest)
    assert "NCCL_DEBUG" in alone.out


def test_check_names_the_rank_that_never_joined(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 3, "--join_timeout", 4) for rank in (0, 2)]
    assert [rank.wait(30) for rank in ranks] == [3, 3]
    for rank in ranks:
        assert rank.out.startswith("error[rank-missing]: 1 of 3 ranks never joined within 4 s: rank 1\n")
        assert "check --world_size 3 --rank 1" in rank.out


def test_a_rank_that_checks_is_refused_by_a_rank_that_trains(start: Start, start_rank: Start, port: int) -> None:
    training = start_rank(0, 2)
    training.wait_for("waiting for rank 1")
    checking = start_check(start, port, 1, 2)
    assert checking.wait(30) == 3
    assert checking.out.startswith("error[config-mismatch]")
    assert "why:  command: rank 0 has train (command), rank 1 has check (command)\n  next" in checking.out
    assert [start_rank(1, 2).wait(), training.wait()] == [0, 0]


def test_status_shows_who_waits_who_is_missing_and_who_was_refused(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 2)]
    ranks[0].wait_for("waiting for rank 1; 2 of 3 here")
    assert start_rank(2, 3).wait(30) == 13
    seen = looked(start, port)
    assert [line["rank"] for line in seen["ranks"]] == [0, 2]
    assert [line["pid"] for line in seen["ranks"]] == [rank.worker for rank in ranks]
    assert seen["missing"] == [[1, 1]]
    assert "was refused: rank-taken" in seen["refused"][0]
    assert not seen["complete"]
    text = look(start, port)
    assert text.wait(30) == 0
    assert "2 of 3 ranks are here" in text.out
    assert f"--rank 1 --master_port {port}" in text.out
    assert "was refused: rank-taken" in text.out
    ranks.append(start_rank(1, 3))
    assert [rank.wait() for rank in ranks] == [0, 0, 0]


def test_status_follows_the_training_until_the_run_ends(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 3, "--log_every", 20) for rank in range(2)]
    ranks[0].wait_for("step ")
    watching = look(start, port, "--watch", "--json")
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert watching.wait(30) == 0, watching.err
    seen = [json.loads(line) for line in watching.out.splitlines()]
    progress = [look["progress"] for look in seen if look["progress"]]
    assert len(progress) >= 2
    assert {line["phase"] for lines in progress for line in lines} <= {
        "joining",
        "running",
        "loading",
        "training",
        "evaluating",
        "saving",
        "leaving",
        "ended",
    }
    for rank in range(2):
        steps = [lines[rank]["step"] for lines in progress]
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]
        assert all(lines[rank]["silent_seconds"] < 5 for lines in progress)
        assert progress[-1][rank]["samples_per_second"] > 0


@pytest.mark.parametrize("token", [{}, {"DDP_MANUAL_TOKEN": "a secret"}], ids=["without a token", "with a token"])
def test_status_watch_ends_with_the_failure_that_ended_the_run(
    start: Start, start_rank: Start, port: int, token: dict[str, str]
) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000, **token) for rank in range(2)]
    ranks[0].wait_for("training ")
    watching = look(start, port, "--watch", "--json", **token)
    wait_until(lambda: watching.out.count("\n") > 0)
    os.kill(ranks[1].worker, signal.SIGKILL)
    assert [rank.wait(30) for rank in ranks] == [14, 137]
    assert watching.wait(30) == 14, watching.err
    *seen, last = [json.loads(line) for line in watching.out.splitlines()]
    assert last["error"]["identifier"] == "peer-lost" and "rank 1 " in last["error"]["what"]
    assert watching.err.startswith(f"error[peer-lost]: {last['error']['what']}\n")
    assert all("error" not in answer for answer in seen)


def test_status_watch_waits_for_rank_0_and_ends_with_the_result(start: Start, start_rank: Start, port: int) -> None:
    watching = look(start, port, "--watch")
    assert watching.wait_for(f"nothing listens at 127.0.0.1:{port}") < 10
    assert "to start what is missing" not in watching.err
    ranks = [start_rank(rank, 2, *LONGER, 3) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert watching.wait(30) == 0, watching.err
    assert watching.out.splitlines()[-1] == f"the run has finished: {ranks[0].out.splitlines()[0]}"
    assert "samples/s, of all ranks together" in watching.out


def test_status_watch_says_that_the_run_was_stopped(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000) for rank in range(2)]
    ranks[0].wait_for("training ")
    watching = look(start, port, "--watch")
    wait_until(lambda: "training" in watching.out)
    ranks[1].process.send_signal(signal.SIGINT)
    assert [rank.wait(30) for rank in ranks] == [130, 130]
    assert watching.wait(30) == 0, watching.err
    assert watching.out.splitlines()[-1].startswith("the run was stopped by Ctrl-C (SIGINT) on rank 1 after step ")


def test_status_watch_says_which_error_has_ended_a_run_whose_ranks_never_met(
    start: Start, start_rank: Start, port: int
) -> None:
    rank_0 = start_rank(0, 2, "--join_timeout", 4)
    rank_0.wait_for("waiting for rank 1")
    watching = look(start, port, "--watch")
    assert rank_0.wait(30) == 10
    assert watching.wait(30) == 10, watching.err
    assert watching.err.startswith("error[rank-missing]: 1 of 2 ranks never joined within 4 s: rank 1\n")
    assert watching.out.count("error[") == 0


def test_the_death_of_rank_0_is_one_error_of_a_watching_status(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000) for rank in range(2)]
    ranks[0].wait_for("training ")
    watching = look(start, port, "--watch")
    wait_until(lambda: "training" in watching.out)
    ranks[0].process.send_signal(signal.SIGKILL)
    assert watching.wait(30) == 14
    host = os.uname().nodename
    assert watching.err.startswith(f"error[master-lost]: rank 0 ({host}, pid {ranks[0].worker}) is gone without a word")
    assert "frame #" not in watching.err + watching.out
    assert ranks[1].wait(30) == 14


def test_the_table_of_status_has_the_columns_that_a_terminal_has_room_for(
    start: Start, start_rank: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000, "--log_every", 10) for rank in range(2)]
    ranks[0].wait_for("step ")
    seen = looked(start, port)
    everything = ["rank", "host", "pid", "device", "address", "since"]
    everything += ["phase", "epoch", "step", "samples/s", "heard", "versions"]
    for width, kept in ((1000, everything), (80, everything[:2]), (45, ["rank"])):
        monkeypatch.setattr(status, "stdout_width", lambda width=width: width)
        table = status.text(seen).split("\n\n")[1].splitlines()
        assert len(table) == 3 and max(map(len, table)) <= width
        assert set(table[0].split()) >= {*kept, "phase", "step"}
    for rank in ranks:
        rank.kill()


def test_a_command_on_the_screen_of_status_watch_is_one_line_and_the_text_is_replaced_in_its_place(
    start_rank: Start, port: int
) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
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
    assert f"--world_size 2 --rank 1 --master_port {port} --model mlp " in again[0]
    first = said.decode().partition("\x1b[")[0].replace("\r", "").splitlines()
    assert int(again[1]) == sum(max(1, -(-len(line) // 80)) for line in first)


def test_a_text_that_is_higher_than_the_terminal_is_cut_until_it_is_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "5")
    text = "\n".join(["x" * 100, *"abcdef"])
    with terminal.redrawing() as draw:
        draw(text)
        assert capsys.readouterr().out == f"{'x' * 100}\na\nb\n"
        draw(text)
        assert capsys.readouterr().out == f"\x1b[4F\x1b[J{'x' * 100}\na\nb\n"
    assert capsys.readouterr().out == f"\x1b[4F\x1b[J{text}\n"


def test_a_script_reports_the_steps_of_its_own_loop(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, ddp_manual\n"
        "with ddp_manual.join() as world:\n"
        "    world.progress(epoch=3)\n"
        "    for step in range(1, 10_000):\n"
        "        world.progress(step=step, samples_per_second=50 + world.rank)\n"
        "        if step == 7: print('at step 7', flush=True); time.sleep(600)\n"
    )
    ranks = [
        start(sys.executable, script, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
        for rank in range(2)
    ]
    for rank in ranks:
        wait_until(lambda rank=rank: "at step 7" in rank.out)
    seen = looked(start, port)
    while not all(now["step"] == 7 for now in seen["progress"]):  # heartbeats come twice a second
        seen = looked(start, port)
    assert [(now["phase"], now["epoch"], now["step"]) for now in seen["progress"]] == [("running", 3, 7)] * 2
    assert "speed: 101 samples/s, of all ranks together\n" in status.text(seen)
    os.kill(ranks[1].process.pid, signal.SIGKILL)
    assert ranks[0].wait(30) == 14
    assert "it was running, at step 7 of epoch 3, when it was last heard" in ranks[0].err


def test_status_watch_does_not_take_a_frozen_rank_0_for_the_end_of_the_run(
    start: Start, start_rank: Start, port: int
) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    watching = look(start, port, "--watch", "--json")
    wait_until(lambda: watching.out.count("\n") > 1)
    rank_0.process.send_signal(signal.SIGSTOP)
    assert watching.wait(30) == 14
    assert "does not answer" in watching.err and "has ended" not in watching.err


def test_before_a_rank_has_loaded_torch_its_device_is_unknown_and_its_phase_says_why() -> None:
    rank = {"rank": 0, "host": "a", "pid": 1, "address": "10.0.0.1", "since": 0.0, "versions": "torch 2"}
    loading, ready = status.roster([{**rank, "device": None}, {**rank, "device": "cpu"}], ())[1:]
    assert loading.split()[3] == "-" and "  loading torch  torch 2" in loading
    assert ready.split()[3] == "cpu" and "  waiting        torch 2" in ready


def test_status_where_nobody_listens_says_so_at_once(start: Start, port: int) -> None:
    started = time.monotonic()
    nobody = look(start, port)
    assert nobody.wait(30) == 11
    assert time.monotonic() - started < 10
    assert nobody.err.startswith(f"error[master-refused]: nothing listens at rank 0's address 127.0.0.1:{port}")
    assert "  next: start rank 0, or give the --master_port that launch has printed; " in nobody.err


def test_status_of_a_store_that_is_no_run_says_so(start: Start, port: int, tmp_path: Path) -> None:
    store = start(
        sys.executable,
        "-c",
        "import sys, time, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)\n"
        "print('up', file=sys.stderr, flush=True); time.sleep(60)",
    )
    store.wait_for("up")
    process = look(start, port)
    assert process.wait(30) == 11
    assert "has no roll call" in process.err
