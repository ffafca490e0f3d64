"""Compaction: the same store in a smaller file, also after a crash, and never while another process has it open.

The scenario "compaction" of test_crashes.py tests a death at each of its crash points.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from terminal import cues as command

import cues
from cues import Graph, Source, Stream, faults, testing
from cues.errors import AlreadyRunning, QueueInUse, QueueNotFound, StoreError, StoreFull, StoreNotFound, StoreReadOnly
from cues.queues.store import Store
from cues.storage import timeline
from cues.tools import compaction


def copied(message: Any) -> Any:
    return message


def made(path: Path, durability: str = "disk") -> Path:
    """A store with free pages, a processor that read ``in`` and wrote to ``out``, state, a named reader, two
    empty queues without readers, and one that was purged."""

    def counted(message: Any, process: Any) -> Any:
        process.state["n"] = process.state.get("n", 0) + 1
        return message

    with Store(path, durability=durability, map_size=64 << 20) as store:
        old = store.queue("old").appender()
        for start in range(0, 20_000, 1000):
            old.write_many([{"n": n, "text": "x" * 50} for n in range(start, start + 1000)])
        store.queue("old").delete()
        store.queue("empty", retention=7).tailer("gone with it").close()
        store.queue("in").appender().write_many([{"n": n} for n in range(2500)])
        testing.run_until_idle(Graph("g", [Source("in"), Stream(counted, "in", "out", batch_size=100)]), store)
        store.queue("in").purge(before=1001)
        reader = store.queue("out").tailer("reader")
        reader.read_many(1200)
        reader.close()
    return path


def everything(path: Path) -> dict[str, Any]:
    with Store(path) as store:
        found = testing.contents(store)
        rows = {queue: store.queue(queue).core.row() for queue in store.queues()}
        batches = {}
        for queue in store.queues():
            tailer = store.queue(queue).tailer(meta=True)
            batches[queue] = [(tailer.index, message) for message in tailer]
        reader = store.queue("out").tailer("reader").index
        assert not testing.check_attempts(store) and not store.check()
        return {
            **found,
            "rows": rows,
            "batches": batches,
            "reader": reader,
            "store": (store.id, store.durability, store.map_size),
            "state": testing.state(store, "g.counted"),
        }


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_a_compacted_store_is_the_same_and_small(tmp_path: Path, durability: str) -> None:
    path = made(tmp_path / "s", durability)
    os.chmod(path / "data.mdb", 0o640)
    before = everything(path)
    told: list[tuple[int, int]] = []
    done = compaction.compact(path, progress=lambda copied, total: told.append((copied, total)))
    assert done.removed == () and done.after < done.before // 2
    assert told and told[-1][0] == told[-1][1]
    assert stat.S_IMODE((path / "data.mdb").stat().st_mode) == 0o640
    assert not (path / compaction.COPY).exists()
    assert everything(path) == before
    # It continues where it was: indices, positions, and what an earlier free page list would have said.
    with Store(path) as store:
        assert store.queue("old").appender().write({"n": 1}) == 20_001
        assert store.queue("in").appender().write({"n": 2500}) == 2501
        testing.run_until_idle(Graph("g", [Source("in"), Stream(copied, "in", "out", id="counted")]), store)
        assert store.queue("out").last_index == 2501
    # And again, with nothing to give back.
    assert compaction.compact(path).removed == ()


def test_the_look_before_tells_what_comes_out(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    with Store(path, readonly=True) as store:
        seen = compaction.look(store, ["old", "empty", "old"])
    done = compaction.compact(path, ["old", "empty", "old"])
    assert seen.removed == done.removed == ("old", "empty")
    assert abs(seen.after - done.after) < 64 << 10


def test_removed_queues_are_gone_and_come_back_as_others(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    before = everything(path)
    compaction.compact(path, ["old", "empty"])
    after = everything(path)
    assert set(before["rows"]) - set(after["rows"]) == {"old", "empty"}
    assert after["positions"] == before["positions"] and after["state"] == before["state"]
    with Store(path) as store:
        again = store.queue("empty")
        assert again.options.retention is None and again.core.row().identity != before["rows"]["empty"].identity
        assert again.appender().write({"n": 1}) == 1
        assert again.tailer("gone with it").read() == {"n": 1}
        assert [name for name, _ in store.core.entries() if b"old" in name] == []


REFUSED: list[tuple[str, Callable[[Store], Any], tuple[str, ...], type[Exception]]] = [
    ("emty", lambda store: None, ("'emty'", "Try: give 'empty'"), QueueNotFound),
    ("out", lambda store: None, ("'out'", "2,500 messages", "delete()"), QueueInUse),
    ("in", lambda store: store.queue("in").delete(), ("'in'", "'g.counted'", "position"), QueueInUse),
    ("out", lambda store: store.queue("out").delete(), ("'out'", "try log of 'g.counted'"), QueueInUse),
    ("g.counted", lambda store: None, ("'g.counted'", "belongs to a processor"), QueueInUse),
]


@pytest.mark.parametrize(("queue", "prepare", "words", "kind"), REFUSED, ids=["none", "full", "read", "tried", "log"])
def test_a_queue_that_a_reader_still_names_is_not_removed(
    tmp_path: Path, queue: str, prepare: Callable[[Store], Any], words: tuple[str, ...], kind: type[Exception]
) -> None:
    """Nor is anything else that was named with it; and the next start finds all it looks for."""
    path = made(tmp_path / "s")
    with Store(path) as store:
        prepare(store)
    before = everything(path)
    with pytest.raises(kind) as caught:
        compaction.compact(path, ["empty", queue])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with Store(path) as store, pytest.raises(kind):
        compaction.look(store, ["empty", queue])
    assert everything(path) == before
    with Store(path) as store:
        testing.run_until_idle(Graph("g", [Source("in"), Stream(copied, "in", "out", id="counted")]), store)


def test_an_output_can_go_when_the_try_log_has_been_trimmed(tmp_path: Path) -> None:
    """Not before: an attempt in the log would name a message that the queue, made anew, has another one for."""
    graph = Graph("g", [Stream(lambda m: {m["to"]: m}, "in", ["a", "b"], id="x", batch_size=1)])
    with Store(tmp_path / "s", durability="process") as store:
        store.queue("in").appender().write_many([{"to": "a"}, {"to": "b"}])
        testing.run_until_idle(graph, store)
        store.queue("a").delete()
    with pytest.raises(QueueInUse, match=r"'g\.x'"):
        compaction.compact(tmp_path / "s", ["a"])
    with Store(tmp_path / "s") as store:
        store.queue("in").appender().write_many([{"to": "b"}] * 900)
        testing.run_until_idle(graph, store)
        store.queue("b").purge(before=902)
    compaction.compact(tmp_path / "s", ["a"])
    with Store(tmp_path / "s") as store:
        store.queue("in").appender().write({"to": "a"})
        testing.run_until_idle(graph, store)
        assert store.queue("a").last_index == 1 and store.queue("b").last_index == 901


# --- alone ------------------------------------------------------------------------------------------


def hold(path: str, readonly: bool) -> None:
    """Have the store open, outside any transaction, and stop."""
    with Store(path, readonly=readonly) as store:
        store.queues()
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped(path: str) -> None:
    """Compact, and stop with a part of the copy written."""
    faults.arm("compact.copying", 1, faults.stop)
    compaction.compact(path)


def read_until_77(path: str) -> int:
    """Open the store while it is compacted, read what is there, and wait for one more; how many that were."""
    with Store(path, readonly=True) as store:
        for count, message in enumerate(store.queue("out").tailer().follow(), 1):
            if message["n"] == 77 and count > 2500:
                return count
            if count == 2500:
                Path(path + ".read").touch()
    return 0


def add(path: str) -> int:
    with Store(path) as store:
        return store.queue("out").appender().write({"n": 77})


@pytest.mark.parametrize("readonly", [False, True], ids=["writer", "reader"])
def test_a_process_that_has_it_open_is_named_and_nothing_is_done(forks: Forks, tmp_path: Path, readonly: bool) -> None:
    """A reader between two transactions is not in LMDB's table of readers."""
    path = made(tmp_path / "s")
    before = (path / "data.mdb").stat().st_ino
    pid = forks.start(f"{__name__}:hold", str(path), readonly)
    assert forks.wait(pid).stopped
    try:
        with pytest.raises(AlreadyRunning, match=f"process {pid} \\(stopped\\)") as caught:
            compaction.compact(path, ["old"])
        assert caught.value.pid == pid
    finally:
        forks.kill(pid, signal.SIGCONT)
    assert not forks.wait(pid).error
    assert (path / "data.mdb").stat().st_ino == before
    compaction.compact(path, ["old"])


@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
def test_this_process_must_not_have_it_open_itself(tmp_path: Path, readonly: bool) -> None:
    path = made(tmp_path / "s")
    with Store(path, readonly=readonly) as store:
        with pytest.raises(StoreReadOnly if readonly else StoreError, match="close"):
            compaction.compact(path)
        assert store.queue("out").last_index == 2500
    compaction.compact(path)


def test_a_process_that_opens_it_meanwhile_waits_and_sees_later_messages(forks: Forks, tmp_path: Path) -> None:
    """Readers and a writer come while a compaction is stopped in the middle of its copy.

    A reader that had the old file would never see what the writer appends to the new one, and LMDB's
    table of readers, made for the one, would lead the writer astray in the other.
    """
    path = made(tmp_path / "s")
    compactor = forks.start(f"{__name__}:stopped", str(path))
    assert forks.wait(compactor).stopped
    readers = [forks.start(f"{__name__}:read_until_77", str(path)) for _ in range(3)]
    forks.kill(compactor, signal.SIGCONT)
    assert not forks.wait(compactor).error
    while not Path(f"{path}.read").exists():
        os.sched_yield()
    assert forks.run(f"{__name__}:add", str(path)).value == 2501
    assert [forks.wait(reader).value for reader in readers] == [2501] * 3
    with Store(path) as store:
        assert store.queue("out").last_index == 2501 and not store.check()


@pytest.mark.interpreted
def test_a_file_that_was_opened_too_early_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between LMDB's opening of the data file and its lock another file took the place."""
    path = made(tmp_path / "s")
    (other,) = [made(tmp_path / "other")]
    with Store(other) as store:
        store.queue("only here")
    from cues.storage import environment as module

    real = module.open_map
    opened: list[Any] = []

    def late(*arguments: Any) -> Any:
        found = real(*arguments)
        if not opened:
            os.replace(other / "data.mdb", path / "data.mdb")
        opened.append(found)
        return found

    monkeypatch.setattr(module, "open_map", late)
    with Store(path, readonly=True) as store:
        assert "only here" in store.queues()
    assert len(opened) == 2


def test_the_copy_has_the_transaction_numbers_of_the_original(tmp_path: Path) -> None:
    """In both meta pages, each in its place, with the same tree: a stale table may name either of them."""
    import lmdb

    path = made(tmp_path / "s")
    with Store(path) as store:
        last = store.core.environment.env.info()["last_txnid"]
    compaction.compact(path)
    raw = (path / "data.mdb").read_bytes()
    env = lmdb.open(str(path), readonly=True, lock=False, lib_version=0)
    size = env.stat()["psize"]
    assert env.info()["last_txnid"] >= last
    last = env.info()["last_txnid"]
    env.close()
    pages = [raw[:size], raw[size : 2 * size]]
    numbers = [int.from_bytes(page[144:152], "little") for page in pages]
    assert numbers[last & 1] == last and numbers[(last - 1) & 1] == last - 1
    assert pages[0][8:144] == pages[1][8:144]


# --- what goes wrong --------------------------------------------------------------------------------


def test_what_a_dead_compaction_left_is_deleted(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    (path / compaction.COPY).write_bytes(b"half")
    before = everything(path)
    compaction.compact(path)
    assert everything(path) == before and not (path / compaction.COPY).exists()


def test_without_room_for_a_copy_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "s")
    before = everything(path)
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreFull, match="1,000 free"):
        compaction.compact(path)
    assert everything(path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["Ctrl-C", "full"])
def test_what_stops_the_copy_leaves_the_store_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = made(tmp_path / "s")
    before = everything(path)

    def stop(copied: int, total: int) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, StoreError)) as caught:
        compaction.compact(path, progress=stop)
    assert isinstance(error, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert not (path / compaction.COPY).exists()
    assert everything(path) == before
    compaction.compact(path)  # all locks were let go


@pytest.mark.interpreted
def test_the_compacted_file_has_its_name_before_another_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """A disk that has no room for that file must not leave a name that a power cut takes back."""
    path = made(tmp_path / "s")

    def full(place: Path) -> None:
        assert synced[-1] == str(path)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(timeline, "mark", full)
        compaction.compact(path)


def test_there_must_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        compaction.compact(tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- the command ------------------------------------------------------------------------------------


def test_the_command_says_what_it_would_do_and_does_it(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    dry = command("compact", path, "--remove", "old", "--dry-run")
    assert dry.code == 0, dry.err
    seen = json.loads(dry.out)
    assert seen["dry_run"] and seen["removed"] == ["old"]
    asked = command("compact", path, "--remove", "old")
    assert asked.code == 2 and "--yes" in asked.err and "removed for good: old" in asked.err
    with Store(path) as store:
        assert "old" in store.queues()
    done = command("compact", path, "--remove", "old", "--yes", "--table")
    assert done.code == 0 and "removed old; " in done.out, done.err
    plain = command("compact", path)
    assert plain.code == 0
    found = json.loads(plain.out)
    assert found["removed"] == [] and found["after"] < seen["before"]
    with Store(path) as store:
        assert "old" not in store.queues()


def test_the_command_refuses_with_a_hint(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    for arguments, code, words in (
        ((path, "--remove", "out"), 1, ("2,500 messages", "Try:")),
        ((f"{path}#old",), 2, ("--remove old",)),
        ((tmp_path / "none",), 1, ("no store", "Try:")),
    ):
        found = command("compact", *arguments)
        assert found.code == code and all(word in found.err for word in words), found.err
    with cues.open(path):
        found = command("compact", path)
        assert found.code == 7 and f"process {os.getpid()}" in found.err
