"""Retired stores: originals whose copy took their place (tools/follower.py).

    data.mdb.retired     the data file
    retired              text: the directory of the copy

A process that has the store open finds that its file is gone, and acknowledges no further commit. A process that
opens it is told where the copy is; without the note it would make a new, empty store there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cues.base.texts import quoted
from cues.errors import StoreForeign, StoreNotFound
from cues.storage import door
from cues.storage.datafile import sync_directory

COPY: Final = ".following"
"""The directory in which a follower keeps a copy that is not a store yet."""
COPY_STATE: Final = "follow.json"
MANIFEST: Final = "manifest.json"
"""The file of a backup that is complete."""
_NOTE: Final = "retired"
_DATA: Final = "data.mdb.retired"


def retire(directory: Path, copy: str) -> None:
    """Retire a store in favour of its copy. No process may be inside a write transaction."""
    door.replace(directory / _NOTE, copy, durable=True)
    (directory / "data.mdb").rename(directory / _DATA)
    sync_directory(directory)


def is_retired(directory: Path) -> bool:
    return not (directory / "data.mdb").exists() and (directory / _DATA).exists()


def put_back(directory: Path) -> None:
    """Undo :func:`retire`, if the store was retired."""
    if is_retired(directory):
        (directory / _DATA).rename(directory / "data.mdb")
        (directory / _NOTE).unlink(missing_ok=True)
        sync_directory(directory)


def refuse_copies(directory: Path) -> None:
    """Raise :class:`StoreForeign` if a store may not be begun, or written, in a directory: it has copies or backups."""
    if directory.resolve().name == COPY:
        what, hint = "is the copy of a follower", "promote the copy first (cues follow --promote)."
    elif (directory / "data.mdb").exists():
        return
    elif (directory / COPY_STATE).exists() or (directory / COPY).exists():
        what, hint = "has the copy of a follower", f"promote it first: cues follow --promote {quoted(directory)}"
    elif any(directory.glob(f"[0-9]*/{MANIFEST}")):
        what, hint = "has backups", f"restore one first: cues restore {quoted(directory)} DIR"
    else:
        return
    raise StoreForeign(f"The directory {directory} {what}; it is not a store.", f"{hint}", path=str(directory))


def refuse(directory: Path) -> None:
    """Raise :class:`StoreNotFound` if a store was retired. Called when there is no data file."""
    if is_retired(directory) or (directory / _NOTE).exists():
        copy = door.read_text(directory / _NOTE) if (directory / _NOTE).exists() else "a copy"
        raise StoreNotFound(
            f"The store {directory} was retired: {copy} was promoted and took its place.",
            f"use the store {copy}; or delete {directory}, to make a new store there.",
            path=str(directory),
        )
