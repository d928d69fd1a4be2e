"""Two epochs of 61 samples, 10 per step and rank, by as many ranks as WORLD_SIZE says; prints the parameters.

At 3 ranks the last step of an epoch has one sample, so two ranks have none.
"""

from __future__ import annotations

import torch

import ddp_manual
from ddp_manual import TrainConfig
from ddp_manual.progress_bar import ProgressLines
from ddp_manual.training import data, models
from ddp_manual.training.data import Data, Split
from ddp_manual.training.trainer import Trainer
from ddp_manual.training.transforms import unit_scale


class LastLine(ProgressLines):
    loss = ""

    def say(self, line: str, *, passes: bool = False) -> None:
        self.loss = line.split()[5]


with ddp_manual.join() as world:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (61, 1, 28, 28), generator=drawn, dtype=torch.uint8)
    train = Split(images, torch.randint(0, 10, (61,), generator=drawn), data.DIGITS)
    network = models.build("mlp", device=world.device, seed=0)
    config = TrainConfig(global_batch_size=30, epochs=2)
    trainer = Trainer(world, config, network, Data(train, train, unit_scale(1)))
    lines = LastLine()
    while not trainer.ended:
        trainer.train_epoch(lines)
        trainer.position = trainer.position.next_epoch()
    values = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    trained = [trainer.position.step, float(lines.loss), *values[:: len(values) // 500].tolist()]
    print(*trained)
