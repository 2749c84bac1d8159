"""DeepSpeed's engines save and load through this library's checkpoints."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime import engine as upstream
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import mixed_precision_linkage

from dos.checkpoint.storage import make_storage
from dos.errors import IntegrationError
from dos.integrations.deepspeed_engine import DOSCheckpointEngine, await_all_captured
from dos.integrations.deepspeed_held import hold_until_step
from dos.integrations.deepspeed_loading import Target, load_checked
from dos.integrations.deepspeed_options import read_checkpoint
from dos.integrations.deepspeed_tags import is_tag, open_tag
from dos.integrations.deepspeed_trainer import register_trainer

Call = Callable[[], Any]
"""Calls upstream's method, by arguments that may have been changed."""


def register() -> None:
    """Have every engine save so whose configuration asks for it; called once.

    `dos.integrations.deepspeed_zero3.register` calls it when it has seen that all is as known.
    """
    upstream.create_checkpoint_engine = _choosing(upstream.create_checkpoint_engine)
    for name, instead in _INSTEAD.items():
        setattr(DeepSpeedEngine, name, _wrapped(getattr(DeepSpeedEngine, name), instead))
    for home, name in _SETTERS:
        setattr(home, name, _setting(getattr(home, name), name))
    PipelineModule.ckpt_layer_path_list = _finding_layers(PipelineModule.ckpt_layer_path_list)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        config = None if config_params is None else config_params._param_dict
        options = None if config is None else read_checkpoint(config)
        if options is None:
            return original(config_params, *args, **kwargs)
        register_trainer()
        return DOSCheckpointEngine(options)

    return create_checkpoint_engine


def _wrapped(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """A method of upstream's engine, and what is done instead where we save.

    Args:
        original: the method.
        instead: given our engine, upstream's, the arguments by name, and a `Call`.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(self, "checkpoint_engine", None)
        if not isinstance(ours, DOSCheckpointEngine):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        return instead(ours, self, given.arguments, lambda: original(*given.args, **given.kwargs))

    return method


def _save(ours: DOSCheckpointEngine, engine: Any, asked: dict[str, Any], call: Call) -> Any:
    if not asked["save_dir"]:
        return call()
    if asked["tag"] is None:
        asked["tag"] = f"global_step{engine.global_steps}"
    tag = str(asked["tag"])
    if os.path.basename(tag) != tag:
        raise IntegrationError(
            f"the tag {tag!r} is no name of a directory",
            where="save_checkpoint",
            fix="put what comes before the last '/' into save_dir",
        )
    hold = partial(hold_until_step, engine, ours.gates)
    path = os.path.join(asked["save_dir"], tag)
    with ours.saving(path, hold, latest=bool(asked["save_latest"])):
        return call()


def _load(ours: DOSCheckpointEngine, engine: Any, asked: dict[str, Any], call: Call) -> Any:
    ours.wait()  # what is loaded may have been saved just now, and overwrites what is held
    if engine.load_universal_checkpoint():
        return call()

    def load(tag: str | None) -> Any:
        asked["tag"] = tag
        return call()

    targets = partial(_targets, engine, asked)
    return load_checked(ours, asked["load_dir"], asked["tag"], targets, load)


def _targets(engine: Any, asked: dict[str, Any], tag: str) -> dict[str, Target | None]:
    """Names of the files that this rank will ask for, and what they are read into.

    Raises:
        IntegrationError: upstream would look for files of its own.
    """
    load_dir = asked["load_dir"]
    if engine.zero_optimization_partition_weights() and not asked["load_optimizer_states"]:
        raise IntegrationError(
            "ZeRO-3 without optimizer states reads the masters from DeepSpeed's own files",
            where="load_checkpoint",
            fix=f"dos convert {os.path.join(load_dir, tag)} NEW --to deepspeed",
        )
    found: dict[str, Target | None] = {os.path.basename(engine._get_ckpt_name(load_dir, tag)): None}
    whole = asked["load_optimizer_states"] and not asked["load_module_only"]
    if whole and engine.zero_optimization():
        session = getattr(engine.optimizer, "_dos", None)
        target = None
        if session is not None:
            # Upstream's, which does not refuse state of two steps: it is overwritten.
            live = DeepSpeedZeroOptimizer_Stage3.state_dict(engine.optimizer)
            tree = {"optimizer_state_dict": _tensors(live)}
            target = Target(tree, session.engine.whole.load_begins)
        found[os.path.basename(engine._get_zero_ckpt_name(load_dir, tag))] = target
    return found


def _tensors(tree: Any) -> Any:
    """The large tensors of a tree, each where it is; None where there are none."""
    if isinstance(tree, dict):
        parts = {key: _tensors(value) for key, value in tree.items()}
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(tree, list):
        parts_of_list = [_tensors(value) for value in tree]
        return None if None in parts_of_list else parts_of_list or None
    return tree if getattr(tree, "ndim", 0) else None


def _step(ours: DOSCheckpointEngine, engine: Any, asked: dict[str, Any], call: Call) -> Any:
    ours.gates.wait("step")
    return call()


def _destroy(ours: DOSCheckpointEngine, engine: Any, asked: dict[str, Any], call: Call) -> Any:
    ours.cleanup()  # before what it reads is given back
    return call()


def _find_files(ours: DOSCheckpointEngine, engine: Any, asked: dict[str, Any], call: Call) -> Any:
    path, tag = asked["checkpoints_path"], asked["tag"]
    directory = os.path.join(path, str(tag))
    if not is_tag(directory):
        return call()
    pattern = os.path.basename(engine._get_ckpt_name(path, tag, mp_placeholder="*"))
    return open_tag(os.path.abspath(directory), ours.storage).find(pattern)


def _finding_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ckpt_layer_path_list(self: Any, ckpt_dir: str, local_layer_idx: int) -> Any:
        if not is_tag(ckpt_dir):
            return original(self, ckpt_dir, local_layer_idx)
        pattern = f"layer_{local_layer_idx + self._local_start:02d}-*model_states.pt"
        return open_tag(os.path.abspath(ckpt_dir), make_storage()).find(pattern)

    return ckpt_layer_path_list


def _setting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def setter(*args: Any, **kwargs: Any) -> Any:
        await_all_captured(name)
        return original(*args, **kwargs)

    return setter


_INSTEAD = {
    "save_checkpoint": _save,
    "load_checkpoint": _load,
    "_take_model_step": _step,
    "destroy": _destroy,
    "_get_all_ckpt_names": _find_files,
}
# What upstream's public setters of masters and state come down to.
_SETTERS = (
    (DeepSpeedZeroOptimizer_Stage3, "set_full_hp_param"),
    (DeepSpeedZeroOptimizer_Stage3, "set_local_hp_param"),
    (mixed_precision_linkage, "set_full_hp_param"),
)
