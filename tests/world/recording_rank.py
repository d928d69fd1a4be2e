"""One rank, as ``run_multi_gpu_train.py`` starts it, that writes down which samples it trains on.

RECORD names the file: a line of indices for each step. With RECORD_WHERE the sample of the epoch at which the step
begins and the number of ranks stand in front of them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from tests.changed import is_worker, run_agent, run_worker

if TYPE_CHECKING:
    from torch import Tensor


def record() -> None:
    from ddp_manual.training import data

    share = data.share

    def recorded(order: Tensor, **where: Any) -> Tensor:
        samples = share(order, **where)
        with open(os.environ["RECORD"], "a", encoding="utf-8") as file:
            in_front = [where["start"], where["world_size"]] if "RECORD_WHERE" in os.environ else []
            file.write(" ".join(map(str, [*in_front, *samples.tolist()])) + "\n")
        return samples

    data.share = recorded


if __name__ == "__main__":
    run_worker(record) if is_worker() else run_agent(__file__, sys.argv[1:])
