"""What one store keeps about another: where it lies, what came from it, how far its readers are.

    \\0store      in the home store: where another store lies that graphs of this one use
    \\0producer   in the other store: up to which step the fork queue of a processor was forwarded
    \\0low        in the other store: up to where a reader is whose position lies in its home store

A position is where it commits, in the home store. The other store must still know that somebody
reads its queue, or retention would let go of what was not read; so the reader leaves a low-water
mark there. It lags behind the position on purpose: it is written after the position is durable, so
that no power cut takes a position back to before what was let go.

Not guaranteed: that a mark is new. It is written about once a second, and when there is nothing to do.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues import batch, codec, faults, names
from cues.errors import StoreError, StoreNotFound

if TYPE_CHECKING:
    from cues.log import Log
    from cues.queue import Queue
    from cues.store import Store

_CHECKSUM_BYTES: Final = 8


# --- where other stores lie ---------------------------------------------------------------------


def remember(home: Store, other: Store) -> None:
    """Write down in the home store where another one lies, if it is not there yet."""
    key = names.store_key(other.id)
    place = os.path.realpath(other.path)
    # Relative first: a folder that holds both may be moved.
    packed = codec.pack({"path": os.path.relpath(place, os.path.realpath(home.path)), "absolute": place})
    with home.view() as txn:
        known = txn.get(key)
    if known != packed:
        home.commit(lambda txn: txn.put(key, packed))


def places(home: Store) -> dict[bytes, list[Path]]:
    """Where the other stores of a store lie, as far as it knows, by their ids; the likeliest place first."""
    prefix = names.store_key(b"")
    found: dict[bytes, list[Path]] = {}
    with home.view() as txn:
        for key, value in home.rows(txn, prefix):
            record = codec.unpack(value)
            relative = Path(os.path.normpath(os.path.join(os.path.realpath(home.path), record["path"])))
            found[bytes.fromhex(key[len(prefix) :].decode())] = [relative, Path(record["absolute"])]
    return found


@contextmanager
def opened(home: Store, id: bytes, readonly: bool = True) -> Iterator[Store]:
    """Another store by its id. Raises :class:`StoreNotFound` where it is not where it was."""
    found = places(home).get(id, [])
    for place in found:
        if (place / "data.mdb").exists():
            with type(home)(place, readonly=readonly) as store:
                if store.id == id:
                    yield store
                    return
    raise StoreNotFound(
        f"The store {id.hex()} is not {f'at {found[0]} any more' if found else 'known'}.",
        "the place where it was, or cues run with a graph that says where it is.",
        path=str(found[0]) if found else "",
    )


class Others:
    """The other stores of a store, opened read-only when they are asked for, and closed together."""

    def __init__(self, home: Store) -> None:
        self._home = home
        self._opened = ExitStack()
        self._known: dict[bytes, Store | None] = {}

    def get(self, id: bytes) -> Store | None:
        """The store of that id (the home store for an empty one); None where it cannot be had."""
        if not id:
            return self._home
        if id not in self._known:
            try:
                self._known[id] = self._opened.enter_context(opened(self._home, id))
            except StoreError:
                self._known[id] = None
        return self._known[id]

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


# --- what was forwarded -------------------------------------------------------------------------

_PRODUCER: Final = struct.Struct(">Q16s8s")


class ProducerRow(NamedTuple):
    """How far a fork queue was forwarded: its last step, as it was there, and what it became here."""

    at: int
    """The index of the step's first record on the fork queue."""
    hash: bytes
    """The delivery hash of the step."""
    seal: bytes
    """The checksum of that record, which holds its time: no other step has it, not even a repetition."""
    ends: dict[str, int]
    """Index of the last message appended, by queue."""

    def pack(self) -> bytes:
        raw = _PRODUCER.pack(self.at, self.hash, self.seal) + codec.pack(self.ends)
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> ProducerRow:
        at, hash, seal = _PRODUCER.unpack_from(raw)
        return ProducerRow(at, hash, seal, codec.unpack(raw[_PRODUCER.size : -_CHECKSUM_BYTES]))


def intact(raw: bytes) -> bool:
    """Whether a producer's row, or a low-water mark, has the checksum that it was written with."""
    return len(raw) > _CHECKSUM_BYTES and batch.checksum(raw[:-_CHECKSUM_BYTES]) == raw[-_CHECKSUM_BYTES:]


# --- how far readers are ------------------------------------------------------------------------

_LOW: Final = struct.Struct(">QQB")


class Mark(NamedTuple):
    """A low-water mark."""

    epoch: int
    """Of the reader's owner: one that was taken over does not write over its follower's mark."""
    next: int
    """What is before this index has been read, and durably so."""
    pending: bool
    """A step took messages from there on and may be repeated: no policy lets go of them."""

    def pack(self) -> bytes:
        raw = _LOW.pack(*self)
        return raw + batch.checksum(raw)

    @staticmethod
    def unpack(raw: bytes) -> Mark:
        epoch, next, pending = _LOW.unpack_from(raw)
        return Mark(epoch, next, bool(pending))


@dataclass(frozen=True)
class Reader:
    """A processor as the other store knows it."""

    home: bytes
    """Id of the store that its position lies in."""
    processor: str
    epoch: int


def marks(txn: Any, log: Log) -> list[tuple[Reader, Mark]]:
    """The marks on a log, with the reader that each is of."""
    prefix = names.low_water_prefix(log.id)
    found = []
    for key, value in type(log.store).rows(txn, prefix):
        home, _, processor = key[len(prefix) :].decode().partition("/")
        mark = Mark.unpack(value)
        found.append((Reader(bytes.fromhex(home), processor, mark.epoch), mark))
    return found


class LowWater:
    """The low-water mark of one processor on one queue of another store.

    Its processor's thread calls :meth:`hold` and :meth:`release`, the forwarder's thread the rest.
    """

    def __init__(self, queue: Queue, reader: Reader, holding: bool = False) -> None:
        self.queue = queue
        self.reader = reader
        self._key = names.low_water_key(queue.log.id, reader.home, reader.processor)
        self._holding = holding
        self._guard = threading.Lock()
        with queue.store.view() as txn:
            raw = txn.get(self._key)
        self._written = None if raw is None else Mark.unpack(raw)

    def renew(self, epoch: int) -> None:
        """The reader's epoch was raised (a seek, which has written a mark of its own)."""
        with self._guard:
            self.reader = replace(self.reader, epoch=epoch)
            self._holding = False
            with self.queue.store.view() as txn:
                raw = txn.get(self._key)
            self._written = None if raw is None else Mark.unpack(raw)

    @property
    def epoch(self) -> int | None:
        """Of the mark that is there; None where there is none."""
        return None if self._written is None else self._written.epoch

    def begin(self, index: int) -> None:
        """Make the mark, at the start of the reader's first step, if there is none."""
        if self._written is None:
            self._write(Mark(self.reader.epoch, index, self._holding))

    def hold(self, start: int) -> None:
        """Before a snapshot commits at home: from here on policies let go of nothing that it names.

        Costs a commit in the other store when it was not held before, and nothing where the queue has
        no policy.
        """
        with self._guard:
            self._holding = True
            written = self._written
            held = written is not None and written.pending and written.next <= start
            if self.queue.options.retention is not None and not held:
                self._write(Mark(self.reader.epoch, min(start, written.next) if written else start, True))

    def release(self) -> None:
        """No step is under way. The mark says so when it is written next."""
        self._holding = False

    def publish(self, index: int) -> None:
        """Write that everything before ``index`` has been read, which must be durable at home."""
        with self._guard:
            if self.outdated(index):
                self._write(Mark(self.reader.epoch, index, self._holding))

    def outdated(self, index: int) -> bool:
        """Whether :meth:`publish` would write."""
        return Mark(self.reader.epoch, index, self._holding) != self._written

    def _write(self, mark: Mark) -> None:
        self.queue.store.commit(self._put, mark)
        self._written = mark

    def _put(self, txn: Any, mark: Mark) -> None:
        raw = txn.get(self._key)
        if raw is None or Mark.unpack(raw).epoch <= mark.epoch:
            txn.put(self._key, mark.pack())
        if faults.active:
            faults.point("mark.inside")


def lower_mark(store: Store, log_id: str, reader: Reader, index: int) -> None:
    """A reader goes back to ``index``, under a new epoch: what is there must be kept again.

    A mark that is lower still stays where it is: it is what is durable at home.
    """
    key = names.low_water_key(log_id, reader.home, reader.processor)

    def put(txn: Any) -> None:
        raw = txn.get(key)
        before = Mark(0, index, False) if raw is None else Mark.unpack(raw)
        txn.put(key, Mark(reader.epoch, min(index, before.next), before.pending).pack())

    store.commit(put)


def drop_mark(store: Store, log_id: str, reader: Reader) -> None:
    """Forget a reader that reads no more."""
    store.commit(lambda txn: txn.delete(names.low_water_key(log_id, reader.home, reader.processor)))


def forget(store: Store, processor: str = "", home: bytes = b"") -> list[str]:
    """Forget a processor of other stores, or all of one other store, that is gone for good: what it read and forwarded.

    Returns their ids, behind that of their store. One that comes back reads on; what it forwards is
    refused where its fork queue was trimmed, and comes once more where it was not.
    """

    def drop(txn: Any) -> set[str]:
        found: dict[bytes, str] = {}
        for prefix in (names.LOW_WATERS, names.PRODUCERS):
            for key, _ in store.rows(txn, prefix):
                whose = key[len(prefix) :].rpartition(b"\0")[2].decode()
                if (processor and whose.endswith(f"/{processor}")) or (home and whose.startswith(f"{home.hex()}/")):
                    found[key] = whose
        for key in found:
            txn.delete(key)
        return set(found.values())

    return sorted(store.commit(drop))
