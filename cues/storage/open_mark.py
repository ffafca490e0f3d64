"""The file ``open`` of a ``"process"`` store: the boot under which the store is being written.

Such a store survives the death of every process, but a power cut may damage it. So the first writer of a boot notes
the boot's id in this file before it writes, and a clean close of the last writer deletes the file. A store whose file
names another boot is suspect: its machine stopped while the store was being written.
"""

from __future__ import annotations

import os
from pathlib import Path

from cues.base import clock
from cues.storage.datafile import sync_directory

_FILE = "open"


def is_suspect(path: Path) -> bool:
    """Return whether the machine stopped while this store was being written with durability ``"process"``."""
    try:
        return (path / _FILE).read_text() != clock.boot_id()
    except FileNotFoundError:
        return False


def write(path: Path) -> None:
    """Note the boot under which the store is written. Durable on return."""
    mark = path / _FILE
    if mark.exists() and not is_suspect(path):
        return
    with mark.open("w") as file:
        file.write(clock.boot_id())
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path)


def exists(path: Path) -> bool:
    return (path / _FILE).exists()


def delete(path: Path) -> None:
    """Delete the file, after every commit was made durable."""
    (path / _FILE).unlink(missing_ok=True)
