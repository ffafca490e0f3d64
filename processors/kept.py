"""Rows of columns that a join keeps: blocks of them are one value of its state, in place of one for each row.

    Rows       rows of one input, in the order of their times, with what the state knows of each
    Gathered   rows of several places, as arrays; and as messages, where they are needed

A block is another form of the rows of state that messages have: each of its rows waits. So what is called with messages
makes rows of state of the blocks that it needs (:meth:`cues.processors.joins._Join.expand`), and what is called with
columns takes both forms.

The columns of a block are those of the messages, and ``q/time`` (microseconds), ``q/number``, ``q/key`` (the digest of
the key), and ``q/paired``. Blocks are for messages whose values are the same after the state (:func:`plain`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cues import codec
from cues.processors import columns, vectors

FEW = 256
"""Fewer rows of a call that wait are rows of state."""
BLOCK_ROWS = 4096
"""The most rows of a block. A block is written again when some of its rows are complete."""
BLOCKS_MAX = 256
"""Calls with columns do not take more blocks."""
PAIRS_MAX = 500_000
"""Calls with columns do not make more pairs."""
_FACTS: Final = ("q/time", "q/number", "q/key", "q/paired")
_TYPES: Final = ("integer", "float32", "float64", "boolean", "string", "large_string", "date32", "null")


Fact = tuple[bool, int, int, int, bytes, bool]
"""Of a message that is kept: whether it is a left one, its time, the watermark that completes it, its number, the
digest of its key, and whether it is in a pair."""


class Rows(NamedTuple):
    """Rows of one input, whose times ascend, and whose numbers do in one time. ``key`` is the place in ``tails``."""

    left: bool
    wait_us: int
    """Time for which a row waits after its own: the watermark completes it a microsecond later."""
    table: Any
    times: Any
    numbers: Any
    keys: Any
    tails: list[bytes]
    paired: Any

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.times)

    def between(self, low: int, high: int) -> Rows:
        """Return the rows from one place to before another."""
        return Rows(
            self.left,
            self.wait_us,
            self.table.slice(low, high - low),
            self.times[low:high],
            self.numbers[low:high],
            self.keys[low:high],
            self.tails,
            self.paired[low:high],
        )

    def unpaired(self) -> Rows:
        """Return the rows without a partner."""
        places = (~self.paired).nonzero()[0]
        return self._replace(
            table=self.table.take(places),
            times=self.times[places],
            numbers=self.numbers[places],
            keys=self.keys[places],
            paired=self.paired[places],
        )

    def done(self, mark: int) -> int:
        """Return the number of rows that are complete at a watermark."""
        return 0 if mark == vectors.NEVER else int(self.times.searchsorted(mark - self.wait_us))

    def facts(self) -> Iterator[Fact]:
        """Yield what is known of each row."""
        columns = self.times, self.numbers, self.keys, self.paired
        for time_us, number, key, paired in zip(*(column.tolist() for column in columns)):
            yield self.left, time_us, time_us + self.wait_us + 1, number, self.tails[key], paired

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the rows."""
        return columns.dicts(self.table, "a join")

    def packed(self) -> bytes:
        """Return the rows as a block."""
        import pyarrow as pa

        keys, found = vectors.compact(self.keys, len(self.tails))
        tails = pa.array([self.tails[place] for place in found.tolist()], pa.binary(16))
        facts = (
            pa.array(self.times),
            pa.array(self.numbers),
            pa.DictionaryArray.from_arrays(pa.array(keys, pa.int32()), tails),
            pa.array(self.paired),
        )
        table = self.table
        for name, column in zip(_FACTS, facts):
            table = table.append_column(name, column)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def unpacked(block: bytes, left: bool, wait_us: int) -> Rows:
    """Return the rows of a block."""
    import numpy as np
    import pyarrow as pa

    with pa.ipc.open_stream(pa.py_buffer(block)) as reader:
        table = reader.read_all()
    times, numbers, keys, paired = (table.column(name).combine_chunks() for name in _FACTS)
    keys = keys.chunk(0) if isinstance(keys, pa.ChunkedArray) else keys
    return Rows(
        left,
        wait_us,
        table.drop_columns(list(_FACTS)),
        times.to_numpy(),
        numbers.to_numpy(),
        keys.indices.to_numpy().astype(np.int64),
        keys.dictionary.to_pylist(),
        paired.to_numpy(zero_copy_only=False).copy(),
    )


def plain(given: Any) -> Any:
    """Return the table of columns; refuse one with values that could be others after the state."""
    import pyarrow as pa

    table, kinds = given.table, pa.types
    if any(name.startswith("q/") for name in table.column_names):
        raise vectors.RowByRow
    for place, field in enumerate(table.schema):
        kind = field.type
        if kinds.is_string_view(kind):  # pyarrow does not take rows of it
            table = table.set_column(place, field.name, table.column(place).cast(pa.large_string()))
        elif not (
            (kinds.is_timestamp(kind) and kind.tz in (None, "UTC", "+00:00"))
            or any(getattr(kinds, f"is_{name}")(kind) for name in _TYPES)
        ):
            raise vectors.RowByRow
    table.validate(full=True)  # texts, which may be read only later
    return pa.Table.from_arrays(table.columns, names=table.column_names)


class Pool:
    """Messages and rows of several tables, numbered one after another; each is made what it is needed as."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Any]] = []
        self._size = 0

    def add(self, part: Any) -> int:
        """Add messages or a table; return the number of the first one."""
        first = self._size
        self._parts.append((first, part))
        self._size += len(part)
        return first

    def messages(self, numbers: Any) -> list[Any]:
        """Return the messages with these numbers; None for those below 0. The same number is the same object."""
        parts, places = self._chosen(numbers)
        made: list[Any] = []
        for part in parts:
            made += part if type(part) is list else columns.dicts(part, "a join")
        return [None if place < 0 else made[place] for place in places.tolist()]

    def structs(self, numbers: Any) -> Any:
        """Return the same as an array of structs; refuse what it would not hold exactly."""
        import pyarrow as pa

        parts, places = self._chosen(numbers)
        if not parts:
            return pa.nulls(len(places))
        schema = next((part.schema for part in parts if type(part) is not list), None)
        if schema is None:
            raise vectors.RowByRow
        whole = pa.concat_tables([_as_table(part, schema) if type(part) is list else part for part in parts])
        missing = places < 0
        rows = whole.take(pa.array(places, mask=missing)).combine_chunks()
        arrays = [column.chunk(0) for column in rows.columns]
        return pa.StructArray.from_arrays(arrays, names=schema.names, mask=pa.array(missing))

    def _chosen(self, numbers: Any) -> tuple[list[Any], Any]:
        """Return the messages and tables of these numbers, and the place of each among them; -1 for those below 0."""
        import numpy as np
        import pyarrow as pa

        found, places = np.unique(numbers, return_inverse=True)
        missing = int(found.searchsorted(0))
        parts = []
        for first, part in self._parts:
            low, high = found.searchsorted((first, first + len(part))).tolist()
            some = found[low:high] - first
            if type(part) is list and high > low:
                parts.append([part[place] for place in some.tolist()])
            elif high > low:
                parts.append(part if high - low == len(part) else part.take(pa.array(some)))
        return parts, np.maximum(places.reshape(-1) - missing, -1)


def _as_table(messages: list[Any], schema: Any) -> Any:
    """Return messages as a table; refuse those that would be others."""
    import pyarrow as pa

    if any(list(message) != schema.names for message in messages):
        raise vectors.RowByRow
    table = pa.Table.from_pylist(messages, schema)
    if codec.pack(columns.dicts(table, "a join")) != codec.pack(messages):
        raise vectors.RowByRow
    return table


class Gathered:
    """Rows of several places as arrays: ``left``, ``times``, ``numbers``, ``keys``, and ``places`` in the pool."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.tails: dict[bytes, int] = {}
        """The digests of keys, with their numbers in ``keys``."""
        self._parts: list[tuple[Any, ...]] = []

    def key(self, tail: bytes) -> int:
        """Return the number of a key."""
        return self.tails.setdefault(tail, len(self.tails))

    def add(self, rows: Rows) -> None:
        """Add rows."""
        import numpy as np

        keys = np.array([self.key(tail) for tail in rows.tails], np.int64)[rows.keys]
        places = self.pool.add(rows.table) + np.arange(rows.size)
        self._parts.append((np.full(rows.size, rows.left), rows.times, rows.numbers, keys, places))

    def add_messages(self, given: list[tuple[bool, int, int, bytes, Any]]) -> None:
        """Add messages: the input, time, number, digest of the key, and the message of each."""
        import numpy as np

        if given:
            left, times, numbers, tails, messages = map(list, zip(*given))
            places = self.pool.add(messages) + np.arange(len(given))
            keys = np.array([self.key(tail) for tail in tails], np.int64)
            facts = np.array(left, bool), np.array(times, np.int64), np.array(numbers, np.int64)
            self._parts.append((*facts, keys, places))

    def arrays(self) -> tuple[Any, ...]:
        """Return the five arrays of all rows, in the order in which they were added."""
        import numpy as np

        if not self._parts:
            empty = np.zeros(0, np.int64)
            return empty != 0, empty, empty, empty, empty
        return tuple(np.concatenate(some) for some in zip(*self._parts))


def last_before(left: Any, times: Any, numbers: Any, keys: Any, count: int) -> tuple[Any, Any, Any]:
    """Find the row of a table for each left row: the last one of its key, in the order of times, tables, and numbers.

    Return the places of the left rows in this order; for each row the place of the row of its table; and the last row
    of the table of each of ``count`` keys. -1: there is none.
    """
    import numpy as np

    order = np.lexsort((numbers, left, times))
    by_key = order[np.argsort(keys[order], kind="stable")]
    own = keys[by_key]
    tables = np.maximum.accumulate(np.where(left[by_key], -1, np.arange(len(own)))) if len(own) else own
    found = np.where(tables >= own.searchsorted(own), by_key[tables], -1)
    partners = np.empty(len(own), np.int64)
    partners[by_key] = found
    last = np.full(count, -1, np.int64)
    last[own] = found  # of equal ones the last is kept
    return order[left[order]], partners, last


def pairs(keys: Any, low: Any, high: Any, others: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Find the rows of ``others`` (keys, times, numbers) with the key of each row, from its time ``low`` to ``high``.

    Return the places of both rows of each pair: rows in their order, and the others in that of times and numbers.
    """
    import numpy as np

    other_keys, times, numbers = others
    if not len(times):
        return times, times
    base = int(times.min())
    span = int(times.max()) - base + 2
    if (1 + max(int(other_keys.max()), int(keys.max()))) * span >= 1 << 62:
        raise vectors.RowByRow
    order = np.lexsort((numbers, times, other_keys))
    sought = (other_keys * span + (times - base))[order]
    starts = sought.searchsorted(keys * span + np.clip(low - base, 0, span - 1))
    counts = sought.searchsorted(keys * span + np.clip(high - base + 1, 0, span - 1)) - starts
    total = int(counts.sum())
    if total > PAIRS_MAX:
        raise vectors.RowByRow
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(keys)), counts), order[np.repeat(starts, counts) + within]
