"""What the report says: attributes and transformations against encoders, and a sentence for each encoder."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import pandas as pd
import xarray as xr

from sightline.core.results import interval
from sightline.generation.reader import ORIENTATION
from sightline.report.figures import FIRST, Figure, KeyNumber, heatmap, of_encoders

IN_WORDS = {
    "mirror": "left and right", "upside_down": "up and down", "rotation": "rotation", "grey": "whether there is colour",
    "colours": "which colours", "blur": "sharpness", "shift": "place", "scale": "scale",
    "class": "the class", "orientation": "orientation", "position": "position", "size": "size",
    "object": "the object's colour", "background": "the background's colour", "colour": "the mean colour",
}  # fmt: skip
KEPT, LOST = 0.5, 0.1  # of the variance: from here on an attribute is kept, below that it is forgotten
SHARED = ("keep {}", "keep some of {}", "say nothing about {}", "leave {} unclear")
SEEN = ("keeps {}", "has forgotten {}", "leaves {} unclear")


def figures(result: xr.Dataset) -> list[Figure]:
    """Attributes and transformations against encoders."""
    about, encoders = result.attrs, [str(name) for name in result.encoder.values]
    shared = _cells(
        result, "attribute", {"shared": "value", "shared_low": "low", "shared_high": "high", "shared_null": "null"}
    )
    shared = shared.merge(
        result.reader_accuracy.to_dataframe().reset_index().rename(columns={"attribute": "row"}), on="row"
    )
    gaps = _cells(
        result,
        "transformation",
        {"share": "value", "share_low": "low", "share_high": "high", "share_null": "null", "z": "z", "kept": "kept"},
    )
    attributes = [str(name) for name in result.attribute.values]
    transformations = [str(name) for name in result.transformation.values]
    chart = functools.partial(heatmap, column_title="encoder", columns=encoders, step=34)
    return [
        Figure(
            "kept",
            "What samples of one source share",
            f"Share of the variance of what a reader network reads off {about['n_samples']} samples of each of "
            f"{about['n_sources']} sources and their mirror images: 0 is forgotten, 1 kept.",
            chart(
                shared.assign(reader=shared.reader_accuracy.map("{:.2f}".format)), row_title="attribute",
                value_title="shared variance", rows=attributes, details={"reader": "reader on real images"},
            ),
            shared,
        ),
        Figure(
            "gap",
            "Which transformations a representation sees",
            f"Share of {about['n_compared']} test images that are more likely than their transformed copy, given their "
            "representation, and the other way round: 50 % is chance, where the colours begin.",
            chart(
                gaps.assign(shown_z=gaps.z.map("{:.1f}".format)), row_title="transformation",
                value_title="share of images", rows=transformations, details={"shown_z": "z"}, domain=(0.5, 1),
            ),
            gaps,
        ),
    ]  # fmt: skip


def _cells(result: xr.Dataset, axis: str, columns: Mapping[str, str]) -> pd.DataFrame:
    table = result[list(columns)].to_dataframe().reset_index()
    return table.rename(columns={**columns, axis: "row", "encoder": "column"})


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """The gap of the mirror image (or of the first transformation) of each encoder: (label, number, detail)."""
    which = "mirror" if "mirror" in result.transformation.values else str(result.transformation.values[0])
    found = []
    for name in result.encoder.values:
        own = result.sel(encoder=name, transformation=which)
        facing = own.sel(judge="pixels")
        detail = (
            f"of the images are more likely than their copy under {which}, given the representation, "
            f"{interval(own.share_low.item(), own.share_high.item())}, z = {own.z.item():.1f}; shuffled "
            f"{own.share_null.item():.1%}, z = {own.z_null.item():.1f}; {facing.orientation.item():.1%} of the samples "
            f"face as the source does ({interval(facing.orientation_low.item(), facing.orientation_high.item())})"
        )
        found.append((str(name), f"{own.share.item():.1%}", detail))
    return found


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    """Share of images that are more likely than their transformed copy, for each transformation."""
    found = []
    for which in map(str, result.transformation.values):
        own = result[["share", "share_low", "share_high"]].sel(transformation=which)
        about = f"share of images that are more likely than their copy under {which}, given the representation"
        found += of_encoders(own, "share", title=which, about=about, style=".1%", place=FIRST)
    return found


def summary(result: xr.Dataset) -> list[str]:
    """A sentence for each encoder: what it keeps, what it has forgotten, and of what neither can be said."""
    return [_sentence(result.sel(encoder=name)) for name in result.encoder.values]


def _sentence(own: xr.Dataset) -> str:
    """By shared variance for attributes, and by the likelihood gap, which is surer, for transformations."""
    told: dict[str, list[str]] = {}
    for name in own.attribute.values:
        if str(name) != ORIENTATION:  # the gap tells more
            value = own.sel(attribute=name)
            words = IN_WORDS.get(str(name), str(name))
            told.setdefault(_shared(float(value.shared_low), float(value.shared_high)), []).append(words)
    seen: dict[str, list[str]] = {}
    for name in own.transformation.values:
        value = own.sel(transformation=name)
        words = IN_WORDS.get(str(name).partition(":")[0], str(name))
        seen.setdefault(_seen(float(value.gap_low), float(value.get("kept_high", math.nan))), []).append(words)
    first = [clause.format(_listed(told[clause])) for clause in SHARED if clause in told] or ["show no attribute"]
    second = [clause.format(_listed(seen[clause])) for clause in SEEN if clause in seen]
    return f"{own.encoder.item()}: its samples {', '.join(first)}; by the likelihood gap it {_listed(second)}."


def _shared(low: float, high: float) -> str:
    """What can be said of an attribute by the interval of its shared variance: nothing if it crosses a threshold.

    >>> _shared(0.6, 0.7), _shared(0.4, 0.7), _shared(0.2, 0.4), _shared(-0.1, 0.3), _shared(-0.1, 0.05)
    ('keep {}', 'leave {} unclear', 'keep some of {}', 'leave {} unclear', 'say nothing about {}')
    """
    keep, some, nothing, unclear = SHARED
    if low > KEPT:
        return keep
    return nothing if high < LOST else some if low >= LOST and high <= KEPT else unclear


def _seen(gap_low: float, kept_high: float) -> str:
    """What can be said of a transformation; it is forgotten where hardly anything of the gap can be left.

    >>> _seen(0.1, 0.4), _seen(-0.1, 0.05), _seen(-0.1, 0.4)
    ('keeps {}', 'has forgotten {}', 'leaves {} unclear')
    """
    keeps, forgotten, unclear = SEEN
    return keeps if gap_low > 0 else forgotten if kept_high < LOST else unclear


def _listed(words: Sequence[str]) -> str:
    """
    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
