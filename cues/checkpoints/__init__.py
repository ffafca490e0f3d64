"""Checkpoints: the position of a reader, stored together with the results of its reading.

    SQLCheckpoint(url, name)         a database, through SQLAlchemy (the extra ``sql``): SQLite, PostgreSQL
    JSONFileCheckpoint(path)         one file
    LMDBCheckpoint(store, name)      a Cues store

    checkpoint.restore()             raise the fence, return the last checkpoint or None
    checkpoint.read()                return the last checkpoint without taking over, for cues.txn.wait_read_through
    checkpoint.commit(c, work)       the user's writes and the checkpoint, in one transaction
    checkpoint.begin()               the same in two steps: its ``argument`` can be read before ``commit(c, work)``
    checkpoint.lease(), set_lease()  the lease by which instances of a consumer take turns
    checkpoint.name, place, fence    by which stores know the consumer: retention waits for it, cues status shows it

Duties of a checkpoint: after ``restore`` of one object, ``commit`` of every object that restored before raises
:class:`cues.Fenced` and writes nothing. If such a commit is under way at that moment, ``restore`` either sees its
result or makes it fail. A commit that has returned is as durable as the database, file or store.

:func:`new_engine` makes an engine of SQLAlchemy for a URL, :func:`session_of_mysql` a statement for its sessions, and
:func:`collation_of_mysql` names the collation of its keys.

Names load on their first use, so only users of :class:`SQLCheckpoint` need SQLAlchemy.

Sinks use ``cues_positions`` instead (``deliveries.py``): :class:`PositionTable`, :func:`write_once`, :func:`held`,
:func:`admit`, :class:`Row`, :class:`Transaction`; :func:`enter_wal` puts a SQLite file into WAL mode,
and :func:`make_directory` makes the directory of a new one.
:func:`sync_directory` makes names in a directory durable, :func:`sync_names` also its own name, and :func:`sync_file` a
file that another program wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cues.base.lazy import loader

if TYPE_CHECKING:
    from cues.checkpoints.deliveries import PositionTable, Row, Transaction, admit, held, write_once
    from cues.checkpoints.jsonfile import JSONFileCheckpoint
    from cues.checkpoints.lmdbstore import LMDBCheckpoint
    from cues.checkpoints.sql import SQLCheckpoint, collation_of_mysql, new_engine, session_of_mysql
    from cues.checkpoints.sqlite_wal import enter_wal, make_directory
    from cues.producers.sequencer import Checkpoint
    from cues.storage.datafile import sync_directory, sync_file, sync_names

# fmt: off
__all__ = [
    "CheckpointStore", "JSONFileCheckpoint", "LMDBCheckpoint", "PositionTable", "Row", "SQLCheckpoint", "Transaction",
    "admit", "collation_of_mysql", "enter_wal", "held", "make_directory", "new_engine", "session_of_mysql",
    "sync_directory", "sync_file", "sync_names", "write_once",
]
# fmt: on


class CheckpointStore(Protocol):
    """The interface of a checkpoint for :class:`cues.txn.Consumer`; its duties are in the module docstring."""

    def restore(self) -> Checkpoint | None:
        """Raise the fence and return the last checkpoint."""

    def commit(self, checkpoint: Checkpoint, work: Any = None) -> None:
        """Apply ``work`` and the checkpoint in one transaction."""


if not TYPE_CHECKING:  # for a type checker it would define every name
    __getattr__, __dir__ = loader(
        __name__,
        {
            "checkpoints.deliveries": "PositionTable Row Transaction admit held write_once",
            "checkpoints.jsonfile": "JSONFileCheckpoint",
            "checkpoints.lmdbstore": "LMDBCheckpoint",
            "checkpoints.sql": "SQLCheckpoint collation_of_mysql new_engine session_of_mysql",
            "checkpoints.sqlite_wal": "enter_wal make_directory",
            "storage.datafile": "sync_directory sync_file sync_names",
        },
    )
