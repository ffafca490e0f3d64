"""Rows and their keys: a checksum covers both, so a row whose key has a wrong bit is found, and is never used."""

from __future__ import annotations

import ast
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import cues
from cues import testing, txn
from cues.base import names
from cues.base.names import ProcessorKey
from cues.checkpoints import LMDBCheckpoint
from cues.errors import CuesError, StoreDamaged
from cues.forwarding import external_writers
from cues.groups import Member
from cues.records import batch, sealed
from cues.records.identity import Flags, assemble
from cues.storage import format_record, transaction
from cues.tools import salvage
from cues.txn import Consumer

CUES = Path(cues.__file__).parent
GOLDEN = Path(__file__).parent / "golden"

WRITES = {
    "engine/identities.py": ["names.subscription_key(queue, new)"],
    "queues/cursor.py": ["self.row_key"],
    "queues/log.py": ["_pack_key(index)", "items", "self.key", "_pack_key(index)", "self.key"],
    "records/sealed.py": ["key"],
    "steps/commit.py": ["self.fence.key", "self.fence.key"],
    "steps/ownership.py": ["names.subscription_key(queue, claimant.processor)"],
    "steps/state.py": ["written"],
    "storage/format_record.py": ["names.FORMAT_KEY", "names.FORMAT_KEY", "names.FORMAT_KEY", "key"],
    "storage/replica.py": ["rows"],
    "tools/follower.py": ["_COPIED", "_COPIED"],
    "tools/replay.py": ["key", "items", "[(key, value) for key, value in note.state_rows[id]]", "key"],
    "tools/salvage.py": ["KEY.pack(opened.first)", "row + number.to_bytes(2, 'big')", "entry.key", "key"],
}
"""All writes but those of ``sealed.put()``: messages, state, rows without a body, rows of a kept seed, and copies."""
CHECKSUMS = {
    "queues/log.py", "records/batch.py", "records/sealed.py", "steps/state.py", "storage/datafile.py", "tools/check.py",
}  # fmt: skip
"""The modules that make checksums: of records, of rows, of state, of the format record; and of schemas, as names."""


@pytest.mark.interpreted  # it reads the sources
def test_no_other_code_writes_or_seals_rows() -> None:
    writes: dict[str, list[str]] = {}
    checksums = set()
    for file in CUES.rglob("*.py"):
        name, text = file.relative_to(CUES).as_posix(), file.read_text()
        if re.search(r"[^\w.](batch\.)?checksum\(", text):
            checksums.add(name)
        for node in ast.walk(ast.parse(text)) if re.search(r"\bputmulti\(|txn\.put\(", text) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("put", "putmulti"):
                owner = ast.unparse(node.func).rpartition(".")[0]
                if owner.split("(")[0].endswith(("txn", "cursor", "txn.cursor")):
                    writes.setdefault(name, []).append(ast.unparse(node.args[0]))
    checksums.discard("txn/journals.py")  # another function of that name
    assert {name: sorted(keys) for name, keys in writes.items()} == {
        name: sorted(keys) for name, keys in WRITES.items()
    }
    assert checksums == CHECKSUMS


def test_a_checksum_covers_the_key_and_the_body() -> None:
    key, body = names.producer_key(b"storeidx", ProcessorKey("g.f")), b"what it says"
    row = sealed.seal(key, body)
    assert row == body + xxhash.xxh3_64_digest(body, xxhash.xxh3_64_intdigest(key))
    assert sealed.intact(key, row) and sealed.belongs(key, row)
    for bit in range(8 * len(key)):
        wrong = bytearray(key)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not sealed.intact(bytes(wrong), row) and sealed.renewed(bytes(wrong), row) is None


def test_a_row_of_an_earlier_version_is_read_and_renewed() -> None:
    key, row = b"\0row\0in", b"body" + batch.checksum(b"body")
    assert sealed.intact(key, row) and sealed.unseal(key, row, "row") == b"body" and not sealed.belongs(key, row)
    assert sealed.renewed(key, row) == sealed.seal(key, b"body")
    assert sealed.renewed(key, sealed.seal(key, b"body")) is None, "it has the checksum of today"
    assert sealed.renewed(key, row[:-1] + b"x") is None, "damage is not sealed"
    assert not sealed.intact(key, batch.checksum(b"")) and not sealed.intact(key, b"")


def golden(name: str, place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "data.mdb").write_bytes(gzip.decompress((GOLDEN / name / "data.mdb.gz").read_bytes()))
    return place


@pytest.mark.parametrize("name", ["home", "other", "replay"])
def test_the_rows_of_a_store_of_before_are_renewed_when_it_is_opened(tmp_path: Path, name: str) -> None:
    """In one commit, with the feature that keeps earlier versions away. An opening for reading changes nothing."""
    place = golden(f"v1-all/{name}", tmp_path / name)
    kept = (place / "data.mdb").read_bytes()

    def keyed(store: cues.Store) -> list[bool]:
        with store.core.view() as txn:
            rows = [row for row in transaction.rows(txn, b"\0") if row[0] != names.FORMAT_KEY and row[1]]
            assert "keys" in format_record.record_of(txn)["requires"] or not any(sealed.belongs(*row) for row in rows)
            return [sealed.belongs(*row) for row in rows]

    with cues.open(place, readonly=True) as store:
        assert not any(keyed(store)) and store.check() == []
    assert (place / "data.mdb").read_bytes() == kept
    with cues.open(place) as store:
        number = store.core.commit(lambda txn: txn.id())
        assert all(keyed(store)) and store.check() == []
    with cues.open(place) as store:
        assert store.core.commit(lambda txn: txn.id()) == number, "an opening after that writes nothing"


# --- rows that a start would not find ---------------------------------------------------------------


def graph(place: Path) -> cues.Graph:
    """``in ─▶ f ─▶ out`` in the other store, with a sink; and pending messages for that store."""
    away = cues.QueueOptions(path=place / "away")
    graph = cues.Graph("g", store=place / "home", errors="errors", queues={"out": away, "pended": away})
    graph.stream("in", "out", id="f")(lambda message: message)
    graph.stream("in", "pended", id="p", across="pending")(lambda message: message)
    graph.sink("out", id="s")(lambda message: None)
    graph.stream("in", "kept", id="k", key="n", max_errors="100/h")(keep)
    graph.sink("in", id="paused")(lambda message: None)
    return graph


def keep(message: dict[str, Any], process: Any) -> dict[str, Any]:
    process.state["seen"] = process.state.get("seen", 0) + 1
    if message["n"] == 3:
        raise ValueError("this message always fails")
    return message | {"seen": process.state["seen"]}


class Copier:
    def __init__(self, to: cues.Queue) -> None:
        self._to = to

    def consume(self, envelope: Any, publisher: Any) -> None:
        publisher.publish_uncommitted(lambda _: self._to, envelope.message)

    def finalize(self, publisher: Any) -> None:
        return None


def work(place: Path) -> None:
    """The work of all readers and writers: the first call does it, and the second finds nothing to do."""
    with cues.open(place / "home") as home:
        testing.run_until_idle(graph(place), home)
    for use in (read, load, join, consume, publish):
        use(place)
    with cues.open(place / "home") as home:
        cues.pause(home, processor="paused")


def run(place: Path) -> None:
    with cues.open(place / "home") as home:
        testing.run_until_idle(graph(place), home)


def read(place: Path) -> None:
    with cues.open(place / "home") as home, home.queue("in").tailer("reader") as tailer:
        tailer.read_many(100)


def load(place: Path) -> None:
    with cues.open(place / "home") as home:

        def write(txn: Any) -> None:
            if external_writers.read(txn, "job") is None:
                external_writers.put(txn, "job", external_writers.SourceRow("in", 5, ["range", 4]))

        home.core.commit(write)


def join(place: Path) -> None:
    with cues.open(place / "home") as home, Member(home, "in", "team", name="me") as member:
        while member.read_many(100):
            pass


def consume(place: Path) -> None:
    with cues.open(place / "home") as home:
        Consumer(Copier(home.queue("copy")), [home.queue("in")], LMDBCheckpoint(home, "copier"), lease_s=0).drain()


def publish(place: Path) -> None:
    """Messages that were stamped elsewhere: the first call appends them, and any other one appends none."""
    with cues.open(place / "home") as home:
        producer, at = 0x010203040506, 1 << 40
        stamped = [(assemble(producer, at + n, Flags.OUTSIDE_TXN), {"n": n}) for n in range(3)]
        stamped.append((assemble(producer, at + 3, Flags.CONTINUE_TXN), {"n": 3}))
        txn.append_stamped(home.queue("stamped"), stamped)


LOST: list[tuple[str, bytes, Callable[[Path], None]]] = [
    ("away", names.PRODUCERS, run),
    ("home", names.PROCESSORS, run),
    ("home", names.PENDINGS, run),
    ("home", names.queue_key("in"), run),
    ("home", names.READERS, read),
    ("home", names.SOURCES, load),
    ("home", names.CLAIMS, join),
    ("home", names.CHECKPOINTS, consume),
    ("home", names.PAUSES, run),
    ("home", names.FAILURES, run),
    ("home", names.CLOCKS, publish),
    ("home", names.OPENS, publish),
]
"""Rows without which a start would begin anew, and repeat messages: the store, their prefix, and what does that."""


def counts(place: Path) -> dict[str, int]:
    found = {}
    for name in ("home", "away"):
        with cues.open(place / name, readonly=True) as store:
            for queue in store.queues():
                found[f"{name} {queue}"] = len(list(store.queue(queue).tailer(isolation="committed")))
    return found


@pytest.mark.damages_stores
def test_a_start_that_does_not_find_its_row_looks_for_it_under_other_keys(tmp_path: Path) -> None:
    """Without that, the first would forward again: all messages of the other store would be there twice."""
    with cues.open(tmp_path / "home") as home:
        home.queue("in").appender().write_many([{"n": n} for n in range(4)])
    work(tmp_path)
    work(tmp_path)
    before = counts(tmp_path)
    assert before == {
        "home in": 4, "home copy": 4, "home kept": 3, "home stamped": 3, "home errors": 1,
        "away out": 4, "away pended": 4,
    }  # fmt: skip
    for name, prefix, use in LOST:
        with cues.open(tmp_path / name) as store:
            with store.core.view() as txn:
                key, row = next(transaction.rows(txn, prefix))
            wrong = key[:-1] + bytes([key[-1] ^ 1])
            store.core.commit(lambda txn, k=key, w=wrong, r=row: (txn.delete(k), txn.put(w, r)))
        with pytest.raises(StoreDamaged, match=r"is under the key|it is missing") as caught:
            use(tmp_path)
        assert " Try: " in str(caught.value) and str(tmp_path / name) in str(caught.value), prefix
        with cues.open(tmp_path / name) as store:
            assert any(re.search("damaged|cannot be (used|read)", problem) for problem in store.check()), prefix
            store.core.commit(lambda txn, k=key, w=wrong, r=row: (txn.delete(w), txn.put(k, r)))
    work(tmp_path)
    assert counts(tmp_path) == before
    for name in ("home", "away"):
        with cues.open(tmp_path / name, readonly=True) as store:
            assert store.check() == []


@pytest.mark.slow
@pytest.mark.damages_stores
def test_a_salvage_mends_a_wrong_bit_of_a_key(tmp_path: Path) -> None:
    """The row of what was forwarded has its key again; without it the next start would forward again."""
    with cues.open(tmp_path / "home") as home:
        home.queue("in").appender().write_many([{"n": n} for n in range(4)])
    work(tmp_path)
    before = counts(tmp_path)
    with cues.open(tmp_path / "away") as away:
        with away.core.view() as txn:
            key, row = next(transaction.rows(txn, names.PRODUCERS))
        away.core.commit(lambda txn: (txn.delete(key), txn.put(key[:-1] + bytes([key[-1] ^ 4]), row)))
    (tmp_path / "away").rename(tmp_path / "damaged")
    done = salvage.salvage(tmp_path / "damaged", tmp_path / "away")
    assert [loss.kind for loss in done.losses] == ["structure"] and "was wrong" in str(done.losses[0].why)
    with cues.open(tmp_path / "away", readonly=True) as store, store.core.view() as txn:
        assert txn.get(key) == row
    work(tmp_path)
    assert counts(tmp_path) == before


@pytest.mark.parametrize("name", ["home", "other", "replay"])
def test_each_kind_of_row_is_found_under_each_wrong_key(tmp_path: Path, name: str) -> None:
    """All bits of one key of each kind. The empty notes of readers of a log are not among them: a start writes them."""
    place = golden(f"v1-all/{name}", tmp_path / name)
    kinds: dict[bytes, tuple[bytes, bytes]] = {}

    def look(txn: Any) -> None:
        transaction.refuse_lost(txn)
        for key, row in txn.cursor():
            kind = key.split(b"\0")[1] if key[:1] == b"\0" else key.split(b":")[0]
            if row and key != names.FORMAT_KEY:
                kinds.setdefault(kind, (key, row))
        for kind, (key, row) in kinds.items():
            for bit, wrong in enumerate(sealed.with_one_bit_changed(key)):
                if kind in (b"log", b"state", b"errors") or txn.get(wrong) is not None:
                    continue  # the row of a database, which LMDB alone may change
                txn.delete(key)
                txn.put(wrong, row)
                with pytest.raises(StoreDamaged, match="is under the key") as caught:
                    transaction.refuse_lost(txn)
                assert repr(key) in str(caught.value), (kind, bit)
                txn.delete(wrong)
                txn.put(key, row)
        transaction.refuse_lost(txn)

    with cues.open(place) as store:
        store.core.commit(look)
    assert len(kinds) > {"home": 20, "other": 8, "replay": 5}[name], sorted(kinds)


@pytest.mark.damages_stores
def test_state_under_the_name_of_no_processor_is_not_begun_anew(tmp_path: Path) -> None:
    """LMDB keeps the name of a database as the key of a row. The state of a removed processor is not damage."""
    with cues.open(tmp_path / "home") as home:
        home.queue("in").appender().write_many([{"n": n} for n in range(4)])
    work(tmp_path)
    data = (tmp_path / "home" / "data.mdb").read_bytes()
    for own in (b"state:g.k", b"state:checkpoint:copier", b"errors"):
        assert own in data
        for bit in range(8 * len(own)):
            wrong = bytearray(own)
            wrong[bit // 8] ^= 1 << bit % 8
            (tmp_path / "home" / "data.mdb").write_bytes(data.replace(own, bytes(wrong)))
            with pytest.raises(CuesError) as caught:
                run(tmp_path)
                consume(tmp_path)
            assert " Try: " in str(caught.value), bit
    (tmp_path / "home" / "data.mdb").write_bytes(data)
    with cues.open(tmp_path / "home") as home:
        graph = cues.Graph("g", store=home)
        graph.sink("in", id="other")(lambda message: None)
        testing.run_until_idle(graph, home, accept_topology=True)


def test_a_row_that_is_written_during_the_search_is_not_lost(store: cues.Store) -> None:
    """The search sees one moment. In another one the row is under its key too."""
    key = names.source_key("w")
    store.core.commit(lambda txn: sealed.put(txn, key, b"body"))
    with store.core.view() as txn:
        store.core.commit(lambda txn: (txn.delete(key), sealed.put(txn, names.source_key("v"), b"other")))
        transaction.refuse_lost(txn)
    with store.core.view() as txn:
        transaction.refuse_lost(txn)
