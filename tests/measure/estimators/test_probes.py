"""Probes trained together against a plain loop that trains one, against scikit-learn, and their own promises."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.measure.estimators import probe_batches as shuffling
from sightline.measure.estimators import probes as probing
from sightline.measure.estimators.probe_batches import JoinedFeatures
from sightline.measure.estimators.probes import Probe, Schedule, train_probes

Array = np.ndarray[Any, Any]
CLASSES, WIDTH = 5, 12
SWEEP = [
    *(Probe(("a",), lr=lr, weight_decay=decay) for lr in (0.3, 0.03) for decay in (0.0, 0.05)),
    *(Probe(("b",), optimizer="lars", lr=lr, weight_decay=decay) for lr in (5.0, 1.0) for decay in (0.0, 0.1)),
    *(Probe(("a",), depth, optimizer, lr, 0.01) for depth in (2, 3) for optimizer, lr in (("sgd", 0.1), ("lars", 5.0))),
    Probe(("b", "a"), lr=0.1),
    Probe(("b", "a"), 2, lr=0.05, weight_decay=0.02),
    Probe(("narrow", "b"), 3, "lars", lr=3.0),
    Probe(("a",), lr=0.1, min_lr=0.02),
    Probe(("b",), optimizer="lars", lr=1.0, min_lr=5.0),  # above the peak
]


def problem(n: int = 150, seed: int = 0) -> tuple[dict[str, Array], Array]:
    """Features of very different sizes, of which some know the class; rows are sorted by class."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) * CLASSES // n
    offset = np.random.default_rng(9).normal(size=(CLASSES, WIDTH))
    sizes = np.logspace(-2, 2, WIDTH)
    features = {
        name: ((random.normal(size=(n, WIDTH)) + strength * offset[labels]) * sizes + 3).astype(np.float32)
        for name, strength in (("a", 1.0), ("b", 0.4))
    }
    return features | {"narrow": features["a"][:, 3:5].astype(np.float64)}, labels


# The plain twin: one head, modules and optimisers as everyone writes them


class PlainLars(torch.optim.Optimizer):
    """As He et al. (2022) probe MAE: matrices are decayed and scaled, everything else is left to momentum alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                change = p.grad.clone()
                if p.ndim > 1:
                    change += group["weight_decay"] * p
                    if p.norm() > 0 and change.norm() > 0:
                        change *= 0.001 * p.norm() / change.norm()
                state = self.state[p]
                state["momentum"] = 0.9 * state.get("momentum", 0) + change
                p -= group["lr"] * state["momentum"]


def plain_head(probe: Probe, widths: list[int], seed: int) -> nn.Sequential:
    width = sum(widths)
    random = torch.Generator().manual_seed(seed)
    blocks: list[nn.Module] = []
    for _ in range(probe.depth - 1):
        linear = nn.Linear(width, width, bias=False)
        nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=random)
        blocks += [linear, nn.BatchNorm1d(width), nn.ReLU()]
    last = nn.Linear(width, CLASSES)
    nn.init.normal_(last.weight, std=0.01, generator=random)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*blocks, last)


class Plain(nn.Module):
    def __init__(self, probe: Probe, widths: list[int], seed: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(n, affine=False, eps=1e-6, momentum=None) for n in widths)
        self.head = plain_head(probe, widths, seed)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        return self.head(torch.cat([norm(x) for norm, x in zip(self.norms, parts, strict=True)], 1))


def plain_batches(x: Tensor, y: Tensor, schedule: Schedule) -> Iterator[tuple[Tensor, Tensor]]:
    random, batch = torch.Generator().manual_seed(schedule.seed), min(schedule.batch, len(y))
    while True:
        order = torch.randperm(len(y), generator=random)
        for number in range(len(y) // batch):
            rows = order[number * batch : (number + 1) * batch]
            yield x[rows], y[rows]


def train_plain(
    probe: Probe, schedule: Schedule, features: dict[str, Array], labels: Array, batches: Any = None
) -> tuple[Plain, float]:
    parts = [torch.tensor(features[name], dtype=torch.float32) for name in probe.inputs]
    batches = batches or plain_batches(torch.cat(parts, 1), torch.tensor(labels), schedule)
    widths = [part.shape[1] for part in parts]
    model = Plain(probe, widths, schedule.seed)
    options = {"lr": 0.0, "weight_decay": probe.weight_decay}
    optimizer = (
        torch.optim.SGD(model.parameters(), momentum=0.9, **options)
        if probe.optimizer == "sgd"
        else PlainLars(model.parameters(), options)
    )
    per_epoch = max(1, len(labels) // schedule.batch)
    steps, warmup = round(schedule.epochs * per_epoch), schedule.warmup_epochs * per_epoch
    losses = []
    for step, (x, y) in zip(range(steps), batches, strict=False):
        down = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))
        falling = probe.min_lr + (probe.lr - probe.min_lr) * down
        optimizer.param_groups[0]["lr"] = probe.lr * step / warmup if step < warmup else falling
        for norm in model.head:
            if isinstance(norm, nn.BatchNorm1d):
                norm.momentum = 0.1 if step >= 9 else 1 / (step + 1)  # the mean of the first ten batches, then moving
        loss = nn.functional.cross_entropy(model(x.split(widths, 1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), float(np.mean(losses[-per_epoch:]))


@pytest.mark.parametrize("schedule", [Schedule(12, 32, 3, seed=4), Schedule(30, 4096, 2), Schedule(2.5, 40, 0)])
def test_every_head_is_as_if_trained_alone_by_a_plain_loop(schedule: Schedule) -> None:
    features, labels = problem()
    test, told = problem(60, seed=1)
    trained = train_probes(SWEEP, schedule, features, labels, CLASSES)
    accuracy = trained.accuracy(test, told)
    for number, probe in enumerate(SWEEP):
        model, loss = train_plain(probe, schedule, features, labels)
        assert trained.loss[number] == pytest.approx(loss, abs=1e-4), probe
        with torch.no_grad():
            expected = model([torch.tensor(test[name], dtype=torch.float32) for name in probe.inputs]).numpy()
        scores = np.concatenate(list(trained.scores(number, test)))
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, atol=2e-3, err_msg=str(probe))
        assert accuracy[number] == pytest.approx((expected.argmax(1) == told).mean(), abs=1.01 / len(told))
        np.testing.assert_array_equal(trained.decisions(number, test), scores.argmax(1))


def test_few_steps_leave_nothing_of_where_statistics_start() -> None:
    """BatchNorm takes size and offset away, also when there are only 20 steps, where 0.9²⁰ = 0.12."""
    features, labels = problem()
    sweep = [Probe(("a",), lr=0.1), Probe(("a",), 2, lr=0.1)]
    moved = {"a": 0.02 * (features["a"] - features["a"].mean(0)) / features["a"].std(0) + 5}
    accuracy, other = (
        train_probes(sweep, Schedule(20, 4096, 2), which, labels, CLASSES).accuracy(which, labels)
        for which in (features, moved)
    )
    assert (accuracy > 0.8).all()
    np.testing.assert_allclose(other, accuracy, atol=0.03)


def test_company_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = problem()
    schedule = Schedule(10, 32, 2)
    together = train_probes(SWEEP, schedule, features, labels, CLASSES)
    monkeypatch.setattr(probing, "ACTIVATIONS", 1)  # every head a part of its own
    apart = train_probes(SWEEP[::-1], schedule, features, labels, CLASSES)
    np.testing.assert_allclose(apart.loss[::-1], together.loss, atol=1e-5)
    for number, probe in enumerate(SWEEP):
        alone = train_probes([probe], schedule, features, labels, CLASSES)
        assert alone.loss[0] == pytest.approx(together.loss[number], abs=1e-5)
        assert alone.accuracy(features, labels)[0] == pytest.approx(
            together.accuracy(features, labels)[number], abs=0.01
        )


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_inputs_of_equal_width_are_trained_side_by_side(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four inputs in one product, of which one diverges, against each by itself."""
    features, labels = problem()
    a = features["a"]
    features = {"a": a, "b": a[:, ::-1] * 3, "c": a**2, "d": a * np.float32(np.nan)}
    sweep = [Probe((name,), optimizer=optimizer, lr=lr) for name in features for lr in (0.1, 1.0)]
    schedule = Schedule(10, 32, 2)
    together = train_probes(sweep, schedule, features, labels, CLASSES)
    assert [len(part.which) for part in together._sweeps[0].parts] == [8]
    monkeypatch.setattr(probing, "fitting", lambda rows, width: 1)
    apart = train_probes(sweep, schedule, features, labels, CLASSES)
    assert len(apart._sweeps) == 4
    np.testing.assert_allclose(together.loss, apart.loss, atol=1e-5)
    assert np.isfinite(together.loss).tolist() == [True] * 6 + [False] * 2
    np.testing.assert_allclose(together.accuracy(features, labels), apart.accuracy(features, labels), atol=0.01)
    for number in range(6):
        ours, theirs = (np.concatenate(list(each.scores(number, features))) for each in (together, apart))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_probes_learn_what_the_features_know() -> None:
    features, labels = problem(400)
    test, told = problem(400, seed=1)
    sweep = [Probe(("a",)), Probe(("b",)), Probe(("a", "b")), Probe(("a",), 2), Probe(("a",), 3, lr=0.01)]
    accuracy = train_probes(sweep, Schedule(60, 128, 5), features, labels, CLASSES).accuracy(test, told)
    assert (accuracy > (0.85, 0.4, 0.85, 0.8, 0.8)).all()
    assert accuracy[1] < accuracy[0] - 0.2


def test_same_minimum_as_scikit_learn() -> None:
    features, labels = problem(300)
    decay = 0.05
    schedule = Schedule(epochs=1000, batch=300, warmup_epochs=10)
    trained = train_probes([Probe(("a",), lr=0.5, weight_decay=decay)], schedule, features, labels, CLASSES)
    x = features["a"].astype(np.float64)
    x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
    # 1/n Σ loss + λ/2 ‖w‖², as SGD decays it; the bias as a column, since SGD decays that as well.
    peer = LogisticRegression(C=1 / (300 * decay), fit_intercept=False, tol=1e-8, max_iter=1000)
    peer.fit(np.c_[x, np.ones(300)], labels)
    expected = -np.log(peer.predict_proba(np.c_[x, np.ones(300)])[np.arange(300), labels]).mean()
    assert trained.loss[0] == pytest.approx(expected, abs=1e-4)


def test_features_that_do_not_fit_in_memory_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = problem(1000)
    monkeypatch.setattr(shuffling, "MEMORY", 512 * WIDTH)
    monkeypatch.setattr(shuffling, "CONSECUTIVE", 2)
    schedule = Schedule(20, 100, 2)
    sweep = [Probe(("a",)), Probe(("a", "b"), 2)]
    streamed = train_probes(sweep, schedule, features, labels, CLASSES)
    for number, probe in enumerate(sweep):
        order = JoinedFeatures(probe.inputs, features).batches(torch.from_numpy(labels), 100, schedule.seed)
        loss = train_plain(probe, schedule, features, labels, order)[1]
        assert streamed.loss[number] == pytest.approx(loss, abs=1e-4)
    monkeypatch.undo()
    whole = train_probes(sweep, schedule, features, labels, CLASSES)
    assert (streamed.loss != whole.loss).all()
    np.testing.assert_allclose(streamed.accuracy(features, labels), whole.accuracy(features, labels), atol=0.03)


@torch.inference_mode()
def test_gradients_may_be_turned_off_outside() -> None:
    features, labels = problem(60)
    trained = train_probes([Probe(("a",), 2)], Schedule(2, 32, 0), features, labels, CLASSES)
    assert trained.loss[0] < math.log(CLASSES)
    assert trained.accuracy(features, labels).shape == (1,)


def test_a_head_that_diverges_disturbs_no_other() -> None:
    features, labels = problem()
    features["hole"] = features["a"].copy()
    features["hole"][7, 2] = np.nan
    test = {**features, "a": features["a"].copy()}
    test["a"][3] = np.inf
    schedule = Schedule(8, 32, 0)
    good = [Probe(("a",)), Probe(("a",), 2), Probe(("a",), optimizer="lars", lr=3.0), Probe(("b",))]
    bad = [Probe(("a",), lr=1e38), Probe(("a",), 2, lr=1e38), Probe(("a",), optimizer="lars", lr=math.inf)]
    bad += [Probe(("hole",)), Probe(("hole", "a"), 2)]
    trained = train_probes([*bad, *good], schedule, features, labels, CLASSES)
    expected = train_probes(good, schedule, features, labels, CLASSES)
    assert np.isnan(trained.loss[:5]).all()
    assert np.isnan(trained.accuracy(features, labels)[:5]).all()
    assert (trained.decisions(0, features) == -1).all()
    np.testing.assert_allclose(trained.loss[5:], expected.loss, atol=1e-6)
    np.testing.assert_allclose(trained.accuracy(features, labels)[5:], expected.accuracy(features, labels), atol=1e-9)
    assert np.isnan(trained.accuracy(test, labels)[5:]).tolist() == [True, True, True, False]
    assert np.flatnonzero(trained.decisions(5, test) == -1).tolist() == [3]


def test_large_scores_do_not_overflow() -> None:
    scores = torch.tensor([[[500.0, 500.0], [0.0, -300.0]]])  # (P, C, B)
    loss, gradient = probing._cross_entropy(scores, torch.tensor([1, 0]))
    torch.testing.assert_close(loss, torch.tensor([250.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([[[0.5, 0.0], [-0.5, 0.0]]]))


@pytest.mark.bf16
def test_bf16_is_near_float32() -> None:
    features, labels = problem(300)
    losses = [
        train_probes(SWEEP, Schedule(10, 100, 2, precision=precision), features, labels, CLASSES).loss
        for precision in ("float32", "bf16")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05, atol=0.01)
    assert (losses[0] != losses[1]).all()


def test_seeds_and_progress() -> None:
    features, labels = problem(70)
    steps: list[tuple[int, int]] = []
    sweep = [Probe(("a",)), Probe(("b",), 2)]
    losses = [
        train_probes(sweep, Schedule(3, 32, 1, seed=seed), features, labels, CLASSES, show=lambda *s: steps.append(s))
        for seed in (0, 0, 1)
    ]
    assert steps[:12] == [(step, 12) for step in range(1, 13)]
    np.testing.assert_array_equal(losses[0].loss, losses[1].loss)
    assert (losses[0].loss != losses[2].loss).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f, y: train_probes([], Schedule(), f, y, 5), "no probes"),
        (lambda f, y: train_probes([Probe(("c",))], Schedule(), f, y, 5), "no features 'c'"),
        (lambda f, y: train_probes([Probe(("a",))], Schedule(), f, y[1:], 5), "'a' have 150 rows for 149 images"),
        (lambda f, y: train_probes([Probe(("a",))], Schedule(), f, y[:0], 5), "at least 2 training images, not 0"),
        (lambda f, y: train_probes([Probe(("a",))], Schedule(), f, y, 4), "0 … 4, but 4 classes need 0 … 3"),
        (lambda f, y: train_probes([Probe(("a",))], Schedule(), f, y - 1, 5), "Labels are -1 … 3"),
        (lambda f, y: train_probes([Probe(("a",))], Schedule(1), f, y, 5).accuracy({}, y), "no features 'a'"),
        (
            lambda f, y: train_probes([Probe(("a",))], Schedule(1), f, y, 5).accuracy(f, y[:0]),
            "needs images to be measured on",
        ),
        (lambda f, y: Probe(()), "needs inputs"),
        (lambda f, y: Probe(("a",), depth=0), "depth 0"),
        (lambda f, y: Probe(("a",), optimizer="lar"), "did you mean 'lars'"),
        (lambda f, y: Probe(("a",), lr=-1.0), "has lr -1.0, but it cannot be negative"),
        (lambda f, y: Schedule(epochs=0), "epochs is 0"),
        (lambda f, y: Schedule(batch=1), "at least 2 images"),
        (lambda f, y: Schedule(precision="fp16"), "no precision 'fp16'"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(*problem())
