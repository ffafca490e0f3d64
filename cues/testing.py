"""Help for tests of graphs: a clock that tests set, crashes, deterministic runs, and checks of histories.

    with testing.temporary_store() as store:                 # checked on the way out
        store.queue("orders").appender().write_many(orders)
        testing.run_until_idle(graph, store)                 # one thread, always in the same order
        testing.check_history(map(price, orders), testing.messages(store, "priced")).expect_exact()

    for point, hit in testing.crash_sites(run):              # every place where a step can die
        with testing.crash(point, hit, how="raise"), suppress(testing.Crashed):
            run()
        run()                                                # start again, and compare

:func:`run_until_idle` takes, runs and commits with the same code as a graph that was started, but without
threads, sleeping and waiting. So a test that passes once passes always, and a test that fails can be
stepped through with a debugger.

Not guaranteed: that a simulated crash (``how="raise"``) is as hard as a real one. It drops the writes of
the transaction and everything in memory, which is enough for the protocol. For a real crash, use a
process of its own with ``how="kill"``, or with ``CUES_FAULT=commit.inside:3``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from cues import codec, faults
from cues.base import clock as clocks
from cues.base import names
from cues.base.events import Counters, Event, Recovered
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.shown import Progress, RunRow, RunTable
from cues.engine import standing
from cues.engine.assembly import Assembly, assemble
from cues.engine.ending import Ending
from cues.engine.threads import adopt
from cues.errors import CodecError, Fenced, InvalidArgument, ProcessorStopped
from cues.forwarding.other_stores import Others
from cues.graphs.outage import Outage
from cues.graphs.processor_rows import all_keys, key_of, read_row, read_topology, unpacked_source
from cues.overrides import override
from cues.queues.base import view_of, views_of
from cues.queues.log import read_row as read_log
from cues.queues.store import Store
from cues.steps.failure import stopped_by
from cues.steps.feed import SourceStepper
from cues.steps.hashes import delivery_hash
from cues.steps.state import StateTable
from cues.steps.stepper import Stepper
from cues.steps.tries import open_named
from cues.storage import timeline

if TYPE_CHECKING:
    from cues.graphs.graph import Graph

__all__ = [
    "Clock",
    "Crashed",
    "Finding",
    "History",
    "Report",
    "check_attempts",
    "check_hashes",
    "check_history",
    "contents",
    "crash",
    "crash_sites",
    "messages",
    "run_until_idle",
    "state",
    "temporary_store",
]


# --- time ---------------------------------------------------------------------------------------


class Clock:
    """Replace the real clocks, inside a ``with`` block, by a clock that moves only when it is set.

        with testing.Clock(datetime(2026, 1, 31, tzinfo=UTC)) as clock:
            appender.write({"x": 1})        # appended at midnight
            clock.advance(3600)             # seconds, or a timedelta
            clock.set(an_earlier_time)      # wall clocks can go back; append times cannot

    It is used for append times and for leases, in this process only. The monotonic clock begins at its
    real value, so that leases of other processes can be compared with it, and follows
    :meth:`advance` but not :meth:`set`.
    """

    current: ClassVar[Clock | None] = None
    """The clock of the ``with`` block under way."""

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start
        self._wall_ns = 0
        self._monotonic_ns = 0
        self._real: tuple[Any, Any] | None = None

    @property
    def now(self) -> datetime:
        """The time of the clock: an aware datetime in UTC."""
        return clocks.to_datetime(self._wall_ns)

    def advance(self, by: float | timedelta) -> datetime:
        """Move both clocks forward; returns the new time. To move the wall clock back, use :meth:`set`."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if seconds < 0:
            raise InvalidArgument(
                f"A clock cannot advance by a negative time ({seconds} s).", "call clock.set(an_earlier_time)."
            )
        self._wall_ns += round(seconds * 1e9)
        self._monotonic_ns += round(seconds * 1e9)
        return self.now

    def set(self, when: datetime) -> datetime:
        """Set the wall clock, forwards or backwards; the monotonic clock does not move."""
        self._wall_ns = clocks.to_ns(when)
        return self.now

    def __enter__(self) -> Clock:
        self._real = (clocks.now_ns, clocks.monotonic_ns)
        self._wall_ns = clocks.to_ns(self._start) if self._start is not None else clocks.now_ns()
        self._monotonic_ns = clocks.monotonic_ns()
        Clock.current = self
        clocks.now_ns = lambda: self._wall_ns
        clocks.monotonic_ns = lambda: self._monotonic_ns
        return self

    def __exit__(self, *_: object) -> None:
        assert self._real is not None
        Clock.current = None
        clocks.now_ns, clocks.monotonic_ns = self._real


# --- crashes ------------------------------------------------------------------------------------


class Crashed(BaseException):
    """Raised at a crash point by ``crash(…, how="raise")``.

    Not an ``Exception``, so that neither a function's own handlers nor the error queue treat it as a
    failure of a message: as with ``kill -9``, no code can clean up.
    """


How = Literal["kill", "stop", "raise"]


def _raise(name: str) -> None:
    raise Crashed(name)


_ACTIONS: Final[dict[str, faults.Action]] = {"kill": faults.kill, "stop": faults.stop, "raise": _raise}


@contextlib.contextmanager
def crash(point: str, hit: int = 1, how: How = "kill") -> Iterator[None]:
    """Crash at the ``hit``-th time (from 1) that ``point`` is reached inside the block.

    ``how`` is ``"kill"`` (SIGKILL to this process: for use in a child), ``"stop"`` (SIGSTOP,
    until SIGCONT) or ``"raise"`` (:class:`Crashed`, in the thread that reached the point). The names
    of the points and the state at each are in ``cues.faults.POINTS``.
    """
    if how not in _ACTIONS:
        raise InvalidArgument(f"how is {how!r}.", "pass 'kill', 'stop' or 'raise'.")
    faults.disarm()
    faults.arm(point, hit, _ACTIONS[how])
    try:
        yield
    finally:
        faults.disarm()


def crash_sites(run: Callable[[], object], points: Iterable[str] = tuple(faults.POINTS)) -> list[tuple[str, int]]:
    """Every (point, hit) that ``run()`` passes, in the order of a message's journey.

    Calls ``run`` once, without a crash. The tests that follow must begin in the same state.
    """
    faults.disarm()
    faults.count()
    try:
        run()
        hits = faults.hits()
    finally:
        faults.disarm()
    return [(point, hit) for point in points for hit in range(1, hits.get(point, 0) + 1)]


# --- stores -------------------------------------------------------------------------------------


@contextlib.contextmanager
def temporary_store(durability: str = "process", map_size: int = 64 << 20) -> Iterator[Store]:
    """A new store, checked and deleted after the block; raises AssertionError if the check finds damage."""
    with tempfile.TemporaryDirectory(prefix="cues-") as directory:
        store = Store(os.path.join(directory, "store"), durability=durability, map_size=map_size)
        try:
            yield store
            problems = [] if store.closed else store.check()
        finally:
            store.close()
        if problems:
            raise AssertionError("the store is damaged: " + "; ".join(problems))


def messages(store: Store, queue: str) -> list[dict[str, Any]]:
    """All messages that are on a queue now, in order; several partitions are merged by append time.

    The id of a processor names its try log, ``"orders/3"`` names a partition.
    """
    return list((open_named(store, queue) if "." in queue else store.queue(queue)).tailer())


def state(store: Store, processor: str, key: Any = None) -> dict[Any, Any]:
    """The committed state of ``"graph.processor"`` under one key (None: of a processor without ``key=``)."""
    with store.core.view() as txn:
        kept = key_of(txn, ProcessorId(processor))
    return dict(StateTable(store, kept).view(key))


def contents(store: Store) -> dict[str, dict[str, Any]]:
    """Everything durable that a user can see, as plain data to compare two runs by.

    ``queues``: all messages by queue, or by partition if it has several (without try logs, which show
    how a run was cut into steps, not its results); ``state``: the packed rows by processor;
    ``positions``: the index by tailer id; ``sources``: position and count of bare messages by
    processor. A processor over partitions has one entry for each unit.
    """
    queues: dict[str, Any] = {}
    for name in store.queues():
        queue = store.queue(name)
        views = views_of(queue)
        queues |= {view.id if len(views) > 1 else name: list(view.tailer()) for view in views}
    positions: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for processor in standing.processors(store):
        with store.core.view() as txn:
            row, topology = read_row(txn, processor), read_topology(txn, processor)
        if row is None or topology is None:
            continue
        positions |= {tailer: position.next for tailer, position in zip(topology.tailers, row.positions)}
        if row.source:
            sources[processor] = unpacked_source(row.source)
    with store.core.view() as txn:
        ids = {key: id for id, key in all_keys(txn).items()}
    for database_name in [name for name, entries in store.core.entries() if name.startswith(b"state:") and entries]:
        database = store.core.database(database_name)
        with store.core.view() as txn:
            key = ProcessorKey(database_name[6:].decode())
            rows[ids.get(key, key)] = {bytes(k): bytes(v) for k, v in txn.cursor(database)}
    return {"queues": queues, "state": rows, "positions": positions, "sources": sources}


# --- running ------------------------------------------------------------------------------------


OUTAGE_TRIES_MAX: Final = 20
"""Tries of one step while something outside is away: a test must not wait for ever."""


@dataclass
class Report:
    """The result of a run."""

    steps: dict[str, int] = field(default_factory=dict)
    """The number of turns that committed, by processor name."""
    decisions: dict[str, str] = field(default_factory=dict)
    """The decision of the start, by processor name: fresh, resume, rewind or void."""
    events: list[Event] = field(default_factory=list)
    """All events, in order."""
    waits_s: list[float] = field(default_factory=list)
    """The waits before retries, in outages, and for ``rate=``, in seconds; the run did not sleep."""
    counters: dict[str, Counters] = field(default_factory=dict)
    """The counters, by processor name."""
    stopped: dict[str, BaseException] = field(default_factory=dict)
    """The errors that stopped processors, by processor name."""
    tries: dict[tuple[str, int], int] = field(default_factory=dict)
    """The tries of a step in outages, by processor id and the number of its steps."""


def run_until_idle(
    graph: Graph,
    store: str | os.PathLike[str] | Store | None = None,
    *,
    steps_max: int | None = None,
    seed: int | None = None,
    accept_topology: bool = False,
    take_over: bool = False,
    stopped: Literal["raise", "return"] = "raise",
    close_open: bool = False,
) -> Report:
    """Start ``graph``, let its processors take turns until all are idle, and close it.

    One thread, no sleeping: in each round every processor, in the order of declaration, makes one
    step if it can (a source is pulled for up to its ``batch_size`` messages first). ``seed`` shuffles
    the order of each round, in the same way for the same seed: run a test with several seeds to try
    other orders. ``steps_max`` is the number of steps after which the run ends, for endless sources.

    ``close_open``: then close windows and files, as a run does when all its sources have ended, also those with
    ``at_end="keep"``.

    A processor that finds something outside away tries its step again, up to :data:`OUTAGE_TRIES_MAX` times in a row;
    then it stops. If a processor stops at an error, the others continue; at the end its
    :class:`~cues.ProcessorStopped` is raised, with the user's exception as its cause (or kept in
    ``Report.stopped`` with ``stopped="return"``). :class:`~cues.Fenced` by a takeover is raised at
    once. Errors of the start are those of :meth:`Graph.start`.
    """
    report = Report()

    def emit(event: Event) -> None:
        report.events.append(event)
        if isinstance(event, Recovered):
            report.decisions[event.processor.rpartition(".")[2]] = event.decision

    def sleep(seconds: float) -> bool:
        report.waits_s.append(seconds)
        return False

    assembly = assemble(graph, store, accept_topology=accept_topology, take_over=take_over, sleep=sleep, emit=emit)
    try:
        for stepper in assembly.steppers:
            report.steps[stepper.node.name] = 0
            report.counters[stepper.node.name] = stepper.counters
        chance = random.Random(seed) if seed is not None else None
        progress = Progress(RunTable(f"{graph.id}: run until idle", lambda: _rows(assembly, report)))
        _rounds(assembly, report, steps_max, chance, progress)
        if close_open:
            units = [stepper.node for stepper in assembly.steppers]
            ending = Ending(assembly.plan, assembly.stores.home, lambda: units, emit, kept=True)
            while not report.stopped and ending.go_on():
                _rounds(assembly, report, steps_max, chance, progress)
        progress.look(last=True)
        faults.point("close.before")
    finally:
        assembly.close()
    if stopped == "raise":
        for error in report.stopped.values():
            raise error
    return report


def _rows(assembly: Assembly, report: Report) -> Iterator[RunRow]:
    """The processors of a run as a notebook shows them."""
    for stepper in assembly.steppers:
        node = stepper.node
        waiting = None
        if not isinstance(stepper, SourceStepper):
            waiting = sum(tailer.lag or 0 for tailer in standing.tailers(assembly.stores.home, node.id))
        yield RunRow(node.id, "stopped" if node.name in report.stopped else "", stepper.counters, waiting)


def _rounds(
    assembly: Assembly, report: Report, steps_max: int | None, chance: random.Random | None, progress: Progress
) -> None:
    left = float("inf") if steps_max is None else steps_max
    going = True
    while going and left > 0:
        going = False
        turns = list(assembly.steppers)
        if chance is not None:
            chance.shuffle(turns)
        for stepper in turns:
            name = stepper.node.name
            progress.look()
            if name in report.stopped or left <= 0:
                continue
            try:
                if not _turn(stepper, report):
                    continue
            except Fenced:
                raise
            except Exception as error:
                report.stopped[name] = stopped_by(stepper.node.id, error)
                continue
            report.steps[name] += 1
            left -= 1
            going = True
        for forwarder in assembly.forwarders:
            going |= forwarder.step()
        if not going:  # writers of bounded queues in other stores may wait for these marks
            for forwarder in assembly.forwarders:
                going |= forwarder.publish(at_rest=True)


def _turn(stepper: Stepper, report: Report) -> bool:
    """Make one step of one processor; return whether it did anything."""
    while True:
        try:
            if isinstance(stepper, SourceStepper):
                stepper.feed.pull(stepper.node.options.batch_size)
            outcome = stepper.step()
            if outcome == "blocked" and stepper.counters.limited and not Clock.current:
                assert stepper.bucket is not None
                report.waits_s.append(stepper.bucket.wait_s())
                stepper.bucket.fill()
                continue
            return outcome == "committed"
        except Fenced as fence:
            if fence.reason != "seek":
                raise
            adopt(stepper)
        except ProcessorStopped as stopped:
            if stopped.away and stepper.node.options.outages.limit_s != 0:
                step = stepper.node.id, stepper.counters.steps
                tries = report.tries[step] = report.tries.get(step, 0) + 1
                if tries >= OUTAGE_TRIES_MAX:
                    raise
                report.waits_s.append(Outage.wait_s(tries, stopped.__cause__))
                adopt(stepper)
                continue
            wait_s = stepper.again() if isinstance(stepper, SourceStepper) else None
            if wait_s is None:
                raise
            report.waits_s.append(wait_s)


# --- histories ----------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One message that is not as it should be."""

    place: int
    """Its place, from 0, among the found messages; for a lost one, among the expected messages of its stream."""
    message: Any
    stream: Any = None
    """The expected stream to which it belongs; None if there is only one stream, or it belongs to none."""


@dataclass(frozen=True)
class History:
    """The result of :func:`check_history`. True if there is no finding."""

    expected: int
    found: int
    lost: tuple[Finding, ...] = ()
    """Expected, but not found."""
    duplicated: tuple[Finding, ...] = ()
    """Found more often than expected: the second and later ones."""
    reordered: tuple[Finding, ...] = ()
    """Found, but before a message that they should follow; the smallest set that explains the order."""
    unexpected: tuple[Finding, ...] = ()
    """Found, but not expected."""

    @property
    def exact(self) -> bool:
        """True if no message is lost, duplicated, reordered or unexpected."""
        return not (self.lost or self.duplicated or self.reordered or self.unexpected)

    @property
    def at_least_once(self) -> bool:
        """True if no message is lost or unexpected, and the first copies are in order."""
        return not (self.lost or self.reordered or self.unexpected)

    @property
    def at_most_once(self) -> bool:
        """True if no message is duplicated, reordered or unexpected."""
        return not (self.duplicated or self.reordered or self.unexpected)

    def __bool__(self) -> bool:
        return self.exact

    def expect_exact(self) -> None:
        """Raise AssertionError, with the findings, unless :attr:`exact`."""
        if not self.exact:
            raise AssertionError(str(self))

    @override
    def __str__(self) -> str:
        if self.exact:
            return f"all {self.expected} messages, once and in order"
        lines = [f"of {self.expected} expected messages, {self.found} found:"]
        for kind in ("lost", "duplicated", "reordered", "unexpected"):
            findings: tuple[Finding, ...] = getattr(self, kind)
            if findings:
                lines.append(f"  {len(findings)} {kind}:")
                for finding in findings[:5]:
                    stream = f" of {finding.stream!r}" if finding.stream is not None else ""
                    lines.append(f"    at {finding.place}{stream}: {str(finding.message)[:200]}")
                if len(findings) > 5:
                    lines.append(f"    … and {len(findings) - 5} more")
        return "\n".join(lines)


def check_history(
    expected: Iterable[Any] | Mapping[Any, Iterable[Any]],
    found: Iterable[Any],
    *,
    key: str | Callable[[Any], Any] | None = None,
    ordered: bool = True,
) -> History:
    """Compare the found messages with the expected ones: lost, duplicated, reordered, unexpected.

    ``expected`` is a series of messages in their expected order, or a mapping of several series. With
    several, only the order inside each is checked; use this after ``AnyOf``, and for a queue with
    several writers or partitions. ``found`` are the messages in their actual order. ``key``, the name
    of a field or a function, identifies a message in both; by default the whole message does. With
    ``ordered=False`` any order is accepted.

    A message that is expected n times may be found n times. If it is found more often, the first n
    count for the order. Takes O(n log n) time, more only if equal messages are out of order, and keeps
    all messages in memory.
    """
    streams = dict(expected) if isinstance(expected, Mapping) else {None: expected}
    identify = _identifier(key)
    wanted: dict[Any, list[Any]] = {}
    places: dict[Any, list[int]] = {}
    stream_of: dict[Any, Any] = {}
    for stream, series in streams.items():
        wanted[stream] = list(series)
        for place, message in enumerate(wanted[stream]):
            identity = identify(message)
            if stream_of.setdefault(identity, stream) != stream:
                raise InvalidArgument(
                    f"The streams {stream_of[identity]!r} and {stream!r} both expect {str(message)[:100]}.",
                    "pass a key= that distinguishes them.",
                )
            places.setdefault(identity, []).append(place)
    arrived: dict[Any, list[tuple[Any, int, Any]]] = {stream: [] for stream in wanted}
    times: Counter[Any] = Counter()
    duplicated: list[Finding] = []
    unexpected: list[Finding] = []
    total = 0
    for at, message in enumerate(found):
        total += 1
        identity = identify(message)
        if identity not in places:
            unexpected.append(Finding(at, message))
        elif times[identity] == len(places[identity]):
            duplicated.append(Finding(at, message, stream_of[identity]))
        else:
            arrived[stream_of[identity]].append((identity, at, message))
            times[identity] += 1
    reordered: list[Finding] = []
    taken: set[tuple[Any, int]] = set()
    elsewhere: Counter[Any] = Counter()
    for stream, series in arrived.items():
        stands = _in_order([identity for identity, _, _ in series], places)
        for (identity, at, message), stand in zip(series, stands):
            if stand is not None:
                taken.add((stream, stand))
            else:
                elsewhere[identity] += 1
                if ordered:
                    reordered.append(Finding(at, message, stream))
    lost: list[Finding] = []
    for identity, where in places.items():
        stream = stream_of[identity]
        free = [place for place in where if (stream, place) not in taken]
        lost += [Finding(place, wanted[stream][place], stream) for place in free[elsewhere[identity] :]]
    lost.sort(key=lambda finding: finding.place)
    return History(
        sum(map(len, wanted.values())), total, tuple(lost), tuple(duplicated), tuple(reordered), tuple(unexpected)
    )


def check_hashes(calls: Iterable[tuple[Any, str]]) -> list[str]:
    """Check the delivery hashes that a message function saw; ``calls`` has (message, ``process.delivery_hash``).

    The same message must have the same hash in every call, and two messages must have different hashes.
    Returns the violations, one sentence each. Messages are compared by equality, so give each its own
    number.
    """
    by_message: dict[Any, str] = {}
    by_hash: dict[str, Any] = {}
    problems: list[str] = []
    for message, hash in calls:
        identity = _frozen(message)
        before = by_message.setdefault(identity, hash)
        if before != hash:
            problems.append(f"{message!r} had the hash {before} and then the hash {hash}")
        other = by_hash.setdefault(hash, identity)
        if other != identity:
            problems.append(f"{hash} names {message!r} and another message")
    return problems


def check_attempts(store: Store) -> list[str]:
    """Check the try logs of all processors against themselves and the queues.

    Every attempt must follow a snapshot of its own and have its hash. That hash must equal the hash of the
    ranges in the snapshot. The message that an attempt names must, unless it was purged, be there and have
    the hash too. Returns the violations, one sentence each. After a seek that raised the generation, earlier
    records are reported as wrong. Attempts at messages of another store are judged while that store is there.
    """
    problems: list[str] = []
    for processor in standing.processors(store):
        with store.core.view() as txn:
            row, topology = read_row(txn, processor), read_topology(txn, processor)
        assert row is not None and topology is not None
        identities = {tailer: position.identity for tailer, position in zip(topology.tailers, row.positions)}
        lines: dict[str, timeline.Line] = {}
        judged: dict[str, int] = {}
        with Others(store) as others:
            for tailer, queue, other in zip(topology.tailers, topology.queues, topology.stores):
                if (there := others.get(other)) is None:
                    del identities[tailer]  # its timelines are in a store that is away
                    continue
                with there.core.view() as txn:
                    lines[tailer] = timeline.read(txn, queue)
                    # A purge also removes the timelines of the purged messages, so their identity is unknown.
                    judged[tailer] = read_log(txn, queue, 0).first if lines[tailer] else 0
        expected: str | None = None
        attempted = False
        for record in messages(store, processor):
            if record[names.TYPE] == names.SNAPSHOT:
                attempted = False
                start, end = record[names.TAILER_INDICES], record[names.TO_INDICES]
                if any(tailer not in identities or end[tailer] <= judged[tailer] for tailer in start):
                    expected = None  # of an input that is no longer read, or of a timeline that was purged
                    continue
                source = record.get(names.SOURCE_POSITION)
                ranges = [(t, timeline.identity(lines[t], identities[t], end[t] - 1), start[t], end[t]) for t in start]
                expected = delivery_hash(
                    topology.key_of(processor),
                    row.generation,
                    ranges,
                    ["source", *source] if source is not None else None,
                )
                continue
            if expected is None:
                continue
            where = f"{processor}: the attempt {record[names.HASH]}"
            if attempted:
                problems.append(f"{where} is the second one of its snapshot")
            attempted = True
            if record[names.HASH] != expected:
                problems.append(f"{where} follows a snapshot whose ranges have the hash {expected}")
            for queue, index in record.get(names.MESSAGE_INDEX, {}).items():
                wrong = _wrong_at(store, queue, index, record[names.HASH])
                if wrong:
                    problems.append(f"{where} names message {index} of {queue}, {wrong}")
    return problems


def _wrong_at(store: Store, queue: str, index: int, hash: str) -> str:
    """The fault of a message that must have ``hash`` unless it was purged; empty if there is none."""
    name, partition = names.split_log(queue)
    if name not in store.queues(all=True):
        return "a queue that is not there"
    view = view_of(store.queue(name), partition)
    if index < view.first_index:
        return ""
    if index > view.last_index:
        return "which is not there"
    tailer = view.tailer()
    tailer.to_index(index)
    tailer.read()
    return "" if tailer.envelope is not None and tailer.envelope.hash == hash else "which has another hash"


def _in_order(identities: Sequence[Any], places: Mapping[Any, Sequence[int]]) -> list[int | None]:
    """The expected place of each found message, in rising order; None for the smallest set that is out of order.

    Equal messages are expected at several places. If nothing is out of order, the first one found belongs
    to the first place, and so on; otherwise every assignment is tried at once.
    """
    times: Counter[Any] = Counter()
    first: list[int] = []
    for identity in identities:
        first.append(places[identity][times[identity]])
        times[identity] += 1
    if all(a < b for a, b in itertools.pairwise(first)):
        return list(first)
    # The places of one message are in falling order, so at most one of them is part of a rise.
    choices = [(item, place) for item, identity in enumerate(identities) for place in reversed(places[identity])]
    stands: list[int | None] = [None] * len(identities)
    for choice in _longest_rise([place for _, place in choices]):
        item, place = choices[choice]
        stands[item] = place
    return stands


def _longest_rise(places: Sequence[int]) -> set[int]:
    """The items of ``places`` that make a longest strictly rising sequence."""
    ends: list[int] = []
    items: list[int] = []
    before: list[int] = []
    for item, place in enumerate(places):
        at = bisect_left(ends, place)
        before.append(items[at - 1] if at else -1)
        if at == len(ends):
            ends.append(place)
            items.append(item)
        else:
            ends[at] = place
            items[at] = item
    kept: set[int] = set()
    item = items[-1] if items else -1
    while item >= 0:
        kept.add(item)
        item = before[item]
    return kept


def _identifier(key: str | Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if key is None:
        return _frozen
    if isinstance(key, str):
        return lambda message: _frozen(message.get(key))
    return lambda message: _frozen(key(message))


def _frozen(value: Any) -> Any:
    """A hashable form of ``value``, equal for equal values."""
    if isinstance(value, dict):
        return ("dict", frozenset((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(_frozen(item) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(_frozen(item) for item in value))
    if isinstance(value, float) and value != value:  # NaN; but a message equals itself
        return ("nan",)
    try:
        hash(value)
    except TypeError:
        return _packed(value)
    return value


def _packed(value: Any) -> Any:
    """An unhashable value as bytes: the repr of a long array leaves most of it out."""
    try:
        return ("packed", codec.pack(value))
    except CodecError:
        return ("repr", repr(value))
