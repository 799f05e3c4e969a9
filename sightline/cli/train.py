"""`sightline pretrain`, `finetune`, `reinit`, `detect` and `segment`: trainings in folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sightline.cli.application import app
from sightline.cli.arguments import load_encoders
from sightline.cli.ending import finish, first_process, stoppable
from sightline.cli.options import (
    Devices,
    Nodes,
    Out,
    Resume,
    Settings,
    StartOver,
    TrainingDevice,
    TrainingFolder,
    Verbose,
    Workers,
    new_folder,
)
from sightline.cli.saying import say
from sightline.core.errors import InputError
from sightline.training.launch import Launch

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
    from sightline.encoders.encoder import Encoder


@app.command(rich_help_panel="Train")
def pretrain(
    objective: Annotated[
        str | None,
        typer.Argument(
            help="simclr, moco_v3, dino, msn, mae, simmim, beit, hybrid or supervised; see `list objectives`."
        ),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Images, `folder:PATH`, …; without it, those of the recipe.")
    ] = None,
    out: TrainingFolder = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A recipe of `list recipes` or a TOML file; by default the objective's small one."),
    ] = None,
    set_: Settings = None,
    resume: Resume = False,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
) -> None:
    """Pre-train an encoder with a published objective.

    Examples:

    - `sightline pretrain mae -o runs/mae`: trains the small recipe on the embedded images in minutes

    - `sightline pretrain dino --recipe dino_vit_b16 --images folder:/data/imagenet -o runs/dino --devices 8`

    - `sightline pretrain simclr --set backbone=resnet18 --set stem=small --set lr=1e-3 -o runs/simclr`

    Ctrl-C and SIGTERM save and stop; `--resume` continues bit-exactly. The encoder is `run:FOLDER`, even while
    it trains. Numbers are in `metrics.csv` and, for TensorBoard, in `tensorboard/`.
    """
    from sightline.training.pretrain import pretrain as train

    launch = Launch(resume, overwrite, device, devices, nodes, workers)
    _train(train, objective, images, out, recipe, set_, launch)


@app.command(rich_help_panel="Train")
def finetune(
    encoder: Annotated[
        str | None, typer.Argument(help="Encoder to start from, `source:id[@weights][?option=value]`.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Labelled images, `folder:PATH`, …; without it, those of the recipe.")
    ] = None,
    out: TrainingFolder = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe of `list recipes` or a TOML file; by default `finetune`, a small one.")
    ] = None,
    set_: Settings = None,
    resume: Resume = False,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
) -> None:
    """Fine-tune an encoder end to end on labelled images.

    Examples:

    - `sightline finetune zoo:moco_v3 -o runs/tuned`: on the embedded images, in minutes

    - `sightline finetune mae:mae_pretrain_vit_base.pth --recipe finetune_vit_b16 --images folder:/data/imagenet
      -o runs/mae --devices 8`

    - `sightline finetune run:runs/mae --set pool=gap --set keep=10 -o runs/mae-tuned`

    Ctrl-C and SIGTERM save and stop; `--resume` continues bit-exactly. The classifier is `run:FOLDER`; with
    `keep`, `run:FOLDER?step=*` is that at every kept step. Accuracy on val is in `metrics.csv`, that on test in
    `run.json`.
    """
    from sightline.transfer.finetune import finetune as tune

    launch = Launch(resume, overwrite, device, devices, nodes, workers)
    _train(tune, encoder, images, out, recipe, set_, launch)


@app.command(rich_help_panel="Train")
def reinit(
    encoders: Annotated[list[str], typer.Argument(help="Encoders, as for `compare`.")],
    images: Annotated[
        str | None, typer.Option(help="Labelled images, `folder:PATH`, …; without it, those of the recipe.")
    ] = None,
    out: Out = None,
    counts: Annotated[
        str | None, typer.Option(help="Numbers of blocks, `1,2,4`; by default powers of two below the depth.")
    ] = None,
    ends: Annotated[str, typer.Option(help="`first,last`, or one of the two.")] = "first,last",
    recipe: Annotated[
        str | None, typer.Option(help="A fine-tuning recipe or a TOML file; by default `finetune`, a small one.")
    ] = None,
    set_: Settings = None,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
    verbose: Verbose = False,
) -> None:
    """Re-initialise the first or last n blocks, fine-tune, and see how far accuracy drops.

    Example: `sightline reinit zoo:moco_v3 zoo:supervised --images 'shapes?size=48' --counts 1,2,4 -o runs/reinit`

    Every point is a separate fine-tuning, with the settings of `sightline finetune`. Run the same command again to
    continue where it stopped; with more `--counts`, only the new ones are trained.
    """
    from sightline.studies.reinit import reinit as study

    try:
        numbers = None if counts is None else [int(word) for word in counts.split(",")]
    except ValueError as error:
        raise InputError(f"--counts {counts!r}: numbers of blocks are expected, such as --counts 1,2,4") from error
    run_study(
        study,
        encoders,
        images,
        out,
        set_,
        verbose,
        counts=numbers,
        ends=ends.split(","),
        recipe=recipe,
        overwrite=overwrite,
        device=device,
        devices=devices,
        nodes=nodes,
        workers=workers,
    )


@app.command(rich_help_panel="Train")
def detect(
    encoders: Annotated[list[str], typer.Argument(help="Encoders, as for `compare`.")],
    images: Annotated[
        str | None,
        typer.Option(
            help="Images with boxes and masks, `shapes:scenes`, `coco:FOLDER`; without it, those of the recipe."
        ),
    ] = None,
    out: Out = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe of `list recipes` or a TOML file; by default `detect`, a small one.")
    ] = None,
    set_: Settings = None,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
    verbose: Verbose = False,
) -> None:
    """Train a detector, Mask R-CNN, on each encoder, and compare how well it finds and outlines objects.

    Examples:

    - `sightline detect zoo:mae zoo:moco_v3 -o runs/detect`: on embedded scenes, frozen, minutes each

    - `sightline detect zoo:mae --set frozen=false -o runs/tuned`: also trains the encoder

    - `sightline detect zoo:mae --set blocks=last-3,last-2,last-1,last -o runs/blocks`: shows the detector four blocks

    - `sightline detect mae:mae_pretrain_vit_base.pth --recipe detect_vitdet --images coco:/data/coco -o
      runs/coco --devices 8`

    Ctrl-C and SIGTERM save and stop; run the same command again to continue where it stopped.
    """
    from sightline.studies.detection import detect as study

    run_study(
        study,
        encoders,
        images,
        out,
        set_,
        verbose,
        recipe=recipe,
        overwrite=overwrite,
        device=device,
        devices=devices,
        nodes=nodes,
        workers=workers,
    )


@app.command(rich_help_panel="Train")
def segment(
    encoders: Annotated[list[str], typer.Argument(help="Encoders, as for `compare`.")],
    images: Annotated[
        str | None,
        typer.Option(
            help="Images with segmentation maps, `shapes:scenes`, `masks:FOLDER`; without it, those of the recipe."
        ),
    ] = None,
    out: Out = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe of `list recipes` or a TOML file; by default `segment`, a small one.")
    ] = None,
    set_: Settings = None,
    device: TrainingDevice = "auto",
    devices: Devices = None,
    nodes: Nodes = 1,
    workers: Workers = None,
    overwrite: StartOver = False,
    verbose: Verbose = False,
) -> None:
    """Train a linear layer, or UperNet, on each encoder, and compare how well it predicts the class of every pixel.

    Examples:

    - `sightline segment zoo:mae zoo:moco_v3 -o runs/segment`: on embedded scenes, frozen, with a linear layer

    - `sightline segment zoo:mae --set head=upernet --set frozen=false -o runs/tuned`: trains UperNet and the
      encoder

    - `sightline segment mae:mae_pretrain_vit_base.pth --recipe segment_upernet_ade20k --images
      masks:/data/ADEChallengeData2016 -o runs/ade --devices 8`

    Ctrl-C and SIGTERM save and stop; run the same command again to continue where it stopped. To find the best block
    without any training, use `sightline compare ENCODERS --images IMAGES --only segmentation`.
    """
    from sightline.studies.segmenters import segment as study

    run_study(
        study,
        encoders,
        images,
        out,
        set_,
        verbose,
        recipe=recipe,
        overwrite=overwrite,
        device=device,
        devices=devices,
        nodes=nodes,
        workers=workers,
    )


def training_folder_name() -> Path:
    """A folder by the time of day, which the processes of one training must agree on."""
    if max(int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "SLURM_NTASKS")) > 1:
        raise InputError("Several processes need to agree on a run folder; give one with -o")
    # Processes that this one starts inherit the name.
    return Path(os.environ.setdefault("SIGHTLINE_RUN", str(new_folder())))


def run_study(
    study: Callable[..., Run],
    encoders: list[str],
    images: str | None,
    out: Path | None,
    words: list[str] | None,
    verbose: bool,
    **more: Any,
) -> None:
    """Trainings on encoders whose results are a run: make them, and say what came of it."""
    from sightline.core.settings import parse_settings

    settings = parse_settings(words or [])
    with stoppable("run the same command again to continue"):
        run = study(load_encoders(encoders), images, out or training_folder_name(), settings=settings, **more)
    finish(run, verbose)


def _train(
    train: Callable[..., Encoder],
    what: str | None,
    images: str | None,
    out: Path | None,
    recipe: str | None,
    words: list[str] | None,
    launch: Launch,
) -> None:
    """Pre-train or fine-tune; how it ended is said by the first process."""
    from sightline.core.settings import parse_settings

    out = out or training_folder_name()
    with stoppable():
        encoder = train(what, images, out, recipe=recipe, settings=parse_settings(words or []), **asdict(launch))
    if first_process():
        for note in encoder.notes:
            say(note)
        say(f"Encoder: run:{out}")
