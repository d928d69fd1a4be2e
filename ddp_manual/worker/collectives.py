"""Record each collective that this process begins, in memory that it shares with its agent: see ``collectives``.

Since torch 2.14 a process group calls a hook before each collective, also before those that C++ begins, such as DDP's
in a backward pass. With an older torch the methods that Python calls are wrapped, and the others are not recorded.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_manual import collectives
from ddp_manual.from_worker import FromWorker, GroupUsed, NotCompared, RecordsMemory
from ddp_manual.worker.collective_errors import first_line
from ddp_manual.worker.private_torch import (
    CODE_OF_COLLECTIVES,
    calling_frame,
    has_several_backends,
    hide_from_dynamo,
    innermost_frames,
    operations_of_hooks,
    watch_process_groups,
    wrap_collectives,
)
from ddp_manual.worker.reporter import is_library
from ddp_manual.world_options import WorldSpec

# Each group has its hooks by number; torch's own hooks have small ones.
_HOOK = 0x646470
# Calls, and lines and files of code, that are kept in words: a program has fewer, unless every tensor has another size.
_MOST_KEPT = 4096
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_OF_USER, _OF_PACKAGE, _OF_LIBRARY = range(3)
# The functions of torch.distributed that are given a reduce operation, or choose a device.
_REDUCE = frozenset(
    ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base")
)
_BARRIER = ("barrier",)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """A collective, and what all ranks must call it with. Each has a dtype, except for a barrier."""

    name: str
    by_outputs: bool = False
    """Whether its outputs have the size that must agree: only there have all ranks the same tensors."""
    any_size: bool = False
    """Whether ranks may call it with tensors of different sizes."""
    any_dtype: bool = False
    root: str = ""
    """What the rank that it names is to it: ``from`` or ``to``."""


# By torch's names for hooks. Left out are those that one rank calls for itself, or that only some ranks call: send and
# recv, splitting a group.
_OPERATIONS = {
    "BROADCAST": Operation("broadcast", root="from"),
    "ALLREDUCE": Operation("all_reduce"),
    "REDUCE": Operation("reduce", root="to"),
    "ALLGATHER": Operation("all_gather", by_outputs=True),
    "ALLGATHER_BASE": Operation("all_gather_into_tensor"),
    "REDUCE_SCATTER": Operation("reduce_scatter"),
    "REDUCE_SCATTER_BASE": Operation("reduce_scatter_tensor"),
    "GATHER": Operation("gather", root="to"),
    "SCATTER": Operation("scatter", by_outputs=True, root="from"),
    "ALLTOALL": Operation("all_to_all", any_size=True),
    "ALLTOALL_BASE": Operation("all_to_all_single", any_size=True),
    "BARRIER": Operation("barrier", any_size=True, any_dtype=True),
    **{
        name: Operation(f"{shown}, coalesced", any_size=True, any_dtype=True)
        for name, shown in (
            ("ALLREDUCE_COALESCED", "all_reduce"),
            ("ALLGATHER_COALESCED", "all_gather"),
            ("ALLGATHER_INTO_TENSOR_COALESCED", "all_gather_into_tensor"),
            ("REDUCE_SCATTER_TENSOR_COALESCED", "reduce_scatter_tensor"),
        )
    },
}
# torch 2.14 calls these by the same names, whether they are given a list of tensors or one tensor for all ranks.
_OF_ONE_TENSOR = {_OPERATIONS[one]: _OPERATIONS[f"{one}_BASE"] for one in ("ALLGATHER", "REDUCE_SCATTER", "ALLTOALL")}


class _Order:
    """Collectives that must come in the same order on all ranks: those of a group, or of one of its backends."""

    def __init__(self, identity: int) -> None:
        self.identity, self.number, self.chain = identity, 0, 0


def record_collectives(spec: WorldSpec, tell: Callable[[FromWorker], None]) -> Callable[[], None]:
    """Record from now on the collectives of all process groups that are open, or that this process opens, unless
    ``--collectives off`` is set.

    Args:
        tell: sends a message to this rank's agent, which learns here where the memory is.

    Returns:
        Undoes this; without it, the end of the process does.
    """
    recorder = Recorder(tell)
    if spec.collectives == "check" and spec.world_size > 1:
        recorder.start()
    return recorder.stop


class Recorder:
    """Records collectives from ``start`` to ``stop``.

    Args:
        tell: sends a message to this rank's agent.
    """

    def __init__(self, tell: Callable[[FromWorker], None]) -> None:
        self._tell = tell
        self._begun = 0
        self._groups: dict[Any, Callable[..., None]] = {}
        """Process group of several ranks -> what records its collectives."""
        self._names: dict[str, int] = {}
        self._turn = threading.RLock()  # which a signal handler may take once more
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._memory: memoryview | None = None
        self._operations = operations_of_hooks(_OPERATIONS)

    def start(self) -> None:
        """Share the memory with the agent, and find all process groups, now and as they are opened."""
        try:
            self._descriptor = os.memfd_create("ddp_manual collectives")
            os.ftruncate(self._descriptor, collectives.MEMORY_SIZE)
            self._memory = memoryview(mmap.mmap(self._descriptor, collectives.MEMORY_SIZE))
        except (OSError, AttributeError) as error:  # AttributeError: another system than Linux
            self._tell(NotCompared(first_line(error)))
            return
        self._tell(RecordsMemory(self._descriptor))
        _recorders.append(self)
        self._undo.callback(self._forget)
        self._undo.enter_context(watch_process_groups(self._opened, self._closed))
        if not self._operations:
            self._undo.enter_context(wrap_collectives(_OPERATIONS, self._called))

    def stop(self) -> None:
        """Undo ``start``. A hook that is still registered when the interpreter ends would crash the process."""
        self._undo.close()

    def _forget(self) -> None:
        _recorders.remove(self)
        for group in list(self._groups):
            self._closed(group)
        self._memory = None
        os.close(self._descriptor)

    def _opened(self, group: Any, name: str) -> None:
        if group.size() == 1 or group in self._groups:
            return
        record = self._groups[group] = self._recording(group, name)
        if self._operations:
            operations = self._operations

            def before(args: Any) -> None:
                if (operation := operations.get(args.name.value)) is not None:
                    inputs, outputs = args.input_tensors, args.output_tensors
                    single = _OF_ONE_TENSOR.get(operation) if len(inputs) == len(outputs) == 1 else None
                    record(single or operation, inputs, outputs, args.root, calling_frame())

            group.register_pre_hook(_HOOK, hide_from_dynamo(before))

    def _closed(self, group: Any) -> None:
        if self._groups.pop(group, None) is not None and self._operations:
            with suppress(RuntimeError):
                group.unregister_pre_hook(_HOOK)

    def _called(self, group: Any, *with_what: Any) -> None:
        """Record a collective that Python has called, with a torch that has no hooks."""
        if (record := self._groups.get(group)) is not None:
            record(*with_what)

    def _recording(self, group: Any, name: str) -> Callable[..., None]:
        """Return what records the collectives of a process group."""
        orders: dict[str, _Order] = {}
        ranks: list[int] = []
        several = False

        def record(
            operation: Operation, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root: int, frame: Any
        ) -> None:
            nonlocal ranks, several
            memory = self._memory
            if memory is None:
                return
            try:
                if not ranks:
                    several = has_several_backends(group)
                    ranks = dist.get_process_group_ranks(group)
                # Threads may use two backends of a group at once: gloo for a checkpoint, and NCCL for the training.
                device = _device_type(inputs, outputs, frame) if several else ""
                order = orders.get(device)
                if order is None:
                    order = orders[device] = _Order(self._introduce(group, name, ranks, device))
                reduce = str(getattr(_variable("op", _REDUCE, frame), "name", ""))
                tensors = outputs if operation.by_outputs or not inputs else inputs
                form = (tensors[0].dtype, tensors[0].shape, tensors[-1].shape) if tensors else (None, (), ())
                named = ranks[root] if operation.root and 0 <= root < len(ranks) else None
                common, shown = _in_words(operation, *form, len(tensors), root, named, reduce)
                line = self._line(frame)
                with self._turn:
                    self._begun = index = self._begun + 1
                    order.number += 1
                    order.chain = collectives.chain_with(order.chain, order.number, common, reduce.encode())
                    collectives.write(memory, (index, order.number, order.identity, order.chain), shown, line)
            except Exception as error:  # the program goes on, and its agent says why nothing is compared any more
                self._memory = None
                self._tell(NotCompared(first_line(error)))

        return record

    def _introduce(self, group: Any, name: str, ranks: Sequence[int], device: str) -> int:
        """Tell the agent of a group in which this rank begins its first collective, or its first with the backend for
        this type of device; return the number of the group."""
        members = f"{name}/{zlib.crc32(repr(ranks).encode()):08x}{device and '/'}{device}"
        with self._turn:
            again = self._names[members] = self._names.get(members, -1) + 1
            identity = sum(self._names.values()) + len(self._names)
        self._tell(GroupUsed(identity, f"{members}/{again}", ranks, str(group.group_desc), device))
        return identity

    def _line(self, frame: FrameType | None) -> bytes:
        """Return ``train.py:91`` of the user's line that has called torch, otherwise of this package's line."""
        found = _own_frame(frame)
        if found is None and threading.get_ident() != self._thread:
            # A thread of autograd: the program waits for it on a line of its own.
            found = _own_frame(innermost_frames().get(self._thread))
        return _place(found.f_code.co_filename, found.f_lineno) if found is not None else b""


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program, otherwise of this package."""
    of_package = None
    while frame is not None and (kind := _kind(frame.f_code.co_filename)) != _OF_USER:
        if kind == _OF_PACKAGE:
            of_package = of_package or frame
        frame = frame.f_back
    return frame or of_package


@functools.lru_cache(maxsize=_MOST_KEPT)
def _kind(file: str) -> int:
    if file.startswith(_PACKAGE):
        return _OF_PACKAGE
    return _OF_LIBRARY if is_library(file) else _OF_USER


@functools.lru_cache(maxsize=_MOST_KEPT)
def _place(file: str, line: int) -> bytes:
    return f"{os.path.basename(file)}:{line}".encode()[-collectives.LONGEST_LINE :]


def _device_type(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], frame: FrameType | None) -> str:
    """Return ``cpu``, ``cuda``, ...: of a collective's tensors, or the one that torch's barrier has chosen."""
    for tensors in (inputs, outputs):
        if tensors:
            return tensors[0].device.type
    chosen = getattr(_variable("opts", _BARRIER, frame), "device", None)
    return "cpu" if chosen is None else str(chosen.type)


@functools.lru_cache(maxsize=_MOST_KEPT)
def _in_words(
    operation: Operation,
    dtype: torch.dtype | None,
    first: Sequence[int],
    last: Sequence[int],
    count: int,
    root: int,
    rank: int | None,
    reduce: str,
) -> tuple[bytes, bytes]:
    """Return what the ranks must have in common, except for the reduce operation, and the words for all of it.

    Args:
        dtype, first, last, count: of its tensors: their type, the shapes of two of them, and how many there are.
        root, rank: the rank that it names: in the group, and in the run.
    """
    named = "" if dtype is None or operation.any_dtype else str(dtype).removeprefix("torch.")
    sizes = "any" if operation.any_size else f"{count} {math.prod(first)} {math.prod(last)}"
    common = f"{operation.name} {named} {sizes} {root}"
    call = f"{operation.name} {named}[{', '.join(map(str, first))}]" if named else operation.name
    details = [reduce.lower()] if reduce else []
    if rank is not None:
        details.append(f"{operation.root} rank {rank}")
    shown = f"{call[: collectives.LONGEST_CALL - 32]}\t{', '.join(details)}"
    return common.encode(), shown.encode(errors="replace")[: collectives.LONGEST_CALL]


def _variable(name: str, functions: Container[str], frame: FrameType | None) -> Any:
    """Return a variable of one of these functions of torch.distributed, such as ``op``, which torch does not tell its
    hooks; None in any other frame, such as one of compiled code."""
    if frame is None or frame.f_code.co_name not in functions or frame.f_code.co_filename != CODE_OF_COLLECTIVES:
        return None
    return frame.f_locals.get(name)


# Those that have hooks registered. A process that ends with one would crash, and so would a fork of it.
_recorders: list[Recorder] = []


def _stop_all() -> None:
    for recorder in list(_recorders):
        recorder.stop()


def _forget_all() -> None:
    """Record nothing in a fork of the rank."""
    for recorder in _recorders:
        recorder._memory = None


# When this module is imported, which is before the user's code: functions are called in reverse order.
atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
