"""What all ranks must have in common before they train: the options, and the data, of which each host has a copy."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp_manual.errors import ConfigMismatch, DataDiffers
from ddp_manual.options import differing_options, side_by_side
from ddp_manual.training import collectives
from ddp_manual.training.data import Split, digest_of

if TYPE_CHECKING:
    from ddp_manual.worker.world import World


# What to do about data of a user's own factory and about other data that differ: on rank 0's host, and on another one.
NEXT_OF_OWN_FACTORY = (
    "the factory does not return the same data each time: seed its own generators, and sort what it lists\n"
    "those of random, numpy and torch are seeded before it is called",
    "have the factory read the same files on every host, and return the same data each time",
)
NEXT = (
    "start all ranks of a host in the same folder, with the same --data_dir",
    "copy rank 0's --data_dir to the other hosts, or delete theirs and let them download it again",
)


def agree_on_options(world: World, options: Mapping[str, tuple[Any, str]], run_dir: str) -> None:
    """Compare every rank's options with rank 0's, and take rank 0's folder for the run's files; a collective.

    Args:
        options: option -> (value, source), for all options that the ranks must have in common.

    Raises:
        ConfigMismatch: on every rank alike, naming the first rank whose options are not rank 0's.
    """
    who = f"rank {world.rank} ({world.host}, pid {os.getpid()})"
    found = world.gather({"who": who, "options": options, "run_dir": run_dir})
    world.take_folder(found[0]["run_dir"])
    for other in found[1:]:
        if differing := differing_options(found[0]["options"], other["options"]):
            world.gather(None)  # by now every agent knows the folder, into which it writes this error
            who = " ".join(other["who"].split()[:2])
            raise ConfigMismatch(
                f"{other['who']} is to train with other options than rank 0: {', '.join(differing)}",
                why=side_by_side(differing, found[0]["options"], other["options"], who),
                next="give train() the same TrainConfig on every rank; only paths and what rank 0 does may differ",
            )


def compare_data(
    parts: Mapping[str, Split], device: torch.device, hosts: Callable[[], Sequence[str]], *, own_factory: bool
) -> dict[str, str]:
    """Compare every rank's data with rank 0's: lengths, digests and names of classes; a collective.

    Args:
        parts: on the CPU. The digest of a part that comes from a cache is the one in the cache.
        device: of the process group's tensors.
        hosts: returns the host of each rank; called only if the data differ.
        own_factory: whether a factory of the user's returned the data.

    Returns:
        A digest of each part's images and labels: 32 hexadecimal digits.

    Raises:
        DataDiffers: on every rank, naming the hosts whose data are not rank 0's.
    """
    mine = torch.tensor([fingerprint(split) for split in parts.values()], device=device)
    ranks = torch.stack(collectives.all_gather(mine)).tolist()
    odd = [rank for rank, found in enumerate(ranks) if found != ranks[0]]
    if not odd:
        return {part: _hexadecimal(found[1:3]) for part, found in zip(parts, ranks[0], strict=True)}
    names = hosts()
    # No rank leaves before all know why: a rank that is still asking would give a peer's leaving as the cause.
    collectives.all_gather(mine)
    lines = []
    for index, part in enumerate(parts):
        differing = [rank for rank in odd if ranks[rank][index] != ranks[0][index]]
        lines += [
            f"{part}: rank {rank} ({names[rank]}) has {_shown(ranks[rank][index])}"
            for rank in ([0, *differing] if differing else [])
        ]
    where = ", ".join(dict.fromkeys(names[rank] for rank in odd))
    raise DataDiffers(
        f"the data on {where} are not those of rank 0 on {names[0]}: rank{'s'[: len(odd) > 1]} "
        f"{', '.join(map(str, odd))}",
        why="\n".join(lines),
        next=(NEXT_OF_OWN_FACTORY if own_factory else NEXT)[all(names[rank] != names[0] for rank in odd)],
    )


def fingerprint(split: Split) -> tuple[int, int, int, int, int]:
    """Return the number of samples, and digests (BLAKE2b, 128 bits) of images with labels and of the class names."""
    digest = bytes.fromhex(split.digest or digest_of(split.images, split.labels))
    names = hashlib.blake2b(json.dumps(split.classes).encode(), digest_size=16)
    return (len(split), *struct.unpack("<4q", digest + names.digest()))


def _shown(numbers: Sequence[int]) -> str:
    count, digest, names = numbers[0], numbers[1:3], numbers[3:]
    return f"{count} samples, digest {_hexadecimal(digest)[:12]}, class names {_hexadecimal(names)[:12]}"


def _hexadecimal(numbers: Sequence[int]) -> str:
    return struct.pack("<2q", *numbers).hex()
