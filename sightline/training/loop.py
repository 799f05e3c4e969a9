"""The training loop, on Lightning Fabric: one or many processes, stop and go, bit-exact resume on the CPU.

Nothing in a step depends on when it is made: images, views and masks follow from the number of the step (feed.py),
learning rate and weight decay from the progress, and a checkpoint holds everything else.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from sightline.core.errors import InputError, first_line
from sightline.core.files import replacing_folder
from sightline.core.folders import latest
from sightline.core.processes import by_first, rank, world
from sightline.core.progress import bar, console
from sightline.core.schedules import Progress
from sightline.core.stopping import Stopped, signals
from sightline.encoders.attention import without_fused_attention
from sightline.encoders.encoder import Encoder
from sightline.encoders.saved import save_encoder
from sightline.training.checkpoints import load, save_checkpoint, tidy
from sightline.training.collectives import gather, mean, sync_batch_norm
from sightline.training.export import as_encoder
from sightline.training.feed import Feed
from sightline.training.monitor import Monitor
from sightline.training.objective import Learner
from sightline.training.optimization import Optimization, make_optimizer, schedule, set_schedule
from sightline.training.watchers import Watcher

PRECISION = {"float32": "32-true", "bf16": "bf16-mixed"}


def make_fabric(device: str, precision: str, devices: int, nodes: int) -> Fabric:
    """Devices, processes and precision, launched: several processes under torchrun or SLURM, or started here."""
    if device not in ("auto", "cpu", "cuda", "gpu"):
        raise InputError(f"There is no device {device!r} to train on; choose auto, cpu or cuda")
    if device in ("cuda", "gpu") and not torch.cuda.is_available():
        raise InputError("There is no CUDA device here; use --device cpu")
    accelerator = {"auto": "cuda" if torch.cuda.is_available() else "cpu", "gpu": "cuda"}.get(device, device)
    if precision == "bf16" and accelerator == "cpu":
        from sightline.core import bfloat16

        bfloat16.ensure()  # processes that are started here inherit what it sets
    fabric = Fabric(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
        precision=PRECISION[precision],  # type: ignore[arg-type]
    )
    fabric.launch()
    return fabric


@dataclass
class Loop:
    """Trains one objective to its end, or until it is told to stop.

    `objective` follows the contract of objective.py. What it exports lies in the checkpoints; `encoder` says how its
    encoder is called, built and used, and is None for an objective that ends in none. After the steps of `keep` the
    encoder, rounded to bfloat16, is kept in steps/00000000, ….
    """

    objective: Learner
    feed: Feed
    settings: Optimization
    folder: Path
    fabric: Fabric
    title: str
    encoder: Encoder | None = None
    watchers: Sequence[Watcher] = ()
    evaluate_every: float = 5
    keep: Sequence[int] = ()
    log_every: int = 20
    save_minutes: float = 2.0
    show_progress: bool = True
    asked: list[int] = field(default_factory=list)  # signals to stop

    def run(self) -> dict[str, float]:
        """Train from the latest checkpoint of the folder, or from the start; gives the last row of the metrics."""
        objective = cast(Learner, sync_batch_norm(self.objective.to(self.fabric.device)))
        self.objective = objective
        with self.fabric.autocast():
            if self.fabric.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
                without_fused_attention(objective)
        optimizer = make_optimizer(objective, self.settings, objective.lr_scales())
        wrapped, optimizer = self.fabric.setup(objective, optimizer)
        self.optimizer: Any = optimizer
        step, kept = self._restore()
        by_first(lambda: tidy(self.folder))
        if step >= self.feed.steps:
            return {}
        if 0 in self.keep and step == 0:
            self._keep(0)
        self.monitor = by_first(lambda: Monitor(self.folder, step))
        earlier = self.monitor.rows[-1:] if self.monitor else []
        self.begun = time.monotonic() - (float(earlier[0].get("seconds") or 0) if earlier else 0)
        try:
            with signals(self.asked):
                return self._train(wrapped, step, _Watch(self.fabric.device, kept))
        finally:
            if self.monitor is not None:
                self.monitor.close()

    def _train(self, wrapped: Any, start: int, watch: _Watch) -> dict[str, float]:
        objective = self.objective
        objective.train()
        row: dict[str, float] = {}
        shown = self.show_progress and rank() == 0
        total = self.feed.steps * self.feed.batch
        with (
            bar(self.title, total, start * self.feed.batch, shown) as move,
            contextlib.closing(self.feed.views(start)) as feed,  # ends the worker processes, however this ends
        ):
            for step, forwards in enumerate(feed, start):
                before = self.feed.progress(step)
                lr, decay = schedule(self.settings, before)
                set_schedule(self.optimizer.param_groups, lr, decay)
                for number, views in enumerate(forwards, 1):
                    with self.fabric.no_backward_sync(wrapped, enabled=number < len(forwards)):
                        loss, scalars = wrapped(views)
                        self.fabric.backward(loss / len(forwards))
                    watch.add(loss.detach(), scalars, 1 / len(forwards))
                norm = None
                if self.settings.clip:
                    norm = self.fabric.clip_gradients(
                        wrapped, self.optimizer, max_norm=self.settings.clip, error_if_nonfinite=False
                    )
                objective.before_step(before)
                self.optimizer.step()
                self.optimizer.zero_grad()
                done = self.feed.progress(step + 1)
                objective.after_step(done)
                watch.steps += 1
                last = done.step == done.steps
                if last or self._evaluation_due(done) or done.step % self.log_every == 0:
                    row = self._row(watch, done, lr, decay, norm)
                    self._tell(row, self._evaluated(done))
                    watch.begun = time.monotonic()  # evaluation is not training
                move(self.feed.batch, f"loss {row['loss']:.4f}" if row else "")
                self._save_when_due(watch, done)
        return row

    # -----------------------------------------------------------------------------------------------------------

    def _row(self, watch: _Watch, done: Progress, lr: float, decay: float, norm: Tensor | None) -> dict[str, float]:
        """Means since the last row; a loss that is not a number ends the training here, before it can be saved."""
        means, speed = watch.take(self.feed.batch)
        if not math.isfinite(means["loss"]):
            self._fail(f"The loss became {means['loss']} between steps {done.step - watch.taken} and {done.step}")
        row = {"step": done.step, "epoch": done.step / done.per_epoch, "lr": lr, "weight_decay": decay, **means}
        if norm is not None:
            row["gradient_norm"] = float(norm)
        return row | {"images_per_second": speed, "seconds": round(time.monotonic() - self.begun, 1)}

    def _evaluation_due(self, done: Progress) -> bool:
        every = max(1, round(self.evaluate_every * done.per_epoch)) if self.evaluate_every else done.steps
        return any(watcher.evaluates for watcher in self.watchers) and (
            done.step % every == 0 or done.step == done.steps
        )

    def _evaluated(self, done: Progress) -> dict[str, float]:
        if not self._evaluation_due(done):
            return {}
        return {name: value for watcher in self.watchers for name, value in watcher.evaluate(done).items()}

    def _tell(self, row: dict[str, float], evaluated: Mapping[str, float]) -> None:
        row.update(evaluated)
        monitor = self.monitor
        by_first(lambda: monitor.write(row) if monitor is not None else None)
        if monitor is None:
            return
        for note in filter(None, (watcher.warning(row) for watcher in self.watchers)):
            console().print(note, style="yellow")
        if self.show_progress and evaluated:
            numbers = ", ".join(f"{key.replace('_', ' ')} {_shown(key, value)}" for key, value in evaluated.items())
            console().print(f"epoch {row['epoch']:.3g}: loss {row['loss']:.4f}, {numbers}")

    def _save_when_due(self, watch: _Watch, done: Progress) -> None:
        last = done.step == done.steps
        stop, due = self._largest(self._told_to_stop(), watch.since_save() > 60 * self.save_minutes)
        kept = done.step in self.keep
        if not last and not stop and not due and not kept:
            return
        sound = watch.finite() and all(bool(p.isfinite().all()) for p in self.objective.parameters())
        if self._largest(not sound)[0]:
            self._fail(f"The loss or the weights are no longer finite after step {done.step}")
        before = time.monotonic()
        if kept:  # before the checkpoint: a training that is resumed from it would not come back here
            self._keep(done.step)
        if last or stop or due:
            self._save(done.step, watch)
            watch.last_save = time.monotonic()
        watch.begun += time.monotonic() - before  # saving is not training
        if stop and not last:
            raise Stopped(stop, f"Stopped and saved after step {done.step} of {done.steps}")

    def _fail(self, what: str) -> None:
        """End the training in all processes, before anything can be saved over the last good checkpoint."""
        kept = latest(self.folder)
        where = f"the last good checkpoint is {kept.name} in {str(self.folder)!r}" if kept else "nothing was saved"
        raise InputError(f"{what}; {where}; train again with a lower lr, a longer warm-up (warmup_epochs) or clip=1")

    def _told_to_stop(self) -> int:
        return self.asked[-1] if self.asked else 0

    def _largest(self, *numbers: int) -> list[int]:
        """Over all processes: what one of them is told, all do, after the same step."""
        if world() == 1:
            return list(numbers)
        shared = torch.tensor(numbers, device=self.fabric.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        return [int(number) for number in shared]

    def _save(self, step: int, watch: _Watch) -> None:
        generators = {"cpu": self._gathered(torch.get_rng_state())}
        if self.fabric.device.type == "cuda":
            generators["cuda"] = self._gathered(torch.cuda.get_rng_state())
        optimizer, sums = getattr(self.optimizer, "optimizer", self.optimizer), watch.kept()
        by_first(lambda: save_checkpoint(self.folder, step, self.objective, optimizer, generators, sums, self._export))

    def _keep(self, step: int) -> None:
        by_first(lambda: self._keep_step(step))

    def _keep_step(self, step: int) -> None:
        """The encoder after a step, a whole folder or none."""
        assert self.encoder is not None
        with replacing_folder(self.folder / "steps" / f"{step:08d}") as temporary:
            save_encoder(as_encoder(self.objective, self.encoder), temporary, dtype=torch.bfloat16)

    def _export(self, folder: Path) -> None:
        self.objective.export(folder, self.encoder)

    def _gathered(self, state: Tensor) -> Tensor:
        """A generator's state of every process, (world, bytes)."""
        return gather(state.to(self.fabric.device).unsqueeze(0)).cpu()

    def _restore(self) -> tuple[int, dict[str, float]]:
        """Number of finished steps, and the sums of the running row of the metrics."""
        folder = latest(self.folder)
        if folder is None:
            return 0, {}
        step, generators, sums = load(folder, self.objective, getattr(self.optimizer, "optimizer", self.optimizer))
        mine = {name: states[rank()] for name, states in generators.items() if rank() < len(states)}
        try:
            if "cpu" in mine:
                torch.set_rng_state(mine["cpu"])
            if "cuda" in mine and torch.cuda.is_available():
                torch.cuda.set_rng_state(mine["cuda"])
        except (RuntimeError, TypeError) as error:
            raise InputError(f"Cannot read the checkpoint {str(folder)!r}: {first_line(error)}; start over") from error
        return step, sums


def _shown(name: str, value: float) -> str:
    """A number in the terminal: ranks as they are, accuracies in per cent."""
    return f"{value:.1f}" if name.startswith(("rank_", "centred_rank_")) else f"{value:.1%}"


class _Watch:
    """Sums of what a step gives, added up where they are, and the time."""

    def __init__(self, device: torch.device, kept: Mapping[str, float]) -> None:
        """Go on with the sums that a checkpoint has kept."""
        self.sums = {name: torch.tensor(value, device=device) for name, value in kept.items() if name != "steps"}
        self.steps, self.taken = int(kept.get("steps", 0)), 0
        self.earlier = self.steps  # made before `begun`
        self.begun = self.last_save = time.monotonic()

    def add(self, loss: Tensor, scalars: Mapping[str, Tensor], share: float) -> None:
        for name, value in {"loss": loss, **scalars}.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value.detach().float() * share

    def kept(self) -> dict[str, float]:
        return {"steps": self.steps, **self._means()}

    def finite(self) -> bool:
        return not self.sums or math.isfinite(float(self.sums["loss"]))

    def take(self, batch: int) -> tuple[dict[str, float], float]:
        """Means over the steps since the last time (and over processes), and images per second."""
        means = {name: value / max(1, self.steps) for name, value in self._means().items()}
        speed = (self.steps - self.earlier) * batch / (time.monotonic() - self.begun)
        self.taken, self.steps, self.earlier, self.sums = self.steps, 0, 0, {}
        return means, speed

    def _means(self) -> dict[str, float]:
        """The sums, as means over processes."""
        values = mean(torch.stack(list(self.sums.values()))) if self.sums else torch.zeros(0)
        return dict(zip(self.sums, values.tolist(), strict=True))

    def since_save(self) -> float:
        return time.monotonic() - self.last_save
