"""Small objectives of joint embedding, views for them, steps as the loop makes them, and plain twins in float64."""

from typing import Any

import numpy as np
import torch
from support.official_vit import State, activations, resized, vit
from torch import Tensor, nn

from sightline.core.schedules import Progress
from sightline.training.backbones import Backbone, build
from sightline.training.objective import Views, objective_named

VIT = Backbone("vit", size=16, width=16, depth=2, heads=2, patch=4)
RESNET = Backbone("resnet18", size=16, stem="small")
OBJECTIVES = {name: objective_named(name) for name in ("simclr", "moco_v3", "dino", "msn")}
SETTINGS: dict[str, dict[str, Any]] = {
    "simclr": {"hidden": 24, "out": 12},
    "moco_v3": {"hidden": 24, "out": 12},
    "dino": {"hidden": 24, "bottleneck": 12, "out": 20, "local_crops": 3, "warmup_temperature_epochs": 3},
    "msn": {"hidden": 24, "out": 12, "prototypes": 20, "rand_views": 2, "focal_views": 2},
}
FOLLOWERS = {
    "simclr": {},
    "moco_v3": {"momentum_backbone": "backbone", "momentum_projector": "projector"},
    "dino": {"teacher_backbone": "backbone", "teacher_head": "head"},
    "msn": {"target_backbone": "backbone", "target_head": "head"},
}
STEPS, PER_EPOCH = 6, 2


def make(name: str, backbone: Backbone = VIT, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = OBJECTIVES[name].Config(**{**SETTINGS[name], **settings})
    return OBJECTIVES[name].Objective(build(backbone, seed=seed).module, config)


def batch(name: str, objective: Any, backbone: Backbone = VIT, step: int = 0, images: slice = slice(0, 8)) -> Views:
    """Views of some of eight images, other ones in each step."""
    generator = torch.Generator().manual_seed(step)
    # Each image has a colour of its own, or all features would be nearly the same.
    colours = torch.randn(8, 3, 1, 1, generator=generator)
    pixels = [
        (colours + torch.randn(8, 3, policy.size, policy.size, generator=generator))[images]
        for policy in OBJECTIVES[name].views(objective.config, backbone)
    ]
    keys = (np.arange(8, dtype=np.uint64) + np.uint64(100 * step))[images]
    return Views(pixels, torch.zeros(len(keys), dtype=torch.int64), keys, Progress(step, STEPS, PER_EPOCH))


def optimizer_of(objective: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr)


def train_step(objective: Any, optimizer: torch.optim.Optimizer, *parts: Views) -> float:
    """One step as the loop makes it; several parts are accumulated."""
    optimizer.zero_grad()
    losses = [objective(part)[0] for part in parts]
    torch.stack(losses).mean().backward()
    step = parts[0].progress.step
    if hasattr(objective, "before_step"):
        objective.before_step(Progress(step, STEPS, PER_EPOCH))
    optimizer.step()
    objective.after_step(Progress(step + 1, STEPS, PER_EPOCH))
    return torch.stack(losses).mean().item()


def pairs(name: str, objective: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Parameters that follow, and those that they follow."""
    found = []
    for follower, leader in FOLLOWERS[name].items():
        modules = getattr(objective, follower), getattr(objective, leader)
        found += zip(*(module.parameters() for module in modules), strict=True)
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def unit(x: Tensor) -> np.ndarray:
    values = x.detach().double().numpy()
    return values / np.sqrt((values**2).sum(-1, keepdims=True))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_sinkhorn(p: np.ndarray) -> np.ndarray:
    """With the weights 1/K of prototypes and 1/N of images, as it is written in the paper."""
    q = p.T / p.sum()
    k, n = q.shape
    for _ in range(3):
        q = q / q.sum(1, keepdims=True) / k
        q = q / q.sum(0, keepdims=True) / n
    return (q * n).T


def official_vit() -> tuple[Backbone, State]:
    """A ViT with weights of the size that trained ones have, and those weights."""
    return Backbone("vit", size=16, width=24, depth=3, heads=3, patch=4), vit(seed=5)


def plain_features(state: State, images: Tensor, more: float) -> Tensor:  # (B, 3, h, w) -> (B, D), float64
    """The CLS token as the official code computes it, with positions for the grid of the images."""
    grid = images.shape[-1] // 4
    positions = state["pos_embed"] if grid == 4 else resized(state["pos_embed"], grid, grid, more)
    return activations(state | {"pos_embed": positions}, images)["norm"][:, 0]
