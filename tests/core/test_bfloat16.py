"""bfloat16 where it works, where it kills the process, and where a variable cures that; stand-ins for the products."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.references import SMALL

import sightline as sl
from sightline import cli
from sightline.analyses.probes import ProbesConfig
from sightline.core import bfloat16
from sightline.core.bfloat16 import LIMIT, VARIABLE, ensure, tell_if_slower, usable
from sightline.measure.estimators.probes import Probe, Schedule, train_probes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is tried on Linux")


class OneDnn:
    """What matters of oneDNN: it reads the variable when it is first used, and never again."""

    def __init__(self, works_with: tuple[str | None, ...]) -> None:
        self.works_with, self.limit, self.forks = works_with, "unread", 0

    def read(self) -> None:
        if self.limit == "unread":
            self.limit = os.environ.get(VARIABLE)

    def products(self, dtype: torch.dtype) -> float:
        self.read()
        if dtype == torch.bfloat16 and self.limit not in self.works_with:
            os.kill(os.getpid(), signal.SIGILL)
        return 3.04 if dtype == torch.bfloat16 else 1.0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OneDnn]]:
    """Puts another oneDNN in the place of ours, which works with these values of the variable."""
    monkeypatch.setenv(VARIABLE, "to be taken back at the end")
    monkeypatch.delenv(VARIABLE)

    def put(*works_with: str | None) -> OneDnn:
        found, fork = OneDnn(works_with), os.fork

        def counted() -> int:
            found.forks += 1
            return fork()

        monkeypatch.setattr(bfloat16, "products", found.products)
        monkeypatch.setattr(os, "fork", counted)
        return found

    for function in (usable, tell_if_slower):
        function.cache_clear()
    yield put
    for function in (usable, tell_if_slower):
        function.cache_clear()


def test_where_it_works_nothing_is_set_and_one_trial_is_enough(stand_in: Callable[..., OneDnn]) -> None:
    onednn = stand_in(None, LIMIT)
    for _ in range(3):
        ensure()
    assert VARIABLE not in os.environ
    assert (onednn.forks, onednn.limit) == (1, "unread")  # the trial was somebody else's


def test_instructions_are_limited_where_that_cures_it(stand_in: Callable[..., OneDnn]) -> None:
    onednn = stand_in(LIMIT)
    for _ in range(3):
        ensure()
    assert os.environ[VARIABLE] == LIMIT
    assert onednn.forks == 2


@pytest.mark.parametrize("read", [True, False], ids=["too late", "no cure"])
def test_what_cannot_be_cured_is_a_sentence(stand_in: Callable[..., OneDnn], read: bool) -> None:
    onednn = stand_in(*[LIMIT] * read)
    if read:
        onednn.read()
    for _ in range(2):
        with pytest.raises(sl.InputError) as raised:
            ensure()
        assert str(raised.value) == (
            "Products in bfloat16 kill the process on this CPU; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python "
            "starts, or use precision float32"
        )
        assert VARIABLE not in os.environ
    assert onednn.forks == 2


@pytest.mark.parametrize(("given", "advice"), [("ALL", f"; set {VARIABLE}={LIMIT} before"), (LIMIT, "; use precision")])
def test_a_choice_of_the_user_stays(
    stand_in: Callable[..., OneDnn], monkeypatch: pytest.MonkeyPatch, given: str, advice: str
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    onednn = stand_in()
    with pytest.raises(sl.InputError, match=f"on this CPU with {VARIABLE}={given}{advice}"):
        ensure()
    assert os.environ[VARIABLE] == given
    assert onednn.forks == 1


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGALRM, ZeroDivisionError])
def test_a_trial_that_ends_otherwise_proves_nothing(
    stand_in: Callable[..., OneDnn], monkeypatch: pytest.MonkeyPatch, ending: signal.Signals | type[Exception]
) -> None:
    stand_in()

    def end(dtype: torch.dtype) -> float:
        if isinstance(ending, signal.Signals):
            os.kill(os.getpid(), ending)
        raise ZeroDivisionError

    monkeypatch.setattr(bfloat16, "products", end)
    assert usable()
    assert VARIABLE not in os.environ


def test_slower_is_said_once(stand_in: Callable[..., OneDnn], capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(None)
    for _ in range(2):
        tell_if_slower()
    said = " ".join(capsys.readouterr().err.split())
    assert said == "bf16 takes 3.0 times as long on this CPU as float32, which is more exact"


def test_faster_is_not_said(
    stand_in: Callable[..., OneDnn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(None)
    monkeypatch.setattr(bfloat16, "products", lambda dtype: 1.1 if dtype == torch.bfloat16 else 1.0)
    tell_if_slower()
    assert capsys.readouterr().err == ""


# Whoever asks

FEATURES = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
LABELS = np.arange(60) % 3
QUIET = {"show_progress": False, "workers": 0, "device": "cpu"}


def under_autocast() -> None:
    encoder = sl.load_encoder(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        encoder(torch.zeros(1, 3, 32, 32))


ASKING: dict[str, Callable[[Path], object]] = {
    "analyze": lambda _: sl.analyze(SMALL, "shapes?size=32", ["cka"], precision="bf16", **QUIET),
    "probes": lambda _: sl.analyze(SMALL, "shapes?size=32", {"probes": ProbesConfig(precision="bf16")}, **QUIET),
    "pretrain": lambda out: sl.pretrain("mae", out=out, settings={"precision": "bf16"}, **QUIET),
    "recipe": lambda out: sl.pretrain(recipe="mae_vit_b16", images="shapes", out=out, **QUIET),
    "finetune": lambda out: sl.finetune(SMALL, out=out, settings={"precision": "bf16"}, **QUIET),
    "reinit": lambda out: sl.reinit(SMALL, out=out, settings={"precision": "bf16"}, **QUIET),
    "train_probes": lambda _: train_probes(
        [Probe(("x",))], Schedule(2, 20, 0, precision="bf16"), {"x": FEATURES}, LABELS, 3
    ),
    "images": lambda _: sl.load_encoder(SMALL)(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)),
    "autocast": lambda _: under_autocast(),
}


@pytest.mark.parametrize("who", ASKING)
def test_whoever_asks_for_bf16_gets_the_sentence(stand_in: Callable[..., OneDnn], tmp_path: Path, who: str) -> None:
    stand_in()
    with pytest.raises(sl.InputError, match="kill the process on this CPU"):
        ASKING[who](tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_ends_with_a_sentence(
    stand_in: Callable[..., OneDnn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in()
    words = ["compare", SMALL, "--only", "cka", "--precision", "bf16", "--device", "cpu", "-o", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["sightline", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: Products in bfloat16 kill the process on this CPU; set ONEDNN")


@pytest.mark.bf16
def test_the_run_says_that_it_is_slower(
    stand_in: Callable[..., OneDnn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(None)
    options = {"limit": 32, "epochs": 0.5, "batch": 16, "depth": 1, "precision": "bf16"}
    sl.pretrain("mae", "shapes?size=32", tmp_path / "out", settings=options, device="cpu", workers=0)
    assert capsys.readouterr().err.count("times as long on this CPU as float32") == 1


NOBODY_ASKS = f"""
import sys, torch, sightline as sl
encoder = sl.load_encoder({SMALL!r})
encoder(torch.zeros(1, 3, 32, 32))
sl.analyze(encoder, sl.load_images("shapes?size=32", limit=8), ["cka", "knn"], workers=0, show_progress=False)
import sightline.training.pretrain
assert "sightline.core.bfloat16" not in sys.modules
"""


@pytest.mark.processes
def test_it_is_imported_only_when_asked_for() -> None:
    subprocess.run([sys.executable, "-c", NOBODY_ASKS], check=True)


# The products themselves


@pytest.mark.bf16
def test_a_fork_of_this_process_computes_them_and_changes_nothing_here() -> None:
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.inference_mode():
        assert bfloat16._survives()
        assert bfloat16.products(torch.bfloat16) > 0
        assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_num_threads() == threads
