"""``join`` leaves the process as it was before; and a process and its agent do not outlive each other."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ddp_manual.agent.network_interface import interface_addresses, own_address
from tests.conftest import REPOSITORY, Start, free_port, gone

STATE = """
    import faulthandler, logging, os, resource, signal, sys
    import ddp_manual

    def state():
        logger = logging.getLogger("ddp_manual")
        return {
            "environment": dict(os.environ),
            "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
            "log": (list(logger.handlers), logger.propagate, logger.level, logger.disabled),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
            "faulthandler": faulthandler.is_enabled(),
            "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        }

"""

AS_FOUND = f"""
{STATE}
    import numpy  # torch imports it, which sets and removes a variable
    put = set()  # such as RES_OPTIONS, which look-ups of the user's threads and programs would read
    sys.addaudithook(lambda event, arguments: event == "os.putenv" and put.add(os.fsdecode(arguments[0])))

    def changed_by(body, **options):
        before = state()
        put.clear()
        try:
            with ddp_manual.join(device="cpu", **options):
                print(sorted(put - set(before["environment"]) - set(os.environ)))
                body()
        except (KeyError, ddp_manual.DdpManualError) as error:
            print(type(error).__name__)
        after = state()
        print([name for name in before if before[name] != after[name]])

    def fail():
        raise KeyError

    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    logging.getLogger("ddp_manual").addHandler(logging.NullHandler())
    logging.getLogger("ddp_manual").setLevel(logging.WARNING)
    os.environ["MASTER_ADDR"], os.environ["LOCAL_RANK"] = "localhost", "0"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    changed_by(lambda: None)
    faulthandler.enable()
    changed_by(lambda: None, world_size=2, rank=1, master_port=int(sys.argv[1]), join_timeout=0.5)
    changed_by(fail)
"""

ANOTHER_RUN = """
    import os, subprocess, sys
    import ddp_manual

    rank, ports, addresses = int(sys.argv[1]), sys.argv[2:5], sys.argv[5:]
    for number in range(2):
        place = {"rank": rank ^ number, "master_port": int(ports[number]), "master_addr": addresses[number]}
        with ddp_manual.join(device="cpu", world_size=2, **place) as world:
            print(world.rank, os.environ["RANK"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
            if number == 0 and world.rank == 0:
                run = [sys.executable, "-m", "ddp_manual", "run", "--world_size", "1", "--rank", "0"]
                other_run = ["--master_port", ports[2], "--master_addr", addresses[1]]
                subprocess.run([*run, *other_run, "--no_python", "env"], check=True)
    alone = ddp_manual.WorldSpec.from_environment()
    print(alone.world_size, alone.rank, alone.master_addr, alone.master_port)
"""

WAITING = """
    import sys, time
    import ddp_manual
    with ddp_manual.join(device="cpu"):
        print("inside", file=sys.stderr, flush=True)
        time.sleep(60)
"""

JOINING_TWICE = """
    import os, sys
    import torch, torch.distributed as dist
    import ddp_manual

    def work(rank=None):
        options = {} if rank is None else {"rank": rank, "world_size": 1, "master_port": int(sys.argv[1])}
        for _ in range(2):
            with ddp_manual.join(device="cpu", **options) as world:
                total = torch.ones(1)
                dist.all_reduce(total)
                os.write(1, f"{world.rank} {total.item()}\\n".encode())  # both ranks have this file

    if __name__ == "__main__":
        if sys.argv[1:]:
            torch.multiprocessing.spawn(work, nprocs=1)
        else:
            work()
"""


def _written(folder: Path, code: str) -> Path:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return script


def test_join_restores_the_process_after_a_run_after_a_timeout_and_after_an_exception(
    start: Start, tmp_path: Path
) -> None:
    """And while it joins, the process has no variable that it does not keep in the run."""
    script = start(sys.executable, _written(tmp_path, AS_FOUND), free_port())
    assert script.wait(30) == 0, script.err
    assert script.out.splitlines() == ["[]", "[]", "MasterRefused", "[]", "[]", "KeyError", "[]"], script.err


def test_neither_a_second_join_nor_a_program_that_a_rank_starts_takes_over_port_rank_or_interface(
    start: Start, tmp_path: Path
) -> None:
    """The first run is on loopback; the other runs are at this host's own address, on another interface."""
    address = own_address()
    if address is None:
        pytest.skip("this host has no address except loopback")
    interface, ports = interface_addresses()[address], [free_port() for _ in range(3)]
    script = _written(tmp_path, ANOTHER_RUN)
    ranks = [start(sys.executable, script, rank, *ports, "127.0.0.1", address) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    for number, rank in enumerate(ranks):
        lines = rank.out.splitlines()
        assert lines[0] == f"{number} {number} lo"
        assert lines[-2:] == [f"{1 - number} {1 - number} {interface}", "1 0 127.0.0.1 29500"]
    told = dict(line.split("=", 1) for line in ranks[0].out.splitlines() if "=" in line)
    found = [told[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")]
    assert found == ["0", "1", address, interface]
    assert f"listening at {address}:{ports[2]}\n" in ranks[0].err


def test_an_agent_ends_with_its_script(start: Start, tmp_path: Path) -> None:
    """And the other way round: see test_library."""
    script = start(sys.executable, _written(tmp_path, WAITING))
    script.wait_for("inside")
    (agent,) = psutil.Process(script.process.pid).children()
    script.process.send_signal(signal.SIGKILL)
    assert gone([agent], 10)


def test_ranks_join_twice_below_torchrun_and_below_torchs_own_spawn(start: Start, tmp_path: Path, port: int) -> None:
    script = _written(tmp_path, JOINING_TWICE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    two, spawned = start(*torchrun, script), start(sys.executable, script, port)
    for process, said in ((two, ["0 2.0"] * 2 + ["1 2.0"] * 2), (spawned, ["0 1.0"] * 2)):
        assert process.wait(60) == 0, process.err
        assert sorted(process.out.splitlines()) == said
        assert "error[" not in process.err


def test_a_script_that_exits_inside_join_ends_its_rank_with_that_code_and_the_others_that_sleep(
    start_joined: Start,
) -> None:
    body = "if world.rank == 1: sys.exit(3)\n    time.sleep(60)"
    ranks = start_joined(f"import sys, time, ddp_manual\nwith ddp_manual.join(peer_timeout=3) as world:\n    {body}\n")
    assert [rank.wait(30) for rank in ranks] == [14, 3], ranks[1].err
    assert "error[" in ranks[0].err and ": the program exited with code 3" in ranks[0].err


SOON = """
import os, sys
if os.path.basename(sys.orig_argv[1]) == "agent":
    from ddp_manual.protocol import agent
    agent.LEAVE_TIMEOUT = 1
"""


def test_a_rank_that_works_on_after_rank_0_has_exited_and_left_ends_well(start_joined: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SOON)
    body = (
        "import sys, time, ddp_manual\n"
        "with ddp_manual.join() as world:\n"
        "    if world.rank == 0: sys.exit(0)\n"
        "    time.sleep(6)\n"
        "print('came out')\n"
    )
    ranks = start_joined(body, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert [rank.wait(30) for rank in ranks] == [0, 0], ranks[1].err
    assert "error[" not in ranks[0].err
    assert "rank 0 has finished and left; this rank goes on alone" in ranks[1].err
    assert "came out" in ranks[1].out
