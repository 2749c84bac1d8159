"""Which checkpoint is restored: the newest that is whole, the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from dos.checkpoint.directory import CheckpointDirectory, Saved
from dos.checkpoint.ranks import Ranks
from dos.errors import CheckpointError, DOSError, FormatError, IntegrityError

T = TypeVar("T")


def newest_whole(
    directory: CheckpointDirectory,
    ranks: Ranks,
    read: Callable[[Saved], T],
    step: int | None = None,
) -> T | None:
    """What `read` makes of the newest checkpoint that all ranks can read; warns of those newer.

    Args:
        directory: of the checkpoints.
        ranks: all that read; they call this together, and rank 0 says what there is.
        read: reads one; FormatError or IntegrityError: it is not whole.
        step: only the checkpoint of this step is tried.

    Returns:
        None: there is no checkpoint.

    Raises:
        ConfigError: there is none of this step, or what else `read` raises.
        FormatError, IntegrityError: none can be read; that of the newest.
        CheckpointError: another rank cannot go on.
    """
    faults: list[DOSError] = []
    damaged = directory.damaged() if step is None else []
    for path, damage in damaged:
        _warn(path, damage)
    there = [one.step for one in reversed(directory.saved())] if step is None else [step]
    for number in ranks.exchange("steps", there)[0]:
        found, fault = _read_by_all(directory, ranks, read, number)
        if fault is None:
            return found
        if step is None:
            _warn(directory.path_of(number), fault)
        faults.append(fault)
    for error in (*faults, *(damage for _, damage in damaged)):
        raise error
    return None


def _read_by_all(
    directory: CheckpointDirectory, ranks: Ranks, read: Callable[[Saved], T], step: int
) -> tuple[T | None, DOSError | None]:
    """What was read, or why the checkpoint is not whole, here or for another rank."""
    found, error = None, None
    try:
        found = read(directory.of(step))
    except Exception as failed:
        error = failed
    is_damage = isinstance(error, FormatError | IntegrityError)
    said = ranks.exchange("read", None if error is None else [is_damage, str(error)])
    if isinstance(error, FormatError | IntegrityError):
        return None, error
    if error is not None:
        raise error
    for rank, told in enumerate(said):
        if told is not None:
            kind = IntegrityError if told[0] else CheckpointError
            other = kind(f"rank {rank} cannot read it: {told[1]}", where=directory.path_of(step))
            if told[0]:
                return None, other
            raise other
    return found, None


def _warn(path: str, error: DOSError) -> None:
    text = f"{path} is not whole, and another checkpoint is taken: {error}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)
