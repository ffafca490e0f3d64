"""cues sql: queries over the queues and states of a graph."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from terminal import Command
from terminal import cues as command

import cues

GRAPH = """
import cues
graph = cues.Graph("shop", durability="process", queues={"far": cues.QueueOptions(path="data/other")})
graph.source("orders")

@graph.stream("orders", "far", key="city")
def total(order, process):
    process.state["n"] = process.state.get("n", 0) + order["n"]
    return order
"""
ORDERS = [{"city": city, "n": n} for n, city in enumerate(["Bern", "Zug", "Bern", "Chur", "Zug", "Bern"])]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.py"
    path.write_text(GRAPH)
    return path


@pytest.fixture
def shop(graph: Path) -> Path:
    """A graph that has run: four orders were messages, two came as a table."""
    namespace: dict[str, cues.Graph] = {}
    exec(GRAPH, namespace)
    with cues.open(graph.parent / "data" / "shop", durability="process") as store:
        appender = store.queue("orders").appender()
        appender.write_many(ORDERS[:4])
        appender.write_table(pyarrow.Table.from_pylist(ORDERS[4:]))
    assert command("run", graph, "--idle-exit", 0.1).code == 0
    return graph


def rows(*arguments: object) -> list[dict[str, object]]:
    result = command("sql", *arguments, "--json")
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.mark.slow
def test_a_query_over_a_queue_is_that_over_its_messages(shop: Path) -> None:
    expected = Counter(order["city"] for order in ORDERS)
    query = "select city, count(*) as orders from orders group by 1 order by 1"
    assert rows(shop, query) == [{"city": city, "orders": n} for city, n in sorted(expected.items())]
    assert rows(shop, "select sum(n) as s from far") == [{"s": 15}]  # a queue in another store
    assert rows(shop, 'select "q/index", n from orders where "q/index" > 4', "--meta") == [
        {"q/index": 5, "n": 4},
        {"q/index": 6, "n": 5},
    ]
    assert rows(shop, "select count(*) as n from orders a join orders b using (city)") == [{"n": 14}]


@pytest.mark.slow
def test_the_state_of_a_processor_is_a_table(shop: Path) -> None:
    found = rows(shop, "select key, value from state_total order by key")
    assert found == [{"key": "Bern", "value": 7}, {"key": "Chur", "value": 3}, {"key": "Zug", "value": 5}]


@pytest.mark.slow
def test_the_forms_of_a_result(shop: Path, tmp_path: Path) -> None:
    query = "select city, n, [n, 1] as list from orders order by n limit 2"
    text = command("sql", shop, query, "--csv").out
    assert list(csv.reader(io.StringIO(text))) == [
        ["city", "n", "list"],
        ["Bern", "0", "[0, 1]"],
        ["Zug", "1", "[1, 1]"],
    ]
    assert command("sql", shop, query, "--table").out.splitlines()[0].split() == ["CITY", "N", "LIST"]
    file = tmp_path / "out.parquet"
    assert command("sql", shop, query, "--parquet", file).code == 0
    assert pyarrow.parquet.read_table(file).to_pylist()[1] == {"city": "Zug", "n": 1, "list": [1, 1]}
    again = command("sql", shop, query, "--parquet", file)
    assert again.code == 2 and "exists already" in again.err
    assert not list(tmp_path.glob("*.part"))
    both = command("sql", shop, query, "--csv", "--parquet", tmp_path / "new")
    assert both.code == 2 and "two forms" in both.err
    both = command("sql", shop, query, "--csv", "--json")
    assert both.code == 2 and "two forms" in both.err


@pytest.mark.slow
def test_columns_of_one_name_are_all_there(shop: Path) -> None:
    """A join has the columns of both sides."""
    query = "select * from orders a join orders b on a.n = b.n where a.n = 5"
    assert rows(shop, query) == [{"city": "Bern", "n": 5, "city_1": "Bern", "n_1": 5}]
    assert command("sql", shop, query, "--csv").out == "city,n,city_1,n_1\nBern,5,Bern,5\n"


@pytest.mark.slow
def test_values_in_csv_are_those_of_json(shop: Path) -> None:
    query = (
        "select 'a\u200bb,\"c\"' as text, '\\x01'::blob as bytes, timestamp '2026-01-02 03:04:05' as at, null as none"
    )
    (row,) = csv.DictReader(io.StringIO(command("sql", shop, query, "--csv").out))
    (same,) = rows(shop, query)
    assert row["text"] == same["text"] == 'a\u200bb,"c"' and row["none"] == ""
    assert row["at"] == same["at"] and json.loads(row["bytes"]) == same["bytes"]


def test_a_processor_without_state_and_a_queue_without_messages_have_tables(graph: Path) -> None:
    with cues.open(graph.parent / "data" / "shop", durability="process") as store:
        namespace: dict[str, cues.Graph] = {}
        exec(GRAPH, namespace)
        cues.testing.run_until_idle(namespace["graph"], store)
    assert rows(graph, "select * from state_total") == []
    assert rows(graph, 'select "q/time" from orders', "--meta") == []


@pytest.mark.slow
@pytest.mark.damages_stores
def test_a_table_that_is_not_named_is_not_read(shop: Path) -> None:
    """The damage of a queue does not reach a query over another; of one over itself the error is its own."""
    with cues.open(shop.parent / "data" / "shop") as store:
        log = store.queue("orders-bad", compression=None)
        log.appender().write_table(pyarrow.table({"n": range(5_000)}))
        key = (1).to_bytes(8, "big") + (1).to_bytes(4, "big")
        store.core.commit(lambda txn: txn.put(key, bytes(4_080), True, True, False, log.core.log.database))
    assert rows(shop, "select count(*) as n from orders") == [{"n": 6}]
    failed = command("sql", shop, 'select count(*) from "orders-bad"')
    assert failed.code == 1 and "The record batch of queue orders-bad" in failed.err, failed.err


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select * from nothing", ["nothing does not exist", "the tables are", "orders"]),
        ("selec 1", ["syntax error"]),
        ("select gone from orders", ["gone"]),
        ("select * from read_csv('/etc/passwd')", ["disabled"]),
        ("copy orders to 'out.csv'", ["disabled"]),
        ("set enable_external_access = true", ["no result", "locked", "Cannot"]),
    ],
)
def test_what_duckdb_refuses_is_wrong_usage(shop: Path, query: str, words: list[str]) -> None:
    result = command("sql", shop, query)
    assert result.code == 2 and result.out == ""
    assert any(word in result.err for word in words), result.err


@pytest.mark.slow
def test_a_query_changes_nothing_and_runs_beside_the_graph(graph: Path) -> None:
    with Command("run", graph, "--json") as run:
        run.until('"type": "progress"')
        assert rows(graph, "select count(*) as n from orders") == [{"n": 0}]
        with cues.open(graph.parent / "data" / "shop") as store:
            store.queue("orders").appender().write_many(ORDERS)
        assert rows(graph, "select count(*) as n from orders") == [{"n": len(ORDERS)}]
    missing = command("sql", graph.parent / "none", "select 1")
    assert missing.code == 1 and "no store" in missing.err
