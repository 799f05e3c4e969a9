"""bfloat16 on this CPU: whether products in it can be computed here at all, and whether they pay.

On some virtual machines the CPU claims instructions (AMX) that kill the process which uses them, and nothing short of
using them tells. So whoever asks for bfloat16 on a CPU first waits for a trial of such products in a child process. It
is made once for a machine, a version of PyTorch and the variables that choose instructions, and then remembered in
~/.cache/sightline (or XDG_CACHE_HOME), together with how long they took.

oneDNN, which computes these products, reads ONEDNN_MAX_CPU_ISA when it is first used. Where that cures it, the variable
is set here; processes that are started later inherit it. Whether that was early enough for this process, or a variable
that a program has set for itself, only a fork of it can tell: it has the same oneDNN in the same state, and may die.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sightline.core.bfloat16_trial import leave_no_core, product
from sightline.core.errors import InputError
from sightline.core.files import user_cache, write_atomically
from sightline.core.progress import console
from sightline.core.provenance import fingerprint

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
FORMERLY = "DNNL_MAX_CPU_ISA"  # oneDNN still reads it where the other is not set
CHOOSING = (VARIABLE, FORMERLY, "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")  # variables that choose instructions
TRIAL = Path(__file__).with_name("bfloat16_trial.py")
PATIENCE = 300  # seconds for a trial, most of which go into the import of PyTorch
SLOWER = 1.1  # slowdowns up to here are within what the same machine measures from day to day
# What a process dies of when it uses instructions that are not there; SIGKILL and SIGTERM come from elsewhere.
FATAL = {getattr(signal, name, None) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGSYS")}

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Trial:
    """What trials have shown of new processes with one environment."""

    works: bool
    cured: bool = False  # if not, whether they work with the limit
    slowdown: float | None = None  # time in bfloat16 over time in float32


def ensure(device: str | torch.device, precision: str = "float32") -> None:
    """Make products in bfloat16 safe if they are asked for on a CPU, or raise the sentence that says what to set.

    They are asked for by the precision bf16, or by the user's `torch.set_float32_matmul_precision("medium")`.
    """
    if not _on_cpu(device):
        return
    if precision == "bf16":
        instead = "use precision float32"
    elif _float32_is_rounded():
        instead = 'leave torch.set_float32_matmul_precision at "highest"'
    else:
        return
    if problem := _problem(_environment()):
        raise InputError(f"{problem}, or {instead}")


def ensure_for(x: Tensor) -> None:
    """The same for an encoder that is going to see x: in bfloat16 itself, under autocast, or rounded in products."""
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    ensure(x.device, "bf16" if cast or x.dtype == torch.bfloat16 else "float32")


def usable() -> bool:
    """Whether products in bfloat16 can be computed in this process, made safe if need be."""
    return not _problem(_environment())


def tell_if_slower(device: str | torch.device, precision: str) -> None:
    """Say, once in a process, that bf16 was asked for and takes longer than float32 here."""
    if precision == "bf16" and _on_cpu(device):
        slowdown = _verdict(_environment()).slowdown
        if slowdown is not None and slowdown > SLOWER:
            _say(f"bf16 takes {slowdown:.1f} times as long as float32 on this CPU; float32 is faster and more exact")


@functools.cache
def _say(sentence: str) -> None:
    console().print(sentence)


def _on_cpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cpu"


def _float32_is_rounded() -> bool:
    """Whether the user lets float32 products on the CPU be computed in bfloat16."""
    ours = torch.backends.mkldnn
    named = [getattr(getattr(ours, what, None), "fp32_precision", None) for what in ("matmul", "conv")]
    if named != [None, None]:  # where each has a setting of its own, "medium" shows up there
        return "bf16" in named
    return torch.get_float32_matmul_precision() == "medium"


# ---------------------------------------------------------------------------------------------------------------
# This process


def _environment() -> Environment:
    return tuple((name, os.environ[name]) for name in CHOOSING if name in os.environ)


@functools.cache
def _problem(environment: Environment) -> str:
    """Why bfloat16 would kill this process, the beginning of a sentence; nothing if it does not, or no longer."""
    verdict = _verdict(environment)
    given = next((f"{name}={value}" for name, value in environment if name in (VARIABLE, FORMERLY)), None)
    if verdict.works:
        return "" if given is None or _works_here() else _too_late()
    if not verdict.cured:
        return f"Products in bfloat16 kill the process on this CPU, also with {VARIABLE}={LIMIT}; use a GPU"
    if given is not None:
        return f"Products in bfloat16 kill the process on this CPU with {given}; set {VARIABLE}={LIMIT}"
    if not hasattr(os, "fork"):  # it could not be told whether it was early enough
        return _too_late()
    os.environ[VARIABLE] = LIMIT
    problem = _problem(_environment())
    if problem:
        os.environ.pop(VARIABLE, None)
    return problem


def _too_late() -> str:
    return (
        "Products in bfloat16 kill the process on this CPU unless its instructions are limited before PyTorch is used; "
        f"set {VARIABLE}={LIMIT} in the environment before Python starts"
    )


def _works_here() -> bool:
    """Whether a product works in this process as it is by now; tried in a fork."""
    if not hasattr(os, "fork"):
        return True
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; this one uses none of them
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        child = os.fork()
    if not child:
        _try_and_exit()
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # somebody else waits for all children of this process
        return True
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in FATAL)


def _try_and_exit() -> None:
    """The life of the fork: silent, short, and without a core file."""
    try:
        faulthandler.disable()
        for number in (*filter(None, FATAL), signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        leave_no_core()
        torch.set_num_threads(1)  # the threads of the parent are not here
        product()
    finally:
        os._exit(0)  # an exception is not a death: whoever computes will meet it


# ---------------------------------------------------------------------------------------------------------------
# New processes


_known: dict[Environment, Trial] = {}  # also where nothing can be written


def _verdict(environment: Environment) -> Trial:
    """What is known of this machine, else what trials show, which is then remembered."""
    if environment not in _known:
        recalled = _recall(environment)
        _known[environment] = _find_out(environment) if recalled is None else recalled
    return _known[environment]


def _find_out(environment: Environment) -> Trial:
    found = _try(environment)
    if found is None:  # it could not be tried; nothing speaks against it
        return Trial(works=True)
    if not found.works:
        rest = [(name, value) for name, value in environment if name not in (VARIABLE, FORMERLY)]
        limited: Environment = ((VARIABLE, LIMIT), *rest)
        cure = _try(limited)
        if cure is None:
            return found
        found = Trial(works=False, cured=cure.works)
        if cure.works:
            _remember(limited, cure)  # for processes that inherit the limit
    _remember(environment, found)
    return found


def _try(environment: Environment) -> Trial | None:
    """Run the trial in a new process; None if it did not come to an end for another reason than its products."""
    variables = {name: value for name, value in os.environ.items() if name not in CHOOSING} | dict(environment)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", str(TRIAL)], env=variables, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    # A negative code is a signal, and on Windows one beyond 0xC0000000 an exception of the processor.
    if -ended.returncode in FATAL or ended.returncode >= 0xC0000000:
        return Trial(works=False)
    try:
        return Trial(works=True, slowdown=float(json.loads(ended.stdout.splitlines()[-1])["slowdown"]))
    except (LookupError, ValueError, TypeError):
        return None


def _recall(environment: Environment) -> Trial | None:
    try:
        return Trial(**json.loads(_record(environment).read_text())["verdict"])
    except (OSError, RuntimeError, LookupError, ValueError, TypeError):  # not there, or damaged
        return None


def _remember(environment: Environment, verdict: Trial) -> None:
    _known[environment] = verdict
    content = {"verdict": asdict(verdict), "of": _machine(environment)}
    with contextlib.suppress(InputError, OSError, RuntimeError):  # it cannot be written: it is tried again next time
        write_atomically(_record(environment), json.dumps(content, indent=2).encode())


def _record(environment: Environment) -> Path:
    """The file of this machine; RuntimeError where the user has no home."""
    return user_cache() / f"bfloat16-{fingerprint(_machine(environment))[:16]}.json"


def _machine(environment: Environment) -> dict[str, object]:
    """Everything that a verdict depends on; the name of the machine since homes are shared."""
    return {
        "machine": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "torch": str(torch.__version__),
        "environment": dict(environment),
    }


@functools.cache
def _cpu() -> str:
    """Model and flags of the first core as Linux tells them, elsewhere what Python knows."""
    telling = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags", "CPU ", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return (
        "\n".join(line for line in lines if line.startswith(telling)) or f"{platform.machine()} {platform.processor()}"
    )
