"""The part of a step that runs on after `step()` has returned, and who waits for it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from dos.errors import ConfigError, PoolError
from dos.execute.interpreter import RunningStep
from dos.execute.record import StepRecord
from dos.execute.work import SubgroupMemory
from dos.plan import Subgroup, UpdatePlan
from dos.readers import Readers
from dos.shards import count_write

Ended = weakref.WeakMethod[Callable[[StepRecord, Iterable[int]], None]]
"""A method to be called at the end of a step, if its object is still there."""

Order: TypeAlias = tuple[int, ...] | None


class Tail:
    """One step under way at most: waited for in part, by parameter, or to its end.

    With `overlap` the step runs on when `step()` returns, and every reader that can be known waits
    for what it reads; without, `step()` waits for its end.

    A parameter that is updated bumps its version when the step begins, so that a graph made
    before cannot be used after it, as with any torch optimizer; and again when its new weight is
    waited for, so that one which was read too early, without waiting, cannot either.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._pid = os.getpid()
        # Readers wait on any thread, backward's too.
        self._lock = threading.RLock()
        self._running: RunningStep | None = None
        self._writers: dict[int, list[int]] = {}
        self._updated: tuple[int, ...] = ()
        self._unread: set[int] = set()
        self._ended: Ended | None = None
        self._parameters: list[torch.Tensor] = []
        self._used: list[int] = []
        self._readers = Readers(self.wait, self.synchronize) if overlap else None

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError for parameters whose readers cannot be known, if steps overlap."""
        for parameter in parameters if self._readers is not None else ():
            if type(parameter) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise ConfigError(
                    f"a parameter is a {type(parameter).__name__}, which may be read before its "
                    "module is called: gathered ahead from all ranks, for one",
                    where="overlap_forward",
                    fix="set overlap_forward=False, or use plain parameters",
                )

    def extend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take in further parameters."""
        self._parameters += parameters
        if self._readers is not None:
            self._readers.extend(parameters)

    def close(self) -> None:
        """Remove all hooks; idempotent."""
        if self._readers is not None:
            self._readers.close()

    def order(self, subgroups: Sequence[Subgroup]) -> Order:
        """All subgroups in the order in which the next forward needs them; None for any order.

        As the last forward did: first what is read in a way that nobody can wait in.
        """
        if self._readers is None:
            return None
        self._used = self._readers.next_step()
        turn = {index: n for n, index in enumerate(self._used)}
        first = [min(turn.get(s.parameter, -1) for s in group.segments) for group in subgroups]
        return tuple(sorted(range(len(subgroups)), key=lambda index: first[index]))

    def follow(self, running: RunningStep, writers: Mapping[int, list[int]], ended: Ended) -> None:
        """Wait for what has to be over when `step()` returns: everything, if nothing overlaps.

        Args:
            running: the step.
            writers: by parameter that is updated, the ops that write its weight.
            ended: called once, if it is still there, by whoever finds the step over; with its
                record and the indices of the parameters that were updated.
        """
        assert self._running is None, "two steps at once"
        self._ended, self._updated = ended, tuple(writers)
        self._unread, self._writers = set(writers), dict(writers)
        self._running = running
        if self._readers is None:
            self.synchronize()
            return
        for index in writers:
            count_write(self._parameters[index])
        self.wait(set(writers).difference(self._used))

    def wait(self, parameters: Iterable[int]) -> None:
        """Let what the caller does next read these parameters, by index.

        Raises:
            PoolError: called in a forked child while a step runs.
            Exception: what failed in the step.
        """
        if self._running is None:
            return
        wanted = [index for index in parameters if index in self._writers]
        if not wanted:
            return
        self._check_process()
        with self._lock:
            if self._running is None:
                return
            ops = sorted({op for index in wanted for op in self._writers.get(index, ())})
            try:
                over = self._running.join(ops)
            except Exception:
                self.synchronize()  # raises what failed first, once nothing runs any more
                raise
            for index in wanted:
                self._read(index)
                if over:  # else another stream may still have to wait
                    self._writers.pop(index, None)

    def synchronize(self) -> None:
        """Wait for the end of the step, if one is under way.

        Raises:
            PoolError: called in a forked child while a step runs.
            Exception: what failed in the step, once.
        """
        if self._running is None:
            return
        self._check_process()
        with self._lock:
            running = self._running
            if running is None:
                return
            try:
                record = running.finish()
            except BaseException:
                if running.failed:
                    self._forget()
                raise
            for index in list(self._unread):
                self._read(index)
            ended, updated = self._ended, self._updated
            self._forget()
            call = None if ended is None else ended()
            if call is not None:
                call(record, updated)

    def unread(self) -> AbstractContextManager[None]:
        """Within it this thread takes state dicts whose values it does not read yet, unwaited."""
        return nullcontext() if self._readers is None else self._readers.unread()

    def counted(self, steps: Sequence[int]) -> tuple[list[int], RunningStep | None]:
        """Step counts as they are after the step that is under way, and that step, if any.

        Args:
            steps: by parameter, what its end counts up.
        """
        with self._lock:
            updated = frozenset(self._updated)
            return [n + (i in updated) for i, n in enumerate(steps)], self._running

    def _read(self, index: int) -> None:
        if index in self._unread:
            self._unread.discard(index)
            count_write(self._parameters[index])

    def _forget(self) -> None:
        self._running, self._ended = None, None
        self._writers, self._unread, self._updated = {}, set(), ()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PoolError(
                "the process was forked while a step was running on, so that this child has only "
                "a part of the new weights",
                where="overlap_forward",
                fix="call optimizer.synchronize() before processes are started",
            )


def writers_of(
    plan: UpdatePlan, subgroups: Sequence[SubgroupMemory], updated: Iterable[int]
) -> dict[int, list[int]]:
    """By parameter of `updated`, the ops of `plan` that write its weight."""
    writers: dict[int, list[int]] = {index: [] for index in updated}
    for op in plan.ops:
        if any(buffer.name == "weight" for buffer in op.writes):
            for index in {piece.parameter for piece in subgroups[op.subgroup].pieces}:
                if index in writers:
                    writers[index].append(op.index)
    return writers
