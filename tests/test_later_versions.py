"""Data that a later version of Cues wrote is refused with the advice to install it, before a byte changes.

The other advice, such as another name, would begin anew what a newer Cues continues. A table of everything that has a
version of its own: positions of sources, which are found by their declarations, records, checkpoints, rows of targets,
and files of backups. Stores as a whole are in test_format.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contracts_sinks
import msgpack
import pytest
import xxhash
from sets import slow_except
from test_processors_docs import declared, loaded
from test_raw_errors import DECLARATIONS

import cues
from cues import codec, processors, testing
from cues.arguments import NEWER
from cues.checkpoints import JSONFileCheckpoint, Row, packing
from cues.cli import app
from cues.errors import CuesError, Diverged
from cues.graphs.processor import wants_process
from cues.processors.file_sink import FileSink
from cues.records import batch
from cues.storage.backup_manifest import Backup

SOURCES = [
    name
    for name, place in declared().items()
    if processors.facts_of(loaded(place))["Kind"] == "source"
    and name
    not in ("read-csv", "read-jsonl")  # whose positions have no version, and are made by a function of the user
]


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", slow_except([n for n in SOURCES if n != "delta-source"], SOURCES))
def test_a_position_of_a_later_version_is_refused(
    name: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read or connected to."""
    monkeypatch.chdir(tmp_path)
    if name == "delta-source":
        pytest.importorskip("deltalake").write_deltalake("t", pytest.importorskip("pyarrow").table({"a": [1]}))
    kind = loaded(declared()[name])
    make, given = next((make, given) for make, given in DECLARATIONS.values() if make is kind)
    source, position = make(**given), [99, *["later"] * (length - 1)]
    process = SimpleNamespace(state={}, stopping=False, check=lambda rows: rows, id="g.rows", metadata={})
    with pytest.raises(CuesError) as raised:
        next(iter(source(position, process) if wants_process(source) else source(position)))
    assert NEWER in str(raised.value) and "another id" not in str(raised.value)


def a_record(place: Path) -> Callable[[], Any]:
    """A record batch whose head has a higher format, and the right checksum."""
    with cues.open(place / "s") as store:
        queue = store.queue("q")
        queue.appender().write({"n": 1})

        def later(txn: Any) -> None:
            database = store.core.database(b"log:q")
            ((key, value),) = [*txn.cursor(database)]
            rest = bytes([99]) + value[9:]
            digest = xxhash.xxh3_64(rest, seed=struct.unpack(">Q", key)[0]).digest()
            txn.put(key, digest + rest, db=database)

        store.core.commit(later)

    def read() -> Any:
        with cues.open(place / "s") as store:
            return list(store.queue("q").tailer())

    return read


def a_type(place: Path) -> Callable[[], Any]:
    """A value of an extension type that only a later version has."""
    data = msgpack.packb({"v": msgpack.ExtType(120, b"later")})
    return lambda: codec.unpack(data)


def a_queue(place: Path) -> Callable[[], Any]:
    """A queue with a record of another form."""
    with cues.open(place / "s") as store:
        store.queue("q").appender().write({"n": 1})

        def later(txn: Any) -> None:
            key = b"\0queue\0q"
            record = msgpack.unpackb(txn.get(key)[1:-8]) | {"format": 2}
            body = b"\xc1" + msgpack.packb(record)
            txn.put(key, body + xxhash.xxh3_64(body).digest())

        store.core.commit(later)

    def write() -> None:
        with cues.open(place / "s") as store:
            store.queue("q").appender().write({"n": 2})

    return write


def a_checkpoint_file(place: Path) -> Callable[[], Any]:
    path = place / "checkpoint.json"
    path.write_text(json.dumps({"cues": 2, "fence": 1, "checkpoint": None, "state": {}, "more": 1}))

    def begin() -> Any:
        with JSONFileCheckpoint(path) as store:
            return store.restore(1)

    return begin


def a_checkpoint(place: Path) -> Callable[[], Any]:
    return lambda: packing.from_plain({"cues": 2, "offsets": {}, "more": 1})


def a_row_of_files(place: Path) -> Callable[[], Any]:
    graph = cues.Graph("g", [cues.Source("q"), FileSink(place / "out").sink("q")])

    def run() -> Any:
        with cues.open(place / "s") as store:
            store.queue("q").appender().write({"n": 1})
            return testing.run_until_idle(graph, store)

    run()
    (row,) = place.glob("out/_cues/*/*.json")
    row.write_text(json.dumps(json.loads(row.read_text()) | {"cues": 99}))
    return run


def a_record_of_a_shared_directory(place: Path) -> Callable[[], Any]:
    ledger = pytest.importorskip("cues.spark.cluster.ledger")
    return lambda: ledger.LedgerRecord.of(1, {"format": 99, "kind": "later"})


def a_backup(place: Path) -> Callable[[], Any]:
    with cues.open(place / "s") as store:
        store.queue("q").appender().write({"n": 1})
    assert app.run(["backup", str(place / "s"), str(place / "b")]) == 0
    (manifest,) = (path for path in place.glob("b/**/*.json") if '"format"' in path.read_text())
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    return lambda: Backup.load(manifest.parent)


# --- rows that targets keep for sinks -----------------------------------------------------------------


def of_files(target: Any) -> None:
    (row,) = Path(target.path).glob("_cues/*/*.json")
    kept = json.loads(row.read_text())
    row.write_text(json.dumps(kept | {"row": kept["row"] | {"cues": 2, "more": 1}}))


def of_redis(target: Any) -> None:
    target.client.hset(target.key("g.save"), mapping={"cues": 2, "more": 1})


def of_nats(target: Any) -> None:
    headers = {"Cues-Position": json.dumps([2, "g.save", {"more": 1}])}
    contracts_sinks.NATS[0].publish(target.subject_of("g.save"), b"{}", headers=headers)


def of_kafka(target: Any) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    producer = Producer({"bootstrap.servers": target.servers, "transactional.id": target.topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    client = Consumer({"bootstrap.servers": target.servers, "group.id": f"{target.prefix}.g.save"})
    place = TopicPartition(target.topic, 0, 9, json.dumps([2, {"more": 1}]))
    producer.send_offsets_to_transaction([place], client.consumer_group_metadata(), 60)
    producer.commit_transaction(60)
    client.close()


def of_delta(target: Any) -> None:
    import pyarrow as pa
    from deltalake import CommitProperties, Transaction, write_deltalake

    numbers = CommitProperties(app_transactions=[Transaction("cues:g.save:version", 2)])
    write_deltalake(target.open(), pa.table({"n": [-1]}), mode="append", commit_properties=numbers)


def of_iceberg(target: Any) -> None:
    table = target.open()
    ((name, value),) = [item for item in table.properties.items() if item[0].endswith("g.save")]
    with table.transaction() as transaction:
        transaction.set_properties({name: json.dumps(json.loads(value) | {"cues": 2, "more": 1})})


ROWS: dict[str, Callable[[Any], None]] = {
    "jsonl": of_files,
    "redis": of_redis,
    "nats": of_nats,
    "kafka": of_kafka,
    "delta": of_delta,
    "iceberg": of_iceberg,
}


SERVERS = {"redis": contracts_sinks.REDIS, "nats": contracts_sinks.NATS, "kafka": contracts_sinks.KAFKA}


@pytest.mark.parametrize("name", slow_except(["jsonl"], ROWS))
def test_a_row_of_a_later_version_is_refused_by_the_sink(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = contracts_sinks.SINKS[name]
    for module in case.needs:
        pytest.importorskip(module)
    if name in SERVERS:
        SERVERS[name][:] = [request.getfixturevalue(name)]
    target = case.make(tmp_path / "target")
    with cues.open(tmp_path / "s") as store:
        contracts_sinks.feed(store)
        testing.run_until_idle(contracts_sinks.graph_over(case, target), store)
        ROWS[name](target)
        written = case.numbers(case.make(tmp_path / "target")) if name not in ("jsonl", "nats") else []
        store.queue("q").appender().write({"n": 99})
        report = testing.run_until_idle(
            contracts_sinks.graph_over(case, case.make(tmp_path / "target")), store, stopped="return"
        )
        assert written == (case.numbers(case.make(tmp_path / "target")) if written else [])
    error = report.stopped["save"].__cause__
    assert isinstance(error, Diverged) and error.hint == NEWER, error


@pytest.mark.parametrize(
    "kept",
    [
        None, 7, "text", [], [1], {}, [1, "s"], [1, 7, 0, 1, {}, "h"], [1, "s", None, 1, {}, "h"],
        [1, "s", 0, 1, [], "h"], [1, "s", 0, 1, {"t": "x"}, "h"], [1, "s", 0, 1, {}, "h", [1]], ["1x", "s"],
        [1, "s", 0, 1, "{", "h"], [1, "s", 0, 1, "[" * 100_000, "h"], [1, "s", 0, 1, {}, "h", {}, "more"],
        {"store": "s", "generation": 0, "epoch": 1, "ends": "{}", "hash": "h", "more": 1}, {"cues": 0},
    ],
)  # fmt: skip
def test_what_is_not_the_row_of_a_sink_is_refused_in_words(kept: Any) -> None:
    with pytest.raises(Diverged, match=r"The key k has .*not the row of a sink.*Try: use another key"):
        Row.kept(kept, "The key k", "use another key.")


def test_a_sink_reads_no_row_of_another_version() -> None:
    """Although it has the fields of this version: they may mean something else."""
    row = Row("ab" * 8, 2, 3, {"t": 9}, "cd" * 16)
    for version, advice in ((2, NEWER), (0, "use another key.")):
        for kept in ([version, *row.listed()[1:]], {"cues": version, **row.columns()}):
            with pytest.raises(Diverged) as raised:
                Row.kept(kept, "The key k", "use another key.")
            assert raised.value.hint == advice


@pytest.mark.parametrize("seals", [{}, {"t": "ab"}])
def test_a_row_comes_back_from_each_form_in_which_targets_keep_it(seals: dict[str, str]) -> None:
    row = Row("ab" * 8, 2, 3, {"t": 9}, "cd" * 16, seals)
    texts = {name: str(value) for name, value in row.columns().items()}
    forms = [row.listed(), row.columns(), texts, {"cues": 1, **texts}, row._asdict()]
    assert [Row.kept(form, "", "") for form in forms] == [row] * len(forms)
    if not seals:  # of a version before the seals
        assert [Row.kept(form, "", "") for form in (row.listed()[:-1], {**texts, "seals": None})] == [row] * 2


def test_both_sides_of_a_link_name_the_one_that_is_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    import test_link

    from cues.processors import link

    later = b'{"error": "later", "version": 2}'
    head = b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: %d\r\n\r\n" % len(later)
    with test_link.stranger(head + later) as port, pytest.raises(Diverged) as raised:
        link.Sender(f"http://127.0.0.1:{port}/in", token=test_link.TOKEN).ask("")
    assert raised.value.hint == NEWER
    pack = codec.pack
    with test_link.center(tmp_path / "center") as (_, url), pytest.raises(Diverged) as raised:
        monkeypatch.setattr(link.codec, "pack", lambda value: pack(value | {"version": 2}))
        link.Sender(url, token=test_link.TOKEN).ask("")
    assert raised.value.hint == f"there, {NEWER}" and "this receiver version 1" in str(raised.value)


KINDS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "record of messages": a_record,
    "type of values": a_type,
    "queue": a_queue,
    "file of a checkpoint": a_checkpoint_file,
    "checkpoint": a_checkpoint,
    "row of files": a_row_of_files,
    "record of a shared directory": a_record_of_a_shared_directory,
    "backup": a_backup,
}


@pytest.mark.damages_stores
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_later_version_wrote_is_refused_unchanged(kind: str, tmp_path: Path) -> None:
    use = KINDS[kind](tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".jsonl")}
    with pytest.raises(CuesError) as raised:
        use()
    assert NEWER in str(raised.value)
    assert {path: path.read_bytes() for path in before} == before
    assert batch.VERSION == 1
