"""What an attached ZeRO-3 optimizer has of ours: engine, gradients, one norm; and its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.utils import is_model_parallel_parameter

from dos.config import DOSConfig
from dos.errors import ConfigError
from dos.execute.record import StepRecord
from dos.integrations.zero3_engine import FlatGroupEngine
from dos.integrations.zero3_gradients import FlatGradients, Shard
from dos.integrations.zero3_norm import TotalNorm, norm_over_ranks
from dos.kernels import norm
from dos.kernels.scalars import AdamScalars
from dos.memory import HeldState
from dos.wrapped import Hyperparameters, check_supported, read_group
from perfmodel.profile import NodeProfile

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero3Session:
    """Lets upstream's fp32 flat groups and their moments live in our pool, and updates them.

    The tensors stay upstream's: `fp32_partitioned_groups_flat` and the base optimizer's state
    keep their identity and keys, only their memory is ours. So whatever upstream reads, sets and
    saves is the state itself; what it replaces (loading does) is copied home before the next step.

    Args:
        optimizer: upstream's ZeRO-3 optimizer.
        config: options.
        report: called with the record of each step and `FlatGroupEngine.profile`.

    Attributes:
        engine: carries out the update.
        gradients: this step's.
        last_step: how the last update went; None before the first.

    Raises:
        ConfigError, PoolError: as `dos.engine.UpdateEngine`; another base optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        config: DOSConfig,
        report: Callable[[StepRecord, NodeProfile | None], None],
    ) -> None:
        self._upstream, self._report = optimizer, report
        self.last_step: StepRecord | None = None
        self._norm: TotalNorm | None = None
        self._used_scale = 1.0
        self._counted = self._find_counted()
        self._hyperparameters()  # refuses what cannot be read, before anything is changed
        weights = [flat.detach() for flat in optimizer.fp16_partitioned_groups_flat]
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(weights))]
        with ExitStack() as undo:
            self._release_zeros(undo)
            self.engine = FlatGroupEngine(weights, groups, config)
            undo.callback(self.engine.close)
            self._homes = [self._home(index) for index in range(len(weights))]
            self.adopt()
            self._hooked = hasattr(type(optimizer), "_offload_grad_partition_at_boundary")
            shards = {pid: Shard(*where) for pid, where in optimizer.grad_position.items()}
            self.gradients = FlatGradients(
                self.engine,
                shards,
                [flat.grad for flat in optimizer.fp32_partitioned_groups_flat],
                lambda: optimizer.grad_partitions_flat_buffer,
                hooked=self._hooked,
            )
            undo.pop_all()

    def adopt(self) -> None:
        """Bring home whatever state upstream has replaced."""
        for index, (master, *moments) in enumerate(self._homes):
            flat = self._upstream.fp32_partitioned_groups_flat[index]
            if flat.data_ptr() != master.data_ptr():
                self.await_captured("replaced state")
                master.copy_(flat.data)
                flat.data = master
            state = self._state(index)
            for key, home in zip(_MOMENTS, moments, strict=True):
                if key in state and state[key].data_ptr() == home.data_ptr():
                    continue
                self.await_captured("replaced state")
                if key in state:
                    home.copy_(state[key])
                else:
                    home.zero_()
                state[key] = home
            if "step" not in state:
                counts_in_tensors = isinstance(self._upstream.optimizer, torch.optim.Adam)
                state["step"] = torch.tensor(0.0) if counts_in_tensors else 0

    def hold(self, what: str) -> HeldState:
        """Hold flat groups, moments and weights as the last step left them, by address.

        What upstream has replaced comes home first, so that its tensors lie in what is held. The
        tree is empty: upstream says what is saved.

        Args:
            what: names the capture in messages.

        Raises:
            ConfigError: a step failed half-way.
            PoolError: it waits for another capture, which does not end.
        """
        self.engine.whole.check("save_checkpoint")
        with torch.no_grad():
            self.adopt()
            self.engine.set_weights(self._upstream.fp16_partitioned_groups_flat)
        held, _ = self.engine.hold(what)
        return held

    def await_captured(self, what: str) -> None:
        """Wait until nothing is being captured, for `what` is about to change it.

        Raises:
            PoolError: a capture does not end.
        """
        self.engine.state.gates.wait(what)

    def arrive(self, parameter: int, grad: torch.Tensor) -> None:
        """Take in the reduced gradient of upstream's parameter with that id, 1-D."""
        self._norm = None
        self.gradients.arrive(parameter, grad)

    def bring_home(self, parameter: int) -> None:
        """Have a parameter's gradient in upstream's buffer: somebody reads it or writes to it."""
        self._norm = None
        self._take_filled()
        self.gradients.bring_home(parameter)

    def total_norm(self) -> TotalNorm:
        """The norm of all gradients, times the loss scale, over all ranks; taken once a step."""
        if self._norm is None:
            self._take_filled()
            found = self.gradients.examined()
            self._norm = norm_over_ranks(
                [its.square_sum for pid, its in found if pid in self._counted],
                finite=all(its.finite for _, its in found),
                groups=self._process_groups(),
            )
        return self._norm

    def update(self) -> None:
        """Update all flat groups: unscaled and clipped, weights written, state home on return."""
        with torch.no_grad():
            self.adopt()
            total = self.total_norm().total
            loss_scale = float(self._upstream.loss_scale)
            scale = 1.0 / loss_scale
            if self._upstream.clip_grad > 0.0:
                scale *= norm.clip_scale(total / loss_scale, float(self._upstream.clip_grad))
            self.engine.set_weights(self._upstream.fp16_partitioned_groups_flat)
            grads = [flat.grad.view(-1) for flat in self._upstream.fp32_partitioned_groups_flat]
            self.engine.step(grads, self._scalars(scale), self.gradients.for_step())
            self.last_step = self.engine.last_step
            for index in range(len(grads)):
                self._state(index)["step"] += 1
            self._used_scale = scale
            self.gradients.place()
        assert self.last_step is not None, "a step without overlap is over"
        self._report(self.last_step, self.engine.profile)

    def forget_gradients(self) -> None:
        """A step is over, or left out."""
        self._norm = None
        self.gradients.forget(self._used_scale)
        self._used_scale = 1.0

    def close(self) -> None:
        """Stop all threads; what upstream still holds of the pool stays valid. Idempotent."""
        self.engine.close()

    def _take_filled(self) -> None:
        """Where upstream fills its buffers by itself it notes norms; of which shards says which."""
        if not self._hooked:
            self.gradients.filled(self._upstream.norm_for_param_grads)

    def _release_zeros(self, undo: ExitStack) -> None:
        """Give back moments that are zero, as before the first step, ere ours take their place.

        Else the host would have to hold the whole state twice.
        """
        for index, flat in enumerate(self._upstream.fp32_partitioned_groups_flat):
            state = self._state(index)
            for key in _MOMENTS:
                if key in state and not state[key].any():
                    del state[key]
                    undo.callback(_put_zeros, state, key, flat)

    def _home(self, index: int) -> tuple[torch.Tensor, ...]:
        """Master and moments of a flat group where they live, each in one piece."""
        homes = []
        for kind in ("master", *_MOMENTS):
            parts = [part for part, _ in self.engine.state.parts(index, kind)]
            home = parts[0] if len(parts) == 1 else self.engine.state.whole(index, kind)
            assert home.data_ptr() == parts[0].data_ptr(), f"{kind} of flat group {index} is cut"
            homes.append(home)
        return tuple(homes)

    def _state(self, index: int) -> MutableMapping[str, Any]:
        flat = self._upstream.fp32_partitioned_groups_flat[index]
        state: MutableMapping[str, Any] = self._upstream.optimizer.state[flat]
        return state

    def _scalars(self, scale: float) -> list[AdamScalars | None]:
        hyper = self._hyperparameters()
        made: dict[tuple[int, int], AdamScalars] = {}
        scalars: list[AdamScalars | None] = []
        for index in range(len(self._homes)):
            count = int(self._state(index)["step"])
            self.engine.state.steps[index] = count
            key = self._upstream.sub_group_to_group_id[index], count + 1
            if key not in made:
                made[key] = hyper[key[0]].scalars(count + 1, scale)
            scalars.append(made[key])
        return scalars

    def _hyperparameters(self) -> list[Hyperparameters]:
        """Of each param group of the base optimizer, as they are now."""
        base = self._upstream.optimizer
        own = isinstance(base, DeepSpeedCPUAdam)
        if not own:
            check_supported(base)
        found = []
        for index, group in enumerate(base.param_groups):
            _check_group(index, group)
            its = read_group(base, index, group)
            found.append(replace(its, decoupled=bool(base.adam_w_mode)) if own else its)
        return found

    def _process_groups(self) -> list[Any]:
        """Over which the norm is added up: data parallel, then model parallel."""
        data, model = _partition_group(self._upstream), self._upstream.model_parallel_group
        return [data] if model is None or self._counts_every_rank() else [data, model]

    def _counts_every_rank(self) -> bool:
        """Whether the ranks of a model-parallel group hold different shards of everything."""
        decide = getattr(self._upstream, "_grad_norm_counts_every_rank", None)
        if decide is None:
            return False
        params = self._upstream.fp16_groups[0]
        return bool(decide(params, _partition_group(self._upstream)))

    def _find_counted(self) -> set[int]:
        """The parameters whose gradient this rank adds to the norm: each counts on one rank."""
        everything = self._upstream.model_parallel_rank == 0 or self._counts_every_rank()
        return {
            self._upstream.get_param_id(parameter)
            for group in self._upstream.fp16_groups
            for parameter in group
            if everything or is_model_parallel_parameter(parameter)
        }


def _put_zeros(state: MutableMapping[str, Any], key: str, like: torch.Tensor) -> None:
    state.setdefault(key, torch.zeros_like(like.detach()))


def _partition_group(optimizer: Any) -> Any:
    """The process group over which parameters are partitioned; one for all, `attach` checks it."""
    groups = getattr(optimizer, "sub_group_process_groups", None)
    return groups[0] if groups else optimizer.dp_process_group


def _check_group(index: int, group: Mapping[str, Any]) -> None:
    if not group.get("bias_correction", True):
        raise ConfigError(
            "bias_correction=False is not supported",
            where=f"param group {index}",
            fix="leave it on",
        )
