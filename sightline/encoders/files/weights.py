"""Weights on disk: read without running code, load without hiding what is missing, hash, write atomically."""

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sightline.core.errors import InputError, counted, some
from sightline.encoders.files.reading import read_checkpoint, tensors, without_prefix

LAYERS = re.compile(r"(\w+_)?(layers|depths?)")  # measures that count layers
CLASSIFIER = re.compile(r"fc|head|heads\.head|(cls_|distillation_)?classifier(\.\d+)?")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict of a checkpoint, out of {'model': …} or {'state_dict': …} and without DistributedDataParallel's
    prefix; of whichever format it is, nothing in it is ever run.
    """
    content = read_checkpoint(path).content
    for key in ("state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            content = content[key]
    state = tensors(content)
    if not state:
        raise InputError(f"{str(path)!r} holds no state dict (a mapping of names to tensors)")
    return without_prefix(state, "module.") if all(name.startswith("module.") for name in state) else state


class LargerModelError(InputError):
    """A model is far larger than the weights that it is to get."""


@contextlib.contextmanager
def no_larger_than(state: Mapping[str, Tensor], origin: str, measures: object = ()) -> Iterator[None]:
    """While a model is built: refuse one far larger than its weights, whatever `measures` a file gives it.

    A pooler or classifier may be missing in the file, and be larger than a small encoder.
    """
    numbers = sum(value.numel() for value in state.values())
    left = {"tensors": 4 * len(state) + 1000, "numbers": 4 * numbers + 2**26}
    error = LargerModelError(
        f"{origin} has {counted(len(state), 'weight')} with {numbers:,} numbers, but a far larger model is described; "
        "is it a checkpoint of another model?"
    )

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        left["tensors"] -= 1
        left["numbers"] -= 0 if parameter is None else parameter.numel()
        if min(left.values()) < 0:
            raise error

    waiting: list[tuple[str, object]] = [("", measures)]
    while waiting:  # lists of as many entries are made before the first layer is
        name, value = waiting.pop()
        most = len(state) if LAYERS.fullmatch(name) else max(numbers, 2**16)
        if isinstance(value, int) and value > most:
            raise error
        if isinstance(value, Mapping) and name != "label2id":  # whose names are those of classes
            waiting += value.items()
        elif isinstance(value, (list, tuple)):
            waiting += [(name, one) for one in value]
    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def load_weights(module: nn.Module, state: dict[str, Tensor], origin: str) -> list[str]:
    """Load a state dict and return notes on what was left over; refuse when a weight of the encoder is missing.

    The classifier is resized to the file's number of classes, or left out if the file has none.
    """
    state = _converted(module, state, origin)
    notes = _fit_classifiers(module, state)
    own = module.state_dict()
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    if missing:
        raise InputError(
            f"{origin} does not fit {type(module).__name__}: it lacks {len(missing)} of {len(own)} weights "
            f"({some(missing)}); is it a checkpoint of another model?"
        )
    for name, value in own.items():
        if name in state and state[name].shape != value.shape:
            raise InputError(
                f"{origin} does not fit {type(module).__name__}: {name} has shape {tuple(state[name].shape)}, "
                f"the model wants {tuple(value.shape)}; is it a checkpoint of another model?"
            )
    left_over = [name for name in state if name not in own]
    if left_over:
        notes.append(left_out(left_over))
    module.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)
    return notes


def left_out(names: Sequence[str]) -> str:
    """The note on weights of a file that are none of the encoder's.

    >>> left_out(["mask_token"])
    '1 weight of the file is not part of the encoder and was left out: mask_token'
    """
    are, were = ("is", "was") if len(names) == 1 else ("are", "were")
    weights = counted(len(names), "weight")
    return f"{weights} of the file {are} not part of the encoder and {were} left out: {some(names)}"


def _converted(module: nn.Module, state: dict[str, Tensor], origin: str) -> dict[str, Tensor]:
    """What timm knows, per architecture, of older names and of how to resize position embeddings."""
    convert = getattr(sys.modules.get(type(module).__module__), "checkpoint_filter_fn", None)
    own = module.state_dict()
    if convert is None or {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in state.items()}:
        return state  # nothing to convert, and not every filter leaves such a state alone
    try:
        return dict(convert(state, module))
    except Exception as error:  # it takes for granted that the file belongs to the architecture
        raise InputError(
            f"{origin} does not fit {type(module).__name__}: {type(error).__name__} {error}; "
            "is it a checkpoint of another model?"
        ) from error


def _fit_classifiers(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    names = classifier_names(module)
    absent = [name for name in names if f"{name}.weight" not in state]
    for name in names:
        layer = module.get_submodule(name)
        classes = 0 if name in absent else state[f"{name}.weight"].shape[0]
        if not isinstance(layer, nn.Linear) or classes == layer.out_features:
            continue
        reset: Callable[[int], None] | None = getattr(module, "reset_classifier", None)
        if reset is not None:
            reset(classes)
        else:
            bias = layer.bias is not None
            module.set_submodule(name, nn.Linear(layer.in_features, classes, bias) if classes else nn.Identity())
    return ["the file has no classifier, so the encoder has none"] if absent else []


def classifier_names(module: nn.Module) -> list[str]:
    """Names of the linear layers that score classes: timm says which, elsewhere the usual names."""
    names = getattr(module, "default_cfg", {}).get("classifier")
    if names:
        listed = [names] if isinstance(names, str) else list(names)
    else:
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        last = {name.split(".")[0]: name for name in linear}  # of several layers in a row, the last one
        listed = [name for name in last.values() if CLASSIFIER.fullmatch(name)]
    present = {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return [name for name in listed if name in present]


def check_finite(module: nn.Module, name: str) -> None:
    """Refuse weights with NaN or infinity: every number measured on them would be meaningless."""
    for key, value in module.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(f"Encoder {name!r} has NaN or infinite weights (first in {key}); give a sound checkpoint")


def hash_weights(what: nn.Module | Mapping[str, Tensor]) -> str:
    """Sha256 over names, types, shapes and bytes of all weights: part of every cache key and result."""
    state = what.state_dict() if isinstance(what, nn.Module) else what
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
