"""Who owns a processor, and where it stands: one row, compared and replaced by every commit.

    row        owner id, epoch, generation, pid, boot, pending, positions of its tailers, source position
    topology   kind and tailer ids, in the order of the row's positions
    sub        (log, processor): who reads a log of this store, so that retention finds what it must keep

The writer's lock is exclusion for one transaction, not ownership. A running processor holds a POSIX
lock on a byte of its own (its death is seen at once) and the epoch in its row, which every claim,
seek and takeover raises. A commit compares the whole row with what its step started from; that
comparison is the fence. The lock alone would not do: a process that is stopped keeps it, and one
that goes on does not know that it lost it.

While a graph runs it writes the time into a lease file every :data:`LEASE_BEAT_S`. The lease says
only whether another may take over although the lock is held; safety never rests on it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from cues import abroad, batch, clock, codec, faults, leases, locks, names
from cues.errors import AlreadyRunning, Fenced, InvalidArgument, TopologyChanged
from cues.leases import Lease
from cues.log import Log

if TYPE_CHECKING:
    from cues.store import Store

LEASE_S: Final = 10.0
"""How long after the last beat another may take over although the lock is held."""
LEASE_BEAT_S: Final = 2.0

_HEAD: Final = struct.Struct(">8sQQQ8sBB")
_POSITION: Final = struct.Struct(">8sQ8s")
NO_SEAL: Final = bytes(8)


class Position(NamedTuple):
    """Where a tailer stands: the queue it means, the next index, and what it saw last."""

    identity: bytes
    next: int
    """Index of the message that is taken next."""
    seal: bytes
    """Checksum of the batch that holds the message before that; zeros when there was none."""


class ProcessorRow(NamedTuple):
    """The durable state of a processor besides its keyed state."""

    owner: bytes
    epoch: int
    generation: int
    pid: int
    boot: bytes
    pending: bool
    """A snapshot was committed before its function ran: the range behind the positions must be kept."""
    positions: tuple[Position, ...]
    source: bytes = b""
    """msgpack of ``[position, count of bare messages]`` of a source; empty before its first step."""

    def pack(self) -> bytes:
        owner, epoch, generation, pid, boot, pending, positions, _ = self
        raw = _HEAD.pack(owner, epoch, generation, pid, boot, pending, len(positions))
        raw += b"".join([_POSITION.pack(*position) for position in self.positions]) + self.source
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> ProcessorRow:
        owner, epoch, generation, pid, boot, pending, count = _HEAD.unpack_from(raw)
        end = _HEAD.size + count * _POSITION.size
        positions = tuple(Position(*found) for found in _POSITION.iter_unpack(raw[_HEAD.size : end]))
        return ProcessorRow(owner, epoch, generation, pid, boot, bool(pending), positions, raw[end:-8])


def row_intact(raw: bytes) -> bool:
    return len(raw) >= _HEAD.size + 8 and batch.checksum(raw[:-8]) == raw[-8:]


@dataclass(frozen=True)
class Topology:
    """What a processor's row is about."""

    kind: str
    tailers: tuple[str, ...]
    """Tailer ids, sorted: the order in which they were declared must not matter."""
    queues: tuple[str, ...]
    """Queue ids, in the same order."""
    stores: tuple[bytes, ...]
    """Ids of the stores that the queues are in, in the same order; empty for the home store."""

    def pack(self) -> bytes:
        found: dict[str, Any] = {"kind": self.kind, "tailers": list(self.tailers), "queues": list(self.queues)}
        if any(self.stores):
            found["stores"] = list(self.stores)
        return codec.pack(found)

    @staticmethod
    def unpack(raw: bytes) -> Topology:
        found = codec.unpack(raw)
        queues = tuple(found["queues"])
        return Topology(found["kind"], tuple(found["tailers"]), queues, tuple(found.get("stores", [b""] * len(queues))))

    @property
    def places(self) -> dict[str, bytes]:
        """The store of each tailer's queue, by tailer id."""
        return dict(zip(self.tailers, self.stores))


def supervisor_lock(graph: str) -> int:
    """The lock that a graph's supervisor holds while it lives. (No processor is called so: no name holds a blank.)"""
    return locks.offset_of(f"{graph} supervisor")


def boot() -> bytes:
    """Eight bytes that stand for this boot."""
    return xxhash.xxh3_64_digest(clock.boot_id().encode())


def read_row(txn: Any, processor: str) -> ProcessorRow | None:
    raw = txn.get(names.processor_key(processor))
    return None if raw is None else ProcessorRow.unpack(raw)


def read_topology(txn: Any, processor: str) -> Topology | None:
    raw = txn.get(names.topology_key(processor))
    return None if raw is None else Topology.unpack(raw)


def readers_of(txn: Any, log_id: str) -> list[tuple[str, int, bool]]:
    """The processors that read a log: id, index that is taken next, and whether a step is under way from there."""
    prefix = names.subscription_key(log_id, "")
    found: list[tuple[str, int, bool]] = []
    cursor = txn.cursor()
    if cursor.set_range(prefix):
        for key, _ in cursor:
            if not key.startswith(prefix):
                break
            processor = key[len(prefix) :].decode()
            row = read_row(txn, processor)
            topology = read_topology(txn, processor)
            if row is None or topology is None:
                continue
            for queue, position in zip(topology.queues, row.positions):
                if queue == log_id:
                    found.append((processor, position.next, row.pending))
    return found


# --- claiming -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claimant:
    """A processor that is to be claimed, and the logs that it reads by tailer id."""

    processor: str
    kind: str
    logs: dict[str, Log]

    def topology(self, home: Store) -> Topology:
        """As it is written down in the home store."""
        tailers = tuple(sorted(self.logs))
        logs = [self.logs[tailer] for tailer in tailers]
        stores = tuple(b"" if log.store.id == home.id else log.store.id for log in logs)
        return Topology(self.kind, tailers, tuple(log.id for log in logs), stores)


class Ownership:
    """The processors that one start of a graph owns in one store."""

    def __init__(self, store: Store, claimants: Sequence[Claimant], take_over: bool = False) -> None:
        """Take the locks. Raises :class:`AlreadyRunning` with the owner's pid; then nothing was taken."""
        self.store = store
        self.owner = os.urandom(8)
        self.claimants = tuple(claimants)
        self._locked: list[int] = []
        self._missing: list[int] = []
        """Locks that whoever was taken over still holds."""
        self._followed: set[bytes] = set()
        """Owners that are dead: their locks were free."""
        self._lease: Lease | None = None
        self._guard = threading.Lock()
        try:
            for claimant in self.claimants:
                self._lock(claimant.processor, take_over)
            self._lease = Lease(store, self.owner)
        except BaseException:
            self.release()
            raise

    def _lock(self, processor: str, take_over: bool) -> None:
        offset = locks.offset_of(processor)
        if self.store.locks.try_lock(offset):
            self._locked.append(offset)
            return
        with self.store.view() as txn:
            row = read_row(txn, processor)
        here = self.store.locks.mine(offset)
        left = self._lease_left(row)
        if here:
            pid = os.getpid()
        elif row is not None and left > 0 and locks.process_state(row.pid) != "gone":
            pid = row.pid  # whoever has the lock: an owner that was taken over keeps it until it ends
        else:
            pid = self.store.locks.holder(offset) or (row.pid if row else 0)
        if here or not take_over:
            where = "in this process" if here else f"by process {pid} ({locks.process_state(pid)})"
            supervisor = self.store.locks.holder(supervisor_lock(processor.partition(".")[0]))
            if supervisor is not None:  # who would start a worker that is killed again
                where, pid = f"by process {pid}, a worker of process {supervisor}", supervisor
            raise AlreadyRunning(
                f"{processor} is already run {where}, on the store {self.store.path}.",
                "stop that one first" + ("." if here else f" (kill {pid}), or --take-over if it does not answer."),
                pid=pid,
            )
        if left > 0:
            raise AlreadyRunning(
                f"{processor} is run by process {pid} ({locks.process_state(pid)}), whose lease runs"
                f" for another {left:.0f} s.",
                f"again in {left:.0f} s: only a process that does not answer is taken over.",
                pid=pid,
            )
        self._missing.append(offset)

    def _lease_left(self, row: ProcessorRow | None) -> float:
        if row is None or row.boot != boot():
            return 0.0
        return leases.left_s(self.store, row.owner, LEASE_S)

    def beat(self) -> None:
        """Say that the process answers; and take the locks that a takeover could not."""
        with self._guard:
            if self._lease is None:
                return
            self._lease.beat()
            for offset in tuple(self._missing):
                if self.store.locks.try_lock(offset):
                    self._missing.remove(offset)
                    self._locked.append(offset)

    def claim(self, accept_topology: bool = False, above: int = 0) -> dict[str, ProcessorRow]:
        """Raise the epoch of every processor, in one transaction; from then on older owners are fenced.

        Epochs are higher than ``above`` as well: what other stores know of these processors' owners.

        Raises :class:`TopologyChanged` where the inputs are not those that have positions.
        """
        # Where the queues begin, read before: no transaction of one store is opened inside one of another.
        starts: dict[str, Position] = {}
        for claimant in self.claimants:
            for tailer, log in claimant.logs.items():
                with log.store.view() as txn:
                    row = log.row(txn)
                starts[tailer] = Position(row.identity, row.first, NO_SEAL)
        rows = self.store.commit(self._claim, accept_topology, starts, above)
        for owner in self._followed:
            leases.forget(self.store, owner)
        faults.point("claim.after")
        return rows

    def _claim(
        self, txn: Any, accept_topology: bool, starts: dict[str, Position], above: int
    ) -> dict[str, ProcessorRow]:
        rows: dict[str, ProcessorRow] = {}
        for claimant in self.claimants:
            topology = claimant.topology(self.store)
            rows[claimant.processor] = row = self._claimed(txn, claimant, topology, accept_topology, starts, above)
            txn.put(names.processor_key(claimant.processor), row.pack())
            txn.put(names.topology_key(claimant.processor), topology.pack())
            for queue, store in zip(topology.queues, topology.stores):
                if not store:
                    txn.put(names.subscription_key(queue, claimant.processor), b"")
        faults.point("claim.inside")
        return rows

    def _claimed(
        self,
        txn: Any,
        claimant: Claimant,
        topology: Topology,
        accept_topology: bool,
        starts: dict[str, Position],
        above: int,
    ) -> ProcessorRow:
        old = read_row(txn, claimant.processor)
        known: dict[str, Position] = {}
        if old is not None:
            if locks.offset_of(claimant.processor) in self._locked:
                self._followed.add(old.owner)
            before = read_topology(txn, claimant.processor)
            assert before is not None
            known = dict(zip(before.tailers, old.positions))
            if (before.kind, before.places) != (topology.kind, topology.places) and not accept_topology:
                raise _changed(claimant.processor, before, topology)
            for tailer, queue, store in zip(before.tailers, before.queues, before.stores):
                if topology.places.get(tailer) != store:
                    del known[tailer]
                    txn.delete(names.subscription_key(queue, claimant.processor))
        positions = [known.get(tailer, starts[tailer]) for tailer in topology.tailers]
        return ProcessorRow(
            self.owner,
            max(old.epoch if old else 0, above) + 1,
            old.generation if old else 0,
            os.getpid(),
            boot(),
            old.pending if old else False,
            tuple(positions),
            old.source if old else b"",
        )

    def release(self) -> None:
        """Give the locks back. The rows stay; who comes next raises their epochs."""
        with self._guard:
            for offset in self._locked:
                self.store.locks.unlock(offset)
            self._locked.clear()
            self._missing.clear()
            if self._lease is not None:
                self._lease.close()
                self._lease = None


def _changed(processor: str, before: Topology, now: Topology) -> TopologyChanged:
    added = sorted(set(now.tailers) - set(before.tailers))
    gone = sorted(set(before.tailers) - set(now.tailers))
    what = []
    if before.kind != now.kind:
        what.append(f"it was a {before.kind} and is a {now.kind}")
    if added:
        what.append(f"without a position: {', '.join(added)}")
    if gone:
        what.append(f"no longer read: {', '.join(gone)}")
    moved = [t for t in now.tailers if t in before.places and before.places[t] != now.places[t]]
    if moved:
        what.append(f"on a queue of another store: {', '.join(moved)}")
    return TopologyChanged(
        f"The inputs of {processor} have changed since the store was written ({'; '.join(what)}).",
        "--accept-topology (graph.start(accept_topology=True)): new inputs begin at the start of their"
        " queue; or --fresh to start over.",
        processor=processor,
    )


# --- fencing ------------------------------------------------------------------------------------


def fenced(processor: str, expected: bytes, found: bytes | None) -> Fenced:
    """Why a commit's row is not the one that its step started from."""
    mine = ProcessorRow.unpack(expected)
    other = None if found is None else ProcessorRow.unpack(found)
    if other is not None and other.owner == mine.owner:
        return Fenced(
            f"The positions of {processor} were moved while a step was under way; the step was dropped.",
            "nothing: it goes on from the new positions.",
            processor=processor,
            reason="seek",
        )
    who = "nobody" if other is None else f"process {other.pid} (epoch {other.epoch})"
    return Fenced(
        f"{processor} was taken over by {who}; this process (epoch {mine.epoch}) stops and wrote nothing.",
        "nothing here; two processes ran the same graph.",
        processor=processor,
        reason="takeover",
    )


def seek(store: Store, processor: str, positions: dict[str, int], again: bool = False) -> ProcessorRow:
    """Move positions (indices by tailer id) of a processor, running or not; raises its epoch.

    With ``again`` the generation rises too, so that transactional sinks accept the messages anew.
    """
    with store.view() as txn:
        topology = read_topology(txn, processor)
    if topology is None:
        raise InvalidArgument(f"The store {store.path} has no processor {processor!r}.", "cues status lists them.")
    unknown = set(positions) - set(topology.tailers)
    if unknown:
        raise InvalidArgument(
            f"{processor} has no tailer {', '.join(sorted(unknown))}.", f"one of {', '.join(topology.tailers)}."
        )
    with store.view() as txn:
        before = read_row(txn, processor)
    assert before is not None
    with contextlib.ExitStack() as opened:
        targets = {}
        for tailer, index in positions.items():
            at = topology.tailers.index(tailer)
            where = topology.stores[at]
            other = opened.enter_context(abroad.opened(store, where, readonly=False)) if where else store
            targets[at] = _target(Log(other, topology.queues[at]), tailer, index)
            if where and index < before.positions[at].next:
                # First, so that what is sought is kept there: a mark that is too low costs only room.
                reader = abroad.Reader(store.id, processor, before.epoch + 1)
                abroad.lower_mark(other, topology.queues[at], reader, targets[at].next)

    def move(txn: Any) -> ProcessorRow:
        row = read_row(txn, processor)
        assert row is not None
        new = row._replace(
            epoch=row.epoch + 1,
            generation=row.generation + (1 if again else 0),
            pending=False,
            positions=tuple(targets.get(at, position) for at, position in enumerate(row.positions)),
        )
        txn.put(names.processor_key(processor), new.pack())
        return new

    return store.commit(move)


def _target(log: Log, tailer: str, index: int) -> Position:
    """The position at an index of a log; raises :class:`InvalidArgument` where there is none."""
    with log.store.view() as txn:
        row = log.row(txn)
        if not 1 <= index <= row.next:
            raise InvalidArgument(
                f"{tailer} cannot go to {index}.", f"an index from 1 to {row.next} (the next to be written)."
            )
        return Position(row.identity, index, log.seal_before(txn, row, index))
