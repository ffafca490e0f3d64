"""A source of the changes of PostgreSQL tables: their rows first, then each insert, update, delete and truncate.

    graph.add(cues.Source("changes", Changes("postgresql://…/shop", ["orders", "customers"], slot="shop", follow=True)))

It is logical replication with the plugin pgoutput: the server needs ``wal_level=logical``. The source makes a
publication and a replication slot unless they exist. A message is

    operation    "snapshot" (a row that was there), "insert", "update", "delete" or "truncate"
    table        "schema.table"
    key          the key of the row: by default the primary key, otherwise the index of the replica identity; {} if none
    row          the row after the change; None for a delete
    before       the row before the change, with REPLICA IDENTITY FULL; otherwise None
    unchanged    columns that ``row`` does not have: large values that an update did not change, which PostgreSQL does
                 not send. With REPLICA IDENTITY FULL there are none
    lsn, number  the LSN of the commit, such as "0/16B3748", and the number of the message in its transaction
    transaction  the id of the transaction; None for a snapshot
    time         the time of the commit; for a snapshot the time at which it began

An update that changes the key is a delete of the old key and an insert of the new one. Values are those of
:mod:`cues.processors.pgoutput`.

**The snapshot.** The rows are read table by table, in the order of the key, in one transaction (repeatable read). The
state of the source keeps which transactions that snapshot sees (``pg_current_snapshot``). A start after a crash reads
the rows after the last key in a snapshot of its own, and adds it to the state:

    rows up to the key 4711     seen by the snapshot 755:790:760,771
    all rows after it           seen by the snapshot 812:812:

Then come the changes since the slot was made. A change is left out if the snapshot that read the place of its key has
seen its transaction. So each row is a message once, and the rows and changes of a key follow each other without a hole,
also if the snapshot was interrupted. (The same as the watermarks of DBLog, Netflix 2019, without writes to the server.)

**The changes** come in the order of the commits. The position is ``[version, LSN of the commit, number]`` within a
transaction, and ``[version, LSN, 0]`` after one. The engine commits it with the messages. The slot is moved to the
position after that commit, so the server keeps all that is not on the queue. If nothing changes in the tables, the
source moves its position and the slot every ten seconds, so that the server can remove the log of other tables.

**The disk of the server.** The server keeps the log from the slot on while the source is stopped, its queue is full, or
a snapshot is read. A warning in the log says when this is more than ``warn_bytes``, or when the server is about to
give the slot up (``max_slot_wal_keep_size``). A slot that was given up, or is missing, stops the source (Diverged).

**Not guaranteed.** A second reader must not use the slot. Changes of sequences and of the structure of tables are no
messages; a new column is in the rows from its first change on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import Any, Final

from cues.arguments import check_number, text_of
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, changes, databases, pgoutput, takes, waits
from cues.processors.changes import TELL_S, VERSION, Message, Position
from cues.processors.pgoutput import UNCHANGED, Begin, Change, Commit, Decoder, Field, Relation, lsn_of, lsn_text
from cues.processors.postgres_tables import (
    Table,
    View,
    bound,
    comparable,
    from_clause,
    ordered,
    quoted,
    slot_of,
    table_of,
    view_of,
)  # fmt: skip
from cues.processors.postgres_wire import Wire, ask

_OLDEST_SERVER: Final = 140000
_LSN: Final = struct.Struct(">Q")
_SETTINGS: Final = (
    "set timezone = 'UTC'; set datestyle = 'ISO, MDY'; set intervalstyle = 'postgres'; set extra_float_digits = 1;"
    " set bytea_output = 'hex'; set row_security = off"
)
"""Of all connections: a value has one text; a policy that would hide rows of a snapshot is an error."""
_ALIVE: Final = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""Of all connections: a host that vanishes ends a query."""
_ENDLESS: Final = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout", "lock_timeout")

_log = logging.getLogger("cues.processors")


@takes(SOURCE)
class Changes(changes.Changes):
    """A source of the changes of tables; see the module. Give it to ``cues.Source(id, Changes(...))``.

    ``url``          ``"postgresql://user@host/database"``, as libpq takes it; ``postgresql+psycopg://`` is the same
    ``tables``       names of tables; ``schema.table``
    ``slot``         the replication slot, of this source alone. A slot that exists is taken
    ``publication``  the publication; None: named as the slot. It is made if it is missing
    ``snapshot``     True: the rows that are there come first; False: only changes, from the slot on. A snapshot that
                     has begun is read to its end
    ``follow``       True: wait for new changes; otherwise the source ends with what the server has at the start
    ``warn_bytes``   the log that the server keeps for the slot, above which a warning is logged
    ``timeout_s``    seconds after which a connection, or a server that is silent, counts as away

    Kind: source
    Needs: extra `sql`
    Guarantee: exactly once: each row of the snapshot and each change is on the queue once, also after kill -9
    Mechanism: position of the LSN and the number in the transaction, committed with the messages; the slot is moved after the commit
    """  # noqa: E501

    _NAME = "PostgreSQL"
    _URL = (r"(postgresql(\+psycopg)?|postgres)://", "postgresql://user@host/database")

    def __init__(
        self,
        url: str,
        tables: str | Sequence[str],
        *,
        slot: str = "cues",
        publication: str | None = None,
        snapshot: bool = True,
        follow: bool = False,
        warn_bytes: int = 1 << 30,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(url, tables, snapshot=snapshot, follow=follow, timeout_s=timeout_s)
        self.slot = text_of("slot", slot)
        self.publication = slot if publication is None else text_of("publication", publication)
        self.warn_bytes = warn_bytes
        if not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
            raise InvalidArgument(
                f"slot={slot!r:.80} is not a name of a slot.", "use up to 63 small letters, digits and _."
            )
        for table in self.tables:
            databases.quoted_table(table)
        databases.quoted(self.publication)
        check_number("warn_bytes", warn_bytes, 1, whole=True)
        try:
            found = pgoutput.psycopg().conninfo.conninfo_to_dict(url.replace("postgresql+psycopg:", "postgresql:"))
        except pgoutput.psycopg().Error:
            raise InvalidArgument(
                "url= cannot be read by libpq.", "give 'postgresql://user@host/database', with %-escapes."
            ) from None
        self.options = {"connect_timeout": max(2, round(timeout_s)), **_ALIVE, **found, "client_encoding": "utf8"}
        self.where = f"{found.get('dbname', '')} at {found.get('host', 'localhost')}, slot {slot}"

    @override
    def _is_place(self, place: list[Any]) -> bool:
        match place:
            case [int(), int() | list()]:
                return True
        return False

    @override
    def _new_reading(self, position: Position | None, process: Any) -> Reading:
        return Reading(self, position, process)

    def committed(self, position: Position) -> None:
        """Move the slot to what is committed; the engine calls it after each commit."""
        if self._reading is not None and not isinstance(position[2], list):
            self._reading.committed(position[1])

    @override
    def failed(self, error: Any) -> BaseException:
        if not isinstance(error, pgoutput.psycopg().Error) or isinstance(error, pgoutput.psycopg().OperationalError):
            known: BaseException = error
            return known  # the engine knows those that say that the server is away
        told = ". ".join(filter(None, [error.diag.message_primary, error.diag.message_detail])) or str(error).strip()
        text = f"PostgreSQL refused ({self.where}): {told.rstrip('.')}."
        hint = "correct what the server names, then start again."
        if error.sqlstate == "42501":
            hint = "give the user LOGIN, REPLICATION and SELECT on the tables, and BYPASSRLS if they have row-level"
            hint += f" security; an owner of the tables can make the publication: {self.publication_sql()}"
        elif error.sqlstate == "42704":
            hint = "drop the slot, and give the source another id: a publication must be older than its slot."
        return CuesError(text, hint)

    def publication_sql(self) -> str:
        """Return the statement that makes the publication."""
        listed = ", ".join(map(databases.quoted_table, self.tables))
        name = databases.quoted(self.publication)
        return f"create publication {name} for table {listed} with (publish_via_partition_root = true)"

    def connect(self, **options: Any) -> Any:
        """Return a connection with the settings under which each value has one text."""
        connection = pgoutput.psycopg().connect(**self.options, **options, autocommit=True)
        try:
            ask(connection, _SETTINGS)
        except BaseException:
            connection.close()
            raise
        return connection


class Reading(changes.Reading):
    """One call of a source: its set-up, the rest of the snapshot, the changes."""

    _source: Changes

    def __init__(self, source: Changes, position: Position | None, process: Any) -> None:
        super().__init__(source, position, process)
        self._session: Any = None
        self._confirmed = 0
        """The LSN of the slot."""
        self._wire: Wire | None = None
        self._facts: Message = {}
        """The fields that all messages of a transaction, or of a snapshot, have."""
        self._relations: dict[int, tuple[Relation | None, int | None, list[int]]] = {}
        """The place and the key of each relation, as long as it is described so."""

    # --- set-up ---

    @override
    def _set_up(self) -> bool:
        source = self._source
        self._session = session = source.connect()
        for name in _ENDLESS:
            session.execute("select set_config(name, '0', false) from pg_settings where name = %s", [name])
        level, is_standby = session.execute("select current_setting('wal_level'), pg_is_in_recovery()").fetchone()
        if session.info.server_version < _OLDEST_SERVER:
            raise CuesError(
                f"The server ({source.where}) is PostgreSQL {session.info.server_version // 10_000}; expected 14 or"
                " later.",
                "use a newer server.",
            )
        if is_standby:
            raise Away(
                f"The server ({source.where}) is a standby; expected the primary.", "give its URL.", what="primary"
            )
        if level != "logical":
            raise CuesError(
                f"The server ({source.where}) has wal_level={level}; expected logical.",
                "run `alter system set wal_level = logical`, and start the server again.",
            )
        found = {table.oid: table for table in (table_of(session, name) for name in source.tables)}
        self._tables = list(found.values())  # one table may have two names: orders, public.orders
        self._check_publication(session)
        with contextlib.closing(source.connect(replication="database")) as replication:
            system, timeline = ask(replication, "IDENTIFY_SYSTEM")[0][:2]
            self._check_system(system, int(timeline), replication)
        confirmed = self._check_slot(session)
        if confirmed is None:
            return False
        if source.snapshot or "snapshot" in self._state:
            self._check_tables()
        self._confirmed = confirmed
        return True

    @override
    def _first(self) -> Position:
        return [VERSION, self._confirmed, 0]

    def _check_publication(self, session: Any) -> None:
        source = self._source
        name = source.publication
        if not session.execute("select 1 from pg_publication where pubname = %s", [name]).fetchone():
            if slot_of(session, source.slot) is not None:  # PostgreSQL 18 would leave out what is between the two
                raise self._diverged(
                    f"has the slot {source.slot}, but no publication {name}: it was dropped, or never made; a"
                    " publication must be older than its slot"
                )
            try:
                session.execute(source.publication_sql())
            except pgoutput.psycopg().errors.DuplicateObject:
                pass  # another process was faster
        found = session.execute(
            "select pubinsert, pubupdate, pubdelete, pubtruncate from pg_publication where pubname = %s", [name]
        ).fetchone()
        if not all(found):
            _log.warning("%s: the publication %s does not have all operations.", source.where, name)
        listed = {
            row[0]
            for row in session.execute(
                "select schemaname || '.' || tablename from pg_publication_tables where pubname = %s", [name]
            )
        }
        for table in self._tables:
            if table.name not in listed:
                raise CuesError(
                    f"The publication {name} does not have the table {table.name}; it has"
                    f" {', '.join(sorted(listed)) or 'none'}.",
                    f"run `alter publication {databases.quoted(name)} add table {quoted(table.name)}`.",
                )
            if (found[1] or found[2]) and (table.identity == "n" or (table.identity != "f" and not table.key)):
                raise CuesError(
                    f"The table {table.name} has no replica identity: PostgreSQL would refuse its updates and deletes.",
                    f"add a primary key; or run `alter table {quoted(table.name)} replica identity full`.",
                )

    def _check_system(self, system: str, timeline: int, replication: Any) -> None:
        """Raise :class:`Diverged` for another server, and for one that has lost what was read."""
        known = self._state.get("server")
        if known is not None and known[0] != system:
            raise self._diverged(f"is of the system {system}; the position is of the system {known[0]}")
        if known is None or known[1] != timeline:
            if known is not None and self._position is not None and not self._in_snapshot:
                history = ask(replication, f"TIMELINE_HISTORY {timeline}")[0][1]
                for line in re.findall(r"^(\d+)\s+([0-9A-F]+/[0-9A-F]+)", history, re.M):
                    if int(line[0]) == known[1] and lsn_of(line[1]) < self._position[1]:
                        raise self._diverged(
                            f"was promoted at {line[1]}, before the position {lsn_text(self._position[1])}: it lacks"
                            " changes that were read"
                        )
            self._state["server"] = [system, timeline]

    def _check_slot(self, session: Any) -> int | None:
        """Make the slot if this is the first start; return its LSN, or None if the source ends before."""
        source, position = self._source, self._position
        slot = slot_of(session, source.slot)
        if slot is None:
            if position is not None:
                raise self._diverged(f"has no slot {source.slot}: it was dropped, or a standby was promoted without it")
            if not self._wait_for_others(session):  # as the next statement does, without a word
                return None
            session.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [source.slot])
            slot = slot_of(session, source.slot)
            assert slot is not None
        database = session.execute("select current_database()").fetchone()[0]
        if (slot["plugin"], slot["database"]) != ("pgoutput", database):
            raise CuesError(
                f"The slot {source.slot} is of the plugin {slot['plugin']} and the database {slot['database']};"
                f" expected pgoutput and {database}.",
                "give the source a slot of its own: slot=.",
            )
        if slot["wal_status"] == "lost":
            raise self._diverged(
                f"gave the slot {source.slot} up (wal_status=lost): changes that were not read are gone. The limit is"
                " max_slot_wal_keep_size, now"
                f" {session.execute('show max_slot_wal_keep_size').fetchone()[0]}"
            )
        confirmed = lsn_of(slot["confirmed"])
        read = confirmed
        if position is not None:  # a snapshot does not move the slot
            read = self._state["snapshot"].get("from", confirmed) if self._in_snapshot else position[1]
        if confirmed > read:
            raise self._diverged(
                f"has the slot {source.slot} at {slot['confirmed']}, after the position {lsn_text(read)}:"
                " another reader moved it, or the store is an older copy"
            )
        if position is not None and not self._in_snapshot:
            end = session.execute("select pg_current_wal_insert_lsn()::text").fetchone()[0]
            if lsn_of(end) < position[1]:
                raise self._diverged(f"ends at {end}, before the position {lsn_text(position[1])}")
        self._warn(slot)
        return confirmed

    def _check_tables(self) -> None:
        """Keep the tables of the snapshot in the state, or put ``self._tables`` into the order of the state."""
        found = [[table.name, [f"{name} {type}" for name, type, _ in table.key]] for table in self._tables]
        for table in self._tables:
            if not table.key:
                raise CuesError(
                    f"The table {table.name} has no primary key, by which a snapshot is read.",
                    "add one; or give snapshot=False.",
                )
        known = self._state.get("tables")
        if known is None:
            if self._position is not None:
                return  # it began with snapshot=False
            self._state["tables"] = known = found
        new = [table.name for table in self._tables if table.name not in [name for name, _ in known]]
        if new:
            raise Diverged(
                f"tables= has {', '.join(new)}, which the snapshot of this source did not have.",
                "give a second source, with a slot of its own, for it; or give this one another id, which begins anew.",
            )
        parts = self._state.get("snapshot", {"segments": []})["segments"]
        in_snapshot = self._position is None or self._in_snapshot or len(parts) > 1
        if in_snapshot and any(table not in known for table in found):
            raise self._diverged("has another primary key since the snapshot began")
        by_name = {table.name: table for table in self._tables}
        gone = Table(0, "", "d", "", [])
        self._tables = [by_name.get(name, gone) for name, _ in known]

    @override
    def _diverged(self, problem: str) -> Diverged:
        source = self._source
        return Diverged(
            f"The server ({source.where}) {problem}.",
            f"begin anew: drop the slot (`select pg_drop_replication_slot('{source.slot}')`) if it exists, and give the"
            " source another id, which begins with a snapshot.",
        )

    def _warn(self, slot: dict[str, Any]) -> None:
        kept = int(slot["kept"] or 0)
        if kept > self._source.warn_bytes or slot["wal_status"] == "unreserved":
            _log.warning(
                "%s: the server keeps %.1f MiB of its log for the slot (wal_status=%s, safe_wal_size=%s). Let the"
                " source run, or drop the slot.",
                self._source.where, kept / (1 << 20), slot["wal_status"], slot["safe"],
            )  # fmt: skip

    def _look(self) -> None:
        """Warn if the server keeps much for the slot."""
        with contextlib.suppress(pgoutput.psycopg().Error), contextlib.closing(self._source.connect()) as session:
            slot = slot_of(session, self._source.slot)
            if slot is not None:
                self._warn(slot)

    # --- the snapshot ---

    @override
    def _snapshot(self) -> Iterator[tuple[Position, Any]]:
        session = self._session
        if not self._wait_for_others(session):
            return
        with session.transaction():
            session.execute("set transaction isolation level repeatable read, read only")
            there = [table for table in self._tables if table.oid]
            session.execute(f"lock table {', '.join(from_clause(table) for table in there)} in access share mode")
            sees, lsn, clock = session.execute(
                "select pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, now()"
            ).fetchone()
            self._state["snapshot"] = {
                "segments": self._parts(sees),
                "until": lsn_of(lsn),
                "from": self._confirmed,
            }
            if self._position is None and not there:
                return
            self._facts = {"lsn": lsn, "number": None, "transaction": None, "time": clock.astimezone(UTC)}
            yield from self._rest()

    def _wait_for_others(self, session: Any) -> bool:
        """Wait for the transactions that run now, as the making of a slot does: one may have a commit before the slot.

        Such a transaction would be in no change, and a snapshot might not see it yet.
        """
        (end,) = session.execute("select pg_current_xact_id()::text::bigint").fetchone()  # above all that run
        began = time.monotonic()
        while True:
            (first,) = session.execute("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchone()
            if first >= end:
                return True
            if time.monotonic() - began > TELL_S:
                began = time.monotonic()
                _log.warning("%s: the start waits for the end of transaction %d.", self._source.where, first)
            if not waits.wait(self._process, waits.LOOK_S, new=False):
                return False

    @override
    def _rows(self, at: int, after: list[Any] | None) -> Iterator[tuple[Position, Any]]:
        session, table = self._session, self._tables[at]
        if not table.oid:
            return
        values = pgoutput.Values(session)
        names, condition = self._published(session, table)
        order = [ordered(name, kind) for name, _, kind in table.key]
        conditions = [f"({condition})"] if condition else []
        if after is not None:
            last = [bound(text, type, kind) for text, (_, type, kind) in zip(after, table.key)]
            conditions.append(f"({', '.join(order)}) > ({', '.join(last)})")
        listed = ", ".join(map(databases.quoted, names))
        where = f" where {' and '.join(conditions)}" if conditions else ""
        query = f"select {listed} from {from_clause(table)}{where} order by {', '.join(order)}"
        ask(session, f"declare cues_rows no scroll cursor for {query}")
        key = [names.index(name) for name, _, _ in table.key]
        while not waits.stops(self._process):
            page = ask(session, f"fetch {changes.PAGE_ROWS} from cues_rows", raw=True)
            readers = [values.reader(page.ftype(n)) for n in range(page.nfields)]
            for number in range(page.ntuples):
                texts = [page.get_value(number, column) for column in range(page.nfields)]
                row = {name: None if text is None else read(text) for name, text, read in zip(names, texts, readers)}
                self._position = [VERSION, at, [texts[n].decode() for n in key]]
                of = {names[n]: row[names[n]] for n in key}
                yield self._position, changes.message("snapshot", table.name, of, row, unchanged=[], **self._facts)
            if page.ntuples < changes.PAGE_ROWS:
                break
        ask(session, "close cues_rows")

    def _published(self, session: Any, table: Table) -> tuple[list[str], str | None]:
        """Return the columns and the condition of a table in its publication."""
        described = session.execute(
            "select to_jsonb(p) from pg_publication_tables p where pubname = %s"
            " and schemaname || '.' || tablename = %s",
            [self._source.publication, table.name],
        ).fetchone()
        found = described[0] if described else {}
        columns = session.execute(
            "select attname, attgenerated::text <> '' from pg_attribute where attrelid = %s and attnum > 0 and not"
            " attisdropped order by attnum",
            [table.oid],
        ).fetchall()
        listed = found.get("attnames")  # PostgreSQL 14 has none
        names = [name for name, is_generated in columns if (name in listed if listed else not is_generated)]
        missing = [name for name, _, _ in table.key if name not in names]
        if missing:
            raise CuesError(
                f"The publication {self._source.publication} does not have the columns {', '.join(missing)} of the key"
                f" of {table.name}, by which a snapshot is read.",
                "add them to the publication; or give snapshot=False.",
            )
        return names, found.get("rowfilter")

    # --- the changes ---

    @override
    def _changes(self, position: Position) -> Iterator[tuple[Position, Any]]:
        source, process = self._source, self._process
        (text,) = self._session.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        end = lsn_of(text)  # where a source that does not follow ends
        self._session.close()
        _, lsn, number = position
        until = self._state["snapshot"]["until"] if self._segments else 0
        self._wire = wire = Wire(source, lsn, self._stops, self._look)
        decoder = Decoder(pgoutput.Values(wire.connection))
        begin: Begin | None = None
        held: tuple[int, Any] | None = None
        reached, moved, count, skipped = lsn, time.monotonic(), 0, 0
        is_asked = False
        while not waits.stops(self._process):
            for data in wire.received():
                if data[:1] == b"k":
                    (sent,) = _LSN.unpack_from(data, 1)
                    if data[17]:
                        is_asked = True
                        wire.answer()
                    if begin is None:
                        reached = max(reached, sent)
                    continue
                event = decoder.decode(data[25:])
                if type(event) is Begin:
                    begin, count, held = event, 0, None
                    self._facts = {
                        "lsn": lsn_text(begin.lsn), "number": 0, "transaction": begin.transaction, "time": begin.time,
                    }  # fmt: skip
                    skipped = number if begin.lsn == lsn else 0 if begin.lsn > lsn else 1 << 62
                    self._forget_snapshot(begin.lsn >= until)
                elif type(event) is Change:
                    assert begin is not None
                    for message in self._messages_of(event, decoder, begin):
                        count += 1
                        if message is None or count <= skipped:
                            continue
                        if held is not None:
                            yield [VERSION, begin.lsn, held[0]], held[1]
                        message["number"] = count
                        held = count, message
                elif type(event) is Commit:
                    reached = max(reached, event.end)
                    if held is not None:
                        lsn, number, moved = event.end, 0, time.monotonic()
                        yield [VERSION, lsn, 0], held[1]
                        held = None
                    begin = None
            if begin is None and reached > lsn and (is_asked or time.monotonic() - moved >= TELL_S):
                lsn, number, moved, is_asked = reached, 0, time.monotonic(), False
                yield [VERSION, lsn, 0], None
            if begin is None and wire.is_quiet:
                if reached >= end:
                    if not source.follow:
                        if reached > lsn:
                            lsn = reached
                            yield [VERSION, lsn, 0], None
                        break
                    waits.answered(process)
                wire.ask(at_once=reached < end)
        self._position = [VERSION, lsn, 0]

    def _stops(self) -> bool:
        return not waits.wait(self._process, waits.LOOK_S, new=False)

    def _messages_of(self, change: Change, decoder: Decoder, begin: Begin) -> Iterator[Message | None]:
        """Yield the messages of a change; None for one that is not of this source, or that the snapshot has."""
        for id in change.relations:
            relation = decoder.relations[id]
            place, key = self._known(relation)
            if place is None:
                yield None
                if change.kind == "U" and change.old is not None:
                    yield None
                continue
            if change.kind == "T":
                is_new = self._is_new_truncate(place, begin.transaction)
                facts = {"unchanged": [], **self._facts}
                yield changes.message("truncate", relation.table, {}, None, **facts) if is_new else None
                continue
            yield from self._row_messages(change, relation, place, key, begin)

    def _row_messages(
        self, change: Change, relation: Relation, place: int, key: list[int], begin: Begin
    ) -> Iterator[Message | None]:
        old, filled = change.old, change.new
        if filled is not None and old is not None:
            known = range(len(old)) if change.old_is_whole else key
            filled = [old[n] if field is UNCHANGED and n in known else field for n, field in enumerate(filled)]
        before = None if old is None or not change.old_is_whole else _row(relation, old)[0]
        changed = old is not None and filled is not None and any(old[n] != filled[n] for n in key)
        gone: Message | None = None
        added: Message | None = None
        if old is not None and (filled is None or changed) and self._is_new_row(place, key, old, begin):
            part = _part(relation, key, old)
            gone = changes.message("delete", relation.table, part, None, before, unchanged=[], **self._facts)
        if filled is not None and self._is_new_row(place, key, filled, begin):
            row, unchanged = _row(relation, filled)
            added = changes.message(
                "insert" if change.kind == "I" or changed else "update", relation.table, _part(relation, key, filled),
                row, None if changed else before, unchanged=unchanged, **self._facts,
            )  # fmt: skip
        if change.kind == "D" or (change.kind == "U" and old is not None):
            yield gone  # the number of messages of a change depends only on the change
        if filled is not None:
            yield added

    def _known(self, relation: Relation) -> tuple[int | None, list[int]]:
        """Return the place of a table, None if it is not one of the source, and those of the columns of its key."""
        of, place, key = self._relations.get(relation.id, (None, None, []))
        if of is not relation:
            place = next(
                (
                    at
                    for at, table in enumerate(self._tables)
                    if relation.id == table.oid or relation.table == table.name
                ),
                None,
            )
            if place is not None:
                table = self._tables[place]
                names = [column.name for column in relation.columns]
                sent = [at for at, column in enumerate(relation.columns) if column.in_identity]
                key = [names.index(name) for name, _, _ in table.key if name in names]
                if len(key) < len(table.key) or (relation.identity != "f" and sorted(key) != sent):
                    key = [] if relation.identity == "f" else sent  # it has had another key since
            self._relations[relation.id] = relation, place, key
        return place, key

    def _is_new_row(self, place: int, key: list[int], fields: list[Field], begin: Begin) -> bool:
        if not self._segments:
            return True
        texts = [field.decode() if isinstance(field, bytes) else "" for field in (fields[n] for n in key)]
        return self._is_new(place, self._ordered(place, texts), begin.transaction)

    @override
    def _ordered(self, at: int, key: list[Any]) -> list[Any]:
        return comparable(key, self._tables[at])

    @override
    def _view(self, kept: str) -> View:
        return view_of(kept)

    @override
    def _sees(self, view: View, moment: int) -> bool:
        return view.sees(moment)

    # --- other threads ---

    def committed(self, lsn: int) -> None:
        """Have the slot moved."""
        if self._wire is not None:
            self._wire.confirm(lsn)

    @override
    def interrupt(self) -> None:
        if self._session is not None and not self._session.closed:
            with contextlib.suppress(Exception):
                self._session.cancel()

    @override
    def end(self) -> None:
        """Close the connection when all is committed, or after some seconds."""
        self._session.close()
        if self._wire is not None:
            self._wire.end(self._position[1] if self._position else 0)

    @override
    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._wire is not None:
            self._wire.close()


def _row(relation: Relation, fields: list[Field]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields by name, and the names of those that were not sent."""
    row: dict[str, Any] = {}
    unchanged: list[str] = []
    for (name, _, read), field in zip(relation.columns, fields):
        if field is None:
            row[name] = None
        elif isinstance(field, bytes):
            row[name] = read(field)
        else:
            unchanged.append(name)
    return row, unchanged


def _part(relation: Relation, key: list[int], fields: list[Field]) -> dict[str, Any]:
    """Return the fields of a key."""
    return _row(Relation(0, "", "", [relation.columns[n] for n in key]), [fields[n] for n in key])[0]
