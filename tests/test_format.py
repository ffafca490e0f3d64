"""The bytes on disk: a change of them cannot go unnoticed (docs/format.md, tests/golden)."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import re
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pyarrow as pa
import pytest
import xxhash
from small import DECODERS

import cues
from cues import codec
from cues.base import names
from cues.errors import StoreVersion
from cues.graphs.processor_rows import ProcessorRow, read_topology
from cues.records.batch import Batch
from cues.records.log_row import unpack_row
from cues.steps.hashes import delivery_hash
from cues.storage import format_record
from cues.txn import append_stamped, build_uuid

GOLDEN = Path(__file__).parent / "golden"
V1 = GOLDEN / "v1"
SEALS = GOLDEN / "v1-seals"
UNREAD = GOLDEN / "v1-unread"
KEYS = GOLDEN / "v1-keys"
COLUMNS = GOLDEN / "v1-columns"
ALL, ALL_KEYS = ([GOLDEN / name / store for store in ("home", "other", "replay")] for name in ("v1-all", "v1-all-keys"))
STORES = [V1, SEALS, UNREAD, KEYS, COLUMNS, *ALL, *ALL_KEYS]
DOCS = Path(__file__).parent.parent / "docs" / "format.md"


def _golden(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{name}", GOLDEN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


golden = _golden("make")
everything = _golden("everything")


@pytest.fixture(params=[V1, SEALS, UNREAD, KEYS], ids=lambda golden: golden.name)
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a golden store: of the first version, with seals, with the retention of graphs, with seals of keys."""
    return copied(request.param, tmp_path / "old")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A copy of the golden store of the first version."""
    return copied(V1, tmp_path / "first")


def copied(golden: Path, path: Path) -> Path:
    path.mkdir(parents=True)
    if (golden / "data.mdb").exists():
        shutil.copy(golden / "data.mdb", path)
    else:
        (path / "data.mdb").write_bytes(gzip.decompress((golden / "data.mdb.gz").read_bytes()))
    return path


def test_a_store_of_version_1_is_read(old: Path) -> None:
    """Written by the first version; every message, its metadata, the positions, the state and the try logs."""
    with cues.open(old, readonly=True) as store:
        assert store.durability == "disk"
        assert store.queues(all=True) == ["golden.deliver", "golden.price", "orders", "priced"]
        orders = store.queue("orders")
        assert orders.options == cues.QueueOptions(metadata={"t", "time", "tx"}, retention=1000)
        expected = [{k: v for k, v in m.items() if k != "q/meta"} for m in (*golden.ORDERS, golden.LARGE, golden.TYPES)]
        found = list(orders.tailer())
        assert found == expected
        assert found[4]["zone"].fold == 1 and found[4]["zone"].tzinfo.key == "Europe/Berlin"
        assert [type(v) for v in found[4].values()] == [type(v) for v in golden.TYPES.values()]
        assert orders.tailer("reader").index == 3
        priced = store.queue("priced").tailer(meta=True)
        second = priced.read_many(5)[1]
        assert {k: v for k, v in second.items() if k != "q/meta"} == {"n": 2, "price": 4}
        identity = orders.core.row().identity
        digest = delivery_hash("golden.price", 0, [("golden.price.orders", identity, 1, 6)])
        assert second["q/meta"]["q/hash"] == digest
        assert second["q/meta"]["from"] == "web"
        assert second["q/meta"]["tx/t"] == 2 and second["q/meta"]["q/queue"]["orders"]["q/t"] == 2
        assert cues.testing.state(store, "golden.price") == {"count": 5}
        kinds = [m["q/type"] for m in store.queue("golden.price").tailer()]
        assert kinds == [names.SNAPSHOT, names.ATTEMPT]


def test_queues_of_a_store_of_version_1_grow(old: Path) -> None:
    """The messages of the only log stay in it, and its processor continues as the first unit."""
    graph = cues.Graph("golden")
    graph.source("orders")
    graph.stream("orders", "priced")(golden.price)
    graph.sink("priced", id="deliver")(golden.deliver)
    with cues.open(old) as store:
        orders = store.queue("orders", key="n")
        before, reader = list(orders.tailer()), orders.tailer("reader").index
        orders.grow(3)
        assert list(orders.partition(0).tailer()) == before
        assert orders.tailer("reader").positions == {0: reader, 1: 1, 2: 1}
        orders.appender().write_many([{"n": n} for n in range(100, 130)])
        there = len(store.queue("priced"))
        report = cues.testing.run_until_idle(graph, store)
        assert (report.decisions["price"], report.decisions["price/1"]) == ("resume", "fresh")
        assert len(store.queue("priced")) == there + 30
        assert store.check() == []


def test_a_store_of_version_1_is_written_and_run_on(old: Path) -> None:
    graph = cues.Graph("golden")
    graph.source("orders")
    graph.stream("orders", "priced")(golden.price)
    graph.sink("priced")(golden.deliver)
    with cues.open(old) as store:
        assert store.queue("orders").appender().write({"n": 6}) == 6
        cues.testing.run_until_idle(graph, store)
        assert [m["price"] for m in store.queue("priced").tailer()] == [2, 4, 6, 8, 10, 12]
        assert cues.testing.state(store, "golden.price") == {"count": 6}


@pytest.mark.parametrize("files", [V1, SEALS, UNREAD, KEYS, COLUMNS], ids=lambda files: files.name)
def test_every_row_and_record_of_the_golden_store_is_what_it_was(tmp_path: Path, files: Path) -> None:
    with cues.open(copied(files, tmp_path / "old"), readonly=True) as store:
        now = [(key, value) for _, key, value in golden.pairs(store)]
    then = golden.parse((files / "records.txt").read_text())
    assert len(then) > 20
    assert now == then


@pytest.mark.parametrize("files", [V1, SEALS, UNREAD, KEYS, COLUMNS], ids=lambda files: files.name)
def test_every_golden_store_opens_grows_and_is_whole(tmp_path: Path, files: Path) -> None:
    with cues.open(copied(files, tmp_path / "old")) as store:
        assert store.check() == []
        for name in store.queues():
            queue = store.queue(name)
            before = list(queue.tailer())
            queue.appender().write({"n": 99})
            assert list(queue.tailer()) == [*before, {"n": 99}]
        assert store.check() == []


@pytest.mark.damages_stores
@pytest.mark.parametrize("files", STORES, ids=lambda files: files.name)
@pytest.mark.parametrize("change", [{"format": 2}, {"requires": ["seals", "of a later version"]}], ids=str)
def test_a_golden_store_that_a_later_version_wrote_is_refused_unchanged(
    tmp_path: Path, files: Path, change: dict[str, Any]
) -> None:
    path = copied(files, tmp_path / "old")
    with cues.open(path) as store:
        store.core.commit(
            lambda txn: txn.put(names.FORMAT_KEY, format_record.pack_record({**format_record.record_of(txn), **change}))
        )
    before = (path / "data.mdb").read_bytes()
    for readonly in (True, False):
        with pytest.raises(StoreVersion):
            cues.open(path, readonly=readonly)
    assert (path / "data.mdb").read_bytes() == before


def test_every_kind_of_row_is_in_a_golden_store(tmp_path: Path) -> None:
    """The kinds are the literals of bytes in names.py; a kind that is added there needs a golden store with it."""
    literals = {
        node.value
        for node in ast.walk(ast.parse(Path(names.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes)
    }
    kinds, found = {literal.strip(b"\0:") for literal in literals} - {b""}, set()
    for files in STORES:
        with cues.open(copied(files, tmp_path / files.parent.name / files.name), readonly=True) as store:
            found |= {
                (key.split(b"\0")[1] if place == "rows" else place.partition(":")[0].encode())
                for place, key, _ in golden.pairs(store)
            }
    assert len(kinds) > 30 and found == kinds


@pytest.mark.damages_stores
@pytest.mark.parametrize(
    ("all", "loses"),
    [(ALL, None), (ALL_KEYS, None), (ALL_KEYS, names.CLAIMS)],
    ids=["of before", "with seals of keys", "control"],
)
def test_a_golden_store_with_everything_is_continued_to_its_end(
    tmp_path: Path, all: list[Path], loses: bytes | None
) -> None:
    """All that was under way when the files were copied; the control loses the claims of the group."""
    homes = [copied(files, tmp_path / files.name) for files in all]
    for place in homes:
        with cues.open(place) as store:
            assert store.check() == []
            if loses is not None:
                doomed = [key for _, key, _ in golden.pairs(store) if key.startswith(loses)]
                store.core.commit(lambda txn: [txn.delete(key) for key in doomed])
    everything.go_on(tmp_path)
    results = {}
    for place in homes:
        with cues.open(place, readonly=True) as store:
            assert store.check() == []
            for name in store.queues():
                results[name] = list(store.queue(name).tailer(isolation="committed"))
    worked, jobs = sorted(message["n"] for message in results["worked"]), [job["n"] for job in everything.JOBS]
    if loses is not None:
        assert len(worked) > len(jobs), "the messages before the lost positions are there twice"
        return
    assert worked == jobs
    every = list(range(everything.COUNT))
    for name in ("away", "back", "later", "pended", "fired", "parted", "done", "seen"):
        assert sorted(message["n"] for message in results[name]) == every, name
    for key in range(3):
        counts = [message["count"] for message in results["done"] if message["k"] == key]
        assert counts == list(range(1, len(counts) + 1))
    assert [message["last"] for message in results["seen"]] == every
    assert [message["n"] for message in results["moved"]] == everything.JOURNAL
    assert results["table"] == [{"n": 1}, {"n": 2}, {"n": 3}] and results["old"][-1] == {"n": 5}
    assert [message["n"] for message in results["out"]] == [0, 2, 4, 6, 8]
    assert [error.state for error in cues.list_errors(homes[0], settled=True)] == [
        "resolved",
        "failed again",
        "resolved",
    ]


def test_a_store_with_records_of_columns_is_read(tmp_path: Path) -> None:
    with cues.open(copied(COLUMNS, tmp_path / "old")) as store:
        with store.core.view() as txn:
            assert format_record.record_of(txn)["requires"] == ["columns", "keys", "seals"]
        for name, written in golden.tables().items():
            queue = store.queue(name)
            messages = [m for each in written for m in (each if isinstance(each, list) else each.to_pylist())]
            assert list(queue.tailer()) == messages
            assert queue.options.compression == golden.COMPRESSIONS.get(name, "zstd")
            if name != "mixed":  # whose messages and tables have other columns, and two types of n
                assert queue.to_arrow().equals(pa.concat_tables(written))
        tailer = store.queue("mixed").tailer()
        tailer.read_many(2)
        assert tailer.read_table(3).equals(golden.tables()["mixed"][1])
        assert store.queue("mixed").tailer("reader").index == 5
        assert store.check() == []


def test_a_record_of_columns_by_hand(tmp_path: Path) -> None:
    with cues.open(copied(COLUMNS, tmp_path / "s"), readonly=True) as store:
        log = store.queue("plain").core.log
        with store.core.view() as txn:
            ((first, value, pieces),) = log.read(txn, log.row(txn), 1, 1)
            flags, count = value[9], struct.unpack_from(">H", value, 10)[0]
            assert (first, flags, count, len(value)) == (1, 0x48, 1_200, 4080)
            (length,) = struct.unpack_from(">I", value, 20)
            body = value[24:] + b"".join(piece[8:] for piece in pieces)
            hash, size = struct.unpack_from(">8sI", body)
            assert len(body) == length and size == 0
            row = txn.get(b"\0schema\0plain\0" + hash)
        assert xxhash.xxh3_64_digest(row[:-8]) == row[-8:] == hash
        with pa.ipc.open_stream(pa.py_buffer(row[:-8] + body[12:])) as stream:
            assert stream.read_next_batch().to_pydict() == {"n": list(range(1_200))}


def test_rows_without_a_seal_get_one_when_they_are_written(first: Path) -> None:
    """A store of the first version is read, continued and checked; then its rows are those of today."""
    graph = cues.Graph("golden")
    graph.source("orders")
    graph.stream("orders", "priced")(golden.price)
    graph.sink("priced", id="deliver")(golden.deliver)
    with cues.open(first) as store:
        assert store.check() == []
        store.queue("orders", retention=900)
        assert [m["n"] for m in store.queue("orders").tailer("reader").read_many(2)] == [3, 4]
        store.queue("orders").appender().write({"n": 6})
        cues.testing.run_until_idle(graph, store)
        assert cues.testing.state(store, "golden.price") == {"count": 6}
        with store.core.view() as txn:
            assert msgpack.unpackb(txn.get(b"\0cues"))["requires"] == ["keys", "seals"]
            assert txn.get(b"\0queue\0orders")[:1] == b"\xc1"
            assert len(txn.get(b"\0reader\0orders\0reader")) == 32
            [(key, value)] = list(txn.cursor(store.core.database(b"state:golden.price")))
            assert value[:8] == xxhash.xxh3_64(key + value[8:]).digest()
        assert store.check() == []


@pytest.mark.parametrize("files", [SEALS, KEYS], ids=lambda files: files.name)
def test_sealed_rows_by_hand(tmp_path: Path, files: Path) -> None:
    """The seed of the checksum is that of the key; in a store of before it is 0."""
    seed_of = xxhash.xxh3_64_intdigest if files is KEYS else lambda key: 0
    with cues.open(copied(files, tmp_path / "s"), readonly=True) as store, store.core.view() as txn:
        for key, of in ((b"\0queue\0orders", "options"), (b"\0topo\0golden.price", "tailers")):
            raw = txn.get(key)
            assert raw[:1] == b"\xc1" and raw[-8:] == xxhash.xxh3_64_digest(raw[:-8], seed_of(key))
            assert of in msgpack.unpackb(raw[1:-8])
        raw = txn.get(key := b"\0reader\0orders\0reader")
        assert len(raw) == 32 and raw[-8:] == xxhash.xxh3_64_digest(raw[:-8], seed_of(key))
        record = msgpack.unpackb(txn.get(b"\0cues"))
        seal = record.pop("seal")
        assert record["requires"] == (["seals"] if files is SEALS else ["keys", "seals", "unread"])
        assert seal == xxhash.xxh3_64(msgpack.packb(record)).digest()


@pytest.mark.interpreted
def test_the_same_calls_write_the_same_bytes(tmp_path: Path) -> None:
    """With the clock and the random numbers of the golden store, byte for byte: a difference is a new format."""
    golden.make(tmp_path / "new")
    with cues.open(tmp_path / "new", readonly=True) as store:
        text = golden.records(store)
    assert text.splitlines() == (KEYS / "records.txt").read_text().splitlines()


def test_single_record_batches_are_what_they_were() -> None:
    assert golden.batches() == (V1 / "batches.txt").read_text()
    sections = golden.unwrapped((V1 / "batches.txt").read_text())
    assert sections == [b"".join(parts) for _, parts in golden.samples().values()]


def test_a_record_batch_by_hand() -> None:
    """Read with nothing but struct, msgpack and xxhash: what another program would do."""
    index, [value] = golden.samples()["with a delivery hash"]
    assert value[:8] == xxhash.xxh3_64(value[8:], seed=index).digest()
    assert struct.unpack(">BBHQ", value[8:20]) == (1, 0x01, 2, golden.START_NS)
    packed = msgpack.packb([1, "golden.price", 0, [["golden.price.orders", b"identity", 1, 3]], None])
    assert value[20:36] == xxhash.xxh3_128(packed).digest()
    assert msgpack.unpackb(value[36:]) == [{"n": 1}, {"n": 2}]


def test_rows_by_hand(first: Path) -> None:
    with cues.open(first, readonly=True) as store:
        log = store.core.database(b"log:orders")
        with store.core.view() as txn:
            rows_are_as_documented(txn, log)


def rows_are_as_documented(txn: Any, log: Any) -> None:
    raw = txn.get(b"\0row\0orders")
    identity, first, after, _, version = struct.unpack(">8sQQQI", raw[:-8])
    assert raw[-8:] == xxhash.xxh3_64(raw[:-8]).digest()
    assert (first, after, version) == (1, 6, 1)
    assert unpack_row(b"\0row\0orders", raw).identity == identity
    assert msgpack.unpackb(txn.get(b"\0queue\0orders"))["identity"] == identity

    raw = txn.get(b"\0reader\0orders\0reader")
    assert struct.unpack(">8sQ8s", raw)[:2] == (identity, 3)
    assert raw[16:] == txn.get(struct.pack(">Q", 1), db=log)[:8], "the seal of the batch before"

    raw = txn.get(b"\0proc\0golden.price")
    head = struct.unpack_from(">8sQQQ8sBB", raw)
    assert head[1:] == (1, 0, 4242, xxhash.xxh3_64(b"golden").digest(), 0, 1)
    assert struct.unpack_from(">8sQ8s", raw, 42)[:2] == (identity, 6)
    assert raw[-8:] == xxhash.xxh3_64(raw[:-8]).digest()
    assert ProcessorRow.unpack(b"\0proc\0golden.price", raw).epoch == 1
    topology = read_topology(txn, "golden.price")
    assert topology is not None and topology.tailers == ("golden.price.orders",)
    assert txn.get(b"\0sub\0orders\0golden.price") == b""
    record = msgpack.unpackb(txn.get(b"\0cues"))
    assert (record["format"], record["requires"], record["durability"]) == (1, [], "disk")


def test_a_cut_message_by_hand(old: Path) -> None:
    with cues.open(old, readonly=True) as store:
        log = store.core.database(b"log:orders")
        with store.core.view() as txn:
            rows = [(k, v) for k, v in txn.cursor(log) if k[:8] == struct.pack(">Q", 4)]
    assert [len(key) for key, _ in rows] == [8, 12, 12]
    assert [struct.unpack(">I", key[8:])[0] for key, _ in rows[1:]] == [1, 2]
    assert all(len(value) <= 4080 for _, value in rows)
    head = rows[0][1]
    assert head[9] == 0x08
    (length,) = struct.unpack_from(">I", head, 20)
    body = head[24:] + b"".join(value[8:] for _, value in rows[1:])
    assert len(body) == length
    assert msgpack.unpackb(body) == [golden.LARGE]


def test_identities_have_the_bytes_that_the_page_says(tmp_path: Path) -> None:
    """Regular clocks, clocks one by one, an acknowledgement, two producers, and the row of what a producer wrote."""
    producer, other = bytes.fromhex("010203040506"), bytes.fromhex("0a0b0c0d0e0f")

    def stamped(*clocks: int, flags: int = 1, by: bytes = producer) -> list[Any]:
        return [(build_uuid(by, clock, flags), {"n": 1}) for clock in clocks]

    with cues.open(tmp_path / "s") as store:
        queue = store.queue("q")
        append_stamped(queue, stamped(160, 320, 480))
        append_stamped(queue, stamped(640, 641, 1000))
        append_stamped(queue, stamped(2000, 2000 + (1 << 40)))
        with store.core.view() as txn:
            row = txn.get(key := b"\0clock\0q\0" + b"010203040506")
        append_stamped(queue, stamped(1 << 41, flags=2))
        with store.core.view() as txn:
            log = store.core.database(b"log:q")
            found = {struct.unpack(">Q", key)[0]: value for key, value in txn.cursor(log)}
            after = txn.get(b"\0clock\0q\0" + b"010203040506")
        mixed = [*stamped((1 << 41) + 7, flags=0), *stamped(1 << 41, flags=0, by=other)]
        append_stamped(queue, [*mixed, *stamped((1 << 41) + 9, flags=0)])
        with store.core.view() as txn:
            value = dict(txn.cursor(store.core.database(b"log:q")))[struct.pack(">Q", 10)]
    assert value[9] == 0x32 and value[20:].hex() == (
        "010203040506" "0000020000000000" "0000" "01" "070009" "01" "0a0b0c0d0e0f" "000100" + "93" + "81a16e01" * 3
    )  # fmt: skip
    body = bytes.fromhex("81a16e01")
    two, three = (b"\x92" + body * 2).hex(), (b"\x93" + body * 3).hex()
    assert {index: (value[9], value[20:].hex()) for index, value in found.items()} == {
        1: (0x02, "010203040506" "00000000000000a0" "0001" + three),
        4: (0x12, "010203040506" "0000000000000280" "0001" "02" "0000" "0001" "0168" + three),
        7: (0x12, "010203040506" "00000000000007d0" "0001" "08" + "00" * 8 + "0000010000000000" + two),
        9: (0x02, "010203040506" "0000020000000000" "0002" "9180"),
    }  # fmt: skip
    last = 2000 + (1 << 40)
    assert row[:32] == struct.pack(">QQQQ", last, 159, 1, 160) and row[32:] == xxhash.xxh3_64_digest(
        row[:32], xxhash.xxh3_64_intdigest(key)
    )
    assert after[:32] == struct.pack(">QQQQ", 1 << 41, 1 << 41, 0, 0)


def test_the_reserved_places_are_kept() -> None:
    """No code may take these for itself."""
    assert names.processor_key("g.p.fork.0123456789abcdef") == b"\0proc\0g.p.fork.0123456789abcdef"
    assert names.log_database("q", 3) == b"log:q/3" and names.row_key("q", 3) == b"\0row\0q/3"
    assert set(range(100, 112)) == {code for code in DECODERS if code > codec.USER_CODE_MAX}


def test_every_extension_type_is_in_the_documentation() -> None:
    text = DOCS.read_text()
    for code in sorted(DECODERS):
        if code > codec.USER_CODE_MAX:
            assert re.search(rf"^\| {code} \|", text, re.M), f"extension {code}"


def test_the_worked_example_of_the_delivery_hash_is_true() -> None:
    text = DOCS.read_text()
    packed = re.search(r"```hash-input\n(.*?)```", text, re.S)
    digest = re.search(r"`([0-9a-f]{32})`", text)
    assert packed is not None and digest is not None
    raw = bytes.fromhex("".join(re.findall(r"^((?:[0-9a-f]{2} ?)+)", packed[1], re.M)).replace(" ", ""))
    value: Any = [1, "golden.price", 0, [["golden.price.orders", b"identity", 1, 3]], None]
    assert raw == msgpack.packb(value)
    assert xxhash.xxh3_128(raw).hexdigest() == digest[1]
    assert delivery_hash("golden.price", 0, [("golden.price.orders", b"identity", 1, 3)]) == digest[1]
    unsorted = [("t2", b"22222222", 1, 2), ("t1", b"11111111", 1, 2)]
    assert delivery_hash("p", 0, unsorted) == delivery_hash("p", 0, unsorted[::-1])


def test_a_batch_that_was_read_says_what_was_written() -> None:
    for index, (value, *pieces) in golden.samples().values():
        found = Batch(index, value, pieces)
        assert found.is_complete() and found.first == index
        assert found.next == index + found.head.count
