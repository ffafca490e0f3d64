"""Appending messages that were stamped elsewhere, once, even if the append is repeated.

    1. read      the summary of each producer of the log (producers/clocks.py)
    2. decide    which messages the log has already, or does not need
    3. commit    the rest, if the summaries did not change since 1; otherwise start again at 1

A message at or below its producer's last clock is left out. The exception is an acknowledgement while that producer has
pending messages on the log: it tells readers that these are committed, or that their producer died.

So a whole closed log may be appended again, or a file imported again, and nothing changes. Not guaranteed for
messages without a UUID: they are appended every time.
"""

from __future__ import annotations

import itertools
import uuid as uuids
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cues import codec, faults
from cues.base import names
from cues.errors import CuesError, InvalidArgument
from cues.producers import clocks
from cues.producers.clocks import Written
from cues.queues import backpressure
from cues.queues.base import BaseQueue
from cues.records import batch
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.identity import Flags, as_uuid
from cues.records.stamps import Identity
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

_ACK = int(Flags.ACK_TXN)
_EMPTY = codec.pack({})

Pair = tuple[uuids.UUID, dict[str, Any]]
Body = bytes | dict[str, Any]
"""An encoded message; or a dict with ``q/meta``, because that is stored in the header."""


@dataclass(slots=True)
class _EncodedPairs:
    """Messages for one queue: identities, bodies, and the largest clock of the same producer before each."""

    queue: BaseQueue
    identities: list[Identity | None]
    bodies: list[Body]
    before: list[int | None]


def append_stamped(queue: BaseQueue, messages: Iterable[Pair], seen: dict[int, int] | None = None) -> int:
    """Append messages, with UUIDs that were made elsewhere, in one transaction; return how many were appended.

    Messages that the queue has already are left out. The message of an acknowledgement is not kept.
    Raises the errors of :meth:`Appender.write_many`, and :class:`InvalidArgument` for a UUID that does not
    consist of a producer, a clock above 0 and flags; then nothing was written.

    ``seen`` is for one log that is appended in pieces, from its beginning. It is a dict, empty at first, and
    keeps the largest clock of each producer so far. With it, an acknowledgement that the queue has from an
    earlier attempt is left out, even if that attempt was cut off inside a later transaction.
    """
    check_one_log(queue)
    backpressure.await_room([queue])  # not in append_all, which acknowledges: readers wait for acknowledgements
    return append_all(queue.store, [(queue, messages)], seen)


def append_all(
    store: BaseStore, bound: Iterable[tuple[BaseQueue, Iterable[Pair]]], seen: dict[int, int] | None = None
) -> int:
    """Do :func:`append_stamped` for several queues of one store, in one transaction."""
    encoded = [_encode(queue, messages, seen) for queue, messages in bound]
    while True:
        read = _read(store, encoded)
        pages, appended = _decide(encoded, read)
        if not appended:
            return 0
        size = sum(1 + len(page.pieces) for _, of_queue in pages for page in of_queue)
        faults.point("stamped.before")
        if store.core.commit(_write, pages, read, pages=size + len(read)):
            break
    store.core.ring(wakeup.union(queue.core.log.mask for queue, _ in pages))
    return appended


def _encode(queue: BaseQueue, messages: Iterable[Pair], seen: dict[int, int] | None) -> _EncodedPairs:
    check_target(queue)
    bound = _EncodedPairs(queue, [], [], [])
    for offset, (uuid, message) in enumerate(messages):
        try:
            identity = stamping.checked(as_uuid(uuid))
            bound.identities.append(identity)
            bound.before.append(None if seen is None or identity is None else _before(identity, seen))
            acknowledges = identity is not None and identity[2] == _ACK
            bound.bodies.append(_EMPTY if acknowledges else encode(queue, message))
        except CuesError as error:
            error.message = f"messages[{offset}]: {error.message}"
            error.__dict__["offset"] = offset
            raise
    return bound


def _before(identity: Identity, seen: dict[int, int]) -> int:
    """Return the largest clock of the same producer so far; adds the clock of this message to ``seen``."""
    producer, clock, _ = identity
    before = seen.get(producer, 0)
    seen[producer] = max(before, clock)
    return before


def encode(queue: BaseQueue, message: dict[str, Any]) -> Body:
    """Encode a message without its ``q/uuid``; one with metadata stays a dict. Raises as an append does."""
    if isinstance(message, dict) and names.UUID in message:
        message = {key: value for key, value in message.items() if key != names.UUID}
    options = queue.core.options
    return batch.pack_one(message, options.max_message_bytes, options.strips)


def pages_of(queue: BaseQueue, bodies: Sequence[Body], stamps: stamping.Stamps | None) -> list[Page]:
    """Put results of :func:`encode` into pages with stamps."""
    pages: list[Page] = []
    start = 0
    for kind, of_kind in itertools.groupby(bodies, type):
        run: list[Any] = list(of_kind)
        own = None if stamps is None else stamps.slice(start, start + len(run))
        if kind is bytes:
            pages += batch.build((), batch.OWN_BYTES_MAX, encoded=run, stamps=own)
        else:
            pages += batch.build(run, batch.OWN_BYTES_MAX, strips=queue.core.options.strips, stamps=own)
        start += len(run)
    return pages


def check_target(queue: BaseQueue | str) -> None:
    """Raise unless messages with identities may be appended here: to one log that does not belong to a processor."""
    if isinstance(queue, str):
        raise InvalidArgument(
            f"The mapping returned {queue!r}, which is a name, not a queue.",
            "give the mapping queues as partitions: store.matching('…/*'), or a list of store.queue(…).",
        )
    check_one_log(queue)
    queue.core.check_open()
    queue.core.refuse_try_log("writes")


def check_one_log(queue: BaseQueue) -> None:
    """Raise unless ``queue`` is a queue with one log: clocks and acknowledgements count in one log."""
    if not isinstance(queue, BaseQueue):
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "call store.queue('orders').")
    if queue.is_partitioned:
        raise InvalidArgument(
            f"The queue {queue.id!r} has {queue.partitions} partitions, but a transaction is on one log.",
            f"use one of store.matching('{queue.id}/*'), or a mapping over them.",
        )


# 1. Read.


def _read(store: BaseStore, encoded: Sequence[_EncodedPairs]) -> dict[tuple[str, int], Written | None]:
    """Return the summaries of the producers of these messages, by log and producer."""
    store.core.search()  # messages of a producer whose row is lost would be appended again
    keys = {(bound.queue.core.log.id, identity[0]) for bound in encoded for identity in bound.identities if identity}
    with store.core.view() as txn:
        return {key: clocks.read(txn, *key) for key in keys}


# 2. Decide.


def _decide(
    encoded: Sequence[_EncodedPairs], read: dict[tuple[str, int], Written | None]
) -> tuple[list[tuple[BaseQueue, list[Page]]], int]:
    """Return the pages that are to be appended, by queue, and the number of their messages."""
    known = dict(read)
    pages_by_queue: list[tuple[BaseQueue, list[Page]]] = []
    appended = 0
    for bound in encoded:
        log = bound.queue.core.log.id
        kept = [
            place
            for place, (identity, before) in enumerate(zip(bound.identities, bound.before))
            if identity is None or _advance(known, log, identity, before)
        ]
        appended += len(kept)
        pages: list[Page] = []
        for start, stop, stamps in stamping.runs([bound.identities[place] for place in kept], mixes=True):
            pages += pages_of(bound.queue, [bound.bodies[place] for place in kept[start:stop]], stamps)
        if pages:
            pages_by_queue.append((bound.queue, pages))
    return pages_by_queue, appended


def _advance(known: dict[tuple[str, int], Written | None], log: str, identity: Identity, before: int | None) -> bool:
    """Return whether a message is to be appended; if so, add it to ``known``."""
    producer, clock, flags = identity
    written = known[log, producer]
    if written is not None and written.repeats(clock, flags, before):
        return False
    known[log, producer] = clocks.advanced(written, flags, (clock,), 1)  # any index: it is not used
    return True


# 3. Commit.


def _write(
    txn: StoreTransaction, pages: list[tuple[BaseQueue, list[Page]]], read: dict[tuple[str, int], Written | None]
) -> bool:
    if any(clocks.read(txn, *key) != written for key, written in read.items()):
        return False  # messages of the same producers were appended meanwhile: decide again
    for queue, of_queue in pages:
        queue.core.append_pages(txn, of_queue)
    faults.point("stamped.inside")
    return True
