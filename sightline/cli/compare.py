"""`sightline compare` and `demo`: passes that end in a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from sightline.api import LIMIT, PRECISION, SEED, Device, ShowProgress, Workers
from sightline.cli.command import command, load_encoders
from sightline.cli.ending import finish
from sightline.core.errors import InputError

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
else:
    Run = Any  # commands read signatures

Batch: TypeAlias = Annotated[int, "Images per batch, at least 4; also the minibatch of CKA."]
Further: TypeAlias = Annotated[
    Mapping[str, str] | None, "Images that an analysis asks for, `conflict=folder:PATH`; may be repeated."
]


@command("Measure", then=finish)
def compare(
    encoders: Annotated[
        Sequence[str], "Encoders, `source:id[@weights][?option=value]`; `NAME=source:id` gives one a name."
    ],
    images: Annotated[
        str | None, "Images, `folder:PATH`, `parquet:PATH`, …; by default embedded ones, `shapes`."
    ] = None,
    out: Annotated[Path | None, "Run folder, which the same command continues; by default a new one in runs/."] = None,
    *,
    only: Annotated[
        Sequence[str] | None,
        "Analyses, `cka,knn` or `all`; by default, those that take one forward pass and little more.",
    ] = None,
    also: Annotated[Sequence[str], "Analyses in addition to the default ones, such as `noise,shape_bias`."] = (),
    settings: Annotated[
        Mapping[str, Mapping[str, Any]] | None, "`analysis.key=value`, such as `knn.k=10`; may be repeated."
    ] = None,
    further: Further = None,
    sites: Annotated[
        Sequence[str] | None, "Patterns of sites, `block.*,block.*.qkv`; `*` does not match a dot."
    ] = None,
    limit: Annotated[int, LIMIT] = 1024,
    batch: Batch = 32,
    seed: Annotated[int, SEED] = 0,
    precision: Annotated[str, PRECISION] = "float32",
    strict: Annotated[bool, "Stop at the first image that cannot be read."] = False,
    overwrite: Annotated[bool, "Replace another run in the same folder."] = False,
    device: Device = "auto",
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Run:
    """Compare encoders in one pass over the images and write a report.

    Example: `sightline compare dino=timm:vit_small_patch16_224.dino mae=timm:vit_base_patch16_224.mae
    --images folder:/data/val --only cka,knn --sites 'block.*,block.*.qkv' -o runs/dino-vs-mae`

    Any number of encoders can be compared, even one with itself, or the steps that a training kept (`run:RUN?step=*`).
    An interrupted run continues when the same command is run again. `torchrun --nproc-per-node N -m
    sightline compare …` shares the images between processes.
    """
    from sightline.measure.analyze import analyze

    chosen, besides = chosen_analyses(only, also, settings or {})
    return analyze(
        load_encoders(encoders),
        images,
        chosen,
        also=besides,
        further=further,
        out=out or _new_folder(),
        sites=sites,
        limit=limit,
        batch=batch,
        seed=seed,
        precision=precision,
        strict=strict,
        overwrite=overwrite,
        device=device,
        workers=workers,
        show_progress=show_progress,
    )


@command("Measure", then=finish)
def demo(
    *,
    out: Annotated[Path, "Run folder, which the same command continues."] = Path("runs/demo"),
    only: Annotated[Sequence[str], "Analyses, `cka,knn`, or `all`."] = ("all",),
    limit: Annotated[int, LIMIT] = 256,
    batch: Batch = 32,
    device: Device = "auto",
    show_progress: ShowProgress = True,
) -> Run:
    """Compare the reference encoders on the embedded images that they were trained on, with all analyses.

    Examples:

    - `sightline demo -o runs/demo`

    - `sightline demo --only cka,knn --limit 64`: takes less time
    """
    from sightline.encoders.sources import zoo

    encoders = [f"zoo:{name}" for name in zoo.shipped()]
    return compare(encoders, out=out, only=only, limit=limit, batch=batch, device=device, show_progress=show_progress)


def chosen_analyses(
    only: Sequence[str] | None, also: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> tuple[Sequence[str] | str | None, dict[str, Any]]:
    """The two choices of `analyze`: the analyses, and others or other settings besides."""
    from sightline.measure.contract import analysis
    from sightline.measure.request import config_of

    if only is not None and also:
        raise InputError("--only names all analyses, --also adds to the default ones; give only one of them")
    names = [] if only is None or list(only) == ["all"] else only
    for name in [*names, *also, *settings]:
        analysis(name)
    for name in settings:
        if names and name not in names:
            raise InputError(f"--set {name}.…: {name} is not an analysis of --only; add it there")
    chosen = {name: config_of(name, settings.get(name, {})) for name in [*also, *settings]}
    return "all" if only and not names else only, chosen


def _new_folder() -> Path:
    """Where results go that were given no folder; commands that start in the same second have folders of their own."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}"
