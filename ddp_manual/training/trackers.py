"""``--track``: TensorBoard, Weights & Biases and ``track.jsonl`` follow a run, on rank 0.

They are called at once where something happens: this package has no queue for them. Slow work is done elsewhere:
``wandb.log`` hands the values to wandb-core, a process of wandb's that writes and uploads them, and returns. But a
frozen wandb-core blocks ``wandb.log`` after some 800 calls; the other ranks then wait, and the run ends after
``--stall_timeout``.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from ddp_manual import atomic_files
from ddp_manual.deadline import done_within
from ddp_manual.environment import variables_for_a_rank
from ddp_manual.errors import DdpManualError, StopSignal, escaped
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.evaluation import Predictions

logger = logging.getLogger(__name__)

PROJECT = "ddp_manual"
# Seconds for the server of Weights & Biases to begin a run, while all ranks wait, and to take the rest of the upload at
# the end, when all other ranks have left. Its own time-out for a login is 10 s.
BEGIN_WITHIN = 15.0
UPLOAD_WITHIN = 15.0
# Test images in a tracker's table of predictions.
MOST_PREDICTIONS = 100


class Table(NamedTuple):
    """Some test images and the predictions for them."""

    classes: tuple[str, ...]
    rows: list[list[Any]]
    """By image: its place in the test set from 0, the guess, the truth, and the probability of each class."""
    images: Tensor
    """uint8 [N, H, W, C], on the CPU."""


class Tracker(ABC):
    """A place from which a run can be followed. What a method raises ends the tracker, but not the run.

    ``step`` counts from 1, as in ``Metrics``; it never decreases.
    """

    name: ClassVar[str]
    """Its name in ``--track``."""
    advice = "metrics.jsonl has the same numbers"
    """What to do when this tracker has failed."""

    @abstractmethod
    def open(self, name: str, options: Mapping[str, Any], paths: RunPaths, step: int) -> None:
        """Begin to record a run, or go on with it; and record its picture of the first images, if it has one.

        Args:
            name: of the run.
            options: the options and the values that follow from them, as JSON values.
            paths: the tracker writes only below the run's folder.
            step: the last one of the checkpoint that the run resumes from; 0 if it begins.
        """

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record name -> value, such as ``train/loss``."""

    @abstractmethod
    def predictions(self, step: int, table: Table) -> None: ...

    @abstractmethod
    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Finish. ``summary`` is the content of ``summary.json``; None if the run has stopped or failed."""


class Trackers:
    """All trackers of a run. A tracker that raises is warned of once and left out; the run goes on.

    Args:
        names: as ``--track`` has them; only ``open`` opens them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._trackers: list[Tracker] = []
        self._names = names
        self.summary: Mapping[str, Any] | None = None
        """The summary of the run, once it is complete."""

    def open(self, settings: Mapping[str, Any], paths: RunPaths) -> None:
        """Open all of them; ``settings`` is the content of ``config.json``."""
        flat = {**settings, **settings["run"]}
        del flat["run"]
        options = {name: escaped(value) if isinstance(value, str) else value for name, value in flat.items()}
        self._trackers = [KINDS[name]() for name in self._names]
        step = settings["run"]["goes_on_after_step"]
        self._each(lambda tracker: tracker.open(run_name(options), options, paths, step))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.scalars(step, values))

    def predictions(self, step: int, predictions: Predictions) -> None:
        if self._trackers:
            table = table_of(predictions)
            self._each(lambda tracker: tracker.predictions(step, table))

    def close(self) -> None:
        """Close all of them, when no other rank waits for this one any more; a signal ends the wait for them."""
        self._each(lambda tracker: tracker.close(self.summary), at_the_end=True)
        self._trackers = []

    def _each(self, action: Callable[[Tracker], None], *, at_the_end: bool = False) -> None:
        for tracker in tuple(self._trackers):
            try:
                action(tracker)
                continue
            except (Exception, SystemExit) as error:  # wandb calls sys.exit in one place
                said = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
                reason = said.partition("\n")[0] + ("" if at_the_end else "; the run goes on without it")
            except (KeyboardInterrupt, StopSignal):
                if not at_the_end:
                    raise
                reason = "a signal came before it had finished"
            self._trackers.remove(tracker)
            logger.warning("--track %s: %s (%s)", tracker.name, reason, tracker.advice)


def run_name(options: Mapping[str, Any]) -> str:
    """Return a name like ``convnet-mnist-2ranks-1c5ad2c6``; of a path, as in ``folder:PATH``, it has the last part."""
    model, dataset = (options[name].rstrip("/").rpartition("/")[2] for name in ("model", "dataset"))
    return f"{model}-{dataset}-{options['world_size']}ranks-{options['run_id']}"


def table_of(predictions: Predictions) -> Table:
    """Return the first images in the order of ``predictions``: mistakes first."""
    chosen, classes = predictions.order[:MOST_PREDICTIONS], predictions.split.classes
    columns = (chosen, predictions.guess[chosen], predictions.truth[chosen], predictions.probabilities[chosen])
    rows = [
        [number, classes[guess], classes[truth], *probabilities]
        for number, guess, truth, probabilities in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return Table(classes, rows, predictions.split.images[chosen].permute(0, 2, 3, 1))


class JsonLines(Tracker):
    """Events as lines of ``track.jsonl``, for the user's own program to follow.

    Each line has ``event``, ``time`` (seconds since 1970) and ``step``. Pictures are named, not copied.
    """

    name = "jsonl"

    def open(self, name: str, options: Mapping[str, Any], paths: RunPaths, step: int) -> None:
        self._file = paths.track
        atomic_files.keep_json_lines(self._file, lambda line: line["step"] <= step)
        self._write("started", step, name=name, hyperparameters=dict(options))
        if paths.samples.exists():
            self._write("image", step, name="samples", file=paths.samples.name)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write("scalars", step, **values)

    def predictions(self, step: int, table: Table) -> None:
        rows = [
            {"id": number, "guess": guess, "truth": truth, "scores": dict(zip(table.classes, scores, strict=True))}
            for number, guess, truth, *scores in table.rows
        ]
        self._write("table", step, name="predictions", rows=rows)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._write("result", self._step, summary=dict(summary))
        self._write("closed", self._step, complete=summary is not None)

    def _write(self, event: str, step: int, **content: Any) -> None:
        self._step = step
        head = {"event": event, "time": round(time.time(), 3), "step": step}
        atomic_files.append_json_line(self._file, {**head, **content})


class TensorBoard(Tracker):
    """Event files below ``tensorboard`` in the run's folder, for ``tensorboard --logdir RUN_DIR``."""

    name = "tensorboard"

    def open(self, name: str, options: Mapping[str, Any], paths: RunPaths, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The steps after the checkpoint are trained again: TensorBoard then skips what was written of them before.
        self._writer = SummaryWriter(str(paths.tensorboard), purge_step=step + 1)
        text = json.dumps({"run": name, **options}, indent=2)
        self._writer.add_text("hyperparameters", f"```\n{text}\n```", step)
        if paths.samples.exists():
            self._writer.add_image("samples", np.asarray(Image.open(paths.samples)), step, dataformats="HWC")
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def predictions(self, step: int, table: Table) -> None:
        """Write a table as text, and the images in the same order as one picture: TensorBoard has no tables."""
        heading = ["id", "guess", "truth", *table.classes]
        rows = [[*map(str, row[:3]), *(f"{score:.4f}" for score in row[3:])] for row in table.rows]
        lines = [heading, ["---"] * len(heading), *rows]
        text = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        self._writer.add_text("predictions", text, step)
        self._writer.add_images("predictions/images", table.images, step, dataformats="NHWC")
        self._writer.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._writer.add_text("summary", f"```\n{json.dumps(summary, indent=2)}\n```")
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of https://docs.wandb.ai; variables such as WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY count.

    Its files, and what wandb would keep in the user's home, are below the run's folder. Without a login, or with a
    server that does not answer, it works offline and says what uploads the run. It never asks for a key.
    """

    name = "wandb"
    advice = "with WANDB_MODE=offline it needs no server"

    def open(self, name: str, options: Mapping[str, Any], paths: RunPaths, step: int) -> None:
        import wandb

        self._wandb = wandb
        self._folder = paths.wandb
        self._folder.mkdir(parents=True, exist_ok=True)
        with variables_for_a_rank.wandb_files_below(self._folder):
            settings = wandb.setup(wandb.Settings(silent=True)).settings
            why_offline = None
            if settings.mode in ("online", "run"):
                try:
                    # Verified, because wandb.init cannot be tried twice with the id of a run that resumes.
                    if not wandb.login(prompt=False, verify=True):
                        why_offline = "no login and no WANDB_API_KEY"
                except wandb.Error as error:
                    why_offline = str(error).splitlines()[0]
            # A run that resumes keeps its id, and its name on the server, which somebody may have changed.
            earlier = None
            if step and paths.wandb_id.exists():
                earlier = str(json.loads(paths.wandb_id.read_bytes())["id"])
            self._run = wandb.init(
                project=settings.project or PROJECT,
                name=None if earlier else settings.run_name or name,
                id=earlier,
                resume="allow" if earlier else None,
                dir=str(paths.run_dir),
                config=dict(options),
                allow_val_change=True,
                mode="offline" if why_offline else None,
                # Leaves a run alone that the user's own script has begun.
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",  # otherwise it replaces stdout and stderr
                    silent=True,
                    init_timeout=BEGIN_WITHIN,
                    finish_timeout=UPLOAD_WITHIN,
                    finish_timeout_raises=True,
                    # By default a rank that is killed loses its last 15 s.
                    x_transaction_log_flush_interval=1.0,
                ),
            )
        if not self._run.disabled:
            atomic_files.write_json(paths.wandb_id, {"id": self._run.id})
        self._uploads = not (self._run.offline or self._run.disabled)
        # wandb sync passes over a run that was meant to be uploaded at once, unless told otherwise.
        every = "--include-online " if self._uploads else ""
        self.advice = f"to upload it: wandb sync {every}{shlex.quote(str(self._folder))}"
        why = why_offline or "as WANDB_MODE or a settings file asks"
        if self._uploads:
            logger.info("wandb: %s", self._run.url)
        elif self._run.disabled:
            logger.info("wandb: disabled (%s)", why)
        else:
            logger.info("wandb: offline (%s); %s", why, self.advice)
        if paths.samples.exists():
            self._run.log({"samples": wandb.Image(str(paths.samples))}, step=step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def predictions(self, step: int, table: Table) -> None:
        columns: list[str | int] = ["id", "image", "guess", "truth", *(f"score {name}" for name in table.classes)]
        rows = [
            [number, self._wandb.Image(image.squeeze(-1).numpy()), *rest]
            for (number, *rest), image in zip(table.rows, table.images, strict=True)
        ]
        with variables_for_a_rank.wandb_files_below(self._folder):
            self._run.log({"predictions": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if self._uploads:
            logger.info("wandb: finishing the upload, for up to %g s", UPLOAD_WITHIN)
        if summary is not None:
            numbers = {name: value for name, value in summary.items() if isinstance(value, (int, float))}
            self._run.summary.update(numbers)
        finish = partial(self._run.finish, exit_code=0 if summary is not None else 1)
        # wandb-core itself counts finish_timeout: a frozen wandb-core never answers.
        if not done_within(UPLOAD_WITHIN, finish, "wandb finish"):
            raise TimeoutError(f"wandb has not finished within {UPLOAD_WITHIN:g} s")


KINDS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases, JsonLines)}
