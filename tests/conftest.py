"""What many tests share: small encoders, small images."""

import os
import re
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from support.references import SMALL

from sightline.core import bfloat16

# One test process per core: threads of their own would only get in each other's way.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TMPDIR"] = tempfile.gettempdir()  # of the browser, which does not look further where nothing can be written

TESTS = Path(__file__).parent

if not os.access(TESTS.parent, os.W_OK):  # a tree of another user: Hypothesis would warn that it cannot remember
    hypothesis.settings.register_profile("read-only", database=None)
    hypothesis.settings.load_profile("read-only")

# Before anything is computed, so that instructions can still be limited where they kill; test processes inherit that.
BF16 = bfloat16.usable()
if BF16:
    bfloat16.products(torch.bfloat16)  # oneDNN has read the limit now, whatever a test does to the environment


# The tier of a test by where it lies, the longest path first; a marker of its own goes before. Everything else, such
# as the examples in docstrings, is a unit.
TIERS = {
    "analyses": "pass",
    "cli": "pass",
    "cli/test_nodes.py": "machines",
    "contract": "pass",
    "contract/test_benchmarks.py": "processes",
    "contract/test_docs.py": "unit",
    "contract/test_objectives.py": "train",
    "contract/test_plugins.py": "unit",
    "contract/test_public_api.py": "unit",
    "contract/test_rooms.py": "unit",
    "contract/test_words.py": "unit",
    "core/test_bfloat16.py": "pass",
    "core/test_files.py": "processes",
    "core/test_folders.py": "pass",
    "encoders": "pass",
    "encoders/files": "unit",
    "encoders/files/test_convert.py": "pass",
    "encoders/layouts": "unit",
    "generation": "train",
    "generation/test_noise.py": "unit",
    "measure": "pass",
    "measure/estimators": "unit",
    "measure/estimators/test_probes.py": "train",
    "measure/estimators/test_sweep.py": "train",
    "report": "pass",
    "report/test_browser.py": "browser",
    "studies": "train",
    "studies/figures": "pass",
    "studies/findings": "unit",
    "studies/test_evidence.py": "unit",
    "studies/test_roles.py": "unit",
    "training": "train",
    "training/test_collectives.py": "processes",
    "training/test_pretrain_processes.py": "processes",
    "transfer": "train",
    "transfer/detection/test_detect_processes.py": "processes",
    "transfer/test_finetune_processes.py": "processes",
}
NAMES = ("machines", "processes", "browser", "train", "pass", "chance", "unit")  # in the order in which they run


@pytest.fixture
def small() -> str:
    """A reference to a ViT of two blocks on 32 pixels."""
    return SMALL


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where one tier is asked for, as in `-m unit`, files of others that do not mark a test so need not be imported.

    Nor need those of the package that have no example in a docstring.
    """
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    tier, text = config.option.markexpr, collection_path.read_text("utf-8")
    if not collection_path.is_relative_to(TESTS) and ">>>" not in text:
        return True
    if tier in NAMES and tier != _tier(collection_path) and not re.search(rf'(mark\.|mark, "|support\.){tier}\b', text):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test exactly one tier, and begin with the files whose tests take long: short ones fill the cores."""
    first: dict[Path, int] = {}
    for item in items:
        own = next((marker.name for marker in item.iter_markers() if marker.name in NAMES), None)
        if own is None:
            item.add_marker(own := _tier(item.path))
        first[item.path] = min(first.get(item.path, len(NAMES)), NAMES.index(own))
    items.sort(key=lambda item: first[item.path])


def _tier(path: Path) -> str:
    if not path.is_relative_to(TESTS):
        return "unit"
    place = path.relative_to(TESTS)
    known = [str(part) for part in (place, *place.parents) if str(part) in TIERS]
    return TIERS[known[0]] if known else "unit"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where products in bfloat16 kill the process whatever is set, only the tests that compute some are left out."""
    if item.get_closest_marker("bf16") and not BF16:
        pytest.skip("products in bfloat16 kill the process on this machine")
