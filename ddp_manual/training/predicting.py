"""What a network makes of each image of a test set, exact whatever the world size: sample by sample, on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ddp_manual.training import collectives
from ddp_manual.training.data import Split
from ddp_manual.training.evaluate import Evaluation, evaluate


@dataclass(frozen=True, eq=False)
class Predictions:
    """All on the CPU.

    Args:
        probabilities: float32 [N, classes]; row i is sample i of ``split``.
        split: the N images with their labels.
    """

    probabilities: Tensor
    split: Split

    def __len__(self) -> int:
        return len(self.split)

    @property
    def truth(self) -> Tensor:
        """int64 [N]: what each image shows."""
        return self.split.labels

    @cached_property
    def guess(self) -> Tensor:
        """int64 [N]: the most probable class."""
        return self.probabilities.argmax(dim=1)

    @cached_property
    def confidence(self) -> Tensor:
        """float32 [N]: the probability of the guess."""
        return self.probabilities.amax(dim=1)

    @cached_property
    def correct(self) -> Tensor:
        """bool [N]: whether the guess is the truth."""
        return self.guess == self.truth

    @cached_property
    def order(self) -> Tensor:
        """int64 [N]: mistakes first, and in both parts the most confident first; of equals the one that comes first."""
        by_confidence = self.confidence.argsort(descending=True, stable=True)
        return by_confidence[self.correct[by_confidence].int().argsort(stable=True)]

    @cached_property
    def confusion(self) -> Tensor:
        """int64 [classes, classes]: how many images of each class (row) were taken for which (column)."""
        classes = len(self.split.classes)
        return torch.bincount(self.truth * classes + self.guess, minlength=classes**2).view(classes, classes)


def predict(
    network: nn.Module, split: Split, normalise: Callable[[Tensor], Tensor], *, rank: int, world_size: int
) -> Predictions | None:
    """What ``evaluate_and_predict`` returns, without the evaluation."""
    return evaluate_and_predict(network, split, normalise, rank=rank, world_size=world_size)[1]


def evaluate_and_predict(
    network: nn.Module, split: Split, normalise: Callable[[Tensor], Tensor], *, rank: int, world_size: int
) -> tuple[Evaluation, Predictions | None]:
    """Evaluate ``network`` and keep what it makes of each image, in one pass; a collective.

    Args:
        network: without its DDP wrapper, and the same on all ranks.
        split: on the network's device.

    Returns:
        The evaluation, on every rank, and the predictions, on rank 0.
    """
    kept: list[Tensor] = []
    evaluation = evaluate(
        network,
        split,
        normalise,
        rank=rank,
        world_size=world_size,
        on_scores=lambda scores: kept.append(scores.softmax(dim=1)),
    )
    nothing = torch.zeros(0, len(split.classes), device=split.labels.device)
    return evaluation, _gathered(torch.cat([nothing, *kept]), split, world_size=world_size)


def _gathered(mine: Tensor, split: Split, *, world_size: int) -> Predictions | None:
    # The shares differ by one sample, and a gather wants as many rows of each rank.
    padded = mine.new_zeros(-(-len(split) // world_size), mine.shape[1])
    padded[: len(mine)] = mine
    gathered = collectives.gather(padded)
    if not gathered:
        return None
    # Row i of rank r is sample i * world_size + r.
    return _on_the_cpu(torch.stack(gathered, dim=1).flatten(0, 1)[: len(split)], split)


def _on_the_cpu(probabilities: Tensor, split: Split) -> Predictions:
    return Predictions(probabilities.cpu(), split.to(torch.device("cpu")))
