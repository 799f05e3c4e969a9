"""A watch as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from sightline.training.watch import Watch


class HuggingFaceWatch(TrainerCallback):
    """Looks before the first step, whenever a look is due by `state.global_step`, and after the last step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.watch(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """After every step of the optimiser."""
        self.watch(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.watch.end(state.global_step)
