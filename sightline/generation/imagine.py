"""Pictures that a trained model draws for the user's own images, between two of them, and what they resemble."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.folders import latest
from sightline.core.keyed_random import id_keys
from sightline.core.references import parse_reference, take_apart
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.generation.conditions import Feature, feature_of, represent
from sightline.generation.denoiser import load_model
from sightline.generation.samples import as_bytes, draw, interpolated, nearest_images
from sightline.generation.training import make_recipe
from sightline.images.decoding import decode
from sightline.images.loading import load_images
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.training.recipe import read_recipe

BETWEEN = 8  # steps of an interpolation, both ends included


@dataclass(frozen=True, eq=False)
class Imagined:
    """What one encoder's representations look like."""

    encoder: str
    columns: tuple[str, ...]
    pictures: npt.NDArray[np.uint8]  # (row, column, y, x, rgb)
    nearest: tuple[
        tuple[str, float], ...
    ] = ()  # of each row: the nearest training image of its first sample, and how far


def imagine(
    run: str | Path,
    images: Sequence[str | Path],
    samples: int = 8,
    *,
    encoders: Sequence[str] = (),
    between: bool = False,
    nearest_training: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> list[Imagined]:
    """Draw pictures from the representations of image files, with the model that `rcdm` has left in a run folder.

    A row per image: the image, then `samples` pictures; with `between`, a row per pair of images that follow one
    another: the first, pictures on the line between their representations, the second. `nearest_training` adds the
    training image that is nearest to the first sample: a model that draws its training images has memorised them.
    """
    run = Path(run)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = _checkpoint(run)
    model = load_model(checkpoint, device)
    recipe = make_recipe(read_recipe(run / "training" / "recipe.toml"))
    if samples < 1:
        raise InputError(f"There are {samples} samples to draw, but at least 1 is needed")
    if len(images) < 1 + between:
        raise InputError("Give two images or more to see what lies between them" if between else "Give an image")
    arrays = [_read(Path(path)) for path in images]
    known = [str(about["name"]) for about in model.encoders]
    for name in encoders:
        if name not in known:
            raise InputError(f"{str(run)!r} was not trained on an encoder {name!r}{nearest(name, known)}")
    trained = _training_pictures(recipe.training.images, recipe.training.limit, recipe.training.seed, model.size)
    found = []
    for number, about in enumerate(model.encoders):
        if encoders and about["name"] not in encoders:
            continue
        encoder, feature = _encoder(about, run, device)
        told = represent(encoder, feature, _pixels(arrays, encoder.preprocess)).cpu()
        keys = id_keys(np.array([str(path) for path in images]))
        small = _pixels(arrays, Preprocess((model.size, model.size), model.size))
        steps = recipe.config.sampling_steps
        if between:
            rows = [
                draw(
                    model,
                    number,
                    interpolated(told[i], told[i + 1], BETWEEN),
                    keys[i].repeat(BETWEEN),
                    1,
                    steps=steps,
                    seed=seed,
                )[:, 0]
                for i in range(len(told) - 1)
            ]
            drawn = torch.stack(rows)
            columns = ("image", *(f"{k / (BETWEEN - 1):.0%}" for k in range(BETWEEN)), "image")
            pictures = np.concatenate([_bytes(small[:-1, None]), as_bytes(drawn), _bytes(small[1:, None])], 1)
        else:
            drawn = draw(model, number, told, keys, samples, steps=steps, seed=seed)
            columns = ("image", *(str(k + 1) for k in range(samples)))
            pictures = np.concatenate([_bytes(small[:, None]), as_bytes(drawn)], 1)
        closest: tuple[tuple[str, float], ...] = ()
        if nearest_training:
            ids, real = trained()
            where, far = nearest_images(drawn[:, 0], 2 * real - 1)
            closest = tuple((str(ids[row]), float(distance)) for row, distance in zip(where, far, strict=True))
            columns = (*columns, "nearest training image of the first sample")
            pictures = np.concatenate([pictures, as_bytes(2 * real[torch.from_numpy(where)] - 1)[:, None]], 1)
        found.append(Imagined(str(about["name"]), columns, pictures, closest))
    return found


def _checkpoint(run: Path) -> Path:
    checkpoint = latest(run / "training") if (run / "training").is_dir() else None
    if checkpoint is None:
        raise InputError(f"{str(run)!r} holds no diffusion model; give the folder that `sightline rcdm` wrote")
    return checkpoint


def _encoder(about: Any, run: Path, device: str) -> tuple[Encoder, Feature]:
    """The encoder of a model, which must be the one that it was trained on."""
    encoder = load_encoder(_found(str(about["reference"]), run))
    if encoder.weights != about["weights"]:
        raise InputError(
            f"The weights of {encoder.reference} are not those that the diffusion model was trained on; restore them, "
            "or train it again"
        )
    encoder.module.to(device)
    return encoder, feature_of(encoder, str(about["feature"]))


def _found(reference: str, run: Path) -> str:
    """A study knows what it has trained by the name of a folder, which lies beside those of its other steps."""
    source, where, _ = take_apart(reference) or ("", "", {})
    if source != "run" or Path(where).expanduser().exists() or not (run.parent / where).is_dir():
        return reference
    return str(replace(parse_reference(reference), id=str(run.parent / where)))


def _read(path: Path) -> npt.NDArray[np.uint8]:
    if not path.is_file():
        raise InputError(f"There is no image {str(path)!r}")
    item = decode(path)
    if item.image is None:
        raise InputError(f"{str(path)!r} cannot be read as an image: {item.error}")
    return item.image


def _pixels(arrays: Sequence[npt.NDArray[np.uint8]], preprocess: Preprocess) -> Tensor:
    return torch.from_numpy(np.stack([preprocess.crop(array) for array in arrays]))


def _bytes(pixels: Tensor) -> npt.NDArray[np.uint8]:
    values: npt.NDArray[np.uint8] = pixels.movedim(-3, -1).numpy()
    return values


def _training_pictures(reference: str, limit: int, seed: int, size: int) -> Any:
    """A function that reads the training images when they are first wanted: ids, pictures in [0, 1]."""
    kept: list[tuple[npt.NDArray[Any], Tensor]] = []

    def read() -> tuple[npt.NDArray[Any], Tensor]:
        if not kept:
            data = load_images(reference)
            data = data.sample(limit, seed) if limit else data
            small = Preprocess((size, size), size)
            parts = [(part.ids, part.pixels[small]) for part in batches(data, [small], splits=["train"], batch=256)]
            ids = np.array([name for names, _ in parts for name in names])
            kept.append((ids, torch.cat([pixels for _, pixels in parts]).float() / 255))
        return kept[0]

    return read
