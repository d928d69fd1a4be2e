"""Pictures of a data set, drawn with Pillow, which torchvision brings."""

from __future__ import annotations

import io

from ddp_manual.training.data import Split

SCALE = 2
CAPTION = 14


def image_grid(split: Split, *, count: int = 40, columns: int = 10) -> bytes:
    """The first ``count`` images with their classes below, as the bytes of a PNG file."""
    from PIL import Image, ImageDraw

    count = min(count, len(split))
    height, width = (SCALE * side for side in split.images.shape[-2:])
    rows = -(-count // columns)
    grid = Image.new("L", (columns * (width + 4), rows * (height + CAPTION + 4)), color=255)
    pen = ImageDraw.Draw(grid)
    for index in range(count):
        left, top = (index % columns) * (width + 4) + 2, (index // columns) * (height + CAPTION + 4) + 2
        picture = Image.fromarray(split.images[index, 0].cpu().numpy())
        grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        caption = split.classes[int(split.labels[index])]
        pen.text((left + width / 2, top + height + CAPTION / 2), caption, fill=0, anchor="mm")
    file = io.BytesIO()
    grid.save(file, format="PNG")
    return file.getvalue()
