"""Helpers: they take part, stay for the next work, and neither outlive this process nor leave it waiting."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import helping
from support.processes import TESTS

from sightline.core import helpers as core_helpers
from sightline.core import processes
from sightline.core.errors import InputError
from sightline.core.helpers import Helpers, LostError

pytestmark = pytest.mark.processes


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helpers]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))  # of processes that start some
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = Helpers(1)
    yield found
    found.close()


def _gone(pid: int, seconds: float = 20) -> bool:
    """Whether a process ends within this time; one that nobody has waited for is gone, too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_they_take_part_and_stay_for_the_next_work(tmp_path: Path, helpers: Helpers) -> None:
    threads, pids = torch.get_num_threads(), []
    for value in (10, 20):
        about = {"folder": str(tmp_path), "value": value}
        with helpers.taking_part("support.helping:tell", about):
            assert (processes.rank(), processes.world()) == (0, 2)
            helping.tell(about)
        first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
        assert [first["who"], second["who"]] == [[0, 2], [1, 2]]
        assert first["gathered"] == second["gathered"] == [value, value + 1]
        assert (first["pid"], second["threads"]) == (os.getpid(), max(1, threads // 2))
        assert (processes.world(), torch.get_num_threads()) == (1, threads)
        pids.append(second["pid"])
    assert pids[0] == pids[1] != os.getpid()
    helpers.close()
    assert _gone(pids[0])


def test_one_that_fails_is_lost_with_its_words_and_another_takes_its_place(tmp_path: Path, helpers: Helpers) -> None:
    with (
        pytest.raises(LostError, match="ValueError: no luck"),
        helpers.taking_part("support.helping:fail", {"sentence": "no luck"}),
    ):
        processes.barrier()
    assert processes.world() == 1
    about = {"folder": str(tmp_path), "value": 1}
    with helpers.taking_part("support.helping:tell", about):
        helping.tell(about)
    assert json.loads((tmp_path / "1.json").read_text())["gathered"] == [1, 2]


def test_one_that_takes_long_to_end_tells_why_all_the_same(helpers: Helpers) -> None:
    with (
        pytest.raises(LostError, match="ValueError: no luck"),
        helpers.taking_part("support.helping:fail_slowly", {"sentence": "no luck"}),
    ):
        processes.barrier()


def test_a_sentence_of_theirs_is_told_as_it_is(helpers: Helpers) -> None:
    with (
        pytest.raises(InputError, match=r"^a.png cannot be read$"),
        helpers.taking_part("support.helping:refuse", {"sentence": "a.png cannot be read"}),
    ):
        processes.barrier()


def test_ctrl_c_is_heard_while_we_wait_for_them(tmp_path: Path, helpers: Helpers) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), helpers.taking_part("support.helping:stay", {"folder": str(tmp_path)}):
        processes.barrier()
    interrupting.join()
    assert time.monotonic() - began < 300  # not the ten minutes that it would have stayed
    assert _gone(int((tmp_path / "pid").read_text()))
    assert signal.set_wakeup_fd(-1) == -1


def test_one_that_cannot_begin_is_lost(helpers: Helpers) -> None:
    with pytest.raises(LostError, match="no_such_module"), helpers.taking_part("no_such_module:tell", {}):
        pytest.fail("it cannot have begun")
    assert processes.world() == 1


def test_one_that_is_killed_is_lost(tmp_path: Path, helpers: Helpers) -> None:
    def kill() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with (
        pytest.raises(LostError, match="signal 9"),
        helpers.taking_part("support.helping:stay", {"folder": str(tmp_path)}),
    ):
        processes.barrier()
    killing.join()


@pytest.mark.parametrize(("stopped", "raised"), [(False, LostError), (True, KeyboardInterrupt)])
def test_one_that_is_killed_before_it_has_joined_does_not_keep_us_waiting(
    stopped: bool, raised: type[BaseException], tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = core_helpers._meet

    def killed_before(meeting: Path, number: int, of: int) -> None:
        monkeypatch.setattr(core_helpers, "PATIENCE", 3.0)
        if stopped:
            helpers._stop()
        helpers.all[0].process.kill()
        meet(meeting, number, of)

    monkeypatch.setattr(core_helpers, "_meet", killed_before)
    about = {"folder": str(tmp_path), "value": 1}
    with pytest.raises(raised), helpers.taking_part("support.helping:tell", about):
        processes.barrier()
    assert processes.world() == 1
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with helpers.taking_part("support.helping:tell", about):  # by another one
        helping.tell(about)
    assert json.loads((tmp_path / "1.json").read_text())["gathered"] == [1, 2]


def test_of_several_the_one_tells_that_was_the_first_to_end(helpers: Helpers) -> None:
    helpers.count = 2
    with (
        pytest.raises(InputError, match=r"^a.png cannot be read$"),
        helpers.taking_part("support.helping:refuse_last", {"sentence": "a.png cannot be read"}),
    ):
        processes.barrier()


def test_an_error_of_our_own_is_told_as_it_is_and_ends_them(tmp_path: Path, helpers: Helpers) -> None:
    def ours() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise InputError("There is no such folder")

    with (
        pytest.raises(InputError, match="no such folder"),
        helpers.taking_part("support.helping:stay", {"folder": str(tmp_path)}),
    ):
        ours()
    assert _gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("told", "raised"),
    [
        ("[/src/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:36058", LostError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_a_lost_connection_is_no_error_of_our_own(
    told: str, raised: type[Exception], tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        monkeypatch.setattr(core_helpers, "PATIENCE", 1.0)  # this helper does not end by itself
        raise RuntimeError(told)

    with (
        pytest.raises(raised, match=re.escape(told)),
        helpers.taking_part("support.helping:stay", {"folder": str(tmp_path)}),
    ):
        lost()
    assert processes.world() == 1


def test_they_do_not_outlive_a_process_that_is_killed(tmp_path: Path, helpers: Helpers) -> None:
    script = (
        "import sys, time; from sightline.core.helpers import Helpers\n"
        "with Helpers(1).taking_part('support.helping:stay', {'folder': sys.argv[1]}): time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert _gone(int((tmp_path / "pid").read_text()))
