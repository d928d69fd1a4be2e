"""What all ranks must have in common before they train: the options, and the data, of which each host has a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import ConfigMismatch, DataDiffers
from ddp_manual.option_fields import differing_options, side_by_side
from ddp_manual.training.data import PARTS, Split, digest_of_classes
from ddp_manual.wire import all_escaped

if TYPE_CHECKING:
    from ddp_manual.worker.world import World


OWN_FACTORY_DIFFERS = (
    "have the factory return the same data each time and on every host: seed its own generators, and sort what it "
    "lists\nthose of random, numpy and torch are seeded before it is called"
)
FILES_DIFFER = (
    "give all ranks of a host the same --data_dir, and start them in the same folder\n"
    "copy rank 0's --data_dir to the other hosts, or delete theirs and let them download it again\n"
    "if the images of a folder are the same files, install one version of Pillow: its decoders may differ"
)


def agree_on_options(world: World, options: Mapping[str, tuple[Any, str]], run_dir: str, *, chosen: bool) -> None:
    """Compare every rank's options with rank 0's, and take rank 0's folder for the run's files; a collective.

    Args:
        options: option -> (value, source), for all options that the ranks must have in common.
        run_dir: the folder that this rank was given, or its default.
        chosen: whether this rank was given that folder.

    Raises:
        ConfigMismatch: on every rank alike, naming the first rank whose options are not rank 0's.
    """
    who = f"rank {world.rank} ({world.host}, pid {os.getpid()})"
    found = all_escaped(world.gather({"who": who, "options": options, "run_dir": run_dir}))
    world.take_folder(found[0]["run_dir"], own=run_dir, chosen=chosen)
    for other in found[1:]:
        if differing := differing_options(found[0]["options"], other["options"]):
            world.gather(None)  # afterwards every agent knows the folder into which it writes this error
            who = " ".join(other["who"].split()[:2])
            raise ConfigMismatch(
                f"{other['who']} is to train with other options than rank 0: {', '.join(differing)}",
                why=side_by_side(differing, found[0]["options"], other["options"], who),
                next="give train() the same TrainConfig on every rank; only paths and what rank 0 does may differ",
            )


def compare_data(world: World, train: Split, test: Split, *, own_factory: bool) -> None:
    """Compare every rank's data with rank 0's: lengths, digests and names of classes; a collective.

    Args:
        own_factory: whether a factory of the user's returned the data.

    Raises:
        DataDiffers: on every rank, naming the hosts whose data are not rank 0's.
    """
    ranks = all_escaped(world.gather([fingerprint(train), fingerprint(test)]))
    odd = [rank for rank, found in enumerate(ranks) if found != ranks[0]]
    if not odd:
        return
    hosts = [line["host"] for line in world.roster()]
    # No rank leaves before all have the messages: a rank that still waits would report a peer's leaving as the cause.
    world.gather(None)
    lines = []
    for index, part in enumerate(PARTS):
        differing = [rank for rank in odd if ranks[rank][index] != ranks[0][index]]
        for rank in [0, *differing] if differing else []:
            count, images, names = ranks[rank][index]
            lines.append(
                f"{part}: rank {rank} ({hosts[rank]}) has {count} samples, digest {images[:12]}, "
                f"class names {names[:12]}"
            )
    raise DataDiffers(
        f"the data on {', '.join(dict.fromkeys(hosts[rank] for rank in odd))} are not those of rank 0 on {hosts[0]}: "
        f"rank{'s'[: len(odd) > 1]} {', '.join(map(str, odd))}",
        why="\n".join(lines),
        next=OWN_FACTORY_DIFFERS if own_factory else FILES_DIFFER,
    )


def fingerprint(split: Split) -> list[Any]:
    """Return the number of samples, and digests (BLAKE2b, 128 bits) of images with labels and of the class names."""
    return [len(split), split.digest, digest_of_classes(split)]
