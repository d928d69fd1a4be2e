"""One rank, as ``run_multi_gpu_train.py`` starts it, that writes down which samples it trains on.

RECORD names the file: a line of indices for each step.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ddp_manual.cli import main
from ddp_manual.training import data

share = data.share


def recorded(order: Tensor, **where: Any) -> Tensor:
    samples = share(order, **where)
    with open(os.environ["RECORD"], "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, samples.tolist())) + "\n")
    return samples


if __name__ == "__main__":
    data.share = recorded
    main()
