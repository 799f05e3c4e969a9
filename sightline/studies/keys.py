"""What a step is, as one hash: equal steps have equal keys wherever they lie, and share one folder.

    key(step) = sha256(command, format of folders, settings that are not the defaults, contents of the images,
                       weights of encoders from outside, keys of the steps that it needs)

Names of files and folders are no part of it, and neither is the order of settings or of encoders.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sightline.core.errors import InputError
from sightline.core.provenance import fingerprint
from sightline.core.references import parse_reference
from sightline.core.version import FORMAT
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.images.sets import Images
from sightline.measure.feature_cache import describe_encoder
from sightline.studies.commands import COMMANDS, command_of
from sightline.studies.steps import Step, in_order, step_of

NAMED = ("timm", "torchvision", "zoo")  # sources whose encoders have names, and no files


class Contents:
    """What encoders and images are, each looked at once."""

    def __init__(self) -> None:
        self._encoders: dict[str, Encoder] = {}
        self._digests: dict[str, str] = {}

    def encoder(self, reference: str) -> Encoder:
        if reference not in self._encoders:
            self._encoders[reference] = load_encoder(reference)
        return self._encoders[reference]

    def images(self, step: Step) -> str:
        """A digest of all images that a step looks at."""
        command = command_of(step)
        where = fingerprint([step.command, step.images, dict(step.options)])
        if where not in self._digests:
            self._digests[where] = _digest(command.images(step), command.splits(step))
        return self._digests[where]


def _digest(images: Images, wanted: set[str]) -> str:
    if "test" not in images.splits:
        wanted = wanted | ({"val"} if "test" in wanted else set())  # which stands in for it
    splits = [split for split in images.common_splits if split in wanted or not images.own_splits]
    return fingerprint({split: images.digest(split) for split in splits or images.common_splits})


def keys_of(steps: Sequence[Step], contents: Contents) -> dict[str, str]:
    """The key of each step by its name; whatever cannot be is found here, before anything starts."""
    keys: dict[str, str] = {}
    by_name = {step.name: step for step in steps}
    for step in in_order(steps):
        keys[step.name] = key_of(step, keys, by_name, contents)
    return keys


def key_of(step: Step, keys: Mapping[str, str], by_name: Mapping[str, Step], contents: Contents) -> str:
    """The key of a step, from those of the steps that it needs."""
    command = command_of(step)
    encoders = [[name, _encoder(step, reference, keys, by_name, contents)] for name, reference in step.encoders.items()]
    further = {
        name: _digest(command.images(dataclasses.replace(step, images=reference)), {"test"})
        for name, reference in step.options.get("further", {}).items()
    }
    return fingerprint(
        {
            "command": step.command,
            "format": FORMAT,
            "settings": command.decisive(step),
            "images": contents.images(step),
            "encoders": sorted(encoders, key=lambda one: str(one[0])),
            **({"further": further} if further else {}),
        }
    )


def _encoder(
    step: Step, reference: str, keys: Mapping[str, str], by_name: Mapping[str, Step], contents: Contents
) -> Any:
    """What is known of an encoder: its weights, or the step that it is going to come from."""
    needed = step_of(reference)
    if needed is None:
        try:
            return _without_place(describe_encoder(contents.encoder(reference)))
        except InputError as error:
            raise InputError(f"The step {step.name!r}: {error}") from error
    if not COMMANDS[by_name[needed.id].command].trains:
        raise InputError(
            f"The step {step.name!r} wants an encoder of the step {needed.id!r}, which is a "
            f"{by_name[needed.id].command} and leaves none; name a pretrain or finetune step"
        )
    return [keys[needed.id], needed.options]


def _without_place(about: dict[str, Any]) -> dict[str, Any]:
    """Without the names of files and folders in its reference: what is in them is known by the weights."""
    reference, places = parse_reference(about["reference"]), dict[str, Any]()
    if reference.source not in NAMED and os.path.lexists(os.path.expanduser(reference.id)):
        places["id"] = ""
    if reference.weights is not None and os.path.isfile(os.path.expanduser(reference.weights)):
        places["weights"] = ""
    return about | {"reference": str(dataclasses.replace(reference, **places))} if places else about
