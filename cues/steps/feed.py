"""Sources: a thread pulls the user's generator, and steps commit the messages that it yields.

The generator runs in its own thread (:meth:`Feed.run`), because the next ``yield`` may come at once or in an hour. The
thread of the processor commits yielded messages as soon as it can: many at a time from a fast generator, one at a time
from a slow one. A fast generator waits when :data:`AHEAD_MAX` messages are not committed. An async generator runs on
its own event loop, which continues between its yields.

A step takes yielded messages in the range (position before, position after]. The function has run already, so only
the commit of the protocol is left.

A source may yield a table of pyarrow, polars or pandas in place of a message, or a list of messages. The rows of a
table are written as columns. Both are written under the position after all of them. A function with a method
``in_columns`` yields the same records from it, many at once: the engine calls it in place of the function.

A source that takes its position has a state too. Its changes between two yields are committed with the second one: the
position is one value of bounded size, and the state is as many rows as the source needs to know what it has read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from cues import codec, faults
from cues.errors import CodecError, PositionRequired, ReturnError
from cues.graphs.processor import position_count, wants_process
from cues.graphs.processor_rows import has_state, source_of, unpacked_source, with_source
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues.partitioners import is_watermark
from cues.queues.tables import is_table
from cues.records import batch as batches
from cues.records import columns
from cues.records.batch import SLASH, has_mark
from cues.records.provenance import Provenance
from cues.steps import outgoing, tries
from cues.steps.concurrency import RunnerClosed
from cues.steps.failure import Failure, error_message, retry_event, stopped_at
from cues.steps.outgoing import Packer
from cues.steps.part import Part, divided, divided_table
from cues.steps.results import Output, TableOutput
from cues.steps.state import Changes, Layer, StateTable
from cues.steps.stepper import Outcome, Stepper

if TYPE_CHECKING:
    from cues.graphs.processor_rows import ProcessorRow
    from cues.queues.queue import Queue
    from cues.records.batch import Page
    from cues.schemas import Schema
    from cues.steps.eventloop import EventLoop

AHEAD_MAX: Final = 2_000
"""Number of messages that a generator may be ahead of the commits."""
ROWS_AHEAD_MAX: Final = 50_000
"""The same for rows of tables; one table may be larger."""
_JOIN_S: Final = 0.2
"""Seconds that the end of a source waits for a generator, which may be in a call of any length."""
_INTERRUPTED_S: Final = 5.0
"""The same for a source that can be interrupted."""
REPR_CHARACTERS_MAX: Final = 100_000
"""Characters of a message that cannot be written, in its error message."""


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


class Changed:
    """A yielded message with the changes of the state that are committed with it."""

    __slots__ = ("body", "changes")

    def __init__(self, body: bytes | RefusedItem | Output, changes: Changes) -> None:
        self.body = body
        self.changes = changes


NO_MESSAGE: Final = b""
"""In place of a packed message: the position moves, and nothing is written."""

After = bytes | int | MessageCount | RefusedItem
"""The position after a message. It is packed unless it is an integer; for bare messages it is the count so far."""
Body = bytes | RefusedItem | Output | Changed
"""A yielded message, packed at once, because the generator may change it later; or several; or a table."""


class Feed:
    """Pulls one generator, and hands over the yielded messages."""

    def __init__(self, source: SourceStepper) -> None:
        self._source = source
        # Two lists, not one of pairs, which would take a tenth of the time. A message is there when both have it.
        self._afters: list[After] = []
        self._bodies: list[Body] = []
        self._changed = threading.Condition()
        self._awaited = False
        """True if a look at the feed is due: the processor waits for a message, or the feed is closed."""
        self._most = AHEAD_MAX
        self._rows_in = self._rows_out = 0
        """The rows of the tables that were yielded, and of those that were taken."""
        self.uniform = True
        """True if all items so far are messages that can be written, after positions of the generator."""
        self._iterator: Iterator[Any] | None = None
        """The iterator of the function, in deterministic runs."""
        self._before: Any = None
        """The position after the last item, packed unless it is an integer."""
        self._has_position = False
        self._count = self._skip = 0
        """The number of bare messages so far, and of those that are to be skipped."""
        output = source.output
        self._packer = Packer(output.core)
        self._schema: Schema | None = None
        self._loop: EventLoop | None = None
        self._table: StateTable | None = None
        """The state as the generator sees it: also with its changes that are not committed."""
        self._state: Layer | None = None
        self._uncommitted: deque[Changes] = deque()
        self.committed_changes = self._forgotten = 0
        """The number of changes that were committed, and of those of them that left :attr:`_uncommitted`."""
        self.ended = False
        self.answered = False
        """True if the generator has yielded, or waits: before that it is unknown whether there is something to take."""
        self.waits_for_new = False
        """True if the generator waits, because it has nothing more now."""
        self.error: BaseException | None = None
        self.closed = False
        self.thread: threading.Thread | None = None
        """The thread that pulls, if it is not that of the caller."""
        self.pulled_at = time.monotonic()
        """The time at which the last message was taken or skipped, or the generator was started."""

    # --- the generator's side ---

    def run(self) -> None:
        """Pull until the generator ends, fails, or the feed is closed."""
        try:
            self._pull_all()
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _pull_all(self) -> None:
        iterator = self._begin()
        while self._pull(iterator):
            self._hand_over()
            if self.closed:
                break

    def _hand_over(self) -> None:
        with self._changed:
            self._awaited = False  # it was told; until it runs, the next messages need not tell it again
            self._changed.notify_all()
            while self._is_full() and not self.closed:
                self._changed.wait(0.1)

    def _is_full(self) -> bool:
        """Return whether the generator is as far ahead as it may be."""
        return len(self._bodies) >= self._most or self._rows_in - self._rows_out >= ROWS_AHEAD_MAX

    def pull(self, count: int) -> None:
        """Pull up to ``count`` messages in the calling thread (deterministic runs)."""
        self._source.process.core.waits = False
        self._most = count
        try:
            if self._iterator is None:
                self._iterator = self._begin()
            while not self._is_full() and not self.ended:
                self.ended = not self._pull(self._iterator)
        except Exception as error:
            self.error, self.ended = error, True

    def _begin(self) -> Iterator[Any]:
        """Call the function; return an iterator over what it yields."""
        source = self._source
        options, fn = source.node.options, source.node.fn
        assert fn is not None
        fn = getattr(fn, "in_columns", fn)
        position, self._count = source.position
        self._before = position if type(position) is int else codec.pack(position)
        self._skip = self._count if options.resume == "skip" else 0
        self._schema = source.node.schemas.get("")
        arguments: list[Any] = [position] * position_count(fn)
        self._has_position = bool(arguments)
        has_process = wants_process(fn)
        if has_process:
            if self._has_position:
                self._table = StateTable(source.store, source.node.key)
                self._state = self._table.apart()
            source.process.core.use(self._state)
        yielded = fn(*arguments, **({"process": source.process} if has_process else {}))
        try:
            if isinstance(yielded, AsyncIterable):
                return self._from_loop(yielded)
            # Each _pull() asks the iterator for its iterator, and that of a user may then begin anew.
            return itertools.chain(iter(yielded))
        except TypeError:
            raise ReturnError(
                f"The source {source.node.name!r} returned {type(yielded).__name__}, which cannot be iterated.",
                "yield pairs of a position and a message.",
            ) from None

    def _pull(self, iterator: Iterator[Any]) -> bool:
        """Keep yielded items until a look at the feed is due. Return False at the end of the generator."""
        node, schema, packer = self._source.node, self._schema, self._packer.renew()
        resume, has_position = node.options.resume, self._has_position
        before, most = self._before, self._most
        afters, bodies = self._afters, self._bodies
        # Most messages are dicts of which only the size and the keys are checked.
        plain: Any = dict if schema is None and not packer.places else None
        most_bytes, pack = packer.limit_bytes, codec.thread_packer()
        state = self._state
        has_tables = False
        for item in iterator:
            if type(item) is tuple and len(item) == 2:
                if not has_position:
                    raise self._refused_position(item[0])
                after, message = item
                if type(after) is not int:
                    try:
                        after = codec.pack(after)
                    except CodecError as error:
                        self.uniform = False
                        afters.append(RefusedItem(error, ""))
                        bodies.append(NO_MESSAGE)
                        return False
                if after == before:
                    raise ReturnError(
                        f"The source {node.name!r} yielded the position {item[0]!r:.60} twice in a row: a"
                        " restart could not tell the messages apart, and they would have one delivery hash.",
                        "yield a position that changes with every message, such as (page, row).",
                    )
                before = after
            elif not isinstance(item, (dict, list, Output)) and schema is None and not is_table(item):
                raise ReturnError(
                    f"The source {node.name!r} yielded {type(item).__name__} ({str(item)[:60]!r}).",
                    "yield pairs of a position and a message, which is a dict.",
                )
            elif resume is None:
                raise PositionRequired(
                    f"The source {node.name!r} yields messages without a position and does not say what"
                    " a restart means.",
                    "yield position, message; or resume='skip' (it yields the same messages again, those that"
                    " are committed are skipped: exactly-once) or resume='again' (it begins anew: at-least-once).",
                )
            elif self._skip:
                self._skip -= 1
                self.answered = True
                self.pulled_at = time.monotonic()
                if self.closed:
                    return True
                continue
            else:
                self._count += 1
                after, message = MessageCount(self._count), item
                self.uniform = False
            body: Any = None
            if type(message) is plain:
                try:
                    body = pack(message)
                except Exception:
                    codec.thread_packer(renew=True)
            if body is None or len(body) > most_bytes or (SLASH in body and has_mark(body)):
                body = self._packed(after, message)
                pack = codec.thread_packer()  # another one after an error
                self.uniform &= type(body) is not RefusedItem and body is not NO_MESSAGE
                if isinstance(body, Output):
                    self._rows_in += _rows_of(body)
                    self.uniform, has_tables = False, True
            if state is not None and state.touched:
                body = self._with_changes(body)
            afters.append(after)
            bodies.append(body)
            if self._awaited or len(bodies) >= most or (has_tables and self._is_full()):
                self._before = before
                return True
        return False

    def _with_changes(self, body: bytes | RefusedItem | Output) -> Body:
        """Add the changes of the state since the last yield. Raises :class:`CodecError` for one that cannot be kept."""
        state, table = self._state, self._table
        assert state is not None and table is not None
        while self._forgotten < self.committed_changes:
            table.committed_ahead(self._uncommitted.popleft())
            self._forgotten += 1
        state.settled = {}
        state.settle()
        if not state.settled:
            return body
        self.uniform = False
        self._uncommitted.append(state.settled)
        return Changed(body, state.settled)

    def _refused_position(self, position: Any) -> PositionRequired:
        node = self._source.node
        return PositionRequired(
            f"The source {node.name!r} yielded the position {str(position)[:60]!r} and takes none,"
            " so the next start would yield the same messages again.",
            f"declare def {getattr(node.fn, '__name__', 'f')}(position): …, which continues after it; or yield"
            f" bare messages, as resume={node.options.resume!r} says.",
        )

    def _packed(self, after: Any, message: Any) -> bytes | RefusedItem | Output:
        """Check and pack a message that is not plain, or a list of messages; check and place a table."""
        packer = self._packer.renew()
        try:
            if isinstance(message, Exception):
                raise message
            if message is None and type(after) is not MessageCount:
                return NO_MESSAGE
            if type(message) is list or isinstance(message, Output) or is_table(message):
                output = self._several(message, packer)
                return output if _rows_of(output) or type(after) is MessageCount else NO_MESSAGE
            return packer.pack(self._checked(message))
        except Exception as error:  # CuesError, an error of the key function, or one that stands for a message
            return RefusedItem(error, repr(message).encode("utf-8", "replace").decode()[:REPR_CHARACTERS_MAX])

    def check(self, message: Any) -> Any:
        """Raise the error of a message, list or table that cannot be written; return what may be yielded in its place.

        In any thread: it has a packer of its own.
        """
        packer = Packer(self._source.output.core).renew()
        if type(message) is list or is_table(message):
            return self._several(message, packer)
        packer.pack(self._checked(message))
        return message

    def _several(self, given: Any, packer: Packer) -> Output:
        """Check and pack a list of messages; check and place a table. What :meth:`check` returned stays."""
        if isinstance(given, Output):
            return given
        if type(given) is list:
            return Output([packer.pack(self._checked(message)) for message in given])
        return TableOutput(*packer.table(self._checked_table(given)))

    def _checked(self, message: Any) -> Any:
        schema = self._schema
        return message if schema is None or is_watermark(message) else schema.written(message)

    def _checked_table(self, table: Any) -> Any:
        """Return a table of which each row fits the schema of the queue."""
        if self._schema is None:
            return table
        table = columns.checked(columns.table_of(table))
        for batch in table.to_batches():
            for row in columns.rows(batch):
                self._checked(row)
        return table

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

    def take(self, count: int) -> tuple[list[After], list[Body]]:
        """Return the positions after up to ``count`` yielded messages, and the messages; never waits.

        Tables are taken until their rows are ``count`` or more.
        """
        bodies = self._bodies[:count]
        if self._rows_in:
            bodies = bodies[: _end_of_rows(bodies, count)]
            self._rows_out += sum(map(_rows_of, bodies))
        afters = self._afters[: len(bodies)]
        if bodies:
            del self._bodies[: len(bodies)], self._afters[: len(bodies)]
            self.answered = True
            self.pulled_at = time.monotonic()
            if self._rows_in or len(bodies) + len(self._bodies) >= AHEAD_MAX:  # it may wait for room
                with self._changed:
                    self._changed.notify_all()
        return afters, bodies

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a message to take, or the generator has ended."""
        with self._changed:
            self._awaited = True
            try:
                if not self._bodies and not self.ended and not self.closed:
                    self._changed.wait(timeout_s)
            finally:
                self._awaited = self.closed

    @property
    def empty(self) -> bool:
        return not self._bodies

    def note_answer(self) -> None:
        """Note that the generator waits for something new."""
        self.answered = self.waits_for_new = True

    def close(self) -> None:
        """Stop pulling at the next yield; yielded messages can still be taken."""
        with self._changed:
            self.closed = self._awaited = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread, for a time: a process that ends while it is in native code, as of DuckDB, aborts.

        A function with ``interrupt()`` is interrupted: the method ends its call in native code from another thread.
        """
        thread = self.thread
        if thread is None or thread is threading.current_thread():
            return
        interrupt = getattr(self._source.node.fn, "interrupt", None)
        end = time.monotonic() + (_JOIN_S if interrupt is None else _INTERRUPTED_S)
        while thread.is_alive() and time.monotonic() < end:
            if interrupt is not None:
                interrupt()  # again and again: it may have been between two calls
            thread.join(_JOIN_S / 4)

    def abandon(self) -> None:
        """Abandon a generator that may never yield again; an async one is cancelled."""
        self.close()
        if self._loop is not None:
            self._loop.close()


class SourceStepper(Stepper):
    """The stepper of a source that has a function."""

    @override
    def _equip(self) -> None:
        self.feed = Feed(self)
        self.process.core.checked = lambda message: self.feed.check(message)
        self.process.core.answered = lambda: self.feed.note_answer()
        self._failures = 0
        self._outage_rule = self.node.outages
        self._has_state = has_state(source_of(self.fence.expected))

    @override
    def close(self) -> None:
        self.feed.abandon()
        self.feed.join()
        super().close()

    @override
    def adopt(self, row: ProcessorRow) -> None:
        """Take over the stored row. Drop messages yielded after its position; start the generator there again."""
        super().adopt(row)
        self._has_state = has_state(source_of(self.fence.expected))
        self.feed.abandon()
        self.feed = Feed(self)

    @property
    def position(self) -> tuple[Any, int]:
        """The committed position, and the count of bare messages committed."""
        source = source_of(self.fence.expected)
        if not source:
            return None, 0
        position, count, *_ = unpacked_source(source)
        return position, count

    def goes_on_after(self, position: Any) -> bool:
        """Return whether the generator is past a position, waits for something new, or has ended by itself."""
        feed = self.feed
        return self.position != position or feed.waits_for_new or (feed.ended and feed.error is None)

    @property
    def ended(self) -> bool:
        """True if the generator has ended, and all its messages are committed."""
        return self.feed.ended and self.feed.empty and self.feed.error is None

    @override
    def step(self) -> Outcome:
        """Commit the yielded messages. Raises :class:`ProcessorStopped` when the generator failed."""
        stop = self.committer.stop
        if stop is not None:
            raise stopped_at(self.node, stop)
        error = self.feed.error  # read first: then all messages yielded before the error are there, and are committed
        room = self.gate.room()
        if not room and not self.feed.empty:
            return self._wait_for_readers()
        if self.gate.noted:
            self.gate.clear()
        afters, bodies = self.feed.take(min(self.node.options.batch_size, room))
        if bodies:
            if faults.active:
                faults.point("take.after")
            if self.tracer is None:
                self._commit_yielded(afters, bodies)
            else:
                with self.tracer.step(self.committer, len(bodies)):
                    self._commit_yielded(afters, bodies)
            return "committed"
        if error is not None:
            failure = Failure(error, self._failures + 1, away=self._outage_rule.concerns(error))
            raise stopped_at(self.node, failure) from error
        self.check_fence()
        return "idle"

    def _commit_yielded(self, afters: list[After], bodies: list[Body]) -> None:
        changed: list[tuple[int, Changes]] = []
        if not self.feed.uniform:
            for at, body in enumerate(bodies):
                if type(body) is Changed:
                    changed.append((at, body.changes))
                    bodies[at] = body.body
        parts, row, stop = self._source_parts(afters, bodies, bool(changed))
        if parts:
            taken = sum(part.stop for part in parts)
            changed = [pair for pair in changed if pair[0] < taken]
            if changed or self.state.changed:
                self._keep([changes for _, changes in changed])
            self.committer.commit_parts(parts, row)
            self.feed.committed_changes += len(changed)
            committed = getattr(self.node.fn, "committed", None)
            if committed is not None:  # a source that acknowledges its messages elsewhere
                committed(self.position[0])
            count = sum(part.written for part in parts)
            self.counters.taken += count
            self.counters.sizes.add(count)
            self._failures = 0
        if stop is not None:
            self.committer.stop = stop
            raise stopped_at(self.node, stop)

    def _keep(self, changed: list[Changes]) -> None:
        """Make changes of the state part of the next commit, and of no other."""
        state = self.state
        state.forget()
        for changes in changed:
            for row in changes:
                state.packed(row)  # the commit deletes the pieces of rows that were read
            state.settle(changes)

    def again(self) -> float | None:
        """After a failure: seconds until the function is called again, or None if it is not.

        It is called with the committed position.
        """
        error, retry = self.feed.error, self.node.options.retry
        if (
            error is None
            or self.committer.stop is not None
            or not isinstance(error, retry.on)
            or self._failures + 1 >= retry.attempts
        ):
            return None
        if isinstance(error, (PositionRequired, ReturnError)):
            return None
        self._failures += 1
        self.counters.retries += 1
        wait_s = retry.wait_s(self._failures, error)
        self.emit(retry_event(self.node.id, self._failures, retry.attempts, error, wait_s))
        self.feed = Feed(self)
        return wait_s

    def _source_parts(
        self, afters: list[After], bodies: list[Body], changed: bool
    ) -> tuple[list[Part], bytes, Failure | None]:
        """Cut the step at messages that cannot be written: parts, the row, and the failure that stops the source."""
        parts: list[Part] = []
        position, count = self.position
        self._has_state |= changed
        start = 0
        while start < len(bodies):
            first, message = afters[start], bodies[start]
            if isinstance(first, RefusedItem):
                return parts, self._at(position, count), Failure(first.error, 1)
            bare = type(first) is MessageCount
            before = count if bare else position
            failure = None
            if isinstance(message, RefusedItem):
                failure = Failure(message.error, 1)
                if self.errors is None:
                    return parts, self._at(position, count), failure
                stop = start + 1
            else:
                stop = len(bodies) if self.feed.uniform else _end_of_run(afters, bodies, start)
            last = afters[stop - 1]
            after = int(last) if isinstance(last, int) else codec.unpack(cast(bytes, last))
            digest = self.builder.hasher.digest([], ["source", before, after])
            if isinstance(message, RefusedItem):
                appends = [self._refused(message, cast(Failure, failure), digest)]
                written = 1
            else:
                items = cast("list[bytes | Output]", bodies[start:stop])
                if self.feed.uniform:
                    appends, written = self._append(cast(list[bytes], items), digest), len(items)
                else:
                    appends, written = self._append_runs(items, digest)
            taking = tries.Taking((), (), (), source=(before, after))
            parts.append(Part(0, stop - start, digest, taking, failure, self.builder.at_home(appends, digest), written))
            start = stop
            if bare:
                count = after
            else:
                position = after
        return parts, self._at(position, count), None

    def _at(self, position: Any, count: int) -> bytes:
        return with_source(
            self.fence.seed,
            self.fence.expected,
            codec.pack([position, count, True] if self._has_state else [position, count]),
        )

    @property
    def output(self) -> Queue:
        """The queue of the source."""
        (queue,) = self.outputs.values()
        return queue

    def _append(self, messages: list[bytes], digest: bytes) -> list[tuple[Queue, list[Page]]]:
        queue = self.output
        return [
            (log, outgoing.build(items, queue.core.options.strips, digest, self._provenance(len(items))))
            for log, items, _ in divided(queue, Output(messages), 0)
        ]

    def _append_table(self, output: TableOutput, digest: bytes) -> list[tuple[Queue, list[Page]]]:
        queue, limit = self.output, batches.OWN_BYTES_MAX  # rows were measured when the table was yielded
        options = queue.core.options
        return [
            (
                log,
                batches.build_table(
                    rows, limit, digest, self._provenance(rows.num_rows), options.strips, options.compression
                ),
            )
            for log, rows in divided_table(queue, output)
        ]

    def _append_runs(self, bodies: list[bytes | Output], digest: bytes) -> tuple[list[tuple[Queue, list[Page]]], int]:
        """Return the pages of messages and tables in their order, and the number of messages."""
        pages: dict[str, tuple[Queue, list[Page]]] = {}
        written = 0
        for are_tables, run in itertools.groupby(bodies, lambda body: type(body) is TableOutput):
            some = list(run)
            if are_tables:
                appends = [append for each in some for append in self._append_table(cast(TableOutput, each), digest)]
                written += sum(map(_rows_of, some))
            else:
                messages: list[bytes] = []
                for each in some:
                    if isinstance(each, Output):
                        messages += each.items
                    elif each:  # not NO_MESSAGE
                        messages.append(each)
                appends = self._append(messages, digest) if messages else []
                written += len(messages)
            for log, more in appends:
                pages.setdefault(log.core.log.id, (log, []))[1].extend(more)
        return list(pages.values()), written

    def _provenance(self, count: int) -> Provenance | None:
        """The provenance of messages that a source yields: the trace of their step."""
        span = self.committer.span
        context = None if span is None else span.context
        return None if context is None else Provenance(count, {}, context)

    def _refused(self, refused: RefusedItem, failure: Failure, digest: bytes) -> tuple[Queue, list[Page]]:
        """The error message for a message that cannot be written, with its ``repr``."""
        assert self.errors is not None
        record = error_message(self.node, {self.node.name: [{"repr": refused.shown}]}, failure)
        return self.errors, batches.build([record], batches.OWN_BYTES_MAX, digest, reserved=True)


def _rows_of(body: Body) -> int:
    """The number of rows of a table, or of the messages of a list; 0 for a message."""
    body = body.body if type(body) is Changed else body
    if type(body) is TableOutput:
        return body.table.num_rows  # type: ignore[no-any-return]
    return len(body.items) if isinstance(body, Output) else 0


def _end_of_rows(bodies: list[Body], count: int) -> int:
    """The end of the first items that have ``count`` messages or more."""
    rows = 0
    for at, body in enumerate(bodies):
        if rows >= count:
            return at
        rows += _rows_of(body) or 1
    return len(bodies)


def _end_of_run(afters: list[After], bodies: list[Body], start: int) -> int:
    """The end of the messages from ``start`` on that can be in one step: none is refused, all are bare or none is."""
    bare = type(afters[start]) is MessageCount
    for at in range(start, len(bodies)):
        after = type(afters[at])
        if RefusedItem in (after, type(bodies[at])) or (after is MessageCount) is not bare:
            return at
    return len(bodies)
