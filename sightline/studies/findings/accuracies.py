"""Accuracies that several findings speak of: of linear probes, and after fine-tuning.

Fine-tuned encoders are tested wherever their own head has decided on the test images, so that differences are paired
over images. Of a fine-tuning whose decisions nobody kept, the count of right ones is known; then the interval of a
difference takes the two as independent, which is rather too wide.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.contrast import Estimate, Factor
from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence, Missing, over_seeds

PROBES = ("linear", "ridge")  # the second where no other was trained
POOLINGS = ("cls", "gap")  # the second of encoders without a CLS token


def last(x: npt.NDArray[np.float64], axis: int) -> Any:
    """A statistic of numbers in order of depth: that of the last layer."""
    return np.asarray(x.take(-1, axis))


def intermediate(selection: xr.DataArray, last_site: str) -> xr.DataArray:
    """Numbers of the blocks that a probe saw beside the last layer: the last block beside the final norm is none."""
    blocks = selection.isel(site=np.flatnonzero(selection.layer_type.values == "block"))
    candidates = blocks.isel(site=np.flatnonzero(np.isfinite(blocks.values) & (blocks.site.values != last_site)))
    beside_norm = last_site not in blocks.site.values and candidates.sizes["site"] > 1
    return candidates.isel(site=slice(0, -1)) if beside_norm else candidates


def probed_images(evidence: Evidence) -> list[str]:
    """The sets of images that probes were fitted to; the first is that of the study."""
    return list(dict.fromkeys(images_of(run) for run in evidence.by_images if "probes" in run))


def images_of(run: Run) -> str:
    """The name of the set of images of a run."""
    return str(run.request.get("images", {}).get("name", ""))


def linear_probe(evidence: Evidence, encoder: str, *, images: str | None = None, **where: Any) -> Estimate:
    """Accuracy of the linear probe, unless said otherwise on the last layer: after the final norm, if there is one."""
    chosen = where if {*where} - {"feature"} else {"site": ["block.*", "norm"], "statistic": last, **where}
    wanted = [images] if images is not None else probed_images(evidence)[:1]
    poolings = (chosen.pop("feature"),) if "feature" in chosen else POOLINGS
    missing: list[Missing] = []
    for probe in PROBES:
        for feature in poolings:
            try:
                return evidence.estimate(
                    "probes.accuracy",
                    encoder=encoder,
                    probe=probe,
                    feature=feature,
                    among=lambda run: images_of(run) in wanted,
                    **chosen,
                )
            except Missing as error:
                missing.append(error)
    raise missing[0]


# Fine-tuning


def tuned_accuracies(evidence: Evidence, *starts: str) -> list[Estimate]:
    """Test accuracies after encoders were fine-tuned, all from the first source that knows all of them."""
    missing: list[Missing] = []
    for source in (_of_agreement, _of_noise, _of_reinit, _of_folder):
        try:
            return source(evidence, *starts)
        except Missing as error:
            missing.append(error)
    raise missing[0]


def _of_agreement(evidence: Evidence, *starts: str) -> list[Estimate]:
    return [_by_own_head(evidence, start, "agreement") for start in starts]


def _of_noise(evidence: Evidence, *starts: str) -> list[Estimate]:
    return [_by_own_head(evidence, start, "noise") for start in starts]


def _by_own_head(evidence: Evidence, start: str, result: str) -> Estimate:
    """From a pass over the fine-tuned encoder, if its own head decided there."""
    from sightline.measure.classifiers import HEAD

    tuned = evidence.need_tuned(start).name
    members = list(evidence.seeds.get(tuned, (tuned,)))

    def own_head(run: Run) -> bool:
        table = run[result]
        here = [name for name in members if name in table.encoder.values]  # each seed may have a run of its own
        return "classifier" not in table or bool((table.classifier.sel(encoder=here) == HEAD).all())

    return evidence.estimate(f"{result}.test_accuracy", encoder=tuned, among=own_head)


def _of_reinit(evidence: Evidence, *starts: str) -> list[Estimate]:
    """The study of re-initialised blocks begins with a fine-tuning of all of them."""
    among, estimates = evidence.alike("reinit", *starts), []
    for start in starts:
        _, table = next(evidence.tables("reinit", start, among=among))
        end = str(table.end.values[0])  # any of them
        estimates.append(evidence.estimate("reinit.accuracy", encoder=start, end=end, n=0, among=among))
    return estimates


def _of_folder(evidence: Evidence, *starts: str) -> list[Estimate]:
    """From what fine-tunings have written down at their end: the share of right decisions, and how many images."""
    return [_of_counts(evidence, start) for start in starts]


def _of_counts(evidence: Evidence, start: str) -> Estimate:
    members = evidence.seeds.get(start, (start,))
    counts = [next(_counts(evidence, member), None) for member in members]
    there = [one for one in counts if one is not None]
    if len(there) < len(members):
        raise Missing(f"a fine-tuned {start}: add `--steps finetune`")
    return over_seeds(start, dict(zip(members, there, strict=True)))


def _counts(evidence: Evidence, start: str) -> Iterator[Estimate]:
    references = {
        str(about["name"]): about.get("reference") for run in evidence.runs for about in run.request.get("encoders", [])
    }
    for run in evidence.runs:
        about, accuracy = run.request.get("encoder", {}), run.request.get("results", {}).get("test_accuracy")
        same = about.get("name") == start or about.get("reference") == references.get(start, "")
        if run.request.get("kind") == "finetune" and same and accuracy is not None:
            images = int(run.request["images"]["splits"]["test"])
            yield of_counts(round(accuracy * images), images, f"fine-tuned {start}")


def of_counts(right: int, images: int, what: str) -> Estimate:
    """An accuracy of which no more than the counts are known, paired with nothing; its error is √(p(1 − p)/(n − 1)).

    >>> round(of_counts(90, 100, "x").contrast().error ** 2 * 99, 12)
    0.09
    """
    without = np.where(np.arange(images) < right, right - 1, right) / (images - 1)
    factor = Factor(f"counts of {what}", f"test images of the {what}, of which only the counts are known", alone=True)
    return Estimate(right / images, {factor: without}, {factor: np.ones(images, bool)}, None, f"accuracy of the {what}")
