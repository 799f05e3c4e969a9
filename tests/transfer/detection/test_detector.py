"""The detector in its frame: anchors at their places, the same for every patch, mirror images."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import official_vit as official
from support.official_vit import SIDE, WIDTH
from support.trainings import TINY_DETECTOR
from torch import nn

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.saved import save_encoder
from sightline.transfer.detection.detector import Anchors, Detector, Heads
from sightline.transfer.detection.features import FeatureMaps, Standard, block_sites, trainable, whole_patches
from sightline.transfer.detection.pyramid import SimplePyramid

pytestmark = pytest.mark.unit
HEADS = Heads(**TINY_DETECTOR | {"strides": (4, 8, 16, 32), "proposals": 40, "detections": 20})
VIT = "timm:vit_tiny_patch16_224@random?depth=2&embed_dim=16&num_heads=2&num_classes=0"


def vit(patch: int, more: str = "") -> sl.Encoder:
    return sl.load_encoder(f"{VIT}&patch_size={patch}&size={4 * patch}{more}")


def test_anchors_lie_around_the_centres_of_cells() -> None:
    made = Anchors((8,)).of((2, 3), 8).reshape(2, 3, 3, 4)
    for i, j in ((0, 0), (1, 2)):
        for k, shape in enumerate((0.5, 1, 2)):
            x0, y0, x1, y1 = made[i, j, k].tolist()
            assert ((x0 + x1) / 2, (y0 + y1) / 2) == pytest.approx((8 * j + 4, 8 * i + 4))
            assert (y1 - y0) / (x1 - x0) == pytest.approx(shape)
            assert (y1 - y0) * (x1 - x0) == pytest.approx(64**2)


def mirrored(features: FeatureMaps, detector: Detector) -> tuple[FeatureMaps, Detector]:
    """The same model for mirror images: every kernel and every table of places from right to left."""
    features, detector = copy.deepcopy(features), copy.deepcopy(detector)
    module: Any = features.module
    with torch.no_grad():
        module.patch_embed.proj.weight.copy_(module.patch_embed.proj.weight.flip(-1))
        grid = module.pos_embed[:, 1:].unflatten(1, (4, 4)).flip(2).flatten(1, 2)
        module.pos_embed[:, 1:] = grid
        for part in detector.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.weight.copy_(part.weight.flip(-1))
        regions: Any = detector.regions
        linear = next(part for part in regions.box_head if isinstance(part, nn.Linear))
        linear.weight.copy_(linear.weight.unflatten(1, (-1, 7, 7)).flip(-1).flatten(1))
        for layer in (regions.box_predictor.layer.bbox_pred, detector.proposals.head.layer.bbox_pred):
            layer.weight[0::4] *= -1  # a step to the right
            layer.bias[0::4] *= -1
    # A copy has taps of its own.
    again = FeatureMaps(sl.load_encoder(module, preprocess=None), features.size)
    return again, detector


@pytest.mark.parametrize("patch", [8, 14, 16])
def test_a_mirrored_image_has_mirrored_boxes(patch: int) -> None:
    torch.manual_seed(patch)
    features = FeatureMaps(vit(patch), 4 * patch)
    detector = Detector(SimplePyramid(16, 8, HEADS.strides), 3, HEADS).eval()
    for name, parameter in detector.named_parameters():
        if "bbox_pred" in name or "cls_" in name:  # else every box is its anchor
            nn.init.normal_(parameter, 0, 0.3)
    images = torch.randn(2, 3, 4 * patch, 4 * patch)
    other, opposite = mirrored(features, detector)
    assert features.frame == (64, 64)
    with torch.no_grad():
        found = detector(features.look(images), [(64, 64)] * 2)
        reflected = opposite(other.look(images.flip(-1)), [(64, 64)] * 2)
    for one, two in zip(found, reflected, strict=True):
        assert len(one.boxes) > 4
        boxes = torch.stack([64 - two.boxes[:, 2], two.boxes[:, 1], 64 - two.boxes[:, 0], two.boxes[:, 3]], 1)
        torch.testing.assert_close(boxes, one.boxes, rtol=0, atol=1e-4)
        torch.testing.assert_close(two.scores, one.scores, rtol=0, atol=1e-5)
        assert torch.equal(two.labels, one.labels)
        assert one.masks is not None
        torch.testing.assert_close(two.masks.flip(-1), one.masks, rtol=0, atol=1e-4)


@pytest.mark.bf16
def test_places_and_losses_are_float32_whatever_the_layers_compute_in() -> None:
    detector = Detector(SimplePyramid(16, 8, HEADS.strides), 3, HEADS)
    maps = [torch.randn(1, 16, 40, 40)]
    boxes = torch.tensor([[300.5, 310.25, 420.75, 440.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1]), "masks": torch.ones(1, 640, 640, dtype=torch.uint8)}
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector.losses(maps, (640, 640), [target])
        found = detector.eval()(maps, [(640, 640)])[0]
    assert {value.dtype for value in losses.values()} == {torch.float32}
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    assert (found.boxes != found.boxes.bfloat16().float()).any()


def test_boxes_alone_have_no_masks() -> None:
    detector = Detector(SimplePyramid(16, 8, HEADS.strides), 3, replace(HEADS, masks=False)).eval()
    found = detector([torch.randn(1, 16, 4, 4)], [(64, 48)])
    assert found[0].masks is None
    assert found[0].boxes[:, 2].max() <= 48


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"channels": 0}, "channels is 0, but at least 1 is needed"),
        ({"mask_size": 7}, "an even number is needed"),
        ({"mask_convolutions": -1}, "cannot be negative"),
        ({"strides": (4, 16)}, "neighbours among"),
    ],
)
def test_measures_that_cannot_be(what: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Heads(**what)


# The maps of an encoder


def test_maps_are_the_tokens_of_the_blocks_on_their_grid() -> None:
    encoder = vit(8, "&reg_tokens=3")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), sl.capture(encoder, "block.*") as seen:
        encoder(images)
    tokens = [seen[f"block.{i}"][:, 4:].transpose(1, 2).unflatten(2, (4, 4)) for i in range(2)]
    (last,) = FeatureMaps(encoder, 32).look(images)
    torch.testing.assert_close(last, tokens[1], rtol=0, atol=1e-6)
    (both,) = FeatureMaps(encoder, 32, "last-1,last").look(images)
    torch.testing.assert_close(both, torch.cat(tokens, 1), rtol=0, atol=1e-6)


def test_other_sizes_resample_the_positions() -> None:
    features = FeatureMaps(vit(8), 48)
    assert features.shapes == [(16, 6, 6)]
    assert features.frame == (96, 96)
    assert whole_patches(vit(14), 96) == 98
    assert whole_patches(vit(14), 0) == 56


@pytest.mark.parametrize("name", ["dino", "moco_v3", "mae"])
def test_positions_are_resized_as_the_official_code_does(name: str, tmp_path: Path) -> None:
    weights = official.vit(seed=1)
    if name == "moco_v3":
        weights["pos_embed"] = official.sincos(SIDE, SIDE, WIDTH, row_first=True)
    path = official.saved(weights, tmp_path)
    encoder = sl.load_encoder(f"{name}:{path}?heads={official.HEADS}")
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    (expected,) = FeatureMaps(sl.load_encoder(f"{name}:{path}?heads={official.HEADS}&size=24"), 24).look(images)
    (found,) = FeatureMaps(encoder, 24).look(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    (bare,) = FeatureMaps(sl.load_encoder(encoder.module), 24).look(images)
    assert ((bare - expected).abs().max() < 1e-6) == (name == "mae")
    again = sl.load_encoder(f"run:{save_encoder(encoder, tmp_path / 'saved')}")
    torch.testing.assert_close(FeatureMaps(again, 24).look(images)[0], expected, rtol=0, atol=1e-6)
    assert ('"resize": "by_s' in (tmp_path / "saved/encoder.json").read_text()) == (name != "mae")
    copied, maps = trainable(again, lambda copy: FeatureMaps(copy, 24), 0.0)
    torch.testing.assert_close(maps.look(images)[0], expected, rtol=0, atol=1e-6)
    assert copied.module.pos_embed.requires_grad == (name != "moco_v3")


@pytest.mark.parametrize("reference", ["timm:resnet10t@random", "timm:convnext_atto@random"])
def test_a_cnn_shows_its_stages(reference: str) -> None:
    features = FeatureMaps(sl.load_encoder(reference), 64)
    assert features.staged
    assert [shape[1:] for shape in features.shapes] == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert features.frame == (64, 64)
    with pytest.raises(InputError, match=r"of timm:.* all stages are seen, leave it out"):
        FeatureMaps(sl.load_encoder(reference), 64, "last-1")


def test_an_encoder_without_a_grid_is_a_sentence() -> None:
    with pytest.raises(InputError, match="no grid of patches and no four stages"):
        FeatureMaps(sl.load_encoder("torchvision:shufflenet_v2_x0_5@random"), 64)


@pytest.mark.parametrize(("blocks", "word"), [("last-2", "last-2"), ("2", "2"), ("first", "first"), ("", "")])
def test_blocks_that_are_not_there(blocks: str, word: str) -> None:
    with pytest.raises(InputError, match=f"'{word}' is not a block of .*, which has 2 blocks"):
        block_sites(vit(8), blocks)
    with pytest.raises(InputError, match="names a block twice"):
        block_sites(vit(8), "last,1")


def test_what_no_gradient_reaches_is_fixed_and_the_encoder_is_left_alone() -> None:
    encoder = vit(8)
    copied, features = trainable(encoder, lambda one: FeatureMaps(one, 32), 0.2)
    fixed = {name for name, parameter in features.module.named_parameters() if not parameter.requires_grad}
    assert fixed == {"norm.weight", "norm.bias"}
    assert copied.module is not encoder.module
    blocks: Any = copied.module.get_submodule("blocks")
    assert [block.drop_path1.drop_prob for block in blocks] == [0, 0.2]
    features.module.train()
    sum(level.sum() for level in features(torch.randn(2, 3, 32, 32))).backward()
    assert all(p.grad is None for p in encoder.module.parameters())
    assert all((p.grad is not None) == p.requires_grad for p in features.module.parameters())


def test_channels_are_standardised() -> None:
    torch.manual_seed(0)
    maps = [torch.randn(5, 3, 4, 4) * torch.tensor([1.0, 10.0, 0.0]).view(3, 1, 1) + 100 for _ in range(3)]
    standard = Standard([3])
    standard.learn([x] for x in maps)
    made = torch.cat([standard([x])[0] for x in maps]).double()
    torch.testing.assert_close(made.mean((0, 2, 3)), torch.zeros(3).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(made.std((0, 2, 3), correction=0)[:2], torch.ones(2).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["ViT", "ViTMAE", "Dinov2WithRegisters", "Beit", "DINOv3ViT"])
def test_encoders_of_hugging_face_at_any_size(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    module = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    encoder = sl.load_encoder(module.eval(), preprocess=sl.Preprocess((32, 32)))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), sl.capture(encoder, "block.1") as seen:
        encoder(images)
    assert encoder.tokens is not None
    tokens = seen["block.1"][:, encoder.tokens.prefix :].transpose(1, 2).unflatten(2, (4, 4))
    torch.testing.assert_close(FeatureMaps(encoder, 32).look(images)[0], tokens, rtol=0, atol=1e-5)
    larger = FeatureMaps(encoder, 48)
    assert larger.shapes == [(16, 6, 6)]
    assert larger.look(torch.zeros(1, 3, 48, 48))[0].isfinite().all()
