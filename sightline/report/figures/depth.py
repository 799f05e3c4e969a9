"""From a result to its numbers over depth: a table, and the figure of it that the analyses share."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import ABSENT, ENDS, interval
from sightline.report.figures.charts import Figure, curve_over_depth


def with_depth(points: pd.DataFrame, encoder: str = "encoder") -> tuple[pd.DataFrame, str]:
    """Points (with columns `encoder`, `site`, `block`) and their `depth`, and the title of that axis.

    Encoders of the same depth are drawn over their block numbers; of different depths over the relative depth, first
    block 0 and last block 1, since block 6 is the middle of one and the end of the other. The blocks of a decoder,
    and the layers of a head, follow behind, from 1 to 2.

    >>> table = pd.DataFrame({"encoder": list("aaab"), "site": "block", "block": [0, 1, 2, 0]})
    >>> with_depth(table)[0].depth.tolist(), with_depth(table)[1], with_depth(table[:3])[1]
    ([0.0, 0.5, 1.0, 0.0], 'relative depth', 'block')
    """
    heads, later = points.site.str.startswith("head."), points.site.str.startswith(("decoder.", "head."))
    deepest = points.block[~later].max() if not later.all() else -1
    layer = points.site.str.extract(r"^head\.(\d+)$")[0].fillna("0").astype(int)
    places = points.block.where(~heads, deepest + 1 + layer)
    blocks: dict[tuple[str, bool], set[int]] = {}
    for name, behind, block in zip(points[encoder], later, places, strict=True):
        blocks.setdefault((name, behind), set()).add(block)
    if len({frozenset(own) for (_, behind), own in blocks.items() if not behind}) <= 1:
        return points.assign(depth=places), "block"

    def relative(name: str, behind: bool, block: int) -> float:
        own = sorted(blocks[name, behind])
        place = own.index(block)
        return 1 + (place + 1) / len(own) if behind else place / max(len(own) - 1, 1)

    depth = [relative(*row) for row in zip(points[encoder], later, places, strict=True)]
    return points.assign(depth=depth), "relative depth"


def present(result: xr.Dataset) -> pd.DataFrame:
    """Rows of all variables over encoder, site and others, without the sites that an encoder does not have.

    The first variable whose name ends in `reason` says so, and becomes `reason`; without one, that there is no number.
    """
    table, reasons = result.to_dataframe().reset_index(), _reasons(result)
    if not reasons:
        return table.dropna(subset=list(map(str, result.data_vars)), how="all").assign(reason="")
    table = table.rename(columns={reasons[0]: "reason"})
    return table[table.reason != ABSENT]


def _reasons(result: xr.Dataset) -> list[str]:
    return [str(name) for name in result.data_vars if str(name).endswith("reason")]


def depth_table(
    result: xr.Dataset, values: str | Mapping[str, str], types: Collection[str] = ("block",), also: Sequence[str] = ()
) -> tuple[pd.DataFrame, str]:
    """Rows for `curve_over_depth`, and the title of the depth axis.

    values  a variable over encoder, site and others; or several, each with the name of its panel (column `what`).
            Its interval and null are the variables of the same name with `_low`, `_high` and `_null`, if there are any
    types   layer types that are drawn; with the embedding, depth is the number of blocks that were passed
    also    further variables for the table
    """
    chosen, reasons = result.sel(site=result.layer_type.isin(list(types))), _reasons(result)[:1]
    parts = []
    for variable, label in ({values: ""} if isinstance(values, str) else values).items():
        own = {variable: "value"} | {f"{variable}_{end}": end for end in ("low", "high", "null")}
        part = present(chosen[[name for name in (*own, *also, *reasons) if name in result]]).rename(columns=own)
        parts.append(part if isinstance(values, str) else part.assign(what=label))
    table = pd.concat(parts, ignore_index=True)
    passed = "embed" in types
    table, axis = with_depth(table.assign(block=table.block + 1) if passed else table)
    table = table.dropna(subset="value")  # only now: a block without a number keeps its place in the depth
    table = table.drop(columns=["layer_type", "reason", *["block"] * passed]).rename(columns={"encoder": "series"})
    return table, "blocks passed" if passed and axis == "block" else axis


def over_depth(
    result: xr.Dataset,
    values: str | Mapping[str, str],
    *,
    title: str,
    caption: str,
    value_title: str,
    name: str = "depth",
    types: Collection[str] = ("block",),
    also: Sequence[str] = (),
    facet: str | None = None,
    reference: tuple[float, str] | None = None,
    domain: tuple[float, float] | None = (0, 1),
    percent: bool = False,
) -> list[Figure]:
    """Numbers over depth, a colour for each encoder; no figure where there is no number.

    values, types, also  see `depth_table`
    facet                an axis or coordinate of the result with a panel for each of its values
    domain               what the axis of values shows at least, and further tenths where points lie beyond; None: what
                         is there
    """
    table, axis = depth_table(result, values, types, also)
    if table.empty:  # only other sites were chosen: the table of the report has them
        return []
    chart = curve_over_depth(
        table,
        value_title=value_title,
        depth_title=axis,
        series_title="encoder",
        series=[str(encoder) for encoder in result.encoder.values],
        facet=facet if isinstance(values, str) else "what",
        reference=reference,
        domain=None if domain is None else _tenths(table, *domain),
        percent=percent,
    )
    return [Figure(name, title, caption, chart, table)]


def _tenths(table: pd.DataFrame, low: float, high: float) -> tuple[float, float]:
    """The domain from low to high, or as many tenths more as the points and their intervals need."""
    ends = table[[column for column in ("value", "low", "high") if column in table]].to_numpy(np.float64)
    lowest, highest = (round(10 * float(end), 6) for end in (np.nanmin(ends), np.nanmax(ends)))  # 1 + rounding is 1
    return min(low, math.floor(lowest) / 10), max(high, math.ceil(highest) / 10)


def accuracy_table(result: xr.Dataset) -> pd.DataFrame:
    """One row for each accuracy that is known, with its interval."""
    names = [f"accuracy{end}" for end in ENDS]
    return result[names].to_dataframe().reset_index().dropna(subset="accuracy")


def accuracy_over_depth(
    result: xr.Dataset, title: str, caption: str, reference: str, lowest: float = 0.0
) -> list[Figure]:
    """Accuracy over the blocks: a panel for each feature, a colour for each encoder, chance as a line."""
    figures = over_depth(
        result,
        "accuracy",
        title=f"{title} over depth",
        caption=caption,
        value_title=title,
        types=("block", "head"),
        facet="feature",
        reference=(float(result.attrs["chance"]), reference),
        domain=(lowest, lowest),
        percent=True,
    )
    names = {"series": "encoder"} | dict(zip(("value", "low", "high"), (f"accuracy{end}" for end in ENDS), strict=True))
    return [replace(figure, table=figure.table.rename(columns=names)) for figure in figures]


def interval_of(row: Any) -> str:
    """How a headline ends: the 95 % interval of a row with `low` and `high`, or nothing if there is none."""
    return f", {interval(row.low, row.high, '.2f')}" if np.isfinite([row.low, row.high]).all() else ""
