"""Windows and joins over queues in a shared directory: the tasks of Spark, run one after another in this process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

from contracts_windows import DELAY_S, WINDOWS, as_set, graph_of, messages
from directory_steps import DriverRun

import cues
from cues import testing
from cues.spark.cluster.files import LocalFiles


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


def test_a_range_sees_the_parts_before_it_in_a_task(tmp_path: Path) -> None:
    """A batch function is called for one part of a task after another."""
    graph = cues.Graph("g")
    graph.source("m")

    @graph.stream("m", "out", batch=True, batch_size=3)
    def look(messages: list[Any], process: cues.Process) -> list[Any]:
        found = []
        for message in messages:
            field = message["n"].to_bytes(2, "big")
            process.state[field] = message["n"]
            if message["n"] % 4 == 3:
                del process.state[(message["n"] - 2).to_bytes(2, "big")]
            found.append({"fields": [value for _, value in process.state.range(bytes(2), field)]})
        return found

    given = [{"n": n} for n in range(20)]
    driver = DriverRun(LocalFiles(str(tmp_path)), graph, 1).feed("m", given).claim().run()
    gone = lambda n: {k for k in range(n) if k % 4 == 1 and k + 2 <= n}  # noqa: E731
    assert driver.messages("out") == [{"fields": [k for k in range(n) if k not in gone(n)]} for n in range(20)]
