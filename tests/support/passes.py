"""A pass over images in this process, and what it sees, all at once."""

from collections.abc import Sequence
from typing import Any

import xarray as xr
from torch import Tensor, inference_mode

import sightline as sl

OPTIONS: dict[str, Any] = {"batch": 8, "workers": 0, "show_progress": False}
CNN = "timm:resnet18@random?size=32&zero_init_last=False"


def measured(name: str, encoders: Any, images: Any, config: Any = None, **options: Any) -> xr.Dataset:
    """The result of one analysis."""
    return sl.analyze(encoders, images, {name: config}, **{**OPTIONS, **options})[name]


def activations(encoder: sl.Encoder, images: sl.Images, sites: str | Sequence[str], order: Any = None) -> Any:
    """All activations of sites for the test images, in an order: what a pass never holds. By site."""
    rows = images.indices("test") if order is None else order
    arrays = [item.image for item in images.source.read([int(row) for row in rows])]
    found: dict[str, Tensor]
    with inference_mode(), encoder.evaluating(), sl.capture(encoder, sites) as found:
        encoder(encoder.preprocess(arrays))
    return found
