"""Long runs: figures that must not grow with the messages that have passed, or that are on the queues.

Each test has a bounded size, and ten million messages with ``pytest -m long``. Nothing here looks at a
clock: memory is the process's own (resident, less the pages of the file that it maps), disk is the
number of pages that the file ever used, and the work of a command is the number of calls it makes.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import seeds
from sets import slow_except

import cues
from cues.cli.app import run as cli
from cues.tools import metrics

TEN_MILLION = 10_000_000
MB = 1 << 20


def sizes(bounded: int) -> list[Any]:
    long = pytest.param(TEN_MILLION, marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="long")
    return [pytest.param(bounded, id="bounded"), long]


# --- messages that pass -----------------------------------------------------------------------------

PASS = """
import json, sys, time
import cues
from cues import Graph, QueueOptions, Sink, Source, Stream

path, count = sys.argv[1], int(sys.argv[2])

def own_kb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))

def numbers(position):
    for number in range(position or 0, count):
        while number - seen > 10_000:  # what waits on the queues is bounded, so what they hold is too
            time.sleep(0.001)
        yield number + 1, {"id": number, "text": f"message {number}", "bytes": bytes(number % 300)}

def double(message):
    return {**message, "double": message["id"] * 2}

own, used = [], []
seen = 0

def take(message):
    global seen
    seen += 1
    assert message["double"] == 2 * message["id"]
    if message["id"] % (count // 20) == 0:
        own.append(own_kb())
        used.append(store.info()["used"])

queues = {
    "in": QueueOptions(metadata=True, retention="read"),
    "out": QueueOptions(metadata=True, retention="read"),
}
processors = [Source("in", numbers), Stream(double, "in", "out"), Sink(take, "out")]
with cues.open(path, durability="process") as store:
    with Graph("passing", processors, store=store, queues=queues).start() as running:
        running.wait_done()
    print(json.dumps({"own_kb": own, "used": used, "first": store.queue("out").first_index}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what memory is a process's own")
@pytest.mark.parametrize("count", sizes(200_000))
def test_memory_and_file_stay_flat_while_messages_pass(tmp_path: Path, count: int, checked: Any) -> None:
    """Source, stream and sink in one process, on queues that let go of what was read.

    At most 10,000 messages (about 2 MB) are on their way; what twenty looks find in the second half is no
    more than in the first, but for noise.
    """
    with children.Child(PASS, tmp_path / "store", count) as child:
        found = json.loads(child.line())
        child.end()
    own, used = found["own_kb"], found["used"]
    assert len(own) == 20
    assert max(own[10:]) * 1024 <= max(own[2:10]) * 1024 + 8 * MB, own
    assert max(used) <= 16 * MB, used
    assert found["first"] > count - 20_000, "it was let go"
    checked(tmp_path / "store")


# --- a file under retention ---------------------------------------------------------------------------


def message(number: int, draw: random.Random) -> dict[str, Any]:
    """Mostly small; now and then one that takes several pages."""
    size = draw.randrange(200) if draw.random() < 0.98 else draw.randrange(20_000)
    return {"id": number, "x": bytes(size)}


POLICIES: dict[str, Any] = {
    "count": {"passing": 1_000},
    "bytes": {"passing": "1MB"},
    "read": {"passing": "read"},
    "two lifetimes": {"passing": 500, "staying": 3_000},
    "bytes beside a slow one": {"passing": "300KB", "staying": "1MB"},
}


@pytest.mark.slow
@pytest.mark.parametrize("count", sizes(150_000))
@pytest.mark.parametrize("policy", slow_except(["bytes beside a slow one", "read"], POLICIES))
def test_the_file_is_bounded_while_many_times_its_size_passes(tmp_path: Path, policy: str, count: int) -> None:
    """Messages of very different sizes leave holes; they are used again, so that the file stops growing.

    The pages of a second queue, which lives longer, are between the holes of the first.
    """
    seed = seeds.new()
    draw = random.Random(seed)
    used: list[int] = []
    passed = 0
    with cues.open(tmp_path / "store", durability="process") as store:
        kept = POLICIES[policy]
        queues = [store.queue(name, retention=kept[name]) for name in kept]
        appenders = [queue.appender() for queue in queues]
        reader = queues[0].tailer("reader") if kept["passing"] == "read" else None
        number = 0
        while number < count:
            size = draw.choice((1, 10, 200))
            messages = [message(number + i, draw) for i in range(size)]
            passed += sum(len(one["x"]) + 20 for one in messages)
            appenders[0].write_many(messages)
            for appender in appenders[1:]:
                appender.write_many(messages[: max(1, size // 5)])
            if reader is not None:
                reader.read_many(size)
            if number * 20 // count != (number + size) * 20 // count:
                used.append(store.info()["used"])
            number += size
        live = sum(metrics.of_queue(store, name).bytes for name in kept)
    assert used[-1] <= 3 * live + MB, (used, live)
    assert max(used[14:]) <= max(used[:14]) * 1.15 + 256 * 1024, used
    assert passed > 3 * used[-1]


# --- many messages in the store -----------------------------------------------------------------------------


def fill(path: Path, count: int) -> None:
    """A queue of ``count`` messages, and a graph that was killed in the middle of them."""
    with cues.open(path, durability="process") as store:
        write_many = store.queue("in", metadata=True).appender().write_many
        for start in range(0, count, 10):  # a record for every ten
            write_many([{"id": i} for i in range(start, start + 10)])
    with children.Child(KILLED, path, count) as child:
        assert child.returncode() == -signal.SIGKILL


GRAPH = """
import os, signal, sys
from cues import Graph, Sink, Source, Stream

def build(path, on_message):
    def double(message):
        on_message(message)
        return {"id": message["id"], "double": message["id"] * 2}
    return Graph("much", [Source("in"), Stream(double, "in", "out", batch_size=10)], store=path)
"""

KILLED = (
    GRAPH
    + """
def die(message):
    if message["id"] == int(sys.argv[2]) - 3_000:
        os.kill(os.getpid(), signal.SIGKILL)

build(sys.argv[1], die).run()
"""
)


def calls(work: Callable[[], Any]) -> int:
    """The number of calls of Python and C functions that ``work`` makes: each step of a cursor is one."""
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


@pytest.fixture(scope="module", params=[*sizes(100_000), pytest.param(500_000, id="large", marks=pytest.mark.slow)])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """A store with few messages and one with many, each left by a graph that was killed."""
    made = {}
    for name, count in (("few", 20_000), ("many", request.param)):
        made[name] = tmp_path_factory.mktemp("much") / "store", count
        fill(*made[name])
    return made


def commanded(arguments: list[str]) -> None:
    assert cli(arguments) == 0


LOOKS = {
    "status": ["status", "{store}", "--json"],
    "queues": ["queues", "{store}"],
    "tail": ["tail", "{store}#in"],
    "tail of outputs": ["tail", "{store}#out", "-n", "3"],
    "tail from the middle": ["tail", "{store}#in", "--from", "5000", "-n", "2"],
    "tries": ["tries", "{store}#much.double"],
}


@pytest.mark.slow
@pytest.mark.parametrize("look", slow_except(["status", "tail from the middle", "tries"], LOOKS))
def test_a_look_at_a_store_does_not_walk_it(
    look: str,
    stores: dict[str, tuple[Path, int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many messages there are, a command makes about as many calls."""
    monkeypatch.setattr(metrics, "WINDOW_S", 86_400.0)  # both stores were written in the time that rates are about
    made = {}
    for name, (path, count) in stores.items():
        arguments = [argument.format(store=path) for argument in LOOKS[look]]
        commanded(arguments)  # once, so that imports do not count
        out = capsys.readouterr().out
        made[name] = calls(lambda: commanded(arguments))
        assert capsys.readouterr().out
        if look == "tail":
            assert json.loads(out.splitlines()[-1])["id"] == count - 1
    assert made["many"] < made["few"] * 1.1 + 500, made


@pytest.mark.slow
def test_a_start_reads_a_constant_number_of_records(stores: dict[str, tuple[Path, int]], tmp_path: Path) -> None:
    """Behind ``kill -9``, however long the queues are, a start makes as many calls until its processors run."""
    made = {}
    for name, (path, count) in stores.items():
        names: dict[str, Any] = {}
        exec(GRAPH, names)
        seen: list[int] = []
        graph = names["build"](str(path), lambda message: seen.append(message["id"]))
        with graph.start() as running:  # once, so that imports do not count; to the end
            assert running.wait_idle(60)
        first = seen[0]
        assert count - 4_000 <= first <= count - 3_000, "it goes on where the killed one was"
        assert [*range(first, count)] == seen
        assert [m["id"] for m in _from(path, "out", count - 10)] == [*range(count - 10, count)]

        def start() -> None:
            with graph.start():
                pass

        made[name] = calls(start)
    assert made["many"] < made["few"] * 1.1 + 500, made


def _from(path: Path, queue: str, offset: int) -> list[dict[str, Any]]:
    with cues.open(path, readonly=True) as store:
        tailer = store.queue(queue).tailer()
        tailer.to_index(offset + 1)
        return tailer.read_many(100)


# --- a day -------------------------------------------------------------------------------------------

DAY = """
import gc, json, sys, tracemalloc
from datetime import UTC, datetime, timedelta
import cues
from cues import testing
from cues.processors import reducers, windows
from cues.steps import state

state.CACHE_ROWS_MAX = 500  # a cache is bounded, but a day of one test does not fill it
path, hours = sys.argv[1], int(sys.argv[2])
graph = cues.Graph("day", errors="errors", queues={"*": cues.QueueOptions(retention="1h")})
graph.add(cues.Source("clicks", None))

@graph.stream("clicks", "checked")
def check(click):
    if click["n"] % 50 == 0:
        raise ValueError("a fiftieth")
    return click

@graph.stream("checked", "visits", key="user", ttl="10m")
def visit(click, process):
    process.state["clicks"] = process.state.get("clicks", 0) + 1
    return {**click, "clicks": process.state["clicks"]}

@graph.stream("checked", "reminders")
def remind(click):
    return cues.delayed({"user": click["user"]}, delay="7m")

@graph.stream("checked", "quiet", key="user")
def watch(click, process):
    process.state["n"] = click["n"]
    process.timer(click["user"], process.now + timedelta(minutes=5))

@graph.timer("watch")
def ended(timer, process):
    n = process.state["n"]
    process.state.clear()
    return {"user": timer["key"], "n": n}

counts = {"count": reducers.count()}
graph.add(windows.tumbling("checked", "minutes", "1m", time="at", key="page", late="late", reduce=counts))
graph.add(windows.sessions("visits", "sessions", "3m", time="at", key="user", late="late", reduce=counts))
seen = dict.fromkeys(("reminders", "quiet", "minutes", "sessions", "errors", "late"), 0)

def see(queue):
    def count(message):
        seen[queue] += message.get("count", 1)
    return count

for queue in seen:
    graph.sink(queue, id=f"see-{queue}")(see(queue))

# The interpreter's table of interned strings has room before the measurement: it grows by a megabyte at any time.
interned = [sys.intern(f"a string {n}") for n in range(200_000)]
memory, used = [], []
with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock, cues.open(path, durability="process") as store:
    with graph.start(store=store) as running:
        tracemalloc.start()
        for minute in range(hours * 60):
            at = clock.now
            for n in range(minute * 10, minute * 10 + 10):
                running.send({"n": n, "user": f"user {n // 7}", "page": n % 10, "at": at})
            running.wait_idle(60)
            clock.advance(60)
            if minute % 60 == 59:
                gc.collect()
                memory.append(tracemalloc.get_traced_memory()[0])
                used.append(store.info()["used"])
    print(json.dumps({"memory": memory, "used": used, "seen": seen}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hours", [24, pytest.param(24 * 30, marks=pytest.mark.long, id="a month")])
def test_a_day_of_windows_timers_delays_and_failures_has_flat_memory(tmp_path: Path, hours: int) -> None:
    """By an accelerated clock: 600 messages an hour, of 86 users who come once."""
    with children.Child(DAY, tmp_path / "store", hours) as child:
        figures = json.loads(child.line())
        child.end()
    total = hours * 600
    good = total - total // 50
    seen = figures["seen"]
    assert seen["errors"] == total // 50 and seen["late"] == 0
    # What is due in the last minutes of the day is left.
    assert good - 10 * 10 <= seen["reminders"] <= good
    assert total // 7 - 20 <= seen["quiet"] <= total // 7 + 1
    assert good - 10 <= seen["minutes"] <= good and good - 10 * 10 <= seen["sessions"] <= good
    memory, used = figures["memory"], figures["used"]
    # The most of each half, because the caches of what was read last are emptied now and then.
    half = len(memory) // 2
    assert max(memory[half:]) - max(memory[:half]) < 0.7 * MB, memory  # that is 100 bytes a message
    assert max(used[6:]) < 2 * used[5], used
