"""Charts and headlines of the spectra."""

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.results import outside_decoder
from sightline.report.figures import FIRST, Figure, KeyNumber, key_number, over_depth

LEVELS = ("a third", "two thirds")
CLOUDS = {"token": "tokens of an image", "image": "images"}


def figures(result: xr.Dataset) -> list[Figure]:
    relative = "Δ log σ, relative to the largest"
    samples = (
        f"Tokens: mean over a sample of {result.attrs['token_sample']} images, bands are 95 % intervals; images: the "
        f"mean tokens of {result.attrs['image_sample']}."
    )
    words = {
        "token": "A falling curve: the places of an image become alike; a rising one: they become distinct. ",
        "image": "A rising curve: images move apart from each other, in ever more directions. ",
    }
    drawn = []
    for cloud, what in CLOUDS.items():
        ranks = [_rank_name(result, cloud, level) for level in LEVELS]
        drawn += over_depth(
            result.transpose("level", ...).assign_coords(what=("level", ranks)),
            f"{cloud}_delta",
            name=f"{cloud}-delta",
            title=f"Singular values of the {what} over depth",
            caption=words[cloud] + samples,
            value_title=relative,
            types=("embed", "block"),
            facet="what",
            domain=None,
        )
        drawn += _spectrum(result, cloud, relative)
    absolute = (
        "Not relative to the largest, and with the mean left in, which is most of the largest: the size of the cloud "
        "itself. A layer that clumps tokens lowers it. "
    )
    counts = "How many directions matter: the exponential of the entropy of the spectrum. "
    for measure, name, title, value_title, caption in (
        ("uncentred_second", "second", "Second largest singular value over depth", "log σ₂", absolute + samples),
        ("effective_rank", "rank", "Effective rank over depth", "effective rank", counts + samples),
    ):
        both = {f"{cloud}_{measure}": what for cloud, what in CLOUDS.items()}
        drawn += over_depth(
            result,
            both,
            name=name,
            title=title,
            caption=caption,
            value_title=value_title,
            types=("embed", "block"),
            domain=None,
        )
    return drawn


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    blocks = result.sel(site=(result.layer_type == "block") & outside_decoder(result.site.values))
    for encoder in result.encoder.values:
        of = blocks.sel(encoder=encoder).dropna("site", subset=["image_effective_rank"])
        if of.site.size:
            last = of.isel(site=-1)
            tokens = f"; of the tokens of an image {last.token_effective_rank:.1f}" * bool(last.token_images)
            detail = f"effective rank of the images at {last.site.item()}{tokens}"
            lines.append((str(encoder), f"{last.image_effective_rank:.1f}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = "effective rank of the images at the last block"
    return key_number(result, "image_effective_rank", at="last", title="rank", about=about, style=".1f", place=FIRST)


def _rank_name(result: xr.Dataset, cloud: str, level: str) -> str:
    ranks = np.unique(result[f"{cloud}_rank"].sel(level=level).values)
    ranks = ranks[np.isfinite(ranks)]
    return f"rank {ranks[0]:.0f}" if len(ranks) == 1 else f"{level} of the ranks"


def _spectrum(result: xr.Dataset, cloud: str, value_title: str) -> list[Figure]:
    """Whole spectra, a panel for each encoder, coloured by depth; at most 64 of the ranks are drawn."""
    values = result[f"{cloud}_spectrum"].sel(site=result.layer_type.isin(["embed", "block"])).dropna("rank", how="all")
    drawn = np.linspace(0, values.sizes["rank"] - 1, min(values.sizes["rank"], 64)).astype(int)
    table = values.isel(rank=drawn).rename("value").to_dataframe().dropna(subset="value").reset_index()
    if table.empty:
        return []
    table = table.assign(depth=table.block + 1).drop(columns=["layer_type", "block"])
    chart = (
        alt.Chart(table.assign(panel=pd.factorize(table.encoder)[0]))
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("rank:Q").axis(grid=False).scale(nice=False),
            y=alt.Y("value:Q", title=value_title),
            color=alt.Color("depth:Q", title="blocks passed").scale(range="heatmap"),
            detail="site:N",
            tooltip=["site:N", "rank:Q", alt.Tooltip("value:Q", title=value_title, format=".4f")],
        )
        .properties(width=260, height=200)
        .facet(alt.Facet("encoder:N", title=None, sort=alt.EncodingSortField("panel", op="min")), columns=3)
    )
    caption = (
        "Singular values, the largest first, a line for each depth. A line that lies higher is that of a cloud which "
        "fills more directions; it ends where values cannot be distinguished from rounding."
    )
    return [Figure(f"{cloud}-spectrum", f"Spectrum of the {CLOUDS[cloud]}", caption, chart, table)]
