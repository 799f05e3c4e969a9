"""Mixup and CutMix against loops over pixels and labels, and the distribution of what is drawn."""

import numpy as np
import pytest
import torch

from sightline.images.augment.mixup import Mix, draw_mix, mix_pixels, mixed_targets, partners

SIZE = (6, 8)


def images(n: int = 4) -> torch.Tensor:
    return torch.rand(n, 3, *SIZE, generator=torch.Generator().manual_seed(0))


def test_mixup_is_a_weighted_sum_with_the_neighbour() -> None:
    x = images()
    mixed = mix_pixels(x, Mix(0.3))
    for i, other in enumerate([1, 0, 3, 2]):
        torch.testing.assert_close(mixed[i], 0.3 * x[i] + 0.7 * x[other])


def test_cutmix_puts_a_box_of_the_neighbour_into_the_image() -> None:
    x = images()
    before = x.clone()
    mixed = mix_pixels(x, Mix(0.75, (slice(1, 4), slice(2, 6))))
    assert torch.equal(x, before)
    for i, other in enumerate([1, 0, 3, 2]):
        for row in range(6):
            for column in range(8):
                inside = 1 <= row < 4 and 2 <= column < 6
                assert torch.equal(mixed[i, :, row, column], x[other if inside else i, :, row, column])


@pytest.mark.parametrize("mix", [None, Mix(0.3), Mix(0.75, (slice(0, 3), slice(0, 4)))])
def test_targets_are_smoothed_and_mixed(mix: Mix | None) -> None:
    labels, smoothing, share = [2, 0, 1, -1], 0.1, 1.0 if mix is None else mix.share

    def plain(label: int) -> list[float]:
        return [0.0] * 5 if label < 0 else [0.1 / 5 + (0.9 if k == label else 0.0) for k in range(5)]

    found = mixed_targets(torch.tensor(labels), 5, smoothing, mix)
    for i, other in enumerate([1, 0, 3, 2]):
        expected = [share * a + (1 - share) * b for a, b in zip(plain(labels[i]), plain(labels[other]), strict=True)]
        assert found[i].tolist() == pytest.approx(expected, abs=1e-6)


def test_partners_are_mutual_and_stay_within_even_shares() -> None:
    x = torch.arange(12)
    assert torch.equal(partners(partners(x)), x)
    assert torch.equal(partners(x), torch.cat([partners(x[:4]), partners(x[4:10]), partners(x[10:])]))


def test_a_mix_depends_on_seed_and_step_alone() -> None:
    drawn = [draw_mix(0.8, 1.0, (32, 32), seed, step) for seed in (0, 1) for step in range(50)]
    assert drawn == [draw_mix(0.8, 1.0, (32, 32), seed, step) for seed in (0, 1) for step in range(50)]
    assert len(set(map(str, drawn))) == 100


def test_a_coin_decides_between_the_two() -> None:
    drawn = [draw_mix(0.8, 1.0, (32, 32), 0, step) for step in range(2000)]
    cut = [mix for mix in drawn if mix is not None and mix.box is not None]
    assert len(cut) == pytest.approx(1000, abs=4 * 500**0.5)
    assert all(mix is not None and mix.box is None for mix in (draw_mix(0.8, 0.0, (32, 32), 0, s) for s in range(20)))
    assert all(
        mix is not None and mix.box is not None for mix in (draw_mix(0.0, 1.0, (32, 32), 0, s) for s in range(20))
    )


def test_shares_of_mixup_are_beta_distributed() -> None:
    from scipy import stats

    shares = [mix.share for mix in (draw_mix(0.8, 0.0, (32, 32), 1, step) for step in range(2000)) if mix is not None]
    assert stats.kstest(shares, stats.beta(0.8, 0.8).cdf).pvalue > 0.01


def test_the_share_of_cutmix_is_what_the_box_leaves() -> None:
    boxes = [mix for mix in (draw_mix(0.0, 1.0, (30, 20), 2, step) for step in range(500)) if mix is not None]
    for share, box in boxes:
        assert box is not None
        rows, columns = box
        assert 0 <= rows.start <= rows.stop <= 30
        assert 0 <= columns.start <= columns.stop <= 20
        covered = np.zeros((30, 20), bool)
        covered[rows, columns] = True
        assert share == pytest.approx(1 - covered.mean())
    assert np.mean([share for share, _ in boxes]) > 0.5  # boxes are cut off at the borders
