"""Which checkpoint is restored: the newest that is whole, the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from dos.checkpoint.directory import CheckpointDirectory, Saved
from dos.checkpoint.ranks import Ranks
from dos.errors import CheckpointError, DOSError, FormatError, IntegrityError, RefusedError

T = TypeVar("T")

_KINDS = {kind.__name__: kind for kind in (RefusedError, IntegrityError, CheckpointError)}


def newest_whole(
    directory: CheckpointDirectory,
    ranks: Ranks,
    read: Callable[[Saved], T],
    step: int | None = None,
    *,
    ready: Callable[[], None] = lambda: None,
) -> T | None:
    """What `read` makes of the newest checkpoint that all ranks can read; warns of those newer.

    Args:
        directory: of the checkpoints.
        ranks: all that read; they call this together, and rank 0 says what there is.
        read: reads one; FormatError, but no RefusedError, or IntegrityError: it is not whole.
        step: only the checkpoint of this step is tried.
        ready: called before all else.

    Returns:
        None: there is no checkpoint.

    Raises:
        ConfigError: there is none of this step, or what else `read` or `ready` raises.
        RefusedError: the newest that is not damaged cannot be read so.
        FormatError, IntegrityError: none can be read; that of the newest.
        CheckpointError: another rank cannot go on.
    """

    def there() -> list[int]:
        ready()
        if step is not None:
            return [step]
        return directory.steps() if ranks.rank == 0 else []

    found, fault = _by_all(ranks, directory.path, there)
    if fault is not None:
        raise fault
    faults = list[Exception]()
    for number in ranks.exchange("steps", found)[0]:
        path = directory.path_of(number)
        made, fault = _by_all(ranks, path, lambda n: read(directory.of(n)), number)
        if fault is None:
            return made
        if step is None:
            text = f"{path} is not whole, and another checkpoint is taken: {fault}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        faults.append(fault)
    if faults:
        raise faults[0]
    return None


def _by_all(
    ranks: Ranks, where: str, work: Callable[..., T], *arguments: Any
) -> tuple[T | None, Exception | None]:
    """What was made, or the damage that this rank or another found; any other error is raised.

    So all ranks go on, or try another checkpoint, or raise, whichever of them has the error.
    """
    made, errors = None, list[Exception]()
    try:
        made = work(*arguments)
    except Exception as failed:
        errors.append(failed)
    mine = [(_kind(error).__name__, str(error)) for error in errors]
    for rank, told in enumerate(ranks.exchange("read", mine)):
        errors += [_KINDS[kind](f"rank {rank}: {text}", where=where) for kind, text in told]
    for error in errors:
        if _kind(error) is not IntegrityError:
            raise error
    return made, errors[0] if errors else None


def _kind(error: Exception) -> type[DOSError]:
    """What an error of one rank is on the others; damage is an IntegrityError."""
    if isinstance(error, RefusedError):
        return RefusedError
    return IntegrityError if isinstance(error, FormatError | IntegrityError) else CheckpointError
