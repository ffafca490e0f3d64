"""Sources that yield tables: their rows are written as columns, in order, once, under the position after them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest
import seeds
from small import until

import cues
from cues import Graph, QueueOptions, Sink, Source, testing
from cues.errors import ProcessorStopped
from cues.steps import feed


def graph_of(source: Any, **options: Any) -> Graph:
    graph = Graph("g", errors="errors", queues=options.pop("queues", None))
    graph.add(Source("in", source, **options))
    return graph


def numbers(store: cues.Store) -> list[int]:
    return [message["n"] for message in store.queue("in").tailer()]


@pytest.mark.parametrize("seed", seeds.among(range(40), fast=6))
def test_rows_of_tables_and_messages_in_their_order(seed: int, store: cues.Store, monkeypatch: Any) -> None:
    """Of several runs, each of which ends in the middle."""
    dice = random.Random(seed)
    monkeypatch.setattr(feed, "ROWS_AHEAD_MAX", dice.choice([1, 10, 100_000]))
    sizes = [dice.choice([0, 1, 2, 30]) for _ in range(40)]
    ends = [*sorted(dice.sample(range(40), 2)), 40]

    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        for number in range(position or 0, ends[0]):
            rows = [{"n": 100 * number + row} for row in range(sizes[number])]
            if len(rows) == 1 and number % 2:
                yield number + 1, rows[0]
            else:
                table = pa.table({"n": pa.array([row["n"] for row in rows], pa.int64())})
                yield number + 1, [table, polars.from_arrow(table), table.to_pandas()][number % 3]

    while ends:
        if dice.random() < 0.5:
            testing.run_until_idle(graph_of(source, batch_size=dice.choice([1, 7, 1_000])), store)
        else:
            with graph_of(source).start(store=store) as running:
                running.wait_done()
        ends.pop(0)
    assert numbers(store) == [100 * number + row for number in range(40) for row in range(sizes[number])]


def test_a_step_takes_tables_until_it_has_its_size(store: cues.Store) -> None:
    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        for number in range(position or 0, 10):
            yield number + 1, pandas.DataFrame({"n": [number] * 4})

    testing.run_until_idle(graph_of(source, batch_size=10), store)
    batches = [piece.batch for piece in store.queue("in").pieces(None, None)]
    assert [batch.head.count for batch in batches] == [4] * 10
    steps = [len([*some]) for _, some in itertools.groupby(batches, lambda batch: batch.head.hash)]
    assert steps == [3, 3, 3, 1]


def test_bare_tables_are_skipped_by_their_count(store: cues.Store) -> None:
    until = [2]

    def source() -> Iterator[Any]:
        for number in range(until[0]):
            yield pa.table({"n": [number, number]}) if number % 2 == 0 else {"n": number}

    for until[0] in (2, 5):
        testing.run_until_idle(graph_of(source, resume="skip"), store)
    assert numbers(store) == [0, 0, 1, 2, 2, 3, 4, 4]


def test_an_async_source_yields_tables(store: cues.Store) -> None:
    async def source(position: int | None) -> AsyncIterator[tuple[int, Any]]:
        for number in range(position or 0, 3):
            yield number + 1, pa.table({"n": [number]})

    testing.run_until_idle(graph_of(source), store)
    assert numbers(store) == [0, 1, 2]


@pytest.mark.parametrize("partitioner", [None, "rendezvous"])
def test_rows_go_to_the_partition_of_their_key(partitioner: str | None, store: cues.Store) -> None:
    rows = [{"n": n, "key": f"k{n % 7}"} for n in range(100)]

    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        if position is None:
            yield 1, pa.Table.from_pylist(rows)

    options: dict[str, Any] = {"partitions": 3, "key": "key"}
    options |= {} if partitioner is None else {"partitioner": partitioner}
    testing.run_until_idle(graph_of(source, queues={"in": QueueOptions(**options)}), store)
    other = store.queue("other", **options)
    other.appender().write_many(rows)
    for number in range(3):
        found, wanted = (list(queue.partition(number).tailer()) for queue in (store.queue("in"), other))
        assert found == wanted


def test_a_table_that_cannot_be_written_is_one_failed_item(store: cues.Store) -> None:
    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        yield 1, pa.table({"n": [1]})
        yield 2, pa.table([[1], [2]], ["n", "n"])
        yield 3, pa.table({"q/meta": [1]})
        yield 4, pa.table({"n": [4]})

    testing.run_until_idle(graph_of(source), store)
    assert numbers(store) == [1, 4]
    errors = [str(error) for error in store.queue("errors").tailer()]
    assert "two columns" in errors[0] and "reserved" in errors[1]


def test_without_an_error_queue_the_source_stops_before_it(store: cues.Store) -> None:
    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        for number in range(position or 0, 3):
            yield number + 1, pa.table([[1], [2]], ["n", "n"]) if number == 1 else pa.table({"n": [number]})

    graph = Graph("g")
    graph.add(Source("in", source))
    with pytest.raises(ProcessorStopped, match="two columns"):
        testing.run_until_idle(graph, store)
    assert numbers(store) == [0]


@dataclass
class Order:
    n: int


def test_rows_are_checked_against_the_schema(store: cues.Store) -> None:
    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        yield 1, pa.table({"n": [1]})
        yield 2, pa.table({"n": ["one"]})

    testing.run_until_idle(graph_of(source, schema=Order), store)
    assert numbers(store) == [1]
    (error,) = store.queue("errors").tailer()
    assert "expected" in str(error)


def test_process_check_refuses_what_cannot_be_written(store: cues.Store) -> None:
    said: list[str] = []

    def source(position: int | None, process: Any) -> Iterator[tuple[int, Any]]:
        for table in (pa.table({"n": [1]}), pa.table({"q/uuid": [1]})):
            try:
                process.check(table)
            except cues.CuesError as error:
                said.append(error.message)
        yield 1, pa.table({"n": [1]})

    testing.run_until_idle(graph_of(source), store)
    assert len(said) == 1 and "reserved" in said[0]


@pytest.mark.interpreted  # the compiled core has the constant inside
def test_a_generator_is_a_few_tables_ahead(store: cues.Store, monkeypatch: Any) -> None:
    """While the queue has no room, the generator waits; nothing is lost when there is room again."""
    monkeypatch.setattr(feed, "ROWS_AHEAD_MAX", 100)
    yielded: list[int] = []
    opened = threading.Event()

    def source(position: int | None) -> Iterator[tuple[int, Any]]:
        for number in range(position or 0, 50):
            yielded.append(number)
            yield number + 1, pa.table({"n": [number] * 60})

    def wait(message: dict[str, Any]) -> None:
        opened.wait(60)

    graph = graph_of(source, queues={"in": QueueOptions(max_lag=60)})
    graph.add(Sink(wait, "in"))
    with graph.start(store=store) as running:
        try:
            until(lambda: len(yielded) >= 3)
            time.sleep(0.2)
            assert len(yielded) <= 4  # one or two are on the queue, two are ahead
        finally:
            opened.set()
        running.wait_done()
    assert numbers(store) == [number for number in range(50) for _ in range(60)]
