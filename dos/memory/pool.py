"""The pool: one slab of host memory for state, gradients and the ring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from dos.errors import PoolError
from dos.memory.available import available_host_bytes
from dos.memory.lease import Lease
from dos.memory.pinned import Slab
from dos.memory.ring import Ring
from dos.memory.sizes import LINE_BYTES, PAGE_BYTES, bytes_text, padded_bytes


@dataclass(frozen=True)
class Requirement:
    """How much host memory a pool takes. What is estimated, refused and mapped is this.

    Attributes:
        state_bytes: fp32 masters, momenta, variances; a multiple of 4 KiB.
        gradient_bytes: gradients on their way from hook to update; a multiple of 4 KiB.
        ring_bytes: staging; a multiple of 4 KiB.
        lease_bytes: state leases, then gradient leases, each with its padding, in the order in
            which they are taken; empty where they are not known.
    """

    state_bytes: int
    gradient_bytes: int
    ring_bytes: int
    lease_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("state_bytes", "gradient_bytes", "ring_bytes"):
            object.__setattr__(self, name, padded_bytes(getattr(self, name)))

    @classmethod
    def of_leases(
        cls, *, state: Iterable[int], gradient: Iterable[int], ring_bytes: int
    ) -> Requirement:
        """What leases of these sizes in bytes take, their alignment included."""
        states = tuple(padded_bytes(n_bytes, PAGE_BYTES) for n_bytes in state)
        gradients = tuple(padded_bytes(n_bytes, LINE_BYTES) for n_bytes in gradient)
        return cls(sum(states), sum(gradients), ring_bytes, states + gradients)

    @property
    def total_bytes(self) -> int:
        """All three together."""
        return self.state_bytes + self.gradient_bytes + self.ring_bytes

    def blocks(self, address: int) -> list[tuple[int, int]]:
        """Address and size of each lease in memory from ``address`` on; the rest is one block."""
        rest_bytes = self.total_bytes - sum(self.lease_bytes)
        sizes = (*self.lease_bytes, rest_bytes)
        return list(zip(accumulate(sizes, initial=address), sizes, strict=False))

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.total_bytes)} of host memory: state "
            f"{bytes_text(self.state_bytes)}, gradients {bytes_text(self.gradient_bytes)}, "
            f"ring {bytes_text(self.ring_bytes)}"
        )

    def check(self, budget_bytes: int | None, *, held_bytes: int = 0) -> None:
        """Refuse what exceeds the budget or what this machine can give now.

        Args:
            budget_bytes: the most that may be taken; None for no limit.
            held_bytes: what other pools hold of that budget.

        Raises:
            PoolError: lists all three kinds, the sum and the limit.
        """
        smaller = "a smaller ring_bytes or subgroup_size, or a larger resident_ratio"
        if budget_bytes is not None and budget_bytes < held_bytes + self.total_bytes:
            beside = f", beside the {bytes_text(held_bytes)} held" if held_bytes else ""
            raise PoolError(
                f"a budget of {bytes_text(budget_bytes)} is too small; the pool needs "
                f"{self}{beside}",
                where="host_memory_bytes",
                fix=f"raise host_memory_bytes to {held_bytes + self.total_bytes}, or set {smaller}",
            )
        available_bytes = available_host_bytes()
        if available_bytes is not None and available_bytes < self.total_bytes:
            raise PoolError(
                f"only {bytes_text(available_bytes)} are available here; the pool needs {self}",
                where="host memory",
                fix=f"free {bytes_text(self.total_bytes - available_bytes)} of host memory or "
                f"raise the control group's limit, or set {smaller}",
            )


@dataclass(frozen=True)
class PoolStats:
    """Use of a pool at one instant, in bytes; a used amount includes the leases' padding."""

    state_bytes: int
    state_used_bytes: int
    gradient_bytes: int
    gradient_used_bytes: int
    ring_bytes: int
    ring_used_bytes: int
    ring_peak_bytes: int


class Pool:
    """Host memory of one optimizer, reserved in full when it is made.

    Args:
        state_bytes: all state leases together, each rounded up to 4 KiB
            (`Requirement.of_leases` adds them up).
        gradient_bytes: all gradient leases together, each rounded up to 64 bytes.
        ring_bytes: size of the ring.
        budget_bytes: the most that the pool may take; None: what the machine has.
        held_bytes: what earlier pools of the same owner hold of that budget.
        device: the accelerator to pin for; None: no pinning.
        touch: called with the slab's address before it is pinned; see `Slab`.

    Attributes:
        requirement: what it takes.
        slab: its memory: address, size, whether it is pinned and why not.
        ring: leases with back-pressure.

    Raises:
        PoolError: the budget, or the memory available here, is smaller than the need.
    """

    def __init__(
        self,
        *,
        state_bytes: int,
        gradient_bytes: int,
        ring_bytes: int,
        budget_bytes: int | None = None,
        held_bytes: int = 0,
        device: torch.device | None = None,
        touch: Callable[[int], None] | None = None,
    ) -> None:
        self.requirement = need = Requirement(state_bytes, gradient_bytes, ring_bytes)
        need.check(budget_bytes, held_bytes=held_bytes)
        self.slab = Slab(max(need.total_bytes, PAGE_BYTES), device=device, touch=touch)
        gradient_start = need.state_bytes
        ring_start = gradient_start + need.gradient_bytes
        self._state = _Region(self.slab, "state", 0, need.state_bytes, PAGE_BYTES)
        self._gradient = _Region(
            self.slab, "gradient", gradient_start, need.gradient_bytes, LINE_BYTES
        )
        self.ring = Ring(self.slab, ring_start, need.ring_bytes)

    def state(self, n_bytes: int, what: str) -> Lease:
        """``n_bytes`` for as long as the pool lives, 4 KiB aligned, zero, padding included.

        Raises:
            PoolError: more than was reserved, the pool is closed, or this is a forked child.
        """
        return self._state.take(n_bytes, what)

    def gradient(self, n_bytes: int, what: str) -> Lease:
        """``n_bytes`` for as long as the pool lives, 64-byte aligned; never waits.

        Raises:
            PoolError: more than was reserved, the pool is closed, or this is a forked child.
        """
        return self._gradient.take(n_bytes, what)

    def check_process(self) -> None:
        """Raise PoolError in a forked child, which has no such memory; costs one getpid."""
        self.slab.check_process()

    def stats(self) -> PoolStats:
        """Bytes reserved and in use, by kind."""
        return PoolStats(
            state_bytes=self._state.n_bytes,
            state_used_bytes=self._state.used_bytes,
            gradient_bytes=self._gradient.n_bytes,
            gradient_used_bytes=self._gradient.used_bytes,
            ring_bytes=self.ring.capacity_bytes,
            ring_used_bytes=self.ring.used_bytes,
            ring_peak_bytes=self.ring.peak_bytes,
        )

    def close(self) -> None:
        """Refuse further leases and wake whoever waits for one. Idempotent.

        The memory goes back to the system when the last lease and tensor of it is gone.
        """
        self.ring.close()
        self.slab.close()


class _Region:
    """Leases cut one after another from a part of the slab, never given back."""

    def __init__(
        self, slab: Slab, kind: str, start_bytes: int, n_bytes: int, alignment_bytes: int
    ) -> None:
        self.n_bytes = n_bytes
        self.used_bytes = 0
        self._slab = slab
        self._kind = kind
        self._start_bytes = start_bytes
        self._alignment_bytes = alignment_bytes
        self._lock = threading.Lock()

    def take(self, n_bytes: int, what: str) -> Lease:
        self._slab.check_process()
        size_bytes = padded_bytes(n_bytes, self._alignment_bytes)
        with self._lock:
            if size_bytes > self.n_bytes - self.used_bytes:
                raise PoolError(
                    f"{what} asked for {bytes_text(n_bytes)}; {bytes_text(self.used_bytes)} of "
                    f"the {bytes_text(self.n_bytes)} reserved for {self._kind} are taken",
                    where=f"pool, {self._kind}",
                    fix="report it: the reservation was computed wrongly",
                )
            lease = Lease(self._slab, self._start_bytes + self.used_bytes, n_bytes, what)
            self.used_bytes += size_bytes
        return lease
