"""What the page of dynamics shows: the efficiency of paths, and similarity with the start and with others."""

import numpy as np
import pandas as pd
import xarray as xr

from sightline.analyses.dynamics.paths import ALL
from sightline.core.errors import counted
from sightline.core.results import ABSENT
from sightline.report.figures import Figure, KeyNumber, curve_over_depth, heatmap, interval_of


def figures(result: xr.Dataset) -> list[Figure]:
    near = _near(result)
    with_start = near.other == near.start
    drawn = [
        _over_steps(result),
        _over_blocks(result),
        _similarity(
            near[with_start],
            "start",
            "Similarity with the start",
            "CKA of each block at each step with the same block before the training: where it is dark, much changed.",
        ),
        _similarity(
            near[~with_start],
            "others",
            "Similarity with others over steps",
            "CKA of each block at each step with the block of the other encoder at the same relative depth.",
        ),
        _before_and_after(result),
    ]
    return [figure for figure in drawn if len(figure.table)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    near = _near(result)
    for training, name in _ends(result)[1].items():
        total = result.sel(encoder=name, place=ALL, weights=ALL)
        way = f"distance {float(total.distance):.3g} on a path of {float(total.length):.3g}"
        steps = int(total.step) - int(result.step[result.training == training].min())
        after = counted(steps, "step")
        lines.append((training, f"{float(total.efficiency):.2f}", f"path efficiency after {after}: {way}"))
        last = near[(near.encoder == name) & (near.other == near.start)].tail(1)
        lines += [
            (training, f"{row.value:.2f}", f"CKA of {row.site} with its start{interval_of(row)}")
            for row in last.itertuples()
        ]
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    ends = _ends(result)[1]
    totals = result.efficiency.sel(place=ALL, weights=ALL)
    values = {name: float(totals.sel(encoder=name)) for name in ends.values()}
    finite = {name: value for name, value in values.items() if np.isfinite(value)}
    about = "distance from the start over the length of the path, of all weights"
    return [KeyNumber("path efficiency", about, finite)] if finite else []


def _ends(result: xr.Dataset) -> tuple[dict[str, str], dict[str, str]]:
    """Training → its first and its last encoder."""
    pairs = list(zip(map(str, result.training.values), map(str, result.encoder.values), strict=True))
    return dict(reversed(pairs)), dict(pairs)


def _several(result: xr.Dataset) -> bool:
    return len(set(map(str, result.training.values))) > 1


def _over_steps(result: xr.Dataset) -> Figure:
    """One training: a line for each layer; several: a panel for each layer, a line for each training."""
    values = result[["efficiency", "distance", "length"]].sel(place=ALL, drop=True).reset_coords("start", drop=True)
    table = values.to_dataframe(dim_order=["weights", "encoder"]).reset_index().dropna(subset="efficiency")
    series, facet = ("training", "weights") if _several(result) else ("weights", None)
    table = table.assign(series=table[series], depth=table.step).rename(columns={"efficiency": "value"})
    chart = curve_over_depth(
        table,
        value_title="path efficiency",
        depth_title="step",
        series_title=series,
        facet=facet,
        series=list(table.series.unique()),
        details={"training": "training", "step": "step"},
    )
    text = (
        "Distance from the start over the length of the path, up to each step: 1 is a straight path. all: the weights "
        "of the whole encoder; attention: those of all its attention layers; the others: those of one type of layer, "
        "in all blocks together."
    )
    return Figure("efficiency", "Path efficiency over steps", text, chart, table.drop(columns=["series", "depth"]))


def _over_blocks(result: xr.Dataset) -> Figure:
    """Efficiency of the whole path of each layer of each block."""
    whole = result.sel(encoder=list(_ends(result)[1].values()))
    columns = ["efficiency", "distance", "length", "efficiency_reason"]
    names = {"weights": "row", "place": "column", "efficiency": "value", "efficiency_reason": "reason"}
    cells = whole[columns].reset_coords("start", drop=True).to_dataframe().reset_index().rename(columns=names)
    cells = cells[cells.reason != ABSENT]
    chart = heatmap(
        cells.assign(column=cells.column.str.removeprefix("block.")),
        row_title="layer",
        column_title="block",
        value_title="path efficiency",
        rows=list(map(str, result.weights.values)),
        columns=[str(place).removeprefix("block.") for place in result.place.values],
        facet="training" if _several(result) else None,
        details={"training": "training", "step": "step"},
    )
    text = "Efficiency of the whole path of the weights of each layer of each block. Hatched: weights that never moved."
    return Figure("blocks", "Path efficiency over blocks", text, chart, cells)


def _pairs(result: xr.Dataset) -> pd.DataFrame:
    """CKA of all pairs of layers that there are, first token view."""
    view = result.isel(tokens=0, drop=True)
    names = {"cka": "value", "cka_low": "low", "cka_high": "high"}
    table = view[list(names)].to_dataframe().reset_index().rename(columns=names)
    mine, theirs = (
        view[name].to_series().reindex(pd.MultiIndex.from_frame(table[axes])).to_numpy()
        for name, axes in (("reason", ["encoder", "site"]), ("other_reason", ["other", "other_site"]))
    )
    table = table.assign(reason=np.where(mine == "", theirs, mine))
    return pd.DataFrame(table[table.reason != ABSENT])


def _near(result: xr.Dataset) -> pd.DataFrame:
    """Of these pairs those of the same type of layer at the same relative depth."""
    pairs = _pairs(result)
    same = result.diagonal_site.to_series()
    keys = pd.MultiIndex.from_frame(pairs[["encoder", "site", "other"]])
    return pd.DataFrame(pairs[pairs.other_site.to_numpy() == same.reindex(keys).to_numpy()])


def _numbers(sites: pd.Series) -> pd.Series:
    """The numbers of blocks, which are shorter than their names; the names, where there are others."""
    numbers = sites.str.removeprefix("block.")
    return numbers.astype(int) if numbers.str.isdigit().all() else sites


def _similarity(near: pd.DataFrame, name: str, title: str, text: str) -> Figure:
    """Blocks over steps, a panel for each training and other encoder."""
    cells = near.assign(pair=near.training + " × " + near.other, row=_numbers(near.site), column=near.step)
    cells = cells.iloc[np.lexsort([pd.factorize(cells[key])[0] for key in ("other", "training")])]
    chart = heatmap(
        cells,
        row_title="block",
        column_title="step",
        value_title="CKA",
        rows=list(cells.row.unique()),
        facet="pair",
        details={"training": "training", "other": "compared with", "other_site": "its layer"},
    )
    cells = cells[["training", "step", "site", "other", "other_site", "value", "low", "high", "reason"]]
    return Figure(name, title, text, chart, cells)


def _before_and_after(result: xr.Dataset) -> Figure:
    """All pairs of blocks of the first and of the last step of a training with every other encoder."""
    ends = {name for end in _ends(result) for name in end.values()}
    cells = _pairs(result)
    cells = cells[cells.encoder.isin(ends) & (cells.other != cells.start)]
    cells = cells.assign(
        pair=cells.encoder + " × " + cells.other, row=_numbers(cells.site), column=_numbers(cells.other_site)
    )
    cells = cells.iloc[np.lexsort([pd.factorize(cells[key])[0] for key in ("encoder", "other", "training")])]
    chart = heatmap(
        cells,
        row_title="block",
        column_title="block of the other",
        value_title="CKA",
        facet="pair",
        rows=list(cells.row.unique()),
        details={"site": "layer", "other_site": "layer of the other"},
    )
    text = (
        "CKA of all pairs of blocks with the other encoder, before the training and after it: what becomes brighter is "
        "what the training has made alike."
    )
    columns = ["encoder", "site", "other", "other_site", "value", "low", "high", "reason"]
    return Figure("pairs", "Similarity with others, before and after", text, chart, cells[columns])
