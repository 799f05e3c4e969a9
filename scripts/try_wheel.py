#!/usr/bin/env python3
"""Build the package, install it into a new environment, and try it there: `sightline demo` at a small setting.

scripts/try_wheel.py                       uses the libraries of the environment that runs it: seconds to install
scripts/try_wheel.py --libraries newest    installs what the package and its trainings ask for, with pip
scripts/try_wheel.py --libraries lowest    the same with each library that pyproject.toml names at its lower bound
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LEFT = shutil.ignore_patterns(
    ".git", ".venv", "weights", "runs", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache"
)
DEMO = ("demo", "--only", "knn", "--limit", "16", "--device", "cpu")
SMALL = ("size=32", "depth=1", "width=24", "heads=2", "decoder_depth=1", "epochs=1", "batch=16", "watch=[]")
TRAINING = ("pretrain", "mae", "--images", "shapes?size=32&train=32&val=16&test=16", "--device", "cpu")
LIBRARIES = ("these", "newest", "lowest")


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and source distribution, built from a copy so that the working tree stays as it is."""
    copy = folder / "source"
    shutil.copytree(ROOT, copy, ignore=LEFT, symlinks=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)])
    (wheel,), (source,) = (list((folder / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    return wheel, source


def lowest() -> list[str]:
    """The lower bounds of pyproject.toml, for the package and its trainings, as constraints of pip."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = map(Requirement, [*about["dependencies"], *about["optional-dependencies"]["training"]])
    bounds = [(one.name, bound) for one in asked for bound in one.specifier if bound.operator == ">="]
    return [f"{name}=={bound.version}" for name, bound in bounds]


def install(wheel: Path, folder: Path, libraries: str) -> Path:
    """A new environment with the package; gives the folder of its commands."""
    venv.create(folder, with_pip=libraries != "these")
    python = folder / "bin" / "python"
    if libraries == "these":
        (place,) = folder.glob("lib/*/site-packages")
        (place / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        alone = ["--quiet", "--no-deps", "--no-index", str(wheel)]
        run([sys.executable, "-m", "pip", "--python", str(python), "install", *alone])
        return python.parent
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lowest() if libraries == "lowest" else []))
    whole = ["--quiet", "--no-compile", "--constraint", str(constraints), f"{wheel}[training]"]
    run([str(python), "-m", "pip", "install", *whole])
    return python.parent


def reachable() -> bool:
    """Whether pip finds libraries: a small one."""
    asked = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "tomli-w"]
    return subprocess.run([sys.executable, "-m", "pip", *asked], capture_output=True).returncode == 0


def run(command: list[str], folder: Path | None = None) -> str:
    """What a command says; an error ends the trial with all of it."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trial(folder: Path, libraries: str = "these") -> dict[str, str]:
    """Build, install, run the demo, read its numbers, train for a moment; what came of it."""
    wheel, source = build(folder)
    commands = install(wheel, folder / "environment", libraries)
    where = run([str(commands / "python"), "-c", "import sightline; print(sightline.__file__)"], folder)
    sightline = str(commands / "sightline")
    version = run([sightline, "--version"], folder)
    said = run([sightline, *DEMO, "-o", str(folder / "demo")], folder)
    run([sightline, "export", str(folder / "demo")], folder)
    settings = [word for value in SMALL for word in ("--set", value)]
    run([sightline, *TRAINING, *settings, "-o", str(folder / "training")], folder)
    return {
        "wheel": wheel.name,
        "source": source.name,
        "module": where.strip(),
        "version": version.strip(),
        "demo": said,
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--libraries", choices=LIBRARIES, default="these", help="which libraries it is tried with")
    with tempfile.TemporaryDirectory(prefix="sightline-wheel-") as place:
        for name, value in trial(Path(place), arguments.parse_args().libraries).items():
            print(f"{name}: {value}")
