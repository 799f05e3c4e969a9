"""What analyses are tested on: encoders of all kinds of tokens, and images for them."""

from typing import Any

import pytest
import torch
from support.passes import CNN
from support.references import SMALL

from sightline import Images, load_encoder, load_images
from sightline.encoders.modules.mae_decoder import Autoencoder, Decoder


@pytest.fixture(scope="session")
def images() -> Images:
    return load_images("shapes?size=32", limit=20)


@pytest.fixture(scope="session")
def encoders() -> dict[str, Any]:
    torch.manual_seed(0)
    vit = load_encoder(SMALL)
    return {
        "vit": vit,
        "registers": load_encoder(SMALL + "&class_token=False&global_pool=avg&reg_tokens=2"),
        "wide": load_encoder(SMALL.replace("size=32&", "img_size=(32,48)&")),
        "mae": load_encoder(Autoencoder(vit.module, Decoder(vit.module, 32, 2, 2)), preprocess=vit.preprocess),
        "one head": load_encoder(SMALL + "&num_heads=1"),
        "cnn": load_encoder(CNN),
        "next": load_encoder("timm:convnext_atto@random?size=64"),
    }
