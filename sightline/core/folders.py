"""The folders that Sightline writes.

RUN/.sightline.json says of which kind a folder is, {"kind": "training", "format": 1}. A folder that has files and not
this one is someone else's, and is refused. What a kind of folder consists of, its names tell (PATTERNS): to start over
removes the files of these names, then folders that are empty, and leaves all else where it is. Links inside of a run
are not followed.
"""

import contextlib
import glob
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from sightline.core import plugins
from sightline.core.errors import InputError, some
from sightline.core.files import LOCK, drafts, explain, file_name, read_json, write_atomically
from sightline.core.progress import console
from sightline.core.version import FORMAT

MARK = ".sightline.json"
LATEST = "latest.json"
KINDS = {  # as sentences have them
    "comparison": "a comparison",
    "detection": "a comparison of detectors",
    "first": "what a training needs first",
    "rcdm": "pictures from representations",
    "reinit": "a study of re-initialised blocks",
    "segmenters": "a comparison of segmenters",
    "study": "a study",
    "tables": "exported tables",
    "training": "a training",
    "watch": "a watched training",
}
STUDIES = ("detection", "rcdm", "reinit", "segmenters")  # runs that are made of trainings

# Names of files, by kind of folder: `_files` puts in what NAME and ENCODER stand for.
BOARD = "tensorboard/events.out.tfevents.*.sightline"
EXPORTED = (  # what is loaded from a checkpoint: of encoders, and of a diffusion model
    *(
        f"{part}.{ending}"
        for part in ("encoder", "decoder", "head", "conditions")
        for ending in ("json", "safetensors")
    ),
    *("config.json", "diffusion_pytorch_model.safetensors", "scheduler_config.json"),
)
CHECKPOINT = ("state.json", "training.safetensors", "optimizer.safetensors", *EXPORTED)
STEP = 8 * "[0-9]"
LOOP = (LATEST, "metrics.csv", BOARD, *(f"checkpoints/{STEP}/{name}" for name in CHECKPOINT))
TRAINING = ("run.json", "recipe.toml", "detections.json", "segments.npz")
FIGURES = tuple(
    f"figures/{name}.{ending}"
    for name in ("NAME-*", "overview-*", "paper-*", "[0-9][0-9][0-9]-fig-*", "[0-9][0-9][0-9]-table-*")
    for ending in ("svg", "pdf", "csv")
)
RUN = (
    *("run.json", "report.html", "results/NAME.nc", "groups/NAME.nc", "cache/pass-*-of-*.safetensors"),
    *(*FIGURES, "figures/NAME-pictures-[0-9]*.png"),
    *(f"export/{name}.{ending}" for name in ("NAME", "NAME-*") for ending in ("csv", "parquet", "nc")),
)
PATTERNS = {
    "comparison": RUN,
    "first": LOOP,
    "study": ("study.json", "report.html", "verdicts.csv", "verdicts.json", *FIGURES),
    "training": (*TRAINING, *LOOP, f"steps/{STEP}/encoder.json", f"steps/{STEP}/encoder.safetensors"),
    "watch": ("run.json", "metrics.csv", "start.safetensors", BOARD),
    **dict.fromkeys(STUDIES, (*RUN, "imagined/ENCODER.png")),
}
# Folders of a kind of their own that are parts of another.
PARTS = {
    "training": {"*": "first"},
    **{kind: {"trainings/ENCODER": "training", "trainings/ENCODER/*": "training"} for kind in STUDIES},
    "rcdm": {"training": "training"},
}


def holds(folder: Path, kind: str, *, among: bool = False) -> bool:
    """Whether a folder is of this kind; False where it may become so, and a sentence where it may not.

    `among`: what is written there may lie among the files of others.
    """
    known = _kind(folder)
    if known is None:
        if os.path.lexists(folder) and (not folder.is_dir() or (_occupied(folder) and not among)):
            raise InputError(
                f"{str(folder)!r} is not a run folder: Sightline did not write what is in it; choose a new folder"
            )
        return False
    if known != kind:
        raise InputError(f"{str(folder)!r} holds {KINDS[known]}, not {KINDS[kind]}; choose another folder")
    refuse_links(folder)
    return True


def begin(folder: Path, kind: str, *, anew: bool = False, among: bool = False) -> None:
    """Make a folder one of this kind, or go on in one; `anew` first removes what Sightline has written there."""
    if not holds(folder, kind, among=among):
        write_atomically(folder / MARK, json.dumps({"kind": kind, "format": FORMAT}).encode())
    elif anew:
        _clear(folder, kind)


def refuse_links(folder: Path) -> None:
    """Refuse a run with a link where Sightline writes: what that points to is someone else's."""
    kind = _kind(folder) or "comparison"
    ours = {name.partition("/")[0] for name in (LOCK, *PATTERNS.get(kind, ()), *PARTS.get(kind, ()))}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in ours:
            _refuse_link(path)


def remove_checkpoints(run: Path, keep: Path | None, also: Collection[str] = ()) -> None:
    """Remove all checkpoints of a training but one, and what kills have left; `also` are more names of their files."""
    for folder in sorted((run / "checkpoints").glob(STEP)) if keep is not None else ():
        if folder != keep and not folder.is_symlink():
            _remove(run, [folder / name for name in {*CHECKPOINT, *also}])
    _remove(run, [*drafts(run / "checkpoints"), *drafts(run / "steps")])


def latest(run: Path) -> Path | None:
    """Folder of the newest whole checkpoint of a run, None before the first."""
    if not (run / LATEST).exists():
        return None
    name = read_json(run / LATEST, dict, "restore it or start over").get("checkpoint")
    if not re.fullmatch(r"\d{8,}", str(name)):  # and no way out of the folder
        raise InputError(f"Cannot read {str(run / LATEST)!r}: it names no checkpoint; restore it or start over")
    folder = run / "checkpoints" / str(name)
    if not (folder / "state.json").is_file():
        raise InputError(f"{str(run / LATEST)!r} names the checkpoint {folder.name}, which is not there; start over")
    return folder


def kept_steps(folder: Path) -> dict[int, Path]:
    """Where the encoder is at each step that a training was told to keep."""
    if not folder.is_dir():
        raise InputError(f"There is no run folder {str(folder)!r}; give that of a training, as given to its -o")
    kept = {int(path.name): path for path in sorted((folder / "steps").glob("[0-9]*")) if path.name.isdecimal()}
    if not kept:
        raise InputError(f"No steps are kept in {str(folder)!r}; train with --set keep=log, or keep=10 for ten points")
    return kept


def _kind(folder: Path) -> str | None:
    """What .sightline.json says; None where there is none."""
    path = folder / MARK
    if not path.is_file():
        return None
    about = read_json(path, dict, mend := "choose another folder")
    if about.get("format") != FORMAT or about.get("kind") not in KINDS:
        raise InputError(f"{str(path)!r} is of another version of Sightline, or damaged; {mend}")
    return str(about["kind"])


def _occupied(folder: Path) -> bool:
    """Whether anything is in a folder but the lock, or what kills have left of beginning there."""
    return bool({*folder.iterdir()} - {folder / LOCK, folder / MARK, *drafts(folder, MARK)})


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            f"{str(path)!r} is a link, and Sightline does not follow links inside a run folder; "
            "move what it points to here, or choose another folder"
        )


def _clear(folder: Path, kind: str) -> None:
    """Remove what Sightline has written, and say in a line what else is there.

    The way to checkpoints goes first and run.json last, so that a kill leaves a run that has less, and nothing wrong.
    """
    homes = list(_homes(folder, kind))
    found = {path for home, of in homes for path in _files(home, of)}
    _remove(folder, sorted(found, key=lambda path: (path.name == "run.json", path.name != LATEST, path)))
    for home, _ in reversed(homes[1:]):
        if not _occupied(home):
            _remove(folder, [home / LOCK, home / MARK])
    kept = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in kept if path.name not in (MARK, LOCK))
    if left := sorted(name for name in names if not name.startswith("cache/")):
        console().print(f"Left in {folder}, since Sightline did not write it: {some(left, 10)}", soft_wrap=True)


def _homes(folder: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """A folder and those inside that are parts of it, with their kinds."""
    yield folder, kind
    for pattern, inner in PARTS.get(kind, {}).items():
        for mark in _glob(folder, f"{pattern}/{MARK}"):
            if _kind(mark.parent) == inner:
                yield from _homes(mark.parent, inner)


def _files(home: Path, kind: str) -> Iterator[Path]:
    """Files with names that Sightline gives there, and what kills have left of writing them."""
    for pattern in PATTERNS[kind]:
        yield from _glob(home, pattern)
    for folder in {home, *home.glob("*/"), *home.glob("*/*/")}:
        yield from drafts(folder)


def _glob(home: Path, pattern: str) -> Iterator[Path]:
    """What has a name of this pattern; NAME is any analysis, ENCODER any encoder of the run."""
    word = next((word for word in ("NAME", "ENCODER") if word in pattern), "")
    names = {"": [""], "NAME": [*plugins.names("analyses"), *STUDIES, *_asked(home)[0]], "ENCODER": _asked(home)[1]}
    for name in dict.fromkeys(names[word]):
        yield from home.glob(pattern.replace(word, glob.escape(name)) if word else pattern)


def _asked(home: Path) -> tuple[list[str], list[str]]:
    """The analyses and the encoders of a run, as files are named after them."""
    try:
        about = read_json(home / "run.json", dict, "")
        return [*map(file_name, about["analyses"])], [file_name(encoder["name"]) for encoder in about["encoders"]]
    except (InputError, KeyError, TypeError):
        return [], []


def _remove(run: Path, paths: Iterable[Path]) -> None:
    """Remove files of a run, then the folders that are empty without them; nothing where a link is on the way."""
    paths = [path for path in paths if os.path.lexists(path)]
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(run) and folder != run}
    for path in (*folders, *paths):
        _refuse_link(path)
    try:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(explain(error, path)) from error
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
