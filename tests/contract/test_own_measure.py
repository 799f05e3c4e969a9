"""The measure that docs/howto/measure.md has as an example, installed as a package and measured."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.documents import blocks
from support.references import SMALL

import sightline as sl
from sightline.core import plugins
from sightline.measure.contract import analysis

BLOCK = next(block for block in blocks("python") if block.page == "docs/howto/measure.md")


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    about = tmp_path / "my_package-1.0.dist-info"
    for folder in (tmp_path / "my_package", about):
        folder.mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "length.py").write_text(BLOCK.code, "utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sightline.analyses]\nlength = my_package.length\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins._places.cache_clear()
    yield
    plugins._places.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_installed")
def test_it_measures_and_is_drawn(tmp_path: Path) -> None:
    encoder, images = sl.load_encoder(SMALL), sl.load_images("shapes?size=32&train=4&val=0&test=24")
    run = sl.analyze({"a": encoder}, images, ["length"], out=tmp_path / "run", show_progress=False)
    read = [item.image for item in images.source.read(images.indices("test").tolist()) if item.image is not None]
    pixels = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2)
    with torch.no_grad(), encoder.evaluating(), sl.capture(encoder, "block.*") as seen:
        encoder(encoder.preprocess.normalize(pixels))
    for site, tokens in seen.items():
        lengths = np.linalg.norm(tokens.double().numpy().mean(1), axis=1)
        found = run["length"].sel(encoder="a", site=site)
        assert float(found.length) == pytest.approx(lengths.mean(), rel=1e-5)
        spread = 1.96 * lengths.std(ddof=1) / np.sqrt(24)
        assert float(found.length_high - found.length) == pytest.approx(spread, rel=0.05)
    deeper = run.contrast("length.length", {"site": "block.1"}, {"site": "block.0"}, encoder="a")
    last, first = (float(run["length"].length.sel(encoder="a", site=f"block.{n}")) for n in (1, 0))
    assert deeper.value == pytest.approx(last - first)
    assert "vega-lite" in run.figure("length").to_dict()["$schema"]
    assert analysis("length").headlines(run["length"])[0][:2] == ("a", f"{last:.2f}")
    assert "Length of features" in run.report(show=False).read_text("utf-8")
