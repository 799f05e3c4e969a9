"""Which blocks does fine-tuning build on? Give some of them random weights first, and see what that costs.

    drop(n) = accuracy fine-tuned from all blocks − accuracy with the first (or last) n of them re-initialised

on the same test images, with the same settings of fine-tuning (transfer/finetune.py) for all.

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Appendix F, Fig. F.3.

RUN/trainings/ENCODER/none, first-1, last-1, …   a fine-tuning each, `run:RUN/trainings/ENCODER/first-1`
RUN/results/reinit.nc, RUN/report.html, …        see core/run_folder.py
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from sightline.core import ownership
from sightline.core.errors import InputError, counted, nearest
from sightline.core.groups import Kept, Mean, split
from sightline.core.processes import by_first
from sightline.core.results import ABSENT, ENDS
from sightline.core.run_folder import Run, plan_run
from sightline.encoders.encoder import Encoder
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.measure.estimators.intervals import difference_of, wilson
from sightline.measure.groups import GROUPS, ImageGroups
from sightline.measure.request import named_encoders
from sightline.report.figures import FIRST, Figure, KeyNumber, curve_over_depth, key_number
from sightline.training.folder import start
from sightline.training.launch import Launch
from sightline.training.recipe import read_recipe
from sightline.transfer.evaluate import decisions, right
from sightline.transfer.finetune import NAME, finetune, make_recipe
from sightline.transfer.trainings import begin, folder_of, question

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "FORMULA",
    "HOW_TO_READ",
    "QUESTION",
    "SOURCE",
    "TITLE",
    "TOPIC",
    "figures",
    "headlines",
    "key_numbers",
    "reinit",
]


TOPIC = "transfer"
TITLE = "Re-initialised blocks"
QUESTION = (
    "Which blocks does fine-tuning build on: what does it cost to give the first or the last ones random weights?"
)
FORMULA = """\
drop(n) = accuracy after fine-tuning all blocks − accuracy after fine-tuning with n blocks re-initialised"""
HOW_TO_READ = """\
Every point is a fine-tuning of its own, with the same settings and tested on the same images. A large drop says that
fine-tuning needs what pre-training has put into these blocks; a drop near 0, that they are learned again as well, or
were never of use. A curve that rises at once for the first blocks points to an encoder whose early layers matter, as
those of masked image modelling do; one that rises for the last blocks, to late layers that matter, as those of
contrastive learning do. The interval is that of the test images, which all models share; it does not tell how much
another seed of the fine-tuning would change."""
SOURCE = 'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", Appendix F, Fig. F.3'

WHICH = ("first", "last")
NOT_YET = "it is not trained yet"


def reinit(
    encoders: Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    images: str | Images | None = None,
    out: str | Path = "runs/reinit",
    *,
    counts: Sequence[int] | None = None,
    ends: Sequence[str] = WHICH,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    device: str = "auto",
    workers: int | None = None,
    show_progress: bool = True,
) -> Run:
    """Fine-tune each encoder with the first and with the last n blocks re-initialised; gives `run["reinit"]`.

    `counts` are the numbers n, by default 1, 2, 4, … below the depth; n = 0 belongs to it always. `recipe` and
    `settings` are those of `finetune`. Called again it goes on where it stopped; of more counts only the new ones are
    trained.
    """
    members, out = named_encoders(encoders), Path(out)
    base = make_recipe(read_recipe(NAME if recipe is None else recipe), settings or {})
    launch = Launch(resume=True, device=device, workers=workers, show_progress=show_progress)
    fabric, data = start(base, None if images is None else load_images(images), launch)
    if not (data.labels_of("test") >= 0).any():
        raise InputError(f"The test images of {data.name} have no labels, so there is no accuracy; give others")
    variants = {name: _variants(encoder, counts, ends) for name, encoder in members.items()}
    request, key = question("reinit", members, data, base.values(), varies=["reinit"], also=variants)
    run = plan_run(out, request, overwrite)
    if run.finished("reinit", key):
        return run
    fabric.barrier()  # all have looked at the folder before one of them writes to it
    by_first(lambda: begin(run, overwrite))
    decided: dict[tuple[str, str], npt.NDArray[np.int64]] = {}
    for name, variant in ((name, variant) for name, of in variants.items() for variant in of):
        folder = folder_of(out, name) / (variant.replace(":", "-") or "none")
        by_first(functools.partial(ownership.claim, out, folder / ownership.LIST))  # the list of a run of its own
        tuned = finetune(
            members[name],
            data,
            folder,
            recipe=recipe,
            settings={**(settings or {}), "reinit": variant},
            **asdict(launch),
        )
        found = by_first(functools.partial(_decisions, tuned, data, base.optimization.batch, fabric.device, workers))
        if found is not None:  # the first process
            decided[name, variant] = found
            done = len(decided) == sum(map(len, variants.values()))
            rights = {which: right(own, data.labels_of("test")) for which, own in decided.items()}
            result = _result(rights, members, variants).assign_attrs({"fingerprint": key} if done else {})
            run.save("reinit", *split(_kept(decided, data, result).beside(result)))
    return run


def _decisions(
    tuned: Encoder, data: Images, batch: int, device: torch.device, workers: int | None
) -> npt.NDArray[np.int64]:
    """What the classifier takes each test image for, −1 where it cannot be read."""
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
    rights: Mapping[tuple[str, str], npt.NDArray[np.bool_]],
    members: Mapping[str, Encoder],
    variants: Mapping[str, Sequence[str]],
) -> xr.Dataset:
    """Accuracy and drop with their intervals by encoder, end and number of blocks, as far as they are known."""
    every = [variant.split(":") for found in variants.values() for variant in found if variant]
    ends, counts = list(dict.fromkeys(end for end, _ in every)), sorted({0, *(int(n) for _, n in every)})
    shape = (len(members), len(ends), len(counts))
    accuracy, drop = np.full((2, *shape, 3), np.nan)
    reason = np.full(shape, ABSENT, object)
    for (i, name), (j, end), (k, n) in itertools.product(enumerate(members), enumerate(ends), enumerate(counts)):
        variant = f"{end}:{n}" if n else ""
        if variant in variants[name]:
            reason[i, j, k] = NOT_YET
        if (name, variant) in rights:
            mine = rights[name, variant]
            accuracy[i, j, k] = mine.mean(), *wilson(mine.sum(), len(mine))
            drop[i, j, k] = difference_of(rights[name, ""], mine)
            reason[i, j, k] = ""
    dims, values = ("encoder", "end", "n"), {"accuracy": accuracy, "accuracy_drop": drop}
    return xr.Dataset(
        {
            **{f"{name}{end}": (dims, value[..., k]) for name, value in values.items() for k, end in enumerate(ENDS)},
            "reason": (dims, reason.astype(str)),
        },
        coords={"encoder": list(members), "end": ends, "n": counts},
        attrs={
            "test_images": len(next(iter(rights.values()))),
            "interval": "95 %: Wilson for accuracies, paired over test images for drops",
        },
    )


def _kept(decided: Mapping[tuple[str, str], npt.NDArray[np.int64]], data: Images, result: xr.Dataset) -> Kept:
    """Right decisions by groups of test images, those of all analyses on these images, for contrasts."""
    groups, truth = ImageGroups(data, ["test"]), data.labels_of("test")
    known = np.flatnonzero((next(iter(decided.values())) >= 0) & (truth >= 0))
    sums = np.full((GROUPS, *result.accuracy.shape), np.nan)
    names, ends, counts = (result[dim].values.tolist() for dim in result.accuracy.dims)
    for (name, variant), own in decided.items():
        end, _, n = variant.partition(":")
        at = [ends.index(end)] if variant else slice(None)  # nothing re-initialised is the same from either end
        right_of = groups.sums("test", known, (own == truth)[known])
        sums[:, names.index(name), at, counts.index(int(n or 0))] = right_of[:, None]
    parts = {"accuracy": sums, "accuracy_drop": sums[..., [counts.index(0)]] - sums}
    images = (("group",), groups.sums("test", known, np.ones(len(known))))
    kept, dims = Kept({"group": groups.axis}), ("group", *map(str, result.accuracy.dims))
    for name, part in parts.items():
        kept.add(name, Mean(f"{name}_sum", "images"), **{f"{name}_sum": (dims, part), "images": images})
    return kept


# The page


def figures(result: xr.Dataset) -> list[Figure]:
    """Drop and accuracy against the number of blocks, a panel for each end."""
    text = (
        "Accuracy after fine-tuning all blocks minus that with n of them re-initialised before, counted from the first "
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
        table, value_title=name.replace("_", " "), depth_title="blocks re-initialised",
        series_title="encoder", series=list(map(str, result.encoder.values)), facet="blocks", reference=reference,
        domain=None, percent=True, details={"n": "blocks"},
    )  # fmt: skip
    return Figure(name, title, text, chart, table.drop(columns=["depth", "blocks"]))


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    """Of each encoder and end the drop with the most blocks."""
    found = []
    for name, end in itertools.product(result.encoder.values, result.end.values):
        known = result.sel(encoder=name, end=end).dropna("n", subset=["accuracy_drop"])
        if known.sizes["n"] > 1:  # else there is nothing to tell yet
            last = known.isel(n=-1)
            n, drop, low, high, left = (
                last[key].item()
                for key in ("n", "accuracy_drop", "accuracy_drop_low", "accuracy_drop_high", "accuracy")
            )
            blocks = "block" if n == 1 else f"{n} blocks"
            detail = f"drop in accuracy with the {end} {blocks} re-initialised, 95 % {low:.1%} – {high:.1%}"
            found.append((str(name), f"{drop:+.1%}", f"{detail}; {left:.1%} is left"))
    return found


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    """Of each end the drop with the most blocks, and over the number of blocks."""
    names = [f"accuracy_drop{end}" for end in ENDS]
    found = []
    for end in map(str, result.end.values):
        own = result[names].sel(end=end)
        about = f"accuracy lost with the most {end} blocks re-initialised"
        made = key_number(own, "accuracy_drop", at="last", over="n", title=f"{end} blocks", about=about, style=".1%")
        found += [replace(number, over="number of blocks", place=FIRST) for number in made]
    return found
