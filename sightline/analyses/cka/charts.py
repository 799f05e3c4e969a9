"""Charts of CKA and of other measures of pairs of layers: layers against layers, and their correspondence."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from sightline.analyses.cka.matching import summaries
from sightline.core.results import ABSENT, ENDS, NORMAL_95, outside_decoder
from sightline.report.figures import (
    FIRST,
    Figure,
    KeyNumber,
    Likeness,
    curve_over_depth,
    heatmap,
    interval_of,
    over_depth,
    with_depth,
)


class Measure(NamedTuple):
    """A number of each pair of layers: its variable in a result, its title; a distance is small for what is alike."""

    variable: str
    title: str
    distance: bool = False
    domain: tuple[float, float] = (0, 1)


CKA = Measure("cka", "CKA")
FEW = 3  # encoders, whose pairs fit into one chart


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    drawn = pair_figures(result, CKA)
    if "class_cka" in result:
        drawn += _classes(result)
    drawn.append(_residuals(result, CKA))
    return [figure for figure in drawn if len(figure.table)]


def pair_figures(result: xr.Dataset, of: Measure) -> list[Figure]:
    """Of a measure of all pairs of layers: every pair of encoders, and what the matrices say in short."""
    kinds, blocks = _kinds(result)
    cells = pair_cells(result, np.where(kinds == "block", blocks, -1), of)
    if not len(cells):
        return []
    short = summaries(result, of.variable, of.distance)
    # The analysis knows how deep a decoder is, and the result alone does not.
    same = short.diagonal_site if "diagonal_site" not in result else result.diagonal_site
    return [
        _pairs(result, cells, of),
        _matched(cells, same, "depth", "Similarity at the same depth", "at the same depth", of),
        _by_distance(short, True, of),
        _matched(cells, short.row_argmax, "closest", "Similarity with the closest block", "that is most like it", of),
        _by_distance(short, False, of),
    ]


def headlines(result: xr.Dataset, of: Measure = CKA) -> list[tuple[str, str, str]]:
    kinds, blocks = _kinds(result)
    cells = pair_cells(result, np.where(kinds == "block", blocks, -1), of).dropna(subset="value")
    across = cells[cells.encoder_a != cells.encoder_b]
    if across.empty:
        return [
            (str(name), f"{ends.value:.2f}", f"{ends.site_a} with {ends.site_b}{interval_of(ends)}")
            for name, rows in cells.groupby("encoder_a", sort=False)
            for ends in rows[rows.row == rows.row.min()].nlargest(1, "column").itertuples()
        ]
    each = across.groupby(["encoder_a", "encoder_b"]).value
    best = across.loc[each.idxmin() if of.distance else each.idxmax()]
    return [
        (f"{c.encoder_a} × {c.encoder_b}", f"{c.value:.2f}", f"closest: {c.site_a} and {c.site_b}{interval_of(c)}")
        for c in best.sort_values("value", ascending=of.distance).itertuples()
    ][:6]


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    like = likeness(result)
    if like is None or len(like.encoders) < 2:
        return []
    blocks = _diagonal(result, CKA)
    others = blocks.where(blocks.encoder_a != blocks.encoder_b)
    values, curves = {}, {}
    for name in like.encoders:
        over_depth = others.sel(encoder_a=name).mean("encoder_b").dropna("site_a").values
        if len(over_depth):
            values[name], curves[name] = float(over_depth.mean()), over_depth.tolist()
    about = "mean CKA with the blocks of the other encoders at the same depth"
    return [KeyNumber("CKA", about, values, curves=curves, place=FIRST)] if values else []


def likeness(result: xr.Dataset, of: Measure = CKA) -> Likeness | None:
    if of.distance:
        return None
    mean = _diagonal(result, of).mean("site_a").transpose("encoder_a", "encoder_b").values
    # Depths may differ, and then the two directions do; an encoder without blocks has neither.
    both = np.where(np.isnan(mean), mean.T, np.where(np.isnan(mean.T), mean, (mean + mean.T) / 2))
    np.fill_diagonal(both, 1.0)
    names = tuple(map(str, result.encoder_a.values))
    return Likeness(of.title, f"mean {of.title} of blocks at the same depth", names, both, FIRST)


def _diagonal(result: xr.Dataset, of: Measure) -> xr.DataArray:
    """Each block of an encoder with the block of another at the same depth, of the first token view."""
    short = result if "diagonal" in result else summaries(result, of.variable, of.distance)
    blocks = (result.layer_type.values.astype(str) == "block") & outside_decoder(result.site.values)
    diagonal: xr.DataArray = short.diagonal.isel(tokens=0, drop=True).sel(site_a=result.site_a.values[blocks])
    return diagonal


def _kinds(result: xr.Dataset) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.int64]]:
    """Layer type and block of each site."""
    return result.layer_type.values.astype(str), result.block.values


def pair_cells(
    result: xr.Dataset, numbers: npt.NDArray[np.int64], of: Measure, pairs: Sequence[tuple[str, str]] | None = None
) -> pd.DataFrame:
    """One row for each pair of layers of each unordered pair of encoders, first token view; `numbers` −1: left out.

    `pairs` are other pairs of encoders, in their order.
    """
    view = result.isel(tokens=0)
    names, sites = ([str(n) for n in result[axis].values] for axis in ("encoder_a", "site_a"))
    reason = view.reason.values
    places = [np.flatnonzero((numbers >= 0) & (row != ABSENT)) for row in reason]
    parts = [view[of.variable + end].values for end in (*ENDS, "_null")]
    every = itertools.combinations_with_replacement(range(len(names)), 2)
    chosen = every if pairs is None else [(names.index(a), names.index(b)) for a, b in pairs]
    rows = [
        (
            f"{names[a]} × {names[b]}",
            names[a],
            names[b],
            int(numbers[i]),
            int(numbers[j]),
            sites[i],
            sites[j],
            *(part[a, b, i, j] for part in parts),
            str(reason[a, i] or reason[b, j]),
        )
        for a, b in chosen
        for i in places[a]
        for j in places[b]
    ]
    columns = ["pair", "encoder_a", "encoder_b", "row", "column", "site_a", "site_b"]
    table = pd.DataFrame(rows, columns=[*columns, "value", "low", "high", "null", "reason"])
    if "stage" not in result.coords:
        return table
    stages = result.stage.to_series()
    for axis, end in (("row", "a"), ("column", "b")):
        layers = pd.MultiIndex.from_frame(table[[f"encoder_{end}", f"site_{end}"]])
        table[f"{axis}_stage"] = stages.reindex(layers).to_numpy()
    return table


def _pairs(result: xr.Dataset, cells: pd.DataFrame, of: Measure) -> Figure:
    chart = heatmap(
        cells,
        row_title="block of A",
        column_title="block of B",
        value_title=of.title,
        facet="pair",
        step=10,
        details={"site_a": "layer of A", "site_b": "layer of B"} | _stage_titles(cells),
        domain=of.domain,
    )
    tokens = result.tokens.values[0]
    text = f"{of.title} of block outputs (tokens: {tokens}). Grey, hatched: no value; the tooltip says why."
    text += " White lines: where a stage of a residual network begins." if "row_stage" in cells else ""
    return Figure("pairs", "All pairs of encoders", text, chart, cells, linked=True)


def _stage_titles(table: pd.DataFrame) -> dict[str, str]:
    """What tooltips call the stages, where there are any."""
    titles = {"row_stage": "stage of A", "column_stage": "stage of B", "stage": "stage of A"}
    return {column: title for column, title in titles.items() if column in table}


def _matched(cells: pd.DataFrame, match: xr.DataArray, name: str, title: str, which: str, of: Measure) -> Figure:
    """Each block of A with the block of B that `match` names, for every ordered pair of encoders."""
    sides = ["encoder", "site"]
    turned = cells.rename(columns={f"{s}_{x}": f"{s}_{y}" for s in sides for x, y in ("ab", "ba")})
    turned = turned.rename(
        columns={f"{x}{end}": f"{y}{end}" for x, y in (("row", "column"), ("column", "row")) for end in ("", "_stage")}
    )
    both = pd.concat([cells, turned])
    chosen = match.isel(tokens=0, drop=True).to_dataframe("site_b").reset_index()
    keys = [f"{s}_{x}" for s in sides for x in "ab"]
    # The user's order of encoders, not the alphabet's.
    table = chosen[keys].merge(both[both.encoder_a != both.encoder_b], on=keys)
    table = table.rename(columns={"encoder_b": "series", "site_a": "site", "row": "block"})
    table, axis = with_depth(table, "encoder_a")
    columns = ["encoder_a", "series", "depth", "site", "site_b", "value", "low", "high", "null", "reason"]
    if "row_stage" in table:
        first = table.groupby(["encoder_a", "row_stage"]).depth.transform("min")
        table = table.assign(stage=table.row_stage, starts=(table.row_stage > 1) & (table.depth == first))
        columns += ["stage", "starts"]
    table = table[columns]
    chart = curve_over_depth(
        table,
        value_title=of.title,
        depth_title=f"{axis} of A",
        series_title="compared with",
        series=list(map(str, match.encoder_a.values)),
        facet="encoder_a",
        domain=of.domain,
        details={"encoder_a": "A", "site": "layer of A", "site_b": "layer of B"} | _stage_titles(table),
    )
    text = f"{of.title} of each block with the block of the other encoder {which}; dashes: shuffled pairs of images."
    return Figure(name, title, text, chart, table)


def _by_distance(short: xr.Dataset, within: bool, of: Measure) -> Figure:
    """The mean against the distance in relative depth, of two blocks of one encoder or of each pair of encoders."""
    mean = f"distance_{of.variable}"
    table = short[[mean, "distance_pairs"]].isel(tokens=0, drop=True).to_dataframe().reset_index()
    names = list(map(str, short.encoder_a.values))
    a, b = (table[side].map(names.index) for side in ("encoder_a", "encoder_b"))
    panels = not within and len(names) > FEW  # lines of all pairs in one chart could not be told from each other
    chosen = (a == b) & (table.distance > 0) if within else a != b if panels else a < b
    table = table[chosen & (table.distance_pairs > 0)]
    series = table.encoder_a if within else table.encoder_b if panels else table.encoder_a + " × " + table.encoder_b
    columns = {"relative_distance": "depth", mean: "value", "distance_pairs": "pairs"}
    kept = [*(["encoder_a"] if panels else []), "series", "distance", *columns.values()]
    table = table.assign(series=series).rename(columns=columns)[kept]
    title = "encoder" if within else "compared with" if panels else "encoders"
    chart = curve_over_depth(
        table,
        value_title=f"mean {of.title}",
        depth_title="distance in relative depth",
        domain=of.domain,
        series_title=title,
        series=names if within or panels else list(table.series.unique()),
        facet="encoder_a" if panels else None,
        details={"distance": "blocks apart", "pairs": "pairs of blocks"},
    )
    if within:
        slow = "rise" if of.distance else "fall"
        text = f"Within one encoder: mean {of.title} of two blocks against their distance"
        text += f"; a slow {slow}: depth changes little."
        return Figure("distance", "Similarity against distance in depth", text, chart, table)
    text = (
        f"Mean {of.title} of a block of one encoder and a block of the other against the distance of their relative "
        f"depths, in steps of the shallower one; a steep {'rise' if of.distance else 'fall'}: both build their "
        "features in the same order."
    )
    return Figure("distance-across", "Similarity of two encoders against distance in depth", text, chart, table)


def _classes(result: xr.Dataset) -> list[Figure]:
    text = (
        "CKA of each block with the one-hot labels: how far images are alike when their classes are the same. Panels: "
        "token views; dashes: labels of other images."
    )
    return over_depth(
        result,
        "class_cka",
        name="classes",
        title="Similarity with the classes",
        caption=text,
        value_title="class CKA",
        types=("block", "head"),
        facet="tokens",
        domain=(0, 0.5),
    )


def _residuals(result: xr.Dataset, of: Measure) -> Figure:
    """All layers of ResNets in order of computation, then the residual branches alone and the block outputs alone."""
    kinds, blocks = _kinds(result)
    numbers = np.select([kinds == "residual", kinds == "block"], [2 * blocks + 1, 2 * blocks + 2], -1)
    names = result.encoder.values[(result.reason.values[0][:, kinds == "residual"] != ABSENT).any(1)]
    cells = pair_cells(result.sel(encoder_a=names, encoder_b=names, encoder=names), numbers, of)
    odd, even = ((cells.row % 2 == r) & (cells.column % 2 == r) for r in (1, 0))
    parts = {"all": cells, "odd": cells[odd], "even": cells[even]}
    table = pd.concat([part.assign(layers=part.pair + f", {name}") for name, part in parts.items()])
    table = table.iloc[np.argsort(pd.factorize(table.pair)[0], kind="stable")]  # the three of a pair side by side
    chart = heatmap(
        table,
        row_title="layer of A",
        column_title="layer of B",
        value_title=of.title,
        facet="layers",
        step=10,
        details={"site_a": "layer of A", "site_b": "layer of B"},
    )
    text = (
        "Layers in order of computation: the residual branch of each block before the addition (odd numbers), and the "
        "block's output after it (even). The checkerboard of all layers comes from this: outputs carry on what came "
        "before, branches add something new."
    )
    return Figure("residual", "Before and after the addition in ResNets", text, chart, table)


def study_figure(found: xr.Dataset) -> Figure:
    """What `study` found, over the batch size: a line for each number of images, bands of 1.96 deviations."""
    table = found.to_dataframe().reset_index()
    table = table.assign(
        depth=np.log2(table.batch),
        series=table["count"].astype(str),
        value=table["mean"],
        low=table["mean"] - NORMAL_95 * table["std"],
        high=table["mean"] + NORMAL_95 * table["std"],
    )
    chart = curve_over_depth(
        table,
        value_title="CKA",
        depth_title="log2 of the batch size",
        series_title="images",
        series=list(table.series.unique()),
        domain=None,
        details={"batch": "batch size"},
    )
    text = f"Minibatch CKA of two layers: mean of {found.attrs['draws']} draws of images and batches."
    return Figure("study", "CKA against batch size and number of images", text, chart, table)
