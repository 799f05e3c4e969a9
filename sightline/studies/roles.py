"""What an encoder is in a study: its family, the method it was trained by, what it was fine-tuned from, its seed.

Findings speak of roles ("joint-embedding", "a fine-tuned reconstruction"), never of names. Roles are known of encoders
that Sightline has trained, of official checkpoints and of timm's tags; of others the user gives them.
"""

import contextlib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError, first_line
from sightline.core.references import Reference, parse_reference
from sightline.encoders.sources import zoo

JE, REC, SUPERVISED, HYBRID = "joint-embedding", "reconstruction", "supervised", "hybrid"
MASKED_JE = "masked joint-embedding"
FAMILIES = (JE, REC, SUPERVISED, HYBRID, MASKED_JE)
NETWORKS = ("vit", "cnn")


@dataclass(frozen=True)
class Role:
    """What an encoder is in a study."""

    name: str  # as in the results
    family: str  # one of FAMILIES; of a fine-tuned encoder that of its start
    method: str = ""  # moco_v3, dino, mae, …
    network: str = "vit"  # or "cnn"
    tuned_from: str | None = None  # what it was fine-tuned from: its name, or a reference if it has none here
    size: float | None = None  # millions of parameters, where the study varies it
    window: int | None = None  # side of the attention window of its pre-training, in patches
    weight: float | None = None  # λ of a hybrid
    seed: int = 0  # encoders that differ in their seed only share all the rest
    multicrop: bool | None = None  # of DINO
    lifted: bool = False  # its patches attend to all others now, whatever the window of its pre-training

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"{self.name!r} cannot be {self.family!r}; a role is one of {', '.join(FAMILIES)}")
        if self.network not in NETWORKS:
            raise InputError(f"The network of {self.name!r} cannot be {self.network!r}; it is vit or cnn")

    @property
    def tuned(self) -> bool:
        return self.tuned_from is not None

    def in_words(self) -> str:
        """What encoders of one family, network and stage have in common.

        >>> Role("a", "joint-embedding").in_words(), Role("b", "supervised", network="cnn", tuned_from="x").in_words()
        ('joint-embedding ViT', 'supervised CNN, fine-tuned')
        """
        return f"{self.family} {'ViT' if self.network == 'vit' else 'CNN'}{', fine-tuned' if self.tuned else ''}"


def of_one_size(size: float | None, other: float | None) -> bool:
    """Whether both sizes are about the same, or both unknown."""
    return size is other is None or (size is not None and other is not None and math.isclose(size, other, rel_tol=0.2))


def refuse_circles(roles: Iterable[Role]) -> None:
    """One sentence where encoders are fine-tuned from each other."""
    starts = {role.name: role.tuned_from for role in roles}
    for name in starts:
        way = [name]
        while (start := starts.get(way[-1])) is not None:
            if start in way:
                circle = " from ".join([*way[way.index(start) :], start])
                raise InputError(f"{circle}: encoders cannot be fine-tuned in a circle; correct their tuned_from")
            way.append(start)


FAMILY_OF = {
    "beit": REC,
    "dino": JE,
    "fcmae": REC,
    "hybrid": HYBRID,
    "mae": REC,
    "moco_v3": JE,
    "msn": MASKED_JE,
    "simclr": JE,
    "simmim": REC,
    "supervised": SUPERVISED,
}
KINDS = {"joint-embedding": JE, "reconstructive": REC, "supervised": SUPERVISED, "hybrid": HYBRID}  # of objectives

# Methods by how names of files, models and tags are written; the first that fits. Those without a method are neither
# of the families, or both: the user has to say.
WRITTEN = (
    (r"dinov[23]|lvd142m|lvd1689m|ibot|clip|openai|laion|eva|siglip|data2vec|i-?jepa|augreg_in21k_ft.*distil", ""),
    (r"fcmae|convnext_?v2", "fcmae"),
    (r"beit", "beit"),
    (r"simmim", "simmim"),
    (r"moco|vit-[sb]-(conv-)?300ep|r-50-\d+ep", "moco_v3"),
    (r"simclr", "simclr"),
    (r"msn|vit[sbl]\d+_\d+ep", "msn"),
    (r"dino", "dino"),
    (r"(^|[ ._/-])mae", "mae"),
    (r"in1k|in21k|in22k|augreg|imagenet1k|google/vit|deit|microsoft/resnet|facebook/convnext|sam_|jft", "supervised"),
)
FINE_TUNED = re.compile(r"fine-?tun|_ft|ft22k|linear|-ft-")
CONVOLUTIONAL = re.compile(r"resnet|resnext|convnext|regnet|efficientnet|mobilenet|densenet|vgg|(^|/)r-50")


def known_role(name: str, reference: str, others: Mapping[str, str] | None = None) -> Role | None:
    """The role of an encoder, as far as its reference tells it: trained by Sightline, an official file, a tag of timm.

    `others` are the references of the study's encoders by their names, among them the starts of fine-tunings.

    >>> known_role("dino", "timm:vit_base_patch16_224.dino")
    Role(name='dino', family='joint-embedding', method='dino', network='vit', tuned_from=None, size=None, \
window=None, weight=None, seed=0, multicrop=True, lifted=False)
    >>> known_role("x", "timm:vit_base_patch16_224@random") is None
    True
    """
    parsed = parse_reference(reference)
    if parsed.source in ("zoo", "run"):
        return _of_training(name, parsed, others or {})
    return _of_file(name, parsed)


def known_roles(references: Mapping[str, str]) -> dict[str, Role | None]:
    """Roles by name, with None for those that the user has to give."""
    roles: dict[str, Role | None] = dict.fromkeys(references)
    for name, reference in references.items():
        with contextlib.suppress(InputError):  # a module of the user's own, or the folder of a training that is gone
            roles[name] = known_role(name, reference, references)
    return roles


# What Sightline has trained


def reference_encoders() -> dict[str, str]:
    """What a study is about unless it is told: an encoder of each role in the zoo, and further seeds of CNNs alone.

    A study trains on each ViT for minutes to hours, so that their further seeds take part only where they are given.
    """
    chosen: dict[str, str] = {}
    taken: set[Role] = set()
    for name in [*zoo.shipped(), *(name for name in zoo.names() if "/" not in name)]:
        role = known_role(name, f"zoo:{name}")
        if role is None or (role.network == "vit" and role.seed) or replace(role, name="") in taken:
            continue
        if role.tuned_from in (None, *chosen.values()):
            chosen[name] = f"zoo:{name}"
            taken.add(replace(role, name=""))
    return chosen


def _of_training(name: str, reference: Reference, others: Mapping[str, str]) -> Role | None:
    folder = zoo.folder_of(reference.id) if reference.source == "zoo" else Path(reference.id)
    recipe = _recipe(folder.expanduser() / "recipe.toml")
    if recipe is None:
        return None
    seed = int(recipe.get("seed", 0))
    if start := recipe.get("encoder"):  # trained further: fine-tuning, detection, segmentation
        return _tuned(name, str(start), seed, others)
    method = str(recipe.get("objective", ""))
    family = FAMILY_OF.get(method) or _kind_of(method)
    if family is None:
        return None
    window = int(recipe.get("attention_window", 0)) or None
    return Role(
        name,
        family,
        method,
        network="vit" if str(recipe.get("backbone", "vit")).startswith(("vit", "deit", "beit")) else "cnn",
        window=window,
        lifted=window is not None and reference.options.get("window") == "none",
        weight=float(recipe["weight"]) if family == HYBRID and "weight" in recipe else None,
        seed=seed,
        multicrop=bool(recipe.get("multi_crop", True)) if method == "dino" else None,
    )


def _tuned(name: str, start: str, seed: int, others: Mapping[str, str]) -> Role | None:
    role = known_role(name, start, others)
    named = next((other for other, reference in others.items() if reference == start and other != name), start)
    return None if role is None else replace(role, tuned_from=named, seed=seed or role.seed)


def _recipe(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {str(path)!r}: {first_line(error)}; give the role of the encoder") from error


def _kind_of(objective: str) -> str | None:
    """The family of an objective that another package brings."""
    from sightline.core import plugins

    if objective not in plugins.names("objectives"):
        return None
    return KINDS.get(str(getattr(plugins.find("objectives", objective), "KIND", "")))


# Files and models of others


def _of_file(name: str, reference: Reference) -> Role | None:
    words = f"{reference.id} {reference.weights or ''}".lower()
    if "random" in (reference.weights or ""):
        return None
    method = {"convnext_v2": "fcmae"}.get(reference.source, reference.source)
    if method not in FAMILY_OF:
        method = "supervised" if reference.source == "torchvision" else _method(words)
    if not method:
        return None
    network = "cnn" if CONVOLUTIONAL.search(words) or method == "fcmae" else "vit"
    tuned = bool(FINE_TUNED.search(words)) and FAMILY_OF[method] != SUPERVISED
    return Role(
        name,
        FAMILY_OF[method],
        method,
        network,
        tuned_from="its pre-training" if tuned else None,
        multicrop=True if method == "dino" else None,
    )


def _method(words: str) -> str:
    return next((method for pattern, method in WRITTEN if re.search(pattern, words)), "")
