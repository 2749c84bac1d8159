"""`DOSOptimizer`: a torch optimizer whose state lives in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo  # unlike torch.compiler's, imports no compiler
from torch.optim.optimizer import _global_optimizer_post_hooks

from dos.checkpointed import Checkpointed
from dos.config import DOSConfig
from dos.engine import UpdateEngine
from dos.errors import ConfigError
from dos.execute.record import Recording, StepRecord
from dos.grad_scale import ClipFactor, check_finite, loss_unscaling, total_norm
from dos.gradients import read_gradients
from dos.kernels import norm
from dos.plan import UpdatePlan
from dos.released import drop_stand_ins
from dos.saved_state import load_saved, read_saved
from dos.state_dict import read_state_dict
from dos.state_views import StateView
from dos.trained import TrainedParameters
from dos.wrapped import check_supported, read_group, share_hooks, step_scalars


class DOSOptimizer(Checkpointed):
    """Adam or AdamW with its state in pinned host memory, updated on host and device at once.

    Wraps a `torch.optim.Adam` or `torch.optim.AdamW` and takes its place: it shares the
    wrapped optimizer's `param_groups` (so a scheduler on either works, and lr, betas, eps and
    weight_decay are read at every step) and adopts its state. Training gives the same bits
    with every option below.

    A gradient with NaN or inf is applied, as torch's optimizers do. Weights changed between
    steps (in place, by loading a state dict, by exchanging their memory) are taken up; a write
    through `.data` is noticed where it touches one of 64 elements sampled per parameter, and
    `refresh_master_weights()` takes up any other. The wrapped optimizer must not be stepped
    itself any more.

    `state` and `state_dict()` have torch's layout and begin empty: per parameter that has been
    updated step, exp_avg, exp_avg_sq, and the fp32 `master` of a 16-bit weight. They load from
    and into Adam and AdamW. The optimizer cannot be copied or pickled itself.

    Args:
        optimizer: the optimizer to wrap; its foreach and fused flags have no effect.
        **options: the fields of `dos.DOSConfig`: stride, subgroup_size, device,
            resident_ratio, device_slots, host_memory_bytes, ring_bytes, threads, pin_threads,
            wire, release_grads, overlap_forward, profile.

    Raises:
        ConfigError: an option, the optimizer or a parameter cannot be used.
        PoolError: host memory is too small for state, gradients and staging.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.config = DOSConfig(**options)
        wrapped = check_supported(optimizer)
        for index, group in enumerate(wrapped.param_groups):
            read_group(wrapped, index, group)
        self._trained = TrainedParameters(wrapped)
        adopted = {
            index: read_saved(wrapped.state.get(p.tensor), p.tensor, p.name)
            for index, p in enumerate(self._trained)
        }
        self._engine = UpdateEngine(self._trained.tensors, self._trained.groups, self.config)
        with torch.no_grad():
            load_saved(self._engine.state, adopted)
        # From here on nothing fails, so the wrapped optimizer may be changed.
        self._wrapped = None
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups = wrapped.param_groups
        self._wrapped = wrapped
        share_hooks(self, wrapped)
        wrapped.state.clear()
        self.state = StateView(  # type: ignore[assignment]
            self._engine.state, self._trained.index_of, self._engine.synchronize
        )
        self._clip_factor = ClipFactor()

    @property
    def plan(self) -> UpdatePlan:
        """What a step does in which every parameter has a gradient; print it."""
        return self._engine.plan

    @property
    def last_step(self) -> StepRecord | None:
        """How the last step went: times, bytes, spans; None before the first. Waits for its end."""
        return self._engine.last_step

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if any.

        Raises:
            ConfigError: the optimizer was closed, a hyperparameter is not finite, or a
                parameter or gradient cannot be used. Nothing has been changed then.
            PoolError: called in a forked child.
        """
        self._check_usable("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def synchronize(self) -> None:
        """Wait for what of the last step runs on after `step`, with `overlap_forward`.

        Weights may be read in any way after it. Raises what failed in the step.
        """
        self._engine.synchronize()

    def metrics(self) -> dict[str, float]:
        """Figures of the last step for a logger, flat: times, bytes, rates; empty before the first.

        Waits for what the step has left running on the device.
        """
        return {} if self.last_step is None else self.last_step.metrics()

    def record_trace(self, path: str | Path, steps: int = 3) -> None:
        """Record the next `steps` steps, backwards included, and write them to `path`.

        The file is a Chrome trace, written when the last of them is over; Perfetto opens it.
        That it cannot be written is a warning then.

        Raises:
            ConfigError: fewer than one step, or no directory to write to.
        """
        self._engine.record(Recording(Path(path), steps))

    @_disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip all gradients of this optimizer together to `max_norm`, in the next `step`.

        As `torch.nn.utils.clip_grad_norm_`, but `p.grad` stays as it is: the factor goes into
        the update, which costs no pass over the gradients. It applies to what the next step finds
        in them; it is dropped by `zero_grad`, and with them where all are replaced or None.

        Args:
            max_norm: the norm that is not exceeded.
            norm_type: 2 or infinity.
            error_if_nonfinite: raise if the norm is infinite or NaN.

        Returns:
            The norm before clipping, float64, on the CPU. It is that of the gradients as they are
            stored, summed in float64 (torch sums 16-bit ones in less and may overflow), the same
            bits on any device and under any schedule; of DTensors over all processes: call in all.

        Raises:
            ConfigError: another norm, or a negative `max_norm`.
            NonFiniteError: the norm is not finite and `error_if_nonfinite` is set; nothing has
                been changed.
        """
        self._check_usable("clip_grad_norm_")
        with torch.no_grad():
            examined = self._engine.examine(self._read_gradients())
        grads = self._trained.grads
        norm_here = total_norm(self._trained.tensors, examined, norm_type)
        total = norm_here * self._clip_factor.of(grads)  # as they will be used
        if error_if_nonfinite:
            check_finite(total)
        self._clip_factor.multiply(norm.clip_scale(total, max_norm), grads)
        return torch.tensor(total, dtype=torch.float64)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, and drop what `clip_grad_norm_` has prepared.

        What runs on the current stream after it waits for gradients that are being sent.
        """
        self._clip_factor.drop()
        self._engine.discard_gradients()
        if not set_to_none:
            self._engine.synchronize()
        drop_stand_ins(self._trained.tensors)
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Stop all threads and give the pool back; idempotent. The state is gone with it."""
        self._engine.close()

    def refresh_master_weights(self) -> None:
        """Compare every weight in full with its fp32 master, and take up what was changed.

        The remedy after writes through `.data`, which can go unnoticed. A master keeps what it
        knows beyond a weight that is its rounding.

        Raises:
            ConfigError: the optimizer was closed.
            PoolError: called in a forked child.
        """
        self._check_writable("refresh_master_weights")
        with torch.no_grad():
            self._engine.state.masters.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's optimizers do; its parameters start at step 0.

        Their state takes host memory of its own; what is there already stays where it is.

        Raises:
            ConfigError: a parameter or an option of the group cannot be used.
            PoolError: host memory is too small for the new state.
            TypeError, ValueError: torch refuses the group. Nothing has been changed then.
        """
        if getattr(self, "_wrapped", None) is None:  # torch's own constructor
            super().add_param_group(param_group)
            return
        self._check_writable("add_param_group")
        given = dict(param_group) if isinstance(param_group, dict) else {}
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            assert self._wrapped is not None
            read_group(self._wrapped, count, param_group)
            added = set(map(id, param_group["params"]))
            self._admit(lambda tensor: id(tensor) in added and tensor.requires_grad)
        except BaseException:
            del self.param_groups[count:]
            if given:
                param_group.clear()
                param_group.update(given)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters and state in torch's layout; `state` says what it holds.

        Its tensors are views of the state wherever they can be: save or copy them before the
        next step.

        Raises:
            ConfigError: the optimizer was closed, or a step failed half-way.
            PoolError: called in a forked child.
        """
        self._check_usable("state_dict")
        self._engine.whole.check("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyperparameters and state from a state dict of this class, Adam or AdamW.

        Each tensor is copied home from wherever it is, in pieces and without going through the
        weight's dtype; a parameter without an entry is set back to step 0. A saved `master`
        counts where its rounding is the weight at the next step, so that model and optimizer
        may be loaded in either order; elsewhere the weight does.

        Raises:
            ConfigError: it does not fit, the optimizer was closed, or a step failed half-way.
                Nothing has been changed.
            PoolError: called in a forked child; or it has state of frozen parameters, for which
                host memory is too small. Nothing has been changed.
        """
        self._check_writable("load_state_dict")
        self._engine.whole.check("load_state_dict", loads=True)
        assert self._wrapped is not None
        given: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, given)
            given = given if result is None else result
        self._trained.check(self.param_groups)
        read = read_state_dict(self._wrapped, given)
        with torch.no_grad():
            self._admit(lambda tensor: read.states[tensor] is not None)
            states = {index: read.states[t] for t, index in self._trained.index_of.items()}
            if self._engine.whole.loading:
                self._engine.state.forget_zeros()
            load_saved(self._engine.state, states)
        read.set_groups(self._wrapped)
        self._engine.whole.load_ended()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copy, deepcopy and pickle, which would need a second pool.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "it owns threads and pinned memory and cannot be copied or pickled",
            where="DOSOptimizer",
            fix="save its state_dict(), and load that into a new DOSOptimizer",
        )

    def _step(self) -> None:
        assert self._wrapped is not None
        self._check_usable("step")  # again: a closure may close the optimizer
        groups = self.param_groups
        hyper = [read_group(self._wrapped, index, group) for index, group in enumerate(groups)]
        self._trained.check(groups)
        # Frozen when the optimizer was made, and unfrozen since.
        self._admit(lambda tensor: tensor.grad is not None)
        grads = self._read_gradients()
        # A scheduler on the wrapped optimizer looks here whether a step came before it.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]
        unscaling = loss_unscaling(self)
        if unscaling is None:
            self._engine.discard_gradients()
            self._clip_factor.drop()
            return
        scale = self._clip_factor.of(self._trained.grads) * unscaling
        present = [grad is not None for grad in grads]
        scalars = step_scalars(hyper, self._trained, present, self._engine.state.steps, scale)
        self._engine.step(grads, scalars)
        self._clip_factor.drop()
        if self._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            self._engine.synchronize()  # they may read weights

    def _read_gradients(self) -> list[torch.Tensor | None]:
        return read_gradients(self._trained.tensors, self._trained.names, self._engine.sender)
