"""A store that was copied, put back or moved: what it appends then is never taken for what its original appended.

Messages that were there keep their delivery hashes, new ones get hashes that no message of the original has, and a
target that has messages which the store lost refuses (:class:`cues.errors.Diverged`) instead of skipping new ones.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.checkpoints import SQLCheckpoint
from cues.processors import sql
from cues.storage import timeline
from cues.testing import check_attempts, run_until_idle
from cues.tools.compaction import compact

TABLE = "create table if not exists t (n integer)"


def copy(source: Path, to: Path) -> None:
    """As an operator does, in another process, while nothing has the store open."""
    subprocess.run(["cp", "-r", "--sparse=always", source, to], check=True)


def put_back(store: Path, kept: Path) -> None:
    shutil.rmtree(store)
    kept.rename(store)


def overwrite(store: Path, kept: Path) -> None:
    """Only the data file, in place: the same inode, the same files beside it."""
    subprocess.run(["cp", "--sparse=always", kept / "data.mdb", store / "data.mdb"], check=True)


def send(path: Path, *numbers: int) -> None:
    with cues.open(path) as store:
        store.queue("in").appender().write_many([{"n": n} for n in numbers])


def hashes(path: Path) -> dict[int, str]:
    """The input of an idempotent target: the hash of each message, by index."""
    found: dict[int, str] = {}
    graph = cues.Graph("g", store=path)

    @graph.sink("in")
    def save(message: Any, process: Any) -> None:
        found[message["n"]] = process.delivery_hash

    with cues.open(path) as store:
        run_until_idle(graph, store)
        assert not check_attempts(store)
        assert not store.check()
    return found


@pytest.mark.parametrize("back", [put_back, overwrite])
@pytest.mark.parametrize("durability", ["disk", "process"])
def test_new_messages_of_a_store_that_was_put_back_have_new_hashes_and_old_ones_keep_theirs(
    tmp_path: Path, back: Callable[[Path, Path], None], durability: str
) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    cues.open(path, durability=durability).close()
    send(path, 1, 2, 3)
    copy(path, kept)
    send(path, 4, 5)
    send(path, 6)
    first = hashes(path)
    back(path, kept)
    send(path, 4, 5, 6)
    second = hashes(path)
    assert [n for n in first if first[n] == second[n]] == [1, 2, 3]
    assert not set(list(first.values())[3:]) & set(list(second.values())[3:])


@pytest.mark.parametrize("move", [lambda a, b: a.rename(b), lambda a, b: subprocess.run(["mv", a, b], check=True)])
def test_a_store_that_was_renamed_is_the_same(tmp_path: Path, move: Callable[[Path, Path], Any]) -> None:
    send(tmp_path / "a", 1, 2)
    move(tmp_path / "a", tmp_path / "b")
    send(tmp_path / "b", 3)
    with cues.open(tmp_path / "b") as store, store.core.view() as txn:
        assert timeline.read(txn, "in") == ()


def test_a_timeline_that_nothing_was_appended_in_is_forgotten_and_so_is_what_was_purged(tmp_path: Path) -> None:
    def lines() -> list[int]:
        with cues.open(tmp_path / "s") as store, store.core.view() as txn:
            return [first for first, _ in timeline.read(txn, "in")]

    send(tmp_path / "s", 1, 2)
    for _ in range(3):
        (tmp_path / "s" / timeline.FILE).unlink()
        assert lines() == [3]
    send(tmp_path / "s", 3)
    (tmp_path / "s" / timeline.FILE).unlink()
    assert lines() == [3, 4]
    send(tmp_path / "s", 4)
    with cues.open(tmp_path / "s") as store:
        store.queue("in").purge(before=5)
    (tmp_path / "s" / timeline.FILE).unlink()
    assert lines() == [5]


def test_attempts_whose_timeline_was_purged_are_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for n in (1, 2):
        send(path, n)
        (path / timeline.FILE).unlink()
    assert len(hashes(path)) == 2
    with cues.open(path) as store:
        store.queue("in").purge(before=3)
    (path / timeline.FILE).unlink()
    with cues.open(path) as store:
        assert not check_attempts(store)


def test_a_new_timeline_begins_once(tmp_path: Path) -> None:
    """Not again at the next opening, nor by a compaction, nor by a writer that was killed or wrote nothing."""
    send(tmp_path / "s", 1)
    (tmp_path / "s" / timeline.FILE).unlink()
    for turn in range(6):
        with cues.open(tmp_path / "s") as store, store.core.view() as txn:
            assert [first for first, _ in timeline.read(txn, "in")] == [2]
        if turn == 1:
            compact(tmp_path / "s")
        if turn == 2:
            dies = "import cues, os, sys; s = cues.open(sys.argv[1]); s.queue('in'); os.kill(os.getpid(), 9)"
            subprocess.run([sys.executable, "-c", dies, tmp_path / "s"], check=False)
        if turn == 3:
            send(tmp_path / "s", 2, 3)
        if turn == 4:
            with cues.open(tmp_path / "s") as store, pytest.raises(ZeroDivisionError):
                store.core.commit(lambda txn: 1 / 0)


def test_a_look_at_a_copy_changes_nothing_of_it(tmp_path: Path) -> None:
    send(tmp_path / "s", 1)
    copy(tmp_path / "s", tmp_path / "copy")
    before = {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir() if p.is_file() and p.name != "lock.mdb"}
    with cues.open(tmp_path / "copy", readonly=True) as store, store.core.view() as txn:
        assert timeline.read(txn, "in") == ()
    assert before == {p.name: (tmp_path / "copy" / p.name).read_bytes() for p in map(Path, before)}


# --- exact targets --------------------------------------------------------------------------------


def sqlite_target(path: Path) -> Any:
    return sql.SQLite(path, TABLE)


def sqlalchemy_target(path: Path) -> Any:
    return SQLCheckpoint(path, schema=TABLE)


def graph_of(path: Path, target: Any) -> cues.Graph:
    graph = cues.Graph("g", store=path)

    @graph.sink("in", batch=True, checkpoint=target)
    def save(messages: Any, process: Any) -> None:
        statement = "insert into t values (?)"
        rows = [(message["n"],) for message in messages]
        if isinstance(target, sql.SQLite):
            process.connection.executemany(statement, rows)
        else:
            process.connection.exec_driver_sql(statement, rows)

    return graph


def run_exact(path: Path, target: Any) -> None:
    with cues.open(path) as store:
        run_until_idle(graph_of(path, target), store)


def table(path: Path) -> list[int]:
    with sqlite3.connect(path) as connection:
        return [n for (n,) in connection.execute("select n from t order by rowid")]


@pytest.mark.parametrize("make", [sqlite_target, sqlalchemy_target])
@pytest.mark.parametrize("after", [2, 3, 7])
def test_a_target_that_has_messages_which_a_store_lost_refuses_new_ones(
    tmp_path: Path, make: Callable[[Path], Any], after: int
) -> None:
    path, kept, database = tmp_path / "s", tmp_path / "kept", tmp_path / "t.db"
    send(path, 1, 2, 3)
    run_exact(path, make(database))
    copy(path, kept)
    send(path, 4, 5, 6)
    run_exact(path, make(database))
    put_back(path, kept)
    send(path, *range(10, 10 + after))
    with pytest.raises(cues.ProcessorStopped) as stopped:
        run_exact(path, make(database))
    assert isinstance(stopped.value.__cause__, cues.errors.Diverged)
    assert "replaced by an older copy" in str(stopped.value.__cause__)
    assert table(database) == [1, 2, 3, 4, 5, 6]
    with sqlite3.connect(database) as connection:  # as the hint says
        connection.execute("delete from cues_positions where processor = 'g.save'")
    connection.close()
    run_exact(path, make(database))
    assert table(database) == [1, 2, 3, 4, 5, 6, *range(10, 10 + after)]


@pytest.mark.parametrize("make", [sqlite_target, sqlalchemy_target])
def test_a_store_that_was_copied_and_lost_nothing_continues_at_its_target(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    path, database = tmp_path / "s", tmp_path / "t.db"
    send(path, 1, 2, 3)
    run_exact(path, make(database))
    send(path, 4)
    copy(path, tmp_path / "kept")
    put_back(path, tmp_path / "kept")
    send(path, 5)
    run_exact(path, make(database))
    assert table(database) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("make", [sqlite_target, sqlalchemy_target])
def test_a_table_of_an_older_version_continues(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path, database = tmp_path / "s", tmp_path / "t.db"
    send(path, 1, 2, 3)
    run_exact(path, make(database))
    with sqlite3.connect(database) as connection:
        connection.execute("alter table cues_positions drop column seals")
    connection.close()
    send(path, 4)
    run_exact(path, make(database))
    assert table(database) == [1, 2, 3, 4]
    with sqlite3.connect(database) as connection:
        assert connection.execute("select seals from cues_positions").fetchone()[0] not in (None, "{}")
    connection.close()
