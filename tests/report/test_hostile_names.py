"""Names of encoders, classes, folders and files do no harm, wherever they are shown or written."""

import csv
import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from support.references import SMALL

import sightline as sl
from sightline.cli import main
from sightline.core import progress
from sightline.core.errors import visible
from sightline.report.tables import export_run

ENCODER = "+SUM(1)\x1b[2J[/b]<script>alert(1)<∕script>:smile".replace(":", "\u202e")
CLASSES = ("=1+1[", "@SUM(A1)[", "-\x1b[31m[", "<img src=x onerror=alert(1)>[")  # paths have [/b] in them


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits of images whose classes, folders and files have names that mean something elsewhere."""
    home = tmp_path_factory.mktemp("images") / "red[" / "b] = \x1b[5m"
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in CLASSES:
            folder = home / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(random.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / f"b]{number}\x1b[0m.png")
            (folder / "broken]\x1b[2J.png").write_bytes(b"no image")
    return home


def test_a_comparison_says_and_writes_them_as_names(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["compare", f"{ENCODER}={SMALL}", "--images", f"folder:{images}", "--only", "knn"]
    monkeypatch.setattr(sys, "argv", ["sightline", *words, "--batch", "8", "--workers", "0", "-o", str(out)])
    main()
    said = "".join(capsys.readouterr())
    assert "Report: " in said
    assert "[/broken]\\u001b[2J.png" in said
    assert "\x1b" not in said
    assert "\u202e" not in said
    export_run(sl.open_run(out), "csv")
    tables = list(out.rglob("*.csv"))
    assert tables
    cells = [cell for path in tables for row in csv.reader(io.StringIO(path.read_text())) for cell in row]
    assert any(cell.startswith("'+SUM(1)") for cell in cells)
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "-", "@") and not _is_number(cell)]
    for path in out.rglob("*.svg"):
        assert not [part for part in ElementTree.fromstring(path.read_bytes()).iter() if part.tag.endswith("script")]
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "words", [["inspect", "\x1b[2J[/b].pth"], ["compare", "timm:\x1b[2J@random"], ["report", "\x9b2J"]]
)
def test_errors_repeat_what_was_given_harmlessly(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sightline", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = "".join(capsys.readouterr())
    assert visible(said) == said


def test_bars_and_costs_show_brackets_as_brackets() -> None:
    terminal = progress.terminal(file=io.StringIO(), force_terminal=True, color_system=None)
    for text in ("[/red] :smile: \x1b[2J", "[bold]"):
        terminal.print(text)
    assert terminal.file.getvalue() == "[/red] :smile: \\u001b[2J\n[bold]\n"  # type: ignore[attr-defined]
    with progress.bar("[/red]\x1b[2J", 4) as move:
        move(4)
    progress.show_cost({"layers": "12 of [/x]"})
