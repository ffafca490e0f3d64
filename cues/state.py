"""Keyed state of a processor: what is read is loaded, what changed is written with the step.

    process.state["count"] = process.state.get("count", 0) + 1

One row a (key, field), so that a state of a million fields costs a step only what it touches.
Three layers lie over the table:

    table      what is committed; rows read are cached in memory, since nobody else may write them
    step       what the messages of this step changed, packed
    try        what the running call has read or assigned, as objects

A call that returns settles its layer into the step's; a call that fails leaves nothing. Values that
were changed in place are found by packing them again, so ``state["seen"].append(x)`` counts.

On disk: key = key part, field part, number of the piece (2 bytes); value = checksum, number of
pieces (2 bytes), bytes. A part is its length and its msgpack, or 0xff and its 128-bit hash when it
has more than 200 bytes (then the value begins with the field).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import xxhash

from cues import batch, codec, names
from cues.errors import QueueNotFound, StoreDamaged

if TYPE_CHECKING:
    from cues.store import Store

_PART_BYTES_MAX: Final = 200
_HASHED: Final = 0xFF
_HEAD: Final = struct.Struct(">H")
_PIECE_BYTES: Final = batch.VALUE_BYTES_MAX - 8 - _HEAD.size
CACHE_ROWS_MAX: Final = 200_000
CACHE_BYTES_MAX: Final = 64 << 20
_PARTS_MAX: Final = 10_000
"""Keys and fields whose parts are kept at hand: fields recur with every message, and often so do keys."""

_FIXED_VALUES: Final = (int, str, float, bool, bytes, type(None))
"""Types whose values cannot be changed in place."""


class _Absent:
    """The value of a field that is not there."""


_ABSENT: Final = _Absent()


class Table:
    """The state of one processor, with the layers of the step that runs."""

    def __init__(self, store: Store, processor: str) -> None:
        self._store = store
        self._name = names.state_database(processor)
        self._database: Any = None
        self._missing = False
        self._cache: dict[bytes, bytes | None] = {}
        self._cache_bytes = 0
        self._step: dict[bytes, bytes | None] = {}
        self._try: dict[bytes, list[Any]] = {}
        self._parts: dict[str, bytes] = {}

    @property
    def touched(self) -> bool:
        """Whether the running call has looked at the state."""
        return bool(self._try)

    def view(self, key: Any) -> State:
        """The fields under ``key``."""
        return State(self, self.part(key))

    def part(self, value: Any) -> bytes:
        """What stands for a key or a field in the keys of rows."""
        if type(value) is not str or len(value) > _PART_BYTES_MAX:
            return _part(codec.pack(value))
        found = self._parts.get(value)
        if found is None:
            if len(self._parts) >= _PARTS_MAX:
                self._parts.clear()
            found = self._parts[value] = _part(codec.pack(value))
        return found

    # --- what the call does ---

    def get(self, row: bytes) -> Any:
        cell = self._try.get(row)
        if cell is None:
            packed = self._packed(row)
            value = _ABSENT if packed is None else codec.unpack(packed)
            self._try[row] = cell = [value, packed, False]
        return cell[0]

    def set(self, row: bytes, value: Any) -> None:
        cell = self._try.get(row)
        if cell is None:
            self._try[row] = [value, self._packed(row), True]
        else:
            cell[0] = value
            cell[2] = True

    def rows(self, prefix: bytes) -> list[bytes]:
        """The rows under a key that exist, all layers counted."""
        found: dict[bytes, bool] = {}
        if self._open():
            with self._store.view() as txn:
                cursor = txn.cursor(self._database)
                if cursor.set_range(prefix):
                    for key in cursor.iternext(values=False):
                        if not key.startswith(prefix):
                            break
                        if key[-2:] == b"\0\0":
                            found[key[:-2]] = True
        for row, packed in self._step.items():
            if row.startswith(prefix):
                found[row] = packed is not None
        for row, cell in self._try.items():
            if row.startswith(prefix):
                found[row] = cell[0] is not _ABSENT
        return [row for row, exists in found.items() if exists]

    # --- what the step does ---

    def settle(self) -> None:
        """The call returned: keep what it changed. Raises :class:`CodecError` for what cannot be encoded."""
        changed: dict[bytes, bytes | None] = {}
        for row, (value, packed, assigned) in self._try.items():
            if not assigned and (value is _ABSENT or type(value) in _FIXED_VALUES):
                continue
            new = None if value is _ABSENT else codec.pack(value)
            if new != packed:
                changed[row] = new
        self._step.update(changed)
        self._try.clear()

    def discard(self) -> None:
        """The call failed: drop what it changed."""
        self._try.clear()

    def forget(self) -> None:
        """Drop everything in memory: the step is void, or somebody else may have written."""
        self._try.clear()
        self._step.clear()
        self._cache.clear()
        self._cache_bytes = 0

    @property
    def changed(self) -> bool:
        return bool(self._step)

    def pages(self) -> int:
        """How many pages the step's changes take at most."""
        return sum(1 + len(packed or b"") // _PIECE_BYTES for packed in self._step.values())

    def ensure(self) -> None:
        """Have the table's database; call before a commit that writes to it."""
        if not self._open():
            self._store.commit(self._store.create_database, self._name)
            self._missing = False
            self._open()

    def write(self, txn: Any) -> None:
        """Write the step's changes inside its commit, behind :meth:`ensure`."""
        for row, packed in self._step.items():
            old = self._cache.get(row)
            pieces = [] if packed is None else _pieces(packed)
            for number, piece in enumerate(pieces):
                txn.put(row + _HEAD.pack(number), piece, db=self._database)
            before = 0 if old is None else max(1, -(-len(old) // _PIECE_BYTES))
            for number in range(len(pieces), before):
                txn.delete(row + _HEAD.pack(number), db=self._database)

    def committed(self) -> None:
        """The step's commit is done; what it only read is in memory too, and is bounded here."""
        if not self._cache:
            return
        for row, packed in self._step.items():
            self._remember(row, packed)
        self._step.clear()
        if len(self._cache) > CACHE_ROWS_MAX or self._cache_bytes > CACHE_BYTES_MAX:
            self._cache.clear()
            self._cache_bytes = 0

    # --- inside ---

    def _open(self) -> bool:
        if self._database is None and not self._missing:
            try:
                self._database = self._store.database(self._name)
            except QueueNotFound:
                self._missing = True  # until this owner makes it: nobody else does
        return self._database is not None

    def _packed(self, row: bytes) -> bytes | None:
        if row in self._step:
            return self._step[row]
        if row in self._cache:
            return self._cache[row]
        packed = None
        if self._open():
            with self._store.view() as txn:
                first = txn.get(row + b"\0\0", db=self._database)
                values = [] if first is None else [first]
                if first is not None:
                    (count,) = _HEAD.unpack_from(first, 8)
                    values += [txn.get(row + _HEAD.pack(n), default=b"", db=self._database) for n in range(1, count)]
            if values:
                for number, value in enumerate(values):
                    if not piece_intact(value, number):
                        raise StoreDamaged(
                            f"A row of the state of {self._name.decode()} is damaged (its checksum fails).",
                            f"cues check {self._store.path}, and a backup.",
                            path=self._store.path,
                        )
                packed = b"".join(value[8 + _HEAD.size :] for value in values)
        self._remember(row, packed)
        return packed

    def _remember(self, row: bytes, packed: bytes | None) -> None:
        self._cache[row] = packed
        self._cache_bytes += len(row) + len(packed or b"")


class State(MutableMapping[Any, Any]):
    """The state of one key: a mutable mapping from field to value.

    Fields and values are anything that a message may hold. Changes are written with the step, or
    not at all.
    """

    __slots__ = ("_prefix", "_table")

    def __init__(self, table: Table, prefix: bytes) -> None:
        self._table = table
        self._prefix = prefix

    # A field too long for LMDB's key is found by its hash; its value is then [field, value].

    def __getitem__(self, field: Any) -> Any:
        part = self._table.part(field)
        value = self._table.get(self._prefix + part)
        if value is _ABSENT:
            raise KeyError(field)
        return value[1] if part[0] == _HASHED else value

    def get(self, field: Any, default: Any = None) -> Any:
        part = self._table.part(field)
        value = self._table.get(self._prefix + part)
        if value is _ABSENT:
            return default
        return value[1] if part[0] == _HASHED else value

    def __setitem__(self, field: Any, value: Any) -> None:
        part = self._table.part(field)
        self._table.set(self._prefix + part, [field, value] if part[0] == _HASHED else value)

    def __delitem__(self, field: Any) -> None:
        row = self._prefix + self._table.part(field)
        if self._table.get(row) is _ABSENT:
            raise KeyError(field)
        self._table.set(row, _ABSENT)

    def __iter__(self) -> Iterator[Any]:
        at = len(self._prefix)
        for row in self._table.rows(self._prefix):
            yield self._table.get(row)[0] if row[at] == _HASHED else codec.unpack(row[at + 1 :])

    def __len__(self) -> int:
        return len(self._table.rows(self._prefix))

    def __repr__(self) -> str:
        return f"<cues.State {dict(self)!r}>"


def _part(packed: bytes) -> bytes:
    if len(packed) <= _PART_BYTES_MAX:
        return bytes((len(packed),)) + packed
    return bytes((_HASHED,)) + xxhash.xxh3_128_digest(packed)


def _pieces(packed: bytes) -> list[bytes]:
    chunks = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)] or [b""]
    head = _HEAD.pack(len(chunks))
    return [batch.checksum(head + chunk, seed=n) + head + chunk for n, chunk in enumerate(chunks)]


def piece_intact(value: bytes, number: int) -> bool:
    return len(value) >= 8 and batch.checksum(memoryview(value)[8:], seed=number) == value[:8]
