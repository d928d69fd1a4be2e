"""The private names of torch and Python that this package uses, each because no public name does the same."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, distributed_c10d

from ddp_manual import gpus
from ddp_manual.environment import machine, user_variables
from ddp_manual.environment.variables_for_a_rank import changed

T = TypeVar("T")

CODE_OF_COLLECTIVES = distributed_c10d.__file__
CODE_OF_DDP = torch.nn.parallel.distributed.__file__


def import_dynamo() -> None:
    """Import ``torch._dynamo``, as DDP's constructor and the first step of an optimizer do: 2 to 4 s."""
    importlib.import_module("torch._dynamo")


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling a function of this package, and what it calls, when compiled code of the program calls
    it. Unlike ``torch._dynamo.disable``, this does not import ``torch._dynamo``."""
    with suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def set_timeout(timeout: timedelta) -> None:
    """Set the time-out of the default process group: public since torch 2.14, private before."""
    (getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout)


def let_programs_meet_by_themselves(starts: Callable[[int], None]) -> None:
    """Let ranks whose program sets MASTER_PORT itself, and processes that it starts with torch.multiprocessing, meet as
    without a launcher; torch would take all of them for clients of a launcher's store.

    Args:
        starts: called with the number of processes that the program starts.
    """
    variables = user_variables.variables()
    port, launched = variables.get("MASTER_PORT"), int(variables.get("WORLD_SIZE", "1"))
    without_launcher = {"TORCHELASTIC_USE_AGENT_STORE": None}
    handlers, spawning = sys.modules["torch.distributed.rendezvous"], sys.modules["torch.multiprocessing.spawn"]
    start: Callable[..., Any] = spawning.start_processes

    def meet_by_itself(meet: Callable[..., Iterator[Any]], url: str, *given: Any, **named: Any) -> Iterator[Any]:
        own = str(urlsplit(url).port or variables.get("MASTER_PORT"))
        by_itself = own != port
        with changed(without_launcher if by_itself else {}):
            store, rank, world_size = next(meet(url, *given, **named))
        _opening.port = own if by_itself else ""
        if not by_itself:
            store = _opening.begin(store, world_size, is_whole=world_size >= launched)
        yield store, rank, world_size

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *given: Any, **named: Any) -> Any:
        starts(nprocs)
        with changed(without_launcher):
            return start(fn, args, nprocs, *given, **named)

    for scheme in ("env", "tcp"):
        handlers._rendezvous_handlers[scheme] = functools.partial(meet_by_itself, handlers._rendezvous_handlers[scheme])
    for module in (spawning, torch.multiprocessing):
        setattr(module, "start_processes", start_processes)  # noqa: B010 - mypy knows neither name


class _Opening:
    """The default process group that this process opens, by default with the launcher's store, which also has the
    addresses of the ranks in earlier groups."""

    def __init__(self) -> None:
        self._opened: Counter[int] = Counter()
        """Number of ranks -> how many groups with so many this process has opened with the launcher's store."""
        self._begun = 0
        """The number of ranks in such a group that is being opened; 0 if none is."""
        self.port = ""
        """The port where the ranks of the group meet by themselves; "" with the launcher's store."""

    def begin(self, store: Any, world_size: int, *, is_whole: bool) -> Any:
        """Return the store in which the ranks of the next group meet: a part of its own. The first group of the whole
        world has the store itself, since some of its ranks may be processes without this package."""
        opened, self._begun = self._opened[world_size], world_size
        return store if is_whole and not opened else PrefixStore(f"ddp_manual/groups of {world_size}/{opened}", store)

    def is_done(self, world_size: int) -> None:
        """Note that a group of so many ranks is open. A rank that fails to open one counts none, so that it meets the
        other ranks where they still wait."""
        self._opened[world_size] += world_size == self._begun
        self._begun = 0


_opening = _Opening()


class OpenGroups(NamedTuple):
    """What torch knows of process groups that this rank belongs to, by their keys: see ``watch_process_groups``."""

    begun: dict[str, int]
    """How many collectives this rank has begun in each. gloo's groups in ``not_countable`` are left out."""
    timeouts: dict[str, float]
    """The seconds after which torch ends a collective, where a backend says so."""
    operations: int
    """How many operations this rank has begun in all groups; gloo counts sends and receives too."""
    return_at_once: bool
    """Whether this rank has begun collectives of NCCL, whose calls return at once. A group with both backends does not
    show that: a script may use only gloo of it, also on a host with GPUs."""


_keys: dict[Any, str] = {}
not_countable: set[Any] = set()
"""The groups in which this rank has begun what gloo counts as collectives, but other ranks need not begin."""
_NOT_COUNTABLE = ("SEND", "RECV", "RECV_ANYSOURCE", "MONITORED_BARRIER")


def open_groups() -> OpenGroups:
    """Return what torch knows of its process groups, which has no public names; any thread may ask."""
    return known_of(list(_keys.items()) or list(distributed_c10d._world.pg_names.items()))


def known_of(groups: Iterable[tuple[Any, Any]]) -> OpenGroups:
    """Return what torch knows of these process groups, each given with its key."""
    begun: dict[str, int] = {}
    timeouts: dict[str, float] = {}
    operations, return_at_once = 0, False
    for group, key in groups:
        # A group that this rank does not belong to has no backend, nor has a group that is being destroyed.
        with suppress(AttributeError, RuntimeError):
            # A backend may serve several devices. Of a group with several backends torch gives only one's number.
            for backend in {group._get_backend(device) for device in group._device_types}:
                number, is_nccl = 0, backend.name().startswith("nccl")
                with suppress(RuntimeError):  # a backend without numbers
                    number = int(backend._get_sequence_number_for_group())
                operations += number
                return_at_once |= number > 0 and is_nccl
                if is_nccl or group not in not_countable:
                    begun[key] = begun.get(key, 0) + number
                with suppress(AttributeError, RuntimeError, ValueError):
                    seconds = backend.options._timeout.total_seconds()
                    timeouts[key] = min(seconds, timeouts.get(key, seconds))
    return OpenGroups(begun, timeouts, operations, return_at_once)


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
    """Return the UUIDs of the GPUs that this process may use, by index, without initialising CUDA: the program may
    fork before it does so itself."""
    if mig := gpus.mig_device(machine.chosen_gpus()):  # torch would initialise CUDA to count these
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
    """Return the frame that called the caller; None if C++ called it, in a thread that runs no Python."""
    return sys._getframe(1).f_back


def devices_with_backends(group: Any) -> list[str]:
    """Return the device types of a group that has several backends, such as cpu and cuda of ``cpu:gloo,cuda:nccl``;
    ``[""]`` if one backend serves all devices."""
    pairs = str(distributed_c10d._world.pg_backend_config.get(group, "")).split(",")  # a library's own group has none
    backends = dict(pair.partition(":")[::2] for pair in pairs)
    return [*backends] if len({*backends.values()}) > 1 else [""]


def operations_of_hooks(wanted: Mapping[str, T]) -> dict[Any, T]:
    """Return a mapping: the number of an operation in torch's enum for hooks -> what ``wanted`` has for its name there.

    Its keys are numbers, since looking up a member of the enum takes 1 us. Empty if torch, before 2.14, has no hooks.
    """
    names = getattr(torch._C._distributed_c10d, "HookOpName", None)
    return {member.value: wanted[name] for name, member in names.__members__.items() if name in wanted} if names else {}


@contextmanager
def watch_process_groups(
    opened: Callable[[Any, str, Sequence[int]], None], closed: Callable[[Any, str], None]
) -> Iterator[None]:
    """While the body runs, call ``opened(group, key, ranks)`` for each process group of this rank that is open or that
    is opened, and ``closed(group, key)`` for each that torch is about to forget.

    A key is ``name/ranks/default/again``: the group's name, a checksum of its ranks, the number of the default group at
    that time, with the port if its ranks have met by themselves, and a count of equal keys. After
    ``destroy_process_group()`` torch reuses names, for other members too. This replaces torch's own registry of ranks,
    which has all groups, whichever function has opened them.
    """
    again: Counter[str] = Counter()
    default = 0

    class Registry(dict[Any, Any]):
        def __setitem__(self, group: Any, mapping: Any) -> None:
            nonlocal default
            super().__setitem__(group, mapping)
            name = distributed_c10d._pg_names.get(group)
            if name is not None and group not in _keys:  # this rank belongs to it
                ranks = [int(rank) for rank in mapping]
                if group.group_desc == "default_pg":
                    default += len(ranks) > 1  # not one of this rank alone
                    _opening.is_done(len(ranks))
                met = f"{default}@{_opening.port}" if _opening.port else default  # others may meet at another port
                members = f"{name}/{zlib.crc32(repr(ranks).encode()):08x}/{met}"
                _keys[group] = key = f"{members}/{again[members]}"
                again[members] += 1
                opened(group, key, ranks)

        def __delitem__(self, group: Any) -> None:
            self.pop(group)

        def pop(self, group: Any, *otherwise: Any) -> Any:
            if group in _keys:
                closed(group, _keys[group])
                not_countable.discard(group)
                del _keys[group]
            return super().pop(group, *otherwise)

        def clear(self) -> None:
            for group in reversed(self.copy()):  # the default group last
                del self[group]

    before = distributed_c10d._pg_group_ranks
    distributed_c10d._pg_group_ranks = Registry()
    for group, ranks in before.items():
        distributed_c10d._pg_group_ranks[group] = ranks

    yield
    distributed_c10d._pg_group_ranks = dict(distributed_c10d._pg_group_ranks)
    _keys.clear()
    not_countable.clear()


@contextmanager
def wrap_collectives(wanted: Mapping[str, T], called: Callable[..., None]) -> Iterator[None]:
    """In the body, call ``called(group, wanted[name], inputs, outputs, root, frame)`` before each collective that
    Python begins, for torch before 2.14, which has no hooks: wrap the methods of process groups, which have the hooks'
    names. Of an operation in ``_NOT_COUNTABLE``, whatever torch it is, only note the group.

    Calls by DDP itself are left out: within its ``join()``, with ``find_unused_parameters=True``, a rank that has
    joined calls ``allreduce`` from Python, the others from C++, which is not recorded.
    """
    group_class = torch._C._distributed_c10d.ProcessGroup
    names = {method: method.strip("_").upper() for method in vars(group_class)}
    wrapped = {*wanted, *_NOT_COUNTABLE}
    originals = {method: original for method, original in vars(group_class).items() if names[method] in wrapped}

    def wrap(method: str, original: Any) -> Callable[..., Any]:
        what = wanted.get(names[method])

        @functools.wraps(original)
        def collective(group: Any, *arguments: Any, **named: Any) -> Any:
            if what is None:
                not_countable.add(group)
                return original.__get__(group)(*arguments, **named)
            tensors = [_flat(one) for one in arguments if isinstance(one, (list, torch.Tensor))]
            inputs, outputs = (tensors[1], tensors[0]) if len(tensors) > 1 else ([*tensors, []][0], [])
            root = getattr(arguments[-1], "rootRank", -1) if arguments else -1
            frame = calling_frame()
            if frame is None or frame.f_code.co_filename != CODE_OF_DDP:
                called(group, what, inputs, outputs, root, frame)
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
