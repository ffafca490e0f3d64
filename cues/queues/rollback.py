"""Rolling back the pending messages of a producer that is gone.

A publisher notes a deadline with the first pending message of a transaction in a log (``transaction_timeout_s``). After
the deadline any reader of committed messages, and any publisher that writes to the log, rolls the transaction back: it
appends an acknowledgement with the clock before the transaction, which drops the messages.

The fence is in the transactions of the store. The publisher that wakes up later looks, inside each append and before
its acknowledgements may be committed anywhere (:meth:`cues.txn.Publisher.build_ack_intents`), whether its transaction
is still the one that it began. If not, it gets :class:`Fenced`, and no reader sees anything of the transaction.

Not guaranteed: that messages are rolled back whose acknowledgements were built. From then on the checkpoint that holds
the acknowledgements decides, and nobody else can know it: :meth:`cues.txn.Publisher.roll_back`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Final

from cues import codec, faults
from cues.base import clock, logs
from cues.base.events import log
from cues.errors import CuesError, Fenced
from cues.producers import clocks, spans
from cues.queues.base import BaseQueue
from cues.records import batch
from cues.records.identity import Flags
from cues.records.stamps import Stamps, ticks
from cues.storage.transaction import StoreTransaction

LOOK_S: Final = 1.0
"""A reader at the end of a log looks for pending messages of dead producers at this interval, in seconds."""

_ACK: Final = int(Flags.ACK_TXN)
_EMPTY: Final = codec.pack({})


def roll_back(txn: StoreTransaction, queue: BaseQueue, producer: int, fences: bool = False) -> bool:
    """Drop the pending messages of a producer in a log; return False if it has none. The caller rings.

    ``fences``: the producer may be alive; it then gets :class:`Fenced`.
    """
    written = clocks.read(txn, queue.core.log.id, producer)
    if written is None or not written.begin:
        return False
    stamps = Stamps(producer, _ACK, ticks(written.acked, 1))
    queue.core.append_pages(txn, batch.build((), batch.OWN_BYTES_MAX, encoded=[_EMPTY], stamps=stamps))
    if fences:
        spans.put_open(txn, queue.core.log.id, producer, spans.Open(written.begin, 0, spans.ROLLED_BACK))
    return True


def expire(txn: StoreTransaction, queue: BaseQueue) -> int:
    """Roll back the transactions of a log whose deadline has passed; return their number."""
    gone = list(spans.expired(txn, queue.core.log.id, clock.now_ns()))
    for producer in gone:
        roll_back(txn, queue, producer, fences=True)
        told = "%s: the pending messages of publisher %012x were rolled back: its transaction_timeout_s has passed"
        about = {**logs.of_log(queue.core.log.id), "producer": f"{producer:012x}"}
        queue.store.core.afterwards.append(functools.partial(log.warning, told, queue.id, producer, **about))
    if gone:
        faults.point("expire.inside")
    return len(gone)


def look(queue: BaseQueue) -> None:
    """Roll back expired transactions, as a reader at the end of the log; at most every :data:`LOOK_S`."""
    now = time.monotonic()
    if now < queue.core.look_at or queue.store.readonly:
        return
    queue.core.look_at = now + LOOK_S
    with queue.store.core.view() as txn:
        gone = any(spans.expired(txn, queue.core.log.id, clock.now_ns()))
    if gone:
        with contextlib.suppress(CuesError):  # a reader does not fail because it cannot write; another one will
            queue.store.core.commit(expire, queue)
            queue.store.core.ring(queue.core.log.mask)


def fence(txn: StoreTransaction, queue: BaseQueue, producer: int, begin: int) -> None:
    """Raise :class:`Fenced` if the transaction that the producer began at ``begin`` was rolled back by another."""
    open = spans.read_open(txn, queue.core.log.id, producer)
    if open is not None and open.begin == begin and open.size == spans.ROLLED_BACK:
        raise Fenced(
            f"The transaction of publisher {producer:012x} in {queue.id!r}, pending from {begin} on, was rolled back:"
            " transaction_timeout_s has passed, or roll_back() was called.",
            "call abort() and publish the messages again; or set a longer transaction_timeout_s.",
            processor=f"{producer:012x}",
            reason="timeout",
        )


def decide(txn: StoreTransaction, queue: BaseQueue, producer: int) -> None:
    """Remove the deadline of a pending transaction: from now on its owner's checkpoint decides."""
    open = spans.read_open(txn, queue.core.log.id, producer)
    if open is not None and open.size != spans.ROLLED_BACK:
        spans.put_open(txn, queue.core.log.id, producer, open._replace(deadline_ns=0))
