"""Checkpoints of a training: written whole or not at all, weights as safetensors, nothing pickled.

RUN/latest.json                         which one is valid
RUN/checkpoints/00001200/training.safetensors   all weights and buffers of the objective
                        /optimizer.safetensors  state of the optimiser and of the random number generators
                        /state.json             step, settings of the optimiser
                        /encoder.safetensors, encoder.json   what `run:RUN` loads
                        /decoder.safetensors, decoder.json   of objectives with a decoder
                        /head.safetensors, head.json   of objectives with a projection head
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sightline.core.errors import InputError, first_line
from sightline.core.files import replacing_folder, write_atomically
from sightline.core.folders import LATEST, latest, remove_checkpoints


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, each once: a state dict repeats what two parts share."""
    kept = module.state_dict().keys()
    every = (*module.named_parameters(), *module.named_buffers())
    return {name: value.detach() for name, value in every if name in kept}


def save_checkpoint(
    run: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: Mapping[str, Tensor],
    sums: Mapping[str, float],
    more: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint beside the last one, point to it, then delete the last one; `more` adds files to it."""
    folder = run / "checkpoints" / f"{step:08d}"
    if latest(run) == folder:
        return folder
    state, plain = _flat(optimizer.state_dict())
    with replacing_folder(folder) as temporary:
        write_atomically(temporary / "training.safetensors", _packed(tensors_of(module)))
        write_atomically(
            temporary / "optimizer.safetensors", _packed(state | {f"rng.{k}": v for k, v in generators.items()})
        )
        if more is not None:
            more(temporary)
        write_atomically(
            temporary / "state.json",
            json.dumps({"step": step, "sums": dict(sums), "optimizer": plain}, indent=1).encode(),
        )
        names = [path.name for path in temporary.iterdir()]
    write_atomically(run / LATEST, json.dumps({"checkpoint": folder.name, "step": step}).encode())
    remove_checkpoints(run, keep=folder, also=names)
    return folder


def tidy(run: Path) -> None:
    """Remove what a kill has left beside the latest checkpoint: the one before it, or a part of the one after it."""
    remove_checkpoints(run, keep=latest(run))


def load(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Tensor], dict[str, float]]:
    """Put a checkpoint into module and optimiser; give back its step, the states of the generators, and the sums."""
    load_module(folder, module)
    try:
        state = json.loads((folder / "state.json").read_text())
        tensors = load_file(folder / "optimizer.safetensors")
        generators = {name.removeprefix("rng."): tensors.pop(name) for name in list(tensors) if name.startswith("rng.")}
        optimizer.load_state_dict(_nested(tensors, state["optimizer"]))
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.ndim:  # a fused step pairs elements by their place in memory
                    values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        sums = {str(name): float(value) for name, value in state.get("sums", {}).items()}
        return int(state["step"]), generators, sums
    except Exception as error:  # damaged files may be of any form
        raise InputError(f"Cannot read the checkpoint {str(folder)!r}: {first_line(error)}; start over") from error


def load_module(folder: Path, module: nn.Module) -> None:
    """Put the weights of a checkpoint into the module that they were saved from."""
    try:
        tensors = load_file(folder / "training.safetensors")
    except Exception as error:
        raise InputError(f"Cannot read the checkpoint {str(folder)!r}: {first_line(error)}; start over") from error
    own = tensors_of(module)
    if own.keys() != tensors.keys() or any(own[name].shape != value.shape for name, value in tensors.items()):
        raise InputError(
            f"The checkpoint {str(folder)!r} belongs to another objective or backbone, or to another version of "
            "Sightline; start over"
        )
    for name, value in tensors.items():
        own[name].copy_(value)


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    packed: bytes = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    return packed


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state dict as named tensors and what JSON can hold."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{parameter}.{name}"] = value
    return tensors, {"numbers": numbers, "groups": state["param_groups"]}


def _nested(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **plain["numbers"]}.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    return {"state": state, "param_groups": plain["groups"]}
