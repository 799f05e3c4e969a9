"""LARS: steps whose length is in proportion to the norm of each layer; one rule for pre-training and probes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

TRUST = 1e-3  # of LARS: how far a layer moves in a step at a rate of 1, as a share of its norm


def trusted(
    weight: Tensor, gradient: Tensor, weight_decay: float | Tensor, dim: tuple[int, ...] | None = None
) -> Tensor:
    """What LARS takes for the gradient g of a layer w: (g + λw) · 10⁻³ ‖w‖ / ‖g + λw‖.

    With `dim`, norms are taken over these axes: several layers lie under each other in one tensor, each with a λ of its
    own. A layer that is 0, or that has no gradient, is not scaled.

    >>> trusted(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]), weight_decay=0.0)
    tensor([0.0000, 0.0050])
    """
    gradient = gradient + weight_decay * weight
    sizes = [torch.linalg.vector_norm(tensor, dim=dim, keepdim=True) for tensor in (weight, gradient)]
    return gradient.mul_(torch.where((sizes[0] > 0) & (sizes[1] > 0), TRUST * sizes[0] / sizes[1], 1))


class LARS(torch.optim.Optimizer):
    """SGD whose steps have a length in proportion to the norm of each layer, for large batches (You et al. 2017).

        w of two or more axes:  u = (g + λw) · 10⁻³ ‖w‖ / ‖g + λw‖        others (biases, norms):  u = g
        v ← μv + u,   w ← w − ηv

    as in the official code of MoCo-v3, which MAE's linear probes have, too; the scaling does not depend on λ. SimCLR's
    code has the same u, but takes η into the average, v ← μv + ηu and w ← w − v: the same while η is constant.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; `closure` computes the loss and the gradients anew, as in all of PyTorch's optimisers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                layer = weight.ndim > 1
                update = trusted(weight, weight.grad, group["weight_decay"]) if layer else weight.grad
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                weight.add_(state["momentum_buffer"], alpha=-group["lr"])
        return loss
