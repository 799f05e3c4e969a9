"""A sweep: probes trained with every combination of settings; images that no probe was trained on choose among them.

    peak learning rate = lr · batch / 256          the linear scaling rule; a batch holds all images at most
    learning rate at the end = min_lr              of a cosine, whatever the batch
    chosen = argmax over settings of the accuracy on the images for selection; of equal ones the first

The sweeps of papers are presets: what is not given is that of the preset. Table 4 of Shekhar et al. 2023 has 216
settings, Table A.1 of Park et al. 2023 one.

The images for selection are never those that are scored (test): a best-of-many there would flatter every probe.

Shapes: H shapes of probes (what they see, how deep), K settings, n images, C classes.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sightline.core.errors import InputError, counted, nearest
from sightline.core.progress import bar_of_steps
from sightline.measure.estimators.probe_batches import MEMORY
from sightline.measure.estimators.probes import Probe, Schedule, TrainedProbes, train_probes
from sightline.measure.estimators.ridge import Sliceable

OPTIMIZERS = ("sgd", "lars")
PRECISIONS = ("float32", "bf16")
DEFAULT: dict[str, Any] = {
    "lrs": (0.1, 0.01, 0.001),
    "weight_decays": (0.0, 0.05, 0.1),
    "min_lrs": (0.0,),
    "optimizers": ("sgd",),
    "epochs": (50.0,),
    "warmup_epochs": (5.0,),
    "batch": 256,
}
TABLE_4 = DEFAULT | {
    "min_lrs": (0.0, 0.1, 0.01, 0.001, 0.0001, 0.0005),
    "optimizers": ("lars",),
    "epochs": (100.0, 200.0),
    "warmup_epochs": (10.0, 40.0),
    "batch": 4096,
}
TABLE_A1 = DEFAULT | {"lrs": (1.0,), "weight_decays": (0.05,), "warmup_epochs": (0.0,), "batch": 1024}
PRESETS = {"default": DEFAULT, "table4": TABLE_4, "a1": TABLE_A1}
OF_PRESET: Any = None  # what no one has given


class Setting(NamedTuple):
    """One combination."""

    epochs: float
    warmup_epochs: float
    optimizer: str
    lr: float  # before the scaling rule
    weight_decay: float
    min_lr: float = 0.0

    def __str__(self) -> str:
        end = f" to {self.min_lr:g}" if self.min_lr else ""
        return (
            f"{self.optimizer.upper()}, lr {self.lr:g}{end}, weight decay {self.weight_decay:g}, "
            f"{counted(self.epochs, 'epoch')}, {self.warmup_epochs:g} of them warm-up"
        )


@dataclass(frozen=True)
class Sweep:
    """What is combined, and what all combinations share.

    preset          default; table4 (Shekhar et al. 2023); a1 (Park et al. 2023): where what is not given comes from
    lrs             learning rates for a batch of 256; a batch of b images takes lr · b / 256 at the peak
    weight_decays   λ of ½ λ‖w‖² in the loss
    min_lrs         learning rates at the end, whatever the batch
    optimizers      sgd (momentum 0.9), lars
    epochs          lengths of the training; after the warm-up a cosine leads to the learning rate at the end
    warmup_epochs   epochs of rising learning rate
    batch           images of a step
    held_out        share of the training images that choose, where the images have no split `val`
    precision       float32, or bf16: faster on processors that compute with it
    """

    preset: str = "default"
    lrs: tuple[float, ...] = OF_PRESET
    weight_decays: tuple[float, ...] = OF_PRESET
    min_lrs: tuple[float, ...] = OF_PRESET
    optimizers: tuple[str, ...] = OF_PRESET
    epochs: tuple[float, ...] = OF_PRESET
    warmup_epochs: tuple[float, ...] = OF_PRESET
    batch: int = OF_PRESET
    held_out: float = 0.2
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise InputError(f"Probes have no preset {self.preset!r}{nearest(self.preset, PRESETS)}")
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is OF_PRESET:
                object.__setattr__(self, name, value)  # a frozen dataclass is not yet handed out here
        for name in ("lrs", "weight_decays", "min_lrs", "optimizers", "epochs", "warmup_epochs"):
            values = getattr(self, name)
            if not values:
                raise InputError(f"A sweep of probes needs at least one of {name}, but the list is empty")
            if len(set(values)) < len(values):  # it would count twice among the best
                raise InputError(f"A sweep of probes takes each of {name} once, not {', '.join(map(str, values))}")
            if not all(isinstance(value, str) or math.isfinite(value) for value in values):
                raise InputError(f"A sweep of probes takes finite {name}, not {', '.join(map(str, values))}")
        for given, known in ((self.optimizers, OPTIMIZERS), ((self.precision,), PRECISIONS)):
            for name in given:
                if name not in known:
                    raise InputError(f"Probes cannot be trained with {name!r}{nearest(name, known)}")
        lowest = {"lrs": min(self.lrs), "epochs": min(self.epochs), "batch": self.batch - 1}
        for name, value in lowest.items():
            if not value > 0:
                raise InputError(f"Probes need {name} above {1 if name == 'batch' else 0}, not {getattr(self, name)}")
        if min(*self.weight_decays, *self.warmup_epochs, *self.min_lrs) < 0:
            raise InputError("Weight decays, min_lrs and epochs of warm-up of probes cannot be below 0")
        if max(self.warmup_epochs) >= min(self.epochs):
            raise InputError(
                f"The warm-up of {max(self.warmup_epochs):g} epochs is not shorter than a training of "
                f"{min(self.epochs):g}; give fewer warmup_epochs or more epochs"
            )
        if not 0 < self.held_out < 1:
            raise InputError(f"The share of images that is held out must be between 0 and 1, not {self.held_out}")

    @property
    def schedules(self) -> list[tuple[float, float]]:
        """Epochs and epochs of warm-up; settings that share them are trained together."""
        return list(itertools.product(self.epochs, self.warmup_epochs))

    @property
    def settings(self) -> list[Setting]:
        """All combinations, those of a schedule behind one another.

        >>> [setting.lr for setting in Sweep(lrs=(0.1, 0.01), weight_decays=(0.0,)).settings]
        [0.1, 0.01]
        """
        rest = itertools.product(self.schedules, self.optimizers, self.lrs, self.weight_decays, self.min_lrs)
        return [Setting(*schedule, optimizer, lr, decay, low) for schedule, optimizer, lr, decay, low in rest]


class Labelled(NamedTuple):
    """Features of the same images by name, and the classes of these."""

    features: Mapping[str, Sliceable]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The probe that a sweep ended with."""

    trained: TrainedProbes
    which: int
    setting: Setting
    accuracy: float  # on the images for selection

    def scores(self, features: Mapping[str, Sliceable]) -> npt.NDArray[np.float32]:
        return np.concatenate(list(self.trained.scores(self.which, features)))

    def decisions(self, features: Mapping[str, Sliceable]) -> npt.NDArray[np.int64]:
        return self.trained.decisions(self.which, features)


@dataclass(frozen=True, eq=False)
class Swept:
    """Probes of all shapes, trained with all settings."""

    settings: list[Setting]
    trained: list[TrainedProbes]  # one for each schedule, its probes in the order (shape, setting)
    shapes: int
    loss: npt.NDArray[np.float64]  # (H, K) mean of the last epoch, without the penalty; NaN where it diverged
    selection: npt.NDArray[np.float64]  # (H, K) accuracy on the images for selection

    def accuracy(self, images: Labelled) -> npt.NDArray[np.float64]:
        """Share of right decisions of all probes, (H, K)."""
        return _beside([one.accuracy(*images) for one in self.trained], self.shapes)

    def chosen(self, shape: int) -> Chosen | None:
        """The best one of a shape; None if the training of all has diverged."""
        order = best_first(self.selection[shape])
        if not len(order):
            return None
        together = len(self.settings) // len(self.trained)
        schedule, number = divmod(int(order[0]), together)
        accuracy = float(self.selection[shape, order[0]])
        return Chosen(self.trained[schedule], shape * together + number, self.settings[order[0]], accuracy)


def train_sweep(
    shapes: Sequence[Probe],
    sweep: Sweep,
    train: Labelled,
    selection: Labelled,
    classes: int,
    seed: int,
    title: str = "Probes",
    device: torch.device | str = "cpu",
) -> Swept:
    """Train probes of these shapes (`inputs` and `depth`) with all settings; `title` is that of the bar."""
    n = len(train.labels)
    batch = min(sweep.batch, n)
    schedules = [
        Schedule(epochs, batch, warmup, seed=seed, precision=sweep.precision) for epochs, warmup in sweep.schedules
    ]
    steps = len({shape.inputs for shape in shapes}) * sum(schedule.steps(n) for schedule in schedules)
    trained = []
    with bar_of_steps(title, steps) as move:
        for schedule in schedules:
            probes = [
                replace(
                    shape, optimizer=s.optimizer, lr=s.lr * batch / 256, weight_decay=s.weight_decay, min_lr=s.min_lr
                )
                for shape in shapes
                for s in sweep.settings
                if s[:2] == (schedule.epochs, schedule.warmup_epochs)
            ]
            trained.append(train_probes(probes, schedule, *train, classes, device=device, show=lambda *_: move()))
    loss = _beside([one.loss for one in trained], len(shapes))
    accuracy = _beside([one.accuracy(*selection) for one in trained], len(shapes))
    finite = np.isfinite(loss) & np.isfinite(accuracy)
    return Swept(
        sweep.settings, trained, len(shapes), np.where(finite, loss, np.nan), np.where(finite, accuracy, np.nan)
    )


def training_bytes(weights: int, features: int, sweep: Sweep) -> int:
    """Memory for probes of so many weights with every setting, and for so many numbers of features.

    All weights stay; momenta and gradients are those of one schedule at a time.
    """
    settings, together = len(sweep.settings), len(sweep.settings) // len(sweep.schedules)
    return 4 * ((settings + 2 * together) * weights + min(features, MEMORY))


def _beside(parts: Sequence[npt.NDArray[np.float64]], shapes: int) -> npt.NDArray[np.float64]:
    """Numbers of the probes of each schedule → (H, K)."""
    return np.concatenate([part.reshape(shapes, -1) for part in parts], 1)


def best_first(selection: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Numbers of the settings, highest accuracy first, of equal ones the first; those without a number are left out.

    >>> best_first(np.array([0.5, np.nan, 0.7, 0.7])).tolist()
    [2, 3, 0]
    """
    order: npt.NDArray[np.int64] = np.argsort(-selection, kind="stable")
    return order[~np.isnan(selection[order])]


def hold_out(
    labels: npt.NDArray[np.int64], share: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the images that train and of those that choose: this share of every class, drawn by the seed.

    A class of two images or more gives one at least, and a single image trains.

    >>> [part.tolist() for part in hold_out(np.array([0, 0, 0, 0, 0, 1, 1, 2]), 0.2, seed=0)]
    [[0, 1, 3, 4, 6, 7], [2, 5]]
    """
    random = np.random.default_rng(seed)
    held = []
    for number in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == number))
        held.append(members[: min(max(1, round(share * len(members))), len(members) - 1)])
    chosen = np.sort(np.concatenate(held))
    if not len(chosen):
        raise InputError(
            "Probes choose their settings on held-out training images, but no class has two images; give more"
        )
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
