"""``run`` and ``launch`` of a program that knows nothing of this package: it finds itself as plain Python, or torchrun,
would start it, and its end is the rank's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPOSITORY, RankProcess, Start, clean_environment

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


# What a program can see of how it was started.
SEEN = """
    import json, os, signal, sys, threading

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
    }))
"""


@pytest.mark.parametrize(
    "started_as",
    ["script.py", "-m package.inner", "-m package", "folder", "app.pyz", "link.py"],
)
def test_a_program_finds_itself_as_plain_python_would_start_it(tmp_path: Path, started_as: str) -> None:
    for name in ("script", "deep/script", "package/inner", "package/__main__", "folder/__main__"):
        write(tmp_path, f"{name}.py", SEEN)
    write(tmp_path, "package/__init__.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "deep" / "script.py")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as app:
        app.writestr("__main__.py", textwrap.dedent(SEEN))
    words = [*started_as.split(), "--lr", "0.1", "-m", "x", "--", "--world_size=3"]

    def started_by(*program: str) -> dict[str, Any]:
        ended = subprocess.run(
            [*program, *words],
            cwd=tmp_path,
            input="typed\n",
            capture_output=True,
            text=True,
            env=clean_environment(PYTHONPATH=str(REPOSITORY)),
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if started_as in ("folder", "app.pyz"):  # plain Python leaves these as they were typed
            seen |= {"argv": [str(tmp_path / started_as), *seen["argv"][1:]], "file": tmp_path / seen["file"]}
        return seen

    assert started_by(*DDP_MANUAL, "run") == started_by(sys.executable)


HOW_PYTHON_RUNS = """
    import json, sys
    rules = [rule for rule in sys.warnoptions if "Resource" in rule]
    print(json.dumps([sys.flags.optimize, rules, sys._xoptions, sys.stdout.write_through, open(sys.argv[1]).read()]))
"""


@pytest.mark.parametrize("started", ["", "run", "launch --nproc 1"])
def test_a_program_has_the_flags_of_python_and_the_descriptors_that_it_was_started_with(
    tmp_path: Path, started: str
) -> None:
    script = write(tmp_path, "script.py", HOW_PYTHON_RUNS)
    python = f"{sys.executable} -O -W ignore::ResourceWarning -X name=1 -X other -u"
    through = f"-m ddp_manual {started}" if started else ""
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    words = ["bash", "-c", f"{python} {through} {script} <(echo hi)"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True)
    *seen, unbuffered, read = json.loads(ended.stdout.splitlines()[-1].removeprefix("[rank 0] "))
    assert seen == [1, ["ignore::ResourceWarning"], {"name": "1", "other": True}] and read == "hi\n"
    assert unbuffered or "launch" in started  # where a pipe is read line by line


BECOMES_ANOTHER = """
    import os, sys, time
    if sys.argv[1:]:
        time.sleep(2)
        sys.exit(3)
    if os.environ["RANK"] == "0":
        os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
    time.sleep(60)
"""


def test_a_script_on_rank_0_that_executes_itself_is_told_that_it_takes_the_store_along(
    ranks: Ranks, tmp_path: Path
) -> None:
    processes = ranks(write(tmp_path, "script.py", BECOMES_ANOTHER))
    assert [process.wait() for process in processes] == [3, 14], processes[0].err
    line, error = processes[0].err.split("error[")
    for said in (line, error, processes[1].err.partition("error[")[2]):
        assert "rank 0's program has become another one (exec), without torch's store" in said
        assert "start it with --no_python" in said


VARIABLES = """
    import json, os, sys
    import torch, torch.distributed as dist
    told = ("TORCHELASTIC", "ROLE", "GROUP", "OMP", "MASTER", "LOCAL")
    names = [name for name in os.environ if name.startswith(told)]
    print(json.dumps({name: os.environ[name] for name in ["RANK", "WORLD_SIZE", *sorted(names)]}))
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()  # without it, and without ours in the process, gloo may abort Python's end
"""


@pytest.mark.parametrize("started", ["run", "launch", "launch --start exec", "run --no_python"])
def test_a_program_gets_the_variables_that_torchrun_sets_and_opens_a_process_group_with_them_alone(
    ranks: Ranks, start: Start, tmp_path: Path, started: str
) -> None:
    script = write(tmp_path, "variables.py", VARIABLES)
    if started == "run":
        processes = ranks(script, options=("--run_id", "mine"))
    elif started == "run --no_python":
        processes = ranks(sys.executable, script, options=("--run_id", "mine", "--no_python"))
    else:
        processes = [start(*DDP_MANUAL, *started.split(), "--nproc", 2, script, cwd=tmp_path)]
    assert [process.wait() for process in processes] == [0] * len(processes), processes[0].err
    lines = [line[line.index("{") :] for process in processes for line in process.out.splitlines() if "{" in line]
    seen = sorted(map(json.loads, lines), key=lambda variables: variables["RANK"])
    assert [variables["RANK"] for variables in seen] == ["0", "1"]
    for rank, variables in enumerate(seen):
        assert variables["LOCAL_RANK"] == variables["ROLE_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == variables["ROLE_WORLD_SIZE"] == "2"
        assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"], variables["ROLE_NAME"]) == ("0", "1", "default")
        assert (variables["MASTER_ADDR"], variables["OMP_NUM_THREADS"]) == ("127.0.0.1", "1")  # as here
        assert (variables["TORCHELASTIC_RESTART_COUNT"], variables["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert variables.get("TORCHELASTIC_USE_AGENT_STORE") == (None if "no_python" in started else "True")
        assert variables["TORCHELASTIC_RUN_ID"] == "mine" or started.startswith("launch")
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]


ENDS = """
    import atexit, os, signal, sys, threading, time
    import torch.distributed as dist
    how, rank = sys.argv[1], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    atexit.register(print, "atexit", rank, flush=True)
    if how == "late":
        threading.Thread(target=lambda: (time.sleep(2), print("thread", rank, flush=True))).start()
    if rank == 1:
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        if how == "raise":
            raise ValueError("boom")
        if how == "hook":
            sys.excepthook = lambda kind, error, frames: print("own hook:", error, flush=True)
            raise ValueError("boom")
        if how == "crash":
            import ctypes
            ctypes.string_at(0)
    if how not in ("late", "done"):
        dist.barrier()
    print("end", rank, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("_exit", 4, "is gone: its worker exited with code 4 without a word"),
        ("raise", 1, "error[training-failed]: rank 1 on {host}: ValueError: boom"),
        ("hook", 1, "own hook: boom"),
        ("crash", 139, "is gone: SIGSEGV"),
    ],
)
def test_the_end_of_a_script_is_the_ranks_and_the_others_are_told(
    ranks: Ranks, tmp_path: Path, how: str, code: int, said: str
) -> None:
    processes = ranks(write(tmp_path, "ends.py", ENDS), how)
    assert [process.wait(60) for process in processes] == [14, code], processes[1].err
    assert said.format(host=os.uname().nodename) in processes[1].err + processes[1].out
    assert said.replace(": rank 1 on {host}", "") in processes[0].err or how == "hook"
    assert [line.startswith("error[") for line in processes[0].err.splitlines()].count(True) == 1
    if how in ("raise", "hook"):
        assert "atexit 1" in processes[1].out and "error[" in processes[1].err
    if how == "raise":
        assert 'ends.py", line ' in processes[1].err and "script.py" not in processes[1].err
        assert "Traceback" not in processes[0].err and "its terminal, which has the traceback\n" in processes[0].err


def test_threads_and_atexit_handlers_end_as_they_do_in_plain_python(ranks: Ranks, tmp_path: Path) -> None:
    processes = ranks(write(tmp_path, "ends.py", ENDS), "late")
    assert [process.wait(60) for process in processes] == [0, 0], processes[0].err
    for rank, process in enumerate(processes):
        assert process.out.splitlines() == [f"end {rank}", f"thread {rank}", f"atexit {rank}"]
        assert "error[" not in process.err


def test_rank_0_keeps_the_store_for_a_rank_whose_script_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "slow.py",
        """
        import os, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            time.sleep(3)
            dist.distributed_c10d._get_default_store().set("late", "1")
            print("set", flush=True)
        """,
    )
    processes = ranks(script)
    processes[0].wait_for("keeping the store for rank 1, still at work")
    assert [process.wait(60) for process in processes] == [0, 0], processes[1].err
    assert processes[1].out == "set\n"


WAITS = """
    import time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("ready", flush=True)
    time.sleep(60)
"""


TUTORIAL = """
    import os, sys
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def work(rank, world_size):
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = "{port}" or os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, b"ranks: %d\\n" % int(total))  # at once: two processes share the pipe
        dist.destroy_process_group()

    if __name__ == "__main__":
        if int(os.environ["WORLD_SIZE"]) > 1:
            work(int(os.environ["RANK"]), 2)
        else:
            mp.spawn(work, args=(2,), nprocs=2)
"""


@pytest.mark.parametrize(("ranks", "chooses_port"), [(1, True), (2, True), (2, False)])
def test_a_tutorial_that_chooses_where_its_ranks_meet_works_as_without_a_launcher(
    start: Start, tmp_path: Path, port: int, ranks: int, chooses_port: bool
) -> None:
    """torch would wait at that port for a store of the launcher's."""
    script = write(tmp_path, "tutorial.py", TUTORIAL.format(port=port if chooses_port else ""))
    launched = start(*DDP_MANUAL, "launch", "--nproc", ranks, script, cwd=tmp_path)
    assert launched.wait() == 0, launched.err
    assert launched.out.count("ranks: 2") == 2
    own = "starts processes of its own (2, torch.multiprocessing): they are no ranks"
    assert launched.err.count(own) == (ranks == 1)


def test_a_rank_that_opens_a_process_group_beside_one_that_has_finished_is_told_so(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = write(
        tmp_path,
        "alone.py",
        """
        import os, torch.distributed as dist
        if os.environ["RANK"] == "0":
            dist.init_process_group("gloo")
        """,
    )
    waits, done = ranks(script)
    assert done.wait() == 0
    assert waits.wait(60) == 14
    said = "rank 1 had finished while rank 0 was still in the call that opens a process group\n"
    assert waits.err.partition("error[peer-lost]: ")[2].startswith(said), waits.err


OPENS_AGAIN = """
    import os, threading
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)

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
    dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
    pair = dist.new_group([0, 1])
    for _ in range(3010):
        dist.all_reduce(x, group=pair)
    wait()
    dist.all_reduce(x)
    dist.destroy_process_group()
"""


def test_ranks_open_their_group_again_although_one_of_them_is_late(start: Start, tmp_path: Path) -> None:
    """torch would find the addresses of the group before, in the store that all of them meet at. Some may be in a group
    of their own first, and none of them in an RPC group, as in torch's tutorial of both."""
    script = write(
        tmp_path,
        "rounds.py",
        """
        import os, time, torch, torch.distributed as dist, torch.distributed.rpc as rpc
        rank = int(os.environ["RANK"])
        if rank < 2:
            dist.init_process_group("gloo", rank=rank, world_size=2)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
        rpc.shutdown()
        for late in range(3):
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            time.sleep(late == rank)
            dist.destroy_process_group()
            time.sleep(late == 1 + rank)
        """,
    )
    launched = start(*DDP_MANUAL, "launch", "--nproc", 3, script, cwd=tmp_path)
    assert launched.wait(60) == 0, launched.err


def test_a_rank_that_has_made_all_its_calls_may_end_while_others_open_a_group_and_wait(
    start: Start, tmp_path: Path, port: int
) -> None:
    script = write(tmp_path, "again.py", OPENS_AGAIN.format(store=tmp_path / "store"))
    command = [*DDP_MANUAL, "launch", "--nproc", 3, "--master_port", port, script]
    launched = start(*command, cwd=tmp_path)
    assert launched.wait() == 0, launched.err


def test_a_rank_that_has_closed_its_group_too_early_is_named_and_not_the_one_whose_collective_breaks(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = write(
        tmp_path,
        "early.py",
        """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for _ in range(10 + dist.get_rank()):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        time.sleep(60)
        """,
    )
    two = ranks(script)
    assert [rank.wait(30) for rank in two] == [14, 14]
    for rank in two:
        error = rank.err.partition("error[peer-lost]: ")[2]
        assert error.startswith("rank 0 had closed the process group while rank 1 was still in a collective\n")
        assert "rank 0 began last the 10th of the default group" in error


def test_under_launch_another_rank_shows_the_line_that_rank_0_is_not_told(start: Start, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "debugged.py",
        """
        import os, pdb, threading, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            reading, writing = os.pipe()
            threading.Timer(4, os.write, (writing, b"c\\n")).start()
            pdb.Pdb(stdin=os.fdopen(reading), stdout=open(os.devnull, "w")).set_trace()
        dist.barrier()
        """,
    )
    launched = start(*DDP_MANUAL, "launch", "--nproc", 3, script, cwd=tmp_path)
    assert launched.wait() == 0, launched.err
    assert launched.err.count("is in a debugger, on debugged.py:") == 1


def test_ctrl_c_reaches_the_script_and_ends_the_run_in_seconds(ranks: Ranks, tmp_path: Path) -> None:
    processes = ranks(write(tmp_path, "waits.py", WAITS))
    for process in processes:
        process.wait_for("ready")
    processes[1].process.send_signal(signal.SIGINT)
    assert [process.wait(20) for process in processes] == [14, 130], processes[0].err  # where it would sleep for 60 s
    assert "error[stopped]: stopped by Ctrl-C (SIGINT)" in processes[1].err
    assert "left with error[stopped]" in processes[0].err


def test_a_script_that_nobody_reads_is_stuck_in_its_print_and_is_not_lost(ranks: Ranks, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "prints.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            reading, writing = os.pipe()
            for stream in (1, 2):
                os.dup2(writing, stream)
            print("x" * 1_000_000)
        dist.all_reduce(torch.ones(1))
        """,
    )
    processes = ranks(script, options=("--stall_timeout", 2, "--peer_timeout", 2))
    assert [process.wait(30) for process in processes] == [14, 14], processes[0].err
    for process in processes:
        assert "error[peer-stalled]: rank 1 (" in process.err
        assert "running, on prints.py:8 in <module>" in process.err


# Rank 0 writes for so many seconds once it is asked to end, and says how often it was asked; the others just end.
SAVES = """
    import os, signal, sys, time
    import torch.distributed as dist

    def save(number, frame):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        open("asked", "w").close()
        end = time.monotonic() + float(sys.argv[1])
        while time.monotonic() < end:
            time.sleep(0.01)
        print("saved after", [*os.read(came, 100)], flush=True)
        sys.exit(0)

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        came, coming = os.pipe()
        os.set_blocking(coming, False)
        signal.set_wakeup_fd(coming)  # gets a byte for each signal, also of two that call the handler once
        signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_program_whose_peer_was_told_to_stop_is_asked_once_and_has_the_time_to_save(
    ranks: Ranks, tmp_path: Path
) -> None:
    processes = ranks(write(tmp_path, "saves.py", SAVES), 7)
    for process in processes:
        process.wait_for("ready")
    processes[1].process.send_signal(signal.SIGTERM)
    assert [process.wait(20) for process in processes] == [14, 143], processes[0].err
    assert processes[0].out == "ready\nsaved after [15]\n"
    assert "left with error[stopped]" in processes[0].err


def terminate(started: RankProcess, by: str, asked: Path) -> None:
    """Send SIGTERM to a process group, as timeout and Slurm do; to each process, as systemd does; or to agents alone.
    The program has it before its agent does anything about it."""
    agent = psutil.Process(started.process.pid)
    if by == "agent":
        agent.terminate()
        return
    agent.suspend()
    if by == "group":
        os.killpg(agent.pid, signal.SIGTERM)
    else:
        for process in (agent, *agent.children(recursive=True)):
            process.terminate()
    deadline = time.monotonic() + 20
    while not asked.exists() and (by == "each" or "launch" not in started.arguments):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent.resume()


@pytest.mark.parametrize("by", ["group", "each"])
def test_a_signal_reaches_a_program_once_however_it_is_sent(start: Start, tmp_path: Path, by: str) -> None:
    run = start(*DDP_MANUAL, "run", "--world_size", 1, write(tmp_path, "saves.py", SAVES), 0.5, cwd=tmp_path)
    run.wait_for("ready")
    terminate(run, by, tmp_path / "asked")
    assert run.wait(20) == 0, run.err
    assert run.out == "ready\nsaved after [15]\n"
    assert run.err.count("SIGTERM") == 1


@pytest.mark.parametrize("by", ["group", "agent"])
def test_launch_that_is_signalled_lets_a_program_save(start: Start, tmp_path: Path, by: str) -> None:
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, write(tmp_path, "saves.py", SAVES), 1.5, cwd=tmp_path)
    launch.wait_for("[rank 0] ready")
    launch.wait_for("[rank 1] ready")
    terminate(launch, by, tmp_path / "asked")
    assert launch.wait(20) == 143, launch.err
    assert launch.out.count("saved after [15]") == 1
    assert "left with error" not in launch.err


def test_a_file_that_is_being_saved_when_the_run_ends_is_finished_first(ranks: Ranks, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "saves.py",
        """
        import os, time, torch, torch.distributed as dist

        class Slow:
            def __reduce__(self):
                print("saving", flush=True)
                time.sleep(3)
                return (str, ("done",))

        dist.init_process_group("gloo")
        if os.environ["RANK"] == "0":
            torch.save(Slow(), "slow.pt")
            print("saved", flush=True)
            time.sleep(60)
        while not os.path.exists("slow.pt"):
            time.sleep(0.01)
        raise ValueError("boom")
        """,
    )
    processes = ranks(script)
    assert [process.wait(30) for process in processes] == [14, 1], processes[0].err
    assert (tmp_path / "slow.pt").stat().st_size > 100 and processes[0].out.startswith("saving\n")


def test_launch_has_imported_torchvision_for_all_ranks_of_a_script_that_needs_it(start: Start, tmp_path: Path) -> None:
    text = "import sys\nloaded = [name in sys.modules for name in ('torch.nn', 'torchvision', 'wave')]\n"
    script = write(tmp_path, "vision.py", f"{text}print(loaded, flush=True)\nimport torchvision\nimport wave\n")
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, script, cwd=tmp_path)
    assert launch.wait(60) == 0, launch.err
    assert launch.out.count("[True, True, False]") == 2


def test_a_script_that_imports_cpp_extension_can_use_cuda_under_launch(start: Start, tmp_path: Path) -> None:
    """Where CUDA_HOME or nvcc is, that import asks whether there is CUDA, which by default begins it."""
    seen = "torch.cuda._is_in_bad_fork(), os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')"
    script = write(
        tmp_path, "own.py", f"import os\nimport torch.utils.cpp_extension\nprint('seen', {seen}, flush=True)\n"
    )
    launch = start(*DDP_MANUAL, "launch", "--nproc", 2, script, cwd=tmp_path, CUDA_HOME=str(tmp_path))
    assert launch.wait() == 0, launch.err
    assert launch.out.count("seen False None") == 2, launch.out
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
    script = "import signal, torch\nprint('seen', torch.cuda._is_in_bad_fork(), signal.getsignal(signal.SIGINT))\n"
    write(tmp_path, "own.py", script)
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    run = start(*DDP_MANUAL, "launch", "--nproc", 2, "own.py", cwd=tmp_path, **env)
    assert run.wait() == 0, run.err
    line = "an import has begun CUDA, which no fork can use: the ranks here start as new processes\n"
    assert run.err.count(line) == 1, run.err
    assert run.out.count("seen False <built-in function default_int_handler>") == 2, run.out


def test_a_script_that_holds_nothing_is_told_once_what_a_loss_will_cost(start: Start, tmp_path: Path) -> None:
    text = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    train = "for step in range(20):\n    dist.all_reduce(torch.ones(1))\n"
    script = write(tmp_path, "train.py", f"{text}{train}")
    run = start(*DDP_MANUAL, "launch", "--nproc", 2, "--on_loss", "wait", script.name, cwd=tmp_path)
    assert run.wait() == 0, run.err
    line = "train.py does not call hold(): after a loss all ranks start it again from its beginning"
    said = [one for one in run.err.splitlines() if "hold()" in one]
    assert said == [f"[rank 0] {line}"]


def test_launch_ends_with_the_exit_code_of_the_script_and_leaves_no_folder(start: Start, tmp_path: Path) -> None:
    script = write(tmp_path, "ends.py", ENDS)
    folder = tmp_path / "here"
    folder.mkdir()
    launch = start(*DDP_MANUAL, "launch", "--nproc_per_node=2", "--standalone", script, "exit", cwd=folder)
    assert launch.wait(60) == 3, launch.err
    assert "rank 1 failed first, with exit code 3, after " in launch.err
    assert [*folder.iterdir()] == []
