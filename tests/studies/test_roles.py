"""Roles that references tell."""

from pathlib import Path

import pytest

from sightline.core.errors import InputError
from sightline.studies.roles import HYBRID, JE, MASKED_JE, REC, SUPERVISED, Role, known_role, known_roles

KNOWN = {
    "zoo:mae": (REC, "mae", "vit"),
    "zoo:supervised": (SUPERVISED, "supervised", "vit"),
    "zoo:msn": (MASKED_JE, "msn", "vit"),
    "moco_v3:vit-b-300ep.pth.tar": (JE, "moco_v3", "vit"),
    "moco_v3:r-50-1000ep.pth.tar": (JE, "moco_v3", "cnn"),
    "mae:mae_pretrain_vit_base.pth": (REC, "mae", "vit"),
    "dino:dino_resnet50_pretrain.pth": (JE, "dino", "cnn"),
    "convnext_v2:convnextv2_base_1k_224_fcmae.pt": (REC, "fcmae", "cnn"),
    "timm:vit_base_patch16_224.dino": (JE, "dino", "vit"),
    "timm:vit_base_patch16_224.mae": (REC, "mae", "vit"),
    "timm:vit_base_patch16_224@mae_vit-base-p16_8xb512_in1k.pth": (REC, "mae", "vit"),
    "timm:convnextv2_tiny.fcmae": (REC, "fcmae", "cnn"),
    "timm:resnet50.a1_in1k": (SUPERVISED, "supervised", "cnn"),
    "timm:vit_base_patch16_224.augreg_in1k": (SUPERVISED, "supervised", "vit"),
    "torchvision:resnet50": (SUPERVISED, "supervised", "cnn"),
    "huggingface:facebook/vit-mae-base": (REC, "mae", "vit"),
    "huggingface:facebook/vit-msn-small": (MASKED_JE, "msn", "vit"),
    "huggingface:facebook/dino-vitb16": (JE, "dino", "vit"),
}


@pytest.mark.parametrize("reference", KNOWN)
def test_known(reference: str) -> None:
    role = known_role("x", reference)
    assert role is not None
    assert (role.family, role.method, role.network) == KNOWN[reference]
    assert not role.tuned


@pytest.mark.parametrize(
    "reference",
    [
        "timm:vit_base_patch14_dinov2.lvd142m",
        "timm:vit_base_patch16_clip_224.openai",
        "timm:vit_tiny_patch16_224@random",
    ],
)
def test_what_has_no_role_or_several_is_left_to_the_user(reference: str) -> None:
    assert known_role("x", reference) is None


def test_hybrids_have_their_weight_and_fine_tuned_files_their_start() -> None:
    hybrid = known_role("h", "zoo:hybrid")
    assert hybrid is not None
    assert hybrid.family == HYBRID
    assert hybrid.weight is not None
    tuned = known_role("t", "mae:mae_finetuned_vit_base.pth")
    assert tuned is not None
    assert tuned.tuned


def test_a_fine_tuning_of_ours_has_the_role_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('objective = "finetune"\nencoder = "zoo:mae"\nseed = 3\n')
    roles = known_roles({"mae": "zoo:mae", "tuned": f"run:{tmp_path}"})
    assert roles["tuned"] == Role("tuned", REC, "mae", tuned_from="mae", seed=3)
    alone = known_role("tuned", f"run:{tmp_path}")
    assert alone is not None
    assert alone.tuned_from == "zoo:mae"


def test_windows_and_crops(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        'objective = "dino"\nbackbone = "vit"\nattention_window = 5\nmulti_crop = false\n'
    )
    assert known_role("d", f"run:{tmp_path}") == Role("d", JE, "dino", window=5, multicrop=False)
    assert known_role("d", f"run:{tmp_path}?window=none") == Role(
        "d", JE, "dino", window=5, multicrop=False, lifted=True
    )


def test_an_unknown_family_is_one_sentence() -> None:
    with pytest.raises(InputError, match="'x' cannot be 'contrastive'; a role is one of joint-embedding"):
        Role("x", "contrastive")
