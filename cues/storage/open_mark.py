"""The file ``open``: the boot under which a store is being written, and the inodes of its files.

    boot id, inode of "locks", inode of "data.mdb", separated by blanks

It tells two things. A directory whose ``open`` names other files is a copy that was made while the store was written,
or after its processes were killed; a clean close of the last writer deletes the file. So the first process that opens
a clean copy does not make it look like another copy to the processes that open it at the same moment. And a
``"process"`` store whose file names another boot may be damaged:

Such a store survives the death of every process, but a power cut may damage it. So the first writer of a boot notes
the boot's id in this file before it writes, and a clean close of the last writer deletes the file. A store whose file
names another boot is suspect: its machine stopped while the store was being written.
"""

from __future__ import annotations

from pathlib import Path

from cues.base import clock
from cues.storage import door, timeline

_FILE = "open"


def is_suspect(path: Path) -> bool:
    """Return whether the machine stopped while this store was being written with durability ``"process"``."""
    try:
        return door.read_text(path / _FILE).split()[:1] != [clock.boot_id()]
    except FileNotFoundError:
        return False


def of_copy(path: Path) -> bool:
    """Return whether the file is there and was copied with the store: it names other files than those of the store."""
    try:
        noted = door.read_text(path / _FILE).split()[1:]
        now = timeline.inodes(path)
    except FileNotFoundError:
        return False
    if len(noted) == len(now):
        return all(was != is_now for was, is_now in zip(noted, now))
    return timeline.is_copy(path)  # an earlier version wrote the boot alone


def write(path: Path, durable: bool) -> None:
    """Note the boot under which the store is written.

    With ``durable`` it survives a power cut after a sync of the directory, also of a file that is there already.
    """
    mark = path / _FILE
    if mark.exists() and not is_suspect(path):
        return
    door.replace(mark, " ".join((clock.boot_id(), *timeline.inodes(path))), durable)


def exists(path: Path) -> bool:
    return (path / _FILE).exists()


def delete(path: Path) -> None:
    """Delete the file, after every commit was made durable."""
    (path / _FILE).unlink(missing_ok=True)
