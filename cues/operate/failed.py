"""Failed messages: those of a place, their facts as JSON, and their counts by processor and by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.engine.causes import cause_of, normalised
from cues.engine.status import processor_of
from cues.steps.error_records import ErrorRecord

COUNTED_MAX: Final = 10_000
"""Error messages that are read to count them by processor and by cause; of more, the counts are of the last ones."""


@dataclass(frozen=True)
class FailedMessages:
    """The error messages of a place."""

    logs: Callable[[], Iterable[Callable[[bool], Iterable[ErrorRecord]]]]
    """For each error queue and partition its error messages, last first: the unresolved ones; with True all."""
    at: Callable[[int], list[ErrorRecord]]
    """Those at an index; of several error queues, there may be several."""
    unresolved: Callable[[], int | None] = lambda: None
    """The number of unresolved ones, if it is known without reading them."""
    can_settle: bool = False
    """True if they can be redriven and discarded here."""

    def records(self, settled: bool = False) -> Iterator[ErrorRecord]:
        """Those of all queues, one queue after another."""
        return chain.from_iterable(records(settled) for records in self.logs())


def facts(record: ErrorRecord) -> dict[str, Any]:
    """An error message as JSON."""
    done = record.resolution
    return {
        "queue": record.queue,
        "index": record.index,
        "time": record.time,
        "processor": record.processor,
        "state": record.state,
        "type": record.type,
        "text": record.text,
        "attempts": record.attempts,
        "count": record.count,
        "inputs": record.inputs,
        "causes": record.causes,
        "context": record.message.get(names.ERR_CONTEXT) or {},
        "config": record.config,
        "hash": record.hash or None,
        "redriven": record.redriven,
        "resolution": None if done is None else {name: v for name, v in vars(done).items() if v or name == "state"},
    }


@dataclass
class ErrorTotals:
    """Counts of unresolved error messages."""

    total: int
    counted: int
    """Those that were read; the counts below are of them."""
    by_processor: Counter[str]
    waiting: int
    """Those whose redrive was asked for."""


def totals(failed: FailedMessages) -> ErrorTotals:
    """Count the unresolved error messages by processor; of more than :data:`COUNTED_MAX`, the last ones."""
    by_processor: Counter[str] = Counter()
    waiting = 0
    for record in islice(failed.records(), COUNTED_MAX):
        by_processor[record.processor.partition(".")[2] or record.processor] += 1
        waiting += record.state == "requested"
    counted, known = by_processor.total(), failed.unresolved()
    return ErrorTotals(counted if known is None else known, counted, by_processor, waiting)


@dataclass
class ErrorGroup:
    """Error messages of one processor with the same cause."""

    processor: str
    cause: str
    last: ErrorRecord
    count: int = 0
    messages: int = 0
    """The messages that failed; several of a batch fail together."""


def by_cause(records: Iterable[ErrorRecord]) -> list[ErrorGroup]:
    """Group error messages by processor and cause, the most frequent first."""
    groups: dict[tuple[str, str], ErrorGroup] = {}
    for record in records:
        key = processor_of(record.processor), normalised(cause_of(record))
        group = groups.setdefault(key, ErrorGroup(*key, record))
        group.count += 1
        group.messages += record.count
        if record.time > group.last.time:
            group.last = record
    return sorted(groups.values(), key=lambda group: -group.count)


def with_sums(some: Iterable[ErrorGroup]) -> list[ErrorGroup]:
    """Add up the groups of several error queues, the most frequent first."""
    groups: dict[tuple[str, str], ErrorGroup] = {}
    for each in some:
        group = groups.setdefault((each.processor, each.cause), ErrorGroup(each.processor, each.cause, each.last))
        group.count += each.count
        group.messages += each.messages
        group.last = max(group.last, each.last, key=lambda record: record.time)
    return sorted(groups.values(), key=lambda group: -group.count)
