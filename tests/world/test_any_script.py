"""``run`` and ``launch`` of a program that knows nothing of this package: it finds itself as plain Python, or torchrun,
would start it, and its end is the rank's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPOSITORY, RankProcess, Start, clean_environment, wait_until

DDP_MANUAL = (sys.executable, "-m", "ddp_manual")
Ranks = Callable[..., list[RankProcess]]


@pytest.fixture
def ranks(start: Start, tmp_path: Path, port: int) -> Ranks:
    """Starts both ranks of a program by hand, rank 1 first."""

    def ranks(*program: object, options: tuple[object, ...] = (), **env: str) -> list[RankProcess]:
        command = [*DDP_MANUAL, "run", "--world_size", 2, "--master_port", port, *options]
        started = [start(*command, "--rank", rank, *program, cwd=tmp_path, **env) for rank in (1, 0)]
        return started[::-1]

    return ranks


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


# What a program can see of how it was started, and of what it was started with.
SEEN = """
    import gc, json, os, signal, sys, threading

    class Here: pass

    print(json.dumps({
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "path": sys.path[0],
        "spec": str(__spec__ and __spec__.name),
        "package": __package__,
        "folder": os.getcwd(),
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled as": Here.__module__,
        "input": sys.stdin.readline(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "flags": [sys.flags.optimize, sys._xoptions, sys.stdout.write_through],
        "warnings": [rule for rule in sys.warnoptions if "Resource" in rule],
        "descriptor": open(sys.argv[-1]).read(),
        "collects": [gc.isenabled(), gc.get_threshold()],
    }))
"""
FLAGS = ("-O", "-W", "ignore::ResourceWarning", "-X", "name=1", "-X", "other", "-u")


@pytest.mark.parametrize("started_as", ["link.py", "-m package", "app.pyz"])
def test_a_program_finds_itself_its_flags_and_its_descriptors_as_plain_python_would_start_it(
    tmp_path: Path, started_as: str
) -> None:
    for name in ("deep/script", "package/__main__"):
        write(tmp_path, f"{name}.py", SEEN)
    write(tmp_path, "package/__init__.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "deep" / "script.py")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as app:
        app.writestr("__main__.py", textwrap.dedent(SEEN))

    def started_by(*program: str) -> dict[str, Any]:
        reading, writing = os.pipe()
        os.write(writing, b"hi")
        os.close(writing)
        words = [*started_as.split(), "--lr", "0.1", "-m", "x", "--", "--world_size=3", f"/dev/fd/{reading}"]
        ended = subprocess.run(
            [sys.executable, *FLAGS, *program, *words],
            cwd=tmp_path,
            input="typed\n",
            capture_output=True,
            text=True,
            pass_fds=[reading],
            env=clean_environment(PYTHONPATH=str(REPOSITORY)),
            check=False,
        )
        os.close(reading)
        assert ended.returncode == 0, ended.stderr
        seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if started_as == "app.pyz":  # plain Python leaves these as they were typed
            seen |= {"argv": [str(tmp_path / started_as), *seen["argv"][1:]], "file": tmp_path / seen["file"]}
        return seen

    assert started_by("-m", "ddp_manual", "run") == started_by()


FOUND = """
    import json, os, signal, sys
    import torch, torch.distributed as dist
    told = ("TORCHELASTIC", "ROLE", "GROUP", "OMP", "MASTER", "LOCAL")
    names = [name for name in os.environ if name.startswith(told)]
    print(json.dumps({
        **{name: os.environ[name] for name in ["RANK", "WORLD_SIZE", *sorted(names)]},
        "started with": [sys.flags.optimize, [rule for rule in sys.warnoptions if "Resource" in rule], sys._xoptions],
        "descriptor": sys.argv[1:] and os.environ["RANK"] == "0" and open(sys.argv[1]).read(),
        "SIGINT": str(signal.getsignal(signal.SIGINT)),
        "no CUDA": torch.cuda._is_in_bad_fork(),
        "how torch looks for CUDA": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }))
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()  # without it, and without ours in the process, gloo may abort Python's end
"""


def found_by(processes: list[RankProcess]) -> list[dict[str, Any]]:
    """What two ranks have found, which have opened a process group with torchrun's variables alone."""
    assert [process.wait() for process in processes] == [0] * len(processes), processes[0].err
    lines = [line[line.index("{") :] for process in processes for line in process.out.splitlines() if "{" in line]
    seen = sorted(map(json.loads, lines), key=lambda found: found["RANK"])
    assert [found["RANK"] for found in seen] == ["0", "1"]
    for rank, found in enumerate(seen):
        assert found["LOCAL_RANK"] == found["ROLE_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == found["ROLE_WORLD_SIZE"] == "2"
        assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"], found["ROLE_NAME"]) == ("0", "1", "default")
        assert (found["MASTER_ADDR"], found["OMP_NUM_THREADS"]) == ("127.0.0.1", "1")  # as here
        assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert (found["SIGINT"], found["no CUDA"]) == ("<built-in function default_int_handler>", False)
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    return seen


def test_launch_gives_a_program_torchruns_variables_pythons_flags_and_descriptors_and_imports_once_what_it_needs(
    start: Start, tmp_path: Path
) -> None:
    """Where CUDA_HOME or nvcc is, importing cpp_extension asks whether there is CUDA, which by default begins it."""
    imports = """
    import sys
    print([name in sys.modules for name in ("torch.nn", "torchvision", "wave")], flush=True)
    import torchvision
    import torch.optim  # for this torch's compiler is imported
    import torch.utils.cpp_extension
    import wave
    import gc
    gc.unfreeze = lambda: print("thawed", flush=True)  # which takes a second
    """
    script = write(tmp_path, "found.py", textwrap.dedent(imports) + textwrap.dedent(FOUND))
    python = f"{sys.executable} {' '.join(FLAGS)} -m ddp_manual launch --nproc_per_node=2 --standalone"
    launch = start("bash", "-c", f"{python} {script} <(echo hi)", cwd=tmp_path, CUDA_HOME=str(tmp_path))
    seen = found_by([launch])
    assert launch.out.count("[True, True, False]") == 2
    assert "thawed" not in launch.out and "leaked" not in launch.err
    assert [found["descriptor"] for found in seen] == ["hi\n", False]
    for found in seen:
        assert found["started with"] == [1, ["ignore::ResourceWarning"], {"name": "1", "other": True}]
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True" and found["how torch looks for CUDA"] is None
    assert "new processes" not in launch.err


# In every process that is, or forks, a worker: torch says of its forks that they can not use CUDA.
BEGINS_CUDA = """
    import os, sys
    if sys.orig_argv[1].endswith("worker"):
        import torch
        torch.cuda._is_in_bad_fork = lambda begun_by=os.getpid(): os.getpid() != begun_by
"""


def test_where_forks_could_not_use_cuda_workers_are_new_processes_and_a_line_says_so(
    start: Start, tmp_path: Path
) -> None:
    write(tmp_path, "sitecustomize.py", BEGINS_CUDA)
    script, env = write(tmp_path, "found.py", FOUND), {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, script, cwd=tmp_path, **env)
    assert [found["TORCHELASTIC_USE_AGENT_STORE"] for found in found_by([launch])] == ["True", "True"]
    line = "an import has begun CUDA, which no fork can use: the ranks here start as new processes\n"
    assert launch.err.count(line) == 1, launch.err


def test_with_no_python_torch_itself_hosts_the_store_of_ranks_that_are_started_by_hand(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = write(tmp_path, "found.py", FOUND)
    seen = found_by(ranks(sys.executable, script, options=("--run_id", "mine", "--no_python")))
    for found in seen:
        assert "TORCHELASTIC_USE_AGENT_STORE" not in found and found["TORCHELASTIC_RUN_ID"] == "mine"


# Each time that launch starts its two ranks they end in the next of these ways.
ENDS = """
    import atexit, ctypes, json, os, sys, time
    import torch, torch.distributed as dist

    def open_group():
        dist.init_process_group("gloo")
        atexit.register(print, "atexit", rank, flush=True)

    def raises():
        open_group()
        if rank == 1:
            sys.excepthook = lambda kind, error, frames: print("own hook:", error, flush=True)
            raise ValueError("boom")
        dist.barrier()

    class Left:
        def __del__(self, wait=time.sleep, write=os.write, file=os.open("left", os.O_CREAT | os.O_WRONLY)):
            wait(2)
            write(file, b"to its end")

    def leaves_something():
        if rank == 1:
            json.JSONEncoder.left = Left()  # an object that is frozen refers to it
            sys.exit(5)
        time.sleep(60)

    def crashes():
        open_group()
        if rank == 1:
            ctypes.string_at(0)
        dist.barrier()

    def closes_its_group_too_early():
        open_group()
        for _ in range(10 + rank):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        time.sleep(60)

    def is_not_read():
        open_group()
        if rank == 1:
            reading, writing = os.pipe()
            for stream in (1, 2):
                os.dup2(writing, stream)
            print("x" * 1_000_000)
        dist.all_reduce(torch.ones(1))

    class Slow:
        def __reduce__(self):
            print("saving", flush=True)
            time.sleep(3)
            return (str, ("done",))

    def raises_while_another_saves():
        open_group()
        if rank == 0:
            torch.save(Slow(), "slow.pt")
            time.sleep(60)
        while not os.path.exists("slow.pt"):
            time.sleep(0.01)
        raise ValueError("boom")

    def has_finished_while_another_opens_a_group():
        if rank == 0:
            open_group()

    def becomes_another():
        if sys.argv[-1] == "again":
            time.sleep(2)
            sys.exit(3)
        if rank == 0:
            os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
        time.sleep(60)

    rank = int(os.environ["RANK"])
    globals()[sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])]]()
"""
EXECUTED = "rank 0's program has become another one (exec), without torch's store"
FAILED, BOOM = r"rank 1 \(.*\) left with error\[training-failed\]: ValueError: boom", "rank 1 on .*: ValueError: boom"
EXITED = "the program exited with code 5"
CLOSED = "rank 0 had closed the process group while rank 1 was still in a collective"
STUCK = r"rank 1 \(.*\) is stuck while others wait: rank 0 waits for \d s"
FINISHED = "rank 1 had finished while rank 0 was still in the call that opens a process group"
GONE = r"rank 0 \(.*\) is gone: its worker exited with code 3 without a word"
# For each way the exit codes of ranks 0 and 1, and what their errors say; rank 1 has finished well in one of them.
WAYS = {
    "raises": [(14, FAILED), (1, BOOM)],
    "leaves_something": [(14, FAILED.replace("ValueError: boom", EXITED)), (5, f"rank 1 on .*: {EXITED}")],
    "crashes": [(14, r"rank 1 \(.*\) is gone: SIGSEGV"), (139, r"rank 1 \(.*\) is gone: SIGSEGV")],
    "closes_its_group_too_early": [(14, CLOSED), (14, CLOSED)],
    "is_not_read": [(14, STUCK), (14, STUCK)],
    "raises_while_another_saves": [(14, FAILED), (1, BOOM)],
    "has_finished_while_another_opens_a_group": [(14, FINISHED)],
    "becomes_another": [(3, GONE), (14, GONE)],
}


def test_however_a_program_ends_who_began_it_is_named_on_all_ranks_and_a_file_that_is_being_saved_is_finished(
    start: Start, tmp_path: Path
) -> None:
    """A rank that nobody reads is stuck and not lost; one that has closed its group too early is named, and not the one
    whose collective breaks; a program that executes itself is told that it takes torch's store along."""
    script, folder = write(tmp_path, "ends.py", ENDS), tmp_path / "run"
    limits = ["--peer_timeout", 3, "--stall_timeout", 4, "--max_restarts", len(WAYS) - 1]
    command = [*DDP_MANUAL, "launch", "--nproc", 2, "--run_dir", folder, *limits, script, *WAYS]
    launch = start(*command, cwd=tmp_path)
    assert launch.wait(150) == 3, launch.err
    whys = {}
    for attempt, (way, errors) in enumerate(WAYS.items()):
        restart = f".restart{attempt}" if attempt < len(WAYS) - 1 else ""
        for rank, (code, what) in enumerate(errors):
            failure = json.loads((folder / f"failure-rank{rank}{restart}.json").read_text())
            assert failure["exit_code"] == code and re.fullmatch(what, failure["what"]), (way, failure)
            whys[way, rank] = failure["why"] + failure["next"]
    assert "[rank 1] own hook: boom\n[rank 1] atexit 1\n" in launch.out
    assert 'ends.py", line ' in whys["raises", 1] and "script.py" not in whys["raises", 1]
    assert re.search(r'ends\.py", line \d+ in crashes', whys["crashes", 0])
    for rank in (0, 1):
        assert "rank 0 began last the 10th of the default group" in whys["closes_its_group_too_early", rank]
        assert "rank 1 (" in whys["is_not_read", rank] and ": running, on ends.py:" in whys["is_not_read", rank]
        assert (
            EXECUTED in whys["becomes_another", rank] and "start it with --no_python" in whys["becomes_another", rank]
        )
    assert EXECUTED in launch.err.partition("error[master-lost]")[0]  # at once, before its end
    assert (tmp_path / "slow.pt").stat().st_size > 100 and (tmp_path / "left").read_text() == "to its end"
    assert "rank 0 failed first, with exit code 3, after " in launch.err


WORKS_ON = """
    import atexit, json, os, sys, threading, time
    import torch, torch.distributed as dist

    def open_group_at(port):  # as tutorials do, with and without a port of their own
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        dist.init_process_group("gloo", rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
        dist.destroy_process_group()

    def work_on():
        time.sleep(0.5 if rank == 0 else 3)
        if rank == 1:
            dist.distributed_c10d._get_default_store().set("late", "1")
        print("thread", rank, flush=True)

    rank, address = int(os.environ["RANK"]), dict(os.environ)
    open_group_at(sys.argv[1])
    open_group_at(address["MASTER_PORT"])
    os.environ.update(address)
    dist.init_process_group("gloo")
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    atexit.register(print, "atexit", rank, flush=True)
    class Kept:
        def __del__(self):
            print("object", rank, flush=True)
    kept = Kept()
    json.JSONEncoder.left_open = open(f"left_open_by_{rank}", "w")  # an object that is frozen refers to it
    json.JSONEncoder.left_open.write("to its end")
    threading.Thread(target=work_on).start()
    print("end", rank, flush=True)
"""


def test_a_program_opens_groups_where_it_likes_and_what_it_leaves_behind_ends_as_it_does_in_plain_python(
    start: Start, tmp_path: Path, port: int
) -> None:
    """torch would wait at a port of the program's own for a store of the launcher's. Rank 0 keeps the store for a rank
    that goes on. What holds nothing is told once what a loss will cost. No library reports as leaked what is frozen."""
    write(tmp_path, "works.py", WORKS_ON)
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, "--on_loss", "wait", "works.py", port, cwd=tmp_path)
    assert launch.wait() == 0, launch.err
    for rank in (0, 1):
        said = [line for line in launch.out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert said == [f"[rank {rank}] {name} {rank}" for name in ("end", "thread", "atexit", "object")]
        assert (tmp_path / f"left_open_by_{rank}").read_text() == "to its end"
    assert "keeping the store for rank 1, still at work" in launch.err and not re.search(r"error\[|leaked", launch.err)
    line = "works.py does not call hold(): after a loss all ranks start it again from its beginning"
    assert [one for one in launch.err.splitlines() if "hold()" in one] == [f"[rank 0] {line}"]


TUTORIAL = """
    import os
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def work(rank, world_size):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, b"ranks: %d\\n" % int(total))  # at once: two processes share the pipe
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(work, args=(2,), nprocs=2)
"""


def test_processes_that_a_program_spawns_may_train_and_are_said_to_be_no_ranks(
    start: Start, tmp_path: Path, port: int
) -> None:
    script = write(tmp_path, "tutorial.py", TUTORIAL.format(port=port))
    launched = start(*DDP_MANUAL, "launch", "--nproc", 1, script, cwd=tmp_path)
    assert launched.wait() == 0, launched.err
    assert launched.out.count("ranks: 2") == 2
    assert launched.err.count("starts processes of its own (2, torch.multiprocessing): they are no ranks") == 1


OPENS_AGAIN = """
    import os, sys, threading, time
    import torch, torch.distributed as dist, torch.distributed.rpc as rpc

    rank, x = int(os.environ["RANK"]), torch.ones(4)
    if rank < 2:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        dist.all_reduce(x)
        dist.destroy_process_group()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    rpc.shutdown()
    for late in range(3):
        dist.init_process_group("gloo")
        dist.all_reduce(x)
        time.sleep(late == rank)
        dist.destroy_process_group()
        time.sleep(late == 1 + rank)

    dist.init_process_group("gloo")

    def wait():  # as in a collective, or in a long backward pass
        late = torch.futures.Future()
        threading.Timer(4, late.set_result, [1]).start()
        late.wait()

    pair = dist.new_group([1, 2])
    if rank:
        dist.all_reduce(x, group=pair)
    for _ in range(3000):  # more than a heartbeat says in time
        dist.all_reduce(x)
    if rank == 2:
        dist.destroy_process_group()
        os._exit(0)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)  # gloo numbers these too
    wait()
    dist.destroy_process_group()
    # Two go on, and torch gives their groups the same names.
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    for _ in range(3010):
        dist.all_reduce(x, group=pair)
    wait()
    dist.all_reduce(x)
    dist.destroy_process_group()
"""


def test_ranks_open_groups_again_although_one_of_them_is_late_and_one_may_end_once_it_has_made_all_its_calls(
    start: Start, tmp_path: Path
) -> None:
    """torch would find the addresses of the group before, in the store that all of them meet at. Some may be in a group
    of their own first, and none of them in an RPC group, as in torch's tutorial of both."""
    script = write(tmp_path, "again.py", OPENS_AGAIN)
    launched = start(*DDP_MANUAL, "launch", "--nproc", 3, script, tmp_path / "store", cwd=tmp_path)
    assert launched.wait() == 0, launched.err


# Rank 0 writes for so many seconds once it is asked to end, and says how often it was asked; the others just end.
SAVES = """
    import os, signal, sys, time

    def save(number, frame):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        open("asked", "w").close()
        end = time.monotonic() + float(sys.argv[1])
        while time.monotonic() < end:
            time.sleep(0.01)
        print("saved after", [*os.read(came, 100)], flush=True)
        sys.exit(0)

    if os.environ["WORLD_SIZE"] == "2":
        import torch.distributed as dist
        dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        came, coming = os.pipe()
        os.set_blocking(coming, False)
        signal.set_wakeup_fd(coming)  # gets a byte for each signal, also of two that call the handler once
        signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_reaches_the_program_and_that_of_another_rank_is_asked_once_to_end_and_has_the_time_to_save(
    ranks: Ranks, tmp_path: Path
) -> None:
    processes = ranks(write(tmp_path, "saves.py", SAVES), 7)
    for process in processes:
        process.wait_for("ready")
    processes[1].process.send_signal(signal.SIGINT)
    assert [process.wait(20) for process in processes] == [14, 130], processes[0].err  # where it would sleep for 60 s
    assert processes[0].out == "ready\nsaved after [15]\n"
    assert "error[stopped]: stopped by Ctrl-C (SIGINT)" in processes[1].err
    assert "left with error[stopped]" in processes[0].err
    assert not (tmp_path / "runs").exists()


def terminate(agent: psutil.Process, by: str, asked: Path) -> None:
    """Send SIGTERM to a process group, as timeout and Slurm do, or to each process, as systemd does. The program has it
    before its agent does anything about it."""
    agent.suspend()
    if by == "group":
        os.killpg(agent.pid, signal.SIGTERM)
    else:
        for process in (agent, *agent.children(recursive=True)):
            process.terminate()
    wait_until(asked.exists, 20)
    agent.resume()


@pytest.mark.parametrize(("by", "options"), [("group", ["--no_python", sys.executable]), ("each", [])])
def test_a_signal_reaches_a_program_once_however_it_is_sent(
    start: Start, tmp_path: Path, by: str, options: list[str]
) -> None:
    script = write(tmp_path, "saves.py", SAVES)
    run = start(*DDP_MANUAL, "run", "--world_size", 1, *options, script, 0.5, cwd=tmp_path)
    run.wait_for("ready")
    terminate(psutil.Process(run.process.pid), by, tmp_path / "asked")
    assert run.wait(20) == 0, run.err
    assert run.out == "ready\nsaved after [15]\n"
    assert run.err.count("SIGTERM") == 1


def test_launch_that_is_signalled_lets_a_program_save(start: Start, tmp_path: Path) -> None:
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, write(tmp_path, "saves.py", SAVES), 1.5, cwd=tmp_path)
    launch.wait_for("[rank 0] ready")
    launch.wait_for("[rank 1] ready")
    launch.process.terminate()
    assert launch.wait(20) == 143, launch.err
    assert launch.out.count("saved after [15]") == 1
    assert "left with error" not in launch.err
    assert not (tmp_path / "runs").exists()
