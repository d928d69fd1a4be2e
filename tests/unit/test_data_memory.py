"""Where images are that do not fit on a GPU. Where the tests run there may be none, so the CPU takes its place."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from ddp_manual.errors import BadOption
from ddp_manual.progress_bar import ProgressLines
from ddp_manual.training import data, models
from ddp_manual.training.data import Data, Split
from ddp_manual.training.data_memory import bring_to
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.trainer import Trainer
from ddp_manual.training.transforms import unit_scale
from tests.alone import alone
from tests.conftest import Start, source

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def some_images(count: int) -> Split:
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 28, 28), generator=drawn, dtype=torch.uint8)
    return Split(images, torch.randint(0, 10, (count,), generator=drawn), data.DIGITS)


def trained(parts: Sequence[Split]) -> tuple[torch.Tensor, float]:
    """Train an epoch; return all parameters, and the loss over the test set."""
    config = TrainConfig(model="mlp", batch_size=10, epochs=1, shift=2, flip=True, no_ddp=True)
    with alone() as world:
        network = models.build("mlp", device=CPU, seed=0)
        trainer = Trainer(world, config, network, Data(*parts, unit_scale(1)))
        trainer.settle_buckets()
        trainer.train_epoch(ProgressLines())
        predictions = trainer.evaluate()
        assert predictions is not None and len(predictions) == len(parts[1])
        parameters = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
        return parameters, trainer.evaluations[-1].loss


def test_training_from_host_memory_computes_what_training_on_the_device_does() -> None:
    parts = [some_images(61), some_images(23)]
    on_device, on_host = trained(parts), trained([replace(part, target=CPU) for part in parts])
    assert torch.equal(on_device[0], on_host[0]) and on_device[1] == on_host[1]


@pytest.mark.parametrize("taken_meanwhile", [False, True])
def test_images_that_do_not_fit_on_the_gpu_stay_in_host_memory_and_a_line_says_so(
    taken_meanwhile: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known_beforehand = AssertionError("it is known beforehand that they do not fit")
    refuse = Mock(side_effect=torch.OutOfMemoryError if taken_meanwhile else known_beforehand)
    free = (1 << 30) if taken_meanwhile else (1 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 << 30))
    monkeypatch.setattr(Split, "to", refuse)
    with caplog.at_level(logging.INFO):
        found = bring_to(GPU, [some_images(3000), some_images(10)])
    assert all(split.device == GPU and split.images.device == CPU for split in found)
    said = f"the images (2 MB) stay in host memory, and go to cuda:0 in pinned batches: it has {free >> 20} MB free"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("can_write", "megabytes", "refused"), [(True, 8, False), (False, 10, False), (False, 8, True)]
)
def test_images_that_each_rank_of_a_host_reads_for_itself_are_refused_if_memory_holds_fewer_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_write: bool, megabytes: int, refused: bool
) -> None:
    """Two parts of 1.5 MB, and three copies besides the one that has been read."""
    images = source("synthetic", tmp_path)
    monkeypatch.setattr(images, "read", lambda part: some_images(2000))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=megabytes << 20))
    monkeypatch.setattr(data.DataCache, "save", lambda *_: can_write)
    images.prepare()
    expected = "do not fit into memory once for each of the 4 ranks on"
    with pytest.raises(BadOption, match=expected) if refused else nullcontext():
        images.prepare(ranks=4)


@pytest.mark.gpu
def test_on_a_gpu_that_is_nearly_full_the_training_reads_its_images_from_host_memory(
    start: Start, digits: Path, tmp_path: Path
) -> None:
    script = f"""if True:
        import torch
        import ddp_manual
        torch.cuda.mem_get_info = lambda device: (1 << 20, 2 << 20)
        with ddp_manual.join(run_dir={str(tmp_path / "run")!r}) as world:
            config = ddp_manual.TrainConfig(data_dir={str(digits)!r}, epochs=2)
            summary = ddp_manual.train(world, config)
            print(summary["device"], summary["final_test_accuracy"] > 0.9)
    """
    process = start(sys.executable, "-c", script)
    assert process.wait() == 0, process.err
    assert process.out == "cuda True\n"
    assert "stay in host memory, and go to cuda:0 in pinned batches" in process.err
