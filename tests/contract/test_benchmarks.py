"""Every benchmark still runs: one tiny round of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "benchmarks" / "smoke.py"
NAMES = [
    file.stem
    for file in sorted(SMOKE.parent.glob("*.py"))
    if file != SMOKE and '__name__ == "__main__"' in file.read_text()
]


@pytest.fixture(scope="module")
def rounds() -> dict[str, dict[str, object]]:
    """All of them in forks of one process, which imports everything once."""
    ended = subprocess.run([sys.executable, SMOKE], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    return {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs(name, rounds):
    assert rounds[name]["status"] == 0, rounds[name]["said"]
