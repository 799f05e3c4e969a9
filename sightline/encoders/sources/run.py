"""Encoders that Sightline has trained or written: `run:FOLDER`, of a training the latest checkpoint.

`run:FOLDER?decoder=true` also loads the decoder that MAE has trained, and shows its layers as sites;
`run:FOLDER?head=true` the projection head of a joint-embedding objective;
`run:FOLDER?step=1200` the encoder after that step, if the training was told to keep it (`keep=log`, `keep=10`);
`run:FOLDER?window=none` lets all patches attend to all where the training restricted them (`attention_window`).
"""

from dataclasses import replace
from pathlib import Path

from sightline.core.errors import InputError
from sightline.core.folders import kept_steps, latest
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder
from sightline.encoders.saved import load_folder

EXAMPLE = "run:runs/mine"


def names() -> list[str]:
    """Any folder that `sightline pretrain` or `save_encoder` wrote."""
    return ["FOLDER"]


def load(reference: Reference) -> Encoder:
    """Build the architecture that the folder names and load its weights."""
    folder = Path(reference.id).expanduser()
    options = dict(reference.options)
    step = options.pop("step", None)
    if step is None:
        return load_folder(latest(folder) or folder, folder.name, reference)
    kept = _kept(folder, step, reference)
    plain = replace(reference, options=options)
    encoder = load_folder(kept, f"{folder.name}, step {int(step)}", plain)
    return replace(encoder, reference=str(reference))


def every_step(name: str | None, reference: Reference) -> list[tuple[str | None, Reference]]:
    """`run:FOLDER?step=*` stands for all steps that are kept there, with their names; another for itself."""
    if reference.source != "run" or reference.weights is not None or reference.options.get("step") != "*":
        return [(name, reference)]
    return [
        (
            None if name is None else f"{name}, step {step}",
            replace(reference, options=reference.options | {"step": str(step)}),
        )
        for step in kept_steps(Path(reference.id).expanduser())
    ]


def _kept(folder: Path, step: str, reference: Reference) -> Path:
    kept = kept_steps(folder)
    if not step.isdecimal() or int(step) not in kept:
        raise InputError(f"{reference}: step {step!r} was not kept; these were: {', '.join(map(str, kept))}")
    return kept[int(step)]
