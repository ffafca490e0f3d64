"""The write-ahead log of a SQLite file."""

from __future__ import annotations

import sqlite3
import time
from typing import Final

_RETRY_S: Final = 0.01


def enter_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Put a SQLite file into WAL mode.

    Two connections that do it at the same time disturb each other, and SQLite does not wait there. So this
    function tries again for ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
