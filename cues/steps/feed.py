"""Sources: a thread pulls the user's generator, and steps commit the messages that it yields.

The generator runs in its own thread (:meth:`Feed.run`), because the next ``yield`` may come at once or in an hour. The
thread of the processor commits yielded messages as soon as it can: many at a time from a fast generator, one at a time
from a slow one. A fast generator waits when :data:`AHEAD_MAX` messages are not committed. An async generator runs on
its own event loop, which continues between its yields.

A step takes yielded messages in the range (position before, position after]. The function has run already, so only
the commit of the protocol is left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, cast

from cues import codec, faults
from cues.errors import CodecError, PositionRequired, ReturnError
from cues.graphs import typed
from cues.graphs.processor import position_count, wants_process
from cues.native import mypyc_attr
from cues.records import batch as batches
from cues.records.provenance import Provenance
from cues.steps import outgoing, tries
from cues.steps.concurrency import RunnerClosed
from cues.steps.failure import Failure, error_message, retry_event, stopped_at
from cues.steps.outgoing import Packer
from cues.steps.parts import Part, divided
from cues.steps.results import Output
from cues.steps.stepper import Outcome, Stepper

if TYPE_CHECKING:
    from cues.queues.processor_rows import ProcessorRow
    from cues.queues.queue import Queue
    from cues.records.batch import Page
    from cues.steps.eventloop import EventLoop

AHEAD_MAX: Final = 2_000
"""Number of messages that a generator may be ahead of the commits."""
REPR_CHARACTERS_MAX: Final = 100_000
"""Characters of a message that cannot be written, in its error message."""


_AFTER: Final = itemgetter(0)
_MESSAGE: Final = itemgetter(1)


@mypyc_attr(native_class=False)
class MessageCount(int):
    """The number of bare messages so far. It differs by its type from a position that is an integer."""


class RefusedItem:
    """A message, or a position, that cannot be written."""

    __slots__ = ("error", "shown")

    def __init__(self, error: Exception, shown: str) -> None:
        self.error = error
        self.shown = shown
        """The message's ``repr`` when it was yielded."""


NO_MESSAGE: Final = b""
"""In place of a packed message: the position moves, and nothing is written."""

Item = tuple[bytes | int | MessageCount | RefusedItem, bytes | RefusedItem]
"""A yielded message, packed at once, because the generator may change it later, after the position after it.

The position is packed unless it is an integer; for bare messages it is the count so far.
"""


class Feed:
    """Pulls one generator, and hands over the yielded messages."""

    def __init__(self, source: SourceStepper) -> None:
        self._source = source
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._waiting = False
        self._iterator: Iterator[Item] | None = None
        self._loop: EventLoop | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.closed = False
        self.pulled_at = time.monotonic()
        """The time at which the generator yielded last, or was started."""

    # --- the generator's side ---

    def run(self) -> None:
        """Pull until the generator ends, fails, or the feed is closed."""
        try:
            items = self._items
            for item in self._pulls():
                items.append(item)
                if self._waiting or len(items) > AHEAD_MAX:
                    self._hand_over()
                if self.closed:
                    break
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _hand_over(self) -> None:
        with self._changed:
            self._waiting = False  # it was told; until it runs, the next messages need not tell it again
            self._changed.notify_all()
            while len(self._items) > AHEAD_MAX and not self.closed:
                self._changed.wait(0.1)

    def pull(self, count: int) -> None:
        """Pull up to ``count`` messages in the calling thread (deterministic runs)."""
        if self._iterator is None:
            self._iterator = self._pulls()
        self._source.process._waits = False
        try:
            while len(self._items) < count:
                self._items.append(next(self._iterator))
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.error, self.ended = error, True

    def _pulls(self) -> Iterator[Item]:
        """Call the function, and give an item for each new message."""
        source = self._source
        position, count = source.position
        before: Any = position if type(position) is int else codec.pack(position)
        output = source.output
        packer = Packer(lambda: output._options)
        schema = typed.schemas_of(source.node.options, source.node.fn, (), False).get("")
        handed: bytes | RefusedItem
        resume = source.node.options.resume
        fn = source.node.fn
        assert fn is not None
        arguments: list[Any] = [position] * position_count(fn)
        keywords = {"process": source.process} if wants_process(fn) else {}
        skip = count if resume == "skip" else 0
        yielded = fn(*arguments, **keywords)
        try:
            iterator = self._from_loop(yielded) if isinstance(yielded, AsyncIterable) else iter(yielded)
        except TypeError:
            raise ReturnError(
                f"The source {source.node.name!r} returned {type(yielded).__name__}, which cannot be iterated.",
                "yield pairs of a position and a message.",
            ) from None
        now, plain, has_position = time.monotonic, schema is None, bool(arguments)
        for item in iterator:
            self.pulled_at = now()
            if type(item) is tuple and len(item) == 2:
                if not has_position:
                    raise PositionRequired(
                        f"The source {source.node.name!r} yielded the position {str(item[0])[:60]!r} and takes none,"
                        " so the next start would yield the same messages again.",
                        f"declare def {getattr(fn, '__name__', 'f')}(position): …, which continues after it; or yield"
                        f" bare messages, as resume={resume!r} says.",
                    )
                after, message = item
                if type(after) is not int:
                    try:
                        after = codec.pack(after)
                    except CodecError as error:
                        yield RefusedItem(error, ""), b""
                        return
                if after == before:
                    raise ReturnError(
                        f"The source {source.node.name!r} yielded the position {item[0]!r:.60} twice in a row: a"
                        " restart could not tell the messages apart, and they would have one delivery hash.",
                        "yield a position that changes with every message, such as (page, row).",
                    )
                before = after
            elif not isinstance(item, dict) and schema is None:
                raise ReturnError(
                    f"The source {source.node.name!r} yielded {type(item).__name__} ({str(item)[:60]!r}).",
                    "yield pairs of a position and a message, which is a dict.",
                )
            elif resume is None:
                raise PositionRequired(
                    f"The source {source.node.name!r} yields messages without a position and does not say what"
                    " a restart means.",
                    "yield position, message; or resume='skip' (it yields the same messages again, those that"
                    " are committed are skipped: exactly-once) or resume='again' (it begins anew: at-least-once).",
                )
            elif skip:
                skip -= 1
                continue
            else:
                count += 1
                after, message = MessageCount(count), item
            try:
                if output._options is not packer.options:
                    packer.renew()
                if plain and type(message) is dict:
                    handed = packer.pack(message)
                elif isinstance(message, Exception):
                    raise message
                elif message is None and type(after) is not MessageCount:
                    handed = NO_MESSAGE
                else:
                    handed = packer.pack(message if schema is None else schema.written(message))
            except Exception as error:  # CuesError, an error of the key function, or one that stands for a message
                handed = RefusedItem(error, repr(message).encode("utf-8", "replace").decode()[:REPR_CHARACTERS_MAX])
            yield after, handed

    def _from_loop(self, yielded: AsyncIterable[Any]) -> Iterator[Any]:
        from cues.steps.eventloop import EventLoop

        self._loop = loop = EventLoop(f"cues {self._source.node.id} loop")
        iterator = aiter(yielded)
        try:
            while True:
                yield loop.run(anext(iterator))
        except (StopAsyncIteration, RunnerClosed):
            return
        finally:
            loop.close()

    # --- the processor's side ---

    def take(self, count: int) -> list[Item]:
        """Return up to ``count`` yielded messages; never waits."""
        items = self._items
        taken = [items.popleft() for _ in range(min(count, len(items)))]
        if taken and len(items) + len(taken) > AHEAD_MAX:
            with self._changed:
                self._changed.notify_all()
        return taken

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a message to take, or the generator has ended."""
        with self._changed:
            self._waiting = True
            try:
                if not self._items and not self.ended and not self.closed:
                    self._changed.wait(timeout_s)
            finally:
                self._waiting = False

    @property
    def empty(self) -> bool:
        return not self._items

    def close(self) -> None:
        """Stop pulling at the next yield; yielded messages can still be taken."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Abandon a generator that may never yield again; an async one is cancelled."""
        self.close()
        if self._loop is not None:
            self._loop.close()


class SourceStepper(Stepper):
    """The stepper of a source that has a function."""

    def _made(self) -> None:
        super()._made()
        self.feed = Feed(self)
        self._failures = 0

    def close(self) -> None:
        self.feed.abandon()
        super().close()

    def adopt(self, row: ProcessorRow) -> None:
        """Take over the stored row. Drop messages yielded after its position; start the generator there again."""
        super().adopt(row)
        self.feed.abandon()
        self.feed = Feed(self)

    @property
    def position(self) -> tuple[Any, int]:
        """The committed position, and the count of bare messages committed."""
        if not self._row.source:
            return None, 0
        position, count = codec.unpack(self._row.source)
        return position, count

    @property
    def ended(self) -> bool:
        """True if the generator has ended, and all its messages are committed."""
        return self.feed.ended and self.feed.empty and self.feed.error is None

    def step(self) -> Outcome:
        """Commit the yielded messages. Raises :class:`ProcessorStopped` when the generator failed."""
        if self._stop is not None:
            raise stopped_at(self.node, self._stop)
        error = self.feed.error  # read first: then all messages yielded before the error are there, and are committed
        room = self.gate.room()
        if not room and not self.feed.empty:
            return self._wait_for_readers()
        if self.gate.noted:
            self.gate.clear()
        items = self.feed.take(min(self.node.options.batch_size, room))
        if items:
            if faults.active:
                faults.point("take.after")
            if self.tracer is None:
                self._commit_items(items)
            else:
                with self.tracer.step(self, len(items)):
                    self._commit_items(items)
            return "committed"
        if error is not None:
            raise stopped_at(self.node, Failure(error, self._failures + 1)) from error
        self.check_fence()
        return "idle"

    def _commit_items(self, items: list[Item]) -> None:
        parts, row, stop = self._source_parts(items)
        if parts:
            self._commit_parts(parts, row)
            committed = getattr(self.node.fn, "committed", None)
            if committed is not None:  # a source that acknowledges its messages elsewhere
                committed(self.position[0])
            count = sum(part.written for part in parts)
            self.counters.taken += count
            self.counters.sizes.add(count)
            self._failures = 0
        if stop is not None:
            self._stop = stop
            raise stopped_at(self.node, stop)

    def again(self) -> float | None:
        """After a failure: seconds until the function is called again, or None if it is not.

        It is called with the committed position.
        """
        error, retry = self.feed.error, self.node.options.retry
        if (
            error is None
            or self._stop is not None
            or not isinstance(error, retry.on)
            or self._failures + 1 >= retry.attempts
        ):
            return None
        if isinstance(error, (PositionRequired, ReturnError)):
            return None
        self._failures += 1
        self.counters.retries += 1
        wait_s = retry.wait_s(self._failures, error)
        self._emit(retry_event(self.node.id, self._failures, retry.attempts, error, wait_s))
        self.feed = Feed(self)
        return wait_s

    def _source_parts(self, items: list[Item]) -> tuple[list[Part], ProcessorRow, Failure | None]:
        """Cut the step at messages that cannot be written: parts, the row, and the failure that stops the source."""
        parts: list[Part] = []
        position, count = self.position
        while items:
            first, message = items[0]
            if isinstance(first, RefusedItem):
                return parts, self._at(position, count), Failure(first.error, 1)
            bare = type(first) is MessageCount
            before = count if bare else position
            failure = None
            if isinstance(message, RefusedItem):
                failure = Failure(message.error, 1)
                if self.errors is None:
                    return parts, self._at(position, count), failure
                stop = 1
            else:
                stop = _run_length(items, bare)
            last = items[stop - 1][0]
            after = int(last) if isinstance(last, int) else codec.unpack(cast(bytes, last))
            digest = self.hasher.digest([], ["source", before, after])
            if isinstance(message, RefusedItem):
                appends = [self._refused(message, cast(Failure, failure), digest)]
                written = 1
            else:
                packed = list(filter(None, map(_MESSAGE, items[:stop])))  # without NO_MESSAGE
                appends = self._append(packed, digest) if packed else []
                written = len(packed)
            items = items[stop:]
            taking = tries.Taking((), (), (), source=(before, after))
            parts.append(Part(0, stop, digest, taking, failure, self._at_home(appends, digest), written))
            if bare:
                count = after
            else:
                position = after
        return parts, self._at(position, count), None

    def _at(self, position: Any, count: int) -> ProcessorRow:
        return self._row._replace(source=codec.pack([position, count]))

    @property
    def output(self) -> Queue:
        """The queue of the source."""
        (queue,) = self.outputs.values()
        return queue

    def _append(self, messages: list[bytes], digest: bytes) -> list[tuple[Queue, list[Page]]]:
        queue = self.output
        context = self.span.context if self.span is not None else None
        return [
            (
                log,
                outgoing.build(
                    items,
                    queue._options._strips,
                    digest,
                    Provenance(len(items), {}, context) if context is not None else None,
                ),
            )
            for log, items, _ in divided(queue, Output(messages), 0)
        ]

    def _refused(self, refused: RefusedItem, failure: Failure, digest: bytes) -> tuple[Queue, list[Page]]:
        """The error message for a message that cannot be written, with its ``repr``."""
        assert self.errors is not None
        record = error_message(self.node, {self.node.name: [{"repr": refused.shown}]}, failure)
        return self.errors, batches.build([record], batches.OWN_BYTES_MAX, digest, reserved=True)


def _run_length(items: list[Item], bare: bool) -> int:
    """The number of items from the first that can be in one step: none is refused, and all are bare or none is."""
    positions, messages = set(map(type, map(_AFTER, items))), set(map(type, map(_MESSAGE, items)))
    if RefusedItem not in positions | messages and (MessageCount not in positions or len(positions) == 1):
        return len(items)
    for at, item in enumerate(items):
        after, message = map(type, item)
        if RefusedItem in (after, message) or (after is MessageCount) is not bare:
            return at
    raise AssertionError
