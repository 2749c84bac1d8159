"""What the ranks of a run tell each other about checkpoints, without a collective.

Of a save: each rank reports its durable files, rank 0 gathers the reports, and what comes first
under the key `verdict` is the end of it: rank 0's commit, or the error of any rank, which so
fails on all of them at once.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dos.checkpoint.commit import make_parents
from dos.checkpoint.lines import Line, LocalLine, StoreLine, poll
from dos.checkpoint.manifest import FileRecord, parse_record, record_fields
from dos.checkpoint.storage import Storage
from dos.errors import CheckpointError, ConfigError

COMMIT_TIMEOUT_S = 600.0
_SEEN_TIMEOUT_S = 60.0
"""Network file systems keep what they know of a directory for up to about so long."""
_GRACE_S = 30.0
_COMMITTED = "committed"
_TEXT_CHARS = 2000

_log = logging.getLogger(__name__)


class Ranks:
    """The processes that save together, as one of them sees them.

    Any thread may call anything; one at a time may be within `gather`, `await_commit` or
    `await_begin`.

    Args:
        line: what they share.
        rank: of this process.
        world: how many there are.
        nonce: the same on all of them, and of no other run or incarnation of this one.
        commit_timeout_s: how long a rank waits for the others before a save fails.

    Attributes:
        rank, world, nonce, commit_timeout_s: as given.
    """

    def __init__(
        self,
        line: Line,
        rank: int,
        world: int,
        nonce: str,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> None:
        self.rank, self.world, self.nonce = rank, world, nonce
        self.commit_timeout_s = commit_timeout_s
        self._line, self._lock = line, threading.Lock()
        self._saves = self._exchanges = 0
        self._open: set[str] = set()  # saves that this rank has begun and not seen the end of

    @classmethod
    def alone(cls) -> Ranks:
        """A process that saves by itself."""
        return cls(LocalLine(), 0, 1, uuid.uuid4().hex)

    @classmethod
    def of(cls, group: Any = None, *, commit_timeout_s: float = COMMIT_TIMEOUT_S) -> Ranks:
        """The ranks of a process group; all of them call this together.

        Args:
            group: None: the default group, or this process alone where there is none.
            commit_timeout_s: how long a rank waits for the others before a save fails.

        Raises:
            ConfigError: this process is not in the group.
        """
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return cls.alone()
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ConfigError(
                "this process is not in the process group",
                where="group",
                fix="make checkpoints in the processes of the group only",
            )
        nonce = [uuid.uuid4().hex]
        first = 0 if group is None else distributed.get_global_rank(group, 0)
        distributed.broadcast_object_list(nonce, src=first, group=group)
        store = distributed.distributed_c10d._get_default_store()
        line = StoreLine(store, commit_timeout_s)
        return cls(line, rank, distributed.get_world_size(group), nonce[0], commit_timeout_s)

    def enter(self, checkpoint_id: str | None = None) -> str:
        """Take part in a save, which ends with `announce`, `await_commit` or `fail`.

        Returns:
            Its id: the same on all ranks that have saved as often, if none is given.
        """
        with self._lock:
            self._saves += 1
            checkpoint_id = checkpoint_id or f"{self.nonce}-{self._saves}"
            self._open.add(checkpoint_id)
        return checkpoint_id

    def begin(self, checkpoint_id: str, name: str, outline: Mapping[str, str]) -> None:
        """Rank 0: the directory in which the checkpoint of this name is built is there."""
        said = json.dumps([name, dict(outline)])
        self._line.set_first(self._key(checkpoint_id, "begun"), said)

    def await_begin(self, checkpoint_id: str, name: str, outline: Mapping[str, str]) -> None:
        """Wait until rank 0 has begun.

        Raises:
            CheckpointError: it began none of this name and outline, or another rank failed; as of
                `gather`.
        """
        self._wait(checkpoint_id, "begun", "begun")
        begun, first = json.loads(self._line.get(self._key(checkpoint_id, "begun")))
        if begun != name:
            raise CheckpointError(
                f"rank 0 is saving {begun!r}, rank {self.rank} {name!r}",
                where=name,
                fix="save on all ranks at the same steps",
            )
        for part in sorted(first.keys() | outline.keys()):
            its, mine = first.get(part, "nothing"), outline.get(part, "nothing")
            if its != mine:
                raise CheckpointError(
                    f"the ranks differ in {part!r}: {its} on rank 0, {mine} on rank {self.rank}",
                    where=name,
                    fix="have tensors of the same names, dtypes and shapes there on all ranks; "
                    "what is a rank's own belongs in `extra`",
                )

    def report(self, checkpoint_id: str, records: Sequence[FileRecord]) -> None:
        """This rank's files, of which there may be none, are durable."""
        fields = [record_fields(record) for record in records]
        self._line.set(self._key(checkpoint_id, self.rank), json.dumps(fields))
        if self._line.add(self._key(checkpoint_id, "count"), 1) == self.world:
            self._line.set(self._key(checkpoint_id, "all"), "")

    def gather(self, checkpoint_id: str) -> list[FileRecord]:
        """Rank 0: the files of all ranks, in the manifest's order, once all are durable.

        Raises:
            CheckpointError: a rank failed, or has not reported in time: it is named; or the
                store is gone.
        """
        self._wait(checkpoint_id, "all")
        texts = [self._line.get(self._key(checkpoint_id, rank)) for rank in range(self.world)]
        return [parse_record(checkpoint_id, said) for text in texts for said in json.loads(text)]

    def failure(self, checkpoint_id: str) -> CheckpointError | None:
        """That of the rank that failed it first; None: it has not failed so far.

        Raises:
            CheckpointError: the store is gone.
        """
        verdict = self._key(checkpoint_id, "verdict")
        return _failure(self._line.get(verdict)) if self._line.has(verdict) else None

    def announce(self, checkpoint_id: str) -> None:
        """Rank 0: it is committed.

        Raises:
            CheckpointError: another rank failed just before; the checkpoint is there, though.
        """
        verdict = self._line.set_first(self._key(checkpoint_id, "verdict"), _COMMITTED)
        self._leave(checkpoint_id)
        if (failure := _failure(verdict)) is not None:
            raise failure

    def await_commit(self, checkpoint_id: str) -> None:
        """Wait until rank 0 has committed. CheckpointError: as of `gather`."""
        self._wait(checkpoint_id, "verdict", "committed")
        self._leave(checkpoint_id)

    def fail(self, checkpoint_id: str, error: BaseException | str) -> None:
        """This rank cannot save it: the others' calls fail at once. Nothing is raised."""
        if checkpoint_id not in self._open:
            return
        try:
            self._spread(checkpoint_id, error)
            self._leave(checkpoint_id)
        except CheckpointError as gone:
            _log.debug("the other ranks are not told: %s", gone)

    def abandon(self, why: str) -> None:
        """Fail all saves that this rank takes part in: what waits for them, on any rank, raises."""
        with self._lock:
            waiting = sorted(self._open)
        with suppress(CheckpointError):  # where the store is gone nothing waits
            for checkpoint_id in waiting:
                self._spread(checkpoint_id, why)

    def tell(self, topic: str, value: Any) -> None:
        """Tell all ranks a value, anything that JSON can hold. Each topic is used once."""
        self._line.set(self._key(f"topic/{topic}", self.rank), json.dumps(value))

    def told(self, topic: str, timeout_s: float) -> list[Any]:
        """The values that all ranks tell, in their order; each rank asks once.

        Raises:
            CheckpointError: a rank has told none in time: it is named; or the store is gone.
        """
        keys = [self._key(f"topic/{topic}", rank) for rank in range(self.world)]
        # Not the connection for waits: a save may be waiting on it in the background.
        if not poll(lambda: self._line.has(*keys), timeout_s):
            raise self._missing([not self._line.has(key) for key in keys], topic, timeout_s)
        values = [json.loads(self._line.get(key)) for key in keys]
        seen = self._key(f"topic/{topic}", "seen")
        if self._line.add(seen, 1) == self.world:
            self._line.delete(*keys, seen)
        return values

    def call(self, topic: str) -> None:
        """Let all ranks know of a topic, of which nobody may ever tell; any may call, and often."""
        self._line.set(self._key(f"topic/{topic}", "called"), "")

    def is_called(self, topic: str) -> bool:
        """Did any rank call?"""
        return self._line.has(self._key(f"topic/{topic}", "called"))

    def exchange(self, what: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """`tell` and `told` in one; all ranks call it equally often, in the same order."""
        with self._lock:
            self._exchanges += 1
            topic = f"{what}/{self._exchanges}"
        self.tell(topic, value)
        return self.told(topic, self.commit_timeout_s if timeout_s is None else timeout_s)

    def prove_shared(
        self, storage: Storage, directory: str, timeout_s: float = _SEEN_TIMEOUT_S
    ) -> None:
        """Make a directory, and see that it is the same one for all ranks, who call this together.

        Raises:
            CheckpointError: it is not; the ranks that do not see it are named, on all of them.
        """
        path = os.path.join(directory, f".shared.{self.nonce}")
        try:
            failed = self._write_proof(storage, path) if self.rank == 0 else ""
            failed = self.exchange("made", failed, timeout_s)[0]
            seen = not failed and poll(lambda: self._sees_proof(storage, path), timeout_s)
            blind = self.exchange("seen", not seen, 2 * timeout_s)
        finally:
            if self.rank == 0:
                with suppress(OSError):
                    storage.unlink(path)
        if failed:
            raise CheckpointError(failed, where=directory, fix="save where rank 0 may write")
        if any(blind):
            ranks = ", ".join(str(rank) for rank, is_blind in enumerate(blind) if is_blind)
            raise CheckpointError(
                f"rank 0 made a file there that rank {ranks} cannot see",
                where=directory,
                fix="save to a file system that all ranks share, by the same absolute path",
            )

    def close(self, timeout_s: float) -> None:
        """This rank asks nothing more. Rank 0, with which the store may end, waits for the others.

        Args:
            timeout_s: for how long at most.
        """
        with suppress(CheckpointError):
            self.tell("close", None)
            if self.rank == 0:
                keys = [self._key("topic/close", rank) for rank in range(self.world)]
                poll(lambda: self._line.has(*keys), timeout_s)
                self._line.delete(*keys)

    def _write_proof(self, storage: Storage, path: str) -> str:
        """Why it cannot be written; "" if it was."""
        try:
            make_parents(storage, os.path.dirname(path))
            storage.write_bytes(path, self.nonce.encode())
            return ""
        except OSError as error:
            return f"rank 0 cannot write there: {error.strerror or error}"

    def _sees_proof(self, storage: Storage, path: str) -> bool:
        try:
            return storage.read_bytes(path) == self.nonce.encode()
        except OSError:
            return False

    def _key(self, checkpoint_id: str, last: object) -> str:
        return f"dos/{self.nonce}/{checkpoint_id}/{last}"

    def _spread(self, checkpoint_id: str, error: BaseException | str) -> None:
        """Wake all that wait, to find why it failed."""
        why = f"rank {self.rank}: {error}"[:_TEXT_CHARS]
        self._line.set_first(self._key(checkpoint_id, "verdict"), why)
        self._line.set_first(self._key(checkpoint_id, "begun"), json.dumps(""))
        self._line.set(self._key(checkpoint_id, "all"), "")

    def _leave(self, checkpoint_id: str) -> None:
        """Nothing more is asked here; the last rank to say so removes the keys."""
        with self._lock:
            self._open.discard(checkpoint_id)
        if self._line.add(self._key(checkpoint_id, "seen"), 1) == self.world:
            names = [*range(self.world), "begun", "count", "all", "verdict", "seen"]
            self._line.delete(*(self._key(checkpoint_id, name) for name in names))

    def _wait(self, checkpoint_id: str, what: str, of_rank_0: str = "") -> None:
        """Until a key is there; raises the error of the rank that failed meanwhile."""
        # Rank 0 knows who is missing: it is to speak first.
        grace_s = min(_GRACE_S, self.commit_timeout_s / 2)
        timeout_s = self.commit_timeout_s + (grace_s if of_rank_0 else 0)
        in_time = self._line.wait(self._key(checkpoint_id, what), timeout_s)
        if (failure := self.failure(checkpoint_id)) is not None:
            raise failure
        if in_time:
            return
        if of_rank_0:
            raise CheckpointError(
                f"rank 0 has not {of_rank_0} it within {timeout_s:g} s",
                where=checkpoint_id,
                fix="see whether rank 0 lives; raise `commit_timeout_s` if it was only slow",
            )
        ranks = [self._key(checkpoint_id, rank) for rank in range(self.world)]
        missing = [not self._line.has(key) for key in ranks]
        raise self._missing(missing, checkpoint_id, timeout_s)

    def _missing(self, missing: Sequence[bool], where: str, timeout_s: float) -> CheckpointError:
        ranks = ", ".join(str(rank) for rank, is_missing in enumerate(missing) if is_missing)
        return CheckpointError(
            f"rank {ranks} said nothing for {timeout_s:g} s",
            where=where,
            fix="see whether it lives; raise `commit_timeout_s` if it was only slow",
        )


def _failure(verdict: str) -> CheckpointError | None:
    if verdict == _COMMITTED:
        return None
    return CheckpointError(f"a rank could not save its part; {verdict}")
