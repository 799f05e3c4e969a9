"""The package as a file: it builds, installs into a new environment, has all that it needs, and runs there."""

import importlib.util
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT

import sightline as sl


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "scripts" / "try_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.machines
def test_the_wheel_runs_in_a_new_environment(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("build", reason="no build: pip install 'sightline[dev]' to test the package")
    told = script.trial(tmp_path)
    assert told["module"].startswith(str(tmp_path / "environment"))
    assert told["version"] == "sightline 0.1.0"  # a copy without its repository: the fallback
    assert (tmp_path / "demo" / "report.html").is_file()
    assert "report.html" in told["demo"]
    with zipfile.ZipFile(tmp_path / "dist" / told["wheel"]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("sightline/")}
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        asked = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    package = Path(sl.__file__).parent
    ours = {
        f"sightline/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == ours
    assert not [line for line in asked if "extra ==" not in line and "lightning" in line]
    with tarfile.open(tmp_path / "dist" / told["source"]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "sightline/zoo/mae/encoder.safetensors"} <= inside


def test_lower_bounds_are_constraints(script: Any) -> None:
    bounds = script.lowest()
    assert {"typer==0.19", "numpy==2.0", "lightning==2.4"} <= set(bounds)
    assert len(bounds) > 20
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", bound) for bound in bounds)


@pytest.mark.machines
@pytest.mark.parametrize("libraries", ["lowest", "newest"])
def test_it_runs_with_the_lowest_and_the_newest_libraries(script: Any, tmp_path: Path, libraries: str) -> None:
    """Measures, draws, exports and trains; gigabytes are fetched and taken away again."""
    pytest.importorskip("build", reason="no build: pip install 'sightline[dev]' to test the package")
    if not script.reachable():
        pytest.skip("pip finds no libraries to install")
    try:
        told = script.trial(tmp_path, libraries)
        assert told["module"].startswith(str(tmp_path / "environment"))
        assert (tmp_path / "demo" / "report.html").is_file()
        assert (tmp_path / "demo" / "export" / "knn.csv").is_file()
        assert (tmp_path / "training" / "latest.json").is_file()
    finally:
        shutil.rmtree(tmp_path / "environment", ignore_errors=True)


def test_the_citation_is_whole() -> None:
    yaml = pytest.importorskip("yaml")
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert about["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= about.keys()
    assert about["license"] == "Apache-2.0"


def test_no_file_names_a_registry() -> None:
    files = [ROOT / name for name in ("pyproject.toml", "Makefile", "constraints.txt", "mkdocs.yml", "docs/install.md")]
    for file in files:
        text = file.read_text("utf-8")
        assert "index-url" not in text
        assert "pypi" not in text.lower()
