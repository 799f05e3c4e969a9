"""Two processes at once, as torchrun starts them, for tests of what they do together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def in_two(*words: str) -> None:
    """Run `sightline WORDS` in two processes, told apart by the environment; both must end well."""
    python_in_two("-m", "sightline", *words)


def python_in_two(*words: str) -> None:
    """Run `python WORDS` in two processes, which find Sightline and what tests share; both must end well."""
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def on_two_nodes(*words: str) -> list[subprocess.Popen[str]]:
    """Start `sightline WORDS` under two agents of torchrun with one process each, as on two machines."""
    port = str(_free_port())
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    return [
        subprocess.Popen(
            [sys.executable, *agent, f"--master-port={port}", f"--node-rank={node}", "-m", "sightline", *words],
            env=shared | {"PYTHONPATH": str(TESTS.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]


def ended(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What both agents and their processes have said when they have ended."""
    try:
        return [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
