"""Which parts of DeepSpeed's ZeRO-3 this library replaces or calls, and whether they are there."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

from dos.errors import IntegrationError

OLDEST, NEWEST = "0.18.0", "0.19.8"
"""The versions that are tested, and what lies between them."""

OPTIMIZER_SEAMS: dict[str, tuple[str, ...]] = {
    "step": ("closure",),
    "has_overflow": ("partition_gradients",),
    "_get_norm_groups": (),
    "unscale_and_clip_grads": ("sub_group_id", "total_norm"),
    "_optimizer_step": ("sub_group_id",),
    "_reassign_or_swap_out_partitioned_parameters": ("sub_group_id",),
    "_unflatten_partitioned_parameters": ("sub_group_id",),
    "reset_cpu_buffers": (),
    "get_param_id": ("param",),
    "_get_fp32_grad_state_partition": ("param", "release_swap_buffers"),
    "get_fp32_grad_partitions": (),
    "update_fp32_grad_for_param_vectorized": ("update_func", "param_list"),
    "state_dict": (),
    "_restore_from_bit16_weights": (),
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3": ("checkpoint_dir",),
    "destroy": (),
}
"""Methods of DeepSpeedZeroOptimizer_Stage3 by name, with their arguments."""

OPTIONAL_SEAMS: dict[str, tuple[str, ...]] = {
    "_offload_grad_partition_at_boundary": (
        "param",
        "grad_buffer",
        "offload_fp32_gradients",
        "offload_fp32_offsets",
    ),
    "_grad_norm_counts_every_rank": ("params", "process_group"),
}
"""The same of methods that older versions do not have, and that are not missed there."""

ENGINE_SEAMS: dict[str, tuple[str, ...] | None] = {
    "_configure_zero_optimizer": ("optimizer",),
    "save_checkpoint": (
        "save_dir",
        "tag",
        "client_state",
        "save_latest",
        "exclude_frozen_parameters",
    ),
    "load_checkpoint": (
        "load_dir",
        "tag",
        "load_module_strict",
        "load_optimizer_states",
        "load_lr_scheduler_states",
        "load_module_only",
        "custom_load_fn",
    ),
    "_take_model_step": None,
    "_get_all_ckpt_names": ("checkpoints_path", "tag"),
    "_get_zero_ckpt_name": ("checkpoints_path", "tag"),
    "load_universal_checkpoint": (),
    "destroy": (),
}
"""The same of DeepSpeedEngine; None: whatever they take is passed on."""

CONFIG_SEAMS: dict[str, tuple[str, ...]] = {"_initialize_params": ("param_dict",)}

ATTRIBUTES = (
    "optimizer",
    "fp16_groups",
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "sub_group_to_group_id",
    "grad_position",
    "norm_for_param_grads",
    "grad_partitions_flat_buffer",
    "loss_scale",
    "clip_grad",
    "dp_process_group",
    "model_parallel_group",
    "model_parallel_rank",
)
"""What a ZeRO-3 optimizer is asked for."""


def is_tested(version: str) -> bool:
    """Whether a DeepSpeed is one of those that are tested, or lies between them."""
    return Version(OLDEST) <= Version(Version(version).base_version) <= Version(NEWEST)


def check_version(version: str) -> None:
    """Warn about a DeepSpeed that is not tested."""
    if not is_tested(version):
        warnings.warn(
            f"DeepSpeed {version} is not tested with this library; {OLDEST} to {NEWEST} are",
            stacklevel=3,
        )


def moved_seams(
    kind: type, seams: Mapping[str, tuple[str, ...] | None], *, optional: bool = False
) -> list[str]:
    """Those of a class's methods that are missing or take other arguments, each in words."""
    moved = []
    for name, expected in seams.items():
        method = getattr(kind, name, None)
        if method is None:
            if not optional:
                moved.append(f"{kind.__name__}.{name} is gone")
            continue
        found = tuple(inspect.signature(_undecorated(method)).parameters)[1:]
        if expected is not None and found != expected:
            moved.append(f"{kind.__name__}.{name} takes {found}, not {expected}")
    return moved


def check_seams(version: str, moved: list[str]) -> None:
    """Refuse a DeepSpeed that has other seams.

    Raises:
        IntegrationError: names those that moved.
    """
    if moved:
        raise IntegrationError(
            f"DeepSpeed {version} is not as this library knows it: {'; '.join(moved)}",
            where="deepspeed",
            fix=f"install a version from {OLDEST} to {NEWEST}, or switch the section off",
        )


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method inside upstream's `instrument_w_nvtx`, which does not say what it wraps."""
    while (inner := inspect.getclosurevars(method).nonlocals.get("func")) is not None:
        method = inner
    return method
