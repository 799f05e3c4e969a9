"""Checkpoints of MoCo-v3: base and momentum encoder, linear probes, DeiT's layout, its fixed positions, its ResNet."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import HEADS, PATCH, SIDE, WIDTH, State, activations, check_sites, images, saved, sincos, vit
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.formats import moco_v3
from sightline.encoders.watching import capture

POSITIONS = {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=True)}
BASE, MOMENTUM = vit(seed=1) | POSITIONS, vit(seed=2) | POSITIONS
PROJECTION = {"head.0.weight": torch.ones(6, WIDTH), "head.1.weight": torch.ones(6), "head.1.bias": torch.ones(6)}


def training(base: State = BASE, momentum: State = MOMENTUM) -> dict[str, Any]:
    state = {f"module.base_encoder.{name}": value for name, value in (base | PROJECTION).items()}
    state |= {f"module.momentum_encoder.{name}": value for name, value in (momentum | PROJECTION).items()}
    state |= {"module.predictor.0.weight": torch.ones(6, 6)}
    return {"epoch": 300, "arch": "vit_base", "state_dict": state, "optimizer": {"state": {}}, "scaler": {}}


@pytest.mark.parametrize(("which", "expected"), [("", BASE), ("&which=base", BASE), ("&which=momentum", MOMENTUM)])
def test_training_checkpoint(which: str, expected: State, tmp_path: Path) -> None:
    path = saved(training(), tmp_path, "vit-b-300ep.pth.tar")
    encoder = sl.load_encoder(f"moco_v3:{path}?heads={HEADS}{which}")
    check_sites(encoder, activations(expected, images()), images())
    other = "base" if "momentum" in which else "momentum"
    assert encoder.notes == [
        f"the file also has {other}; write which={other} for it",
        "4 weights of the file are not part of the encoder and were left out: head.0.weight, head.1.weight, "
        "head.1.bias, …",
    ]
    assert encoder.preprocess == sl.Preprocess((16, 16), 18, "bilinear")
    found = moco_v3.layout(read_checkpoint(path), {"heads": "3"})
    assert (found.format, found.part) == ("MoCo-v3, training checkpoint", "state_dict, base_encoder.")
    assert found.left_over[-1] == "predictor.0.weight"
    assert moco_v3.recognizes(read_checkpoint(path)) == "it has base_encoder and momentum_encoder"


def test_linear_probe(tmp_path: Path) -> None:
    """The classifier is kept."""
    state = vit(seed=1, classes=5) | POSITIONS
    content = {"state_dict": {f"module.{name}": value for name, value in state.items()}, "best_acc1": torch.tensor(0.7)}
    path = saved(content, tmp_path)
    encoder = sl.load_encoder(f"moco_v3:{path}?heads={HEADS}")
    check_sites(encoder, activations(state, images()), images())
    assert encoder.notes == []
    assert moco_v3.recognizes(read_checkpoint(path)) == "its positions are MoCo-v3's sine-cosine, row first"


def test_layout_of_deit(tmp_path: Path) -> None:
    path = saved({"model": BASE}, tmp_path)
    check_sites(sl.load_encoder(f"moco_v3:{path}?heads={HEADS}"), activations(BASE, images()), images())
    assert moco_v3.recognizes(read_checkpoint(path)) == "its positions are MoCo-v3's sine-cosine, row first"
    assert moco_v3.layout(read_checkpoint(path), {"heads": "3"}).format == "MoCo-v3, encoder only"


@pytest.mark.parametrize(("height", "width"), [(24, 24), (8, 12)])
def test_fixed_positions_are_computed_for_another_size(height: int, width: int, tmp_path: Path) -> None:
    path = saved(training(), tmp_path)
    encoder = sl.load_encoder(f"moco_v3:{path}?heads={HEADS}&size={height}x{width}")
    positions = sincos(height // PATCH, width // PATCH, WIDTH, row_first=True)
    check_sites(encoder, activations(BASE | {"pos_embed": positions}, images(height, width)), images(height, width))


def test_trained_positions_are_resized(tmp_path: Path) -> None:
    """As DeiT does, with which MoCo-v3 is fine-tuned."""
    state = vit()
    encoder = sl.load_encoder(f"moco_v3:{saved({'model': state}, tmp_path)}?heads={HEADS}&size=24")
    patches = state["pos_embed"][:, 1:].reshape(1, SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
    resized = F.interpolate(patches, size=(6, 6), mode="bicubic", align_corners=False)
    positions = torch.cat([state["pos_embed"][:, :1], resized.permute(0, 2, 3, 1).reshape(1, 36, WIDTH)], 1)
    check_sites(encoder, activations(state | {"pos_embed": positions}, images(24, 24)), images(24, 24))


@torch.no_grad()
def test_resnet(tmp_path: Path) -> None:
    """Projection and predictor are left out; the classifier of a linear probe is kept."""
    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).eval()
    own = sl.load_encoder(model)
    state = model.state_dict()
    core = {name: value for name, value in state.items() if not name.startswith("fc.")}
    projected = core | {"fc.0.weight": torch.ones(6, 512)}
    encoder = sl.load_encoder(f"moco_v3:{saved(training(projected, projected), tmp_path)}?size=64")
    probe = {"state_dict": {f"module.{name}": value for name, value in state.items()}}
    probed = sl.load_encoder(f"moco_v3:{saved(probe, tmp_path, 'probe.pth')}?size=64")
    with capture(own, ["**"]) as expected, capture(encoder, ["**"]) as sites, capture(probed, ["**"]) as all_sites:
        for each in (own, encoder, probed):
            each(images(64, 64))
    assert set(all_sites) == set(expected) == {*sites, "head.0"}
    for name, value in all_sites.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
        assert name == "head.0" or torch.equal(value, sites[name])
    assert any("fc.0.weight" in note for note in encoder.notes)


def test_a_convolutional_stem_is_refused(tmp_path: Path) -> None:
    state = {name: value for name, value in BASE.items() if not name.startswith("patch_embed")}
    state |= {"patch_embed.proj.0.weight": torch.ones(6, 3, 3, 3)}
    with pytest.raises(InputError, match=r"is a ViT with a convolutional stem, which Sightline cannot build"):
        sl.load_encoder(f"moco_v3:{saved(training(state, state), tmp_path)}?heads=3")


def test_the_heads_of_official_widths() -> None:
    """The small one has 12, unlike other ViTs of its width."""
    assert moco_v3.OFFICIAL.heads == {384: 12, 768: 12, 1024: 16, 1280: 16}
