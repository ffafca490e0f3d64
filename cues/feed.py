"""Sources: a user's generator on one side, steps on the other.

The generator runs in a thread of its own (:meth:`Feed.run`), because nobody can know whether the
next ``yield`` comes at once or in an hour: what it has yielded is committed by the processor's
thread as soon as it is there, many at a time when it is fast, one at a time when it is slow. A fast
generator waits when :data:`AHEAD_MAX` messages are not committed yet. An async generator runs on an
event loop of its own, which goes on between its yields.

A step takes what was yielded, in the range (position before, position after]; so it has been run
already, and what is left of the protocol is the commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from cues import batch as batches
from cues import codec, events, faults, spread, tries
from cues.concurrency import Closed
from cues.delivery import Delivery, Outcome, Part
from cues.errors import CodecError, PositionRequired, ReturnError
from cues.failure import Failure, error_message, words
from cues.processor import position_count, wants_process

if TYPE_CHECKING:
    from cues.batch import Page
    from cues.eventloop import Loop
    from cues.ownership import ProcessorRow
    from cues.queue import Queue

AHEAD_MAX: Final = 2_000
"""Messages that a generator may be ahead of the commits."""
REPR_CHARACTERS_MAX: Final = 100_000
"""Of a message that cannot be written; what an error message holds of it."""
Item = tuple[Any, dict[str, Any]]
"""Position after the message (of bare messages: the :class:`Count` so far), and the message."""


class Count(int):
    """How many bare messages there were: no position, which may be an integer as well."""


class Feed:
    """Pulls one generator, and hands over what it yielded."""

    def __init__(self, source: SourceDelivery) -> None:
        self._source = source
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._waiting = False
        self._iterator: Iterator[Item] | None = None
        self._loop: Loop | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.closed = False
        self.pulled_at = time.monotonic()
        """When the generator yielded last, or was started."""

    # --- the generator's side ---

    def run(self) -> None:
        """Pull until the generator ends, fails, or the feed is closed."""
        try:
            for item in self._pulls():
                self._items.append(item)
                if self._waiting or len(self._items) > AHEAD_MAX:
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
            self._changed.notify_all()
            while len(self._items) > AHEAD_MAX and not self.closed:
                self._changed.wait(0.1)

    def pull(self, count: int) -> None:
        """Pull up to ``count`` messages in the calling thread (deterministic runs)."""
        if self._iterator is None:
            self._iterator = self._pulls()
        try:
            while len(self._items) < count:
                self._items.append(next(self._iterator))
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.error, self.ended = error, True

    def _pulls(self) -> Iterator[Item]:
        """Call the function and give (position, message) for all that it yields anew."""
        source = self._source
        position, count = source.position
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
                "yield position, message.",
            ) from None
        for item in iterator:
            self.pulled_at = time.monotonic()
            if type(item) is tuple and len(item) == 2:
                yield item
                continue
            if not isinstance(item, dict):
                raise ReturnError(
                    f"The source {source.node.name!r} yielded {type(item).__name__} ({str(item)[:60]!r}).",
                    "yield position, message, where the message is a dict.",
                )
            if resume is None:
                raise PositionRequired(
                    f"The source {source.node.name!r} yields messages without a position and does not say what"
                    " a restart means.",
                    "yield position, message; or resume='skip' (it yields the same messages again, those that"
                    " are committed are skipped: exactly-once) or resume='again' (it begins anew: at-least-once).",
                )
            if skip:
                skip -= 1
                continue
            count += 1
            yield Count(count), item

    def _from_loop(self, yielded: AsyncIterable[Any]) -> Iterator[Any]:
        from cues.eventloop import Loop

        self._loop = loop = Loop(f"cues {self._source.node.id} loop")
        iterator = aiter(yielded)
        try:
            while True:
                yield loop.run(anext(iterator))
        except (StopAsyncIteration, Closed):
            return
        finally:
            loop.close()

    # --- the processor's side ---

    def take(self, count: int) -> list[Item]:
        """Up to ``count`` messages that were yielded; never waits."""
        items = self._items
        taken: list[Item] = []
        for _ in range(min(count, len(items))):
            taken.append(items.popleft())
        if taken and len(items) + len(taken) > AHEAD_MAX:
            with self._changed:
                self._changed.notify_all()
        return taken

    def wait(self, timeout_s: float) -> None:
        """Until there is something to take, or the generator ended."""
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
        """Stop pulling at the next yield; what was yielded can still be taken."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let go of a generator that may never yield again; an async one is cancelled."""
        self.close()
        if self._loop is not None:
            self._loop.close()


class SourceDelivery(Delivery):
    """The delivery of a source that has a function."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.feed = Feed(self)
        self._failures = 0

    def close(self) -> None:
        self.feed.abandon()
        super().close()

    def adopt(self, row: ProcessorRow) -> None:
        """As of any delivery; what the generator has yielded beyond the row is dropped, and it begins anew there."""
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
        """Whether the generator ended and all of it is committed."""
        return self.feed.ended and self.feed.empty and self.feed.error is None

    def step(self) -> Outcome:
        """Commit what was yielded. Raises :class:`ProcessorStopped` when the generator failed."""
        if self._stop is not None:
            raise self._stopped(self._stop)
        error = self.feed.error  # first: what was yielded before it is there by now, and is committed
        items = self.feed.take(self.node.options.batch_size)
        if items:
            if faults.active:
                faults.point("take.after")
            parts, row, stop = self._source_parts(items)
            if parts:
                self._commit_parts(parts, row)
                self.counters.taken += sum(part.stop for part in parts)
                self._failures = 0
            if stop is not None:
                self._stop = stop
                raise self._stopped(stop)
            return "committed"
        if error is not None:
            raise self._stopped(Failure(error, self._failures + 1)) from error
        self.check_fence()
        return "idle"

    def again(self) -> float | None:
        """After a failure: seconds to wait before the function is called again, None when it is not.

        It is called with the position that is committed.
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
        wait_s = retry.wait_s(self._failures)
        self._emit(
            events.Retrying(
                self.node.id,
                f"attempt {self._failures} of {retry.attempts} failed ({type(error).__name__}: {words(error)});"
                f" again in {wait_s:g} s",
                logging.WARNING,
                attempt=self._failures,
                wait_s=wait_s,
            )
        )
        self.feed = Feed(self)
        return wait_s

    def _source_parts(self, items: list[Item]) -> tuple[list[Part], ProcessorRow, Failure | None]:
        """The step, cut at messages that cannot be written; what commits, the row, and why the source stops then."""
        parts: list[Part] = []
        position, count = self.position
        failure: Failure | None = None
        while items:
            bare = type(items[0][0]) is Count
            before = count if bare else position
            stop = len(items)
            if self.node.options.resume is not None:  # else there are no bare messages
                stop = next((i for i, item in enumerate(items) if (type(item[0]) is Count) is not bare), stop)
            while True:
                after = int(items[stop - 1][0]) if bare else items[stop - 1][0]
                try:
                    digest = self.hasher.digest([], ["source", before, after])
                except CodecError as error:  # of the position
                    return parts, self._at(position, count), Failure(error, 1)
                if failure is not None:
                    appends = [self._refused(items[0][1], failure, digest)]
                    break
                try:
                    appends = self._append([message for _, message in items[:stop]], digest)
                    break
                except Exception as error:  # CuesError, or what the function that gives the key has raised
                    stop = getattr(error, "offset", 0)
                    if not stop:
                        stop, failure = 1, Failure(error, 1)
                        if self.errors is None:
                            return parts, self._at(position, count), failure
            items = items[stop:]
            taking = tries.Taking((), (), (), source=(before, after))
            parts.append(Part(0, stop, digest, taking, failure, self._at_home(appends, digest), stop))
            failure = None
            if bare:
                count = after
            else:
                position = after
        return parts, self._at(position, count), None

    def _at(self, position: Any, count: int) -> ProcessorRow:
        return self._row._replace(source=codec.pack([position, count]))

    def _append(self, messages: list[dict[str, Any]], digest: bytes) -> list[tuple[Queue, list[Page]]]:
        (queue,) = self.outputs.values()
        if queue.spread:
            built = spread.build(queue, messages, queue.shares(messages), digest)
            return [(log, pages) for log, pages, _ in built]
        options = queue._options
        pages = batches.build(messages, options.max_message_bytes, digest, strips=options.strips)
        return [(queue, pages)]

    def _refused(self, message: Any, failure: Failure, digest: bytes) -> tuple[Queue, list[Page]]:
        """A message that cannot be written goes to the error queue as its ``repr``."""
        assert self.errors is not None
        shown = repr(message).encode("utf-8", "replace").decode()[:REPR_CHARACTERS_MAX]
        record = error_message(self.node, {self.node.name: [{"repr": shown}]}, failure)
        return self.errors, batches.build([record], batches.OWN_BYTES_MAX, digest, reserved=True)
