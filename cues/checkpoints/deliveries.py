"""The protocol of transactional sinks: a database takes each message exactly once.

A sink is called at least once. After a crash between the commit of the database and the commit of the store,
the same messages are delivered again. An owner that was stopped and continues delivers old messages. So the
database keeps one row for each processor and changes it in the transaction of the sink's own writes:

    cues_positions    processor | store | generation | epoch | ends {tailer id: index} | hash | seals {tailer id: hex}

    1. read       begin a transaction, lock the processor's row, read it
    2. admit      accept the delivery or refuse it (:func:`admit`); find the messages that are new
    3. write      the row after this delivery (:meth:`Row.moved`)
    4. run        the user's writes, for the new messages
    5. compare    the row is still the one of 3; otherwise the user's code ended the transaction
    6. commit     the row and the user's writes, or roll back both

The row is written before the user's code runs. So a commit in that code includes the row, and a rollback in it
removes the row, which 5 notices.

:func:`write_once` runs these steps for any database. A :class:`PositionTable` holds the parts that depend on the
database: ``checkpoints/sql.py`` (SQLAlchemy) and ``cues.processors.sql`` (``sqlite3``).

The last hash alone is not enough to recognize a repeated delivery: a retry and a stopped owner deliver older ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from cues import faults
from cues.arguments import version_hint
from cues.errors import CheckpointError, CuesError, Diverged, Fenced
from cues.steps.process import Delivery, Process

C = TypeVar("C")
M = TypeVar("M")
T = TypeVar("T")

TABLE: Final = "cues_positions"

VERSION: Final = 1
"""Of a row in a target. A later version of Cues that adds to a row raises it."""
_TEXTS: Final = frozenset({"store", "hash"})

_INSERT_ATTEMPTS: Final = 3
"""Another transaction can insert the row first. The next attempt then finds the row and waits for its lock."""


class Row(NamedTuple):
    """The row of a processor in the target. ``ends`` are exclusive, as in ``process.delivery.end``.

    ``seals`` holds, for each end, the checksum of the record batch before it (``process.delivery.seal``); rows of
    an older version have none.
    """

    store: str
    generation: int
    epoch: int
    ends: dict[str, int]
    hash: str
    seals: Mapping[str, str] = MappingProxyType({})

    @staticmethod
    def moved(row: Row | None, delivery: Delivery) -> Row:
        """Return the row after an admitted delivery. An end never moves back; other tailers keep theirs."""
        same = row is not None and row.generation == delivery.generation
        before, seals = (row.ends, row.seals) if row is not None and same else ({}, {})
        ends = before | {tailer: max(end, before.get(tailer, 0)) for tailer, end in delivery.end.items()}
        # A delivery without new messages still raises the epoch, so the previous owner is refused from now on.
        hash = row.hash if row is not None and ends == before else delivery.hash
        moved = {tailer: delivery.seal(tailer, ends[tailer]) or "" for tailer in delivery.end}
        return Row(delivery.store, delivery.generation, delivery.epoch, ends, hash, {**seals, **moved})

    def listed(self) -> list[Any]:
        """Return the version of a row, and its fields, for JSON."""
        return [VERSION, *self._replace(seals=dict(self.seals))]

    def columns(self) -> dict[str, Any]:
        """Return the columns of the table, without the processor."""
        ends, seals = (json.dumps(dict(by_tailer), sort_keys=True) for by_tailer in (self.ends, self.seals))
        return {**self._asdict(), "ends": ends, "seals": seals}

    @staticmethod
    def of(store: str, generation: int, epoch: int, ends: str, hash: str, seals: str | None = None) -> Row:
        """Read the values of :meth:`columns`."""
        return Row(store, generation, epoch, json.loads(ends), hash, json.loads(seals or "{}"))

    @staticmethod
    def kept(values: Any, what: str, otherwise: str) -> Row:
        """Read a row as a target keeps it: a list with the version of the row and its fields, or a map of them.

        In a map the version is ``cues``; there is none in a row of version 1. Texts of JSON and of numbers are decoded.
        Raises :class:`cues.errors.Diverged` for a row of a later version, with the advice to install a newer Cues, and
        for anything else that is not a row, with the advice ``otherwise``. ``what`` is a noun phrase for the place.
        """
        version: Any = None
        try:
            if isinstance(values, Mapping):
                version = values.get("cues", VERSION)
                fields = {name: value for name, value in values.items() if name != "cues"}
            else:
                version, *rest = values
                fields = dict(zip(Row._fields, rest, strict=len(rest) > len(Row._fields)))
            if (version := _decoded(version)) == VERSION:
                row = Row(**{name: value if name in _TEXTS else _decoded(value) for name, value in fields.items()})
                if row._is_sound():
                    return row._replace(seals=row.seals or {})
        except (TypeError, ValueError, RecursionError):
            pass
        raise Diverged(
            f"{what} has {values!r:.120}, which is not the row of a sink, version {VERSION}.",
            version_hint(version, VERSION, otherwise),
        )

    def _is_sound(self) -> bool:
        numbers = (self.generation, self.epoch, *self.ends.values()) if isinstance(self.ends, dict) else (None,)
        seals = self.seals or {}
        texts = (self.store, self.hash, *self.ends, *seals, *seals.values()) if isinstance(seals, Mapping) else (None,)
        return all(type(number) is int for number in numbers) and all(type(text) is str for text in texts)


def admit(processor: str, row: Row | None, delivery: Delivery) -> dict[str, int]:
    """Return, for each tailer of the delivery, the index from which its messages are new.

    It only decides; it reads and changes nothing. Raises :class:`cues.Fenced` for a delivery of a previous owner, and
    :class:`cues.errors.Diverged` for a delivery that does not fit the row in any order of events.
    """
    if row is not None and row.store != delivery.store:
        raise Diverged(
            f"{processor} delivers from the store {delivery.store}, but the target was written from the store"
            f" {row.store}, so it is unknown which of these messages the target has.",
            "use a new target, or the store that it was written from. If the target has no rows of this processor any"
            f" more: delete its position there, in a database with: delete from {TABLE} where processor ="
            f" '{processor}'.",
            processor=processor,
        )
    if row is None or delivery.generation > row.generation:
        return dict(delivery.start)  # the first delivery, or one that was asked for again
    if delivery.generation < row.generation or delivery.epoch < row.epoch:
        raise Fenced(
            f"{processor} delivers under generation {delivery.generation}, epoch {delivery.epoch};"
            f" the target was written under generation {row.generation}, epoch {row.epoch}.",
            "do nothing here: another owner has taken over.",
            processor=processor,
            reason="takeover",
        )
    _compare(processor, row, delivery)
    # A range that ends at or before the row is skipped, one that begins before it and ends after it is cut, and a later
    # start is accepted: messages that failed, or that a filter left out, make gaps.
    fresh = {
        tailer: min(max(start, row.ends.get(tailer, 0)), delivery.end[tailer])
        for tailer, start in delivery.start.items()
    }
    # A join takes the same count from each input, so the row must cut them at the same count.
    if len({fresh[tailer] - start for tailer, start in delivery.start.items()}) > 1:
        ranges = ", ".join(f"{t} [{delivery.start[t]}, {delivery.end[t]})" for t in sorted(delivery.start))
        raise Diverged(
            f"{processor} joins the ranges {ranges}, but the target ends at {row.ends}:"
            " these messages were not joined with one another before.",
            "seek with delivery asked for again, which begins a new row in the target.",
            processor=processor,
        )
    return fresh


def _compare(processor: str, row: Row, delivery: Delivery) -> None:
    """Raise :class:`Diverged` if the last message of the target is not in the queue, or is another message there.

    This happens after the store was replaced by an older copy: new messages then get the indices of messages that
    the target already has.
    """
    for tailer in delivery.end:
        end, seal = row.ends.get(tailer, 0), row.seals.get(tailer, "")
        if not seal:
            continue
        in_queue = delivery.seal(tailer, end)
        if in_queue is None or in_queue not in ("", seal):
            what = "the queue ends before it" if in_queue is None else f"the record batch there has checksum {in_queue}"
            raise Diverged(
                f"The target has the messages of {tailer} up to {end - 1}, of which the last was in a record batch with"
                f" checksum {seal}; {what}. The store was replaced by an older copy, or the target is another one.",
                "restore the newest copy of the store, or the target's copy of the same moment. To continue with both"
                f" as they are, from the position of {processor}, whatever messages the target has: delete from"
                f" {TABLE} where processor = '{processor}'.",
                processor=processor,
            )


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


class Transaction(Generic[C]):
    """An open transaction of a target, and the new messages of the delivery. Use it inside its block only."""

    def __init__(self, connection: C, process: Process, fresh: Mapping[str, int]) -> None:
        """``fresh`` is the result of :func:`admit`."""
        self.connection = connection
        self._process = process
        start = process.delivery.start
        self.known = max((fresh[tailer] - start[tailer] for tailer in start), default=0)
        """The number of messages at the start of the delivery that the target has: the same for each input."""

    def fresh(self, messages: Sequence[M]) -> list[M]:
        """Return those of ``messages`` that the target does not have yet, in their order.

        ``messages`` is the argument of the function: the list of a batch function (a join: each of its
        lists in turn), or ``[message]`` in a message function.
        """
        delivery = self._process.delivery
        if not self.known:
            return list(messages)
        if all(end - start == self.known for start, end in zip(delivery.start.values(), delivery.end.values())):
            return []
        # The range begins before the row and ends after it, so this is a batch, whose messages are not all of the range
        # when there are filters. A join's lists are at the same offsets of their ranges.
        indices = self._process.indices
        lists = list(indices.values()) if isinstance(indices, dict) else [indices]
        first = min(of_input[0] for of_input in lists) - min(delivery.start.values())
        return [m for m, index in zip(messages, lists[0], strict=True) if index - lists[0][0] + first >= self.known]


class PositionTable(Protocol[C]):
    """The table ``cues_positions`` of one database, as :func:`write_once` uses it.

    Every method takes an open transaction of :meth:`begin`. A database that cannot be reached raises
    :class:`cues.errors.CheckpointError`.
    """

    @property
    def where(self) -> str:
        """The database, as errors name it."""

    def begin(self) -> AbstractContextManager[C]:
        """Begin a transaction that commits at the end of the block and rolls back after an exception."""

    def read(self, connection: C, processor: str, *, lock: bool) -> Row | None:
        """Read the processor's row. ``lock``: no other transaction changes the row before this one ends."""

    def write(self, connection: C, processor: str, row: Row, *, insert: bool) -> bool:
        """Update or insert the row; False, rolled back, if another transaction inserted it first."""

    def is_open(self, connection: C) -> bool:
        """Return whether the transaction has not ended."""

    def processors(self, connection: C) -> Iterable[str]:
        """Return the processors that have a row."""


@contextmanager
def write_once(
    table: PositionTable[C], process: Process, transaction: Callable[[C, Process, Mapping[str, int]], T]
) -> Iterator[T]:
    """Run the block in a transaction of the database, with the messages of the delivery that are new to it.

    The block gets ``transaction(connection, process, fresh)``, as :class:`Transaction` takes them. Leaving the block
    commits its writes with the processor's row; an exception rolls both back. Raises the errors of :func:`admit`
    before the block runs, and :class:`cues.CuesError` when the block ended the transaction itself.
    """
    processor, delivery = process.id, process.delivery
    for _ in range(_INSERT_ATTEMPTS):
        with table.begin() as connection:
            # 1. Read.
            before = table.read(connection, processor, lock=True)
            # 2. Admit.
            fresh = admit(processor, before, delivery)
            # 3. Write.
            after = Row.moved(before, delivery)
            if not table.write(connection, processor, after, insert=before is None):
                continue
            # 4. Run.
            yield transaction(connection, process, fresh)
            # 5. Compare.
            if not table.is_open(connection) or table.read(connection, processor, lock=False) != after:
                raise transaction_ended(f"The block of {processor}")
            faults.point("checkpoint.inside")
        # 6. Committed.
        faults.point("checkpoint.after")
        return
    raise CheckpointError(
        f"The database {table.where} failed: {processor} has no row in {TABLE}, and a new row cannot be inserted.",
        "look for another program that inserts and deletes rows of this table.",
        where=table.where,
    )


def transaction_ended(subject: str) -> CuesError:
    """Return the error for user code that committed or rolled back a transaction of ours."""
    return CuesError(
        f"{subject} ended its transaction itself: rows and position are no longer one commit.",
        "remove commit and rollback from your code, since the caller does both; use a savepoint"
        " (SQLAlchemy: connection.begin_nested()) to undo a part.",
    )


def held(table: PositionTable[C], processors: Iterable[str]) -> list[str]:
    """Return those of ``processors`` that have a row in the database, for any partition."""
    with table.begin() as connection:
        ids = {row.partition("/")[0] for row in table.processors(connection)}
    return [processor for processor in processors if processor in ids]
