"""`stride="auto"`: the fastest stride by the performance model, and when to think again."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dos.execute.record import StepRecord
from dos.plan import Placement, UpdatePlan
from dos.trace import busy_s
from perfmodel.profile import LANE_RATES, NodeProfile
from perfmodel.solve import Limits, Option, Planned, best_stride
from perfmodel.timeline import simulate

logger = logging.getLogger("dos")

Stride = float | Literal["host"]

StridePlanner = Callable[[Stride], UpdatePlan]
"""Makes the plan of a step of some stride whose gradients were sent during backward."""

SLOT_MARGIN = 0.15
"""Memory that must be free beside slots that are to be had, as a share of theirs."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that slots of any stride take, those that they hold, and `Device.free_bytes`."""

    needed_bytes: int
    held_bytes: int
    free_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether slots fit: a margin is asked for before they are had, not afterwards.

        They do where the device does not tell.
        """
        if self.free_bytes is None:
            return True
        if self.held_bytes:
            return self.free_bytes >= 0
        return self.free_bytes >= (1 + SLOT_MARGIN) * self.needed_bytes


class StrideWatch:
    """Judges, step by step, whether a stride still rests on what is true.

    What is off must be so in `patience` steps in a row, so that one slow step moves nothing, and
    another stride is asked for `limit` times at most.

    Args:
        tolerance: how far a lane's time may leave its prediction, as a share of that.
        patience: steps in a row, at least 1.
        limit: how often another stride may be asked for.
        least_share: a lane predicted to be busy for less than this share of the busiest one's
            time is not judged: it decides nothing, and small times vary.
    """

    def __init__(
        self,
        *,
        tolerance: float = 0.15,
        patience: int = 3,
        limit: int = 8,
        least_share: float = 0.1,
    ) -> None:
        self._tolerance, self._least_share = tolerance, least_share
        self._left = limit
        self._ratios: deque[Mapping[str, float]] = deque(maxlen=patience)
        self._fits: deque[bool] = deque(maxlen=patience)

    @property
    def spent(self) -> bool:
        """Whether it has asked for another stride as often as it may."""
        return not self._left

    def step(
        self, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]
    ) -> dict[str, float] | None:
        """Per judged lane its measured over its predicted time, if one is off for long enough.

        None while all is as predicted, and after `limit` times. Steps whose times say nothing,
        as those in which paced ops overran, are not to be given.

        Args:
            predicted_s: seconds of work per lane.
            measured_s: the same as measured; a lane that is missing, or took no time, is not
                judged.
        """
        least_s = self._least_share * max(predicted_s.values(), default=0.0)
        judged = {lane: s for lane, s in predicted_s.items() if 0 < s >= least_s}
        self._ratios.append(
            {
                lane: took_s / judged[lane]
                for lane, took_s in measured_s.items()
                if lane in judged and took_s > 0
            }
        )
        lanes = set.intersection(*(set(ratios) for ratios in self._ratios))
        rows = {lane: [ratios[lane] for ratios in self._ratios] for lane in lanes}
        if not self._full(self._ratios) or not any(map(self._off, rows.values())):
            return None
        self._ratios.clear()
        if not self._left:
            return None
        self._left -= 1
        return {lane: statistics.median(row) for lane, row in sorted(rows.items())}

    def memory(self, fits: bool, *, acted_on: bool) -> bool:
        """Whether `fits` differs from what was acted on for long enough, and `limit` allows."""
        self._fits.append(fits)
        if not self._full(self._fits) or acted_on in self._fits or not self._left:
            return False
        self._left -= 1
        return True

    def _off(self, row: list[float]) -> bool:
        """Too long in every step, or too short in every step."""
        return min(row) > 1 + self._tolerance or max(row) < 1 - self._tolerance

    @staticmethod
    def _full(seen: deque[bool] | deque[Mapping[str, float]]) -> bool:
        return len(seen) == seen.maxlen


class AutoStride:
    """Chooses the strides of one engine, on its rank alone: results do not depend on them.

    Args:
        profile: rates to begin with.
        measure: gives better ones after the first step; None: these are good.
        watch: judges the steps; None where their times say nothing of a node.
    """

    def __init__(
        self,
        profile: NodeProfile,
        *,
        measure: Callable[[], NodeProfile] | None = None,
        watch: StrideWatch | None = None,
    ) -> None:
        profile.rate("device_params_per_s")  # or says what it lacks
        self._profile, self._measure, self._watch = profile, measure, watch
        self._latest: StepRecord | None = None
        self._predicted: tuple[UpdatePlan, dict[str, float]] | None = None
        self._fits = True
        self._stride: Stride | None = None

    @property
    def profile(self) -> NodeProfile:
        """The rates that it goes by now."""
        return self._profile

    @property
    def unmeasured(self) -> bool:
        """Whether the next call of `after_step` measures the machine."""
        return self._measure is not None

    def first(self, planner: StridePlanner) -> Stride:
        """The stride to begin with.

        Args:
            planner: makes the plan of any stride.
        """
        self._stride = self._solved(planner)
        if self._measure is None:
            logger.info("stride %s, by the profile %s", self._stride, self._profile.name)
        return self._stride

    def after_step(
        self, record: StepRecord, memory: DeviceMemory, planner: StridePlanner
    ) -> Stride:
        """The stride for the next step.

        The step before this one is judged, so as not to wait for what this one has left running
        on the device.
        """
        assert self._stride is not None, "first comes first"
        judged, self._latest = self._latest, record
        why = None
        if self._measure is not None:
            measure, self._measure = self._measure, None
            self._profile, self._fits = measure(), memory.fits
            why = f"measured: {self._profile.name}"
        elif self._watch is not None and not self._watch.spent:
            if self._watch.memory(memory.fits, acted_on=self._fits):
                self._fits = memory.fits
                why = f"device memory {'has room again' if self._fits else 'is short'}"
            elif judged is not None and not judged.overran:
                why = self._judge(judged, self._watch)
        if why is not None:
            self._choose(why, planner)
        return self._stride

    def out_of_memory(self, planner: StridePlanner) -> Stride:
        """The stride, now that slots for the one chosen last could not be had."""
        self._fits = False
        return self._choose("the device is out of memory", planner)

    def _judge(self, step: StepRecord, watch: StrideWatch) -> str | None:
        """Correct the rates by a step, if it is time to; what was found."""
        slower = watch.step(self._predicted_s(step.plan), step.busy_s)
        if slower is None:
            return None
        self._profile, self._predicted = slowed(self._profile, slower), None
        said = ", ".join(f"{lane} {ratio:.2f}" for lane, ratio in slower.items())
        return f"lanes took, over their predicted time: {said}"

    def _predicted_s(self, plan: UpdatePlan) -> dict[str, float]:
        """Seconds of work per lane; steps seldom differ in their plan."""
        if self._predicted is None or self._predicted[0] is not plan:
            self._predicted = plan, busy_s(simulate(plan, self._profile))
        return self._predicted[1]

    def _choose(self, why: str, planner: StridePlanner) -> Stride:
        before, self._stride = self._stride, self._solved(planner)
        logger.info("stride %s, was %s; %s", self._stride, before, why)
        return self._stride

    def _solved(self, planner: StridePlanner) -> Stride:
        return fastest_stride(self._profile, planner) if self._fits else "host"


def fastest_stride(profile: NodeProfile, planner: StridePlanner) -> Stride:
    """The stride whose plan takes the least time by the model; of equals the one of least memory.

    Gradients are taken to have been sent during backward.
    """

    def planned(option: Option) -> Planned:
        plan = planner(stride_of(option.stride))
        return Planned(plan, plan.memory())

    host = planner("host")
    if not host.placement:
        return "host"  # a process whose shards are all empty
    count, residents = len(host.placement), host.placement.count(Placement.RESIDENT)
    # The planner looks at the stride alone; the share tells how many residents there are, with a
    # half on top, so that rounding cannot make them one less.
    option = Option(1, "host", f"{(residents + 0.5) / count:.12f}", host.slots, 2)
    return stride_of(best_stride(profile, planned, Limits(), option).option.stride)


def stride_of(text: str) -> Stride:
    """A stride by its text, as an option is: 2.0 is 2, for it is compared as text."""
    if text == "host":
        return "host"
    stride = float(text)
    return int(stride) if stride == int(stride) else stride


def slot_bytes(plan: UpdatePlan) -> int:
    """Device memory of the slots, were everything streamed that is not resident."""
    placed = zip(plan.sizes, plan.placement, strict=True)
    sizes = [size.state_bytes for size, at in placed if at is not Placement.RESIDENT]
    return plan.slots * max(sizes, default=0)


def slowed(profile: NodeProfile, slower: Mapping[str, float]) -> NodeProfile:
    """With the rates of lanes that are slower than it says, by their ratios."""
    rates: dict[str, Any] = {
        name: profile.rate(name) / slower.get(lane, 1.0) for lane, name in LANE_RATES.items()
    }
    if (link := profile.link_bytes_per_s) is not None:
        before = profile.rate("h2d_bytes_per_s") + profile.rate("d2h_bytes_per_s")
        now = rates["h2d_bytes_per_s"] + rates["d2h_bytes_per_s"]
        rates["link_bytes_per_s"] = min(link * now / before, now)
    if (beside := profile.host_params_per_s_beside_copies) is not None:
        rates["host_params_per_s_beside_copies"] = beside / slower.get("host", 1.0)
    return replace(profile, **rates)
