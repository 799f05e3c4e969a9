"""Encoders from run folders, with and without the decoder that MAE trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.checkpoints import latest
from sightline.errors import InputError
from sightline.objectives.mae import Decoder
from sightline.sites import capture
from sightline.sources import zoo

TINY = {
    "size": 16, "width": 16, "depth": 3, "heads": 2, "patch": 4, "batch": 16, "epochs": 1, "warmup_epochs": 0,
    "images": "shapes?size=16&train=32&val=16&test=16", "evaluate_every": 0,
}  # fmt: skip


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
    """decoder.json is enough; folders from before there was one have a recipe beside them."""
    checkpoint = latest(run)
    assert checkpoint is not None
    alone, before = tmp_path / "alone", tmp_path / "before"
    shutil.copytree(checkpoint, alone)
    assert json.loads((alone / "decoder.json").read_text()) == {"format": 1, "width": 8, "depth": 2, "heads": 4}
    shutil.copytree(run, before)
    (before / "checkpoints" / checkpoint.name / "decoder.json").unlink()
    found = [sl.load_encoder(f"run:{folder}?decoder=true") for folder in (run, alone, before)]
    assert len({encoder.weights for encoder in found}) == 1
    assert [encoder.module.decoder.blocks[0].attn.num_heads for encoder in found] == [4, 4, 4]
    (alone / "decoder.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match=r"Cannot read .*decoder\.json"):
        sl.load_encoder(f"run:{alone}?decoder=true")
    (alone / "decoder.json").write_text('{"width": 8, "depth": 3, "heads": 4}')
    with pytest.raises(InputError, match=r"is not the one that .*decoder\.json' describes"):
        sl.load_encoder(f"run:{alone}?decoder=true")


def test_the_decoder_of_the_zoo_loads_with_and_without_its_description(tmp_path: Path) -> None:
    folder = tmp_path / "mae"
    shutil.copytree(zoo.FOLDER / "mae", folder)
    described = sl.load_encoder("zoo:mae?decoder=true")
    (folder / "decoder.json").unlink()
    assert sl.load_encoder(f"run:{folder}?decoder=true").weights == described.weights


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
