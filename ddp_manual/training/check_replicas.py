"""``check_replicas``: whether all ranks have the same parameters and optimizer state, which DDP takes for granted.

If the ranks agree, a check costs one digest, computed on the tensors' own device, and one all-gather of a few numbers.
Only if the digests differ do the ranks find out what differs, where, and on which ranks.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_manual.errors import BadOption, ReplicasDiffer
from ddp_manual.training import ddp, replica_digests
from ddp_manual.training.replica_digests import State, Value
from ddp_manual.wording import as_ranges, counted, in_words

logger = logging.getLogger(__name__)

# Values that are compared at a time: 8 MB of float64 or int64.
PIECE = 1 << 20
MOST_NAMED = 5


@torch.no_grad()
def check_replicas(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    tolerance: float | None = None,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare parameters, buffers and optimizer state of all ranks; a collective, to call between two steps.

    NaN equals NaN, and 0.0 equals -0.0. Sharded tensors (FSDP, DTensor, ZeroRedundancyOptimizer) are no replicas: they
    are left out, with a warning. Running statistics of normalisation layers, and buffers that DDP copies from rank 0
    before each forward pass, are left out without one. A rank without other ranks has nothing to compare.

    Args:
        model: with or without its DDP wrapper.
        optimizer: its state may not exist yet.
        tolerance: how much floating-point values may differ, as a part of the largest value in their tensor; 0 is bit
            for bit. None: 0 on CPUs; if any rank computes on a GPU, the square root of the dtype's ``eps`` (3.5e-4 for
            float32), because GPUs of several kinds round differently, and rounding adds up over the steps.
        step: how many steps are done, for the message.
        group: the ranks to compare. None: those of the DDP wrapper, otherwise all.

    Raises:
        ReplicasDiffer: on every rank alike; names the first difference. Also if ranks have different parameters.
        BadOption: a tensor is sparse, quantized, on the meta device or not initialized; on every rank alike. Or the
            tolerance is negative, infinite or NaN.
    """
    tolerance = None if tolerance is None else float(tolerance)  # of numpy or torch, it may be no number of JSON
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise BadOption(
            f"check_replicas cannot take the tolerance {tolerance}",
            why="it is a part of a tensor's largest value",
            next="give a number such as 1e-6, or 0 to compare bit for bit",
        )
    if not (dist.is_available() and dist.is_initialized()):
        return
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    if dist.get_rank(group) < 0 or dist.get_world_size(group) == 1:
        return
    state = replica_digests.collect(model, optimizer)
    if state.left_out and dist.get_rank(group) == 0:
        _say_left_out(", ".join(state.left_out[:MOST_NAMED]), len(state.left_out), len(state.values))
    _Comparison(state, group, "" if step is None else f", after step {step}").run(tolerance)


@functools.cache
def _say_left_out(named: str, count: int, compared: int) -> None:
    more = f" and {count - MOST_NAMED} more" * (count > MOST_NAMED)
    logger.warning("check_replicas compares %d values, without what is sharded: %s%s", compared, named, more)


class _Comparison:
    """One comparison of ``state`` over the ranks of a group.

    Args:
        when: follows the difference in the message, such as ", after step 400".
    """

    def __init__(self, state: State, group: dist.ProcessGroup | None, when: str) -> None:
        self.state, self.group, self.when = state, group, when
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.own = dist.get_rank(group)
        # The device for collectives: the same on every rank, even if their models are on devices of several kinds.
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
        self.device = torch.device("cpu" if "cpu" in kinds else kinds[0])

    def run(self, tolerance: float | None) -> None:
        """Compare the ranks; raise the errors that ``check_replicas`` lists."""
        state = self.state
        structure = replica_digests.digest([Value("", number=json.dumps(state.structure()))])
        values = 0 if state.refused else replica_digests.digest(state.values)
        structures, digests, refused = self._gather([structure, values, bool(state.refused)], torch.int64).T.tolist()
        if any(refused):
            self._raise_refused()
        if len(set(structures)) > 1:
            self._raise_other_structure(structures)
        if len(set(digests)) > 1:
            self._find_difference(tolerance)

    def _gather(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return each rank's numbers as a row, on every rank; a collective."""
        own = torch.tensor(numbers, dtype=dtype, device=self.device)
        return ddp.to_host(torch.stack(ddp.all_gather(own, self.group)))

    def _find_difference(self, tolerance: float | None) -> None:
        """Compare value by value, raise at the first difference; return if only bits of equal values differ."""
        on_gpu = any(value.tensor is not None and value.tensor.device.type != "cpu" for value in self.state.values)
        told = ddp.gather_messages([tolerance, on_gpu], self.device, self.group)
        tolerance = max((given for given, _ in told if given is not None), default=None)
        on_gpu = any(on_gpu for _, on_gpu in told)
        ranks = self._gather([replica_digests.digest([value]) for value in self.state.values], torch.int64)
        differing = (ranks != ranks[0]).any(dim=0).nonzero().flatten().tolist()
        for index in differing:
            value = self.state.values[index]
            reference = _majority(ranks[:, index].tolist())[0]
            if value.tensor is None:
                self._compare_numbers(value, reference)
            else:
                allowed = tolerance if tolerance is not None else on_gpu * default_tolerance(value.tensor)
                self._compare_tensors(value, reference, allowed, [self.state.values[other] for other in differing])

    def _compare_numbers(self, value: Value, reference: int) -> None:
        found = ddp.gather_messages(value.number, self.device, self.group)
        odd = [rank for rank, number in enumerate(found) if number != found[reference]]
        if odd:
            self._raise(
                f"{self._differ(odd, found, reference)} in {value.name}{self.when}",
                [f"{value.name} is {found[rank]} on {self._named([rank])}" for rank in (reference, *odd[:MOST_NAMED])],
            )

    def _compare_tensors(self, value: Value, reference: int, allowed: float, differing: Sequence[Value]) -> None:
        """Raise ReplicasDiffer if a rank's values differ from those of rank ``reference``, which are broadcast.

        Args:
            allowed: how much values may differ, as a fraction of the largest value on ``reference``.
            differing: all values whose bits differ between ranks, for the message.
        """
        tensor = value.tensor
        assert tensor is not None
        limit = self._limit(tensor, reference, allowed)
        count, largest, first = 0, 0.0, (0.0, 0.0, 0.0)
        for start, piece in enumerate(replica_digests.comparable(tensor, PIECE)):
            mine = piece.to(self.device)
            theirs = mine.clone()
            dist.broadcast(theirs, src=self.ranks[reference], group=self.group)
            both_nan = (mine != mine) & (theirs != theirs)
            distance = (mine.double() - theirs.double()).abs()
            other = (mine != theirs) & ~both_nan
            if limit:
                other &= ~(distance <= limit)
            if not other.any():
                continue
            if not count:
                place = int(other.nonzero()[0])
                first = (float(start * PIECE + place), float(mine[place]), float(theirs[place]))
            count += int(other.sum())
            largest = max(largest, float(distance[other].nan_to_num(math.inf).max()))
        found = self._gather([count, largest, *first], torch.float64).tolist()
        if not (odd := [rank for rank, (count, *_) in enumerate(found) if count]):
            return
        size = tensor.numel() * (2 if tensor.is_complex() else 1)
        most, largest = (int(max(found[rank][0] for rank in odd)), max(found[rank][1] for rank in odd))
        up_to = "up to " * (len({found[rank][0] for rank in odd}) > 1)
        lines = [
            f"{self._named([rank])}: {count:.0f} of {counted(size, 'value')}, the first{_place(tensor, int(place))}: "
            f"{mine:.9g}, on {self._named([reference])} {theirs:.9g}"
            for rank in odd[:MOST_NAMED]
            for count, _, place, mine, theirs in [found[rank]]
        ]
        if len(differing) > 1:
            names = [other.name for other in differing if other is not value]
            lines.append(
                f"{len(differing)} of {len(self.state.values)} tensors and numbers have other bits, also "
                + ", ".join(names[:MOST_NAMED])
                + ", ..." * (len(names) > MOST_NAMED)
            )
        compared = f"within {allowed:.2g} of its largest value" if limit else "bit for bit"
        self._raise(
            f"{self._differ(odd, found, reference)} in {value.name}{self.when}: {up_to}{most} of "
            f"{counted(size, 'value')}, "
            + (f"largest difference {largest:.3g}" if math.isfinite(largest) else "some not finite on one side only"),
            [*lines, f"{value.name} is {value.kind}, compared {compared}"],
        )

    def _limit(self, tensor: Tensor, reference: int, allowed: float) -> float:
        """Return how much values may differ, the same on every rank: ``allowed`` times the largest on ``reference``."""
        if not allowed or not (tensor.is_floating_point() or tensor.is_complex()):
            return 0.0
        largest = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.own == reference:
            for piece in replica_digests.comparable(tensor, PIECE):
                finite = piece[piece.isfinite()].abs()
                if len(finite):
                    largest = torch.maximum(largest, finite.max().to(self.device))
        dist.broadcast(largest, src=self.ranks[reference], group=self.group)
        return allowed * float(largest)

    def _raise_refused(self) -> None:
        found = ddp.gather_messages(self.state.refused, self.device, self.group)
        rank, refused = next((rank, text) for rank, text in enumerate(found) if text)
        self._leave_together()
        raise BadOption(
            f"check_replicas cannot compare {self._named([rank])}: {refused}",
            why="it compares dense tensors that have values",
            next="leave the call out for this model or optimizer, or give it the module that has only dense tensors",
        )

    def _raise_other_structure(self, kinds: Sequence[int]) -> None:
        """Raise ReplicasDiffer about ranks with other names, shapes or dtypes, given each rank's digest of them. Of the
        ranks with equal lists, the first one sends its list."""
        leads = kinds.index(kinds[self.own]) == self.own
        lists = ddp.gather_messages(self.state.structure() if leads else None, self.device, self.group)
        same = _majority(kinds)
        reference = lists[same[0]]
        odd = [rank for rank in range(len(kinds)) if rank not in same]
        lines: list[str] = []
        for kind in dict.fromkeys(kinds[rank] for rank in odd):
            ranks = [rank for rank in odd if kinds[rank] == kind]
            has, those_have = (f"{self._named(some)} {'has' if len(some) == 1 else 'have'}" for some in (ranks, same))
            differences = _other_values(lists[ranks[0]], reference, those_have)
            lines += [f"{has} {text}" for text in differences[:MOST_NAMED]]
            if len(differences) > MOST_NAMED:
                lines.append(f"{has} {len(differences) - MOST_NAMED} more differences")
        self._raise(
            f"{lines[0]}{self.when}",
            ["the ranks have other parameters, or another optimizer", *lines[1:]],
            "build the same model and the same optimizer on every rank; where groups of ranks hold different parts of "
            "a model,\ngive check_replicas the process group of the ranks that hold the same part",
        )

    def _raise(self, what: str, why: Sequence[str], next: str = "") -> None:
        self._leave_together()
        raise ReplicasDiffer(
            what,
            why="\n".join(why),
            next=next
            or "look for what one rank alone does in the steps before: a change below a line such as `if rank == 0`,\n"
            "a backward pass of model.module or in no_sync(), a checkpoint or a seed of its own; then start all ranks "
            "again\nhosts with CPUs of several kinds may round differently: give check_replicas a tolerance",
        )

    def _leave_together(self) -> None:
        """Wait until every rank knows what to raise: a rank that leaves earlier breaks the collectives of the others.

        This rank knows its error already, so nothing is lost if even this collective breaks.
        """
        with suppress(RuntimeError):
            self._gather([0], torch.int64)

    def _named(self, ranks: Sequence[int]) -> str:
        return in_words(as_ranges([self.ranks[rank] for rank in ranks]))

    def _differ(self, odd: Sequence[int], found: Sequence[Any], reference: int) -> str:
        others = [rank for rank in range(len(found)) if rank not in odd]
        return f"{self._named(odd)} {'differs' if len(odd) == 1 else 'differ'} from {self._named(others)}"


def default_tolerance(tensor: Tensor) -> float:
    """Return the square root of the dtype's ``eps``, which keeps half of its digits; 0 for integers and bool."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return math.sqrt(torch.finfo(tensor.dtype).eps)


def _majority(found: Sequence[int]) -> list[int]:
    """Return the ranks that have the most frequent value; of equally frequent ones, that of the lowest rank."""
    most = max(found, key=lambda one: (found.count(one), -found.index(one)))
    return [rank for rank, one in enumerate(found) if one == most]


def _place(tensor: Tensor, index: int) -> str:
    """Return the place of a value as `` at [3, 7]``; "" for a tensor without dimensions."""
    places, rest = [], index // 2 if tensor.is_complex() else index
    for size in reversed(tensor.shape):
        places.append(rest % size)
        rest //= size
    return f" at {places[::-1]}" if places else ""


def _other_values(mine: Mapping[str, str], theirs: Mapping[str, str], those_have: str) -> list[str]:
    """List how a rank's names, shapes and dtypes differ from those of others; ``those_have``: "ranks 0-1 have"."""
    differences = [f"no {name}, which {those_have}" for name in theirs if name not in mine]
    differences += [f"{name}, which {those_have} not" for name in mine if name not in theirs]
    differences += [
        f"{name} as {mine[name]}, {those_have} it as {theirs[name]}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
    return differences or [f"the parameters that {those_have}, in another order"]
