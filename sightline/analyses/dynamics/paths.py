"""Paths through the space of weights: which encoders are steps of one training, and how straight it went.

    path efficiency at point T = ‖θ_T − θ_0‖₂ / Σ_{t < T} ‖θ_{t+1} − θ_t‖₂

The norm of a group of weights (a block, a type of layer, all) is that of all its tensors together: their squares are
summed before the root is taken.

Source: Shekhar et al. 2023, "Objectives Matter", Section 2.3 and Fig. 14.

Shapes: E points of a path (steps), P tensors of weights.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.references import take_apart
from sightline.core.results import ABSENT
from sightline.encoders.encoder import Encoder
from sightline.encoders.sites import layer_type

ALL, ATTENTION, OUTSIDE = "all", "attention", "outside blocks"
ATTENTION_MODULES = {"attn", "attention", "self_attn", "self_attention"}  # as they are called in a block
Weights: TypeAlias = Any  # tensors by name: a mapping, or a safetensors file that is open
START, STILL = "the path starts here", "these weights have not moved"


class Trajectory(NamedTuple):
    """A training, and the encoders that are steps of it."""

    name: str
    steps: dict[int, str]  # in order

    @property
    def start(self) -> str:
        return next(iter(self.steps.values()))


def trainings_of(encoders: Mapping[str, Encoder]) -> list[Trajectory]:
    """The trainings of which steps, `run:FOLDER?step=1200`, are among the encoders."""
    by_run: dict[str, dict[int, str]] = {}
    for name, encoder in encoders.items():
        source, where, options = take_apart(encoder.reference) or ("", "", {})
        if source == "run" and options.get("step", "").isdecimal():
            by_run.setdefault(f"run:{where}", {})[int(options["step"])] = name
    if not by_run:
        raise InputError(
            "dynamics follows an encoder through its training, but none of these is a step of one; train with "
            "--set keep=log (or keep=10 for ten points), and compare 'run:FOLDER?step=*'"
        )
    for training, steps in by_run.items():
        if len(steps) < 2:
            raise InputError(f"A path needs two steps, but of {training} there is one; give '{training}?step=*'")
    trainings = [Trajectory(_name(training, steps), dict(sorted(steps.items()))) for training, steps in by_run.items()]
    if len({training.name for training in trainings}) < len(trainings):
        return [training._replace(name=name) for training, name in zip(trainings, by_run, strict=True)]
    return trainings


def _name(training: str, steps: Mapping[int, str]) -> str:
    """What the names of the steps have in common, `mine` of `mine, step 1200`, or else the name of the folder."""
    names = {re.sub(rf",? step {step}\b", "", name) for step, name in steps.items()}
    return names.pop() if len(names) == 1 else training.rstrip("/").rpartition("/")[2].removeprefix("run:")


def path_efficiency(path: Sequence[Weights]) -> npt.NDArray[np.float64]:
    """Efficiency of a path at each of its points, (E,), from the weights at each of them, by name.

    NaN as long as nothing has moved. Tensors are looked at one after the other, so that the weights may stay on disk:
    `path_efficiency([safe_open(file, "pt") for file in files])` needs the memory of a few tensors.

    >>> import torch
    >>> corner = [torch.tensor([0.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]), torch.zeros(2)]
    >>> path_efficiency([{"weight": point} for point in corner]).round(3)
    array([  nan, 1.   , 0.714, 0.   ])
    """
    efficiency: npt.NDArray[np.float64] = _path(_squares(path).sum(-1))[2]
    return efficiency


def _squares(path: Sequence[Weights]) -> npt.NDArray[np.float64]:
    """‖θ_t − θ_0‖² and ‖θ_t − θ_{t−1}‖² of every tensor in float64, (2, E, P)."""
    names = list(path[0].keys())
    if any(set(weights.keys()) != set(names) for weights in path):
        raise InputError("A path leads through the same weights, but their names differ; give steps of one training")
    squares = np.zeros((2, len(path), len(names)))
    for p, name in enumerate(names):
        start = before = _tensor(path[0], name)
        for t, weights in enumerate(path[1:], 1):
            now = _tensor(weights, name)
            if now.shape != start.shape:
                raise InputError(
                    f"{name} has shape {tuple(start.shape)} at the start and {tuple(now.shape)} at point {t} of the "
                    "path; give steps of one training"
                )
            squares[:, t, p] = [float((now - other).square().sum()) for other in (start, before)]
            before = now
    return squares


def _tensor(weights: Weights, name: str) -> Tensor:
    """A tensor of a mapping, or of an open safetensors file, in float64."""
    tensor: Tensor = weights[name] if isinstance(weights, Mapping) else weights.get_tensor(name)
    return tensor.detach().double()


def _path(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distance from the start, length of the path and their ratio from summed squares (2, E, …): (3, E, …)."""
    distance, steps = np.sqrt(squares)
    length = steps.cumsum(0)
    with np.errstate(invalid="ignore"):
        return np.stack([distance, length, distance / length])


def groups_of(encoder: Encoder) -> dict[str, tuple[str, str]]:
    """Where each tensor of weights is, a block or outside of them, and its layer, `attn.qkv` or `pos_embed`."""
    names = {module: name for name, module in encoder.module.named_modules()}
    blocks = {
        names[tap.module]: site
        for site, tap in encoder.sites.items()
        if layer_type(site) == "block" and tap.module in names
    }
    places = {}
    for name, _ in encoder.module.named_parameters():
        parts = name.split(".")
        depth = next((k for k in range(1, len(parts)) if ".".join(parts[:k]) in blocks), 0)
        place = blocks[".".join(parts[:depth])] if depth else OUTSIDE
        places[name] = place, ".".join(parts[depth:-1]) or parts[-1]
    return places


def _attends(layer: str) -> bool:
    """Whether weights of a block belong to its attention.

    >>> _attends("attn.qkv"), _attends("self_attention"), _attends("norm1")
    (True, True, False)
    """
    return layer.partition(".")[0] in ATTENTION_MODULES


def paths_of(encoders: Mapping[str, Encoder], trainings: Sequence[Trajectory]) -> xr.Dataset:
    """Distance, length and efficiency of the paths of all weights by place and layer.

    `all` is the sum over either, `attention` that over the layers of attention, without the norm before it.
    """
    groups = [list(groups_of(encoders[training.start]).values()) for training in trainings]
    axes = [
        [ALL, *dict.fromkeys(group[axis] for groups_of_names in groups for group in groups_of_names)] for axis in (0, 1)
    ]
    if attends := any(map(_attends, axes[1])):
        axes[1].insert(1, ATTENTION)
    parts, reasons = [], []
    for training, groups_of_names in zip(trainings, groups, strict=True):
        path = [dict(encoders[name].module.named_parameters()) for name in training.steps.values()]
        squares = np.zeros((2, len(path), *map(len, axes)))
        there = np.zeros(squares.shape[2:], bool)
        for group, values in zip(groups_of_names, np.moveaxis(_squares(path), -1, 0), strict=True):
            i, j = (axis.index(word) for axis, word in zip(axes, group, strict=True))
            where = ([0, 0, i, i], [0, j, 0, j])
            if attends and _attends(group[1]):
                where = ([*where[0], 0, i], [*where[1], 1, 1])
            squares[:, :, *where] += values[..., None]
            there[where] = True
        values = _path(squares)
        parts.append(np.where(there, values, np.nan))
        still = np.where(np.arange(len(path))[:, None, None] > 0, STILL, START)
        reasons.append(np.where(there, np.where(np.isnan(values[2]), still, ""), ABSENT))
    dims = ("encoder", "place", "weights")
    names = ("distance", "length", "efficiency")
    variables = {name: (dims, value) for name, value in zip(names, np.concatenate(parts, 1), strict=True)}
    return xr.Dataset(
        variables | {"efficiency_reason": (dims, np.concatenate(reasons))},
        coords={"encoder": [n for t in trainings for n in t.steps.values()], "place": axes[0], "weights": axes[1]},
    )
