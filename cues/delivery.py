"""The delivery protocol of one processor: take, run, commit; and what a start finds.

The numbers are those of docs/guarantees.md.

    1. take       choose for each tailer a range of messages that are there; copy them out
    2. snapshot   where the function has side effects, commit what was taken before it runs
    3. run        call the function; a message that fails for good is cut out as a step of its own
    4. commit     one write transaction: the fence, outputs, state, attempt, positions
    5. ring       wake who waits for the queues that were written

A position moves only inside the commit of 4 (at-most-once: of 2) or by a seek. So whatever dies
when, the store holds a step whole or not at all, and :meth:`Delivery.recover` decides from a
constant number of records which: the last snapshot has an attempt with its hash, or it has not.

Not guaranteed: that a function is called once. A step that did not commit is run again, with the
same ranges and hash; what it does outside is the business of ``process.delivery``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cues import batch as batches
from cues import codec, events, faults, fork, names, tries
from cues.abroad import LowWater
from cues.batch import Page
from cues.errors import CuesError, Diverged, ProcessorStopped, QueueNotFound, WriterStuck
from cues.failure import Failure, error_message, words
from cues.hashes import Hasher
from cues.imperative import Imperative, ProcessAppender, ProcessTailer
from cues.log import Log
from cues.options import QueueOptions
from cues.ownership import NO_SEAL, Position, ProcessorRow, fenced
from cues.process import Process
from cues.processor import Node
from cues.queue import Queue
from cues.results import Output, Results
from cues.runner import Interrupted, Pause, Runner
from cues.state import Table
from cues.taking import Input, Slice, Taken

if TYPE_CHECKING:
    from cues.store import Store
    from cues.txn.stamps import Stamps

Outcome = Literal["idle", "committed"]
R = TypeVar("R")


@dataclass(slots=True)
class Part:
    """A run of a step's messages that commits under one hash: all of them, or what a failure cut."""

    start: int
    stop: int
    digest: bytes
    taking: tries.Taking
    failure: Failure | None
    appends: Iterable[tuple[Queue, list[Page]]]
    """What it appends in the home store: to its outputs there, and to fork queues."""
    written: int
    """Messages for outputs, wherever they are."""
    pending: dict[str, int] = field(default_factory=dict, kw_only=True)
    """Index of the first of its pending messages in each log of another store (pending.py)."""

    def values(self) -> int:
        """LMDB values that it appends at most, which is what the disk must have room for."""
        return sum(1 + len(page.pieces) for _, pages in self.appends for page in pages)


@dataclass(frozen=True)
class Decision:
    """What the start table said, and why."""

    what: Literal["fresh", "resume", "rewind", "void"]
    why: str


class Delivery:
    """One processor that this process owns. Used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        node: Node,
        row: ProcessorRow,
        *,
        queues: Mapping[str, Queue] | None = None,
        marks: Mapping[str, LowWater] | None = None,
        system: Any = None,
        pause: Pause = lambda seconds: False,
        stopping: Callable[[], bool] = lambda: False,
        emit: Callable[[events.Event], None] = lambda event: None,
        runner: Callable[..., Runner] = Runner,
    ) -> None:
        """``queues`` are handles by name, which those in other stores must be, ``marks`` the low-water marks there
        by tailer id; ``runner`` makes what calls the function, of the arguments of :class:`Runner`."""
        self.store = store
        given = queues or {}

        def queue_of(id: str) -> Queue:
            return given[id] if id in given else store.queue(id)

        def log_of(id: str) -> Queue:
            return queue_of(id).view(node.partition)

        self.node = node
        self.counters = events.Counters()
        self.state = Table(store, node.id)
        self._emit = emit
        self._pause = pause
        self._row = row
        self._expected = row.pack()
        self._row_key = names.processor_key(node.id)
        self.try_log = store.queue(node.id)
        inputs = {node.tailer(port.queue): port for port in node.inputs}
        self.inputs = [Input(port.binding, tailer, log_of(port.queue)) for tailer, port in inputs.items()]
        self.imperative = Imperative(
            node.id,
            {p.binding: ProcessTailer(log_of(p.queue), node.tailer(p.queue)) for p in node.tailers},
            {p.binding: ProcessAppender(queue_of(p.queue)) for p in node.appenders},
        )
        self.marks = marks or {}
        self._readers: list[Input | ProcessTailer] = [*self.inputs, *self.imperative.tailers.values()]
        """Who has a position in the row."""
        self._order = sorted(one.tailer for one in self._readers)
        self._place = {tailer: place for place, tailer in enumerate(self._order)}
        """Where a tailer's position stands in the row."""
        self.outputs = {port.binding: queue_of(port.queue) for port in node.outputs}
        self._targets = [(binding, queue, False) for binding, queue in self.outputs.items()]
        self._targets += [(binding, one.queue, True) for binding, one in self.imperative.appenders.items()]
        """Where a step's messages go, in this order, and whether they come through an appender."""
        self.errors = self._error_log(queue_of(node.errors)) if node.errors else None
        written = [*(queue for _, queue, _ in self._targets), *([self.errors] if self.errors else [])]
        others = {queue.store.id for queue in written} - {store.id}
        self.forks = {} if node.pending else {other: store.queue(names.fork_id(node.id, other)) for other in others}
        """The fork queues, by the id of the store that they are for; none where that is written to directly."""
        self._tries = tries.Writer(node.id)
        self._tries_from = self.try_log.first_index
        self._served = 0
        self._pending: tuple[tries.Snapshot, dict[str, int]] | None = None
        self._stop: Failure | None = None
        self.hasher = Hasher(node.id, row.generation)
        state = None if node.kind == "source" else self.state.call  # a source's state is its position
        self.process = Process(node, system, self.hasher, row.epoch, store.id.hex(), state, stopping, self.imperative)
        self.runner = (
            runner(
                node,
                self.process,
                self.state,
                pause,
                emit,
                self.counters,
                lambda b: self.outputs[b]._options,
                self.imperative,
            )
            if node.kind != "source"
            else None
        )
        self.rings = 0
        for queue in (*written, *self.forks.values(), self.try_log):
            if queue.store.id == store.id:
                self.rings |= queue.log.mask
        self._spreads = any(queue.spread for queue in written)
        """Whether a step's messages may go to other logs than those in ``rings``."""

    def _error_log(self, queue: Queue) -> Queue:
        """Error messages have no key: those of a unit are on one partition."""
        return queue.view(self.node.partition % queue.options.partitions)

    # --- start --------------------------------------------------------------------------------

    def recover(self) -> Decision:
        """Read the end of the try log and the positions, decide, and stand where the decision says.

        Raises :class:`Diverged` when the store contradicts itself.
        """
        with self.store.view() as txn:
            raw = txn.get(self._row_key)
            if raw != self._expected:
                raise fenced(self.node.id, self._expected, raw)
            tail = self._tail(txn)
        snapshot, attempt = tries.last(self.try_log.log.batches(tail))
        written = {queue: self._log_of(queue) for queue in attempt.indices} if attempt else {}
        positions = dict(zip(self._order, self._row.positions))
        for one in self._readers:
            with one.queue.store.view() as txn:
                self._check_position(txn, one, positions[one.tailer])
                gone = one.log.row(txn).first - positions[one.tailer].next
            if gone > 0:
                self._emit(
                    events.Event(
                        self.node.id,
                        f"{gone:,} messages of {one.queue.id} were purged before it took them",
                        logging.WARNING,
                    )
                )
        with self.store.view() as txn:
            decision = self._decide(txn, snapshot, attempt, positions, written)
        self.state.forget()
        self.imperative.forget()
        for one in self._readers:
            one.stand(positions[one.tailer])
        self._pending = None
        if decision.what == "rewind":
            assert snapshot is not None
            self._rewind(snapshot)
        self._emit(
            events.Recovered(self.node.id, f"{decision.what}: {decision.why}", logging.INFO, decision=decision.what)
        )
        return decision

    def _decide(
        self,
        txn: Any,
        snapshot: tries.Snapshot | None,
        attempt: tries.Attempt | None,
        positions: dict[str, Position],
        written: dict[str, Log],
    ) -> Decision:
        """The start table of docs/guarantees.md, row by row. Touches nothing."""
        if snapshot is None:
            return Decision("fresh", "no step yet; from " + self._where(positions))
        if attempt is not None and attempt.hash == snapshot.hash.hex():
            self._compare_outputs(txn, attempt, written)
            return Decision("resume", f"the last step ({attempt.hash[:8]}…) is whole; from " + self._where(positions))
        if (
            self._still_pending()
            and set(snapshot.start) in self._takes()
            and all(positions[tailer].next == index for tailer, index in snapshot.start.items())
        ):
            return Decision(
                "rewind",
                f"the last step ({snapshot.hash.hex()[:8]}…) did not commit; takes the same messages again: "
                + ", ".join(f"{t} [{i}, {snapshot.end[t]})" for t, i in snapshot.start.items()),
            )
        return Decision(
            "void",
            "the last step did not commit, and positions or inputs were changed since (at-most-once, or a seek); from "
            + self._where(positions),
        )

    def _still_pending(self) -> bool:
        """Whether nobody moved the positions since the snapshot, not even to where they stood (a seek)."""
        return self._row.pending or self.node.at_most_once

    def _takes(self) -> list[set[str]]:
        """The sets of tailers that a step reads from: all, or of alts any one."""
        tailers = {one.tailer for one in self.inputs}
        return [{tailer} for tailer in tailers] if self.node.mode == "alts" else [tailers]

    def _where(self, positions: dict[str, Position]) -> str:
        if not positions:
            return "the source's own position"
        return ", ".join(f"{tailer} {position.next}" for tailer, position in positions.items())

    def _tail(self, txn: Any) -> list[Any]:
        """The try log's last records: enough for a snapshot and an attempt that were written apart."""
        log = self.try_log.log
        row = log.row(txn)
        return log.read(txn, row, max(row.first, row.next - 2), 2)

    def _check_position(self, txn: Any, one: Input | ProcessTailer, position: Position) -> None:
        log_row = one.log.row(txn)
        where = f"{self.node.id} stands at {position.next} of queue {one.queue.id!r}"
        if log_row.identity != position.identity:
            raise Diverged(
                f"{where} with identity {position.identity.hex()}, but the queue there has identity"
                f" {log_row.identity.hex()}: it was made anew.",
                "the store that the queue came from, or --fresh to start over.",
                processor=self.node.id,
            )
        if position.next > log_row.next:
            raise Diverged(
                f"{where}, but the queue ends before {log_row.next}: messages that were processed are missing.",
                "a newer copy of the store, or --fresh to start over.",
                processor=self.node.id,
            )
        if position.seal != NO_SEAL:
            found = one.log.seal_before(txn, log_row, position.next)
            if found not in (NO_SEAL, position.seal):
                raise Diverged(
                    f"{where} behind a batch with checksum {position.seal.hex()}, but the batch there has"
                    f" {found.hex()}: it is another message.",
                    "the store that the queue came from, or --fresh to start over.",
                    processor=self.node.id,
                )

    def _log_of(self, queue: str) -> Log:
        """The log of a queue that the last step wrote to; it need not be an output any more."""
        try:
            return Log(self.store, queue)
        except QueueNotFound:
            raise Diverged(
                f"The last step of {self.node.id} wrote to queue {queue!r}, which is gone.",
                "cues check, or --fresh to start over.",
                processor=self.node.id,
            ) from None

    def _compare_outputs(self, txn: Any, attempt: tries.Attempt, written: dict[str, Log]) -> None:
        """The message at the attempt's index, if it was not purged, must carry the step's hash."""
        for queue_id, index in attempt.indices.items():
            log = written[queue_id]
            row = log.row(txn)
            if index < row.first:
                continue
            found = log.batches(log.read(txn, row, index, 1))
            carried = found[0].head.hash.hex() if found and found[0].head.hash else "nothing"
            if carried != attempt.hash:
                raise Diverged(
                    f"The last step of {self.node.id} ({attempt.hash}) wrote message {index} of queue"
                    f" {queue_id!r}, but what is there carries {carried}.",
                    "cues check, or --fresh to start over.",
                    processor=self.node.id,
                )

    def _rewind(self, snapshot: tries.Snapshot) -> None:
        ends = dict(snapshot.end)
        whole = True
        for one in self.inputs:
            if one.tailer not in ends:
                continue
            row = one.queue.row()
            lost = min(row.first, ends[one.tailer]) - snapshot.start[one.tailer]
            if lost > 0:
                whole = False
                self._emit(
                    events.Event(
                        self.node.id,
                        f"{lost} messages of {one.queue.id} that a step had taken were purged before it"
                        " committed; they are lost, the rest is a new step",
                        logging.WARNING,
                    )
                )
                one.go(min(row.first, ends[one.tailer]))
        # What is left of a purged range is another set of messages, so it gets another hash: it is
        # taken as any step is. Otherwise exactly the snapshot's ranges, under its hash.
        self._pending = (snapshot, ends) if whole else None

    def close(self) -> None:
        """Let go of what the runner keeps between steps."""
        if self.runner is not None:
            self.runner.close()

    def adopt(self, row: ProcessorRow) -> None:
        """Somebody moved the positions under the same owner id: take the row that is there now.

        Raises :class:`Fenced` (takeover) where the row is another owner's by now.
        """
        if row.owner != self._row.owner:
            raise fenced(self.node.id, self._expected, row.pack())
        self._owned(row, row.pack())
        self.hasher = Hasher(self.node.id, row.generation)
        self.process.renew(self.hasher, row.epoch)
        for mark in self.marks.values():
            mark.renew(row.epoch)

    def owns(self, row: ProcessorRow) -> bool:
        """Whether a row that was read is of this owner, wherever its positions are."""
        return row.owner == self._row.owner

    def moved(self) -> bool:
        """Whether somebody else wrote this processor's row since the last commit: a seek, or a takeover."""
        with self.store.view() as txn:
            return bool(txn.get(self._row_key) != self._expected)

    def check_fence(self) -> None:
        """Raise :class:`Fenced` where :meth:`moved` is true, as the next commit would."""
        with self.store.view() as txn:
            self._fence(txn)

    def ready(self) -> bool:
        """Whether :meth:`step` would find something to take, or raise :class:`Fenced`."""
        if self._pending is not None or self.moved():
            return True
        some = any if self.node.mode == "alts" else all
        return some(one.fill(1) for one in self.inputs)

    # --- step -----------------------------------------------------------------------------------

    def step(self) -> Outcome:
        """One turn. Raises :class:`Fenced` (nothing was written) and :class:`ProcessorStopped`."""
        if self._stop is not None:
            raise self._stopped(self._stop)
        taken = self._take()
        if taken is None:
            self.check_fence()  # who has nothing to commit would not hear of a seek or a takeover
            for mark in self.marks.values():
                mark.release()
            return "idle"
        if faults.active:
            faults.point("take.after")
        assert self.runner is not None
        try:
            # 2. Snapshot.
            if self.node.side_effects or self.node.at_most_once:
                self._commit_snapshot(taken)
            # 3. Run.
            results = self.runner.run(taken)
            # 4. Commit.
            self._commit(taken, results)
        except BaseException:
            self._step_dropped()
            raise
        return "committed"

    def _step_dropped(self) -> None:
        """Stand again where the last commit left the positions."""
        self.state.forget()
        self.imperative.forget()
        for one in self._readers:
            one.stand(self.position_in(self._row, one.tailer))

    def position_in(self, row: ProcessorRow, tailer: str) -> Position:
        """Where a tailer of this processor stands by ``row``."""
        return row.positions[self._place[tailer]]

    # 1. Take.

    def _take(self) -> Taken | None:
        if self._pending is not None:
            return self._take_again(*self._pending)
        assert self.runner is not None
        size = self.runner.step_messages
        mode = self.node.mode
        if mode == "alts":
            for turn in range(len(self.inputs)):
                chosen = (self._served + turn) % len(self.inputs)
                count = min(size, self.inputs[chosen].fill(size))
                if count:
                    self._served = chosen + 1
                    return Taken([self.inputs[chosen].take(count)], count)
            return None
        count = size
        for one in self.inputs:
            count = min(count, one.fill(size))
            if not count:
                return None
        return Taken([one.take(count) for one in self.inputs], count)

    def _take_again(self, snapshot: tries.Snapshot, ends: dict[str, int]) -> Taken | None:
        """Exactly the ranges of a snapshot, from the same tailers, under its hash."""
        again = [one for one in self.inputs if one.tailer in ends]
        for one in again:
            count = ends[one.tailer] - one.index
            while one.ahead < count:
                before = one.ahead
                one.fill(count)
                if one.index != snapshot.start[one.tailer]:  # purged since the start: another set of messages
                    self._rewind(snapshot)
                    return self._take()
                if one.ahead == before:
                    raise Diverged(
                        f"{self.node.id} must take {one.tailer} up to {ends[one.tailer]} again, but the"
                        f" queue ends before {one.index + one.ahead}.",
                        "cues check, or --fresh to start over.",
                        processor=self.node.id,
                    )
        slices = [one.take(ends[one.tailer] - one.index) for one in again]
        self._pending = None
        return Taken(slices, len(slices[0].messages), snapshot.hash)

    # 2. Snapshot.

    def _commit_snapshot(self, taken: Taken) -> None:
        digest = self._digest(taken, 0, taken.count)
        pages = self._tries.snapshot(self._taking(taken, 0, taken.count), digest)
        row = self._moved(taken.slices) if self.node.at_most_once else self._standing(taken)
        packed = row.pack()
        for piece in taken.slices:
            if piece.tailer in self.marks and not self.node.at_most_once:
                self._patiently(self.marks[piece.tailer].hold, piece.start)
        self._patiently(self.store.commit, self._write_snapshot, pages, packed)
        self._owned(row, packed)
        if faults.active:
            faults.point("snapshot.after")

    def _write_snapshot(self, txn: Any, pages: list[Page], row: bytes) -> None:
        self._fence(txn)
        self._write_tries(txn, pages)
        txn.put(self._row_key, row)
        if faults.active:
            faults.point("snapshot.inside")

    # 4. Commit.

    def _commit(self, taken: Taken, results: Results) -> None:
        taken, parts, stop = self._parts(taken, results)
        if parts:
            # At-most-once the inputs have moved; what the function read by itself moves now.
            row = self._moved([] if self.node.at_most_once else taken.slices)
            self._commit_parts(parts, row)
            self.counters.taken += taken.count * len(taken.slices)
        if stop is not None:
            self._stop = stop
            raise self._stopped(stop)

    def _commit_parts(self, parts: list[Part], row: ProcessorRow) -> None:
        if faults.active:
            faults.point("commit.before")
        pages = 2 * len(parts) + sum(part.values() for part in parts)
        if self.state.changed:
            self._patiently(self.state.ensure)
            pages += 2 * self.state.pages()
        packed = row.pack()
        self._patiently(self.store.commit, self._write_step, parts, packed, pages=pages)
        self._owned(row, packed)
        self.state.committed()
        if faults.active:
            faults.point("commit.after")
        # 5. Ring.
        rings = self.rings
        if self._spreads:
            for part in parts:
                for queue, _ in part.appends:
                    rings |= queue.log.mask
        self.store.ring(rings)
        if faults.active:
            faults.point("ring.after")
        counters = self.counters
        counters.steps += len(parts)
        failed = 0
        for part in parts:
            if part.failure is not None:
                failed += part.stop - part.start
                continue
            counters.written += part.written
        if failed:
            counters.failed += failed
            self._tell(failed, next(part.failure for part in parts if part.failure is not None))

    def _patiently(self, write: Callable[..., R], *arguments: Any, **keywords: Any) -> R:
        """Call ``write``, again and again while another process that does not move holds the store's writer lock.

        Nothing was written then, and the fence is inside the transaction; so what the function made is
        kept, however long that takes, and committed or refused when its turn comes.
        """
        while True:
            try:
                return write(*arguments, **keywords)
            except WriterStuck as stuck:
                self._emit(events.Waiting(self.node.id, f"waits to commit: {stuck.message}", logging.WARNING, stuck))
                if self._pause(0):
                    raise Interrupted from stuck

    def _tell(self, count: int, first: Failure) -> None:
        """One event a commit, however many messages failed in it."""
        assert self.errors is not None
        self._emit(
            events.Failed(
                self.node.id,
                f"{count} message{'s' if count > 1 else ''} to {self.errors.id!r} after"
                f" {first.attempts} attempt{'s' if first.attempts > 1 else ''}:"
                f" {type(first.error).__name__}: {words(first.error)}",
                logging.WARNING,
                count=count,
            )
        )

    def _write_step(self, txn: Any, parts: list[Part], row: bytes) -> None:
        self._fence(txn)
        records: list[Page] = []
        for part in parts:
            indices: dict[str, int] = {}
            for queue, pages in part.appends:
                index = queue.append_pages(txn, pages)
                indices.setdefault(queue.log.id, index)  # of the first, where two bindings lead to one queue
            records += self._tries.step(part.taking, part.digest, indices, part.failure is not None, part.pending)
        if faults.active:
            faults.point("commit.outputs")
        if self.state.changed:
            self.state.write(txn)
        self._write_tries(txn, records)
        txn.put(self._row_key, row)
        if faults.active:
            faults.point("commit.inside")

    def _fence(self, txn: Any) -> None:
        """My owner id and epoch, and every position, are what the step started from."""
        found = txn.get(self._row_key)
        if found != self._expected:
            raise fenced(self.node.id, self._expected, found)

    def _write_tries(self, txn: Any, pages: list[Page]) -> None:
        log = self.try_log.log
        start, _ = log.append(txn, pages)
        if start - self._tries_from > tries.KEEP_MESSAGES + tries.TRIM_MESSAGES:
            row = log.row(txn)
            _, front = log.delete_before(txn, row, row.next - tries.KEEP_MESSAGES)
            log.move_front(txn, row, front)
            self._tries_from = front

    def _owned(self, row: ProcessorRow, packed: bytes) -> None:
        """The commit is done: what the next one compares with."""
        self._row = row
        self._expected = packed
        if self.node.imperative:
            for tailer in self.imperative.tailers.values():
                tailer.committed(self.position_in(row, tailer.tailer))

    def _moved(self, slices: list[Slice]) -> ProcessorRow:
        """The row with the positions behind what was taken, and where the function left its own tailers."""
        row = self._row
        positions = list(row.positions)
        for piece in slices:
            positions[self._place[piece.one.tailer]] = Position(piece.one.identity, piece.stop, piece.seal())
        if self.node.imperative:
            for tailer, position in self.imperative.moved().items():
                positions[self._place[tailer]] = position
        return ProcessorRow(
            row.owner, row.epoch, row.generation, row.pid, row.boot, False, tuple(positions), row.source
        )

    def _standing(self, taken: Taken) -> ProcessorRow:
        """The row with the positions where the step begins: further on, where a purge was faster."""
        starts = {s.tailer: s.start for s in taken.slices}
        positions = []
        for tailer, position in zip(self._order, self._row.positions):
            start = starts.get(tailer, position.next)
            positions.append(position if start == position.next else position._replace(next=start, seal=NO_SEAL))
        return self._row._replace(pending=True, positions=tuple(positions))

    def _digest(self, taken: Taken, start: int, stop: int) -> bytes:
        if taken.hash is not None and start == 0 and stop == taken.count:
            return taken.hash
        return self.hasher.digest(taken.ranges(start, stop))

    def _taking(self, taken: Taken, start: int, stop: int) -> tries.Taking:
        slices = taken.slices
        return tries.Taking(
            tuple([s.one.tailer for s in slices]),
            tuple([s.start + start for s in slices]),
            tuple([s.start + stop for s in slices]),
            slices[0].one.tailer if self.node.mode == "alts" else None,
        )

    # --- parts ----------------------------------------------------------------------------------

    def _parts(self, taken: Taken, results: Results) -> tuple[Taken, list[Part], Failure | None]:
        """Cut the step at its failures; encode the outputs of each part under its own hash.

        Returns what commits, in parts, and, where no error queue may take a failed message, the
        failure in front of which the processor stops. An output that cannot be encoded is a failure
        of the message that it came from, so cutting starts again with one failure more.
        """
        stop: Failure | None = None
        while True:
            fatal = [at for at, failure in results.failures.items() if self.errors is None or failure.stops]
            if fatal:
                offset = min(fatal)
                stop = results.failures[offset]
                if not offset or self.node.options.batch:
                    return taken, [], stop
                taken = taken.before(offset)
                if (self.state.changed or self.node.imperative) and results.ran > offset:
                    # The function has run on behind the message that turned out to be wrong, and the
                    # state holds what it did there; the next start would do it again. What runs late
                    # has no side effects (their outputs are encoded at once), so run the rest anew.
                    assert self.runner is not None
                    self.runner.forget()
                    results = self.runner.run(taken.anew())
                    continue
                results = results.before(offset)
            try:
                if not results.failures:
                    return taken, [self._part(taken, 0, taken.count, results)], stop
                return taken, self._cut(taken, results), stop
            except _Unwritable as found:
                if self.node.options.batch:
                    self.state.forget()
                    self.imperative.forget()
                results.fail(found.offset, Failure(found.error, 1))

    def _cut(self, taken: Taken, results: Results) -> list[Part]:
        if self.node.options.batch and results.failures:
            return [self._failed_part(taken, 0, taken.count, next(iter(results.failures.values())))]
        parts: list[Part] = []
        start = 0
        for offset in sorted(results.failures):
            if offset > start:
                parts.append(self._part(taken, start, offset, results))
            parts.append(self._failed_part(taken, offset, offset + 1, results.failures[offset]))
            start = offset + 1
        if start < taken.count:
            parts.append(self._part(taken, start, taken.count, results))
        return parts

    def _part(self, taken: Taken, start: int, stop: int, results: Results) -> Part:
        digest = self._digest(taken, start, stop)
        appends: list[tuple[Queue, list[Page]]] = []
        written = 0
        provenance = None
        for binding, queue, imperative in self._targets:
            output = (results.writes if imperative else results.outputs).get(binding)
            if output is None or not output.items:
                continue
            if stop - start < taken.count:
                output = output.between(start, stop)
                if not output.items:
                    continue
            options = queue._options
            if provenance is None and not options.strips and any(s.traced for s in taken.slices):
                provenance = taken.provenance()
            for log, items, origins in _divided(queue, output, start):
                came = None
                if provenance is not None and not options.strips:
                    if self.node.options.batch:
                        came = provenance.spread(len(items))
                    elif origins is None:
                        came = provenance.slice(start, stop)
                    else:
                        came = provenance.select(origins)
                try:
                    forms, encoded = _forms(items, options)
                    pages = batches.build(
                        forms,
                        options.max_message_bytes,
                        digest,
                        came,
                        encoded=encoded,
                        strips=options.strips,
                        stamps=self._stamps(log, len(items)),
                    )
                except CuesError as error:
                    at = getattr(error, "offset", 0)
                    raise _Unwritable(start + at if origins is None else origins[at], error) from error
                appends.append((log, pages))
                written += len(items)
        appends = self._at_home(appends, digest)
        return Part(start, stop, digest, self._taking(taken, start, stop), None, appends, written)

    def _stamps(self, queue: Queue, count: int) -> Stamps | None:
        """The identities of so many messages for a queue; most have none."""
        return None

    def _at_home(self, appends: list[tuple[Queue, list[Page]]], digest: bytes) -> list[tuple[Queue, list[Page]]]:
        """What is bound for another store goes to the fork queue for that store, which a forwarder reads."""
        if not self.forks:
            return appends
        found = [(queue, pages) for queue, pages in appends if queue.store.id == self.store.id]
        for other, fork_queue in self.forks.items():
            bound = [(queue.log.id, pages) for queue, pages in appends if queue.store.id == other]
            if bound:
                found.append((fork_queue, fork.pack(bound, digest)))
        return found

    def _failed_part(self, taken: Taken, start: int, stop: int, failure: Failure) -> Part:
        assert self.errors is not None
        digest = self._digest(taken, start, stop)
        messages = {s.binding: [s.pristine(o) for o in range(start, stop)] for s in taken.slices}
        record = error_message(self.node, messages, failure)
        came = taken.provenance().slice(start, stop).spread(1)
        stamps = self._stamps(self.errors, 1)
        try:
            pages = batches.build([record], batches.OWN_BYTES_MAX, digest, came, reserved=True, stamps=stamps)
        except CuesError:  # several inputs' q/meta together may fit no page, which may be what failed
            pages = batches.build([record], batches.OWN_BYTES_MAX, digest, reserved=True, stamps=stamps)
        appends = self._at_home([(self.errors, pages)], digest)
        return Part(start, stop, digest, self._taking(taken, start, stop), failure, appends, 1)

    def _stopped(self, failure: Failure) -> ProcessorStopped:
        where = "behind what its last step took: at-most-once" if self.node.at_most_once else "at this message"
        error = ProcessorStopped(
            f"{self.node.id} stopped after {failure.attempts} attempt{'s' if failure.attempts > 1 else ''}:"
            f" {type(failure.error).__name__}: {words(failure.error)}",
            f"mend the function and start again (it goes on {where}), or give the graph an error"
            " queue: cues.Graph(…, errors='errors').",
            processor=self.node.id,
        )
        error.__cause__ = failure.error
        return error


class _Unwritable(Exception):
    """An output that cannot be encoded, and the offset of the message that it came from."""

    def __init__(self, offset: int, error: Exception) -> None:
        super().__init__(words(error))
        self.offset = offset
        self.error = error


def _divided(queue: Queue, output: Output, start: int) -> list[tuple[Queue, list[Any], list[int] | None]]:
    """What an output appends to each log of its queue: items, and the messages that they came from.

    ``start`` is the message that the first item came from, where each came from one. A message that cannot
    be placed is :class:`_Unwritable`, whatever its key's function raised.
    """
    if not queue.spread:
        return [(queue, output.items, output.origins)]
    origins = output.origins if output.origins is not None else list(range(start, start + len(output.items)))
    try:
        messages = [codec.unpack(item) if isinstance(item, bytes) else item for item in output.items]
        shares = queue.shares(messages)
    except Exception as error:
        raise _Unwritable(origins[getattr(error, "offset", 0)], error) from error
    return [
        (
            queue.view(share.partition),
            [output.items[offset] for offset in share.offsets],
            [origins[offset] for offset in share.offsets],
        )
        for share in shares
    ]


def _forms(items: list[dict[str, Any] | bytes], options: QueueOptions) -> tuple[list[Any], list[bytes] | None]:
    """Outputs as dicts, or, where some were encoded when their call returned, all as bytes.

    Where a message with ``q/meta`` is among them all are dicts again, for that is taken out of dicts.
    Raises what :func:`batches.build` would, with the ``offset`` of the item that is at fault.
    """
    kinds = {type(item) for item in items}
    if bytes not in kinds:
        return items, None
    if kinds == {bytes}:
        return [], items  # type: ignore[return-value]
    forms: list[Any] = []
    for offset, item in enumerate(items):
        try:
            if isinstance(item, bytes):
                forms.append(item)
            else:
                forms.append(batches.pack_one(item, options.max_message_bytes, options.strips))
        except CuesError as error:
            error.__dict__["offset"] = offset
            raise
    if any(type(form) is not bytes for form in forms):
        return [codec.unpack(form) if type(form) is bytes else form for form in forms], None
    return [], forms
