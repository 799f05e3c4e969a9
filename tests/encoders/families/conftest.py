"""What is checked of every family in the same way.

B images, N tokens, D width, H heads.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.watching import capture, watch


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True))


def look(encoder: Encoder, images: Tensor, *sites: str) -> dict[str, Tensor]:
    with torch.no_grad(), capture(encoder, sites or ["**"]) as activations:
        encoder(images)
    return activations


def assert_no_hooks(module: nn.Module) -> None:
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def shake(module: nn.Module, seed: int = 0) -> None:
    """Make every weight matter: many start at 0, 1 or 1e-5, and would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator)
            value += 0.5 * noise.abs() if name.endswith("running_var") else 0.1 * noise


class Checks:
    """Contracts of families, for tests to call."""

    look, close, same, shake = staticmethod(look), staticmethod(close), staticmethod(same), staticmethod(shake)

    @staticmethod
    def load(what: str | nn.Module) -> tuple[Encoder, Tensor]:
        """An encoder with weights that all matter, and images for it."""
        encoder = load_encoder(what)
        shake(encoder.module)
        return encoder, Checks.images(encoder)

    @staticmethod
    def images(encoder: Encoder, count: int = 2) -> Tensor:
        return torch.randn(count, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(1))

    @staticmethod
    @torch.no_grad()
    def looking_changes_nothing(encoder: Encoder, images: Tensor) -> None:
        before = encoder(images)
        with capture(encoder, ["**"]) as activations:
            during = encoder(images)
        assert set(activations) == set(encoder.sites)
        assert all(value.isfinite().all() for value in activations.values())
        assert_no_hooks(encoder.module)
        assert same(before, during)
        assert same(before, encoder(images))

    @staticmethod
    @torch.no_grad()
    def an_exception_leaves_nothing_behind(encoder: Encoder, images: Tensor) -> None:
        before = encoder(images)
        last = encoder.sites[f"block.{encoder.depth - 1}"].module

        def fail(*_: Any) -> None:
            raise RuntimeError("in the middle")

        inner = [part for part in last.modules() if not list(part.children())][-1]
        handle = inner.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"), capture(encoder, ["**"]):
            encoder(images)
        handle.remove()
        assert_no_hooks(encoder.module)
        assert same(before, encoder(images))

    @staticmethod
    @torch.no_grad()
    def sites_are_in_order_of_computation(encoder: Encoder, images: Tensor) -> None:
        seen: list[str] = []
        with watch(encoder.sites, list(encoder.sites), lambda site, _: seen.append(site)):
            encoder(images)
        late = {f"block.{number}.qkv" for number in range(encoder.depth)}  # handed out when the layer returns
        assert [site for site in seen if site not in late] == [site for site in encoder.sites if site not in late]
        assert len(seen) == len(encoder.sites)

    @staticmethod
    def all_of_it(encoder: Encoder, images: Tensor) -> None:
        Checks.looking_changes_nothing(encoder, images)
        Checks.an_exception_leaves_nothing_behind(encoder, images)
        Checks.sites_are_in_order_of_computation(encoder, images)

    @staticmethod
    @torch.no_grad()
    def attention_explains_the_layer(encoder: Encoder, images: Tensor, inner: Mapping[str, str]) -> None:
        """Rows sum to one, and map @ v through the layer's own output layers is what the layer gives."""
        acts = look(encoder, images)
        assert encoder.tokens is not None
        for number in range(encoder.depth):
            site = f"block.{number}"
            attention, v = acts[f"{site}.attn_map"], acts[f"{site}.v"]
            assert attention.shape == (len(images), encoder.heads, encoder.tokens.count, encoder.tokens.count)
            assert attention.min() >= 0
            close(attention.sum(-1), torch.ones_like(attention[..., 0]))
            layer = encoder.sites[f"{site}.attn_map"].module
            close(attention @ v, acts[f"{site}.heads"])
            mixed = acts[f"{site}.heads"].transpose(1, 2).flatten(2)  # (B, N, D)
            if getattr(layer, "norm", None) is not None:
                mixed = layer.norm(mixed)
            if getattr(layer, "gate", None) is not None:
                mixed = mixed * layer.gate(acts[f"{site}.norm1"]).sigmoid()
            close(layer.get_submodule(inner["proj"])(mixed), acts[f"{site}.attn"], 2e-5)

    @staticmethod
    @torch.no_grad()
    def the_stream_adds_up(encoder: Encoder, images: Tensor, scale: Callable[[nn.Module, int, Tensor], Tensor]) -> None:
        """mid = input + scale₁(attention), block = mid + scale₂(MLP)."""
        acts = look(encoder, images)
        stream = acts["embed"]
        for number in range(encoder.depth):
            site = f"block.{number}"
            block = encoder.sites[site].module
            close(stream + scale(block, 1, acts[f"{site}.attn"]), acts[f"{site}.mid"])
            close(acts[f"{site}.mid"] + scale(block, 2, acts[f"{site}.mlp"]), acts[site])
            stream = acts[site]

    @staticmethod
    @torch.no_grad()
    def qkv_is_split_into_heads(encoder: Encoder, images: Tensor) -> None:
        """Without q/k norm and rotary embedding, q, k and v are the parts of qkv."""
        acts = look(encoder, images)
        for number in range(encoder.depth):
            q, k, v = acts[f"block.{number}.qkv"].chunk(3, -1)
            for point, value in (("q", q), ("k", k), ("v", v)):
                heads = value.unflatten(-1, (encoder.heads, -1)).transpose(1, 2)
                assert torch.equal(acts[f"block.{number}.{point}"], heads)


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
