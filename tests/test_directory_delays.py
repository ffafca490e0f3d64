"""Delayed messages in a shared directory: what the embedded engine leaves, whatever dies. No Spark, no Java.

A round of a play moves the clock, sends messages, and lets the graph run until it has nothing to do.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import pyarrow as pa
import seeds
import terminal
from directory_steps import DriverRun, FaultyFiles, HostRun, Message, TimedDeaths, messages_of
from sets import slow_except

import cues
from cues import AnyOf, Frame, Graph, QueueOptions, Sink, Source, Stream, codec, faults, testing
from cues.base import clock
from cues.errors import Diverged, Fenced, TopologyChanged, Unsupported
from cues.records.provenance import Provenance
from cues.spark.cluster import delays, inspection, operations
from cues.spark.cluster.data import Writer
from cues.spark.cluster.files import LocalFiles
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.publish import publish

START = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


# --- graphs -------------------------------------------------------------------------------------


def due_ns(n: int) -> int:
    """The time of a message: two of three have one, some of them the same."""
    return clock.to_ns(START + timedelta(seconds=n * 7 % 10 * 10 + (n >= 20) * 135)) if n % 3 else 0


def later(message: Message) -> Any:
    at = due_ns(message["n"])
    return cues.delayed(message, deliver_at=clock.to_datetime(at)) if at else message


def told(message: Message, process: Any) -> Message:
    at = process.metadata.get("q/deliver-at")
    early = at is not None and at > clock.to_datetime(clock.now_ns())
    return {"n": message["n"], "at": at, "index": process.index, "early": early, "from": process.binding}


def counted(message: Message, process: Any) -> Message:
    process.state["count"] = process.state.get("count", 0) + 1
    return {"n": message["n"], "count": process.state["count"]}


def by_four(message: Message) -> int:
    return message["n"] % 4  # type: ignore[no-any-return]


def each(messages: list[Message], process: Any) -> list[Message]:
    return [{"n": m["n"], "index": index} for m, index in zip(messages, process.indices)]


def rows(table: pa.Table, process: Any) -> pa.Table:
    return table.select(["n"]).append_column("index", pa.array(process.indices, pa.int64()))


def pairs(left: Message, right: Message, process: Any) -> Message:
    return {"left": left["n"], "right": right["n"], "index": sorted(process.index.items())}


def picky(message: Message, process: Any) -> Message:
    if message["n"] % 5 == 1:
        raise ValueError(f"not {message['n']}")
    return told(message, process)


def graph_of(*processors: Any, **options: Any) -> Callable[[], Graph]:
    sources = [Source("in"), Stream(later, "in", "mid", id="later")]
    return lambda: Graph("g", [*sources, *processors], durability="process", errors="errors", **options)


KINDS: dict[str, Callable[[], Graph]] = {
    "stream": graph_of(Stream(told, "mid", "out")),
    "two streams": graph_of(Stream(told, "mid", "next"), Stream(told, "next", "out", id="last")),
    "sent": graph_of(Stream(told, "in", "out")),
    "delayed twice": graph_of(
        Stream(lambda m: cues.delayed(m, deliver_at=START + timedelta(seconds=300)), "mid", "next", id="again"),
        Stream(told, "next", "out"),
    ),
    "keyed state": graph_of(Stream(counted, "mid", "out", key=by_four)),
    "state of the processor": graph_of(Stream(counted, "mid", "out")),
    "batch function": graph_of(Stream(each, "mid", "out", batch=True, batch_size=4)),
    "tables": graph_of(Stream(rows, "mid", "out", batch="arrow", batch_size=4)),
    "join": graph_of(Stream(pairs, {"left": "in", "right": "mid"}, "out")),
    "any of": graph_of(Stream(told, AnyOf("mid", "in"), "out")),
    "errors": graph_of(Stream(picky, "mid", "out", retries=cues.Retry(2, 0.0))),
    "side effects": graph_of(Stream(told, "mid", "out", side_effects=True)),
    "at most once": graph_of(Stream(told, "mid", "out", strategy="at-most-once")),
    "partitions": graph_of(
        Stream(counted, "mid", "out", key="n"), queues={name: QueueOptions(partitions=3, key="n") for name in ("mid",)}
    ),
    "provenance": graph_of(Stream(told, "mid", "out"), queues={"mid": QueueOptions(metadata=True)}),
}
SOME_ORDER = ("keyed state", "any of", "partitions")
"""Kinds in which messages of different keys, or of different queues, are in no order."""
PLAY = [(0, 20), (5, 0), (15, 0), (15, 0), (40, 0), (50, 0), (10, 20), (10, 0), (100, 0), (100, 0)]
"""Seconds, and the number of messages that are sent then."""


def play(kind: str, store: Path, run: Callable[[], object]) -> None:
    """Play all rounds. ``run`` runs the graph until it has nothing to do. Nothing is due when messages are sent."""
    with testing.Clock(START) as hands:
        n = itertools.count()
        for seconds, count in PLAY:
            hands.advance(seconds)
            if count:
                with cues.open(store, durability="process") as opened:
                    appender = opened.queue("in").appender()
                    for number in itertools.islice(n, count):
                        wait = f"{number % 5 * 10}s" if kind == "sent" and number % 3 else None
                        appender.write({"n": number}, delay=wait)
            run()


def left(messages: dict[str, list[Message]], ordered: bool) -> dict[str, list[Any]]:
    """The messages, without the traces and the times of errors."""
    found = {}
    for queue, some in messages.items():
        plain = [{"failed": m["err.proc/messages"]} if "err.proc/messages" in m else m for m in some]
        found[queue] = plain if ordered else sorted(plain, key=repr)
    return found


QUEUES = ("in", "mid", "next", "out", "errors")


def by_embedded(kind: str, store: Path) -> dict[str, list[Message]]:
    def run() -> None:
        with cues.open(store, durability="process") as opened:
            testing.run_until_idle(KINDS[kind](), opened)

    play(kind, store, run)
    with cues.open(store) as opened:
        return {queue: testing.messages(opened, queue) for queue in QUEUES if queue in opened.queues()}


def by_directory(kind: str, files: LocalFiles, store: Path) -> dict[str, list[Message]]:
    host: list[HostRun] = []

    def run() -> None:
        if not host:
            host.append(HostRun(files, KINDS[kind](), store, 2, lambda: 7))
            host[0].feeder.claim()
            host[0].claim()
        host[0].run()

    play(kind, store, run)
    host[0].close()
    return {queue: messages_of(host[0].queues[queue]) for queue in QUEUES if queue in host[0].queues}


@pytest.mark.parametrize("kind", slow_except(["join"], KINDS))
def test_a_directory_has_what_the_embedded_engine_leaves(kind: str, files: FaultyFiles, tmp_path: Path) -> None:
    ordered = kind not in SOME_ORDER
    expected = left(by_embedded(kind, tmp_path / "embedded"), ordered)
    found = left(by_directory(kind, files, tmp_path / "store"), ordered)
    assert any(expected.values())
    for queue, messages in expected.items():
        assert found[queue] == messages, queue
    assert not any(message.get("early") for message in found["out"])


# --- deaths -------------------------------------------------------------------------------------

CALLS: list[tuple[str, tuple[int, ...], int]] = []
"""The calls of the sink: hash, numbers, and the time in nanoseconds."""


def notes(messages: list[Message], process: Any) -> None:
    CALLS.append((process.delivery_hash, tuple(m["n"] for m in messages), clock.now_ns()))


def own(message: Message, process: Any) -> Message:
    if message["n"] % 11 == 3:
        raise ValueError("poison")
    return told(message, process) | counted(message, process) | {"key": message["n"] % 4}


class DelayedRun(TimedDeaths):
    """Messages with times in all kinds of processors, and a clock that moves between the rounds."""

    def graph(self) -> Graph:
        return Graph(
            "g",
            [
                Stream(later, "src", "mid", id="later"),
                Stream(own, "mid", "out", id="own", key=by_four),
                Stream(each, "mid", "batches", id="batches", batch=True, batch_size=4),
                Stream(pairs, {"left": "src", "right": "mid"}, "joined", id="joined"),
                Stream(told, AnyOf("mid", "out"), "any", id="any"),
                Sink(notes, "mid", id="notes", batch=True, batch_size=3),
            ],
            errors="errors",
        )

    def given(self) -> list[Message]:
        return [{"n": n} for n in range(self.COUNT)]

    def compare(self, driver: DriverRun) -> None:
        n = list(range(self.COUNT))
        good = [number for number in n if number % 11 != 3]
        out, batches = driver.messages("out"), driver.messages("batches")
        assert sorted(m["n"] for m in driver.messages("mid")) == n
        assert sorted(m["n"] for m in out) == good
        assert not any(m["early"] for m in out)
        for key in range(4):
            counts = [m["count"] for m in out if m["key"] == key]
            assert counts == list(range(1, len(counts) + 1))
        assert sorted(m["n"] for m in batches) == n
        joined = driver.messages("joined")
        assert sorted(m["left"] for m in joined) == sorted(m["right"] for m in joined) == n
        assert Counter(m["n"] for m in driver.messages("any")) == Counter([*n, *good])
        failed = [m["err.proc/messages"]["mid"][0]["n"] for m in driver.messages("errors")]
        assert sorted(failed) == sorted(set(n) - set(good))
        called: dict[str, tuple[int, ...]] = {}
        for hash, numbers, now_ns in CALLS:
            # A hash always has the same messages, so a target drops what is repeated.
            assert called.setdefault(hash, numbers) == numbers
            assert all(due_ns(number) <= now_ns for number in numbers)
        assert sorted(number for numbers in called.values() for number in numbers) == n
        for folder in driver.files.names("_cues/delayed"):
            last = Ledger(driver.files, folder, "").read()
            assert last is not None and not last.held and not last.due


@pytest.mark.parametrize(
    "seed", [*seeds.among(range(8), fast=0), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 200))]
)
def test_drivers_that_die_or_sleep_at_any_access_deliver_each_message_once(files: FaultyFiles, seed: int) -> None:
    CALLS.clear()
    with testing.Clock(START) as hands:
        DelayedRun(seed, files, hands).finish()


class Death(BaseException):
    """The death of a driver."""


@pytest.mark.parametrize(
    ("point", "hit"), slow_except([("spark.moved", 1)], itertools.product(faults.MOVING_POINTS, (1, 2)), names=2)
)
def test_a_driver_that_dies_at_a_point_of_delayed_messages_delivers_each_once(
    point: str, hit: int, files: FaultyFiles
) -> None:
    def die(name: str) -> None:
        raise Death(name)

    def until_idle(run: DriverRun) -> None:
        run.claim().feed("src", [{"n": n} for n in range(20)], lambda: 7).run()
        while any(stage.due_ns < delays.NEVER_NS for stage in run.stages):
            hands.advance(30)
            run.run()

    def graph() -> Graph:
        return Graph("g", [Stream(later, "src", "mid", id="later"), Stream(told, "mid", "out", id="told")])

    with testing.Clock(START) as hands:
        faults.arm(point, hit, die)
        with pytest.raises(Death, match=point):
            until_idle(DriverRun(files, graph(), 2, lambda: 7))
        faults.disarm()
        last = DriverRun(files, graph(), 2, lambda: 7)
        until_idle(last)
    assert sorted(m["n"] for m in last.messages("out")) == list(range(20))
    assert inspection.problems_of(files.place) == []
    for processor, record in ((r.processor, r.record) for r in inspection.processors_of(files.place)):
        assert files.names(delays.folder_of_delayed(processor)) == []  # a start deletes what the dead one left
        assert not record.held and not record.due


# --- what is done with held messages ------------------------------------------------------------


def holding(files: LocalFiles, *more: Any, count: int = 20, size: int = 7) -> DriverRun:
    """A driver whose processor ``told`` holds some of the messages."""
    graph = Graph("g", [Stream(told, "in", "out", id="told"), *more])
    run = DriverRun(files, graph, 1, lambda: size).claim()
    send(run, range(count))
    return run.run()


def send(run: DriverRun, numbers: Any) -> None:
    """Append messages with their times to the queue ``in``."""
    directory = run.queues["in"]
    ledger = Ledger(run.files, "g.sources.feed", run.driver.owner)
    run.driver.claim(ledger, lambda last: last.positions if last is not None else {})
    writer = Writer(run.files, directory.folder, "g.sources.feed", ledger.now.number + 1, 0)
    extra = [{"q/deliver-at": due_ns(n)} if due_ns(n) else None for n in numbers]
    writer.add([codec.pack({"n": n}) for n in numbers], [None] * len(extra), Provenance(len(extra), {}, extra))
    file = writer.close()
    assert file is not None
    publish(ledger, {directory: [file]}, positions={})


def numbers(run: DriverRun) -> list[int]:
    return [m["n"] for m in run.messages("out")]


def held(run: DriverRun) -> int:
    return sum(some.left for stage in run.stages for some in stage.ledger.now.held)


def test_held_messages_outlive_their_queue_and_come_in_the_order_of_their_times(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        run = holding(files)
        first = [n for n in range(20) if due_ns(n) <= clock.now_ns()]
        assert numbers(run) == first and held(run) == 20 - len(first)
        assert sum(stage.lag for stage in run.stages) == 0
        lines = map(json.loads, terminal.cues("status", files.place).out.splitlines())
        shown = [line["delayed"] for line in lines if line.get("processor") == "g.told"]
        assert shown == [{"messages": held(run), "next": "2026-01-31T00:00:10Z"}]
        with operations.running_none(files, "g") as driver:
            operations.purge(driver, "in", 20)
        hands.advance(1000)
        run.run()
    assert numbers(run) == first + sorted(set(range(20)) - set(first), key=lambda n: (due_ns(n), n))
    assert held(run) == 0


@pytest.mark.slow
def test_runs_are_merged_and_a_move_takes_a_part(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record names few runs. What is due comes in the order of its times, also if one move takes only some of it."""
    monkeypatch.setattr(delays, "MOVED_MESSAGES", 5)
    with testing.Clock(START) as hands:
        run = holding(files, size=1)
        assert len(run.stage.ledger.now.held) <= 7 < held(run)
        first = len(numbers(run))
        hands.advance(1000)
        run.run()
        assert files.names(delays.folder_of_delayed("g.told")) == []
    assert numbers(run)[first:] == sorted(set(range(20)) - set(numbers(run)[:first]), key=lambda n: (due_ns(n), n))


@pytest.mark.slow
def test_a_seek_takes_a_held_message_again_and_it_comes_once(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        before = holding(files, size=3)
        first = numbers(before)
        with operations.running_none(files, "g") as driver:
            operations.settle(driver)
            operations.seek(driver, "g.told", {"g.told.in": 1})
        run = DriverRun(files, Graph("g", [Stream(told, "in", "out", id="told")]), 1, lambda: 3).claim().run()
        assert held(run) > 20 - len(first)
        hands.advance(1000)
        run.run()
    assert Counter(numbers(run)) == Counter([*range(20), *first])


FAILING: set[int] = set()


def stops(message: Message, process: Any) -> Message:
    if message["n"] in FAILING:
        raise ValueError("not yet")
    return counted(message, process) if process.core.node.options.key else told(message, process)


def stops_in_a_batch(messages: list[Message], process: Any) -> list[Message]:
    return [stops(message, process) for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (stops, {}),
        (stops, {"key": by_four}),
        (stops, {"side_effects": True}),
        (stops_in_a_batch, {"batch": True, "batch_size": 3}),
    ],
    ids=["stream", "keyed", "side effects", "batch"],
)
def test_a_processor_that_stops_holds_what_is_before_the_message_that_failed(
    fn: Any, options: dict[str, Any], files: FaultyFiles
) -> None:
    """At a message that is due at once, and later at one that was delayed. What is after them is taken later."""

    def start() -> DriverRun:
        graph = Graph("g", [Stream(fn, "in", "out", id="told", errors=None, **options)])
        return DriverRun(files, graph, 2, lambda: 20).claim()

    with testing.Clock(START) as hands:
        FAILING.add(10)
        run = start()
        send(run, range(20))
        with pytest.raises(cues.ProcessorStopped, match="not yet"):
            run.run()
        assert 10 not in numbers(run)
        assert held(run) == sum(due_ns(n) > clock.now_ns() for n in range(run.stage.positions["g.told.in"] - 1))
        FAILING.remove(10)
        FAILING.add(17)
        run = start().run()
        hands.advance(1000)
        with pytest.raises(cues.ProcessorStopped, match="not yet"):
            run.run()
        assert {10, 17} & set(numbers(run)) == {10}
        FAILING.clear()
        run = start().run()
    assert sorted(numbers(run)) == list(range(20)) and held(run) == 0
    if "key" in options:
        assert sorted(m["count"] for m in run.messages("out") if m["n"] % 4 == 1) == [1, 2, 3, 4, 5]


def test_an_older_version_refuses_records_after_a_message_was_held_and_only_then(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        graph = Graph("g", [Stream(told, "in", "out", id="told")])
        run = DriverRun(files, graph, 1).claim().feed("in", [{"n": n} for n in range(5)]).run()

        def format() -> int:
            return int(inspection.records_of(files.place, "g.told", 1)[0].fields["format"])

        assert format() == 4
        send(run, range(5, 10))
        run.run()
        assert held(run) and format() == 5
        hands.advance(1000)
        assert not held(run.run())
    assert format() == 5  # it has the index of the next message that was delayed


@pytest.mark.slow
def test_a_missing_file_of_held_messages_is_damage(files: FaultyFiles) -> None:
    with testing.Clock(START):
        run = holding(files)
        (folder,) = {delays.folder_of_delayed(stage.node.id) for stage in run.stages}
        name = files.names(folder)[0]
        files.delete(f"{folder}/{name}")
        assert inspection.problems_of(files.place) == [
            f"{files.url}/{folder}/{name}, a part of the delayed messages and timers of a processor, is missing."
        ]
        with pytest.raises(Diverged, match="Committed files are missing"):
            DriverRun(files, Graph("g", [Stream(told, "in", "out", id="told")])).claim()
        found = operations.files_of(files, "g")
        assert found is not None
        operations.remove(files, "g", found)
        assert files.names("_cues/delayed") == []


@pytest.mark.slow
def test_a_driver_that_slept_while_another_one_delivered_is_fenced(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        asleep = holding(files)
        hands.advance(1000)
        DriverRun(files, Graph("g", [Stream(told, "in", "out", id="told")])).claim().run()
        with pytest.raises(Fenced):
            asleep.run()
    assert sorted(numbers(DriverRun(files, Graph("g", [Stream(told, "in", "out", id="told")])))) == list(range(20))


@pytest.mark.slow
def test_messages_of_an_input_that_was_taken_away_are_given_up_with_a_warning(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        copy = Stream(lambda message: {"n": 100}, "in", "copy", id="copy")
        run = holding(files, copy)
        waiting = sum(some.left for some in run.stages[0].ledger.now.held)
        run = DriverRun(files, Graph("g", [Stream(told, "copy", "out", id="told"), copy]), 1)
        for stage in run.stages:
            stage.claim(accept_topology=True)
        hands.advance(1000)
        run.run()
        assert numbers(run)[-20:] == [100] * 20 and held(run) == 0
    assert any(f"gives up {waiting} delayed messages" in str(event) for event in run.events)


def test_frames_refuse_messages_that_are_not_due(files: FaultyFiles) -> None:
    """A frame that reads a queue with such messages does not start. A processor stops before it writes one for it."""

    def frame(table: Any) -> Any:
        raise AssertionError

    with testing.Clock(START) as hands:
        run = holding(files)
        run.queues["in"].note_delays(max(map(due_ns, range(20))))
        graph = Graph("g", [Frame(frame, "in", "rows", id="frame")])
        with pytest.raises(Unsupported, match=r"is a frame, and reads the queue 'in'.*frames hold no messages.*copy"):
            DriverRun(files, graph).claim()
        hands.advance(3600)
        DriverRun(files, graph).claim()
        other = Graph("g", [Stream(again, "in", "told", id="again"), Frame(frame, "told", "rows", id="other")])
        run = DriverRun(files, other)
        run.driver.without_delays = delays.without_delays(other.plan())
        with pytest.raises(cues.ProcessorStopped, match="a frame reads its queue"):
            run.claim().run()
        changed = Graph("g", [Frame(frame, "in", "out", id="told")])
        with pytest.raises(TopologyChanged, match=r"g\.told holds delayed messages, and is a frame now"):
            DriverRun(files, changed).claim()


@pytest.mark.slow
def test_a_feeder_stops_before_a_delayed_message_for_a_frame_and_goes_on_when_it_is_due(
    files: FaultyFiles, tmp_path: Path
) -> None:
    graph = Graph("g", [Source("in"), Frame(lambda rows: rows, "in", "rows", id="frame")], durability="process")
    with testing.Clock(START) as hands:
        run = HostRun(files, graph, tmp_path / "store")
        try:
            run.feeder.claim()
            with cues.open(tmp_path / "store") as store:
                store.queue("in").appender().write({"n": 1})
                store.queue("in").appender().write({"n": 2}, delay=60)
            with pytest.raises(Unsupported, match=r"Message 2 of the queue 'in'.*00:01:00.*a frame reads the queue"):
                run.feeder.step()
            hands.advance(60)
            assert run.feeder.step() and run.messages("in") == [{"n": 1}, {"n": 2}]
        finally:
            run.close()


def again(message: Message) -> Any:
    return cues.delayed(message, delay="1h")
