"""RCDM: what does a representation keep? Draw pictures from it, and measure what they and the denoiser know.

One diffusion model, conditioned on the frozen representations of all encoders (generation/), and three measures, the
strongest first:

1. inversion in closed form, from the representation to small pixels (analyses/inversion.py)
2. likelihood gap of an image and its transformed copy, given the representation (generation/gap.py)
3. samples: whether they face as their source does, and whether they are remembered images (generation/samples.py)

Source: Bordes, Balestriero, Vincent 2022, "High Fidelity Visualization of What Your Self-Supervised Representation
Knows About"; Shekhar et al. 2023, "Objectives Matter", Figs. 3, 17 and 18.

RUN/training/                               the training, see training/folder.py; its checkpoint is a model of diffusers
RUN/results/rcdm.nc, RUN/report.html, …     see core/run_folder.py
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sightline.core.groups import split
from sightline.core.processes import by_first
from sightline.core.progress import showing
from sightline.core.provenance import fingerprint, provenance
from sightline.core.run_folder import Run, plan_run
from sightline.core.version import NUMBERS
from sightline.encoders.encoder import Encoder
from sightline.generation.conditions import Feature, feature_of, represent_split
from sightline.generation.denoiser import load_model
from sightline.generation.noise import diffusers
from sightline.generation.training import NAME, DiffusionRecipe, make_recipe, train_denoiser
from sightline.images.loading import load_images
from sightline.images.sets import Images
from sightline.measure.request import named_encoders
from sightline.studies.rcdm.measures import TRANSFORMATIONS, Extent, Measures
from sightline.studies.rcdm.page import figures as figures
from sightline.studies.rcdm.page import headlines as headlines
from sightline.studies.rcdm.page import key_numbers as key_numbers
from sightline.studies.rcdm.page import summary as summary
from sightline.training.folder import start
from sightline.training.launch import Launch
from sightline.training.recipe import read_recipe

TOPIC = "structure"
TITLE = "Pictures from representations"
QUESTION = "What does a representation keep of an image, and what has it forgotten?"
FORMULA = """\
gap(T) = [e(Tx | h(x)) − e(x | h(x))] + [e(x | h(Tx)) − e(Tx | h(Tx))],  e: error of denoising given a representation"""
HOW_TO_READ = """\
A diffusion model draws pictures from the representation of an image (the source, on the left): what all of them share
is in the representation, what varies is not. The likelihood gap asks the model directly: given the representation of an
image, is the image more likely than its transformed copy? Where the representation does not see the transformation,
this is so for 50 % of the images, and the gap is 0; z is the gap over its standard error. The gap finds differences
long before samples show them, and is the one to trust where the measures disagree. Floors are measured with the
representations of other images. After a short training samples are blurred: then only what they share counts, not what
is missing. Inversion is linear and needs no training; see its own page."""
SOURCE = (
    'Bordes, Balestriero, Vincent 2022, "High Fidelity Visualization of What Your Self-Supervised Representation Knows '
    'About"; Shekhar et al. 2023, "Objectives Matter", Figs. 3, 17, 18; Li et al. 2023, "Your Diffusion Model is '
    'Secretly a Zero-Shot Classifier" (comparing denoising errors)'
)


def rcdm(
    encoders: Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
    *,
    samples: int,
    sources: int,
    compared: int,
    transformations: Sequence[str] | None,
) -> Run:
    """Train one diffusion model on the representations of encoders and measure what they keep, see `sightline.api`."""
    diffusers()
    extent = Extent(samples, sources, compared, TRANSFORMATIONS if transformations is None else tuple(transformations))
    out, overwrite, launch = Path(out), launch.overwrite, replace(launch, resume=True, overwrite=False)
    named = named_encoders(encoders)
    given = {} if images is None else {"images": images if isinstance(images, str) else images.name}
    own = {"encoders": [encoder.reference for encoder in named.values()]}
    wanted = make_recipe(read_recipe(NAME if recipe is None else recipe), settings, given, own)
    members = {name: (encoder, feature_of(encoder, wanted.config.feature)) for name, encoder in named.items()}
    fabric, data = start(wanted, None if images is None else load_images(images), launch)
    request, key = _question(members, data, wanted, extent)
    run = plan_run(out, request, overwrite)
    if run.finished(NAME, key):
        return run
    fabric.barrier()  # all have looked at the folder before one of them writes to it
    by_first(run.begin)
    for encoder, _ in members.values():
        encoder.module.to(fabric.device)
    cache = Path(os.environ.get("SIGHTLINE_CACHE") or out / "cache")
    shown = launch.show_progress and fabric.is_global_zero
    conditions = represent_split(members, data, ("train", "test"), cache, workers=launch.workers, shown=shown)
    folder = out / "training"
    # A training of other encoders, images or settings has been removed; this one is finished or goes on.
    checkpoint = train_denoiser(members, conditions["train"], data, folder, wanted, fabric, launch)
    fabric.barrier()

    def measure() -> None:
        model = load_model(checkpoint, fabric.device)
        measures = Measures(model, members, conditions, data, wanted, extent, launch.workers)
        with showing(shown):
            run.save(NAME, *split(measures.result().assign_attrs(fingerprint=key)))

    by_first(measure)
    fabric.barrier()
    return run


def _question(
    members: Mapping[str, tuple[Encoder, Feature]], data: Images, wanted: DiffusionRecipe, extent: Extent
) -> tuple[dict[str, Any], str]:
    """What the run folder remembers, and the hash of all that the result depends on."""
    about = {
        "encoders": [encoder.describe() | {"feature": str(feature)} for encoder, feature in members.values()],
        "images": data.describe(),
        "settings": {k: v for k, v in wanted.values().items() if k not in ("encoders", "images")},
    }
    config = {key: getattr(extent, key) for key in Extent.__dataclass_fields__}
    key = fingerprint([NUMBERS, about, config])
    asked = {NAME: {"config": config, "splits": ["train", "test"]}}
    return {"kind": NAME, **about, "analyses": asked, **provenance()}, key
