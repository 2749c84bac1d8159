"""Running a piece of a test in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_child(report: Callable[[], object]) -> str:
    """What `report` says, or raises, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs ends without a report
        try:
            os.write(writer, str(report()).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text
