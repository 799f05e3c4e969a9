"""What detectors and segmenters share: a head on the maps of an encoder that is frozen or trained along.

The learning rate of layer l of 0 … L + 1 of the encoder is that of the head times layer_decay^(L + 1 − l).
"""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from sightline.training import objective
from sightline.transfer.classification import decayed
from sightline.transfer.detection.features import FeatureMaps, Standard


class OnEncoder(objective.Objective):
    """The encoder of such an objective, and its standardised maps; see training/objective.py."""

    def __init__(
        self,
        features: FeatureMaps,
        standard: Standard,
        frozen: bool,
        layers: Mapping[str, int] | None,
        layer_decay: float,
    ) -> None:
        super().__init__()
        self.standard, self.frozen = standard, frozen
        self.layers, self.layer_decay = layers or {}, layer_decay
        # A frozen encoder is no part of what is trained and saved.
        self._features = (features,)
        if not frozen:
            self.features = features

    @property
    def encoder(self) -> nn.Module:
        """The encoder that is trained along."""
        return self._features[0].module

    def to(self, *words: Any, **more: Any) -> Self:
        """A frozen encoder goes along."""
        self._features[0].to(*words, **more)
        return super().to(*words, **more)

    def standardised(self, images: Tensor) -> list[Tensor]:  # (B, 3, S, S)
        """Maps of images; a frozen encoder is in evaluation mode."""
        features = self._features[0]
        maps: list[Tensor] = self.standard(features.look(images) if self.frozen else features(images))
        return maps

    def lr_scales(self) -> dict[str, float]:
        """layer_decay^(L + 1 − layer) by the name of the parameter."""
        return decayed(self.layers, self.layer_decay, "features.module.")
