"""A model on disk, as ``ddp-manual evaluate`` finds it: its parameters, and what the run that trained it says of it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_files, config_file

# How torch ends the name under which a module keeps what is no tensor.
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run's ``config.json`` says of the images its model was trained on.

    Args:
        mean, std: by channel, 0 to 255, that they were normalised with.
        shape: channels, height and width; None, as are the classes, where the run is older than their record.
        sources: ``model_source`` and ``dataset_source``: digests, of those that were the user's own.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int] | None
    classes: tuple[str, ...] | None
    sources: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """Parameters and where they came from.

    Args:
        path: of the file.
        parameters: the state dict, without DDP's prefix, on the CPU; what a module keeps there as extra state is none.
        run: the files of its run; those of its folder where there is no run.
        trained: None where no ``config.json`` says it.
    """

    path: Path
    parameters: Mapping[str, Any]
    run: RunPaths
    trained: Trained | None

    @property
    def is_checkpoint(self) -> bool:
        return checkpoint_files.NAME.fullmatch(self.path.name) is not None


def read(path: Path) -> SavedModel:
    """The model at ``path``: a ``model.pt``, a checkpoint, or the folder of a run, whose ``model.pt`` counts and where
    there is none yet the newest checkpoint.

    Raises:
        CheckpointMissing: nothing is there.
        CheckpointCorrupt: it is no model, or not what was written; or config.json contradicts itself.
        BadOption: it cannot be read.
    """
    run = RunPaths(checkpoint_files.run_dir_of(path))
    if path.is_dir():
        model = RunPaths(path).model
        found = None if model.exists() else checkpoint_files.newest_whole(checkpoint_files.folder_of(path))
        if found is None and not model.exists():
            raise _missing(path, f"it has no {model.name}, and no checkpoint")
        path, content = (found[0].path, found[1]) if found else (model, _content(model))
    elif checkpoint_files.NAME.fullmatch(path.name):
        path, content = _checkpoint(path.with_suffix(".pt"))
    else:
        content = _content(path)
    return SavedModel(path=path, parameters=_parameters(path, content), run=run, trained=_trained(run.config))


def _checkpoint(path: Path) -> tuple[Path, bytes]:
    if not path.exists():
        raise _missing(path, "there is no such file")
    try:
        return path, checkpoint_files.read(checkpoint_files.describe(path))
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(error.what, why=error.why, next=_what_there_is(path.parent)) from error


def _content(path: Path) -> bytes:
    if not path.exists():
        raise _missing(path, "there is no such file or folder")
    try:
        if not path.is_file():
            raise OSError(0, "it is no regular file", str(path))
        return path.read_bytes()
    except OSError as error:
        raise BadOption(
            f"--checkpoint {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="name a model.pt, a checkpoint or a run's folder that this user may read",
        ) from None


def _parameters(path: Path, content: bytes) -> dict[str, Any]:
    """The state dict, alone or within a checkpoint, whatever the file is called and the parameters are."""
    import torch

    try:
        read = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        within = isinstance(read.get("model"), Mapping) and not isinstance(read.get("position"), torch.Tensor)
        found = dict(read["model"] if within else read)
    except Exception as error:  # whatever its first wrong byte leads to
        raise _no_model(path, f"torch cannot read it as one: {type(error).__name__}: {_reason(error)}") from error
    wanted = {name: value for name, value in found.items() if not str(name).endswith(EXTRA_STATE)}
    if not wanted or not all(isinstance(value, torch.Tensor) for value in wanted.values()):
        raise _no_model(path, f"it holds {', '.join(map(str, list(found)[:5])) or 'nothing'}, where tensors are wanted")
    return {str(name): value for name, value in found.items()}


def _reason(error: Exception) -> str:
    """The first line; where torch wraps its unpickler's complaint in advice for programmers, that complaint's first
    sentence."""
    text, wrapped, complaint = str(error).partition("WeightsUnpickler error:")
    line = (complaint if wrapped else text).strip().partition("\n")[0]
    return line.partition(". ")[0] if wrapped else line


def _trained(config: Path) -> Trained | None:
    try:
        if config.exists() and not config.is_file():
            raise OSError(0, "it is no regular file", str(config))
        run = config_file.apart(json.loads(config.read_bytes()))[1]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadOption(
            f"{config} cannot be read", why=str(error.strerror), next=f"make it readable: chmod a+r {config}"
        ) from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise _contradictory(config, f"it is no JSON object: {error}") from None
    if run is None:  # a file of options, as --config takes it
        return None
    try:
        mean, std = (tuple(map(float, run[name])) for name in ("mean", "std"))
        shape, classes = run["shape"], run["classes"]
        if shape is not None:
            channels, height, width = (_counted(length) for length in shape)
            shape, classes = (channels, height, width), tuple(map(str, classes))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise _contradictory(config, f"run: {type(error).__name__}: {error}") from None
    channels = shape[0] if shape else 1
    if not (len(mean) == len(std) == channels and all(std) and classes != ()):
        raise _contradictory(config, f"mean and std of {len(mean)} channels, shape of {channels}")
    sources = {name: value for name, value in run.items() if name.endswith("_source")}
    return Trained(mean=mean, std=std, shape=shape, classes=classes, sources=sources)


def _counted(length: Any) -> int:
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{length!r} is no length")
    return length


def _contradictory(config: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{config} is not what a run has written",
        why=why,
        next="mend it; or move the model to a folder of its own, and say what it is by --model and --dataset",
    )


def _no_model(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} holds no model",
        why=why,
        next="name a run's folder, its model.pt, one of its checkpoints, or a file that torch.save has written of a "
        "model's state_dict()",
    )


def _missing(path: Path, why: str) -> CheckpointMissing:
    return CheckpointMissing(
        f"no model at {path}", why=why, next=_what_there_is(path if path.is_dir() else path.parent)
    )


def _what_there_is(folder: Path) -> str:
    """The runs in a folder, or in that run the checkpoints; where it is itself missing, what to name."""
    if folder.is_dir() and checkpoint_files.find(checkpoint_files.folder_of(folder)):
        return f"what there is: ddp-manual checkpoints {folder}"
    models = sorted(path.parent for path in folder.glob("*/model.pt")) if folder.is_dir() else []
    lines = [f"ddp-manual evaluate --checkpoint {run}" for run in models[-checkpoint_files.MOST_NAMED :]]
    return "\n".join(lines or ["name a run's folder, such as runs/<start time>-<run_id>, or a file in it"])
