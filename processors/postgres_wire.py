"""The connection by which PostgreSQL streams changes, for ``postgres_changes.py``: replication on top of psycopg.

psycopg 3 has no replication mode. Its ``pgconn`` has what is needed: a connection with ``replication=database``, the
simple protocol, and COPY in both directions.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from cues.errors import Away
from cues.processors import pgoutput, waits
from cues.processors.changes import TELL_S
from cues.processors.pgoutput import lsn_text

_READ_AT_ONCE: Final = 256
_READ_BYTES: Final = 1 << 20
_LAG_S: Final = 60.0
"""Seconds between two looks at the slot."""
BUSY_S: Final = 10.0
"""Seconds for which a start waits until the connection of the process before it is closed."""
CLOSE_S: Final = 5.0
"""Seconds for which an ended source keeps its connection, to move the slot to what is committed meanwhile."""
_STATUS: Final = struct.Struct(">cQQQqB")


def ask(connection: Any, statement: str, raw: bool = False) -> Any:
    """Run a statement of the simple protocol; return its rows as texts, or its result. Raises errors of psycopg."""
    result = connection.pgconn.exec_(statement.encode())
    if result.error_message:
        raise _error_of(result)
    if raw:
        return result
    rows = range(result.ntuples)
    return [[(result.get_value(at, n) or b"").decode() for n in range(result.nfields)] for at in rows]


class Wire:
    """A connection that streams the changes for a ``Changes``, from an LSN on.

    A thread tells the server how far the source is, also while the source waits, and calls ``look`` now and then. While
    another process uses the slot, ``stops`` waits a little and tells whether the source ends.
    """

    def __init__(self, source: Any, lsn: int, stops: Callable[[], bool], look: Callable[[], None]) -> None:
        self._source, self._look = source, look
        self._confirmed = lsn
        self._guard = threading.Lock()
        """Held while the connection is used: two threads must not use it at the same time."""
        self._changed = threading.Condition()
        self._wants = False
        """True if the server is to answer, and so to say how far it has read its log."""
        self._is_due = False
        self._last: int | None = None
        """The LSN after which an ended source is closed."""
        self._close_at = 0.0
        self._closed = False
        self._silent_s = 0.0
        self._asked_at = 0.0
        self.is_quiet = False
        """True if the last :meth:`received` has found nothing."""
        self.connection = source.connect(replication="database")
        try:
            self._start(lsn, stops)
        except BaseException:
            self.connection.close()
            raise
        threading.Thread(target=self._keep, name="cues postgres", daemon=True).start()

    def _start(self, lsn: int, stops: Callable[[], bool]) -> None:
        source, began = self._source, time.monotonic()
        name = source.publication.replace("'", "''")
        begin = f"START_REPLICATION SLOT {source.slot} LOGICAL {lsn_text(lsn)}"
        while True:
            try:
                ask(self.connection, f"{begin} (proto_version '1', publication_names '\"{name}\"')")
                break
            except pgoutput.psycopg().errors.ObjectInUse as error:
                if time.monotonic() - began > BUSY_S or stops():
                    text = f"The slot {source.slot} is in use ({source.where}): {error}."
                    raise Away(text, "end its other reader; or wait until it has ended.", what=source.where) from error
        self.connection.pgconn.nonblocking = 1

    def received(self) -> list[bytes]:
        """Return the next messages; none after a tenth of a second. Raises :class:`Away` when the server is gone."""
        found: list[bytes] = []
        connection = self.connection.pgconn
        try:
            for is_last in (False, True):
                with self._guard:
                    size = 0
                    while len(found) < _READ_AT_ONCE and size < _READ_BYTES:
                        count, data = connection.get_copy_data(1)
                        if count <= 0:
                            break
                        found.append(bytes(data))
                        size += count
                    if count < 0:
                        raise self._ended(connection.get_result())
                if found or is_last:
                    break
                if select.select([connection.socket], [], [], waits.LOOK_S)[0]:
                    with self._guard:
                        connection.consume_input()
                else:
                    self._silent_s += waits.LOOK_S
                    break
        except (pgoutput.psycopg().OperationalError, OSError, ValueError) as error:
            raise self._away(str(error).strip()) from error
        if found:
            self._silent_s = 0.0
        if self._silent_s > self._source.timeout_s:
            raise self._away(f"silent for {self._silent_s:.0f} s")
        self.is_quiet = not found
        return found

    def _ended(self, result: Any) -> Exception:
        """Return the error for the end of the stream."""
        if result is not None and result.error_message:
            return _error_of(result)
        return self._away("it ended the replication")

    def _away(self, problem: str) -> Away:
        text = f"PostgreSQL is away ({self._source.where}): {problem}."
        return Away(
            text, "wait: the source continues at its position when the server answers.", what=self._source.where
        )

    def ask(self, at_once: bool) -> None:
        """Have the server say how far it has read its log: now, or some seconds after the last time."""
        if at_once or time.monotonic() - self._asked_at > TELL_S:
            self._asked_at = time.monotonic()
            self._tell(wants=True)

    def answer(self) -> None:
        """Answer a server that asks."""
        self._tell()

    def confirm(self, lsn: int) -> None:
        """Tell the server that all before ``lsn`` is committed here."""
        with self._changed:
            self._confirmed = max(self._confirmed, lsn)
            self._is_due = True
            self._changed.notify_all()

    def end(self, last: int) -> None:
        """Close the connection when all before ``last`` is committed, or after some seconds."""
        with self._changed:
            self._last, self._close_at = last, time.monotonic() + CLOSE_S
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._guard:
            self.connection.close()

    def _tell(self, wants: bool = False) -> None:
        with self._changed:
            self._is_due, self._wants = True, self._wants or wants
            self._changed.notify_all()

    def _keep(self) -> None:
        """Send what is due, and something every ten seconds; look at the slot now and then."""
        looked = time.monotonic()
        while True:
            with self._changed:
                if not self._is_due and not self._closed and not self._is_done:
                    self._changed.wait(waits.LOOK_S if self._last is not None else TELL_S)
                if self._closed:
                    return
                is_done, wants, lsn = self._is_done, self._wants, self._confirmed
                self._is_due = self._wants = False
            clock = round((datetime.now(UTC) - pgoutput.EPOCH).total_seconds() * 1e6)
            with contextlib.suppress(pgoutput.psycopg().Error, OSError), self._guard:
                if not self.connection.closed:
                    connection = self.connection.pgconn
                    connection.put_copy_data(_STATUS.pack(b"r", lsn, lsn, lsn, clock, wants))
                    connection.flush()
            if is_done:
                return self.close()
            if time.monotonic() - looked > _LAG_S:
                looked = time.monotonic()
                self._look()

    @property
    def _is_done(self) -> bool:
        return self._last is not None and (self._confirmed >= self._last or time.monotonic() > self._close_at)


def _error_of(result: Any) -> Exception:
    """Return the error of a result. An error without an SQLSTATE is libpq's own: the connection is lost."""
    error: Exception = pgoutput.psycopg().errors.error_from_result(result)
    if getattr(error, "sqlstate", None) is None:
        error = pgoutput.psycopg().OperationalError(str(error))
    return error
