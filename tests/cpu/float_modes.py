"""Floating-point modes that some library may have left a thread in."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

# FE_UPWARD and FE_TOWARDZERO of <fenv.h>.
_ROUNDING = {
    "x86_64": {"upward": 0x800, "toward zero": 0xC00},
    "aarch64": {"upward": 0x400000, "toward zero": 0xC00000},
}.get(platform.machine(), {})
FLUSHING = "flushing"
ROUNDING = ["upward", "toward zero"]
MODES = [FLUSHING, *ROUNDING]
_DEFAULT = (0, False)


@contextmanager
def float_mode(name: str) -> Iterator[None]:
    """Put the calling thread into a mode of `MODES`, then back into the default one."""
    if name == FLUSHING:
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush subnormals")
    elif name not in _ROUNDING:
        pytest.skip(f"no number known for rounding {name} on this machine")
    else:
        assert _libm().fesetround(_ROUNDING[name]) == 0
    try:
        yield
    finally:
        _libm().fesetround(_DEFAULT[0])
        torch.set_flush_denormal(False)


def mode_now() -> tuple[int, bool]:
    """The calling thread's direction of rounding, and whether it flushes subnormals."""
    smallest_normal = torch.tensor(2.0**-126)
    return _libm().fegetround(), (smallest_normal * 0.5).item() == 0.0


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")
