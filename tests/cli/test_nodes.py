"""Two machines, as two agents of torchrun on the loopback address: the results of one, a sentence if one is lost."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.processes import ended, on_two_nodes
from support.references import SMALL
from support.words import options

import sightline as sl
from sightline.cli import main
from sightline.core.folders import latest

IMAGES = "shapes?size=32&train=16&val=0&test=16"
COMPARE = ["compare", f"a={SMALL}", "--images", IMAGES, "--only", "cka,knn", "--batch", "4", "--workers", "0"]
TINY = {"epochs": 2, "batch": 8, "depth": 1, "width": 24, "heads": 2, "patch": 8, "size": 32, "watch": []}
TINY |= {"optimizer": "sgd", "lr": 0.05}  # AdamW would make steps of full size out of the rounding of gradients near 0


def test_a_comparison_on_two_nodes_is_that_of_one_process(tmp_path: Path) -> None:
    agents = on_two_nodes(*COMPARE, "-o", str(tmp_path / "two"))
    one = sl.analyze({"a": SMALL}, IMAGES, ["cka", "knn"], batch=4, workers=0, show_progress=False)
    said = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    two = sl.open_run(tmp_path / "two")
    for name in ("cka", "knn"):
        for variable, values in one[name].data_vars.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(two[name][variable], values, rtol=1e-9, atol=1e-12, err_msg=str(variable))


def test_a_training_on_two_nodes_is_that_of_one_process(tmp_path: Path) -> None:
    words = options(TINY)
    two = ["pretrain", "mae", "--images", IMAGES, *words, "--workers", "0", "-o", str(tmp_path / "two")]
    agents = on_two_nodes(*two)
    sl.pretrain("mae", IMAGES, tmp_path / "one", settings=TINY, workers=0, show_progress=False)
    said = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    folders = [latest(tmp_path / name) for name in ("one", "two")]
    weights = [load_file(folder / "encoder.safetensors") for folder in folders if folder is not None]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)


def test_a_lost_process_ends_the_others_with_a_sentence_and_the_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*COMPARE, "--images", IMAGES.replace("16", "400"), "-o", str(tmp_path / "run")]
    agents = on_two_nodes(*words)
    until = time.monotonic() + 240
    while not (tmp_path / "run" / "run.json").exists() and time.monotonic() < until:  # the pass has begun
        time.sleep(0.01)
    os.kill(_worker_of(agents[1].pid), signal.SIGKILL)
    said = ended(agents)
    assert all(agent.returncode for agent in agents), "\n".join(said)
    assert "Another process of this run has ended" in said[0]
    assert "pair.cc" not in said[0]  # nothing of what gloo says; the agent has words of its own
    monkeypatch.setattr(sys, "argv", ["sightline", *words])
    main()
    assert list(sl.open_run(tmp_path / "run")) == ["cka", "knn"]


def _worker_of(agent: int) -> int:
    """The process that an agent has started."""
    children = [path.read_text().split() for path in Path(f"/proc/{agent}/task").glob("*/children")]
    return int(next(child for of_thread in children for child in of_thread))


@pytest.mark.unit
@pytest.mark.parametrize(
    "text", ["[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9", "other"]
)
def test_what_is_said_of_a_lost_process(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("sightline.cli.application.run", lost)
    if text == "other":
        with pytest.raises(RuntimeError, match="other"):
            main()
        return
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert "run the same command again" in capsys.readouterr().err
