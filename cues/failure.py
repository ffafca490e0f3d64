"""What failed, as an error queue is told: configuration, messages, chain of causes, context.

    {"q/type": "q.type.err/processor", "err.proc/config": …, "err.proc/messages": {binding: [message]},
     "err/cause": [{"type", "message", "trace"}], "err/context": …}

Whatever a user's exception does when it is asked for its text, and whatever it holds, this gives plain
data that can be encoded.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from cues import codec, names
from cues.errors import CheckpointError, CodecError
from cues.processor import Node

_OURS: Final = ("cues.runner", "cues.concurrency", "cues.eventloop")
"""Modules whose frames lead to the user's function."""
TRACE_CHARACTERS_MAX: Final = 20_000
"""A longer traceback keeps its end, where the error is."""


@contextlib.contextmanager
def error_context(**facts: Any) -> Iterator[None]:
    """Add ``facts`` to the error message of whatever fails inside the block."""
    try:
        yield
    except Exception as error:
        known = getattr(error, "__cues_context__", {})  # of a block inside this one
        with contextlib.suppress(AttributeError):
            error.__cues_context__ = {**facts, **known}  # type: ignore[attr-defined]
        raise


@dataclass
class Failure:
    """A message (batch function: all of them) that failed for good."""

    error: BaseException
    attempts: int
    told: dict[str, Any] | None = None
    """Causes and context as plain data, where the function ran elsewhere: a traceback does not travel."""

    @property
    def stops(self) -> bool:
        """Whether the target failed and not the message: the processor stops, whatever takes its errors."""
        return isinstance(self.error, CheckpointError)

    def account(self) -> dict[str, Any]:
        """What an error message says of it: the chain of causes, and the context."""
        if self.told is not None:
            return self.told
        context: dict[str, Any] = {}
        for error in chain(self.error):
            context = {**getattr(error, "__cues_context__", {}), **context}
        return {
            names.ERR_CAUSE: causes(self.error),
            names.ERR_CONTEXT: {str(k): _plain(v) for k, v in context.items()},
        }


def error_message(node: Node, messages: dict[str, list[dict[str, Any]]], failure: Failure) -> dict[str, Any]:
    """The message for the error queue: configuration, input messages, chain of causes, context."""
    return {
        names.TYPE: names.PROCESSOR_ERROR,
        names.ERR_CONFIG: {**node.config(), "attempt": failure.attempts},
        names.ERR_MESSAGES: messages,
        **failure.account(),
    }


def causes(error: BaseException | None) -> list[dict[str, str]]:
    """The chain of an exception, outermost first: type, message, traceback."""
    found: list[dict[str, str]] = []
    for one in chain(error):
        trace = one.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals["__name__"] in _OURS:
            trace = trace.tb_next  # how we came to call the function says nothing about what failed in it
        lines = traceback.format_exception(type(one), one, trace, chain=False)
        found.append(
            {
                "type": f"{type(one).__module__}.{type(one).__qualname__}".removeprefix("builtins."),
                "message": _text(words(one)),
                "trace": _text("".join(lines))[-TRACE_CHARACTERS_MAX:],
            }
        )
    return found


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came from, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def words(error: BaseException) -> str:
    """``str(error)``, whatever the user's exception does there."""
    try:
        return str(error)
    except Exception as another:
        return f"<its text raised {type(another).__name__}>"


def _plain(value: Any) -> Any:
    try:
        codec.pack(value)
    except CodecError:
        return repr(value)
    return value


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {words(error)}"[:200]
