"""Other ways to save a training run's state while it trains."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from dos.bench.peers import make_durable


class Saver(Protocol):
    """Saves the state of one run, again and again."""

    def save(self, state: dict[str, Any], step: int) -> None:
        """Called between two steps; the state may change once this returns."""

    def close(self) -> None:
        """Wait for the last one."""


Rival = Callable[[str], Saver]
"""Makes a saver for a directory."""


class TorchSave:
    """`torch.save`, made durable."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def save(self, state: dict[str, Any], step: int) -> None:
        """See `Saver`."""
        path = os.path.join(self._directory, f"{step}.pt")
        self.write(state, path)
        make_durable(path)

    def write(self, state: dict[str, Any], path: str) -> None:
        """Write a file."""
        torch.save(state, path)

    def close(self) -> None:
        """See `Saver`."""


class DeepSpeedDefault(TorchSave):
    """The checkpoint engine that DeepSpeed uses where none is configured."""

    def write(self, state: dict[str, Any], path: str) -> None:
        """See `TorchSave`."""
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (
            TorchCheckpointEngine,
        )

        TorchCheckpointEngine().save(state, path)


class DCPAsync:
    """torch.distributed.checkpoint's async_save; one at a time, as it has to be."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._running: Future[Any] | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """See `Saver`."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = os.path.join(self._directory, str(step))
            running = async_save(state, checkpoint_id=path, no_dist=True)
        self._running = running if isinstance(running, Future) else running.upload_completion

    def close(self) -> None:
        """See `Saver`."""
        if self._running is not None:
            self._running.result()


def rivals(*, deepspeed: bool = False) -> dict[str, Rival]:
    """By name, what they are compared with."""
    found: dict[str, Rival] = {"torch_save": TorchSave, "dcp_async": DCPAsync}
    if deepspeed and importlib.util.find_spec("deepspeed") is not None:
        found["deepspeed_default"] = DeepSpeedDefault
    return found
