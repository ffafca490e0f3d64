"""Running a step's function: calls, retries, and what came of each message.

Between *take* and *commit* stands this: :meth:`Runner.run` calls the user's function over the
messages that were taken and returns :class:`Results`. It holds no transaction and writes nothing,
so a step that dies here leaves no trace but its snapshot.

A message function is called once a message; what it returned, and what it did to the state, is
settled message by message, so one that fails takes nothing of the others with it. A batch function
is called once, and its range succeeds or fails as a whole.

With ``concurrency=n`` up to n calls run at once, in threads, or on an event loop (`async def`), each
with a view of the process and a layer of the state of its own. What came of them is put in the order of
the messages, so the step commits what it would have committed with one call at a time.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from cues import batch as batches
from cues import concurrency, events, faults
from cues.concurrency import Schedule, Threads
from cues.errors import Diverged, Fenced, ReturnError
from cues.failure import Failure, short
from cues.imperative import Imperative
from cues.options import QueueOptions
from cues.process import Process
from cues.processor import Filter, Function, Node, Target, filter_of, positional_order, wants_process
from cues.results import Output, Results
from cues.state import Changes, Layer, Table
from cues.taking import Taken

if TYPE_CHECKING:
    from cues.eventloop import Loop


class Interrupted(Exception):
    """The graph is being aborted: drop the step."""


Pause = Callable[[float], bool]
"""Sleeps so many seconds; True when the graph was aborted meanwhile."""

_NOTHING: Final = object()
"""The result of a message that the filters let pass by."""

_STOPS: Final = (Fenced, Diverged, Interrupted, concurrency.Closed)
"""Errors of a call that are no failure of its message: a target knows another owner, or the graph is aborted."""


def _passes(filter: Filter | None, message: dict[str, Any]) -> bool:
    return message is not batches.ACKNOWLEDGEMENT and (filter is None or bool(filter(message)))


class Runner:
    """Calls the function of one stream or sink."""

    def __init__(
        self,
        node: Node,
        process: Process,
        state: Table,
        pause: Pause,
        emit: Callable[[events.Event], None],
        counters: events.Counters,
        options_of: Callable[[str], QueueOptions],
        imperative: Imperative,
    ) -> None:
        """``options_of`` gives the options of the queue behind an output binding."""
        assert node.fn is not None
        self._node = node
        self._fn = node.fn
        self._process = process
        self._state = state
        self._layer = state.call
        self._imperative = imperative if node.imperative else None
        self._pause = pause
        self._emit = emit
        self._counters = counters
        self._options_of = options_of
        self._retry = node.options.retry
        self._filters: dict[str, Filter | None] = {
            port.binding: filter_of(node.options, port.binding) for port in node.inputs
        }
        self._filters_some = any(self._filters.values())
        self._filtered = self._filters_some
        """Whether messages of the step may be passed by: acknowledgements of transactions always are."""
        # Outputs of a function whose effects must not be repeated, or lost with others', are
        # encoded as soon as it returns: an output that cannot be encoded is then its own failure.
        self._eager = node.imperative or ((node.side_effects or node.at_most_once) and bool(node.outputs))
        self._bindings = [port.binding for port in node.outputs]
        self.step_messages = node.options.batch_size
        """Most messages of one step; of a message function it changes nothing but the speed."""
        self._retrying = threading.Lock()
        self._width = 1 if node.options.batch else node.options.concurrency
        self._threads = Threads(self._width, f"cues {node.id} call")
        self._loop: Loop | None = None
        if concurrency.is_async(node.fn):
            from cues.eventloop import Loop

            self._loop = Loop(f"cues {node.id} loop")
            if self._width == 1:
                self._fn = _as_plain(node.fn, self._loop)
        self._invoke = self._way_of_calling()
        # The columns to map the function over, where a call needs nothing but its messages.
        self._order: list[int] | None = None
        if not (wants_process(node.fn) or self._filtered or self._eager):
            names_in = [port.binding for port in node.inputs]
            self._order = positional_order(node.fn, names_in) if node.mode == "join" else [0]

    def _way_of_calling(self) -> Callable[[Taken, list[Any], Process], Any]:
        """Calls the function with what each slice gives it: a message, or the list of a batch function."""
        if self._node.options.checkpoint is not None:
            return self._in_transaction(self._node.options.checkpoint)
        return self._plainly()

    def _in_transaction(self, target: Target) -> Callable[[Taken, list[Any], Process], Any]:
        """Calls it in a transaction of the target with what is new to it, if anything is."""
        call = self._plainly()

        def in_transaction(taken: Taken, given: list[Any], process: Process) -> Any:
            before = process._chosen
            with target.transaction(process) as transaction:
                known = transaction.known
                if known:
                    if not self._node.options.batch:
                        return None
                    chosen = process._chosen if process._chosen is not None else range(taken.count)
                    fresh = [place for place, offset in enumerate(chosen) if offset >= known]
                    if not fresh:
                        return None
                    process._chosen = [chosen[place] for place in fresh]
                    given = [[column[place] for place in fresh] for column in given]
                process._connection = transaction.connection
                try:
                    return call(taken, given, process)
                finally:
                    process._connection, process._chosen = None, before

        return in_transaction

    def _plainly(self) -> Callable[[Taken, list[Any], Process], Any]:
        fn = self._fn
        process_too = wants_process(self._node.fn)  # type: ignore[arg-type]

        def with_bindings(taken: Taken, given: list[Any], process: Process) -> Any:
            arguments = {piece.binding: one for piece, one in zip(taken.slices, given)}
            return fn(**arguments, process=process) if process_too else fn(**arguments)

        if self._node.mode == "join":
            return with_bindings
        if process_too:
            return lambda taken, given, process: fn(given[0], process=process)
        return lambda taken, given, process: fn(given[0])

    def run(self, taken: Taken) -> Results:
        """Call the function over what was taken. Raises :class:`Interrupted` when the graph is aborted."""
        self._process.begin(taken)
        self._filtered = self._filters_some or taken.acknowledged
        try:
            if self._node.options.batch:
                results = self._run_batch(taken)
            else:
                results = self._run_messages(taken) if self._width == 1 else self._run_at_once(taken)
            if self._imperative is not None:
                results.writes = {b: Output(*written) for b, written in self._imperative.written().items()}
            return results
        except BaseException as error:
            self.forget()
            if isinstance(error, concurrency.Closed):
                raise Interrupted from None
            raise
        finally:
            self._process.end()

    def forget(self) -> None:
        """The step is void: drop what its calls did to the state and to what they read and write by themselves."""
        self._state.forget()
        if self._imperative is not None:
            self._imperative.forget()

    def _discard(self) -> None:
        """The call failed: drop what it did."""
        self._layer.discard()
        if self._imperative is not None:
            self._imperative.discard()

    def close(self) -> None:
        """Let threads and the event loop go; a call that still runs on the loop is cancelled."""
        self._threads.close()
        if self._loop is not None:
            self._loop.close()

    # --- message functions, one call at a time ---

    def _run_messages(self, taken: Taken) -> Results:
        results: list[Any] = []
        failures: dict[int, Failure] = {}
        count = taken.count
        while len(results) < count:
            try:
                self._run_from(taken, results)
            except _STOPS:
                raise
            except Exception as error:
                offset = len(results)
                self._discard()
                outcome = self._again(taken, offset, error)
                if isinstance(outcome, Failure):
                    failures[offset] = outcome
                    if self._node.errors is None or outcome.stops:
                        break  # the processor stops in front of it, so nothing behind it is run
                    outcome = _NOTHING
                results.append(outcome)
        return self._collect(results, failures)

    def _run_from(self, taken: Taken, results: list[Any]) -> None:
        """Call the function for the messages from ``len(results)`` on; stops at the first error."""
        if self._order is not None and not self._filtered and not faults.active:
            columns = [taken.slices[place].messages for place in self._order]
            if results:
                columns = [column[len(results) :] for column in columns]
            results.extend(map(self._fn, *columns))  # keeps what was returned before an error
            if len(results) < taken.count:
                # map() takes it for its own end; nobody else would hear of it (as in generators, PEP 479).
                raise RuntimeError(f"{self._node.id} raised StopIteration")
            return
        for offset in range(len(results), taken.count):
            results.append(self._call(taken, offset, [s.messages[offset] for s in taken.slices]))

    def _call(self, taken: Taken, offset: int, messages: list[Any]) -> Any:
        if self._filtered:
            messages = self._passing(taken, messages)
            if not messages:
                return _NOTHING
        self._process._offset = offset
        if faults.active:
            faults.point("function.before")
        result = self._invoke(taken, messages, self._process)
        if faults.active:
            faults.point("function.after")
        touched = self._layer.touched
        if touched or self._eager:
            result = self._encoded(result)
            if touched:
                self._layer.settle()
            if self._imperative is not None:
                self._imperative.settle(offset)
        return result

    def _passing(self, taken: Taken, messages: list[Any]) -> list[Any]:
        """The messages, None in the place of those that the filters stop; empty when they stop all."""
        passed = []
        for piece, message in zip(taken.slices, messages):
            passes = self._filters[piece.binding]
            passed.append(message if _passes(passes, message) else None)
        return [] if all(message is None for message in passed) else passed

    def _again(self, taken: Taken, offset: int, error: Exception) -> Any:
        """Retry a message whose call failed; its result, or the Failure when all attempts are used up."""
        for attempt in range(1, self._retry.attempts):
            if not isinstance(error, self._retry.on):
                break
            self._wait(attempt, error)
            try:
                return self._call(taken, offset, taken.restored(offset))
            except _STOPS:
                raise
            except Exception as next_error:
                self._discard()
                error = next_error
        else:
            attempt = self._retry.attempts
        return Failure(error, attempt)

    def _wait(self, attempt: int, error: Exception) -> None:
        wait_s = self._retry.wait_s(attempt)
        with self._retrying:
            self._counters.retries += 1
        self._emit(
            events.Retrying(
                self._node.id,
                f"attempt {attempt} of {self._retry.attempts} failed ({short(error)}); again in {wait_s:g} s",
                30,
                attempt=attempt,
                wait_s=wait_s,
            )
        )
        if self._pause(wait_s):
            raise Interrupted from error

    # --- message functions, several calls at once ---

    def _run_at_once(self, taken: Taken) -> Results:
        """Call for the messages in up to ``concurrency`` callers, then look at what came of them in order."""
        calls = _Calls(taken, [self._process.lane(offset) for offset in range(taken.count)])
        callers = min(self._width, calls.schedule.width)
        if self._loop is not None:
            self._loop.run(self._on_loop(self._loop, calls, callers))
        else:
            self._in_threads(calls, callers)
        if calls.schedule.fatal is not None:
            raise calls.schedule.fatal
        outcomes = calls.outcomes
        failures = {offset: outcome for offset, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        if failures and self._node.errors is None:
            # The processor stops in front of the first; what ran behind it already is dropped.
            first = min(failures)
            failures = {first: failures[first]}
            outcomes = outcomes[:first]
            self._state.only(calls.changes[:first])
        return self._collect([_NOTHING if isinstance(o, Failure) else o for o in outcomes], failures)

    def _in_threads(self, calls: _Calls, callers: int) -> None:
        running = [self._threads.submit(lambda: concurrency.step_through(self._caller(calls))) for _ in range(callers)]
        try:
            for job in running:
                job.result()
        except BaseException as error:  # a Ctrl-C that reached the thread that waits
            calls.schedule.stop(error)
            raise

    async def _on_loop(self, loop: Loop, calls: _Calls, callers: int) -> None:
        await loop.all_of([self._caller(calls) for _ in range(callers)], lambda: calls.schedule.fatal is not None)

    async def _caller(self, calls: _Calls) -> None:
        """Call for one message after another until none is left; put what came of each in its place."""
        offset: int | None = None
        try:
            while (offset := calls.schedule.take(offset)) is not None:
                lane = calls.lanes[offset]
                layer = self._state.layer(lane if isinstance(lane, bytes) else None)
                process = self._process.beside(offset, layer)
                try:
                    outcome = await self._called(calls.taken, offset, process, layer)
                finally:
                    process.end()
                calls.outcomes[offset] = outcome
                calls.changes[offset] = layer.settled
                if isinstance(outcome, Failure) and self._node.errors is None:
                    calls.schedule.cut(offset)
        except BaseException as error:
            calls.schedule.stop(error)

    async def _called(self, taken: Taken, offset: int, process: Process, layer: Layer) -> Any:
        """What came of one message, retries included; the same as :meth:`_call` and :meth:`_again`."""
        messages = [s.messages[offset] for s in taken.slices]
        error: Exception
        for attempt in itertools.count(1):
            try:
                if self._filtered:
                    messages = self._passing(taken, messages)
                    if not messages:
                        return _NOTHING
                if faults.active:
                    faults.point("function.before")
                result = self._invoke(taken, messages, process)
                if self._loop is not None:
                    result = await self._loop.awaited(result)
                if faults.active:
                    faults.point("function.after")
                if layer.touched or self._eager:
                    result = self._encoded(result)
                    layer.settle()
                return result
            except _STOPS:
                raise
            except Exception as found:
                layer.discard()
                error = found
            if attempt >= self._retry.attempts or not isinstance(error, self._retry.on):
                return Failure(error, attempt)
            if self._loop is None:
                self._wait(attempt, error)
            else:
                await self._loop.in_thread(self._threads, functools.partial(self._wait, attempt, error))
            messages = taken.restored(offset)
        raise AssertionError

    # --- batch functions ---

    def _run_batch(self, taken: Taken) -> Results:
        error: Exception
        for attempt in range(1, self._retry.attempts + 1):
            if attempt > 1:
                for offset in range(taken.count):
                    taken.restored(offset)
            try:
                result = self._call_batch(taken)
                if result is _NOTHING:
                    return Results({b: Output() for b in self._bindings})
                found = self._by_binding(result)
                self._layer.settle()
                last = taken.count - 1
                if self._imperative is not None:
                    self._imperative.settle(last)
                return Results({b: Output(items, [last] * len(items)) for b, items in found.items()})
            except _STOPS:
                raise
            except Exception as failed:
                self._discard()
                error = failed
                if attempt == self._retry.attempts or not isinstance(error, self._retry.on):
                    break
                self._wait(attempt, error)
        return Results({b: Output() for b in self._bindings}, {0: Failure(error, attempt)})

    def _call_batch(self, taken: Taken) -> Any:
        columns: list[list[Any]] = [s.messages for s in taken.slices]
        if self._filtered:
            columns = []
            for piece in taken.slices:
                passes = self._filters[piece.binding]
                columns.append([m if _passes(passes, m) else None for m in piece.messages])
            chosen = [o for o in range(taken.count) if any(column[o] is not None for column in columns)]
            if not chosen:
                return _NOTHING
            columns = [[column[o] for o in chosen] for column in columns]
            self._process._chosen = chosen
        faults.point("function.before")
        result = self._invoke(taken, columns, self._process)
        faults.point("function.after")
        return result

    # --- results ---

    def _collect(self, results: list[Any], failures: dict[int, Failure]) -> Results:
        """Sort what the calls returned by output binding."""
        bindings = self._bindings
        if not bindings:
            self._check_awaited(next((result for result in results if result is not _NOTHING), None))
            return Results({}, failures, ran=len(results))
        if not failures and set(map(type, results)) == {dict}:
            if self._node.returns_messages:
                return Results({binding: Output(results) for binding in bindings}, ran=len(results))
            columns = self._columns(results)
            if columns is not None:
                outputs = {binding: Output(column) for binding, column in zip(bindings, columns)}
                return Results(outputs, ran=len(results))
        outputs = {binding: Output([], []) for binding in bindings}
        for offset, result in enumerate(results):
            if result is None or result is _NOTHING:
                continue
            if type(result) is dict and self._one_each(result, outputs, offset):
                continue
            try:
                found = self._by_binding(result)
            except ReturnError as error:
                failures[offset] = Failure(error, 1)
                continue
            for binding, items in found.items():
                output = outputs[binding]
                output.items += items
                assert output.origins is not None
                output.origins += [offset] * len(items)
        return Results(outputs, failures, ran=len(results))

    def _one_each(self, result: dict[str, Any], outputs: dict[str, Output], offset: int) -> bool:
        """Keep a message, or a dict of single messages, as most calls return; False where it is neither."""
        if self._node.returns_messages:
            messages = dict.fromkeys(self._bindings, result)
        else:
            messages = result
            for binding, message in messages.items():
                if message is not None and (type(message) is not dict or binding not in outputs):
                    return False
        for binding, message in messages.items():
            if message is not None:
                output = outputs[binding]
                output.items.append(message)
                output.origins.append(offset)  # type: ignore[union-attr]
        return True

    def _columns(self, results: list[dict[str, Any]]) -> list[list[Any]] | None:
        """The outputs by binding, if each call returned one message for every binding."""
        if set(map(len, results)) != {len(self._bindings)}:
            return None
        columns = [[result.get(binding) for result in results] for binding in self._bindings]
        return columns if all(set(map(type, column)) == {dict} for column in columns) else None

    def _by_binding(self, result: Any) -> dict[str, list[Any]]:
        """The messages that a call returned, by binding; raises :class:`ReturnError`."""
        if type(result) is _Encoded:
            return result.items
        if result is None:
            return {}
        if not self._bindings:
            if self._node.kind == "sink":
                self._check_awaited(result)
                return {}  # what else a sink returns means nothing
            raise ReturnError(
                f"{self._node.id} returned {type(result).__name__} and has no outputs to put it into.",
                "process.appenders[…].write(message), and return None; or outputs.",
            )
        if self._node.returns_messages:
            return dict.fromkeys(self._bindings, self._messages(result, ""))
        if not isinstance(result, dict):
            raise ReturnError(
                f"{self._node.id} returned {type(result).__name__}; with several outputs a function returns"
                f" a dict by binding ({', '.join(map(repr, self._bindings))}) or None.",
                f"return {{{self._bindings[0]!r}: message}}.",
            )
        found: dict[str, list[Any]] = {}
        for binding, value in result.items():
            if binding not in self._bindings:
                raise ReturnError(
                    f"{self._node.id} returned a message for {binding!r}, which is no output; it has"
                    f" {', '.join(map(repr, self._bindings))}.",
                    "one of those.",
                )
            if value is not None:
                found[binding] = self._messages(value, f" for {binding!r}")
        return found

    def _check_awaited(self, result: Any) -> None:
        """Refuse a coroutine: a sink that returns one has done nothing, and would never be missed."""
        if isinstance(result, CoroutineType):
            result.close()
            raise ReturnError(
                f"{self._node.id} returned a coroutine, and is no `async def` that Cues would know to await.",
                "async def around it: async def f(message): return await g(message).",
            )

    def _messages(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, dict):
            return [value]
        if isinstance(value, (list, tuple)):
            for item in value:
                if not isinstance(item, dict):
                    raise ReturnError(
                        f"{self._node.id} returned a list{where} with {type(item).__name__} in it; messages are dicts.",
                        "a list of dicts.",
                    )
            return list(value)
        raise ReturnError(
            f"{self._node.id} returned {type(value).__name__}{where}; a message is a dict.",
            "a dict, a list of dicts, or None.",
        )

    def _encoded(self, result: Any) -> Any:
        """Check and encode what a call returned, so that what is wrong with it is this call's failure."""
        packed: dict[str, list[Any]] = {}
        for binding, items in self._by_binding(result).items():
            options = self._options_of(binding)
            packed[binding] = [batches.pack_one(item, options.max_message_bytes, options.strips) for item in items]
        return _Encoded(packed)


def _as_plain(fn: Function, loop: Loop) -> Function:
    """An `async def` as a plain function that waits for it."""
    return lambda *arguments, **keywords: loop.run(fn(*arguments, **keywords))


class _Calls:
    """The calls of a step that run at once, and what came of each, by offset."""

    def __init__(self, taken: Taken, lanes: list[Hashable]) -> None:
        self.taken = taken
        self.lanes = lanes
        self.schedule = Schedule(lanes)
        self.outcomes: list[Any] = [_NOTHING] * taken.count
        """What the call returned, or its Failure."""
        self.changes: list[Changes] = [{}] * taken.count
        """What it did to the state."""


class _Encoded:
    """Results of a call, checked; an item is bytes, or a dict where it holds ``q/meta``."""

    __slots__ = ("items",)

    def __init__(self, items: dict[str, list[Any]]) -> None:
        self.items = items
