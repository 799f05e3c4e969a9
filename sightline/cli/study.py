"""`sightline study`: the published findings as measured verdicts, for anyone's encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from sightline.api import Device, ShowProgress, Workers
from sightline.cli.application import say
from sightline.cli.command import command
from sightline.cli.compare import Further
from sightline.cli.verdicts import show_verdicts
from sightline.core.errors import InputError, counted, duration

if TYPE_CHECKING:
    from sightline.studies.evidence import Evidence
    from sightline.studies.findings import Verdict
    from sightline.studies.folders import StepFolder
    from sightline.studies.roles import Role
    from sightline.studies.running import Ended, Outcome
    from sightline.studies.study import Study

Encoders: TypeAlias = Mapping[str, str] | None
GIVEN = "`NAME=REFERENCE`; may be repeated."


@command("Published findings")
def study(
    what: Annotated[str, "A study of `sightline list studies`, such as `papers`, or FILE.toml."],
    *,
    encoder: Annotated[Encoders, f"An encoder whose role is known: {GIVEN}"] = None,
    je: Annotated[Encoders, f"A joint-embedding ViT (SimCLR, MoCo, DINO): {GIVEN}"] = None,
    rec: Annotated[Encoders, f"A ViT trained by reconstruction (MAE, SimMIM, BEiT): {GIVEN}"] = None,
    sl: Annotated[Encoders, f"A supervised ViT: {GIVEN}"] = None,
    hybrid: Annotated[Encoders, f"A ViT trained with both objectives: {GIVEN}"] = None,
    masked_je: Annotated[Encoders, f"A joint-embedding ViT that sees masked images (MSN): {GIVEN}"] = None,
    cnn_je: Annotated[Encoders, f"A joint-embedding CNN: {GIVEN}"] = None,
    cnn_rec: Annotated[Encoders, f"A CNN trained by reconstruction: {GIVEN}"] = None,
    cnn_sl: Annotated[Encoders, f"A supervised CNN: {GIVEN}"] = None,
    role: Annotated[
        list[str] | None, "More about an encoder: `mae-ft:tuned_from=mae,seed=1`; also size, window, weight, method."
    ] = None,
    images: Annotated[str | None, "Images with classes for passes, fine-tuning and rcdm; by default `shapes`."] = None,
    detection: Annotated[str | None, "Images with boxes and masks; by default those of the recipe."] = None,
    segmentation: Annotated[str | None, "Images with segmentation maps; by default those of the recipe."] = None,
    second: Annotated[str | None, "A second set of images with classes, for probes on it."] = None,
    further: Further = None,
    limit: Annotated[
        int | None, "In each pass, at most this many images of each split; 0: all. By default 1024."
    ] = None,
    steps: Annotated[
        Sequence[str] | None,
        "Run only these, and what they need, `passes,finetune`: passes, minibatch, finetune, dynamics, reinit, detect, "
        "segment, rcdm, pretrain; for a file, names of its steps.",
    ] = None,
    findings: Annotated[
        Sequence[str] | None, "Only these findings, `S1,P3,P4`, and the steps that decide them."
    ] = None,
    settings: Annotated[
        Mapping[str, Mapping[str, Any]] | None,
        "`STEPS.key=value`: `passes.knn.k=10`, `finetune.epochs=2`, `detect.recipe=detect_vitdet`; may be repeated.",
    ] = None,
    out: Annotated[Path, "Folder of the study, which the same command continues."] = Path("runs/study"),
    steps_folder: Annotated[
        Path | None, "Folder of the steps, which several studies may share; by default STUDY/steps."
    ] = None,
    jobs: Annotated[
        int | None, "Steps to run at a time, each in its own process; by default 1, on a cluster all at once."
    ] = None,
    on: Annotated[str | None, "`slurm` or `ray`: run the steps there; all machines must see the folder."] = None,
    cluster: Annotated[
        Mapping[str, Any] | None,
        "`account=mine`, `timeout_min=600`, `gpus_per_node=1`; for Ray `address=auto`, `num_gpus=1`.",
    ] = None,
    dry: Annotated[bool, "Print the plan, and run nothing."] = False,
    device: Device = "auto",
    workers: Workers = None,
    show_progress: ShowProgress = True,
    verbose: Annotated[bool, "End with a table of all findings, their effects and claims."] = False,
) -> None:
    """See which published findings hold for your encoders: run everything that decides them, and end with verdicts.

    Examples:

    - `sightline study papers --steps passes -o runs/papers`: with the reference encoders, in minutes

    - `sightline study papers --je moco=moco_v3:vit-b-300ep.pth.tar --je dino=timm:vit_base_patch16_224.dino
      --rec mae=mae:mae_pretrain_vit_base.pth --images folder:/data/imagenet --detection coco:/data/coco -o
      runs/mine`

    - `sightline study papers --findings S1,P3,P4 --dry`: shows what that takes

    A step is the run folder of another command. Steps that are already done, in this study or in another one with the
    same `--steps-folder`, are not computed again. Ctrl-C saves and stops; run the same command again to continue.
    Several processes or machines may run it at the same time. A step that fails stops only the steps that need it.
    """
    from sightline.core.progress import showing
    from sightline.studies.commands import Machine
    from sightline.studies.findings import all_findings
    from sightline.studies.keys import Contents
    from sightline.studies.study import make_study, run_study

    vits = {"je": je, "rec": rec, "sl": sl, "hybrid": hybrid, "masked_je": masked_je}
    cnns = {"cnn_je": cnn_je, "cnn_rec": cnn_rec, "cnn_sl": cnn_sl}
    encoders, roles = _roles({"": encoder, **vits, **cnns}, role or [])
    contents, machine = Contents(), Machine(device, workers, show_progress)
    with showing(show_progress):  # large sets of images are read for the first time
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
            contents=contents,
        )
        _show_plan(made, contents, machine)
    del contents  # encoders that are only planned with
    if dry:
        return
    outcome = run_study(made, jobs=jobs, on=on, cluster=cluster, machine=machine, tell=_tell)
    evidence = made.evidence
    verdicts = made.verdicts(evidence)
    made.save(verdicts)
    show_verdicts(verdicts, all_findings(), verbose)
    say(f"Verdicts: {made.path / 'verdicts.csv'}")
    say(f"Report: {study_report(made, verdicts, evidence)}")
    _end(outcome)


def _roles(given: Mapping[str, Encoders], more: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Encoders and their roles as the options have them."""
    from dataclasses import asdict, replace

    from sightline.core.settings import make_settings, parse_settings
    from sightline.studies.roles import Role, known_role
    from sightline.studies.study import FLAGS

    encoders: dict[str, str] = {}
    flags: dict[str, str] = {}
    roles: dict[str, Role] = {}
    for flag, members in given.items():
        for name, reference in (members or {}).items():
            if ":" in name:
                raise InputError(f"An encoder is called {name!r}; write NAME=REFERENCE, such as dino=timm:NAME")
            if name in encoders:
                raise InputError(f"Two encoders are called {name!r}; give one of them another name")
            encoders[name] = reference
            if flag:
                flags[name] = flag
    for name, flag in flags.items():  # now that all are known that one may have been fine-tuned from
        family, network = FLAGS[flag]
        known = known_role(name, encoders[name], encoders) or Role(name, family)
        roles[name] = replace(known, family=family, network=network)
    for word in more:
        name, _, about = word.partition(":")
        values = parse_settings([part for part in about.split(",") if part])
        if name not in encoders:
            raise InputError(f"--role {word}: there is no encoder {name!r}; give it with --je, --rec, …")
        role = roles.get(name) or known_role(name, encoders[name], encoders)
        if role is None:
            raise InputError(f"--role {word}: say what kind of encoder {name!r} is with --je, --rec, …")
        known_fields = asdict(role)
        for key in values:
            if key not in known_fields or key == "name":
                raise InputError(f"--role {word}: a role has no {key!r}; it has {', '.join(list(known_fields)[1:])}")
        if "tuned_from" in values and values["tuned_from"] not in encoders:
            raise InputError(
                f"--role {word}: there is no encoder {values['tuned_from']!r}; give it with --je, --rec, …"
            )
        roles[name] = make_settings(Role, {k: v for k, v in {**known_fields, **values}.items() if v is not None})
    return encoders, roles


# What is said


def _show_plan(study: Study, contents: Any, machine: Any) -> None:
    """Steps, what exists, time and disk, findings; then what cannot be decided."""
    from rich.filesize import decimal
    from rich.table import Table

    from sightline.core.progress import console
    from sightline.studies.costs import cost_of
    from sightline.studies.planning import decided_by, undecided

    steps = {placed.step.name: placed for placed in study.steps}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("step", "command", "", "time", "disk", "decides"):
        table.add_column(column, justify="right" if column in ("time", "disk") else "left", overflow="fold")
    seconds = disk = 0.0
    for placed in study.steps:
        cost = None if placed.done else cost_of(placed, steps, contents, machine)
        seconds, disk = seconds + (cost.seconds if cost else 0), disk + (cost.disk if cost else 0)
        about = f"{placed.step.command} {counted(n, 'encoder') if (n := len(placed.step.encoders)) else ''}"
        told = (
            ("", "")
            if placed.done
            else ("?", "?")
            if cost is None
            else (duration(cost.seconds), decimal(int(cost.disk)))
        )
        table.add_row(placed.step.name, about, placed.state, *told, " ".join(decided_by(placed.step, study.findings)))
    console().print(table)
    console().print(
        f"About {duration(seconds)} and {decimal(int(disk))}, from a short trial on this machine"
        if seconds
        else "All steps are done"
    )
    for names in study.evidence.mixed_up:
        console().print(
            f"{', '.join(names)} have one role and two of them the same seed, so none of them are taken for seeds of "
            f"one encoder; say what else differs: --role {names[-1]}:size=5.5 (millions), or its seed",
            style="yellow",
            markup=False,
        )
    if missing := undecided(study):
        console().print(f"\n{counted(len(missing), 'finding')} cannot be decided by these steps:", style="dim")
        for line in _needing(missing):
            console().print(f"  {line}", style="dim", markup=False)


def _needing(missing: Mapping[str, str]) -> list[str]:
    """Findings that need the same on one line.

    >>> _needing({"S12": "detectors", "S17": "`--steps dynamics`", "S13": "detectors"})
    ['S12, S13 need detectors', 'S17 needs `--steps dynamics`']
    """
    those = {needs: [finding for finding, own in missing.items() if own == needs] for needs in missing.values()}
    return [f"{', '.join(own)} {'needs' if len(own) == 1 else 'need'} {needs}" for needs, own in those.items()]


def _tell(event: str, placed: StepFolder, ended: Ended | None) -> None:
    from sightline.core.progress import console

    name = placed.step.name
    if event == "begins":
        console().print(f"\n{name}", style="bold", end="")
        console().print(f": {placed.step.command} in {placed.folder}", soft_wrap=True)
    elif event == "waits":
        console().print(f"{name} is running in another process; waiting for it")
    elif ended is not None and ended.state == "done":
        console().print(f"{name} is done after {duration(placed.about.get('seconds', 0.0))}")
    elif ended is not None and ended.state == "failed":
        console().print(f"{name} failed: ", style="red", end="")
        console().print(ended.why, markup=False, soft_wrap=True)
    elif ended is not None and ended.state == "lost":
        console().print(f"The process of {name} ended ({ended.why}); it starts again")


def study_report(study: Study, verdicts: Sequence[Verdict], evidence: Evidence) -> Path:
    """Write the report of a study, with the figures of the papers that its results can draw."""
    from dataclasses import replace

    from sightline.core.progress import bar_of_steps, showing
    from sightline.report.study import study_page
    from sightline.studies.evidence import Missing
    from sightline.studies.figures import all_figures, draw
    from sightline.studies.findings import all_findings, by_chance
    from sightline.studies.papers import PAPERS

    figures, missing, notes = {}, {}, [by_chance(verdicts).sentence]
    with showing(True), bar_of_steps("Drawing figures", len(all_figures())) as move:
        for name in all_figures():
            try:
                figures[name] = draw(name, evidence)
            except Missing as error:
                missing[name] = error.needs
            except Exception as error:  # verdicts do not depend on it
                notes.append(f"{name} could not be drawn ({type(error).__name__}: {error}).")
            move()
    findings = {}
    for verdict in verdicts:
        finding = all_findings()[verdict.finding]
        names = (finding.figure, finding.figure.rstrip("abcdef"))  # itself, or the figure that it is a part of
        whole = next((name for name in names if name in figures), "")
        findings[finding.id] = replace(finding, figure=whole)
    steps = {
        placed.step.name: {
            "command": placed.step.command,
            "state": placed.state or "not run",
            **{key: placed.about[key] for key in ("seconds", "finished") if key in placed.about},
            "encoders": ", ".join(placed.step.encoders),
            "folder": placed.folder.name,
        }
        for placed in study.steps
    }
    kinds = {role.name: role.in_words() for role in study.roles}
    title = f"Study: {study.name}"
    return study_page(
        study.path,
        verdicts,
        findings,
        title=title,
        figures=figures,
        missing=missing,
        papers=PAPERS,
        kinds=kinds,
        together=evidence.seeds,
        steps=steps,
        notes=notes,
    )


def _end(outcome: Outcome) -> None:
    """What has failed is told last, and is the exit status."""
    for name, why in outcome.failed.items():
        say(f"Step {name} failed: {why}", fg="red", err=True)
    for name, broken in outcome.left.items():
        say(f"Step {name} was not run, because {broken} failed", fg="red", err=True)
    if outcome.failed:
        raise SystemExit(1)
