"""``ddp_manual.join`` in a user's own script, and how a failure of one rank reaches the others."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from ddp_manual.worker.device_and_backend import for_all_devices
from ddp_manual.worker.private_torch import open_groups
from tests.conftest import RankProcess, Start

LAUNCH = (sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2)


def test_the_example_runs_on_two_ranks_and_is_about_twenty_lines(start: Start) -> None:
    example = Path("examples/own_script.py")
    launch = start(*LAUNCH, example)
    assert launch.wait() == 0, launch.err
    for number in range(2):
        said = rf"^\[rank {number}\] rank {number} of 2, (cpu|cuda:{number}), (gloo|nccl): loss 0\.0"
        assert re.search(said, launch.out, re.MULTILINE), launch.out
    code = example.read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


CLOSED_AND_LEFT = """
    import torch, torch.distributed as dist
    import ddp_manual

    world = ddp_manual.join(device="cpu", allow_mismatch=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    world.close(), world.close()
    print(total.item(), dist.is_initialized(), flush=True)
    world = ddp_manual.join(device="cpu", allow_mismatch=True)
    dist.all_reduce(total)
    print(total.item(), dist.is_initialized(), flush=True)
"""


def test_a_world_without_a_block_is_left_by_close_or_when_the_interpreter_ends(
    start: Start, port: int, tmp_path: Path
) -> None:
    """Also at Python's prompt, which has no script that could be compared."""
    (tmp_path / "script.py").write_text(textwrap.dedent(CLOSED_AND_LEFT))
    meeting = {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    words = [f"exec {sys.executable} {how} script.py" for how in ("", "-i -q <")]
    ranks = [start("sh", "-c", word, cwd=tmp_path, RANK=str(rank), **meeting) for rank, word in enumerate(words)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    for rank in ranks:
        printed = [line for line in rank.out.splitlines() if line.endswith(("False", "True"))]
        assert [line.split()[-2:] for line in printed] == [["2.0", "False"], ["4.0", "True"]], rank.out
        assert "error[" not in rank.err and "Traceback" not in rank.err and "GeneratorExit" not in rank.err


FAILS = """
    import torch, torch.distributed as dist
    import ddp_manual

    world = ddp_manual.join(device="cpu")
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        raise ValueError("mine")
    dist.all_reduce(torch.ones(1))
"""


def test_what_ends_a_script_without_a_block_is_told_to_the_other_ranks(start_joined: Start) -> None:
    ranks = start_joined(FAILS)
    assert ranks[1].wait() == 1 and ranks[0].wait() != 0
    assert "ValueError: mine" in ranks[0].err and "GeneratorExit" not in ranks[0].err


ENDS = """
import atexit, sys, time
atexit.register(print, "hook")
import ddp_manual
file = open(sys.argv[1], "w")
file.write("written")
world = ddp_manual.join(device="cpu")
if world.rank == 1:
    time.sleep(0.5)  # the other rank is leaving at its end by now
    raise ValueError("mine")
"""


def test_a_script_that_another_rank_fails_at_its_end_has_an_exit_code_that_says_so(
    start_joined: Start, tmp_path: Path
) -> None:
    ranks = start_joined(ENDS, tmp_path / "file")
    assert [rank.wait(30) for rank in ranks] == [14, 1] and ranks[0].out == "hook\n"
    assert (tmp_path / "file").read_text() == "written"


OPENS = """
import ddp_manual, torch.distributed as dist
with ddp_manual.join(device="cpu", open_group=False) as world:
    try:
        world.gather(world.rank)
    except ddp_manual.errors.BadOption as refused:
        assert "without a process group" in str(refused)
        dist.init_process_group("gloo")
        print(sum(world.gather(world.rank)))
"""


def test_ranks_gather_once_a_script_that_opens_the_group_itself_has_done_so(start_joined: Start) -> None:
    ranks = start_joined(OPENS)
    assert [rank.wait(30) for rank in ranks] == [0, 0] and [rank.out for rank in ranks] == ["1\n"] * 2


EXITS = """
import multiprocessing, sys, threading, time, ddp_manual
world = ddp_manual.join(device="cpu")
if world.rank == 1:
    threading.Thread(target=sys.exit, args=(4,)).start()
    try:
        sys.exit(2)
    except SystemExit as caught:
        assert caught.code == 2
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    child.start()
    child.join()
    assert child.exitcode == 5
print(sum(world.gather(world.rank)))
if "really" in sys.argv:
    try:
        time.sleep(60) if world.rank == 0 else sys.exit(3)
    except SystemExit as caught:
        sys.exit(caught)
elif "builtin" in sys.argv and world.rank == 1:
    time.sleep(0.3)  # the other rank is leaving by now
    exit(4)
"""


@pytest.mark.parametrize(("really", "codes"), [((), [0, 0]), (("really",), [14, 3]), (("builtin",), [14, 4])])
def test_of_the_exits_of_a_script_without_a_block_only_the_one_that_ends_it_is_told(
    start_joined: Start, really: tuple[str, ...], codes: list[int]
) -> None:
    ranks = start_joined(EXITS, *really)
    assert [rank.wait(30) for rank in ranks] == codes, ranks[0].err
    assert [rank.out for rank in ranks] == ["1\n"] * 2 and "Traceback" not in ranks[1].err
    assert (f"the program exited with code {codes[1]}" in ranks[0].err) == bool(really)


SAVES = """
import signal, sys, time, ddp_manual

def save(number, frame):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)

with ddp_manual.join(device="cpu") as world:
    if world.rank == 0:
        signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_signal_to_all_processes_of_scripts_leaves_one_the_time_to_save_though_another_has_ended(
    start_joined: Start,
) -> None:
    ranks = start_joined(SAVES)
    for rank in ranks:
        rank.wait_for("ready")
    for rank in reversed(ranks):
        os.killpg(rank.process.pid, signal.SIGTERM)  # its agent has the signal too
    assert [rank.wait(20) for rank in ranks] == [0, -signal.SIGTERM], ranks[0].err
    assert ranks[0].out == "ready\nsaved\n"


def test_with_nccl_the_tensors_of_the_cpu_go_over_gloo_and_are_counted_too() -> None:
    """torch's fake backend is in the place of NCCL, which opens on a GPU only; neither counts what gloo does."""
    both = for_all_devices("nccl")
    assert (both, for_all_devices("gloo")) == ("cpu:gloo,cuda:nccl", "gloo")
    dist.init_process_group(both.replace("nccl", "fake"), store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        assert list(open_groups().begun.values()) == [3]
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_script_on_a_gpu_reduces_tensors_of_the_gpu_and_of_the_cpu(start: Start, port: int) -> None:
    script = f"""if True:
        import torch, torch.distributed as dist
        import ddp_manual
        with ddp_manual.join(world_size=1, master_port={port}) as world:
            for device in (world.device, "cpu"):
                total = torch.ones(1, device=device)
                dist.all_reduce(total)
                print(world.backend, total.device.type, total.item())
    """
    process = start(sys.executable, "-c", script)
    assert process.wait() == 0, process.err
    assert process.out == "nccl cuda 1.0\nnccl cpu 1.0\n"


# Each time that launch starts its two ranks, rank 0 waits in the next of these ways.
UNSEEN = """
    import os, sys, threading, time
    import torch, torch.distributed as dist
    from ddp_manual.worker import reporter

    def for_buffers():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))
        time.sleep(1000 * dist.get_rank())
        model(torch.ones(3, 4))

    class Result:
        pass

    def result_of(work, hangs):
        completed = threading.Lock()
        completed.acquire()

        def complete():
            work.wait()
            if not hangs:
                completed.release()

        threading.Thread(target=complete, daemon=True).start()
        return completed.acquire

    def for_a_result(late, hangs):
        open_groups = reporter.open_groups
        reporter.open_groups = lambda: open_groups()._replace(return_at_once=True)
        for step in range(10_000):
            if step == 50 and late:
                time.sleep(1000)
            result = Result()
            result.item = result_of(dist.all_reduce(torch.ones(1000), async_op=True), step == 50 and hangs)
            result.item()

    def for_a_result_of_a_late_rank():
        for_a_result(late=dist.get_rank() == 1, hangs=False)

    def for_a_result_that_never_comes():
        for_a_result(late=False, hangs=True)

    dist.init_process_group("gloo")
    globals()[sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])]]()
"""
LATE = r"rank 1 \(.*\) is stuck while others wait: rank 0 waits for "
WAITS = {
    "for_buffers": LATE,
    "for_a_result_of_a_late_rank": LATE,
    "for_a_result_that_never_comes": "all ranks have waited in a collective for ",
}


def test_ranks_are_seen_to_wait_where_torch_distributed_is_not_called(start: Start, tmp_path: Path) -> None:
    """A model with running statistics has them broadcast by DDP's forward pass; and with NCCL a collective returns at
    once, and its result is waited for: a fake, for want of a GPU, whose item() is in C and waits for the collective."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(UNSEEN))
    options = ["--stall_timeout", 2, "--max_restarts", len(WAITS) - 1, "--run_dir", tmp_path / "run"]
    launch = start(*LAUNCH, *options, script, *WAITS)
    assert launch.wait(90) == 14, launch.err
    for attempt, (how, said) in enumerate(WAITS.items()):
        restart = f".restart{attempt}" if attempt < len(WAITS) - 1 else ""
        for rank in range(2):
            failure = json.loads((tmp_path / "run" / f"failure-rank{rank}{restart}.json").read_text())
            assert failure["identifier"] == "peer-stalled" and re.match(said, failure["what"]), (how, failure)
            assert re.search(r"rank 0 \(.*\): running, on script.py:\d+ in for_", failure["why"]), failure


def test_a_script_that_joins_has_its_identity_where_libraries_look_and_the_time_limits_of_any_script(
    start_joined: Start,
) -> None:
    """The stall limit is that of ``run``, and torch's default store waits for as long as after init_process_group. Once
    its agent is gone, the kernel ends the script."""
    (rank,) = start_joined(
        """
        import os, time
        import ddp_manual
        import torch.distributed as dist
        with ddp_manual.join(device="cpu") as world:
            store, _, _ = next(dist.rendezvous("env://"))
            names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR GLOO_SOCKET_IFNAME"
            print(*(os.environ[name] for name in names.split()), store.num_keys() > 0)
            waits = dist.distributed_c10d._get_default_store().timeout.total_seconds()
            print(world.spec.stall_limit, waits, "seconds", flush=True)
            time.sleep(60)
        """,
        ranks=1,
    )
    rank.wait_for("seconds")
    identity, limits = rank.out.splitlines()
    assert identity.split() == ["0", "1", "0", "127.0.0.1", "lo", "True"]
    stall, waits = map(float, limits.split()[:2])
    assert stall == 1800 and waits >= 1800
    (agent,) = psutil.Process(rank.process.pid).children()
    agent.kill()
    assert rank.wait(10) == -signal.SIGKILL


ONCE = """
    import sys, time
    from pathlib import Path
    import ddp_manual

    file = Path(sys.argv[1])

    def job():
        time.sleep(0 if file.exists() else 3)
        file.write_text(file.read_text() + "done" if file.exists() else "done")

    def fail():
        raise FileNotFoundError("no such mirror: \\udcff")

    def missing():
        raise ddp_manual.errors.DataMissing("there is no file", why="", next="make one")

    with ddp_manual.join() as world:
        world.once_per_host("write the file", job, timeout=60)
        assert file.exists()
        world.once_per_host("write \\udcff", job, timeout=60)  # another, of a name that is not UTF-8
        world.once_per_host("write \\udcff", job, timeout=60)
        print(file.read_text())
        try:
            world.once_per_host("try a mirror", fail, timeout=60)
        except (FileNotFoundError, ddp_manual.errors.TrainingFailed) as error:
            assert "no such mirror" in str(error)
        world.once_per_host("write another", missing, timeout=60)
"""


def test_one_rank_per_host_does_a_job_and_the_others_wait_for_it(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ONCE))
    launch = start(*LAUNCH, script, tmp_path / "file")
    assert launch.wait() == 16, launch.err
    assert sorted(launch.out.splitlines()) == [f"[rank {rank}] donedonedone" for rank in range(2)]
    assert "[rank 1] waiting for rank 0 on " in launch.err
    assert "rank 0 failed first, with exit code 16, " in launch.err


def test_a_script_that_is_stopped_or_gives_up_while_it_waits_ends_as_python_does(
    start: Start, port: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport ddp_manual\nwith ddp_manual.join(join_timeout=float(sys.argv[1])):\n    pass\n"
    )

    def start_one(rank: int, join_timeout: float) -> RankProcess:
        return start(sys.executable, script, join_timeout, RANK=str(rank), WORLD_SIZE="3", MASTER_PORT=str(port))

    stopped = start_one(0, 60)
    stopped.wait_for("listening at ")
    impatient = start_one(1, 5)
    stopped.wait_for("waiting for rank 2; 2 of 3 here")
    assert impatient.wait(20) == 1
    assert re.search(r"never joined within \d+ s", impatient.err)
    stopped.wait_for("waiting for ranks 1-2; 1 of 3 here")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait(10) == -signal.SIGINT, stopped.err
    for process in (stopped, impatient):
        assert "terminate called" not in process.err
