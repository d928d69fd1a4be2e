"""A rank like any other whose worker says, in its second step, what it has besides the training: see test_serial.py."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil

from tests.changed import is_worker, run_agent, run_worker

if TYPE_CHECKING:
    from ddp_manual.training.loop import Trainer


def watch() -> None:
    import torch.distributed as dist

    from ddp_manual.training.loop import Trainer

    train_step = Trainer._train_step
    steps: list[Trainer] = []

    def watched(self: Trainer, *arguments: Any) -> Any:
        steps.append(self)
        if len(steps) == 2:
            threads = sorted(thread.name for thread in threading.enumerate())
            connections = psutil.Process().net_connections("inet")
            print(f"{threads} {connections} {dist.is_initialized()} {type(self.model).__name__}", file=sys.stderr)
        return train_step(self, *arguments)

    Trainer._train_step = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    run_worker(watch) if is_worker() else run_agent(__file__, ["train", *sys.argv[1:]])
