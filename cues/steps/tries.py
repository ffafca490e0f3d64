"""The records of a step in its processor's try log: a snapshot and an attempt.

    snapshot        the processor, and the index of each tailer before and after the step
    attempt         the hash of the taken messages, and the index of the first message written, by queue
    nil-attempt     an attempt without outputs
    error-attempt   an attempt that wrote an error message

A step without side effects writes both as one record; readers of the log still see two messages.
A step with side effects commits its snapshot before the function runs. The record of a snapshot
has the delivery hash in its header, where recovery reads it.
"""

from __future__ import annotations

import os
import re
import struct
from binascii import hexlify
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from cues import codec
from cues.base import names
from cues.base.names import ProcessorId
from cues.graphs.processor_rows import key_of
from cues.native import mypyc_attr
from cues.queues.queue import Queue, open_queue
from cues.records import batch as batches
from cues.records.batch import Batch, Page
from cues.storage.base_store import BaseStore

KEEP_MESSAGES: Final = 1024
"""Least number of messages in a try log: two for each step, so the last 256 steps with room for retries."""
FORMS_MAX: Final = 256
"""Most cached forms: steps over several partitions write to any of them, so forms are many."""
TRIM_MESSAGES: Final = 512
"""Messages that are trimmed at a time: a deletion at every step would double a step's cost."""


_BODY_BYTES_MAX: Final = batches.VALUE_BYTES_MAX - batches.PREFIX_BYTES - 16
# Drawn at random, so that names of queues do not contain it.
_HOLE: Final = 1 << 63 | int.from_bytes(os.urandom(8), "big")
_HOLE_BYTES: Final = codec.pack(_HOLE)[1:]  # without msgpack's mark of an unsigned 64-bit integer
_HASH_HOLE: Final = os.urandom(16)
_HASH_HOLE_BYTES: Final = _HASH_HOLE.hex().encode()
_HOLES: Final = re.compile(b"(" + re.escape(_HOLE_BYTES) + b"|" + _HASH_HOLE_BYTES + b")", re.DOTALL)


class Snapshot(NamedTuple):
    """A snapshot, as recovery reads it."""

    start: dict[str, int]
    """Index by tailer id, of the tailers that the step read."""
    end: dict[str, int]
    tailer: str | None
    """The tailer that a step of AnyOf chose."""
    source: tuple[Any, Any] | None
    hash: bytes


class Attempt(NamedTuple):
    """An attempt as recovery reads it."""

    kind: str
    hash: str
    indices: dict[str, int]
    """Index of the step's first message, by queue id."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Taking:
    """The messages that a step took, for its snapshot."""

    __slots__ = ("chosen", "ends", "source", "starts", "tailers")

    def __init__(
        self,
        tailers: Sequence[str],
        starts: Sequence[int],
        ends: Sequence[int],
        chosen: str | None = None,
        source: tuple[Any, Any] | None = None,
    ) -> None:
        """``chosen``: the tailer that a step of AnyOf chose. ``source``: a source's position before and after."""
        self.tailers = tailers
        self.starts = starts
        self.ends = ends
        self.chosen = chosen
        self.source = source


class TryRecords:
    """Makes the records of one processor's try log."""

    def __init__(self, processor: str) -> None:
        self._processor = processor
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def snapshot(self, taking: Taking, digest: bytes) -> list[Page]:
        """The record that is committed before a function with side effects runs."""
        return batches.build([self._snapshot(taking)], batches.OWN_BYTES_MAX, digest, reserved=True)

    def step(
        self,
        taking: Taking,
        digest: bytes,
        indices: dict[str, int],
        failed: bool,
        pending: dict[str, int] | None = None,
    ) -> list[Page]:
        """The record of a whole step; ``indices`` has its first written index by queue id, ``pending`` by journal."""
        if taking.source is None and not pending:
            key = (*taking.tailers, None, taking.chosen, *indices, failed)
            try:
                form = self._forms[key]
            except KeyError:
                if len(self._forms) >= FORMS_MAX:
                    self._forms.clear()
                holes = [_HOLE] * len(taking.tailers)
                maps = [
                    self._snapshot(Taking(taking.tailers, holes, holes, taking.chosen)),
                    _attempt(_HASH_HOLE, dict.fromkeys(indices, _HOLE), failed),
                ]
                form = self._forms[key] = _Form(maps)
            if form.fits:
                form.pieces[1::2] = *taking.starts, *taking.ends, hexlify(digest), *indices.values()
                body = form.pack(*form.pieces)
                return [Page(batches.HASH, 2, digest + body)]
        maps = [self._snapshot(taking), _attempt(digest, indices, failed, pending)]
        return batches.build(maps, batches.OWN_BYTES_MAX, digest, reserved=True)

    def _snapshot(self, taking: Taking) -> dict[str, Any]:
        fields: dict[str, Any] = {
            names.TYPE: names.SNAPSHOT,
            names.PROCESSOR_ID: self._processor,
            names.TAILER_INDICES: dict(zip(taking.tailers, taking.starts)),
            names.TO_INDICES: dict(zip(taking.tailers, taking.ends)),
        }
        if taking.chosen is not None:
            fields[names.TAILER_ID] = taking.chosen
        if taking.source is not None:
            fields[names.SOURCE_POSITION] = list(taking.source)
        return fields


def _attempt(
    hash: bytes, indices: dict[str, int], failed: bool, pending: dict[str, int] | None = None
) -> dict[str, Any]:
    if failed:
        kind = names.ERROR_ATTEMPT
    else:
        kind = names.ATTEMPT if indices or pending else names.NIL_ATTEMPT
    fields: dict[str, Any] = {names.TYPE: kind, names.HASH: hash.hex()}
    if indices:
        fields[names.MESSAGE_INDEX] = indices
    if pending:
        fields[names.PENDING_INDEX] = pending
    return fields


class _Form:
    """Snapshot and attempt as msgpack with holes for the numbers and the hash.

    Only these change from step to step, and to pack the maps again costs more than the message of a small
    step. Numbers are filled in at a fixed width (msgpack's unsigned 64 bits).
    """

    def __init__(self, maps: list[dict[str, Any]]) -> None:
        layout = ">"
        self.pieces: list[Any] = []
        """In turns the bytes before a hole, and what fills it: numbers of the snapshot, hash, indices of an attempt."""
        for piece in filter(None, _HOLES.split(codec.pack(maps))):  # there are always bytes between two holes
            if piece == _HOLE_BYTES:
                layout += "Q"
            elif piece == _HASH_HOLE_BYTES:
                layout += "32s"
            else:
                layout += f"{len(piece)}s"
            self.pieces.append(piece)
        body = struct.Struct(layout)
        self.pack: Callable[..., bytes] = body.pack
        self.fits = body.size <= _BODY_BYTES_MAX
        """True if the body fits one page."""


def last(batches: Sequence[Batch]) -> tuple[Snapshot | None, Attempt | None]:
    """The last snapshot of a log and the last attempt after it, from its last records in order."""
    found_snapshot: Snapshot | None = None
    found_attempt: Attempt | None = None
    for batch in batches:
        for message in batch.messages():
            kind = message.get(names.TYPE)
            if kind == names.SNAPSHOT:
                source = message.get(names.SOURCE_POSITION)
                found_snapshot = Snapshot(
                    message[names.TAILER_INDICES],
                    message[names.TO_INDICES],
                    message.get(names.TAILER_ID),
                    tuple(source) if source is not None else None,
                    batch.head.hash or b"",
                )
                found_attempt = None
            elif kind in (names.ATTEMPT, names.NIL_ATTEMPT, names.ERROR_ATTEMPT):
                found_attempt = Attempt(kind, message[names.HASH], message.get(names.MESSAGE_INDEX, {}))
    return found_snapshot, found_attempt


def open_named(store: BaseStore, name: str) -> Queue:
    """Open a queue by its name, or the try log of a processor by the id of the processor.

    The name of a try log is the key of its processor, which is another one after a rename.
    """
    with store.core.view() as txn:
        return open_queue(store, key_of(txn, ProcessorId(name)) if "." in name else name)
