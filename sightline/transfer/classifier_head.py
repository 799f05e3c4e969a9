"""An encoder with a classifier of its own, to be fine-tuned: new head, pooling, stochastic depth, blocks made anew.

The architecture is built once more, so that a reference can build it again, and the encoder's weights are copied in.

K classes, L blocks.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core.errors import InputError, counted, nearest
from sightline.core.references import Reference, parse_reference
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.families.huggingface import Classified
from sightline.encoders.files.weights import classifier_names
from sightline.encoders.loading import load_encoder

POOLS = {"": None, "cls": "token", "gap": "avg"}  # our words, and timm's
HEAD_STD = 2e-5  # of a new head: next to nothing, so that the encoder is not torn by its first gradients
# Parts that another pooling does not have, or has anew.
POOLING = ("norm.", "fc_norm.", "attn_pool.")
SHARED = re.compile(r"(^rel_pos_bias|\bshared_position_bias)\.")  # timm's and Hugging Face's relative positions of BEiT
POOLERS = ("model.pooler.", "model.head.")  # of Hugging Face, which a classifier of ours does without


def with_classifier(
    encoder: Encoder,
    classes: Sequence[str],
    *,
    pool: str = "",
    drop_path: float = 0.0,
    reinit: str = "",
    keep_head: bool = False,
    seed: int = 0,
) -> Encoder:
    """The encoder's weights in a module with K outputs; the given encoder is left as it is.

    `pool` is `cls`, `gap` or, if empty, the model's own; `reinit` is `first:n` or `last:n`: blocks that keep the
    random weights with which the architecture is built.

    >>> vit = load_encoder("timm:test_vit@random")
    >>> with_classifier(vit, ("cat", "dog")).module.head
    Linear(in_features=64, out_features=2, bias=True)
    """
    built = _built(encoder, len(classes), pool, drop_path, seed)
    heads = classifier_names(built.module)
    if not heads:
        raise InputError(
            f"{encoder.reference} has no place for a classifier ({type(built.module).__name__}); "
            "choose an encoder of timm, torchvision or a Hugging Face image classification model"
        )
    anew = _reinitialised(built, reinit, encoder.reference)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in heads:
            _renew(built.module, name, len(classes))
    kept = _kept_heads(encoder, heads, classes) if keep_head else {}
    _copy(encoder, built.module, leave_out=(*(f"{name}." for name in heads), *anew))
    with torch.no_grad():
        for name, value in kept.items():
            built.module.get_parameter(name).copy_(value)
    notes = []
    if drop_path and "drop_path_rate" not in parse_reference(str(built.architecture)).options:
        notes.append(f"drop_path={drop_path} is for encoders of timm, {encoder.reference} keeps its own")
    return build_encoder(
        built.module,
        reference=encoder.reference,
        name=encoder.name,
        preprocess=encoder.preprocess,
        architecture=built.architecture,
        classes=classes,
        notes=notes,
        resize=encoder.resize,
    )


def _built(encoder: Encoder, classes: int, pool: str, drop_path: float, seed: int) -> Encoder:
    """The architecture with random weights; its own reference does not name the seed, which is not part of it."""
    if pool not in POOLS:
        raise InputError(f"There is no pooling {pool!r}{nearest(pool, filter(None, POOLS))}")
    if encoder.architecture is None:
        raise InputError(
            f"Encoder {encoder.name!r} cannot be rebuilt from a reference, so it cannot be fine-tuned; "
            "give one such as timm:NAME or run:FOLDER"
        )
    if pool == "cls" and not _has_cls(encoder):
        raise InputError(f"{encoder.reference} has no CLS token; choose the pooling gap")
    reference = parse_reference(encoder.architecture)
    options = dict(reference.options)
    if reference.source == "timm":
        options["num_classes"] = str(classes)
        own = any(getattr(part, "drop_prob", 0) for part in encoder.module.modules())  # Swin has it by itself
        if drop_path or own:
            options["drop_path_rate"] = str(drop_path)
        if wanted := POOLS[pool] or _unpooled(encoder):
            options["global_pool"] = wanted
    elif pool:
        raise InputError(f"pool={pool} can be set for encoders of timm only; {encoder.reference} has its own pooling")
    if reference.source == "huggingface" and ("num_classes" in options or not classifier_names(encoder.module)):
        # Their own poolers are made for other losses; one that no gradient reaches makes several processes wait.
        without = {"head", "pooler", *filter(None, options.get("without", "").split(","))}
        options |= {"num_classes": str(classes), "without": ",".join(sorted(without))}
    built = load_encoder(str(Reference(reference.source, reference.id, "random", options | {"seed": str(seed)})))
    return replace(built, architecture=str(Reference(reference.source, reference.id, "random", options)))


def _unpooled(encoder: Encoder) -> str | None:
    """Of an encoder that gives all of its tokens: CLS if it has one, else the mean."""
    if getattr(encoder.module, "global_pool", None) != "":
        return None
    return "token" if _has_cls(encoder) else "avg"


def _has_cls(encoder: Encoder) -> bool:
    return encoder.tokens is not None and encoder.tokens.cls is not None


def _renew(module: nn.Module, name: str, classes: int) -> None:
    """A head of next to no weights; timm has built it in its size already, others have that of their own classes."""
    old: Any = module.get_submodule(name)
    new = nn.Linear(old.in_features, classes, old.bias is not None)
    nn.init.trunc_normal_(new.weight, std=HEAD_STD)
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    module.set_submodule(name, new)


def _kept_heads(encoder: Encoder, heads: Sequence[str], classes: Sequence[str]) -> dict[str, Tensor]:
    """The encoder's own head, its rows in the order of the classes; it must have all of them and no others."""
    own = encoder.module.state_dict()
    weights = {name: value for name, value in own.items() if name.rpartition(".")[0] in heads}
    outputs = next((len(value) for value in weights.values()), 0)
    if outputs != len(classes) or (encoder.classes is not None and set(encoder.classes) != set(classes)):
        has = f"a head for {counted(outputs, 'class')}" if outputs else "no head"
        raise InputError(
            f"{encoder.reference} has {has}{' of other names' if outputs == len(classes) else ''}, but there "
            f"{'is' if len(classes) == 1 else 'are'} {counted(len(classes), 'class')} to learn; leave out keep_head "
            "for a new one"
        )
    order = range(outputs) if encoder.classes is None else [encoder.classes.index(name) for name in classes]
    return {name: value[list(order)] for name, value in weights.items()}


@torch.no_grad()
def _copy(encoder: Encoder, module: nn.Module, leave_out: tuple[str, ...]) -> None:
    """Every weight of the encoder but those that are left out; norms around another pooling may come or go."""
    own, given = module.state_dict(), _under_names_of(module, encoder.module)
    old_heads = tuple(f"{name}." for name in classifier_names(encoder.module))
    before, after = (getattr(part, "global_pool", None) for part in (encoder.module, module))
    optional = POOLING if before != after else ()
    for name, value in own.items():
        if name.startswith(leave_out):
            continue
        if name in given and given[name].shape == value.shape:
            value.copy_(given[name])
        elif not name.startswith(optional):
            raise InputError(f"{encoder.reference} has no weight {name} that fits its own architecture; load it again")
    for name in given:
        if name not in own and not name.startswith((*leave_out, *old_heads, *optional, *POOLERS)):
            raise InputError(f"{encoder.reference} has a weight {name} that its own architecture has no place for")


def _under_names_of(module: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    """The weights of another module; of one that has become a part of the module, `model.`, under that name."""
    state: dict[str, Tensor] = other.state_dict()
    inside = isinstance(module, Classified) and not isinstance(other, Classified)
    return {f"model.{name}": value for name, value in state.items()} if inside else state


# Blocks and layers


def block_names(encoder: Encoder) -> list[str]:
    """Where the blocks are in the module, in order of computation.

    >>> block_names(load_encoder("timm:resnet18@random"))[-2:]
    ['layer4.0', 'layer4.1']
    """
    names = {part: name for name, part in encoder.module.named_modules()}
    modules = [tap.module for site, tap in encoder.sites.items() if re.fullmatch(r"block\.\d+", site)]
    return [names[part] for part in modules]


def layers_of(encoder: Encoder) -> dict[str, int]:
    """The layer of each parameter: 0 what comes before the blocks, 1 … L the blocks, L + 1 what follows them.

    What lies between two blocks, such as the downsampling of a ConvNeXt, belongs to the one that follows. What is built
    on top of the encoder has no name in it, "", and is L + 1 as well, also where the encoder ends with its blocks.

    >>> layers = layers_of(load_encoder("timm:test_vit@random"))
    >>> [layers[name] for name in ("pos_embed", "blocks.0.mlp.fc1.bias", "blocks.5.norm2.weight", "norm.weight")]
    [0, 1, 6, 7]
    >>> layers_of(load_encoder("timm:resnet18@random?num_classes=0"))[""]
    9
    """
    blocks = block_names(encoder)
    module: Any = encoder.module
    if not blocks:
        if not hasattr(module, "group_matcher"):
            raise InputError(f"The layers of {encoder.reference} are not known; leave out layer_decay and reinit")
        from timm.models import group_parameters

        grouped: dict[str, int] = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
        return grouped
    result, seen = {"": len(blocks) + 1}, 0
    for name, _ in module.named_parameters():
        inside = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        seen = inside or seen
        result[name] = inside or (seen + 1 if seen else 0)
        if SHARED.search(name):  # one table for all blocks moves like the last layer, as in BEiT's code
            result[name] = len(blocks) + 1
    return result


def _reinitialised(encoder: Encoder, reinit: str, reference: str) -> Collection[str]:
    """Prefixes of the weights of the first or last n blocks."""
    if not reinit:
        return ()
    blocks = block_names(encoder)
    match = re.fullmatch(r"(first|last):(\d+)", reinit)
    if match is None:
        raise InputError(f"reinit is {reinit!r}, but first:n or last:n is expected, such as first:3")
    n = int(match[2])
    if n > len(blocks):
        raise InputError(f"reinit={reinit}: {reference} has {counted(len(blocks), 'block')}; choose at most that many")
    chosen = blocks[:n] if match[1] == "first" else blocks[len(blocks) - n :]
    return [f"{name}." for name in chosen]
