"""The transaction of a store, as the code above ``storage/`` sees it.

A transaction reads and writes rows. Keys and values are bytes; keys are sorted byte by byte. A store has one unnamed
database (the rows of queues, tailers, processors …) and a named one for each log and each state. ``db`` is the
handle of a named database, from :meth:`StoreCore.database`; without it a call means the unnamed database.

:meth:`StoreCore.view` gives a read transaction, :meth:`StoreCore.commit` a write transaction. Both are py-lmdb's own
``Transaction``: nothing is wrapped, because every small append passes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from cues.base import names
from cues.records import sealed


class StoreCursor(Protocol):
    """A position among the keys of one database.

    Duties:

    - It is valid only inside its transaction.
    - A method that moves it returns False if there is no such key, and then :meth:`key` is ``b""``.
    - Iterating gives ``(key, value)`` from the current key on, and begins at the first key of a new cursor.
    """

    def first(self) -> bool: ...

    def last(self) -> bool: ...

    def next(self) -> bool: ...

    def prev(self) -> bool: ...

    def set_key(self, key: bytes) -> bool:
        """Move to exactly this key."""

    def set_range(self, key: bytes) -> bool:
        """Move to the first key that is equal to this one or greater."""

    def key(self) -> bytes: ...

    def value(self) -> bytes: ...

    def item(self) -> tuple[bytes, bytes]: ...

    def delete(self) -> bool:
        """Delete the current key, and move to the next one."""

    def putmulti(
        self, items: Any, dupdata: bool = True, overwrite: bool = True, append: bool = False
    ) -> tuple[int, int]:
        """Write several rows; return how many were consumed, and how many were written."""

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]: ...

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]: ...


class StoreTransaction(Protocol):
    """One transaction on a store: every read sees one moment, and the writes are committed all or not at all.

    Duties:

    - It is used by one thread, and not after :meth:`StoreCore.commit` or the ``with`` block of a view has ended.
    - Only the code that began it commits or aborts it. Other code raises an error to refuse.
    - Writes through a read transaction fail with an error of LMDB.
    - User code is never called while one is open.
    """

    def id(self) -> int:
        """Return the number of this transaction; for a read transaction, of the commit that it sees."""

    def get(self, key: bytes, default: Any = None, db: Any = None) -> Any:
        """Return the value of a key as bytes, or ``default``."""

    def put(
        self,
        key: bytes,
        value: bytes,
        dupdata: bool = True,
        overwrite: bool = True,
        append: bool = False,
        db: Any = None,
    ) -> bool:
        """Write a value.

        Return False, and write nothing, if ``overwrite`` is False and the key exists, or if ``append`` is
        True and the key is not greater than every other key. A caller that appends must check the result.
        """

    def delete(self, key: bytes, value: bytes = b"", db: Any = None) -> bool:
        """Delete a key; return False if there is none."""

    def cursor(self, db: Any = None) -> StoreCursor:
        """Return a new cursor, which is not yet at a key."""

    def stat(self, db: Any) -> dict[str, int]:
        """Return LMDB's figures of a database: ``entries``, and the numbers of its pages by kind."""

    def drop(self, db: Any, delete: bool = True) -> None:
        """Delete every row of a database and, with ``delete``, the database."""


def named_rows(txn: StoreTransaction, prefix: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """:func:`rows`, each after the rest of its key as text."""
    return ((key[len(prefix) :].decode(errors="backslashreplace"), key, value) for key, value in rows(txn, prefix))


def refuse_lost(txn: StoreTransaction) -> None:
    """Raise :class:`StoreDamaged` if some row of the store is not under its own key.

    One wrong bit in a key hides the row: a search finds nothing, and a start that then begins anew would repeat
    messages, or run a processor that is paused. The bit may hide other rows too, because a search is misled by a key
    that is out of order. So this walks over all rows, and does not ask which of them somebody misses. It sees one
    moment of the store: a row that another process writes is under its key in every moment.

    The time is that of all rows, about 1 µs each. So it is called when a reader or a writer begins, and not in a step
    (:meth:`StoreCore.search` looks once in each opening of a store).
    """
    before = b""
    for key, row in txn.cursor():
        if key <= before:
            raise sealed.damaged(f"row {key!r}", f"it is after {before!r}, so a search does not find all rows")
        before = key
        if not (sealed.is_under_its_key(key, row) if key[:1] == b"\0" else key.startswith(names.DATABASES)):
            if (own := sealed.key_of(key, row)) is not None:
                raise sealed.damaged(f"row {own!r}", f"it is under the key {key!r}")
            raise sealed.damaged(f"row {key!r}", "its checksum is not that of its key and its bytes")


def rows(txn: StoreTransaction, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over the rows of the unnamed database whose keys begin with ``prefix``."""
    cursor = txn.cursor()
    if cursor.set_range(prefix):
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value
