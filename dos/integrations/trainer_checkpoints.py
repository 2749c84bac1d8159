"""Checkpoints of Hugging Face's Trainer, written by a `Checkpointer` beside the training."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dos.checkpoint.checkpointer import Checkpointer
from dos.checkpoint.rng import rng_states, set_rng_states
from dos.errors import ConfigError

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ConfigError(
        f"transformers cannot be imported: {error}",
        where="CheckpointCallback",
        fix="pip install 'deep-optimizer-states[transformers]'",
    ) from error

_STATE = "trainer_state.json"
"""What Trainer resumes its own position from."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Has `transformers.Trainer` save its periodic checkpoints beside the training, and resume.

        saver = dos.CheckpointCallback("out/checkpoints", keep=3)
        trainer.add_callback(saver)
        trainer.train(resume_from_checkpoint=saver.resume(trainer))

    Whenever Trainer is about to save, by `save_strategy` "steps" or "epoch", its model, optimizer,
    scheduler, scaler, random states and own state go into a `Checkpointer` instead, before the
    next step. Trainer's "best" and `save_model` stay its own. A resumed run gives the bits of one
    that was never stopped.

    Args:
        directory: for the checkpoints.
        **options: of `dos.Checkpointer`; by `sigterm_grace_s`, SIGTERM ends in a last checkpoint.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        if options.pop("every", None) is not None:
            raise ConfigError(
                "Trainer says when to save", where="every", fix="set save_steps of its arguments"
            )
        self._directory, self._options = directory, options
        self._checkpointer: Checkpointer | None = None
        self._trainer: Any = None
        self._is_due = False
        self._restored_step: int | None = None
        self._rng: tuple[str, dict[str, Any]] | None = None
        self._position: TemporaryDirectory[str] | None = None

    def resume(self, trainer: Any) -> str | None:
        """What `trainer.train(resume_from_checkpoint=...)` takes to go on from the newest.

        Every byte of it is read and checked here, and read again when training begins.

        Args:
            trainer: the Trainer that this callback was added to.

        Returns:
            A directory with Trainer's own state; None: there is no checkpoint.

        Raises:
            FormatError, IntegrityError: there are checkpoints, and none is whole.
        """
        self._trainer = trainer
        newest = self._open().newest()
        if newest is None:
            return None
        self._restored_step = newest.step
        self._position = TemporaryDirectory(prefix="resume-")
        Path(self._position.name, _STATE).write_text(newest.extra["trainer"])
        # The weights come with all else, once training begins.
        trainer._load_from_checkpoint = lambda *args, **kwargs: None
        return self._position.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Everything is made: overwrite it with what was saved."""
        if args.deepspeed or args.load_best_model_at_end:
            raise ConfigError(
                "Trainer saves and loads these itself",
                where="deepspeed" if args.deepspeed else "load_best_model_at_end",
                fix="leave CheckpointCallback out, or that option",
            )
        checkpointer = self._open()
        self._is_due = False
        if self._restored_step is not None:
            del self._trainer._load_from_checkpoint  # of its own again
            restored = checkpointer.restore(self._restored_step, **_parts(parts))
            assert restored is not None
            # What begins an epoch draws from the generators before the next step does.
            self._rng = restored.extra["saved_at"], rng_states()
            self._restored_step = self._position = None

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """Save later, when this step's evaluation is over, and not as Trainer would."""
        return self._take_over(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:
        """As `on_step_end`."""
        return self._take_over(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The last step and its evaluation are over."""
        self._between("step", state, control, parts)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The last epoch and its evaluation are over."""
        self._between("epoch", state, control, parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save what is due, and wait until all is durable."""
        self._between("end", state, control, parts)
        self._open().close()
        self._checkpointer = None

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._directory, **self._options)
        return self._checkpointer

    def _take_over(self, control: Any) -> Any:
        self._is_due |= control.should_save
        control.should_save = False
        return control

    def _between(self, where: str, state: Any, control: Any, parts: dict[str, Any]) -> None:
        """Set the generators if they were saved here; save if that is due."""
        if self._rng is not None and self._rng[0] == where:
            set_rng_states(self._rng[1])
            self._rng = None
        step, checkpointer = state.global_step, self._open()
        if not (self._is_due or (step and checkpointer.is_last(step))):
            return
        self._is_due = False
        given = _parts(parts)
        given["extra"] |= {"trainer": self._state(state, control), "saved_at": where}
        checkpointer.save(step, **given)

    def _state(self, state: Any, control: Any) -> str:
        """Trainer's own state as JSON, with that of its callbacks."""
        if self._trainer is None:
            return json.dumps(dataclasses.asdict(state))
        self._trainer.store_flos()
        states: dict[str, list[Any]] = defaultdict(list)
        for callback in (*self._trainer.callback_handler.callbacks, control):
            if isinstance(callback, ExportableState):
                states[type(callback).__name__].append(callback.state())
        callbacks = {name: its[0] if len(its) == 1 else its for name, its in states.items()}
        return json.dumps({**dataclasses.asdict(state), "stateful_callbacks": callbacks})


def _parts(parts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of save and restore, of what Trainer hands to its callbacks."""
    optimizer = parts["optimizer"]
    extra = {"scheduler": parts["lr_scheduler"], "scaler": getattr(optimizer, "scaler", None)}
    return {
        "model": parts["model"],
        "optimizer": getattr(optimizer, "optimizer", optimizer),  # an AcceleratedOptimizer's own
        "extra": {key: value for key, value in extra.items() if value is not None},
    }
