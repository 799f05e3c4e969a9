"""Processes of their own, alone and two at once as torchrun starts them, for tests of what they do.

They are forked from a process that has imported Sightline, once for all tests: importing it takes longer than most of
what they do.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "timm",
        "sightline.cli",
        "sightline.measure.analyze",
        "sightline.studies.detection",
        "sightline.studies.segmenters",
        "sightline.training.objectives.hybrid",
        "sightline.training.objectives.moco_v3",
        "sightline.training.objectives.simclr",
        "sightline.training.pretrain",
        "sightline.transfer.finetune",
    ]
)


class Started:
    """`python WORDS` as a process of its own; it writes what it says to two files."""

    def __init__(self, *words: str, environment: Mapping[str, str] = os.environ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.files = [self.folder / "out", self.folder / "err"]
        self.said = ["", ""]  # when it has ended
        self.process = SERVER.Process(target=_become, args=(words, dict(environment), self.files))
        self.process.start()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait_until(self, there: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something that it does; it must not end before."""
        deadline = time.monotonic() + seconds
        while not there():
            assert self.process.is_alive(), [self.ended(0), self.said]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ended(self, seconds: float) -> int | None:
        """Its exit status; after so many seconds it is killed."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            self.process.join()
        self.said = [file.read_text("utf-8") if file.exists() else "" for file in self.files]
        shutil.rmtree(self.folder)
        return self.process.exitcode


def _become(words: tuple[str, ...], environment: dict[str, str], files: list[Path]) -> None:
    """Do in this process what `python WORDS` does."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def in_two(*words: str) -> None:
    """Run `sightline WORDS` in two processes, told apart by the environment; both must end well."""
    python_in_two("-m", "sightline", *words)


def python_in_two(*words: str) -> None:
    """Run `python WORDS` in two processes, which find Sightline and what tests share; both must end well."""
    shared = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    two = [Started(*words, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    status = [started.ended(240) for started in two]
    assert status == [0, 0], "\n".join("".join(started.said) for started in two)


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def on_two_nodes(*words: str) -> list[subprocess.Popen[str]]:
    """Start `sightline WORDS` under two agents of torchrun with one process each, as on two machines."""
    port = _free_port()
    return [
        _torchrun(port, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "-m", "sightline", *words)
        for node in range(2)
    ]


def under_torchrun(*words: str) -> None:
    """Run `torchrun --nproc-per-node 2 -m sightline WORDS`, which must end well."""
    agent = _torchrun(_free_port(), "--nproc-per-node=2", "-m", "sightline", *words)
    (said,) = ended([agent])
    assert agent.returncode == 0, said


def _torchrun(port: int, *words: str) -> subprocess.Popen[str]:
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    agent = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return subprocess.Popen(
        [sys.executable, *agent, *words],
        env=shared | {"PYTHONPATH": str(TESTS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What agents and their processes have said when they have ended."""
    try:
        return [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
