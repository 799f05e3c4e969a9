"""The commands. Each parses its words and calls one plain function; nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sightline import plugins
from sightline.errors import InputError
from sightline.words import chosen_analyses, load_encoders, spread_sites

if TYPE_CHECKING:
    from sightline.encoder import Encoder
    from sightline.run import Run

# Threads of PyTorch that wait for each other spin for milliseconds, which on a busy machine takes the time of the one
# they wait for: there a batch is five times faster if they sleep after some microseconds, and elsewhere as fast.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
Shows what vision models learn and how they differ.

**Try it:** `sightline demo` compares small reference encoders on embedded images and writes a report.

**Compare encoders:**
`sightline compare timm:vit_small_patch16_224.dino timm:vit_base_patch16_224.mae --images folder:/data/val -o runs/x`

**Train one:** `sightline pretrain moco_v3 --images folder:/data/train -o runs/moco`, then compare `run:runs/moco`.

**Fine-tune one:** `sightline finetune zoo:moco_v3 --images folder:/data/birds -o runs/birds`

Encoders are written `source:id[@weights][?option=value&…]`; `sightline list encoders` shows the sources.
""",
)

EMBEDDED = "the embedded images `shapes`"

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; run the same command again to resume.")]
Batch = Annotated[int, typer.Option(help="Images per batch, at least 4; also the minibatch of CKA.")]
Limit = Annotated[int, typer.Option(help="At most this many images of each split, balanced over classes; 0: all.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")]
Precision = Annotated[str, typer.Option(help="float32 or bf16 (autocast).")]
Seed = Annotated[int, typer.Option(help="Seed of sampling, order and bootstrap.")]
Workers = Annotated[int | None, typer.Option(help="Processes that decode images; by default what the cores allow.")]
# Of trainings
TrainingFolder = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder, for everything about it.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="`key=value` overrides the recipe; may be given many times.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the training in the folder, exactly where it stopped.")
]
TrainingDevice = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Devices = Annotated[int | None, typer.Option(help="Processes (GPUs) per node; under torchrun that is known already.")]
Nodes = Annotated[int, typer.Option(help="Nodes, as SLURM has started them.")]
Anew = Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder with a training.")]


@app.command()
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
        typer.Option(help="Analyses, separated by commas: `cka,knn`, or `all`; by default those of one forward pass."),
    ] = None,
    also: Annotated[
        str | None, typer.Option(help="Analyses besides the default ones, such as `noise,shape_bias`.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="`analysis.key=value`, such as `knn.k=10`; may be given many times."),
    ] = None,
    conflict: Annotated[
        str | None, typer.Option(help="Cue-conflict images for shape_bias; the embedded images have their own.")
    ] = None,
    sites: Annotated[
        list[str] | None, typer.Option(help="Patterns of sites, `'block.*' 'block.*.qkv'`; `*` stays within a dot.")
    ] = None,
    limit: Limit = 1024,
    batch: Batch = 32,
    device: Device = "auto",
    precision: Precision = "float32",
    seed: Seed = 0,
    workers: Workers = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another run in the same folder.")] = False,
) -> None:
    """Compare encoders in one pass over the images and write a report.

    Example: `sightline compare dino=timm:vit_small_patch16_224.dino mae=timm:vit_base_patch16_224.mae
    --images folder:/data/val --only cka,knn --sites 'block.*' 'block.*.qkv' -o runs/dino-vs-mae`

    Any number of encoders can be compared, also a single one with itself. An interrupted run goes on when the same
    command is given again. Under `torchrun` the processes share the images.
    """
    from sightline.analyze import analyze
    from sightline.images import load_images

    chosen, besides = chosen_analyses(only, also, set_ or [])
    loaded = load_encoders(encoders)
    run = analyze(
        loaded,
        load_images(images or _shapes_for(loaded), limit=limit or None, seed=seed, strict=strict),
        chosen,
        also=besides,
        conflict=None if conflict is None else load_images(conflict, limit=limit or None, seed=seed, strict=strict),
        out=out or _new_folder(),
        sites=sites,
        batch=batch,
        device=device,
        precision=precision,
        seed=seed,
        workers=workers,
        overwrite=overwrite,
    )
    _finish(run)


@app.command()
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
    overwrite: Anew = False,
) -> None:
    """Pre-train an encoder with an objective of the literature.

    Examples: `sightline pretrain mae -o runs/mae` trains the small recipe on the embedded images in minutes;
    `sightline pretrain dino --recipe dino_vit_b16 --images folder:/data/imagenet -o runs/dino --devices 8`;
    `sightline pretrain simclr --set backbone=resnet18 --set stem=small --set lr=1e-3 -o runs/simclr`.

    Ctrl-C and SIGTERM save and stop; `--resume` goes on bit-exactly. The encoder is `run:FOLDER`, also meanwhile.
    Numbers are in `metrics.csv` and, for TensorBoard, in `tensorboard/`.
    """
    from sightline.pretrain import pretrain as train

    _train(train, objective, images, out, recipe, set_, resume, overwrite, device, devices, nodes, workers)


@app.command()
def finetune(
    encoder: Annotated[
        str | None, typer.Argument(help="Encoder to begin with, `source:id[@weights][?option=value]`.")
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
    overwrite: Anew = False,
) -> None:
    """Fine-tune an encoder end to end to the classes of labelled images.

    Examples: `sightline finetune zoo:moco_v3 -o runs/tuned` on the embedded images, in minutes;
    `sightline finetune mae:mae_pretrain_vit_base.pth --recipe finetune_vit_b16 --images folder:/data/imagenet
    -o runs/mae --devices 8`; `sightline finetune run:runs/mae --set pool=gap --set save_epochs=true -o runs/mae-tuned`.

    Ctrl-C and SIGTERM save and stop; `--resume` goes on bit-exactly. The classifier is `run:FOLDER`; with `save_epochs`
    that of each epoch is `run:FOLDER?epoch=3`. Accuracy on val is in `metrics.csv`, that on test in `run.json`.
    """
    from sightline.finetune import finetune as tune

    _train(tune, encoder, images, out, recipe, set_, resume, overwrite, device, devices, nodes, workers)


@app.command()
def dynamics(
    runs: Annotated[list[str], typer.Argument(help="Folders of fine-tunings with `save_epochs=true`; `NAME=FOLDER`.")],
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="An encoder to compare with; may be given many times.")
    ] = None,
    images: Annotated[str | None, typer.Option(help=f"Images for CKA; without it, {EMBEDDED}.")] = None,
    out: Out = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="`dynamics.key=value`.")] = None,
    limit: Limit = 1024,
    batch: Batch = 32,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another run in the same folder.")] = False,
) -> None:
    """Follow an encoder through its fine-tuning: path efficiency of the weights, CKA with the start and with others.

    Example: `sightline finetune zoo:moco_v3 --set save_epochs=true -o runs/tuned`, then
    `sightline dynamics runs/tuned --with zoo:supervised -o runs/dynamics`

    Short for `sightline compare 'run:runs/tuned?epoch=*' zoo:supervised --only dynamics`.
    """
    epochs = ["{}{}run:{}?epoch=*".format(*run.rpartition("=")) for run in runs]
    compare(
        [*epochs, *(with_ or [])], images, out, "dynamics", set_=set_, limit=limit, batch=batch, device=device,
        overwrite=overwrite,
    )  # fmt: skip


@app.command()
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
        str | None, typer.Option(help="A recipe of fine-tuning or a TOML file; by default `finetune`, a small one.")
    ] = None,
    set_: Settings = None,
    device: TrainingDevice = "auto",
    workers: Workers = None,
    overwrite: Anew = False,
) -> None:
    """Re-initialise the first or last n blocks, fine-tune, and see how far accuracy drops.

    Example: `sightline reinit zoo:moco_v3 zoo:supervised --images 'shapes?size=48' --counts 1,2,4 -o runs/reinit`

    Every point is a fine-tuning of its own, with the settings of `sightline finetune`. The same command goes on where
    it was stopped; of more `--counts` only the new ones are trained.
    """
    from sightline.recipe import parse_settings
    from sightline.reinit import reinit as study
    from sightline.training import Stopped

    try:
        numbers = None if counts is None else [int(word) for word in counts.split(",")]
    except ValueError as error:
        raise InputError(f"--counts {counts!r}: numbers of blocks are expected, such as --counts 1,2,4") from error
    try:
        run = study(
            load_encoders(encoders), images, out or _training_folder(), counts=numbers, ends=ends.split(","),
            recipe=recipe, settings=parse_settings(set_ or []), overwrite=overwrite, device=device, workers=workers,
        )  # fmt: skip
    except Stopped as stop:
        if _first_process():
            typer.echo(f"{str(stop).partition(';')[0]}; give the same command again to go on")
        raise SystemExit(128 + stop.signal) from stop
    _finish(run)


@app.command()
def demo(out: Out = Path("runs/demo"), limit: Limit = 256, batch: Batch = 32, device: Device = "auto") -> None:
    """Compare the reference encoders on the embedded images that they were trained on, with all analyses."""
    from sightline.sources import zoo

    compare([f"zoo:{name}" for name in zoo.names()], out=out, only="all", limit=limit, batch=batch, device=device)


@app.command(name="list")
def list_(
    what: Annotated[
        Literal["encoders", "images", "analyses", "sites", "objectives", "recipes"],
        typer.Argument(help="What to list."),
    ],
    which: Annotated[
        str | None, typer.Argument(help="For encoders a pattern such as 'vit_small*'; for sites an encoder reference.")
    ] = None,
) -> None:
    """Show what can be used: encoders, images, analyses, the sites of an encoder, objectives of pre-training, recipes.

    Examples: `sightline list encoders 'vit_small*dino*'`, `sightline list sites timm:resnet18@random`
    """
    from sightline.listing import list_plugins, list_recipes, list_sites, matching_encoders

    if what == "sites":
        typer.echo(list_sites(which))
    elif what == "encoders" and which is not None:
        typer.echo(matching_encoders(which))
    elif what == "recipes":
        typer.echo(list_recipes())
    else:
        typer.echo(list_plugins(what))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint of any kind; nothing in it is run.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what is in a checkpoint: format, architecture, parts, parameters, training arguments, hash.

    Example: `sightline inspect mae_pretrain_vit_base.pth`

    No model is built. A file that cannot be read safely is refused with the reason.
    """
    from sightline.inspection import as_json, describe
    from sightline.inspection import inspect as look

    found = look(file)
    typer.echo(as_json(found) if json else describe(found))


@app.command()
def convert(
    what: Annotated[
        str, typer.Argument(help="A checkpoint file, or an encoder, `source:id[@weights][?option=value]`.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A file that ends in .safetensors, or a folder.")],
    to: Annotated[Literal["timm", "huggingface"], typer.Option(help="Which library shall load it.")] = "timm",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion.")] = False,
) -> None:
    """Write an encoder so that timm or transformers load it by themselves, and print the line that does.

    Examples: `sightline convert mae_pretrain_vit_base.pth -o mae.safetensors`;
    `sightline convert run:runs/dino --to huggingface -o dino`

    It is loaded there, and its outputs are compared, before anything is put in place.
    """
    from sightline.converting import convert as write

    found = write(what, out, to, overwrite=overwrite)
    for note in found.notes:
        typer.echo(note, err=True)
    typer.echo(f"{found.path}: outputs differ by {found.difference:.1e} of their scale at most")
    typer.echo(found.load)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Run folder, as given to -o.")]) -> None:
    """Write `report.html` of a run anew; needs no model and no images."""
    from sightline.report import write_report
    from sightline.run import open_run

    found = open_run(run)
    if not found.names():
        raise InputError(f"{str(run)!r} has no finished analysis to show; finish it with `sightline compare`")
    typer.echo(write_report(found))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder, as given to -o.")],
    format: Annotated[Literal["csv", "parquet", "netcdf"], typer.Option(help="csv, parquet or netcdf.")] = "csv",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the files; RUN/export by default.")
    ] = None,
) -> None:
    """Write the results as tables: one row per number, its coordinates in columns.

    In Python: `pandas.read_csv("runs/x/export/cka.csv")`, or `sightline.open_run("runs/x")["cka"]` as xarray.
    """
    from sightline.export import export_run
    from sightline.run import open_run

    for path in export_run(open_run(run), format, out):
        typer.echo(path)


# ---------------------------------------------------------------------------------------------------------------


def _shapes_for(encoders: dict[str, Encoder]) -> str:
    """The embedded images are drawn at the size of the largest encoder, not enlarged to it."""
    return f"shapes?size={max(max(encoder.preprocess.size) for encoder in encoders.values())}"


def _new_folder() -> Path:
    from datetime import datetime

    return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def _training_folder() -> Path:
    """A folder by the time of day, which the processes of one training must agree on."""
    if max(int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "SLURM_NTASKS")) > 1:
        raise InputError("Several processes need to agree on a run folder; give one with -o")
    # Processes that this one starts inherit the name.
    return Path(os.environ.setdefault("SIGHTLINE_RUN", str(_new_folder())))


def _train(
    train: Callable[..., Encoder],
    what: str | None,
    images: str | None,
    out: Path | None,
    recipe: str | None,
    words: list[str] | None,
    resume: bool,
    overwrite: bool,
    device: str,
    devices: int | None,
    nodes: int,
    workers: int | None,
) -> None:
    """Pre-train or fine-tune; how it ended is said by the first process."""
    from sightline.recipe import parse_settings
    from sightline.training import Stopped

    out = out or _training_folder()
    try:
        encoder = train(
            what,
            images,
            out,
            recipe=recipe,
            settings=parse_settings(words or []),
            resume=resume,
            overwrite=overwrite,
            device=device,
            devices=devices,
            nodes=nodes,
            workers=workers,
        )
    except Stopped as stop:
        if not _first_process():
            raise SystemExit(0) from stop
        typer.echo(stop)
        raise SystemExit(128 + stop.signal) from stop
    if _first_process():
        for note in encoder.notes:
            typer.echo(note)
        typer.echo(f"Encoder: run:{out}")


def _first_process() -> bool:
    """Whether this is the process that speaks; the others have nothing left to do together."""
    import torch

    if not torch.distributed.is_initialized():
        return True
    first = torch.distributed.get_rank() == 0
    torch.distributed.destroy_process_group()
    return first


def _finish(run: Run) -> None:
    """Only the first of several processes writes and speaks."""
    if not _first_process():
        return
    from sightline.report import write_report

    path = write_report(run)
    for name in run:
        module = plugins.author(name)
        typer.secho(module.TITLE, bold=True)
        for label, number, detail in module.headlines(run[name]):
            typer.echo(f"  {label}: {number} ({detail})")
    for name, why in run.request.get("left_out", {}).items():
        for reason in [why] if isinstance(why, str) else [f"{encoder}: {text}" for encoder, text in why.items()]:
            typer.secho(
                f"Left out of {name}: {reason}" if not isinstance(why, str) else f"Left out: {reason}", dim=True
            )
    typer.echo(f"Report: {path}")


def main() -> None:
    """Run the command line: what the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        app(spread_sites(sys.argv[1:]), prog_name="sightline")
    except InputError as error:
        _fail(str(error), 2)
    except SystemExit as stop:
        if stop.code == 130 and not isinstance(stop.__cause__, Exception):  # what Typer makes of Ctrl-C
            typer.secho(
                "Interrupted; give the same command again (a training: with --resume) to go on where it stopped",
                err=True,
            )
        raise
    except OSError as error:
        _fail(f"{error.strerror or error}: {str(error.filename)!r}" if error.filename else str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _fail(
            "Not enough memory; lower --batch (or --set batch=), choose fewer --sites or compare fewer encoders",
            2,
        )


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _fail(message: str, code: int) -> None:
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise SystemExit(code)
