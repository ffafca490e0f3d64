"""Windows and joins over queues in a shared directory: the tasks of Spark, run one after another in this process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

from contracts_windows import DELAY_S, WINDOWS, as_set, graph_of, messages
from directory_steps import DriverRun

import cues
from cues import testing
from cues.errors import GraphError
from cues.processors import windows
from cues.processors.reducers import count
from cues.spark.cluster.files import LocalFiles
from cues.spark.executor import require_travel


@pytest.mark.parametrize("name", ["hopping", "sessions", "counted-within", "as-of-tolerance", "interval-full"])
def test_results_are_those_of_the_embedded_engine(name: str, tmp_path: Path) -> None:
    """Steps of random sizes, by drivers that follow one another. Nothing is more than ``delay`` late."""
    case = WINDOWS[name]
    given = messages(5, 60, case.inputs, disorder=DELAY_S)
    chance = random.Random(name)
    for upto in (20, 60):
        driver = DriverRun(
            LocalFiles(str(tmp_path)), graph_of(case.stream(), case.inputs), 2, lambda: chance.randint(1, 9)
        )
        for queue, some in given.items():
            driver.feed(queue, some[:upto])
        driver.claim().run()
    with testing.temporary_store() as store:
        for queue, some in given.items():
            store.queue(queue).appender().write_many(some)
        testing.run_until_idle(graph_of(case.stream(), case.inputs), store)
        wanted = testing.messages(store, "out")
    found = driver.messages("out")
    assert wanted and as_set(found) == as_set(wanted)
    if len(case.inputs) == 1:
        assert found == wanted


def test_late_messages_are_those_of_the_embedded_engine(tmp_path: Path) -> None:
    case = WINDOWS["tumbling"]
    given = messages(2, 60, case.inputs, disorder=30)
    driver = DriverRun(LocalFiles(str(tmp_path)), graph_of(case.stream(), case.inputs), 1, lambda: 7)
    driver.feed("m", given["m"]).claim().run()
    with testing.temporary_store() as store:
        store.queue("m").appender().write_many(given["m"])
        testing.run_until_idle(graph_of(case.stream(), case.inputs), store)
        assert driver.messages("late") == testing.messages(store, "late") != []


def test_idle_is_refused_by_name() -> None:
    graph = cues.Graph("g")
    graph.source("a")
    graph.source("b")
    graph.add(
        windows.tumbling(
            cues.AnyOf("a", "b"), "out", 10, time="t", late="late", idle="30s", reduce={"n": count()}
        )
    )  # fmt: skip
    plan = graph.plan()
    (node,) = [node for node in plan.nodes if node.kind == "stream"]
    with pytest.raises(GraphError, match="idle= needs the clock of one process"):
        require_travel(node, plan.system)
