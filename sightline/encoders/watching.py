"""Looking into a forward pass: hooks that leave nothing behind, and copies of activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.encoders.attention import (
    Attend,
    AttentionLayer,
    AttentionProduct,
    AttentionWatch,
    fused,
    without_fast_path,
)
from sightline.encoders.sites import ATTENTION_POINTS, Tap, select, unmatched

if TYPE_CHECKING:
    from sightline.encoders.encoder import Encoder


# Looking


@contextlib.contextmanager
def capture(encoder: Encoder, sites: Sequence[str] | str) -> Iterator[dict[str, Tensor]]:
    """Collect copies of activations: `with capture(encoder, ["block.*"]) as acts: encoder(images)`, site → tensor."""
    sites = [sites] if isinstance(sites, str) else sites
    missing = unmatched(sites, encoder.sites)
    if missing:
        raise InputError(missing)
    activations: dict[str, Tensor] = {}

    def keep(site: str, activation: Tensor | AttentionProduct) -> None:
        # A copy, because an operation in place after the hook (ReLU after BatchNorm) would overwrite it.
        whole = activation.map() if isinstance(activation, AttentionProduct) else activation.clone()
        activations[site] = whole.detach()

    with watch(encoder.sites, select(encoder.sites, sites), keep):
        yield activations


@contextlib.contextmanager
def watch(
    taps: Mapping[str, Tap], sites: Sequence[str], see: Callable[[str, Any], None], attend: Attend | None = None
) -> Iterator[None]:
    """Call `see(site, activation)` whenever the forward pass reaches one of the sites; leave no hook behind.

    The activation belongs to the model and may change after `see` returns: reduce it or copy it there. An attention
    map comes as the `AttentionProduct` that makes it, since a whole map costs more than most uses of it need. With
    `attend`, which computes the product of every attention layer, no activation depends on which sites are watched.
    """
    with contextlib.ExitStack() as stack:
        attention: dict[nn.Module, dict[str, str]] = {}
        if attend is not None:
            attention = {tap.module: {} for tap in taps.values() if tap.point in ATTENTION_POINTS}
            stack.enter_context(without_fast_path())
        for site in sites:
            tap = taps[site]
            if tap.point in {*ATTENTION_POINTS, "qkv"}:
                attention.setdefault(tap.module, {})[tap.point] = site
            else:
                stack.callback(_hook(tap, site, see).remove)
        if attention:
            mode = AttentionWatch()
            stack.callback(mode.close)
            for module, points in attention.items():
                layer = AttentionLayer(module, points, see, attend)
                if attend is not None or layer.inside:
                    stack.enter_context(fused(module))
                stack.callback(module.register_forward_pre_hook(mode.enter(layer), with_kwargs=True).remove)
                # always_call: an exception inside the layer must not leave it on the stack
                stack.callback(module.register_forward_hook(mode.leave, always_call=True).remove)
        yield


def _hook(tap: Tap, site: str, see: Callable[[str, Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    def shape(activation: Tensor) -> Tensor:
        return activation.permute(0, 3, 1, 2) if tap.channels_last else activation

    if tap.point == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(site, shape(_tensor((*args, *kwargs.values()), site)))

        return tap.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        see(site, shape(_tensor(output, site)))

    return tap.module.register_forward_hook(after)


def _tensor(value: Any, site: str) -> Tensor:
    """The first tensor of what a module took or gave."""
    if isinstance(value, Tensor):
        return value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ():
        if isinstance(part, Tensor):
            return part
    raise InputError(f"Site {site!r} gives a {type(value).__name__}, not a tensor; choose another site")
