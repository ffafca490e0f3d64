"""Taking: the messages of a step.

    Input     a tailer of a processor: its position, and the messages that were read ahead
    Slice     the messages that a step took from one input
    Taken     the slices of one step, all with the same number of messages

Messages are copied out in a short read transaction, whole record batches at a time. Messages that a step
does not take stay in memory for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from cues.native import mypyc_attr
from cues.queues import rollback
from cues.queues.cursor import Piece, producer_of
from cues.queues.tables import Rows
from cues.records.batch import is_pending
from cues.records.provenance import Provenance, concat, merge
from cues.steps.hashes import Range
from cues.storage import timeline, wakeup
from cues.storage.store_core import LastLook

if TYPE_CHECKING:
    from cues.queues.log import Log, Raw
    from cues.queues.queue import Queue
    from cues.records.batch import Batch
    from cues.records.positions import Position
    from cues.storage.transaction import StoreTransaction


PROVENANCE_BYTES_SAFE: Final = 1_000
"""A message with less provenance fits a page, also with the provenance that a step adds."""
PROVENANCE_COLUMN_BYTES: Final = 32
"""The most bytes that one queue adds to the provenance of one message, besides its name."""
_INPUTS_FEW: Final = PROVENANCE_BYTES_SAFE // PROVENANCE_COLUMN_BYTES
"""With so many inputs, a message without provenance of its own cannot have too much of it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Slice:
    """The messages that a step took from one input: [start, stop) of its queue."""

    __slots__ = ("batches", "input", "messages", "start", "stop")

    def __init__(self, input: Any, start: int, stop: int, messages: Any, batches: list[Batch]) -> None:
        """``input``: the :class:`Input`, or what has the attributes of one that the user of this slice needs.
        ``messages``: a list of dicts; for a function of tables :class:`cues.queues.tables.Rows`."""
        self.input: Any = input
        self.start = start
        self.stop = stop
        self.messages = messages
        self.batches = batches

    @property
    def binding(self) -> str:
        return self.input.binding  # type: ignore[no-any-return]

    @property
    def tailer(self) -> str:
        return self.input.tailer  # type: ignore[no-any-return]

    def range(self, start: int, stop: int) -> Range:
        """The range of the step's messages ``start`` to ``stop`` on this queue."""
        input = self.input
        return input.tailer, input.identity_at(self.start + stop - 1), self.start + start, self.start + stop

    def seal_before(self, index: int) -> str | None:
        """The seal of the queue before ``index``, in hex; empty if it is not known, None beyond the end."""
        return self.input.seal_before(index)  # type: ignore[no-any-return]

    def pristine(self, offset: int) -> dict[str, Any]:
        """The message as it is on the queue, also if a function has changed the taken one."""
        (message,) = self.pristine_between(offset, offset + 1)
        return message

    def pristine_between(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The messages at the offsets ``start`` to ``stop`` as they are on the queue, each record decoded once."""
        low, high = self.start + start, self.start + stop
        found: list[dict[str, Any]] = []
        for batch in self.batches:
            if batch.first < high and low < batch.next:
                found += batch.messages()[max(low - batch.first, 0) : high - batch.first]
        return found

    def seal(self) -> bytes:
        """The checksum of the batch that has the last message."""
        return self.batches[-1].seal

    def provenance(self) -> Provenance:
        """The provenance of all messages, with their places on this queue."""
        queue, kept = self.input.log.id, self.input.kept
        if len(self.batches) == 1:
            batch = self.batches[0]
            return batch.provenance(queue, kept, self.start - batch.first, self.stop - batch.first)
        parts = []
        for batch in self.batches:
            low, high = max(batch.first, self.start), min(batch.next, self.stop)
            parts.append(batch.provenance(queue, kept, low - batch.first, high - batch.first))
        return concat(parts)

    def before(self, offset: int) -> Slice:
        """The messages before the one at ``offset``."""
        batches = [batch for batch in self.batches if batch.first < self.start + offset]
        return Slice(self.input, self.start, self.start + offset, self.messages[:offset], batches)


@mypyc_attr(allow_interpreted_subclasses=True)
class Taken:
    """The messages of a step: from each input that it reads, a slice of ``count`` messages."""

    # Not a dataclass: the compiler does not compile the constructor of one, and each step makes this object.
    __slots__ = ("_provenance", "bare", "context", "count", "halved", "hash", "slices", "times")

    def __init__(
        self,
        slices: list[Slice],
        count: int,
        hash: bytes | None = None,
        *,
        times: list[int] | None = None,
        context: dict[str, str] | None = None,
        halved: bool = False,
    ) -> None:
        self.slices = slices
        self.count = count
        self.hash = hash
        """The hash of a repeated snapshot, which is used instead of a new one."""
        self.times = times
        """The times before which these messages are not delivered, if the step holds them (delays.py); else None."""
        self.context = context
        """The trace context of the step (tracing.py), which its outputs carry; None if the step is not traced."""
        self.halved = halved
        """True if these messages failed together with others (halving.py): several of them are called once, without
        tries after it."""
        self._provenance: Provenance | None = None
        self.bare = len(slices) <= _INPUTS_FEW
        """True if all entries are messages, no record has provenance, and the inputs are few, as in most steps: then
        :attr:`acknowledged` is False, and :meth:`heavy_provenance` is None."""
        for piece in slices:
            for batch in piece.batches:
                head = batch.head
                if head.acknowledges or head.provenance is not None:
                    self.bare = False

    @property
    def acknowledged(self) -> bool:
        """True if any entry is an acknowledgement, and not a message."""
        return any(batch.head.acknowledges for piece in self.slices for batch in piece.batches)

    def heavy_provenance(self) -> Provenance | None:
        """The provenance of the messages, if that of one may be too large for a page; else None."""
        size = 0
        for piece in self.slices:
            for batch in piece.batches:
                size += len(batch.head.provenance or b"")
        if size + len(self.slices) * PROVENANCE_COLUMN_BYTES <= PROVENANCE_BYTES_SAFE:
            return None
        provenance = self.carried()
        columns = sum(PROVENANCE_COLUMN_BYTES + len(queue) for queue in provenance.columns)
        return provenance if provenance.extra is not None or columns > PROVENANCE_BYTES_SAFE else None

    @property
    def traced(self) -> bool:
        """True if the messages have any provenance to pass on."""
        if self.context is not None:
            return True
        for piece in self.slices:
            if piece.input.kept:
                return True
        return not self.bare and any(batch.head.provenance for piece in self.slices for batch in piece.batches)

    def ranges(self, start: int, stop: int) -> list[Range]:
        return [s.range(start, stop) for s in self.slices]

    def provenance(self) -> Provenance:
        if self._provenance is None:
            first, *others = self.slices
            provenance = first.provenance()
            if others:
                provenance = merge([provenance, *[piece.provenance() for piece in others]])
            self._provenance = provenance if provenance.extra is None else provenance.delivered()
        return self._provenance

    def carried(self) -> Provenance:
        """The provenance that the outputs of the messages carry: with the trace context of the step."""
        provenance = self.provenance()
        return provenance if self.context is None else provenance.with_context(self.context)

    def before(self, offset: int) -> Taken:
        """The messages before the one at ``offset``."""
        return Taken([s.before(offset) for s in self.slices], offset, context=self.context)

    def restored(self, offset: int) -> list[dict[str, Any]]:
        """The messages at ``offset``, restored as they are on the queues: a call that failed may have changed them."""
        for piece in self.slices:
            piece.messages[offset] = piece.pristine(offset)
        return [piece.messages[offset] for piece in self.slices]

    def anew(self) -> Taken:
        """The same step with all messages as they are on the queues, to run the function again."""
        for piece in self.slices:
            if isinstance(piece.messages, Rows):
                piece.messages.forget()
            else:
                piece.messages = piece.pristine_between(0, self.count)
        return self


class Input:
    """A tailer of a processor: its position, and the messages that were read ahead.

    It is not a :class:`~cues.queues.cursor.Cursor`: a step takes a range with the batches of all its messages, which
    are decoded when they are copied out, and this is the hottest path of the engine.
    """

    def __init__(self, binding: str, tailer: str, queue: Queue) -> None:
        self.binding = binding
        self.tailer = tailer
        self.queue = queue
        self.log: Log = queue.core.log
        self._store = queue.store.core
        self._words = self._store.words
        self.on_pending: Callable[[str], None] | None = None
        """Called once, with the id of a publisher whose pending messages are read as if they were committed."""
        self.kept: frozenset[str] = frozenset()
        self.identity = b""
        self.index = 1
        """The index of the message that is taken next."""
        self._ahead: list[tuple[Batch, list[dict[str, Any]]]] = []
        self._loaded = 1
        """The index after the messages that were read ahead."""
        self._end = 1
        """The index after the last message, when messages were copied out last."""
        self._last_look = LastLook(self._store)
        """The last copying."""
        self.delays = False
        """True if a message that was read ahead may have a time of delivery."""
        self.as_tables = False
        """True if the function takes tables: messages are not decoded here."""
        self.by_columns = False
        """True if the function takes columns too: those are not decoded here, and a step has them or messages."""
        self._purges = -1
        self._line: timeline.Line | None = None

    def stand(self, position: Position) -> None:
        """Move to a committed position."""
        self.identity = position.identity
        self.go(position.next)

    def identity_at(self, index: int) -> bytes:
        """The identity of the queue for the delivery hash, for messages up to the one at ``index``."""
        if self._line is None:
            with self.queue.store.core.view() as txn:
                self._line = timeline.read(txn, self.log.id)
        if not self._line:
            return self.identity
        with self.queue.store.core.view() as txn:
            return timeline.identity(self._line, self.identity, self.log.index_of(txn, index))

    def seal_before(self, index: int) -> str | None:
        """The seal before ``index``, in hex; empty if it is not known, None if the queue ends before."""
        with self.queue.store.core.view() as txn:
            row = self.log.row(txn)
            if index > row.next:
                return None
            seal = self.log.seal_before(txn, row, index)
        return seal.hex() if any(seal) else ""

    def go(self, index: int) -> None:
        """Set the next index, and drop the messages that were read ahead."""
        self.index = self._loaded = index
        self._ahead.clear()
        self.delays = False

    @property
    def ahead(self) -> int:
        """The number of messages that were read ahead."""
        return self._loaded - self.index

    def waits(self) -> bool:
        """Return whether a message waits that was not taken. Safe in any thread."""
        with self.queue.store.core.view() as txn:
            row = self.log.row(txn)
        return max(self.index, row.first) < row.next

    def fill(self, count: int) -> int:
        """Read ahead up to ``count`` messages, if they exist; return the number of messages that are ready."""
        try:
            purges = self._words[wakeup.PURGES]
        except ValueError:
            purges = self._store.word(wakeup.PURGES)  # raises: closed by another thread
        if purges != self._purges or purges < 0:
            self._purges = purges
            self._ahead.clear()
            self._loaded = self.index
        ahead = self._loaded - self.index
        if ahead >= count or (self._loaded == self._end and self._last_look.is_current()):
            return ahead
        with self._store.view() as txn:
            raws = self.copy(txn, count)
        self.open(raws)
        return self._loaded - self.index

    def copy(self, txn: StoreTransaction, count: int) -> list[Raw]:
        """Copy out the records with which ``count`` messages are read ahead; :meth:`open` opens them afterwards."""
        self._last_look.note(txn)
        row = self.log.row(txn)
        if self.index < row.first:  # purged before it was taken
            self.go(row.first)
        self._end = row.next
        self.kept = self.queue.core.follow_options(txn, row).kept
        return self.log.read(txn, row, self._loaded, count - (self._loaded - self.index))

    def open(self, raws: list[Raw]) -> None:
        """Read ahead the messages of records that were copied out."""
        if not raws and self.queue.core.is_committed:
            rollback.look(self.queue)
        for opened in self.log.batches(raws):
            if self.on_pending is not None and opened.head.stamps_at and is_pending(opened.value):
                tell, self.on_pending = self.on_pending, None
                tell(producer_of(opened))
            left = self.as_tables or (self.by_columns and opened.schema is not None)
            self._ahead.append((opened, [] if left else opened.messages()))
            if opened.head.provenance is not None and opened.delays:
                self.delays = True
            self._loaded = opened.next

    def times(self, count: int) -> list[int]:
        """The times of delivery of the next ``count`` messages, which were read ahead; 0 without one."""
        times: list[int] = []
        for opened, _ in self._ahead:
            low = max(self.index - opened.first, 0)
            some = opened.provenance("", frozenset()).times() if opened.delays else [0] * opened.head.count
            times += some[low:]
            if len(times) >= count:
                break
        return times[:count]

    @property
    def in_columns(self) -> bool:
        """True if the next message was read ahead, and is a row of columns."""
        return bool(self._ahead) and self._ahead[0][0].schema is not None

    def alike(self, count: int) -> int:
        """The number of the next messages, at most ``count``, that have one form: dicts, or columns of one schema."""
        schema = self._ahead[0][0].schema if self._ahead else None
        for opened, _ in self._ahead:
            if opened.first >= self.index + count:
                break
            if opened.schema is not schema:
                return opened.first - self.index
        return count

    def take(self, count: int) -> Slice:
        """Take the next ``count`` messages, which were read ahead."""
        start, stop = self.index, self.index + count
        ahead = self._ahead
        opened, messages = ahead[0]
        if self.as_tables or (self.by_columns and any(each.schema is not None for each, _ in ahead)):
            return self._take_rows(start, stop)
        low = start - opened.first
        if low >= 0 and stop < opened.next:  # a part of one record, as a small step takes it
            self.index = stop
            return Slice(self, start, stop, messages[low : low + count], [opened])
        taken: list[dict[str, Any]] = []
        batches: list[Batch] = []
        rest = 0
        for opened, messages in ahead:
            if opened.first >= stop:
                break
            low, high = max(start - opened.first, 0), min(stop - opened.first, len(messages))
            taken += messages if high - low == len(messages) else messages[low:high]
            batches.append(opened)
            rest += opened.next <= stop
        self._taken_to(stop, rest)
        return Slice(self, start, stop, taken, batches)

    def _take_rows(self, start: int, stop: int) -> Slice:
        """Take messages for a function of tables: the parts of the records, none of which is decoded."""
        pieces: list[Piece] = []
        rest = 0
        for opened, _ in self._ahead:
            if opened.first >= stop:
                break
            pieces.append(Piece(self.log, opened, max(start - opened.first, 0), min(stop, opened.next) - opened.first))
            rest += opened.next <= stop
        self._taken_to(stop, rest)
        return Slice(self, start, stop, Rows(pieces), [piece.batch for piece in pieces])

    def _taken_to(self, stop: int, rest: int) -> None:
        """Move to ``stop``, and drop the first ``rest`` records that were read ahead."""
        del self._ahead[:rest]
        if not self._ahead:
            self.delays = False
        self.index = stop
