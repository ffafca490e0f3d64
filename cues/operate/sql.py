"""SQL over the queues and the states of a place, in DuckDB. Nothing is written, and a graph may run meanwhile.

    select city, count(*) from orders group by 1      a queue by its name: each field of its messages is a column
    select * from "orders-good" where n > 3           a name with other signs than letters, digits and _ in quotes
    select key, value from state_totals               the state of a processor: key, field, value

A query sees the messages that were there at its beginning. DuckDB reaches no file and no network: a query cannot read
or write anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from cues.errors import NotInstalled
from cues.jsontext import show
from cues.operate.refused import Refused
from cues.queues import tables
from cues.records import columns

STATE: Final = "state_"
"""The beginning of the name of a processor's state."""
ROWS: Final = 10_000
"""The rows of a record batch of a result."""
_LISTED: Final = 20


class Stream:
    """A table that is read anew by each part of a query that names it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        table = self._read()
        if not len(table.schema):  # DuckDB has no table without columns, as a queue without messages is
            table = columns.arrow().table({"q/index": columns.arrow().array([], "int64")})
        return table.__arrow_c_stream__(requested_schema)


@contextlib.contextmanager
def result_of(query: str, known: Mapping[str, Callable[[], Any]]) -> Iterator[Any]:
    """Run a query, and yield its result as a ``pyarrow.RecordBatchReader``.

    ``known``: the tables of a place (its method ``tables``). Raises :class:`Refused` for what DuckDB refuses, and
    :class:`NotInstalled` without it.
    """
    try:
        import duckdb
    except ImportError:
        raise NotInstalled("cues sql needs the package duckdb.", "pip install 'cues-streams[sql,files]'.") from None
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for name, read in known.items():
            if name.lower() in query.lower():  # a table that is not named is not opened
                connection.register(name, Stream(read))
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            relation = connection.sql(query)
            if relation is None:
                raise Refused("The statement has no result.", "write a query, such as select * from a queue.")
            yield relation.to_arrow_reader(ROWS)
        except duckdb.Error as error:
            raise _refused(error, list(known)) from None


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
        values = [row[place] for row in rows]
        try:
            made[name] = tables.table_of("arrow", [{name: value} for value in values])[name]
        except Exception:
            made[name] = tables.table_of("arrow", [{name: show(value)} for value in values])[name]
    return tables.table_of("arrow", []).from_pydict(made)
