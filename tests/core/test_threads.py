"""Work side by side: the outcomes in order, and threads and modes as they were."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from sightline.core import progress
from sightline.core.stopping import AbandonedError, go_on
from sightline.core.threads import side_by_side


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("most", "places", "each"), [(None, 4, 1), (2, 2, 2), (3, 3, 1), (1, 1, 4)])
def test_threads_are_shared_out(most: int | None, places: int, each: int) -> None:
    together = threading.Barrier(places, timeout=20)  # passes only if so many work at a time

    def work(number: int) -> tuple[int, int]:
        together.wait()
        return number, torch.get_num_threads()

    count = 3 * places if places > 1 else 5
    assert side_by_side(work, range(count), most) == [(number, each) for number in range(count)]
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_inference_and_errors_pass_through() -> None:
    with torch.inference_mode():
        assert all(x.is_inference() for x in side_by_side(torch.ones, [1, 2, 3]))
    assert not any(x.is_inference() for x in side_by_side(torch.ones, [1, 2, 3]))
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda number: 1 // number, [1, 0, 2])
    assert torch.get_num_threads() == 4
    assert side_by_side(torch.ones, []) == []


@pytest.mark.usefixtures("four_threads")
def test_work_ends_where_other_work_has_failed() -> None:
    together, ended = threading.Barrier(4, timeout=20), []

    def work(number: int) -> None:
        together.wait()  # all have begun
        if not number:
            raise ZeroDivisionError
        try:
            while True:
                go_on()
        except AbandonedError:
            ended.append(number)
            raise

    with pytest.raises(ZeroDivisionError):
        side_by_side(work, [0, 1, 2, 3])
    assert sorted(ended) == [1, 2, 3]
    go_on()  # outside nothing is over


@pytest.mark.usefixtures("four_threads")
def test_bars_of_several_threads_are_shown_together(monkeypatch: pytest.MonkeyPatch) -> None:
    text, together = io.StringIO(), threading.Barrier(2, timeout=20)
    monkeypatch.setattr(progress, "console", lambda: Console(file=text, force_terminal=True))

    def work(name: str) -> None:
        with progress.bar_of_steps(f"Probes of {name}", 1) as move:
            together.wait()
            move()
            assert progress._bars.shown is not None
            assert {task.description for task in progress._bars.shown.tasks} <= {"Probes of a", "Probes of b"}
            together.wait()

    with progress.showing(True):
        side_by_side(work, ["a", "b"])
    assert "Probes of a" in text.getvalue()
    assert "Probes of b" in text.getvalue()
    assert progress._bars.shown is None
