"""The files MNIST and its relatives come in, read whole and checked."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ddp_manual.errors import DataCorrupt, DataMissing

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049


def read_idx(path: Path, magic: int) -> Tensor:
    """A file of the MNIST family as uint8: [N, H, W] images or [N] labels.

    The format: magic number, one big-endian length per dimension, then the bytes (http://yann.lecun.com/exdb/mnist/).
    """
    dimensions = magic & 0xFF
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, str(error) or type(error).__name__) from error
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise _corrupt(path, f"it ends after {len(content)} bytes, inside its header of {header}")
    found, *shape = struct.unpack(f">I{dimensions}I", content[:header])
    if found != magic:
        raise _corrupt(path, f"it begins with the number {found}, not {magic}")
    size = 1
    for length in shape:
        size *= length
    if len(content) - header != size:
        raise _corrupt(path, f"it should hold {size} bytes after its header and holds {len(content) - header}")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(shape)


def unreadable(path: Path, error: OSError) -> DataMissing:
    return DataMissing(
        f"{path} may not be read", why=str(error), next=f"make it readable for this user: chmod a+r {path}"
    )


def _corrupt(path: Path, reason: str) -> DataCorrupt:
    return DataCorrupt(
        f"{path} cannot be read as a data set",
        why=reason,
        next="delete that file and start again with a network, to download it anew",
    )
