"""A processor whose queues are on a shared filesystem: take, run, commit. The driver's side of a step.

    1. take       choose a range of messages of each input; the messages stay in their files
    2. taking     if the function has side effects, record the range before it runs
    3. run        executors call the function and write its results, once, into the work folder: from here on
                  there is one version of the results, even if a later step fails
    4. write      number the messages in the order (offset of their source, order of the function), and write
                  them to files in the folders of their queues, which are in no log yet
    5. commit     put the record that moves the positions and names the files, if that number is not taken
    6. forward    add the files to the logs of their queues

After a crash before 5 the same messages are taken again, and files that no record names are swept. After a crash
after 5 the next start forwards, and a file that is in the log already is not added again. Between 4 and 6 no other
thread of this driver appends to these queues, so the numbers of 4 are those of 6. And whatever another driver had
committed was forwarded when this driver claimed the processors.

An at-most-once processor moves its positions in 2, and not in 5.

Not guaranteed: that the queues of one step change at the same moment (6 adds to one after another).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import events, names
from cues.errors import Diverged, ProcessorStopped, TopologyChanged
from cues.graphs.processor import BATCH_SIZE, FRAME, Node
from cues.spark.cluster import tasks
from cues.spark.cluster.directory import SCHEMA, QueueDirectory
from cues.spark.cluster.ledger import Ledger, LedgerRecord, StepRange
from cues.spark.cluster.publish import publish_results
from cues.spark.cluster.rows import Entrance
from cues.spark.cluster.state_files import StateFiles
from cues.spark.cluster.tasks import StepResult, TaskJob, TaskResult
from cues.spark.executor import JobGroup, pack_job
from cues.steps.failure import failed_event, stopped_at, words
from cues.steps.hashes import Hasher

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver

STEP_MESSAGES: Final = 50_000
"""Most messages of a step. Its three jobs cost about a second, even with few messages."""
STEP_BYTES: Final = 128 << 20
"""Most bytes of files that a step takes, approximately. A part of them is in the memory of a worker."""
ORDERED_MESSAGES: Final = 10_000
"""Most messages of a step that one task does, if ``batch_size`` is not set. After a crash they are repeated."""


class Stage:
    """One processor that this driver owns. Used by one thread at a time."""

    def __init__(self, driver: Driver, node: Node) -> None:
        self.driver = driver
        self.node = node
        self.counters = events.Counters()
        self.ledger = Ledger(driver.files, node.id, driver.owner)
        self.state = StateFiles(driver, self.ledger)
        self.inputs = {names.tailer_id(node.id, port.queue): driver.queues[port.queue] for port in node.inputs}
        queues = dict.fromkeys([*(port.queue for port in node.outputs), *([node.errors] if node.errors else [])])
        self.targets = [driver.queues[queue] for queue in queues]
        self.ordered = node.side_effects or node.at_most_once
        self._bindings = {names.tailer_id(node.id, port.queue): port.binding for port in node.inputs}
        self._served = 0
        self._hasher = Hasher(node.id, 0)
        self._jobs = JobGroup(driver.context, node.id, f"cues {node.id} {driver.owner}")
        self._stop: ProcessorStopped | None = None
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
        where = ", ".join(f"{tailer} {next}" for tailer, (_, next) in self.ledger.now.positions.items())
        what = "rewind" if self.ledger.now.taking else "resume" if last else "fresh"
        self.driver.emit(events.Recovered(self.node.id, f"{what}: from {where}", logging.INFO, decision=what))

    def _positions(self, accept_topology: bool, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        """The positions of the processor, checked. The files of its last step are in the logs of their queues."""
        if last is not None:
            if last.files:
                self.driver.ring()
            self._check_inputs(last, accept_topology)
        positions = {}
        for tailer, directory in self.inputs.items():
            identity = directory.identity.hex()
            known, next = (last.positions.get(tailer) if last else None) or (identity, 1)
            if known != identity or not directory.reaches(next):
                raise Diverged(
                    f"{self.node.id} is at {next} of queue {directory.queue!r} with identity {known}; in"
                    f" {directory.files.url} it has {identity} and ends before {directory.next}.",
                    "use the directory that belongs to these steps, or start over with another --queues DIR.",
                    processor=self.node.id,
                )
            positions[tailer] = known, next
        return positions

    def _check_inputs(self, last: LedgerRecord, accept_topology: bool) -> None:
        new = [tailer for tailer in self.inputs if tailer not in last.positions]
        gone = [tailer for tailer in last.positions if tailer not in self.inputs]
        if (new or gone) and not accept_topology:
            what = [f"new: {', '.join(new)}"] if new else []
            what += [f"no longer read: {', '.join(gone)}"] if gone else []
            raise TopologyChanged(
                f"The inputs of {self.node.id} have changed since its last step ({'; '.join(what)}).",
                "start with --accept-topology (graph.start(accept_topology=True)): new inputs begin at the start of"
                " their queue; or start over with another --queues DIR.",
                processor=self.node.id,
            )

    # --- for other threads ---

    def ready(self) -> bool:
        """Return True if there are messages to take."""
        some = any if self.node.mode == "alts" else all
        return self.ledger.now.taking is not None or some(low < end for low, end in self._available().values())

    @property
    def positions(self) -> dict[str, int]:
        """The next index after the last commit, by queue."""
        positions = self.ledger.now.positions
        return {directory.queue: positions[tailer][1] for tailer, directory in self.inputs.items()}

    def holds(self, queue: str) -> int | None:
        """The first message of a queue that a step needs, if it is under way or will be repeated."""
        taking = self._under_way or self.ledger.now.taking
        ranges = taking.ranges if taking else {}
        return next((low for t, (low, _) in ranges.items() if self.inputs[t].queue == queue), None)

    def _available(self) -> dict[str, tuple[int, int]]:
        """The range of messages available on each input, by tailer id."""
        positions = self.ledger.now.positions
        return {tailer: directory.ready(positions[tailer][1]) for tailer, directory in self.inputs.items()}

    def cancel(self) -> None:
        """Give up a step under way."""
        self._jobs.cancel()

    # --- step ---

    def step(self) -> bool:
        """Make one step; return False if there is nothing to take.

        Raises :class:`Fenced` and :class:`ProcessorStopped`.
        """
        if self._stop is not None:
            raise self._stop
        taking = self._take()
        if taking is None:
            self.ledger.check()
            return False
        faults.point("spark.take")
        if self.ordered and taking is not self.ledger.now.taking:
            if self.node.at_most_once:
                self.ledger.commit("taking", positions=self._moved(taking))
            else:
                self.ledger.commit("taking", taking=taking)
            faults.point("spark.taking")
        with self._jobs.step(f"{self.node.id}: {taking.ranges}", f"over {_shown(taking)}"), self._held(taking):
            self._run_and_commit(taking)
        return True

    def _run_and_commit(self, taking: StepRange) -> None:
        ran = self._run(taking)
        if any(answer.declined == "state" for answer in ran.answers):
            # Nothing of this run counts. From now on every task that calls the function gets the whole state.
            self.driver.files.delete(ran.folder)
            self.ledger.commit("step", whole=True)
            self.driver.emit(events.Event(self.node.id, "uses the processor's state: one task, one call after another"))
            ran = self._run(taking)
        for answer in ran.answers:
            if answer.fatal is not None:
                raise answer.fatal
        if ran.stop is not None and ran.stop[0] and not self.ordered and (ran.changed or self._by_key):
            # Calls after the message that failed may have changed the state too. Run again, up to that message.
            self.driver.files.delete(ran.folder)
            cut = ran.stop[0]
            taking = StepRange({t: (start, start + cut) for t, (start, _) in taking.ranges.items()}, taking.size)
            ran = self._run(taking)
        faults.point("spark.ran")
        try:
            self._commit(taking, ran)
        finally:
            self.driver.files.delete(ran.folder)

    # 1. Take.

    def _take(self) -> StepRange | None:
        pending = self.ledger.now.taking
        if pending is not None and all(self.inputs[t].first <= low for t, (low, _) in pending.ranges.items()):
            return pending
        ready = self._available()
        self._tell_purged(ready)
        size = self._size()
        if self.node.mode == "alts":
            tailers = list(ready)
            for turn in range(len(tailers)):
                place = (self._served + turn) % len(tailers)
                low, end = ready[tailers[place]]
                if end > low:
                    self._served = place + 1
                    count = self._bounded({tailers[place]: (low, end)}, min(size, end - low))
                    return StepRange({tailers[place]: (low, low + count)}, self._part_size(count))
            return None
        count = min(size, *(end - low for low, end in ready.values()))
        if count <= 0:
            return None
        count = self._bounded(ready, count)
        return StepRange({tailer: (low, low + count) for tailer, (low, _) in ready.items()}, self._part_size(count))

    def _tell_purged(self, ready: dict[str, tuple[int, int]]) -> None:
        """Warn once of messages that were purged before this processor took them."""
        for tailer, (low, _) in ready.items():
            lost = low - max(self.ledger.now.positions[tailer][1], self._warned.get(tailer, 0))
            if lost > 0:
                self._warned[tailer] = low
                text = f"{lost:,} messages of {self.inputs[tailer].queue} were purged before it took them"
                self.driver.emit(events.Event(self.node.id, text, logging.WARNING))

    def _size(self) -> int:
        """Most messages of a step."""
        options = self.node.options
        if options.batch == FRAME or self.node.at_most_once:
            return options.batch_size
        if options.batch:
            most = ORDERED_MESSAGES if self._single else STEP_MESSAGES
            return max(1, most // options.batch_size) * options.batch_size
        if not self.ordered:
            return STEP_MESSAGES
        return options.batch_size if options.batch_size != BATCH_SIZE else ORDERED_MESSAGES

    def _bounded(self, ranges: dict[str, tuple[int, int]], count: int) -> int:
        """The number of messages to take: fewer than ``count`` if they are large."""
        for tailer, (low, _) in ranges.items():
            files = self.inputs[tailer].within(low, low + count)
            held, size = sum(file.count for file in files), sum(file.size for file in files)
            if size > STEP_BYTES:
                count = max(1, min(count, held * STEP_BYTES // size))
        if self.node.options.batch and count > self.node.options.batch_size:
            count -= count % self.node.options.batch_size
        return count

    def _part_size(self, count: int) -> int:
        options = self.node.options
        if options.batch:
            return min(count, options.batch_size)
        return count if self._single else -(-count // min(count, int(self.driver.context.defaultParallelism)))

    @property
    def _single(self) -> bool:
        """True if one task runs the step, one call after another."""
        keyed = self.node.options.key is not None
        return self.ordered or self.ledger.now.whole or (keyed and not self._by_key)

    @property
    def _by_key(self) -> bool:
        """True if parts are divided by key."""
        return (
            self.node.options.key is not None
            and self.node.mode != "join"
            and not (self.node.options.batch or self.ordered or self.ledger.now.whole)
        )

    def _moved(self, taking: StepRange, count: int | None = None) -> dict[str, tuple[str, int]]:
        """The positions after the range, or after its first ``count`` messages."""
        moved = dict(self.ledger.now.positions)
        for tailer, (low, high) in taking.ranges.items():
            moved[tailer] = moved[tailer][0], high if count is None else low + count
        return moved

    @contextlib.contextmanager
    def _held(self, taking: StepRange) -> Iterator[None]:
        """Keep the files that a step reads on the disk, as long as the block runs."""
        held = [(self.inputs[t], self.inputs[t].within(*span)) for t, span in taking.ranges.items()]
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

    def _run(self, taking: StepRange) -> StepResult:
        from pyspark.sql import functions as F

        rows = self._rows(taking)
        count = next(high - low for low, high in taking.ranges.values())
        parts = -(-count // taking.size)
        packed, sees, once = self._packed, "nothing", self.node.at_most_once
        kept: Any = None
        if self._single:
            sees = "all"
            # Under at-most-once the state is folded first: a stage that reads a shuffle and is repeated begins to count
            # its attempts again, so a task could not know that its messages were delivered.
            state = self.state.folded(self.driver.scratch()) if self.node.at_most_once else self.state.rows()
            if state is not None:
                rows = rows.unionByName(_state_rows(state, F.lit(0)))
            shared = rows.coalesce(1)
        elif self._by_key:
            sees = "keys"
            rows = rows.mapInArrow(lambda given: tasks.add_keys(packed, parts, given), tasks.IN)
            state = self.state.rows()
            if state is not None:
                rows = kept = rows.persist()  # used twice: for the keys, and for the calls
                state = state.join(rows.select("part", "key").distinct(), "key")
                rows = rows.unionByName(_state_rows(state, F.col("part")))
            shared = rows.repartitionById(parts, F.col("part"))
        else:
            shared = rows.repartitionById(parts, F.col("part")) if parts > 1 else rows.coalesce(1)
        ran = StepResult(self.driver.scratch())
        place = self.driver.files.url_of(ran.folder)
        try:
            shared = shared.sortWithinPartitions("part", "input", "offset")
            calls = shared.mapInArrow(lambda given: tasks.run_parts(packed, sees, once, given), tasks.OUT)
            calls.write.parquet(place)
        finally:
            if kept is not None:
                kept.unpersist()
        ran.answers = self.answers(place)
        if not any(answer.declined or answer.fatal or answer.stop for answer in ran.answers):
            held = sum(answer.count for answer in ran.answers)
            if held != count:
                raise Diverged(
                    f"{self.node.id} took {_shown(taking)}, {count} messages, but the files had {held}.",
                    "set spark.sql.files.ignoreMissingFiles=false, and restore the directory from a copy.",
                    processor=self.node.id,
                )
        return ran

    def answers(self, place: str) -> list[TaskResult]:
        """The results of the parts, without their messages."""
        rows = self.driver.session.read.schema(tasks.OUT).parquet(place).where(f"kind = {tasks.ANSWER}")
        answers: list[TaskResult] = [pickle.loads(row.value) for row in rows.select("value").collect()]
        return sorted(answers, key=lambda answer: answer.part)

    def read(self, directory: QueueDirectory, low: int, high: int) -> Any:
        """The messages [low, high) of a queue as a DataFrame."""
        urls = directory.urls(directory.within(low, high))
        return self.driver.session.read.schema(SCHEMA).parquet(*urls).where(f"index >= {low} AND index < {high}")

    def _rows(self, taking: StepRange) -> Any:
        """The messages of the step as tasks take them."""
        union: Any = None
        for number, (tailer, directory) in enumerate(self.inputs.items()):
            if tailer not in taking.ranges:
                continue
            low, high = taking.ranges[tailer]
            rows = self.read(directory, low, high).selectExpr(
                f"int((index - {low}) div {taking.size}) AS part",
                f"int({number}) AS input",
                f"index - {low} AS offset",
                "index",
                "unix_micros(time) AS time",
                "hash",
                "value",
                "meta",
                "CAST(NULL AS BINARY) AS key",
            )
            union = rows if union is None else union.unionAll(rows)
        return union

    def entrances(self) -> tuple[Entrance, ...]:
        return tuple(
            Entrance(self._bindings[tailer], tailer, queue.queue, queue.identity, queue.options._kept)
            for tailer, queue in self.inputs.items()
        )

    @functools.cached_property
    def _packed(self) -> bytes:
        """The job of the tasks, packed after the claim, which gives the epoch."""
        places = {target.queue: number for number, target in enumerate(self.targets)}
        job = TaskJob(
            self.node,
            self.driver.system,
            self.ledger.now.epoch,
            self.driver.store_id,
            self.entrances(),
            tuple(target.options for target in self.targets),
            {port.binding: places[port.queue] for port in self.node.outputs},
            places[self.node.errors] if self.node.errors else None,
        )
        return pack_job(job)

    # 4 to 6.

    def _commit(self, taking: StepRange, ran: StepResult) -> None:
        stop = ran.stop
        count = next(high - low for low, high in taking.ranges.values())
        whole = count if stop is None else stop[0]
        if stop is not None:
            self._stop = stopped_at(self.node, stop[1])
            if not whole:
                raise self._stop
        written: Counter[int] = Counter()
        for answer in ran.answers:
            if stop is None or answer.part * taking.size <= stop[0]:
                written.update(answer.written)
        digest = self._hasher.digest(
            [(t, self.inputs[t].identity, low, low + whole) for t, (low, _) in sorted(taking.ranges.items())]
        )
        failed = sum(answer.failed for answer in ran.answers)
        before = self.ledger.now
        targets = {target: (self.targets[target], count) for target, count in written.items()}
        publish_results(
            self.driver,
            self.ledger,
            ran.folder,
            targets,
            whole,
            positions=before.positions if self.node.at_most_once else self._moved(taking, whole),
            hash=digest.hex(),
            state=self.state.changed(ran.folder) if ran.changed else before.state,
            counts={"taken": whole, "written": sum(written.values()), "failed": failed},
        )
        self.state.drop(before.state)
        self._count(whole * len(taking.ranges), sum(written.values()) - failed, failed, ran)
        self.driver.ring()
        if self._stop is not None:
            raise self._stop

    def _count(self, taken: int, written: int, failed: int, ran: StepResult) -> None:
        counters = self.counters
        counters.steps += 1
        counters.taken += taken
        counters.written += written
        counters.failed += failed
        counters.retries += sum(answer.retries for answer in ran.answers)
        first = next((answer.first for answer in ran.answers if answer.first is not None), None)
        if failed and first is not None:
            assert self.node.errors is not None
            cause = f"{type(first.error).__name__}: {words(first.error)}"
            self.driver.emit(failed_event(self.node.id, self.node.errors, failed, first.attempts, cause))
        if any(answer.declined == "again" for answer in ran.answers):
            text = "a task was lost with its executor; the processor is at-most-once, so its messages are lost"
            self.driver.emit(events.Event(self.node.id, text, logging.WARNING))


def _state_rows(state: Any, part: Any) -> Any:
    """The state, as rows that a task reads before its messages."""
    from pyspark.sql import functions as F

    return state.select(
        part.cast("int").alias("part"),
        F.lit(tasks.STATE_INPUT).alias("input"),
        F.lit(0).cast("bigint").alias("offset"),
        F.lit(0).cast("bigint").alias("index"),
        F.lit(0).cast("bigint").alias("time"),
        F.lit(None).cast("string").alias("hash"),
        "value",
        F.col("row").alias("meta"),
        "key",
    )


def _shown(taking: StepRange) -> str:
    return ", ".join(f"{tailer} [{low}, {high})" for tailer, (low, high) in taking.ranges.items())
