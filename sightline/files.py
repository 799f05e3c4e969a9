"""Writing files so that an interruption, a full disk or a missing permission never leaves half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from sightline.errors import InputError

__all__ = ["replacing", "write_atomically"]


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
