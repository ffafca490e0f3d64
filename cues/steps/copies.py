"""Copies of messages, which the steppers beside that of a unit take (beside.py): their commits remove them.

Copies           delayed messages that are due
RedrivenCopies   redriven messages: the commit also settles the error messages that they came from
TimerCopies      due timers, some of them redriven: the delivery hash has their times (timers.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from cues import faults
from cues.base import events, names
from cues.base.names import ProcessorKey
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.records import sealed
from cues.steps.error_records import Counts, ErrorRows, redriven_key, unpack_origin
from cues.steps.hashes import Hasher

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.graphs.processor_rows import ProcessorRow
    from cues.steps.part import Part
    from cues.steps.ports import Ports
    from cues.steps.taking import Taken
    from cues.storage.transaction import StoreTransaction

TRY_LOG: Final = QueueOptions(metadata=False)
_EVERY: Final = 1 << 62
"""A commit deletes all that its step took, however many entries: the memory of a step bounds them."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Copies:
    """The copies that one stepper takes, and what its steps do with them besides."""

    options: ClassVar[QueueOptions] = QueueOptions()
    """The options of its queues."""
    own_calls: ClassVar[bool] = False
    """True: the stepper calls another function than the unit does."""
    counted: ClassVar[bool] = True
    """False: they are no messages of users, and are not counted as taken."""

    def __init__(self, kind: str, unit: Any, node: Node, own: ProcessorKey) -> None:
        """``kind``: the first word of the names of its crash points. ``own``: the id of the stepper's row."""
        self.kind = kind
        self.unit: Any = unit
        """The stepper of the unit."""
        self.node = node
        self.own: ProcessorKey = own

    def hasher(self, row: ProcessorRow) -> Hasher:
        """Make the delivery hashes of the stepper."""
        return Hasher(self.node.key, row.generation)

    def took(self, taken: Taken) -> None:
        """Note the messages of a step."""

    def origins(self, taken: Taken, start: int, stop: int) -> dict[str, Any]:
        """Return fields for an error message that say which error messages these messages came from."""
        return {}

    def write(self, txn: StoreTransaction, parts: list[Part], ports: Ports) -> None:
        """Remove the messages that the step took: they are of no use after its commit."""
        for input in ports.inputs:
            log_row = input.log.row(txn)
            index = next((end for part in reversed(parts) if (end := _end(part, input.tailer))), log_row.first)
            if index > log_row.first:
                _, front = input.log.delete_before(txn, log_row, index, _EVERY)
                input.log.move_front(txn, log_row, front)
        self._settle(txn, parts, ports)
        faults.point(f"{self.kind}.inside")

    def _settle(self, txn: StoreTransaction, parts: list[Part], ports: Ports) -> None:
        """Note that messages that somebody asked for are done."""


class Requests:
    """The redrives that are asked for of one lane."""

    def __init__(self, unit: Any, lane: Any, key: ProcessorKey, queues: str) -> None:
        """``queues``: what the names of the lane's queues begin with."""
        self.key = names.redrives_key(key)
        self.queues = queues
        self.counts: bytes | None = None
        """The row, as the last transaction that compared the fence of the unit saw it."""
        self._unit = unit
        self._lane = lane
        unit.fence.requests.append(self)

    def note(self, counts: bytes | None) -> None:
        """Note the row, which has changed."""
        self.counts = counts
        if counts is not None:
            self._lane.armed = True

    def waits(self) -> bool:
        """Return whether a redrive waits. Safe in any thread."""
        counts = self.counts
        return counts is not None and counts[:8] != counts[8:16]

    def write_done(self, txn: StoreTransaction, counts: Counts, done: int) -> None:
        """Write that so many redrives more are done."""
        self.counts = sealed.put(txn, self.key, counts._replace(done=done).pack())

    def refuse(self, rows: ErrorRows, why: str, unless: Callable[[StoreTransaction], bool] = lambda txn: False) -> None:
        """Write that the redrives that wait cannot be made, and remove their messages, in one commit.

        ``unless``: in the transaction, whether they can be made after all.
        """
        unit, prefix = self._unit, self.queues
        store = unit.store
        logs = [Log(store, id) for id in store.queues(all=True) if id.startswith(prefix)]

        def write(txn: StoreTransaction) -> int:
            unit.fence.compare(txn)
            if unless(txn):
                return 0
            refused = 0
            cursor = txn.cursor(rows.database)
            alive = cursor.set_range(b"r" + prefix.encode())
            origins: dict[bytes, bytes] = {}
            while alive and cursor.key().startswith(b"r" + prefix.encode()):
                origins[cursor.key()] = unpack_origin(*cursor.item())
                alive = cursor.next()
            for origin in origins:
                txn.delete(origin, db=rows.database)
            for key in set(origins.values()):
                fields = rows.get(txn, key)
                if fields is not None:
                    rows.put(txn, key, "refused", fields["by"], reason=why)
                    refused += 1
            for log in logs:
                row = log.row(txn)
                log.move_front(txn, row, row.next)
            counts = Counts.read(txn, self.key)
            self.write_done(txn, counts, counts.asked)
            return refused

        refused = store.core.commit(write)
        store.core.note_purge()
        if refused:
            text = f"{refused:,} redrive{'s' if refused > 1 else ''} refused: {why}. The messages stay unresolved"
            unit.emit(events.Event(unit.node.id, text, logging.WARNING))


class RedrivenCopies(Copies):
    """Copies that may be redriven messages: the commit of a step settles the error messages that they came from."""

    def __init__(self, kind: str, unit: Any, node: Node, own: ProcessorKey, rows: ErrorRows, asked: Requests) -> None:
        super().__init__(kind, unit, node, own)
        self.rows = rows
        self._requests = asked

    @override
    def origins(self, taken: Taken, start: int, stop: int) -> dict[str, Any]:
        """Name the error messages that these messages came from."""
        with self.rows.home.core.view() as txn:
            origins: dict[bytes, list[Any]] = {}
            for piece in taken.slices:
                for at in range(piece.start + start, piece.start + stop):
                    key = self.rows.origin_of(txn, redriven_key(piece.tailer, at))
                    fields = None if key is None else self.rows.get(txn, key)
                    if key is not None and fields is not None:
                        origins[key] = fields["error"]
        places = [{"queue": queue, "index": index} for queue, index in origins.values()]
        return {names.ERR_REDRIVEN: places} if places else {}

    @override
    def _settle(self, txn: StoreTransaction, parts: list[Part], ports: Ports) -> None:
        """Note that redriven messages are done, and count the error messages of which none is left."""
        counts = Counts.read(txn, self._requests.key)
        if not counts.waiting:  # none of these messages is redriven
            return
        done = counts.done
        errors = ports.errors
        for part in parts:
            new = []
            if part.failure is not None and errors is not None and errors.store.id == ports.store.id:
                new = [part.indices[errors.core.log.id]]
            for tailer, start, end in zip(part.taking.tailers, part.taking.starts, part.taking.ends):
                for at in range(start, end):
                    done += self._settle_one(txn, redriven_key(tailer, at), part, new)
        self._requests.write_done(txn, counts, done)

    def _settle_one(self, txn: StoreTransaction, origin: bytes, part: Part, new: list[int]) -> int:
        """Note that one redriven message is done; return 1 if it was the last one of its error message."""
        key = self.rows.origin_of(txn, origin)
        fields = None if key is None else self.rows.get(txn, key)
        if key is None or fields is None:
            return 0
        txn.delete(origin, db=self.rows.database)
        again = sorted({*fields.get("again", ()), *new})
        failed = bool(fields.get("failed")) or part.failure is not None
        left = fields["left"] - 1
        state: Literal["requested", "failed again", "resolved"] = "requested"
        if not left:
            state = "failed again" if failed else "resolved"
        more = {"left": left, "failed": failed, "again": again, "hash": part.digest.hex(), "error": fields["error"]}
        self.rows.put(txn, key, state, fields["by"], **more)
        return int(not left)


def _end(part: Part, tailer: str) -> int:
    taking = part.taking
    return taking.ends[taking.tailers.index(tailer)] if tailer in taking.tailers else 0
