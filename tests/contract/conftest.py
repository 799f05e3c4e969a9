"""What the checks of several kinds of plugins share."""

import pytest
from support.references import SMALL

import sightline as sl

NARROW = "layers=(1,1,1,1)&channels=(8,16,24,32)"  # a ResNet of four stages as small as the ViTs


@pytest.fixture(scope="module")
def encoders() -> dict[str, sl.Encoder]:
    return {
        "vit": sl.load_encoder(SMALL),
        "no cls": sl.load_encoder(SMALL + "&class_token=False&global_pool=avg&reg_tokens=2"),
        "cnn": sl.load_encoder(f"timm:resnet18@random?size=32&zero_init_last=False&{NARROW}"),
    }
