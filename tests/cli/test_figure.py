"""`sightline figure` and `sightline list figures`."""

from pathlib import Path

import pandas as pd
import pytest
from support.results import cka_result, vit_sites
from typer.testing import CliRunner

from sightline.cli import app
from sightline.core.errors import InputError
from sightline.core.run_folder import Run, open_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two encoders whose references tell their roles, with CKA."""
    names = ("moco_v3", "mae")
    run = Run(
        tmp_path_factory.mktemp("run") / "x",
        {"encoders": [{"name": name, "reference": f"zoo:{name}"} for name in names], "images": {"name": "shapes"}},
    )
    run.save_request()
    run.save("cka", cka_result({name: vit_sites(2) for name in names}))
    assert run.path is not None
    return run.path


def test_the_figure_lies_in_the_run_folder_unless_told_otherwise(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["figure", "001 Fig 1b", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    path = folder / "figures" / "001-fig-1b.svg"
    assert done.stdout.split() == [str(path)]
    assert path.read_text("utf-8").startswith("<svg")
    CliRunner().invoke(
        app, ["figure", "001 Fig 1b", str(folder), "-o", str(tmp_path / "a.pdf")], catch_exceptions=False
    )
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF-")


def test_the_table_has_the_numbers_of_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.csv"
    CliRunner().invoke(app, ["figure", "000 Fig 2a", str(folder), "-o", str(out)], catch_exceptions=False)
    table = pd.read_csv(out).set_index(["site_a", "site_b"]).value
    cka = open_run(folder)["cka"].cka.sel(tokens="all", encoder_a="mae", encoder_b="moco_v3")
    for a in (f"block.{n}.qkv" for n in range(2)):
        assert table[a, "block.1.qkv"] == pytest.approx(float(cka.sel(site_a=a, site_b="block.1.qkv")), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "out", "told"),
    [
        ("001 Fig 5", None, "needs a fine-tuned mae (from `sightline study --steps finetune`)"),
        ("001 Fig 12", None, "needs the analysis knn of moco_v3 and mae: add `--also knn`"),
        ("001 Fig 99", None, "no measurement"),
        ("001 Fig 1", "a.docx", "ends in .svg, .pdf, .csv"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(folder: Path, name: str, out: str | None, told: str) -> None:
    words = ["figure", name, str(folder), *([] if out is None else ["-o", out])]
    with pytest.raises(InputError) as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_that_are_missing_are_told(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "b.svg")
    done = CliRunner().invoke(app, ["figure", "000 Fig 5", str(folder), "-o", out], catch_exceptions=False)
    assert "Without part c, which needs a fine-tuned mae (from `sightline study --steps finetune`)" in done.stderr


def test_all_figures_are_listed() -> None:
    done = CliRunner().invoke(app, ["list", "figures"], catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 55  # with the heading
    assert any(line.startswith("003 Table G.1") and "probes, segmenters" in line for line in lines)
