"""Graphs made of graphs, and their shapes. Nothing given is changed; what cannot be is said."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import AllOf, AnyOf, Graph, QueueOptions, Sink, Source, Stream, testing
from cues.errors import GraphError, InvalidName, Unsupported
from cues.graphs import draw, topology
from cues.graphs.topology import Topology

SEEDS = seeds.among(range(60), fast=20)


def clean(message: Any) -> Any:
    return message


def split(left: Any, right: Any) -> Any:
    return {"even": left, "odd": right}


def numbered(position: Any) -> Any:
    for n in range(position or 0, 5):
        yield n + 1, {"n": n}


def is_odd(message: Any) -> bool:
    return bool(message["n"] % 2)


def either(message: Any, process: Any) -> Any:
    return {"from": process.binding}


# --- broadcast --------------------------------------------------------------------------------------


def run(graph: Graph, store: Path, queue: str, messages: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The content of every queue when the graph is idle after the messages were sent."""
    with graph.start(store=store) as running:
        for message in messages:
            running.send(queue, message)
        assert running.wait_idle(timeout=60)
        return {name: list(running.messages(name)) for name in graph.plan().queues}


def test_a_broadcast_copies_every_message_to_every_output(tmp_path: Path) -> None:
    graph = Graph("g", [Source("orders")])
    graph.broadcast("orders", ["a", "b", "c"])
    sent = [{"n": n, "in": {"deep": [n]}, "q/type": "order"} for n in range(3000)]
    found = run(graph, tmp_path / "s", "orders", sent)
    assert found == {"orders": sent, "a": sent, "b": sent, "c": sent}


def test_copies_keep_provenance_and_carry_the_hash_of_one_step(tmp_path: Path) -> None:
    graph = Graph("g", [Source("orders"), cues.broadcast("orders", ["a", "b"])], queues={"*": {"metadata": ["t"]}})
    run(graph, tmp_path / "s", "orders", [{"n": n} for n in range(10)])
    with cues.open(tmp_path / "s") as store:
        seen = []
        for queue in ("a", "b"):
            tailer = store.queue(queue).tailer(meta=True)
            seen.append([(m["q/meta"]["q/hash"], m["q/meta"]["q/queue"]["orders"]) for m in tailer])
        assert seen[0] == seen[1]
        assert [meta["q/t"] for _, meta in seen[0]] == list(range(1, 11))


@pytest.mark.parametrize("options", [{}, {"batch": True}, {"side_effects": True}, {"batch_size": 1}], ids=str)
def test_a_broadcast_is_an_ordinary_stream(tmp_path: Path, options: dict[str, Any]) -> None:
    """Filters, inputs of which any will do, and an error queue, however it is run."""
    graph = Graph("g", errors="errors", queues={"small": QueueOptions(max_message_bytes=100)})
    graph.source("x")
    graph.source("y")
    graph.broadcast(AnyOf("x", other="y"), {"one": "large", "two": "small"}, id="copy", where=is_odd, **options)
    with graph.start(store=tmp_path / "s") as running:
        for n in range(6):
            running.send("xy"[n % 2], {"n": n})
            running.send("xy"[n % 2], {"n": n + 10})
        assert running.wait_idle(timeout=60)
        want = [{"n": n} for n in (1, 11, 3, 13, 5, 15)]
        assert running.messages("large") == want == running.messages("small")
        # What one of the outputs has no room for goes to neither.
        running.send("x", {"n": 1, "long": "x" * 200})
        assert running.wait_idle(timeout=60)
        assert running.messages("large") == want == running.messages("small")
        (error,) = running.messages("errors")
        assert error["err.proc/config"]["outputs"] == {"one": "large", "two": "small"}


def test_a_function_may_return_for_all_outputs_and_change_what_it_returned(tmp_path: Path) -> None:
    """A list of messages, one or none, for every queue. An object that is returned twice is stored as it was then."""
    graph = Graph("g", [Source("in")])
    kept: dict[str, Any] = {"n": 0}

    @graph.stream("in", AllOf("a", "b"), batch_size=1)
    def spread(message: Any) -> Any:
        kept["n"] += 1
        return [kept] * message["times"] if message["times"] != 1 else kept

    found = run(graph, tmp_path / "s", "in", [{"times": times} for times in (1, 0, 2)])
    assert found["a"] == found["b"] == [{"n": 1}, {"n": 3}, {"n": 3}]


def test_a_broadcast_as_plain_data_and_as_a_picture() -> None:
    graph = Graph("g", [Source("orders"), cues.broadcast("orders", {"x": "a", "b": "b"}, types="order", retries=2)])
    data = json.loads(json.dumps(graph.to_dict()))
    assert data["processors"][1] == {
        "kind": "stream",
        "id": "broadcast-orders",
        "fn": "cues.graphs.compose:unchanged",
        "inputs": "orders",
        "outputs": {"all_of": {"x": "a", "b": "b"}},
        "types": "order",
        "retries": 2,
    }
    assert Graph.from_dict(data).plan() == graph.plan()
    shown = draw.text(graph.plan())
    assert "orders → a as x, b" in shown and "the same to each output" in shown
    # A binding of that name is one.
    named = Graph("g", [Stream(clean, "a", {"all_of": "b"})])
    assert Graph.from_dict(named.to_dict()).plan() == named.plan()


WRONG_BROADCASTS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a join", lambda: cues.broadcast({"a": "x", "b": "y"}, ["c"]), ("dict", "AnyOf")),  # type: ignore[arg-type]
    ("no outputs", lambda: cues.broadcast("a", []), ("'broadcast-a'", "no outputs")),
    ("one name twice", lambda: cues.broadcast("a", ["b", "b"]), ("AllOf", "'b'")),
    ("one queue twice", lambda: cues.broadcast("a", {"x": "b", "y": "b"}), ("'broadcast-a'", "'b' twice")),
    ("an option of another kind", lambda: cues.broadcast("a", ["b"], resume="skip"), ("'broadcast-a'", "'resume'")),
    ("two of one input", lambda: Graph("g", [cues.broadcast("a", [q]) for q in "bc"]), ("'broadcast-a'", "id=")),
]


@pytest.mark.parametrize(
    ("build", "words"), [case[1:] for case in WRONG_BROADCASTS], ids=[case[0] for case in WRONG_BROADCASTS]
)
def test_an_invalid_broadcast_is_refused(build: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- rebind -----------------------------------------------------------------------------------------


def part() -> Graph:
    return Graph(
        "part",
        [
            Source("raw", numbered),
            Source("more"),
            Stream(clean, "raw", "good", id="clean", where={"raw": is_odd}, errors="bad"),
            Stream(split, {"left": "good", "right": "more"}, ["even", "odd"], errors=None),
            Stream(either, AnyOf("even", b="odd"), "all"),
            cues.broadcast("all", ["x", "y"]),
            Sink(clean, "x", id="keep"),
        ],
        errors="errors",
        source="raw",
        queues={"raw": QueueOptions(retention=9), "*": QueueOptions(metadata=True)},
        system="the system",
        strategy="at-most-once",
        store="somewhere",
        durability="process",
    )


def test_rebind_renames_queues_wherever_they_are_named_and_bindings_nowhere() -> None:
    before = part().to_dict()
    graph = part()
    names = ["raw", "more", "good", "even", "odd", "all", "x", "y", "errors", "bad"]
    found = graph.rebind({name: f"{name}-2" for name in names}, processors={"clean": "clean-2"})
    assert graph.to_dict() == before  # the graph itself stays
    assert found.to_dict() == {
        "id": "part",
        "store": "somewhere",
        "errors": "errors-2",
        "strategy": "at-most-once",
        "source": "raw-2",
        "durability": "process",
        "queues": {"raw-2": {"retention": {"count": 9}}, "*": {"metadata": ["t", "time"]}},
        "processors": [
            {"kind": "source", "id": "raw-2", "fn": f"{__name__}:numbered"},
            {"kind": "source", "id": "more-2"},
            {
                "kind": "stream",
                "id": "clean-2",
                "fn": f"{__name__}:clean",
                "inputs": "raw-2",
                "outputs": "good-2",
                "where": {"raw-2": f"{__name__}:is_odd"},
                "errors": "bad-2",
            },
            {
                "kind": "stream",
                "id": "split",
                "fn": f"{__name__}:split",
                "inputs": {"left": "good-2", "right": "more-2"},
                "outputs": {"even": "even-2", "odd": "odd-2"},
                "errors": None,
            },
            {
                "kind": "stream",
                "id": "either",
                "fn": f"{__name__}:either",
                "inputs": {"any_of": {"even": "even-2", "b": "odd-2"}},
                "outputs": "all-2",
            },
            {
                "kind": "stream",
                "id": "broadcast-all",
                "fn": "cues.graphs.compose:unchanged",
                "inputs": "all-2",
                "outputs": {"all_of": {"x": "x-2", "y": "y-2"}},
            },
            {"kind": "sink", "id": "keep", "fn": f"{__name__}:clean", "inputs": "x-2"},
        ],
    }
    assert (found.store, found.system) == ("somewhere", "the system")
    assert found.plan().topology() != graph.plan().topology()
    assert found.plan().topology().isomorphic(graph.plan().topology())


def test_renames_happen_at_once_and_come_back() -> None:
    assert part().rebind({"even": "odd", "odd": "even"}).rebind({"even": "odd", "odd": "even"}).plan() == part().plan()
    assert part().rebind().plan() == part().rebind({}).plan() == part().plan()


def test_two_queues_may_become_one() -> None:
    found = Graph("g", [Stream(clean, "a", "b", id="x"), Stream(clean, "c", "d", id="y")]).rebind({"c": "b"})
    assert found.topology().edges == {("x", "b", "y")}
    # A source of a queue that a stream writes as well.
    assert Graph("g", [Source("s"), Stream(clean, "a", "b")]).rebind({"s": "b"}).plan().fed == ("a", "b")


def test_a_rebound_graph_runs(tmp_path: Path) -> None:
    graph = Graph("g", [Source("raw", numbered), Stream(clean, "raw", "good", types={"raw": None}, where=is_odd)])
    with graph.rebind({"raw": "in", "good": "out"}).start(store=tmp_path / "s") as running:
        assert running.wait_idle(timeout=60)
        assert running.messages("out") == [{"n": 1}, {"n": 3}]


WRONG_REBINDS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a queue that is not there", lambda: part().rebind({"god": "b"}), ("'god'", "'part'", "Try: use 'good'")),
    ("a processor for a queue", lambda: part().rebind({"clean": "b"}), ("'clean'", "processors={'clean': …}")),
    ("the rest", lambda: part().rebind({"*": "b"}), ("'*'",)),
    (
        "a processor that is not there",
        lambda: part().rebind(processors={"clear": "b"}),
        ("'clear'", "Try: use 'clean'"),
    ),
    ("a source by its id", lambda: part().rebind(processors={"raw": "b"}), ("'raw'", "rebind({'raw': 'b'})")),
    (
        "one queue under two bindings",
        lambda: part().rebind({"more": "good"}),
        ("'split'", "'good'", "'left'", "'right'"),
    ),
    ("one queue under two of any", lambda: part().rebind({"odd": "even"}), ("'either'", "'even'", "'b'")),
    ("one queue twice of all", lambda: part().rebind({"x": "y"}), ("'broadcast-all'", "'y'", "twice")),
    ("two sources of one queue", lambda: part().rebind({"more": "raw"}), ("source", "'more'", "'raw'")),
    ("a source with a stream's id", lambda: part().rebind({"raw": "either"}), ("source 'raw'", "stream 'either'")),
    ("two processors of one id", lambda: part().rebind(processors={"clean": "keep"}), ("'clean'", "'keep'")),
    (
        "two options of one queue",
        lambda: Graph("g", [Stream(clean, "a", "b")], queues={"a": {"retention": 1}, "b": {"retention": 2}}).rebind(
            {"b": "a"}
        ),
        ("'a'", "'b'", "'count': 1", "'count': 2"),
    ),
]


@pytest.mark.parametrize(
    ("build", "words"), [case[1:] for case in WRONG_REBINDS], ids=[case[0] for case in WRONG_REBINDS]
)
def test_an_invalid_rebind_is_refused(build: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert " Try: " in text


def test_a_new_name_is_checked() -> None:
    with pytest.raises(InvalidName, match="a dot"):
        part().rebind({"good": "very.good"})


# --- merge ------------------------------------------------------------------------------------------


def test_parts_meet_at_queues_of_one_name_and_keep_what_they_say_for_themselves(tmp_path: Path) -> None:
    def stumble(message: Any) -> Any:
        raise ValueError(message["n"])

    left = Graph("left", [Source("a", numbered), Stream(stumble, "a", "b", where=is_odd)], errors="left-errors")
    right = Graph(
        "right", [Source("b"), Stream(clean, "b", "c"), Sink(stumble, "c", id="end")], strategy="at-most-once"
    )
    only = Graph("only", [Sink(stumble, "a", id="late", errors="mine")], errors="others")
    whole = cues.merge("whole", left, right, only, errors="errors")
    found = {node.name: (node.id, node.errors, node.strategy) for node in whole.plan().nodes}
    assert found == {
        "a": ("whole.a", "left-errors", "exactly-once"),
        "stumble": ("whole.stumble", "left-errors", "exactly-once"),
        "b": ("whole.b", "errors", "exactly-once"),
        "clean": ("whole.clean", "errors", "at-most-once"),
        "end": ("whole.end", "errors", "at-most-once"),
        "late": ("whole.late", "mine", "exactly-once"),
    }
    assert whole.topology().edges == {
        ("a", "a", "stumble"),
        ("a", "a", "late"),
        ("stumble", "b", "clean"),
        ("b", "b", "clean"),
        ("clean", "c", "end"),
    }
    with whole.start(store=tmp_path / "s") as running:
        running.send("b", {"n": 7})
        assert running.wait_idle(timeout=60)
        counts = {queue: len(running.messages(queue)) for queue in ("left-errors", "errors", "mine", "c")}
        assert counts == {"left-errors": 2, "errors": 1, "mine": 5, "c": 1}
    # The parts are what they were.
    assert left.processors["stumble"].options.errors == "inherit"


def test_a_part_without_an_error_queue_stops_as_it_did() -> None:
    left = Graph("left", [Stream(clean, "a", "b", id="x")])
    right = Graph("right", [Stream(clean, "b", "c", id="y")], errors="errors")
    assert [node.errors for node in cues.merge("g", left, right).plan().nodes] == [None, "errors"]


def test_merging_one_graph_is_that_graph_under_another_id() -> None:
    one = Graph("one", [Source("a"), Stream(clean, "a", "b")], source="a", system=7, store="s", durability="process")
    found = cues.merge("two", one, one)
    assert found.to_dict() == {**one.to_dict(), "id": "two"}
    assert (found.system, found.store) == (7, "s")


def test_a_part_can_be_used_twice() -> None:
    one = Graph("one", [Stream(clean, "in", "out")])
    two = one.rebind({"in": "out", "out": "end"}, processors={"clean": "again"})
    assert cues.merge("g", one, two).topology().edges == {("clean", "out", "again")}


def test_a_source_without_a_function_gives_way() -> None:
    bare, full = Graph("bare", [Source("a"), Sink(clean, "a")]), Graph("full", [Source("a", numbered)])
    for graphs in ((bare, full), (full, bare)):
        assert cues.merge("g", *graphs).processors["a"].fn is numbered
    assert cues.merge("g", bare, Graph("other", [Source("a")])).plan().fed == ("a",)


def test_queue_options_of_parts() -> None:
    """By name before by ``"*"``, what is given before both."""
    ten, two = QueueOptions(retention=10), QueueOptions(retention=2)
    left = Graph("left", [Stream(clean, "a", "b", id="x")], queues={"a": ten, "*": QueueOptions(metadata=True)})
    right = Graph("right", [Stream(clean, "b", "c", id="y")], queues={"b": two})
    assert cues.merge("g", left, right).plan().queues == {"a": ten, "b": two, "c": QueueOptions()}
    assert cues.merge("g", left, right, queues={"b": ten, "*": two}).plan().queues == {"a": ten, "b": ten, "c": two}
    third = Graph("third", [Stream(clean, "b", "c", id="z")], queues={"b": ten})
    assert cues.merge("g", right, third, queues={"b": ten}).plan().queues["b"] == ten


def test_source_store_and_durability_of_parts() -> None:
    left = Graph("left", [Source("a"), Source("b")], source="b", store="s", durability="process")
    right = Graph("right", [Source("c")], store="s")
    found = cues.merge("g", left, right)
    assert (found.default_source, found.store, found.durability) == ("b", "s", None)
    found = cues.merge("g", left, right, source="c", store="t", durability="process")
    assert (found.default_source, found.store, found.durability) == ("c", "t", "process")
    other = Graph("other", [Source("d")], source="d", store="u")
    found = cues.merge("g", left, other)
    assert (found.default_source, found.store) == (None, None)


SHARED = Sink(clean, "a", id="shared")
WRONG_MERGES: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("nothing", lambda: cues.merge("g"), ("'g'", "no graphs")),
    ("no graph", lambda: cues.merge("g", "part"), ("str", "'part'")),  # type: ignore[arg-type]
    (
        "two processors of one id",
        lambda: cues.merge("g", Graph("l", [Sink(clean, "a")]), Graph("r", [Sink(clean, "b")])),
        ("'l'", "'r'", "'clean'", "processors="),
    ),
    (
        "two sources of one queue",
        lambda: cues.merge("g", Graph("l", [Source("a", numbered)]), Graph("r", [Source("a", numbered)])),
        ("'l'", "'r'", "'a'", "rebind({'a': …})"),
    ),
    (
        "one declaration of two strategies",
        lambda: cues.merge("g", *[Graph(s[:2], [SHARED], strategy=s) for s in ("exactly-once", "at-most-once")]),
        ("'ex'", "'at'", "'shared'", "strategies"),
    ),
    (
        "two options of one queue",
        lambda: cues.merge("g", *[Graph(f"g{n}", [Source("a")], queues={"a": {"retention": n}}) for n in (1, 2)]),
        ("'a'", "'g1'", "'g2'", "'count': 1", "'count': 2"),
    ),
    (
        "two options for the rest",
        lambda: cues.merge("g", *[Graph(f"g{n}", [Source("a")], queues={"*": {"retention": n}}) for n in (1, 2)]),
        ("'a'", "'g1'", "'g2'"),
    ),
    (
        "two systems",
        lambda: cues.merge("g", Graph("l", [Source("a")], system=1), Graph("r", [Source("b")], system="s")),
        ("'l'", "'r'", "int", "str", "system="),
    ),
]


@pytest.mark.parametrize(
    ("build", "words"), [case[1:] for case in WRONG_MERGES], ids=[case[0] for case in WRONG_MERGES]
)
def test_graphs_that_cannot_be_merged_are_refused(build: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert " Try: " in text


def test_a_given_system_serves_both() -> None:
    parts = [Graph(f"g{n}", [Source(f"q{n}")], system=n) for n in range(2)]
    assert cues.merge("g", *parts, system="both").plan().system == "both"


# --- shapes -----------------------------------------------------------------------------------------

Edges = list[tuple[str, str, str]]


def shape(nodes: int, edges: Edges) -> Topology:
    return Topology(frozenset(f"n{n}" for n in range(nodes)), frozenset(edges))


def random_shape(chance: random.Random, nodes: int, queues: int, edges: int) -> Topology:
    return shape(
        nodes,
        [
            (f"n{chance.randrange(nodes)}", f"q{chance.randrange(queues)}", f"n{chance.randrange(nodes)}")
            for _ in range(edges)
        ],
    )


def renamed(found: Topology, chance: random.Random) -> Topology:
    """Under names drawn at random, some of which are the old ones of others."""
    queues = sorted({queue for _, queue, _ in found.edges})
    nodes = sorted(found.nodes)
    new = {"n": chance.sample(nodes, len(nodes)), "q": chance.sample([*queues, "q-new"], len(queues))}
    node, queue = dict(zip(nodes, new["n"])), dict(zip(queues, new["q"]))
    return Topology(frozenset(node.values()), frozenset((node[a], queue[q], node[b]) for a, q, b in found.edges))


def equal_under_some_renaming(one: Topology, two: Topology) -> bool:
    """By trying all of them."""
    queues = [sorted({queue for _, queue, _ in found.edges}) for found in (one, two)]
    if len(one.nodes) != len(two.nodes) or len(queues[0]) != len(queues[1]):
        return False
    return any(
        {(node[a], queue[q], node[b]) for a, q, b in one.edges} == two.edges
        for nodes in itertools.permutations(sorted(two.nodes))
        for node in [dict(zip(sorted(one.nodes), nodes))]
        for others in itertools.permutations(queues[1])
        for queue in [dict(zip(queues[0], others))]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_renaming_keeps_the_shape_and_another_edge_does_not(seed: int) -> None:
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    nodes = chance.randint(1, 30)
    found = random_shape(chance, nodes, chance.randint(1, 20), chance.randint(0, 60))
    other = renamed(found, chance)
    assert found.isomorphic(other) and other.isomorphic(found) and found.isomorphic(found)
    more = Topology(other.nodes, other.edges | {(min(other.nodes), "one more", max(other.nodes))})
    assert not found.isomorphic(more) and not more.isomorphic(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_small_shapes_are_compared_as_trying_all_renamings_does(seed: int) -> None:
    """Of the same counts, and often alike: an edge of a renamed copy is turned to another place."""
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    for _ in range(10):
        one = random_shape(chance, 4, 3, chance.randint(1, 6))
        two = renamed(one, chance)
        left = sorted(two.edges)
        left.pop(chance.randrange(len(left)))
        while len(left) < len(one.edges):
            edge = (f"n{chance.randrange(4)}", f"q{chance.randrange(3)}", f"n{chance.randrange(4)}")
            if edge not in left:
                left.append(edge)
        two = Topology(two.nodes, frozenset(left))
        assert one.isomorphic(two) == equal_under_some_renaming(one, two), (one, two)


def test_graphs_that_colours_alone_cannot_tell_apart() -> None:
    def ring(*names: int) -> Edges:
        return [(f"n{a}", f"q{a}", f"n{b}") for a, b in zip(names, (*names[1:], names[0]))]

    assert not shape(6, ring(0, 1, 2, 3, 4, 5)).isomorphic(shape(6, ring(0, 1, 2) + ring(3, 4, 5)))
    assert shape(6, ring(0, 1, 2) + ring(3, 4, 5)).isomorphic(shape(6, ring(0, 2, 4) + ring(1, 5, 3)))


def test_a_queue_with_two_readers_is_another_shape_than_two_queues() -> None:
    one = Graph("g", [Stream(clean, "a", "b", id="x"), *(Sink(clean, "b", id=id) for id in "yz")])
    two = Graph("g", [Stream(split, {"left": "a", "right": "a2"}, ["b", "c"], id="x"), Sink(clean, "b", id="y")])
    two.add(Sink(clean, "c", id="z"))
    assert len(one.topology().edges) == len(two.topology().edges) == 2
    assert not one.topology().isomorphic(two.topology())


def test_many_that_are_alike_take_a_try_each() -> None:
    fan = [Stream(clean, "a", "b", id="first"), *(Sink(clean, "b", id=f"s{n}") for n in range(60))]
    found = Graph("g", fan).topology()
    assert found.isomorphic(Graph("g", fan[::-1]).rebind({"b": "c"}, processors={"first": "last"}).topology())


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "REFINEMENTS_MAX", 3)
    found = Graph("g", [Sink(clean, "a", id=f"s{n}") for n in range(9)]).topology()
    with pytest.raises(Unsupported, match="9 nodes"):
        found.isomorphic(found)


def test_rebind_renames_what_an_imperative_function_reads_and_writes() -> None:
    def enrich(order: dict[str, Any], process: Any) -> None:
        rate = process.tailers["rates"].peek()
        process.appenders["log"].write({**order, **(rate or {})})

    part = Graph("part", [Stream(enrich, "orders", None, tailers=["rates"], appenders={"log": "audit"})])
    whole = part.rebind({"rates": "euro", "audit": "book"})
    node = whole.plan().node("enrich")
    assert [(port.binding, port.queue) for port in (*node.tailers, *node.appenders)] == [
        ("rates", "euro"),
        ("log", "book"),
    ]
    with testing.temporary_store() as store:
        store.queue("orders").appender().write({"n": 1})
        store.queue("euro").appender().write({"rate": 2})
        testing.run_until_idle(whole, store)
        assert testing.messages(store, "book") == [{"n": 1, "rate": 2}]
