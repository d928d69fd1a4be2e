"""transformers' Trainer with a language model so small that nothing is downloaded."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 32, 12


class Counting(Dataset):
    """Sequences that count up from somewhere.

    Args:
        broken: the number of a sample that cannot be read.
    """

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number == self.broken:
            raise ValueError(f"sample {number} is broken")
        tokens = (number + torch.arange(LENGTH)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--broken", type=int, help="a sample that cannot be read")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=args.max_steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=1e-2,
            logging_steps=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
        torch.manual_seed(0)
        trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Counting(64, args.broken))
        trained = trainer.train()
        tested = trainer.evaluate(Counting(16))
    print(
        f"rank {settings.process_index} of {settings.world_size}: {trained.global_step} steps, "
        f"training loss {trained.training_loss:.5f}, evaluation loss {tested['eval_loss']:.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
