"""Timers and state that expires in a shared directory: what the embedded engine leaves, whatever dies. No Spark.

A play is rounds: each moves the clock, sends messages, and lets the graph run until it has nothing to do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import seeds
from directory_steps import DriverRun, FaultyFiles, HostRun, Message, TimedDeaths, messages_of
from sets import slow_except

import cues
from cues import AnyOf, Graph, QueueOptions, Source, Stream, faults, testing
from cues.errors import Diverged, Fenced
from cues.processors import shape, windows
from cues.processors.reducers import count
from cues.spark.cluster import delays, inspection, operations, state_files
from cues.spark.cluster import step as steps
from cues.spark.cluster.files import LocalFiles
from cues.spark.cluster.ledger import FORMAT
from cues.steps import process as processes

START = datetime(2026, 1, 31, tzinfo=UTC)
Play = list[tuple[float, list[Message]]]
"""Rounds: seconds since START, and the messages that are sent then."""
TTL_S = 10


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


# --- functions ----------------------------------------------------------------------------------


def seen(state: Any) -> list[Any]:
    return sorted(((field, state[field]) for field in state), key=repr)


def handle(message: Message, process: Any) -> Message | None:
    """Write or delete one field, set or cancel one timer. The output is the whole state of the key."""
    state, field = process.state, message["field"]
    if message["do"] == "write":
        state[field] = message["value"]
    elif message["do"] == "add":
        state.setdefault(field, []).append(message["value"])
    elif message["do"] == "delete":
        state.pop(field, None)
    if message["after"] != "leave" and process.core.node.options.timer is not None:
        at = None if message["after"] is None else process.now + timedelta(seconds=message["after"])
        process.timer(message["key"], at, message["name"])
    if message["do"] == "fail":
        raise ValueError("no")
    return {"n": message["n"], "key": message["key"], "state": seen(state), "index": process.index}


def fire(timer: Message, process: Any) -> Any:
    """Write the timer and the state. Then, by the number of timers that fired, set another one, cancel one, or fail."""
    fired = process.state["fired"] = process.state.get("fired", 0) + 1
    if fired % 4 == 1:
        process.timer(timer["key"], timer["at"].timestamp() + 7, "again")
    if fired % 4 == 2:
        process.timer(timer["key"], None, "a")
    if fired % 4 == 3:
        process.timer(timer["key"], timer["at"], timer["name"])
        process.state["fired"] = fired + 1
    if timer["name"] == "fails":
        raise ValueError("a timer")
    state = seen(process.state)
    told = {"n": None, **timer, "state": state, "index": process.index, "from": process.binding}
    return [told, cues.delayed({**told, "late": True}, delay="3s")] if timer["name"] == "late" else told


def in_batches(messages: list[Message], process: Any) -> list[Message]:
    told = []
    for message, index in zip(messages, process.indices):
        state = process.state_of(message["key"])
        state[message["field"]] = message["value"]
        if message["after"] is not None and message["after"] != "leave":
            process.timer(message["key"], process.now + timedelta(seconds=message["after"]), message["name"])
        told.append({"n": message["n"], "key": message["key"], "state": seen(state), "index": index})
    return told


def pairs(left: Message, right: Message, process: Any) -> Message:
    process.timer(left["key"], process.now + timedelta(seconds=5), right["name"])
    process.state["n"] = process.state.get("n", 0) + 1
    return {"n": left["n"], "key": left["key"], "state": seen(process.state)}


def copied(message: Message) -> Message:
    return {"key": 1} | message


def later(message: Message, process: Any) -> Message:
    process.timer(message["key"], process.now + timedelta(seconds=4), str(message["n"]))
    return {"n": message["n"], "key": message["key"]}


def plain(timer: Message) -> Message:
    return timer


def graph_of(*processors: Any, **options: Any) -> Callable[[], Graph]:
    return lambda: Graph("g", [Source("in"), *processors], durability="process", errors="errors", **options)


def one(fn: Any = handle, inputs: Any = "in", **options: Any) -> Stream:
    return Stream(fn, inputs, "out", id="p", **{"key": "key", "timer": fire, "ttl": TTL_S} | options)


KINDS: dict[str, Callable[[], Graph]] = {
    "timers": graph_of(one(ttl=None)),
    "ttl": graph_of(one(timer=None)),
    "both": graph_of(one()),
    "of the processor": graph_of(one(key=None)),
    "batch function": graph_of(one(in_batches, batch=True, batch_size=3)),
    "join": graph_of(Stream(copied, "in", "other", id="copy"), one(pairs, {"left": "in", "right": "other"}, ttl=None)),
    "any of": graph_of(Stream(copied, "in", "other", id="copy"), one(inputs=AnyOf("other", "in"))),
    "side effects": graph_of(one(side_effects=True)),
    "concurrent calls": graph_of(one(concurrency=3)),
    "partitions": graph_of(
        Stream(copied, "in", "mid", id="copy"),
        one(inputs="mid"),
        queues={"mid": QueueOptions(partitions=3, key="key")},
    ),
    "provenance": graph_of(one(), queues={"in": QueueOptions(metadata=True)}),
    "two processors": graph_of(one(), Stream(later, "out", "end", id="q", key="key", timer=plain)),
    "at most once": graph_of(one(timer=None, strategy="at-most-once")),
    "debounce": graph_of(shape.debounce("in", "out", key="key", quiet="5s")),
}
SMALL_STEPS = ("batch function", "side effects", "concurrent calls")
"""Kinds whose steps begin with few messages on the embedded engine. Timers fire between two steps."""
SOME_ORDER = ("any of", "partitions", "two processors", "join")
"""Kinds in which the order of two queues, or of two partitions, is not fixed."""


def play_at_random(chance: random.Random, rounds: int, most: int = 5) -> Play:
    """``most`` messages of a round."""
    play, at, n = [], 0.0, 0
    for _ in range(rounds):
        at += chance.choice((0.5, 3, 5, 10, 60))
        some = []
        for _ in range(chance.randint(0 if play else 1, most)):
            n += 1
            some.append(
                {
                    "n": n,
                    "key": chance.choice(["x", "y", ("z", 1)]),
                    "field": chance.choice(["a", "b", "c" * 300]),
                    "do": chance.choice(["write", "write", "delete", "add", "read", "fail"]),
                    "value": chance.choice([1, 2, "v" * 9000]),
                    "name": chance.choice([None, "a", "again", "late", "fails"]),
                    "after": chance.choice((None, "leave", -1, 0, 1, 4.5, 5, 5, 20)),
                }
            )
            if some[-1]["do"] == "add":
                some[-1]["field"] = "list"
        play.append((at, some))
    return [*play, (10_000, []), (10_001, []), (30_000, [])]


def play(rounds: Play, store: Path, run: Callable[[], object]) -> None:
    """Play all rounds. ``run`` runs the graph until it has nothing to do."""
    with testing.Clock(START) as hands:
        for seconds, messages in rounds:
            hands.set(START + timedelta(seconds=seconds))
            if messages:
                with cues.open(store, durability="process") as opened:
                    opened.queue("in").appender().write_many(messages)
            run()


QUEUES = ("in", "other", "mid", "out", "end", "errors")


def left(messages: list[Message], order: str) -> list[Any]:
    """The messages, without the traces and the times of errors; ``order``: "all", "keys" or "none"."""
    plain: list[Any] = [
        {"failed": m["err.proc/messages"], "timer": m["err.proc/config"].get("timer")} if "err/cause" in m else m
        for m in messages
    ]
    if order == "keys":
        return sorted(plain, key=lambda m: repr((next(iter(m["failed"].values()))[0] if "failed" in m else m)["key"]))
    return plain if order == "all" else sorted(plain, key=repr)


def by_embedded(kind: str, rounds: Play, store: Path) -> tuple[dict[str, list[Message]], Any]:
    def run() -> None:
        with cues.open(store, durability="process") as opened:
            testing.run_until_idle(KINDS[kind](), opened)

    play(rounds, store, run)
    with cues.open(store) as opened:
        queues = {queue: testing.messages(opened, queue) for queue in QUEUES if queue in opened.queues()}
        return queues, testing.contents(opened)["state"]


def by_directory(
    kind: str, rounds: Play, files: LocalFiles, store: Path, cores: int, size: Callable[[], int]
) -> tuple[dict[str, list[Message]], int]:
    """The messages of each queue, and the number of rows of the states at the end."""
    host: list[HostRun] = []

    def run() -> None:
        if not host:
            host.append(HostRun(files, KINDS[kind](), store, cores, size))
            host[0].feeder.claim()
            host[0].claim()
        host[0].run()

    play(rounds, store, run)
    host[0].close()
    states = sum(len(rows_of(stage)) for stage in host[0].stages)
    return {queue: messages_of(host[0].queues[queue]) for queue in QUEUES if queue in host[0].queues}, states


def rows_of(stage: Any) -> dict[bytes, bytes]:
    """All rows of the state of a unit."""
    state = stage.ledger.now.state
    return state_files.load(stage.driver.files, state_files.folder_of_state(stage.node.id), state, None)


def compare(kind: str, files: LocalFiles, tmp_path: Path, seed: int, cores: int, rounds: int = 8) -> None:
    given = play_at_random(random.Random(seed), rounds, 1 if kind in SMALL_STEPS else 5)
    if kind in SMALL_STEPS:
        given = [round for at, some in given for round in ((at, []), (at, some))]
    expected, state = by_embedded(kind, given, tmp_path / "embedded")
    found, rows = by_directory(kind, given, files, tmp_path / "store", cores, lambda: 1000)
    order = "none" if kind in SOME_ORDER else "all" if cores == 1 else "keys"
    assert any(expected.values())
    for queue, messages in expected.items():
        assert left(found[queue], order) == left(messages, order), queue
    assert bool(rows) == bool(state)


@pytest.mark.parametrize(
    ("kind", "cores"),
    slow_except([("both", 1)], [(kind, 1 + number % 2) for number, kind in enumerate(KINDS)], names=2),
)
def test_a_directory_has_what_the_embedded_engine_leaves(
    kind: str, cores: int, files: FaultyFiles, tmp_path: Path
) -> None:
    compare(kind, files, tmp_path, seeds.new(), cores)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_has_what_the_embedded_engine_leaves_of_longer_plays(
    kind: str, seed: int, files: FaultyFiles, tmp_path: Path
) -> None:
    compare(kind, files, tmp_path, seed, 1 + seed % 2, 30)


# --- deaths -------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Any, ...]] = {}
"""The calls of the sink and of its timers, by hash."""


def called(*what: Any, process: Any) -> None:
    # A hash always has the same message, so a target drops what is repeated.
    assert CALLS.setdefault(process.delivery_hash, what) == what


def some_later(message: Message) -> Any:
    at = START + timedelta(seconds=message["n"] * 3 % 7 * 10)
    return cues.delayed(message, deliver_at=at) if message["n"] % 3 else message


def own(message: Message, process: Any) -> Message:
    """Each message renews the timer of its key and sets one of its own; every fourth one cancels that of the key."""
    state, n = process.state, message["n"]
    state["count"] = state.get("count", 0) + 1
    state[f"of {n}"] = n
    process.timer(message["key"], None if n % 4 == 3 else process.now + timedelta(seconds=20))
    process.timer(message["key"], process.now + timedelta(seconds=n * 7 % 10 * 10 - 10), f"{n}")
    if n % 11 == 3:
        raise ValueError("poison")
    return {"n": n, "key": message["key"], "count": state["count"]}


def fired(timer: Message, process: Any) -> Message:
    state, name = process.state, timer["name"]
    assert timer["at"] <= process.now
    state["fired"] = state.get("fired", 0) + 1
    if name is not None and not name.startswith("again") and int(name) % 5 == 2:
        process.timer(timer["key"], timer["at"] + timedelta(seconds=15), f"again {name}")
    if name is not None and name.endswith("3"):
        raise ValueError("poison")
    return {"key": timer["key"], "name": name, "fired": state["fired"], "at": timer["at"]}


def noted(message: Message, process: Any) -> None:
    called("message", message["n"], process=process)
    process.timer("one", process.now + timedelta(seconds=5), str(message["n"]))


def noted_timer(timer: Message, process: Any) -> None:
    called("timer", timer["name"], process=process)


class TimersRun(TimedDeaths):
    """Timers, delayed messages and values that expire in a keyed stream and in a sink; a clock that moves."""

    def graph(self) -> Graph:
        return Graph(
            "g",
            [
                Stream(some_later, "src", "mid", id="later"),
                Stream(own, "mid", "out", id="own", key="key", timer=fired, ttl=1000),
                cues.Sink(noted, "mid", id="noted", timer=noted_timer, batch_size=3),
            ],
            errors="errors",
        )

    def given(self) -> list[Message]:
        return [{"n": n, "key": n % 4} for n in range(self.COUNT)]

    def compare(self, driver: DriverRun) -> None:
        good = [n for n in range(self.COUNT) if n % 11 != 3]
        out, errors = driver.messages("out"), driver.messages("errors")
        given = [m for m in out if "n" in m]
        assert sorted(m["n"] for m in given) == good
        failed = Counter(
            m["err.proc/messages"]["timer"][0]["name"] for m in errors if "timer" in m["err.proc/messages"]
        )
        assert len(errors) == self.COUNT - len(good) + failed.total()
        timers = Counter(m["name"] for m in out if m.get("name"))
        names = {str(n) for n in good} | {f"again {n}" for n in good if n % 5 == 2 and n % 10 != 3}
        assert timers + failed == Counter(names)
        assert failed == Counter(name for name in names if name.endswith("3"))
        for key in range(4):
            assert [m["count"] for m in given if m["key"] == key] == list(range(1, 1 + sum(n % 4 == key for n in good)))
            counts = [m["fired"] for m in out if "n" not in m and m["key"] == key]
            assert counts == list(range(1, len(counts) + 1))
        heard = Counter(CALLS.values())
        assert heard == Counter(
            {(kind, n if kind == "message" else str(n)): 1 for kind in ("message", "timer") for n in range(self.COUNT)}
        )
        self.hands.advance(1000)
        for stage in driver.claim().run().stages:
            assert not stage.ledger.now.timers and not stage.ledger.now.held and not stage.ledger.now.due
            # The rows of timers that failed for good stay.
            assert len(rows_of(stage)) == (failed.total() if stage.node.id == "g.own" else 0)
        assert inspection.problems_of(driver.files.place) == []


@pytest.mark.parametrize(
    "seed", [*seeds.among(range(3), fast=0), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 200))]
)
def test_drivers_that_die_or_sleep_at_any_access_fire_each_timer_once(files: FaultyFiles, seed: int) -> None:
    CALLS.clear()
    with testing.Clock(START) as hands:
        TimersRun(seed, files, hands).finish()


class Death(BaseException):
    """The death of a driver."""


SITES = [
    *(
        (point, hit)
        for point in (*faults.MOVING_POINTS, "spark.ran", "spark.written", "spark.recorded")
        for hit in (1, 3)
    ),
    *((point, 1) for point in faults.EXPIRY_POINTS),
]


@pytest.mark.parametrize(("point", "hit"), slow_except([("spark.moved", 1)], SITES, names=2))
def test_a_driver_that_dies_at_a_point_fires_each_timer_once(point: str, hit: int, files: FaultyFiles) -> None:
    def die(name: str) -> None:
        raise Death(name)

    def until_idle(run: DriverRun) -> DriverRun:
        run.claim().feed("src", [{"n": n, "key": n % 4} for n in range(20)], lambda: 7).run()
        while any(stage.due_ns < delays.NEVER_NS or rows_of(stage) for stage in run.stages):
            hands.advance(8)
            run.run()
        return run

    def graph() -> Graph:
        return Graph("g", [Stream(told, "src", "out", id="told", key="key", timer=told_timer, ttl=100)])

    def told(message: Message, process: Any) -> Message:
        process.state[message["n"]] = message["n"]
        process.timer(message["key"], process.now + timedelta(seconds=10 + message["n"]), str(message["n"] % 7))
        return message

    def told_timer(timer: Message, process: Any) -> Message:
        return timer | {"state": seen(process.state)}

    with testing.Clock(START) as hands:
        expected = until_idle(DriverRun(LocalFiles(f"{files.url}.expected"), graph(), 2, lambda: 7)).messages("out")
    with testing.Clock(START) as hands:
        faults.arm(point, hit, die)
        with pytest.raises(Death, match=point):
            until_idle(DriverRun(files, graph(), 2, lambda: 7))
        faults.disarm()
        last = until_idle(DriverRun(files, graph(), 2, lambda: 7))
    by_key = lambda messages: sorted(messages, key=lambda m: m["key"])  # noqa: E731
    assert by_key(last.messages("out")) == by_key(expected)
    assert inspection.problems_of(files.place) == []
    for record in (each.record for each in inspection.processors_of(files.place)):
        assert not record.timers and not record.due and not record.state
    assert files.names(delays.folder_of_delayed("g.told")) == files.names(state_files.folder_of_state("g.told")) == []


# --- early results of windows, by timers -------------------------------------------------------------


def windows_of(**options: Any) -> Graph:
    stream = windows.sessions(
        AnyOf("a", "b"), "out", 4, time="t", delay=3, late="late", reduce={"n": count()}, **options
    )
    return Graph("g", [Source("a"), Source("b"), stream], durability="process", errors="errors")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"early": "5s"}, {"early": "7s", "key": "key"}])
def test_early_results_of_windows_are_those_of_the_embedded_engine(
    options: dict[str, Any], files: FaultyFiles, tmp_path: Path
) -> None:
    chance = random.Random(seeds.new())
    rounds, at, now = [], 0.0, 0.0
    for _ in range(20):
        now += chance.choice((0.5, 5, 7, 10, 20, 40))
        at += chance.choice((-2, 0, 1, 3, 8))
        rounds.append((now, chance.choice("ab"), {"t": 1000 + at, "key": chance.choice("xy")}))

    def run_all(store: Path, run: Callable[[], object]) -> None:
        with testing.Clock(START) as hands:
            for seconds, queue, message in rounds:
                hands.set(START + timedelta(seconds=seconds))
                run()  # what is due comes first
                with cues.open(store, durability="process") as opened:
                    opened.queue(queue).appender().write(message)
                run()
            hands.advance(1000)
            run()

    def embedded() -> None:
        with cues.open(tmp_path / "embedded", durability="process") as opened:
            testing.run_until_idle(windows_of(**options), opened)

    run_all(tmp_path / "embedded", embedded)
    with testing.Clock(START):
        host = HostRun(files, windows_of(**options), tmp_path / "store", 1)
        host.feeder.claim()
        host.claim()
    run_all(tmp_path / "store", host.run)
    host.close()
    with cues.open(tmp_path / "embedded") as opened:
        expected = {queue: testing.messages(opened, queue) for queue in ("out", "late")}
    assert expected["out"]
    for queue, messages in expected.items():
        assert messages_of(host.queues[queue]) == messages


# --- values that expire -------------------------------------------------------------------------


def writes(message: Message, process: Any) -> Message:
    if message.get("write"):
        process.state[message["write"]] = message["n"]
    return {"n": message["n"], "state": seen(process.state)}


def expiring(files: LocalFiles, ttl: float | None = TTL_S, size: int = 1) -> DriverRun:
    graph = Graph("g", [Stream(writes, "in", "out", id="p", key="key", ttl=ttl)])
    return DriverRun(files, graph, 1, lambda: size).claim()


def states_of(run: DriverRun) -> list[Any]:
    return [[field for field, _ in m["state"]] for m in run.messages("out")]


def test_a_value_that_is_written_again_does_not_expire_and_others_leave_the_directory(files: FaultyFiles) -> None:
    given = [{"n": 1, "key": 1, "write": "a"}, {"n": 2, "key": 1, "write": "b"}, {"n": 3, "key": 1, "write": "a"}]
    given += [{"n": n, "key": 1} for n in (4, 5, 6)]
    with testing.Clock(START) as hands:
        run = expiring(files)
        for seconds, count in ((0, 2), (6, 3), (9.999, 4), (10, 5), (16, 6)):
            hands.set(START + timedelta(seconds=seconds))
            run.feed("in", given[:count]).run()
        assert states_of(run) == [["a"], ["a", "b"], ["a", "b"], ["a", "b"], ["a"], []]
        (stage,) = run.stages
        assert not stage.ready() and stage.ledger.now.state == ()
        assert files.names(state_files.folder_of_state("g.p")) == []
        assert stage.ledger.now.format == 4  # nothing is left that an older version would misread


@pytest.mark.slow
def test_merges_drop_what_expired_and_keep_values_without_a_time(files: FaultyFiles) -> None:
    """Values from before ``ttl=`` stay until they are written. A deleted one does not come back from an older run."""
    with testing.Clock(START) as hands:
        old = [{"n": n, "key": n % 3, "write": f"old {n}"} for n in range(12)]
        expiring(files, None).feed("in", old).run()
        run = expiring(files)
        hands.advance(100)
        more = [{"n": n, "key": n % 3, "write": f"old {n % 12}"} for n in range(100, 106)]
        run.feed("in", [*old, *more]).run()
        formats = {run.stage.ledger.now.format}
        for n in range(200, 240):  # runs are merged, first without older ones
            hands.advance(1)
            more.append({"n": n, "key": 7, "write": "new"})
            run.feed("in", [*old, *more]).run()
        rows = rows_of(run.stage)
        kept = {
            n % 3: sorted(f"old {m}" for m in range(12) if m % 3 == n % 3 and m not in (4, 5, 6, 7, 8, 9))
            for n in range(3)
        }
        more += [{"n": 300 + key, "key": key} for key in range(3)]
        run.feed("in", [*old, *more]).run()
        assert states_of(run)[-3:] == [kept[key] for key in range(3)]
        hands.advance(100)
        run.run()
        left = rows_of(run.stage)
        assert len(left) == 6 and len(rows) < 6 + 2 + 2 * 6 and formats == {FORMAT}
        assert run.stage.ledger.now.format == 4


@pytest.mark.slow
def test_times_of_writes_are_kept_while_ttl_is_away(files: FaultyFiles) -> None:
    given = [{"n": 1, "key": 1, "write": "a"}, {"n": 2, "key": 1, "write": "b"}, {"n": 3, "key": 1}, {"n": 4, "key": 1}]
    with testing.Clock(START) as hands:
        expiring(files).feed("in", given[:1]).run()
        hands.advance(5)
        run = expiring(files, None).feed("in", given[:2]).run()
        hands.advance(5)
        run.feed("in", given[:3]).run()
        run = expiring(files).feed("in", given).run()
    assert states_of(run) == [["a"], ["a", "b"], ["a", "b"], ["b"]]


# --- timers among other things ------------------------------------------------------------------


def sets(message: Message, process: Any) -> Message:
    process.timer(message["n"], START + timedelta(seconds=message["at"]))
    return message


FAILING: set[int] = set()


def rings(timer: Message, process: Any) -> Message:
    if timer["key"] in FAILING:
        raise ValueError("not yet")
    return {"timer": timer["key"], "hash": process.delivery_hash}


def setting(files: LocalFiles, cores: int = 1, size: int = 7, timer: Any = rings, **options: Any) -> DriverRun:
    options = {"key": "n", "timer": timer} | options
    return DriverRun(files, Graph("g", [Stream(sets, "in", "out", id="p", **options)]), cores, lambda: size).claim()


GIVEN = [{"n": n, "at": n * 7 % 10 * 10} for n in range(20)]


def rung(run: DriverRun) -> list[int]:
    return [m["timer"] for m in run.messages("out") if "timer" in m]


def in_order(numbers: Any) -> list[int]:
    """In the order of the times, then of the keys."""
    return sorted(numbers, key=lambda n: (GIVEN[n]["at"], n))


def test_timers_outlive_their_queue_and_fire_in_the_order_of_their_times(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        run = setting(files).feed("in", GIVEN).run()
        assert rung(run) == [0, 10]
        assert run.stage.ledger.now.delayed is None and run.stage.lag == 0
        with operations.running_none(files, "g") as driver:
            operations.purge(driver, "in", 20)
        run = setting(files)
        run.maintenance.vacuum()
        hands.advance(1000)
        run.run()
        assert rung(run) == in_order(range(20))
        assert not run.stage.ledger.now.timers and files.names(delays.folder_of_delayed("g.p")) == []
        hashes = [m["hash"] for m in run.messages("out") if "timer" in m]
        assert len(set(hashes)) == 20
        # A reset: all starts anew, with other hashes.
        found = operations.files_of(files, "g")
        assert found is not None
        del run
        operations.remove(files, "g", found)
        run = setting(files).feed("in", GIVEN).run()
        assert sorted(rung(run)) == list(range(20))
        assert not set(hashes) & {m["hash"] for m in run.messages("out") if "timer" in m}


@pytest.mark.slow
def test_runs_of_timers_are_merged_and_a_move_takes_a_part(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "MOVED_MESSAGES", 3)
    monkeypatch.setattr(steps, "TIMERS_OF_TASK", 1)
    with testing.Clock(START) as hands:
        run = setting(files, 2, 1).feed("in", GIVEN).run()
        assert len(run.stage.ledger.now.timers) <= 7
        replaced = [{"n": n, "at": GIVEN[n]["at"]} for n in range(20)]  # once more, for the same times
        run.feed("in", [*GIVEN, *replaced]).run()
        hands.advance(1000)
        run.run()
        assert sorted(rung(run)[4:]) == sorted(set(range(20)) - {0, 10})
        assert files.names(delays.folder_of_delayed("g.p")) == []
        assert not rows_of(run.stage)


@pytest.mark.slow
def test_a_seek_takes_messages_again_and_replaced_timers_fire_once(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        setting(files).feed("in", GIVEN).run()
        with operations.running_none(files, "g") as driver:
            operations.settle(driver)
            operations.seek(driver, "g.p", {"g.p.in": 1})
        run = setting(files).run()
        hands.advance(1000)
        run.run()
    assert Counter(rung(run)) == Counter([*range(20), 0, 10])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"key": None}, {"side_effects": True}, {"ttl": "1h"}], ids=["keyed", "no key", "effects", "ttl"]
)
def test_a_processor_that_stops_at_a_timer_fires_it_later(options: dict[str, Any], files: FaultyFiles) -> None:
    FAILING.add(13)
    try:
        with testing.Clock(START) as hands:
            run = setting(files, 2, errors=None, **options).feed("in", GIVEN).run()
            hands.advance(1000)
            with pytest.raises(cues.ProcessorStopped, match="not yet"):
                run.run()
            assert 13 not in rung(run)
            with pytest.raises(cues.ProcessorStopped, match="not yet"):
                setting(files, 2, errors=None, **options).run()
            FAILING.clear()
            run = setting(files, 2, errors=None, **options).run()
    finally:
        FAILING.clear()
    assert sorted(rung(run)) == list(range(20))
    assert not rows_of(run.stage)


@pytest.mark.slow
def test_timers_wait_while_the_processor_has_no_function_for_them(files: FaultyFiles) -> None:
    def silent(message: Message) -> None:
        return None

    with testing.Clock(START) as hands:
        setting(files).feed("in", GIVEN).run()
        hands.advance(1000)
        run = DriverRun(files, Graph("g", [Stream(silent, "in", "out", id="p", key="n")])).claim()
        run.feed("in", [*GIVEN, {"n": 20, "at": 0}]).run()
        assert rung(run) == [0, 10] and not run.stage.ready()
        run = setting(files).run()
    assert rung(run) == [0, 10, *in_order(set(range(20)) - {0, 10})]


def test_an_older_version_refuses_records_after_a_timer_was_set_and_only_then(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        run = setting(files)

        def format() -> int:
            return int(inspection.records_of(files.place, "g.p", 1)[0].fields["format"])

        assert format() == 4
        run.feed("in", GIVEN).run()
        assert format() == FORMAT == 6
        hands.advance(1000)
        run.run()
    assert format() == FORMAT  # it has the index of the next timer that is due


@pytest.mark.slow
def test_a_missing_file_of_timers_is_damage(files: FaultyFiles) -> None:
    with testing.Clock(START):
        setting(files).feed("in", GIVEN).run()
        folder = delays.folder_of_delayed("g.p")
        name = files.names(folder)[0]
        files.delete(f"{folder}/{name}")
        assert inspection.problems_of(files.place) == [
            f"{files.url}/{folder}/{name}, a part of the delayed messages and timers of a processor, is missing."
        ]
        with pytest.raises(Diverged, match="Committed files are missing"):
            setting(files)


@pytest.mark.slow
def test_a_driver_that_slept_while_another_one_fired_is_fenced(files: FaultyFiles) -> None:
    with testing.Clock(START) as hands:
        asleep = setting(files).feed("in", GIVEN).run()
        hands.advance(1000)
        setting(files).run()
        with pytest.raises(Fenced):
            asleep.run()
        assert rung(setting(files)) == in_order(range(20))


def test_a_control_timers_that_are_compared_nowhere_fire_after_they_were_replaced(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays, "still_set", lambda files, folder, state, timers: [True] * len(timers))
    monkeypatch.setattr(processes.ProcessCore, "fires", lambda self, timer: True)
    with testing.Clock(START) as hands:
        run = setting(files, size=1, key=None).feed("in", [{"n": 1, "at": 5}, {"n": 1, "at": 9}]).run()
        hands.advance(1000)
        run.run()
    assert rung(run) == [1, 1]
