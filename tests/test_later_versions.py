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

import msgpack
import pytest
import xxhash
from sets import slow_except
from test_processors_docs import declared, loaded
from test_raw_errors import DECLARATIONS

import cues
from cues import codec, processors, testing
from cues.arguments import NEWER
from cues.checkpoints import JSONFileCheckpoint, packing
from cues.cli import app
from cues.errors import CuesError
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
