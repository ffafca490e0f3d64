"""The transactional SQLite sink: every message is in the target once, however often it is presented.

The target is judged from outside, with a plain connection. ``Presented`` stands for a process that
delivers a given range, so that retries, stopped owners and seeks can be presented in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from sets import slow_except

import cues
from cues import testing
from cues.errors import Diverged
from cues.processors import sql

SCHEMA = "create table if not exists numbers (n integer)"
Ranges = dict[str, tuple[int, int]]


class Presented:
    """The process that a sink sees: ``ranges`` {tailer: (start, end)} under a generation and an epoch."""

    def __init__(
        self,
        ranges: Ranges,
        epoch: int = 1,
        generation: int = 0,
        indices: Any = None,
        id: str = "g.save",
        store: str = "ab" * 8,
    ) -> None:
        self.id = id
        self.stopping = False
        start, end = ({tailer: r[side] for tailer, r in ranges.items()} for side in (0, 1))
        digest = repr((generation, sorted(ranges.items()))).encode()[-16:]
        self.delivery = cues.Delivery(digest, generation, start, end, epoch, store)
        self.indices = list(range(*next(iter(ranges.values())))) if indices is None else indices


def deliver(db: sql.SQLite, presented: Any, messages: list[int] | None = None) -> list[int]:
    """Present messages (by default, each is its own index); returns those that were fresh."""
    with db.transaction(cast(cues.Process, presented)) as tx:
        fresh: list[int] = tx.fresh(presented.indices if messages is None else messages)
        tx.executemany("insert into numbers values (?)", [(n,) for n in fresh])
    return fresh


def one(start: int, end: int, **options: Any) -> Presented:
    return Presented({"g.save.q": (start, end)}, **options)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sql.SQLite]:
    db = sql.SQLite(tmp_path / "deep" / "target.db", SCHEMA)
    yield db
    db.close()


def numbers(db: sql.SQLite) -> list[int]:
    with contextlib.closing(sqlite3.connect(db.path)) as connection:
        return [n for (n,) in connection.execute("select n from numbers order by rowid")]


def position(db: sql.SQLite, processor: str = "g.save") -> tuple[Any, ...] | None:
    with contextlib.closing(sqlite3.connect(db.path)) as connection:
        found: tuple[Any, ...] | None = connection.execute(
            "select generation, epoch, ends, hash from cues_positions where processor = ?", (processor,)
        ).fetchone()
    return found


# --- the policy, case by case -------------------------------------------------------------------


def test_rows_and_position_are_one_commit(db: sql.SQLite) -> None:
    first = one(1, 4, epoch=7)
    assert deliver(db, first) == [1, 2, 3]
    assert position(db) == (0, 7, '{"g.save.q": 4}', first.delivery.hash)


def test_a_retry_is_skipped(db: sql.SQLite) -> None:
    deliver(db, one(1, 4))
    assert deliver(db, one(1, 4)) == []
    assert numbers(db) == [1, 2, 3]


def test_an_old_delivery_after_a_newer_one_is_skipped(db: sql.SQLite) -> None:
    """Why the last hash is not enough: a retry or a stopped owner may present any older one."""
    deliver(db, one(1, 4))
    last = one(4, 6)
    deliver(db, last)
    for start, end in [(1, 4), (2, 3), (1, 6), (4, 6)]:
        assert deliver(db, one(start, end)) == []
    assert numbers(db) == [1, 2, 3, 4, 5]
    assert position(db) == (0, 1, '{"g.save.q": 6}', last.delivery.hash)


def test_a_range_that_straddles_the_row_is_cut(db: sql.SQLite) -> None:
    deliver(db, one(1, 4))
    assert deliver(db, one(2, 7)) == [4, 5, 6]
    assert numbers(db) == [1, 2, 3, 4, 5, 6]


def test_a_straddling_range_with_filtered_messages_is_cut_by_index(db: sql.SQLite) -> None:
    """Messages 2, 5 and 6 passed the filter; the target ends in front of 5."""
    deliver(db, one(1, 5))
    assert deliver(db, one(2, 8, indices=[2, 5, 6]), [20, 50, 60]) == [50, 60]


def test_a_later_start_is_accepted(db: sql.SQLite) -> None:
    """Messages that went to the error queue leave gaps."""
    deliver(db, one(1, 4))
    assert deliver(db, one(6, 8)) == [6, 7]


def test_a_store_that_was_put_back_and_went_another_way_is_refused(db: sql.SQLite, tmp_path: Path) -> None:
    """Other messages have the indices of messages that the target has: skipped by their indices, they would be lost."""

    def save(message: Any, process: cues.Process) -> None:
        with db.transaction(process) as tx:
            tx.executemany("insert into numbers values (:n)", tx.fresh([message]))

    def go_on(*numbers: int) -> None:
        with cues.open(tmp_path / "store", durability="process") as store:
            store.queue("q").appender().write_many([{"n": n} for n in numbers])
            testing.run_until_idle(cues.Graph("g", [cues.Sink(save, "q", id="save")]), store)

    go_on(1, 2)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    go_on(3, 4)
    shutil.rmtree(tmp_path / "store")
    shutil.move(tmp_path / "copy", tmp_path / "store")
    with pytest.raises(cues.ProcessorStopped) as stopped:
        go_on(13, 14, 15)
    assert isinstance(stopped.value.__cause__, Diverged) and numbers(db) == [1, 2, 3, 4]


@pytest.mark.parametrize(("generation", "epoch"), [(0, 4), (-1, 5), (-1, 9)])
def test_an_earlier_owner_is_refused(generation: int, epoch: int, db: sql.SQLite) -> None:
    """A process was stopped, another took over and wrote; the first wakes up inside its function."""
    deliver(db, one(1, 4, epoch=5))
    before = position(db)
    with pytest.raises(cues.Fenced) as error:
        deliver(db, one(4, 9, epoch=epoch, generation=generation))
    assert error.value.processor == "g.save" and error.value.reason == "takeover" and "Try:" in str(error.value)
    assert numbers(db) == [1, 2, 3] and position(db) == before


def test_a_new_owner_fences_the_old_one_even_when_it_brings_nothing_new(db: sql.SQLite) -> None:
    deliver(db, one(1, 4, epoch=5))
    deliver(db, one(1, 4, epoch=6))
    with pytest.raises(cues.Fenced):
        deliver(db, one(4, 5, epoch=5))
    assert deliver(db, one(4, 5, epoch=6)) == [4]


def test_a_seek_that_asks_for_delivery_again_starts_the_row_anew(db: sql.SQLite) -> None:
    deliver(db, one(1, 4, epoch=5))
    assert deliver(db, one(2, 4, epoch=6, generation=1)) == [2, 3]
    assert position(db) == (1, 6, '{"g.save.q": 4}', one(2, 4, generation=1).delivery.hash)
    with pytest.raises(cues.Fenced):
        deliver(db, one(4, 9, epoch=6, generation=0))


def test_each_processor_has_a_row_of_its_own(db: sql.SQLite) -> None:
    deliver(db, one(1, 4, id="g.save"))
    assert deliver(db, one(1, 4, id="g.other")) == [1, 2, 3]
    assert position(db, "g.save") and position(db, "g.other")


def test_alts_have_a_place_for_each_input(db: sql.SQLite) -> None:
    deliver(db, Presented({"a": (1, 4)}))
    assert deliver(db, Presented({"b": (1, 3)})) == [1, 2]
    assert deliver(db, Presented({"a": (1, 6)})) == [4, 5]
    assert deliver(db, Presented({"b": (1, 3)})) == []
    assert position(db)[2] == '{"a": 6, "b": 3}'  # type: ignore[index]


def test_a_join_is_cut_at_the_same_count_on_each_input(db: sql.SQLite) -> None:
    deliver(db, Presented({"a": (1, 4), "b": (11, 14)}, indices={"x": [1, 2, 3], "y": [11, 12, 13]}), [1, 2, 3])
    again = Presented({"a": (2, 6), "b": (12, 16)}, indices={"y": [12, 13, 14, 15], "x": [2, 3, 4, 5]})
    with db.transaction(cast(cues.Process, again)) as tx:
        assert tx.fresh([2, 3, 4, 5]) == [4, 5]
        assert tx.fresh([12, 13, 14, 15]) == [14, 15]
    filtered = Presented({"a": (5, 9), "b": (15, 19)}, indices={"x": [5, 7], "y": [15, 17]})
    with db.transaction(cast(cues.Process, filtered)) as tx:
        assert tx.fresh([5, 7]) == [7]


def test_a_join_of_messages_that_were_not_joined_before_is_refused(db: sql.SQLite) -> None:
    deliver(db, Presented({"a": (1, 4), "b": (11, 14)}, indices={"x": [1], "y": [11]}), [1])
    with pytest.raises(cues.errors.Diverged, match="not joined with one another"):
        deliver(db, Presented({"a": (1, 4), "b": (12, 15)}, indices={"x": [1], "y": [12]}), [1])


def test_all_orders_of_presenting_give_each_message_once(db: sql.SQLite) -> None:
    """Every sequence of three deliveries out of all ranges over four messages, against a plain model."""
    ranges = [(a, b) for a in range(1, 5) for b in range(a + 1, 6)]
    for number, chosen in enumerate(itertools.product(ranges, repeat=3)):
        presented: list[int] = []
        end = 0
        for start, stop in chosen:
            fresh = deliver_to_row(presented, db, f"g.p{number}", start, stop)
            assert fresh == [n for n in range(start, stop) if n >= end]
            end = max(end, stop)
        assert len(presented) == len(set(presented))


def deliver_to_row(presented: list[int], db: sql.SQLite, id: str, start: int, stop: int) -> list[int]:
    with db.transaction(cast(cues.Process, one(start, stop, id=id))) as tx:
        fresh: list[int] = tx.fresh(list(range(start, stop)))
    presented += fresh
    return fresh


# --- the transaction ----------------------------------------------------------------------------


def test_a_block_that_raises_leaves_neither_rows_nor_position(db: sql.SQLite) -> None:
    deliver(db, one(1, 3))
    before = position(db)
    with pytest.raises(ZeroDivisionError), db.transaction(cast(cues.Process, one(3, 5))) as tx:
        tx.execute("insert into numbers values (99)")
        raise ZeroDivisionError
    assert numbers(db) == [1, 2] and position(db) == before
    assert deliver(db, one(3, 5)) == [3, 4]  # and the database is usable


def test_a_block_that_commits_itself_is_reported(db: sql.SQLite) -> None:
    with (
        pytest.raises(cues.CuesError, match="ended its transaction itself"),
        db.transaction(cast(cues.Process, one(1, 3))) as tx,
    ):
        tx.execute("insert into numbers values (1), (2)")
        tx.execute("commit")
    # The position was in the same commit, so the messages are not written again.
    assert deliver(db, one(1, 3)) == [] and numbers(db) == [1, 2]


def test_a_block_that_rolls_back_itself_is_reported(db: sql.SQLite) -> None:
    for statements in (["rollback"], ["rollback", "begin"]):
        with (
            pytest.raises(cues.CuesError, match="ended its transaction itself"),
            db.transaction(cast(cues.Process, one(1, 3))) as tx,
        ):
            for statement in statements:
                tx.execute(statement)
    assert deliver(db, one(1, 3)) == [1, 2]


def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    sql.SQLite(tmp_path / "deep" / "target.db", SCHEMA).close()
    assert not (tmp_path / "deep").exists()


def test_two_writers_take_turns(tmp_path: Path) -> None:
    """Two objects, and two threads on each, as two graphs in two processes would."""
    targets = [sql.SQLite(tmp_path / "t.db", SCHEMA) for _ in range(2)]

    def write(db: sql.SQLite, id: str) -> None:
        for n in range(1, 41):
            deliver(db, one(n, n + 1, id=id))

    threads = [threading.Thread(target=write, args=(db, f"g.{i}{j}")) for i, db in enumerate(targets) for j in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(targets[0])) == sorted(list(range(1, 41)) * 4)
    for target in targets:
        target.close()


def test_a_writer_that_waits_too_long_fails_and_changes_nothing(tmp_path: Path) -> None:
    db, impatient = (sql.SQLite(tmp_path / "t.db", SCHEMA, timeout_s=t) for t in (5.0, 0.01))
    deliver(impatient, one(1, 2))
    with (
        db.transaction(cast(cues.Process, one(1, 3, id="g.other"))),
        pytest.raises(cues.errors.CheckpointError, match="locked"),
    ):
        deliver(impatient, one(2, 3))
    assert deliver(impatient, one(2, 3)) == [2]
    db.close()
    impatient.close()


def _die_inside(path: str) -> None:
    import os
    import signal

    with sql.SQLite(path, SCHEMA).transaction(cast(cues.Process, one(1, 3))) as tx:
        tx.execute("insert into numbers values (1)")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_inside_the_block_leaves_nothing(db: sql.SQLite) -> None:
    deliver(db, one(1, 2, id="g.other"))
    child = multiprocessing.get_context("spawn").Process(target=_die_inside, args=(db.path,))
    child.start()
    child.join()
    assert child.exitcode == -9
    assert numbers(db) == [1] and position(db) is None


# --- in a graph ---------------------------------------------------------------------------------


def graph_over(db: sql.SQLite, batch: bool, after: Any = None, batch_size: int = 4) -> cues.Graph:
    """Numbers, every fifth of which fails before the sink, into the target. ``after`` runs after the commit."""
    graph = cues.Graph("g", errors="errors")
    graph.source("q")

    def save(messages: Any, process: cues.Process) -> None:
        with db.transaction(process) as tx:
            fresh = tx.fresh(messages if batch else [messages])
            tx.executemany("insert into numbers values (:n)", fresh)
        if after is not None:
            after(messages)

    options: dict[str, Any] = {"batch": batch, "batch_size": batch_size, "errors": None}
    graph.add(cues.Sink(save, "q", where=lambda message: message["n"] % 5 != 0, **options))
    return graph


WANTED = [n for n in range(1, 20) if n % 5]


@pytest.mark.slow
@pytest.mark.parametrize("batch", slow_except([True], [True, False]))
def test_a_crash_anywhere_leaves_each_message_once(batch: bool, tmp_path: Path) -> None:
    """Die at every crash point × every hit, one of them between the target's commit and the store's."""

    def run(store: cues.Store, db: sql.SQLite, batch_size: int = 4) -> None:
        testing.run_until_idle(graph_over(db, batch, batch_size=batch_size), store)

    def fresh(number: int) -> sql.SQLite:
        return sql.SQLite(tmp_path / f"{number}.db", SCHEMA)

    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([{"n": n} for n in range(1, 20)])
        sites = testing.crash_sites(lambda: run(store, fresh(0)))
    assert len(sites) > 15 and any(point == "commit.before" for point, _ in sites)
    for number, (point, hit) in enumerate(sites, 1):
        with testing.temporary_store() as store:
            db = fresh(number)
            store.queue("q").appender().write_many([{"n": n} for n in range(1, 20)])
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store, db)
            run(store, db, batch_size=3)  # and cut otherwise after the restart
            assert numbers(db) == WANTED, (point, hit)
            db.close()


@pytest.mark.parametrize("batch", [True, False])
def test_a_function_that_fails_after_its_commit_is_not_repeated_in_the_target(batch: bool, db: sql.SQLite) -> None:
    """The target has committed, the function fails: the processor stops, and the retry finds its own rows."""
    failing = [True]

    def fail(_: Any) -> None:
        if failing and numbers(db)[-1] >= 11:
            failing.clear()
            raise OSError("the network went away")

    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([{"n": n} for n in range(1, 20)])
        with pytest.raises(cues.ProcessorStopped, match="network"):
            testing.run_until_idle(graph_over(db, batch, fail), store)
        assert 11 in numbers(db)
        testing.run_until_idle(graph_over(db, batch), store)
    assert numbers(db) == WANTED


def test_without_the_row_a_crash_doubles(tmp_path: Path) -> None:
    """The negative control: the same sink without ``fresh`` has messages twice after some crash."""
    doubled = 0
    for hit in range(1, 5):
        with testing.temporary_store() as store:
            db = sql.SQLite(tmp_path / f"{hit}.db", SCHEMA)
            graph = cues.Graph("g")
            graph.source("q")

            @graph.sink("q", batch=True, batch_size=5, errors=None)
            def save(messages: Any, process: cues.Process, db: sql.SQLite = db) -> None:
                with db.transaction(process) as tx:
                    tx.executemany("insert into numbers values (:n)", messages)

            store.queue("q").appender().write_many([{"n": n} for n in range(1, 20)])
            with testing.crash("commit.before", hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph, store)
            testing.run_until_idle(graph, store)
            doubled += len(numbers(db)) > 19
            db.close()
    assert doubled


def test_alts_and_a_join_in_a_graph(db: sql.SQLite) -> None:
    """A real process gives the facts that ``fresh`` needs: ``indices`` by binding, ranges by tailer."""
    graph = cues.Graph("g")
    graph.source("a")
    graph.source("b")
    seen: list[tuple[Any, ...]] = []

    @graph.sink(cues.AnyOf("a", "b"), batch=True, errors=None, step_s=None)
    def either(messages: Any, process: cues.Process) -> None:
        with db.transaction(process) as tx:
            seen.append((process.binding, tx.fresh(messages)))

    @graph.sink(
        {"x": "a", "y": "b"},
        batch=True,
        errors=None,
        step_s=None,
        where={"x": lambda m: m["n"] > 1, "y": lambda m: m["n"] > 1},
    )
    def both(x: Any, y: Any, process: cues.Process) -> None:
        start = dict(process.delivery.start)
        with db.transaction(process) as tx:
            assert tx.fresh(x) == x and tx.fresh(y) == y
        # The same range again, straddling: pretend that the target ends inside it.
        ends = {tailer: index + 2 for tailer, index in start.items()}
        with contextlib.closing(sqlite3.connect(db.path)) as connection:
            connection.execute(
                "update cues_positions set ends = json(?) where processor = 'g.both'",
                (str(ends).replace("'", '"'),),
            )
            connection.commit()
        with db.transaction(process) as tx:
            seen.append(("both", tx.fresh(x), tx.fresh(y)))

    with testing.temporary_store() as store:
        store.queue("a").appender().write_many([{"n": n} for n in range(4)])
        store.queue("b").appender().write_many([{"n": n} for n in range(4)])
        testing.run_until_idle(graph, store)
    pairs = [{"n": 2}, {"n": 3}]
    assert sorted(seen, key=repr) == sorted(
        [("a", [{"n": n} for n in range(4)]), ("b", [{"n": n} for n in range(4)]), ("both", pairs, pairs)], key=repr
    )


def test_another_store_is_refused_and_changes_nothing(db: sql.SQLite) -> None:
    """A store made anew begins at index 1 and epoch 1 again: skipping below the old row would lose messages."""
    assert deliver(db, one(1, 4)) == [1, 2, 3]
    for options in ({"epoch": 1}, {"epoch": 9}, {"generation": 5}):
        with pytest.raises(cues.errors.Diverged, match="written from the store"):
            deliver(db, one(1, 3, store="cd" * 8, **options))
    assert numbers(db) == [1, 2, 3]
    assert deliver(db, one(1, 5)) == [4]


def test_a_target_that_refuses_stops_the_sink_and_is_not_a_failed_message(tmp_path: Path) -> None:
    """Two stores, one target: the second store's sink stops with the reason; nothing goes to the error queue."""
    db = sql.SQLite(tmp_path / "target.db", SCHEMA)
    for name in ("first", "second"):
        graph = cues.Graph("g", errors="errors")
        graph.source("q")

        @graph.sink("q", batch=True, retries=3)
        def save(messages: list[dict[str, Any]], process: cues.Process) -> None:
            with db.transaction(process) as tx:
                tx.executemany("insert into numbers values (?)", [(m["n"],) for m in tx.fresh(messages)])

        with cues.open(tmp_path / name) as store:
            store.queue("q").appender().write({"n": 1})
            if name == "first":
                testing.run_until_idle(graph, store=store)
            else:
                with pytest.raises(cues.ProcessorStopped) as caught:
                    testing.run_until_idle(graph, store=store)
                assert isinstance(caught.value.__cause__, cues.errors.Diverged)
                assert len(store.queue("errors")) == 0
    assert numbers(db) == [1]
    db.close()
