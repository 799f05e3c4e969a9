"""Reference encoders: small ViTs trained on `shapes` that come with Sightline, and others in a checkout.

A name may have a folder before it: `zoo:simclr`, `zoo:cifar10/dino`.
"""

from pathlib import Path

from sightline.core.errors import InputError, nearest
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder
from sightline.encoders.saved import load_folder

EXAMPLE = "zoo:simclr"
PACKAGED = Path(__file__).parents[2] / "zoo"
CHECKOUT = Path(__file__).parents[3] / "weights"  # beside the package in a checkout, and nowhere else


def names() -> list[str]:
    """All that are here."""
    return sorted({*_inside(PACKAGED), *_inside(CHECKOUT)})


def shipped() -> list[str]:
    """Those of the package that were trained on the embedded images."""
    return [name for name in _inside(PACKAGED) if "/" not in name]


def _inside(root: Path) -> list[str]:
    folders = [path.parent for pattern in ("*/encoder.json", "*/*/encoder.json") for path in root.glob(pattern)]
    return sorted(folder.relative_to(root).as_posix() for folder in folders)


def folder_of(name: str) -> Path:
    """Where an encoder lies; names that are not here are refused."""
    if name not in names():
        elsewhere = "" if CHECKOUT.is_dir() else " (a checkout of Sightline has more, in weights/)"
        raise InputError(f"The zoo has no encoder {name!r}{elsewhere}{nearest(name, names())}")
    return (PACKAGED if name in _inside(PACKAGED) else CHECKOUT) / name


def load(reference: Reference) -> Encoder:
    """Weights are stored as bfloat16 and used as float32."""
    folder = folder_of(reference.id)
    if reference.options.get("head") == "true" and not (folder / "head.json").is_file():
        raise InputError(
            f"{reference}: this encoder is stored without a projection head; train one whose objective has a head, "
            "such as `sightline pretrain simclr -o RUN`, and write run:RUN?head=true"
        )
    return load_folder(folder, reference.id, reference)
