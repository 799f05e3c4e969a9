"""Writing files so that an interruption, a full disk or a missing permission never leaves half of one."""

import contextlib
import errno
import json
import os
import re
import reprlib
import secrets
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from sightline.core.errors import InputError, first_line

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # in a folder that one process at a time may write to; the file stays
Json = TypeVar("Json", dict[str, Any], list[Any])


def file_name(text: str) -> str:
    """A name as files and folders may have it.

    >>> file_name("facebook/vit (2)")
    'facebook-vit-2-'
    """
    return re.sub(r"[^\w.-]+", "-", text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; it takes the place of `path` only if all went well."""
    temporary = _draft(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for draft in drafts(path.parent, path.name):
            if abandoned(draft):
                draft.unlink(missing_ok=True)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(explain(error, path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; if all went well it becomes `folder`, or its files join those that are there."""
    temporary = _draft(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.is_dir():
            for file in temporary.iterdir():
                os.replace(file, folder / file.name)
        else:
            os.replace(temporary, folder)
    except OSError as error:
        raise InputError(explain(error, folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def drafts(folder: Path, name: str | None = None) -> list[Path]:
    """What `replacing` is writing in a folder, to this name or to any, or has left there when it was killed."""
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        return [file for file in folder.iterdir() if pattern.fullmatch(file.name)]
    return []


def abandoned(draft: Path) -> bool:
    """Whether the process that has written a draft, NAME.PID-RANDOM.tmp, is gone, as far as this machine can tell."""
    number = re.search(r"\.(\d+)-[0-9a-f]{8}\.tmp$", draft.name)
    if number is None or fcntl is None:
        return False
    if int(number[1]) == os.getpid():  # of an earlier process: in a container they often have the same number
        return True
    try:
        os.kill(int(number[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # it runs, but is someone else's
        pass
    return False


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Hold a lock until the block or this process ends, in any way; False if another process holds it."""
    held, mine = FileLock(file), True
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=0)
    except Timeout:
        mine = False
    except OSError as error:
        raise InputError(explain(error, file)) from error
    try:
        yield mine
    finally:
        held.release()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def read_json(path: Path, kind: type[Json], otherwise: str) -> Json:
    """What a JSON file holds, a dict or a list; `otherwise` says what to do where it cannot be read."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"Cannot read {str(path)!r}: {_reason(error)}; {otherwise}") from error
    if not isinstance(content, kind):
        raise InputError(f"Cannot read {str(path)!r}: it holds another kind of data than Sightline writes; {otherwise}")
    return content


def read_text(path: Path, what: str) -> str:
    """What a text file holds; `what` it is stands in the sentence where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except ValueError as error:
        raise InputError(f"Cannot read the {what} {str(path)!r}: it is no text in UTF-8; save it so") from error
    except OSError as error:
        raise InputError(f"Cannot read the {what} {str(path)!r}: {_reason(error)}") from error


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """What a TOML file holds; `what` it is stands in the sentence where it cannot be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"Cannot read the {what} {str(path)!r}: {_reason(error)}") from error


@contextlib.contextmanager
def naming_files(given: str) -> Iterator[None]:
    """What cannot be the name of a file, being too long, is a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise InputError(f"{reprlib.repr(given)} is too long to be the name of a file or folder") from error


def is_file(path: Path) -> bool:
    """Whether there is such a file; what cannot be the name of one, being too long, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.strerror or first_line(error) if isinstance(error, OSError) else first_line(error)


def user_cache() -> Path:
    """Where what is known of this machine and its files is remembered; RuntimeError where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "sightline"


def explain(error: OSError, path: Path) -> str:
    """One sentence for what the operating system refused."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"The disk is full: cannot write {str(path)!r}; free some space or choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"No permission to write {str(path)!r}; choose another folder"
        case errno.ELOOP:
            return f"Cannot write {str(path)!r}: there is a link, which is not followed; choose another folder"
        case errno.ENAMETOOLONG:
            return f"Cannot write {str(path)!r}: the name is too long; choose a shorter one"
        case errno.ENOTDIR | errno.EEXIST:
            return f"Cannot write {str(path)!r}: a file stands where a folder is needed; choose another folder"
    return f"Cannot write {str(path)!r}: {error.strerror or error}"
