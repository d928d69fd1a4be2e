"""torch's store and process group: open them once all ranks are here, try them, and close them.

At the end of the file are the private names of torch and Python that this package uses.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from ddp_manual import gpus
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BackendUnavailable, BadOption, MasterLost
from ddp_manual.worker.collective_errors import error_while_joining, first_line
from ddp_manual.worker.device import for_all_devices

# All ranks are here, so connecting takes seconds; ranks that cannot connect should not take 30 minutes to say so.
FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# torch's own default: a rank may be this much slower than another between two collectives.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Rank 0 announced the address of its store a moment ago.
CONNECT_TIMEOUT = timedelta(seconds=10)
# Seconds, after which a process group that does not close is left open.
CLOSE_WITHIN = 20.0
# Seconds; a thread of the program's own may compute for ever.
RELEASE_WITHIN = 2.0
T = TypeVar("T")


def check_none_open() -> None:
    """Raise BadOption if this process has a process group already: it can be a rank of one run at a time."""
    if dist.is_initialized():
        raise BadOption(
            "this process has a process group already",
            why="another join of this script is still open, or it has called init_process_group",
            next="leave init_process_group out, since join opens the group\n"
            "or end one join before the next begins; after a join that failed, start a new process",
        )


def open_store(address: str, port: int | None = None) -> TCPStore:
    """Connect to torch's store at rank 0's address; without a port, host it there, and at no other address.

    torch looks up the name of every peer of a store, only for its log, and a name server that does not answer would
    delay all ranks. After the first look-up that fails, torch asks no more in that process
    (https://github.com/pytorch/pytorch/pull/159596). Here it fails at once, in a thread whose resolver makes no
    attempt, so that the other look-ups of the process are not affected.

    Raises:
        MasterLost: nothing answers there. BackendUnavailable: USE_LIBUV=0 is set.
    """
    if user_variables.legacy_store_requested():
        raise BackendUnavailable(
            "the store must be torch's libuv one",
            why="USE_LIBUV=0 is set; it asks for the legacy store, which listens on all addresses",
            next="unset USE_LIBUV",
        )
    how: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": False, "use_libuv": True}
    how |= {"is_master": port is None, "timeout": CONNECT_TIMEOUT}
    if port is None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=4096)
        port = listener.getsockname()[1]
        how["master_listen_fd"] = listener.detach()
    try:
        return ThreadPoolExecutor(1, initializer=shorten_name_lookups).submit(TCPStore, address, port, **how).result()
    except Exception as error:
        raise MasterLost(
            f"torch's store of rank 0 at {address}:{port} is gone",
            why=first_line(error),
            next="look at rank 0's last lines for why it left, then start all ranks again",
        ) from error


def shorten_name_lookups() -> None:
    """Keep this thread from asking a name server; where torch would print a warning about that, allow one attempt of
    1 s.

    glibc keeps these settings for each thread: struct __res_state in its resolv/bits/types/res_state.h begins with
    the seconds of an attempt and the number of attempts. The variable RES_OPTIONS would also reach the user's own
    threads and programs.
    """
    with suppress(AttributeError):  # other libraries than glibc do not have them
        library = ctypes.CDLL(None)
        library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        library.__res_init()
        state = library.__res_state()
        state[0], state[1] = 1, 0 if user_variables.torch_log_is_quiet() else 1


def open_process_group(
    store: TCPStore,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> None:
    """Call ``init_process_group``, and try it with a first all-reduce.

    Args:
        timeout: of each later collective.

    Raises:
        PeerUnreachable: the ranks have met at rank 0, but cannot connect to each other. DdpManualError: what else
            torch says, such as that two ranks share a GPU.
    """
    try:
        dist.init_process_group(
            for_all_devices(backend),
            store=PrefixStore("process_group", store),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        # Before the first collective: after this time NCCL's watchdog aborts the process, without an exception.
        set_timeout(timeout)
        total = torch.ones(1, device=device)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait(FIRST_COLLECTIVE_TIMEOUT)
        answered = round(total.item())
        store.set_timeout(timeout)  # as torch does: a program's own reads may wait for a rank that is behind
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        why = f"all {world_size} ranks joined, but {backend} said: {first_line(error)}"
        raise error_while_joining(error, rank, why) from error
    assert answered == world_size, f"{answered} ranks answered the first all-reduce, not {world_size}"


def close_process_group(device: torch.device) -> bool:
    """Destroy the process group; return False if that takes too long, as when a driver or the network hangs."""
    failed: list[BaseException] = []

    def close() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException as error:
            failed.append(error)

    closing = threading.Thread(target=close, name="ddp_manual closing", daemon=True)
    closing.start()
    closing.join(CLOSE_WITHIN)
    if failed:
        raise failed[0]
    return not closing.is_alive()


def release_tensors_of_collectives() -> None:
    """Wait until gloo's threads have let go of the tensors of their last collectives, at most RELEASE_WITHIN seconds.

    They do so after the rank that waited for the collective has gone on, and need the GIL for it. Before 3.14, Python
    ends a thread that asks for the GIL while the interpreter ends; in a destructor of C++ that aborts the process, with
    "terminate called without an active exception": 6 of 96 plain scripts without ``destroy_process_group`` under load.
    While this thread sleeps the GIL is free, so that a thread that waits for it wakes up: one that has slept before and
    after, and has not woken up in between, has nothing left to do.
    """
    deadline, before = time.monotonic() + RELEASE_WITHIN, None
    while time.monotonic() < deadline:
        now = _other_threads()
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now
        time.sleep(0.002)


def _other_threads() -> dict[int, str]:
    """Return thread -> its state, and how often it has woken up; empty where the system does not say."""
    threads = {}
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            lines = (thread / "status").read_text().splitlines()
            threads[int(thread.name)] = "\n".join(line for line in lines if line.startswith(("State:", "voluntary")))
    threads.pop(threading.get_native_id(), None)
    return threads


if sys.version_info < (3, 14):
    atexit.register(release_tensors_of_collectives)  # early, and so called after what the program registers


# Private names of torch and Python, each here because no public name does the same.

CODE_OF_COLLECTIVES = distributed_c10d.__file__
CODE_OF_DDP = torch.nn.parallel.distributed.__file__


def import_dynamo() -> None:
    """Import ``torch._dynamo``, as DDP's constructor and the first step of an optimizer do: 2 to 4 s."""
    importlib.import_module("torch._dynamo")


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling a function of this package, and what it calls, below a compiled frame of the program;
    without importing ``torch._dynamo``, as its ``disable`` does."""
    with suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def set_timeout(timeout: timedelta) -> None:
    """Set the time-out of the default process group: public since torch 2.14, private before."""
    (getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout)


class OpenGroups(NamedTuple):
    """The process groups that this rank belongs to, by their names."""

    begun: dict[str, int]
    """How many collectives this rank has begun in each: torch's own reports name the one that a rank is missing from by
    this number."""
    timeouts: dict[str, float]
    """The seconds after which torch ends a collective, where a backend says so."""
    return_at_once: bool
    """Whether this rank has begun collectives of NCCL. On a host with GPUs a script may use gloo, also where torch has
    opened its group with both."""


def open_groups() -> OpenGroups:
    """Return what torch knows of its process groups, which has no public names; any thread may ask."""
    begun: dict[str, int] = {}
    timeouts: dict[str, float] = {}
    return_at_once = False
    for group, name in list(distributed_c10d._world.pg_names.items()):
        # A group that this rank does not belong to has no backend, nor has a group that is being destroyed.
        with suppress(AttributeError, RuntimeError):
            # One may serve several devices; of a group with several, torch would give only the number of one.
            for backend in {group._get_backend(device) for device in group._device_types}:
                with suppress(RuntimeError):  # a backend without numbers
                    number = int(backend._get_sequence_number_for_group())  # type: ignore[attr-defined]
                    begun[str(name)] = begun.get(str(name), 0) + number
                    return_at_once |= number > 0 and backend.name().startswith("nccl")
                with suppress(AttributeError, RuntimeError, ValueError):
                    seconds = backend.options._timeout.total_seconds()
                    timeouts[str(name)] = min(seconds, timeouts.get(str(name), seconds))
    return OpenGroups(begun, timeouts, return_at_once)


_RECORDERS = (("_dump_nccl_trace_json",), ("_dump_fr_trace_json", "nccl2"), ("_dump_fr_trace_json", "nccl"))


def collectives_unfinished() -> int | None:
    """Return how many collectives of NCCL this rank has begun and its GPU has not completed; any thread may ask.

    torch's flight recorders know, of each process group, the numbers of the collective that was begun last and of the
    one that was completed last. Up to torch 2.14 NCCL has a recorder of its own; then there is one for each backend,
    and "nccl" is nccl2. Reading takes 2 us.

    Returns:
        None if torch does not say: the backend is gloo, or the recorder is off (TORCH_FR_BUFFER_SIZE=0), or it still
        has the numbers of a group that was destroyed, perhaps with unfinished collectives.
    """
    unfinished, open_groups = None, len(distributed_c10d._world.pg_names)
    for recorder, *backend in _RECORDERS:
        with suppress(AttributeError, TypeError, ValueError, KeyError):  # torch without NCCL, an older or a newer torch
            groups = json.loads(getattr(torch._C._distributed_c10d, recorder)(False, False, *backend))["pg_status"]
            for group in groups.values() if len(groups) <= open_groups else ():
                begun, completed = (int(group[f"last_{what}_collective"]) for what in ("enqueued", "completed"))
                if completed >= 0:  # otherwise none is completed yet, or this torch does not keep that number
                    unfinished = (unfinished or 0) + max(0, begun - completed)
    return unfinished


def gpus_without_cuda() -> list[str]:
    """Return the UUIDs of the GPUs that this process may use, by index, without beginning to use CUDA: a program that
    does so itself may fork before."""
    if mig := gpus.mig_device(machine.chosen_gpus()):  # torch would begin CUDA to count these
        return [mig]
    if not (count := torch.cuda.device_count()):
        return []
    with suppress(AttributeError, OSError, RuntimeError, IndexError, TypeError):  # other drivers than NVIDIA's
        uuids = torch.cuda._raw_device_uuid_nvml() or []
        visible = torch.cuda._parse_visible_devices()
        if visible and isinstance(visible[0], str):
            visible = torch.cuda._transform_uuid_to_ordinals(visible, uuids)
        return [uuids[int(index)].removeprefix("GPU-") for index in visible[:count]]
    return [f"GPU {index} of {machine.host_name()}" for index in range(count)]


def innermost_frames() -> dict[int, FrameType]:
    """Return the frame that each thread is in, by ``threading.get_ident()``: documented, but with a private name."""
    return sys._current_frames()


def calling_frame() -> FrameType | None:
    """Return the frame that has called the caller; None if C++ has, in a thread that runs no Python."""
    return sys._getframe(1).f_back


def has_several_backends(group: Any) -> bool:
    """Return whether a group has a backend of its own for each type of device, as ``cpu:gloo,cuda:nccl`` has."""
    pairs = str(distributed_c10d._world.pg_backend_config.get(group, "")).split(",")  # a library's own group has none
    return len({pair.partition(":")[2] for pair in pairs}) > 1


def operations_of_hooks(wanted: Mapping[str, T]) -> dict[Any, T]:
    """Return the number of an operation in torch's enum for hooks -> what is ``wanted`` by its name there.

    A member of the enum itself takes 1 us to be looked up. Empty if this torch, older than 2.14, has no hooks.
    """
    names = getattr(torch._C._distributed_c10d, "HookOpName", None)
    return {member.value: wanted[name] for name, member in names.__members__.items() if name in wanted} if names else {}


@contextmanager
def watch_process_groups(opened: Callable[[Any, str], None], closed: Callable[[Any], None]) -> Iterator[None]:
    """Call ``opened`` in the body with each process group and its name: those that are open, and each that will be.

    torch's own registry has all of them, whichever function has opened them, and is replaced. ``closed`` is called with
    each that torch forgets in the meantime.
    """

    class Registry(dict[Any, Any]):
        def __setitem__(self, group: Any, name: Any) -> None:
            super().__setitem__(group, name)
            opened(group, str(name))

        def __delitem__(self, group: Any) -> None:
            closed(group)
            super().__delitem__(group)

        def clear(self) -> None:
            for group in self:
                closed(group)
            super().clear()

    for group, name in distributed_c10d._pg_names.items():
        opened(group, str(name))
    distributed_c10d._pg_names = Registry(distributed_c10d._pg_names)

    yield
    distributed_c10d._pg_names = dict(distributed_c10d._pg_names)


@contextmanager
def wrap_collectives(wanted: Mapping[str, T], called: Callable[..., None]) -> Iterator[None]:
    """Call ``called(group, what is wanted, inputs, outputs, root, frame)`` in the body before each collective that
    Python begins: for torch before 2.14, which has no hooks, with the methods of a process group, whose names are those
    of the hooks.

    What DDP itself calls is left out. Within its ``join()``, with ``find_unused_parameters=True``, a rank that has
    joined calls ``allreduce`` from Python, and the others from C++.
    """
    group_class = torch._C._distributed_c10d.ProcessGroup
    names = {method: method.strip("_").upper() for method in vars(group_class)}
    originals = {method: original for method, original in vars(group_class).items() if names[method] in wanted}

    def wrap(method: str, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(group: Any, *arguments: Any, **named: Any) -> Any:
            tensors = [_flat(one) for one in arguments if isinstance(one, (list, torch.Tensor))]
            inputs, outputs = (tensors[1], tensors[0]) if len(tensors) > 1 else ([*tensors, []][0], [])
            root = getattr(arguments[-1], "rootRank", -1) if arguments else -1
            frame = calling_frame()
            if frame is None or frame.f_code.co_filename != CODE_OF_DDP:
                called(group, wanted[names[method]], inputs, outputs, root, frame)
            return original.__get__(group)(*arguments, **named)

        return collective

    for method, original in originals.items():
        setattr(group_class, method, hide_from_dynamo(wrap(method, original)))

    yield
    for method, original in originals.items():
        setattr(group_class, method, original)


def _flat(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors of a list of tensors or of lists of them; none for a list of numbers."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [
        tensor for one in tensors for tensor in (one if isinstance(one, list) else [one]) if torch.is_tensor(tensor)
    ]
