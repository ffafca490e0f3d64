"""What an imperative function reads and writes by itself: tailers and appenders whose doings are buffered.

    process.tailers["rates"].read()          moves a position; it is committed with the step
    process.appenders["audit"].write(entry)  appended by the step's commit

The step is still fed by the processor's inputs, and what it took from them is what its snapshot and
its delivery hash name. Beside that the function reads other queues as they are now, from positions
of the processor's own row, and writes to other queues behind what it returns. Three layers lie over
each position, as over the state:

    committed   in the processor's row: fenced, recovered and purged around like an input's
    step        behind the calls of this step that returned
    call        where the running call stands

A call that returns settles its moves and writes into the step's; a call that fails leaves none.

Not guaranteed: that a step which is run again reads the same here. What a queue holds depends on when
one looks, and the hash of a step says nothing of it; a retry sees the queue as it is then, from the
committed position.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cues import batch as batches
from cues.errors import InvalidArgument
from cues.ownership import NO_SEAL, Position
from cues.tailer import Tailer

if TYPE_CHECKING:
    from cues.log import Log
    from cues.queue import Queue

T = TypeVar("T")


class ProcessTailer(Tailer):
    """``process.tailers[binding]``: a :class:`~cues.Tailer` whose position is the processor's.

    It never waits (a step that waits keeps its messages from everybody), reads forward at the
    beginning of every call, and knows of no message that another call has read last.
    """

    def __init__(self, queue: Queue, id: str) -> None:
        super().__init__(queue)
        self.tailer = id
        """The tailer id, ``graph.processor.queue``."""
        self.log: Log = queue.log
        self._committed = Position(self._identity, self._index, NO_SEAL)
        self._step = self._index

    def read(self, block: bool = False, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message, or None at the end of the queue. Waiting is refused: :class:`InvalidArgument`."""
        if block:
            raise InvalidArgument(
                f"The tailers of {self.tailer.rpartition('.')[0]} do not wait: its step, and all that it took, would"
                " wait with them.",
                f"read(), which gives None at the end, or {self.queue.id!r} as an input.",
            )
        return super().read()

    def close(self) -> None:
        """Does nothing: the tailer is the processor's, and open for the next call."""

    # --- what the delivery does ---

    def stand(self, position: Position) -> None:
        """Go to a committed position."""
        self._committed = position
        self._identity = position.identity
        self._step = position.next
        self.discard()

    def committed(self, position: Position) -> None:
        """The step's commit is done."""
        self._committed = position

    def settle(self) -> None:
        """The call returned: the next one goes on from here."""
        self._step = self._index
        self._last = None
        self._direction = "forward"

    def discard(self) -> None:
        """The call failed, or begins anew: go back to where it found the tailer."""
        self._go_back(self._step, None)
        self._direction = "forward"

    def moved(self) -> Position:
        """The position to be committed with the step."""
        if self._step == self._committed.next:
            return self._committed
        with self._store.view() as txn:
            seal = self.log.seal_before(txn, self.log.row(txn), self._step)
        return Position(self._identity, self._step, seal)


class ProcessAppender:
    """``process.appenders[binding]``: writes to a queue with the step's commit.

    Nothing is returned, since indices are known only then. A message is checked and encoded at once,
    so what is wrong with it is the error of this call, and changing it afterwards changes nothing.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._call: list[dict[str, Any] | bytes] = []
        self._items: list[dict[str, Any] | bytes] = []
        self._origins: list[int] = []

    def write(self, message: dict[str, Any]) -> None:
        """Append one message. Raises as :meth:`cues.Appender.write` does; then it is not written."""
        self._call.append(self._encoded(message))

    def write_many(self, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages; all or, with an error, none."""
        self._call += [self._encoded(message) for message in messages]

    def _encoded(self, message: dict[str, Any]) -> dict[str, Any] | bytes:
        options = self.queue._options
        found = batches.pack_one(message, options.max_message_bytes, options.strips)
        return found if isinstance(found, bytes) else copy.deepcopy(found)  # with ``q/meta``

    def settle(self, offset: int) -> None:
        """The call for the message at ``offset`` returned: keep what it wrote."""
        self._items += self._call
        self._origins += [offset] * len(self._call)
        self._call.clear()

    def discard(self) -> None:
        """The call failed: drop what it wrote."""
        self._call.clear()

    def taken(self) -> tuple[list[dict[str, Any] | bytes], list[int]]:
        """What the step has written, with the offset of the message that each came from; nothing is left."""
        found = self._items, self._origins
        self._items, self._origins = [], []
        return found

    def __repr__(self) -> str:
        return f"<cues.ProcessAppender of {self.queue.id}>"


class ByBinding(dict[str, T]):
    """Tailers or appenders by binding; an unknown one is said with those that there are."""

    def __init__(self, processor: str, what: str, found: Mapping[str, T]) -> None:
        super().__init__(found)
        self._processor = processor
        self._what = what

    def __missing__(self, binding: object) -> T:
        near = difflib.get_close_matches(str(binding), self, 1)
        raise InvalidArgument(
            f"{self._processor} has no {self._what} {binding!r}; it has {', '.join(map(repr, self)) or 'none'}.",
            f"{near[0]!r}." if near else f"{self._what}s={{{str(binding)!r}: queue}} where it is declared.",
        )


class Imperative:
    """The tailers and appenders of one processor. It has none where the function is not imperative."""

    def __init__(
        self, processor: str, tailers: Mapping[str, ProcessTailer], appenders: Mapping[str, ProcessAppender]
    ) -> None:
        self.tailers = ByBinding(processor, "tailer", tailers)
        self.appenders = ByBinding(processor, "appender", appenders)
        self._tailers: Sequence[ProcessTailer] = tuple(tailers.values())
        self._appenders: Sequence[ProcessAppender] = tuple(appenders.values())

    def settle(self, offset: int) -> None:
        """The call for the message at ``offset`` (batch function: the last) returned."""
        for tailer in self._tailers:
            tailer.settle()
        for appender in self._appenders:
            appender.settle(offset)

    def discard(self) -> None:
        """The call failed."""
        for tailer in self._tailers:
            tailer.discard()
        for appender in self._appenders:
            appender.discard()

    def forget(self) -> None:
        """The step is void: go back to the committed positions, and drop what was written."""
        for tailer in self._tailers:
            tailer.stand(tailer._committed)
        for appender in self._appenders:
            appender.discard()
            appender.taken()

    def written(self) -> dict[str, tuple[list[dict[str, Any] | bytes], list[int]]]:
        """What the step has written, by binding: messages, and the offset of the message that each came from."""
        return {binding: appender.taken() for binding, appender in self.appenders.items()}

    def moved(self) -> dict[str, Position]:
        """The positions to be committed with the step, by tailer id."""
        return {tailer.tailer: tailer.moved() for tailer in self._tailers}
