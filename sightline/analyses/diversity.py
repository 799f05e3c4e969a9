"""Diversity: how much do heads, depths and tokens repeat each other?

    cos(x, y) = x·y / (‖x‖ ‖y‖)
    heads     mean over pairs of heads, of what both give at the same token
    depths    mean over tokens, of the token before and after the attention layer (residual stream)
    tokens    mean over pairs of tokens of an image, at the output of a block
    mid       the same inside the block, after its attention layer and before its MLP

A mean over all pairs needs no pairs: with unit vectors u₁ … u_N,

    Σ_{i≠j} uᵢ·uⱼ = ‖Σᵢ uᵢ‖² − N,   so the mean is (N² ‖ū‖² − N) / (N (N − 1))

Tokens are patches; prefix tokens (CLS, registers) are left out. A vector of zeros has no direction: its cosine with
anything is 0, and an image with nothing but zeros has no mean at all (NaN).

Source: Park et al. 2023, Figure 5.

Shapes: B images, H heads, N tokens, D width, d width of a head; S layers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean
from sightline.core.results import ABSENT, ENDS, outside_decoder
from sightline.encoders.sites import entry_of, layer_type, token_view
from sightline.images.pipeline import Batch
from sightline.measure import contract
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers, add_images, mean_of_images
from sightline.measure.plan import Cost, Key, Plan
from sightline.report.figures import Figure, KeyNumber, key_number, over_depth

TOPIC = "structure"
TITLE = "Diversity"
QUESTION = "How much do the heads of a block, its input and output, and the tokens of an image repeat each other?"
FORMULA = """\
cos(x, y) = x·y / (‖x‖ ‖y‖)
heads: mean over pairs of heads and over tokens of cos(head h at token n, head h′ at token n)
depths: mean over tokens of cos(token before the attention layer, token after it), both in the residual stream
tokens: mean over pairs of patches of cos(token i, token j) = (N² ‖ū‖² − N) / (N (N − 1)), ū the mean unit vector
mid: the same of the tokens between the attention layer and the MLP"""
HOW_TO_READ = """\
1 means that they are all the same, 0 that they have nothing in common. Heads close to 1: more heads add little. Depths
close to 1: the attention layer changes the tokens little. Tokens close to 1: all places of the image have the same
representation, which is enough to name what is in the image but not where it is; where they are more alike after
attention than before it, attention is what mixes them. Contrastive encoders tend to rise towards the end everywhere,
masked image models to stay low. The cosine sees a common offset of all tokens, so compare over depth and between
encoders rather than with 0. Bands are 95 % intervals over images."""
SOURCE = 'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Section 2, Figure 5'

BLOCKS = ("block.*", "decoder.block.*")
SITES = ("embed", "decoder.embed", *(f"{block}{part}" for block in BLOCKS for part in (".heads", ".mid", "")))
SPLITS = ("test",)
ANY_SITE = False
BY_DEFAULT = True
INVARIANT_TO = frozenset({"scale", "batching", "order"})  # and to a rotation, if before and after are rotated alike

KINDS = {
    "heads": "between heads",
    "depths": "before and after attention",
    "tokens": "between tokens",
    "mid": "between tokens after attention",
}


# The pure functions


def token_cosine(tokens: Array) -> Array:
    """Mean cosine between two tokens of an image, (B, N, D) → (B,); leave prefix tokens out beforehand.

    >>> token_cosine(np.array([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]]))  # of three pairs one points the same way
    array([0.33333333])
    """
    x = _floating(tokens, "images, tokens, width")
    return like(tokens, _token_cosine(x, _norms(x)))


def head_cosine(heads: Array) -> Array:
    """Mean cosine between two heads at the same token, over pairs of heads and tokens, (B, H, N, d) → (B,).

    >>> head_cosine(np.array([[[[1.0, 1.0]], [[2.0, 2.0]], [[1.0, -1.0]]]]))
    array([0.33333333])
    """
    x = _floating(heads, "images, heads, tokens, width")
    norms, total = _norms(x), torch.zeros_like(x[:, 0])  # (B, H, N), (B, N, d)
    for head, inverse in zip(x.unbind(1), _inverse(norms).unsqueeze(-1).unbind(1), strict=True):
        total.addcmul_(head, inverse)  # one after the other: unit vectors of all heads would not fit into the cache
    squares = _norms(total).double().square().sum(-1)
    return like(heads, _mean_of_pairs(squares, norms.flatten(1), x.shape[1], groups=x.shape[2]))


def depth_cosine(before: Array, after: Array) -> Array:
    """Mean cosine between a token before and after a layer, two (B, N, D) → (B,).

    >>> depth_cosine(np.array([[[1.0, 0.0], [0.0, 1.0]]]), np.array([[[5.0, 0.0], [1.0, 1.0]]])).round(4)
    array([0.8536])
    """
    x, y = (_floating(tokens, "images, tokens, width") for tokens in (before, after))
    if x.shape != y.shape:
        raise InputError(f"The tokens before are {tuple(x.shape)} and after {tuple(y.shape)}; give the same tokens")
    return like(after, _depth_cosine(x, _norms(x), y, _norms(y)))


def _token_cosine(x: Tensor, norms: Tensor) -> Tensor:
    total = (_inverse(norms).unsqueeze(1) @ x).squeeze(1)  # (B, D), without unit vectors of all tokens
    return _mean_of_pairs(total.double().square().sum(-1), norms, x.shape[1])


def _depth_cosine(x: Tensor, x_norms: Tensor, y: Tensor, y_norms: Tensor) -> Tensor:
    cosines = _dot(x, y) * _inverse(x_norms) * _inverse(y_norms)  # (B, N)
    nonzero = ((x_norms != 0) & (y_norms != 0)).any(1)
    return torch.where(nonzero, cosines.mean(1, dtype=torch.float64), torch.nan)


def _mean_of_pairs(squares: Tensor, norms: Tensor, count: int, groups: int = 1) -> Tensor:
    """Mean cosine from Σ ‖Σᵢ uᵢ‖² of `groups` of `count` vectors each, whose `norms` (B, …) say which are not zero."""
    some, pairs = (norms > 0).sum(1), groups * count * (count - 1)
    return torch.where(some * pairs > 0, (squares - some) / max(pairs, 1), torch.nan)


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def _inverse(norms: Tensor) -> Tensor:
    """1 / norm; a vector of zeros stays one. An ε in its place would break the invariance to scale."""
    return torch.where(norms == 0, 0.0, norms.reciprocal())


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """x·y over the last axis. On the CPU numpy's is more than twice as fast: it makes no product as large as x."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.vecdot(x.numpy(force=True), y.numpy(force=True)))
    products: Tensor = torch.linalg.vecdot(x, y)
    return products


def _floating(values: Tensor | np.ndarray[Any, Any], axes: str) -> Tensor:
    """As a tensor of float32 or float64 with these axes."""
    x = as_tensor(values)
    if x.ndim != axes.count(",") + 1:
        raise InputError(f"The cosine needs an array ({axes}), not one of shape {tuple(x.shape)}")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# The streaming analysis


class DiversityAnalysis(contract.Analysis):
    """Sums the cosines of every block over images; keeps the stream until its attention layer has seen it.

    `sums` and `flawed` have a row for each kind of each layer.
    """

    sums: Tensor  # (G, S · kinds, 3, 1): images, Σx, Σx²
    flawed: Tensor  # (S · kinds,): images that have no cosine

    def __init__(self, config: contract.NoSettings, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        blocks = {e: [s for s in sites if layer_type(s) == "block"] for e, sites in plan.sites.items()}
        self.layers = Layers(blocks, plan.stages)
        self.reasons = [_why_not(plan, *layer, kind) for layer in self.layers for kind in KINDS]
        rows = [(encoder, block, kind) for encoder, block in self.layers for kind in KINDS]
        measured = [(row, number) for number, row in enumerate(rows) if not self.reasons[number]]
        self.rows: dict[tuple[str, str], dict[str, int]] = {}  # encoder and site → the kinds there, and their rows
        for (encoder, block, kind), number in measured:
            self.rows.setdefault((encoder, _site_of(block, kind)), {})[kind] = number
        self.entries = {(encoder, entry_of(block)) for (encoder, block, kind), _ in measured if kind == "depths"}
        # encoder → the patches that enter its next attention layer, and their norms
        self.before: dict[str, tuple[Tensor, Tensor]] = {}
        self.groups = ImageGroups(plan.images, plan.splits)
        self.add_state("sums", torch.zeros(GROUPS, len(rows), 3, 1, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("flawed", torch.zeros(len(rows), dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> dict[str, Tensor]:
        """The cosines (B,) that are taken at this site, by their kind."""
        at, tokens = key[:2], self.plan.encoders[key.encoder].tokens
        kinds = self.rows.get(at, {})
        if "heads" in kinds:
            return {"heads": head_cosine(activation[:, :, tokens.prefix if tokens is not None else 0 :])}
        patches = token_view(activation, "patches", tokens) if kinds or at in self.entries else None
        if patches is None:
            return {}
        patches = _floating(patches, "images, tokens, width")
        norms = _norms(patches)
        cosines: dict[str, Tensor] = {}
        for kind in kinds.keys() & {"tokens", "mid"}:
            cosines[kind] = _token_cosine(patches, norms)
        if "depths" in kinds:
            cosines["depths"] = _depth_cosine(*self.before.pop(key.encoder), patches, norms)
        if at in self.entries:  # a copy, since a block may add to the stream in place
            self.before[key.encoder] = patches.clone(), norms
        return cosines

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        members = self.groups.members(batch, self.sums.device)
        for key, cosines in reductions.items():
            for kind, values in cosines.items():
                row = self.rows[key[:2]][kind]
                add_images(self.sums, row, values.unsqueeze(1), members)
                self.flawed[row] += values.isnan().sum()

    def compute(self) -> xr.Dataset:
        shape = (len(self.layers), len(KINDS))
        images, flawed = self.sums[:, :, 0, 0].sum(0).tolist(), self.flawed.tolist()
        reasons = [why or _flaw(bad, n) for why, bad, n in zip(self.reasons, flawed, images, strict=True)]
        parts = dict(zip([f"cosine{end}" for end in ENDS], mean_of_images(self.sums), strict=True))
        dims = ("encoder", "site", "kind")
        variables = {name: (dims, self.layers.spread(values.reshape(shape))) for name, values in parts.items()}
        reason = self.layers.spread(np.array(reasons).reshape(shape), ABSENT)
        result = xr.Dataset(
            {**variables, "reason": (dims, reason)},
            coords={**self.layers.coords(), "kind": list(KINDS)},
            attrs={"interval": "95 % over images, normal", "tokens": "patches"},
        )
        kept, by_group = Kept({"group": self.groups.axis}), (*dims[:2], "group", dims[2])
        count, total = (self.layers.by_group(self.sums[:, :, n, 0].reshape(-1, *shape)) for n in range(2))
        kept.add("cosine", Mean("sum", "images"), sum=(by_group, total), images=(by_group, count))
        return kept.beside(result.transpose("kind", "encoder", "site"))


def _flaw(bad: float, images: float) -> str:
    """Why a cosine that can be taken has no mean, or nothing."""
    if not images:
        return "no image could be read"
    return f"in {bad:.0f} of {images:.0f} images all vectors are zero, or some are not finite" if bad else ""


def _site_of(block: str, kind: str) -> str:
    """Where a cosine of a block is taken."""
    return {"heads": f"{block}.heads", "tokens": block}.get(kind, f"{block}.mid")


def _why_not(plan: Plan, encoder: str, block: str, kind: str) -> str:
    """Why a cosine cannot be taken in a block, or nothing."""
    shapes, tokens, site = plan.shapes[encoder], plan.encoders[encoder].tokens, _site_of(block, kind)
    if site not in plan.sites[encoder]:
        what = "attention heads" if kind == "heads" else "stream between attention and MLP"
        return f"the {what} of this block cannot be observed"
    if kind == "heads":
        if len(shapes[site]) != 3 or (tokens is not None and shapes[site][1] != tokens.count):
            return "the heads do not process the tokens of the image one by one"
        return "" if shapes[site][0] > 1 else "a single head has no pair"
    if kind == "depths" and shapes.get(entry_of(block)) != shapes[site]:
        return "the stream that enters this block cannot be observed"
    patches = token_view(torch.empty(1, *shapes[site], device="meta"), "patches", tokens)
    if patches is None:
        return "this site has no patch tokens"
    return "" if kind == "depths" or patches.shape[1] > 1 else "a single token has no pair"


def cost(config: contract.NoSettings, plan: Plan) -> Cost:
    streams = [max(np.prod(shapes[s]) for s in plan.sites[e]) for e, shapes in plan.shapes.items() if e in plan.sites]
    return Cost(memory=4 * plan.batch * int(sum(streams)) + 96 * sum(map(len, plan.sites.values())), disk=0)


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    panels = result.transpose("kind", ...).assign_coords(panel_title=("kind", [KINDS[k] for k in result.kind.values]))
    caption = (
        "Cosine between two heads at the same token, between a token before and after the attention layer, and between "
        "two patch tokens of an image, at the output of a block and inside it, after attention. High in the last "
        "blocks: heads, layers or places repeat each other. Bands are 95 % intervals over images."
    )
    return over_depth(
        panels, "cosine", title="Cosine over depth", caption=caption, value_title="cosine", facet="panel_title"
    )


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for name in result.encoder.values:
        cosines = result.cosine.sel(encoder=name, site=outside_decoder(result.site.values))
        sites = cosines.sel(kind="tokens").dropna("site").site
        if sites.size:
            last = cosines.sel(site=sites[-1].item())
            others = [f", {KINDS[k]} {last.sel(kind=k):.2f}" for k in ("heads", "depths") if last.sel(kind=k).notnull()]
            detail = f"cosine between tokens in {last.site.item()}" + "".join(others)
            lines.append((str(name), f"{last.sel(kind='tokens'):.2f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    tokens = result.sel(kind="tokens")
    return key_number(
        tokens, "cosine", at="last", title="token cosine", about="cosine between the tokens in the last block"
    )
