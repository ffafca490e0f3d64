"""The schemas of queues: what a user may give, and what is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Required, TypedDict
from uuid import UUID

import pytest

import cues
from cues import Graph, QueueOptions, Stream
from cues.errors import InvalidArgument
from cues.queues.options import changed
from cues.records.schema import infer


@dataclass
class Line:
    sku: str
    count: int


@dataclass
class Order:
    id: int
    price: float | None
    at: datetime
    day: date
    paid: bool
    tags: list[str]
    counts: dict[str, int]
    lines: tuple[Line, ...]


class Event(TypedDict, total=False):
    id: Required[UUID]
    blob: bytes


@dataclass
class Tree:
    left: Tree | None


ORDER = {
    "id": "long",
    "price": "double",
    "at": "timestamp",
    "day": "date",
    "paid": "boolean",
    "tags": "array<string>",
    "counts": "map<string,long>",
    "lines": "array<struct<sku:string,count:long>>",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Order, ORDER),
        (Event, {"id": "string", "blob": "binary"}),
        ({"a": int, "b": "DOUBLE", "c": "array< int >", "d": "decimal(5, 2)"}, None),
        ({"a": "bigint", "s": "struct<x: smallint, y: map<string, array<tinyint>>>"}, None),
    ],
)
def test_a_schema_is_names_and_types(given: Any, expected: dict[str, str] | None) -> None:
    options = QueueOptions(schema=given)
    plain = options.to_dict()["schema"]
    assert plain == expected or expected is None
    assert QueueOptions.from_dict(options.to_dict()) == options == QueueOptions(schema=options.schema)
    assert changed(options, {"retention": 5}).schema == options.schema


def test_names_of_spark_sql_mean_the_same() -> None:
    given = {"a": "bigint", "s": "struct<x: smallint, y: map<string, array<tinyint>>>", "d": "decimal(5, 2)"}
    expected = {"a": "long", "s": "struct<x:short,y:map<string,array<byte>>>", "d": "decimal(5,2)"}
    assert QueueOptions(schema=given).to_dict()["schema"] == expected


def test_a_schema_of_pyarrow() -> None:
    pa = pytest.importorskip("pyarrow")
    given = pa.schema(
        {
            "a": pa.int64(),
            "b": pa.list_(pa.decimal128(5, 2)),
            "c": pa.timestamp("ms", "UTC"),
            "d": pa.large_string(),
            "e": pa.map_(pa.string(), pa.int8()),
            "f": pa.struct({"x": pa.float32()}),
        }
    )
    assert QueueOptions(schema=given).to_dict()["schema"] == {
        "a": "long",
        "b": "array<decimal(5,2)>",
        "c": "timestamp",
        "d": "string",
        "e": "map<string,byte>",
        "f": "struct<x:float>",
    }
    with pytest.raises(InvalidArgument, match=r"'t' .*timestamp\[us\]"):
        QueueOptions(schema=pa.schema({"t": pa.timestamp("us")}))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"a": "timestamp_ntz"}, "'a' .*timestamp_ntz"),
        ({"a": "array<int"}, "'a' .*array<int"),
        ({"a": "decimal(50,2)"}, "'a' .*decimal"),
        ({"a": "int, b"}, "'a'"),
        ({"a": Decimal}, "'a' .*Decimal"),
        ({"a": int | str}, "'a' .*int | str"),
        ({"a": object}, "'a' .*object"),
        (Tree, "'left' .*Tree"),
        ({"a b": int}, "'a b'"),
        ({"": int}, "''"),
        ({1: int}, "1 of the schema"),
        ({"Id": int, "id": int}, "'Id' and 'id'"),
        ({}, "no fields"),
        (5, "no fields"),
        ((1, 2), "no fields"),
        ("all", "no fields"),
    ],
)
def test_what_cannot_be_columns_is_refused_by_name(given: Any, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what) as refused:
        QueueOptions(schema=given)
    assert refused.value.hint


def test_an_inferred_schema_has_fields_of_one_type() -> None:
    messages = [
        {"i": 1, "x": 1, "s": None, "l": [1], "when": datetime(2026, 1, 1, tzinfo=UTC), "mixed": 1, "none": None},
        {"i": 2, "x": 0.5, "s": "a", "l": [], "d": {"a": 1}, "mixed": "1", "naive": datetime(2026, 1, 1)},
        {"i": 3, "Case": 1, "case": 1, "a b": 1, "b": True, "l": [None, 2]},
    ]
    assert dict(infer(messages)) == {
        "i": "long",
        "x": "double",
        "s": "string",
        "when": "timestamp",
        "b": "boolean",
        "l": "array<long>",
    }


def test_the_store_of_a_graph_with_a_schema_is_as_without(tmp_path: Path) -> None:
    """A store keeps packed messages. An older version opens it, because the schema is not among its options."""
    graph = Graph("g", [Stream(lambda m: m, "in", "out", id="s")], queues={"in": QueueOptions(schema=Order)})
    with graph.start(store=tmp_path) as running:
        running.send("in", {"id": "not an int"})
        assert running.wait_idle(timeout=30)
        assert running.messages("out") == [{"id": "not an int"}]
    assert graph.to_dict()["queues"] == {"in": {"schema": ORDER}}
    with cues.open(tmp_path) as store:
        assert store.queue("in").options.to_dict() == {}
        with pytest.raises(InvalidArgument, match="schema= of queue 'in'"):
            store.queue("in", schema=Order)  # type: ignore[call-arg]
