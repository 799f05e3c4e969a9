"""Reference encoders that come with Sightline: small ViTs trained on `shapes`; `zoo:simclr`."""

from __future__ import annotations

from pathlib import Path

from sightline.encoder import Encoder, Reference
from sightline.errors import InputError, nearest
from sightline.sources.run import load_folder

EXAMPLE = "zoo:simclr"
FOLDER = Path(__file__).parent.parent / "zoo"


def names() -> list[str]:
    """Those whose training has led to features that tell the classes of `shapes`."""
    return sorted(path.parent.name for path in FOLDER.glob("*/encoder.json"))


def load(reference: Reference) -> Encoder:
    """Weights are stored as bfloat16 and used as float32."""
    if reference.weights is not None or reference.options:
        raise InputError(f"{reference} comes with its own weights and settings; write zoo:{reference.id}")
    if reference.id not in names():
        raise InputError(f"The zoo has no encoder {reference.id!r}{nearest(reference.id, names())}")
    return load_folder(FOLDER / reference.id, reference.id, reference)
