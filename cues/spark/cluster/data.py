"""Data files: messages as rows of Parquet, read and written by pyarrow wherever a task runs.

    offset      of the message in its file; its index is that of the file's first message (directory.py) and this
    time        when the step ran that wrote it
    hash        the delivery hash of the step
    value       the packed message; NULL if the typed columns have all of it (typed.py)
    provenance  by queue that the message was made from: index and time there
    meta        what the user has added to the metadata, packed; mostly NULL
    …           fields of the message as typed columns, if the table has some (typed.py)

Provenance is columns in the engine (:mod:`cues.records.provenance`) and a map in the file, which SQL can read. Both
directions work on whole columns, because a call for each message costs more than the message.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cues import codec
from cues.base import clock, names
from cues.buffers import array_of, repeated
from cues.errors import Diverged, Unsupported
from cues.queues.base import PartitionShare, shares_of
from cues.queues.options import QueueOptions
from cues.queues.partitioners import EVERY, UNKEYED, Router
from cues.records import columns
from cues.records.batch import DELAY_MARK
from cues.records.columns import integers
from cues.records.packed import packed_arrays, unpacked
from cues.records.provenance import Provenance
from cues.spark.cluster.directory import DataFile, file_name, placed
from cues.spark.cluster.files import ID, folder_of
from cues.spark.cluster.parquet import FileWriter, StoredFile
from cues.spark.cluster.statistics import Statistics
from cues.spark.cluster.typed import FIELDS, NONE, ROWS, TypedColumns, rows_of, values_of, with_values
from cues.steps.outgoing import place_of

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

_TIME: Final = pa.timestamp("us", tz="UTC")
_PLACE: Final = pa.struct([("t", pa.int64()), ("time", _TIME)])
_MAP: Final = pa.map_(pa.string(), _PLACE)
COLUMNS: Final = pa.schema(
    [
        ("offset", pa.int64()),
        ("time", _TIME),
        ("hash", pa.string()),
        ("value", pa.binary()),
        ("provenance", _MAP),
        ("meta", pa.binary()),
    ]
)
_TIME_AT: Final = COLUMNS.get_field_index("time")
_HASH_AT: Final = COLUMNS.get_field_index("hash")
_HASHES: Final = pa.dictionary(pa.int32(), pa.string())
_HASHES_MAX: Final = 256
"""Most hashes of a dictionary that each row group of a file repeats."""
GROUP_ROWS: Final = 16_384
"""Rows of a row group. A task reads the groups that have its rows."""
_FLUSH_BYTES: Final = 16 << 20
"""Bytes of messages that a writer holds before it writes a row group."""
_PLAIN_BYTES: Final = 1 << 20
"""Bytes of messages without provenance that wait for more, because each array of Arrow has a cost of its own."""


class Piece(NamedTuple):
    """The rows ``start`` to ``stop`` of a data file."""

    folder: str
    file: DataFile
    start: int
    stop: int

    @property
    def begin(self) -> int:
        """The index of the first message."""
        return self.file.first + self.start


def pieces_of(folder: str, files: Sequence[DataFile], low: int, high: int) -> list[Piece]:
    """The pieces of files that hold the messages [low, high)."""
    return [
        Piece(folder, file, max(low - file.first, 0), min(high, file.next) - file.first)
        for file in files
        if file.first < high and file.next > low
    ]


def read(files: Files, piece: Piece, columns: Sequence[str] | None = COLUMNS.names) -> pa.Table:
    """The rows of a piece, with the metadata of its file; ``columns`` None: with all that the file has.

    Raises :class:`Diverged` if the file is gone, or is another one.
    """
    with opened(files, piece) as file:
        groups, skipped = _groups(file.sizes, piece.start, piece.stop)
        return _read(file, groups, columns, piece.start - skipped, piece.stop - piece.start)


def _read(file: StoredFile, groups: Sequence[int], columns: Sequence[str] | None, start: int, length: int) -> pa.Table:
    """Some rows of row groups. Of these columns, ``value`` has the message of each row; ``columns`` None: of some."""
    bare = not file.metadata.keys().isdisjoint((ROWS, FIELDS)) and columns is not None and "value" in columns
    rows = file.read(groups, None if bare else columns).replace_schema_metadata(file.metadata).slice(start, length)
    if not bare:
        return rows
    assert columns is not None
    return with_values(rows).select([name for name in file.schema.names if name in set(columns)])


class RowGroup(NamedTuple):
    """The rows of a piece in one row group of its file. It can be read until the next one is asked for."""

    file: StoredFile
    number: int
    first: int
    """The index of the first message."""
    start: int
    length: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """The rows, with those of these columns that the file has."""
        return _read(self.file, [self.number], columns, self.start, self.length)

    def type_of(self, column: str) -> pa.DataType | None:
        """The type of a column; None if the file does not have it."""
        at = self.file.schema.get_field_index(column)
        return None if at < 0 else self.file.schema.field(at).type


def row_groups(files: Files, piece: Piece) -> Iterator[RowGroup]:
    """The rows of a piece, one row group after another. Raises the errors of :func:`read`."""
    with opened(files, piece) as file:
        groups, low = _groups(file.sizes, piece.start, piece.stop)
        for group in groups:
            high = low + file.sizes[group]
            start = max(piece.start, low)
            yield RowGroup(file, group, piece.file.first + start, start - low, min(piece.stop, high) - start)
            low = high


def read_groups(files: Files, piece: Piece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a piece, one row group after another, each with the index of its first row.

    Raises the errors of :func:`read`.
    """
    for group in row_groups(files, piece):
        yield group.first, group.read(columns)


def last_time(files: Files, folder: str, file: DataFile) -> int:
    """The last time in a file, in microseconds. Reads only its metadata."""
    with opened(files, Piece(folder, file, 0, file.count)) as stored:
        return max(high for _, high in stored.bounds(_TIME_AT))


@contextlib.contextmanager
def opened(files: Files, piece: Piece) -> Iterator[StoredFile]:
    """The file of a piece. Raises :class:`Diverged` if it is gone, or is another one, or is damaged."""
    path = f"{piece.folder}/{piece.file.name}"
    role = "which a step has committed"
    try:
        with StoredFile(files, path, role, COLUMNS) as file:
            if file.rows != piece.file.count:
                raise file.damaged(f"has {file.rows} messages, not {piece.file.count}")
            yield file
    except FileNotFoundError:
        if files.size(ID) is None:
            raise Unsupported(
                f"{socket.gethostname()} does not see {files.url}, where the queues are.",
                "name a directory that this machine and all executors share.",
            ) from None
        raise Diverged(f"{files.url}/{path}, {role}, is missing.", "restore the directory from a copy.") from None


def _groups(sizes: Sequence[int], start: int, stop: int) -> tuple[list[int], int]:
    """The numbers of the row groups that have rows of [start, stop), and the number of rows before them."""
    groups: list[int] = []
    skipped = low = 0
    for number, size in enumerate(sizes):
        high = low + size
        if high <= start:
            skipped = high
        elif low < stop:
            groups.append(number)
        low = high
    return groups, skipped


class Rows:
    """Consecutive or chosen messages of one queue, as Python values."""

    def __init__(
        self, indices: Sequence[int], table: pa.Table, pieces: Sequence[tuple[int, pa.Table | None]] | None = None
    ) -> None:
        """``pieces``, for a function of tables: the numbers of rows of the pieces, and their columns (typed.py)."""
        self.indices = indices
        self.table = table
        self.pieces = pieces

    def __len__(self) -> int:
        return self.table.num_rows  # type: ignore[no-any-return]

    def messages(self) -> list[Any]:
        """Decode the messages into new dicts."""
        return unpacked(self.packed)

    @functools.cached_property
    def packed(self) -> pa.ChunkedArray:
        """The packed messages. Those that are only columns are packed now."""
        value, at = self.table.column("value"), 0
        if not value.null_count:
            return value
        arrays: list[pa.Array] = []
        for count, rows in self.pieces or ():
            own = value.slice(at, count)
            arrays += own.chunks if rows is None else values_of(own, rows)
            at += count
        return pa.chunked_array(arrays, pa.binary())

    @functools.cached_property
    def values(self) -> list[bytes]:
        return self.packed.to_pylist()  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """The bytes of the messages: of those that are only columns, the bytes of these."""
        packed = pc.sum(pc.binary_length(self.table.column("value"))).as_py() or 0
        return int(packed) or sum(rows.nbytes for _, rows in self.pieces or () if rows is not None)

    @functools.cached_property
    def times_us(self) -> list[int]:
        return self.table.column("time").cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]

    @functools.cached_property
    def hashes(self) -> list[str | None]:
        return self.table.column("hash").to_pylist()  # type: ignore[no-any-return]

    @functools.cached_property
    def provenance(self) -> Provenance:
        """The provenance, without the place on this queue."""
        return _provenance(self.table)

    @functools.cached_property
    def times_ns(self) -> list[int] | None:
        """The time before which each message is not delivered, in nanoseconds, 0 without one; None: none has one."""
        meta = self.table.column("meta")
        if meta.null_count == len(meta) or not any(raw and DELAY_MARK in raw for raw in meta.to_pylist()):
            return None
        return self.provenance.times()

    def chosen(self, offsets: Sequence[int]) -> Rows:
        """The messages at these offsets, which are in order."""
        some = None
        if self.pieces is not None:
            some, at = [], 0
            for count, rows in self.pieces:
                here = [offset - at for offset in offsets if at <= offset < at + count]
                if here:
                    some.append((len(here), None if rows is None else rows.take(integers(here))))
                at += count
        return Rows([self.indices[offset] for offset in offsets], self.table.take(integers(offsets)), some)

    def slice(self, start: int, stop: int) -> Rows:
        some = None
        if self.pieces is not None:
            some, at = [], 0
            for count, rows in self.pieces:
                low, high = max(start - at, 0), min(stop - at, count)
                if low < high:
                    some.append((high - low, None if rows is None else rows.slice(low, high - low)))
                at += count
        return Rows(self.indices[start:stop], self.table.slice(start, stop - start), some)


def read_rows(files: Files, pieces: Sequence[Piece], as_tables: bool = False) -> Rows:
    """The messages of consecutive pieces of one queue. ``as_tables``: also the columns of those that have some."""
    tables = [read(files, piece, None if as_tables else COLUMNS.names) for piece in pieces]
    stored = None
    if as_tables:
        tables = [table if ROWS in (table.schema.metadata or {}) else with_values(table) for table in tables]
        stored = [(table.num_rows, rows_of(table)) for table in tables]
    table = pa.concat_tables([table.select(COLUMNS.names).replace_schema_metadata() for table in tables])
    return Rows(range(pieces[0].begin, pieces[0].begin + table.num_rows), table, stored)


# --- provenance ---------------------------------------------------------------------------------


def _provenance(table: pa.Table) -> Provenance:
    count = table.num_rows
    array = table.column("provenance").combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], _MAP)
    extra: list[Any] | None = None
    if table.column("meta").null_count < count:
        extra = [raw and codec.unpack(raw) for raw in table.column("meta").to_pylist()]
    columns: dict[str, tuple[Any, Any]] = {}
    if len(array) and array.null_count < count:
        ends = array.offsets.to_pylist()
        queues = array.keys.slice(ends[0], ends[-1] - ends[0]).to_pylist()
        places = array.items.slice(ends[0], ends[-1] - ends[0])
        indices = places.field("t").to_pylist()
        times = places.field("time").cast(pa.int64()).to_pylist()
        order = queues[: ends[1] - ends[0]]
        if order and len(queues) == count * len(order) and queues == order * count:  # all have the same queues
            for at, queue in enumerate(order):
                columns[queue] = _indices(indices[at :: len(order)]), _times(times[at :: len(order)])
        else:
            columns = _mixed(ends, queues, indices, times)
    return Provenance(count, columns, extra)


def _mixed(ends: list[int], queues: list[str], indices: list[Any], times: list[Any]) -> dict[str, tuple[Any, Any]]:
    """The columns of messages that were on different queues. A 0 means that a message was not on that queue."""
    count = len(ends) - 1
    columns = {queue: ([0] * count, [0] * count) for queue in dict.fromkeys(queues)}
    for row in range(count):
        for at in range(ends[row] - ends[0], ends[row + 1] - ends[0]):
            t, time = columns[queues[at]]
            t[row], time[row] = indices[at] or 0, (times[at] or 0) * 1000
    return {queue: (t if any(t) else None, time if any(time) else None) for queue, (t, time) in columns.items()}


def _indices(t: list[int | None]) -> Any:
    if t[0] is None:
        return None if not any(t) else [one or 0 for one in t]
    if None not in t and t[-1] - t[0] == len(t) - 1 and t == list(range(t[0], t[0] + len(t))):  # type: ignore[operator]
        return range(t[0], t[0] + len(t))
    return [one or 0 for one in t]


def _times(us: list[int | None]) -> Any:
    first = us[0]
    if us.count(first) == len(us):
        return None if first is None else first * 1000
    return [(one or 0) * 1000 for one in us]


def provenance_arrays(provenance: Provenance | None, count: int) -> list[pa.Array]:
    """The columns provenance and meta of ``count`` messages."""
    none = [pa.nulls(count, _MAP), pa.nulls(count, pa.binary())]
    if not provenance:
        return none
    keys = list(provenance.columns)
    if keys:
        t = [_spread(t, count) for t, _ in provenance.columns.values()]
        times = [_spread(time, count) for _, time in provenance.columns.values()]
        flat_t = [one or None for row in zip(*t) for one in row] if len(keys) > 1 else [one or None for one in t[0]]
        flat_times = [one // 1000 if one else None for row in zip(*times) for one in row]
        places = pa.StructArray.from_arrays(
            [pa.array(flat_t, pa.int64()), pa.array(flat_times, pa.int64()).cast(_TIME)], fields=list(_PLACE)
        )
        queues = pa.array(keys * count, pa.string())
        absent = [t is None and time is None for t, time in zip(flat_t, flat_times)]
        cuts = list(range(0, len(keys) * count + 1, len(keys)))
        if any(absent):
            kept = pa.array([not one for one in absent])
            queues, places = queues.filter(kept), places.filter(kept)
            gone = [sum(absent[low:high]) for low, high in itertools.pairwise(cuts)]
            cuts = list(itertools.accumulate((len(keys) - less for less in gone), initial=0))
        none[0] = pa.MapArray.from_arrays(pa.array(cuts, pa.int32()), queues, places).cast(_MAP)
    if provenance.extra is not None:
        extra = provenance.extra if isinstance(provenance.extra, list) else [provenance.extra] * count
        none[1] = pa.array([codec.pack(one) if one else None for one in extra], pa.binary())
    return none


def _spread(column: Any, count: int) -> Sequence[Any]:
    return [column] * count if column is None or type(column) is int else column


def with_place(provenance: Provenance, queue: str, kept: frozenset[str], rows: Rows) -> Provenance:
    """The provenance of messages with their places on this queue; as :meth:`cues.records.batch.Batch.provenance`."""
    columns = dict(provenance.columns)
    if "t" in kept or "time" in kept:
        times = [us * 1000 for us in rows.times_us] if "time" in kept else None
        if times and times.count(times[0]) == len(times):
            times = times[0]  # type: ignore[assignment]
        indices = rows.indices if type(rows.indices) is range else list(rows.indices)
        columns[queue] = (indices if "t" in kept else None, times)
    if "tx" in kept and names.TX not in columns:
        columns[names.TX] = (rows.indices if type(rows.indices) is range else list(rows.indices), None)
    return Provenance(provenance.count, columns, provenance.extra)


def hashes_of(hashes: Sequence[str | None]) -> pa.Array:
    """An array of delivery hashes, null where there is none. ``pa.array`` would import pandas, in each worker."""
    texts = array_of([(hash or "").encode() for hash in hashes], pa.string())
    return pc.if_else(pc.equal(texts, array_of([b""], pa.string())[0]), pa.nulls(1, pa.string())[0], texts)


def hash_runs(hashes: Sequence[str | None], counts: Iterable[int]) -> pa.Array:
    """Delivery hashes, each as many times as its count says. Few messages have a hash of their own: a dictionary."""
    known = hashes_of(hashes).dictionary_encode()
    return pa.DictionaryArray.from_arrays(repeated(known.indices, counts), known.dictionary)


def consecutive(low: int, count: int) -> pa.Array:
    """The integers from ``low`` on."""
    ones = repeated(integers([1]), [count]) if count else integers([])
    return pc.cumulative_sum(ones, start=integers([low - 1])[0])


# --- writing ------------------------------------------------------------------------------------


class Writer:
    """Writes one data file, which appears when it is closed and counts when a step commits it."""

    def __init__(
        self,
        files: Files,
        folder: str,
        processor: str,
        record: int,
        time_us: int,
        columns: TypedColumns = NONE,
        partition: int = 0,
        first: int = 0,
    ) -> None:
        """``first`` is the index that the first message will probably have; 0: it is not known."""
        self._files = files
        self._folder = folder
        self._partition = partition
        self._time_us = time_us
        self._typed = columns
        self._schema = pa.schema([*COLUMNS, *columns.schema])
        self._encoded = self._schema.set(_HASH_AT, pa.field("hash", _HASHES))
        self._name = placed(file_name(processor, record), partition, first)
        self._statistics = Statistics()
        self._open: Any = None
        self._kind: pa.DataType = _HASHES
        """The type in which hashes are given to the writer of the file."""
        self._target: Any = None
        self._whole: list[str] | None = []
        """The names of the fields, if the typed columns have the whole of each message; empty before the first."""
        self._bare: list[str] | None = None
        """The names of the fields of the messages that are only in the typed columns; None if there are none."""
        self.batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self.count = 0

    def add(
        self,
        values: Sequence[bytes] | pa.Array | pa.Table,
        hashes: Sequence[str | None] | pa.Array,
        provenance: Provenance | None,
        times_us: Sequence[int] | pa.Array | None = None,
    ) -> None:
        """Add messages, with the provenance of each. ``values`` are packed messages, or a table whose rows they are.

        Arrays of Arrow are stored as they are; a list is read value by value.
        """
        whole = self._typed.whole(values.schema) if isinstance(values, pa.Table) else None
        self._note(whole)
        bare = self._is_bare(whole)
        for low in range(0, len(values), GROUP_ROWS):
            high = min(low + GROUP_ROWS, len(values))
            some = values.slice(low, high - low) if isinstance(values, pa.Table) else None
            if times_us is None:
                times = repeated(integers([self._time_us]), [high - low])
            else:
                times = times_us[low:high] if isinstance(times_us, pa.Array) else integers(times_us[low:high])
            if some is not None:
                stored = pa.nulls(high - low, pa.binary()) if bare else pa.concat_arrays(packed_arrays(some))
            else:
                stored = values[low:high] if isinstance(values, pa.Array) else array_of(values[low:high], pa.binary())
            known = hashes[low:high] if isinstance(hashes, pa.Array) else hashes_of(hashes[low:high])
            known = known if isinstance(known, pa.DictionaryArray) else known.dictionary_encode()
            self._add(stored, known, provenance and provenance.slice(low, high), times, some)

    def _note(self, whole: list[str] | None) -> None:
        """Note the fields of the next rows, if the typed columns have all of them."""
        self._whole = whole if self._whole in ([], whole) else None

    def _is_bare(self, whole: list[str] | None) -> bool:
        """Return True if rows with these fields, all of them in the columns, are stored without packed messages."""
        if whole is None or not self._typed.bare or self._bare not in (None, whole):
            return False
        self._bare = whole
        return True

    def _add(
        self,
        values: pa.Array,
        hashes: pa.Array,
        provenance: Provenance | None,
        times_us: pa.Array,
        rows: pa.Table | None,
    ) -> None:
        count = len(values)
        offsets = consecutive(self.count, count)
        columns = [offsets, times_us.cast(_TIME), hashes, values, *provenance_arrays(provenance, count)]
        arrays = None if rows is None else self._typed.arrays_of(rows)
        columns += self._typed.arrays(values) if arrays is None else arrays
        self.batches.append(pa.RecordBatch.from_arrays(columns, schema=self._encoded))
        self.count += count
        self._bytes += self.batches[-1].nbytes
        if self._bytes >= _FLUSH_BYTES:
            self.flush()

    def append(self, rows: pa.Table) -> None:
        """Add rows of another data file as they are. Typed columns are made again if it does not have them all."""
        metadata = rows.schema.metadata or {}
        whole = metadata.get(ROWS)
        self._note(None if whole is None else json.loads(whole))
        bare = metadata.get(FIELDS, whole)
        if bare is None or set(self._schema.names) - set(rows.column_names) or not self._is_bare(json.loads(bare)):
            rows = with_values(rows)
        offsets = consecutive(self.count, rows.num_rows)
        if set(self._schema.names) - set(rows.column_names):
            rows = rows.select(COLUMNS.names)
            for name, array in zip(self._typed.schema.names, self._typed.arrays(rows.column("value"))):
                rows = rows.append_column(name, array)
        table = rows.set_column(0, "offset", offsets).select(self._schema.names).cast(self._schema)
        self.batches += table.set_column(_HASH_AT, "hash", table.column("hash").dictionary_encode()).to_batches()
        self.count += rows.num_rows
        self._bytes += table.nbytes
        if self._bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        table = pa.Table.from_batches(self.batches, self._encoded).unify_dictionaries()
        self._statistics.add(table.select(["offset", "time", "hash", *self._typed.schema.names]))
        hashes = table.column("hash")
        if self._open is None:
            self._kind = _HASHES if len(hashes.chunk(0).dictionary) <= _HASHES_MAX else pa.string()
            self._target = self._files.create(f"{self._folder}/{self._name}")
            self._open = FileWriter(
                self._target.__enter__(),
                self._schema.set(_HASH_AT, pa.field("hash", self._kind)),
                dictionaries=["hash", *self._typed.texts],
                statistics=["offset", "time", *self._typed.scalars],
                shown=self._schema,
            )
        if self._kind != _HASHES:
            table = table.set_column(_HASH_AT, "hash", hashes.cast(self._kind))
        self._open.write(table, GROUP_ROWS)
        self.batches, self._bytes = [], 0

    def close(self) -> DataFile | None:
        """Write the rest. Return the file, whose first index is not known; None if there were no messages."""
        if not self.count:
            return None
        self.flush()
        key, fields = (ROWS, self._whole) if self._whole else (FIELDS, self._bare)
        self._open.close({key.decode(): json.dumps(fields)} if fields else {})
        self._target.__exit__(None, None, None)
        size = self._files.size(f"{self._folder}/{self._name}")
        if size is None:
            raise FileNotFoundError(self._name)
        bounds = self._statistics.bounds()
        return DataFile(self._name, 0, self.count, size, clock.now_ns() // 1_000_000, self._partition, bounds)


class Plain:
    """Packed messages, joined, and the hashes of those that were added with some."""

    def __init__(self) -> None:
        self.ends = array("i", [0])
        """The offset of the first message in all bytes, and the offset after each."""
        self.hashes: list[str | None] = []
        self.counts: list[int] = []
        """For each hash the number of messages that have it."""
        self._parts: list[bytes | memoryview] = []

    def add(self, values: Sequence[bytes], hashes: Sequence[str | None], counts: Sequence[int]) -> None:
        self._parts.append(b"".join(values))
        self.ends.extend(itertools.islice(itertools.accumulate(map(len, values), initial=self.ends[-1]), 1, None))
        self.hashes += hashes
        self.counts += counts

    def add_array(self, packed: memoryview, cuts: Sequence[int]) -> None:
        """Add messages that follow one another in ``packed``, from each cut to the next."""
        self._parts.append(packed[cuts[0] : cuts[-1]])
        shift = self.ends[-1] - cuts[0]
        self.ends.extend([cut + shift for cut in cuts[1:]])

    def array(self) -> pa.Array:
        """The messages as an array of bytes."""
        buffers = [None, pa.py_buffer(self.ends), pa.py_buffer(b"".join(self._parts))]
        return pa.Array.from_buffers(pa.binary(), len(self.ends) - 1, buffers)


class QueueWriter:
    """Writes messages to a queue: into one data file for each partition that gets messages."""

    def __init__(
        self,
        files: Files,
        queue: str,
        options: QueueOptions,
        processor: str,
        record: int,
        time_us: int,
        columns: TypedColumns,
        turn: int = 0,
        firsts: Sequence[int] = (),
    ) -> None:
        """``turn`` is the first partition of messages that may be on any of them, modulo the partitions.

        ``firsts`` are the indices that the first messages will probably have, by partition.
        """
        self._open = functools.partial(Writer, files, folder_of(queue), processor, record, time_us, columns)
        self._firsts = firsts
        way = options.partitioner if options.partitioner in UNKEYED else None
        self._turns = Router(options.partitions, None, way, turn)
        self._writers: dict[int, Writer] = {}
        self.plain = Plain()
        """Messages that wait until they are a row group."""

    def add_plain(self, values: Sequence[bytes], hashes: Sequence[str], counts: Sequence[int]) -> None:
        """Add messages without provenance; each hash is that of as many of them as its count says."""
        if self._turns.partitions > 1:
            self.add(values, hash_runs(hashes, counts), None)
            return
        self.plain.add(values, hashes, counts)
        if len(self.plain.ends) > GROUP_ROWS or self.plain.ends[-1] >= _PLAIN_BYTES:
            self._write_plain()

    def _write_plain(self) -> None:
        plain, self.plain = self.plain, Plain()
        if plain.hashes:
            self._writer(0).add(plain.array(), hash_runs(plain.hashes, plain.counts), None)

    def add(self, values: Sequence[bytes], hashes: pa.Array, provenance: Provenance | None) -> None:
        """Add messages. A watermark is on every partition."""
        self._write_plain()
        if self._turns.partitions == 1:
            self._writer(0).add(values, hashes, provenance)
            return
        places = [place_of(value) for value in values]
        turns = iter(self._turns.place([{}] * places.count(None)))
        shares: dict[int, list[int]] = {}
        for offset, place in enumerate(places):
            for each in range(self._turns.partitions) if place == EVERY else (next(turns) if place is None else place,):
                shares.setdefault(each, []).append(offset)
        for partition, offsets in shares.items():
            own = provenance and provenance.select(offsets)
            self._writer(partition).add([values[at] for at in offsets], hashes.take(integers(offsets)), own)

    def add_table(
        self, rows: pa.Table, shares: Sequence[PartitionShare] | None, hash: str, provenance: Provenance | None
    ) -> None:
        """Add the rows of a table as messages; ``shares``: those of each partition, if the message decides."""
        self._write_plain()
        if self._turns.partitions == 1:
            self._add_rows(0, rows, hash, provenance)
            return
        if shares is None:
            shares = shares_of(self._turns.place_table(rows), self._turns.partitions)
        for partition, offsets in shares:
            self._add_rows(partition, columns.taken(rows, offsets), hash, provenance and provenance.select(offsets))

    def _add_rows(self, partition: int, rows: pa.Table, hash: str, provenance: Provenance | None) -> None:
        self._writer(partition).add(rows, hash_runs([hash], [rows.num_rows]), provenance)

    def _writer(self, partition: int) -> Writer:
        if partition not in self._writers:
            first = self._firsts[partition] if partition < len(self._firsts) else 0
            self._writers[partition] = self._open(partition, first)
        return self._writers[partition]

    def close(self) -> list[DataFile]:
        """Write the rest. Return the files, whose first indices are not known."""
        self._write_plain()
        files = [writer.close() for writer in self._writers.values()]
        return [file for file in files if file is not None]


def messages(files: Files, pieces: Sequence[Piece]) -> Iterator[tuple[int, int, str | None, dict[str, Any]]]:
    """Index, time in microseconds, hash and message, in the order of the queue."""
    for piece in pieces:
        for first, table in read_groups(files, piece, ["time", "hash", "value"]):
            rows = Rows(range(first, first + table.num_rows), table)
            for index, time_us, hash, value in zip(rows.indices, rows.times_us, rows.hashes, rows.values):
                yield index, time_us, hash, codec.unpack(value)
