"""The transaction of a store, as the code above ``storage/`` sees it.

A transaction reads and writes rows. Keys and values are bytes; keys are sorted byte by byte. A store has one unnamed
database (the rows of queues, tailers, processors …) and a named one for each log and each state. ``db`` is the
handle of a named database, from :meth:`StoreCore.database`; without it a call means the unnamed database.

:meth:`StoreCore.view` gives a read transaction, :meth:`StoreCore.commit` a write transaction. Both are py-lmdb's own
``Transaction``: nothing is wrapped, because every small append passes through here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

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


def refuse_lost(txn: StoreTransaction, wanted: Mapping[bytes, str]) -> None:
    """Raise :class:`StoreDamaged` if a row that a search does not find is there under another key.

    ``wanted`` has the keys of such rows, and what each is. One wrong bit in a key hides the row. A start that then
    begins anew would repeat all that the row says is done. This looks at all rows of the store, so it is called when
    a reader or a writer begins, and not in a step.
    """
    if not wanted:
        return
    lengths = set(map(len, wanted))
    for other, row in txn.cursor():
        if len(other) in lengths and (other in wanted or not sealed.belongs(other, row)):
            for key, what in wanted.items():
                # Not under its own key: another process may have written the row since the search.
                if key != other and len(key) == len(other) and sealed.belongs(key, row):
                    raise sealed.damaged(what, f"it is under the key {other!r}")


def rows(txn: StoreTransaction, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over the rows of the unnamed database whose keys begin with ``prefix``."""
    cursor = txn.cursor()
    if cursor.set_range(prefix):
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value
