"""Checkpoints of official code: which encoder is in a file, under timm's names, and how it is built.

A format is one file of `encoders/formats/` (mae, moco_v3, dino, …), whose contract is `contract.Format`;
`open_file` is the source that all of them share. A layout is put together from names and shapes, and no model is built
for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sightline.core import plugins
from sightline.core.errors import InputError, first_line, nearest, some
from sightline.core.references import Reference, parse_reference
from sightline.encoders.contract import format_named
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.files.reading import Checkpoint, printable, read_checkpoint
from sightline.encoders.files.weights import left_out
from sightline.encoders.modules.positions import Resize, by_size
from sightline.encoders.modules.projection import Layer, Projected, Trained, empty_head, parts_in_words, state_of
from sightline.encoders.sources import timm
from sightline.images.preprocess import Preprocess

# How timm and PyTorch draw weights: numbers, then the error function's inverse for a normal distribution.
DRAWING = {Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, nn.init.uniform_, nn.init.normal_}
DRAWING |= {nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_}


@dataclass(frozen=True, eq=False)
class Layout:
    """The encoder in a checkpoint."""

    format: str  # "MAE, training checkpoint"
    architecture: str  # a reference that builds the module, without weights
    state: Mapping[str, Tensor]  # the encoder's weights under timm's names
    preprocess: Preprocess  # of the official evaluation
    part: str = ""  # where it was taken from: "model", "teacher, backbone."
    left_over: tuple[str, ...] = ()  # names of weights in the file that are not the encoder's
    notes: tuple[str, ...] = ()  # what the user should know besides
    decoder: Callable[[nn.Module], nn.Module] | None = field(default=None, repr=False)  # of MAE, made for its encoder
    head: tuple[Trained, ...] = field(default=(), repr=False)  # layers of the projection head, if it is asked for
    resize: Resize = field(default=by_size, repr=False)  # of positions, as the official code does


def architecture(name: str, measures: Mapping[str, object]) -> str:
    """The reference of a model of timm without weights, with these measures.

    >>> architecture("vit_base_patch16_224", {"depth": 2, "img_size": "(64,64)"})
    'timm:vit_base_patch16_224@random?depth=2&img_size=(64,64)'
    """
    return str(Reference("timm", name, "random", {key: str(value) for key, value in measures.items()}))


def open_file(reference: Reference) -> Encoder:
    """Read the file that a reference names, and build the encoder in it as the format of that name says."""
    known = format_named(reference.source)
    if reference.weights is not None:
        raise InputError(f"{reference}: the file is the weights; write {reference.source}:FILE?option=value")
    for key in reference.options:
        if key not in known.OPTIONS:
            raise InputError(f"{reference} has an unknown option {key!r}{nearest(key, known.OPTIONS)}")
    checkpoint = read_checkpoint(Path(reference.id).expanduser())
    formats = recognized(checkpoint)
    if formats and reference.source not in formats:
        source, why = next(iter(formats.items()))
        title = format_named(source).TITLE
        raise InputError(f"{reference.id!r} is a checkpoint of {title}: {why}; write {source}:{reference.id}")
    return build(find_layout(known.layout, known.TITLE, checkpoint, reference.options), reference)


def find_layout(
    layout: Callable[[Checkpoint, Mapping[str, str]], Layout],
    title: str,
    checkpoint: Checkpoint,
    options: Mapping[str, str],
) -> Layout:
    """The encoder in a checkpoint; names may be those of a format and shapes not."""
    try:
        return layout(checkpoint, options)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{str(checkpoint.path)!r} has the names of {title}, but not its shapes "
            f"({printable(first_line(error), 80)}); is it damaged?"
        ) from error


def recognized(checkpoint: Checkpoint) -> dict[str, str]:
    """The formats that a checkpoint is surely of, and by what: {"mae": "it has a ViT with decoder_embed and …"}."""
    reasons = {name: format_named(name).recognizes(checkpoint) for name in plugins.names("formats")}
    return {name: why for name, why in reasons.items() if why}


def build(layout: Layout, reference: Reference) -> Encoder:
    """Make the module and give it the weights, all of them."""
    origin = f"{reference.id!r}, read as {layout.format},"
    with _NoRandomNumbers():
        module = timm.create_for(layout.state, parse_reference(layout.architecture), origin)
    load_exactly(module, layout.state, origin)
    notes = list(layout.notes)
    if layout.left_over:
        notes.append(left_out(layout.left_over))
    if layout.decoder is not None:
        from sightline.encoders.modules.mae_decoder import Autoencoder

        module = Autoencoder(module, layout.decoder(module))  # type: ignore[arg-type]
    if layout.head:
        origin = f"The projection head of {reference.id!r}"
        module = projected(module, [layer for layer, _ in layout.head], state_of(layout.head), origin)
    return build_encoder(
        module.eval(),
        reference=str(reference),
        name=Path(reference.id.removesuffix(".tar")).stem,
        preprocess=layout.preprocess,
        architecture=layout.architecture if layout.decoder is None and not layout.head else None,
        notes=notes,
        resize=layout.resize,
    )


def with_head(found: Layout, options: Mapping[str, str], find: Callable[[], Mapping[str, Sequence[Trained]]]) -> Layout:
    """The layout with its projection head, if `head=true` asks for it; `find` gives layers by how their names begin."""
    if (wanted := options.get("head", "false")) not in ("true", "false"):
        raise InputError(f"head={wanted} is neither true nor false; write head=true to load the projection head, too")
    if wanted == "false":
        return found
    parts = find()
    head = tuple(layer for part in parts.values() for layer in part)
    if not head:
        raise InputError(f"The file has no projection head ({', '.join(f'{p}*' for p in parts)}); leave head=true out")
    taken = tuple(prefix for prefix, part in parts.items() if part)
    return replace(
        found,
        head=head,
        left_over=tuple(name for name in found.left_over if not name.startswith(taken)),
        notes=(*found.notes, parts_in_words([layer for layer, _ in head])),
    )


def projected(module: nn.Module, layers: Sequence[Layer], state: Mapping[str, Tensor], origin: str) -> Projected:
    """A module of timm with the projection head that it feeds."""
    width: Any = module.num_features
    if layers[0].inputs != width:
        raise InputError(f"{origin} takes {layers[0].inputs} features, but the encoder gives {width}")
    head = empty_head(layers)
    load_exactly(head, state, origin)
    return Projected(module, head)


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves memory as it is where weights would be drawn, which takes longest in building a model; all are loaded."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in DRAWING:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


@torch.no_grad()
def load_exactly(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Copy every weight and buffer of the module from `state`; what is missing or does not fit is an error."""
    own = module.state_dict()
    # Files before PyTorch 0.4.1 do not count batches, and nothing is computed with their number.
    counts = {name for name in own if name not in state and name.endswith(".num_batches_tracked")}
    missing = [name for name in own if name not in state and name not in counts]
    if missing:
        raise InputError(
            f"{origin} lacks {len(missing)} of {len(own)} weights of the encoder "
            f"({some(missing)}); is it another kind of checkpoint?"
        )
    for name, value in own.items():
        if name in counts:
            continue
        if state[name].shape != value.shape:
            raise InputError(
                f"{origin} has {name} of shape {tuple(state[name].shape)}, but {tuple(value.shape)} is expected; "
                "is it another kind of checkpoint?"
            )
        if value.is_floating_point() and not state[name].is_floating_point():
            raise InputError(
                f"{origin} has {name} in {str(state[name].dtype).removeprefix('torch.')} instead of real numbers; "
                "give a file with weights that are not quantised"
            )
        value.copy_(state[name])


def size_option(options: Mapping[str, str]) -> tuple[int, int] | None:
    """Height and width of the option `size`.

    >>> size_option({"size": "96"}), size_option({"size": "64x96"}), size_option({})
    ((96, 96), (64, 96), None)
    """
    text = options.get("size")
    if text is None:
        return None
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"size={text} is not a size; write size=224, or size=HEIGHTxWIDTH")
    return int(parts[0]), int(parts[-1])


def mlp_ratio(hidden: int, width: int) -> float:
    """timm's setting for an MLP of `hidden` neurons: it rounds the product with the width down.

    >>> int(88 * mlp_ratio(120, 88)), mlp_ratio(256, 64)
    (120, 4.0)
    """
    return hidden / width if hidden % width == 0 else (hidden + 0.5) / width
