"""A store and a plain Python model of it, driven side by side by hypothesis.

The model holds what a user was promised: every message ever appended under its index and with its
append time, the first index that is left, the stored positions of named tailers, and what a small
graph must have made of the messages that its positions say are done. After every rule the store is
read whole and must be equal.

    left ──▸ fold (keyed state, fan-out, errors) ──▸ odd, even
    even and right ──▸ join (side effects) ──▸ pairs
    any of odd, pairs, kept ──▸ save

A crash is what ``kill -9`` leaves: in the middle of a transaction the files are copied as they are
in that instant, and the machine continues with the copy.

Where more than one outcome is allowed the model says so: a tailer may hand out what a retention
policy (not a purge) took away while it was read ahead, and a run that was cut short may have done
any number of steps; its positions then say which, and everything else must agree with them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cues
from cues import AnyOf, Graph, Retention, Sink, Store, Stream, faults, testing
from cues.base import names
from cues.base.clock import to_datetime, to_ns
from cues.errors import CodecError, InvalidArgument, StoreReadOnly
from cues.graphs import processor_rows
from cues.queues.log import KEY
from cues.steps import ownership

R = TypeVar("R")

Message = dict[str, Any]
Direction = Literal["forward", "backward"]

MAP_BYTES = 4 << 20
START = datetime(2026, 1, 1, tzinfo=UTC)
FED = ("left", "right", "kept")
"""Queues that the rules write to and give options."""
MADE = ("even", "odd", "pairs", "errors")
"""Queues that the graph writes to."""
TAILERS = {
    "fold": {"g.fold.left": "left"},
    "join": {"g.join.even": "even", "g.join.right": "right"},
    "save": {"g.save.odd": "odd", "g.save.pairs": "pairs", "g.save.kept": "kept"},
}
APPEND_POINTS = ["append.before", "append.inside", "append.after"]
RUN_POINTS = list(faults.STEP_POINTS)
KEYS = 3
SHARED = ("kept", "r1")
READERS = [
    ("left", None),
    ("left", "r1"),
    ("kept", None),
    SHARED,
    SHARED,
    ("right", "r2"),
    ("errors", None),
]
"""Queue and name of the tailers that the rules use; two that have one name share a position."""
CHECK_EVERY = 6
"""Rules between two integrity checks."""

SIZES = st.sampled_from([0, 1, 100, 1500, 4040, 4060, 4080, 9000])
"""Bytes of payload: around one page and beyond, where a message needs continuation records."""
PLACES = st.integers(-2, 8)


@dataclass
class Log:
    """The expected content of one queue."""

    messages: list[Message] = field(default_factory=list)
    """Every message ever, the one under index i at i - 1."""
    times_ns: list[int] = field(default_factory=list)
    first: int = 1
    floor: int = 1
    """Up to here purges went, which are exact for readers at once; retention is not."""
    retention: Retention | None = None
    readers: dict[str, int] = field(default_factory=dict)
    """Stored positions of named tailers."""

    @property
    def next(self) -> int:
        return len(self.messages) + 1

    @property
    def held(self) -> list[Message]:
        return self.messages[self.first - 1 :]

    def append(self, messages: list[Message], now_ns: int) -> None:
        time_ns = max([now_ns, *self.times_ns[-1:]])
        self.messages += messages
        self.times_ns += [time_ns] * len(messages)

    def purge(self, before: int) -> None:
        self.first = self.floor = max(self.first, before)

    def at_time(self, ns: int) -> int:
        return next((i for i in range(self.first, self.next) if self.times_ns[i - 1] >= ns), self.next)

    def some_index(self, place: int) -> int:
        """An index of the queue, somewhat before its front at times: what was purged may be asked for."""
        return max(1, min(self.first + place, self.next))


@dataclass
class Reader:
    """A tailer, and its expected position."""

    tailer: cues.Tailer
    log: Log
    name: str | None
    index: int
    stored: set[int | None]
    """The last position that it saw under its name in the store: the values that are possible."""


class StoreMachine(RuleBasedStateMachine):
    """The rules; each does one thing to both."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="cues-model-"))
        self.clock = testing.Clock(START)
        self.clock.__enter__()
        self.lives = 0
        self.numbers = 0
        self.rules = 0
        self.logs: dict[str, Log] = {}
        self.readers: list[Reader] = []
        self.positions: dict[str, int] = {}
        """By tailer id, as the processors' rows have them; empty before the graph's first run."""
        self.pending: dict[str, bool] = {}
        self.state: Counter[int] = Counter()
        self.generations: Counter[str] = Counter()
        self.told: list[tuple[str, int, str, Message]] = []
        """What the sink was called with in one run: tailer, index, hash, message."""
        self.hashes: dict[tuple[int, str, int], str] = {}

    @initialize(durability=st.sampled_from(["process", "process", "process", "disk"]))
    def make(self, durability: str) -> None:
        self.durability = durability
        self.open()

    # --- the store ----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self.directory / f"life-{self.lives}"

    def open(self) -> None:
        self.store = Store(self.path, durability=self.durability, map_size=MAP_BYTES)
        self.readers = []

    @rule(how=st.sampled_from(["closed", "read only", "killed"]))
    def end_this_life(self, how: str) -> None:
        """Close the store, or be killed between two transactions; and open it again."""
        if how == "killed":
            self.copy()
            return self.go_on_with_the_copy()
        self.store.close()
        if how == "read only":
            with Store(self.path, readonly=True) as store:
                self.compare(store)
                for queue in self.logs:
                    with pytest.raises(StoreReadOnly):
                        store.queue(queue).appender().write({"n": 0})
        self.open()

    def copy(self) -> None:
        """The files as they are now, which is what would be left if the process were killed now.

        The lock files are left out: closing one would drop this process's locks, and they are empty.
        """
        shutil.copytree(
            self.path,
            self.directory / f"life-{self.lives + 1}",
            ignore=shutil.ignore_patterns("bells", "lock.mdb", "locks"),
        )

    def go_on_with_the_copy(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)
        self.lives += 1
        self.open()

    def lives_through(self, point: str | None, work: Callable[[], R], hit: int = 1) -> R | None:
        """The result of ``work``; None when it reached ``point`` for the ``hit``-th time and died there."""
        if point is None:
            return work()

        def die(name: str) -> None:
            self.copy()
            raise testing.Crashed(name)

        faults.disarm()
        faults.arm(point, hit, die)
        try:
            return work()
        except testing.Crashed:
            self.go_on_with_the_copy()
            return None
        finally:
            faults.disarm()

    # --- time ---------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([-100, -20, 20, 40, 100]))
    def time_passes_or_steps_back(self, seconds: int) -> None:
        if seconds > 0:
            self.clock.advance(seconds)
        else:
            self.clock.set(self.clock.now + timedelta(seconds=seconds))

    @property
    def now_ns(self) -> int:
        return to_ns(self.clock.now)

    # --- queues -------------------------------------------------------------------------------

    def log(self, queue: str) -> Log:
        """The model's log of a queue that the store has, or makes now."""
        if queue not in self.logs:
            self.store.queue(queue)
            self.logs[queue] = Log()
        return self.logs[queue]

    @rule(
        queue=st.sampled_from(FED),
        retention=st.sampled_from([None, 1, 1, 3, 20, "read", "60s"]),
        metadata=st.sampled_from([False, True, frozenset({"t"}), frozenset()]),
    )
    def change_options(self, queue: str, retention: Any, metadata: Any) -> None:
        log = self.log(queue)
        self.store.queue(queue, retention=retention, metadata=metadata)
        log.retention = Retention.of(retention)

    def new(self, sizes: list[int]) -> list[Message]:
        found = [{"n": self.numbers + i, "data": b"x" * size} for i, size in enumerate(sizes)]
        self.numbers += len(sizes)
        return found

    @rule(queue=st.sampled_from(FED), size=SIZES, dies=st.sampled_from([None] * 12 + APPEND_POINTS))
    def write(self, queue: str, size: int, dies: str | None) -> None:
        log, appender = self.log(queue), self.store.queue(queue).appender()
        messages = self.new([size])
        written = self.lives_through(dies, lambda: appender.write(dict(messages[0])))
        assert written in (None, log.next)
        if written or dies == "append.after":
            self.appended(queue, messages)

    @rule(
        queue=st.sampled_from(FED),
        sizes=st.lists(SIZES, max_size=8),
        broken=st.sampled_from([False, False, False, True]),
        dies=st.sampled_from([None] * 12 + APPEND_POINTS),
    )
    def write_many(self, queue: str, sizes: list[int], broken: bool, dies: str | None) -> None:
        log, appender = self.log(queue), self.store.queue(queue).appender()
        messages = self.new(sizes)
        copies = [dict(m) for m in messages]
        if broken:
            with pytest.raises(CodecError):
                appender.write_many([*copies, {"n": object()}, *copies])
            return
        written = self.lives_through(dies if messages else None, lambda: appender.write_many(copies))
        assert written in (None, range(log.next, log.next + len(messages)))
        if messages and (written or dies == "append.after"):
            self.appended(queue, messages)

    def appended(self, queue: str, messages: list[Message]) -> None:
        log = self.logs[queue]
        log.append(messages, self.now_ns)
        if log.retention is not None:
            self.let_go(queue, log, log.retention)

    def let_go(self, queue: str, log: Log, policy: Retention) -> None:
        """Whole record batches went, as far as the policy says, and no step waits for them."""
        goal = log.first
        if policy.count is not None:
            goal = max(goal, log.next - policy.count)
        if policy.age is not None:
            goal = max(goal, log.at_time(self.now_ns - int(policy.age * 1e9)))  # type: ignore[operator]
        tailers = {t: p for p, known in TAILERS.items() for t, q in known.items() if q == queue and t in self.positions}
        if policy.read and (known := [*log.readers.values(), *(self.positions[t] for t in tailers)]):
            goal = max(goal, min(known))
        goal = min([goal, *(self.positions[t] for t, processor in tailers.items() if self.pending[processor])])
        if goal <= log.first:
            return
        front, *others = self.records(queue)
        assert front <= goal < min([*others, log.next + 1]), f"{queue}: retention up to {goal} left {front}, {others}"
        log.first = max(log.first, front)

    def records(self, queue: str) -> list[int]:
        """The first indices of the record batches in the store; the next index if there are none."""
        found = self.store.queue(queue).core.log
        with self.store.core.view() as txn:
            keys = [bytes(key) for key, _ in txn.cursor(found.database)]
            return [KEY.unpack(key)[0] for key in keys if len(key) == 8] or [found.row(txn).next]

    @rule(
        queue=st.sampled_from(FED + MADE),
        how=st.sampled_from(["index", "index", "time", "all"]),
        place=PLACES,
        dies=st.sampled_from([None, None, None, "purge.inside"]),
    )
    def purge(self, queue: str, how: str, place: int, dies: str | None) -> None:
        """A death in it changes nothing: the front moves in a commit of its own before space is given back."""
        if queue not in self.logs:
            return
        watching = [number for number, one in enumerate(READERS) if one == (queue, None)]
        for number in watching:  # and so stands inside a batch perhaps
            self.read_once(number, 1, "read", "forward")
        log, found = self.logs[queue], self.store.queue(queue)
        when = self.clock.now + timedelta(seconds=20 * place)
        before = {"index": log.some_index(place), "time": log.at_time(to_ns(when)), "all": log.next}[how]
        dropped = self.lives_through(
            dies, lambda: found.delete() if how == "all" else found.purge(before=when if how == "time" else before)
        )
        assert dropped in (None, max(0, before - log.first))
        log.purge(before)
        for number in watching:
            self.read_once(number, 1, "read", "forward")

    # --- tailers ------------------------------------------------------------------------------

    def reader(self, number: int) -> Reader:
        """One of the tailers; all are opened when one is used for the first time in this life."""
        if not self.readers:
            self.readers = [self.opened(number % 2 == 0, *one) for number, one in enumerate(READERS)]
        return self.readers[number]

    def opened(self, meta: bool, queue: str, name: str | None) -> Reader:
        log = self.log(queue)
        tailer = self.store.queue(queue).tailer(name, meta=meta)
        stored = log.readers.get(name) if name else None
        index = log.first if stored is None else stored
        assert (tailer.index, tailer.last_read_index, tailer.envelope) == (index, None, None)
        return Reader(tailer, log, name, index, {stored})

    @rule(
        number=st.integers(0, len(READERS) - 1),
        n=st.integers(0, 9),
        how=st.sampled_from(["read", "read", "read_many", "peek", "iterate"]),
        direction=st.sampled_from(["forward", "forward", "backward"]),
    )
    def read(self, number: int, n: int, how: str, direction: Direction) -> None:
        self.read_once(number, n, how, direction)

    @rule(turns=st.lists(st.sampled_from([number for number, one in enumerate(READERS) if one == SHARED]), max_size=8))
    def two_tailers_of_one_name_read(self, turns: list[int]) -> None:
        for number in turns:
            self.read_once(number, 1, "read", "forward")

    def read_once(self, number: int, n: int, how: str, direction: Direction) -> None:
        reader = self.reader(number)
        tailer, log = reader.tailer, reader.log
        tailer.direction = direction
        if how == "read":
            n = 1
            message = tailer.read()
            found = [] if message is None else [message]
        elif how == "read_many":
            found = tailer.read_many(n)
        elif how == "peek":
            message = tailer.peek()
            allowed = self.allowed(log, reader.index, direction, 1)
            assert self.bodies([message] if message else []) in [messages for messages, _ in allowed]
            assert tailer.index in {reader.index, max(reader.index, log.first), min(reader.index, log.next)}
            reader.index = tailer.index
            return
        else:
            n = len(log.messages) + 1
            found = list(tailer)
        own = self.allowed(log, reader.index, direction, n)
        outcomes = [(messages, index, seen) for seen in reader.stored for messages, index in own]
        there = log.readers.get(reader.name) if reader.name else None
        if reader.name and reader.stored != {there}:
            # Another of its name may have moved on. It hears of that when it has something to take itself.
            outcomes = [one for one in outcomes if not one[0] or one[2] == there]
            if any(messages for messages, _ in own):
                outcomes += [(*one, there) for one in self.allowed(log, log.readers[reader.name], direction, n)]
        reached = [one for one in outcomes if one[:2] == (self.bodies(found), tailer.index)]
        assert reached, f"read {found} and stands at {tailer.index}, not one of {outcomes}"
        reader.index, reader.stored = tailer.index, {seen for *_, seen in reached}
        if found:
            last = tailer.index if direction == "backward" else tailer.index - 1
            assert tailer.last_read_index == last and tailer.envelope is not None
            assert (tailer.envelope.index, tailer.envelope.time) == (last, to_datetime(log.times_ns[last - 1]))
            if reader.name:
                log.readers[reader.name] = tailer.index
                reader.stored = {tailer.index}

    def allowed(self, log: Log, index: int, direction: Direction, n: int) -> list[tuple[list[Message], int]]:
        """The possible results of a read of ``n`` from ``index``, each with the position after it.

        One outcome, or, where retention took what was perhaps read ahead, one for each length of that.
        """
        if n == 0:
            return [([], index)]
        outcomes = []
        if direction == "forward":
            # Read ahead until some place, if no purge forbids it; and then what is left.
            places = range(index, log.first + 1) if log.floor <= index < log.first else range(index, index + 1)
            for place in places:
                chosen = [*range(index, place), *range(max(index, log.first), log.next)][:n]
                stands = chosen[-1] + 1 if chosen else max(index, log.first)
                outcomes.append(([log.messages[i - 1] for i in chosen], stands))
            return outcomes
        index = min(index, log.next)
        for lowest in range(log.floor, log.first + 1):
            chosen = list(range(index - 1, lowest - 1, -1))[:n]
            outcomes.append(([log.messages[i - 1] for i in chosen], chosen[-1] if chosen else index))
        return outcomes

    @staticmethod
    def bodies(messages: list[Message]) -> list[Message]:
        return [body_of(message) for message in messages]

    @rule(
        number=st.integers(0, len(READERS) - 1),
        where=st.sampled_from(["start", "end", "index", "time"]),
        place=PLACES,
    )
    def seek_tailer(self, number: int, where: str, place: int) -> None:
        reader = self.reader(number)
        tailer, log = reader.tailer, reader.log
        if where == "start":
            tailer.to_start()
            reader.index = log.first
        elif where == "end":
            tailer.to_end()
            reader.index = log.next
        elif where == "index":
            for beyond in (0, log.next + 1):
                with pytest.raises(InvalidArgument):
                    tailer.to_index(beyond)
            index = log.some_index(place)
            tailer.to_index(index)
            reader.index = max(index, log.first)
        else:
            when = self.clock.now + timedelta(seconds=20 * place)
            tailer.to_time(when)
            reader.index = log.at_time(to_ns(when))
        assert tailer.index == reader.index
        if reader.name:
            log.readers[reader.name] = reader.index
            reader.stored = {reader.index}

    # --- a graph ------------------------------------------------------------------------------

    def graph(self) -> Graph:
        def fold(message: Message, process: Any) -> Any:
            if message["n"] % 5 == 0:
                raise ValueError(message["n"])
            process.state["count"] = process.state.get("count", 0) + 1
            return folded(message, process.state["count"])

        def join(even: Message, right: Message) -> Message:
            return joined(even, right)

        def save(message: Message, process: Any) -> None:
            ((tailer, index),) = process.delivery.start.items()
            self.told.append((tailer, index, process.delivery_hash, message))

        return Graph(
            "g",
            [
                Stream(fold, "left", {"odd": "odd", "even": "even"}, key=lambda m: m["n"] % KEYS, batch_size=3),
                Stream(join, {"even": "even", "right": "right"}, "pairs", side_effects=True, batch_size=2),
                Sink(save, AnyOf("odd", "pairs", "kept"), batch_size=2),
            ],
            errors="errors",
        )

    @rule(
        steps=st.sampled_from([None, None, 1, 2, 5]),
        seed=st.none() | st.integers(0, 5),
        dies=st.sampled_from([None] * len(RUN_POINTS) + RUN_POINTS),
        hit=st.sampled_from([1, 1, 2, 3, 5]),
        more=st.integers(0, 4),
    )
    def run(self, steps: int | None, seed: int | None, dies: str | None, hit: int, more: int) -> None:
        for queue in FED:
            if more:
                log, messages = self.log(queue), self.new([0] * more)
                assert self.store.queue(queue).appender().write_many([dict(m) for m in messages])[0] == log.next
                self.appended(queue, messages)
        report = self.lives_through(
            dies, lambda: testing.run_until_idle(self.graph(), self.store, steps_max=steps, seed=seed), hit
        )
        self.follow_graph()
        if report is not None and steps is None:
            self.expect_idle()

    @precondition(lambda self: self.positions)
    @rule(tailer=st.sampled_from([t for known in TAILERS.values() for t in known]), place=PLACES, again=st.booleans())
    def seek_processor(self, tailer: str, place: int, again: bool) -> None:
        processor = tailer.split(".")[1]
        index = self.logs[TAILERS[processor][tailer]].some_index(place)
        row = ownership.seek(self.store, f"g.{processor}", {tailer: index}, again)
        self.positions[tailer] = index
        self.pending[processor] = False
        self.generations[processor] += again
        assert row.generation == self.generations[processor]

    def follow_graph(self) -> None:
        """Let the model do what the processors' positions say was done, and see that the sink was told of it."""
        for queue in (*FED, *MADE):
            self.logs.setdefault(queue, Log())
        contents = {}
        for processor, tailers in TAILERS.items():
            with self.store.core.view() as txn:
                row = processor_rows.read_row(txn, f"g.{processor}")
                topology = processor_rows.read_topology(txn, f"g.{processor}")
            if row is None or topology is None:
                return  # killed in its first claim
            contents[processor] = dict(zip(topology.tailers, [position.next for position in row.positions]))
            self.pending[processor] = row.under_way
            assert set(contents[processor]) == set(tailers)
        (left,) = self.taken("fold", contents).values()
        for index in left:
            message = self.logs["left"].messages[index - 1]
            if message["n"] % 5 == 0:
                self.logs["errors"].append([message], self.now_ns)
                continue
            key = message["n"] % KEYS
            self.state[key] += 1
            for queue, messages in folded(message, self.state[key]).items():
                if messages:
                    self.logs[queue].append(messages, self.now_ns)
        even, right = self.taken("join", contents).values()
        assert len(even) == len(right), f"a join took {even} of one input and {right} of the other"
        for a, b in zip(even, right):
            pair = joined(self.logs["even"].messages[a - 1], self.logs["right"].messages[b - 1])
            self.logs["pairs"].append([pair], self.now_ns)
        for tailer, taken in self.taken("save", contents).items():
            log = self.logs[TAILERS["save"][tailer]]
            told = [(index, hash, message) for who, index, hash, message in self.told if who == tailer]
            # Every message that is done, in order, from the first on, and perhaps those of a step that did not commit.
            assert [index for index, _, _ in told] == list(range(taken.start, taken.start + len(told)))
            assert len(taken) <= len(told) <= len(taken) + 2, f"{tailer}: {len(told)} calls for {taken}"
            for index, hash, message in told:
                assert message == log.messages[index - 1]
                known = self.hashes.setdefault((self.generations["save"], tailer, index), hash)
                assert hash == known, f"{tailer} {index} came under {known} and then under {hash}"
        self.told.clear()

    def taken(self, processor: str, contents: dict[str, dict[str, int]]) -> dict[str, range]:
        """The indices that a processor took since the last look, by tailer."""
        found = {}
        for tailer, queue in TAILERS[processor].items():
            log, now = self.logs[queue], contents[processor][tailer]
            before = self.positions.get(tailer, log.first)
            start = max(before, log.first)
            assert now <= log.next and (now >= start or now == before), f"{tailer} went from {before} to {now}"
            self.positions[tailer] = now
            found[tailer] = range(start, max(start, now))
        return found

    def expect_idle(self) -> None:
        left = {}
        for tailers in TAILERS.values():
            for tailer, queue in tailers.items():
                log = self.logs[queue]
                left[tailer] = log.next - max(self.positions[tailer], log.first)
        assert min(left.pop("g.join.even"), left.pop("g.join.right")) == 0, left
        assert not any(left.values()), left

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def store_and_model_are_equal(self) -> None:
        if hasattr(self, "store"):
            self.compare(self.store)
            self.rules += 1
            if self.rules % CHECK_EVERY == 0:
                self.expect_whole()

    def compare(self, store: Store) -> None:
        assert store.queues() == sorted(self.logs)
        for queue, log in self.logs.items():
            found = store.queue(queue)
            assert (found.first_index, found.last_index, len(found)) == (log.first, log.next - 1, len(log.held))
            tailer = found.tailer()
            messages = tailer.read_many(len(log.held) + 1)
            assert self.bodies(messages) == log.held, f"{queue} holds {messages}"
            tailer.to_start()
            for index in range(log.first, log.next):
                assert tailer.read() is not None and tailer.envelope is not None
                assert (tailer.envelope.index, tailer.envelope.time) == (index, to_datetime(log.times_ns[index - 1]))
            assert log.times_ns == sorted(log.times_ns)
        for key in range(KEYS):
            assert testing.state(store, "g.fold", key) == ({"count": self.state[key]} if self.state[key] else {})

    def expect_whole(self) -> None:
        problems = self.store.check()
        assert not problems, problems
        if self.positions and not +self.generations:
            problems = testing.check_attempts(self.store)
            assert not problems, problems

    def teardown(self) -> None:
        try:
            if hasattr(self, "store") and not self.store.closed:
                self.expect_whole()
        finally:
            faults.disarm()
            if hasattr(self, "store"):
                self.store.close()
            self.clock.__exit__()
            shutil.rmtree(self.directory)


def folded(message: Message, count: int) -> dict[str, list[Message]]:
    """The results of ``fold`` for the ``count``-th message of its key: none to two messages on one output."""
    n = message["n"]
    made = [{"n": n, "count": count, "part": part} for part in range(n % 3)]
    return {"even": [], "odd": [], ("odd" if n % 2 else "even"): made}


def joined(even: Message, right: Message) -> Message:
    return {"n": even["n"], "right": right["n"]}


def body_of(message: Message) -> Message:
    """A message without its metadata; of an error message, the one that failed."""
    if message.get(names.TYPE) == names.PROCESSOR_ERROR:
        (failed,) = message["err.proc/messages"]["left"]
        return failed  # type: ignore[no-any-return]
    return {key: value for key, value in message.items() if key != names.META}
