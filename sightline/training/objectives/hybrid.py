"""Hybrid: reconstruct and compare with one backbone.

    L = (1 − λ) · L_MIM + λ · L_CL        λ = `weight`, of any reconstructive with any joint-embedding objective

At λ = 0 and λ = 1 only the part that counts is built, fed and run, so that the training is the same as with that part
alone. In between the reconstructive part is built first. Then comes the joint-embedding one, whose momentum encoder is
a copy and has to start from the final weights: so its initialisation and positions are the ones that hold. What either
part freezes (positions, MoCo-v3's patch projection) is frozen for both. The paper's backbone is SimMIM's
(`backbone=beit`).

Source: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", section 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from sightline.core import plugins
from sightline.core.errors import InputError, nearest
from sightline.core.schedules import Progress
from sightline.core.settings import make_settings
from sightline.encoders.modules.projection import Trained
from sightline.images.augment.policy import Policy
from sightline.training import objective
from sightline.training.backbones import Backbone
from sightline.training.objective import First, Views, objective_named

TITLE = "Hybrid"
KIND = "hybrid"
PARTS = {"mim": "reconstructive", "cl": "joint-embedding"}  # kinds of objectives


@dataclass(frozen=True)
class HybridConfig:
    """The two parts by their names, the weight λ of the second, and settings of the parts by part and key.

    >>> HybridConfig(weight=0.5, settings={"simmim": {"mask_unit": 8}}).part("simmim")
    SimmimConfig(mask_ratio=0.6, mask_unit=8, norm_target=0, crop=(0.67, 1.0))
    """

    mim: str = "simmim"
    cl: str = "moco_v3"
    weight: float = 0.2
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, name in {"mim": self.mim, "cl": self.cl}.items():
            names = possible_parts(PARTS[key])
            if name not in names:
                raise InputError(f"{key} is {name!r}, which is not a {PARTS[key]} objective{nearest(name, names)}")
        if not 0 <= self.weight <= 1:
            raise InputError(f"weight is λ, the share of {self.cl}, so it must be in [0, 1], not {self.weight}")
        possible = possible_parts(*PARTS.values())
        for name in self.settings:  # also of parts that are not chosen: a recipe may hold the settings of several
            if name not in possible:
                raise InputError(f"{name!r} cannot be a part of a hybrid{nearest(name, possible)}")
            self.part(name)

    def part(self, name: str) -> Any:
        config = objective_named(name).Config
        known = [entry.name for entry in fields(config)]
        values = self.settings.get(name, {})
        for key in values:
            if key not in known:
                raise InputError(f"There is no setting {name}.{key}{nearest(key, known)}")
        return make_settings(config, values)

    def shares(self) -> dict[str, float]:
        """Parts that count, and their weights in the loss.

        >>> HybridConfig(weight=0.25).shares(), HybridConfig(weight=1.0).shares()
        ({'simmim': 0.75, 'moco_v3': 0.25}, {'moco_v3': 1.0})
        """
        return {name: share for name, share in ((self.mim, 1 - self.weight), (self.cl, self.weight)) if share}


def possible_parts(*kinds: str) -> list[str]:
    """Objectives of these kinds.

    >>> [name for name in possible_parts("reconstructive") if name in plugins.built_in("objectives")]
    ['beit', 'mae', 'simmim']
    """
    every = plugins.usable("objectives", objective_named)
    return [name for kind in kinds for name, plugin in every.items() if kind == plugin.KIND]


def views(config: HybridConfig, backbone: Backbone) -> tuple[Policy, ...]:
    """Those of the first part, then those of the second."""
    return tuple(policy for name in config.shares() for policy in _views(config, name, backbone))


def first(config: HybridConfig, backbone: Backbone) -> First | None:
    """What the reconstructive part needs trained before it, if anything."""
    if config.mim not in config.shares():
        return None
    return objective_named(config.mim).first(config.part(config.mim), backbone)


def _views(config: HybridConfig, name: str, backbone: Backbone) -> tuple[Policy, ...]:
    return objective_named(name).views(config.part(name), backbone)


class HybridObjective(objective.Objective):
    """Two objectives that train the same backbone."""

    def __init__(self, backbone: nn.Module, config: HybridConfig, first: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self.parts = nn.ModuleDict()
        self.slices: dict[str, slice] = {}  # which views are whose
        start = 0
        for name in config.shares():
            more = () if first is None or name != config.mim else (first,)
            part = objective_named(name).Objective(backbone, config.part(name), *more)
            self.parts[name] = part
            stop = start + len(_views(config, name, Backbone()))  # their number does not depend on the backbone
            self.slices[name], start = slice(start, stop), stop

    @property
    def encoder(self) -> nn.Module:
        """The trained backbone; of a single part, that part's encoder."""
        encoders = [part.encoder for part in self._parts()]
        return encoders[0] if len(encoders) == 1 else self.backbone

    @property
    def fewest(self) -> int:
        """As many as each part needs."""
        return max(part.fewest for part in self._parts())

    def check_views(self, views: Sequence[Policy]) -> None:
        """Each part looks at its own."""
        for name, which in self.slices.items():
            part: Any = self.parts[name]
            part.check_views(views[which])

    def saved_decoder(self) -> nn.Module | None:
        """That of the reconstructive part, if it has one."""
        return next((decoder for part in self._parts() if (decoder := part.saved_decoder()) is not None), None)

    def head_of(self, encoder: nn.Module) -> tuple[Trained, ...]:
        """That of the joint-embedding part, if it counts."""
        return tuple(layer for part in self._parts() for layer in part.head_of(encoder))

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
        for part in self._parts():
            part.before_step(progress)

    def after_step(self, progress: Progress) -> None:
        for part in self._parts():
            part.after_step(progress)

    def _parts(self) -> list[objective.Objective]:
        return [cast(objective.Objective, part) for part in self.parts.values()]
