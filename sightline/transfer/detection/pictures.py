"""Images with the objects that are there, or that were found, drawn into them; and which of them were missed."""

import colorsys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torchvision.ops import box_iou

from sightline.transfer.detection.masks import RunLengths, unpacked
from sightline.transfer.detection.objects import Detections, Objects

CERTAIN = 0.3  # score from which on a detection is drawn and counted
OVERLAP = 0.5  # IoU from which on a box of the right class has found an object
SIDE = 192  # pixels of a picture
COVER = 0.45  # of a mask over the image


class Misses(NamedTuple):
    """How a detector did on one image."""

    missed: int  # objects that no detection has found
    wrong: int  # detections where there is no object of their class


def misses(there: Objects, found: Detections) -> Misses:
    """Count misses and false alarms by their boxes; the surest detections choose first, crowds excuse any."""
    sure = found.scores >= CERTAIN
    overlap = box_iou(torch.from_numpy(found.boxes[sure]), torch.from_numpy(there.boxes)).numpy()
    overlap[found.labels[sure][:, None] != there.labels[None, :]] = 0
    free, wrong = np.ones(len(there.labels), bool), 0
    for row in overlap:
        open_to = np.where(free, row, 0)
        best = int(open_to.argmax()) if len(row) else 0
        if not len(row) or open_to[best] < OVERLAP:
            wrong += not (len(row) and (row[there.crowd] > 0).any())
        elif not there.crowd[best]:
            free[best] = False
    return Misses(int((free & ~there.crowd).sum()), wrong)


def draw(
    image: NDArray[np.uint8], one: Objects | Detections, classes: Sequence[str]
) -> NDArray[np.uint8]:  # (H, W, 3) -> (SIDE, SIDE, 3)
    """The image, its longer side SIDE pixels, with boxes, masks and names."""
    kept = one.scores >= CERTAIN if isinstance(one, Detections) else ~one.crowd
    where = np.flatnonzero(kept)[::-1]  # the surest last, on top
    height, width = image.shape[:2]
    scale = SIDE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    picture = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    if one.masks is not None:
        picture = _covered(picture, [one.masks[i] for i in where], one.labels[where], (height, width), len(classes))
    pen = ImageDraw.Draw(picture)
    for i in where:
        label, colour = int(one.labels[i]), _colour(int(one.labels[i]), len(classes))
        x0, y0, x1, y1 = (one.boxes[i] * scale).tolist()
        pen.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=colour, width=2)
        score = f" {one.scores[i]:.2f}" if isinstance(one, Detections) else ""
        words = f"{classes[label]}{score}"
        corner = (min(max(0.0, x0), max(0.0, size[0] - pen.textlength(words) - 2)), max(0.0, y0 - 11))
        pen.rectangle(pen.textbbox(corner, words), fill=colour)
        pen.text(corner, words, fill=(255, 255, 255))
    whole = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    whole.paste(picture, (0, 0))
    return np.asarray(whole)


def _covered(
    picture: Image.Image, masks: Sequence[RunLengths], labels: NDArray[Any], size: tuple[int, int], classes: int
) -> Image.Image:
    pixels = np.asarray(picture).astype(np.float32)
    for mask, label in zip(unpacked(masks, size), labels.tolist(), strict=True):
        inside = np.asarray(Image.fromarray(mask).resize(picture.size, Image.Resampling.NEAREST))
        pixels[inside] = (1 - COVER) * pixels[inside] + COVER * np.array(_colour(label, classes))
    return Image.fromarray(pixels.astype(np.uint8))


def _colour(label: int, classes: int) -> tuple[int, int, int]:
    """Hues around the circle, neighbours in the list far apart in it."""
    hue = (label * 0.618034) % 1 if classes > 6 else label / max(1, classes)
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    return int(255 * red), int(255 * green), int(255 * blue)
