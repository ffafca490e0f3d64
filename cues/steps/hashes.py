"""The delivery hash: one name for a set of messages, whatever the run, process, version or engine.

    xxh3-128, as 32 lower-case hex digits, over the msgpack of
    [1, processor id, generation, [[tailer id, queue identity, from, to], …], extra]

with the ranges [from, to) sorted by tailer id, and extra nil, ``["source", before, after]`` or
``["timer", time]``. The hash is the same on every retry of the same messages, and never the same for
others: a queue that was created again has another identity, and a seek that asks for delivery again raises
the generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from cues import codec
from cues.base.names import ProcessorKey

Range = tuple[str, bytes, int, int]
"""Tailer id, queue identity, first index, index after the last."""

_VERSION = 1


class Hasher:
    """Delivery hashes of one processor and generation. The constant part is packed once."""

    def __init__(self, processor: ProcessorKey, generation: int) -> None:
        self.processor = processor
        self.generation = generation
        self._head = b"\x95" + codec.pack(_VERSION) + codec.pack(processor) + codec.pack(generation)
        self._tailers: dict[tuple[str, bytes], bytes] = {}

    def digest(self, ranges: Sequence[Range], extra: Sequence[Any] | None = None) -> bytes:
        """Return the 16 bytes of the hash."""
        if len(ranges) == 1 and extra is None:
            tailer, identity, start, stop = ranges[0]
            try:
                prefix = self._tailers[tailer, identity]
            except KeyError:
                prefix = self._head + b"\x91\x94" + codec.pack(tailer) + codec.pack(identity)
                self._tailers[tailer, identity] = prefix
            return xxhash.xxh3_128_digest(prefix + codec.pack([start, stop])[1:] + b"\xc0")
        body = self._head + codec.pack([list(r) for r in sorted(ranges)])
        return xxhash.xxh3_128_digest(body + codec.pack(list(extra) if extra is not None else None))


def delivery_hash(processor: str, generation: int, ranges: Sequence[Range], extra: Sequence[Any] | None = None) -> str:
    """Return the hash as 32 hex digits, for tests and tools. ``processor`` is the id that it had at its first start."""
    return Hasher(ProcessorKey(processor), generation).digest(ranges, extra).hex()
