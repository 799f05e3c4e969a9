"""Checkpoints of MSN: target and anchor encoder, its resize of positions."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import HEADS, PATCH, SIDE, WIDTH, State, activations, check_sites, images, saved, vit
from torch.nn import functional as F

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.formats import msn

TARGET, ANCHOR = vit(seed=1), vit(seed=2)
PROJECTION = {"fc.fc1.weight": torch.ones(6, WIDTH), "fc.bn1.running_var": torch.ones(6)}


def training(prefix: str = "module.") -> dict[str, Any]:
    def named(state: State) -> State:
        return {prefix + name: value for name, value in (state | PROJECTION).items()}

    return {
        "encoder": named(ANCHOR),
        "opt": {"state": {}, "param_groups": []},
        "prototypes": torch.ones(4, 6),
        "target_encoder": named(TARGET),
        "epoch": 800,
        "loss": 1.0,
        "batch_size": 64,
        "world_size": 16,
        "lr": 0.001,
        "temperature": 0.1,
    }


@pytest.mark.parametrize("prefix", ["module.", ""])
@pytest.mark.parametrize(("which", "expected"), [("", TARGET), ("&which=target", TARGET), ("&which=anchor", ANCHOR)])
def test_training_checkpoint(prefix: str, which: str, expected: State, tmp_path: Path) -> None:
    path = saved(training(prefix), tmp_path)
    encoder = sl.load_encoder(f"msn:{path}?heads={HEADS}{which}")
    check_sites(encoder, activations(expected, images()), images())
    other = "target" if "anchor" in which else "anchor"
    assert encoder.notes == [
        f"the file also has {other}; write which={other} for it",
        "3 weights of the file are not part of the encoder and were left out: fc.fc1.weight, fc.bn1.running_var, "
        "prototypes",
    ]
    assert encoder.preprocess == sl.Preprocess((16, 16), 18, "bilinear")
    found = msn.layout(read_checkpoint(path), {"heads": "3"})
    assert (found.format, found.part) == ("MSN, training checkpoint", "target_encoder")
    assert msn.recognizes(read_checkpoint(path)) == "it has prototypes, encoder and target_encoder"


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_released_file(prefix: str, tmp_path: Path) -> None:
    """It has what the evaluation needs: no anchor, no optimiser, no epoch."""
    content = {key: training(prefix)[key] for key in ("target_encoder", "prototypes")}
    path = saved(content, tmp_path)
    assert msn.recognizes(read_checkpoint(path)) == "it has prototypes and target_encoder"
    encoder = sl.load_encoder(f"checkpoint:{path}?heads={HEADS}")
    check_sites(encoder, activations(TARGET, images()), images())
    assert encoder.preprocess == sl.Preprocess((16, 16), 18, "bilinear")  # MSN's, where a ViT of unknown origin has not
    with pytest.raises(InputError, match=r"which=anchor cannot be chosen: the file has target"):
        sl.load_encoder(f"checkpoint:{path}?heads={HEADS}&which=anchor")


def test_one_encoder_alone(tmp_path: Path) -> None:
    for number, content in enumerate((TARGET, {"model": TARGET}, {"target_encoder": TARGET})):
        encoder = sl.load_encoder(f"msn:{saved(content, tmp_path, f'{number}.pth')}?heads={HEADS}")
        check_sites(encoder, activations(TARGET, images()), images())
        assert encoder.notes == []
    # Where no target encoder was kept, the anchor is what there is.
    path = saved(training() | {"target_encoder": None}, tmp_path)
    check_sites(sl.load_encoder(f"msn:{path}?heads={HEADS}"), activations(ANCHOR, images()), images())
    assert msn.recognizes(read_checkpoint(path)) == ""


@pytest.mark.parametrize("side", [2, 3, 6, 7])
def test_positions_are_resized_as_the_official_code_does(side: int, tmp_path: Path) -> None:
    """By the scale √(n/N), n patches of the new grid and N of the old."""
    size = side * PATCH
    encoder = sl.load_encoder(f"msn:{saved(training(), tmp_path)}?heads={HEADS}&size={size}")
    patches = TARGET["pos_embed"][:, 1:].reshape(1, SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
    resized = F.interpolate(patches, scale_factor=math.sqrt(side**2 / SIDE**2), mode="bicubic")
    positions = torch.cat([TARGET["pos_embed"][:, :1], resized.permute(0, 2, 3, 1).reshape(1, side**2, WIDTH)], 1)
    check_sites(encoder, activations(TARGET | {"pos_embed": positions}, images(size, size)), images(size, size))
