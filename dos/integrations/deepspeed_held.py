"""What only an engine's step changes: it is written where it lies, and the step waits for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dos.memory.gates import Gates, HeldState, Hold

_PART_BYTES = 64 << 20
"""Of a held range that are set free together: the shorter, the sooner a hang is told from work."""

_TRAINED = ("bit16_groups", "fp16_groups", "bf16_groups")
"""Where upstream's optimizers have the model's parameters that they update, one of these each."""


def hold_until_step(engine: Any, gates: Gates, what: str) -> HeldState:
    """Hold the trained weights, masters and optimizer state of an engine of DeepSpeed.

    Args:
        engine: of DeepSpeed. Where this library updates its state, the update waits by itself.
        gates: that any other step has to wait for.
        what: names the capture in messages.
    """
    session = getattr(engine.optimizer, "_dos", None)
    if session is not None:
        held: HeldState = session.hold(what)
        return held
    holds: list[Hold] = []
    for place, begin, end in _merged(_ranges(engine)):
        for at in range(begin, end, _PART_BYTES):
            holds.append(Hold(place, at, min(at + _PART_BYTES, end), len(holds)))
    return HeldState(gates, holds, what)


def _trained(engine: Any) -> Iterator[torch.Tensor]:
    """Tensors that the base optimizer updates, or that are copies of those.

    A parameter that no optimizer has may change in any forward, so it is not among them.
    """
    for name in _TRAINED:
        for parameters in getattr(engine.optimizer, name, ()):
            yield from (parameter.data for parameter in parameters)
    base = getattr(engine, "basic_optimizer", None)
    if not isinstance(base, torch.optim.Optimizer):
        return
    for group in base.param_groups:
        yield from (parameter.data for parameter in group["params"])
    for parameter, state in base.state.items():
        yield parameter.data
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _ranges(engine: Any) -> Iterator[tuple[str, int, int]]:
    for tensor in _trained(engine):
        if tensor.is_contiguous() and tensor.nbytes and not tensor.is_meta:
            begin = tensor.data_ptr()
            place = "cpu" if tensor.is_cpu else str(tensor.device)
            yield place, begin, begin + tensor.nbytes


def _merged(ranges: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Sorted, and joined where they overlap or adjoin."""
    found: list[tuple[str, int, int]] = []
    for place, begin, end in sorted(ranges):
        if found and found[-1][0] == place and begin <= found[-1][2]:
            found[-1] = place, found[-1][1], max(found[-1][2], end)
        else:
            found.append((place, begin, end))
    return found
