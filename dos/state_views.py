"""`optimizer.state`: what torch's optimizers keep per parameter, made on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from dos.shards import placed_like
from dos.state import OptimizerState


class StateView(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """Per parameter that has been updated at least once: step, exp_avg, exp_avg_sq.

    And `master`, the fp32 master of a 16-bit weight; of a parameter that was never updated an empty
    dict, as in torch. Each tensor lies on the CPU in a storage of exactly its bytes; of a DTensor
    it is the local shard that does, in a DTensor of the same placement. It is the state itself
    where the parameter's pieces adjoin in host memory; otherwise (residents, subgroups below 1,024
    elements) it is put together for each access, and writing to it changes nothing; so it is with
    `step`.
    """

    def __init__(
        self,
        state: OptimizerState,
        index_of: Mapping[torch.Tensor, int],
        synchronize: Callable[[], None],
    ) -> None:
        self._state, self._index_of, self._synchronize = state, index_of, synchronize

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter not in self:
            return {}
        index = self._index_of[parameter]
        kinds = ["exp_avg", "exp_avg_sq"]
        if parameter.dtype is not torch.float32:
            kinds.append("master")
        step = torch.tensor(float(self._state.steps[index]), dtype=torch.float32, device="cpu")
        state = {kind: placed_like(self._state.whole(index, kind), parameter) for kind in kinds}
        return {"step": step, **state}

    def __contains__(self, parameter: object) -> bool:
        self._synchronize()
        index = self._index_of.get(parameter)  # type: ignore[call-overload]
        return index is not None and self._state.steps[index] > 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._synchronize()
        return (p for p, index in self._index_of.items() if self._state.steps[index])

    def __len__(self) -> int:
        return sum(1 for _ in self)
