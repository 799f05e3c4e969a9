"""Steps in other processes, by submitit and by Ray: the same results, and one whose process is killed is done again."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import sightline as sl
from sightline.core.stopping import Stopped
from sightline.studies.commands import Machine
from sightline.studies.running import Processes, run_steps
from sightline.studies.study import make_study, run_study

pytestmark = pytest.mark.machines

STUDY = """
images = "shapes?size=32&train=64&val=0&test=16"
findings = []
[matrix]
seed = [0, 1]
[step.net]
command = "pretrain supervised"
[step.net.set]
size = 32
depth = 1
width = 24
heads = 2
batch = 16
epochs = 12
evaluate_every = 0
save_minutes = 0.0
seed = "{seed}"
watch = []
"""
MACHINE = Machine("cpu", 0, show_progress=False)


def study(tmp_path: Path, name: str) -> sl.Study:
    file = tmp_path / "tiny.toml"
    file.write_text(STUDY)
    return make_study(file, out=tmp_path / name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> sl.Study:
    """The same in one process."""
    made = study(tmp_path_factory.mktemp("alone"), "alone")
    assert not run_study(made, machine=MACHINE).failed
    return made


def weights(study: sl.Study) -> list[str]:
    return [sl.load_encoder(f"run:{placed.folder}").weights for placed in study.steps if placed.step.group == "net"]


def holder_of(lock: Path) -> int:
    """The process that holds a lock, as the kernel tells: `1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF`."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return next(int(pid) for _, _, _, _, pid, place, *_ in locks if place.endswith(f":{lock.stat().st_ino}"))


def kill_once(study: sl.Study) -> threading.Thread:
    """Kill the process that trains the first step, as soon as it has begun to save."""
    first = study.steps[0]

    def kill() -> None:
        while not (first.folder / "latest.json").exists():
            time.sleep(0.02)
        os.kill(holder_of(first.beside("lock")), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("where", ["processes", "slurm", "ray"])
def test_results_are_those_of_one_process_whatever_is_killed(tmp_path, alone, where, monkeypatch):
    # Their workers import the package from here, too.
    monkeypatch.setenv("PYTHONPATH", str(Path(sl.__file__).parent.parent))
    cluster = {}
    if where != "processes":
        pytest.importorskip("submitit" if where == "slurm" else "ray")
        cluster = {"cluster": "local", "timeout_min": 5} if where == "slurm" else {"num_cpus": 1}
    if where == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    made = study(tmp_path, where)
    told: list[str] = []
    killer = kill_once(made)
    outcome = run_study(
        made,
        jobs=2,
        on=None if where == "processes" else where,
        cluster=cluster,
        machine=MACHINE,
        tell=lambda event, placed, ended: told.append(ended.state if ended else event),
    )
    killer.join()
    if where == "ray":
        ray.shutdown()
    assert sorted(outcome.done) == ["net-0", "net-1"], outcome
    assert told.count("lost") == 1
    assert told.count("begins") == 3
    assert weights(made) == weights(alone)


def test_a_step_that_fails_elsewhere_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(sl.__file__).parent.parent))
    made = study(tmp_path, "failing")
    first = made.steps[0]
    first.folder.mkdir(parents=True)
    (first.folder / "notes.txt").write_text("mine")
    outcome = run_steps(made.steps[:1], Processes(MACHINE, 2), lambda *told: None)
    assert "Sightline did not write what is in it" in outcome.failed["net-0"]


def test_a_wish_to_stop_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(sl.__file__).parent.parent))
    made = study(tmp_path, "stopped")
    first = made.steps[0]

    def ask() -> None:
        while not (first.folder / "latest.json").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Stopped, match="run the same command again"):
        run_steps(made.steps[:1], Processes(MACHINE, 1), lambda *told: None)
    thread.join()
    assert not first.done
    assert not first.running
