"""Names of a model's tensors, the same however the model is wrapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dos.errors import ConfigError
from dos.readers import Barrier

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_STATE_DICT = ("state_dict", "_save_to_state_dict", "get_extra_state")


class ModelNames:
    """Names in a model without what `DistributedDataParallel` and `torch.compile` put in them.

    Args:
        model: whose modules are wrapped as they will be used.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        kinds = (DistributedDataParallel, DataParallel)
        self._parallel = {name for name, m in model.named_modules() if isinstance(m, kinds)}

    def plain(self, name: str) -> str:
        """A name of a module, parameter or buffer without wrappers."""
        kept, before = [], ""
        for part in name.split("."):
            if part not in _WRAPPERS and not (part == "module" and before in self._parallel):
                kept.append(part)
            before = f"{before}.{part}" if before else part
        return ".".join(kept)

    def parameters(self) -> dict[torch.Tensor, str]:
        """The name of each parameter; of several names of one, the first."""
        return {tensor: self.plain(name) for name, tensor in self._model.named_parameters()}

    def buffers(self, state: Mapping[str, Any]) -> set[int]:
        """Ids of what of the state dict is no parameter, by any of its names."""
        named = self._model.named_parameters(remove_duplicate=False)
        parameters = {self.plain(name) for name, _ in named}
        return {id(value) for name, value in state.items() if name not in parameters}

    @property
    def reads_no_values(self) -> bool:
        """Whether its state dict is taken by torch alone: by no method or hook of somebody else."""
        for module in self._model.modules():
            for name in _STATE_DICT:
                method = getattr(getattr(module, name), "__func__", None)
                if method is not getattr(torch.nn.Module, name):
                    return False
            hooks = (module._state_dict_pre_hooks, module._state_dict_hooks)
            if not all(isinstance(hook, Barrier) for its in hooks for hook in its.values()):
                return False
        return True

    def state_dict(self) -> OrderedDict[str, Any]:
        """The model's state dict, live, under plain names.

        Raises:
            ConfigError: two tensors have the same name but for their wrappers.
        """
        state = self._model.state_dict()
        plain = OrderedDict((self.plain(name), value) for name, value in state.items())
        if len(plain) < len(state):
            raise ConfigError(
                "two tensors of the model have the same name when wrappers are taken off",
                where=type(self._model).__name__,
                fix="wrap the whole model, or give another name to one of its modules",
            )
        versions: Mapping[str, Any] = getattr(state, "_metadata", {})
        named = OrderedDict((self.plain(name), version) for name, version in versions.items())
        plain._metadata = named  # type: ignore[attr-defined]
        return plain

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Have the model load a state dict with plain names, for its hooks and extra state."""
        own = self._model.state_dict()
        names = {self.plain(name): name for name in own}
        given = OrderedDict((names.get(name, name), value) for name, value in state.items())
        versions: Mapping[str, Any] = getattr(own, "_metadata", {})
        saved = getattr(state, "_metadata", {})
        given._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, saved.get(self.plain(name), version)) for name, version in versions.items()
        )
        self._model.load_state_dict(given, strict=strict)
