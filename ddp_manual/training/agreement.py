"""Whether all ranks have read the same data: each host has a copy of its own, and they may differ."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from ddp_manual.errors import DataDiffers
from ddp_manual.training import collectives
from ddp_manual.training.data import Split


def compare_data(parts: Mapping[str, Split], device: torch.device, hosts: Callable[[], Sequence[str]]) -> None:
    """Compare every rank's data with rank 0's, by length and digest; a collective.

    Args:
        parts: on the CPU.
        device: where the process group's tensors live.
        hosts: the host of each rank, asked only if they differ.

    Raises:
        DataDiffers: on every rank, naming the hosts whose data are not rank 0's.
    """
    mine = torch.tensor([number for split in parts.values() for number in fingerprint(split)], device=device)
    gathered = collectives.all_gather(mine)
    ranks = torch.stack(gathered).reshape(len(gathered), len(parts), 3).tolist()
    if all(found == ranks[0] for found in ranks):
        return
    names = hosts()
    lines = []
    for index, part in enumerate(parts):
        if all(found[index] == ranks[0][index] for found in ranks):
            continue
        lines.append(f"{part}: rank 0 ({names[0]}) has {_shown(ranks[0][index])}")
        lines += [
            f"{part}: rank {rank} ({names[rank]}) has {_shown(found[index])}"
            for rank, found in enumerate(ranks)
            if found[index] != ranks[0][index]
        ]
    odd = [rank for rank, found in enumerate(ranks) if found != ranks[0]]
    where = ", ".join(dict.fromkeys(names[rank] for rank in odd))
    raise DataDiffers(
        f"the data on {where} are not those of rank 0 on {names[0]}: rank{'s'[: len(odd) > 1]} "
        f"{', '.join(map(str, odd))}",
        why="\n".join(lines),
        next="copy rank 0's --data_dir to the other hosts, or delete theirs and let them download it again",
    )


def fingerprint(split: Split) -> tuple[int, int, int]:
    """How many samples there are, and 128 bits of a digest of images and labels (BLAKE2b)."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (split.images, split.labels):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return (len(split), *struct.unpack("<2q", digest.digest()))


def _shown(numbers: Sequence[int]) -> str:
    count, *digest = numbers
    return f"{count} samples, digest {struct.pack('<2q', *digest).hex()[:12]}"
