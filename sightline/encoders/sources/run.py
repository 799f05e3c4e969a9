"""Encoders that Sightline has trained or written: `run:FOLDER`, of a training the latest checkpoint.

`run:FOLDER?decoder=true` also loads the decoder that MAE has trained, and shows its layers as sites;
`run:FOLDER?head=true` the projection head of a joint-embedding objective;
`run:FOLDER?epoch=3` is a fine-tuning after its third epoch, if it was told to keep them (`save_epochs`);
`run:FOLDER?window=none` lets all patches attend to all where the training restricted them (`attention_window`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sightline.core.errors import InputError
from sightline.core.folders import kept_epochs, latest
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
    epoch = options.pop("epoch", None)
    if epoch is None:
        return load_folder(latest(folder) or folder, folder.name, reference, folder / "recipe.toml")
    kept = _epoch(folder, epoch, reference)
    plain = replace(reference, options=options)
    encoder = load_folder(kept, f"{folder.name}, epoch {int(epoch)}", plain, folder / "recipe.toml")
    return replace(encoder, reference=str(reference))


def every_epoch(name: str | None, reference: Reference) -> list[tuple[str | None, Reference]]:
    """`run:FOLDER?epoch=*` stands for all epochs that are kept there, with their names; another for itself."""
    if reference.source != "run" or reference.weights is not None or reference.options.get("epoch") != "*":
        return [(name, reference)]
    return [
        (
            None if name is None else f"{name}, epoch {epoch}",
            replace(reference, options=reference.options | {"epoch": str(epoch)}),
        )
        for epoch in kept_epochs(Path(reference.id).expanduser())
    ]


def _epoch(folder: Path, epoch: str, reference: Reference) -> Path:
    kept = kept_epochs(folder)
    if not epoch.isdecimal() or int(epoch) not in kept:
        raise InputError(f"{reference}: there is no epoch {epoch}; those kept are {', '.join(map(str, kept))}")
    return kept[int(epoch)]
