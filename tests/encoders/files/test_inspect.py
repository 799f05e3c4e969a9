"""Inspection: what is in a file, in numbers and in words, on any file and without a model."""

import argparse
import hashlib
import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.checkpoint_files import NO_VISION_MODEL, of_timm, recognisable
from support.official_beit import HEADS as TABLE_HEADS
from support.official_vit import DEPTH, PATCH, SIZE, WIDTH, saved, vit
from typer.testing import CliRunner

from sightline.cli.application import app
from sightline.core.errors import InputError
from sightline.encoders.files.inspect import as_json, describe, inspect
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.sources.checkpoint import weights_in

FILES = recognisable()


def numbers(state):
    return sum(value.numel() for value in state.values())


@pytest.mark.parametrize("name", list(FILES))
def test_format_measures_and_counts(tmp_path, monkeypatch, name):
    content, title, weights = FILES[name]
    path = saved(content, tmp_path)
    monkeypatch.setattr(timm, "create_model", None)  # no model is built
    found = inspect(path)
    assert found.format.startswith(title)
    assert found.why
    assert found.problem == ""
    table = name in ("simmim", "beit")
    assert found.architecture["width"] == str(WIDTH)
    assert found.architecture["depth"] == str(len({key.split(".")[1] for key in weights if key.startswith("blocks.")}))
    assert found.architecture["patch"] == str(PATCH)
    assert found.architecture["image size"] == ("12 × 12" if table or name == "beit absolute" else f"{SIZE} × {SIZE}")
    assert found.architecture["classes"] == ("5" if name == "vit" else "0")
    assert found.architecture["heads"] == (str(TABLE_HEADS) if table else "not in the file, give ?heads=NUMBER")
    kept = {key: value for key, value in weights.items() if key != "mask_token" and not key.endswith("index")}
    assert found.encoder == numbers(kept)
    assert found.container == "PyTorch (zip)"
    assert found.size == path.stat().st_size
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parts_of_a_training(tmp_path):
    content, _, weights = FILES["mae"]
    found = inspect(saved(content, tmp_path))
    assert found.parts["model: blocks"] == (12 * DEPTH, numbers({k: v for k, v in weights.items() if "blocks" in k}))
    assert found.parts["model: decoder_embed"] == (1, 8 * WIDTH)
    assert found.parts["optimizer"] == (2, 4)
    assert found.total == numbers(content["model"])
    assert found.types == {"float32": found.total}
    assert found.left_over == ("mask_token", "decoder_embed.weight", "decoder_pred.weight")
    assert found.arguments == {"lr": 0.1, "betas": [0.9, 0.95]}
    found = inspect(saved(FILES["dino"][0], tmp_path))
    assert found.part == "teacher, backbone."
    assert list(found.parts) == [
        "student: backbone",
        "student: head",
        "teacher: backbone",
        "teacher: head",
        "dino_loss: center",
    ]
    assert found.parts["teacher: head"] == (1, 6)
    assert "the file also has student; write which=student for it" in found.notes


def test_heads_of_a_usual_width(tmp_path):
    state = of_timm("vit_tiny_patch16_224", img_size=32, depth=1).state_dict()
    found = inspect(saved({name: value.half() for name, value in state.items()}, tmp_path))
    assert found.architecture["heads"] == "3 (not in the file; usual for this width, else give ?heads=NUMBER)"
    assert found.types == {"float16": numbers(state)}
    registers = of_timm("vit_small_patch14_reg4_dinov2", img_size=28, embed_dim=192, depth=1, num_heads=3).state_dict()
    assert inspect(saved(registers, tmp_path)).architecture["registers"] == "4"


def test_described_by_a_file_beside_it(tmp_path, small):
    save_encoder(load_encoder(small), tmp_path)
    for path in (tmp_path, tmp_path / "encoder.safetensors"):
        found = inspect(path)
        assert (found.format, found.why) == ("Sightline", "encoder.json is beside it")
        assert {key: found.architecture[key] for key in ("width", "depth", "heads", "image size")} == {
            "width": "48",
            "depth": "2",
            "heads": "3",
            "image size": "32",
        }
    (tmp_path / "encoder.json").write_text("{")
    assert "not an encoder reference" in inspect(tmp_path).problem
    folder = tmp_path / "vit"
    folder.mkdir()
    save_file(vit(), folder / "model.safetensors")
    config = {"model_type": "vit", "hidden_size": 24, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect(folder)
    assert (found.format, found.why) == ("Hugging Face", "config.json says vit")
    assert found.architecture == {"name": "vit", "width": "24", "heads": "3", "patch": "4", "image size": "16"}


@pytest.mark.parametrize("kind", list(NO_VISION_MODEL))
def test_what_is_no_vision_model_is_told_and_shown(tmp_path, kind):
    content, message = NO_VISION_MODEL[kind]
    found = inspect(saved(content, tmp_path))
    assert found.format == ""
    assert message in found.problem
    assert "not recognised" in describe(found)


# In words


def test_words(tmp_path):
    path = saved(FILES["mae"][0], tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == f"file          {path}, {path.stat().st_size:,} bytes, PyTorch (zip)"
    assert lines[2] == "format        MAE, training checkpoint, since it has a ViT with decoder_embed and decoder_pred"
    assert "architecture  width 24" in lines
    assert any(
        line.startswith("parameters    encoder ") and line.endswith(f"total {inspect(path).total:,}") for line in lines
    )
    assert "left over     3 weights not of the encoder: mask_token, decoder_embed.weight, decoder_pred.weight" in lines
    assert lines[-2:] == ["arguments     lr = 0.1", "              betas = [0.9, 0.95]"]


def test_json(tmp_path):
    content = FILES["mae"][0] | {"args": argparse.Namespace(nested=[[1], [2]], nan=float("nan"), array=np.zeros(3))}
    path = saved(content, tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    found = json.loads(result.output)
    assert found["format"] == "MAE, training checkpoint"
    assert found["arguments"]["nested"] == "[[1], [2]]"
    assert found["parts"]["optimizer"] == [2, 4]


def test_refused_files(tmp_path):
    (tmp_path / "file.pth").write_bytes(b"<html>Not Found</html>")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "file.pth")])
    assert isinstance(result.exception, InputError)  # main() turns it into one sentence
    assert "it begins with '<html>Not Found</html>'; get it again" in str(result.exception)


def test_nothing_in_a_file_commands_the_terminal(tmp_path):
    evil = "\x1b[2J[bold]\n\u202e"
    content = {evil: {evil: torch.zeros(2)}, "args": argparse.Namespace(**{evil: evil * 100, "long": "x" * 10_000})}
    text = describe(inspect(saved(content, tmp_path)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J[bold]\n" in text
    assert max(map(len, text.splitlines())) < 600


def test_what_contains_itself(tmp_path):
    loop = {"w": torch.zeros(3), "list": []}
    loop["again"] = loop
    loop["list"].append(loop["list"])  # type: ignore[attr-defined]
    found = inspect(saved({"model": loop, "args": loop, "deep": [loop]}, tmp_path))
    assert found.total == 3
    assert describe(found)
    assert as_json(found)


def test_what_is_under_many_names_is_counted_once(tmp_path):
    part = {f"w{i}": torch.zeros(2) for i in range(300)}
    path = saved({"model": part} | {f"model{i}": part for i in range(300)} | {"other": [part]}, tmp_path)
    found = inspect(path)
    assert found.total == 600
    assert set(found.parts) == {f"model: w{i}" for i in range(300)} | {"other"}
    assert found.parts["model: w0"] == (1, 2)
    assert len(weights_in(read_checkpoint(path))) == 300


@pytest.mark.parametrize("name", ["mae", "dino", "moco_v3", "msn", "simmim", "beit", "vit"])
def test_fuzz_names_of_a_format_with_any_shapes_raise_nothing(tmp_path, name):
    random = np.random.default_rng(0)

    def wrong(value):
        if isinstance(value, dict):
            return {key: wrong(held) for key, held in value.items()}
        if not isinstance(value, torch.Tensor) or random.random() < 0.8:
            return value
        return torch.zeros(tuple(random.integers(0, 4, size=random.integers(0, 5))))

    for _ in range(20):
        found = inspect(saved(wrong(FILES[name][0]), tmp_path))
        assert found.problem.isprintable()
