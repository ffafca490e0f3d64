"""Step 3 of the protocol: call the function of a step, with retries.

:meth:`Runner.run` runs between *take* and *commit*. It calls the user's function for the messages that were taken and
returns :class:`Results`. It holds no transaction and writes nothing, so a step that dies here leaves only its
snapshot.

    Runner            this module:     the calls of a step, one at a time or several at once; retries, filters
    invocation        invocation.py:   the arguments of one call; the transaction of ``checkpoint=``
    ReturnedMessages  returned.py:     the returned messages, checked and packed
    Pace, Stride      pace.py:         the number of messages in a step

A message function is called once for each message. When the call returns, its messages are packed and its changes
of the state are kept. So a call that fails does not affect the other calls, and a later call changes nothing of an
earlier one. A batch function is called once, and all its messages succeed or fail together; the stepper may then take
them again in parts (halving.py).

With ``concurrency=n`` up to n calls run at once, in threads or on an event loop (`async def`). Each call has its own
view of the process and its own layer of the state. The results are put in the order of the messages, so the step
commits the same as with one call at a time.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cues import faults
from cues.base import clock, events
from cues.errors import CallTimedOut, Diverged, Fenced
from cues.graphs.options import BATCH_SIZE, TABLE_SIZE
from cues.graphs.processor import ByExpression, Filter, Node, filter_of, positional_order, wants_process
from cues.native import mypyc_attr
from cues.overrides import override
from cues.queues import tables
from cues.queues.tables import Returned, Rows
from cues.records import batch as batches
from cues.steps import concurrency
from cues.steps.calls import Calls, Interrupted, Sleep
from cues.steps.concurrency import Limited, Schedule, Threads, TimedOut
from cues.steps.failure import Failure, retry_event
from cues.steps.imperative import Imperative
from cues.steps.invocation import invocation, waiting
from cues.steps.outgoing import HasOptions, Packer
from cues.steps.pace import Pace, Stride
from cues.steps.process import Process, beside
from cues.steps.repeats import ONCE, Repeats, Wait, asks_to_repeat
from cues.steps.results import Output, Results, stops
from cues.steps.returned import Kept, ReturnedMessages
from cues.steps.state import Changes, Layer, StateTable
from cues.steps.taking import Taken
from cues.steps.typed_calls import TypedFunction, adapted

if TYPE_CHECKING:
    from cues.steps.eventloop import EventLoop


class StepAborted(Exception):
    """Raised in a call that the engine cannot make: the step is dropped, and ``error`` is raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_STOPS: Final = (Fenced, Diverged, StepAborted, Interrupted, concurrency.RunnerClosed)
"""Exceptions that abort the step: a target has another owner, Spark failed, or the graph is aborted. No message
failed."""


def _passes(filter: Filter | None, message: dict[str, Any]) -> bool:
    return message is not batches.ACKNOWLEDGEMENT and (filter is None or bool(filter(message)))


@mypyc_attr(allow_interpreted_subclasses=True)
class Runner(Calls):
    """Calls the function of one stream or sink."""

    packer: ClassVar[type[Packer]] = Packer
    keeps_tables: ClassVar[bool] = True
    """True: a table that the function returns is written as columns. False: its rows become messages."""

    def __init__(
        self,
        node: Node,
        process: Process,
        state: StateTable,
        sleep: Sleep,
        emit: Callable[[events.Event], None],
        counters: events.Counters,
        targets: Mapping[str, HasOptions],
        imperative: Imperative,
    ) -> None:
        """``targets``: the queues of the output bindings."""
        assert node.fn is not None
        self._node = node
        self._fn = node.fn
        self._process = process
        self._state = state
        self._layer = state.call
        self._imperative = imperative if node.imperative else None
        self._trouble = state.trouble
        for tailer in imperative.tailers.values():
            tailer.trouble = self._trouble
        self._paths = state.paths
        """The paths of the store, as its errors name it."""
        self._sleep = sleep
        self._emit = emit
        self._counters = counters
        self._retry = node.options.retry
        self._outage_rule = node.outages
        self._filters: dict[str, Filter | None] = {
            port.binding: filter_of(node.options, port.binding, node.fn) for port in node.inputs
        }
        self._filters_some = any(self._filters.values())
        self._filtered = self._filters_some
        """True if some messages of the step may be skipped: acknowledgements of transactions always are."""
        self._bindings = [port.binding for port in node.outputs]
        self._packers = {binding: self.packer(targets[binding]) for binding in self._bindings}
        self._renewed = list(self._packers.values())
        """The packers, which follow the options of their queues at each step."""
        self._returns_nothing = not self._packers and self._imperative is None
        self._returned = ReturnedMessages(node, self._packers, self._imperative)
        self._keep = self._returned.keep
        self._counting = threading.Lock()
        self._width = 1 if node.options.batch else node.options.concurrency
        self.pace = self._pace()
        self._by_columns: Callable[..., Any] | None = None
        """Calls the function with columns, if nothing of the processor needs messages one by one."""
        self._by_messages: Callable[..., Any] | None = None
        """The same with many messages; it yields the result of each."""
        self._stride = Stride(self.pace.bound_ns)
        self._threads = Threads(self._width, f"cues {node.id} call")
        self._limit_s = node.options.timeout_s
        self._singly = self._width == 1 and self._limit_s is None and not node.options.batch
        """True if messages are called one after another, by :meth:`_run_messages`."""
        self._loop: EventLoop | None = None
        if concurrency.is_async(node.fn):
            from cues.steps.eventloop import EventLoop

            self._loop = EventLoop(f"cues {node.id} loop")
            if self._width == 1 and (self._limit_s is None or node.options.batch):
                self._fn = waiting(node.fn, self._loop, self._limit_s)
        self.judged_as = node
        """The processor whose options say what a failure does: another one while it runs redriven messages."""
        self.errors_left = None
        self._limited: Limited | None = None
        """Calls plain functions that have ``timeout_s``."""
        if self._limit_s is not None and self._loop is None:
            self._limited = Limited(f"cues {node.id} call", self._limit_s)
        self._fn = adapted(node, self._fn, self.keeps_tables)
        self._typed = self._fn if isinstance(self._fn, TypedFunction) else None
        self._invoke = invocation(node, self._fn, self._returned.check_ran)
        # A target that keeps the index of its last message would count a failed message before it as done. So the
        # failure is committed before a later message is called.
        self._ends_at_failure = node.options.checkpoint is not None
        self._given_process = (
            wants_process(node.fn) and not node.imperative and node.mode != "join" and node.options.checkpoint is None
        )
        self._passed: frozenset[int] | None = None
        """The offsets of the messages of a step that pass the filter, if it was evaluated on columns."""
        needs_messages = (
            any(each is not None and not isinstance(each, ByExpression) for each in self._filters.values())
            or self._typed is not None
            or node.mode == "join"
            or node.options.key is not None
            or node.options.checkpoint is not None
            or node.imperative
            or node.at_most_once
        )
        if self._singly and type(self) is Runner and not needs_messages:
            self._by_columns = getattr(node.fn, "by_columns", None)
            if self._given_process:
                self._by_messages = getattr(node.fn, "by_messages", None)
        self._rows_bound = max(self.pace.most, TABLE_SIZE if node.options.batch_size == BATCH_SIZE else 0)
        if self._by_columns is not None:
            self.rows_max = self._rows_bound
        # The columns to map the function over, if a call needs only its messages.
        self._order: list[int] | None = None
        if not (wants_process(node.fn) or self._filtered or node.imperative):
            names_in = [port.binding for port in node.inputs]
            by_name = node.mode == "join" and self._typed is not None
            if not by_name:
                self._order = positional_order(node.fn, names_in) if node.mode == "join" else [0]
        self._only_input = self._order[0] if self._order is not None and len(self._order) == 1 else None
        """The place of the input whose message is the only argument of a call."""
        self._asks_process = self._order is None or not self._singly or node.options.checkpoint is not None
        """True if the function, or what calls it, may ask the process about the step."""

    def _pace(self) -> Pace:
        options = self._node.options
        size = TABLE_SIZE if self._node.takes_columns and options.batch_size == BATCH_SIZE else options.batch_size
        return Pace(
            size,
            None if self._node.kind == "frame" or options.linger_s else options.step_s,
            # Calls of one key run one after another: calls of others may be far ahead when the step is closed.
            small=bool(
                self._node.side_effects
                or self._node.at_most_once
                or options.batch
                or (self._width > 1 and options.key is not None)
            ),
            least=self._width,
            first=BATCH_SIZE if self._node.takes_columns else 1,
            fixed=bool(options.batch),
        )

    @override
    @property
    def abandoned(self) -> int:
        return 0 if self._limited is None else self._limited.abandoned

    def _timed_out(self) -> CallTimedOut:
        gone = "was cancelled" if self._limited is None else "continues in its thread, and its result is dropped"
        error = CallTimedOut(
            f"A call of {self._node.id} took longer than timeout_s={self._limit_s:g}; it {gone}.",
            "give the requests of the function a timeout of their own, or set a larger timeout_s=.",
            processor=self._node.id,
            timeout_s=self._limit_s,
        )
        if self._limited is not None:
            self._emit(events.Event(self._node.id, error.message, logging.WARNING))
        return error

    @override
    def run(self, taken: Taken, bounded: bool = False) -> Results:
        """Call the function for the taken messages. Raises :class:`Interrupted` when the graph is aborted.

        ``bounded``: close the step when its time is over, if it can be closed (``Results.closed``).
        """
        if self._asks_process:
            self._process.core.begin(taken)
        trouble = self._trouble
        trouble.error = None
        in_columns = False
        self._passed = None
        if self._typed is not None:
            self._typed.binding = taken.slices[0].binding
        self._filtered = self._filters_some or (not taken.bare and taken.acknowledged)
        self._returned.begin(None if taken.bare or self._returns_nothing else taken.heavy_provenance())
        for packer in self._renewed:
            if packer.options is not packer.queue.options:
                packer.renew()
        # Under at-most-once the positions have moved: messages left for the next step would be lost.
        self._stride.begin(bounded and not self._node.at_most_once)
        try:
            if self._singly:
                rows = taken.slices[0].messages
                if self._by_columns is None or type(rows) is not Rows:
                    results = self._run_messages(taken)
                else:
                    results, in_columns = self._run_rows(taken, rows, bounded)
            elif self._node.options.batch:
                results = self._run_batch(taken)
            else:
                results = self._run_at_once(taken)
            if self._trouble.error is not None:
                trouble.check(self._paths)
            if self._imperative is not None:
                results.writes = {b: Output(*written) for b, written in self._imperative.written().items()}
            if bounded and not in_columns and self.pace.most > 1:
                count = taken.count if results.closed is None else results.closed
                ended_ns = self._stride.looked_ns if self._singly else clock.monotonic_ns()
                self.pace.ran(count, ended_ns - self._stride.began_ns)
            return results
        except BaseException as error:
            self.forget()
            if isinstance(error, concurrency.RunnerClosed):
                raise Interrupted from None
            if isinstance(error, StepAborted):
                raise error.error from None
            raise
        finally:
            self._counters.in_flight = 0
            if self._asks_process:
                self._process.core.end()

    def forget(self) -> None:
        """Drop the changes that the calls of the step made: state, own tailers, own appenders."""
        self._state.forget()
        if self._imperative is not None:
            self._imperative.forget()

    def _discard(self) -> None:
        """Drop the changes of a call that failed."""
        self._layer.discard()
        if self._imperative is not None:
            self._imperative.discard()

    @override
    def close(self) -> None:
        """Close threads and the event loop. A call that still runs on the loop is cancelled."""
        self._threads.close()
        if self._limited is not None:
            self._limited.close()
        if self._loop is not None:
            self._loop.close()

    # --- rows of columns, in one call ---

    def _run_rows(self, taken: Taken, rows: Rows, bounded: bool) -> tuple[Results, bool]:
        """Call the function with the columns; if it refuses them, with one message after another. Return which.

        So that one message that needs a call of its own does not keep thousands of others from the call with columns,
        a refusal halves the number of rows of the next steps, and closes this one after some messages.
        """
        try:
            outputs = self._call_columns(rows, taken.slices[0].binding) if self._returned.provenance is None else None
        except _STOPS:
            raise
        except Exception:
            outputs = None
        if outputs is not None:
            self.rows_max = min(2 * self.rows_max, self._rows_bound)
            return Results(outputs, {}, taken.count), True
        self._discard()
        few = self.pace.count
        closes = bounded and few < taken.count
        if closes:
            self.rows_max = max(few, taken.count // 2)
            taken = taken.before(few)
        piece = taken.slices[0]
        piece.messages = piece.messages.messages()
        results = self._run_messages(taken)
        if closes and results.closed is None:
            results.closed = few
        return results, False

    def _call_columns(self, rows: Rows, binding: str) -> dict[str, Output] | None:
        """Return the outputs of the call with columns; None if it refused them."""
        assert self._by_columns is not None
        columns = rows.columns()
        if columns is None:
            return None
        offsets: list[int] | None = None
        passes = self._filters[binding]
        if isinstance(passes, ByExpression):
            found = passes.chosen(columns)
            if found is None:
                return None
            offsets, columns = found
            self._passed = frozenset(offsets)
            if not offsets:
                return {}
        began = self._begin_call()
        try:
            faults.point("function.before")
            self._process.core.offset = 0
            result = self._by_columns(columns, self._process)
            faults.point("function.after")
        finally:
            self._end_call(began)
        if result is None:
            return None
        outputs = self._returned.keep_columns(result, offsets)
        self._layer.settle()
        return outputs

    # --- message functions, one call at a time ---

    def _run_messages(self, taken: Taken) -> Results:
        results: list[Kept] = []
        failures: dict[int, Failure] = {}
        counters, stride, count = self._counters, self._stride, taken.count
        counters.in_flight = 1
        full = False
        done = 0
        while done < count:
            before, done = done, done + stride.calls
            if done > count:
                done = count
            try:
                self._run_from(taken, results, before, done)
            except _STOPS:
                raise
            except Exception as error:
                offset = len(results)
                self._discard()
                outcome = self._again(taken, offset, error)
                if isinstance(outcome, Failure):
                    failures[offset] = outcome
                    if stops(self.judged_as, outcome):
                        break  # so no later message is called
                    full = len(failures) == self.errors_left
                    outcome = None
                results.append(outcome)
                done = offset + 1
            over = stride.look() or full or (self._ends_at_failure and bool(failures))
            counters.calls += done - before
            counters.calling_ns += stride.spent_ns
            if over and done < count:
                return self._returned.collect(results, failures, closed=done)
        return self._returned.collect(results, failures)

    def _run_from(self, taken: Taken, results: list[Kept], start: int, stop: int) -> None:
        """Call the function for the messages ``start``, which is ``len(results)``, to ``stop``; ends at an error."""
        if self._order is not None and not self._filtered and self._returned.provenance is None and not faults.active:
            if stop - start > 1:
                self._run_all(taken, results, stop)
                return
            slices = taken.slices
            try:
                if self._only_input is not None:
                    result = self._fn(slices[self._only_input].messages[start])
                else:
                    result = self._fn(*[slices[place].messages[start] for place in self._order])
            except StopIteration:
                raise self._stopped_iteration() from None
            results.append(self._keep(result, start))
            return
        if self._given_process and not self._filtered and not faults.active:
            together = self._by_messages is not None and stop - start > 1 and self._returned.provenance is None
            if together and self._run_together(taken, results, stop):
                return
            self._run_with_process(taken.slices[0].messages, results, stop)
            return
        for offset in range(start, stop):
            results.append(self._call(taken, offset, [s.messages[offset] for s in taken.slices]))

    def _run_all(self, taken: Taken, results: list[Kept], stop: int) -> None:
        """Map a function that is given messages and nothing else over the messages up to ``stop``."""
        assert self._order is not None
        columns = [taken.slices[place].messages for place in self._order]
        if results or stop < taken.count:
            columns = [column[len(results) : stop] for column in columns]
        careful = self._returned.careful
        try:
            self._returned.keep_all(results, map(self._fn, *columns))
        except Exception:
            if self._returned.careful and not careful:  # later calls may have changed their messages
                for offset in range(len(results) + 1, stop):
                    taken.restored(offset)
            raise
        if len(results) < stop:
            # map() treats a StopIteration of the function as its own end (as generators did before PEP 479).
            raise self._stopped_iteration()

    def _stopped_iteration(self) -> RuntimeError:
        return RuntimeError(f"{self._node.id} raised StopIteration")

    def _run_together(self, taken: Taken, results: list[Kept], stop: int) -> bool:
        """Call the function once for the messages up to ``stop``. Return False, and change nothing, if it failed."""
        assert self._by_messages is not None
        start = len(results)
        self._process.core.offset = start
        try:
            made = self._by_messages(taken.slices[0].messages[start:stop], self._process)
            kept = [None if each is None else self._keep(each, offset) for offset, each in enumerate(made, start)]
            self._layer.settle()
        except _STOPS:
            raise
        except Exception:
            self._discard()
            for offset in range(start, stop):
                taken.restored(offset)  # functions of the user for times and keys may have changed messages
            return False
        results += kept
        return True

    def _run_with_process(self, messages: list[Any], results: list[Kept], stop: int) -> None:
        """Call a function that is given one message and the process, for the messages up to ``stop``."""
        fn, process, layer, keep = self._fn, self._process, self._layer, self._keep
        core = process.core
        for offset in range(len(results), stop):
            core.offset = offset
            kept = keep(fn(messages[offset], process=process), offset)
            if layer.touched:
                layer.settle()
            results.append(kept)

    def _call(self, taken: Taken, offset: int, messages: list[Any]) -> Kept:
        if self._filtered:
            messages = self._passing(taken, messages, offset)
            if not messages:
                return None
        self._process.core.offset = offset
        if faults.active:
            faults.point("function.before")
        result = self._invoke(taken, messages, self._process)
        if faults.active:
            faults.point("function.after")
        kept = self._keep(result, offset)
        if self._layer.touched:
            self._layer.settle()
        if self._imperative is not None:
            self._imperative.settle(offset)
        return kept

    def _passing(self, taken: Taken, messages: list[Any], offset: int) -> list[Any]:
        """Replace the messages that a filter drops by None; return [] when all are dropped."""
        if self._passed is not None:
            return messages if offset in self._passed else []
        passed = []
        for piece, message in zip(taken.slices, messages):
            passes = self._filters[piece.binding]
            passed.append(message if _passes(passes, message) else None)
        return [] if all(message is None for message in passed) else passed

    def _again(self, taken: Taken, offset: int, error: Exception) -> Any:
        """Retry a message whose call failed. Return its result, or the Failure after the last attempt."""
        repeats = Repeats(self._retry)
        while (wait := self._next(repeats, error)) is not None:
            self._wait(wait, error)
            try:
                return self._call(taken, offset, taken.restored(offset))
            except _STOPS:
                raise
            except Exception as next_error:
                self._discard()
                error = next_error
        return self._failure(error, repeats.count)

    def _failure(self, error: Exception, attempts: int) -> Failure:
        """Return the failure of a message. Raises an error of the store, which is not a fault of a message."""
        self._trouble.check(self._paths, error)
        return Failure(error, attempts, away=self._outage_rule.concerns(error))

    def _next(self, repeats: Repeats, error: Exception) -> Wait | None:
        self._trouble.check(self._paths, error)
        if not asks_to_repeat(error) and self._outage_rule.concerns(error):
            return None  # the unit waits, outside of the step
        return repeats.after(error)

    def _wait(self, wait: Wait, error: Exception) -> None:
        with self._counting:
            self._counters.retries += 1
        self._emit(retry_event(self._node.id, wait.failures, wait.attempts, error, wait.seconds))
        if self._sleep(wait.seconds):
            raise Interrupted from error

    # --- message functions, several calls at once ---

    def _run_at_once(self, taken: Taken) -> Results:
        """Call the function in up to ``concurrency`` callers, then collect the results in the order of the messages."""
        calls = _Calls(taken, [self._process.core.lane(offset) for offset in range(taken.count)], self._stride.look)
        callers = min(self._width, calls.schedule.width)
        if self._loop is not None:
            self._loop.run(self._on_loop(self._loop, calls, callers))
        elif self._width == 1:
            concurrency.step_through(self._caller(calls))
        else:
            self._in_threads(calls, callers)
        if calls.schedule.fatal is not None:
            raise calls.schedule.fatal
        closed = calls.schedule.closed
        outcomes = calls.outcomes if closed is None else calls.outcomes[:closed]
        failures = {offset: outcome for offset, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        first = min((at for at, failure in failures.items() if stops(self.judged_as, failure)), default=None)
        if first is not None:
            # The processor stops before it. Results of later messages are dropped.
            failures = {at: failure for at, failure in failures.items() if at <= first}
            outcomes = outcomes[:first]
            self._state.only(calls.changes[:first])
        elif self.errors_left is not None and len(failures) >= self.errors_left:
            # As if the step had ended with the last failure that the limit allows.
            closed = sorted(failures)[self.errors_left - 1] + 1
            failures = {at: failure for at, failure in failures.items() if at < closed}
            outcomes = outcomes[:closed]
            self._state.only(calls.changes[:closed])
        return self._returned.collect([None if isinstance(o, Failure) else o for o in outcomes], failures, closed)

    def _in_threads(self, calls: _Calls, callers: int) -> None:
        running = [self._threads.submit(lambda: concurrency.step_through(self._caller(calls))) for _ in range(callers)]
        try:
            for job in running:
                job.result()
        except BaseException as error:  # a Ctrl-C in the waiting thread
            calls.schedule.stop(error)
            raise

    async def _on_loop(self, loop: EventLoop, calls: _Calls, callers: int) -> None:
        await loop.all_of([self._caller(calls) for _ in range(callers)], lambda: calls.schedule.fatal is not None)

    async def _caller(self, calls: _Calls) -> None:
        """Call the function for one message after another until none is left; store each result at its offset."""
        offset: int | None = None
        try:
            while (offset := calls.schedule.take(offset)) is not None:
                began = self._begin_call()
                try:
                    outcome, calls.changes[offset] = await self._called(calls, offset)
                finally:
                    self._end_call(began)
                calls.outcomes[offset] = outcome
                if isinstance(outcome, Failure) and stops(self.judged_as, outcome):
                    calls.schedule.cut(offset)
        except BaseException as error:
            calls.schedule.stop(error)

    def _begin_call(self) -> int:
        with self._counting:
            self._counters.in_flight += 1
        return clock.monotonic_ns()

    def _end_call(self, began: int) -> None:
        spent = clock.monotonic_ns() - began
        with self._counting:
            self._counters.in_flight -= 1
            self._counters.calls += 1
            self._counters.calling_ns += spent

    async def _called(self, calls: _Calls, offset: int) -> tuple[Kept | Failure, Changes]:
        """Return the result of one message, after retries; the counterpart of :meth:`_call` and :meth:`_again`."""
        taken = calls.taken
        messages = [s.messages[offset] for s in taken.slices]
        error: Exception
        repeats = Repeats(self._retry)
        while True:
            # Each attempt has its own layer: an attempt that timed out may still use its layer.
            layer = self._layer_of(calls.lanes[offset])
            process = beside(self._process, offset, layer)
            try:
                if self._filtered:
                    messages = self._passing(taken, messages, offset)
                    if not messages:
                        return None, {}
                if isinstance(self._node.options.key, str):
                    process.core.key_at(offset)  # a message without the field has no order relative to those with it
                if faults.active:
                    faults.point("function.before")
                result = await self._in_time(taken, messages, process)
                if faults.active:
                    faults.point("function.after")
                kept = self._keep(result, offset)
                layer.settle()
                return kept, layer.settled
            except _STOPS:
                raise
            except Exception as failed:
                layer.discard()
                error = failed
            finally:
                process.core.end()
            if (wait := self._next(repeats, error)) is None:
                return self._failure(error, repeats.count), {}
            if self._loop is None:
                self._wait(wait, error)
            else:
                await self._loop.in_thread(self._threads, functools.partial(self._wait, wait, error))
            messages = taken.restored(offset)

    def _layer_of(self, lane: Hashable) -> Layer:
        if self._width == 1:
            return self._state.apart()
        return self._state.layer(lane if isinstance(lane, bytes) else None)

    async def _in_time(self, taken: Taken, messages: list[Any], process: Process) -> Any:
        """Call the function, for at most ``timeout_s``. Raises :class:`CallTimedOut`."""
        try:
            if self._limited is not None:
                return self._limited.call(lambda: self._invoke(taken, messages, process))
            result = self._invoke(taken, messages, process)
            if self._loop is None:
                return result
            if self._limit_s is None:
                return await self._loop.awaited(result)
            return await self._loop.within(result, self._limit_s)
        except TimedOut:
            raise self._timed_out() from None
        except StopIteration as end:  # compiled, it would be the end of this coroutine
            raise RuntimeError(f"{self._node.id} raised StopIteration") from end

    # --- batch functions ---

    def _run_batch(self, taken: Taken) -> Results:
        error: Exception
        repeats = Repeats(ONCE if taken.halved and taken.count > 1 else self._retry)
        while True:
            process, layer = self._process, self._layer
            if self._limited is not None:
                layer = self._state.apart()
                process = beside(process, 0, layer)
            try:
                last = taken.count - 1
                began = self._begin_call()
                try:
                    result = self._call_batch(taken, process)
                finally:
                    self._end_call(began)
                kept = self._keep(result, last)
                layer.settle()
                if self._imperative is not None:
                    self._imperative.settle(last)
                if type(result) is Returned:
                    return Results(kept, {}, taken.count)
                return self._returned.collect([None] * last + [kept], {})
            except _STOPS:
                raise
            except Exception as failed:
                layer.discard()
                self._discard()
                error = failed
                if (wait := self._next(repeats, error)) is None:
                    break
                self._wait(wait, error)
                taken.anew()
        return Results({b: Output([]) for b in self._bindings}, {0: self._failure(error, repeats.count)})

    def _call_batch(self, taken: Taken, process: Process) -> Any:
        columns: list[Any] = [s.messages for s in taken.slices]
        passes = self._filters[taken.slices[0].binding]
        if isinstance(passes, ByExpression) and not taken.acknowledged:
            chosen, rows = tables.chosen(columns[0], passes.expression)
            if not chosen:
                return None
            columns, process.core.chosen = [rows], chosen
        elif self._filtered:
            columns = []
            for piece in taken.slices:
                passes = self._filters[piece.binding]
                columns.append([m if _passes(passes, m) else None for m in piece.messages])
            chosen = [o for o in range(taken.count) if any(column[o] is not None for column in columns)]
            if not chosen:
                return None
            columns = [[column[o] for o in chosen] for column in columns]
            process.core.chosen = chosen
        faults.point("function.before")
        try:
            if self._limited is None:
                result = self._invoke(taken, columns, process)
            else:
                result = self._limited.call(lambda: self._invoke(taken, columns, process))
        except TimedOut:
            raise self._timed_out() from None
        except StopIteration as end:  # compiled, it would be the end of this coroutine
            raise RuntimeError(f"{self._node.id} raised StopIteration") from end
        faults.point("function.after")
        return result


class _Calls:
    """The concurrent calls of a step and their results, by offset."""

    def __init__(self, taken: Taken, lanes: list[Hashable], over: Callable[[], bool]) -> None:
        self.taken = taken
        self.lanes = lanes
        self.schedule = Schedule(lanes, over)
        self.outcomes: list[Kept | Failure] = [None] * taken.count
        """The packed result of each call, or its Failure."""
        self.changes: list[Changes] = [{}] * taken.count
        """The changes of the state by each call."""
