"""The lineage of a message: the messages from which it was made, and those that were made from it.

Both are found in two ways, and an answer says in which:

1.  *Metadata.* A queue with ``metadata={"t"}`` writes its indices into every message that is made from its messages.
    A message so names its ancestors. Its descendants on a later queue are in the order of their ancestors, as long as
    nobody moves positions back: bisection finds the first one, and a short scan the others. A descendant that was made
    again after a seek may be missed.
2.  *Steps.* Without metadata, the try log names the messages that a step took, and the first message that it wrote.
    Then the answer is exact for a step, not for a message. A try log has at least the last 256 steps.

Each search is bounded by :data:`RECORDS_MAX` record batches and :data:`DESCENDANTS_MAX` messages a log; ``complete``
is False in the answer if a bound was reached.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.engine import standing
from cues.engine.status import processor_of
from cues.errors import BatchDamaged, CuesError
from cues.graphs.processor_rows import key_of
from cues.operate.shape import Shape
from cues.queues.base import views_of
from cues.queues.log import Log
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.records.batch import Batch

RECORDS_MAX: Final = 512
DESCENDANTS_MAX: Final = 50
STEPS_MAX: Final = 2000
"""Steps of a processor in which the one that took a message is looked for."""
_BISECTIONS: Final = 64


@dataclass
class Step:
    """A step in a try log."""

    processor: str
    hash: str
    taken: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By log: the first index that it took, and the one after the last."""
    wrote: dict[str, int] = field(default_factory=dict)
    """By log: the index of the first message that it wrote."""
    outcome: str = ""

    def took(self, log: str, index: int) -> bool:
        """Return whether it took a message."""
        low, high = self.taken.get(log, (1, 0))
        return low <= index < high


@dataclass
class Descendants:
    """Messages of one log that were made from a message."""

    log: str
    how: str
    """``metadata`` or ``steps``."""
    places: list[int] = field(default_factory=list)
    complete: bool = True


@dataclass
class Reading:
    """The messages that a processor made of a message."""

    processor: str
    position: int | None
    """The index that it takes next from the message's log; None if it does not read it yet."""
    step: Step | None = None
    """The step that took the message, if the metadata of its outputs do not name the message."""
    made: list[Descendants] = field(default_factory=list)


def readings(
    store: Store, shape: Shape, log: str, index: int, time_ns: int, opened: Callable[[str], Queue]
) -> list[Reading]:
    """The readings of a message of a log. ``opened`` opens a queue of the graph by its name."""
    found = []
    for each in shape.readers(names.split_log(log)[0]):
        unit, position = _position(store, each.id, log)
        reading = Reading(each.id, position)
        found.append(reading)
        if unit is None or position is None or position <= index:
            continue
        for output in [*each.outputs, *filter(None, [each.errors])]:
            with contextlib.suppress(CuesError):  # a queue that nobody has written yet
                reading.made += by_metadata(opened(output), log, index, time_ns)
        if not any(made.places for made in reading.made):
            steps = itertools.islice(steps_of(store, unit), STEPS_MAX)
            reading.step = next((step for step in steps if step.took(log, index)), None)
            if reading.step is not None:
                reading.made = by_step(store, reading.step)
    return found


def units_of(store: Store, processor: str) -> list[ProcessorId]:
    """The units of a processor that have run on a store."""
    return [unit for unit in standing.processors(store) if processor_of(unit) == processor_of(processor)]


def _position(store: Store, processor: str, log: str) -> tuple[ProcessorId | None, int | None]:
    """The unit of a processor that reads a log, and the index that it takes next."""
    for unit in units_of(store, processor):
        for tailer in standing.tailers(store, unit):
            if tailer.queue == log:
                return unit, tailer.position
    return None, None


def unit_key(store: Store, unit: ProcessorId) -> ProcessorKey:
    """The id of a unit's try log and state, which it keeps when it is renamed."""
    with store.core.view() as txn:
        return key_of(txn, unit)


def steps_of(store: Store, unit: ProcessorId) -> Iterator[Step]:
    """The steps in a processor's try log, last first."""
    key = unit_key(store, unit)
    tailer = store.queue(key).tailer()
    tailer.to_end()
    tailer.direction = "backward"
    attempt: dict[str, Any] = {}
    while True:
        try:
            message = tailer.read()
        except BatchDamaged:
            return
        if message is None:
            return
        if message.get(names.TYPE) != names.SNAPSHOT:
            attempt = message
            continue
        envelope = tailer.envelope
        assert envelope is not None
        ends = message[names.TO_INDICES]
        taken = {
            tailer_id.removeprefix(f"{key.partition('/')[0]}."): (start, ends[tailer_id])
            for tailer_id, start in message[names.TAILER_INDICES].items()
        }
        wrote = attempt.get(names.MESSAGE_INDEX, {})
        yield Step(unit, attempt.get(names.HASH) or envelope.hash or "", taken, wrote, attempt.get(names.TYPE, ""))
        attempt = {}


def step_that_wrote(store: Store, units: list[ProcessorId], hash: str) -> Step | None:
    """The step with a delivery hash; None if the try logs have it no more."""
    for unit in units:
        for step in steps_of(store, unit):
            if step.hash == hash:
                return step
    return None


def by_metadata(queue: Queue, log: str, index: int, since_ns: int) -> list[Descendants]:
    """The messages of a queue whose metadata name the message ``index`` of ``log``, by partition."""
    return [_in_log(view.core.log, log, index, since_ns) for view in views_of(queue)]


def _in_log(within: Log, log: str, index: int, since_ns: int) -> Descendants:
    made = Descendants(within.id, "metadata")
    with within.store.core.view() as txn:
        row = within.row(txn)
        low = within.index_at(txn, row, since_ns)
    high, budget = row.next, RECORDS_MAX
    for _ in range(_BISECTIONS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        batch, origins = None, []
        at = middle
        while at < high and budget > 0:  # records of other writers have no such column
            budget -= 1
            batch = _record(within, at)
            origins = [] if batch is None else [t for t in _origins(batch, log) if t]
            if batch is None or origins:
                break
            at = batch.next
        if batch is None:
            made.complete = False
            break
        if not origins or origins[0] >= index:
            high = middle if not origins else max(low, min(middle, batch.first))
        else:
            low = max(low + 1, batch.first)
            if origins[-1] >= index:
                break
    at = low
    while budget > 0:
        budget -= 1
        batch = _record(within, at)
        if batch is None:
            return made
        found = _origins(batch, log)
        made.places += [batch.first + o for o, t in enumerate(found) if t == index and batch.first + o >= row.first]
        if len(made.places) > DESCENDANTS_MAX:
            made.places = made.places[:DESCENDANTS_MAX]
            made.complete = False
            return made
        if any(t > index for t in found):
            return made
        at = batch.next
    made.complete = False
    return made


def by_step(store: Store, step: Step) -> list[Descendants]:
    """The messages that a step wrote."""
    written = []
    for log, first in step.wrote.items():
        if "." in log:
            continue  # a fork queue: the messages are in another store
        made = Descendants(log, "steps")
        with contextlib.suppress(CuesError):
            within = Log(store, *names.split_log(log))
            at = first
            while len(made.places) < DESCENDANTS_MAX:
                batch = _record(within, at)
                if batch is None or (batch.head.hash or b"").hex() != step.hash:
                    break
                made.places += range(at, batch.next)
                at = batch.next
            made.complete = len(made.places) < DESCENDANTS_MAX
            made.places = made.places[:DESCENDANTS_MAX]
        written.append(made)
    return written


def _record(log: Log, index: int) -> Batch | None:
    """The record batch that holds a message; None if there is none, or if it is damaged."""
    with contextlib.suppress(BatchDamaged):
        with log.store.core.view() as txn:
            row = log.row(txn)
            raws = log.read(txn, row, index, 1)
        return next(iter(log.batches(raws)), None)
    return None


def _origins(batch: Batch, log: str) -> list[int]:
    """For each message of a batch its index on ``log``; 0 if it has none."""
    if batch.head.provenance is None or batch.head.acknowledges:
        return []
    column = batch.provenance("", frozenset()).columns.get(log, (None, None))[0]
    if isinstance(column, range):
        return list(column)
    return [column] * batch.head.count if isinstance(column, int) else column or []
