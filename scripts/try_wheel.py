#!/usr/bin/env python3
"""Build the package, install it into a new environment, and try it there: `sightline demo` at a small setting.

scripts/try_wheel.py              uses the libraries of the environment that runs it: no network, seconds to install
scripts/try_wheel.py --whole      installs all that the package asks for, from wherever pip finds it
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT = shutil.ignore_patterns(
    ".git", ".venv", "weights", "runs", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache"
)
DEMO = ("demo", "--only", "knn", "--limit", "16", "--device", "cpu")


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and source distribution, built from a copy so that the working tree stays as it is."""
    copy = folder / "source"
    shutil.copytree(ROOT, copy, ignore=LEFT, symlinks=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)])
    (wheel,), (source,) = (list((folder / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    return wheel, source


def install(wheel: Path, folder: Path, whole: bool) -> Path:
    """A new environment with the package; gives the folder of its commands."""
    venv.create(folder, with_pip=whole)
    python = folder / "bin" / "python"
    if whole:
        run([str(python), "-m", "pip", "install", "--quiet", str(wheel)])
    else:
        (place,) = folder.glob("lib/*/site-packages")
        (place / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                "install",
                "--quiet",
                "--no-deps",
                "--no-index",
                str(wheel),
            ]
        )
    return python.parent


def run(command: list[str], folder: Path | None = None) -> str:
    """What a command says; an error ends the trial with all of it."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trial(folder: Path, whole: bool = False) -> dict[str, str]:
    """Build, install, run the demo; what came of it."""
    wheel, source = build(folder)
    commands = install(wheel, folder / "environment", whole)
    where = run([str(commands / "python"), "-c", "import sightline; print(sightline.__file__)"], folder)
    version = run([str(commands / "sightline"), "--version"], folder)
    said = run([str(commands / "sightline"), *DEMO, "-o", str(folder / "demo")], folder)
    return {
        "wheel": wheel.name,
        "source": source.name,
        "module": where.strip(),
        "version": version.strip(),
        "demo": said,
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--whole", action="store_true", help="install the libraries as well")
    with tempfile.TemporaryDirectory(prefix="sightline-wheel-") as place:
        for name, value in trial(Path(place), arguments.parse_args().whole).items():
            print(f"{name}: {value}")
