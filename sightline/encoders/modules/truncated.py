"""Calling a model whose classifier was deleted, `del model.fc`: the rest of it runs with nothing in that place."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# Where the classifiers of timm, torchvision and those who follow them are: of the model, and of its head.
CLASSIFIERS = {"": ("fc", "head", "heads", "classifier"), "head": ("fc",)}


def without_classifier(module: nn.Module) -> Callable[..., Any] | None:
    """How to call a module that lacks a classifier of which its code speaks; None if it lacks none.

    >>> import torch; from torchvision.models import resnet18
    >>> model = resnet18().eval()
    >>> del model.fc
    >>> tuple(without_classifier(model)(torch.zeros(1, 3, 32, 32)).shape)
    (1, 512)
    """
    gaps: dict[str, list[str]] = {}
    for path, names in CLASSIFIERS.items():
        part = getattr(module, path, None) if path else module
        if isinstance(part, nn.Module) and (absent := [name for name in names if _lacks(part, name)]):
            gaps[path] = absent
    return (lambda *args, **kwargs: _filled(module, gaps)(*args, **kwargs)) if gaps else None


def _lacks(module: nn.Module, name: str) -> bool:
    if hasattr(module, name):
        return False
    own = (base for base in type(module).__mro__ if base not in nn.Module.__mro__)
    methods = (method for base in own for method in vars(base).values() if inspect.isfunction(method))
    return any(name in method.__code__.co_names for method in methods)


def _filled(module: nn.Module, gaps: dict[str, list[str]]) -> nn.Module:
    """A shallow copy, which shares all layers and hooks, with identities in the gaps; the module stays as it is."""
    whole = _with(module, {name: nn.Identity() for name in gaps.get("", ())})
    if "head" in gaps:
        whole = _with(whole, {"head": _with(module.get_submodule("head"), {n: nn.Identity() for n in gaps["head"]})})
    return whole


def _with(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = {**module._modules, **parts}
    return copied
