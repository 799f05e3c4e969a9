"""Writing files so that an interruption, a full disk or a missing permission never leaves half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sightline.errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["lock", "replacing", "write_atomically"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; it takes the place of `path` only if all went well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(explain(error, path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def lock(folder: Path) -> IO[str]:
    """Keep other processes out of a folder until what is given back is closed, or the process ends in any way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115 — it is the lock
    except OSError as error:
        raise InputError(explain(error, folder)) from error
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InputError(f"Another process is working in {str(folder)!r}; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
    return file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def explain(error: OSError, path: Path) -> str:
    """One sentence for what the operating system refused."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"The disk is full: cannot write {str(path)!r}; free some space or choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"No permission to write {str(path)!r}; choose another folder"
        case errno.ENOTDIR | errno.EEXIST:
            return f"Cannot write {str(path)!r}: a file stands where a folder is needed; choose another folder"
    return f"Cannot write {str(path)!r}: {error.strerror or error}"
