"""The ZeRO-3 optimizer with our update: upstream's class, some of its methods replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from dos.integrations.zero3_session import Zero3Session


class DOSZeroOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """What `attach` turns an engine's ZeRO-3 optimizer into; it has no constructor of its own.

    Upstream's `step` runs with its own order of overflow check, loss scale, norm and update; in
    its loop over subgroups the first one carries out the update of all.
    """

    _dos: Zero3Session

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient of any rank is infinite or NaN; found while they were reduced."""
        return not self._dos.total_norm().finite

    def _offload_grad_partition_at_boundary(
        self,
        param: torch.Tensor,
        grad_buffer: torch.Tensor,
        offload_fp32_gradients: object,
        offload_fp32_offsets: object,
    ) -> None:
        self._dos.arrive(self.get_param_id(param), grad_buffer)

    def _get_norm_groups(self) -> list[torch.Tensor]:
        return [torch.tensor(self._dos.total_norm().total, dtype=torch.float32)]

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: object) -> None:
        """Nothing: the update multiplies by the factor as it reads the gradient."""

    def _optimizer_step(self, sub_group_id: int) -> None:
        if sub_group_id == 0:
            self._dos.update()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # The update has written the weights.
        self._unflatten_partitioned_parameters(sub_group_id)

    def reset_cpu_buffers(self) -> None:
        """A step is over, or was left out for an overflow."""
        super().reset_cpu_buffers()
        self._dos.forget_gradients()

    def _get_fp32_grad_state_partition(
        self, param: torch.Tensor, release_swap_buffers: bool
    ) -> Any:
        self._dos.bring_home(self.get_param_id(param))
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    def get_fp32_grad_partitions(self) -> Any:
        """As upstream's."""
        self._bring_home([param for group in self.fp16_groups for param in group])
        return super().get_fp32_grad_partitions()

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., Any], param_list: Sequence[torch.Tensor]
    ) -> None:
        """As upstream's."""
        self._bring_home([param for param in param_list if param.requires_grad])
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def _bring_home(self, params: Sequence[torch.Tensor]) -> None:
        for param in params:
            self._dos.bring_home(self.get_param_id(param))

    def state_dict(self) -> Any:
        """As upstream's.

        Raises:
            ConfigError: a step or a load failed half-way, so that the state is of two steps.
        """
        self._dos.engine.whole.check("state_dict")
        return super().state_dict()

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, **kwargs: Any
    ) -> None:
        """As upstream's; the loaded state comes home."""
        self._dos.await_captured("load_state_dict")
        super().load_state_dict(state_dict_list, load_optimizer_states, **kwargs)
        with torch.no_grad():
            self._dos.adopt()
        if load_optimizer_states:
            self._dos.engine.whole.load_ended()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """As upstream's, which gives all param groups the hyperparameters of the first."""
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        path = Path(checkpoint_dir, "zero", "optimizer_state.pt")
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]["param_groups"]
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            warnings.warn(
                f"the checkpoint has {len(saved)} param groups, this training {len(groups)}: all "
                "have the hyperparameters of the first one saved",
                stacklevel=2,
            )
            return
        for group, its in zip(groups, saved, strict=True):
            group.update({key: value for key, value in its.items() if key != "params"})

    def _restore_from_bit16_weights(self) -> None:
        self._dos.await_captured("refresh_fp32_params")
        super()._restore_from_bit16_weights()

    def destroy(self) -> None:
        """As upstream's; our threads end."""
        super().destroy()
        self._dos.close()
