"""The rows of consumers and publishers (cues/txn), as the others who use a store see them.

    \\0consumer\\0<id>           in each store that a consumer reads: name, checkpoint, fence, positions, other stores
    \\0publisher\\0<producer>    in each store where a publisher has pending messages: its consumer, fence and name

A consumer's position is in its checkpoint, which is perhaps in a database. So it also keeps low-water marks in the
stores that it reads (:mod:`cues.forwarding.marks`), for which retention waits, as a processor of another store
does. The row tells ``cues status`` whose marks these are, and a successor in which stores messages may be pending.

A consumer that runs, and a publisher with pending messages, each hold a lock of the store under their id. So a look
tells whether the process lives, and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from cues import codec
from cues.base import names
from cues.errors import StoreReadOnly
from cues.producers import spans
from cues.producers.spans import Open
from cues.records import sealed
from cues.storage import locks, transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


class ConsumerRow(NamedTuple):
    """A consumer that reads queues of the store."""

    name: str
    checkpoint: str
    """The place of its checkpoint."""
    fence: int
    """The fence of its checkpoint under which the row was written: an earlier owner does not overwrite it."""
    positions: dict[str, int]
    """The indices that it reads next, by log of this store."""
    outputs: tuple[bytes, ...]
    """The ids of other stores in which messages of its instances may be pending."""
    written_ns: int

    def pack(self) -> bytes:
        return codec.pack([*self[:4], list(self.outputs), self.written_ns])

    @staticmethod
    def unpack(key: bytes, raw: bytes, id: str = "") -> ConsumerRow:
        """Decode the row. Raises :class:`StoreDamaged`."""
        form = [str, str, int, {str: int}, [bytes, ...], int]
        name, checkpoint, fence, positions, outputs, written_ns = sealed.unseal_value(
            key, raw, f"row of the consumer {id}", form
        )
        return ConsumerRow(name, checkpoint, fence, positions, tuple(outputs), written_ns)


class PublisherRow(NamedTuple):
    """A publisher that may have pending messages in the store."""

    consumer: bytes
    """The id of the consumer that it belongs to; empty if there is none."""
    fence: int
    """The fence of that consumer's checkpoint."""
    name: str

    def pack(self) -> bytes:
        return codec.pack(list(self))

    @staticmethod
    def unpack(key: bytes, raw: bytes, producer: str = "") -> PublisherRow:
        """Decode the row. Raises :class:`StoreDamaged`."""
        return PublisherRow(*sealed.unseal_value(key, raw, f"row of the publisher {producer}", [bytes, int, str]))


def consumer_lock(id: bytes) -> int:
    """Return the byte of the lock file that a consumer keeps locked while it runs."""
    return locks.offset_of(f"\0consumer\0{id.hex()}")


def publisher_lock(producer: int) -> int:
    """Return the byte of the lock file that a publisher keeps locked from its first pending message on."""
    return locks.offset_of(f"\0publisher\0{producer:012x}")


def holder(store: BaseStore, lock: int) -> int | None:
    """Return the process that holds a lock of the store, also this one; None if there is none."""
    try:
        return os.getpid() if store.core.locks.mine(lock) else store.core.locks.holder(lock)
    except StoreReadOnly:
        return None  # without locks no process can run here


def read(txn: StoreTransaction, id: bytes) -> ConsumerRow | None:
    raw = txn.get(key := names.consumer_key(id.hex()))
    return None if raw is None else ConsumerRow.unpack(key, raw, id.hex())


def consumers(txn: StoreTransaction) -> dict[bytes, ConsumerRow]:
    """Return the consumers that read queues of the store, by id."""
    rows = transaction.named_rows(txn, names.consumer_key(""))
    return {bytes.fromhex(id): ConsumerRow.unpack(key, raw, id) for id, key, raw in rows}


def publishers(txn: StoreTransaction) -> dict[int, PublisherRow]:
    """Return the publishers that may have pending messages in the store, by producer id."""
    rows = transaction.named_rows(txn, names.publisher_key(""))
    return {int(producer, 16): PublisherRow.unpack(key, raw, producer) for producer, key, raw in rows}


def pending(txn: StoreTransaction) -> Iterator[tuple[str, int, Open]]:
    """Iterate over log, producer and row of every transaction that is pending in the store."""
    logs = dict.fromkeys(name.rpartition("\0")[0] for name, *_ in transaction.named_rows(txn, names.OPENS))
    for log in logs:
        for producer, open in spans.opened(txn, log).items():
            yield log, producer, open


def note(txn: StoreTransaction, store: BaseStore, producer: int, row: PublisherRow) -> None:
    """Write the row of a publisher that begins a transaction, if it is not there; remove rows that are over."""
    key = names.publisher_key(f"{producer:012x}")
    if txn.get(key) is None:
        sweep(txn, store)
        sealed.put(txn, key, row.pack())


def sweep(txn: StoreTransaction, store: BaseStore) -> None:
    """Delete the rows of publishers that have nothing pending, and whose process has closed them or is gone."""
    known = publishers(txn)
    used = {producer for _, producer, _ in pending(txn)} if known else set()
    for producer in known:
        if producer not in used and holder(store, publisher_lock(producer)) is None:
            txn.delete(names.publisher_key(f"{producer:012x}"))
