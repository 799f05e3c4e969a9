"""What a notebook shows of an encoder, of images and of a run: HTML that is whole, and escaped."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.references import SMALL

import sightline as sl

EVIL = '"><script>alert(1)</script>'


def whole(html: str) -> str:
    """The text of a card, whose elements all have an end."""
    closed = re.sub(r"(<img [^>]*)>", r"\1/>", html)
    assert "<script" not in html
    return " ".join("".join(ElementTree.fromstring(closed).itertext()).split())


@pytest.mark.parametrize("name", ["small", EVIL])
@getattr(pytest.mark, "pass")
def test_an_encoder(name: str) -> None:
    text = whole(replace(sl.load_encoder(SMALL), name=name)._repr_html_())
    assert text.startswith(f"Encoder {name}")
    assert "4 × 4 patches, 1 other tokens" in text
    assert "32 × 32 pixels" in text


def test_images_are_seen() -> None:
    images = sl.load_images("shapes?size=32&train=4&val=0&test=16")
    html = replace(images, name=EVIL)._repr_html_()
    assert html.count("<img") == 8
    assert "4 train, 16 test" in whole(html)


@getattr(pytest.mark, "pass")
def test_a_run_says_what_it_holds(tmp_path: Path) -> None:
    images = sl.load_images("shapes?size=32&train=16&val=0&test=16")
    run = sl.analyze({EVIL: SMALL}, images, ["knn", "cka"], out=tmp_path / "run", show_progress=False)
    text = whole(run._repr_html_())
    assert str(tmp_path) in text
    assert "cka, knn" in text
    assert "16 train, 16 test" in text
    assert "k-NN accuracy" in text  # the headlines, folded
    assert whole(sl.Run(None)._repr_html_()) == "Run in memoryresultsnone"


@getattr(pytest.mark, "pass")
def test_figures_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = sl.load_images("shapes?size=32&train=16&val=0&test=16")
    encoders = {"a": SMALL, "b": SMALL + "&seed=1"}
    run = sl.analyze(encoders, images, ["knn", "cka"], out=tmp_path / "run", show_progress=False)
    chart = run.figure("knn").to_dict()
    values = [row["value"] for rows in chart["datasets"].values() for row in rows if row.get("series") == "a cls"]
    assert chart["config"]["range"]["category"][0] == "#0072b2"
    known = run["knn"].accuracy.sel(encoder="a").values.ravel()
    assert all(any(abs(value - number) < 1e-6 for number in known) for value in values)
    names = {name: run.figure("cka", name).to_dict()["$schema"] for name in ("pairs", "depth")}
    assert all("vega-lite" in schema for schema in names.values())
    with pytest.raises(sl.InputError, match=r"^'cka' has no figure 'pair'; did you mean 'pairs'\?$"):
        run.figure("cka", "pair")
    with pytest.raises(sl.InputError, match=r"^'cka' has no figure 'xyz'; choose from pairs, depth, [\w, -]+$"):
        run.figure("cka", "xyz")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = run.report()
    assert page == tmp_path / "run" / "report.html"
    assert opened == [page.as_uri()]
    written = page.stat().st_mtime_ns
    assert run.report(show=False).stat().st_mtime_ns == written  # nothing has changed since
    run.file("knn").touch()
    assert run.report(show=False).stat().st_mtime_ns > written
    assert len(opened) == 1


def test_a_verdict_says_what_it_rests_on() -> None:
    from sightline.studies.findings.contract import Part, Verdict

    part = Part(EVIL, 0.21, 0.19, 0.23, 0.001, True, 0.0005, 1.0)
    held = Verdict("S1", "holds", 0.21, 0.19, 0.23, 0.0005, 0.0, "They are alike.", (part,), p_adjusted=0.02)
    text = whole(held._repr_html_())
    assert text.startswith("S1: holds")
    assert "0.21 (95 % 0.19 – 0.23), claimed > 0" in text
    assert "0.0005 (Holm's: 0.02)" in text
    assert EVIL in text
    nan = float("nan")
    missing = Verdict("S2", "not measured", nan, nan, nan, nan, 0.0, "Not measured.", needs="a fine-tuned MAE")
    assert whole(missing._repr_html_()) == "S2: not measuredNot measured.needsa fine-tuned MAE"


def test_one_line_says_what_it_is() -> None:
    assert repr(sl.load_encoder("zoo:dino")) == "Encoder('dino', 'zoo:dino', 12 blocks, 48 × 48 pixels)"
    images = sl.load_images("shapes?train=64&val=0&test=32")
    assert repr(images) == "Images('shapes?train=64&val=0&test=32', 64 train, 32 test, 16 classes)"
