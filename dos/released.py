"""What stands in `p.grad` for a gradient that was sent and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from dos.errors import ConfigError


class ReleasedGradient(torch.Tensor):
    """Shape, dtype and device of a gradient without its memory; every operation on it is refused.

    So that a norm taken of it, or a second backward, is an error and not a silent zero.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> ReleasedGradient:
        """A stand-in for the gradient `like`."""
        made: ReleasedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"the gradient was sent to the host and released, so {func} cannot use it",
            where="release_grads",
            fix="clip with optimizer.clip_grad_norm_, call zero_grad() before the next backward, "
            "under DistributedDataParallel call dos.register_ddp, or set release_grads=False, "
            "which GradScaler needs",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is; reads nothing."""
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def drop_stand_ins(parameters: Iterable[torch.Tensor]) -> None:
    """Set gradients to None that have no memory to be zeroed."""
    for parameter in parameters:
        if isinstance(parameter.grad, ReleasedGradient):
            parameter.grad = None
