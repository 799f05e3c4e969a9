"""Bars: who sees them."""

from __future__ import annotations

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
