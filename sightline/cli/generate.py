"""`sightline rcdm` and `imagine`: pictures from representations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sightline.cli.application import app
from sightline.cli.options import Devices, Nodes, Out, Settings, StartOver, TrainingDevice, Verbose, Workers
from sightline.cli.saying import say
from sightline.cli.train import run_study
from sightline.core.errors import InputError
from sightline.core.files import file_name


@app.command(rich_help_panel="Pictures from representations")
def rcdm(
    encoders: Annotated[list[str], typer.Argument(help="Encoders, as for `compare`; they share one diffusion model.")],
    images: Annotated[
        str | None, typer.Option(help="Images, `folder:PATH`, …; without it, those of the recipe.")
    ] = None,
    out: Out = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe of `list recipes` or a TOML file; by default `rcdm`, a small one.")
    ] = None,
    set_: Settings = None,
    samples: Annotated[int, typer.Option(help="Pictures to draw for each source.")] = 8,
    sources: Annotated[int, typer.Option(help="Test images to draw pictures from.")] = 32,
    compared: Annotated[int, typer.Option(help="Test images whose likelihood gaps are measured.")] = 256,
    transformations: Annotated[
        str | None, typer.Option(help="`mirror,grey,shift:0.2`; by default, all of them.")
    ] = None,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
    verbose: Verbose = False,
) -> None:
    """See what representations keep: a diffusion model draws pictures from them, and measures tell what they know.

    Examples:

    - `sightline rcdm zoo:moco_v3 zoo:mae -o runs/rcdm`: takes 70 to 80 minutes on one core

    - `sightline rcdm zoo:mae --set feature=block.6.gap --set epochs=3 -o runs/middle`: takes minutes

    - `sightline rcdm timm:vit_base_patch16_224.mae --recipe rcdm_adm128 --images folder:/data/imagenet -o
      runs/adm`

    The encoders are not changed. Run the same command again to continue where it stopped. The model is a diffusers
    model, and `sightline imagine RUN --images FILE` draws pictures for your own images.
    """
    from sightline.studies.rcdm import rcdm as study
    from sightline.studies.rcdm.measures import TRANSFORMATIONS

    chosen = TRANSFORMATIONS if transformations is None else tuple(filter(None, transformations.split(",")))
    run_study(
        study,
        encoders,
        images,
        out,
        set_,
        verbose,
        recipe=recipe,
        samples=samples,
        sources=sources,
        compared=compared,
        transformations=chosen,
        overwrite=overwrite,
        device=device,
        devices=devices,
        nodes=nodes,
        workers=workers,
    )


@app.command(rich_help_panel="Pictures from representations")
def imagine(
    run: Annotated[Path, typer.Argument(help="Folder of `sightline rcdm`.")],
    images: Annotated[list[Path], typer.Option(help="Image files, one or several.")],
    samples: Annotated[int, typer.Option(help="Pictures to draw for each image.")] = 8,
    encoder: Annotated[
        list[str] | None, typer.Option(help="One of the encoders of the run, by name; may be repeated.")
    ] = None,
    between: Annotated[
        bool, typer.Option("--between", help="Interpolate between the representations of consecutive images.")
    ] = False,
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Add the training image that is nearest to the first sample of each row.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the pictures; by default RUN/imagined.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise that pictures are drawn from.")] = 0,
    device: TrainingDevice = "auto",
) -> None:
    """Draw pictures from the representations of your own images, with the diffusion model of a run.

    Examples:

    - `sightline imagine runs/rcdm --images dog.jpg cat.jpg --samples 8`

    - `sightline imagine runs/rcdm --images dog.jpg cat.jpg --between`

    Each encoder gets a PNG file with a row for each image: the image, then its pictures. The same seed draws the same
    pictures.
    """
    import torch

    from sightline.core.files import write_atomically
    from sightline.core.folders import refuse_links
    from sightline.generation.imagine import imagine as draw
    from sightline.report.pictures import sheet_png

    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    found = draw(
        run, images, samples, encoders=encoder or (), between=between, nearest_training=nearest, seed=seed, device=where
    )
    folder = out or run / "imagined"
    if out is not None and not out.is_dir() and out.exists():
        raise InputError(f"{str(out)!r} is a file; give a folder with -o")
    if out is None:
        refuse_links(run)
    for one in found:
        path = folder / f"{file_name(one.encoder)}.png"
        write_atomically(path, sheet_png(one.pictures))
        say(f"{one.encoder}: {path}")
        for image, (trained, distance) in zip(images, one.nearest, strict=False):
            say(f"  {image}: the nearest training image of its first sample is {trained}, {distance:.3f} a pixel away")
