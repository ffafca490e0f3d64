"""A source of the rows of a table, in the order of a key: what is there, then what is added.

    graph.add(cues.Source("orders", Rows("postgresql+psycopg://…", "orders", cursor="id")))
    graph.add(cues.Source("changes", Rows("shop.db", "orders", cursor=["changed", "id"], follow=True, lag_s=5)))

``cursor`` names columns whose values together are unique and not NULL. The source reads in rounds:

    1. check     the columns of the table are those of the position
    2. top       read the highest key
    3. wait      lag_s seconds, so that transactions with lower keys can commit
    4. pages     read the rows after the position up to the top, in the order of the key

Rows are read as columns where all of them have types of Arrow whose values are those of the driver: in PostgreSQL by
COPY, in DuckDB as a table of Arrow. A page with a value that needs a look is read row by row.

The position is the key of the last row, and the columns: ``[version, columns, key]``. The engine commits it with the
messages, so each row is a message once, wherever the run is killed.

**Rows that commit out of order.** A row is seen if it is visible at most ``lag_s`` seconds after the first round in
which a higher key was. So ``lag_s`` must exceed the longest transaction that writes the table; sequences give out keys
before the commit, also in PostgreSQL. With ``lag_s=0`` a row that commits after a higher key is missed, and so is
a row with a lower time of a clock that was set back.

**Updates and deletes.** If the cursor begins with the time of the change, a changed row is a message again. A row that
changes twice between two rounds is one message. Deleted rows are not seen.

**Values** are those of the driver: None for NULL, int, float, bool, str, bytes, Decimal, UUID, date, time, datetime,
timedelta, and lists and dicts of these (JSON, arrays). They are the same after the queue. SQLite has no types for
decimals, times and UUIDs; they are the text or number that was stored. A row with another type (a network address, a
range) is a failed message that names the column; give a view that casts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from cues.arguments import check_number, texts_of
from cues.errors import CuesError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, checks, databases, foreign, places, sql_values, takes, waits

_VERSION: Final = 1
_PAGE_ROWS: Final = 1_000
_TABLE_ROWS: Final = {"postgresql": 20_000, "sqlite": 20_000, "duckdb": 100_000}
"""Rows of one query by columns. A file of DuckDB is opened for each."""
_PLAIN: Final = (bool, int, float, str, bytes, Decimal, UUID, datetime, date, time, timedelta, type(None))

Position = list[Any]


class _Layout(NamedTuple):
    """The columns of a round: as the position has them (``name type``), the names in messages, the types of all."""

    described: list[str]
    names: list[str]
    types: dict[str, str]


class _Sent(NamedTuple):
    """A column that is read as one of Arrow: its expression in a query, and its type."""

    expression: str
    type: Any


class _Row(NamedTuple):
    key: list[Any]
    message: Any
    """A dict, or the error that stands for it; a table, under the key of its last row."""


@takes(SOURCE)
class Rows(checks.Owned):
    """A source of the rows of a table or a view; see the module. Give it to ``cues.Source(id, Rows(...))``.

    ``target``     a URL of SQLAlchemy, a path of a SQLite file, or a DuckDB file (``*.duckdb``, ``duckdb:///path``)
    ``table``      a table or a view; ``schema.table``
    ``cursor``     a column, or several, whose values together are unique and not NULL
    ``columns``    the columns of the messages; None: all
    ``follow``     True: wait for new rows; otherwise the source ends after one round
    ``poll_s``     seconds between two rounds
    ``lag_s``      seconds for which transactions with lower keys can commit late
    ``page_rows``  rows of one query; None: 1,000, and more where they are read as columns
    ``changes``    ``"refuse"``: columns that changed since the position stop the source (Diverged); ``"accept"``:
                   it continues with the new ones
    ``reserved``   ``"q/type"`` or ``"q/topics"``, which rows may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `sql`; for MySQL and MariaDB `mysql`
    Guarantee: exactly once: each row that is visible within `lag_s` is on the queue once, also after kill -9
    Mechanism: position of the key of the last row, committed with the messages
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        table: str,
        cursor: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        follow: bool = False,
        poll_s: float = 1.0,
        lag_s: float = 0.0,
        page_rows: int | None = None,
        changes: str = "refuse",
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.target, self.table = target, table
        self.cursor = texts_of("cursor", cursor)
        self.columns = None if columns is None else texts_of("columns", columns)
        self.follow, self.poll_s, self.lag_s, self.page_rows, self.changes = follow, poll_s, lag_s, page_rows, changes
        self.__name__ = "rows"
        self._reader: databases.Reader | None = None
        databases.quoted_table(table)
        for name in (*self.cursor, *(self.columns or [])):
            databases.quoted(name)
        if not self.cursor:
            raise InvalidArgument("cursor= has no column.", "give the columns of a unique key.")
        if changes not in ("refuse", "accept"):
            raise InvalidArgument(f"changes={changes!r} is unknown.", "use 'refuse' or 'accept'.")
        check_number("page_rows", _PAGE_ROWS if page_rows is None else page_rows, 1, whole=True)
        check_number("lag_s", lag_s, 0)
        check_number("poll_s", poll_s, 0)

    @property
    def where(self) -> str:
        """The table and its database, for messages."""
        return f"{self.table} at {databases.target_of(self.target).where}"

    @property
    def one_process(self) -> str | None:
        """The file, if no other process can read the database while one writes it."""
        return getattr(databases.target_of(self.target), "one_process", None)

    def interrupt(self) -> None:
        """End the query that runs now; the engine calls it when the source ends."""
        if self._reader is not None:
            self._reader.interrupt()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_owner": ""}

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        return self._items(position, process, by_columns=False)

    def in_columns(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield the same rows, in tables with the position after the last row where values have types of Arrow."""
        return self._items(position, process, by_columns=places.has("pyarrow"))

    def _items(self, position: Position | None, process: Any, by_columns: bool) -> Iterator[tuple[Position, Any]]:
        described, key = self._fields(position)
        self.own(process, hint="give each source an object of its own: the end of one would interrupt the other.")
        self._reader = reader = databases.Reader(self.target)
        try:
            while True:
                with reader.begin() as connection:
                    layout = self._layout(connection, described)
                    described = layout.described
                    top = self._top(connection, layout)
                    sent = self._sent(connection, layout) if by_columns else {}
                    size = self.page_rows or (_PAGE_ROWS if not sent else _TABLE_ROWS[connection.dialect])
                if top and not waits.wait(process, self.lag_s, new=False):
                    return
                while top:
                    table = self._table(reader, layout, sent, key, top, size) if sent else None
                    if table is not None and _may_write(process, table.message):
                        count, key = len(table.message), table.key
                        if count:
                            yield [_VERSION, described, key], table.message
                    else:
                        rows = self._page(reader, layout, key, top, size)
                        count = len(rows)
                        for row in rows:
                            key = row.key
                            yield [_VERSION, described, key], row.message
                    if count < size:
                        break
                if not self.follow or not waits.wait(process, self.poll_s):
                    return
        finally:
            reader.close()

    def _fields(self, position: Position | None) -> tuple[list[str] | None, list[Any] | None]:
        if position is None:
            return None, None
        checks.position_of(position, "cues.processors.sql_source", 3)
        if len(position[2]) != len(self.cursor):
            raise Diverged(
                f"The position has a key of {len(position[2])} columns, the cursor has {len(self.cursor)}"
                f" ({', '.join(self.cursor)}).",
                "use the cursor from before; or give the source another id, which begins at the start.",
            )
        return position[1], position[2]

    def _layout(self, connection: databases.Connection, before: list[str] | None) -> _Layout:
        """Check the columns of the table; ``before`` are those of the position."""
        there = connection.columns(self.table)
        names = list(there) if self.columns is None else self.columns
        missing = [name for name in (*self.cursor, *names) if name not in there]
        if not there or missing:
            raise InvalidArgument(
                f"The table {self.table!r} has no column {', '.join(map(repr, missing))};"
                f" it has {', '.join(there) or 'none, or does not exist'}.",
                "use the names of the table, with their capital letters.",
            )
        foreign.check_keys(names, self.may)
        described = [f"{name} {there[name].type}" for name in dict.fromkeys((*self.cursor, *names))]
        if before is not None and set(before) != set(described) and self.changes == "refuse":
            lost, new = sorted(set(before) - set(described)), sorted(set(described) - set(before))
            raise Diverged(
                f"The columns of {self.table!r} changed since the position was written: expected"
                f" {', '.join(lost) or 'no others'}; found {', '.join(new) or 'no others'}.",
                "give columns=[…] with the names from before if only columns were added; or changes='accept'.",
            )
        for name in self.cursor:
            self._check_cursor(connection, name, there[name])
        return _Layout(described, names, {name: column.type for name, column in there.items()})

    def _check_cursor(self, connection: databases.Connection, name: str, column: databases.Column) -> None:
        if databases.is_coarse(column.type, connection.dialect):
            raise InvalidArgument(
                f"The column {name!r} of {self.table!r} is {column.type}, whose values the driver makes coarser: the"
                " rows after a value could not be found again.",
                "use another column; or a view that casts it to a bigint or text with the same order.",
            )
        if column.nullable and connection.rows(
            f"select 1 from {databases.quoted_table(self.table)} where {databases.quoted(name)} is null limit 1"
        ):
            raise InvalidArgument(
                f"The column {name!r} of {self.table!r} is NULL in some row, which has no place in the order.",
                "use a column that is NOT NULL, or a view without these rows.",
            )

    def _top(self, connection: databases.Connection, layout: _Layout) -> list[Any]:
        """Return the highest key; empty if the table has no row."""
        try:
            rows = self._rows(connection, layout._replace(names=[]), None, None, 1, "desc")
        except Exception as error:
            if not databases.is_unreadable(error):
                raise
            raise InvalidArgument(
                f"The highest key of {self.table!r} has a value that Python cannot hold: {str(error).splitlines()[0]}.",
                f"use a view without the rows that have it in {', '.join(self.cursor)}.",
            ) from error
        return rows[0].key if rows else []

    def _page(
        self, reader: databases.Reader, layout: _Layout, after: list[Any] | None, top: list[Any], count: int
    ) -> list[_Row]:
        """Return up to ``count`` rows after a key. A row that the driver cannot read has an error as its message."""
        try:
            with reader.begin() as connection:
                return self._rows(connection, layout, after, top, count)
        except Exception as error:
            if not databases.is_unreadable(error):
                raise
            unreadable = error
        with reader.begin() as connection:  # it also finds ties between the halves
            keys = self._rows(connection, layout._replace(names=[]), after, top, count)
        if not keys:
            return []
        if len(keys) > 1:
            half = len(keys) // 2
            first = self._page(reader, layout, after, keys[half - 1].key, half)
            return first + self._page(reader, layout, keys[half - 1].key, keys[-1].key, len(keys) - half)
        if len(layout.names) == 1:
            return [_Row(keys[0].key, self._refused(layout.names, keys[0].key, str(unreadable).splitlines()[0]))]
        for name in layout.names:
            row = self._page(reader, layout._replace(names=[name]), after, top, 1)[0]
            if isinstance(row.message, Exception):
                return [row]
        raise unreadable

    def _rows(
        self,
        connection: databases.Connection,
        layout: _Layout,
        after: list[Any] | None,
        top: list[Any] | None,
        limit: int,
        order: str = "asc",
    ) -> list[_Row]:
        """Return rows in the order of the key. Raises :class:`InvalidArgument` for two with one key.

        The database compares the keys: under a collation, keys that differ in Python may be equal.
        """
        names, width = [*self.cursor, *layout.names], len(self.cursor)
        flags = self._flags(connection, names, layout.types)
        listed = [databases.quoted(name) for name in names]
        page, values = self._selected(connection, listed, flags, after, top, limit, order)
        again, tie = self._again_and_tie(order)
        found = connection.rows(
            f"select page.*, case when {tie} then 1 else 0 end from ({page}) page order by {again}", values
        )
        rows = []
        for *row, tied in found:
            key, changed = row[:width], [names[n] for n, flag in zip(flags, row[len(names) :]) if flag]
            self._check_key(key, tied, changed)
            message = _message(layout.names, row[width : len(names)], self.table, self.may)
            rows.append(_Row(key, self._refused(changed, key, "the driver would change it") if changed else message))
        return rows[:limit]

    def _selected(
        self,
        connection: databases.Connection,
        listed: list[str],
        flags: dict[int, str],
        after: list[Any] | None,
        top: list[Any] | None,
        limit: int,
        order: str,
    ) -> tuple[str, list[Any]]:
        """Return the query of a page and one row more, with its parameters: columns c0, c1, … and flags f0, f1, …"""
        where, values = self._between(connection.mark, after, top)
        ordered = ", ".join(f"{databases.quoted(name)} {order}" for name in self.cursor)
        columns = [f"{column} as c{n}" for n, column in enumerate(listed)]
        columns += [f"case when {condition} then 1 else 0 end as f{n}" for n, condition in flags.items()]
        table = databases.quoted_table(self.table)
        return f"select {', '.join(columns)} from {table}{where} order by {ordered} limit {limit + 1}", values

    def _flags(self, connection: databases.Connection, names: list[str], types: dict[str, str]) -> dict[int, str]:
        """Return the conditions for values that the driver changes silently, by the place of the column."""
        unread = (databases.unread(databases.quoted(name), types[name], connection.dialect) for name in names)
        return {n: condition for n, condition in enumerate(unread) if condition}

    def _again_and_tie(self, order: str) -> tuple[str, str]:
        again = ", ".join(f"c{n} {order}" for n in range(len(self.cursor)))
        same = (f"c{n} = lag(c{n}) over (order by {again})" for n in range(len(self.cursor)))
        return again, " and ".join(same)

    # --- tables ---

    def _sent(self, connection: databases.Connection, layout: _Layout) -> dict[str, _Sent]:
        """Return the columns to read as a table, those of the key first; empty if all rows need a look."""
        exact = connection.exact_types(self.table)
        found = {
            name: sql_values.read_type(exact.get(name, ""), connection.dialect)
            for name in dict.fromkeys((*self.cursor, *layout.names))
        }
        names_a_kind = "q/type" in layout.names and "q/type" not in self.may
        is_text = any(exact.get(name) == "bytea" for name in self.cursor)  # it would be ordered as text
        if not connection.sends_tables or names_a_kind or is_text or any(kind is None for kind in found.values()):
            return {}
        return {n: _Sent(connection.sent(databases.quoted(n), exact[n]), kind) for n, kind in found.items()}

    def _table(
        self,
        reader: databases.Reader,
        layout: _Layout,
        sent: dict[str, _Sent],
        after: list[Any] | None,
        top: list[Any],
        limit: int,
    ) -> _Row | None:
        """Return up to ``limit`` rows after a key as a table, under the key of the last; None if a row needs a look."""
        import pyarrow as pa
        from pyarrow import compute

        names, types = list(sent), [column.type for column in sent.values()]
        # These are equal for the database where they are equal here. Others may have a collation.
        in_key = types[: len(self.cursor)]
        are_exact = not any(pa.types.is_string(kind) or pa.types.is_floating(kind) for kind in in_key)
        try:
            with reader.begin() as connection:
                listed = [column.expression for column in sent.values()]
                flags = self._flags(connection, names, layout.types)
                query, values = self._selected(connection, listed, flags, after, top, limit, "asc")
                found = {f"c{n}": kind for n, kind in enumerate(types)}
                if flags or not are_exact:
                    again, tie = self._again_and_tie("asc")
                    odd = " or ".join([*(f"f{n} = 1" for n in flags), *(() if are_exact else (f"({tie})",))])
                    query = (
                        f"select {', '.join(found)}, case when {odd} then 1 else 0 end as odd from ({query}) page"
                        f" order by {again}"
                    )
                    found["odd"] = pa.int64()
                rows = connection.table(query, values, found)
        except Exception as error:
            if not databases.is_unreadable(error):
                raise
            return None
        if not rows.num_rows:
            return _Row(after or [], rows)
        keys = [rows.column(n).combine_chunks() for n in range(len(self.cursor))]
        if any(key.null_count for key in keys) or ("odd" in found and compute.max(rows.column("odd")).as_py()):
            return None
        if are_exact:
            same: Any = True
            for kind, key in zip(in_key, keys):
                if pa.types.is_integer(kind) != pa.types.is_integer(key.type):
                    return None  # SQLite has another type in the column
                same = compute.and_(compute.equal(key.slice(1), key.slice(0, len(key) - 1)), same)
            if compute.any(same).as_py():
                return None
        rows = rows.slice(0, limit)
        last = [key[len(rows) - 1].as_py() for key in keys]
        message = rows.select([names.index(name) for name in layout.names]).rename_columns(layout.names)
        return _Row(last, message)

    def _refused(self, names: list[str], key: list[Any], reason: str) -> InvalidArgument:
        return InvalidArgument(
            f"The row {dict(zip(self.cursor, key))} of {self.table!r} has a value in {', '.join(names)} that Python"
            f" cannot hold: {reason}.",
            "correct the value, or read a view that casts it to text.",
        )

    def _check_key(self, key: list[Any], tied: int, changed: list[str]) -> None:
        if set(changed) & set(self.cursor):
            raise self._refused([name for name in changed if name in self.cursor], key, "it has no place in the order")
        if tied:
            raise InvalidArgument(
                f"Two rows of {self.table!r} have {dict(zip(self.cursor, key))}, as the database compares: the cursor"
                " is not unique, and a position between them cannot be named.",
                "add a column to the cursor that makes it unique, such as the primary key.",
            )

    def _between(self, mark: str, after: list[Any] | None, top: list[Any] | None) -> tuple[str, list[Any]]:
        conditions, values = [], []
        for key, operator in ((after, ">"), (top, "<")):
            if key is not None:
                text, more = self._compared(mark, key, operator, or_equal=operator == "<")
                conditions.append(text)
                values += more
        return f" where {' and '.join(conditions)}" if conditions else "", values

    def _compared(self, mark: str, key: Sequence[Any], operator: str, or_equal: bool) -> tuple[str, list[Any]]:
        """Return ``cursor > key`` in the order of the key, without row values, which DuckDB does not compare."""
        last = len(key) - 1
        text, values = "", []
        for number in range(last, -1, -1):
            name = databases.quoted(self.cursor[number])
            strict = operator + ("=" if number == last and or_equal else "")
            if number == last:
                text, values = f"{name} {strict} {mark}", [key[number]]
            else:  # the first condition is for the index
                text = f"({name} {operator}= {mark} and ({name} {operator} {mark} or {text}))"
                values = [key[number], key[number], *values]
        return text, values


def _may_write(process: Any, table: Any) -> bool:
    """Return whether the queue takes a table; otherwise rows are read one by one, and refused ones fail alone."""
    try:
        if process is not None and len(table):
            process.check(table)
    except CuesError:
        return False
    return True


def _message(names: list[str], values: Sequence[Any], table: str, may: frozenset[str]) -> Any:
    for name, value in zip(names, values):
        if not _is_plain(value):
            return InvalidArgument(
                f"The column {name!r} of {table!r} has a value of the type {type(value).__name__}, which messages do"
                " not take.",
                "read a view that casts it to text.",
            )
    message = dict(zip(names, values))
    try:
        foreign.check(message, may)
    except InvalidArgument as error:
        return error
    return message


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)
