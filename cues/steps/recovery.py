"""The decision of a start: whether the last step committed, and the messages that the next step takes.

The try log has a snapshot (the ranges that a step took) and an attempt (the step committed), both with the
hash of the step. :meth:`Recovery.recover` reads the last two records and decides by the start table of
docs/guarantees.md:

    no snapshot                                      fresh     take from the positions
    snapshot and attempt with the same hash          resume    take from the positions; compare the outputs
    snapshot alone, positions still at its start     rewind    take exactly the same ranges again
    snapshot alone, positions changed                void      take from the positions

:meth:`Recovery.decide` decides and changes nothing; ``recover`` then applies the decision.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from cues.base import events
from cues.base.data import dataclass
from cues.errors import Diverged, QueueNotFound
from cues.queues.log import Log
from cues.records.positions import NO_SEAL, Position
from cues.steps import tries

if TYPE_CHECKING:
    from collections.abc import Callable

    from cues.queues.queue import Queue
    from cues.steps.abroad import Abroad
    from cues.steps.delays import Held
    from cues.steps.fence import Fence
    from cues.steps.imperative import ProcessTailer
    from cues.steps.ports import Ports
    from cues.steps.state import StateTable
    from cues.steps.taking import Input
    from cues.storage.transaction import StoreTransaction


@dataclass(frozen=True)
class Decision:
    """The row of the start table that applies, and the reason."""

    what: Literal["fresh", "resume", "rewind", "void"]
    why: str
    again: tries.Snapshot | None = None
    """The snapshot whose ranges the next step takes again."""


class Recovery:
    """Decides how a start of one processor continues, and applies the decision."""

    def __init__(
        self,
        ports: Ports,
        fence: Fence,
        state: StateTable,
        try_log: Queue,
        emit: Callable[[events.Event], None],
        abroad: Abroad | None = None,
    ) -> None:
        self.store = ports.store
        self.node = ports.node
        self.held: Held | None = None
        """The delayed messages of the unit; None without their lane."""
        self._ports = ports
        self._fence = fence
        self._state = state
        self._try_log = try_log
        self._emit = emit
        self._abroad: Abroad | None = abroad
        self._beside = fence.unit is not None
        """True: the stepper of the unit recovers what both share."""

    def recover(self) -> Decision:
        """Read the end of the try log and the positions, decide, and move to the positions of the decision.

        Raises :class:`Diverged` when the store contradicts itself.
        """
        fence, readers = self._fence, self._ports.readers
        if self._abroad is not None and not self._beside:
            self._abroad.settle()
        with self.store.core.view() as txn:
            fence.check(txn)
            if not self._beside:
                fence.pause.look(txn)
            tail = self._tail(txn)
        snapshot, attempt = tries.last(self._try_log.core.log.batches(tail))
        written = {queue: self._log_of(queue) for queue in attempt.indices} if attempt else {}
        positions = dict(zip(fence.order, fence.row.positions))
        for reader in readers:
            with reader.queue.store.core.view() as txn:
                self._check_position(txn, reader, positions[reader.tailer])
                gone = reader.log.row(txn).first - positions[reader.tailer].next
            if gone > 0:
                self._emit(
                    events.Event(
                        self.node.id,
                        f"{gone:,} messages of {reader.queue.id} were purged before it took them",
                        logging.WARNING,
                    )
                )
        with self.store.core.view() as txn:
            decision = self.decide(txn, snapshot, attempt, positions, written)
        self._state.forget()
        if not self._beside:
            self._state.verify()
        if self.held is not None:
            self.held.begin()
        self._ports.imperative.forget()
        for reader in readers:
            reader.stand(positions[reader.tailer])
        return decision

    def decide(
        self,
        txn: StoreTransaction,
        snapshot: tries.Snapshot | None,
        attempt: tries.Attempt | None,
        positions: dict[str, Position],
        written: dict[str, Log],
    ) -> Decision:
        """Apply the start table of docs/guarantees.md, row by row. Changes nothing."""
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
                snapshot,
            )
        return Decision(
            "void",
            "the last step did not commit, and positions or inputs were changed since (at-most-once, or a seek); from "
            + self._where(positions),
        )

    def _still_pending(self) -> bool:
        """Return whether no seek moved the positions since the snapshot, not even to the same place."""
        return self._fence.row.under_way or self.node.at_most_once

    def _takes(self) -> list[set[str]]:
        """Return the sets of tailers that a step can read from: all together; for AnyOf any single one."""
        tailers = {input.tailer for input in self._ports.inputs}
        return [{tailer} for tailer in tailers] if self.node.mode == "alts" else [tailers]

    def _where(self, positions: dict[str, Position]) -> str:
        if not positions:
            return "the source's own position"
        return ", ".join(f"{tailer} {position.next}" for tailer, position in positions.items())

    def _tail(self, txn: StoreTransaction) -> list[Any]:
        """Return the last records of the try log: enough for a snapshot and an attempt in two records."""
        log = self._try_log.core.log
        row = log.row(txn)
        return log.read(txn, row, max(row.first, row.next - 2), 2)

    def _check_position(self, txn: StoreTransaction, reader: Input | ProcessTailer, position: Position) -> None:
        log_row = reader.log.row(txn)
        where = f"{self.node.id} is at {position.next} of queue {reader.queue.id!r}"
        if log_row.identity != position.identity:
            raise Diverged(
                f"{where} with identity {position.identity.hex()}, but the queue there has identity"
                f" {log_row.identity.hex()}: it was created again.",
                "use the store that the queue came from; or --fresh to start again.",
                processor=self.node.id,
            )
        if position.next > log_row.next:
            raise Diverged(
                f"{where}, but the queue ends before {log_row.next}: messages that were processed are missing.",
                "use a newer copy of the store; or --fresh to start again.",
                processor=self.node.id,
            )
        if position.seal != NO_SEAL:
            seal = reader.log.seal_before(txn, log_row, position.next)
            if seal not in (NO_SEAL, position.seal):
                raise Diverged(
                    f"{where} after a batch with checksum {position.seal.hex()}, but the batch there has"
                    f" {seal.hex()}: it is another message.",
                    "use the store that the queue came from; or --fresh to start again.",
                    processor=self.node.id,
                )

    def _log_of(self, queue: str) -> Log:
        """Return the log of a queue that the last step wrote to. It may no longer be an output."""
        try:
            return Log(self.store, queue)
        except QueueNotFound:
            raise Diverged(
                f"The last step of {self.node.id} wrote to queue {queue!r}, which is missing.",
                "run cues check; or --fresh to start again.",
                processor=self.node.id,
            ) from None

    def _compare_outputs(self, txn: StoreTransaction, attempt: tries.Attempt, written: dict[str, Log]) -> None:
        """Raise :class:`Diverged` unless the message at the attempt's index is purged or has the step's hash."""
        for queue_id, index in attempt.indices.items():
            log = written[queue_id]
            row = log.row(txn)
            if index < row.first:
                continue
            batches = log.batches(log.read(txn, row, index, 1))
            carried = batches[0].head.hash.hex() if batches and batches[0].head.hash else "no hash"
            if carried != attempt.hash:
                raise Diverged(
                    f"The last step of {self.node.id} ({attempt.hash}) wrote message {index} of queue"
                    f" {queue_id!r}, but the message there carries {carried}.",
                    "run cues check; or --fresh to start again.",
                    processor=self.node.id,
                )
