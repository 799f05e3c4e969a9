"""A watch as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from sightline.training.watch import Watch


class LightningWatch(Callback):
    """Looks before the first step, whenever a look is due by `trainer.global_step`, and after the last step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After every step of the optimiser; of batches whose gradients are accumulated, once."""
        self.watch(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.end(trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was seen."""
        self.watch.close()
