"""Which samples a rank takes in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.wording import counted


def epoch_order(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch goes through its samples: int64 [count], drawn from seed and epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def share(order: Tensor, *, start: int, stop: int, rank: int, world_size: int) -> Tensor:
    """Return the samples that ``rank`` takes in a step in which all ranks together take ``order[start:stop]``.

    As in torch.utils.data.DistributedSampler, that is every world_size-th sample; but no sample is taken twice: where
    there are not enough for all ranks, the shares differ by one sample or are empty. So any number of ranks can
    continue from ``stop``, and no sample is repeated or left out.
    """
    return order[start + rank : stop : world_size]


def at_least(fewest: int, samples: Tensor, order: Tensor, *, stop: int) -> Tensor:
    """Return ``samples`` of a step that ends at ``stop`` in ``order``. If they are fewer than ``fewest``, add the
    samples that follow the step, or at the end of the epoch those from its beginning."""
    missing = fewest - len(samples)
    return torch.cat([samples, order.roll(-stop)[:missing]]) if missing > 0 else samples


def check_batch_fits(count: int, batch_size: int, world_size: int) -> None:
    """Raise BadOption if a rank's share of ``count`` training samples does not fill one batch."""
    share = count // world_size
    if batch_size > share:
        raise BadOption(
            f"a batch of {batch_size} per rank is larger than a rank's share of the training set",
            why=f"{counted(count, 'sample')} over {counted(world_size, 'rank')}: {share} for each",
            next=f"choose a --batch_size of at most {share}" if share else "start fewer ranks",
        )
