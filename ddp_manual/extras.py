"""Packages that only some options need: each extra of ``pip install '.[<extra>]'``, and what to import for it."""

from __future__ import annotations

from importlib.util import find_spec

from ddp_manual.errors import BadOption

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "flyte": "flytekit",
    "notebook": "ipykernel",
    "plots": "matplotlib",
}


def require(extra: str, for_what: str) -> None:
    """Raises BadOption if the package of ``extra`` is not installed, naming ``for_what``, such as an option."""
    package = PACKAGES[extra]
    if find_spec(package) is None:
        raise BadOption(
            f"{for_what} needs {package}, which is not installed in this Python",
            why=f"{package} comes with the extra {extra}",
            next=f"in the folder of this package: pip install '.[{extra}]'",
        )
