"""Hugging Face's Trainer over engines that save by us, to a disk that takes its time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from dos.errors import CheckpointError
from tests.integration.trainer.llama import make_data, make_model
from tests.integration.zero3.saving import CHECKPOINT, gate, open_soon
from tests.integration.zero3.scenarios_loading import Full
from tests.integration.zero3.scenarios_state import shared_folder

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    **CHECKPOINT,
}


class Late(TrainerCallback):  # type: ignore[misc]
    """Has the disk take nothing until Trainer has long gone on; notes what is whole by then.

    Args:
        folder: of the run.
        full_at: the step whose save finds the disk full instead.
    """

    def __init__(self, folder: Path, full_at: int | None) -> None:
        self.folder, self.full_at = folder, full_at
        self.trainer: Trainer | None = None
        self.whole: list[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Trainer is about to save, or first to evaluate."""
        if not control.should_evaluate:
            self.on_evaluate(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Trainer is about to save."""
        assert self.trainer is not None
        if state.global_step == self.full_at:
            self.trainer.model_wrapped.checkpoint_engine.storage = Full()
        elif control.should_save:
            open_soon(gate(self.trainer.model_wrapped))

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Trainer has saved, and removed what it need not keep."""
        self.whole.append(whole(self.folder))


def whole(folder: Path) -> list[str]:
    """Checkpoints of Trainer's whose tags are whole."""
    return sorted(path.parts[-3] for path in folder.glob("checkpoint-*/*/manifest.json"))


def _trainer(folder: Path, full_at: int | None = None, **arguments: Any) -> tuple[Trainer, Late]:
    steps = itertools.count()
    late = Late(folder, full_at)
    trainer = Trainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            save_steps=2,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=True,
            report_to=[],
            disable_tqdm=True,
            deepspeed=CONFIG,
            **arguments,
        ),
        train_dataset=make_data(),
        eval_dataset=make_data(8),
        compute_metrics=lambda prediction: {"count": next(steps)},
        callbacks=[late],
    )
    late.trainer = trainer
    return trainer, late


def rotating() -> dict[str, Any]:
    """One checkpoint is kept; then a save that fails."""
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        trainer, late = _trainer(folder / "good", save_total_limit=1)
        trainer.train()
        trainer.model_wrapped.destroy()
        found["whole"] = late.whole
        trainer, _ = _trainer(folder / "full", full_at=4, save_total_limit=1)
        try:
            trainer.train()
        except CheckpointError as error:
            found["told"] = error.what
        trainer.model_wrapped.destroy()
        found["left"] = whole(folder / "full")
    return found


def best() -> dict[str, Any]:
    """The best checkpoint is the last."""
    with shared_folder() as folder:
        trainer, _ = _trainer(
            folder,
            load_best_model_at_end=True,
            metric_for_best_model="count",
            greater_is_better=True,
            eval_strategy="steps",
            eval_steps=2,
        )
        trainer.train()
        trainer.model_wrapped.destroy()
    return {"best": Path(trainer.state.best_model_checkpoint).name}
