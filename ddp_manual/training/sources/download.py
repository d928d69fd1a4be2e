"""Downloads by torchvision, which knows where each data set is and checks what comes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_manual.errors import DataMissing, writing


def download(name: str, kind: str, data_dir: Path, *, into: Path, missing: Sequence[str]) -> None:
    """Have ``torchvision.datasets.<kind>`` download below ``data_dir``.

    Args:
        into: the folder it makes; taken away again if nothing came, with those above it that were not there before.
        missing: what was looked for.

    Raises:
        DataMissing: it could not be downloaded. BadOption: data_dir cannot be written.
    """
    with writing(data_dir, "--data_dir"):
        new = [folder for folder in dict.fromkeys((into, into.parent, data_dir)) if not folder.exists()]
        # Not its parents: a folder whose parent is not there is more likely mistyped than wanted.
        data_dir.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=data_dir).close()
    # torchvision takes 1.6 s to import and is needed for nothing else here.
    from torchvision import datasets

    try:
        getattr(datasets, kind)(root=str(data_dir), download=True)
    except (RuntimeError, OSError) as error:
        reason = "\n".join(line for line in str(error).splitlines() if line.strip())
        for made in new:
            with suppress(OSError):
                made.rmdir()
        raise data_missing(name, into, missing, f"it could not be downloaded:\n{reason}") from error


def data_missing(name: str, folder: Path, looked_for: Sequence[str], reason: str) -> DataMissing:
    return DataMissing(
        f"{name} is not in {folder.absolute()}",
        why=f"looked for {', '.join(looked_for)}\n{reason}",
        next="give the folder that has them as --data_dir, or use digits drawn in code: --dataset synthetic",
    )
