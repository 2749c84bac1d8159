"""The gradients of ZeRO-3's flat groups: each piece where it will be used, and their norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from dos.execute.backend import Reading
from dos.execute.work import Piece
from dos.integrations.zero3_engine import FlatGroupEngine
from dos.kernels.cast import Examined


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one parameter: elements [start, start + numel) of a flat group."""

    group: int
    start: int
    numel: int

    def overlap(self, piece: Piece) -> tuple[int, int]:
        """First and last element (exclusive) of the flat group that a piece of it shares."""
        return max(self.start, piece.start), min(self.start + self.numel, piece.stop)


class FlatGradients:
    """Takes in each shard's gradient when it is reduced, in the last backward of a step.

    What the host updates is read where upstream accumulates, in that dtype; what the device
    updates is kept there, too. Upstream's fp32 buffers are filled when somebody reads or writes
    gradients through its interfaces (`bring_home`), and what is written there counts. After a
    step they are filled with what that step has used: unscaled and clipped.

    Args:
        engine: of the flat groups.
        shards: by upstream's parameter id, in the order of the flat groups.
        homes: per flat group upstream's fp32 gradient buffer, 1-D, in host memory.
        accumulated: gives the buffer of all flat groups, one behind the other, in which upstream
            accumulates, 1-D, in host memory.
        hooked: `arrive` is called; else upstream fills its fp32 buffers with all gradients by
            itself, and what the device updates is sent there in the step.
    """

    def __init__(
        self,
        engine: FlatGroupEngine,
        shards: dict[int, Shard],
        homes: Sequence[torch.Tensor],
        accumulated: Callable[[], torch.Tensor],
        *,
        hooked: bool,
    ) -> None:
        self._engine, self._shards, self._homes = engine, shards, homes
        self._accumulated, self._hooked = accumulated, hooked
        self._offsets = list(accumulate((home.numel() for home in homes), initial=0))
        self._readings: dict[int, Reading] = {}
        self._changed: set[int] = set()
        self._at_home: set[Piece] = set()
        # By what a step that is over has multiplied its gradients; None once a new one comes.
        self._used_scale: float | None = 1.0
        self._scaled: set[Piece] = set()
        self._on_device: dict[Piece, torch.Tensor] = {}
        self._pieces: list[dict[Piece, bool]] = []
        self.place()

    def place(self) -> None:
        """Have memory for what the plan updates on the device; between steps."""
        self._pieces = self._engine.pieces()
        if not self._hooked:
            self._at_home = {piece for pieces in self._pieces for piece in pieces}
            return
        held, dtype = self._on_device, self._accumulated().dtype
        self._on_device = {
            piece: held[piece]
            if piece in held
            else self._engine.device_memory(piece.numel, dtype).zero_()
            for pieces in self._pieces
            for piece, on_device in pieces.items()
            if on_device
        }

    def arrive(self, parameter: int, grad: torch.Tensor) -> None:
        """Take in the reduced gradient of a shard, which may end before its padding.

        Args:
            parameter: upstream's id.
            grad: 1-D, as accumulated, on the device.
        """
        self._begin()
        grad = grad.detach().view(-1)
        self._changed.discard(parameter)
        self._readings[parameter] = self._engine.look(grad)
        # Upstream keeps the rest zero.
        shard = replace(self._shards[parameter], numel=grad.numel())
        for piece, first, last in self._overlaps(shard):
            part = grad[first - shard.start : last - shard.start]
            if piece in self._at_home:
                self._homes[shard.group][first:last].copy_(part, non_blocking=True)
            elif piece in self._on_device:
                target = self._on_device[piece][first - piece.start : last - piece.start]
                target.copy_(part, non_blocking=True)

    def bring_home(self, parameter: int) -> None:
        """Have all of a shard's gradient in upstream's fp32 buffer, where it may be changed.

        Before the first gradient of a step has come that is the one of the step before.
        """
        shard = self._shards[parameter]
        begun = self._used_scale is None
        if begun and parameter not in self._readings and parameter not in self._changed:
            self._clear(shard)
        for piece, *_ in self._overlaps(shard):
            home = self._homes[piece.parameter][piece.start : piece.stop]
            if piece not in self._at_home:
                home.copy_(self._summed(piece))
                self._at_home.add(piece)
            if self._used_scale is not None and piece not in self._scaled:
                home.mul_(self._used_scale)
                self._scaled.add(piece)
        if begun:
            self._changed.add(parameter)

    def filled(self, parameters: Collection[int]) -> None:
        """Upstream itself has put the gradients of these shards into its fp32 buffers."""
        if parameters:
            self._begin()
        self._changed.update(parameters)

    def examined(self) -> list[tuple[int, Examined]]:
        """What each shard's gradient is known by, with its parameter, in the shards' order.

        A shard that got no gradient has zeros from here on: upstream's buffer still has what
        an earlier step left there.
        """
        present: list[int] = []
        readings: list[Reading] = []
        for parameter, shard in self._shards.items():
            if parameter in self._changed:
                home = self._homes[shard.group]
                reading = self._engine.look(home[shard.start : shard.start + shard.numel])
            elif parameter in self._readings:
                reading = self._readings[parameter]
            else:
                self._clear(shard)
                continue
            present.append(parameter)
            readings.append(reading)
        return list(zip(present, self._engine.read(readings), strict=True))

    def for_step(self) -> dict[Piece, torch.Tensor]:
        """The gradients that the step does not read in upstream's fp32 buffers."""
        found = {}
        for pieces in self._pieces:
            for piece, on_device in pieces.items():
                if piece not in self._at_home:
                    found[piece] = self._on_device[piece] if on_device else self._summed(piece)
                elif on_device:
                    found[piece] = self._engine.device_memory(piece.numel, torch.float32)
                    home = self._homes[piece.parameter][piece.start : piece.stop]
                    found[piece].copy_(home, non_blocking=True)
        return found

    def forget(self, used_scale: float) -> None:
        """The step is over, or left out: gradients of the next one are to come.

        `used_scale`: what the step has multiplied them by, 1 if it was left out.
        """
        self._readings, self._changed = {}, set()
        self._used_scale = used_scale

    def _begin(self) -> None:
        """The first gradient of a step is there: nobody asks for those of the last one."""
        if self._used_scale is not None:
            self._used_scale, self._scaled = None, set()
            if self._hooked:
                self._at_home = set()

    def _overlaps(self, shard: Shard) -> Iterator[tuple[Piece, int, int]]:
        for piece in self._pieces[shard.group]:
            first, last = shard.overlap(piece)
            if first < last:
                yield piece, first, last

    def _summed(self, piece: Piece) -> torch.Tensor:
        """Where upstream accumulates the gradient of a piece."""
        first = self._offsets[piece.parameter] + piece.start
        return self._accumulated()[first : first + piece.numel]

    def _clear(self, shard: Shard) -> None:
        self._homes[shard.group][shard.start : shard.start + shard.numel].zero_()
        for piece, first, last in self._overlaps(shard):
            its = slice(first - piece.start, last - piece.start)
            self._summed(piece)[its].zero_()
            if piece in self._on_device:
                self._on_device[piece][its].zero_()
