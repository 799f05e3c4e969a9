"""Results as tables for other programs: one row per number, its coordinates in columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.core import ownership
from sightline.core.errors import InputError
from sightline.core.results import ABSENT

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from sightline.core.run_folder import Run


def export_run(run: Run, format: str, folder: Path | None = None) -> list[Path]:
    """Write every result of a run as `csv`, `parquet` or `netcdf` and return the files."""
    if run.path is None:
        raise InputError("The run is in memory only; use run['cka'].to_dataframe(), or analyze(..., out=FOLDER)")
    if not run.names():
        raise InputError(f"{str(run.path)!r} has no finished analysis to export; finish it with `sightline compare`")
    inside = run.path / "export"
    folder = folder or inside
    home = run.path if folder == inside else folder  # which list they are in
    if home == folder:
        ownership.begin(folder, "tables", among=True)
    written = []
    for name in run:
        if format == "netcdf":
            written.append(folder / f"{name}.nc")
            ownership.write(home, written[-1], (run.path / "results" / f"{name}.nc").read_bytes())
            continue
        for part, table in tables(run[name], name).items():
            written.append(folder / f"{part}.{format}")
            with ownership.writing(home, written[-1]) as temporary:
                if format == "csv":
                    temporary.write_bytes(csv(table))
                else:
                    table.to_parquet(temporary, index=False)
    return written


def tables(result: xr.Dataset, name: str) -> dict[str, pd.DataFrame]:
    """Variables that share their axes share a table; the largest one has the name of the analysis.

    Rows where all numbers are missing because an encoder has no such site are left out; `reason` tells of the others.
    Pictures (uint8), which the report shows, and their notes are in the NetCDF file only.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for variable, values in result.data_vars.items():
        if values.dtype == "uint8" or str(variable).startswith("picture_"):
            continue
        groups.setdefault(tuple(map(str, values.dims)), []).append(str(variable))
    largest = max(groups, key=lambda dims: result[groups[dims][0]].size)
    found = {}
    for dims, variables in groups.items():
        frame = result[variables].to_dataframe().reset_index()
        if numbers := [v for v in variables if result[v].dtype.kind == "f"]:
            reasons = frame[[v for v in variables if v.endswith("reason")]]
            frame = frame[frame[numbers].notna().any(axis=1) | ~reasons.isin(["", ABSENT]).all(axis=1)]
        found[name if dims == largest else f"{name}-{variables[0]}"] = frame
    return found


def csv(table: pd.DataFrame) -> bytes:
    """A table as text that no spreadsheet computes with: names that look like a formula begin with an apostrophe.

    >>> import pandas as pd
    >>> csv(pd.DataFrame({"encoder": ["=1+1", "mae"], "cka": [-0.5, 1.0]}))
    b"encoder,cka\\n'=1+1,-0.5\\nmae,1.0\\n"
    """
    texts = table.map(_harmless).rename(columns=_harmless)
    return texts.to_csv(index=False, lineterminator="\n").encode("utf-8", "backslashreplace")


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
