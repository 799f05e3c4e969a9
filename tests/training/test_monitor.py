"""metrics.csv: rows, new columns, kills in the middle of a line, and what is taken back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from sightline.core.errors import InputError
from sightline.training.monitor import Monitor


@contextmanager
def monitor(folder: Path, step: int = 0) -> Iterator[Monitor]:
    made = Monitor(folder, step)
    try:
        yield made
    finally:
        made.close()


def row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 1 / step, **more}


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv")


def test_rows_open_in_pandas(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        for step in (1, 2, 3):
            it.write(row(step, lr=1e-4 * step))
            assert len(table(tmp_path)) == step  # each row is there as soon as it is written
    found = table(tmp_path)
    assert list(found.columns) == ["step", "loss", "lr"]
    assert found.step.tolist() == [1, 2, 3]
    assert found.step.dtype.kind == "i"
    assert found.loss.tolist() == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-5)
    assert found.lr.tolist() == pytest.approx([1e-4, 2e-4, 3e-4], rel=1e-5)


def test_new_columns_are_added_and_absent_ones_stay_empty(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        it.write(row(1))
        it.write(row(2, knn_cls=0.5))
        it.write(row(3))
    found = table(tmp_path)
    assert list(found.columns) == ["step", "loss", "knn_cls"]
    assert found.knn_cls.isna().tolist() == [True, False, True]
    assert found.knn_cls[1] == 0.5
    assert found.loss.notna().all()


def test_rows_after_the_checkpoint_are_taken_back(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        for step in range(1, 7):
            it.write(row(step, knn_cls=0.1 * step))
    with monitor(tmp_path, 4) as it:
        assert table(tmp_path).step.tolist() == [1, 2, 3, 4]
        it.write(row(5, knn_cls=0.9))
    found = table(tmp_path)
    assert found.step.tolist() == [1, 2, 3, 4, 5]
    assert found.knn_cls.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.9])


def test_columns_survive_a_resume(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        it.write(row(1))
        it.write(row(2, knn_cls=0.5))
    with monitor(tmp_path, 2) as it:
        it.write(row(3))
        it.write(row(4, knn_cls=0.6))
    found = table(tmp_path)
    assert list(found.columns) == ["step", "loss", "knn_cls"]
    assert found.knn_cls.dropna().tolist() == [0.5, 0.6]


def test_a_training_that_starts_anew_forgets_all_rows(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        it.write(row(1))
    with monitor(tmp_path, 0) as it:
        it.write(row(1, std=0.5))
    assert table(tmp_path).step.tolist() == [1]
    assert table(tmp_path)["std"].tolist() == [0.5]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    """Wherever the cut is: a number without its last digits would still be a number."""
    with monitor(tmp_path) as it:
        for step in (1, 2, 3):
            it.write(row(step, images_per_second=123.456))
    whole = (tmp_path / "metrics.csv").read_bytes()
    last = whole.rstrip().rindex(b"\n") + 1
    for cut in range(last, len(whole) - 2):
        (tmp_path / "metrics.csv").write_bytes(whole[:cut])
        with monitor(tmp_path, 3) as it:
            assert [line["step"] for line in it.rows] == ["1", "2"], whole[last:cut]
            it.write(row(3, images_per_second=123.456))
        assert (tmp_path / "metrics.csv").read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"\r\n", b"step,lo", b"step,loss\r\n"])
def test_a_file_without_rows_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    with monitor(tmp_path) as it:
        it.write(row(1))
    (tmp_path / "metrics.csv").write_bytes(content)
    with monitor(tmp_path, 3) as it:
        it.write(row(4))
    assert table(tmp_path).step.tolist() == [4]


def test_what_is_not_a_number_is_written_but_not_drawn(tmp_path: Path) -> None:
    with monitor(tmp_path) as it:
        it.write(row(1, gradient_norm=float("inf"), entropy=float("nan")))
    found = table(tmp_path)
    assert found.gradient_norm[0] == float("inf")
    assert found.entropy.isna().all()


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monitor(tmp_path) as it:
        for step in (1, 2, 3):
            it.write(row(step))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sightline.training.monitor as module

    def full(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    with monitor(tmp_path) as it:
        it.write(row(1))
        monkeypatch.setattr(module, "open", full, raising=False)
        with pytest.raises(InputError, match="The disk is full"):
            it.write(row(2))
