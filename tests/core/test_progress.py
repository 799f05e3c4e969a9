"""Bars: who sees them."""

import io

import pytest
from rich.console import Console

from sightline.core import progress


@pytest.mark.parametrize(("shown", "terminal"), [(True, True), (True, False), (False, True)])
def test_bars_of_steps_are_seen_in_a_terminal_if_someone_looks(
    monkeypatch: pytest.MonkeyPatch, shown: bool, terminal: bool
) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=text, force_terminal=terminal))
    with progress.showing(shown), progress.bar_of_steps("Probes of vit", 3) as move:
        for _ in range(3):
            move()
    assert ("Probes of vit" in text.getvalue()) == (shown and terminal)
    assert terminal or not text.getvalue()  # a log has no lines of what was there for a moment


def test_bars_of_steps_are_hidden_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=text, force_terminal=True))
    with pytest.raises(ValueError, match="stop"), progress.showing(True):
        raise ValueError("stop")
    with progress.bar_of_steps("Probes of vit", 1) as move:
        move()
    assert not text.getvalue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test may set."""
    now = [100.0]
    monkeypatch.setattr("sightline.core.progress.time.monotonic", lambda: now[0])
    return now


def test_a_log_is_told_at_once_then_how_long_it_takes_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=text, force_terminal=False))
    with progress.bar("Comparing", 1000) as move:
        assert text.getvalue() == "Comparing: 1000 images; the time it takes is told after the first of them\n"
        for _ in range(100):
            clock[0] += 2
            move(10)
    lines = text.getvalue().splitlines()[1:]
    assert lines[0] == "Comparing: 20 of 1000 images, about 3 min left"  # after 4 of 200 s
    assert len(lines) == 5  # after 3, 9, 27 and then 60 seconds at least
    assert lines[-1].startswith("Comparing: 810 of 1000 images, about 38 s left")


def test_continuing_counts_only_what_is_done_now(clock: list[float]) -> None:
    pace = progress.Pace("Comparing", 1000, done=900)
    clock[0] += 10
    assert pace.move(50) == "Comparing: 950 of 1000, about 10 s left"
    assert progress.Pace("Comparing", 10).move(10) is None  # done


def test_names_are_told_one_by_one_when_they_take_their_time(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=text))
    with progress.showing(True):
        for _ in progress.one_by_one("Computing", ["cka", "knn", "probes"]):
            clock[0] += 2
    assert text.getvalue().splitlines() == ["Computing: cka (1 of 3)", "Computing: probes (3 of 3)"]
    assert list(progress.one_by_one("Computing", "ab")) == ["a", "b"]
    assert len(text.getvalue().splitlines()) == 2  # nobody looks
