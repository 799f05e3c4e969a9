"""Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?" (003)."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import altair as alt
import pandas as pd

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures.casting import cast, contrastive_and_masked, first_seed, sizes_of, tuned, variants
from sightline.studies.figures.contract import Lettered, Panel, PaperFigure
from sightline.studies.figures.forms import (
    analysed,
    attention_maps,
    depth_curves,
    labelled_points,
    lines,
    number_table,
    part_of,
)
from sightline.studies.figures.numbers import (
    Number,
    average_precisions,
    linear_probe,
    mean_iou,
    probe_on_other_images,
    rows_of,
    tuned_accuracy,
)
from sightline.studies.findings.park import WEIGHT, sweeps
from sightline.studies.roles import HYBRID, JE, REC, SUPERVISED, Role

Who = Callable[[Evidence], list[str]]
ROLES = "a joint-embedding and a reconstruction ViT"
ROLES_TUNED = f"{ROLES}, both also fine-tuned"
CL, MIM = "joint-embedding (CL)", "reconstruction (MIM)"


# Who


def _everybody(evidence: Evidence) -> list[str]:
    return [*cast(evidence, JE), *cast(evidence, REC)]


def _all_sizes(evidence: Evidence) -> list[str]:
    """One method of each family in its sizes; those of one size, where the study does not vary it."""
    return [role.name for role in (*sizes_of(evidence, JE, "moco_v3"), *sizes_of(evidence, REC, "simmim"))]


def _sizes_if_any(evidence: Evidence) -> list[str]:
    try:
        return _all_sizes(evidence)
    except Missing:
        return contrastive_and_masked(evidence)


def _fine_tuned(evidence: Evidence) -> list[str]:
    return tuned(evidence, *contrastive_and_masked(evidence))


def _with_supervised(evidence: Evidence) -> list[str]:
    """The supervised encoder is there for comparison, if there is one."""
    return [
        *contrastive_and_masked(evidence),
        *(cast(evidence, SUPERVISED)[:1] if evidence.encoders(SUPERVISED) else []),
    ]


def _reconstructions(evidence: Evidence) -> list[str]:
    """MAE, whose decoder is wanted, and one that has none."""
    return list(dict.fromkeys([*cast(evidence, REC, "mae"), *cast(evidence, REC, "simmim")]))


def _sweep(evidence: Evidence) -> tuple[str, str, list[Role]]:
    """λ = 1 and λ = 0, and hybrids between: of one sweep, as findings have it, that with the most weights.

    Where a sweep has no such ends of its own, they are the two objectives that it mixes.
    """
    hybrid_names = {role.name for role in evidence.encoders(HYBRID)}
    sweep = max(sweeps(evidence), key=lambda sweep: (len(sweep.hybrids), {*sweep.ends[0]} <= hybrid_names))
    hybrids = sorted(sweep.hybrids, key=lambda role: role.weight or 0)
    if {*sweep.ends[0]} <= hybrid_names:
        je, rec = (first_seed(evidence, name) for name in sweep.ends[0])
        return je, rec, hybrids
    return cast(evidence, JE, "moco_v3")[0], cast(evidence, REC, "simmim")[0], hybrids


def _hybrid_and_ends(evidence: Evidence) -> list[str]:
    """The hybrid whose weight is nearest to 0.2, after the two objectives that it mixes."""
    je, rec, hybrids = _sweep(evidence)
    nearest = min(hybrids, key=lambda role: abs((role.weight or 0) - WEIGHT))
    return [je, rec, first_seed(evidence, nearest.name)]


# Curves over depth


def _distance(evidence: Evidence, who: Who) -> Panel:
    return depth_curves(
        evidence,
        "attention",
        "distance_mean",
        who(evidence),
        value_title="attention distance (pixels)",
        types=("attn_map",),
        note="Mean distance in pixels from a patch to what it attends to; bands 95 % over images.",
    )


def _nmi(evidence: Evidence, who: Who, decoder: bool = False) -> Panel:
    note = "Normalised mutual information of queries and keys, mean of the heads: near 0 all patches attend alike."
    return depth_curves(
        evidence,
        "attention",
        "nmi_mean",
        who(evidence),
        value_title="normalised mutual information",
        types=("attn_map",),
        decoder=decoder,
        note=note + (" Blocks of a decoder come last." if decoder else ""),
    )


def _fourier(evidence: Evidence, who: Who, decoder: bool = False) -> Panel:
    note = "Log amplitude of the highest frequency relative to frequency 0."
    return depth_curves(
        evidence,
        "fourier",
        "high_frequency",
        who(evidence),
        value_title="Δ log amplitude",
        decoder=decoder,
        note=note + (" Blocks of a decoder come last." if decoder else ""),
    )


def _cosine(evidence: Evidence, kind: str) -> Panel:
    return depth_curves(
        evidence,
        "diversity",
        "cosine",
        _sizes_if_any(evidence),
        value_title="cosine similarity",
        select={"kind": kind},
        domain=(0, 1),
        note="Mean cosine; high in the last blocks: they repeat themselves.",
    )


def _second_value(evidence: Evidence, cloud: str) -> Panel:
    return depth_curves(
        evidence,
        "spectra",
        f"{cloud}_uncentred_second",
        contrastive_and_masked(evidence),
        value_title="second log σ",
        types=("embed", "block"),
        note="Second largest log singular value, not relative to the largest: a block that lowers it clumps tokens.",
    )


def _head_deviation(evidence: Evidence) -> Panel:
    return depth_curves(
        evidence,
        "attention",
        "nmi_std",
        contrastive_and_masked(evidence),
        types=("attn_map",),
        value_title="std of NMI over heads",
        note="Standard deviation of NMI over the heads of each layer.",
    )


def _heads_of_a_layer(evidence: Evidence) -> Panel:
    """Densities of NMI over the heads of the layer where those of the joint-embedding encoder differ most."""
    names = contrastive_and_masked(evidence)
    result = part_of(evidence.table("attention", *names), names)
    early = result.sel(site=result.block.values < max(1, int(result.block.max()) // 2 + 1))
    spread = early.nmi_std.sel(encoder=names[0]).dropna("site")
    if not spread.size:
        raise Missing(f"attention maps of {names[0]}")
    site = str(spread.site[int(spread.argmax("site"))].item())
    panel = analysed(evidence, "attention", "nmi-heads-of-layers", names, site=[site])
    note = (
        f"NMI of the heads of {site}, in the first half of the blocks the layer whose heads differ most in {names[0]}."
    )
    return replace(panel, note=note)


def _probes_over_depth(evidence: Evidence) -> Panel:
    names = contrastive_and_masked(evidence)
    result = evidence.table("probes", *names)
    kind = "linear" if "linear" in result.probe.values else "ridge"
    shared = [
        str(feature)
        for feature in result.feature.values
        if all(result.accuracy.sel(encoder=name, probe=kind, feature=feature).notnull().any() for name in names)
    ]
    if not shared:
        raise Missing(f"probes on one feature that {' and '.join(names)} both have")
    feature = "gap" if "gap" in shared else shared[0]
    return depth_curves(
        evidence,
        "probes",
        "accuracy",
        names,
        value_title="linear probing accuracy",
        percent=True,
        select={"probe": kind, "feature": feature},
        note=f"Accuracy of a {kind} probe on the output of each block (feature: {feature}).",
    )


# Attention maps and clouds of tokens


def _maps(evidence: Evidence, family: str, method: str) -> Panel:
    return attention_maps(evidence, cast(evidence, family, method)[0])


def _clouds(evidence: Evidence, family: str, method: str, last: bool, joint: bool = False) -> Panel:
    """Tokens before and after the attention of the first or last block: of one image, or of several in one basis."""
    name = cast(evidence, family, method)[0]
    sites = part_of(evidence.table("tokens", name), [name]).cloud.dropna("site", how="all").site.values
    if not sites.size:
        raise Missing(f"tokens of {name} before and after attention, which cannot be observed")
    site = str(sites[-1 if last else 0])
    panel = analysed(evidence, "tokens", "centres" if joint else "clouds", [name], site=[site])
    note = "Patch tokens before and after attention on their first two singular vectors; crosses are the centres."
    return replace(panel, note=note)


# Sizes, weights, windows


def _linear_and_tuned(evidence: Evidence) -> Panel:
    families = {CL: cast(evidence, JE), MIM: cast(evidence, REC)}
    rows = [
        {
            "series": name,
            "family": family,
            "x": linear_probe(evidence, name).value,
            "y": tuned_accuracy(evidence, name).value,
        }
        for family, names in families.items()
        for name in names
        if evidence.tuned(name) is not None
    ]
    if len({row["family"] for row in rows}) < 2:
        raise Missing("fine-tuned encoders of both families: add `--steps finetune`")
    return labelled_points(
        pd.DataFrame(rows),
        x_title="linear probing accuracy",
        y_title="fine-tuning accuracy",
        note="Test accuracy of a linear probe on the frozen encoder, and after fine-tuning it.",
    )


def _accuracy_over_size(evidence: Evidence) -> Panel:
    roles = [*sizes_of(evidence, JE, "moco_v3"), *sizes_of(evidence, REC, "simmim")]
    table = rows_of(
        roles,
        lambda role: role.size or 0,
        lambda role: CL if role.family == JE else MIM,
        {"fine-tuning accuracy": lambda role: tuned_accuracy(evidence, role.name)},
    )
    return lines(
        table, x_title="parameters (millions)", y_title="fine-tuning accuracy", series_title="family", percent=True
    )


def _dense(evidence: Evidence) -> Panel:
    names = {name: family for family, role in ((CL, JE), (MIM, REC)) for name in cast(evidence, role)}
    held = [name for name in names if evidence.holds("detection", name)]
    if {names[name] for name in held} != {CL, MIM}:
        raise Missing("detection on encoders of both families: add `--steps detect`")
    try:
        table = average_precisions(evidence, held, frozen=False)
    except Missing:
        table = average_precisions(evidence, held, frozen=True)
    wide = table[table.area == "all"].pivot_table(index="encoder", columns="kind", values="value", sort=False)
    if "mask" not in wide:
        raise Missing("detectors with masks: detect with masks=true")
    rows = wide.reset_index().rename(columns={"encoder": "series", "box": "x", "mask": "y"})
    return labelled_points(
        rows.assign(family=rows.series.map(names)),
        x_title="box AP",
        y_title="mask AP",
        note="Detection and instance segmentation by a Mask R-CNN on each encoder.",
    )


def _both_accuracies(
    evidence: Evidence, roles: Sequence[Role], depth: Callable[[Role], float], series: str
) -> pd.DataFrame:
    return rows_of(
        roles,
        depth,
        lambda role: series,
        {
            "linear probing": lambda role: linear_probe(evidence, role.name),
            "fine-tuning": lambda role: tuned_accuracy(evidence, role.name),
        },
    )


def _over_weight(evidence: Evidence) -> Panel:
    """Linear probing and fine-tuning accuracy over λ: 0 is reconstruction alone, 1 joint-embedding alone."""
    roles = {role.name: role for role in evidence.apart().encoders(None)}
    je, rec, hybrids = _sweep(evidence)
    between = {first_seed(evidence, role.name): role.weight for role in hybrids if role.weight is not None}
    if not between:
        raise Missing("a hybrid with its weight: add `--role NAME:weight=0.2`")
    weights = {rec: 0.0, **between, je: 1.0}
    table = _both_accuracies(evidence, [roles[name] for name in weights], lambda role: weights[role.name], "hybrid")
    return lines(
        table,
        x_title="λ, weight of the joint-embedding loss",
        y_title="accuracy",
        series_title="objective",
        percent=True,
        facet="what",
        details={"encoder": "encoder"},
        note="λ = 0 is reconstruction alone, λ = 1 joint-embedding alone.",
    )


def _over_window(evidence: Evidence) -> Panel:
    """Linear probing and fine-tuning accuracy over the side of the attention window; all patches come last."""
    restricted = [role for role in variants(evidence, JE, "window") if not role.lifted]
    if not restricted:
        raise Missing("joint-embedding encoders whose window stays on: add `--steps pretrain`")
    others = [role for role in evidence.apart().encoders(JE, method=restricted[0].method) if role.window is None]
    free = sorted(others, key=lambda role: (role.size != restricted[0].size, -(role.size or 0)))[:1]  # of the same size
    behind = max(role.window or 0 for role in restricted) + 1
    table = _both_accuracies(
        evidence, [*restricted, *free], lambda role: role.window or behind, restricted[0].method or "encoder"
    )
    return lines(
        table,
        x_title="window of attention, side in patches",
        y_title="accuracy",
        series_title="method",
        percent=True,
        facet="what",
        details={"encoder": "encoder"},
        named={behind: "all"} if free else None,
    )


def _other_tasks(evidence: Evidence) -> Panel:
    """Table: the hybrid and the two objectives that it mixes, on other images and in segmentation."""
    je, rec, hybrid = _hybrid_and_ends(evidence)
    weight = next(role.weight for role in evidence.roles if role.name == hybrid)
    if weight is None:
        raise Missing(f"the weight of {hybrid}: add `--role {hybrid}:weight=0.2`")
    of_hybrid = ("68.8", "42.2") if math.isclose(weight, WEIGHT) else ("", "")  # the paper has those of its own λ alone
    printed = {rec: ("62.1", "35.4"), hybrid: of_hybrid, je: ("66.2", "39.7")}
    labels = {rec: f"0.0 ({rec})", hybrid: f"{weight:g} ({hybrid})", je: f"1.0 ({je})"}
    columns: dict[str, Callable[[Evidence, str], Number]] = {
        "other images": probe_on_other_images,
        "segmentation, mIoU": mean_iou,
    }
    rows, lacking = list[dict[str, str]](), list[str]()
    for (column, number), name in itertools.product(columns.items(), (rec, hybrid, je)):
        paper = printed[name][list(columns).index(column)]
        try:
            ours = str(number(evidence, name))
        except Missing as error:
            ours = "–"
            lacking.append(error.needs)
        rows.append({"row": labels[name], "column": column, "ours": ours, "paper": paper})
    if all(row["ours"] == "–" for row in rows):
        raise Missing("; ".join(dict.fromkeys(lacking)))
    note = "Per cent: linear probing on a second set of images (paper: iNaturalist 2018), mIoU (paper: ADE20K)."
    return number_table(pd.DataFrame(rows), corner="λ", note=note)


def _spectra(evidence: Evidence, cloud: str) -> Panel:
    """Whole spectra of each encoder, and two ranks of them over depth."""
    names = contrastive_and_masked(evidence)
    whole, levels = (analysed(evidence, "spectra", f"{cloud}-{figure}", names) for figure in ("spectrum", "delta"))
    charts = [panel.chart.copy(deep=False) for panel in (whole, levels)]
    for chart in charts:
        chart.usermeta = alt.Undefined
    chart = alt.hconcat(*charts).resolve_scale(color="independent", shape="independent")
    return Panel(chart, pd.concat([whole.table, levels.table], ignore_index=True), levels.note)


# The figures


def _analysed(result: str, figure: str, who: Who, **select: Any) -> Callable[[Evidence], Panel]:
    return lambda evidence: analysed(evidence, result, figure, who(evidence), **select)


FIGURES = (
    PaperFigure(
        "003 Fig 1",
        "Where either family wins",
        ("probes", "agreement", "detection"),
        f"{ROLES}, fine-tuned; of several sizes",
        {
            "a": Lettered("linear probing and fine-tuning", _linear_and_tuned),
            "b": Lettered("fine-tuning accuracy over model size", _accuracy_over_size),
            "c": Lettered("dense prediction", _dense),
        },
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig 2",
        "Attention maps for two query patches",
        ("attention",),
        ROLES,
        {
            "a": Lettered("joint-embedding", partial(_maps, family=JE, method="moco_v3")),
            "b": Lettered("reconstruction", partial(_maps, family=REC, method="simmim")),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Fig 3",
        "Attention distance over depth",
        ("attention",),
        ROLES,
        {"": Lettered("how far patches attend", partial(_distance, who=contrastive_and_masked))},
    ),
    PaperFigure(
        "003 Fig 4",
        "Normalised mutual information over depth",
        ("attention",),
        ROLES,
        {"": Lettered("how much attention depends on the query", partial(_nmi, who=contrastive_and_masked))},
    ),
    PaperFigure(
        "003 Fig 5",
        "Cosine similarity in the attention layers",
        ("diversity",),
        f"{ROLES}; in several sizes, if any",
        {
            "a": Lettered("between heads", partial(_cosine, kind="heads")),
            "b": Lettered("between before and after attention", partial(_cosine, kind="depths")),
            "c": Lettered("between tokens", partial(_cosine, kind="tokens")),
        },
    ),
    PaperFigure(
        "003 Fig 6",
        "Tokens before and after attention",
        ("tokens",),
        ROLES,
        {
            "a": Lettered("joint-embedding, last block", partial(_clouds, family=JE, method="moco_v3", last=True)),
            "b": Lettered(
                "joint-embedding, last block, several images",
                partial(_clouds, family=JE, method="moco_v3", last=True, joint=True),
            ),
            "c": Lettered("reconstruction, first block", partial(_clouds, family=REC, method="simmim", last=False)),
        },
    ),
    PaperFigure(
        "003 Fig 7",
        "Singular value spectra over depth",
        ("spectra",),
        ROLES,
        {
            "a": Lettered("tokens of an image", partial(_spectra, cloud="token")),
            "b": Lettered("images", partial(_spectra, cloud="image")),
        },
        columns=1,
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig 8",
        "Shape and texture",
        ("shape_bias", "noise"),
        f"{ROLES}; a supervised one, if any",
        {
            "a": Lettered("decisions by shape, by class", _analysed("shape_bias", "classes", _with_supervised)),
            "b": Lettered("accuracy lost to noise, by frequency", _analysed("noise", "drop", contrastive_and_masked)),
        },
        columns=2,
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig 9",
        "High frequencies over depth",
        ("fourier",),
        ROLES,
        {"": Lettered("Δ log amplitude of the highest frequency", partial(_fourier, who=contrastive_and_masked))},
    ),
    PaperFigure(
        "003 Fig 10",
        "An encoder with a decoder, and one without",
        ("attention", "fourier"),
        "MAE with its decoder, another reconstruction ViT",
        {
            "a": Lettered("normalised mutual information", partial(_nmi, who=_reconstructions, decoder=True)),
            "b": Lettered("high frequencies", partial(_fourier, who=_reconstructions, decoder=True)),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Fig 11", "Linear probing over depth", ("probes",), ROLES, {"": Lettered("accuracy", _probes_over_depth)}
    ),
    PaperFigure(
        "003 Fig 12",
        "Hybrids of both objectives",
        ("probes", "agreement", "attention", "fourier"),
        f"hybrids with their λ, {ROLES}; fine-tuned for part a",
        {
            "a": Lettered("accuracy over λ", _over_weight),
            "b": Lettered("normalised mutual information", partial(_nmi, who=_hybrid_and_ends)),
            "c": Lettered("high frequencies", partial(_fourier, who=_hybrid_and_ends)),
        },
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig C.1",
        "Attention of all methods",
        ("attention",),
        "several joint-embedding and reconstruction ViTs",
        {
            "a": Lettered("attention distance", partial(_distance, who=_everybody)),
            "b": Lettered("normalised mutual information", partial(_nmi, who=_everybody)),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Fig C.2",
        "Attention of all sizes",
        ("attention",),
        f"{ROLES}, each in several sizes",
        {
            "a": Lettered("attention distance", partial(_distance, who=_all_sizes)),
            "b": Lettered("normalised mutual information", partial(_nmi, who=_all_sizes)),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Fig D.1",
        "Attention restricted to a window",
        ("probes", "agreement"),
        "joint-embedding ViTs with attention windows, fine-tuned",
        {"": Lettered("accuracy over the window", _over_window)},
    ),
    PaperFigure(
        "003 Fig E.1",
        "Heads that differ from the others",
        ("attention",),
        ROLES,
        {
            "a": Lettered("deviation over heads", _head_deviation),
            "b": Lettered("heads of an early layer", _heads_of_a_layer),
        },
        columns=2,
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig E.2",
        "t-SNE of tokens of several images",
        ("tokens",),
        ROLES,
        {"": Lettered("last block", _analysed("tokens", "tsne", contrastive_and_masked))},
    ),
    PaperFigure(
        "003 Fig E.3",
        "What the first block does to tokens",
        ("tokens", "spectra"),
        ROLES,
        {
            "a": Lettered("joint-embedding, first block", partial(_clouds, family=JE, method="moco_v3", last=False)),
            "b": Lettered("tokens of an image", partial(_second_value, cloud="token")),
            "c": Lettered("images", partial(_second_value, cloud="image")),
        },
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig F.1",
        "Attention and frequencies after fine-tuning",
        ("attention", "fourier"),
        ROLES_TUNED,
        {
            "a": Lettered("normalised mutual information", partial(_nmi, who=_fine_tuned)),
            "b": Lettered("high frequencies", partial(_fourier, who=_fine_tuned)),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Fig F.2",
        "Shape and texture after fine-tuning",
        ("shape_bias", "noise"),
        ROLES_TUNED,
        {
            "a": Lettered("decisions by shape, by class", _analysed("shape_bias", "classes", _fine_tuned)),
            "b": Lettered("accuracy lost to noise, by frequency", _analysed("noise", "drop", _fine_tuned)),
        },
        columns=2,
        one_legend=False,
    ),
    PaperFigure(
        "003 Fig F.3",
        "What re-initialised blocks cost fine-tuning",
        ("reinit",),
        ROLES,
        {
            "a": Lettered("first blocks", _analysed("reinit", "accuracy_drop", contrastive_and_masked, end=["first"])),
            "b": Lettered("last blocks", _analysed("reinit", "accuracy_drop", contrastive_and_masked, end=["last"])),
        },
        columns=2,
    ),
    PaperFigure(
        "003 Table G.1",
        "Hybrids on other images and in segmentation",
        ("probes", "segmenters"),
        f"a hybrid with its λ, {ROLES}",
        {"": Lettered("per cent", _other_tasks)},
    ),
)
