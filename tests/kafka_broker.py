"""A Kafka broker of the tests: one node, in memory, on loopback, with Kafka's protocol and its transactions.

Written from the protocol's public description, for the client library that the processors use. It keeps what
exactly-once needs, and refuses what a real broker refuses:

    transactional ids    InitProducerId raises the epoch and aborts the open transaction; an older epoch is fenced
    transactions         markers, last stable offset, aborted transactions in fetch responses; a timeout that aborts
    offsets in them      staged until the marker; UNSTABLE_OFFSET_COMMIT for a reader that requires stable ones
    sequences            of idempotent producers: a repeated batch is not appended again
    logs                 leader epochs, topic ids, deletion of records from the front, truncation (a test's own request)

Run it as a program: it prints its port, and ends when its standard input does. ``Broker`` starts it so.
``hook`` requests inject errors into the next requests of a kind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OK, OUT_OF_RANGE, UNKNOWN_TOPIC, TOO_LARGE, METADATA_TOO_LARGE, OUT_OF_ORDER = 0, 1, 3, 10, 12, 45
TOPIC_EXISTS, UNSUPPORTED, STALE_EPOCH, TXN_STATE, PID_MAPPING, FENCED, UNSTABLE = 36, 35, 47, 48, 49, 90, 88
MESSAGE_BYTES_MAX, METADATA_BYTES_MAX = 1_000_000, 4_096
HOOK = 9_999  # not of Kafka: api, error, times

VERSIONS = {
    0: 7, 1: 11, 2: 5, 3: 12, 9: 7, 10: 2, 16: 2, 17: 1, 18: 0, 19: 4, 20: 1, 21: 1, 22: 3, 23: 2, 24: 0, 25: 0, 26: 1,
    28: 2, 36: 0, 37: 1,
}  # fmt: skip
"""Of each API, the only version that is spoken."""
SASL_AUTHENTICATION_FAILED = 58


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, format: str) -> Any:
        (value,) = struct.unpack_from(">" + format, self.data, self.at)
        self.at += struct.calcsize(">" + format)
        return value

    def raw(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def string(self) -> str | None:
        count = self.take("h")
        return None if count < 0 else self.raw(count).decode()

    def blob(self) -> bytes:
        return self.raw(max(self.take("i"), 0))

    def array(self, item: Callable[[], Any]) -> list[Any]:
        return [item() for _ in range(max(self.take("i"), 0))]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def compact(self) -> str | None:
        count = self.varint()
        return None if count == 0 else self.raw(count - 1).decode()

    def compacts(self, item: Callable[[], Any]) -> list[Any]:
        return [item() for _ in range(max(self.varint() - 1, 0))]

    def tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self.raw(self.varint())


def pack(format: str, *values: Any) -> bytes:
    return struct.pack(">" + format, *values)


def string(value: str | None) -> bytes:
    return pack("h", -1) if value is None else pack("h", len(value.encode())) + value.encode()


def array(items: list[bytes]) -> bytes:
    return pack("i", len(items)) + b"".join(items)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def compact(value: str | None) -> bytes:
    return varint(0) if value is None else varint(len(value.encode()) + 1) + value.encode()


def compacts(items: list[bytes]) -> bytes:
    return varint(len(items) + 1) + b"".join(items)


_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def marker(committed: bool, pid: int, epoch: int) -> bytes:
    """A control batch with the end of a transaction."""
    record = b"\0\0\0" + varint(8) + pack("hh", 0, int(committed)) + varint(12) + pack("hi", 0, 0) + b"\0"
    now = time.time_ns() // 10**6
    rest = pack("hiqqqhii", 0x30, 0, now, now, pid, epoch, -1, 1) + varint(len(record) * 2) + record
    return pack("qiibI", 0, len(rest) + 9, 0, 2, crc32c(rest)) + rest


class Log:
    """A partition: batches in the order of their offsets."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bytes]] = []  # first offset, end, bytes
        self.start = self.end = 0
        self.epochs = [(0, 0)]  # leader epoch, its first offset
        self.open: dict[int, int] = {}  # producer id: first offset of its transaction
        self.aborted: list[tuple[int, int, int]] = []  # producer id, first offset, offset of the marker
        self.sequences: dict[int, tuple[int, dict[int, int], int]] = {}  # pid: epoch, {first sequence: offset}, next

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(self, batch: bytes, count: int) -> int:
        first = self.end
        batch = pack("q", first) + batch[8:12] + pack("i", self.epochs[-1][0]) + batch[16:]
        self.end += count
        self.batches.append((first, self.end, batch))
        return first

    def produce(self, batch: bytes) -> tuple[int, int]:
        """Return the error and the first offset."""
        attributes, last, _, _, pid, epoch, sequence = struct.unpack_from(">hiqqqhi", batch, 21)
        if pid >= 0:
            known, seen, following = self.sequences.get(pid, (-1, {}, 0))
            if epoch != known:
                seen, following = {}, 0
            if sequence in seen:
                return OK, seen[sequence]
            if sequence != following:
                return OUT_OF_ORDER, -1
            self.sequences[pid] = epoch, {**dict(list(seen.items())[-4:]), sequence: self.end}, sequence + last + 1
            if attributes & 0x10:
                self.open.setdefault(pid, self.end)
        return OK, self.append(batch, last + 1)

    def finish(self, committed: bool, pid: int, epoch: int) -> None:
        at = self.append(marker(committed, pid, epoch), 1)
        if pid in self.open:
            first = self.open.pop(pid)
            if not committed:
                self.aborted.append((pid, first, at))


class Transactional:
    """A transactional id."""

    def __init__(self, pid: int) -> None:
        self.pid, self.epoch, self.timeout_s, self.since = pid, -1, 60.0, 0.0
        self.partitions: set[tuple[str, int]] = set()
        self.groups: set[str] = set()
        self.open = False
        self.ended: bool | None = None


class Cluster:
    """All topics, transactional ids and groups."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.topics: dict[str, tuple[bytes, list[Log]]] = {}
        self.ids: dict[str, Transactional] = {}
        self.pids = 1_000
        self.offsets: dict[str, dict[tuple[str, int], tuple[int, str | None]]] = defaultdict(dict)
        self.staged: dict[tuple[str, int], dict[tuple[str, int], tuple[int, str | None]]] = defaultdict(dict)
        self.hooks: dict[int, list[int]] = defaultdict(list)
        self.address = ("127.0.0.1", 0)
        self.away_ms, self.leaving = 0, threading.Lock()

    def log(self, topic: str, partition: int) -> Log | None:
        logs = self.topics.get(topic, (b"", []))[1]
        return logs[partition] if 0 <= partition < len(logs) else None

    def end(self, id: Transactional, committed: bool) -> None:
        for topic, partition in id.partitions:
            log = self.log(topic, partition)
            if log:
                log.finish(committed, id.pid, id.epoch)
        for group in id.groups:
            staged = self.staged.pop((group, id.pid), {})
            if committed:
                self.offsets[group].update(staged)
        id.partitions, id.groups, id.open, id.ended = set(), set(), False, committed
        self.changed.notify_all()

    def expire(self) -> None:
        for id in self.ids.values():
            if id.open and time.monotonic() > id.since + id.timeout_s:
                id.epoch += 1
                self.end(id, False)

    def check(self, name: str, pid: int, epoch: int) -> int:
        id = self.ids.get(name)
        if id is None or id.pid != pid:
            return PID_MAPPING
        return OK if epoch == id.epoch else STALE_EPOCH

    def begin(self, name: str) -> Transactional:
        id = self.ids[name]
        if not id.open:
            id.open, id.since = True, time.monotonic()
        return id

    def answer(self, api: int, r: Reader) -> bytes:
        """Return the body of a response."""
        with self.changed:
            self.expire()
            failure = self.hooks[api].pop(0) if self.hooks[api] else OK
            if failure == -3:  # what was asked is done, and the answer is lost
                getattr(self, f"_{api}")(r, OK)
                raise ConnectionError
            body: bytes = getattr(self, f"_{api}")(r, failure)
            return body

    def _9999(self, r: Reader, failure: int) -> bytes:
        api, error, times = r.take("i"), r.take("i"), r.take("i")
        if api == -1:  # truncate every log of a topic by so many offsets, as an unclean election does
            for log in self.topics[r.string() or ""][1]:
                log.end = max(log.end - error, 0)
                log.batches = [batch for batch in log.batches if batch[1] <= log.end]
                log.end = log.batches[-1][1] if log.batches else 0
                log.epochs.append((log.epochs[-1][0] + 1, log.end))
        elif api == -2:
            self.away_ms = error
        else:
            self.hooks[api] = self.hooks[api] + [error] * times if times else []
        return b""

    def _18(self, r: Reader, failure: int) -> bytes:
        listed = [pack("hhh", api, low, high) for api, high in VERSIONS.items() for low in [high if api != 18 else 0]]
        return pack("h", failure) + array(listed)

    def _17(self, r: Reader, failure: int) -> bytes:
        return pack("h", failure) + array([string("PLAIN")])

    def _36(self, r: Reader, failure: int) -> bytes:
        """Refuse each user and password (SASL). Connections without SASL are not refused."""
        return pack("h", SASL_AUTHENTICATION_FAILED) + string("Authentication failed.") + pack("i", 0)

    def _3(self, r: Reader, failure: int) -> bytes:
        def topic() -> str | None:
            r.raw(16)
            name = r.compact()
            r.tags()
            return name

        count = r.varint()
        names = list(self.topics) if count == 0 else [topic() or "" for _ in range(count - 1)]
        host, port = self.address
        out = pack("i", 0) + compacts([pack("i", 1) + compact(host) + pack("i", port) + compact(None) + b"\0"])
        out += compact("tests") + pack("i", 1)
        listed = []
        for name in names:
            id, logs = self.topics.get(name, (b"\0" * 16, []))
            partitions = [
                pack("hiii", 0, number, 1, log.epochs[-1][0])
                + compacts([pack("i", 1)]) * 2 + compacts([]) + b"\0"
                for number, log in enumerate(logs)
            ]  # fmt: skip
            error = OK if logs else UNKNOWN_TOPIC
            listed.append(pack("h", error) + compact(name) + id + b"\0" + compacts(partitions) + pack("i", 0) + b"\0")
        return out + compacts(listed) + b"\0"

    def _0(self, r: Reader, failure: int) -> bytes:
        name, _, _ = r.string(), r.take("h"), r.take("i")

        def partition(topic: str) -> bytes:
            number, batch = r.take("i"), r.blob()
            log, error, first = self.log(topic, number), failure, -1
            pid, epoch = struct.unpack_from(">qh", batch, 43)
            if log is None:
                error = UNKNOWN_TOPIC
            elif len(batch) > MESSAGE_BYTES_MAX:
                error = TOO_LARGE
            elif name is not None:
                error = error or self.check(name, pid, epoch)
                if not error and (topic, number) not in self.ids[name].partitions:
                    error = TXN_STATE
            if not error and log is not None:
                error, first = log.produce(batch)
                self.changed.notify_all()
            return pack("ihqqq", number, error, first, -1, log.start if log else -1)

        def topic() -> bytes:
            name = r.string() or ""
            return string(name) + array(r.array(lambda: partition(name)))

        return array(r.array(topic)) + pack("i", 0)

    def _1(self, r: Reader, failure: int) -> bytes:
        _, wait_ms, _, _, isolation, _, _ = (r.take(format) for format in "iiiibii")

        def partition() -> tuple[int, int, int, int]:
            number, epoch, offset, _, size = (r.take(format) for format in "iiqqi")
            return number, epoch, offset, size

        asked = r.array(lambda: (r.string(), r.array(partition)))
        until = time.monotonic() + wait_ms / 1000
        while True:
            listed, any_bytes = [], False
            for topic, partitions in asked:
                parts = []
                for number, epoch, offset, size in partitions:
                    body, records = self._fetched(topic, number, epoch, offset, size, isolation, failure)
                    parts.append(body)
                    any_bytes = any_bytes or records
                listed.append(string(topic) + array(parts))
            left = until - time.monotonic()
            if any_bytes or left <= 0:
                return pack("ihi", 0, 0, 0) + array(listed)
            self.changed.wait(left)
            self.expire()
            if not failure and self.hooks[1]:  # it was asked for while this request waited
                failure = self.hooks[1].pop(0)

    def _fetched(
        self, topic: str, number: int, epoch: int, offset: int, size: int, isolation: int, failure: int
    ) -> tuple[bytes, bool]:
        log = self.log(topic, number)
        error = failure or (UNKNOWN_TOPIC if log is None else OK)
        if log is None or error:
            return pack("ihqqqiii", number, error, -1, -1, -1, -1, -1, 0), True
        if not error and epoch >= 0 and epoch != log.epochs[-1][0]:
            error = 74 if epoch < log.epochs[-1][0] else 76
        if not error and not log.start <= offset <= log.end:
            error = OUT_OF_RANGE
        limit, taken, records = log.stable if isolation else log.end, b"", []
        if not error:
            for first, end, batch in log.batches:
                if end > offset and end <= limit and (not taken or len(taken) + len(batch) <= size):
                    taken += batch
                    records.append((first, end))
                elif taken:
                    break
        last = records[-1][1] if records else offset
        aborted = [
            pack("qq", pid, first) for pid, first, at in log.aborted if isolation and at >= offset and first < last
        ]
        body = pack("ihqqq", number, error, log.end, log.stable, log.start) + array(aborted) + pack("i", -1)
        return body + pack("i", len(taken)) + taken, bool(taken or error)

    def _2(self, r: Reader, failure: int) -> bytes:
        _, isolation = r.take("i"), r.take("b")

        def partition(topic: str) -> bytes:
            number, _, at = (r.take(format) for format in "iiq")
            log = self.log(topic, number)
            if log is None:
                return pack("ihqqi", number, UNKNOWN_TOPIC, -1, -1, -1)
            offset = log.start if at == -2 else log.stable if isolation else log.end
            return pack("ihqqi", number, failure, -1, offset, log.epochs[-1][0])

        def topic() -> bytes:
            name = r.string() or ""
            return string(name) + array(r.array(lambda: partition(name)))

        return pack("i", 0) + array(r.array(topic))

    def _23(self, r: Reader, failure: int) -> bytes:
        def partition(topic: str) -> bytes:
            number, _, epoch = (r.take(format) for format in "iii")
            log = self.log(topic, number)
            if log is None:
                return pack("hiiq", UNKNOWN_TOPIC, number, -1, -1)
            of = max((e for e, _ in log.epochs if e <= epoch), default=-1)
            ends = [first for e, first in log.epochs if e > epoch]
            return pack("hiiq", failure, number, of, min(ends) if ends else log.end)

        def topic() -> bytes:
            name = r.string() or ""
            return string(name) + array(r.array(lambda: partition(name)))

        return pack("i", 0) + array(r.array(topic))

    def _10(self, r: Reader, failure: int) -> bytes:
        host, port = self.address
        return pack("ih", 0, failure) + string(None) + pack("i", 1) + string(host) + pack("i", port)

    def _22(self, r: Reader, failure: int) -> bytes:
        name, timeout_ms, pid, epoch = r.compact(), r.take("i"), r.take("q"), r.take("h")
        if name is not None and pid >= 0:  # a client that continues after an abort, with a higher epoch
            failure = failure or self.check(name, pid, epoch)
        if failure:
            return pack("ihqhb", 0, failure, -1, -1, 0)
        self.pids += 1
        if name is None:
            return pack("ihqhb", 0, OK, self.pids, 0, 0)
        id = self.ids.setdefault(name, Transactional(self.pids))
        id.epoch += 1
        id.timeout_s, id.ended = timeout_ms / 1000, None
        if id.open:
            self.end(id, False)
        return pack("ihqhb", 0, OK, id.pid, id.epoch, 0)

    def _24(self, r: Reader, failure: int) -> bytes:
        name, pid, epoch = r.string() or "", r.take("q"), r.take("h")
        error = failure or self.check(name, pid, epoch)

        def partition(topic: str) -> bytes:
            number = r.take("i")
            wrong = error or (OK if self.log(topic, number) else UNKNOWN_TOPIC)
            if not wrong:
                self.begin(name).partitions.add((topic, number))
            return pack("ih", number, wrong)

        def topic() -> bytes:
            topic_name = r.string() or ""
            return string(topic_name) + array(r.array(lambda: partition(topic_name)))

        return pack("i", 0) + array(r.array(topic))

    def _25(self, r: Reader, failure: int) -> bytes:
        name, pid, epoch, group = r.string() or "", r.take("q"), r.take("h"), r.string() or ""
        error = failure or self.check(name, pid, epoch)
        if not error:
            self.begin(name).groups.add(group)
        return pack("ih", 0, error)

    def _28(self, r: Reader, failure: int) -> bytes:
        name, group, pid, epoch = r.string() or "", r.string() or "", r.take("q"), r.take("h")
        error = failure or self.check(name, pid, epoch)
        if not error and group not in self.ids[name].groups:
            error = TXN_STATE

        def partition(topic: str) -> bytes:
            number, offset, _, metadata = r.take("i"), r.take("q"), r.take("i"), r.string()
            wrong = error or (METADATA_TOO_LARGE if len(metadata or "") > METADATA_BYTES_MAX else OK)
            if not wrong:
                self.staged[group, pid][topic, number] = offset, metadata
            return pack("ih", number, wrong)

        def topic() -> bytes:
            topic_name = r.string() or ""
            return string(topic_name) + array(r.array(lambda: partition(topic_name)))

        return pack("i", 0) + array(r.array(topic))

    def _26(self, r: Reader, failure: int) -> bytes:
        name, pid, epoch, committed = r.string() or "", r.take("q"), r.take("h"), bool(r.take("b"))
        error = failure or self.check(name, pid, epoch)
        if not error:
            id = self.ids[name]
            if id.open:
                self.end(id, committed)
            elif id.ended is not committed:
                error = TXN_STATE
        return pack("ih", 0, error)

    def _9(self, r: Reader, failure: int) -> bytes:
        group = r.compact() or ""

        def topic() -> tuple[str, list[int]]:
            named = r.compact() or "", r.compacts(lambda: r.take("i"))
            r.tags()
            return named

        count = r.varint()
        asked = [topic() for _ in range(count - 1)]
        stable = bool(r.take("b"))
        if count == 0:
            numbers = defaultdict(list)
            for name, number in self.offsets[group]:
                numbers[name].append(number)
            asked = list(numbers.items())
        listed = []
        for name, partitions in asked:
            parts = []
            for number in partitions:
                offset, metadata = self.offsets[group].get((name, number), (-1, ""))
                pending = any(of == group and (name, number) in staged for (of, _), staged in self.staged.items())
                error = failure or (UNSTABLE if stable and pending else OK)
                parts.append(pack("iqi", number, -1 if error else offset, -1) + compact(metadata) + pack("h", error))
            listed.append(compact(name) + compacts([part + b"\0" for part in parts]) + b"\0")
        return pack("i", 0) + compacts(listed) + pack("h", failure) + b"\0"

    def _16(self, r: Reader, failure: int) -> bytes:
        groups = [string(group) + string("") for group, offsets in self.offsets.items() if offsets]
        return pack("ih", 0, failure) + array(groups)

    def _19(self, r: Reader, failure: int) -> bytes:
        def topic() -> bytes:
            name, count, _ = r.string() or "", r.take("i"), r.take("h")
            r.array(lambda: (r.take("i"), r.array(lambda: r.take("i"))))
            r.array(lambda: (r.string(), r.string()))
            error = failure or (TOPIC_EXISTS if name in self.topics else OK)
            if not error:
                self.topics[name] = uuid.uuid4().bytes, [Log() for _ in range(max(count, 1))]
            return string(name) + pack("h", error) + string(None)

        return pack("i", 0) + array(r.array(topic))

    def _20(self, r: Reader, failure: int) -> bytes:
        def topic() -> bytes:
            name = r.string() or ""
            error = failure or (OK if self.topics.pop(name, None) else UNKNOWN_TOPIC)
            for offsets in self.offsets.values():
                for place in [place for place in offsets if place[0] == name]:
                    del offsets[place]
            return string(name) + pack("h", error)

        return pack("i", 0) + array(r.array(topic))

    def _21(self, r: Reader, failure: int) -> bytes:
        def partition(topic: str) -> bytes:
            number, offset = r.take("i"), r.take("q")
            log = self.log(topic, number)
            if log is None:
                return pack("iqh", number, -1, UNKNOWN_TOPIC)
            log.start = log.end if offset < 0 else offset
            log.batches = [batch for batch in log.batches if batch[1] > log.start]
            return pack("iqh", number, log.start, failure)

        def topic() -> bytes:
            name = r.string() or ""
            return string(name) + array(r.array(lambda: partition(name)))

        return pack("i", 0) + array(r.array(topic))

    def _37(self, r: Reader, failure: int) -> bytes:
        def topic() -> bytes:
            name, count = r.string() or "", r.take("i")
            r.array(lambda: r.array(lambda: r.take("i")))
            logs = self.topics.get(name, (b"", []))[1]
            error = failure or (OK if logs else UNKNOWN_TOPIC)
            logs += [Log() for _ in range(count - len(logs))]
            return string(name) + pack("h", error) + string(None)

        return pack("i", 0) + array(r.array(topic))


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, cluster: Cluster, port: int) -> None:
        super().__init__(("127.0.0.1", port), Connection)
        self.cluster = cluster
        self.connections: set[socket.socket] = set()
        cluster.address = ("127.0.0.1", self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def leave(self, wait_s: float) -> None:
        """End all connections and refuse new ones for a time; then another server of the cluster takes the port."""
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        time.sleep(wait_s)
        Server(self.cluster, self.cluster.address[1])


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cluster = self.server.cluster  # type: ignore[attr-defined]
        connections = self.server.connections  # type: ignore[attr-defined]
        connections.add(self.request)
        try:
            self._serve(cluster)
        finally:
            connections.discard(self.request)

    def _serve(self, cluster: Cluster) -> None:
        stream = self.request.makefile("rb")
        while len(head := stream.read(4)) == 4:
            r = Reader(stream.read(*struct.unpack(">i", head)))
            api, version, correlation = r.take("h"), r.take("h"), r.take("i")
            out = pack("i", correlation)
            if api == 18 and version > 0:
                out += cluster._18(r, UNSUPPORTED)
            elif version != VERSIONS.get(api, 0):
                raise AssertionError(f"api {api} version {version} is not spoken")
            else:
                r.string()
                if api in (3, 9, 22):  # flexible versions
                    r.tags()
                    out += b"\0"
                try:
                    out += cluster.answer(api, r)
                except ConnectionError:
                    return
            try:
                self.request.sendall(pack("i", len(out)) + out)
            except OSError:  # the client was killed, or the broker leaves
                return
            with cluster.leaving:  # one of the connections ends all
                wait_ms, cluster.away_ms = cluster.away_ms, 0
            if wait_ms:
                threading.Thread(target=self.server.leave, args=(wait_ms / 1000,)).start()  # type: ignore[attr-defined]
                return


def main() -> None:
    server = Server(Cluster(), 0)
    print(server.server_address[1], flush=True)
    sys.stdin.read()


class Broker:
    """The program, started; its address, and the requests of tests."""

    def __init__(self, servers: str, process: subprocess.Popen[str] | None = None) -> None:
        """``process``: that of the program, unless it is a real broker."""
        self.servers, self.process = servers, process
        from confluent_kafka.admin import AdminClient

        self.admin: Any = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def topic(self, partitions: int = 1, name: str = "") -> str:
        """Make a topic; return its name."""
        from confluent_kafka.admin import NewTopic

        name = name or f"t{uuid.uuid4().hex[:12]}"
        self.admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
        return name

    def produce(self, topic: str, values: list[Any], partition: int | None = None) -> None:
        """Write values (bytes, text), without a transaction."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        place = {} if partition is None else {"partition": partition}
        for value in values:
            producer.produce(topic, value, **place)
        assert producer.flush(30) == 0

    def records(self, topic: str) -> list[Any]:
        """Read all committed records, in the order of each partition."""
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        config = {
            "bootstrap.servers": self.servers,
            "group.id": "tests",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
        consumer = Consumer(
            {**config, "log_level": 0, "isolation.level": "read_committed", "enable.auto.commit": False}
        )
        partitions = list(consumer.list_topics(topic, 30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        records, ended = [], set()
        deadline = time.monotonic() + 180
        while len(ended) < len(partitions):
            assert time.monotonic() < deadline
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
            else:
                records.append(message)
        consumer.close()
        return sorted(records, key=lambda message: (message.partition(), message.offset()))

    def hook(self, api: int, error: int, times: int = 1, topic: str | None = None) -> None:
        """Answer the next requests of a kind with an error (-3: do it, and lose the answer); 0 times: no more.

        With the kind -1: cut ``error`` offsets from the end of each log of a topic. With -2: refuse all connections for
        ``error`` milliseconds.
        """
        host, port = self.servers.rsplit(":", 1)
        with socket.create_connection((host, int(port)), 30) as connection:
            body = pack("hhi", HOOK, 0, 0) + string("") + pack("iii", api, error, times)
            body += b"" if topic is None else string(topic)
            connection.sendall(pack("i", len(body)) + body)
            assert connection.recv(8)

    def leave(self, seconds: float, silent: bool = False) -> None:
        """Be away for a time: connections end and are refused, or ``silent``: nothing is answered. Returns after it."""
        if silent:
            assert self.process is not None
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)
        else:
            self.hook(-2, round(seconds * 1000))
            time.sleep(seconds + 0.2)


@contextmanager
def running() -> Iterator[Broker]:
    """A broker for the length of the block. With CUES_KAFKA_BOOTSTRAP=host:port, that one is used."""
    if os.environ.get("CUES_KAFKA_BOOTSTRAP"):
        yield Broker(os.environ["CUES_KAFKA_BOOTSTRAP"])
        return
    with subprocess.Popen(
        [sys.executable, Path(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            broker = Broker(f"127.0.0.1:{int(process.stdout.readline())}", process)
            with broker.admin:  # the garbage collector may not destroy it (processors/kafka.py)
                yield broker
        finally:
            process.kill()


if __name__ == "__main__":
    main()
