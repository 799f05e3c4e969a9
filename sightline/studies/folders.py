"""Where steps lie, whether they are done, and doing one.

STEPS/NAME-KEY8/        the run folder of its command, with everything that goes on there when it was stopped
STEPS/NAME-KEY8.json    what the step is: command, settings, what it was given
STEPS/NAME-KEY8.lock    locked while a process works at it; the file stays
STEPS/NAME-KEY8.log     what it had to say, if another process ran it
STEPS/features/         what encoders make of images, which the passes of all steps share, see measure/feature_cache.py

A step is done when the run.json in its folder says so under its key. Folders are found by their key: a study that calls
the same step by another name finds it as well.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError
from sightline.core.files import locked, read_json, write_atomically
from sightline.core.references import Reference
from sightline.core.settings import make_settings
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.sources.run import every_step
from sightline.studies.steps import Step, step_of

SHORT = 8  # letters of the key in the name of a folder


@dataclass(frozen=True)
class StepFolder:
    """A step with its key and its folder."""

    step: Step
    key: str
    folder: Path
    reuse: Mapping[str, tuple[Path, ...]] = field(default_factory=dict, compare=False)  # see made_before

    @property
    def about(self) -> dict[str, Any]:
        """What its run.json says of it when it is done, nothing before."""
        about = _read(self.folder / "run.json").get("step")
        return about if isinstance(about, dict) and about.get("key") == self.key else {}

    @property
    def done(self) -> bool:
        return bool(self.about)

    @property
    def begun(self) -> bool:
        """Whether something of it is there."""
        return self.folder.is_dir()

    @property
    def running(self) -> bool:
        file = self.beside("lock")
        if not file.exists():
            return False
        with locked(file) as mine:
            return not mine

    @property
    def state(self) -> str:
        if self.done:
            return "done"
        return "runs" if self.running else "resumes" if self.begun else ""

    def beside(self, ending: str) -> Path:
        """A file of its own beside its folder, where it is in nobody's way."""
        return self.folder.with_name(f"{self.folder.name}.{ending}")


def _read(file: Path) -> dict[str, Any]:
    """What a JSON file says, nothing if it cannot be read: then it is written again."""
    try:
        return read_json(file, dict, "")
    except InputError:
        return {}


def place(step: Step, key: str, steps: Path) -> StepFolder:
    """Where a step is or will be."""
    for file in sorted(steps.glob(f"*-{key[:SHORT]}.json")):
        if _read(file).get("key") == key:
            return StepFolder(step, key, file.with_suffix(""))
    return StepFolder(step, key, steps / f"{step.name}-{key[:SHORT]}")


def made_before(step: Step, key: str, steps: Path, key_now: Callable[[Step], str]) -> dict[str, tuple[Path, ...]]:
    """Steps that have trained the same upon some of the encoders of a step, by encoder; they differ in the others.

    `key_now` gives the key that a step has today: where it is still the one that was written down, then its images and
    weights are those of today, too. What cannot be looked at any more is left aside.
    """
    folders: dict[str, tuple[Path, ...]] = {}
    for file in sorted(steps.glob("*.json")):
        about = _read(file)
        if about.get("command") != step.command or about.get("key") == key:
            continue
        try:
            other = make_settings(Step, {name: value for name, value in about.items() if name != "key"})
            shared = [name for name, reference in other.encoders.items() if step.encoders.get(name) == reference]
            same = other.images == step.images and _of_training(other) == _of_training(step)
            if same and shared and key_now(other) == about["key"]:
                folders |= {name: (*folders.get(name, ()), file.with_suffix("")) for name in shared}
        except (InputError, LookupError, AttributeError, TypeError):
            continue
    return folders


def _of_training(step: Step) -> dict[str, Any]:
    """Options that decide a training, and not which of them are made."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(step.options)))
    return {name: value for name, value in plain.items() if name not in ("counts", "ends")}


def do(placed: StepFolder, folders: Mapping[str, Path], work: Callable[..., Any], machine: Any) -> bool:
    """Run a step unless it is done or someone else is at it; whether it is done now.

    `folders` are those of the steps that it needs; `work` is what its command runs.
    """
    from sightline.studies.commands import Work

    with locked(placed.beside("lock")) as mine:
        if not mine:
            return placed.done
        if placed.done:
            return True
        began = time.monotonic()
        members = members_of(placed.step, folders)
        anew = _note(placed)
        features = placed.folder.parent / "features"
        reuse = {} if anew else placed.reuse
        work(Work(placed.step, members, placed.folder, anew, machine, reuse, features))
        _finish(placed, time.monotonic() - began)
        return True


def members_of(step: Step, folders: Mapping[str, Path]) -> dict[str, Encoder]:
    """The encoders of a step by name; what other steps have trained is known by the name of its folder alone.

    So that a study goes on, and reads the same, wherever it lies.
    """
    members = {}
    for name, reference in step.encoders.items():
        needed = step_of(reference)
        if needed is None:
            members[name] = load_encoder(reference, name=name)
            continue
        folder = folders[needed.id]
        for one, where in every_step(name, Reference("run", str(folder), None, needed.options)):
            members[str(one)] = replace(
                load_encoder(str(where), name=one), reference=str(replace(where, id=folder.name))
            )
    return members


def _note(placed: StepFolder) -> bool:
    """Write down what the step is; whether what is there was begun with other references and has to begin anew."""
    step, file = placed.step, placed.beside("json")
    about = json.loads(json.dumps({"key": placed.key, **asdict(step)}))
    about.pop("group")
    changed = False
    if placed.begun and (before := _read(file)):
        changed = any(before.get(key) != about[key] for key in ("encoders", "images"))
    write_atomically(file, json.dumps(about, indent=2).encode())
    return changed


def _finish(placed: StepFolder, seconds: float) -> None:
    """Say in run.json that the step is done; nothing that is read later depends on more than this folder."""
    file = placed.folder / "run.json"
    try:
        about = read_json(file, dict, "")
    except InputError as error:
        raise InputError(f"The step {placed.step.name!r} has left no run.json in {str(placed.folder)!r}") from error
    told = {"name": placed.step.name, "command": placed.step.command, "key": placed.key, "seconds": round(seconds, 1)}
    about["step"] = {**told, "finished": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomically(file, json.dumps(about, indent=2).encode())
