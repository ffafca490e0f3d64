"""A server of MySQL and its tables as ``mysql_changes.py`` reads them: settings, columns, keys, the end of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from cues.errors import CuesError
from cues.processors import mysql_binlog
from cues.processors.changes import PAGE_ROWS
from cues.processors.mysql_binlog import pymysql

_WANTED: Final = {
    "log_bin": ("1", "start the server with log-bin"),
    "binlog_format": ("ROW", "run `set global binlog_format = 'ROW'`, and connect the writers again"),
    "binlog_row_image": ("FULL", "run `set global binlog_row_image = 'FULL'`, and connect the writers again"),
    "binlog_row_metadata": ("FULL", "run `set global binlog_row_metadata = 'FULL'` (MariaDB 10.5, MySQL 8)"),
    "log_bin_compress": ("0", "run `set global log_bin_compress = OFF`"),
    "binlog_transaction_compression": ("0", "run `set global binlog_transaction_compression = OFF`"),
}
"""The variables of a server whose log can be read, and how they are set. A server has the last ones or not."""
_WHOLE: Final = ("tinyint", "smallint", "mediumint", "int", "bigint")
_BINARY: Final = ("binary", "varbinary")
_TYPES: Final = frozenset(
    (
        *_WHOLE, *_BINARY, "float", "double", "decimal", "year", "date", "datetime", "timestamp", "time", "char",
        "varchar", "tinytext", "text", "mediumtext", "longtext", "tinyblob", "blob", "mediumblob", "longblob", "enum",
        "set", "bit", "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
        "geometrycollection", "geomcollection",
    )
)  # fmt: skip
"""Types whose values the log tells surely."""
_DOUBTFUL: Final = ("mariadb-5.3", "compressed", "year(2)")
"""Words in the declaration of a column whose values the log does not tell surely, or not as a query does."""
_KEYS: Final = (*_WHOLE, *_BINARY, "char", "varchar")
"""Types of keys by which a snapshot is read: integers, and all others by the bytes of UTF-8."""
_CASCADE: Final = re.compile(
    r"^ *CONSTRAINT .* FOREIGN KEY .* ON (DELETE|UPDATE) (CASCADE|SET (NULL|DEFAULT))", re.MULTILINE
)

Place = tuple[int, int]
"""The number of a file of the log, and the place in it."""


class Snapped(tuple[Any, ...]):
    """A table of the snapshot: its name, and the name and the type of each column of its key."""

    def __new__(cls, name: str, key: list[list[str]]) -> Snapped:
        return super().__new__(cls, (name, key))

    @property
    def name(self) -> str:
        return str(self[0])

    @property
    def key(self) -> list[list[str]]:
        return self[1]  # type: ignore[no-any-return]


class Server:
    """A server, and the columns of the tables of a source as they are there now."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.is_mariadb = False
        self.columns: dict[str, dict[str, str]] = {}

    def check(self, session: Any) -> dict[str, str]:
        """Return the variables of the server. Refuses one whose log cannot be read."""
        source = self._source
        found = dict(ask(session, "show global variables"))
        self.is_mariadb = "MariaDB" in found["version"]
        for name, (wanted, hint) in _WANTED.items():
            value = {"ON": "1", "OFF": "0"}.get(found.get(name, ""), found.get(name))
            if value != wanted and (value is not None or name in ("log_bin", "binlog_format", "binlog_row_metadata")):
                raise CuesError(
                    f"The server ({source.where}) has {name}={found.get(name)}; expected {wanted}.", f"{hint}."
                )
        return found

    def check_log(self, session: Any, variables: dict[str, str]) -> None:
        """Refuse a server that leaves changes of tables out of its log."""
        status = _log_status(session)
        if any(status[2:4]):
            raise CuesError(
                f"The server ({self._source.where}) leaves databases out of its log: binlog_do_db={status[2]},"
                f" binlog_ignore_db={status[3]}.",
                "start the server without these options.",
            )
        for word in ("slave", "replica"):
            if variables.get(f"log_{word}_updates") == "OFF" and _is_replica(session, is_mariadb=self.is_mariadb):
                raise CuesError(
                    f"The server ({self._source.where}) is a replica whose log does not have what it receives:"
                    f" log_{word}_updates=OFF.",
                    f"start the server with log_{word}_updates=ON; or read from the server that it copies.",
                )

    def check_tables(self, session: Any, only: str | None = None, *, begins: bool, takes_snapshot: bool) -> None:
        """Refuse tables and columns of the source whose rows or changes it would not have, or not surely.

        ``only`` one of them; ``begins``: the source has no position yet; ``takes_snapshot``: it reads their rows.
        """
        source = self._source
        where = ""
        if only is not None:
            schema, _, name = only.partition(".")
            where = f" where table_schema = {session.escape(schema)} and table_name = {session.escape(name)}"
        there: dict[str, dict[str, str]] = {}
        about = "information_schema.tables"
        for table, kind, engine in ask(
            session, f"select concat(table_schema, '.', table_name), table_type, engine from {about}{where}"
        ):
            if not source.takes_table(table) or kind in ("VIEW", "SYSTEM VIEW"):
                continue  # a view has no rows of its own, and the log no changes of it
            there[table] = {}
            ask(session, f"select * from {quoted_table(table)} limit 0")  # refused if it may not read each column
            problem = None
            if kind != "BASE TABLE":
                problem = f"is not a plain table ({kind.lower()})"
            elif takes_snapshot and engine != "InnoDB":
                problem = f"is of the engine {engine}, of which a snapshot may have rows that the log has again"
            if problem is None:
                ((_, made),) = ask(session, f"show create table {quoted_table(table)}")
                problem = (found := _CASCADE.search(made)) and (
                    f"is changed without an event in the log by its foreign key ({found[0].strip()})"
                )
            if problem is not None:
                raise CuesError(
                    f"The table {table} {problem}.",
                    "leave it out of tables=; or change it: another engine, or a foreign key that restricts."
                    " snapshot=False takes each engine.",
                )
        listed = "concat(table_schema, '.', table_name), column_name, data_type, column_type"
        about = "information_schema.columns"
        for table, column, type, whole in ask(
            session, f"select {listed} from {about}{where} order by 1, ordinal_position"
        ):
            if table in there:
                there[table][column] = type
                declared = re.sub("'(''|[^'])*'", "", whole).lower()  # without the members of an ENUM
                if type not in _TYPES or any(word in declared for word in _DOUBTFUL):
                    raise refused(table, column, whole)
        if only is not None and only not in there:
            try:
                ask(session, f"select 1 from {quoted_table(only)} limit 0")
            except pymysql().err.ProgrammingError as error:
                if error.args[0] != 1146:  # it was dropped
                    raise
        for pattern in source.patterns if only is None else ():
            if not set("*?[") & set(pattern) and pattern not in there and begins:
                raise CuesError(
                    f"{pattern!r} does not exist, or is not a table, or the user may not read it.",
                    "use its name with its capital letters; grant SELECT on it.",
                )
        self.columns |= there

    def keyed(self, session: Any) -> list[Snapped]:
        """Return the tables that are there, with the columns of their keys. Raises for one without a key."""
        rows = ask(
            session,
            "select concat(table_schema, '.', table_name), column_name from information_schema.statistics"
            " where index_name = 'PRIMARY' order by 1, seq_in_index",
        )
        keys: dict[str, list[list[str]]] = {}
        for table, column in rows:
            if table in self.columns:
                keys.setdefault(table, []).append([column, self.columns[table][column]])
        for table in self.columns:
            odd = [type for _, type in keys.get(table, []) if type not in _KEYS]
            if odd or table not in keys:
                raise CuesError(
                    f"The table {table} has {f'a {odd[0]} in its primary key' if odd else 'no primary key'}, by which a"
                    " snapshot is read.",
                    "use a key of integers, char, varchar, binary or varbinary; or give snapshot=False.",
                )
        return [Snapped(table, keys[table]) for table in sorted(self.columns)]

    def pages(
        self, session: Any, table: Snapped, after: list[Any] | None, first_s: float
    ) -> Iterator[Iterator[tuple[dict[str, Any], list[Any]]]]:
        """Yield pages of the rows after a key, in the order of the key; a row is its values, and its key in that order.

        Values are those of the log. ``first_s``: seconds to wait for the first row, which comes when all are sorted.
        """
        schema, _, name = table.name.partition(".")
        types = self.columns[table.name]
        order = [
            quoted(column) if type in _WHOLE else f"hex({quoted(column)})"
            if "binary" in type else f"hex(convert({quoted(column)} using utf8mb4))"
            for column, type in table.key
        ]  # fmt: skip
        listed = [f"cast({quoted(n)} as double)" if type == "float" else quoted(n) for n, type in types.items()]
        conditions = []
        for at in range(len(order) if after is not None else 0):
            assert after is not None
            same = [f"{expression} = {session.escape(value)}" for expression, value in zip(order[:at], after)]
            conditions.append(f"({' and '.join([*same, f'{order[at]} > {session.escape(after[at])}'])})")
        where = f" where {' or '.join(conditions)}" if conditions else ""
        cursor = session.cursor()
        session._read_timeout = first_s
        cursor.execute(
            f"select {', '.join([*listed, *order])} from {quoted(schema)}.{quoted(name)}{where}"
            f" order by {', '.join(order)}"
        )
        floats = [n for n, type in enumerate(types.values()) if type == "float"]
        zoned = [n for n, type in enumerate(types.values()) if type == "timestamp"]

        def read(fields: Any) -> tuple[dict[str, Any], list[Any]]:
            row = list(fields)
            for n in floats:
                row[n] = None if row[n] is None else mysql_binlog.shortest(row[n])
            for n in zoned:
                if isinstance(row[n], datetime):
                    row[n] = row[n].replace(tzinfo=UTC)
            return dict(zip(types, row)), row[len(types) :]

        while found := cursor.fetchmany(PAGE_ROWS):
            session._read_timeout = self._source.timeout_s
            yield map(read, found)

    def end(self, session: Any) -> tuple[str, int]:
        """Return the file and the place of the end of the log."""
        found = _log_status(session)
        return str(found[0]), int(found[1])

    def gtids_at(self, session: Any, file: str, place: int) -> str:
        """Return the GTIDs of MariaDB before a place of its log; empty for MySQL, and where there is no such place."""
        if not self.is_mariadb:
            return ""
        return str(ask(session, f"select binlog_gtid_pos('{file}', {place})")[0][0] or "")

    def charsets(self, session: Any) -> dict[int, str]:
        """Return the name of the character set of each collation."""
        found = dict(ask(session, "select id, character_set_name from information_schema.collations"))
        if None in found:  # a collation of several character sets has an id with each (MariaDB 10.10)
            table = "information_schema.collation_character_set_applicability"
            found = dict(ask(session, f"select id, character_set_name from {table}"))
        return found


def refused(table: str, column: str, type: str) -> CuesError:
    return CuesError(
        f"The column {column} of {table} is {type}, whose values the log does not tell surely.",
        "leave the table out of tables=; or store the value in a column of another type.",
    )


def ask(session: Any, query: str) -> list[tuple[Any, ...]]:
    with session.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def _log_status(session: Any) -> tuple[Any, ...]:
    """Return the file and the place of the end of the log, and the databases of binlog_do_db and binlog_ignore_db."""
    try:
        return ask(session, "show master status")[0]
    except pymysql().err.ProgrammingError:  # MySQL 8.4
        return ask(session, "show binary log status")[0]


def _is_replica(session: Any, *, is_mariadb: bool) -> bool:
    """Return whether the server receives changes of another one."""
    for question in ("show all slaves status",) if is_mariadb else ("show replica status", "show slave status"):
        try:
            return bool(ask(session, question))
        except pymysql().err.ProgrammingError:
            continue  # another version of MySQL
        except pymysql().err.OperationalError as error:
            if error.args[0] != 1227:
                raise
            # Without the privilege: a replica that runs now is known.
            return any(
                value not in ("OFF", "0") for _, value in ask(session, "show global status like 'slave%running'")
            )
    return False


def run(session: Any, statement: str) -> None:
    with session.cursor() as cursor:
        cursor.execute(statement)


def same(one: str, other: str) -> bool:
    return set(one.split(",")) == set(other.split(","))


def place_of(file: str, place: int) -> Place:
    return int(file.rpartition(".")[2]), place


def quoted(name: str) -> str:
    """Return a name in quotes of MySQL."""
    return f"`{name.replace('`', '``')}`"


def quoted_table(table: str) -> str:
    schema, _, name = table.partition(".")
    return f"{quoted(schema)}.{quoted(name)}"
