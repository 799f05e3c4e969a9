"""The run folder: what was asked, results, figures, report. Written atomically, so that it can be resumed.

RUN/run.json              what was asked and of what, versions, timings
RUN/results/cka.nc        one NetCDF file per analysis
RUN/groups/cka.nc         sums over groups of images, for intervals of differences, see groups/
RUN/figures/              every figure as SVG, PDF and CSV
RUN/report.html
RUN/cache/                features and the state of an interrupted pass; may be deleted
RUN/.sightline.json       what kind of folder it is, see folders.py
"""

from __future__ import annotations

import importlib
import json
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.core import plugins
from sightline.core.contrast import Contrast, Estimate, contrast, estimate
from sightline.core.errors import InputError, nearest
from sightline.core.files import is_file, read_json, write_atomically
from sightline.core.folders import STUDIES, begin, holds
from sightline.core.groups import Measured
from sightline.core.notebook import card, fold, rows, shortened
from sightline.core.selection import Where

if TYPE_CHECKING:
    import xarray as xr


MOST_NUMBERS = 100_000  # of a variable whose replicates are computed without being named


class Run(Mapping[str, "xr.Dataset"]):
    """Results by the name of their analysis, `run["cka"]`; with a path they live in a folder, without in memory."""

    def __init__(self, path: Path | None, request: dict[str, Any] | None = None, replaces: bool = False) -> None:
        self.path, self._replaces = path, replaces
        self.request: dict[str, Any] = request or {}
        self._results: dict[str, xr.Dataset] = {}
        self._kept: dict[str, xr.Dataset] = {}

    def names(self) -> list[str]:
        on_disk = [] if self.path is None else [file.stem for file in (self.path / "results").glob("*.nc")]
        return sorted({*self._results, *on_disk})

    def __getitem__(self, name: str) -> xr.Dataset:
        if name not in self._results:
            if name not in self.names():
                raise InputError(f"The run has no result {name!r}{nearest(name, self.names())}")
            self._results[name] = _read(self.file(name))
        return self._results[name]

    def measured(self, name: str) -> Measured:
        """A result with what is kept beside it, which contrasts are computed from."""
        result = self[name]
        if name not in self._kept and self.path is not None and self.kept_file(name).is_file():
            kept = _read(self.kept_file(name))
            if kept.attrs.get("fingerprint") == result.attrs.get("fingerprint"):
                self._kept[name] = kept
        return Measured(name, result, self._kept.get(name))

    def replicates(self, name: str) -> xr.Dataset:
        """The numbers of a result with what they are without each group of images: `run.replicates("knn").accuracy`.

        One more axis, `left_out`: nothing, then each group. `sl.interval` of anything computed from them has its ends.
        A single variable is named as in "cka.cka", which among all pairs of layers is computed only if it is asked for.
        """
        import xarray as xr

        analysis, _, variable = name.partition(".")
        measured = self.measured(analysis)
        names = [measured.chosen(variable)] if variable else measured.variables
        few = [one for one in names if variable or measured.table[one].size <= MOST_NUMBERS]
        return xr.Dataset({one: measured.replicates(one) for one in few if measured.rule(one) is not None})

    def contrast(self, name: str, this: Where, that: Where | float = 0.0, **more: Any) -> Contrast:
        """`sl.contrast` of this run: `run.contrast("knn.accuracy", {"encoder": "dino"}, {"encoder": "mae"}, …)`."""
        return contrast(self, name, this, that, **more)

    def estimate(self, name: str, where: Where | None = None, **more: Any) -> Estimate:
        return estimate(self, name, where, **more)

    def figure(self, name: str, figure: str | None = None) -> Any:
        """A figure of the page of an analysis as an Altair chart, the first one or that of a name: `run.figure("cka")`.

        `run.figure("cka", "depth")` is what `figures/cka-depth.svg` shows.
        """
        return _page().chart(self, name, figure)

    def report(self, show: bool = True) -> Path:
        """Write the report if it is not there or older than a result, open it in the browser, and give its path."""
        page: Path = _page().page_of(self)
        if show:
            webbrowser.open(page.absolute().as_uri())
        return page

    def _repr_html_(self) -> str:
        encoders = [str(encoder["name"]) for encoder in self.request.get("encoders", [])]
        images = self.request.get("images", {})
        splits = ", ".join(f"{count} {split}" for split, count in images.get("splits", {}).items())
        page = None if self.path is None else self.path / "report.html"
        facts = {
            "encoders": shortened(encoders),
            "images": f"{images['name']} ({splits})" if images else "",
            "results": shortened(self.names(), 30) or "none",
            "report": page if page is not None and page.is_file() else "",
        }
        where = "in memory" if self.path is None else str(self.path)
        return card(f"Run {where}", facts, *(_headlines(name, self[name]) for name in self))

    def get(self, name: str, default: Any = None) -> Any:
        """The result of an analysis, or `default` if it is not there."""
        return self[name] if name in self.names() else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __repr__(self) -> str:
        return f"Run({'in memory' if self.path is None else str(self.path)!r}, results: {', '.join(self) or 'none'})"

    def finished(self, name: str, key: str) -> bool:
        """Whether a result is there that answers exactly this question (encoders, images, settings)."""
        if not self._replaces and name in self.names() and self[name].attrs.get("fingerprint") == key:
            return True
        self._results.pop(name, None)  # the answer to another question, read just now
        self._kept.pop(name, None)
        return False

    def begin(self, anew: bool = False) -> None:
        """The question is sound and the pass starts: write down what was asked, clear away the run it replaces."""
        if self.path is not None:
            begin(self.path, _kind(self.request), anew=anew or self._replaces)
        self._replaces = False
        self.save_request()

    def save(self, name: str, result: xr.Dataset, kept: xr.Dataset | None = None) -> None:
        """Keep a result, on disk too if the run has a folder; a partial file is never seen under its name."""
        self._results[name] = result
        if kept is not None:
            self._kept[name] = kept = kept.assign_attrs(fingerprint=result.attrs.get("fingerprint", ""))
        if self.path is not None:
            # What is kept comes first: a result that is there is finished.
            for file, dataset in ((self.kept_file(name), kept), (self.file(name), result)):
                if dataset is not None:
                    self._write(file, _netcdf(dataset))

    def save_request(self) -> None:
        if self.path is not None:
            self._write(self.path / "run.json", json.dumps(self.request, indent=2).encode())

    def _write(self, file: Path, content: bytes) -> None:
        assert self.path is not None
        begin(self.path, _kind(self.request))
        write_atomically(file, content)

    def file(self, name: str) -> Path:
        """Where a result is, or will be."""
        assert self.path is not None
        return self.path / "results" / f"{name}.nc"

    def kept_file(self, name: str) -> Path:
        """Where the sums over groups of images are, or will be."""
        assert self.path is not None
        return self.path / "groups" / f"{name}.nc"


def _page() -> Any:
    """The report, which stands above this room: by its name when it is used, as plugins are."""
    return importlib.import_module("sightline.report.page")


def _headlines(name: str, result: xr.Dataset) -> str:
    """What an analysis says of its result in short, folded; nothing where its plugin is gone."""
    try:
        plugin = plugins.module_of(name)
        return fold(plugin.TITLE, rows([], [list(map(str, line)) for line in plugin.headlines(result)]))
    except InputError:
        return ""


def open_run(path: str | Path) -> Run:
    """A finished or interrupted run: `open_run("runs/x")["cka"].cka.to_series()`."""
    path = Path(path)
    if is_file(path / "study.json"):
        raise InputError(f"{str(path)!r} is a study, not a run; sl.open_study opens it, and its runs are in its steps")
    if not is_file(path / "run.json"):
        raise InputError(f"{str(path)!r} is not a run folder: it has no run.json; give the folder passed to -o")
    mend = "restore it from a copy, or measure again into another folder"
    request = read_json(path / "run.json", dict, mend)
    try:
        [encoder["name"] for encoder in request.get("encoders", [])]
    except (KeyError, TypeError) as error:
        raise InputError(f"{str(path / 'run.json')!r} is damaged; {mend}") from error
    return Run(path, request)


def plan_run(path: Path | None, request: dict[str, Any], overwrite: bool = False) -> Run:
    """The run of a folder if it holds the same comparison, a new one if there is none; another one's folder is refused.

    Nothing is written before `begin`.
    """
    if path is None or not holds(path, _kind(request)):
        return Run(path, request)
    if not (path / "run.json").exists():  # a kill has left it so, before it was written or while it was replaced
        if any((path / "results").glob("*.nc")) and not overwrite:
            raise InputError(f"{str(path)!r} has results, but no run.json; pass --overwrite to replace them")
        return Run(path, request, replaces=True)
    old = open_run(path)
    other = [key for key in ("encoders", "images", "settings") if old.request.get(key) != _plain(request[key])]
    before, after = old.request.get("analyses", {}), _plain(request["analyses"])
    done = [name for name in after if name in before and name in old.names()]
    changed = [f"sites or settings of {name}" for name in done if before[name] != after[name]]
    if (other or changed) and not overwrite:
        raise InputError(
            f"{str(path)!r} holds a run with other {' and '.join(other + changed)}; choose another folder, or pass "
            f"--overwrite to replace {'it' if other else 'these results, and no others'}"
        )
    if other:
        return Run(path, request, replaces=True)
    old.request["analyses"] = {**old.request.get("analyses", {}), **request["analyses"]}
    earlier = {name: why for name, why in old.request.get("left_out", {}).items() if name not in request["analyses"]}
    if "left_out" in old.request or "left_out" in request:  # a study has none
        old.request["left_out"] = earlier | request.get("left_out", {})
    return old


def _kind(request: Mapping[str, Any]) -> str:
    """As .sightline.json has it."""
    kind = request.get("kind")
    return str(kind) if kind in STUDIES else "comparison"


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def _read(path: Path) -> xr.Dataset:
    import xarray as xr

    try:
        with xr.open_dataset(path, engine="h5netcdf") as result:
            return result.load()
    except Exception as error:  # h5py raises whatever it likes on a damaged file
        raise InputError(f"Cannot read {str(path)!r}: {error}; delete the file to compute it again") from error


def _netcdf(dataset: xr.Dataset) -> bytes:
    """As a file holds it, by way of memory: where the disk is full, HDF5 may crash when it closes its own file.

    The view that xarray returns ends here: one that an exception keeps alive crashes Python 3.12 at its end.
    """
    return bytes(dataset.to_netcdf(engine="h5netcdf", encoding=_compressed(dataset)))


def _compressed(result: xr.Dataset) -> dict[str, dict[str, Any]]:
    return {
        str(name): {"zlib": True, "complevel": 4}
        for name, values in result.data_vars.items()
        if values.dtype.kind in "fu" and values.size > 1000
    }
