"""Checkpoints in somebody else's store: where a reader stands, beside what it made of what it read.

    SQLCheckpoint(url, name)         a database, through SQLAlchemy (the extra ``sql``): SQLite, PostgreSQL
    JSONFileCheckpoint(path)         one file
    LMDBCheckpoint(store, name)      a Cues store

    checkpoint.restore()             raise the fence, return the last checkpoint or None
    checkpoint.commit(c, work)       the user's writes and the checkpoint, in one transaction

Duties of a checkpoint: ``restore`` shuts out every object that restored before, also one that is in the middle
of a commit, which then either is seen by ``restore`` or fails. ``commit`` raises :class:`cues.Fenced`
when somebody restored since, and has written nothing then. What ``commit`` has returned from survives
what the store behind it survives.

Names load on their first use: SQLAlchemy is needed by who uses :class:`SQLCheckpoint`, and nobody else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cues.checkpoints.deliveries import Fresh, Row, admit
    from cues.checkpoints.jsonfile import JSONFileCheckpoint
    from cues.checkpoints.lmdbstore import LMDBCheckpoint
    from cues.checkpoints.sql import SQLCheckpoint
    from cues.txn.sequencer import Checkpoint

__all__ = ["CheckpointStore", "Fresh", "JSONFileCheckpoint", "LMDBCheckpoint", "Row", "SQLCheckpoint", "admit"]


class CheckpointStore(Protocol):
    """What :class:`cues.txn.Consumer` asks of a checkpoint; the duties are above."""

    def restore(self) -> Checkpoint | None:
        """Raise the fence and return the last checkpoint."""

    def commit(self, checkpoint: Checkpoint, work: Any = None) -> None:
        """Apply ``work`` and the checkpoint in one transaction."""


_HOMES = {
    "Fresh": "deliveries",
    "Row": "deliveries",
    "admit": "deliveries",
    "JSONFileCheckpoint": "jsonfile",
    "LMDBCheckpoint": "lmdbstore",
    "SQLCheckpoint": "sql",
}


def __getattr__(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cues.checkpoints' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cues.checkpoints.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
