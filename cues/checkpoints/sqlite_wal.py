"""The write-ahead log of a SQLite file, and its directory."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from cues.storage.datafile import sync_names

_RETRY_S: Final = 0.01


def make_directory(file: str | os.PathLike[str]) -> None:
    """Make the directory of a file that does not exist yet, also of a database of another kind.

    The name of the directory survives a power cut. A database syncs at most the names in its directory, so a new
    directory could be lost with everything that was committed in it.
    """
    path = Path(file).absolute()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_names(path.parent)


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
