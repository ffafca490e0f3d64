"""Salvage: what is whole comes out of a damaged store as it was, what is missing is named, and nothing else comes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import damage
import pytest
import seeds
from forks import Forks
from sets import amounts, slow_except
from terminal import cues

import cues as library
from cues.base import names
from cues.records import batch
from cues.storage.pages import DataFile
from cues.tools import check, salvage

Records = dict[tuple[bytes, bytes], bytes]
"""Records and their pieces, by database and key."""

pytestmark = pytest.mark.damages_stores


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "s"
    damage.make(path)
    return path


@pytest.fixture(autouse=True)
def checked_in_a_fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    """Check each new store in a forked process, not in a new interpreter."""
    monkeypatch.setattr(check, "walk", lambda path, progress=None: forks.run("test_check:findings", Path(path)).value)


def copied(store: Path, to: Path) -> Path:
    to.mkdir()
    shutil.copy(store / "data.mdb", to)
    return to


def records(path: str) -> Records:
    """The records and pieces of all logs whose checksums hold, as LMDB reads them."""
    found: Records = {}
    with library.open(path, readonly=True) as store:
        for name, _ in list(store.core.entries()):
            if name.startswith(b"log:"):
                handle = store.core.database(name)
                with store.core.view() as txn:
                    for key, value in txn.cursor(handle):
                        number = int.from_bytes(key[8:] or key, "big")
                        if len(value) > 8 and batch.intact(value, number):
                            found[name, bytes(key)] = bytes(value)
    return found


def whole(found: Records) -> Records:
    """Of these, the records that have all their pieces, with the pieces."""
    kept: Records = {}
    for (name, key), value in found.items():
        if len(key) != 8:
            continue
        opened = batch.Batch(int.from_bytes(key, "big"), value)
        pieces: Records = {}
        size = len(value) - opened.head.body_at
        number = 1
        while opened.head.length and (name, place := key + number.to_bytes(4, "big")) in found:
            pieces[name, place] = found[name, place]
            size += len(found[name, place]) - 8
            number += 1
        if not opened.head.length or size == opened.head.length:
            kept[name, key] = value
            kept |= pieces
    return kept


def named(found: Records, places: Iterable[tuple[bytes, bytes]]) -> set[tuple[bytes, int]]:
    """The last message of each record of these places. (The front of a queue may be within a record.)"""
    firsts = {(name, key[:8]) for name, key in places}
    return {(name, int.from_bytes(key, "big") + batch.count_of(found[name, key]) - 1) for name, key in firsts}


def missing(done: salvage.Salvaged) -> set[tuple[bytes, int]]:
    """The messages that a salvage names as missing."""
    return {
        (b"log:" + loss.name.encode(), index)
        for loss in done.losses
        if loss.kind == "messages" and loss.first is not None and loss.last is not None
        for index in range(loss.first, loss.last + 1)
    }


@pytest.mark.parametrize(
    "spoil", slow_except([damage.delete_record, damage.row_gone], damage.DAMAGES), ids=lambda spoil: spoil.__name__
)
def test_every_whole_batch_of_a_damaged_store_is_in_the_new_one_unchanged(
    sound: Path, tmp_path: Path, spoil: Callable[[Any, Any], None], forks: Forks
) -> None:
    store = copied(sound, tmp_path / "s")
    before = records(str(store))
    with library.open(store) as opened:
        for name, _ in opened.core.entries():
            opened.core.database(name)
        opened.core.commit(lambda txn: spoil(opened, txn))
    (tmp_path / "copy").mkdir()
    shutil.copy(store / "data.mdb", tmp_path / "copy")
    raw = (store / "data.mdb").read_bytes()
    done = salvage.salvage(store, tmp_path / "new")
    assert (store / "data.mdb").read_bytes() == raw
    found = forks.run("test_salvage:records", str(tmp_path / "new")).value
    if spoil is not damage.format_record_cut:  # such a store does not open
        damaged = whole(forks.run("test_salvage:records", str(tmp_path / "copy")).value)
        bad = {key for key in damaged if damage.record_of_no_messages is spoil and key not in before}
        assert {key: found.get(key) for key in damaged if key not in bad} == {
            key: value for key, value in damaged.items() if key not in bad
        }
        assert all(before.get(key) == value or damaged.get(key) == value for key, value in found.items())
    else:
        assert found == before
    told = missing(done)
    for name, key in before:
        if len(key) == 8:
            assert (named(before, [(name, key)]) <= told) != ((name, key) in found), (name, key)
    assert spoil is damage.delete_piece or spoil is damage.swap_records or done.losses, "each damage is told"


def test_a_whole_store_is_copied_whole(sound: Path, tmp_path: Path, forks: Forks) -> None:
    done = salvage.salvage(sound, tmp_path / "new")
    assert done.is_whole
    assert check.walk(str(tmp_path / "new")) == []
    digests = {forks.run("damage:digest_of", str(path)).value for path in (sound, tmp_path / "new")}
    assert len(digests) == 1
    with library.open(sound, readonly=True) as old, library.open(tmp_path / "new", readonly=True) as new:
        assert (old.id, old.durability, old.queues(all=True)) == (new.id, new.durability, new.queues(all=True))


def flip(store: Path, offset: int, bit: int) -> None:
    with (store / "data.mdb").open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.fixture(params=amounts(20, 1500))
def flips(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_flipped_bit_loses_only_what_is_named_and_changes_nothing(
    sound: Path, tmp_path: Path, flips: int, forks: Forks
) -> None:
    """A flip inside a record costs this record at most; elsewhere it costs what is told; nothing is altered."""
    seed = seeds.new()
    dice = random.Random(seed)
    before = records(str(sound))
    data = (sound / "data.mdb").read_bytes()
    with library.open(sound, readonly=True) as opened:
        used = opened.info()["used"]
    inside: dict[int, bytes] = {}
    for value in set(before.values()):  # several pieces may have the same bytes
        at = data.find(value)
        while at >= 0:
            inside |= dict.fromkeys(range(at, at + len(value)), value)
            at = data.find(value, at + 1)
    losses = 0
    for number in range(flips):
        offset = dice.choice(sorted(inside)) if number % 2 else dice.randrange(used)
        bit = dice.randrange(8)
        store = copied(sound, tmp_path / f"s{number}")
        flip(store, offset, bit)
        note = f"seed {seed}: bit {bit} of byte {offset}"
        try:
            done = salvage.salvage(store, tmp_path / f"n{number}")
        except library.errors.StoreDamaged:
            assert offset < 2 * 4096, note
            continue
        found = forks.run("test_salvage:records", str(tmp_path / f"n{number}")).value
        assert all(before.get(key) == value for key, value in found.items()), note
        told = missing(done)
        gone = named(before, before.keys() - found.keys())
        assert gone <= told, note
        if offset in inside:
            of_it = [place for place, value in before.items() if value == inside[offset]]
            assert gone <= named(before, of_it), note
        losses += len(gone)
        for path in (store, tmp_path / f"n{number}"):
            shutil.rmtree(path)
    assert losses, "no flip hit a record"


# --- files that LMDB does not open -------------------------------------------------------------------


def overwrite(store: Path, page: int, pages: int = 1) -> None:
    with (store / "data.mdb").open("r+b") as file:
        file.seek(page * 4096)
        file.write(b"\xa5" * 4096 * pages)


@pytest.mark.slow
def test_one_meta_page_is_enough(sound: Path, tmp_path: Path) -> None:
    for page in (0, 1):
        store = copied(sound, tmp_path / f"s{page}")
        overwrite(store, page)
        done = salvage.salvage(store, tmp_path / f"n{page}")
        assert done.messages > 1000
        assert check.walk(str(tmp_path / f"n{page}")) == []


def bring_root_forward(store: Path) -> int:
    """Commit until the first page of all, of which each commit writes a new one, is not at the end of the file.

    Returns the bytes that the file uses.
    """
    for n in range(100):
        with library.open(store) as opened:
            opened.queue("more").appender().write({"n": n})
            used = int(opened.info()["used"])
        with (store / "data.mdb").open("rb") as file:
            data = DataFile(file.fileno())
            if data.metas[0].main.page * data.page_bytes < 0.9 * used:
                return used
    raise AssertionError("it is always at the end")


@pytest.mark.slow
def test_a_truncated_store_gives_what_is_left_and_names_the_rest(sound: Path, tmp_path: Path, forks: Forks) -> None:
    whole = copied(sound, tmp_path / "whole")
    size = bring_root_forward(whole)
    before = records(str(whole))
    seen = 0
    for number, part in enumerate((0.95, 0.7, 0.3)):
        store = copied(whole, tmp_path / f"s{number}")
        os.truncate(store / "data.mdb", int(size * part))
        with pytest.raises(library.errors.StoreDamaged):
            library.open(store)
        try:
            done = salvage.salvage(store, tmp_path / f"n{number}")
        except library.errors.StoreDamaged:
            assert not (tmp_path / f"n{number}").exists()
            continue
        seen += 1
        found = forks.run("test_salvage:records", str(tmp_path / f"n{number}")).value
        assert all(before.get(key) == value for key, value in found.items())
        assert done.losses or found == before  # there may be only free pages behind the cut
    assert seen


@pytest.mark.parametrize("what", ["zeros", "empty", "text"])
def test_a_store_without_its_first_pages_is_refused_with_advice(sound: Path, tmp_path: Path, what: str) -> None:
    store = copied(sound, tmp_path / "s")
    if what == "zeros":
        overwrite(store, 0, 2)
    else:
        (store / "data.mdb").write_bytes(b"" if what == "empty" else b"not LMDB" * 2000)
    with pytest.raises(library.errors.StoreDamaged, match=r"first two pages .* cannot be read\. Try: restore a backup"):
        salvage.salvage(store, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_an_overwritten_page_costs_what_was_on_it(sound: Path, tmp_path: Path, forks: Forks) -> None:
    """Whichever page it is: the rest is there, and what is not there is named."""
    before = records(str(sound))
    pages = (sound / "data.mdb").stat().st_size // 4096
    dice = random.Random(seeds.new())
    for page in dice.sample(range(2, pages), 6):
        store = copied(sound, tmp_path / f"s{page}")
        overwrite(store, page)
        done = salvage.salvage(store, tmp_path / f"n{page}")
        found = forks.run("test_salvage:records", str(tmp_path / f"n{page}")).value
        assert all(before.get(key) == value for key, value in found.items()), page
        gone = named(before, before.keys() - found.keys())
        assert gone <= missing(done), page


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    store = copied(sound, tmp_path / "damaged")
    data = (store / "data.mdb").read_bytes()
    at = data.find(damage.MARK)
    while at >= 0:  # LMDB may have left older copies of its page
        flip(store, at, 0)
        at = data.find(damage.MARK, at + 1)
    return store


def test_the_command_lists_what_is_missing_and_the_new_store_works(damaged: Path, tmp_path: Path) -> None:
    kept = (damaged / "data.mdb").read_bytes()
    result = cues("salvage", damaged, tmp_path / "new", "--json")
    *losses, last = map(json.loads, result.out.splitlines())
    assert result.code == 1
    assert len(losses) == 1 and losses[0]["queue"] == "plain" and losses[0]["messages"] == 1, losses
    assert "record batch" in losses[0]["why"]
    assert (last["missing_messages"], last["losses"], last["salvaged"]) == (1, 1, str(tmp_path / "new"))
    assert "Try: put" in result.err
    assert (damaged / "data.mdb").read_bytes() == kept
    assert sorted(path.name for path in damaged.iterdir()) == ["data.mdb"]
    with library.open(tmp_path / "new") as store:
        index = store.queue("plain").appender().write({"n": 1})
        assert index == store.queue("plain").last_index
        with pytest.raises(library.errors.BatchDamaged, match="is missing"):
            list(store.queue("plain").tailer())
    again = cues("salvage", damaged, tmp_path / "new")
    assert again.code == 1 and "There is a store at" in again.err and "Try: " in again.err


@pytest.mark.slow
def test_a_store_that_is_whole_gives_exit_code_0(sound: Path, tmp_path: Path) -> None:
    result = cues("salvage", sound, tmp_path / "new", "--table")
    assert result.code == 0, result
    assert "nothing is missing" in result.out


def test_a_store_that_a_process_writes_is_refused(sound: Path, tmp_path: Path) -> None:
    store = copied(sound, tmp_path / "s")
    held = library.open(store)
    try:
        held.queue("plain").appender().write({"n": 1})
        result = cues("salvage", store, tmp_path / "new")
    finally:
        held.close()
    assert "open for writing" in result.err and "Try: stop it first" in result.err, result
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_graph_stops_at_a_gap_and_continues_after_a_seek(tmp_path: Path) -> None:
    def graph(store: Path) -> library.Graph:
        graph = library.Graph("g", store=store)
        graph.stream("in", "out", id="f")(lambda message: {"n": message["n"] + 1000})
        return graph

    def run(store: Path) -> None:
        with graph(store).start() as running:
            running.wait_idle(30)

    store, new = tmp_path / "s", tmp_path / "new"
    with library.open(store) as opened:
        queue = opened.queue("in")
        queue.appender().write_many([{"n": n} for n in range(10)])
    run(store)
    with library.open(store) as opened:
        for n in range(10, 15):
            opened.queue("in").appender().write({"n": n})
        log = opened.core.database(names.log_database("in", 0))
        opened.core.commit(lambda txn: txn.put((12).to_bytes(8, "big"), b"no record at all", db=log))
        opened.queue("other")  # a commit, so that the damage is in both states
    done = salvage.salvage(store, new)
    (gap,) = [loss for loss in done.losses if loss.kind == "messages"]
    assert (gap.name, gap.first, gap.last, gap.unread_by) == ("in", 12, 12, ("g.f",))
    with pytest.raises(library.ProcessorStopped, match="is missing"):
        run(new)
    assert cues("seek", f"{new}#g.f", "--to", "13", "--yes").code == 0
    run(new)
    with library.open(new) as opened:
        assert [m["n"] for m in opened.queue("out").tailer()] == [n + 1000 for n in range(15) if n != 11]
