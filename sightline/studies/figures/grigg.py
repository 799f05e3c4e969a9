"""Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?" (004)."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures.casting import cast, two_seeds
from sightline.studies.figures.contract import Lettered, Panel, PaperFigure
from sightline.studies.figures.forms import LayerMap, analysed, depth_curves, layer_maps, lines
from sightline.studies.roles import JE, SUPERVISED

ROLES = "a joint-embedding and a supervised CNN"
LAYERS = {"all": "all layers", "residual": "odd layers (residual)", "block": "even layers (post-residual)"}
OWN_POLICY = {JE: "simclr", SUPERVISED: "supervised"}  # each under the augmentations of its training


def _both(evidence: Evidence) -> list[str]:
    """SimCLR and the supervised network."""
    return [cast(evidence, family, *methods, network="cnn")[0] for family, *methods in ((JE, "simclr"), (SUPERVISED,))]


def _seeds(evidence: Evidence, family: str, layer: str) -> Panel:
    """CKA between the layers of two seeds of an encoder."""
    first, second = two_seeds(evidence, family, *(["simclr"] if family == JE else []))
    panel = layer_maps(evidence, [LayerMap(first, second, layer)])
    remark = f"There is one seed of {first} only, which is compared with itself." if first == second else ""
    return replace(panel, remark=remark)


def _across(evidence: Evidence, layer: str, best: bool = False) -> Panel:
    """CKA between SimCLR (upwards) and the supervised network (to the right); dots: the most similar of the latter."""
    self_supervised, supervised = _both(evidence)
    return layer_maps(evidence, [LayerMap(self_supervised, supervised, layer)], best=best)


def _diagonal_and_maximum(evidence: Evidence) -> Panel:
    """Each block of SimCLR with the block of the supervised network at its place, and with the most similar one."""
    a, b = _both(evidence)
    of = evidence.table("cka", a, b).isel(tokens=0).sel(encoder_a=a, encoder_b=b)
    blocks = (of.layer_type == "block").values & np.char.startswith(of.site.values.astype(str), "block.")
    of = of.sel(site_a=of.site.values[blocks])
    number = of.block.sel(site=of.site_a.values).values
    both = {"diag": of.diagonal, "max": of.row_max}
    parts = [
        pd.DataFrame({"series": name, "depth": number, "value": values.values, "site": of.site_a.values})
        for name, values in both.items()
    ]
    table = pd.concat(parts, ignore_index=True).dropna(subset="value")
    if table.empty:
        raise Missing(f"CKA of the blocks of {a} and {b}")
    if "stage" in of.coords:
        stages = of.stage.sel(encoder=a).to_series().reindex(table.site).to_numpy()
        first = table.groupby(["series", stages]).depth.transform("min")
        table = table.assign(stage=stages, starts=(stages > 1) & (table.depth == first))
    note = f"Blocks of {a} with those of {b}: at the same place (diag), and the most similar one (max)."
    return lines(
        table,
        x_title="block",
        y_title="CKA",
        series_title="compared with",
        domain=(0, 1),
        details={"site": "layer"},
        note=note,
    )


def _probes(evidence: Evidence) -> Panel:
    names = _both(evidence)
    result = evidence.table("probes", *names)
    kind = "linear" if "linear" in result.probe.values else "ridge"
    return depth_curves(
        evidence,
        "probes",
        "accuracy",
        names,
        value_title="linear probe accuracy",
        percent=True,
        select={"probe": kind, "feature": "gap"},
        note=f"Accuracy of a {kind} probe on the output of each block.",
    )


def _invariance(evidence: Evidence) -> Panel:
    """CKA of two augmented copies of the images at each block, each encoder under its own augmentations."""
    names = _both(evidence)
    panels = [
        depth_curves(
            evidence,
            "invariance",
            "invariance",
            [name],
            value_title="CKA of two copies",
            types=("block", "head"),
            select={"policy": policy, "tokens": _first_view(evidence, name)},
        )
        for name, policy in zip(names, OWN_POLICY.values(), strict=True)
    ]
    table = pd.concat([panel.table for panel in panels], ignore_index=True)
    return lines(
        table,
        x_title="block",
        y_title="CKA of two copies",
        domain=(0, 1),
        details={"site": "layer"},
        note="CKA of each block on two augmented copies of the test images, each encoder under the augmentations of "
        "its training; the layers of a head come last.",
    )


def _first_view(evidence: Evidence, name: str) -> str:
    return str(evidence.table("invariance", name).tokens.values[0])


def _classes(evidence: Evidence) -> Panel:
    names = _both(evidence)
    view = str(evidence.table("cka", *names).tokens.values[0])
    return depth_curves(
        evidence,
        "cka",
        "class_cka",
        names,
        value_title="CKA with the classes",
        types=("block", "head"),
        select={"tokens": view},
        domain=(0, 0.5),
        note="CKA of each block with the one-hot classes; a head comes last.",
    )


def _copies(evidence: Evidence, family: str) -> Panel:
    name = _both(evidence)[list(OWN_POLICY).index(family)]
    return analysed(evidence, "invariance", "layers", [name], policy=[OWN_POLICY[family]])


def _maps_of_seeds(family: str, order: tuple[str, ...]) -> dict[str, Lettered]:
    return {
        letter: Lettered(LAYERS[layer], partial(_seeds, family=family, layer=layer))
        for letter, layer in zip("abc", order, strict=True)
    }


FIGURES = (
    PaperFigure(
        "004 Fig 1",
        "CKA between layers of two SimCLR networks",
        ("cka",),
        "two seeds of a joint-embedding CNN",
        _maps_of_seeds(JE, ("all", "residual", "block")),
    ),
    PaperFigure(
        "004 Fig 2",
        "CKA between SimCLR and supervised networks",
        ("cka",),
        ROLES,
        {
            "a": Lettered(LAYERS["residual"], partial(_across, layer="residual")),
            "b": Lettered(LAYERS["block"], partial(_across, layer="block", best=True)),
            "c": Lettered("even layers, diagonal and maximum", _diagonal_and_maximum),
        },
        one_legend=False,
    ),
    PaperFigure(
        "004 Fig 3",
        "What the last layers learn",
        ("probes", "invariance", "cka"),
        ROLES,
        {
            "a": Lettered("linear probes", _probes),
            "b": Lettered("augmentation invariance", _invariance),
            "c": Lettered("similarity with the classes", _classes),
        },
    ),
    PaperFigure(
        "004 Fig 4",
        "CKA between layers of two supervised networks",
        ("cka",),
        "two seeds of a supervised CNN",
        _maps_of_seeds(SUPERVISED, ("all", "block", "residual")),
    ),
    PaperFigure(
        "004 Fig 5",
        "CKA of two augmented copies of the images, all layers",
        ("invariance",),
        ROLES,
        {
            "a": Lettered("supervised", partial(_copies, family=SUPERVISED)),
            "b": Lettered("SimCLR", partial(_copies, family=JE)),
        },
        columns=2,
    ),
)
