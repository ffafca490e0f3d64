"""Delta tables as sources: the rows of one version, then what each later version adds or changes.

    graph.add(cues.Source("orders", DeltaSource("lake/orders")))                              what is there, and end
    graph.add(cues.Source("orders", DeltaSource("lake/orders", follow=True)))                 and wait for new versions
    graph.add(cues.Source("changes", DeltaSource("lake/orders", changes="feed", follow=True)))  updates and deletes too

The client is delta-rs, the extra ``delta``. It is imported on first use. Rows are read as columns, ``batch_rows`` at a
time, and never a whole file. Sources run in this way:

    1. open       the newest version; at the first start, ``begin=`` and ``snapshot=`` say where to begin
    2. snapshot   the files of that version, in the order of their names
    3. versions   the entry of each later version in the log of the table, and its files in the order of the entry

The position names the table, the version, the file in it, and the rows of the file that were read:

    position = [1, table id, version, part, file, row]      part: "snapshot", or the ``changes=`` of a version

The entry of a version never changes, and neither does a file. So a position has one meaning for ever. The engine
commits it with the messages, so each row is a message once, wherever the run is killed.

**Versions that delete or change rows.** A table of files has no rows that change: a version removes files, and adds
files with the rows that are left. ``changes=`` decides about such a version:

    "refuse"    it stops the source (Diverged); other versions only add rows
    "skip"      it is left out as a whole, also the rows that it adds; Spark has the same as ``skipChangeCommits``
    "feed"      each change is a message, with three columns more: ``_change_type`` ("insert", "update_preimage",
                "update_postimage", "delete"), ``_commit_version`` and ``_commit_timestamp``. The table must have the
                change data feed (``delta.enableChangeDataFeed``) before the first version that changes rows

Compaction and other versions that only move rows from file to file have no messages.

**Columns** are those of the version: after a change of the schema the messages have the new columns.

Not guaranteed: rows that the table has no more. ``vacuum`` removes files that the newest version does not need, and the
log forgets old versions. A source that was stopped for longer than the table keeps these cannot continue, and says so.
Deletion vectors in files that must be read, column mapping and unknown features of readers are refused by name.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from cues.arguments import check_number, options_of, path_of, texts_of
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.processors import SOURCE, blocks, checks, columns, delta, foreign, formats, opened_file, places, takes, waits
from cues.processors.lake import says_away

CHANGES: Final = ("refuse", "skip", "feed")
SNAPSHOT: Final = "snapshot"

_VERSION: Final = 1
_BATCH_BYTES: Final = 64 << 20
"""Bytes of the rows of a batch, about: a table of large rows has fewer of them in a batch."""
_LOOKS: Final = 10
"""Looks for a new version between two looks at whether the table is still the same one."""
_FEED: Final = ("_change_type", "_commit_version", "_commit_timestamp")
_FEATURES: Final = frozenset(("timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping",
                              "typeWidening", "typeWidening-preview"))  # fmt: skip
"""Features of readers that are known here. The two that change files are looked at where they are used."""
_ANEW: Final = "give the source another id, which begins with a snapshot; and let the table keep its files for longer."

Position = list[Any]


class _File(NamedTuple):
    """A file of rows: its path in the table, the values of its partition, and the change that its rows are."""

    path: str
    values: Mapping[str, Any]
    change: str | None = None
    """"insert" or "delete"; None: a column of the file has it, or no one asks."""


class _Layout(NamedTuple):
    """The columns of a version."""

    schema: Any
    partitions: Sequence[str]
    has_feed: bool


class _Place(NamedTuple):
    """A position in the table ``id``: the files before ``file`` and ``row`` rows of it are read."""

    id: str
    version: int
    part: str
    file: int = 0
    row: int = 0

    def packed(self) -> Position:
        return [_VERSION, *self]


@takes(SOURCE)
class DeltaSource:
    """A source of the rows of a Delta table; see the module. Give it to ``cues.Source(id, DeltaSource(...))``.

    ``where``            a directory, or a URL that delta-rs knows: ``"s3://bucket/table"``, ``az://``, ``gs://``
    ``begin``            at the first start: a version, or a ``datetime`` with a time zone; None: the newest version
    ``snapshot``         True: the rows of the version ``begin`` come first (of a time: of the newest version at it).
                         False: only changes; of the version ``begin`` and later ones, of those since a time, or of
                         those after the newest one
    ``changes``          ``"refuse"``, ``"skip"`` or ``"feed"``: for a version that deletes or changes rows
    ``columns``          the columns of the messages; None: all
    ``follow``           True: wait for new versions; otherwise the source ends after the newest one
    ``poll_s``           seconds between two looks for a new version
    ``batch_rows``       rows in memory at a time, at most; of large rows fewer
    ``storage_options``  of delta-rs, such as ``{"AWS_REGION": "eu-central-1"}``
    ``reserved``         ``"q/type"`` or ``"q/topics"``, which rows may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `delta`
    Guarantee: exactly once: each row of the snapshot and of each later version is on the queue once, also after kill -9
    Mechanism: position of the version, the file in its log entry and the row, committed with the messages
    """

    def __init__(
        self,
        where: Any,
        *,
        begin: int | datetime | None = None,
        snapshot: bool = True,
        changes: str = "refuse",
        columns: Sequence[str] | None = None,
        follow: bool = False,
        poll_s: float = 1.0,
        batch_rows: int = 50_000,
        storage_options: Mapping[str, str] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.where: str = where if isinstance(where, str) and "://" in where else path_of("where", where)
        self.begin, self.snapshot, self.changes, self.follow = begin, snapshot, changes, follow
        self.columns = None if columns is None else texts_of("columns", columns)
        self.poll_s, self.batch_rows = poll_s, batch_rows
        self.storage_options = options_of("storage_options", storage_options or {})
        self.may = foreign.allowed(reserved)
        self.__name__ = "delta"
        if isinstance(begin, datetime):
            if begin.tzinfo is None:
                raise InvalidArgument(f"begin={begin!r} has no time zone.", "give one: begin.replace(tzinfo=…).")
        elif begin is not None:
            check_number("begin", begin, 0, whole=True)
        for name, value in (("snapshot", snapshot), ("follow", follow)):
            if type(value) is not bool:
                raise InvalidArgument(f"{name}={value!r:.60}.", "give True or False.")
        if changes not in CHANGES:
            raise InvalidArgument(f"changes={changes!r:.60} is unknown.", f"use one of {', '.join(CHANGES)}.")
        if self.columns is not None and not self.columns:
            raise InvalidArgument("columns= names no column.", "leave it out, to read all.")
        check_number("poll_s", poll_s, 0)
        check_number("batch_rows", batch_rows, 1, whole=True)

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        return _Reader(self, process, by_columns=False).items(position)

    def in_columns(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield the same rows, in tables with the position after the last row."""
        return _Reader(self, process, by_columns=True).items(position)


class _Reader:
    """One run of a source."""

    def __init__(self, source: DeltaSource, process: Any, by_columns: bool) -> None:
        self._source, self._process, self._by_columns = source, process, by_columns
        self._files = _Files(source)
        self._last: tuple[int, bytes | None] = (-1, None)
        """The last version that was read, and its entry in the log."""

    def items(self, position: Position | None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, rows)``, and ``(position, None)`` where a version had no rows."""
        source, looks = self._source, itertools.count(1)
        table = self._files.table(None)
        id, newest = str(table.metadata().id), table.version()
        if position is None:
            place = self._first(table, id)
            yield place.packed(), None  # a start after a crash begins at the same version
        else:
            place = self._place(position, id, newest)
        self._remember(place.version - (place.part != SNAPSHOT))
        there = table if place.version >= newest else self._files.table(place.version)
        layout = self._layout(there)
        if place.part == SNAPSHOT:
            yield from self._rows(place, layout, self._snapshot(there), None)
            place = _Place(id, place.version + 1, source.changes)
            yield place.packed(), None
        while True:
            while place.version <= newest:
                actions = self._files.entry(place.version)
                self._compare(place)  # after it was read: the table may have been made again in the meantime
                self._remember(place.version)
                layout = self._after(layout, actions, place.version)
                if place.part != source.changes and (place.file or place.row):
                    raise Diverged(
                        f"The position is inside of version {place.version:,}, which was read with"
                        f" changes={place.part!r}, not {source.changes!r}.",
                        f"let the source finish this version with changes={place.part!r}.",
                    )
                place = place._replace(part=source.changes)
                yield from self._rows(place, layout, self._changed(place.version, layout, actions), _time_of(actions))
                place = _Place(id, place.version + 1, source.changes)
                yield place.packed(), None
            if not source.follow or not waits.wait(self._process, source.poll_s):
                return
            if not next(looks) % _LOOKS:
                self._compare(place)
            with self._files.failures():
                table.update_incremental()
            newest = table.version()

    # --- places ---

    def _first(self, table: Any, id: str) -> _Place:
        """Return the place of a first start."""
        source, newest = self._source, table.version()
        version: int = newest
        if isinstance(source.begin, datetime):
            there = self._files.table(source.begin)
            version = there.version()
            if not source.snapshot:  # delta-rs asks the times of log files, and a copy of a table has new ones
                while version <= newest and _before(self._files.entry(version), source.begin):
                    version += 1
        elif source.begin is not None:
            version = source.begin
            if version > newest + (not source.snapshot):
                raise InvalidArgument(
                    f"begin={version}, and the newest version of {source.where} is {newest}.",
                    "give a version that is there, or leave begin= out.",
                )
        elif not source.snapshot:
            version += 1
        return _Place(id, version, SNAPSHOT if source.snapshot else source.changes)

    def _place(self, position: Position, id: str, newest: int) -> _Place:
        if not isinstance(position, list) or len(position) != 6 or position[0] != _VERSION:
            raise checks.foreign_position(position, "cues.processors.delta_source", _VERSION)
        place = _Place(*position[1:])
        if place.id != id:
            raise Diverged(
                f"The Delta table {self._source.where} is another one: its id is {id}, and the position is of"
                f" {place.id}.",
                "restore the table; or give the source another id, which begins at the start.",
            )
        if place.version > newest + 1:
            raise Diverged(
                f"The newest version of {self._source.where} is {newest:,}, and the versions before {place.version:,}"
                " were read.",
                "restore the table; or give the source another id, which begins at the start.",
            )
        return place

    def _remember(self, version: int) -> None:
        """Remember the last version that was read, or before which nothing is read."""
        self._last = version, self._files.log(version) if version >= 0 else None

    def _compare(self, place: _Place) -> None:
        """Check that the table was not dropped and made again since the last version. Raises :class:`Diverged`.

        The entry of that version is the same for ever, and costs less to read than the table. If the log has forgotten
        it, the table is opened anew, and its id says so.
        """
        version, before = self._last
        now = None if before is None else self._files.log(version)
        if now is not None and now == before:
            return
        table = self._files.table(None)
        self._place(place.packed(), str(table.metadata().id), table.version())
        if now is not None:
            raise Diverged(
                f"The version {version:,} of {self._source.where} is another one than that which was read.",
                "restore the table; or give the source another id, which begins at the start.",
            )

    # --- versions ---

    def _layout(self, table: Any) -> _Layout:
        protocol, metadata = table.protocol(), table.metadata()
        self._check_features(protocol.reader_features or ())
        return self._checked(table.schema(), metadata.partition_columns, metadata.configuration)

    def _after(self, layout: _Layout, actions: list[dict[str, Any]], version: int) -> _Layout:
        """Return the columns after the entry of a version."""
        for action in actions:
            if (protocol := action.get("protocol")) is not None:
                self._check_features(protocol.get("readerFeatures") or ())
            if (new := action.get("metaData")) is not None:
                schema = delta.library().Schema.from_json(new["schemaString"])
                layout = self._checked(schema, new["partitionColumns"], new.get("configuration") or {})
        return layout

    def _check_features(self, features: Sequence[str]) -> None:
        if unknown := sorted(set(features) - _FEATURES):
            raise self._refused(f"needs readers with the feature {unknown[0]}, which this source does not have")

    def _checked(self, given: Any, partitions: Sequence[str], configuration: Mapping[str, Any]) -> _Layout:
        source = self._source
        if (mapping := configuration.get("delta.columnMapping.mode", "none")) != "none":
            raise self._refused(f"has column mapping ({mapping}), which this source does not read")
        schema = places.arrow().schema(given.to_arrow())
        names = schema.names if source.columns is None else source.columns
        if missing := [name for name in names if name not in schema.names]:
            raise InvalidArgument(
                f"The Delta table {source.where} has no column {missing[0]!r}, which columns= names; it has"
                f" {', '.join(schema.names)}.",
                "name columns of the table.",
            )
        foreign.check_keys(names, source.may)
        if source.changes == "feed" and (own := [name for name in names if name in _FEED]):
            raise self._refused(f"has a column {own[0]}, the name of one of the change data feed")
        fields = [schema.field(name) for name in dict.fromkeys(names)]
        has_feed = str(configuration.get("delta.enableChangeDataFeed", "")).lower() == "true"
        return _Layout(
            places.arrow().schema([f.with_type(columns.stored(f.type)) for f in fields]), partitions, has_feed
        )

    def _refused(self, problem: str) -> InvalidArgument:
        return InvalidArgument(
            f"The Delta table {self._source.where} {problem}.",
            "read it with Spark; or copy it to a table without this feature.",
        )

    def _snapshot(self, table: Any) -> list[_File]:
        """Return the files of a version, in the order of their names."""
        with self._files.failures():
            marked = places.arrow().table(table.deletion_vectors()) if "deletionVectors" in _features(table) else ()
            found = (
                places.arrow()
                .table(table.get_add_actions())
                .select(["path", "partition"] if _is_divided(table) else ["path"])
            )
        if len(marked):
            raise self._refused(f"has deletion vectors in version {table.version()}, which this source does not read")
        change = "insert" if self._source.changes == "feed" else None
        return sorted(_File(row["path"], row.get("partition") or {}, change) for row in found.to_pylist())

    def _changed(self, version: int, layout: _Layout, actions: list[dict[str, Any]]) -> list[_File]:
        """Return the files of the messages of a version, as ``changes=`` decides."""
        source = self._source
        added = [a for action in actions if (a := action.get("add")) and a.get("dataChange", True)]
        removed = [r for action in actions if (r := action.get("remove")) and r.get("dataChange", True)]
        feed = [each for action in actions if (each := action.get("cdc"))]
        if removed and source.changes == "refuse":
            hint = "'feed', for a message of each change, or 'skip'" if layout.has_feed else "'skip'"
            raise Diverged(
                f"The version {version:,} of {source.where} deletes or changes rows ({_operation(actions)}), which"
                " changes='refuse' does not take.",
                f"give changes={hint}, to leave out such versions; the source continues with it.",
            )
        if removed and source.changes == "skip":
            return []
        if source.changes == "feed" and feed:
            return [_File(each["path"], each.get("partitionValues") or {}) for each in feed]
        if removed and not layout.has_feed:
            raise Diverged(
                f"The version {version:,} of {source.where} deletes or changes rows ({_operation(actions)}), and the"
                " table had no change data feed then.",
                "set the property delta.enableChangeDataFeed before such changes, and give the source another id,"
                " which begins with a snapshot.",
            )
        files = []
        for change, found in (("delete", removed), ("insert", added)):
            for each in found:
                if each.get("deletionVector"):
                    raise self._refused(
                        f"has a deletion vector in version {version:,}, which this source does not read"
                    )
                files.append(
                    _File(each["path"], each.get("partitionValues") or {}, change if source.changes == "feed" else None)
                )
        return files

    # --- rows ---

    def _rows(
        self, place: _Place, layout: _Layout, files: list[_File], at: datetime | None
    ) -> Iterator[tuple[Position, Any]]:
        """Yield the rows of the files of a version after a place."""
        for number in range(place.file, len(files)):
            skip = place.row if number == place.file else 0
            for before, batch in self._files.batches(files[number], layout, skip, place.version):
                rows = self._as_messages(files[number], layout, batch, place.version, at)
                here = place._replace(file=number, row=before + rows.num_rows)
                if self._by_columns and (taken := self._taken(rows)) is not None:
                    yield here.packed(), taken
                    continue
                for count, row in enumerate(columns.rows_of(rows, files[number].path), before + 1):
                    yield here._replace(row=count).packed(), self._message(row)

    def _as_messages(self, file: _File, layout: _Layout, batch: Any, version: int, at: datetime | None) -> Any:
        """Return a batch of a file with the columns of the messages."""
        pa, count = places.arrow(), batch.num_rows
        arrays, fields = [], list(layout.schema)
        for field in fields:
            if field.name in layout.partitions:
                arrays.append(_constant(file.values.get(field.name), field.type, count))
            elif (index := batch.schema.get_field_index(field.name)) < 0:
                arrays.append(pa.nulls(count, field.type))
            else:
                arrays.append(_as_type(batch.column(index), field, file.path))
        if self._source.changes == "feed":
            kinds = pa.string(), pa.int64(), pa.timestamp("us", "UTC")
            fields += [pa.field(name, kind) for name, kind in zip(_FEED, kinds)]
            index = batch.schema.get_field_index(_FEED[0])
            kind = batch.column(index).cast(pa.string()) if file.change is None else pa.repeat(file.change, count)
            arrays += [kind, pa.repeat(pa.scalar(version, kinds[1]), count), pa.repeat(pa.scalar(at, kinds[2]), count)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([field.with_nullable(True) for field in fields]))

    def _taken(self, rows: Any) -> Any:
        """Return a batch as a table that the engine takes; None if its rows must be looked at."""
        if not blocks.may_be_columns(rows.schema.names):
            return None
        table = places.arrow().Table.from_batches([rows])
        try:
            return table if self._process is None else self._process.check(table)
        except CuesError:
            return None

    def _message(self, row: dict[str, Any] | ValueError) -> Any:
        if isinstance(row, ValueError):
            return InvalidArgument(f"A row of {self._source.where}: {row}.", "correct the row in the table.")
        try:
            foreign.check(row, self._source.may)
        except InvalidArgument as error:
            return error
        return row


class _Files:
    """The table of a source: its versions, its log and its files."""

    def __init__(self, source: DeltaSource) -> None:
        self._source = source
        self._is_local = "://" not in source.where

    @contextmanager
    def failures(self, file: str = "") -> Iterator[None]:
        """Raise failures of delta-rs and pyarrow as errors of Cues. A file that is not there: FileNotFoundError."""
        delta_error = delta.library().exceptions.DeltaError
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, delta_error, places.arrow().ArrowException) as error:
            text, where = delta.said(error), self._source.where
            if says_away(text, where):
                raise Away(
                    f"The Delta table {where} cannot be reached: {text}",
                    "wait: the source continues at its position when the place answers.",
                    what=where,
                ) from error
            raise InvalidArgument(
                f"The {f'file {file} of the ' if file else ''}Delta table {where} cannot be read: {text}",
                "start the graph again when the table can be read; the source continues at its position.",
            ) from error

    def table(self, version: int | datetime | None) -> Any:
        """Return the table at a version, at a time or, for None, at its newest version."""
        library, source = delta.library(), self._source
        with self.failures():
            try:
                table = library.DeltaTable(source.where, storage_options=source.storage_options or None)
            except library.exceptions.TableNotFoundError:
                raise InvalidArgument(
                    f"There is no Delta table {source.where}.", "give the directory that has _delta_log."
                ) from None
        if version is None:
            return table
        with self.failures():
            try:
                table.load_as_version(version)
            except library.exceptions.DeltaError as error:
                if says_away(delta.said(error), source.where):
                    raise
                raise self._gone(f"the log does not have version {version} any more") from error
        return table

    def _gone(self, problem: str) -> Diverged:
        return Diverged(
            f"The Delta table {self._source.where} has forgotten rows that were not read: {problem}.", _ANEW
        )

    def _opened(self, path: str) -> Any:
        """Open a file of the table for pyarrow. Raises FileNotFoundError."""
        if self._is_local:
            return places.arrow().OSFile(os.path.join(self._source.where, path))
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self._source.where, self._source.storage_options).open_input_file(path)

    def log(self, version: int) -> bytes | None:
        """Return the entry of a version in the log; None if it is not there."""
        with self.failures():
            try:
                with self._opened(f"_delta_log/{version:020}.json") as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    def entry(self, version: int) -> list[dict[str, Any]]:
        """Return the actions of the entry of a version in the log."""
        if (text := self.log(version)) is None:
            raise self._gone(f"the log has no entry of version {version:,} any more")
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    def batches(self, file: _File, layout: _Layout, skip: int, version: int) -> Iterator[tuple[int, Any]]:
        """Yield ``(rows before, record batch)`` of a file after its first ``skip`` rows."""
        import pyarrow.parquet as pq

        if "://" in file.path or file.path.startswith("/"):
            raise InvalidArgument(
                f"The Delta table {self._source.where} has the file {file.path} of another place, as a shallow clone"
                " has, which this source does not read.",
                "copy the table.",
            )
        with self.failures(file.path):
            try:
                opened = self._opened(unquote(file.path))
            except FileNotFoundError:
                raise self._gone(f"the file {file.path} of version {version:,} is gone, as vacuum removes it") from None
            with opened, pq.ParquetFile(opened, pre_buffer=False, coerce_int96_timestamp_unit="us") as parquet:
                wanted = [*layout.schema.names, *_FEED[:1]]
                names = [
                    name for name in parquet.schema_arrow.names if name in wanted and name not in layout.partitions
                ]
                if not names:
                    names = parquet.schema_arrow.names[:1]  # for the number of rows
                size = sum(parquet.metadata.row_group(n).total_byte_size for n in range(parquet.num_row_groups))
                most = max(1, _BATCH_BYTES * parquet.metadata.num_rows // max(size, 1))
                # Threads of pyarrow that call a file of delta-rs may outlive Python.
                yield from opened_file.parquet_rows(
                    parquet, skip, names, min(self._source.batch_rows, most), use_threads=self._is_local
                )


def _features(table: Any) -> Sequence[str]:
    return table.protocol().reader_features or ()


def _is_divided(table: Any) -> bool:
    return bool(table.metadata().partition_columns)


def _info(actions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the information about the commit of a version; empty if the writer gave none."""
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), {})


def _operation(actions: list[dict[str, Any]]) -> str:
    return str(_info(actions).get("operation", "an unnamed operation"))


def _time_of(actions: list[dict[str, Any]]) -> datetime | None:
    info = _info(actions)
    at = info.get("inCommitTimestamp", info.get("timestamp"))
    return None if at is None else datetime.fromtimestamp(at / 1000, UTC)


def _before(actions: list[dict[str, Any]], time: datetime) -> bool:
    return (at := _time_of(actions)) is not None and at < time


def _constant(value: Any, kind: Any, count: int) -> Any:
    """Return the column of a partition: a value, as the log has it as a text, ``count`` times."""
    pa = places.arrow()
    if value is None or value == "":
        return pa.nulls(count, kind)
    if isinstance(value, str) and not pa.types.is_string(kind):
        if pa.types.is_timestamp(kind):
            value = pa.array([value.replace("T", " ").removesuffix("Z")]).cast(pa.timestamp("us")).cast(kind)[0]
        else:
            value = pa.array([value]).cast(kind)[0]
    return pa.repeat(value if isinstance(value, pa.Scalar) else pa.scalar(value, kind), count)


def _as_type(column: Any, field: Any, path: str) -> Any:
    """Return the values of a file as the type that the table has now."""
    pa = places.arrow()
    if column.type.equals(field.type):
        return column
    try:
        kind = columns.stored(column.type)
        if pa.types.is_timestamp(kind) and kind.tz is None and pa.types.is_timestamp(field.type):
            kind = pa.timestamp(kind.unit, field.type.tz)  # INT96, as Spark writes instants, has no zone
        return formats.exactly(column.cast(kind), field.type)
    except pa.ArrowException as error:
        raise InvalidArgument(
            f"The file {path} has {column.type} in {field.name!r}, and the table has {field.type}: {error}.",
            "leave the column out with columns=, or write the table anew.",
        ) from None
