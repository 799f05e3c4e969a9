"""Encoders that get a classifier: which weights stay, which are new, and in which layer each of them is."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.references import HUGGINGFACE

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.encoder import build_encoder
from sightline.transfer.classification import logits_of
from sightline.transfer.classifier_head import block_names, layers_of, with_classifier

VIT = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=3&embed_dim=24&num_heads=3&seed=5"
BEIT = "timm:beit_base_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=24&num_heads=3&seed=5"
CONVNEXT = "timm:convnext_atto@random?size=64&seed=5&depths=(1,2,1,1)&dims=(8,16,24,32)"
RESNET = "timm:resnet18@random?size=32&seed=5"
SWIN = "timm:swin_tiny_patch4_window7_224@random?depths=(1,1,1,1)&embed_dim=12&num_heads=(1,1,2,2)"
CLASSES = ("cat", "dog", "owl")


def tensors(encoder: sl.Encoder) -> dict[str, torch.Tensor]:
    return encoder.module.state_dict()


def scores(encoder: sl.Encoder) -> torch.Tensor:
    x = torch.randn(2, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), encoder.evaluating():
        found: torch.Tensor = encoder(x)
    return found


@pytest.mark.parametrize(
    "reference", [VIT, VIT + "&num_classes=0", BEIT, CONVNEXT, RESNET, "torchvision:resnet18@random"]
)
def test_only_the_head_is_new(reference: str) -> None:
    encoder = sl.load_encoder(reference)
    before = {name: value.clone() for name, value in tensors(encoder).items()}
    tuned = with_classifier(encoder, CLASSES, seed=1)
    new = {name for name, value in tensors(tuned).items() if name not in before or not torch.equal(value, before[name])}
    assert len(new) == 2
    assert {tensors(tuned)[name].shape[0] for name in new} == {3}
    assert {name.rpartition(".")[2] for name in new} == {"weight", "bias"}
    assert all(value.abs().max() < 1e-3 for name, value in tensors(tuned).items() if name in new)
    assert scores(tuned).shape == (2, 3)
    assert (tuned.classes, tuned.preprocess) == (CLASSES, encoder.preprocess)
    assert all(torch.equal(value, before[name]) for name, value in tensors(encoder).items())


@pytest.mark.parametrize("reference", [VIT, BEIT, CONVNEXT, RESNET, "torchvision:resnet18@random"])
def test_a_saved_classifier_is_built_again(reference: str, tmp_path: Path) -> None:
    tuned = with_classifier(sl.load_encoder(reference), CLASSES, drop_path=0.1)
    sl.save_encoder(tuned, tmp_path)
    again = sl.load_encoder(f"run:{tmp_path}")
    assert (again.weights, again.classes) == (tuned.weights, CLASSES)
    assert torch.equal(scores(again), scores(tuned))


@pytest.mark.parametrize(
    "kind", ["ViT", "ViTMAE", "Dinov2WithRegisters", "Beit", "CLIPVision", "SiglipVision", "DINOv3ViT"]
)
def test_vits_of_hugging_face_get_a_classifier(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    config = getattr(library, f"{kind}Config")(**HUGGINGFACE)
    getattr(library, f"{kind}Model")(config).save_pretrained(tmp_path / "model")
    encoder = sl.load_encoder(f"huggingface:{tmp_path / 'model'}")
    tuned = with_classifier(encoder, CLASSES, drop_path=0.1)
    given = tensors(encoder)
    for name, value in tensors(tuned).items():
        if not name.startswith("classifier."):
            assert torch.equal(value, given[name.removeprefix("model.")])
    assert "drop_path=0.1 is for encoders of timm" in tuned.notes[0]
    torch.nn.init.normal_(tuned.module.get_parameter("classifier.weight"))
    sl.save_encoder(tuned, tmp_path / "saved")
    again = sl.load_encoder(f"run:{tmp_path / 'saved'}")
    assert torch.equal(scores(again), scores(tuned))
    assert scores(again).unique().numel() > 3
    assert "head.0" in again.sites
    # It depends on the images, and every weight is reached, or processes would wait for its gradient.
    images = torch.randn(2, 3, 32, 32)
    tuned.module(images).square().sum().backward()
    silent = {name for name, p in tuned.module.named_parameters() if p.requires_grad and p.grad is None}
    assert silent <= {"model.embeddings.mask_token"}  # which ClassificationObjective freezes
    assert sorted(set(layers_of(tuned).values())) == [0, 1, 2, 3]
    # And again, from the run.
    other = with_classifier(again, ("a", "b"))
    assert scores(other).shape == (2, 2)
    assert torch.equal(tensors(other)["classifier.bias"], torch.zeros(2))


def test_a_classifier_of_hugging_face_changes_its_classes(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    model = library.ViTForImageClassification(library.ViTConfig(**HUGGINGFACE, num_labels=7))
    model.save_pretrained(tmp_path / "model")
    tuned = with_classifier(sl.load_encoder(f"huggingface:{tmp_path / 'model'}"), CLASSES)
    assert logits_of(tuned.module(torch.randn(2, 3, 32, 32))).shape == (2, 3)
    sl.save_encoder(tuned, tmp_path / "saved")
    assert sl.load_encoder(f"run:{tmp_path / 'saved'}").weights == tuned.weights


def test_the_seed_decides_the_head_and_is_no_part_of_the_architecture() -> None:
    encoder = sl.load_encoder(VIT)
    one, same, other = (with_classifier(encoder, CLASSES, seed=seed) for seed in (1, 1, 2))
    assert one.weights == same.weights != other.weights
    assert one.architecture == other.architecture
    assert one.architecture is not None
    assert "seed=5" in one.architecture


def test_drop_path_rises_over_the_blocks() -> None:
    module: Any = with_classifier(sl.load_encoder(VIT), CLASSES, drop_path=0.2).module
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in module.blocks] == pytest.approx([0, 0.1, 0.2])


def test_no_drop_path_is_none_even_where_the_encoder_has_some() -> None:
    def rates(encoder: sl.Encoder) -> list[float]:
        return [part.drop_prob for part in encoder.module.modules() if getattr(part, "drop_prob", 0)]

    once = with_classifier(sl.load_encoder(VIT), CLASSES, drop_path=0.2)
    for encoder in (once, sl.load_encoder(SWIN)):  # which has 0.1 by itself
        assert rates(encoder)
        assert not rates(with_classifier(encoder, CLASSES))


def test_pooling() -> None:
    encoder = sl.load_encoder(VIT)
    own: Any = with_classifier(encoder, CLASSES).module
    gap: Any = with_classifier(encoder, CLASSES, pool="gap").module
    assert (own.global_pool, gap.global_pool) == ("token", "avg")
    assert torch.equal(gap.fc_norm.weight, torch.ones(24))  # the norm behind the mean is a new one
    assert torch.equal(gap.blocks[2].mlp.fc1.weight, own.blocks[2].mlp.fc1.weight)
    cls: Any = with_classifier(with_classifier(encoder, CLASSES, pool="gap"), CLASSES, pool="cls").module
    assert cls.global_pool == "token"
    # An encoder that gives all of its tokens is pooled by CLS, or by the mean if it has none.
    assert with_classifier(sl.load_encoder(VIT + "&global_pool="), CLASSES).module.global_pool == "token"
    bare = VIT + "&class_token=False&global_pool="
    assert with_classifier(sl.load_encoder(bare), CLASSES).module.global_pool == "avg"


def test_a_head_can_be_kept_and_its_rows_follow_the_classes() -> None:
    encoder = sl.load_encoder(VIT + "&num_classes=3")
    assert torch.equal(scores(with_classifier(encoder, CLASSES, keep_head=True)), scores(encoder))
    encoder = dataclasses.replace(encoder, classes=("owl", "cat", "dog"))
    kept = with_classifier(encoder, CLASSES, keep_head=True)
    torch.testing.assert_close(scores(kept), scores(encoder)[:, [1, 2, 0]])


@pytest.mark.parametrize(("end", "numbers"), [("first", [0, 1]), ("last", [1, 2])])
def test_blocks_are_made_anew(end: str, numbers: list[int]) -> None:
    encoder = sl.load_encoder(VIT)
    plain = with_classifier(encoder, CLASSES, seed=3)
    reinit = with_classifier(encoder, CLASSES, seed=3, reinit=f"{end}:2")
    fresh = tensors(sl.load_encoder(VIT.replace("seed=5", "seed=3&num_classes=3")))
    for name, value in tensors(plain).items():
        block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        expected = fresh[name] if block in numbers else value
        assert torch.equal(tensors(reinit)[name], expected), name
    assert not torch.equal(fresh["blocks.1.mlp.fc1.weight"], tensors(plain)["blocks.1.mlp.fc1.weight"])
    assert with_classifier(encoder, CLASSES, seed=3, reinit=f"{end}:0").weights == plain.weights
    every = [with_classifier(encoder, CLASSES, seed=3, reinit=f"{which}:3").weights for which in ("first", "last")]
    assert every[0] == every[1]


def test_reinitialised_batch_norms_forget_their_statistics() -> None:
    encoder = sl.load_encoder(RESNET)
    statistics = encoder.module.get_buffer("layer4.1.bn1.running_mean")
    statistics.fill_(3.0)
    assert tensors(with_classifier(encoder, CLASSES))["layer4.1.bn1.running_mean"].eq(3).all()
    assert tensors(with_classifier(encoder, CLASSES, reinit="last:1"))["layer4.1.bn1.running_mean"].eq(0).all()


def test_layers_of_a_vit() -> None:
    layers = layers_of(with_classifier(sl.load_encoder(VIT), CLASSES))
    by_hand = {"cls_token": 0, "pos_embed": 0, "patch_embed.proj.weight": 0, "norm.weight": 4, "head.bias": 4}
    assert {name: layers[name] for name in by_hand} == by_hand
    for name, layer in layers.items():
        if name.startswith("blocks."):
            assert layer == int(name.split(".")[1]) + 1


def test_layers_of_other_families() -> None:
    beit = layers_of(with_classifier(sl.load_encoder(BEIT), CLASSES))
    assert [beit[name] for name in ("cls_token", "blocks.1.gamma_1", "fc_norm.weight", "head.weight")] == [0, 2, 3, 3]
    shared = layers_of(sl.load_encoder(BEIT + "&use_shared_rel_pos_bias=True&use_rel_pos_bias=False"))
    assert shared["rel_pos_bias.relative_position_bias_table"] == 3
    transformers = pytest.importorskip("transformers")
    config = transformers.BeitConfig(**HUGGINGFACE, use_shared_relative_position_bias=True)
    theirs = layers_of(build_encoder(transformers.BeitModel(config), reference="beit"))
    assert {layer for name, layer in theirs.items() if "shared_position_bias" in name} == {3}
    convnext = with_classifier(sl.load_encoder(CONVNEXT), CLASSES)
    layers = layers_of(convnext)
    assert block_names(convnext)[:3] == ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"]
    expected = {
        "stem.0.weight": 0,
        "stages.0.blocks.0.conv_dw.weight": 1,
        "stages.1.downsample.1.weight": 2,  # goes with the block that follows
        "stages.1.blocks.1.norm.bias": 3,
        "stages.3.blocks.0.mlp.fc1.weight": 5,
        "head.norm.weight": 6,
        "head.fc.weight": 6,
    }
    assert {name: layers[name] for name in expected} == expected
    resnet = layers_of(sl.load_encoder(RESNET))
    names = ("conv1.weight", "layer1.0.bn1.bias", "layer4.1.conv2.weight", "fc.bias")
    assert [resnet[name] for name in names] == [0, 1, 8, 9]
    # A model of timm whose family is not known here: timm's own grouping.
    swin = layers_of(sl.load_encoder(SWIN))
    assert swin["patch_embed.proj.weight"] == 0
    assert swin["head.fc.weight"] == max(swin.values()) > 3


@pytest.mark.parametrize(
    ("reference", "options", "sentence"),
    [
        (VIT, {"reinit": "first:4"}, "has 3 blocks; choose at most that many"),
        (VIT, {"reinit": "middle:1"}, "reinit is 'middle:1', but first:n or last:n"),
        (VIT, {"reinit": "first"}, "reinit is 'first'"),
        (VIT, {"pool": "mean"}, "no pooling 'mean'; choose from cls, gap"),
        (RESNET, {"pool": "cls"}, "has no CLS token; choose the pooling gap"),
        (VIT + "&class_token=False&global_pool=avg", {"pool": "cls"}, "has no CLS token; choose the pooling gap"),
        ("torchvision:resnet18@random", {"pool": "gap"}, "for encoders of timm only"),
        (VIT, {"keep_head": True}, "has a head for 1000 classes, but there are 3"),
        (VIT + "&num_classes=0", {"keep_head": True}, "has no head, but there are 3"),
    ],
)
def test_mistakes_are_sentences(reference: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        with_classifier(sl.load_encoder(reference), CLASSES, **options)
    assert "\n" not in str(caught.value)


def test_heads_of_other_classes_are_not_kept() -> None:
    encoder = dataclasses.replace(sl.load_encoder(VIT + "&num_classes=3"), classes=("a", "b", "c"))
    with pytest.raises(InputError, match="a head for 3 classes of other names"):
        with_classifier(encoder, CLASSES, keep_head=True)


def test_what_cannot_be_built_again_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be rebuilt from a reference"):
        with_classifier(sl.load_encoder(sl.load_encoder(VIT).module), CLASSES)
    with pytest.raises(InputError, match=r"layers of .* are not known; leave out layer_decay"):
        layers_of(with_classifier(sl.load_encoder("torchvision:mobilenet_v3_small@random"), CLASSES))
