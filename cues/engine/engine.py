"""The interface between a running graph and the engine that runs it.

    GraphRun ──▶ Engine   start, ask for the work that is left, end the sources, halt, join, close
    Engine ──▶ Host       is the graph draining or halted; send an event; wake those who wait

There is one :class:`cues.engine.running.GraphRun`, and there are four engines:

    EmbeddedEngine      cues/engine/local.py            threads of this process
    SupervisedEngine    cues/engine/supervised.py       worker processes, which a supervisor starts again
    SparkEngine         cues/spark/engine.py            threads of this process; Spark's executors call the functions
    ClusterEngine       cues/spark/cluster/engine.py    the same, with the queues in a shared directory

Not guaranteed: that an engine can be started twice. Each start makes a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from cues.base import events
from cues.graphs.plan import Plan
from cues.graphs.processor import Node
from cues.graphs.running import Shared, UnitStatus
from cues.queues.queue import Queue
from cues.queues.store import Store


class Host(Protocol):
    """The running graph, as its engine sees it. Every method may be called from any thread."""

    changes: threading.Condition
    """Notified by :meth:`changed`."""

    @property
    def plan(self) -> Plan: ...

    @property
    def halted(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def pulls(self) -> bool: ...

    @property
    def emit(self) -> Callable[[events.Event], None]: ...

    def halt(self) -> None: ...

    def end_sources(self) -> None: ...

    def sleep(self, seconds: float) -> bool:
        """Sleep. Return True if the graph was halted meanwhile."""

    def wait_for_disk(self) -> bool:
        """Wait while a disk of the run is low. Return True if the run ends meanwhile."""

    def hurry(self) -> None:
        """Let steps not wait for more messages, for a short time."""

    def may_linger(self) -> bool:
        """Return whether steps may wait for more messages now."""

    def changed(self) -> None:
        """Wake the callers that wait for a change of the graph's state."""

    def keep_stop(self, event: events.Stopped) -> None:
        """Record the reason of a stop in the store's directory."""


class Engine(Protocol):
    """The part of a running graph that is different in each engine.

    One thread calls :meth:`start`, then :meth:`halt`, :meth:`join` and :meth:`close`, in this order. Any thread may
    call the other methods after ``start`` has returned.
    """

    pulls: bool
    """True if sources run."""
    shared: Shared | None
    """The queues that are not in :attr:`store`."""

    def start(self, host: Host) -> None:
        """Own the processors and run them. Called once.

        Raises :class:`AlreadyRunning` if another process owns one of them, and the errors of a store that cannot be
        opened or recovered. An engine that raises here has given back its locks and stores, and has no thread and no
        process any more. From now on the engine calls ``host`` from its own threads.
        """

    # --- after the start ---

    @property
    def plan(self) -> Plan: ...

    @property
    def store(self) -> Store:
        """The store of the graph."""

    @property
    def queues(self) -> dict[str, Queue]:
        """The queues of the graph that are in a store of this machine, opened."""

    @property
    def pids(self) -> dict[str, int]:
        """The worker processes that are alive, by name."""

    @property
    def units(self) -> Sequence[Node]:
        """The units whose steps this engine makes, with their keys."""

    def standings(self) -> list[UnitStatus]:
        """Return the status of each unit, in the order of the plan."""

    @property
    def stopped(self) -> list[BaseException]:
        """The errors that stopped processors, or the engine."""

    @property
    def left(self) -> list[BaseException]:
        """The errors of outages because of which messages stay for the next start."""

    def idle(self) -> bool:
        """Return whether no processor has anything to do, at one moment.

        True must be true: no message is on a queue for a processor, in a call, or on the way between two stores.
        """

    def resting(self) -> bool:
        """Return False if a processor is at work. It may be cheaper than :meth:`idle`, and less exact."""

    def done(self) -> bool:
        """Return whether nothing is left to wait for.

        Either every source has ended and every queue is drained, or a processor has stopped and the rest cannot be
        done.
        """

    @property
    def over(self) -> bool:
        """True if nothing runs any more, so that the queues will not be drained."""

    # --- the end ---

    def end_sources(self) -> None:
        """Let the sources yield nothing more. Messages on the queues are still processed. May be called again."""

    def set_disk_low(self, low: bool) -> None:
        """Tell the other processes of the run whether a disk is low. Here :meth:`Host.wait_for_disk` delays steps."""

    def halt(self) -> None:
        """Stop every processor after its current step: no step begins after it. Does not wait. May be called again."""

    def join(self, timeout: float) -> None:
        """Wait for the current steps, for ``timeout`` seconds at most. Called after :meth:`halt`, perhaps twice.

        A step that commits meanwhile is whole; a step that does not is taken again by the next start.
        """

    @property
    def stuck(self) -> bool:
        """True if a call of a user's function has not returned, after :meth:`join`."""

    def close(self) -> None:
        """Give back locks and stores. Called after :meth:`join`, and again if an exception interrupted it.

        A call that is :attr:`stuck` may still run in its thread. Its step cannot commit any more.
        """

    def keep_stop(self, event: events.Stopped) -> None:
        """Record the reason of a stop in the store's directory, unless another process does it."""
