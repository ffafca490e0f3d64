"""Make the golden files of this version's format:  python tests/golden/make.py v1-columns

    v1/data.mdb             a small store, cut behind its last used page
    v1/records.txt          every key and value in it, in hex, with what they are
    v1/batches.txt          single record batches, in hex, field by field
    v1-seals/data.mdb       the same store with seals in rows that had none in version 1
    v1-seals/records.txt    every key and value in it
    v1-unread/data.mdb      the same store, whose queue between processors keeps seven days and what is unread
    v1-unread/records.txt   every key and value in it
    v1-keys/data.mdb        the same store, whose checksums cover the keys of the rows
    v1-keys/records.txt     every key and value in it
    v1-columns/data.mdb     a store with records of columns
    v1-columns/records.txt  every key and value in it
    v1-shared/              a shared directory whose files are beside one another, without statistics

They are made once and never again: a store of version 1 that somebody has does not change either. A
test that differs from them means that the format changed. Then it is another version, with files of
its own beside these, and code that still reads these.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zoneinfo import ZoneInfo

import cues
from cues import codec, testing
from cues.base import clock
from cues.queues.options import changed
from cues.records import batch
from cues.records.provenance import Provenance
from cues.steps.hashes import delivery_hash
from cues.steps.results import Output
from cues.steps.returned import _column

HERE = Path(__file__).parent
START_NS = 1_359_633_600_000_000_000
"""2013-01-31T12:00:00Z; every look at the clock is a second later."""

ORDERS: list[dict[str, Any]] = [
    {"n": 1, "item": "tea", "q/type": "order", "q/topics": ["shop"]},
    {"n": 2, "item": "coffee", "q/meta": {"from": "web"}},
    {"n": 3, "item": "cake"},
]
LARGE = {"n": 4, "item": "x" * 9000}
TYPES: dict[str, Any] = {
    "n": 5,
    "plain": [None, True, -1, 2**64 - 1, 1.5, "größe", b"\x00\xff", {"1": 1, 2: [3]}],
    "datetime": datetime(2013, 1, 31, 12, 30, 1, 5),
    "utc": datetime(2013, 1, 31, tzinfo=UTC),
    "zone": datetime(2013, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "date": date(2013, 1, 31),
    "time": time(12, 30),
    "zoned time": time(2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "timedelta": timedelta(days=-1, seconds=2, microseconds=3),
    "decimal": Decimal("1.10"),
    "uuid": uuid.UUID(int=7),
    "tuple": (1, ("a", [2])),
    "set": {1, 2, 3},
    "frozenset": frozenset({7}),
    "big": [2**64, -(2**70)],
}


def price(order: dict[str, Any], process: Any) -> dict[str, Any]:
    """The stream of the golden graph: counts in state, prices everything at twice its number."""
    process.state["count"] = process.state.get("count", 0) + 1
    return {"n": order["n"], "price": order["n"] * 2}


def deliver(priced: dict[str, Any]) -> None:
    """The sink of the golden graph."""


class _Fixed:
    """The clock, the random numbers and the process of the golden store."""

    def __init__(self) -> None:
        self._now = START_NS
        self._random = random.Random(2013)

    def now_ns(self) -> int:
        self._now += 1_000_000_000
        return self._now

    def urandom(self, size: int) -> bytes:
        return self._random.randbytes(size)


def _origins_one_by_one(binding: str, kept: list[Any], in_columns: Sequence[bytes]) -> Output:
    """The form in which the first version stored the indices from which messages came, if there was state."""
    output = _column(binding, kept, in_columns)
    return Output(output.items, output.origins or list(range(len(output.items))))


def make(path: Path) -> None:
    """The golden store, from public calls only; the same bytes at every run."""
    fixed = _Fixed()
    fake = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
    fake.getpid = lambda: 4242
    with (
        mock.patch.object(clock, "now_ns", fixed.now_ns),
        mock.patch.object(os, "urandom", fixed.urandom),
        mock.patch.object(clock, "boot_id", return_value="golden"),
        mock.patch("cues.steps.ownership.os", fake),
        mock.patch("cues.steps.returned._column", _origins_one_by_one),
        mock.patch("cues.steps.meter.Meter.measure"),  # looks at the clock, for nothing that a store keeps
    ):
        fake.urandom = fixed.urandom
        graph = cues.Graph("golden", queues={"orders": cues.QueueOptions(metadata={"t", "time", "tx"}, retention=1000)})
        graph.source("orders")
        graph.stream("orders", "priced")(price)
        graph.sink("priced", step_s=None)(deliver)  # one step of all, as when the files were made
        with cues.open(path, durability="disk") as store:
            queue = store.queue("orders", metadata={"t", "time", "tx"}, retention=1000)
            appender = queue.appender()
            appender.write_many(ORDERS)
            appender.write(LARGE)
            appender.write(TYPES)
            queue.tailer("reader").read_many(2)
            testing.run_until_idle(graph, store)


def tables() -> dict[str, list[Any]]:
    """The contents of each queue of the store with records of columns: tables, and lists of messages."""
    import pyarrow as pa

    first = pa.table(
        {
            "n": pa.array([1, 2, None]),
            "text": ["größe", None, ""],
            "at": pa.array([1, -1, None], pa.timestamp("us", "UTC")),
            "tags": [["a", "b"], [], None],
            "price": pa.array([Decimal("1.50"), None, Decimal("-2.00")], pa.decimal128(8, 2)),
            "inside": [{"x": 1.5}, None, {"x": None}],
        }
    )
    cities = pa.table({"city": pa.array(["Bern", "Zug", "Bern", None]).dictionary_encode()})
    return {
        "mixed": [[{"n": 1}, {"n": "two"}], first, [{"n": 3}], cities],
        "plain": [pa.table({"n": range(1_200)})],
        "small": [pa.table({"n": [n % 7 for n in range(3_000)], "text": ["a text that repeats"] * 3_000})],
        "fast": [pa.table({"text": ["another text"] * 3_000})],
    }


COMPRESSIONS = {"plain": None, "small": "zstd", "fast": "lz4"}


def make_columns(path: Path) -> None:
    """Write the store with records of columns."""
    with cues.open(path) as store:
        for name, written in tables().items():
            appender = store.queue(name, compression=COMPRESSIONS.get(name, "zstd")).appender()
            for each in written:
                appender.write_many(each) if isinstance(each, list) else appender.write_table(each)
        store.queue("mixed").tailer("reader").read_many(4)


def shared_graph() -> cues.Graph:
    """The graph of the golden shared directory: a stream of each message, and one with a state by key."""
    options = cues.QueueOptions(partitions=2, key="user")
    graph = cues.Graph("golden", queues={"orders": options, "priced": changed(options, {"schema": PRICED})})

    @graph.stream("orders", "priced")
    def price_each(order: dict[str, Any]) -> dict[str, Any]:
        return {**order, "price": order["n"] * 2.5}

    @graph.stream("priced", "totals", key="user")
    def total(priced: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["total"] = process.state.get("total", 0) + priced["price"]
        return {"user": priced["user"], "total": process.state["total"]}

    return graph


PRICED = {"n": "long", "user": "string", "price": "double"}


def shared_orders(low: int, high: int) -> list[dict[str, Any]]:
    """The messages of the golden shared directory, from one number to another."""
    return [{"n": n, "user": f"user {n % 3}"} for n in range(low, high)]


def make_shared(path: Path, count: int = 20) -> None:
    """The shared directory after this number of messages, in steps of five; an older one is continued."""
    sys.path.insert(0, str(HERE.parent))
    from directory_steps import DriverRun

    from cues.spark.cluster.files import open_files

    files = open_files(str(path))
    files.ensure("_cues/id.json", b'{"id": "golden"}')
    with mock.patch("socket.gethostname", return_value="golden"):
        driver = DriverRun(files, shared_graph(), size=lambda: 5).claim()
    driver.feed("orders", shared_orders(0, count), lambda: 5).run()


def pairs(store: cues.Store) -> Iterator[tuple[str, bytes, bytes]]:
    """Every (place, key, value) of a store, LMDB's own entries for named databases left out."""
    with store.core.view() as txn:
        rows = list(txn.cursor())
    databases = sorted(key for key, _ in rows if not key.startswith(b"\0"))
    for key, value in rows:
        if key.startswith(b"\0"):
            yield "rows", key, value
    for name in databases:
        handle = store.core.database(name)
        with store.core.view() as txn:
            for key, value in txn.cursor(handle):
                yield name.decode(), key, value


def records(store: cues.Store) -> str:
    """:func:`pairs` as text: a comment that says what it is, then key and value in hex."""
    lines = ["# Every key and value of data.mdb: the key, then the value. docs/format.md says what they mean."]
    place = None
    for where, key, value in pairs(store):
        if where != place:
            lines += ["", f"## {'the unnamed database' if where == 'rows' else where}"]
            place = where
        lines += ["", f"# {_label(where, key)}", key.hex(), *_wrapped(value)]
    return "\n".join(lines) + "\n"


def _label(where: str, key: bytes) -> str:
    if where.startswith("log:"):
        first = int.from_bytes(key[:8], "big")
        return f"record at {first}" if len(key) == 8 else f"piece {int.from_bytes(key[8:], 'big')} of {first}"
    if where.startswith("state:"):
        return f"state, piece {int.from_bytes(key[-2:], 'big')}"
    return " ".join(repr(part.decode("utf-8", "replace")) for part in key.split(b"\0") if part)


def _wrapped(value: bytes) -> list[str]:
    text = value.hex()
    return [f"  {text[at : at + 96]}" for at in range(0, len(text), 96)] or ["  "]


def parse(text: str) -> list[tuple[bytes, bytes]]:
    """The pairs that :func:`records` wrote."""
    found: list[tuple[bytes, bytes]] = []
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        if line.startswith("  "):
            key, value = found[-1]
            found[-1] = key, value + bytes.fromhex(line)
        else:
            found.append((bytes.fromhex(line), b""))
    return found


def samples() -> dict[str, tuple[int, list[bytes]]]:
    """Single record batches by what they show: the index at which each stands, its value, and its pieces."""
    digest = bytes.fromhex(delivery_hash("golden.price", 0, [("golden.price.orders", b"identity", 1, 3)]))
    two = [{"n": 1}, {"n": 2}]
    came = Provenance(2, {"orders": (range(7, 9), START_NS), "tx/t": ([3, 5], None)})
    mixed = Provenance(2, {"orders": ([7, 0], [START_NS, START_NS + 1])}, [None, {"from": "web"}])
    found = {}
    for name, index, messages, hash, provenance in [
        ("plain: two messages, nothing else", 1, two, None, None),
        ("with a delivery hash", 3, two, digest, None),
        ("with a delivery hash and provenance: a range, one time for all, and tx/t", 5, two, digest, came),
        ("provenance that differs by message, and q/meta of the second", 7, two, None, mixed),
        ("cut: one message of 5,000 bytes", 9, [{"x": b"y" * 5000}], None, None),
    ]:
        [page] = batch.build(messages, 1 << 20, hash, provenance)
        value = batch.seal(page, index, START_NS)
        found[name] = index, [value, *(batch.seal_piece(piece, n) for n, piece in enumerate(page.pieces, 1))]
    return found


def batches() -> str:
    """:func:`samples`, field by field."""
    lines = ["# Record batches, field by field; docs/format.md, 'Record batches'."]
    for name, (index, (value, *pieces)) in samples().items():
        version, flags, count, time_ns = struct.unpack_from(">BBHQ", value, 8)
        lines += ["", f"## {name}, at index {index}", ""]
        fields = [
            (8, f"checksum: xxh3-64 of the rest, seed {index}"),
            (1, f"format version {version}"),
            (1, f"flags {flags:#04x}"),
            (2, f"count {count}"),
            (8, f"append time {time_ns} ns"),
        ]
        at = 20
        if flags & batch.HASH:
            fields.append((16, "delivery hash"))
            at += 16
        if flags & batch.PROVENANCE:
            (size,) = struct.unpack_from(">H", value, at)
            fields += [
                (2, f"length of the provenance: {size}"),
                (size, f"provenance: {codec.unpack(value[at + 2 : at + 2 + size])!r}"),
            ]
            at += 2 + size
        if flags & batch.CONTINUED:
            fields.append((4, f"length of the whole body: {struct.unpack_from('>I', value, at)[0]}"))
            at += 4
        shown = repr(codec.unpack(value[at:])) if not pieces else "its beginning"
        fields.append((len(value) - at, f"body: {shown}"))
        at = 0
        for size, words in fields:
            lines += [f"# {words}", *_wrapped(value[at : at + size])]
            at += size
        for number, piece in enumerate(pieces, 1):
            lines += ["", f"# piece {number}: checksum with seed {number}", *_wrapped(piece[:8])]
            lines += ["# and bytes of the body", *_wrapped(piece[8:])]
    return "\n".join(lines) + "\n"


def unwrapped(text: str) -> list[bytes]:
    """The bytes of each section of ``batches.txt``."""
    found: list[bytes] = []
    for line in text.splitlines():
        if line.startswith("## "):
            found.append(b"")
        elif line.startswith("  "):
            found[-1] += bytes.fromhex(line)
    return found


def main() -> None:
    name = sys.argv[1]
    target = HERE / name
    if target.exists():
        sys.exit("The golden files of this version exist. A format that differs from them is a new version.")
    if name == "v1-shared":
        make_shared(target)
        return
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "store")
        {"v1-keys": make, "v1-columns": make_columns}[name](path)
        with cues.open(path, readonly=True) as store:
            (target / "records.txt").write_text(records(store))
            used = store.info()["used"]
        shutil.copy(path / "data.mdb", target / "data.mdb")
        os.truncate(target / "data.mdb", used)


if __name__ == "__main__":
    main()
