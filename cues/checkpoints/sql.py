"""A checkpoint in a database, beside the rows that it stands for: one transaction changes both.

    checkpoint = SQLCheckpoint("postgresql+psycopg://…", "bank")

    cues_checkpoints    name | fence | checkpoint       of consumers (cues.txn.Consumer)
    cues_positions      processor | …                   of sinks (cues.Sink(checkpoint=…), deliveries.py)

The fence is what stops an old owner. :meth:`SQLCheckpoint.restore` raises it and reads the checkpoint;
a commit under a lower one changes nothing and raises :class:`cues.Fenced`. Both change the row first,
so they wait for one another on it, and a commit that is under way is either seen or refused:

    1. begin     the row's fence is mine, or Fenced; the checkpoint is written: the row is locked
    2. work      the user's own writes
    3. commit

Not guaranteed: anything about a database that loses commits. SQLite files opened by a URL are in WAL mode
with ``synchronous=full``; a server whose ``synchronous_commit`` is off is asked for it in each
transaction here. Nor that an owner that is stopped inside a transaction is waited out: PostgreSQL ends
its transaction after half the timeout; SQLite cannot, so who waits gets :class:`cues.CheckpointError`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.checkpoints import packing
from cues.checkpoints.deliveries import TABLE, Fresh, M, Row, admit
from cues.errors import CheckpointError, CuesError, Fenced, Forked, InvalidArgument, Unsupported

try:
    import sqlalchemy as sa
    from sqlalchemy import event, exc
except ImportError as error:
    raise Unsupported(
        "Checkpoints in databases need SQLAlchemy, which is not installed.", "pip install 'cues-streams[sql]'."
    ) from error

if TYPE_CHECKING:
    from cues.process import Process
    from cues.txn.sequencer import Checkpoint

TIMEOUT_S: Final = 30.0
"""How long a transaction waits for another one before it fails."""
_LOOK_S: Final = 0.01
_MADE_ATTEMPTS: Final = 3
"""Two processes that make the same table at once disturb one another; the second look finds it made."""

Work = Callable[[sa.Connection], Any]
"""The user's own writes in a commit; what it returns means nothing."""

_metadata = sa.MetaData()
_checkpoints = sa.Table(
    "cues_checkpoints",
    _metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("checkpoint", sa.Text),
)
_positions = sa.Table(
    TABLE,
    _metadata,
    sa.Column("processor", sa.Text, primary_key=True),
    sa.Column("store", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("ends", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)


class Transaction:
    """One open transaction of :meth:`SQLCheckpoint.transaction`. Use it inside the block only."""

    def __init__(self, connection: sa.Connection, fresh: Fresh) -> None:
        self.connection = connection
        self._fresh = fresh
        self.known = fresh.known
        """How many messages of the delivery, from its start, the database has already."""

    def fresh(self, messages: Sequence[M]) -> list[M]:
        """Return those of ``messages`` that the database does not have yet, in their order."""
        return self._fresh.of(messages)


class SQLCheckpoint:
    """Checkpoints of consumers and positions of sinks in one database, through SQLAlchemy 2.

    ``target`` is a SQLAlchemy URL, a path of a SQLite file, or an ``Engine`` of yours (whose settings stay
    yours). ``name`` tells the consumers of one database apart; sinks are told apart by their ids and
    need none. ``schema`` holds statements that are run, one at a time, when the database is first used,
    so they must bear repetition (``create table if not exists``). Nothing is opened before that.

    ``timeout_s`` bounds each wait for another transaction. On PostgreSQL a client that says nothing inside
    a transaction for half of it is cut off there: that is what becomes of an owner that was stopped.

    One object may serve any number of threads. It travels by pickle when its target is a URL or a path.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | sa.URL | sa.Engine,
        name: str = "",
        schema: str | Sequence[str] = (),
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._target = target if isinstance(target, sa.Engine) else _url(target)
        self.name = name
        self.timeout_s = timeout_s
        self.where = (target.url if isinstance(target, sa.Engine) else self._target).render_as_string()  # type: ignore[union-attr]
        """The database's URL, without its password."""
        self._schema = [schema] if isinstance(schema, str) else list(schema)
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None
        self._pid = 0
        self._fence: tuple[int, int] | None = None
        """The fence that this object restored, and the process that did."""

    # --- of consumers -------------------------------------------------------------------------

    def restore(self) -> Checkpoint | None:
        """Raise the fence and return the last checkpoint, None when there is none yet.

        From now on every other object that restored before is refused. Waits for a commit that is under
        way. Raises :class:`cues.CheckpointError` when the database cannot be reached, or is held by a
        transaction that does not end.
        """
        self._named()
        row = self._retried(self._raise_fence)
        self._fence = row.fence, os.getpid()
        if faults.active:
            faults.point("checkpoint.restored")
        return None if row.checkpoint is None else packing.unpack(row.checkpoint)

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and what ``work(connection)`` writes, in one transaction.

        Raises :class:`cues.Fenced`, before ``work`` is called, when somebody restored since;
        :class:`cues.CheckpointError` when the database fails (then restore, to know whether it took place);
        what ``work`` raises, and then nothing was written. ``work`` must leave commit and rollback alone.
        """
        fence = self._mine()
        text = packing.pack(checkpoint)
        mine = (_checkpoints.c.name == self.name) & (_checkpoints.c.fence == fence)
        with self._begin() as connection:
            # 1. The fence, and the row's lock.
            if connection.execute(_checkpoints.update().where(mine).values(checkpoint=text)).rowcount != 1:
                raise Fenced(
                    f"The checkpoint {self.name!r} in {self.where} was restored by somebody else since (this one"
                    f" has fence {fence}); nothing was written.",
                    "nothing here: another owner has taken over.",
                    processor=self.name,
                    reason="takeover",
                )
            # 2. Work.
            if work is not None:
                work(connection)
            written = sa.select(_checkpoints.c.fence).where(mine & (_checkpoints.c.checkpoint == text))
            self._still_inside(connection, written, "The work of the checkpoint " + repr(self.name))
            if faults.active:
                faults.point("checkpoint.inside")
        # 3. Committed.
        if faults.active:
            faults.point("checkpoint.after")

    def _raise_fence(self, connection: sa.Connection) -> Any:
        mine = _checkpoints.c.name == self.name
        higher = _checkpoints.update().where(mine).values(fence=_checkpoints.c.fence + 1)
        if connection.execute(higher).rowcount == 0:
            # Two that come first at once: the second insert breaks the primary key, and is made anew.
            connection.execute(_checkpoints.insert().values(name=self.name, fence=1))
        return connection.execute(sa.select(_checkpoints).where(mine)).one()

    def _named(self) -> None:
        if not self.name:
            raise InvalidArgument(
                f"The checkpoint in {self.where} has no name; a consumer's checkpoint is kept under one.",
                "SQLCheckpoint(target, 'name').",
            )

    def _mine(self) -> int:
        if self._fence is None:
            raise CuesError(f"The checkpoint {self.name!r} is committed before it was restored.", "restore() first.")
        fence, pid = self._fence
        if pid != os.getpid():
            raise Forked(
                f"The checkpoint {self.name!r} was restored in process {pid}; this is a child, {os.getpid()}.",
                "restore() here, which refuses the parent from then on.",
                pid=pid,
            )
        return fence

    # --- of sinks -----------------------------------------------------------------------------

    @contextmanager
    def transaction(self, process: Process) -> Iterator[Transaction]:
        """Run the block in a transaction that holds exactly what is new to the database.

        Leaving the block commits its writes with the processor's row; an exception rolls back. Raises
        :class:`cues.Fenced` or :class:`cues.Diverged` before the block runs (see
        :func:`cues.checkpoints.admit`), and :class:`cues.CheckpointError` when the database fails.
        """
        delivery = process.delivery
        mine = _positions.c.processor == process.id
        for _ in range(_MADE_ATTEMPTS):
            with self._begin() as connection:
                # 1 and 2. The first statement writes, so it takes the lock, and what is read holds.
                locked = connection.execute(_positions.update().where(mine).values(epoch=_positions.c.epoch)).rowcount
                row = Row.of(*connection.execute(sa.select(_positions).where(mine)).one()[1:]) if locked else None
                # 3. Admit.
                fresh = admit(process.id, row, delivery)
                columns = Row.moved(row, delivery).columns()
                try:
                    if locked:
                        connection.execute(_positions.update().where(mine).values(**columns))
                    else:
                        connection.execute(_positions.insert().values(processor=process.id, **columns))
                except exc.IntegrityError:
                    connection.rollback()
                    continue  # another one came first: now there is a row to wait for
                # 4. Run.
                yield Transaction(connection, Fresh(process, fresh))
                written = sa.select(_positions.c.epoch).where(
                    mine & sa.and_(*[_positions.c[name] == value for name, value in columns.items()])
                )
                self._still_inside(connection, written, f"The block of {process.id}")
                if faults.active:
                    faults.point("checkpoint.inside")
            # 5. Committed.
            if faults.active:
                faults.point("checkpoint.after")
            return
        raise self._failed(f"{process.id} finds no row in {TABLE}, and cannot insert one.")

    # --- the database -------------------------------------------------------------------------

    @property
    def engine(self) -> sa.Engine:
        """The engine, with the tables of ``schema`` made: to read what was written."""
        return self._open()

    def close(self) -> None:
        """Close the connections. The next use opens them again. An engine of yours stays open."""
        with self._lock:
            if self._engine is not None and self._engine is not self._target:
                self._engine.dispose(close=self._pid == os.getpid())
                self._engine = None

    def __enter__(self) -> SQLCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _begin(self, engine: sa.Engine | None = None) -> Iterator[sa.Connection]:
        """A transaction that commits at the end of the block; what fails in the database is CheckpointError."""
        try:
            with (engine or self._open()).begin() as connection:
                driver: Any = connection.connection.dbapi_connection
                if getattr(driver, "autocommit", False) is True:
                    raise InvalidArgument(
                        f"The engine for {self.where} commits each statement by itself (AUTOCOMMIT).",
                        "an engine with transactions.",
                    )
                # The write lock before anything is read; and the driver begins when it thinks fit.
                if connection.dialect.name == "sqlite" and not driver.in_transaction:
                    connection.exec_driver_sql("begin immediate")
                if connection.dialect.name == "postgresql":
                    connection.execute(_BOUNDED, {"wait": f"{self.timeout_s}s", "idle": f"{self.timeout_s / 2}s"})
                yield connection
        except exc.DBAPIError as error:
            if isinstance(error, (exc.OperationalError, exc.InterfaceError)) or error.connection_invalidated:
                raise self._failed(_told(error)) from error
            if type(error) is exc.DatabaseError:  # SQLite's, for a file that is damaged or none of its own
                raise CheckpointError(
                    f"The database {self.where} cannot be read: {_told(error)}.",
                    "another path, or a copy of the file from before it was damaged.",
                    where=self.where,
                ) from error
            raise

    def _retried(self, fn: Callable[[sa.Connection], Any]) -> Any:
        """Call a function in a transaction; once more where another one like it came first."""
        for _ in range(_MADE_ATTEMPTS - 1):
            with contextlib.suppress(exc.IntegrityError), self._begin() as connection:
                return fn(connection)
        with self._begin() as connection:
            return fn(connection)

    def _still_inside(self, connection: sa.Connection, written: sa.Select[Any], who: str) -> None:
        """Refuse a commit whose own row is gone from it: the user's code rolled it back, or ended it."""
        if not connection.in_transaction() or connection.execute(written).first() is None:
            raise CuesError(
                f"{who} ended its transaction itself: rows and position are no longer one commit.",
                "leave commit and rollback to the caller; connection.begin_nested() gives a savepoint.",
            )

    def _failed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"The database {self.where} failed: {what}",
            f"again when it can be reached; who holds it is waited for {self.timeout_s:g} s (timeout_s=)."
            " A statement that cannot run fails like that as well.",
            where=self.where,
        )

    def _open(self) -> sa.Engine:
        with self._lock:
            if self._engine is None or self._pid != os.getpid():
                if self._engine is not None:
                    self._engine.dispose(close=False)  # a connection does not outlive a fork
                engine = self._target if isinstance(self._target, sa.Engine) else _engine(self._target, self.timeout_s)
                self._make(engine)
                self._engine, self._pid = engine, os.getpid()
            return self._engine

    def _make(self, engine: sa.Engine) -> None:
        """The tables, ours and the user's."""
        for attempt in range(_MADE_ATTEMPTS):
            try:
                with self._begin(engine) as connection:
                    for table in (_checkpoints, _positions):
                        connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
                    for statement in self._schema:
                        connection.exec_driver_sql(statement)
                return
            except (exc.IntegrityError, exc.ProgrammingError):  # PostgreSQL's, which looks before it locks
                if attempt == _MADE_ATTEMPTS - 1:
                    raise

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._target, sa.Engine):
            raise TypeError(f"A checkpoint over an engine cannot be pickled ({self.where}). Try: its URL.")
        return {
            "target": self._target.render_as_string(hide_password=False),
            "name": self.name,
            "schema": self._schema,
            "timeout_s": self.timeout_s,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<cues.SQLCheckpoint {self.name or 'of sinks'} in {self.where}>"


_BOUNDED: Final = sa.text(
    # What another transaction holds is waited for; a client that went silent inside one is not.
    "select set_config('lock_timeout', :wait, true),"
    " set_config('idle_in_transaction_session_timeout', :idle, true),"
    # A commit that a power cut takes back would be behind its acknowledgements.
    " set_config('synchronous_commit', case when current_setting('synchronous_commit') = 'off' then 'on'"
    " else current_setting('synchronous_commit') end, true)"
)


def _into_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Put a SQLite file into WAL mode. Two that do it at once disturb one another, and SQLite does not wait."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def _told(error: exc.DBAPIError) -> str:
    return f"{type(error.orig).__name__}: {error.orig}".strip()


def _url(target: str | os.PathLike[str] | sa.URL) -> sa.URL:
    """A URL, also from a path. Raises :class:`InvalidArgument` for what cannot hold a checkpoint."""
    if isinstance(target, sa.URL):
        url = target
    else:
        text = os.fspath(target)
        try:
            url = sa.make_url(text) if "://" in text else sa.URL.create("sqlite", database=text)
        except exc.ArgumentError as error:
            raise InvalidArgument(
                f"{text!r} is no database URL ({error}).", "'postgresql+psycopg://…', or the path of a SQLite file."
            ) from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidArgument(
            "A SQLite database in memory is gone with its process, and the checkpoint with it.", "the path of a file."
        )
    return url


def _engine(url: sa.URL, timeout_s: float) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        try:
            return sa.create_engine(url, pool_pre_ping=True)
        except exc.NoSuchModuleError as error:
            raise InvalidArgument(
                f"SQLAlchemy knows no database {url.drivername!r} ({url.render_as_string()}).",
                "'postgresql+psycopg://…', or the path of a SQLite file.",
            ) from error
        except ModuleNotFoundError as error:
            raise Unsupported(
                f"{url.drivername} needs {error.name}, which is not installed.",
                f"pip install {error.name}; or postgresql+psycopg://…, whose driver comes with cues-streams[sql].",
            ) from error
    directory = os.path.dirname(url.database or "")
    if directory:
        os.makedirs(directory, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"timeout": timeout_s})

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin here, and not when the driver thinks fit
        _into_wal(connection, timeout_s)
        connection.execute("pragma synchronous = full")

    return engine
