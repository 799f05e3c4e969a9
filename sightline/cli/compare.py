"""`sightline compare`, `dynamics`, `minibatch` and `demo`: passes that end in a report."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sightline.cli.application import app
from sightline.cli.arguments import chosen_analyses, further_images, load_encoders
from sightline.cli.ending import finish, stoppable
from sightline.cli.options import EMBEDDED, Batch, Device, Limit, Out, Precision, Seed, Verbose, Workers, new_folder
from sightline.core.references import Reference

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder


@app.command(rich_help_panel="Measure")
def compare(
    encoders: Annotated[
        list[str],
        typer.Argument(help="Encoders, `source:id[@weights][?option=value]`; `NAME=source:id` gives one a name."),
    ],
    images: Annotated[
        str | None, typer.Option(help=f"Images, `folder:PATH`, `parquet:PATH`, …; without it, {EMBEDDED}.")
    ] = None,
    out: Out = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Analyses, separated by commas: `cka,knn`, or `all`; by default, those that need one forward pass and "
            "little after it."
        ),
    ] = None,
    also: Annotated[
        str | None, typer.Option(help="Analyses in addition to the default ones, such as `noise,shape_bias`.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="`analysis.key=value`, such as `knn.k=10`; may be repeated.")
    ] = None,
    conflict: Annotated[
        str | None,
        typer.Option(help="Short for `--further conflict=…`: cue-conflict images; the embedded images have their own."),
    ] = None,
    further: Annotated[
        list[str] | None,
        typer.Option(help="Images that an analysis asks for, `NAME=IMAGES`, such as `conflict=…`; may be repeated."),
    ] = None,
    sites: Annotated[
        list[str] | None, typer.Option(help="Patterns of sites, `'block.*' 'block.*.qkv'`; `*` does not match a dot.")
    ] = None,
    limit: Limit = 1024,
    batch: Batch = 32,
    device: Device = "auto",
    precision: Precision = "float32",
    seed: Seed = 0,
    workers: Workers = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another run in the same folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Compare encoders in one pass over the images and write a report.

    Example: `sightline compare dino=timm:vit_small_patch16_224.dino mae=timm:vit_base_patch16_224.mae
    --images folder:/data/val --only cka,knn --sites 'block.*' 'block.*.qkv' -o runs/dino-vs-mae`

    Any number of encoders can be compared, even one with itself. An interrupted run continues when the same
    command is run again. `torchrun --nproc-per-node N -m sightline compare …` shares the images between processes.
    """
    from sightline.images.loading import load_images
    from sightline.measure.analyze import analyze

    analyses, besides = chosen_analyses(only, also, set_ or [])
    sets = further_images([*(further or []), *([] if conflict is None else [f"conflict={conflict}"])])
    members = load_encoders(encoders)
    load = functools.partial(load_images, limit=limit or None, seed=seed, strict=strict)
    with stoppable():
        run = analyze(
            members,
            load(images or _shapes_for(members)),
            analyses,
            also=besides,
            further={name: load(others) for name, others in sets.items()},
            out=out or new_folder(),
            sites=sites,
            batch=batch,
            device=device,
            precision=precision,
            seed=seed,
            workers=workers,
            overwrite=overwrite,
        )
    finish(run, verbose)


@app.command(rich_help_panel="Measure")
def dynamics(
    runs: Annotated[list[str], typer.Argument(help="Folders of fine-tunings with `keep=10`, or `NAME=FOLDER`.")],
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="An encoder to compare with; may be repeated.")
    ] = None,
    images: Annotated[str | None, typer.Option(help=f"Images for CKA; without it, {EMBEDDED}.")] = None,
    out: Out = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="`dynamics.key=value`.")] = None,
    limit: Limit = 1024,
    batch: Batch = 32,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another run in the same folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Follow an encoder through its fine-tuning: path efficiency of the weights, CKA with the start and with others.

    Examples:

    - `sightline finetune zoo:moco_v3 --set keep=10 -o runs/tuned`: run this first; it keeps ten points

    - `sightline dynamics runs/tuned --with zoo:supervised -o runs/dynamics`

    Short for `sightline compare 'run:runs/tuned?step=*' zoo:supervised --only dynamics`.
    """
    steps = [_every_step(run) for run in runs]
    compare(
        [*steps, *(with_ or [])],
        images,
        out,
        "dynamics",
        set_=set_,
        limit=limit,
        batch=batch,
        device=device,
        overwrite=overwrite,
        verbose=verbose,
    )


@app.command(rich_help_panel="Measure")
def minibatch(
    encoders: Annotated[list[str], typer.Argument(help="Encoders, as for `compare`.")],
    images: Annotated[str | None, typer.Option(help=f"Images; without it, {EMBEDDED}.")] = None,
    out: Out = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="`minibatch.key=value`, such as `minibatch.layers=20`.")
    ] = None,
    sites: Annotated[list[str] | None, typer.Option(help="Patterns of the sites that layers are drawn from.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many images of each split; 0: all.")] = 0,
    batch: Annotated[int, typer.Option(help="Images per forward pass, and the largest minibatch.")] = 1024,
    device: Device = "auto",
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another run in the same folder.")] = False,
    verbose: Verbose = False,
) -> None:
    """Does CKA depend on batch size and number of images? Ten layers, batches of 32 … 1024, up to all images, one pass.

    Example: `sightline minibatch timm:vit_base_patch16_224.mae --images folder:/data/val -o runs/minibatch`

    Short for `sightline compare ENCODERS --only minibatch --batch 1024 --limit 0`. All images of a batch go through the
    encoder at once: if there is not enough memory for 1024, lower `--batch`, which leaves out the largest minibatches.
    """
    compare(
        encoders,
        images,
        out,
        "minibatch",
        set_=set_,
        sites=sites,
        limit=limit,
        batch=batch,
        device=device,
        seed=seed,
        overwrite=overwrite,
        verbose=verbose,
    )


@app.command(rich_help_panel="Measure")
def demo(
    out: Out = Path("runs/demo"),
    only: Annotated[str, typer.Option(help="Analyses, separated by commas.")] = "all",
    limit: Limit = 256,
    batch: Batch = 32,
    device: Device = "auto",
    verbose: Verbose = False,
) -> None:
    """Compare the reference encoders on the embedded images that they were trained on, with all analyses.

    Examples:

    - `sightline demo -o runs/demo`

    - `sightline demo --only cka,knn --limit 64`: takes less time
    """

    from sightline.encoders.sources import zoo

    encoders = [f"zoo:{name}" for name in zoo.shipped()]
    compare(encoders, out=out, only=only, limit=limit, batch=batch, device=device, verbose=verbose)


def _every_step(run: str) -> str:
    """The kept steps of FOLDER, or of NAME=FOLDER; a folder may have an = in its own name.

    >>> _every_step("mine=runs/lr=0.1/tuned")
    'mine=run:runs/lr=0.1/tuned?step=*'
    """
    name, equals, folder = ("", "", run) if "=" not in run or Path(run).expanduser().is_dir() else run.partition("=")
    return f"{name}{equals}{Reference('run', folder, None, {'step': '*'})}"


def _shapes_for(encoders: dict[str, Encoder]) -> str:
    """The embedded images are drawn at the size of the largest encoder, not enlarged to it."""
    return f"shapes?size={max(max(encoder.preprocess.size) for encoder in encoders.values())}"
