"""Fourier: does a layer hold fine detail of the image, or only what is the same over large areas?

    F_k = Σ_rc x_rc exp(−iπ f_k (r + c)),   f_k = 2k/g,   k = 0 … ⌊g/2⌋     for every image and channel
    Δ log amplitude at f_k π = mean over images and channels of log(|F_k| + 10⁻⁶) − log(|F_0| + 10⁻⁶)

x are the patches of the residual stream, before any final norm, on their g × g grid. F_k is the half-diagonal of the
two-dimensional Fourier transform from the lowest frequency, 0, to the highest that a grid can show, π (one period in
two patches; (g − 1)/g · π if g is odd). Nothing else of the transform is needed: cosines and sines of r + c are a small
matrix, and its product with the patches takes about a hundredth of the time of a block.

A grid of g_h × g_w patches takes the frequencies of its shorter side in both directions, g = min(g_h, g_w). The waves
of the shorter side sum to zero, so a constant still shows at frequency 0 alone.

Source: Park et al. 2023, Section 3, after Park & Kim 2022. Their code stops one step before π on even grids, at
k = ⌈g/2⌉ − 1; that number is `official` in the result.

Shapes: B images, N patches, D channels, K frequencies, S layers.
"""

from collections.abc import Mapping

import altair as alt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from sightline.core.arrays import Array, as_tensor, like
from sightline.core.errors import InputError
from sightline.core.groups import Kept, Mean
from sightline.core.results import ABSENT, ENDS, NOT_FINITE, outside_decoder
from sightline.encoders.sites import token_view
from sightline.images.pipeline import Batch
from sightline.measure import contract
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.layers import Layers, add_images, mean_of_images
from sightline.measure.plan import Cost, Key, Plan
from sightline.report.figures import FIRST, Figure, KeyNumber, key_number, over_depth, present

TOPIC = "structure"
TITLE = "Fourier"
QUESTION = "Does a layer hold fine detail of the image, or only what is the same over large areas?"
FORMULA = """\
F_k = Σ_rc x_rc exp(−iπ f_k (r + c)),  f_k = 2k/g,  k = 0 … ⌊g/2⌋, for each image and channel on g × g patches
Δ log amplitude at f_k π = mean over images and channels of log(|F_k| + 10⁻⁶) − log(|F_0| + 10⁻⁶)"""
HOW_TO_READ = """\
Each channel of a layer is a small picture, one number for each patch; its Fourier transform says how much of it varies
slowly (towards 0) and how much from each patch to the next (towards 1.0π). The amplitude is taken relative to frequency
0, the mean of the picture, on a logarithmic scale: −1 is a factor of e less. Low values at high frequencies: the layer
holds global structure, such as shape; values near 0: it keeps local detail, such as texture. Contrastive encoders tend
to fall in their last blocks, masked image models to stay high until late. Bands are 95 % intervals over images."""
SOURCE = (
    'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Section 3, Figures 9, 10b, 12c, F.1b; '
    'Park, Kim 2022, "How Do Vision Transformers Work?"'
)
SITES = ("embed", "block.*", "decoder.embed", "decoder.block.*")
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = True
INVARIANT_TO = frozenset({"batching", "order"})  # and to scale, as far as amplitudes are well above 10⁻⁶

EPSILON = 1e-6


# The pure function


def relative_log_amplitude(tokens: Array, grid: tuple[int, int], prefix: int = 0) -> tuple[Array, Array]:
    """Frequencies (K,) in fractions of π, and Δ log amplitudes (K,) averaged over images and channels, in float64.

    `tokens` (B, T, D) are `prefix` tokens to leave out, then the patches of the grid (rows, columns), row by row.

    >>> rows, columns = np.indices((4, 4))
    >>> checkers = 2.0 + (-1.0) ** (rows + columns)  # a mean of 2, and 1 that changes from patch to patch
    >>> frequencies, amplitudes = relative_log_amplitude(checkers.reshape(1, 16, 1), (4, 4))
    >>> frequencies, np.exp(amplitudes).round(3)
    (array([0. , 0.5, 1. ]), array([1. , 0. , 0.5]))
    """
    x = as_tensor(tokens)
    if x.ndim != 3 or prefix < 0 or x.shape[1] != prefix + grid[0] * grid[1]:
        raise InputError(
            f"The Fourier analysis needs tokens (images, {prefix} + {grid[0]} × {grid[1]}, channels), "
            f"not an array of shape {tuple(x.shape)}; give the grid (rows, columns) and the number of prefix tokens"
        )
    logs = amplitudes(x[:, prefix:].double(), waves(grid)).add(EPSILON).log().mean((0, 2))
    return like(tokens, frequencies(grid).to(x.device)), like(tokens, logs - logs[0])


def frequencies(grid: tuple[int, int]) -> Tensor:
    """Frequencies of the half-diagonal in fractions of π, 0 first.

    >>> frequencies((4, 7)), frequencies((7, 7))[-1].item() * 7
    (tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64), 6.0)
    """
    side = min(grid)
    return 2 * torch.arange(side // 2 + 1, dtype=torch.float64, device="cpu") / side


def waves(grid: tuple[int, int]) -> Tensor:
    """cos(π f_k (r + c)) for every frequency, then sin, (2K, N)."""
    side, (rows, columns) = min(grid), grid
    steps = (torch.arange(rows, device="cpu")[:, None] + torch.arange(columns, device="cpu")).flatten()  # r + c
    # Whole turns are taken off as integers, so that no large angle is rounded.
    turns = (torch.arange(side // 2 + 1, device="cpu")[:, None] * steps % side).double() / side
    return torch.cat([torch.cos(2 * torch.pi * turns), torch.sin(2 * torch.pi * turns)])


def amplitudes(patches: Tensor, waves: Tensor) -> Tensor:
    """|F_k| of every image and channel, (B, N, D) → (B, K, D)."""
    cosines, sines = (waves.to(patches) @ patches).chunk(2, 1)
    return torch.hypot(cosines, sines)


# The streaming analysis


class FourierAnalysis(contract.Analysis):
    """Sums Δ log amplitudes over images, for every layer on its own grid."""

    sums: Tensor  # (G, S, 3, K): images, Σx, Σx²
    flat: Tensor  # (S,): images that are the same at all positions

    def __init__(self, config: contract.NoSettings, plan: Plan) -> None:
        super().__init__()
        self.plan, self.layers = plan, Layers(plan.sites, plan.stages)
        self.grids = {layer: _grid(plan, *layer) for layer in self.layers}
        self.waves = {grid: waves(grid) for grid in {g for g in self.grids.values() if g is not None}}
        most = max((min(grid) // 2 + 1 for grid in self.waves), default=1)
        self.groups, shape = ImageGroups(plan.images, plan.splits), (GROUPS, len(self.layers), 3, most)
        self.add_state("sums", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("flat", torch.zeros(len(self.layers), dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key: Key, activation: Tensor) -> tuple[Tensor, Tensor] | None:
        """Δ log amplitudes (B, K) of a layer, and which images are flat (B,)."""
        grid = self.grids[key.encoder, key.site]
        patches = token_view(activation, "patches", self.plan.encoders[key.encoder].tokens)
        if grid is None or min(grid) < 2 or patches is None:
            return None
        patches = patches if patches.dtype in (torch.float32, torch.float64) else patches.float()
        amplitude = amplitudes(patches, self.waves[grid])
        # What is left of a constant is rounding, a few ε of its sum.
        peaks = amplitude.amax(-1)
        flat = peaks[:, 1:].amax(-1) <= 16 * torch.finfo(amplitude.dtype).eps * peaks[:, 0]
        logs = amplitude.add_(EPSILON).log_().mean(-1, dtype=torch.float64)
        return logs - logs[:, :1], flat

    def update(self, batch: Batch, reductions: Mapping[Key, tuple[Tensor, Tensor] | None]) -> None:
        members = self.groups.members(batch, self.sums.device)
        for key, logs_and_flat in reductions.items():
            if logs_and_flat is not None:
                layer = self.layers.index(key.encoder, key.site)
                add_images(self.sums, layer, logs_and_flat[0], members)
                self.flat[layer] += logs_and_flat[1].sum()

    def compute(self) -> xr.Dataset:
        grids, parts = list(self.grids.values()), np.stack(mean_of_images(self.sums))  # (mean, low, high; S, K)
        images, flat = self.sums[:, :, 0, 0].sum(0).tolist(), self.flat.tolist()
        reasons = [_reason(*about) for about in zip(grids, parts[0, :, 0], images, flat, strict=True)]
        parts[:, np.array(reasons) != ""] = np.nan
        axis = np.full(parts.shape[1:], np.nan)
        for row, grid in zip(axis, grids, strict=True):
            if grid is not None:
                row[: min(grid) // 2 + 1] = frequencies(grid)
        sides, rows = np.array([0 if grid is None else min(grid) for grid in grids]), np.arange(len(grids))
        last, last_official = sides // 2, np.maximum((sides + 1) // 2 - 1, 0)
        highest, official = parts[:, rows, last], parts[0, rows, last_official]
        spread, layer, spectrum = self.layers.spread, ("encoder", "site"), ("encoder", "site", "frequency_index")
        kept, by_group = Kept({"group": self.groups.axis}), (*layer, "group")
        sums, images_of = self.sums[:, :, 1], (by_group, self.layers.by_group(self.sums[:, :, 0, 0]))
        amplitude_of = ((*by_group, "frequency_index"), self.layers.by_group(sums))
        kept.add("amplitude", Mean("amplitude_sum", "images"), amplitude_sum=amplitude_of, images=images_of)
        for name, at in {"high_frequency": last, "official": last_official}.items():
            of_layer = self.layers.by_group(sums[:, rows, at])
            kept.add(name, Mean(f"{name}_sum", "images"), **{f"{name}_sum": (by_group, of_layer)})
        result = xr.Dataset(
            {
                **{f"amplitude{end}": (spectrum, spread(part)) for end, part in zip(ENDS, parts, strict=True)},
                **{f"high_frequency{end}": (layer, spread(part)) for end, part in zip(ENDS, highest, strict=True)},
                "official": (layer, spread(official)),
                "frequency": (spectrum, spread(axis), {"units": "π"}),
                "reason": (layer, spread(reasons, ABSENT)),
            },
            coords={**self.layers.coords(), "frequency_index": np.arange(parts.shape[2])},
            attrs={
                "amplitude": "mean of log(|F| + 1e-6) minus that of frequency 0, natural logarithm",
                "high_frequency": "at the highest frequency of the grid: 1.0π if its shorter side is even",
                "official": "at k = ⌈g/2⌉ − 1, where the authors' code stops; always 0 on a grid of 2 × 2",
                "interval": "95 % over images, normal",
            },
        )
        return kept.beside(result)


def _reason(grid: tuple[int, int] | None, value: float, images: float, flat: float) -> str:
    """Why a layer has no amplitudes, or nothing; `value`: its mean at frequency 0."""
    if grid is None:
        return "the places of its tokens on the image are not known"
    if min(grid) < 2:
        return f"a map of {grid[0]} × {grid[1]} has no frequencies"
    if not images:
        return "no image could be read"
    if flat == images:
        return "in every image the activation is the same at all positions: there is no frequency but 0"
    return "" if np.isfinite(value) else NOT_FINITE


def _grid(plan: Plan, encoder: str, site: str) -> tuple[int, int] | None:
    """Rows and columns of the patches at a site, or None if it has none."""
    shape, tokens = plan.shapes[encoder][site], plan.encoders[encoder].tokens
    if not plan.encoders[encoder].has_places(shape):
        return None
    if tokens is None:
        return (shape[1], shape[2]) if len(shape) == 3 else None
    blank = torch.empty(1, *shape, device="meta")
    return None if token_view(blank, "patches", tokens) is None else tokens.grid


def cost(config: contract.NoSettings, plan: Plan) -> Cost:
    grids = [grid for layer in Layers(plan.sites) if (grid := _grid(plan, *layer)) is not None]
    most = max((min(grid) // 2 + 1 for grid in grids), default=1)
    matrices = sum(16 * (min(grid) // 2 + 1) * grid[0] * grid[1] for grid in set(grids))
    return Cost(memory=matrices + 24 * GROUPS * most * sum(map(len, plan.sites.values())), disk=0)


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    caption = (
        "Amplitude of the highest frequency (1.0π where the grid is even) relative to frequency 0, after every block. "
        "Lower: the block has smoothed out what differs between neighbouring patches."
    )
    high = over_depth(  # Figures 9, 10b, 12c and F.1b of the paper
        result,
        "high_frequency",
        title="High frequencies over depth",
        caption=caption,
        value_title="Δ log amplitude",
        also=["official"],
        domain=None,
    )
    return [*high, *_spectra(result)]


def _spectra(result: xr.Dataset) -> list[Figure]:
    """Amplitude over frequency, a line for each layer from dark (first) to light (last), a panel for each encoder."""
    table = present(result[["frequency", "amplitude", "amplitude_low", "amplitude_high", "reason"]])
    order = {site: number for number, site in enumerate(result.site.values)}
    place = table.site.map(order).groupby(table.encoder).rank("dense") - 1
    table["depth"] = place / place.groupby(table.encoder).transform("max").clip(lower=1)
    table = table.dropna(subset="amplitude").drop(columns=["frequency_index", "layer_type", "block", "reason"])
    if table.empty:
        return []
    panels = pd.factorize(table.encoder)[0]
    chart = (
        alt.Chart(table.assign(panel=panels))
        .mark_line(point=alt.OverlayMarkDef(size=16), strokeWidth=1.5)
        .encode(
            x=alt.X("frequency:Q", title="frequency (π)").axis(grid=False, format=".1f", tickCount=5),
            y=alt.Y("amplitude:Q", title="Δ log amplitude").axis(format=".1f", tickCount=6),
            detail="site:N",
            color=alt.Color("depth:Q", title="relative depth")
            .scale(domain=[0, 1], range="heatmap")
            .legend(type="gradient", orient="top", direction="horizontal", gradientLength=160, titleAnchor="start"),
            tooltip=[
                alt.Tooltip("site:N"),
                alt.Tooltip("frequency:Q", title="frequency (π)", format=".3f"),
                alt.Tooltip("amplitude:Q", title="Δ log amplitude", format=".3f"),
            ],
        )
        .properties(width=260, height=200)
        .facet(alt.Facet("encoder:N", title=None, sort=alt.EncodingSortField("panel", op="min")), columns=3)
    )
    caption = (
        "Amplitude relative to frequency 0 along the half-diagonal of the Fourier transform, a line for each layer, "
        "the first dark and the last light. A line that falls steeply: the layer varies slowly over the image; a flat "
        "one: neighbouring patches differ as much as distant ones."
    )
    return [Figure("spectra", "Amplitude over frequency", caption, chart, table)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    blocks = result.sel(site=(result.layer_type == "block") & outside_decoder(result.site.values))
    lines = []
    for name in blocks.encoder.values:
        values = blocks.high_frequency.sel(encoder=name).dropna("site")
        if values.size:
            last, best = values[-1], values[int(values.argmax("site"))]
            most = f"most in {best.site.item()}: {best:.2f}"
            detail = f"Δ log amplitude of the highest frequency in {last.site.item()}; {most}"
            lines.append((str(name), f"{last:.2f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "Δ log amplitude of the highest frequency in the last block; more: more high frequency"
    return key_number(result, "high_frequency", at="last", title="high frequency", about=about, place=FIRST)
