"""Claims: one at a time, over threads and processes, and those of the dead are taken over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sightline.core.claims import STALE, claimed, holder_of


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(path: Path, host: str, pid: int, silent: float = 0.0) -> None:
    path.write_text(json.dumps({"host": host, "pid": pid, "token": "left"}))
    os.utime(path, (time.time() - silent,) * 2)


def test_one_holds_what_another_cannot_have(tmp_path):
    path = tmp_path / "steps" / "a.lock"
    with claimed(path) as mine:
        held = holder_of(path)
        assert mine
        assert (held.pid, held.host, held.gone) == (os.getpid(), socket.gethostname(), False)
        with claimed(path) as again:
            assert not again
        assert path.exists(), "who did not get it does not give it back"
    assert not path.exists()
    assert holder_of(path) is None
    with claimed(path) as mine:
        assert mine


def test_it_is_given_back_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="no"), claimed(tmp_path / "a.lock"):
        raise ValueError("no")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "silent", "gone"),
    [("here", 0.0, True), ("there", 0.0, False), ("there", STALE / 2, False), ("there", STALE + 1, True)],
)
def test_what_a_kill_has_left_is_taken_over(tmp_path, host, silent, gone):
    path = tmp_path / "a.lock"
    leave(path, socket.gethostname() if host == "here" else "elsewhere", dead_process(), silent)
    with claimed(path) as mine:
        assert mine is gone
    assert path.exists() is not gone
    assert [file.name for file in tmp_path.iterdir()] == ([] if gone else ["a.lock"])


def test_a_lock_that_is_being_written_is_somebodys(tmp_path):
    path = tmp_path / "a.lock"
    path.write_text("")
    with claimed(path) as mine:
        assert not mine


KILLED = """
import os, signal, sys
from pathlib import Path
from sightline.core.claims import claimed

count = 0
def hook(event, arguments):
    global count
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.link", "os.remove"):
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
with claimed(path):
    pass
"""


@pytest.mark.processes
@pytest.mark.parametrize("left", [False, True], ids=["free", "left by another"])
def test_killed_at_any_step_of_claiming_it_leaves_nothing_to_wait_for(tmp_path, left):
    pid = dead_process()
    for number in range(1, 30):
        path = tmp_path / str(number) / "a.lock"
        path.parent.mkdir()
        if left:
            leave(path, socket.gethostname(), pid)
        child = os.fork()
        if not child:
            exec(KILLED, {"number": number, "path": path})
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for _ in range(2):  # one who takes over after a kill may have to look twice
            with claimed(path) as mine:
                if mine:
                    break
        assert mine, number
        assert not list(path.parent.iterdir()), number
        if killed == 0:
            assert number > 4
            return
    pytest.fail("it never ended")


def test_of_many_heirs_one_gets_it(tmp_path):
    pid = dead_process()
    for attempt in range(20):
        path, held = tmp_path / f"{attempt}.lock", []
        leave(path, socket.gethostname(), pid)

        def claim(number: int, path: Path = path, held: list[int] = held) -> bool:
            with claimed(path) as mine:
                if mine:
                    held.append(number)
                    time.sleep(0.05)  # longer than any of them takes to look
                return mine

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(claim, range(8))) == len(held) == 1
