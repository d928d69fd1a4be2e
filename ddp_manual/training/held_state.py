"""The state of a training in memory that the agent holds: one worker writes it after a step, the next one reads it.

A state is any tree of dictionaries, lists, tuples, numbers, texts and tensors. Its tensors stand one after the other in
the memory, and a text in JSON describes the rest; so reading a state never runs code.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_manual.errors import BadOption
from ddp_manual.held_state_memory import HeldMemory, Slot
from ddp_manual.ranks_and_runs import Moment, Place
from ddp_manual.training import ddp

logger = logging.getLogger(__name__)

# Bytes: each tensor begins at a multiple of it, where torch can read any dtype.
ALIGNMENT = 64
# The fraction of the time that holding may take, if the user has not chosen ``every``.
SHARE = 0.01
PLAIN = (bool, int, float, str)
# The attribute of a state_dict() that has the versions of the modules, as JSON values.
VERSIONS = "_metadata"


def describe(value: Any, tensors: list[Tensor], *path: Any) -> Any:
    """Return a description of a tree as JSON values, and append the tensors of the tree to ``tensors``.

    Args:
        path: the keys and places that lead to ``value``.

    Raises:
        BadOption: a value in it is of no type that can be held, or a tensor is not dense or not whole on this rank.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta:
            raise _cannot_hold(value, path, "a tensor must be dense, and whole on each rank")
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _strides(value)]}
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        pairs = [[describe(key, tensors, *path), describe(one, tensors, *path, key)] for key, one in value.items()]
        if type(value) is OrderedDict and (versions := vars(value).get(VERSIONS)):
            return {"state_dict": [pairs, versions]}
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [describe(one, tensors, *path, place) for place, one in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise _cannot_hold(value, path, "tensors, numbers, texts, lists, tuples and dictionaries can")


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of a tensor, which its optimizer's state has too: a fused step needs both alike. Of one with
    gaps, such as a part of another one, return those of a copy."""
    return list((tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride())


def _cannot_hold(value: Any, path: Sequence[Any], why: str) -> BadOption:
    name = "state" + "".join(f"[{key!r}]" for key in path)
    what = f"{name} is a {type(value).__name__}, which cannot be held"
    return BadOption(what, why=why, next="give its state_dict(), or leave it out of hold()")


class Holder:
    """Writes states to one rank's memory.

    Args:
        generation: that of the world to which this rank belongs.
        every: steps between two states; 0: so many that holding takes at most a hundredth of the time.
        place: that of this rank. Any rank's state serves all ranks, so on a host without memory for the states of all
            its ranks only the first of them holds its state.
    """

    def __init__(self, memory: HeldMemory, generation: int, every: int, place: Place) -> None:
        self._memory, self._generation = memory, generation
        self._chosen = every
        self.every = every or 1
        self._has_memory = True
        self._place = place
        self._views: dict[int, tuple[int, list[Any], list[Tensor]]] = {}

    def is_due(self, step: int, count: int | None = None) -> bool:
        """Return whether to hold the state after this step; if not, note that the step is done.

        Args:
            count: what ``every`` counts if it is not steps, such as the calls of ``hold``.
        """
        due = self._has_memory and (step if count is None else count) % self.every == 0
        if not due:
            self._memory.steps_done = step
        return due

    def choose(self, seconds: float, seconds_per_step: float) -> None:
        """Choose how often to hold, unless the user has chosen; the same on all ranks, as the numbers are."""
        if not self._chosen and seconds_per_step:
            self.every = max(1, math.ceil(seconds / (SHARE * seconds_per_step)))

    @torch.no_grad()
    def hold(self, step: int, state: Any, *, counts_calls: bool = False) -> None:
        """Hold a state, a tree, after this step. If the machine has not enough memory, warn; from then on no state is
        held, and those held before no longer count.

        Args:
            counts_calls: see ``Moment``.

        Raises:
            BadOption: a value in the state cannot be held.
        """
        if not self._has_memory:
            return
        tensors: list[Tensor] = []
        content = json.dumps(describe(state, tensors)).encode()
        places, place = _places(tensors), self._place
        self._memory.steps_done = step
        try:
            ranks = 1 if place.rank == place.host_leader else place.local_world_size
            slot = self._memory.begin(places[-1], len(content), ranks)
        except OSError as error:
            if place.rank == place.host_leader:
                logger.warning("the state is not held any more, since there is no memory for it: %s", error)
            elif place.rank == place.host_leader + 1:  # once for the host
                what = "there is no memory for the state of each of the %d ranks of this host: rank %d's counts for all"
                logger.warning(what, place.local_world_size, place.host_leader)
            self._memory.forget()
            self._has_memory = False
            return
        for view, tensor in zip(self._views_of(slot, tensors, places), tensors, strict=True):
            view.copy_(tensor)
        at = slot.begin + slot.tensors
        self._memory.mapped[at : at + len(content)] = content
        self._memory.finish(slot, Moment(self._generation, step, counts_calls))

    def _views_of(self, slot: Slot, tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
        """Return tensors in the memory of a slot; they are made anew only if the slot or the state's form changes."""
        begin, before, views = self._views.get(slot.index, (0, [], []))
        form = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]
        if begin == slot.begin and form == before:
            return views
        memory = torch.frombuffer(self._memory.mapped, dtype=torch.uint8)[slot.begin :]
        parts = zip(places, tensors, strict=False)
        views = [_view(memory[place:], one.dtype, one.shape, _strides(one)) for place, one in parts]
        self._views[slot.index] = slot.begin, form, views
        return views


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return at which byte each tensor begins, counted from the first one, and at which the last one ends."""
    places = [0]
    for tensor in tensors:
        places.append(places[-1] + -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT)
    return places


def _view(memory: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    return memory[: count * dtype.itemsize].view(dtype).as_strided(tuple(shape), tuple(strides))


def read(memory: HeldMemory) -> Tensor:
    """Return the newest state as bytes: the length of its tensors, the tensors, and the text.

    Raises:
        ValueError: no state is held.
    """
    slot = memory.newest()
    if slot is None:
        raise ValueError("no state is held")
    content = torch.frombuffer(memory.mapped, dtype=torch.uint8)[slot.begin : slot.begin + slot.tensors + slot.text]
    return torch.cat([torch.tensor([slot.tensors]).view(torch.uint8), content])


def rebuild(content: Tensor) -> Any:
    """Return the tree from the bytes that ``read`` has returned."""
    end = 8 + int(content[:8].view(torch.int64))
    return _build(json.loads(content[end:].numpy().tobytes()), content[8:end])


def read_first(memory: HeldMemory, key: str) -> Any:
    """Return the first value of this rank's newest state, a dictionary, without reading the rest; None if no state is
    held, or if the first key is not ``key``."""
    slot = memory.newest()
    if slot is None:
        return None
    content = torch.frombuffer(memory.mapped, dtype=torch.uint8)[slot.begin : slot.begin + slot.tensors + slot.text]
    (first, value), *_ = json.loads(content[slot.tensors :].numpy().tobytes())["dict"]
    return _build(value, content) if first == key else None


def _build(described: Any, tensors: Tensor) -> Any:
    """Return the tree that ``describe`` has described; ``tensors`` are the bytes of its tensors."""
    place = 0

    def build(found: Any) -> Any:
        nonlocal place
        if isinstance(found, list):
            return [build(one) for one in found]
        if not isinstance(found, dict):
            return found
        [(kind, inner)] = found.items()
        if kind == "tensor":
            name, shape, strides = inner
            dtype = getattr(torch, name)
            assert isinstance(dtype, torch.dtype), name
            size = math.prod(shape) * dtype.itemsize
            one = _view(tensors[place : place + size].clone(), dtype, shape, strides)  # a clone is aligned
            place += -(-size // ALIGNMENT) * ALIGNMENT
            return one
        if kind == "dict":
            return {build(key): build(value) for key, value in inner}
        if kind == "state_dict":
            pairs, versions = inner
            state = OrderedDict(build(pairs))
            vars(state)[VERSIONS] = versions
            return state
        return tuple(build(one) for one in inner)

    return build(described)


def share(memory: HeldMemory, source: int, device: torch.device) -> Any:
    """Return the state that rank ``source`` of this world holds, on every rank; a collective."""
    content = ddp.share_bytes(read(memory) if ddp.rank() == source else None, device, source)
    assert content is not None
    return rebuild(content)
