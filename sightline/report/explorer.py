"""The explorer of layer pairs within the report: what is packed into the page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from sightline.core.results import ABSENT
from sightline.report.figures import linked_charts
from sightline.report.html import clean
from sightline.report.packing import MISSING, packed, places_of, whole_numbers

VIEWS = ("measure", "tokens")
PAIR = ("encoder_a", "encoder_b", "site_a", "site_b")


def pack_explorer(result: xr.Dataset, title: str) -> dict[str, Any] | None:
    """Whatever compares every layer of every encoder with every other gets the linked view; None for other results.

    Where there are several measures of the same pairs, all are packed, one after the other, each with all token views.
    """
    names = [str(n) for n, v in result.data_vars.items() if v.dims[-4:] == PAIR and set(v.dims[:-4]) <= set(VIEWS)]
    main = next((n for n in names if not n.endswith(("_low", "_high", "_null"))), None)
    if main is None:
        return None
    shown = result[[*names, *(["reason"] if "reason" in result else [])]]
    views = shown.expand_dims([axis for axis in VIEWS if axis not in result[main].dims])
    parts = {"value": main, "low": f"{main}_low", "high": f"{main}_high", "null": f"{main}_null"}
    values = {part: views[n].transpose(*VIEWS, *PAIR).values for part, n in parts.items() if n in names}
    measures = _measures(views, main, values)
    values = {part: array.reshape(-1, *array.shape[2:]) for part, array in values.items()}
    places = places_of(*values.values())
    whole = {part: whole_numbers(array, places) for part, array in values.items()}
    for end, sign in (("low", 1), ("high", -1)):
        if end in whole:  # from the value: a small number
            missing = (whole[end] == MISSING) | (whole["value"] == MISSING)
            whole[end] = np.where(missing, MISSING, sign * (whole["value"] - whole[end])).astype(np.int16)
    encoders, sites = ([clean(v) for v in result[axis].values] for axis in ("encoder_a", "site_a"))
    shape = (views.sizes["tokens"], len(encoders), len(sites))
    reason = np.full(shape, "", dtype=object)
    if "reason" in views:
        own_reason = views.reason.isel(measure=0, drop=True) if "measure" in views.reason.dims else views.reason
        reason = own_reason.transpose("tokens", "encoder", "site").values.astype(object)
    kinds = result.layer_type.values.astype(str) if "layer_type" in result.coords else np.full(len(sites), "all")
    blocks = result.block.values.astype(int) if "block" in result.coords else np.full(len(sites), -1)
    has = ((reason != "") & (reason != ABSENT)).any(0) | np.isfinite(values["value"]).any((0, 2, 4))  # (encoder, site)
    own = [np.flatnonzero(row) for row in has]
    words, codes = np.unique(reason.astype(str), return_inverse=True)
    codes = codes.reshape(shape)
    types = [str(kinds[i]) for i in range(len(sites)) if has[:, i].any()]
    alike = -values["value"][0] if measures[0]["distance"] else values["value"][0]
    return {
        "variable": main,
        "measures": measures,
        "title": title,
        "encoders": encoders,
        "tokens": [clean(t) for t in views.tokens.values] if "tokens" in views.coords else ["all"],
        "types": [*sorted(set(types) - {"all"}, key=lambda k: (k != "block", types.index(k))), "all"],
        "sites": [[sites[i] for i in mine] for mine in own],
        "kinds": [[str(kinds[i]) for i in mine] for mine in own],
        "blocks": [[int(blocks[i]) for i in mine] for mine in own],
        "reasons": [clean(w) for w in words],
        "reason": [[codes[t, e, mine].tolist() for e, mine in enumerate(own)] for t in range(shape[0])],
        "order": _clustered(alike, own, kinds),
        "places": places,
        "values": {part: _packed(array, own) for part, array in whole.items()},
        "spec": linked_charts(),
    }


def _measures(views: xr.Dataset, main: str, values: Mapping[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """What each measure is called, whether small means alike, and where its axis ends."""
    if "measure" not in views.coords:
        return [{"name": main, "title": main.upper() if len(main) <= 4 else main, "distance": False, "top": 1}]
    names = [clean(name) for name in views.measure.values]
    titles = [clean(title) for title in views.measure_title.values] if "measure_title" in views.coords else names
    far = views.is_distance.values.tolist() if "is_distance" in views.coords else [False] * len(names)
    tops = [max(float(np.nanmax(array[m], initial=0)) for array in values.values()) for m in range(len(names))]
    return [
        {"name": name, "title": title, "distance": distance, "top": round(top, 4) if distance and top > 0 else 1}
        for name, title, distance, top in zip(names, titles, far, tops, strict=True)
    ]


def _clustered(
    values: np.ndarray[Any, Any], own: Sequence[np.ndarray[Any, Any]], kinds: np.ndarray[Any, Any]
) -> list[int]:
    """Encoders in an order that puts like beside like: average linkage of their mean values, leaves turned to fit.

    `values` (A, B, site of A, site of B): large for what is alike.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(own) < 3:
        return list(range(len(own)))
    blocks = [mine[kinds[mine] == "block"] if (kinds[mine] == "block").any() else mine for mine in own]
    with np.errstate(invalid="ignore"):
        mean = np.array(
            [[_mean(values[a, b][np.ix_(i, j)]) for b, j in enumerate(blocks)] for a, i in enumerate(blocks)]
        )
    mean = (mean + mean.T) / 2
    far = np.nan_to_num(np.nanmax(mean) - mean if np.isfinite(mean).any() else mean, nan=1.0)
    np.fill_diagonal(far, 0.0)
    order: list[int] = leaves_list(linkage(squareform(far), "average", optimal_ordering=True)).tolist()
    return order


def _mean(values: np.ndarray[Any, Any]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _packed(array: np.ndarray[Any, Any], own: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """(view, A, B, site of A, site of B) in one row, without absent sites and without a mirrored half."""
    symmetric = np.array_equal(array, array.transpose(0, 2, 1, 4, 3))
    blocks = [
        array[t, a, b][np.ix_(own[a], own[b])].ravel()
        for t in range(len(array))
        for a in range(len(own))
        for b in range(a if symmetric else 0, len(own))
    ]
    return {"packed": packed(np.concatenate(blocks)), "symmetric": bool(symmetric)}
