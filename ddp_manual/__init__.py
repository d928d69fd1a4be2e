"""Start DistributedDataParallel training one rank at a time, by hand, and be told why it does not come together.

    from ddp_manual import TrainConfig, WorldSpec, train
    from ddp_manual.rendezvous import rendezvous

    with rendezvous(WorldSpec.from_environment()) as world:
        print(world.rank, world.world_size, world.local_rank, world.device, world.backend)
        train(world, TrainConfig(epochs=1))

Nothing here imports torch until a run needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_manual.config import TrainConfig
from ddp_manual.errors import DdpManualError
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    from ddp_manual.spawning import spawn
    from ddp_manual.worker import train

__version__ = "0.1.0"

__all__ = ["DdpManualError", "TrainConfig", "WorldSpec", "__version__", "spawn", "train"]

# Name -> the module it is taken from when it is first asked for: ``--help`` needs none of them.
_LATER = {"spawn": "ddp_manual.spawning", "train": "ddp_manual.worker"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
