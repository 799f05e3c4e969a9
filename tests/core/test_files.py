"""Locks that one process at a time holds, and files that are written whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sightline.core.errors import InputError
from sightline.core.files import locked, write_atomically

HOLD = """
import sys, time
from pathlib import Path
from sightline.core.files import locked
with locked(Path(sys.argv[1])) as mine:
    print("held" if mine else "not held", flush=True)
    time.sleep(60)
"""


def test_one_holds_what_another_cannot_have(tmp_path: Path) -> None:
    file = tmp_path / "steps" / "a.lock"
    with locked(file) as mine:
        assert mine
        with locked(file) as again:
            assert not again
        with locked(file) as again:
            assert not again, "who did not get it has given it back"
    with pytest.raises(ZeroDivisionError), locked(file):
        1 / 0  # noqa: B018
    with locked(file) as mine:
        assert mine


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "a.lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with locked(tmp_path / "a.lock") as mine:
        assert not mine
    process.kill()
    process.wait()
    process.stdout.close()
    with locked(tmp_path / "a.lock") as mine:
        assert mine


def test_a_file_of_the_same_name_is_neither_emptied_nor_followed(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("someone's")
    with locked(tmp_path / ".lock") as mine:
        assert mine
    assert (tmp_path / ".lock").read_text() == "someone's"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(InputError, match=r"there is a link, which is not followed"), locked(tmp_path / "run" / ".lock"):
        pytest.fail("it was followed")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="a file stands where a folder is needed"),
        locked(tmp_path / "file" / "run" / ".lock"),
    ):
        pytest.fail("it was made")


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, running, other = (tmp_path / f".a.nc.{n}-0123abcd.tmp" for n in (ended.pid, os.getppid(), "x"))
    for draft in (left, running, other):
        draft.write_bytes(b"half of")
    write_atomically(tmp_path / "a.nc", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.nc", running.name, other.name])
