"""A process that has torch loaded and becomes, by a fork, each rank that a test starts: see ``tests/forking.py``.

``import torch`` takes a rank 1.4 s of a core and its optimizer's first step 2 s more; a fork takes 0.02 s. Apart from
that a fork is meant to behave like a new Python: it imports what the program imports, finds torch not yet imported, and
runs the program as ``__main__``. Unlike new Pythons, all forks share the seed of ``hash(str)``. This file imports the
standard library only, torch, and other installed packages that ranks import.

A rank is two processes: the fork becomes the agent, and forks once more when the agent starts its worker. Processes
that a script starts by multiprocessing's ``spawn`` are such second forks too, and so are those that torchrun starts,
by way of a fork that its process keeps for them. A second fork forgets all that the first has imported, except
Python's own modules and installed packages. ``ps`` shows all of them with the server's command.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.abc
import importlib.machinery
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Slow imports that most ranks make; the first step of an optimizer imports torch._dynamo.
SLOW = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.serialization.config"),
    *("torchvision.datasets", "click", "psutil", "rich.progress"),
    *("PIL.ImageDraw", "PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin"),
)
# Packages among them that a fork finds not yet imported.
HIDDEN = ("torch", "torchvision")
# Variables that Python, its libraries or torch read once, while they are loaded.
READ_AT_START = (
    *("FAKETIME", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("PYTORCH_", "TORCH_", "TRITON_"),
)
# Those of them that a fork reads itself, or that are read later.
READ_BY_THE_FORK = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_CPP_LOG_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
STARTS_PYTHON = "ddp_manual.launchers"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 4096, 16384, 1 << 19, 2
LIBC = ctypes.CDLL(None, use_errno=True)


class HiddenUntilImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes a package out of sys.modules, and puts it back when the program imports it."""

    def __init__(self, package: str) -> None:
        self._package = package
        names = [name for name in sys.modules if name.partition(".")[0] == package]
        self._modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._package:
            return None
        self._spec = self._modules[name].__spec__
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules[self._package]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        if self._package != "torch":
            __import__("torch")
            sys.modules.update(self._modules)
            return
        sys.modules.update(self._modules)
        # torch does this while it is loaded: it draws a seed, and reads TORCH_CPP_LOG_LEVEL.
        module.default_generator.seed()
        library = Path(str(module.__file__)).parent / "lib" / "libc10.so"
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()


def hide_packages() -> None:
    """Have this process find the packages of ``HIDDEN`` not yet imported."""
    for package in HIDDEN:
        if package in sys.modules:
            sys.meta_path.insert(0, HiddenUntilImported(package))


def would_see(started_with: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Return whether a fork of a process that was started with one environment would behave as another one says."""
    return all(
        env.get(name) == started_with.get(name)
        for name in {*env, *started_with}
        if name.startswith(READ_AT_START) and name not in READ_BY_THE_FORK
    )


class WorkersAreForks(importlib.abc.MetaPathFinder):
    """Have an agent start its worker as a fork of itself, in place of a new Python.

    Args:
        path, started_with: of a new Python without a program, and of the fork server.
        note: where the worker's pid is to be written.
    """

    def __init__(self, path: Sequence[str], started_with: Mapping[str, str], note: Path) -> None:
        self._path, self._started_with, self._note = path, started_with, note

    def find_spec(self, name: str, path: Any, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != STARTS_PYTHON:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module  # type: ignore[union-attr]

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                module.start_python = self._instead_of(module.start_python, module)  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]
        return spec

    def _instead_of(self, start_python: Callable[..., Any], module: Any) -> Callable[..., Any]:
        def start(program: Path, descriptors: Sequence[int], who: Sequence[str] = (), **options: Any) -> Any:
            env = options.get("env") or module.worker_environment()
            known = {"env", "cwd", "stdin", "stdout", "stderr", "start_new_session"}
            # A fork has torch, not yet imported, and one thread.
            forkable = "torch" not in sys.modules and len(os.listdir("/proc/self/task")) == 1
            if not forkable or options.keys() - known or subprocess.PIPE in options.values():
                return start_python(program, descriptors, who, **options)
            if not would_see(self._started_with, env):
                return start_python(program, descriptors, who, **options)
            words = [sys.executable, str(program), *map(str, descriptors), str(os.getpid()), *who]
            with module.signals.block_in_children():
                fork = Fork(self._path, words, descriptors, {**options, "env": env})
                new = self._note.with_suffix(f".{fork.pid}")
                new.write_text(str(fork.pid))
                new.replace(self._note)
                return fork

        return start


def spawned_are_forks(path: Sequence[str], started_with: Mapping[str, str]) -> None:
    """From now on multiprocessing's ``spawn`` forks this process in place of starting a new Python."""
    util = sys.modules["multiprocessing.util"]
    spawnv_passfds = util.spawnv_passfds  # type: ignore[attr-defined]

    def spawn(executable: bytes, words: Sequence[str], descriptors: Sequence[int]) -> int:
        one_thread = len(os.listdir("/proc/self/task")) == 1
        if "--multiprocessing-fork" not in words or not one_thread or not would_see(started_with, os.environ):
            return int(spawnv_passfds(executable, words, descriptors))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            hide_packages()
            command = [sys.executable, *words[words.index("-c") :]]
            run_in_fork(path, command, descriptors, {"env": dict(os.environ)})
        return pid

    util.spawnv_passfds = spawn  # type: ignore[attr-defined]


class ForksForALauncher:
    """Lets a launcher such as torchrun have forks as children, although it has several threads when it starts them.

    A fork of a process with several threads may inherit a lock that nobody will release. So the forks are made by a
    process that was forked before the launcher began; each is orphaned at once, and the launcher's process adopts it.
    """

    def __init__(self, path: Sequence[str], started_with: Mapping[str, str]) -> None:
        self._started_with = started_with
        self._turn = threading.Lock()
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._control.close()
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._serve(theirs, parent, path)
        theirs.close()

    @staticmethod
    def _serve(control: socket.socket, parent: int, path: Sequence[str]) -> None:
        """Fork twice for each request, so that the second fork is an orphan; never returns."""
        while True:
            message, files, _, _ = socket.recv_fds(control, 1 << 20, 2)
            if not message:
                os._exit(0)
            between = os.fork()
            if between:
                os.waitpid(between, 0)
                for file in files:
                    os.close(file)
                continue
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            control.send(str(os.getpid()).encode())
            request = json.loads(message)
            streams = dict(zip(request["streams"], files, strict=True))
            run_in_fork(path, request["words"], (), {**request["options"], **streams})

    def take_over(self) -> None:
        """From now on have ``subprocess.Popen`` fork to start Python programs, unless it is given other options."""
        forks = self

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, args: Sequence[str], **options: Any) -> None:
                words, env = list(args), options.get("env") or dict(os.environ)
                given = {name for name, value in options.items() if value is not None}
                streams = {name: options[name] for name in given & {"stdout", "stderr"}}
                known = given - streams.keys() <= {"env", "start_new_session"} and words[0] == sys.executable
                known = known and all(hasattr(stream, "fileno") for stream in streams.values())
                if not known or not would_see(forks._started_with, env):
                    super().__init__(args, **options)
                    return
                as_parent_of_a_fork(self, words)
                options = {"env": dict(env), "start_new_session": options.get("start_new_session")}
                request = {"words": words, "options": options, "streams": [*streams]}
                with forks._turn:
                    files = [stream.fileno() for stream in streams.values()]
                    socket.send_fds(forks._control, [json.dumps(request).encode()], files)
                    self.pid = int(forks._control.recv(16))

        subprocess.Popen = Popen  # type: ignore[misc]


class Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A fork of this process that runs another program; its parent uses it like a ``Popen``."""

    def __init__(
        self, path: Sequence[str], words: Sequence[str], descriptors: Sequence[int], options: Mapping[str, Any]
    ) -> None:
        as_parent_of_a_fork(self, words)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_in_fork(path, words, descriptors, options)


def as_parent_of_a_fork(process: Any, words: Sequence[str]) -> None:
    """Give a ``Popen`` that starts nothing itself all its attributes, except ``pid``."""
    process.args = words
    process.stdin = process.stdout = process.stderr = None
    process.returncode = None
    process._waitpid_lock = threading.Lock()
    process._input, process._communication_started = None, False
    process._child_created = True


# Keeps the objects of the forked process alive: their destructors would close descriptors that are now others'.
_kept: list[Any] = []


def run_in_fork(
    path: Sequence[str], words: Sequence[str], descriptors: Sequence[int], options: Mapping[str, Any]
) -> None:
    """Run a program like a new Python, with these descriptors alone, to its end; never returns."""

    def program() -> None:
        gc.freeze()
        _kept.extend([*sys.modules.values(), sys._getframe()])
        forget_handlers()
        take_descriptors(descriptors, options)
        atexit._clear()
        os.environ.clear()
        os.environ.update(options["env"])
        if options.get("start_new_session"):
            os.setsid()
        if options.get("cwd"):
            os.chdir(options["cwd"])
        installed = (sys.prefix, sys.base_prefix)
        for name, module in list(sys.modules.items()):
            if not (getattr(module, "__file__", None) or sys.prefix).startswith(installed):
                del sys.modules[name]
        for name in [name for name in logging.Logger.manager.loggerDict if name.partition(".")[0] == "ddp_manual"]:
            del logging.Logger.manager.loggerDict[name]
        run(words, [*python_path(), *path])

    end_with(program)


def end_with(program: Callable[[], None]) -> None:
    """Run a program, and end the process as Python would, but without the teardown of its modules.

    With torch loaded that takes 1 s, and what it does in a fork of a process that has loaded torch proves nothing of a
    new process: on some machines such forks were aborted in it.
    """
    code = 1
    try:
        program()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # which Python ends with the signal itself
            raise
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def forget_handlers() -> None:
    """Reset signals as a new program does: it ignores the signals that its parent ignores, and handles none."""
    signal.set_wakeup_fd(-1)
    if "asyncio" in sys.modules:
        sys.modules["asyncio"]._set_running_loop(None)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def take_descriptors(descriptors: Sequence[int], options: Mapping[str, Any]) -> None:
    """Keep the standard streams that ``options`` name, and these ``descriptors``; close all others."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        given = options.get(name)
        if given == subprocess.DEVNULL:
            given = os.open(os.devnull, os.O_RDWR)
        elif given == subprocess.STDOUT:
            given = 1
        if given is not None:
            os.dup2(given if isinstance(given, int) else given.fileno(), number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors and os.path.exists(f"/proc/self/fd/{number}"):
            os.close(number)
    for number in descriptors:
        os.set_inheritable(number, True)


def serve(listener: socket.socket, lifeline: int) -> dict[str, Any]:
    """Fork for each request; returns the request in the child, and never in the server.

    Args:
        listener: each test process connects to it once. When a connection ends, all that was forked for it is killed.
        lifeline: a pipe; when its other end is closed, this process kills all its forks and ends.
    """
    clients: dict[int, socket.socket] = {}
    children: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, where the exit status goes, for which client
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == lifeline:
                _kill(pid for pid, _, _ in children.values())
                os._exit(0)
            elif ready == listener.fileno():
                client, _ = listener.accept()
                clients[client.fileno()] = client
                poll.register(client, select.POLLIN)
            elif ready in children:
                poll.unregister(ready)
                pid, status, _ = children.pop(ready)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(ready)
            else:
                message, files, _, _ = socket.recv_fds(clients[ready], 1 << 20, 3)
                if not message:
                    _kill(pid for pid, _, of in children.values() if of == ready)
                    poll.unregister(ready)
                    clients.pop(ready).close()
                    continue
                out, err, status = files
                pid = os.fork()
                if pid == 0:
                    _begin(clients[ready], out, err)
                    request: dict[str, Any] = json.loads(message)
                    return request
                os.close(out)
                os.close(err)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = (pid, status, ready)
                poll.register(pidfd, select.POLLIN)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _begin(client: socket.socket, out: int, err: int) -> None:
    """In a fork: have a session, the streams that were sent, and no other descriptor of the server."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(out, 1)
    os.dup2(err, 2)
    client.send(str(os.getpid()).encode())
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
            os.close(number)


def enter(namespace: str, host: str) -> None:
    """Do what ``ip netns exec NAMESPACE unshare --uts`` and ``hostname HOST`` do."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    _checked(LIBC.setns(file, CLONE_NEWNET))
    os.close(file)
    _checked(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    _mount("none", "/", None, MS_SLAVE | MS_REC)
    _checked(LIBC.umount2(b"/sys", MNT_DETACH))
    _mount(namespace, "/sys", "sysfs", 0)
    for path in Path("/etc/netns", namespace).iterdir():
        _mount(str(path), f"/etc/{path.name}", None, MS_BIND)
    socket.sethostname(host)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None)
    _checked(LIBC.mount(*arguments))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become(request: dict[str, Any], path: Sequence[str], started_with: Mapping[str, str]) -> None:
    """Run the program of a request as a new Python would.

    Args:
        path: sys.path of a new Python without a program and without PYTHONPATH.
        started_with: the environment of the server.
    """
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    if request["place"]:
        enter(*request["place"])
    os.chdir(request["cwd"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the standard library's has a new one in each fork
    hide_packages()
    sys.meta_path.insert(0, WorkersAreForks(path, started_with, Path(request["note"])))
    spawned_are_forks(path, started_with)
    if request["starts_others"]:
        ForksForALauncher(path, started_with).take_over()
    run(request["words"], [*python_path(), *path])


def python_path() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def reopen_streams() -> None:
    """A stream remembers whether its file could seek when it was opened; that of the fork may be of another kind."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        old = getattr(sys, name)
        how = {"buffering": 1 if old.line_buffering else -1, "encoding": old.encoding, "errors": old.errors}
        setattr(sys, name, open(number, "w", closefd=False, **how))  # noqa: SIM115


def run(words: Sequence[str], path: Sequence[str]) -> None:
    """Run the program of a command as ``__main__``.

    Args:
        words: the command; the first one is Python.
        path: sys.path, without the program's own folder.
    """
    reopen_streams()
    sys.path[:] = path
    sys.orig_argv[:] = words
    if any(Path(folder, "sitecustomize.py").exists() for folder in python_path()):
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")
    # multiprocessing, which torch imports, gives the program this second name.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    if words[1] == "-u":
        words = [words[0], *words[2:]]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[1] == "-m":
        sys.argv[:] = ["-m", *words[3:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[2])  # type: ignore[attr-defined]
        return
    if words[1] == "-c":
        sys.argv[:] = ["-c", *words[3:]]
        sys.path.insert(0, "")
        code = compile(words[2], "<string>", "exec")
    else:
        sys.argv[:] = words[1:]
        script = os.path.abspath(words[1])
        if os.path.isdir(script):
            script = os.path.join(script, "__main__.py")
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        main.__file__ = script
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
        code = compile(Path(script).read_bytes(), script, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    own_path, own_environment = sys.path[1:], dict(os.environ)
    listener, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if lifeline in select.select([listener, lifeline], [], [])[0]:  # no test needs a fork
        sys.exit()
    for name in (*SLOW, *sys.argv[3:]):
        __import__(name)
    # A fork has one thread, and none of the others' locks.
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    request = serve(listener, lifeline)
    end_with(lambda: become(request, own_path, own_environment))
