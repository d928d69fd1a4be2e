"""Packages that only some options need, installed by name: ``pip install 'ddp_manual[wandb]'``."""

from __future__ import annotations

from importlib.util import find_spec

from ddp_manual.errors import BadOption
from ddp_manual.training.config import TrainConfig

# Extra -> the packages it brings; setup.cfg has the same extras.
PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "flyte": ("flytekit",),
    "notebook": ("nbclient", "ipykernel", "matplotlib"),
    "plots": ("matplotlib",),
}


def require(extra: str, for_what: str) -> None:
    """Look whether the packages of ``extra`` are there, without importing them.

    Args:
        for_what: the option or command that needs them, such as ``--track wandb``.

    Raises:
        BadOption: one is missing; says what installs it.
    """
    missing = [package for package in PACKAGES[extra] if not _is_installed(package)]
    if missing:
        raise BadOption(
            f"{for_what} needs {' and '.join(missing)}, which this Python does not have",
            why="it is an extra: nothing else here needs it",
            next=f"pip install {' '.join(missing)}\nor, in a checkout of this package: pip install -e '.[{extra}]'",
        )


def check_trackers(config: TrainConfig) -> None:
    """On rank 0, which alone has any: raises BadOption where a package for ``--track`` is missing."""
    for name in config.trackers:
        if name in PACKAGES:
            require(name, f"--track {name}")


def _is_installed(package: str) -> bool:
    """A folder that happens to have the name, such as the ``wandb`` that runs leave behind, is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None
