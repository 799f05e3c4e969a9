"""What the probes say in sentences: the headlines, and which layer and pooling to use."""

from collections.abc import Iterator

import numpy as np
import xarray as xr

from sightline.analyses.probes.charts import named
from sightline.analyses.probes.results import last_site
from sightline.core.errors import counted
from sightline.core.results import ENDS, interval, outside_decoder
from sightline.report.figures import FIRST, KeyNumber

POOLED = {
    "cls": "the CLS token",
    "gap": "the mean over all positions",
    "gap_without_cls": "the mean of the patches",
    "cls_gap": "the CLS token and the mean over all positions side by side",
}
LITTLE_LEFT = 0.98  # accuracy from which on fine-tuning has little to add


# Words


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    encoders = _known(result)
    lines = [(name, *_headline(_best(result, name))) for name in encoders]
    if len(encoders) > 1:
        label, number, detail = lines[0]
        unclear = [other for other in encoders[1:] if _verdict(_pair(result, label, other), "difference") < 1]
        open_end = f"; these images cannot separate it from {', '.join(unclear)}" if unclear else ""
        lines.insert(0, ("For these images", number, f"{label}, {detail}{open_end}"))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    """Accuracy of the probe that was chosen; over depth, of the simplest one."""
    rows = {name: _best(result, name) for name in _known(result)}
    simple = next((name for name in ("linear", "ridge") if name in result.probe.values), str(result.probe.values[0]))
    curves = {}
    for name, row in rows.items():
        blocks = result.accuracy.sel(encoder=name, probe=simple, feature=row.feature.item())
        blocks = blocks.sel(site=(blocks.layer_type == "block").values & outside_decoder(blocks.site.values)).dropna(
            "site"
        )
        curves[name] = blocks.values.tolist()
    values = {name: float(row.accuracy) for name, row in rows.items()}
    ends = {name: (float(row.accuracy_low), float(row.accuracy_high)) for name, row in rows.items()}
    about = "accuracy of the probe chosen on held-out images"
    number = KeyNumber("probe", about, values, ends, curves, style=".1%", best="highest", place=FIRST)
    return [number] if values else []


def _headline(row: xr.Dataset) -> tuple[str, str]:
    low, high = (float(row[f"accuracy{end}"]) for end in ENDS[1:])
    return f"{float(row.accuracy):.1%}", f"{_described(row)}, {interval(low, high)}"


def summary(result: xr.Dataset) -> list[str]:
    """Which encoder, layer, pooling and probe for these images, and what fine-tuning would be needed for."""
    encoders = _known(result)
    if not encoders:
        return ["No probe could be trained on these features, so there is nothing to recommend."]
    first, *others = encoders
    best, about = _best(result, first), result.attrs
    of_settings = ""
    if "mean_of_best" in best and not np.isnan(best.mean_of_best) and about["best_of"] > 1:
        spread = f"{float(best.mean_of_best):.1%} ± {float(best.std_of_best):.1%}"
        of_settings = f"; {spread} over its {about['best_of']} best settings"
    return [
        f"For these images take {first}: {_described(best)}. It was chosen on {counted(about['n_selection'], 'image')} "
        f"({about['selection']}) and classifies {_interval(best, 'accuracy')} of "
        f"{counted(about['n_test'], 'test image')} correctly{of_settings}. Chance is {about['chance']:.1%}.",
        *([" ".join(_against(result, first, other) for other in others)] if others else []),
        _left(best, about),
        *(f"{name}: " + " ".join(_holdings(result.sel(encoder=name))) for name in encoders),
    ]


def _known(result: xr.Dataset) -> list[str]:
    """Encoders that have a probe, the one that is best on the selection split first."""
    names = [str(name) for name in result.encoder.values if result.best_probe.sel(encoder=name).item()]
    return sorted(names, key=lambda name: -float(_best(result, name).selection))


def _best(result: xr.Dataset, encoder: str) -> xr.Dataset:
    """The numbers of the best probe of an encoder."""
    row = result.sel(encoder=encoder)
    return row.sel(probe=row.best_probe.item(), site=row.best_site.item(), feature=row.best_feature.item())


def _pair(result: xr.Dataset, a: str, b: str) -> xr.Dataset:
    return result.sel(encoder_a=a, encoder_b=b)


def _described(row: xr.Dataset) -> str:
    return f"{_layer(row)}, {POOLED[str(row.feature.item())]}, {named(row.probe.item())}"


def _layer(row: xr.Dataset) -> str:
    site = row.site.item()
    return (
        f"layers {last_site(row, str(row.feature.item()))} and {site} side by side"
        if row.probe.item() == "multilayer"
        else f"layer {site}"
    )


def _interval(row: xr.Dataset, name: str) -> str:
    value, low, high = (float(row[f"{name}{end}"]) for end in ENDS)
    return f"{value:.1%} ({interval(low, high)})"


def _points(row: xr.Dataset, name: str, sign: int = 1) -> str:
    value, *ends = (sign * 100 * float(row[f"{name}{end}"]) for end in ENDS)
    return f"{value:.1f} points (95 % {min(ends):.1f} to {max(ends):.1f})".replace("-", "−")


def _verdict(row: xr.Dataset, name: str) -> int:
    """1: above 0, −1: below 0, 0: these images cannot tell."""
    return int(float(row[f"{name}_low"]) > 0) - int(float(row[f"{name}_high"]) < 0)


def _against(result: xr.Dataset, first: str, other: str) -> str:
    pair, best = _pair(result, first, other), _best(result, other)
    whose = f"{other} ({float(best.accuracy):.1%}; {_described(best)})"
    match _verdict(pair, "difference"):
        case 1:
            return f"{first} is {_points(pair, 'difference')} ahead of {whose}."
        case -1:
            return (
                f"On the test images {whose} is {_points(pair, 'difference', -1)} ahead of {first}, though the images "
                "for selection preferred the latter: give more of them before you trust the choice."
            )
    return f"{first} and {whose} cannot be separated with these {result.attrs['n_test']} test images."


def _holdings(row: xr.Dataset) -> Iterator[str]:
    """Sentences on what is where in an encoder: its last layer, other poolings, depth, an added layer."""
    feature = str(row.best_feature.item())
    last = last_site(row, feature)
    probes = row.sel(feature=feature)
    yield from _plain(probes, last)
    for other in (str(name) for name in row.feature.values if name != feature):
        yield from _pooled(row.sel(feature=other), POOLED[other])
    deeper = [str(name) for name in row.probe.values if str(name).startswith("depth")]
    yield from _gained(
        probes.sel(probe=deeper, site=last), "probe", "the classes are in its features, but not linearly"
    )
    if "multilayer" in row.probe.values:
        yield from _gained(probes.sel(probe="multilayer"), "site", "the last layer has lost something that {} knows")


def _plain(row: xr.Dataset, last: str) -> Iterator[str]:
    """The simplest probe there is, against the best one."""
    simple = next((name for name in ("linear", "ridge") if name in row.probe.values), None)
    if simple is None or np.isnan((plain := row.sel(probe=simple, site=last)).lead):
        return
    if (row.best_probe.item(), row.best_site.item()) == (simple, last):
        compared = "and no other probe was preferred"
    else:
        simpler = (
            "" if row.best_probe.item() in ("linear", "ridge") else ", and it is simpler: if in doubt, take this one"
        )
        compared = {
            1: f"{_points(plain, 'lead')} less than the best",
            0: "which these images cannot separate from the best" + simpler,
            -1: f"{_points(plain, 'lead', -1)} more than the one that was preferred",
        }[_verdict(plain, "lead")]
    yield f"{named(simple).capitalize()} on the last layer ({last}) reaches {float(plain.accuracy):.1%}, {compared}."


def _pooled(row: xr.Dataset, pooling: str) -> Iterator[str]:
    """Another pooling with the probe that is best for it, against the best one."""
    pairs = row.stack(at=("probe", "site")).dropna("at", subset=["lead"])
    pairs = pairs.sel(at=outside_decoder(pairs.site.values))
    if pairs.sizes["at"]:
        best = pairs.isel(at=int(np.argmax(pairs.selection.values)))
        compared = {
            1: f"{_points(best, 'lead')} less",
            0: "not distinguishable from the best",
            -1: f"{_points(best, 'lead', -1)} more, though it was not preferred",
        }[_verdict(best, "lead")]
        probe = f"{_layer(best)}, {named(best.probe.item())}"
        yield f"With {pooling} instead ({probe}): {float(best.accuracy):.1%}, {compared}."


def _gained(row: xr.Dataset, axis: str, meaning: str) -> Iterator[str]:
    """What depth, or a layer beside it, gains on the last layer; of several the one that selection prefers."""
    gains = row.dropna(axis, subset=["gain"])
    if not gains.sizes[axis]:
        return
    best = gains.isel({axis: int(np.argmax(gains.selection.values))})
    name = str(best[axis].item())
    what = named(name).capitalize() if axis == "probe" else f"Layer {name}, added to the last one,"
    yield {
        1: f"{what} gains {_points(best, 'gain')} there: {meaning.format(name)}.",
        0: f"{what} shows no gain there on these images: {_points(best, 'gain')}.",
        -1: f"{what} loses {_points(best, 'gain', -1)} there.",
    }[_verdict(best, "gain")]


def _left(best: xr.Dataset, about: dict[str, float]) -> str:
    """What fine-tuning would be needed for."""
    accuracy, low, high = (float(best[f"accuracy{end}"]) for end in ENDS)
    if low <= max(about["chance"], about["majority"]):
        return (
            "No frozen probe is clearly better than guessing: try fine-tuning, more training images or another encoder."
        )
    if accuracy >= LITTLE_LEFT:
        return f"Frozen features reach {accuracy:.1%}: fine-tuning has little left to add."
    return (
        f"The best frozen probe stays at {accuracy:.1%} (95 % up to {high:.1%}): the other {1 - accuracy:.1%} of the "
        f"images would need fine-tuning, or more than these {about['n_train']} training images."
    )
