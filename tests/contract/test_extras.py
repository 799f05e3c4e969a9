"""A base installation, without the libraries of the extras: what works there, and what the rest says."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.documents import ROOT
from support.references import SMALL

from sightline.core.extras import EXTRAS

pytestmark = pytest.mark.processes
# As if they were not installed, for this process and those that it starts.
WITHOUT = f"""
import importlib.machinery
import importlib.metadata

hidden = {sorted(EXTRAS)!r}
find, look = importlib.machinery.PathFinder.find_spec, importlib.metadata.Distribution.from_name

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)

def from_name(name):
    if name.replace("-", "_") in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return look(name)

importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
importlib.metadata.Distribution.from_name = staticmethod(from_name)
"""


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds none of the extras."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    return os.environ | {"PYTHONPATH": f"{tmp_path / 'without'}:{ROOT}"}


def test_a_base_installation_compares(base: dict[str, str], tmp_path: Path) -> None:
    command = ["compare", SMALL, "--images", "shapes?size=32&train=16&val=0&test=16", "--only", "cka,knn,attention"]
    done = run([*command, "-o", str(tmp_path / "run")], base)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_what_needs_an_extra_says_so(base: dict[str, str], tmp_path: Path) -> None:
    done = run(["pretrain", "simclr", "-o", str(tmp_path / "run")], base)
    assert done.returncode == 2
    assert "which is not installed; get it with `pip install 'sightline[training]'`" in " ".join(done.stderr.split())
    script = (
        "import sightline as sl\n"
        "pretrain, rcdm = lambda: sl.pretrain('simclr'), lambda: sl.rcdm('zoo:dino')\n"
        "for use in (pretrain, lambda: sl.load_images('huggingface:x'), rcdm):\n"
        "    try:\n        use()\n"
        "    except sl.InputError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=base, capture_output=True, text=True, timeout=300, check=True
    )
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        "This needs lightning, which is not installed",
        "This needs datasets, which is not installed",
        "This needs lightning, which is not installed",
    ]


def test_extras_are_those_of_the_package() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    base = " ".join(wanted["dependencies"])
    for library, extra in EXTRAS.items():
        name = library.replace("_", "-")
        assert any(line.startswith(name) for line in wanted["optional-dependencies"][extra]), name
        assert f"{name}>" not in base


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sightline", *command], env=environment, capture_output=True, text=True, timeout=300
    )
