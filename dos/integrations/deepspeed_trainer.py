"""Hugging Face's Trainer over our checkpoints: it waits where it counts on what was saved."""

from __future__ import annotations

import functools
import sys
from typing import Any

from dos.errors import IntegrationError
from dos.integrations.deepspeed_engine import DOSCheckpointEngine, await_all_saves


def register_trainer() -> None:
    """Have Trainer wait for saves before it counts on them; idempotent.

    As soon as `save_checkpoint` has returned, Trainer removes older checkpoints by its
    `save_total_limit` or uploads by `push_to_hub`: there it waits until the new one is durable,
    and a save that failed is raised. It looks for tags before it calls `load_checkpoint`, as for
    the best model at the end: there it waits for the saves under way. All else is written beside
    the training. Where Trainer was never imported, nothing is done.

    Raises:
        IntegrationError: this transformers is not as known.
    """
    home: Any = sys.modules.get("transformers.trainer")
    if home is None:
        return
    try:
        load, save = home.deepspeed_load_checkpoint, home.Trainer._save_optimizer_and_scheduler
    except AttributeError as error:
        raise IntegrationError(
            f"this version of transformers is not as known: {error}",
            where="transformers.Trainer",
            fix="install the version that is tested, or leave 'checkpoint' out of the section",
        ) from error
    if getattr(load, "_dos", False):
        return

    @functools.wraps(load)
    def deepspeed_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        await_all_saves()
        return load(*args, **kwargs)

    @functools.wraps(save)
    def save_optimizer_and_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(self, *args, **kwargs)
        ours = getattr(self.model_wrapped, "checkpoint_engine", None)
        counts_on_it = (self.args.save_total_limit or 0) > 0 or self.args.push_to_hub
        if counts_on_it and isinstance(ours, DOSCheckpointEngine):
            ours.await_durable()
        return result

    deepspeed_load_checkpoint._dos = True  # type: ignore[attr-defined]
    home.deepspeed_load_checkpoint = deepspeed_load_checkpoint
    home.Trainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
