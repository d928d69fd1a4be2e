"""Start DistributedDataParallel training one rank at a time, by hand, and be told why it does not come together.

    from ddp_manual import WorldSpec
    from ddp_manual.rendezvous import rendezvous

    with rendezvous(WorldSpec.from_environment()) as world:
        print(world.rank, world.world_size, world.local_rank, world.device, world.backend)

Nothing here imports torch until a run needs it.
"""

from __future__ import annotations

from ddp_manual.config import TrainConfig, WorldSpec
from ddp_manual.errors import DdpManualError

__version__ = "0.1.0"

__all__ = ["DdpManualError", "TrainConfig", "WorldSpec", "__version__"]
