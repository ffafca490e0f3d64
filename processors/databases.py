"""SQLite, PostgreSQL, MySQL and DuckDB for ``sql_source.py`` and ``sql_sink.py``: one form of statements and columns.

MariaDB is a MySQL here. SQLite, PostgreSQL and MySQL are reached through SQLAlchemy (the extras ``sql`` and
``mysql``), DuckDB through its own driver: the dialect of SQLAlchemy for
DuckDB cannot list the columns of a table with DuckDB 2.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues.arguments import text_of
from cues.errors import CheckpointError, CuesError, InvalidArgument
from cues.imported import package
from cues.overrides import override
from cues.processors import sql

if TYPE_CHECKING:
    from cues.checkpoints import SQLCheckpoint

FAMILIES: Final = {
    "integer": r"^(u?(tiny|small|medium|big|huge)?int(eger)?\d?|(small|big)?serial)\b",
    "float": r"^(double|float|real)",
    "decimal": r"^(decimal|numeric)",
    "boolean": r"^bool",
    "bytes": r"^((tiny|medium|long)?blob|bytea|binary|varbinary)",
    "timestamp": r"^(timestamp|datetime)",
    "date": r"^date$",
    "time": r"^time\b",
    "uuid": r"^uuid",
    "json": r"^jsonb?$",
    "text": r"^((tiny|medium|long)?text|(n|var)*char|character|string|clob)",
}
"""The types of columns, and the SQL types that belong to each."""

_DDL: Final = {
    "integer": "bigint", "float": "double precision", "decimal": "numeric", "bytes": "blob", "timestamp": "timestamp",
    "uuid": "uuid", "json": "json",
}  # fmt: skip
_DDL_OF: Final = {
    "postgresql": {"bytes": "bytea", "json": "jsonb", "timestamp": "timestamp with time zone"},
    "sqlite": dict.fromkeys(("decimal", "timestamp", "date", "time", "uuid", "json"), "text"),
    "duckdb": {"timestamp": "timestamp with time zone", "decimal": "decimal(38, 9)"},
    "mysql": {
        "timestamp": "timestamp(6) null", "decimal": "decimal(38, 9)", "text": "longtext", "bytes": "longblob",
        "time": "time(6)", "uuid": "char(36)",
    },
}  # fmt: skip
_KEY_OF_MYSQL: Final = {"text": "varchar(255)", "bytes": "varbinary(255)", "timestamp": "timestamp(6)"}
"""Types for columns of a primary key."""


class Column(NamedTuple):
    """A column of a table. ``type`` is as the database names it, in small letters."""

    type: str
    nullable: bool


def _lowered(type: str) -> str:
    """Return a type in small letters, without its literals."""
    return re.sub(
        r"'(?:''|\\.|[^'\\])*'|[^']+", lambda found: found[0] if found[0][0] == "'" else found[0].lower(), type
    )


def family_of(type: str) -> str:
    """Return the entry of :data:`FAMILIES` for a type of a database; the type itself if there is none."""
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, type, re.I)), type)


def ddl_of(family: str, dialect: str, in_key: bool = False) -> str:
    """Return the SQL type for a new column."""
    if in_key and dialect == "mysql" and family in _KEY_OF_MYSQL:
        return _KEY_OF_MYSQL[family]
    return _DDL_OF.get(dialect, {}).get(family) or _DDL.get(family, family)


_UNREAD: Final = {
    "duckdb": {
        r"^(date|timestamp)": "not isfinite({0}) or year({0}) not between 1 and 9999",
        r"^time(?!stamp)": "datepart('hour', {0}) = 24",
        r"_ns$": "epoch_ns({0}) % 1000 <> 0",
        r"^interval": "datepart('month', {0}) <> 0 or datepart('year', {0}) <> 0",
    },
    "postgresql": {r"^interval": "extract(month from {0}) <> 0 or extract(year from {0}) <> 0"},
    "mysql": {r"^(date|timestamp)": "year({0}) = 0 or month({0}) = 0 or dayofmonth({0}) = 0"},
}
"""Values that a driver changes silently, by database and type: infinity, years outside of Python's, 24:00:00,
nanoseconds, months (30 days in Python), dates with zeros. A condition of SQL is true for them; ``{0}`` is the
column."""

_COARSE: Final = {
    "duckdb": r"_ns$|^interval|^(float|real)$",
    "postgresql": r"^(interval|real|float4)",
    "mysql": r"^(float|time\b|bit|enum|set|json)",
}
"""Types whose rows are not found again by the value that was read: the driver makes it coarser, or MySQL orders it in
another way than it compares it."""
_UNITS: Final = re.compile(r"^(datetime|timestamp|time)$")
_MYSQL_TIMESTAMP: Final = 7
"""The type of a column, as the drivers of MySQL number it."""


def unread(column: str, type: str, dialect: str, depth: int = 0) -> str:
    """Return the condition for values of a column that the driver changes silently; empty if it changes none.

    In DuckDB also for the parts of lists, structs and maps; ``depth`` is the number of lists around the column.
    """
    if dialect == "duckdb" and (type.endswith("]") or type.startswith(("struct(", "map("))):
        return " or ".join(filter(None, _unread_members(column, duckdb_module().sqltype(type), depth)))
    conditions = [sql for pattern, sql in _UNREAD.get(dialect, {}).items() if re.search(pattern, type)]
    return " or ".join(conditions).format(column)


def _unread_members(column: str, kind: Any, depth: int) -> Iterator[str]:
    if kind.id == "struct":
        for name, part in kind.children:
            escaped = name.replace('"', '""')
            yield unread(f'{column}."{escaped}"', str(part).lower(), "duckdb", depth)
        return
    lists = [column] if kind.id != "map" else [f"map_keys({column})", f"map_values({column})"]
    for place, (_, part) in zip(lists, kind.children, strict=False):  # an array has its length, too
        item = f"item_{depth}"
        if condition := unread(item, str(part).lower(), "duckdb", depth + 1):
            yield f"len([{item} for {item} in {place} if {condition}]) > 0"


def is_coarse(type: str, dialect: str) -> bool:
    """Return whether the driver makes values of the type coarser than the database has them."""
    return bool(re.search(_COARSE.get(dialect, "(?!)"), type))


def is_unreadable(error: Exception) -> bool:
    """Return whether a driver failed at the value of a row: a later row may be readable."""
    if isinstance(error, CuesError):
        return False
    return type(error).__name__ == "DataError" or isinstance(error, ValueError) or "Could not decode" in str(error)


def digits_of(type: str) -> tuple[int, int] | None:
    """Return the digits of a type such as ``decimal(38, 9)``, and those after the point; None for other types."""
    declared = re.match(r"^(?:decimal|numeric)\((\d+)(?:, *(-?\d+))?\)", type)
    return declared and (int(declared[1]), int(declared[2] or 0))


def holds_digits(value: Any, digits: int, scale: int) -> bool:
    """Return whether a column of :func:`digits_of` holds a value as it is: a database rounds a decimal silently."""
    if not isinstance(value, Decimal) or not value.is_finite():
        return True
    try:
        Context(prec=digits, traps=[Inexact, InvalidOperation]).quantize(value, Decimal(1).scaleb(-scale))
    except (Inexact, InvalidOperation):
        return False
    return True


def quoted(name: str) -> str:
    """Return a name in quotes. A name may have dots, as headers of CSV files have: it is one name."""
    if not text_of("column", name) or set(name) & set('"%?\0'):
        raise InvalidArgument(f"{name!r} is not a name of a table or column here.", "use letters, digits and _.")
    return f'"{name}"'


def quoted_table(name: str) -> str:
    """Return the name of a table in quotes; it may be ``schema.table``."""
    if text_of("table", name).count(".") > 1:
        raise InvalidArgument(f"{name!r} is not a name of a table here.", "give 'table' or 'schema.table'.")
    return ".".join(map(quoted, name.split(".")))


class DuckDB(sql.SQLite):
    """A DuckDB file as the target of sinks: :class:`cues.processors.sql.SQLite` with another database.

    One process at a time can have the file open. ``timeout_s`` has no effect: DuckDB does not wait for another process.

    Kind: sink
    Needs: `duckdb`, in the extra `sql`
    Guarantee: exactly once: each message is in the database once
    Mechanism: row of delivery, in the transaction of the writes
    """

    _BEGIN = "begin"

    def __init__(self, path: str | os.PathLike[str], schema: str = "", *, timeout_s: float = sql.TIMEOUT_S) -> None:
        super().__init__(path, schema, timeout_s=timeout_s)
        self._lock = _locks_of(self.path).transactions

    @property
    def one_process(self) -> str:
        """The file, which one process at a time can have open for writing."""
        return os.path.realpath(self.path)

    @override
    def _connect(self) -> Any:
        with _locks_of(self.path).opening, _opened(self.path):
            connection = duckdb_module().connect(self.path)
            connection.execute(sql.TABLE + ";" + self.schema)
        return connection

    @override
    def _failures(self) -> tuple[type[Exception], ...]:
        duckdb = duckdb_module()
        return (duckdb.OperationalError, duckdb.InternalError, duckdb.CatalogException, duckdb.ConnectionException)

    @override
    def _asks_to_repeat(self, error: Exception) -> bool:
        return isinstance(error, duckdb_module().TransactionException) and "conflict" in str(error).lower()

    @override
    def _is_open(self, connection: Any) -> bool:
        # The driver has no such question, but a transaction keeps its number, and each statement outside has its own.
        try:
            first, second = (connection.execute("select txid_current()").fetchone() for _ in range(2))
        except duckdb_module().TransactionException:  # a statement failed: the transaction waits for its rollback
            return True
        return bool(first == second)


class _Locks(NamedTuple):
    """The locks of one DuckDB file in this process, which are of all objects that use the file."""

    transactions: Any
    """Held by each transaction of a sink: DuckDB refuses two that change one table, or create one, at the same time."""
    opening: Any
    """Held while the file is opened for writing, and while it is read: it is not opened for both at the same time."""


_locks: Final[dict[str, _Locks]] = {}


def _locks_of(path: str) -> _Locks:
    return _locks.setdefault(os.path.realpath(path), _Locks(threading.RLock(), threading.RLock()))


@contextmanager
def _opened(path: str) -> Iterator[None]:
    try:
        yield
    except duckdb_module().IOException as error:
        raise CheckpointError(
            f"The database {path} cannot be opened: {str(error).splitlines()[0]}",
            "end the other process that has it open: DuckDB allows one process that writes, or several that read.",
            where=path,
        ) from error


@contextmanager
def _reading(path: str) -> Iterator[Any]:
    """Open a DuckDB file for queries, so that other processes can read it too."""
    duckdb = duckdb_module()
    with _locks_of(path).opening:
        with _opened(path):
            try:
                connection = duckdb.connect(path, read_only=True)
            except duckdb.ConnectionException:  # this process has it open for writing, which a sink of it does
                connection = duckdb.connect(path)
        try:
            yield connection
        finally:
            connection.close()


CSV: Final = "(format csv, encoding 'UTF8')"
"""The form of COPY that :func:`as_csv` writes."""

_LENT: Final = "cues_lent"


def as_csv(rows: Any) -> Any:
    """Return the rows of a table of Arrow as COPY takes them: all text is in quotes, so that it differs from NULL."""
    import pyarrow as pa
    import pyarrow.csv

    for at, column in enumerate(rows.columns):
        if pa.types.is_binary(column.type):
            texts = [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
            rows = rows.set_column(at, rows.column_names[at], pa.array(texts, pa.string()))
    out = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, out, pyarrow.csv.WriteOptions(include_header=False))
    return memoryview(out.getvalue())


def _of_csv(data: bytes, types: Mapping[str, Any], zone: str) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    as_read = {
        name: pa.timestamp("us") if pa.types.is_timestamp(kind) else pa.string() if pa.types.is_binary(kind) else kind
        for name, kind in types.items()
    }
    if not data:
        rows = pa.schema(as_read).empty_table()
    else:
        rows = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            pyarrow.csv.ReadOptions(column_names=list(types), use_threads=False, block_size=max(len(data), 1 << 20)),
            pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            pyarrow.csv.ConvertOptions(
                column_types=as_read, null_values=[""], true_values=["t"], false_values=["f"],
                strings_can_be_null=True, quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
    for at, (name, kind) in enumerate(types.items()):
        if pa.types.is_binary(kind):
            found = [None if text is None else bytes.fromhex(text) for text in rows.column(at).to_pylist()]
            rows = rows.set_column(at, name, pa.array(found, kind))
        elif pa.types.is_timestamp(kind) and kind.tz is not None:
            rows = rows.set_column(at, name, rows.column(at).cast(kind).cast(pa.timestamp("us", zone)))
    return rows


def _of_one_type(values: Sequence[Any], kind: Any) -> Any:
    """Return values of SQLite as an array. Raises ValueError if they are of several types."""
    import pyarrow as pa

    found = set(map(type, values)) - {type(None)}
    if len(found) > 1:
        raise ValueError("a column has values of several types")
    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    return pa.array(values, kinds[found.pop()] if found else kind)


class Connection:
    """One open connection. Parameters are positional; :attr:`mark` stands for one in a statement."""

    def __init__(self, connection: Any) -> None:
        self.raw = connection
        self.dialect: str = connection.dialect.name if hasattr(connection, "dialect") else "duckdb"
        if self.dialect == "mariadb":
            self.dialect = "mysql"
        self.mark = "%s" if self.dialect in ("postgresql", "mysql") else "?"

    def run(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Run a statement, and ignore its result."""
        if self.dialect == "duckdb":
            self.raw.execute(statement, list(values))
        else:
            self.raw.exec_driver_sql(self._spelled(statement), tuple(values))

    def _spelled(self, statement: str) -> str:
        """Return a statement with the quotes of MySQL. Texts are parameters, so each quote is one of a name."""
        if self.dialect != "mysql":
            return statement
        if "`" in statement:
            raise InvalidArgument("A name of a table or column has a backtick.", "use letters, digits and _.")
        return statement.replace('"', "`")

    def run_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each of the rows, not in DuckDB."""
        self.raw.exec_driver_sql(statement, list(rows))

    @contextmanager
    def copying(self, statement: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Run a COPY of PostgreSQL; the block writes to what it is given, or reads from it.

        The driver's errors are raised as SQLAlchemy raises those of its own statements.
        """
        import sqlalchemy as sa

        dialect, driver = self.raw.dialect, self.raw.connection
        try:
            with driver.cursor() as cursor, cursor.copy(statement, values or None) as copy:
                yield copy
        except dialect.dbapi.Error as error:
            is_lost = dialect.is_disconnect(error, driver.dbapi_connection, None)
            raised = sa.exc.DBAPIError.instance(
                statement, None, error, dialect.dbapi.Error, connection_invalidated=is_lost, dialect=dialect
            )
            if is_lost:
                self.raw.invalidate(error)
            raise raised from error

    @contextmanager
    def lent(self, table: Any) -> Iterator[str]:
        """Lend a table of Arrow to DuckDB for the block; return its name for statements."""
        self.raw.register(_LENT, table)
        try:
            yield _LENT
        finally:
            with contextlib.suppress(duckdb_module().Error):  # a statement failed: the transaction is rolled back
                self.raw.unregister(_LENT)

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query, and return all its rows."""
        if self.dialect == "duckdb":
            return list(self.raw.execute(statement, list(values)).fetchall())
        result = self.raw.exec_driver_sql(self._spelled(statement), tuple(values))
        if self.dialect != "mysql":
            return [tuple(row) for row in result]
        # The session is in UTC, and the driver does not say so.
        zoned = [at for at, column in enumerate(result.cursor.description) if column[1] == _MYSQL_TIMESTAMP]
        rows = [list(row) for row in result]
        for at in zoned:
            for row in rows:
                if isinstance(row[at], datetime):
                    row[at] = row[at].replace(tzinfo=UTC)
        return [tuple(row) for row in rows]

    def table(self, query: str, values: Sequence[Any], types: Mapping[str, Any]) -> Any:
        """Run a query; return its rows as a table of Arrow with columns of these types, in their order.

        In SQLite the types are those of the values. Raises ValueError for values that Arrow or Python does not have.
        """
        import pyarrow as pa

        if self.dialect == "duckdb":
            return self.raw.sql(query, params=list(values)).to_arrow_table()
        if self.dialect == "sqlite":
            rows = self.raw.exec_driver_sql(query, tuple(values)).cursor.fetchall()
            # Not zip(*rows), whose iterators of all rows are not in the processor's cache.
            found = [list(map(operator.itemgetter(at), rows)) for at in range(len(types))]
            return pa.table([_of_one_type(some, kind) for some, kind in zip(found, types.values())], list(types))
        with self.copying(f"copy ({query}) to stdout {CSV}", values) as copy:
            data = b"".join(copy)
        return _of_csv(data, types, self.zone)

    @property
    def zone(self) -> str:
        """The time zone of a session of PostgreSQL, in which the driver gives instants."""
        return str(getattr(self.raw.connection.driver_connection.info.timezone, "key", "UTC"))

    def sent(self, column: str, type: str) -> str:
        """Return the expression for a column as :meth:`table` reads it from a COPY."""
        if self.dialect == "postgresql" and re.match(r"timestamp.*with time zone", type):
            return f"{column} at time zone 'UTC'"
        return f"encode({column}, 'hex')" if self.dialect == "postgresql" and type == "bytea" else column

    @property
    def sends_tables(self) -> bool:
        """True if :meth:`table` is there: not for other drivers, nor for dates in another form than that of ISO."""
        if self.dialect != "postgresql" or self.raw.dialect.driver != "psycopg":
            return self.dialect in ("duckdb", "sqlite")
        style = self.raw.connection.driver_connection.info.parameter_status("DateStyle")
        return bool(style and style.startswith("ISO"))

    def columns(self, table: str) -> dict[str, Column]:
        """Return the columns of a table or view by name, empty if there is no such table."""
        schema, _, name = table.rpartition(".")
        if self.dialect == "duckdb":
            found = self.rows(
                "select column_name, data_type, is_nullable from information_schema.columns where table_name = ?"
                " and table_schema = coalesce(?, current_schema()) and table_catalog = current_database()"
                " order by ordinal_position",
                [name, schema or None],
            )
            return {column: Column(type.lower(), nullable == "YES") for column, type, nullable in found}
        import sqlalchemy as sa

        if self.dialect == "mysql":
            return {column: Column(type, nullable == "YES") for column, type, _, nullable in self._described(table)}
        try:
            listed = sa.inspect(self.raw).get_columns(name, schema or None)
        except sa.exc.NoSuchTableError:
            return {}
        return {c["name"]: Column(str(c["type"]).lower(), bool(c["nullable"])) for c in listed}

    def _described(self, table: str) -> list[tuple[str, str, str | None, str]]:
        """Return the name, the type, the collation and NO or YES for NULL, of each column of a table of MySQL."""
        import sqlalchemy as sa

        try:
            found = self.rows(f"show full columns from {quoted_table(table)}")
        except sa.exc.ProgrammingError as error:
            if error.orig is not None and error.orig.args[:1] == (1146,):
                return []
            raise
        texts = ([text.decode() if isinstance(text, bytes) else text for text in row[:4]] for row in found)
        return [(name, _UNITS.sub(r"\1(0)", _lowered(type)), collation, null) for name, type, collation, null in texts]

    def takes_part(self, table: str) -> str | None:
        """Return the engine of a table of MySQL that takes no part in transactions; None if it does."""
        if self.dialect != "mysql":
            return None
        schema, _, name = table.rpartition(".")
        found = self.rows(
            "select coalesce(t.engine, t.table_type), coalesce(e.transactions, 'NO') from information_schema.tables t"
            " left join information_schema.engines e on e.engine = t.engine"
            " where t.table_schema = coalesce(%s, database()) and t.table_name = %s order by binary t.table_name = %s",
            [schema or None, name, name],
        )
        return None if found and found[-1][1] == "YES" else str(found[-1][0] if found else "unknown")

    @property
    def packet_bytes_max(self) -> int:
        """The longest statement that a server of MySQL takes."""
        kept: dict[str, Any] = self.raw.info  # of the connection of the driver
        if "cues_packet_bytes_max" not in kept:
            kept["cues_packet_bytes_max"] = self.rows("select @@max_allowed_packet")[0][0]
        return int(kept["cues_packet_bytes_max"])

    def exact_types(self, table: str) -> dict[str, str]:
        """Return the types of the columns with all that changes values: digits, zones, items, the base of a domain."""
        if self.dialect != "postgresql":
            return {name: column.type for name, column in self.columns(table).items()}
        listed = self.rows(
            "select attname, case when typtype = 'd' then format_type(typbasetype, typtypmod)"
            " else format_type(atttypid, atttypmod) end from pg_attribute join pg_type on pg_type.oid = atttypid"
            " where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped",
            [quoted_table(table)],
        )
        return {name: type.lower() for name, type in listed}

    def takes_copies(self, table: str, columns: Iterable[str], *, into: bool) -> bool:
        """Return whether COPY does what an INSERT does: ``into`` a table, or into a temporary table of ours.

        A view takes no COPY, nor does a table with policies of rows. COPY does not see rules, and it overwrites values
        that an identity always generates.
        """
        if self.dialect != "postgresql" or self.raw.dialect.driver != "psycopg":
            return False
        if not into:
            return bool(self.rows("select has_database_privilege(current_database(), 'temporary')")[0][0])
        found = self.rows(
            "select relkind in ('r', 'p') and not relhasrules and not relrowsecurity and not exists (select from"
            " pg_attribute where attrelid = pg_class.oid and attidentity = 'a' and attname = any(%s))"
            " from pg_class where oid = to_regclass(%s)",
            [list(columns), quoted_table(table)],
        )
        return found == [(True,)]

    def unique_keys(self, table: str) -> list[set[str]]:
        """Return the sets of columns that a primary key or a unique constraint or index covers."""
        schema, _, name = table.rpartition(".")
        if self.dialect == "duckdb":
            return [
                set(columns)
                for (columns,) in self.rows(
                    "select constraint_column_names from duckdb_constraints() where table_name = ?"
                    " and schema_name = coalesce(?, current_schema()) and constraint_type in ('PRIMARY KEY', 'UNIQUE')",
                    [name, schema or None],
                )
            ]
        if self.dialect == "mysql":
            keys_of: dict[str, set[str]] = {}
            for row in self.rows(f"show index from {quoted_table(table)} where non_unique = 0"):
                # The beginning of a column, or an expression, is not the column.
                keys_of.setdefault(row[2], set()).add(row[4] if row[7] is None and row[4] else f"{row[4]} ({row[7]})")
            return list(keys_of.values())
        import sqlalchemy as sa

        about = sa.inspect(self.raw)
        keys = [about.get_pk_constraint(name, schema or None)["constrained_columns"]]
        keys += [unique["column_names"] for unique in about.get_unique_constraints(name, schema or None)]
        keys += [index["column_names"] for index in about.get_indexes(name, schema or None) if index["unique"]]
        return [set(key) for key in keys if key]


def target_of(target: Any) -> SQLCheckpoint | DuckDB:
    """Return the target for a URL or a path (DuckDB: ``duckdb:///path`` or ``*.duckdb``), or the target itself."""
    if isinstance(target, (str, os.PathLike)):
        text = os.fspath(target)
        if isinstance(text, str) and (text.startswith("duckdb:///") or text.endswith(".duckdb")):
            path = text.removeprefix("duckdb:///")
            if path in ("", ":memory:"):
                raise InvalidArgument("A DuckDB in memory is lost with its process.", "give the path of a file.")
            return DuckDB(path)
        from cues.checkpoints import SQLCheckpoint

        return SQLCheckpoint(target)
    if isinstance(target, sql.SQLite) and not isinstance(target, DuckDB):
        raise InvalidArgument(f"{target!r} is a target of plain statements.", f"give the path, {target.path!r}.")
    if not callable(getattr(target, "set_up", None)) or isinstance(target, type):
        raise InvalidArgument(f"{target!r} is not a database.", "give a URL, a path, a SQLCheckpoint, or a DuckDB.")
    return target  # type: ignore[no-any-return]


class Reader:
    """Opens connections for queries. It keeps nothing open in DuckDB, so that other processes may write between."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._target = target_of(target)
        self.where = self._target.where
        self._interrupt: Callable[[], None] | None = None

    def interrupt(self) -> None:
        """End the query that runs in another thread, which then fails."""
        interrupt = self._interrupt
        if interrupt is not None:
            with contextlib.suppress(Exception):  # the connection was closed meanwhile
                interrupt()

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Open a connection for the block. Nothing is written."""
        if isinstance(self._target, DuckDB):
            if not os.path.exists(self._target.path):
                raise InvalidArgument(f"There is no database {self._target.path}.", "give the path of a DuckDB file.")
            with _reading(self._target.path) as raw, self._interruptible(raw):
                yield Connection(raw)
            return
        with self._engine.connect() as connection, self._interruptible(connection.connection.driver_connection):
            if connection.dialect.name in ("mysql", "mariadb"):
                from cues.checkpoints import session_of_mysql

                connection.exec_driver_sql(session_of_mysql(self._target.timeout_s))
            yield Connection(connection)

    @contextmanager
    def _interruptible(self, driver: Any) -> Iterator[None]:
        self._interrupt = getattr(driver, "interrupt", None) or getattr(driver, "cancel", None)
        if hasattr(driver, "thread_id"):  # MySQL
            self._interrupt = functools.partial(_kill_query, self._engine, driver.thread_id())
        try:
            yield
        finally:
            self._interrupt = None

    @functools.cached_property
    def _engine(self) -> Any:
        import sqlalchemy as sa

        from cues.checkpoints import new_engine

        target: Any = self._target.target  # type: ignore[union-attr]
        if isinstance(target, sa.Engine):
            return target
        if target.get_backend_name() == "sqlite" and not os.path.exists(target.database or ""):
            raise InvalidArgument(f"There is no database {target.database}.", "give the path of a SQLite file.")
        return new_engine(target, self._target.timeout_s)

    def close(self) -> None:
        """Close the connections."""
        if "_engine" in self.__dict__:
            self._engine.dispose()


def _kill_query(engine: Any, thread: int) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(f"kill query {int(thread)}")


def duckdb_module() -> Any:
    """Import duckdb. Raises :class:`cues.errors.NotInstalled`."""
    return package("DuckDB needs duckdb", "sql", "duckdb")
