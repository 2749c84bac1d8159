"""A whole state dict in torch's layout, checked against an optimizer before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from dos.errors import ConfigError
from dos.saved_state import SavedState, read_saved
from dos.wrapped import read_group


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """A state dict that fits: per param group its new contents, per parameter its state."""

    groups: list[dict[str, Any]]
    states: dict[torch.Tensor, SavedState | None]

    def set_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the groups of `optimizer` their new contents; the dicts and lists stay."""
        for group, new in zip(optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(new)
        # What torch fills in of options that an older version did not save.
        optimizer.__setstate__({})


def read_state_dict(optimizer: torch.optim.Optimizer, state_dict: Any) -> SavedOptimizer:
    """Match a state dict with the groups and parameters of `optimizer`, as torch does: by order.

    State of no parameter, and unknown entries of a parameter, are ignored.

    Raises:
        ConfigError: it does not fit; says where.
    """
    groups = optimizer.param_groups
    try:
        saved_groups = deepcopy(state_dict["param_groups"])
        entry_of = state_dict["state"].get
        counts = [len(saved["params"]) for saved in saved_groups]
    except (AttributeError, KeyError, TypeError) as error:
        raise _misfit(f"it has not the layout of torch's: {error!r}", "state dict") from None
    if len(saved_groups) != len(groups):
        what = f"it has {len(saved_groups)} param groups, the optimizer {len(groups)}"
        raise _misfit(what, "state dict")
    read = SavedOptimizer([], {})
    for index, (group, saved, count) in enumerate(zip(groups, saved_groups, counts, strict=True)):
        where = f"state dict, param group {index}"
        if count != len(group["params"]):
            raise _misfit(f"it has {count} parameters, not {len(group['params'])}", where)
        read.groups.append(_merged(optimizer, index, group, saved))
        for position, (key, tensor) in enumerate(
            zip(saved["params"], group["params"], strict=True)
        ):
            place = f"{where}, parameter {position}"
            read.states[tensor] = read_saved(entry_of(key), tensor, place)
    return read


def _merged(
    optimizer: torch.optim.Optimizer,
    index: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """The saved hyperparameters with the parameters that are there, checked."""
    merged = {**saved, "params": group["params"]}
    if "param_names" in group:
        merged.setdefault("param_names", group["param_names"])
    read_group(optimizer, index, merged)
    return merged


def _misfit(what: str, where: str) -> ConfigError:
    return ConfigError(
        what, where=where, fix="load what state_dict() of an Adam or AdamW of this model gave"
    )
