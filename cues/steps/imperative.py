"""The tailers and appenders of an imperative function. Their moves and writes wait for the commit of the step.

    process.tailers["rates"].read()          moves a position; it is committed with the step
    process.appenders["audit"].write(entry)  appended by the step's commit

The inputs of the processor still feed the step; its snapshot and its delivery hash name only them. In addition the
function reads other queues as they are now, from positions in the processor's row. It also writes to other queues,
after the messages that it returns. Each position has three values, as the state has:

    committed   in the processor's row, protected by the fence like the position of an input
    step        after the calls of this step that have returned
    call        of the running call

A call that returns moves its reads and writes into the step; a call that fails leaves none.

Not guaranteed: that a repeated step reads the same messages here. A retry reads the queue as it is then, from the
committed position, and the hash of the step does not cover these reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from cues.errors import InvalidArgument
from cues.overrides import override
from cues.queues.tailer import Tailer
from cues.records.positions import NO_SEAL, Position
from cues.steps.failure import StoreTrouble
from cues.steps.outgoing import Packer

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.queues.queue import Queue
    from cues.records.provenance import Provenance

T = TypeVar("T")


class _Use:
    """The lock of a tailer for one call, which notes the errors of the store."""

    __slots__ = ("_lock", "_trouble")

    def __init__(self, trouble: StoreTrouble, lock: AbstractContextManager[Any]) -> None:
        self._trouble = trouble
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._trouble.__exit__(*raised)
        self._lock.__exit__(*raised)


class ProcessTailer(Tailer):
    """``process.tailers[binding]``: a :class:`~cues.Tailer` whose position belongs to the processor.

    It never waits, because the step and all its messages would wait with it. At the beginning of each call its
    direction is forward, and it has no last message.
    """

    def __init__(self, queue: Queue, id: str) -> None:
        super().__init__(queue)
        self.tailer = id
        """The tailer id, ``graph.processor.queue``."""
        self.log: Log = queue.core.log
        self._cursor = self.cursors[0]
        self._committed = Position(self._cursor.identity, self._cursor.index, NO_SEAL)
        self._step = self._cursor.index
        self.trouble = StoreTrouble()
        """Notes the errors of the store in the calls of the user's function."""

    @override
    def _use(self) -> AbstractContextManager[Any]:
        return _Use(self.trouble, super()._use())

    @override
    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the queue. Raises :class:`InvalidArgument` for ``block``."""
        if block:
            raise InvalidArgument(
                f"The tailers of {self.tailer.rpartition('.')[0]} do not wait: its step and all its messages would"
                " wait with them.",
                f"use read(), which returns None at the end, or declare {self.queue.id!r} as an input.",
            )
        return super().read()

    @override
    def close(self) -> None:
        """Do nothing: the tailer belongs to the processor, and stays open for the next call."""

    # --- for the stepper ---

    def stand(self, position: Position) -> None:
        """Move to a committed position."""
        self._committed = position
        self._cursor.identity = position.identity
        self._step = position.next
        self.discard()

    def committed(self, position: Position) -> None:
        """Note that the commit of the step is done."""
        self._committed = position

    def settle(self) -> None:
        """After a call that returned: the next call continues here."""
        self._step = self._cursor.index
        self._cursor.last, self._cursor.backward = None, False

    def discard(self) -> None:
        """After a call that failed: move back to the position at its beginning."""
        self._cursor.go_back((self._step, None))
        self._cursor.backward = False

    def moved(self) -> Position:
        """The position to be committed with the step."""
        if self._step == self._committed.next:
            return self._committed
        with self._store.core.view() as txn:
            seal = self.log.seal_before(txn, self.log.row(txn), self._step)
        return Position(self._cursor.identity, self._step, seal)


class ProcessAppender:
    """``process.appenders[binding]``: writes to a queue with the step's commit.

    Nothing is returned, because indices are known only at the commit. A message is checked and encoded at
    once, so a wrong message is an error of this call, and later changes of the dict have no effect.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._packer = Packer(queue.core)
        self._call: list[bytes] = []
        self._items: list[bytes] = []
        self._origins: list[int] = []

    def write(self, message: dict[str, Any]) -> None:
        """Append one message. Raises the errors of :meth:`cues.Appender.write`; then it is not written."""
        self._call.append(self._packer.renew().pack(message))

    def write_many(self, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages; after an error, none of them."""
        packer = self._packer.renew()
        self._call += [packer.pack(message) for message in messages]

    def check(self, provenance: Provenance) -> None:
        """Raise the errors that the call's messages would raise at the commit with this provenance."""
        for packed in self._call:
            self._packer.check(packed, provenance)

    def settle(self, offset: int) -> None:
        """After the call for the message at ``offset`` returned: keep its messages."""
        self._items += self._call
        self._origins += [offset] * len(self._call)
        self._call.clear()

    def discard(self) -> None:
        """After a call that failed: drop its messages."""
        self._call.clear()

    def taken(self) -> tuple[list[bytes], list[int]]:
        """Take the messages of the step, with the offset of the input message of each."""
        taken = self._items, self._origins
        self._items, self._origins = [], []
        return taken

    def written(self) -> tuple[list[bytes], list[int]]:
        """Return the same as :meth:`taken`, and keep it."""
        return self._items, self._origins

    @override
    def __repr__(self) -> str:
        return f"<cues.ProcessAppender of {self.queue.id}>"


class ByBinding(dict[str, T]):
    """Tailers or appenders by binding; the error for an unknown binding lists the known ones."""

    def __init__(self, processor: str, what: str, members: Mapping[str, T]) -> None:
        super().__init__(members)
        self._processor = processor
        self._what = what

    def __missing__(self, binding: object) -> T:
        import difflib

        near = difflib.get_close_matches(str(binding), self, 1)
        raise InvalidArgument(
            f"{self._processor} has no {self._what} {binding!r}; it has {', '.join(map(repr, self)) or 'none'}.",
            f"use {near[0]!r}." if near else f"declare it with {self._what}s={{{str(binding)!r}: queue}}.",
        )


class Imperative:
    """The tailers and appenders of one processor; none if the function is not imperative."""

    def __init__(
        self, processor: str, tailers: Mapping[str, ProcessTailer], appenders: Mapping[str, ProcessAppender]
    ) -> None:
        self.tailers = ByBinding(processor, "tailer", tailers)
        self.appenders = ByBinding(processor, "appender", appenders)
        self._tailers: Sequence[ProcessTailer] = tuple(tailers.values())
        self._appenders: Sequence[ProcessAppender] = tuple(appenders.values())

    def check(self, provenance: Provenance) -> None:
        """Raise the errors that the call's messages would raise at the commit with this provenance."""
        for appender in self._appenders:
            appender.check(provenance)

    def settle(self, offset: int) -> None:
        """Keep the reads and writes of the call for the message at ``offset`` (batch function: the last)."""
        for tailer in self._tailers:
            tailer.settle()
        for appender in self._appenders:
            appender.settle(offset)

    def discard(self) -> None:
        """Drop the reads and writes of a call that failed."""
        for tailer in self._tailers:
            tailer.discard()
        for appender in self._appenders:
            appender.discard()

    def forget(self) -> None:
        """Drop the step: move back to the committed positions, and drop all written messages."""
        for tailer in self._tailers:
            tailer.stand(tailer._committed)
        for appender in self._appenders:
            appender.discard()
            appender.taken()

    def written(self) -> dict[str, tuple[list[bytes], list[int]]]:
        """The written messages of the step, by binding, with the offset of the input message of each."""
        return {binding: appender.taken() for binding, appender in self.appenders.items()}

    def moved(self) -> dict[str, Position]:
        """The positions to be committed with the step, by tailer id."""
        return {tailer.tailer: tailer.moved() for tailer in self._tailers}
