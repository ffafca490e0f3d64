"""Wall clocks that step back and forward, between runs and inside them, at random, against plain lists.

A row of :data:`ROWS` is one use of the wall clock: a graph or a program, what is sent to it, and lists that say which
results may come, and which must. A play is rounds. Each of them sets the clock, forward or back by up to a day, sends
messages, and runs to the end. ``between``: the clock steps between rounds only, so a round has one time. ``inside``: it
also steps at any reading, in the middle of a step, so a round has a lowest and a highest reading: what is due at both
must come, and what is due at neither must not come.

The monotonic clock does not step. Each use of the wall clock in the product is named in :data:`USES`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import seeds
from sets import bounded
from simulation.world import replaced

import cues
from cues import Graph, testing
from cues.base import clock as clocks
from cues.groups import Member
from cues.processors import shape, windows
from cues.processors.file_sink import FileSink
from cues.processors.reducers import collect, count
from cues.queues.log import DELETE_ENTRIES_MAX
from cues.txn import Publisher

START = datetime(2026, 1, 31, tzinfo=UTC)
FURTHEST = timedelta(days=3)
"""The clock stays so near to :data:`START`; else it would walk away from the times of waiting messages."""
TTL_S = WITHIN_S = QUIET_S = IDLE_S = TIMEOUT_S = 60
LONGEST_S = 600
AGE_S = 3_600
STEPS_S = [0, 1, 30, 59, 60, 61, 600, 86_400, -1, -30, -61, -600, -86_400]
"""Steps of the clock. Those back are as long as those forward, so the clock passes the same times again and again."""
INSIDE = 0.05
"""The part of the readings at which the clock steps inside a run."""


class Span(NamedTuple):
    """The lowest and the highest reading of the clock in a round."""

    low: datetime
    high: datetime


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


class SteppingClock(testing.Clock):
    """A clock that steps when it is told, or by itself at any reading."""

    def __init__(self, dice: random.Random, inside: bool) -> None:
        super().__init__(START)
        self.dice, self.inside = dice, inside
        self.back = self.forward = 0
        self.span = Span(START, START)

    def step(self, by_s: float | None = None) -> None:
        """Step by this, or by a random one of :data:`STEPS_S`."""
        wanted = self.now + seconds(self.dice.choice(STEPS_S) if by_s is None else by_s)
        if abs(wanted - START) <= FURTHEST:
            self.back += wanted < self.now
            self.forward += wanted > self.now
            self.set(wanted)

    def _read(self) -> int:
        if self.inside and self.dice.random() < INSIDE:
            self.step()
        self.span = Span(min(self.span.low, self.now), max(self.span.high, self.now))
        return clocks.to_ns(self.now)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self, replaced([(clocks, "now_ns", self._read), (time, "time", lambda: self._read() / 1e9)]):
            yield

    def round(self) -> Span:
        """Begin a round: return the span of the last one."""
        last, self.span = self.span, Span(self.now, self.now)
        return last


class Row:
    """A use of the wall clock. A subclass says in its first line what is promised when the clock is wrong."""

    outputs: ClassVar[tuple[str, ...]] = ("out",)
    cost: ClassVar[int] = 1
    """The time of a round, in that of others."""

    def __init__(self, store: cues.Store, clock: SteppingClock) -> None:
        self.store, self.clock, self.dice = store, clock, clock.dice
        self.sent: dict[int, dict[str, Any]] = {}
        self._taken = dict.fromkeys(self.outputs, 0)

    def graph(self) -> Graph:
        raise NotImplementedError

    def message(self) -> dict[str, Any]:
        return {"key": self.dice.choice("xyz")}

    def send(self) -> None:
        """Send a few messages, each with a number of its own."""
        with self.store.queue("in").appender() as appender:
            for _ in range(self.dice.randrange(4)):
                n = len(self.sent)
                message = {"n": n, **self.message()}
                self.sent[n] = message
                appender.write(self.written(message))

    def written(self, message: dict[str, Any]) -> Any:
        return message

    def run(self) -> None:
        testing.run_until_idle(self.graph(), self.store)

    def messages(self, queue: str) -> list[dict[str, Any]]:
        """All messages of an output."""
        return testing.messages(self.store, queue)

    def new(self) -> list[list[Any]]:
        """The messages that the round has brought, by output."""
        found = []
        for name in self.outputs:
            all = self.messages(name)
            found.append(all[self._taken[name] :])
            self._taken[name] = len(all)
        return found

    def judge(self, span: Span) -> None:
        """Compare what the round has brought."""
        raise NotImplementedError

    def end(self) -> None:
        """Finish under a clock that is right and late enough, and look whether everything has come."""
        raise NotImplementedError

    def finish(self, until: datetime) -> None:
        """Run under a right clock at this time, and judge the round."""
        self.clock.set(max(until, self.clock.now))
        self.clock.round()
        self.run()
        self.judge(self.clock.round())


# --- the rows ------------------------------------------------------------------------------------


class Value(NamedTuple):
    n: int
    written: Span
    newest: datetime
    """The highest reading since it was written."""


class Delayed(Row):
    """A delayed message: once, not before its time, and when the clock reaches it. State: as long as ttl= says.

    A value may be seen if it is the last one that was written, and has not expired. It must be seen if it has not
    expired at any reading since: a clock that was ahead may have removed it.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.waiting: dict[int, datetime] = {}
        self.values: dict[tuple[str, str], Value] = {}

    def graph(self) -> Graph:
        def handle(message: dict[str, Any], process: Any) -> dict[str, Any]:
            seen = dict(process.state)
            process.state[message["field"]] = message["n"]
            return {"n": message["n"], "seen": seen}

        return Graph("g", [cues.Source("in"), cues.Stream(handle, "in", "out", id="p", key="key", ttl=TTL_S)])

    def message(self) -> dict[str, Any]:
        return {"key": self.dice.choice("xyz"), "field": self.dice.choice("abc")}

    def written(self, message: dict[str, Any]) -> Any:
        at = self.waiting[message["n"]] = self.clock.now + seconds(self.dice.choice(STEPS_S))
        if self.dice.random() < 0.4:
            return cues.delayed(message, deliver_at=at)
        self.waiting[message["n"]] = datetime.min.replace(tzinfo=UTC)
        return message

    def judge(self, span: Span) -> None:
        (out,) = self.new()
        for place, value in self.values.items():
            self.values[place] = value._replace(newest=max(value.newest, span.high))
        came = [one["n"] for one in out]
        assert len(set(came)) == len(came), "once"
        assert {n for n, at in self.waiting.items() if at <= span.low} <= {*came}, "each that is due"
        assert {*came} <= {n for n, at in self.waiting.items() if at <= span.high}, "none that is not"
        for one in out:
            del self.waiting[one["n"]]
            message = self.sent[one["n"]]
            mine = {field: value for (key, field), value in self.values.items() if key == message["key"]}
            must = {f: v.n for f, v in mine.items() if v.newest < v.written.low + seconds(TTL_S)}
            may = {f: v.n for f, v in mine.items() if v.written.high + seconds(TTL_S) > span.low}
            assert must.items() <= one["seen"].items() <= may.items(), (must, one, may)
            self.values[message["key"], message["field"]] = Value(one["n"], span, span.high)

    def end(self) -> None:
        self.finish(max(self.waiting.values(), default=START))
        assert not self.waiting


class Timers(Row):
    """A timer: once, with its last time, not before the clock reaches it, and then."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.set: dict[str, datetime] = {}

    def graph(self) -> Graph:
        def handle(message: dict[str, Any], process: Any) -> dict[str, Any]:
            process.timer(message["key"], message["at"])
            return {"set": message["n"]}

        def fired(timer: dict[str, Any], process: Any) -> dict[str, Any]:
            return {"key": timer["key"], "at": timer["at"]}

        return Graph("g", [cues.Source("in"), cues.Stream(handle, "in", "out", id="p", key="key", timer=fired)])

    def message(self) -> dict[str, Any]:
        at = self.clock.now + seconds(self.dice.choice(STEPS_S)) + timedelta(microseconds=len(self.sent))
        return {"key": self.dice.choice("xyz"), "at": None if self.dice.random() < 0.2 else at}

    def judge(self, span: Span) -> None:
        (out,) = self.new()
        for one in out:  # in the order of their commits
            if "set" in one:
                message = self.sent[one["set"]]
                self.set.pop(message["key"], None)
                if message["at"] is not None:
                    self.set[message["key"]] = message["at"]
            else:
                assert self.set.pop(one["key"]) == one["at"], "the last time that was set, once"
                assert one["at"] <= span.high
        assert all(at > span.low for at in self.set.values()), "each that is due"

    def end(self) -> None:
        self.finish(max(self.set.values(), default=START))
        assert not self.set


class Ticks(Row):
    """A schedule: each planned time at most once and in order; none before the clock reaches it."""

    outputs = ("ticks",)
    EACH_S = 3_600
    missed = "all"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.started: datetime | None = None
        self.last = START
        self.index = 0

    def graph(self) -> Graph:
        graph = Graph("g")
        graph.source("ticks")(self.schedule())
        return graph

    def schedule(self) -> Any:
        return cues.every(self.EACH_S, missed=self.missed)

    def send(self) -> None:
        if self.started is None:
            was, self.clock.inside = self.clock.inside, False
            self.run()  # the first start notes its time
            self.clock.inside = was
            self.started = self.last = self.clock.now

    def number_of(self, at: datetime) -> int:
        assert self.started is not None
        return int(at.timestamp() // self.EACH_S - self.started.timestamp() // self.EACH_S)

    def judge(self, span: Span) -> None:
        (out,) = self.new()
        for one in out:
            at = one["at"]
            assert at.timestamp() % self.EACH_S == 0 and self.last < at <= span.high
            assert one["index"] == self.number_of(at), "planned times are counted, also those that are not written"
            if self.missed == "all":
                assert one["index"] == self.index + 1, "none is lost"
            self.last, self.index = at, one["index"]
        if self.missed != "none":
            assert self.number_of(span.low) <= self.number_of(self.last), "each that is due, or the last one"

    def end(self) -> None:
        self.finish(max(self.last, self.clock.now) + seconds(self.EACH_S))


class LastTicks(Ticks):
    """``missed="last"``: the same, and of those that are due the last one."""

    missed = "last"


class NoMissedTicks(Ticks):
    """``missed="none"``: the same, and none from before the start of a run."""

    missed = "none"


class CronTicks(Ticks):
    """``cron``: the same as ``every``."""

    def schedule(self) -> Any:
        return cues.cron("0 * * * *")


class Held(NamedTuple):
    n: int
    taken: Span


class Debounce(Row):
    """Of each quiet time the last message, once, with the number of messages for which it stands.

    A message that is held passes when the clock is ``quiet`` after it, or ``longest`` after the earliest of its time:
    so after a step back it waits longer, by at most that step.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.held: dict[str, list[Held]] = {key: [] for key in "xyz"}

    def graph(self) -> Graph:
        settled = shape.debounce("in", "out", key="key", quiet=QUIET_S, longest=LONGEST_S, count="count")
        return Graph("g", [cues.Source("in"), settled])

    def due(self, held: list[Held], of: Callable[[Span], datetime]) -> datetime:
        return min(of(held[-1].taken) + seconds(QUIET_S), min(of(one.taken) for one in held) + seconds(LONGEST_S))

    def judge(self, span: Span) -> None:
        (out,) = self.new()
        known = {held.n for each in self.held.values() for held in each}
        for n, message in self.sent.items():
            if n not in known and n >= self.seen:
                self.held[message["key"]].append(Held(n, span))
        self.seen = len(self.sent)
        for one in out:
            held = self.held[one["key"]]
            group, self.held[one["key"]] = held[: one["count"]], held[one["count"] :]
            assert group[-1].n == one["n"], "the last one of those for which it stands"
            assert self.due(group, lambda taken: taken.low) <= span.high, "not before its time"
        for held in filter(None, self.held.values()):
            assert self.due(held, lambda taken: taken.high) > span.low, "each whose time is over"

    seen = 0

    def end(self) -> None:
        latest = [self.due(held, lambda taken: taken.high) for held in self.held.values() if held]
        self.finish(max(latest, default=START))
        assert not any(self.held.values())


class Passed(NamedTuple):
    taken: Span
    newest: Span
    """All readings since then."""


class Dedupe(Row):
    """A message is dropped if one of its key was passed ``within`` before or after it, by the clock.

    A clock that was 2 × ``within`` away in the meantime may have removed the note of it: then it may pass.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passed: dict[str, list[Passed]] = {key: [] for key in "xyz"}
        self.seen = 0

    def graph(self) -> Graph:
        same = cues.Stream(shape.dedupe("key", within=WITHIN_S), "in", "out", id="p")
        return Graph("g", [cues.Source("in"), same])

    def judge(self, span: Span) -> None:
        (out,) = self.new()
        came, within = [one["n"] for one in out], seconds(WITHIN_S)
        assert came == sorted({*came} & {*range(self.seen, len(self.sent))}), "once, and in order"
        for each in self.passed.values():
            each[:] = [one._replace(newest=_both(one.newest, span)) for one in each]
        for n in range(self.seen, len(self.sent)):
            mine = self.passed[self.sent[n]["key"]]
            if n in came:
                for one in mine:
                    known = max(one.newest.high - one.taken.low, one.taken.high - one.newest.low) < 2 * within
                    near = max(span.high - one.taken.low, one.taken.high - span.low) < within
                    assert not (known and near), f"{n} passed after one of its key"
                mine.append(Passed(span, span))
            else:
                may = [one for one in mine if one.taken.low - within < span.high and span.low < one.taken.high + within]
                assert may, f"{n} was dropped"
        self.seen = len(self.sent)

    def end(self) -> None:
        pass


def _both(one: Span, other: Span) -> Span:
    return Span(min(one.low, other.low), max(one.high, other.high))


class IdleWindows(Row):
    """``idle=``: each message is in the result of its window, or late, once; and windows close without a message.

    After a step back the inputs count as silent later, by at most that step, if no message comes.
    """

    outputs = ("out", "late")
    options: ClassVar[dict[str, Any]] = {"idle": IDLE_S}

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.found: list[int] = []
        self.results: dict[tuple[str, Any], list[int]] = {}
        self.late: list[int] = []

    def graph(self) -> Graph:
        made = windows.tumbling(
            "in",
            "out",
            "1m",
            time="at",
            key="key",
            delay="10s",
            late="late",
            reduce={"n": count(), "all": collect("n")},
            **self.options,
        )
        return Graph("g", [cues.Source("in"), made])

    def message(self) -> dict[str, Any]:
        return {"key": self.dice.choice("xyz"), "at": len(self.sent) * 7 + self.dice.randrange(60)}

    def judge(self, span: Span) -> None:
        out, late = self.new()
        for one in out:
            self.result(one)
        self.late += [one["message"]["n"] for one in late]

    def result(self, one: dict[str, Any]) -> None:
        window = one["key"], one["start"]
        assert window not in self.results, "a result of a window, once"
        self.results[window] = one["all"]
        for n in one["all"]:
            assert self.sent[n]["key"] == one["key"]
            assert one["start"].timestamp() <= self.sent[n]["at"] < one["end"].timestamp()

    def count(self) -> int:
        return len(self.late) + sum(map(len, self.results.values()))

    running: Any = None

    def run(self) -> None:
        """Let one run last for several rounds: an input is silent only while the graph runs."""
        if self.running is None:
            self.running = self.graph().start(store=self.store)
        assert self.running.wait_idle(timeout=60)
        if self.dice.random() < 0.1:
            self.stop()

    def stop(self) -> None:
        if self.running is not None:
            self.running.close()
        self.running = None

    def close(self) -> None:
        """Let all windows close: a timer of a clock that was ahead waits until the clock has passed its time."""
        self.clock.set(START + FURTHEST)
        until = time.monotonic() + 60
        while self.count() < len(self.sent) and time.monotonic() < until:
            self.finish(self.clock.now + 2 * seconds(IDLE_S))
        self.stop()

    def end(self) -> None:
        self.close()
        came = [*self.late, *(n for each in self.results.values() for n in each)]
        assert sorted(came) == [*range(len(self.sent))], "each message, once"


class EarlyWindows(IdleWindows):
    """``early=``: the final results are those of event time alone; early ones are before them, and grow."""

    options: ClassVar[dict[str, Any]] = {"early": 60}

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.early: dict[tuple[str, Any], list[int]] = {}

    def result(self, one: dict[str, Any]) -> None:
        window = one["key"], one["start"]
        before = self.early.get(window, [])
        assert one["all"][: len(before)] == before and window not in self.results
        if one["final"]:
            super().result(one)
        else:
            assert len(one["all"]) > len(before), "only a window that has changed"
            self.early[window] = one["all"]

    def run(self) -> None:
        Row.run(self)

    def close(self) -> None:
        testing.run_until_idle(self.graph(), self.store, close_open=True)
        self.judge(self.clock.round())

    def end(self) -> None:
        super().end()
        mark, late = float("-inf"), []
        for n, message in self.sent.items():
            if message["at"] // 60 * 60 + 60 <= mark:
                late.append(n)
            mark = max(mark, message["at"] - 10)
        assert self.late == late, "the clock decides nothing"


class Age(Row):
    """Retention by age: an append removes what was appended an age ago, and nothing else; of more than 1,000 messages,
    1,000 and the rest of their batch, and a later append the others. Append times never decrease.

    So what was written under a clock that was ahead, and after that, stays longer, by at most that step.
    """

    outputs = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.queue = self.store.queue("in", retention="1h")
        self.times: list[Span] = []
        self.newest: list[datetime] = []
        """Of each message: the highest reading since it was appended."""
        self.first = 0
        """The first message that was left in the last round."""

    def send(self) -> None:
        appender = self.queue.appender()
        for _ in range(self.dice.randrange(4)):
            appender.write({"n": len(self.sent)})
            self.sent[len(self.sent)] = {}

    def run(self) -> None: ...

    def judge(self, span: Span) -> None:
        last = self.times[-1] if self.times else span
        appended = len(self.sent) - len(self.times)
        for _ in range(appended):
            self.times.append(Span(max(last.low, span.low), max(last.high, span.high)))
            self.newest.append(span.high)
        self.newest = [max(one, span.high) for one in self.newest]
        left = [one["n"] for one in testing.messages(self.store, "in")]
        assert left == [*range(len(self.sent) - len(left), len(self.sent))], "those at the end"
        age, first = seconds(AGE_S), len(self.sent) - len(left)
        before, self.first = self.first, first
        for n, (written, newest) in enumerate(zip(self.times, self.newest)):
            if written.low + age > newest:
                assert n >= first, f"{n} went before it was an hour old"
            if appended and written.high + age * 9 / 8 < span.low and first - before < DELETE_ENTRIES_MAX:
                assert n < first, f"{n} is old"

    def end(self) -> None:
        self.clock.set(max(written.high for written in self.times) + 2 * seconds(AGE_S))
        self.clock.round()
        appends = 1 + len(self.sent) // DELETE_ENTRIES_MAX
        for _ in range(appends):
            self.queue.appender().write({"n": len(self.sent)})
            self.sent[len(self.sent)] = {}
            self.judge(self.clock.round())
        assert len(testing.messages(self.store, "in")) == appends


class InDirectory(Row):
    """Steps over a shared directory: each run is a new driver."""

    cost = 5

    def __init__(self, store: cues.Store, clock: SteppingClock) -> None:
        super().__init__(store, clock)
        pytest.importorskip("pyspark")
        pytest.importorskip("deltalake")
        from cues.spark.cluster.files import LocalFiles

        self.files = LocalFiles(str(Path(store.path).with_name("directory")))

    def run(self) -> None:
        from directory_steps import HostRun

        run = HostRun(self.files, self.graph(), Path(self.store.path)).claim()
        run.run()
        self.found = {name: run.messages(name) for name in self.outputs}
        run.close()

    def messages(self, queue: str) -> list[dict[str, Any]]:
        return self.found[queue]


class DelayedInDirectory(InDirectory, Delayed):
    """The same as :class:`Delayed`."""


class TimersInDirectory(InDirectory, Timers):
    """The same as :class:`Timers`."""


class AgeInDirectory(InDirectory):
    """Retention by age: a file whose time is less than an age ago stays, and all after it. A time of the future counts
    for nothing: such a file goes with a later one. A file goes when it and all before it are older."""

    outputs = ()
    cost = 1

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from directory_steps import DriverRun

        queue = cues.QueueOptions(retention=cues.Retention(age=AGE_S))
        graph = Graph("g", [cues.Stream(lambda message: None, "in", "out", id="p")], queues={"in": queue})
        self.driver = DriverRun(self.files, graph).claim()
        self.driver.maintenance.merge_files = 0
        self.appended: list[Span] = []
        self.first = 0

    def send(self) -> None:
        self.sent[len(self.sent)] = {"n": len(self.sent)}
        self.driver.feed("in", [*self.sent.values()])
        self.appended.append(self.clock.round())  # of the append alone

    def run(self) -> None:
        self.driver.run()
        (log,) = self.driver.queues["in"].logs
        self.clock.round()
        self.driver.maintenance.retain(log, log.directory.options.retention)

    def judge(self, span: Span) -> None:
        (log,) = self.driver.queues["in"].logs
        before, self.first = self.first, log.first - 1
        assert before <= self.first and log.next - 1 == len(self.sent)
        old = span.low - seconds(AGE_S)
        young = [
            n for n, at in enumerate(self.appended) if span.high - seconds(AGE_S) <= at.low and at.high <= span.low
        ]
        assert all(n >= self.first for n in young if n >= before), "a file that is young went"
        for n, at in enumerate(self.appended[:-1]):
            if at.high >= old:
                break
            assert n < self.first, f"{n} and all before it are old"

    def end(self) -> None:
        self.send()
        self.clock.set(START + 2 * FURTHEST)
        self.run()
        self.judge(self.clock.round())
        assert self.first == len(self.sent) - 1


class RolledFiles(Row):
    """A file of a sink with ``roll_s``: finished by the first commit so long after its first row, or before that."""

    outputs = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.path = Path(self.store.path).with_name("files")
        self.written_at: list[Span] = []

    def run(self) -> None:
        files = FileSink(self.path, "jsonl", roll_s=IDLE_S, durability="process")
        testing.run_until_idle(Graph("g", [cues.Source("in"), files.sink("in", id="files")]), self.store)
        files.close()  # it would finish a file by its time, while the files are read

    def rows(self, ending: str) -> list[int]:
        return [json.loads(line)["n"] for path in self.path.rglob(f"*.{ending}") for line in path.open()]

    def judge(self, span: Span) -> None:
        appended = len(self.sent) - len(self.written_at)
        self.written_at += [span] * appended
        if appended and (left := self.rows("open")):
            first = self.written_at[min(left)]
            assert first.low <= span.high and span.low < first.high + seconds(IDLE_S)

    def end(self) -> None:
        self.finish(self.clock.now)
        assert sorted([*self.rows("jsonl"), *self.rows("open")]) == [*range(len(self.sent))]


class Leases(Row):
    """Members of a group: none loses its place, because leases follow the monotonic clock; each message once."""

    outputs = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.store.queue("in", partitions=4, key="key")
        self.members = [Member(self.store, "in", "group") for _ in range(2)]
        self.came: list[int] = []
        for _ in range(2):  # each leaves partitions to the other
            self.held = [member.follow_group() for member in self.members]

    def message(self) -> dict[str, Any]:
        return {"key": self.dice.randrange(100)}

    def run(self) -> None:
        for member in self.members:
            while (message := member.read(timeout=0)) is not None:
                self.came.append(message["n"])
            member.commit()

    def judge(self, span: Span) -> None:
        assert sorted(self.came) == [*range(len(self.sent))]
        assert [member.assigned for member in self.members] == self.held, "no partition moves"

    def end(self) -> None:
        assert [len(held) for held in self.held] == [2, 2]
        for member in self.members:
            member.close()


class Timeouts(Row):
    """A transaction is committed as a whole, or its publisher is told that it was rolled back. None is half there."""

    outputs = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.publisher = Publisher(transaction_timeout_s=TIMEOUT_S)
        self.queues = [self.store.queue(name) for name in ("in", "other")]
        self.readers = [queue.tailer(isolation="committed") for queue in self.queues]
        self.found: list[list[int]] = [[], []]
        self.committed: list[list[int]] = [[], []]
        self.fenced = 0

    def read(self) -> None:
        for reader, found in zip(self.readers, self.found):
            reader.queue.core.look_at = 0.0  # it looks for expired transactions at most once a second
            while (message := reader.read()) is not None:
                found.append(message["n"])

    def send(self, step_s: float | None = None) -> None:
        n = len(self.sent)
        self.sent[n] = {}
        try:
            for queue in self.queues:
                self.publisher.publish_uncommitted(lambda message: queue, {"n": n}).wait()
            self.read()  # while it is pending
            self.clock.step(step_s)
            self.read()
            intents = self.publisher.build_ack_intents()
        except cues.Fenced:
            self.fenced += 1
            self.publisher.abort()
            return
        self.publisher.append_ack_intents(intents)
        for committed in self.committed:
            committed.append(n)

    def run(self) -> None:
        self.read()

    def judge(self, span: Span) -> None:
        assert self.found == self.committed

    def end(self) -> None:
        self.clock.set(START)
        for step_s, fenced in ((0, 0), (2 * TIMEOUT_S, 1)):
            before = self.fenced, len(self.committed[0])
            self.send(step_s)
            assert (self.fenced, len(self.committed[0])) == (before[0] + fenced, before[1] + 1 - fenced)
        self.read()
        self.judge(self.clock.span)
        self.publisher.close()


ROWS = [
    Delayed,
    Timers,
    Ticks,
    LastTicks,
    NoMissedTicks,
    CronTicks,
    Debounce,
    Dedupe,
    IdleWindows,
    EarlyWindows,
    Age,
    DelayedInDirectory,
    TimersInDirectory,
    AgeInDirectory,
    RolledFiles,
    Leases,
    Timeouts,
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@bounded("rounds", 25, 1_000)
def test_a_row_keeps_its_promise_under_a_clock_that_steps(
    cues_store: cues.Store, row: type[Row], inside: bool, rounds: int
) -> None:
    clock = SteppingClock(random.Random(seeds.new()), inside)
    with clock.running():
        use = row(cues_store, clock)
        for number in range(rounds // row.cost):
            clock.step((600, -600)[number] if number < 2 else None)  # each way at least once
            clock.round()
            use.send()
            use.run()
            use.judge(clock.span)
        clock.inside = False
        use.end()
    assert clock.back and clock.forward
    assert cues_store.check() == []
    print(f"{rounds} rounds, {clock.back} steps back, {clock.forward} forward, {len(use.sent)} messages")


# --- all uses ------------------------------------------------------------------------------------

SHOWN = "shown, noted or logged; nothing is decided by it"
ROW = "has a row above"
FUTURE = "the time of a file: one of the future counts as one of long ago"

USES = {
    SHOWN: """
        cues/base/texts cues/cli/history cues/cli/top cues/cli/watching cues/engine/outages cues/engine/record
        cues/engine/sampler cues/operate/stores cues/queues/backpressure cues/queues/queue cues/spark/stretches
        cues/spark/cluster/inspection cues/spark/cluster/ledger cues/spark/cluster/lease cues/steps/closing
        cues/steps/error_records cues/steps/meter cues/storage/format_record cues/tools/backup cues/tools/follower
        cues/tools/metrics cues/tools/salvage cues/txn/registration cues/ui/look cues/ui/sample cues/ui/server
        processors/mysql_changes processors/postgres_wire""",
    ROW: """
        cues/graphs/schedules cues/queues/base cues/queues/log cues/queues/options cues/queues/retention
        cues/queues/rollback cues/spark/cluster/data cues/spark/cluster/engine cues/spark/cluster/feeder
        cues/spark/cluster/maintenance cues/spark/cluster/step cues/spark/cluster/tasks cues/steps/delays
        cues/steps/due_lane cues/steps/process cues/steps/state cues/steps/stepper cues/steps/timers cues/txn/writer
        processors/event_time processors/file_sink processors/shape""",
    FUTURE: "processors/families processors/file_source processors/opened_file",
    "the clock itself, and that of tests": "cues/base/clock cues/testing",
    "a wrong clock is what it looks for": "cues/tools/doctor",
    "'10 minutes ago' of an operator: by the clock of that moment": "cues/operate/positions",
    "clocks of producers: they only increase": "cues/steps/pending cues/txn/journals cues/txn/publisher",
    "the times of messages and entries in a shared directory: they decrease with the clock":
        "cues/spark/cluster/directory cues/spark/cluster/frames cues/spark/cluster/ingest cues/spark/cluster/queries",
    "a reader that has lasted for a day holds up an operator's vacuum; the next try looks again":
        "cues/spark/cluster/cleaning",
    "max_errors=: a clock before the window begins a new one": "cues/steps/pauses",
    "rate=: at a start, which allows at most one call": "cues/steps/bucket",
    "expire_s of a group: earlier or later by the step, as docs/groups.md says":
        "cues/groups/group_rows cues/groups/table",
    "signatures and dates of other machines: refused outside of their tolerance, or waited for within a limit":
        "processors/http",
    "a turn among writers: bounded by its own length": "processors/iceberg",
    "the clock of Kinesis, as its answers tell it": "processors/kinesis_source",
    "ids of messages are kept for 14 days, the longest that SQS keeps any": "processors/sqs",
}  # fmt: skip
"""By the effect of a wrong wall clock: the modules that read it. Others measure time with the monotonic clock."""

WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "clock.now_ns", "clocks.now_ns", "process.now"}


def test_each_use_of_the_wall_clock_is_known() -> None:
    root = Path(cues.__file__).parent.parent
    found = set()
    for path in [*(root / "cues").rglob("*.py"), *(root / "processors").rglob("*.py")]:
        name = str(path.relative_to(root).with_suffix(""))
        if not name.startswith("cues/processors/"):  # a link to the other folder
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node) in WALL:
                    found.add(name)
    known = [name for names in USES.values() for name in names.split()]
    assert sorted(found) == sorted(known), "say in USES what a wrong clock does there"
