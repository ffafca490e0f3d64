"""The file ``open``: the boot under which a store is being written.

It tells two things. A copy of the directory that has it was made while the store was written, or after its processes
were killed (timeline.py); a clean close of the last writer deletes it. And a ``"process"`` store whose file names
another boot may be damaged:

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


def write(path: Path, durable: bool) -> None:
    """Note the boot under which the store is written; with ``durable`` it survives a power cut."""
    mark = path / _FILE
    if mark.exists() and not is_suspect(path):
        return
    new = path / f"{_FILE}.{os.getpid()}"  # renamed when it is whole: an empty mark would be that of another boot
    with new.open("w") as file:
        file.write(clock.boot_id())
        file.flush()
        if durable:
            os.fsync(file.fileno())
    new.rename(mark)
    if durable:
        sync_directory(path)


def exists(path: Path) -> bool:
    return (path / _FILE).exists()


def delete(path: Path) -> None:
    """Delete the file, after every commit was made durable."""
    (path / _FILE).unlink(missing_ok=True)
