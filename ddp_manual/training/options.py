"""The options of a training and their defaults, from flags and from a JSON file (``--config``).

Each field of TrainConfig is one option of the command line. A value that cannot work raises BadOption before torch is
imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.option_fields import Options, option, option_fields
from ddp_manual.rank_options import WORLD_OPTIONS, WorldSpec
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import own_factory
from ddp_manual.training.own_factory import OWN_FACTORY

logger = logging.getLogger(__name__)

MODELS = ("convnet", "mlp", "classic", "cifar-cnn")
DATASETS = ("mnist", "fashion-mnist", "kmnist", "synthetic", "cifar10")
TRACKERS = ("tensorboard", "wandb", "jsonl")
FOLDER_PREFIX = "folder:"
FOLDER = {"folder:PATH": r"folder:.+"}
# Seconds: up to 10 for the login and 15 to begin the run, and on a busy machine more to start wandb's own process.
WANDB_BEGINS_WITHIN = 30.0
# A file of options has neither: each run writes to a folder of its own, and resumes from a checkpoint of its own.
OF_ONE_RUN = ("run_dir", "resume")
# The trackers that are packages; setup.cfg has an extra of each name.
PACKAGES = ("tensorboard", "wandb")
# ``option``, for each group of the help.
_training, _data, _output, _checkpoints = (
    partial(option, group=group) for group in ("training", "data", "output", "checkpoints")
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """What is trained, on what, and how. The ranks must agree on all options except paths and those of rank 0 alone.

    Raises:
        BadOption: see ``validate``.
    """

    model: str = _training("convnet", "Which network.", choices=MODELS, forms=OWN_FACTORY)
    epochs: int = _training(2, "Times to go through the training set.", minimum=1)
    batch_size: int | None = _training(None, "Samples per rank and step (default: 100).", minimum=1)
    global_batch_size: int | None = _training(
        None, "Samples per step over all ranks, divided among them; the learning rate is then not scaled.", minimum=1
    )
    lr: float = _training(0.04, "Base learning rate, for one rank.", above=0, maximum=1e6)
    lr_scaling: str = _training(
        "linear", "How the learning rate grows with world_size.", choices=("linear", "sqrt", "none")
    )
    lr_schedule: str = _training(
        "linear", "How the learning rate decays after the warm-up.", choices=("linear", "cosine", "constant")
    )
    warmup_epochs: float = _training(0.8, "Epochs (or a part of one) of linear warm-up.", minimum=0)
    momentum: float = _training(0.9, "SGD momentum.", minimum=0, below=1)
    weight_decay: float = _training(5e-4, "SGD weight decay.", minimum=0)
    clip_grad_norm: float | None = _training(
        None,
        "Scale gradients down to at most this norm; 0 leaves them alone (default: 1; with --momentum 0: 0).",
        minimum=0,
    )
    shift: int = _training(
        1, "Move each training image by up to this many pixels, anew each epoch.", minimum=0, maximum=8
    )
    flip: bool = _training(False, "Mirror half of the training images, left to right, drawn anew each epoch.")
    normalization: str = _training(
        "dataset",
        "dataset: pixels less the mean of the training set's, over their standard deviation. none: 0 to 1.",
        choices=("dataset", "none"),
    )
    sync_bn: bool = _training(False, "Batch statistics over all ranks (torch offers it on GPUs only).")
    no_ddp: bool = _training(
        False,
        "The plain loop of one process: no process group, no port, no DDP; the same parameters as one rank with it.",
    )
    seed: int = _training(0, "Seed of the weights and of each epoch's order.", minimum=0, maximum=2**63 - 1)
    dataset: str = _data("mnist", "What to train on.", choices=DATASETS, forms={**FOLDER, **OWN_FACTORY})
    image_size: int | None = _data(
        None,
        "Resize the images of folder:PATH to squares of this many pixels (default: all have one size already).",
        minimum=1,
        maximum=4096,
    )
    classes: str | None = _data(
        None, "Names to show for the classes, in the order of their labels, with commas between."
    )
    data_dir: str = _data("data", "Where the data sets are, or are downloaded to.", shared=False)
    run_dir: str | None = _output(
        None, "Where rank 0 writes what the run produced (default: runs/<start time>-<run_id>).", shared=False
    )
    track: str | None = _output(
        None,
        f"Follow the run elsewhere too: {', '.join(TRACKERS)}; several with commas between. Rank 0's value is used.",
        shared=False,
    )
    log_every: int = _output(100, "Steps between two lines of metrics; the end of an epoch has one too.", minimum=1)
    check_replicas: int = _output(
        0,
        "Steps between two comparisons of all ranks' parameters and optimizer state, which every epoch's end and every "
        "checkpoint then begin with too. 0: none.",
        minimum=0,
    )
    checkpoint_every: int = _checkpoints(
        1, "Epochs between two checkpoints; the last epoch has one too. 0: no checkpoints.", minimum=0
    )
    checkpoint_steps: int = _checkpoints(
        0, "Steps between two checkpoints, besides those of the epochs. 0: no such checkpoints.", minimum=0
    )
    hold_every: int = _checkpoints(
        0,
        "With --on_loss wait or shrink: steps between two states that are held in memory. 0: as few as take 1% of the "
        "time.",
        minimum=0,
    )
    keep: int = _checkpoints(
        3, "How many of the newest checkpoints stay, and the one with the best test accuracy.", minimum=1, shared=False
    )
    resume: str | None = _checkpoints(
        None,
        "Continue from a checkpoint: a file or a run_dir; or auto, the newest in --run_dir, if there is one. "
        "Rank 0's value is used, and only its machine needs the file.",
        shared=False,
    )
    sources: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Option -> "flag" or "from FILE"; the other options have their defaults. Flyte knows no mapping but dict."""

    def __post_init__(self) -> None:
        with self.naming_files():
            self.validate()
        if self.run_dir is not None:  # ranks and agents compare it as text: runs/a/ becomes runs/a
            object.__setattr__(self, "run_dir", str(Path(self.run_dir)))

    def validate(self) -> None:
        """Raise BadOption where a value is out of its bounds, or two values contradict each other."""
        for name in ("model", "dataset"):
            own_factory.check_name(name, getattr(self, name))
        self.check_bounds()
        names = self.class_names or ()
        if not all(names) or len(set(names)) < len(names):
            raise BadOption(
                f"--classes {self.classes!r} does not name each class once",
                why=self.named("classes"),
                next="give names like cat,dog: no empty name, and no name twice",
            )
        if self.image_size is not None and not is_folder(self.dataset):
            raise BadOption(
                "--image_size is for --dataset folder:PATH",
                why=f"{self.named('image_size')}, {self.named('dataset')}: its images have a size of their own",
                next="leave --image_size out",
            )
        if strange := [name for name in self.trackers if name not in TRACKERS or self.trackers.count(name) > 1]:
            raise BadOption(
                f"--track {self.track!r} names {strange[0]!r}"
                + (" twice" if strange[0] in TRACKERS else ", which is not known"),
                why=f"{self.named('track')}: it names the trackers of the run, each of them once",
                next=f"choose from {', '.join(TRACKERS)}; several like this: --track {','.join(TRACKERS)}",
            )
        if self.batch_size is not None and self.global_batch_size is not None:
            raise BadOption(
                "--batch_size and --global_batch_size cannot both be given",
                why=f"{self.named('batch_size')} per rank, {self.named('global_batch_size')} over all ranks",
                next="give one of the two",
            )
        if self.warmup_epochs > self.epochs:
            raise BadOption(
                f"--warmup_epochs {self.warmup_epochs:g} is longer than the run",
                why=f"{self.named('warmup_epochs')}, {self.named('epochs')}: the learning rate would never decay",
                next=f"choose a --warmup_epochs of at most {self.epochs}",
            )

    @property
    def most_grad_norm(self) -> float:
        """``clip_grad_norm``, or its default, which depends on the momentum: plain SGD is not clipped."""
        default = 1.0 if self.momentum else 0.0
        return default if self.clip_grad_norm is None else self.clip_grad_norm

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names in ``classes``, one by one."""
        return tuple(name.strip() for name in self.classes.split(",")) if self.classes is not None else None

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in ``track``, one by one."""
        return tuple(name.strip() for name in self.track.split(",")) if self.track is not None else ()

    def check_trackers(self, spec: WorldSpec) -> None:
        """Raise BadOption where a package for ``--track`` is missing; on rank 0, which alone has trackers. Nothing is
        imported."""
        for name in filter(PACKAGES.__contains__, self.trackers):
            found = find_spec(name)
            # A folder that happens to have the name, such as ``wandb`` that runs leave behind, has no origin.
            if found is None or found.origin is None:
                raise BadOption(
                    f"--track {name} needs {name}, which this Python does not have",
                    why="it is an extra: nothing else here needs it",
                    next=f"pip install {name}\nor, in a checkout of this package: pip install -e '.[{name}]'",
                )
        if "wandb" in self.trackers and spec.world_size > 1 and spec.stall_limit < WANDB_BEGINS_WITHIN:
            logger.warning(
                "--stall_timeout %g may be too short for --track wandb: all ranks wait while rank 0 begins the run, "
                "for up to %g s",
                *(spec.stall_limit, WANDB_BEGINS_WITHIN),
            )

    @classmethod
    def from_file(cls, path: str | None, **flags: Any) -> TrainConfig:
        """Take flags first, then the JSON file at ``path`` (of a run's folder, its ``config.json``), then the options
        of the run in ``run_dir`` if that is to be resumed, then the defaults.

        Raises:
            BadOption: a file cannot be read or holds no options, or a value cannot work.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        resumed = flags.get("run_dir") if flags.get("resume") == "auto" else None
        for named in (resumed, path):
            if named is None:
                continue
            inside = RunPaths(Path(named)).config
            if inside.is_file() or named is path:
                file = str(inside) if inside.is_file() else named
                found = _options_in(file)
                values = {**_beside(found, values), **found}
                sources |= dict.fromkeys(found, f"from {file}")
        values = {**_beside(flags, values), **flags}
        sources |= dict.fromkeys(flags, "flag")
        return cls(**values, sources={name: sources[name] for name in values})

    def with_flags(self, **flags: Any) -> TrainConfig:
        """Return the same training with other flags, such as ``resume="auto"``."""
        return dataclasses.replace(self, **flags, sources={**self.sources, **dict.fromkeys(flags, "flag")})

    def check_world(self, spec: WorldSpec) -> None:
        """Raise BadOption if global_batch_size cannot be divided over the ranks, or --no_ddp has several ranks."""
        with self.naming_files():
            self.batch_size_per_rank(spec.world_size)
            if self.no_ddp and spec.world_size > 1:
                raise BadOption(
                    f"--no_ddp is for one process, and this is one of {spec.world_size}",
                    why=f"{self.named('no_ddp')}, {spec.named('world_size')}: each would train on all the data",
                    next="leave --no_ddp out (or say --ddp), or start one process with --world_size 1",
                )

    def batch_size_per_rank(self, world_size: int, *, has_shrunk: bool = False) -> int:
        """Return how many samples each rank takes per step; raise BadOption if global_batch_size is not divisible.

        Args:
            has_shrunk: ranks were lost on the way, and the others take no more than global_batch_size.
        """
        if self.global_batch_size is None:
            return self.batch_size or 100
        share, rest = divmod(self.global_batch_size, world_size)
        if not share or (rest and not has_shrunk):
            lower = world_size * share
            raise BadOption(
                f"--global_batch_size {self.global_batch_size} cannot be divided over {world_size} ranks",
                why=f"{self.named('global_batch_size')} / {world_size} is not a whole number of samples per rank",
                next="try --global_batch_size " + (f"{lower} or {lower + world_size}" if lower else str(world_size)),
            )
        return share

    def shared_options(self) -> dict[str, tuple[Any, str]]:
        """Return option -> (value, source) for everything that the ranks must agree on."""
        return {
            field.name: (getattr(self, field.name), self.source(field.name))
            for field in option_fields(type(self))
            if field.metadata["shared"]
        }


def _beside(above: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``below`` that go together with those ``above``: no second batch size; no class names of
    another data set, and its image size only if both are folders of images."""
    without: set[str] = set()
    if "batch_size" in above or "global_batch_size" in above:
        without |= {"batch_size", "global_batch_size"}
    dataset = above.get("dataset")
    if dataset is not None and below.get("dataset", dataset) != dataset:
        without |= {"classes"} if is_folder(dataset) else {"classes", "image_size"}
    return {name: value for name, value in below.items() if name not in without}


def _options_in(path: str) -> dict[str, Any]:
    """Return option -> value for the options in a JSON file; null means that an option is not given.

    A run's own ``config.json`` has the key ``run``, which is skipped, and so are its ``run_dir`` and ``resume``.

    Raises:
        BadOption: the file cannot be read, is no JSON object, or has a key that is no option of a training. Types and
            bounds are for ``TrainConfig.validate`` to check.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for whoever writes to it
            raise OSError(0, "it is no regular file")
        options = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_without_repetition)
        if not isinstance(options, dict):
            raise ValueError("it is JSON, but no object")
    except OSError as error:
        raise BadOption(
            f"--config {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="name a JSON file of options, such as the config.json of a run",
        ) from None
    except (ValueError, RecursionError) as error:
        raise BadOption(
            f"{path} holds no options",
            why=str(error),
            next='write a JSON object with options as keys, such as {"epochs": 3, "lr": 0.05}',
        ) from None
    if options.pop("run", None) is not None:
        options = {name: value for name, value in options.items() if name not in OF_ONE_RUN}
    options = {name: value for name, value in options.items() if value is not None}
    known = [field.name for field in option_fields(TrainConfig)]
    for name in options:
        if name in WORLD_OPTIONS or name in OF_ONE_RUN:
            raise BadOption(
                f"{path}: {name} cannot be given in a file",
                why="a file says what is trained, the same for all ranks and for any number of runs",
                next=f"leave it out, and give --{name} or what the launcher sets for it",
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise BadOption(
                f"{path}: {json.dumps(name)} is no option",
                why=f"options are {', '.join(known)}",
                next=f"write {close[0]}" if close else "leave it out",
            )
    return options


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{json.dumps(repeated[0])} is there twice")
    return dict(pairs)


def is_folder(dataset: str) -> bool:
    """Tell whether the data set is the user's own class folders, ``folder:PATH``."""
    return dataset.startswith(FOLDER_PREFIX)
