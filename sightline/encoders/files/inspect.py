"""What is in a checkpoint file, without building a model: format, architecture, parts, training arguments, hash."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from sightline.core.errors import InputError, counted, some
from sightline.core.folders import latest
from sightline.core.references import Reference, parse_reference
from sightline.encoders.files.reading import Checkpoint, distinct, printable, read_checkpoint, tensors
from sightline.encoders.layouts.layout import Layout, find_layout
from sightline.encoders.sources.checkpoint import (
    OPTIMIZER,
    Recognized,
    described_beside,
    other_kind,
    read_json,
    recognize,
)

MEASURES = {  # of an architecture, and timm's and Hugging Face's words for them
    "width": ("embed_dim", "hidden_size"),
    "widths": ("dims",),
    "depth": ("depth", "num_hidden_layers"),
    "depths": ("depths",),
    "layers": ("layers",),
    "heads": ("num_heads", "num_attention_heads"),
    "patch": ("patch_size",),
    "image size": ("size", "img_size", "image_size"),
    "classes": ("num_classes",),
    "registers": ("reg_tokens", "num_register_tokens"),
}
WEIGHT_FILES = ("encoder.safetensors", "model.safetensors", "pytorch_model.bin")  # in a folder
MOST_PARTS = 60  # lines of parts


@dataclass(frozen=True)
class Inspection:
    """What `sightline inspect` says about a file."""

    path: str
    container: str
    size: int  # bytes
    sha256: str  # of the file
    format: str = ""  # "MAE, training checkpoint", empty if it is not recognised
    why: str = ""  # by what it was recognised
    problem: str = ""  # why it cannot be loaded as it is
    architecture: Mapping[str, str] = field(default_factory=dict)  # width, depth, …
    part: str = ""  # where the encoder is
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # tensors and numbers of each part of the file
    encoder: int = 0  # numbers in the encoder
    total: int = 0  # numbers outside of the optimiser
    types: Mapping[str, int] = field(default_factory=dict)  # numbers of each dtype
    left_over: tuple[str, ...] = ()  # weights that are not the encoder's
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the training
    notes: tuple[str, ...] = ()


def inspect(path: str | Path) -> Inspection:
    """Look into a checkpoint; a file that cannot be read safely is an InputError, one of no known format is not."""
    path = Path(path).expanduser()
    if path.is_dir():
        folder = latest(path) or path
        path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), path)
    checkpoint = read_checkpoint(path)
    types: Counter[str] = Counter()
    for value in _tensors_in([value for key, value in checkpoint.content.items() if key not in OPTIMIZER], set()):
        types[str(value.dtype).removeprefix("torch.")] += value.numel()
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Inspection(
        path=str(path),
        container=checkpoint.container,
        size=path.stat().st_size,
        sha256=sha256,
        parts=_parts(checkpoint.content),
        total=sum(types.values()),
        types=dict(types),
        arguments=checkpoint.arguments,
        **_recognition(checkpoint),
    )


def _recognition(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of the format: as much as there is, and what stands in the way of loading it."""
    try:
        if (described := described_beside(checkpoint.path)) is not None:
            return _described(checkpoint, *described)
        match = recognize(checkpoint)
    except InputError as error:
        return {"problem": str(error)}
    known = {"format": match.title, "why": match.why}
    try:
        layout, heads = _layout(match, checkpoint)
    except InputError as error:
        return known | {"problem": str(error)}
    architecture = _measures(parse_reference(layout.architecture).options)
    if "heads" in architecture:
        architecture["heads"] = heads.format(architecture["heads"])
    return known | {
        "format": layout.format,
        "architecture": architecture,
        "part": layout.part,
        "encoder": sum(value.numel() for value in layout.state.values()),
        "left_over": layout.left_over,
        "notes": layout.notes,
    }


def _layout(found: Recognized, checkpoint: Checkpoint) -> tuple[Layout, str]:
    """The layout, and what is to be said of the number of heads: if no tensor tells it, any number will do."""
    try:
        layout = find_layout(found.layout, found.title, checkpoint, {})
    except InputError:
        if "heads" not in found.options:
            raise
        return find_layout(found.layout, found.title, checkpoint, {"heads": "1"}), "not in the file, give ?heads=NUMBER"
    if "heads" not in found.options:
        return layout, "{}"
    try:
        find_layout(found.layout, found.title, checkpoint, {"heads": "1"})
    except InputError:
        return layout, "{}"
    return layout, "{} (not in the file; usual for this width, else give ?heads=NUMBER)"


def _described(checkpoint: Checkpoint, reference: Reference, why: str) -> dict[str, Any]:
    """Files whose architecture is in a JSON file beside them."""
    if kind := other_kind(checkpoint):
        return {"problem": kind}
    name = "encoder.json" if reference.source == "run" else "config.json"
    about = read_json(checkpoint.path.parent / name)
    measures = parse_reference(str(about.get("architecture"))).options if reference.source == "run" else about
    return {
        "format": {"run": "Sightline", "huggingface": "Hugging Face", "timm": "timm"}[reference.source],
        "why": why,
        "architecture": {"name": str(about.get("architecture") or about.get("model_type"))} | _measures(measures),
    }


def _measures(options: Mapping[str, Any]) -> dict[str, str]:
    told = {measure: options[word] for measure, words in MEASURES.items() for word in words if word in options}
    measures = {measure: str(value) for measure, value in told.items() if value is not None}
    if "image size" in measures:
        measures["image size"] = measures["image size"].strip("()").replace(",", " × ")
    return measures


# Parts


def _parts(content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Tensors and numbers of every entry of the file; of a state dict, by the first word of their names."""
    groups: dict[str, list[Tensor]] = {}
    for name, value in tensors(content).items():
        groups.setdefault(_first_word(name), []).append(value)
    seen = set[int]()
    for key, value in distinct(content).items():
        weights = tensors(content, key)
        for name, weight in weights.items():
            groups.setdefault(f"{key}: {_first_word(name)}", []).append(weight)
        if not weights and not isinstance(value, Tensor) and (inside := list(_tensors_in(value, seen))):
            groups[key] = inside
    return {name: (len(group), sum(value.numel() for value in group)) for name, group in groups.items()}


def _first_word(name: str) -> str:
    return name.removeprefix("module.").partition(".")[0]


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors at any depth, but not in what was seen before: a file may repeat or contain itself."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (dict, list)) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, dict) else one


# In words


def describe(found: Inspection) -> str:
    """The inspection as lines of text."""
    counts = {"encoder": found.encoder, "rest": found.total - found.encoder, "total": found.total}
    left_over = f"{counted(len(found.left_over), 'weight')} not of the encoder: {some(found.left_over)}"
    sections = {
        "file": [f"{found.path}, {found.size:,} bytes, {found.container}"],
        "sha256": [found.sha256],
        "format": [f"{found.format}, since {found.why}" if found.format else "not recognised"],
        "problem": [found.problem],
        "architecture": [f"{word} {value}" for word, value in found.architecture.items()],
        "encoder in": [found.part],
        "parameters": [", ".join(f"{part} {n:,}" for part, n in counts.items() if found.encoder or part == "total")],
        "types": [f"{name} {count:,}" for name, count in found.types.items()],
        "parts": _aligned(found.parts),
        "left over": [left_over if found.left_over else ""],
        "notes": list(found.notes),
        "arguments": [f"{name} = {value!r}" for name, value in found.arguments.items()],
    }
    lines = [
        f"{'' if i else label:<14}{printable(text, 500)}"  # names and values of a file must not command the terminal
        for label, texts in sections.items()
        for i, text in enumerate(filter(None, texts))
    ]
    return "\n".join(lines)


def as_json(found: Inspection) -> str:
    """The inspection for programs."""
    return json.dumps(asdict(found), indent=2)


def _aligned(parts: Mapping[str, tuple[int, int]]) -> list[str]:
    rows = [
        f"{printable(name, 40):<32} {counted(count, 'tensor'):>14} {numbers:>16,}"
        for name, (count, numbers) in islice(parts.items(), MOST_PARTS)
    ]
    return rows + ([f"… and {len(parts) - MOST_PARTS} more"] if len(parts) > MOST_PARTS else [])
