"""Write to SQLite exactly once: the rows and the position that they stand for, in one transaction.

    db = sql.SQLite("flights.db", schema="create table if not exists flights (...)")

    @graph.sink("enriched", batch=True, checkpoint=db)
    def save(flights, process):
        process.connection.executemany("insert into flights values (?, ?)", [row(f) for f in flights])

The sink is given what the database does not have yet, and each call is one transaction. A function that
wants more of it, or writes to several databases, begins by itself and asks what is new:

    @graph.sink("enriched", batch=True, errors=None)
    def save(flights, process):
        with db.transaction(process) as tx:
            tx.executemany("insert into flights values (?, ?)", [row(f) for f in tx.fresh(flights)])

A sink is called at least once: a crash after the target's commit and before the store's presents
the same messages again, and an owner that was stopped and woke up presents old ones. So the target
keeps one row for each processor, in the table ``cues_positions``, changed in the same transaction;
:mod:`cues.checkpoints.deliveries` is the whole policy. This module needs nothing but Python's own
``sqlite3``; ``cues.checkpoints.SQLCheckpoint`` does the same through SQLAlchemy, for PostgreSQL as well, and
either goes on where the other left a SQLite file.

What fails in such a sink may be the database and not the message: :class:`cues.CheckpointError` stops
the sink where it stands, whatever error queue it has, and it goes on there later.

Not guaranteed: what the block does outside the database, and what it writes to it without asking
``tx.fresh`` first. Nor anything with ``concurrency=``, where a message may be written before one in front of
it, which then is taken for written as well (``checkpoint=`` refuses it). Indices of one store mean nothing in
another, so a store that was made anew is refused (:class:`cues.Diverged`) until the target is new as well. A
seek backwards delivers nothing again to such a target, unless the seek asks for delivery again (a higher
generation): then the row starts anew, and removing what the table already holds is the user's decision.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import cues
from cues.checkpoints import Fresh, Row, admit

M = TypeVar("M")

TIMEOUT_S: Final = 30.0
"""How long a transaction waits for another writer of the database before it fails."""

_TABLE: Final = """
create table if not exists cues_positions (
    processor text primary key, store text not null, generation integer not null, epoch integer not null,
    ends text not null, hash text not null
)
"""


class Transaction:
    """One open transaction of :meth:`SQLite.transaction`. Use it inside the block only."""

    def __init__(self, connection: sqlite3.Connection, fresh: Fresh) -> None:
        self.connection = connection
        self._fresh = fresh
        self.known = fresh.known
        """How many messages of the delivery, from its start, the database has already."""

    def fresh(self, messages: Sequence[M]) -> list[M]:
        """Return those of ``messages`` that the target does not have yet, in their order.

        ``messages`` is what the function was given: the list of a batch function (a join: each of
        its lists in turn), or ``[message]`` in a message function.
        """
        return self._fresh.of(messages)

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Run one statement, as :meth:`sqlite3.Connection.execute` does."""
        return self.connection.execute(statement, parameters)

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        """Run one statement for each of ``rows``, as :meth:`sqlite3.Connection.executemany` does."""
        return self.connection.executemany(statement, rows)


class SQLite:
    """A SQLite database as the target of sinks.

    ``schema`` is run when the database is first used, so its statements must bear repetition
    (``create table if not exists``). Nothing is opened before that: a graph file may be imported
    only to be shown. The database is in WAL mode, can be read while the graph runs, and a commit is
    on the disk when it returns; the store's own commit comes after it.

    One object may serve any number of sinks and threads; its transactions take turns.
    """

    def __init__(self, path: str | os.PathLike[str], schema: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = os.fspath(path)
        self.schema = schema
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def __reduce__(self) -> Any:
        """What another process makes of it: the same database, opened there."""
        return _again, (os.path.abspath(self.path), self.schema, self.timeout_s)

    @contextmanager
    def transaction(self, process: cues.Process) -> Iterator[Transaction]:
        """Run the block in a transaction that holds exactly what is new to the target.

        Leaving the block writes the processor's row and commits; an exception rolls back. Raises
        :class:`cues.Fenced` or :class:`cues.Diverged` before the block runs (see
        :func:`cues.checkpoints.admit`), and :class:`cues.CheckpointError` when the database fails, as when
        another writer holds it for too long.
        """
        delivery = process.delivery
        with self._lock:
            try:
                connection = self._open()
                connection.execute("begin immediate")  # 1
                try:
                    row = _read(connection, process.id)  # 2
                    fresh = admit(process.id, row, delivery)  # 3
                    yield Transaction(connection, Fresh(process, fresh))  # 4
                    if not connection.in_transaction:
                        raise RuntimeError(
                            f"The block of {process.id} ended its transaction itself: rows and position"
                            " are no longer one commit. Try: leave commit and rollback to the block."
                        )
                    _write(connection, process.id, Row.moved(row, delivery))  # 5
                    connection.execute("commit")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("rollback")
                    raise
            except sqlite3.OperationalError as error:
                raise cues.CheckpointError(
                    f"The database {self.path} failed: {error}",
                    "again when it can be written; another writer is waited for"
                    f" {self.timeout_s:g} s (timeout_s=). A statement that cannot run fails like that as well.",
                    where=self.path,
                ) from error

    def _into_wal(self, connection: sqlite3.Connection) -> None:
        """Two that do it at once disturb one another, and SQLite does not wait there."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                connection.execute("pragma journal_mode = wal")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        """Close the database. The next transaction opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._pid != os.getpid():  # a connection does not outlive a fork
            directory = os.path.dirname(self.path)
            if directory:
                os.makedirs(directory, exist_ok=True)
            connection = sqlite3.connect(self.path, self.timeout_s, isolation_level=None, check_same_thread=False)
            self._into_wal(connection)
            connection.execute("pragma synchronous = full")
            connection.executescript(_TABLE + ";" + self.schema)
            weakref.finalize(self, connection.close)
            self._connection, self._pid = connection, os.getpid()
        return self._connection


def _again(path: str, schema: str, timeout_s: float) -> SQLite:
    return SQLite(path, schema, timeout_s=timeout_s)


def _read(connection: sqlite3.Connection, processor: str) -> Row | None:
    found = connection.execute(
        "select store, generation, epoch, ends, hash from cues_positions where processor = ?", (processor,)
    ).fetchone()
    return None if found is None else Row.of(*found)


def _write(connection: sqlite3.Connection, processor: str, row: Row) -> None:
    connection.execute(
        "insert or replace into cues_positions values (:processor, :store, :generation, :epoch, :ends, :hash)",
        {"processor": processor, **row.columns()},
    )
