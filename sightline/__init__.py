"""Sightline shows what vision models learn and how they differ.

>>> import sightline as sl
>>> encoders = {"a": sl.load_encoder("timm:test_vit@random"), "b": sl.load_encoder("timm:test_vit@random?seed=1")}
>>> images = sl.load_images("shapes?size=160", limit=64)
>>> run = sl.analyze(encoders, images, ["cka"], show_progress=False)
>>> within = run["cka"].cka.sel(encoder_a="a", encoder_b="a", tokens="all", site_a="block.0", site_b="block.0")
>>> round(float(within), 6)
1.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sightline.core.extras import explaining as _explaining
from sightline.core.version import __version__ as __version__

if TYPE_CHECKING:
    from sightline.api import detect, finetune, pretrain, rcdm, reinit, segment
    from sightline.core.contrast import Contrast, Estimate, contrast, estimate
    from sightline.core.errors import InputError
    from sightline.core.replicates import depth, interval
    from sightline.core.run_folder import Run, open_run
    from sightline.core.stopping import Stopped
    from sightline.encoders.encoder import Encoder
    from sightline.encoders.loading import load_encoder
    from sightline.encoders.saved import save_encoder
    from sightline.encoders.sites import Tokens
    from sightline.encoders.watching import capture
    from sightline.generation.imagine import imagine
    from sightline.images.loading import load_images
    from sightline.images.preprocess import Preprocess
    from sightline.images.sets import Images
    from sightline.measure.analyze import analyze
    from sightline.report.page import write_report
    from sightline.studies.study import Study, open_study, study
    from sightline.training.watch import Watch, watch

# Imported when first used: `import sightline` and `sightline --help` do not wait for PyTorch.
_HOME = {
    "Contrast": "core.contrast",
    "Encoder": "encoders.encoder",
    "Estimate": "core.contrast",
    "Images": "images.sets",
    "InputError": "core.errors",
    "Preprocess": "images.preprocess",
    "Run": "core.run_folder",
    "Stopped": "core.stopping",
    "Study": "studies.study",
    "Tokens": "encoders.sites",
    "analyze": "measure.analyze",
    "capture": "encoders.watching",
    "detect": "api",
    "contrast": "core.contrast",
    "depth": "core.replicates",
    "estimate": "core.contrast",
    "finetune": "api",
    "imagine": "generation.imagine",
    "interval": "core.replicates",
    "load_encoder": "encoders.loading",
    "load_images": "images.loading",
    "open_run": "core.run_folder",
    "open_study": "studies.study",
    "pretrain": "api",
    "rcdm": "api",
    "reinit": "api",
    "segment": "api",
    "save_encoder": "encoders.saved",
    "Watch": "training.watch",
    "watch": "training.watch",
    "study": "studies.study",
    "write_report": "report.page",
}

__all__ = [
    "Contrast",
    "Encoder",
    "Estimate",
    "Images",
    "InputError",
    "Preprocess",
    "Run",
    "Stopped",
    "Study",
    "Tokens",
    "Watch",
    "analyze",
    "capture",
    "contrast",
    "depth",
    "detect",
    "estimate",
    "finetune",
    "imagine",
    "interval",
    "load_encoder",
    "load_images",
    "open_run",
    "open_study",
    "pretrain",
    "rcdm",
    "reinit",
    "save_encoder",
    "segment",
    "study",
    "watch",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sightline' has no attribute {name!r}")
    with _explaining():
        return getattr(importlib.import_module(f"sightline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
