"""The published Deep Optimizer States code, and what it was measured against, as tasks.

From how the authors describe their code and from their public fork of DeepSpeed: one host thread
goes through the subgroups in order. These are timings only, of another order than this library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from dos.errors import ConfigError
from dos.trace import Span
from perfmodel.closed_form import STATE_BYTES
from perfmodel.model import Task, run
from perfmodel.profile import NodeProfile, PublishedCode
from perfmodel.timeline import DEVICE_UPDATE_BYTES, capacities

Schedule = Literal["dos-paper", "zero-offload", "twin-flow"]

CAST_BYTES = 8
"""Host memory traffic per parameter of the 16-bit copy: 4 read, 2 written, 2 read by the link."""


def simulate_published(
    profile: NodeProfile,
    numels: Sequence[int],
    *,
    schedule: Schedule,
    stride: int | None = None,
    resident_ratio: float | str = 0.0,
) -> tuple[list[Span], float]:
    """When what runs, and the seconds until the host thread is through; copies may outlast it.

    Args:
        profile: of a node for which the published code was fitted.
        numels: parameters of each subgroup, in order.
        schedule: "zero-offload" updates everything on the host; "twin-flow" keeps the last
            subgroups on the device for good; "dos-paper" also streams subgroup i to the device
            where (i+1) % stride == 0, residents included in the count.
        stride: a whole number, for "dos-paper" alone.
        resident_ratio: share of the subgroups at home on the device; Twin-Flow's offload ratio is
            what is left of 1.

    Raises:
        ConfigError: a stride or residents that the schedule does not have; no fitted figures.
    """
    if (schedule == "dos-paper") != (stride is not None):
        needs = "needs a stride" if stride is None else "has no stride"
        raise ConfigError(f"{schedule} {needs}", where="stride", fix="only dos-paper takes one")
    if stride is not None and (stride < 1 or stride != int(stride)):
        raise ConfigError(
            f"{stride!r} is no stride of the published code",
            where="stride",
            fix="give a whole number of at least 1, or schedule dos",
        )
    if schedule == "zero-offload" and float(resident_ratio):
        raise ConfigError(
            "zero-offload has no residents", where="resident_ratio", fix="ask for twin-flow"
        )
    if profile.published is None:
        raise ConfigError(
            f"{profile.name} has no figures of the published code",
            where="NodeProfile.published",
            fix="use a profile that `python -m perfmodel fit` made, or schedule dos",
        )
    # As the code has it: int(ratio * n), the ratio being what is offloaded.
    on_host = int(float(1 - Fraction(str(resident_ratio))) * len(numels))
    thread = _HostThread(profile, profile.published, numels)
    for i in range(len(numels)):
        if stride is not None and i % stride == 0:
            thread.exchange(i - 1 if 0 < i <= on_host else None, i + int(stride) - 1, on_host)
        if i >= on_host or (stride is not None and (i + 1) % stride == 0):
            thread.update_device(i)
        else:
            thread.update_host(i, waits_for_cast=stride is None)
    spans = run(thread.tasks, capacities(profile))
    return spans, max((spans[i].end_s for i in thread.after), default=0.0)


class _HostThread:
    """The thread's way through the subgroups; `after` is what its next action comes behind."""

    def __init__(self, profile: NodeProfile, code: PublishedCode, numels: Sequence[int]) -> None:
        self._profile, self._code, self._numels = profile, code, numels
        self._device_params_per_s = code.device_params_per_s or profile.rate("device_params_per_s")
        self._fetched: dict[int, list[int]] = {}
        self.tasks: list[Task] = []
        self.after: tuple[int, ...] = ()

    def exchange(self, previous: int | None, following: int, on_host: int) -> None:
        """Queue the flush of one streamed subgroup and the fetch of the next, if there are such.

        They use one staging set: what is fetched comes behind what is flushed, array by array.
        """
        flushed = [] if previous is None else self._copy("flush", "d2h", previous, None)
        if following < on_host:
            self._fetched[following] = self._copy("fetch", "h2d", following, flushed)
        elif self._code.tail == "if_ragged":
            self.after = (*self.after, *flushed)

    def _copy(self, kind: str, way: str, i: int, behind: Sequence[int] | None) -> list[int]:
        streams = self._code.streams
        n_bytes = STATE_BYTES * self._numels[i] / streams
        work_s = n_bytes / self._profile.rate(f"{way}_bytes_per_s")
        return [
            self._add(
                Task(
                    name=f"{kind} {i}",
                    lane="copies" if streams == 1 else way,
                    work_s=work_s,
                    needs={"host_memory": n_bytes, "link": n_bytes, "device_memory": n_bytes},
                    waits=(*self.after, *(behind[part : part + 1] if behind else ())),
                )
            )
            for part in range(streams)
        ]

    def update_device(self, i: int) -> None:
        """Update a resident or streamed subgroup and wait for it."""
        numel = self._numels[i]
        update = Task(
            name=f"update_device {i}",
            lane="device",
            work_s=numel / self._device_params_per_s,
            needs={"device_memory": float(DEVICE_UPDATE_BYTES * numel)},
            launch_s=self._code.launch_s,
            waits=(*self.after, *self._fetched.pop(i, ())),
        )
        self.after = (self._add(update),)

    def update_host(self, i: int, *, waits_for_cast: bool) -> None:
        """Update on the host; then the 16-bit copy, waited for, in a thread beside, or not made."""
        code, numel = self._code, self._numels[i]
        update = Task(
            name=f"update_host {i}",
            lane="host",
            work_s=numel / code.host_params_per_s,
            needs={"host_memory": code.host_bytes_per_param * numel},
            launch_s=code.launch_s,
            waits=self.after,
        )
        self.after = (self._add(update),)
        if waits_for_cast or code.casts:
            cast = Task(
                name=f"publish {i}",
                lane="host" if waits_for_cast else "cast",
                work_s=code.cast_s_per_param * numel,
                needs={"host_memory": float(CAST_BYTES * numel)},
                waits=self.after,
            )
            made = self._add(cast)
            if waits_for_cast:
                self.after = (made,)

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1
