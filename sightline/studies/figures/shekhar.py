"""Shekhar et al. 2023, "Objectives Matter: Understanding the Impact of Self-Supervised Objectives on Vision Transformer
Representations" (001).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import xarray as xr

from sightline.analyses.dynamics.paths import ALL
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures.casting import cast, first_seed, pair_of_families, tuned
from sightline.studies.figures.contract import Lettered, Panel, PaperFigure, Printed
from sightline.studies.figures.forms import LayerMap, analysed, bars, layer_maps, lines, number_table, sheets
from sightline.studies.figures.numbers import average_precisions, last_probe, precisions_by_blocks
from sightline.studies.figures.shekhar_workshop import (
    AGREE,
    FEATURE_TITLES,
    ROLES,
    ROLES_TUNED,
    before_and_after_parts,
    by_type,
    families,
    layer_types,
    neighbours_and_probe,
    pair_of,
    rank_agreement,
)
from sightline.studies.findings.accuracies import intermediate
from sightline.studies.roles import JE, MASKED_JE, REC

FIRST, OTHER = "joint-embedding and reconstruction", "another joint-embedding and reconstruction"
DEPTHS = {"linear": 1, "depth 2": 2, "depth 3": 3}
ORIENTATION = "Left the source, then pictures drawn from its representation: what they share, the encoder keeps."


# Probes


def _probes(evidence: Evidence, names: Sequence[str], *kinds: str) -> xr.Dataset:
    result = evidence.table("probes", *names)
    lacking = [kind for kind in kinds if kind not in result.probe.values]
    if lacking or "mean_of_best" not in result:
        raise Missing(
            f"probes of the kinds {', '.join(kinds)}: compare with the analysis probes as it is set by default"
        )
    return result


def _probe_depth(evidence: Evidence) -> Panel:
    """Mean ± deviation of the five best of the sweep, over the depth of the probe on the last CLS token."""
    je, rec = pair_of_families(evidence)
    names = [*je, *rec]
    result = _probes(evidence, names, *DEPTHS)
    rows = []
    for name in names:
        for kind, depth in DEPTHS.items():
            of = last_probe(result, name, kind)
            mean, std = float(of.mean_of_best), float(of.std_of_best)
            rows.append({"series": name, "depth": depth, "value": mean, "low": mean - std, "high": mean + std})
    table = pd.DataFrame(rows)
    note = "Top-1 accuracy of probes on the last CLS token: mean of the five best settings of the sweep ± their std."
    panel = lines(table, x_title="depth of the probe", y_title="top-1 accuracy", percent=True, note=note)
    means = table.pivot_table(index="series", columns="depth", values="value", sort=False)
    gains = 100 * (means[3] - means[1])
    paper = {rec[0]: "+1.03 (MAE)"} | dict.fromkeys(je, "no improvement")
    printed = tuple(
        Printed(f"gain of depth 3, {name}, points", text, f"{gains[name]:+.2f}") for name, text in paper.items()
    )
    return replace(panel, printed=printed)


def _added_block(evidence: Evidence) -> Panel:
    """Table: the last CLS token alone, and beside the best of the other blocks, chosen on the selection split."""
    je, rec = pair_of_families(evidence)
    names = [*rec, *je]
    result = _probes(evidence, names, "linear", "multilayer")
    mae = next((role.name for role in evidence.roles if role.name in rec and role.method == "mae"), "")
    printed = {
        (mae, "last block"): "67.73 ± 0.10",
        (mae, "last and another"): "69.53 ± 0.07 to 70.12 ± 0.04",
        (mae, "gain"): "+1.8 to +2.4",
    }
    rows = []
    for name in names:
        alone = last_probe(result, name, "linear")
        both = result.sel(encoder=name, probe="multilayer", feature=alone.feature.item())
        others = intermediate(both.selection, str(alone.site.item()))
        if not others.size:
            raise Missing(f"a probe on the last and another block of {name}")
        best = both.sel(site=others.site[int(others.argmax("site"))].item())
        texts = {
            "last block": _mean_and_std(alone),
            "last and another": f"{_mean_and_std(best)} (block {int(best.block)})",
            "gain": f"{100 * float(best.mean_of_best - alone.mean_of_best):+.2f}",
        }
        rows += [
            {"row": name, "column": column, "ours": text, "paper": printed.get((name, column), "")}
            for column, text in texts.items()
        ]
    note = (
        "Top-1 accuracy in per cent of linear probes, mean ± std of the five best settings: on the last CLS token, and "
        "on it beside that of the block which is best on the selection split."
    )
    return number_table(pd.DataFrame(rows), note=note)


def _mean_and_std(of: xr.Dataset) -> str:
    return f"{100 * float(of.mean_of_best):.2f} ± {100 * float(of.std_of_best):.2f}"


def _gain_of_blocks(evidence: Evidence) -> Panel:
    je, rec = pair_of_families(evidence)
    return analysed(evidence, "probes", "added", [*je, *rec], feature=["cls"])


def _gain_after_tuning(evidence: Evidence) -> Panel:
    rec = cast(evidence, REC, "mae")[:1]
    return analysed(evidence, "probes", "added", [*rec, *tuned(evidence, *rec)], feature=["cls"])


# Pictures


def _samples(evidence: Evidence, after: bool = False, rows: int = 4) -> Panel:
    names = cast(evidence, REC, "mae")
    return sheets(evidence, tuned(evidence, *names[:1]) if after else names, rows, ORIENTATION)


def _samples_of_je(evidence: Evidence, other: int, rows: int = 8) -> Panel:
    """Of the first or the second joint-embedding encoder."""
    _, je = pair_of(evidence, other)
    return sheets(evidence, [je], rows, ORIENTATION)


def _all_samples(evidence: Evidence) -> Panel:
    je, rec = pair_of_families(evidence)
    return sheets(evidence, [*rec, *je], note=ORIENTATION)


# Similarity


def _minibatch(evidence: Evidence, figure: str) -> Panel:
    evidence = evidence.apart()  # as the finding: one seed of an encoder is enough
    names = [role.name for role in evidence.encoders(None) if evidence.holds("minibatch", role.name)]
    return analysed(evidence, "minibatch", figure, names[:1] or cast(evidence, JE)[:1])


def _over_distance(evidence: Evidence, family: str) -> Panel:
    """CKA against the distance in depth: one family across architectures, and two families in one."""
    vit = {JE: cast(evidence, JE, "moco_v3", "dino")[0], REC: cast(evidence, REC, "mae")[0]}
    pairs = [(cast(evidence, family, network="cnn")[0], vit[family]), (vit[JE], vit[REC])]
    words = (f"{family} CNN and ViT", "joint-embedding and reconstruction ViTs")
    tables = []
    for (a, b), what in zip(pairs, words, strict=True):
        of = evidence.table("cka", a, b).isel(tokens=0).sel(encoder_a=a, encoder_b=b)
        table = pd.DataFrame({"depth": of.relative_distance.values, "value": of.distance_cka.values})
        tables.append(table.dropna().assign(series=f"{a} and {b}", what=what))
    note = (
        "Mean CKA of a block of one encoder and a block of the other against the distance of their depths: two "
        f"architectures of one objective ({words[0]}), and two objectives of one architecture ({words[1]})."
    )
    table = pd.concat(tables, ignore_index=True)
    return lines(
        table,
        x_title="distance in relative depth",
        y_title="mean CKA",
        series_title="encoders",
        domain=(0, 1),
        details={"what": "what"},
        note=note,
    )


def _path(evidence: Evidence) -> Panel:
    """Distance from the start over the length of the path, of the attention parameters, at each kept step."""
    je, rec = pair_of_families(evidence)
    tables = []
    for name in (*rec, *je):
        run, steps = next(iter(evidence.apart().trainings("dynamics", name).values()))
        efficiency = run["dynamics"].efficiency.sel(encoder=steps, place=ALL)
        weights = "attention" if "attention" in efficiency.weights.values else ALL
        values = efficiency.sel(weights=weights)
        table = pd.DataFrame({"series": name, "depth": values.step.values, "value": values.values, "weights": weights})
        tables.append(table.dropna(subset="value"))
    note = (
        "Distance of the attention parameters from where fine-tuning began over the length of their path, at each "
        "kept step: 1 is straight."
    )
    return lines(
        pd.concat(tables, ignore_index=True),
        x_title="step of fine-tuning",
        y_title="path efficiency",
        series_title="fine-tuned from",
        domain=(0, 1),
        note=note,
    )


def _masked(evidence: Evidence, masked_tuned: bool, after: bool) -> Panel:
    """CKA of MSN, or of the fine-tuned one, with all others before or after fine-tuning."""
    masked = cast(evidence, MASKED_JE, "msn")[:1]
    masked = tuned(evidence, *masked) if masked_tuned else masked
    je, rec = pair_of_families(evidence)
    others = tuned(evidence, *je, *rec) if after else [*je, *rec]
    return layer_maps(evidence, [LayerMap(masked[0], other, title=other) for other in others])


# Detection


def _precisions(evidence: Evidence, frozen: bool, paper: dict[tuple[str, bool | None], tuple[float, ...]]) -> Panel:
    """AP of boxes and masks, of all objects and of large and small ones, as the paper's table has them."""
    je, rec = pair_of_families(evidence)
    extra = [first_seed(evidence, role.name) for role in evidence.encoders(JE, multicrop=False)] if frozen else []
    names = list(dict.fromkeys([*rec, *je, *extra]))
    table = average_precisions(evidence, names, frozen=frozen).set_index(["encoder", "kind", "area"])
    roles = {role.name: role for role in evidence.roles}
    rows = []
    for name in names:
        role = roles[name]
        numbers = paper.get((role.method, role.multicrop)) or paper.get((role.method, None), ())
        for place, (column, kind, area) in enumerate(_COLUMNS):
            if (name, kind, area) in table.index:
                ours = 100 * float(table.value[name, kind, area])
                text = f"{ours:.2f}" if np.isfinite(ours) else "–"
                printed = f"{numbers[place]:.2f}" if numbers else ""
                rows.append({"row": name, "column": column, "ours": text, "paper": printed})
    how = "frozen" if frozen else "trained along"
    note = f"AP in per cent of a Mask R-CNN on encoders that are {how}, on the images of this study (paper: MS COCO)."
    return number_table(pd.DataFrame(rows), note=note)


_COLUMNS = tuple(
    (f"{what} AP{size}", kind, area)
    for what, kind in (("detection", "box"), ("segmentation", "mask"))
    for size, area in (("", "all"), (" large", "large"), (" small", "small"))
)
FROZEN: dict[tuple[str, bool | None], tuple[float, ...]] = {
    ("mae", None): (30.25, 39.93, 18.69, 28.56, 41.73, 14.37),
    ("moco_v3", None): (28.75, 40.21, 15.49, 26.67, 41.92, 10.89),
    ("dino", True): (32.57, 44.14, 19.89, 30.04, 45.77, 14.37),
    ("dino", False): (29.97, 40.82, 17.55, 28.16, 42.53, 12.99),
}
TRAINED: dict[tuple[str, bool | None], tuple[float, ...]] = {
    ("mae", None): (51.57, 66.36, 35.27, 45.84, 63.84, 27.27),
    ("moco_v3", None): (48.81, 64.83, 32.79, 43.18, 62.86, 23.78),
    ("dino", True): (47.73, 62.49, 32.17, 30.04, 60.03, 24.28),
}


def _added_to_pyramid(evidence: Evidence) -> Panel:
    """AP of detectors that see the last block, and of those that see others beside it."""
    je, rec = pair_of_families(evidence)
    both = {"last block": False, "last blocks side by side": True}
    table = precisions_by_blocks(evidence, [*rec, *je], both)
    table = table[(table.kind == "box") & (table.area == "all")].rename(columns={"encoder": "group"})
    note = "AP of boxes by detectors on frozen encoders; lines: 95 % over test images."
    return bars(table, x_title="encoder", y_title="box AP", series_title="the detector sees", note=note)


# The figures

FIGURES = (
    PaperFigure(
        "001 Fig 1",
        "CKA between pre-trained ViTs",
        ("cka",),
        ROLES,
        {
            "a": Lettered("block outputs", families),
            "b": Lettered("by layer type", partial(layer_types, layers=("norm1", "qkv", "fc1"))),
        },
        columns=1,
    ),
    PaperFigure(
        "001 Fig 2",
        "How information is distributed, by probes",
        ("probes",),
        ROLES,
        {
            "a": Lettered("non-linear probes on the last CLS token", _probe_depth),
            "b": Lettered("linear probes with features of several depths", _added_block),
            "c": Lettered("a second CLS token beside the last", _gain_of_blocks),
        },
        one_legend=False,
        columns=2,
    ),
    PaperFigure(
        "001 Table 2b",
        "Linear probes with features of several depths",
        ("probes",),
        ROLES,
        {"": Lettered("top-1 accuracy, per cent", _added_block)},
    ),
    PaperFigure(
        "001 Fig 3",
        "Pictures drawn from representations",
        ("rcdm",),
        ROLES,
        {"": Lettered("RCDM samples", _all_samples)},
    ),
    PaperFigure(
        "001 Fig 4",
        f"CKA of {FIRST} before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        before_and_after_parts(),
        columns=2,
    ),
    PaperFigure(
        "001 Fig 5",
        "What other blocks add to a probe, before and after fine-tuning",
        ("probes",),
        "a reconstruction ViT, also fine-tuned",
        {"": Lettered("gain of a second CLS token", _gain_after_tuning)},
    ),
    PaperFigure(
        "001 Fig 6",
        "Minibatch CKA against batch size and number of images",
        ("minibatch",),
        "any encoder",
        {
            "a": Lettered("batch size", partial(_minibatch, figure="batch")),
            "b": Lettered("number of images", partial(_minibatch, figure="count")),
        },
        columns=2,
    ),
    PaperFigure(
        "001 Fig 7",
        "Detection with features of other blocks",
        ("detection",),
        ROLES,
        {"": Lettered("frozen encoders", _added_to_pyramid)},
    ),
    PaperFigure(
        "001 Fig 8",
        f"CKA of {OTHER} before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        before_and_after_parts(other=1),
        columns=2,
    ),
    PaperFigure(
        "001 Fig 9",
        "CKA of attention layers before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        {
            letter: Lettered(f"{who}, {when}", partial(layer_types, layers=("qkv",), after=after, other=other))
            for letter, who, other, when, after in (
                ("a", FIRST, 0, "pre-trained", False),
                ("b", FIRST, 0, "fine-tuned", True),
                ("c", OTHER, 1, "pre-trained", False),
                ("d", OTHER, 1, "fine-tuned", True),
            )
        },
        columns=2,
    ),
    PaperFigure(
        "001 Fig 10",
        "CKA by layer type before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        by_type("abc", ("fc1", "norm1", "qkv"), after=False) | by_type("def", ("fc1", "norm1", "qkv"), after=True),
    ),
    PaperFigure(
        "001 Fig 11",
        "CKA against distance in depth, across architectures and objectives",
        ("cka",),
        "a joint-embedding and a reconstruction ViT, a CNN of either",
        {
            "a": Lettered("joint-embedding objectives across architectures", partial(_over_distance, family=JE)),
            "b": Lettered("reconstruction objectives across architectures", partial(_over_distance, family=REC)),
        },
        columns=2,
        one_legend=False,
    ),
    PaperFigure(
        "001 Fig 12",
        "20-nearest-neighbour accuracy over the blocks, and the linear probe",
        ("knn", "probes"),
        ROLES,
        {
            letter: Lettered(FEATURE_TITLES[feature], partial(neighbours_and_probe, feature=feature))
            for letter, feature in (("a", "cls"), ("b", "gap_without_cls"))
        },
        columns=2,
    ),
    PaperFigure(
        "001 Fig 13",
        "Rank correlation of class predictions",
        ("agreement",),
        ROLES,
        {
            letter: Lettered(title, partial(rank_agreement, images=images, ranks=(5, 10)))
            for letter, (images, title) in zip("abc", AGREE.items(), strict=True)
        },
    ),
    PaperFigure(
        "001 Fig 14",
        "Fine-tuning dynamics of attention layers",
        ("dynamics",),
        ROLES_TUNED,
        {"b": Lettered("path efficiency", _path)},  # 14a is a drawing of the idea
    ),
    PaperFigure(
        "001 Fig 15",
        "CKA of a pre-trained MSN with joint-embedding and reconstruction ViTs",
        ("cka",),
        f"MSN, {ROLES}, also fine-tuned",
        {
            "a": Lettered("pre-trained", partial(_masked, masked_tuned=False, after=False)),
            "b": Lettered("fine-tuned", partial(_masked, masked_tuned=False, after=True)),
        },
        columns=1,
    ),
    PaperFigure(
        "001 Fig 16",
        "CKA of a fine-tuned MSN with joint-embedding and reconstruction ViTs",
        ("cka",),
        f"a fine-tuned MSN, {ROLES}, also fine-tuned",
        {
            "a": Lettered("pre-trained", partial(_masked, masked_tuned=True, after=False)),
            "b": Lettered("fine-tuned", partial(_masked, masked_tuned=True, after=True)),
        },
        columns=1,
    ),
    PaperFigure(
        "001 Fig 17",
        "Pictures drawn from reconstruction before and after fine-tuning",
        ("rcdm",),
        "a reconstruction ViT, also fine-tuned",
        {"a": Lettered("pre-trained", _samples), "b": Lettered("fine-tuned", partial(_samples, after=True))},
        columns=2,
    ),
    PaperFigure(
        "001 Fig 18",
        "More pictures drawn from representations",
        ("rcdm",),
        f"{ROLES}, also fine-tuned",
        {
            "a": Lettered("reconstruction, pre-trained", partial(_samples, rows=8)),
            "b": Lettered("joint-embedding, pre-trained", partial(_samples_of_je, other=0)),
            "c": Lettered("reconstruction, fine-tuned", partial(_samples, after=True, rows=8)),
            "d": Lettered("another joint-embedding, pre-trained", partial(_samples_of_je, other=1)),
        },
        columns=2,
    ),
    PaperFigure(
        "001 Table 6",
        "Detection and segmentation on frozen encoders",
        ("detection",),
        f"{ROLES}, DINO without multi-crop",
        {"": Lettered("AP, per cent", partial(_precisions, frozen=True, paper=FROZEN))},
    ),
    PaperFigure(
        "001 Table 7",
        "Detection and segmentation, encoders trained end to end",
        ("detection",),
        ROLES,
        {"": Lettered("AP, per cent", partial(_precisions, frozen=False, paper=TRAINED))},
    ),
)
