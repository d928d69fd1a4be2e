"""``ddp_manual.join`` in a user's own script, and how a failure of one rank reaches the others."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import RankProcess, Start

FAILING = """
    import sys, time
    import torch, torch.distributed as dist
    import ddp_manual

    with ddp_manual.join(run_dir=sys.argv[1]) as world:
        print("in the world", file=sys.stderr, flush=True)
        for step in range(10_000):
            if step == 50 and world.rank == int(sys.argv[2]):
                FAILURE
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.002)
"""


@pytest.fixture
def start_world(start_joined: Start, tmp_path: Path) -> Start:
    """Start three ranks of which one does something else at step 50, with files in ``tmp_path / "run"``."""

    def start_world(failing: int, failure: str) -> list[RankProcess]:
        code = FAILING.replace("FAILURE", failure)
        return start_joined(code, tmp_path / "run", failing, ranks=3)  # type: ignore[return-value]

    return start_world  # type: ignore[return-value]


def test_the_example_runs_on_two_ranks_and_is_about_twenty_lines(start: Start, port: int) -> None:
    example = Path("examples/own_script.py")
    ranks = [start(sys.executable, example, WORLD_SIZE="2", RANK=str(rank), MASTER_PORT=str(port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for number, rank in enumerate(ranks):
        assert re.match(rf"rank {number} of 2, (cpu|cuda:{number}), (gloo|nccl): loss 0\.0", rank.out)
    code = example.read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


WITHOUT_A_BLOCK = """
    import os, sys
    import torch, torch.distributed as dist
    import ddp_manual

    world = ddp_manual.join(device="cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    {then}
"""


@pytest.mark.parametrize("interpreter", ["exec python script.py", "exec python -i -q < script.py"])
def test_a_world_without_a_block_is_left_by_close_or_when_the_interpreter_ends(
    start: Start, port: int, tmp_path: Path, interpreter: str
) -> None:
    then = "world.rank or (world.close(), world.close())\n    print(total.item(), dist.is_initialized(), flush=True)"
    (tmp_path / "script.py").write_text(textwrap.dedent(WITHOUT_A_BLOCK.format(then=then)))
    command = interpreter.replace("python", sys.executable)
    env = {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    ranks = [start("sh", "-c", command, cwd=tmp_path, RANK=str(rank), **env) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert [rank.out.split()[-2:] for rank in ranks] == [["2.0", "False"], ["2.0", "True"]]
    for rank in ranks:
        assert "error[" not in rank.err and "Traceback" not in rank.err and "GeneratorExit" not in rank.err


def test_what_ends_a_script_without_a_block_is_told_to_the_other_ranks(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    then = "if world.rank == 1: raise ValueError('mine')\n    dist.all_reduce(total)"
    script.write_text(textwrap.dedent(WITHOUT_A_BLOCK.format(then=then)))
    meeting = {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    ranks = [start(sys.executable, script, RANK=str(rank), **meeting) for rank in range(2)]
    assert ranks[1].wait() == 1 and ranks[0].wait() != 0
    assert "ValueError: mine" in ranks[0].err and "GeneratorExit" not in ranks[0].err


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


def test_with_nccl_the_tensors_of_the_cpu_go_over_gloo_and_are_counted_too(start: Start) -> None:
    # torch's fake backend in the place of NCCL, which opens on a GPU only; it counts nothing of what gloo does either.
    script = """if True:
        import torch, torch.distributed as dist, torch.testing._internal.distributed.fake_pg
        from ddp_manual.worker.device_and_backend import for_all_devices
        from ddp_manual.worker.private_torch import open_groups
        both = for_all_devices("nccl")
        dist.init_process_group(both.replace("nccl", "fake"), store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        print(both, for_all_devices("gloo"), list(open_groups().begun.values()))
        dist.destroy_process_group()  # without it a thread of gloo may end the process
    """
    process = start(sys.executable, "-c", script)
    assert process.wait() == 0, process.err
    assert process.out == "cpu:gloo,cuda:nccl gloo [3]\n"


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


BUFFERS = """
    import time, torch, ddp_manual

    with ddp_manual.join(stall_timeout=2) as world:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))
        time.sleep(1000 * (world.rank == 0))
        model(torch.ones(3, 4))
"""


def test_a_rank_that_sleeps_while_another_waits_for_its_buffers_is_behind(start_joined: Start) -> None:
    """A model with running statistics has them broadcast by DDP's forward pass, outside of torch.distributed."""
    ranks = start_joined(BUFFERS)
    assert [rank.wait(30) for rank in ranks] == [14, 14]
    stuck = r"error\[peer-stalled\]: rank 0 \(.*\) is stuck while others wait: rank 1 waits for"
    for rank in ranks:
        assert re.search(stuck, rank.err), rank.err


ASYNCHRONOUS = """
    import threading, time
    import torch, torch.distributed as dist
    import ddp_manual
    from ddp_manual.worker import reporter

    def result_of(work):
        completed = threading.Lock()
        completed.acquire()

        def complete():
            work.wait()
            if not {hangs}:
                completed.release()

        threading.Thread(target=complete, daemon=True).start()
        return completed.acquire

    class Result:
        pass

    open_groups = reporter.open_groups
    reporter.open_groups = lambda: open_groups()._replace(return_at_once=True)

    with ddp_manual.join(stall_timeout=2) as world:
        for step in range(10_000):
            if step == 50 and {late}:
                time.sleep(1000)
            result = Result()
            result.item = result_of(dist.all_reduce(torch.ones(1000), async_op=True))
            result.item()
"""


@pytest.mark.parametrize(
    ("late", "hangs", "said"),
    [
        ("world.rank == 2", "False", r"rank 2 \(.*\) is stuck while others wait: ranks 0-1 wait for "),
        ("False", "step == 50", "all ranks have waited in a collective for "),
    ],
    ids=["a late rank", "a network that is cut"],
)
def test_ranks_wait_for_the_result_of_a_collective_that_returned_at_once(
    start_joined: Start, late: str, hangs: str, said: str
) -> None:
    """As with NCCL. The result is a fake, for want of a GPU: its item() is in C, and waits for the collective."""
    ranks = start_joined(ASYNCHRONOUS.format(late=late, hangs=hangs), ranks=3)
    assert [rank.wait(30) for rank in ranks] == [14, 14, 14]
    for rank in ranks:
        assert re.search(rf"error\[peer-stalled\]: {said}", rank.err), rank.err
        assert re.search(r"rank 0 \(.*\): running, on script.py:\d+ in <module>", rank.err)


def test_a_script_that_joins_has_its_identity_where_libraries_look_and_the_time_limits_of_any_script(
    start_joined: Start,
) -> None:
    """The stall limit is that of ``run``, and torch's default store waits for as long as after init_process_group."""
    (rank,) = start_joined(
        """
        import os
        import ddp_manual
        import torch.distributed as dist
        with ddp_manual.join(device="cpu") as world:
            store, _, _ = next(dist.rendezvous("env://"))
            names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR GLOO_SOCKET_IFNAME"
            print(*(os.environ[name] for name in names.split()), store.num_keys() > 0)
            print(world.spec.stall_limit, dist.distributed_c10d._get_default_store().timeout.total_seconds())
        """,
        ranks=1,
    )
    assert rank.wait() == 0, rank.err
    identity, limits = rank.out.splitlines()
    assert identity.split() == ["0", "1", "0", "127.0.0.1", "lo", "True"]
    stall, waits = map(float, limits.split())
    assert stall == 1800 and waits >= 1800


def test_one_rank_per_host_does_a_job_and_the_others_wait_for_it(start_joined: Start, tmp_path: Path) -> None:
    ranks = start_joined(
        """
        import sys, time
        from pathlib import Path
        import ddp_manual

        file = Path(sys.argv[1])

        def job():
            time.sleep(0 if file.exists() else 3)
            file.write_text(file.read_text() + "done" if file.exists() else "done")

        with ddp_manual.join() as world:
            world.once_per_host("write the file", job, timeout=60)
            assert file.exists()
            world.once_per_host("write \\udcff", job, timeout=60)  # another, of a name that is not UTF-8
            world.once_per_host("write \\udcff", job, timeout=60)
            print(file.read_text())
        """,
        tmp_path / "file",
        ranks=3,
    )
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert [rank.out for rank in ranks] == ["donedonedone\n"] * 3
    for rank in ranks[1:]:
        assert "waiting for rank 0 on " in rank.err


def test_a_script_that_is_stopped_or_gives_up_while_it_waits_ends_as_python_does(
    start: Start, port: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport ddp_manual\nwith ddp_manual.join(join_timeout=float(sys.argv[1])):\n    pass\n"
    )

    def start_one(rank: int, join_timeout: float) -> RankProcess:
        return start(sys.executable, script, join_timeout, RANK=str(rank), WORLD_SIZE="4", MASTER_PORT=str(port))

    first = start_one(0, 60)
    first.wait_for("listening at ")
    stopped, impatient = start_one(1, 60), start_one(2, 5)
    first.wait_for("waiting for rank 3; 3 of 4 here")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait(10) == -signal.SIGINT, stopped.err
    assert impatient.wait(20) == 1
    assert re.search(r"never joined within \d+ s", impatient.err)
    for process in (stopped, impatient):
        assert "terminate called" not in process.err
    first.wait_for("waiting for ranks 1-3; 1 of 4 here")
