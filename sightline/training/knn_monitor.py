"""k-NN accuracy during training: how far an encoder is, on images that it is not trained on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sightline.encoders.modules.vit import is_vit
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.estimators.neighbours import knn_predict

__all__ = ["OnlineKnn"]


TRAIN, HELD_OUT = 4096, 1024  # images at most, balanced over classes
BATCH = 256


class OnlineKnn:
    """20-NN accuracy of frozen features: the CLS token and the mean of the patches, or what a CNN pools."""

    def __init__(self, images: Images, preprocess: Preprocess, device: torch.device, seed: int = 0) -> None:
        self.preprocess, self.device = preprocess, device
        held_out = "val" if "val" in images.splits else "test"
        self.pixels: dict[str, list[Tensor]] = {}
        self.labels: dict[str, np.ndarray] = {}
        for role, split, limit in (("train", "train", TRAIN), ("held out", held_out, HELD_OUT)):
            found = list(batches(images.sample(limit, seed), [preprocess], splits=[split], batch=BATCH, seed=seed))
            labelled = [(batch.pixels[preprocess], batch.labels.numpy()) for batch in found]
            self.pixels[role] = [pixels for pixels, _ in labelled]
            self.labels[role] = np.concatenate([labels for _, labels in labelled])

    @staticmethod
    def possible(images: Images) -> bool:
        """Whether there are labels to tell, and a split that is not trained on."""
        splits = {"train", "val" if "val" in images.splits else "test"}
        return splits <= set(images.splits) and all((images.labels_of(split) >= 0).any() for split in splits)

    @torch.no_grad()
    def __call__(self, encoder: nn.Module) -> dict[str, float]:
        """Accuracies by feature: `knn_cls`, `knn_gap`."""
        modes = {module: module.training for module in encoder.modules()}
        encoder.eval()
        try:
            features = {role: self._features(encoder, pixels) for role, pixels in self.pixels.items()}
        finally:
            for module, mode in modes.items():
                module.training = mode
        known = {role: labels >= 0 for role, labels in self.labels.items()}
        result = {}
        for name in features["train"]:
            rows = {role: features[role][name][torch.from_numpy(known[role])] for role in features}
            labels = {role: self.labels[role][known[role]] for role in features}
            told = knn_predict(rows["train"], labels["train"], rows["held out"])
            result[f"knn_{name}"] = float((told == labels["held out"]).mean())
        return result

    def _features(self, encoder: nn.Module, pixels: list[Tensor]) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for batch in pixels:
            x = self.preprocess.normalize(batch.to(self.device))
            output: Tensor = encoder.forward_features(x)  # type: ignore[operator]
            if is_vit(encoder):
                prefix = encoder.num_prefix_tokens
                found = {"gap": output[:, prefix:].mean(1)} | (
                    {} if encoder.cls_token is None else {"cls": output[:, 0]}
                )
            else:
                found = {"gap": output.mean((2, 3))}
            for name, values in found.items():
                parts.setdefault(name, []).append(values.float().cpu())
        return {name: torch.cat(values) for name, values in parts.items()}
