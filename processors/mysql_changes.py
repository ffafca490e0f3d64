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
second connection. What was rolled back, and what a killed server left without an end, is not a message.

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
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from cues.arguments import check_number
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, changes, mysql_binlog, mysql_statements, takes, waits
from cues.processors.changes import TELL_S, VERSION, Message, Position
from cues.processors.mysql_binlog import Decoder, Header, Packets, Table, pymysql
from cues.processors.mysql_tables import Place, Server, Snapped, ask, place_of, quoted_table, refused, run, same
from cues.processors.mysql_wire import Wires

_ATTEMPTS: Final = 5
"""Attempts to begin a snapshot while tables are made or altered."""
_SORT_TIMES: Final = 60
"""How many times longer than for other answers the source waits for the rows of a snapshot: the server sorts them."""

_log = logging.getLogger("cues.processors")


@takes(SOURCE)
class Changes(changes.Changes):
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

    _NAME = "MySQL"
    _URL = (r"(mysql|mariadb)(\+pymysql)?://", "mysql+pymysql://user@host/database")

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
        super().__init__(url, tables, snapshot=snapshot, follow=follow, timeout_s=timeout_s)
        self.server_id = server_id
        if server_id is not None:
            check_number("server_id", server_id, 1, (1 << 32) - 1, whole=True)
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
    def _is_place(self, place: list[Any]) -> bool:
        match place:
            case [str() | int(), int() | list(), int(), str(), *_]:
                return True
        return False

    @override
    def _new_reading(self, position: Position | None, process: Any) -> Reading:
        return Reading(self, position, process)

    def takes_table(self, table: str) -> bool:
        """Return whether ``database.table`` is one of the source."""
        return any(fnmatch.fnmatchcase(table, pattern) for pattern in self.patterns)

    @override
    def failed(self, error: Any) -> BaseException:
        if isinstance(error, UnicodeDecodeError):
            return CuesError(
                f"A row of the snapshot ({self.where}) has a text that Python cannot decode: {error}.",
                "leave its table out of tables=; or correct the text.",
            )
        if not isinstance(error, pymysql().err.MySQLError):
            known: BaseException = error
            return known
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
            away: BaseException = error
            return away  # the engine knows those that say that the server is away
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


class Reading(changes.Reading):
    """One call of a source: its set-up, the rest of the snapshot, the changes."""

    _source: Changes

    def __init__(self, source: Changes, position: Position | None, process: Any) -> None:
        super().__init__(source, position, process)
        self._server = Server(source)
        self._wires = Wires(source, self._server)
        self._session: Any = None
        self._reader: Any = None
        """The connection of the snapshot, while it is read."""
        self._facts: Message = {}
        """The fields that all messages of the snapshot have."""
        self._end = ("", 0)
        """The place in the log at which a source that does not follow ends."""
        self._seen: set[int] = set()
        """The descriptions of tables in the log that were checked."""

    # --- set-up ---

    @override
    def _set_up(self) -> bool:
        source = self._source
        self._session = session = self._wires.connect()
        found = self._server.check(session)
        server = "" if self._server.is_mariadb else found.get("server_uuid", "")
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
        self._server.check_log(session, found)
        self._check_tables(session)
        self._end = self._server.end(session)
        return True

    def _check_tables(self, session: Any, only: str | None = None) -> None:
        begins = self._position is None
        takes_snapshot = only is None and (self._in_snapshot or (begins and self._source.snapshot))
        self._server.check_tables(session, only, begins=begins, takes_snapshot=takes_snapshot)

    @override
    def _first(self) -> Position:
        if self._in_snapshot or self._source.snapshot:
            file, place, gtids = self._state["snapshot"]["from"]
            return [VERSION, file, place, 0, gtids]
        return [VERSION, *self._end, 0, self._server.gtids_at(self._session, *self._end)]

    @override
    def _diverged(self, problem: str) -> Diverged:
        return Diverged(
            f"The server ({self._source.where}) {problem}.",
            "give the source another id, which begins with a snapshot.",
        )

    # --- the snapshot ---

    @override
    def _snapshot(self) -> Iterator[tuple[Position, Any]]:
        timeout_s, server, state = _SORT_TIMES * self._source.timeout_s, self._server, self._state
        self._reader = session = self._wires.connect(cursorclass=_streaming(), read_timeout=timeout_s)
        run(session, "set session transaction isolation level repeatable read")
        file, place = self._began(session)
        gtids = server.gtids_at(session, file, place)
        if self._position is None:
            state["tables"] = [list(table) for table in server.keyed(session)]
            state["snapshot"] = {"from": [file, place, gtids], "segments": []}
        kept = state["snapshot"]
        self._tables = [Snapped(*each) for each in state["tables"]]
        if self._position is not None:
            known_file, known_place, known_gtids = kept["from"]
            if not same(server.gtids_at(session, known_file, known_place), known_gtids):
                raise self._diverged("is another one than that whose snapshot was begun")
            there = {table.name: table for table in server.keyed(session)}
            if any(there.get(table.name) != table for table in self._tables[self._after[0] :]):
                raise self._diverged("has another key, or lacks a table, since the snapshot began")
        state["snapshot"] = {"from": kept["from"], "segments": self._parts([file, place])}
        self._facts = {"log": f"{file}:{place}", "number": None, "gtid": None, "time": datetime.now(UTC)}
        yield from self._rest()
        if not waits.stops(self._process):
            self._reader = None
            session.close()

    def _began(self, session: Any) -> tuple[str, int]:
        """Begin a transaction in which each table of the source can be read; return its place in the log."""
        for is_last in (False,) * _ATTEMPTS + (True,):
            if self._server.is_mariadb:
                run(session, "start transaction with consistent snapshot")
                at = dict(ask(session, "show status like 'binlog_snapshot_%'"))
                file, place = at["Binlog_snapshot_file"], int(at["Binlog_snapshot_position"])
            else:
                run(session, "flush tables with read lock")
                run(session, "start transaction with consistent snapshot")
                file, place = self._server.end(session)
                run(session, "unlock tables")
            self._server.columns.clear()  # a table may have been made since the start
            self._check_tables(session)
            try:
                for table in self._server.columns:
                    ask(session, f"select 1 from {quoted_table(table)} limit 1")
                break
            except pymysql().err.MySQLError as error:
                if error.args[0] != 1412 or is_last:  # made or altered after the transaction began
                    raise
        return file, place

    @override
    def _rows(self, at: int, after: list[Any] | None) -> Iterator[tuple[Position, Any]]:
        table = self._tables[at]
        for page in self._server.pages(self._reader, table, after, _SORT_TIMES * self._source.timeout_s):
            if waits.stops(self._process):
                return
            for row, key in page:
                self._position = [VERSION, at, key, 0, ""]
                of = {name: row[name] for name, _ in table.key}
                yield self._position, changes.message("snapshot", table.name, of, row, **self._facts)

    # --- the changes ---

    def _stream(self, session: Any, file: str, place: int, gtids: str) -> Any:
        """Return a connection that streams the log after a position."""
        source = self._source
        by_gtid = False
        if self._server.is_mariadb and not same(self._server.gtids_at(session, file, place), gtids):
            if not gtids or self._segments:
                raise self._diverged(f"does not have the place {file}:{place} of its log, or has other changes there")
            by_gtid = True
        elif (sizes := dict(row[:2] for row in ask(session, "show binary logs"))) and int(sizes.get(file, 0)) < place:
            raise self._diverged(f"does not have the place {file}:{place} of its log any more")
        if by_gtid:
            _log.info("%s: another server; it is asked for what follows %s.", source.where, gtids)
            return self._wires.dump("", 4, source.server_id, gtids)
        return self._wires.dump(file, place, source.server_id)

    def _ahead(self, session: Any, file: str, place: int) -> Packets:
        """Yield the events after a place until the source stops, on a connection of their own."""
        wire = self._wires.dump(file, place)
        try:
            for each in self._wires.packets(wire, None, session):
                if waits.stops(self._process):
                    return
                yield each
        finally:
            self._wires.drop(wire)

    @override
    def _changes(self, position: Position) -> Iterator[tuple[Position, Any]]:
        source, process, session, wires = self._source, self._process, self._session, self._wires
        _, file, place, skipped, gtids, *opened = told = position
        end = place_of(*self._end)
        if self._segments:
            self._tables = [Snapped(*each) for each in self._state["tables"]]
        until = max((segment.view for segment in self._segments), default=(0, 0))
        self._forget_snapshot(place_of(file, place) >= until)
        wire = self._stream(session, file, place, gtids)
        decoder = Decoder(self._server.charsets(session), is_mariadb=self._server.is_mariadb)
        wires.file, wires.gtids = file, gtids
        events = wires.packets(wire, source.server_id, session)
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
                wires.file = file
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
                            held = _dated(message, file, begin, count, gtid, header)
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
                    for part, message in self._row_messages(operation, table, before, after, place_of(file, begin)):
                        at = count - 1 + part
                        if at <= skipped:
                            continue
                        if held is not None:
                            yield [VERSION, file, begin, held["number"], wires.gtids, gtid], held
                        held = _dated(message, file, begin, at, gtid, header)
            elif kind in (mysql_binlog.XID, mysql_binlog.PREPARE):
                done = True
            elif kind in mysql_binlog.REFUSED:
                raise CuesError(
                    f"The log of {source.where} has {mysql_binlog.REFUSED[kind]}.",
                    "mend it at the server, then give the source another id, which begins anew.",
                )
            if done:
                if gtid is not None:
                    wires.gtids = _advanced(wires.gtids, gtid)
                begin, skipped, gtid, inside, single, count = header.end, 0, None, False, False, 0
                is_prepared = False
                if held is not None:
                    moved = time.monotonic()
                    yield (told := [VERSION, file, begin, 0, wires.gtids]), held
                    held = None
                self._forget_snapshot(place_of(file, begin) >= until)
            if waits.stops(self._process):
                return
            if not inside:
                if kind != mysql_binlog.ROTATE and header.end > begin:
                    begin = header.end
                if time.monotonic() - moved >= TELL_S:
                    moved = time.monotonic()
                    yield (told := [VERSION, file, begin, 0, wires.gtids]), None
                if place_of(file, begin) >= end:
                    if not source.follow:
                        if told != (last := [VERSION, file, begin, 0, wires.gtids]):
                            yield last, None
                        return
                    if kind == mysql_binlog.HEARTBEAT:
                        waits.answered(process)

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
        self._server.columns.pop(table.name, None)
        self._check_tables(session, table.name)
        now = self._server.columns.get(table.name, {})
        for name in sorted(table.fixed) if self._server.is_mariadb else ():
            if now.get(name) != "binary":
                raise refused(table.name, name, "BINARY, UUID or INET, and is no BINARY column now")
        self._seen.add(id(table))

    def _statement(self, schema: str, text: str, begin: int, in_rows: bool) -> Iterator[Message]:
        """Yield the message of a truncate. Raises for a change that was logged as a statement.

        ``in_rows``: the statement is in a transaction, in which each change must be rows.
        """
        statement = mysql_statements.plain(text)
        table = mysql_statements.truncated(statement, schema)
        if table is not None:
            at = self._place_of(table)
            moment = place_of(self._wires.file, begin)
            if self._source.takes_table(table) and (at is None or self._is_new_truncate(at, moment)):
                yield changes.message("truncate", table, {}, None)
        elif mysql_statements.has_no_rows(statement, in_rows=in_rows):
            raise CuesError(
                f"The log of {self._source.where} has a statement in the place of rows: {statement.strip()[:60]!r}.",
                "set binlog_format = ROW for all sessions; give the source another id, which begins anew.",
            )

    def _row_messages(
        self, operation: str, table: Table, before: list[Any] | None, after: list[Any] | None, begin: Place
    ) -> Iterator[tuple[int, Message]]:
        names = table.names
        old, new = (None if row is None else dict(zip(names, row)) for row in (before, after))
        keys = [None if row is None else {name: row[name] for name in table.key} for row in (old, new)]
        moved = operation == "update" and keys[0] != keys[1]
        if (operation == "delete" or moved) and self._is_new_row(table, keys[0], begin):
            yield 0, changes.message("delete", table.name, keys[0] or {}, None, old)
        if operation != "delete" and self._is_new_row(table, keys[1], begin):
            kind = "insert" if operation == "insert" or moved else "update"
            yield 1, changes.message(kind, table.name, keys[1] or {}, new, None if moved else old)

    def _is_new_row(self, table: Table, key: Any, begin: Place) -> bool:
        at = self._place_of(table.name) if self._segments else None
        if at is None:
            return True
        values = [_comparable(key.get(name)) for name, _ in self._tables[at].key]
        for segment in self._segments:
            if (
                segment.table == at
                and segment.key is not None
                and list(map(type, values)) != list(map(type, segment.key))
            ):
                raise self._diverged(f"has another key of {table.name} since the snapshot began")
        return self._is_new(at, values, begin)

    @override
    def _ordered(self, at: int, key: list[Any]) -> list[Any]:
        return key

    @override
    def _view(self, kept: list[Any]) -> Place:
        return place_of(*kept)

    @override
    def _sees(self, view: Place, moment: Place) -> bool:
        return bool(view > moment)

    # --- other threads ---

    @override
    def interrupt(self) -> None:
        """End the query of the snapshot."""
        reader = self._reader
        if reader is None:
            return
        try:
            with self._source.connect() as other:
                run(other, f"kill query {reader.thread_id()}")
        except pymysql().err.MySQLError:
            pass  # it has ended

    @override
    def close(self) -> None:
        self._wires.close()


def _dated(message: Message, file: str, begin: int, number: int, gtid: str | None, header: Header) -> Message:
    """Return a message with the fields of its transaction."""
    clock = datetime.fromtimestamp(header.time, UTC)
    return {**message, "log": f"{file}:{begin}", "number": number, "gtid": gtid, "time": clock}


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
