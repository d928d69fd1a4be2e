"""The confusion matrix as a picture, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_manual.training.pictures import MARGIN, font_for, png, shortened

if TYPE_CHECKING:
    from PIL import Image

    from ddp_manual.training.pictures import Font

FONT_SIZE = 14
# Pixels: the whole matrix of many classes, a cell that still has a number in it, and the longest name beside a row.
LARGEST = 4000
SMALLEST_WITH_NAME, SMALLEST_WITH_NUMBER = FONT_SIZE + 2, 34
LONGEST_NAME = 160
# What a cell is filled with where all images of its row are in it, and where none is.
RIGHT, WRONG, NOTHING = (24, 100, 171), (201, 42, 42), 245


def confusion_picture(confusion: Tensor, classes: Sequence[str]) -> bytes:
    """One row for each class, one column for each guess, as the bytes of a PNG file.

    A cell's colour is its share of the row, blue where the guess is right and red where it is wrong; a mistake shows
    from the first, since reds begin at a tint. Names are left out where there are too many for letters, and so are
    numbers.

    Args:
        confusion: int64 [classes, classes], rows are the truth.
    """
    from PIL import Image, ImageDraw

    text = font_for("".join(classes), FONT_SIZE)
    wanted = max(SMALLEST_WITH_NUMBER, round(text.getlength(f"{int(confusion.max()):,}")) + 10)
    cell = wanted if wanted * len(classes) <= LARGEST else max(1, LARGEST // len(classes))
    named = cell >= SMALLEST_WITH_NAME
    names = [shortened(name, text, LONGEST_NAME) for name in classes] if named else []
    side = round(max((text.getlength(name) for name in names), default=0)) + 2 * MARGIN
    # Short names stand upright above their columns.
    turned = side - 2 * MARGIN > cell - 2
    left, top = FONT_SIZE + 2 * MARGIN + side, 2 * FONT_SIZE + 3 * MARGIN + (side if turned else FONT_SIZE + 2 * MARGIN)
    right, total = int(confusion.trace()), int(confusion.sum())
    title = f"{right:,} of {total:,} right ({100 * right / total:.2f}%)"
    size = cell * len(classes)
    across = max(left + size, round(text.getlength(title))) + 2 * MARGIN
    picture = Image.new("RGB", (across, top + size + 2 * MARGIN), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, MARGIN), title, fill="black", font=text)
    pen.text((left + size / 2, FONT_SIZE + 2 * MARGIN), "guess", fill="black", font=text, anchor="ma")
    beside = _turned("truth", text)
    picture.paste(beside, (MARGIN, round(top + size / 2 - beside.height / 2)))
    picture.paste(_matrix(confusion, cell, text if cell == wanted else None), (left, top))
    for number, name in enumerate(names):
        middle = (number + 0.5) * cell
        pen.text((left - MARGIN, top + middle), name, fill="black", font=text, anchor="rm")
        if turned:
            above = _turned(name, text)
            picture.paste(above, (round(left + middle - above.width / 2), top - MARGIN - above.height))
        else:
            pen.text((left + middle, top - MARGIN), name, fill="black", font=text, anchor="mb")
    return png(picture)


def _matrix(confusion: Tensor, cell: int, text: Font | None) -> Image.Image:
    """The cells alone, ``cell`` pixels wide and high, with their numbers if there is a ``text`` to write them in."""
    from PIL import Image, ImageDraw

    colours = _colours(confusion)
    size = cell * len(confusion)
    picture = Image.fromarray(colours.numpy()).resize((size, size), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(picture)
    if cell > 3:
        for end in range(cell - 1, size, cell):
            pen.line((end, 0, end, size), fill="white")
            pen.line((0, end, size, end), fill="white")
    if text:
        inks = colours.sum(dim=2, dtype=torch.int64) < 450
        for row, column in confusion.nonzero().tolist():
            ink = "white" if inks[row, column] else "black"
            middle = ((column + 0.5) * cell - 1, (row + 0.5) * cell - 1)
            pen.text(middle, f"{int(confusion[row, column]):,}", fill=ink, font=text, anchor="mm")
    return picture


def _colours(confusion: Tensor) -> Tensor:
    """uint8 [classes, classes, 3]: a light grey for none."""
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    on_diagonal = torch.eye(len(confusion), dtype=torch.bool)
    weights = torch.where(on_diagonal, shares, 0.1 * (confusion > 0) + 0.9 * shares)[:, :, None]
    targets = torch.where(on_diagonal[:, :, None], torch.tensor(RIGHT), torch.tensor(WRONG))
    return (NOTHING + weights * (targets - NOTHING)).round().to(torch.uint8)


def _turned(text: str, letters: Font) -> Image.Image:
    """To be read from the right."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (round(letters.getlength(text)) + 2, FONT_SIZE + 4), color="white")
    ImageDraw.Draw(strip).text((1, FONT_SIZE / 2 + 2), text, fill="black", font=letters, anchor="lm")
    return strip.transpose(Image.Transpose.ROTATE_90)
