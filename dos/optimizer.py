"""`DOSOptimizer`: a torch optimizer whose state lives in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dos.config import DOSConfig
from dos.engine import UpdateEngine
from dos.errors import ConfigError
from dos.execute.interpreter import StepRecord
from dos.gradients import read_gradients
from dos.kernels.scalars import AdamScalars
from dos.plan import UpdatePlan
from dos.state import StateView
from dos.wrapped import check_frozen, check_supported, read_group, trained_parameters


class DOSOptimizer(torch.optim.Optimizer):
    """Adam or AdamW with its state in pinned host memory, updated on host and device at once.

    Wraps a `torch.optim.Adam` or `torch.optim.AdamW` and takes its place: it shares the
    wrapped optimizer's `param_groups` (so a scheduler on either works, and lr, betas, eps and
    weight_decay are read at every step) and adopts its state. Training gives the same bits
    with every option below.

    A gradient with NaN or inf is applied, as torch's optimizers do. Weights changed between
    steps (in place, or by loading a state dict) are taken up; what is written through `.data`
    cannot be noticed. The wrapped optimizer must not be stepped itself any more.

    Args:
        optimizer: the optimizer to wrap; its foreach and fused flags have no effect.
        **options: the fields of `dos.DOSConfig`: stride, subgroup_size, device,
            resident_ratio, device_slots, host_memory_bytes, ring_bytes, threads.

    Raises:
        ConfigError: an option, the optimizer or a parameter cannot be used.
        PoolError: host memory is too small for state, gradients and staging.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.config = DOSConfig(**options)
        wrapped = check_supported(optimizer)
        for index, group in enumerate(wrapped.param_groups):
            read_group(wrapped, index, group)
        self._trained = trained_parameters(wrapped)
        tensors = [parameter.tensor for parameter in self._trained]
        self._engine = UpdateEngine(tensors, [p.group for p in self._trained], self.config)
        self._index_of = {tensor: index for index, tensor in enumerate(tensors)}
        for index, tensor in enumerate(tensors):
            if wrapped.state.get(tensor):
                self._engine.state.adopt(index, wrapped.state[tensor])
        # From here on nothing fails, so the wrapped optimizer may be changed.
        self._wrapped: torch.optim.Optimizer | None = None
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups = wrapped.param_groups
        self._wrapped = wrapped
        # One set of hooks too: those registered before wrapping keep being called.
        self._optimizer_step_pre_hooks = wrapped._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = wrapped._optimizer_step_post_hooks
        wrapped.state.clear()
        self.state = StateView(self._engine.state, self._index_of)  # type: ignore[assignment]
        self._last_step: StepRecord | None = None

    @property
    def plan(self) -> UpdatePlan:
        """What a step does in which every parameter has a gradient; print it."""
        return self._engine.plan

    @property
    def last_step(self) -> StepRecord | None:
        """How the last step went: times, bytes, spans; None before the first."""
        return self._last_step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if any.

        Raises:
            ConfigError: the optimizer was closed, a hyperparameter is not finite, or a
                parameter or gradient cannot be used. Nothing has been changed then.
            PoolError: called in a forked child.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def close(self) -> None:
        """Stop all threads and give the pool back; idempotent. The state is gone with it."""
        self._engine.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while constructing; later it is refused, since the pool has its final size.

        Raises:
            ConfigError: the optimizer has been made.
        """
        if getattr(self, "_wrapped", None) is not None:
            _refuse(
                "add_param_group", fix="give the wrapped optimizer all its groups, then wrap it"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Not available yet.

        Raises:
            ConfigError: always; `state` gives the tensors of each parameter.
        """
        _refuse("state_dict", fix="read optimizer.state[parameter]")

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Not available yet.

        Raises:
            ConfigError: always.
        """
        _refuse("load_state_dict", fix="load into the torch optimizer, then wrap that")

    def _check_usable(self) -> None:
        if self._engine.closed:
            raise ConfigError("the optimizer was closed", where="step", fix="make a new one")
        self._engine.check_process()

    def _step(self) -> None:
        assert self._wrapped is not None
        self._check_usable()  # again: a closure may close the optimizer
        groups = self.param_groups
        hyper = [read_group(self._wrapped, index, group) for index, group in enumerate(groups)]
        for parameter in self._trained:
            parameter.check(groups)
        check_frozen(self._wrapped, self._index_of)
        tensors = [parameter.tensor for parameter in self._trained]
        grads = read_gradients(tensors, [parameter.name for parameter in self._trained])
        counts = self._engine.state.steps
        made: dict[tuple[int, int], AdamScalars] = {}
        scalars: list[AdamScalars | None] = []
        for parameter, grad, count in zip(self._trained, grads, counts, strict=True):
            key = (parameter.group, count + 1)
            if grad is not None and key not in made:
                made[key] = hyper[parameter.group].scalars(count + 1)
            scalars.append(None if grad is None else made[key])
        self._last_step = self._engine.step(grads, scalars)
        # A scheduler on the wrapped optimizer looks here whether a step came before it.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]


def _refuse(method: str, *, fix: str) -> NoReturn:
    raise ConfigError("not supported yet", where=f"DOSOptimizer.{method}", fix=fix)
