"""Partitioners: they choose the partition of a message.

    name            a message's partition                             when the queue grows
    murmur2         as Kafka's default partitioner places its key     most keys move
    murmur2-sticky  the same; without a key as ``sticky``             most keys move
    fnv1a-modulo    FNV-1a of its key, modulo the partitions          most keys move
    rendezvous      the partition with the highest xxh3 hash          only keys that move to new partitions
    round-robin     the next one for each message                     (no keys)
    sticky          the next one for each append                      (no keys)
    a function      the result of ``fn(message, n)``, 0 to n - 1      depends on the function

``murmur2`` is the default for a queue with a ``key``, ``sticky`` for a queue without one. The key is a
field of the message or the result of a function of the message. Bytes are hashed as they are, strings
as UTF-8, any other value as its msgpack: so ``1``, ``"1"`` and ``1.0`` are three different keys.

A watermark (:func:`cues.processors.windows.watermark`) goes to every partition, whatever the partitioner.

A message without a key, or with the key None, is refused, because it would have no order. ``murmur2-sticky`` accepts
it, as Kafka's default partitioner does: the messages without a key of one append go to one partition, those of the next
append to the next one. In a graph each message that a function returns is an append of its own.

Not guaranteed: that ``round-robin`` and ``sticky`` place a message again on the same partition. A repeated
step may write to other partitions than the attempt that did not commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import xxhash

from cues import codec
from cues.base import names
from cues.base.checks import is_count
from cues.errors import CodecError, CuesError, InvalidArgument
from cues.overrides import override
from cues.records import batch, columns

KEYED: Final = ("murmur2", "murmur2-sticky", "fnv1a-modulo", "rendezvous")
"""Partitioners that keep the messages of one key together."""
UNKEYED: Final = ("round-robin", "sticky")
NAMES: Final = KEYED + UNKEYED

PARTITIONS_MAX: Final = 256
"""Each is a database; a process can have :data:`cues.storage.lmdb_errors.DATABASES_MAX` of them open at once."""

Key = Callable[[dict[str, Any]], Any]
Placement = Callable[[dict[str, Any], int], int]
"""Returns the partition of a message, given the number of partitions."""

EVERY: Final = -1
"""The place of a watermark: every partition, because each has an event time of its own, and it has no key."""
_KEYS_KEPT: Final = 1 << 14
"""The number of keys whose partition is remembered: a hash in Python takes 20 times as long as a look-up."""
_MASK: Final = 0xFFFF_FFFF


def murmur2(data: bytes) -> int:
    """The 32-bit signed hash that Kafka's clients place keys by (``Utils.murmur2``)."""
    _check_bytes(data)
    m = 0x5BD1_E995
    size = len(data)
    whole = size & ~3
    h = 0x9747_B28C ^ size
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = k * m & _MASK
        k ^= k >> 24
        h = (h * m & _MASK) ^ (k * m & _MASK)
    if whole < size:
        h ^= int.from_bytes(data[whole:], "little")
        h = h * m & _MASK
    h ^= h >> 13
    h = h * m & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def fnv1a32(data: bytes) -> int:
    """The 32-bit unsigned FNV-1a hash (http://www.isthe.com/chongo/tech/comp/fnv)."""
    _check_bytes(data)
    h = 0x811C_9DC5
    for byte in data:
        h = (h ^ byte) * 0x0100_0193 & _MASK
    return h


def _check_bytes(data: object) -> None:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"The hash takes bytes, found {data!r:.60}.", "pass bytes, such as text.encode().")


def partition_for(key: bytes | str, n: int) -> int:
    """Return the partition, 0 to ``n`` - 1, on which Kafka's default partitioner places a message with this key.

    ``key`` is bytes, or a string, which is encoded as UTF-8; ``b""`` is a valid key. None, another type
    and ``n`` below 1 raise :class:`InvalidArgument` (a ValueError).
    """
    if not is_count(n):
        raise InvalidArgument(f"{n!r} is not a number of partitions.", "pass an integer, 1 or more.")
    if isinstance(key, str):
        key = _utf8(key)
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise InvalidArgument(
            f"A key is bytes or a string, found {type(key).__name__}.", "pass a string, such as str(key)."
        )
    return _murmur2_of(bytes(key), n)


def key_bytes(key: Any) -> bytes:
    """Return the bytes to hash: bytes as they are, strings as UTF-8, other values as msgpack; None is refused."""
    if isinstance(key, str):
        return _utf8(key)
    if isinstance(key, bytes):
        return key
    if key is None:
        raise InvalidArgument("The key is None, so it does not select a partition.", "put a key into every message.")
    try:
        return codec.pack_key(key)
    except CodecError as error:
        raise InvalidArgument(f"The key cannot be encoded: {error.message}", error.hint) from error


def _utf8(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"The key {key!r} holds half a surrogate pair.", "use text that is valid UTF-8."
        ) from None


def _murmur2_of(data: bytes, n: int) -> int:
    return (murmur2(data) & 0x7FFF_FFFF) % n


def _rendezvous_of(data: bytes, n: int) -> int:
    hash = xxhash.xxh3_64_intdigest
    return max(range(n), key=lambda partition: hash(data, partition))


_OF_KEY: Final[Mapping[str, Callable[[bytes, int], int]]] = {
    "murmur2": _murmur2_of,
    "murmur2-sticky": _murmur2_of,
    "fnv1a-modulo": lambda data, n: fnv1a32(data) % n,
    "rendezvous": _rendezvous_of,
}


class Missing:
    """A function for ``key=`` or ``partitioner=`` that is known only by name: a store keeps no code."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any) -> Any:
        raise InvalidArgument(
            f"The queue places its messages with the function {self.name}, which this handle does not have.",
            "pass it to store.queue(name, key=…, partitioner=…), or write with queue.partition(i).appender().",
        )

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other.name == self.name

    @override
    def __hash__(self) -> int:
        return hash(self.name)

    @override
    def __repr__(self) -> str:
        return f"<function {self.name}>"


def name_of(way: str | Callable[..., Any] | None) -> str | None:
    """Return the stored name of a key or partitioner: a field, a partitioner, or ``module:qualname`` of a function."""
    if way is None or isinstance(way, str):
        return way
    if isinstance(way, Missing):
        return way.name
    return f"{getattr(way, '__module__', '?')}:{getattr(way, '__qualname__', repr(way))}"


def is_watermark(message: Any) -> bool:
    """Return whether a message is a watermark: it is on each partition, and has the fields of no schema."""
    return type(message) is dict and message.get(names.TYPE) == names.WATERMARK


class Router:
    """Places messages on ``partitions`` logs. Not for several threads at once.

    ``round-robin`` and ``sticky`` begin at partition ``start`` modulo ``partitions``.
    """

    def __init__(
        self, partitions: int, key: str | Key | None, partitioner: str | Placement | None, start: int = 0
    ) -> None:
        self.partitions = partitions
        self._key = key
        self._next = start % partitions
        self._place: Callable[[dict[str, Any]], int]
        way = partitioner or ("sticky" if key is None else "murmur2")
        self.sticky = way == "sticky"
        """All messages of one append go to one partition."""
        self.by_message = way not in UNKEYED
        """Only the message decides: its key, or a function of it. With ``murmur2-sticky``, unless it has no key."""
        self._takes_keyless = way == "murmur2-sticky"
        self._keyless: int | None = None
        """The partition of the messages without a key of the append that is being placed."""
        if not isinstance(way, str):
            self._place = lambda message: self._checked(way(message, partitions))
        elif way in UNKEYED:
            self._place = self._turn
        else:
            of_key = _OF_KEY[way]
            self._of_bytes: Callable[[bytes], int] = lambda data: of_key(data, partitions)
            self._of_text: Callable[[str], int] = lru_cache(_KEYS_KEPT)(lambda text: of_key(_utf8(text), partitions))
            self._place = self._by_key

    def place(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Choose the partition of each message of one append; :data:`EVERY` for a watermark.

        Raises :class:`InvalidArgument` for a message without a key, and for a result of the partitioner that is not
        a partition. Errors of the user's functions pass through. Each error has the message's ``offset``.
        """
        if self.sticky:
            turn = self._turn({})
            return [EVERY if is_watermark(message) else turn for message in messages]
        placed: list[int] = []
        place = self._place
        self._keyless = None
        try:
            for message in messages:
                placed.append(EVERY if is_watermark(message) else place(message))
        except Exception as error:
            error.__dict__["offset"] = len(placed)
            if not isinstance(error, CuesError):
                error.add_note(f"while messages[{len(placed)}] of {len(messages)} was placed on a partition")
            raise
        return placed

    def place_table(self, table: Any) -> list[int] | Any:
        """Choose the partition of each row of a table: as :meth:`place` does for the messages of the rows.

        Returns a list, or an Arrow array. The key of the rows is a column: each of its values is hashed once.
        """
        pa = columns.arrow()
        key, has_watermarks = self._key, names.TYPE in table.column_names
        if self.sticky and not has_watermarks:
            return [self._turn({})] * table.num_rows
        if has_watermarks or not isinstance(key, str) or key not in table.column_names or self._place != self._by_key:
            return self.place([row for batch in table.to_batches() for row in columns.rows(batch)])
        keys = table.column(key).combine_chunks()
        if pa.types.is_dictionary(keys.type):  # nulls are not in its dictionary
            keys = columns.decoded(keys)
        keys = keys.dictionary_encode(null_encoding="encode")
        try:
            placed = self.place([{key: value} for value in columns.values(keys.dictionary, key)])
        except Exception as error:
            at = getattr(error, "offset", None)
            if at is not None:
                error.__dict__["offset"] = keys.indices.index(pa.scalar(at, keys.indices.type)).as_py()
            raise
        return columns.integers(placed, pa.int32()).take(keys.indices)

    def _by_key(self, message: dict[str, Any]) -> int:
        key = self._key
        if not isinstance(message, dict):
            raise batch.not_a_dict(message)
        if isinstance(key, str):
            value = message.get(key)
            if value is None and not self._takes_keyless:
                state = "it is None" if key in message else f"it has {', '.join(map(repr, message)) or 'nothing'}"
                raise InvalidArgument(
                    f"The message has no {key!r}, by which its partition is chosen; {state}.",
                    f"put {key!r} into every message, write with queue.partition(i).appender(), or make the queue with"
                    " partitioner='murmur2-sticky'.",
                )
        else:
            assert key is not None
            value = key(message)
        if type(value) is str:
            return self._of_text(value)
        if value is None and self._takes_keyless:
            if self._keyless is None:
                self._keyless = self._turn(message)
            return self._keyless
        return self._of_bytes(key_bytes(value))

    def _turn(self, message: dict[str, Any]) -> int:
        partition = self._next
        self._next = (partition + 1) % self.partitions
        return partition

    def _checked(self, result: Any) -> int:
        if isinstance(result, int) and not isinstance(result, bool) and 0 <= result < self.partitions:
            return result
        raise InvalidArgument(
            f"The partitioner returned {result!r}.",
            f"return the partition, an integer from 0 to {self.partitions - 1}.",
        )
