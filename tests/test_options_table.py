"""The table of the options of processors: each refusal can be told, and holds for declarations and for graphs."""

from __future__ import annotations

from typing import Any

import pytest

import cues
from cues.errors import GraphError
from cues.graphs.option import FACTS
from cues.graphs.options import OPTION_NAMES, TABLE
from cues.processors import sql


def work(message: Any, process: Any) -> None:
    """Take a message."""


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_each_refusal_names_options_and_known_facts(name: str) -> None:
    entry, facts = TABLE[name], dict.fromkeys(FACTS, "x")
    for each in (*entry.without, *([entry.shared] if entry.shared else [])):
        assert each.wrong.format(**facts) and each.hint.format(**facts)
    assert {other for each in entry.without for other in each.others} <= {*OPTION_NAMES, "kind"} - {name}
    assert entry.wrong.format(**facts, error="x") is not None and entry.text


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (lambda: cues.Frame(len, "in", "out", id="p"), "The frame 'p' is at-most-once"),
        (lambda: cues.Sink(work, "in", id="p", checkpoint=sql.SQLite("x.db")), "has checkpoint= and is at-most-once"),
        (lambda: cues.Stream(work, "in", "out", id="p", timer=work), r"g\.p has timer= and is at-most-once"),
        (lambda: cues.Stream(work, "in", "out", id="p", retries=1), "is at-most-once, which never calls"),
    ],
)
def test_the_strategy_of_a_graph_is_refused_as_that_of_a_processor_is(declared: Any, text: str) -> None:
    """A graph gave its strategy to frames and to sinks with a checkpoint, which refuse it as an option of their own."""
    graph = cues.Graph("g", [cues.Source("in"), declared()], strategy="at-most-once")
    with pytest.raises(GraphError, match=text):
        graph.plan()
    cues.Graph("g", [cues.Source("in", retries=1)], strategy="at-most-once").plan()


NOT_SHARED: dict[str, Any] = {
    "tailers": "other",
    "appenders": "log",
    "across": "pending",
    "isolation": "committed",
    "timer": work,
    "ttl": "10m",
    "rate": "10/s",
    "on_error": "pause",
    "max_errors": "10/min",
}


def test_queues_in_a_shared_directory_refuse_by_name_each_option_that_the_table_says() -> None:
    check = pytest.importorskip("cues.spark.cluster.engine").check
    assert set(NOT_SHARED) == {name for name, entry in TABLE.items() if entry.shared}
    for name, value in NOT_SHARED.items():
        other = {"out": cues.QueueOptions(path="elsewhere")} if name == "across" else {}
        stream = cues.Stream(work, "in", "out", id="p", **{name: value})  # type: ignore[arg-type]
        graph = cues.Graph("g", [cues.Source("in"), cues.Source("other"), stream], queues=other, errors="e")
        with pytest.raises(
            GraphError, match=rf"g\.p .*{name}=.*shared directory.* Try: run the graph without --queues"
        ):
            check(graph.plan())


FRAMES = [
    {"kind": "stream", "batch": "frame", "fields": "n long", "batch_size": 50_000},
    {"kind": "stream", "batch": "frame", "fields": "n long"},
    {"kind": "frame", "fields": "n long", "batch_size": 1_000},
    {"kind": "frame", "fields": "n long", "batch_size": 50_000},
]


@pytest.mark.parametrize("written", FRAMES)
def test_a_frame_is_read_as_it_was_written_before_it_was_a_kind(written: dict[str, Any]) -> None:
    """A frame was a stream with ``batch="frame"``, and had 1,000 messages a step unless ``graph.frame`` declared it."""
    data = {"id": "p", "fn": "test_options_table:work", "inputs": "in", "outputs": "out", **written}
    graph = cues.Graph.from_dict({"id": "g", "processors": [{"kind": "source", "id": "in"}, data]})
    (node,) = graph.plan().running
    assert (node.kind, node.options.fields) == ("frame", "n long")
    assert node.options.batch_size == written.get("batch_size", 1_000)
    for again in (cues.Graph.from_dict(graph.to_dict()), graph.rebind({"out": "out"}), cues.merge("g", graph)):
        assert again.plan().nodes == graph.plan().nodes
    # Stores and error messages have it as a stream. A start compares the kind with that of the store.
    assert (node.stored_kind, node.config()["kind"], node.config()["batch"]) == ("stream", "stream", "frame")


@pytest.mark.parametrize("name", ["batch", "key", "schema", "ttl", "timeout_s", "timer", "where"])
def test_a_frame_takes_no_option_that_its_dataframe_has_instead(name: str) -> None:
    with pytest.raises(GraphError, match=f"The frame 'p' takes no option '{name}'") as refused:
        cues.Frame(work, "in", "out", id="p", **{name: None})  # type: ignore[arg-type]
    assert "does everything else with its DataFrame" in refused.value.hint
    with pytest.raises(GraphError, match=r"graph\.frame"):
        cues.Stream(work, "in", "out", batch="frame")  # type: ignore[arg-type]
    graph = cues.Graph("g", [cues.Frame(work, "in", "out", id="p")])
    with pytest.raises(GraphError, match="is a frame"):
        graph.timer("p")(lambda timer: None)
