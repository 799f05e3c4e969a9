"""Views: what is random in them depends on image, seed and copy alone."""

import numpy as np
import pytest
import torch

from sightline.core.errors import InputError
from sightline.images.augment.colours import augment
from sightline.images.augment.policies import policies
from sightline.images.views import make_view, policies_of

IDS = [f"folder/image {i}.png" for i in range(7)]
PIXELS = torch.randint(0, 256, (7, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_plain_and_mirror() -> None:
    assert make_view("plain", PIXELS) is PIXELS
    assert torch.equal(make_view("mirror", make_view("mirror", PIXELS)), PIXELS)
    assert torch.equal(make_view("mirror", PIXELS)[..., 0], PIXELS[..., -1])


@pytest.mark.parametrize("policy", ["simclr", "moco_v3", "dino", "mae", "supervised", "simclr?solarize=0.5&gray=1"])
@pytest.mark.parametrize("copy", [0, 1, 5])
def test_an_augmented_copy_does_not_depend_on_the_batch(policy: str, copy: int) -> None:
    name = f"augment:{policy}:{copy}"
    whole = make_view(name, PIXELS, IDS, seed=3)
    assert whole.shape == PIXELS.shape
    assert whole.dtype == torch.float32
    assert 0 <= float(whole.min()) <= float(whole.max()) <= 1
    order = [4, 0, 6, 2, 1, 5, 3]
    parts = [make_view(name, PIXELS[rows], [IDS[i] for i in rows], seed=3) for rows in (order[:2], order[2:])]
    torch.testing.assert_close(torch.cat(parts), whole[order], rtol=0, atol=1e-6)
    assert torch.equal(make_view(name, PIXELS, IDS, seed=3), whole)


def test_seed_copy_and_image_make_the_difference() -> None:
    first = make_view("augment:simclr:0", PIXELS, IDS, seed=0)
    same = PIXELS[:1].expand(7, -1, -1, -1)
    for other in (
        make_view("augment:simclr:1", PIXELS, IDS, seed=0),
        make_view("augment:simclr:0", PIXELS, IDS, seed=1),
        make_view("augment:simclr:0", PIXELS, [name + "x" for name in IDS], seed=0),
    ):
        assert (first - other).abs().flatten(1).mean(1).min() > 0.01
    assert len({tuple(view.flatten().tolist()) for view in make_view("augment:simclr:0", same, IDS)}) == 7


def test_bytes_and_floats_are_the_same_images() -> None:
    name = "augment:simclr:0"
    torch.testing.assert_close(make_view(name, PIXELS, IDS), make_view(name, PIXELS / 255, IDS), rtol=0, atol=1e-5)


def test_policies_share_their_random_numbers() -> None:
    """So that two policies differ by what they do, not by the crops they happened to draw."""
    plain = make_view("augment:supervised:1", PIXELS, IDS, seed=2)
    bare = make_view("augment:simclr?jitter_probability=0&gray=0&blur=0:1", PIXELS, IDS, seed=2)
    torch.testing.assert_close(plain, bare, rtol=0, atol=1e-6)


def test_copies_take_the_views_of_a_policy_in_turn() -> None:
    """MoCo-v3's second view is the one that is sometimes solarised."""
    assert policies_of("moco_v3", 24) == policies("moco_v3", 24)
    keys = np.arange(7, dtype=np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sightline.images.views.fold", lambda *_: keys)
        for copy in range(4):
            expected = augment(PIXELS, policies("moco_v3", 24)[copy % 2], keys)
            assert torch.equal(make_view(f"augment:moco_v3:{copy}", PIXELS, IDS), expected)


@pytest.mark.parametrize("size", [(16, 24), (24, 16)])
def test_pixels_need_not_be_square(size: tuple[int, int]) -> None:
    pixels = torch.full((3, 3, *size), 128, dtype=torch.uint8)
    pixels[:, :, : size[0] // 2] = 255  # bright above: a crop is still bright above, whatever its shape
    made = make_view("augment:supervised?crop=[0.9, 1]:0", pixels, IDS[:3])
    assert made.shape == pixels.shape
    assert (made[:, :, 0] > 0.95).all()
    assert (made[:, :, -1] < 0.55).all()


def test_own_settings() -> None:
    (view, _) = policies_of("dino?interpolation=bilinear&jitter=[0, 0, 0, 0.5]&blur_sigma=[1, 2]", 48)
    assert (view.size, view.interpolation, view.jitter, view.blur_sigma) == (48, "bilinear", (0, 0, 0, 0.5), (1, 2))
    assert view.gray == policies("dino", 48)[0].gray


def test_noise_goes_to_its_own_file() -> None:
    noisy = make_view("noise:0.5", PIXELS, IDS)
    assert noisy.shape == PIXELS.shape
    assert (noisy - PIXELS / 255).abs().max() > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("miror", "did you mean 'mirror'"),
        ("augment:simclr", "augment:POLICY:COPY"),
        ("augment:simclr:first", "augment:POLICY:COPY"),
        ("augment:simcl:0", "did you mean 'simclr'"),
        ("augment:simclr?grey=1:0", "did you mean 'gray'"),
        ("augment:simclr?gray:0", "key=value"),
        ("augment:simclr?size=3:0", "'size' is not one"),
        ("augment:simclr?gray=2:0", "gray is a probability"),
        ("augment:simclr?crop=0.5:0", "crop is 0.5, but a list"),
    ],
)
def test_what_cannot_be_made_is_said_in_words(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_view(name, PIXELS, IDS)
