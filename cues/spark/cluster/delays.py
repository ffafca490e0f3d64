"""Delayed messages in a shared directory: a processor holds those that are not due, and takes them when they are.

    1. hold      a task calls no function for messages whose time is in the future. It writes them, with their
                 provenance, to a file that is sorted by time: a run. The record of the step names the run
    2. move      when held messages are due, one record takes them out of the runs, and names a file of them, in the
                 order of their times
    3. deliver   steps take the messages of this file as those of a queue, under the id ``graph.processor.delayed``

    DIR/_cues/delayed/<processor id>/<record>-<token>.parquet     a run, or the messages that were moved

So a message is held, or moved, or delivered, and each change is one record of the ledger. Messages after it on its
queue do not wait for it, and retention may delete it from its queue, because the file has all of it.

A step judges by one time, that of its beginning, in all its tasks. It is in the record of a step that was begun
(``taking``), so a step that is repeated later calls the function for the same messages, under the same hash.

The messages of a run that are due are the first ones. So a move writes no run again: it moves the start of each. Small
runs are merged, so a record names few of them, however many messages wait. A message that is taken once more
after a seek, while it is held, is in two runs with the same time and index, and is moved once.

Timers (``timer=``) wait in runs too, as messages ``{"key", "name", "at"}`` of an input of their own. A task that sets
one changes its row in the state, with its time, and writes the message to a run. A run is never changed, so a timer
that was replaced or cancelled stays in its run. A move leaves it out, because its row has another time, or is gone. A
step takes the others under the id ``graph.processor.timer``, in the task that has the state of the key, and the call
compares once more.

Not guaranteed: the order of a delayed message relative to others, also of its key. The files of a record that was not
committed, or of messages that were delivered, are deleted later (maintenance.py).
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cues import codec
from cues.base import clock
from cues.base.data import dataclass
from cues.errors import Diverged
from cues.graphs.plan import Plan
from cues.overrides import override
from cues.records.columns import integers
from cues.spark.cluster import state_files
from cues.spark.cluster.data import (
    COLUMNS,
    GROUP_ROWS,
    Piece,
    Rows,
    hashes_of,
    provenance_arrays,
    read,
    with_place,
)
from cues.spark.cluster.directory import DataFile, PartitionLog
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.parquet import FileWriter, StoredFile
from cues.spark.cluster.state_files import StateRun
from cues.steps.state_keys import ORDER, TIME_BYTES, TIMER, key_of_row, key_segment

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files
    from cues.spark.cluster.rows import Entrance

NEVER_NS: Final = (1 << 63) - 1
"""After every time of delivery."""
MOVED_MESSAGES: Final = 100_000
"""Most messages that one record moves. The driver has them in memory."""
MOVED_BYTES: Final = 64 << 20
MERGE_BYTES: Final = 8 << 20
"""A larger run is not merged, because a merge is in the memory of one task."""
_COMPARED: Final = 256
"""Number of timers that are compared with the state at once, to find the first one that is set."""
_KEYS: Final = ("at", "index")
"""The time of delivery in nanoseconds, and the index on the queue; of a timer the segments of its key and its name. A
run is sorted by them."""


@dataclass(frozen=True)
class HeldRun:
    """Messages that are held, sorted by time; of a join, a file for each input, with the same number of messages."""

    files: dict[str, str]
    """By tailer id: the name of the file."""
    count: int
    """Number of messages in each file."""
    start: int
    """The first message that is still held. Those before it were moved."""
    next_ns: int
    """The time of that message, or an earlier one."""
    bytes: int
    """Bytes of all messages in the files."""

    @property
    def left(self) -> int:
        """Number of messages that are held."""
        return self.count - self.start


def folder_of_delayed(processor: str) -> str:
    return f"_cues/delayed/{folder_of(processor)}"


def without_delays(plan: Plan) -> frozenset[str]:
    """The queues whose messages may have no time in the future: a frame reads them, and frames hold no messages."""
    return frozenset(port.queue for node in plan.running if node.kind == "frame" for port in node.inputs)


class MovedLog(PartitionLog):
    """The messages that were moved from one input and are not delivered yet. At most one file has some."""

    def __init__(self, input: PartitionLog, folder: str, id: str) -> None:
        super().__init__(input.directory, 0)
        self._folder, self._id = folder, id

    @property
    @override
    def id(self) -> str:
        return self._id

    @property
    @override
    def folder(self) -> str:
        return self._folder


# --- in an executor -----------------------------------------------------------------------------


def hold(
    files: Files, folder: str, record: int, inputs: Sequence[tuple[Entrance, Rows]], times: Sequence[int]
) -> HeldRun:
    """Write messages that are not due: those of each input, with the time of each in nanoseconds."""
    order = sorted(range(len(times)), key=times.__getitem__)  # stable: by index
    at = [times[offset] for offset in order]
    names, size = {}, 0
    for entrance, rows in inputs:
        table = rows.table.select(COLUMNS.names)
        table = table.set_column(table.schema.get_field_index("value"), "value", rows.packed)
        if entrance.kept:
            provenance = with_place(rows.provenance, entrance.queue, entrance.kept, rows)
            for name, array in zip(("provenance", "meta"), provenance_arrays(provenance, len(rows))):
                table = table.set_column(table.schema.get_field_index(name), name, array)
        table = table.take(integers(order))
        indices = [rows.indices[offset] for offset in order]
        table = table.append_column("at", integers(at)).append_column("index", integers(indices))
        names[entrance.tailer] = _write(files, folder, record, table)
        size += _bytes(table)
    return HeldRun(names, len(at), 0, at[0], size)


def hold_timers(
    files: Files, folder: str, record: int, time_us: int, tailer: str, rows: Mapping[bytes, bytes | None]
) -> HeldRun | None:
    """Write the timers that were set. ``rows``: those of the state in the order of time; None for one that is gone."""
    timers = sorted((row[len(ORDER) :], packed) for row, packed in rows.items() if packed is not None)
    if not timers:
        return None
    at = [int.from_bytes(row[:TIME_BYTES], "big") for row, _ in timers]
    values = []
    for at_ns, (_, packed) in zip(at, timers):
        key, name = codec.unpack(packed)
        values.append(codec.pack({"key": key, "name": name, "at": clock.to_datetime(at_ns)}))
    count, at = len(timers), [min(at_ns, NEVER_NS) for at_ns in at]
    segments = pa.array([row[TIME_BYTES:] for row, _ in timers], pa.binary())
    columns: list[Any] = [integers(range(count)), integers([time_us] * count), hashes_of([None] * count)]
    columns += [pa.array(values, pa.binary()), *provenance_arrays(None, count), integers(at), segments]
    table = pa.table(columns, names=[*COLUMNS.names, *_KEYS])
    return HeldRun({tailer: _write(files, folder, record, table)}, count, 0, at[0], _bytes(table))


def still_set(
    files: Files, folder: str, state: Sequence[StateRun], timers: Sequence[tuple[bytes, bytes]]
) -> list[bool]:
    """Return which of these timers, segments of key and name and message, are set. ``folder``: that of the state."""
    keys = {key_of_row(segments) for segments, _ in timers}
    rows = state_files.load(files, folder, state, keys, TIMER)
    times = {row: codec.unpack(packed) for row, packed in rows.items()}
    return [times.get(TIMER + segments) == clock.to_ns(codec.unpack(value)["at"]) for segments, value in timers]


def first_timer(
    files: Files,
    processor: str,
    state: Sequence[StateRun],
    runs: Iterable[HeldRun],
    due: Iterable[tuple[DataFile, int]],
) -> int | None:
    """The time in nanoseconds of the first timer that is set and has not fired; None without one.

    ``due``: the files of timers that were moved, with the index that is delivered next. Timers are compared with the
    state in the order of their times, as many of the first ones may have been replaced. Raises :class:`Diverged` if a
    file is missing or damaged.
    """
    folder, states = folder_of_delayed(processor), state_files.folder_of_state(processor)
    pieces = [Piece(folder, _file_of(run, tailer), run.start, run.count) for run in runs for tailer in run.files]
    pieces += [Piece(folder, file, next - file.first, file.count) for file, next in due]
    timers = heapq.merge(*(_timers(files, piece) for piece in pieces))
    while some := list(itertools.islice(timers, _COMPARED)):
        found = still_set(files, states, state, [(segments, value) for _, segments, value in some])
        if any(found):
            return some[found.index(True)][0]
    return None


def _timers(files: Files, piece: Piece) -> Iterator[tuple[int, bytes, bytes]]:
    """The time, the segments of key and name, and the message of each timer of a file, in the order of their times."""
    for start in range(piece.start, piece.stop, _COMPARED):
        stop = min(piece.stop, start + _COMPARED)
        for value in read(files, piece._replace(start=start, stop=stop), ["value"]).column("value").to_pylist():
            timer = codec.unpack(value)
            yield clock.to_ns(timer["at"]), key_segment(timer["key"]) + key_segment(timer["name"]), value


def merge(files: Files, folder: str, record: int, runs: Sequence[HeldRun]) -> HeldRun:
    """Write runs of the same inputs as one."""
    order: Any = None
    names, size = {}, 0
    for tailer in runs[0].files:
        parts = [_read(files, folder, run, tailer, run.count, (*COLUMNS.names, *_KEYS)) for run in runs]
        table = pa.concat_tables(parts)
        if order is None:
            order = pc.sort_indices(table, [(key, "ascending") for key in _KEYS])
            first = table.take(order)
            again = [pc.equal(first.column(key).slice(1), first.column(key).slice(0, len(order) - 1)) for key in _KEYS]
            new = pa.concat_arrays([pa.array([True]), pc.invert(pc.and_(*again)).combine_chunks()])
            order = order.filter(new)
        table = table.take(order)
        names[tailer] = _write(files, folder, record, table)
        size += _bytes(table)
    return HeldRun(names, len(order), 0, min(run.next_ns for run in runs), size)


def _write(files: Files, folder: str, record: int, table: pa.Table) -> str:
    name = f"{record:012d}-{secrets.token_hex(6)}.parquet"
    table = table.set_column(0, "offset", integers(range(table.num_rows)))
    table = table.cast(pa.schema([*COLUMNS, *list(table.schema)[len(COLUMNS) :]]))
    with files.create(f"{folder}/{name}") as target:
        writer = FileWriter(target, table.schema, dictionaries=[], statistics=[])
        writer.write(table, GROUP_ROWS)
        writer.close({})
    return name


def held(files: Files, folder: str, name: str) -> StoredFile:
    """A file of delayed messages or timers. Raises :class:`Diverged` if it is missing or damaged."""
    role = "a part of the delayed messages and timers of a processor"
    try:
        return StoredFile(files, f"{folder}/{name}", role, COLUMNS)
    except FileNotFoundError as error:
        raise Diverged(
            f"{files.url}/{folder}/{name}, {role}, is missing.", "restore the directory from a copy."
        ) from error


def _read(files: Files, folder: str, run: HeldRun, tailer: str, stop: int, columns: Sequence[str]) -> pa.Table:
    """The messages of a run that are held, up to ``stop``."""
    return read(files, Piece(folder, _file_of(run, tailer), run.start, stop), columns).replace_schema_metadata()


def _file_of(run: HeldRun, tailer: str) -> DataFile:
    return DataFile(run.files[tailer], 0, run.count, 0, 0)


def _bytes(table: pa.Table) -> int:
    return int(pc.sum(pc.binary_length(table.column("value"))).as_py() or 0)


# --- in the driver ------------------------------------------------------------------------------


def to_merge(runs: Iterable[HeldRun]) -> list[HeldRun]:
    """The newest runs of the same inputs that should become one; none if there are too few of about the same size."""
    groups: dict[frozenset[str], list[HeldRun]] = {}
    for run in runs:
        if run.bytes <= MERGE_BYTES:
            groups.setdefault(frozenset(run.files), []).append(run)
    for group in groups.values():
        if count := state_files.to_merge(group):
            return group[-count:]
    return []


@dataclass(frozen=True)
class Move:
    """Messages that are due, and the runs without them."""

    tables: dict[str, pa.Table]
    """By tailer id, in the order of their times. Those of timers have the column ``index`` too."""
    runs: tuple[HeldRun, ...]
    gone: tuple[HeldRun, ...]
    """Runs of which no message is left."""


def move(files: Files, folder: str, runs: Sequence[HeldRun], now_ns: int, timers: bool = False) -> Move:
    """Take the messages that are due out of runs, in the order of their times."""
    most = min(MOVED_MESSAGES, MOVED_BYTES * sum(run.count for run in runs) // max(1, sum(run.bytes for run in runs)))
    most = max(1, most)
    times: dict[int, list[int]] = {}
    heads: list[tuple[int, str, int, int, int]] = []
    for number, run in enumerate(runs):
        if run.next_ns > now_ns:
            continue
        first = min(run.files)
        keys = _read(files, folder, run, first, min(run.count, run.start + most + 1), _KEYS)
        times[number] = keys.column("at").to_pylist()
        due = bisect_right(times[number], now_ns)
        places = keys.column("index").to_pylist()[:due]
        heads += [(at, first, index, number, place) for place, (at, index) in enumerate(zip(times[number], places))]
    heads.sort()
    chosen: list[tuple[int, int]] = []
    ends: dict[int, int] = {}
    last = None
    for at, first, index, number, place in heads:
        if last != (at, first, index):
            if len(chosen) == most:
                break
            chosen.append((number, place))
            last = at, first, index
        ends[number] = place + 1
    columns = [*COLUMNS.names, _KEYS[1]] if timers else COLUMNS.names
    parts: dict[str, list[pa.Table]] = {}
    bases: dict[tuple[str, int], int] = {}
    for number, count in ends.items():
        run = runs[number]
        for tailer in run.files:
            some = parts.setdefault(tailer, [])
            bases[tailer, number] = sum(table.num_rows for table in some)
            some.append(_read(files, folder, run, tailer, run.start + count, columns))
    tables = {}
    for tailer, some in parts.items():
        order = [bases[tailer, number] + place for number, place in chosen if (tailer, number) in bases]
        tables[tailer] = pa.concat_tables(some).take(integers(order))
    left: list[HeldRun] = []
    gone: list[HeldRun] = []
    for number, run in enumerate(runs):
        start = run.start + ends.get(number, 0)
        known = times.get(number, [])
        at = known[min(ends.get(number, 0), len(known) - 1)] if known else run.next_ns
        moved = HeldRun(run.files, run.count, start, at, run.bytes)
        (left if moved.left else gone).append(moved)
    return Move(tables, tuple(left), tuple(gone))


def next_ns(runs: Iterable[HeldRun]) -> int:
    """The time at which the first message is due, in nanoseconds, or one before it."""
    return min((run.next_ns for run in runs), default=NEVER_NS)


def moved_file(files: Files, folder: str, record: int, table: pa.Table, first: int) -> DataFile:
    """Write messages that are due. ``first`` is the index of the first of them."""
    return DataFile(_write(files, folder, record, table), first, table.num_rows, _bytes(table), 0)
