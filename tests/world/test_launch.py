"""``ddp-manual launch``: many ranks from one terminal, as real processes. How a signal stops their training is in
test_checkpoints.py."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import HOST, LONGER, REPOSITORY, SHORT, RankProcess, Start, age_of, gone, wait_until

LAUNCH = (sys.executable, "-m", "ddp_manual", "launch", "--nproc")


@pytest.fixture
def launch(start: Start, small_data: Path, tmp_path: Path) -> Start:
    """Launch ranks on synthetic digits into ``tmp_path / "run"``."""

    def launch(nproc: int, *options: object, max_restarts: int = 0, **env: str) -> RankProcess:
        restarts = ["--max_restarts", max_restarts] if max_restarts else []
        files = ["--run_dir", tmp_path / "run", "--", *SHORT, "--data_dir", small_data]
        return start(*LAUNCH, nproc, *restarts, *files, *options, **env)

    return launch


def forker_of(launcher: RankProcess) -> psutil.Process:
    """The process that forks the workers, once it is there."""
    deadline = time.monotonic() + 10
    while not (found := psutil.Process(launcher.process.pid).children()):
        assert time.monotonic() < deadline, launcher.err
        time.sleep(0.01)
    return found[0]


def ranks_of(launcher: RankProcess) -> list[psutil.Process]:
    """The workers, in the order of their ranks, in which they are forked."""
    running = [worker for worker in forker_of(launcher).children() if worker.status() != psutil.STATUS_ZOMBIE]
    return sorted(running, key=age_of)


def fails_once(folder: Path) -> dict[str, str]:
    """The environment of ranks of which rank 1 raises in its 20th step, the first time it is started."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        f"raised = Path({str(folder / 'raised')!r})\n"
        "if any(word.endswith('worker') for word in sys.orig_argv):\n"
        "    from ddp_manual.training.trainer import Trainer\n"
        "    steps, train_step = [], Trainer._train_step\n"
        "    def failing(*arguments):\n"
        "        steps.append(arguments)\n"
        "        if len(steps) == 20 and os.environ['RANK'] == '1' and not raised.exists():\n"
        "            raised.touch()\n"
        "            raise ValueError('only once')\n"
        "        return train_step(*arguments)\n"
        "    Trainer._train_step = failing\n"
    )
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


def test_all_ranks_are_started_tagged_and_logged(launch: Start, start: Start, tmp_path: Path) -> None:
    """Below another launcher, and beside another launch, whose ranks they do not meet. That one's program has more
    arguments than fit into a message."""
    (tmp_path / "options.json").write_text('{"seed": 7, "epochs": 9}')
    other_launcher = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Besides flags, one of them --epochs 1.
    launcher = launch(2, "--config", tmp_path / "options.json", **other_launcher)
    names = "☃" * 30_000  # 180 kB in JSON, and rank 0 sends two commands with it
    other = start(*LAUNCH, 2, "--no_python", "sh", "-c", "echo $WORLD_SIZE $TORCHELASTIC_RUN_ID", names)
    assert [launcher.wait(), other.wait()] == [0, 0], other.err[:2000]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["epochs"]) == (2, 1)
    run_ids = re.findall(r"^\[rank \d\] 2 (\S+)$", other.out, re.M)
    assert len(run_ids) == 2 and run_ids[0] == run_ids[1] != summary["run_id"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 7
    for rank in (0, 1):
        assert f"[rank {rank}] process group ready" in launcher.err
        assert "process group ready" in (tmp_path / "run" / f"log-rank{rank}.txt").read_text()
        assert f"[rank {rank}] [rank {rank}]" not in launcher.err
    assert launcher.out.startswith("[rank 0] mlp on synthetic: ")
    assert launcher.err.splitlines()[-1].startswith("all ranks finished after ")


def test_the_command_that_launch_prints_shows_its_run_whose_ranks_end_with_a_launch_that_is_killed(
    launch: Start, start: Start
) -> None:
    launcher = launch(2, *LONGER, 1000)
    launcher.wait_for("step 100/")
    (command,) = re.findall(r"to look at this run from another terminal:\n  (.*)\n", launcher.err)
    words = shlex.split(command)
    looking = start(*words[: words.index("--watch")], *words[words.index("--watch") + 1 :])
    assert looking.wait(30) == 0, looking.err
    assert "all ranks are here" in looking.out
    ranks = ranks_of(launcher)
    launcher.process.send_signal(signal.SIGKILL)
    assert gone(ranks, 5)


def test_a_program_that_fails_once_meets_at_the_address_that_was_typed_and_leaves_no_failure(
    start: Start, tmp_path: Path
) -> None:
    """Beside the failure of a rank that this run does not have any more, and at any free port."""
    (tmp_path / "failure-rank7.json").write_text('{"identifier": "out-of-memory", "what": "long ago"}')
    (tmp_path / "token").write_text("of-the-run")
    (tmp_path / "once").write_text("#!/bin/sh\nmkdir once-done 2>/dev/null && exit 1\nexit 0\n")
    (tmp_path / "once").chmod(0o755)
    here = ["--master_addr", "127.0.0.2", "--master_port", 0, "--token_file", "token", "--run_dir", "."]
    launcher = start(*LAUNCH, 2, *here, "--max_restarts", 1, "--no_python", "./once", cwd=tmp_path)
    assert launcher.wait(60) == 0
    look = r"status --watch --master_addr 127.0.0.2 --master_port [1-9]\d+ --token_file token\n"
    assert re.search(look, launcher.err)
    assert not [path.name for path in tmp_path.glob("failure-rank?.json")]
    runs = start(sys.executable, "-m", "ddp_manual", "runs", ".", cwd=tmp_path)
    assert runs.wait(20) == 0 and f"\n  {tmp_path.name}  no failure " in runs.out


def test_a_rank_whose_log_cannot_be_written_ends_as_its_program_does(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log-rank0.txt").symlink_to("/dev/full")
    (tmp_path / "script.py").write_text("import sys\nprint('begun')\nsys.exit(3)\n")
    launch = start(*LAUNCH, 1, "--run_dir", tmp_path, tmp_path / "script.py")
    assert launch.wait() == 3 and launch.out.splitlines() == ["[rank 0] begun"]
    assert launch.err.count(f"{tmp_path}/log-rank0.txt is incomplete from here on: No space left on device") == 1


@pytest.mark.parametrize("found_by", ["saves.py", "ddp_manual launch"])
def test_a_program_saves_and_is_stopped_once_with_its_child_alive_and_may_open_as_many_files_as_by_hand(
    found_by: str, start: Start, tmp_path: Path
) -> None:
    """SIGTERM comes from pkill -f, by what is on the command lines of all its processes, or of ``launch`` alone."""
    script = tmp_path / "saves.py"
    script.write_text(
        "import resource, signal, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('saves', child.poll(), flush=True))\n"
        "def stop(*_):\n"
        "    print('stops', child.poll(), flush=True)\n"
        "    time.sleep(0.5)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', *resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    launcher = start("sh", "-c", 'ulimit -Sn 512; exec "$@"', "sh", *LAUNCH, 1, script)
    launcher.wait_for("ready")
    launcher.process.send_signal(signal.SIGUSR1)
    launcher.wait_for("saves None")
    own = [psutil.Process(launcher.process.pid), *psutil.Process(launcher.process.pid).children(recursive=True)]
    for process in [process for process in own if found_by in " ".join(process.cmdline())]:
        process.terminate()
    assert launcher.wait(20) == 143
    soft, hard = launcher.out.split("ready ")[1].split()[:2]
    assert soft == hard and launcher.out.count("stops None") == 1


def test_a_host_that_forks_no_more_is_named_by_the_rank_that_it_has_no_process_for(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "if 'ranks=2' in sys.argv:\n"
        "    fork, forks = os.fork, []\n"
        "    def limited():\n"
        "        forks.append(1)\n"
        "        if len(forks) == 2: raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "        return fork()\n"
        "    os.fork = limited\n"
    )
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    launcher = start(*LAUNCH, 2, tmp_path / "script.py", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert launcher.wait(30) == 14
    assert "no process can be forked for its worker: Resource temporarily unavailable" in launcher.err
    assert "look at the limits of its host" in launcher.err and "Traceback" not in launcher.err


def test_an_executable_may_close_what_it_has_inherited(start: Start) -> None:
    program = "import os, time; os.closerange(3, 256); time.sleep(1.5)"
    launcher = start(*LAUNCH, 2, "--no_python", sys.executable, "-c", program)
    assert launcher.wait(30) == 0 and "has become another" not in launcher.err


def test_ctrl_c_while_torch_is_loaded_for_the_ranks_ends_all_within_5_seconds(launch: Start) -> None:
    launcher = launch(2, *LONGER, 200, max_restarts=3)
    launcher.wait_for("listening at")
    forker = forker_of(launcher)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait(5) == 130, launcher.err
    assert gone([forker], 0.5)


def test_a_rank_that_does_not_end_at_the_second_ctrl_c_is_killed(start: Start) -> None:
    deaf = "trap 'echo heard' INT; echo my pid is $$; while :; do sleep 0.1; done"
    launcher = start(*LAUNCH, 2, "--no_python", "sh", "-c", deaf)
    wait_until(lambda: launcher.out.count("my pid is ") == 2)
    ranks = [psutil.Process(int(pid)) for pid in re.findall(r"my pid is (\d+)", launcher.out)]
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: launcher.out.count("heard") == 2)
    time.sleep(0.5)  # the moment between two presses
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait(6) == 130
    assert gone(ranks, 0.5)


def test_a_reader_that_goes_away_does_not_stop_the_ranks(start: Start, tmp_path: Path) -> None:
    """Each of the two says more than a pipe takes."""
    says_much = shlex.join(
        [*map(str, LAUNCH), "2", "--no_python", "sh", "-c", f"seq 30000; touch {tmp_path}/done$RANK"]
    )
    assert start("bash", "-c", f"{says_much} 2>&1 | head -n 3").wait() == 0
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def test_ranks_are_started_again_as_often_as_max_restarts_says_and_go_on_from_the_newest_checkpoint(
    launch: Start, tmp_path: Path
) -> None:
    """After one has raised, and after the process that forks them was killed, with which all die."""
    launcher = launch(2, *LONGER, 200, "--checkpoint_steps", 16, max_restarts=2, **fails_once(tmp_path))
    summary = f"error[training-failed]: rank 1 on {HOST}: ValueError: only once"
    launcher.wait_for(f"\nrestart 1 of 2 after {summary}\n")
    launcher.wait_for("[rank 0] going on after step 16, ")
    launcher.wait_for("[rank 0] step 100/")
    run = tmp_path / "run"
    assert sorted(path.name for path in run.glob("failure-*")) == [
        f"failure-rank{rank}.restart0.json" for rank in (0, 1)
    ]
    logs = [(run / f"log-rank{rank}.txt").read_text().split("--- started again at ") for rank in (0, 1)]
    assert "ValueError: only once" in logs[1][0] and "process group ready" in logs[1][1]
    assert "going on after step 16, " in logs[0][1]
    forker_of(launcher).kill()
    launcher.wait_for("\nrestart 2 of 2 after ")
    died = launcher.err[launcher.err.index("-lost]: rank ") : launcher.err.index("\nrestart 2 of 2 after ")]
    assert "is gone: SIGKILL" in died and "start all ranks again" not in died  # launch does so
    wait_until(lambda: launcher.err.count("[rank 0] going on after step ") == 2)
    ranks_of(launcher)[0].kill()
    assert launcher.wait(20) == 137
    last = launcher.err[launcher.err.index("rank 0 failed first, with exit code 137, after ") :]
    assert f"{launcher.typed} --resume auto" in last


def test_the_death_of_the_process_that_forks_ends_all_ranks_with_an_error(launch: Start) -> None:
    """It dies while it loads torch for the workers that it was asked for."""
    launcher = launch(2, *LONGER, 200)
    launcher.wait_for("listening at")
    started = [forker_of(launcher), *ranks_of(launcher)]
    started[0].kill()
    assert launcher.wait(10) == 137, launcher.err
    assert gone(started, 0.5)
    assert re.search(r"^rank \d failed first, with exit code 137, after ", launcher.err, re.M)
