"""Rows with a checksum: all data of a store except messages and state.

    row      body, checksum of the body (8 bytes, xxh3-64), whose seed is the checksum of the key
    map      0xc1, msgpack of a map, and the same checksum. No msgpack begins with that byte: a row without it was
             written by a version without seals

The seed makes the checksum cover the key, because a name is often nowhere else: with one wrong bit there, the row of
one producer would be a right row of another. So every function here takes the key, or its seed. No other module makes a
checksum of a row, except for the row of a log at each append (tests/test_sealed.py).

:func:`put` writes a row. :func:`unseal` reads it, and raises :class:`StoreDamaged` if the checksum is wrong.
:func:`intact` tests the checksum. A row with a wrong checksum is never used: one wrong bit in a position would lose
messages or repeat them.

Earlier versions made the checksum of the body alone. Such a row is read too, and :func:`renewed` when a store is opened
for writing. This hides no damage of a row of today: its checksum is not that of its body.

A row with the right checksum can have another form than any version wrote, after a mistake in a program. So rows of
msgpack are read with their form (:func:`unseal_value`), and rows of other bytes have a length (:func:`unseal_fields`).
Each raises the same error as a wrong checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import xxhash

from cues import codec
from cues.base import names
from cues.base.texts import quoted
from cues.errors import StoreDamaged
from cues.records import batch

CHECKSUM_BYTES: Final = 8
BARE: Final = {names.CHECKPOINTS: 8, names.READERS: 24}
"""The lengths, in bytes, of rows that an earlier version wrote without a checksum."""
_MAP: Final = b"\xc1"
_UNSEALED: Final = (names.QUEUES, names.TOPOLOGIES, names.STORES)
"""The kinds of rows with a map that an earlier version wrote without a checksum."""

Form: TypeAlias = Any
"""The form of a value of msgpack: see :func:`fits`."""


def seed_of(key: bytes) -> int:
    """Return the seed of the checksums of a key's rows.

    The writer of a row that each step writes keeps it, so the key costs nothing there.
    """
    return xxhash.xxh3_64_intdigest(key)


def seal_by(seed: int, body: bytes) -> bytes:
    """Return the row with this body of the key that has this seed (:func:`seed_of`)."""
    return body + batch.checksum(body, seed)


def seal(key: bytes, body: bytes) -> bytes:
    """Return the row of a key with this body."""
    return body + batch.checksum(body, seed_of(key))


def put(txn: Any, key: bytes, body: bytes, db: Any = None) -> bytes:
    """Write the row of a key with this body, and return it."""
    row = seal(key, body)
    txn.put(key, row, True, True, False, db)
    return row


def intact(key: bytes, row: bytes) -> bool:
    """Return whether the row of a key has the checksum that it was written with."""
    body, checksum = row[:-CHECKSUM_BYTES], row[-CHECKSUM_BYTES:]
    return bool(body) and (batch.checksum(body, seed_of(key)) == checksum or batch.checksum(body) == checksum)


def belongs(key: bytes, row: bytes) -> bool:
    """Return whether a row was written under this key. A row of an earlier version does not tell."""
    return len(row) > CHECKSUM_BYTES and seal(key, row[:-CHECKSUM_BYTES]) == row


def is_under_its_key(key: bytes, row: bytes) -> bool:
    """Return whether a row of the unnamed database can be the row of this key. One without a checksum does not tell."""
    kind = key[: key.find(b"\0", 1) + 1]
    if not row:
        return kind == names.SUBSCRIPTIONS
    if key == names.FORMAT_KEY or len(row) == BARE.get(kind):
        return True
    return intact(key, row) or (kind in _UNSEALED and row[:1] != _MAP)


def key_of(key: bytes, row: bytes) -> bytes | None:
    """Return the key of a row that is under a key with one wrong bit; None for another row."""
    return next((own for own in with_one_bit_changed(key) if belongs(own, row)), None)


def with_one_bit_changed(key: bytes) -> Iterator[bytes]:
    """Iterate over the keys from which a key differs in one bit."""
    number = int.from_bytes(key, "big")
    return ((number ^ 1 << bit).to_bytes(len(key), "big") for bit in range(8 * len(key)))


def renewed(key: bytes, row: bytes) -> bytes | None:
    """Return a row of an earlier version with the checksum of today; None if it has that, or none that is right."""
    body, checksum = row[:-CHECKSUM_BYTES], row[-CHECKSUM_BYTES:]
    return seal(key, body) if body and batch.checksum(body) == checksum else None


def unseal(key: bytes, row: bytes, what: str) -> bytes:
    """Return the body of the row of a key. If its checksum is wrong, raise :class:`StoreDamaged`; ``what`` names it."""
    if not intact(key, row):
        raise damaged(what, "its checksum fails")
    return row[:-CHECKSUM_BYTES]


def pack_map(record: dict[str, Any]) -> bytes:
    """Return the body of a row with this map."""
    return _MAP + codec.pack(record)


def unseal_map(key: bytes, row: bytes, what: str) -> dict[str, Any]:
    """Return the map of a row, also of one without a seal. Raises :class:`StoreDamaged`; ``what`` names the row."""
    body = unseal(key, row, what)[1:] if row[:1] == _MAP else row
    try:
        record = codec.unpack(body)
    except Exception as error:
        raise damaged(what, f"{type(error).__name__}: {error}") from None
    if not isinstance(record, dict):
        raise damaged(what, f"it is a {type(record).__name__}")
    return record


def unseal_value(key: bytes, row: bytes, what: str, form: Form) -> Any:
    """Return the value of a row of msgpack. Raises :class:`StoreDamaged` for one without this form (:func:`fits`)."""
    return value_of(unseal(key, row, what), what, form)


def value_of(packed: bytes, what: str, form: Form) -> Any:
    """Return a value of msgpack in a row. Raises :class:`StoreDamaged` for one without this form (:func:`fits`)."""
    try:
        value = codec.unpack(packed)
    except Exception as error:
        raise damaged(what, f"{type(error).__name__}: {error}") from None
    return formed(value, what, form)


def formed(value: Any, what: str, form: Form) -> Any:
    """Return a value that has this form (:func:`fits`). Raises :class:`StoreDamaged` for others."""
    if not fits(value, form):
        raise damaged(what, f"no version of Cues wrote {value!r:.80} there")
    return value


def unseal_fields(key: bytes, row: bytes, what: str, layout: struct.Struct) -> tuple[Any, ...]:
    """Return the fields of a row of this layout. Raises :class:`StoreDamaged` for another length."""
    body = unseal(key, row, what)
    if len(body) != layout.size:
        raise damaged(what, f"it has {len(body)} bytes, not {layout.size}")
    return layout.unpack(body)


def fits(value: Any, form: Form) -> bool:
    """Return whether a value has a form.

    int             a value of exactly this type; ``object``: any value
    (int, None)     one of these forms
    [int, str]      a list, or a tuple, of exactly these;   [str, ...]   of any number of them
    {str: int}      a map of them;   {"name": str, "more?": int}   a map with these keys, and perhaps others
    """
    if isinstance(form, type):
        return form is object or type(value) is form
    if form is None:
        return value is None
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, list):
        if not isinstance(value, (list, tuple)):
            return False
        if form[-1] is ...:
            return all(fits(each, form[0]) for each in value)
        return len(value) == len(form) and all(map(fits, value, form))
    if not isinstance(value, dict):
        return False
    ((name, each),) = list(form.items())[:1]
    if not isinstance(name, str):
        return all(fits(key, name) and fits(kept, each) for key, kept in value.items())
    return all(
        fits(value[key], each) if (key := name.rstrip("?")) in value else name.endswith("?")
        for name, each in form.items()
    )


def damaged(what: str, why: str) -> StoreDamaged:
    """Return the error for a row that cannot be used. The transaction that reads it adds the store (:func:`placed`)."""
    return StoreDamaged(
        f"The {what} cannot be used: {why}.", "run cues check on the store, then restore a backup.", path=""
    )


def placed(error: StoreDamaged, path: str) -> StoreDamaged:
    """Return the same error, with the store that the row is in."""
    return StoreDamaged(
        f"The store {path} is damaged: the{error.message.removeprefix('The')}",
        f"run cues check {quoted(path)}, which names everything that is damaged; then restore a backup of the store.",
        path=path,
    )
