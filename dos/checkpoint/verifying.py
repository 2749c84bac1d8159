"""Every checksum of a checkpoint, compared."""

from __future__ import annotations

import os
from collections.abc import Callable

from dos.checkpoint.chunks import ChunkReader, Wanted
from dos.checkpoint.opened import Opened
from dos.checkpoint.reader import resolve
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.wholes import find_wholes
from dos.errors import IntegrityError


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    storage: Storage | None = None,
) -> list[IntegrityError]:
    """All damaged places of a checkpoint: none if it is whole.

    Args:
        path: as of `load`.
        progress: called with the bytes that are read, and all.
        storage: the file system; None: the best engine there is.

    Raises:
        FormatError: there is no checkpoint, or one of a form that is not read.
        IntegrityError: a manifest, header or index is damaged, so that data cannot be checked.
    """
    storage = storage or make_storage()
    found: list[IntegrityError] = []
    done = 0
    with Opened(resolve(path, storage), storage) as opened:
        find_wholes(opened.files)
        total = sum(file.header.chunked_bytes for file in opened.files)

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            if progress is not None:
                progress(done, total)

        for file in opened.files:
            reader = ChunkReader(
                storage, Wanted(file), verify=True, progress=advance, on_damage=found.append
            )
            reader.check()
    return found
