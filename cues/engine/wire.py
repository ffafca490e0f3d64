"""The messages between a supervisor and a worker, over two pipes.

    supervisor                               worker
    ──────────                               ──────
    LoadGraph      import this graph    ──▸
                                        ◂──  Loaded, or Refused: it cannot be imported, or is another graph
    AssignUnits    own these units      ──▸
                                        ◂──  Ready, or Refused: they cannot be owned
    Begin          run them             ──▸
                                        ◂──  EventReport, Logged, StatusReply: events, log records, counters
    More           own these units too  ──▸
    StatusRequest  are you idle?        ──▸
                                        ◂──  StatusReply, with the number of the request
    Drain, Halt                         ──▸
                                        ◂──  Departure: everything is given back

A worker that replaces another gets LoadGraph, AssignUnits and Begin at once. A frame is a length and a pickle. The
end of the first pipe means that the supervisor has ended, for whatever reason.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
import threading
from collections.abc import Callable
from dataclasses import field
from typing import Any, Final

from cues.base import events
from cues.base.data import dataclass
from cues.engine.origin import Origin
from cues.errors import CuesError
from cues.graphs.running import UnitStatus
from cues.steps.failure import Verdict, words

_HEAD: Final = struct.Struct(">I")
WORDS: Final = 4
"""64-bit words of shared memory for each unit of a worker (described in child.py)."""


# --- from the supervisor --------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadGraph:
    worker: str
    origin: Origin
    digests: dict[str, str]
    argv: list[str]
    gc: int = 0
    """The threshold of the garbage collector (base/collector.py); 0 leaves Python's settings."""


@dataclass(frozen=True)
class AssignUnits:
    units: tuple[str, ...]
    store: str
    directory: str | None
    durability: str | None
    accept_topology: bool
    take_over: bool
    careful: dict[str, dict[int, list[tuple[int, int]]]] = field(default_factory=dict)
    """By unit and input: steps in which a worker died, the innermost last: their end, and the most to take."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By unit: the messages for which the function is not called any more."""


@dataclass(frozen=True)
class Begin:
    draining: bool = False


@dataclass(frozen=True)
class More:
    """Units of partitions that queues got while the graph runs."""

    units: tuple[str, ...]


@dataclass(frozen=True)
class StatusRequest:
    number: int


class Drain:
    """End the sources."""


@dataclass(frozen=True)
class DiskLow:
    """Begin no step while a disk is low."""

    low: bool


class Halt:
    """Stop after the current steps."""


# --- from a worker --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """An error on its way to another process. A pickle of the error would lose its cause."""

    error: BaseException
    cause: BaseException | None
    trace: str
    """The traceback of the cause, as the user sees it."""

    @staticmethod
    def of(error: BaseException, show: Callable[[BaseException], str]) -> ErrorReport:
        cause = error.__cause__
        if cause is None:
            return ErrorReport(_portable(error), None, getattr(error, "trace", ""))
        trace = getattr(error, "trace", "") if isinstance(cause, CuesError) else show(cause)
        return ErrorReport(_portable(error), _portable(cause), trace)

    def rebuilt(self) -> BaseException:
        """The error with its cause. A :class:`CuesError` gets the attribute ``trace``."""
        self.error.__cause__ = self.cause
        if self.trace and isinstance(self.error, CuesError):
            self.error.__dict__["trace"] = self.trace
        return self.error


def _portable(error: BaseException) -> BaseException:
    """The error, or one with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {words(error)}")
    return error


class Loaded:
    """The graph is imported."""


@dataclass(frozen=True)
class StartRefused:
    failure: ErrorReport


class Ready:
    """The units are owned."""


@dataclass(frozen=True)
class EventReport:
    """An event, and separately the error that it has."""

    event: events.Event
    failure: ErrorReport | None

    @staticmethod
    def of(event: events.Event, show: Callable[[BaseException], str]) -> EventReport:
        error = getattr(event, "error", None)
        if error is None:
            return EventReport(event, None)
        return EventReport(dataclasses.replace(event, error=None), ErrorReport.of(error, show))  # type: ignore[call-arg]

    def rebuilt(self) -> events.Event:
        if self.failure is None:
            return self.event
        return dataclasses.replace(self.event, error=self.failure.rebuilt())  # type: ignore[call-arg]


@dataclass(frozen=True)
class Logged:
    """A log record that no handler of the graph file took."""

    logger: str
    level: int
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    """The attributes of the record that Cues has set."""


@dataclass(frozen=True)
class StatusReply:
    """The status of a worker's processors. It answers a :class:`StatusRequest` if ``number`` is not 0."""

    number: int
    idle: bool
    """No processor has anything to do. It is False in a reply that is not an answer."""
    busy: bool
    """A stream or sink is in a step."""
    standings: tuple[UnitStatus, ...]


class Departure:
    """Everything is given back."""


# --- frames ---------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, raw: bytes) -> list[Any]:
        buffer = self._buffer
        buffer += raw
        messages = []
        while len(buffer) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            messages.append(pickle.loads(bytes(buffer[_HEAD.size : end])))
            del buffer[:end]
        return messages


class Channel:
    """The pipes of a worker. Calls block, and may come from any thread."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reader = os.fdopen(reads, "rb")
        self._writes = writes
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        packed = pack(message)
        with self._sending:
            while packed:
                packed = packed[os.write(self._writes, packed) :]

    def receive(self) -> Any:
        """The next message. Raises :class:`EOFError` when the supervisor is gone."""
        length = _HEAD.unpack(self._exactly(_HEAD.size))[0]
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        raw = self._reader.read(count)
        if len(raw) < count:
            raise EOFError
        return raw
