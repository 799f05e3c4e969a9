"""What SimCLR, MoCo-v3, DINO and MSN have in common: followers, gradients, states, settings, two processes."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.joint_embedding import OBJECTIVES, PER_EPOCH, RESNET, STEPS, batch, make, optimizer_of, pairs
from support.processes import python_in_two

from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.training.backbones import Backbone
from sightline.training.collectives import sync_batch_norm
from sightline.training.objectives import dino, moco_v3, msn, simclr


@pytest.mark.parametrize(
    ("name", "momenta"),
    [
        ("moco_v3", [0.9 + 0.1 * (1 - math.cos(math.pi * i / 6)) / 2 for i in (1, 2, 3)]),  # of the step that follows
        ("dino", [0.9, 0.9 + 0.1 * (1 - math.sqrt(3) / 2) / 2, 0.925]),  # of the step just made
        ("msn", [0.9, 0.9 + 0.1 * (1 - math.sqrt(3) / 2) / 2, 0.925]),
    ],
)
def test_followers_follow_with_a_momentum_that_rises(name: str, momenta: list[float]) -> None:
    objective = make(name, momentum=0.9)
    for k, q in pairs(name, objective):
        k.data.fill_(1.0)
        q.data.fill_(0.0)
    value = 1.0
    for step, momentum in enumerate(momenta):
        objective.seen = [torch.zeros(20)]  # what DINO's centre follows
        objective.after_step(Progress(step + 1, STEPS, PER_EPOCH))
        value *= momentum
        assert all(torch.allclose(k, torch.tensor(value), atol=1e-6) for k, _ in pairs(name, objective))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_student_learns_and_what_is_kept_is_the_encoder(name: str) -> None:
    objective = make(name)
    loss, scalars = objective(batch(name, objective))
    loss.backward()
    assert 0.02 < scalars["std"].item() <= 1.0
    frozen = {"moco_v3": {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"}}.get(name, set())
    for key, p in objective.backbone.named_parameters():
        assert (p.grad is None) == (key in frozen), key
        assert p.grad is None or p.grad.abs().max() > 0, key
    kept = {"dino": "teacher_backbone", "msn": "target_backbone"}.get(name, "backbone")
    assert objective.encoder is getattr(objective, kept)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.bf16
def test_bfloat16_changes_the_loss_little(name: str) -> None:
    objective = make(name)
    seen = batch(name, objective)
    loss, _ = objective(seen)
    with torch.autocast("cpu", torch.bfloat16):
        rough, scalars = objective(seen)
    rough.backward()
    assert rough.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in scalars.values())
    assert rough.item() == pytest.approx(loss.item(), rel=0.05)


def test_views_have_the_sizes_and_crops_of_the_settings() -> None:
    backbone = Backbone("vit", size=48, patch=8)
    crops = simclr.views(simclr.SimclrConfig(crop=(0.2, 1.0)), backbone)
    assert [(v.size, v.crop) for v in crops] == [(48, (0.2, 1.0))] * 2
    strong = simclr.views(simclr.SimclrConfig(), backbone)
    assert [(v.jitter, v.blur) for v in strong] == [((0.8, 0.8, 0.8, 0.2), 0.5)] * 2
    cifar = simclr.views(simclr.SimclrConfig(jitter=(0.4, 0.4, 0.4, 0.1), blur=0.0), backbone)
    assert [(v.jitter, v.blur, v.gray) for v in cifar] == [((0.4, 0.4, 0.4, 0.1), 0.0, 0.2)] * 2
    assert [v.solarize for v in moco_v3.views(moco_v3.MocoV3Config(), backbone)] == [0.0, 0.2]
    crops = dino.views(dino.DinoConfig(local_crops=2), backbone)
    assert [(v.size, v.crop) for v in crops] == [(48, (0.4, 1.0))] * 2 + [(24, (0.05, 0.4))] * 2
    assert [v.size for v in dino.views(dino.DinoConfig(local_crops=1, local_size=16), backbone)] == [48, 48, 16]
    anchors = msn.views(msn.MsnConfig(rand_views=1, focal_views=2), backbone)
    assert [(v.size, v.crop) for v in anchors] == [(48, (0.3, 1.0))] * 2 + [(24, (0.05, 0.3))] * 2
    assert {v.jitter for v in anchors} == {(0.4, 0.4, 0.4, 0.1)}


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("simclr", {"temperature": 0.0}, "temperature"),
        ("simclr", {"layers": 1}, "layers"),
        ("simclr", {"out": 0}, "out=0"),
        ("moco_v3", {"temperature": -1.0}, "temperature"),
        ("moco_v3", {"momentum": 1.5}, "momentum"),
        ("moco_v3", {"hidden": 0}, "hidden=0"),
        ("dino", {"teacher_temperature": 0.0}, "teacher_temperature"),
        ("dino", {"center_momentum": 2.0}, "center_momentum"),
        ("dino", {"bottleneck": 0}, "bottleneck"),
        ("dino", {"local_crops": -1}, "local_crops"),
        ("msn", {"rand_views": 0, "focal_views": 0}, "anchor"),
        ("msn", {"mask_ratio": 1.0}, "mask_ratio"),
        ("msn", {"sharpening": 0.0}, "sharpening"),
        ("msn", {"momentum": -0.1}, "momentum"),
        ("msn", {"momentum_end": 1.1}, "momentum_end"),
        ("msn", {"momentum_schedule": "linaer"}, "did you mean 'linear'"),
        ("msn", {"prototypes": 0}, "prototypes"),
    ],
)
def test_settings_that_make_no_sense_are_told(name: str, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        OBJECTIVES[name].Config(**settings)


def test_what_needs_patches_says_so() -> None:
    with pytest.raises(InputError, match="needs a ViT, not ResNet"):
        make("msn", RESNET)
    with pytest.raises(InputError, match="10 pixels cannot be cut into patches of 4"):
        make("msn", focal_size=10)


@pytest.mark.parametrize(
    ("name", "settings", "fewest"),
    [
        ("simclr", {}, 2),
        ("moco_v3", {}, 2),
        ("msn", {}, 2),
        ("dino", {}, 1),
        ("dino", {"batch_norm": True}, 2),
        ("dino", {"sinkhorn": True}, 2),
    ],
)
def test_how_many_images_a_forward_needs(name: str, settings: dict[str, Any], fewest: int) -> None:
    """Fewer have no gradient, or batch normalisation refuses them; with so many there is one."""
    objective = make(name, **settings)
    assert objective.fewest == fewest
    loss, _ = objective(batch(name, objective, images=slice(0, fewest)))
    loss.backward()
    assert max(p.grad.abs().max() for p in objective.parameters() if p.grad is not None) > 1e-6
    if name == "simclr":
        alone, _ = objective(batch(name, objective, images=slice(0, 1)))
        assert alone.item() == 0
    elif name != "dino":
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            objective(batch(name, objective, images=slice(0, 1)))


def trained(images: slice) -> dict[str, Any]:
    """Losses, gradients and state of two steps of every objective on these images, means over processes."""
    several = torch.distributed.is_initialized()
    result: dict[str, Any] = {}
    variants = ("dino", {"batch_norm": True}), ("dino", {"sinkhorn": True})
    for name, settings in [*((name, {}) for name in OBJECTIVES), *variants]:
        objective = sync_batch_norm(make(name, **settings))
        title = " ".join([name, *settings])
        optimizer = optimizer_of(objective)
        for step in range(2):
            seen = batch(name, objective, step=step, images=images)
            optimizer.zero_grad()
            loss, _ = objective(seen)
            loss.backward()
            parameters = {key: p for key, p in objective.named_parameters() if p.grad is not None}
            for value in (loss.detach(), *(p.grad for p in parameters.values())):
                if several:
                    torch.distributed.all_reduce(value)
                    value /= torch.distributed.get_world_size()
            result |= {f"{title} {step} gradient of {key}": p.grad.clone() for key, p in parameters.items()}
            result[f"{title} {step} loss"] = loss.detach()
            optimizer.step()
            objective.after_step(Progress(step + 1, STEPS, PER_EPOCH))
        result |= {f"{title} {key}": value for key, value in objective.state_dict().items()}
    return result


def test_two_processes_with_half_of_the_images_do_what_one_does(tmp_path: Path) -> None:
    python_in_two(__file__, str(tmp_path))
    expected = trained(slice(0, 8))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # Some gradients are 0 but for rounding: batch normalisation takes away what the bias before it adds.
            # In DINO's head it also divides by the small deviations of small weights, and rounding grows with that.
            allowed = (3e-4 if "batch_norm" in key else 1e-5) + 1e-4 * value.abs().max().item()
            assert (found[key] - value).abs().max().item() < allowed, key


if __name__ == "__main__":  # one of the two processes
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.save(trained(slice(4 * rank, 4 * rank + 4)), Path(sys.argv[1], f"{rank}.pt"))
    torch.distributed.destroy_process_group()
