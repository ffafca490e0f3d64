"""Stores: what is opened, shared, refused, full, damaged or forked, and that each says so and loses nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import lmdb
import pytest
import seeds

import cues
from cues.base import clock, names
from cues.errors import (
    BatchDamaged,
    Closed,
    CuesError,
    DurabilityMismatch,
    Forked,
    InvalidArgument,
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreFull,
    StoreNotFound,
    StoreReadOnly,
    StoreVersion,
)
from cues.storage import environment as stores
from cues.storage import format_record, lmdb_errors, lmdb_map, map_growth, open_mark, timeline
from cues.storage.lmdb_map import MAP_BYTES
from cues.tools import salvage

DURABILITIES = ["process", "disk"]
ROOT = os.geteuid() == 0


def numbers(queue: cues.Queue) -> list[int]:
    return [m["n"] for m in queue.tailer()]


def make(path: Path, durability: str = "disk", count: int = 100) -> Path:
    with cues.open(path, durability=durability) as store:
        store.queue("q").appender().write_many([{"n": n, "x": "x" * 100} for n in range(1, count + 1)])
    return path


def flip(path: Path, content: bytes = b"\xa1n\xcd\x03\xe8") -> None:
    """Flip a bit after the place of ``content`` (message 1000) in the data file; a second call mends it."""
    with (path / "data.mdb").open("r+b") as file:
        at = file.read(16 << 20).index(content) + 20
        file.seek(at)
        bit = file.read(1)[0] ^ 0x10
        file.seek(at)
        file.write(bytes([bit]))


# --- opening --------------------------------------------------------------------------------------


def test_opening_twice_shares_one_environment(tmp_path: Path) -> None:
    """LMDB refuses to open a file twice; by another path, a link or a relative path it is the same store."""
    before = set(stores.environments)  # of other tests
    make(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with (
        cues.open(tmp_path / "store") as one,
        cues.open(str(tmp_path / "link")) as two,
        cues.open(os.path.relpath(tmp_path / "store")) as three,
        cues.open(tmp_path / "store", readonly=True) as four,
    ):
        assert {id(s.core.environment) for s in (one, two, three, four)} == {id(one.core.environment)}
        assert one.id == four.id
        one.queue("q").appender().write({"n": 101})
        assert all(len(s.queue("q")) == 101 for s in (two, three, four))
        with pytest.raises(StoreReadOnly):
            four.queue("q").appender().write({})
        one.close()
        assert two.queue("q").appender().write({"n": 102}) == 102
    assert set(stores.environments) == before
    with cues.open(tmp_path / "store") as again:
        assert numbers(again.queue("q")) == list(range(1, 103))


def test_many_threads_that_open_and_close_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(who: int) -> None:
        try:
            barrier.wait()
            for n in range(10):
                with cues.open(tmp_path / "store", durability="process") as store:
                    store.queue("q").appender().write({"who": who, "n": n})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with cues.open(tmp_path / "store") as store:
        assert len(store.queue("q")) == 80


FIRST = """
import sys, cues
path, durability = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
print("ready"); input()
with cues.open(path, durability=durability) as store:
    store.queue("q").appender().write({"n": 1})
    print(store.id.hex(), store.durability)
"""


def test_processes_that_make_a_store_at_once_make_one(tmp_path: Path, checked: Any) -> None:
    """Whoever comes first decides; who said nothing of durability takes it as it was made."""
    for round_ in range(3):
        path = tmp_path / str(round_)
        workers = [children.Child(FIRST, path, *(["process"] if n % 2 else [])) for n in range(6)]
        for worker in workers:
            worker.line()
        for worker in workers:
            worker.say()
        found, refused = set(), 0
        for worker in workers:
            if worker.returncode() == 0:
                found.add(worker.rest.strip())
            else:
                assert "DurabilityMismatch: " in worker.errors()
                refused += 1
        assert len(found) == 1
        with cues.open(path) as store:
            assert len(store.queue("q")) == 6 - refused
            assert refused == 0 or store.durability == "disk"


def test_a_store_whose_maker_was_killed_at_once_is_new(tmp_path: Path) -> None:
    with children.Child(
        "import sys, os, cues, cues.storage.environment as s\n"
        "s.write_format = lambda *a: os.kill(os.getpid(), 9)\n"
        "cues.open(sys.argv[1])",
        tmp_path / "store",
    ) as child:
        assert child.returncode() == -9
    assert (tmp_path / "store" / "data.mdb").exists()
    with pytest.raises(StoreNotFound):
        cues.open(tmp_path / "store", readonly=True)
    make(tmp_path / "store", "process")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"durability": "none"}, "Unknown durability"),
        ({"map_size": 1000}, "map_size is 1000"),
        ({"map_size": "1GB"}, "map_size is '1GB'"),
        ({"map_size": 1e9}, "map_size is"),
    ],
)
@pytest.mark.interpreted
def test_an_argument_that_cannot_be_meant(tmp_path: Path, arguments: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        cues.open(tmp_path / "store", **arguments)
    assert not (tmp_path / "store").exists()


def test_a_map_that_no_address_space_holds(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="address space"):
        cues.open(tmp_path / "store", map_size=1 << 60)
    make(tmp_path / "store")


def test_durability_is_fixed_when_the_store_is_made(tmp_path: Path) -> None:
    for made, other in (DURABILITIES, DURABILITIES[::-1]):
        make(tmp_path / made, made)
        with pytest.raises(DurabilityMismatch) as caught:
            cues.open(tmp_path / made, durability=other)
        assert (caught.value.found, caught.value.asked) == (made, other)
        with cues.open(tmp_path / made) as store:
            assert store.durability == made
            with pytest.raises(DurabilityMismatch):
                cues.open(tmp_path / made, durability=other)
    with cues.open(tmp_path / "default") as store:
        assert store.durability == "disk"


def test_opening_for_writing_what_is_open_readonly_here(tmp_path: Path) -> None:
    make(tmp_path / "store")
    with cues.open(tmp_path / "store", readonly=True), pytest.raises(StoreReadOnly, match="open read-only in this"):
        cues.open(tmp_path / "store")
    cues.open(tmp_path / "store").close()


@pytest.mark.parametrize("inode", ["same", "other"])
def test_a_store_made_anew_under_an_open_handle_is_another(tmp_path: Path, monkeypatch: Any, inode: str) -> None:
    """A deleted directory's inode is given to the next one: the old environment must not be found under it."""
    path = tmp_path / "store"
    old = cues.open(path)
    old.queue("q").appender().write({"n": 1})
    if inode == "same":
        monkeypatch.setattr(stores, "directory_key", lambda path, readonly: (path.mkdir(exist_ok=True), (1, 1))[1])
        stores.environments = {(1, 1): old.core.environment}
        old.core.environment.key = (1, 1)
    shutil.rmtree(path)
    with cues.open(path) as new:
        assert new.id != old.id
        assert new.queues() == []
        old.close()
        new.queue("q").appender().write({"n": 2})
        with cues.open(path) as again:
            assert again.core.environment is new.core.environment
    with cues.open(path) as new:
        assert numbers(new.queue("q")) == [2]


@pytest.mark.interpreted
def test_more_queues_than_a_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lmdb_errors, lmdb_map, stores):
        monkeypatch.setattr(module, "DATABASES_MAX", 256)
    with cues.open(tmp_path / "store", durability="process") as store:
        with pytest.raises(StoreError, match="no room for more queues") as caught:
            for n in range(300):
                store.queue(f"q{n}").appender().write({"n": n})
        assert caught.value.path
        assert numbers(store.queue("q5")) == [5]
    with cues.open(tmp_path / "store") as store:
        assert len(store.queues()) >= 250
        assert numbers(store.queue("q200")) == [200]
        for n in range(len(store.queues()), 400):
            store.queue(f"q{n}").appender().write({"n": n})
        assert numbers(store.queue("q399")) == [399]


def test_info_and_sync(tmp_path: Path) -> None:
    with cues.open(make(tmp_path / "store", "process")) as store:
        store.sync()
        info = store.info()
        assert info["map"] == store.map_size == MAP_BYTES
        assert 0 < info["used"] <= info["disk"] < 16 << 20
        assert "process" in repr(store)
    assert "closed" in repr(store)


# --- places that are no stores ---------------------------------------------------------------------


def test_a_disk_store_syncs_each_commit_and_a_process_store_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line before the disk: nothing in a test without a power cut would notice that it is missing."""
    with cues.open(tmp_path / "disk", durability="disk") as store:
        assert store.core.environment.env.flags()["sync"] and store.core.environment.env.flags()["metasync"]
    with cues.open(tmp_path / "process", durability="process") as store:
        real, synced = store.core.environment.env, []

        class Recorder:
            def sync(self, force: bool = False) -> None:
                synced.append(force)
                real.sync(force)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        with monkeypatch.context() as patch:
            patch.setattr(store.core.environment, "env", Recorder())
            store.sync()
        assert synced == [True]


def test_what_a_refused_member_of_a_shared_transaction_wrote_is_not_kept(tmp_path: Path) -> None:
    """Two commits of a "disk" store wait for the disk at once. One writes a row and then raises, the other does not."""
    refused: list[str] = []

    def write(txn: Any, key: bytes, error: Exception | None = None) -> None:
        txn.put(key, b"here")
        if error is not None:
            raise error

    def refuse() -> None:
        try:
            store.core.commit(write, b"x-refused", ValueError("no"))
        except ValueError as error:
            refused.append(str(error))

    with cues.open(tmp_path / "disk", durability="disk") as store:
        group = store.core.environment.group
        threads = [threading.Thread(target=refuse), threading.Thread(target=store.core.commit, args=(write, b"x-kept"))]
        with group.leading:
            for count, thread in enumerate(threads, 1):
                thread.start()
                while len(group.waiting) < count:
                    os.sched_yield()
        for thread in threads:
            thread.join()
        with store.core.view() as txn:
            assert (txn.get(b"x-refused"), txn.get(b"x-kept")) == (None, b"here")
    assert refused == ["no"]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for readonly in (False, True):
        with pytest.raises(StoreForeign, match="is a file"):
            cues.open(tmp_path / "file", readonly=readonly)
    with pytest.raises(StoreError, match="Not a directory"):
        cues.open(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too long"):
        cues.open(tmp_path / ("x" * 300))


def test_no_store_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(StoreNotFound):
            cues.open(path, readonly=True)
    assert not (tmp_path / "missing").exists() and not list((tmp_path / "empty").iterdir())


@pytest.mark.damages_stores
@pytest.mark.parametrize(
    "content",
    [b"x", b"\0" * 4096, b"\0" * 100_000, random.Random(1).randbytes(100_000), b"hello\n" * 5000],
    ids=["a byte", "a page", "zeros", "noise", "text"],
)
def test_another_file_that_is_called_data_mdb(tmp_path: Path, content: bytes) -> None:
    data = tmp_path / "store" / "data.mdb"
    data.parent.mkdir()
    data.write_bytes(content)
    for readonly in (True, False):
        with pytest.raises((StoreForeign, StoreDamaged)):
            cues.open(tmp_path / "store", readonly=readonly)
    assert data.read_bytes() == content


@pytest.mark.damages_stores
def test_a_directory_that_is_called_data_mdb(tmp_path: Path) -> None:
    (tmp_path / "store" / "data.mdb").mkdir(parents=True)
    with pytest.raises(StoreError):
        cues.open(tmp_path / "store")


@pytest.mark.damages_stores
@pytest.mark.parametrize("named", [False, True])
def test_an_lmdb_environment_of_another_program(tmp_path: Path, named: bool) -> None:
    env = lmdb.open(str(tmp_path / "store"), max_dbs=4, lib_version=0)
    with env.begin(write=True) as txn:
        txn.put(b"theirs", b"value", db=env.open_db(b"sub", txn=txn) if named else None)
    env.close()
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    for readonly in (True, False):
        with pytest.raises(StoreForeign, match="not a Cues store"):
            cues.open(tmp_path / "store", readonly=readonly)
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before


@pytest.mark.damages_stores
@pytest.mark.parametrize(
    ("change", "words"),
    [({"format": 2}, "has format 2"), ({"requires": ["segments"]}, "requires segments"), ({"format": None}, "format")],
)
def test_a_newer_store_is_refused_and_not_touched(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = make(tmp_path / "store")
    with cues.open(path) as store:
        store.core.commit(
            lambda txn: txn.put(names.FORMAT_KEY, format_record.pack_record({**format_record.record_of(txn), **change}))
        )
    before = (path / "data.mdb").read_bytes()
    for readonly in (True, False):
        with pytest.raises(StoreVersion, match=words) as caught:
            cues.open(path, readonly=readonly)
        assert (caught.value.found, caught.value.supported) == (change.get("format", 1), 1)
    assert (path / "data.mdb").read_bytes() == before


@pytest.mark.damages_stores
def test_a_feature_that_a_wrong_bit_has_made_is_damage_and_no_newer_version(tmp_path: Path) -> None:
    """A newer version of Cues would not help, and a salvage makes the record anew."""
    path = make(tmp_path / "store")
    with cues.open(path) as store:
        store.core.commit(lambda txn: txn.put(names.FORMAT_KEY, txn.get(names.FORMAT_KEY).replace(b"seals", b"reals")))
    with pytest.raises(StoreDamaged, match="format record"):
        cues.open(path)
    done = salvage.salvage(path, tmp_path / "new")
    assert [loss.name for loss in done.losses] == ["the format record"]
    with cues.open(tmp_path / "new") as store:
        assert len(store.queue("q")) == 100


def test_additions_of_a_newer_version_are_not_an_obstacle(tmp_path: Path) -> None:
    path = make(tmp_path / "store")
    with cues.open(path) as store:
        store.core.commit(
            lambda txn: txn.put(
                names.FORMAT_KEY, format_record.pack_record({**format_record.record_of(txn), "note": 1})
            )
        )
    with cues.open(path) as store:
        assert len(store.queue("q")) == 100


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.damages_stores
@pytest.mark.parametrize("keep", [1, 100, 4095, 4096, 8191, 8192, 20_000, -4096, -1])
def test_a_truncated_data_file_is_refused_before_it_is_mapped(tmp_path: Path, keep: int) -> None:
    path = make(tmp_path / "store", count=5000)
    data = path / "data.mdb"
    with cues.open(path) as store:
        used = store.info()["used"]
    os.truncate(data, keep if keep > 0 else used + keep)
    for readonly in (True, False):
        with pytest.raises(StoreDamaged, match="truncated") as caught:
            cues.open(path, readonly=readonly)
        assert caught.value.hint
    assert data.stat().st_size == (keep if keep > 0 else used + keep)


READ_ALL = """
import sys, cues, cues.errors
found, damaged, wrong = [], [], []
try:
    with cues.open(sys.argv[1], readonly=True) as store:
        tailer = store.queue("q").tailer()
        while True:
            try:
                message = tailer.read()
            except cues.errors.BatchDamaged as error:
                assert error.last >= error.first >= 1
                damaged.append((error.first, error.last))
                tailer.to_index(min(error.last + 1, store.queue("q").core.row().next))
                if len(damaged) > 2000: break
                continue
            if message is None:
                break
            if message != {"n": message.get("n"), "x": "x" * 100} or message["n"] != tailer.last_read_index:
                wrong.append(message)
            found.append(message["n"])
except cues.errors.CuesError as error:
    print("refused", type(error).__name__)
else:
    print(len(found), len(damaged), len(wrong), len(set(found)) == len(found))
"""


@pytest.mark.damages_stores
def test_flipped_bits_never_give_a_wrong_message(tmp_path: Path) -> None:
    """One bit anywhere in the file: what is read is what was written, or an error says what cannot be read.

    LMDB itself may be killed by a structure that is broken (SIGSEGV, SIGBUS, abort): counted, and rare.
    """
    seed = seeds.new()
    rng = random.Random(seed)
    path = make(tmp_path / "store", count=2000)
    data = path / "data.mdb"
    with cues.open(path) as store:
        used = store.info()["used"]
    whole = data.read_bytes()[:used]
    deaths = 0
    for _ in range(12):
        place = rng.randrange(8192, used)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        data.write_bytes(bytes(flipped))
        with children.Child(READ_ALL, path) as child:
            code, out, errors = child.returncode(), child.rest, child.errors()
        if code < 0:
            deaths += 1
            continue
        assert code == 0, (place, errors)
        if not out.startswith("refused"):
            found, damaged, wrong, unique = out.split()
            assert (wrong, unique) == ("0", "True"), place
            assert int(found) == 2000 or int(damaged) > 0, place
    assert deaths <= 3


@pytest.mark.damages_stores
def test_a_flipped_bit_in_a_batch_is_found_and_its_neighbours_are_read(tmp_path: Path) -> None:
    path = make(tmp_path / "store", count=2000)
    flip(path)
    with cues.open(path) as store:
        tailer = store.queue("q").tailer()
        found = [m["n"] for m in tailer.read_many(5000)]
        with pytest.raises(BatchDamaged) as caught:
            tailer.read()
        error = caught.value
        assert error.first <= 1000 <= error.last < error.first + 60
        assert found == list(range(1, error.first))
        assert pickle.loads(pickle.dumps(error)).last == error.last
        tailer.to_index(error.last + 1)
        assert [m["n"] for m in tailer] == list(range(error.last + 1, 2001))
        assert store.queue("q").appender().write({"n": 2001}) == 2001
        assert any("q" in problem for problem in store.check())


# --- the boot ----------------------------------------------------------------------------------------


def test_the_mark_open_exists_only_while_a_store_is_written(tmp_path: Path) -> None:
    path = make(tmp_path / "store", "process")
    assert not (path / "open").exists()
    write = "cues.open(sys.argv[1]).queue('q').appender().write({'n': 0})"
    with cues.open(path) as store:
        assert len(store.queue("q")) == 100
        assert not (path / "open").exists(), "reading is not writing"
        store.queue("q").appender().write({"n": 100})
        assert (path / "open").read_text().split() == [clock.boot_id(), *timeline.inodes(path)]
        with cues.open(path, readonly=True):
            pass
        assert (path / "open").exists()
        code = f"import sys, cues; s = cues.open(sys.argv[1]); {write}; s.close()"
        children.run(code, path)
        assert (path / "open").exists(), "another process is not the last"
    assert not (path / "open").exists()
    with cues.open(make(tmp_path / "disk", "disk")) as store:
        store.queue("q").appender().write({"n": 100})
        assert (tmp_path / "disk" / "open").exists()
    assert not (tmp_path / "disk" / "open").exists()
    with children.Child(f"import sys, os, cues; {write}; os.kill(os.getpid(), 9)", path) as child:
        assert child.returncode() == -9
    assert (path / "open").exists()
    cues.open(path).close()
    assert not (path / "open").exists()


@pytest.mark.parametrize("mark", ["another boot", ""])
def test_a_store_of_another_boot_is_checked_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mark: str
) -> None:
    """The machine went down while it was written; the mark itself may have come back empty."""
    path = make(tmp_path / "store", "process")
    (path / "open").write_text(mark)
    with caplog.at_level(logging.WARNING, "cues"), cues.open(path) as store:
        assert "was written under another boot" in caplog.text
        assert "are correct" in caplog.text
        assert len(store.queue("q")) == 100
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cues"), cues.open(path):
        assert caplog.text == ""


def test_a_mark_is_never_seen_half_written(tmp_path: Path) -> None:
    """An empty one would be of another boot: of a process that is killed there, or that opens the store meanwhile."""
    ended = threading.Event()
    for name in ("locks", "data.mdb"):
        (tmp_path / name).touch()

    def mark() -> None:
        while not ended.is_set():
            open_mark.write(tmp_path, durable=False)
            open_mark.delete(tmp_path)

    thread = threading.Thread(target=mark)
    thread.start()
    try:
        assert not any(open_mark.is_suspect(tmp_path) for _ in range(20_000))
    finally:
        ended.set()
        thread.join()


@pytest.mark.damages_stores
def test_a_damaged_store_of_another_boot_is_refused_until_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "store", "process", 2000)
    flip(path)
    (path / "open").write_text("another boot")
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="when the machine went down") as caught:
            cues.open(path)
        assert "backup" in caught.value.hint
    with caplog.at_level(logging.WARNING, "cues"), cues.open(path, readonly=True) as store:
        assert "cues check tells" in caplog.text
        assert store.check(), "a look is possible, and finds it"
    flip(path)
    with cues.open(path) as store:
        assert len(store.queue("q")) == 2000


@pytest.mark.interpreted
def test_a_check_that_is_killed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(tmp_path / "store", "process")
    (path / "open").write_text("another boot")
    code = "import sys, os, cues; cues.Store.check = lambda self: os.kill(os.getpid(), 9); cues.open(sys.argv[1])"
    with children.Child(code, path) as child:
        assert child.returncode() == -9
    with caplog.at_level(logging.WARNING, "cues"), cues.open(path):
        assert "was written under another boot" in caplog.text


# --- full ---------------------------------------------------------------------------------------------


def fill(store: cues.Store, sizes: tuple[int, ...] = (50, 3000, 100_000)) -> int:
    """Write until it is full; returns how many messages were acknowledged."""
    appender = store.queue("q").appender()
    written = 0
    with pytest.raises(StoreFull) as caught:
        while True:
            size = sizes[written % len(sizes)]
            if written % 5 == 4:
                appender.write_many([{"n": written + 1 + i, "x": b"x" * size} for i in range(10)])
                written += 10
            else:
                appender.write({"n": written + 1, "x": b"x" * size})
                written += 1
    assert caught.value.hint and "nothing was written" in str(caught.value)
    assert numbers(store.queue("q")) == list(range(1, written + 1))
    return written


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_full_map_is_an_error_and_the_store_stays_usable(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "store"
    with cues.open(path, durability=durability, max_map_size=2 << 20) as store:
        written = fill(store)
        assert written > 10
        fill_again = store.queue("q").last_index
        for _ in range(20):
            with contextlib.suppress(StoreFull):
                store.queue("q").appender().write({"n": store.queue("q").last_index + 1, "x": b"x" * 3000})
        last = store.queue("q").last_index
        assert numbers(store.queue("q")) == list(range(1, last + 1)) and last >= fill_again
        assert store.queue("q").purge(before=last // 2) == last // 2 - 1
        assert store.queue("q").appender().write({"n": last + 1, "x": b"x" * 100_000}) == last + 1
    with cues.open(path, max_map_size=64 << 20) as store:
        queue = store.queue("q")
        assert numbers(queue) == list(range(last // 2, last + 2))
        for _ in range(100):
            queue.appender().write({"n": 0, "x": b"x" * 50_000})


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system with little room; needs root."""
    path.mkdir()
    made = ROOT and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True)
    if not made or made.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


FILL_DISK = """
import sys, contextlib, cues, test_store
from cues.errors import StoreFull
with cues.open(sys.argv[1], durability=sys.argv[2], min_free=0) as store:
    written = test_store.fill(store)
    queue = store.queue("q")
    print(written)
    for _ in range(30):   # it stays full, and stays an error
        with contextlib.suppress(StoreFull):
            queue.appender().write({"n": queue.last_index + 1, "x": b"x" * 3000})
    last = queue.last_index
    assert test_store.numbers(queue) == list(range(1, last + 1))
    named = queue.tailer("reader")
    assert [m["n"] for m in named.read_many(3)] == [1, 2, 3]
    assert queue.purge(before=last - 5) == last - 6
    for n in range(last + 1, last + 6):
        assert queue.appender().write({"n": n, "x": b"x" * 3000}) == n
    print(store.check())
"""


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_full_disk_is_an_error_no_sigbus_and_can_be_purged(tmp_path: Path, durability: str, checked: Any) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        with children.Child(FILL_DISK, disk / "store", durability) as child:
            out = child.end().splitlines()
        assert int(out[0]) > 50
        assert out[1] == "[]"
        checked(disk / "store")
        with cues.open(disk / "store") as store:
            assert store.queue("q").tailer("reader").read() is not None


@pytest.mark.parametrize("durability", DURABILITIES)
def test_no_room_for_a_store_at_all(tmp_path: Path, durability: str) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "ballast").write_bytes(bytes(40_000))
        code = """
import sys, cues
try:
    with cues.open(sys.argv[1], durability=sys.argv[2]) as store:
        store.queue("q").appender().write({"x": b"x" * 100_000})
except cues.errors.StoreFull:
    print("full")
"""
        assert children.run(code, disk / "store", durability) == "full"


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path, durability: str, checked: Any) -> None:
    code = FILL_DISK.replace(
        "import sys",
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({6 << 20}, {6 << 20}))\nimport sys",
        1,
    ).replace("min_free=0)", f"min_free=0, max_map_size={6 << 20})")
    with children.Child(code, tmp_path / "store", durability) as child:
        out = child.end().splitlines()
    assert int(out[0]) > 20
    assert out[1] == "[]"
    checked(tmp_path / "store")


def test_where_the_address_space_is_limited_the_map_shrinks_with_a_warning(tmp_path: Path) -> None:
    """And the next process, which is not limited, has the whole map again."""
    make(tmp_path / "old")
    code = """
import sys, resource, logging, cues
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for path in sys.argv[1:]:
    with cues.open(path) as store:
        store.queue("q").appender().write({"n": 101})
        print(store.map_size)
"""
    out = children.run(code, tmp_path / "old", tmp_path / "new")
    assert out.count("has no room for a map of 64 GiB; using") == 2
    assert all(1 << 26 <= int(line) < 2 << 30 for line in out.splitlines() if line.isdigit())
    for name in ("old", "new"):
        with cues.open(tmp_path / name) as store:
            assert store.map_size == MAP_BYTES


def test_a_store_that_grew_beyond_this_process_map_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the address space has room, the map becomes larger by itself (test_map_growth.py)."""

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with cues.open(tmp_path / "store", map_size=2 << 20) as store:
        queue = store.queue("q")
        queue.appender().write({"n": 1})
        code = """
import sys, cues
with cues.open(sys.argv[1], map_size=64 << 20) as store:
    store.queue("q").appender().write_many([{"n": n, "x": b"x" * 3000} for n in range(2, 2000)])
"""
        children.run(code, tmp_path / "store")
        with monkeypatch.context() as patch:
            patch.setattr(map_growth.mmap, "mmap", refuse)
            for use in (lambda: queue.appender().write({"n": 0}), lambda: queue.tailer().read()):
                with pytest.raises(StoreFull, match="address space of this process has no room"):
                    use()
        assert numbers(queue) == list(range(1, 2000))


# --- places that may not be written ---------------------------------------------------------------------


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_a_read_only_file_system(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16m") as disk:
        make(disk / "store", "process")
        (disk / "store" / "wake").unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with cues.open(disk / "store", readonly=True) as store:
            queue = store.queue("q")
            assert numbers(queue) == list(range(1, 101))
            tailer = queue.tailer()
            tailer.to_end()
            assert tailer.read(block=True, timeout=0.05) is None
            assert store.check() == []
        for path in (disk / "store", disk / "new"):
            with pytest.raises(StoreReadOnly):
                cues.open(path)
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


AS_NOBODY = """
import os, sys, cues, cues.errors, cues.storage.environment, cues.queues.queue, cues.queues.tailer
os.setgid(65534); os.setuid(65534)
for readonly in (True, False):
    try:
        with cues.open(sys.argv[1], readonly=readonly) as store:
            print(len(store.queue("q")))
    except cues.errors.StoreReadOnly as error:
        print("StoreReadOnly", error.hint)
"""


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_files_that_this_user_may_not_write(tmp_path: Path) -> None:
    """LMDB's table of readers cannot be written either, so they can be read only while no process writes."""
    path = make(tmp_path / "store")
    for file in (path, *path.iterdir()):
        file.chmod(0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):  # one more than there is without parallel runs, /tmp then
        if parent.stat().st_mode & 0o5 != 0o5:
            parent.chmod(0o755)
    with children.Child(AS_NOBODY, path) as child:
        out = child.end().splitlines()
    assert len(out) == 2
    assert out[0].isdecimal() and out[1].startswith("StoreReadOnly")
    private = make(tmp_path / "private" / "store")
    (tmp_path / "private").chmod(0o700)
    with children.Child(AS_NOBODY, private) as child:
        assert child.end().count("StoreReadOnly") == 2


# --- forks ---------------------------------------------------------------------------------------------


def in_child(work: Any) -> str:
    """Run ``work`` in a fork of this process; returns what it returned, as text, or its error's name."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        signal.alarm(30)  # a child that hangs dies of it, and says nothing
        try:
            try:
                text = str(work())
            except CuesError as error:
                text = type(error).__name__
            except BaseException as error:
                text = repr(error)
            os.write(write_end, text.encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return found


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_forked_child_is_refused_and_may_open_again(tmp_path: Path, durability: str) -> None:
    """LMDB would let it write, and damage the file; the parent is not affected by whatever it does."""
    path = tmp_path / "store"
    with cues.open(path, durability=durability) as store:
        queue = store.queue("q")
        appender, tailer, named = queue.appender(), queue.tailer(), queue.tailer("r")
        appender.write_many([{"n": 1}, {"n": 2}])
        assert tailer.read() == named.read() == {"n": 1}
        for use in (
            lambda: appender.write({"n": 9}),
            lambda: appender.write_many([{"n": 9}]),
            lambda: tailer.read(),
            lambda: tailer.read(block=True, timeout=1),
            lambda: named.read_many(2),
            lambda: len(queue),
            lambda: queue.purge(before=2),
            lambda: store.queue("new"),
            lambda: store.queues(),
            lambda: store.sync(),
        ):
            assert in_child(use) == "Forked"
        assert in_child(lambda: [store.close(), tailer.close(), queue.close()]) == "[None, None, None]"

        def again() -> object:
            with cues.open(path) as mine:
                found = mine.queue("q")
                return found.appender().write({"n": 3}), numbers(found), found.tailer("r").read()

        assert in_child(again) == "(3, [1, 2, 3], {'n': 2})"
        assert in_child(lambda: store.queue("q")) == "Forked"
        assert appender.write({"n": 4}) == 4
        assert numbers(queue) == [1, 2, 3, 4]
        assert (tailer.read(), named.read()) == ({"n": 2}, {"n": 3})


def test_a_fork_while_threads_write_and_wait(tmp_path: Path) -> None:
    """The child inherits locks that threads of the parent held and that none of its own threads will give back."""
    stop = threading.Event()
    with cues.open(tmp_path / "store", durability="disk") as store:
        queue = store.queue("q")

        def writing() -> None:
            while not stop.is_set():
                queue.appender().write({"n": 1})

        def waiting() -> None:
            tailer = queue.tailer()
            while not stop.is_set():
                tailer.read(block=True, timeout=0.01)

        threads = [threading.Thread(target=work) for work in (writing, writing, waiting)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                assert in_child(lambda: queue.appender().write({"n": 2})) == "Forked"
                assert in_child(lambda: queue.tailer().read()) == "Forked"
                opened = in_child(lambda: len(cues.open(tmp_path / "store").queue("q")) > 0)
                assert opened in ("True", "Forked"), "said, not hung, where a thread was inside LMDB"
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_every_error_of_a_store_survives_pickling() -> None:
    for kind in (StoreFull, StoreVersion, Forked, Closed, BatchDamaged, DurabilityMismatch):
        error = kind("found this.", "that.", path="p", first=1, last=2)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.__dict__) == (kind, "found this. Try: that.", error.__dict__)


def test_a_ctrl_c_in_the_thread_that_commits_for_others_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three wait and share a transaction; whoever commits for them is interrupted. The other two are committed."""
    with cues.open(tmp_path / "store") as store:
        appender = store.queue("q").appender()
        writer_lock = store.core.environment.writer_lock
        assert writer_lock is not None
        transact = writer_lock.transact
        interrupted: list[str] = []
        written: list[int] = []

        def interrupt_once(pages: int, work: Any, *args: Any) -> Any:
            if not interrupted:
                interrupted.append(threading.current_thread().name)
                raise KeyboardInterrupt
            return transact(pages, work, *args)

        def write(n: int) -> None:
            try:
                appender.write({"n": n})
                written.append(n)
            except KeyboardInterrupt:
                assert interrupted == [threading.current_thread().name]

        threads = [threading.Thread(target=write, args=(n,), name=str(n)) for n in range(3)]
        with store.core.environment.group.leading:
            for thread in threads:
                thread.start()
            while len(store.core.environment.group.waiting) < 3:
                threading.Event().wait(0.001)
            monkeypatch.setattr(writer_lock, "transact", interrupt_once)
        for thread in threads:
            thread.join(20)
        assert len(interrupted) == 1 and len(written) == 2
        assert sorted(m["n"] for m in store.queue("q").tailer()) == sorted(written)


CTRL_C = """
import collections, os, signal, sys, threading
import cues
store = cues.open(sys.argv[1], durability="disk")
appender = store.queue("q").appender()
for attempt in range(60):
    stop = threading.Event()
    def write(who):
        number = 0
        while not stop.is_set():
            appender.write({"id": f"{attempt} {who} {number}"})
            number += 1
    threads = [threading.Thread(target=write, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    try:  # the start of the timer waits for its thread, which may be after the signal
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            appender.write({"id": "interrupted"})
    except KeyboardInterrupt:
        pass
    stop.set()
    for thread in threads:
        thread.join()
times = collections.Counter(m["id"] for m in store.queue("q").tailer() if m["id"] != "interrupted")
print(len(times), sum(1 for n in times.values() if n > 1))
"""


def test_a_ctrl_c_while_threads_share_a_commit_doubles_no_messages(tmp_path: Path) -> None:
    """The signal comes while the thread that commits for all waits for the disk; its handler runs after the commit."""
    with children.Child(CTRL_C, tmp_path / "store") as child:
        written, doubled = map(int, child.end().split())
    assert written > 100 and doubled == 0


def test_a_larger_map_size_is_kept_for_later_opens_without_one(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", map_size=2 << 20):
        pass
    with cues.open(tmp_path / "store", map_size=8 << 20):
        pass
    with cues.open(tmp_path / "store") as store:
        assert store.map_size == 8 << 20
