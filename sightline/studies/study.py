"""A study: encoders with roles, steps that are run folders, and what the published findings make of their results.

    study = sl.study("papers", out="runs/papers", steps=["passes"])
    study.verdicts()                       # one for each finding
    sl.open_study("runs/papers").evidence  # all numbers, from whichever step holds them

STUDY/study.json         roles, steps with their keys, findings
STUDY/steps/             the steps, see folders.py; or in another folder, which several studies may share
STUDY/verdicts.csv, STUDY/verdicts.json
STUDY/.sightline.json    what kind of folder it is, see core/folders.py
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError, nearest
from sightline.core.files import is_file, read_json, write_atomically
from sightline.core.folders import begin, holds
from sightline.core.provenance import provenance
from sightline.core.run_folder import Run, open_run
from sightline.core.settings import make_settings
from sightline.core.tables import csv
from sightline.studies.commands import Machine, command_of
from sightline.studies.elsewhere import on_cluster
from sightline.studies.evidence import Evidence
from sightline.studies.findings import Verdict, all_findings, decide_all
from sightline.studies.folders import StepFolder, made_before, place
from sightline.studies.keys import Contents, key_of, keys_of
from sightline.studies.papers import STUDIES, Sets, papers
from sightline.studies.roles import (
    FAMILIES,
    HYBRID,
    JE,
    MASKED_JE,
    REC,
    SUPERVISED,
    Role,
    known_role,
    reference_encoders,
    refuse_circles,
)
from sightline.studies.running import Ended, Executor, Here, Outcome, Processes, run_steps
from sightline.studies.steps import Design, Given, Step
from sightline.studies.study_file import read_study

KIND = "study"
FLAGS = {  # what users call the roles
    "je": (JE, "vit"),
    "rec": (REC, "vit"),
    "sl": (SUPERVISED, "vit"),
    "hybrid": (HYBRID, "vit"),
    "masked_je": (MASKED_JE, "vit"),
    "cnn_je": (JE, "cnn"),
    "cnn_rec": (REC, "cnn"),
    "cnn_sl": (SUPERVISED, "cnn"),
}
COLUMNS = (
    "finding",
    "paper",
    "where",
    "verdict",
    "effect",
    "low",
    "high",
    "threshold",
    "p",
    "p_adjusted",
    "claim",
    "paper_says",
    "sentence",
    "needs",
)


@dataclass(frozen=True)
class Study:
    """A study in its folder: run, half run, or only planned."""

    path: Path
    name: str
    roles: tuple[Role, ...]
    steps: tuple[StepFolder, ...]
    findings: tuple[str, ...]

    def __post_init__(self) -> None:
        refuse_circles(self.roles)

    @property
    def runs(self) -> dict[str, Run]:
        """The run folders of the steps that are done, by name."""
        return {placed.step.name: open_run(placed.folder) for placed in self.steps if placed.done}

    @property
    def evidence(self) -> Evidence:
        """What the steps that are done by now have measured."""
        return Evidence(self.roles, tuple(self.runs.values()))

    def verdicts(self, evidence: Evidence | None = None) -> list[Verdict]:
        """What the results make of each finding of the study; `evidence` that was read already is not read again."""
        return decide_all(self.evidence if evidence is None else evidence, only=self.findings)

    def save(self, verdicts: Sequence[Verdict]) -> None:
        findings = all_findings()
        rows = []
        for verdict in verdicts:
            about = {**asdict(findings[verdict.finding], dict_factory=_plain), **asdict(verdict)}
            rows.append({key: about[key] for key in (*COLUMNS, "measure", "figure", "parts")})
        import pandas as pd

        table = pd.DataFrame(rows, columns=list(COLUMNS))
        write_atomically(self.path / "verdicts.csv", csv(table))
        write_atomically(self.path / "verdicts.json", json.dumps(_finite(rows), indent=1).encode())


def _plain(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not callable(value)}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


# Making one


def study(
    what: str | Path = "papers",
    encoders: Mapping[str, str] | None = None,
    *,
    roles: Mapping[str, Role] | None = None,
    images: str | None = None,
    detection: str | None = None,
    segmentation: str | None = None,
    second: str | None = None,
    further: Mapping[str, str] | None = None,
    limit: int | None = None,
    steps: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path = "runs/study",
    steps_folder: str | Path | None = None,
    jobs: int | None = None,
    on: str | None = None,
    cluster: Mapping[str, Any] | None = None,
    device: str = "auto",
    workers: int | None = None,
    show_progress: bool = True,
) -> Study:
    """Run a study and decide its findings: one that comes with Sightline, `papers`, or a file that ends in .toml.

    `encoders` are references by name, by default one of each role in the zoo; their `roles` are known for the zoo,
    official formats and much of timm, and are given otherwise: `roles={"mine": Role("mine", "joint-embedding")}`.
    `further` are images that analyses ask for by name, and `limit` the most images of each split in a pass. `steps` and
    `findings` choose, `settings` are those of steps: `{"finetune": {"epochs": 2}}`. Called again it goes on where it
    stopped, and steps that are there already, also in a `steps_folder` that studies share, are not done again. `jobs`
    steps run at a time, or elsewhere: `on="slurm"`, `on="ray"`, with the settings of the `cluster`. Steps that fail are
    an InputError at the end, when all others are done and `verdicts.csv` is written.
    """
    made = make_study(
        what,
        encoders,
        roles=roles,
        images=images,
        detection=detection,
        segmentation=segmentation,
        second=second,
        further=further,
        limit=limit,
        steps=steps,
        findings=findings,
        settings=settings,
        out=out,
        steps_folder=steps_folder,
    )
    outcome = run_study(
        made, jobs=jobs, on=on, cluster=cluster, machine=Machine(device, workers, show_progress), tell=_silent
    )
    made.save(made.verdicts())
    if outcome.failed:
        raise InputError("; ".join(f"step {name} failed: {why}" for name, why in outcome.failed.items()))
    return made


def _silent(event: str, placed: StepFolder, ended: Ended | None) -> None:
    pass


def make_study(
    what: str | Path = "papers",
    encoders: Mapping[str, str] | None = None,
    *,
    roles: Mapping[str, Role] | None = None,
    images: str | None = None,
    detection: str | None = None,
    segmentation: str | None = None,
    second: str | None = None,
    further: Mapping[str, str] | None = None,
    limit: int | None = None,
    steps: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    out: str | Path = "runs/study",
    steps_folder: str | Path | None = None,
    contents: Contents | None = None,
) -> Study:
    """The study as it will be run; whatever cannot be is found here, and nothing is written."""
    contents = Contents() if contents is None else contents
    if Path(what).suffix == ".toml":
        if encoders or roles or detection or segmentation or second or further or limit is not None or settings:
            raise InputError(
                f"{str(what)!r} says itself which encoders, images and settings its steps have; change it there"
            )
        design = read_study(Path(what), images=images, steps=steps, findings=findings)
    elif str(what) in STUDIES:
        given = _given(encoders, roles or {}, contents)
        sets = Sets(images, detection, segmentation, second, further or {})
        design = papers(
            str(what), given, sets, contents, limit=limit, steps=steps, findings=findings, settings=settings
        )
    else:
        raise InputError(
            f"There is no study {str(what)!r}, nor is it a file that ends in .toml{nearest(str(what), STUDIES)}"
        )
    out = Path(out)
    holds(out, KIND)
    where = out / "steps" if steps_folder is None else Path(steps_folder)
    return _placed(design, out, where, contents)


def _placed(design: Design, out: Path, where: Path, contents: Contents) -> Study:
    keys, by_name = keys_of(design.steps, contents), {step.name: step for step in design.steps}
    key_now = partial(key_of, keys=keys, by_name=by_name, contents=contents)
    placed = [place(step, keys[step.name], where) for step in design.steps]
    placed = [
        replace(one, reuse=made_before(one.step, one.key, where, key_now))
        if command_of(one.step).apart and not one.done
        else one
        for one in placed
    ]
    return Study(out, design.name, design.roles, tuple(placed), design.findings)


def _given(encoders: Mapping[str, str] | None, roles: Mapping[str, Role], contents: Contents) -> dict[str, Given]:
    """The encoders of a study with the roles that are known or given."""
    references = dict(encoders) if encoders else reference_encoders()
    for name in roles:
        if name not in references:
            raise InputError(f"There is no encoder {name!r} to have a role{nearest(name, references)}")
    given = {}
    for name, reference in references.items():
        role = roles.get(name) or known_role(name, reference, references)
        if role is None:
            contents.encoder(reference)  # an encoder that there is not has no role either: that is said first
            flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in FLAGS)
            raise InputError(
                f"It is not known what {name}={reference} was trained by; say so: {flags} {name}={reference}, or "
                f"roles= in Python ({', '.join(FAMILIES)})"
            )
        given[name] = Given(replace(role, name=name), reference)
    return given


# Running one


def run_study(
    study: Study,
    *,
    jobs: int | None = None,
    on: str | None = None,
    cluster: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    tell: Callable[[str, StepFolder, Ended | None], None] = _silent,
) -> Outcome:
    """Write down what the study is and run its steps; how they ended."""
    if jobs is not None and jobs < 1:
        raise InputError(f"{jobs} steps at a time cannot be; give --jobs 1 or more")
    if cluster and on is None:
        raise InputError("Settings of a cluster are given, but no cluster; add --on slurm or --on ray")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # one would lock a step and wait there for the others
        raise InputError("A study is not shared by torchrun; start it without, with --jobs 2 for two steps at a time")
    _begin(study)
    return run_steps(study.steps, _executor(study, jobs, on, cluster or {}, machine or Machine()), tell)


def _executor(study: Study, jobs: int | None, on: str | None, cluster: Mapping[str, Any], machine: Machine) -> Executor:
    if on is not None:
        places = len(study.steps) if jobs is None else jobs  # by default, the cluster knows how many it can run
        quiet = replace(machine, show_progress=False)
        return on_cluster(on, quiet, places, study.path / "jobs", cluster)
    if jobs is not None and jobs > 1:
        return Processes(machine, jobs)
    return Here(machine)


def _begin(study: Study) -> None:
    begin(study.path, KIND)
    where = study.steps[0].folder.parent if study.steps else study.path / "steps"
    inside = where.absolute().is_relative_to(study.path.absolute())
    about = {
        "study": study.name,
        "steps_folder": os.path.relpath(where, study.path) if inside else str(where.absolute()),
        "roles": [asdict(role) for role in study.roles],
        "steps": [{**asdict(placed.step), "key": placed.key, "folder": placed.folder.name} for placed in study.steps],
        "findings": list(study.findings),
        **provenance(),
    }
    write_atomically(study.path / "study.json", json.dumps(about, indent=1).encode())


def open_study(path: str | Path) -> Study:
    """A study that was run, or is being run: `open_study("runs/papers").verdicts()`."""
    path = Path(path)
    if not is_file(path / "study.json"):
        raise InputError(f"{str(path)!r} is not a study: it has no study.json; give the folder passed to -o")
    about = read_json(path / "study.json", dict, "run the same study again")
    try:
        steps = [_step(one, path / about["steps_folder"]) for one in about["steps"]]
        roles = tuple(make_settings(Role, role) for role in about["roles"])
        return Study(path, about["study"], roles, tuple(steps), tuple(about["findings"]))
    except (KeyError, TypeError) as error:
        raise InputError(f"{str(path / 'study.json')!r} is damaged; run the same study again") from error


def _step(about: dict[str, Any], where: Path) -> StepFolder:
    key, folder = about.pop("key"), where / about.pop("folder")
    return StepFolder(make_settings(Step, about), key, folder)
