"""The update of a fixed list of parameters: plans, memory and threads in one owner."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, cast

import torch
from torch.autograd.graph import increment_version

from dos.config import DOSConfig, VirtualDevice
from dos.errors import ConfigError
from dos.execute.backend import Backend, Device
from dos.execute.devices import choose_backend
from dos.execute.interpreter import Interpreter, StepRecord
from dos.execute.work import StepInputs, StepWork
from dos.execute.worker import HostBackend
from dos.kernels import adam
from dos.kernels.scalars import AdamScalars
from dos.memory import Pool
from dos.memory.flat import flat
from dos.plan import SubgroupSize, UpdatePlan, build, partition, verify
from dos.state import OptimizerState, pieces_of, requirement, size_of
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.solve import balanced_stride

_PLANS_KEPT = 16
"""Plans kept for reuse: one per set of subgroups without a gradient."""


class UpdateEngine:
    """Owns state, pool, threads and plans, and carries out steps.

    Args:
        parameters: what is trained, dense, all on one device.
        groups: the param group of each.
        config: options.

    Attributes:
        plan: the plan of a step in which every subgroup has a gradient.
        state: the fp32 state.

    Raises:
        ConfigError: the device does not fit the parameters.
        PoolError: host memory is too small.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], groups: Sequence[int], config: DOSConfig
    ) -> None:
        self._parameters = list(parameters)
        self._torn = False
        numels = [parameter.numel() for parameter in parameters]
        self._subgroups = partition(numels, groups, config.subgroup_size)
        # Memory made under inference_mode could not be updated outside of it.
        with torch.inference_mode(False), ExitStack() as cleanup:
            self._backend: Backend = choose_backend(config.device, parameters)
            cleanup.callback(self._backend.close)
            self._interpreter = Interpreter(self._backend)
            cleanup.callback(self._interpreter.close)
            host_parameters = isinstance(self._backend, HostBackend)
            self._device = None if host_parameters else cast(Device, self._backend)
            pieces = [
                pieces_of(subgroup, parameters, host_parameters=host_parameters)
                for subgroup in self._subgroups
            ]
            sizes = [size_of(its, parameters) for its in pieces]
            self._build = _builder(config, sizes, host_parameters=host_parameters)
            self._plans: dict[frozenset[int], UpdatePlan] = {}
            self.plan = self._plan(frozenset())
            need = requirement(pieces, self.plan, ring_bytes=config.ring_bytes)
            self._threads = threads = adam.make_pool(config.threads, pin=config.pin_threads)
            cleanup.callback(threads.close)
            self._pool = Pool(
                state_bytes=need.state_bytes,
                gradient_bytes=need.gradient_bytes,
                ring_bytes=need.ring_bytes,
                budget_bytes=config.host_memory_bytes,
                device=self._parameters[0].device,
                touch=lambda address: adam.first_touch(need.blocks(address), threads),
            )
            cleanup.callback(self._pool.close)
            self.state = OptimizerState(parameters, pieces, self.plan, self._pool, self._device)
            # Frees threads and memory with this object, also when nobody calls close().
            self._finalizer = weakref.finalize(self, cleanup.pop_all().close)

    @property
    def label(self) -> str:
        """Names the device; an emulation says so."""
        return self._backend.label

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def check_process(self) -> None:
        """Raise PoolError in a forked child, which has neither the memory nor the threads."""
        self._pool.check_process()

    def step(
        self, grads: Sequence[torch.Tensor | None], scalars: Sequence[AdamScalars | None]
    ) -> StepRecord:
        """Update every parameter that has a gradient, and count its step.

        All state is home on return.

        Args:
            grads: per parameter, its gradient in its own memory order, 1-D, or None.
            scalars: per parameter with a gradient, the scalars of its group and step count.

        Raises:
            ConfigError: an earlier step failed half-way, so that the state is of two steps.
        """
        if self._torn:
            raise ConfigError(
                "an earlier step failed half-way and left state of two steps",
                where="step",
                fix="restore weights from a checkpoint and make a new optimizer",
            )
        self.state.fill_masters()
        absent = frozenset(
            subgroup.index
            for subgroup in self._subgroups
            if all(grads[segment.parameter] is None for segment in subgroup.segments)
        )
        weights = [flat(parameter) for parameter in self._parameters]
        work = StepWork(
            self.state.subgroups,
            self.state.staging,
            StepInputs(weights, grads, scalars),
            device=self._device,
            pool=self._threads,
        )
        plan = self._plan(absent)
        # Until the step is over, some subgroups are a step ahead of the others.
        self._torn = True
        record = self._interpreter.run(plan, work)
        self._torn = False
        for index, grad in enumerate(grads):
            if grad is not None:
                self.state.steps[index] += 1
                # A weight changed between forward and backward is then an error, as in torch.
                increment_version(self._parameters[index])
        self.state.remember_weights()
        return record

    def close(self) -> None:
        """Stop all threads and give the memory back; idempotent."""
        self._finalizer()
        self.state.drop()

    def _plan(self, absent: frozenset[int]) -> UpdatePlan:
        if absent not in self._plans:
            plan = self._build(absent)
            verify(plan)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[absent] = plan
        return self._plans[absent]


def _builder(
    config: DOSConfig, sizes: Sequence[SubgroupSize], *, host_parameters: bool
) -> Callable[[frozenset[int]], UpdatePlan]:
    """Makes the plan of a step in which the given subgroups have no gradient."""
    stride = config.stride
    if host_parameters:
        if stride not in ("auto", "host") or config.resident_ratio:
            warnings.warn(
                f"the parameters are in host memory, so stride={stride} and "
                f"resident_ratio={config.resident_ratio} have no effect",
                stacklevel=5,
            )
        return lambda absent: build(sizes, stride="host", host_parameters=True, absent=absent)
    if stride == "auto":
        stride = _estimated_stride(config)
    return lambda absent: build(
        sizes,
        stride=stride,
        resident_ratio=config.resident_ratio,
        slots=config.device_slots,
        absent=absent,
    )


def _estimated_stride(config: DOSConfig) -> float | Literal["host"]:
    """The stride for a node that nobody has measured: by its pace, else by a built-in profile."""
    pace = config.device.pace if isinstance(config.device, VirtualDevice) else None
    return balanced_stride(pace if isinstance(pace, NodeProfile) else H100_NODE)
