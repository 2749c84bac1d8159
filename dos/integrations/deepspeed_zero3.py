"""DeepSpeed ZeRO-3: its optimizer offload updated by this library."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import log_dist

from dos.config import DOSConfig
from dos.errors import IntegrationError
from dos.integrations import deepspeed_checkpoint
from dos.integrations import zero3_seams as seams
from dos.integrations.deepspeed_options import read_checkpoint
from dos.integrations.zero3_config import (
    SECTION,
    check_combination,
    make_options,
    read_section,
    without_section,
)
from dos.integrations.zero3_optimizer import DOSZeroOptimizer_Stage3
from dos.integrations.zero3_report import StepReport
from dos.integrations.zero3_session import Zero3Session


def register() -> None:
    """Have every DeepSpeed engine attached whose configuration has our section switched on.

    Checks the section when the configuration is read. Idempotent.

    Raises:
        IntegrationError: this DeepSpeed is not as known; names what moved.
    """
    if getattr(DeepSpeedConfig._initialize_params, "_dos", False):
        return
    seams.check_version(deepspeed.__version__)
    moved = seams.moved_seams(DeepSpeedEngine, seams.ENGINE_SEAMS)
    moved += seams.moved_seams(DeepSpeedConfig, seams.CONFIG_SEAMS)
    seams.check_seams(deepspeed.__version__, moved + _moved_in_optimizer())
    DeepSpeedConfig._initialize_params = _reading_config(DeepSpeedConfig._initialize_params)
    DeepSpeedEngine._configure_zero_optimizer = _attaching(
        DeepSpeedEngine._configure_zero_optimizer
    )
    deepspeed_checkpoint.register()


def attach(engine: Any, **options: Any) -> Zero3Session:
    """Let this library carry out the updates of an engine's ZeRO-3 optimizer from now on.

    Without options those of the engine's section count, else the defaults.

    Args:
        engine: of `deepspeed.initialize`, ZeRO stage 3 with optimizer offload to the CPU.
        **options: fields of `dos.DOSConfig` but `wire`, `release_grads` and `overlap_forward`.

    Returns:
        What is attached: `last_step` and `engine.plan` say how steps go.

    Raises:
        ConfigError: an option or a setting of DeepSpeed that cannot be combined.
        IntegrationError: this DeepSpeed or this engine cannot be worked with. Nothing has been
            changed then.
        PoolError: host memory is too small.
    """
    seams.check_version(deepspeed.__version__)
    seams.check_seams(deepspeed.__version__, _moved_in_optimizer())
    return _attach(engine.optimizer, engine, options)


def _attach(optimizer: Any, engine: Any, options: Mapping[str, Any]) -> Zero3Session:
    config = engine._config._param_dict
    _check_engine(optimizer, engine)
    check_combination(config)
    made = make_options(options, config["zero_optimization"]) if options else None
    made = made or read_section(config) or make_options({}, config["zero_optimization"])
    session = Zero3Session(optimizer, made, StepReport(engine, made))
    optimizer._dos = session
    optimizer.__class__ = DOSZeroOptimizer_Stage3
    # Upstream's logger shows nothing below.
    log_dist(_description(session, made), ranks=[0], level=logging.WARNING)
    return session


def _check_engine(optimizer: Any, engine: Any) -> None:
    if isinstance(optimizer, DOSZeroOptimizer_Stage3):
        raise IntegrationError(
            "the engine is attached already",
            where="attach",
            fix="call attach once, or only register",
        )
    # SuperOffload and MiCS have subclasses of their own.
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        raise IntegrationError(
            f"its optimizer is a {type(optimizer).__name__}",
            where="engine",
            fix="use ZeRO stage 3 with offload_optimizer.device 'cpu', and no variant of it",
        )
    missing = [name for name in seams.ATTRIBUTES if not hasattr(optimizer, name)]
    seams.check_seams(deepspeed.__version__, [f"the optimizer has no {name}" for name in missing])
    if optimizer.torch_autocast_gradscaler is not None:
        raise IntegrationError(
            "torch_autocast in float16 scales and checks every flat group on its own",
            where="torch_autocast",
            fix="use the section fp16, or autocast in bfloat16",
        )
    groups = getattr(optimizer, "sub_group_process_groups", [])
    if engine.has_moe_layers or any(group is not groups[0] for group in groups):
        raise IntegrationError(
            "experts are partitioned over other ranks than the rest, which is not supported",
            where="engine",
            fix="train mixtures of experts without this library",
        )


def _description(session: Zero3Session, config: DOSConfig) -> str:
    plan = session.engine.plan
    split = ", ".join(f"{numel:,} {at}" for at, numel in session.engine.split().items() if numel)
    return (
        f"{SECTION}: on {session.engine.label}, stride {plan.stride} (asked: {config.stride}), "
        f"{len(plan.sizes)} subgroups; parameters of this rank: {split}"
    )


def _moved_in_optimizer() -> list[str]:
    kind = DeepSpeedZeroOptimizer_Stage3
    return [
        *seams.moved_seams(kind, seams.OPTIMIZER_SEAMS),
        *seams.moved_seams(kind, seams.OPTIONAL_SEAMS, optional=True),
    ]


def _reading_config(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_params(self: Any, param_dict: dict[str, Any]) -> None:
        options = read_section(param_dict)
        read_checkpoint(param_dict)  # refuses what is wrong in it before anything is made
        original(self, without_section(param_dict))
        if options is not None:
            # A torch.optim.AdamW of the caller does as well: its step is not used.
            self.zero_force_ds_cpu_optimizer = False

    initialize_params._dos = True  # type: ignore[attr-defined]
    return initialize_params


def _attaching(original: Any) -> Any:
    @functools.wraps(original)
    def configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        made = original(self, optimizer)
        if optimizer is not None and read_section(self._config._param_dict) is not None:
            _attach(made, self, {})
        return made

    return configure_zero_optimizer
