"""A processor whose queues are on a shared directory: take, run, commit. The driver's side of a step.

    1. take       choose a range of messages of each input; the messages stay in their files
    2. taking     if the function has side effects, record the range before it runs
    3. run        one Spark job: tasks read their pieces of files, call the function, and write its messages into files
                  in the folders of their queues, which are in no log yet
    4. commit     put the record that moves the positions, and names the files with their indices, if its number is
                  not taken
    5. forward    add the files to the logs of their queues

After a crash before 4 the same messages are taken again, and files that no record names are deleted later. After a
crash after 4 the next start forwards, and files that are in the log already are not added again. Between 4 and 5 no
other thread of this driver appends to these queues, so the indices of 4 are those of 5. And whatever another driver had
committed was forwarded when this driver claimed the processors.

An at-most-once processor moves its positions in 2, and not in 4.

Not guaranteed: that the queues of one step change at the same moment (5 adds to one after another). If a key decides
which task calls the function, messages of one key are in order, and those of several keys as their tasks end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import pyarrow as pa

from cues import faults
from cues.base import clock, events, names
from cues.errors import Diverged, ProcessorStopped, TopologyChanged, Unsupported
from cues.graphs.options import BATCH_SIZE, TABLE_SIZE
from cues.graphs.processor import Node, RedriveNode, TimerNode
from cues.overrides import override
from cues.spark.cluster import delays, state_files
from cues.spark.cluster.data import Piece, pieces_of
from cues.spark.cluster.delays import HeldRun
from cues.spark.cluster.directory import DataFile, PartitionLog, QueueDirectory
from cues.spark.cluster.ledger import Ledger, LedgerRecord, StepRange
from cues.spark.cluster.publish import publish
from cues.spark.cluster.rows import Entrance
from cues.spark.cluster.state_files import StateRun
from cues.spark.cluster.tasks import Task, TaskJob, TaskOutput, run_keys, run_task, scatter
from cues.spark.executor import JobGroup, Stretch, edges_of, pack_job, shown_ranges, up_to_stop
from cues.steps.failure import failed_event, stopped_at, words
from cues.steps.hashes import Hasher
from cues.steps.pace import Pace
from cues.steps.timers import TimerHasher

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver

STEP_MESSAGES: Final = 1_000_000
"""Most messages of a step."""
FIRST_MESSAGES: Final = 1_000
"""Most messages of the first step, when the time of a call is not known."""
SECOND_MESSAGES: Final = 10_000
"""Most messages of the second step. Later ones grow as long as a step takes less than :data:`STEP_S`."""
GROWTH: Final = 8
"""The largest ratio of a step to the one before. A small step costs more for each message: its job has a cost of its
own, and its tasks read whole row groups for some of their rows."""
STEP_S: Final = 5.0
SLOWEST_S: Final = 2 * STEP_S
"""The longest time of a step of slow calls, approximately: fewer messages are taken then. It is more than
:data:`STEP_S`, because the calls of a step of few messages seem to be slow."""
STEP_BYTES: Final = 64 << 20
"""Most bytes of messages that a step takes for each core, approximately. They are in the memory of a worker."""
ORDERED_MESSAGES: Final = 10_000
"""Most messages of a step that one task does, if ``batch_size`` is not set. After a crash they are repeated."""
TIMERS_OF_TASK: Final = 10_000
"""Timers that are due of which one task looks whether they are still set."""
TASK_S: Final = 0.05
"""Work that is worth a task of its own, which costs about 10 ms."""


class _Lane:
    """The messages of one kind that a unit takes: those of its queues, or the delayed ones that were moved."""

    def __init__(self, node: Node, logs: dict[str, PartitionLog]) -> None:
        self.node = node
        """The unit, with the id and the inputs under which it takes these messages."""
        self.logs = logs
        """By tailer id."""
        self.hasher = Hasher(node.key, 0)
        self.packed: tuple[list[int], bytes] | None = None
        """The numbers of partitions of the targets, and the job."""

    def entrances(self) -> tuple[Entrance, ...]:
        bindings = {self.node.tailer(port.queue): port.binding for port in self.node.inputs}
        return tuple(
            Entrance(bindings[tailer], tailer, log.directory.queue, self.identity(log), log.directory.options.kept)
            for tailer, log in self.logs.items()
        )

    def identity(self, log: PartitionLog) -> bytes:
        """The identity of one of its logs."""
        return log.directory.identity

    def digest(self, ranges: dict[str, tuple[int, int]], outputs: Sequence[TaskOutput]) -> bytes:
        """The delivery hash of a step over these ranges."""
        return self.hasher.digest(
            [(tailer, self.identity(self.logs[tailer]), low, high) for tailer, (low, high) in sorted(ranges.items())]
        )


class _DueLane(_Lane):
    """A lane of messages or timers that waited for their time, and are due (delays.py)."""

    waiting: ClassVar[Literal["held", "timers"]]
    """The field of a record that has the runs of what is not due."""

    def __init__(self, node: Node, unit: Node, ids: dict[str, str], inputs: dict[str, PartitionLog]) -> None:
        folder = delays.folder_of_delayed(unit.id)
        super().__init__(node, {ids[t]: delays.MovedLog(log, folder, ids[t]) for t, log in inputs.items()})
        self.ids = ids
        """Their tailer ids, by those in the runs."""

    @override
    def entrances(self) -> tuple[Entrance, ...]:
        # Messages have their places on the queue in their provenance.
        return tuple(entrance._replace(kept=frozenset()) for entrance in super().entrances())


class _MovedLane(_DueLane):
    """The messages of a unit that were delayed and are due."""

    waiting = "held"

    def __init__(self, unit: Node, inputs: dict[str, PartitionLog]) -> None:
        node = RedriveNode.of(unit, names.delayer_id(unit.key))
        ids = {unit.tailer(old.queue): node.tailer(new.queue) for old, new in zip(unit.inputs, node.inputs)}
        super().__init__(node, unit, ids, inputs)


class _TimerLane(_DueLane):
    """The timers of a unit that are due. They are on no queue, so the graph gives them their identity."""

    waiting = "timers"
    hasher: TimerHasher

    def __init__(self, unit: Node, inputs: dict[str, PartitionLog], store_id: str) -> None:
        node = TimerNode.of(unit)
        (id,) = (node.tailer(port.queue) for port in node.inputs)
        super().__init__(node, unit, {id: id}, {id: next(iter(inputs.values()))})
        self.hasher = TimerHasher(node.key, 0)
        self._identity = bytes.fromhex(store_id)

    @override
    def identity(self, log: PartitionLog) -> bytes:
        return self._identity

    @override
    def digest(self, ranges: dict[str, tuple[int, int]], outputs: Sequence[TaskOutput]) -> bytes:
        self.hasher.times = {index: at for output in outputs for index, at in output.fired_ns.items()}
        return super().digest(ranges, outputs)


class Stage:
    """One unit of a processor that this driver owns, for one partition. Used by one thread at a time."""

    def __init__(self, driver: Driver, node: Node) -> None:
        self.driver = driver
        self.node = node
        self.counters = events.Counters()
        self.ledger = Ledger(driver.files, node.id, driver.owner)
        self.inputs = {node.tailer(port.queue): driver.queues[port.queue].log(node.partition) for port in node.inputs}
        queues = dict.fromkeys([*(port.queue for port in node.outputs), *([node.errors] if node.errors else [])])
        self.targets = [driver.queues[queue] for queue in queues]
        self.ordered = node.side_effects or node.at_most_once
        self._own = _Lane(node, self.inputs)
        self._moved = _MovedLane(node, self.inputs)
        timed = node.options.timer is not None
        self._due_lanes = [*([_TimerLane(node, self.inputs, driver.store_id)] if timed else []), self._moved]
        self._lanes: list[_Lane] = [*self._due_lanes, self._own]
        """They take turns in this order, so none of them waits for another one."""
        self._turn = 0
        """The lane that is asked first."""
        self._served = 0
        self._last_ns = 0
        """The time of the last step. It never goes back."""
        self.fresh = False
        """True if it has no record from before the claim."""
        self._hasher = self._own.hasher
        self._jobs = JobGroup(driver.context, node.id, f"cues {node.id} {driver.owner}")
        self._stop: ProcessorStopped | None = None
        self._pace = Pace(STEP_MESSAGES, STEP_S, small=True, least=SECOND_MESSAGES, fixed=True, growth=GROWTH)
        self._each_s: float | None = None
        """The work of a message, as tasks have measured it."""
        self._each_bytes = 0.0
        """The bytes of a message. In a file they are compressed."""
        self._under_way: StepRange | None = None
        self._warned: dict[str, int] = {}
        """By tailer id: the index up to which a warning about purged messages was sent."""

    # --- start ---

    def claim(self, accept_topology: bool = False) -> None:
        """Own the processor after its last commit, and forward the files of that commit.

        Raises :class:`Diverged` if records and queues do not belong together, and :class:`TopologyChanged`
        if it has other inputs than in its records, unless ``accept_topology``.
        """
        last = self.driver.claim(self.ledger, functools.partial(self._positions, accept_topology))
        self._show_moved()
        where = ", ".join(f"{tailer} {next}" for tailer, (_, next) in self.ledger.now.positions.items())
        self.fresh = last is None
        what = "rewind" if self.ledger.now.taking else "resume" if last else "fresh"
        self.driver.emit(events.Recovered(self.node.id, f"{what}: from {where}", logging.INFO, decision=what))

    def _positions(self, accept_topology: bool, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        """The positions of the processor, checked. The files of its last step are in the logs of their queues."""
        if last is not None:
            if last.files:
                self.driver.ring()
            self._check_inputs(last, accept_topology)
        if self.node.kind == "frame":
            self._refuse_delays(last)
        positions = {}
        for tailer, log in self.inputs.items():
            identity = log.directory.identity.hex()
            known, next = (last.positions.get(tailer) if last else None) or (identity, 1)
            if known != identity or not log.reaches(next):
                raise Diverged(
                    f"{self.node.id} is at {next} of queue {log.id!r} with identity {known}; in"
                    f" {log.directory.files.url} it has {identity} and ends before {log.next}.",
                    "use the directory that belongs to these steps; or start over with --fresh or another --queues"
                    " DIR.",
                    processor=self.node.id,
                )
            positions[tailer] = known, next
        return positions

    def _refuse_delays(self, last: LedgerRecord | None) -> None:
        """Refuse delayed messages, which a frame cannot hold."""
        if last is not None and (last.held or any(not names.is_timer_queue(id) for id in last.due)):
            raise TopologyChanged(
                f"{self.node.id} holds delayed messages, and is a frame now: frames hold no messages.",
                "give the frame another id; or start over with --fresh or another --queues DIR.",
                processor=self.node.id,
            )
        for log in self.inputs.values():
            until_ns = log.directory.delayed_until()
            if until_ns > clock.now_ns():
                raise Unsupported(
                    f"{self.node.id} is a frame, and reads the queue {log.directory.queue!r}, which may have messages"
                    f" that are not to be delivered before {clock.to_datetime(until_ns).isoformat()}: frames hold no"
                    " messages.",
                    "copy the queue with a stream, and let the frame read the copy; or start again after that time.",
                )

    def _check_inputs(self, last: LedgerRecord, accept_topology: bool) -> None:
        new = [tailer for tailer in self.inputs if tailer not in last.positions]
        gone = [tailer for tailer in last.positions if tailer not in self.inputs]
        if (new or gone) and not accept_topology:
            what = [f"new: {', '.join(new)}"] if new else []
            what += [f"no longer read: {', '.join(gone)}"] if gone else []
            raise TopologyChanged(
                f"The inputs of {self.node.id} have changed since its last step ({'; '.join(what)}).",
                "start with --accept-topology (graph.start(accept_topology=True)): new inputs begin at the start of"
                " their queue; or start over with --fresh or another --queues DIR.",
                processor=self.node.id,
            )

    # --- for other threads ---

    def ready(self) -> bool:
        """Return True if there are messages to take, or to move."""
        some = any if self.node.mode == "alts" else all
        now = self.ledger.now
        ready = some(low < end for low, end in self._available().values())
        ready |= now.taking is not None or self.due_ns <= clock.now_ns() or bool(self._to_expire())
        return ready or any(map(self._undelivered, self._due_lanes))

    def _undelivered(self, lane: _Lane) -> dict[str, DataFile]:
        """The files that were moved for a lane and are not delivered, by input; without inputs that are gone."""
        return {tailer: file for tailer, file in self.ledger.now.due.items() if tailer in lane.logs}

    def _waiting(self, lane: _DueLane) -> tuple[HeldRun, ...]:
        """The runs of what is not due."""
        runs: tuple[HeldRun, ...] = getattr(self.ledger.now, lane.waiting)
        return runs

    @property
    def due_ns(self) -> int:
        """The time at which the first held message or timer is due, in nanoseconds, or one before it."""
        return min(delays.next_ns(self._waiting(lane)) for lane in self._due_lanes)

    @property
    def positions(self) -> dict[str, int]:
        """The next index after the last commit, by tailer id."""
        positions = self.ledger.now.positions
        return {tailer: positions[tailer][1] for tailer in self.inputs}

    def tailer_of(self, log: PartitionLog) -> str | None:
        """The tailer id of the input that is this log; None if it is not an input."""
        return next((tailer for tailer, input in self.inputs.items() if input is log), None)

    def holds(self, tailer: str) -> int | None:
        """The first message of an input that a step needs, if it is under way or will be repeated."""
        taking = self._under_way or self.ledger.now.taking
        return taking.ranges[tailer][0] if taking and tailer in taking.ranges else None

    @property
    def lag(self) -> int:
        """The number of messages that it has not taken, without those that it holds."""
        due = self._undelivered(self._moved)
        moved = sum(file.next - self.ledger.now.moved[tailer] for tailer, file in due.items())
        return moved + sum(log.next - self.positions[tailer] for tailer, log in self.inputs.items())

    def _available(self) -> dict[str, tuple[int, int]]:
        """The range of messages available on each input, by tailer id."""
        positions = self.ledger.now.positions
        return {tailer: log.ready(positions[tailer][1]) for tailer, log in self.inputs.items()}

    def cancel(self) -> None:
        """Give up a step under way."""
        self._jobs.cancel()

    def close(self) -> None:
        """End, after the last step."""

    # --- step ---

    def step(self) -> bool:
        """Make one step; return False if there is nothing to take.

        Raises :class:`Fenced` and :class:`ProcessorStopped`.
        """
        if self._stop is not None:
            raise self._stop
        taking = self.take()
        if taking is None:
            if self._expire():
                return True
            self.ledger.check()
            return False
        faults.point("spark.take")
        lane = self._lane(taking)
        with self._jobs.step(taking.ranges), self._held(taking):
            if any(lane.logs[tailer].first > low for tailer, (low, _) in taking.ranges.items()):
                return True  # retention was faster: take again
            if self.ordered and taking is not self.ledger.now.taking:
                if self.node.at_most_once:
                    self.ledger.commit("taking", **self._after(taking))
                else:
                    self.ledger.commit("taking", taking=taking)
                faults.point("spark.taking")
            self._run_and_commit(taking)
        return True

    def _run_and_commit(self, taking: StepRange) -> None:
        began = clock.monotonic_ns()
        ran = self.run(taking)
        if any(output.declined == "state" for output in ran):
            # Nothing of this run counts. From now on every task that calls the function gets the whole state.
            self._discard(ran)
            self.ledger.commit("step", whole=True)
            self.driver.emit(events.Event(self.node.id, "uses the processor's state: one task, one call after another"))
            ran = self.run(taking)
        while (stop := up_to_stop(ran)[1]) is not None and (cut := stop[0]) and not self.ordered:
            if not self._by_key and not any(output.state or output.timers for output in ran):
                break
            # Calls after the message that failed may have changed the state too. Run again, up to that message, until
            # no call fails.
            self._discard(ran)
            taking = replace(taking, ranges={t: (start, start + cut) for t, (start, _) in taking.ranges.items()})
            ran = self.run(taking)
        faults.point("spark.ran")
        self._commit(taking, ran)
        count = _count(taking)
        if self.node.options.batch and count + self._call_size > self._pace.count:
            self._pace.count = min(self._pace.count, count)  # as many whole batches as it allows, so it may grow
        self._pace.ran(count, clock.monotonic_ns() - began)
        self._each_s = sum(output.spent_s for output in ran) / count
        self._each_bytes = sum(output.read_bytes for output in ran) / count

    def _discard(self, outputs: Sequence[TaskOutput]) -> None:
        """Delete the files of results that do not count."""
        for output in outputs:
            for target, file in output.files:
                self.driver.files.delete(f"{self.targets[target].folder}/{file.name}")
            self._drop([output.state] if output.state else [])
            self._drop_delayed([run for run in (output.held, output.timers) if run])

    # 1. Take.

    def take(self) -> StepRange | None:
        taking = self.ledger.now.taking
        if taking is not None and all(
            tailer in (logs := self._lane(taking).logs) and logs[tailer].first <= low
            for tailer, (low, _) in taking.ranges.items()
        ):
            self._last_ns = max(self._last_ns, taking.now_ns)
            return taking
        count = len(self._lanes)
        for number in range(self._turn, self._turn + count):
            lane = self._lanes[number % count]
            ready = self._due(lane) if isinstance(lane, _DueLane) else self._available()
            if lane is self._own:
                self._tell_purged(ready)
            if (taking := self._take(lane, ready)) is not None:
                self._turn = (number + 1) % count
                return taking
        self._turn = 0
        return None

    def _lane(self, taking: StepRange) -> _Lane:
        return next((lane for lane in self._lanes if taking.ranges.keys() <= lane.logs.keys()), self._moved)

    def _due(self, lane: _DueLane) -> dict[str, tuple[int, int]]:
        """The range of what is due on each input of a lane. If nothing was moved, what is due now is."""
        while not self._undelivered(lane) and self.move(lane):
            pass
        nexts, files = self.ledger.now.moved, self._undelivered(lane)
        ranges = {tailer: (nexts.get(tailer, 1), nexts.get(tailer, 1)) for tailer in lane.logs}
        return ranges | {tailer: (nexts[tailer], file.next) for tailer, file in files.items()}

    def _take(self, lane: _Lane, ready: dict[str, tuple[int, int]]) -> StepRange | None:
        """Choose a range of what is ready."""
        size, now_ns = self._size(), self._now_ns()
        if lane.node.mode == "alts":
            tailers = list(ready)
            for turn in range(len(tailers)):
                place = (self._served + turn) % len(tailers)
                low, end = ready[tailers[place]]
                if end > low:
                    self._served = place + 1
                    count = self._bounded({tailers[place]: (low, end)}, min(size, end - low))
                    return StepRange({tailers[place]: (low, low + count)}, self._batch(count), now_ns)
            return None
        count = min(size, *(end - low for low, end in ready.values()))
        if count <= 0:
            return None
        count = self._bounded(ready, count)
        return StepRange({tailer: (low, low + count) for tailer, (low, _) in ready.items()}, self._batch(count), now_ns)

    def _now_ns(self) -> int:
        """The time of a step that begins."""
        self._last_ns = max(self._last_ns, clock.now_ns())
        return self._last_ns

    def move(self, lane: _DueLane) -> bool:
        """Move what is due to a file, in one record. Return False if nothing is due."""
        now, folder, files = self.ledger.now, delays.folder_of_delayed(self.node.id), self.driver.files
        now_ns, waiting = clock.now_ns(), self._waiting(lane)
        if delays.next_ns(waiting) > now_ns:
            return False
        known = tuple(run for run in waiting if run.files.keys() <= lane.ids.keys())
        lost = [run for run in waiting if run not in known]
        if lost:
            count = sum(run.left for run in lost)
            text = f"gives up {count:,} delayed messages of queues that it does not read any more"
            self.driver.emit(events.Event(self.node.id, text, logging.WARNING))
        try:
            move = delays.move(files, folder, known, now_ns, lane.waiting == "timers")
            tables = self._still_set(move.tables) if lane.waiting == "timers" else move.tables
        except Diverged:
            self.ledger.check()  # the next owner may have moved them, and deleted these files
            raise
        record, due, moved = now.number + 1, dict[str, DataFile](), dict(now.moved)
        for tailer, table in tables.items():
            id = lane.ids[tailer]
            due[id] = delays.moved_file(files, folder, record, table, moved.setdefault(id, 1))
        # Messages of an input that is not read any more are given up. Timers wait until the processor has timer= again.
        others = {id: file for id, file in now.due.items() if id in self._logs or names.is_timer_queue(id)}
        faults.point("spark.moving")
        self.ledger.commit("step", **{lane.waiting: move.runs}, due=others | due, moved=moved)
        faults.point("spark.moved")
        self._show_moved()
        self._drop_delayed([*move.gone, *lost])
        return True

    def _still_set(self, moved: dict[str, pa.Table]) -> dict[str, pa.Table]:
        """The timers that are due without those that were replaced or cancelled."""
        tables = {}
        folder, state = state_files.folder_of_state(self.node.id), self.ledger.now.state
        for tailer, table in moved.items():
            timers = list(zip(table.column("index").to_pylist(), table.column("value").to_pylist()))
            parts = max(1, min(self._cores, len(timers) // TIMERS_OF_TASK))
            cut = self.driver.context.parallelize(
                [timers[len(timers) * at // parts : len(timers) * (at + 1) // parts] for at in range(parts)], parts
            )
            ask = functools.partial(delays.still_set, self.driver.files, folder, state)
            kept = [is_set for some in cut.map(ask).collect() for is_set in some]
            if any(kept):
                tables[tailer] = table.drop_columns(["index"]).filter(pa.array(kept))
        return tables

    # Expiry of state.

    def _to_expire(self) -> int:
        """The number of the oldest runs of the state of which all timed values have expired."""
        ttl_ns = self.node.options.ttl_ns
        if ttl_ns is None:
            return 0
        return state_files.to_expire(self.ledger.now.state, max(self._last_ns, clock.now_ns()) - ttl_ns)

    def _expire(self) -> bool:
        """Delete values that expired, in a record of its own. Return False if there are none."""
        count = self._to_expire()
        if not count:
            return False
        self._now_ns()
        before = self.ledger.now.state
        merged = self._merge_state(before[:count], True)
        faults.point("state.expiring")
        self.ledger.commit("step", state=(*([merged] if merged else []), *before[count:]))
        faults.point("state.expired")
        self._drop(before)
        return True

    def _show_moved(self) -> None:
        """Let the lane of moved messages have the file of the last record, and delete the one before."""
        due = self.ledger.now.due
        for tailer, log in (item for lane in self._due_lanes for item in lane.logs.items()):
            before, log.live = log.live, [due[tailer]] if tailer in due else []
            for file in before:
                if file not in log.live:
                    self.driver.files.delete(f"{log.folder}/{file.name}")

    def _drop_delayed(self, runs: Sequence[HeldRun]) -> None:
        """Delete the files of these runs."""
        for run in runs:
            for name in run.files.values():
                self.driver.files.delete(f"{delays.folder_of_delayed(self.node.id)}/{name}")

    def _tell_purged(self, ready: dict[str, tuple[int, int]]) -> None:
        """Warn once of messages that were purged before this processor took them."""
        for tailer, (low, _) in ready.items():
            lost = low - max(self.ledger.now.positions[tailer][1], self._warned.get(tailer, 0))
            if lost > 0:
                self._warned[tailer] = low
                text = f"{lost:,} messages of {self.inputs[tailer].id} were purged before it took them"
                self.driver.emit(events.Event(self.node.id, text, logging.WARNING))

    def _size(self) -> int:
        """Most messages of a step."""
        options = self.node.options
        if self.node.kind == "frame" or self.node.at_most_once:
            return options.batch_size
        if options.batch:
            most = ORDERED_MESSAGES if self._single else self._paced
            return max(1, most // self._call_size) * self._call_size
        if not self.ordered:
            return self._paced
        return options.batch_size if options.batch_size != BATCH_SIZE else ORDERED_MESSAGES

    @property
    def _paced(self) -> int:
        """Most messages of a step, by the times of the steps before."""
        if not self._each_s:
            return FIRST_MESSAGES
        return max(1, min(self._pace.count, int(SLOWEST_S * (1 if self._single else self._cores) / self._each_s)))

    @property
    def _cores(self) -> int:
        return int(self.driver.context.defaultParallelism)

    def _bounded(self, ranges: dict[str, tuple[int, int]], count: int) -> int:
        """The number of messages to take: fewer than ``count`` if they are large."""
        most = STEP_BYTES * (1 if self._single else self._cores)
        if self._each_bytes:
            count = max(1, min(count, int(most / self._each_bytes)))
        for tailer, (low, _) in ranges.items():
            files = self._logs[tailer].within(low, low + count)
            held, size = sum(file.count for file in files), sum(file.size for file in files)
            if size > most:
                count = max(1, min(count, held * most // size))
        if self.node.options.batch and count > self._call_size:
            count -= count % self._call_size
        return count

    @property
    def _call_size(self) -> int:
        """Most messages of a call of a batch function. Tables have more, if no size is set, as a step has time."""
        size = self.node.options.batch_size
        if self.node.takes_columns and size == BATCH_SIZE and not self._single:
            size = max(size, min(TABLE_SIZE, self._pace.count // self._cores))
        return size

    def _batch(self, count: int) -> int:
        """The number of messages of each call of a batch function."""
        return min(count, self._call_size) if self.node.options.batch else count

    @property
    def _single(self) -> bool:
        """True if one task runs the step, one call after another."""
        keyed = self.node.options.key is not None
        return self.ordered or self.ledger.now.whole or (keyed and not self._by_key)

    @property
    def _by_key(self) -> bool:
        """True if a key decides the task of a message."""
        return (
            self.node.options.key is not None
            and self.node.mode != "join"
            and not (self.node.options.batch or self.ordered or self.ledger.now.whole)
        )

    @property
    def _logs(self) -> dict[str, PartitionLog]:
        return {tailer: log for lane in self._lanes for tailer, log in lane.logs.items()}

    def _after(self, taking: StepRange, count: int | None = None) -> dict[str, Any]:
        """The changes of a record: the positions after the range, or after its first ``count`` messages."""
        now = self.ledger.now
        ends = {tailer: high if count is None else low + count for tailer, (low, high) in taking.ranges.items()}
        if self._lane(taking) is self._own:
            return {"positions": now.positions | {t: (now.positions[t][0], end) for t, end in ends.items()}}
        due = {tailer: file for tailer, file in now.due.items() if ends.get(tailer, 0) < file.next}
        return {"moved": now.moved | ends, "due": due}

    @contextlib.contextmanager
    def _held(self, taking: StepRange) -> Iterator[None]:
        """Keep the files that a step reads on the disk, as long as the block runs."""
        logs = {tailer: self._logs[tailer] for tailer in taking.ranges}
        held = [(log.directory, log.within(*taking.ranges[tailer])) for tailer, log in logs.items()]
        for directory, files in held:
            directory.hold(files)
        self._under_way = taking
        try:
            yield
        finally:
            self._under_way = None
            for directory, files in held:
                directory.release(files)

    # 3. Run.

    def run(self, taking: StepRange) -> list[TaskOutput]:
        count = _count(taking)
        tasks = 1 if self._single else self._tasks(count)
        task, stretches = self._task(taking), self._stretches(taking, tasks)
        cut = self.driver.context.parallelize(stretches, len(stretches))
        if self._by_key and tasks > 1:
            scattered = cut.flatMap(functools.partial(scatter, task.packed, tasks))
            called = scattered.partitionBy(tasks, int).mapPartitionsWithIndex(functools.partial(run_keys, task))
        else:
            called = cut.map(functools.partial(run_task, task))
        ran: list[TaskOutput] = sorted(called.collect(), key=lambda output: output.number)
        for output in ran:
            if output.fatal is not None:
                self.ledger.check()  # the next owner may have deleted files that this step reads
                raise output.fatal
        if not any(output.declined or output.stop or output.closed for output in ran):
            held = sum(output.count for output in ran)
            if held != count:
                raise Diverged(
                    f"{self.node.id} took {shown_ranges(taking.ranges)}, {count} messages, but the files had {held}.",
                    "restore the directory from a copy.",
                    processor=self.node.id,
                )
        return ran

    def _stretches(self, taking: StepRange, tasks: int) -> list[Stretch]:
        """The stretches of a step, one for each task. No batch is cut."""
        numbers = {tailer: number for number, tailer in enumerate(self._lane(taking).logs)}
        count = _count(taking)
        edges = edges_of(count, taking.size if self.node.options.batch else 1, tasks, count)
        stretches = []
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            pieces = ((numbers[t], tuple(self.pieces(t, at + low, at + high))) for t, (at, _) in taking.ranges.items())
            stretches.append(Stretch(number, low, high - low, tuple(sorted(pieces))))
        return stretches

    def _tasks(self, count: int) -> int:
        """The number of tasks: one for every :data:`TASK_S` of work, as far as there are cores."""
        worth = count if self._each_s is None else math.ceil(count * self._each_s / TASK_S)
        return max(1, min(count, self._cores, worth))

    def _task(self, taking: StepRange) -> Task:
        """The common facts of the tasks of a step."""
        lane = self._lane(taking)
        ends = self.positions | {tailer: stop for tailer, (_, stop) in taking.ranges.items()}
        unread = (port.binding for port in self.node.inputs if self._reaches_past(self.node.tailer(port.queue), ends))
        sees = "all" if self._single else "keys" if self._by_key else "nothing"
        return Task(
            self._packed(lane),
            next(iter(taking.ranges.values()))[0],
            taking.size,
            self.ledger.now.number + 1,
            clock.now_ns() // 1000,
            sees,
            self.ledger.now.state if sees != "nothing" else (),
            self.node.at_most_once,
            tuple(target.columns for target in self.targets),
            tuple(target.nexts() for target in self.targets),
            taking.now_ns or clock.now_ns() if lane is self._own else delays.NEVER_NS,
            taking.now_ns or clock.now_ns(),
            frozenset(unread),
        )

    def _reaches_past(self, tailer: str, ends: dict[str, int]) -> bool:
        """Return whether an input has messages from these ends on."""
        low, end = self.inputs[tailer].ready(ends[tailer])
        return low < end

    def pieces(self, tailer: str, low: int, high: int) -> list[Piece]:
        """The pieces of files that hold the messages [low, high) of an input."""
        log = self._logs[tailer]
        return pieces_of(log.folder, log.within(low, high), low, high)

    def entrances(self) -> tuple[Entrance, ...]:
        return self._own.entrances()

    def _packed(self, lane: _Lane) -> bytes:
        """The job of the tasks, packed after the claim, which gives the epoch, and when a target has grown."""
        partitions = [target.options.partitions for target in self.targets]
        if lane.packed is None or lane.packed[0] != partitions:
            lane.packed = partitions, self._pack(lane)
        return lane.packed[1]

    def _pack(self, lane: _Lane) -> bytes:
        places = {target.queue: number for number, target in enumerate(self.targets)}
        job = TaskJob(
            lane.node,
            self.driver.system,
            self.ledger.now.epoch,
            self.driver.store_id,
            self.driver.files,
            lane.entrances(),
            tuple((target.queue, target.options) for target in self.targets),
            {port.binding: places[port.queue] for port in self.node.outputs},
            places[self.node.errors] if self.node.errors else None,
            self.node.id,
            names.timer_queue(self.node.key),
            self.driver.without_delays,
        )
        return pack_job(job)

    # 4 to 6.

    def _commit(self, taking: StepRange, ran: list[TaskOutput]) -> None:
        outputs, stop = up_to_stop(ran)
        stopped: ProcessorStopped | None = None
        whole = next((output.closed for output in ran if output.closed is not None), _count(taking))
        if stop is not None:
            whole = stop[0]
            stopped = stopped_at(self.node, stop[1])
            self._stop = None if stopped.away else stopped
            if not whole:
                self._discard(ran)
                raise stopped
        lane = self._lane(taking)
        digest = lane.digest({t: (low, low + whole) for t, (low, _) in taking.ranges.items()}, outputs)
        written, failed = sum(output.written for output in outputs), sum(output.failed for output in outputs)
        before = self.ledger.now
        new: dict[QueueDirectory, list[DataFile]] = {}
        for output in outputs:
            for target, file in output.files:
                new.setdefault(self.targets[target], []).append(file)
            for target, until_ns in output.until_ns.items():
                self.targets[target].note_delays(until_ns)
        held = [output.held for output in outputs if output.held is not None]
        later = sum(run.count for run in held)
        runs, merged = self._merged([*before.held, *held])
        new_timers = [output.timers for output in outputs if output.timers is not None]
        timers, merged_timers = self._merged([*before.timers, *new_timers])
        if held or new_timers:
            faults.point("spark.holding")
        publish(
            self.ledger,
            new,
            **({} if self.node.at_most_once else self._after(taking, whole)),
            hash=digest.hex(),
            state=self._state(outputs),
            held=runs,
            timers=timers,
            counts={"taken": whole - later, "written": written, "failed": failed},
        )
        self._show_moved()
        self._drop_delayed([*merged, *merged_timers])
        self._drop([*before.state, *(output.state for output in outputs if output.state)])
        self._count((whole - later) * len(taking.ranges), written - failed, failed, ran)
        self.driver.ring()
        for output in outputs:
            for target, fields in output.fields.items():
                self.targets[target].learn(fields)
        if stopped is not None:
            raise stopped

    def _merged(self, runs: Sequence[HeldRun]) -> tuple[tuple[HeldRun, ...], Sequence[HeldRun]]:
        """Merge small runs. Return all runs after that, and those that became one."""
        small = delays.to_merge(runs)
        if not small:
            return tuple(runs), ()
        folder, number = delays.folder_of_delayed(self.node.id), self.ledger.now.number + 1
        work = functools.partial(delays.merge, self.driver.files, folder, number)
        (one,) = self.driver.context.parallelize([small], 1).map(work).collect()
        return (*(run for run in runs if run not in small), one), small

    def _state(self, outputs: Sequence[TaskOutput]) -> tuple[StateRun, ...]:
        """The runs of the state with the changes of a step. Runs of about the same size become one."""
        runs = self.ledger.now.state
        changed = state_files.joined([output.state for output in outputs])
        if changed is None:
            return runs
        runs = (*runs, changed)
        count = state_files.to_merge(runs)
        if not count:
            return runs
        older, newest = runs[:-count], runs[-count:]
        one = self._merge_state(newest, not older)
        return older if one is None else (*older, one)

    def _merge_state(self, runs: Sequence[StateRun], complete: bool) -> StateRun | None:
        """Merge runs of the state, without the values that expired; ``complete``: there are no older ones."""
        spans, ttl_ns = state_files.spans(runs), self.node.options.ttl_ns
        work = functools.partial(
            state_files.merge,
            self.driver.files,
            state_files.folder_of_state(self.node.id),
            self.ledger.now.number + 1,
            runs,
            complete,
            None if ttl_ns is None else self._last_ns - ttl_ns,
        )
        if len(spans) == 1:
            merged = [work(spans[0])]
        else:
            merged = self.driver.context.parallelize(spans, len(spans)).map(work).collect()
        return state_files.joined(merged)

    def _drop(self, before: Sequence[StateRun]) -> None:
        """Delete those of these files that are not the state's."""
        kept = {name for run in self.ledger.now.state for name in run.files}
        for run in before:
            for name in set(run.files) - kept:
                self.driver.files.delete(f"{state_files.folder_of_state(self.node.id)}/{name}")

    def _count(self, taken: int, written: int, failed: int, ran: list[TaskOutput]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.taken += taken
        counters.written += written
        counters.failed += failed
        counters.retries += sum(output.retries for output in ran)
        first = next((output.first for output in ran if output.first is not None), None)
        if failed and first is not None:
            assert self.node.errors is not None
            cause = f"{type(first.error).__name__}: {words(first.error)}"
            self.driver.emit(failed_event(self.node.id, self.node.errors, failed, first.attempts, cause))
        if any(output.declined == "again" for output in ran):
            text = "a task was lost with its executor; the processor is at-most-once, so its messages are lost"
            self.driver.emit(events.Event(self.node.id, text, logging.WARNING))


def _count(taking: StepRange) -> int:
    return next(high - low for low, high in taking.ranges.values())
