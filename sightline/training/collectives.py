"""What several processes need in order to compute what one process would: gathered batches, means, batch statistics.

In one process each function gives back what it was given.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sightline.core.errors import InputError
from sightline.core.processes import rank, world


def gather(x: Tensor) -> Tensor:
    """(B, …) of every process, (world · B, …) in order of rank; gradients flow back to where they came from."""
    return x if world() == 1 else _Gather.apply(x)


class _Gather(torch.autograd.Function):
    """Rows of all processes; every process has used the rows of this one, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        summed = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed.chunk(world())[rank()]


class _Total(torch.autograd.Function):
    """Σ over processes; the gradient of a sum that every process uses is the sum of their gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        result = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result)
        return result


def total(x: Tensor) -> Tensor:
    """Sum over processes, with gradients."""
    return x if world() == 1 else _Total.apply(x)


def mean(x: Tensor) -> Tensor:
    """Mean over processes, with gradients."""
    return total(x) / world()


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation with the statistics of the batches of all processes, also on the CPU.

    PyTorch's own SyncBatchNorm runs on GPUs only. For inputs (B, C) or (B, C, h, w).
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, and update the running statistics as one process with the whole batch would."""
        if not self.training or world() == 1:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            x = input.to(torch.promote_types(input.dtype, torch.float32))
            across = [d for d in range(x.dim()) if d != 1]
            shape = [1, -1, *[1] * (x.dim() - 2)]
            n = x.numel() // x.shape[1] * world()
            centre = total(x.sum(across)) / n
            centred = x - centre.view(shape)
            variance = total(centred.square().sum(across)) / n
            self._follow(centre.detach(), variance.detach() * (n / max(1, n - 1)))
            result = centred * torch.rsqrt(variance + self.eps).view(shape)
            if self.affine:
                result = result * self.weight.view(shape) + self.bias.view(shape)
            return result.to(input.dtype)

    @torch.no_grad()
    def _follow(self, centre: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(centre, share)
        self.running_var.lerp_(variance, share)


def sync_batch_norm(module: nn.Module) -> nn.Module:
    """Give every batch normalisation the statistics of all processes; names and weights stay. On GPUs PyTorch's own."""
    if world() == 1:
        return module
    if any(p.is_cuda for p in module.parameters()):
        synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return synced
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d):
                parent._modules[name] = _synced(layer)
            elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, BatchNorm):
                raise InputError(
                    f"{type(layer).__name__} cannot be shared by processes on the CPU; train in one process"
                )
    return module


def _synced(layer: nn.Module) -> BatchNorm:
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    twin = BatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    twin._parameters, twin._buffers, twin.training = layer._parameters, layer._buffers, layer.training
    return twin
