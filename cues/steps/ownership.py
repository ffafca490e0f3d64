"""Owner and positions of a processor: one row, which every commit compares and replaces.

    row        owner id, epoch, generation, pid, boot, pending, positions of its tailers, source position
    topology   kind and tailer ids, in the order of the row's positions
    sub        (log, processor): a reader of a log of this store, for retention

The writer lock of a store excludes others for one transaction only. A running processor has two more marks of
ownership: a POSIX lock on a byte of its own (so its death is seen at once), and the epoch in its row. Every claim,
seek and takeover raises the epoch. A commit compares the whole row with the row that its step started from; that
comparison is the fence. The POSIX lock alone is not enough: a stopped process keeps it, and a process that continues
does not know that it lost it.

While a graph runs, it writes the time into a lease file every :data:`LEASE_BEAT_S`. The lease only says whether
another process may take over while the lock is held. Safety does not depend on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from cues import faults
from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.errors import AlreadyRunning, Fenced, InvalidArgument, QueueNotFound, TopologyChanged
from cues.forwarding import marks, other_stores
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow, all_keys, boot, read_row, read_topology
from cues.queues.committed import differ, log_at
from cues.queues.log import Log
from cues.records import sealed
from cues.records.positions import NO_SEAL, Position
from cues.storage import leases, locks
from cues.storage.format_record import require
from cues.storage.leases import Lease
from cues.storage.transaction import named_rows, refuse_lost

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction

LEASE_S: Final = 10.0
"""Seconds after the last beat until another process may take over although the lock is held."""
LEASE_BEAT_S: Final = 2.0
_OR_TAKE_OVER: Final = ", or --take-over if it does not answer"


def supervisor_lock(graph: str) -> int:
    """Return the lock that a graph's supervisor holds. (No processor has this name: names have no blanks.)"""
    return locks.offset_of(f"{graph} supervisor")


# --- claiming -----------------------------------------------------------------------------------


def require_replaceable(store: Store, processors: Iterable[ProcessorId], take_over: bool = True) -> None:
    """Raise :class:`AlreadyRunning` if a process that answers, or was alive shortly ago, owns one of the processors.

    Without ``take_over``, any process that runs one of them is an error.
    """
    for processor in processors:
        offset = locks.offset_of(processor)
        held = store.core.locks.mine(offset) or store.core.locks.holder(offset) is not None
        refused = _refusal(store, processor, take_over) if held else None
        if refused is not None:
            raise refused


def _refusal(store: Store, processor: ProcessorId, take_over: bool) -> AlreadyRunning | None:
    """The error for a start while another owner holds the lock of a processor; None if it may be replaced."""
    offset = locks.offset_of(processor)
    with store.core.view() as txn:
        row = read_row(txn, processor)
    here = store.core.locks.mine(offset)
    left = 0.0 if row is None or row.boot != boot() else leases.left_s(store, row.owner, LEASE_S)
    if here:
        pid = os.getpid()
    elif row is not None and left > 0 and locks.process_state(row.pid) != "gone":
        pid = row.pid  # the holder of the lock: an owner that was replaced keeps it until it ends
    else:
        pid = store.core.locks.holder(offset) or (row.pid if row else 0)
    state = locks.process_state(pid)
    answers = left > LEASE_S - 2 * LEASE_BEAT_S and state != "stopped"
    if here or not take_over or answers:
        where = "in this process" if here else f"by process {pid} ({state})"
        supervisor = store.core.locks.holder(supervisor_lock(processor.partition(".")[0]))
        if supervisor is not None:  # it would start a killed worker again
            where, pid = f"by process {pid}, a worker of process {supervisor}", supervisor
        more = ": it answers, and only one that does not can be replaced" if take_over else _OR_TAKE_OVER
        return AlreadyRunning(
            f"{processor} is already run {where}, on the store {store.path}.",
            "wait until it ends, or stop it" + ("." if here else f" (kill {pid}){more}."),
            pid=pid,
        )
    if left > 0:
        return AlreadyRunning(
            f"{processor} is run by process {pid} ({state}), whose lease runs for another {math.ceil(left)} s.",
            f"start again in {math.ceil(left)} s: only a process that does not answer can be replaced.",
            pid=pid,
        )
    return None


@dataclass(frozen=True)
class Claimant:
    """A processor to be claimed, and the logs that it reads, by tailer id."""

    processor: ProcessorId
    kind: str
    logs: dict[str, Log]
    key: ProcessorKey | None = None
    """The id of its first start, if it has another one now."""
    requires: tuple[str, ...] = ()
    """The keys that a version must know to read its state (storage/datafile.py)."""

    def topology(self, home: Store) -> ProcessorInputs:
        """Return its inputs as the home store keeps them."""
        tailers = tuple(sorted(self.logs))
        logs = [self.logs[tailer] for tailer in tailers]
        stores = tuple(b"" if log.store.id == home.id else log.store.id for log in logs)
        return ProcessorInputs(self.kind, tailers, tuple(log.id for log in logs), stores, self.key)


class Ownership:
    """The processors that one start of a graph owns in one store."""

    def __init__(self, store: Store, claimants: Sequence[Claimant], take_over: bool = False) -> None:
        """Take the locks. Raises :class:`AlreadyRunning` with the owner's pid; then no lock is held."""
        store.core.check_file()
        self.store = store
        self.owner = os.urandom(8)
        self.claimants = tuple(claimants)
        self._locked: list[int] = []
        self._missing: list[int] = []
        """Locks that the previous owner still holds after a takeover."""
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

    def _lock(self, processor: ProcessorId, take_over: bool) -> None:
        offset = locks.offset_of(processor)
        if self.store.core.locks.try_lock(offset):
            self._locked.append(offset)
            return
        refused = _refusal(self.store, processor, take_over)
        if refused is not None:
            raise refused
        self._missing.append(offset)

    def beat(self, figures: dict[str, leases.Figures] | None = None) -> None:
        """Write the lease with the figures of the process; take the locks that a takeover could not take."""
        with self._guard:
            if self._lease is None:
                return
            self._lease.beat(figures)
            for offset in tuple(self._missing):
                if self.store.core.locks.try_lock(offset):
                    self._missing.remove(offset)
                    self._locked.append(offset)

    def add(self, claimants: Sequence[Claimant]) -> None:
        """Take the locks of more processors for the same owner. Raises as the constructor; then no lock was taken."""
        try:
            for claimant in claimants:
                self._lock(claimant.processor, False)
        except BaseException:
            self.drop(claimants)
            raise
        self.claimants += tuple(claimants)

    def drop(self, claimants: Sequence[Claimant]) -> None:
        """Release the locks of some processors. Their rows stay."""
        with self._guard:
            self.claimants = tuple(claimant for claimant in self.claimants if claimant not in claimants)
            for offset in [locks.offset_of(claimant.processor) for claimant in claimants]:
                if offset in self._locked:
                    self._locked.remove(offset)
                    self.store.core.locks.unlock(offset)

    def claim(
        self, accept_topology: bool = False, above: int = 0, only: Sequence[Claimant] | None = None
    ) -> dict[str, ProcessorRow]:
        """Raise the epoch of every processor, or ``only`` of some, in one transaction, which fences older owners.

        Epochs are also higher than ``above``: the epochs of these processors that other stores have.

        Raises :class:`TopologyChanged` if the inputs are not those that have positions, and :class:`StoreDamaged` if a
        row of the store, or the state of a processor, is not under its key.
        """
        with self.store.core.view() as txn:
            refuse_lost(txn)
            _refuse_lost_state(txn)
        # The beginnings of the queues are read first: no transaction of one store is opened inside one of another.
        claimants = self.claimants if only is None else only
        starts: dict[str, Position] = {}
        for claimant in claimants:
            for tailer, log in claimant.logs.items():
                with log.store.core.view() as txn:
                    row = log.row(txn)
                starts[tailer] = Position(row.identity, row.first, NO_SEAL)
        rows = self.store.core.commit(self._claim, claimants, accept_topology, starts, above)
        for owner in self._followed:
            leases.forget(self.store, owner)
        faults.point("claim.after")
        return rows

    def _claim(
        self,
        txn: StoreTransaction,
        claimants: Sequence[Claimant],
        accept_topology: bool,
        starts: dict[str, Position],
        above: int,
    ) -> dict[str, ProcessorRow]:
        rows: dict[str, ProcessorRow] = {}
        for claimant in claimants:
            topology = claimant.topology(self.store)
            rows[claimant.processor] = row = self._claimed(txn, claimant, topology, accept_topology, starts, above)
            sealed.put(txn, names.processor_key(claimant.processor), row.pack())
            sealed.put(txn, names.topology_key(claimant.processor), topology.pack())
            for feature in claimant.requires:
                require(txn, feature)
            for queue, store in zip(topology.queues, topology.stores):
                if not store:
                    txn.put(names.subscription_key(queue, claimant.processor), b"")
        faults.point("claim.inside")
        return rows

    def _claimed(
        self,
        txn: StoreTransaction,
        claimant: Claimant,
        topology: ProcessorInputs,
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
            if before is not None and before.key != claimant.key:
                raise _renamed_meanwhile(claimant.processor)
            if before is None or len(before.tailers) != len(old.positions):
                raise sealed.damaged(f"topology of the processor {claimant.processor}", "it does not fit its row")
            known = dict(zip(before.tailers, old.positions))
            isolated = [
                tailer
                for tailer, position in known.items()
                if tailer in starts and differ(starts[tailer].identity, position.identity)
            ]
            changed = isolated or (before.kind, before.places) != (topology.kind, topology.places)
            if changed and not accept_topology:
                raise inputs_changed(claimant.processor, before, topology, isolated)
            for tailer in isolated:
                del known[tailer]
            for tailer, queue, store in zip(before.tailers, before.queues, before.stores):
                if topology.places.get(tailer) != store:
                    known.pop(tailer, None)
                    txn.delete(names.subscription_key(queue, claimant.processor))
        elif topology.key_of(claimant.processor) in all_keys(txn).values():
            raise _renamed_meanwhile(claimant.processor)
        positions = [known.get(tailer, starts[tailer]) for tailer in topology.tailers]
        return ProcessorRow(
            self.owner,
            max(old.epoch if old else 0, above) + 1,
            old.generation if old else 0,
            os.getpid(),
            boot(),
            old.under_way if old else False,
            tuple(positions),
            old.source if old else b"",
        )

    def release(self) -> None:
        """Release the locks. The rows stay; the next owner raises their epochs."""
        with self._guard:
            while self._locked:  # one at a time: if this call is interrupted, the next call releases the rest
                self.store.core.locks.unlock(self._locked[-1])
                self._locked.pop()
            self._missing.clear()
            if self._lease is not None:
                self._lease.close()
                self._lease = None


def _refuse_lost_state(txn: StoreTransaction) -> None:
    """Raise :class:`StoreDamaged` if state is under a name that is a processor's, but for one bit.

    The processor would begin with an empty state. State of a processor that is gone is not refused.
    """
    keys = set(all_keys(txn).values())

    prefix = names.state_database(ProcessorKey(""))
    for owner, name, _ in named_rows(txn, prefix):
        if names.is_of_unit(owner, keys) or owner.startswith("checkpoint:"):
            continue
        for own in sealed.with_one_bit_changed(name):
            if own.startswith(prefix) and names.is_of_unit(own[len(prefix) :].decode(errors="replace"), keys):
                raise sealed.damaged(f"state {own!r}", f"it is under the name {name!r}")


def _renamed_meanwhile(processor: str) -> TopologyChanged:
    return TopologyChanged(
        f"A processor of this graph was renamed by another start while {processor} was being started.",
        "start the graph again, with the code that has the new name.",
        processor=processor,
    )


def inputs_changed(
    processor: str, before: ProcessorInputs, now: ProcessorInputs, isolated: Sequence[str]
) -> TopologyChanged:
    """Return the error of a start whose processor has other inputs than the store has positions for."""
    added = sorted(set(now.tailers) - set(before.tailers))
    gone = sorted(set(before.tailers) - set(now.tailers))
    what = []
    if before.kind != now.kind:
        what.append(f"it was a {before.kind} and is a {now.kind}")
    if added:
        what.append(f"without a position: {', '.join(added)}")
    if gone:
        what.append(f"no longer read: {', '.join(gone)}")
    if isolated:
        what.append(f"with another isolation=: {', '.join(isolated)}")
    moved = [t for t in now.tailers if t in before.places and before.places[t] != now.places[t]]
    if moved:
        what.append(f"on a queue of another store: {', '.join(moved)}")
    return TopologyChanged(
        f"The inputs of {processor} have changed since the store was written ({'; '.join(what)}).",
        "use --accept-topology (graph.start(accept_topology=True)), and new inputs begin at the start of their"
        " queue; or --fresh to start over.",
        processor=processor,
    )


# --- fencing ------------------------------------------------------------------------------------


def fenced(processor: str, key: bytes, expected: bytes, stored: bytes | None) -> Fenced:
    """Return the error of a commit whose row is not the one that its step started from."""
    mine = ProcessorRow.unpack(key, expected, processor)
    other = None if stored is None else ProcessorRow.unpack(key, stored, processor)
    if other is not None and other.owner == mine.owner:
        return Fenced(
            f"The positions of {processor} were moved while a step was under way; the step was dropped.",
            "do nothing: the processor continues at the new positions.",
            processor=processor,
            reason="seek",
        )
    who = "no process" if other is None else f"process {other.pid} (epoch {other.epoch})"
    return Fenced(
        f"{processor} was taken over by {who}; this process (epoch {mine.epoch}) stops and wrote nothing.",
        "do nothing here; but find out why two processes ran the same graph.",
        processor=processor,
        reason="takeover",
    )


def seek(
    store: Store, processor: ProcessorId, positions: dict[str, int], again: bool = False, reset_state: bool = False
) -> ProcessorRow:
    """Move positions (indices by tailer id) of a processor, whether it runs or not, and raise its epoch.

    ``reset_state`` deletes its state in the same commit. An owner that runs drops the state that it has in memory.

    ``again`` also raises the generation, so that transactional sinks accept the messages again.
    """
    with store.core.view() as txn:
        topology = read_topology(txn, processor)
    if topology is None:
        raise InvalidArgument(f"The store {store.path} has no processor {processor!r}.", "run cues status.")
    unknown = set(positions) - set(topology.tailers)
    if unknown:
        raise InvalidArgument(
            f"{processor} has no tailer {', '.join(sorted(unknown))}.", f"pass one of {', '.join(topology.tailers)}."
        )
    with store.core.view() as txn:
        before = read_row(txn, processor)
    assert before is not None
    with contextlib.ExitStack() as opened:
        targets = {}
        for tailer, index in positions.items():
            at = topology.tailers.index(tailer)
            where = topology.stores[at]
            other = opened.enter_context(other_stores.opened(store, where, readonly=False)) if where else store
            log = log_at(Log(other, *names.split_log(topology.queues[at])), before.positions[at].identity)
            targets[at] = _target(log, tailer, index)
            if where and targets[at].next < before.positions[at].next:
                with other.core.view() as txn:
                    index = log.needed_from(txn, targets[at].next)
                from cues.forwarding import low_water

                # First, so that the messages there are kept: a mark that is too low costs only space.
                reader = marks.ForeignReader(store.id, topology.key_of(processor), before.epoch + 1)
                low_water.lower_mark(other, topology.queues[at], reader, index)

    table = None
    if reset_state:
        with contextlib.suppress(QueueNotFound):
            table = store.core.database(names.state_database(topology.key_of(processor)))

    def move(txn: StoreTransaction) -> ProcessorRow:
        row = read_row(txn, processor)
        assert row is not None
        new = row._replace(
            epoch=row.epoch + 1,
            generation=row.generation + (1 if again else 0),
            under_way=False,
            positions=tuple(targets.get(at, position) for at, position in enumerate(row.positions)),
        )
        sealed.put(txn, names.processor_key(processor), new.pack())
        if table is not None:
            txn.drop(table, delete=False)
        faults.point("seek.inside")
        return new

    return store.core.commit(move)


def _target(log: Log, tailer: str, index: int) -> Position:
    """The position at an index of a log; raises :class:`InvalidArgument` if there is none."""
    with log.store.core.view() as txn:
        row = log.records_row(txn)
        if not 1 <= index <= row.next:
            raise InvalidArgument(
                f"{tailer} cannot move to {index}.", f"pass an index from 1 to {row.next} (the next to be written)."
            )
        row, position = log.row(txn), log.place_of(txn, index)
        return Position(row.identity, position, log.seal_before(txn, row, position))
