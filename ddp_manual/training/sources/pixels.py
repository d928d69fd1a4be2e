"""What becomes of an image as Pillow has it: 8 bits for each pixel of a channel, grey or in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
GREY_MODES = {"1", "L", "LA", "I"} | SIXTEEN_BITS
# Formats whose 32-bit pixels are 16-bit ones that older versions of Pillow widen.
WIDENED = {"PNG", "PPM"}


def is_grey(image: Image) -> bool:
    return image.mode in GREY_MODES


def eight_bit(image: Image) -> Image:
    """In mode L or RGB: of 16-bit pixels the upper byte, as Pillow takes of colours; what is transparent over black.

    Raises:
        ValueError: nobody knows how bright the numbers of its pixels are.
    """
    if image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in WIDENED):
        # convert("L") alone would take each number above 255 for white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: save them with 8 or 16 bits each")
    kept = "L" if is_grey(image) else "RGB"
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        from PIL import Image as pillow

        # Black, as what a shift brings in from outside. Hidden colours, which convert() would show, are anything.
        opaque = pillow.new("RGBA", image.size, (0, 0, 0, 255))
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert(kept)
    return image.convert(kept)


def as_tensor(image: Image) -> Tensor:
    """uint8 [C, H, W] of an image in mode L or RGB."""
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1).permute(2, 0, 1)
