"""`sightline pretrain`, `finetune`, `reinit`, `detect`, `segment` and `rcdm`, which are functions of api; `imagine`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sightline import api
from sightline.cli.application import say
from sightline.cli.command import command
from sightline.cli.ending import finish
from sightline.core.errors import InputError
from sightline.core.files import file_name

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder
else:
    Encoder = Any  # commands read signatures


def _say_encoder(encoder: Encoder) -> None:
    for note in encoder.notes:
        say(note)
    say(f"Encoder: {encoder.reference}")


for _train in (api.pretrain, api.finetune):
    command("Train", then=_say_encoder)(_train)
for _train_each in (api.reinit, api.detect, api.segment):
    command("Train", then=finish)(_train_each)
command("Pictures from representations", then=finish)(api.rcdm)


@command("Pictures from representations")
def imagine(
    run: Annotated[Path, "Folder of `sightline rcdm`."],
    images: Annotated[Sequence[Path], "Image files, one or several."],
    *,
    samples: Annotated[int, "Pictures to draw for each image."] = 8,
    encoders: Annotated[Sequence[str], "Encoders of the run, by name; by default, all."] = (),
    between: Annotated[bool, "Interpolate between the representations of consecutive images."] = False,
    nearest_training: Annotated[
        bool, "Add the training image that is nearest to the first sample of each row."
    ] = False,
    out: Annotated[Path | None, "Folder for the pictures; by default RUN/imagined."] = None,
    seed: Annotated[int, "Seed of the noise that pictures are drawn from."] = 0,
    device: api.Device = "auto",
) -> None:
    """Draw pictures from the representations of your own images, with the diffusion model of a run.

    Examples:

    - `sightline imagine runs/rcdm dog.jpg cat.jpg --samples 8`

    - `sightline imagine runs/rcdm dog.jpg cat.jpg --between`

    Each encoder gets a PNG file with a row for each image: the image, then its pictures. The same seed draws the same
    pictures.
    """
    from sightline.core.files import write_atomically
    from sightline.core.folders import refuse_links
    from sightline.generation.imagine import imagine as draw
    from sightline.report.pictures import sheet_png

    drawn = draw(
        run,
        images,
        samples,
        encoders=encoders,
        between=between,
        nearest_training=nearest_training,
        seed=seed,
        device=device,
    )
    folder = out or run / "imagined"
    if out is not None and not out.is_dir() and out.exists():
        raise InputError(f"{str(out)!r} is a file; give a folder with -o")
    if out is None:
        refuse_links(run)
    for one in drawn:
        path = folder / f"{file_name(one.encoder)}.png"
        write_atomically(path, sheet_png(one.pictures))
        say(f"{one.encoder}: {path}")
        for image, (trained, distance) in zip(images, one.nearest, strict=False):
            say(f"  {image}: the nearest training image of its first sample is {trained}, {distance:.3f} a pixel away")
