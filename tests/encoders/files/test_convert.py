"""Encoders written for timm, loaded there by the line that is printed; the network is out of reach."""

import json
import socket
from dataclasses import asdict, replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from support.references import SMALL
from timm.data import create_transform, resolve_data_config  # type: ignore[attr-defined]
from typer.testing import CliRunner

from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.encoders.encoder import Encoder
from sightline.encoders.files.convert import convert
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.images.preprocess import Preprocess

VIT = SMALL
BEIT = "timm:beit_base_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3"
SHARED = "&global_pool=token&use_rel_pos_bias=False&use_shared_rel_pos_bias=True"
ABSOLUTE = "&use_rel_pos_bias=False&use_abs_pos_emb=True&init_values=0"
CONVNEXT = "timm:convnextv2_atto@random?size=32&dims=(8,16,16,24)&depths=(1,1,2,1)"
RESNET = "timm:resnet18@random?size=32&channels=(8,8,16,16)"
MODELS = [
    f"{VIT}&num_classes=5",
    f"{VIT}&num_classes=0",
    f"{VIT}&num_classes=0&qkv_bias=False&no_embed_class=True",
    f"{VIT.replace('size=32&', '')}&img_size=(32,48)&num_classes=3",
    f"{VIT}&num_classes=0&init_values=0.1",
    f"{VIT}&num_classes=0&init_values=0.1&reg_tokens=4",
    f"{VIT}&num_classes=0&init_values=0.1&reg_tokens=4&no_embed_class=True",
    f"{BEIT}&num_classes=5",  # a table for each block, fc_norm
    f"{BEIT}&num_classes=0&use_shared_rel_pos_bias=True",  # and one for all
    f"{BEIT}&num_classes=0{SHARED}",
    f"{BEIT}&num_classes=4&global_pool=token{ABSOLUTE}",
    f"{CONVNEXT}&num_classes=3",
    f"{CONVNEXT}&num_classes=0&conv_mlp=True&patch_size=1",
    f"{CONVNEXT.replace('v2', '')}&num_classes=3",
    f"{RESNET}&num_classes=4",
    f"{RESNET.replace('18', '26')}&num_classes=0",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network here")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def make(reference: str) -> Encoder:
    """An encoder in which every weight matters: none is zero or one, as tables, gammas and biases begin with."""
    encoder = load_encoder(reference)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in encoder.module.state_dict().values():
            if value.is_floating_point():
                value.add_(0.1 * torch.rand(value.shape, generator=random))
    return encoder


def images(encoder: Encoder) -> torch.Tensor:
    return torch.randn(3, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(1))


def evaluate(line: str):
    """Run the line that is printed for the user."""
    return eval(line, {"timm": timm}).eval()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(ours.abs().max()))


# What timm computes


@pytest.mark.parametrize("reference", MODELS)
@torch.no_grad()
def test_timm_computes_the_same(reference, tmp_path):
    encoder = make(reference)
    pixels = images(encoder)
    for out in (tmp_path / "folder", tmp_path / "file.safetensors"):
        found = convert(encoder, out)
        model = evaluate(found.load)
        assert found.difference == 0
        assert type(model) is type(encoder.module)
        assert torch.equal(model.forward_features(pixels), encoder.module.forward_features(pixels))
        assert torch.equal(model(pixels), encoder.module(pixels))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.safetensors", "folder"]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["config.json", "model.safetensors"]


@torch.no_grad()
def test_our_own_sources_load_it(tmp_path):
    encoder = make(f"{VIT}&num_classes=5")
    file = convert(encoder, tmp_path / "mine.safetensors").path
    for reference in (encoder.architecture.replace("@random", f"@{file}"), f"checkpoint:{file}"):
        back = load_encoder(reference)
        assert back.weights == load_encoder(encoder.module).weights
        assert torch.equal(back(images(encoder)), encoder(images(encoder)))


def test_the_classifier_of_a_run_is_kept(tmp_path):
    encoder = replace(load_encoder(f"{VIT}&num_classes=3"), classes=("cat", "dog", "fox"))
    save_encoder(encoder, tmp_path / "run")
    timm_model = evaluate(convert(f"run:{tmp_path}/run", tmp_path / "timm").load)
    assert timm_model.pretrained_cfg["label_names"] == ["cat", "dog", "fox"]


# Preprocessing


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess((32, 32), 36, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
        Preprocess((32, 32), 54, "bilinear"),
        Preprocess((32, 32), (40, 40)),
    ],
)
def test_the_preprocessing_goes_with_it(preprocess, tmp_path):
    encoder = load_encoder(f"{VIT}&num_classes=0", preprocess=preprocess)
    picture = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    ours = encoder.preprocess([picture])[0]
    model = evaluate(convert(encoder, tmp_path / "timm").load)
    transform = create_transform(**resolve_data_config(model.pretrained_cfg), is_training=False)
    assert torch.allclose(transform(Image.fromarray(picture)), ours, atol=1e-6)


# The file


def test_the_header_says_where_it_is_from(tmp_path):
    encoder = replace(make(f"{VIT}&num_classes=0"), reference="checkpoint:/home/someone/mae.pth?heads=3")
    convert(encoder, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt"
    assert about["origin"] == "checkpoint:mae.pth?heads=3"
    assert about["weights"] == encoder.weights
    assert about["architecture"] == encoder.architecture
    assert json.loads(about["preprocess"]) == json.loads(json.dumps(asdict(encoder.preprocess)))
    assert json.loads(about["config"]) == json.loads((tmp_path / "config.json").read_text())


def test_what_is_there_stays_unless_asked(tmp_path):
    encoder = load_encoder(f"{VIT}&num_classes=0")
    convert(encoder, tmp_path)
    (tmp_path / "mine").mkdir()
    mine = [tmp_path / "notes.txt", tmp_path / "mine" / "config.json", tmp_path / "mine" / "model.safetensors"]
    for path in mine:
        path.write_text("mine")
    with pytest.raises(InputError, match=r"safetensors' exists; choose another name, or replace it with --overwrite"):
        convert(encoder, tmp_path)
    other = load_encoder(f"{VIT}&num_classes=3")
    convert(other, tmp_path, overwrite=True)
    assert json.loads((tmp_path / "config.json").read_text())["num_classes"] == 3
    assert [path.read_text() for path in mine] == ["mine"] * 3
    with pytest.raises(InputError, match=r"model.safetensors' exists"):
        convert(encoder, tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_others_have_written_is_never_replaced(name, tmp_path):
    """Neither alone, nor in place of one of our files, nor as a link."""
    encoder = load_encoder(f"{VIT}&num_classes=0")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('"mine"')
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(tmp_path / "mine" / name)
    for folder in ("mine", "linked"):
        with pytest.raises(InputError, match=rf"{name}' exists, and `sightline convert` did not write it"):
            convert(encoder, tmp_path / folder, overwrite=True)
        assert [path.name for path in (tmp_path / folder).iterdir()] == [name]
    convert(encoder, tmp_path / "alone" / "model.safetensors")
    if name != "model.safetensors":
        (tmp_path / "alone" / name).write_text('"mine"')
        with pytest.raises(InputError, match=rf"{name}' exists, and `sightline convert` did not write it"):
            convert(encoder, tmp_path / "alone", overwrite=True)
    assert (tmp_path / "mine" / name).read_text() == '"mine"'


def test_nothing_is_left_behind_if_outputs_differ(tmp_path, monkeypatch):
    encoder = make(f"{VIT}&num_classes=0")
    # As if what is written were not what is computed with.
    changed = {"norm.bias": encoder.module.norm.bias + 1.0}
    monkeypatch.setattr(
        encoder.module, "state_dict", lambda: dict(type(encoder.module).state_dict(encoder.module)) | changed
    )
    with pytest.raises(
        InputError, match=r"'vit_tiny_patch16_224' does not compute the same in timm, so nothing was kept"
    ):
        convert(encoder, tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file stands where a folder is needed"):
        convert(load_encoder(f"{VIT}&num_classes=0"), tmp_path / "file" / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Refusals


def test_only_models_of_timm(tmp_path):
    own = load_encoder(load_encoder(VIT).module)
    with pytest.raises(InputError, match="is not a model that timm builds from a name"):
        convert(own, tmp_path / "folder")
    with pytest.raises(InputError, match="stem=small, which timm cannot build; only Sightline can use it"):
        convert(f"{RESNET}&stem=small", tmp_path / "other")


def test_a_path_may_look_like_a_reference(tmp_path):
    encoder = make(f"{BEIT}&num_classes=0{SHARED}")
    extra = {"mask_token": torch.zeros(1, 1, 48), "lm_head.weight": torch.zeros(9, 48), "lm_head.bias": torch.zeros(9)}
    torch.save({"model": encoder.module.state_dict() | extra}, tmp_path / "beit@home?.pth")
    found = convert(str(tmp_path / "beit@home?.pth"), tmp_path / "folder")
    assert any("recognised as BEiT" in note for note in found.notes)
    with torch.no_grad():
        assert torch.equal(evaluate(found.load)(images(encoder)), encoder.module(images(encoder)))


def test_wrong_words(tmp_path):
    with pytest.raises(InputError, match=r"out.pth' would be a pickle; write '.*out.safetensors', or a folder"):
        convert(VIT, tmp_path / "out.pth")
    with pytest.raises(InputError, match="There is no"):
        convert(str(tmp_path / "missing.pth"), tmp_path / "folder")


def test_the_command(tmp_path):
    encoder = make(f"{VIT}&num_classes=5")
    torch.save({"model": encoder.module.state_dict()}, tmp_path / "weights.pth")
    out = tmp_path / "out.safetensors"
    result = CliRunner().invoke(app, ["convert", f"{tmp_path}/weights.pth?heads=3", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert f"{out}: outputs differ by 0.0e+00 of their scale at most" in result.output
    line = next(line for line in result.output.splitlines() if line.startswith("timm."))
    with torch.no_grad():
        close(encoder.module(images(encoder)), evaluate(line)(images(encoder)))
