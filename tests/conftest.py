"""Fixtures: real processes, which end with the test, and the real MNIST where the machine has it."""

from __future__ import annotations

import atexit
import fcntl
import gc
import gzip
import logging
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ddp_manual.environment import command_line
from tests.ports import free_port

if TYPE_CHECKING:
    from ddp_manual.training.data import Source

gc.disable()  # until all tests are imported, and torch with them
REPOSITORY = Path(__file__).resolve().parent.parent
# A training of less than a second.
SHORT = ("--dataset", "synthetic", "--model", "mlp", "--epochs", 1, "--batch_size", 100)
# Enough steps for a test to watch the training; the number of epochs follows.
LONGER = ("--batch_size", 10, "--epochs")
# A tenth of the images that the package itself draws: with twice as many, each rank of a test takes 0.3 s longer.
DRAWN = {"train": 6_000, "test": 1_000}
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ALL_DIGITS = bool(os.environ.get("DDP_MANUAL_SOAK_ALL_DIGITS"))
HOST = os.uname().nodename
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_configure(config: pytest.Config) -> None:
    """Undo that a shell ignores Ctrl-C on behalf of what it runs in the background, and nohup the end of the terminal,
    which every child inherits."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave trials that are marked ``soak(only=True)`` to ``./scripts/soak``, and to whoever names one.

    Skip GPU tests on a machine without a GPU, and run the tests marked ``alone`` last: each of them first waits until
    every other test process is done with its test. The other tests see no GPU, and mean the same on all machines.

    Each test process begins with its part of the tests that start real processes: what is left at the end, and taken
    from one process by another, are quick ones.
    """
    if not (config.option.markexpr or config.option.keyword or any("::" in argument for argument in config.args)):
        only = [item for item in items if (mark := item.get_closest_marker("soak")) and mark.kwargs.get("only")]
        config.hook.pytest_deselected(items=only)
        items[:] = [item for item in items if item not in only]
    import torch

    gc.freeze()  # what was imported stays, until Python ends: otherwise libraries report leaks
    atexit.register(gc.unfreeze)
    gc.enable()
    # Threads that share a computation wait for each other in a busy loop: beside other processes, two are slower.
    torch.set_num_threads(1)
    items.sort(key=lambda item: item.path.parent.name not in ("hosts", "world"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [item for first in range(processes) for item in items[first::processes]]
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    # Not is_available(): it begins to use CUDA, so that GPUs could not be hidden any more.
    if not torch.cuda.device_count():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report all tests of a folder that are skipped for the same reason in one line. Where DDP_MANUAL_NO_SKIPS is set,
    a test that is skipped fails, unless it needs a GPU."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        _, _, reason = report.longrepr
        if os.environ.get("DDP_MANUAL_NO_SKIPS") and not item.get_closest_marker("gpu"):
            report.outcome, report.longrepr = "failed", reason
        else:
            report.longrepr = (str(item.path.parent), None, reason)  # type: ignore[assignment]
    return report


def named(host: str) -> tuple[str, ...]:
    """Return the words that give the command after them a host name. They start no process besides it."""
    return ("unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"', host)


class RankProcess:
    """A process in a session of its own, without a terminal and with its output in files; of a rank it is the agent.

    Args:
        place: the network namespace it runs in, and the host name it sees there.
    """

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        name: str,
        env: dict[str, str],
        cwd: Path,
        place: tuple[str, str] | None,
    ) -> None:
        self.arguments = arguments
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        words = ["ip", "netns", "exec", place[0], *named(place[1]), *arguments] if place else arguments
        self.started = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
        self._worker: int | None = None
        self._watching = threading.Thread(target=self._watch_for_worker, daemon=True)
        self._watching.start()

    @property
    def worker(self) -> int:
        """The pid of the worker, which errors and rosters name; also known after the worker has ended."""
        self._watching.join(20)
        if self._worker is None:
            pytest.fail(f"{self.arguments} was never seen with a worker; it said:\n{self.err}")
        return self._worker

    def _watch_for_worker(self) -> None:
        """Wait until the agent has its first child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with suppress(OSError):
            while time.monotonic() < self.started + 20:
                if found := children.read_text().split():
                    self._worker = int(found[0])
                    return
                time.sleep(0.005)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, timeout: float = 120) -> int:
        """Return the exit code; fail with the output if the process does not end in time."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.arguments} still runs after {timeout} s; it said:\n{self.err}")
        return code

    def wait_for(self, text: str, timeout: float = 60) -> float:
        """Wait until stdout or stderr holds ``text``; return the seconds since the process started."""
        deadline = time.monotonic() + timeout
        while text not in self.err and text not in self.out:
            if time.monotonic() > deadline:
                pytest.fail(f"{self.arguments} did not say {text!r} within {timeout} s but:\n{self.err}")
            if self.process.poll() is not None and text not in self.err and text not in self.out:
                pytest.fail(f"{self.arguments} ended without saying {text!r} but:\n{self.err}")
            time.sleep(0.02)
        return time.monotonic() - self.started

    @property
    def typed(self) -> str:
        """The command as messages show it: without the path of a program that a shell finds by its name."""
        return shlex.join([command_line.as_typed(self.arguments[0]), *self.arguments[1:]])

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., RankProcess]


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits only to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def age_of(process: psutil.Process) -> tuple[float, int]:
    """The key that sorts processes, the oldest first: their pids begin anew after a while, and where two started within
    the same hundredth of a second they tell."""
    return process.create_time(), process.pid


def gone(processes: list[psutil.Process], timeout: float) -> bool:
    """Whether they have ended in time; whoever inherits an orphan may take longer to collect its exit code."""
    _, alive = psutil.wait_procs(processes, timeout)
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in alive)


def wait_until(condition: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def last_error(text: str) -> str:
    """Return the text from the last ``error[`` on."""
    return text[text.rindex("error[") :]


def log_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this package's log lines reach pytest once, whatever tests before have done to its logger."""
    monkeypatch.setattr(logging.getLogger("ddp_manual"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("ddp_manual"), "handlers", [])


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this environment without a launcher's variables, with one thread per rank; "" removes a variable."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **extra}
    return {name: value for name, value in env.items() if value}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test that is marked ``alone`` the machine to itself where several processes share the tests. The time that
    it waits for the others does not count in its time limit."""
    with open(__file__, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture(autouse=True)
def _environment(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Restore the environment: a rendezvous in this process sets variables that later processes must not inherit.
    Caches are not made in the user's folder, and lines are as wide as they are.

    Hide GPUs from a test that is not marked ``gpu``, and from the processes it starts. One that is marked uses GPUs in
    the processes it starts: in this process CUDA may have begun without any.
    """
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(shared_folder / "cache")
    runtime = shared_folder / f"runtime-{os.getpid()}"  # where rank 0s of other test processes are not seen
    runtime.mkdir(exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    os.environ.pop("COLUMNS", None)  # which pytest-xdist sets
    if not request.node.get_closest_marker("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start any command; the end of the test kills all processes. For ``place`` see ``RankProcess``."""
    started: list[RankProcess] = []

    def start(
        *arguments: object, cwd: Path = REPOSITORY, place: tuple[str, str] | None = None, **env: str
    ) -> RankProcess:
        words = [str(argument) for argument in arguments]
        process = RankProcess(words, tmp_path, f"process{len(started)}", clean_environment(**env), cwd, place)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def rank_command(port: int, small_data: Path, tmp_path: Path) -> Callable[..., list[object]]:
    """Return the command that starts one rank, with a short training unless ``options`` say otherwise."""

    def rank_command(rank: int, world_size: int, *options: object) -> list[object]:
        identity = ["--world_size", world_size, "--rank", rank, "--master_port", port]
        files = ["--data_dir", small_data, "--run_dir", tmp_path / "run"]
        return [sys.executable, "run_multi_gpu_train.py", *identity, *SHORT, *files, *options]

    return rank_command


@pytest.fixture
def start_rank(start: Start, rank_command: Callable[..., list[object]]) -> Start:
    """Start one rank the way a user does."""

    def start_rank(rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
        return start(*rank_command(rank, world_size, *options), **env)

    return start_rank


@pytest.fixture
def start_joined(start: Start, port: int, tmp_path: Path) -> Start:
    """Start ranks 0, 1, ... of a script, given as text, that calls ``join`` by itself."""

    def start_joined(code: str, *arguments: object, ranks: int = 2, **env: str) -> list[RankProcess]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), **env}
        return [start(sys.executable, script, *arguments, RANK=str(rank), **meeting) for rank in range(ranks)]

    return start_joined  # type: ignore[return-value]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all test processes share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def small_data(shared_folder: Path) -> Path:
    """A data_dir with ``DRAWN`` synthetic digits, which one test process draws for all."""
    from ddp_manual.training import data, datasets, synthetic

    folder = shared_folder / "small_data"
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for part, count in DRAWN.items():
            folder.mkdir(exist_ok=True)
            cache = source("synthetic", folder).cache(part)
            assert cache is not None
            if cache.load() is None:
                images, labels = synthetic.draw_digits(count, seed=datasets.DRAWN_SEEDS[part])
                cache.save(data.Split(images.unsqueeze(1), labels, data.DIGITS))
    return folder


@pytest.fixture(scope="session")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of noise, 8x8 in colour: 50 to train on, 10 to test on; a step takes no time."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("few_images")
    drawn = random.Random(0)
    for part, count in (("train", 25), ("test", 5)):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.frombytes("RGB", (8, 8), drawn.randbytes(3 * 8 * 8))
                image.save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir that has the real MNIST, and takes the caches of the tests: none is left beside the real files."""
    folder = tmp_path_factory.mktemp("mnist")
    (folder / "MNIST").mkdir()
    (folder / "MNIST" / "raw").symlink_to(real_data("MNIST/raw"))
    return folder


@pytest.fixture(scope="session")
def digits(mnist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_dir with the first 5,000 and 1,000 images of the real MNIST; under ``./scripts/soak`` with all."""
    if ALL_DIGITS:
        return mnist
    folder = tmp_path_factory.mktemp("digits")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 5_000), ("t10k", 1_000)):
        for name, dimensions in ((f"{part}-images-idx3-ubyte", (28, 28)), (f"{part}-labels-idx1-ubyte", ())):
            content = gzip.decompress((mnist / "MNIST" / "raw" / f"{name}.gz").read_bytes())
            header, size = 8 + 4 * len(dimensions), count * math.prod(dimensions)
            shorter = content[:4] + count.to_bytes(4, "big") + content[8 : header + size]
            (raw / f"{name}.gz").write_bytes(gzip.compress(shorter, compresslevel=1))
    return folder


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real CIFAR-10 images in class folders: 10,000 in train, 1,000 in test."""
    folder = tmp_path_factory.mktemp("cifar10")
    for part in ("train", "test"):
        (folder / part).symlink_to(real_data("cifar10-subset") / part)
    return folder


def real_data(name: str) -> Path:
    """Return a folder below DDP_MANUAL_TEST_DATA, ../shared/data or ./data; skip the test if none of them has it."""
    named = os.environ.get("DDP_MANUAL_TEST_DATA")
    places = [Path(named)] if named else [REPOSITORY.parent / "shared" / "data", REPOSITORY / "data"]
    for place in places:
        if (place / name).is_dir():
            return place / name
    pytest.skip(f"no {name} in {' or '.join(map(str, places))}; DDP_MANUAL_TEST_DATA names the folder that has it")


def source(dataset: str, data_dir: Path = Path("unused"), **options: Any) -> Source:
    """The data set that ``--dataset`` names, in ``--data_dir``."""
    from ddp_manual.training.datasets import source_of
    from ddp_manual.training.options import TrainConfig

    return source_of(TrainConfig(dataset=dataset, data_dir=str(data_dir), **options))


def first_of_each_class(images: Path, folder: Path, *, train: int, test: int) -> Path:
    """Link the first ``train`` and ``test`` images of each class of a data set into class folders below ``folder``."""
    for part, count in (("train", train), ("test", test)):
        for of_class in (images / part).iterdir():
            (folder / part / of_class.name).mkdir(parents=True)
            for image in sorted(of_class.iterdir())[:count]:
                (folder / part / of_class.name / image.name).symlink_to(image)
    return folder
