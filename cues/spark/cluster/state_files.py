"""Keyed state as files: each step adds a run with its changes, and runs of about the same size are merged.

    DIR/_cues/state/<processor id>/<record>-<first slot>-<last slot>-<token>.parquet

    slot BIGINT, row BINARY, value BINARY

A slot is the hash of a key; files are sorted by it. So a task reads only the row groups with the slots of its keys, and
keeps them in memory: a file never changes. Tasks of one step divide the range of all slots into equal parts, so no two
of them have the same key, and each writes a file of its own. The files of one step are a *run*.

A value of a newer run replaces that of an older one. NULL means that the row was deleted. Runs are merged from the
newest one on, as long as the next one is not much larger, so a row is written again only a few times, and a step costs
what it changes, however large the state is.

The record of a step names the runs of the state after it (ledger.py), so state and positions are one commit.
Files that no record names are swept at the next start.

With ``ttl=`` each value has one more row, with the time of its last write (:data:`cues.steps.state_keys.WRITTEN`). A
value that expired is not there for any call. It is deleted by the next merge of its run. When a processor has nothing
else to do, it merges the oldest runs in which all values that have a time have expired.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cues import codec
from cues.errors import Diverged
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.parquet import FileWriter, StoredFile
from cues.steps.state_keys import WRITTEN, key_of_row

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

_SCHEMA: Final = pa.schema([("slot", pa.int64()), ("row", pa.binary()), ("value", pa.binary())])
GROUP_ROWS: Final = 4096
MERGE_RUNS: Final = 8
"""This number of runs of about the same size is merged into one."""
_SMALL_BYTES: Final = 64 << 10
"""Runs of at most this size count as one size."""
_TASK_BYTES: Final = 64 << 20
"""Bytes that one task merges."""
_CACHE_BYTES: Final = 256 << 20
"""Bytes of row groups that a worker process keeps in memory."""
_ENTRY_BYTES: Final = 8 << 10
"""Bytes of a row group, or of the bounds of a file, besides the data."""
_BOUNDS_BYTES: Final = 128
"""Bytes of the bounds of a row group."""
_SLOTS: Final = 1 << 64


class StateRun(NamedTuple):
    """The files of one step, or of a merge."""

    bytes: int
    files: tuple[str, ...]
    written_ns: int = 0
    """The last time of a write in it, in nanoseconds; 0 if no value of it has one."""


class HasBytes(Protocol):
    """A run of any kind."""

    @property
    def bytes(self) -> int: ...


class Span(NamedTuple):
    """The slots [low, high) of one task."""

    low: int
    high: int


def span(number: int, count: int) -> Span:
    """The slots of task ``number`` of ``count``."""
    return Span(_SLOTS * number // count - _SLOTS // 2, _SLOTS * (number + 1) // count - _SLOTS // 2)


def slot_of(key: bytes) -> int:
    """The slot of a key: the same in every process."""
    return xxhash.xxh3_64_intdigest(key) - _SLOTS // 2


def task_of(key: bytes, count: int) -> int:
    """The number of the task, one of ``count``, that has a key."""
    return xxhash.xxh3_64_intdigest(key) * count // _SLOTS


def folder_of_state(processor: str) -> str:
    return f"_cues/state/{folder_of(processor)}"


# --- in an executor -----------------------------------------------------------------------------


class _Cache:
    """Row groups of files and the bounds of their slots, the last used at the end."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, int], Any] = OrderedDict()
        self._bytes = 0

    def get(self, files: Files, name: str, group: int) -> Any:
        """A row group; for -1 the first and the last slot of each."""
        key = files.url, name, group
        if key not in self._kept:
            with opened(files, name) as file:
                value = file.bounds(0) if group < 0 else file.read([group])
            self._kept[key] = value
            self._bytes += _size(value)
            while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0


def _size(value: Any) -> int:
    return _ENTRY_BYTES + (int(value.nbytes) if isinstance(value, pa.Table) else _BOUNDS_BYTES * len(value))


cache: Final = _Cache()
"""That of this process."""


def load(
    files: Files, folder: str, runs: Sequence[StateRun], keys: set[bytes] | None, prefix: bytes = b""
) -> dict[bytes, bytes]:
    """The rows of the state with these keys, None: all; of them those that begin with ``prefix``."""
    slots = None if keys is None else sorted({slot_of(key) for key in keys})
    rows: dict[bytes, bytes | None] = {}
    for run in runs:
        for name in run.files:
            for group in _read(files, f"{folder}/{name}", slots):
                if prefix:
                    group = group.filter(pc.starts_with(group.column("row"), prefix))
                rows.update(zip(group.column("row").to_pylist(), group.column("value").to_pylist()))
    return {row: value for row, value in rows.items() if value is not None}


def _read(files: Files, name: str, slots: Sequence[int] | None) -> list[pa.Table]:
    """The rows of a file with these slots, by row group."""
    if slots is not None and not _any(slots, *_slots_of(name)):
        return []
    bounds = cache.get(files, name, -1)
    if slots is None:
        return [cache.get(files, name, number) for number in range(len(bounds))]
    found = []
    wanted = pa.array(slots, pa.int64())
    for number, (low, high) in enumerate(bounds):
        if _any(slots, low, high):
            group = cache.get(files, name, number)
            found.append(group.filter(pc.is_in(group.column("slot"), value_set=wanted)))
    return found


def _slots_of(name: str) -> tuple[int, int]:
    """The first and the last slot of a file, as its name says."""
    _, low, high, _ = re.split(r"-(?=[+-])|-(?=[0-9a-f]+\.parquet$)", name.rpartition("/")[2])
    return int(low, 16), int(high, 16)


def record_of(name: str) -> int:
    """The number of the record for which a file was written."""
    return int(name.partition("-")[0])


def _any(slots: Sequence[int], low: int, high: int) -> bool:
    at = bisect_left(slots, low)
    return at < len(slots) and slots[at] <= high


def opened(files: Files, name: str) -> StoredFile:
    """A file of the state. Raises :class:`Diverged` if it is missing or damaged."""
    role = "a part of the state of a processor"
    try:
        return StoredFile(files, name, role, _SCHEMA)
    except FileNotFoundError as error:
        raise Diverged(f"{files.url}/{name}, {role}, is missing.", "restore the directory from a copy.") from error


def write(files: Files, folder: str, record: int, changes: Mapping[bytes, bytes | None]) -> StateRun:
    """Write the changes of a task; NULL for a row that was deleted."""
    rows = sorted((slot_of(key_of_row(row)), row) for row in changes)
    columns = [
        pa.array([slot for slot, _ in rows], pa.int64()),
        pa.array([row for _, row in rows], pa.binary()),
        pa.array([changes[row] for _, row in rows], pa.binary()),
    ]
    return _write(files, folder, record, pa.Table.from_arrays(columns, schema=_SCHEMA))


def _write(files: Files, folder: str, record: int, table: pa.Table) -> StateRun:
    slots = table.column("slot")
    name = f"{record:012d}-{slots[0].as_py():+x}-{slots[-1].as_py():+x}-{secrets.token_hex(6)}.parquet"
    with files.create(f"{folder}/{name}") as target:
        writer = FileWriter(target, _SCHEMA, dictionaries=[], statistics=["slot"])
        writer.write(table, GROUP_ROWS)
        writer.close({})
    written_ns = max((at for _, at in _times(table)), default=0)
    return StateRun(files.size(f"{folder}/{name}") or 0, (name,), written_ns)


def merge(
    files: Files,
    folder: str,
    record: int,
    runs: Sequence[StateRun],
    complete: bool,
    expired_ns: int | None,
    slots: Span,
) -> StateRun | None:
    """Merge the slots of some runs. ``complete``: there are no older ones, so deleted rows may go.

    ``expired_ns``: values that were written at this time or before it are deleted; None: values do not expire.
    """
    tables = []
    for run in reversed(runs):
        for name in run.files:
            with opened(files, f"{folder}/{name}") as file:
                bounds = enumerate(file.bounds(0))
                table = file.read([number for number, (low, high) in bounds if low < slots.high and high >= slots.low])
            slot = table.column("slot")
            tables.append(table.filter(pc.and_(pc.greater_equal(slot, slots.low), pc.less_equal(slot, slots.high - 1))))
    table = pa.concat_tables(tables)
    table = table.take(pc.sort_indices(table, [("slot", "ascending"), ("row", "ascending")]))  # stable: newest first
    rows = table.column("row")
    if len(rows):
        newest = pa.concat_arrays(
            [pa.array([True]), pc.not_equal(rows.slice(1), rows.slice(0, len(rows) - 1)).combine_chunks()]
        )
        table = table.filter(newest)
    if expired_ns is not None and any(run.written_ns for run in runs):
        table = _without_expired(table, expired_ns)
    if complete:
        table = table.filter(pc.is_valid(table.column("value")))
    return _write(files, folder, record, table) if table.num_rows else None


def _without_expired(table: pa.Table, expired_ns: int) -> pa.Table:
    """The rows, with NULL for values that were written at this time or before it. A value and its time are in one run,
    because both are changed together. Older runs may have older ones."""
    gone = [row for row, at in _times(table) if at <= expired_ns]
    rows = pa.array([*gone, *(row[len(WRITTEN) :] for row in gone)], pa.binary())
    expired = pc.is_in(table.column("row"), value_set=rows)
    values = pc.if_else(expired, pa.scalar(None, pa.binary()), table.column("value"))
    return table.set_column(2, _SCHEMA.field("value"), values)


def _times(table: pa.Table) -> list[tuple[bytes, int]]:
    """The rows with times of writes, and these times."""
    some = table.filter(pc.and_(pc.starts_with(table.column("row"), WRITTEN), pc.is_valid(table.column("value"))))
    return [(row, codec.unpack(value)) for row, value in zip(some["row"].to_pylist(), some["value"].to_pylist())]


# --- in the driver ------------------------------------------------------------------------------


def to_merge(runs: Sequence[HasBytes]) -> int:
    """The number of the newest runs that should become one; 0 if there are too few of about the same size."""
    count = held = 0
    for run in reversed(runs):
        if count and run.bytes > max(_SMALL_BYTES, 2 * held):
            break
        held += run.bytes
        count += 1
    return count if count >= MERGE_RUNS else 0


def spans(runs: Sequence[StateRun]) -> list[Span]:
    """The ranges of slots that tasks merge, one each."""
    count = max(1, sum(run.bytes for run in runs) // _TASK_BYTES)
    return [span(number, count) for number in range(count)]


def joined(runs: Sequence[StateRun | None]) -> StateRun | None:
    """The files of several tasks as one run; None if there are none."""
    some = [run for run in runs if run is not None]
    names = tuple(name for run in some for name in run.files)
    size, written_ns = sum(run.bytes for run in some), max((run.written_ns for run in some), default=0)
    return StateRun(size, names, written_ns) if names else None


def to_expire(runs: Sequence[StateRun], expired_ns: int) -> int:
    """The number of the oldest runs to merge, because all their values that have a time were written by ``expired_ns``.

    0 if none has a time.
    """
    count = next((number for number, run in enumerate(runs) if run.written_ns > expired_ns), len(runs))
    return count if any(run.written_ns for run in runs[:count]) else 0
