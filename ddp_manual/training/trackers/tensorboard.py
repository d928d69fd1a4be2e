"""Event files for ``tensorboard --logdir RUN_DIR``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ddp_manual.training.trackers.sink import About, PredictionTable, Sink

# What the HPARAMS tab of TensorBoard shows beside the options.
RESULTS = ("test/accuracy", "test/loss")


class TensorBoard(Sink):
    """Below ``tensorboard`` in the run's folder. Each event is on disk before the next is taken."""

    name = "tensorboard"

    def open(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # What lies after the checkpoint will come again: its readers pass over that.
        purge = None if about.goes_on_after is None else about.goes_on_after + 1
        self._writer = SummaryWriter(str(about.paths.tensorboard), purge_step=purge)
        self._file = cast(Any, self._writer.file_writer)  # torch declares it None
        step = about.goes_on_after or 0
        options = json.dumps({"run": about.name, **about.hyperparameters}, indent=2)
        self._writer.add_text("hyperparameters", f"```\n{options}\n```", step)
        experiment, session, self._session_end = hparams(
            {name: _plain(value) for name, value in about.hyperparameters.items()}, dict.fromkeys(RESULTS, 0.0)
        )
        for summary in (experiment, session):
            self._file.add_summary(summary, step)
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, step: int, name: str, file: Path) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(file))
        self._writer.add_image(name, pixels, step, dataformats="HW" if pixels.ndim == 2 else "HWC")
        self._writer.flush()

    def table(self, step: int, name: str, table: PredictionTable) -> None:
        """As text, and the images in the same order as one picture: TensorBoard has no tables."""
        import numpy as np

        heading = ["id", "guess", "truth", *table.classes]
        rows = [
            [str(sample.number), sample.guess, sample.truth, *(f"{score:.4f}" for score in sample.scores)]
            for sample in table.samples
        ]
        lines = [heading, ["---"] * len(heading), *rows]
        text = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        self._writer.add_text(name, text, step)
        images = np.stack([np.atleast_3d(sample.image) for sample in table.samples])
        self._writer.add_images(f"{name}/images", images, step, dataformats="NHWC")
        self._writer.flush()

    def result(self, summary: Mapping[str, Any]) -> None:
        self._file.add_summary(self._session_end)

    def close(self, *, complete: bool) -> None:
        self._writer.close()


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
