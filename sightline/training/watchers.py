"""What watches a training: k-NN accuracy and rank of the features on the way, and a word when embeddings collapse.

A watcher is asked for numbers when an evaluation is due, in all processes, and sees every row of the metrics. Which
ones there are is the setting `watch`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sightline.core.processes import by_first, rank
from sightline.core.progress import console
from sightline.core.schedules import Progress
from sightline.encoders.modules.mode import evaluating
from sightline.encoders.sites import Tokens, token_view
from sightline.images.pipeline import batches
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.measure.estimators.neighbours import knn_predict
from sightline.measure.estimators.rank import rankme

TRAIN, HELD_OUT = 4096, 1024  # images at most, balanced over classes
BATCH = 256
COLLAPSED = 0.1  # of the spread that embeddings on the unit sphere can have


class Watcher(Protocol):
    """What the loop asks while it trains."""

    evaluates: bool  # whether it has numbers to give

    def evaluate(self, progress: Progress) -> Mapping[str, float]:
        """Numbers for the row of the metrics, asked in all processes when an evaluation is due."""

    def warning(self, row: Mapping[str, float]) -> str | None:
        """A sentence for the user about a row of the metrics, asked in the first process."""


class WatchedFeatures(NamedTuple):
    """Features of some images, and their labels."""

    values: Mapping[str, Tensor]  # (n, D) by pooling: cls, gap
    labels: np.ndarray  # int64 (n,), −1 without a label


class WatchedImages(NamedTuple):
    """Images that are looked at again and again, so that they stay in memory."""

    pixels: Sequence[Tensor]  # uint8 (B, 3, h, w), batch by batch
    labels: np.ndarray  # int64 (n,), −1 without a label


def read_watched(
    images: Images, split: str, preprocess: Preprocess, *, limit: int, batch: int, seed: int
) -> WatchedImages:
    """At most `limit` images of a split, balanced over classes, in the order and the batches of a pass."""
    loaded = list(batches(images.sample(limit, seed), [preprocess], splits=[split], batch=batch, seed=seed))
    labels = [part.labels.numpy() for part in loaded]
    return WatchedImages([part.pixels[preprocess] for part in loaded], np.concatenate(labels))


def held_out_split(images: Images) -> str:
    """What a training may be judged by while it runs: the test images only where there are no others."""
    return "val" if "val" in images.splits else "test"


def knn_accuracies(train: WatchedFeatures, held_out: WatchedFeatures) -> dict[str, float]:
    """20-NN accuracy of each pooling, `knn_cls`, `knn_gap`."""
    result = {}
    known = [part.labels >= 0 for part in (train, held_out)]
    for name in train.values:
        ours, theirs = (
            part.values[name][torch.from_numpy(k)] for part, k in zip((train, held_out), known, strict=True)
        )
        told = knn_predict(ours, train.labels[known[0]], theirs)
        result[f"knn_{name}"] = float((told == held_out.labels[known[1]]).mean())
    return result


def ranks(train: WatchedFeatures) -> dict[str, float]:
    """RankMe of each pooling, `rank_cls`, `rank_gap`, and that of the features less their mean, `centred_rank_cls`."""
    centred = {name: values.double() - values.double().mean(0) for name, values in train.values.items()}
    return {
        **{f"rank_{name}": rankme(values) for name, values in train.values.items()},
        **{f"centred_rank_{name}": rankme(values) for name, values in centred.items()},
    }


class FeatureWatch:
    """What can be told from frozen features: the CLS token and the mean of the patches, or the mean of a map.

    `measures` are `knn`, 20-NN accuracy on images that are not trained on, and `rank`, RankMe of the training images.
    """

    def __init__(
        self,
        images: Images,
        preprocess: Preprocess,
        device: torch.device,
        seed: int = 0,
        measures: Collection[str] = ("knn",),
    ) -> None:
        self.preprocess, self.device, self.measures = preprocess, device, tuple(measures)
        held_out = [("held out", held_out_split(images), HELD_OUT)] if "knn" in measures else []
        self.images = {
            role: read_watched(images, split, preprocess, limit=limit, batch=BATCH, seed=seed)
            for role, split, limit in [("train", "train", TRAIN), *held_out]
        }

    @staticmethod
    def knows_classes(images: Images) -> bool:
        """Whether k-NN is possible: a split that is not trained on has classes that are in the training split, too."""
        held = held_out_split(images)
        if not {"train", held} <= set(images.splits):
            return False
        return bool(set(images.labels_of("train").tolist()) & set(images.labels_of(held).tolist()) - {-1})

    @torch.no_grad()
    def __call__(self, encoder: nn.Module) -> dict[str, float]:
        """The measures of an encoder; its features are computed once."""
        with evaluating(encoder):
            features = {
                role: WatchedFeatures(self._features(encoder, part.pixels), part.labels)
                for role, part in self.images.items()
            }
        result: dict[str, float] = {}
        if "knn" in self.measures:
            result |= knn_accuracies(features["train"], features["held out"])
        if "rank" in self.measures:
            result |= ranks(features["train"])
        return result

    def _features(self, encoder: nn.Module, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for batch in pixels:
            x = self.preprocess.normalize(batch.to(self.device))
            for name, values in pooled(encoder, encoder.forward_features(x)).items():  # type: ignore[operator]
                parts.setdefault(name, []).append(values.float().cpu())
        return {name: torch.cat(values) for name, values in parts.items()}


def pooled(encoder: Any, output: Any) -> dict[str, Tensor]:  # each (B, D)
    """Of what `forward_features` of a timm model gives: `gap` of the patches or places, `cls` where there is one.

    Tokens are (B, T, D), maps (B, C, h, w) or, where the model says so, (B, h, w, C).
    """
    if not isinstance(output, Tensor):  # several sets of tokens, as of CrossViT: what the model itself makes of them
        return {"gap": encoder.forward_head(output, pre_logits=True)}
    tokens = None
    if output.ndim == 3:
        cls = getattr(encoder, "cls_token", None) is not None
        prefix = getattr(encoder, "num_prefix_tokens", int(cls))
        tokens = Tokens(prefix, 0 if cls else None, (1, output.shape[1] - prefix))
    elif getattr(encoder, "output_fmt", "NCHW") == "NHWC":  # Swin, say; a model that says nothing has channels first
        output = output.permute(0, 3, 1, 2)
    views = {"cls": token_view(output, "cls", tokens)}
    if tokens is None or tokens.count > tokens.prefix:  # PiT gives its CLS token alone
        views["gap"] = token_view(output, "mean", tokens)
    return {name: values for name, values in views.items() if values is not None}


class OfEncoder:
    """Asks what can be told from features about the encoder of an objective; the work of the first process."""

    evaluates = True

    def __init__(self, objective: Any, features: FeatureWatch | None) -> None:
        self.objective, self.features = objective, features

    def evaluate(self, progress: Progress) -> Mapping[str, float]:
        """Numbers in the first process, nothing in the others, which wait for it."""
        features = self.features
        return by_first(lambda: {} if features is None else features(self.objective.encoder)) or {}

    def warning(self, row: Mapping[str, float]) -> str | None:
        return None


class Collapse:
    """Says, once, when the embeddings of different images have become nearly the same."""

    evaluates = False

    def __init__(self) -> None:
        self.warned = False

    def evaluate(self, progress: Progress) -> Mapping[str, float]:
        """Its numbers are the objective's."""
        return {}

    def warning(self, row: Mapping[str, float]) -> str | None:
        """By `std` of an objective, the deviation of its embeddings on the unit sphere."""
        spread = {key: value for key, value in row.items() if key.rpartition(".")[2] == "std"}
        low = [f"{key} = {value:.3f}" for key, value in spread.items() if value < COLLAPSED]
        if not low or self.warned:
            return None
        self.warned = True
        return (
            f"The embeddings have nearly collapsed at step {int(row['step'])}: {', '.join(low)}, where 1 is spread out "
            "and 0 is the same for all images; a lower lr, a longer warm-up or a larger batch may help"
        )


def make_watchers(
    names: Sequence[str],
    objective: Any,
    images: Images,
    preprocess: Preprocess,
    device: torch.device,
    *,
    seed: int,
    show_progress: bool,
) -> list[Watcher]:
    """The watchers that a recipe names; k-NN is left out, with a word, where there is nothing to compare with."""
    measures = [name for name in names if name in ("knn", "rank")]
    if "knn" in measures and not FeatureWatch.knows_classes(images):
        measures.remove("knn")
        if rank() == 0 and show_progress:
            console().print(
                f"{images.name} has no labels, no held-out split or no class in both, so k-NN accuracy is not measured "
                "while training"
            )
    watchers: list[Watcher] = []
    if measures:
        features = by_first(lambda: FeatureWatch(images, preprocess, device, seed, measures))
        watchers.append(OfEncoder(objective, features))
    if "collapse" in names:
        watchers.append(Collapse())
    return watchers
