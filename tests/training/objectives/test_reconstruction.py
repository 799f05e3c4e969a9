"""What supervised training, MAE, FCMAE and SimMIM share: gradients, states, windows, settings, two processes."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import python_in_two
from support.reconstruction import BATCH, CONVNEXT, VIT, make, make_views, naive_mae, naive_window
from torch import Tensor

from sightline.core.errors import InputError
from sightline.encoders.modules.masking import enlarge, patchify
from sightline.encoders.modules.vit import embed, encode
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views, objective_named
from sightline.training.objectives import mae, simmim, supervised


@pytest.mark.parametrize("name", ["mae", "simmim"])
def test_registers_and_no_cls_shift_no_patch(name: str) -> None:
    backbone = replace(VIT, backbone="vit_betwixt_patch16_reg4_gap_256")
    objective, views = make(name, backbone), make_views()
    assert objective.backbone.num_prefix_tokens == 4
    assert objective.backbone.cls_token is None
    images = views.pixels[0]
    if name == "mae":
        latent, mask, ids_restore = objective.forward_encoder(images, views.random(16))
        assert latent.shape == (BATCH, 4 + 4, 16)
        expected = naive_mae(images, objective.forward_decoder(latent, ids_restore), mask, 4, norm=True)
    else:
        mask = enlarge(objective.random_mask(views.random(4)), (2, 2), 2).flatten(1)
        tokens = encode(objective.backbone, embed(objective.backbone, images, mask, objective.mask_token), (4, 4))
        error = (objective.head(tokens[:, 4:]) - patchify(images, 4)).abs()
        expected = error[mask].mean().item()
    assert objective(views)[0].item() == pytest.approx(expected, rel=1e-5)


ALL = [("supervised", VIT), ("mae", VIT), ("simmim", VIT), ("mae", CONVNEXT)]


def test_gradients_reach_all_of_fcmae_and_its_loss_falls() -> None:
    objective, views = make("mae", CONVNEXT), make_views(4, size=CONVNEXT.size)
    trained = {key: p for key, p in objective.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-3)
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        loss, scalars = objective(views)
        loss.backward()
        assert all(p.grad is not None for p in trained.values())  # DDP waits for each of them
        optimizer.step()
        objective.after_step(views.progress)
        losses.append(loss.item())
        assert all(value.ndim == 0 and not value.requires_grad for value in scalars.values())
    for key in ("stem.0.weight", "stages.3.blocks.1.mlp.fc2.weight"):
        assert objective.encoder.get_parameter(key).grad.abs().sum() > 0
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize(("name", "backbone"), ALL)
@pytest.mark.bf16
def test_bfloat16_changes_the_loss_little(name: str, backbone: Backbone) -> None:
    settings = {"norm_target": 5} if name == "simmim" else {}
    objective, views = make(name, backbone, **settings), make_views(4, size=backbone.size)
    loss, _ = objective(views)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = objective(views)
    rough.backward()
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(loss.item(), rel=0.02)


@pytest.mark.parametrize("name", ["supervised", "mae", "simmim"])
def test_each_file_declares_one_view_of_the_size_of_the_backbone(name: str) -> None:
    plugin = objective_named(name)
    (policy,) = plugin.views(plugin.Config(crop=(0.3, 0.9)), VIT)
    assert (policy.size, policy.crop, policy.flip, policy.jitter) == (16, (0.3, 0.9), 0.5, None)


@pytest.mark.parametrize("name", ["supervised", "simmim"])
def test_an_attention_window_counts_in_the_loss(name: str) -> None:
    windowed = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4, attention_window=3)
    objective, views = make(name, windowed), make_views()
    loss = objective(views)[0].item()
    assert loss != make(name)(views)[0].item()
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(1, 16, 2)
    vit = objective.backbone

    def plain(tokens: Tensor) -> Tensor:
        return naive_window(vit, tokens, grid.expand(BATCH, -1, -1), 3)

    if name == "supervised":
        logits = vit.forward_head(plain(embed(vit, views.pixels[0])))
        expected = F.cross_entropy(logits, views.labels, ignore_index=-1, label_smoothing=0.1)
    else:
        mask = objective.random_mask(views.random(4))
        hidden = enlarge(mask, (2, 2), 2).flatten(1)
        tokens = plain(embed(vit, views.pixels[0], hidden, objective.mask_token))[:, 1:]
        expected = objective.forward_loss(views.pixels[0], objective.head(tokens[hidden]), hidden)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: mae.MaeConfig(mask_ratio=1.0), "mask_ratio must be between 0 and 1"),
        (lambda: make("mae", decoder_width=10, decoder_heads=4), "A decoder_width of 10 cannot be split into 4"),
        (lambda: make("mae", decoder_heads=0), "choose heads that divide it"),
        (lambda: mae.MaeConfig(decoder_width=0), "decoder_width is 0, but the decoder needs at least 1"),
        (lambda: mae.MaeConfig(decoder_depth=0), "at least one block"),
        (lambda: simmim.SimmimConfig(mask_ratio=0.0), "mask_ratio must be between 0 and 1"),
        (lambda: simmim.SimmimConfig(mask_unit=0), "at least one pixel"),
        (lambda: simmim.SimmimConfig(norm_target=4), "norm_target is 4; it must be odd and at least 3, or 0"),
        (lambda: simmim.SimmimConfig(norm_target=-3), "norm_target is -3; it must be odd"),
        (lambda: supervised.SupervisedConfig(label_smoothing=1.0), r"must be in \[0, 1\)"),
        (lambda: supervised.SupervisedConfig(mixup=-1.0), "mixup is -1.0"),
        (lambda: supervised.views(supervised.SupervisedConfig(erase=2.0), VIT), "erase is a probability"),
        (lambda: make("mae", Backbone("resnet18", size=32)), "choose a ViT or a ConvNeXt-V2"),
        (lambda: make("simmim", Backbone("resnet18", size=32)), "choose a ViT"),
        (lambda: make("simmim", mask_unit=6), "choose from 4, 8, 16"),
        (lambda: make("simmim", mask_unit=16), "hides all of 1 unit of 16 pixels"),
        (lambda: make("mae", mask_ratio=0.95)(make_views()), "hides all of 16 patches of 4 pixels"),
        (lambda: make("mae", CONVNEXT)(make_views(size=20)), "choose a size that is a multiple"),
        (
            lambda: supervised.SupervisedObjective(build(VIT).module, supervised.SupervisedConfig()),
            "give images with labels",
        ),
    ],
)
def test_what_cannot_be_is_said(make_it: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_it()


SHARED = {"supervised": ("supervised", VIT), "mae": ("mae", VIT), "simmim": ("simmim", VIT), "fcmae": ("mae", CONVNEXT)}


def gradients(name: str, views: Views) -> dict[str, Tensor]:
    objective = make(*SHARED[name])
    loss, scalars = objective(views)
    loss.backward()
    found = {key: p.grad for key, p in objective.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach(), **scalars}


def one_of_two(folder: Path) -> None:
    """A process that has half of the batch; saves the mean over both of loss, scalars and gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name, (_, backbone) in SHARED.items():
        found = gradients(name, make_views(4, backbone.size, start=4 * rank + 1))
        for value in found.values():
            torch.distributed.all_reduce(value)
            value /= 2
        if rank == 0:
            torch.save(found, folder / name)
    torch.distributed.destroy_process_group()


def test_two_processes_with_half_of_the_batch_each_equal_one(tmp_path: Path) -> None:
    python_in_two(__file__, str(tmp_path))
    for name, (_, backbone) in SHARED.items():
        views = make_views(8, backbone.size, start=1)
        assert (views.labels[:4] >= 0).sum() != (views.labels[4:] >= 0).sum()  # or a wrong mean would be right
        expected = gradients(name, views)
        found = torch.load(tmp_path / name, weights_only=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
