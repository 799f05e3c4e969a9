"""Processes: what several of them agree on, gather and share, and that one alone needs nothing of the kind."""

import json
import sys
from pathlib import Path

import pytest
from support.processes import python_in_two

from sightline.core import processes
from sightline.core.errors import InputError


def _told() -> dict[str, object]:
    """What a process learns from each function; numbers differ between processes unless they are the same by design."""
    me = processes.rank()

    def fails() -> None:
        raise InputError(f"process {me} cannot")

    processes.barrier()
    try:
        processes.by_first(fails)
        problem = ""
    except InputError as error:
        problem = str(error)
    return {
        "who": [me, processes.world()],
        "agreed": processes.agreed(f"folder {me}"),
        "gathered": processes.gathered([me, "a"]),
        "by_first": processes.by_first(lambda: me + 10),
        "problem": problem,
        "shared": processes.shared([3, 5, 7], lambda job: job**2),
        "none": processes.shared([], lambda job: job),
        "mine": processes.shared([0, 1, 2], lambda job: me),
    }


def _one_of_two(folder: Path) -> None:
    processes.join(on_gpu=False)
    processes.join(on_gpu=False)  # a second analysis finds the processes together
    told = _told() | {"number": processes.rank()}
    processes.leave()
    processes.leave()
    told["after"] = [processes.rank(), processes.world()]
    (folder / f"{told['number']}.json").write_text(json.dumps(told))


def test_one_process_needs_nothing() -> None:
    processes.join(on_gpu=False)
    assert _told() == {
        "who": [0, 1],
        "agreed": "folder 0",
        "gathered": [[0, "a"]],
        "by_first": 10,
        "problem": "process 0 cannot",
        "shared": [9, 25, 49],
        "none": [],
        "mine": [0, 0, 0],
    }


@pytest.mark.processes
def test_two_processes(tmp_path: Path) -> None:
    python_in_two(__file__, str(tmp_path))
    told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    for number, one in enumerate(told):
        assert one["who"] == [number, 2]
        assert one["after"] == [0, 1]
        assert one["agreed"] == "folder 0"
        assert one["gathered"] == [[0, "a"], [1, "a"]]
        assert one["problem"] == "process 0 cannot"
        assert one["shared"] == [9, 25, 49]
        assert one["none"] == []
        assert one["mine"] == [0, 1, 0]
    assert [one["by_first"] for one in told] == [10, None]


def test_a_mistake_of_ours_is_not_a_sentence() -> None:
    with pytest.raises(ZeroDivisionError):
        processes.by_first(lambda: 1 // 0)


if __name__ == "__main__":
    _one_of_two(Path(sys.argv[1]))
