"""Running steps: order, failures, claims and what goes on, with commands that only write a file."""

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import sightline as sl
from sightline.core.files import locked, write_atomically
from sightline.core.folders import begin
from sightline.core.stopping import Stopped
from sightline.studies import commands, folders
from sightline.studies.commands import COMMANDS, Machine, Work
from sightline.studies.folders import StepFolder, place
from sightline.studies.running import Ended, Here, run_steps
from sightline.studies.steps import Step

pytestmark = pytest.mark.unit


@pytest.fixture
def done(monkeypatch):
    """Steps that were run, in order; those called bad fail, those called slow take a while."""
    found: list[str] = []

    def run(work: Work) -> None:
        found.append(work.step.name)
        if work.step.name.startswith("slow"):
            time.sleep(0.2)
        if work.step.name.startswith("bad"):
            raise sl.InputError("It cannot be")
        if work.step.name.startswith("worse"):
            raise ZeroDivisionError("by zero")
        if work.step.name.startswith("stopped"):
            raise Stopped(15, "Stopped")
        begin(work.out, "comparison")
        write_atomically(work.out / "run.json", b"{}")

    monkeypatch.setattr(commands, "COMMANDS", {**COMMANDS, "fake": replace(COMMANDS["compare"], run=run)})
    monkeypatch.setattr(folders, "members_of", lambda step, folders: {})
    return found


def placed(root: Path, *names: str) -> list[StepFolder]:
    """`b:a` needs a."""
    steps = []
    for name, _, needs in (text.partition(":") for text in names):
        steps.append(
            Step(name, "fake", {need: f"step:{need}" for need in needs.split(",") if need} or {"x": "zoo:mae"})
        )
    return [place(step, f"{step.name:0<64}", root) for step in steps]


def run(steps: list[StepFolder], told: list[tuple[str, str]] | None = None):
    def tell(event: str, step: StepFolder, ended: Ended | None) -> None:
        if told is not None:
            told.append((event, step.step.name))

    return run_steps(steps, Here(Machine(show_progress=False)), tell)


def test_steps_run_in_order_once_and_never_again(tmp_path, done):
    steps = placed(tmp_path, "c:b", "b:a", "a")
    outcome = run(steps)
    assert done == outcome.done == ["a", "b", "c"]
    about = json.loads((tmp_path / "b-b0000000" / "run.json").read_text())["step"]
    assert (about["name"], about["command"], about["key"]) == ("b", "fake", steps[1].key)
    assert run(steps).done == ["a", "b", "c"]
    assert done == ["a", "b", "c"]


def test_a_step_that_another_process_works_at_is_waited_for(tmp_path, done):
    (step,) = placed(tmp_path, "a")
    assert not step.running
    told = []
    with locked(step.beside("lock")):
        assert step.running
        waiting = threading.Thread(target=run, args=([step], told))
        waiting.start()
        while not told:
            time.sleep(0.01)
        assert not done
    waiting.join()
    assert told == [("waits", "a"), ("begins", "a"), ("ends", "a")]
    assert done == ["a"]
    assert not step.running


def test_a_failure_stops_only_what_needs_it(tmp_path, done, capsys):
    outcome = run(placed(tmp_path, "bad", "after:bad", "later:after", "worse", "good"))
    assert outcome.done == ["good"]
    assert outcome.failed == {"bad": "It cannot be", "worse": "ZeroDivisionError: by zero"}
    assert outcome.left == {"after": "bad", "later": "bad"}
    assert "by zero" in capsys.readouterr().err


def test_a_step_that_was_asked_to_stop_stops_the_study(tmp_path, done):
    with pytest.raises(Stopped, match=r"^Stopped"):
        run(placed(tmp_path, "stopped", "good:stopped"))


def test_several_runs_at_once_never_do_a_step_twice(tmp_path, done):
    steps = placed(tmp_path, "slow-1", "slow-2", "slow-3:slow-1", "slow-4:slow-2,slow-3")
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(run(steps))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(done) == Counter(step.step.name for step in steps)
    assert [sorted(outcome.done) for outcome in outcomes] == [sorted(done)] * 3


def test_a_step_is_found_by_its_key_under_another_name(tmp_path, done):
    (one,) = placed(tmp_path, "one")
    run([one])
    two = place(Step("two", "fake", {"x": "zoo:mae"}), one.key, tmp_path)
    assert two.done
    assert two.folder == one.folder


def test_what_was_begun_with_other_references_begins_anew(tmp_path, done, monkeypatch):
    (one,) = placed(tmp_path, "one")
    seen = []
    fake = commands.COMMANDS["fake"]
    monkeypatch.setitem(
        commands.COMMANDS, "fake", replace(fake, run=lambda work: seen.append(work.anew) or fake.run(work))
    )
    run([one])
    (one.folder / "run.json").write_text("{}")  # as if it had been killed
    run([one])
    (one.folder / "run.json").write_text("{}")
    run([replace(one, step=replace(one.step, encoders={"x": "zoo:moved"}))])
    assert seen == [False, False, True]


def test_a_run_json_of_another_key_is_not_done(tmp_path, done):
    (one,) = placed(tmp_path, "one")
    run([one])
    assert not replace(one, key="f" * 64).done
