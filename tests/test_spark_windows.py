"""Windows and joins on a real Spark write what they write on the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from contracts_windows import DELAY_S, REDUCE, as_set, messages

import cues
from cues import testing
from cues.errors import GraphError
from cues.processors import joins, windows
from cues.processors.reducers import count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUTPUTS = ("fixed", "sessions", "pairs", "fixed-late", "pairs-late")


def graph() -> cues.Graph:
    made = cues.Graph("g")
    given = messages(7, 300, ("left", "right"), disorder=DELAY_S)
    # Late for the windows. For the join it depends on the order in which the queues are read; it has no partner.
    given["left"][100] |= {"t": 1, "k": "z"}

    @made.source("left", resume="skip")
    def left() -> Iterator[Any]:
        yield from given["left"]

    @made.source("right", resume="skip")
    def right() -> Iterator[Any]:
        yield from given["right"]

    timed: Any = {"time": "t", "key": "k", "delay": DELAY_S}
    made.add(windows.hopping("left", "fixed", 10, 5, late="fixed-late", reduce=REDUCE, **timed))
    made.add(windows.sessions("right", "sessions", 5, late="sessions-late", reduce=REDUCE, **timed))
    both = {"left": "left", "right": "right"}
    made.add(joins.interval(both, "pairs", before=3, after=3, how="full", late="pairs-late", **timed))
    return made


@pytest.fixture(scope="module")
def embedded() -> dict[str, list[str]]:
    with testing.temporary_store() as store:
        testing.run_until_idle(graph(), store)
        return {queue: as_set(testing.messages(store, queue)) for queue in OUTPUTS}


@pytest.mark.parametrize("shared", [False, True], ids=["store", "directory"])
def test_results_are_those_of_the_embedded_engine(
    shared: bool, spark: SparkSession, tmp_path: Path, embedded: dict[str, list[str]]
) -> None:
    options: dict[str, Any] = {"queues": tmp_path / "queues"} if shared else {}
    with graph().start(engine="spark", spark=spark, store=tmp_path / "store", **options) as running:
        assert running.wait_idle(timeout=200)
        found = {queue: as_set(running.messages(queue)) for queue in OUTPUTS}
    for queue in ("fixed", "sessions", "fixed-late"):
        assert found[queue] == embedded[queue] != []
    assert len(embedded["pairs"]) > 100
    without_late = [pair for pair in embedded["pairs"] if "left 100'" not in pair]
    assert [pair for pair in found["pairs"] if "left 100'" not in pair] == without_late


@pytest.mark.parametrize("shared", [False, True], ids=["store", "directory"])
def test_the_end_closes_windows_in_a_store(shared: bool, spark: SparkSession, tmp_path: Path) -> None:
    with testing.temporary_store() as store:
        testing.run_until_idle(graph(), store, close_open=True)
        closed = {queue: as_set(testing.messages(store, queue)) for queue in OUTPUTS}
    told: list[Any] = []
    options: dict[str, Any] = {"queues": tmp_path / "queues"} if shared else {}
    with graph().start(
        engine="spark", spark=spark, store=tmp_path / "store", listeners=(told.append,), **options
    ) as running:
        assert running.wait_done()
        found = {queue: as_set(running.messages(queue)) for queue in OUTPUTS}
    for queue in ("fixed", "sessions"):
        assert (found[queue] == closed[queue]) is not shared
    assert any("its windows stay open" in event.text for event in told) is shared


def test_silent_inputs_are_refused_by_name_in_a_directory(tmp_path: Path) -> None:
    made = cues.Graph("g")
    made.source("a")
    made.source("b")
    given: Any = {"idle": "30s", "time": "t", "late": "late", "reduce": REDUCE}
    made.add(windows.sessions(cues.AnyOf("a", "b"), "out", 10, **given))
    with pytest.raises(GraphError, match=r"has idle=, which a processor with its queues in a shared directory cannot"):
        made.start(engine="spark", store=tmp_path / "store", queues=tmp_path / "queues")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shared", [False, True], ids=["store", "directory"])
def test_results_at_each_update_are_those_of_the_embedded_engine(
    shared: bool, spark: SparkSession, tmp_path: Path
) -> None:
    def made() -> cues.Graph:
        graph = cues.Graph("g")
        graph.source("a")
        given: Any = {"time": "t", "key": "k", "delay": 5, "early": "update", "reduce": {"n": count()}}
        graph.add(windows.tumbling("a", "fixed", 10, late=lambda late: {"late": late["number"]}, **given))
        graph.add(windows.sessions("a", "spans", 6, late="late", **given))
        graph.add(windows.counted("a", "counted", 4, every=3, **given))
        return graph

    rows = [{"t": n * 7 % 50 + n / 2, "k": "ab"[n % 2]} for n in range(60)]
    names = ("fixed", "spans", "counted", "late")
    with testing.temporary_store() as store:
        store.queue("a").appender().write_many(rows)
        testing.run_until_idle(made(), store)
        embedded = {name: testing.messages(store, name) for name in names}
    options: dict[str, Any] = {"queues": tmp_path / "queues"} if shared else {}
    with made().start(engine="spark", spark=spark, store=tmp_path / "store", **options) as running:
        for row in rows:
            running.send("a", row)
        assert running.wait_idle(timeout=200)
        assert {name: running.messages(name) for name in names} == embedded
    assert all(embedded.values())
