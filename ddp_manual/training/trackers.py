"""``--track``: TensorBoard, Weights & Biases and ``track.jsonl`` follow a run, on rank 0.

They are called where something happens, without a queue of our own. What may take long is theirs already:
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
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddp_manual import launchers, run_folder
from ddp_manual.errors import DdpManualError, StopSignal
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import escaped
from ddp_manual.training.evaluate import Predictions

logger = logging.getLogger(__name__)

# The results in TensorBoard's HPARAMS tab, beside the options.
RESULTS = ("test/accuracy", "test/loss")
PROJECT = "ddp_manual"
# Seconds for the server of Weights & Biases to begin a run, while all ranks wait, and to take what is left of it at the
# end, when all other ranks have left. Its own time-out for a login is 10 s.
BEGIN_WITHIN = 15.0
UPLOAD_WITHIN = 15.0
# Test images in a tracker's table of predictions.
MOST_PREDICTIONS = 100


class TrackedRun(NamedTuple):
    name: str
    """Says model, data set and number of ranks."""
    hyperparameters: Mapping[str, Any]
    """The options and what follows from them, as JSON values."""
    paths: RunPaths
    """A tracker writes only below its folder."""
    resumes_after: int | None
    """The step of the checkpoint that the run resumes from; None if it begins."""

    @property
    def step(self) -> int:
        return self.resumes_after or 0


class PredictedImage(NamedTuple):
    """A test image and the prediction for it."""

    number: int
    """Its place in the test set, from 0."""
    image: Tensor
    """uint8 on the CPU, [H, W] or [H, W, 3]."""
    guess: str
    truth: str
    scores: Mapping[str, float]
    """Class -> probability."""


class Tracker(ABC):
    """A place from which a run can be followed. What a method raises ends the tracker, but not the run.

    ``step`` counts from 1, as in ``Metrics``; it never falls.
    """

    name: ClassVar[str]
    """As ``--track`` has it."""
    advice = "metrics.jsonl has the same numbers"
    """What to do when this tracker has failed."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Begin to record ``run``, or go on with it; and record its picture of the first images, if it has one."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record name -> value, such as ``train/loss``."""

    @abstractmethod
    def predictions(self, step: int, images: Sequence[PredictedImage]) -> None:
        """Record some test images and their predictions."""

    @abstractmethod
    def summary(self, summary: Mapping[str, Any]) -> None:
        """Record ``summary.json``: the run is complete."""

    @abstractmethod
    def close(self, *, complete: bool) -> None:
        """Finish: the run is ``complete``, or it has stopped or failed."""


class Trackers:
    """All trackers of a run. A tracker that raises is warned of once and left out; the run goes on.

    Args:
        names: as ``--track`` has them; none are opened before ``open``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._trackers: list[Tracker] = []
        self._names = names
        self._complete = False

    def open(self, settings: Mapping[str, Any], paths: RunPaths, resumes_after: int | None) -> None:
        """Open all of them; ``settings`` is the content of ``config.json``."""
        flat = {**settings, **settings["run"]}
        del flat["run"]
        shown = {name: escaped(value) if isinstance(value, str) else value for name, value in flat.items()}
        run = TrackedRun(run_name(shown), shown, paths, resumes_after)
        self._trackers = [KINDS[name]() for name in self._names]
        self._each(lambda tracker: tracker.open(run))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.scalars(step, values))

    def predictions(self, step: int, predictions: Predictions) -> None:
        images = first_images(predictions) if self._trackers else []
        self._each(lambda tracker: tracker.predictions(step, images))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._complete = True
        self._each(lambda tracker: tracker.summary(summary))

    def close(self) -> None:
        """Finish; a signal ends the wait. For when no other rank waits for this one."""
        self._each(lambda tracker: tracker.close(complete=self._complete), at_the_end=True)
        self._trackers = []

    def _each(self, action: Callable[[Tracker], None], *, at_the_end: bool = False) -> None:
        for tracker in tuple(self._trackers):
            try:
                action(tracker)
                continue
            except (Exception, SystemExit) as error:  # wandb has a sys.exit on one of its ways out
                said = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
                reason = said.partition("\n")[0] + ("" if at_the_end else "; the run goes on without it")
            except (KeyboardInterrupt, StopSignal):
                if not at_the_end:
                    raise
                reason = "a signal came before it had finished"
            self._trackers.remove(tracker)
            logger.warning("--track %s: %s (%s)", tracker.name, reason, tracker.advice)


def run_name(hyperparameters: Mapping[str, Any]) -> str:
    """Return ``convnet-mnist-2ranks-1c5ad2c6``; of a path, as in ``folder:PATH``, the last part."""
    model, dataset = (hyperparameters[name].rstrip("/").rpartition("/")[2] for name in ("model", "dataset"))
    return f"{model}-{dataset}-{hyperparameters['world_size']}ranks-{hyperparameters['run_id']}"


def first_images(predictions: Predictions) -> list[PredictedImage]:
    """Return the first images in the order of ``predictions``: mistakes first."""
    split, classes = predictions.split, predictions.split.classes
    found = []
    for number in predictions.order[:MOST_PREDICTIONS].tolist():
        image = split.images[number].cpu()
        found.append(
            PredictedImage(
                number=number,
                image=image[0] if len(image) == 1 else image.permute(1, 2, 0),
                guess=classes[int(predictions.guess[number])],
                truth=classes[int(predictions.truth[number])],
                scores=dict(zip(classes, predictions.probabilities[number].tolist(), strict=True)),
            )
        )
    return found


class JsonLines(Tracker):
    """Events as lines of ``track.jsonl``, for a program of one's own to follow.

    Each line has ``event``, ``time`` (seconds since 1970) and ``step``. Pictures are named, not copied.
    """

    name = "jsonl"

    def open(self, run: TrackedRun) -> None:
        self._file, self._step = run.paths.track, run.step
        if run.resumes_after is not None:
            run_folder.keep_json_lines(self._file, lambda line: line["step"] <= run.step)
        self._write("started", run.step, name=run.name, hyperparameters=dict(run.hyperparameters))
        if run.paths.samples.exists():
            self._write("image", run.step, name="samples", file=run.paths.samples.name)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write("scalars", step, **values)

    def predictions(self, step: int, images: Sequence[PredictedImage]) -> None:
        rows = [
            {"id": image.number, "guess": image.guess, "truth": image.truth, "scores": dict(image.scores)}
            for image in images
        ]
        self._write("table", step, name="predictions", rows=rows)

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._write("result", self._step, summary=dict(summary))

    def close(self, *, complete: bool) -> None:
        self._write("closed", self._step, complete=complete)

    def _write(self, event: str, step: int, **content: Any) -> None:
        self._step = step
        head = {"event": event, "time": round(time.time(), 3), "step": step}
        run_folder.append_json_line(self._file, {**head, **content})


class TensorBoard(Tracker):
    """Event files below ``tensorboard`` in the run's folder, for ``tensorboard --logdir RUN_DIR``."""

    name = "tensorboard"

    def open(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # The steps after the checkpoint will come again: its readers then pass over the first ones.
        purge = None if run.resumes_after is None else run.resumes_after + 1
        self._writer = SummaryWriter(str(run.paths.tensorboard), purge_step=purge)
        self._file = cast(Any, self._writer.file_writer)  # torch declares it None
        options = json.dumps({"run": run.name, **run.hyperparameters}, indent=2)
        self._writer.add_text("hyperparameters", f"```\n{options}\n```", run.step)
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in run.hyperparameters.items()
        }
        experiment, session, self._session_end = hparams(plain, dict.fromkeys(RESULTS, 0.0))
        for summary in (experiment, session):
            self._file.add_summary(summary, run.step)
        if run.paths.samples.exists():
            pixels = np.asarray(Image.open(run.paths.samples))
            self._writer.add_image("samples", pixels, run.step, dataformats="HWC")
        self._writer.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def predictions(self, step: int, images: Sequence[PredictedImage]) -> None:
        """Write a table as text, and the images in the same order as one picture: TensorBoard has no tables."""
        heading = ["id", "guess", "truth", *images[0].scores]
        rows = [
            [str(image.number), image.guess, image.truth, *(f"{score:.4f}" for score in image.scores.values())]
            for image in images
        ]
        lines = [heading, ["---"] * len(heading), *rows]
        text = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        self._writer.add_text("predictions", text, step)
        pixels = torch.stack([image.image.reshape(*image.image.shape[:2], -1) for image in images])
        self._writer.add_images("predictions/images", pixels, step, dataformats="NHWC")
        self._writer.flush()

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._file.add_summary(self._session_end)

    def close(self, *, complete: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of https://docs.wandb.ai; variables such as WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY count.

    Its files, and what wandb would keep in the user's home, are below the run's folder. Without a login, or with a
    server that does not answer, it works offline and says what uploads the run. It never asks for a key.
    """

    name = "wandb"
    advice = "with WANDB_MODE=offline it needs no server"

    def open(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._folder = run.paths.wandb
        self._folder.mkdir(parents=True, exist_ok=True)
        with launchers.wandb_files_below(self._folder):
            mode, why_offline = self._mode()
            settings = wandb.setup().settings
            earlier = _earlier_id(run)
            self._run = wandb.init(
                project=settings.project or PROJECT,
                # A run that resumes keeps the name it has there: somebody may have changed it.
                name=None if earlier else settings.run_name or run.name,
                id=earlier,
                resume="allow" if earlier else None,
                dir=str(run.paths.run_dir),
                config=dict(run.hyperparameters),
                allow_val_change=True,
                mode=mode,
                # A run that the user's own script has begun is left alone.
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
        if mode != "disabled":
            run_folder.write_json(run.paths.wandb_id, {"id": self._run.id})
        self._uploads = mode == "online"
        # wandb sync passes over a run that was meant to be uploaded at once, unless told otherwise.
        every = "--include-online " if self._uploads else ""
        self.advice = f"to upload it: wandb sync {every}{shlex.quote(str(self._folder))}"
        if why_offline is not None:
            logger.info("wandb: offline (%s); %s", why_offline, self.advice)
        else:
            logger.info("wandb: %s", self._run.url if mode == "online" else f"{mode}, as WANDB_MODE asks")
        if run.paths.samples.exists():
            self._run.log({"samples": wandb.Image(str(run.paths.samples))}, step=run.step)

    def _mode(self) -> tuple[Literal["online", "offline", "disabled", "shared"], str | None]:
        """Return the mode that WANDB_MODE or a settings file asks for, or "offline" without a login, and why."""
        mode = self._wandb.setup(self._wandb.Settings(silent=True)).settings.mode
        if mode in ("offline", "dryrun"):
            return "offline", "as WANDB_MODE or a settings file asks"
        if mode in ("disabled", "shared"):
            return mode, None
        try:
            # Verified, because wandb.init cannot be tried twice with the id of a run that resumes.
            logged_in = self._wandb.login(prompt=False, verify=True)
        except self._wandb.Error as error:
            return "offline", str(error).splitlines()[0]
        return ("online", None) if logged_in else ("offline", "no login and no WANDB_API_KEY")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def predictions(self, step: int, images: Sequence[PredictedImage]) -> None:
        columns: list[str | int] = ["id", "image", "guess", "truth", *(f"score {name}" for name in images[0].scores)]
        rows = [
            [image.number, self._wandb.Image(image.image.numpy()), image.guess, image.truth, *image.scores.values()]
            for image in images
        ]
        with launchers.wandb_files_below(self._folder):
            self._run.log({"predictions": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({name: value for name, value in summary.items() if isinstance(value, (int, float))})

    def close(self, *, complete: bool) -> None:
        if self._uploads:
            logger.info("wandb: finishing the upload, for up to %g s", UPLOAD_WITHIN)
        self._run.finish(exit_code=0 if complete else 1)


def _earlier_id(run: TrackedRun) -> str | None:
    """Return wandb's id of the run that resumes; None if it begins."""
    if not run.resumes_after or not run.paths.wandb_id.exists():
        return None
    return str(json.loads(run.paths.wandb_id.read_bytes())["id"])


KINDS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WeightsAndBiases, JsonLines)}
