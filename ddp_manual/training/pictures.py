"""Grids of captioned images, drawn with Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_manual.training.data import Split

if TYPE_CHECKING:
    from PIL import Image, ImageFont

    from ddp_manual.training.predicting import Predictions

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Pixels.
SIDE = 84
FONT_SIZE = 14
MARGIN = 6
WIDEST_CAPTION = 160

BLACK, RED, GREEN = (0, 0, 0), (176, 0, 0), (0, 96, 0)


def image_grid(split: Split, *, count: int = 40, columns: int = 10) -> bytes:
    """``count`` images from all over the split with their classes below, as the bytes of a PNG file."""
    chosen = spread(split, count)
    captions = [[split.classes[label]] for label in split.labels[chosen].tolist()]
    return _grid(split, chosen, captions, [BLACK] * len(chosen), columns, title="")


def spread(split: Split, count: int) -> list[int]:
    """At most ``count`` samples at equal distances: a folder of images has one class after the other."""
    count = min(count, len(split))
    return [index * len(split) // count for index in range(count)]


def prediction_grid(predictions: Predictions, *, count: int = 40, columns: int = 10) -> bytes:
    """The first ``count`` images in the predictions' order, captioned ``guess (truth) 98%``, as a PNG file."""
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
    """Each caption is a sequence of words that stay whole; as many to a line as there is room for."""
    from PIL import Image, ImageDraw

    text = font_for(" ".join([title, *(word for caption in captions for word in caption)]), FONT_SIZE)
    words = [[shortened(word, text, WIDEST_CAPTION) for word in caption] for caption in captions]
    width, height = _size(split)
    # Room for the last two words of a caption, such as a class and its probability: then two lines do.
    wanted = max(text.getlength(" ".join(caption[-2:])) for caption in words)
    longest = max(text.getlength(word) for caption in words for word in caption)
    column = round(max(width, longest, min(wanted, WIDEST_CAPTION))) + 1 + MARGIN
    lines = [_lines(caption, text, column - MARGIN) for caption in words]
    line_height = FONT_SIZE + 3
    row = height + line_height * max(map(len, lines)) + 2 * MARGIN
    top = FONT_SIZE + 3 * MARGIN if title else MARGIN
    columns = min(columns, len(chosen))
    across = max(columns * column + MARGIN, round(text.getlength(title)) + 2 * MARGIN)
    picture = Image.new("RGB", (across, top + -(-len(chosen) // columns) * row), color="white")
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 1.5 * MARGIN), title, fill=BLACK, font=text)
    for place, (index, colour) in enumerate(zip(chosen, colours, strict=True)):
        middle = MARGIN / 2 + (place % columns + 0.5) * column
        above = top + place // columns * row
        picture.paste(drawn(split, index, width, height), (round(middle - width / 2), above))
        for number, line in enumerate(lines[place]):
            at = (middle, above + height + MARGIN / 2 + number * line_height)
            pen.text(at, line, fill=colour, font=text, anchor="ma")
    return png(picture)


def _size(split: Split) -> tuple[int, int]:
    """Width and height an image is drawn with: a whole multiple of its own, or smaller where it is large."""
    height, width = split.images.shape[-2:]
    longest = max(height, width)
    scale = float(max(1, round(SIDE / longest))) if longest < 1.5 * SIDE else SIDE / longest
    return max(1, round(scale * width)), max(1, round(scale * height))


def drawn(split: Split, index: int, width: int, height: int) -> Image.Image:
    from PIL import Image

    pixels = split.images[index].cpu()
    picture = Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())
    enlarged = width >= picture.width
    return picture.resize((width, height), Image.Resampling.NEAREST if enlarged else Image.Resampling.BOX)


def _lines(words: Sequence[str], text: Font, width: float) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        together = f"{lines[-1]} {word}"
        if text.getlength(together) <= width:
            lines[-1] = together
        else:
            lines.append(word)
    return lines


def shortened(word: str, text: Font, width: float) -> str:
    """A word that is too wide, with an ellipsis for its end."""
    if text.getlength(word) <= width:
        return word
    kept = next(length for length in range(len(word), -1, -1) if text.getlength(f"{word[:length]}...") <= width)
    return f"{word[:kept]}..."


def font_for(text: str, size: int) -> Font:
    """A font that has the letters of ``text``, if this machine has one: Pillow's own has those of English only."""
    from PIL import ImageFont

    if not text.isascii():
        try:
            return ImageFont.truetype("DejaVuSans.ttf", size)
        except OSError:
            pass
    return ImageFont.load_default(size)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()
