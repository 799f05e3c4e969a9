"""`checkpoint:` tells formats apart, says what it took a file for, and what it is not."""

import json
import time
from dataclasses import asdict

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.checkpoint_files import NO_VISION_MODEL, of_timm, recognisable
from support.official_beit import finetuned
from support.official_vit import HEADS, SIZE, activations, check_sites, images, saved, vit

from sightline.core.errors import InputError
from sightline.encoders.files.convert import convert
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.layouts.layout import recognized
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.sources.checkpoint import described_beside, is_converted
from sightline.images.preprocess import Preprocess

FILES = recognisable()
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3}


def refusal(reference):
    with pytest.raises(InputError) as error:
        load_encoder(reference)
    assert str(error.value).isprintable()
    return str(error.value)


# Formats of official code


@pytest.mark.parametrize("name", list(FILES))
def test_recognised(tmp_path, name):
    content, title, weights = FILES[name]
    encoder = load_encoder(f"checkpoint:{saved(content, tmp_path)}?heads={HEADS}")
    assert encoder.notes[0].startswith(f"recognised as {title}")
    assert ": it" in encoder.notes[0]
    assert encoder.name == "file"
    assert encoder.reference == f"checkpoint:{tmp_path / 'file.pth'}?heads={HEADS}"
    found = encoder.module.state_dict()
    assert all(torch.equal(found[key], weights[key]) for key in found)
    save_encoder(encoder, tmp_path / "saved")
    assert load_encoder(f"checkpoint:{tmp_path / 'saved'}").weights == encoder.weights


@pytest.mark.parametrize("name", [name for name in FILES if name != "vit"])
def test_formats_exclude_each_other(tmp_path, name):
    assert list(recognized(read_checkpoint(saved(FILES[name][0], tmp_path)))) == [name.partition(" ")[0]]


def test_options_go_to_the_format(tmp_path):
    path = saved(FILES["dino"][0], tmp_path)
    teacher, student = (load_encoder(f"checkpoint:{path}?heads=3&which={which}") for which in ("teacher", "student"))
    assert torch.equal(teacher.module.norm.weight, vit()["norm.weight"])
    assert torch.equal(student.module.norm.weight, vit(seed=1)["norm.weight"])
    assert load_encoder(f"checkpoint:{path}?heads=3&size=24").preprocess.size == (24, 24)
    assert "recognised as DINO, has an unknown option 'hads'; did you mean 'heads'" in refusal(
        f"checkpoint:{path}?hads=3"
    )
    assert "No tensor gives the number of heads" in refusal(f"checkpoint:{path}")
    assert "write checkpoint:FILE?option=value" in refusal(f"checkpoint:{path}@random")


def test_ambiguous_files(tmp_path):
    path = saved(finetuned(), tmp_path)
    assert f"say which it is: beit:{path} or simmim:{path}" in refusal(f"checkpoint:{path}")
    path = saved(FILES["mae"][0] | FILES["dino"][0], tmp_path)
    assert refusal(f"checkpoint:{path}").endswith(f"say which it is: dino:{path} or mae:{path}")


# Files of timm


def test_a_vit_of_unknown_origin(tmp_path):
    path = saved(vit(classes=5), tmp_path)
    encoder = load_encoder(f"checkpoint:{path}?heads={HEADS}")
    check_sites(encoder, activations(vit(classes=5), images()), images())
    assert encoder.preprocess.mean == (0.485, 0.456, 0.406)
    assert encoder.preprocess.interpolation == "bicubic"
    assert "assuming ImageNet's mean and std, bicubic resizing and the usual number of heads" in encoder.notes[1]
    assert f"write dino:{path} or msn:{path}" in encoder.notes[1]
    assert load_encoder(f"checkpoint:{path}?heads={HEADS}&size={2 * SIZE}").tokens.grid == (8, 8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", VIT),
        ("vit_tiny_patch16_224", VIT | {"num_classes": 0}),
        ("deit3_small_patch16_224", VIT),  # layer scale, positions of patches alone
        ("vit_small_patch14_dinov2", VIT),
        ("vit_small_patch14_reg4_dinov2", VIT | {"num_classes": 3}),
        ("vit_base_patch16_224", VIT | {"class_token": False, "global_pool": "avg"}),
        ("vit_base_patch16_224", VIT | {"global_pool": "avg", "init_values": 1e-5}),
        ("vit_base_patch16_224", VIT | {"mlp_ratio": 2, "reg_tokens": 2}),
        ("resnet18", {"layers": (1, 1, 1, 1), "num_classes": 3}),
        ("convnext_tiny", {"depths": (1, 2, 1, 1), "dims": (8, 8, 16, 8), "num_classes": 3}),
        ("convnextv2_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8), "num_classes": 0}),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}),
    ],
)
def test_files_of_timm(tmp_path, name, options):
    module = of_timm(name, **options)
    encoder = load_encoder(f"checkpoint:{saved({'state_dict': module.state_dict()}, tmp_path)}")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(pixels), module(pixels), rtol=1e-5, atol=1e-6)
    assert "nothing in the file says who trained it" in encoder.notes[1]
    assert load_encoder(encoder.architecture).module.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "weight"),
    [("seresnet18", "layer1.0.se.fc1.weight"), ("ecaresnet50t", ""), ("resnet18", "layer2.0.downsample.2.weight")],
)
def test_resnets_with_more_than_a_plain_one_are_refused(tmp_path, name, weight):
    state = dict(of_timm(name, num_classes=3, **({} if name == "resnet18" else {"layers": (1, 1, 1, 1)})).state_dict())
    if name == "resnet18":
        state[weight] = torch.ones(3)
    message = refusal(f"checkpoint:{saved(state, tmp_path)}")
    assert (f"The file has {weight}, which the blocks of a plain ResNet do not have" in message) == bool(weight)
    assert message.endswith("timm:NAME@FILE")


def test_files_that_do_not_count_batches(tmp_path):
    module = of_timm("resnet18", layers=(1, 1, 1, 1), num_classes=3)
    state = {name: value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    encoder = load_encoder(f"checkpoint:{saved(state, tmp_path)}?size=64")
    found = encoder.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found["bn1.num_batches_tracked"] == 0
    assert "lacks 1 of" in refusal(
        f"checkpoint:{saved({n: v for n, v in state.items() if n != 'bn1.running_mean'}, tmp_path)}"
    )


def test_registers_of_dinov2_under_its_own_name(tmp_path):
    module = of_timm("vit_small_patch14_reg4_dinov2", **VIT)
    state = module.state_dict()
    position = torch.full((1, 1, 192), 0.25)
    official = {name: value for name, value in state.items() if name not in ("reg_token", "pos_embed")}
    official |= {"register_tokens": state["reg_token"], "cls_token": state["cls_token"] - position}
    official |= {"pos_embed": torch.cat([position, state["pos_embed"]], 1), "mask_token": torch.ones(1, 192)}
    encoder = load_encoder(f"checkpoint:{saved(official, tmp_path)}")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(pixels), module(pixels), rtol=1e-5, atol=1e-6)
    assert encoder.tokens.prefix == 5
    assert "1 weight of the file is not part of the encoder and was left out: mask_token" in encoder.notes[2]


def test_a_distilled_vit_is_told_from_a_plain_one(tmp_path):
    state = of_timm("deit_tiny_distilled_patch16_224", img_size=32, depth=1).state_dict()
    assert "The file has dist_token" in refusal(f"checkpoint:{saved(state, tmp_path)}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.attn.q_norm.weight": torch.ones(64)}, "has blocks.0.attn.q_norm.weight, which not every ViT has"),
        ({"dist_token": torch.ones(1, 1, 192)}, "timm:NAME@FILE"),
        ({"pos_embed": torch.ones(1, 12, 192)}, "has 12 positions"),
        ({"pos_embed": torch.ones(1, 0, 192)}, "0 positions"),
        ({"blocks.0.ls1.gamma": torch.ones(3)}, "has blocks.0.ls1.gamma of shape (3,)"),
        ({"patch_embed.proj.weight": torch.ones(192, 3, 0, 0)}, ""),
    ],
)
def test_vits_that_are_something_else(tmp_path, change, message):
    state = of_timm("vit_small_patch14_reg4_dinov2", **VIT).state_dict() | change
    assert message in refusal(f"checkpoint:{saved(state, tmp_path)}")


def test_a_missing_weight_is_an_error(tmp_path):
    state = of_timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)).state_dict()
    del state["stages.2.blocks.0.mlp.fc2.bias"]
    message = refusal(f"checkpoint:{saved(state, tmp_path)}")
    assert "lacks 1 of" in message
    assert "stages.2.blocks.0.mlp.fc2.bias" in message
    del state["stages.2.blocks.0.conv_dw.bias"]
    assert "has the names of ConvNeXt, but not its shapes" in refusal(f"checkpoint:{saved(state, tmp_path)}")


# Files with a description beside them


def test_own_encoders(tmp_path, small):
    encoder = load_encoder(small)
    save_encoder(encoder, tmp_path / "mine")
    for path in (tmp_path / "mine", tmp_path / "mine" / "encoder.safetensors"):
        found = load_encoder(f"checkpoint:{path}")
        assert found.weights == encoder.weights
        assert found.notes == [f"recognised as run:{tmp_path / 'mine'}: encoder.json is beside it"]
        assert found.reference == f"checkpoint:{path}"


def test_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    module = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(tmp_path / "vit")
    transformers.utils.logging.enable_progress_bar()
    plain = load_encoder(f"huggingface:{tmp_path / 'vit'}")
    for path in (tmp_path / "vit", tmp_path / "vit" / "model.safetensors"):
        found = load_encoder(f"checkpoint:{path}")
        assert found.weights == plain.weights
        assert found.notes == [f"recognised as huggingface:{tmp_path / 'vit'}: config.json says vit", *plain.notes]


def test_a_text_model_of_hugging_face(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    assert "is a text model" in refusal(f"checkpoint:{tmp_path / 'model.safetensors'}")


def test_folders_of_timm(tmp_path):
    module = of_timm("resnet18", num_classes=10)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "resnet18", "pretrained_cfg": {"tag": "a1_in1k"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(f"checkpoint:{tmp_path}")
    assert encoder.preprocess.mean == tuple(timm.get_pretrained_cfg("resnet18.a1_in1k").mean)
    assert torch.equal(encoder.module.fc.weight, module.fc.weight)


def test_folders_of_timm_with_other_measures(tmp_path):
    module = of_timm("vit_tiny_patch16_224", embed_dim=24, depth=2, num_heads=3, img_size=32, num_classes=5)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    told = {"mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0], "interpolation": "bilinear", "crop_pct": 0.5}
    measures = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": 32}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": measures, "pretrained_cfg": told}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(f"checkpoint:{tmp_path}")
    assert torch.equal(encoder.module.head.weight, module.head.weight)
    assert encoder.preprocess.mean == (0.1, 0.2, 0.3)
    assert (encoder.preprocess.size, encoder.preprocess.resize) == ((32, 32), 64)


@pytest.mark.parametrize("name", ["own.safetensors", "folder"])
def test_converted_files_know_their_architecture(tmp_path, name):
    architecture = "timm:vit_tiny_patch16_224@random?embed_dim=36&depth=2&num_heads=9&img_size=32&num_classes=0"
    encoder = load_encoder(architecture, preprocess=Preprocess((32, 32), 40, "bilinear", (0.1, 0.2, 0.3)))
    convert(encoder, tmp_path / name)
    again = load_encoder(f"checkpoint:{tmp_path / name}")
    assert (again.weights, again.preprocess) == (encoder.weights, encoder.preprocess)
    assert again.heads == 9
    assert "written by sightline convert" in again.notes[0]


def test_a_header_cannot_name_anything_but_a_plain_model_of_timm(tmp_path):
    for architecture in ("run:/somewhere", "timm:resnet18", "timm:resnet18@/etc/passwd", "huggingface:x/y@random"):
        about = {"architecture": architecture, "preprocess": "{}", "config": '{"model_args": {}}'}
        save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", about)
        assert not is_converted(read_checkpoint(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("where", ["header", "config.json"])
def test_what_describes_a_file_cannot_have_timm_load_another(tmp_path, where, monkeypatch):
    module = of_timm("resnet18", num_classes=3)
    torch.save({"anything": 1}, tmp_path / "other.pth")
    about = {"format": "pt"}
    if where == "header":
        told = f"timm:resnet18@random?num_classes=3&checkpoint_path={tmp_path / 'other.pth'}"
        about |= {"architecture": told, "config": '{"model_args": {}}', "preprocess": "{}"}
    else:
        measures = {"checkpoint_path": str(tmp_path / "other.pth")}
        config = {"architecture": "resnet18", "num_classes": 3, "model_args": measures, "pretrained_cfg": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(module.state_dict(), tmp_path / "model.safetensors", about)
    monkeypatch.setattr(torch, "load", None)
    message = refusal(f"checkpoint:{tmp_path / 'model.safetensors'}")
    assert "timm:resnet18 is given checkpoint_path=" in message
    assert message.endswith("leave it out, and give weights as timm:resnet18@FILE")


@pytest.mark.parametrize("where", ["header", "config.json", "encoder.json"])
@pytest.mark.parametrize(
    "measure", [{"depth": 10**6}, {"depth": 10**9}, {"embed_dim": 60_000}, {"img_size": 50_000}], ids=str
)
def test_a_description_of_a_far_larger_model_is_refused_before_it_is_built(tmp_path, where, measure):
    """Beside a file of 100 kB; these would take from 1 GB on, and minutes."""
    measures = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "num_classes": 5} | measure
    options = "&".join(f"{key}={value}" for key, value in measures.items())
    state = of_timm("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3, img_size=32, num_classes=5).state_dict()
    about = {
        "architecture": f"timm:vit_tiny_patch16_224@random?{options}",
        "preprocess": asdict(Preprocess((32, 32), 32)),
    }
    if where == "encoder.json":
        save_file(state, tmp_path / "encoder.safetensors")
        (tmp_path / where).write_text(json.dumps(about))
    elif where == "header":
        header = about | {"preprocess": json.dumps(about["preprocess"]), "config": '{"model_args": {}}'}
        save_file(state, tmp_path / "model.safetensors", header)
    else:
        save_file(state, tmp_path / "model.safetensors")
        config = {"architecture": "vit_tiny_patch16_224", "model_args": measures, "pretrained_cfg": {}}
        (tmp_path / where).write_text(json.dumps(config))
    path = tmp_path / "model.safetensors" if where == "header" else tmp_path
    started = time.process_time()
    assert "numbers, but a far larger model is described; is it" in refusal(f"checkpoint:{path}")
    assert time.process_time() - started < 10


def test_broken_descriptions_are_ignored(tmp_path):
    path = saved(vit(), tmp_path, "model.safetensors")
    for text in ("", "[]", "{", "{}", '{"architecture": 3}'):
        (tmp_path / "config.json").write_text(text)
        assert described_beside(path) is None


# What it is not


@pytest.mark.parametrize("kind", list(NO_VISION_MODEL))
def test_no_vision_model(tmp_path, kind):
    content, message = NO_VISION_MODEL[kind]
    assert message in refusal(f"checkpoint:{saved(content, tmp_path)}")


def test_names_cannot_command_the_terminal(tmp_path):
    evil = chr(27) + "[2J"
    assert r"\x1b[2J" in refusal(f"checkpoint:{saved({evil: torch.zeros(3)}, tmp_path)}")
    assert r"blocks.0.\x1b[2J" in refusal(f"checkpoint:{saved(vit() | {f'blocks.0.{evil}': torch.zeros(3)}, tmp_path)}")
    encoder = load_encoder(f"checkpoint:{saved(vit() | {evil: torch.zeros(3)}, tmp_path)}?heads={HEADS}")
    assert r"left out: \x1b[2J" in encoder.notes[-1]


def test_no_file(tmp_path):
    (tmp_path / "mae.pth").touch()
    assert "did you mean 'mae.pth'?" in refusal(f"checkpoint:{tmp_path / 'maee.pth'}")
    assert "is a folder; choose from mae.pth" in refusal(f"checkpoint:{tmp_path}")
