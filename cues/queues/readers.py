"""The known readers of a log: those for which retention and backpressure wait.

A reader is of a :class:`Kind`, and the package of the kind registers it here. This module has the named tailers.

    processors                                   graphs/processor_rows.py
    readers with a position in another store     forwarding/marks.py
    consumer groups                              groups/claims.py

A program that only appends waits for readers of all kinds, whatever it imports and opens itself. So the class of
stores tells where the kinds are (:data:`cues.queues.store.READER_KINDS`), and the first question loads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from cues.base import names
from cues.queues.log import Log
from cues.records.positions import unpack_reader
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction, named_rows


class Reader(NamedTuple):
    """A reader of a log, with its position."""

    kind: Kind
    home: bytes
    """The id of the store that has its position."""
    name: str
    identity: bytes
    """The identity of the log, or of its committed messages, in which the position counts; empty: of the log."""
    next: int
    under_way: bool
    """A step took messages from ``next`` on and has not committed: no policy deletes them."""


def _never(txn: StoreTransaction, store: BaseStore, reader: Reader) -> bool:
    return False


def _nothing(txn: StoreTransaction, log: Log, reader: Reader) -> None:
    return None


class Kind(NamedTuple):
    """A kind of readers. Writers call its functions inside of their transactions, so these must read few rows."""

    name: str
    """One word."""
    of_log: Callable[[StoreTransaction, Log], Iterable[Reader]]
    """Returns every reader of this kind that has a position on the log, also those that do not run."""
    hint: Callable[[Reader, str, str], str]
    """Returns the command that gives up a reader that will never read, from the id of the log and the path of the
    store."""
    expired: Callable[[StoreTransaction, BaseStore, Reader], bool] = _never
    """Returns whether the reader may be forgotten: writers do not wait for it."""
    forget: Callable[[StoreTransaction, Log, Reader], None] = _nothing
    """Deletes the rows of a reader that has expired, and says so in the log."""


_kinds: dict[str, Kind] = {}
"""The registered kinds, by name."""
_sources: list[Callable[[], object]] = []
"""Functions that register further kinds, and were not called yet."""


def register(kind: Kind) -> None:
    """Add a kind to those that every writer of this process waits for."""
    _kinds[kind.name] = kind


def register_later(source: Callable[[], object]) -> None:
    """Call a function that registers kinds before the first question about them."""
    _sources.append(source)


def kinds() -> list[Kind]:
    """Return all kinds. A source is removed after its kinds are registered, because other threads may ask meanwhile."""
    while _sources:
        source = _sources[0]
        source()
        with contextlib.suppress(ValueError):
            _sources.remove(source)
    return list(_kinds.values())


def of_log(txn: StoreTransaction, log: Log) -> Iterator[Reader]:
    """Iterate over the known readers of a log, of all kinds."""
    for kind in kinds():
        yield from kind.of_log(txn, log)


def _tailers(txn: StoreTransaction, log: Log) -> Iterator[Reader]:
    for name, key, raw in named_rows(txn, names.reader_key(log.queue, log.partition, "")):
        at = unpack_reader(key, raw, log.id, name)
        yield Reader(TAILERS, log.store.id, name, at.identity, at.next, False)


def _hint(reader: Reader, log: str, store: str) -> str:
    return f"store.queue({log!r}).tailer({reader.name!r}).to_end()"


TAILERS: Final = Kind("tailer", _tailers, _hint)
"""Named tailers."""
register(TAILERS)
