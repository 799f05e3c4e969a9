"""Encoder: a vision model with all that is needed to use it. `load_encoder("timm:vit_small_patch16_224.dino")`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor, nn

from sightline import bfloat16, plugins
from sightline.errors import InputError, nearest
from sightline.files import write_atomically
from sightline.sites import Anatomy, Tap, Tokens
from sightline.weights import check_finite, hash_weights

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Encoder", "Preprocess", "Reference", "anatomy", "load_encoder", "parse_reference", "save_encoder"]

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")  # as PIL has them
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
            raise InputError(
                f"There is no interpolation {self.interpolation!r}{nearest(self.interpolation, INTERPOLATIONS)}"
            )
        resized = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        if resized is not None and (resized[0] < self.size[0] or resized[1] < self.size[1]):
            raise InputError(
                f"Images resized to {self.resize} cannot be cropped to {self.size}; resize to at least that"
            )

    def crop(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """uint8 (H, W, 3) → uint8 (3, h, w), with PIL's antialiased resize as the official evaluations do."""
        from PIL import Image

        height, width = image.shape[:2]
        wanted = self._resized(height, width)
        if wanted != (height, width):
            how = Image.Resampling[self.interpolation.upper()]
            image = np.asarray(Image.fromarray(image).resize(wanted[::-1], how))
        top, left = (round((have - want) / 2) for have, want in zip(image.shape[:2], self.size, strict=True))
        return np.ascontiguousarray(image[top : top + self.size[0], left : left + self.size[1]].transpose(2, 0, 1))

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


@dataclass(eq=False)
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
    notes: list[str] = field(default_factory=list)
    forward: Callable[[Tensor], Any] | None = None  # where calling the module is not enough

    def __call__(self, images: Tensor) -> Any:
        """What the model says to preprocessed images (B, 3, h, w)."""
        bfloat16.ensure_for(images)
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
            "notes": self.notes,
        }

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while; every submodule gets its own mode back."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@dataclass(frozen=True)
class Reference:
    """`source:id[@weights][?option=value&…]`, taken apart."""

    source: str
    id: str
    weights: str | None
    options: dict[str, str]

    def __str__(self) -> str:
        options = "&".join(f"{key}={value}" for key, value in self.options.items())
        weights = "" if self.weights is None else f"@{self.weights}"
        return f"{self.source}:{self.id}{weights}{'?' if options else ''}{options}"


def parse_reference(text: str) -> Reference:
    """Take a reference apart.

    >>> parse_reference("timm:vit_tiny_patch16_224@random?img_size=64&seed=1")
    Reference(source='timm', id='vit_tiny_patch16_224', weights='random', options={'img_size': '64', 'seed': '1'})
    """
    match = re.fullmatch(r"([\w-]+):([^@?]+)(?:@([^?]+))?(?:\?(.*))?", text)
    if match is None:
        sources = ", ".join(plugins.names("sources"))
        raise InputError(
            f"{text!r} is not an encoder reference; expected source:id[@weights][?option=value&…], "
            f"such as timm:resnet18@random (sources: {sources})"
        )
    try:
        options = dict(parse_qsl(match[4] or "", keep_blank_values=True, strict_parsing=bool(match[4])))
    except ValueError as error:
        raise InputError(f"{text!r}: options after '?' are written option=value&option=value") from error
    return Reference(match[1], match[2], match[3], options)


def load_encoder(
    what: str | nn.Module | Encoder,
    *,
    name: str | None = None,
    preprocess: Preprocess | None = None,
    tokens: Tokens | None = None,
) -> Encoder:
    """An encoder from a reference such as `timm:vit_small_patch16_224.dino`, or around your own module.

    For a module, `preprocess` says what it wants to see and `tokens` how its tokens are laid out; both are worked
    out where the architecture is known. Modules of unknown architecture have their own module names as sites.
    """
    if isinstance(what, nn.Module):
        encoder = build_encoder(what, reference=f"module:{type(what).__name__}", preprocess=preprocess, tokens=tokens)
    else:
        encoder = replace(what) if isinstance(what, Encoder) else _load(parse_reference(what))
        if preprocess is not None:
            encoder.preprocess = preprocess
            encoder.tokens = anatomy(encoder.module, preprocess.size).tokens or encoder.tokens
        encoder.tokens = tokens or encoder.tokens
    encoder.name = name or encoder.name
    check_finite(encoder.module, encoder.name)
    return encoder


def _load(reference: Reference) -> Encoder:
    encoder: Encoder = plugins.find("sources", reference.source).load(reference)
    return encoder


def name_apart(encoders: Iterable[Encoder]) -> dict[str, Encoder]:
    """Encoders by name; of those with the same name the second becomes `name (2)`."""
    named: dict[str, Encoder] = {}
    for encoder in encoders:
        name, number = encoder.name, 2
        while encoder.name in named:
            encoder.name, number = f"{name} ({number})", number + 1
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
    notes: Sequence[str] = (),
    forward: Callable[[Tensor], Any] | None = None,
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
        notes=list(notes),
        forward=forward or known.forward,
    )


def _whole_image(size: tuple[int, int]) -> Preprocess:
    """Where a module says nothing about its preprocessing: see as much of the image as its shape allows."""
    return Preprocess(size, resize=size[0] if size[0] == size[1] else size)


def anatomy(module: nn.Module, size: tuple[int, int]) -> Anatomy:
    """Where a module's sites are: asked of the families in turn; an unknown module shows its own module names."""
    for family in plugins.names("families"):
        plugin = plugins.find("families", family)
        if plugin.matches(module):
            found: Anatomy = plugin.anatomy(module, size)
            return found
    return Anatomy("module", 0, {name: Tap(part) for name, part in module.named_modules() if name and _computes(part)})


def _computes(module: nn.Module) -> bool:
    """Containers such as ModuleList are never called, so they have no output to see."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def save_encoder(encoder: Encoder, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write `encoder.safetensors` and `encoder.json`, which `load_encoder("run:FOLDER")` reads.

    `dtype=torch.bfloat16` halves the file; what is loaded are then the rounded weights.
    """
    from safetensors.torch import save

    if encoder.architecture is None:
        raise InputError(
            f"Encoder {encoder.name!r} was made from a Python module, which cannot be built anew from a file; "
            "save encoders that were loaded from a reference such as timm:NAME"
        )
    folder = Path(folder)
    state = {key: value.detach().cpu().contiguous() for key, value in encoder.module.state_dict().items()}
    stored = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    about = {
        "format": 1,
        "architecture": encoder.architecture,
        "name": encoder.name,
        "preprocess": asdict(encoder.preprocess),
        "classes": encoder.classes,
        "weights": hash_weights({key: value.to(state[key].dtype) for key, value in stored.items()}),
    }
    write_atomically(folder / "encoder.safetensors", save(stored))
    write_atomically(folder / "encoder.json", json.dumps(about, indent=2).encode())
    return folder
