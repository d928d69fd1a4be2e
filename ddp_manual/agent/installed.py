"""What is installed for this rank, which rank 0 compares: versions, and the source of this package."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ddp_manual
from ddp_manual.protocol.program_arguments import DIGITS

PACKAGE = Path(ddp_manual.__file__).parent


def installed_versions() -> dict[str, str | None]:
    """Return torch's version, without importing it, and Python's minor version."""
    try:
        torch: str | None = version("torch")
    except PackageNotFoundError:
        torch = None
    return {"torch": torch, "python": ".".join(platform.python_version_tuple()[:2])}


def code_digests() -> dict[str, str]:
    """Return file or folder of this package -> digest of its source, so that rank 0 can name what differs."""
    parts: dict[str, Any] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        digest = parts.setdefault(f"ddp_manual/{relative.parts[0]}", hashlib.sha256())
        digest.update(f"{relative}\n".encode() + path.read_bytes())
    return {name: digest.hexdigest()[:DIGITS] for name, digest in parts.items()}
