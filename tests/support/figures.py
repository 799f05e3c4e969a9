"""A study in which everything was measured, in small, with numbers drawn at random: for the figures of the papers."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr
from support.evidence import made_run
from support.results import block_number, layer_type

from sightline.analyses.cka.matching import summaries
from sightline.core.results import ABSENT, ENDS
from sightline.core.run_folder import Run
from sightline.measure.classifiers import HEAD, PROBE
from sightline.studies.evidence import Evidence
from sightline.studies.roles import HYBRID, JE, MASKED_JE, REC, SUPERVISED, Role

BLOCKS, HEADS, GRID = 4, 3, (2, 2)
VITS = (
    Role("sup", SUPERVISED, "supervised"),
    Role("small moco", JE, "moco_v3", size=5),
    Role("dino", JE, "dino", multicrop=True),
    Role("single dino", JE, "dino", multicrop=False),
    Role("moco", JE, "moco_v3", size=20),
    Role("windowed", JE, "moco_v3", window=3),
    Role("mae", REC, "mae"),
    Role("simmim", REC, "simmim", size=20),
    Role("small simmim", REC, "simmim", size=5),
    Role("msn", MASKED_JE, "msn"),
    Role("mix", HYBRID, "hybrid", weight=0.2),
    Role("even mix", HYBRID, "hybrid", weight=0.5),
)
TUNED = tuple(replace(role, name=f"{role.name} ft", tuned_from=role.name) for role in VITS[1:])
CNNS = (
    Role("simclr 0", JE, "simclr", "cnn"),
    Role("simclr 1", JE, "simclr", "cnn", seed=1),
    Role("resnet 0", SUPERVISED, "supervised", "cnn"),
    Role("resnet 1", SUPERVISED, "supervised", "cnn", seed=1),
    Role("convnext", REC, "fcmae", "cnn"),
)
ROLES = (*VITS, *TUNED, *CNNS)
NAMES = [role.name for role in ROLES]
VIT_NAMES = [role.name for role in (*VITS, *TUNED)]
TUNED_ACCURACY = {role.name: 0.5 + number / 50 for number, role in enumerate(TUNED)}


def made(
    dims: Mapping[str, Sequence[Any]], variables: Mapping[str, Sequence[str]], seed: int, **attrs: Any
) -> xr.Dataset:
    """Variables over some of the dimensions: numbers between 0 and 1, their intervals and nulls; layers are known."""
    rng = np.random.default_rng(seed)
    data: dict[str, Any] = {}
    for name, over in variables.items():
        value = rng.uniform(0.1, 0.9, [len(dims[dim]) for dim in over])
        for end, shift in zip((*ENDS, "_null"), (0, -0.05, 0.05, -0.1), strict=True):
            data[f"{name}{end}"] = (tuple(over), value + shift)
    coords: dict[str, Any] = {dim: list(labels) for dim, labels in dims.items()}
    if "site" in dims:
        sites = [str(site) for site in dims["site"]]
        inner = [site.removeprefix("decoder.") for site in sites]
        coords["layer_type"] = ("site", [layer_type(site) for site in inner])
        coords["block"] = (
            "site",
            [block_number(i) + BLOCKS * s.startswith("decoder.") for i, s in zip(inner, sites, strict=True)],
        )
        data["reason"] = (("encoder", "site"), np.full((len(dims["encoder"]), len(sites)), "", dtype="U40"))
    return xr.Dataset(data, coords, attrs)


def without(result: xr.Dataset, encoders: Sequence[str], *starts: str) -> xr.Dataset:
    """The same result, had these encoders no sites that begin so."""
    result = result.copy(deep=True)
    sites = [str(site) for site in result.site.values if str(site).startswith(starts)]
    for name, values in result.data_vars.items():
        if {"encoder", "site"} <= set(values.dims):
            result[name].loc[{"encoder": list(encoders), "site": sites}] = (
                ABSENT if values.dtype.kind == "U" else math.nan
            )
    return result


def blocks(*parts: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> list[str]:
    """Sites of the blocks, of each the parts first; "" is its output."""
    inner = [f"block.{n}{'.' if part else ''}{part}" for n in range(BLOCKS) for part in parts]
    return [*before, *inner, *after]


def _cka() -> xr.Dataset:
    sites = blocks("norm1", "qkv", "fc1", "residual", "", after=("head.0",))
    dims = {
        "tokens": ["all", "cls"],
        "encoder": NAMES,
        "site": sites,
        "encoder_a": NAMES,
        "encoder_b": NAMES,
        "site_a": sites,
        "site_b": sites,
    }
    pair = ("tokens", "encoder_a", "encoder_b", "site_a", "site_b")
    result = made(dims, {"cka": pair, "class_cka": ("tokens", "encoder", "site")}, 1, images=64)
    reason = result.reason.expand_dims(tokens=result.tokens).copy()
    result = result.assign(reason=reason)
    stage = np.where(result.block.values >= BLOCKS // 2, 2, 1)
    result = result.assign_coords(stage=(("encoder", "site"), np.broadcast_to(stage, (len(NAMES), len(sites))).copy()))
    return result.merge(summaries(result))


def _attention() -> xr.Dataset:
    sites = [f"{site}.attn_map" for site in blocks("", after=("decoder.block.0",))]
    dims = {"encoder": VIT_NAMES, "site": sites, "head": range(HEADS)}
    layer, head = ("encoder", "site"), ("encoder", "site", "head")
    measures = ("distance", "distance_relative", "nmi")
    variables = dict.fromkeys(measures, head) | {f"{m}_{end}": layer for m in measures for end in ("mean", "std")}
    result = made(dims, variables, 2, images=64).assign_coords(layer_type=("site", ["attn_map"] * len(sites)))
    result = without(result, [name for name in VIT_NAMES if name != "mae"], "decoder.")
    rng, shown = np.random.default_rng(3), {}
    for number in range(len(VIT_NAMES)):
        axes = [f"viewer_{axis}_{number}" for axis in ("layer", "head", "query", "key")]
        maps = rng.integers(0, 256, (2, len(sites), HEADS + 1, 4, 4), np.uint8)
        shown[f"viewer_map_{number}"] = xr.DataArray(
            maps,
            dims=("viewer_image", *axes),
            coords={axes[0]: sites, axes[2]: range(4)},
            attrs={"grid": list(GRID), "patch": 4},
        )
        pixels = rng.integers(0, 256, (2, 8, 8, 3), np.uint8)
        dims_of = ("viewer_image", f"viewer_y_{number}", f"viewer_x_{number}", "viewer_rgb")
        shown[f"viewer_pixels_{number}"] = xr.DataArray(pixels, dims=dims_of)
    return result.assign(shown)


def _tokens() -> xr.Dataset:
    sites, layer = blocks("", before=("embed",)), ("encoder", "site")
    dims = {
        "encoder": VIT_NAMES,
        "site": sites,
        "cloud_image": ["one.png", "two.png"],
        "moment": ["before", "after"],
        "patch": range(4),
        "axis": (1, 2, 3),
        "image": ["a.png", "b.png", "c.png"],
        "token": range(4),
        "tsne_axis": (0, 1),
    }
    cloud = (*layer, "cloud_image", "moment", "patch", "axis")
    variables = {
        "silhouette_image": layer,
        "silhouette_class": layer,
        "cloud": cloud,
        "cloud_joint": cloud,
        "tsne": ("encoder", "image", "token", "tsne_axis"),
    }
    result = made(dims, variables, 4, images=3, tsne="perplexity 20")
    for name in ("cloud", "cloud_joint"):
        result[name].loc[{"site": "embed"}] = math.nan
    result = result.assign(tsne_site=("encoder", [sites[-1]] * len(VIT_NAMES)))
    return result.assign_coords(image_class=("image", ["cat", "cat", "dog"]))


def _spectra() -> xr.Dataset:
    dims = {
        "encoder": VIT_NAMES,
        "site": blocks("", before=("embed",)),
        "level": ["a third", "two thirds"],
        "rank": range(1, 7),
    }
    layer = ("encoder", "site")
    variables: dict[str, Sequence[str]] = {}
    for cloud in ("token", "image"):
        variables |= {f"{cloud}_{name}": layer for name in ("second", "uncentred_second", "effective_rank")}
        variables |= {f"{cloud}_delta": (*layer, "level"), f"{cloud}_spectrum": (*layer, "rank")}
    result = made(dims, variables, 5, token_sample=8, image_sample=64)
    ranks = xr.DataArray([2.0, 4.0], dims="level").broadcast_like(result.token_delta)
    return result.assign(token_rank=ranks, image_rank=ranks, token_reason=result.reason).drop_vars("reason")


def _classifiers(encoders: Sequence[str]) -> dict[str, Any]:
    """Who decides: the head of a fine-tuned encoder, a probe of the others."""
    kinds = [HEAD if name.endswith(" ft") else PROBE for name in encoders]
    nothing = ("encoder", np.full(len(encoders), 0.5))
    return {
        "classifier": ("encoder", kinds),
        "classifier_site": ("encoder", ["norm"] * len(encoders)),
        "left_out_accuracy": nothing,
        "train_accuracy": nothing,
    }


def _agreement() -> xr.Dataset:
    dims = {
        "images": ["all images", "both right", "both wrong"],
        "k": [5, 10],
        "encoder": VIT_NAMES,
        "encoder_a": VIT_NAMES,
        "encoder_b": VIT_NAMES,
    }
    pair = ("encoder_a", "encoder_b")
    variables = {"tau": ("images", "k", *pair), "f1": pair, "kappa": pair, "test_accuracy": ("encoder",)}
    return made(dims, variables, 6, n_test=64).assign(_classifiers(VIT_NAMES))


def _probes(encoders: Sequence[str], seed: int) -> xr.Dataset:
    kinds, settings = ["linear", "depth 2", "depth 3", "multilayer"], 6
    dims = {"encoder": encoders, "probe": kinds, "site": blocks("", after=("norm",)), "feature": ["cls", "gap"]}
    over = ("encoder", "probe", "site", "feature")
    numbers = ("accuracy", "gain", "selection", "mean_of_best", "std_of_best")
    result = made(dims, dict.fromkeys(numbers, over), seed, n_train=64, n_test=64, chance=0.1)
    result["std_of_best"] = result.std_of_best / 20
    sweep = dict.fromkeys(("loss", "selection_accuracy", "test_accuracy"), (*over, "config"))
    swept = made(dims | {"config": range(settings)}, sweep, seed + 1).drop_vars("reason")
    about = {"lr": 0.1, "weight_decay": 0.0, "optimizer": "sgd", "epochs": 5.0, "warmup_epochs": 0.0, "min_lr": 0.0}
    swept = swept.assign_coords({key: ("config", [value] * settings) for key, value in about.items()})
    last = {"last_site": ("encoder", ["norm"] * len(encoders))}
    last["last_site_of_feature"] = (("encoder", "feature"), np.full((len(encoders), result.sizes["feature"]), "norm"))
    reason = result.reason.expand_dims(probe=result.probe, feature=result.feature)
    return xr.merge([result.assign(last).assign(reason=reason), swept], compat="override")


def _invariance() -> xr.Dataset:
    names = [role.name for role in CNNS]
    sites = blocks("", after=("head.0",))
    dims = {
        "policy": ["simclr", "supervised"],
        "tokens": ["all"],
        "encoder": names,
        "site": sites,
        "site_a": sites,
        "site_b": sites,
    }
    over = ("policy", "tokens", "encoder")
    result = made(dims, {"invariance": (*over, "site"), "cka": (*over, "site_a", "site_b")}, 8)
    reason = result.reason.expand_dims(policy=result.policy, tokens=result.tokens)
    return result.assign(reason=reason.transpose("policy", "tokens", ...))


def _detection(seed: int, how: str) -> xr.Dataset:
    dims = {"encoder": VIT_NAMES, "kind": ["box", "mask"], "area": ["all", "small", "medium", "large"]}
    return made(dims, {"AP": ("encoder", "kind", "area")}, seed, encoders=how)


def _rcdm() -> xr.Dataset:
    names = ["mae", "moco", "dino", "mae ft"]
    result = made(
        {
            "encoder": names,
            "transformation": ["mirror"],
            "picture_sheet": names,
            "picture_column": ["source", "1", "2"],
        },
        {"share": ("encoder", "transformation")},
        9,
    )
    pixels = np.random.default_rng(10).integers(0, 256, (4, 2, 3, 4, 4, 3), np.uint8)
    dims = ("picture_sheet", "picture_row", "picture_column")
    notes = np.array([[[f"image {row}.png"] * 3 for row in range(2)] for _ in names])
    return result.assign(
        pictures=((*dims, "picture_y", "picture_x", "picture_rgb"), pixels), picture_note=(dims, notes)
    )


def _dynamics() -> xr.Dataset:
    trainings = ["mae ft", "moco ft", "dino ft"]
    names = [f"{training}, step {epoch}" for training, epoch in itertools.product(trainings, range(3))]
    dims = {"encoder": names, "place": ["all"], "weights": ["all", "attention"]}
    result = made(dims, {"efficiency": ("encoder", "place", "weights")}, 11)
    return result.assign_coords(
        start=("encoder", [f"{name.partition(',')[0]}, step 0" for name in names]),
        step=("encoder", [0, 1, 2] * 3),
        training=("encoder", [name.partition(",")[0] for name in names]),
    )


def _minibatch() -> xr.Dataset:
    dims = {
        "tokens": ["all"],
        "count": [1024, 2048],
        "batch": [32, 64],
        "encoder": ["moco"],
        "layer": range(3),
        "layer_a": range(3),
        "layer_b": range(3),
    }
    over = ("tokens", "count", "batch", "encoder")
    result = made(dims, {"cka": (*over, "layer_a", "layer_b"), "difference": over}, 12)
    return result.assign(site=(("encoder", "layer"), [["block.0", "block.1", "block.2"]]))


def _passes() -> dict[str, xr.Dataset]:
    """The results of the pass, by name."""
    over, layer = {"encoder": VIT_NAMES, "site": blocks("")}, ("encoder", "site")
    frequency = made(
        {"encoder": VIT_NAMES, "frequency": [0.1, 0.5, 0.9]},
        {"drop": ("encoder", "frequency"), "accuracy": ("encoder", "frequency"), "test_accuracy": ("encoder",)},
        13,
        strength=0.1,
        width=0.1,
        n_test=64,
    )
    biases = made(
        {"encoder": VIT_NAMES, "class": ["cat", "dog"]},
        {
            "shape_bias": ("encoder", "class"),
            "either": ("encoder", "class"),
            "overall": ("encoder",),
            "overall_either": ("encoder",),
        },
        14,
        n_conflict=64,
    )
    no = {
        "reason": (("encoder", "class"), np.full((len(VIT_NAMES), 2), "")),
        "overall_reason": ("encoder", np.full(len(VIT_NAMES), "")),
    }
    fourier = made(
        over | {"site": blocks("", after=("decoder.block.0",)), "frequency_index": range(2)},
        {"high_frequency": layer, "official": layer, "amplitude": (*layer, "frequency_index")},
        15,
    )
    knn = made(
        over | {"feature": ["cls", "gap", "gap_without_cls"]}, {"accuracy": (*layer, "feature")}, 16, k=20, chance=0.1
    )
    kinds = {"kind": ["heads", "depths", "tokens"]}
    diversity = made(over | kinds, {"cosine": ("kind", *layer)}, 17)
    return {
        "cka": _cka(),
        "attention": _attention(),
        "tokens": _tokens(),
        "spectra": _spectra(),
        "agreement": _agreement(),
        "probes": _probes(NAMES, 7),
        "invariance": _invariance(),
        "knn": knn,
        "fourier": without(fourier, [name for name in VIT_NAMES if name != "mae"], "decoder."),
        "noise": frequency.assign(reason=(("encoder", "frequency"), np.full((len(VIT_NAMES), 3), ""))),
        "shape_bias": biases.assign(no).assign(_classifiers(VIT_NAMES)),
        "diversity": diversity.assign(reason=diversity.reason.expand_dims(kind=diversity.kind)),
    }


def run_of(results: Mapping[str, xr.Dataset], images: str = "shapes", **settings: Any) -> Run:
    """A run in memory."""
    run = Run(None, {"images": {"name": images}, "settings": settings})
    for name, result in results.items():
        run.save(name, result)
    return run


@functools.cache
def everything() -> Evidence:
    """All roles and all results, in several runs."""
    reinit = made(
        {"encoder": ["moco", "simmim"], "end": ["first", "last"], "n": [0, 1, 2]},
        {"accuracy": ("encoder", "end", "n"), "accuracy_drop": ("encoder", "end", "n")},
        18,
    )
    segmenters = made({"encoder": VIT_NAMES}, {"miou": ("encoder",)}, 19)
    return Evidence(
        ROLES,
        (
            run_of(_passes()),
            run_of({"probes": _probes(VIT_NAMES, 20)}, images="flowers"),
            run_of({"detection": _detection(21, "frozen")}, blocks="last"),
            run_of({"detection": _detection(22, "frozen")}, blocks="last-1,last"),
            run_of({"detection": _detection(23, "trained along")}),
            run_of({"rcdm": _rcdm(), "dynamics": _dynamics(), "minibatch": _minibatch(), "reinit": reinit}),
            run_of({"segmenters": segmenters}),
            made_run([role.name for role in TUNED], {"agreement.test_accuracy": lambda at: TUNED_ACCURACY[at.encoder]}),
        ),
    )


def frames(chart: Any) -> list[pd.DataFrame]:
    """The tables that a chart draws, of all its parts."""
    own = [chart.data] if isinstance(getattr(chart, "data", None), pd.DataFrame) else []
    for inside in ("concat", "hconcat", "vconcat", "layer", "spec"):
        found = getattr(chart, inside, alt.Undefined)
        if found is not alt.Undefined and inside in chart._kwds:
            parts = found if isinstance(found, list) else [found]
            own += [frame for part in parts for frame in frames(part)]
    return own


def drawn_numbers(chart: Any, column: str = "value", **where: Any) -> set[float]:
    """What a chart draws at a place: the values of a column in the rows that match, to eight digits."""
    found = set()
    for frame in frames(chart):
        if {column, *where} <= set(frame.columns):
            rows = frame[np.logical_and.reduce([frame[key] == value for key, value in where.items()])]
            found |= {round(float(value), 8) for value in rows[column].dropna()}
    return found
