"""A run folder has one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sightline.core.errors import InputError
from sightline.core.files import lock, write_atomically

HOLD = """
import sys, time
from pathlib import Path
from sightline.core.files import lock
held = lock(Path(sys.argv[1]))
"""


def test_a_locked_folder_is_free_again_when_the_lock_is_closed(tmp_path: Path) -> None:
    with lock(tmp_path / "run"), pytest.raises(InputError, match=r"Another process is working in .*run"):
        lock(tmp_path / "run")
    lock(tmp_path / "run").close()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + "print('held', flush=True); time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="Another process"):
        lock(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    lock(tmp_path).close()


def test_a_file_of_the_same_name_is_neither_emptied_nor_followed(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("someone's")
    lock(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == "someone's"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(InputError, match=r"there is a link, which is not followed"):
        lock(tmp_path / "run")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file stands where a folder is needed"):
        lock(tmp_path / "file" / "run")


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, running, other = (tmp_path / f".a.nc.{n}-0123abcd.tmp" for n in (ended.pid, os.getppid(), "x"))
    for draft in (left, running, other):
        draft.write_bytes(b"half of")
    write_atomically(tmp_path / "a.nc", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.nc", running.name, other.name])
