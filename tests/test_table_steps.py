"""Functions of tables: what they get and return is columns, with the results of the same work over messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import seeds

import cues
from cues import Graph, QueueOptions, Sink, Stream, testing
from cues.errors import GraphError
from cues.queues.queue import Queue

ROWS = [{"n": n, "key": f"k{n % 5}", "half": n / 2} for n in range(300)]
KINDS = ("arrow", "polars", "pandas")


def doubled(table: Any) -> Any:
    """The rows with an even number, and twice that number."""
    if isinstance(table, pa.Table):
        table = table.filter(pc.equal(pc.bit_wise_and(table["n"], 1), 0))
        return table.append_column("twice", pc.multiply(table["n"], 2))
    if isinstance(table, polars.DataFrame):
        return table.filter(polars.col("n") % 2 == 0).with_columns(twice=polars.col("n") * 2)
    assert isinstance(table, pandas.DataFrame)
    kept = table[table["n"] % 2 == 0]
    return kept.assign(twice=kept["n"] * 2)


def doubled_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"twice": message["n"] * 2} for message in messages if message["n"] % 2 == 0]


def fill(queue: Queue, dice: random.Random, rows: list[dict[str, Any]] = ROWS) -> None:
    """Some as messages, some as tables."""
    at = 0
    while at < len(rows):
        some = rows[at : at + dice.choice([1, 7, 60])]
        if dice.random() < 0.5:
            queue.appender().write_many(some)
        else:
            queue.appender().write_table(pa.Table.from_pylist(some))
        at += len(some)


def is_columns(queue: Queue) -> bool:
    views = [queue.partition(n) for n in range(queue.partitions)] if queue.partitions > 1 else [queue]
    return all(piece.batch.schema is not None for view in views for piece in view.pieces(None, None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds.among(range(12), fast=2))
def test_a_function_of_tables_has_the_results_of_one_of_messages(kind: Any, seed: int, tmp_path: Path) -> None:
    """Any sizes of records and steps, one or three partitions, here or in another store; in columns."""
    dice = random.Random(seed)
    options: dict[str, Any] = {"partitions": dice.choice([1, 3]), "key": "key"}
    options["metadata"] = dice.choice([{"t", "time"}, set(), False])
    if dice.random() < 0.3:
        options["path"] = str(tmp_path / "other")
    found = []
    for name, fn, batch in (("tables", doubled, kind), ("rows", doubled_messages, True)):
        graph = Graph("g", queues={"out": QueueOptions(**options), "in": QueueOptions(metadata={"t"})})
        graph.source("in")
        graph.add(Stream(fn, "in", "out", id="double", batch=batch, batch_size=dice.choice([20, 1_000])))
        with cues.open(tmp_path / name, durability="process") as store:
            fill(store.queue("in", metadata={"t"}), random.Random(seed))
            testing.run_until_idle(graph, store)
            assert store.check() == []
            where = tmp_path / "other" if "path" in options else tmp_path / name
            with cues.open(where) as place:
                out = place.queue("out")
                views = [out.partition(n) for n in range(out.partitions)] if out.partitions > 1 else [out]
                found.append([list(view.tailer()) for view in views])
                assert name == "rows" or is_columns(out)
        if "path" in options:
            options["path"] = str(tmp_path / "other2")
            found[-1] = found[-1]
    assert found[0] == found[1]
    assert sum(map(len, found[0])) == 150


def test_rows_that_fail_are_errors_and_can_be_redriven(store: cues.Store) -> None:
    broken = {7, 70, 71}

    def fn(table: pa.Table) -> pa.Table:
        if broken & set(table["n"].to_pylist()):
            raise ValueError("broken")
        return table

    graph = Graph("g", errors="errors")
    graph.source("in")
    graph.add(Stream(fn, "in", "out", id="p", batch="arrow"))
    fill(store.queue("in"), random.Random(1))
    testing.run_until_idle(graph, store)
    assert sorted(m["n"] for m in store.queue("out").tailer()) == [n for n in range(300) if n not in broken]
    failed = [error["err.proc/messages"]["in"] for error in store.queue("errors").tailer()]
    assert sorted(message["n"] for (message,) in failed) == sorted(broken)
    broken.clear()
    with graph.start(store=store) as running:
        assert len(running.redrive(all=True).resolved) == 3
    assert sorted(m["n"] for m in store.queue("out").tailer()) == list(range(300))


@pytest.mark.parametrize("words", [3, 5_000])
def test_columns_of_categories_of_polars(words: int, store: cues.Store) -> None:
    """Their dictionary has views of texts, which pyarrow does not decode: a function could not return such a column."""

    def fn(table: polars.DataFrame) -> polars.DataFrame:
        kind = polars.col("key").cast(polars.Categorical)
        return table.with_columns(key=kind, some=polars.when(polars.col("n") % 7 > 0).then(kind))

    graph = Graph("g", queues={"out": QueueOptions(partitions=3, key="key")})
    graph.add(cues.Source("in", lambda position: iter(())))
    graph.add(Stream(fn, "in", "out", id="p", batch="polars"))
    rows: list[dict[str, Any]] = [{"n": n, "key": f"{n % words} {'x' * 20}"} for n in range(5_000)]
    store.queue("in").appender().write_table(pa.Table.from_pylist(rows))
    testing.run_until_idle(graph, store)
    out = store.queue("out")
    assert sorted((m for n in range(3) for m in out.partition(n).tailer()), key=lambda m: m["n"]) == [
        row | {"some": row["key"] if row["n"] % 7 else None} for row in rows
    ]


def test_several_outputs_nothing_and_messages(store: cues.Store) -> None:
    def fn(table: pa.Table) -> Any:
        first = table["n"][0].as_py()
        if first == 0:
            return {"left": table, "right": None}
        if first == 100:
            return {"left": None, "right": polars.from_arrow(table)}
        return {"left": [{"n": -1}], "right": []}

    graph = Graph("g", errors="errors")
    graph.source("in")
    graph.add(Stream(fn, "in", {"left": "l", "right": "r"}, id="p", batch="arrow", batch_size=100, step_s=None))
    store.queue("in").appender().write_table(pa.Table.from_pylist(ROWS))
    testing.run_until_idle(graph, store)
    assert [m["n"] for m in store.queue("l").tailer()] == [*range(100), -1]
    assert [m["n"] for m in store.queue("r").tailer()] == list(range(100, 200))
    assert len(store.queue("errors")) == 0


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda table: {"nowhere": table}, "which is not an output"),
        (lambda table: table, "with several outputs a function returns a dict by binding"),
        (lambda table: {"left": pa.table([[1], [2]], ["a", "a"])}, "two columns 'a'"),
        (lambda table: {"left": pa.table({"q/uuid": [1]})}, "'q/uuid' is reserved"),
        (lambda table: {"right": table.drop_columns("key")}, "has no 'key'"),
        (lambda table: {"left": pa.table({"n": ["x" * 2_000]})}, "bytes"),
    ],
)
def test_a_wrong_table_fails_its_call(returned: Callable[[Any], Any], words: str, store: cues.Store) -> None:
    graph = Graph(
        "g",
        errors="errors",
        queues={"r": QueueOptions(partitions=2, key="key"), "l": QueueOptions(max_message_bytes=1_000)},
    )
    graph.source("in")
    graph.add(Stream(returned, "in", {"left": "l", "right": "r"}, id="p", batch="arrow", retries=0))
    store.queue("in").appender().write_table(pa.Table.from_pylist(ROWS[:2]))
    testing.run_until_idle(graph, store)
    errors = list(store.queue("errors").tailer())
    assert len(errors) == 2 and all(words in str(error["err/cause"]) for error in errors), errors
    assert len(store.queue("l")) == len(store.queue("r")) == 0


def test_a_sink_gets_tables_and_what_it_returns_is_ignored(store: cues.Store) -> None:
    got: list[int] = []

    def sink(table: pa.Table, process: cues.Process) -> pa.Table:
        assert process.indices == list(range(process.indices[0], process.indices[0] + table.num_rows))
        got.extend(table["n"].to_pylist())
        return table

    graph = Graph("g")
    graph.source("in")
    graph.add(Sink(sink, "in", id="s", batch="arrow"))
    fill(store.queue("in"), random.Random(2))
    testing.run_until_idle(graph, store)
    assert got == list(range(300))


def test_filters_state_and_typed_columns(store: cues.Store) -> None:
    """``where=`` looks at messages; a schema gives the columns and their types."""

    def fn(table: pa.Table, process: cues.Process) -> pa.Table:
        assert table.schema == pa.schema([("n", pa.int64()), ("half", pa.float64())])
        process.state["rows"] = process.state.get("rows", 0) + table.num_rows
        return table

    graph = Graph("g")
    graph.source("in")
    where: Any = lambda message: message["n"] >= 200  # noqa: E731
    graph.add(Stream(fn, "in", "out", id="p", batch="arrow", where=where, schema={"n": "long", "half": "double"}))
    fill(store.queue("in"), random.Random(3))
    testing.run_until_idle(graph, store)
    assert [m["n"] for m in store.queue("out").tailer()] == list(range(200, 300))
    assert testing.state(store, "g.p") == {"rows": 100}


def test_a_step_of_tables_is_bounded_by_time_and_not_by_a_thousand_messages(store: cues.Store) -> None:
    sizes: list[int] = []

    def fn(table: pa.Table) -> None:
        sizes.append(table.num_rows)

    graph = Graph("g")
    graph.source("in")
    graph.add(Sink(fn, "in", id="s", batch="arrow"))
    store.queue("in").appender().write_table(pa.table({"n": range(200_000)}))
    testing.run_until_idle(graph, store)
    assert sum(sizes) == 200_000 and max(sizes) > 10_000


def test_a_join_of_tables_is_refused() -> None:
    with pytest.raises(GraphError):
        Graph("g", [Stream(lambda a, b: a, {"a": "x", "b": "y"}, "out", id="p", batch="arrow")])


def by_function(message: dict[str, Any]) -> bool:
    return message.get("key") == "k1" or message["n"] > 290


def without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds.among(range(6), fast=1))
def test_an_expression_over_columns_filters_as_a_function_does(kind: str, seed: int, store: cues.Store) -> None:
    """Rows with a missing field, in messages and in tables, by steps of any size."""
    rows = [row if row["n"] % 3 else {"n": row["n"]} for row in ROWS]
    indices: dict[str, list[int]] = {"left": [], "right": []}

    def of(name: str) -> Callable[[Any, Any], Any]:
        def fn(table: Any, process: Any) -> Any:
            indices[name] += process.indices
            return table

        return fn

    graph = Graph("g", errors="errors")
    graph.source("in")
    size = random.Random(seed).choice([1, 7, 1_000])
    where = (pc.field("key") == "k1") | (pc.field("n") > 290)
    graph.add(Stream(of("left"), "in", "left", id="a", batch=kind, batch_size=size, where=where))
    graph.add(Stream(of("right"), "in", "right", id="b", batch=kind, batch_size=size, where=by_function))
    fill(store.queue("in"), random.Random(seed), rows)
    testing.run_until_idle(graph, store)
    left, right = ([without_nulls(m) for m in store.queue(name).tailer()] for name in ("left", "right"))
    assert left == right and len(left) > 20
    assert indices["left"] == indices["right"]
    assert not list(store.queue("errors").tailer())


def test_an_expression_makes_no_dict(store: cues.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph("g")
    graph.source("in")
    graph.add(Stream(lambda table: table, "in", "out", id="p", batch="arrow", where=pc.field("n") >= 298))
    store.queue("in").appender().write_table(pa.Table.from_pylist(ROWS))
    with monkeypatch.context() as patched:
        patched.setattr("cues.records.columns.rows", lambda batch: pytest.fail("a dict"))
        testing.run_until_idle(graph, store)
    assert [message["n"] for message in store.queue("out").tailer()] == [298, 299]


def test_a_message_that_an_expression_does_not_fit_fails_alone(store: cues.Store) -> None:
    graph = Graph("g", errors="errors")
    graph.source("in")
    graph.add(Stream(lambda table: table, "in", "out", id="p", batch="arrow", where=pc.field("n") > 1))
    store.queue("in").appender().write_many([{"n": 1}, {"n": 2}])
    store.queue("in").appender().write({"n": "three"})
    store.queue("in").appender().write_many([{"n": 4}])
    testing.run_until_idle(graph, store)
    assert [message["n"] for message in store.queue("out").tailer()] == [2, 4]
    (error,) = store.queue("errors").tailer()
    assert "where=" in str(error)


def test_an_expression_is_for_functions_of_tables() -> None:
    with pytest.raises(GraphError, match="expression over columns"):
        Graph("g").add(Stream(lambda message: message, "in", "out", id="p", where=pc.field("n") > 1))
