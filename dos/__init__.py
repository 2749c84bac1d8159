"""Deep Optimizer States: exact, interleaved optimizer updates from pinned host memory.

Importing this package loads no torch: each public name is fetched on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "DOSOptimizer": "dos.optimizer",
    "Checkpointer": "dos.checkpoint.checkpointer",
    "CheckpointCallback": "dos.integrations.trainer_checkpoints",
    "DOSConfig": "dos.config",
    "VirtualDevice": "dos.config",
    "register_ddp": "dos.ddp",
    "register_transformers": "dos.integrations.transformers",
    "DOSError": "dos.errors",
    "ConfigError": "dos.errors",
    "IntegrationError": "dos.errors",
    "PlanError": "dos.errors",
    "PoolError": "dos.errors",
    "IntegrityError": "dos.errors",
    "FormatError": "dos.errors",
    "CheckpointError": "dos.errors",
}

__all__ = [
    "CheckpointCallback",
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "DOSConfig",
    "DOSError",
    "DOSOptimizer",
    "FormatError",
    "IntegrationError",
    "IntegrityError",
    "PlanError",
    "PoolError",
    "VirtualDevice",
    "register_ddp",
    "register_deepspeed",
    "register_transformers",
]

if TYPE_CHECKING:
    from dos.checkpoint.checkpointer import Checkpointer
    from dos.config import DOSConfig, VirtualDevice
    from dos.ddp import register_ddp
    from dos.errors import (
        CheckpointError,
        ConfigError,
        DOSError,
        FormatError,
        IntegrationError,
        IntegrityError,
        PlanError,
        PoolError,
    )
    from dos.integrations.trainer_checkpoints import CheckpointCallback
    from dos.integrations.transformers import register_transformers
    from dos.optimizer import DOSOptimizer


def register_deepspeed() -> None:
    """Let DeepSpeed configurations switch this library on: the section "deep_optimizer_states".

    Call it before `deepspeed.initialize`. See `dos.integrations.deepspeed_zero3.register`.

    Raises:
        IntegrationError: DeepSpeed is not installed, or not as known.
    """
    try:
        import_module("deepspeed")
    except ImportError as error:
        raise import_module("dos.errors").IntegrationError(
            f"DeepSpeed cannot be imported: {error}",
            where="register_deepspeed",
            fix="pip install 'deep-optimizer-states[deepspeed]'",
        ) from error
    import_module("dos.integrations.deepspeed_zero3").register()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dos' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
