"""Which images a step sees, and that their views depend on nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.core.errors import InputError
from sightline.core.keyed_random import fold, id_keys
from sightline.images.augment.crops import boxes, flips
from sightline.images.augment.policies import moco_v3
from sightline.images.augment.policy import Policy
from sightline.images.loading import load_images
from sightline.images.sets import Images, Item
from sightline.images.targets import move
from sightline.training import feed as feeding
from sightline.training.feed import Feed, Order, check_batch
from sightline.training.objective import Views

N, BATCH, EPOCHS = 44, 8, 2
POLICIES = (*moco_v3(12, crop=(0.3, 1.0)), Policy(8, flip=0.0))
PLAIN = (Policy(12, crop=None, flip=0.0),)  # the image itself
STD = (0.25, 0.5, 0.2)


def make_images(sizes: Sequence[tuple[int, int]] = ((12, 12),)) -> Images:
    """Every image has a grey of its own, which is also its label."""
    chance = np.random.default_rng(0)
    pixels = [
        np.clip(5 * i + chance.integers(0, 3, (*sizes[i % len(sizes)], 3)), 0, 255).astype(np.uint8) for i in range(N)
    ]
    images = load_images(pixels, labels=np.arange(N), splits={"train": range(N)})
    return replace(images, in_memory=False)  # so that workers are used


@dataclass(frozen=True)
class Broken:
    """A source of which some images cannot be read."""

    source: Any
    bad: frozenset[int]

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [
            Item(None, f"damaged {i}") if i in self.bad else item
            for i, item in zip(indices, self.source.read(indices), strict=True)
        ]


def broken(images: Images, *bad: int) -> Images:
    return replace(images, source=Broken(images.source, frozenset(bad)))


def make(images: Images, policies: Sequence[Policy] = POLICIES, **more: Any) -> Feed:
    settings: dict[str, Any] = {"batch": BATCH, "epochs": EPOCHS, "workers": 0, "std": STD}
    return Feed(images, policies, **settings | more)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "RESIDENT", 0)


@pytest.fixture(params=[10**9, 0], ids=["resident", "streamed"])
def _either(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Images decoded once, or in every epoch."""
    monkeypatch.setattr(feeding, "RESIDENT", request.param)


def as_process(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(feeding, "rank", lambda: rank)
    monkeypatch.setattr(feeding, "world", lambda: world)


def assert_same(one: Views, other: Views, atol: float = 0.0) -> None:
    assert len(one.pixels) == len(other.pixels)
    for mine, theirs in zip(one.pixels, other.pixels, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    assert torch.equal(one.labels, other.labels)
    assert np.array_equal(one.keys, other.keys)
    assert one.progress == other.progress


def joined(parts: Sequence[Views]) -> Views:
    pixels = [torch.cat(views) for views in zip(*(part.pixels for part in parts), strict=True)]
    labels = torch.cat([part.labels for part in parts])
    return Views(pixels, labels, np.concatenate([part.keys for part in parts]), parts[0].progress)


def grey(views: Views) -> list[int]:
    """Which image each row shows, told by its grey."""
    mean, std = torch.tensor(feeding.IMAGENET_MEAN), torch.tensor(STD)  # type: ignore[attr-defined]
    shade = (views.pixels[0] * std.view(1, 3, 1, 1) + mean.view(1, 3, 1, 1)).mean((1, 2, 3)) * 255
    return [round(value) for value in ((shade - 1) / 5).tolist()]


def order(seed: int = 0, n: int = N) -> Order:
    return Order(id_keys(np.array([f"{i:06d}" for i in range(n)])), BATCH, seed)


def epoch_of(made: Order, epoch: int) -> list[int]:
    steps = range(epoch * made.per_epoch, (epoch + 1) * made.per_epoch)
    return [int(i) for step in steps for i in made.at(step)[0]]


def test_an_epoch_sees_every_image_once() -> None:
    made = order(n=48)
    assert made.per_epoch == 6
    for epoch in range(3):
        assert sorted(epoch_of(made, epoch)) == list(range(48))


def test_the_last_incomplete_batch_is_dropped() -> None:
    made = order()
    assert made.per_epoch == 5
    seen = [epoch_of(made, epoch) for epoch in range(12)]
    assert all(len(set(epoch)) == len(epoch) == 40 for epoch in seen)
    assert {i for epoch in seen for i in epoch} == set(range(N))  # others each time, so that all have their turn


def test_orders_differ_between_epochs_and_seeds() -> None:
    found = [epoch_of(order(seed), epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(epoch) for epoch in found}) == 6
    assert found[0] != sorted(found[0])
    assert [epoch_of(order(0), epoch) for epoch in (0, 1, 2)] == found[:3]


def test_an_order_can_be_asked_anywhere() -> None:
    forth = [order().at(step) for step in range(12)]
    made = order()
    for step in reversed(range(12)):
        numbers, keys = made.at(step)
        assert np.array_equal(numbers, forth[step][0])
        assert np.array_equal(keys, forth[step][1])


def test_keys_are_others_in_each_epoch_and_for_each_seed() -> None:
    keys = [order(seed).at(step)[1] for seed in (0, 1) for step in range(10)]
    assert len(np.unique(np.concatenate(keys))) == 2 * 10 * BATCH


def test_steps_and_shapes() -> None:
    feed = make(make_images())
    assert feed.resident is not None
    steps = list(feed.views())
    assert len(steps) == feed.steps == 10
    for number, (views,) in enumerate(steps):
        assert [tuple(view.shape) for view in views.pixels] == [(8, 3, 12, 12), (8, 3, 12, 12), (8, 3, 8, 8)]
        assert all(view.dtype == torch.float32 for view in views.pixels)
        assert (views.progress.step, views.progress.steps, views.progress.per_epoch) == (number, 10, 5)
    assert make(make_images(), epochs=0.5).steps == 2
    assert make(make_images(), epochs=0.01).steps == 1


def test_pixels_are_normalised() -> None:
    images = make_images()
    feed = make(images, PLAIN)
    (views,) = next(feed.views())
    for row, number in enumerate(feed.order.at(0)[0]):
        raw = images.source.read([int(number)])[0].image
        assert raw is not None
        expected = (raw / 255 - np.array(feeding.IMAGENET_MEAN)) / np.array(STD)  # type: ignore[attr-defined]
        np.testing.assert_allclose(views.pixels[0][row].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_too_few_readable_images_are_a_sentence(tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"no picture")
    images = load_images(f"folder:{tmp_path}")
    images = replace(images, splits={"train": np.arange(4)})
    with pytest.raises(InputError, match="has 3 images to train on, fewer than one batch of 4"):
        Feed(images, (Policy(8),), batch=4, epochs=1, workers=0)


def test_the_number_of_processes_decides_nothing_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "RESIDENT", make(make_images(), PLAIN).resident.numel())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert make(make_images(), PLAIN).resident is not None


@pytest.mark.usefixtures("_either")
def test_labels_are_those_of_the_images() -> None:
    for (views,) in make(make_images(), PLAIN).views():
        assert grey(views) == views.labels.tolist()


def differences(low: int, high: int, interpolation: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Of streamed from resident views, in levels of 8 bits, on noise from low to high."""
    pixels = np.random.default_rng(2).integers(low, high + 1, (N, 12, 12, 3), np.uint8)
    images = load_images(pixels, splits={"train": range(N)})
    made = []
    for resident in (10**9, 0):
        monkeypatch.setattr(feeding, "RESIDENT", resident)
        feed = make(images, (Policy(12, crop=(0.3, 1.0), interpolation=interpolation),))
        assert (feed.resident is None) == (resident == 0)
        made.append([views for (views,) in feed.views()])
    for one, other in zip(*made, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert torch.equal(one.labels, other.labels)
        assert one.progress == other.progress
    resident_views, streamed_views = (torch.cat([views.pixels[0] for views in steps]) for steps in made)
    return ((streamed_views - resident_views) * torch.tensor(STD).view(1, 3, 1, 1) * 255).abs().numpy()


def test_streamed_views_are_resident_ones_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops in workers are rounded to 8 bits after each of two passes: ½ Σ|w| + ½ levels, cubic Σ|w| ≤ 1.25."""
    assert differences(0, 255, "bilinear", monkeypatch).max() <= 1.01
    assert differences(100, 155, "bicubic", monkeypatch).max() <= 1.14


def test_cubic_overshoot_is_clipped_between_the_passes_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise from black to white is the worst case: one pixel in a hundred differs by more than the rounding."""
    found = differences(0, 255, "bicubic", monkeypatch)
    assert (found > 1.14).mean() < 0.03
    assert found.max() < 32


@pytest.mark.usefixtures("_either")
def test_workers_change_nothing() -> None:
    for one, other in zip(make(make_images()).views(), make(make_images(), workers=2).views(), strict=True):
        assert_same(one[0], other[0])


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("start", [1, 5, 9, 10])
def test_a_later_start_gives_the_same_views(start: int) -> None:
    whole = list(make(make_images()).views())[start:]
    later = list(make(make_images()).views(start))
    assert len(later) == 10 - start
    for one, other in zip(whole, later, strict=True):
        assert_same(one[0], other[0])


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 4), (2, 2), (4, 2)])
def test_processes_and_forwards_share_the_batch(world: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [views for (views,) in make(make_images()).views()]
    shares = []
    for rank in range(world):
        as_process(monkeypatch, rank, world)
        shares.append(list(make(make_images(), accumulate=accumulate).views()))
    for step, views in enumerate(whole):
        parts = [shares[rank][step][part] for part in range(accumulate) for rank in range(world)]
        assert {len(part.labels) for part in parts} == {BATCH // world // accumulate}
        assert_same(joined(parts), views, atol=1e-6)


@pytest.mark.usefixtures("streamed")
def test_worker_processes_know_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(monkeypatch, 1, 2)
    alone, with_workers = (make(make_images(), accumulate=2, workers=workers).views() for workers in (0, 2))
    for one, other in zip(alone, with_workers, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)


def test_views_differ_from_each_other_and_between_epochs() -> None:
    policies = (Policy(12, crop=(0.2, 0.6)),) * 2
    chance = np.random.default_rng(1)
    images = load_images(chance.integers(0, 256, (N, 24, 24, 3), np.uint8), splits={"train": range(N)})
    feed = make(images, policies, epochs=3)
    seen: dict[int, list[torch.Tensor]] = {}
    for step, (views,) in enumerate(feed.views()):
        for row, number in enumerate(feed.order.at(step)[0].tolist()):
            seen.setdefault(number, []).extend(view[row] for view in views.pixels)
    assert max(map(len, seen.values())) == 6
    for made in seen.values():
        assert all(not torch.equal(a, b) for i, a in enumerate(made) for b in made[:i])
    other = next(make(images, policies, seed=1).views())[0]
    assert not torch.equal(other.pixels[0], next(feed.views())[0].pixels[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_left_out_when_resident(workers: int) -> None:
    feed = make(broken(make_images(), 0, 17, 43), PLAIN, epochs=3, workers=workers)
    assert feed.resident is not None
    assert feed.skipped == {"000000": "damaged 0", "000017": "damaged 17", "000043": "damaged 43"}
    assert feed.order.per_epoch == 5
    assert len(feed.resident) == N - 3
    shown = set()
    for (views,) in feed.views():
        assert grey(views) == views.labels.tolist()
        shown |= set(grey(views))
    assert not shown & {0, 17, 43}


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_replaced_when_streamed(workers: int) -> None:
    feed = make(broken(make_images(), 3, 17, 30), PLAIN, epochs=4, workers=workers)
    replaced = 0
    for step, (views,) in enumerate(feed.views()):
        wanted, shown = feed.order.at(step)[0].tolist(), grey(views)
        good = [number not in (3, 17, 30) for number in wanted]
        for row, number in enumerate(wanted):
            following = next(i % BATCH for i in range(row, row + BATCH) if good[i % BATCH])
            assert shown[row] == wanted[following]
            replaced += shown[row] != number
    assert replaced
    assert feed.skipped == {"000003": "damaged 3", "000017": "damaged 17", "000030": "damaged 30"}


@pytest.mark.usefixtures("streamed")
def test_an_image_in_the_place_of_another_keeps_its_own_label() -> None:
    for (views,) in make(broken(make_images(), 3, 17, 30), PLAIN).views():
        assert grey(views) == views.labels.tolist()


@pytest.mark.usefixtures("_either")
def test_strict_images_are_not_skipped() -> None:
    images = replace(broken(make_images(), 3), strict=True)
    with pytest.raises(InputError, match=r"000003.*damaged 3"):
        list(make(images, PLAIN).views())


@pytest.mark.usefixtures("streamed")
def test_a_batch_without_any_image_is_a_sentence() -> None:
    with pytest.raises(InputError, match="None of 8 images of a batch can be read, the first because: damaged"):
        next(make(broken(make_images(), *range(N))).views())


@pytest.mark.parametrize("sizes", [[(12, 12), (20, 14)], [*[(12, 12)] * 8, (9, 30)]])
def test_images_of_different_sizes_stream(sizes: list[tuple[int, int]]) -> None:
    feed = make(make_images(sizes), PLAIN)
    assert feed.resident is None
    assert feed.skipped == {}
    for (views,) in feed.views():
        assert views.pixels[0].shape == (8, 3, 12, 12)
        assert grey(views) == views.labels.tolist()


def test_too_few_images_are_a_sentence() -> None:
    with pytest.raises(InputError, match=r"44 images to train on, fewer than one batch of 64; .*--batch 22"):
        make(make_images(), batch=64)
    with pytest.raises(InputError, match="has no split 'train'"):
        make(replace(make_images(), splits={"test": np.arange(N)}))


def test_an_objective_that_compares_images_gets_several_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    images = make_images()
    with pytest.raises(
        InputError,
        match=r"A batch of 4 images in 4 forwards leaves 1 image to each, .* needs 2 or more; "
        "raise it with --batch 8, or lower accumulate",
    ):
        make(images, batch=4, accumulate=4, fewest=2)
    with pytest.raises(InputError, match=r"1 image in 1 forward leaves 1 image to each, .* --batch 2$"):
        make(images, batch=1, fewest=2)
    make(images, batch=4, accumulate=4)
    make(images, batch=8, accumulate=4, fewest=2)
    as_process(monkeypatch, 0, 2)  # they compare with the images of each other, and normalise over them
    assert check_batch(images, 44, 8, 4, fewest=2) == 1


@pytest.mark.parametrize(
    ("n", "settings", "advice"),
    [
        (3, (4, 1, 1), "lower it with --batch 1"),
        (3, (4, 1, 2), "lower it with --batch 2"),
        (1, (4, 1, 2), "give 2 or more"),
        (11, (16, 4, 1), "lower it with --batch 4"),  # of four forwards with as many images
        (11, (16, 4, 2), "lower it with --batch 8"),
        (7, (16, 4, 2), "give 8 or more, or lower accumulate"),
    ],
)
def test_a_smaller_batch_is_advised_where_there_is_one(n: int, settings: tuple[int, int, int], advice: str) -> None:
    batch, accumulate, fewest = settings
    with pytest.raises(InputError, match=f"fewer than one batch of {batch}; {advice}$"):
        check_batch(make_images(), n, batch, accumulate, fewest)


def test_a_batch_that_cannot_be_shared_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="8 images cannot be divided among 1 process with 3 forwards each"):
        make(make_images(), accumulate=3)
    as_process(monkeypatch, 0, 3)
    with pytest.raises(InputError, match="8 images cannot be divided among 3 processes with 1 forward each"):
        make(make_images())


def test_targets_come_with_the_views_and_are_those_of_their_crops() -> None:
    images = load_images("shapes:scenes?size=24&train=24&val=0&test=0")
    policies = (Policy(12, crop=(0.3, 0.8)), Policy(24, crop=None, flip=0.0))
    feed = make(images, policies, targets=True, epochs=1)
    seen = 0
    for step, (views,) in enumerate(feed.views()):
        chosen, keys = feed.order.at(step)
        assert [len(of) for of in views.targets] == [BATCH, BATCH]
        for number, policy in enumerate(policies):
            own = fold(keys, 2, number)
            where = boxes(np.full(BATCH, 24), np.full(BATCH, 24), policy, own)
            for i, given in enumerate(images.targets(chosen)):
                expected = move(given, where[i], bool(flips(policy, own)[i]), policy.size)
                for part, other in zip(views.targets[number][i], expected, strict=True):
                    assert part is None if other is None else torch.equal(part, torch.from_numpy(other))
                seen += len(expected.labels)
        assert views.part(slice(1, 2)).targets == views.targets[1:]
        # The whole image has all that is in it.
        assert [one.labels.tolist() for one in views.targets[1]] == [t.labels.tolist() for t in images.targets(chosen)]
    assert seen > 48


def test_targets_do_not_depend_on_workers_processes_and_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    images = load_images("shapes:scenes?size=24&train=24&val=0&test=0")

    def told(feed: Feed) -> list[list[list[float]]]:
        return [[one.boxes.flatten().tolist() for v in step for one in v.targets[0]] for step in feed.views()]

    whole = told(make(images, POLICIES[:1], targets=True, epochs=1))
    assert told(make(images, POLICIES[:1], targets=True, epochs=1, workers=2)) == whole
    assert told(make(images, POLICIES[:1], targets=True, epochs=1, accumulate=2)) == whole
    shares = []
    for rank in range(2):
        as_process(monkeypatch, rank, 2)
        shares.append(told(make(images, POLICIES[:1], targets=True, epochs=1)))
    assert [one + other for one, other in zip(*shares, strict=True)] == whole


def test_an_unreadable_image_is_replaced_with_its_targets() -> None:
    images = load_images("shapes:scenes?size=24&train=24&val=0&test=0")

    @dataclass(frozen=True)
    class Damaged(Broken):
        def targets(self, indices: Sequence[int]) -> list[Any]:
            found: list[Any] = self.source.targets(indices)
            return found

    damaged = replace(images, source=Damaged(images.source, frozenset({3, 11})))
    for (views,) in make(damaged, PLAIN, targets=True, epochs=1).views():
        firsts = [int(one.labels[0]) if len(one.labels) else None for one in views.targets[0]]
        assert all(first in (None, label) for first, label in zip(firsts, views.labels.tolist(), strict=True))


def test_targets_that_cannot_be_moved_are_refused() -> None:
    with pytest.raises(InputError, match="has no boxes, masks or segmentation maps"):
        make(make_images(), targets=True)
    with pytest.raises(InputError, match="RandAugment"):
        make(load_images("shapes:scenes?train=24"), [Policy(12, randaugment=(9.0, 0.5))], targets=True)
