"""Exceptions that say that something outside is away: it cannot be reached now, and perhaps can be later.

    refused, reset and timed-out connections; hosts and names that cannot be reached; a full disk
    a database that starts, ends, has no connection left, or asks to repeat a transaction (SQLSTATE 08, 57P, 53, 40001,
    40P01; the same of MySQL, SQLite and DuckDB)
    what a user or a ready-made processor says with :class:`cues.errors.Away`

A wrong password, a name that a server does not know, a constraint and a type are faults that no wait mends: they are
not away. Drivers are known by the names of their exceptions, so none is imported here.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Any, Final

from cues.errors import Away, CheckpointError, CuesError, cause_of

_ERRNOS: Final = frozenset(
    getattr(errno, name)
    for name in (
        "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "ECONNREFUSED", "ECONNRESET",
        "ECONNABORTED", "ENOTCONN", "EPIPE", "ENOSPC", "EDQUOT", "ESTALE", "EIO", "ENOMEM", "EMFILE", "ENFILE",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""Errors of the system that pass: the network, the disk, the other side of a pipe."""

_STATES: Final = re.compile(r"08(?!P01)|57P|53|40001|40P01")
"""SQLSTATEs, by their beginning: connections (not a protocol violation), the operator (shutdown, start), resources, and
transactions to repeat."""

_MYSQL: Final = frozenset(
    (
        1020, 1021, 1040, 1047, 1053, 1114, 1152, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1927, 2002, 2003, 2006,
        2013, 2055, 3101, 4031,
    )
)  # fmt: skip
"""Codes of MySQL and MariaDB: a full disk or table, too many connections, a cluster that is not ready, shutdown,
network, lock wait, deadlock and other transactions to repeat, lost and killed connections."""

_DRIVERS_OF_MYSQL: Final = frozenset(("pymysql", "MySQLdb", "mysql", "mariadb"))
_DRIVERS: Final = frozenset(("psycopg", "psycopg2", "sqlite3", "duckdb", "_duckdb", *_DRIVERS_OF_MYSQL))
"""Packages of the exceptions of drivers."""
_SQLITE: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_PROTOCOL")

_REFUSED_BY_SERVER: Final = re.compile(r"\bfailed: (\w+: |SSL(?! connection has been closed| SYSCALL))")
"""libpq's text for a connection that the server itself refused, in any language: severity, colon, text; and for TLS.

A connection with TLS that is lost has the text "consuming input failed: SSL connection has been closed unexpectedly".
"""
_SERVER_IS_BUSY: Final = re.compile(
    r"starting up|shutting down|recovery|too many|remaining connection slots|terminating"
)

_CLASSES: Final = frozenset(
    (
        "requests.exceptions.ConnectionError", "requests.exceptions.Timeout",
        "requests.exceptions.ChunkedEncodingError", "urllib3.exceptions.NewConnectionError",
        "urllib3.exceptions.MaxRetryError", "urllib3.exceptions.ProtocolError", "urllib3.exceptions.TimeoutError",
        "httpx.NetworkError", "httpx.TimeoutException", "httpx.RemoteProtocolError",
        "aiohttp.client_exceptions.ClientConnectionError", "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ConnectionError",
        "redis.exceptions.ConnectionError", "redis.exceptions.TimeoutError", "redis.exceptions.ReadOnlyError",
        "redis.exceptions.OutOfMemoryError", "redis.exceptions.MasterDownError", "pymongo.errors.AutoReconnect",
        "pika.exceptions.AMQPConnectionError",
        "nats.errors.NoServersError", "nats.errors.ConnectionClosedError", "nats.errors.StaleConnectionError",
        "nats.errors.NoRespondersError", "nats.js.errors.ServiceUnavailableError",
        "azure.core.exceptions.ServiceRequestError", "azure.core.exceptions.ServiceResponseError",
        "openai.APIConnectionError", "anthropic.APIConnectionError", "socket.gaierror",
    )
)  # fmt: skip
"""Exceptions of libraries that mean the same as ConnectionError and TimeoutError, by name."""
_NEVER: Final = frozenset(
    (
        "redis.exceptions.AuthenticationError", "redis.exceptions.AuthorizationError",
        "redis.exceptions.ExternalAuthProviderError", "requests.exceptions.SSLError",
        "botocore.exceptions.SSLError",
        "pika.exceptions.AuthenticationError", "pika.exceptions.ProbableAuthenticationError",
        "pika.exceptions.ProbableAccessDeniedError", "pika.exceptions.IncompatibleProtocolError",
        "pika.exceptions.ConnectionWrongStateError",
    )
)  # fmt: skip
"""Subclasses of these classes that are faults."""
_OBSTORE: Final = re.compile(
    r"Generic \w+ error: .*(HTTP error|status code: (5\d\d|429)|status (5\d\d|429))", re.DOTALL
)
"""The text of obstore's GenericError for a store that is away: one class is for bad requests too."""
_DEPTH_MAX: Final = 10


def is_away(error: BaseException) -> bool:
    """Return whether an exception says that something outside cannot be reached now."""
    try:
        return any(map(_is_away, _links(error)))
    except Exception:  # an exception of a user may raise in anything, also in str()
        return False


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, and those that it only carries.

    These are a driver's in SQLAlchemy's, a reason of urllib, and the cause of a :class:`CheckpointError`, whose raiser
    wraps all failures of a target alike.
    """
    for _ in range(_DEPTH_MAX):
        yield error
        carried = cause_of(error) if isinstance(error, CheckpointError) else None
        for name in ("orig", "reason"):
            carried = carried or getattr(error, name, None)
        if not isinstance(carried, BaseException) or (isinstance(error, CheckpointError) and error.away is not None):
            return
        error = carried


def _is_away(error: BaseException) -> bool:
    if isinstance(error, CuesError):  # also those that are a TimeoutError: a wait for a queue is not outside
        return isinstance(error, Away) or (isinstance(error, CheckpointError) and bool(error.away or error.again))
    if isinstance(error, (ConnectionError, TimeoutError)) or getattr(error, "connection_invalidated", False) is True:
        return True
    classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return not classes & _NEVER and (bool(classes & _CLASSES) or _of_database(error))


def _of_database(error: BaseException) -> bool:
    """Return whether an exception of a driver says that the database or the object store is away."""
    package, name = type(error).__module__.partition(".")[0], type(error).__name__
    state: Any = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    code = error.args[0] if error.args else None
    if package in _DRIVERS_OF_MYSQL and code in _MYSQL:  # PyMySQL 2 has an SQLSTATE, which is "HY000" for most of them
        return True
    if isinstance(state, str):
        return _STATES.match(state) is not None
    if package == "obstore" or (type(error) is OSError and error.errno is None):  # its files raise the latter
        return name in ("GenericError", "OSError") and _OBSTORE.search(str(error)) is not None
    if package not in _DRIVERS:
        return False
    text = str(error)
    if package in ("psycopg", "psycopg2") and name in ("OperationalError", "ConnectionTimeout"):
        if "connection is closed" in text:  # a connection that a function keeps heals only by a new process
            return False
        return _REFUSED_BY_SERVER.search(text) is None or _SERVER_IS_BUSY.search(text) is not None
    if package == "sqlite3":
        return str(getattr(error, "sqlite_errorname", "")).startswith(_SQLITE)
    if "duckdb" in package and name == "IOException":
        return "lock on file" in text or "No space left" in text
    return False
