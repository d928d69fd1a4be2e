"""Images as Pillow has them: converted to tensors and back, and drawn as PNG files of a run: grids of captioned images
(``samples.png``, ``mistakes.png``) and the confusion matrix (``confusion.png``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ddp_manual.training.data import Split

if TYPE_CHECKING:
    from ddp_manual.training.evaluation import Predictions

Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"

SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
GREY_MODES = {"1", "L", "LA", "I"} | SIXTEEN_BITS

# Pixels.
SIDE = 84
FONT_SIZE = 14
LINE = FONT_SIZE + 3
MARGIN = 6
WIDEST_NAME = 130
# Pixels: a side of the largest confusion matrix, and of the smallest cells with room for a name beside or a number.
LARGEST_MATRIX = 4000
SMALLEST_WITH_NAME, SMALLEST_WITH_NUMBER = FONT_SIZE + 2, 34

BLACK, RED, GREEN = (0, 0, 0), (176, 0, 0), (0, 96, 0)
# The fill of a confusion matrix's cell that has all images of its row, right or wrong, and of a cell that has none.
ALL_RIGHT, ALL_WRONG, EMPTY = (24, 100, 171), (201, 42, 42), 245


def is_grey(image: Image.Image) -> bool:
    return image.mode in GREY_MODES


def eight_bit(image: Image.Image) -> Image.Image:
    """Convert to mode L or RGB: 16-bit pixels keep the upper byte, transparent pixels are laid over black.

    Raises:
        ValueError: the range of its pixel values is unknown.
    """
    # Older versions of Pillow read the 16 bits of PNG and PPM files as 32.
    if image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # convert("L") alone would make each number above 255 white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: save them with 8 or 16 bits each")
    mode = "L" if is_grey(image) else "RGB"
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        # Black, as at the edges after --shift; convert() alone would show the hidden colours of transparent pixels.
        opaque = Image.new("RGBA", image.size, (0, 0, 0, 255))
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert(mode)
    return image.convert(mode)


def as_tensor(image: Image.Image) -> Tensor:
    """Return uint8 [C, H, W] of an image in mode L or RGB."""
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1).permute(2, 0, 1)


def drawn(split: Split, index: int, width: int, height: int) -> Image.Image:
    """Return one image of the split, resized; enlarged pixels stay squares."""
    pixels = split.images[index].cpu()
    picture = Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())
    enlarged = width >= picture.width
    return picture.resize((width, height), Image.Resampling.NEAREST if enlarged else Image.Resampling.BOX)


def image_grid(split: Split, *, count: int = 40, columns: int = 10) -> bytes:
    """Draw ``count`` images from all over the split, each with its class below, as a PNG file."""
    chosen = spread(split, count)
    captions = [[split.classes[label]] for label in split.labels[chosen].tolist()]
    return _grid(split, chosen, captions, [BLACK] * len(chosen), columns, title="")


def spread(split: Split, count: int) -> list[int]:
    """Choose at most ``count`` samples at equal distances: a folder of images has one class after the other."""
    count = min(count, len(split))
    return [index * len(split) // count for index in range(count)]


def prediction_grid(predictions: Predictions, *, count: int = 40, columns: int = 10) -> bytes:
    """Draw the first ``count`` images in the predictions' order, with guess, (truth) and confidence, as a PNG file."""
    classes, chosen = predictions.split.classes, predictions.order[:count].tolist()
    mistakes = len(predictions) - int(predictions.correct.sum())
    captions = [
        [
            classes[int(predictions.guess[index])],
            f"({classes[int(predictions.truth[index])]})",
            f"{100 * float(predictions.confidence[index]):.0f}%",
        ]
        for index in chosen
    ]
    colours = [GREEN if predictions.correct[index] else RED for index in chosen]
    title = f"guess (truth) confidence: {mistakes:,} mistakes in {len(predictions):,} images, most confident first"
    return _grid(predictions.split, chosen, captions, colours, columns, title)


def _grid(
    split: Split,
    chosen: Sequence[int],
    captions: Sequence[Sequence[str]],
    colours: Sequence[tuple[int, int, int]],
    columns: int,
    title: str,
) -> bytes:
    """Draw images with captions below them, of one or more lines each."""
    font = font_for("".join([title, *(line for caption in captions for line in caption)]))
    captions = [[_shortened(line, font) for line in caption] for caption in captions]
    height, width = split.shape[1:]
    longest = max(height, width)
    # Small images are enlarged by a whole number; large images are reduced.
    scale = float(max(1, round(SIDE / longest))) if longest < 1.5 * SIDE else SIDE / longest
    width, height = max(1, round(scale * width)), max(1, round(scale * height))
    column = round(max(width, *(font.getlength(line) for caption in captions for line in caption))) + 1 + MARGIN
    row = height + LINE * len(captions[0]) + 2 * MARGIN
    top = FONT_SIZE + 3 * MARGIN if title else MARGIN
    columns = min(columns, len(chosen))
    across = max(columns * column + MARGIN, round(font.getlength(title)) + 2 * MARGIN)
    picture = Image.new("RGB", (across, top + -(-len(chosen) // columns) * row), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 1.5 * MARGIN), title, fill=BLACK, font=font)
    for place, (index, caption, colour) in enumerate(zip(chosen, captions, colours, strict=True)):
        middle = MARGIN / 2 + (place % columns + 0.5) * column
        above = top + place // columns * row
        picture.paste(drawn(split, index, width, height), (round(middle - width / 2), above))
        for number, line in enumerate(caption):
            at = (middle, above + height + MARGIN / 2 + number * LINE)
            pen.text(at, line, fill=colour, font=font, anchor="ma")
    return _png(picture)


def _shortened(name: str, font: Font) -> str:
    """Replace the end of a name that is too wide by an ellipsis."""
    short = name
    while font.getlength(short) > WIDEST_NAME:
        name = name[:-1]
        short = f"{name}..."
    return short


def font_for(text: str) -> Font:
    """Load a font that has the letters of ``text``, if this machine has one: Pillow's own has only those of English."""
    if not text.isascii():
        try:
            return ImageFont.truetype("DejaVuSans.ttf", FONT_SIZE)
        except OSError:
            pass
    return ImageFont.load_default(FONT_SIZE)


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def confusion_picture(confusion: Tensor, classes: Sequence[str]) -> bytes:
    """Draw one row for each class and one column for each guess, as a PNG file.

    A cell's colour is its share of the row, blue where the guess is right and red where it is wrong. A single mistake
    is visible: the palest red is a tenth of the full red. Names and numbers are left out where they have no room.

    Args:
        confusion: int64 [classes, classes], rows are the truth.
    """
    font = font_for("".join(classes))
    names = [_shortened(name, font) for name in classes]
    longest = round(max(map(font.getlength, names)))
    # Wide enough for each name above its column, unless there are too many classes.
    wanted = max(SMALLEST_WITH_NUMBER, longest + 2, round(font.getlength(f"{int(confusion.max()):,}")) + 10)
    cell = wanted if wanted * len(classes) <= LARGEST_MATRIX else max(1, LARGEST_MATRIX // len(classes))
    left, top, size = longest + 2 * MARGIN, 2 * LINE + 3 * MARGIN, cell * len(classes)
    right, total = int(confusion.trace()), int(confusion.sum())
    title = f"{right:,} of {total:,} right ({100 * right / total:.2f}%); rows: truth, columns: guess"
    across = max(left + size, round(font.getlength(title))) + 2 * MARGIN
    picture = Image.new("RGB", (across, top + size + 2 * MARGIN), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, MARGIN), title, fill=BLACK, font=font)
    for number, name in enumerate(names):
        middle = (number + 0.5) * cell
        if cell >= SMALLEST_WITH_NAME:
            pen.text((left - MARGIN, top + middle), name, fill=BLACK, font=font, anchor="rm")
        if cell == wanted:
            pen.text((left + middle, top - MARGIN), name, fill=BLACK, font=font, anchor="ms")
    pen.rectangle((left, top, left + size - 1, top + size - 1), fill=(EMPTY,) * 3)
    counts, images = confusion.tolist(), confusion.sum(dim=1).tolist()
    for row, column in confusion.nonzero().tolist():
        share, x, y = counts[row][column] / images[row], left + column * cell, top + row * cell
        full, weight = (ALL_RIGHT, share) if row == column else (ALL_WRONG, 0.1 + 0.9 * share)
        red, green, blue = (round(EMPTY + weight * (value - EMPTY)) for value in full)
        pen.rectangle((x, y, x + cell - 1, y + cell - 1), fill=(red, green, blue))
        if cell == wanted:
            colour = "white" if red + green + blue < 450 else "black"
            at = (x + cell / 2 - 1, y + cell / 2 - 1)
            pen.text(at, f"{counts[row][column]:,}", fill=colour, font=font, anchor="mm")
    for end in range(cell - 1, size, cell) if cell > 3 else ():
        pen.line((left + end, top, left + end, top + size - 1), fill="white")
        pen.line((left, top + end, left + size - 1, top + end), fill="white")
    return _png(picture)
