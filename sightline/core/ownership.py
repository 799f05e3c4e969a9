"""Which files of a folder are Sightline's own: it replaces and removes these, and no others.

RUN/.sightline.json lists them. A name is written there before its file is, so that a process that is killed in between
leaves a name without a file, which does no harm, and never a file without a name. A folder without a list, or with that
of another kind of run, is refused, and so is a link inside of a run: what it points to is not ours.

Runs of versions that kept no list are recognised by what their run.json says. They can go on, which replaces files by
their successors of the same name; to replace them as a whole is refused, because nobody knows what else is in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sightline.core.errors import InputError, first_line
from sightline.core.files import LOCK, alone, explain, replacing, unfinished, write_atomically

LIST = ".sightline.json"
FORMAT = 1  # of the list
STUDIES = ("detection", "rcdm", "reinit", "segmenters")  # runs that are made of trainings
FOLDER_KINDS = {  # as sentences have them
    "comparison": "a comparison",
    "detection": "a comparison of detectors",
    "rcdm": "pictures from representations",
    "reinit": "a study of re-initialised blocks",
    "segmenters": "a comparison of segmenters",
    "study": "a study",
    "tables": "exported tables",
    "training": "a training",
    "watch": "a watched training",
}


@dataclass(frozen=True)
class _Owned:
    """What a list says.

    Names are relative to its folder. One that ends in / is a whole folder, which is temporary; of a file that begins
    with * only the ending was known before it was written, which is random and thereby nobody else's.
    """

    kind: str
    files: frozenset[str] = frozenset()
    earlier: bool = False  # begun by a version that kept no list, so that some of its files are missing here


def holds(folder: Path, kind: str, among: bool = False) -> bool:
    """Whether a folder is of this kind; False where it may become so, and a sentence where it may not.

    `among`: what is written there may lie among the files of others.
    """
    found = _look(folder)
    if found is None:
        if os.path.lexists(folder) and (not folder.is_dir() or (_occupied(folder) and not among)):
            raise InputError(
                f"{str(folder)!r} is not a run folder: Sightline did not write what is in it; choose a new folder"
            )
        return False
    if found.kind != kind:
        raise InputError(
            f"{str(folder)!r} holds {FOLDER_KINDS[found.kind]}, not {FOLDER_KINDS[kind]}; choose another folder"
        )
    return True


def remains(folder: Path) -> bool:
    """Whether any of the listed files is still there."""
    found = _look(folder)
    return found is not None and any(os.path.lexists(folder / name) for name in found.files)


def replaceable(folder: Path) -> None:
    """Refuse a folder that cannot be replaced as a whole: a run without a complete list, or one with links in it."""
    if (found := _look(folder)) is not None:
        _whole(folder, found)


def begin(folder: Path, kind: str, *, anew: bool = False, among: bool = False) -> None:
    """Make a folder one of this kind, or go on in one; `anew` first removes all that is listed there."""
    if not holds(folder, kind, among):
        _update(folder, _Owned(kind))
    elif anew and (found := _look(folder)) is not None:
        _remove(folder, found, _whole(folder, found))


def claim(folder: Path, *paths: Path) -> None:
    """List files that are about to be written; what is there without being listed is someone else's."""
    home, owned = _home(folder)
    new = {_name(home, path) for path in paths} - owned.files
    for name in sorted(new):
        if os.path.lexists(home / name) and not owned.earlier:
            raise InputError(
                f"{str(home / name)!r} already exists, and Sightline did not write it; move it away or choose "
                "another folder"
            )
    if new:
        _update(home, owned, add=new)


def write(folder: Path, path: Path, content: bytes) -> None:
    """Write a file of a run, whole or not at all."""
    with writing(folder, path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def writing(folder: Path, path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it becomes a file of the run only if all went well."""
    claim(folder, path)
    with replacing(path) as temporary:
        yield temporary


@contextlib.contextmanager
def new_folder(run: Path, folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it takes the place of `folder`, whole or not at all; its files are listed."""
    with _draft(run, folder) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        files = [folder / path.name for path in temporary.iterdir()]
        remove(run, folder, *files)  # of a training that was killed and comes here again
        claim(run, *files)
        if folder.is_dir():  # with files of others
            for file in files:
                os.replace(temporary / file.name, file)
        else:
            os.replace(temporary, folder)


def bring(run: Path, source: Path, folder: Path) -> None:
    """Take over a finished run from elsewhere to below this one, whole or not at all; both share its weights."""
    claim(run, folder / LIST)
    with _draft(run, folder) as temporary:
        shutil.copytree(source, temporary, copy_function=_link, ignore=shutil.ignore_patterns(LOCK))
        os.replace(temporary, folder)


def _link(source: str, target: str) -> None:
    """A copy; of weights, which are replaced as a whole and never changed, the same file by another name."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # a file system without such links
            os.link(source, target)
            return
    shutil.copy2(source, target)


@contextlib.contextmanager
def _draft(run: Path, folder: Path) -> Iterator[Path]:
    """A temporary folder, listed until it is gone."""
    home, owned = _home(run)
    _remove(home, owned, [name for name in owned.files if name.endswith("/")])  # left by a process that was killed
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    drafted = f"{_name(home, temporary)}/"
    _update(home, owned, add={drafted})
    try:
        yield temporary
    except OSError as error:
        raise InputError(explain(error, folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _update(home, owned, drop={drafted})


def remove(folder: Path, *paths: Path, keep: Path | None = None) -> None:
    """Remove files of a run, or all that is listed below a folder in it but not below `keep`; empty folders go, too."""
    home, owned = _home(folder)
    names, spared = [_name(home, path) for path in paths], "" if keep is None else f"{_name(home, keep)}/"
    listed = {file for file in owned.files for name in names if file == name or file.startswith(f"{name}/")}
    listed = {file for file in listed if not spared or not file.startswith(spared)}
    _remove(home, owned, listed.union(names) if owned.earlier else listed)


# ---------------------------------------------------------------------------------------------------------------


def _look(folder: Path) -> _Owned | None:
    """What is known of a folder, from its list or, of an earlier version, from its run.json."""
    path = folder / LIST
    try:
        about = json.loads(path.read_text("utf-8"))
        names = frozenset(map(str, about["files"]))
        if about["format"] != FORMAT or about["kind"] not in FOLDER_KINDS:
            raise ValueError("another version of Sightline wrote it")
        if not all(map(_sound, names)):
            raise ValueError("it names files that Sightline cannot have written there")
        return _Owned(about["kind"], names, bool(about["earlier"]))
    except (FileNotFoundError, NotADirectoryError):
        kind = _earlier_kind(folder)
        return None if kind is None else _Owned(kind, earlier=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"Cannot read {str(path)!r}, the list of what Sightline has written there: {first_line(error)}; "
            "choose another folder"
        ) from error


def _sound(name: str) -> bool:
    """Whether we can have listed a name: it lies below the folder, and a whole folder or a * has a random ending."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    if name.endswith("/"):
        return re.fullmatch(r"\..+\.\d+-[0-9a-f]{8}\.tmp", path.name) is not None
    return "*" not in name or re.fullmatch(r"[^*]*\*\.[0-9a-f]{16}", name) is not None


def _earlier_kind(folder: Path) -> str | None:
    """The kind of a run without a list; a run.json of any other program says something else than all of this."""
    try:
        about = json.loads((folder / "run.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or not {"versions", "machine", "command", "date", "images"} <= about.keys():
        return None
    if not isinstance(about["versions"], dict) or not {"python", "torch", "timm"} <= about["versions"].keys():
        return None
    if about.get("kind") in ("pretrain", "finetune"):
        return "training" if "recipe" in about and (folder / "recipe.toml").is_file() else None
    if not {"encoders", "settings", "analyses"} <= about.keys():
        return None
    return {"reinit": "reinit", None: "comparison"}.get(about.get("kind"))


def _home(folder: Path) -> tuple[Path, _Owned]:
    """The run that a folder is or lies in, such as the one of a tokenizer, and what is known of it."""
    for home in (folder, *folder.parents):
        if (found := _look(home)) is not None:
            return home, found
    holds(folder, "training")
    return folder, _Owned("training")


def _occupied(folder: Path) -> bool:
    """Whether anything is in a folder but the lock and its list, or what kills have left of writing that."""
    return bool({*folder.iterdir()} - {folder / LOCK, folder / LIST, *unfinished(folder / LIST)})


def _name(home: Path, path: Path) -> str:
    """How a list names a file; no link may lie on the way to it, nor be there instead."""
    name = path.relative_to(home)
    for place in (path, *path.parents[: len(name.parts) - 1]):
        if place.is_symlink():
            raise InputError(
                f"{str(place)!r} is a link, and Sightline does not follow links inside a run folder; "
                "move what it points to here, or choose another folder"
            )
    return name.as_posix()


def _whole(folder: Path, owned: _Owned) -> frozenset[str]:
    """All that a list names, also in the runs below; a sentence if it does not name all, or if there are links."""
    if owned.earlier:
        raise InputError(
            f"{str(folder)!r} is from a version of Sightline that kept no list of its files, so that none of them can "
            "be removed safely; remove the folder yourself, or choose another one"
        )
    for name in owned.files:
        _name(folder, folder / name)
        if (inner := _inner(folder, name)) is not None:
            _whole(*inner)
    return owned.files


def _inner(home: Path, name: str) -> tuple[Path, _Owned] | None:
    """The run below that a listed name stands for: the name is that of its list."""
    folder = (home / name).parent
    if PurePosixPath(name).name != LIST or not (folder / LIST).is_file():
        return None
    found = _look(folder)
    return None if found is None else (folder, found)


def _remove(home: Path, owned: _Owned, names: Iterable[str]) -> None:
    """Those near the top first: what points to other files goes before these."""
    names = sorted(names, key=lambda name: (name.count("/"), name))
    for name in list(names):
        _name(home, home / name)
        if (inner := _inner(home, name)) is not None:
            _remove(*inner, _whole(*inner))
            if _occupied(inner[0]):  # by files of others, among which the run below may begin again
                names.remove(name)
    try:
        for path in [*unfinished(home / LIST), *(path for name in names for path in _files(home, name))]:
            if not path.is_dir():
                path.unlink(missing_ok=True)
        for path in (home / name for name in names if name.endswith("/")):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise InputError(explain(error, path)) from error
    for name in names:
        for folder in (home / name).parents[: name.rstrip("/").count("/")]:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
    if names:
        _update(home, owned, drop=set(names))


def _files(home: Path, name: str) -> list[Path]:
    """The files that a name stands for, and what kills have left of writing them."""
    path = home / name
    if path.name.startswith("*"):
        return list(path.parent.glob(path.name))
    return [path, *unfinished(path)]


def _update(
    folder: Path, owned: _Owned, add: AbstractSet[str] = frozenset(), drop: AbstractSet[str] = frozenset()
) -> None:
    """Change the list of a folder, which is `owned` if there is none; another process may be at it, too."""
    with alone(folder):
        known = _look(folder) or owned
        about = {
            "format": FORMAT,
            "kind": known.kind,
            "earlier": known.earlier,
            "files": sorted((known.files | add) - drop),
        }
        write_atomically(folder / LIST, json.dumps(about, indent=1).encode())
