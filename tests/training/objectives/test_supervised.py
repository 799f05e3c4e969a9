"""Supervised training: the loss of smoothed and mixed labels against plain float64 loops."""

import math

import numpy as np
import pytest
import torch.nn.functional as F
from support.reconstruction import VIT, make, make_views

from sightline.core.schedules import Progress
from sightline.images.augment.mixup import draw_mix
from sightline.training.backbones import Backbone
from sightline.training.objectives import supervised


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_supervised_loss_is_the_mean_cross_entropy_of_labelled_images(smoothing: float) -> None:
    objective, views = make("supervised", label_smoothing=smoothing), make_views()
    loss, scalars = objective(views)
    logits = objective.backbone(views.pixels[0]).detach().double().numpy()
    each, right = [], []
    for row, label in zip(logits, views.labels.tolist(), strict=True):
        if label < 0:
            continue
        log_p = row - math.log(np.exp(row).sum())
        target = np.full(3, smoothing / 3)
        target[label] += 1 - smoothing
        each.append(-(target * log_p).sum())
        right.append(row.argmax() == label)
    assert len(each) == 4
    assert loss.item() == pytest.approx(np.mean(each), rel=1e-5)
    assert scalars["accuracy"].item() == pytest.approx(np.mean(right))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_supervised_training_mixes_images_and_labels(mixup: float, cutmix: float) -> None:
    objective = make("supervised", label_smoothing=0.1, mixup=mixup, cutmix=cutmix)
    assert (objective.pairs, make("supervised").pairs) == (True, False)
    for step in range(4):
        views = make_views()
        views.progress, views.seed = Progress(step, 10, 5), 7
        mix = draw_mix(mixup, cutmix, (16, 16), 7, step)
        assert mix is not None
        x, total, mass = views.pixels[0], 0.0, 0.0
        for i, label in enumerate(views.labels.tolist()):
            other = i ^ 1  # neighbours
            if mix.box is None:
                image = mix.share * x[i] + (1 - mix.share) * x[other]
            else:
                image = x[i].clone()
                image[(slice(None), *mix.box)] = x[other][(slice(None), *mix.box)]
            row = objective.backbone(image[None])[0].detach().double().numpy()
            nats = math.log(np.exp(row).sum()) - row
            for one, weight in ((label, mix.share), (views.labels[other].item(), 1 - mix.share)):
                if one >= 0:
                    total += weight * (0.9 * nats[int(one)] + 0.1 * nats.mean())
                    mass += weight
        assert objective(views)[0].item() == pytest.approx(total / mass, rel=1e-5)


def test_without_any_label_the_supervised_loss_is_zero() -> None:
    views = make_views()
    views.labels.fill_(-1)
    loss, scalars = make("supervised")(views)
    assert loss.item() == 0
    assert scalars["accuracy"].item() == 0


@pytest.mark.parametrize("name", ["resnet18", "convnextv2_atto"])
def test_supervised_logits_of_a_cnn_are_its_own(name: str) -> None:
    objective, views = make("supervised", Backbone(name, size=32), label_smoothing=0.0), make_views(size=32)
    objective.eval()  # batch statistics are not to be updated between the two
    expected = F.cross_entropy(objective.backbone(views.pixels[0]), views.labels, ignore_index=-1)
    assert objective(views)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_supervised_views_may_be_strong() -> None:
    (policy,) = supervised.views(supervised.SupervisedConfig(randaugment=(9.0, 0.5), erase=0.25), VIT)
    assert (policy.randaugment, policy.erase) == ((9.0, 0.5), 0.25)
