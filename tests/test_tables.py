"""Batch functions over tables: what a table has, what comes back, and what is refused."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cues import Graph, Stream, testing
from cues.errors import NotInstalled, SchemaError
from cues.queues.tables import arrow_schema, messages_of, table_of

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

KINDS = ["arrow", "pandas", "polars"]


@dataclass
class Row:
    id: int
    price: float | None
    tags: list[str]


INTEGERS = st.none() | st.integers(-(2**62), 2**62)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(-(2**62), 2**62)},
        optional={
            "n": INTEGERS,
            "text": st.none() | st.text(max_size=3),
            "tags": st.none() | st.lists(st.none() | st.text(max_size=2), max_size=3),
            "inner": st.none() | st.fixed_dictionaries({"a": INTEGERS, "b": st.lists(INTEGERS, max_size=2)}),
            "at": st.none() | st.datetimes(datetime(1990, 1, 1), datetime(2050, 1, 1), timezones=st.just(UTC)),
            "blob": st.binary(max_size=3),
            "yes": st.booleans(),
            "x": st.floats(allow_nan=False),
        },
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first table loads its package
@given(MESSAGES)
def test_a_table_of_messages_is_these_messages_with_null_for_missing_fields(kind: str, messages: Any) -> None:
    """Integers with a null stay integers: 2**62 + 1 as a float would be another number."""
    names = list(dict.fromkeys(name for message in messages for name in message))
    wanted = [{name: message.get(name) for name in names} for message in messages]
    assert messages_of(table_of(kind, messages)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_gives_the_same_types_in_every_step(kind: str) -> None:
    schema = arrow_schema((("id", "long"), ("price", "double"), ("tags", "array<string>")), kind)
    types = []
    for messages in ([{"id": 1, "other": 2}], [{"id": 2, "price": 1, "tags": ["a"]}], [{"price": None}]):
        table = table_of(kind, messages, schema)
        types.append(str(table.dtypes if kind == "pandas" else table.schema))
        assert [list(row) for row in messages_of(table)] == [["id", "price", "tags"]]
    assert len(set(types)) == 1
    assert len({str(table_of("arrow", [m]).schema) for m in ({"id": None}, {"id": 1})}) == 2  # without one


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_does_not_fit_is_named(kind: str) -> None:
    schema = arrow_schema((("id", "long"),), kind)
    with pytest.raises(SchemaError, match=r"^\$\[1\]\.id: expected int64, found 'x'\. Try: "):
        table_of(kind, [{"id": 1}, {"id": "x"}], schema)
    with pytest.raises(SchemaError, match=r"^\$\[2\]\.id: expected values of one type, found 'x'\. Try: .*schema="):
        table_of(kind, [{"id": 1}, {"id": 2}, {"id": "x"}])


@pytest.mark.parametrize("size", ["byte", "short", "integer", "long", "float", "double"])
def test_pandas_calculates_with_columns_of_numbers_as_with_its_own(size: str) -> None:
    messages = [{"n": n} for n in (-3, 7, None)]
    table = table_of("pandas", messages, arrow_schema((("n", size),), "pandas"))
    table["odd"] = table.n % 2
    table["half"], table["rest"] = divmod(table.n, 2)
    assert messages_of(table) == [
        {"n": -3, "odd": 1, "half": -2, "rest": 1},
        {"n": 7, "odd": 1, "half": 3, "rest": 1},
        dict.fromkeys(("n", "odd", "half", "rest")),
    ]
    assert messages_of(table[table.odd == 1])[0]["n"] == -3


def test_a_mask_of_booleans_with_a_null_selects_in_pandas() -> None:
    table = table_of("pandas", [{"b": True}, {"b": None}, {"b": False}])
    assert messages_of(table[~table.b]) == [{"b": False}]


def doubled(table: Any) -> Any:
    if isinstance(table, pa.Table):
        return table.append_column("twice", pa.compute.multiply(table["price"], 2))
    return table.assign(twice=table.price * 2) if isinstance(table, pd.DataFrame) else table.with_columns(
        twice=pl.col("price") * 2
    )  # fmt: skip


def typed(row: Row) -> Row:
    assert type(row) is Row
    return row


def halves(table: Any) -> Any:
    """Another form of result for each kind of table, by binding."""
    return {"low": table.slice(0, 1), "high": [{"rows": table.num_rows}]}


ROWS = [{"id": n, "price": n / 2, "tags": ["a"] * (n % 3)} if n % 4 else {"id": n, "q/type": "t"} for n in range(23)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_leaves_each_row_once(kind: Any) -> None:
    # polars and pandas have the same protocol as arrow, so all points are tried with arrow
    wanted = [
        {"id": n, "price": row.get("price"), "tags": row.get("tags"), "twice": row.get("price") and n * 1.0}
        for n, row in enumerate(ROWS)
    ]

    def run(store: Any) -> None:
        stream = Stream(doubled, "a", "b", batch=kind, schema=Row, batch_size=5, step_s=None, where=lambda m: True)
        testing.run_until_idle(Graph("g", [stream]), store)

    def filled() -> Any:
        stack = contextlib.ExitStack()
        store = stack.enter_context(testing.temporary_store())
        store.queue("a").appender().write_many(ROWS)
        return stack, store

    stack, store = filled()
    with stack:
        sites = testing.crash_sites(lambda: run(store))
        assert testing.messages(store, "b") == wanted
    assert len(sites) > 20
    for point, hit in sites if kind == "arrow" else random.Random(5).sample(sites, 5):
        stack, store = filled()
        with stack:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(store)
            run(store)
            assert testing.messages(store, "b") == wanted, (point, hit)


def test_tables_by_binding_and_the_error_of_a_step() -> None:
    with testing.temporary_store() as store:
        store.queue("a").appender().write_many([{"id": 1}, {"id": 2}])
        store.queue("c").appender().write_many([{"id": 1}, {"id": "x"}])
        outputs = {"low": "low", "high": "high"}
        graph = Graph("g", errors="errors")
        graph.add(Stream(halves, "a", outputs, batch="arrow", step_s=None))
        graph.add(Stream(doubled, "c", "d", batch="polars", schema=Row, step_s=None))
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "low") == [{"id": 1}] and testing.messages(store, "high") == [{"rows": 2}]
        (record,) = testing.messages(store, "errors")
        assert record["err.proc/messages"]["c"] == [{"id": "x"}]
        assert record["err/cause"][0]["message"].startswith("$[0].id: expected int64, found 'x'.")
        assert [message["id"] for message in testing.messages(store, "d")] == [1]


@pytest.mark.parametrize(("kind", "package"), [("arrow", "pyarrow"), ("pandas", "pandas"), ("polars", "polars")])
def test_a_missing_package_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NotInstalled, match=rf"Tables of {kind} need the package {package}.* Try: pip install pyarrow"):
        arrow_schema(None, kind)


def test_the_same_rows_on_spark(tmp_path: Any) -> None:
    """The steps of a driver and its tasks, pickled as on their way to executors."""
    pytest.importorskip("pyspark")
    pytest.importorskip("deltalake")
    from directory_steps import DriverRun, FaultyFiles

    graph = Graph("g", errors="errors")
    graph.add(Stream(doubled, "a", "b", batch="arrow", schema=Row))
    graph.add(Stream(typed, "a", "c"))
    run = DriverRun(FaultyFiles(str(tmp_path / "queues")), graph, 2).feed("a", ROWS).claim().run()
    assert [row["id"] for row in run.messages("b")] == list(range(23))
    assert run.messages("b")[2] == {"id": 2, "price": 1.0, "tags": ["a", "a"], "twice": 2.0}
    assert run.messages("c") == [row for n, row in enumerate(ROWS) if n % 4]
    causes = [record["err/cause"][0]["message"] for record in run.messages("errors")]
    assert len(causes) == 6 and all(cause.startswith("$.price: expected number, found nothing") for cause in causes)


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars"])
def test_messages_without_a_field_fail_in_words_and_are_not_lost(kind: Any) -> None:
    graph = Graph("g", errors="errors")
    graph.source("a")
    graph.stream("a", "out", batch=kind, id="same")(lambda table: table)
    with testing.temporary_store() as store:
        store.queue("a").appender().write_many([{}, {"q/type": "x"}])
        testing.run_until_idle(graph, store)
        errors = testing.messages(store, "errors")
        assert not testing.messages(store, "out") and len(errors) == 2
        assert "a table without columns has no rows" in errors[0]["err/cause"][0]["message"]
