"""The table of the options of processors: each refusal can be told, and holds for declarations and for graphs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_format import GOLDEN

import cues
from cues.errors import GraphError, Unsupported
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


def nothing(position: Any) -> Iterator[Any]:
    """Give no message."""
    yield from ()


@pytest.mark.parametrize("name", ["max_lag", "max_bytes"])
def test_a_queue_for_which_writers_wait_is_refused_in_a_shared_directory(name: str) -> None:
    check = pytest.importorskip("cues.spark.cluster.engine").check
    for queue in ("in", "out"):
        bounded = {queue: cues.QueueOptions(**{name: 10_000})}
        graph = cues.Graph("g", [cues.Source("in"), cues.Stream(work, "in", "out", id="p")], queues=bounded)
        with pytest.raises(GraphError, match=rf"queue '{queue}' has max_lag= or max_bytes=.* Try: remove them"):
            check(graph.plan())


@pytest.mark.parametrize(
    ("name", "former", "hint"),
    [("price", "price_each", r"give it id='price_each'"), ("arrivals", "orders", "keep the queue's name, 'orders'")],
)
def test_a_processor_of_a_shared_directory_cannot_be_renamed(name: str, former: str, hint: str, tmp_path: Path) -> None:
    """The directory has files with the former name. Not a byte of it changes, and Spark is not started."""
    pytest.importorskip("cues.spark.cluster.engine")
    place = shutil.copytree(GOLDEN / "v1-shared", tmp_path / "shared")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    source = cues.Source("arrivals", nothing, renamed_from=former) if name == "arrivals" else cues.Source("orders")
    stream = cues.Stream(work, source.id, "out", id="price", renamed_from=None if name == "arrivals" else former)
    graph = cues.Graph("golden", [source, stream])
    with pytest.raises(Unsupported, match=rf"golden\.{name} has renamed_from='{former}'.*cannot be renamed.*{hint}"):
        graph.start(engine="spark", queues=place, store=tmp_path / "store")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "store").exists()


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
