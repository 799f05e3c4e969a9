"""Numbers of encoders that figures show as one point: accuracies of probes and after fine-tuning, precision, IoU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from sightline.core.contrast import Contrast
from sightline.core.results import ENDS
from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings import accuracies
from sightline.studies.roles import Role


class Number(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}"


def _number(of: xr.Dataset, name: str) -> Number:
    return Number(*(float(of[f"{name}{end}"]) for end in ENDS))


def _of_contrast(found: Contrast) -> Number:
    return Number(found.value, found.low, found.high)


# Classification


def last_probe(result: xr.Dataset, encoder: str, probe: str, feature: str | None = None) -> xr.Dataset:
    """What became of a probe on the last layer of an encoder, on CLS or, where it has none, on its other feature."""
    at = result.sel(encoder=encoder, probe=probe, site=str(result.last_site.sel(encoder=encoder).item()))
    if feature is not None:
        return at.sel(feature=feature)
    features = at.accuracy.dropna("feature").feature
    if not features.size:
        raise Missing(f"a {probe} probe on the last layer of {encoder}")
    return at.sel(feature=features[0].item())


def linear_probe(evidence: Evidence, encoder: str, feature: str | None = None, images: str | None = None) -> Number:
    """Accuracy of the linear probe on the last layer, or of the ridge probe where no other was trained.

    Over the seeds of an encoder, if any, as the findings have it, and on the images of the study, unless others are
    named.
    """
    if (one := evidence.together(encoder)) in evidence.seeds:
        accuracy = accuracies.linear_probe(evidence, one, images=images, **({"feature": feature} if feature else {}))
        return _of_contrast(accuracy.contrast())
    wanted = [images] if images is not None else accuracies.probed_images(evidence)[:1]
    result = evidence.table("probes", encoder, among=lambda run: accuracies.images_of(run) in wanted)
    kind = "linear" if "linear" in result.probe.values else "ridge"
    return _number(last_probe(result, encoder, kind, feature), "accuracy")


def probe_on_other_images(evidence: Evidence, encoder: str) -> Number:
    """The same of one encoder on a second set of images, to which the encoders are carried over."""
    sets = accuracies.probed_images(evidence)
    if len(sets) < 2:
        raise Missing("probes on a second set of images: compare the encoders on it, too, and give both runs")
    return linear_probe(evidence.apart(), encoder, images=sets[1])


def tuned_accuracy(evidence: Evidence, encoder: str) -> Number:
    """Accuracy on the test images after an encoder was fine-tuned, as the findings have it: over its seeds, if any."""
    return _of_contrast(accuracies.tuned_accuracies(evidence, evidence.together(encoder))[0].contrast())


def rows_of(
    roles: Iterable[Role],
    depth: Callable[[Role], float],
    series: Callable[[Role], str],
    numbers: Mapping[str, Callable[[Role], Number]],
) -> pd.DataFrame:
    """Rows for curves over something that the study varies, a panel (`what`) for each kind of number."""
    return pd.DataFrame(
        {"what": what, "series": series(role), "depth": depth(role), "encoder": role.name} | number(role)._asdict()
        for what, number in numbers.items()
        for role in roles
    )


# Detection and segmentation


def of_blocks(result_settings: Mapping[str, object]) -> int:
    """How many blocks a detector sees."""
    return len(str(result_settings.get("blocks", "last")).split(","))


def average_precisions(
    evidence: Evidence, encoders: Sequence[str], *, frozen: bool, several: bool = False
) -> pd.DataFrame:
    """AP of each encoder, kind and size of objects, with its interval; `several`: blocks are seen, not the last alone.

    One row each: encoder, kind, area, value, low, high; of detectors that were trained alike.
    """
    evidence = evidence.apart()

    def asked(run: Run) -> bool:
        trained = run["detection"].attrs["encoders"] == ("frozen" if frozen else "trained along")
        return trained and (of_blocks(run.request.get("settings", {})) > 1) == several

    what = f"detection on encoders that are {'frozen' if frozen else 'trained along'}"
    what += " and seen by several blocks" if several else ""
    for encoder in encoders:
        if not evidence.holds("detection", encoder, among=asked):
            raise Missing(f"{what}, of {encoder}: add `--steps detect`")
    alike, tables = evidence.alike("detection", *encoders, among=asked), []
    for encoder in encoders:
        of_encoder = evidence.table("detection", encoder, among=alike).sel(encoder=[encoder])
        names = dict(zip((f"AP{end}" for end in ENDS), ("value", "low", "high"), strict=True))
        tables.append(of_encoder[list(names)].to_dataframe().reset_index().rename(columns=names))
    return pd.concat(tables, ignore_index=True)


def precisions_by_blocks(evidence: Evidence, encoders: Sequence[str], words: Mapping[str, bool]) -> pd.DataFrame:
    """The same of detectors on frozen encoders that differ in the blocks they see alone, `series` says in which."""
    missing: list[Missing] = []
    for alike in evidence.trained_alike("detection", but=["blocks"]):
        of = partial(average_precisions, alike, encoders, frozen=True)
        try:
            return pd.concat(of(several=several).assign(series=word) for word, several in words.items())
        except Missing as error:
            missing.append(error)
    raise missing[0] if missing else Missing(f"detection of {' and '.join(encoders)}: add `--steps detect`")


def mean_iou(evidence: Evidence, encoder: str) -> Number:
    """mIoU of a trained segmentation head, or of the linear one of the pass."""
    if evidence.holds("segmenters", encoder):
        return _number(evidence.table("segmenters", encoder).sel(encoder=encoder), "miou")
    result = evidence.table("segmentation", encoder).sel(encoder=encoder)
    if np.isfinite(result.softmax_miou):
        return _number(result, "softmax_miou")
    if not (site := str(result.chosen.item())):
        raise Missing(f"segmentation by {encoder}, which has no number")
    return _number(result.sel(site=site), "miou")
