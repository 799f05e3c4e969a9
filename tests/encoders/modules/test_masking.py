"""Patches, masks and mask units, against plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from sightline.core.keyed_random import uniform
from sightline.encoders.modules.masking import enlarge, norm_pix, patchify, random_masking, restore, unpatchify
from sightline.training.backbones import freeze_head


def test_a_patch_vector_goes_through_rows_then_columns_then_channels() -> None:
    images = torch.rand(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    for n in range(6):
        row, column = n // 3, n % 3
        for i in range(4):
            for j in range(4):
                for c in range(3):
                    value = images[:, c, 4 * row + i, 4 * column + j]
                    assert torch.equal(patches[:, n, (i * 4 + j) * 3 + c], value)


def test_unpatchify_undoes_patchify_on_a_grid_that_is_not_square() -> None:
    images = torch.rand(3, 3, 6, 15)
    assert torch.equal(unpatchify(patchify(images, 3), (2, 5)), images)


def test_norm_pix_uses_the_unbiased_variance_of_all_pixels_of_a_patch() -> None:
    patches = torch.rand(2, 3, 12) * 5
    t = patches.double().numpy()
    expected = (t - t.mean(-1, keepdims=True)) / np.sqrt(t.var(-1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm_pix(patches).numpy(), expected, atol=1e-5)
    assert torch.equal(
        norm_pix(torch.ones(1, 1, 12)), torch.zeros(1, 1, 12)
    )  # a patch of one colour is no division by 0


def test_random_masking_keeps_the_smallest_noise_in_its_order() -> None:
    noise = torch.rand(5, 16)
    ids_keep, ids_restore, mask = random_masking(noise, 4)
    for b in range(5):
        order = sorted(range(16), key=lambda n: float(noise[b, n]))
        assert ids_keep[b].tolist() == order[:4]
        assert [order[place] for place in ids_restore[b]] == list(range(16))
        assert mask[b].tolist() == [n not in order[:4] for n in range(16)]


def test_every_patch_is_hidden_equally_often_and_independently_of_the_others() -> None:
    n, kept, draws = 9, 3, 20_000
    noise = torch.from_numpy(uniform(np.arange(draws, dtype=np.uint64), n)).float()
    hidden = random_masking(noise, kept)[2].double()
    assert (hidden.sum(1) == n - kept).all()
    p, pair = 6 / 9, 6 / 9 * 5 / 8  # without replacement
    assert (hidden.mean(0) - p).abs().max() < 5 * math.sqrt(p * (1 - p) / draws)
    both = (hidden.T @ hidden / draws)[~torch.eye(n, dtype=torch.bool)]
    assert (both - pair).abs().max() < 5 * math.sqrt(pair * (1 - pair) / draws)


def test_restore_puts_tokens_in_their_places_and_mask_tokens_elsewhere() -> None:
    tokens, mask_token = torch.rand(4, 10, 3), torch.rand(1, 1, 3)
    ids_keep, ids_restore, mask = random_masking(torch.rand(4, 10), 3)
    visible = torch.stack([tokens[b, ids_keep[b]] for b in range(4)])
    expected = torch.where(mask.unsqueeze(-1), mask_token, tokens)
    assert torch.equal(restore(visible, mask_token, ids_restore), expected)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_unit_covers_a_square(factor: int) -> None:
    mask = torch.rand(2, 6) < 0.5
    large = enlarge(mask, (2, 3), factor)
    assert large.shape == (2, 2 * factor, 3 * factor)
    for y in range(2 * factor):
        for x in range(3 * factor):
            assert torch.equal(large[:, y, x], mask[:, (y // factor) * 3 + x // factor])


def test_freeze_head_leaves_all_else_trainable() -> None:
    module = nn.ModuleDict({"blocks": nn.Linear(2, 2), "fc_norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    for name, part in module.items():
        setattr(module, name, part)
    freeze_head(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {"blocks.weight", "blocks.bias"}
