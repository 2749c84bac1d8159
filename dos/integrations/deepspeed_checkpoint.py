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


def register() -> None:
    """Have every engine save so whose configuration asks for it; called once.

    `dos.integrations.deepspeed_zero3.register` calls it when it has seen that all is as known.
    """
    upstream.create_checkpoint_engine = _choosing(upstream.create_checkpoint_engine)
    for name, wrap in _WRAPPED.items():
        setattr(DeepSpeedEngine, name, wrap(getattr(DeepSpeedEngine, name)))
    for home, name in _SETTERS:
        setattr(home, name, _setting(getattr(home, name), name))
    PipelineModule.ckpt_layer_path_list = _finding_layers(PipelineModule.ckpt_layer_path_list)


def _ours(engine: Any) -> DOSCheckpointEngine | None:
    found = getattr(engine, "checkpoint_engine", None)
    return found if isinstance(found, DOSCheckpointEngine) else None


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        config = None if config_params is None else config_params._param_dict
        options = None if config is None else read_checkpoint(config)
        if options is None:
            return original(config_params, *args, **kwargs)
        return DOSCheckpointEngine(options)

    return create_checkpoint_engine


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _ours(self)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if ours is None or not asked["save_dir"]:
            return original(*given.args, **given.kwargs)
        if asked["tag"] is None:
            asked["tag"] = f"global_step{self.global_steps}"
        tag = str(asked["tag"])
        if os.path.basename(tag) != tag:
            raise IntegrationError(
                f"the tag {tag!r} is no name of a directory",
                where="save_checkpoint",
                fix="put what comes before the last '/' into save_dir",
            )
        path = os.path.join(asked["save_dir"], tag)
        hold = partial(hold_until_step, self, ours.gates)
        with ours.saving(path, hold, latest=bool(asked["save_latest"])):
            return original(*given.args, **given.kwargs)

    return save_checkpoint


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _ours(self)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if ours is None or self.load_universal_checkpoint():
            return original(*given.args, **given.kwargs)
        whole = bool(asked["load_optimizer_states"]) and not asked["load_module_only"]

        def load(tag: str | None) -> Any:
            asked["tag"] = tag
            return original(*given.args, **given.kwargs)

        def targets(tag: str) -> dict[str, Target | None]:
            if self.zero_optimization_partition_weights() and not asked["load_optimizer_states"]:
                raise IntegrationError(
                    "ZeRO-3 without optimizer states reads the masters from DeepSpeed's own files",
                    where="load_checkpoint",
                    fix=f"dos convert {os.path.join(asked['load_dir'], tag)} NEW --to deepspeed",
                )
            return _targets(self, asked["load_dir"], tag, whole=whole)

        return load_checked(ours, asked["load_dir"], asked["tag"], targets, load)

    return load_checkpoint


def _targets(engine: Any, load_dir: str, tag: str, *, whole: bool) -> dict[str, Target | None]:
    """Names of the files that this rank will ask for; with `whole` also of optimizer state."""
    found: dict[str, Target | None] = {os.path.basename(engine._get_ckpt_name(load_dir, tag)): None}
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
    """The large tensors of a tree, each where it is."""
    if isinstance(tree, dict):
        parts = {key: _tensors(value) for key, value in tree.items()}
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(tree, list):
        parts_of_list = [_tensors(value) for value in tree]
        return None if None in parts_of_list else parts_of_list or None
    return tree if getattr(tree, "ndim", 0) else None


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _ours(self)
        if ours is not None:
            ours.gates.wait("step")
        return original(self, *args, **kwargs)

    return take_model_step


def _setting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def setter(*args: Any, **kwargs: Any) -> Any:
        await_all_captured(name)
        return original(*args, **kwargs)

    return setter


def _destroying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy(self: Any) -> Any:
        ours = _ours(self)
        if ours is not None:  # before what it reads is given back
            ours.cleanup()
        return original(self)

    return destroy


def _finding_files(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_all_ckpt_names(self: Any, checkpoints_path: str, tag: str) -> Any:
        ours = _ours(self)
        directory = os.path.join(checkpoints_path, str(tag))
        if ours is None or not is_tag(directory):
            return original(self, checkpoints_path, tag)
        pattern = self._get_ckpt_name(checkpoints_path, tag, mp_placeholder="*")
        return open_tag(os.path.abspath(directory), ours.storage).find(os.path.basename(pattern))

    return get_all_ckpt_names


def _finding_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ckpt_layer_path_list(self: Any, ckpt_dir: str, local_layer_idx: int) -> Any:
        if not is_tag(ckpt_dir):
            return original(self, ckpt_dir, local_layer_idx)
        pattern = f"layer_{local_layer_idx + self._local_start:02d}-*model_states.pt"
        return open_tag(os.path.abspath(ckpt_dir), make_storage()).find(pattern)

    return ckpt_layer_path_list


_WRAPPED = {
    "save_checkpoint": _saving,
    "load_checkpoint": _loading,
    "_take_model_step": _stepping,
    "destroy": _destroying,
    "_get_all_ckpt_names": _finding_files,
}

# What upstream's public setters of masters and state come down to.
_SETTERS = (
    (DeepSpeedZeroOptimizer_Stage3, "set_full_hp_param"),
    (DeepSpeedZeroOptimizer_Stage3, "set_local_hp_param"),
    (mixed_precision_linkage, "set_full_hp_param"),
)
