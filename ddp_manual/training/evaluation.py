"""Loss, accuracy and predictions over a data set, exact for any world size: every sample counts once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual.training import ddp
from ddp_manual.training.data import Split
from ddp_manual.training.models import evaluating

# Images in one batch. Of images above 32x32 a batch takes fewer, so that it has no more pixels than 1,000 of 32x32.
MOST_IMAGES = 1000
MOST_PIXELS = MOST_IMAGES * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """``accuracy`` is a fraction, ``loss`` the mean cross-entropy in nats."""

    loss: float
    accuracy: float
    samples: int


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities for every image of a test set; all tensors are on the CPU.

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
        """int64 [N]: the mistakes, then the correct guesses; each group by falling confidence, ties by sample."""
        by_confidence = self.confidence.argsort(descending=True, stable=True)
        return by_confidence[self.correct[by_confidence].int().argsort(stable=True)]

    @cached_property
    def confusion(self) -> Tensor:
        """int64 [classes, classes]: how many images of each class (row) were taken for each class (column)."""
        classes = len(self.split.classes)
        return torch.bincount(self.truth * classes + self.guess, minlength=classes**2).view(classes, classes)


@torch.no_grad()  # not inference_mode(): training could not use a buffer that is created here
def evaluate(
    model: nn.Module,
    split: Split,
    normalise: Callable[[Tensor], Tensor],
    *,
    rank: int,
    world_size: int,
    predict: bool = False,
) -> tuple[Evaluation, Predictions | None]:
    """Evaluate ``model`` on all of ``split``, each rank on its share; a collective.

    Args:
        model: the network itself, not its DDP wrapper: the shares may differ by one sample, and the wrapper's
            collectives would then wait for a batch that never comes.
        split: with batches on the model's device.

    Returns:
        The evaluation, on every rank, and the predictions if asked to ``predict``, on rank 0; otherwise None.
    """
    # Loss summed over samples, correct samples, samples.
    totals = torch.zeros(3, dtype=torch.float64, device=split.device)
    size = len(split) if predict else 0, len(split.classes)
    probabilities = torch.zeros(size, dtype=torch.float32, device=split.device)
    share = torch.arange(len(split), device=split.images.device)[rank::world_size]
    _, height, width = split.shape
    batch = max(1, min(MOST_IMAGES, MOST_PIXELS // (height * width)))
    # The split() of an empty tensor is one empty batch, which some networks refuse.
    with evaluating(model):
        for samples in share.split(batch) if len(share) else ():
            images, labels, numbers = split.batch(samples)
            # A sum of half-precision numbers would lose digits.
            scores = model(normalise(images)).float()
            if predict:
                probabilities[numbers] = scores.softmax(dim=1)
            totals[0] += F.cross_entropy(scores, labels, reduction="sum")
            totals[1] += (scores.argmax(dim=1) == labels).sum()
            totals[2] += len(samples)
    ddp.all_reduce(totals)
    loss, correct, count = ddp.to_host(totals).tolist()
    evaluation = Evaluation(loss=loss / count, accuracy=correct / count, samples=round(count))
    if not predict:
        return evaluation, None
    ddp.all_reduce(probabilities)  # exact: the other ranks add zeros to a rank's rows
    if rank:
        return evaluation, None
    return evaluation, Predictions(ddp.to_host(probabilities), split.to(torch.device("cpu")))
