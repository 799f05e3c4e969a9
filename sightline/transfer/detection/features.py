"""The maps of an encoder that a detector sees, at any size of image.

A ViT gives the patch tokens of its last block, or of several, laid out on their grid, before the final norm; all prefix
tokens take part in its attention as ever. A CNN gives the last block of each of its stages. Every channel is
standardised by its mean and deviation over the training images, since encoders differ in scale by a factor of ten and
frozen ones cannot be trained to agree; each block by itself.

B images, D channels, maps of h × w cells.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from sightline.core.errors import InputError, counted
from sightline.core.references import parse_reference
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.families.huggingface import find_trunk, forward_at_any_size
from sightline.encoders.modules.mode import evaluating
from sightline.encoders.modules.vit import embed, encode, grid_of, is_vit
from sightline.encoders.watching import watch
from sightline.transfer.detection.pyramid import FINEST, PATCH

STAGES = 4  # of a CNN


class FeatureMaps(nn.Module):
    """An encoder as a detector sees it: images (B, 3, size, size) → maps."""

    def __init__(self, encoder: Encoder, size: int, blocks: str | int = "last") -> None:
        super().__init__()
        self.module, self.size = encoder.module, size
        self._taps, self._tokens = encoder.sites, encoder.tokens  # the taps' modules are parts of the module
        self._call = _forward_of(encoder, size)
        if encoder.tokens is not None:
            self.sites = block_sites(encoder, blocks)
            self.cell = PATCH  # pixels of the detector's frame per cell of the first map
        else:
            if str(blocks) != "last":
                raise InputError(
                    f"blocks={blocks} is for encoders with patches; of {encoder.reference} all stages are "
                    "seen, leave it out"
                )
            self.sites = self._stages(encoder)
            self.cell = FINEST
        shapes = [tuple(x.shape[1:]) for x in self.look(torch.zeros(1, 3, size, size))]
        self.shapes: list[tuple[int, ...]] = shapes  # (D, h, w) of each map
        self.frame = self.cell * shapes[0][1], self.cell * shapes[0][2]

    @property
    def staged(self) -> bool:
        """Whether the maps are those of the stages of a CNN."""
        return self._tokens is None

    def forward(self, images: Tensor) -> list[Tensor]:  # (B, 3, size, size) -> (B, D, h, w) each
        """Blocks of a ViT side by side in one map; the stages of a CNN, fine to coarse."""
        seen: dict[str, Tensor] = {}

        def keep(site: str, activation: Tensor) -> None:
            seen[site] = activation

        with watch(self._taps, self.sites, keep):
            self._call(images)
        if self._tokens is None:
            return [seen[site] for site in self.sites]
        return [torch.cat([self._map(seen[site], images) for site in self.sites], 1)]

    @torch.no_grad()
    def look(self, images: Tensor) -> list[Tensor]:
        """The same without gradients, in evaluation mode, whatever the mode is."""
        device = next(self.module.parameters()).device
        with evaluating(self.module):
            maps: list[Tensor] = self(images.to(device))
        return maps

    def _map(self, tokens: Tensor, images: Tensor) -> Tensor:  # (B, T, D) -> (B, D, h, w)
        assert self._tokens is not None
        patches = tokens[:, self._tokens.prefix :]
        side = round(patches.shape[1] ** 0.5)
        if patches.ndim != 3 or side * side != patches.shape[1]:
            raise InputError(
                f"{type(self.module).__name__} gives {tuple(tokens.shape[1:])} for images of {self.size} pixels, which "
                "are not the tokens of a square grid; choose another encoder"
            )
        return patches.transpose(1, 2).reshape(len(patches), -1, side, side)

    def _stages(self, encoder: Encoder) -> list[str]:
        """The last block at each resolution."""
        self.sites = [site for site in encoder.sites if re.fullmatch(r"block\.\d+", site)]
        maps = self.look(torch.zeros(1, 3, self.size, self.size)) if self.sites else []
        last = {tuple(x.shape[-2:]): site for site, x in zip(self.sites, maps, strict=True) if x.ndim == 4}
        sides = [h for h, _ in last]
        if len(last) != STAGES or any(-(-a // 2) != b for a, b in itertools.pairwise(sides)):
            raise InputError(
                f"{encoder.reference} has no grid of patches and no four stages, each of half the resolution, that a "
                "detector could look at; choose a ViT, a ResNet or a ConvNeXt"
            )
        return list(last.values())


class Standard(nn.Module):
    """Maps with mean 0 and deviation 1 in every channel, over the images that it was told of."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.n = len(widths)
        for i, width in enumerate(widths):
            self.register_buffer(f"mean_{i}", torch.zeros(width))
            self.register_buffer(f"scale_{i}", torch.ones(width))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:  # (B, D, h, w) each
        """(x − mean) / deviation."""
        return [
            (x.float() - self.get_buffer(f"mean_{i}").view(1, -1, 1, 1))
            * self.get_buffer(f"scale_{i}").view(1, -1, 1, 1)
            for i, x in enumerate(maps)
        ]

    @torch.no_grad()
    def learn(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Mean and deviation over all cells of these maps, in float64; a constant channel keeps its scale."""
        sums: list[Tensor] = []
        for maps in batches:
            batch_sums = [
                torch.stack([torch.full_like(s, x[:, 0].numel()), s, x.double().square().sum((0, 2, 3))])
                for x in maps
                for s in [x.double().sum((0, 2, 3))]
            ]
            sums = batch_sums if not sums else [a + b for a, b in zip(sums, batch_sums, strict=True)]
        for i, (n, first, second) in enumerate(sums):
            mean = first / n
            deviation = (second / n - mean.square()).clamp(min=0).sqrt()
            self.get_buffer(f"mean_{i}").copy_(mean)
            self.get_buffer(f"scale_{i}").copy_(torch.where(deviation > 1e-6 * mean.abs() + 1e-12, 1 / deviation, 1.0))


def whole_patches(encoder: Encoder, size: int) -> int:
    """The size of the images, or the encoder's own if it is 0, in whole patches: the next multiple.

    >>> from sightline import load_encoder
    >>> whole_patches(load_encoder("timm:vit_tiny_patch16_224@random?patch_size=14&size=56&depth=1"), 96)
    98
    """
    size = size or max(encoder.preprocess.size)
    patch = encoder.patch or 1
    return -(-size // patch) * patch


def block_sites(encoder: Encoder, blocks: str | int) -> list[str]:
    """`last`, `last-3` and numbers, separated by commas, as sites; `norm` is the last block after the final norm.

    >>> from sightline import load_encoder
    >>> vit = load_encoder("timm:vit_tiny_patch16_224@random?depth=12&embed_dim=12&num_heads=2")
    >>> block_sites(vit, "last-3,9,last")
    ['block.8', 'block.9', 'block.11']
    """
    if str(blocks) == "norm":
        if "norm" not in encoder.sites:
            raise InputError(f"blocks=norm: {encoder.reference} has no final norm over its tokens; write last")
        return ["norm"]
    numbers = []
    for word in str(blocks).split(","):
        match = re.fullmatch(r"\s*(?:(last)(?:-(\d+))?|(\d+))\s*", word)
        number = -1 if match is None else int(match[3]) if match[3] else encoder.depth - 1 - int(match[2] or 0)
        if not 0 <= number < encoder.depth:
            raise InputError(
                f"blocks={blocks}: {word.strip()!r} is not a block of {encoder.reference}, which has "
                f"{counted(encoder.depth, 'block')}; write last, last-1, … or 0 to {encoder.depth - 1}"
            )
        numbers.append(number)
    if len(set(numbers)) < len(numbers):
        raise InputError(f"blocks={blocks} names a block twice; name each once")
    return [f"block.{number}" for number in sorted(numbers)]


def check_trainable(encoder: Encoder) -> None:
    """Refuse an encoder that could not be loaded again after it was trained."""
    if encoder.architecture is None:
        raise InputError(
            f"Encoder {encoder.name!r} cannot be rebuilt from a reference, so it cannot be trained; set "
            "frozen=true, or give one such as timm:NAME or run:FOLDER"
        )


def trainable(
    encoder: Encoder, features: Callable[[Encoder], FeatureMaps], drop_path: float
) -> tuple[Encoder, FeatureMaps]:
    """A copy of the encoder to be trained, and its maps; what no gradient reaches is fixed.

    `drop_path` is the largest rate of stochastic depth, which rises over the blocks.
    """
    check_trainable(encoder)
    module = copy.deepcopy(encoder.module).requires_grad_(True)
    copied = replace(_around(encoder, module), architecture=encoder.architecture)
    if drop_path:
        _set_drop_path(copied, drop_path)
    made = features(copied)
    with evaluating(module), torch.enable_grad():  # no running statistics move
        x = torch.zeros(1, 3, made.size, made.size)
        sum(level.float().square().sum() for level in made(x)).backward()
        _forget_computed_positions(module)
        for parameter in made.module.parameters():
            parameter.requires_grad_(parameter.grad is not None)
            parameter.grad = None
    return copied, made


def _forget_computed_positions(module: nn.Module) -> None:
    """Positions that are computed for another size are not learned, although CLS has one, too, which they lie with."""
    if is_vit(module) and module.pos_embed is not None and module.pos_embed.grad is not None:
        patches = module.pos_embed.grad[:, -module.patch_embed.num_patches :]
        module.pos_embed.grad = module.pos_embed.grad if patches.any() else None


def _around(encoder: Encoder, module: nn.Module) -> Encoder:
    return build_encoder(
        module,
        reference=encoder.reference,
        name=encoder.name,
        preprocess=encoder.preprocess,
        classes=encoder.classes,
        notes=encoder.notes,
        resize=encoder.resize,
    )


def _set_drop_path(encoder: Encoder, rate: float) -> None:
    """Stochastic depth in timm's blocks, rising linearly from 0 in the first to `rate` in the last."""
    blocks = [tap.module for site, tap in encoder.sites.items() if re.fullmatch(r"block\.\d+", site)]
    changed = False
    for number, block in enumerate(blocks):
        for name in ("drop_path", "drop_path1", "drop_path2"):
            if hasattr(block, name):
                setattr(block, name, DropPath(rate * number / max(1, len(blocks) - 1)))
                changed = True
    if not changed:
        raise InputError(f"drop_path={rate} is for encoders of timm; set drop_path=0 for {encoder.reference}")


def _forward_of(encoder: Encoder, size: int) -> Callable[[Tensor], Any]:
    """How to send images of this size through."""
    module = encoder.module
    if is_vit(module):
        return lambda images: encode(module, embed(module, images, resize=encoder.resize), grid_of(module, images))
    own = encoder.tokens is None or encoder.preprocess.size == (size, size)
    if own:
        return encoder.forward or module
    if encoder.family == "huggingface" and find_trunk(module) is not None:
        return forward_at_any_size(module)
    source = "" if encoder.architecture is None else parse_reference(encoder.architecture).source
    how = f"load it with ?size={size}" if source == "timm" else f"set size={encoder.preprocess.size[0]}"
    raise InputError(f"{encoder.reference} sees images of {' × '.join(map(str, encoder.preprocess.size))} only; {how}")
