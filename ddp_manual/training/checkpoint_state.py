"""The content of a checkpoint: packed, unpacked, and restored, so that all ranks go on with the same state.

A checkpoint never holds code: it is read with ``weights_only=True``. Only rank 0 needs the file, and only its
``--resume`` counts. If the file is missing, damaged or another run's, rank 0 raises that, and the other ranks learn it.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from ddp_manual.errors import BadOption, CheckpointMismatch
from ddp_manual.option_fields import as_flags, option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_files, ddp, own_factory
from ddp_manual.training.checkpoint_files import AUTO, Checkpoint
from ddp_manual.training.data import Split
from ddp_manual.training.evaluation import Evaluation
from ddp_manual.training.meter import Window
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.position import Position
from ddp_manual.wording import counted

if TYPE_CHECKING:
    from ddp_manual.training.trainer import Trainer

logger = logging.getLogger(__name__)

# Options that a resumed run keeps: others make another network, show it other images, or change the samples seen.
MUST_MATCH = ("model", "dataset", "image_size", "normalization", "seed", "sync_bn")
# Properties of the data that it keeps for the same reasons: see ``options_of``.
OF_THE_DATA = ("samples", "shape", "class_count")


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run has measured so far.

    Args:
        evaluations: one after each epoch.
        window: the sums so far for the next line of metrics.
    """

    evaluations: tuple[Evaluation, ...] = ()
    window: Window = field(default_factory=Window)
    train_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The content of a checkpoint.

    Args:
        options: see ``options_of``.
        model: the network's state dict, without DDP's prefix; Any, since msgspec would make a plain dict of it.
        optimizer: its state by parameter number. Learning rate, momentum and the like come from the options.
    """

    position: Position
    history: History
    options: dict[str, Any]
    world_size: int
    model: Any
    optimizer: dict[int, Any]


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of ``Saved`` for the run as it is now. The tensors are those in training, not copies."""
    return {
        "position": asdict(trainer.position),
        "history": asdict(trainer.history),
        "options": trainer.options,
        "world_size": trainer.world_size,
        "model": trainer.network.state_dict(),
        "optimizer": trainer.optimizer.state_dict()["state"],
    }


def pack(trainer: Trainer) -> bytes:
    """Return the state as it is now, as bytes; on rank 0, whose buffers count. All else is the same on all ranks."""
    content = io.BytesIO()
    torch.save(on_cpu(state_of(trainer)), content)
    return content.getvalue()


def on_cpu(state: Any) -> Any:
    """Return ``state`` with its tensors on the CPU, so that a machine without a GPU can read them.

    A state dict keeps its attribute, which has the versions of the modules: some need theirs when it is loaded.
    """
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        moved = copy.copy(state)
        moved.update({name: on_cpu(value) for name, value in state.items()})
        return moved
    return state


def unpack(path: Path, content: bytes) -> Saved:
    """Return what ``pack`` has packed; raise CheckpointCorrupt, which names ``path``, for any other bytes."""
    with _corrupt_if_it_fails(path):
        return msgspec.convert(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), Saved)


@contextmanager
def _corrupt_if_it_fails(path: Path) -> Iterator[None]:
    """Turn any exception of the body into CheckpointCorrupt: damaged bytes may raise anything."""
    try:
        yield
    except Exception as error:  # torch raises many types of errors
        raise checkpoint_files.corrupt(path, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def restore(path: Path, saved: Saved, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the state of a checkpoint back, on every rank.

    Raises:
        CheckpointCorrupt: it does not fit this network or optimizer.
    """
    with _corrupt_if_it_fails(path):
        _check_shapes(saved.optimizer, optimizer)
        restore_state(saved, network, optimizer)


def restore_state(saved: Saved, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state of the network and of the optimizer. What is drawn at random is seeded at each step."""
    network.load_state_dict(saved.model)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": saved.optimizer, "param_groups": groups})


def _check_shapes(state: Mapping[int, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a tensor, such as momentum, does not fit its parameter: torch fails only a step later."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[number].shape:
                raise ValueError(f"{name} of parameter {number} has another shape than the parameter")


def options_of(config: TrainConfig, train: Split, test: Split) -> dict[str, Any]:
    """Return the options and properties of the data that decide the parameters; a checkpoint keeps them to compare."""
    kept = {
        field.name: getattr(config, field.name)
        for field in option_fields(TrainConfig)
        if field.metadata["shared"] and field.metadata["group"] in ("training", "data")
    }
    of_the_data = {"samples": len(train), "shape": list(train.shape), "class_count": len(train.classes)}
    sources = own_factory.sources(model=config.model, dataset=config.dataset)
    return {**kept, **of_the_data, "data": train.digest, "test_data": test.digest, **sources}


@contextmanager
def held_run_dir(config: TrainConfig, paths: RunPaths, *, again: bool) -> Iterator[None]:
    """Make the run's folder, and lock it for this process while the body runs; on rank 0.

    Args:
        again: whether an earlier process of this run has made the folder.

    Raises:
        BadOption: it cannot be used, holds an earlier run, or another process trains into it.
    """
    resuming = again or checkpoint_files.resumes_in(config.resume, paths.run_dir)
    paths.create(resuming=resuming)
    with paths.locked():
        paths.create(resuming=resuming)  # the process that held the lock until now may have begun a run there
        yield


def resume(paths: RunPaths, trainer: Trainer) -> bool:
    """Give every rank the state of the checkpoint that rank 0's ``--resume`` means; a collective.

    Returns:
        True if the run goes on; False if there is no checkpoint: it starts from the beginning.

    Raises:
        CheckpointMissing, CheckpointCorrupt, CheckpointMismatch, BadOption: on rank 0.
        CheckpointMismatch: on every rank, if the parameters do not fit the network.
        CheckpointCorrupt: on every rank, if something else in it does not fit.
    """
    found = find_resumed(trainer.config, paths) if trainer.rank == 0 else None
    path = found[0].path if found else Path("rank 0's checkpoint")
    if found:
        _check_options(path, unpack(path, found[1]), trainer.config, trainer.options)
    # bytearray: torch wants memory that it could write to
    own = torch.frombuffer(bytearray(found[1]), dtype=torch.uint8) if found else None
    content = ddp.share_bytes(own, trainer.device)
    if content is None:
        return False
    saved = unpack(path, content.numpy().tobytes())
    check_parameters(path, saved, trainer.network)
    trainer.settle_buckets()
    restore(path, saved, trainer.network, trainer.optimizer)
    trainer.resume(saved.position, saved.history)
    logger.log(
        logging.INFO if trainer.rank == 0 else logging.DEBUG,
        "going on after step %d, %.2f epochs, from %s%s",
        *(saved.position.step, trainer.epoch_plan.seen(saved.position) / trainer.epoch_plan.samples, path),
        f", saved by {counted(saved.world_size, 'rank')}" if saved.world_size != trainer.world_size else "",
    )
    return True


def find_resumed(config: TrainConfig, paths: RunPaths) -> tuple[Checkpoint, bytes] | None:
    """Return the checkpoint that ``--resume`` means, and its content; None: the run starts from the beginning.

    Raises:
        CheckpointMissing, CheckpointCorrupt: there is none, or it is damaged.
        BadOption: it cannot be read; or starting from the beginning would overwrite another or a complete run.
    """
    if config.resume is None:
        return None
    if config.resume != AUTO:
        return checkpoint_files.named(Path(config.resume))
    found = checkpoint_files.newest_whole(paths.checkpoints)
    if found is None:
        if paths.config.exists():
            try:
                there = TrainConfig.from_file(str(paths.config))
                differing = [name for name in MUST_MATCH if getattr(there, name) != getattr(config, name)]
            except BadOption:  # not raised: it advises to edit the file, which is the record of a run
                differing = ["options that cannot be read"]
            complete = paths.summary.exists()
            if complete or differing:
                which = "a complete run" if complete else "another run"
                raise BadOption(
                    f"--run_dir {paths.run_dir} holds {which}, without a checkpoint",
                    why=f"{paths.summary} exists" if complete else f"{paths.config} differs in {', '.join(differing)}",
                    next="choose another --run_dir: starting from the beginning here would overwrite its files",
                )
        logger.info("no checkpoint in %s yet: starting from the beginning", paths.run_dir)
    return found


def check_parameters(path: Path, saved: Saved, network: nn.Module) -> None:
    then, now = (
        {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        for state in (saved.model, network.state_dict())
    )
    wrong = [
        f"{name}: {then.get(name, 'not')} in the checkpoint / {now.get(name, 'not')} here"
        for name in {**now, **then}
        if then.get(name) != now.get(name)
    ]
    if wrong:
        raise CheckpointMismatch(
            f"{path} is of another network",
            why="\n".join(wrong[:5]),
            next="train the model and the data it was saved with; or start a new run, without --resume",
        )


def _check_options(path: Path, saved: Saved, config: TrainConfig, now: Mapping[str, Any]) -> None:
    """Refuse another run's checkpoint, and say which other options have changed."""
    then = saved.options
    changed = [name for name, value in now.items() if then.get(name) != value]
    wrong = [
        f"{name}: {then.get(name)} in the checkpoint / {now[name]} here"
        + (f" ({config.source(name)})" if name in MUST_MATCH else "")
        for name in (*MUST_MATCH, *OF_THE_DATA)
        if name in changed
    ]
    begun = saved.position.epoch + (saved.position.taken > 0)
    if begun > config.epochs:
        wrong.append(f"epochs: {begun} begun or done in the checkpoint / {config.epochs} here")
    if wrong:
        run = RunPaths(checkpoint_files.run_dir_of(path))
        advice = f"give the options it was saved with, which are in {path.with_suffix('.json')}"
        if run.config.exists():
            flags = as_flags({"resume": AUTO, "run_dir": run.run_dir})
            advice = f"leave those options out, which {flags} takes from that run"
        raise CheckpointMismatch(
            f"{path} is of another run",
            why="\n".join(wrong),
            next=f"{advice}\nor start a new run, without --resume",
        )
    if "data" in changed:
        raise CheckpointMismatch(
            f"{path} is of a run on other data",
            why=f"the training images and labels of --dataset {config.dataset} have the digest {then.get('data')} in "
            f"the checkpoint / {now['data']} here",
            next="bring back the data that the run began with; a factory has to return the same each time\n"
            "or start a new run, without --resume",
        )
    for name in changed:
        if name.endswith("_source"):
            logger.warning("the source of %s has changed since the checkpoint", now[name.removesuffix("_source")])
        elif name == "test_data":
            logger.warning(
                "the test images of %s have changed since the checkpoint: "
                "accuracies before and after it are of different images",
                config.dataset,
            )
        else:
            logger.info("from here on with --%s %s; it was %s", name, now[name], then.get(name))
