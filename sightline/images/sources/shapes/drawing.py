"""Silhouettes and textures by formula, the same bits on every machine.

Everything that reaches a pixel is made of operations that IEEE 754 rounds exactly (+ − × ÷ √, comparisons, floor) and
of integer arithmetic; sin and cos of a maths library are not among them, so `sine` is a polynomial, and cos nθ comes
from the Chebyshev polynomials. No sums over arrays, because their order may vary.

A silhouette takes x, y in units of the object's radius (y grows downwards) and returns roughly the distance to its
outline, negative inside. A texture takes x, y in units of its period and the sharpness in pixels per period, and gives
the share of the second colour, between 0 and 1.
"""

# mypy: disable-error-code="no-any-return"
# numpy declares the results of its ufuncs as Any, and nearly every function here ends in one.

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]


class Dice:
    """Numbers drawn in advance for one image, taken one after the other."""

    def __init__(self, bits: NDArray[np.uint64]) -> None:
        self._numbers = iter(((bits >> np.uint64(40)).astype(np.float64) * 2.0**-24).tolist())

    def between(self, low: float, high: float) -> float:
        """Uniform in [low, high)."""
        number: float = next(self._numbers)
        return low + (high - low) * number

    def whole(self, count: int) -> int:
        """Uniform among 0 … count − 1."""
        return int(self.between(0.0, count))


def sine(turns: float) -> float:
    """Sine of an angle in turns, to 1e-6, by its Taylor polynomial after folding into a quarter turn.

    >>> [round(sine(t / 8), 5) for t in range(5)]
    [0.0, 0.70711, 1.0, 0.70711, 0.0]
    """
    turns -= math.floor(turns + 0.5)
    if abs(turns) > 0.25:
        turns = (0.5 if turns > 0 else -0.5) - turns
    a = turns * 6.283185307179586
    s = a * a
    return a * (1 - s / 6 * (1 - s / 20 * (1 - s / 42 * (1 - s / 72 * (1 - s / 110)))))


def cosine(turns: float) -> float:
    """Cosine of an angle in turns."""
    return sine(turns + 0.25)


def wave(turns: Array) -> Array:
    """Sine of angles in turns to 1e-3: a parabola and its correction, cheap on arrays."""
    t = turns - np.floor(turns + 0.5)
    s = t * (8.0 - 16.0 * np.abs(t))
    return s * (0.775 + 0.225 * np.abs(s))


def clip(values: Array, low: float, high: float) -> Array:
    """np.clip without its overhead, which counts for small images."""
    return np.minimum(np.maximum(values, low), high)


def edge(distance: Array, sharpness: float) -> Array:
    """Anti-aliased step: 0 below, 1 above, linear over one pixel.

    >>> edge(np.array([-1, 0, 0.25, 1], np.float32), 1.0).tolist()
    [0.0, 0.5, 0.75, 1.0]
    """
    return clip(distance * sharpness + 0.5, 0.0, 1.0)


def rgb(hue: float, saturation: float, value: float) -> list[float]:
    """Red, green, blue of a colour; hue in turns.

    >>> rgb(0.0, 1.0, 1.0), rgb(0.25, 0.5, 1.0)
    ([1.0, 0.0, 0.0], [0.75, 1.0, 0.5])
    """
    ramps = [6 * abs(t - math.floor(t) - 0.5) for t in (hue, hue + 2 / 3, hue + 1 / 3)]
    return [value * (1 - saturation * (1 - min(max(ramp - 1, 0.0), 1.0))) for ramp in ramps]


def fold(t: Array) -> Array:
    """Distance to the nearest whole number, 0 … 0.5."""
    return np.abs(t - np.floor(t + 0.5))


def radius(x: Array, y: Array) -> Array:
    """Distance from the origin, never 0, so that one may divide by it."""
    return np.sqrt(x * x + y * y + 1e-12)


# Silhouettes


def circle(x: Array, y: Array) -> Array:
    """Disc."""
    return radius(x, y) - 0.82


def square(x: Array, y: Array) -> Array:
    """Upright square."""
    return np.maximum(np.abs(x), np.abs(y)) - 0.74


def triangle(x: Array, y: Array) -> Array:
    """Equilateral triangle that stands on a side."""
    return np.maximum(y - 0.58, 0.866 * np.abs(x) - 0.5 * y - 0.5)


def star(x: Array, y: Array) -> Array:
    """Five-pointed star: two mirrors fold the ten edges into one."""
    x = np.abs(x)
    y = -y
    m = np.maximum(x * 0.809 - y * 0.588, 0.0) * 2.0
    x, y = x - m * 0.809, y + m * 0.588
    m = np.maximum(-x * 0.809 - y * 0.588, 0.0) * 2.0
    x, y = np.abs(x + m * 0.809), y + m * 0.588
    return 0.943 * x + 0.333 * (y - 1.06)


def cross(x: Array, y: Array) -> Array:
    """Cross with four equal arms."""
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.maximum(x, y) - 0.92, np.minimum(x, y) - 0.3)


def ring(x: Array, y: Array) -> Array:
    """Thick ring."""
    return np.abs(radius(x, y) - 0.66) - 0.24


def heart(x: Array, y: Array) -> Array:
    """A square on its corner with a half-disc on each of its upper sides."""
    x = np.abs(x)
    return np.minimum(radius(x - 0.4, y + 0.28) - 0.566, 0.7071 * (x + np.abs(y - 0.12)) - 0.566)


def crescent(x: Array, y: Array) -> Array:
    """A disc without a smaller one."""
    return np.maximum(radius(x, y) - 0.92, 0.72 - radius(x - 0.42, y + 0.16))


def arrow(x: Array, y: Array) -> Array:
    """Arrow that points upwards."""
    x = np.abs(x)
    head = np.maximum(0.75 * x - 0.66 * (y + 0.98), y + 0.05)
    return np.minimum(head, np.maximum(x - 0.25, np.abs(y - 0.4) - 0.55))


def bolt(x: Array, y: Array) -> Array:
    """Lightning: a triangle and its point reflection."""
    x = 0.72 * x
    upper = np.maximum(np.maximum(y - 0.18, -0.8 * (x - 0.32) - 0.6 * (y + 1.0)), 0.99 * (x - 0.2) + 0.13 * y)
    lower = np.maximum(np.maximum(-y - 0.18, 0.8 * (x + 0.32) + 0.6 * (y - 1.0)), -0.99 * (x + 0.2) - 0.13 * y)
    return np.minimum(upper, lower)


def gear(x: Array, y: Array) -> Array:
    """Cogwheel with eight teeth and a hole."""
    r = radius(x, y)
    c = x / r
    for _ in range(3):
        c = 2.0 * c * c - 1.0  # cos θ, cos 2θ, cos 4θ, cos 8θ
    return np.maximum(r - 0.77 - 0.13 * clip(3.0 * c, -1.0, 1.0), 0.26 - r)


def flower(x: Array, y: Array) -> Array:
    """Five petals: r = 0.3 + 0.65 |cos 5θ/2|."""
    r = radius(x, y)
    c = -y / r
    s = c * c
    c = c * (5.0 + s * (16.0 * s - 20.0))  # cos 5θ
    return 0.75 * (r - 0.3 - 0.65 * np.sqrt(np.maximum(0.5 + 0.5 * c, 0.0)))


def drop(x: Array, y: Array) -> Array:
    """Falling drop: a disc and the cone that touches it."""
    cone = np.maximum(0.898 * np.abs(x) - 0.44 * (y + 1.0), y - 0.06)
    return np.minimum(radius(x, y - 0.32) - 0.58, cone)


def hourglass(x: Array, y: Array) -> Array:
    """Two triangles, tip to tip."""
    y = np.abs(y)
    return np.maximum(0.8 * (np.abs(x) - 0.11) - 0.6 * y, y - 0.86)


def tree(x: Array, y: Array) -> Array:
    """Fir tree: two triangles on a trunk."""
    x = np.abs(x)
    top = np.maximum(0.8 * x - 0.56 * (y + 1.02), y + 0.08)
    low = np.maximum(0.8 * x - 0.6 * (y + 0.52), y - 0.52)
    return np.minimum(np.minimum(top, low), np.maximum(x - 0.17, np.abs(y - 0.7) - 0.28))


def fish(x: Array, y: Array) -> Array:
    """Fish that swims to the left: a lens and a tail fin."""
    y = np.abs(y)
    body = radius(x + 0.2, y + 0.42) - 0.9
    return np.minimum(body, np.maximum(0.75 * y - 0.66 * (x - 0.28), x - 0.98))


# Textures


def checks(x: Array, y: Array, sharpness: float) -> Array:
    """Chess board."""
    a, b = edge(fold(0.8 * x) - 0.25, sharpness), edge(fold(0.8 * y) - 0.25, sharpness)
    return a + b - 2.0 * a * b


def bricks(x: Array, y: Array, sharpness: float) -> Array:
    """Brick wall, the joints in the second colour."""
    y = 1.25 * y
    shift = np.floor(y)
    return edge(0.13 - np.minimum(2.0 * fold(0.5 * (x + shift)), fold(y)), sharpness)


def stripes(x: Array, y: Array, sharpness: float) -> Array:
    """Straight stripes."""
    return edge(fold(x) - 0.25, sharpness)


def rays(x: Array, y: Array, sharpness: float) -> Array:
    """Twelve rays from a point."""
    r = radius(x, y)
    c = y / r
    c = c * (4.0 * c * c - 3.0)
    c = 2.0 * c * c - 1.0
    return edge((2.0 * c * c - 1.0) * np.minimum(r, 1.5) * 0.12, sharpness)


def grid(x: Array, y: Array, sharpness: float) -> Array:
    """Thin lines in two directions, on their corners."""
    x, y = 0.64 * (x + y), 0.64 * (x - y)
    return edge(0.12 - np.minimum(fold(x), fold(y)), sharpness)


def rings(x: Array, y: Array, sharpness: float) -> Array:
    """Concentric rings."""
    return edge(fold(1.3 * radius(x, y)) - 0.25, sharpness)


def plaid(x: Array, y: Array, sharpness: float) -> Array:
    """Tartan: broad bands in two directions, thin lines between them."""
    fx, fy = fold(0.6 * x), fold(0.6 * y)
    bands = edge(fx - 0.26, sharpness) + edge(fy - 0.26, sharpness)
    lines = np.maximum(edge(0.06 - fx, sharpness), edge(0.06 - fy, sharpness))
    return np.maximum(0.5 * bands, lines)


def speckle(x: Array, y: Array, sharpness: float) -> Array:
    """Specks of all sizes without order: a disc in each cell, its place and size from the hash of the cell."""
    x, y = 1.15 * x, 1.15 * y
    column, row = np.floor(x), np.floor(y)
    bits = column.astype(np.int32).view(np.uint32) * np.uint32(0x9E3779B1)
    bits = (bits ^ row.astype(np.int32).view(np.uint32)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    dx = ((bits >> np.uint32(8)) & np.uint32(255)).astype(np.float32) * (0.5 / 255) - 0.25
    dy = ((bits >> np.uint32(16)) & np.uint32(255)).astype(np.float32) * (0.5 / 255) - 0.25
    size = (bits >> np.uint32(24)).astype(np.float32) * (0.36 / 255) + 0.08
    return edge(size - radius(x - column - 0.5 + dx, y - row - 0.5 + dy), sharpness)


def triangles(x: Array, y: Array, sharpness: float) -> Array:
    """Tiling with triangles of two colours."""
    a, b = 0.75 * (x - 0.577 * y), 0.75 * 1.155 * y
    a, b = a - np.floor(a), b - np.floor(b)
    upper = np.minimum(a + b - 1.0, np.minimum(1.0 - a, 1.0 - b))
    lower = np.minimum(1.0 - a - b, np.minimum(a, b))
    return edge(np.maximum(upper, 0.0) - np.maximum(lower, 0.0), sharpness)


def zigzag(x: Array, y: Array, sharpness: float) -> Array:
    """Chevrons."""
    return edge(fold(0.85 * y + 1.5 * fold(0.55 * x)) - 0.25, 0.8 * sharpness)


def honeycomb(x: Array, y: Array, sharpness: float) -> Array:
    """Hexagonal cells with thin walls: the nearer centre of two rectangular lattices."""
    y = y * 0.577
    ax, ay = x - np.floor(x + 0.5), 1.732 * (y - np.floor(y + 0.5))
    bx, by = x - np.floor(x) - 0.5, 1.732 * (y - np.floor(y) - 0.5)
    first = ax * ax + ay * ay < bx * bx + by * by
    hx, hy = np.abs(np.where(first, ax, bx)), np.abs(np.where(first, ay, by))
    return edge(np.maximum(hx, 0.5 * hx + 0.866 * hy) - 0.38, sharpness)


def dots(x: Array, y: Array, sharpness: float) -> Array:
    """Polka dots, every other row shifted."""
    y = 1.1 * y
    row = np.floor(y)
    x = x + 0.5 * row
    return edge(0.31 - radius(x - np.floor(x) - 0.5, y - row - 0.5), sharpness)


def waves(x: Array, y: Array, sharpness: float) -> Array:
    """Thin wavy lines."""
    return edge(0.17 - fold(1.1 * y + 0.3 * wave(0.42 * x)), sharpness)


def marble(x: Array, y: Array, sharpness: float) -> Array:
    """Soft veins: a sine of twice bent coordinates."""
    x = x + 0.55 * wave(0.31 * y)
    y = y + 0.6 * wave(0.37 * x + 0.2)
    return 0.5 + 0.5 * wave(0.3 * x + 0.42 * y + 0.35 * wave(0.4 * (x - y)))


def wood(x: Array, y: Array, sharpness: float) -> Array:
    """Grain: long rings that darken slowly and end sharply."""
    r = radius(0.22 * x, 1.1 * y + 0.14 * wave(0.3 * x) + 0.25)
    t = 1.25 * r - np.floor(1.25 * r)
    return np.minimum(t, (1.0 - t) * (0.5 * sharpness))


def scales(x: Array, y: Array, sharpness: float) -> Array:
    """Overlapping scales, dark at their rims: the owner is this row's disc, or that of the row above."""
    x, y = 0.8 * x, 2.6 * y
    row = np.floor(y)
    y = 0.27 * (y - row)
    x = x + 0.5 * row
    x = np.abs(x - np.floor(x) - 0.5)
    here, above = radius(x, y), radius(x - 0.5, y + 0.27)
    r = np.minimum(np.where(here < 0.5, here, above) * 2.0, 1.0)
    return r * r * r


SILHOUETTES: dict[str, Callable[[Array, Array], Array]] = {
    **{f.__name__: f for f in (circle, square, triangle, star, cross, ring, heart, crescent)},
    **{f.__name__: f for f in (arrow, bolt, gear, flower, drop, hourglass, tree, fish)},
}

# In the order of the silhouettes: the circle is checked, the square is of bricks, …, the fish has scales.
TEXTURES: dict[str, Callable[[Array, Array, float], Array]] = {
    **{f.__name__: f for f in (checks, bricks, stripes, rays, grid, rings, plaid, speckle)},
    **{f.__name__: f for f in (triangles, zigzag, honeycomb, dots, waves, marble, wood, scales)},
}
