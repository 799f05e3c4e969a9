"""Plugins of other packages: installed ones are found and used, broken ones stand in nobody's way."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sightline as sl
from sightline.cli.listing import listed, matching_encoders
from sightline.core import plugins
from sightline.core.plugins import PluginWarning
from sightline.measure.contract import analysis
from sightline.measure.request import default_analyses
from sightline.training.objective import objective_named
from sightline.training.objectives.hybrid import HybridConfig, possible_parts

VIT = "timm:vit_tiny_patch16_224@random?size=16&patch_size=8&depth=1&embed_dim=8&num_heads=2"

ANALYSIS = '''
"""Brightness: the mean of the pixels that an encoder sees."""
from dataclasses import dataclass
import torch, xarray as xr
from sightline.measure.contract import Analysis as Base, FurtherImages
from sightline.measure.plan import Cost

TITLE, QUESTION, FORMULA, HOW_TO_READ, SOURCE = "Brightness", "How bright?", "mean", "Higher is brighter.", "None"
SITES, ANY_SITE, BY_DEFAULT, INVARIANT_TO = ("norm",), True, False, frozenset()
SPLITS = ("test", "dark")
IMAGES = {"dark": FurtherImages("Dark images", "dark images, taken at night")}

@dataclass(frozen=True)
class BrightnessConfig:
    factor: float = 1.0

class BrightnessAnalysis(Base):
    def __init__(self, config, plan):
        super().__init__()
        self.config, self.encoders = config, list(plan.encoders)
        for split in SPLITS:
            self.add_state(split, torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def reduce(self, key, activation):
        return None

    def update(self, batch, reductions):
        pixels = next(iter(batch.pixels.values()))
        if batch.split in SPLITS:
            getattr(self, batch.split).add_(torch.tensor([pixels.double().mean((1, 2, 3)).sum(), len(pixels)]))

    def compute(self):
        means = [float(self.config.factor * s[0] / s[1]) for s in (self.test, self.dark)]
        return xr.Dataset({"brightness": ("split", means)}, coords={"split": list(SPLITS)})

def cost(config, plan):
    return Cost(8, 0)

def figures(result):
    return []

def headlines(result):
    return [("all", f"{float(result.brightness[0]):.1f}", "mean of the pixels")]
'''

SOURCE = '''
"""Encoders of a company."""
from sightline.encoders.encoder import build_encoder
EXAMPLE = "company:tiny"

def names():
    return ["tiny"]

def load(reference):
    from torch import nn
    return build_encoder(nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 2)), reference=str(reference))
'''

IMAGES = '''
"""Images of one grey."""
import numpy as np
from dataclasses import replace
from sightline.images.sources.arrays import from_arrays

def load(where, options):
    pixels = np.full((8, 16, 16, 3), int(where), np.uint8)
    return from_arrays(pixels, list("abababab"))
'''

OBJECTIVE = '''
"""Nothing: a loss that is always the same."""
from sightline.training.objectives.simclr import SimclrConfig as Config, SimclrObjective as Objective, views
TITLE, KIND = "Nothing", "joint-embedding"
'''

ENTRY_POINTS = """\
[sightline.analyses]
brightness = acme.brightness
cka = acme.brightness
broken = acme.broken
empty = acme
not-a-name = acme.brightness

[sightline.sources]
company = acme.company

[sightline.images]
grey = acme.grey

[sightline.objectives]
nothing = acme.nothing
"""
LEFT_OUT = [
    "The analysis 'cka' of package 'acme-sightline' is left out: Sightline has one of that name, which is used",
    "The analysis 'not-a-name' of package 'acme-sightline' is left out: a name is made of letters, digits and _",
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package as an installer leaves it."""
    folder = tmp_path_factory.mktemp("site-packages")
    files = {
        "__init__.py": '"""Of Acme."""',
        "brightness.py": ANALYSIS,
        "broken.py": "import no_such_module_at_all",
        "company.py": SOURCE,
        "grey.py": IMAGES,
        "nothing.py": OBJECTIVE,
    }
    (folder / "acme").mkdir()
    for name, text in files.items():
        (folder / "acme" / name).write_text(text.lstrip())
    about = folder / "acme_sightline-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sightline\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(package)
    plugins._places.cache_clear()
    with pytest.warns(PluginWarning):  # of names that clash or are none
        plugins.names("analyses")
    yield
    plugins._places.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_an_analysis_is_measured_on_the_images_that_it_asks_for() -> None:
    settings = {"brightness": analysis("brightness").Config(factor=2.0)}
    run = sl.analyze(VIT, "grey:100", settings, further={"dark": "grey:20"}, workers=0, show_progress=False)
    np.testing.assert_allclose(run["brightness"].brightness, [200.0, 40.0])
    assert run.request["analyses"]["brightness"]["dark"] == {"images": "grey:20", "count": 4}
    with pytest.raises(sl.InputError, match="brightness needs dark images, taken at night; give them with --further"):
        sl.analyze(VIT, "grey:100", ["brightness"], workers=0, show_progress=False)
    # To say whom they are for, it looks at all of them, also at those that are broken.
    with pytest.warns(PluginWarning), pytest.raises(sl.InputError, match="Dark images are used only by brightness"):
        sl.analyze(VIT, "grey:100", ["cka"], further={"dark": "grey:20"}, workers=0, show_progress=False)


@pytest.mark.usefixtures("installed")
def test_sources_and_objectives_are_found() -> None:
    assert sl.load_encoder("company:tiny").reference == "company:tiny"
    assert "company:tiny" in matching_encoders("tiny").splitlines()
    assert objective_named("nothing").TITLE == "Nothing"
    assert "nothing" in possible_parts("joint-embedding")
    assert HybridConfig(cl="nothing").shares() == {"simmim": 0.8, "nothing": 0.2}
    assert "grey" in plugins.names("datasets")


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_used_is_said_and_breaks_nothing() -> None:
    with pytest.raises(sl.InputError) as caught:
        analysis("broken")
    assert str(caught.value) == (
        "The analysis 'broken' of package 'acme-sightline' cannot be imported (ModuleNotFoundError: No module named "
        "'no_such_module_at_all'); repair or remove it"
    )
    with pytest.raises(sl.InputError, match="'empty' of package 'acme-sightline' lacks TITLE, QUESTION, FORMULA"):
        analysis("empty")
    rows = dict(line.split(maxsplit=1) for line in listed("analyses").splitlines()[1:])
    assert rows["brightness"] == "Brightness: the mean of the pixels that an encoder sees."
    assert "cannot be imported" in rows["broken"]
    with pytest.warns(PluginWarning) as warned:
        chosen = default_analyses()
    assert [str(one.message).split("(")[0][:55] for one in warned] == [
        "The analysis 'broken' of package 'acme-sightline' canno",
        "The analysis 'empty' of package 'acme-sightline' lacks ",
    ]
    assert {"cka", "knn"} <= set(chosen) <= set(plugins.built_in("analyses"))


def test_names_that_are_taken_stay_with_their_owners(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package)
    plugins._places.cache_clear()
    try:
        with pytest.warns(PluginWarning) as warned:
            found = plugins.names("analyses")
        assert {"brightness", "broken", "empty"} == set(found) - set(plugins.built_in("analyses"))
        assert plugins.find("analyses", "cka").__name__ == "sightline.analyses.cka"
        assert [str(one.message) for one in warned] == LEFT_OUT
    finally:
        plugins._places.cache_clear()


def test_the_command_line_says_it_in_a_sentence(package: Path) -> None:
    """In a process of its own, as users meet it."""
    code = f"import sys; sys.path.insert(0, {str(package)!r}); sys.argv = ['sightline', 'list', 'analyses']\n"
    code += "from sightline.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"brightness +Brightness: the mean", done.stdout)
    assert done.stderr.splitlines() == LEFT_OUT
