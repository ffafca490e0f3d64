"""Keyed state of a processor: fields are loaded when they are read, and changes are written with the step.

    process.state["count"] = process.state.get("count", 0) + 1

There is one row for each (key, field), so a step costs only the fields that it uses, also in a state of a million
fields. A value is looked up in three layers:

    call       the values that the running call has read or assigned, as objects
    step       the changes of this step, packed
    table      the committed values; rows that were read stay in memory, because no other process writes them

A call that returns moves its changes into the step; a call that fails leaves nothing. Values that were changed in
place are found by packing them again, so ``state["seen"].append(x)`` is a change. Numbers and short texts cannot change
in place, and packing them cannot fail. So they are packed once for each step, and not once for each call: a counter
that a thousand messages raise is written, and read, as one.

Each concurrent call has its own layer (:meth:`StateTable.layer`) and sees only the state of its key. Calls of one key
run one after another, so the result does not depend on which call is faster.

On disk: key = key segment, field segment, number of the piece (2 bytes); value = checksum of key and rest, number of
pieces (2 bytes), bytes. A segment is its length and its msgpack, or 0xff and its 128-bit hash when it
has more than 200 bytes (then the value begins with the field).

Timers (timers.py) are rows of the state too. They begin with a byte that is not a length of a segment:

    0xfd, key segment, segment of the name                    the time of the timer, in ns
    0xfe, time (8 bytes), key segment, segment of the name    [key, name]: the timers in the order of time

With ``ttl=`` a value expires when it was not written for that time. So each value has two more rows:

    0xfb, row of the value                                    the time of its last write, in ns
    0xfc, that time (8 bytes), row of the value               nil: the values in the order of their writes

A value that expired is not there for any call, from the step on whose time is late enough. Its rows are deleted by
later steps, and when the processor becomes idle, some of them in each commit.
"""

from __future__ import annotations

import heapq
import itertools
import struct
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from cues import codec
from cues.base import clock, names
from cues.base.names import ProcessorKey
from cues.errors import CuesError, QueueNotFound
from cues.native import mypyc_attr
from cues.records import batch, sealed
from cues.steps.failure import StoreTrouble
from cues.steps.state_keys import (
    ABSENT,
    BY_WRITE,
    HASHED,
    ORDER,
    OWN,
    TIMER,
    WRITTEN,
    key_segment,
    segment_of_packed,
    unpacked_segment,
)
from cues.steps.state_view import State

if TYPE_CHECKING:
    from cues.queues.store import Store
    from cues.storage.transaction import StoreTransaction

_HEAD: Final = struct.Struct(">H")
_FIRST: Final = _HEAD.pack(0)
_ONE: Final = _HEAD.pack(1)
_PIECE_BYTES: Final = batch.VALUE_BYTES_MAX - 8 - _HEAD.size
EXPIRED_AT_ONCE: Final = 100
"""Expired values that the commit of a step deletes, besides two for each value that it writes."""
_AT: Final = struct.Struct(">Q")
CACHE_ROWS_MAX: Final = 200_000
CACHE_BYTES_MAX: Final = 64 << 20
VERIFY_ROWS: Final = 50_000
VERIFY_BYTES: Final = 16 << 20

RANGE_ROWS: Final = 256
"""The most rows that one read transaction of :meth:`StateTable.range` copies. The first one copies four: most callers
want few rows."""
_FIXED_VALUES: Final = frozenset((int, str, float, bool, bytes, type(None), type(ABSENT)))
"""Types whose values cannot be changed in place, beside tuples of them."""
_SURE_VALUES: Final = frozenset((int, float, bool, type(None), type(ABSENT)))
"""Those of them that can always be packed."""
_SURE_CHARACTERS: Final = 100
"""A longer text is packed by the call that assigns it."""


Changes = dict[bytes, bytes | None]
"""Packed values by row; None deletes the row."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StateTable:
    """The state of one processor, with the changes of the step that runs."""

    def __init__(self, store: Store | None, processor: ProcessorKey, ttl_ns: int | None = None) -> None:
        """``store``: None for a subclass that has its rows elsewhere. ``ttl_ns``: values that were not written for this
        time expire; None: they stay."""
        self._store: Any = store
        self.paths: tuple[str, ...] = () if store is None else (store.path, store.directory)
        """The paths of the store, as its errors name it."""
        self.ttl_ns = ttl_ns
        self.visible = self.packed if ttl_ns is None else self._unexpired
        """Returns the value of a row as calls see it."""
        self._timed: bool | None = None if ttl_ns is None else True
        """True if the times of writes are kept; None if that is not known yet."""
        self._now = self._last_now = 0
        self._name = names.state_database(processor)
        self.trouble = StoreTrouble()
        """Notes the errors of the store in reads for the user's function."""
        self._database: Any = None
        self._missing = False
        self._cache: Changes = {}
        self._cache_bytes = 0
        self.packs_late = False
        """True if :meth:`keep` may be used: the times of writes need changes that are packed."""
        self.known: dict[bytes, Any] = {}
        """The values of rows that were read or assigned, if they cannot be changed in place, and changes pack late."""
        self._late: dict[bytes, Any] = {}
        """Changes of the step that are not packed yet."""
        self._step: Changes = {}
        self._step_order: list[bytes] | None = None
        """The rows of the step in their order, from the first :meth:`range` of a step on."""
        self._shared = _Shared(self)
        self.call = Layer(self)
        """The layer of calls that run one at a time."""

    def layer(self, key: bytes | None) -> Layer:
        """A layer for a concurrent call; it sees the state under ``key`` (see :func:`key_segment`), or none."""
        return Layer(self._shared, key or b"")

    def apart(self) -> Layer:
        """A layer for a call that may continue after its timeout; it sees the whole state."""
        return Layer(self._shared)

    def view(self, key: Any) -> State:
        """The fields under ``key``."""
        return self.call.view(key)

    # --- for layers ---

    def packed(self, row: bytes) -> bytes | None:
        """The value of a row, without the changes of running calls."""
        if row in self._late:
            self._pack_late((row,))
        if row in self._step:
            return self._step[row]
        if row in self._cache:
            return self._cache[row]
        with self.trouble:
            packed = self._read(row) if self._open() else None
        self._remember(row, packed)
        return packed

    def _read(self, row: bytes) -> bytes | None:
        """Read the committed value of a row. Raises :class:`StoreDamaged` for a wrong checksum."""
        with self._store.core.view() as txn:
            return self._read_in(txn, txn.cursor(self._database), row)

    def _read_in(self, txn: StoreTransaction, cursor: Any, row: bytes) -> bytes | None:
        if not cursor.set_range(row + _FIRST):
            return None
        key, first = cursor.item()
        if key != row + _FIRST:
            self._check_row(key, first)  # a flipped bit of the key that is sought gives the row another place
            return None
        (count,) = _HEAD.unpack_from(first, 8)
        more = [txn.get(row + _HEAD.pack(n), default=b"", db=self._database) for n in range(1, count)]
        values = [first, *more]
        for number, value in enumerate(values):
            self._check_row(row + _HEAD.pack(number), value)
        return b"".join(value[8 + _HEAD.size :] for value in values)

    def load(self, rows: list[bytes]) -> None:
        """Read rows that are not in memory, in transactions of some hundred rows."""
        rows = [row for row in rows if row not in self._cache and row not in self._step and row not in self._late]
        if not self._open():
            for row in rows:
                self._remember(row, None)
            return
        for at in range(0, len(rows), RANGE_ROWS):
            with self.trouble, self._store.core.view() as txn:
                cursor = txn.cursor(self._database)
                for row in rows[at : at + RANGE_ROWS]:
                    self._remember(row, self._read_in(txn, cursor, row))

    def _check_row(self, key: bytes, value: bytes) -> None:
        if not piece_intact(key, value):
            raise sealed.damaged(f"row of {self._name.decode()}", "the checksum of its key and value fails")

    def verify(self) -> None:
        """Compare the seals of the rows, at a start: a flipped bit in a key gives its value to another key.

        Only the first rows are compared (:data:`VERIFY_ROWS`, :data:`VERIFY_BYTES`), so that a start takes no longer;
        ``cues check`` compares all. Raises :class:`StoreDamaged`.
        """
        if self._open():
            left = VERIFY_BYTES
            with self._store.core.view() as txn:
                for key, value in itertools.islice(txn.cursor(self._database), VERIFY_ROWS):
                    self._check_row(key, value)
                    left -= len(value)
                    if left < 0:
                        return

    def rows(self, prefix: bytes) -> dict[bytes, bool]:
        """The rows under a key, and whether they exist, without the changes of running calls."""
        self._pack_late()
        exists: dict[bytes, bool] = {}
        if self._open():
            with self.trouble, self._store.core.view() as txn:
                cursor = txn.cursor(self._database)
                if cursor.set_range(prefix):
                    for key in cursor.iternext(values=False):
                        if not key.startswith(prefix):
                            break
                        if key[-2:] == b"\0\0":
                            exists[key[:-2]] = True
        for row, packed in self._step.items():
            if row.startswith(prefix):
                exists[row] = packed is not None
        if self.ttl_ns is not None:
            exists = {row: there and not self._is_expired(row) for row, there in exists.items()}
        return exists

    def range(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """The existing rows from ``low`` to before ``high``, in order, without the changes of running calls."""
        rows = self._all(low, high)
        return rows if self.ttl_ns is None else (row for row in rows if not self._is_expired(row))

    def _all(self, low: bytes, high: bytes) -> Iterator[bytes]:
        self._pack_late()
        if self._step_order is None:
            self._step_order = sorted(self._step)
        order = self._step_order
        changed = order[bisect_left(order, low) : bisect_left(order, high)]
        if not changed:
            return self._stored(low, high)
        stored = (row for row in self._stored(low, high) if row not in self._step)
        return heapq.merge(stored, [row for row in changed if self._step[row] is not None])

    def settle(self, changes: Changes) -> Changes:
        """Keep the changes of a call; return them, with those of the times of their writes."""
        if self._timed is None:
            self._timed = next(self._stored(WRITTEN, BY_WRITE), None) is not None  # ttl= was declared before
            self.packs_late = not self._timed and self._store is not None
        if self._timed:
            changes = changes | self._times_of(changes)
        for row in changes:
            self.known.pop(row, None)
            self._late.pop(row, None)
        self._change(changes)
        return changes

    def keep(self, values: dict[bytes, Any]) -> None:
        """Keep changes of a call whose values are packed with the step. Their rows were read."""
        self.known.update(values)
        self._late.update(values)

    def _pack_late(self, rows: Iterable[bytes] = ()) -> None:
        """Pack the changes that :meth:`keep` has left, those of ``rows`` or all; drop those that change nothing."""
        if self._late:
            values = [(row, self._late.pop(row)) for row in rows or tuple(self._late)]
            packed = [(row, None if value is ABSENT else codec.pack(value)) for row, value in values]
            self._change({row: new for row, new in packed if row in self._step or new != self._cache.get(row)})

    def _change(self, changes: Changes) -> None:
        if self._step_order is not None:
            for row in changes:
                if row not in self._step:
                    insort(self._step_order, row)
        self._step.update(changes)

    # --- values that expire ---

    def now(self) -> int:
        """The time of the step in nanoseconds: the clock when one of its calls first needs it. It never goes back."""
        if not self._now:
            self._now = self._last_now = max(self._last_now, clock.now_ns())
        return self._now

    def _written(self, row: bytes) -> int | None:
        packed = self.packed(WRITTEN + row)
        return None if packed is None else codec.unpack(packed)

    def _is_expired(self, row: bytes) -> bool:
        if self.ttl_ns is None or row[:1] in OWN:
            return False
        written = self._written(row)
        return written is not None and written + self.ttl_ns <= self.now()

    def _unexpired(self, row: bytes) -> bytes | None:
        packed = self.packed(row)
        return None if packed is None or self._is_expired(row) else packed

    def _times_of(self, changes: Changes) -> Changes:
        """The changes of the times of writes that belong to changes of values."""
        times: Changes = {}
        for row, packed in changes.items():
            if row[:1] in OWN:
                continue
            before = self._written(row)
            if before is not None:
                ordered = BY_WRITE + _AT.pack(before) + row
                self.packed(ordered)  # write() deletes rows that were read
                times[ordered] = None
            if packed is not None:
                times[BY_WRITE + _AT.pack(self.now()) + row] = codec.pack(None)
            if packed is not None or before is not None:
                times[WRITTEN + row] = None if packed is None else codec.pack(self.now())
        return times

    def expire(self, count: int = EXPIRED_AT_ONCE) -> int:
        """Delete values that expired, with the step: up to ``count``, and two for each of its changes. Return how many.

        A value that the step has written has a row with another time by now.
        """
        if self.ttl_ns is None:
            return 0
        count += 2 * len(self._step)
        last = _AT.pack(max(0, self.now() - self.ttl_ns) + 1)
        expired: Changes = {}
        number = 0
        for row in self._stored(BY_WRITE, BY_WRITE + last):
            value = row[1 + _AT.size :]
            if row in self._step:
                continue
            for gone in (row, value, WRITTEN + value):
                self.packed(gone)  # write() deletes rows that were read
                expired[gone] = None
            number += 1
            if number == count:
                break
        self._step.update(expired)
        return number

    # --- timers ---

    def first_due(self) -> int | None:
        """The time of the first committed timer in nanoseconds; None without one. Safe in any thread."""
        if not self._open():
            return None
        with self._store.core.view() as txn:
            cursor = txn.cursor(self._database)
            row = cursor.key() if cursor.set_range(ORDER) else b""
        return _AT.unpack_from(row, 1)[0] if row[:1] == ORDER else None

    def due(self, now_ns: int, count: int) -> list[tuple[bytes, Any, str | None, int]]:
        """The first committed timers that are due: row in the order of time, key, name, time."""
        if not self._open():
            return []
        with self._store.core.view() as txn:
            cursor = txn.cursor(self._database)
            rows: list[bytes] = []
            if cursor.set_range(ORDER):
                for row in cursor.iternext(values=False):
                    if row[:1] != ORDER or _AT.unpack_from(row, 1)[0] > now_ns or len(rows) == count:
                        break
                    if row[-2:] == b"\0\0":  # the first piece of its value
                        rows.append(bytes(row[:-2]))
        return [(row, *codec.unpack(self.packed(row) or b""), _AT.unpack_from(row, 1)[0]) for row in rows]

    # --- for the step ---

    def only(self, changes: Iterable[Changes]) -> None:
        """Keep these changes of the step, in this order, and drop the others: the step was cut before them."""
        self._drop_step()
        self.known.clear()
        for some in changes:
            self._step.update(some)

    def forget(self) -> None:
        """Drop all values in memory: the step is void, or another owner may have written."""
        self.call.discard()
        self._drop_step()
        self._drop_rows()

    @property
    def changed(self) -> bool:
        if self._late:
            self._pack_late()
        return bool(self._step)

    def pages(self) -> int:
        """The largest number of pages that the step's changes take."""
        self._pack_late()
        return sum(1 + len(packed or b"") // _PIECE_BYTES for packed in self._step.values())

    def ensure(self) -> None:
        """Make or open the table's database; call it before a commit that writes to it."""
        if not self._open():
            self._store.core.commit(self._store.core.create_database, self._name)
            self._missing = False
            self._open()

    def database(self) -> Any:
        """Return the handle of the table's database; None if it was never written."""
        return self._database if self._open() else None

    def exists(self) -> bool:
        """Return whether the table was ever written."""
        return self._open()

    def write(self, txn: StoreTransaction) -> None:
        """Write the changes of the step inside its commit, after :meth:`ensure`."""
        self._pack_late()
        written: list[tuple[bytes, bytes]] = []
        for row, packed in self._step.items():
            pieces = [] if packed is None else _pieces(row, packed)
            written += pieces
            if (old := self._cache.get(row)) is not None:
                for number in range(len(pieces), max(1, -(-len(old) // _PIECE_BYTES))):
                    txn.delete(row + _HEAD.pack(number), db=self._database)
        txn.cursor(self._database).putmulti(written)

    def committed(self) -> None:
        """Keep the committed values. Rows that were only read are in memory too, and their number is bounded here."""
        self._now = 0
        if not self._cache and not self._step:
            return
        for row, packed in self._step.items():
            self._remember(row, packed)
        self._drop_step()
        self._bound()

    def committed_ahead(self, changes: Changes) -> None:
        """Keep values that another table of this state has committed; :meth:`settle` returned them."""
        self._missing = False
        for row, packed in changes.items():
            if row in self._step and self._step[row] is packed:  # else it has changed again
                del self._step[row]
            self._remember(row, packed)
        self._step_order = None
        self._bound()

    # --- inside ---

    def _bound(self) -> None:
        if len(self._cache) > CACHE_ROWS_MAX or self._cache_bytes > CACHE_BYTES_MAX:
            self._drop_rows()

    def _drop_rows(self) -> None:
        self.known.clear()
        self._cache.clear()
        self._cache_bytes = 0

    def _drop_step(self) -> None:
        self._now = 0
        self._late.clear()
        self._step.clear()
        self._step_order = None

    def _stored(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """The committed rows from ``low`` to before ``high``, in order, read in short transactions."""
        found, most = self._open(), 4
        while found:
            rows: list[bytes] = []
            with self.trouble, self._store.core.view() as txn:
                cursor = txn.cursor(self._database)
                found = cursor.set_range(low)
                for key in cursor.iternext(values=False) if found else ():
                    if key >= high or len(rows) == most:
                        break
                    if key[-2:] == b"\0\0":
                        rows.append(key[:-2])
            yield from rows
            found = len(rows) == most
            most = min(4 * most, RANGE_ROWS)
            low = rows[-1] + b"\xff\xff" if rows else high

    def _open(self) -> bool:
        if self._database is None and not self._missing:
            try:
                with self.trouble:
                    self._database = self._store.core.database(self._name)
            except QueueNotFound:
                self._missing = True  # until this owner makes it: no other process does
        return self._database is not None

    def _remember(self, row: bytes, packed: bytes | None) -> None:
        self._cache[row] = packed
        self._cache_bytes += len(row) + len(packed or b"")


class _Shared:
    """The table for the layers of concurrent calls, which use it one at a time."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self.packs_late = False
        self.known: dict[bytes, Any] = {}

    def visible(self, row: bytes) -> bytes | None:
        with self._lock:
            return self._table.visible(row)

    def keep(self, values: dict[bytes, Any]) -> None:
        raise AssertionError("concurrent calls pack their changes")

    def load(self, rows: list[bytes]) -> None:
        with self._lock:
            self._table.load(rows)

    @property
    def ttl_ns(self) -> int | None:
        return self._table.ttl_ns

    def rows(self, prefix: bytes) -> dict[bytes, bool]:
        with self._lock:
            return self._table.rows(prefix)

    def range(self, low: bytes, high: bytes) -> Iterator[bytes]:
        with self._lock:
            return iter(list(self._table.range(low, high)))

    def settle(self, changes: Changes) -> Changes:
        with self._lock:
            return self._table.settle(changes)


class Layer:
    """The values that one running call has read and assigned, as objects, over the packed changes of the step."""

    __slots__ = ("_assigned", "_key", "_read", "_table", "_values", "settled")

    def __init__(self, table: StateTable | _Shared, key: bytes | None = None) -> None:
        """``key``: the only visible key, while other calls use other keys."""
        self._table = table
        self._key = key
        self._values: dict[bytes, Any] = {}
        """The values that the call has read or assigned."""
        self._assigned: dict[bytes, Any] = {}
        self._read: Changes = {}
        """The packed form of values that were read and may be changed in place."""
        self.settled: Changes = {}
        """The changes of the last call that returned."""

    @property
    def touched(self) -> bool:
        """True if the call has used the state."""
        return bool(self._values)

    def view(self, key: Any) -> State:
        """The fields under ``key``."""
        segment = self._segment_of(key)
        if type(key) not in _FIXED_VALUES:
            self._adopt(segment_of_packed(codec.pack(key)), segment)
        return State(self, segment)

    def timer(self, key: Any, name: str | None) -> int | None:
        """The time of a timer in nanoseconds; None if it is not set."""
        at = self.get(TIMER + self._segment_of(key) + key_segment(name))
        return None if at is ABSENT else at

    def set_timer(self, key: Any, name: str | None, at_ns: int | None) -> None:
        """Set a timer, or cancel it with None. It replaces the timer of this key and name."""
        row = self._segment_of(key) + key_segment(name)
        before = self.get(TIMER + row)
        if before is not ABSENT:
            self.set(ORDER + _AT.pack(before) + row, ABSENT)
        self.set(TIMER + row, ABSENT if at_ns is None else at_ns)
        if at_ns is not None:
            self.set(ORDER + _AT.pack(at_ns) + row, [key, name])

    def _segment_of(self, key: Any) -> bytes:
        segment = key_segment(key)
        if self._key is not None and segment != self._key:
            raise CuesError(
                f"The key {key!r} is not the key of the message; other calls may be using its state now.",
                "use process.state, or concurrency=1.",
            )
        return segment

    def _adopt(self, former: bytes, segment: bytes) -> None:
        """Move rows of an older version, whose key has the fields of its dicts in another order."""
        if former == segment:
            return
        for row in self.rows(former):
            value = self.get(row)
            self.set(row, ABSENT)
            self.set(segment + row[len(former) :], value)

    def get(self, row: bytes) -> Any:
        if row in self._values:
            return self._values[row]
        table = self._table
        if row in table.known:
            value = table.known[row]
        else:
            packed = table.visible(row)
            value = ABSENT if packed is None else codec.unpack(packed)
            if type(value) not in _FIXED_VALUES and not _is_sure(value):
                self._read[row] = packed
            elif table.packs_late and _is_sure(value):
                table.known[row] = value
        self._values[row] = value
        return value

    def load(self, rows: list[bytes]) -> None:
        """Read rows in few transactions, which :meth:`get` is called with next."""
        self._table.load([row for row in rows if row not in self._values])

    def set(self, row: bytes, value: Any) -> None:
        if row not in self._values and row not in self._table.known:
            self._table.visible(row)  # the commit deletes the pieces of rows that were read
        self._values[row] = self._assigned[row] = value

    def rows(self, prefix: bytes) -> list[bytes]:
        """The existing rows under a key, in the order of the table, also those of this call and step."""
        exists = self._table.rows(prefix)
        for row, value in self._values.items():
            if row.startswith(prefix):
                exists[row] = value is not ABSENT
        return sorted(row for row in exists if exists[row])

    def range(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """The existing rows from ``low`` to before ``high``, in order, also those of this call and step."""
        mine = sorted(row for row in self._values if low <= row < high)
        rows = self._table.range(low, high)
        if not mine:
            return rows
        stored = (row for row in rows if row not in self._values)
        return heapq.merge(stored, [row for row in mine if self._values[row] is not ABSENT])

    def settle(self) -> None:
        """Keep the changes of a call that returned. Raises :class:`CodecError` for a value that cannot be encoded."""
        table = self._table
        if table.packs_late and not self._read and _SURE_VALUES.issuperset(map(type, self._assigned.values())):
            table.keep(self._assigned)  # most calls assign numbers
            self._assigned.clear()
            self._values.clear()
            return
        late: dict[bytes, Any] = {}
        changed: Changes = {}
        for row, value in self._assigned.items():
            if table.packs_late and _is_sure(value):
                late[row] = value
                continue
            new = None if value is ABSENT else codec.pack(value)
            before = self._read[row] if row in self._read else table.visible(row)
            if new != before or (table.ttl_ns is not None and new is not None):  # the same value, for a new time
                changed[row] = new
        for row, packed in self._read.items():
            if row not in self._assigned:
                new = codec.pack(self._values[row])
                if new != packed:
                    changed[row] = new
        self.discard()
        if late:
            table.keep(late)
        if changed:
            self.settled = table.settle(changed)

    def discard(self) -> None:
        """After a call that failed: drop its changes."""
        self._values.clear()
        if self._assigned:
            self._assigned.clear()
        if self._read:
            self._read.clear()


def rows_under(store: Store, processor: ProcessorKey, after: bytes = b"") -> Iterator[tuple[bytes, Any, Any, Any]]:
    """The committed rows of a processor's state, in the order of the table: row, key, field, value.

    ``after`` is the row after which they begin. A key of more than 200 bytes is kept as its hash, which is what is
    returned then. Rows are read in short transactions of a hundred.
    """
    table = StateTable(store, processor)
    if not table._open():
        return
    while True:
        with store.core.view() as txn:
            cursor = txn.cursor(table._database)
            found = cursor.set_range(after + b"\xff\xff") if after else cursor.first()
            keys = cursor.iternext(values=False) if found else iter(())
            rows = list(itertools.islice((key[:-2] for key in keys if key[-2:] == b"\0\0"), 100))
        for row in rows:
            packed = None if row[:1] in OWN else table.packed(row)
            if packed is not None:
                key, rest = unpacked_segment(row)
                field, _ = unpacked_segment(rest)
                value = codec.unpack(packed)
                yield row, key, *(value if rest[0] == HASHED else (field, value))
        if not rows:
            return
        after = rows[-1]


def _is_sure(value: Any) -> bool:
    """Return whether a value cannot change, and packing it cannot fail."""
    if type(value) is tuple:
        return _SURE_VALUES.issuperset(map(type, value)) or all(map(_is_plain, value))
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _SURE_VALUES or (kind is str and len(value) <= _SURE_CHARACTERS and value.isascii())


def _pieces(row: bytes, packed: bytes) -> list[tuple[bytes, bytes]]:
    if len(packed) <= _PIECE_BYTES:
        return [_piece(row + _FIRST, _ONE + packed)]
    chunks = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
    head = _HEAD.pack(len(chunks))
    return [_piece(row + _HEAD.pack(n), head + chunk) for n, chunk in enumerate(chunks)]


def _piece(key: bytes, body: bytes) -> tuple[bytes, bytes]:
    return key, batch.checksum(key + body) + body


def piece_intact(key: bytes, value: bytes) -> bool:
    """Return whether a piece has the checksum of its key and its bytes.

    An earlier version wrote the checksum of the bytes alone, with the number of the piece as its seed.
    """
    if len(value) < 8 + _HEAD.size:
        return False
    seal, body = value[:8], value[8:]
    return seal == batch.checksum(key + body) or seal == batch.checksum(body, seed=_HEAD.unpack(key[-2:])[0])
