"""The plans of an engine's steps: built, checked, and kept for reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dos.config import DOSConfig
from dos.plan import SubgroupSize, UpdatePlan, build, verify
from dos.stride import StridePlanner
from dos.tail import Order

_KEPT = 16
"""Plans kept: one per stride, subgroups without a gradient, gradients sent, and order."""

_CHOSEN_BY = 256
"""Subgroups by which a stride is chosen: more take as long each, and longer to simulate."""


class Planner:
    """Plans by the options of an engine.

    Args:
        config: options.
        host_parameters: the parameters lie in host memory; a stride has no effect then.
    """

    def __init__(self, config: DOSConfig, *, host_parameters: bool) -> None:
        self._config, self._host_parameters = config, host_parameters
        self._kept: dict[tuple[object, ...], UpdatePlan] = {}

    def plan(
        self,
        stride: float | str,
        sizes: tuple[SubgroupSize, ...],
        absent: frozenset[int] = frozenset(),
        order: Order = None,
    ) -> UpdatePlan:
        """The verified plan of a step over subgroups of these sizes.

        Args:
            stride: every k-th of them is updated on the device.
            sizes: of all.
            absent: those without a gradient.
            order: in which they are to be updated; None for any.
        """
        key = str(stride), sizes, absent, order
        if key not in self._kept:
            plan = self._build(stride, sizes, absent, order)
            verify(plan)
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = plan
        return self._kept[key]

    def by_stride(self, sizes: Sequence[SubgroupSize]) -> StridePlanner:
        """Makes what to choose a stride by: gradients sent before the step, not too many sizes."""
        sent = tuple(replace(size, grad_bytes=0) for size in sizes[:_CHOSEN_BY])
        return partial(self._build, sizes=sent, absent=frozenset(), order=None)

    def _build(
        self,
        stride: float | str,
        sizes: tuple[SubgroupSize, ...],
        absent: frozenset[int],
        order: Order,
    ) -> UpdatePlan:
        if self._host_parameters:
            return build(sizes, stride="host", host_parameters=True, absent=absent, order=order)
        return build(
            sizes,
            stride=stride,
            resident_ratio=self._config.resident_ratio,
            slots=self._config.device_slots,
            absent=absent,
            order=order,
        )
