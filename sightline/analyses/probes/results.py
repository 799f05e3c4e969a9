"""What became of probes, as one labelled result: accuracies, what each gains, how far the best one is ahead.

    gain = accuracy − accuracy of the linear (of ridge: the ridge) probe on the last layer, same encoder and pooling
    lead = accuracy of the encoder's best probe − accuracy        best on the selection split, never on the test split
    difference = accuracy of A's best probe − accuracy of B's best probe

All of them are differences on the same test images, so their intervals are paired.

Shapes: n images, K settings, L penalties.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.results import ABSENT, ENDS, NOTHING, of_decoder
from sightline.measure.estimators.intervals import accuracy_of, difference_of
from sightline.measure.estimators.ridge import PENALTIES
from sightline.measure.estimators.sweep import Setting, best_first
from sightline.measure.layers import Layers
from sightline.measure.plan import Plan
from sightline.measure.pooled import FEATURES

BEST = 5  # settings whose mean and spread are reported
OVER = ("encoder", "probe", "site", "feature")
OF_SETTINGS = ("loss", "selection_accuracy", "test_accuracy")
NO_SUCH_PROBE = (
    "there is no such probe: depth is for the last layer, multilayer adds another block to it, "
    "and more_on=first leaves both to one pooling"
)

Axes: TypeAlias = tuple[list[str], list[str], list[str], list[str]]


class ProbePlace(NamedTuple):
    """Where a probe stands in the result."""

    encoder: str
    probe: str
    site: str
    feature: str


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """What became of a probe; `reason` says why nothing did."""

    selection: float = np.nan  # accuracy on the selection split, of the chosen setting
    right: npt.NDArray[np.bool_] | None = None  # (n,) test images that it decides right
    chosen: int = -1  # number of the chosen setting
    settings: npt.NDArray[np.float64] | None = None  # (3, K), see OF_SETTINGS
    errors: npt.NDArray[np.float64] | None = None  # (L,) of ridge, on images that are left out
    reason: str = ""


def mean_of_best(
    selection: npt.NDArray[np.float64], test: npt.NDArray[np.float64], count: int = BEST
) -> tuple[float, float]:
    """Mean and standard deviation of the test accuracies of the settings that are best on the selection split.

    >>> mean_of_best(np.array([0.1, 0.9, 0.8]), np.array([1.0, 0.5, 0.75]), count=2)
    (0.625, 0.125)
    """
    best = test[best_first(selection)[:count]]
    return (float(best.mean()), float(best.std())) if len(best) else (np.nan, np.nan)


def best_of(found: Mapping[ProbePlace, ProbeOutcome], probes: Sequence[str]) -> dict[str, ProbePlace]:
    """The probe of each encoder that is best on the selection split: of equal ones the simplest, and no decoder's."""
    scored = [at for at, answer in found.items() if answer.right is not None and not of_decoder(at.site)]
    best: dict[str, ProbePlace] = {}
    for at in sorted(scored, key=lambda at: (-found[at].selection, probes.index(at.probe))):
        best.setdefault(at.encoder, at)
    return best


def dataset_of(
    found: Mapping[ProbePlace, ProbeOutcome],
    plan: Plan,
    last: Mapping[tuple[str, str], str],  # encoder and feature → its last layer
    probes: Sequence[str],
    settings: Sequence[Setting],
) -> xr.Dataset:
    """All answers over encoder, probe, site and feature, the settings of the sweep, and the best of each encoder."""
    layers, best = Layers(plan.sites, plan.stages), best_of(found, probes)
    features = [name for name in FEATURES if any(at.feature == name for at in found)]
    axes: Axes = (layers.encoders, list(probes), layers.sites, features)
    coords = {**layers.coords(), "probe": axes[1], "feature": features}
    coords |= {f"encoder{end}": layers.encoders for end in ("_a", "_b")}
    data = _accuracies(found, last, best, axes) | _best(found, best, layers.encoders, last)
    ends = [[last.get((encoder, feature), "") for feature in features] for encoder in layers.encoders]
    data["last_site_of_feature"] = (("encoder", "feature"), np.array(ends, dtype=str))
    data["reason"] = (OVER, _reasons(plan, axes, found))
    if set(probes) != {"ridge"}:
        data |= _of_settings(found, axes, len(settings))
        columns = zip(Setting._fields, zip(*settings, strict=True), strict=True)
        coords |= {"config": np.arange(len(settings))} | {name: ("config", list(values)) for name, values in columns}
    if "ridge" in probes:
        path = spread({at: a.errors for at, a in found.items() if a.errors is not None}, axes, (len(PENALTIES),))
        data["ridge_error"] = (("encoder", "site", "feature", "penalty"), path[:, axes[1].index("ridge")])
        coords["penalty"] = list(PENALTIES)
    return xr.Dataset(data, coords)


def axes_of(result: xr.Dataset) -> Axes:
    """Names along the axes of a result."""
    encoders, probes, sites, features = ([str(name) for name in result[dim].values] for dim in OVER)
    return encoders, probes, sites, features


def last_site(row: xr.Dataset, feature: str) -> str:
    """The last layer of one encoder that has a feature."""
    each = row.last_site_of_feature
    return str((each.sel(feature=feature) if "feature" in each.dims else each).item()) or str(row.last_site.item())


def reference_of(at: ProbePlace, last: Mapping[tuple[str, str], str]) -> ProbePlace:
    """The probe that another one gains over: the linear one on the last layer, of ridge the ridge."""
    return ProbePlace(
        at.encoder, "ridge" if at.probe == "ridge" else "linear", last[at.encoder, at.feature], at.feature
    )


def spread(
    values: Mapping[ProbePlace, Any], axes: Axes, size: tuple[int, ...] = (), fill: Any = np.nan
) -> npt.NDArray[Any]:
    """Values of probes, each of this size → (encoders, probes, sites, features, …), `fill` elsewhere."""
    full = np.full((*map(len, axes), *size), fill, object if isinstance(fill, str) else None)
    for at, value in values.items():
        full[tuple(axis.index(name) for axis, name in zip(axes, at, strict=True))] = value
    return full


def _accuracies(
    found: Mapping[ProbePlace, ProbeOutcome],
    last: Mapping[tuple[str, str], str],
    best: Mapping[str, ProbePlace],
    axes: Axes,
) -> dict[str, Any]:
    """Accuracy, gain and lead of all probes with their intervals, and the accuracy by which a setting was chosen."""
    right = {at: answer.right for at, answer in found.items() if answer.right is not None}

    triples = {
        "accuracy": {at: accuracy_of(decided, np.ones_like(decided)) for at, decided in right.items()},
        "gain": {at: _difference(found, at, reference_of(at, last)) for at in right},
        "lead": {at: _difference(found, best.get(at.encoder), at) for at in right},
    }
    each = {name: spread(values, axes, (3,)) for name, values in triples.items()}
    chosen_by = spread({at: answer.selection for at, answer in found.items()}, axes)
    return {f"{name}{end}": (OVER, v[..., i]) for name, v in each.items() for i, end in enumerate(ENDS)} | {
        "selection": (OVER, chosen_by)
    }


def _of_settings(found: Mapping[ProbePlace, ProbeOutcome], axes: Axes, count: int) -> dict[str, Any]:
    """Numbers of every setting, which one was chosen, mean and spread of the best ones."""
    swept = {at: answer.settings for at, answer in found.items() if answer.settings is not None}
    every = np.moveaxis(spread(swept, axes, (3, count)), -2, 0)
    best = spread({at: mean_of_best(*numbers[1:]) for at, numbers in swept.items()}, axes, (2,))
    return {
        **{name: ((*OVER, "config"), part) for name, part in zip(OF_SETTINGS, every, strict=True)},
        "chosen": (OVER, spread({at: answer.chosen for at, answer in found.items()}, axes, fill=-1)),
        "mean_of_best": (OVER, best[..., 0]),
        "std_of_best": (OVER, best[..., 1]),
    }


def _reasons(plan: Plan, axes: Axes, found: Mapping[ProbePlace, ProbeOutcome]) -> npt.NDArray[np.str_]:
    there = {(at.encoder, at.site, at.feature) for at in found}
    places = (ProbePlace(*names) for names in itertools.product(*axes) if names[2] in plan.sites[names[0]])
    reasons = {
        at: NO_SUCH_PROBE if (at.encoder, at.site, at.feature) in there else "this site has no such feature"
        for at in places
    }
    return spread(reasons | {at: a.reason for at, a in found.items()}, axes, fill=ABSENT).astype(str)


def _difference(
    found: Mapping[ProbePlace, ProbeOutcome], one: ProbePlace | None, other: ProbePlace | None
) -> tuple[float, float, float]:
    """Accuracy of one probe minus that of another; nothing where one is not known."""
    a, b = (found[at].right if at is not None and at in found else None for at in (one, other))
    return NOTHING if a is None or b is None else difference_of(a, b)


def _best(
    found: Mapping[ProbePlace, ProbeOutcome],
    best: Mapping[str, ProbePlace],
    encoders: Sequence[str],
    last: Mapping[tuple[str, str], str],
) -> dict[str, Any]:
    """Variables over encoders, and over pairs of them: which probe is best, and how far apart those are."""
    names = {
        f"best_{field}": ("encoder", [getattr(best[e], field) if e in best else "" for e in encoders])
        for field in ("probe", "site", "feature")
    }
    ends = {encoder: site for (encoder, _), site in last.items()}
    pairs = np.array([[_difference(found, best.get(a), best.get(b)) for b in encoders] for a in encoders])
    return {
        **names,
        "last_site": ("encoder", [ends.get(encoder, "") for encoder in encoders]),
        **{f"difference{end}": (("encoder_a", "encoder_b"), pairs[..., i]) for i, end in enumerate(ENDS)},
    }
