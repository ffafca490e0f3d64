"""What no message can mend stops a processor before it takes one; what a database asks to repeat is repeated."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from postgres import Postgres
from small import until

import cues
from cues import testing
from cues.errors import CheckpointError, InvalidArgument
from cues.processors import file_sink
from cues.processors.file_sink import FileSink
from cues.processors.http_sink import Requests

COUNT = 30


class Target:
    """A target in memory: its transactions raise the errors of a list, at the beginning or at the commit."""

    where = "memory"

    def __init__(self, at_begin: list[Exception] | None = None, at_commit: list[Exception] | None = None) -> None:
        self.at_begin, self.at_commit = at_begin or [], at_commit or []
        self.rows: list[Any] = []

    @contextmanager
    def transaction(self, process: cues.Process) -> Iterator[Any]:
        if self.at_begin:
            raise self.at_begin.pop(0)
        rows: list[Any] = []
        yield SimpleNamespace(connection=rows, known=0)
        if self.at_commit:
            raise self.at_commit.pop(0)
        self.rows += rows


def save(messages: Any, process: cues.Process) -> None:
    process.connection.extend(messages if isinstance(messages, list) else [messages])


def run(sink: cues.Sink, store: cues.Store) -> testing.Report:
    store.queue("q").appender().write_many([{"n": n} for n in range(COUNT)])
    graph = cues.Graph("g", [cues.Source("q", None), sink], errors="errors")
    return testing.run_until_idle(graph, store, stopped="return")


def conflict() -> CheckpointError:
    return CheckpointError("a deadlock", "repeat it.", where="memory", again=True)


@pytest.mark.parametrize("options", [{"batch": True}, {}, {"retries": 3}], ids=str)
def test_a_transaction_that_cannot_begin_charges_no_message(options: dict[str, Any], store: cues.Store) -> None:
    target = Target(at_begin=[ValueError("a wrong option") for _ in range(COUNT * 4)])
    report = run(cues.Sink(save, "q", id="save", checkpoint=target, **options), store)
    assert "The target of g.save cannot begin a transaction: ValueError: a wrong option" in str(report.stopped["save"])
    assert testing.messages(store, "errors") == [] and target.rows == []


@pytest.mark.parametrize("options", [{"batch": True}, {}, {"retries": 1}], ids=str)
def test_a_conflict_is_repeated_and_charges_no_message(options: dict[str, Any], store: cues.Store) -> None:
    target = Target(at_begin=[conflict()], at_commit=[conflict() for _ in range(5)])
    report = run(cues.Sink(save, "q", id="save", checkpoint=target, **options), store)
    assert [row["n"] for row in target.rows] == list(range(COUNT))
    assert not report.stopped and testing.messages(store, "errors") == [] and len(report.waits_s) == 6


def test_a_conflict_without_end_stops_the_sink_after_a_bounded_time(store: cues.Store) -> None:
    target = Target(at_commit=[conflict() for _ in range(1_000)])
    report = run(cues.Sink(save, "q", id="save", batch=True, checkpoint=target, outage="stop"), store)
    assert "a deadlock" in str(report.stopped["save"]) and testing.messages(store, "errors") == []
    assert len(report.waits_s) == 19 and sum(report.waits_s) < 20


def test_conflicts_are_counted_apart_from_retries(store: cues.Store) -> None:
    errors = [conflict(), ValueError("1"), conflict(), ValueError("2"), conflict()]
    target = Target(at_commit=errors)
    run(cues.Sink(save, "q", id="save", batch=True, checkpoint=target, retries=2), store)
    assert len(target.rows) == COUNT and testing.messages(store, "errors") == []


def test_a_missing_driver_stops_the_sink_before_it_takes_a_message(store: cues.Store) -> None:
    pytest.importorskip("sqlalchemy")
    from cues.processors.sql_sink import Table

    table = Table("mysql+mysqlconnector://user@localhost/shop", "t", {"n": "integer"})
    report = run(table.sink("q"), store)
    assert "pip install" in str(report.stopped["save"].__cause__)
    assert testing.messages(store, "errors") == []


def test_a_source_without_its_driver_says_so(store: cues.Store) -> None:
    pytest.importorskip("sqlalchemy")
    from cues.processors.sql_source import Rows

    with pytest.raises(cues.CuesError, match=r"which is not installed\. Try: pip install"):
        next(Rows("mysql+mysqlconnector://user@localhost/shop", "t", "id")(None))
    with pytest.raises(InvalidArgument, match="does not support the database 'nosuch'"):
        next(Rows("nosuch://user@localhost/shop", "t", "id")(None))


def test_the_table_is_made_before_the_first_message(store: cues.Store, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from cues.processors.sql_sink import Table

    table = Table(tmp_path / "t.db", "t", {"n": "integer"})
    testing.run_until_idle(cues.Graph("g", [cues.Source("q", None), table.sink("q")]), store)
    with table.target.engine.connect() as connection:  # type: ignore[union-attr]
        assert connection.exec_driver_sql("select count(*) from t").scalar() == 0
    table.close()


def test_the_target_is_prepared_once_before_the_first_message(store: cues.Store) -> None:
    prepared: list[int] = []
    target = Target()
    target.__cues_prepare__ = lambda: prepared.append(len(target.rows))  # type: ignore[attr-defined]
    run(cues.Sink(save, "q", id="save", batch=True, batch_size=4, checkpoint=target), store)
    assert prepared == [0] and len(target.rows) == COUNT


def test_a_file_of_an_earlier_process_is_finished_in_time_without_a_message(tmp_path: Path) -> None:
    """Its process was killed before the time had come; the next one gets no message, and readers wait for the file."""

    def graph(roll_s: float) -> tuple[FileSink, cues.Graph]:
        out = FileSink(tmp_path / "out", roll_s=roll_s)
        return out, cues.Graph("g", [cues.Source("q", None), out.sink("q")], store=tmp_path / "store")

    killed, first = graph(roll_s=3600)
    with first.start() as running:
        running.send("q", {"n": 1})
        running.wait_idle()
    assert killed.finished() == []
    out, again = graph(roll_s=0.01)
    with again.start():
        until(out.finished, "the file was not finished")
    assert [Path(name).read_text() for name in out.finished()] == ['{"n": 1}\n']


def test_a_file_that_cannot_be_finished_in_time_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example: no message may come when it has space again."""
    monkeypatch.setattr(file_sink, "AGAIN_S", 0.05)
    out = FileSink(tmp_path / "out", roll_s=0.01)
    name = tmp_path / "out" / "g.save-0-00000001.jsonl"
    (name / "in the way").mkdir(parents=True)
    with cues.Graph("g", [cues.Source("q", None), out.sink("q")], store=tmp_path / "store").start() as running:
        running.send("q", {"n": 1})
        row = tmp_path / "out" / "_cues" / "g.save" / "0.json"
        until(lambda: row.exists() and json.loads(row.read_text())["finishing"], "its time did not come")
        shutil.rmtree(name)
        until(name.is_file, "the file was not finished")


def test_a_closed_sink_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing awaits the finishing by time that is under way, and none begins after it."""
    entered, going_on = threading.Event(), threading.Event()

    def point(name: str) -> None:
        if name == "files.finishing":
            entered.set()
            assert going_on.wait(60)

    monkeypatch.setattr(file_sink, "faults", SimpleNamespace(point=point))
    out = FileSink(tmp_path / "out", roll_s=0.01)
    with cues.Graph("g", [cues.Source("q", None), out.sink("q")], store=tmp_path / "store").start() as running:
        running.send("q", {"n": 1})
        assert entered.wait(60)
    closing = threading.Thread(target=out.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and out.finished() == []
    going_on.set()
    closing.join(60)
    assert [Path(name).read_text() for name in out.finished()] == ['{"n": 1}\n']


@pytest.mark.parametrize("url", ["api.example.com/orders", "ftp://host/x", "http:///x", "http://[", "", 7])
def test_a_url_that_is_none_is_refused_at_the_declaration(url: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"not the URL of a resource\. Try: give https"):
        Requests(url)
    Requests("/orders", client=lambda: None)  # type: ignore[arg-type, return-value]  # with a base_url of its own


def test_a_header_that_no_request_can_have_is_refused_without_its_value() -> None:
    with pytest.raises(InvalidArgument, match="'Authorization' is not text") as refused:
        Requests("https://host/x", headers={"Authorization": "Bearer geheim\n"})
    assert "geheim" not in str(refused.value)


def test_a_client_that_cannot_be_made_charges_no_message(store: cues.Store) -> None:
    pytest.importorskip("httpx")

    def client() -> Any:
        raise FileNotFoundError("client.pem")

    report = run(Requests("https://host.invalid/x", client=client).sink("q", id="save"), store)
    assert "The HTTP client cannot be made: FileNotFoundError: client.pem" in str(report.stopped["save"])
    assert testing.messages(store, "errors") == []


def test_errors_that_a_database_asks_to_repeat(tmp_path: Path) -> None:
    exc = pytest.importorskip("sqlalchemy.exc")
    psycopg = pytest.importorskip("psycopg")
    from cues.checkpoints import SQLCheckpoint

    def of_sqlite(code: int) -> Exception:
        error = OSError("locked")
        error.sqlite_errorcode = code  # type: ignore[attr-defined]
        return error

    cases = [
        (psycopg.errors.DeadlockDetected(), True),
        (psycopg.errors.SerializationFailure(), True),
        (psycopg.errors.LockNotAvailable(), False),
        (psycopg.errors.AdminShutdown(), False),
        (OSError(1213, "Deadlock found when trying to get lock"), True),
        (OSError(1205, "Lock wait timeout exceeded"), False),
        (of_sqlite(517), True),  # SQLITE_BUSY_SNAPSHOT
        (of_sqlite(261), True),  # SQLITE_BUSY_RECOVERY
        (of_sqlite(5), False),  # SQLITE_BUSY, after timeout_s
    ]
    checkpoint = SQLCheckpoint(tmp_path / "a.db")
    for error, again in cases:
        with pytest.raises(CheckpointError) as raised, checkpoint._failures():
            raise exc.OperationalError("insert", {}, error)
        assert raised.value.again is again, error


def test_errors_of_the_database_that_no_row_causes_stop_the_sink(tmp_path: Path) -> None:
    exc = pytest.importorskip("sqlalchemy.exc")
    psycopg = pytest.importorskip("psycopg")
    from cues.checkpoints import SQLCheckpoint

    checkpoint = SQLCheckpoint(tmp_path / "a.db")
    for error in (psycopg.errors.UndefinedTable(), psycopg.errors.InsufficientPrivilege()):
        with pytest.raises(CheckpointError), checkpoint._failures():
            raise exc.ProgrammingError("insert", {}, error)
    with pytest.raises(exc.IntegrityError), checkpoint._failures():
        raise exc.IntegrityError("insert", {}, psycopg.errors.UniqueViolation())


def test_a_conflict_with_another_connection_to_the_duckdb_file_is_repeated(store: cues.Store, tmp_path: Path) -> None:
    """A connection of the user has changed the row of the sink, and commits while the sink waits."""
    duckdb = pytest.importorskip("duckdb")
    from cues.processors.sql_sink import Table

    path = str(tmp_path / "t.duckdb")
    table = Table(path, "t", {"n": "integer", "m": "integer"}, mode="upsert", key="n")
    table.__cues_prepare__()
    other = duckdb.connect(path)
    other.execute("insert into t values (1, 0)")
    other.execute("begin; update t set m = 1 where n = 1")
    store.queue("q").appender().write({"n": 1, "m": 2})
    graph = cues.Graph("g", [cues.Source("q", None), table.sink("q")], errors="errors")
    told: list[Any] = []

    def listen(event: Any) -> None:
        if "conflict" in event.text.lower():
            told.append(event)
            if len(told) == 1:
                other.execute("commit")

    with graph.start(store=store, listeners=[listen]) as running:
        assert running.wait_idle(timeout=30)
        assert running.messages("errors") == []
    table.close()
    assert told and other.execute("select * from t").fetchall() == [(1, 2)]
    other.close()


@pytest.mark.slow
def test_tables_that_are_made_at_the_same_moment(postgres: Postgres) -> None:
    from cues.processors.sql_sink import Table

    url, failed = postgres.database(), []
    for number in range(4):
        tables = [Table(url, f"t{number}", {"n": "integer", "at": "timestamp"}) for _ in range(6)]
        together = threading.Barrier(len(tables))

        def make(table: Table, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                table.__cues_prepare__()
            except Exception as error:
                failed.append(error)
            finally:
                table.close()

        threads = [threading.Thread(target=make, args=[table]) for table in tables]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
