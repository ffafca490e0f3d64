"""Sinks that write messages into a table exactly once: append, upsert, delete; in SQLite, PostgreSQL, MySQL, DuckDB.

    orders = Table("postgresql+psycopg://…", "orders", {"id": "integer", "total": "decimal"}, mode="upsert", key="id")
    graph.add(orders.sink("priced"))

A step is one transaction: its rows, and the position of the sink in ``cues_positions``
(:mod:`cues.checkpoints.deliveries`). The table is created before the first message, or checked: each column must be
there with a type of the same family, and an upsert needs a unique key.

    append    insert each message
    upsert    insert, or update the other columns of the row with this key; the last of a step wins. ``delete="gone"``:
              a message whose field ``gone`` is true deletes the row with its key
    delete    delete the rows with the keys of the messages

Many rows are written at once: in PostgreSQL by COPY (upserts and deletes: into a temporary table, and one statement),
in DuckDB as a table of Arrow, in SQLite by ``executemany``, in MySQL by statements of up to ``max_allowed_packet``.
Rows that lie on the queue as columns stay columns on the way
into PostgreSQL and DuckDB, if the type of each column has the values of the database's column one to one.

A message has a field for each column, and no other; for a delete it has the fields of the key. A message that does not
fit, or that the database refuses (a constraint), fails: it is written to the error queue, or stops the sink. A failure
of the database is :class:`cues.errors.CheckpointError`, which stops the sink at this message; a later start continues
there.

Values: a column gets the same value, or a plainer form that :mod:`cues.processors.sql_values` documents; a value that
the column would change fails its message. SQLite has no types for decimals, times, UUIDs and JSON: they are text there.

MySQL and MariaDB: the table must be one of InnoDB, or of another engine with transactions. Where a key has text, its
collation says which keys are equal, so messages are written in their order. If the table has a second unique key, an
upsert is an update, and an insert where no row was found: the statement for both would update the row of the other key.

Not guaranteed: rows that other programs change. The table is not altered if its columns differ.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import cues
from cues.arguments import options_of, text_of, texts_of
from cues.errors import CheckpointError, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, columns, databases, places, sql_values, takes

MODES: Final = ("append", "upsert", "delete")

_PARAMETERS_MAX: Final = 5_000
"""Values of one statement. PostgreSQL takes 65,535; more than this is not faster."""

MANY_ROWS: Final = 10
"""Rows from which COPY, or a table of Arrow, is faster than a statement with parameters."""

_STATEMENT_BYTES: Final = 1_000
"""Bytes of a statement of MySQL besides its values and its names."""
_VALUE_BYTES: Final = 24
"""Bytes of a value besides its text: quotes, ``_binary``, a comma, parts of a number or a time."""
_ESCAPED: Final = [bytes([byte]) for byte in b"\0\n\r\x1a\"'\\"]
_OPTIONS_OF_MYSQL: Final = " engine = InnoDB default character set utf8mb4 collate "

_COPIED: Final = (
    r"smallint|integer|bigint|double precision|numeric(\(\d+,-?\d+\))?|boolean|text|character( varying)?(\(\d+\))?"
    r"|bytea|date|(timestamp|time)(\(\d\))? with(out)? time zone|uuid|jsonb?"
)
"""Types of PostgreSQL that have the same value by COPY as by a parameter: a real number would be rounded twice."""


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the table of ``checkpoint=``: the function of :meth:`Table.sink`."""
    process.connection.write(messages)


@takes(SINK)
class Table:
    """A table as the target of sinks (``checkpoint=``); see the module.

    ``target``   a URL of SQLAlchemy, a path of a SQLite file, a DuckDB file (``*.duckdb``, ``duckdb:///path``), a
                 ``SQLCheckpoint``, or a :class:`cues.processors.databases.DuckDB`
    ``table``    its name; ``schema.table``
    ``columns``  type by name: integer, float, decimal, boolean, text, bytes, timestamp, date, time, uuid, json. A list
                 of names: any types, and the table must exist
    ``mode``     ``"append"``, ``"upsert"`` or ``"delete"``
    ``key``      the columns of the key of upserts and deletes
    ``delete``   of an upsert: a field that each message has besides its columns; where it is True, the row with the key
                 of the message is deleted, and the message needs no other fields

    Kind: sink
    Needs: extra `sql`; for MySQL and MariaDB `mysql`
    Guarantee: exactly once: each message is written to the table once
    Mechanism: row of delivery, in the transaction of the writes
    """

    def __init__(
        self,
        target: Any,
        table: str,
        columns: Mapping[str, str] | Sequence[str],
        *,
        mode: str = "append",
        key: str | Sequence[str] = (),
        delete: str | None = None,
    ) -> None:
        self.table, self.mode, self.delete = table, mode, delete
        named = isinstance(columns, Mapping)
        self.types = options_of("columns", columns) if named else dict.fromkeys(texts_of("columns", columns), "")
        self.key = texts_of("key", key)
        unknown = [type for type in self.types.values() if type != "" and type not in list(databases.FAMILIES)]
        if unknown:
            raise InvalidArgument(
                f"The type {unknown[0]!r} is unknown.", f"use one of {', '.join(databases.FAMILIES)}."
            )
        if mode not in MODES:
            raise InvalidArgument(f"mode={mode!r} is unknown.", f"use one of {', '.join(MODES)}.")
        if not self.types or (mode != "append") != bool(self.key) or not set(self.key) <= set(self.types):
            raise InvalidArgument(
                f"mode={mode!r} with key={self.key} and the columns {list(self.types)} do not fit.",
                "give columns; for 'upsert' and 'delete' a key= of these columns, for 'append' none.",
            )
        databases.quoted_table(table)
        for name in self.types:
            databases.quoted(name)
        self.target = databases.target_of(target)
        self.deleting: Table | None = None
        """The same table in the mode ``"delete"``, for the messages that ``delete=`` names."""
        if delete is not None:
            if mode != "upsert" or text_of("delete", delete) in self.types:
                raise InvalidArgument(
                    f"delete={delete!r} does not fit mode={mode!r} and the columns {list(self.types)}.",
                    "give mode='upsert', and the name of a field that is not a column.",
                )
            self.deleting = Table(self.target, table, columns, mode="delete", key=self.key)
        self._ready_in = 0
        self._found: dict[str, str] = {}
        """The types of the columns of the table in the database, once it is ready."""
        self._not_null: frozenset[str] = frozenset()
        """The columns of a table of MySQL that take no NULL: it would put a value of its own there."""
        self.in_order = False
        """True if keys that differ here can be equal in the database."""
        self.has_keys = False
        """True if the table has a unique key besides that of an upsert."""
        self.copies = False
        """True if PostgreSQL takes its rows by COPY."""

    @property
    def names(self) -> list[str]:
        """The columns that a message is written to: those of the key for a delete."""
        return self.key if self.mode == "delete" else list(self.types)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready_in": 0}

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    @contextmanager
    def transaction(self, process: cues.Process) -> Iterator[Any]:
        """Run the block in a transaction with exactly the messages that are new to the database.

        ``connection.write(rows)`` takes one row or a list of rows; ``connection.raw`` is the connection of the driver.
        Raises the errors of :meth:`cues.checkpoints.SQLCheckpoint.transaction`, and
        :class:`cues.errors.CheckpointError` if the table in the database does not fit.
        """
        self.__cues_prepare__()
        with self.target.transaction(process) as transaction:
            opened: Any = transaction
            opened.connection = Writer(self, opened.connection)
            yield opened

    def __cues_prepare__(self) -> None:
        """Create or check the table."""
        if self._ready_in != os.getpid():
            self.target.set_up(lambda raw: Writer(self, raw).make_or_check())
            self._ready_in = os.getpid()

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors whose rows the database has: it refuses them from another store."""
        return self.target.holds(processors)

    @property
    def where(self) -> str:
        """The database, for error messages."""
        return self.target.where

    @property
    def one_process(self) -> str | None:
        """The file, if one process at a time can have the database open."""
        return getattr(self.target, "one_process", None)

    def close(self) -> None:
        """Close the database. The next transaction opens it again."""
        self.target.close()


takes({**SINK, "checkpoint": Table})(write)
write.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue


class Writer(databases.Connection):
    """The open transaction of a :class:`Table`. It is as safe for threads as a connection of the database: not."""

    def __init__(self, table: Table, connection: Any) -> None:
        super().__init__(connection)
        self._table = table

    def write(self, messages: Any) -> None:
        """Write a message, a list of messages or a table, by the mode of the table. Raises ValueError for a misfit."""
        if self._table.deleting is not None:
            if self._table.in_order:
                return self._write_in_order(messages, self._table.deleting)
            messages = self._without_deleted(messages, self._table.deleting)
        for run in columns.runs_of(messages, joined=self._table.mode != "append"):
            table = None if isinstance(run, list) else self._as_it_is(run)
            if table is not None:
                self._put_table(table)
            elif rows := self._rows(run):
                self._put_rows(rows)

    def _write_in_order(self, messages: Any, deleting: Table) -> None:
        """Upsert and delete in the order of the messages, as many of one kind at once as follow each other."""
        field = str(self._table.delete)
        listed: list[dict[str, Any]] = []
        for run in columns.runs_of(messages, joined=True):
            listed += run if isinstance(run, list) else columns.dicts(run, "a message")
        for gone, some in itertools.groupby(listed, self._deletes):
            rows = [message if gone else {n: v for n, v in message.items() if n != field} for message in some]
            writer = Writer(deleting, self.raw) if gone else self
            writer._put_rows(writer._rows(rows))

    def _deletes(self, message: dict[str, Any]) -> bool:
        field = str(self._table.delete)
        if message.get(field) not in (True, False):
            raise ValueError(
                f"The message has {message.get(field)!r:.60} in the field {field!r} of delete=. Try: add a"
                " stream before the sink that sets it to True or False."
            )
        return bool(message[field])

    def _without_deleted(self, messages: Any, deleting: Table) -> list[dict[str, Any]]:
        """Delete the rows of the keys whose last message deletes; return the last messages of the others."""
        field, key = str(self._table.delete), self._table.key
        last: dict[tuple[Any, ...], dict[str, Any]] = {}
        replaced: list[dict[str, Any]] = []
        for run in columns.runs_of(messages, joined=True):
            for message in run if isinstance(run, list) else columns.dicts(run, "a message"):
                self._deletes(message)
                of = tuple(message.get(name) for name in key)
                replaced += [last.pop(of)] if of in last else []
                last[of] = message
        Writer(deleting, self.raw).write([message for message in last.values() if message[field]])
        replaced, kept = (
            [
                {name: value for name, value in message.items() if name != field}
                for message in each
                if not message[field]
            ]
            for each in (replaced, last.values())
        )
        if replaced:
            self._rows(replaced)  # one that does not fit fails also if a later one has its key
        return kept

    # --- rows, of messages or of a table, each value as the driver takes it ---

    def _rows(self, run: Any) -> list[tuple[Any, ...]]:
        """Return the values of each message, once for each key of an upsert, ordered by the key."""
        names, key = self._table.names, self._table.key
        try:
            values = self._values_of_list(run) if isinstance(run, list) else self._values_of_table(run)
            rows = list(zip(*(self._kept(name, column) for name, column in zip(names, values)), strict=True))
        except (TypeError, ValueError):  # the first message that does not fit says why
            messages = run if isinstance(run, list) else columns.dicts(run, "a message")
            rows = [tuple(self._kept(n, [message[n]])[0] for n in names) for message in map(self._checked, messages)]
        at = [names.index(name) for name in key]
        if self._table.in_order:
            return rows
        if self._table.mode == "upsert":  # one statement must not change a row twice
            rows = list({tuple(row[place] for place in at): row for row in rows}.values())
        if at:  # two transactions that lock the same rows lock them in one order
            try:
                rows.sort(key=operator.itemgetter(*at))
            except TypeError:  # SQLite and JSON have values of several types in one column
                rows.sort(key=lambda row: repr([row[place] for place in at]))
        return rows

    def _values_of_list(self, messages: list[Any]) -> list[list[Any]]:
        names, key = self._table.names, self._table.key
        fields, deletes = frozenset(names), self._table.mode == "delete"
        for message in messages:
            found = message.keys()
            if not (found >= fields if deletes else found == fields) or any(message[name] is None for name in key):
                self._checked(message)
        return [[message[name] for message in messages] for name in names]

    def _values_of_table(self, rows: Any) -> list[list[Any]]:
        if not self._has_fields(rows):
            raise ValueError("the columns are others")
        return [columns.values_of(rows.column(name), "a message", name) for name in self._table.names]

    def _has_fields(self, rows: Any) -> bool:
        """Return whether a table has the columns of ours, and a value in each of the key."""
        found, names = rows.column_names, self._table.names
        fits = set(found) >= set(names) if self._table.mode == "delete" else sorted(found) == sorted(names)
        return fits and not any(rows.column(name).null_count for name in self._table.key)

    def _put_rows(self, rows: list[tuple[Any, ...]]) -> None:
        if self.dialect == "sqlite":
            self.run_many(self._statement(1), rows)
        elif self._table.has_keys:
            self._update_or_insert(rows)
        elif len(rows) >= MANY_ROWS and self._table.copies:
            with self._copying() as copy:
                for row in rows:
                    copy.write_row(row)
        elif len(rows) >= MANY_ROWS and (table := self._as_table(rows)) is not None:
            self._put_table(table)
        else:
            for chunk in self._chunks(rows):
                self.run(self._statement(len(chunk)), [value for row in chunk for value in row])

    def _chunks(self, rows: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of each statement."""
        at_once = max(1, _PARAMETERS_MAX // len(rows[0]))
        parts = (rows[start : start + at_once] for start in range(0, len(rows), at_once))
        if self.dialect != "mysql":
            yield from parts
            return
        most = self.packet_bytes_max - _STATEMENT_BYTES - len(self._statement(0))
        for part in parts:
            sizes = [sum(map(_size_in_mysql, row)) for row in part]
            start = total = 0
            for at, size in enumerate(sizes):
                if size > most:  # the server would end the connection, as if it was away
                    raise ValueError(
                        f"The row needs {size} bytes in a statement; max_allowed_packet of {self._table.where} is"
                        f" {self.packet_bytes_max}. Try: raise max_allowed_packet, or send smaller messages."
                    )
                if total + size > most:
                    yield part[start:at]
                    start, total = at, 0
                total += size
            yield part[start:]

    def _update_or_insert(self, rows: list[tuple[Any, ...]]) -> None:
        """Update each row that has the key, and insert the others: no other key is asked."""
        table = self._table
        names, name = table.names, databases.quoted_table(table.table)
        changed = [at for at, column in enumerate(names) if table.in_order or column not in table.key]
        at_key = [names.index(column) for column in table.key]
        same = " and ".join(f"{databases.quoted(column)} = {self.mark}" for column in table.key)
        listed = ", ".join(f"{databases.quoted(names[at])} = {self.mark}" for at in changed)
        for row in rows:
            list(self._chunks([row]))
            key = [row[at] for at in at_key]
            if not self.rows(f"select 1 from {name} where {same} for update", key):
                listed_row = ", ".join([self.mark] * len(names))
                self.run(f"insert into {name} ({self._listed}) values ({listed_row})", row)
            elif changed:
                self.run(f"update {name} set {listed} where {same}", [*(row[at] for at in changed), *key])

    def _as_table(self, rows: list[tuple[Any, ...]]) -> Any:
        """Return rows as a table of Arrow for DuckDB; None if a column has a type that Arrow has not."""
        if self.dialect != "duckdb" or not places.has("pyarrow"):
            return None
        kinds = {name: sql_values.arrow_type(self._kind(name)) for name in self._table.names}
        if any(kind is None for kind in kinds.values()):
            return None
        pa = places.arrow()
        return pa.table([pa.array(values, kind) for values, kind in zip(zip(*rows), kinds.values())], list(kinds))

    # --- tables, whose columns have the values of the database's one to one ---

    def _as_it_is(self, rows: Any) -> Any:
        """Return a table that can be written without a look at its values, ordered as :meth:`_rows` does; else None."""
        table = self._table
        if len(rows) < MANY_ROWS or not (self.dialect == "duckdb" or table.copies) or not self._has_fields(rows):
            return None
        pa = places.arrow()
        found = {name: sql_values.as_column(rows.column(name), self._kind(name)) for name in table.names}
        if any(column is None for column in found.values()) or any(
            pa.types.is_floating(found[name].type) for name in table.key
        ):
            return None  # a key that is not a number at all is equal to itself for some
        rows = pa.table(found)
        if not table.key:
            return rows
        from pyarrow import compute

        rows = rows.take(compute.sort_indices(rows, [(name, "ascending") for name in table.key]))  # in a stable order
        twice: Any = True
        for name in table.key:
            key = rows.column(name).combine_chunks()
            twice = compute.and_(compute.equal(key.slice(0, len(key) - 1), key.slice(1)), twice)
        if not compute.any(twice).as_py():
            return rows
        return rows.filter(pa.concat_arrays([compute.invert(twice), pa.array([True])]))  # the last of each key

    def _put_table(self, rows: Any) -> None:
        if self.dialect == "duckdb":
            with self.lent(rows) as source:
                self.run(self._statement(source))
            return
        data = databases.as_csv(rows)
        with self._copying(databases.CSV) as copy:
            copy.write(data)

    @contextmanager
    def _copying(self, form: str = "") -> Iterator[Any]:
        """Copy what the block writes to the table; for upserts and deletes to one of our own, then one statement."""
        table, into = self._table, databases.quoted_table(self._table.table)
        if table.mode != "append":
            types = [f"{databases.quoted(name)} {table._found[name]}" for name in table.names]
            own = hashlib.sha256(repr((table.table, types)).encode()).hexdigest()[:16]
            # It stays for the next steps on the connection, so that the catalogue does not grow with each.
            self.run(f"create temporary table if not exists cues_{own} ({', '.join(types)}) on commit delete rows")
            into = f"pg_temp.cues_{own}"
            self.run(f"delete from {into}")  # of an earlier call in this transaction
        with self.copying(f"copy {into} ({self._listed}) from stdin {form}") as copy:
            yield copy
        if table.mode != "append":
            self.run(self._statement(into))

    @property
    def _listed(self) -> str:
        return ", ".join(map(databases.quoted, self._table.names))

    def _statement(self, source: str | int) -> str:
        """Return the statement that writes the rows of another table, or so many rows of parameters."""
        table, name, listed = self._table, databases.quoted_table(self._table.table), self._listed
        if table.mode == "delete" and isinstance(source, int) and self.dialect == "mysql":
            row = f"({', '.join([self.mark] * len(table.names))})"
            return f"delete from {name} where ({listed}) in ({', '.join([row] * source)})"
        if table.mode == "delete" and isinstance(source, int):
            same = " and ".join(f"{databases.quoted(column)} = {self.mark}" for column in table.names)
            return f"delete from {name} where {' or '.join([f'({same})'] * source)}"
        if table.mode == "delete":
            return f"delete from {name} where ({listed}) in (select {listed} from {source})"
        if isinstance(source, int):
            row = f"({', '.join([self.mark] * len(table.names))})"
            source = f"values {', '.join([row] * source)}"
        else:
            source = f"select {listed} from {source}"
        statement = f"insert into {name} ({listed}) {source}"
        if table.mode == "append":
            return statement
        changed = [column for column in table.names if column not in table.key]
        if self.dialect == "mysql":
            # A key that the collation holds equal can be another text.
            quoted = map(databases.quoted, table.names if table.in_order else changed or table.key[:1])
            update = ", ".join(f"{column} = values({column})" for column in quoted)
            return f"{statement} on duplicate key update {update}"
        update = ", ".join(f"{databases.quoted(column)} = excluded.{databases.quoted(column)}" for column in changed)
        conflict = f"on conflict ({', '.join(map(databases.quoted, table.key))})"
        return f"{statement} {conflict} do {f'update set {update}' if update else 'nothing'}"

    def _checked(self, message: dict[str, Any]) -> dict[str, Any]:
        table = self._table
        names = table.key if table.mode == "delete" else list(table.types)
        missing = [name for name in names if name not in message]
        extra = [] if table.mode == "delete" else [name for name in message if name not in table.types]
        nulls = [name for name in table.key if name in message and message[name] is None]
        if missing or extra or nulls:
            found = {"missing": missing, "without a column": extra, "NULL in the key": nulls}
            wrong = ", ".join(f"{what} {which}" for what, which in found.items() if which)
            raise ValueError(
                f"The message does not fit the table {table.table!r}: {wrong}."
                f" Try: add a stream before the sink that returns the fields {names}."
            )
        return message

    def _kept(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        try:
            if name in self._table._not_null and None in values:
                raise ValueError("is NOT NULL, and does not take None")
            return sql_values.kept_all(values, self._kind(name))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The column {name!r} of {self._table.table!r} {error}. Try: convert it in a stream before the sink."
            ) from error

    def _kind(self, name: str) -> sql_values.Kind:
        return sql_values.kind_of(self._table.types[name], self._table._found[name], self.dialect)

    def make_or_check(self) -> None:
        table = self._table
        there = self.columns(table.table)
        if not there:
            self._make()
            there = self.columns(table.table)
        table._found = self.exact_types(table.table)
        table.copies = all(
            re.fullmatch(_COPIED, table._found.get(name, "")) for name in table.names
        ) and self.takes_copies(table.table, table.names, into=table.mode == "append")
        wrong = [
            f"{name} {type or 'of any type'} expected, {there[name].type if name in there else 'no such column'} found"
            for name, type in table.types.items()
            if name not in there or (type and not _holds(there[name].type, type, self.dialect))
        ]
        if wrong:
            raise CheckpointError(
                f"The table {table.table!r} in {table.where} does not fit: {'; '.join(wrong)}.",
                "change columns= or the table, or use another table.",
                where=table.where,
            )
        if engine := self.takes_part(table.table):
            raise CheckpointError(
                f"The table {table.table!r} in {table.where} is of the engine {engine}, which has no transactions.",
                f"alter table {table.table} engine = InnoDB.",
                where=table.where,
            )
        if table.deleting is not None:
            Writer(table.deleting, self.raw).make_or_check()
        keys = self.unique_keys(table.table) if table.key else []
        if self.dialect == "mysql":
            table._not_null = frozenset(name for name in table.names if not there[name].nullable)
            exact = ("integer", "bytes", "timestamp", "date", "decimal", "boolean")
            table.in_order = any(databases.family_of(there[name].type) not in exact for name in table.key)
            table.has_keys = table.mode == "upsert" and len(keys) > 1
        if table.mode == "upsert" and set(table.key) not in keys:
            raise CheckpointError(
                f"The table {table.table!r} has no unique key of the columns {', '.join(table.key)}.",
                f"create unique index on {table.table} ({', '.join(table.key)}).",
                where=table.where,
            )

    def _make(self) -> None:
        table = self._table
        if not all(table.types.values()):
            raise CheckpointError(
                f"The table {table.table!r} is not in {table.where}.",
                "create it; or give the types of the columns, so that the sink creates it.",
                where=table.where,
            )
        listed = [
            f"{databases.quoted(name)} {databases.ddl_of(type, self.dialect, name in table.key)}"
            for name, type in table.types.items()
        ]
        if table.key:
            listed.append(f"primary key ({', '.join(map(databases.quoted, table.key))})")
        options = ""
        if self.dialect == "mysql":
            from cues.checkpoints import collation_of_mysql

            options = _OPTIONS_OF_MYSQL + collation_of_mysql(self.raw)
        self.run(f"create table if not exists {databases.quoted_table(table.table)} ({', '.join(listed)}){options}")


def _holds(found: str, wanted: str, dialect: str) -> bool:
    """Return whether a column of the type found takes values of a family. SQLite has the families that it can store."""
    family = databases.family_of(found)
    if dialect == "sqlite" and wanted in ("decimal", "timestamp", "date", "time", "uuid", "json") and family == "text":
        return True
    if dialect == "mysql":
        is_flag = wanted == "boolean" and found.startswith("tinyint(1)")
        return is_flag or (wanted in ("uuid", "json") and family == "text") or family == wanted
    return family == wanted


def _size_in_mysql(value: Any) -> int:
    """Return the most bytes that a value has in a statement."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, (bytes, bytearray)):
        return len(value) + sum(map(value.count, _ESCAPED)) + _VALUE_BYTES
    return len(str(value)) + _VALUE_BYTES
