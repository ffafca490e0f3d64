"""What a target remembers of a sink, and what of a delivery is new to it: the policy of transactional sinks.

A sink is called at least once: a crash after the target's commit and before the store's presents the
same messages again, and an owner that was stopped and woke up presents old ones. So a target keeps
one row for each processor, changed in the transaction of the rows that it stands for:

    cues_positions    processor | store | generation | epoch | ends {tailer id: index} | hash

    1. begin      with a lock on the processor's row, so that nobody changes it until the end
    2. read       the row
    3. admit      the delivery, or refuse it (:func:`admit`); the rest sees only what is new
    4. run        the user's writes, for what is new
    5. commit     the row (:meth:`Row.moved`) with them, or roll everything back

Keeping only the last hash is not enough: a retry and a stopped owner present older ones. Nothing
here reads or changes anything; what has a transaction does (``sql.py``, ``cues.processors.sql``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from cues.errors import Diverged, Fenced

if TYPE_CHECKING:
    from cues.process import Delivery, Process

M = TypeVar("M")

TABLE: Final = "cues_positions"


class Row(NamedTuple):
    """What a target holds of a processor. ``ends`` are exclusive, as in ``process.delivery.end``."""

    store: str
    generation: int
    epoch: int
    ends: dict[str, int]
    hash: str

    @staticmethod
    def moved(row: Row | None, delivery: Delivery) -> Row:
        """The row behind an admitted delivery: at its end, never back. A tailer that took no part keeps its place."""
        before = dict(row.ends) if row is not None and row.generation == delivery.generation else {}
        ends = before | {tailer: max(end, before.get(tailer, 0)) for tailer, end in delivery.end.items()}
        # A delivery that brought nothing new still raises the epoch: its predecessor is refused from now on.
        hash = row.hash if row is not None and ends == before else delivery.hash
        return Row(delivery.store, delivery.generation, delivery.epoch, ends, hash)

    def columns(self) -> dict[str, Any]:
        """As a table of a database holds it, without the processor."""
        return {**self._asdict(), "ends": json.dumps(self.ends, sort_keys=True)}

    @staticmethod
    def of(store: str, generation: int, epoch: int, ends: str, hash: str) -> Row:
        """What :meth:`columns` gave."""
        return Row(store, generation, epoch, json.loads(ends), hash)


def admit(processor: str, row: Row | None, delivery: Delivery) -> dict[str, int]:
    """Return, for each tailer of the delivery, the index from which its messages are new.

    Decides only; nothing is read or changed. Raises :class:`cues.Fenced` for a delivery by somebody
    who is no longer the owner, :class:`cues.Diverged` for one that no order of events explains.
    """
    if row is not None and row.store != delivery.store:
        raise Diverged(
            f"{processor} delivers from the store {delivery.store}, but the target was written from the store"
            f" {row.store}: which of these messages it has, nobody can say.",
            "a new target, or the store that it was written from; if all that the target holds of this processor"
            f" is gone: delete from {TABLE} where processor = '{processor}'.",
            processor=processor,
        )
    if row is None or delivery.generation > row.generation:
        return dict(delivery.start)  # the first delivery, or one that was asked for again
    if delivery.generation < row.generation or delivery.epoch < row.epoch:
        raise Fenced(
            f"{processor} delivers under generation {delivery.generation}, epoch {delivery.epoch};"
            f" the target was written under generation {row.generation}, epoch {row.epoch}.",
            "nothing here: another owner has taken over.",
            processor=processor,
            reason="takeover",
        )
    # A range that ends at or before the row is skipped, one that straddles it is cut, and a later
    # start is accepted: messages that failed, or that a filter left out, make gaps.
    fresh = {
        tailer: min(max(start, row.ends.get(tailer, 0)), delivery.end[tailer])
        for tailer, start in delivery.start.items()
    }
    # A join takes the same count from each input, so the row must cut them at the same count.
    if len({fresh[tailer] - start for tailer, start in delivery.start.items()}) > 1:
        raise Diverged(
            f"{processor} joins the ranges {_ranges(delivery)}, but the target ends at {row.ends}:"
            " these messages were not joined with one another before.",
            "seek with delivery asked for again, which starts the target's row anew.",
            processor=processor,
        )
    return fresh


class Fresh:
    """What of a delivery is new to the target: ``fresh`` is what :func:`admit` returned."""

    def __init__(self, process: Process, fresh: Mapping[str, int]) -> None:
        self._process = process
        start = process.delivery.start
        self.known = max((fresh[tailer] - start[tailer] for tailer in start), default=0)
        """How many messages of the delivery, from its start, the target has: of each input the same count."""

    def of(self, messages: Sequence[M]) -> list[M]:
        """Return those of ``messages`` that the target does not have yet, in their order.

        ``messages`` is what the function was given: the list of a batch function (a join: each of
        its lists in turn), or ``[message]`` in a message function.
        """
        delivery = self._process.delivery
        if not self.known:
            return list(messages)
        if all(end - start == self.known for start, end in zip(delivery.start.values(), delivery.end.values())):
            return []
        # The range straddles the row, so this is a batch, whose messages are not all of the range
        # when there are filters. A join's lists stand at the same offsets of their ranges.
        indices = self._process.indices
        lists = list(indices.values()) if isinstance(indices, dict) else [indices]
        first = min(one[0] for one in lists) - min(delivery.start.values())
        return [m for m, index in zip(messages, lists[0], strict=True) if index - lists[0][0] + first >= self.known]


def _ranges(delivery: Delivery) -> str:
    return ", ".join(f"{t} [{delivery.start[t]}, {delivery.end[t]})" for t in sorted(delivery.start))
