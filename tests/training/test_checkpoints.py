"""Checkpoints: bit-exact, whole or not there, and one sentence for each that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sightline.core.errors import InputError
from sightline.core.folders import latest
from sightline.training.checkpoints import load, load_module, save_checkpoint, tensors_of, tidy
from sightline.training.optimization import Optimization, make_optimizer, set_schedule

OPTIMIZERS = ("adamw", "sgd", "lars")


class Net(nn.Module):
    """With batch statistics, a frozen part, a buffer of its own and one layer in two places."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(width, 3)
        self.alias = self.head
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.frozen(self.alias(self.body(x)))
        self.centre.lerp_(y.detach().mean(0), 0.1)
        return y


def make(optimizer: str, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, make_optimizer(net, Optimization(optimizer=optimizer, lr=0.05, weight_decay=0.1))


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_schedule(optimizer.param_groups, 0.05 / (1 + step), 0.1)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(run: Path, step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    generators = {"cpu": torch.get_rng_state().unsqueeze(0)}
    return save_checkpoint(run, step, net, optimizer, generators, {"steps": 3, "loss": 0.5})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_is_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    net, optimizer = make(name)
    train(net, optimizer, range(5))
    folder = save(tmp_path, 5, net, optimizer)
    saved = {key: value.clone() for key, value in tensors_of(net).items()}
    train(net, optimizer, range(5, 10))

    other, again = make(name, seed=1)
    step, generators, sums = load(folder, other, again)
    assert sums == {"steps": 3, "loss": 0.5}
    torch.set_rng_state(generators["cpu"][0])
    assert step == 5
    for key, value in tensors_of(other).items():
        assert torch.equal(value, saved[key]), key
    train(other, again, range(5, 10))
    for key, value in tensors_of(net).items():
        assert torch.equal(value, tensors_of(other)[key]), key
    for mine, theirs in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key], key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_that_has_not_begun_can_be_saved(name: str, tmp_path: Path) -> None:
    net, optimizer = make(name)
    folder = save(tmp_path, 0, net, optimizer)
    other, again = make(name, seed=1)
    assert load(folder, other, again)[0] == 0
    assert torch.equal(other.head.weight, net.head.weight)


def test_what_two_parts_share_is_saved_once(tmp_path: Path) -> None:
    net, optimizer = make("adamw")
    stored = load_file(save(tmp_path, 1, net, optimizer) / "training.safetensors")
    assert stored.keys() == tensors_of(net).keys()
    assert {"head.weight", "centre", "body.1.running_var", "body.1.num_batches_tracked"} <= stored.keys()
    assert not any(key.startswith("alias") for key in stored)
    assert "alias.weight" in net.state_dict()


def test_nothing_is_saved_before_the_first(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    (tmp_path / "checkpoints" / "00000007").mkdir(parents=True)  # killed before it could point there
    assert latest(tmp_path) is None


def test_old_checkpoints_and_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make("sgd")
    first = save(tmp_path, 1, net, optimizer)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # half of one
        patch.setattr("sightline.core.files.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 9, net, optimizer, {}, {}, killed)
    with monkeypatch.context() as patch:  # whole, but never pointed to
        patch.setattr("sightline.training.checkpoints.write_atomically", lambda path, content: None)
        patch.setattr("sightline.training.checkpoints.remove_checkpoints", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 2, net, optimizer, {}, {}, lambda folder: (folder / "head.json").touch())
    assert latest(tmp_path) == first
    assert (tmp_path / "checkpoints" / "00000002" / "head.json").exists()
    tidy(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    second = save(tmp_path, 2, net, optimizer)
    assert latest(tmp_path) == second != first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000002"]
    names = ["optimizer.safetensors", "state.json", "training.safetensors"]
    assert sorted(path.name for path in second.iterdir()) == names


def test_what_a_kill_has_left_before_the_first_one_is_removed(tmp_path: Path) -> None:
    for part in ("checkpoints", "steps"):
        (tmp_path / part / ".00000000.99-0123abcd.tmp").mkdir(parents=True)
        (tmp_path / part / ".00000000.99-0123abcd.tmp" / ".encoder.json.99-0123abcd.tmp").touch()
    tidy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_put_among_the_checkpoints_stays(tmp_path: Path) -> None:
    net, optimizer = make("sgd")
    save(tmp_path, 1, net, optimizer)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "best.pth").write_bytes(b"theirs")
    folder = tmp_path / "checkpoints"
    (folder / "best.pth").write_bytes(b"mine")
    (folder / "00000001" / "notes.txt").write_text("mine")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    save(tmp_path, 2, net, optimizer)
    save(tmp_path, 3, net, optimizer)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001", "00000003", "best.pth", "linked"]
    assert [path.name for path in (folder / "00000001").iterdir()] == ["notes.txt"]
    assert (tmp_path / "elsewhere" / "best.pth").read_bytes() == b"theirs"


def test_saving_the_same_step_again_changes_nothing(tmp_path: Path) -> None:
    net, optimizer = make("sgd")
    folder = save(tmp_path, 3, net, optimizer)
    before = (folder / "training.safetensors").read_bytes()
    nn.init.zeros_(net.head.weight)
    assert save(tmp_path, 3, net, optimizer) == folder
    assert (folder / "training.safetensors").read_bytes() == before


def test_half_written_checkpoints_leave_the_last_one(tmp_path: Path) -> None:
    net, optimizer = make("adamw")
    kept = save(tmp_path, 1, net, optimizer)

    def interrupted(folder: Path) -> None:
        (folder / "encoder.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, net, optimizer, {}, {}, interrupted)
    assert latest(tmp_path) == kept
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    load(kept, *make("adamw", seed=1))


@pytest.mark.parametrize("number", [28, 13])
def test_what_the_system_refuses_is_a_sentence(number: int, tmp_path: Path) -> None:
    net, optimizer = make("adamw")
    kept = save(tmp_path, 1, net, optimizer)

    def refused(folder: Path) -> None:
        raise OSError(number, "no")

    with pytest.raises(InputError, match="disk is full" if number == 28 else "No permission"):
        save_checkpoint(tmp_path, 2, net, optimizer, {}, {}, refused)
    assert latest(tmp_path) == kept


def test_more_is_written_before_the_checkpoint_counts(tmp_path: Path) -> None:
    net, optimizer = make("sgd")
    seen: list[Path | None] = []

    def export(folder: Path) -> None:
        seen.append(latest(tmp_path))
        (folder / "encoder.json").write_text("{}")

    folder = save_checkpoint(tmp_path, 4, net, optimizer, {}, {}, export)
    assert seen == [None]
    assert (folder / "encoder.json").is_file()


def test_a_pointer_to_nothing_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(json.dumps({"checkpoint": "00000012", "step": 12}))
    with pytest.raises(InputError, match="names the checkpoint 00000012, which is not there"):
        latest(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"checkpoint": "../../elsewhere"}'])
def test_a_pointer_that_leads_to_no_checkpoint_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(InputError, match=r"Cannot read .*latest\.json"):
        latest(tmp_path)


def test_another_module_is_a_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, *make("adamw"))
    before = Net(width=9)
    weight = before.frozen.weight.clone()
    for other in (before, nn.Linear(6, 3)):
        with pytest.raises(InputError, match="belongs to another objective or backbone, or to another version"):
            load_module(folder, other)
    assert torch.equal(before.frozen.weight, weight)  # nothing is half loaded


@pytest.mark.parametrize("name", ["training.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_a_sentence(name: str, damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1, *make("adamw"))
    path = folder / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:20])
    else:
        path.unlink()
    with pytest.raises(InputError, match="Cannot read the checkpoint"):
        load(folder, *make("adamw"))


@pytest.mark.parametrize("damage", [lambda state: state.pop("step"), lambda state: state["optimizer"]["groups"].pop()])
def test_a_state_of_another_form_is_a_sentence(damage: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    folder = save(tmp_path, 1, *make("adamw"))
    state = json.loads((folder / "state.json").read_text())
    damage(state)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"Cannot read the checkpoint .*; start over"):
        load(folder, *make("adamw"))
