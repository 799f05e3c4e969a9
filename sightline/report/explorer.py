"""The explorer of layer pairs within the report: what is packed into the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from sightline.core.results import ABSENT
from sightline.report.figures import linked_charts
from sightline.report.html import clean
from sightline.report.packing import MISSING, packed, places_of, whole_numbers

__all__ = ["pack_explorer"]


PAIR = ("encoder_a", "encoder_b", "site_a", "site_b")


def pack_explorer(result: xr.Dataset, title: str) -> dict[str, Any] | None:
    """Whatever compares every layer of every encoder with every other gets the linked view; None for other results."""
    result = _choices(result) if "measure" in result.dims else result
    names = [str(n) for n, v in result.data_vars.items() if v.dims[-4:] == PAIR and v.dims[:-4] in {(), ("tokens",)}]
    main = next((n for n in names if not n.endswith(("_low", "_high", "_null"))), None)
    if main is None:
        return None
    label = main.upper() if len(main) <= 4 else main
    views = result if "tokens" in result[main].dims else result.expand_dims("tokens")
    parts = {"value": main, "low": f"{main}_low", "high": f"{main}_high", "null": f"{main}_null"}
    values = {part: views[n].transpose("tokens", *PAIR).values for part, n in parts.items() if n in names}
    places = places_of(*values.values())
    whole = {part: whole_numbers(array, places) for part, array in values.items()}
    for end, sign in (("low", 1), ("high", -1)):
        if end in whole:  # from the value: a small number
            missing = (whole[end] == MISSING) | (whole["value"] == MISSING)
            whole[end] = np.where(missing, MISSING, sign * (whole["value"] - whole[end])).astype(np.int16)
    encoders, sites = ([clean(v) for v in result[axis].values] for axis in ("encoder_a", "site_a"))
    shape = (values["value"].shape[0], len(encoders), len(sites))
    reason = np.full(shape, "", dtype=object)
    if "reason" in views:
        reason = views.reason.transpose("tokens", "encoder", "site").values.astype(object)
    kinds = result.layer_type.values.astype(str) if "layer_type" in result.coords else np.full(len(sites), "all")
    blocks = result.block.values.astype(int) if "block" in result.coords else np.full(len(sites), -1)
    has = ((reason != "") & (reason != ABSENT)).any(0) | np.isfinite(values["value"]).any((0, 2, 4))  # (encoder, site)
    own = [np.flatnonzero(row) for row in has]
    words, codes = np.unique(reason.astype(str), return_inverse=True)
    codes = codes.reshape(shape)
    found = [str(kinds[i]) for i in range(len(sites)) if has[:, i].any()]
    return {
        "variable": main, "label": label, "title": title, "encoders": encoders,
        "tokens": [clean(t) for t in views.tokens.values] if "tokens" in views.coords else ["all"],
        "types": [*sorted(set(found) - {"all"}, key=lambda k: (k != "block", found.index(k))), "all"],
        "sites": [[sites[i] for i in mine] for mine in own],
        "kinds": [[str(kinds[i]) for i in mine] for mine in own],
        "blocks": [[int(blocks[i]) for i in mine] for mine in own],
        "reasons": [clean(w) for w in words],
        "reason": [[codes[t, e, mine].tolist() for e, mine in enumerate(own)] for t in range(shape[0])],
        "order": _clustered(values["value"], own, kinds),
        "places": places, "values": {part: _packed(array, own) for part, array in whole.items()},
        "spec": linked_charts(label),
    }  # fmt: skip


def _choices(result: xr.Dataset) -> xr.Dataset:
    """Several measures of the same pairs: each token view of each as one choice.

    Distances are left to the figures: here the highest value is marked as the best match.
    """
    if "is_distance" in result.coords:
        result = result.sel(measure=~result.is_distance)
    reason = {"reason": result.reason.expand_dims(measure=result.measure)} if "reason" in result else {}
    pairs = [str(n) for n, v in result.data_vars.items() if v.dims[-4:] == PAIR]
    stacked = result[pairs].assign(reason).stack(choice=("measure", "tokens"))
    labels = [f"{measure}, {tokens}" for measure, tokens in stacked.choice.values]
    choices = stacked.drop_vars(["choice", "measure", "tokens", "is_distance"], errors="ignore").rename(choice="tokens")
    return choices.assign_coords(tokens=labels).transpose("tokens", ...)


def _clustered(
    values: np.ndarray[Any, Any], own: Sequence[np.ndarray[Any, Any]], kinds: np.ndarray[Any, Any]
) -> list[int]:
    """Encoders in an order that puts like beside like: average linkage of their mean values, leaves turned to fit."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(own) < 3:
        return list(range(len(own)))
    blocks = [mine[kinds[mine] == "block"] if (kinds[mine] == "block").any() else mine for mine in own]
    with np.errstate(invalid="ignore"):
        mean = np.array(
            [[_mean(values[0, a, b][np.ix_(i, j)]) for b, j in enumerate(blocks)] for a, i in enumerate(blocks)]
        )
    mean = (mean + mean.T) / 2
    far = np.nan_to_num(np.nanmax(mean) - mean if np.isfinite(mean).any() else mean, nan=1.0)
    np.fill_diagonal(far, 0.0)
    found: list[int] = leaves_list(linkage(squareform(far), "average", optimal_ordering=True)).tolist()
    return found


def _mean(values: np.ndarray[Any, Any]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _packed(array: np.ndarray[Any, Any], own: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """(tokens, A, B, site of A, site of B) in one row, without absent sites and without a mirrored half."""
    symmetric = np.array_equal(array, array.transpose(0, 2, 1, 4, 3))
    blocks = [
        array[t, a, b][np.ix_(own[a], own[b])].ravel()
        for t in range(len(array))
        for a in range(len(own))
        for b in range(a if symmetric else 0, len(own))
    ]
    return {"packed": packed(np.concatenate(blocks)), "symmetric": bool(symmetric)}
