"""The loss against a plain one in float64, learning rates by hand, the average against a loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sightline as sl
from sightline.core.schedules import Progress
from sightline.images.augment.mixup import draw_mix
from sightline.training.objective import Views
from sightline.training.optimization import Optimization, make_optimizer, set_schedule
from sightline.transfer.classification import ClassificationObjective, decayed
from sightline.transfer.classifier_head import layers_of, with_classifier

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=2&embed_dim=12&num_heads=2"


def batch(labels: list[int], step: int = 0) -> Views:
    pixels = torch.randn(len(labels), 3, 16, 16, generator=torch.Generator().manual_seed(1))
    keys = np.arange(len(labels), dtype=np.uint64)
    return Views([pixels], torch.tensor(labels), keys, Progress(step, 100, 10), seed=7)


def made(**settings: Any) -> ClassificationObjective:
    encoder = with_classifier(sl.load_encoder(VIT), ("a", "b", "c", "d", "e"), drop_path=0.0)
    module: Any = encoder.module
    nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(2))
    return ClassificationObjective(module, layers_of(encoder), 5, **settings)


@torch.no_grad()
@pytest.mark.parametrize("labels", [[0, 3, 2, 2], [4, -1, 1, 0], [-1, -1, 2, -1]])
@pytest.mark.parametrize(
    ("mixup", "cutmix", "smoothing"), [(0, 0, 0), (0, 0, 0.1), (0.8, 0, 0.1), (0, 1, 0), (0.8, 1, 0.2)]
)
def test_the_loss_is_the_cross_entropy_of_mixed_labels(
    labels: list[int], mixup: float, cutmix: float, smoothing: float
) -> None:
    objective = made(mixup=mixup, cutmix=cutmix, label_smoothing=smoothing)
    for step in range(4):
        views = batch(labels, step)
        loss, _ = objective(views)
        mix = draw_mix(mixup, cutmix, (16, 16), 7, step)
        share = 1.0 if mix is None else mix.share
        mixed = views.pixels[0].clone()
        for i, other in enumerate([1, 0, 3, 2]):
            if mix is not None and mix.box is not None:
                mixed[i][(slice(None), *mix.box)] = views.pixels[0][other][(slice(None), *mix.box)]
            else:
                mixed[i] = share * views.pixels[0][i] + (1 - share) * views.pixels[0][other]
        logits = objective.model(mixed).double()
        total = mass = 0.0
        for i, other in enumerate([1, 0, 3, 2]):
            for label, weight in ((labels[i], share), (labels[other], 1 - share)):
                if label >= 0:
                    nats = -logits[i].log_softmax(0)
                    total += weight * float((1 - smoothing) * nats[label] + smoothing * nats.mean())
                    mass += weight
        assert float(loss) == pytest.approx(total / mass, rel=1e-5)


@torch.no_grad()
def test_without_labels_nothing_is_learned() -> None:
    loss, scalars = made()(batch([-1, -1]))
    assert (float(loss), float(scalars["accuracy"])) == (0.0, 0.0)


def test_accuracy_is_that_of_the_larger_target() -> None:
    objective = made()
    views = batch([0, 1, 2, 3])
    views.labels = objective.model(views.pixels[0]).argmax(1)
    views.labels[0] = (views.labels[0] + 1) % 5
    assert float(objective(views)[1]["accuracy"]) == 0.75


@pytest.mark.parametrize("reference", [VIT, "timm:resnet18@random?num_classes=0"])
def test_what_is_built_on_an_encoder_is_a_layer_of_its_own(reference: str) -> None:
    """Also on one that ends with its blocks: the last of them is one step below a detector's head."""
    encoder = sl.load_encoder(reference)
    scales = decayed(layers_of(encoder), 0.5, "")
    last = "blocks.1.mlp.fc2.weight" if "vit" in reference else "layer4.1.conv2.weight"
    assert (scales[last], scales[""]) == (0.5, 1.0)


def test_learning_rates_fall_towards_the_input() -> None:
    objective = made(layer_decay=0.75)
    optimizer = make_optimizer(objective, Optimization(lr=1.0, weight_decay=0.3), objective.lr_scales())
    set_schedule(optimizer.param_groups, 0.4, 0.2)
    rates = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[p] for name, p in objective.model.named_parameters()}
    assert len(found) == len(rates)
    # Two blocks: layers 0 (embedding), 1, 2 and 3 (norm, head); 0.4 · 0.75^(3 − layer).
    expected = {
        "cls_token": (0.16875, 0.0),
        "pos_embed": (0.16875, 0.0),
        "patch_embed.proj.weight": (0.16875, 0.2),
        "patch_embed.proj.bias": (0.16875, 0.0),
        "blocks.0.attn.qkv.weight": (0.225, 0.2),
        "blocks.0.norm1.weight": (0.225, 0.0),
        "blocks.1.mlp.fc2.weight": (0.3, 0.2),
        "blocks.1.mlp.fc2.bias": (0.3, 0.0),
        "norm.weight": (0.4, 0.0),
        "head.weight": (0.4, 0.2),
        "head.bias": (0.4, 0.0),
    }
    for name, (lr, decay) in expected.items():
        assert found[name] == (pytest.approx(lr), decay), name
    assert len(optimizer.param_groups) == 8


def test_the_average_is_that_of_a_loop() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    objective = ClassificationObjective(model, {}, 4, ema=0.9)
    assert objective.encoder is objective.average is not None
    plain = {name: value.clone().double() for name, value in model.state_dict().items()}
    for step in range(5):
        model(torch.randn(8, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        objective.after_step(Progress(step + 1, 5, 5))
        for name, value in model.state_dict().items():
            counts = name.endswith("num_batches_tracked")
            plain[name] = value.double() if counts else 0.9 * plain[name] + 0.1 * value.double()
    for name, value in objective.encoder.state_dict().items():
        torch.testing.assert_close(value.double(), plain[name], rtol=1e-5, atol=1e-6)
    assert not any(p.requires_grad for p in objective.average.parameters())
    assert plain["1.running_mean"].abs().max() > 0


def test_without_momentum_the_classifier_itself_is_kept() -> None:
    objective = made()
    assert objective.encoder is objective.model
    assert objective.average is None
