"""Write to SQLite exactly once: the rows and the position that they stand for, in one transaction.

    db = sql.SQLite("flights.db", schema="create table if not exists flights (...)")

    @graph.sink("enriched", batch=True, errors=None)
    def save(flights, process):
        with db.transaction(process) as tx:
            tx.executemany("insert into flights values (?, ?)", [row(f) for f in tx.fresh(flights)])

A sink is called at least once: a crash after the target's commit and before the store's presents
the same messages again, and an owner that was stopped and woke up presents old ones. So the target
keeps one row for each processor in a table of its own, changed in the same transaction:

    cues_positions    processor | store | generation | epoch | ends {tailer id: index} | hash

:meth:`SQLite.transaction` does this, and :func:`admit` is the whole policy:

1. Begin: take SQLite's write lock, so that nobody changes the row until the end.
2. Read the processor's row.
3. Admit the delivery, or refuse it. The rest sees only what is new: :meth:`Transaction.fresh`.
4. Run the block.
5. Write the row and commit. If the block raised, roll everything back instead.

Declare such a sink with ``errors=None``: what fails in it is the database, not the message, and the
sink then stops where it stands and goes on there later.

Not guaranteed: what the block does outside the database, and what it writes to it without asking
``tx.fresh`` first. Indices of one store mean nothing in another, so a store that was made anew is
refused (:class:`cues.Diverged`) until the target is new as well. A seek backwards delivers nothing again to such a
target, unless the seek asks for delivery again (a higher generation): then the row starts anew, and
removing what the table already holds is the user's decision.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import cues

M = TypeVar("M")

TIMEOUT_S: Final = 30.0
"""How long a transaction waits for another writer of the database before it fails."""

_TABLE: Final = """
create table if not exists cues_positions (
    processor text primary key, store text not null, generation integer not null, epoch integer not null,
    ends text not null, hash text not null
)
"""


class Row(NamedTuple):
    """What the target holds of a processor. ``ends`` are exclusive, as in ``process.delivery.end``."""

    store: str
    generation: int
    epoch: int
    ends: dict[str, int]
    hash: str


def admit(processor: str, row: Row | None, delivery: cues.Delivery) -> dict[str, int]:
    """Return, for each tailer of the delivery, the index from which its messages are new.

    Decides only; nothing is read or changed. Raises :class:`cues.Fenced` for a delivery by somebody
    who is no longer the owner, :class:`cues.Diverged` for one that no order of events explains.
    """
    if row is not None and row.store != delivery.store:
        raise cues.Diverged(
            f"{processor} delivers from the store {delivery.store}, but the target was written from the store"
            f" {row.store}: which of these messages it has, nobody can say.",
            "a new target, or the store that it was written from; if all that the target holds of this processor"
            f" is gone: delete from cues_positions where processor = '{processor}'.",
            processor=processor,
        )
    if row is None or delivery.generation > row.generation:
        return dict(delivery.start)  # the first delivery, or one that was asked for again
    if delivery.generation < row.generation or delivery.epoch < row.epoch:
        raise cues.Fenced(
            f"{processor} delivers under generation {delivery.generation}, epoch {delivery.epoch};"
            f" the target was written under generation {row.generation}, epoch {row.epoch}.",
            "nothing here: another owner has taken over.",
            processor=processor,
            reason="takeover",
        )
    # A range that ends at or before the row is skipped, one that straddles it is cut, and a later
    # start is accepted: messages that failed, or that a filter left out, make gaps.
    fresh = {
        tailer: min(max(start, row.ends.get(tailer, 0)), delivery.end[tailer])
        for tailer, start in delivery.start.items()
    }
    # A join takes the same count from each input, so the row must cut them at the same count.
    if len({fresh[tailer] - start for tailer, start in delivery.start.items()}) > 1:
        raise cues.Diverged(
            f"{processor} joins the ranges {_ranges(delivery)}, but the target ends at {row.ends}:"
            " these messages were not joined with one another before.",
            "seek with delivery asked for again, which starts the target's row anew.",
            processor=processor,
        )
    return fresh


class Transaction:
    """One open transaction of :meth:`SQLite.transaction`. Use it inside the block only."""

    def __init__(self, connection: sqlite3.Connection, process: cues.Process, fresh: Mapping[str, int]) -> None:
        self.connection = connection
        self._process = process
        self._fresh = fresh

    def fresh(self, messages: Sequence[M]) -> list[M]:
        """Return those of ``messages`` that the target does not have yet, in their order.

        ``messages`` is what the function was given: the list of a batch function (a join: each of
        its lists in turn), or ``[message]`` in a message function.
        """
        delivery = self._process.delivery
        if all(self._fresh[tailer] == start for tailer, start in delivery.start.items()):
            return list(messages)
        if all(self._fresh[tailer] == end for tailer, end in delivery.end.items()):
            return []
        # The range straddles the row, so this is a batch, whose messages are not all of the range
        # when there are filters. A join's lists stand at the same offsets of their ranges.
        tailer = next(iter(delivery.start))
        taken = self._fresh[tailer] - delivery.start[tailer]
        indices = self._process.indices
        lists = list(indices.values()) if isinstance(indices, dict) else [indices]
        first = min(one[0] for one in lists) - min(delivery.start.values())
        return [m for m, index in zip(messages, lists[0], strict=True) if index - lists[0][0] + first >= taken]

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
        :class:`cues.Fenced` or :class:`cues.Diverged` before the block runs (see :func:`admit`),
        and :class:`sqlite3.OperationalError` when another writer holds the database for too long.
        """
        delivery = process.delivery
        with self._lock:
            connection = self._open()
            connection.execute("begin immediate")  # 1
            try:
                row = _read(connection, process.id)  # 2
                fresh = admit(process.id, row, delivery)  # 3
                yield Transaction(connection, process, fresh)  # 4
                if not connection.in_transaction:
                    raise RuntimeError(
                        f"The block of {process.id} ended its transaction itself: rows and position"
                        " are no longer one commit. Try: leave commit and rollback to the block."
                    )
                _write(connection, process.id, row, delivery)  # 5
                connection.execute("commit")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise

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
            connection.execute("pragma journal_mode = wal")
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
    return None if found is None else Row(found[0], found[1], found[2], json.loads(found[3]), found[4])


def _write(connection: sqlite3.Connection, processor: str, row: Row | None, delivery: cues.Delivery) -> None:
    """Move the row to the delivery's end, never back. A tailer that took no part keeps its place."""
    before = dict(row.ends) if row is not None and row.generation == delivery.generation else {}
    ends = before | {tailer: max(end, before.get(tailer, 0)) for tailer, end in delivery.end.items()}
    # A delivery that brought nothing new still raises the epoch: its predecessor is refused from now on.
    hash = row.hash if row is not None and ends == before else delivery.hash
    connection.execute(
        "insert or replace into cues_positions values (?, ?, ?, ?, ?, ?)",
        (processor, delivery.store, delivery.generation, delivery.epoch, json.dumps(ends, sort_keys=True), hash),
    )


def _ranges(delivery: cues.Delivery) -> str:
    return ", ".join(f"{t} [{delivery.start[t]}, {delivery.end[t]})" for t in sorted(delivery.start))
