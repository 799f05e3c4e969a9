"""Products in bfloat16 as encoders and their training make them, for a process that may die of them.

`bfloat16.py` runs this file. Its last line is JSON: how many times as long as in float32 a step takes in bfloat16.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 384
ROUNDS = 7


def leave_no_core() -> None:
    """A process that is expected to die leaves no file behind."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@torch.no_grad()
def product() -> Tensor:
    """The smallest one that is known to kill."""
    output: Tensor = nn.Linear(WIDTH, WIDTH).bfloat16()(torch.randn(256, WIDTH).bfloat16())
    return output


def stacked() -> None:
    """Heads of probes, a matrix of weights each, with the same features, and back."""
    weight = torch.randn(3, 10, WIDTH, requires_grad=True)
    torch.autograd.backward((weight.bfloat16() @ torch.randn(WIDTH, 256).bfloat16()).float().sum())


class Block(nn.Module):
    """A convolution to patches, one over patches, attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.spatial = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, 64, 64) → (B, 64, 384)."""
        x = self.spatial(self.embed(pixels)).flatten(2).mT
        q, k, v = self.qkv(x).unflatten(-1, (3, 6, 64)).permute(2, 0, 3, 1, 4)
        x = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        output: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return output

    def step(self, precision: str) -> float:
        """There and back with 4 images; how many seconds it took."""
        pixels = torch.randn(4, 3, 64, 64)
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = self(pixels)
        output.float().square().mean().backward()
        return time.perf_counter() - begun


def slowdown(block: Block) -> float:
    """Time of a step in bfloat16 over that in float32, the two in turn; the median."""
    block.step("float32")  # as the one in bfloat16 before it, this one prepares the kernels
    return statistics.median(block.step("bf16") / block.step("float32") for _ in range(ROUNDS))


if __name__ == "__main__":
    leave_no_core()
    product()
    stacked()
    block = Block()
    block.step("bf16")
    torch.set_float32_matmul_precision("medium")
    block.step("float32")
    torch.set_float32_matmul_precision("highest")
    print(json.dumps({"slowdown": round(slowdown(block), 2)}))
