"""`sightline list`, `inspect`, `convert`, `report`, `export` and `figure`: what there is, and other forms of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from sightline.cli.application import say
from sightline.cli.command import command
from sightline.cli.ending import report_of
from sightline.core.errors import InputError
from sightline.core.files import file_name

if TYPE_CHECKING:
    from sightline.studies.evidence import Evidence
    from sightline.studies.figures import PaperDrawing

SUFFIXES = (".svg", ".pdf", ".csv")  # of a figure


@command("Files and lists", name="list")
def list_(
    what: Annotated[
        Literal["encoders", "images", "analyses", "sites", "objectives", "recipes", "studies", "findings", "figures"],
        "encoders, images, analyses, sites, objectives, recipes, studies, findings or figures.",
    ],
    which: Annotated[str | None, "For encoders a pattern such as 'vit_small*'; for sites an encoder reference."] = None,
) -> None:
    """Show what can be used: encoders, images, analyses, objectives, recipes and more.

    Examples:

    - `sightline list encoders 'vit_small*dino*'`

    - `sightline list sites timm:resnet18@random`
    """
    from sightline.cli.listing import list_sites, listed, matching_encoders

    if what == "sites":
        say(list_sites(which))
    elif what == "encoders" and which is not None:
        say(matching_encoders(which))
    else:
        say(listed(what))


@command("Files and lists")
def inspect(
    file: Annotated[Path, "A checkpoint file of any kind; no code in it is run."],
    *,
    json: Annotated[bool, "Print JSON, for programs."] = False,
) -> None:
    """Say what is in a checkpoint: format, architecture, parts, parameters, training arguments, hash.

    Example: `sightline inspect mae_pretrain_vit_base.pth`

    No model is built. A file that cannot be read safely is refused with the reason.
    """
    from sightline.encoders.files.inspect import as_json, describe
    from sightline.encoders.files.inspect import inspect as look

    found = look(file)
    say(as_json(found) if json else describe(found))


@command("Files and lists")
def convert(
    what: Annotated[str, "A checkpoint file, or an encoder, `source:id[@weights][?option=value]`."],
    *,
    out: Annotated[Path, "A file that ends in .safetensors, or a folder."],
    overwrite: Annotated[bool, "Replace an earlier conversion."] = False,
) -> None:
    """Write an encoder so that timm can load it without Sightline, and print the line that does.

    Examples:

    - `sightline convert mae_pretrain_vit_base.pth -o mae.safetensors`

    - `sightline convert run:runs/dino -o dino`

    It is loaded there and its outputs are compared before any file is put in place.
    """
    from sightline.encoders.files.convert import convert as write

    found = write(what, out, overwrite=overwrite)
    for note in found.notes:
        say(note, err=True)
    say(f"{found.path}: outputs differ by {found.difference:.1e} of their scale at most")
    say(found.load)


@command("Files and lists")
def report(run: Annotated[Path, "Folder of a run or a study, as given to -o."]) -> None:
    """Write `report.html` of a run or a study again; needs no model and no images.

    Example: `sightline report runs/x`
    """
    from sightline.core.run_folder import open_run

    if (run / "study.json").is_file():
        from sightline.cli.study import study_report
        from sightline.studies.study import open_study

        study = open_study(run)
        evidence = study.evidence
        study.save(verdicts := study.verdicts(evidence))
        say(study_report(study, verdicts, evidence))
        return
    found = open_run(run)
    if not found.names():
        raise InputError(f"{str(run)!r} has no finished analysis to show; finish it with `sightline compare`")
    say(report_of(found)[0])


@command("Files and lists")
def export(
    run: Annotated[Path, "Folder of a run or a study, as given to -o."],
    *,
    format: Annotated[Literal["csv", "parquet", "netcdf"], "csv, parquet or netcdf."] = "csv",
    out: Annotated[Path | None, "Folder for the files; RUN/export by default."] = None,
) -> None:
    """Write the results as tables: one row per number, its coordinates in columns.

    Example: `sightline export runs/x`

    In Python: `pandas.read_csv("runs/x/export/cka.csv")`, or `sightline.open_run("runs/x")["cka"]` as xarray. Of a
    study the results of all finished steps are written, each into the folder of its step, or into a folder with the
    name of the step below `--out`; its verdicts are in STUDY/verdicts.csv.
    """
    from sightline.core.run_folder import open_run
    from sightline.report.tables import export_run

    for whose, folder in _runs_in(run, out):
        for path in export_run(open_run(whose), format, folder):
            say(path)


def _runs_in(run: Path, out: Path | None) -> list[tuple[Path, Path | None]]:
    """A run and where its tables go, or those of the finished steps of a study."""
    if not (run / "study.json").is_file():
        return [(run, out)]
    from sightline.studies.study import open_study

    names = {placed.folder: placed.step.name for placed in open_study(run).steps if placed.done}
    found = [folder for folder in names if (folder / "results").is_dir()]
    if not found:
        raise InputError(f"{str(run)!r} has no finished step with results to export; finish it with `sightline study`")
    return [(folder, None if out is None else out / file_name(names[folder])) for folder in found]


@command("Published findings")
def figure(
    name: Annotated[str, "A paper and its figure or table: `'001 Fig 1b'`, `'003 Fig E.2'`, `'001 Table 6'`."],
    run: Annotated[Path, "Folder of a study, or of a comparison or another run."],
    *,
    out: Annotated[Path | None, "A file that ends in .svg, .pdf or .csv; RUN/figures/NAME.svg by default."] = None,
) -> None:
    """Draw a figure or table of a paper from your results, in the paper's arrangement.

    Example: `sightline figure '001 Fig 1b' runs/papers -o fig1b.pdf`

    `sightline list figures` shows them all, and what each needs. Parts of a figure whose results are missing are left
    out, with a note that says what they need.
    """
    from sightline.core.files import write_atomically
    from sightline.core.folders import refuse_links
    from sightline.studies.evidence import Missing
    from sightline.studies.figures import draw

    if out is not None and out.suffix not in SUFFIXES:
        raise InputError(f"{str(out)!r} is no file of a figure; give one that ends in {', '.join(SUFFIXES)}")
    study = (run / "study.json").is_file()
    try:
        drawn = draw(name, _evidence(run))
    except Missing as error:
        raise InputError(f"{name} cannot be drawn from {str(run)!r}: it needs {_needs(error.needs, study)}") from error
    for letter, needs in drawn.missing.items():
        say(f"Without part {letter}, which needs {_needs(needs, study)}", dim=True, err=True)
    if drawn.paper is not None:
        for what, paper, ours in drawn.paper.itertuples(index=False):
            say(f"{what}: {ours} (paper: {paper})")
    path = out or run / "figures" / f"{drawn.name}.svg"
    content = _content(drawn, path.suffix)
    if out is None:
        refuse_links(run)
    write_atomically(path, content)
    say(path)


def _evidence(folder: Path) -> Evidence:
    """What a study knows, or one run alone."""
    from sightline.core.run_folder import open_run
    from sightline.studies.evidence import evidence_of

    if (folder / "study.json").is_file():
        from sightline.studies.study import open_study

        return open_study(folder).evidence
    return evidence_of(open_run(folder))


def _needs(needs: str, study: bool) -> str:
    """What is missing; a comparison takes analyses, and no steps of a study.

    >>> _needs("the analysis knn of a and b: add `--steps passes`; detection of a: add `--steps detect`", study=False)
    'the analysis knn of a and b: add `--also knn`; detection of a (from `sightline study --steps detect`)'
    """
    if study:
        return needs
    needs = re.sub(r"(the analysis (\w+) [^;]*?): add `--steps passes`", r"\1: add `--also \2`", needs)
    return re.sub(r": add `(--steps \w+)`", r" (from `sightline study \1`)", needs)


def _content(drawn: PaperDrawing, suffix: str) -> bytes:
    if suffix == ".csv":
        from sightline.core.tables import csv

        return csv(drawn.table)
    return drawn.pdf() if suffix == ".pdf" else drawn.svg().encode()
