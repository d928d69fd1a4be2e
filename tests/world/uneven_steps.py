"""Two epochs of 61 samples, 10 per step and rank, by as many ranks as WORLD_SIZE says; prints the parameters.

At 3 ranks the last step of an epoch has one sample, so two ranks have none.
"""

from __future__ import annotations

import torch

import ddp_manual
from ddp_manual import TrainConfig
from ddp_manual.signals import Requests
from ddp_manual.training import data, models
from ddp_manual.training.augment import unit_scale
from ddp_manual.training.data import Split
from ddp_manual.training.ddp import wrap_in_ddp
from ddp_manual.training.epoch_plan import Position
from ddp_manual.training.loop import Trainer
from ddp_manual.training.metrics import Meter

with ddp_manual.join() as world:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (61, 1, 28, 28), generator=drawn, dtype=torch.uint8)
    train = Split(images, torch.randint(0, 10, (61,), generator=drawn), data.DIGITS)
    network = models.build("mlp", device=world.device, seed=0)
    wrapped = wrap_in_ddp(network, world.device)
    trainer = Trainer(
        model=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9),
        train=train,
        normalise=unit_scale(1),
        rank=world.rank,
        world_size=world.world_size,
        config=TrainConfig(global_batch_size=30, epochs=2),
    )
    position, meter, counted = Position(), Meter(world.device), 0.0
    while not trainer.epoch_plan.ended(position):
        for step in trainer.train_epoch(position, meter, Requests()):
            position = step.position
        assert step.metrics is not None
        position = position.next_epoch()
    values = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    print(position.step, step.metrics.loss, *values[:: len(values) // 500].tolist())
