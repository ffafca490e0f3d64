"""SQL over the queues and the states of a place, in DuckDB. Nothing is written, and a graph may run meanwhile.

    select city, count(*) from orders group by 1      a queue by its name: each field of its messages is a column
    select * from "orders-good" where n > 3           a name with other signs than letters, digits and _ in quotes
    select key, value from state_totals               the state of a processor: key, field, value

A query sees of each queue the messages that are there when the query begins. DuckDB reaches no file and no network: a
query cannot read or write anything else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from cues.errors import CuesError, SchemaError
from cues.imported import package
from cues.jsontext import show
from cues.operate.refused import Refused
from cues.queues import tables
from cues.records import columns

STATE: Final = "state_"
"""The beginning of the name of a processor's state."""
ROWS: Final = 10_000
"""The rows of a record batch of a result."""
_LISTED: Final = 20

Source = Callable[[], Any]
"""Opens a table of a place: returns a function, each call of which returns the same rows as a stream of Arrow."""


class _Table:
    """A table for DuckDB, which reads it again for each reference in the query."""

    def __init__(self, read: Callable[[], Any], errors: list[CuesError]) -> None:
        self._read = read
        self._errors = errors

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        pa = columns.arrow()
        try:
            table = self._read()
        except CuesError as error:
            self._errors.append(error)
            raise
        if not len(table.schema):  # DuckDB has no table without columns, as a queue without messages is
            table = pa.table({"q/index": pa.array([], "int64")})
        batches = table.to_batches() if isinstance(table, pa.Table) else table
        stream = pa.RecordBatchReader.from_batches(table.schema, self._noted(batches))
        return stream.__arrow_c_stream__(requested_schema)

    def _noted(self, batches: Any) -> Iterator[Any]:
        """The batches. DuckDB knows an error only as text, so it is kept, to be raised again."""
        try:
            yield from batches
        except CuesError as error:
            self._errors.append(error)
            raise


@contextlib.contextmanager
def result_of(query: str, known: Mapping[str, Source]) -> Iterator[Any]:
    """Run a query, and yield its result as a ``pyarrow.RecordBatchReader``, each column with a name of its own.

    ``known``: the tables of a place (its method ``tables``). Raises :class:`Refused` for what DuckDB refuses, the
    errors of reading a queue, and :class:`NotInstalled` without DuckDB.
    """
    duckdb = package("cues sql needs duckdb", "sql,files", "duckdb")
    errors: list[CuesError] = []
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        try:
            for name in _named(query, known):
                connection.register(name, _Table(known[name](), errors))
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            relation = connection.sql(query)
            if relation is None:
                raise Refused("The statement has no result.", "write a query, such as select * from a queue.")
            result = relation.to_arrow_reader(ROWS)
            schema = _distinct(result.schema)
            yield columns.arrow().RecordBatchReader.from_batches(schema, _renamed(result, schema))
        except (duckdb.Error, columns.arrow().ArrowException) as error:
            if errors:
                raise errors[0] from None
            raise _refused(error, list(known)) from None


def _named(query: str, known: Mapping[str, Source]) -> list[str]:
    """The tables whose names are in a query; of names that differ only in case the first. Others are not opened."""
    by_case: dict[str, str] = {}
    for name in known:
        by_case.setdefault(name.lower(), name)
    text = query.lower()
    return [name for lower, name in by_case.items() if re.search(rf"(?<![\w-]){re.escape(lower)}(?![\w-])", text)]


def _distinct(schema: Any) -> Any:
    """The schema of a result with a number after a name that is there already, as in a join."""
    names: list[str] = []
    for name in schema.names:
        new, number = name, 1
        while new in names:
            new, number = f"{name}_{number}", number + 1
        names.append(new)
    return columns.arrow().schema([field.with_name(name) for field, name in zip(schema, names)])


def _renamed(result: Any, schema: Any) -> Iterator[Any]:
    for batch in result:
        yield batch.rename_columns(schema.names)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a result as dicts. DuckDB's sums of integers are decimals in Arrow, and integers here."""
    rows = columns.rows(batch)
    types = columns.arrow().types
    for field in batch.schema:
        if types.is_decimal(field.type) and field.type.scale == 0:
            for row in rows:
                row[field.name] = None if row[field.name] is None else int(row[field.name])
    return rows


def _refused(error: Exception, known: list[str]) -> Refused:
    listed = ", ".join(known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
    return Refused(
        f"DuckDB refuses the query: {str(error).strip()}",
        f"correct it; the tables are {listed}." if known else "run the graph first: there is no queue.",
    )


def state_table(rows: list[tuple[Any, Any, Any]]) -> Any:
    """Return rows of a state as a table: typed where all values have one type, else as JSON."""
    made: dict[str, Any] = {}
    for place, name in enumerate(("key", "field", "value")):
        messages = [{name: row[place]} for row in rows]
        if not messages:
            made[name] = columns.arrow().nulls(0)
            continue
        try:
            made[name] = tables.table_of("arrow", messages)[name]
        except SchemaError:
            made[name] = tables.table_of("arrow", [{name: show(message[name])} for message in messages])[name]
    return columns.arrow().table(made)
