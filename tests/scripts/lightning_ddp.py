"""A LightningModule that the Trainer's strategy "ddp" trains and tests."""

import argparse

import lightning as L
import torch
from line_data import Line
from torch import nn
from torch.utils.data import DataLoader


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("validation_loss", nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--broken", type=int, help="a sample that cannot be read")
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    training = DataLoader(Line(256, broken=args.broken), batch_size=16)
    trainer.fit(model, training, DataLoader(Line(64), batch_size=16))
    losses = ", ".join(f"{name} {value:.6f}" for name, value in sorted(trainer.callback_metrics.items()))
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, {losses}", flush=True)


if __name__ == "__main__":
    main()
