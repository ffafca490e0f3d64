"""A source of the changes of MySQL and MariaDB tables: their rows first, then each insert, update, delete and truncate.

    graph.add(cues.Source("changes", Changes("mysql+pymysql://…/shop", ["orders", "customers"], follow=True)))

It reads the binlog as a replica does. The server needs ``binlog_format=ROW``, ``binlog_row_image=FULL`` and
``binlog_row_metadata=FULL``: with it each event has the names of the columns of its time. A message is

    operation    "snapshot" (a row that was there), "insert", "update", "delete" or "truncate"
    table        "database.table"
    key          the primary key of the row; {} if the table has none
    row          the row after the change; None for a delete
    before       the row before the change; None for an insert
    log, number  the place of the transaction, such as "binlog.000001:4711", and a number that grows in the transaction
    gtid         the GTID of the transaction; None for a snapshot, and in MySQL
    time         the time of the change in whole seconds; for a snapshot the time at which it began

An update that changes the key is a delete of the old key and an insert of the new one.

**Values** are those of the driver: int, float, Decimal, str, bytes, date, datetime, timedelta (TIME). A TIMESTAMP has
the zone UTC. ENUM, SET and JSON are text, BIT and geometry bytes. A date with zeros is its text. The rows of a snapshot
and of the log have the same values. Types that the log does not tell surely are refused by name: UUID and INET of
MariaDB, JSON of MySQL, compressed columns, times of the form before MySQL 5.6, character sets other than utf8mb4, utf8,
latin1, ascii, ucs2, utf16 and utf32.

**The snapshot** is read table by table, in the order of the key, in one consistent transaction, whose place in the log
is known. The state keeps which keys were read at which place:

    rows up to the key 4711     read at binlog.000001:8812
    all rows after it           read at binlog.000002:554, by the start after a crash

Then come the changes since the first place. A change is left out if the part of its key was read at a later place. So
each row is a message once, and the rows and changes of a key follow each other without a hole.

**The position** is ``[version, file, place, number, GTIDs]``: the place in the log at which the transaction begins, the
number of the message in it, and the GTIDs of MariaDB before it. The engine commits it with the messages. If the log of
the server does not have these GTIDs at this place, it is another server: MariaDB is then asked for what follows the
GTIDs, and MySQL is refused (Diverged).

**A transaction** is given out when its end is in the log. One of more than 8 MiB is read twice: first to its end, on a
second connection. What was rolled back, and what a killed server left without an end, is no message.

**Refused by name** are tables whose rows or changes would be missing: those with a history (system-versioned),
sequences, those that a foreign key changes (CASCADE, SET NULL: the log does not have these changes), those that the
user may not read, and for a snapshot those of another engine than InnoDB. Views are left out. A server is refused that
leaves databases out of its log (``binlog-do-db``, ``binlog-ignore-db``), and a replica without ``log_slave_updates``.

**Not guaranteed.** A table that a pattern has, and that the user may not read at all, has no rows in the snapshot; its
first change stops the source. Where a column was UUID or INET for a while and is BINARY now, values of that time are
bytes. A foreign key that was there for a while only is not known. DROP TABLE, RENAME and changes of partitions are no
messages. A replica that leaves tables out of its log may not take over in the middle of a transaction. A log that the
server has removed stops the source (Diverged): its ``expire_logs_days`` must exceed the longest stop.
"""

from __future__ import annotations

import fnmatch
import logging
import random
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from cues.arguments import check_number, text_of, texts_of
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, mysql_binlog, takes, waits
from cues.processors.mysql_binlog import Decoder, Header, Packets, Table, pymysql

_VERSION: Final = 1
_TELL_S: Final = 10.0
"""Seconds after which the position moves, also if no table of the source has changed."""
_HEARTBEAT_S: Final = 0.2
"""Seconds after which a server with nothing new says so: the source then looks whether it ends."""
_ATTEMPTS: Final = 5
"""Attempts to begin a snapshot while tables are made or altered."""
_PAGE_ROWS: Final = 1_000
_SORT_TIMES: Final = 60
"""How many times longer than for other answers the source waits for the rows of a snapshot: the server sorts them."""
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
_NAME: Final = r"""(?:`(?:[^`]|``)+`|"(?:[^"]|"")+"|[\w$]+)"""
_TRUNCATE: Final = re.compile(rf"truncate\s+(?:table\s+)?({_NAME})(?:\s*\.\s*({_NAME}))?", re.I)
_CONDITIONAL: Final = re.compile(r"/\*M?!\d*(.*?)\*/", re.S)
"""A comment that the server executes."""
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`[^`]*`""", re.S)
_COMMENT: Final = re.compile(rf"({_QUOTED.pattern})|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n", re.S)
_FOR: Final = re.compile(r"""set\s+statement\s(?:'[^']*'|"[^"]*"|[^'"])*?\sfor\s+""", re.I)
"""Settings that are for one statement, before it."""
_HARMLESS: Final = re.compile(r"(savepoint|rollback|release|create|drop\s+temporary|xa)\b", re.I)
"""Statements that stand between the rows of a transaction: they change none."""
_STATEMENT: Final = re.compile(
    r"(insert|update|delete|replace|load|create\s+(or\s+replace\s+)?table\b.*\bselect)\b", re.I | re.S
)
"""Statements that change rows. (With rows in the log, CREATE … SELECT has the columns in the place of SELECT.)"""

_log = logging.getLogger("cues.processors")

Message = dict[str, Any]
Position = list[Any]
Place = tuple[int, int]
"""The number of a file of the log, and the place in it."""


@takes(SOURCE)
class Changes:
    """A source of the changes of tables; see the module. Give it to ``cues.Source(id, Changes(...))``.

    ``url``        ``"mysql+pymysql://user:password@host/database"``, as SQLAlchemy takes it
    ``tables``     names of tables, ``database.table``, or patterns such as ``"orders_*"``
    ``server_id``  the number by which the server knows this reader among its replicas; None: one at random
    ``snapshot``   True: the rows that are there come first; False: only changes, from now on. A snapshot that has begun
                   is read to its end
    ``follow``     True: wait for new changes; otherwise the source ends with what the server has at the start
    ``timeout_s``  seconds after which a connection, or a server that is silent, counts as away

    Kind: source
    Needs: extra `mysql`
    Guarantee: exactly once: each row of the snapshot and each change is on the queue once, also after kill -9
    Mechanism: position of the place in the binlog, the number in the transaction and the GTIDs, committed with the messages
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        tables: str | Sequence[str],
        *,
        server_id: int | None = None,
        snapshot: bool = True,
        follow: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self.url, self.tables = text_of("url", url), texts_of("tables", tables)
        self.server_id, self.snapshot, self.follow, self.timeout_s = server_id, snapshot, follow, timeout_s
        self.__name__ = "changes"
        self._reading: Reading | None = None
        if not re.match(r"(mysql|mariadb)(\+pymysql)?://", url):
            raise InvalidArgument("url= is not a URL of MySQL.", "give 'mysql+pymysql://user@host/database'.")
        if not self.tables:
            raise InvalidArgument("tables= is empty.", "name the tables.")
        if server_id is not None:
            check_number("server_id", server_id, 1, (1 << 32) - 1, whole=True)
        for name, flag in (("snapshot", snapshot), ("follow", follow)):
            if not isinstance(flag, bool):
                raise InvalidArgument(f"{name}={flag!r:.40} is not a flag.", "use True or False.")
        check_number("timeout_s", timeout_s, 1)
        try:
            from sqlalchemy.engine import make_url

            found = make_url(url)
        except ImportError:
            raise CuesError("URLs need SQLAlchemy.", "pip install 'cues-streams[mysql]'.") from None
        except Exception:
            raise InvalidArgument(
                "url= cannot be read.", "give 'mysql+pymysql://user@host/database', with %-escapes."
            ) from None
        query = {name: str(value) for name, value in found.query.items()}
        odd = set(query) - {"charset", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key"}
        if odd:
            raise InvalidArgument(
                f"url= has the option {sorted(odd)[0]!r}.", "use unix_socket, ssl_ca, ssl_cert and ssl_key."
            )
        if query.pop("charset", "utf8mb4") != "utf8mb4":
            raise InvalidArgument("url= has a charset other than utf8mb4.", "leave it out.")
        self.database = found.database or ""
        self._options: dict[str, Any] = {
            "host": found.host or "localhost", "port": found.port or 3306, "user": found.username or None,
            "password": found.password or "", "database": found.database, **query,
        }  # fmt: skip
        self.where = f"{self.database} at {found.host or 'localhost'}"
        if any("." not in table and not self.database for table in self.tables):
            raise InvalidArgument("tables= has a name without a database, and url= has none.", "give 'database.table'.")
        self.patterns = [table if "." in table else f"{self.database}.{table}" for table in self.tables]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None}

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        if position is not None:
            match position:
                case [version, str() | int(), int() | list(), int(), str(), *_] if version == _VERSION:
                    pass
                case _:
                    raise Diverged(
                        f"The position {str(position)[:80]} is not one of cues.processors.mysql_changes, version"
                        f" {_VERSION}.",
                        "give the source another id, which begins at the start.",
                    )
            if process is None:
                raise InvalidArgument(
                    "Changes was called with a position and without process=, whose state it needs.",
                    "give it to cues.Source(id, Changes(…)); or pass on the process of your own source.",
                )
        self._reading = reading = Reading(self, position, process)
        try:
            yield from reading.messages()
        except pymysql().err.MySQLError as error:
            raise self.failed(error) from error
        except UnicodeDecodeError as error:
            raise CuesError(
                f"A row of the snapshot ({self.where}) has a text that Python cannot decode: {error}.",
                "leave its table out of tables=; or correct the text.",
            ) from error
        finally:
            reading.close()

    def interrupt(self) -> None:
        """End the query that runs now; the engine calls it when the source ends."""
        if self._reading is not None:
            self._reading.interrupt()

    def takes_table(self, table: str) -> bool:
        """Return whether ``database.table`` is one of the source."""
        return any(fnmatch.fnmatchcase(table, pattern) for pattern in self.patterns)

    def failed(self, error: Any) -> Exception:
        """Return the error for one of the driver; one that says that the server is away is returned as it is."""
        code, told = (*error.args, "", "")[:2]
        if isinstance(error, (pymysql().err.InterfaceError, pymysql().err.InternalError)) or code == 1412:
            return Away(
                f"MySQL is away ({self.where}): {told or error}.", "wait; the source continues then.", what=self.where
            )
        if code == 4052 or (code == 1236 and "same server" in str(told)):
            return CuesError(
                f"Another reader of the log came to the server ({self.where}) with server_id={self.server_id}: {told}.",
                "give each source and each replica another number; or leave server_id= out.",
            )
        if code == 1236:
            return Diverged(
                f"The server ({self.where}) does not have the log from the position on: {told}.",
                "give the source another id, which begins with a snapshot; and keep the log longer"
                " (expire_logs_days, binlog_expire_logs_seconds).",
            )
        if code in (1044, 1045, 1142, 1143, 1227, 1698):
            return CuesError(
                f"MySQL refused ({self.where}): {told}.",
                "give the user REPLICATION SLAVE, REPLICATION CLIENT (MariaDB: BINLOG MONITOR) and SELECT on the"
                " tables, and in MySQL RELOAD for the snapshot.",
            )
        if isinstance(error, pymysql().err.OperationalError) and code not in (1049, 1054, 1146, 1193):
            known: Exception = error
            return known  # the engine knows those that say that the server is away
        return CuesError(f"MySQL refused ({self.where}): {told}.", "correct what the server names, then start again.")

    def connect(self, read_timeout: float | None = None, **options: Any) -> Any:
        """Return a connection in UTC, which the server does not end for its silence or a slow reader."""
        setting = (
            "set time_zone = '+00:00', sql_mode = '', net_write_timeout = 31536000, wait_timeout = 31536000,"
            " sql_select_limit = 18446744073709551615"
        )
        return pymysql().connect(
            **self._options, charset="utf8mb4", autocommit=True, init_command=setting,
            connect_timeout=max(2, round(self.timeout_s)), read_timeout=read_timeout or self.timeout_s, **options,
        )  # fmt: skip


class Reading:
    """One call of a source: its set-up, the rest of the snapshot, the changes."""

    def __init__(self, source: Changes, position: Position | None, process: Any) -> None:
        self._source, self._position, self._process = source, position, process
        self._state: Any = {} if process is None else process.state
        self._open: list[Any] = []
        self._thread = 0
        self._is_mariadb = False
        self._tables: list[Snapped] = []
        self._segments: list[tuple[int, list[Any] | None, Place]] = []
        self._file, self._gtids = "", ""
        self._columns: dict[str, dict[str, str]] = {}
        self._seen: set[int] = set()
        """The descriptions of tables in the log that were checked."""

    @property
    def _stopping(self) -> bool:
        return self._process is not None and bool(self._process.stopping)

    @property
    def _in_snapshot(self) -> bool:
        return self._position is not None and isinstance(self._position[2], list)

    def messages(self) -> Iterator[tuple[Position, Any]]:
        """Yield messages until the end (``follow``: until the graph drains)."""
        source = self._source
        session = self._connect()
        self._check_server(session)
        end = self._end(session)
        if self._in_snapshot or (self._position is None and source.snapshot):
            yield from self._snapshot()
            if self._stopping:
                return
            file, place, gtids = self._state["snapshot"]["from"]
            self._position = [_VERSION, file, place, 0, gtids]
            yield self._position, None
        elif self._position is None:
            self._position = [_VERSION, end[0], end[1], 0, self._gtids_at(session, *end)]
            yield self._position, None
        yield from self._changes(session, _place(*end))

    def _connect(self, **options: Any) -> Any:
        connection = self._source.connect(**options)
        self._open.append(connection)
        return connection

    # --- set-up ---

    def _check_server(self, session: Any) -> None:
        source = self._source
        found = dict(_ask(session, "show global variables"))
        self._is_mariadb = "MariaDB" in found["version"]
        for name, (wanted, hint) in _WANTED.items():
            value = {"ON": "1", "OFF": "0"}.get(found.get(name, ""), found.get(name))
            if value != wanted and (value is not None or name in ("log_bin", "binlog_format", "binlog_row_metadata")):
                raise CuesError(
                    f"The server ({source.where}) has {name}={found.get(name)}; expected {wanted}.", f"{hint}."
                )
        server = "" if self._is_mariadb else found.get("server_uuid", "")
        known = self._state.setdefault("server", server)
        if known != server:
            raise self._diverged(f"is {server or 'a MariaDB'}; the position is of {known or 'a MariaDB'}")
        known = self._state.get("patterns", source.patterns) if self._position is not None else source.patterns
        new = [pattern for pattern in source.patterns if pattern not in known]
        if new:
            raise Diverged(
                f"tables= has {', '.join(new)}, which this source did not have all the time: changes are not known.",
                "give a second source for it; or give this one another id, which begins anew.",
            )
        self._state["patterns"] = source.patterns
        self._check_log(session, found)
        self._check_tables(session)

    def _check_log(self, session: Any, variables: dict[str, str]) -> None:
        """Refuse a server that leaves changes of tables out of its log."""
        status = _log_status(session)
        if any(status[2:4]):
            raise CuesError(
                f"The server ({self._source.where}) leaves databases out of its log: binlog_do_db={status[2]},"
                f" binlog_ignore_db={status[3]}.",
                "start the server without these options.",
            )
        for word in ("slave", "replica"):
            if variables.get(f"log_{word}_updates") == "OFF" and _is_replica(session, is_mariadb=self._is_mariadb):
                raise CuesError(
                    f"The server ({self._source.where}) is a replica whose log does not have what it receives:"
                    f" log_{word}_updates=OFF.",
                    f"start the server with log_{word}_updates=ON; or read from the server that it copies.",
                )

    def _check_tables(self, session: Any, only: str | None = None) -> None:
        """Refuse tables and columns of the source whose rows or changes it would not have, or not surely."""
        source = self._source
        before = self._position is None
        takes_snapshot = only is None and (self._in_snapshot or (before and source.snapshot))
        where = ""
        if only is not None:
            schema, _, name = only.partition(".")
            where = f" where table_schema = {session.escape(schema)} and table_name = {session.escape(name)}"
        there: dict[str, dict[str, str]] = {}
        about = "information_schema.tables"
        for table, kind, engine in _ask(
            session, f"select concat(table_schema, '.', table_name), table_type, engine from {about}{where}"
        ):
            if not source.takes_table(table) or kind in ("VIEW", "SYSTEM VIEW"):
                continue  # a view has no rows of its own, and the log no changes of it
            there[table] = {}
            _ask(session, f"select * from {_quoted(table)} limit 0")  # refused if it may not read each column
            problem = None
            if kind != "BASE TABLE":
                problem = f"is no plain table ({kind.lower()})"
            elif takes_snapshot and engine != "InnoDB":
                problem = f"is of the engine {engine}, of which a snapshot may have rows that the log has again"
            if problem is None:
                ((_, made),) = _ask(session, f"show create table {_quoted(table)}")
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
        for table, column, type, whole in _ask(
            session, f"select {listed} from {about}{where} order by 1, ordinal_position"
        ):
            if table in there:
                there[table][column] = type
                declared = re.sub("'(''|[^'])*'", "", whole).lower()  # without the members of an ENUM
                if type not in _TYPES or any(word in declared for word in _DOUBTFUL):
                    raise self._refused(table, column, whole)
        if only is not None and only not in there:
            try:
                _ask(session, f"select 1 from {_quoted(only)} limit 0")
            except pymysql().err.ProgrammingError as error:
                if error.args[0] != 1146:  # it was dropped
                    raise
        for pattern in source.patterns if only is None else ():
            if not set("*?[") & set(pattern) and pattern not in there and before:
                raise CuesError(
                    f"{pattern!r} does not exist, or is no table, or the user may not read it.",
                    "use its name with its capital letters; grant SELECT on it.",
                )
        self._columns |= there

    def _refused(self, table: str, column: str, type: str) -> CuesError:
        return CuesError(
            f"The column {column} of {table} is {type}, whose values the log does not tell surely.",
            "leave the table out of tables=; or store the value in a column of another type.",
        )

    def _diverged(self, problem: str) -> Diverged:
        return Diverged(
            f"The server ({self._source.where}) {problem}.",
            "give the source another id, which begins with a snapshot.",
        )

    def _end(self, session: Any) -> tuple[str, int]:
        """Return the file and the place of the end of the log."""
        found = _log_status(session)
        return str(found[0]), int(found[1])

    def _gtids_at(self, session: Any, file: str, place: int) -> str:
        """Return the GTIDs of MariaDB before a place of its log; empty for MySQL, and where there is no such place."""
        if not self._is_mariadb:
            return ""
        return str(_ask(session, f"select binlog_gtid_pos('{file}', {place})")[0][0] or "")

    # --- the snapshot ---

    def _snapshot(self) -> Iterator[tuple[Position, Any]]:
        """Yield the rows after the position, as they are at one place of the log."""
        timeout_s = self._source.timeout_s
        session = self._connect(cursorclass=_streaming(), read_timeout=_SORT_TIMES * timeout_s)
        self._thread = session.thread_id()
        _run(session, "set session transaction isolation level repeatable read")
        file, place = self._began(session)
        gtids = self._gtids_at(session, file, place)
        first = self._position is None
        after: list[Any] | None = None
        at_table = 0
        if first:
            self._state["tables"] = [list(table) for table in self._found(session)]
            self._state["snapshot"] = {"from": [file, place, gtids], "segments": []}
        kept = self._state["snapshot"]
        self._tables = [Snapped(*each) for each in self._state["tables"]]
        if not first:
            assert self._position is not None
            at_table, after = self._position[1], self._position[2]
            known_file, known_place, known_gtids = kept["from"]
            if not _same(self._gtids_at(session, known_file, known_place), known_gtids):
                raise self._diverged("is another one than that whose snapshot was begun")
            there = {table.name: table for table in self._found(session)}
            if any(there.get(table.name) != table for table in self._tables[at_table:]):
                raise self._diverged("has another key, or lacks a table, since the snapshot began")
        segments = kept["segments"]
        if segments:
            segments = [*segments[:-1], [at_table, after, segments[-1][2]]]
        kept["segments"] = [*segments, [len(self._tables), None, [file, place]]]
        self._state["snapshot"] = kept
        facts = {"log": f"{file}:{place}", "number": None, "gtid": None, "time": datetime.now(UTC)}
        for number in range(at_table, len(self._tables)):
            yield from self._rows(session, number, after, facts)
            after = None
            if self._stopping:
                return
        self._thread = 0
        session.close()

    def _began(self, session: Any) -> tuple[str, int]:
        """Begin a transaction in which each table of the source can be read; return its place in the log."""
        for is_last in (False,) * _ATTEMPTS + (True,):
            if self._is_mariadb:
                _run(session, "start transaction with consistent snapshot")
                at = dict(_ask(session, "show status like 'binlog_snapshot_%'"))
                file, place = at["Binlog_snapshot_file"], int(at["Binlog_snapshot_position"])
            else:
                _run(session, "flush tables with read lock")
                _run(session, "start transaction with consistent snapshot")
                file, place = self._end(session)
                _run(session, "unlock tables")
            self._columns.clear()  # a table may have been made since the start
            self._check_tables(session)
            try:
                for table in self._columns:
                    _ask(session, f"select 1 from {_quoted(table)} limit 1")
                break
            except pymysql().err.MySQLError as error:
                if error.args[0] != 1412 or is_last:  # made or altered after the transaction began
                    raise
        return file, place

    def _found(self, session: Any) -> list[Snapped]:
        """Return the tables that are there, with the columns of their keys. Raises for one without a key."""
        rows = _ask(
            session,
            "select concat(table_schema, '.', table_name), column_name from information_schema.statistics"
            " where index_name = 'PRIMARY' order by 1, seq_in_index",
        )
        keys: dict[str, list[list[str]]] = {}
        for table, column in rows:
            if table in self._columns:
                keys.setdefault(table, []).append([column, self._columns[table][column]])
        for table in self._columns:
            odd = [type for _, type in keys.get(table, []) if type not in _KEYS]
            if odd or table not in keys:
                raise CuesError(
                    f"The table {table} has {f'a {odd[0]} in its primary key' if odd else 'no primary key'}, by which a"
                    " snapshot is read.",
                    "use a key of integers, char, varchar, binary or varbinary; or give snapshot=False.",
                )
        return [Snapped(table, keys[table]) for table in sorted(self._columns)]

    def _rows(
        self, session: Any, number: int, after: list[Any] | None, facts: Message
    ) -> Iterator[tuple[Position, Any]]:
        table = self._tables[number]
        schema, _, name = table.name.partition(".")
        types = self._columns[table.name]
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
        session._read_timeout = _SORT_TIMES * self._source.timeout_s
        cursor.execute(
            f"select {', '.join([*listed, *order])} from {quoted(schema)}.{quoted(name)}{where}"
            f" order by {', '.join(order)}"
        )
        names = list(types)
        floats = [n for n, type in enumerate(types.values()) if type == "float"]
        zoned = [n for n, type in enumerate(types.values()) if type == "timestamp"]
        while not self._stopping and (found := cursor.fetchmany(_PAGE_ROWS)):
            session._read_timeout = self._source.timeout_s
            for fields in found:
                row = list(fields)
                for n in floats:
                    row[n] = None if row[n] is None else mysql_binlog.shortest(row[n])
                for n in zoned:
                    if isinstance(row[n], datetime):
                        row[n] = row[n].replace(tzinfo=UTC)
                whole = dict(zip(names, row))
                message = {
                    "operation": "snapshot", "table": table.name, "key": {n: whole[n] for n, _ in table.key},
                    "row": whole, "before": None, **facts,
                }  # fmt: skip
                self._position = [_VERSION, number, list(fields[len(names) :]), 0, ""]
                yield self._position, message

    # --- the changes ---

    def _charsets(self, session: Any) -> dict[int, str]:
        """Return the name of the character set of each collation."""
        found = dict(_ask(session, "select id, character_set_name from information_schema.collations"))
        if None in found:  # a collation of several character sets has an id with each (MariaDB 10.10)
            table = "information_schema.collation_character_set_applicability"
            found = dict(_ask(session, f"select id, character_set_name from {table}"))
        return found

    def _stream(self, session: Any, file: str, place: int, gtids: str) -> Any:
        """Return a connection that streams the log after a position."""
        source = self._source
        by_gtid = False
        if self._is_mariadb and not _same(self._gtids_at(session, file, place), gtids):
            if not gtids or self._segments:
                raise self._diverged(f"does not have the place {file}:{place} of its log, or has other changes there")
            by_gtid = True
        elif (sizes := dict(row[:2] for row in _ask(session, "show binary logs"))) and int(sizes.get(file, 0)) < place:
            raise self._diverged(f"does not have the place {file}:{place} of its log any more")
        if by_gtid:
            _log.info("%s: another server; it is asked for what follows %s.", source.where, gtids)
            return self._dump("", 4, source.server_id, gtids)
        return self._dump(file, place, source.server_id)

    def _dump(self, file: str, place: int, server_id: int | None = None, gtids: str = "") -> Any:
        """Return a connection that streams the log from a place on, or what follows GTIDs."""
        wire = self._connect()
        server_id = server_id or random.randrange(1 << 31, 1 << 32)
        heartbeat = round(_HEARTBEAT_S * 1e9)
        for setting in (
            f"master_heartbeat_period = {heartbeat}", f"source_heartbeat_period = {heartbeat}",
            "master_binlog_checksum = @@global.binlog_checksum", "source_binlog_checksum = @@global.binlog_checksum",
            "slave_uuid = uuid()", "replica_uuid = uuid()", "mariadb_slave_capability = 4",
        ):  # fmt: skip
            _run(wire, f"set @{setting}")
        if gtids:
            _run(wire, f"set @slave_connect_state = '{gtids}', @slave_gtid_strict_mode = 1")
        mysql_binlog.dump(wire, file, place, server_id)
        return wire

    def _packets(self, session: Any, wire: Any, server_id: int | None) -> Packets:
        """Yield the events of a stream, over the end of a file that was left by a killed server.

        MariaDB lets the half of an event stand there, and refuses to read it. Nothing of it was committed if the next
        file begins with the GTIDs that were read so far.
        """
        while True:
            try:
                yield from mysql_binlog.packets(wire)
            except pymysql().err.OperationalError as error:
                if error.args[0] != 1236 or "truncated in the middle of event" not in error.args[1]:
                    raise
                files = [str(row[0]) for row in _ask(session, "show binary logs")]
                after = [file for file in files if _place(file, 0) > _place(self._file, 0)]
                if not after or not _same(self._gtids_at(session, after[0], 4), self._gtids):
                    raise
                self._dropped(wire)
                wire = self._dump(after[0], 4, server_id)

    def _ahead(self, session: Any, file: str, place: int) -> Packets:
        """Yield the events after a place until the source stops, on a connection of their own."""
        wire = self._dump(file, place)
        try:
            for each in self._packets(session, wire, None):
                if self._stopping:
                    return
                yield each
        finally:
            self._dropped(wire)

    def _dropped(self, connection: Any) -> None:
        connection._force_close()
        if connection in self._open:
            self._open.remove(connection)

    def _changes(self, session: Any, end: Place) -> Iterator[tuple[Position, Any]]:
        """Yield changes after the position; ``end`` is where a source that does not follow ends."""
        source, process = self._source, self._process
        assert self._position is not None
        _, file, place, skipped, gtids, *opened = told = self._position
        kept = self._state.get("snapshot")
        if kept is not None:
            self._tables = [Snapped(*each) for each in self._state["tables"]]
            self._segments = [(at, key, _place(*read)) for at, key, read in kept["segments"]]
        until = max((read for _, _, read in self._segments), default=(0, 0))
        self._forget_snapshot(_place(file, place) >= until)
        wire = self._stream(session, file, place, gtids)
        decoder = Decoder(self._charsets(session), is_mariadb=self._is_mariadb)
        self._file, self._gtids = file, gtids
        events = self._packets(session, wire, source.server_id)
        begin, gtid, count = place, None, 0
        """The place at which the transaction begins, its GTID, and the number of rows of it so far."""
        first = (file, place)
        held: Message | None = None
        inside, single, is_prepared, moved = False, False, False, time.monotonic()
        for header, body in mysql_binlog.settled(events, partial(self._ahead, session)):
            kind = header.kind
            done = False
            if kind == mysql_binlog.ROTATE:
                file, begin = mysql_binlog.rotation(body)
                self._file = file
                decoder.forget()
            elif kind == mysql_binlog.GTID:
                number, domain, single, is_prepared = mysql_binlog.gtid(body)
                gtid = f"{domain}-{header.server}-{number}"
                inside, count = True, 0
                if skipped and opened not in ([], [gtid]):
                    raise self._diverged(f"goes on with the transaction {gtid}, not in the middle of {opened[0]}")
            elif kind == mysql_binlog.QUERY:
                schema, text = mysql_binlog.query(body)
                if text == "BEGIN" or text.startswith("XA START"):
                    inside, count, is_prepared = True, 0, is_prepared or text != "BEGIN"
                    if skipped and gtid is None and (file, begin) != first:
                        raise self._diverged(f"does not have the transaction at {first[0]}:{first[1]} any more")
                elif text.startswith(mysql_binlog.ENDS):
                    done = True
                else:
                    for message in self._statement(schema, text, begin, inside and not single):
                        count += 2
                        if count > skipped:
                            held = self._facts(message, file, begin, count, gtid, header)
                    done = single or not inside
            elif kind == mysql_binlog.TABLE_MAP:
                self._checked(session, decoder.table_map(body))
            elif kind in mysql_binlog.ROWS:
                operation, table, rows = decoder.rows(kind, body)
                is_ours = self._is_ours(table)
                if is_ours and is_prepared:
                    raise CuesError(
                        f"The transaction at {file}:{begin} is one of XA, which may be undone after it is in the log.",
                        "use transactions without XA for these tables; give the source another id, which begins anew.",
                    )
                for before, after in rows:
                    count += 2
                    if not is_ours or count <= skipped:
                        continue
                    for part, message in self._row_messages(operation, table, before, after, _place(file, begin)):
                        at = count - 1 + part
                        if at <= skipped:
                            continue
                        if held is not None:
                            yield [_VERSION, file, begin, held["number"], self._gtids, gtid], held
                        held = self._facts(message, file, begin, at, gtid, header)
            elif kind in (mysql_binlog.XID, mysql_binlog.PREPARE):
                done = True
            elif kind in mysql_binlog.REFUSED:
                raise CuesError(
                    f"The log of {source.where} has {mysql_binlog.REFUSED[kind]}.",
                    "mend it at the server, then give the source another id, which begins anew.",
                )
            if done:
                if gtid is not None:
                    self._gtids = _advanced(self._gtids, gtid)
                begin, skipped, gtid, inside, single, count = header.end, 0, None, False, False, 0
                is_prepared = False
                if held is not None:
                    moved = time.monotonic()
                    yield (told := [_VERSION, file, begin, 0, self._gtids]), held
                    held = None
                self._forget_snapshot(_place(file, begin) >= until)
            if self._stopping:
                return
            if not inside:
                if kind != mysql_binlog.ROTATE and header.end > begin:
                    begin = header.end
                if time.monotonic() - moved >= _TELL_S:
                    moved = time.monotonic()
                    yield (told := [_VERSION, file, begin, 0, self._gtids]), None
                if _place(file, begin) >= end:
                    if not source.follow:
                        if told != (last := [_VERSION, file, begin, 0, self._gtids]):
                            yield last, None
                        return
                    if kind == mysql_binlog.HEARTBEAT:
                        waits.answered(process)

    def _forget_snapshot(self, is_passed: bool) -> None:
        """Forget the parts of the snapshot when the log is after the places at which they were read."""
        if self._segments and is_passed:
            self._segments = []
            del self._state["snapshot"]

    def _facts(self, message: Message, file: str, begin: int, number: int, gtid: str | None, header: Header) -> Message:
        clock = datetime.fromtimestamp(header.time, UTC)
        return {**message, "log": f"{file}:{begin}", "number": number, "gtid": gtid, "time": clock}

    def _is_ours(self, table: Table) -> bool:
        return self._source.takes_table(table.name)

    def _checked(self, session: Any, table: Table) -> None:
        """Raise for a table of the source whose rows cannot be read surely; look at its types in the server."""
        if not self._is_ours(table):
            return
        if table.problem is not None:
            raise CuesError(
                f"A change of {table.name} cannot be read: {table.problem}.",
                "set binlog_row_metadata = FULL before changes; or leave the table out. Give the source another id,"
                " which begins anew.",
            )
        if id(table) in self._seen:  # the decoder keeps each, so the next has another number
            return
        self._columns.pop(table.name, None)
        self._check_tables(session, table.name)
        now = self._columns.get(table.name, {})
        for name in sorted(table.fixed) if self._is_mariadb else ():
            if now.get(name) != "binary":
                raise self._refused(table.name, name, "BINARY, UUID or INET, and is no BINARY column now")
        self._seen.add(id(table))

    def _statement(self, schema: str, text: str, begin: int, in_rows: bool) -> Iterator[Message]:
        """Yield the message of a truncate. Raises for a change that was logged as a statement.

        ``in_rows``: it stands in a transaction, in which each change must be rows.
        """
        plain = _COMMENT.sub(lambda found: found[1] or " ", _CONDITIONAL.sub(r" \1 ", text)).lstrip()
        if found := _FOR.match(plain):
            plain = plain[found.end() :]
        if found := _TRUNCATE.match(plain):
            table = ".".join(_unquoted(part) for part in (found[1], found[2]) if part)
            table = table if found[2] else f"{schema}.{table}"
            if self._source.takes_table(table) and self._is_new_truncate(table, begin):
                yield {"operation": "truncate", "table": table, "key": {}, "row": None, "before": None}
        elif _STATEMENT.match(_QUOTED.sub("_", plain)) or (in_rows and not _HARMLESS.match(plain)):
            raise CuesError(
                f"The log of {self._source.where} has a statement in the place of rows: {plain.strip()[:60]!r}.",
                "set binlog_format = ROW for all sessions; give the source another id, which begins anew.",
            )

    def _is_new_truncate(self, table: str, begin: int) -> bool:
        at = next((n for n, each in enumerate(self._tables) if each.name == table), None)
        if not self._segments or at is None:
            return True
        seen = set()
        for number, key, read in self._segments:
            if number >= at:
                seen.add(read > _place(self._file, begin))
            if number > at or (number == at and key is None):
                break
        if len(seen) > 1:
            raise self._diverged(f"truncated {table} while its snapshot was interrupted")
        return seen != {True}

    def _row_messages(
        self, operation: str, table: Table, before: list[Any] | None, after: list[Any] | None, begin: Place
    ) -> Iterator[tuple[int, Message]]:
        names = table.names
        old, new = (None if row is None else dict(zip(names, row)) for row in (before, after))
        keys = [None if row is None else {name: row[name] for name in table.key} for row in (old, new)]
        common = {"table": table.name}
        moved = operation == "update" and keys[0] != keys[1]
        if (operation == "delete" or moved) and self._is_new(table, keys[0], begin):
            yield 0, {"operation": "delete", **common, "key": keys[0], "row": None, "before": old}
        if operation != "delete" and self._is_new(table, keys[1], begin):
            kind = "insert" if operation == "insert" or moved else "update"
            yield 1, {"operation": kind, **common, "key": keys[1], "row": new, "before": None if moved else old}

    def _is_new(self, table: Table, key: Any, begin: Place) -> bool:
        """Return whether the snapshot that has read the place of a key does not have the change."""
        if not self._segments:
            return True
        at = next((n for n, each in enumerate(self._tables) if each.name == table.name), None)
        if at is None:
            return True
        of = [_comparable(key.get(name)) for name, _ in self._tables[at].key]
        for number, last, read in self._segments:
            if number == at and last is not None and list(map(type, of)) != list(map(type, last)):
                raise self._diverged(f"has another key of {table.name} since the snapshot began")
            if number > at or (number == at and (last is None or of <= last)):
                return begin >= read
        return True

    # --- other threads ---

    def interrupt(self) -> None:
        """End the query of the snapshot."""
        if not self._thread:
            return
        try:
            with self._source.connect() as other:
                _run(other, f"kill query {self._thread}")
        except pymysql().err.MySQLError:
            pass  # it has ended

    def close(self) -> None:
        """Close the connections at once: what is sent is not read."""
        for connection in self._open:
            connection._force_close()


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


def quoted(name: str) -> str:
    """Return a name in quotes of MySQL."""
    return f"`{name.replace('`', '``')}`"


def _unquoted(name: str) -> str:
    mark = name[0]
    return name[1:-1].replace(mark * 2, mark) if mark in '`"' else name


def _streaming() -> Any:
    """Return the class of the cursors of a snapshot, which read their rows as they come."""

    class Streaming(pymysql().cursors.SSCursor):  # type: ignore[misc, name-defined, unused-ignore]
        """A cursor whose end reads nothing.

        That of the driver reads the rest of the rows, also when it is collected after its connection was closed or
        lost, and fails there: Python prints such an error in the middle of other work.
        """

        def close(self) -> None:
            if self._result is not None:
                self._result.unbuffered_active = False
            self.connection = None

        __del__ = close

    return Streaming


def _ask(session: Any, query: str) -> list[tuple[Any, ...]]:
    with session.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def _log_status(session: Any) -> tuple[Any, ...]:
    """Return the file and the place of the end of the log, and the databases of binlog_do_db and binlog_ignore_db."""
    try:
        return _ask(session, "show master status")[0]
    except pymysql().err.ProgrammingError:  # MySQL 8.4
        return _ask(session, "show binary log status")[0]


def _is_replica(session: Any, *, is_mariadb: bool) -> bool:
    """Return whether the server receives changes of another one."""
    for question in ("show all slaves status",) if is_mariadb else ("show replica status", "show slave status"):
        try:
            return bool(_ask(session, question))
        except pymysql().err.ProgrammingError:
            continue  # another version of MySQL
        except pymysql().err.OperationalError as error:
            if error.args[0] != 1227:
                raise
            # Without the privilege: a replica that runs now is known.
            return any(
                value not in ("OFF", "0") for _, value in _ask(session, "show global status like 'slave%running'")
            )
    return False


def _quoted(table: str) -> str:
    schema, _, name = table.partition(".")
    return f"{quoted(schema)}.{quoted(name)}"


def _run(session: Any, statement: str) -> None:
    with session.cursor() as cursor:
        cursor.execute(statement)


def _same(one: str, other: str) -> bool:
    return set(one.split(",")) == set(other.split(","))


def _place(file: str, place: int) -> Place:
    return int(file.rpartition(".")[2]), place


def _comparable(value: Any) -> Any:
    """Return a value of a key in the order of the snapshot."""
    if isinstance(value, str):
        value = value.encode()
    return value.hex().upper() if isinstance(value, bytes) else value


def _advanced(gtids: str, gtid: str) -> str:
    """Return the GTIDs of all domains after a transaction."""
    domain = gtid.partition("-")[0]
    kept = {text.partition("-")[0]: text for text in filter(None, gtids.split(","))} | {domain: gtid}
    return ",".join(kept[name] for name in sorted(kept, key=int))
