"""Hybrid: reconstruct and compare with one backbone.

    L = (1 − λ) · L_MIM + λ · L_CL        λ = `weight`, of any reconstructive with any joint-embedding objective

At λ = 0 and λ = 1 only the part that counts is built, fed and run, so that the training is the same as with that part
alone. In between the reconstructive part is built first. Then comes the joint-embedding one, whose momentum encoder is
a copy and has to start from the final weights: so its initialisation and positions are the ones that hold. What either
part freezes (positions, MoCo-v3's patch projection) is frozen for both. The paper's backbone is SimMIM's
(`backbone=beit`).

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core import plugins
from sightline.core.errors import InputError, nearest
from sightline.core.schedules import Progress
from sightline.core.settings import make_settings
from sightline.encoders.modules.projection import Trained
from sightline.images.augment.policy import Policy
from sightline.training.backbones import Backbone
from sightline.training.objective import First, Views

__all__ = ["Config", "Objective", "first", "views"]


TITLE = "Hybrid"
RECONSTRUCTIVE = ("beit", "mae", "simmim")
JOINT_EMBEDDING = ("dino", "moco_v3", "msn", "simclr")


@dataclass(frozen=True)
class Config:
    """The two parts by their names, the weight λ of the second, and settings of the parts by part and key.

    >>> Config(weight=0.5, settings={"simmim": {"mask_unit": 8}}).part("simmim")
    Config(mask_ratio=0.6, mask_unit=8, norm_target=0, crop=(0.67, 1.0))
    """

    mim: str = "simmim"
    cl: str = "moco_v3"
    weight: float = 0.2
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, kind, names in (
            ("mim", "reconstructive", RECONSTRUCTIVE),
            ("cl", "joint-embedding", JOINT_EMBEDDING),
        ):
            name = getattr(self, key)
            if name not in names:
                raise InputError(f"{key} is {name!r}, which is no {kind} objective{nearest(name, names)}")
        if not 0 <= self.weight <= 1:
            raise InputError(f"weight is λ, the share of {self.cl}, so it must lie in [0, 1], not at {self.weight}")
        possible = RECONSTRUCTIVE + JOINT_EMBEDDING
        for name in self.settings:  # also of parts that are not chosen: a recipe may hold the settings of several
            if name not in possible:
                raise InputError(f"{name!r} cannot be a part of a hybrid{nearest(name, possible)}")
            self.part(name)

    def part(self, name: str) -> Any:
        """Settings of a part."""
        config = plugins.find("objectives", name).Config
        known = [entry.name for entry in fields(config)]
        values = self.settings.get(name, {})
        for key in values:
            if key not in known:
                raise InputError(f"There is no setting {name}.{key}{nearest(key, known)}")
        return make_settings(config, values)

    def shares(self) -> dict[str, float]:
        """Parts that count, and their weights in the loss.

        >>> Config(weight=0.25).shares(), Config(weight=1.0).shares()
        ({'simmim': 0.75, 'moco_v3': 0.25}, {'moco_v3': 1.0})
        """
        return {name: share for name, share in ((self.mim, 1 - self.weight), (self.cl, self.weight)) if share}


def views(config: Config, backbone: Backbone) -> tuple[Policy, ...]:
    """Those of the first part, then those of the second."""
    return tuple(policy for name in config.shares() for policy in _views(config, name, backbone))


def first(config: Config, backbone: Backbone) -> First | None:
    """What the reconstructive part needs trained before it, if anything."""
    plugin = plugins.find("objectives", config.mim)
    if config.mim not in config.shares() or not hasattr(plugin, "first"):
        return None
    plan: First = plugin.first(config.part(config.mim), backbone)
    return plan


def _views(config: Config, name: str, backbone: Backbone) -> tuple[Policy, ...]:
    policies: tuple[Policy, ...] = plugins.find("objectives", name).views(config.part(name), backbone)
    return policies


class Objective(nn.Module):
    """Two objectives that train the same backbone."""

    def __init__(self, backbone: nn.Module, config: Config, first: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self.parts = nn.ModuleDict()
        self.slices: dict[str, slice] = {}  # which views are whose
        start = 0
        for name in config.shares():
            more = () if first is None or name != config.mim else (first,)
            self.parts[name] = plugins.find("objectives", name).Objective(backbone, config.part(name), *more)
            stop = start + len(_views(config, name, Backbone()))  # their number does not depend on the backbone
            self.slices[name], start = slice(start, stop), stop
            if hasattr(self.parts[name], "decoder"):
                self.decoder = self.parts[name].decoder

    @property
    def encoder(self) -> nn.Module:
        """The trained backbone; of a single part, that part's encoder."""
        encoders: list[Any] = [part.encoder for part in self.parts.values()]
        return encoders[0] if len(encoders) == 1 else self.backbone

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """That of the joint-embedding part, if it counts."""
        parts: list[Any] = [part for part in self.parts.values() if hasattr(part, "head_of")]
        return tuple(layer for part in parts for layer in part.head_of(encoder))

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted sum of the parts' losses; each loss and the parts' scalars under their names."""
        losses: list[Tensor] = []
        scalars: dict[str, Tensor] = {}
        for name, share in self.config.shares().items():
            loss, more = self.parts[name](views.part(self.slices[name]))
            losses.append(share * loss)
            scalars |= {f"{name}.{key}": value for key, value in {"loss": loss.detach(), **more}.items()}
        return torch.stack(losses).sum(), scalars

    def before_step(self, progress: Progress) -> None:
        """Whatever the parts do between backward and the optimiser's step."""
        self._tell("before_step", progress)

    def after_step(self, progress: Progress) -> None:
        """Whatever the parts do after the optimiser's step."""
        self._tell("after_step", progress)

    def _tell(self, moment: str, progress: Progress) -> None:
        for part in self.parts.values():
            if hasattr(part, moment):
                getattr(part, moment)(progress)
