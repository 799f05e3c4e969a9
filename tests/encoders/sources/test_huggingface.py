"""Hugging Face as a source, from folders that the library itself has written; the network is out of reach."""

import json
import shutil
import socket
import sys
import time
import traceback

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sightline.core.errors import InputError
from sightline.core.references import parse_reference
from sightline.encoders.loading import load_encoder
from sightline.encoders.saved import save_encoder
from sightline.encoders.sources.huggingface import _preprocess, names
from sightline.images.preprocess import Preprocess

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
SQUARE = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network here")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def write(folder, module, processor=SQUARE):
    module.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return module.eval()


def vit(**values):
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, **values))


def images(count=2):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


# Loading


def test_names():
    assert "facebook/dinov2-small" in names()


def test_folder(tmp_path, monkeypatch, capfd):
    module = write(tmp_path / "mine", vit())
    encoder = load_encoder(f"huggingface:{tmp_path / 'mine'}")
    assert (encoder.name, encoder.family, encoder.notes) == ("mine", "huggingface", [])
    assert encoder.preprocess == Preprocess((32, 32), (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3)
    assert encoder.module.config._attn_implementation == "sdpa"
    assert not encoder.module.training
    with torch.no_grad():
        expected = module(images())
        assert torch.equal(encoder(images()).last_hidden_state, expected.last_hidden_state)
        assert torch.equal(encoder(images()).pooler_output, expected.pooler_output)
    monkeypatch.chdir(tmp_path)
    assert load_encoder("huggingface:./mine").weights == encoder.weights
    assert load_encoder("huggingface:mine").weights == encoder.weights
    assert capfd.readouterr() == ("", "")


def test_classifiers_keep_their_head(tmp_path):
    config = transformers.ViTConfig(**SIZES, num_labels=7)
    module = write(tmp_path, transformers.ViTForImageClassification(config))
    encoder = load_encoder(f"huggingface:{tmp_path}")
    with torch.no_grad():
        assert torch.equal(encoder(images()).logits, module(images()).logits)
    assert list(encoder.sites)[-1] == "head.0"


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_of_a_model_with_text_only_the_vision_tower_is_kept(tmp_path, kind):
    config = getattr(transformers, f"{kind}Config")(vision_config=SIZES, text_config=TEXT)
    module = write(tmp_path, getattr(transformers, f"{kind}Model")(config))
    encoder = load_encoder(f"huggingface:{tmp_path}")
    assert type(encoder.module).__name__ == f"{kind}VisionModel"
    with torch.no_grad():
        expected = module.vision_model(images())
        assert torch.equal(encoder(images()).pooler_output, expected.pooler_output)


def test_mae_goes_without_decoder_mask_and_shuffling(tmp_path):
    decoder = {f"decoder_{key}": SIZES[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    config = transformers.ViTMAEConfig(**SIZES, **decoder, decoder_num_hidden_layers=1)
    module = write(tmp_path, transformers.ViTMAEForPreTraining(config))
    encoder = load_encoder(f"huggingface:{tmp_path}")
    plain = transformers.ViTModel(transformers.ViTConfig(**SIZES), add_pooling_layer=False).eval()
    plain.load_state_dict(module.vit.state_dict())
    with torch.no_grad():
        found, expected = encoder(images()).last_hidden_state, plain(images()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(encoder.notes) == 1
    assert "not part of the encoder and were left out: decoder." in encoder.notes[0]


def test_half_precision_files_are_used_in_full(tmp_path):
    write(tmp_path, vit().half())
    assert next(load_encoder(f"huggingface:{tmp_path}").module.parameters()).dtype == torch.float32


def test_random(tmp_path):
    write(tmp_path, vit())
    (tmp_path / "model.safetensors").unlink()
    state = torch.random.get_rng_state()
    first = load_encoder(f"huggingface:{tmp_path}@random?seed=1")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.weights == load_encoder(f"huggingface:{tmp_path}@random?seed=1").weights
    assert first.weights != load_encoder(f"huggingface:{tmp_path}@random").weights


# Weights


def rewrite(folder, change):
    state = change(load_file(folder / "model.safetensors"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_refused(tmp_path):
    write(tmp_path, vit())
    state = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in state if name.endswith(("mlp.fc2.bias", "output.dense.bias")))
    rewrite(tmp_path, lambda state: {name: value for name, value in state.items() if name != lost})
    with pytest.raises(InputError, match=r"it lacks 1 of \d+ weights .*; is it a checkpoint of another model"):
        load_encoder(f"huggingface:{tmp_path}")


def test_a_missing_pooler_or_head_is_told_and_left_out(tmp_path):
    write(tmp_path / "pooler", vit())
    rewrite(tmp_path / "pooler", lambda state: {n: v for n, v in state.items() if "pooler" not in n})
    encoder = load_encoder(f"huggingface:{tmp_path / 'pooler'}")
    assert encoder.notes == ["the file has no pooler, so the encoder has none"]
    assert not [name for name in encoder.module.state_dict() if "pooler" in name]
    assert encoder.weights == load_encoder(f"huggingface:{tmp_path / 'pooler'}").weights

    write(tmp_path / "head", transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES)))
    rewrite(tmp_path / "head", lambda state: {n: v for n, v in state.items() if "classifier" not in n})
    encoder = load_encoder(f"huggingface:{tmp_path / 'head'}")
    assert encoder.notes == ["the file has no classifier, so the encoder has none"]
    assert "head.0" not in encoder.sites
    with torch.no_grad():
        assert encoder(images()).logits.shape == (2, 32)


def test_left_over_weights_are_told(tmp_path):
    write(tmp_path, vit())
    rewrite(tmp_path, lambda state: state | {"projector.weight": torch.zeros(2)})
    notes = load_encoder(f"huggingface:{tmp_path}").notes
    assert notes == ["1 weight of the file is not part of the encoder and was left out: projector.weight"]


def test_another_width_is_refused(tmp_path):
    write(tmp_path, vit())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    with pytest.raises(InputError, match="Cannot load huggingface:") as error:
        load_encoder(f"huggingface:{tmp_path}")
    assert "\n" not in str(error.value)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_old_files_load_and_their_code_is_not_run(tmp_path):
    module = write(tmp_path, vit())
    (tmp_path / "model.safetensors").unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    encoder = load_encoder(f"huggingface:{tmp_path}")
    with torch.no_grad():
        assert torch.equal(encoder(images()).last_hidden_state, module(images()).last_hidden_state)
    torch.save(module.state_dict() | {"x": Malicious(tmp_path / "hacked")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="is refused, nothing of it was executed: it asks for") as error:
        load_encoder(f"huggingface:{tmp_path}")
    assert "weights_only" not in "".join(traceback.format_exception(error.value))  # as torch advises
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_in_several_files(tmp_path, kind):
    module = write(tmp_path, vit())
    plain = load_encoder(f"huggingface:{tmp_path}")
    (tmp_path / "model.safetensors").unlink()
    stem, state = {"safetensors": "model", "bin": "pytorch_model"}[kind], module.state_dict()
    shards = {name: f"{stem}-0000{1 + i % 2}-of-00002.{kind}" for i, name in enumerate(state)}
    for shard in set(shards.values()):
        part = {name: state[name] for name in state if shards[name] == shard}
        (save_file if kind == "safetensors" else torch.save)(part, tmp_path / shard)
    index = tmp_path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert load_encoder(f"huggingface:{tmp_path}").weights == plain.weights
    index.write_text(json.dumps({"weight_map": shards | {"x": "../other.bin"}}))
    with pytest.raises(InputError, match=r"names a file of weights outside of it, '\.\./other\.bin'"):
        load_encoder(f"huggingface:{tmp_path}")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, next(iter(shards.values())))}))
    with pytest.raises(InputError, match="is it a checkpoint of another model"):
        load_encoder(f"huggingface:{tmp_path}")


@pytest.mark.parametrize(
    "measure",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 60_000},
        {"intermediate_size": 10**9},
        {"num_labels": 10**9, "architectures": ["ViTForImageClassification"]},
        {"image_size": 10**6},
    ],
    ids=str,
)
def test_a_description_of_a_far_larger_model_is_refused_before_it_is_built(tmp_path, measure):
    """Beside a file of 100 kB; these would take from 1 GB on, and minutes."""
    write(tmp_path, vit())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | measure))
    started = time.process_time()
    with pytest.raises(InputError, match=r"has 40 weights with 24,960 numbers, but a far larger model is described"):
        load_encoder(f"huggingface:{tmp_path}")
    assert time.process_time() - started < 10


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    write(tmp_path, vit())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'hacked')!r})\n")
    with pytest.raises(InputError, match="Cannot load huggingface:"):
        load_encoder(f"huggingface:{tmp_path}")
    assert not (tmp_path / "hacked").exists()


def test_saved_encoders_come_back_the_same(tmp_path):
    write(tmp_path / "pooler", vit())
    rewrite(tmp_path / "pooler", lambda state: {n: v for n, v in state.items() if "pooler" not in n})
    encoder = load_encoder(f"huggingface:{tmp_path / 'pooler'}")
    again = load_encoder(f"run:{save_encoder(encoder, tmp_path / 'mine')}")
    assert again.weights == encoder.weights
    assert (again.preprocess, again.tokens) == (encoder.preprocess, encoder.tokens)
    with torch.no_grad():
        assert torch.equal(again(images()).last_hidden_state, encoder(images()).last_hidden_state)


# Preprocessing


def fields(**changes):
    return SQUARE | changes


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (fields(), ((32, 32), (32, 32), "bilinear")),
        (fields(size=32), ((32, 32), (32, 32), "bilinear")),
        (fields(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}), ((32, 32), 40, "bilinear")),
        (
            fields(image_processor_type="CLIPFeatureExtractor", size=40, crop_size=32, resample=3),
            ((32, 32), 40, "bicubic"),
        ),
        (fields(size=40, crop_size=32, do_center_crop=True), ((32, 32), (40, 40), "bilinear")),
        (fields(crop_size={"height": 16, "width": 16}, do_center_crop=False), ((32, 32), (32, 32), "bilinear")),
        (fields(do_resize=False, crop_size=32), ((32, 32), None, "bilinear")),
        (fields(size={"shortest_edge": 32}, crop_pct=0.875), ((32, 32), 36, "bilinear")),
        (fields(size={"height": 32, "width": 48}, resample=0), ((32, 48), (32, 48), "nearest")),
    ],
)
def test_sizes(processor, expected):
    found, notes = _preprocess(processor, (32, 32), parse_reference("huggingface:x"))
    assert (found.size, found.resize, found.interpolation) == expected
    assert notes == []


@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ({}, lambda p: (p / 255 - 0.5) / 0.5),
        ({"do_normalize": False}, lambda p: p / 255),
        ({"rescale_factor": 1 / 127.5}, lambda p: (p / 127.5 - 0.5) / 0.5),
        ({"do_rescale": False}, lambda p: (p - 0.5) / 0.5),
    ],
)
def test_normalisation(changes, scores):
    found, _ = _preprocess(fields(**changes), (32, 32), parse_reference("huggingface:x"))
    pixels = torch.arange(0, 192, dtype=torch.uint8).view(1, 3, 8, 8)
    torch.testing.assert_close(found.normalize(pixels), scores(pixels.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (fields(resample=1), "resampling 1"),
        (fields(size={"longest_edge": 32}), "image size"),
        (fields(image_mean=[0.5], image_std=[0.5]), "normalisation"),
        (fields(image_std=[0.5, 0, 0.5]), r"huggingface:.*: Pixels .* the std \(0.5, 0.0, 0.5\)"),
        (fields(image_mean=[0.5, float("nan"), 0.5]), "normalised with the mean"),
        (fields(image_mean=None), "normalisation"),
        (fields(size=0), r"huggingface:.*: Images cannot be cropped to \(0, 0\)"),
        (fields(size=16), "makes images of 16 × 16, but the model takes 32 × 32 only"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, processor, message):
    write(tmp_path, vit(), processor)
    with pytest.raises(InputError, match=message):
        load_encoder(f"huggingface:{tmp_path}")


@pytest.mark.parametrize("shape", [(60, 80), (20, 30)])
@pytest.mark.parametrize("kind", ["ViT", "CLIP", "Beit", "Bit", "DeiT", "Siglip", "ConvNext"])
def test_preprocessing_is_that_of_the_library(tmp_path, kind, shape):
    """Within one step of a byte: the library resizes with another implementation of the same filter."""
    size = {"shortest_edge": 36} if kind in ("CLIP", "Bit", "ConvNext") else {"height": 36, "width": 36}
    crop = {"crop_size": {"height": 32, "width": 32}} if kind in ("CLIP", "Beit", "Bit", "DeiT") else {}
    processor = getattr(transformers, f"{kind}ImageProcessor")(size=size, **crop)
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    found, notes = _preprocess(saved, (36, 36), parse_reference("huggingface:x"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    assert notes == []
    torch.testing.assert_close(found([image])[0], expected, rtol=0, atol=1.01 / 255 / min(found.std))


@pytest.mark.parametrize(("side", "crop_pct"), [(224, None), (224, 0.8), (384, None), (384, 0.8), (400, 0.875)])
def test_convnext_crops_below_384_pixels_and_squashes_from_there_on(side, crop_pct):
    given = {} if crop_pct is None else {"crop_pct": crop_pct}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": side}, **half, **given)
    told = fields(image_processor_type="ConvNextImageProcessor", size={"shortest_edge": side}, resample=3, **given)
    found, notes = _preprocess(told, (side, side), parse_reference("huggingface:x"))
    smooth = np.linspace(0, 255, 60 * 90 * 3).reshape(60, 90, 3).astype(np.uint8)
    image = Image.fromarray(smooth)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    assert notes == []
    torch.testing.assert_close(found([image])[0], expected, rtol=0, atol=1.01 / 255 / min(found.std))


def test_processors_that_are_not_imitated_are_noted():
    for kind in ("LevitImageProcessor", "PoolFormerImageProcessorFast", "EfficientNetImageProcessor"):
        _, notes = _preprocess(fields(image_processor_type=kind), (32, 32), parse_reference("huggingface:x"))
        assert [note.partition(", which may")[0] for note in notes] == [f"its image processor is {kind}"]


def test_without_a_processor(tmp_path):
    write(tmp_path, vit(), processor=None)
    encoder = load_encoder(f"huggingface:{tmp_path}")
    assert encoder.preprocess == Preprocess((32, 32), (32, 32))
    assert "no preprocessor_config.json" in encoder.notes[0]


# Errors


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("huggingface:./nowhere", "There is no folder './nowhere'"),
        ("huggingface:/nowhere/at/all", "There is no folder"),
        ("huggingface:nobody/nothing", "Cannot load huggingface:nobody/nothing"),
        ("huggingface:a/b@file.pth", "come with their own"),
        ("huggingface:a/b?sed=1", "unknown option 'sed'; did you mean 'seed'"),
        ("huggingface:a/b?seed=x", "whole number"),
        ("huggingface:a/b?without=poler", "did you mean 'pooler'"),
    ],
)
def test_errors(reference, message):
    with pytest.raises(InputError, match=message) as error:
        load_encoder(reference)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{}", "no json", '{"model_type": "unheard_of"}'])
def test_folders_without_a_model(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="Cannot load huggingface:") as error:
        load_encoder(f"huggingface:{tmp_path}")
    assert "\n" not in str(error.value)


def test_a_folder_without_weights(tmp_path):
    write(tmp_path, vit())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="Cannot load huggingface:"):
        load_encoder(f"huggingface:{tmp_path}")
    shutil.rmtree(tmp_path)


def test_without_transformers(tmp_path, monkeypatch):
    write(tmp_path, vit())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'sightline\[huggingface\]'"):
        load_encoder(f"huggingface:{tmp_path}")
