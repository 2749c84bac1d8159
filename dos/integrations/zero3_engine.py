"""The update of ZeRO-3's flat groups: each is one parameter of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dos.config import DOSConfig
from dos.engine import UpdateEngine
from dos.execute.backend import Reading
from dos.execute.work import Piece
from dos.kernels.cast import Examined
from dos.plan import Placement
from perfmodel.profile import NodeProfile

SMALLEST_SUBGROUP = 1024
"""Elements of a page of state: from there on the state of a flat group lies in one piece."""


class FlatGroupEngine(UpdateEngine):
    """Updates flat groups whose gradients and masters are kept by ZeRO-3.

    Args:
        weights: per flat group, its 16-bit (or fp32) weights, 1-D.
        groups: the param group of each.
        config: options; with residents a flat group is one subgroup, so that all of a resident
            group's state lies on the device.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], groups: Sequence[int], config: DOSConfig
    ) -> None:
        if config.resident_ratio:
            largest = max(weight.numel() for weight in weights)
            rounded = -(-largest // SMALLEST_SUBGROUP) * SMALLEST_SUBGROUP
            config = config.model_copy(update={"subgroup_size": rounded})
        super().__init__(weights, groups, config, placed=True)

    @property
    def profile(self) -> NodeProfile | None:
        """The rates by which the stride is chosen; None where it was given."""
        return None if self._auto is None else self._auto.profile

    def split(self) -> dict[str, int]:
        """Elements per placement: what the stride and the residents come to."""
        numels = dict.fromkeys((placement.value for placement in Placement), 0)
        for size, at in zip(self.plan.sizes, self.plan.placement, strict=True):
            numels[at.value] += size.numel
        return numels

    def pieces(self) -> list[dict[Piece, bool]]:
        """Per flat group its pieces, and whether the plan updates them on the device."""
        found: list[dict[Piece, bool]] = [{} for _ in self._parameters]
        for home, at in zip(self.state.subgroups, self.plan.placement, strict=True):
            for piece in home.pieces:
                found[piece.parameter][piece] = at is not Placement.HOST
        return found

    def device_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the gradient of a piece that is updated on the device."""
        assert self._device is not None, "nothing is updated on a device"
        return self._device.empty(numel, dtype)

    def look(self, grad: torch.Tensor) -> Reading:
        """Look at a 1-D gradient where it lies, without waiting for a device."""
        if self._device is None or grad.device.type == "cpu":
            return self._examine(grad)
        return self._device.examine(grad)

    def read(self, readings: Sequence[Reading]) -> list[Examined]:
        """What `look` found, in their order; waits for the device once."""
        on_device = [reading for reading in readings if not isinstance(reading, Examined)]
        found = iter([] if self._device is None else self._device.read(on_device))
        return [its if isinstance(its, Examined) else next(found) for its in readings]

    def set_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Take the memory that the flat groups' weights have now."""
        for mine, now in zip(self._parameters, weights, strict=True):
            if mine.data_ptr() != now.data_ptr():
                mine.data = now.detach()
