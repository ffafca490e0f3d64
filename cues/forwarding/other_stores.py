"""The rows that one store keeps about another store.

    \\0store      in the home store: the path of another store that its graphs use
    \\0producer   in the other store: the last step that was forwarded from the fork queue of a processor
    \\0low        in the other store: the low-water mark of a reader whose position is in its home store

A position is stored where it commits, in the home store. The other store must still know the reader, or retention
would delete messages before they are read. So the reader writes a low-water mark there. The mark is written after
the position is durable, and so it is often lower than the position: a power cut cannot move the position back to
messages that were deleted.

Not guaranteed: that a mark is recent. It is written about once a second, and when there is nothing to do.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from cues import codec
from cues.base import names
from cues.base.closing import Closing
from cues.errors import StoreError, StoreNotFound
from cues.forwarding.marks import CONSUMER
from cues.overrides import override
from cues.records import sealed
from cues.storage import transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction


def remember(home: BaseStore, other: BaseStore) -> None:
    """Write the path of another store into the home store, if it is not there yet."""
    key = names.store_key(other.id)
    body = _place_row(home.path, other.path)
    with home.core.view() as txn:
        known = txn.get(key)
    if known != sealed.seal(key, body):
        home.core.commit(lambda txn: sealed.put(txn, key, body))


def move(txn: StoreTransaction, place: Path, others: Mapping[bytes, Path]) -> None:
    """Write the new paths of other stores, by their ids, into the store at ``place``, if it knows them."""
    for id, other in others.items():
        if txn.get(names.store_key(id)) is not None:
            sealed.put(txn, names.store_key(id), _place_row(place, other))


def _place_row(home: str | Path, other: str | Path) -> bytes:
    place = os.path.realpath(other)
    # Relative first: a folder that holds both may be moved.
    return sealed.pack_map({"path": os.path.relpath(place, os.path.realpath(home)), "absolute": place})


def unpack_place(store: str, key: bytes, raw: bytes) -> dict[str, str]:
    """Decode the row with the paths of another store. Raises :class:`StoreDamaged`."""
    what = f"row of the path of the store {store}"
    record: dict[str, str] = sealed.formed(sealed.unseal_map(key, raw, what), what, {"path": str, "absolute": str})
    return record


def places(home: BaseStore) -> dict[bytes, list[Path]]:
    """Return the known paths of the other stores of a store, by their ids; the most probable path first."""
    paths: dict[bytes, list[Path]] = {}
    with home.core.view() as txn:
        for id, key, value in transaction.named_rows(txn, names.store_key(b"")):
            record = unpack_place(id, key, value)
            relative = Path(os.path.normpath(os.path.join(os.path.realpath(home.path), record["path"])))
            paths[bytes.fromhex(id)] = [relative, Path(record["absolute"])]
    return paths


@contextmanager
def opened(home: BaseStore, id: bytes, readonly: bool = True) -> Iterator[BaseStore]:
    """Open another store by its id. Raises :class:`StoreNotFound` when it is at none of the known paths."""
    paths = places(home).get(id, [])
    for place in paths:
        if (place / "data.mdb").exists():
            with type(home)(place, readonly=readonly) as store:
                if store.id == id:
                    yield store
                    return
    raise StoreNotFound(
        f"The store {id.hex()} is not {f'at {paths[0]} any more' if paths else 'known'}.",
        "put the store back there, or run (cues run) a graph that names its new path.",
        path=str(paths[0]) if paths else "",
    )


class Others(Closing):
    """The other stores of a store: opened read-only on first use, closed together."""

    def __init__(self, home: BaseStore) -> None:
        self._home = home
        self._opened = ExitStack()
        self._known: dict[bytes, BaseStore | None] = {}

    def get(self, id: bytes) -> BaseStore | None:
        """Return the store with that id (the home store for an empty id); None if it cannot be opened."""
        if not id:
            return self._home
        if id not in self._known:
            try:
                self._known[id] = self._opened.enter_context(opened(self._home, id))
            except StoreError:
                self._known[id] = None
        return self._known[id]

    @override
    def close(self) -> None:
        self._opened.close()


_PRODUCER: Final = struct.Struct(">Q16s8s")


class ProducerRow(NamedTuple):
    """The last forwarded step of a fork queue, and the messages that were appended from it."""

    at: int
    """The index of the first record of the step on the fork queue."""
    hash: bytes
    """The delivery hash of the step."""
    seal: bytes
    """The checksum of that record. It covers the commit time, so not even a repetition of the step has the same."""
    ends: dict[str, int]
    """The index of the last appended message, by queue."""

    def pack(self) -> bytes:
        return _PRODUCER.pack(self.at, self.hash, self.seal) + codec.pack(self.ends)

    @staticmethod
    def unpack(key: bytes, raw: bytes) -> ProducerRow:
        """Decode the row. Raises :class:`StoreDamaged`."""
        what = "row of the last step that a processor of another store forwarded"
        body = sealed.unseal(key, raw, what)
        if len(body) < _PRODUCER.size:
            raise sealed.damaged(what, f"it has {len(body)} bytes")
        at, hash, seal = _PRODUCER.unpack_from(body)
        return ProducerRow(at, hash, seal, sealed.value_of(body[_PRODUCER.size :], what, {str: int}))


def strangers(txn: StoreTransaction) -> dict[bytes, str]:
    """Return the rows of processors of other stores that read or write here: key, ``<id of the store>/<processor>``."""
    found: dict[bytes, str] = {}
    for prefix in (names.LOW_WATERS, names.PRODUCERS):
        for key, _ in transaction.rows(txn, prefix):
            found[key] = key[len(prefix) :].rpartition(b"\0")[2].decode()
    return {key: name for key, name in found.items() if not name.partition("/")[2].startswith(CONSUMER)}


def forget(store: BaseStore, processor: str = "", home: bytes = b"") -> list[str]:
    """Delete the rows of a removed processor of another store, or of all processors of the store ``home``.

    ``processor`` is its key after the id of its store: ``<id>/shop.save``. Returns the names of this form whose rows
    were deleted. If such a processor runs again, it continues to read. If its fork queue was trimmed, its forwarded
    messages are refused; otherwise they are appended again.
    """

    def drop(txn: StoreTransaction) -> set[str]:
        deleted = {
            key: name
            for key, name in strangers(txn).items()
            if name == processor or (home and name.startswith(f"{home.hex()}/"))
        }
        for key in deleted:
            txn.delete(key)
        return set(deleted.values())

    return sorted(store.core.commit(drop))
