"""Evaluation preprocessing: resize, crop, normalise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.images.targets import Targets, move

if TYPE_CHECKING:
    from PIL import Image


INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")  # as PIL has them
LARGEST = 2**26  # pixels of an image that is resized as a whole
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PreprocessError(InputError):
    """Preprocessing that cannot be; whoever loads an encoder says which one asks for it."""


class Window(NamedTuple):
    """What is seen along one axis of an image: `size` pixels from `first` on, once it is resized to `resized`."""

    length: int  # of the image
    resized: int
    first: int
    size: int

    def of_image(self) -> tuple[float, float]:
        """Where that begins and ends in the image itself."""
        scale = self.length / self.resized
        return self.first * scale, min((self.first + self.size) * scale, self.length)


@dataclass(frozen=True)
class Preprocess:
    """Evaluation preprocessing: resize (shorter side, or exact height and width), centre crop, normalise.

    >>> Preprocess(size=(2, 2)).normalize(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))[0, :, 0, 0]
    tensor([2.2489, 2.4286, 2.6400])
    """

    size: tuple[int, int] = (224, 224)
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise PreprocessError(
                f"There is no interpolation {self.interpolation!r}{nearest(self.interpolation, INTERPOLATIONS)}"
            )
        resized = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        for what, sides in (("cropped", self.size), ("resized", resized)):
            if sides is not None and (len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides)):
                raise PreprocessError(f"Images cannot be {what} to {sides}; height and width are at least one pixel")
        if resized is not None and (resized[0] < self.size[0] or resized[1] < self.size[1]):
            raise PreprocessError(
                f"Images resized to {self.resize} cannot be cropped to {self.size}; resize to at least that"
            )
        for what, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(math.isfinite(v) and (v > 0 or what == "mean") for v in values):
                raise PreprocessError(
                    f"Pixels cannot be normalised with the {what} {values}; 3 finite numbers are expected, and none of "
                    "the std may be 0"
                )

    def crop(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """uint8 (H, W, 3) → uint8 (3, h, w), with PIL's antialiased resize as the official evaluations do."""
        from PIL import Image

        rows, columns = self.windows(*image.shape[:2])
        how = Image.Resampling[self.interpolation.upper()]
        if rows.resized * columns.resized > LARGEST:  # a long strip: what the crop leaves out need not be made
            (top, bottom), (left, right) = rows.of_image(), columns.of_image()
            seen = Image.fromarray(image).resize((columns.size, rows.size), how, (left, top, right, bottom))
            return np.ascontiguousarray(np.asarray(seen).transpose(2, 0, 1))
        if (rows.resized, columns.resized) != image.shape[:2]:
            image = np.asarray(Image.fromarray(image).resize((columns.resized, rows.resized), how))
        top, left = rows.first, columns.first
        return np.ascontiguousarray(image[top : top + self.size[0], left : left + self.size[1]].transpose(2, 0, 1))

    def move(self, targets: Targets[NDArray[Any]], height: int, width: int) -> Targets[NDArray[Any]]:
        """The targets of an image of this height and width in what `crop` makes of it.

        >>> one = Targets(np.array([7]), np.array([[10, 5, 30, 20]], np.float32))
        >>> Preprocess((20, 20), 20).move(one, 40, 60).boxes  # halved, then 5 off the left
        array([[ 0. ,  2.5, 10. , 10. ]], dtype=float32)
        """
        rows, columns = self.windows(height, width)
        resized = move(targets, np.array([0, 0, height, width]), False, (rows.resized, columns.resized))
        return move(resized, np.array([rows.first, columns.first, *self.size]), False, self.size)

    def windows(self, height: int, width: int) -> tuple[Window, Window]:
        """What `crop` takes of an image of this size, along its rows and along its columns."""
        rows, columns = (
            Window(have, resized, round((resized - want) / 2), want)
            for have, resized, want in zip((height, width), self._resized(height, width), self.size, strict=True)
        )
        return rows, columns

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.resize, tuple):
            return self.resize
        # An image that is smaller than the crop is enlarged even where the model asks for no resize.
        short = self.resize if self.resize is not None else max(self.size)
        if self.resize is None and height >= self.size[0] and width >= self.size[1]:
            return height, width
        if height <= width:
            return short, int(short * width / height)
        return int(short * height / width), short

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8, or floats in [0, 1], (B, 3, h, w) → normalised float32."""
        mean, std = (torch.tensor(v, device=pixels.device).view(1, 3, 1, 1) for v in (self.mean, self.std))
        values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
        return (values - mean) / std

    def __call__(self, images: Sequence[Image.Image | np.ndarray[Any, Any]]) -> Tensor:
        """PIL images or uint8 arrays (H, W, 3) → (B, 3, h, w), ready for the encoder."""
        arrays = [np.asarray(i.convert("RGB") if hasattr(i, "convert") else i) for i in images]
        return self.normalize(torch.from_numpy(np.stack([self.crop(array) for array in arrays])))
