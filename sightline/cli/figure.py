"""`sightline figure`: a figure or table of a paper, drawn from a study or a comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sightline.cli.command import command
from sightline.cli.saying import say
from sightline.core.errors import InputError

if TYPE_CHECKING:
    from sightline.studies.evidence import Evidence
    from sightline.studies.figures import PaperDrawing


SUFFIXES = (".svg", ".pdf", ".csv")


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
