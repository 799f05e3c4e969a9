"""What the report shows of a few test images: the image, its map, what each encoder makes of it, and its components.

For the encoder at index i of the result,

    picture_pixels_i   (picture, y, x, rgb) uint8: the image as this encoder saw it
    picture_truth_i    (picture, y, x) int16: its map, 0 the background, −1 left out
    picture_found_i    (picture, y, x) int16: the decisions at the chosen layer
    picture_parts_i    (layer, picture, row, column, rgb) uint8: the first three principal components of the patches

The components of a layer are those of all training patches, from the sums of LDA; each is scaled from its 2nd to its
98th percentile over the pictures, so that a colour means the same in all pictures of a layer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.segmentation.scoring import Layer, Scores, Scoring, decide, maps_of
from sightline.images.label_maps import nearest_to
from sightline.images.thumbnails import thumbnail_size, thumbnails
from sightline.measure.estimators.lda import Lda

COLOURS = 3


def pictures_of(count: int, scoring: Scoring, scores: Scores) -> dict[str, xr.DataArray]:
    """Variables of the result; none without pictures."""
    rows = scoring.rows["test"][:: max(1, len(scoring.rows["test"]) // max(count, 1))][:count]
    if not len(rows) or not scores.chosen:
        return {}
    images = scoring.plan.images
    positions = images.indices("test")[rows]
    pixels = [item.image for item in images.source.read(positions.tolist())]
    if any(one is None for one in pixels):
        return {}
    maps = maps_of(images, "test", rows)
    variables: dict[str, Any] = {}
    for number, encoder in enumerate(scoring.plan.sites):
        if encoder not in scores.chosen:
            continue
        preprocess = scoring.preprocess(encoder)
        size = thumbnail_size(preprocess.size)
        names = ("picture", f"picture_y_{number}", f"picture_x_{number}")
        coords = {"picture": images.ids[positions].astype(str)}
        views = np.stack([preprocess.crop(one) for one in pixels if one is not None])
        truth = np.stack([nearest_to(one, preprocess, size) for one in maps]).astype(np.int16)
        decided = np.stack(
            [_decided(scoring, scores, encoder, row, one, size) for row, one in zip(rows, maps, strict=True)]
        )
        layers = [layer for layer in scores.fits if layer[0] == encoder]
        parts = _components(scoring, scores, layers, rows)
        over = (
            f"picture_layer_{number}",
            "picture",
            f"picture_row_{number}",
            f"picture_column_{number}",
            "picture_rgb",
        )
        variables |= {
            f"picture_pixels_{number}": xr.DataArray(
                thumbnails(torch.from_numpy(views)).numpy(), dims=(*names, "picture_rgb"), coords=coords
            ),
            f"picture_truth_{number}": xr.DataArray(truth, dims=names, coords=coords),
            f"picture_found_{number}": xr.DataArray(decided, dims=names, coords=coords),
            f"picture_parts_{number}": xr.DataArray(
                parts, dims=over, coords=coords | {over[0]: [site for _, site in layers]}
            ),
        }
    return variables


def components(patches: Tensor, fitted: Lda) -> Tensor:
    """Patches (…, D) on the first three principal axes of all training patches, (…, 3).

    The sign of an axis is that which makes its largest weight positive.
    """
    _, axes = torch.linalg.eigh(fitted.covariance)
    axes = axes[:, -COLOURS:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    components: Tensor = (patches.double() - fitted.mean) @ axes
    return components


def _components(
    scoring: Scoring, scores: Scores, layers: list[Layer], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """(layers, pictures, rows, columns, 3), all on the finest grid of these layers."""
    finest = np.array([scoring.shapes[layer][:2] for layer in layers]).max(0)
    pictures = np.zeros((len(layers), len(rows), *finest, 3), np.uint8)
    for number, layer in enumerate(layers):
        height, width, depth = scoring.shapes[layer]
        places = components(scoring.patches(layer, "test", rows), scores.fits[layer]).numpy(force=True)
        low, high = np.percentile(places, (2, 98), axis=(0, 1))
        shades = (255 * ((places - low) / np.maximum(high - low, 1e-12)).clip(0, 1)).round().astype(np.uint8)
        shades = shades.reshape(len(rows), height, width, -1)
        down, across = (np.arange(n) * own // n for n, own in zip(finest, (height, width), strict=True))
        pictures[number, ..., : min(depth, COLOURS)] = shades[:, down[:, None], across]
    return pictures


def _decided(
    scoring: Scoring, scores: Scores, encoder: str, row: int, one: npt.NDArray[np.int64], size: tuple[int, int]
) -> npt.NDArray[np.int16]:
    """The decisions on an image with the softmax if there is one, a pixel of the picture under its centre."""
    layer = (encoder, scores.chosen[encoder])
    fitted = scores.fits[layer]
    weight, bias, channels = scores.probes.get(
        encoder, (fitted.weight[0].float(), fitted.bias[0].float(), fitted.classes)
    )
    of_patches = (scoring.patches(layer, "test", np.array([row])) @ weight + bias).unflatten(
        1, scoring.shapes[layer][:2]
    )
    preprocess = scoring.preprocess(encoder)
    whole = channels[decide(of_patches, preprocess, one.shape)].numpy(force=True)[0]
    down, across = ((2 * np.arange(n) + 1) * own // (2 * n) for n, own in zip(size, whole.shape, strict=True))
    classes: npt.NDArray[np.int16] = whole[down[:, None], across].astype(np.int16)
    return classes
