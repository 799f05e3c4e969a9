"""Results as the analyses give them, made from formulas: the report and its figures are tested without any model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

TOKENS = ("all", "cls", "mean", "patches")
PARTS = ("norm1", "qkv", "fc1")


@dataclass
class SampleRun:
    """Stands for `sightline.core.run_folder.Run`: the report uses no more of it than this."""

    path: Path
    request: dict[str, Any]
    results: dict[str, xr.Dataset] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.results)

    def __getitem__(self, name: str) -> xr.Dataset:
        return self.results[name]


def vit_sites(depth: int, parts: Sequence[str] = PARTS) -> list[str]:
    return [
        "embed",
        *(site for i in range(depth) for site in (*(f"block.{i}.{p}" for p in parts), f"block.{i}")),
        "norm",
    ]


def resnet_sites(depth: int) -> list[str]:
    return [site for i in range(depth) for site in (f"block.{i}.residual", f"block.{i}")]


def layer_type(site: str) -> str:
    return site.split(".")[2] if site.count(".") == 2 else site.split(".")[0]


def block_number(site: str) -> int:
    return int(site.split(".")[1]) if site.startswith("block") else -1


def union(sites: Mapping[str, Sequence[str]]) -> list[str]:
    """Sites of all encoders, each once, in order of computation."""
    merged: list[str] = []
    for own in sites.values():
        at = 0
        for site in own:
            if site not in merged:
                merged.insert(at, site)
            at = merged.index(site) + 1
    return merged


def cka_result(sites: Mapping[str, Sequence[str]], without_cls: Sequence[str] = (), seed: int = 0) -> xr.Dataset:
    """Smooth similarity that falls with the distance in depth; the last token view of `without_cls` encoders is NaN."""
    rng = np.random.default_rng(seed)
    names, every = list(sites), union(sites)
    where = {n: [every.index(s) for s in sites[n]] for n in names}
    shape = (len(TOKENS), len(names), len(names), len(every), len(every))
    value = np.full(shape, np.nan)
    taste = {n: rng.uniform(0.1, 0.9, len(TOKENS)) for n in names}
    reason = np.full((len(TOKENS), len(names), len(every)), "this encoder has no such site", dtype=object)
    for a, name in enumerate(names):
        reason[:, a, where[name]] = ""
    for t in range(len(TOKENS)):
        for a, first in enumerate(names):
            for b, second in enumerate(names):
                x, y = (np.linspace(0, 1, len(sites[n])) for n in (first, second))
                apart = abs(taste[first][t] - taste[second][t]) * (x[:, None] + y[None, :]) / 2
                close = np.exp(-3 * np.abs(x[:, None] - y[None, :])) * (1 - apart) - 0.02 * (first != second)
                value[t, a, b][np.ix_(where[first], where[second])] = close
    for a, name in enumerate(names):
        if name in without_cls:
            value[TOKENS.index("cls"), a] = np.nan
            value[TOKENS.index("cls"), :, a] = np.nan
            reason[TOKENS.index("cls"), a, where[name]] = "this site has no such token view"
    width = 0.05 * (1.2 - value)
    coords = {
        "tokens": list(TOKENS),
        "encoder_a": names,
        "encoder_b": names,
        "encoder": names,
        "site_a": every,
        "site_b": every,
        "site": every,
        "layer_type": ("site", [layer_type(s) for s in every]),
        "block": ("site", [block_number(s) for s in every]),
    }
    pair = ("tokens", "encoder_a", "encoder_b", "site_a", "site_b")
    data = {
        "cka": (pair, value),
        "cka_low": (pair, value - width),
        "cka_high": (pair, np.minimum(value + width, 1)),
        "cka_null": (pair, value * 0.01),
        "reason": (("tokens", "encoder", "site"), reason.astype(str)),
    }
    return xr.Dataset(
        data, coords=coords, attrs={"estimator": "unbiased minibatch", "batch": 32, "interval": "95 % bootstrap"}
    )


def similarity_result(sites: Mapping[str, Sequence[str]]) -> xr.Dataset:
    """The same of blocks by three measures, one of them a distance."""
    cka = cka_result({name: [site for site in own if layer_type(site) == "block"] for name, own in sites.items()})
    ends = ("", "_low", "_high", "_null")
    measures = {
        "procrustes": [cka[f"cka{end}"] for end in ends],
        "shape": [np.arccos(cka[f"cka{end}"].clip(0, 1)) for end in ("", "_high", "_low", "_null")],
        "rsa": [cka[f"cka{end}"] ** 2 for end in ends],
    }
    parts = {
        f"similarity{end}": xr.concat([of[at] for of in measures.values()], "measure") for at, end in enumerate(ends)
    }
    return xr.Dataset({**parts, "reason": cka.reason}).assign_coords(
        measure=list(measures),
        is_distance=("measure", [False, True, False]),
        measure_title=("measure", ["Procrustes similarity", "shape distance (radians)", "RSA"]),
    )


def constant_site(
    result: xr.Dataset, encoder: str, site: str, why: str = "the activations are the same for all images"
) -> xr.Dataset:
    """The same result, had this site's activations been constant: NaN, with the reason."""
    result = result.copy(deep=True)
    for name in ("cka", "cka_low", "cka_high", "cka_null"):
        result[name].loc[{"encoder_a": encoder, "site_a": site}] = np.nan
        result[name].loc[{"encoder_b": encoder, "site_b": site}] = np.nan
    result["reason"] = result["reason"].astype(object)
    result["reason"].loc[{"encoder": encoder, "site": site}] = why
    result["reason"] = result["reason"].astype(str)
    return result


def knn_result(sites: Mapping[str, Sequence[str]], without_cls: Sequence[str] = ()) -> xr.Dataset:
    """Accuracy that rises over depth, with its Wilson interval for 400 test images."""
    blocks = {n: [s for s in own if s.startswith("block") and s.count(".") == 1] for n, own in sites.items()}
    names, every, features = list(sites), union(blocks), ["cls", "gap", "gap_without_cls"]
    p = np.full((len(names), len(every), len(features)), np.nan)
    for a, name in enumerate(names):
        for i, site in enumerate(blocks[name]):
            for f, feature in enumerate(features):
                if feature == "gap" or name not in without_cls:
                    p[a, every.index(site), f] = 0.1 + 0.7 * (i + 1) / len(blocks[name]) - 0.07 * a + 0.03 * f
    p = np.clip(p, 0.01, 0.99)
    n, z = 400, 1.959963984540054
    centre, half = (
        (p + z**2 / (2 * n)) / (1 + z**2 / n),
        z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n),
    )
    dims = ("encoder", "site", "feature")
    return xr.Dataset(
        {"accuracy": (dims, p), "accuracy_low": (dims, centre - half), "accuracy_high": (dims, centre + half)},
        coords={
            "encoder": names,
            "site": every,
            "feature": features,
            "layer_type": ("site", [layer_type(s) for s in every]),
            "block": ("site", [block_number(s) for s in every]),
        },
        attrs={
            "protocol": "weighted k-NN on L2-normalised features",
            "k": 20,
            "temperature": 0.07,
            "n_train": 400,
            "n_test": 400,
            "classes": 5,
            "chance": 1 / 16,
        },
    )


def request(names: Sequence[str], sites: Mapping[str, Sequence[str]], analyses: Sequence[str]) -> dict[str, Any]:
    return {
        "encoders": [
            {
                "name": name,
                "reference": f"timm:vit_small_patch16_224.{i}",
                "family": "vit",
                "depth": sum(s.startswith("block") and s.count(".") == 1 for s in sites[name]),
                "heads": 6,
                "patch": 16,
                "parameters": 21_665_664,
                "weights": f"{i:02d}" + "9f3c" * 15 + "ab",
                "preprocess": {
                    "size": [224, 224],
                    "resize": 256,
                    "interpolation": "bicubic",
                    "mean": [0.485, 0.456, 0.406],
                    "std": [0.229, 0.224, 0.225],
                },
                "tokens": {"prefix": 1, "cls": 0, "grid": [14, 14]},
            }
            for i, name in enumerate(names)
        ],
        "images": {
            "name": "shapes?size=224",
            "splits": {"train": 400, "test": 400},
            "own_splits": True,
            "digest": "5e" * 32,
            "classes": [f"class {i}" for i in range(16)],
        },
        "analyses": {
            name: {"config": {"bootstrap": 200}, "splits": ["test"], "sites": dict(sites)} for name in analyses
        },
        "settings": {"batch": 32, "seed": 0, "precision": "float32"},
        "date": "2026-01-31T12:00:00+00:00",
        "command": "sightline compare …",
        "versions": {"sightline": "0.1.0", "torch": "2.15.0"},
        "skipped": [["val/my_cat/001.jpg", "truncated JPEG"]],
        "timing": {"seconds": 12.5},
    }


def sample_run(path: Path, names: Sequence[str] = ("dino", "mae"), depths: Sequence[int] = (12, 12)) -> SampleRun:
    """Two encoders (or more) with CKA and k-NN; a constant site in the second one."""
    sites = {name: vit_sites(depth) for name, depth in zip(names, depths, strict=True)}
    cka = constant_site(cka_result(sites), names[-1], "block.2")
    return SampleRun(path, request(names, sites, ["cka", "knn"]), {"cka": cka, "knn": knn_result(sites)})
