"""Encoders of timm: `timm:NAME`, `timm:NAME@random?seed=1&size=64`, `timm:NAME@file.safetensors`."""

import ast
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core.errors import InputError, first_line, nearest
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.files.weights import LargerModelError, load_weights, no_larger_than, read_weights
from sightline.images.preprocess import Preprocess

EXAMPLE = "timm:vit_small_patch16_224.dino"
OURS = ("seed", "size", "stem", "attention_window", "windows", "rel_pos")  # options that are not those of timm's models
# Not of a model, but of timm's loading: other weights, from the network or from a file that timm would unpickle.
LOADING = re.compile(r"checkpoint_path|pretrained.*|cache_dir|features_only|scriptable|exportable|no_jit")


def names() -> list[str]:
    """All architectures, and the pretrained tags of each."""
    import timm

    return sorted({*timm.list_models(), *timm.list_pretrained()})


def load(reference: Reference) -> Encoder:
    """Build the model; weights are the pretrained ones of the tag, random ones from a seed, or a file's.

    Options: `size` of the images in pixels, `seed` of random weights, `stem=small` for a ResNet on small images,
    `attention_window=7` for a ViT whose patches attend to 7 × 7 around them, `windows=(14,0)` and `rel_pos=True` for
    the attention of ViTDet, and whatever timm's model takes (`depth=6`).
    """
    notes: list[str] = []
    if reference.weights in (None, "random"):
        module = create(reference)
    else:
        state, origin = read_weights(Path(reference.weights)), f"Checkpoint {reference.weights!r}"
        module = create_for(state, reference, origin)
        notes = load_weights(module, state, origin)
    return build_encoder(
        module.eval(),
        reference=str(reference),
        name=reference.id,
        preprocess=preprocess_of(
            module, official=reference.weights != "random", size=_number(reference, "size"), tag=reference.id
        ),
        architecture=str(Reference("timm", reference.id, "random", reference.options)),
        notes=notes,
    )


def create_for(state: Mapping[str, Tensor], reference: Reference, origin: str) -> nn.Module:
    """The model that a reference names, for weights of a file."""
    check_size(state, reference, origin)
    with no_larger_than(state, origin):
        return create(reference)


def check_size(state: Mapping[str, Tensor], reference: Reference, origin: str) -> None:
    """Refuse a model far larger than its weights, by building it without memory (`meta`): files name models, too."""
    measures = {key: option_value(text) for key, text in reference.options.items() if key != "seed"}
    try:
        with no_larger_than(state, origin, measures), torch.device("meta"):
            create(reference)
    except LargerModelError:
        raise
    except Exception:
        pass  # not all can be built so; if something is wrong with it, building it says so


def create(reference: Reference) -> nn.Module:
    """The model that a reference names, without the weights of a file."""
    _check_name(reference)
    _check_options(reference)
    options = {key: option_value(text) for key, text in reference.options.items() if key not in OURS}
    seed, size = _number(reference, "seed") or 0, _number(reference, "size")
    if size is not None and _fixed_size(reference):
        options["img_size"] = size
    module = _create(reference, options, seed)
    if stem := reference.options.get("stem"):
        _small_stem(module, stem, seed, reference)
    if windows := option_value(reference.options.get("windows", "()")):
        from sightline.encoders.modules.vitdet import divide

        divide(module, windows, relative=reference.options.get("rel_pos") == "True")
    if window := _number(reference, "attention_window"):
        from sightline.encoders.modules.vit import restrict

        restrict(module, window)
    return module


def _number(reference: Reference, key: str) -> int | None:
    value = option_value(reference.options.get(key, "None"))
    if value is not None and (not isinstance(value, int) or value < (key == "size")):
        raise InputError(f"Option {key}={value} of {reference} must be a whole number")
    return value


def _check_name(reference: Reference) -> None:
    import timm

    architecture, _, tag = reference.id.partition(".")
    if not timm.is_model(architecture):
        raise InputError(f"timm has no model {architecture!r}{nearest(architecture, timm.list_models())}")
    if reference.weights is None:
        tags = timm.list_pretrained(f"{architecture}*")
        if not timm.is_model_pretrained(architecture):
            raise InputError(f"timm has no pretrained weights for {architecture!r}; use @random or @FILE")
        if tag and reference.id not in tags:
            raise InputError(f"timm has no pretrained weights {reference.id!r}{nearest(reference.id, tags)}")


def _check_options(reference: Reference) -> None:
    """References come from the headers of files, too: none of them may have timm read something else."""
    for key, text in reference.options.items():
        if LOADING.fullmatch(key):
            raise InputError(
                f"{reference.source}:{reference.id} is given {key}={text[:60]!r}, which is no option of a model but of "
                f"how timm loads one; leave it out, and give weights as timm:{reference.id}@FILE"
            )


def _create(reference: Reference, options: dict[str, Any], seed: int) -> nn.Module:
    import timm

    name = reference.id if reference.weights is None else reference.id.partition(".")[0]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module: nn.Module = timm.create_model(name, pretrained=reference.weights is None, **options)
    except LargerModelError:
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError) as error:
        raise InputError(f"timm cannot build {reference}: {first_line(error)}") from error
    except Exception as error:  # whatever the hub client raises when it cannot be reached
        raise InputError(
            f"Cannot get the pretrained weights of {reference.id!r}: {first_line(error)}; "
            "check the network, or give a file with @FILE, or @random"
        ) from error
    return module


def _small_stem(module: Any, stem: str, seed: int, reference: Reference) -> None:
    """A 3 × 3 convolution without stride or pooling, as is usual for ResNets on images of 32 to 64 pixels."""
    if stem != "small" or not isinstance(getattr(module, "conv1", None), nn.Conv2d):
        raise InputError(f"{reference}: stem={stem} cannot be used; stem=small is for ResNets such as timm:resnet18")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module.conv1 = nn.Conv2d(3, module.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
    module.maxpool = nn.Identity()


def _fixed_size(reference: Reference) -> bool:
    """Whether the architecture is built for one size of image (position embeddings), as a CNN is not."""
    import timm

    config = timm.get_pretrained_cfg(reference.id.partition(".")[0])
    return bool(config and config.fixed_input_size)


def preprocess_of(
    module: nn.Module,
    official: bool,
    size: int | None = None,
    tag: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> Preprocess:
    """The evaluation preprocessing of the model's own configuration; random weights have none to keep to.

    `tag` is the name with its pretrained tag: a file of such weights wants what the tag wants (MAE another mean than
    the default weights of the same architecture). `given` is a configuration that came with the weights.
    """
    import timm
    from timm.data import config as data_config

    resolve: Callable[..., dict[str, Any]] = data_config.resolve_model_data_config
    known: Any = timm.get_pretrained_cfg(tag) if tag is not None and tag in timm.list_pretrained(tag) else None
    config = resolve(module, pretrained_cfg=given if known is None else known.to_dict())
    built_for = getattr(getattr(module, "patch_embed", None), "img_size", None)
    height, width = built_for or (config["input_size"][-2:] if size is None else (size, size))
    crop = config["crop_pct"] if official else 1.0
    resize: int | tuple[int, int] = math.floor(min(height, width) / crop)
    if config.get("crop_mode") == "squash" or height != width:
        resize = (math.floor(height / crop), math.floor(width / crop))
    return Preprocess((height, width), resize, config["interpolation"], tuple(config["mean"]), tuple(config["std"]))


def option_value(text: str) -> Any:
    """Options as Python values: 64 → int, True → bool, (2,3) → tuple, anything else stays text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
