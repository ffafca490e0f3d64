"""A checkpoint in a database, together with the user's rows: one transaction changes both.

    checkpoint = SQLCheckpoint("postgresql+psycopg://…", "bank")

    cues_checkpoints    name | fence | checkpoint       of consumers (cues.txn.Consumer)
    cues_leases         name | lease                    of consumers that run (cues/txn/turns.py)
    cues_positions      processor | …                   of sinks (cues.Sink(checkpoint=…), deliveries.py)

The fence stops an old owner. :meth:`SQLCheckpoint.restore` raises it and reads the checkpoint. A commit under a
lower fence changes nothing and raises :class:`cues.Fenced`. Both change the row first, so each waits for the row lock
of the other, and ``restore`` either sees a running commit or makes it fail:

    1. begin     the fence in the row is that of this object, otherwise Fenced; write the checkpoint: the row is locked
    2. work      the user's own writes
    3. commit

The sinks of one database follow the protocol of ``deliveries.py``.

Not guaranteed: anything about a database that loses commits. SQLite files opened by a URL are in WAL mode with
``synchronous=full``; on a server with ``synchronous_commit`` off, each transaction here turns it on. MariaDB and MySQL
must have ``innodb_flush_log_at_trx_commit=1``, their default, and tables of InnoDB. An owner that is stopped inside a
transaction: PostgreSQL and MariaDB end its transaction after half the timeout; SQLite and MySQL cannot, so a process
that waits for it gets :class:`cues.errors.CheckpointError`.

In MariaDB and MySQL each transaction here sets its session: the whole ``sql_mode`` (strict, ``NO_AUTO_VALUE_ON_ZERO``),
the time zone UTC, no limit of rows, and the longest wait for a lock. They commit by themselves before a statement that
changes tables. A savepoint after the position is gone then, which is an error at the end of the user's code.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from cues import faults
from cues.arguments import check_number, path_of, text_of, texts_of
from cues.base.closing import Closing
from cues.checkpoints import packing
from cues.checkpoints.deliveries import TABLE, Row, Transaction, held, transaction_ended, write_once
from cues.checkpoints.fence import OwnsFence, RestoredFence, own_fence, restored_since
from cues.checkpoints.sqlite_wal import enter_wal, make_directory
from cues.errors import CheckpointError, InvalidArgument, Unsupported
from cues.overrides import override
from cues.producers.sequencer import Checkpoint
from cues.steps.failure import line
from cues.steps.process import Process

try:
    import sqlalchemy as sa
    from sqlalchemy import event, exc
    from sqlalchemy.dialects import mysql
except ImportError as error:
    raise Unsupported(
        "Checkpoints in databases need SQLAlchemy, which is not installed.", "pip install 'cues-streams[sql]'."
    ) from error


TIMEOUT_S: Final = 30.0
"""The time for which a transaction waits for another transaction before it fails."""
_SETTING_UP: Final = 0x63756573
"""The key of the advisory lock under which tables are created in PostgreSQL, whose catalogue knows no other."""
_CONFLICTS: Final = frozenset({"40001", "40P01"})
_CONFLICTS_OF_MYSQL: Final = frozenset({1020, 1213, 3101})
"""Record has changed since last read, deadlock, rolled back by a replication group."""
_OF_A_ROW_IN_MYSQL: Final = frozenset(
    (1292, 1364, 1365, 1366, 1411, 1416, 1441, 1526, 1644, 1690, 1906, 3105, 3140, 3141, 3143, 3819, 4025, 4078, 4161)
)
"""Values that a column does not take or generates, a check, a partition, an error of a trigger: the driver has them
with failures of the server in one class."""
_NOT_OF_A_ROW_IN_MYSQL: Final = frozenset((1044, 1046, 1049, 1054, 1142, 1143, 1146))
"""No permission, no database, no column, no table."""
_CONFLICTS_OF_SQLITE: Final = frozenset({261, 262, 517})
"""SQLITE_BUSY_RECOVERY, SQLITE_LOCKED_SHAREDCACHE and SQLITE_BUSY_SNAPSHOT, for which SQLite does not wait."""
_NOT_OF_A_ROW: Final = frozenset({"3F000", "25006", "42501", "42703", "42P01"})
"""No schema, read-only, no permission, no column, no table: no row can be the cause."""
_MADE_ATTEMPTS: Final = 3
"""Two processes that create the same table at once disturb each other; the next attempt finds the table."""

Work = Callable[[sa.Connection], Any]
"""The user's own writes in a commit. Its result is ignored."""

_MYSQL: Final = ("mysql", "mariadb")
"""The dialects of SQLAlchemy for MySQL and MariaDB."""
_SAVEPOINT: Final = "cues_position"
"""A savepoint after the position: a commit in the user's code, also one before a statement that changes tables, ends
it."""
_NO_SAVEPOINT: Final = 1305
_BY_BYTES: Final = "utf8mb4_bin"
_NAME: Final = sa.Text().with_variant(mysql.VARCHAR(500, collation=_BY_BYTES), *_MYSQL)
"""The type of a name that is a key: MySQL takes no TEXT, and other collations take two names for one."""
_LONG: Final = sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQL)
_IN_MYSQL: Final[dict[str, Any]] = {f"{name}_{key}": value for name in _MYSQL for key, value in
                    (("engine", "InnoDB"), ("charset", "utf8mb4"), ("row_format", "DYNAMIC"))}  # fmt: skip

_SECRET: Final = re.compile("pass|pwd|secret|token|credential|key$", re.IGNORECASE)
"""The names in the query of a URL whose values are not shown."""

_metadata = sa.MetaData()
_checkpoints = sa.Table(
    "cues_checkpoints",
    _metadata,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("checkpoint", _LONG),
    **_IN_MYSQL,
)
_leases = sa.Table(
    "cues_leases",
    _metadata,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("lease", sa.Text, nullable=False),
    **_IN_MYSQL,
)
_positions = sa.Table(
    TABLE,
    _metadata,
    sa.Column("processor", _NAME, primary_key=True),
    sa.Column("store", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("ends", _LONG, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("seals", _LONG),
    **_IN_MYSQL,
)


class SQLCheckpoint(OwnsFence, Closing):
    """Checkpoints of consumers and positions of sinks in one database, through SQLAlchemy 2.

    ``target`` is a SQLAlchemy URL, a path of a SQLite file, or an ``Engine`` of yours (whose settings stay
    yours). ``name`` distinguishes the consumers of one database. Sinks need no name: their ids
    distinguish them. ``schema`` holds statements that run, one at a time, when the database is first used. They run
    at every start, so they must be repeatable (``create table if not exists``). The database is not opened earlier.

    ``timeout_s`` limits each wait for another transaction. PostgreSQL ends a transaction whose client is silent for
    half of it, such as an owner that was stopped.

    One object may serve any number of threads. It can be pickled when its target is a URL or a path.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | sa.URL | sa.Engine,
        name: str = "",
        schema: str | Sequence[str] = (),
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.target = target if isinstance(target, sa.Engine) else _url(target)
        """The engine that was given, or the URL."""
        self.name = text_of("name", name)
        check_number("timeout_s", timeout_s, 0)
        self.timeout_s = timeout_s
        self.where = _shown(self.target.url if isinstance(self.target, sa.Engine) else self.target)
        """The database's URL, without its secrets."""
        self._schema = texts_of("schema", schema)
        self._lock = threading.Lock()
        self._engine: sa.Engine | None = None
        self._pid = 0

    @property
    def place(self) -> str:
        """The place of the checkpoint: equal for all objects with this URL and name."""
        url = self.target.url if isinstance(self.target, sa.Engine) else self.target
        if url.get_backend_name() == "sqlite" and url.database:
            url = url.set(database=os.path.realpath(url.database))
        return f"{_shown(url)}#{self.name}"

    def restore(self, fence: int | None = None, lease: str = "") -> Checkpoint | None:
        """Raise the fence and return the last checkpoint, None when there is none yet.

        Every object that restored before is refused from now on. With ``fence``, raises :class:`cues.Fenced` and
        changes nothing if the fence is not that of an earlier :meth:`lease` any more. ``lease`` is written with it.
        Waits for a running commit. Raises :class:`cues.errors.CheckpointError` when the database cannot be reached, or
        is held by a transaction that does not end.
        """
        self._check_name()
        row = self._retried(lambda connection: self._raise_fence(connection, fence, lease))
        self._held = RestoredFence.now(row.fence)
        faults.point("checkpoint.restored")
        return None if row.checkpoint is None else packing.unpack(row.checkpoint)

    def read(self) -> Checkpoint | None:
        """Return the last checkpoint, and leave the fence as it is; waits for no running commit.

        Raises :class:`cues.errors.CheckpointError` when the database cannot be reached.
        """
        self._check_name()
        select = sa.select(_checkpoints.c.checkpoint).where(_checkpoints.c.name == self.name)
        with self._failures(), self._open().connect() as connection:
            text = connection.execute(select).scalar()
        return None if text is None else packing.unpack(text)

    def lease(self) -> tuple[int, str]:
        """Return the fence, and the lease of the consumer that runs (:mod:`cues.txn.turns`); empty if none does."""
        self._check_name()
        fence = sa.select(_checkpoints.c.fence).where(_checkpoints.c.name == self.name)
        lease = sa.select(_leases.c.lease).where(_leases.c.name == self.name)
        with self._failures(), self._open().connect() as connection:
            return connection.execute(fence).scalar() or 0, connection.execute(lease).scalar() or ""

    def set_lease(self, text: str) -> None:
        """Write the lease. Raises :class:`cues.Fenced` after another object restored."""
        own = own_fence(self._held, repr(self.name), "restore() here, which refuses the parent from then on.")
        self._retried(lambda connection: self._write_lease(connection, own, text))

    def _write_lease(self, connection: sa.Connection, own: int, text: str) -> None:
        stored = connection.execute(sa.select(_checkpoints.c.fence).where(_checkpoints.c.name == self.name)).scalar()
        if stored != own:
            raise restored_since(self.name, f"{self.name!r} in {self.where}", own, stored)
        own_row = _leases.c.name == self.name
        if connection.execute(_leases.update().where(own_row).values(lease=text)).rowcount == 0:
            connection.execute(_leases.insert().values(name=self.name, lease=text))

    def _check_name(self) -> None:
        if not self.name:
            raise InvalidArgument(
                f"The checkpoint in {self.where} has no name; a consumer's checkpoint is kept under one.",
                "use SQLCheckpoint(target, 'name').",
            )

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and the writes of ``work(connection)``, in one transaction.

        Raises :class:`cues.Fenced`, before ``work`` is called, after another object restored;
        :class:`cues.errors.CheckpointError` when the database fails (call :meth:`restore` to find out whether the
        commit took place); and the exceptions of ``work``, after which nothing was written. ``work`` must not commit
        or roll back.
        """
        text = packing.pack(checkpoint)
        _OpenTransaction(self, {"checkpoint": text}).finish(text, work)

    def begin(self) -> _OpenTransaction:
        """Begin the transaction of the next commit, for a consumer that reads rows before it decides.

        Its ``argument`` is the connection; ``commit(checkpoint, work)`` or ``roll_back()`` ends it. Raises
        :class:`cues.Fenced` after another object restored; from then on until the end no other object can restore.
        """
        return _OpenTransaction(self, {})

    def _raise_fence(self, connection: sa.Connection, expected: int | None, lease: str) -> Any:
        own_row = _checkpoints.c.name == self.name
        higher = _checkpoints.update().where(own_row).values(fence=_checkpoints.c.fence + 1)
        if expected is not None:
            higher = higher.where(_checkpoints.c.fence == expected)
        if connection.execute(higher).rowcount == 0:
            stored = connection.execute(sa.select(_checkpoints.c.fence).where(own_row)).scalar()
            if expected is not None and (stored or 0) != expected:
                raise restored_since(self.name, f"{self.name!r} in {self.where}", expected, stored)
            # Of two inserts at once the second breaks the primary key; it is tried again.
            connection.execute(_checkpoints.insert().values(name=self.name, fence=1))
        row = connection.execute(sa.select(_checkpoints).where(own_row)).one()
        if lease:
            self._write_lease(connection, row.fence, lease)
        return row

    def transaction(self, process: Process) -> AbstractContextManager[Transaction[sa.Connection]]:
        """Run the block in a transaction with exactly the messages that are new to the database.

        Leaving the block commits its writes with the processor's row; an exception rolls back. Raises
        :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs (see
        :func:`cues.checkpoints.admit`), and :class:`cues.errors.CheckpointError` when the database fails.
        """
        return write_once(_Positions(self), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors whose rows the database has: it refuses them from another store."""
        return held(_Positions(self), processors)

    @property
    def engine(self) -> sa.Engine:
        """The engine, to read from the database. The tables of ``schema`` exist."""
        return self._open()

    @override
    def close(self) -> None:
        """Close the connections. The next use opens them again. An engine given as the target stays open."""
        with self._lock:
            if self._engine is not None and self._engine is not self.target:
                self._engine.dispose(close=self._pid == os.getpid())
                self._engine = None

    @contextmanager
    def _begin(self, engine: sa.Engine | None = None) -> Iterator[sa.Connection]:
        """Begin a transaction that commits at the end of the block. Database failures become CheckpointError."""
        with self._failures(), (engine or self._open()).begin() as connection:
            driver: Any = connection.connection.dbapi_connection
            is_mysql = connection.dialect.name in _MYSQL
            if getattr(driver, "autocommit", False) is True or (is_mysql and driver.get_autocommit()):
                raise InvalidArgument(
                    f"The engine for {self.where} commits each statement by itself (AUTOCOMMIT).",
                    "give an engine that uses transactions.",
                )
            # Take the write lock before the first read; the driver would begin the transaction later.
            if connection.dialect.name == "sqlite" and not driver.in_transaction:
                connection.exec_driver_sql("begin immediate")
            if connection.dialect.name == "postgresql":
                connection.execute(_BOUNDED, {"wait": f"{self.timeout_s}s", "idle": f"{self.timeout_s / 2}s"})
            if is_mysql:
                connection.exec_driver_sql(session_of_mysql(self.timeout_s))
            yield connection

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise failures of the database as CheckpointError."""
        try:
            yield
        except exc.DBAPIError as error:
            of_target = isinstance(error, (exc.OperationalError, exc.InterfaceError)) or error.connection_invalidated
            number = _number(error)
            if number in _OF_A_ROW_IN_MYSQL:
                raise
            if of_target or _state(error) in _NOT_OF_A_ROW or number in _NOT_OF_A_ROW_IN_MYSQL:
                raise CheckpointError(
                    f"The database {self.where} failed: {_told(error)}",
                    f"start again when the database can be reached; a transaction waits {self.timeout_s:g} s for"
                    " another one (timeout_s=). A statement that cannot run fails with this error as well.",
                    where=self.where,
                    again=_asks_to_repeat(error),
                ) from error
            if type(error) is exc.DatabaseError:  # SQLite raises it for a damaged file, or a file of another kind
                raise CheckpointError(
                    f"The database {self.where} cannot be read: {_told(error)}.",
                    "use another path, or restore a copy of the file.",
                    where=self.where,
                ) from error
            raise

    def _retried(
        self, fn: Callable[[sa.Connection], Any], engine: sa.Engine | None = None, *also: type[Exception]
    ) -> Any:
        """Call a function in a transaction; call it again where another transaction inserted first."""
        for _ in range(_MADE_ATTEMPTS - 1):
            with contextlib.suppress(exc.IntegrityError, *also), self._begin(engine) as connection:
                return fn(connection)
        with self._begin(engine) as connection:
            return fn(connection)

    def _open(self) -> sa.Engine:
        with self._lock:
            if self._engine is None or self._pid != os.getpid():
                if self._engine is not None:
                    self._engine.dispose(close=False)  # a connection does not outlive a fork
                engine = self.target if isinstance(self.target, sa.Engine) else _engine(self.target, self.timeout_s)
                self._retried(lambda connection: self._alone(connection, self._make), engine, exc.ProgrammingError)
                self._engine, self._pid = engine, os.getpid()
            return self._engine

    def set_up(self, fn: Callable[[sa.Connection], Any]) -> None:
        """Call a function in a transaction of its own, to create or check tables: one process at a time does it.

        It may be called again, where another transaction was first.
        """
        self._retried(lambda connection: self._alone(connection, fn), None, exc.ProgrammingError)

    def __cues_prepare__(self) -> None:
        self._open()

    def _alone(self, connection: sa.Connection, fn: Callable[[sa.Connection], Any]) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SETTING_UP)))
        if connection.dialect.name not in _MYSQL:
            fn(connection)
            return
        # A statement that changes tables ends the transaction there, so the lock is the session's.
        connection.exec_driver_sql(f"do get_lock('cues_{_SETTING_UP}', {math.ceil(self.timeout_s)})")
        try:
            fn(connection)
        finally:
            with contextlib.suppress(exc.DBAPIError):  # a session that is lost has no lock
                connection.exec_driver_sql(f"do release_lock('cues_{_SETTING_UP}')")

    def _make(self, connection: sa.Connection) -> None:
        """Create our tables and those of the user."""
        for table in (_checkpoints, _leases, _positions):
            made = sa.schema.CreateTable(table, if_not_exists=True)
            if connection.dialect.name in _MYSQL:
                text = str(made.compile(dialect=connection.dialect))
                connection.exec_driver_sql(text.replace(_BY_BYTES, collation_of_mysql(connection)))
            else:
                connection.execute(made)
        if "seals" not in {column["name"] for column in sa.inspect(connection).get_columns(TABLE)}:
            connection.exec_driver_sql(f"alter table {TABLE} add column seals text")  # an older version's
        for statement in self._schema:
            connection.exec_driver_sql(statement)

    @override
    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.target, sa.Engine):
            raise TypeError(f"A checkpoint over an engine cannot be pickled ({self.where}). Try: give its URL instead.")
        return {
            "target": self.target.render_as_string(hide_password=False),
            "name": self.name,
            "schema": self._schema,
            "timeout_s": self.timeout_s,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @override
    def __repr__(self) -> str:
        return f"<cues.SQLCheckpoint {self.name or 'of sinks'} in {self.where}>"


class _OpenTransaction:
    """The transaction of a commit: it holds the lock on the row of its checkpoint."""

    def __init__(self, owner: SQLCheckpoint, values: dict[str, Any]) -> None:
        """Write ``values`` into the row, if the fence in it is that of ``owner``."""
        hint = "restore() here, which refuses the parent from then on."
        fence = own_fence(owner._held, repr(owner.name), hint)
        self._owner = owner
        self._row = (_checkpoints.c.name == owner.name) & (_checkpoints.c.fence == fence)
        with contextlib.ExitStack() as opened:
            self.argument = opened.enter_context(owner._begin())
            # 1. The fence, and the row's lock.
            update = _checkpoints.update().where(self._row).values({"fence": fence, **values})
            if self.argument.execute(update).rowcount != 1:
                raise restored_since(owner.name, f"{owner.name!r} in {owner.where}", fence)
            self._opened = opened.pop_all()

    def errors(self) -> AbstractContextManager[None]:
        """Raise failures of the database inside the block as CheckpointError."""
        return self._owner._failures()

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and the writes of ``work(connection)``, and commit; see :meth:`SQLCheckpoint.commit`."""
        text = packing.pack(checkpoint)
        with self._rolled_back_on_error():
            self._check_open()
            self.argument.execute(_checkpoints.update().where(self._row).values(checkpoint=text))
        self.finish(text, work)

    def finish(self, text: str, work: Work | None) -> None:
        """Do the rest of a commit, after the checkpoint is in the row."""
        with self._opened:
            # 2. Work.
            is_mysql = self.argument.dialect.name in _MYSQL
            if is_mysql:
                self.argument.exec_driver_sql(f"savepoint {_SAVEPOINT}")
            if work is not None:
                work(self.argument)
            self._check_open()
            if is_mysql and not _has_savepoint(self.argument):
                raise transaction_ended(f"The work of the checkpoint {self._owner.name!r}")
            written = sa.select(_checkpoints.c.fence).where(self._row & (_checkpoints.c.checkpoint == text))
            if self.argument.execute(written).first() is None:
                raise transaction_ended(f"The work of the checkpoint {self._owner.name!r}")
            faults.point("checkpoint.inside")
        # 3. Committed.
        faults.point("checkpoint.after")

    def roll_back(self) -> None:
        """Write nothing. May be repeated, also after a commit."""
        with contextlib.suppress(_RolledBack), self._opened:
            raise _RolledBack

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.push(self._opened)
            yield
            undo.pop_all()

    def _check_open(self) -> None:
        if not self.argument.in_transaction():
            raise transaction_ended(f"The work of the checkpoint {self._owner.name!r}")


class _RolledBack(Exception):
    """Raised inside a transaction, to undo it."""


class _Positions:
    """The table of positions (:class:`PositionTable`) through SQLAlchemy."""

    def __init__(self, checkpoint: SQLCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.where = checkpoint.where
        self._written: tuple[str, Row] | None = None
        """The processor and its row in a transaction of MySQL, which a statement can commit unasked."""

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        with self._checkpoint._begin() as connection:
            try:
                yield connection
            except Exception as error:
                if self._is_committed(connection):
                    raise transaction_ended(f"The block of {self._written and self._written[0]}") from error
                raise

    def _is_committed(self, connection: sa.Connection) -> bool:
        """Return whether the block, which failed, has committed the row. A deadlock takes the savepoint and the row."""
        if self._written is None:
            return False
        try:
            return (
                not _has_savepoint(connection)
                and self.read(connection, self._written[0], lock=False) == self._written[1]
            )
        except Exception:  # the connection is lost, and its transaction is undone
            return False

    def read(self, connection: sa.Connection, processor: str, *, lock: bool) -> Row | None:
        select = sa.select(_positions).where(_positions.c.processor == processor)
        # SQLite has no row locks: "begin immediate" holds the lock of the whole database.
        row = connection.execute(select.with_for_update() if lock else select).one_or_none()
        if row is None:
            return None
        what, otherwise = f"The row of {processor} in {TABLE} at {self.where}", "delete it, or use another database."
        return Row.kept(dict(zip(Row._fields, row[1:])), what, otherwise)

    def write(self, connection: sa.Connection, processor: str, row: Row, *, insert: bool) -> bool:
        columns = row.columns()
        if not insert:
            connection.execute(_positions.update().where(_positions.c.processor == processor).values(**columns))
        else:
            try:
                connection.execute(_positions.insert().values(processor=processor, **columns))
            except exc.IntegrityError:
                connection.rollback()
                return False
        if connection.dialect.name in _MYSQL:
            connection.exec_driver_sql(f"savepoint {_SAVEPOINT}")
            self._written = processor, row
        return True

    def is_open(self, connection: sa.Connection) -> bool:
        return connection.in_transaction() and (self._written is None or _has_savepoint(connection))

    def processors(self, connection: sa.Connection) -> Iterable[str]:
        return connection.execute(sa.select(_positions.c.processor)).scalars()


_BOUNDED: Final = sa.text(
    # Wait for locks of other transactions, but not for a client that is silent inside one.
    "select set_config('lock_timeout', :wait, true),"
    " set_config('idle_in_transaction_session_timeout', :idle, true),"
    # A power cut must not undo a commit that was acknowledged.
    " set_config('synchronous_commit', case when current_setting('synchronous_commit') = 'off' then 'on'"
    " else current_setting('synchronous_commit') end, true)"
)


def _has_savepoint(connection: sa.Connection) -> bool:
    """Return whether a transaction of MySQL is still that of our savepoint, which is then gone."""
    try:
        connection.exec_driver_sql(f"release savepoint {_SAVEPOINT}")
    except exc.DBAPIError as error:
        if _number(error) != _NO_SAVEPOINT:
            raise
        return False
    return True


def collation_of_mysql(connection: sa.Connection) -> str:
    """Return the collation under which two texts of MySQL or MariaDB are equal only if their characters are."""
    dialect: Any = connection.dialect
    if dialect.is_mariadb:
        return "utf8mb4_nopad_bin"
    return "utf8mb4_0900_bin" if dialect.server_version_info >= (8, 0, 17) else "utf8mb4_bin"


def session_of_mysql(timeout_s: float) -> str:
    """Return the statement for a session of MySQL or MariaDB in which values are taken as they are, or refused.

    MariaDB also ends a transaction whose client is silent for half the time.
    """
    wait, idle = max(1, math.ceil(timeout_s)), max(1, math.ceil(timeout_s / 2))
    return (
        # SQLAlchemy asks once whether names have ANSI quotes.
        "set session sql_mode = concat('STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO',"
        " if(find_in_set('ANSI_QUOTES', @@sql_mode), ',ANSI_QUOTES', '')), sql_select_limit = 18446744073709551615,"
        f" time_zone = '+00:00', innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {wait}"
        f" /*M!100300 , idle_transaction_timeout = {idle} */"
    )


def _number(error: exc.DBAPIError) -> Any:
    """Return the number that MySQL's drivers give an error."""
    return next(iter(getattr(error.orig, "args", ())), None)


def _state(error: exc.DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", ""))


def _asks_to_repeat(error: exc.DBAPIError) -> bool:
    """Return whether the database undid the transaction because of another one: its repetition is the remedy."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return _state(error) in _CONFLICTS or _number(error) in _CONFLICTS_OF_MYSQL or code in _CONFLICTS_OF_SQLITE


def _told(error: exc.DBAPIError) -> str:
    return f"{type(error.orig).__name__}: {line(error.orig)}" if error.orig is not None else line(error)


def _url(target: str | os.PathLike[str] | sa.URL) -> sa.URL:
    """Return a URL for a URL or a path. Raises :class:`InvalidArgument` where no checkpoint can be stored."""
    if isinstance(target, sa.URL):
        url = target
    else:
        text = text_of("target", path_of("target", target))
        try:
            url = sa.make_url(text) if "://" in text else sa.URL.create("sqlite", database=text)
        except exc.ArgumentError as error:
            raise InvalidArgument(
                f"{text!r} is not a database URL ({error}).",
                "use 'postgresql+psycopg://…', or the path of a SQLite file.",
            ) from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidArgument(
            "A SQLite database in memory is lost with its process, and the checkpoint with it.",
            "give the path of a file.",
        )
    return url


def new_engine(url: sa.URL, timeout_s: float) -> sa.Engine:
    """Return an engine for a URL. Raises an error that names the driver that is missing.

    ``timeout_s`` is how long SQLite waits for a lock.
    """
    if url.get_backend_name() == "sqlite":
        return sa.create_engine(url, connect_args={"timeout": timeout_s})
    if url.get_backend_name() in _MYSQL and url.query.get("charset", "utf8mb4") != "utf8mb4":
        raise InvalidArgument(
            f"The URL of {_shown(url)} has a charset other than utf8mb4: some texts could not be written as they are.",
            "leave charset= out.",
        )
    try:
        return sa.create_engine(url, pool_pre_ping=True)
    except exc.NoSuchModuleError as error:
        raise InvalidArgument(
            f"SQLAlchemy does not support the database {url.drivername!r} ({_shown(url)}).",
            "use 'postgresql+psycopg://…', or the path of a SQLite file.",
        ) from error
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"{url.drivername} needs {error.name}, which is not installed.",
            f"pip install {error.name}; or use postgresql+psycopg://… or mysql+pymysql://…, whose drivers come with"
            " cues-streams[sql] and cues-streams[mysql].",
        ) from error


def _engine(url: sa.URL, timeout_s: float) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        return new_engine(url, timeout_s)
    if os.path.dirname(url.database or ""):
        make_directory(url.database or "")
    engine = new_engine(url, timeout_s)

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin in this module, not in the driver
        enter_wal(connection, timeout_s)
        connection.execute("pragma synchronous = full")

    return engine


def _shown(url: sa.URL) -> str:
    """Return a database's URL as it may be shown: without its password, and without the secrets of its query."""
    hidden = {key: "***" for key in url.query if _SECRET.search(key)}
    return url.update_query_dict(hidden).render_as_string()
