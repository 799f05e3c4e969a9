"""BEiT: the loss against plain loops, blocks that are blocks, and a tokenizer that stays as it is."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.images.augment.policy import Policy
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views
from sightline.training.objectives.beit import ROUNDS, BeitConfig, BeitObjective, blockwise_masking, first, views
from sightline.training.objectives.beit.tokenizer import Tokenizer

TINY = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
CONFIG = BeitConfig(codes=32, tokenizer_width=8)
START = Progress(0, 10, 5)


def make(backbone: Backbone = TINY, config: BeitConfig = CONFIG) -> BeitObjective:
    torch.manual_seed(0)
    tokenizer = first(config, backbone).objective
    assert isinstance(tokenizer, Tokenizer)
    return BeitObjective(build(backbone).module, config, tokenizer)


def some_views(n: int = 6, which: slice = slice(None)) -> Views:
    pixels = torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    keys = np.arange(n, dtype=np.uint64)
    return Views([pixels[which]], torch.zeros(n, dtype=torch.int64)[which], keys[which], START)


def noise_of(n: int, start: int = 0) -> Tensor:
    blank = Views([], torch.zeros(n), np.arange(start, start + n, dtype=np.uint64), START)
    return blank.random(4 * ROUNDS).view(n, ROUNDS, 4)


# Masks


@pytest.mark.parametrize(
    ("grid", "hidden", "smallest"),
    [((14, 14), 79, 16), ((6, 6), 15, 3), ((3, 7), 20, 2), ((1, 5), 2, 1), ((2, 2), 1, 1)],
)
def test_every_image_hides_the_same_number_of_patches(grid: tuple[int, int], hidden: int, smallest: int) -> None:
    mask = blockwise_masking(noise_of(64), grid, hidden, smallest, 0.3)
    assert mask.shape == (64, math.prod(grid))
    assert mask.sum(1).tolist() == [hidden] * 64


def test_masks_are_those_of_plain_loops() -> None:
    """One image after the other, with a set of places."""
    noise = noise_of(40).double()
    masks = blockwise_masking(noise, (14, 14), 79, 16, 0.3).view(-1, 14, 14)
    for image, mask in zip(noise.tolist(), masks, strict=True):
        places: list[tuple[int, int]] = []
        for area, aspect, top, left in image:
            area = 16 + area * max(0, 79 - len(places) - 16)
            aspect = math.exp(math.log(0.3) + aspect * (math.log(1 / 0.3) - math.log(0.3)))
            height, width = round(math.sqrt(area / aspect) * aspect), round(math.sqrt(area / aspect))
            if height >= 14 or width >= 14:
                continue
            top, left = int(top * (14 - height + 1)), int(left * (14 - width + 1))
            block = [(r, c) for r in range(top, top + height) for c in range(left, left + width)]
            places += [place for place in block if place not in places][: 79 - len(places)]
        assert sorted(places) == [tuple(place) for place in mask.nonzero().tolist()]


def test_hidden_patches_cover_the_grid_and_hang_together() -> None:
    mask = blockwise_masking(noise_of(2000), (14, 14), 79, 16, 0.3)
    scattered = torch.rand(2000, 196, generator=torch.Generator().manual_seed(0)).argsort(1) < 79
    # Pairs of neighbours of which both are hidden; among 2 · 13 · 14 pairs, if patches are drawn alone, p ≈ (79/196)².
    chance = 364 * 79 / 196 * 78 / 195
    assert _neighbours(scattered) == pytest.approx(chance, rel=0.02)
    # What the authors' procedure gives, which rejects blocks where ours cuts them (mean of 4000 masks).
    assert _neighbours(mask) == pytest.approx(132.7, rel=0.02)
    # Blocks that lie within the grid reach its middle more often than its corners; there 0.757 and 0.041.
    share = mask.float().mean(0).view(14, 14)
    assert float(share.max()) == pytest.approx(0.757, abs=0.03)
    assert float(share.min()) == pytest.approx(0.041, abs=0.02)
    assert torch.allclose(share, share.flip(1), atol=0.08)


def _neighbours(mask: Tensor) -> float:
    grid = mask.view(-1, 14, 14)
    return float(((grid[:, 1:] & grid[:, :-1]).sum() + (grid[:, :, 1:] & grid[:, :, :-1]).sum()) / len(grid))


def test_the_mask_of_an_image_is_its_own() -> None:
    masks = blockwise_masking(noise_of(8), (6, 6), 15, 3, 0.3)
    assert torch.equal(masks[3:5], blockwise_masking(noise_of(2, start=3), (6, 6), 15, 3, 0.3))
    assert len(masks.unique(dim=0)) == 8


# The objective


def test_the_loss_is_that_of_plain_loops() -> None:
    objective, given = make(), some_views()
    loss, scalars = objective(given)
    tokens = objective.tokenizer.encode(given.pixels[0])
    mask = objective.block_mask(given.pixels[0], given)
    assert mask.sum(1).tolist() == [math.ceil(0.4 * 16)] * 6

    vit = objective.double().backbone
    images = given.pixels[0].double()
    terms, right = [], []
    for image in range(6):
        patches = vit.patch_embed(images[image : image + 1])
        for n in range(16):
            if mask[image, n]:
                patches[0, n] = objective.mask_token[0, 0]
        x = vit.norm(vit.blocks(torch.cat([vit.cls_token, patches], 1) + vit.pos_embed))[0, 1:]
        for n in range(16):
            if mask[image, n]:
                scores = (objective.head.weight @ x[n] + objective.head.bias).tolist()
                truth = int(tokens[image, n])
                terms.append(math.log(sum(math.exp(s) for s in scores)) - scores[truth])
                right.append(scores.index(max(scores)) == truth)
    assert float(loss.detach()) == pytest.approx(np.mean(terms), abs=1e-5)
    assert float(scalars["accuracy"]) == pytest.approx(np.mean(right), abs=1e-6)


def test_training_leaves_the_tokenizer_alone() -> None:
    objective, given = make(), some_views(16)
    objective.train()
    assert objective.backbone.training
    assert not any(part.training for part in objective.tokenizer.modules())
    before = {name: value.clone() for name, value in objective.tokenizer.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=3e-3)
    loss, _ = objective(given)
    assert loss.item() == pytest.approx(math.log(32), abs=0.2)
    loss.backward()
    optimizer.step()
    objective.after_step(START)
    assert all(torch.equal(value, before[name]) for name, value in objective.tokenizer.state_dict().items())


def test_what_comes_first_is_a_tokenizer_of_the_same_patches() -> None:
    plan = first(BeitConfig(codes=64), Backbone("vit_base_patch32_224"))
    assert isinstance(plan.objective, Tokenizer)
    assert (plan.name, plan.objective.patch, plan.objective.codes) == ("tokenizer", 32, 64)
    assert plan.views == views(BeitConfig(), Backbone("vit_base_patch32_224")) == (Policy(224, (0.2, 1.0)),)
    assert first(CONFIG, TINY).objective.patch == 4


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="resnet18 is not one; choose a ViT"):
        first(CONFIG, Backbone("resnet18", size=32))
    with pytest.raises(InputError, match="choose from 4, 8, 16, 32"):
        first(CONFIG, Backbone("vit", size=28, patch=14))
    with pytest.raises(InputError, match="ResNet is not one; choose a ViT"):
        BeitObjective(build(Backbone("resnet18", size=32)).module, CONFIG, Tokenizer(4, 32, 8))
    with pytest.raises(InputError, match="8 pixels and the backbone of 4"):
        BeitObjective(build(TINY).module, CONFIG, Tokenizer(8, 32, 8))
    for wrong in ({"mask_ratio": 1.0}, {"min_block": 0}, {"min_aspect": 0.0}, {"tokenizer_epochs": 0.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            BeitConfig(**wrong)


def _share(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    objective = make()
    loss, _ = objective(some_views(which=slice(rank, None, 2)))
    loss.backward()
    mean = {name: p.grad / 2 for name, p in objective.named_parameters() if p.grad is not None}
    for value in mean.values():
        dist.all_reduce(value)
    torch.save((loss.detach(), mean), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_have_the_mean_gradient_of_one(tmp_path: Path) -> None:
    mp.start_processes(_share, (str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
    objective = make()
    loss, _ = objective(some_views())
    loss.backward()
    (one, gradients), (two, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert float((one + two) / 2) == pytest.approx(float(loss.detach()), abs=1e-6)
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
