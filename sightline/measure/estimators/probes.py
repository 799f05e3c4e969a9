"""Probes: classifiers on frozen features, all configurations of a sweep trained together.

    x → BatchNorm without affine → (linear D → D, BatchNorm, ReLU) × (depth − 1) → linear D → C

Heads on the same features see the same batches in the same order, and their weights lie under each other in one matrix:
the scores of all of them are one product with the batch, and so are all their gradients. The features are read and
normalised once, not once per head. Features of equal width with the same kinds of heads, such as those of the layers of
an encoder, are trained on side by side as long as they are small, in one batched product. Nothing else is shared, so
that a head comes out as if it had been trained alone:

- The last layer starts normal with deviation 0.01, its bias at 0; hidden ones start as in `torch.nn.Linear` and have no
  bias, which the BatchNorm after them would take away. Heads of one shape start the same, by the seed alone.
- Every epoch is a new order of the images, by the seed (`probe_batches.py`); what does not fill a batch is left out.
- The BatchNorm in front has ε = 10⁻⁶ (He et al. 2022), those inside have weights and ε = 10⁻⁵, as is PyTorch's habit;
  training batches are normalised by themselves, later images by running statistics. In front these are the mean of
  those of all batches, since the features stay the same (`momentum=None` in PyTorch); inside, where weights move on,
  they have momentum 0.1, and are the mean of the first ten. With momentum 0.1 throughout, the 0 and 1 that they start
  with would count for 0.9ⁿ after n steps: small, but not against features that are small or far from 0.
- SGD: v ← μv + g + λw, w ← w − ηv for all parameters, biases too (`torch.optim.SGD`). LARS (He et al. 2022): that of
  pre-training (`optimization.LARS`), at λ = 0 as well; biases and BatchNorms are neither scaled nor decayed.
- η rises linearly from 0 in the warm-up and falls along a cosine to `min_lr`, step by step (He et al. 2022: where that
  lies above the peak, η rises to it).

Shapes: n images, B of a batch, I inputs side by side, D width (of all matrices of an input), C classes, P heads (of all
inputs, those of an input behind one another).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.core.errors import InputError, nearest
from sightline.core.lars import trusted
from sightline.core.schedules import warmup_cosine
from sightline.measure.estimators.probe_batches import ROWS, JoinedFeatures, fitting
from sightline.measure.estimators.ridge import Sliceable

ACTIVATIONS = 2**22  # numbers of one layer of heads that are computed together, 16 MiB
FRONT, INSIDE = 1e-6, 1e-5  # ε of the BatchNorms
FAINT = -60.0  # least logarithm of a probability


@dataclass(frozen=True)
class Probe:
    """A head, and how it is trained."""

    inputs: tuple[str, ...]  # names of feature matrices; several are joined, each through its own BatchNorm
    depth: int = 1  # 1: linear; 2, 3: one or two blocks of linear, BatchNorm, ReLU before it
    optimizer: str = "sgd"  # or "lars"
    lr: float = 0.1  # at its peak, after any scaling rule
    weight_decay: float = 0.0
    min_lr: float = 0.0  # at its end

    def __post_init__(self) -> None:
        if not self.inputs:
            raise InputError("A probe needs inputs; name at least one matrix of features")
        if self.depth < 1:
            raise InputError(f"A probe has depth {self.depth}, but the depth is at least 1, a linear probe")
        if self.optimizer not in (choices := ("sgd", "lars")):
            raise InputError(f"There is no optimizer {self.optimizer!r} for probes{nearest(self.optimizer, choices)}")
        for key in ("lr", "weight_decay", "min_lr"):
            if not getattr(self, key) >= 0:
                raise InputError(f"A probe has {key} {getattr(self, key)}, but it cannot be negative")


@dataclass(frozen=True)
class Schedule:
    """What the probes of one training share.

    >>> schedule = Schedule(epochs=10, batch=8, warmup_epochs=2)
    >>> schedule.steps(41), [round(schedule.rate(step, 41), 2) for step in (0, 5, 10, 30, 50)]
    (50, [0.0, 0.5, 1.0, 0.5, 0.0])
    """

    epochs: float = 100
    batch: int = 4096
    warmup_epochs: float = 10
    momentum: float = 0.9
    seed: int = 0
    precision: str = "float32"  # or "bf16": products in bfloat16, weights, statistics and sums in float32

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs is {self.epochs}, but a finite number above 0 is needed")
        if not self.warmup_epochs >= 0:
            raise InputError(f"warmup_epochs is {self.warmup_epochs}, but it cannot be negative")
        if self.batch < 2:
            raise InputError(f"batch is {self.batch}, but a BatchNorm needs at least 2 images")
        if self.precision not in ("float32", "bf16"):
            raise InputError(f"There is no precision {self.precision!r}; choose float32 or bf16")

    def per_epoch(self, n: int) -> int:
        """Steps of an epoch of n images."""
        return max(1, n // self.batch)

    def steps(self, n: int) -> int:
        """Steps of the training, at least one."""
        return max(1, round(self.epochs * self.per_epoch(n)))

    def rate(self, step: int, n: int) -> float:
        """The learning rate of a step, as a share of its peak."""
        return warmup_cosine(step, self.steps(n), self.warmup_epochs * self.per_epoch(n))

    def rates(self, step: int, n: int, peak: Tensor, low: Tensor) -> Tensor:
        """The learning rates of a step for these peaks and ends."""
        rising = step < self.warmup_epochs * self.per_epoch(n)
        return self.rate(step, n) * (peak if rising else peak - low) + (0 if rising else low)


def train_probes(
    probes: Sequence[Probe],
    schedule: Schedule,
    train: Mapping[str, Sliceable],
    labels: npt.NDArray[np.int64],
    classes: int,
    *,
    device: torch.device | str = "cpu",
    show: Callable[[int, int], None] | None = None,
) -> TrainedProbes:
    """Train all probes on features (n, D) and labels (n,) in 0 … classes − 1; `show(done, total)` tells how far it is.

    They are trained on the device, which holds as many features as `probe_batches` says; beginnings and orders do not
    depend on it.

    A head whose loss is no longer finite, or whose features are not, ends with a loss of NaN and disturbs no other.

    >>> x = np.array([[0.0, 1.0], [0.2, 0.9], [1.0, 1.1], [1.2, 1.0]], np.float32)
    >>> sweep = [Probe(("x",), lr=lr) for lr in (0.01, 1.0)]
    >>> trained = train_probes(sweep, Schedule(epochs=50, warmup_epochs=5), {"x": x}, np.array([0, 0, 1, 1]), classes=2)
    >>> trained.accuracy({"x": x}, np.array([0, 0, 1, 1])).tolist(), (trained.loss < (0.7, 0.1)).tolist()
    ([1.0, 1.0], [True, True])
    """
    if not probes:
        raise InputError("There are no probes to train; give at least one")
    if len(labels) < 2:
        raise InputError(f"Probes need at least 2 training images, not {len(labels)}")
    if labels.min() < 0 or labels.max() >= classes:
        raise InputError(
            f"Labels are {labels.min()} … {labels.max()}, but {classes} classes need 0 … {classes - 1}; "
            "leave out images without a label"
        )
    if schedule.precision == "bf16" and torch.device(device).type == "cpu":
        from sightline.core import bfloat16

        bfloat16.ensure()
    members: dict[tuple[str, ...], list[int]] = {}  # probes on the same features, read together
    for number, probe in enumerate(probes):
        members.setdefault(probe.inputs, []).append(number)
    joined = {inputs: JoinedFeatures(inputs, train, len(labels), device) for inputs in members}
    done, total = 0, len(members) * schedule.steps(len(labels))
    trained, loss = [], np.full(len(probes), np.nan)
    widths = {inputs: features.width for inputs, features in joined.items()}
    for together in _side_by_side(probes, members, widths, len(labels), max(schedule.batch, ROWS) * classes):
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have turned gradients off
            sweep = _Sweep(probes, together, widths[probes[together[0][0]].inputs], classes, schedule, device)
            features = JoinedFeatures(sweep.inputs, train, len(labels), device)
            for _ in sweep.train(features, torch.tensor(labels, dtype=torch.int64, device=device)):
                for _ in together:
                    done += 1
                    if show:
                        show(done, total)
        for heads in sweep.parts:
            loss[heads.which] = heads.loss.numpy(force=True)
        trained.append(sweep)
    return TrainedProbes(tuple(probes), loss, classes, trained)


def _side_by_side(
    probes: Sequence[Probe],
    members: Mapping[tuple[str, ...], list[int]],
    widths: Mapping[tuple[str, ...], int],
    rows: int,
    scores: int,
) -> list[list[list[int]]]:
    """The probes of each input, of several with the same kinds of probes together; a head makes so many scores."""
    alike: dict[tuple[int, tuple[tuple[int, str], ...]], list[list[int]]] = {}
    for inputs, which in members.items():
        kinds = tuple((probes[number].depth, probes[number].optimizer) for number in which)
        alike.setdefault((widths[inputs], kinds), []).append(which)
    groups = []
    for (width, kinds), several in alike.items():
        linear = all(depth == 1 for depth, _ in kinds)  # hidden layers are large enough by themselves
        most = min(ACTIVATIONS // (len(kinds) * scores), fitting(rows, width)) if linear else 1
        groups += [several[start : start + max(1, most)] for start in range(0, len(several), max(1, most))]
    return groups


class TrainedProbes:
    """Trained heads, with the running statistics of their BatchNorms."""

    def __init__(
        self, probes: tuple[Probe, ...], loss: npt.NDArray[np.float64], classes: int, sweeps: list[_Sweep]
    ) -> None:
        self.probes = probes
        self.loss = loss  # (P,) mean over the batches of the last epoch, each before its step
        self.classes = classes
        self._sweeps = sweeps

    def scores(self, which: int, features: Mapping[str, Sliceable]) -> Iterator[npt.NDArray[np.float32]]:
        """Scores of the classes by one probe, in blocks of rows (m, C); the largest one decides."""
        sweep, heads = next((sweep, heads) for sweep in self._sweeps for heads in sweep.parts if which in heads.which)
        head, number = heads.only(which), heads.input_of(which)
        for x in sweep.blocks(JoinedFeatures(self.probes[which].inputs, features, device=sweep.device), number):
            yield head.scores(x)[0].T.numpy(force=True)

    def decisions(self, which: int, features: Mapping[str, Sliceable]) -> npt.NDArray[np.int64]:
        """The class with the highest score for each row (n,); −1 where the scores are not finite."""
        return np.concatenate([_decisions(torch.from_numpy(block.T)).numpy() for block in self.scores(which, features)])

    def accuracy(self, features: Mapping[str, Sliceable], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Share of the images that each probe decides correctly (P,); NaN where one of them has no finite scores."""
        right = np.zeros(len(self.probes))
        if not len(labels):
            raise InputError("The accuracy of probes needs images to be measured on; give some")
        for sweep in self._sweeps:
            for number, x in enumerate(sweep.blocks(JoinedFeatures(sweep.inputs, features, len(labels), sweep.device))):
                y = torch.tensor(labels[number * ROWS : (number + 1) * ROWS], device=sweep.device)
                for heads in sweep.parts:
                    told = _decisions(heads.scores(x))  # (P, m)
                    count = (told == y).sum(1).double()
                    right[heads.which] += count.masked_fill((told < 0).any(1), torch.nan).numpy(force=True)
        return right / len(labels)


def _decisions(scores: Tensor) -> Tensor:
    """(…, C, m) → (…, m): the largest; −1 where one is not finite."""
    return scores.argmax(-2).masked_fill(~scores.isfinite().all(-2), -1)


class _Sweep:
    """All heads on one input, or on several of the same width, each of which has heads of the same kinds."""

    def __init__(
        self,
        probes: Sequence[Probe],
        which: Sequence[Sequence[int]],
        width: int,
        classes: int,
        schedule: Schedule,
        device: torch.device | str,
    ) -> None:
        """`which`: the probes of each input, in the same order of kinds."""
        self.inputs = tuple(name for own in which for name in probes[own[0]].inputs)
        self.schedule, self.device, self.width = schedule, torch.device(device), width
        self.mean, self.var = (full((len(which) * width,), device=device) for full in (torch.zeros, torch.ones))
        kinds: dict[tuple[int, str], list[int]] = {}  # to places among the probes of an input
        for place, number in enumerate(which[0]):
            kinds.setdefault((probes[number].depth, probes[number].optimizer), []).append(place)
        self.parts = []
        for (depth, _), places in kinds.items():
            widest = classes if depth == 1 else max(classes, width)
            size = max(1, ACTIVATIONS // (max(schedule.batch, ROWS) * widest * len(which)))
            for start in range(0, len(places), size):
                members = [[own[place] for place in places[start : start + size]] for own in which]
                self.parts.append(_Heads(probes, members, width, classes, schedule, self.device))

    def train(self, joined: JoinedFeatures, labels: Tensor) -> Iterator[None]:
        steps, per_epoch = self.schedule.steps(joined.rows), self.schedule.per_epoch(joined.rows)
        batches = joined.batches(labels, self.schedule.batch, self.schedule.seed)
        for step, (x, y) in enumerate(islice(batches, steps)):
            x = F.batch_norm(x, self.mean, self.var, training=True, momentum=1 / (step + 1), eps=FRONT)
            for heads in self.parts:
                rate = self.schedule.rates(step, joined.rows, heads.lr, heads.min_lr)
                loss = heads.step(x, y, rate, momentum=max(0.1, 1 / (step + 1)))
                if step >= steps - per_epoch:  # the last epoch
                    heads.loss += loss / min(per_epoch, steps)
            yield
        for heads in self.parts:
            heads.finish()

    def blocks(self, joined: JoinedFeatures, number: int | None = None) -> Iterator[Tensor]:
        """Normalised features, (m, I · D) at a time, or (m, D) of one input by its number."""
        columns = slice(None) if number is None else slice(number * self.width, (number + 1) * self.width)
        for start in range(0, joined.rows, ROWS):
            yield F.batch_norm(joined.read([start], ROWS), self.mean[columns], self.var[columns], eps=FRONT)


class _Heads:
    """Heads of one kind, as many on each input: parameters (P, out, in), activations (P, out, B)."""

    def __init__(
        self,
        probes: Sequence[Probe],
        members: Sequence[Sequence[int]],
        width: int,
        classes: int,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        """`members`: the probes of each input."""
        which = [number for own in members for number in own]
        first, self.which, self.inputs, self.schedule = probes[which[0]], which, len(members), schedule
        self.lars = first.optimizer == "lars"
        settings = ((probes[n].lr, probes[n].min_lr, probes[n].weight_decay) for n in which)
        self.lr, self.min_lr, self.decay = (
            torch.tensor(values, device=device).view(-1, 1, 1) for values in zip(*settings, strict=True)
        )
        self.loss = torch.zeros(len(which), dtype=torch.float64, device=device)
        random = torch.Generator().manual_seed(schedule.seed)  # of the CPU: the same beginning on every device
        hidden = [torch.empty(width, width, device="cpu") for _ in range(first.depth - 1)]
        for weight in hidden:
            weight.uniform_(-(width**-0.5), width**-0.5, generator=random)
        last = torch.empty(classes, width, device="cpu").normal_(0, 0.01, generator=random)
        self.weights = [weight.to(device).repeat(len(which), 1, 1).requires_grad_() for weight in (*hidden, last)]
        self.gains = [torch.ones(len(which), width, 1, device=device, requires_grad=True) for _ in hidden]
        self.shifts = [torch.zeros(len(which), width, 1, device=device, requires_grad=True) for _ in hidden]
        self.shifts.append(torch.zeros(len(which), classes, 1, device=device, requires_grad=True))
        self.means = [torch.zeros(len(which), width, device=device) for _ in hidden]
        self.vars = [torch.ones(len(which), width, device=device) for _ in hidden]
        self.velocities = [torch.zeros_like(parameter) for parameter in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [*self.weights, *self.gains, *self.shifts]

    def step(self, x: Tensor, labels: Tensor, rate: Tensor, momentum: float) -> Tensor:
        """One step of training on a batch (B, I · D), of this momentum in BatchNorms; the losses before it (P,)."""
        scores = self.scores(x, momentum)
        loss, gradient = _cross_entropy(scores.detach(), labels)
        torch.autograd.backward(scores, gradient)
        with torch.no_grad():
            for number, (parameter, velocity) in enumerate(zip(self._parameters(), self.velocities, strict=True)):
                self._update(parameter, velocity, rate, matrix=number < len(self.weights))
        return loss

    def _update(self, parameter: Tensor, velocity: Tensor, rate: Tensor, matrix: bool) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self.lars:
            gradient = trusted(parameter, gradient, self.decay, dim=(1, 2)) if matrix else gradient
        else:
            gradient.addcmul_(parameter, self.decay)
        velocity.mul_(self.schedule.momentum).add_(gradient)
        parameter.addcmul_(velocity, rate, value=-1)
        parameter.grad = None

    def finish(self) -> None:
        """Keep what scores need."""
        self.velocities.clear()
        for parameter in self._parameters():
            parameter.requires_grad_(False)

    def input_of(self, number: int) -> int:
        """Which of the inputs a probe sees."""
        return self.which.index(number) * self.inputs // len(self.which)

    def only(self, number: int) -> _Heads:
        """The head of one probe."""
        at = self.which.index(number)
        head = copy.copy(self)
        head.which, head.inputs = [number], 1
        for name in ("weights", "gains", "shifts", "means", "vars"):
            setattr(head, name, [tensor[at : at + 1] for tensor in getattr(self, name)])
        return head

    def scores(self, x: Tensor, momentum: float | None = None) -> Tensor:
        """Scores of all heads, (B, I · D) → (P, C, B); in training BatchNorms take this much of the batch."""
        training = momentum is not None
        h = x.view(len(x), self.inputs, -1).permute(1, 2, 0)  # (I, D, B), the same for all heads on an input
        for layer, weight in enumerate(self.weights):
            below = weight.view(len(h), -1, weight.shape[2])  # those of an input under each other
            h = self._product(below, h, training).view(len(weight), -1, len(x))  # (P, out, B)
            if layer < len(self.gains):
                means, variances = self.means[layer].view(-1), self.vars[layer].view(-1)
                gains, shifts = self.gains[layer].view(-1), self.shifts[layer].view(-1)
                flat = h.view(1, -1, len(x))  # all features of all heads are channels of one BatchNorm
                flat = F.batch_norm(flat, means, variances, gains, shifts, training, momentum or 0.0, INSIDE)
                h = flat.view(h.shape).relu_()
        return h.add_(self.shifts[-1])

    def _product(self, weight: Tensor, x: Tensor, training: bool) -> Tensor:
        if training and self.schedule.precision == "bf16":
            return (weight.bfloat16() @ x.bfloat16()).float()
        return weight @ x


def _cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of each head (P,), and its gradient (P, C, B) in the memory of the scores."""
    heads, _, count = scores.shape
    rows = labels.expand(heads, 1, count)
    top = scores.amax(1, keepdim=True)
    told = scores.gather(1, rows) - top
    # What is far below eps is held above the denormal numbers, on which products are many times slower.
    total = scores.sub_(top).clamp_(min=FAINT).exp_().sum(1, keepdim=True)
    scores.div_(total * count).scatter_add_(1, rows, torch.full_like(total, -1 / count))
    return (total.log_() - told).mean((1, 2), dtype=torch.float64), scores
