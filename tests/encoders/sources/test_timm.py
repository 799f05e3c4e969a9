"""timm as a source: names, options, seeds, preprocessing."""

import pytest
import timm
import torch
from timm.data import create_transform, resolve_model_data_config  # type: ignore[attr-defined]

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.core.references import parse_reference
from sightline.encoders import contract
from sightline.encoders.loading import load_encoder
from sightline.encoders.sources.timm import names, preprocess_of

SMALL = "img_size=32&patch_size=8&embed_dim=32&depth=2&num_heads=4&num_classes=5"


@pytest.mark.parametrize("source", plugins.names("sources"))
def test_every_source_lists_names_and_an_example(source):
    plugin = contract.source(source)
    assert parse_reference(plugin.EXAMPLE).source == source
    listed = plugin.names()
    assert listed
    assert len(set(listed)) == len(listed)


def test_names():
    assert {"resnet18", "vit_small_patch16_224.dino", "vit_base_patch16_224.mae"} <= set(names())


def test_seed_decides_the_weights_and_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    first = load_encoder(f"timm:vit_tiny_patch16_224@random?{SMALL}&seed=1")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.weights == load_encoder(f"timm:vit_tiny_patch16_224@random?{SMALL}&seed=1").weights
    assert first.weights != load_encoder(f"timm:vit_tiny_patch16_224@random?{SMALL}&seed=2").weights
    assert not first.module.training


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("timm:resnet8@random", "timm has no model 'resnet8'; did you mean"),
        ("timm:vit_smal_patch16_224", "'vit_small_patch16_224'"),
        ("timm:vit_small_patch16_224.dion", "'vit_small_patch16_224.dino'"),
        ("timm:resnet18@random?imgsize=3", "unexpected keyword argument 'imgsize'"),
        ("timm:resnet18@random?seed=x", "seed=x of .* must be a whole number"),
        ("timm:resnet18@random?size=x", "size=x of .* must be a whole number"),
        ("timm:resnet18@random?size=0", "size=0 of .* must be a whole number"),
        ("timm:vit_tiny_patch16_224@random?embed_dim=32&num_heads=5", "divisible"),
        ("timm:resnet18@random?checkpoint_path=x.pth", "given checkpoint_path='x.pth', which is no option of a model"),
        ("timm:resnet18@random?pretrained_cfg=x", "given pretrained_cfg='x'.*; leave it out"),
        ("timm:resnet18@random?features_only=True", "given features_only='True'"),
        ("timm:resnet18@nowhere.pth", "There is no weights file 'nowhere.pth'"),
    ],
)
def test_errors(reference, message):
    with pytest.raises(InputError, match=message) as error:
        load_encoder(reference)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_small_patch16_224.dino", {}),
        ("resnet50.a1_in1k", {}),
        ("beit_base_patch16_224.in22k_ft_in22k_in1k", {"embed_dim": 48}),
        ("vit_small_patch14_dinov2.lvd142m", {"embed_dim": 48, "num_heads": 3}),
    ],
)
def test_preprocessing_is_that_of_timm(name, options):
    import numpy as np
    from PIL import Image

    module = timm.create_model(name, pretrained=False, **({"depth": 1} | options if "patch" in name else options))
    reference = create_transform(**resolve_model_data_config(module), is_training=False)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    torch.testing.assert_close(preprocess_of(module, official=True)([image])[0], reference(image), rtol=0, atol=1e-6)


def test_a_file_wants_the_preprocessing_of_the_tag_that_is_named(tmp_path):
    """The default weights of this architecture want another mean and standard deviation than those of MAE."""
    small = "img_size=32&patch_size=8&embed_dim=32&depth=1&num_heads=4"
    torch.save(load_encoder(f"timm:vit_base_patch16_224@random?{small}").module.state_dict(), tmp_path / "mae.pth")
    mae = load_encoder(f"timm:vit_base_patch16_224.mae@{tmp_path / 'mae.pth'}?{small}").preprocess
    plain = load_encoder(f"timm:vit_base_patch16_224@{tmp_path / 'mae.pth'}?{small}").preprocess
    assert (mae.mean, mae.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (plain.mean, plain.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert mae.size == plain.size == (32, 32)
    load_encoder(f"timm:vit_base_patch16_224.my_own@random?{small}")  # a tag that timm does not know means nothing


def test_size_of_the_images():
    cnn = load_encoder("timm:resnet18@random?size=64&channels=(8,8,8,8)")
    assert (cnn.preprocess.size, cnn.preprocess.resize) == ((64, 64), 64)
    vit = load_encoder("timm:vit_tiny_patch16_224@random?size=64&embed_dim=32&depth=1&num_heads=4")
    assert (vit.preprocess.size, vit.tokens.grid) == ((64, 64), (4, 4))


def test_options_are_python_values():
    encoder = load_encoder(
        f"timm:vit_tiny_patch16_224@random?{SMALL}&img_size=(32,64)&class_token=False&global_pool=avg"
    )
    assert encoder.preprocess.size == (32, 64)
    assert encoder.preprocess.resize == (32, 64)
    assert encoder.tokens.cls is None
    assert encoder.module.global_pool == "avg"
