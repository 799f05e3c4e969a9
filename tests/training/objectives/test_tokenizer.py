"""The tokenizer's loss, codebook and grid against plain computations, and that it learns."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

import sightline as sl
from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.training.objective import Views
from sightline.training.objectives.beit import tokenizer as module
from sightline.training.objectives.beit.tokenizer import Tokenizer

START = Progress(0, 10, 5)


def make(codes: int = 32, patch: int = 4) -> Tokenizer:
    torch.manual_seed(0)
    return Tokenizer(patch, codes, width=8)


def some_views(n: int = 6, size: int = 16, start: int = 0) -> Views:
    """Images start … start + n of an endless row."""
    pixels = torch.randn(64, 3, size, size, generator=torch.Generator().manual_seed(1))[start : start + n]
    return Views([pixels], torch.zeros(n, dtype=torch.int64), np.arange(start, start + n, dtype=np.uint64), START)


def states(tokenizer: Tokenizer) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in tokenizer.named_buffers()}


@pytest.mark.parametrize("patch", [4, 8, 16, 32])
def test_images_become_a_grid_of_tokens_and_images_again(patch: int) -> None:
    tokenizer = make(patch=patch)
    tokens = tokenizer.encode(torch.randn(2, 3, 2 * patch, 2 * patch))
    assert tokens.shape == (2, 4)
    assert tokens.dtype == torch.int64
    assert tokenizer.decode(tokens).shape == (2, 3, 2 * patch, 2 * patch)


def test_impossible_tokenizers_are_refused() -> None:
    with pytest.raises(InputError, match="patches of 14 pixels; choose from 4, 8, 16, 32"):
        Tokenizer(14)
    with pytest.raises(InputError, match="at least 2 codes"):
        Tokenizer(8, codes=1)


def test_tokens_are_in_rows_and_look_at_their_patch() -> None:
    tokenizer = make(patch=8)
    images = torch.randn(1, 3, 32, 48, requires_grad=True)  # 4 × 6 patches
    encodings = tokenizer.encodings(images)
    for n in range(24):
        (gradient,) = torch.autograd.grad(
            encodings[0, n].square().sum() + encodings[0, n].sum(), images, retain_graph=True
        )
        felt = F.avg_pool2d(gradient.abs().sum(1, keepdim=True), 8).flatten()
        assert int(felt.argmax()) == n


def test_shifted_images_have_shifted_encodings() -> None:
    tokenizer = make(patch=4)
    images = torch.randn(1, 3, 48, 48)
    still = tokenizer.encodings(images).view(12, 12, -1)
    moved = tokenizer.encodings(images.roll((4, 8), (2, 3))).view(12, 12, -1)  # one row down, two columns right
    assert torch.allclose(moved[5:-4, 6:-4], still[4:-5, 4:-6], atol=1e-6)  # away from the border
    assert not torch.allclose(moved, still, atol=1e-2)


def test_loss_and_scalars_are_those_of_plain_loops() -> None:
    tokenizer, views = make(), some_views()
    loss, scalars = tokenizer(views)

    tokenizer, images = tokenizer.double(), views.pixels[0].double()
    grids = tokenizer.encoder(images).detach()  # (B, d, rows, columns)
    chosen, commitment, counts = torch.zeros_like(grids), 0.0, [0] * 32
    for b in range(6):
        for r in range(4):
            for c in range(4):
                z = grids[b, :, r, c] / math.sqrt(sum(float(v) ** 2 for v in grids[b, :, r, c]))
                distances = [float(((z - code) ** 2).sum()) for code in tokenizer.codebook]
                nearest = distances.index(min(distances))
                chosen[b, :, r, c] = tokenizer.codebook[nearest]
                commitment += min(distances) / (6 * 16)
                counts[nearest] += 1
    error = float(((tokenizer.decoder(chosen) - images) ** 2).mean().detach())
    entropy = -sum(n / 96 * math.log(n / 96) for n in counts if n)
    assert float(scalars["reconstruction"]) == pytest.approx(error, abs=1e-5)
    assert float(scalars["codes"]) == pytest.approx(math.exp(entropy), rel=1e-5)
    assert float(loss.detach()) == pytest.approx(error + module.COMMITMENT * commitment, abs=1e-5)


def test_gradients_pass_straight_through(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, views = make(), some_views()
    encodings = tokenizer.encodings(views.pixels[0]).detach().requires_grad_()
    monkeypatch.setattr(tokenizer, "encodings", lambda images: encodings)
    tokenizer(views)[0].backward()
    codes = tokenizer.codebook[tokenizer.quantize(encodings)].requires_grad_()
    F.mse_loss(tokenizer.paint(codes), views.pixels[0]).backward()
    assert codes.grad is not None
    pull = module.COMMITMENT * 2 * (encodings - codes).detach() / (6 * 16)
    assert torch.allclose(encodings.grad, codes.grad + pull, atol=1e-7)


def test_codes_are_running_means_and_dead_ones_start_anew() -> None:
    tokenizer, views = make(codes=8), some_views()
    tokenizer.use.copy_(torch.tensor([50.0] * 5 + [0.0] * 3))
    tokenizer.sums.copy_(tokenizer.codebook * 40)
    tokenizer.codebook[5:] = -tokenizer.codebook[:1]  # next to nothing chooses them
    encodings = tokenizer.encodings(views.pixels[0]).detach().flatten(0, 1)
    tokens = tokenizer.quantize(encodings)
    before = states(tokenizer)
    tokenizer(views)
    assert torch.equal(tokenizer.codebook, before["codebook"])
    tokenizer.after_step(START)

    alive = 0
    for k in range(8):
        own = [z for z, token in zip(encodings, tokens, strict=True) if token == k]
        use = 0.95 * float(before["use"][k]) + 0.05 * len(own)
        if use >= 0.1 * 96 / 8:
            total = 0.95 * before["sums"][k] + 0.05 * sum(own, torch.zeros(module.CODE_WIDTH))
            assert torch.allclose(tokenizer.codebook[k], total / total.norm(), atol=1e-6)
            assert float(tokenizer.use[k]) == pytest.approx(use, rel=1e-5)
            alive += 1
        else:
            assert float((encodings @ tokenizer.codebook[k]).max()) == pytest.approx(1, abs=1e-6)
            assert float(tokenizer.use[k]) == 96 / 8
    assert 5 <= alive < 8
    assert float(tokenizer.step_use.sum()) == 0


def test_new_codes_are_drawn_in_proportion_to_the_distance() -> None:
    """Over many keys an encoding that lies on a code is never drawn, one that lies farther is drawn more often."""
    tokenizer = make(codes=2)
    tokenizer.codebook.copy_(F.normalize(torch.eye(2, module.CODE_WIDTH), dim=-1))
    angles = torch.tensor([0.0, 0.3, 0.6])
    encodings = torch.zeros(1, 3, module.CODE_WIDTH)
    encodings[0, :, 0], encodings[0, :, 2] = angles.cos(), angles.sin()
    far = (encodings - tokenizer.codebook[0]).square().sum(-1)
    drawn = []
    for key in range(4000):
        views = Views([], torch.zeros(1), np.array([key], np.uint64), START)
        tokenizer.clocks.fill_(math.inf)
        tokenizer._collect(encodings, torch.zeros(1, 3, dtype=torch.int64), torch.ones(2), far, views)
        drawn.append(int((encodings[0] @ tokenizer.spares[0]).argmax()))
    share = np.bincount(drawn, minlength=3) / 4000
    assert share == pytest.approx((far[0] / far.sum()).numpy(), abs=0.025)


def test_accumulated_halves_are_the_whole_batch() -> None:
    whole, halves = make(), make()
    whole(some_views(8))
    for start in (0, 4):
        halves(some_views(4, start=start))
    for name, value in states(whole).items():
        assert torch.allclose(value, states(halves)[name], atol=1e-5), name


def test_evaluation_changes_nothing() -> None:
    tokenizer = make().eval()
    before = states(tokenizer)
    tokenizer(some_views())
    assert all(torch.equal(value, before[name]) for name, value in states(tokenizer).items())


def train(tokenizer: Tokenizer, images: Tensor, steps: int, batch: int, start: int = 0) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(tokenizer.parameters(), lr=2e-3, weight_decay=0)
    curve = []
    for step in range(start, start + steps):
        rows = np.arange(step * batch, (step + 1) * batch) % len(images)
        progress = Progress(step, steps, steps)
        loss, scalars = tokenizer(Views([images[rows]], torch.zeros(batch), (rows + step).astype(np.uint64), progress))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tokenizer.after_step(progress)
        curve.append({name: float(value) for name, value in scalars.items()})
    return curve


def test_it_learns_to_paint_with_many_codes() -> None:
    data = sl.load_images("shapes?size=32", limit=256)
    pixels: Any = np.stack([item.image for item in data.source.read(range(256))])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    images = (images - images.mean()) / images.std()
    torch.manual_seed(0)
    tokenizer = Tokenizer(8, codes=64, width=24)

    def error_and_codes() -> tuple[float, int]:
        with torch.no_grad():
            tokens = tokenizer.encode(images)
            return float(F.mse_loss(tokenizer.decode(tokens), images)), len(tokens.unique())

    assert error_and_codes()[0] > 0.95
    train(tokenizer, images, steps=80, batch=32)
    error, codes = error_and_codes()
    assert error < 0.6
    assert codes > 32


def test_a_saved_tokenizer_goes_on_as_if_it_had_not_been_saved() -> None:
    images = some_views(24).pixels[0]
    one = make()
    train(one, images, steps=3, batch=8)
    other = Tokenizer(4, 32, width=8)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.encode(images), other.encode(images))
    assert train(one, images, 3, 8, start=3) == train(other, images, 3, 8, start=3)
    assert torch.equal(one.codebook, other.codebook)


def _share(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tokenizer = make()
    for step in range(3):  # the images of a process are not neighbours in the batch of one process
        _, scalars = tokenizer(_some_of(step, slice(rank, None, 2)))
        tokenizer.after_step(START)
    torch.save((tokenizer.state_dict(), scalars["codes"]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _some_of(step: int, which: slice) -> Views:
    views = some_views(8, start=8 * step)
    return Views([views.pixels[0][which]], views.labels[which], views.keys[which], START)


def test_two_processes_make_the_codebook_of_one(tmp_path: Path) -> None:
    mp.start_processes(_share, (str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
    tokenizer = make()
    for step in range(3):
        _, scalars = tokenizer(_some_of(step, slice(None)))
        tokenizer.after_step(START)
    for rank in range(2):
        state, codes = torch.load(tmp_path / f"{rank}.pt")
        assert float(codes) == pytest.approx(float(scalars["codes"]), rel=1e-5)
        for name, value in tokenizer.state_dict().items():
            assert torch.allclose(value, state[name], atol=1e-5), name
