"""Failures, and the error messages for error queues: configuration, messages, chain of causes, context.

    {"q/type": "q.type.err/processor", "err.proc/config": …, "err.proc/messages": {binding: [message]},
     "err/cause": [{"type", "message", "trace"}], "err/context": …}

An error message is always plain data that can be encoded, even if the user's exception raises in ``str()`` or holds
objects that cannot be encoded.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import reprlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

from cues import codec
from cues.base import events, names
from cues.base.data import dataclass
from cues.errors import (
    CheckpointError,
    CodecError,
    CuesError,
    Fenced,
    ProcessorStopped,
    StoreError,
    StoreFull,
    Unsupported,
    WorkerDied,
    WriterStuck,
    cause_of,
)
from cues.graphs.processor import Node

_OURS: Final = frozenset(
    f"cues.steps.{name}" for name in ["runner", "invocation", "returned", "concurrency", "eventloop"]
)
"""Modules whose frames lead to the user's function."""
CAUSES_MAX: Final = 40
"""Links of a chain of causes in an error message: a longer one has its first and its last ones."""
TRACE_CHARACTERS_MAX: Final = 20_000
"""A longer traceback keeps its end, where the error is."""


@contextlib.contextmanager
def error_context(**facts: Any) -> Iterator[None]:
    """Add ``facts`` to the error message of every failure inside the block."""
    try:
        yield
    except Exception as error:
        known = getattr(error, "__cues_context__", {})  # from a block inside this one
        with contextlib.suppress(AttributeError):
            error.__cues_context__ = {**facts, **known}  # type: ignore[attr-defined]
        raise


class StoreTrouble:
    """The first error of a store in the calls of a step, also if the user's function catches it.

    A store that is damaged or full is not a fault of a message: such an error stops the processor. It is a context
    manager around each use of the store by the user's function.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: StoreError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.error is None and isinstance(error, StoreError):
            self.error = error

    def check(self, paths: Sequence[str], error: BaseException | None = None) -> None:
        """Raise the error of a store that was noted, or that is a cause of ``error`` and is of a store at ``paths``."""
        for cause in chain(error):
            if self.error is None and isinstance(cause, StoreError) and getattr(cause, "path", None) in paths:
                self.error = cause
        if self.error is not None:
            raise self.error


@dataclass
class Failure:
    """A message (batch function: all of them) that failed for good."""

    error: BaseException
    attempts: int
    told: dict[str, Any] | None = None
    """Causes and context as plain data, if the function ran in another process: tracebacks cannot be pickled."""
    away: bool = False
    """True if something outside cannot be reached now, and the processor waits for it (graphs/outage.py)."""

    @property
    def stops(self) -> bool:
        """True if no other message would succeed: something is away, the target failed, a package is missing, or the
        engine cannot do it.

        Then the processor stops, also with an error queue; if something is away, it goes on after a wait.
        """
        return self.away or isinstance(self.error, (CheckpointError, Unsupported))

    def account(self) -> dict[str, Any]:
        """Return the chain of causes and the context for an error message."""
        if self.told is not None:
            return self.told
        context: dict[str, Any] = {}
        for error in chain(self.error):
            context = {**getattr(error, "__cues_context__", {}), **context}
        return {
            names.ERR_CAUSE: causes(self.error),
            names.ERR_CONTEXT: {str(k): _plain(v) for k, v in context.items()},
        }


@dataclass(frozen=True)
class Verdict:
    """A step of one message, or of one batch, in which the worker died at each attempt."""

    chosen: int
    """The input that the step took from; 0 if it takes from all."""
    start: int
    """The index of its first message on that input."""
    count: int
    deaths: int
    text: str
    """The last death of the worker, as text."""

    def failure(self) -> Failure:
        """Return the failure that replaces the results of the step."""
        error = WorkerDied(
            f"the worker died {self.deaths} times in a row in the call of this message: the last one {self.text}.",
            "correct the function, or the code that it calls.",
            worker="",
            pid=0,
            returncode=None,
        )
        return Failure(error, self.deaths)


def error_message(node: Node, messages: dict[str, list[dict[str, Any]]], failure: Failure) -> dict[str, Any]:
    """The message for the error queue: configuration, input messages, chain of causes, context."""
    record = {
        names.TYPE: names.PROCESSOR_ERROR,
        names.ERR_CONFIG: {**node.config(), "attempt": failure.attempts},
        names.ERR_MESSAGES: messages,
        **failure.account(),
    }
    try:
        codec.pack([record])  # a batch adds a level
    except CodecError:  # the record adds levels around a message that has the largest depth
        record[names.ERR_MESSAGES] = {binding: [_shallow(m) for m in inputs] for binding, inputs in messages.items()}
        record[names.ERR_ABRIDGED] = True
    return record


def _shallow(message: dict[str, Any]) -> dict[str, Any]:
    """The message, or its abridged text if the error record would be nested too deeply with it."""
    try:
        codec.pack([{names.ERR_MESSAGES: {"": [message]}}])
    except CodecError:
        return {"repr": reprlib.repr(message)}
    return message


def stopped_at(node: Node, failure: Failure) -> ProcessorStopped:
    """Return the error of a processor that stops because no queue takes its failures."""
    where = "after the messages of its last step: at-most-once" if node.at_most_once else "at this message"
    more = "" if node.errors is not None else f", or {node.way_to_errors}"
    error = ProcessorStopped(
        f"{node.id} stopped after {failure.attempts} attempt{'s' if failure.attempts > 1 else ''}:"
        f" {named(failure.error)}",
        f"correct the function and start again (it continues {where}){more}."
        if not failure.away
        else "start again when it can be reached; with outage= the processor waits for it.",
        processor=node.id,
        away=failure.away,
    )
    error.__cause__ = failure.error
    return error


def passes(error: BaseException) -> bool:
    """Return whether the cause of an error may disappear without a restart.

    StoreFull     a purge, more room on the disk, or a larger map by another process
    WriterStuck   the process that holds the writer lock continues or ends
    OSError       the system had no descriptor, no memory, or no answer
    """
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if not isinstance(error, OSError):
        return isinstance(error, (StoreFull, WriterStuck))
    from cues.base.away import is_away

    return isinstance(error, (StoreFull, WriterStuck)) or is_away(error)


def stopped_by(id: str, error: BaseException) -> ProcessorStopped | Fenced:
    """Return an error as :class:`ProcessorStopped`; :class:`Fenced` stays as it is."""
    if isinstance(error, (ProcessorStopped, Fenced)):
        return error
    stopped = ProcessorStopped(
        f"{id} stopped: {named(error)}",
        "remove the cause, then start again; it continues at the same position.",
        processor=id,
    )
    stopped.__cause__ = error
    return stopped


def stop_event(id: str, stopped: BaseException) -> events.Stopped:
    """Return the event of a processor that stopped."""
    text = getattr(stopped, "message", str(stopped)).removeprefix(f"{id} ")
    return events.Stopped(id, text, logging.ERROR, error=stopped)


def retry_event(id: str, attempt: int, attempts: int, error: BaseException, wait_s: float) -> events.Retrying:
    """Return the event of a call that failed and is repeated after ``wait_s`` seconds."""
    text = f"attempt {attempt} of {attempts} failed ({short(error)}); again in {wait_s:g} s"
    return events.Retrying(id, text, logging.WARNING, attempt=attempt, wait_s=wait_s, cause=short(error))


def failed_event(id: str, queue: str, count: int, attempts: int, cause: str) -> events.Failed:
    """Return the event of ``count`` messages that went to the error queue; ``cause`` is that of the first."""
    text = (
        f"{count} message{'s' if count > 1 else ''} to {queue!r} after"
        f" {attempts} attempt{'s' if attempts > 1 else ''}: {cause}"
    )
    return events.Failed(id, text, logging.WARNING, count=count, cause=cause, queue=queue)


def causes(error: BaseException | None) -> list[dict[str, str]]:
    """Return the chain of an exception, outermost first: type, message, traceback. A long one has its two ends."""
    described: list[dict[str, str]] = []
    links = list(chain(error))
    left_out = len(links) - CAUSES_MAX
    half = CAUSES_MAX // 2
    for number, link in enumerate(links):
        if 0 <= number - half < left_out:
            if number == half:
                described.append({"type": "", "message": f"{left_out:,} causes are left out", "trace": ""})
            continue
        trace = link.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals["__name__"] in _OURS:
            trace = trace.tb_next  # our own frames do not help to find the failure
        with _alone(link):
            lines = traceback.format_exception(type(link), link, trace, chain=False)
        described.append(
            {
                "type": f"{type(link).__module__}.{type(link).__qualname__}".removeprefix("builtins."),
                "message": _text(words(link)),
                "trace": _text("".join(lines))[-TRACE_CHARACTERS_MAX:],
            }
        )
    return described


@contextlib.contextmanager
def _alone(link: BaseException) -> Iterator[None]:
    """Take an exception out of its chain for the block: ``traceback`` reads the whole chain, also without using it."""
    before = {name: getattr(link, name) for name in ("__cause__", "__context__", "__suppress_context__")}
    try:
        for name in ("__cause__", "__context__"):
            object.__setattr__(link, name, None)  # an exception may refuse to be changed: a frozen dataclass
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(link, name, value)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = cause_of(error)


def root_of(error: BaseException) -> BaseException:
    """Return the exception that says most about an outage: that of the driver below errors of Cues, if it has words."""
    while isinstance(error, CuesError) and isinstance(cause := cause_of(error), Exception) and words(cause).strip():
        error = cause
    carried = getattr(error, "orig", None)
    return carried if isinstance(carried, Exception) else error


def words(error: BaseException) -> str:
    """Return ``str(error)``, also if the user's exception raises in it."""
    try:
        return str(error)
    except Exception as another:
        return f"<its text raised {type(another).__name__}>"


def line(error: BaseException) -> str:
    """Return the first line of an error text. Drivers add the statement, its parameters and links."""
    return _first(words(error))


def _plain(value: Any) -> Any:
    try:
        codec.pack(value)
    except CodecError:
        return repr(value)
    return value


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def _first(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return f"{first} …" if more else first


def named(error: BaseException) -> str:
    """Return the class and the first line of an exception; the class alone if it has no text."""
    return f"{type(error).__name__}: {line(error)}" if words(error).strip() else type(error).__name__


def short(error: BaseException) -> str:
    """Return it as a part of a text about what is done by itself: without the advice of an error of Cues."""
    text = f"{type(error).__name__}: {_first(error.message)}" if isinstance(error, CuesError) else named(error)
    return text[:200]
