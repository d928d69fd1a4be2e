"""Loss and accuracy over a data set, exact for any world size: every sample counts once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual.training import collectives
from ddp_manual.training.data import Split

# Images in one batch. Of images above 32x32 a batch takes fewer, so that it has no more pixels than 1,000 of 32x32.
MOST_IMAGES = 1000
MOST_PIXELS = MOST_IMAGES * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """``accuracy`` is a fraction, ``loss`` the mean cross-entropy in nats."""

    loss: float
    accuracy: float
    samples: int


@torch.no_grad()  # not inference_mode(): training could not use a buffer that is created here
def evaluate(
    model: nn.Module,
    split: Split,
    normalise: Callable[[Tensor], Tensor],
    *,
    rank: int,
    world_size: int,
    all_scores: list[Tensor] | None = None,
) -> Evaluation:
    """Evaluate ``model`` on all of ``split``, each rank on its share; every rank gets the result. A collective.

    Args:
        model: the network itself, not its DDP wrapper: the shares may differ by one sample, and the wrapper's
            collectives would then wait for a batch that never comes.
        split: on the model's device.
        all_scores: a list to which the scores of this rank's samples are appended, batch after batch, each float32
            [n, classes]. This rank's samples are ``rank``, ``rank`` + world_size, ...
    """
    was_training = model.training
    model.eval()
    # Loss summed over samples, correct samples, samples.
    totals = torch.zeros(3, dtype=torch.float64, device=split.labels.device)
    share = torch.arange(len(split), device=split.labels.device)[rank::world_size]
    _, height, width = split.shape
    batch = max(1, min(MOST_IMAGES, MOST_PIXELS // (height * width)))
    # The split() of an empty tensor is one empty batch, which some networks refuse.
    for samples in share.split(batch) if len(share) else ():
        labels = split.labels[samples]
        # A sum of half-precision numbers would lose digits.
        scores = model(normalise(split.images[samples])).float()
        if all_scores is not None:
            all_scores.append(scores)
        totals[0] += F.cross_entropy(scores, labels, reduction="sum")
        totals[1] += (scores.argmax(dim=1) == labels).sum()
        totals[2] += len(samples)
    collectives.all_reduce(totals)
    model.train(was_training)
    loss, correct, count = totals.tolist()
    return Evaluation(loss=loss / count, accuracy=correct / count, samples=round(count))
