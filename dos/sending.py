"""Gradients sent to the host during backward, and whether they are still what was sent."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from dos.execute.backend import Device, Event, Reading
from dos.execute.record import Backward, Transfer
from dos.execute.work import DTYPES, Piece, Staging, SubgroupMemory, send
from dos.hooks import watch
from dos.kernels import cast
from dos.kernels.cast import Examined
from dos.memory.flat import flat_like
from dos.plan import Lane, Op, OpKind, Placement
from dos.released import ReleasedGradient
from dos.sent import Sent, settle
from dos.shards import identity, local_of, same_placement

CLEAN_STEPS = 2
"""Steps without a change that it takes, after one with, until gradients are sent early again."""

TRANSFERS_KEPT = 10_000
"""Transfers remembered for the report of a step that is long in coming, backward after backward."""


class GradientSender:
    """Hooks that send each gradient to its host subgroups as soon as backward has made it.

    Backward is never held up: a hook looks at the gradient on the stream that made it (its
    fingerprint), and enqueues copies on the d2h lane. What was sent proves nothing by itself:
    `settle` compares every gradient's content with what it was in its hook.

    How many backwards a step takes is learned, per parameter, from the step before; earlier
    ones are not sent, and the first step sends nothing. After a step in which a gradient was
    changed behind the hooks, they only look until `CLEAN_STEPS` steps were clean.

    Under DistributedDataParallel backward makes gradients that are yet to be reduced. Of the
    parameters that `await_reduction` was told, `reduced` counts and sends; of others it is a
    change behind the hooks.

    Args:
        device: the backend, on which the parameters lie.
        release: put a stand-in into `p.grad` once it is sent.
    """

    def __init__(self, device: Device, *, release: bool) -> None:
        self._device, self._release = device, release
        self._pid = os.getpid()
        # Autograd runs the hooks of one device on one thread, but anybody may call zero_grad.
        self._lock = threading.Lock()
        self._sent: dict[int, Sent] = {}
        self._copying: deque[tuple[int, Sent]] = deque()  # in the lane's order
        self._transfers: list[Transfer] = []  # since the last step
        self._marks: list[Event] = []  # the first and the last of them
        self._parameters: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}  # by the parameter's id
        self._reduced: set[int] = set()  # ids of parameters, of which `reduced` is told
        self._staging = Staging()
        self._counts: list[int] = []
        self._expected: list[int] = []
        self._quiet_steps = 0
        self._warned = False
        self._homes: dict[int, list[tuple[int, SubgroupMemory, Piece]]] = {}
        self._on_device: set[int] = set()  # parameters with a piece that is updated there
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def extend(
        self,
        parameters: Sequence[torch.Tensor],
        subgroups: Sequence[SubgroupMemory],
        placement: Sequence[Placement],
        staging: Staging,
    ) -> None:
        """Take in further parameters, between steps, and hook them.

        Args:
            parameters: the new ones.
            subgroups: all subgroups, the new ones last: where their gradient leases lie.
            placement: of each of them.
            staging: with the device buffer that gradients are widened in.
        """
        first = len(self._parameters)
        self._parameters += parameters
        self._index_of.update({id(p): first + i for i, p in enumerate(parameters)})
        self._counts += [0] * len(parameters)
        self._expected += [0] * len(parameters)
        self._aim(subgroups, placement, staging)
        leased = {p.parameter for home in subgroups if home.grad is not None for p in home.pieces}
        for index in range(first, len(self._parameters)):
            if index in leased:
                self._handles += watch(self, self._parameters[index], index)

    def redirect(
        self,
        subgroups: Sequence[SubgroupMemory],
        placement: Sequence[Placement],
        staging: Staging,
    ) -> None:
        """Send to the subgroups that the host updates from now on; arguments as for `extend`.

        Right after a step: what has been sent since would be lost.
        """
        assert not self._sent, "gradients of the next step have been sent already"
        self._aim(subgroups, placement, staging)

    def close(self) -> None:
        """Remove the hooks, let copies end, and let go of all memory; idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        settle(self._transfers)
        self._copying.clear()
        self._sent, self._transfers, self._marks = {}, [], []
        self._homes, self._staging = {}, Staging()

    def behind(self, index: int) -> torch.Tensor | None:
        """What a step takes for the stand-in in `p.grad`; None if that is an old one.

        The 1-D gradient where the device needs it, else the stand-in: all of it has been sent.
        """
        sent = self._sent.get(index)
        if sent is None or sent.stand_in is not self._parameters[index].grad:
            return None
        return sent.stand_in if sent.grad is None else sent.grad

    def examine(self, grads: Sequence[torch.Tensor | None]) -> list[Examined | None]:
        """What each gradient, 1-D, is known by now; waits for the device once."""
        readings = [self._look(index, grad, self._sent) for index, grad in enumerate(grads)]
        read = iter(self._device.read([reading for reading in readings if reading is not None]))
        return [None if reading is None else next(read) for reading in readings]

    def settle(self, grads: Sequence[torch.Tensor | None]) -> tuple[frozenset[int], Backward]:
        """Before a step: which of `grads`, 1-D, have been sent as they are now; all that was sent.

        Forgets what was sent; the next backward begins another step.
        """
        entered_s = time.perf_counter()
        with self._lock:
            sent, self._sent = self._sent, {}
            self._drop_copied()
            counts, self._counts = self._counts, [0] * len(self._counts)
            transfers, self._transfers = self._transfers, []
            marks, self._marks = self._marks, []
        looked = [index for index in sent if grads[index] is not None]
        before = [sent[index].reading for index in looked]
        now = [self._look(i, grads[i], sent) for i in looked]
        read = self._device.read([*before, *now])
        same = {
            index
            for index, was, is_ in zip(looked, read, read[len(looked) :], strict=False)
            if was.fingerprint == is_.fingerprint
        }
        edited = [i for i in looked if i not in same and counts[i] == self._expected[i]]
        if edited:
            self._quiet_steps = CLEAN_STEPS
            self._warn(sent[edited[0]])
        elif looked:
            self._quiet_steps = max(0, self._quiet_steps - 1)
        for index, count in enumerate(counts):
            if grads[index] is not None:
                self._expected[index] = count
        arrived = {index for index in looked if index in same and sent[index].transfers}
        doubtful = {i: grads[i] for i in arrived if not self._untouched(i, sent[i])}
        if doubtful:
            settle(transfers)
            arrived -= self._torn(doubtful)
        check_s = time.perf_counter() - entered_s
        return frozenset(arrived), Backward(tuple(transfers), tuple(marks), check_s)

    def let_go(self) -> None:
        """After a step, in which the last copies have ended: hold no gradient for their sake."""
        with self._lock:
            self._drop_copied()

    def discard(self) -> None:
        """Before gradients are zeroed: forget what was sent.

        Whatever the caller's stream does next waits for the copies under way.
        """
        if os.getpid() != self._pid:
            return  # a forked child has none of the lanes
        with self._lock:
            self._device.join([t.event for sent in self._sent.values() for t in sent.transfers])
            self._sent = {}
            self._counts = [0] * len(self._counts)
            del self._transfers[:-TRANSFERS_KEPT]
            self._drop_copied()

    def made(self, index: int) -> None:
        """Backward has accumulated into a gradient: send it if it was the last time."""
        if os.getpid() != self._pid:
            return
        parameter = self._parameters[index]
        if id(parameter) not in self._reduced:
            self._count(index, parameter)

    def await_reduction(self, parameters: Iterable[torch.Tensor]) -> None:
        """Send these, as far as they are known or will be, when `reduced` says so."""
        self._reduced.update(map(id, parameters))

    def reduced(self, parameter: torch.Tensor, bucket: torch.Tensor) -> None:
        """What `p.grad` will hold has been reduced, and is in `bucket`, a view of its shape."""
        index = self._index_of.get(id(parameter))
        if index is not None and os.getpid() == self._pid:
            self._count(index, parameter, bucket)

    def about_to_accumulate(self, index: int) -> None:
        """Backward is about to add to a gradient: let it wait for the copy, if there is one."""
        sent = self._sent.get(index)  # one reading: another thread may discard it
        if sent is not None and os.getpid() == self._pid:
            self._device.join([transfer.event for transfer in sent.transfers])

    def _count(
        self, index: int, parameter: torch.Tensor, bucket: torch.Tensor | None = None
    ) -> None:
        with self._lock:
            self._counts[index] += 1
            if self._counts[index] == self._expected[index]:
                with torch.no_grad():  # in here: it costs more than the rest of this
                    self._send(index, parameter.grad if bucket is None else bucket, bucket)
            self._drop_copied()

    def _aim(
        self,
        subgroups: Sequence[SubgroupMemory],
        placement: Sequence[Placement],
        staging: Staging,
    ) -> None:
        settle(self._transfers)  # they may use the staging that is replaced
        self._staging = staging
        self._homes, self._on_device = {}, set()
        for number, (home, at) in enumerate(zip(subgroups, placement, strict=True)):
            for piece in home.pieces:
                if at is Placement.HOST:
                    self._homes.setdefault(piece.parameter, []).append((number, home, piece))
                else:
                    self._on_device.add(piece.parameter)

    def _send(self, index: int, grad: torch.Tensor | None, bucket: torch.Tensor | None) -> None:
        if index not in self._homes:
            return  # the device updates all of it
        parameter = self._parameters[index]
        if grad is None or grad.layout is not torch.strided or grad.dtype is not parameter.dtype:
            return  # step() says what is wrong with it
        if not same_placement(grad, parameter):
            return  # step() communicates
        flat = flat_like(local_of(grad), local_of(parameter))
        reading = self._device.examine(flat)
        if self._quiet_steps:
            self._sent[index] = Sent(None, reading, identity(grad))
            return
        made = self._device.mark()
        self._marks[1:] = [made]
        transfers = tuple(self._transfer(home, flat, made) for home in self._homes[index])
        self._transfers += transfers
        self._sent[index] = sent = Sent(flat, reading, identity(grad), bucket, transfers)
        self._copying.append((index, sent))
        if self._release and bucket is None:
            parameter.grad = sent.stand_in = ReleasedGradient(grad)

    def _transfer(
        self, home: tuple[int, SubgroupMemory, Piece], grad: torch.Tensor, made: Event
    ) -> Transfer:
        subgroup, memory, piece = home
        lane = self._device.streams[Lane.D2H]
        lane.wait(made)
        body = partial(send, memory, [(piece, grad[piece.start : piece.stop])], self._staging)
        op = Op(-1, OpKind.GRAD_TO_HOST, subgroup, None, (), ())
        event = lane.run(op, piece.grad_bytes, piece.numel, body)
        return Transfer(subgroup, piece.grad_bytes, event)

    def _look(
        self, index: int, grad: torch.Tensor | None, sent: Mapping[int, Sent]
    ) -> Reading | None:
        its = sent.get(index)
        if its and its.stand_in is not None and its.stand_in is self._parameters[index].grad:
            return its.reading  # nobody can have changed it
        return None if grad is None else self._device.examine(grad)

    def _untouched(self, index: int, sent: Sent) -> bool:
        """Whether nobody can have written to a gradient while it was copied."""
        now = self._parameters[index].grad if sent.bucket is None else sent.bucket
        assert now is not None
        return sent.stand_in is now or sent.identity == identity(now)

    def _torn(self, doubtful: Mapping[int, torch.Tensor | None]) -> set[int]:
        """Whose leases do not hold their gradient, by content; all copies are over.

        For gradients that were written to since and are what they were: a copy may have read
        what they were in between.
        """
        parts = [
            (index, grad[piece.start : piece.stop], piece, home)
            for index, grad in doubtful.items()
            for _, home, piece in self._homes[index]
            if grad is not None
        ]
        torn = set()
        wanted = self._device.read([self._device.examine(part) for _, part, _, _ in parts])
        for (index, part, piece, home), its in zip(parts, wanted, strict=True):
            assert home.grad is not None
            words = piece.grad_in(home.grad).to(part.dtype)  # exact: it was widened from it
            found = cast.examine(words.data_ptr(), words.numel(), DTYPES[words.dtype])
            if found.fingerprint != its.fingerprint:
                torn.add(index)
        return torn

    def _drop_copied(self) -> None:
        """Let go of gradients that have been copied: the lock is held."""
        while self._copying and self._copying[0][1].over():
            index, sent = self._copying.popleft()
            if index not in self._on_device:
                sent.grad = None

    def _warn(self, sent: Sent) -> None:
        if sent.transfers and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients were changed after they had been sent to the host, and were sent "
                "again: the step is right, but slower. Clip with optimizer.clip_grad_norm_, "
                "let GradScaler.step unscale (without unscale_), change gradients in a "
                "tensor hook instead of after backward; under DistributedDataParallel call "
                "dos.register_ddp(model, optimizer)",
                stacklevel=2,
            )
