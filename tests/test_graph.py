"""Declaring graphs: three ways that give the same one, and errors that name processor, finding and expectation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import AnyOf, Graph, QueueOptions, Retry, Sink, Source, Stream
from cues.errors import GraphError, InvalidArgument, InvalidName

# Functions that plain data can name.


def orders(position: Any) -> Any:
    yield 1, {"n": 1}


def price(order: Any) -> Any:
    return order


def split(left: Any, right: Any, process: Any) -> Any:
    return {"even": left}


def merge(page: Any, process: Any) -> Any:
    return page


def save(message: Any, process: Any) -> None:
    pass


def is_large(message: Any) -> bool:
    return bool(message["n"] > 1)


async def later(message: Any) -> bool:
    return False


def customer(message: Any) -> Any:
    return message["customer"]


def decorated() -> Graph:
    graph = Graph("example", errors="errors", queues={"orders": QueueOptions(metadata={"t"}), "*": QueueOptions()})
    graph.source("rates")
    graph.source("orders", batch_size=10)(orders)
    graph.stream("orders", "priced", key=customer, retries=Retry(3, 0.5, 2.0, (ValueError, OSError)))(price)
    graph.stream({"left": "orders", "right": "rates"}, {"even": "q1", "odd": "q2"}, where={"left": is_large})(split)
    graph.stream(AnyOf("q1", b="q2"), "pages", types={"a", "b"}, opts={"depth": 3})(merge)
    graph.sink("pages", strategy="at-most-once", errors=None)(save)
    return graph


def listed() -> Graph:
    return Graph(
        "example",
        [
            Source("rates"),
            Source("orders", orders, batch_size=10),
            Stream(price, "orders", "priced", key=customer, retries=Retry(3, 0.5, 2.0, (ValueError, OSError))),
            Stream(split, {"left": "orders", "right": "rates"}, {"even": "q1", "odd": "q2"}, where={"left": is_large}),
            Stream(merge, AnyOf(q1="q1", b="q2"), "pages", types={"a", "b"}, opts={"depth": 3}),
            Sink(save, "pages", strategy="at-most-once", errors=None),
        ],
        errors="errors",
        queues={"orders": {"metadata": ["t"]}, "*": {}},
    )


def test_decorators_lists_and_plain_data_give_the_same_graph() -> None:
    plan = decorated().plan()
    assert listed().plan() == plan
    data = decorated().to_dict()
    again = Graph.from_dict(data)
    assert again.to_dict() == data
    found = again.plan()
    assert [n.id for n in found.nodes] == [n.id for n in plan.nodes]
    for mine, theirs in zip(plan.nodes, found.nodes):
        # A set of types comes back as a list: what it filters is the same.
        assert (mine.mode, mine.inputs, mine.outputs, mine.fn) == (
            theirs.mode,
            theirs.inputs,
            theirs.outputs,
            theirs.fn,
        )
        assert mine.options.retry == theirs.options.retry
        assert mine.options.where == theirs.options.where
        assert mine.options.key == theirs.options.key
    assert found.queues == plan.queues


def test_plain_data_are_plain() -> None:
    assert Graph.from_dict(json.loads(json.dumps(decorated().to_dict()))).to_dict() == decorated().to_dict()


def test_plain_data_keep_the_store(tmp_path: Path) -> None:
    """Without it the graph would begin anew, in data/<id> of wherever it was started."""
    with cues.open(tmp_path / "open", durability="process") as store:
        for given in (str(tmp_path / "a"), tmp_path / "b", store):
            graph = Graph("g", [Source("a")], store=given)
            again = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
            assert again.store_path() == graph.store_path() and again.to_dict() == graph.to_dict()
    placed = Graph("g", [Source("a")], queues={"a": QueueOptions(path="elsewhere")})
    placed.directory = tmp_path  # as the command line sets it
    again = Graph.from_dict(json.loads(json.dumps(placed.to_dict())))
    assert again.store_path() == tmp_path / "data" / "g" and again.place("elsewhere") == tmp_path / "elsewhere"


def test_plain_data_with_functions_and_overrides() -> None:
    graph = Graph.from_dict(
        {"id": "g", "processors": [{"kind": "stream", "fn": price, "inputs": {"any_of": ["a", "b"]}, "outputs": "c"}]},
        errors="errors",
        system="the system",
    )
    (node,) = graph.plan().nodes
    assert (node.id, node.mode, node.errors) == ("g.price", "alts", "errors")
    assert graph.plan().system == "the system"


def test_a_join_of_one_queue_bound_as_any_of_is_a_join() -> None:
    def only(any_of: Any) -> None:
        pass

    graph = Graph("g", [Sink(only, {"any_of": "queue"})])
    data = graph.to_dict()
    data["processors"][0]["fn"] = only
    assert Graph.from_dict(data).plan() == graph.plan()


def test_decorators_return_the_function_unchanged() -> None:
    graph = Graph("g")

    def double(n: Any) -> Any:
        return n

    assert graph.stream("a", "b")(double) is double
    assert graph.sink("b", id="s")(double) is double
    assert graph.source("a")(orders) is orders
    assert list(graph.processors) == ["double", "s", "a"]


def test_defaults_are_resolved_in_the_plan() -> None:
    graph = Graph(
        "g",
        [Source("a"), Stream(price, "a", "b"), Sink(save, "b", errors="mine", strategy="exactly-once")],
        errors="errors",
        strategy="at-most-once",
    )
    plan = graph.plan()
    assert [(n.name, n.errors, n.strategy) for n in plan.nodes] == [
        ("a", "errors", "at-most-once"),
        ("price", "errors", "at-most-once"),
        ("save", "mine", "exactly-once"),
    ]
    assert plan.fed == ("a",) and plan.source == "a"
    assert [n.name for n in plan.running] == ["price", "save"]
    assert set(plan.queues) == {"a", "b", "errors", "mine"}
    assert plan.node("price") is plan.node("g.price")


def test_a_processor_that_reads_the_error_queue_of_its_graph_inherits_none() -> None:
    mend = Stream(lambda failed, rates: failed, {"failed": "errors", "rates": "b"}, "mended", id="mend")
    watch = Sink(merge, "a", id="watch", tailers=["errors"])
    plan = Graph("g", [Stream(price, "a", "out"), mend, watch], errors="errors").plan()
    assert {node.name: node.errors for node in plan.nodes} == {"price": "errors", "mend": None, "watch": None}


def test_a_queue_without_a_writer_is_fed_from_outside() -> None:
    plan = Graph("g", [Stream(price, "a", "b"), Stream(save, "errors", "c")], errors="errors").plan()
    assert plan.fed == ("a",)


# --- errors -------------------------------------------------------------------------------------


def no_name(message: Any) -> Any: ...


def two(a: Any, b: Any) -> Any: ...


def none() -> Any: ...


def positional(left: Any, /, right: Any) -> Any: ...


def generator(message: Any) -> Any:
    yield message


async def coroutine(position: Any) -> Any: ...


async def async_generator(message: Any) -> Any:
    yield message


def process_first(process: Any, message: Any) -> Any: ...


LR = {"left": "a", "right": "b"}

WRONG: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("two processors with one id", lambda: Graph("g", [Source("price"), Stream(price, "a", "b")]), ("'price'", "id=")),
    ("a function without a name", lambda: Stream(lambda m: m, "a", "b"), ("no name", "id=")),
    ("a parameter that names no binding", lambda: Stream(two, LR, "out"), ("two", "'a'", "'left', 'right'")),
    ("a binding without a parameter", lambda: Stream(price, {"order": "a", "rate": "b"}, "c"), ("price", "'rate'")),
    ("a join by place", lambda: Stream(positional, LR, "c"), ("positional", "'left'", "by name")),
    ("no parameter for the message", lambda: Sink(none, "a"), ("none", "message")),
    ("one parameter too many", lambda: Stream(two, "a", "c"), ("two", "'b'", "process")),
    ("process in the message's place", lambda: Stream(process_first, "a", "c"), ("process_first", "'process'")),
    ("a source that asks for more", lambda: Source("s", two), ("'s'", "b", "position")),
    ("a source with process first", lambda: Source("s", process_first), ("'s'", "'process'")),
    ("a generator that is no source", lambda: Stream(generator, "a", "c"), ("generator", "list")),
    ("an async generator that is no source", lambda: Stream(async_generator, "a", "c"), ("async_generator", "list")),
    ("a source that only waits", lambda: Source("s", coroutine), ("'s'", "async", "yield")),
    ("no function", lambda: Stream("price", "a", "c", id="x"), ("'x'", "str")),  # type: ignore[arg-type]
    ("one queue under two bindings", lambda: Stream(two, {"a": "q", "b": "q"}, "c"), ("two", "'q'", "'a'", "'b'")),
    ("no inputs", lambda: Sink(price, {}), ("price", "no inputs")),
    ("no inputs for alts", lambda: Sink(price, AnyOf()), ("price", "no inputs")),
    ("inputs of another kind", lambda: Sink(price, ["a"]), ("price", "list", "AnyOf")),  # type: ignore[arg-type]
    ("no outputs", lambda: Stream(price, "a", {}), ("price", "no outputs", "Sink")),
    ("outputs of another kind", lambda: Stream(price, "a", 7), ("price", "int")),  # type: ignore[arg-type]
    ("a queue name with a slash", lambda: Stream(price, "a/b", "c"), ("price", "a/b", "a slash")),
    ("a queue name with a dot", lambda: Stream(price, "a", "b.c"), ("price", "b.c", "a dot")),
    ("an empty queue name", lambda: Stream(price, "a", ""), ("price",)),
    ("a long queue name", lambda: Sink(price, "q" * 300), ("price", "300")),
    ("a binding that is no name", lambda: Sink(price, {"a.b": "q"}), ("price", "a.b")),
    ("an unknown option", lambda: Sink(price, "a", retry=3), ("price", "'retry'", "retries=")),
    ("an option of another kind", lambda: Sink(price, "a", resume="skip"), ("price", "'resume'")),
    ("instances that are no count", lambda: Sink(price, "a", instances=0), ("price", "instances=0")),
    (
        "a join of queues that are partitioned otherwise",
        lambda: Graph(
            "g",
            [Stream(lambda a, b: a, {"a": "left", "b": "right"}, "c", id="join")],
            queues={"left": QueueOptions(partitions=4, key="user"), "right": QueueOptions(partitions=8, key="user")},
        ).plan(),
        ("g.join", "'left' (4 partitions by murmur2)", "'right' (8 partitions by murmur2)"),
    ),
    (
        "a join of queues with other partitioners",
        lambda: Graph(
            "g",
            [Stream(lambda a, b: a, {"a": "left", "b": "right"}, "c", id="join")],
            queues={
                "left": QueueOptions(partitions=4, key="user"),
                "right": QueueOptions(partitions=4, key="user", partitioner="rendezvous"),
            },
        ).plan(),
        ("'left' (4 partitions by murmur2)", "'right' (4 partitions by rendezvous)"),
    ),
    (
        "alts of a partitioned and an unpartitioned queue",
        lambda: Graph(
            "g",
            [Sink(price, AnyOf(a="left", b="right"))],
            queues={"left": QueueOptions(partitions=4, key="user")},
        ).plan(),
        ("g.price", "'left' (4 partitions by murmur2)", "'right' (1 partition)"),
    ),
    ("an unknown strategy", lambda: Sink(price, "a", strategy="once"), ("price", "'once'", "'exactly-once'")),
    ("negative retries", lambda: Sink(price, "a", retries=-1), ("price", "-1")),
    ("retries that are no count", lambda: Sink(price, "a", retries=True), ("price", "True")),
    (
        "retries at most once",
        lambda: Sink(price, "a", strategy="at-most-once", retries=1),
        ("price", "at-most-once", "retries=0"),
    ),
    (
        "retries at most once, by the graph's default",
        lambda: Graph("g", [Sink(price, "a", retries=1)], strategy="at-most-once").plan(),
        ("price", "at-most-once", "retries=0"),
    ),
    ("a batch size of nothing", lambda: Sink(price, "a", batch_size=0), ("price", "batch_size=0")),
    ("another batch", lambda: Sink(price, "a", batch="csv"), ("price", "'csv'")),
    ("another resume", lambda: Source("s", orders, resume="never"), ("'s'", "'never'", "'skip'")),
    ("a source that takes no position", lambda: Source("s", lambda: ()), ("'s'", "position", "resume='skip'")),
    ("a source that takes only process", lambda: Source("s", lambda process: ()), ("'s'", "position")),
    ("an async filter", lambda: Sink(price, "a", where=later), ("price", "where=", "async")),
    ("an async key", lambda: Sink(price, "a", key=later), ("price", "key=", "async")),
    ("types that are a number", lambda: Sink(price, "a", types=5), ("price", "types=", "5")),
    ("topics that are a number", lambda: Sink(price, "a", topics={"a": 5}), ("price", "topics=", "5")),
    ("a key that is nothing", lambda: Sink(price, "a", key=7), ("price", "7")),
    ("a filter for no input", lambda: Sink(price, "a", where={"b": is_large}), ("price", "'b'", "'a'")),
    ("a filter that cannot be called", lambda: Sink(price, "a", where="n > 1"), ("price", "'n > 1'")),
    ("an error queue that is no name", lambda: Sink(price, "a", errors="a/b"), ("price", "a/b")),
    (
        "an error queue that its processor reads",
        lambda: Graph("g", [Stream(price, "failed", "a", errors="failed")]).plan(),
        ("g.price", "errors='failed'", "errors=None"),
    ),
    (
        "an error queue that its function reads by itself",
        lambda: Graph("g", [Sink(merge, "a", tailers=["failed"], errors="failed")]).plan(),
        ("g.merge", "errors='failed'"),
    ),
    ("a graph without processors", lambda: Graph("g").plan(), ("'g'", "no processors")),
    ("a graph of something else", lambda: Graph("g", [price]), ("'g'", "function")),  # type: ignore[list-item]
    ("an unknown strategy of a graph", lambda: Graph("g", strategy="once"), ("'g'", "'once'")),
    (
        "options for an unknown queue",
        lambda: Graph("g", [Source("a")], queues={"b": QueueOptions()}).plan(),
        ("'b'", "a"),
    ),
    ("a default source that is none", lambda: Graph("g", [Source("a")], source="b").plan(), ("'b'", "a")),
    ("a second function of a source", lambda: [d(orders) for d in [Graph("g").source("a")] * 2], ("'a'", "orders")),
    ("plain data without an id", lambda: Graph.from_dict({"processors": []}), ("'id'",)),
    ("plain data with more", lambda: Graph.from_dict({"id": "g", "processors": [], "error": "e"}), ("'error'",)),
    (
        "plain data of another kind",
        lambda: Graph.from_dict({"id": "g", "processors": [{"kind": "pipe", "id": "x"}]}),
        ("'pipe'",),
    ),
    (
        "plain data with an unknown function",
        lambda: Graph.from_dict({"id": "g", "processors": [{"kind": "sink", "fn": "nowhere:f", "inputs": "a"}]}),
        ("nowhere:f",),
    ),
    ("an unknown processor", lambda: Graph("g", [Source("a")]).plan().node("b"), ("'b'", "a")),
    ("a queue under a name twice in AnyOf", lambda: Sink(price, AnyOf("a", a="b")), ("'a'",)),
]


@pytest.mark.parametrize(("build", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_errors_are_raised_when_the_graph_is_built(build: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert " Try: " in text, text
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a#b", " a", "x" * 300, "a\nb", 7])
def test_names_of_graphs_are_checked(name: Any) -> None:
    with pytest.raises(InvalidName):
        Graph(name)


# --- topology -----------------------------------------------------------------------------------


def f(message: Any) -> Any: ...


def shape(*edges: tuple[str, str, str]) -> cues.Graph:
    return Graph("g", [Stream(f, a, b, id=id) for id, a, b in edges])


def test_topology_of_a_chain_with_a_branch() -> None:
    found = Graph(
        "g",
        [Sink(f, "c", id="z"), Stream(f, "b", "c", id="y"), Stream(f, "a", "b", id="x"), Sink(f, "b", id="w")],
    ).topology()
    assert found.nodes == {"w", "x", "y", "z"}
    assert found.edges == {("x", "b", "y"), ("x", "b", "w"), ("y", "c", "z")}
    assert found.dependencies("z") == {"x", "y"} and found.dependents("x") == {"w", "y", "z"}
    assert found.dependencies("x") == frozenset()
    order = found.order()
    assert order.index("x") < order.index("y") < order.index("z") and order.index("x") < order.index("w")
    assert found.cycles() == ()
    assert found.components() == (frozenset("wxyz"),)
    with pytest.raises(InvalidArgument, match="'v'"):
        found.dependencies("v")


def test_topology_of_cycles_and_parts() -> None:
    found = shape(("x", "a", "b"), ("y", "b", "a"), ("z", "a", "c"), ("self", "s", "s")).topology()
    assert set(found.cycles()) == {("x", "y"), ("self",)}
    assert found.components() == (frozenset({"x", "y", "z"}), frozenset({"self"}))
    order = found.order()
    assert order.index("z") > order.index("x") and order.index("z") > order.index("y")


def test_topologies_are_equal_whatever_the_order_of_declaration() -> None:
    edges = [("x", "a", "b"), ("y", "b", "c")]
    assert shape(*edges).topology() == shape(*reversed(edges)).topology()
    assert shape(*edges).topology() != shape(("x", "a", "b"), ("y", "a", "c")).topology()


def test_the_order_of_a_large_graph_takes_no_time() -> None:
    found = shape(*[(f"s{n:03}", f"q{n:03}", f"q{n + 1:03}") for n in range(200)]).topology()
    assert found.order() == tuple(f"s{n:03}" for n in range(200))
