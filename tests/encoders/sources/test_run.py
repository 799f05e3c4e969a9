"""Encoders from run folders, with and without the decoder that MAE trained."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import sightline as sl
from sightline.analyses.attention import attention_distance, attention_nmi
from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.encoders.files.convert import convert
from sightline.encoders.modules.mae_decoder import Decoder
from sightline.encoders.watching import capture
from sightline.images.pipeline import batches
from sightline.measure.feature_cache import describe_encoder
from sightline.training.monitor import read_metrics
from sightline.training.watchers import FeatureWatch

TINY = {
    "size": 16,
    "width": 16,
    "depth": 3,
    "heads": 2,
    "patch": 4,
    "batch": 16,
    "epochs": 1,
    "warmup_epochs": 0,
    "images": "shapes?size=16&train=32&val=16&test=16",
    "evaluate_every": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked auto-encoder, hardly trained."""
    folder = tmp_path_factory.mktemp("runs") / "mae"
    decoder = {"decoder_width": 8, "decoder_depth": 2, "decoder_heads": 4}
    sl.pretrain("mae", out=folder, settings=TINY | decoder, workers=0, show_progress=False)
    return folder


@torch.no_grad()
def test_the_layers_of_the_decoder_are_sites(run: Path) -> None:
    """With nothing hidden the decoder sees all tokens in image order: its blocks, called one by one, give the sites."""
    encoder, both = sl.load_encoder(f"run:{run}"), sl.load_encoder(f"run:{run}?decoder=true")
    images = torch.randn(3, 3, 16, 16)
    with capture(both, ["**"]) as acts:
        pixels = both(images)
    with capture(encoder, ["**"]) as own:
        encoder(images)
    assert {name for name in own if not name.startswith("head")} <= set(acts)
    for name in ("embed", "block.0", "block.2", "block.1.attn_map", "norm"):
        assert torch.equal(acts[name], own[name])
    decoder = both.module.decoder
    assert isinstance(decoder, Decoder)
    stream = decoder.embed(own["norm"]) + decoder.pos_embed
    assert torch.equal(acts["decoder.embed"], stream)
    for number, block in enumerate(decoder.blocks):
        stream = block(stream)
        torch.testing.assert_close(acts[f"decoder.block.{number}"], stream)
        assert acts[f"decoder.block.{number}.attn_map"].shape == (3, 4, 17, 17)
    torch.testing.assert_close(pixels, decoder.pred(acts["decoder.norm"][:, 1:]))
    assert both.tokens == encoder.tokens
    assert both.depth == 3
    assert both.weights != encoder.weights


@torch.no_grad()
def test_the_decoder_is_the_one_that_was_trained(run: Path) -> None:
    from safetensors.torch import load_file

    checkpoint = latest(run)
    assert checkpoint is not None
    stored = load_file(checkpoint / "decoder.safetensors")
    for name, value in sl.load_encoder(f"run:{run}?decoder=true").module.decoder.state_dict().items():
        assert torch.equal(value, stored[name])


def test_a_decoder_describes_itself(run: Path, tmp_path: Path) -> None:
    checkpoint = latest(run)
    assert checkpoint is not None
    alone = tmp_path / "alone"
    shutil.copytree(checkpoint, alone)
    assert json.loads((alone / "decoder.json").read_text()) == {"width": 8, "depth": 2, "heads": 4}
    found = [sl.load_encoder(f"run:{folder}?decoder=true") for folder in (run, alone)]
    assert len({encoder.weights for encoder in found}) == 1
    assert [encoder.module.decoder.blocks[0].attn.num_heads for encoder in found] == [4, 4]
    (alone / "decoder.json").write_text("{}")
    with pytest.raises(InputError, match=r"Cannot read .*decoder\.json"):
        sl.load_encoder(f"run:{alone}?decoder=true")
    (alone / "decoder.json").write_text('{"width": 8, "depth": 3, "heads": 4}')
    with pytest.raises(InputError, match=r"is not the one that .*decoder\.json' describes"):
        sl.load_encoder(f"run:{alone}?decoder=true")


@pytest.mark.parametrize("own", [{}, {"decoder_width": 8, "decoder_heads": 2}])
def test_the_decoder_of_a_hybrid_has_its_settings_from_mae(own: dict[str, int], tmp_path: Path) -> None:
    """What the recipe does not say of a part is that part's default."""
    settings = TINY | {"mim": "mae", "mae": own | {"decoder_depth": 1}}
    sl.pretrain("hybrid", out=tmp_path / "both", settings=settings, workers=0, show_progress=False)
    decoder = sl.load_encoder(f"run:{tmp_path / 'both'}?decoder=true").module.decoder
    assert decoder.embed.out_features == own.get("decoder_width", 512)
    assert decoder.blocks[0].attn.num_heads == own.get("decoder_heads", 16)


def test_a_decoder_is_compared_like_any_layer(run: Path) -> None:
    images = sl.load_images("shapes?size=16", limit=16)
    result = sl.analyze(f"run:{run}?decoder=true", images, ["knn"], batch=8, workers=0, show_progress=False)["knn"]
    assert {"decoder.block.0", "decoder.block.1"} <= set(result.site.values)
    assert result.block.sel(site="decoder.block.1") == 4
    assert result.accuracy.sel(site="decoder.block.1", feature="gap").notnull().all()


def test_what_cannot_be_loaded_is_said(run: Path, tmp_path: Path) -> None:
    sl.save_encoder(sl.load_encoder(f"run:{run}"), tmp_path / "alone")
    with pytest.raises(InputError, match=r"has no decoder\.safetensors"):
        sl.load_encoder(f"run:{tmp_path / 'alone'}?decoder=true")
    for wrong in ("?decoder=yes", "?size=32", "@random"):
        with pytest.raises(InputError, match="comes with its own weights and settings"):
            sl.load_encoder(f"run:{run}{wrong}")


# Attention windows


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DINO, whose encoder is a copy, with attention to 3 × 3 of 4 × 4 patches."""
    folder = tmp_path_factory.mktemp("runs") / "windowed"
    little = {"attention_window": 3, "local_crops": 2, "hidden": 8, "bottleneck": 4, "out": 8, "evaluate_every": 1}
    sl.pretrain("dino", out=folder, settings=TINY | little, workers=0, show_progress=False)
    return folder


FAR = torch.tensor([[max(abs(i // 4 - j // 4), abs(i % 4 - j % 4)) > 1 for j in range(16)] for i in range(16)])


@torch.no_grad()
def reaches_far(encoder: sl.Encoder) -> bool:
    """Whether patches attend to any outside of 3 × 3; either none of them does in any layer, or all do."""
    with capture(encoder, "block.*.attn_map") as maps:
        encoder(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    found = torch.stack(list(maps.values()))[..., 1:, 1:][..., FAR]
    torch.testing.assert_close(torch.stack(list(maps.values())).sum(-1), torch.ones(3, 2, 2, 17))
    assert (found > 0).all() or not found.any()
    return bool(found.all())


def test_an_encoder_keeps_the_window_of_its_training(windowed: Path, tmp_path: Path) -> None:
    kept, lifted = sl.load_encoder(f"run:{windowed}"), sl.load_encoder(f"run:{windowed}?window=none")
    assert not reaches_far(kept)
    assert reaches_far(lifted)
    assert kept.weights == lifted.weights
    assert (kept.name, lifted.name) == ("windowed", "windowed, window lifted")
    assert kept.notes == ["patches attend to 3 × 3 around them, as in the training; ?window=none lifts that"]
    assert lifted.notes == ["trained with attention_window=3, which is lifted"]
    for encoder in (kept, lifted):
        again = sl.load_encoder(f"run:{sl.save_encoder(encoder, tmp_path / encoder.name)}")
        assert reaches_far(again) == reaches_far(encoder)
    lifted = dataclasses.replace(lifted, reference=kept.reference)
    assert describe_encoder(kept) != describe_encoder(lifted)  # or one would be taken for the other's results


def test_the_accuracy_on_the_way_is_that_of_the_windowed_encoder(windowed: Path) -> None:
    images = sl.load_images(str(TINY["images"]))
    told = float(read_metrics(windowed / "metrics.csv")[-1]["knn_cls"])
    for reference, same in ((f"run:{windowed}", True), (f"run:{windowed}?window=none", False)):
        encoder = sl.load_encoder(reference)
        knn = FeatureWatch(images, encoder.preprocess, torch.device("cpu"))
        features = knn._features(encoder.module, knn.images["train"].pixels)["cls"]
        own = sl.load_encoder(f"run:{windowed}")(knn.preprocess.normalize(torch.cat(knn.images["train"].pixels)))
        assert torch.allclose(features, own, atol=1e-5) is same
        assert not same or knn(encoder.module)["knn_cls"] == told


def test_fine_tuning_keeps_the_window_unless_it_is_lifted(windowed: Path, tmp_path: Path) -> None:
    for option in ("", "?window=none"):
        out = tmp_path / f"tuned{option}"
        settings = {"epochs": 1, "batch": 16, "images": TINY["images"], "evaluate_every": 0}
        tuned = sl.finetune(f"run:{windowed}{option}", out=out, settings=settings, workers=0, show_progress=False)
        assert reaches_far(tuned) is bool(option)
        assert reaches_far(sl.load_encoder(f"run:{out}")) is bool(option)


def test_attention_is_measured_within_the_window(windowed: Path) -> None:
    """A patch attends to neighbours at most, √2 patches away; the measures are those of the maps."""
    encoder, images = sl.load_encoder(f"run:{windowed}"), sl.load_images(str(TINY["images"]), limit=8)
    result = sl.analyze(encoder, images, ["attention"], batch=8, workers=0, show_progress=False)["attention"]
    (batch,) = batches(images, [encoder.preprocess], splits=["test"], batch=16, workers=0)
    with torch.inference_mode(), capture(encoder, "block.*.attn_map") as maps:
        encoder(encoder.preprocess.normalize(batch.pixels[encoder.preprocess]))
    for site, at in maps.items():
        plain = attention_distance(at, (4, 4), 4, prefix=1).mean(0)
        assert (plain > 0).all()
        assert (plain < 4 * 2**0.5).all()
        found = result.distance.sel(site=site).squeeze()
        np.testing.assert_allclose(found, plain, rtol=1e-5)
        np.testing.assert_allclose(result.nmi.sel(site=site).squeeze(), attention_nmi(at, 1).mean(0), atol=1e-5)


def test_a_window_cannot_be_converted_nor_lifted_where_there_is_none(run: Path, windowed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="attention_window, which timm cannot build"):
        convert(f"run:{windowed}", tmp_path / "timm")
    assert convert(f"run:{windowed}?window=none", tmp_path / "timm").difference < 1e-5
    with pytest.raises(InputError, match="was trained without an attention_window; leave window=none out"):
        sl.load_encoder(f"run:{run}?window=none")
    with pytest.raises(InputError, match="comes with its own weights and settings"):
        sl.load_encoder(f"run:{windowed}?window=5")
