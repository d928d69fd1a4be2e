"""Handwritten-looking digits drawn in code: the data set that needs no download.

Each digit is a pen path from the table below, bent, slanted and stretched at random, then framed the way
MNIST frames its digits (fitted into a 20x20 box, centre of mass in the middle of a 28x28 image) and inked
with a random pen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IMAGE_SIZE = 28
DRAWING_VERSION = 1  # raise it whenever the same seed draws other pixels: a cache has it in its digest

# (digit, weight among that digit's shapes, pen path). A path is a list of "x,y" points joined by a smooth
# curve, x to the right and y down, about 12 wide and 20 high; "*" makes a point a sharp corner, "|" lifts the
# pen.
GLYPHS: tuple[tuple[int, float, str], ...] = (
    (0, 3, "8,0 2,4 0,11 3,18 8,20 14,16 15,9 12,2 7,0"),
    (0, 2, "9,1 4,2 0,8 1,16 6,20 12,17 15,10 13,3 8,0 4,3"),
    (0, 1, "12,3 8,0 2,3 0,11 3,18 8,20 14,15 15,8 11,2"),
    (0, 1, "9,6 9,1 5,1 1,6 0,14 4,20 11,17 14,10 12,2 7,1"),
    (1, 8, "6,0 6,10 6,20"),
    (1, 1, "2,5 6,0* 6,10 6,20"),
    (1, 1, "2,4 6,0* 6,10 6,20 | 0,20 12,20"),
    (2, 2, "1,4 4,0 10,1 11,6 7,13 0,19* 8,19 17,20"),
    (2, 2, "2,4 6,0 12,2 11,9 5,17 0,19 0,15 5,15 10,18 18,18"),
    (2, 2, "1,4 6,0 11,3 10,10 6,17 1,20 0,15 5,13 10,17 17,18"),
    (2, 2, "2,5 7,0 13,3 12,11 7,18 2,20 0,16 4,12 9,14 13,19 18,19"),
    (2, 2, "0,2 6,0 12,1 10,6 0,18* 8,17 17,17"),
    (2, 1, "0,3 5,0 10,4 7,12 1,19* 6,18 11,20 18,18"),
    (3, 3, "1,3 6,0 12,3 10,7 5,9* 11,11 13,15 8,20 0,17"),
    (3, 1, "1,1 7,1 13,0* 6,8* 12,11 12,17 6,20 0,18"),
    (3, 1, "0,3 8,0 11,4 7,9 3,10 8,10 12,13 9,19 -1,19"),
    (3, 1, "1,4 4,0 10,1 10,7 4,10* 11,11 12,17 5,20 0,18 2,15"),
    (4, 3, "2,0 0,5 1,11* 7,11 13,10 | 12,0 11,10 10,20"),
    (4, 2, "3,0 0,9* 7,9 15,8 | 11,2 8,10 7,20"),
    (4, 2, "1,0 0,8 4,11 11,7 | 12,0 11,10 10,20"),
    (4, 1, "2,0 0,7 4,10 10,7 12,1* 11,10 9,20"),
    (4, 1, "9,0 4,7 0,13* 7,13 15,13 | 10,0 10,10 9,20"),
    (4, 1, "9,20 9,10 9,0* 4,7 0,13* 7,13 14,13"),
    (5, 2, "2,0 1,8* 8,7 13,12 10,18 5,20 0,18 | 2,0 8,0 14,0"),
    (5, 2, "5,2 3,9* 8,9 12,13 9,19 0,20 | 5,2 11,1 18,0"),
    (5, 2, "16,0 11,1 5,2* 3,9 9,10 12,14 8,19 0,20"),
    (5, 1, "14,0 6,2 4,7 10,12 10,17 4,20 0,18"),
    (6, 2, "10,0 4,5 0,12 2,19 8,20 12,16 10,12 5,12 1,17"),
    (6, 2, "8,0 2,8 0,15 3,20 9,19 12,14 8,11 2,15"),
    (6, 1, "6,0 1,7 0,14 4,19 12,19 15,14 11,11 5,13 3,18"),
    (6, 1, "12,2 6,0 1,7 1,16 7,20 13,16 10,11 3,13"),
    (6, 1, "5,0 1,9 1,17 5,20 8,16 6,13 1,17"),
    (7, 3, "0,2 7,1 14,0* 9,9 6,20"),
    (7, 1, "0,1 7,1 14,0* 9,9 7,20 | 3,11 8,10 14,10"),
    (7, 1, "0,5 1,1* 7,2 14,0* 9,10 7,20"),
    (7, 1, "0,7 3,1 7,3 13,0* 9,10 6,20"),
    (7, 1, "0,3 5,0 12,1 13,5 9,12 7,20"),
    (7, 1, "0,7 5,2 12,0* 8,9 5,18"),
    (8, 2, "9,3 5,0 1,3 4,8 8,12 8,17 4,20 0,17 3,11 8,6 11,1"),
    (8, 2, "9,4 6,0 1,3 3,8 8,13 7,18 3,20 0,16 3,11 8,7 10,3"),
    (8, 1, "12,2 6,0 1,4 5,9 9,14 6,20 1,18 1,13 6,9 12,5 12,1"),
    (8, 2, "14,2 8,0 2,3 4,8 10,12 9,19 3,20 1,15 6,10 14,3"),
    (8, 1, "6,0 1,4 6,9 11,5 6,0 | 6,9 0,15 6,20 12,15 6,9"),
    (9, 3, "10,3 6,0 1,4 1,8 6,8 10,3* 9,11 8,20"),
    (9, 2, "10,4 5,0 0,4 3,9 8,8 10,3* 10,11 10,20"),
    (9, 1, "10,4 5,0 0,4 4,9 9,7 10,3 11,10 8,18 4,20 1,18"),
    (9, 1, "12,2 6,1 0,6 3,11 9,9 12,1 11,10 6,20"),
    (9, 1, "10,3 5,0 0,5 3,9 8,7 10,2* 10,9 10,18 5,20 0,18"),
)

POINTS = 64  # pen positions per digit: 0.7 pixels apart on average, 99% below 1.3, so the ink has no beads
CHUNK = 2048  # digits drawn at a time: about 100 MB of working memory; other values draw other digits
BOX = 20.0  # pixels: MNIST fits its digits into a 20x20 box
CONTROL_JITTER = 0.035  # standard deviation of each control point, in digit heights
WAVES = 3  # sine waves summed to bend a digit
BEND = 0.03  # standard deviation of each wave's height, in digit heights
GRAIN = 0.25  # pixels: how far a rough pen's edge strays


def draw_digits(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` digits in random order, each class about a tenth of them.

    Return the images, uint8 [count, 28, 28] with 0 for paper and 255 for full ink, and their labels 0..9,
    int64 [count], both on the CPU. The same seed draws the same digits, and a smaller count draws the first
    of them.
    """
    generator = torch.Generator().manual_seed(seed)
    digit_of, cumulative, control, basis, joined = _glyph_tables()
    images = torch.empty(count, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    labels = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)

        def normal(*shape: int, keep: int = stop - start) -> Tensor:
            # Drawn for a whole chunk and then cut, so that a smaller count is a prefix of a larger one.
            # Past two standard deviations a digit stops being readable.
            return torch.randn(CHUNK, *shape, generator=generator)[:keep].clamp(-2, 2)

        chance = torch.rand(CHUNK, generator=generator)[: stop - start]
        glyph = torch.bucketize(chance, cumulative, right=True)
        points = basis[glyph] @ (control[glyph] + CONTROL_JITTER * normal(*control.shape[1:]))
        points = _slant_and_stretch(_bend(points, normal(WAVES, 5)), normal(3))
        # Half the stroke's width: 1.35 pixels at the median, as on MNIST.
        pen = (1.35 * (0.3 * normal()).exp()).clamp(min=0.8)
        points, length = _frame(points, joined[glyph], pen, normal(3))
        images[start:stop] = _ink(points, length, pen, normal(2), normal(2, WAVES, 2))
        labels[start:stop] = digit_of[glyph]
    return images, labels


def _glyph_tables() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the table as tensors over its G glyphs: digit [G], cumulative probability of all but the last [G - 1],
    control points [G, C, 2] in digit heights about the middle, their weights in each pen position
    [G, POINTS, C], and whether the pen stays down from each position to the next [G, POINTS - 1]."""
    controls, weights, pen_down = zip(*(_pen_path(path) for _, _, path in GLYPHS), strict=True)
    control, joined = pad_sequence(list(controls), batch_first=True), torch.stack(pen_down)
    basis = pad_sequence([of_glyph.T for of_glyph in weights], batch_first=True).transpose(1, 2).contiguous()
    digit_of = torch.tensor([digit for digit, _, _ in GLYPHS])
    weight = torch.tensor([float(weight) for _, weight, _ in GLYPHS])
    probability = weight / (10 * torch.zeros(10).index_add_(0, digit_of, weight)[digit_of])
    return digit_of, probability.cumsum(0)[:-1], control, basis, joined


def _pen_path(path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Read one path: control points [C, 2], their weights [POINTS, C], pen-down flags [POINTS - 1]."""
    strokes = [stroke.split() for stroke in path.split("|")]
    words = [word.rstrip("*") for stroke in strokes for word in stroke]
    control = torch.tensor([[float(number) for number in word.split(",")] for word in words]) / 20 - 0.5
    curves: list[Tensor] = []
    strokes_of: list[Tensor] = []
    first = 0
    for number, stroke in enumerate(strokes):
        last = first + len(stroke) - 1
        corners = [first + i for i, word in enumerate(stroke) if word.endswith("*")]
        for begin, end in zip([first, *corners], [*corners, last], strict=True):
            curves.append(_smooth_curve(begin, end, len(control)))
            strokes_of.append(torch.full((len(curves[-1]),), number))
        first = last + 1
    dense, stroke_of = torch.cat(curves), torch.cat(strokes_of)
    step = (dense @ control).diff(dim=0).norm(dim=1) * (stroke_of[1:] == stroke_of[:-1])
    travelled = torch.cat([torch.zeros(1), step.cumsum(0)])
    even = torch.linspace(0, float(travelled[-1]), POINTS)
    picked = torch.searchsorted(travelled, even).clamp(max=len(dense) - 1)
    return control, dense[picked], stroke_of[picked][1:] == stroke_of[picked][:-1]


def _smooth_curve(begin: int, end: int, controls: int) -> Tensor:
    """Return Catmull-Rom weights [positions, controls] through the points begin..end, 41 positions for each gap."""
    t = torch.linspace(0, 1, 41)
    blend = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
    weights = torch.zeros(end - begin, len(t), controls)
    for gap, point in enumerate(range(begin, end)):
        around = (max(point - 1, begin), point, point + 1, min(point + 2, end))
        for column, share in zip(around, blend, strict=True):
            weights[gap, :, column] += share / 2
    return weights.flatten(0, 1)


def _bend(points: Tensor, waves: Tensor) -> Tensor:
    """Shift points [N, P, 2] along sine waves, mostly longer than the digit, from normals [N, WAVES, 5]."""
    direction, shift, phase = waves[..., 0:2], waves[..., 2:4], waves[..., 4:5]
    angle = points @ (4.0 * direction).transpose(1, 2) + (3.0 * phase).transpose(1, 2)
    return points + angle.sin() @ (BEND * shift)


def _slant_and_stretch(points: Tensor, style: Tensor) -> Tensor:
    """Slant, widen and turn points [N, P, 2] by normals [N, 3]; the hand leans to the right by 0.15."""
    slant, width, turn = 0.15 + 0.28 * style[:, 0], (0.22 * style[:, 1]).exp(), 0.1 * style[:, 2]
    cos, sin = turn.cos(), turn.sin()
    from_x = torch.stack([cos * width, sin * width], dim=1)
    from_y = torch.stack([-cos * slant - sin, -sin * slant + cos], dim=1)
    return points @ torch.stack([from_x, from_y], dim=1)


def _frame(points: Tensor, joined: Tensor, pen: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
    """Return points [N, P, 2] in pixels, framed as MNIST's are, and the length [N, P] of path each stands for."""
    span = (points.amax(dim=1) - points.amin(dim=1)).amax(dim=1)
    box = BOX + 0.6 * style[:, 0]
    points = points * ((box - 2 * pen) / span)[:, None, None]
    half_step = points.diff(dim=1).square().sum(dim=2).sqrt() * joined / 2
    length = torch.nn.functional.pad(half_step, (1, 0)) + torch.nn.functional.pad(half_step, (0, 1))
    centre = (points * length[..., None]).sum(dim=1) / length.sum(dim=1, keepdim=True)
    # MNIST's centre of mass is pixel 14.0, give or take 0.3.
    return points + (IMAGE_SIZE / 2 + 0.3 * style[:, 1:3] - centre)[:, None], length


def _ink(points: Tensor, length: Tensor, pen: Tensor, style: Tensor, grain: Tensor) -> Tensor:
    """Return images uint8 [N, 28, 28] of strokes through points [N, P, 2], `pen` [N] pixels to either side.

    `style` [N, 2] and `grain` [N, 2, WAVES, 2] are normals for the edge's softness and roughness.
    """
    pixel = torch.arange(IMAGE_SIZE, dtype=torch.float32)
    spread = (0.5 * pen).clamp(min=0.7)[:, None, None]
    reach = -0.5 / spread.square()
    across = ((pixel - points[..., 0:1]).square() * reach).exp()
    down = ((pixel - points[..., 1:2]).square() * reach).exp()
    down *= length[..., None] / (spread * math.sqrt(2 * math.pi))
    # The splats along a straight stroke sum to exp(-distance^2 / (2 spread^2)): solve for the distance.
    near = (down.transpose(1, 2) @ across).clamp(1e-6, 1.0)
    distance = spread * (-2 * near.log()).sqrt()
    ripple = (0.6 * pixel * grain[..., 0:1] + 3.0 * grain[..., 1:2]).sin()
    distance += (GRAIN * style[:, 0].abs())[:, None, None] * (ripple[:, 0].transpose(1, 2) @ ripple[:, 1])
    # Edges ramp over about 1.2 pixels, as MNIST's do since it was resampled.
    ramp = (1.2 * (0.3 * style[:, 1]).exp())[:, None, None]
    shade = ((pen[:, None, None] - distance) / ramp + 0.5).clamp(0, 1)
    return (255 * shade).round().to(torch.uint8)
