"""Token clouds: what does attention do to the tokens of an image, and do tokens cluster by image or by class?

Clouds: the patch tokens of an image before and after the attention of a block (both of the residual stream) on the
first right singular vectors of the two together, centred:

    [X_before; X_after] − mean = U Σ Vᵀ,    coordinates = the first columns of U Σ

One basis for both, so that a shift common to all tokens is seen even if it leaves the plane in which they lay before.

Silhouette of a token: (b − a) / max(a, b), with a its mean distance to the others of its group and b that to the
nearest other group (Rousseeuw 1987); groups are images, or classes. t-SNE is a picture of the same distances.

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 6, E.2 and E.3a.

Shapes: I images of the sample, C of them with clouds, T tokens of each that are kept, N patches, D width, S layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from sightline.analyses.tokens.charts import figures as figures
from sightline.analyses.tokens.charts import headlines as headlines
from sightline.analyses.tokens.charts import key_numbers as key_numbers
from sightline.analyses.tokens.clouds import (
    AXES,
    ITERATIONS,
    PERPLEXITY,
    distances_of,
    embed,
    silhouettes,
    silhouettes_left_out,
)
from sightline.analyses.tokens.clouds import silhouette as silhouette
from sightline.analyses.tokens.clouds import token_clouds as token_clouds
from sightline.core.errors import InputError
from sightline.core.groups import Kept, LeftOut
from sightline.core.keyed_random import id_keys, mix
from sightline.core.processes import shared
from sightline.core.results import ABSENT, ENDS, NOT_FINITE
from sightline.encoders.sites import entry_of, layer_type, token_view
from sightline.images.pipeline import Batch
from sightline.measure import contract
from sightline.measure.estimators.intervals import jackknife
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers, add_images, mean_of_images
from sightline.measure.plan import Cost, Key, Plan

TOPIC = "structure"
TITLE = "Token clouds"
QUESTION = "What does attention do to the tokens of an image, and do tokens cluster by image or by class?"
FORMULA = """\
cloud: the first columns of U Σ, where [tokens before; tokens after attention] − mean = U Σ Vᵀ
silhouette of a token = (b − a) / max(a, b), a: mean distance to its own group, b: to the nearest other group"""
HOW_TO_READ = """\
Each point is a patch token. In the clouds, compare the tokens before attention with those after it: if the cloud moves
as a whole and keeps its shape, attention adds the same to every token, as in the late blocks of contrastive encoders;
if it changes its shape or grows, tokens are treated one by one, as in masked ones. Where clouds of two images share
their axes, look whether attention moves their centres apart. In t-SNE, islands of one image each say that the tokens of
an image are alike and images distinct; a mixture says that tokens differ by what is at their place. The
silhouette is the number behind that picture, from −1 to 1: near 1, groups are compact and far apart; near 0, they are
intermingled; below 0, tokens are nearer to another group. Distances between islands, and their sizes, mean nothing in
t-SNE, and the axes of a cloud differ from panel to panel."""
SOURCE = (
    'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Figures 6, E.2 and E.3a; '
    "Rousseeuw 1987 (silhouette); van der Maaten, Hinton 2008 (t-SNE)"
)
SITES = ("embed", "block.*", "block.*.mid", "decoder.embed", "decoder.block.*", "decoder.block.*.mid")
SPLITS = ("test",)
ANY_SITE = False
BY_DEFAULT = True
INVARIANT_TO: frozenset[str] = frozenset()  # silhouettes and clouds are; t-SNE makes much of the last bit of its input

MOMENTS = ("before", "after")


@dataclass(frozen=True)
class TokensConfig:
    """`clouds` images are shown before and after attention; `tokens` each of `images`, of `classes`, are compared."""

    clouds: int = 2
    images: int = 18
    classes: int = 3
    tokens: int = 25
    tsne: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.clouds <= self.images or not 1 <= self.classes <= self.images or self.tokens < 1:
            raise InputError(
                f"Token clouds need 1 to {self.images} images with clouds and classes, and a token of each, "
                f"not {self.clouds}, {self.classes} and {self.tokens}"
            )


# The streaming analysis


class TokensAnalysis(contract.Analysis):
    """Keeps the tokens of a few images at every layer; all is computed at the end."""

    seen: Tensor  # (I,)
    # and for the layers tokens_0, tokens_1, … float32 (I, T, D), clouds_0, clouds_1, … float32 (C, N, D)

    def __init__(self, config: TokensConfig, plan: Plan) -> None:
        super().__init__()
        self.config, self.plan, self.layers = config, plan, Layers(plan.sites, plan.stages)
        self.rows, self.shown = _choose(plan, config)
        self.slots = torch.full((len(plan.images.indices(SPLITS[0])),), -1)
        self.slots[self.rows] = torch.arange(len(self.rows))
        self.pairs = {encoder: _pairs(plan, encoder) for encoder in plan.sites}
        self.kept = _kept(plan, config)
        self.add_state("seen", torch.zeros(len(self.rows), dtype=torch.float64), dist_reduce_fx="sum")
        for i, (places, patches, width) in enumerate(self.kept):
            self.add_state(f"tokens_{i}", torch.zeros(len(self.rows), len(places), width), dist_reduce_fx="sum")
            self.add_state(f"clouds_{i}", torch.zeros(len(self.shown), patches, width), dist_reduce_fx="sum")

    def begin(self, batch: Batch) -> None:
        slots = self.slots[batch.rows] if batch.split == SPLITS[0] else torch.full_like(batch.rows, -1)
        self.here = (slots >= 0).nonzero()[:, 0]
        self.at = slots[self.here]
        self.cloud_here, self.cloud_at = (slots[:, None] == torch.from_numpy(self.shown)).nonzero(as_tuple=True)

    def reduce(self, key: Key, activation: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of the images that are in the sample the tokens to compare and, if they are shown, all patches."""
        patches = token_view(activation, "patches", self.plan.encoders[key.encoder].tokens) if len(self.here) else None
        if patches is None:
            return None
        places, shown, _ = self.kept[self.layers.index(key.encoder, key.site)]
        return patches[self.here[:, None], places].float(), patches[self.cloud_here, :shown].float()

    def update(self, batch: Batch, reductions: Mapping[Key, tuple[Tensor, Tensor] | None]) -> None:
        self.seen[self.at] += 1
        for (encoder, site, _), tokens in reductions.items():
            if tokens is not None:
                self._state("tokens", encoder, site)[self.at] = tokens[0]
                self._state("clouds", encoder, site)[self.cloud_at] = tokens[1]

    def _state(self, name: str, encoder: str, site: str) -> Tensor:
        state: Tensor = getattr(self, f"{name}_{self.layers.index(encoder, site)}")
        return state

    def compute(self) -> xr.Dataset:
        images, seen = self.plan.images, (self.seen > 0).cpu()
        labels = torch.from_numpy(images.labels_of(SPLITS[0]))[self.rows]
        ids = images.ids[images.indices(SPLITS[0])][self.rows]
        sites = {e: [s for s in sites if not s.endswith(".mid")] for e, sites in self.plan.sites.items()}
        stream = Layers(sites, self.plan.stages)
        tokens = [self._state("tokens", *layer).cpu()[seen] for layer in stream]
        groups = ImageGroups(images, SPLITS[:1])
        kept = Kept({"group": groups.axis})
        of_images = torch.from_numpy(groups.of(SPLITS[0])[self.rows])[seen]
        result = xr.Dataset(
            self._silhouettes(stream, tokens, labels[seen], of_images, kept)
            | self._clouds(stream, seen[self.shown].numpy())
            | self._tsne(stream, tokens, seen.numpy()),
            coords=stream.coords()
            | {
                "moment": list(MOMENTS),
                "axis": np.arange(1, AXES + 1),
                "image": ids,
                "image_class": (
                    "image",
                    [images.classes[label] if label >= 0 else "none" for label in labels.tolist()],
                ),
                "cloud_image": ids[self.shown],
            },
            attrs={
                "images": int(seen.sum()),
                "tokens": f"at most {self.config.tokens} of an image, evenly over its grid",
                "distance": "Euclidean",
                "interval": "95 % over images",
                "tsne": f"perplexity {PERPLEXITY}, {ITERATIONS} iterations, seed {self.plan.seed}",
            },
        )
        return kept.beside(result)

    def _silhouettes(
        self, stream: Layers, tokens: Sequence[Tensor], labels: Tensor, groups: Tensor, kept: Kept
    ) -> dict[str, Any]:
        scores, left_out, reasons = zip(*shared(tokens, lambda x: _scores(x, labels, groups)), strict=True)
        values, whys = np.array(scores), np.array(reasons)  # (S, 2, 3), (S, 2)
        without = np.array(left_out)  # (S, 2, G)
        layer = ("encoder", "site")
        variables: dict[str, Any] = {}
        for kind, name in enumerate(("silhouette_image", "silhouette_class")):
            for bound, end in enumerate(ENDS):
                variables[f"{name}{end}"] = (layer, stream.spread(values[:, kind, bound]))
            variables[f"{name}_reason"] = (layer, stream.spread(whys[:, kind], ABSENT))
            part = ((*layer, "group"), stream.spread(without[:, kind]))
            kept.add(name, LeftOut(f"{name}_kept"), **{f"{name}_kept": part})
        return variables

    def _clouds(self, stream: Layers, seen: npt.NDArray[Any]) -> dict[str, Any]:
        """Clouds in the basis of each image, and in one basis of all that are shown."""
        most = max(1, *(patches for _, patches, _ in self.kept))
        coordinates = np.full((2, len(stream), len(self.shown), 2, most, AXES), np.nan)
        reasons = []
        for i, (encoder, site) in enumerate(stream):
            if site not in self.pairs[encoder]:
                unseen = "the attention of this block cannot be observed"
                reasons.append(unseen if "block" in site else "this enters the first block")
                continue
            pair = torch.stack([self._state("clouds", encoder, s).cpu()[seen] for s in self.pairs[encoder][site]])
            reasons.append(_flaw(pair))  # (2, C, N, D)
            if not reasons[-1]:
                n = pair.shape[2]
                alone = [token_clouds(*image) for image in pair.transpose(0, 1)]
                joint = token_clouds(*pair.flatten(1, 2)).reshape(2, -1, n, AXES)
                coordinates[0, i, seen, :, :n] = torch.stack(alone)
                coordinates[1, i, seen, :, :n] = joint.transpose(0, 1)
        dims = ("encoder", "site", "cloud_image", "moment", "patch", "axis")
        return {
            "cloud": (dims, stream.spread(coordinates[0])),
            "cloud_joint": (dims, stream.spread(coordinates[1])),
            "cloud_reason": (dims[:2], stream.spread(reasons, ABSENT)),
        }

    def _tsne(self, stream: Layers, tokens: Sequence[Tensor], seen: npt.NDArray[Any]) -> dict[str, Any]:
        """t-SNE of the last block of each encoder; a decoder's blocks are not the encoder's."""
        points = np.full((len(stream.encoders), len(seen), max(x.shape[1] for x in tokens), 2), np.nan)
        reasons, sites, todo = [], [], {}
        for e, encoder in enumerate(stream.encoders):
            blocks = [site for site in stream.of[encoder] if layer_type(site) == "block" and "decoder" not in site]
            sites.append(blocks[-1] if blocks else "")
            x = tokens[stream.index(encoder, blocks[-1])] if blocks else torch.empty(0, 0, 0, device="cpu")
            if not self.config.tsne:
                reasons.append("not asked for (tsne=False)")
            elif 0 < len(x) * x.shape[1] < 5:
                reasons.append("there are fewer than five tokens")
            else:
                reasons.append(_flaw(x))
            if not reasons[-1]:
                todo[e] = x
        embedded = shared(list(todo.values()), lambda x: embed(x.flatten(0, 1), self.plan.seed))
        for (e, x), places in zip(todo.items(), embedded, strict=True):
            points[e, seen, : x.shape[1]] = places.reshape(*x.shape[:2], 2)
        return {
            "tsne": (("encoder", "image", "token", "tsne_axis"), points),
            "tsne_site": ("encoder", sites),
            "tsne_reason": ("encoder", reasons),
        }


def _choose(plan: Plan, config: TokensConfig) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Rows of the sample in order of class, and which of them are shown as clouds, spread over the classes.

    Few classes with several images each, as far as there are; those with enough images come first, in an order drawn
    from the seed. Without any labels all images are of one class.
    """
    labels = plan.images.labels_of(SPLITS[0])
    keys = mix(id_keys(plan.images.ids[plan.images.indices(SPLITS[0])]), plan.seed)
    rows = np.lexsort((keys, labels))
    rows = rows[labels[rows] >= 0] if (labels >= 0).any() else rows
    classes, starts, sizes = np.unique(labels[rows], return_index=True, return_counts=True)
    share = np.minimum(sizes, -(-config.images // min(config.classes, len(classes))))
    turn = np.lexsort((mix(classes.astype(np.uint64), plan.seed), -share))
    chosen = np.concatenate([rows[starts[c] : starts[c] + share[c]] for c in turn])[: config.images]
    shown = np.linspace(0, len(chosen), min(config.clouds, len(chosen)), endpoint=False).astype(np.int64)
    return chosen, shown


def _pairs(plan: Plan, encoder: str) -> dict[str, tuple[str, str]]:
    """Block → the sites of the stream before and after its attention."""
    sites, shapes = plan.sites[encoder], plan.shapes[encoder]
    pairs = {}
    for after in (site for site in sites if site.endswith(".mid")):
        block = after.removesuffix(".mid")
        before = entry_of(block)
        if {block, before} <= set(sites) and shapes[before] == shapes[after]:
            pairs[block] = (before, after)
    return pairs


def _kept(plan: Plan, config: TokensConfig) -> list[tuple[Tensor, int, int]]:
    """Of every layer which patches are compared (T,), how many make a cloud, and the width; 0 where not needed."""
    kept = []
    for encoder, site in Layers(plan.sites):
        tokens, shape = plan.encoders[encoder].tokens, plan.shapes[encoder][site]
        patches = token_view(torch.empty(1, *shape, device="meta"), "patches", tokens)
        n, width = (0, 0) if patches is None else patches.shape[1:]
        grid = tokens.grid if tokens is not None else (shape[1], shape[2]) if len(shape) == 3 else (1, n)
        compared = config.tokens if n and not site.endswith(".mid") else 0
        shown = n if any(site in pair for pair in _pairs(plan, encoder).values()) else 0
        kept.append((_spread_over(grid, compared), shown, width))
    return kept


def _spread_over(grid: tuple[int, int], count: int) -> Tensor:
    """At most `count` positions of a grid (rows, columns), evenly over both.

    >>> _spread_over((4, 4), 4).tolist(), _spread_over((1, 6), 4).tolist()
    ([5, 7, 13, 15], [0, 2, 3, 5])
    """
    short, long = sorted(grid)
    few = min(short, max(1, round(math.sqrt(count * short / long))))
    sizes = (few, min(long, count // few))
    sizes = sizes if grid[0] <= grid[1] else sizes[::-1]
    rows, columns = (((torch.arange(n) + 0.5) * of / max(n, 1)).long() for n, of in zip(sizes, grid, strict=True))
    return (rows[:, None] * grid[1] + columns).flatten()


def _flaw(x: Tensor) -> str:
    """Why nothing can be computed from tokens (…, D), or nothing."""
    if 0 in x.shape[-2:]:
        return "this site has no patch tokens"
    if not x.numel():
        return "none of the images of the sample could be read"
    if not x.isfinite().all():
        return NOT_FINITE
    return "all tokens are the same" if (x == x.flatten(0, -2)[0]).all() else ""


def _scores(x: Tensor, labels: Tensor, of_images: Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any], tuple[str, str]]:
    """Silhouettes by image and by class of tokens (I, T, D), (2, 3) with their interval over images, and reasons.

    Also those without each group of images, (2, G); `of_images` (I,) are the groups.
    """
    classes, flaw = len(torch.unique(labels[labels >= 0])), _flaw(x)
    by_image = by_class = flaw
    if not flaw and 1 in x.shape[:2]:
        by_image = "there is a single image" if len(x) == 1 else "there is a single token of each image"
    if not flaw and classes in (0, 1, len(x)):
        by_class = "the sample has no two classes" if classes < 2 else "no two images of the sample share a class"
    reasons = (by_image, by_class)
    scores, left_out = np.full((2, 3), np.nan), np.full((2, GROUPS), np.nan)
    out = torch.arange(GROUPS, device=of_images.device)[:, None] == of_images
    each = torch.eye(len(x), dtype=torch.float64, device=x.device)
    distances = None if all(reasons) else distances_of(x.flatten(0, 1))
    numbers = torch.arange(len(x), device=x.device)
    for row, groups in enumerate((numbers, labels)):
        if not reasons[row] and distances is not None:
            groups = groups.repeat_interleave(x.shape[1])
            means = torch.from_numpy(silhouettes(distances, groups)).view(x.shape[:2]).mean(1)
            sums = torch.zeros(len(x), 1, 3, 1, dtype=torch.float64, device=x.device)
            add_images(sums, 0, means[:, None], each)
            scores[row] = np.ravel(mean_of_images(sums))
            images = numbers.repeat_interleave(x.shape[1])
            left_out[row] = scores[row, 0]  # of most groups the sample has no image
            some = out.any(1)
            without = silhouettes_left_out(distances, images, groups, out[some])
            left_out[row, some.numpy(force=True)] = without
            if row == 1:  # images of a class share its other images, so that their silhouettes vary together
                scores[row, 1:] = jackknife(scores[row, 0], without)
    return scores, left_out, reasons


def cost(config: TokensConfig, plan: Plan) -> Cost:
    images, clouds = map(len, _choose(plan, config))
    kept = _kept(plan, config)
    numbers = sum((images * len(places) + clouds * patches) * width for places, patches, width in kept)
    pairs = max(images * len(places) for places, _, _ in kept) ** 2
    return Cost(memory=4 * numbers + 40 * pairs, disk=0)
