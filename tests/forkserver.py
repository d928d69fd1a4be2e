"""A process that has torch loaded and becomes, by a fork, each rank that a test starts: see ``tests/forking.py``.

``import torch`` takes a rank 1.4 s of a core and its optimizer's first step 2 s more; a fork takes 0.02 s. What a fork
becomes is to differ in nothing else from a new Python: it imports what the program imports, finds torch not yet
imported, and runs the program as ``__main__``. It shares the seed of ``hash(str)`` with the others, which no new Python
would. Only the standard library is imported here, and torch.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What a rank imports sooner or later, and what is slow in it: torch._dynamo comes with the first step of an optimizer.
SLOW = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "click", "psutil", "rich.progress")
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 4096, 16384, 1 << 19, 2
LIBC = ctypes.CDLL(None, use_errno=True)


class TorchOnceImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes torch out of sys.modules, and puts it back when it is imported."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        self._spec = self._modules["torch"].__spec__
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        # Once more what torch does while it is loaded: draw a seed, and read TORCH_CPP_LOG_LEVEL.
        module.default_generator.seed()
        library = Path(str(module.__file__)).parent / "lib" / "libc10.so"
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns it in the child. In the server it does not return: it ends with the socket."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, where the exit status goes
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                pid, status = children.pop(ready)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(ready)
                continue
            message, (out, err, status), _, _ = _received(control, children)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(out, 1)
                os.dup2(err, 2)
                control.send(str(os.getpid()).encode())
                control.detach()
                for number in map(int, os.listdir("/proc/self/fd")):
                    if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
                        os.close(number)
                request: dict[str, Any] = json.loads(message)
                return request
            os.close(out)
            os.close(err)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, status)
            poll.register(pidfd, select.POLLIN)


def _received(control: socket.socket, children: dict[int, tuple[int, int]]) -> Any:
    """A request with its three files; without one the tests have ended, and nothing that they have started stays."""
    received = socket.recv_fds(control, 1 << 20, 3)
    if not received[0]:
        for pid, _ in children.values():
            os.killpg(pid, signal.SIGKILL)
        os._exit(0)
    return received


def enter(namespace: str, host: str) -> None:
    """What ``ip netns exec NAMESPACE unshare --uts`` does, and ``hostname HOST``."""
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


def become(request: dict[str, Any], path: Sequence[str]) -> None:
    """Run the program of a request as a new Python would.

    Args:
        path: sys.path of a new Python without a program and without PYTHONPATH.
    """
    atexit.register(gc.unfreeze)  # before the last collection, or triton complains of what it finds left
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    if request["place"]:
        enter(*request["place"])
    os.chdir(request["cwd"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the standard library's has a new one in each fork
    sys.meta_path.insert(0, TorchOnceImported())
    added = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*added, *path]
    if any(Path(folder, "sitecustomize.py").exists() for folder in added):
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")
    words = request["words"]
    sys.orig_argv[:] = words
    # multiprocessing, which torch imports, gives the program this second name.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
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
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        main.__file__ = script
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
        code = compile(Path(script).read_bytes(), script, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    own_path = sys.path[1:]
    for name in SLOW:
        __import__(name)
    # A fork has one thread, and none of the others' locks.
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))), own_path)
