"""DeepSpeed's own objects in a saved state: written by their fields, rebuilt without their code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

_BY_FIELDS = ("deepspeed.runtime.fp16.loss_scaler", ("LossScaler", "DynamicLossScaler"))
_KNOWN = (
    ("deepspeed.runtime.zero.config", ("ZeroStageEnum",)),
    ("deepspeed.runtime.fp16.loss_scaler", ("LossScaleConfig", "LossScaleProfile")),
    ("deepspeed.utils.tensor_fragment", ("fragment_address",)),
    ("deepspeed.checkpoint.universal_checkpoint", ("SubparamShape",)),
)
"""Enums and dataclasses, which a checkpoint can hold as they are; some versions lack some."""


@dataclass
class UpstreamObject:
    """Stands for an object of one of DeepSpeed's classes that are no dataclasses.

    Attributes:
        kind: name of the class.
        fields: its attributes.
    """

    kind: str
    fields: dict[str, Any]


def classes() -> list[type]:
    """Classes of DeepSpeed that states hold, for `allow` and for torch's safe globals."""
    known = (kind for module, names in (_BY_FIELDS, *_KNOWN) for kind in _those(module, names))
    return [UpstreamObject, *known]


def by_fields(state: Any) -> Any:
    """The state with DeepSpeed's objects, as they are now, in a form that can be saved.

    Tensors are others over the same memory, which they keep whatever becomes of the ones given.
    """
    if type(state) is dict:
        return {key: by_fields(value) for key, value in state.items()}
    if type(state) is list:
        return [by_fields(value) for value in state]
    if type(state) in (torch.Tensor, torch.nn.Parameter):
        return state.detach()
    if type(state).__name__ in _BY_FIELDS[1] and type(state) in _those(*_BY_FIELDS):
        return UpstreamObject(type(state).__name__, dict(vars(state)))
    return state


def rebuilt(state: Any) -> Any:
    """The other direction of `by_fields`; dicts are changed in place."""
    if type(state) is dict:
        for key, value in state.items():
            state[key] = rebuilt(value)
    elif isinstance(state, UpstreamObject):
        kind = next(kind for kind in _those(*_BY_FIELDS) if kind.__name__ == state.kind)
        made: Any = object.__new__(kind)
        vars(made).update(state.fields)
        return made
    return state


def _those(module: str, names: tuple[str, ...]) -> list[type]:
    home = import_module(module)
    return [getattr(home, name) for name in names if hasattr(home, name)]
