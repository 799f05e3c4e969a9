"""Decisions of a classifier, against a loop over single images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import sightline as sl
from sightline.images.sets import Item
from sightline.transfer.classifier_head import with_classifier
from sightline.transfer.evaluate import accuracy, decisions, right

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=2&embed_dim=12&num_heads=2"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Broken:
    source: Any

    def read(self, indices: Sequence[int]) -> list[Item]:
        return [
            Item(None, "damaged") if i % 7 == 0 else item
            for i, item in zip(indices, self.source.read(indices), strict=True)
        ]


def test_decisions_are_those_of_a_loop() -> None:
    images = sl.load_images("shapes?size=16&train=0&val=0&test=45")
    labels = images.labels.copy()
    labels[::5] = -1
    images = replace(images, labels=labels, source=Broken(images.source))
    encoder = with_classifier(sl.load_encoder(VIT), images.classes)
    module: Any = encoder.module.train()
    torch.nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(0))
    expected = np.full(45, -1)
    module.eval()
    for i in range(45):
        image = images.source.read([i])[0].image
        if image is not None:
            crop = torch.from_numpy(encoder.preprocess.crop(image))[None]
            with torch.no_grad():
                expected[i] = int(module(encoder.preprocess.normalize(crop)).argmax())
    module.train()
    assert len(set(expected.tolist())) > 2
    settings: dict[str, Any] = {"preprocess": encoder.preprocess, "device": CPU, "workers": 0}
    found = decisions(module, images, "test", batch=8, **settings)
    np.testing.assert_array_equal(found, expected)
    assert module.training
    assert all(part.training for part in module.modules())  # as before
    shares = [decisions(module, images, "test", batch=8, share=(r, 3), **settings) for r in range(3)]
    assert (np.stack(shares) >= 0).sum(0).max() == 1
    np.testing.assert_array_equal(np.max(shares, axis=0), expected)
    counted = (expected >= 0) & (labels >= 0)
    np.testing.assert_array_equal(right(found, labels), (expected == labels)[counted])
    assert accuracy(module, images, "test", **settings) == (expected == labels)[counted].mean()
