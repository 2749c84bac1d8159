"""The gradients of a step: read from the parameters, checked, in the weights' memory order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dos.errors import ConfigError
from dos.memory.flat import flat_like
from dos.released import ReleasedGradient
from dos.sending import GradientSender
from dos.shards import is_sharded, local_of, same_placement


def read_gradients(
    parameters: Sequence[torch.Tensor], names: Sequence[str], sender: GradientSender | None
) -> list[torch.Tensor | None]:
    """Each parameter's `.grad`, 1-D in the memory order of the parameter; None where it has none.

    A gradient that was sent and released is what `sender` has behind its stand-in. Of a DTensor it
    is the shard here; a gradient that is placed otherwise than its parameter is redistributed.

    Raises:
        ConfigError: a gradient is sparse or complex, has another dtype or device than its
            parameter, is on another mesh, or was released in an earlier step; `names` says whose.
    """
    return [
        None if p.grad is None else _read(p, p.grad, name, index, sender)
        for index, (p, name) in enumerate(zip(parameters, names, strict=True))
    ]


def _read(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    name: str,
    index: int,
    sender: GradientSender | None,
) -> torch.Tensor:
    if not isinstance(grad, ReleasedGradient):
        return _checked(local_of(parameter), local_of(_placed(parameter, grad, name)), name)
    behind = None if sender is None else sender.behind(index)
    if behind is None:
        raise ConfigError(
            "its gradient was released by an earlier step",
            where=name,
            fix="call zero_grad() after every step, or set release_grads=False",
        )
    return behind


def _placed(parameter: torch.Tensor, grad: torch.Tensor, name: str) -> torch.Tensor:
    if same_placement(grad, parameter):
        return grad
    if is_sharded(grad) and is_sharded(parameter) and grad.device_mesh == parameter.device_mesh:
        return grad.redistribute(placements=parameter.placements)
    raise ConfigError(
        "of the gradient and its parameter one is a DTensor, or they lie on two meshes",
        where=name,
        fix="make both DTensors on one mesh, or both plain tensors",
    )


def _checked(parameter: torch.Tensor, grad: torch.Tensor, name: str) -> torch.Tensor:
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"its gradient is sparse ({grad.layout})",
            where=name,
            fix="make it dense: e.g. sparse=False in nn.Embedding, or grad.to_dense()",
        )
    if grad.dtype is not parameter.dtype:
        raise ConfigError(
            f"its gradient is {grad.dtype}, the parameter {parameter.dtype}",
            where=name,
            fix="cast the gradient to the parameter's dtype",
        )
    if grad.device != parameter.device:
        raise ConfigError(
            f"its gradient is on {grad.device}, the parameter on {parameter.device}",
            where=name,
            fix="move the gradient to the parameter's device",
        )
    return flat_like(grad, parameter)
