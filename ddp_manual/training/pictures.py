"""The pictures of a run, drawn with Pillow as PNG files: grids of captioned images, and the confusion matrix."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ddp_manual.training.data import Split

if TYPE_CHECKING:
    from ddp_manual.training.predictions import Predictions

Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"

# Pixels.
SIDE = 84
FONT_SIZE = 14
MARGIN = 6
WIDEST_NAME = 160
# Pixels of a confusion matrix: all of it, and the smallest cells that have room for a name beside them or a number.
LARGEST_MATRIX = 4000
SMALLEST_WITH_NAME, SMALLEST_WITH_NUMBER = FONT_SIZE + 2, 34

BLACK, RED, GREEN = (0, 0, 0), (176, 0, 0), (0, 96, 0)
# The fill of a confusion matrix's cell that has all images of its row, right or wrong, and of a cell that has none.
ALL_RIGHT, ALL_WRONG, EMPTY = (24, 100, 171), (201, 42, 42), 245


def image_grid(split: Split, *, count: int = 40, columns: int = 10) -> bytes:
    """Draw ``count`` images from all over the split, each with its class below; returns a PNG file."""
    chosen = spread(split, count)
    captions = [[split.classes[label]] for label in split.labels[chosen].tolist()]
    return _grid(split, chosen, captions, [BLACK] * len(chosen), columns, title="")


def spread(split: Split, count: int) -> list[int]:
    """Choose at most ``count`` samples at equal distances: a folder of images has one class after the other."""
    count = min(count, len(split))
    return [index * len(split) // count for index in range(count)]


def prediction_grid(predictions: Predictions, *, count: int = 40, columns: int = 10) -> bytes:
    """Draw the first ``count`` images in the predictions' order, captioned ``guess (truth) 98%``, as a PNG file."""
    split = predictions.split
    chosen = predictions.order[:count].tolist()
    mistakes = len(predictions) - int(predictions.correct.sum())
    captions = [
        [
            split.classes[int(predictions.guess[index])],
            f"({split.classes[int(predictions.truth[index])]})",
            f"{100 * float(predictions.confidence[index]):.0f}%",
        ]
        for index in chosen
    ]
    colours = [GREEN if predictions.correct[index] else RED for index in chosen]
    title = f"guess (truth) confidence: {mistakes:,} mistakes in {len(predictions):,} images, most confident first"
    return _grid(split, chosen, captions, colours, columns, title)


def _grid(
    split: Split,
    chosen: Sequence[int],
    captions: Sequence[Sequence[str]],
    colours: Sequence[tuple[int, int, int]],
    columns: int,
    title: str,
) -> bytes:
    """Each caption is a sequence of words that are never broken; a line takes as many of them as fit."""
    font = font_for(" ".join([title, *(word for caption in captions for word in caption)]), FONT_SIZE)
    words = [[shortened(word, font) for word in caption] for caption in captions]
    height, width = split.shape[1:]
    longest = max(height, width)
    # A whole multiple of small images; large images are reduced.
    scale = float(max(1, round(SIDE / longest))) if longest < 1.5 * SIDE else SIDE / longest
    width, height = max(1, round(scale * width)), max(1, round(scale * height))
    # With room for the last two words of a caption, such as a class and its probability, two lines are enough.
    wanted = max(font.getlength(" ".join(caption[-2:])) for caption in words)
    widest = max(font.getlength(word) for caption in words for word in caption)
    column = round(max(width, widest, min(wanted, WIDEST_NAME))) + 1 + MARGIN
    lines = [_lines(caption, font, column - MARGIN) for caption in words]
    line_height = FONT_SIZE + 3
    row = height + line_height * max(map(len, lines)) + 2 * MARGIN
    top = FONT_SIZE + 3 * MARGIN if title else MARGIN
    columns = min(columns, len(chosen))
    across = max(columns * column + MARGIN, round(font.getlength(title)) + 2 * MARGIN)
    picture = Image.new("RGB", (across, top + -(-len(chosen) // columns) * row), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 1.5 * MARGIN), title, fill=BLACK, font=font)
    for place, (index, colour) in enumerate(zip(chosen, colours, strict=True)):
        middle = MARGIN / 2 + (place % columns + 0.5) * column
        above = top + place // columns * row
        picture.paste(drawn(split, index, width, height), (round(middle - width / 2), above))
        for number, line in enumerate(lines[place]):
            at = (middle, above + height + MARGIN / 2 + number * line_height)
            pen.text(at, line, fill=colour, font=font, anchor="ma")
    return _png(picture)


def drawn(split: Split, index: int, width: int, height: int) -> Image.Image:
    """Return one image of the split, resized; enlarged pixels stay squares."""
    pixels = split.images[index].cpu()
    picture = Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())
    enlarged = width >= picture.width
    return picture.resize((width, height), Image.Resampling.NEAREST if enlarged else Image.Resampling.BOX)


def _lines(words: Sequence[str], font: Font, width: float) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        together = f"{lines[-1]} {word}"
        if font.getlength(together) <= width:
            lines[-1] = together
        else:
            lines.append(word)
    return lines


def shortened(word: str, font: Font) -> str:
    """Replace the end of a word that is too wide by an ellipsis."""
    if font.getlength(word) <= WIDEST_NAME:
        return word
    return next(short for end in range(len(word), -1, -1) if font.getlength(short := f"{word[:end]}...") <= WIDEST_NAME)


def font_for(text: str, size: int) -> Font:
    """Load a font that has the letters of ``text``, if this machine has one: Pillow's own has only those of English."""
    if not text.isascii():
        try:
            return ImageFont.truetype("DejaVuSans.ttf", size)
        except OSError:
            pass
    return ImageFont.load_default(size)


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def confusion_picture(confusion: Tensor, classes: Sequence[str]) -> bytes:
    """Draw one row for each class and one column for each guess; returns a PNG file.

    A cell's colour is its share of the row, blue where the guess is right and red where it is wrong. A single mistake
    is visible already, because the reds begin at a tint. Names and numbers are left out where they have no room.

    Args:
        confusion: int64 [classes, classes], rows are the truth.
    """
    font = font_for("".join(classes), FONT_SIZE)
    wanted = max(SMALLEST_WITH_NUMBER, round(font.getlength(f"{int(confusion.max()):,}")) + 10)
    cell = wanted if wanted * len(classes) <= LARGEST_MATRIX else max(1, LARGEST_MATRIX // len(classes))
    names = [shortened(name, font) for name in classes] if cell >= SMALLEST_WITH_NAME else []
    longest = round(max((font.getlength(name) for name in names), default=0))
    # Above their columns, long names are turned by 90 degrees and short names stay upright.
    turned = longest > cell - 2
    left = longest + FONT_SIZE + 4 * MARGIN
    top = 2 * FONT_SIZE + 5 * MARGIN + (longest if turned else FONT_SIZE)
    right, total = int(confusion.trace()), int(confusion.sum())
    title = f"{right:,} of {total:,} right ({100 * right / total:.2f}%)"
    size = cell * len(classes)
    across = max(left + size, round(font.getlength(title))) + 2 * MARGIN
    picture = Image.new("RGB", (across, top + size + 2 * MARGIN), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, MARGIN), title, fill="black", font=font)
    pen.text((left + size / 2, FONT_SIZE + 2 * MARGIN), "guess", fill="black", font=font, anchor="ma")
    beside = _turned("truth", font)
    picture.paste(beside, (MARGIN, round(top + size / 2 - beside.height / 2)))
    picture.paste(_matrix(confusion, cell, font if cell == wanted else None), (left, top))
    for number, name in enumerate(names):
        middle = (number + 0.5) * cell
        pen.text((left - MARGIN, top + middle), name, fill="black", font=font, anchor="rm")
        if turned:
            above = _turned(name, font)
            picture.paste(above, (round(left + middle - above.width / 2), top - MARGIN - above.height))
        else:
            pen.text((left + middle, top - MARGIN), name, fill="black", font=font, anchor="mb")
    return _png(picture)


def _matrix(confusion: Tensor, cell: int, font: Font | None) -> Image.Image:
    """Draw the cells alone, each ``cell`` pixels wide and high; with a ``font`` their numbers too."""
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp(min=1)
    diagonal = torch.eye(len(confusion), dtype=torch.bool)
    weights = torch.where(diagonal, shares, 0.1 * (confusion > 0) + 0.9 * shares)[:, :, None]
    fills = torch.where(diagonal[:, :, None], torch.tensor(ALL_RIGHT), torch.tensor(ALL_WRONG))
    colours = (EMPTY + weights * (fills - EMPTY)).round().to(torch.uint8)
    size = cell * len(confusion)
    picture = Image.fromarray(colours.numpy()).resize((size, size), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(picture)
    if cell > 3:
        for end in range(cell - 1, size, cell):
            pen.line((end, 0, end, size), fill="white")
            pen.line((0, end, size, end), fill="white")
    if font:
        dark = colours.sum(dim=2, dtype=torch.int64) < 450
        for row, column in confusion.nonzero().tolist():
            middle = ((column + 0.5) * cell - 1, (row + 0.5) * cell - 1)
            number = f"{int(confusion[row, column]):,}"
            pen.text(middle, number, fill="white" if dark[row, column] else "black", font=font, anchor="mm")
    return picture


def _turned(text: str, font: Font) -> Image.Image:
    """Draw the text turned by 90 degrees, so that it reads from bottom to top."""
    strip = Image.new("RGB", (round(font.getlength(text)) + 2, FONT_SIZE + 4), color="white")
    ImageDraw.Draw(strip).text((1, FONT_SIZE / 2 + 2), text, fill="black", font=font, anchor="lm")
    return strip.transpose(Image.Transpose.ROTATE_90)
