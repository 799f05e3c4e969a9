"""The tutorial notebook, run as it is written; in the repository it has no outputs."""

from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install 'sightline[docs]' to test the tutorial")
nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install 'sightline[docs]' to test the tutorial")


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook: Any) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert not [cell for cell in code if cell.outputs or cell.execution_count]


@pytest.mark.machines
def test_it_runs(notebook: Any, tmp_path: Path) -> None:
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = [
        set().union(*(output.get("data", {}) for output in cell.outputs))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert all("text/html" in shown[number] for number in (0, 1, 2))  # an encoder, images, a run
    drawn = [str(output) for cell in notebook.cells for output in cell.get("outputs", []) if "vega" in str(output)]
    assert len(drawn) == 2
    assert (tmp_path / "runs" / "tutorial" / "report.html").is_file()
