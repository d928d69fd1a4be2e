"""Record each collective that this process begins, in memory that it shares with its agent: see ``collective_memory``.

Since torch 2.14 a process group calls a hook before each collective, also before those that C++ begins, such as DDP's
in a backward pass. In an older torch the methods that Python calls are wrapped; what C++ begins is not recorded.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import math
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import torch

from ddp_manual import collective_memory
from ddp_manual.from_worker import FromWorker, GroupClosed, GroupOpened, NotCompared, RecordsMemory
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wire import LONGEST_NAME, printable
from ddp_manual.worker.explain_errors import first_line, is_broken_collective
from ddp_manual.worker.private_torch import (
    CODE_OF_COLLECTIVES,
    calling_frame,
    devices_with_backends,
    hide_from_dynamo,
    innermost_frames,
    known_of,
    operations_of_hooks,
    watch_process_groups,
    wrap_collectives,
)
from ddp_manual.worker.whereabouts import is_library

# The number under which each group gets its hook; torch's own hooks have small numbers.
_HOOK = 0x646470
# Entries in each cache (of calls, lines and files): a program needs fewer, unless every tensor has another size.
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
    """A kind of collective, and what all ranks must call it with; the dtype too, unless ``any_dtype``."""

    name: str
    by_outputs: bool = False
    """Whether the sizes of its outputs must agree, not those of its inputs: only the outputs are alike on all ranks."""
    any_size: bool = False
    """Whether ranks may call it with tensors of different sizes."""
    any_dtype: bool = False
    root: str = ""
    """How messages say which rank is its root: ``from`` or ``to`` that rank; "" if it has no root."""


# By torch's names for hooks. Operations that one rank calls for itself, or that only some ranks call, are left out:
# send, recv, splitting a group.
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
# torch 2.14 has one name for both forms of these: with a list of tensors, and with one tensor for all ranks.
_OF_ONE_TENSOR = {_OPERATIONS[one]: _OPERATIONS[f"{one}_BASE"] for one in ("ALLGATHER", "REDUCE_SCATTER", "ALLTOALL")}


# What a torch unlike the known versions may raise here. Other exceptions come from the program's signal handlers.
_MISTAKES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
# The mark of an exception that was being handled when the default group was opened, as where that is done in an
# ``except`` block: it is no reason to close the group.
_HANDLED = "_handled_at_open"


class _Order:
    """The collectives of a group, or of one of its backends: their order must be the same on all ranks."""

    def __init__(self, identity: int) -> None:
        self.identity, self.number, self.chain = identity, 0, 0


class Recorder:
    """Tells the agent which process groups are open, opened and closed, and records their collectives, which the agent
    counts and compares; with ``--collectives off`` it only counts them.

    Args:
        tell: sends a message to this rank's agent, such as where the memory is.
    """

    def __init__(self, spec: WorldSpec, tell: Callable[[FromWorker], None]) -> None:
        self._tell, self._compared, self._is_alone = tell, spec.collectives == "check", spec.world_size == 1
        self._begun = 0
        self._groups: dict[Any, Callable[..., None] | None] = {}
        """Process group of several ranks -> the function that records its collectives; None if none does."""
        self._identities = itertools.count(1)
        self._turn = threading.RLock()  # reentrant: a signal handler may begin a collective too
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._memory: memoryview | None = None
        self._operations = operations_of_hooks(_OPERATIONS)

    def start(self) -> Callable[[], None]:
        """Share memory with the agent, and record in each process group that is open or that is opened later.

        Returns:
            The function that stops the recording. If nobody calls it, the recording ends at exit, after the functions
            that the program has registered since.
        """
        if self._is_alone:
            return self._undo.close
        _recorders.append(self)
        self._undo.callback(self._forget)
        if self._compared or self._operations:
            self._share()
        in_torch = self._undo.enter_context(ExitStack())
        # A process that ends with a hook registered would crash, and so would a fork of it. What torch's native code
        # still refers to at Python's end is never collected, with files of the program that are to be written. The
        # memory stays: the program may have closed its descriptors, and opened files of its own under their numbers.
        atexit.register(in_torch.close)
        self._undo.callback(atexit.unregister, in_torch.close)
        in_torch.callback(self._unhook)
        in_torch.enter_context(
            wrap_collectives({} if self._operations or self._memory is None else _OPERATIONS, self._called)
        )
        in_torch.enter_context(watch_process_groups(self._opened, self._closed))
        return self._undo.close

    def _share(self) -> None:
        """Share the memory with the agent."""
        try:
            descriptor = os.memfd_create("ddp_manual collectives")
            self._undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, collective_memory.MEMORY_SIZE)
            self._memory = memoryview(mmap.mmap(descriptor, collective_memory.MEMORY_SIZE))
        except (OSError, AttributeError) as error:  # AttributeError: another system than Linux
            if self._compared:
                self._tell(NotCompared(first_line(error)))
        else:
            self._tell(RecordsMemory(descriptor, bool(self._operations), self._compared))

    def _forget(self) -> None:
        _recorders.remove(self)
        self._memory = None

    def _unhook(self) -> None:
        self._operations = {}
        for group in self._groups:
            _unhook(group)
        self._groups.clear()

    def _opened(self, group: Any, key: str, ranks: Sequence[int]) -> None:
        if len(ranks) == 1:
            return
        self._groups[group] = None
        if group.group_desc == "default_pg" and (handled := sys.exc_info()[1]) is not None:
            handled.__dict__[_HANDLED] = True
        if self._memory is not None:
            try:
                self._record_in(group, key, ranks)
            except Exception as error:
                self._compare_no_more(error)

    def _record_in(self, group: Any, key: str, ranks: Sequence[int]) -> None:
        orders = {device: _Order(next(self._identities)) for device in devices_with_backends(group)}
        for device, order in orders.items():
            self._tell(GroupOpened(order.identity, key, ranks, str(group.group_desc), device))
        record = self._groups[group] = self._recording(ranks, orders)
        if operations := self._operations:

            def before(args: Any) -> None:
                if (operation := operations.get(args.name.value)) is not None:
                    inputs, outputs = args.input_tensors, args.output_tensors
                    single = _OF_ONE_TENSOR.get(operation) if len(inputs) == len(outputs) == 1 else None
                    record(single or operation, inputs, outputs, args.root, calling_frame())

            group.register_pre_hook(_HOOK, hide_from_dynamo(before))

    def _compare_no_more(self, error: Exception) -> None:
        """Stop recording; the program goes on, and its agent says why nothing is compared."""
        self._memory = None
        self._tell(NotCompared(first_line(error)))

    def _closed(self, group: Any, key: str) -> None:
        if group in self._groups:
            del self._groups[group]
            error = sys.exc_info()[1] if group.group_desc == "default_pg" else None
            error = None if _HANDLED in getattr(error, "__dict__", ()) else error
            raised = printable(first_line(error)[:LONGEST_NAME]) if isinstance(error, Exception) else ""
            begun = known_of([(group, key)]).begun.get(key)
            self._tell(GroupClosed(key, begun, raised, is_broken_collective(error)))
            _unhook(group)

    def _called(self, group: Any, *operation_and_tensors: Any) -> None:
        """Record a collective that Python calls (torch without hooks)."""
        if (record := self._groups.get(group)) is not None:
            record(*operation_and_tensors)

    def _recording(self, ranks: Sequence[int], orders: Mapping[str, _Order]) -> Callable[..., None]:
        """Return the function that records the collectives of a process group.

        Args:
            orders: device type -> order. Threads may use two backends at once: gloo in a checkpoint, NCCL in training.
        """

        def record(
            operation: Operation, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root: int, frame: Any
        ) -> None:
            memory = self._memory
            if memory is None:
                return
            try:
                order = orders[_device_type(inputs, outputs, frame) if len(orders) > 1 else ""]
                if not self._compared:
                    with self._turn:
                        order.number += 1
                        collective_memory.write_number(memory, order.identity, order.number)
                    return
                reduce = str(getattr(_variable("op", _REDUCE, frame), "name", ""))
                tensors = outputs if operation.by_outputs or not inputs else inputs
                form = (tensors[0].dtype, tensors[0].shape, tensors[-1].shape) if tensors else (None, (), ())
                named = ranks[root] if operation.root and 0 <= root < len(ranks) else None
                common, shown = _in_words(operation, *form, len(tensors), root, named, reduce)
                line = self._line(frame)
                with self._turn:
                    index = 0
                    while index <= self._begun:  # again if a signal handler has begun collectives meanwhile
                        index, number = self._begun + 1, order.number + 1
                        chain = collective_memory.chain_with(order.chain, number, common, reduce.encode())
                        collective_memory.write(memory, (index, number, order.identity, chain), shown, line)
                    self._begun, order.number, order.chain = index, number, chain
            except _MISTAKES as error:
                self._compare_no_more(error)

        return record

    def _line(self, frame: FrameType | None) -> bytes:
        """Return the user's line that has called torch, as ``train.py:91``; without one, this package's line."""
        found = _own_frame(frame)
        if found is None and threading.get_ident() != self._thread:
            # This is a thread of autograd: name the line on which the program's thread waits for it.
            found = _own_frame(innermost_frames().get(self._thread))
        return _place(found.f_code.co_filename, found.f_lineno) if found is not None else b""


def _unhook(group: Any) -> None:
    with suppress(AttributeError, RuntimeError):  # it has no hook, as with a torch without hooks
        group.unregister_pre_hook(_HOOK)


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program; without one, that of this package; without either, None."""
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
    return f"{os.path.basename(file)}:{line}".encode()[-collective_memory.LONGEST_LINE :]


def _device_type(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], frame: FrameType | None) -> str:
    """Return the device type of a collective's tensors, such as ``cpu``; of a barrier the one that torch chose."""
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
    """Return what must be the same on all ranks, except for the reduce operation; and the text for messages.

    Args:
        dtype, first, last, count: the dtype of its tensors, the shapes of the first and the last, and their number.
        root, rank: its root's rank in the group, and in the run.
    """
    named = "" if dtype is None or operation.any_dtype else str(dtype).removeprefix("torch.")
    sizes = "any" if operation.any_size else f"{count} {math.prod(first)} {math.prod(last)}"
    common = f"{operation.name} {named} {sizes} {root}"
    call = f"{operation.name} {named}[{', '.join(map(str, first))}]" if named else operation.name
    details = [reduce.lower()] if reduce else []
    if rank is not None:
        details.append(f"{operation.root} rank {rank}")
    shown = f"{call[: collective_memory.LONGEST_CALL - 32]}\t{', '.join(details)}"
    return common.encode(), shown.encode(errors="replace")[: collective_memory.LONGEST_CALL]


def _variable(name: str, functions: Container[str], frame: FrameType | None) -> Any:
    """Return a local variable, such as ``op``, of the function of torch.distributed that runs in ``frame``; torch does
    not pass it to hooks. None if ``frame`` is in none of ``functions``, such as in compiled code."""
    if frame is None or frame.f_code.co_name not in functions or frame.f_code.co_filename != CODE_OF_COLLECTIVES:
        return None
    return frame.f_locals.get(name)


_recorders: list[Recorder] = []


def _forget_all() -> None:
    """Record nothing in a fork of the rank."""
    for recorder in _recorders:
        recorder._memory = None


os.register_at_fork(after_in_child=_forget_all)
