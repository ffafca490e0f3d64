"""The offsets of a batch in Spark's checkpoint: the start and the end of each source.

    <checkpoint>/metadata            {"id": …}, a random id, made with the checkpoint
    <checkpoint>/offsets/<batch>     written before the batch begins, and never changed

    v1
    {"batchWatermarkMs": …, "batchTimestampMs": …, "conf": …}
    <offset of source 1, JSON, or "-" for none>
    …

Spark gives a sink only a batch number, which has another meaning after a checkpoint was lost. The
offset record fixes the messages of a batch, so it is the key of a commit. The layout is Spark's own
(the same from 2.1 to 4.3). Another version in its first line is refused.

An offset of a queue also has the start of its batch:

    {"cues": "9f6c…", "from": 1, "to": 5001}                  identity of the queue, from, to (exclusive)
    {"cues": "9f6c…", "from": [1, 1], "to": [3001, 2001]}     the same on each of several partitions

because Spark keeps no start for the first batch. It asks the source again after a restart, and a source that
starts at the latest message would give another answer then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlparse

import xxhash

from cues.errors import Unsupported
from cues.spark.position import (
    CheckpointRange,
    Indices,
    Queues,
    QueueSpan,
    SourceRange,
    read_place,
    widened,
    write_place,
)

_VERSION: Final = "v1"


class Offset(NamedTuple):
    """An offset of a queue of Cues: the range of the queue that a batch reads."""

    identity: bytes
    start: Indices
    end: Indices
    """Exclusive."""

    def to_dict(self) -> dict[str, Any]:
        return {"cues": self.identity.hex(), "from": write_place(self.start), "to": write_place(self.end)}

    @staticmethod
    def of(offset: Any) -> Offset | None:
        """An offset as Spark returns it; None if it belongs to another source."""
        if not isinstance(offset, dict) or set(offset) != {"cues", "from", "to"}:
            return None
        return Offset(bytes.fromhex(offset["cues"]), read_place(offset["from"]), read_place(offset["to"]))


class OffsetRecord(NamedTuple):
    offsets: tuple[str, ...]
    """One JSON text for each source; ``"-"`` for a source without an offset."""
    checksum: bytes
    conf: dict[str, str]
    """The settings of Spark under which the state was begun."""


def range_of(checkpoint: str, batch: int) -> SourceRange:
    """The range of the sources in a batch. Raises :class:`Unsupported` for an unreadable checkpoint."""
    record = read_record(checkpoint, batch)
    if record is None:
        raise Unsupported(
            f"The checkpoint {checkpoint} has no offset record for batch {batch}, so its messages are not known.",
            "use a micro-batch trigger (processingTime or availableNow); other triggers write their offsets later.",
        )
    before = read_record(checkpoint, batch - 1) if batch > 0 else None
    offsets = [_parsed(text) for text in record.offsets]
    if offsets and all(offset is not None for offset in offsets):
        spans = []
        for at, offset in enumerate(offsets):
            assert offset is not None
            last = _parsed(before.offsets[at]) if before is not None else None
            start = widened(last.end, len(offset.end)) if last else offset.start
            spans.append(QueueSpan(offset.identity, start, offset.end))
        return Queues(tuple(spans), record.checksum, batch == 0)
    id = json.loads(_read(checkpoint, "metadata") or b"{}").get("id", "")
    return CheckpointRange(id, batch, record.checksum, before.offsets if before else None, record.offsets)


def read_record(checkpoint: str, batch: int) -> OffsetRecord | None:
    """The offset record of a batch; None if there is none."""
    raw = _read(checkpoint, f"offsets/{batch}")
    return None if raw is None else record_of(checkpoint, raw)


def record_of(checkpoint: str, raw: bytes) -> OffsetRecord:
    """An offset record, from its file. Raises :class:`Unsupported` for another format."""
    lines = raw.decode().splitlines()
    if lines[0] != _VERSION:
        raise Unsupported(
            f"The checkpoint {checkpoint} has offset records of format {lines[0]!r}; this version reads {_VERSION!r}.",
            "install a newer Cues, or a pyspark between 4.2 and 4.3.",
        )
    conf = json.loads(lines[1]).get("conf") or {}
    return OffsetRecord(tuple(lines[2:]), xxhash.xxh3_64_digest(raw), conf)


def _parsed(text: str) -> Offset | None:
    try:
        return Offset.of(json.loads(text))
    except ValueError:
        return None


def _read(checkpoint: str, name: str) -> bytes | None:
    """A file of the checkpoint, on any filesystem; None if it does not exist."""
    url = urlparse(checkpoint)
    if url.scheme in ("", "file"):
        try:
            return (Path(unquote(url.path) if url.scheme else checkpoint) / name).read_bytes()
        except FileNotFoundError:
            return None
    from pyarrow import fs

    system, path = fs.FileSystem.from_uri(checkpoint)
    try:
        with system.open_input_stream(f"{path}/{name}") as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None
