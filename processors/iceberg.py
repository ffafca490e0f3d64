"""Iceberg tables as targets of sinks, exactly once: append, upsert or delete, in any catalog that pyiceberg has.

    lake = {"type": "sql", "uri": "sqlite:///lake/catalog.db", "warehouse": "file:///data/lake"}
    flights = IcebergTarget("air.flights", catalog=lake, schema=pa.schema({"id": pa.int64(), "city": pa.string()}))
    graph.add(flights.sink("checked", linger_s=10))

The client is pyiceberg, the extra ``iceberg``. It is imported on first use. Spark, Trino, DuckDB, polars and all other
readers of Iceberg read the table, also while it is written.

A step is one commit of the table: its rows, and the position of the sink. The row of delivery
(:mod:`cues.checkpoints.deliveries`) is a property of the table, ``cues.position.<processor>``, as JSON:

    1. load      the table from the catalog, as it is now
    2. read      the property of the processor
    3. admit     accept the delivery or refuse it; find the messages that are new
    4. gather    the rows of the function, in memory
    5. commit    a snapshot with the rows, and the property; refused if the table has got another snapshot since 1

Each step makes a snapshot, also one without rows, so of two commits for one property the later one is refused. Then
pyiceberg would repeat the commit upon the new snapshot, with the property that it has: this is switched off for our
commits, and the step is repeated from 1. An answer to 5 that is lost leaves no doubt: the property is read again.

A sink that has lost two commits in a row to others asks for a turn: the property ``cues.turn`` has its processor, and
for how long. Sinks that see it wait before their next step, and the commit of the asker removes it. So large steps and
small ones share a table. A turn is a courtesy: nothing depends on it, and one whose asker has died ends by itself.

    append    add each message
    upsert    delete the rows with the keys of the messages, and add the messages; the last one of a step wins
    delete    delete the rows with the keys of the messages

The columns are those of the table, which ``schema=`` makes if it is not there. A field that the message does not have
is null. A field that the table does not have fails the message; with ``evolve=True`` the table gets a column for it, as
soon as it has a value. A value that the column does not hold exactly fails the message.

The summary of each snapshot has ``cues.processor`` and ``cues.delivery``, the hash of the step.

Files in a local warehouse (``file:`` in the catalog's property ``warehouse``) are synced before the catalog commits:
pyiceberg does not do it (iceberg_files.py). A catalog in a SQLite file is set to ``synchronous = extra``.

Not guaranteed: more than the place keeps: what other writers add to a local warehouse is not synced. The table must not
be rolled back to an earlier snapshot: the property stays, and the sink does not add again what was removed. Expiring
snapshots, compaction and other writers are safe while the sink runs.
"""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import cues
from cues.arguments import options_of, text_of
from cues.checkpoints import Row, Transaction
from cues.errors import CheckpointError, InvalidArgument
from cues.imported import package
from cues.overrides import override
from cues.processors import SINK, columns, places, takes, waits
from cues.processors.lake import LakeConnection, LakePositions, LakeTarget, says_away

_PROPERTY: Final = "cues.position."
_TRIES: Final = 6
"""Tries to make something that another one makes at the same time."""
_TURN: Final = "cues.turn"
_LOST_MAX: Final = 2
"""Commits that a sink loses in a row before it asks for a turn: with fewer, a chance meeting costs a commit more."""
_TURN_S: Final = (2.0, 60.0)
"""The least and the longest turn in seconds; between them, three times the step that was lost."""
_RETRIES: Final = "commit.retry.num-retries"
_NEW_TABLE: Final = {"commit.manifest-merge.enabled": "true"}
"""Properties of a new table. Otherwise each commit adds a manifest, which every reader opens."""
_PART: Final = re.compile(r"(\w+)\((?:(\d+), *)?(.+)\)")
_TRANSFORMS: Final = ("identity", "year", "month", "day", "hour", "bucket", "truncate", "void")
_KEYS: Final = "boolean int32 int64 string binary date32 timestamp time64 decimal128 fixed_size_binary"


def library() -> Any:
    """Return the package pyiceberg, with its modules of catalogs and exceptions."""
    modules = "pyiceberg", "pyiceberg.catalog", "pyiceberg.exceptions"
    found = package("Iceberg tables need pyiceberg", "iceberg", *modules)
    warnings.filterwarnings("ignore", "Delete operation did not match", UserWarning)  # an upsert of new rows
    return found


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the table of ``checkpoint=``: the function of :meth:`IcebergTarget.sink`."""
    process.connection.write(messages)


@takes(SINK)
class IcebergTarget(LakeTarget):
    """An Iceberg table as the target of sinks (``checkpoint=``); see the module.

    ``table``         the name of the table, with its namespace: ``"air.flights"``
    ``catalog``       the properties of the catalog, as pyiceberg takes them (``type``, ``uri``, ``warehouse``, keys of
                      object stores; ``name`` is that of the catalog); or its name in ``.pyiceberg.yaml``
    ``schema``        a ``pyarrow.Schema``: the table is made with it, or has these columns; None: the table is there
    ``mode``          ``"append"``, ``"upsert"`` or ``"delete"``
    ``key``           the columns of the key of upserts and deletes: no floats, lists, dicts or maps
    ``partition_by``  the partitions of a new table: columns, or ``"day(at)"``, ``"bucket(16, id)"``,
                      ``"truncate(4, name)"``, ``year``, ``month`` and ``hour``
    ``evolve``        True: the table gets new columns for new fields, and is made of the first messages
    ``properties``    of a new table, such as ``{"write.parquet.compression-codec": "zstd"}``

    Kind: sink
    Needs: extra `iceberg`
    Guarantee: exactly once: each message is in the table once, also after kill -9
    Mechanism: row of delivery in a property of the table, in the commit of the rows
    """

    SYSTEM = "Iceberg"

    def __init__(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str],
        schema: Any = None,
        mode: str = "append",
        key: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        evolve: bool = False,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self.where = text_of("table", table)
        self.catalog = catalog if isinstance(catalog, str) else options_of("catalog", catalog)
        self.properties = options_of("properties", properties or {})
        self._loaded: Any = None
        self._turn, self._waits_until = "", 0.0
        self._lost: dict[str, int] = {}
        """The commits in a row that each processor lost."""
        if not all(self.where.split(".")) or "." not in self.where:
            raise InvalidArgument(f"table={table!r} has no namespace.", "give both: 'air.flights'.")
        if not self.catalog:
            raise InvalidArgument(f"catalog={catalog!r}.", "give the properties of a catalog, or its name.")
        super().__init__(schema, mode, key, partition_by, evolve)
        for part in self.partition_by:
            _transform(part)

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def _catalog(self) -> Any:
        """The catalog, which is loaded once in a process."""
        if self._loaded is None:
            load = library().catalog.load_catalog
            with self.failures():
                given = {} if isinstance(self.catalog, str) else dict(self.catalog)
                name = self.catalog if isinstance(self.catalog, str) else given.pop("name", "default")
                self._loaded = _made_once(lambda: load(name, **given))
            _commit_durably(getattr(self._loaded, "engine", None))
            if str(self._loaded.properties.get("warehouse", "")).startswith(("file:", "/")):
                self._loaded.properties.setdefault("py-io-impl", "cues.processors.iceberg_files.SyncedFileIO")
        return self._loaded

    @override
    def open(self) -> Any:
        """Return the ``pyiceberg.table.Table`` as it is now; None if there is none."""
        catalog = self._catalog
        with self.failures():
            try:
                table = catalog.load_table(self.where)
            except library().exceptions.NoSuchTableError:
                return None
        self.see(table)
        # A retry of pyiceberg would put our property upon a snapshot of another owner. Only this object has it.
        properties = {**table.metadata.properties, _RETRIES: "0"}
        table.metadata = table.metadata.model_copy(update={"properties": properties})
        return table

    @override
    def make(self, schema: Any) -> None:
        catalog, namespace = self._catalog, self.where.rpartition(".")[0]
        with self.failures():
            _made_once(lambda: catalog.create_namespace_if_not_exists(namespace))
            try:
                with catalog.create_table_transaction(
                    self.where, schema, properties={**_NEW_TABLE, **self.properties}
                ) as made:
                    if self.partition_by:
                        with made.update_spec() as spec:
                            for part in self.partition_by:
                                spec.add_field(self.column_of(part), _transform(part))
            except library().exceptions.TableAlreadyExistsError:
                pass

    @override
    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Any]]:
        while self._turn.partition(" ")[0] not in ("", process.id) and time.monotonic() < self._waits_until:
            if not waits.wait(process, random.uniform(0.05, 0.15), new=False):
                break  # the run ends: it tries without a turn
            self.open()
        return super().transaction(process)

    def see(self, table: Any) -> None:
        """Note the turn that a table has: of which processor, and until when the others wait."""
        text = table.properties.get(_TURN, "")
        if text != self._turn:
            left_s = 0.0
            with suppress(ValueError):  # written by hand
                _, seconds, until = text.split()
                left_s = min(float(seconds), float(until) - time.time(), _TURN_S[1])  # clocks of two machines differ
            self._turn, self._waits_until = text, time.monotonic() + left_s

    def lose(self, processor: str, took_s: float) -> None:
        """Count a commit that was lost to another one; ask for a turn after :data:`_LOST_MAX` of them."""
        self._lost[processor] = self._lost.get(processor, 0) + 1
        if self._lost[processor] < _LOST_MAX:
            return
        with suppress(Exception):  # whoever cannot ask tries without
            if (table := self.open()) is not None and time.monotonic() >= self._waits_until:
                seconds = min(max(3 * took_s, _TURN_S[0]), _TURN_S[1])
                with table.transaction() as change:
                    change.set_properties({_TURN: f"{processor} {seconds:.1f} {time.time() + seconds:.1f}"})

    def win(self, processor: str, table: Any) -> None:
        """Note a commit, and the turn for which another sink asked in the meantime."""
        self._lost.pop(processor, None)
        self.see(table)

    @override
    def connect(self) -> Connection:
        return Connection(self)

    @override
    def positions(self, tailers: Iterable[str], asked: Sequence[str]) -> LakePositions:
        return _Positions(self)

    @override
    def type_of(self, kind: Any) -> Any:
        pa, types = places.arrow(), places.arrow().types
        if types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz and "UTC")
        if types.is_time(kind):
            return pa.time64("us")
        if types.is_integer(kind):
            is_small = kind.bit_width < 32 or kind == pa.int32()
            return pa.decimal128(20, 0) if kind == pa.uint64() else pa.int32() if is_small else pa.int64()
        if types.is_float16(kind):
            return pa.float32()
        known = "float32 float64 boolean string binary date32 decimal128 fixed_size_binary"
        return kind if any(getattr(types, f"is_{each}")(kind) for each in known.split()) else None

    @override
    def kept(self, fields: Iterable[Any]) -> Any:
        schema = super().kept(fields)
        for field in schema:
            if "" in _names(field):  # pyiceberg finds it when it writes the manifest, after the data
                raise ValueError(f"the column {field.name!r} has a name that is empty, and Iceberg takes no such name")
        return schema

    @override
    def schema_of(self, table: Any) -> Any:
        pa, fields = places.arrow(), []
        for field in table.schema().as_arrow():
            fields.append(pa.field(field.name, _plain(field.type), field.nullable))
        return pa.schema(fields)

    @override
    def misfits(self, table: Any, schema: Any) -> list[str]:
        wrong = []
        for field, given in zip(schema, table.schema().fields):
            try:
                is_kept = self.kept([field]).field(0).type == field.type and "uuid" not in str(given.field_type)
            except ValueError:
                is_kept = False
            if not is_kept:
                wrong.append(f"{field.name} is {given.field_type}, which the sink does not write")
        if self.partition_by:
            names = {each.field_id: each.name for each in table.schema().fields}
            there = [(names.get(each.source_id), str(each.transform)) for each in table.spec().fields]
            if there != [(self.column_of(part), str(_transform(part))) for part in self.partition_by]:
                wrong.append(f"its partitions are {table.spec()}, not by {self.partition_by}")
        return wrong

    @override
    def column_of(self, part: str) -> str:
        return match[3] if (match := _PART.fullmatch(part)) else part

    @override
    def unfit_keys(self, schema: Any) -> list[str]:
        types = places.arrow().types
        floats = [name for name in self.key if name in schema.names and types.is_floating(schema.field(name).type)]
        return [
            *(
                f"{name} of key= is {schema.field(name).type}, whose NaN and -0.0 a filter does not find"
                for name in floats
            ),
            *super().unfit_keys(schema),
        ]

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of pyiceberg as CheckpointError, which says whether the place is away."""
        exceptions = library().exceptions
        try:
            yield
        except (exceptions.NoSuchTableError, exceptions.TableAlreadyExistsError, CheckpointError):
            raise
        except Exception as error:
            again = isinstance(error, (exceptions.CommitFailedException, exceptions.CommitStateUnknownException))
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            gone = isinstance(error, (exceptions.ServiceUnavailableError, exceptions.ServerError))
            gone |= isinstance(error, OSError) and says_away(text, self.where)
            raise self.unfinished(text[:1000], again=again, away=gone) from error


takes({**SINK, "checkpoint": IcebergTarget})(write)
write.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue


class Connection(LakeConnection):
    """The open transaction of an :class:`IcebergTarget`: its rows are written at the end of the block."""

    target: IcebergTarget

    def __init__(self, target: IcebergTarget) -> None:
        super().__init__(target)
        self.processor = ""
        """The processor of :attr:`row`."""
        self._began = time.monotonic()

    @override
    def check(self, part: Any) -> None:
        """Refuse years before 1 and the like: Python, in which pyiceberg keeps the bounds of a file, has none."""
        for name in part.column_names:
            kind = part.column(name).type
            if places.arrow().types.is_temporal(kind):
                columns.values_of(part.column(name), "a message", name)

    @override
    def commit(self) -> None:
        """Write the rows and the property. Raises :class:`CheckpointError` if another commit came in between."""
        target, row, rows = self.target, self.row, self.rows
        assert row is not None
        if self.raw is None:
            if not rows.num_columns:
                return  # nothing was written, and there is no table that can keep the position
            target.make(self.schema)
            self.raw = target.open()
        table, summary = self.raw, {"cues.processor": self.processor, "cues.delivery": row.hash}
        try:
            with target.failures():
                self._add(table.transaction(), rows, summary, row)
        except CheckpointError as error:
            if error.again:
                target.lose(self.processor, time.monotonic() - self._began)
            raise

    def _add(self, transaction: Any, rows: Any, summary: dict[str, str], row: Row) -> None:
        target, table = self.target, self.raw
        names = {field.name for field in table.schema().fields}
        if new := [field for field in self.schema if field.name not in names]:
            with transaction.update_schema() as change:
                change.union_by_name(places.arrow().schema(new))
        if target.key and len(rows):
            transaction.delete(_filter(rows, target.key), snapshot_properties=summary)
        added = self.schema.empty_table() if target.mode == "delete" else rows
        transaction.append(added, snapshot_properties=summary)
        value = json.dumps(row.columns())
        transaction.set_properties({f"{_PROPERTY}{self.processor}": value})
        if table.properties.get(_TURN, "").startswith(f"{self.processor} "):
            transaction.remove_properties(_TURN)
        target.win(self.processor, transaction.commit_transaction())


class _Positions(LakePositions):
    """A row is a property of the table."""

    @override
    def stored(self, connection: Connection, processor: str) -> Row | None:
        value = connection.raw.properties.get(f"{_PROPERTY}{processor}")
        if value is None:
            return None
        what = f"The property {_PROPERTY}{processor} of the table {self.where}"
        try:
            kept: Any = json.loads(value)
        except ValueError:
            kept = value
        return Row.kept(kept, what, "remove the property if it is of another program, or use another table.")

    @override
    def write(self, connection: Connection, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row, connection.processor = row, processor
        return True

    @override
    def processors(self, connection: Connection) -> Iterable[str]:
        names = () if connection.raw is None else connection.raw.properties
        return [name.removeprefix(_PROPERTY) for name in names if name.startswith(_PROPERTY)]


def _commit_durably(engine: Any) -> None:
    """Let a catalog in a SQLite file sync the deletion of its journal: else a power cut undoes the last commit."""
    if engine is not None and engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
        from sqlalchemy import event

        engine.dispose()  # of connections without it
        event.listen(engine, "connect", lambda connection, _: connection.execute("pragma synchronous = extra"))


def _made_once(make: Callable[[], Any]) -> Any:
    """Call a function of a catalog that makes something unless it is there; again if another one was faster.

    pyiceberg looks first, and then makes it, so a catalog in a database refuses the second of two: once for each of its
    tables.
    """
    for number in range(_TRIES):
        try:
            return make()
        except Exception as error:
            if not type(error).__module__.startswith("sqlalchemy") or number == _TRIES - 1:
                raise
        time.sleep(random.uniform(0, 0.02 * 2**number))  # so that two do not meet at each table


def _transform(part: str) -> Any:
    """Return the transform of an item of ``partition_by=``. Raises :class:`InvalidArgument` for an unknown one."""
    match = _PART.fullmatch(part)
    name, number = (match[1], match[2]) if match else ("identity", None)
    if name not in _TRANSFORMS or (number is not None) != (name in ("bucket", "truncate")):
        raise InvalidArgument(
            f"partition_by={part!r} is unknown.", "give a column, or such as 'day(at)', 'bucket(16, id)'."
        )
    library()
    from pyiceberg.transforms import parse_transform

    return parse_transform(name if number is None else f"{name}[{number}]")


def _names(field: Any) -> list[str]:
    """Return the name of a field, and those of the fields in it."""
    kind = field.type
    return [field.name, *(name for at in range(kind.num_fields) for name in _names(kind.field(at)))]


def _plain(kind: Any) -> Any:
    """Return a type of pyiceberg without large types and the numbers of fields."""
    pa = places.arrow()
    kind = columns.stored(kind)
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type), field.nullable) for field in kind])
    return kind


def _filter(rows: Any, key: Sequence[str]) -> Any:
    """Return the filter that finds the rows with the keys of ``rows``: for each of the other columns a list of one."""
    from pyiceberg import expressions

    made: Any = expressions  # its types ask for names, which its constructors do not
    *others, last = key
    found: dict[tuple[Any, ...], list[Any]] = {}
    for values in zip(*(rows.column(name).to_pylist() for name in key)):
        found.setdefault(values[:-1], []).append(values[-1])
    parts = []
    for values, lasts in found.items():
        equal = [made.EqualTo(name, value) for name, value in zip(others, values)]
        parts.append(made.And(*equal, made.In(last, lasts)) if equal else made.In(last, lasts))
    return made.Or(*parts) if len(parts) > 1 else parts[0]
