"""Pauses: a processor that takes no message until somebody resumes it, while the others go on.

A unit is paused by a row of its home store. There are three reasons:

    failed   a message failed for good, and the processor has ``on_error="pause"``. It is the next message
    limit    the error messages reached ``max_errors=``. The next message is the one after the last failure
    asked    somebody asked for it (``cues pause``)

The owner of the unit writes the row in the commit of the failing step: with the messages before the failure, or with
the error messages that are counted. It reads the row in each commit, as it reads the counts of redrives. So a death
at any moment leaves the step and the pause, or neither; and a start, also on another machine, finds the pause.
``resume`` deletes the row. The unit then recovers as at a start, and calls its function for the message anew.

The error messages are counted in a row of their own, in windows: a window begins with the first error message after
the last window was over. The count is in the same commits as the error messages, so it outlives the process.

Both rows have the key of the unit (:attr:`Node.key`), which a rename does not change.

Not guaranteed: that the owner of a unit stops at once when somebody asks for a pause. It makes one more step at most.
Redrives are made during a pause.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import faults
from cues.base import clock, names
from cues.base.names import ProcessorId, ProcessorKey
from cues.graphs.error_rate import ErrorRate
from cues.graphs.pause import ProcessorPause
from cues.graphs.processor_rows import all_keys, read_topology
from cues.records import sealed
from cues.steps.error_records import whoami
from cues.steps.results import pauses as pauses_at
from cues.storage import wakeup

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.steps.failure import Failure
    from cues.steps.part import Part
    from cues.steps.taking import Slice, Taken
    from cues.storage.base_store import BaseStore
    from cues.storage.transaction import StoreTransaction

TEXT_CHARACTERS_MAX: Final = 1000
"""A longer error text keeps its beginning: ``cues status`` shows it in a line."""
TRACE_CHARACTERS_MAX: Final = 8000
"""A longer traceback keeps its end, where the error is."""

_WINDOW: Final = struct.Struct(">QQ")


def of_failure(
    unit: ProcessorId, failure: Failure, next: Iterable[tuple[str, int]], messages: int = 1, limit: str = ""
) -> ProcessorPause:
    """Return the pause because of a failure, or of the last one of as many as ``limit`` allows."""
    cause, *_ = failure.account()[names.ERR_CAUSE] or [{}]
    first, *more = str(cause.get("message", "")).strip().splitlines() or [""]
    return ProcessorPause(
        unit,
        "limit" if limit else "failed",
        clock.to_datetime(clock.now_ns()),
        tuple(next),
        f"{cause.get('type')}: {first}{' …' if more else ''}"[:TEXT_CHARACTERS_MAX],
        failure.attempts,
        messages,
        limit,
        trace=str(cause.get("trace", ""))[-TRACE_CHARACTERS_MAX:],
    )


class ErrorWindow(NamedTuple):
    """The error messages of a unit in the present window of ``max_errors=``."""

    rate: ErrorRate
    began_ns: int = 0
    errors: int = 0

    @staticmethod
    def read(txn: StoreTransaction, key: ProcessorKey, rate: ErrorRate) -> ErrorWindow:
        """Return the window of a unit, by its key."""
        raw = txn.get(row_key := names.failures_key(key))
        if raw is None:
            return ErrorWindow(rate)
        return ErrorWindow(rate, *ErrorWindow.fields(row_key, raw, key))

    @staticmethod
    def fields(row_key: bytes, raw: bytes, key: str = "(unnamed)") -> tuple[int, int]:
        """Decode the row: the beginning of the window, and its errors. Raises :class:`StoreDamaged`."""
        began_ns, errors = sealed.unseal_fields(row_key, raw, f"count of the error messages of {key}", _WINDOW)
        return began_ns, errors

    def at(self, now_ns: int) -> ErrorWindow:
        """Return the window of a time: this one, or a new one if this is over."""
        under_way = self.errors and 0 <= now_ns - self.began_ns < self.rate.seconds * 1_000_000_000
        return self if under_way else ErrorWindow(self.rate, now_ns)

    def plus(self, count: int) -> ErrorWindow:
        return self._replace(errors=self.errors + count)

    @property
    def left(self) -> int:
        """The number of error messages until the limit; at least 1 before a step."""
        return self.rate.most - self.errors

    def pack(self) -> bytes:
        return _WINDOW.pack(self.began_ns, self.errors)


class UnitPause:
    """The pause of one unit, and its count of error messages. All steppers of the unit share it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.key: bytes = names.pause_key(node.key)
        self.row: bytes | None = None
        """The row of the pause, as the last transaction that compared the fence saw it."""
        limit = node.options.max_errors
        self._rate = ErrorRate.parse(limit) if limit is not None and node.kind != "source" else None
        self.window: ErrorWindow | None = None
        """The error messages of the present window, if the unit has ``max_errors=``."""

    def look(self, txn: StoreTransaction) -> None:
        """Read the present window."""
        if self._rate is not None:
            self.window = ErrorWindow.read(txn, self.node.key, self._rate)


class FailureRows:
    """The rows that the steps of one stepper write because of failures: a pause, and the count of error messages."""

    def __init__(self, node: Node, pause: UnitPause) -> None:
        self._node = node
        self._pause = pause
        self.limits = node.options.max_errors is not None and node.kind != "source"
        """True if its error messages are counted."""
        self.rows: dict[bytes, bytes] = {}
        """The bodies of the rows of the step under way, by key."""
        self._counted: ErrorWindow | None = None
        """The window after the commit of the step."""

    def errors_left(self) -> int | None:
        """Return the number of failures after which the step is closed; None: there is no limit."""
        window = self._pause.window
        return window.at(clock.now_ns()).left if window is not None and self.limits else None

    def note(self, taken: Taken, parts: list[Part], stop: Failure | None) -> None:
        """Make the rows for the parts of a step, and for the failure before which it ends."""
        self.rows, self._counted = {}, self._pause.window
        unit, slices = self._pause.node.id, taken.slices
        if stop is not None:
            if pauses_at(self._node, stop):
                # The messages before the failed one are the parts. Without parts, it is the first one.
                next = [(self._name_of(s), s.stop if parts else s.start) for s in slices]
                count = taken.count if self._node.options.batch else 1
                self.rows[self._pause.key] = of_failure(unit, stop, filter(all, next), count).pack()
            return
        failures = [part.failure for part in parts if part.failure is not None]
        window = self._pause.window
        if window is None or not self.limits or not failures:
            return
        window = window.at(clock.now_ns()).plus(len(failures))
        self._counted = window
        self.rows[names.failures_key(self._pause.node.key)] = window.pack()
        if window.left <= 0:
            limit = str(self._node.options.max_errors)
            next = [(self._name_of(s), s.stop) for s in slices]
            self.rows[self._pause.key] = of_failure(unit, failures[-1], filter(all, next), limit=limit).pack()

    def _name_of(self, piece: Slice) -> str:
        """Return the queue of a slice as users know it; "" for the queue of due timers."""
        return piece.input.queue.id if self._node is self._pause.node else ""

    def write(self, txn: StoreTransaction) -> None:
        for key, body in self.rows.items():
            sealed.put(txn, key, body)
        if faults.active and self.rows:
            faults.point("pause.inside")

    def committed(self) -> None:
        """Follow the commit of the rows."""
        if faults.active:
            faults.point("pause.after")
        body = self.rows.get(self._pause.key)
        self._pause.row = None if body is None else sealed.seal(self._pause.key, body)
        self._pause.window = self._counted
        self.rows = {}


def of_store(txn: StoreTransaction) -> dict[ProcessorId, ProcessorPause]:
    """Return the pauses of all units, by the id of the unit."""
    found = {}
    for unit, key in all_keys(txn).items():
        raw = txn.get(row_key := names.pause_key(key))
        if raw is not None:
            found[unit] = ProcessorPause.unpack(row_key, raw, unit)
    return found


def resume(home: BaseStore, units: Iterable[ProcessorId]) -> list[ProcessorPause]:
    """Take the pauses of units away, in one commit, and wake their owners; return those that there were.

    Their error messages are counted from 0 again.
    """

    def delete(txn: StoreTransaction) -> list[ProcessorPause]:
        known, keys = of_store(txn), all_keys(txn)
        gone = [known[unit] for unit in units if unit in known]
        for pause in gone:
            txn.delete(names.pause_key(keys[pause.processor]))
            txn.delete(names.failures_key(keys[pause.processor]))
        faults.point("pause.resuming")
        return gone

    return _written(home, delete)


def ask(home: BaseStore, units: Iterable[ProcessorId], reason: str = "") -> list[ProcessorPause]:
    """Pause units that are not paused, in one commit, and wake their owners; return the new pauses."""
    by = whoami()

    def write(txn: StoreTransaction) -> list[ProcessorPause]:
        known, keys = of_store(txn), all_keys(txn)
        now = clock.to_datetime(clock.now_ns())
        new = [ProcessorPause(u, "asked", now, by=by, reason=reason) for u in units if u in keys and u not in known]
        for pause in new:
            sealed.put(txn, names.pause_key(keys[pause.processor]), pause.pack())
        faults.point("pause.asking")
        return new

    return _written(home, write)


def _written(home: BaseStore, write: Callable[[StoreTransaction], list[ProcessorPause]]) -> list[ProcessorPause]:
    changed: list[ProcessorPause] = home.core.commit(write)
    faults.point("pause.changed")
    with home.core.view() as txn:
        topologies: Mapping[str, Any] = {pause.processor: read_topology(txn, pause.processor) for pause in changed}
    queues = {queue for topology in topologies.values() if topology is not None for queue in topology.queues}
    home.core.ring(wakeup.union(wakeup.mask_of(*names.split_log(queue)) for queue in queues))
    return changed


def forget(txn: StoreTransaction, key: ProcessorKey) -> None:
    """Delete the rows of a unit that is deleted."""
    txn.delete(names.pause_key(key))
    txn.delete(names.failures_key(key))
