"""Encoder: a vision model with all that is needed to use it. `load_encoder("timm:vit_small_patch16_224.dino")`."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core import plugins
from sightline.core.notebook import card, shortened
from sightline.encoders.contract import family
from sightline.encoders.files.weights import hash_weights
from sightline.encoders.modules.mode import evaluating
from sightline.encoders.modules.positions import Resize, by_size
from sightline.encoders.modules.truncated import without_classifier
from sightline.encoders.sites import Anatomy, Tap, Tokens, layer_type
from sightline.images.preprocess import Preprocess


@dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """A vision model and how to use it; calling it takes images that `preprocess` has prepared."""

    name: str
    module: nn.Module
    preprocess: Preprocess
    tokens: Tokens | None
    depth: int
    heads: int | None
    patch: int | None
    weights: str  # sha256
    reference: str
    family: str
    sites: Mapping[str, Tap]
    architecture: str | None = None  # a reference that builds the module anew, without weights
    classes: tuple[str, ...] | None = None  # what the outputs of its classifier mean, where that is known
    notes: Sequence[str] = ()  # what the user should know
    forward: Callable[[Tensor], Any] | None = None  # where calling the module is not enough
    stages: tuple[int, ...] = ()  # blocks of each stage, where the resolution falls between them
    resize: Resize = by_size  # of positions to images of another size

    def __call__(self, images: Tensor) -> Any:
        """What the model says to preprocessed images (B, 3, h, w)."""
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if images.device.type == "cpu" and (cast or images.dtype == torch.bfloat16):
            from sightline.core import bfloat16

            bfloat16.ensure()
        return (self.forward or self.module)(images)

    def has_places(self, shape: tuple[int, ...]) -> bool:
        """Whether it is known where an activation of this shape (of one image) lies on the image.

        Of an unknown module only maps (C, h, w) in the proportions of its images are: (h, w, C), or tokens that may
        begin with CLS, would give numbers that look right.
        """
        if self.tokens is not None or self.family != "module":
            return True
        height, width = self.preprocess.size
        return len(shape) == 3 and abs(shape[1] * width - shape[2] * height) < 0.2 * shape[2] * height

    def describe(self) -> dict[str, Any]:
        """What results and reports say about the encoder; plain data."""
        return {
            "name": self.name,
            "reference": self.reference,
            "family": self.family,
            "depth": self.depth,
            "heads": self.heads,
            "patch": self.patch,
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "weights": self.weights,
            "preprocess": asdict(self.preprocess),
            "tokens": None if self.tokens is None else asdict(self.tokens),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        height, width = self.preprocess.size
        blocks = f"{self.depth} blocks, " if self.depth else ""
        return f"Encoder({self.name!r}, {self.reference!r}, {blocks}{height} × {width} pixels)"

    def _repr_html_(self) -> str:
        height, width = self.preprocess.size
        tokens = self.tokens
        about = self.describe() | {
            "parameters": f"{sum(p.numel() for p in self.module.parameters()):,}",
            "weights": self.weights[:12],
            "preprocess": f"{height} × {width} pixels",
            "tokens": tokens and f"{tokens.grid[0]} × {tokens.grid[1]} patches, {tokens.prefix} other tokens",
            "notes": "; ".join(self.notes),
            "sites": shortened(list(dict.fromkeys(map(layer_type, self.sites))), 20),
        }
        return card(f"Encoder {about.pop('name')}", about)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Evaluation mode for a while; every submodule gets its own mode back."""
        return evaluating(self.module)


def name_apart(encoders: Iterable[Encoder]) -> dict[str, Encoder]:
    """Encoders by name; of those with the same name the second becomes `name (2)`."""
    named: dict[str, Encoder] = {}
    for encoder in encoders:
        name, number = encoder.name, 2
        while encoder.name in named:
            encoder, number = replace(encoder, name=f"{name} ({number})"), number + 1
        named[encoder.name] = encoder
    return named


def build_encoder(
    module: nn.Module,
    *,
    reference: str,
    name: str | None = None,
    preprocess: Preprocess | None = None,
    tokens: Tokens | None = None,
    architecture: str | None = None,
    classes: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    forward: Callable[[Tensor], Any] | None = None,
    resize: Resize = by_size,
) -> Encoder:
    """Put an encoder together around a module; what its family knows fills in the rest."""
    known = anatomy(module, (preprocess or Preprocess()).size)
    return Encoder(
        name=name or type(module).__name__,
        module=module,
        preprocess=preprocess or _whole_image(known.size or (224, 224)),
        tokens=tokens or known.tokens,
        depth=known.depth,
        heads=known.heads,
        patch=known.patch,
        weights=hash_weights(module),
        reference=reference,
        family=known.family,
        sites=known.taps,
        architecture=architecture,
        classes=None if classes is None else tuple(classes),
        notes=list(notes),
        forward=forward or known.forward or without_classifier(module),
        stages=known.stages,
        resize=resize,
    )


def _whole_image(size: tuple[int, int]) -> Preprocess:
    """Where a module says nothing about its preprocessing: see as much of the image as its shape allows."""
    return Preprocess(size, resize=size[0] if size[0] == size[1] else size)


def anatomy(module: nn.Module, size: tuple[int, int]) -> Anatomy:
    """Where a module's sites are: asked of the families in turn; an unknown module shows its own module names."""
    for name in plugins.names("families"):
        if (known := family(name)).matches(module):
            return known.anatomy(module, size)
    return Anatomy("module", 0, {name: Tap(part) for name, part in module.named_modules() if name and _computes(part)})


def _computes(module: nn.Module) -> bool:
    """Containers such as ModuleList are never called, so they have no output to see."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
