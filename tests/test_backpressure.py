"""Backpressure: writers of a queue with max_lag or max_bytes wait for its readers, visibly, and never for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import cues
from cues import testing
from cues.cli.app import run as cli
from cues.errors import GraphError, InvalidArgument, QueueFull
from cues.queues import backpressure

LIMIT_S = 60.0
BOUND = cues.QueueOptions(max_lag=10)


def await_true(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.01)


def numbers(count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(count)]


@pytest.fixture
def store(tmp_path: Path):
    with cues.open(tmp_path / "store", durability="process", map_size=64 << 20) as opened:
        yield opened
        if not opened.closed:
            assert opened.check() == []


# --- options ------------------------------------------------------------------------------------


def test_the_bounds_are_kept_with_the_queue(store: cues.Store) -> None:
    store.queue("orders", max_lag=5, max_bytes="1MB")
    options = store.queue("orders").options
    assert (options.max_lag, options.max_bytes) == (5, 10**6)
    assert not store.queue("free").options.bounded


@pytest.mark.parametrize("wrong", [{"max_lag": 0}, {"max_lag": 1.5}, {"max_lag": True}, {"max_bytes": 0}])
def test_a_bound_without_room_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        cues.QueueOptions(**wrong)  # type: ignore[arg-type]


def test_a_timeout_that_is_no_time_is_refused(store: cues.Store) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        store.queue("orders").appender(timeout=-1)


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"max_lag": 10}, {"max_bytes": "4KB"}])
def test_a_write_without_room_names_the_reader_and_writes_nothing(store: cues.Store, bound: dict[str, object]) -> None:
    queue = store.queue("orders", **bound)  # type: ignore[arg-type]
    appender = queue.appender(timeout=0)
    appender.write_many([{"n": n, "text": "x" * 500} for n in range(50)])  # nobody reads: nobody to wait for
    reader = queue.tailer("billing")
    assert reader.read() == {"n": 0, "text": "x" * 500}
    with pytest.raises(QueueFull, match=r"billing has not read 49 messages of orders .*Nothing was written") as full:
        appender.write({"n": 50})
    assert (full.value.queue, full.value.readers) == ("orders", ["billing"])
    assert "tailer('billing').to_end()" in full.value.hint
    assert len(queue) == 50
    with pytest.raises(QueueFull):
        appender.write_many([{"n": 50}, {"n": 51}])
    with pytest.raises(QueueFull):
        queue.appender(timeout=0.05).write({"n": 50})
    reader.to_end()  # as the hint says
    assert appender.write({"n": 50}) == 51


def test_a_write_waits_until_its_reader_has_read(store: cues.Store) -> None:
    queue = store.queue("orders", max_lag=10)
    reader = queue.tailer("billing")
    queue.appender().write({"n": 0})
    assert reader.read() == {"n": 0}
    behind: list[int] = []
    writer = threading.Thread(target=lambda: [queue.appender().write({"n": n}) for n in range(1, 60)])
    writer.start()
    try:
        for n in range(1, 60):
            assert reader.read(block=True, timeout=LIMIT_S) == {"n": n}
            behind.append(queue.last_index - n - 1)
    finally:
        queue.close()  # ends the writer if it waits
        writer.join(LIMIT_S)
    assert max(behind) <= 10


def test_a_partition_without_room_stops_the_writers_of_the_queue(store: cues.Store) -> None:
    queue = store.queue("orders", partitions=2, partitioner="round-robin", max_lag=3)
    for part in (queue.partition(0), queue.partition(1)):
        part.tailer("billing").to_start()
    queue.partition(1).appender(timeout=0).write_many(numbers(3))
    with pytest.raises(QueueFull, match="orders/1"):
        queue.appender(timeout=0).write({"n": 1})
    assert queue.partition(0).appender(timeout=0).write({"n": 1}) == 1


def test_a_reader_of_committed_messages_is_not_late_for_pending_ones(store: cues.Store) -> None:
    """A transaction that is larger than the bound must be able to end: nobody can read it before."""
    from cues.txn import Publisher

    queue = store.queue("orders", max_lag=3)
    queue.tailer("billing", isolation="committed").to_start()
    with Publisher() as publisher:
        for n in range(20):
            publisher.publish_uncommitted(lambda message: queue, {"n": n}, timeout=LIMIT_S)
        publisher.append_ack_intents(publisher.build_ack_intents())
        with pytest.raises(QueueFull):
            publisher.publish_uncommitted(lambda message: queue, {"n": 20}, timeout=0.05)


def test_a_transaction_does_not_wait_for_itself(store: cues.Store) -> None:
    queue = store.queue("orders", max_lag=5)
    queue.appender().write_many(numbers(20))
    for _ in range(20):
        with store.transaction() as transaction:
            message = transaction.tailer("orders", "mover").read()
            assert message is not None
            transaction.write("orders", {"n": message["n"] + 100})
    assert [message["n"] for message in testing.messages(store, "orders")][20:] == list(range(100, 120))


def test_a_transaction_waits_before_its_commit(store: cues.Store) -> None:
    orders, invoices = store.queue("orders"), store.queue("invoices", max_lag=1)
    orders.appender().write({"n": 1})
    reader = invoices.tailer("print")
    reader.to_start()
    invoices.appender().write({"n": 0})
    done: list[int] = []

    def bill() -> None:
        with store.transaction() as transaction:
            message = transaction.tailer("orders", "billing").read()
            assert message is not None
            transaction.write("invoices", message)
        done.append(1)

    thread = threading.Thread(target=bill)
    thread.start()
    try:
        await_true(lambda: any(note.edges for note in backpressure.notes(store.directory)), "the note of the wait")
        assert not done
        assert orders.appender().write({"n": 2}) == 2  # the wait holds no transaction
        assert len(invoices) == 1
    finally:
        reader.to_end()
        thread.join(LIMIT_S)
    assert done == [1] and len(invoices) == 2


# --- graphs -------------------------------------------------------------------------------------


def line(count: int, **queues: cues.QueueOptions) -> cues.Graph:
    graph = cues.Graph("line", queues=queues)

    @graph.source("a", resume="skip")
    def feed():
        yield from numbers(count)

    @graph.stream("a", "b")
    def copy(message):
        return message

    return graph


def test_no_queue_of_a_graph_exceeds_its_bound(store: cues.Store) -> None:
    graph = line(300, a=BOUND, b=BOUND)
    high: dict[str, int] = {"a": 0, "b": 0}
    read: list[int] = []

    def look() -> None:
        with store.core.view() as txn:
            for name in high:
                for lag in backpressure.lags(txn, store.queue(name).core.log):
                    high[name] = max(high[name], lag.behind)

    @graph.sink("b")
    def keep(message):
        look()
        read.append(message["n"])

    with graph.start(store=store) as running:
        assert running.wait_done()
    assert read == list(range(300))
    assert 0 < high["a"] <= 10 and 0 < high["b"] <= 10
    assert backpressure.notes(store.directory) == []


def test_a_processor_that_reads_what_it_writes_goes_on(store: cues.Store) -> None:
    graph = cues.Graph("loop", queues={"todo": cues.QueueOptions(max_lag=2)})

    @graph.stream("todo", "todo")
    def halve(message):
        return [{"n": message["n"] // 2}, {"n": message["n"] // 2}] if message["n"] > 1 else None

    store.queue("todo", max_lag=2).appender().write({"n": 32})
    with graph.start(store=store) as running:
        assert running.wait_idle(LIMIT_S)
    assert len(store.queue("todo")) == 63


def ring(name: str, read: str, written: str) -> cues.Graph:
    graph = cues.Graph(name, queues={read: BOUND, written: BOUND})

    @graph.stream(read, written, batch_size=5)
    def hop(message):
        return {"n": message["n"], "left": message["left"] - 1} if message["left"] else None

    return graph


@pytest.mark.slow
def test_a_cycle_of_graphs_goes_on_with_full_queues(store: cues.Store) -> None:
    """Each graph waits for the other one: both find it out by their notes, and write."""
    for name in "ab":
        queue = store.queue(name, max_lag=10)
        queue.appender().write_many([{"n": n, "left": 3} for n in range(40)])
    with ring("there", "a", "b").start(store=store) as one, ring("back", "b", "a").start(store=store) as two:
        deadline = time.monotonic() + LIMIT_S
        while not (one.wait_idle(1) and two.wait_idle(1) and one.idle()):
            assert time.monotonic() < deadline, "the cycle does not go on"
        assert len(store.queue("a")) == len(store.queue("b")) == 40 * 4


@pytest.mark.slow
def test_a_cycle_of_graphs_in_two_stores_goes_on(tmp_path: Path) -> None:
    """The queues of each graph are the inputs of the other one, and each store is the home of one graph."""

    def graph(name: str, other: str, read: str, written: str) -> cues.Graph:
        there = str(tmp_path / other)
        graph = cues.Graph(name, queues={read: BOUND, written: cues.QueueOptions(max_lag=10, path=there)})

        @graph.stream(read, written, batch_size=5)
        def hop(message):
            return {"left": message["left"] - 1} if message["left"] else None

        return graph

    for name, queue in (("one", "a"), ("two", "b")):
        with cues.open(tmp_path / name, durability="process", map_size=64 << 20) as made:
            made.queue(queue, max_lag=10).appender().write_many([{"left": 3}] * 40)
    there, back = graph("there", "two", "a", "b"), graph("back", "one", "b", "a")
    with there.start(store=tmp_path / "one") as one, back.start(store=tmp_path / "two") as two:
        count = lambda: (len(one.store.queue("a")), len(two.store.queue("b")))  # noqa: E731
        await_true(lambda: count() == (160, 160), f"the end of the cycle: {count()}")


def test_a_join_without_messages_on_one_input_does_not_stop_the_other(store: cues.Store) -> None:
    """The source writes a whole side first. If it waited for the join, the join would wait for it."""
    graph = cues.Graph("pairs", queues={"left": BOUND, "right": BOUND, "both": BOUND})

    @graph.source("both", resume="skip")
    def feed():
        yield from ({"side": side, "n": n} for side in ("left", "right") for n in range(50))

    @graph.stream("both", {"left": "left", "right": "right"})
    def divide(message):
        return {message["side"]: message}

    @graph.stream({"one": "left", "other": "right"}, "pairs")
    def join(one, other):
        return {"n": one["n"] + other["n"]}

    with graph.start(store=store) as running:
        assert running.wait_done()
    assert [message["n"] for message in testing.messages(store, "pairs")] == [2 * n for n in range(50)]


@pytest.mark.slow
def test_a_source_waits_for_a_reader_that_is_dead_until_it_is_given_up(
    store: cues.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = line(100, b=BOUND)
    dead = store.queue("b", max_lag=10).tailer("dead")
    dead.to_start()
    with graph.start(store=store) as running:
        await_true(lambda: backpressure.notes(store.directory), "the note of the wait")
        (note,) = backpressure.notes(store.directory)
        assert (note.writer, note.pid) == ("line.copy", os.getpid())
        assert [(edge.queue, edge.reader) for edge in note.edges] == [("b", "dead")]
        assert cli(["status", store.directory, "--table"]) == 0
        text = capsys.readouterr().out
        assert "line.copy waits for readers: dead has not read 10 messages of b (max_lag=10)" in text
        assert "tailer('dead').to_end()" in text
        assert cli(["status", store.directory, "--json"]) == 0
        (wait,) = json.loads(capsys.readouterr().out.splitlines()[0])["waits"]
        assert wait["edges"][0]["reader"] == "dead"
        assert not running.idle() and len(store.queue("b")) == 10
        while not running.wait_idle(0.2):
            dead.to_end()
    assert [message["n"] for message in testing.messages(store, "b")] == list(range(100))
    assert backpressure.notes(store.directory) == []


@pytest.mark.slow
def test_the_warning_comes_once(store: cues.Store) -> None:
    said: list[str] = []
    graph = line(50, b=BOUND)
    reader = store.queue("b", max_lag=10).tailer("late")
    reader.to_start()
    with graph.start(store=store, listeners=(lambda event: said.append(event.text),)) as running:
        await_true(lambda: [text for text in said if "waits for readers" in text], "the warning")
        while not running.wait_idle(0.2):
            reader.to_end()
    assert len([text for text in said if "waits for readers" in text]) == 1
    assert running.counters()["line.copy"].waited_s >= 1.0


def test_a_run_in_one_thread_ends_where_a_reader_is_missing(store: cues.Store) -> None:
    store.queue("b", max_lag=10).tailer("dead").to_start()
    store.queue("b").appender().write_many(numbers(5))  # room for half a step
    testing.run_until_idle(line(100, a=BOUND, b=BOUND), store)
    assert (len(store.queue("b")), len(store.queue("a"))) == (10, 15)
    store.queue("b").tailer("dead").to_end()


@pytest.mark.parametrize("point", ["take.after", "commit.inside", "commit.after"])
def test_a_death_at_a_full_queue_loses_and_repeats_nothing(store: cues.Store, point: str) -> None:
    graph = line(60, a=BOUND, b=BOUND)
    reader = store.queue("b", max_lag=10).tailer("late")
    reader.to_start()
    for hit in range(1, 40):
        with suppress(testing.Crashed), testing.crash(point, 1 + hit % 2, "raise"):
            testing.run_until_idle(graph, store)
        reader.to_end()
    testing.run_until_idle(graph, store)
    assert [message["n"] for message in testing.messages(store, "b")] == list(range(60))


def test_a_shared_directory_refuses_the_bounds() -> None:
    engine = pytest.importorskip("cues.spark.cluster.engine")
    with pytest.raises(GraphError, match=r"'b' has max_lag= or max_bytes="):
        engine.check(line(1, b=BOUND).plan())


READER = """
    import sys, cues
    graph = cues.Graph("slow", queues={"b": cues.QueueOptions(max_lag=10)})
    @graph.stream("b", "c")
    def copy(message):
        return message
    print("ready", flush=True)
    with graph.start(store=sys.argv[1]) as running:
        running.wait_done()
"""


@pytest.mark.slow
def test_readers_killed_while_a_writer_waits(tmp_path: Path) -> None:
    """The writer waits for a dead process, goes on with the next one, and every message arrives once."""
    path = tmp_path / "store"
    graph = line(400, a=BOUND, b=BOUND)
    with cues.open(path, durability="process", map_size=64 << 20) as store:
        store.queue("b", max_lag=10)
        store.queue("c")
        readers: list[subprocess.Popen[bytes]] = []

        def reader() -> subprocess.Popen[bytes]:
            child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(READER), str(path)], stdout=subprocess.PIPE)
            readers.append(child)
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            return child

        try:
            child = reader()

            def claimed() -> bool:
                with store.core.view() as txn:
                    return bool(list(backpressure.lags(txn, store.queue("b").core.log)))

            await_true(claimed, "the first reader")
            with graph.start(store=store) as running:
                for share in (50, 150, 250):
                    await_true(lambda share=share: len(store.queue("c")) >= share, f"{share} messages")
                    with suppress(ProcessLookupError):
                        child.send_signal(signal.SIGKILL)
                    child.wait(LIMIT_S)
                    assert store.queue("b").last_index - len(store.queue("c")) <= 10
                    child = reader()
                assert running.wait_done()
            await_true(lambda: len(store.queue("c")) == 400, "all messages")
        finally:
            for process in readers:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait(LIMIT_S)
                if process.stdout is not None:
                    process.stdout.close()
        assert [message["n"] for message in testing.messages(store, "c")] == list(range(400))
