"""Loss and accuracy over a data set, exact whatever the world size: every sample counts once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual.training import collectives
from ddp_manual.training.data import Split

# At once, and fewer of larger ones: they have no more pixels than so many of 32x32.
MOST_IMAGES = 1000
MOST_PIXELS = MOST_IMAGES * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """``accuracy`` is a fraction, ``loss`` the mean cross-entropy in nats."""

    loss: float
    accuracy: float
    samples: int


@torch.no_grad()  # not inference_mode(): a buffer that is made anew here has to go on in training
def evaluate(
    model: nn.Module,
    split: Split,
    normalise: Callable[[Tensor], Tensor],
    *,
    rank: int,
    world_size: int,
    on_scores: Callable[[Tensor], None] | None = None,
) -> Evaluation:
    """Evaluate ``model`` on all of ``split``, each rank on its share; every rank gets the result.

    Args:
        model: the network itself, not its DDP wrapper: the shares may differ by one sample, and the wrapper's
            collectives would then wait for a batch that never comes.
        split: on the model's device.
        on_scores: shown the scores of this rank's samples, which are ``rank``, ``rank`` + world_size, ..., batch after
            batch: float32 [n, classes].
    """
    was_training = model.training
    model.eval()
    # Loss summed over samples, correct samples, samples.
    totals = torch.zeros(3, dtype=torch.float64, device=split.labels.device)
    share = torch.arange(len(split), device=split.labels.device)[rank::world_size]
    # A split of nothing is one empty batch, which a network need not take.
    for samples in share.split(_images_at_once(split)) if len(share) else ():
        labels = split.labels[samples]
        # What a model computes in half precision has too few digits for a sum.
        scores = model(normalise(split.images[samples])).float()
        if on_scores is not None:
            on_scores(scores)
        totals[0] += F.cross_entropy(scores, labels, reduction="sum")
        totals[1] += (scores.argmax(dim=1) == labels).sum()
        totals[2] += len(samples)
    collectives.all_reduce(totals)
    model.train(was_training)
    loss, correct, count = totals.tolist()
    return Evaluation(loss=loss / count, accuracy=correct / count, samples=round(count))


def _images_at_once(split: Split) -> int:
    _, height, width = split.shape
    return max(1, min(MOST_IMAGES, MOST_PIXELS // (height * width)))
