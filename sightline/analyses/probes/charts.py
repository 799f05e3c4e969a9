"""What probes say: figures of accuracies and gains, and a recommendation in plain words, from the numbers alone.

A difference whose 95 % interval reaches 0 is called what it is: these images cannot tell.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import xarray as xr

from sightline.analyses.probes.results import last_site
from sightline.core.results import ENDS
from sightline.report.figures import Figure, accuracy_over_depth, curve_over_depth, heatmap, over_depth


def named(probe: str) -> str:
    """A probe in words; what a multilayer one sees is said elsewhere, and then it is linear."""
    return f"a probe of {probe}" if probe.startswith("depth") else f"a {probe.replace('multilayer', 'linear')} probe"


# Figures


def figures(result: xr.Dataset) -> list[Figure]:
    return [*_per_layer(result), *_depth(result), *_added(result), *_sweep(result), *_path(result)]


def _per_layer(result: xr.Dataset) -> Iterator[Figure]:
    about = result.attrs
    images = f"{about['n_train']} training and {about['n_test']} test images; bands are 95 % Wilson intervals."
    captions = {
        "linear": "Linear probes on frozen features, for each layer the setting that is best on the selection split; ",
        "ridge": "Ridge probes on frozen features, the penalty chosen by left-out training images; ",
    }
    for probe in (name for name in captions if name in result.probe.values):
        title = f"Accuracy of the {probe} probe"
        for figure in accuracy_over_depth(result.sel(probe=probe), title, captions[probe] + images, "chance"):
            yield replace(figure, name=f"layers-{probe}")


def _at_last(result: xr.Dataset, names: list[str]) -> pd.DataFrame:
    """Numbers at the last layer of each encoder, which may be another one for another feature."""
    encoders = [encoder for encoder in result.encoder.values if result.last_site.sel(encoder=encoder).item()]
    rows = []
    for encoder in encoders:
        last = np.array([last_site(result.sel(encoder=encoder), str(name)) for name in result.feature.values])
        for site in dict.fromkeys(last.tolist()):
            features = result.feature.values[last == site]
            rows.append(result[names].sel(encoder=[encoder], site=[site], feature=features))
    return pd.concat([row.to_dataframe().reset_index() for row in rows], ignore_index=True)


def _curves(
    name: str,
    texts: tuple[str, str],
    table: pd.DataFrame,
    result: xr.Dataset,
    axes: tuple[str, str],
    percent: bool = True,
) -> Iterator[Figure]:
    """Lines of the encoders over `depth`, a panel for each feature; none where nothing is known."""
    if not len(table):
        return
    chart = curve_over_depth(
        table.rename(columns={"encoder": "series"}),
        depth_title=axes[0],
        value_title=axes[1],
        series_title="encoder",
        series=[str(encoder) for encoder in result.encoder.values],
        facet="feature",
        domain=None,
        percent=percent,
    )
    yield Figure(name, *texts, chart, table)


def _with_ends(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows where this number is known, it and its interval by the names that curves have."""
    names = {f"{name}{end}": word for end, word in zip(ENDS, ("value", "low", "high"), strict=True)}
    return table.dropna(subset=name).rename(columns=names)


def _depth(result: xr.Dataset) -> Iterator[Figure]:
    depths = {"linear": 1} | {f"depth {depth}": depth for depth in (2, 3)}
    names = [f"{name}{end}" for name in ("accuracy", "gain") for end in ENDS]
    if "config" not in result.dims:
        return
    table = _at_last(result, [*names, "mean_of_best", "std_of_best"])
    table = _with_ends(table[table.probe.isin(list(depths))], "accuracy")
    if set(table.probe) <= {"linear"}:
        return
    texts = (
        "Gain of depth",
        "Accuracy of probes on the last layer of each encoder: depth 1 is linear, depths 2 and 3 have one and two "
        "blocks of linear, BatchNorm and ReLU before it. A rise says that the classes are in the features, but not "
        "linearly. Bands are 95 % Wilson intervals, too wide to judge a rise by: the table has the gain with its "
        "paired interval.",
    )
    table = table.assign(depth=table.probe.map(depths))
    yield from _curves("depth", texts, table, result, ("depth of the probe", "accuracy"))


def _added(result: xr.Dataset) -> Iterator[Figure]:
    if "multilayer" not in result.probe.values:
        return
    yield from over_depth(
        result.sel(probe="multilayer"),
        "gain",
        name="added",
        title="Gain of an added layer",
        caption="Accuracy of a linear probe on the last layer and a block side by side, minus that on the last layer "
        "alone, over the block that is added. Above 0 the last layer has lost something that the block knows. Bands "
        "are paired 95 % intervals.",
        value_title="gain over the last layer alone",
        also=[f"accuracy{end}" for end in ENDS],
        facet="feature",
        reference=(0.0, "no gain"),
        domain=None,
        percent=True,
    )


def _sweep(result: xr.Dataset) -> Iterator[Figure]:
    """Selection accuracy over learning rate and weight decay, for the simplest probe that was trained."""
    probe = next((str(name) for name in result.probe.values if name not in ("ridge", "multilayer")), None)
    if probe is None:
        return
    names = ["loss", "selection_accuracy", "test_accuracy"]
    table = _at_last(result.sel(probe=probe), names).dropna(subset="selection_accuracy")
    if not len(table):
        return
    varied = [name for name in ("optimizer", "epochs", "warmup_epochs") if table[name].nunique() > 1]
    panels = table[["encoder", "feature", *varied]].astype(str).agg(", ".join, axis=1)
    cells = table.assign(what=panels, value=table.selection_accuracy, row=table.weight_decay, column=table.lr)
    ends = table.min_lr.nunique() > 1
    if ends:  # of the settings of a cell the best one, the first of equal ones
        cells = cells.sort_values("value", ascending=False, kind="stable")
        cells = cells.drop_duplicates(["what", "row", "column"]).sort_index()
    low, high = math.floor(10 * cells.value.min()) / 10, math.ceil(10 * cells.value.max()) / 10
    chart = heatmap(
        cells,
        row_title="weight decay",
        column_title="learning rate (base)",
        value_title="selection accuracy",
        facet="what",
        domain=(low, max(high, low + 0.1)),
    )
    caption = (
        f"{named(probe).capitalize()} on the last layer, trained with every setting: its accuracy on the images for "
        f"selection, which decides on the setting{', with the best learning rate at the end' if ends else ''}. The "
        "result has the same numbers for all layers and probes."
    )
    yield Figure("sweep", "The sweep of settings", caption, chart, table)


def _path(result: xr.Dataset) -> Iterator[Figure]:
    if "ridge_error" not in result:
        return
    table = _at_last(result, ["ridge_error"]).dropna(subset="ridge_error")
    table = table.assign(value=table.ridge_error, depth=np.log10(table.penalty))
    texts = (
        "Ridge probe over its penalty",
        "Mean squared error on training images that the fit has not seen, over the penalty λ, for the last layer of "
        "each encoder. The lowest point is taken. Where it is far to the right, few directions of the features can be "
        "trusted.",
    )
    yield from _curves(
        "ridge", texts, table, result, ("penalty λ, exponent of ten", "error on left-out images"), percent=False
    )
