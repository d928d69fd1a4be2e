"""What the exception means that ends a rank: which rank or setting is to blame, and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_manual.environment import machine
from ddp_manual.errors import (
    BackendUnavailable,
    DdpManualError,
    DeviceMissing,
    DeviceTaken,
    OutOfMemory,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    StopSignal,
    TrainingFailed,
    stopped_by,
    traceback_of,
)
from ddp_manual.worker.device_and_backend import SHARED_MEMORY
from ddp_manual.worker.whereabouts import own_traceback

# What torch.save raises on a full disk.
_TORCH_CANNOT_WRITE = re.compile(r"inline_container\.cc.*(unexpected pos|file write failed)", re.DOTALL)

_NO_GPU = "ProcessGroupNCCL .*no GPUs found|nccl2 requires at least one CUDA device"
# Messages of NCCL, and those of gloo that another rank may have caused; gloo's others are about mistakes in the call.
_OF_TORCH = r"(?i)Connection (closed|reset)|Broken pipe|Socket closed|Timed out waiting|NCCL Last Error"
# A download or a database of the program's may say the same words, but neither with these names nor from torch's code.
_NAMES = re.compile(r"gloo|NCCL|c10d|ProcessGroup", re.IGNORECASE)
# NCCL's last message, behind torch's text: up to torch 2.14 on the line after "Last Error:", since then on that line.
_LAST_WORDS = re.compile(r"\n(?:NCCL )?Last Error:[ \t]*\n?([^\n]*\S[^\n]*)", re.IGNORECASE)


# The Python files of torch that call C++ to begin collectives, or to wait for them.
_OF_COLLECTIVES = [os.path.join("torch", *parts) for parts in (("distributed", ""), ("autograd", ""), ("_ops.py",))]


class Cause(NamedTuple):
    """What torch's words about a failed collective mean."""

    said: str
    """A regular expression that torch's words match."""
    kind: type[DdpManualError]
    what: str
    """The end of a sentence that begins with the rank."""
    next: str
    of_another_rank: bool = False
    """Whether another rank may be the reason; the agents then soon know which rank is gone."""


_LOOK_FOR_THE_DEAD = "look for the rank whose process has ended (killed, out of memory?), then start all ranks again"
_USE_LESS_GPU_MEMORY = "choose a smaller --batch_size, or end what else uses that GPU: nvidia-smi"
_NCCL_DEBUG = "start all ranks with NCCL_DEBUG=INFO to see what it tried"
_TRY_ANOTHER_PATH = (
    "open all TCP ports between the hosts\nwith NCCL try NCCL_P2P_DISABLE=1 between GPUs of one host, and between "
    f"hosts NCCL_IB_DISABLE=1,\nor {_NCCL_DEBUG}"
)
# The first cause that matches counts. NCCL names its kinds of error loosely (a lost connection may be an "internal
# error"), so its last message is searched before the whole text.
_CAUSES = (
    Cause(
        "Duplicate GPU",
        DeviceTaken,
        "shares its GPU with another rank",
        "give each rank of a host a GPU of its own: leave --local_rank out, or choose different ones",
    ),
    Cause(
        _NO_GPU,
        DeviceMissing,
        "has no GPU, which NCCL needs",
        "look at nvidia-smi, and at what CUDA_VISIBLE_DEVICES names; or let the program use gloo where there is none",
    ),
    Cause(
        r"/dev/shm|shared memory segment|posix_fallocate|shm_open",
        OutOfMemory,
        "could not use its host's shared memory",
        "give a container more: docker run --shm-size=1g or --ipc=host, in Kubernetes an emptyDir with medium: Memory"
        "\nremove what killed runs have left there, /dev/shm/nccl-*\n"
        "or do without it, which is slower: NCCL_SHM_DISABLE=1",
    ),
    Cause(
        r"out of memory|Failed to CUDA [mc]alloc",
        OutOfMemory,
        "ran out of GPU memory",
        _USE_LESS_GPU_MEMORY,
    ),
    Cause(
        r"no (socket|NCCL_SOCKET_IFNAME) interface found|is neither AF_INET|Unable to find (address|interface)",
        PeerUnreachable,
        "has no such network interface",
        "let NCCL_SOCKET_IFNAME (with gloo GLOO_SOCKET_IFNAME) name an interface of this host, or unset it;\n"
        "ip -br address shows them",
    ),
    Cause(
        r"unhandled cuda error|Cuda failure",
        BackendUnavailable,
        "met an error of CUDA in NCCL",
        f"look at the GPU and its driver: nvidia-smi, and dmesg for Xid\nor {_NCCL_DEBUG}",
    ),
    Cause(
        r"invalid (usage|argument)( \(|,)|ncclInvalid",
        BackendUnavailable,
        "called NCCL in a way that it refuses",
        f"let all ranks make the same calls, with tensors of one size and dtype on their own GPUs\nor {_NCCL_DEBUG}",
    ),
    Cause(
        r"Connect to |connectFullMesh|Connection refused|No route to host|Network is unreachable",
        PeerUnreachable,
        "could not connect to all other ranks",
        "open all TCP ports between the hosts, or name the interface that connects them:\n"
        "NCCL_SOCKET_IFNAME=<interface>, with gloo GLOO_SOCKET_IFNAME=<interface>",
        of_another_rank=True,
    ),
    Cause(
        r"NET/",
        PeerLost,
        "lost its connection to another rank",
        f"{_LOOK_FOR_THE_DEAD}\nif all live, NCCL's network plugin fails between the hosts: NCCL_IB_DISABLE=1 uses TCP",
        of_another_rank=True,
    ),
    Cause(
        r"Connection (was )?(closed|reset)|Broken pipe|Socket closed|remote process exited|Call to (recv|send)",
        PeerLost,
        "lost its connection to another rank",
        _LOOK_FOR_THE_DEAD,
        of_another_rank=True,
    ),
    Cause(
        r"timed? ?out",
        PeerStalled,
        "waited for a collective until torch's time-out",
        "look at what the other ranks were doing: one did not come to this collective, or the network between them\n"
        f"is cut; {_NCCL_DEBUG}",
        of_another_rank=True,
    ),
    Cause("", PeerLost, "cannot go on with the other ranks", f"{_LOOK_FOR_THE_DEAD}\nor {_NCCL_DEBUG}", True),
)


def as_ours(rank: int, error: BaseException, *, whole: bool = False) -> DdpManualError:
    """Turn any exception that ends a rank into one of ours; an exception of the user's code keeps its traceback's end.

    Args:
        whole: whether the traceback keeps the frames of libraries too.
    """
    if isinstance(error, DdpManualError):
        return error
    if isinstance(error, (StopSignal, KeyboardInterrupt)):
        return stopped_by(error, next="start all ranks again")
    where = f"rank {rank} on {machine.host_name()}"
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(
            f"{where} ran out of GPU memory",
            why=own_traceback(error, whole=whole),
            next=_USE_LESS_GPU_MEMORY,
        )
    if (failed_collective := _failed_collective(error)) is not None:
        cause, why = _cause(text_of(failed_collective)), f"torch said: {first_line(failed_collective)}"
        if cause.kind is BackendUnavailable:  # the call that raised it is the reason
            return _as_error(cause._replace(kind=TrainingFailed), rank, f"{why}\n{traceback_of(error)}")
        return _as_error(cause, rank, why)
    opened_twice = isinstance(error, ValueError) and "default process group twice" in text_of(error)
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
    no_room = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    failed = TrainingFailed(
        f"{where}: {first_line(error) if code is None else f'the program exited with code {code}'}",
        why=own_traceback(error, whole=whole),
        next="leave init_process_group out: the process group is open, and is closed at the end"
        if opened_twice
        else "make room where it writes: df -h\nthen start all ranks again"
        if no_room or _TORCH_CANNOT_WRITE.search(text_of(error))
        else "whoever leaves the debugger ends the program\nthen start all ranks again"
        if type(error).__name__ == "BdbQuit"
        else "fix the code or the data that raised it, then start all ranks again",
    )
    if code is not None and code & 0xFF:
        failed.exit_code = code & 0xFF
        failed.next = "look at why it exits on this line, then start all ranks again"
    return failed


def is_broken_collective(error: BaseException | None) -> bool:
    """Return whether this, or what was being handled when it was raised, is a collective's error that another rank may
    have caused. Its words may say nothing of it: ``raise MyError`` in an ``except`` block."""
    while error is not None:
        failed = _failed_collective(error)
        if failed is not None and _cause(text_of(failed)).of_another_rank:
            return True
        error = error.__context__
    return False


def was_raised_by_torch(error: BaseException | None) -> bool:
    """Return whether torch's code, not the user's, raised this exception or one that it was raised from."""
    for one in _with_causes(error):
        called = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        if called and any(part in called[-1].f_code.co_filename for part in _OF_COLLECTIVES):
            return True
    return False


def error_while_joining(error: BaseException, rank: int, why: str) -> DdpManualError:
    """Return the DdpManualError for an error that came before the first all-reduce had succeeded."""
    cause = _cause(text_of(error))
    if cause.kind is PeerStalled:
        what, next = "got no answer from another rank in its first all-reduce or before", _TRY_ANOTHER_PATH
        cause = cause._replace(kind=PeerUnreachable, what=what, next=next)
    elif cause is _CAUSES[-1]:
        what, next = "could not open the process group", f"with NCCL {_NCCL_DEBUG}"
        cause = cause._replace(kind=PeerUnreachable, what=what, next=next)
    return _as_error(cause, rank, why)


def _failed_collective(error: BaseException | None) -> BaseException | None:
    """Return this exception, or one that it was raised from, if it is the error of a collective; otherwise None."""
    for one in _with_causes(error):
        # Since torch 2.15 NCCL's errors are plain RuntimeErrors, except those of its watchdog.
        text, is_of_torch = text_of(one), isinstance(one, dist.DistError)
        if isinstance(one, RuntimeError) and re.search(_OF_TORCH, text):
            is_of_torch |= bool(_NAMES.search(text)) or was_raised_by_torch(one)
        if is_of_torch or re.search(_NO_GPU, text):
            return one
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # ``raise error from error`` is a circle
        seen.add(id(error))
        yield error
        error = error.__cause__


def _cause(text: str) -> Cause:
    said = _LAST_WORDS.search(text)
    matching = (
        cause
        for words in ([said[1], text] if said else [text])
        for cause in _CAUSES[:-1]
        if re.search(cause.said, words, re.IGNORECASE)
    )
    return next(matching, _CAUSES[-1])


def _as_error(cause: Cause, rank: int, why: str) -> DdpManualError:
    if "/dev/shm" in cause.said:
        with suppress(OSError):
            usage = shutil.disk_usage(SHARED_MEMORY)
            why += f"\n{SHARED_MEMORY} has {usage.free >> 20} of {usage.total >> 20} MB free"
    return cause.kind(f"rank {rank} {cause.what}", why=why, next=cause.next)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, or a substitute if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # from __str__ of a class of the user's
        return "it cannot be put into words"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that is not blank, at most 300 characters, without the names of
    source files; of a line that announces more also what caused it, or the next, of NCCL's errors NCCL's last message.
    """
    found = list[str]()
    for one in _with_causes(error):
        text = one.what if isinstance(one, DdpManualError) else f"{type(one).__name__}: {text_of(one).lstrip()}"
        known = re.sub(r"NCCL error in: \S+:\d+, | \(run with NCCL_DEBUG=\w+ for details\)|\[/[^\]]*\] ", "", text)
        line, *below = filter(str.strip, known.strip().removesuffix(":").splitlines())
        found.append(line.split(". This is typically")[0].strip())
        if not line.rstrip().endswith(":"):
            break
    else:
        found += below[:1]
    line = " ".join(map(str.strip, found))[:300]
    return f"{line}; {said[1].strip()[:300]}" if (said := _LAST_WORDS.search(text)) else line
