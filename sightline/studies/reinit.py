"""Which blocks does fine-tuning build on? Give some of them random weights first, and see what that costs.

    drop(n) = accuracy fine-tuned from all blocks − accuracy with the first (or last) n of them re-initialised

on the same test images, with the same settings of fine-tuning (transfer/finetune.py) for all.

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Appendix F, Fig. F.3.

RUN/trainings/ENCODER/none, first-1, last-1, …   a fine-tuning each, `run:RUN/trainings/ENCODER/first-1`
RUN/results/reinit.nc, RUN/report.html, …        see core/run_folder.py
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr

from sightline.core.errors import InputError, counted, nearest
from sightline.core.groups import Kept, Mean
from sightline.core.processes import by_first
from sightline.core.results import ABSENT, ENDS
from sightline.core.run_folder import Run
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images
from sightline.measure.estimators.intervals import difference_of, wilson
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.request import named_encoders
from sightline.report.figures import FIRST, Figure, KeyNumber, curve_over_depth, key_number
from sightline.training.launch import Launch
from sightline.transfer.evaluate import decisions
from sightline.transfer.finetune import NAME, finetune, make_recipe
from sightline.transfer.trainings import NOT_YET, Reuse, folder_of, prepare, train_each

TOPIC = "transfer"
TITLE = "Re-initialised blocks"
QUESTION = (
    "Which blocks does fine-tuning build on: what does it cost to give the first or the last ones random weights?"
)
FORMULA = """\
drop(n) = accuracy after fine-tuning all blocks − accuracy after fine-tuning with n blocks re-initialised"""
HOW_TO_READ = """\
Every point is a separate fine-tuning, with the same settings and tested on the same images. A large drop says that
fine-tuning needs what pre-training has put into these blocks; a drop near 0, that they can be learned again just as
well, or were never of use. A curve that rises at once for the first blocks points to an encoder whose early layers
matter, as those of masked image modelling do; one that rises for the last blocks, to late layers that matter, as those
of contrastive learning do. The interval is over the test images, which all models share; it does not say how much
another seed of the fine-tuning would change."""
SOURCE = 'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Appendix F, Fig. F.3'

WHICH = ("first", "last")


def reinit(
    encoders: Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
    *,
    counts: Sequence[int] | None,
    ends: Sequence[str],
    reuse: Reuse | None = None,
) -> Run:
    """Fine-tune each encoder with the first and with the last n blocks re-initialised, see `sightline.api`.

    `counts` are the numbers n, by default 1, 2, 4, … below the depth; n = 0 belongs to it always. `reuse` are runs by
    encoder whose trainings are known to be the same: they are taken over.
    """
    asked = prepare(make_recipe, named_encoders(encoders), images, out, recipe or NAME, settings, launch)
    members, data, base = asked.members, asked.data, asked.recipe
    if not (data.labels_of("test") >= 0).any():
        raise InputError(f"The test images of {data.name} have no labels, so there is no accuracy; give others")
    variants = {name: _variants(encoder, counts, ends) for name, encoder in members.items()}

    def train(key: tuple[str, str], folder: Path) -> npt.NDArray[np.int64] | None:
        name, variant = key
        tuned = finetune(members[name], data, folder, recipe, {**settings, "reinit": variant}, asked.each)
        device, batch = asked.fabric.device, base.optimization.batch
        return by_first(lambda: _decided(tuned, data, batch, device, launch.workers))

    def result(found: Mapping[tuple[str, str], npt.NDArray[np.int64] | None]) -> xr.Dataset:
        return _result({key: one for key, one in found.items() if one is not None}, members, variants, data)

    folders = {
        (name, variant): folder_of(asked.out, name) / (variant.replace(":", "-") or "none")
        for name, of in variants.items()
        for variant in of
    }
    return train_each("reinit", asked, folders, train, result, reuse=reuse, varies=["reinit"], also=variants)


def _decided(
    tuned: Encoder, data: Images, batch: int, device: torch.device, workers: int | None
) -> npt.NDArray[np.int64]:
    module = tuned.module.to(device)
    return decisions(module, data, "test", preprocess=tuned.preprocess, device=device, batch=batch, workers=workers)


def _variants(encoder: Encoder, counts: Sequence[int] | None, ends: Sequence[str]) -> list[str]:
    """What is re-initialised in each fine-tuning, as its setting has it; nothing comes first."""
    for end in ends:
        if end not in WHICH:
            raise InputError(f"An encoder has no end {end!r}{nearest(end, WHICH)}")
    powers = [2**k for k in range(encoder.depth.bit_length()) if 2**k < encoder.depth]
    numbers = sorted({*(powers if counts is None else counts)} - {0})
    if not numbers or not ends or numbers[0] < 0 or numbers[-1] > encoder.depth:
        raise InputError(
            f"Cannot re-initialise {', '.join(map(str, numbers)) or 'none'} of the {counted(encoder.depth, 'block')} "
            f"of {encoder.name}; choose one or more numbers from 1 to {encoder.depth}, and first or last"
        )
    return ["", *(f"{end}:{n}" for n in numbers for end in ends)]


def _result(
    decided: Mapping[tuple[str, str], npt.NDArray[np.int64]],
    members: Mapping[str, Encoder],
    variants: Mapping[str, Sequence[str]],
    data: Images,
) -> xr.Dataset:
    """Accuracy and drop with their intervals by encoder, end and number of blocks, as far as they are known."""
    every = [variant.split(":") for found in variants.values() for variant in found if variant]
    ends, counts = list(dict.fromkeys(end for end, _ in every)), sorted({0, *(int(n) for _, n in every)})
    shape = (len(members), len(ends), len(counts))
    accuracy, drop = np.full((2, *shape, 3), np.nan)
    reason = np.full(shape, ABSENT, object)
    groups, truth = ImageGroups(data, ["test"]), data.labels_of("test")
    sums = np.zeros((3, GROUPS, *shape))  # images, those that are right, those that are lost
    for (i, name), (j, end), (k, n) in itertools.product(enumerate(members), enumerate(ends), enumerate(counts)):
        variant = f"{end}:{n}" if n else ""
        if variant in variants[name]:
            reason[i, j, k] = NOT_YET
        if (name, variant) in decided:
            rows = np.flatnonzero((decided[name, variant] >= 0) & (truth >= 0))
            whole = decided[name, ""][rows] == truth[rows]
            right = decided[name, variant][rows] == truth[rows] if n else whole
            accuracy[i, j, k] = right.mean(), *wilson(right.sum(), len(rows))
            drop[i, j, k] = difference_of(whole, right)
            reason[i, j, k] = ""
            lost = whole.astype(int) - right
            sums[:, :, i, j, k] = groups.sums("test", rows, np.column_stack([np.ones(len(rows)), right, lost])).T
    dims, values = ("encoder", "end", "n"), {"accuracy": accuracy, "accuracy_drop": drop}
    result = xr.Dataset(
        {
            **{f"{name}{end}": (dims, value[..., k]) for name, value in values.items() for k, end in enumerate(ENDS)},
            "reason": (dims, reason.astype(str)),
        },
        coords={"encoder": list(members), "end": ends, "n": counts},
        attrs={
            "test_images": int(sums[0].sum(0).max()),
            "interval": "95 %: Wilson for accuracies, paired over test images for drops",
        },
    )
    kept = Kept({"group": groups.axis})
    parts = {name: (("group", *dims), part) for name, part in zip(("images", "right", "lost"), sums, strict=True)}
    kept.add("accuracy", Mean("right", "images"), **parts)
    kept.add("accuracy_drop", Mean("lost", "images"))
    return kept.beside(result)


# The page


def figures(result: xr.Dataset) -> list[Figure]:
    text = (
        "Accuracy after fine-tuning all blocks minus that with n of them re-initialised first, counted from the first "
        "or from the last block: the higher, the more fine-tuning needs what these blocks had learned."
    )
    return [
        _figure(result, "accuracy_drop", "What re-initialised blocks cost", text, (0.0, "no loss")),
        _figure(result, "accuracy", "Accuracy with re-initialised blocks", "The accuracies behind the drops.", None),
    ]


def _figure(result: xr.Dataset, name: str, title: str, text: str, reference: tuple[float, str] | None) -> Figure:
    columns = {f"{name}{end}": column for end, column in zip(ENDS, ("value", "low", "high"), strict=True)}
    table = result[list(columns)].to_dataframe().reset_index().dropna(subset=name)
    table = table.rename(columns={**columns, "encoder": "series"})
    table = table.assign(depth=table.n, blocks="the " + table.end + " n blocks")
    chart = curve_over_depth(
        table,
        value_title=name.replace("_", " "),
        depth_title="blocks re-initialised",
        series_title="encoder",
        series=list(map(str, result.encoder.values)),
        facet="blocks",
        reference=reference,
        domain=None,
        percent=True,
        details={"n": "blocks"},
    )
    return Figure(name, title, text, chart, table.drop(columns=["depth", "blocks"]))


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    found = []
    for name, end in itertools.product(result.encoder.values, result.end.values):
        drops = result.sel(encoder=name, end=end).dropna("n", subset=["accuracy_drop"])
        if drops.sizes["n"] > 1:  # else there is nothing to tell yet
            last = drops.isel(n=-1)
            n, drop, low, high, left = (
                last[key].item()
                for key in ("n", "accuracy_drop", "accuracy_drop_low", "accuracy_drop_high", "accuracy")
            )
            blocks = "block" if n == 1 else f"{n} blocks"
            detail = f"drop in accuracy with the {end} {blocks} re-initialised, 95 % {low:.1%} – {high:.1%}"
            found.append((str(name), f"{drop:+.1%}", f"{detail}; {left:.1%} is left"))
    return found


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    names = [f"accuracy_drop{end}" for end in ENDS]
    found = []
    for end in map(str, result.end.values):
        drops = result[names].sel(end=end)
        about = f"accuracy lost with the most {end} blocks re-initialised"
        made = key_number(drops, "accuracy_drop", at="last", over="n", title=f"{end} blocks", about=about, style=".1%")
        found += [replace(number, over="number of blocks", place=FIRST) for number in made]
    return found
