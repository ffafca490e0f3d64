"""Graphs over partitioned queues: order by key, state, deaths, growing, what is refused, what the commands say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import queue_of
from terminal import cues as command

import cues
from cues import AnyOf, Graph, QueueOptions, Sink, Source, Stream, testing
from cues.base import events, names
from cues.engine.assembly import assemble
from cues.errors import AlreadyRunning, GraphError, ProcessorStopped, QueueOptionsError
from cues.queues.base import views_of
from cues.queues.partitioners import partition_for
from cues.storage import transaction

Message = dict[str, Any]


def parted(**partitions: int) -> dict[str, QueueOptions]:
    return {queue: QueueOptions(partitions=count, key="user") for queue, count in partitions.items()}


def counted(message: Message, process: Any) -> Message:
    """The state of a key: the number of its messages, and the last one."""
    state = process.state
    before = state.get("last", -1)
    state["count"] = state.get("count", 0) + 1
    state["last"] = message["n"]
    return {**message, "count": state["count"], "before": before, "unit": process.partition}


def counting(store: Any = None, **options: Any) -> Graph:
    return Graph(
        "g",
        [
            Stream(counted, "orders", "counts", key="user", batch_size=7, **options),
            Stream(lambda m: m, "counts", "out", id="copy"),
        ],
        queues=parted(orders=4, counts=3, out=2),
        store=store,
        durability="process",
    )


def by_key(messages: list[Message]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        found[message["user"]].append(message["n"])
    return found


def random_messages(rng: random.Random, count: int, keys: int) -> list[Message]:
    return [{"user": f"user-{rng.randrange(keys)}", "n": n} for n in range(count)]


def judge(messages: list[Message], queue: cues.Queue) -> None:
    """Every message once, each key's in its order, and its state what a state of that key alone would be."""
    found = [m for view in views_of(queue) for m in view.tailer()]
    assert by_key(found) == by_key(messages)
    for message in found:
        assert message["unit"] == partition_for(message["user"], 4)
    for series in defaultdict(list, {m["user"]: [o for o in found if o["user"] == m["user"]] for m in found}).values():
        assert [m["count"] for m in series] == list(range(1, len(series) + 1))
        assert [m["before"] for m in series] == [-1, *(m["n"] for m in series[:-1])]


@pytest.mark.parametrize("instances", [1, 3, 9])
def test_order_and_state_of_each_key_through_two_stages(tmp_path: Path, instances: int) -> None:
    seed = seeds.new()
    rng = random.Random(seed)
    messages = random_messages(rng, 1500, 40)
    with counting(tmp_path / "s", instances=instances).start() as running:
        rest = list(messages)
        while rest:
            count = rng.choice([1, 5, 100])
            queue_of(running, "orders").appender().write_many(rest[:count])
            del rest[:count]
        assert running.wait_idle(60)
        assert running.counters()["g.counted"].taken == 1500
        assert len(running.messages("out")) == 1500
        assert len(running.messages("orders/2")) == sum(partition_for(m["user"], 4) == 2 for m in messages)
        threads = {
            worker.thread.name for worker in running.engine.workers if worker.stepper.node.processor == "g.counted"
        }
        assert len(threads) == min(instances, 4)
    with cues.open(tmp_path / "s") as store:
        judge(messages, store.queue("out"))
        assert testing.check_attempts(store) == []
        assert store.check() == []


def test_messages_without_a_key_go_through_queues_that_ask_for_it(tmp_path: Path) -> None:
    """Each once; those of a key are where their key places them."""
    option = QueueOptions(partitions=3, key="user", partitioner="murmur2-sticky")
    graph = Graph(
        "g",
        [Stream(lambda m: m, "orders", "out", id="copy", batch_size=4)],
        queues={"orders": option, "out": option},
        store=tmp_path / "store",
        durability="process",
    )
    sent = [{"n": n} | ({"user": f"u{n}"} if n % 3 else {"user": None} if n % 2 else {}) for n in range(60)]
    with graph.start() as running:
        running.store.queue("orders").appender().write_many(sent)
        running.wait_idle()
        out = running.store.queue("out")
        assert out.options.partitioner == "murmur2-sticky"
        found = {n: testing.messages(running.store, f"out/{n}") for n in range(3)}
    assert sorted(message["n"] for messages in found.values() for message in messages) == list(range(60))
    for number, messages in found.items():
        keyed = [message["user"] for message in messages if message.get("user")]
        assert keyed and {partition_for(user, 3) for user in keyed} == {number}
        assert any(not message.get("user") for message in messages)


@pytest.mark.slow
def test_any_interleaving_of_units_and_restarts_gives_the_same(tmp_path: Path) -> None:
    """Many seeds: units take turns at random, the run ends after some steps, and another one continues."""
    seed = seeds.new()
    rng = random.Random(seed)
    for round in range(8):
        with cues.open(tmp_path / f"s{round}", durability="process") as store:
            graph = counting()
            messages = random_messages(rng, 150, 12)
            assemble(graph, store).close()
            rest = list(messages)
            while rest:
                count = rng.randint(1, 60)
                store.queue("orders").appender().write_many(rest[:count])
                del rest[:count]
                testing.run_until_idle(graph, store, seed=rng.randrange(1 << 30), steps_max=rng.randint(1, 20))
            testing.run_until_idle(graph, store, seed=1)
            judge(messages, store.queue("out"))
            assert testing.check_attempts(store) == []


GRAPH = """
import cues, sys

graph = cues.Graph("g", queues={
    "orders": cues.QueueOptions(partitions=4, key="user"),
    "counts": cues.QueueOptions(partitions=3, key="user"),
    "out": cues.QueueOptions(partitions=2, key="user"),
}, durability="process")

@graph.stream("orders", "counts", key="user", batch_size=7, instances=2)
def counted(message, process):
    state = process.state
    before = state.get("last", -1)
    state["count"] = state.get("count", 0) + 1
    state["last"] = message["n"]
    return {**message, "count": state["count"], "before": before, "unit": process.partition}

@graph.stream("counts", "out", batch_size=5)
def copy(message):
    return message

if __name__ == "__main__":
    with graph.start(store=sys.argv[1]) as running:
        print("running", flush=True)
        sys.stdin.read()
"""


def kill_loop(path: Path, kills: int, wait_s: Callable[[random.Random], float]) -> None:
    seed = seeds.new()
    rng = random.Random(seed)
    (path / "graph.py").write_text(GRAPH)
    store = path / "s"
    messages: list[Message] = []

    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "graph.py", str(store)], cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        return child

    child = start()
    try:
        with cues.open(store) as opened:
            appender = opened.queue("orders").appender()
            for _ in range(kills):
                for _ in range(rng.randint(1, 8)):
                    some = [
                        {"user": f"user-{rng.randrange(30)}", "n": len(messages) + i} for i in range(rng.randint(1, 80))
                    ]
                    appender.write_many(some)
                    messages += some
                time.sleep(wait_s(rng))
                child.kill()
                child.wait()
                child = start()
            child.communicate(b"", timeout=120)  # drains
            assert child.returncode == 0
            judge(messages, opened.queue("out"))
            assert testing.check_attempts(opened) == []
            assert opened.check() == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_kill_9_at_any_time_loses_and_repeats_nothing(tmp_path: Path) -> None:
    kill_loop(tmp_path, 5, lambda rng: rng.random() * 0.1)


@pytest.mark.long
def test_kill_9_at_any_time_loses_and_repeats_nothing_for_long(tmp_path: Path) -> None:
    kill_loop(tmp_path, 200, lambda rng: rng.random() * 0.3)


def test_a_unit_that_stops_leaves_the_others_going(tmp_path: Path) -> None:
    """No error queue: the unit of the message that fails stops in front of it, and nothing else does."""

    def fails(message: Message) -> Message:
        if message["n"] == 13:
            raise ValueError("thirteen")
        return message

    graph = Graph(
        "g",
        [Stream(fails, "orders", "out", batch_size=1)],
        queues=parted(orders=4),
        store=tmp_path / "s",
        durability="process",
    )
    messages = [{"user": f"user-{n % 8}", "n": n} for n in range(80)]
    bad = partition_for(messages[13]["user"], 4)
    running = graph.start()
    try:
        queue_of(running, "orders").appender().write_many(messages)
        with pytest.raises(ProcessorStopped, match="thirteen"):
            running.wait_idle(60)
        running.drain(60)  # the others continue until they have nothing left
    finally:
        running.close()
    with cues.open(tmp_path / "s") as store:
        done = sorted(m["n"] for m in store.queue("out").tailer())
        blocked = [m["n"] for m in messages if partition_for(m["user"], 4) == bad and m["n"] >= 13]
        assert done == sorted({m["n"] for m in messages} - set(blocked))


def test_errors_of_a_unit_are_on_one_partition_of_a_partitioned_error_queue(tmp_path: Path) -> None:
    def fails(message: Message) -> Message:
        raise ValueError(str(message["n"]))

    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph(
            "g", [Stream(fails, "orders", "out")], errors="errors", queues={"*": QueueOptions(partitions=3, key="user")}
        )
        assemble(graph, store).close()
        messages = [{"user": f"user-{n}", "n": n} for n in range(30)]
        store.queue("orders").appender().write_many(messages)
        testing.run_until_idle(graph, store)
        for number in range(3):
            found = [m["err.proc/messages"]["orders"][0] for m in store.queue("errors").partition(number).tailer()]
            assert found == list(store.queue("orders").partition(number).tailer())


def test_a_message_that_cannot_be_placed_is_a_failure_of_the_message_it_came_from(tmp_path: Path) -> None:
    """The output has no key: to the error queue, alone; the others of its step are written."""
    with cues.open(tmp_path / "s", durability="process") as store:
        for side_effects in (False, True):
            queue = f"in-{side_effects}"
            graph = Graph(
                f"g{side_effects}",
                [
                    Stream(
                        lambda m: {"x": m["n"]} if m["n"] == 3 else m,
                        queue,
                        "out",
                        id="copy",
                        side_effects=side_effects,
                    )
                ],
                errors="errors",
                queues=parted(out=4),
            )
            assemble(graph, store).close()
            store.queue(queue).appender().write_many([{"user": f"u{n}", "n": n} for n in range(6)])
            testing.run_until_idle(graph, store)
            assert sorted(m["n"] for m in store.queue("out").tailer()) == [0, 1, 2, 4, 5]
            (error,) = store.queue("errors").tailer()
            assert error["err.proc/messages"][queue][0]["n"] == 3
            assert "'user'" in error["err/cause"][0]["message"]
            store.queue("out").delete()
            store.queue("errors").delete()


def test_a_source_feeds_partitions_and_one_message_that_has_no_key_fails_alone(tmp_path: Path) -> None:
    def source(position: int | None) -> Any:
        for n in range(position or 0, 50):
            yield n + 1, {"n": n} if n == 20 else {"user": f"user-{n % 7}", "n": n}

    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph("g", [Source("orders", source, batch_size=9)], errors="errors", queues=parted(orders=4))
        testing.run_until_idle(graph, store, steps_max=3)
        testing.run_until_idle(graph, store)
        found = by_key(list(store.queue("orders").tailer()))
        assert found == by_key([{"user": f"user-{n % 7}", "n": n} for n in range(50) if n != 20])
        assert len(store.queue("errors")) == 1
        assert testing.check_attempts(store) == []


def test_a_queue_that_grew_gives_new_units_that_begin_at_its_start(tmp_path: Path) -> None:
    """A store from before there were partitions: its processor continues as unit 0, the others are fresh."""
    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph("g", [Stream(counted, "orders", "out", key="user")])
        assemble(graph, store).close()
        store.queue("orders").appender().write_many([{"user": f"user-{n % 9}", "n": n} for n in range(90)])
        testing.run_until_idle(graph, store)
        store.queue("orders", key="user").grow(4)
        store.queue("orders").appender().write_many([{"user": f"user-{n % 9}", "n": n} for n in range(90, 180)])
        report = testing.run_until_idle(graph, store)
        assert report.decisions == {
            "counted": "resume",
            "counted/1": "fresh",
            "counted/2": "fresh",
            "counted/3": "fresh",
        }
        assert any("3 more partitions" in event.text for event in report.events)
        assert sorted(m["n"] for m in store.queue("out").tailer()) == list(range(180))
        assert not any("more partitions" in event.text for event in testing.run_until_idle(graph, store).events)
        # What a graph says of the number holds when it is made, and is compared afterwards.
        shrunk = Graph("g", [Stream(counted, "orders", "out", key="user")], queues=parted(orders=3))
        with pytest.raises(QueueOptionsError, match="cannot have fewer"):
            testing.run_until_idle(shrunk, store)
        more = Graph("g", [Stream(counted, "orders", "out", key="user")], queues=parted(orders=5))
        with pytest.raises(QueueOptionsError, match="grow"):
            testing.run_until_idle(more, store)


@pytest.mark.parametrize("path", [None, "abroad"])
def test_units_that_a_processor_has_no_more_hold_nothing_back(tmp_path: Path, path: str | None) -> None:
    """It read four partitions and reads one queue now: retention does not wait for the other three any more."""
    queues = {"orders": QueueOptions(partitions=4, key="user", retention="read", path=path and str(tmp_path / path))}

    def made(queue: str) -> Graph:
        return Graph("g", [Sink(lambda m: None, queue, id="sink"), Source("orders")], queues=queues)

    with cues.open(tmp_path / "s", durability="process") as store:
        testing.run_until_idle(made("orders"), store)
        report = testing.run_until_idle(made("other"), store, accept_topology=True)
        assert report.decisions == {"sink": "fresh"}
        with store.core.view() as txn:
            assert [key for key, _ in transaction.rows(txn, names.processor_key(""))] == [names.processor_key("g.sink")]
            assert len(list(transaction.rows(txn, b"\0sub\0"))) == 1
        assert store.check() == []
        again = testing.run_until_idle(made("orders"), store, accept_topology=True)
        assert set(again.decisions) == {"sink", "sink/1", "sink/2", "sink/3"}
    if path:
        with cues.open(tmp_path / path) as store, store.core.view() as txn:
            assert len(list(transaction.rows(txn, names.LOW_WATERS))) == 4


@pytest.mark.parametrize("fed", [False, True])
def test_a_running_graph_takes_new_partitions_in(tmp_path: Path, fed: bool) -> None:
    """Input and output grow under a run: idle means that the new partitions are read too, by the same threads."""
    graph = counting(tmp_path / "s")
    messages = random_messages(random.Random(5), 400, 20)
    told: list[events.Event] = []
    with graph.start(listeners=(told.append,)) as running:
        queue_of(running, "orders").appender().write_many(messages[:200])
        with cues.open(tmp_path / "s") as store:
            store.queue("counts").grow(5)
            store.queue("orders").grow(9)
            if fed:  # by another process, after the last thing that the graph's own queues hear of
                store.queue("orders").appender().write_many(messages[200:])
        for message in () if fed else messages[200:]:
            running.send("orders", message)
        assert running.wait_idle(60)
        assert sorted(m["n"] for m in running.messages("out")) == list(range(400))
        units = [one.id for one in running.standings()]
        assert sorted(units) == sorted(
            ["g.counted", *(f"g.counted/{n}" for n in range(1, 9)), "g.copy", *(f"g.copy/{n}" for n in range(1, 5))]
        )
        assert (
            len({worker.thread for worker in running.engine.workers}) == 2
        )  # instances=1: a thread for each processor
    texts = [event.text for event in told]
    assert any("reads 5 more partitions from now on" in text for text in texts)
    assert any("reads 2 more partitions from now on" in text for text in texts)
    with cues.open(tmp_path / "s") as store:
        graph = counting()
        graph.queues |= {
            "counts": QueueOptions(partitions=5, key="user"),
            "orders": QueueOptions(partitions=9, key="user"),
        }
        assert not any(testing.run_until_idle(graph, store).steps.values())


def test_inputs_that_grow_one_after_the_other_meet_again(tmp_path: Path) -> None:
    """Between the two calls of grow() the inputs of a join do not fit: it waits, is not idle, and says so."""
    graph = Graph(
        "g",
        [Stream(lambda a, b: {"user": a["user"], "sum": a["n"] + b["n"]}, {"a": "x", "b": "y"}, "z", id="p")],
        queues=parted(x=2, y=2, z=1),
    )
    told: list[events.Event] = []
    with cues.open(tmp_path / "s") as store, graph.start(store=store, listeners=(told.append,)) as running:
        store.queue("x").grow(4)
        messages = [{"user": f"user-{n}", "n": n} for n in range(40)]
        store.queue("x").appender().write_many(messages)
        assert not running.wait_idle(0)
        store.queue("y").grow(4)
        store.queue("y").appender().write_many(messages)
        assert running.wait_idle(60)
        assert sorted(m["sum"] for m in running.messages("z")) == [2 * n for n in range(40)]


def test_a_start_of_several_processes_is_not_a_growth(tmp_path: Path) -> None:
    """One process has claimed the first unit before the other looks at its own."""
    graph = counting()
    told: list[events.Event] = []
    with cues.open(tmp_path / "s", durability="process") as store:
        first = assemble(graph, store, units=["g.counted", "g.copy"], emit=told.append)
        second = assemble(graph, store, units=["g.counted/1", "g.copy/1"], emit=told.append)
        first.close()
        second.close()
    assert not [event.text for event in told if "more partition" in event.text]


def test_each_unit_is_claimed_and_fenced_by_itself(tmp_path: Path) -> None:
    """Two starts that share a graph by its units; a second start of one of them is refused."""
    graph = counting()
    with cues.open(tmp_path / "s", durability="process") as store:
        whole = assemble(graph, store)
        units = [stepper.node.id for stepper in whole.steppers]
        assert units == [
            *("g.counted", "g.counted/1", "g.counted/2", "g.counted/3"),
            *("g.copy", "g.copy/1", "g.copy/2"),
        ]
        whole.close()
        first = assemble(graph, store, units=["g.counted", "g.counted/2", "g.copy"])
        with pytest.raises(AlreadyRunning, match=r"g\.counted/2"):
            assemble(graph, store, units=["g.counted/1", "g.counted/2"])
        second = assemble(graph, store, units=["g.counted/1", "g.counted/3", "g.copy/1", "g.copy/2"])
        assert {d.node.id for d in first.steppers} == {"g.counted", "g.counted/2", "g.copy"}
        messages = random_messages(random.Random(1), 100, 20)
        store.queue("orders").appender().write_many(messages)
        steppers = [*first.steppers, *second.steppers]
        while any(stepper.step() == "committed" for stepper in steppers):
            pass
        first.close()
        second.close()
        judge(messages, store.queue("out"))
        with store.core.view() as txn:
            for unit in units:
                assert txn.get(names.processor_key(unit)) is not None
                assert txn.get(names.topology_key(unit)) is not None


def test_a_seek_of_one_unit_moves_only_that(tmp_path: Path) -> None:
    from cues.steps.ownership import seek

    with counting(tmp_path / "s").start() as running:
        queue_of(running, "orders").appender().write_many(random_messages(random.Random(2), 100, 20))
        assert running.wait_idle(60)
        held = len(queue_of(running, "orders").partition(2))
        seek(running.store, "g.counted/2", {"g.counted.orders/2": 1})
        assert running.wait_idle(60)
        assert len(running.messages("counts")) == 100 + held


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Stream(lambda a, b: a, {"a": "x", "b": "y"}, "z", id="p"), ("'x' (4 partitions", "'y' (1 partition)")),
        (lambda: Sink(print, AnyOf(a="x", b="y"), id="p"), ("'x' (4 partitions", "'y' (1 partition)")),
        (
            lambda: Sink(lambda m, process: None, "x", id="p", tailers={"other": "y"}),
            ("'x' (4 partitions", "'y' (1 partition)"),
        ),
        (lambda: Sink(print, "y", id="p", instances=2), ("instances=2", "one partition")),
    ],
)
def test_a_processor_that_does_not_fit_the_partitions_of_the_store_is_refused_by_name(
    tmp_path: Path, build: Callable[[], Any], words: tuple[str, ...]
) -> None:
    """The graph says nothing of partitions; the queue was made with four."""
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("x", partitions=4, key="user")
        with pytest.raises(GraphError) as caught:
            assemble(Graph("g", [build()]), store)
        assert all(word in str(caught.value) for word in words), caught.value


def test_joins_meet_partition_by_partition_whatever_the_names_of_the_keys(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph(
            "g",
            [Stream(lambda a, b: {"a": a["user"], "b": b["who"]}, {"a": "x", "b": "y"}, "z", id="join")],
            queues={"x": QueueOptions(partitions=3, key="user"), "y": QueueOptions(partitions=3, key="who")},
        )
        assemble(graph, store).close()
        users = [f"user-{n}" for n in range(30)]
        store.queue("x").appender().write_many([{"user": user} for user in users])
        store.queue("y").appender().write_many([{"who": user} for user in users])
        testing.run_until_idle(graph, store)
        found = list(store.queue("z").tailer())
        assert sorted(m["a"] for m in found) == sorted(users)
        assert all(m["a"] == m["b"] for m in found)


def test_partitions_in_another_store(tmp_path: Path) -> None:
    graph = Graph(
        "g",
        [Stream(counted, "orders", "out", key="user", batch_size=5)],
        queues={
            "orders": QueueOptions(partitions=4, key="user", path=str(tmp_path / "abroad"), retention="read"),
            "out": QueueOptions(partitions=2, key="user", path=str(tmp_path / "abroad")),
        },
        store=tmp_path / "home",
        durability="process",
    )
    messages = random_messages(random.Random(3), 200, 20)
    with graph.start() as running:
        queue_of(running, "orders").appender().write_many(messages)
        assert running.wait_idle(60)
    with cues.open(tmp_path / "abroad") as store:
        judge(messages, store.queue("out"))
        assert store.check() == []


def test_functions_that_place_messages_abroad_are_the_graphs_and_change_nothing(tmp_path: Path) -> None:
    def last_digit(message: Message) -> str:
        return str(message["n"])[-1]

    def made() -> Graph:
        options = QueueOptions(partitions=3, key=last_digit, path=str(tmp_path / "abroad"))
        return Graph("g", [Stream(lambda m: m, "in", "out", id="copy")], queues={"out": options})

    with cues.open(tmp_path / "home", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(40)])
        testing.run_until_idle(made(), store)
        store.queue("in").appender().write_many([{"n": n} for n in range(40, 80)])
        report = testing.run_until_idle(made(), store)
        assert not [event.text for event in report.events if "changed" in event.text]
    with cues.open(tmp_path / "abroad") as store:
        for number, view in enumerate(views_of(store.queue("out"))):
            found = [m["n"] for m in view.tailer()]
            assert found == [n for n in range(80) if partition_for(str(n)[-1], 3) == number]


def test_an_imperative_function_reads_its_own_partition_and_writes_to_any(tmp_path: Path) -> None:
    def look(message: Message, process: Any) -> None:
        rate = process.tailers["rate"].read()
        process.appenders["log"].write({"user": message["user"], "n": message["n"], "rate": rate and rate["n"]})
        process.appenders["log"].write({"user": "all", "n": message["n"], "rate": None})

    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph(
            "g",
            [Stream(look, "orders", None, tailers={"rate": "rates"}, appenders="log", batch_size=4)],
            queues=parted(orders=3, rates=3, log=2),
        )
        assemble(graph, store).close()
        users = [f"user-{n % 11}" for n in range(60)]
        store.queue("rates").appender().write_many([{"user": user, "n": n} for n, user in enumerate(users)])
        store.queue("orders").appender().write_many([{"user": user, "n": n} for n, user in enumerate(users)])
        testing.run_until_idle(graph, store)
        found = [m for m in store.queue("log").tailer() if m["user"] != "all"]
        assert by_key(found) == by_key([{"user": user, "n": n} for n, user in enumerate(users)])
        assert all(m["rate"] == m["n"] for m in found)  # both queues were placed alike
        assert len(store.queue("log").partition(partition_for("all", 2))) >= 60


@pytest.mark.parametrize("wrong", [False, True])
def test_a_batch_function_writes_more_than_it_took_to_any_partition(tmp_path: Path, wrong: bool) -> None:
    def spread(messages: list[Message]) -> list[Message]:
        last = [{"n": -1}] if wrong and any(m["n"] == 5 for m in messages) else []
        return [{"user": f"{m['user']}-{part}", "n": m["n"]} for m in messages for part in range(5)] + last

    with cues.open(tmp_path / "s", durability="process") as store:
        graph = Graph(
            "g",
            [Stream(spread, "orders", "out", batch=True, batch_size=3)],
            errors="errors",
            queues=parted(orders=2, out=4),
        )
        assemble(graph, store).close()
        messages = [{"user": f"user-{n % 3}", "n": n} for n in range(12)]
        store.queue("orders").appender().write_many(messages)
        testing.run_until_idle(graph, store)
        failed = [m["n"] for e in store.queue("errors").tailer() for m in e["err.proc/messages"]["orders"]]
        assert (5 in failed) is wrong and len(failed) <= 3
        expected = [m for m in messages if m["n"] not in failed]
        for number, view in enumerate(views_of(store.queue("out"))):
            assert all(partition_for(m["user"], 4) == number for m in view.tailer())
        assert by_key(list(store.queue("out").tailer())) == by_key(
            [{"user": f"{m['user']}-{part}", "n": m["n"]} for m in expected for part in range(5)]
        )


@pytest.mark.slow
def test_the_commands_understand_partitions(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(GRAPH)

    def run(*arguments: str, code: int = 0, text: str = "") -> list[Any]:
        found = command(*arguments, stdin=text, cwd=tmp_path, CUES_STORE=str(tmp_path / "s"))
        assert found.code == code, found.err
        if code:
            return [found.err]
        return [json.loads(line) for line in found.out.splitlines()]

    lines = "".join(json.dumps({"user": f"user-{n % 10}", "n": n}) + "\n" for n in range(40))
    (sent,) = run("send", "graph.py#orders", "--create", text=lines)
    assert sent["partitions"] == sorted({partition_for(f"user-{n}", 4) for n in range(10)})
    summary = run("run", "graph.py", "--idle-exit", "0.3")[-1]
    assert summary["processors"]["g.counted"]["taken"] == 40
    assert summary["queues"]["out"]["new"] == 40
    alone = [m["n"] for number in range(4) for m in run("tail", f"graph.py#orders/{number}", "-n", "all")]
    assert sorted(m["n"] for m in run("tail", "graph.py#orders", "-n", "all")) == sorted(alone) == list(range(40))
    assert len(run("tail", "graph.py#out", "-n", "7")) == 7
    assert run("tail", "graph.py#out/1", "-n", "1", "--meta")[0]["q/meta"]["q/queue"]["out/1"]["q/t"] > 0
    assert "belongs to one" in run("tail", "graph.py#out", "--from", "3", code=2)[0]
    assert "no partition 4" in run("tail", "graph.py#orders/4", code=1)[0]
    listed = {row["queue"]: row for row in run("queues", "graph.py")}
    assert listed["orders"]["messages"] == 40
    assert listed["orders"]["partitions"] == 4
    assert sum(row["messages"] for row in run("queues", "graph.py#orders")[1:]) == 40
    units = [row["processor"] for row in run("status", "graph.py", "--json") if "processor" in row]
    assert units == ["g.counted", "g.counted/1", "g.counted/2", "g.counted/3", "g.copy", "g.copy/1", "g.copy/2"]
    full = next(n for n in range(1, 4) if listed and run("tail", f"graph.py#orders/{n}", "-n", "1"))
    assert run("tries", f"graph.py#counted/{full}")[0]["q.try/tailer-indices"] == {f"g.counted.orders/{full}": 1}
    assert "index belongs to one" in run("seek", "graph.py#counted", "--to", "2", "--yes", code=2)[0]
    assert run("seek", f"graph.py#counted/{full}", "--to", "1", "--yes")[0]["processor"] == f"g.counted/{full}"
    assert len(run("seek", "graph.py#counted", "--to", "end", "--yes")) == 4
    assert run("check", "graph.py")[0]["problems"] == 0
    run("compact", "graph.py")
    assert "has 12 messages" in run("compact", "graph.py", "--remove", "orders", "--yes", code=1)[0]
    (shown,) = [row for row in run("show", "graph.py", "--json") if row["processor"] == "g.counted"]
    assert shown["partitions"] == 4


def test_an_idle_unit_wakes_for_its_own_partition(tmp_path: Path) -> None:
    """One thread sleeps on all its partitions; a message on any of them wakes it."""
    seen = threading.Event()
    graph = Graph(
        "g",
        [Sink(lambda m: seen.set(), "orders", id="sink")],
        queues=parted(orders=6),
        store=tmp_path / "s",
        durability="process",
    )
    with graph.start() as running:
        for number in range(6):
            assert running.wait_idle(30)
            seen.clear()
            running.send(f"orders/{number}", {"n": number})
            assert seen.wait(30)


@pytest.mark.interpreted
def test_a_queue_that_grows_while_somebody_asks_whether_the_graph_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new partition gets its worker between two lines of the answer."""
    graph = Graph("g", [Stream(lambda m: m, "x", "y", id="p")], queues=parted(x=2, y=2))
    with cues.open(tmp_path / "s") as store, graph.start(store=store) as running:
        engine: Any = running.engine
        view = store.core.view

        def grown() -> Any:
            monkeypatch.undo()
            store.queue("x").grow(4)
            deadline = time.monotonic() + 60
            while len(engine.workers) < 4 and time.monotonic() < deadline:
                time.sleep(0.001)
            return view()

        monkeypatch.setattr(store.core, "view", grown)
        engine.idle()  # without an error
        assert len(engine.workers) == 4
        assert running.wait_idle(60)
