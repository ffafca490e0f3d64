"""Sinks that are exactly-once into a database: ``checkpoint=``, on SQLite and on PostgreSQL.

The database is judged from outside, with a plain connection. That every order of deliveries is admitted or
refused as it should be is shown, case by case, in test_processors_sql.py: the policy is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa
from children import Child, fresh, run
from sets import slow_except
from test_processors_sql import Presented

import cues
from cues import testing
from cues.checkpoints import SQLCheckpoint
from cues.processors import sql

SCHEMA = "create table if not exists numbers (n integer)"
INSERT = sa.text("insert into numbers values (:n)")
WANTED = [n for n in range(1, 20) if n % 5]


class Database:
    """One kind of database; ``make`` gives the checkpoint of a new one."""

    def __init__(self, kind: str, url: Callable[[], str]) -> None:
        self.kind = kind
        self._url = url

    def make(self, **options: Any) -> SQLCheckpoint:
        return SQLCheckpoint(self._url(), schema=SCHEMA, **options)

    @staticmethod
    def numbers(checkpoint: SQLCheckpoint, question: str = "select n from numbers") -> list[int]:
        engine = sa.create_engine(cast(sa.URL, checkpoint.target))
        with engine.connect() as connection:
            found = [n for (n,) in connection.execute(sa.text(question))]
        engine.dispose()
        return found


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "postgresql":
        return Database("postgresql", request.getfixturevalue("postgres").database)
    count = itertools.count()
    return Database("sqlite", lambda: str(tmp_path / "deep" / f"{next(count)}.db"))


def graph_into(checkpoint: Any, batch: bool = True, batch_size: int = 4, **options: Any) -> cues.Graph:
    """Numbers, every fifth of which a filter stops, into the database."""
    graph = cues.Graph("g", errors="errors")
    graph.source("q")

    def save(messages: Any, process: cues.Process) -> None:
        rows = [{"n": m["n"]} for m in (messages if batch else [messages])]
        process.connection.execute(INSERT, rows)

    where = lambda message: message["n"] % 5 != 0  # noqa: E731
    graph.add(cues.Sink(save, "q", batch=batch, batch_size=batch_size, checkpoint=checkpoint, where=where, **options))
    return graph


def fill(store: cues.Store) -> None:
    store.queue("q").appender().write_many([{"n": n} for n in range(1, 20)])


# --- crashes ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("database", slow_except(["sqlite"], ["sqlite", "postgresql"]), indirect=True)
@pytest.mark.parametrize("batch", slow_except([False], [True, False]))
def test_a_crash_anywhere_leaves_each_message_once(batch: bool, database: Database) -> None:
    """Die at every crash point × every hit, two of them around the database's own commit."""
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)
        sites = testing.crash_sites(lambda: testing.run_until_idle(graph_into(checkpoint, batch), store))
    assert {"checkpoint.inside", "checkpoint.after", "commit.before"} <= {point for point, _ in sites}
    if database.kind == "postgresql" or not batch:  # each takes its time, and the rest is the same
        around = ("checkpoint", "commit", "snapshot", "function")
        sites = [(point, hit) for point, hit in sites if hit <= 2 and point.startswith(around)]
    for point, hit in sites:
        with testing.temporary_store() as store, database.make() as checkpoint:
            fill(store)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph_into(checkpoint, batch), store)
            # And cut otherwise after the restart.
            testing.run_until_idle(graph_into(checkpoint, batch, batch_size=3), store)
            assert sorted(database.numbers(checkpoint)) == WANTED, (point, hit)


def test_each_partition_has_a_position_of_its_own(database: Database) -> None:
    """A queue of three partitions: a unit for each writes to the one database, under an epoch of its own."""
    numbers = list(range(40))

    def graph(checkpoint: SQLCheckpoint, batch_size: int) -> cues.Graph:
        made = cues.Graph("g", queues={"q": cues.QueueOptions(partitions=3, key="n")})
        made.source("q")

        @made.sink("q", batch=True, batch_size=batch_size, checkpoint=checkpoint)
        def save(messages: list[dict[str, int]], process: cues.Process) -> None:
            process.connection.execute(INSERT, messages)

        return made

    for hit in (1, 2, 4):
        with testing.temporary_store() as store, database.make() as checkpoint:
            store.queue("q", partitions=3, key="n").appender().write_many([{"n": n} for n in numbers])
            with testing.crash("checkpoint.after", hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(checkpoint, 4), store)
            testing.run_until_idle(graph(checkpoint, 3), store)
            assert sorted(database.numbers(checkpoint)) == numbers
            rows = database.numbers(checkpoint, "select processor from cues_positions order by 1")
            assert rows == ["g.save", "g.save/1", "g.save/2"]


KILLED = """
import sys
import sqlalchemy as sa, cues
from cues.checkpoints import SQLCheckpoint
checkpoint = SQLCheckpoint(sys.argv[2], schema="create table if not exists numbers (n integer)")
graph = cues.Graph("g", store=sys.argv[1], durability="process")

@graph.source("q")
def q(position):
    for n in range(position or 0, 40):
        yield n + 1, {"n": n}

@graph.sink("q", batch=True, batch_size=6, checkpoint=checkpoint)
def save(messages, process):
    process.connection.execute(sa.text("insert into numbers values (:n)"), messages)

graph.run()
"""


@pytest.mark.parametrize("database", slow_except(["sqlite"], ["sqlite", "postgresql"]), indirect=True)
def test_kill_9_of_a_graph_around_the_commits(database: Database, tmp_path: Path) -> None:
    """A process of its own, killed again and again, after the database's commit and before it."""
    with database.make() as checkpoint:
        url = cast(sa.URL, checkpoint.engine.url).render_as_string(hide_password=False)
        for site in ("checkpoint.inside:2", "checkpoint.after:1", "commit.inside:2", "checkpoint.after:1"):
            with Child(KILLED, tmp_path / "store", url, CUES_FAULT=site) as child:
                assert child.returncode() == -signal.SIGKILL, site
        run(KILLED, tmp_path / "store", url)
        assert database.numbers(checkpoint) == list(range(40))


def test_a_target_that_keeps_no_position_doubles() -> None:
    """The negative control: transactions without the row present a message again after some crash."""

    class Forgetful:
        def __init__(self) -> None:
            self.rows: list[int] = []

        @contextlib.contextmanager
        def transaction(self, process: Any) -> Any:
            yield type("Transaction", (), {"connection": self, "known": 0})

        def execute(self, _: Any, rows: list[dict[str, int]]) -> None:
            self.rows += [row["n"] for row in rows]

    doubled = 0
    for hit in range(1, 5):
        with testing.temporary_store() as store:
            fill(store)
            target = Forgetful()
            with testing.crash("commit.before", hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph_into(target), store)
            testing.run_until_idle(graph_into(target), store)
            doubled += len(target.rows) > len(WANTED)
    assert doubled


def test_messages_that_a_restart_cuts_otherwise_are_cut_at_the_position(database: Database) -> None:
    """The database is ahead of the store by part of what the next call is given: it gets the rest, with its indices."""
    given: list[tuple[list[int], Any]] = []
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)
        graph = cues.Graph("g")
        graph.source("q")

        @graph.sink("q", batch=True, batch_size=100, step_s=None, checkpoint=checkpoint, where=lambda m: m["n"] % 5)
        def save(messages: list[dict[str, int]], process: cues.Process) -> None:
            given.append(([m["n"] for m in messages], process.indices))
            process.connection.execute(INSERT, messages)

        # As a process would that was killed between its two commits, when the snapshot was lost as well.
        with checkpoint.transaction(cast(cues.Process, Presented({"g.save.q": (1, 8)}, store=store.id.hex()))) as tx:
            tx.connection.execute(INSERT, [{"n": n} for n in range(1, 8) if n % 5])
        testing.run_until_idle(graph, store)
        assert given == [([n for n in WANTED if n >= 8],) * 2]
        assert database.numbers(checkpoint) == WANTED


def test_the_position_fences_a_process_that_was_stopped(database: Database) -> None:
    with database.make() as checkpoint:
        one(checkpoint, 1, 4, epoch=2)
        with pytest.raises(cues.Fenced) as error:
            one(checkpoint, 4, 6, epoch=1)
        assert error.value.reason == "takeover" and error.value.processor == "g.save"
        one(checkpoint, 1, 6, epoch=3)
        assert database.numbers(checkpoint) == [1, 2, 3, 4, 5]


def one(checkpoint: Any, start: int, end: int, epoch: int = 1, **options: Any) -> list[int]:
    with checkpoint.transaction(cast(cues.Process, Presented({"g.save.q": (start, end)}, epoch, **options))) as tx:
        fresh: list[int] = tx.fresh(list(range(start, end)))
        if fresh:
            tx.connection.execute(INSERT, [{"n": n} for n in fresh])
    return fresh


ZOMBIE = """
import os, sys, signal
from test_sink_checkpoint import SQLCheckpoint, one
import sqlalchemy as sa
checkpoint = SQLCheckpoint(sys.argv[1])
one(checkpoint, 1, 4, epoch=1)
print("ready", flush=True)
sys.stdin.readline()
try:
    one(checkpoint, 4, 8, epoch=1)
    print("committed")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_zombie_that_wakes_up_writes_nothing(database: Database) -> None:
    """SIGSTOP in front of the transaction, takeover by the next epoch, SIGCONT."""
    with database.make() as checkpoint:
        checkpoint._open()
        url = cast(sa.URL, checkpoint.target).render_as_string(hide_password=False)
        with Child(ZOMBIE, url) as child:
            assert child.line() == "ready"
            child.signal(signal.SIGSTOP)
            child.say()
            assert one(checkpoint, 1, 6, epoch=2) == [4, 5]
            child.signal(signal.SIGCONT)
            assert child.line() == "Fenced"
            child.end()
        assert database.numbers(checkpoint) == [1, 2, 3, 4, 5]


# --- what fails ---------------------------------------------------------------------------------


def test_a_message_that_fails_goes_to_the_error_queue_and_leaves_no_row(database: Database) -> None:
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)

        @graph.sink("q", checkpoint=checkpoint)
        def save(message: dict[str, int], process: cues.Process) -> None:
            process.connection.execute(INSERT, message)
            if message["n"] % 5 == 0:
                raise ValueError("five")

        testing.run_until_idle(graph, store)
        assert database.numbers(checkpoint) == WANTED
        assert len(store.queue("errors")) == 3


def test_a_database_that_fails_stops_the_sink_and_is_not_a_failed_message(database: Database) -> None:
    """Messages in front of the failure commit, one that failed by itself among them, and only that is an error."""
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    broken = [True]
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)

        @graph.sink("q", checkpoint=checkpoint)
        def save(message: dict[str, int], process: cues.Process) -> None:
            if message["n"] == 3:
                raise ValueError("three")
            process.connection.execute(INSERT, message)
            if message["n"] == 7 and broken:
                process.connection.invalidate()
                raise sa.exc.OperationalError("insert", {}, OSError("the network went away"))

        with pytest.raises(cues.ProcessorStopped, match="network") as caught:
            testing.run_until_idle(graph, store)
        assert isinstance(caught.value.__cause__, cues.errors.CheckpointError)
        assert database.numbers(checkpoint) == [1, 2, 4, 5, 6]
        assert len(store.queue("errors")) == 1
        broken.clear()
        testing.run_until_idle(graph, store)
        assert database.numbers(checkpoint) == [n for n in range(1, 20) if n != 3]
        assert len(store.queue("errors")) == 1


@pytest.mark.parametrize("statement", ["commit", "rollback"])
@pytest.mark.parametrize("raw", [True, False])
def test_a_function_that_ends_the_transaction_is_reported(statement: str, raw: bool, database: Database) -> None:
    """A rollback that went unnoticed would lose its messages: the store would move on, and the database has nothing."""
    graph = cues.Graph("g")
    graph.source("q")
    wrong = [True]
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)

        @graph.sink("q", batch=True, batch_size=5, checkpoint=checkpoint)
        def save(messages: list[dict[str, int]], process: cues.Process) -> None:
            process.connection.execute(INSERT, messages)
            if wrong:
                process.connection.exec_driver_sql(statement) if raw else getattr(process.connection, statement)()

        if statement == "commit" and raw:
            # The commit does no harm: it has the position.
            testing.run_until_idle(graph, store)
        else:
            with pytest.raises(cues.ProcessorStopped, match="transaction itself"):
                testing.run_until_idle(graph, store)
        wrong.clear()
        testing.run_until_idle(graph, store)
        assert database.numbers(checkpoint) == list(range(1, 20))


def test_a_savepoint_is_the_functions_own(database: Database) -> None:
    with testing.temporary_store() as store, database.make() as checkpoint:
        fill(store)
        graph = cues.Graph("g")
        graph.source("q")

        @graph.sink("q", batch=True, step_s=None, checkpoint=checkpoint)
        def save(messages: list[dict[str, int]], process: cues.Process) -> None:
            for message in messages:
                with contextlib.suppress(ZeroDivisionError), process.connection.begin_nested():
                    process.connection.execute(INSERT, message)
                    1 / (message["n"] % 5)

        testing.run_until_idle(graph, store)
        assert database.numbers(checkpoint) == WANTED


@pytest.mark.slow
def test_a_target_held_by_another_process_is_waited_for_and_then_reported(database: Database) -> None:
    # PostgreSQL ends a transaction whose client is silent for half of this time.
    with database.make(timeout_s=2) as impatient:
        url = cast(sa.URL, impatient.target)
        assert one(impatient, 1, 2) == [1]
        with (
            SQLCheckpoint(url, timeout_s=30) as holder,
            holder.transaction(cast(cues.Process, Presented({"g.save.q": (2, 3)}))),
            pytest.raises(cues.errors.CheckpointError, match="lock"),
        ):
            one(impatient, 2, 4)
        assert one(impatient, 2, 4) == [3]


def test_two_that_come_first_at_once_write_one_after_the_other(database: Database) -> None:
    """Neither finds a row, or a table; the one that comes second sees what the first wrote."""
    with database.make() as checkpoint:
        url = cast(sa.URL, checkpoint.target)
        both = [SQLCheckpoint(url, schema=SCHEMA) for _ in range(4)]
        start = threading.Barrier(4)
        fresh: list[int] = []

        def write(mine: SQLCheckpoint) -> None:
            start.wait()
            fresh.extend(one(mine, 1, 6))

        threads = [threading.Thread(target=write, args=(mine,)) for mine in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine in both:
            mine.close()
        assert sorted(fresh) == [1, 2, 3, 4, 5] == sorted(database.numbers(checkpoint))


# --- the declaration ----------------------------------------------------------------------------


async def later(message: Any, process: Any) -> None: ...


def plain(message: Any, process: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (later, {}, "async def"),
        (plain, {"concurrency": 2}, "concurrency=2"),
        (plain, {"strategy": "at-most-once"}, "at-most-once"),
        (plain, {"tailers": "other"}, "tailers="),
        (plain, {"checkpoint": "flights.db"}, "is not an object with transaction"),
        (plain, {"checkpoint": SQLCheckpoint}, "is not an object with transaction"),
        (lambda message: None, {"id": "f"}, "process"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_sink_is_declared(fn: Any, options: Any, words: str) -> None:
    with pytest.raises(cues.GraphError, match=words) as error:
        cues.Sink(fn, "q", **{"checkpoint": SQLCheckpoint("x.db"), **options})
    assert "Try:" in str(error.value)


def test_streams_have_none() -> None:
    with pytest.raises(cues.GraphError, match="takes no option 'checkpoint'"):
        cues.Stream(plain, "q", "p", checkpoint=SQLCheckpoint("x.db"))


def test_state_belongs_into_the_target_and_connections_into_such_sinks(tmp_path: Path) -> None:
    for options, use, words in [
        ({"checkpoint": SQLCheckpoint(tmp_path / "x.db")}, lambda process: process.state, "in the target"),
        ({}, lambda process: process.connection, "checkpoint="),
    ]:
        graph = cues.Graph("g")
        graph.source("q")
        graph.add(cues.Sink(lambda message, process: use(process), "q", id="s", **options))  # type: ignore[arg-type]
        with testing.temporary_store() as store:
            store.queue("q").appender().write({"n": 1})
            with pytest.raises(cues.ProcessorStopped, match=words):
                testing.run_until_idle(graph, store)


def test_the_guarantee_is_shown(tmp_path: Path) -> None:
    graph = graph_into(SQLCheckpoint(tmp_path / "x.db"))
    assert graph.plan().nodes[-1].guarantee.startswith("exactly-once: its target commits")
    assert not (tmp_path / "x.db").exists()  # a graph file may be imported only to be shown


def test_a_checkpoint_travels_by_pickle_and_hides_its_password() -> None:
    made = SQLCheckpoint("postgresql+psycopg://me:secret@host/db", "name", schema=SCHEMA, timeout_s=5)
    assert "secret" not in repr(made) and "secret" not in made.where
    again = pickle.loads(pickle.dumps(made))
    assert again.target == made.target and (again.name, again._schema, again.timeout_s) == ("name", [SCHEMA], 5)
    with pytest.raises(TypeError, match="engine"):
        pickle.dumps(SQLCheckpoint(sa.create_engine("sqlite:///x.db")))


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", ":memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(cues.errors.InvalidArgument, match="memory"):
        SQLCheckpoint(url)


def test_a_database_of_an_unknown_kind_is_refused() -> None:
    for url in ("nonsense://host/db", "://"):
        with pytest.raises(cues.errors.InvalidArgument, match=r"does not support the database|not a database"):
            SQLCheckpoint(url, "name").restore()


def test_a_graph_as_plain_data_and_its_relatives_keep_the_target(tmp_path: Path) -> None:
    target = SQLCheckpoint(tmp_path / "x.db")
    graph = cues.Graph("g", [cues.Source("q"), cues.Sink(plain, "q", id="save", checkpoint=target)])
    for relative in (cues.Graph.from_dict(graph.to_dict()), cues.merge("m", graph, cues.Graph("h")), graph.rebind({})):
        assert relative.processors["save"].options.checkpoint is target


def test_an_engine_of_the_users_own_stays_open_and_must_have_transactions(tmp_path: Path, postgres: Any) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    checkpoint = SQLCheckpoint(engine, schema=SCHEMA)
    assert one(checkpoint, 1, 3) == [1, 2]
    checkpoint.close()
    assert one(checkpoint, 1, 4) == [3]
    engine.dispose()
    with pytest.raises(cues.errors.InvalidArgument, match="AUTOCOMMIT"):
        one(SQLCheckpoint(sa.create_engine(postgres.database(), isolation_level="AUTOCOMMIT")), 1, 2)


# --- Python's own sqlite3 as the target ------------------------------------------------------------


def test_a_plain_sqlite_target_and_sqlalchemy_continue_where_the_other_stopped(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    plain_target = sql.SQLite(path, SCHEMA)
    graph = cues.Graph("g")
    graph.source("q")

    @graph.sink("q", batch=True, batch_size=3, checkpoint=plain_target)
    def save(messages: list[dict[str, int]], process: cues.Process) -> None:
        process.connection.executemany("insert into numbers values (:n)", messages)

    with testing.temporary_store() as store:
        fill(store)
        with testing.crash("commit.before", 2, how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(graph, store)
        with SQLCheckpoint(path) as checkpoint:
            again = cues.Graph("g")
            again.source("q")

            @again.sink("q", batch=True, batch_size=7, checkpoint=checkpoint, id="save")
            def save_on(messages: list[dict[str, int]], process: cues.Process) -> None:
                process.connection.execute(INSERT, messages)

            testing.run_until_idle(again, store)
    plain_target.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert [n for (n,) in connection.execute("select n from numbers")] == list(range(1, 20))


def test_without_sqlalchemy_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import cues, cues.checkpoints\n"
        "from cues.processors import sql\n"  # needs nothing but Python
        "try: cues.checkpoints.SQLCheckpoint\n"
        "except cues.errors.Unsupported as error: print(error)"
    )
    assert "pip install 'cues-streams[sql]'" in fresh(code)
