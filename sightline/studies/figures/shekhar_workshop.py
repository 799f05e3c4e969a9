"""Shekhar et al. 2022, "Understanding contrastive versus reconstructive self-supervised learning of Vision
Transformers" (000; 002 is another version of it).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from sightline.core.results import ENDS
from sightline.report.figures import depth_table
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures.casting import pair_of_families, tuned
from sightline.studies.figures.contract import Lettered, Panel, PaperFigure, Printed
from sightline.studies.figures.forms import LayerMap, bars, layer_maps, lines, part_of, with_ends
from sightline.studies.figures.numbers import linear_probe

LAYER_TYPES = {"qkv": "multi-head self-attention (qkv)", "norm1": "layer norm", "fc1": "fully connected (fc1)"}
FEATURE_TITLES = {"cls": "CLS token", "gap": "mean of all tokens (GAP)", "gap_without_cls": "GAP without CLS"}
AGREE = {"all images": "all predictions", "both right": "correct predictions", "both wrong": "incorrect predictions"}
SECOND = "a second joint-embedding ViT: add `--je NAME=REFERENCE`"
ROLES = "two joint-embedding ViTs, a reconstruction ViT"
ROLES_TUNED = "a joint-embedding and a reconstruction ViT, both also fine-tuned"


# What the figures of both papers of Shekhar et al. are made of


def families(evidence: Evidence) -> Panel:
    """CKA of block outputs: joint-embedding encoders with each other, then reconstruction ones with them."""
    return layer_maps(evidence, [*_within(evidence), *_between(evidence)])


def within_family(evidence: Evidence) -> Panel:
    """The first of them: joint-embedding encoders with each other."""
    if not (maps := _within(evidence)):
        raise Missing(SECOND)
    return layer_maps(evidence, maps)


def between_families(evidence: Evidence, which: slice) -> Panel:
    """The others: reconstruction encoders with joint-embedding ones, some of the pairs."""
    if not (maps := _between(evidence)[which]):
        raise Missing(SECOND)
    return layer_maps(evidence, maps)


def _within(evidence: Evidence) -> list[LayerMap]:
    je, _ = pair_of_families(evidence)
    return [LayerMap(b, a, title=f"{b} and {a}") for a, b in itertools.combinations(je, 2)]


def _between(evidence: Evidence) -> list[LayerMap]:
    je, rec = pair_of_families(evidence)
    return [LayerMap(r, j, title=f"{r} and {j}") for r in rec for j in je]


def layer_types(evidence: Evidence, layers: Sequence[str], after: bool = False, other: int = 0) -> Panel:
    """CKA by layer type between a reconstruction and a joint-embedding encoder, before or after fine-tuning."""
    pair = pair_of(evidence, other)
    row, column = tuned(evidence, *pair) if after else pair
    named = len(layers) > 1
    return layer_maps(evidence, [LayerMap(row, column, layer, LAYER_TYPES[layer] if named else "") for layer in layers])


def before_and_after(evidence: Evidence, rec_tuned: bool, je_tuned: bool, other: int = 0) -> Panel:
    """CKA of block outputs of a reconstruction and a joint-embedding encoder, each before or after fine-tuning."""
    row, column = pair_of(evidence, other)
    row = tuned(evidence, row)[0] if rec_tuned else row
    column = tuned(evidence, column)[0] if je_tuned else column
    return layer_maps(evidence, [LayerMap(row, column)])


def pair_of(evidence: Evidence, other: int) -> tuple[str, str]:
    """The reconstruction encoder, and the first or second joint-embedding one."""
    je, rec = pair_of_families(evidence)
    if other >= len(je):
        raise Missing(SECOND)
    return rec[0], je[other]


def neighbours_and_probe(evidence: Evidence, feature: str, every: bool = True) -> Panel:
    """k-NN accuracy after each block, and behind the last one the linear probe, of the same feature."""
    je, rec = pair_of_families(evidence)
    names = [*(je if every else je[:1]), *rec]
    result = evidence.table("knn", *names)
    if feature not in result.feature.values:
        raise Missing(f"k-NN on the feature {feature}, which these encoders do not have")
    table, axis = depth_table(part_of(result, names).sel(feature=feature), "accuracy")
    behind = float(table.depth.max()) + (1 if axis == "block" else 0.1)
    probes, remark = [], ""
    for name in names:
        try:
            number = linear_probe(evidence.apart(), name, feature)  # of the seed whose neighbours are drawn
            probes.append({"series": name, "site": "linear probe", "depth": behind, **number._asdict()})
        except (Missing, KeyError):
            remark = f"No linear probe was trained on {FEATURE_TITLES[feature]} of {name}."
    table = pd.concat([table, pd.DataFrame(probes)], ignore_index=True)
    table = table.iloc[table.series.map(names.index).argsort(kind="stable")]
    panel = lines(
        table,
        x_title=axis,
        y_title="accuracy",
        percent=True,
        details={"site": "site"},
        named={behind: "probe"} if probes else None,
        reference=(float(result.attrs["chance"]), "chance"),
    )
    note = f"{result.attrs['k']} nearest neighbours on the output of each block; last the linear probe."
    return replace(panel, note=note, remark=remark)


def rank_agreement(evidence: Evidence, images: str, ranks: tuple[int, ...]) -> Panel:
    """Kendall's τ of the k best classes of probes, a bar for each pair of encoders; the F1 of first choices beside."""
    je, rec = pair_of_families(evidence)
    pairs = [*itertools.combinations(je, 2), *((j, r) for r in rec for j in je)]
    result = evidence.table("agreement", *je, *rec)
    shown = [k for k in ranks if k in result.k.values] or [int(k) for k in result.k.values]
    rows = []
    for k, (a, b) in itertools.product(shown, pairs):
        of = result.sel(images=images, k=k, encoder_a=a, encoder_b=b)
        rows.append(
            {"group": f"top {k}", "series": f"{a} and {b}"} | {f"tau{end}": float(of[f"tau{end}"]) for end in ENDS}
        )
    table = with_ends(pd.DataFrame(rows), "tau")
    if table.value.isna().all():
        raise Missing(f"images that are {images.removeprefix('both ')} for two encoders, of which there are none")
    note = "Kendall's τ of the order in which two probes rank the k best classes, mean over images; lines: 95 %."
    panel = bars(table, x_title="classes compared", y_title="Kendall's τ", series_title="encoders", note=note)
    printed: tuple[Printed, ...] = ()
    if images == "all images" and len(je) > 1:
        f1 = [f"{float(result.f1.sel(encoder_a=a, encoder_b=b)):.4f}" for a, b in ((je[0], je[1]), (je[0], rec[0]))]
        printed = (
            Printed(f"F1 of first choices, {je[0]} and {je[1]}", "0.9341 (DINO and MoCo v3)", f1[0]),
            Printed(f"F1 of first choices, {je[0]} and {rec[0]}", "0.88 (MAE and MoCo v3)", f1[1]),
        )
    return replace(panel, printed=printed)


# The figures


def by_type(letters: str, layers: Sequence[str], after: bool) -> dict[str, Lettered]:
    """A part for each layer type."""
    when = "fine-tuned" if after else "pre-trained"
    return {
        letter: Lettered(f"{LAYER_TYPES[layer]}, {when}", partial(layer_types, layers=(layer,), after=after))
        for letter, layer in zip(letters, layers, strict=True)
    }


def before_and_after_parts(other: int = 0) -> dict[str, Lettered]:
    """Four parts: each of the two encoders before and after fine-tuning."""
    states = ("pre-trained", "fine-tuned")
    return {
        letter: Lettered(
            f"reconstruction {states[rec]}, joint-embedding {states[je]}",
            partial(before_and_after, rec_tuned=rec, je_tuned=je, other=other),
        )
        for letter, (rec, je) in zip("abcd", itertools.product((False, True), repeat=2), strict=True)
    }


FIGURES = (
    PaperFigure(
        "000 Fig 1",
        "CKA between pairs of transformer blocks",
        ("cka",),
        ROLES,
        {
            "a": Lettered("two joint-embedding encoders", within_family),
            "b": Lettered("reconstruction and joint-embedding", partial(between_families, which=slice(0, 1))),
            "c": Lettered("reconstruction and joint-embedding", partial(between_families, which=slice(1, None))),
        },
    ),
    PaperFigure(
        "000 Fig 2",
        "CKA by layer type, joint-embedding and reconstruction",
        ("cka",),
        "a joint-embedding and a reconstruction ViT",
        by_type("abc", ("qkv", "norm1", "fc1"), after=False),
    ),
    PaperFigure(
        "000 Fig 3",
        "20-nearest-neighbour accuracy over the blocks, and the linear probe",
        ("knn", "probes"),
        "a joint-embedding and a reconstruction ViT",
        {
            letter: Lettered(FEATURE_TITLES[feature], partial(neighbours_and_probe, feature=feature, every=False))
            for letter, feature in zip("abc", FEATURE_TITLES, strict=True)
        },
    ),
    PaperFigure(
        "000 Fig 4",
        "Rank correlation of class predictions",
        ("agreement",),
        ROLES,
        {
            letter: Lettered(title, partial(rank_agreement, images=images, ranks=(5, 10, 100)))
            for letter, (images, title) in zip("abc", AGREE.items(), strict=True)
        },
    ),
    PaperFigure(
        "000 Fig 5",
        "CKA before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        before_and_after_parts() | by_type("e", ("qkv",), after=False) | by_type("f", ("qkv",), after=True),
    ),
    PaperFigure(
        "000 Fig 6",
        "CKA by layer type before and after fine-tuning",
        ("cka",),
        ROLES_TUNED,
        by_type("abc", ("fc1", "norm1", "qkv"), after=False) | by_type("def", ("fc1", "norm1", "qkv"), after=True),
    ),
)
