"""Starts the processes of the tests: as forks of one that has torch loaded where that makes no difference to a test.

All test processes (there are several with --numprocesses) share two servers, ``tests/forkserver.py``: one loads torch
when the first of them needs a fork, the other what the libraries of people's scripts import too. When a test process
ends, however it ends, its server kills what it has forked for it; the servers end with the pytest that was started
first.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from tests.forkserver import READ_BY_THE_FORK, would_see

SERVER = Path(__file__).with_name("forkserver.py")
# Where the servers listen; the name of each follows.
VARIABLE = "DDP_MANUAL_TEST_FORK_SERVER"
# What Lightning and transformers import: 4 s of a core, most of it for torchmetrics. Not Lightning itself, which reads
# RANK while it is imported.
LIBRARIES = (
    *("torchmetrics", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining"),
)
SERVERS = {"torch": (), "libraries": LIBRARIES}
TORCHRUN = "torch.distributed.run"


class Process(Protocol):
    """The part of ``subprocess.Popen`` that the tests use."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...


class Forked:
    """A process that the server has forked and waits for; like ``subprocess.Popen``. Times are seconds."""

    def __init__(self, pid: int, status: int, arguments: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._arguments = arguments

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended(within=0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(list(self._arguments), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, within: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], within)[0]:
            text = os.read(self._status, 16)
            os.close(self._status)
            # No text: the server was killed, and the kernel has killed its forks.
            self.returncode = int(text or -signal.SIGKILL)
        return self.returncode


def server_environment() -> dict[str, str]:
    """Return the environment that the server is started with."""
    environment = {name: value for name, value in os.environ.items() if name not in READ_BY_THE_FORK}
    return {**environment, "OMP_NUM_THREADS": "1"}


def start_servers() -> None:
    """Start the servers, and tell the test processes by a variable where they listen."""
    os.environ[VARIABLE] = f"ddp-manual-test-{os.getpid()}-"
    for name, modules in SERVERS.items():
        _start_server(f"\0{os.environ[VARIABLE]}{name}", modules)


def _start_server(address: str, modules: Sequence[str]) -> None:
    """Start a server that loads these modules besides torch, at an abstract address: no file is left of it."""
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(listener.fileno()), str(reading), *modules],
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), reading],
            start_new_session=True,
        )
    os.close(reading)
    atexit.register(process.wait, 10)
    atexit.register(os.close, writing)


class Server:
    """The process that forks, from the side of the tests."""

    def __init__(self, name: str) -> None:
        self._turn = threading.Lock()
        self._environment = server_environment()
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.connect(f"\0{os.environ[VARIABLE]}{name}")

    def would_see(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork would behave as this environment says."""
        return would_see(self._environment, env)

    def fork(
        self,
        arguments: Sequence[str],
        note: Path,
        env: Mapping[str, str],
        cwd: Path,
        place: tuple[str, str] | None,
        out: IO[bytes],
        err: IO[bytes],
        starts_others: bool,
    ) -> Forked:
        """``starts_others``: the Python programs that this one starts are forks too, whatever threads it has."""
        request = {"words": arguments, "env": dict(env), "cwd": str(cwd), "place": place, "note": str(note)}
        request["starts_others"] = starts_others
        status, theirs = os.pipe()
        with self._turn:
            message = json.dumps(request).encode()
            socket.send_fds(self._control, [message], [out.fileno(), err.fileno(), theirs])
            os.close(theirs)
            pid = self._control.recv(16)
        assert pid, "the fork server has ended"
        return Forked(int(pid), status, arguments)


@functools.cache
def server(name: str = "torch") -> Server:
    return Server(name)


def becomes_a_rank(arguments: Sequence[str]) -> bool:
    """Return whether a command is a Python program that may need torch, or starts a program that does."""
    if sys.platform != "linux" or arguments[0] != sys.executable or len(arguments) < 2:
        return False
    if arguments[1] == "-m":
        return arguments[2] in ("ddp_manual", TORCHRUN)
    return arguments[1] == "-c" or arguments[1].endswith(".py")


def named(host: str) -> tuple[str, ...]:
    """Return the words that give the command after them a host name; sh is replaced, so the process keeps its id."""
    return ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host)


def start(
    arguments: Sequence[str],
    note: Path,
    *,
    env: Mapping[str, str],
    cwd: Path,
    out: IO[bytes],
    err: IO[bytes],
    place: tuple[str, str] | None,
    fresh: bool,
    libraries: bool = False,
) -> Process:
    """Start a command in a session of its own, without a terminal.

    Args:
        note: where a fork writes the pid of its worker.
        place: the network namespace it runs in, and the host name it sees there.
        fresh: start a new Python, not a fork, which ``ps`` shows with the server's command.
        libraries: the fork has more modules loaded than torch.
    """
    name = "libraries" if libraries else "torch"
    if not fresh and becomes_a_rank(arguments) and server(name).would_see(env):
        starts_others = arguments[1:3] == ["-m", TORCHRUN]
        return server(name).fork(arguments, note, env, cwd, place, out, err, starts_others)
    if place:
        namespace, host = place
        arguments = ["ip", "netns", "exec", namespace, *named(host), *arguments]
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
    )


def make_commands_forks(folder: Path, names: Sequence[str]) -> Path:
    """Make a folder for the front of PATH, in which ``python`` and these scripts beside it have their programs run as
    forks; a process of their own waits for each fork, and hands signals on to it."""
    folder.mkdir()
    for name in ("python", *names):
        command = [sys.executable] if name == "python" else [sys.executable, str(Path(sys.executable).with_name(name))]
        (folder / name).write_text(
            f"#!{sys.executable} -S\n"
            f"import sys\nsys.path[0] = {str(SERVER.parent.parent)!r}\n"
            f"from tests import forking\nforking.run_as_fork([*{command!r}, *sys.argv[1:]])\n"
        )
        (folder / name).chmod(0o755)
    return folder


def run_as_fork(command: Sequence[str]) -> None:
    """Run a command in a fork that has the streams of this process, and end with its exit code."""
    note = Path(tempfile.gettempdir(), f"ddp-manual-test-{os.getpid()}")
    streams = {"out": sys.stdout.buffer, "err": sys.stderr.buffer}
    assert server().would_see(os.environ)
    fork = server().fork(command, note, os.environ, Path.cwd(), None, **streams, starts_others=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: fork.send_signal(number))
    code = fork.wait()
    for file in note.parent.glob(f"{note.name}*"):
        file.unlink()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
