"""``ddp-manual show-data``: what is in a data set, as a picture, in numbers, and drawn on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ddp_manual import atomic_files, run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.terminal import columns
from ddp_manual.training.data import Split
from ddp_manual.training.datasets import source_of
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.pictures import drawn, image_grid, spread

# On a terminal: the most characters of an image's width, the gap between two images, and how many rows of images.
WIDEST = 32
GAP = "  "
ROWS = 2
UPPER_HALF = "\N{UPPER HALF BLOCK}"


def show(config: TrainConfig, part: str, count: int, out: Path | None) -> dict[str, Any]:
    """Write ``count`` labelled images as a PNG file; on a terminal with colours, draw a few there too.

    Args:
        out: the file, or its folder; None: the folder of the data sets.

    Returns:
        dataset, part, images, shape (channels, height, width), classes (pairs of name and number) and picture.

    Raises:
        DataMissing, DataCorrupt: about the data set. BadOption, DiskFull: the file cannot be written.
    """
    option = "--data_dir" if out is None else "--out"
    if out is None or out.is_dir():
        out = (out or Path(config.data_dir)) / f"{run_folder.in_a_file_name(config.dataset)}-{part}.png"
    if out.suffix.lower() != ".png":
        raise BadOption(
            f"--out {out} is not the name of a PNG file", why="PNG is what is written", next=f"name it {out}.png"
        )
    with writing(out, option):  # before the data set is read, which may take minutes
        if option == "--data_dir":
            out.parent.mkdir(parents=True, exist_ok=True)
        elif not out.parent.is_dir():
            raise OSError(0, "there is no such folder", str(out))
    source = source_of(config)
    source.prepare([part])
    split = source.load(part)
    with writing(out, option):
        atomic_files.replace_files({out: image_grid(split, count=count)})
    if sys.stdout.isatty():
        _draw(split, count)
    counts = torch.bincount(split.labels, minlength=len(split.classes)).tolist()
    return {
        "dataset": config.dataset,
        "part": part,
        "images": len(split),
        "shape": split.shape,
        "classes": list(zip(split.classes, counts, strict=True)),
        "picture": str(out),
    }


def text(shown: Mapping[str, Any]) -> str:
    """Format what ``show`` returns: how many images each class has, and where the picture is."""
    channels, height, width = shown["shape"]
    return "\n".join(
        [
            f"{shown['dataset']}, {shown['part']}: {shown['images']} images of {width}x{height} pixels, "
            f"{'grey' if channels == 1 else 'in colour'}",
            *columns([("class", "images"), *((name, str(count)) for name, count in shown["classes"])]),
            f"  {shown['picture']}",
        ]
    )


def _draw(split: Split, count: int) -> None:
    """Draw as many images side by side as the terminal is wide for, with their classes below.

    Each character shows two pixels: the upper one is its colour, the lower one its background.
    """
    console = Console(highlight=False)
    if console.no_color or console.color_system is None:
        return
    height, width = split.shape[1:]
    scale = min(1.0, WIDEST / max(height, width))
    height, width = max(1, round(scale * height)), max(1, round(scale * width))
    across = max(1, (console.width + len(GAP)) // (width + len(GAP)))
    chosen = spread(split, min(count, ROWS * across))
    for first in range(0, len(chosen), across):
        row = chosen[first : first + across]
        images = [drawn(split, index, width, height).convert("RGB").tobytes() for index in row]
        for y in range(0, height, 2):
            pixels = [(y * width + x, min(y + 1, height - 1) * width + x) for x in range(width)]
            lines = (Text().join(_half_blocks(image, *pair) for pair in pixels) for image in images)
            console.print(Text(GAP).join(lines), no_wrap=True, crop=True)
        names = (Text(split.classes[int(split.labels[index])][:width].center(width)) for index in row)
        console.print(Text(GAP).join(names), no_wrap=True, crop=True)


def _half_blocks(image: bytes, upper: int, lower: int) -> Text:
    above, below = (Color.from_rgb(*image[3 * pixel : 3 * pixel + 3]) for pixel in (upper, lower))
    return Text(UPPER_HALF, Style(color=above, bgcolor=below))
