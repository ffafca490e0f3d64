"""Delta tables as targets of sinks, exactly once: append, upsert or delete, on a disk or in an object store.

    flights = DeltaTarget("lake/flights", schema=pa.schema({"id": pa.int64(), "city": pa.string()}))
    graph.add(flights.sink("checked", linger_s=10))

The client is delta-rs, the extra ``delta``. It is imported on first use. Spark, DuckDB, polars and all other readers
of Delta read the table, also while it is written.

A step is one commit of the table: its rows, and the position of the sink. Delta keeps a number for each *application*,
in the commit that sets it, and refuses the later one of two commits that set the number of the same one. The row of
delivery (:mod:`cues.checkpoints.deliveries`) is a few such numbers, whose names begin with ``cues:<processor>``:

    1. open      the table, at its newest version
    2. read      the numbers of the processor
    3. admit     accept the delivery or refuse it; find the messages that are new
    4. gather    the rows of the function, in memory
    5. commit    rows and numbers as the next version; refused if another commit has set the numbers since 1

An answer to 5 that is lost leaves no doubt: the numbers are read again, and 3 finds no new messages, or all of them.

    append    add each message
    upsert    add, or replace the rows with this key; the last message of a step wins
    delete    delete the rows with the keys of the messages

The columns are those of the table, which ``schema=`` makes if it is not there. A field that the message does not have
is null. A field that the table does not have fails the message; with ``evolve=True`` the table gets a column for it, as
soon as it has a value. A value that the column does not hold exactly fails the message.

Each commit makes at least one file. So let the sink wait for more messages (``linger_s=``), and compact the table from
time to time (``deltalake.DeltaTable("lake/flights").optimize.compact()``); both are safe while the sink runs.

Not guaranteed: more than the place keeps. A local table is not synced to the disk, so a power cut may damage its last
versions. The table must not be restored to an earlier version, and must not forget the numbers of applications: the
property ``delta.setTransactionRetentionDuration`` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from urllib.parse import quote

import cues
from cues.arguments import options_of, path_of, texts_of
from cues.checkpoints import Row, Transaction, held, write_once
from cues.errors import CheckpointError, InvalidArgument, NotInstalled
from cues.processors import SINK, columns, formats, places, takes

MODES: Final = ("append", "upsert", "delete")

AWAY: Final = re.compile(
    r"error sending request|tcp connect|timed? ?out|connection|dns error|slow ?down|\b(429|500|502|503|504)\b"
    r"|no space left|stale file handle",
    re.IGNORECASE,
)
"""Texts of an object store or a disk that cannot be reached now."""
_NEVER: Final = re.compile("unsupported table feature|append-only", re.IGNORECASE)
"""Texts of commits that fail at each attempt, and not because of another commit."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m|↳")
_FORGETS: Final = "delta.setTransactionRetentionDuration"


def library() -> Any:
    """Return the package deltalake."""
    try:
        import deltalake
    except ImportError as error:
        raise NotInstalled(f"Delta tables need delta-rs: {error}.", "pip install 'cues-streams[delta]'.") from None
    return deltalake


def said(error: Exception) -> str:
    """Return the text of an error of delta-rs, on one line."""
    return " ".join(_ANSI.sub("", str(error)).split())


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the table of ``checkpoint=``: the function of :meth:`DeltaTarget.sink`."""
    process.connection.write(messages)


@takes(SINK)
class DeltaTarget:
    """A Delta table as the target of sinks (``checkpoint=``); see the module.

    ``where``            a directory, or a URL that delta-rs knows: ``"s3://bucket/table"``, ``az://``, ``gs://``
    ``schema``           a ``pyarrow.Schema``: the table is made with it, or has these columns; None: the table is there
    ``mode``             ``"append"``, ``"upsert"`` or ``"delete"``
    ``key``              the columns of the key of upserts and deletes
    ``partition_by``     the columns by which a new table is divided into directories
    ``evolve``           True: the table gets new columns for new fields, and is made of the first messages
    ``storage_options``  of delta-rs, such as ``{"AWS_REGION": "eu-central-1"}``

    Kind: sink
    Needs: extra `delta`
    Guarantee: exactly once: each message is in the table once, also after kill -9
    Mechanism: row of delivery in the application transactions of Delta, in the commit of the rows
    """

    def __init__(
        self,
        where: Any,
        *,
        schema: Any = None,
        mode: str = "append",
        key: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        evolve: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.where: str = where if isinstance(where, str) and "://" in where else path_of("where", where)
        self.schema, self.mode, self.evolve = schema, mode, evolve
        self.key, self.partition_by = texts_of("key", key), texts_of("partition_by", partition_by)
        self.storage_options = options_of("storage_options", storage_options or {})
        if mode not in MODES:
            raise InvalidArgument(f"mode={mode!r} is unknown.", f"use one of {', '.join(MODES)}.")
        if (mode != "append") != bool(self.key):
            raise InvalidArgument(
                f"mode={mode!r} with key={self.key} do not fit.",
                "give key= the columns of the key for 'upsert' and 'delete', and leave it out for 'append'.",
            )
        if any("`" in name for name in self.key):
            raise InvalidArgument(f"key={self.key}: delta-rs takes no ` in the name of a key.", "rename the column.")
        if type(evolve) is not bool:
            raise InvalidArgument(f"evolve={evolve!r:.60}.", "give True or False.")
        if schema is not None:
            _check(schema, [*self.key, *self.partition_by])
            if nested := _nested(schema, self.key):
                raise InvalidArgument(f"{nested[0]}.", "use a column of numbers, texts or times.")

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Connection]]:
        """Run the block, whose rows are one commit of the table, with exactly the messages that are new to it.

        ``connection.write(rows)`` takes a message, a list of messages, or a table of Arrow. Raises
        :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when the table cannot be read or written.
        """
        return write_once(_Positions(self, process.delivery.end), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a position in the table: it refuses them from another store."""
        asked = list(processors)
        return held(_Positions(self, asked=asked), asked)

    def open(self) -> Any:
        """Return the ``deltalake.DeltaTable`` at its newest version; None if there is no table."""
        delta = library()
        with self.failures():
            try:
                return delta.DeltaTable(self.where, storage_options=self.storage_options)
            except delta.exceptions.TableNotFoundError:
                return None

    def __cues_prepare__(self) -> None:
        """Create or check the table, so that no message meets a mistake of the declaration."""
        library()
        table = self.open()
        if table is None and self.schema is not None:
            with self.failures():
                table = library().DeltaTable.create(
                    self.where, _delta(self.schema), mode="ignore", partition_by=self.partition_by,
                    storage_options=self.storage_options,
                )  # fmt: skip
            table = self.open()
        if table is None and self.evolve and self.mode != "delete":
            return
        if table is None:
            raise self.misfit("is not there", "give schema=, with which the sink makes it; or evolve=True.")
        there, metadata = _schema_of(table), table.metadata()
        wrong = []
        for field in [] if self.schema is None else _delta(self.schema):
            if field.name not in there.names:
                wrong += [] if self.evolve else [f"{field.name} is missing"]
            elif there.field(field.name).type != field.type:
                wrong.append(f"{field.name} is {there.field(field.name).type}, not {field.type}")
        wrong += [
            f"{name} is binary, and divides the table into directories, which lose its bytes"
            for name in metadata.partition_columns
            if there.field(name).type == places.arrow().binary()
        ]
        if set(there.names) == set(metadata.partition_columns):
            wrong.append("all its columns divide it into directories, so its files would have none")
        wrong += [f"{name} of key= is missing" for name in self.key if name not in there.names]
        wrong += _nested(there, self.key)
        if self.key and metadata.configuration.get("delta.appendOnly") == "true":
            wrong.append("it has delta.appendOnly, so no row changes")
        if self.partition_by and self.partition_by != metadata.partition_columns:
            wrong.append(f"it is divided by {metadata.partition_columns}, not by {self.partition_by}")
        if wrong:
            raise self.misfit(f"does not fit: {'; '.join(wrong)}", "change the options of the sink or the table.")
        if _FORGETS in metadata.configuration:
            raise self.misfit(
                f"has the property {_FORGETS}, so it forgets up to where it has messages",
                f"remove it: DeltaTable(…).alter.set_table_properties({{'{_FORGETS}': None}}), or use another table.",
            )

    def misfit(self, problem: str, hint: str) -> CheckpointError:
        """Return the error for a table that the sink cannot use."""
        return CheckpointError(f"The Delta table {self.where} {problem}.", hint, where=self.where, away=False)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of delta-rs as CheckpointError, which says whether the place is away."""
        delta = library().exceptions
        try:
            yield
        except delta.TableNotFoundError:
            raise
        except (OSError, delta.DeltaError) as error:
            text = said(error)
            if "failed validation check" in text:  # a constraint: the message is the cause
                raise ValueError(f"The Delta table {self.where} refuses the message: {text}") from None
            again = "already exists" in text
            again |= isinstance(error, delta.CommitFailedError) and _NEVER.search(text) is None
            raise CheckpointError(
                f"The Delta table {self.where} was not {'changed' if again else 'read or written'}: {text}",
                "it is tried again; the table says whether it was done."
                if again
                else "start the graph again when the table can be read and written; the sink continues there.",
                where=self.where,
                again=again,
                away=again or AWAY.search(text) is not None or None,
            ) from error


takes({**SINK, "checkpoint": DeltaTarget})(write)
write.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue


class Connection:
    """The open transaction of a :class:`DeltaTarget`: its rows are written at the end of the block."""

    def __init__(self, target: DeltaTarget) -> None:
        self._target = target
        self.raw = target.open()
        """The ``deltalake.DeltaTable``, to read from; None if there is no table yet."""
        self.row: Row | None = None
        """The row after this delivery."""
        self.numbers: dict[str, int] = {}
        """The numbers of applications that the commit sets."""
        there = [] if self.raw is None else _schema_of(self.raw)
        given = [] if target.schema is None or (self.raw is not None and not target.evolve) else _delta(target.schema)
        if self.raw is None and (target.mode == "delete" or not (given or target.evolve)):
            raise target.misfit("is not there any more", "restore it.")
        names = [field.name for field in there]
        self._schema = places.arrow().schema([*there, *(field for field in given if field.name not in names)])
        self._parts: list[Any] = []

    def write(self, messages: Any) -> None:
        """Write a message, a list of messages or a table. Raises ValueError for a misfit."""
        target, pa = self._target, places.arrow()
        for run in columns.runs_of(messages, joined=False):
            try:
                part = self._part(run if isinstance(run, list) else columns.in_files(run))
            except pa.ArrowException:  # a value that does not fit: the rows say which
                part = self._part(columns.dicts(run, "a message"))
            lacking = [name for name in target.key if name not in part.column_names or part.column(name).null_count]
            if lacking:
                raise ValueError(
                    f"The message has no value for {lacking[0]!r}, a column of the key of {target.where!r}."
                )
            self._check_partitions(part)
            if not part.num_columns:
                raise ValueError(f"The message has no value, and there is no Delta table {target.where!r} yet.")
            self._parts.append(part)

    def _check_partitions(self, part: Any) -> None:
        """Refuse texts that cannot name a directory: Delta has null for two of them, and a disk takes 255 bytes."""
        by = self._target.partition_by if self.raw is None else self.raw.metadata().partition_columns
        most = 255 if "://" not in self._target.where else 1_000
        for name in by:
            values = part.column(name).unique().to_pylist() if name in part.column_names else []
            for value in values:
                if value in ("", "__HIVE_DEFAULT_PARTITION__"):
                    shown = f"the text {value!r}" if value else "an empty text"
                elif isinstance(value, str) and len(quote(f"{name}={value}", safe="")) > most:
                    shown = f"a text of {len(value)} characters"
                else:
                    continue
                raise ValueError(
                    f"The message has {shown} in {name!r}, which cannot name a directory of the table. Try: divide the"
                    " table by another column, or change the text in a stream before the sink."
                )

    def _part(self, rows: Any) -> Any:
        """Return rows as a table with our columns, or for a delete with those of the key."""
        target, pa = self._target, places.arrow()
        if target.mode == "delete":
            wanted = pa.schema([self._schema.field(name) for name in target.key])
            if isinstance(rows, list):
                rows = [{name: row.get(name) for name in target.key} for row in rows]
            else:
                rows = rows.select([name for name in target.key if name in rows.column_names])
            return pa.table(formats.arrays_of(wanted, rows), schema=wanted)
        names = _names(rows)
        unknown = [name for name in names if name not in self._schema.names]
        if unknown and not target.evolve:
            raise ValueError(
                f"The message has {unknown[0]!r}, which is no column of the Delta table {target.where!r}:"
                f" {', '.join(self._schema.names)}. Try: a stream before the sink that returns these fields, or"
                " evolve=True."
            )
        if unknown:
            rows = self._evolve(rows, unknown)
        return pa.table(formats.arrays_of(self._schema, rows), schema=self._schema)

    def _evolve(self, rows: Any, unknown: list[str]) -> Any:
        """Add columns for new fields that have a value; return the rows without the others, which are null."""
        pa = places.arrow()
        found = formats.widened(None, set(), rows) if isinstance(rows, list) else rows.schema
        new = [found.field(name) for name in unknown]
        known = {name.lower(): name for name in self._schema.names}
        for name in unknown:
            if (other := known.setdefault(name.lower(), name)) != name:
                raise ValueError(
                    f"The message has {name!r}, which differs from the column {other!r} in case only: they are one for"
                    " Delta. Try: rename the field in a stream before the sink."
                )
        self._schema = pa.schema([*self._schema, *_delta([each for each in new if not pa.types.is_null(each.type)])])
        empty = {each.name for each in new if pa.types.is_null(each.type)}
        if isinstance(rows, list):
            return [{name: value for name, value in row.items() if name not in empty} for row in rows]
        return rows.drop_columns(sorted(empty)) if empty else rows

    @property
    def rows(self) -> Any:
        """The rows that are to be written, as one table of Arrow: the last one of each key."""
        target, pa = self._target, places.arrow()
        schema = self._schema
        if target.mode == "delete":
            schema = pa.schema([schema.field(name) for name in target.key])
        parts = [_with(part, schema) for part in self._parts]
        table = pa.concat_tables(parts) if parts else schema.empty_table()
        if target.key and len(table):
            number = pa.array(range(len(table)), pa.int64())
            keys = [_without_sign(table.column(name)) for name in target.key]
            last = pa.table([*keys, number], [*target.key, "q/number"]).group_by(target.key)
            table = table.take(last.aggregate([("q/number", "max")]).column("q/number_max").sort())
        return table

    def commit(self) -> None:
        """Write the rows and the numbers. Raises :class:`CheckpointError` if another owner has set them."""
        delta, target, rows = library(), self._target, self.rows
        numbers = [delta.Transaction(name, number) for name, number in self.numbers.items()]
        properties = delta.CommitProperties(app_transactions=numbers)
        if self.raw is None and not rows.num_columns:
            return  # nothing was written, and there is no table that can keep the position
        with target.failures():
            if self.raw is None:
                delta.write_deltalake(
                    target.where, rows, mode="error", partition_by=target.partition_by or None,
                    storage_options=target.storage_options, commit_properties=properties,
                )  # fmt: skip
            elif target.mode == "append" or not len(rows):
                merge: Any = "merge" if target.evolve else None
                rows = rows if target.mode != "delete" else _schema_of(self.raw).empty_table()
                delta.write_deltalake(self.raw, rows, mode="append", schema_mode=merge, commit_properties=properties)
            else:
                same = " and ".join(f"target.{name} = source.{name}" for name in map(_quoted, target.key))
                merger = self.raw.merge(
                    rows, same, "source", "target", merge_schema=target.evolve, commit_properties=properties
                )
                before = self.raw.version()
                if target.mode == "delete":
                    merger.when_matched_delete().execute()
                else:
                    merger.when_matched_update_all().when_not_matched_insert_all().execute()
                if self.raw.version() == before:  # no row was found, so delta-rs committed nothing
                    empty = _schema_of(self.raw).empty_table()
                    delta.write_deltalake(self.raw, empty, mode="append", commit_properties=properties)


class _Positions:
    """The rows of a target as a table of positions (:class:`cues.checkpoints.PositionTable`).

    A row is read for the tailers of one delivery: the numbers of others stay as they are.
    """

    def __init__(self, target: DeltaTarget, tailers: Iterable[str] = (), asked: Sequence[str] = ()) -> None:
        self._target, self._tailers, self._asked = target, sorted(tailers), asked
        self.where = target.where

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        connection = Connection(self._target)
        yield connection
        if connection.numbers:
            connection.commit()

    def read(self, connection: Connection, processor: str, *, lock: bool) -> Row | None:
        if not lock or connection.raw is None:
            return connection.row
        version = connection.raw.transaction_version
        if (generation := version(f"cues:{processor}:generation")) is None:
            return None
        store, epoch, *hashes = (version(f"cues:{processor}:{name}") for name in ("store", "epoch", "hash", "hash-low"))
        ends, seals = {}, {}
        for tailer in self._tailers:
            end, seal = (version(f"cues:{processor}:{generation}:{tailer}:{name}") for name in ("end", "seal"))
            if end is not None:
                ends[tailer], seals[tailer] = end, _text(seal) if seal else ""
        return Row(_text(store), generation, epoch, ends, "".join(map(_text, hashes)), seals)

    def write(self, connection: Connection, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        numbers = {
            "generation": row.generation,
            "store": _number(row.store),
            "epoch": row.epoch,
            "hash": _number(row.hash[:16]),
            "hash-low": _number(row.hash[16:]),
        }
        for tailer, end in row.ends.items():
            numbers[f"{row.generation}:{tailer}:end"] = end
            numbers[f"{row.generation}:{tailer}:seal"] = _number(row.seals.get(tailer, ""))
        connection.numbers = {f"cues:{processor}:{name}": number for name, number in numbers.items()}
        if insert and "/" in processor:  # for holds, which does not know the partitions
            base = f"cues:{processor.partition('/')[0]}:partitions"
            if connection.raw is None or connection.raw.transaction_version(base) is None:
                connection.numbers[base] = 1
        return True

    def is_open(self, connection: Connection) -> bool:
        return True

    def processors(self, connection: Connection) -> Iterable[str]:
        if connection.raw is None:
            return []
        version = connection.raw.transaction_version
        names = "generation", "partitions"
        return [id for id in self._asked if any(version(f"cues:{id}:{name}") is not None for name in names)]


def _number(digits: str) -> int:
    """Return 16 hex digits as a number of 64 bits with a sign; 0 for none."""
    return int.from_bytes(bytes.fromhex(digits), "big", signed=True)


def _text(number: int) -> str:
    return number.to_bytes(8, "big", signed=True).hex()


def _without_sign(column: Any) -> Any:
    """Return a column of a key with 0.0 for -0.0: Delta finds the rows of both, and a group has only one."""
    pa = places.arrow()
    if not pa.types.is_floating(column.type):
        return column
    from pyarrow import compute

    return compute.add(column, pa.scalar(0.0, column.type))


def _nested(schema: Any, key: Iterable[str]) -> list[str]:
    """Return what is wrong with a key of lists, dicts or maps: rows are not found by them."""
    named = [schema.field(name) for name in key if name in schema.names]
    is_nested = places.arrow().types.is_nested
    return [
        f"{field.name} of key= is {field.type}, and has no single value" for field in named if is_nested(field.type)
    ]


def _quoted(name: str) -> str:
    return f"`{name}`"


def _schema_of(table: Any) -> Any:
    """Return the columns of a Delta table as a schema of pyarrow."""
    return places.arrow().schema(table.schema().to_arrow())


def _names(rows: Any) -> list[str]:
    """Return the names of the fields of rows, or of the columns of a table."""
    return list(dict.fromkeys(key for row in rows for key in row)) if isinstance(rows, list) else rows.column_names


def _with(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema; those that it does not have are null."""
    pa = places.arrow()
    names = set(table.column_names)
    columns = [table.column(f.name) if f.name in names else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, schema=schema)


def _check(schema: Any, names: Iterable[str]) -> None:
    pa = places.arrow()
    if not isinstance(schema, pa.Schema):
        raise InvalidArgument(f"schema={schema!r:.60}.", "give a pyarrow.Schema.")
    try:
        _delta(schema)
    except ValueError as error:
        raise InvalidArgument(f"schema=: {error}", "use another type.") from None
    small = [name.lower() for name in schema.names]
    if twice := [name for at, name in enumerate(small) if name in small[:at]]:
        raise InvalidArgument(f"schema= has the column {twice[0]!r} twice; Delta ignores case.", "rename one of them.")
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise InvalidArgument(f"{missing[0]!r} is no column of schema=: {schema.names}.", "name columns of the schema.")


def _delta(fields: Iterable[Any]) -> Any:
    """Return a schema with the types that a Delta table gives back. Raises ValueError for a type that it lacks."""
    pa = places.arrow()
    return pa.schema([field.with_type(_kept(field.type, field.name)) for field in fields])


def _kept(kind: Any, name: str) -> Any:
    pa, types = places.arrow(), places.arrow().types
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if types.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}[kind.bit_width]
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_kept(kind.value_type, name))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_kept(field.type, f"{name}.{field.name}")) for field in kind])
    kind = columns.stored(kind)
    known = "signed_integer float32 float64 boolean string binary date32 decimal128 map"
    if not any(getattr(types, f"is_{each}")(kind) for each in known.split()):
        raise ValueError(
            f"the column {name!r} is {kind}, and a Delta table has no such type. Try: convert it in a stream before the"
            " sink."
        )
    return kind
