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
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline.analyze import analyze
    from sightline.encoder import Encoder, Preprocess, load_encoder, save_encoder
    from sightline.errors import InputError
    from sightline.finetune import finetune
    from sightline.images import Images, load_images
    from sightline.pretrain import pretrain
    from sightline.reinit import reinit
    from sightline.report import write_report
    from sightline.run import Run, open_run
    from sightline.sites import Tokens, capture

__version__ = "0.1.0"
__all__ = [
    "Encoder",
    "Images",
    "InputError",
    "Preprocess",
    "Run",
    "Tokens",
    "analyze",
    "capture",
    "finetune",
    "load_encoder",
    "load_images",
    "open_run",
    "pretrain",
    "reinit",
    "save_encoder",
    "write_report",
]

# Imported when first used: `import sightline` and `sightline --help` do not wait for PyTorch.
_HOME = {
    "Encoder": "encoder",
    "Images": "images",
    "InputError": "errors",
    "Preprocess": "encoder",
    "Run": "run",
    "Tokens": "sites",
    "analyze": "analyze",
    "capture": "sites",
    "finetune": "finetune",
    "load_encoder": "encoder",
    "load_images": "images",
    "open_run": "run",
    "pretrain": "pretrain",
    "reinit": "reinit",
    "save_encoder": "encoder",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sightline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sightline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `sightline.analyze` the function: importing a submodule would put the module of that name in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
