"""Attention maps of a result → the data of the viewer in the report.

A result has, for the encoder at index i of its `encoder` axis, where that encoder has attention maps,

    viewer_map_i      (image, layer, head, query, key) uint8: attention from a query patch to all patches, in rows of
                      the patch grid; 255 is the brightest key of each query. Attribute `grid`: rows, columns
    viewer_pixels_i   (image, y, x, rgb) uint8: the picture as this encoder saw it

with the layers' sites in `viewer_layer_i`, the queries' places in the flat grid in `viewer_query_i`, and the images'
`viewer_id` and `viewer_label`. The bytes travel compressed (zlib) in base64, those of maps as hundredths, which
the page shows: finer ones would take a quarter more.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from sightline.core.results import of_decoder


def pack_viewer(result: xr.Dataset) -> dict[str, Any] | None:
    """What the page needs to show the attention maps of a result; None for results without them."""
    encoders = [
        _encoder(result, i, str(name))
        for i, name in enumerate(result["encoder"].values if "encoder" in result.coords else ())
        if f"viewer_map_{i}" in result
    ]
    if not encoders:
        return None
    words = (result[name].values.astype(str).tolist() for name in ("viewer_id", "viewer_label"))
    images = [{"id": id, "label": label} for id, label in zip(*words, strict=True)]
    pixels = list(dict.fromkeys(one["pixels"] for one in encoders))  # most encoders see the same
    encoders = [{**one, "pixels": pixels.index(one["pixels"])} for one in encoders]
    return {"images": images, "pixels": pixels, "encoders": encoders}


def _encoder(result: xr.Dataset, i: int, name: str) -> dict[str, Any]:
    axes = [f"viewer_{axis}_{i}" for axis in ("layer", "head", "query", "key")]
    maps = result[f"viewer_map_{i}"].transpose("viewer_image", *axes)
    pixels = result[f"viewer_pixels_{i}"].transpose("viewer_image", f"viewer_y_{i}", f"viewer_x_{i}", "viewer_rgb")
    layers = [str(site) for site in result[f"viewer_layer_{i}"].values]
    return {
        "name": name,
        "layers": layers,
        "depths": relative_depths(layers),
        "heads": maps.sizes[axes[1]] - 1,
        "queries": result[f"viewer_query_{i}"].values.tolist(),
        "grid": [int(n) for n in maps.attrs["grid"]],
        "maps": _bytes(np.rint(maps.values * (100 / 255))),
        "size": list(pixels.shape[1:3]),
        "pixels": _bytes(pixels.values),
    }


def relative_depths(layers: Sequence[str]) -> list[float]:
    """The first layer of an encoder is at 0 and the last at 1; those of a decoder follow, up to 2.

    >>> relative_depths(["block.0.attn_map", "block.1.attn_map", "block.2.attn_map", "decoder.block.0.attn_map"])
    [0.0, 0.5, 1.0, 2.0]
    """
    decoder = sum(map(of_decoder, layers))
    last = len(layers) - decoder - 1
    return [k / max(last, 1) if k <= last else 1 + (k - last) / decoder for k in range(len(layers))]


def _bytes(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(values.astype(np.uint8, copy=False).tobytes(), 9)).decode()
