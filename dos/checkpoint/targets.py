"""What is read into: does it fit, and which memory takes which elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dos.checkpoint.dtypes import as_bits
from dos.checkpoint.paths import text_of
from dos.checkpoint.specs import Spec
from dos.errors import ConfigError, RefusedError
from dos.memory.pieces import Pieces
from dos.shards import count_write, cuts_of, is_sharded, local_of, runs_of


def is_partial(target: Any) -> bool:
    """Does it have some elements of a tensor only?"""
    return isinstance(target, Pieces) or is_sharded(target)


class Places:
    """Elements of a larger tensor, of a DTensor or of `Pieces`, that are to be overwritten.

    Attributes:
        parts: by the first element of each run in the whole, contiguous host memory for it.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.parts: list[tuple[int, torch.Tensor]] = []
        if isinstance(target, Pieces):
            self.parts = [(start, self._flat(part)) for start, part in target.parts.items()]
        else:
            flat = self._flat(local_of(target).detach())
            self.parts = [
                (start, flat[here : here + length]) for start, here, length in runs_of(target)
            ]

    def finish(self) -> None:
        """All has been read: bring it to where it could not be read."""
        for tensor, read in self._copies:
            copy_bits(tensor, read.view(tensor.shape))
        if is_sharded(self._target):
            count_write(self._target)
            return
        for part in self._target.parts.values():
            torch.autograd.graph.increment_version(part)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for its elements in row-major order; its own where it can be that."""
        if takes_bytes(tensor):
            return tensor.view(-1)
        read = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        self._copies.append((tensor, read))
        return read


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Can a file's bytes be read to where it lies?"""
    plain = tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.is_contiguous()


def direct_address(spec: Spec, target: Any) -> int | None:
    """Address of a target that can take the file's bytes as they are."""
    if target is None or spec.strides_bytes is not None or spec.order is not None:
        return None
    if isinstance(target, np.ndarray):
        return target.ctypes.data if target.flags.c_contiguous else None
    return target.data_ptr() if takes_bytes(target) else None


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bit for bit, and have autograd know of it."""
    with torch.no_grad():
        if target.is_conj() or target.is_neg():
            target.copy_(source)
        else:
            as_bits(target.detach()).copy_(as_bits(source))
            torch.autograd.graph.increment_version(target)


def check_fits(path: str, spec: Spec, target: Any) -> None:
    """RefusedError for a target that cannot take what the file has."""
    kind: Any = np.ndarray if spec.is_array else (torch.Tensor, Pieces)
    if not isinstance(target, kind) or (target.dtype, tuple(target.shape)) != (
        spec.dtype,
        spec.shape,
    ):
        raise RefusedError(
            f"{spec.dtype} of shape {list(spec.shape)} does not fit what it is to be read into, "
            f"{getattr(target, 'dtype', type(target).__name__)} of shape "
            f"{list(getattr(target, 'shape', ()))}",
            where=text_of(path),
            fix="give a tensor of the same dtype and shape, or leave it out of `into`",
        )
    if is_sharded(target):
        try:
            cuts_of(target)
        except ConfigError as error:
            raise RefusedError(error.what, where=text_of(path), fix="load it whole") from None
        target = local_of(target)
    tensors = target.parts.values() if isinstance(target, Pieces) else [target]
    if not all(_has_room(tensor) for tensor in tensors):
        raise RefusedError(
            "it cannot be read into what is read-only, sparse, expanded or without memory",
            where=text_of(path),
            fix="give a dense tensor with memory of its own, or leave it out of `into`",
        )
    if isinstance(target, Pieces):
        _check_pieces(path, target)


def _has_room(target: Any) -> bool:
    if isinstance(target, np.ndarray):
        return target.flags.writeable
    takes = target.layout == torch.strided and not target.is_meta
    return takes and all(
        n < 2 or step for n, step in zip(target.shape, target.stride(), strict=True)
    )


def _check_pieces(path: str, target: Pieces) -> None:
    for start, part in target.parts.items():
        end = start + part.numel()
        if part.dim() != 1 or part.dtype != target.dtype or start < 0 or end > target.numel:
            raise RefusedError(
                f"a piece of {part.dtype} for elements {start} to {end} does not fit",
                where=text_of(path),
                fix="give pieces within the whole, of its dtype, with one dimension",
            )
