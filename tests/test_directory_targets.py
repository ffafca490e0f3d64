"""Sinks into lakes from a shared directory: a driver may die or sleep at any access, and each row is there once.

The directory and the drivers are those of directory_steps.py, without Spark and without Java; the tables are real ones.
Commits of a table are accesses too: a driver may die or sleep before and after each.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("pyiceberg", reason="pyiceberg is not installed (pip install 'cues-streams[test]')")

import pyarrow as pa
from contracts_sinks import delta_rows, iceberg_rows
from directory_steps import Died, DriverRun, FaultyFiles, Message, RandomDeaths
from spark_cluster import until

import cues
from cues import Graph, Stream, faults
from cues.errors import ProcessorStopped
from cues.processors import delta, iceberg
from cues.processors.delta import DeltaTarget
from cues.processors.iceberg import IcebergTarget

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = pa.schema({"i": pa.int64(), "k": pa.int64(), "text": pa.string()})
COUNT = 40
BAD = 17
"""This message does not fit the tables."""


class Lakes:
    """The tables of a test: rows of a queue with partitions, and the last row of each key of another one."""

    def __init__(self, place: Path) -> None:
        catalog = {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}/warehouse"}
        self.all: dict[str, DeltaTarget | IcebergTarget] = {
            "delta": DeltaTarget(str(place / "rows"), schema=ROW),
            "iceberg": IcebergTarget("lake.rows", catalog=catalog, schema=ROW),
        }
        self.latest: dict[str, DeltaTarget | IcebergTarget] = {
            "delta": DeltaTarget(str(place / "latest"), schema=ROW, mode="upsert", key="k"),
            "iceberg": IcebergTarget("lake.latest", catalog=catalog, schema=ROW, mode="upsert", key="k"),
        }

    def sinks(self, kind: str) -> list[cues.Sink]:
        latest = self.latest[kind].sink("src", id="latest", errors=None)
        return [self.all[kind].sink("out", id="all"), latest]


def rows_of(target: DeltaTarget | IcebergTarget) -> list[Message]:
    return sorted(delta_rows(target) if isinstance(target, DeltaTarget) else iceberg_rows(target), key=lambda r: r["i"])


def shaped(message: Message) -> Message:
    """A row; for one message, a row that the table does not hold."""
    return message | {"text": 17 if message["i"] == BAD else f"row {message['i']}"}


class TargetRun(RandomDeaths):
    """Drivers of a graph with two sinks into tables of one kind."""

    ENDS = 6

    def __init__(self, seed: int, files: FaultyFiles, lakes: Lakes, kind: str) -> None:
        self.lakes, self.kind = lakes, kind
        super().__init__(seed, files)

    def graph(self) -> Graph:
        out = cues.QueueOptions(partitions=2, key="k")
        streams = [Stream(shaped, "src", "out", id="shaped"), *self.lakes.sinks(self.kind)]
        return Graph("g", streams, errors="errors", queues={"out": out})

    def given(self) -> list[Message]:
        return [{"i": i, "k": i % 5} for i in range(1, COUNT + 1)]

    def compare(self, driver: DriverRun) -> None:
        failed = [m for error in driver.messages("errors") for m in error["err.proc/messages"]["out"]]
        assert BAD in [m["i"] for m in failed]  # with its batch: a sink is not halved here
        written = rows_of(self.lakes.all[self.kind])
        assert sorted(written + failed, key=lambda m: m["i"]) == [shaped(message) for message in self.given()]
        last = [{**message, "text": None} for message in self.given()[-5:]]
        assert rows_of(self.lakes.latest[self.kind]) == last


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


@pytest.fixture(autouse=True)
def _commits_are_accesses(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce commits of tables, as :class:`FaultyFiles` announces what is written to the directory."""
    for module in (delta, iceberg):
        real = module.Connection.commit

        def commit(self: Any, real: Any = real) -> None:
            files.interrupt("put", "a table")
            real(self)
            files.interrupt("was put", "a table")

        monkeypatch.setattr(module.Connection, "commit", commit)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 100))])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_drivers_that_die_or_sleep_at_any_access_write_each_row_once(
    files: FaultyFiles, tmp_path: Path, kind: str, seed: int
) -> None:
    TargetRun(seed, files, Lakes(tmp_path), kind).finish()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["", "control"])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_rows_are_doubled_only_without_the_position_in_their_table(
    files: FaultyFiles, tmp_path: Path, kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies after the commit of a table, before its own record."""
    lakes = Lakes(tmp_path)
    given = [{"i": i, "k": i} for i in range(1, 11)]
    graph = Graph("g", [lakes.all[kind].sink("src", id="all")], durability="process")

    def interrupt(access: str, name: str) -> None:
        if (access, name) == ("was put", "a table"):
            raise Died

    files.interrupt = interrupt
    with pytest.raises(Died):
        DriverRun(files, graph).feed("src", given).claim().run()
    files.interrupt = lambda access, name: None
    if not kept:
        monkeypatch.setattr(type(lakes.all[kind]), "positions", without_positions(type(lakes.all[kind]).positions))
    DriverRun(files, graph).claim().run()
    assert [row["i"] for row in rows_of(lakes.all[kind])] == [i for i in range(1, 11) for _ in range(2 - kept)]


def without_positions(real: Any) -> Any:
    """The position that a table has is not read."""

    def positions(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        found.stored = lambda *_: None
        return found

    return positions


# --- on Spark -----------------------------------------------------------------------------------


class Death(BaseException):
    """The death of a thread of the driver; the other threads stop at once."""


def run(made: Graph, place: Path, dies_at: str, **where: Any) -> None:
    """Run until nothing is left to do, or until the driver dies at the second time that it is at a crash point."""
    running: list[Any] = []

    def die(name: str) -> None:
        for one in running:
            one.halt()
        raise Death(name)

    if dies_at:
        faults.arm(dies_at, 2, die)
    with contextlib.suppress(Death, ProcessorStopped):
        running.append(made.start(engine="spark", store=place / "store", **where))
        try:
            until(lambda: bool(running[0].stopped) if dies_at else running[0].wait_idle(240), timeout_s=240)
        finally:
            running[0].close()
    died = bool(running[0].stopped)
    faults.disarm()
    assert died == bool(dies_at), running[0].stopped


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("queues", "point"),
    [
        (True, "spark.written"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(False, "commit.before"), (True, "spark.ran")]),
    ],
)
def test_rows_of_a_driver_that_dies_are_there_once(
    queues: bool, point: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Sinks into Delta and Iceberg of one graph, with the queues in a store and in a directory."""
    lakes = Lakes(tmp_path)
    where: dict[str, Any] = {"spark": spark} | ({"queues": tmp_path / "queues"} if queues else {})
    given = [{"i": i, "k": i % 5} for i in range(1, COUNT + 1)]

    def made() -> Graph:
        streams = [Stream(shaped, "src", "out", id="shaped")]
        sinks = [lakes.all[kind].sink("out", id=f"{kind}-all", batch_size=10) for kind in lakes.all]
        sinks += [lakes.latest[kind].sink("src", id=f"{kind}-latest", batch_size=10) for kind in lakes.latest]
        return Graph("g", [*streams, *sinks], errors="errors", durability="process")

    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("src").appender().write_many([m for m in given if m["i"] != BAD])
    run(made(), tmp_path, point, **where)
    run(made(), tmp_path, "", **where)
    expected = [shaped(message) for message in given if message["i"] != BAD]
    last = [{**message, "text": None} for message in given[-5:]]
    assert {kind: rows_of(target) for kind, target in lakes.all.items()} == dict.fromkeys(lakes.all, expected)
    assert {kind: rows_of(target) for kind, target in lakes.latest.items()} == dict.fromkeys(lakes.latest, last)
