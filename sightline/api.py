"""The trainings as functions, each of which is also a command: `sl.finetune(…)` and `sightline finetune …`.

What an argument means is said once, beside its type; cli/command.py makes the option of it. Nothing heavy is imported
before a function is called, so that `sightline finetune --help` does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from sightline.core.extras import explaining
from sightline.training.launch import Launch

if TYPE_CHECKING:
    from sightline.core.run_folder import Run
    from sightline.encoders.encoder import Encoder
    from sightline.images.sets import Images
else:  # commands read the signatures, and need no more of these
    Encoder = Images = Run = Any

# What several functions and commands take, by the same name
SEED = "Seed of all random numbers."
LIMIT = "At most this many images of each split, balanced over classes; 0: all."
PRECISION = "float32, or bf16 (autocast)."

Encoders: TypeAlias = Annotated[
    Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    "Encoders, `source:id[@weights][?option=value]`; `NAME=source:id` gives one a name.",
]
Workers: TypeAlias = Annotated[int | None, "Processes that decode images; by default, as many as the cores allow."]
Device: TypeAlias = Annotated[str, "cpu, cuda, cuda:1, or auto."]
ShowProgress: TypeAlias = Annotated[bool, "Show progress."]

# What trainings take
_Recipe: TypeAlias = Annotated[
    str | Path | None, "A recipe, see `list recipes`, or a TOML file; by default a small one."
]
_Images: TypeAlias = Annotated[str | Images | None, "Images, `folder:PATH`, …; by default those of the recipe."]
_Labelled: TypeAlias = Annotated[
    str | Images | None, "Labelled images, `folder:PATH`, …; by default those of the recipe."
]
_Out: TypeAlias = Annotated[str | Path, "Run folder; everything is written here."]
_Settings: TypeAlias = Annotated[
    Mapping[str, Any] | None, "A setting in place of the recipe's, such as `lr=1e-3`; may be repeated."
]
_Limit: TypeAlias = Annotated[int | None, f"{LIMIT} By default as in the recipe."]
_Batch: TypeAlias = Annotated[int | None, "Images per step; by default as in the recipe."]
_Seed: TypeAlias = Annotated[int | None, f"{SEED} By default as in the recipe."]
_Precision: TypeAlias = Annotated[str | None, f"{PRECISION} By default as in the recipe."]
_Resume: TypeAlias = Annotated[bool, "Continue the training in the folder exactly where it stopped."]
_Overwrite: TypeAlias = Annotated[bool, "Start over in a folder that already holds a training."]
_Device: TypeAlias = Annotated[str, "cpu, cuda, or auto."]
_Devices: TypeAlias = Annotated[int | None, "Processes (GPUs) per node; torchrun sets this itself."]
_Nodes: TypeAlias = Annotated[int, "Number of nodes that SLURM started."]


def pretrain(
    objective: Annotated[
        str | None, "simclr, moco_v3, dino, msn, mae, simmim, beit, hybrid or supervised; see `list objectives`."
    ] = None,
    images: _Images = None,
    out: _Out = "runs/pretrain",
    *,
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    resume: _Resume = False,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Encoder:
    """Pre-train an encoder with a published objective.

    Examples:

    - `sightline pretrain mae -o runs/mae`: trains the small recipe on the embedded images in minutes

    - `sightline pretrain dino --recipe dino_vit_b16 --images folder:/data/imagenet -o runs/dino --devices 8`

    - `sightline pretrain simclr --set backbone=resnet18 --set stem=small --set lr=1e-3 -o runs/simclr`

    In Python: `sl.pretrain("moco_v3", "shapes?size=48", "runs/moco", settings={"epochs": 5, "depth": 4})`

    Ctrl-C and SIGTERM save and stop; `--resume` continues bit by bit as if it had not stopped. The encoder is
    `run:FOLDER`, even while it trains. Numbers are in `metrics.csv` and, for TensorBoard, in `tensorboard/`.
    """
    with explaining():
        from sightline.training.pretrain import pretrain as train

    launch = Launch(resume, overwrite, device, devices, nodes, workers, show_progress)
    return train(objective, images, out, recipe, _with(settings, limit, batch, seed, precision), launch)


def finetune(
    encoder: Annotated[str | Encoder | None, "Encoder to start from, `source:id[@weights][?option=value]`."] = None,
    images: _Labelled = None,
    out: _Out = "runs/finetune",
    *,
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    resume: _Resume = False,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Encoder:
    """Fine-tune an encoder end to end on labelled images.

    Examples:

    - `sightline finetune zoo:moco_v3 -o runs/tuned`: on the embedded images, in minutes

    - `sightline finetune mae:mae_pretrain_vit_base.pth --recipe finetune_vit_b16 --images folder:/data/imagenet
      -o runs/mae --devices 8`

    - `sightline finetune run:runs/mae --set pool=gap --set keep=10 -o runs/mae-tuned`

    In Python: `sl.finetune("zoo:moco_v3", "shapes?size=48", "runs/tuned", settings={"epochs": 2, "reinit": "last:2"})`

    Ctrl-C and SIGTERM save and stop; `--resume` continues bit by bit as if it had not stopped. The classifier is
    `run:FOLDER`; with `keep`, `run:FOLDER?step=*` is that at every kept step. Accuracy on val is in `metrics.csv`, that
    on test in `run.json`.
    """
    with explaining():
        from sightline.transfer.finetune import finetune as train

    launch = Launch(resume, overwrite, device, devices, nodes, workers, show_progress)
    return train(encoder, images, out, recipe, _with(settings, limit, batch, seed, precision), launch)


def reinit(
    encoders: Encoders,
    images: _Labelled = None,
    out: _Out = "runs/reinit",
    *,
    counts: Annotated[
        Sequence[int] | None, "Numbers of blocks, `1,2,4`; by default powers of two below the depth."
    ] = None,
    ends: Annotated[Sequence[str], "`first,last`, or one of the two."] = ("first", "last"),
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Run:
    """Re-initialise the first or last n blocks, fine-tune, and see how far accuracy drops.

    Example: `sightline reinit zoo:moco_v3 zoo:supervised --images 'shapes?size=48' --counts 1,2,4 -o runs/reinit`

    In Python: `sl.reinit({"moco": "zoo:moco_v3"}, "shapes?size=48", "runs/reinit", counts=[1, 2, 4])["reinit"]`

    Every point is a separate fine-tuning, with the recipes and settings of `finetune`; n = 0 always belongs to it. Run
    the same command again to continue where it stopped; with more counts, only the new ones are trained.
    """
    with explaining():
        from sightline.studies.reinit import reinit as train

    launch = Launch(False, overwrite, device, devices, nodes, workers, show_progress)
    changed = _with(settings, limit, batch, seed, precision)
    return train(encoders, images, out, recipe, changed, launch, counts=counts, ends=ends)


def detect(
    encoders: Encoders,
    images: Annotated[
        str | Images | None,
        "Images with boxes and masks, `shapes:scenes`, `coco:FOLDER`; by default those of the recipe.",
    ] = None,
    out: _Out = "runs/detect",
    *,
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Run:
    """Train a detector, Mask R-CNN, on each encoder, and compare how well it finds and outlines objects.

    Examples:

    - `sightline detect zoo:mae zoo:moco_v3 -o runs/detect`: on embedded scenes, frozen, minutes each

    - `sightline detect zoo:mae --set frozen=false -o runs/tuned`: also trains the encoder

    - `sightline detect zoo:mae --set blocks=last-3,last-2,last-1,last -o runs/blocks`: shows the detector four blocks

    - `sightline detect mae:mae_pretrain_vit_base.pth --recipe detect_vitdet --images coco:/data/coco -o
      runs/coco --devices 8`

    In Python: `sl.detect(["zoo:mae", "zoo:moco_v3"], out="runs/x", settings={"frozen": False})["detection"]`

    Ctrl-C and SIGTERM save and stop; run the same command again to continue where it stopped.
    """
    with explaining():
        from sightline.studies.detection import detect as train

    launch = Launch(False, overwrite, device, devices, nodes, workers, show_progress)
    return train(encoders, images, out, recipe, _with(settings, limit, batch, seed, precision), launch)


def segment(
    encoders: Encoders,
    images: Annotated[
        str | Images | None,
        "Images with segmentation maps, `shapes:scenes`, `masks:FOLDER`; by default those of the recipe.",
    ] = None,
    out: _Out = "runs/segment",
    *,
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Run:
    """Train a linear layer, or UperNet, on each encoder, and compare how well it predicts the class of every pixel.

    Examples:

    - `sightline segment zoo:mae zoo:moco_v3 -o runs/segment`: on embedded scenes, frozen, with a linear layer

    - `sightline segment zoo:mae --set head=upernet --set frozen=false -o runs/tuned`: trains UperNet and the
      encoder

    - `sightline segment mae:mae_pretrain_vit_base.pth --recipe segment_upernet_ade20k --images
      masks:/data/ADEChallengeData2016 -o runs/ade --devices 8`

    In Python: `sl.segment(["zoo:mae", "zoo:moco_v3"], out="runs/x", settings={"head": "upernet"})["segmenters"]`

    Ctrl-C and SIGTERM save and stop; run the same command again to continue where it stopped. To find the best block
    without any training, use `sightline compare ENCODERS --images IMAGES --only segmentation`.
    """
    with explaining():
        from sightline.studies.segmenters import segment as train

    launch = Launch(False, overwrite, device, devices, nodes, workers, show_progress)
    return train(encoders, images, out, recipe, _with(settings, limit, batch, seed, precision), launch)


def rcdm(
    encoders: Encoders,
    images: _Images = None,
    out: _Out = "runs/rcdm",
    *,
    samples: Annotated[int, "Pictures to draw for each source."] = 8,
    sources: Annotated[int, "Test images to draw pictures from."] = 32,
    compared: Annotated[int, "Test images whose likelihood gaps are measured."] = 256,
    transformations: Annotated[
        Sequence[str] | None, "What to measure, such as `mirror,grey,shift:0.2`; by default, all."
    ] = None,
    recipe: _Recipe = None,
    settings: _Settings = None,
    limit: _Limit = None,
    batch: _Batch = None,
    seed: _Seed = None,
    precision: _Precision = None,
    overwrite: _Overwrite = False,
    device: _Device = "auto",
    devices: _Devices = None,
    nodes: _Nodes = 1,
    workers: Workers = None,
    show_progress: ShowProgress = True,
) -> Run:
    """See what representations keep: a diffusion model draws pictures from them, and measures tell what they know.

    Examples:

    - `sightline rcdm zoo:moco_v3 zoo:mae -o runs/rcdm`: takes 70 to 80 minutes on one core

    - `sightline rcdm zoo:mae --set feature=block.6.gap --set epochs=3 -o runs/middle`: takes minutes

    - `sightline rcdm timm:vit_base_patch16_224.mae --recipe rcdm_adm128 --images folder:/data/imagenet -o
      runs/adm`

    In Python: `sl.rcdm(["zoo:mae", "zoo:moco_v3"], "shapes?size=48", settings={"feature": "norm.cls"})["rcdm"]`

    The encoders, which share the model, are not changed. Run the same command again to continue where it stopped. The
    model is a diffusers model, and `sightline imagine RUN IMAGES` draws pictures for your own images.
    """
    with explaining():
        from sightline.studies.rcdm import rcdm as train

    launch = Launch(False, overwrite, device, devices, nodes, workers, show_progress)
    return train(
        encoders,
        images,
        out,
        recipe,
        _with(settings, limit, batch, seed, precision),
        launch,
        samples=samples,
        sources=sources,
        compared=compared,
        transformations=transformations,
    )


def _with(
    settings: Mapping[str, Any] | None, limit: int | None, batch: int | None, seed: int | None, precision: str | None
) -> dict[str, Any]:
    """Settings that have arguments of their own, among the others of a recipe."""
    named = {"limit": limit, "batch": batch, "seed": seed, "precision": precision}
    return {**(settings or {}), **{key: value for key, value in named.items() if value is not None}}
