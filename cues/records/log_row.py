"""The row of a log: its identity, its first and next index, and its last append time."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from cues.records import sealed

ROW: Final = struct.Struct(">8sQQQI")


class LogRow(NamedTuple):
    """The fields of a log's row."""

    identity: bytes
    first: int
    next: int
    time_ns: int
    version: int
    """Increases when the queue's options change, so that every process reads the new ones."""


def put_row(txn: Any, key: bytes, row: LogRow) -> None:
    """Write the row of a log."""
    sealed.put(txn, key, ROW.pack(*row))


def unpack_row(key: bytes, raw: bytes, log: str = "(unnamed)") -> LogRow:
    """Decode the row of a log. Raises :class:`StoreDamaged`, which names the log."""
    return LogRow._make(sealed.unseal_fields(key, raw, f"row of the queue {log}", ROW))
