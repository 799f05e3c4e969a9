"""Sites: named points of an encoder, the same names for every architecture, and how to look at them.

| site | activation | shape |
|---|---|---|
| `embed` | what enters the first block | (B, N, D) or (B, C, h, w) |
| `block.3` | output of a block; in a CNN after the addition | (B, N, D) or (B, C, h, w) |
| `block.3.residual` | the residual branch before the addition (CNN) | (B, C, h, w) |
| `block.3.norm1`, `.norm2` | output of the norms | (B, N, D) |
| `block.3.qkv` | output of the linear layer, q, k and v side by side | (B, N, 3D) |
| `block.3.q`, `.k`, `.v` | what enters the product, after q/k norm and rotary embedding; q unscaled | (B, H, N, D/H) |
| `block.3.attn_map` | attention probabilities | (B, H, N, N) |
| `block.3.attn` | output of the attention layer, before layer scale | (B, N, D) |
| `block.3.mid` | the stream after attention, before norm2 | (B, N, D) |
| `block.3.fc1` | output of the first fully connected layer, before its activation function | (B, N, 4D) |
| `block.3.mlp` | output of the MLP, before layer scale | (B, N, D) |
| `norm` | after the final norm; no other site is normed by it | (B, N, D) |
| `head.0` | the layers of the head | (B, C) |

B images, N tokens (prefix tokens first), D width, H heads, C channels or classes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sightline.errors import InputError, nearest

if TYPE_CHECKING:
    from sightline.encoder import Encoder

__all__ = [
    "Anatomy",
    "Tap",
    "Tokens",
    "block_number",
    "capture",
    "layer_type",
    "select",
    "token_view",
    "union_of_sites",
    "watch",
]

ATTENTION_POINTS = frozenset({"q", "k", "v", "attn_map", "qkv"})


@dataclass(frozen=True)
class Tokens:
    """Token layout: how many prefix tokens, which of them is CLS, and the patch grid (rows, columns)."""

    prefix: int
    cls: int | None
    grid: tuple[int, int]

    @property
    def count(self) -> int:
        """All tokens, prefix included."""
        return self.prefix + self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class Tap:
    """Where a site is: the `output` or `input` of a module, or a part of an attention layer (`q`, `attn_map`, …)."""

    module: nn.Module
    point: str = "output"
    channels_last: bool = False  # maps that the architecture keeps as (B, h, w, C); shown as (B, C, h, w)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a family knows about one of its modules."""

    family: str
    depth: int
    taps: Mapping[str, Tap]  # in order of computation
    tokens: Tokens | None = None  # None: a CNN, or unknown
    heads: int | None = None
    patch: int | None = None
    size: tuple[int, int] | None = None  # the one image size that the module takes; None: any
    forward: Callable[[Tensor], Any] | None = None  # how to send images through, where calling the module is not enough


# ---------------------------------------------------------------------------------------------------------------
# Names


def select(taps: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Sites that match any of the patterns, in order of computation; `*` does not cross a dot, `**` does.

    >>> select(["embed", "block.0", "block.0.qkv", "block.1", "block.1.qkv"], ["block.*"])
    ['block.0', 'block.1']
    >>> select(["embed", "block.0", "block.0.qkv"], ["block.**"])
    ['block.0', 'block.0.qkv']
    """
    expressions = [re.compile(_expression(pattern)) for pattern in patterns]
    return [name for name in taps if any(expression.fullmatch(name) for expression in expressions)]


def _expression(pattern: str) -> str:
    words = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return "".join(words.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*|\?)", pattern))


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> str | None:
    """The sentence for the first pattern that matches none of the names, or None."""
    names = list(names)
    for pattern in patterns:
        if not select(names, [pattern]):
            return f"No site matches {pattern!r}{nearest(pattern, names)} (`sightline list sites REF` shows all)"
    return None


def layer_type(site: str) -> str:
    """The kind of layer a site belongs to, so that layers of one kind can be compared over depth.

    >>> [layer_type(s) for s in ("embed", "block.3", "block.3.qkv", "head.0", "layer1.0.conv1")]
    ['embed', 'block', 'qkv', 'head', 'layer1.*.conv1']
    """
    if re.fullmatch(r"block\.\d+", site):
        return "block"
    if re.fullmatch(r"block\.\d+\..+", site):
        return site.split(".", 2)[2]
    if re.fullmatch(r"head\.\d+", site):
        return "head"
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site)


def block_number(site: str) -> int:
    """The block a site belongs to, −1 outside the blocks.

    >>> block_number("block.3.qkv"), block_number("norm")
    (3, -1)
    """
    match = re.match(r"block\.(\d+)(\.|$)", site)
    return int(match[1]) if match else -1


def union_of_sites(sites: Mapping[str, Sequence[str]]) -> list[str]:
    """Sites of all encoders, each once, in order of computation.

    >>> union_of_sites({"vit": ["embed", "block.0", "block.1"], "cnn": ["block.0.residual", "block.0", "block.1"]})
    ['embed', 'block.0.residual', 'block.0', 'block.1']
    """
    merged: list[str] = []
    for names in sites.values():
        at = 0
        for number, name in enumerate(names):
            if name not in merged:  # right before the next site that both have, or after the last one
                later = [merged.index(other) for other in names[number + 1 :] if other in merged]
                merged.insert(later[0] if later else at, name)
            at = merged.index(name) + 1
    return merged


# ---------------------------------------------------------------------------------------------------------------
# Token views


def token_view(activation: Tensor, view: str, tokens: Tokens | None) -> Tensor | None:
    """A part of an activation: `all`, `cls`, `patches` (no prefix token), `mean` (of patches), `gap` (of all tokens).

    Gives (B, n, D) for `all` and `patches`, (B, D) for the others, None where there is no such thing (CLS in a
    CNN). Maps (B, C, h, w) count as h·w patches; attention heads (B, H, N, d) as N tokens of width H·d.
    """
    if activation.ndim == 4:
        activation = activation.flatten(2).transpose(1, 2) if tokens is None else activation.transpose(1, 2).flatten(2)
    if activation.ndim != 3 or (tokens is not None and activation.shape[1] != tokens.count):
        whole = activation.flatten(1)  # pooled vectors, or a layout that we know nothing about
        return {"all": whole.unsqueeze(1), "gap": whole if activation.ndim == 2 else None}.get(view)
    prefix, cls = (tokens.prefix, tokens.cls) if tokens is not None else (0, None)
    match view:
        case "all":
            return activation
        case "patches":
            return activation[:, prefix:]
        case "mean":
            return activation[:, prefix:].mean(1, dtype=torch.float32)
        case "gap":
            return activation.mean(1, dtype=torch.float32)
        case "cls":
            return None if cls is None else activation[:, cls]
    raise InputError(f"There is no token view {view!r}{nearest(view, ['all', 'cls', 'patches', 'mean', 'gap'])}")


# ---------------------------------------------------------------------------------------------------------------
# Looking


@contextlib.contextmanager
def capture(encoder: Encoder, sites: Sequence[str] | str) -> Iterator[dict[str, Tensor]]:
    """Collect copies of activations: `with capture(encoder, ["block.*"]) as acts: encoder(images)`, site → tensor."""
    sites = [sites] if isinstance(sites, str) else sites
    missing = unmatched(sites, encoder.sites)
    if missing:
        raise InputError(missing)
    activations: dict[str, Tensor] = {}

    def keep(site: str, activation: Tensor) -> None:
        # A copy, because an operation in place after the hook (ReLU after BatchNorm) would overwrite it.
        activations[site] = activation.detach().clone()

    with watch(encoder.sites, select(encoder.sites, sites), keep):
        yield activations


@contextlib.contextmanager
def watch(taps: Mapping[str, Tap], sites: Sequence[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see(site, activation)` whenever the forward pass reaches one of the sites; leave no hook behind.

    The activation belongs to the model and may change after `see` returns: reduce it or copy it there.
    """
    with contextlib.ExitStack() as stack:
        attention: dict[nn.Module, dict[str, str]] = {}
        for site in sites:
            tap = taps[site]
            if tap.point in ATTENTION_POINTS:
                attention.setdefault(tap.module, {})[tap.point] = site
            else:
                stack.callback(_hook(tap, site, see).remove)
        if attention:
            mode = stack.enter_context(_AttentionWatch())
            for module, points in attention.items():
                if set(points) != {"qkv"}:
                    stack.enter_context(_fused(module))
                layer = _AttentionLayer(module, points, see)
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
    raise InputError(f"Site {site!r} gives no tensor but {type(value).__name__}; choose another site")


# Attention maps. Fused attention never forms them, so they are computed again from exactly what the layer passes to
# `scaled_dot_product_attention`: its own q and k after q/k norm and rotary embedding, its own mask or relative
# position bias and scale. A TorchFunctionMode sees that call whatever the architecture, so there is nothing to
# imitate per architecture, and `map @ v` is compared with what the fused kernel gave, once per layer.


@dataclass
class _AttentionLayer:
    module: nn.Module
    points: Mapping[str, str]  # q, k, v, attn_map, qkv -> site
    see: Callable[[str, Tensor], None]
    checked: bool = False
    linear: dict[str, Tensor] = field(default_factory=dict)
    called: bool = False

    def see_linear(self, weight: object, output: Tensor) -> None:
        """Keep the output of the layer's own q, k, v projections, whether or not their modules are called."""
        if "qkv" not in self.points:
            return
        for name in ("qkv", "q_proj", "k_proj", "v_proj"):
            projection = getattr(self.module, name, None)
            if projection is not None and weight is projection.weight:
                self.linear[name] = output

    def see_product(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, bias: Tensor | None, scale: float) -> None:
        if self.called and set(self.points) != {"qkv"}:
            raise self.unseen("computes more than one attention product")
        self.called = True
        for point, value in (("q", q), ("k", k), ("v", v)):
            if point in self.points:
                self.see(self.points[point], value)
        if "attn_map" not in self.points:
            return
        site = self.points["attn_map"]
        with torch.autocast(q.device.type, enabled=False):  # else the product would be rounded to bf16 again
            scores = (q.float() * scale) @ k.float().transpose(-2, -1)
            attention = (scores if bias is None else scores + bias.float()).softmax(-1)  # (B, H, N, N)
            if not self.checked:
                _check(attention @ v.float(), output, site)
                self.checked = True
        self.see(site, attention)

    def finish(self) -> None:
        """The layer has returned: hand out q, k and v side by side, complain if no product was seen."""
        if "qkv" in self.points and self.linear:
            parts = [self.linear[name] for name in ("qkv", "q_proj", "k_proj", "v_proj") if name in self.linear]
            # Only now, because a separate bias is added in place after the linear layer.
            self.see(self.points["qkv"], parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        elif "qkv" in self.points:
            raise self.unseen("does not use its q, k, v projections as linear layers")
        if not self.called and set(self.points) != {"qkv"}:
            raise self.unseen("does not compute its attention with scaled_dot_product_attention")
        self.forget()

    def forget(self) -> None:
        """Be ready for the next batch."""
        self.linear, self.called = {}, False

    def unseen(self, why: str) -> InputError:
        """What to say when the layer works in a way that cannot be looked into."""
        sites = " and ".join(repr(site) for site in self.points.values())
        return InputError(
            f"{sites} cannot be seen: {type(self.module).__name__} {why}; "
            "leave the attention sites out for this encoder"
        )


def _check(ours: Tensor, fused: Tensor, site: str) -> None:
    tolerance = 1e-4 if fused.dtype == torch.float32 else 3e-2
    error = (ours - fused.float()).abs().max()
    if error > tolerance * fused.float().abs().max() + 1e-12:
        raise InputError(
            f"Site {site!r}: attention times values differs from the layer's own output by {error:.2g}, "
            "so the map would be wrong; leave the attention sites out for this encoder"
        )


class _AttentionWatch(TorchFunctionMode):
    """Sees the calls that the attention layer being executed makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[_AttentionLayer] = []

    def enter(self, layer: _AttentionLayer) -> Callable[..., None]:
        def before(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
            self.layers.append(layer)

        return before

    def leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        layer = self.layers.pop()
        if output is None:  # an exception passes through
            layer.forget()
        else:
            layer.finish()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.layers:
            if func is F.linear:
                self.layers[-1].see_linear(args[1] if len(args) > 1 else kwargs["weight"], output)
            elif func is F.scaled_dot_product_attention:
                self.layers[-1].see_product(*_product(output, *args, **kwargs))
        return output


def _product(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, float]:
    """Arguments of scaled_dot_product_attention as q, k, v, output, additive bias, scale."""
    if dropout_p:
        raise InputError("Attention maps need a model without attention dropout; call .eval() first")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, device=query.device).masked_fill(~attn_mask, -math.inf)
    return query, key, value, output, attn_mask, scale if scale is not None else query.shape[-1] ** -0.5


@contextlib.contextmanager
def _fused(module: nn.Module) -> Iterator[None]:
    """Let a layer that can use fused attention use it, since that call is where we see q, k and v."""
    config = getattr(module, "config", None)
    owner, name, wanted = (
        (module, "fused_attn", True) if hasattr(module, "fused_attn") else (config, "_attn_implementation", "sdpa")
    )
    if not hasattr(owner, name) or getattr(owner, name) == wanted:
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, wanted)
    try:
        yield
    finally:
        setattr(owner, name, before)
