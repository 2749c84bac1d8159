"""A standard output that holds what a command means to say, and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """The true standard output; all that anything else prints meanwhile goes to standard error.

    By file descriptor, because compilers and C++ libraries know nothing of `sys.stdout`.
    """
    sys.stdout.flush()
    true = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(true, "w", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(true, 1)
        os.close(true)
