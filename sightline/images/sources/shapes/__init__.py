"""`shapes`: embedded images, drawn by formula; 16 classes with their own silhouette and their own texture.

    shapes            one object per image; train, val, test
    shapes:conflict   the silhouette of one class (labels) with the texture of another (extras["texture"])
    shapes:scenes     1 to 8 objects; images.targets(positions) gives boxes, masks and classes

Options: size (pixels), seed, train, val, test (number of images). An image is decided by kind, seed, split and number
alone, bit by bit, on every machine; its geometry does not depend on the size. Colours, light and background are drawn
independently of the class.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sightline.core.errors import InputError, nearest
from sightline.core.keyed_random import mix
from sightline.images.loading import read_options
from sightline.images.sets import Images, Item
from sightline.images.sources.shapes.drawing import SILHOUETTES, TEXTURES, Dice, clip, cosine, edge, rgb, sine, wave
from sightline.images.targets import Targets

CLASSES = tuple(SILHOUETTES)
TEXTURE_NAMES = tuple(TEXTURES)  # TEXTURE_NAMES[i] is the texture of CLASSES[i]
DRAWINGS = ("plain", "conflict", "scenes")
SPLITS = ("train", "val", "test")
COUNTS = {"plain": (16384, 2048, 2048), "conflict": (7680, 960, 1920), "scenes": (4096, 512, 512)}
DRAWING = 2  # a change of the drawn bits takes a new number, so that cached features of the old ones are not found
MOST_IMAGES = 10_000_000
DRAWS = 512  # random numbers at hand for an image; a scene of eight objects takes some 300
REMEMBERED = 256  # pixels of the side of images that are kept for a while: 46 MB at most
SMALLEST = 12  # visible pixels at 64 × 64 that make an object of a scene worth an annotation


Window: TypeAlias = tuple[slice, slice]  # rows, columns
Drawing: TypeAlias = tuple[np.ndarray, np.ndarray, list[int]]


def load(where: str, options: Mapping[str, str]) -> Images:
    """`shapes`, `shapes:conflict` or `shapes:scenes`."""
    kind = where or "plain"
    if kind not in DRAWINGS:
        raise InputError(f"There are no shapes:{where}{nearest(where, DRAWINGS[1:])}")
    defaults = dict(zip(SPLITS, COUNTS[kind], strict=True))
    chosen = read_options("shapes", options, {"size": 128 if kind == "scenes" else 64, "seed": 0} | defaults)
    if not 8 <= chosen["size"] <= 2048:
        raise InputError(f"shapes can be drawn with 8 to 2048 pixels, not {chosen['size']}")
    counts = tuple(chosen[split] for split in SPLITS)
    if max(counts) > MOST_IMAGES:
        raise InputError(f"A split of shapes can have {MOST_IMAGES} images at most, not {max(counts)}")
    source = Shapes(kind, chosen["size"], chosen["seed"], counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    labels, textures = cues(kind, numbers)
    ends = np.cumsum(counts)
    splits = {s: np.arange(end - n, end) for s, n, end in zip(SPLITS, counts, ends, strict=True) if n}
    prefix = f"shapes-{chosen['seed']}" if kind == "plain" else f"{kind}-{chosen['seed']}"
    return Images(
        name="shapes",
        source=source,
        ids=np.array([f"{prefix}/{s}/{i:06d}" for s, n in zip(SPLITS, counts, strict=True) for i in range(n)], str),
        labels=labels,
        classes=CLASSES,
        splits=splits,
        extras={"texture": textures} if kind == "conflict" else {},
        relatives={"conflict": "shapes:conflict?size={size}&seed={seed}".format(**chosen)} if kind == "plain" else {},
        fingerprint=f"shapes {DRAWING} {kind} size {chosen['size']}",
    )


def cues(kind: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Silhouette and texture class of the images with these numbers.

    Classes take turns; conflict images go through all 16 × 15 pairs.

    >>> [cue.tolist() for cue in cues("conflict", np.array([0, 1, 16, 239]))]
    [[0, 1, 0, 15], [1, 2, 2, 14]]
    """
    labels = numbers % 16
    shift = 1 + numbers // 16 % 15 if kind == "conflict" else 0
    return labels, (labels + shift) % 16


@dataclass(frozen=True)
class Shapes:
    """Draws images on demand."""

    kind: str
    size: int
    seed: int
    counts: tuple[int, ...]

    def read(self, indices: Sequence[int]) -> list[Item]:
        """Images at these positions; each is drawn by itself."""
        return [Item(image.copy(), None) for image, _, _ in self._draw(indices)]

    def targets(self, indices: Sequence[int]) -> list[Targets[NDArray[Any]]]:
        """The objects in these images, those in front last, and the class of each pixel.

        Boxes are tight around the visible pixels, which are the masks. Hidden objects and crumbs are left out.
        """
        return [annotate(owner, labels) for _, owner, labels in self._draw(indices)]

    def _draw(self, indices: Sequence[int]) -> Iterator[Drawing]:
        drawn = remembered if self.size <= REMEMBERED else draw
        return (drawn(self, int(index)) for index in indices)


def draw(shapes: Shapes, index: int) -> Drawing:
    """Pixels, the number of the object that each of them shows (−1: none), and the objects' classes."""
    ends = np.cumsum(shapes.counts)
    split = np.searchsorted(ends, [index], side="right")
    numbers = index - (ends - shapes.counts)[split]
    (key,) = mix(numbers + (split << 32), DRAWINGS.index(shapes.kind), shapes.seed)
    label, texture = (int(cue[0]) for cue in cues(shapes.kind, numbers))
    dice, canvas = Dice(mix(key + np.arange(DRAWS, dtype=np.uint64))), Canvas(shapes.size)
    light = dice.between(0.5, 0.75)  # where it comes from, in turns: from above, mostly from the left
    background(canvas, dice)
    if shapes.kind == "scenes":
        owner, shown = scene(canvas, dice, light, label)
    else:
        owner, shown = portrait(canvas, dice, light, label, texture), [label]
    return canvas.finish(dice, light), owner, shown


remembered = lru_cache(maxsize=64)(draw)  # who reads the images of a batch often asks for their targets next


def annotate(owner: np.ndarray, labels: Sequence[int]) -> Targets[NDArray[Any]]:
    """Boxes, masks and classes from the owner of each pixel; −1 is the background's."""
    least = max(1, SMALLEST * owner.size // 64**2)
    seen = [k for k in range(len(labels)) if np.count_nonzero(owner == k) >= least]
    masks = np.stack([owner == k for k in seen]) if seen else np.zeros((0, *owner.shape), bool)
    boxes = np.zeros((len(seen), 4), np.float32)
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    segmentation = np.array([*labels, -1], np.int64)[owner]
    return Targets(np.array([labels[k] for k in seen], np.int64), boxes, masks, segmentation)


class Canvas:
    """float32 pixels (3, S, S) and their coordinates 0 … 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pixels = np.zeros((3, size, size), np.float32)
        self.grid = (np.arange(size, dtype=np.float32) + 0.5) / size

    def window(self, x: float, y: float, reach: float) -> Window:
        """Rows and columns that a square around a point touches."""
        low_x, low_y = (max(0, int((c - reach) * self.size)) for c in (x, y))
        high_x, high_y = (min(self.size, max(0, int((c + reach) * self.size) + 2)) for c in (x, y))
        return slice(low_y, high_y), slice(low_x, high_x)

    def across(self, window: Window, x: float, y: float, turn: float, unit: float) -> np.ndarray:
        """How far a window's pixels lie from a point in the direction `turn`, in multiples of `unit`."""
        along: np.ndarray = (self.grid[window[1]] - x) * (cosine(turn) / unit)
        return along + (self.grid[window[0]][:, None] - y) * (sine(turn) / unit)

    def frame(self, window: Window, x: float, y: float, turn: float, unit: float) -> tuple[np.ndarray, np.ndarray]:
        """Coordinates of a window's pixels around a point, turned, in multiples of `unit`."""
        return self.across(window, x, y, turn, unit), self.across(window, x, y, turn + 0.25, unit)

    def blend(self, window: Window, cover: np.ndarray, colours: np.ndarray) -> None:
        """Lay colours (3, h, w) over the canvas where `cover` is 1; they are used up."""
        part = self.pixels[:, window[0], window[1]]
        colours -= part
        colours *= cover
        part += colours

    def finish(self, dice: Dice, light: float) -> np.ndarray:
        """Light falls off across the image, the sensor adds noise: uint8 (S, S, 3)."""
        strength, exposure, noise = dice.between(0.0, 0.5), dice.between(0.9, 1.2), dice.between(0.0, 0.07)
        bits = mix(np.arange(self.size**2, dtype=np.uint64) + np.uint64(dice.whole(2**24) << 32))
        grain = ((bits >> np.uint64(56)).astype(np.float32) - 127.5) * (noise / 128)
        glow = exposure + strength * self.across((slice(None), slice(None)), 0.5, 0.5, light, 1.0)
        pixels = self.pixels * glow + grain.reshape(self.size, self.size)
        levels = (clip(pixels, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)
        return np.ascontiguousarray(levels.transpose(1, 2, 0))


class Material(NamedTuple):
    """A texture in two colours."""

    texture: int
    turn: float
    period: float  # as a share of the image
    colours: tuple[list[float], list[float]]

    def paint(self, canvas: Canvas, window: Window, x: float, y: float) -> np.ndarray:
        """Colours (3, h, w) of a window, the texture's origin at a point."""
        tx, ty = canvas.frame(window, x, y, self.turn, self.period)
        share = TEXTURES[TEXTURE_NAMES[self.texture]](tx, ty, self.period * canvas.size)
        first, second = (np.array(c, np.float32)[:, None, None] for c in self.colours)
        colours: np.ndarray = share * (second - first)
        colours += first
        return colours


def material(dice: Dice, texture: int, turn: float, period: float, contrast: float) -> Material:
    """A texture in colours of its own: any hue, a dark and a light one that differ by `contrast`."""
    hue, other = dice.between(0, 1), dice.between(-0.2, 0.2)
    middle = dice.between(0.5 * contrast + 0.08, 0.98 - 0.5 * contrast)
    dark = rgb(hue, dice.between(0.3, 0.9), middle - 0.5 * contrast)
    pale = rgb(hue + other, dice.between(0.05, 0.6), middle + 0.5 * contrast)
    return Material(texture, turn, period, (dark, pale))


def background(canvas: Canvas, dice: Dice) -> None:
    """A textured wall and blobs of other textures, all independent of what stands in front."""
    everywhere = slice(0, canvas.size), slice(0, canvas.size)
    wall = material(dice, dice.whole(16), dice.between(0, 1), dice.between(0.1, 0.2), dice.between(0.02, 0.14))
    canvas.pixels[:] = wall.paint(canvas, everywhere, dice.between(0, 1), dice.between(0, 1))
    for _ in range(dice.whole(3)):
        blob(canvas, dice, dice.between(0, 1), dice.between(0, 1), dice.between(0.08, 0.2), dice.between(0.1, 0.35))


def blob(canvas: Canvas, dice: Dice, x: float, y: float, size: float, contrast: float) -> None:
    """An ellipse with a wavy outline and a texture of any class."""
    stuff = material(dice, dice.whole(16), dice.between(0, 1), dice.between(0.1, 0.2), contrast)
    window = canvas.window(x, y, 1.35 * size)
    u, v = canvas.frame(window, x, y, dice.between(0, 1), size)
    v = v * dice.between(1.0, 1.7)
    u = u + dice.between(0.1, 0.3) * wave(v * dice.between(0.4, 0.8) + dice.between(0, 1))
    cover = edge(1.0 - np.sqrt(u * u + v * v), 0.8 * size * canvas.size)
    canvas.blend(window, cover, stuff.paint(canvas, window, x, y))


def figure(
    canvas: Canvas, dice: Dice, light: float, label: int, stuff: Material, x: float, y: float, size: float, turn: float
) -> tuple[Window, np.ndarray]:
    """One object with its shadow; returns the window and how much of each pixel it covers."""
    window = canvas.window(x, y, 1.6 * size)
    u, v = canvas.frame(window, x, y, turn, size)
    stretch, slant = dice.between(0.85, 1.18), dice.between(-0.2, 0.2)
    u, v = u * stretch + slant * v, v / stretch
    u = u + dice.between(0.0, 0.1) * wave(v * dice.between(0.3, 0.6) + dice.between(0, 1))
    v = v + dice.between(0.0, 0.1) * wave(u * dice.between(0.3, 0.6) + dice.between(0, 1))
    distance = SILHOUETTES[CLASSES[label]](u, v)
    pixels = 0.9 * size * canvas.size  # per unit of distance
    shadow = edge(0.06 - shifted(distance, light, 0.2 * size * canvas.size), 0.2 * pixels if pixels > 8 else pixels)
    canvas.pixels[:, window[0], window[1]] *= 1.0 - dice.between(0.3, 0.7) * shadow
    # Round at the rim, and lighter on the side of the light: the object has volume.
    depth = clip(distance * -6.0, 0.0, 1.0)
    shade = 0.62 + 0.38 * depth * (2.0 - depth) + dice.between(0.05, 0.25) * canvas.across(window, x, y, light, size)
    cover = edge(-distance, pixels)
    canvas.blend(window, cover, stuff.paint(canvas, window, x, y) * shade)
    return window, cover


def shifted(distance: np.ndarray, light: float, reach: float) -> np.ndarray:
    """The distances moved away from the light by whole pixels."""
    down, right = int(-sine(light) * reach + 0.5), int(-cosine(light) * reach + 0.5)
    height, width = distance.shape
    result = np.full_like(distance, 9.0)
    if down < height and right < width:
        result[down:, right:] = distance[: height - down, : width - right]
    return result


def portrait(canvas: Canvas, dice: Dice, light: float, label: int, texture: int) -> np.ndarray:
    """One object of any size at any place that holds it, in half of the images with something in front of it.

    Returns the owner of each pixel. Place and size vary as far as the image allows, so that pixels alone tell little.
    """
    size, turn = dice.between(0.24, 0.44), dice.between(-0.08, 0.08)
    x, y = (0.5 + dice.between(-1, 1) * (0.52 - 0.9 * size) for _ in range(2))
    period = size * dice.between(0.34, 0.48)
    stuff = material(dice, texture, turn + dice.between(-0.08, 0.08), period, dice.between(0.45, 0.8))
    window, cover = figure(canvas, dice, light, label, stuff, x, y, size, turn)
    owner = np.full((canvas.size, canvas.size), -1)
    owner[window][cover >= 0.5] = 0
    if dice.whole(2):
        angle, far = dice.between(0, 1), size * dice.between(0.75, 1.0)
        blob(canvas, dice, x + far * cosine(angle), y + far * sine(angle), size * dice.between(0.3, 0.55), 0.25)
    return owner


def scene(canvas: Canvas, dice: Dice, light: float, label: int) -> tuple[np.ndarray, list[int]]:
    """1 to 8 objects, the largest behind; returns the owner of each pixel and the objects' classes."""
    count = 1 + dice.whole(8)
    largest = dice.between(0.2, 0.34)
    sizes = [largest, *sorted((largest * dice.between(0.2, 0.85) for _ in range(count - 1)), reverse=True)]
    labels = [label, *(dice.whole(16) for _ in range(count - 1))]
    owner = np.full((canvas.size, canvas.size), -1)
    placed: list[tuple[float, float, float]] = []
    for k, size in enumerate(sizes):
        x, y = place(dice, placed, size)
        placed.append((x, y, size))
        turn = dice.between(-0.1, 0.1)
        stuff = material(dice, labels[k], turn, size * dice.between(0.34, 0.48), dice.between(0.45, 0.8))
        window, cover = figure(canvas, dice, light, labels[k], stuff, x, y, size, turn)
        owner[window][cover >= 0.5] = k
    return owner, labels


def place(dice: Dice, placed: Sequence[tuple[float, float, float]], size: float) -> tuple[float, float]:
    """Of four random places, the one farthest from the objects that are there."""
    margin = 0.8 * size
    tries = [(dice.between(margin, 1 - margin), dice.between(margin, 1 - margin)) for _ in range(4)]

    def room(x: float, y: float) -> float:
        return min(((x - a) * (x - a) + (y - b) * (y - b)) / ((s + size) * (s + size)) for a, b, s in placed)

    return max(tries, key=lambda at: room(*at)) if placed else tries[0]
