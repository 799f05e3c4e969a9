"""Results as tables for other programs: one row per number, its coordinates in columns."""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import xarray as xr

from sightline.core.errors import InputError
from sightline.core.files import replacing, write_atomically
from sightline.core.folders import begin, holds, refuse_links
from sightline.core.results import ABSENT
from sightline.core.run_folder import Run
from sightline.core.tables import csv


def export_run(run: Run, format: str, folder: Path | None = None) -> list[Path]:
    """Write every result of a run as `csv`, `parquet` or `netcdf` and return the files."""
    if run.path is None:
        raise InputError("The run is in memory only; use run['cka'].to_dataframe(), or analyze(..., out=FOLDER)")
    if not run.names():
        raise InputError(f"{str(run.path)!r} has no finished analysis to export; finish it with `sightline compare`")
    folder = folder or run.path / "export"
    endings = {"netcdf": "nc"}
    parts = {name: [name] if format == "netcdf" else list(_parts(run[name], name)) for name in run}
    written = [folder / f"{part}.{endings.get(format, format)}" for of in parts.values() for part in of]
    if folder == run.path / "export":
        refuse_links(run.path)
    else:
        _mark(folder, written)
    for name in run:
        if format == "netcdf":
            write_atomically(folder / f"{name}.nc", (run.path / "results" / f"{name}.nc").read_bytes())
            continue
        for part, table in tables(run[name], name).items():
            with replacing(folder / f"{part}.{format}") as temporary:
                if format == "csv":
                    temporary.write_bytes(csv(table))
                else:
                    table.to_parquet(temporary, index=False)
    return written


def _mark(folder: Path, files: Sequence[Path]) -> None:
    """Make it a folder of tables, among whose files others may lie, but none of these names."""
    if not holds(folder, "tables", among=True) and (there := [file for file in files if os.path.lexists(file)]):
        raise InputError(
            f"{str(there[0])!r} already exists, and Sightline did not write it; move it away or choose another folder"
        )
    begin(folder, "tables", among=True)


def tables(result: xr.Dataset, name: str) -> dict[str, pd.DataFrame]:
    """Variables that share their axes share a table; the largest one has the name of the analysis.

    Rows where all numbers are missing because an encoder has no such site are left out; `reason` tells of the others.
    Pictures (uint8), which the report shows, and their notes are in the NetCDF file only.
    """
    frames = {}
    for part, variables in _parts(result, name).items():
        frame = result[variables].to_dataframe().reset_index()
        if numbers := [v for v in variables if result[v].dtype.kind == "f"]:
            reasons = frame[[v for v in variables if v.endswith("reason")]]
            frame = frame[frame[numbers].notna().any(axis=1) | ~reasons.isin(["", ABSENT]).all(axis=1)]
        frames[part] = frame
    return frames


def _parts(result: xr.Dataset, name: str) -> dict[str, list[str]]:
    """The names of tables, and the variables of each."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for variable, values in result.data_vars.items():
        if values.dtype == "uint8" or str(variable).startswith("picture_"):
            continue
        groups.setdefault(tuple(map(str, values.dims)), []).append(str(variable))
    largest = max(groups, key=lambda dims: result[groups[dims][0]].size)
    return {name if dims == largest else f"{name}-{variables[0]}": variables for dims, variables in groups.items()}
