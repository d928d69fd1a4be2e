"""``metrics.jsonl`` of a script that reports its loss: rank 0 writes a line a second, in the run's folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ddp_manual.atomic_files import append_json_line
from ddp_manual.errors import DdpManualError
from ddp_manual.from_worker import Progress
from ddp_manual.run_folder import RunPaths

logger = logging.getLogger(__name__)

# Seconds between two lines.
EVERY = 1.0


class LossRecord:
    """Writes the losses that ``progress`` reports. If the folder cannot take them, a warning says so once."""

    def __init__(self, run_dir: Path, progress: Progress) -> None:
        self._path, self._progress = RunPaths(run_dir).metrics, progress
        self._began = time.monotonic()
        self._written = self._began - EVERY
        self._is_unwritten = self._has_failed = False
        progress.loss_said = self.take

    def take(self) -> None:
        """Handle a loss that was reported; write it if the last line is a second old."""
        self._is_unwritten = self._progress.number_of_loss is not None
        if self._is_unwritten and time.monotonic() >= self._written + EVERY:
            self.write()

    def write(self) -> None:
        """Write the loss that was reported last, if it is not written yet."""
        if not self._is_unwritten or self._has_failed:
            return
        self._written, self._is_unwritten = time.monotonic(), False
        beat = self._progress
        line = {"step": beat.whole_step, "epoch": beat.whole_epoch, "loss": beat.number_of_loss}
        try:
            line |= {"samples_per_second": beat.rate, "seconds": self._written - self._began}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self._path, line)
        except (DdpManualError, OSError, ValueError, TypeError, OverflowError) as error:
            self._has_failed = True
            logger.warning("the loss is not written any more: %s", error)
