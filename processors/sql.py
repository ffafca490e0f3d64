"""Write to SQLite exactly once: one transaction holds the rows and the position of the sink.

    db = sql.SQLite("flights.db", schema="create table if not exists flights (...)")

    @graph.sink("enriched", batch=True, checkpoint=db)
    def save(flights, process):
        process.connection.executemany("insert into flights values (?, ?)", [row(f) for f in flights])

The sink gets only messages that the database does not have yet, and each call is one transaction. A function that
writes to several databases begins the transactions itself and asks for the new messages:

    @graph.sink("enriched", batch=True, errors=None)
    def save(flights, process):
        with db.transaction(process) as tx:
            tx.executemany("insert into flights values (?, ?)", [row(f) for f in tx.fresh(flights)])

The protocol is in :mod:`cues.checkpoints.deliveries`: the database keeps one row for each processor in the table
``cues_positions``. This module needs only Python's own ``sqlite3``. ``cues.checkpoints.SQLCheckpoint`` does the same
through SQLAlchemy, also for PostgreSQL. Both read the same table, so one can continue a SQLite file of the other.

A failure of the database is not a failure of a message. :class:`cues.errors.CheckpointError` stops the sink at this
message, also with an error queue, and a later start continues there.

Not guaranteed: effects outside the database, and writes of messages that are not from ``tx.fresh``. Do not use
``concurrency=``: a message may be written before an earlier one, which then counts as written too (``checkpoint=``
refuses it). A store that was created again is refused (:class:`cues.errors.Diverged`) until the database is new as
well, because indices of different stores cannot be compared. After a seek back no message is delivered again, unless
the seek asks for it (a higher generation). Then the row starts again, and the user decides which rows of the table to
delete.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import cues
from cues.arguments import check_number, path_of, text_of
from cues.checkpoints import Row, enter_wal, held, make_directory, write_once
from cues.checkpoints import Transaction as TargetTransaction
from cues.overrides import override

TIMEOUT_S: Final = 30.0
"""Seconds for which a transaction waits for another writer of the database before it fails."""

TABLE: Final = """
create table if not exists cues_positions (
    processor text primary key, store text not null, generation integer not null, epoch integer not null,
    ends text not null, hash text not null, seals text
)
"""


class Transaction(TargetTransaction[sqlite3.Connection]):
    """One open transaction of :meth:`SQLite.transaction`. Use it inside the block only."""

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Run one statement, as :meth:`sqlite3.Connection.execute` does."""
        return self.connection.execute(statement, parameters)

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        """Run one statement for each of ``rows``, as :meth:`sqlite3.Connection.executemany` does."""
        return self.connection.executemany(statement, rows)


class SQLite:
    """A SQLite database as the target of sinks.

    ``schema`` runs when the database is first used. It runs at every start, so its statements must be repeatable
    (``create table if not exists``). Nothing is opened before that, because a graph file may be imported only to be
    shown. The database is in WAL mode and can be read while the graph runs. A commit is on the disk when it returns;
    the commit of the store follows it.

    One object may serve any number of sinks and threads; its transactions run one after another.

    Kind: sink
    Needs: nothing
    Guarantee: exactly once: each message is in the database once
    Mechanism: row of delivery, in the transaction of the writes
    """

    def __init__(self, path: str | os.PathLike[str], schema: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path_of("path", path)
        self.schema = text_of("schema", schema)
        check_number("timeout_s", timeout_s, 0)
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection: Any = None
        self._pid = 0

    @override
    def __reduce__(self) -> Any:
        """Pickle the path and the options; another process opens the database itself."""
        return functools.partial(type(self), timeout_s=self.timeout_s), (os.path.abspath(self.path), self.schema)

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction]:
        """Run the block in a transaction with exactly the messages that are new to the database.

        The end of the block writes the processor's row and commits; an exception rolls back. Raises
        :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs (see
        :func:`cues.checkpoints.admit`), and :class:`cues.errors.CheckpointError` when the database fails, for example
        because another writer holds it for too long.
        """
        return write_once(_Positions(self), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors whose rows the database has: it refuses them from another store.

        A missing file is not created. A function that calls :meth:`transaction` itself is not asked: only
        ``checkpoint=`` tells ``cues run --fresh`` which database a sink writes to.
        """
        return held(_Positions(self), processors) if os.path.exists(self.path) else []

    def set_up(self, fn: Callable[[Any], Any]) -> None:
        """Call a function with the connection in a transaction of its own, to create or check tables."""
        with _Positions(self).begin() as connection:
            fn(connection)

    def __cues_prepare__(self) -> None:
        self.set_up(lambda connection: None)

    @property
    def where(self) -> str:
        """The path of the file, for error messages."""
        return self.path

    def close(self) -> None:
        """Close the database. The next transaction opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> Any:
        if self._connection is None or self._pid != os.getpid():  # a connection cannot be used after a fork
            make_directory(self.path)
            connection = self._connect()
            weakref.finalize(self, connection.close)
            self._connection, self._pid = connection, os.getpid()
        return self._connection

    # --- the parts that differ in a database of another kind ---

    _BEGIN = "begin immediate"
    """Begins a transaction that holds the lock of the whole database."""

    def _connect(self) -> Any:
        connection = sqlite3.connect(self.path, timeout=self.timeout_s, isolation_level=None, check_same_thread=False)
        enter_wal(connection, self.timeout_s)
        connection.execute("pragma synchronous = full")
        connection.executescript(TABLE + ";" + self.schema)
        connection.execute("begin immediate")  # one connection at a time may change an older table
        columns = [name for _, name, *_ in connection.execute("pragma table_info(cues_positions)")]
        if "seals" not in columns:
            connection.execute("alter table cues_positions add column seals text")
        connection.execute("commit")
        return connection

    def _failures(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that say that the database failed, not a statement of the user."""
        return (sqlite3.OperationalError,)

    def _asks_to_repeat(self, error: Exception) -> bool:
        """Return whether the database undid the transaction because of another one. Its other errors wait first."""
        busy = (sqlite3.SQLITE_BUSY_RECOVERY, sqlite3.SQLITE_BUSY_SNAPSHOT)
        return getattr(error, "sqlite_errorcode", None) in busy

    def _is_open(self, connection: Any) -> bool:
        return bool(connection.in_transaction)


class _Positions:
    """The table of positions (:class:`cues.checkpoints.PositionTable`) through ``sqlite3``."""

    def __init__(self, database: SQLite) -> None:
        self._database = database
        self.where = database.path

    @contextmanager
    def begin(self) -> Iterator[Any]:
        database = self._database
        with database._lock:
            try:
                connection = database._open()
                connection.execute(database._BEGIN)
                try:
                    yield connection
                    connection.execute("commit")
                except BaseException:
                    if database._is_open(connection):
                        connection.execute("rollback")
                    raise
            except database._failures() as error:
                raise cues.errors.CheckpointError(
                    f"The database {self.where} failed: {error}",
                    "start the graph again when the database can be written. A transaction waits"
                    f" {database.timeout_s:g} s for another writer (timeout_s=). A statement that cannot run"
                    " fails with this error as well.",
                    where=self.where,
                    again=database._asks_to_repeat(error),
                ) from error

    def read(self, connection: Any, processor: str, *, lock: bool) -> Row | None:
        # "begin immediate" holds the lock of the whole database.
        row = connection.execute(
            "select store, generation, epoch, ends, hash, seals from cues_positions where processor = ?", (processor,)
        ).fetchone()
        if row is None:
            return None
        what = f"The row of {processor} in cues_positions at {self.where}"
        return Row.kept(dict(zip(Row._fields, row)), what, "delete it, or use another database.")

    def write(self, connection: Any, processor: str, row: Row, *, insert: bool) -> bool:
        connection.execute(
            "insert or replace into cues_positions (processor, store, generation, epoch, ends, hash, seals)"
            " values (?, ?, ?, ?, ?, ?, ?)",
            [processor, *map(row.columns().__getitem__, ("store", "generation", "epoch", "ends", "hash", "seals"))],
        )
        return True

    def is_open(self, connection: Any) -> bool:
        return self._database._is_open(connection)

    def processors(self, connection: Any) -> Iterable[str]:
        return [processor for (processor,) in connection.execute("select processor from cues_positions").fetchall()]
