"""Reference encoders that come with Sightline: small ViTs trained on `shapes`; `zoo:simclr`, `zoo:mae_tuned`."""

from __future__ import annotations

from pathlib import Path

from sightline.core.errors import InputError, nearest
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder
from sightline.encoders.saved import load_folder

EXAMPLE = "zoo:simclr"
FOLDER = Path(__file__).parent.parent.parent / "zoo"
TUNED = "_tuned"  # how the names of fine-tuned encoders end


def names() -> list[str]:
    """Those that were pre-trained, and those that were fine-tuned from them."""
    return sorted(path.parent.name for path in FOLDER.glob("*/encoder.json"))


def pretrained() -> list[str]:
    """At least one for each objective."""
    return [name for name in names() if not name.endswith(TUNED)]


def load(reference: Reference) -> Encoder:
    """Weights are stored as bfloat16 and used as float32."""
    if reference.id not in names():
        raise InputError(f"The zoo has no encoder {reference.id!r}{nearest(reference.id, names())}")
    folder = FOLDER / reference.id
    if reference.options.get("head") == "true" and not (folder / "head.json").is_file():
        raise InputError(
            f"{reference}: this encoder is stored without a projection head; train one whose objective has a head, "
            "such as `sightline pretrain simclr -o RUN`, and write run:RUN?head=true"
        )
    return load_folder(folder, reference.id, reference, folder / "recipe.toml")
