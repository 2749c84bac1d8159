"""The states of random number generators: Python's, numpy's, torch's, the device's."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

_log = logging.getLogger(__name__)


def rng_states() -> dict[str, Any]:
    """Copies of the states of the global generators of this process and its current device."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    device = _device()
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Set them. Where the device is of another kind than it was, its generator stays as it is."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    device = _device()
    if device is None:
        return
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    else:
        _log.warning("no state of the generator of %s was saved: it stays as it is", device.type)


def _device() -> torch.device | None:
    """The accelerator, if this process uses it: asking for its generator would start it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    started = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device if started() else None
