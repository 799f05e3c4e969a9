"""Single figures of a report, and the report itself, for those who work in Python: `run.figure`, `run.report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt

from sightline.core import plugins
from sightline.core.errors import InputError, nearest
from sightline.report.figures import same_colours, theme
from sightline.report.html import clean, cleaned
from sightline.report.page import write_report

if TYPE_CHECKING:
    from sightline.core.run_folder import Run


def chart(run: Run, analysis: str, figure: str | None = None) -> Any:
    """A figure of an analysis as a chart with the colours and fonts of the report; the first one unless it is named."""
    found = {one.name: one for one in plugins.module_of(analysis).figures(cleaned(run[analysis]))}
    if not found:
        raise InputError(f"There is nothing to draw of {analysis!r}: no number of it is known in this run")
    name = next(iter(found)) if figure is None else figure
    if name not in found:
        raise InputError(f"{analysis!r} has no figure {name!r}{nearest(name, found)}")
    with alt.data_transformers.enable("default", max_rows=None), alt.theme.enable("none"):
        spec = found[name].chart.to_dict()
    same_colours(spec, [clean(encoder["name"]) for encoder in run.request.get("encoders", [])])
    return alt.Chart.from_dict(spec | {"config": theme()})


def page_of(run: Run) -> Path:
    """The page of a run, written if it is not there or older than one of its results."""
    page = None if run.path is None else run.path / "report.html"
    if page is not None and page.is_file():
        changed = [run.file(name).stat().st_mtime_ns for name in run.names()]
        if page.stat().st_mtime_ns >= max(changed, default=0):
            return page
    return write_report(run)
