"""What the report says: transformations against encoders, and a sentence for each encoder."""

import math
from collections.abc import Sequence

import xarray as xr

from sightline.core.results import interval
from sightline.report.figures import FIRST, Figure, KeyNumber, heatmap, of_encoders

IN_WORDS = {
    "mirror": "left and right",
    "upside_down": "up and down",
    "rotation": "rotation",
    "grey": "whether there is colour",
    "colours": "which colours",
    "blur": "sharpness",
    "shift": "place",
    "scale": "scale",
}
LOST = 0.1  # of the gap of a network that is told the image: below that a transformation is forgotten
SEEN = ("keeps {}", "has forgotten {}", "leaves {} unclear")


def figures(result: xr.Dataset) -> list[Figure]:
    about, encoders = result.attrs, [str(name) for name in result.encoder.values]
    columns = {"share": "value", "share_low": "low", "share_high": "high", "share_null": "null"}
    table = result[[*columns, "z", "kept"]].to_dataframe().reset_index()
    gaps = table.rename(columns={**columns, "transformation": "row", "encoder": "column"})
    transformations = [str(name) for name in result.transformation.values]
    return [
        Figure(
            "gap",
            "Which transformations a representation sees",
            f"Share of {about['n_compared']} test images that are more likely than their transformed copy, given their "
            "representation, and the other way round: 50 % is chance, where the colours begin.",
            heatmap(
                gaps.assign(shown_z=gaps.z.map("{:.1f}".format)),
                row_title="transformation",
                column_title="encoder",
                value_title="share of images",
                rows=transformations,
                columns=encoders,
                details={"shown_z": "z"},
                domain=(0.5, 1),
                step=34,
            ),
            gaps,
        )
    ]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    which = "mirror" if "mirror" in result.transformation.values else str(result.transformation.values[0])
    lines = []
    for name in result.encoder.values:
        gap = result.sel(encoder=name, transformation=which)
        detail = (
            f"of the images are more likely than their copy under {which}, given the representation, "
            f"{interval(gap.share_low.item(), gap.share_high.item())}, z = {gap.z.item():.1f}; shuffled "
            f"{gap.share_null.item():.1%}, z = {gap.z_null.item():.1f}; {gap.orientation.item():.1%} of the samples "
            f"face as the source does ({interval(gap.orientation_low.item(), gap.orientation_high.item())})"
        )
        lines.append((str(name), f"{gap.share.item():.1%}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    numbers = []
    for which in map(str, result.transformation.values):
        shares = result[["share", "share_low", "share_high"]].sel(transformation=which)
        about = f"share of images that are more likely than their copy under {which}, given the representation"
        numbers += of_encoders(shares, "share", title=which, about=about, style=".1%", place=FIRST)
    return numbers


def summary(result: xr.Dataset) -> list[str]:
    """A sentence for each encoder: what it keeps, what it has forgotten, and of what neither can be said."""
    return [_sentence(result.sel(encoder=name)) for name in result.encoder.values]


def _sentence(own: xr.Dataset) -> str:
    """By the likelihood gap."""
    seen: dict[str, list[str]] = {}
    for name in own.transformation.values:
        value = own.sel(transformation=name)
        words = IN_WORDS.get(str(name).partition(":")[0], str(name))
        seen.setdefault(_seen(float(value.gap_low), float(value.get("kept_high", math.nan))), []).append(words)
    told = [clause.format(_listed(seen[clause])) for clause in SEEN if clause in seen]
    return f"{own.encoder.item()}: by the likelihood gap it {_listed(told)}."


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
