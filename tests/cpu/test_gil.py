"""Other Python threads run while a kernel works."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dos.kernels import adam, cast
from dos.kernels.scalars import AdamScalars, DType, Segment

NUMEL = 1 << 20  # about a millisecond of work
NEVER_S = 1000.0
PATIENCE_S = 30.0  # on a busy machine the other thread may be slow to wake
COMPILED = [name for name in adam.available() if name != "reference"]
NATIVE = [name for name in COMPILED if name != "numba"]


class Bystander:
    """A thread that counts how often it got the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            self.count += 1
            time.sleep(0)  # gives the GIL back

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    """It gets the GIL only from somebody who lets go of it: nobody is asked to."""
    interval_s = sys.getswitchinterval()
    found = Bystander()
    sys.setswitchinterval(NEVER_S)
    yield found
    sys.setswitchinterval(interval_s)
    found.stop()


def lets_others_run(bystander: Bystander, call: Callable[[], object]) -> bool:
    """Whether the bystander got the GIL inside a call, in one of many."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        before = bystander.count
        call()
        if bystander.count != before:
            return True
    return False


@pytest.mark.parametrize("impl", COMPILED)
def test_an_update_releases_the_gil(impl: str, bystander: Bystander) -> None:
    p, m, v, g = (np.zeros(NUMEL, np.float32) for _ in range(4))
    scalars = AdamScalars.at_step(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True
    )
    at = {name: array.ctypes.data for name, array in (("p", p), ("m", m), ("v", v), ("g", g))}
    segment = Segment(
        **at, w=0, numel=NUMEL, g_dtype=DType.FP32, w_dtype=DType.NONE, scalars=scalars
    )
    adam.update([segment], impl=impl)  # numba compiles
    assert lets_others_run(bystander, lambda: adam.update([segment], impl=impl))


@pytest.mark.parametrize("impl", NATIVE)
def test_examining_a_gradient_releases_the_gil(impl: str, bystander: Bystander) -> None:
    g = np.zeros(NUMEL, np.float32)
    assert lets_others_run(
        bystander, lambda: cast.examine(g.ctypes.data, NUMEL, DType.FP32, impl=impl)
    )


@pytest.mark.parametrize("impl", NATIVE)
def test_rounding_releases_the_gil(impl: str, bystander: Bystander) -> None:
    source, target = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.uint16)
    at = source.ctypes.data, target.ctypes.data
    assert lets_others_run(bystander, lambda: cast.downscale(*at, NUMEL, DType.BF16, impl=impl))


def test_a_call_that_keeps_the_gil_is_noticed(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_S", 0.2)
    assert not lets_others_run(bystander, lambda: sum(range(10_000)))
