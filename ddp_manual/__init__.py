"""Start DistributedDataParallel training one rank at a time, by hand, and be told why it does not come together.

    import ddp_manual

    with ddp_manual.join() as world:
        print(world.rank, world.world_size, world.local_rank, world.device, world.backend)
        ddp_manual.train(world, ddp_manual.TrainConfig(epochs=1))

Nothing here imports torch until a run needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import DdpManualError
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training.options import TrainConfig

if TYPE_CHECKING:
    from ddp_manual.launch.spawn import spawn
    from ddp_manual.training.check_replicas import check_replicas
    from ddp_manual.training.main import train
    from ddp_manual.worker.holding import held, hold
    from ddp_manual.worker.join import join
    from ddp_manual.worker.world import World

__version__ = "0.1.0"

__all__ = [
    "DdpManualError",
    "TrainConfig",
    "World",
    "WorldSpec",
    "__version__",
    "check_replicas",
    "held",
    "hold",
    "join",
    "spawn",
    "train",
]

# Name -> its module, imported when the name is first used: ``--help`` needs none of these modules.
_LATER = {
    "World": "ddp_manual.worker.world",
    "check_replicas": "ddp_manual.training.check_replicas",
    "held": "ddp_manual.worker.holding",
    "hold": "ddp_manual.worker.holding",
    "join": "ddp_manual.worker.join",
    "spawn": "ddp_manual.launch.spawn",
    "train": "ddp_manual.training.main",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
