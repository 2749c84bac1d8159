"""What a step took, for DeepSpeed's monitor and its wall_clock_breakdown."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.utils.logging import print_dist

from dos.config import DOSConfig, VirtualDevice
from dos.execute.record import StepRecord
from dos.plan import UpdatePlan
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.timeline import simulate, step_s


class StepReport:
    """Writes the figures of each step to where an engine has its own.

    Args:
        engine: DeepSpeed's; kept by a weak reference.
        config: what the prediction goes by.
    """

    def __init__(self, engine: Any, config: DOSConfig) -> None:
        self._engine = weakref.ref(engine)
        pace = config.device.pace if isinstance(config.device, VirtualDevice) else None
        self._profile = pace if isinstance(pace, NodeProfile) else H100_NODE
        self._predicted: tuple[tuple[UpdatePlan, NodeProfile], float] | None = None

    def __call__(self, record: StepRecord, profile: NodeProfile | None) -> None:
        """Report one step, if the engine wants to know; then it waits for the device.

        `profile`: the rates by which the stride is chosen, if it is.
        """
        engine = self._engine()
        if engine is None:
            return
        if engine.monitor.enabled:
            samples = engine.global_samples + engine.train_batch_size()
            figures = self.figures(record, profile)
            engine.monitor.write_events(
                [(f"Train/DOS/{name}", value, samples) for name, value in figures.items()]
            )
        if engine.wall_clock_breakdown():
            times = {
                name[:-2]: value
                for name, value in self.figures(record, profile).items()
                if name.endswith("_s") and not name.endswith("_per_s")
            }
            shown = " | ".join(f"dos_{name}: {1e3 * value:.2f}" for name, value in times.items())
            # As upstream does its times, whatever the level of its logger.
            print_dist(f"time (ms) | {shown} | stride: {record.stride}", ranks=[0])

    def figures(self, record: StepRecord, profile: NodeProfile | None) -> dict[str, float]:
        """Times in seconds, bytes, the stride (0: host), and what was predicted.

        The prediction goes by the profile, else by that of the emulated node, else by a built-in
        one of an H100 node; where nothing is updated on a device there is none.
        """
        figures = {**record.metrics(), "stride": _number(record.stride)}
        if not record.plan.host_parameters:
            key = record.plan, profile or self._profile
            if self._predicted is None or self._predicted[0] != key:
                self._predicted = key, step_s(simulate(*key))
            figures["predicted_s"] = self._predicted[1]
        return figures


def _number(stride: str) -> float:
    return 0.0 if stride == "host" else float(stride)
