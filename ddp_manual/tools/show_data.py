"""``ddp-manual show-data``: what is in a data set, as a picture, in numbers, and in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.text import Text

    from ddp_manual.training.data import Split

# Characters: an image is made no wider than this in a terminal.
WIDEST = 32
BETWEEN = "  "
ROWS = 2
UPPER_HALF = "\N{UPPER HALF BLOCK}"
# From dark to bright, for terminals without colours.
INKS = " .:-=+*#%@"


def show(config: TrainConfig, part: str, count: int, out: Path | None) -> dict[str, Any]:
    """Write ``count`` images with their labels to ``out``, a PNG file; on a terminal, draw a few on stdout too.

    Returns:
        dataset, part, images, shape (channels, height, width), classes (pairs of name and number) and picture.

    Raises:
        DataMissing, DataCorrupt: of the data set. BadOption, DiskFull: the file cannot be written.
    """
    out = out or Path(f"{run_folder.in_a_file_name(config.dataset)}-{part}.png")
    if out.suffix.lower() != ".png":
        raise BadOption(
            f"--out {out} is not the name of a PNG file", why="PNG is what is written", next=f"name it {out}.png"
        )
    with writing(out, "--out"):
        if not out.parent.is_dir() or out.is_dir():
            raise OSError(0, "there is no such folder" if not out.is_dir() else "it is a folder", str(out))

    import torch

    from ddp_manual.training.datasets import source_of
    from ddp_manual.training.pictures import image_grid

    source = source_of(config)
    source.prepare([part])
    split = source.load(part)
    with writing(out, "--out"):
        run_folder.replace_file(out, image_grid(split, count=count))
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


def _draw(split: Split, count: int) -> None:
    """As many images side by side as the terminal is wide for, in ``ROWS`` rows."""
    from rich.console import Console
    from rich.text import Text

    from ddp_manual.training.pictures import spread

    console = Console(highlight=False)
    height, width = _size(split)
    across = max(1, (console.width + len(BETWEEN)) // (width + len(BETWEEN)))
    chosen = spread(split, min(count, ROWS * across))
    plain = console.no_color or console.color_system is None or console.options.ascii_only
    for first in range(0, len(chosen), across):
        row = chosen[first : first + across]
        drawn = [_lines(split, index, height, width, plain=plain) for index in row]
        for line in zip(*drawn, strict=True):
            console.print(Text(BETWEEN).join(line), no_wrap=True, crop=True)
        names = [split.classes[int(split.labels[index])][:width].center(width) for index in row]
        console.print(Text(BETWEEN.join(names)), no_wrap=True, crop=True)


def _size(split: Split) -> tuple[int, int]:
    """Height and width in pixels; a character is one pixel wide and two high."""
    height, width = split.images.shape[-2:]
    scale = min(1.0, WIDEST / max(height, width))
    return max(1, round(scale * height)), max(1, round(scale * width))


def _lines(split: Split, index: int, height: int, width: int, *, plain: bool) -> list[Text]:
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from ddp_manual.training.pictures import drawn

    picture = drawn(split, index, width, height)
    grey, colours = picture.convert("L").tobytes(), picture.convert("RGB").tobytes()
    lines = []
    for row in range(0, height, 2):
        line = Text()
        for column in range(width):
            upper, lower = (min(row + half, height - 1) * width + column for half in (0, 1))
            if plain:
                line.append(INKS[(grey[upper] + grey[lower]) * len(INKS) // 512])
            else:
                above, below = (Color.from_rgb(*colours[3 * pixel : 3 * pixel + 3]) for pixel in (upper, lower))
                line.append(UPPER_HALF, Style(color=above, bgcolor=below))
        lines.append(line)
    return lines
