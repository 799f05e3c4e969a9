"""Runs with chosen numbers and chosen standard errors, as analyses and studies leave them: findings without any model.

    run = made_run(["moco", "mae"], {"cka.diagonal": lambda at: 1.0 if at.encoder_a == at.encoder_b else 1 - at.depth})

A number is given as a function of the place it stands at: `at.encoder`, `at.site`, `at.tokens`, … and, of a layer, also
`at.depth` (block over number of blocks), `at.block` and `at.layer_type`; of pairs also `at.depth_a`, …. NaN leaves it
out. Each number has the jackknife standard error `noise` exactly, independent of all others.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import xarray as xr
from support.results import block_number, layer_type

from sightline.core.groups import Axis, Kept, LeftOut, split
from sightline.core.run_folder import Run

Number = Callable[[Any], float] | float

LAYER = ("encoder", "site")
PAIR = ("tokens", "encoder_a", "encoder_b", "site_a")
FEATURE = (*LAYER, "feature")
AREA = ("encoder", "kind", "area")
PATH = ("encoder", "place", "weights")
# Dimensions of the variables of results, as the results have them.
DIMS: dict[str, tuple[str, ...]] = {
    "agreement.f1": ("encoder_a", "encoder_b"),
    "agreement.kappa": ("encoder_a", "encoder_b"),
    "agreement.tau": ("images", "k", "encoder_a", "encoder_b"),
    "agreement.test_accuracy": ("encoder",),
    **{f"attention.{n}": (*LAYER, "head") for n in ("distance", "distance_relative", "nmi")},
    **{f"attention.{n}_{end}": LAYER for n in ("distance", "distance_relative", "nmi") for end in ("mean", "std")},
    "cka.cka": (*PAIR, "site_b"),
    "cka.class_cka": ("tokens", *LAYER),
    "cka.diagonal": PAIR,
    "cka.row_depth": PAIR,
    "cka.row_max": PAIR,
    "cka.distance_cka": ("tokens", "encoder_a", "encoder_b", "distance"),
    **{f"detection.{n}": AREA for n in ("AP", "AP50", "AP75", "AR")},
    "diversity.cosine": ("kind", *LAYER),
    **{f"dynamics.{n}": PATH for n in ("efficiency", "distance", "length")},
    "fourier.high_frequency": LAYER,
    "fourier.official": LAYER,
    "invariance.invariance": ("policy", "tokens", *LAYER),
    **{f"inversion.{n}": FEATURE for n in ("r2", "nearer", "odd")},
    "knn.accuracy": FEATURE,
    "minibatch.cka": ("tokens", "count", "batch", "encoder", "layer_a", "layer_b"),
    "noise.accuracy": ("encoder", "frequency"),
    "noise.drop": ("encoder", "frequency"),
    "noise.test_accuracy": ("encoder",),
    "orientation.accuracy": FEATURE,
    "probes.accuracy": ("encoder", "probe", "site", "feature"),
    "probes.gain": ("encoder", "probe", "site", "feature"),
    "rcdm.gap": ("encoder", "transformation"),
    "rcdm.nearer": ("encoder",),
    "rcdm.orientation": ("encoder",),
    "rcdm.share": ("encoder", "transformation"),
    "reinit.accuracy": ("encoder", "end", "n"),
    "reinit.accuracy_drop": ("encoder", "end", "n"),
    "segmentation.miou": LAYER,
    "segmentation.softmax_miou": ("encoder",),
    "segmenters.miou": ("encoder",),
    "shape_bias.overall": ("encoder",),
    **{f"spectra.{of}_{n}": LAYER for of in ("token", "image") for n in ("largest", "second", "effective_rank")},
    "spectra.token_uncentred_second": LAYER,
    "spectra.token_delta": (*LAYER, "level"),
    "spectra.image_delta": (*LAYER, "level"),
    "tokens.silhouette_image": LAYER,
    "tokens.silhouette_class": LAYER,
    "transformations.distance": (*FEATURE, "transformation"),
}
LABELS: dict[str, Sequence[Any]] = {
    "tokens": ("all", "cls", "mean", "patches"),
    "feature": ("cls", "gap"),
    "head": (0, 1, 2),
    "distance": (0, 1, 2, 3),
    "images": ("all images", "both right", "both wrong"),
    "k": (5, 10),
    "kind": ("heads", "depths", "tokens", "mid"),
    "probe": ("ridge", "linear", "depth 2", "depth 3", "multilayer"),
    "transformation": ("mirror", "grey"),
    "policy": ("simclr", "supervised"),
    "level": ("a third", "two thirds"),
    "area": ("all", "small", "medium", "large"),
    "frequency": tuple(n / 10 for n in range(1, 10)),
    "end": ("first", "last"),
    "n": (0, 1, 2),
    "count": (1024, 2048),
    "batch": (32, 64, 128),
    "layer_a": (0, 1, 2),
    "layer_b": (0, 1, 2),
    "place": ("all", "block.0"),
    "weights": ("all", "attention"),
}
OF_ENCODERS = ("encoder", "encoder_a", "encoder_b", "other")
KINDS = {"detection": ("box", "mask")}  # of the dimension kind, where it is not that of diversity


def block_sites(
    depth: int = 4, parts: Sequence[str] = ("norm1", "qkv", "fc1"), more: Sequence[str] = ("norm",)
) -> list[str]:
    """Sites of a small ViT, in order of computation."""
    inner = [[*(f"block.{n}.{part}" for part in parts), f"block.{n}"] for n in range(depth)]
    return [*itertools.chain.from_iterable(inner), *more]


def made_run(
    encoders: Sequence[str],
    numbers: Mapping[str, Number],
    *,
    noise: float | None = 0.01,
    depth: int = 4,
    sites: Sequence[str] | None = None,
    groups: int = 32,
    images: str = "made",
    labels: Mapping[str, Sequence[Any]] | None = None,
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
) -> Run:
    """A run in memory that holds these numbers, "knn.accuracy" and so on, of all these encoders.

    `noise` is the standard error of each number; None: images do not change it. `labels` are other values of the
    dimensions than LABELS, `coords` further coordinates, as xarray takes them; runs with the same `images` are paired.
    """
    every = block_sites(depth) if sites is None else list(sites)
    run = Run(None, {"encoders": [{"name": name, "reference": f"made:{name}"} for name in encoders], **(request or {})})
    own = {**LABELS, **(labels or {}), "encoder": encoders, "site": every}
    for result in dict.fromkeys(name.partition(".")[0] for name in numbers):
        inside = {**own, **({"kind": KINDS[result]} if result in KINDS and "kind" not in (labels or {}) else {})}
        variables = {n.partition(".")[2]: number for n, number in numbers.items() if n.partition(".")[0] == result}
        run.save(result, *_result(result, variables, inside, noise, groups, images, coords or {}, attrs or {}, depth))
    return run


def select(run: Run, encoders: Sequence[str]) -> Run:
    """The same run with some of its encoders alone."""
    about = [entry for entry in run.request["encoders"] if entry["name"] in encoders]
    found = Run(None, {**run.request, "encoders": about})
    for name in run:
        kept = run.measured(name).kept
        parts = [
            None if part is None else part.sel({dim: list(encoders) for dim in part.dims if dim in OF_ENCODERS})
            for part in (run[name], kept)
        ]
        found.save(name, parts[0], parts[1])
    return found


def renamed(run: Run, names: Mapping[str, str]) -> Run:
    """The same run with other names of encoders."""
    about = [{**entry, "name": names.get(entry["name"], entry["name"])} for entry in run.request["encoders"]]
    found = Run(None, {**run.request, "encoders": about})
    for name in run:
        parts = []
        for part in (run[name], run.measured(name).kept):
            dims = [] if part is None else [dim for dim in part.coords if dim in OF_ENCODERS]
            new = {dim: [names.get(str(one), str(one)) for one in part[dim].values] for dim in dims}
            parts.append(None if part is None else part.assign_coords(new))
        found.save(name, parts[0], parts[1])
    return found


def _result(
    result: str,
    variables: Mapping[str, Number],
    labels: Mapping[str, Sequence[Any]],
    noise: float | None,
    groups: int,
    images: str,
    coords: Mapping[str, Any],
    attrs: Mapping[str, Any],
    depth: int,
) -> tuple[xr.Dataset, xr.Dataset | None]:
    kept, data, used = Kept({"group": Axis(images, "groups of images")}), {}, {"encoder": 0}
    for name, number in variables.items():
        dims = DIMS[f"{result}.{name}"]
        used |= dict.fromkeys(dims, 0)
        places = itertools.product(*(_labels(dim, labels) for dim in dims))
        values = np.array([_value(number, dict(zip(dims, at, strict=True)), depth) for at in places], float)
        values = values.reshape([len(_labels(dim, labels)) for dim in dims])
        data[name] = (dims, values)
        if noise is None:
            kept.nothing("images do not change it", name)
        else:
            apart = _apart(values.shape, groups, zlib.crc32(f"{result}.{name}".encode()))
            kept.add(name, LeftOut(f"{name}_rest"), **{f"{name}_rest": (("group", *dims), values + noise * apart)})
    sites = any(dim.startswith("site") for dim in used)
    dims = [*used, *(["site"] if sites else [])]
    known: dict[str, Any] = {dim: list(_labels(dim, labels)) for dim in dims}
    if sites:
        for end in ("", *(f"_{dim[-1]}" for dim in used if dim in ("site_a", "site_b"))):
            known[f"layer_type{end}"] = (f"site{end}", [layer_type(site) for site in labels["site"]])
            known[f"block{end}"] = (f"site{end}", [block_number(site) for site in labels["site"]])
        data["reason"] = (LAYER, np.full((len(labels["encoder"]), len(labels["site"])), ""))
    if "distance" in used:
        steps = np.array(labels["distance"], float)
        known["relative_distance"] = ("distance", steps / max(1, steps.max()))
    if result == "probes":
        data["last_site"] = (("encoder",), np.full(len(labels["encoder"]), "norm"))
    extra = {
        name: one for name, one in coords.items() if set([one[0]] if isinstance(one[0], str) else one[0]) <= {*known}
    }
    return split(kept.beside(xr.Dataset(data, {**known, **extra}, attrs)))


def _labels(dim: str, labels: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    if dim in ("encoder_a", "encoder_b", "other"):
        return labels["encoder"]
    return labels["site"] if dim in ("site_a", "site_b") else labels[dim]


def _value(number: Number, at: dict[str, Any], depth: int) -> float:
    if not callable(number):
        return number
    for dim in [dim for dim in at if dim.startswith("site")]:
        end = dim.removeprefix("site")
        block = block_number(at[dim])
        more = {f"block{end}": block, f"depth{end}": block / depth, f"layer_type{end}": layer_type(at[dim])}
        at |= more | ({} if end in ("", "_b") else {name.removesuffix(end): value for name, value in more.items()})
    return number(SimpleNamespace(**at))


def _apart(shape: tuple[int, ...], groups: int, seed: int) -> np.ndarray[Any, Any]:
    """What each left-out group changes, (groups, …), with a jackknife standard error of 1."""
    apart = np.random.default_rng(seed).normal(size=(groups, *shape))
    apart -= apart.mean(0)
    return apart / np.sqrt((groups - 1) / groups * np.square(apart).sum(0))
