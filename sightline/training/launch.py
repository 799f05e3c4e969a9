"""How a training is started: where and by whom it is computed, which does not change what is learned."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the functions and commands that train have in common."""

    resume: bool = False  # go on with the training in the folder
    overwrite: bool = False  # start anew in a folder that holds one
    device: str = "auto"
    devices: int | None = None  # processes per node; torchrun says itself
    nodes: int = 1
    workers: int | None = None  # processes that decode images
    show_progress: bool = True

    def processes(self) -> tuple[int, int]:
        """Processes per node and nodes: torchrun says, otherwise the caller, otherwise one."""
        if "LOCAL_WORLD_SIZE" in os.environ:
            local = int(os.environ["LOCAL_WORLD_SIZE"])
            return local, int(os.environ.get("WORLD_SIZE", local)) // local
        return self.devices or 1, self.nodes
