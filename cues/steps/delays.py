"""Delayed messages: a message with a time of delivery is on its queue at once, and is given to processors then.

    1. hold      a step that takes messages whose time is in the future calls no function. Its commit moves the
                 position and writes the messages, with their provenance, to the held ones of the unit
    2. move      when messages are due, one commit deletes these rows and appends the messages to queues of the unit
    3. deliver   a stepper beside that of the unit takes them, by the protocol of every step (beside.py)

So a message is held, or on the queue of those that are due, or delivered; each change is one commit. Messages after it
on its queue do not wait for it, and retention may delete it from its queue, because the row has all of it.

The stepper of 3 has the id ``graph.processor.delayed``, and shares the function of the unit.

The rows are a keyed state of their own (state.py), under that id and the key None:

    time, input, identity, index    [[queue, hash, message, provenance], …]: one entry; of a join, one for each input
    "count"                         the number of these rows

The first field is bytes, all of one length, and begins with the time in nanoseconds. So the table has the messages in
the order of their times, and neither a step nor a look depends on their number. A message that is taken once more
after a seek, while it is held, has the same row.

Not guaranteed: the order of a delayed message relative to others, also of its key. Messages that are due are delivered
in the order of their times, after their time, when the processor runs.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import codec
from cues.base import clock, events, names
from cues.errors import CuesError, InvalidArgument
from cues.graphs import processor_rows
from cues.graphs.processor import Node
from cues.overrides import override
from cues.records import batch as batches
from cues.records import provenance as provenances
from cues.records.batch import ACKNOWLEDGEMENT
from cues.records.provenance import Provenance
from cues.steps.due import Due, Moved
from cues.steps.state import StateTable
from cues.steps.state_keys import key_segment

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.records.batch import Page
    from cues.steps.taking import Input, Taken

NEVER_NS: Final = (1 << 64) - 1
MOVED_BYTES_MAX: Final = 4 << 20
"""Bytes of messages after which one commit moves no more of them."""
_FIELD: Final = struct.Struct(">QH8sQ")
_COUNT: Final = "count"
_KEY: Final = key_segment(None)


class Held(Due):
    """The held messages of one unit. Only its owner writes them, so it knows the time of the next one."""

    def __init__(self, unit: Any, lane: Any) -> None:
        node: Node = unit.node
        self.own = names.delayer_id(node.key)
        super().__init__("delay", lane, StateTable(unit.store, self.own))
        self.next_ns = NEVER_NS
        """The time of the first message."""
        self._store = unit.store
        self._node = node
        self._emit = unit.emit
        self._queues = {port.binding: port.queue for port in node.inputs}
        self.refusal = _refusal(node)
        """Why the processor holds no messages, as a sentence; "" if it does."""
        unit.hold_back(self)

    def begin(self) -> None:
        """Look at the store, after a start or a seek."""
        self.forget()
        with self._store.core.view() as txn:
            self.looks = txn.get(names.redriver_key(self.own)) is not None  # some may have been moved
        self._look()

    def _look(self) -> None:
        self.next_ns = _first_ns(self.table)
        self.lane.armed = self.looks or self.next_ns != NEVER_NS

    # --- taking ---

    def cut(self, inputs: list[Input], count: int) -> tuple[int, list[int] | None]:
        """Divide what a step may take: return the number of messages that it delivers, or holds, and then their times.

        A step does one of both. Otherwise a batch function could be called under one hash with other messages, when
        the step is repeated later and some of them are due.
        """
        now = clock.now_ns()
        times = list(map(max, zip(*[input.times(count) for input in inputs])))
        holds = times[0] > now
        run = next((offset for offset, time in enumerate(times) if (time > now) != holds), count)
        if not holds:
            return run, None
        if self.refusal or len(inputs) > 1:
            run = 1  # which may fail alone
        return run, times[:run]

    def refused(self, taken: Taken) -> CuesError | None:
        """The error for a message that the processor cannot hold; None if it can."""
        assert taken.times is not None
        why = self.refusal
        if not why and any(ACKNOWLEDGEMENT in piece.messages for piece in taken.slices):
            why = "it joins the message with the acknowledgement of a transaction"
        if not why:
            return None
        at = clock.to_datetime(taken.times[0]).isoformat()
        return InvalidArgument(
            f"{self._node.id} cannot hold a message until {at}: {why}.",
            "write a stream before it, which gives the message on when it is due; or send it without deliver_at=.",
        )

    def keep(self, taken: Taken) -> None:
        """Add the messages to the step, each with its provenance."""
        assert taken.times is not None
        state = self.table.view(None)
        found = [piece.provenance() for piece in taken.slices]
        first = taken.slices[0]
        place = list(self._queues).index(first.binding)
        new = 0
        for offset, time in enumerate(taken.times):
            entries = []
            for piece, provenance in zip(taken.slices, found):
                own = provenance.slice(offset, offset + 1)
                batch = next(b for b in piece.batches if b.first <= piece.start + offset < b.next)
                packed = own.encode() if own else None
                message = codec.pack(piece.messages[offset])
                entries.append([self._queues[piece.binding], batch.head.hash, message, packed])
            field = _FIELD.pack(time, place, first.input.identity, first.start + offset)
            new += field not in state
            state[field] = entries
        state[_COUNT] = state.get(_COUNT, 0) + new
        self.table.call.settle()
        self._coming = min(taken.times)
        self.keeps = True

    _coming = NEVER_NS
    """The time of the first message of the step."""
    keeps = False
    """True if the step keeps messages."""

    @override
    def committed(self) -> None:
        """Follow the commit of a step."""
        self.table.committed()
        self.table.forget()  # messages are not kept in memory
        self.next_ns, self._coming, self.keeps = min(self.next_ns, self._coming), NEVER_NS, False
        self.lane.armed = self.looks or self.next_ns != NEVER_NS

    @override
    def forget(self) -> None:
        """Drop the step."""
        self.table.forget()
        self._coming, self.keeps = NEVER_NS, False

    # --- delivering ---

    @override
    def first_ns(self) -> int | None:
        next_ns = self.next_ns
        return None if next_ns == NEVER_NS else next_ns

    @override
    def take(self, count: int) -> Moved:
        due: list[list[Any]] = []
        size = 0
        rows: dict[bytes, bytes | None] = {}
        for row in _rows(self.table, clock.now_ns()):
            packed = self.table.packed(row) or b""
            due.append(codec.unpack(packed))
            rows[row] = None
            size += len(packed)
            if len(due) == count or size > MOVED_BYTES_MAX:
                break
        if due:
            state = self.table.view(None)
            state[_COUNT] = state.get(_COUNT, 0) - len(due)
            self.table.call.settle()
            self.table.settle(rows)
        return Moved(len(due), self._pages(due))

    def _pages(self, due: list[list[Any]]) -> dict[str, list[Page]]:
        """The record batches of messages, by their queues of those that are due. Each has the hash of one step."""
        known = {port.queue for port in self._node.inputs}
        by_queue: dict[str, list[list[Any]]] = {}
        given_up = 0
        for entries in due:
            if not known >= {entry[0] for entry in entries}:
                given_up += 1  # as other messages that were not taken when an input is taken away
                continue
            for entry in entries:
                by_queue.setdefault(f"{self.own}.{entry[0]}", []).append(entry)
        if given_up:
            text = f"gives up {given_up:,} delayed messages of queues that it does not read any more"
            self._emit(events.Event(self._node.id, text, logging.WARNING))
        pages: dict[str, list[Page]] = {}
        for queue, entries in by_queue.items():
            for digest, some in itertools.groupby(entries, lambda entry: entry[1]):
                run = list(some)
                bodies = [message for _, _, message, _ in run]
                joined = provenances.concat(
                    [Provenance(1, {}) if own is None else provenances.decode(own, 1) for *_, own in run]
                )
                try:
                    built = batches.build([], batches.OWN_BYTES_MAX, digest, joined, encoded=bodies)
                except CuesError:  # metadata that fits no page together with the place on the queue
                    built = batches.build([], batches.OWN_BYTES_MAX, digest, encoded=bodies)
                pages.setdefault(queue, []).extend(built)
        return pages

    @override
    def rest(self, stepper: Any) -> None:
        self._look()


class Waiting(NamedTuple):
    """The messages that a unit holds."""

    unit: str
    messages: int
    next: datetime
    """The time of the first one."""

    @override
    def __str__(self) -> str:
        messages = f"{self.messages:,} delayed messages" if self.messages > 1 else "1 delayed message"
        next = self.next.isoformat(timespec="seconds").replace("+00:00", "Z")
        return f"{self.unit} holds {messages}, {'the next one ' if self.messages > 1 else ''}until {next}"


def waiting_of(unit: str, messages: int, next_ns: int) -> Waiting:
    """Return what a unit holds: a number of messages, of which the first one is due at ``next_ns``."""
    return Waiting(unit, messages, clock.to_datetime(next_ns))


def waiting(store: Store) -> list[Waiting]:
    """Return the units that hold messages. The cost does not depend on the number of messages."""
    with store.core.view() as txn:
        keys = processor_rows.all_keys(txn)
    units = []
    for unit, key in keys.items():
        table = StateTable(store, names.delayer_id(key))
        first_ns = _first_ns(table)
        if first_ns != NEVER_NS:
            units.append(waiting_of(unit, table.view(None)[_COUNT], first_ns))
    return sorted(units)


def _rows(table: StateTable, until_ns: int) -> Iterator[bytes]:
    """The committed rows of the messages up to a time, in the order of their times."""
    low, high = _FIELD.pack(0, 0, bytes(8), 0), _FIELD.pack(min(until_ns + 1, NEVER_NS), 0, bytes(8), 0)
    return table.range(_KEY + key_segment(low), _KEY + key_segment(high))


def _first_ns(table: StateTable) -> int:
    row = next(_rows(table, NEVER_NS), None)
    first: int = NEVER_NS if row is None else _FIELD.unpack(codec.unpack(row[len(_KEY) + 1 :]))[0]
    return first


def _refusal(node: Node) -> str:
    if node.tailers:
        return "it reads other queues by itself (tailers=), and would be at another place of them then"
    if node.pending:
        return "it writes to other stores by pending messages (across='pending')"
    if node.kind == "frame":
        return "it is a frame"
    return ""
