"""Recipes of what is trained on top of an encoder: fine-tuning, detection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from sightline.core.errors import InputError
from sightline.core.settings import flatten
from sightline.encoders.encoder import Encoder
from sightline.images.sets import Images
from sightline.training.folder import check_unchanged, kept_recipe
from sightline.training.launch import Launch
from sightline.training.optimization import Optimization
from sightline.training.recipe import COMMANDS, Training, make_parts, read_recipe


class NamesEncoder(Protocol):
    """Settings that say which encoder a training begins with."""

    @property
    def encoder(self) -> str:
        """A reference to it."""


Config = TypeVar("Config", bound=NamesEncoder)


@dataclass(frozen=True)
class TransferRecipe(Generic[Config]):
    """Everything that decides a training."""

    optimization: Optimization
    training: Training
    config: Config
    objective: str

    def values(self) -> dict[str, Any]:
        """All settings in one flat table."""
        return flatten(self.objective, self.config, self.training, self.optimization)


def assemble(name: str, config: type[Config], layers: tuple[Mapping[str, Any], ...]) -> TransferRecipe[Config]:
    """Put a recipe together; later layers override earlier ones, and unknown keys are errors."""
    if other := {layer.get("objective", name) for layer in layers} - {name}:
        kind = str(other.pop())
        what, command = COMMANDS.get(kind, (f"pre-training with {kind}", "pretrain"))
        raise InputError(f"This recipe is for {what}, not for {COMMANDS[name][0]}; use it with `sightline {command}`")
    optimization, training, own = make_parts(name, (Optimization, Training, config), layers)
    return TransferRecipe(optimization, training, own, name)


def overrides(
    settings: Mapping[str, Any] | None, images: str | Images | None, encoder: str | Encoder | None
) -> list[dict[str, Any]]:
    """What a call says beside its recipe, later layers before earlier ones.

    >>> overrides({"lr": 1e-3}, "shapes", None)
    [{'lr': 0.001}, {'images': 'shapes'}]
    """
    layers = [dict(settings or {})]
    if images is not None:
        layers.append({"images": images if isinstance(images, str) else images.name})
    if encoder is not None:
        layers.append({"encoder": encoder if isinstance(encoder, str) else encoder.reference})
    return layers


def resolve(
    make: Callable[..., TransferRecipe[Config]],
    name: str,
    out: Path,
    recipe: str | Path | None,
    layers: list[dict[str, Any]],
    launch: Launch,
) -> TransferRecipe[Config]:
    """The recipe that is asked for; of a folder that holds a training already only the same one can go on."""
    kept = kept_recipe(out, launch)
    if kept is None:
        wanted = make(read_recipe(name if recipe is None else recipe), *layers)
    else:
        wanted = make(kept)
        given = [] if recipe is None else [read_recipe(recipe)]
        check_unchanged(out, wanted, make(wanted.values(), *given, *layers))
    if not wanted.config.encoder:
        what, command = COMMANDS[name]
        raise InputError(f"Name an encoder for {what}, such as `sightline {command} zoo:moco_v3`")
    return wanted
