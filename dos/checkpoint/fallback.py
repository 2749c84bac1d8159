"""Which checkpoint is restored: the newest that is whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from dos.checkpoint.directory import CheckpointDirectory, Saved
from dos.errors import DOSError, FormatError, IntegrityError

T = TypeVar("T")


def newest_whole(
    directory: CheckpointDirectory, read: Callable[[Saved], T], step: int | None = None
) -> T | None:
    """What `read` makes of the newest checkpoint that it can read, with a warning of each newer.

    Args:
        directory: of the checkpoints.
        read: reads one; FormatError or IntegrityError: it is not whole.
        step: only the checkpoint of this step is tried.

    Returns:
        None: there is no checkpoint.

    Raises:
        ConfigError: there is none of this step.
        FormatError, IntegrityError: none can be read; that of the newest.
    """
    if step is not None:
        return read(directory.of(step))
    errors: list[DOSError] = []
    damaged = directory.damaged()
    for path, damage in damaged:
        _warn(path, damage)
    for saved in reversed(directory.saved()):
        try:
            return read(saved)
        except (FormatError, IntegrityError) as error:
            errors.append(error)
            _warn(saved.path, error)
    for error in (*errors, *(damage for _, damage in damaged)):
        raise error
    return None


def _warn(path: str, error: DOSError) -> None:
    text = f"{path} is not whole, and another checkpoint is taken: {error}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)
