"""Floors: the calls of LMDB, msgpack, xxhash and struct that a row takes in the format of Cues, in a plain loop.

Each floor reads and writes the records and rows that docs/format.md describes, calls the function for one message after
another, and packs each result before the next call, because a function may change what it returned. It has no locks,
threads, errors, options, retries or wake-ups. So what Cues takes above its floor is its own code, and an aim that is
below the floor cannot be met with this format.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import msgpack
import xxhash
from core import key, raw_env, stress_split, stress_sums
from harness import Room, Work
from work import BATCH, Message, batches, messages, must_be, total

HEAD = struct.Struct(">BBHQ")
"""Format, flags, count and append time of a record, after its checksum."""
ROW = struct.Struct(">8sQQQI")
POSITION = struct.Struct(">8sQ8s")
HASH, PROVENANCE = 1, 4
VALUE_BYTES = 4_080
KEPT_TRIES = 1_024
IDENTITY = bytes(8)
ATTEMPT = b"a" * 230
"""The constant part of the record of a step."""
checksum = xxhash.xxh3_64_digest
unpack = msgpack.unpackb


class Log:
    """A log: its database, and the key of its row."""

    def __init__(self, env: Any, name: bytes) -> None:
        self.database = env.open_db(name)
        self.row = b"row " + name
        with env.begin(write=True) as txn:
            body = ROW.pack(IDENTITY, 1, 1, 0, 0)
            txn.put(self.row, body + checksum(body))

    def append(self, txn: Any, pages: Sequence[tuple[int, int, bytes]]) -> int:
        """Append pages of flags, count, and what follows the time; return the index of the first message."""
        identity, first, start, _, version = ROW.unpack_from(txn.get(self.row))
        now, index, items = time.time_ns(), start, []
        for flags, count, tail in pages:
            rest = HEAD.pack(1, flags, count, now) + tail
            items.append((key(index), checksum(rest, index) + rest))
            index += count
        if len(items) == 1:
            txn.put(*items[0], append=True, db=self.database)
        else:
            txn.cursor(self.database).putmulti(items, append=True)
        body = ROW.pack(identity, first, index, now, version)
        txn.put(self.row, body + checksum(body))
        return int(start)

    def records(self, env: Any) -> Iterator[list[tuple[int, int, list[Message]]]]:
        """Intact records from the start on, about a thousand messages at a time: index, append time, messages."""
        at = 1
        while True:
            values = []
            with env.begin() as txn:
                cursor = txn.cursor(self.database)
                if not cursor.set_key(key(at)):
                    return
                for index, value in cursor.iternext():
                    values.append((int.from_bytes(index, "big"), value))
                    at = values[-1][0] + HEAD.unpack_from(value, 8)[2]
                    if at > values[0][0] + BATCH - 40:  # a record has about 40 messages
                        break
            yield [self._opened(*value) for value in values]

    def _opened(self, index: int, value: bytes) -> tuple[int, int, list[Message]]:
        assert checksum(memoryview(value)[8:], index) == value[:8]
        _, flags, _, time_ns = HEAD.unpack_from(value, 8)
        at = 20 + (16 if flags & HASH else 0)
        if flags & PROVENANCE:
            at += 2 + int.from_bytes(value[at : at + 2], "big")
        return index, time_ns, unpack(memoryview(value)[at:])

    def messages(self, env: Any) -> Iterator[Message]:
        for some in self.records(env):
            for _, _, batch in some:
                yield from batch


def pages(packed: Sequence[bytes], head: bytes = b"", origin: tuple[str, int, int] | None = None) -> list[Any]:
    """Pages of packed messages, with a hash, and with the queue, index and time of the first one's origin."""
    built, start = [], 0
    size = max(map(len, packed))
    guess = max(1, min(len(packed), (VALUE_BYTES - 100) // size))
    flags = HASH if head else 0
    while start < len(packed):
        some = packed[start : start + guess]
        count = len(some)
        array = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
        came = b""
        if origin is not None:
            queue, index, time_ns = origin
            column = msgpack.packb([{queue: [[index + start], time_ns]}])
            came = len(column).to_bytes(2, "big") + column
        tail = head + came + array + b"".join(some)
        assert len(tail) + 20 <= VALUE_BYTES
        built.append((flags | (PROVENANCE if came else 0), count, tail))
        start += count
    return built


class Step:
    """The commit of a processor: its outputs, the record of the step, and its row."""

    def __init__(self, env: Any, name: bytes, inputs: int = 1) -> None:
        self.env = env
        self.tries = Log(env, b"tries " + name)
        self.name, self.inputs = name, inputs
        self.row = bytes(100)
        self.oldest = 1
        with env.begin(write=True) as txn:
            txn.put(name, self.row)

    def digest(self, start: int, stop: int) -> bytes:
        return xxhash.xxh3_128_digest(self.name + msgpack.packb([start, stop]))

    def commit(self, start: int, stop: int, digest: bytes, outputs: Sequence[tuple[Log, list[Any]]]) -> None:
        with self.env.begin(write=True) as txn:
            assert txn.get(self.name) == self.row
            first = [log.append(txn, built) for log, built in outputs]
            numbers = struct.pack(f">{2 + len(first)}Q", start, stop, *first)
            tried = self.tries.append(txn, [(HASH, 2, digest + ATTEMPT + numbers + digest.hex().encode())])
            if tried - self.oldest > KEPT_TRIES + 512:
                cursor = txn.cursor(self.tries.database)
                cursor.first()
                while int.from_bytes(cursor.key(), "big") < tried - KEPT_TRIES:
                    cursor.delete()
                self.oldest = tried - KEPT_TRIES
            body = bytes(50) + POSITION.pack(IDENTITY, stop, digest[:8]) * self.inputs
            row = body + checksum(body)
            txn.put(self.name, row)
        self.row = row


@contextmanager
def append_one(room: Room) -> Iterator[Work]:
    with closing(raw_env(room, writemap=True)) as env:
        orders, made = Log(env, b"orders"), messages(room.count)
        pack, database, row = msgpack.Packer().pack, orders.database, orders.row

        def work() -> None:
            for message in made:
                txn = env.begin(write=True)
                identity, first, index, _, version = ROW.unpack_from(txn.get(row))
                now = time.time_ns()
                rest = HEAD.pack(1, 0, 1, now) + pack([message])
                txn.put(key(index), checksum(rest, index) + rest, append=True, db=database)
                body = ROW.pack(identity, first, index + 1, now, version)
                txn.put(row, body + checksum(body))
                txn.commit()

        yield work
        must_be(orders.messages(env), made)


@contextmanager
def read(room: Room) -> Iterator[Work]:
    with closing(raw_env(room, writemap=True)) as env:
        orders = filled(env, messages(room.count))
        kept: list[Message] = []

        def work() -> None:
            for some in orders.records(env):
                for _, _, batch in some:
                    kept.extend(batch)

        yield work
        must_be(kept, messages(room.count))


def filled(env: Any, made: list[Message]) -> Log:
    orders, pack = Log(env, b"orders"), msgpack.Packer().pack
    for batch in batches(made):
        with env.begin(write=True) as txn:
            orders.append(txn, pages([pack(message) for message in batch]))
    return orders


@contextmanager
def pipeline(room: Room) -> Iterator[Work]:
    with closing(raw_env(room, writemap=True)) as env:
        orders, totals = filled(env, messages(room.count)), Log(env, b"totals")
        step, pack = Step(env, b"total"), msgpack.Packer().pack

        def work() -> None:
            for some in orders.records(env):
                start, time_ns, _ = some[0]
                packed = [pack(total(message)) for _, _, batch in some for message in batch]
                stop = start + len(packed)
                digest = step.digest(start, stop)
                step.commit(start, stop, digest, [(totals, pages(packed, digest, ("orders", start, time_ns)))])

        yield work
        must_be(totals.messages(env), map(total, messages(room.count)))


@contextmanager
def step_one(room: Room) -> Iterator[Work]:
    with closing(raw_env(room, writemap=True)) as env:
        orders, totals = filled(env, messages(room.count)), Log(env, b"totals")
        step, pack = Step(env, b"total"), msgpack.Packer().pack

        def work() -> None:
            for some in orders.records(env):
                for start, time_ns, batch in some:
                    for index, message in enumerate(batch, start):
                        packed = pack(total(message))
                        digest = step.digest(index, index + 1)
                        column = msgpack.packb([{"orders": [[index], time_ns]}])
                        tail = digest + len(column).to_bytes(2, "big") + column + b"\x91" + packed
                        step.commit(index, index + 1, digest, [(totals, [(HASH | PROVENANCE, 1, tail)])])

        yield work
        must_be(totals.messages(env), map(total, messages(room.count)))


@contextmanager
def stress(room: Room) -> Iterator[Work]:
    """Stage by stage in one loop, a thousand messages each."""
    with closing(raw_env(room, writemap=True)) as env:
        logs = {name: Log(env, name.encode()) for name in ("left", "right", "even", "odd")}
        steps = {name: Step(env, b"step " + name.encode()) for name in logs}
        join, pack = Step(env, b"join", 2), msgpack.Packer().pack
        seen = {"even": 0, "odd": 0}

        def numbers(position: int) -> Iterator[tuple[int, Message]]:
            for number in range(position, room.count):
                yield number + 1, {"x": number}

        def source(name: str) -> Iterator[None]:
            packed, start = [], 0
            for position, message in numbers(0):
                packed.append(pack(message))
                if position - start == BATCH or position == room.count:
                    digest = steps[name].digest(start, position)
                    steps[name].commit(start, position, digest, [(logs[name], pages(packed, digest))])
                    packed, start = [], position
                    yield

        def joined() -> Iterator[None]:
            for lefts, rights in zip(logs["left"].records(env), logs["right"].records(env)):
                start, time_ns, _ = lefts[0]
                evens, odds = [], []
                flat = ([message for _, _, batch in some for message in batch] for some in (lefts, rights))
                for one, other in zip(*flat):
                    result = stress_split(one, other)
                    evens.append(pack(result["even"]))
                    odds.append(pack(result["odd"]))
                stop = start + len(evens)
                digest = join.digest(start, stop)
                built = [
                    (logs[name], pages(packed, digest, ("left", start, time_ns)))
                    for name, packed in (("even", evens), ("odd", odds))
                ]
                join.commit(start, stop, digest, built)
                yield

        def sink(name: str) -> Iterator[None]:
            for some in logs[name].records(env):
                count = 0
                for _, _, batch in some:
                    for message in batch:
                        seen[name] += message["sum"]
                    count += len(batch)
                start = some[0][0]
                steps[name].commit(start, start + count, steps[name].digest(start, start + count), [])
                yield

        def work() -> None:
            for stage in (source("left"), source("right"), joined(), sink("even"), sink("odd")):
                for _ in stage:
                    pass

        yield work
        assert seen == stress_sums(room.count), seen


CONTENDERS = {
    "append-one": {"floor: the calls of Cues": append_one},
    "read": {"floor: the calls of Cues": read},
    "pipeline": {"floor: the calls of Cues": pipeline},
    "step-one": {"floor: the calls of Cues": step_one},
    "stress": {"floor: the calls of Cues": stress},
}
