"""Python's search for cyclic garbage, kept from looking at what is being built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No search for cyclic garbage meanwhile.

    Each search looks at every object of the process, and making many of them starts many: with
    20,000 tensors they took as long as everything else.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
