"""A running graph, as its user has it, and the results of its methods; :mod:`cues.engine` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cues.base import events
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.base.shown import Shown

if TYPE_CHECKING:
    from cues.graphs.pause import ProcessorPause
    from cues.graphs.plan import Plan
    from cues.queues.options import At, Delay
    from cues.queues.queue import Queue
    from cues.queues.store import Store


@dataclass(frozen=True)
class UnitStatus:
    """The counters and the state of one unit."""

    id: ProcessorId
    processor: ProcessorId
    """Id of its processor."""
    counters: events.Counters
    state: Literal["running", "paused", "ended", "stopped"]
    """paused: until somebody resumes it; ended: a source that has no more messages; stopped: by an error."""


@dataclass(frozen=True)
class QueueProgress:
    """The queues and positions of a graph whose queues are not in a store of this machine."""

    ends: dict[str, int]
    """Last index by queue."""
    messages: dict[str, int]
    """Number of messages by queue."""
    positions: dict[str, int]
    """Next index by tailer id."""
    delayed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By unit that holds delayed messages: their number, and the time of the first one in nanoseconds."""


class Shared(Protocol):
    """Queues that are not in a store of this machine, for the commands that show a run."""

    place: str
    """Their directory or URL, as a person reads it."""
    before: QueueProgress
    """Progress at the start of the run."""

    def now(self) -> QueueProgress:
        """Progress now."""

    def lag(self, processor: str) -> int:
        """Number of messages that the processor has not taken."""

    def messages(self, queue: str) -> list[dict[str, Any]] | None:
        """All messages of a queue; None if a store of this machine has the queue."""

    def check_send(self, queue: str) -> None:
        """Raise :class:`InvalidArgument` if no store of this machine has the queue: only processors write it."""


@dataclass(frozen=True)
class RedriveResult:
    """The results of a redrive, as indices of the error messages, by their queue."""

    resolved: tuple[tuple[str, int], ...] = ()
    failed_again: tuple[tuple[str, int], ...] = ()
    refused: tuple[tuple[str, int, str], ...] = ()
    """With the reason."""
    waiting: tuple[tuple[str, int], ...] = ()
    """Asked for, and not done yet."""

    def __bool__(self) -> bool:
        """True if all are resolved."""
        return not (self.failed_again or self.refused or self.waiting)


class Running(Shown, ABC):
    """A started graph. A context manager: leaving it drains, stops, and raises what stopped a processor."""

    @abstractmethod
    def guard(self, min_free: int | None) -> None:
        """Begin to watch the run: its disks (disk_guard.py) and its history (sampler.py).

        It stops with :class:`DiskLow` if the disk of a store has less than ``min_free`` bytes free.
        """

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @property
    @abstractmethod
    def plan(self) -> Plan: ...

    @property
    @abstractmethod
    def queues(self) -> dict[str, Queue]:
        """Every queue that the graph names, opened."""

    @property
    @abstractmethod
    def shared(self) -> Shared | None:
        """The queues that are not in :attr:`store`; None if there are none."""

    @property
    @abstractmethod
    def pulls(self) -> bool:
        """True if sources run."""

    @property
    @abstractmethod
    def pids(self) -> dict[str, int]:
        """The worker processes that are alive, by name; empty if the graph runs in this process."""

    @property
    @abstractmethod
    def halted(self) -> bool: ...

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @property
    @abstractmethod
    def draining(self) -> bool: ...

    @abstractmethod
    def send(self, *arguments: Any, deliver_at: At = None, delay: Delay = None) -> int:
        """Send one message: ``send(queue, message)``, or ``send(message)`` to the graph's source. Return its index.

        ``deliver_at`` or ``delay``: processors get it later, as :func:`cues.delayed` describes.

        Each call is one commit. Raises the errors of :meth:`Appender.write`, and :class:`SchemaError` for a message
        that does not fit the ``schema=`` of the queue's source; then nothing was written.
        """

    @abstractmethod
    def messages(self, queue: str) -> list[dict[str, Any]]:
        """Return all messages that are on a queue now."""

    @abstractmethod
    def redrive(
        self,
        *,
        queue: str = "",
        processor: str | None = None,
        index: Collection[int] = (),
        where: Callable[[dict[str, Any]], bool] | None = None,
        all: bool = False,
        timeout: float | None = None,
    ) -> RedriveResult:
        """Give the inputs of error messages to the processors that failed once more; see :func:`cues.redrive`.

        Waits until they have been taken, for ``timeout`` seconds at most.
        """

    @abstractmethod
    def resume(self, processor: str | None = None) -> list[ProcessorPause]:
        """Resume a paused processor, or all; see :func:`cues.resume`. Return the pauses that were taken away."""

    @abstractmethod
    def pauses(self) -> list[ProcessorPause]:
        """Return the processors that are paused now, with the reasons; one entry for each unit."""

    @abstractmethod
    def counters(self) -> dict[str, events.Counters]:
        """Return the counters since the start, by processor id. The units of a processor are added up."""

    @abstractmethod
    def standings(self) -> list[UnitStatus]:
        """Return the status of each unit, in the order of the plan."""

    @property
    @abstractmethod
    def stuck(self) -> bool:
        """True if, after :meth:`close`, a call of a user's function has not returned."""

    @property
    @abstractmethod
    def stopped(self) -> list[BaseException]:
        """The errors that stopped processors."""

    @abstractmethod
    def idle(self) -> bool:
        """Return whether no processor has anything to do, at one moment.

        One transaction of the home store reads all positions, and the ends of all queues that are read or forwarded.
        Other stores are read after it. A reader that is at the end of their queues then was there at the moment of the
        transaction too.
        """

    @abstractmethod
    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do. Return False at the timeout, or when the graph was halted before.

        A source is not idle before it has answered: with its first message, by ``process.wait``, or by its end. A
        processor that is paused counts as idle (:meth:`pauses`). Raises :class:`ProcessorStopped`, with the user's
        exception as its cause, when a processor stopped.
        """

    @abstractmethod
    def wait_done(self, idle_exit_s: float | None = None) -> bool:
        """Wait until every source has ended and every queue is drained. Then close open windows and finish files.

        Those with ``at_end="keep"`` stay open for the next run; see :meth:`close_open`.

        A graph that is fed by ``send`` is never done, unless ``idle_exit_s`` is set: then it is done after this
        number of seconds without anything to do. Return False when the graph was halted before.

        Raises :class:`ProcessorStopped` when a processor stopped. With ``workers`` the other processors
        continue, and it is raised at the end.
        """

    @abstractmethod
    def close_open(self) -> bool:
        """Close what processors keep open: windows, joins and files, also with ``at_end="keep"``.

        Waits until nothing is left to do before and after it. Windows close in the order of the graph, and the
        watermark of each processor moves to the end of its last open window. Later messages of these windows are late.
        Return False when the graph was halted before, or if a processor stays open, because it or one before it is
        paused; an event names it. Raises the errors of :meth:`wait_idle`.
        """

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Stop the sources, let the other processors finish the messages on the queues, and halt.

        Return False if ``timeout`` comes first, or if messages stay because something outside is away. A processor that
        stopped at an error leaves the messages that it did not take, and a stopped forwarder those that it did not
        forward.
        """

    @abstractmethod
    def end_sources(self) -> None:
        """Pull no more messages from sources. Messages on the queues are still processed."""

    @abstractmethod
    def halt(self) -> None:
        """Stop every processor after its current step. Messages on the queues stay there."""

    @abstractmethod
    def close(self, timeout: float = 30.0) -> None:
        """Halt, wait up to ``timeout`` seconds for the current steps, and give locks and stores back.

        A second call does nothing. If an exception (a Ctrl-C) interrupted the first call, it does the rest.
        """

    @abstractmethod
    def __enter__(self) -> Running: ...

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...
