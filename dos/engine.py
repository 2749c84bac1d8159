"""The update of a list of parameters: plans, memory and threads in one owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast as as_type

import torch

from dos.config import DOSConfig
from dos.errors import ConfigError
from dos.execute.backend import Backend, Device
from dos.execute.devices import choose_backend
from dos.execute.interpreter import Interpreter
from dos.execute.record import NO_BACKWARD, Recording, StepRecord
from dos.execute.work import DTYPES, Piece, StepInputs, StepWork
from dos.execute.worker import HostBackend
from dos.host_memory import Pools, pieces_of, size_of
from dos.kernels import adam, cast
from dos.kernels.cast import Examined
from dos.kernels.scalars import AdamScalars
from dos.live_state import holds_of
from dos.memory import HeldState
from dos.memory.flat import flat
from dos.plan import Subgroup, SubgroupSize, partition
from dos.planning import Planner
from dos.sending import GradientSender
from dos.shards import local_of
from dos.state import OptimizerState
from dos.stride import AutoStride, DeviceMemory, Stride, slot_bytes
from dos.stride_profile import auto_stride, warn_without_effect
from dos.tail import Tail, writers_of
from dos.wholeness import Wholeness


class UpdateEngine:
    """Owns state, pool, threads and plans, and carries out steps.

    Args:
        parameters: what is trained, dense, all on one device.
        groups: the param group of each.
        config: options.
        placed: the caller puts gradients where they are used and keeps masters right: nothing is
            sent, no weight is or is compared with its master, no subgroup has two parameters.

    Attributes:
        plan: the plan of a step in which every subgroup has a gradient.
        state: the fp32 state.
        whole: whether it is of one step.

    Raises:
        ConfigError: the device does not fit the parameters.
        PoolError: host memory is too small.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[int],
        config: DOSConfig,
        *,
        placed: bool = False,
    ) -> None:
        self._config, self._placed = config, placed
        self._parameters: list[torch.Tensor] = []
        self._subgroups: list[Subgroup] = []
        self._sizes: tuple[SubgroupSize, ...] = ()
        self.whole = Wholeness()
        self._last_step: StepRecord | None = None
        self._recording: Recording | None = None
        self._unjudged: StepRecord | None = None
        # Memory made under inference_mode could not be updated outside of it.
        with torch.inference_mode(False), ExitStack() as cleanup:
            self._backend: Backend = choose_backend(config.device, parameters)
            cleanup.callback(self._backend.close)
            self._interpreter = Interpreter(self._backend)
            cleanup.callback(self._interpreter.close)
            host_parameters = isinstance(self._backend, HostBackend)
            self._device = None if host_parameters else as_type(Device, self._backend)
            self._threads = adam.make_pool(config.threads, pin=config.pin_threads)
            cleanup.callback(self._threads.close)
            self._planner = Planner(config, host_parameters=host_parameters)
            self._auto: AutoStride | None = None
            self._stride = config.stride
            if host_parameters:
                warn_without_effect(config)
            elif self._stride == "auto":
                self._auto = auto_stride(config, parameters[0].device, self._threads)
            self.state = OptimizerState(self._device, any_stride=self._auto is not None)
            # Where gradients lie in host memory already, there is nothing to send.
            self.sender: GradientSender | None = None
            if self._device is not None and not placed:
                self.sender = GradientSender(self._device, release=config.release_grads)
                cleanup.callback(self.sender.close)
            self._tail = Tail(overlap=config.overlap_forward)
            cleanup.callback(self._tail.close)
            any_stride = self._auto is not None
            self._pools = Pools(config, self._threads, any_stride=any_stride)
            cleanup.callback(self._pools.close)
            self.extend(parameters, groups)
            # Frees threads and memory with this object, also when nobody calls close().
            self._finalizer = weakref.finalize(self, _shut_down, self._tail, cleanup.pop_all())

    @property
    def label(self) -> str:
        """Names the device; an emulation says so."""
        return self._backend.label

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def extend(self, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        """Take in further parameters, between steps, with subgroups and a pool of their own.

        What is there keeps its subgroups, its memory and its placement.

        Args:
            parameters: the new ones, dense.
            groups: the param group of each.

        Raises:
            ConfigError: one lies on another device. Nothing has been changed then.
            PoolError: host memory is too small. Nothing has been changed then.
        """
        self._tail.check(parameters)
        everything = [*self._parameters, *parameters]
        for parameter in parameters:
            if parameter.device != everything[0].device:
                raise ConfigError(
                    f"a parameter lies on {parameter.device}, the others on {everything[0].device}",
                    where="optimizer",
                    fix="use one DOSOptimizer per device",
                )
        subgroups = partition(
            [local_of(parameter).numel() for parameter in parameters],
            groups,
            self._config.subgroup_size,
            first_parameter=len(self._parameters),
            first_subgroup=len(self._subgroups),
            apart=self._placed,
        )
        host, widen = self._device is None and not self._placed, self._config.wire == "fp32"
        pieces = [
            pieces_of(subgroup, everything, host_parameters=host, widen=widen)
            for subgroup in subgroups
        ]
        added = [size_of(its, everything) for its in pieces]
        if self._placed:
            added = [replace(size, grad_bytes=0) for size in added]
        sizes = (*self._sizes, *added)
        if self._stride == "auto" and self._auto is not None:
            self._stride = self._auto.first(self._planner.by_stride(sizes))
        plan = self._planner.plan(self._stride, sizes)
        with torch.inference_mode(False):  # see __init__
            staged_bytes = self.state.staging.stage_bytes
            with self._pools.added(pieces, plan, everything[0].device, staged_bytes) as pool:
                self.state.extend(parameters, pieces, plan, pool)
        self._parameters, self._sizes = everything, sizes
        self._subgroups += subgroups
        self.plan = plan
        if self.sender is not None:
            self.sender.extend(parameters, self.state.subgroups, plan.placement, self.state.staging)
        self._tail.extend(parameters)

    def check_process(self) -> None:
        """Raise PoolError in a forked child, which has neither the memory nor the threads."""
        self._pools.check_process()

    def hold(self, what: str) -> tuple[HeldState, list[int]]:
        """Hold all state and weights as the last step leaves them, even if it still runs.

        Args:
            what: names the capture in messages.

        Returns:
            What is held, its tree empty; and per parameter its step count then.
        """
        steps, running = self._tail.counted(self.state.steps)
        waits: list[Callable[[int | None], object]] = []
        if running is not None:
            waits.append(running.await_end)
        if self._device is not None:
            mark = self._device.mark()
            waits.append(lambda _: mark.wait())
        held = HeldState(self.state.gates, holds_of(self.state), what, waits, self._tail.unread)
        return held, steps

    def step(
        self,
        grads: Sequence[torch.Tensor | None],
        scalars: Sequence[AdamScalars | None],
        placed: Mapping[Piece, torch.Tensor] | None = None,
    ) -> None:
        """Update every parameter that has a gradient, and count its step.

        All state is home on return; with `overlap_forward`, after `synchronize`.

        Args:
            grads: per parameter, its gradient here in its own memory order, 1-D, or None.
            scalars: per parameter with a gradient, the scalars of its group and step count.
            placed: gradients of pieces that lie elsewhere than in `grads`.

        Raises:
            ConfigError: an earlier step failed half-way, so that the state is of two steps.
        """
        self.whole.check("step")
        if not self._placed:
            self.state.fill_masters()
        absent = frozenset(
            subgroup.index
            for subgroup in self._subgroups
            if all(grads[segment.parameter] is None for segment in subgroup.segments)
        )
        weights = [flat(local_of(parameter)) for parameter in self._parameters]
        arrived, backward = frozenset[int](), NO_BACKWARD
        if self.sender is not None:
            arrived, backward = self.sender.settle(grads)
        inputs = StepInputs(weights, grads, scalars, arrived, placed or {})
        work = StepWork(
            self.state.subgroups,
            self.state.staging,
            inputs,
            device=self._device,
            pool=self._threads,
        )
        sizes = self.state.still_to_send(self._sizes, inputs)
        order = self._tail.order(self._subgroups)
        plan = self._planner.plan(self._stride, sizes, absent, order)
        updated = [index for index, grad in enumerate(grads) if grad is not None]
        # Until the step is over, some subgroups are a step ahead of the others.
        self.whole.step_begins()
        running = self._interpreter.start(plan, work, backward, self.state.gates)
        self.whole.step_runs(running)
        writers = writers_of(plan, self.state.subgroups, updated)
        self._tail.follow(running, writers, weakref.WeakMethod(self._ended))
        if self._auto is not None:
            if self._auto.unmeasured:
                self.synchronize()  # a step beside it would be measured too
            record, self._unjudged = self._unjudged, None
            if record is not None:  # that of the step before, where this one runs on
                self._choose_stride(self._auto, record)

    def synchronize(self) -> None:
        """Wait for the end of the last step; raises what failed in it."""
        self._tail.synchronize()

    @property
    def last_step(self) -> StepRecord | None:
        """How the last step went, at its end; None before the first."""
        self.synchronize()
        return self._last_step

    def record(self, recording: Recording) -> None:
        """Give the next steps to `recording`, until it has enough."""
        self.synchronize()
        self._recording = recording

    def _ended(self, record: StepRecord, updated: Iterable[int]) -> None:
        """The last step is over, and succeeded: said on any thread, backward's too."""
        self.whole.step_ended()
        if self.sender is not None:
            self.sender.let_go()
        for index in updated:
            self.state.steps[index] += 1
        if not self._placed:
            self.state.remember_weights()
        self._last_step = self._unjudged = record
        if self._recording is not None and self._recording.add(record):
            self._recording = None

    def change_stride(self, stride: Stride) -> None:
        """Place the subgroups by another stride from the next step on; the bits stay the same.

        For engines made with stride="auto", whose memory suits every stride; right after `step`,
        before a gradient of the next is sent. No state moves: what may be streamed is at home in
        host memory. A step that runs on keeps its slots until it is over.
        """
        plan = self._planner.plan(stride, self._sizes)
        with torch.inference_mode(False):  # see __init__
            self.state.restage(plan)
        self._stride, self.plan = stride, plan
        if self.sender is not None:
            self.sender.redirect(self.state.subgroups, plan.placement, self.state.staging)

    def _choose_stride(self, auto: AutoStride, record: StepRecord) -> None:
        assert self._device is not None, "host parameters have no stride"
        held_bytes, free_bytes = self.state.staging.slot_bytes, self._device.free_bytes()
        memory = DeviceMemory(slot_bytes(self.plan), held_bytes, free_bytes)
        planner = self._planner.by_stride(self._sizes)
        try:
            if (stride := auto.after_step(record, memory, planner)) != self._stride:
                self.change_stride(stride)
        except torch.OutOfMemoryError:
            self.change_stride(auto.out_of_memory(planner))

    def close(self) -> None:
        """Stop all threads and give the memory back, once it is captured; idempotent.

        Raises:
            PoolError: a capture does not end; everything is closed nevertheless.
            Exception: what failed in a step.
        """
        with ExitStack() as closing:
            closing.callback(self.state.drop)
            closing.callback(self._finalizer)
            if not self.closed:
                self.state.gates.wait("close")

    def discard_gradients(self) -> None:
        """Forget gradients that were sent: they are about to be zeroed, or the step is skipped."""
        if self.sender is not None:
            self.sender.discard()

    def examine(self, grads: Sequence[torch.Tensor | None]) -> list[Examined | None]:
        """What each gradient is known by as it is now: its norm, finiteness, fingerprint.

        Args:
            grads: as for `step`.
        """
        if self.sender is not None:
            return self.sender.examine(grads)
        return [None if grad is None else self._examine(grad) for grad in grads]

    def _examine(self, grad: torch.Tensor) -> Examined:
        dtype = DTYPES[grad.dtype]
        return cast.examine(grad.data_ptr(), grad.numel(), dtype, pool=self._threads)


def _shut_down(tail: Tail, cleanup: ExitStack) -> None:
    try:
        tail.synchronize()  # nothing may run in memory that goes
    finally:
        cleanup.close()
