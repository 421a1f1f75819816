"""A Trainer with a scheduler and callbacks that have state, killed at moments of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loaders.loops_transformers import Net, Rows
from loaders.parts import trainer_arguments
from support.killed import Moment
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import tierd
from tierd.adapters.transformers import TierdCallback

TIMES = ("runtime", "per_second")  # of log entries, which differ from run to run


class Counting(Trainer):  # type: ignore[misc]
    def floating_point_ops(self, inputs: Any) -> int:
        return 100


class Watch(TrainerCallback):
    """Records each step, and kills."""

    def __init__(self, moment: Moment, every: int, left_out: str) -> None:
        self.moment, self.every, self.left_out = moment, every, left_out

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moment.reached("step", state.global_step, state.global_step // self.every * self.every)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        rate = parts["optimizer"].param_groups[0]["lr"]
        self.moment.record(f"step {state.global_step}", [*parts["model"].seen, rate])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moment.record("resumed", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moment.reached("epoch", state.global_step, (state.global_step - 1) // self.every * self.every)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moment.reached("evaluation", state.global_step, (state.global_step - 1) // self.every * self.every)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        history = [
            {name: value for name, value in entry.items() if not name.endswith(TIMES) and name != self.left_out}
            for entry in state.log_history
        ]
        self.moment.record("history", history[:-1])  # the last is the summary of this launch alone
        self.moment.record("end", [state.global_step, state.total_flos, state.best_metric])


def _train(home: Path, moment: Moment, every: int, left_out: str = "", **options: Any) -> None:
    torch.set_num_threads(1)
    args = trainer_arguments(
        home,
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=0.05,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 0.5, "factor": 0.7},
        metric_for_best_model="loss",
        greater_is_better=False,
        prediction_loss_only=True,
        label_names=["ids"],
        restore_callback_states_from_checkpoint=True,
        seed=3,
        **options,
    )
    with tierd.Checkpointer(home / "spool", "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_steps=every)
        stopping = EarlyStoppingCallback(early_stopping_patience=4)
        callbacks = [Watch(moment, every, left_out), saving, stopping]
        trainer = Counting(model=Net(), args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=saving.resume(trainer))


def by_steps(home: Path, moment: Moment) -> None:
    """An epoch has 12 steps; saves, log entries and evaluations come together every 3."""
    _train(home, moment, 3, logging_steps=3, eval_strategy="steps", eval_steps=3)


def by_epochs(home: Path, moment: Moment) -> None:
    """Saves come every 4 steps, log entries and evaluations at an epoch's end.

    `Trainer` has no state of the mean loss that it logs, so its mean begins at the step from which it resumes.
    """
    _train(home, moment, 4, "loss", logging_strategy="epoch", eval_strategy="epoch")
