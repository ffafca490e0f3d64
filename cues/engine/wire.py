"""What a supervisor and a worker say to one another, over two pipes.

    supervisor                         worker
    ──────────                         ──────
    Load     import that graph    ──▸
                                  ◂──  Loaded, or Refused: it cannot be imported, or is another one
    Carry    own these units      ──▸
                                  ◂──  Ready, or Refused: they cannot be owned
    Go       run them             ──▸
                                  ◂──  Told, Logged, Stand: what happens, and how far it is
    More     own these units too  ──▸
    Look     are you idle?        ──▸
                                  ◂──  Stand, with the number of the question
    Drain, Halt                   ──▸
                                  ◂──  Left: everything is given back

A worker that takes another's place gets Load, Carry and Go at once. Frames are a length and a pickle. The
end of the first pipe is the end of the supervisor, however it came.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from cues.base import events
from cues.engine.origin import Origin
from cues.engine.status import UnitStatus
from cues.errors import CuesError
from cues.steps.failure import Verdict, words

_HEAD: Final = struct.Struct(">I")
WORDS: Final = 4
"""64-bit words of shared memory for each unit of a worker (child.py says what they hold)."""


# --- from the supervisor --------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadGraph:
    worker: str
    origin: Origin
    digests: dict[str, str]
    argv: list[str]


@dataclass(frozen=True)
class AssignUnits:
    units: tuple[str, ...]
    store: str
    directory: str | None
    durability: str | None
    accept_topology: bool
    take_over: bool
    careful: dict[str, dict[int, int]] = field(default_factory=dict)
    """By unit and input: the index up to which a step takes one message, because of a death there."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By unit: what is not called any more."""


@dataclass(frozen=True)
class Begin:
    draining: bool = False


@dataclass(frozen=True)
class More:
    """Units of partitions that queues have got while the graph runs."""

    units: tuple[str, ...]


@dataclass(frozen=True)
class StatusRequest:
    number: int


@dataclass(frozen=True)
class Drain:
    pass


@dataclass(frozen=True)
class Halt:
    pass


# --- from a worker --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """An error on its way to another process: its cause does not travel with it by itself."""

    error: BaseException
    cause: BaseException | None
    trace: str
    """The cause's traceback, as the user is shown it."""

    @staticmethod
    def of(error: BaseException, show: Callable[[BaseException], str]) -> ErrorReport:
        cause = error.__cause__
        if cause is None or isinstance(cause, CuesError):
            return ErrorReport(
                _portable(error), None if cause is None else _portable(cause), getattr(error, "trace", "")
            )
        return ErrorReport(_portable(error), _portable(cause), show(cause))

    def whole(self) -> BaseException:
        """The error with its cause; ``trace`` is an attribute of a :class:`CuesError`."""
        self.error.__cause__ = self.cause
        if self.trace and isinstance(self.error, CuesError):
            self.error.__dict__["trace"] = self.trace
        return self.error


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {words(error)}")
    return error


@dataclass(frozen=True)
class Loaded:
    pass


@dataclass(frozen=True)
class Refused:
    failure: ErrorReport


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class EventReport:
    """An event; the error that it holds is beside it."""

    event: events.Event
    failure: ErrorReport | None

    @staticmethod
    def of(event: events.Event, show: Callable[[BaseException], str]) -> EventReport:
        error = getattr(event, "error", None)
        if error is None:
            return EventReport(event, None)
        return EventReport(dataclasses.replace(event, error=None), ErrorReport.of(error, show))  # type: ignore[call-arg]

    def whole(self) -> events.Event:
        if self.failure is None:
            return self.event
        return dataclasses.replace(self.event, error=self.failure.whole())  # type: ignore[call-arg]


@dataclass(frozen=True)
class Logged:
    """A record of somebody's logger that no handler of the graph file took."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True)
class StatusReply:
    """How the worker's processors do; the answer to :class:`StatusRequest` where ``number`` is not 0."""

    number: int
    idle: bool
    """Nobody has anything to do; only in an answer."""
    busy: bool
    """A stream or sink is in a step."""
    standings: tuple[UnitStatus, ...]


@dataclass(frozen=True)
class Departure:
    pass


# --- frames ---------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, found: bytes) -> list[Any]:
        buffer = self._buffer
        buffer += found
        messages = []
        while len(buffer) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            messages.append(pickle.loads(bytes(buffer[_HEAD.size : end])))
            del buffer[:end]
        return messages


class Channel:
    """A worker's side: blocking, and safe from any thread."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
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
        found = b""
        while len(found) < count:
            more = os.read(self._reads, count - len(found))
            if not more:
                raise EOFError
            found += more
        return found
