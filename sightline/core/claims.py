"""A claim on a piece of work that other processes and other machines respect, through one small file.

    with claimed(folder / "step.lock") as mine:
        if mine: ...                   # nobody else does this meanwhile

The file gets its name by a hard link, which fails where the name is taken, on network file systems as well, where locks
of the kernel often do not hold: it is never seen half-written. It says who has it, and a thread touches it while the
work goes on. One that was not touched for ten minutes, or whose process is gone from this machine, was left by a kill:
it is taken over, by one only.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sightline.core.errors import InputError
from sightline.core.files import abandoned, explain

STALE = 600.0  # seconds without a sign of life
BEAT = 15.0  # seconds between two of them


@dataclass(frozen=True)
class Holder:
    """Who has claimed something."""

    host: str
    pid: int
    token: str
    silent: float  # seconds since the last sign of life

    @property
    def gone(self) -> bool:
        """Whether it was killed, as far as can be told from here."""
        return self.silent > STALE or (self.host == socket.gethostname() and not _alive(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def holder_of(path: Path) -> Holder | None:
    """Who has the claim of this file, None if nobody has."""
    try:
        silent = time.time() - path.stat().st_mtime
        about = json.loads(path.read_text("utf-8"))
        return Holder(str(about["host"]), int(about["pid"]), str(about["token"]), silent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or its process was killed meanwhile
        return Holder("?", 0, "", silent)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Claim a file for a while; False if someone else has it."""
    token = secrets.token_hex(8)
    if not _claim(path, token):
        yield False
        return
    _clear(path)
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, over), daemon=True)
    beating.start()
    try:
        yield True
    finally:
        over.set()
        beating.join()
        held = holder_of(path)
        if held is not None and held.token == token:  # else it was taken over, while this machine was asleep
            path.unlink(missing_ok=True)


def _claim(path: Path, token: str) -> bool:
    if _make(path, token):
        return True
    held = holder_of(path)
    if held is None:
        return _make(path, token)
    if not held.gone:
        return False
    # Several may see that it was left. The one who makes this file, which no later claim shares, may remove it.
    heir = path.with_name(f"{path.name}.{held.token}")
    if not _make(heir, token):
        if (other := holder_of(heir)) is not None and other.gone:  # killed in the middle of this
            heir.unlink(missing_ok=True)
        return False
    try:
        now = holder_of(path)
        if now is not None and now.token == held.token:
            path.unlink(missing_ok=True)
        return _make(path, token)
    finally:
        heir.unlink(missing_ok=True)


def _make(path: Path, token: str) -> bool:
    """Make a file that must not be there yet."""
    about = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": token}).encode()
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(about)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return _make_without_links(path, about)
    except OSError as error:
        raise InputError(explain(error, path)) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return True


def _make_without_links(path: Path, about: bytes) -> bool:
    """The same, but who looks in between sees an empty file."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with open(file, "wb") as opened:
        opened.write(about)
    return True


def _clear(path: Path) -> None:
    """Remove what those have left who were killed while they claimed this file, or took it over."""
    name = glob.escape(path.name)
    with contextlib.suppress(OSError):
        for draft in path.parent.glob(f".{name}.*.tmp"):
            if abandoned(draft):
                draft.unlink(missing_ok=True)
        for heir in path.parent.glob(f"{name}.*"):
            if (held := holder_of(heir)) is not None and held.gone:
                heir.unlink(missing_ok=True)


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is someone else's
        return True
    return True
