"""What ranks that hold replicas of a model must have in common, value by value, and a digest of it.

``collect`` lists parameters, buffers and the state of an optimizer by name; ``digest`` reads tensors on their own
device; only eight bytes per device are copied to the host.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

# Words of 8 bytes in a piece. On a CPU, a piece, its weights and the room to work in fit into the cache.
PIECE = {"cpu": 1 << 15}
PIECE_OF_OTHERS = 1 << 22
# Tensors of fewer words are joined and read together: a call of torch takes longer than reading such a tensor.
SMALL = 1 << 12
LOW_HALF = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, as splitmix64 has it; as int64."""


@dataclass(frozen=True)
class Value:
    """A tensor, or a number of an optimizer, that all ranks must have alike."""

    name: str
    tensor: Tensor | None = None
    number: str = ""

    @property
    def kind(self) -> str:
        """``float32[3, 4]``, or "number"."""
        if self.tensor is None:
            return "number"
        return f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"


@dataclass
class State:
    """The values that one rank compares."""

    values: list[Value] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Names of sharded tensors, of which each rank has another part."""
    refused: str = ""
    """What cannot be compared, and why; "" if all can."""

    def add(self, name: str, tensor: Tensor, *, sharded: bool = False) -> None:
        if is_lazy(tensor):
            self.refuse(name, "has no values yet: run the model once before")
        elif (placements := getattr(tensor, "placements", None)) is not None:  # a DTensor: FSDP2, tensor parallelism
            if all(placement.is_replicate() for placement in placements):
                self.add(name, tensor.to_local())  # type: ignore[attr-defined]
            else:
                self.left_out.append(name)
        elif sharded:
            self.left_out.append(name)
        elif tensor.is_meta:
            self.refuse(name, "is on the meta device, and has no values")
        elif tensor.layout != torch.strided or tensor.is_quantized:
            self.refuse(name, "is quantized" if tensor.is_quantized else f"is not dense but {tensor.layout}")
        else:
            self.values.append(Value(name, tensor.detach()))

    def refuse(self, name: str, why: str) -> None:
        self.refused = self.refused or f"{name} {why}"

    def structure(self) -> dict[str, str]:
        """Return name -> kind of each value, in order."""
        return {value.name: value.kind for value in self.values}


def collect(model: nn.Module, optimizer: Optimizer | None) -> State:
    """List parameters, then buffers, then the optimizer's state.

    Buffers that DDP copies from rank 0 before each forward pass are left out: a difference would not outlive the step,
    and each rank may have updated its copy from its own samples. So are the running statistics of normalisation
    layers: unless they are copied, each rank computes them from its own samples.
    """
    state = State()
    ignored: set[str] = set()
    copied = False
    if isinstance(model, DistributedDataParallel):
        ignored, copied = set(model.parameters_to_ignore), bool(model.broadcast_buffers)
        model = model.module
    sharded = {id(tensor) for module in model.modules() if _is_fsdp1(module) for tensor in module.parameters()}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if name not in ignored:
            state.add(name, parameter, sharded=id(parameter) in sharded)
    statistics = {
        id(buffer)
        for module in model.modules()
        if hasattr(module, "track_running_stats")
        for buffer in module.buffers(recurse=False)
    }
    for name, buffer in () if copied else model.named_buffers():
        if name not in ignored and id(buffer) not in statistics:
            state.add(name, buffer)
    if optimizer is not None:
        _add_optimizer(state, optimizer, names, sharded, {names[key] for key in names} & ignored)
    return state


def _is_fsdp1(module: nn.Module) -> bool:
    """Return whether FullyShardedDataParallel shards the module's parameters, which are plain tensors there."""
    named = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)
    return named and getattr(getattr(module, "sharding_strategy", None), "name", "") != "NO_SHARD"


def _add_optimizer(
    state: State, optimizer: Optimizer, names: Mapping[int, str], sharded: set[int], ignored: set[str]
) -> None:
    """Add the numbers of the parameter groups, such as the learning rate, and the existing state of each parameter.

    Before its first step an optimizer has no state, and some never have any.
    """
    whole = not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    if not whole:
        state.left_out.append("the state of ZeroRedundancyOptimizer")
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(key for key in group if key not in ("params", "param_names")):
            _add_nested(state, f"{key} of parameter group {number}", group[key])
        for place, parameter in enumerate(group["params"] if whole else ()):
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            if name in ignored:
                continue
            # ``get``, since indexing would create a state.
            of_parameter = optimizer.state.get(parameter, {})
            for key in sorted(of_parameter, key=str):
                _add_nested(state, f"{key} of {name}", of_parameter[key], sharded=id(parameter) in sharded)


def _add_nested(state: State, name: str, found: Any, *, sharded: bool = False) -> None:
    """Add tensors, numbers, texts and None, also those in lists and dictionaries; ignore values of other types."""
    if isinstance(found, Tensor):
        state.add(name, found, sharded=sharded and found.dim() > 0)
    elif isinstance(found, (int, float, complex)):
        # Adding 0 makes -0.0 the same as 0.0, as in tensors.
        state.values.append(Value(name, number=repr(found if isinstance(found, bool) else found + 0)))
    elif found is None or isinstance(found, str):
        state.values.append(Value(name, number=repr(found)))
    elif isinstance(found, Mapping):
        for key in sorted(found, key=str):
            _add_nested(state, f"{name}[{key!r}]", found[key], sharded=sharded)
    elif isinstance(found, (list, tuple)):
        for place, one in enumerate(found):
            _add_nested(state, f"{name}[{place}]", one, sharded=sharded)


def digest(values: Sequence[Value]) -> int:
    """Return 64 bits that depend on every bit of the values and on their places.

    Values of different bits may be equal (0.0 and -0.0, or two bit patterns of NaN), so different digests do not
    prove different values.
    """
    hashed = hashlib.blake2b(digest_size=8)
    on_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if value.tensor is None:
            hashed.update(value.number.encode() + b"\n")
            continue
        flat, order = _in_memory_order(value.tensor)
        if order is not None:
            hashed.update(repr(order).encode())
        if flat.numel():
            on_device.setdefault(flat.device, []).append(_words(flat))
    for words in on_device.values():
        hashed.update(struct.pack("<q", _sum_up(words)))
    return int(struct.unpack("<q", hashed.digest())[0])


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the values as a vector, without a copy if they fill one block of memory, and the order of the dimensions
    there; None for the usual order. Convolutions often have their channels last."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.reshape(-1), None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    permuted = tensor.permute(order)
    return (permuted.reshape(-1), order) if permuted.is_contiguous() else (tensor.contiguous().reshape(-1), None)


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a vector as int64, without a copy where size and offset are multiples of 8."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    data = flat.view(torch.uint8)
    padded = data.new_zeros(-(-len(data) // 8) * 8)
    padded[: len(data)] = data
    return padded.view(torch.int64)


def _sum_up(parts: Sequence[Tensor]) -> int:
    """Return a digest of vectors of words on one device; it copies only 8 bytes to the host.

    Each word x becomes y = x * GOLDEN, then y ^ (y >> 32), and is multiplied by an odd weight of its place; the sum
    modulo 2**64 is the digest of a piece. All three steps are bijections of a word, so a piece with one word that
    differs always has another digest. Several such words cancel out by chance, at most once in 2**32 cases: that is
    what the first two steps are for, since powers of 2, such as in the exponents of floats, have few bits in a product.
    """
    device = parts[0].device
    piece = PIECE.get(device.type, PIECE_OF_OTHERS)
    small = [part for part in parts if len(part) < SMALL]
    large = [part for part in parts if len(part) >= SMALL]
    if len(small) > 1:
        small = [torch.cat(small)]
    weights = _weights(device, piece)
    room = weights.new_empty(2, min(piece, max(map(len, (*large, *small)))))
    sums = [_weighted_sum(one, weights, room) for part in (*large, *small) for one in part.split(piece)]
    return int(sums[0]) if len(sums) == 1 else _sum_up([torch.stack(sums)])


def _weighted_sum(words: Tensor, weights: Tensor, room: Tensor) -> Tensor:
    mixed, high = room[0, : len(words)], room[1, : len(words)]
    torch.mul(words, GOLDEN, out=mixed)
    torch.bitwise_right_shift(mixed, 32, out=high)
    high &= LOW_HALF
    mixed ^= high
    if words.device.type == "cpu":  # elsewhere torch has no ``dot`` of whole numbers
        return torch.dot(mixed, weights[: len(words)])
    mixed *= weights[: len(words)]
    return mixed.sum()


@functools.lru_cache(maxsize=4)
def _weights(device: torch.device, count: int) -> Tensor:
    """Return odd numbers that look random, the same on every device and with every torch: those of splitmix64."""
    weights = torch.arange(1, count + 1, device=device) * GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        weights ^= (weights >> shift) & ((1 << (64 - shift)) - 1)
        weights *= factor - (1 << 64)  # its bits, in an int64
    weights ^= (weights >> 31) & ((1 << 33) - 1)
    return weights | 1


def comparable(tensor: Tensor, piece: int) -> Iterator[Tensor]:
    """Yield the values in pieces, in the usual order of the dimensions, as float64 or int64, which hold each value
    exactly. A complex number counts as two values."""
    tensor = tensor.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    kind = torch.float64 if flat.is_floating_point() else torch.int64
    for start in range(0, flat.numel(), piece):
        yield flat[start : start + piece].to(kind)
