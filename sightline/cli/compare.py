"""`sightline compare` and `demo`: passes that end in a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sightline.api import LIMIT, PRECISION, SEED, ShowProgress, Workers
from sightline.cli.arguments import chosen_analyses, load_encoders
from sightline.cli.command import command
from sightline.cli.ending import finish

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
else:
    Run = Any  # commands read signatures

BATCH = "Images per batch, at least 4; also the minibatch of CKA."
DEVICE = "cpu, cuda, cuda:1, or auto."


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
    further: Annotated[
        Mapping[str, str] | None, "Images that an analysis asks for, `conflict=folder:PATH`; may be repeated."
    ] = None,
    sites: Annotated[
        Sequence[str] | None, "Patterns of sites, `block.*,block.*.qkv`; `*` does not match a dot."
    ] = None,
    limit: Annotated[int, LIMIT] = 1024,
    batch: Annotated[int, BATCH] = 32,
    seed: Annotated[int, SEED] = 0,
    precision: Annotated[str, PRECISION] = "float32",
    strict: Annotated[bool, "Stop at the first image that cannot be read."] = False,
    overwrite: Annotated[bool, "Replace another run in the same folder."] = False,
    device: Annotated[str, DEVICE] = "auto",
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
    batch: Annotated[int, BATCH] = 32,
    device: Annotated[str, DEVICE] = "auto",
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


def _new_folder() -> Path:
    """Where results go that were given no folder; commands that start in the same second have folders of their own."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}"
