"""bfloat16 where it works, where it kills the process, and where a variable cures that; stand-ins for the trial."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.references import SMALL

import sightline as sl
from sightline import cli
from sightline.analyses.diversity import token_cosine
from sightline.analyses.probes import ProbesConfig as Probes
from sightline.core import bfloat16
from sightline.core.bfloat16 import LIMIT, VARIABLE, Trial, ensure, tell_if_slower, usable
from sightline.measure.estimators.neighbours import knn_predict
from sightline.measure.estimators.probes import Probe, Schedule, train_probes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and forks")

KILL = "os.kill(os.getpid(), signal.SIGILL)"
DIES = KILL
CURED = f"if os.environ.get({VARIABLE!r}) != {LIMIT!r}: {KILL}\nprint(json.dumps({{'slowdown': 0.4}}))"
WORKS = "print('something else'); print(json.dumps({'slowdown': 3.04}))"

Stand = Callable[[str], None]


class OneDnn:
    """What matters of oneDNN: it reads the variable when it is first used, and never again."""

    limit: str | None = ""

    def convolution(self) -> None:
        if self.limit == "":
            self.limit = os.environ.get(VARIABLE)

    def product(self) -> None:
        self.convolution()
        if self.limit != LIMIT:
            os.kill(os.getpid(), signal.SIGILL)


def forget() -> None:
    """What another process would not know."""
    bfloat16._known.clear()
    for function in (bfloat16._problem, bfloat16._say):
        function.cache_clear()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """Puts a script in the place of the trial, on a machine that nothing is remembered of."""
    for name in bfloat16.CHOOSING:
        monkeypatch.setenv(name, "to be taken back at the end")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bfloat16, "TRIAL", tmp_path / "trial.py")

    def put(script: str) -> None:
        noting = f"open({str(tmp_path / 'trials')!r}, 'a').write('x')"
        (tmp_path / "trial.py").write_text(f"import json, os, signal\n{noting}\n{script}\n")

    forget()
    yield put
    forget()


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> OneDnn:
    found = OneDnn()
    monkeypatch.setattr(bfloat16, "product", found.product)
    return found


def trials(tmp_path: Path) -> int:
    return len((tmp_path / "trials").read_text()) if (tmp_path / "trials").exists() else 0


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*"))[1:]


# ---------------------------------------------------------------------------------------------------------------
# What becomes of it


def test_instructions_are_limited_where_that_cures_it(stand_in: Stand, tmp_path: Path, onednn: OneDnn) -> None:
    stand_in(CURED)
    ensure("cpu", "bf16")
    assert os.environ[VARIABLE] == LIMIT
    assert trials(tmp_path) == 2
    assert bfloat16._verdict(()) == Trial(works=False, cured=True)
    assert bfloat16._verdict(((VARIABLE, LIMIT),)) == Trial(works=True, slowdown=0.4)
    onednn.convolution()  # it has seen the limit, and so have processes that are started now
    forget()
    ensure("cpu", "bf16")
    del os.environ[VARIABLE]
    forget()
    ensure(torch.device("cpu"), "bf16")
    assert os.environ[VARIABLE] == LIMIT
    assert trials(tmp_path) == 2  # all of them remember


def test_too_late_is_a_sentence(stand_in: Stand, onednn: OneDnn) -> None:
    stand_in(CURED)
    onednn.convolution()
    with pytest.raises(sl.InputError) as raised:
        ensure("cpu", "bf16")
    assert str(raised.value) == (
        "Products in bfloat16 kill the process on this CPU unless its instructions are limited before PyTorch is used; "
        "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment before Python starts, or use precision float32"
    )
    assert VARIABLE not in os.environ
    os.environ[VARIABLE] = LIMIT  # what a user might try, in the same process
    with pytest.raises(sl.InputError, match="before Python starts"):
        ensure("cpu", "bf16")
    assert os.environ[VARIABLE] == LIMIT


def test_no_cure_is_a_sentence(stand_in: Stand, tmp_path: Path) -> None:
    stand_in(DIES)
    for _ in range(2):
        assert not usable()
        with pytest.raises(sl.InputError, match=r"also with ONEDNN_MAX_CPU_ISA=\S+; use a GPU, or use precision float"):
            ensure("cpu", "bf16")
        forget()
    assert VARIABLE not in os.environ
    assert trials(tmp_path) == 2


def test_where_it_works_nothing_is_set(stand_in: Stand, tmp_path: Path) -> None:
    stand_in(WORKS)
    for _ in range(2):
        ensure("cpu", "bf16")
        assert usable()
        forget()
    assert VARIABLE not in os.environ
    assert trials(tmp_path) == 1


@pytest.mark.parametrize("name", [VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_a_choice_of_the_user_stays(stand_in: Stand, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stand_in(CURED)
    monkeypatch.setenv(name, "ALL")
    with pytest.raises(sl.InputError, match=f"with {name}=ALL; set {VARIABLE}={LIMIT}, or use precision float32"):
        ensure("cpu", "bf16")
    assert {key: os.environ.get(key) for key in bfloat16.CHOOSING if key in os.environ} == {name: "ALL"}


def test_the_right_choice_of_the_user_needs_one_trial(
    stand_in: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, onednn: OneDnn
) -> None:
    stand_in(CURED)
    monkeypatch.setenv(VARIABLE, LIMIT)
    onednn.convolution()
    ensure("cpu", "bf16")
    assert trials(tmp_path) == 1


def test_only_who_asks_on_a_cpu_waits(stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(DIES)
    for device, precision in (("cuda", "bf16"), (torch.device("cuda", 1), "bf16"), ("cpu", "float32")):
        ensure(device, precision)
        tell_if_slower(device, precision)
    assert trials(tmp_path) == 0


@pytest.mark.parametrize("set_by", ["medium", "matmul", "conv"])
def test_rounded_float32_asks_as_well(stand_in: Stand, monkeypatch: pytest.MonkeyPatch, set_by: str) -> None:
    stand_in(DIES)
    with coarse(set_by), pytest.raises(sl.InputError, match='at "highest"'):
        ensure("cpu")
    ensure("cpu")


@contextmanager
def coarse(set_by: str = "medium") -> Iterator[None]:
    """Float32 products rounded to bfloat16, by the setting of all devices or by those of the CPU."""
    if set_by == "medium":
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")
        return
    if not hasattr(torch.backends.mkldnn, set_by):
        pytest.skip("this version of PyTorch has no such setting")
    part = getattr(torch.backends.mkldnn, set_by)
    before, part.fp32_precision = part.fp32_precision, "bf16"
    try:
        yield
    finally:
        part.fp32_precision = before


# ---------------------------------------------------------------------------------------------------------------
# What is remembered, and what is said


def test_the_record_says_of_what_it_is(stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(WORKS)
    ensure("cpu", "bf16")
    (record,) = records(tmp_path)
    content = json.loads(record.read_text())
    assert content["verdict"] == {"works": True, "cured": False, "slowdown": 3.04}
    assert content["of"]["torch"] == torch.__version__
    for change in (
        ("torch.__version__", "9.9"),
        ("platform.node", lambda: "another"),
        ("sightline.core.bfloat16._cpu", str),
    ):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            ensure("cpu", "bf16")
    assert trials(tmp_path) == len(records(tmp_path)) == 4


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"verdict": {"worked": true}}', '{"verdict": null}'])
def test_a_damaged_record_is_made_anew(stand_in: Stand, tmp_path: Path, content: str) -> None:
    stand_in(WORKS)
    ensure("cpu", "bf16")
    (record,) = records(tmp_path)
    whole = record.read_text()
    record.write_text(content)
    forget()
    ensure("cpu", "bf16")
    assert trials(tmp_path) == 2
    assert record.read_text() == whole


def test_a_cache_that_cannot_be_written_costs_time_only(
    stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onednn: OneDnn
) -> None:
    stand_in(CURED)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        ensure("cpu", "bf16")
    assert os.environ[VARIABLE] == LIMIT
    assert trials(tmp_path) == 2  # the process remembers


def test_without_a_home_nothing_is_remembered(stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    stand_in(WORKS)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    ensure("cpu", "bf16")


@pytest.mark.parametrize("script", ["raise ImportError", "os.kill(os.getpid(), signal.SIGKILL)", "print('hello')"])
def test_a_trial_that_ends_otherwise_proves_nothing(stand_in: Stand, tmp_path: Path, script: str) -> None:
    stand_in(script)
    ensure("cpu", "bf16")
    tell_if_slower("cpu", "bf16")
    assert trials(tmp_path) == 1
    assert records(tmp_path) == []


def test_slower_is_said_once(stand_in: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(WORKS)
    for _ in range(2):
        tell_if_slower("cpu", "float32")
        tell_if_slower("cpu", "bf16")
    said = " ".join(capsys.readouterr().err.split())
    assert said == "bf16 takes 3.0 times as long as float32 on this CPU; float32 is faster and more exact"


def test_faster_is_not_said(stand_in: Stand, capsys: pytest.CaptureFixture[str], onednn: OneDnn) -> None:
    stand_in(CURED)
    ensure("cpu", "bf16")
    tell_if_slower("cpu", "bf16")
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------------------
# Whoever asks


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)


LABELS = np.arange(60) % 3
QUIET = {"show_progress": False, "workers": 0}

ASKING: dict[str, Callable[[Path], object]] = {
    "analyze": lambda _: sl.analyze(SMALL, "shapes?size=32", ["cka"], precision="bf16", device="cpu", **QUIET),
    "probes": lambda _: sl.analyze(
        SMALL, "shapes?size=32", {"probes": Probes(precision="bf16")}, device="cpu", **QUIET
    ),
    "pretrain": lambda out: sl.pretrain("mae", out=out, settings={"precision": "bf16"}, device="cpu", **QUIET),
    "recipe": lambda out: sl.pretrain(recipe="mae_vit_b16", images="shapes", out=out, device="cpu", **QUIET),
    "finetune": lambda out: sl.finetune(SMALL, out=out, settings={"precision": "bf16"}, device="cpu", **QUIET),
    "reinit": lambda out: sl.reinit(SMALL, out=out, settings={"precision": "bf16"}, device="cpu", **QUIET),
    "train_probes": lambda _: train_probes(
        [Probe(("x",))], Schedule(2, 20, 0, precision="bf16"), {"x": features()}, LABELS, 3
    ),
    "images": lambda _: sl.load_encoder(SMALL)(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("who", ASKING)
def test_whoever_asks_for_bf16_gets_the_sentence(stand_in: Stand, tmp_path: Path, who: str) -> None:
    stand_in(DIES)
    with pytest.raises(sl.InputError, match="kill the process on this CPU"):
        ASKING[who](tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_autocast_gets_the_sentence(stand_in: Stand) -> None:
    stand_in(DIES)
    encoder = sl.load_encoder(SMALL)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(sl.InputError, match="kill the process"):
        encoder(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(
    "compute",
    [
        lambda: sl.analyze(SMALL, "shapes?size=32", ["cka"], device="cpu", **QUIET),
        lambda: sl.load_encoder(SMALL)(torch.zeros(1, 3, 32, 32)),
        lambda: knn_predict(features(), LABELS, features()),
        lambda: train_probes([Probe(("x",))], Schedule(2, 20, 0), {"x": features()}, LABELS, 3),
        lambda: token_cosine(features()[None]),
    ],
)
def test_medium_gets_the_sentence(stand_in: Stand, compute: Callable[[], object]) -> None:
    stand_in(DIES)
    with coarse(), pytest.raises(sl.InputError, match="kill the process"):
        compute()


def test_the_command_line_ends_with_a_sentence(
    stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(DIES)
    words = ["compare", SMALL, "--only", "cka", "--precision", "bf16", "--device", "cpu", "-o", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["sightline", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: Products in bfloat16 kill the process on this CPU, also with")


@pytest.mark.bf16
def test_the_run_says_that_it_is_slower(stand_in: Stand, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(WORKS)
    options = {"limit": 32, "epochs": 0.5, "batch": 16, "depth": 1, "precision": "bf16"}
    sl.pretrain("mae", "shapes?size=32", tmp_path / "out", settings=options, device="cpu", workers=0)
    assert capsys.readouterr().err.count("times as long as float32") == 1


# ---------------------------------------------------------------------------------------------------------------
# The trial itself


def test_the_trial_comes_to_a_verdict() -> None:
    found = bfloat16._try(bfloat16._environment())
    assert found is not None
    assert found.works == (found.slowdown is not None)


@pytest.mark.bf16
def test_a_fork_of_this_process_computes_the_product() -> None:
    generator = torch.get_rng_state()
    assert bfloat16._works_here()
    assert torch.equal(torch.get_rng_state(), generator)
