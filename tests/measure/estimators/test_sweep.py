"""Sweeps against probes trained one by one, and the rule that chooses among them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from sightline.cli.compare import chosen_analyses
from sightline.core.errors import InputError
from sightline.measure.estimators import sweep as sweeping
from sightline.measure.estimators.probes import Probe, Schedule, train_probes
from sightline.measure.estimators.sweep import (
    Labelled,
    Setting,
    Sweep,
    best_first,
    hold_out,
    train_sweep,
    training_bytes,
)

Array = np.ndarray[Any, Any]

TWO = Sweep(lrs=(0.1, 0.01), weight_decays=(0.0, 0.1), epochs=(4.0, 8.0), warmup_epochs=(1.0, 2.0), batch=16)
ENDS = Sweep(optimizers=("sgd", "lars"), min_lrs=(0.0, 0.02), epochs=(4.0,), warmup_epochs=(1.0,), batch=16)


def images(n: int, seed: int) -> Labelled:
    """Two matrices of features of three classes."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    a, b = (random.normal(size=(n, 5)).astype(np.float32) + np.eye(5, dtype=np.float32)[labels] * 2 for _ in range(2))
    return Labelled({"a": a, "b": 3 + b}, labels)


def test_all_combinations_those_of_a_schedule_together() -> None:
    assert len(TWO.settings) == 2 * 2 * 2 * 2
    assert [setting[:2] for setting in TWO.settings[::4]] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert TWO.settings[1] == Setting(epochs=4, warmup_epochs=1, optimizer="sgd", lr=0.1, weight_decay=0.1)
    assert str(TWO.settings[1]) == "SGD, lr 0.1, weight decay 0.1, 4 epochs, 1 of them warm-up"
    assert len(Sweep().settings) == 9
    assert (
        str(Setting(1.0, 0.0, "lars", 0.1, 0.0, 0.01))
        == "LARS, lr 0.1 to 0.01, weight decay 0, 1 epoch, 0 of them warm-up"
    )


def test_the_tables_of_papers() -> None:
    """Table 4 of Shekhar et al. 2023 is 3 · 3 · 6 · 2 · 2 settings, Table A.1 of Park et al. 2023 is one."""
    table, ends = Sweep(preset="table4"), {0, 1e-1, 1e-2, 1e-3, 1e-4, 5e-4}
    assert len(table.settings) == len(set(table.settings)) == 216
    assert {setting.lr for setting in table.settings} == {0.1, 1e-2, 1e-3}
    assert {setting.weight_decay for setting in table.settings} == {0, 5e-2, 0.1}
    assert {setting.min_lr for setting in table.settings} == ends
    assert {setting.warmup_epochs for setting in table.settings} == {10, 40}
    assert {setting.epochs for setting in table.settings} == {100, 200}
    assert {setting.optimizer for setting in table.settings} == {"lars"}
    assert table.batch == 4096
    (only,) = Sweep(preset="a1").settings
    assert only == Setting(50, 0, "sgd", 1.0, 0.05)
    assert Sweep(preset="a1").batch == 1024


def test_what_is_given_overrides_the_preset() -> None:
    """Also where it is what another preset has."""
    given = Sweep(preset="table4", lrs=(0.1, 0.01, 0.001), epochs=(50.0,), batch=256)
    assert (given.epochs, given.batch, given.min_lrs) == ((50.0,), 256, Sweep(preset="table4").min_lrs)
    assert len(given.settings) == 108
    assert Sweep(preset="default") == Sweep()
    assert replace(Sweep(preset="a1"), epochs=(9.0,)) == Sweep(preset="a1", epochs=(9.0,))
    assert chosen_analyses(["probes"], (), {"probes": {"preset": "table4", "epochs": [100]}})[1]["probes"].settings == [
        setting for setting in Sweep(preset="table4").settings if setting.epochs == 100
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lrs": ()}, "at least one of lrs"),
        ({"lrs": (0.1, 0.0)}, "lrs above 0"),
        ({"lrs": (0.1, float("nan"))}, "finite lrs, not 0.1, nan"),
        ({"weight_decays": (0.0, float("inf"))}, "finite weight_decays, not 0.0, inf"),
        ({"lrs": (0.1, 0.01, 0.1)}, "each of lrs once, not 0.1, 0.01, 0.1"),
        ({"epochs": (0.0,)}, "epochs above 0"),
        ({"batch": 1}, "batch above 1, not 1"),
        ({"optimizers": ("adam",)}, "cannot be trained with 'adam'; choose from sgd, lars"),
        ({"precision": "fp16"}, "cannot be trained with 'fp16'"),
        ({"weight_decays": (-0.1,)}, "cannot be below 0"),
        ({"min_lrs": (-0.1,)}, "cannot be below 0"),
        ({"min_lrs": ()}, "at least one of min_lrs"),
        ({"preset": "table_4"}, "Probes have no preset 'table_4'; did you mean 'table4'"),
        ({"warmup_epochs": (50.0,)}, "warm-up of 50 epochs is not shorter than a training of 50"),
        ({"held_out": 1.0}, "between 0 and 1, not 1.0"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sweep(**wrong)


@pytest.mark.parametrize("sweep", [TWO, ENDS])
def test_a_sweep_is_its_probes_trained_one_by_one(sweep: Sweep) -> None:
    train, selection, test = images(40, 0), images(15, 1), images(20, 2)
    shapes = [Probe(("a",)), Probe(("a", "b")), Probe(("b",), depth=2)]
    swept = train_sweep(shapes, sweep, train, selection, classes=3, seed=5)
    assert swept.loss.shape == (3, len(sweep.settings))
    accuracy = swept.accuracy(test)
    for h, shape in enumerate(shapes):
        for k, setting in enumerate(sweep.settings):
            probe = replace(shape, lr=setting.lr * 16 / 256, weight_decay=setting.weight_decay)
            probe = replace(probe, optimizer=setting.optimizer, min_lr=setting.min_lr)  # which no batch scales
            schedule = Schedule(setting.epochs, 16, setting.warmup_epochs, seed=5)
            alone = train_probes([probe], schedule, train.features, train.labels, 3)
            assert swept.loss[h, k] == pytest.approx(alone.loss[0], abs=1e-4)
            assert swept.selection[h, k] == alone.accuracy(*selection)[0]
            assert accuracy[h, k] == alone.accuracy(*test)[0]
        chosen = swept.chosen(h)
        assert chosen is not None
        best = int(swept.selection[h].argmax())
        assert (chosen.setting, chosen.accuracy) == (sweep.settings[best], swept.selection[h, best])
        decided = chosen.decisions(test.features)
        assert (decided == test.labels).mean() == accuracy[h, best]
        np.testing.assert_array_equal(chosen.scores(test.features).argmax(1), decided)


def test_a_batch_of_all_images_at_most() -> None:
    """The learning rate is scaled by the batch that there is."""
    train = images(20, 0)
    large, exact = (
        train_sweep([Probe(("a",))], Sweep(batch=batch, epochs=(10.0,)), train, train, 3, 0) for batch in (4096, 20)
    )
    np.testing.assert_array_equal(large.loss, exact.loss)


def test_a_converged_linear_probe_is_scikit_learns() -> None:
    """The same objective: softmax, ½ λ (‖W‖² + ‖b‖²), features standardised over all images."""
    train, decay = images(60, 3), 0.05
    sweep = Sweep(lrs=(4.0,), weight_decays=(decay,), epochs=(400.0,), warmup_epochs=(10.0,), batch=60)
    swept = train_sweep([Probe(("b",))], sweep, train, train, 3, 0)
    x = np.asarray(train.features["b"], np.float64)
    z = np.column_stack([(x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6), np.ones(60)])
    peer = LogisticRegression(C=1 / (60 * decay), fit_intercept=False, tol=1e-10, max_iter=10_000).fit(z, train.labels)
    loss = -np.log(peer.predict_proba(z)[np.arange(60), train.labels]).mean()
    assert swept.loss[0, 0] == pytest.approx(loss, abs=1e-4)
    assert swept.selection[0, 0] == pytest.approx(peer.score(z, train.labels), abs=1 / 60)


def test_what_diverged_is_never_chosen() -> None:
    train = images(30, 0)
    sweep = Sweep(lrs=(1e30, 0.1), weight_decays=(0.1,), epochs=(6.0,), warmup_epochs=(0.0,))
    swept = train_sweep([Probe(("a",))], sweep, train, train, 3, 0)
    assert np.isnan(swept.loss[0]).tolist() == [True, False]
    assert np.isnan(swept.selection[0]).tolist() == [True, False]
    chosen = swept.chosen(0)
    assert chosen is not None
    assert chosen.setting.lr == 0.1
    assert train_sweep([Probe(("a",))], replace(sweep, lrs=(1e30,)), train, train, 3, 0).chosen(0) is None


def test_of_equal_ones_the_first() -> None:
    assert best_first(np.array([np.nan, 0.2, 0.9, 0.9, 0.2])).tolist() == [2, 3, 1, 4]
    assert best_first(np.array([np.nan])).tolist() == []


def test_every_class_gives_its_share() -> None:
    labels = np.repeat([0, 1, 4, 7], [100, 10, 2, 1])
    kept, held = hold_out(labels, 0.2, seed=0)
    assert np.bincount(labels[held], minlength=8).tolist() == [20, 2, 0, 0, 1, 0, 0, 0]
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(113))
    again, other = hold_out(labels, 0.2, seed=0), hold_out(labels, 0.2, seed=1)
    np.testing.assert_array_equal(again[1], held)
    assert not np.array_equal(other[1], held)
    assert (
        np.bincount(labels[hold_out(labels, 0.99, seed=0)[0]], minlength=8).min(
            where=np.bincount(labels) > 0, initial=9
        )
        == 1
    )
    with pytest.raises(InputError, match="no class has two"):
        hold_out(np.arange(5), 0.2, seed=0)


def test_memory_is_of_all_settings_and_bounded_for_features() -> None:
    assert training_bytes(10, 100, Sweep()) == 4 * (3 * 9 * 10 + 100)
    assert training_bytes(0, 2**40, Sweep()) == 2**30
    assert training_bytes(10, 100, Sweep(preset="table4")) == 4 * ((216 + 2 * 54) * 10 + 100)


def test_a_bar_counts_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextmanager
    def bar_of_steps(title: str, total: int) -> Iterator[Callable[[], None]]:
        seen.extend((title, total))
        yield lambda: seen.append(1)

    monkeypatch.setattr(sweeping, "bar_of_steps", bar_of_steps)
    train_sweep(
        [Probe(("a",)), Probe(("a",), 2), Probe(("b",))], TWO, images(40, 0), images(9, 1), 3, 0, "Probes of vit"
    )
    # 40 images in batches of 16 are 2 steps, for 4, 4, 8 and 8 epochs; two of the three see the same features
    assert seen[:2] == ["Probes of vit", 2 * 2 * 24]
    assert len(seen[2:]) == 2 * 2 * 24
