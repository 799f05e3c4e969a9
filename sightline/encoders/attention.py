"""Attention as a layer computes it, softmax(q kᵀ · scale + bias) v, seen without imitating any architecture.

Fused attention never forms its map, so maps are computed again from exactly what the layer passes to
`scaled_dot_product_attention`: its own q and k after q/k norm and rotary embedding, its own mask or relative position
bias and scale. A TorchFunctionMode sees that call whatever the architecture, so there is nothing to imitate, and
`map @ v` is compared with what the fused kernel gave, once per layer on one image. Who forms the whole map anyway may
leave `map @ v` in the product; the layer goes on with that, and the kernel need not compute it again. The two differ in
the last digits, so a pass has an `attend` that computes all products in this way, whether or not their maps are looked
at: what a layer gives must not depend on who is watching.

B images, H heads, N tokens, d width of a head.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sightline.core.errors import InputError

# Layers whose product was compared with the kernel's, and of which kind it was.
CHECKED: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


@dataclass(eq=False)
class AttentionProduct:
    """What an attention map is made of; `map()` makes it, `scores` the logits of some images only.

    >>> q, k = torch.zeros(2, 5, 4, 8)
    >>> product = AttentionProduct(q[None], k[None], None, 0.5)
    >>> tuple(product.shape), product.map()[0, 0, 0].tolist()
    ((1, 5, 4, 4), [0.25, 0.25, 0.25, 0.25])
    """

    q: Tensor  # (B, H, N, d), unscaled
    k: Tensor  # (B, H, N, d)
    bias: Tensor | None  # broadcasts to (B, H, N, N), −inf where a mask forbids
    scale: float
    v: Tensor | None = None  # (B, H, N, d)
    output: Tensor | None = None  # map() @ v (B, H, N, d), once somebody has computed it

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.q.shape[:-1], self.k.shape[-2]))

    def __getitem__(self, images: slice) -> AttentionProduct:
        """Of some of the images."""
        own = self.bias is not None and self.bias.ndim == 4 and len(self.bias) == len(self.q) > 1
        bias = self.bias[images] if own and self.bias is not None else self.bias
        v, output = (x if x is None else x[images] for x in (self.v, self.output))
        return AttentionProduct(self.q[images], self.k[images], bias, self.scale, v, output)

    def scores(self, prefix: int = 0) -> Tensor:
        """Logits q kᵀ · scale + bias (B, H, N, N), without the first `prefix` queries and keys."""
        q, k = self.q[..., prefix:, :].float(), self.k[..., prefix:, :].float()
        with torch.autocast(q.device.type, enabled=False):  # else the product would be rounded to bf16 again
            scores = (q * self.scale) @ k.transpose(-2, -1)
            if self.bias is None:
                return scores
            rows, columns = (prefix if n > 1 else 0 for n in self.bias.shape[-2:])  # a bias of one row is for all
            return scores + self.bias[..., rows:, columns:].float()

    def map(self) -> Tensor:
        """Attention probabilities (B, H, N, N), float32."""
        return self.scores().softmax(-1)


Attend = Callable[[AttentionProduct], Tensor | None]  # map @ v, or None where the layer's own kernel is to compute it


@dataclass
class AttentionLayer:
    """One attention layer that is watched."""

    module: nn.Module
    points: Mapping[str, str]  # q, k, v, attn_map, heads, qkv -> site
    see: Callable[[str, Any], None]
    attend: Attend | None = None
    linear: dict[str, Tensor] = field(default_factory=dict)
    called: bool = False

    @property
    def inside(self) -> bool:
        """Whether something of its product is to be seen."""
        return not self.points.keys() <= {"qkv"}

    def see_linear(self, weight: object, output: Tensor) -> None:
        """Keep the output of the layer's own q, k, v projections, whether or not their modules are called."""
        if "qkv" not in self.points:
            return
        for name in ("qkv", "q_proj", "k_proj", "v_proj"):
            projection = getattr(self.module, name, None)
            if projection is not None and weight is projection.weight:
                self.linear[name] = output

    def see_product(self, product: AttentionProduct, kernel: Callable[[], Tensor]) -> Tensor:
        """Hand out what was asked for of the product that the layer computes; gives what the layer goes on with."""
        if self.called and self.inside:
            raise self.unseen("computes more than one attention product")
        self.called = True
        for point, value in (("q", product.q), ("k", product.k), ("v", product.v), ("attn_map", product)):
            if point in self.points:
                self.see(self.points[point], value)
        if product.output is None and self.attend is not None:
            product.output = self.attend(product)
        if "attn_map" in self.points or product.output is not None:
            self.check(product, kernel)
        output = kernel() if product.output is None else product.output
        if "heads" in self.points:
            self.see(self.points["heads"], output)
        return output

    def check(self, product: AttentionProduct, kernel: Callable[[], Tensor]) -> None:
        """Compare the product with what the layer itself computes, once for each kind of it."""
        kind = (product.q.shape[1:], product.q.dtype, product.bias is None, product.output is None)
        if CHECKED.get(self.module) != kind:
            expected = kernel()
            compare(product[:1], expected[:1], self.points.get("attn_map", type(self.module).__name__))
            CHECKED[self.module] = kind

    def finish(self) -> None:
        """The layer has returned: hand out q, k and v side by side, complain if no product was seen."""
        if "qkv" in self.points and self.linear:
            parts = [self.linear[name] for name in ("qkv", "q_proj", "k_proj", "v_proj") if name in self.linear]
            # Only now, because a separate bias is added in place after the linear layer.
            self.see(self.points["qkv"], parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        elif "qkv" in self.points:
            raise self.unseen("does not use its q, k, v projections as linear layers")
        if not self.called and self.inside:
            raise self.unseen("does not compute its attention with scaled_dot_product_attention")
        self.forget()

    def forget(self) -> None:
        """Be ready for the next batch."""
        self.linear, self.called = {}, False

    def unseen(self, why: str) -> InputError:
        """What to say when the layer works in a way that cannot be looked into."""
        sites = " and ".join(repr(site) for site in self.points.values())
        return InputError(
            f"{sites} cannot be observed: {type(self.module).__name__} {why}; "
            "leave the attention sites out for this encoder"
        )


def compare(product: AttentionProduct, expected: Tensor, site: str) -> None:
    """Compare map times values with what the kernel gives; a wrong map must not become a number."""
    assert product.v is not None
    with torch.autocast(expected.device.type, enabled=False):
        ours = [product.map() @ product.v.float(), *([] if product.output is None else [product.output])]
    tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
    error = max((each - expected.float()).abs().max() for each in ours)
    if error > tolerance * expected.float().abs().max() + 1e-12:
        raise InputError(
            f"Site {site!r}: attention times values differs from the layer's own output by {error:.2g}, "
            "so the map would be wrong; leave the attention sites out for this encoder"
        )


class AttentionWatch(TorchFunctionMode):
    """Sees the calls that the attention layer being executed makes.

    It is in force only while such a layer runs: every other call of the pass would take microseconds longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[AttentionLayer] = []
        self.force = contextlib.ExitStack()

    def enter(self, layer: AttentionLayer) -> Callable[..., None]:
        """A hook for the beginning of a layer."""

        def before(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
            if not self.layers:
                self.force.enter_context(self)
            self.layers.append(layer)

        return before

    def close(self) -> None:
        """Be out of force, also where an interruption has left a layer in the middle."""
        self.layers.clear()
        self.force.close()

    def leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """A hook for its end."""
        layer = self.layers.pop()
        if not self.layers:
            self.force.close()
        if output is None:  # an exception passes through
            layer.forget()
        else:
            layer.finish()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.layers and func is F.scaled_dot_product_attention:
            return self.layers[-1].see_product(
                _product(*args, **kwargs), functools.cache(lambda: func(*args, **kwargs))
            )
        output = func(*args, **kwargs)
        if self.layers and func is F.linear:
            self.layers[-1].see_linear(args[1] if len(args) > 1 else kwargs["weight"], output)
        return output


def _product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionProduct:
    """The product that scaled_dot_product_attention is asked for."""
    if dropout_p:
        raise InputError("Attention maps need a model without attention dropout; call .eval() first")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, device=query.device).masked_fill(~attn_mask, -math.inf)
    return AttentionProduct(query, key, attn_mask, scale if scale is not None else query.shape[-1] ** -0.5, value)


@contextlib.contextmanager
def fused(module: nn.Module) -> Iterator[None]:
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


def without_fused_attention(module: nn.Module) -> None:
    """Let the layers of timm that have a choice compute attention as plain products and a softmax.

    In bfloat16 PyTorch's fused kernel for CPUs takes 1.6 to 5 times as long, there and back.
    """
    for layer in module.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False  # type: ignore[assignment]


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """PyTorch's own attention modules compute in another way while nobody looks into them: let them not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
