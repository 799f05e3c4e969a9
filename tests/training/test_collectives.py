"""Two processes compute what one would: gathered batches, sums, batch statistics, with their gradients."""

import copy
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import python_in_two
from torch import Tensor, nn

from sightline.core.processes import rank, world
from sightline.training.collectives import BatchNorm, gather, mean, sync_batch_norm, total

WORLD = 2
B = 3  # rows of each process


def whole(*shape: int, seed: int = 0) -> Tensor:
    """The batch of all processes."""
    return torch.randn(WORLD * B, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mine(x: Tensor) -> Tensor:
    return x[rank() * B : (rank() + 1) * B].clone().requires_grad_()


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# What each of the two processes does ---------------------------------------------------------------------------


def check_gather() -> None:
    assert (world(), rank()) == (WORLD, dist.get_rank())
    x = whole(4)
    own = mine(x)
    found = gather(own)
    close(found.detach(), x)
    # Each process weights all rows by numbers of its own; the gradient of a row is the sum over processes.
    weights = [whole(4, seed=1 + number) for number in range(WORLD)]
    (found * weights[rank()]).sum().backward()
    close(own.grad, sum(weights)[rank() * B : (rank() + 1) * B])


def check_total_and_mean() -> None:
    x = whole(4)
    weights = [whole(4, seed=1 + number)[:B] for number in range(WORLD)]
    for function, share in ((total, 1.0), (mean, 1 / WORLD)):
        own = mine(x)
        found = function(own)
        close(found.detach(), (x[:B] + x[B:]) * share)
        (found * weights[rank()]).sum().backward()
        close(own.grad, (weights[0] + weights[1]) * share)
        close(own.detach(), x[rank() * B : (rank() + 1) * B])  # the input is not changed


def check_contrast() -> None:
    """A loss that contrasts across the batch: the mean of the processes' gradients is that of one process."""
    torch.manual_seed(0)
    x, layer = whole(4), nn.Linear(4, 5, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    z = alone(x)
    nn.functional.cross_entropy(z @ z.T, torch.arange(len(x)).roll(1)).backward()
    part = layer(mine(x))
    own = torch.arange(len(x)).roll(1)[rank() * B : (rank() + 1) * B]
    nn.functional.cross_entropy(part @ gather(part).T, own).backward()
    averaged = layer.weight.grad.clone()
    dist.all_reduce(averaged)
    close(averaged / WORLD, alone.weight.grad)


def check_batch_norm() -> None:
    for shape, kind, settings in (
        ((5,), nn.BatchNorm1d, {}),
        ((5, 4, 3), nn.BatchNorm2d, {}),
        ((5,), nn.BatchNorm1d, {"affine": False}),
        ((5,), nn.BatchNorm1d, {"momentum": None}),
        ((5, 4, 3), nn.BatchNorm2d, {"track_running_stats": False}),
        ((5,), nn.BatchNorm1d, {"eps": 0.1, "momentum": 0.3}),
    ):
        torch.manual_seed(0)
        alone: Any = nn.Sequential(kind(5, **settings, dtype=torch.float64))
        for parameter in alone.parameters():
            nn.init.normal_(parameter)
        together: Any = sync_batch_norm(copy.deepcopy(alone))
        assert type(together[0]) is BatchNorm
        for step in range(3):
            x = 3 + 2 * whole(*shape, seed=step)
            weights = whole(*shape, seed=100 + step)
            full, part = x.clone().requires_grad_(), mine(x)
            rows = slice(rank() * B, (rank() + 1) * B)
            expected, found = alone(full), together(part)
            close(found.detach(), expected.detach()[rows])
            (expected * weights).sum().backward()
            (found * weights[rows]).sum().backward()
            assert full.grad is not None
            close(part.grad, full.grad[rows])
        for name, parameter in together.named_parameters():
            summed = parameter.grad.clone()
            dist.all_reduce(summed)
            close(summed, dict(alone.named_parameters())[name].grad)
        assert dict(together.named_buffers()).keys() == dict(alone.named_buffers()).keys()
        for name, buffer in alone.named_buffers():
            close(dict(together.named_buffers())[name], buffer)
        if settings.get("track_running_stats", True):
            close(together.eval()(x), alone.eval()(x))


def check_sync_batch_norm() -> None:
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(shared, nn.LayerNorm(4)), shared)
    module[1].eval()
    before = dict(module.state_dict(keep_vars=True))
    synced: Any = sync_batch_norm(module)
    assert synced is module
    after = synced.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is value for name, value in before.items())  # an optimiser may hold them already
    assert [type(layer) for layer in (synced[1], synced[2][0], synced[2][1], synced[3])] == [
        BatchNorm,
        BatchNorm,
        nn.LayerNorm,
        BatchNorm,
    ]
    assert not synced[1].training
    assert synced[2][0].training


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")
}


def work(folder: str) -> None:
    """One of two processes: runs all checks, and leaves what went wrong in a file."""
    torch.set_num_threads(1)
    # A check that fails in one process leaves the other one waiting.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, check in CHECKS.items():
        try:
            check()
            dist.barrier()
            said = ""
        except Exception:
            said = traceback.format_exc()
        Path(folder, f"{name}.{rank()}").write_text(said)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    python_in_two(__file__, str(folder))
    return folder


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("number", range(WORLD))
def test_in_two_processes(name: str, number: int, told: Path) -> None:
    said = (told / f"{name}.{number}").read_text()
    assert not said, said


def test_one_process_is_left_as_it_is() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert (world(), rank()) == (1, 0)
    assert gather(x) is x
    assert total(x) is x
    assert torch.equal(mean(x), x)
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert sync_batch_norm(module) is module
    assert type(module[0]) is nn.BatchNorm1d
    own, plain = BatchNorm(2), nn.BatchNorm1d(2)
    assert torch.equal(own(x), plain(x))
    assert torch.equal(own.running_var, plain.running_var)
    assert own(torch.randn(3, 2, 4, 4)).shape == (3, 2, 4, 4)


if __name__ == "__main__":
    work(sys.argv[1])
