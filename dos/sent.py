"""One gradient as its hook found it, and the copies of it that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from dos.execute.backend import Reading
from dos.execute.record import Transfer
from dos.released import ReleasedGradient


@dataclass(slots=True)
class Sent:
    """One gradient as it was in its hook.

    `transfers` is empty where it was only looked at. `grad`, 1-D, is kept until they are over,
    and longer where the device needs it too; `identity` tells whether it was written to since, or,
    where DDP reduced it there, `bucket`. `stand_in` is what `p.grad` was replaced by.
    """

    grad: torch.Tensor | None
    reading: Reading
    identity: tuple[int, int, int]
    bucket: torch.Tensor | None = None
    transfers: tuple[Transfer, ...] = ()
    stand_in: ReleasedGradient | None = None

    def over(self) -> bool:
        """Whether all copies are."""
        return all(transfer.event.done() for transfer in self.transfers)


def settle(transfers: Sequence[Transfer]) -> None:
    """Wait for all of them."""
    for transfer in transfers:
        with suppress(Exception):  # whoever needs what was sent is told by its own wait
            transfer.event.wait()
