"""Sinks that write messages into a table exactly once: append, upsert or delete, in SQLite, PostgreSQL or DuckDB.

    orders = Table("postgresql+psycopg://…", "orders", {"id": "integer", "total": "decimal"}, mode="upsert", key="id")
    graph.add(orders.sink("priced"))

A step is one transaction: its rows, and the position of the sink in ``cues_positions``
(:mod:`cues.checkpoints.deliveries`). The table is created before the first message, or checked: each column must be
there with a type of the same family, and an upsert needs a unique key.

    append    insert each message
    upsert    insert, or update the other columns of the row with this key; the last of a step wins
    delete    delete the rows with the keys of the messages

A message has a field for each column, and no other; for a delete it has the fields of the key. A message that does not
fit, or that the database refuses (a constraint), fails: it is written to the error queue, or stops the sink. A failure
of the database is :class:`cues.errors.CheckpointError`, which stops the sink at this message; a later start continues
there.

Values: a column gets the same value, or a plainer form that :mod:`cues.processors.sql_values` documents; a value that
the column would change fails its message. SQLite has no types for decimals, times, UUIDs and JSON: they are text there.

Not guaranteed: rows that other programs change. The table is not altered if its columns differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import cues
from cues.arguments import options_of, texts_of
from cues.errors import CheckpointError, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, databases, sql_values, takes

MODES: Final = ("append", "upsert", "delete")

_PARAMETERS_MAX: Final = 5_000
"""Values of one statement. SQLite takes 32,766, PostgreSQL 65,535; more than this is not faster."""


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

    Kind: sink
    Needs: extra `sql`
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
    ) -> None:
        self.table, self.mode = table, mode
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
        self._ready_in = 0
        self._found: dict[str, str] = {}
        """The types of the columns of the table in the database, once it is ready."""

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


class Writer(databases.Connection):
    """The open transaction of a :class:`Table`. It is as safe for threads as a connection of the database: not."""

    def __init__(self, table: Table, connection: Any) -> None:
        super().__init__(connection)
        self._table = table

    def write(self, messages: Any) -> None:
        """Write one message or a list of messages, by the mode of the table. Raises ValueError for one that misfits."""
        messages = [messages] if isinstance(messages, dict) else list(messages)
        table = self._table
        names = table.key if table.mode == "delete" else list(table.types)
        rows = [[self._value(name, message[name]) for name in names] for message in map(self._checked, messages)]
        places = [names.index(name) for name in table.key]
        if table.mode == "upsert":  # one statement must not change a row twice
            rows = list({tuple(row[place] for place in places): row for row in rows}.values())
        if places:  # two transactions that lock the same rows lock them in one order
            rows.sort(key=lambda row: repr([row[place] for place in places]))
        at_once = max(1, _PARAMETERS_MAX // len(names))
        for start in range(0, len(rows), at_once):
            chunk = rows[start : start + at_once]
            self.run(self._statement(names, len(chunk)), [value for row in chunk for value in row])

    def _statement(self, names: list[str], count: int) -> str:
        table, name = self._table, databases.quoted_table(self._table.table)
        if table.mode == "delete":
            same = " and ".join(f"{databases.quoted(column)} = {self.mark}" for column in names)
            return f"delete from {name} where {' or '.join([f'({same})'] * count)}"
        row = f"({', '.join([self.mark] * len(names))})"
        listed = ", ".join(map(databases.quoted, names))
        statement = f"insert into {name} ({listed}) values {', '.join([row] * count)}"
        if table.mode == "append":
            return statement
        changed = [column for column in names if column not in table.key]
        update = ", ".join(f"{databases.quoted(column)} = excluded.{databases.quoted(column)}" for column in changed)
        conflict = f"on conflict ({', '.join(map(databases.quoted, table.key))})"
        return f"{statement} {conflict} do {f'update set {update}' if update else 'nothing'}"

    def _checked(self, message: dict[str, Any]) -> dict[str, Any]:
        table = self._table
        names = table.key if table.mode == "delete" else list(table.types)
        missing = [name for name in names if name not in message]
        extra = [] if table.mode == "delete" else [name for name in message if name not in table.types]
        nulls = [name for name in table.key if message.get(name) is None]
        if missing or extra or nulls:
            raise ValueError(
                f"The message does not fit the table {table.table!r}: missing {missing}, without a column {extra}, NULL"
                f" in the key {nulls}. Try: a stream before the sink that returns the fields {names}."
            )
        return message

    def _value(self, name: str, value: Any) -> Any:
        table = self._table
        try:
            return sql_values.kept(value, sql_values.kind_of(table.types[name], table._found[name], self.dialect))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The column {name!r} of {table.table!r} {error}. Try: convert it in a stream before the sink."
            ) from error

    def make_or_check(self) -> None:
        table = self._table
        there = self.columns(table.table)
        if not there:
            self._make()
            there = self.columns(table.table)
        table._found = self.exact_types(table.table)
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
        if table.mode == "upsert" and set(table.key) not in self.unique_keys(table.table):
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
            f"{databases.quoted(name)} {databases.ddl_of(type, self.dialect)}" for name, type in table.types.items()
        ]
        if table.key:
            listed.append(f"primary key ({', '.join(map(databases.quoted, table.key))})")
        self.run(f"create table if not exists {databases.quoted_table(table.table)} ({', '.join(listed)})")


def _holds(found: str, wanted: str, dialect: str) -> bool:
    """Whether a column of the type found takes values of a family. SQLite has the families that it can store."""
    family = databases.family_of(found)
    if dialect == "sqlite" and wanted in ("decimal", "timestamp", "date", "time", "uuid", "json") and family == "text":
        return True
    return family == wanted
