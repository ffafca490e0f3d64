"""Delayed messages: a message with a time of delivery is on its queue at once, and is given to processors then.

    1. hold      a step that takes messages whose time is in the future calls no function. Its commit moves the
                 position and writes the messages, with their provenance, to the held ones of the unit (held.py)
    2. move      when messages are due, one commit deletes these rows and appends the messages to queues of the unit
    3. deliver   the deliverer of the unit takes them, by the protocol of every step (stepper.py)

So a message is held, or on the queue of those that are due, or delivered; each change is one commit. Messages after it
on its queue do not wait for it, and retention may delete it from its queue, because the row has all of it.

A :class:`Deliverer` is a stepper beside that of the unit (beside.py), under the id ``graph.processor.delayed``. It
shares the function too.

Not guaranteed: the order of a delayed message relative to others, also of its key. Messages that are due are delivered
in the order of their times, after their time, when the processor runs.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

from cues import faults
from cues.base import clock, events, names
from cues.errors import CuesError
from cues.graphs.processor import RedriveNode
from cues.overrides import override
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.records import batch as batches
from cues.records import provenance
from cues.records.provenance import Provenance
from cues.steps.beside import Beside, claim_beside, make_queues
from cues.steps.held import NEVER_NS, Held
from cues.steps.lanes import SideLane
from cues.steps.redrive import TRY_LOG
from cues.steps.stepper import Outcome, Stepper

if TYPE_CHECKING:
    from cues.queues.processor_rows import ProcessorRow
    from cues.records.batch import Page
    from cues.steps.parts import Part
    from cues.storage.transaction import StoreTransaction

MOVED_AT_ONCE: Final = 1000
"""Messages that one commit moves to the queues of those that are due."""


class Deliverer(Beside):
    """Takes the delayed messages of one unit that are due."""

    def __init__(self, held: Held, main: Stepper, node: RedriveNode, row: ProcessorRow) -> None:
        self.held_back = held
        """The delayed messages of the unit."""
        super().__init__(main, node, row)

    @override
    def _key_of_row(self) -> bytes:
        return names.redriver_key(names.delayer_id(self.main.node.key))

    @override
    def step(self) -> Outcome:
        held = self.held_back
        held.next_ns = 0
        outcome = super().step()
        if outcome == "idle":
            if self._move():
                return super().step()
            held.look()
        return outcome

    def _move(self) -> int:
        """Move messages that are due to their queues, in one commit; return the number of calls that they are for."""
        held = self.held_back
        due = held.take_due(MOVED_AT_ONCE)
        if not due:
            return 0
        try:
            pages = self._pages(due)
            room = sum(1 + len(page.pieces) for some in pages.values() for page in some) + 2 * len(due)
            self._patiently(self.store.core.commit, self._write_moved, pages, pages=room)
        except BaseException:
            held.forget()
            raise
        held.committed()
        faults.point("delay.moved")
        return len(due)

    def _pages(self, due: list[list[Any]]) -> dict[str, list[Page]]:
        """The record batches of messages, by their queues of those that are due. Each has the hash of one step."""
        known = {port.queue for port in self.main.node.inputs}
        by_queue: dict[str, list[list[Any]]] = {}
        given_up = 0
        for entries in due:
            if not known >= {entry[0] for entry in entries}:
                given_up += 1  # as other messages that were not taken when an input is taken away
                continue
            for entry in entries:
                by_queue.setdefault(f"{self.node.id}.{entry[0]}", []).append(entry)
        if given_up:
            text = f"gives up {given_up:,} delayed messages of queues that it does not read any more"
            self.main._emit(events.Event(self.main.node.id, text, logging.WARNING))
        pages: dict[str, list[Page]] = {}
        for queue, entries in by_queue.items():
            for digest, some in itertools.groupby(entries, lambda entry: entry[1]):
                run = list(some)
                bodies = [message for _, _, message, _ in run]
                came = provenance.concat(
                    [Provenance(1, {}) if own is None else provenance.decode(own, 1) for *_, own in run]
                )
                try:
                    built = batches.build([], batches.OWN_BYTES_MAX, digest, came, encoded=bodies)
                except CuesError:  # metadata that fits no page together with the place on the queue
                    built = batches.build([], batches.OWN_BYTES_MAX, digest, encoded=bodies)
                pages.setdefault(queue, []).extend(built)
        return pages

    def _write_moved(self, txn: StoreTransaction, pages: dict[str, list[Page]]) -> None:
        self._fence(txn)
        for input in self.inputs:
            if input.log.id in pages:
                input.log.append(txn, pages[input.log.id])
        self.held_back.table.write(txn)
        faults.point("delay.moving")

    @override
    def _write_step(self, txn: StoreTransaction, parts: list[Part], row: bytes) -> None:
        super()._write_step(txn, parts, row)
        faults.point("delay.inside")


class DelayLane(SideLane):
    """The delayed messages of a unit: its steps hold them, and this lane delivers them."""

    def __init__(self, unit: Stepper) -> None:
        super().__init__(unit)
        self.held = unit.held = Held(unit.store, unit.node)

    @override
    def armed(self) -> bool:
        return self.held.next_ns != NEVER_NS

    @override
    def waits(self) -> bool:
        next_ns = self.held.next_ns
        return next_ns != NEVER_NS and next_ns <= clock.now_ns()

    @override
    def due_ns(self) -> int | None:
        next_ns = self.held.next_ns
        return None if next_ns == NEVER_NS else next_ns

    @override
    def once(self, stepper: Any) -> Outcome:
        outcome = super().once(stepper)
        if outcome == "blocked":
            self.unit._hold()  # so that the thread sleeps until there is room
        return outcome

    @override
    def claim(self) -> Deliverer:
        main: Stepper = self.unit
        store = main.store
        own = names.delayer_id(main.node.key)
        node = RedriveNode.of(main.node, own)
        make_queues(store, {port.queue: QueueOptions() for port in node.inputs} | {node.id: TRY_LOG})
        logs = {port.queue: Log(store, port.queue) for port in node.inputs}
        deliverer = Deliverer(self.held, main, node, claim_beside(main, node, own, logs))
        faults.point("delay.claimed")
        deliverer.recover()
        return deliverer

    @override
    def restart(self) -> None:
        """Do nothing: its stepper has kept its place."""
