"""Where the images of a run are: on its device or, if they do not fit there, in host memory.

Host memory holds them once for all ranks of a host, in the page cache from which the ranks map them. To pin them all
would need a copy for each rank, and a batch has to be gathered all the same; so only the batches are pinned.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ddp_manual.training import ddp
from ddp_manual.training.data import Split

logger = logging.getLogger(__name__)

# The part of a GPU's free memory that the images may take: the network and what it computes need the rest. A batch that
# comes from host memory costs little, 3 MB for 1,000 images of 32x32.
IMAGES_MAY_TAKE = 0.5


def bring_to(device: torch.device, splits: Sequence[Split]) -> list[Split]:
    """Move the parts of a data set, which are on the CPU, to a device; leave all in host memory if they do not fit."""
    if device.type == "cpu":
        return list(splits)
    size, free = sum(split.nbytes for split in splits), torch.cuda.mem_get_info(device)[0]
    try:
        if size <= IMAGES_MAY_TAKE * free:
            moved = [split.to(device) for split in splits]
            level = logging.DEBUG if ddp.rank() else logging.INFO  # one line for all ranks
            logger.log(level, "the images (%d MB) are in the memory of %s", size >> 20, device)
            return moved
    except torch.OutOfMemoryError:  # another process has taken the memory meanwhile
        pass
    logger.info(
        "the images (%d MB) stay in host memory, and go to %s in pinned batches: it has %d MB free, half of that for "
        "the network",
        *(size >> 20, device, free >> 20),
    )
    return [replace(split, target=device) for split in splits]
