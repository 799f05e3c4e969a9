"""bfloat16 on a CPU: whether products in it work here, tried before any is computed.

On some virtual machines the CPU claims instructions (AMX) that kill the process which uses them, and only using them
tells. So whoever asks for bfloat16 on a CPU waits for a trial in a fork of this process, which may die. oneDNN, which
computes the products, reads ONEDNN_MAX_CPU_ISA when it is first used: where that is still to come and a limit helps,
it is set here, also for processes that are started later.
"""

import faulthandler
import functools
import os
import signal
import sys
import time
import warnings

import torch
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.core.progress import console

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
FATAL = (signal.SIGILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT)  # SIGKILL and SIGTERM come from elsewhere
SLOWER = 1.2  # slowdowns up to here are within what the same machine measures from day to day


def ensure() -> None:
    """Make products in bfloat16 safe on this CPU, or raise a sentence that says what to set."""
    if not usable():
        given = f" with {VARIABLE}={os.environ[VARIABLE]}" if VARIABLE in os.environ else ""
        limit = "" if LIMIT in given else f"set {VARIABLE}={LIMIT} before Python starts, or "
        raise InputError(f"Products in bfloat16 kill the process on this CPU{given}; {limit}use precision float32")


@functools.cache
def usable() -> bool:
    """Whether products in bfloat16 can be computed in this process, made safe if need be."""
    if _survives():
        return True
    if VARIABLE in os.environ:
        return False
    os.environ[VARIABLE] = LIMIT
    if not _survives():
        del os.environ[VARIABLE]
    return VARIABLE in os.environ


@functools.cache
def tell_if_slower() -> None:
    """Say, once in a process, that products take longer than in float32."""
    bf16, float32 = (min(products(dtype) for _ in range(3)) for dtype in (torch.bfloat16, torch.float32))
    if (ratio := bf16 / float32) > SLOWER:
        console().print(f"bf16 takes {ratio:.1f} times as long on this CPU as float32, which is more exact")


@torch.inference_mode(False)
@torch.enable_grad()
def products(dtype: torch.dtype) -> float:
    """Seconds for a convolution, a layer and stacked heads, there and back."""
    shapes = ((4, 3, 64, 64), (384, 3, 8, 8), (384, 384), (3, 10, 384))
    pixels, patches, layer, heads = (torch.ones(s, dtype=dtype, device="cpu", requires_grad=True) for s in shapes)
    begun = time.perf_counter()
    tokens = F.linear(F.conv2d(pixels, patches, stride=8).flatten(2).mT, layer).flatten(0, 1)  # (256, 384)
    (heads @ tokens.mT).sum().backward()
    return time.perf_counter() - begun


def _survives() -> bool:
    """Whether a fork of this process computes products and lives."""
    if sys.platform != "linux":  # elsewhere this is not known to happen, and a fork may die of other things
        return True
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; this one uses none of them
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        child = os.fork()
    if not child:
        try:  # silent, at most a minute, with one thread, since those of the parent are not here
            import resource

            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(60)
            torch.set_num_threads(1)
            products(torch.bfloat16)
        finally:
            os._exit(0)  # an exception is no death: whoever computes will meet it
    _, status = os.waitpid(child, 0)
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in FATAL)
