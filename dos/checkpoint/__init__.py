"""Checkpoint files: written at the disk's speed, whole after any crash.

handle = dos.checkpoint.save({"model": model.state_dict(), "epoch": 3}, "out/epoch-3")
handle.captured.result()  # the state may change again
handle.result()  # it is on the disk
state = dos.checkpoint.load("out/epoch-3")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOME = {
    "Checkpointer": "dos.checkpoint.checkpointer",
    "save": "dos.checkpoint.saving",
    "Handle": "dos.checkpoint.handle",
    "Progress": "dos.checkpoint.handle",
    "load": "dos.checkpoint.reader",
    "verify": "dos.checkpoint.verifying",
    "inspect": "dos.checkpoint.inspecting",
    "Pieces": "dos.memory.pieces",
}

__all__ = ["Checkpointer", "Handle", "Pieces", "Progress", "inspect", "load", "save", "verify"]

if TYPE_CHECKING:
    from dos.checkpoint.checkpointer import Checkpointer
    from dos.checkpoint.handle import Handle, Progress
    from dos.checkpoint.inspecting import inspect
    from dos.checkpoint.reader import load
    from dos.checkpoint.saving import save
    from dos.checkpoint.verifying import verify
    from dos.memory.pieces import Pieces


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dos.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
