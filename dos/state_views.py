"""`optimizer.state`: what torch's optimizers keep per parameter, made on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dos.state import OptimizerState


class StateView(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """Per parameter that has been updated at least once: step, exp_avg, exp_avg_sq.

    And `master`, the fp32 master of a 16-bit weight. Each tensor lies on the CPU in a storage
    of exactly its bytes. It is the state itself where the parameter's pieces adjoin in host
    memory; otherwise (residents, subgroups below 1,024 elements) it is put together for each
    access, and writing to it changes nothing; so it is with `step`.
    """

    def __init__(self, state: OptimizerState, index_of: Mapping[torch.Tensor, int]) -> None:
        self._state, self._index_of = state, index_of

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        index = self._index_of[parameter]
        count = self._state.steps[index]
        if count == 0:
            raise KeyError(parameter)
        kinds = ["exp_avg", "exp_avg_sq"]
        if parameter.dtype is not torch.float32:
            kinds.append("master")
        step = torch.tensor(float(count), dtype=torch.float32, device="cpu")
        return {"step": step, **{kind: self._state.whole(index, kind) for kind in kinds}}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p, index in self._index_of.items() if self._state.steps[index])

    def __len__(self) -> int:
        return sum(1 for _ in self)
