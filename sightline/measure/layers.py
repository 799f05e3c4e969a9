"""Layers: pairs of encoder and site, the sums that analyses keep for each, and where they lie in a labelled result.

B images of a batch, S layers, K numbers per image.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.results import NORMAL_95
from sightline.encoders.sites import block_numbers, layer_type, stage_numbers, union_of_sites
from sightline.images.sets import Images


@dataclass(frozen=True)
class Layers:
    """The layers of a plan in order.

    >>> layers = Layers({"vit": ["block.0", "block.1"], "cnn": ["block.0"]})
    >>> layers.spread(np.array([1.0, 2.0, 3.0]))
    array([[ 1.,  2.],
           [ 3., nan]])
    """

    of: Mapping[str, Sequence[str]]  # encoder → its sites
    stages: Mapping[str, Sequence[int]] = field(default_factory=dict)  # encoder → blocks of each stage, if it has any

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((encoder, site) for encoder, sites in self.of.items() for site in sites)

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    @property
    def encoders(self) -> list[str]:
        return list(self.of)

    @property
    def sites(self) -> list[str]:
        """Sites of all encoders, each once, in order of computation."""
        return union_of_sites(self.of)

    @cached_property
    def _places(self) -> dict[tuple[str, str], int]:
        return {layer: number for number, layer in enumerate(self)}

    def index(self, encoder: str, site: str) -> int:
        """Where a layer stands in the order."""
        return self._places[encoder, site]

    def spread(self, values: npt.NDArray[Any] | Sequence[str], fill: Any = np.nan) -> npt.NDArray[Any]:
        """(S, …) over layers → (encoders, sites, …), `fill` where an encoder has no such site."""
        values = np.asarray(values)
        sites = self.sites
        full = np.full(
            (len(self.of), len(sites), *values.shape[1:]), fill, object if values.dtype.kind in "UO" else None
        )
        rows = [self.encoders.index(encoder) for encoder, _ in self]
        full[rows, [sites.index(site) for _, site in self]] = values
        return full.astype(str) if full.dtype == object else full

    def by_group(self, sums: Tensor) -> npt.NDArray[np.float64]:
        """(G, S, …) over groups and layers → (encoders, sites, G, …), as results keep them for contrasts."""
        return self.spread(sums.numpy(force=True).swapaxes(0, 1))

    def spread_pairs(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(T, S, S) over pairs of layers → (T, encoders, encoders, sites, sites), NaN where there is no such site."""
        rows = self.spread(values.transpose(1, 2, 0))  # (A, site of A, S, T)
        return self.spread(np.moveaxis(rows, 2, 0)).transpose(4, 2, 0, 3, 1)

    def spread_rows(self, values: npt.NDArray[Any], fill: Any = np.nan) -> npt.NDArray[Any]:
        """(T, S) over layers → (T, encoders, sites)."""
        return np.moveaxis(self.spread(values.T, fill), -1, 0)

    def pair_coords(self) -> dict[str, Any]:
        """Coordinates of a result over pairs of encoders and sites, beside those over encoder and site."""
        coords = self.coords()
        return {
            **coords,
            **{f"encoder_{end}": coords["encoder"] for end in "ab"},
            **{f"site_{end}": coords["site"] for end in "ab"},
            **{f"{name}_{end}": (f"site_{end}", coords[name][1]) for name in ("layer_type", "block") for end in "ab"},
        }

    def coords(self) -> dict[str, Any]:
        """Coordinates of a result over encoder and site."""
        sites = self.sites
        return {
            "encoder": self.encoders,
            "site": sites,
            "layer_type": ("site", [layer_type(site) for site in sites]),
            "block": ("site", block_numbers(sites)),
        } | self._stages(sites)

    def _stages(self, sites: Sequence[str]) -> dict[str, Any]:
        """Of residual networks: the stage of each site of each encoder, 0 where there is none."""
        if not any(self.stages.get(encoder) for encoder in self.of):
            return {}
        numbers = [stage_numbers(sites, self.stages.get(encoder, ())) for encoder in self.of]
        has = np.array([[site in own for site in sites] for own in self.of.values()])
        return {"stage": (("encoder", "site"), np.where(has, numbers, 0))}


def add_images(sums: Tensor, layer: int, values: Tensor, members: Tensor) -> None:
    """Add the numbers (B, k) of a batch to `sums` (G, S, 3, K) of a layer: images, sum, sum of squares, in float64.

    `members` (G, B) says which image belongs to which group, see `groups.ImageGroups`.
    """
    k = values.shape[1]
    values = values.double()
    each = torch.stack([torch.ones_like(values), values, values.square()], 1)  # (B, 3, k)
    sums[:, layer, :, :k] += (members @ each.flatten(1)).view(len(members), 3, k)


def mean_of_images(sums: Tensor) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean over images (S, K) and its 95 % interval, mean ± 1.96 · deviation / √images; NaN where there are none.

    >>> sums = torch.zeros(2, 1, 3, 2, dtype=torch.float64)
    >>> add_images(sums, 0, torch.tensor([[1.0], [3.0]]), torch.eye(2, dtype=torch.float64))
    >>> [part.round(2).tolist() for part in mean_of_images(sums)]
    [[[2.0, nan]], [[0.04, nan]], [[3.96, nan]]]
    """
    n, total, squares = sums.sum(0).numpy(force=True).swapaxes(0, 1)  # each (S, K)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / n
        variance = np.maximum(squares - n * mean**2, 0.0) / (n - 1)
        half = NORMAL_95 * np.sqrt(variance / n)
    return mean, mean - half, mean + half


def sample_rows(images: Images, split: str, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Rows (`Batch.rows`) of at most `count` images of a split, balanced over classes, the same for every batching."""
    chosen = images.sample(max(count, 4), seed).indices(split) if len(images.indices(split)) > count else None
    rows = np.arange(len(images.indices(split))) if chosen is None else np.searchsorted(images.indices(split), chosen)
    return rows[:count]
