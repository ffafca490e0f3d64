"""Schemas of messages: what fits, the path of what does not, and where the message is then."""

from __future__ import annotations

import contextlib
import enum
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sets import slow_except
from terminal import cues as command

import cues
from cues import Graph, Sink, Source, Stream, testing
from cues.errors import GraphError, InvalidArgument, NotInstalled, SchemaError
from cues.schemas import message_of, parsed, schema_of


@dataclass
class Item:
    price: float
    count: int = 1


@dataclass
class Order:
    id: int
    items: list[Item]


class ItemDict(TypedDict):
    price: float
    count: NotRequired[int]


class OrderDict(TypedDict):
    id: int
    items: list[ItemDict]


@dataclass
class Priced:
    id: int
    total: float


JSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"price": {"type": "number"}}, "required": ["price"]},
        },
    },
    "required": ["id", "items"],
}


def kind_of(name: str) -> Any:
    if name == "pydantic":
        pydantic = pytest.importorskip("pydantic")
        item = pydantic.create_model("item", price=(float, ...), count=(int, 1))
        return pydantic.create_model("order", id=(int, ...), items=(list[item], ...))
    if name == "msgspec":
        msgspec = pytest.importorskip("msgspec")
        item = msgspec.defstruct("item", [("price", float), ("count", int, 1)])
        return msgspec.defstruct("order", [("id", int), ("items", list[item])])
    if name == "json":
        pytest.importorskip("jsonschema")
    return {"dataclass": Order, "typeddict": OrderDict, "json": JSON}[name]


KINDS = ["dataclass", "typeddict", "pydantic", "msgspec", "json"]
GOOD = {"id": 1, "items": [{"price": 2.5}, {"price": 3.0}]}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_names_the_path_and_the_value(name: str) -> None:
    schema = schema_of(kind_of(name))
    schema.load(GOOD)
    for message, path, text in [
        ({"id": 1, "items": [{"price": 1.0}, {"price": "x"}]}, "$.items[1].price", 'expected number, found "x"'),
        ({"id": "one", "items": []}, "$.id", 'expected integer, found "one"'),
        ({"id": 1, "items": [{}]}, "$.items[0].price", "found nothing"),
    ]:
        with pytest.raises(SchemaError) as raised:
            schema.load(message)
        assert raised.value.path == path
        assert raised.value.message.startswith(f"{path}: expected ") and text in raised.value.message
        assert "Try: correct the writer" in str(raised.value)


class Color(enum.Enum):
    RED = "red"


@dataclass
class Tree:
    value: Literal["leaf", 1]
    children: tuple[Tree, ...] = ()
    parent: Tree | None = None


@dataclass
class Many:
    at: datetime
    day: date
    cost: Decimal
    key: UUID
    color: Color
    names: dict[str, int | str]
    pair: tuple[int, str]
    some: set[int] = field(default_factory=set)
    data: bytes = b""


MANY = Many(
    datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), Decimal("1.5"), UUID(int=7), Color.RED, {"a": 1, "b": "x"},
    (1, "a"), {1, 2}, b"x",
)  # fmt: skip


def test_an_object_is_a_message_and_the_message_the_same_object() -> None:
    for value in (MANY, Tree("leaf", (Tree(1), Tree("leaf", parent=Tree(1))))):
        message = message_of(value)
        assert message is not None
        assert schema_of(type(value)).load(cues.codec.unpack(cues.codec.pack(message))) == value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"at": "2026"}, '$.at: expected datetime, found "2026".'),
        ({"day": MANY.at}, "$.day: expected date, found datetime.datetime("),
        ({"color": "blue"}, '$.color: expected one of "red", found "blue".'),
        ({"names": {"a": 1.5}}, "$.names.a: expected integer or string, found 1.5."),
        ({"names": {1: 1}}, "$.names[1]: expected string, found 1."),
        ({"pair": [1, "a", 2]}, "$.pair: expected array of 2 values, found [1, 'a', 2]."),
        ({"pair": [1, 2]}, "$.pair[1]: expected string, found 2."),
        ({"some": [1, True]}, "$.some[1]: expected integer, found true."),
    ],
)
def test_values_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError) as raised:
        schema_of(Many).load({**(message_of(MANY) or {}), **change})
    assert raised.value.message.startswith(text)


# --- against a naive model ------------------------------------------------------------------------

ATOMS: dict[Any, Any] = {
    int: st.integers(-9, 9), str: st.text(max_size=2), bool: st.booleans(), float: st.floats(-9, 9), None: st.none(),
}  # fmt: skip
VALUES = st.recursive(
    st.one_of(*ATOMS.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
TYPES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(list(ATOMS)),
    lambda inner: (
        st.builds(lambda t: list[t], inner)  # type: ignore[valid-type]
        | st.builds(lambda t: dict[str, t], inner)  # type: ignore[valid-type]
        | st.builds(lambda a, b: a | b if a or b else a, st.sampled_from([int, str, bool]), inner)
    ),
    max_leaves=4,
)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value fits a type, said as simply as possible."""
    origin, arguments = getattr(kind, "__origin__", None), getattr(kind, "__args__", ())
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return type(value) in (int, float)
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    if arguments:
        return any(fits(value, argument) for argument in arguments)
    return type(value) is kind


@given(TYPES, VALUES)
def test_the_checker_says_what_a_naive_one_says(kind: Any, value: Any) -> None:
    schema = schema_of(TypedDict("T", {"v": kind}))  # type: ignore[operator,arg-type]
    try:
        assert schema.load({"v": value}) == {"v": value}
        loads = True
    except SchemaError as error:
        loads, path = False, error.path
    assert loads == fits(value, kind)
    assert loads or path.startswith("$.v")


# --- in a graph -----------------------------------------------------------------------------------


def orders(count: int) -> list[dict[str, Any]]:
    """Every third has a wrong price, every fifth no items."""
    rows = []
    for n in range(count):
        price: Any = "x" if n % 3 == 2 else n / 2
        rows.append({"id": n, "items": [{"price": price}]} if n % 5 != 4 else {"id": n})
    return rows


def fit(order: dict[str, Any]) -> bool:
    return "items" in order and order["items"][0]["price"] != "x"


def price(order: Order, process: cues.Process) -> Priced:
    assert type(order) is Order and type(order.items[0]) is Item
    process.state["sum"] = process.state.get("sum", 0) + order.id
    return Priced(order.id, sum(item.price * item.count for item in order.items))


def typed_graph(checked: str, **options: Any) -> Graph:
    """Misfits are found at the source, or at the function."""

    def read(position: int | None) -> Iterator[Any]:
        for n, order in enumerate(orders(25)):
            if position is None or n > position:
                yield n, order

    graph = Graph("shop", errors="errors")
    graph.add(Source("orders", read, schema=Order if checked == "source" else None))
    graph.add(Stream(price, "orders", "priced", batch_size=4, **options))
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("checked", slow_except(["function"], ["source", "function"]))
def test_a_crash_anywhere_leaves_each_message_on_one_queue_once(checked: str) -> None:
    priced = [{"id": o["id"], "total": o["items"][0]["price"]} for o in orders(25) if fit(o)]
    misfits = [order["id"] for order in orders(25) if not fit(order)]

    def contents(store: Any) -> Any:
        failed = testing.messages(store, "errors")
        shown = [record["err.proc/messages"]["orders"][0] for record in failed]
        assert all("$.items" in record["err/cause"][0]["message"] for record in failed)
        ids = [eval(one["repr"])["id"] if checked == "source" else one["id"] for one in shown]
        return testing.messages(store, "priced"), ids, dict(testing.state(store, "shop.price"))

    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: testing.run_until_idle(typed_graph(checked), store))
        wanted = contents(store)
    assert wanted[:2] == (priced, misfits) and wanted[2]
    assert len(sites) > 40
    chance = random.Random(16)
    for point, hit in chance.sample(sites, 40):
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(typed_graph(checked), store)
            testing.run_until_idle(typed_graph(checked), store)
            assert contents(store) == wanted, (point, hit)


@pytest.mark.parametrize(
    "options", [{}, {"concurrency": 3, "key": "id"}, {"timeout_s": 60.0}, {"retries": cues.Retry(9, backoff_s=9.0)}]
)
def test_every_way_of_calling_gets_objects(options: dict[str, Any]) -> None:
    """With retries a message that does not fit is not tried again: the test would take minutes."""
    with testing.temporary_store() as store:
        testing.run_until_idle(typed_graph("function", **options), store)
        assert [m["id"] for m in testing.messages(store, "priced")] == [o["id"] for o in orders(25) if fit(o)]
        assert all(r["err.proc/config"]["attempt"] == 1 for r in testing.messages(store, "errors"))


async def later(order: Order) -> Priced:
    return Priced(order.id, 0.0)


def together(left: Order, right: Order) -> list[Priced]:
    return [Priced(left.id, right.items[0].price)]


def batch(orders: list[Order]) -> list[Priced]:
    return [Priced(order.id, 1.0) for order in orders]


def apart(order: Any) -> Any:
    assert type(order) in (Item, Order)
    return {"items": order} if type(order) is Item else {"orders": order}


def run(*processors: Any, **queues: list[Any]) -> dict[str, list[Any]]:
    with testing.temporary_store() as store:
        for name, rows in queues.items():
            store.queue(name).appender().write_many(rows)
        graph = Graph("g", processors, errors="errors")
        testing.run_until_idle(graph, store)
        return {name: testing.messages(store, name) for name in store.queues()}


def test_functions_of_every_form() -> None:
    good: list[Any] = [{**GOOD, "id": n, "q/type": "order"} for n in range(3)]
    assert run(Stream(later, "a", "b", concurrency=2), a=good)["b"] == [{"id": n, "total": 0.0} for n in range(3)]
    assert run(Stream(together, {"left": "a", "right": "b"}, "c"), a=good, b=good)["c"][2] == {"id": 2, "total": 2.5}
    assert run(Stream(batch, "a", "b", batch=True), a=good)["b"] == [{"id": n, "total": 1.0} for n in range(3)]
    got: list[Any] = []
    run(Sink(lambda order: got.append(order), "a", id="s", schema=Order), a=good)
    assert got[1] == Order(1, [Item(2.5), Item(3.0)])
    both = cues.AnyOf(i="a", o="b")
    split = Stream(apart, both, {"items": "items", "orders": "orders"}, schema={"i": Item, "o": Order})
    queues = run(split, a=[{"price": 1}], b=good[:1])
    assert queues["items"] == [{"price": 1.0, "count": 1}] and queues["orders"][0]["id"] == 0


def test_a_batch_with_a_message_that_does_not_fit_fails_as_a_whole() -> None:
    given = [GOOD, {"id": "x", "items": []}]
    queues = run(Stream(batch, "a", "b", batch=True, step_s=None, bisect=False), a=given)
    assert queues["b"] == []
    assert "messages[1]: $.id: expected integer" in queues["errors"][0]["err/cause"][0]["message"]
    queues = run(Stream(batch, "a", "b", batch=True, step_s=None), a=given)
    assert queues["b"] == [{"id": 1, "total": 1.0}]
    assert "messages[0]: $.id: expected integer" in queues["errors"][0]["err/cause"][0]["message"]


def test_a_changed_schema_sends_old_messages_to_the_error_queue_of_the_reader() -> None:
    @dataclass
    class Newer:
        id: int
        currency: str

    with testing.temporary_store() as store:
        store.queue("a").appender(schema=Order).write_many([Order(1, []), Order(2, [])])
        seen: list[Any] = []
        graph = Graph("g", [Sink(lambda m: seen.append(m), "a", id="s", schema=Newer)], errors="errors")
        testing.run_until_idle(graph, store)
        store.queue("a").appender().write({"id": 3, "currency": "EUR"})
        testing.run_until_idle(graph, store)
        causes = [r["err/cause"][0]["message"] for r in testing.messages(store, "errors")]
        assert seen == [Newer(3, "EUR")]
        assert len(causes) == 2 and all("$.currency: expected string, found nothing" in cause for cause in causes)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_program_appends_nothing_that_does_not_fit(partitions: int) -> None:
    with testing.temporary_store() as store:
        queue = store.queue("a", partitions=partitions, key="id" if partitions > 1 else None)
        appender = queue.appender(schema=Order)
        with pytest.raises(SchemaError, match=r"^\$\.id: expected integer, found \"x\"\. Try: "):
            appender.write({"id": "x", "items": []})
        with pytest.raises(SchemaError, match=r"^messages\[1\]: \$\.items: expected array, found 3"):
            appender.write_many([GOOD, {"id": 1, "items": 3}])
        with pytest.raises(SchemaError, match=r"^\$: expected object, found int"):
            appender.write(5)
        assert len(queue) == 0
        appender.write_many([Order(7, [Item(1.5)]), GOOD])
        assert sorted(m["id"] for m in testing.messages(store, "a")) == [1, 7]


def test_send_checks_the_schema_of_the_source(tmp_path: Path) -> None:
    graph = Graph("g", [Source("a", schema=Order), Stream(price, "a", "b")])
    with graph.start(store=tmp_path / "store") as running:
        with pytest.raises(SchemaError):
            running.send("a", {"id": "x"})
        running.send("a", Order(1, [Item(2.0, 3)]))
        running.wait_idle(timeout=30)
        assert running.messages("a") == [{"id": 1, "items": [{"price": 2.0, "count": 3}]}]
        assert running.messages("b") == [{"id": 1, "total": 6.0}]


def test_the_command_send_checks_the_schema_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import cues\nfrom typing import TypedDict\n\n\nclass Order(TypedDict):\n    id: int\n\n\n"
        "graph = cues.Graph('shop', [cues.Source('orders', schema=Order)], store='store', durability='process')\n"
    )
    sent = command("send", "shop.py", '{"id": 1}', '{"id": "x"}', '{"id": 3}', cwd=tmp_path)
    assert sent.code == 1
    assert "Message 2 and the following ones cannot be sent" in sent.err and "$.id: expected integer" in sent.err
    with cues.open(tmp_path / "store") as store:
        assert testing.messages(store, "orders") == [{"id": 1}]
        assert command("send", f"{store.path}#orders", "id=x", cwd=tmp_path).code == 0, "a store knows no schema"


def test_texts_are_parsed_for_a_source() -> None:
    @dataclass
    class Row:
        id: int
        price: float | None
        paid: bool
        day: date

    row = {"id": "7", "price": "", "paid": "true", "day": "2026-11-23", "note": "n"}
    queues = run(Source("a", lambda position: iter([row, {**row, "id": "x"}]), schema=parsed(Row), resume="skip"))
    assert queues["a"] == [{"id": 7, "price": None, "paid": True, "day": date(2026, 11, 23), "note": "n"}]
    assert '$.id: expected integer, found "x"' in queues["errors"][0]["err/cause"][0]["message"]


def test_wrong_schemas_are_refused_where_they_are_declared() -> None:
    @dataclass
    class Odd:
        graph: Graph

    for wrong, text in [
        (int, "cannot have the type int"),
        ({"id": int}, "not a JSON Schema"),
        (list[Order], "cannot have the type"),
        (Odd, "cannot have the type Graph"),
        ({"a": Order, "other": Order}, "not a JSON Schema"),
    ]:
        with pytest.raises(GraphError, match=text):
            Sink(print, "a", id="p", schema=wrong)
    with pytest.raises(GraphError, match=r"is a join and has batch='arrow'"):
        Stream(together, {"left": "a", "right": "b"}, "c", batch="arrow")
    with pytest.raises(GraphError, match="batch='csv'"):
        Stream(batch, "a", "b", batch="csv")  # type: ignore[arg-type]
    pytest.importorskip("jsonschema")
    with pytest.raises(GraphError, match=r"The JSON Schema is wrong at \$\.type"):
        Source("a", schema={"type": "object", "properties": {}, "$id": "x"} | {"type": "objekt"})
    with pytest.raises(InvalidArgument, match="converted to the types of a class"):
        parsed(JSON)


def test_without_jsonschema_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(NotInstalled, match=r"cues-streams\[schemas\]"):
        schema_of({**JSON})


def test_a_graph_as_plain_data_keeps_its_schemas() -> None:
    graph = Graph("g", [Source("a", schema=parsed(Order)), Stream(price, "a", "b", schema=Order), Source("c")])
    graph.add(Sink(print, "c", id="s", schema=JSON))
    again = Graph.from_dict(graph.to_dict())
    assert again.to_dict() == graph.to_dict()
    assert [p.options.schema for p in again.processors.values()] == [parsed(Order), Order, None, JSON]


SAMPLE = """
from dataclasses import dataclass
import cues

@dataclass
class Order:
    id: int

@dataclass
class Priced:
    id: int
    total: float

graph = cues.Graph("shop")

@graph.stream("orders", "priced")
def price(order: Order) -> Priced:
    return Priced(order.id, 1.0)

reveal_type(price)
price(Order(1)).totl
price({"id": 1})

@graph.stream("orders", "priced", id="wrong")
def wrong(order: Order) -> Priced:
    return order

with cues.open("data") as store:
    store.queue("orders").appender(schema=Order).write(Order(1))
    store.queue("orders").appender().write(Order(1))
"""


@pytest.mark.slow
def test_mypy_knows_the_types_of_functions(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache", "sample.py"]
    report = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert 'Revealed type is "def (order: sample.Order) -> sample.Priced"' in report
    assert report.count("error:") == 4, report
    for text in ('no attribute "totl"', "[arg-type]", "[return-value]"):
        assert text in report


def test_classes_that_only_the_function_sees_are_resolved() -> None:
    """As in a notebook's cell, or in a function: the annotations of this module are texts."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = (
        "from dataclasses import dataclass\n@dataclass\nclass Inner:\n    n: int\n@dataclass\nclass Outer:\n"
        "    inner: Inner\ndef total(outer: Outer) -> Inner:\n    return outer.inner\n"
    )
    exec(compile(code, "cell", "exec"), names)  # the annotations are texts, as in this file
    assert run(Stream(names["total"], "a", "b"), a=[{"inner": {"n": 1}}, {"inner": 2}])["b"] == [{"n": 1}]
    with pytest.raises(InvalidArgument, match="The types of Outer cannot be resolved: name 'Inner'"):
        schema_of(names["Outer"])
