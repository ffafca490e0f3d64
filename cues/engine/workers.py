"""A worker: a process that runs some of a graph's processors, for a supervisor.

    1. end with the supervisor, whatever ends it
    2. import the graph, and compare it with the graph of the supervisor
    3. own the units that the supervisor assigns, by the steps of any start (assembly.py)
    4. run them, on the embedded engine (local.py)

It is spawned, never forked: a store must not be used in a child of the process that opened it. It
knows nothing of other workers. Lock and epoch of each unit keep two workers apart, as they do for any two
processes: for example a worker that was given up, and its successor.

A worker ignores signals. A Ctrl-C reaches every process of the terminal, and SIGTERM may be sent to a
whole service. If a worker ended by itself then, the others could not finish the messages on its queues.

Nothing of the command line is imported here, because a restart waits for every import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

from cues.base import collector, events, logs
from cues.engine import origin, wire
from cues.engine.engine import Host
from cues.engine.growth import divide
from cues.engine.local import EmbeddedEngine
from cues.engine.running import GraphRun
from cues.engine.threads import Worker
from cues.engine.wire import WORDS
from cues.errors import CuesError, Fenced
from cues.graphs import graph, graphfile
from cues.overrides import override
from cues.steps import tracing
from cues.steps.failure import stop_event, stopped_by
from cues.steps.feed import SourceStepper
from cues.steps.stepper import Stepper

REPORT_S: Final = 0.05
"""Time between two reports of the status of the processors, if it changes."""
TIMED_OUT: Final = 75
"""Exit code of a worker that ends in order to end a call (EX_TEMPFAIL: it is started again)."""
CLOSE_S: Final = 3600.0
"""Longest wait of a worker for its current steps. The supervisor kills it before that."""


def main(reads: int, writes: int, marks: int, supervisor: int) -> None:
    """Run a worker. The arguments are three descriptors, and the pid of the supervisor."""
    _end_with(supervisor)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker = _WorkerProcess(wire.Channel(reads, writes), memoryview(mmap.mmap(marks, 0)).cast("Q"))
    code = worker.run()
    sys.stdout.flush()
    sys.stderr.flush()
    tracing.flush()
    os._exit(code)  # a thread of the user must not keep the process


def _end_with(supervisor: int) -> None:
    """Let the kernel kill this process when the supervisor's thread that started it is gone (Linux).

    The pipe is not enough: a process may be stopped, or a function may keep every other thread from running.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


class WorkerEngine(EmbeddedEngine):
    """The embedded engine over the units of one worker. It waits for :class:`wire.Begin` before it runs them."""

    def __init__(self, worker: _WorkerProcess, graph: graph.Graph, carry: wire.AssignUnits) -> None:
        super().__init__(
            graph,
            units=carry.units,
            store=carry.store,
            accept_topology=carry.accept_topology,
            take_over=carry.take_over,
        )
        self._process = worker
        self._carry = carry
        self._marked = {unit: place for place, unit in enumerate(carry.units)}

    @override
    def _start_threads(self) -> None:
        self._process.channel.send(wire.Ready())
        begin = self._process.expect(wire.Begin)
        if begin is None:
            self.host.halt()
        elif begin.draining:
            self.host.end_sources()
        super()._start_threads()

    @override
    def _worker(self, stepper: Stepper) -> Worker:
        unit = stepper.node.id
        stepper.be_careful(self._carry.careful.get(unit, {}), self._carry.verdicts.get(unit))
        return _Watched(self.host, stepper, self._process.marks, self._marked[unit])

    @override
    def keep_stop(self, event: events.Stopped) -> None:
        """Do nothing: the supervisor gets the event, and keeps the stop."""

    @override
    def _begin_record(self) -> None:
        """Do nothing: the supervisor has done it."""

    def join_units(self, units: tuple[str, ...]) -> None:
        """Own and run more units. If that fails, these units stop and the others continue."""
        for unit in units:
            self._marked[unit] = len(self._marked)
        try:
            self._take_in([node for node in divide(self.plan, self.queues) if node.id in units])
        except Exception as error:
            for unit in units:
                self.host.emit(stop_event(unit, stopped_by(unit, error)))

    def reply(self, number: int = 0) -> wire.StatusReply:
        """The status of the processors; the answer to the supervisor's question ``number`` if that is not 0."""
        busy = any(worker.busy for worker in self.workers if not isinstance(worker.stepper, SourceStepper))
        units = [dataclasses.replace(u, counters=u.counters.copy()) for u in self.standings()]
        if number:
            self.host.hurry()
        idle = bool(number) and not self._process.joining and self.idle()
        return wire.StatusReply(number, idle, busy, tuple(units))

    @property
    def dispossessed(self) -> bool:
        """True if another worker took over every unit: this process was stopped, given up, and continued."""
        return bool(self.workers) and all(
            isinstance(worker.stopped, Fenced) and worker.stopped.reason == "takeover" for worker in self.workers
        )


class _Watched(Worker):
    """Marks in the shared memory that its unit is in a step, and in which one. child.py describes the marks."""

    def __init__(self, running: Host, stepper: Stepper, marks: memoryview[int], place: int) -> None:
        self._marks = marks
        self._place = place * WORDS
        super().__init__(running, stepper)
        stepper.watch = self._mark_step

    def _mark_step(self, chosen: int, start: int, count: int) -> None:
        marks, place = self._marks, self._place
        marks[place + 3] = 0  # a death between these lines must not show a step that never was
        marks[place + 1], marks[place + 2] = chosen, start
        marks[place + 3] = count

    @override
    def _turn(self) -> bool:
        moved = super()._turn()
        runner = self.stepper.runner
        if runner is not None and runner.abandoned and not self.stepper.divided:
            # The step is committed, with the call that took too long as a failure; a batch that took too long was
            # halved until that call was found. Only the end of the process ends the call.
            text = f"ends its worker (process {os.getpid()}), and with it a call that took longer than timeout_s"
            self.running.emit(events.Event(self.id, text, logging.WARNING))
            os._exit(TIMED_OUT)
        return moved

    @override
    def _mark(self, busy: bool) -> None:
        super()._mark(busy)
        pulls = isinstance(self.stepper, SourceStepper) and not self.stepper.feed.ended
        self._marks[self._place] = busy or pulls


class _WorkerProcess:
    """A worker, from its first message to its last."""

    def __init__(self, channel: wire.Channel, marks: memoryview[int]) -> None:
        self.channel = channel
        self.marks = marks
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._halted = threading.Event()
        self._drained = threading.Event()
        self._disk_low = False
        self._running: GraphRun | None = None
        self.joining = 0
        """Number of units that came after the start and do not run yet."""
        threading.Thread(target=self._listen, name="cues supervisor", daemon=True).start()

    def run(self) -> int:
        """Run until the supervisor ends it. Return the exit code."""
        try:
            loaded = self._load()
            engine = None if loaded is None else self._own(loaded)
        except Exception as error:
            self.channel.send(wire.StartRefused(wire.ErrorReport.of(error, graphfile.users_trace)))
            return 1
        if engine is not None and self._running is not None:
            self._report(self._running, engine)
            self._running.close(CLOSE_S)
            self.channel.send(engine.reply())
        self.channel.send(wire.Departure())
        return 0

    def tell(self, event: events.Event) -> None:
        self.channel.send(wire.EventReport.of(event, graphfile.users_trace))

    def expect(self, kind: type[Any]) -> Any:
        """Return the next message, which is of that kind; None if the graph is halted before it comes."""
        message = self._inbox.get()
        return message if isinstance(message, kind) else None

    # --- the messages of the supervisor ---

    def _listen(self) -> None:
        try:
            while True:
                message = self.channel.receive()
                running = self._running
                if isinstance(message, wire.Halt):
                    self._halted.set()
                    self._inbox.put(message)
                elif isinstance(message, wire.Drain):
                    self._drained.set()
                elif isinstance(message, wire.DiskLow):
                    self._disk_low = message.low
                if isinstance(message, wire.More):
                    self.joining += len(message.units)
                if isinstance(message, (wire.LoadGraph, wire.AssignUnits, wire.Begin, wire.More)):
                    self._inbox.put(message)
                elif running is not None:
                    self._obey(running, message)
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)

    def _obey(self, running: GraphRun, message: Any) -> None:
        if isinstance(message, wire.StatusRequest):
            assert isinstance(running.engine, WorkerEngine)
            with contextlib.suppress(CuesError):  # the graph is closing, and nothing waits for an answer
                self.channel.send(running.engine.reply(message.number))
        elif isinstance(message, wire.Drain):
            running.end_sources()
        elif isinstance(message, wire.DiskLow):
            running.set_disk_low(message.low)
        elif isinstance(message, wire.Halt):
            running.halt()

    # --- work ---

    def _load(self) -> graph.Graph | None:
        load = self.expect(wire.LoadGraph)
        if load is None:
            return None
        threading.current_thread().name = load.worker
        sys.argv = list(load.argv)
        collector.choose(load.gc)
        # The supervisor logs the events that it gets. Other records of the logger are sent to it.
        events.log.logger.addFilter(lambda record: record.module != events.__name__.rpartition(".")[2])
        graph.importing_for_worker = True
        try:
            loaded: graph.Graph = load.origin.load()
        finally:
            graph.importing_for_worker = False
        origin.compare(loaded, load.digests, origin.digests(loaded.plan()))
        if not logging.root.handlers:
            logging.root.addHandler(_LogsTo(self.channel))
        self.channel.send(wire.Loaded())
        return loaded

    def _own(self, loaded: graph.Graph) -> WorkerEngine | None:
        """Own the units that the supervisor assigns, and run them."""
        carry = self.expect(wire.AssignUnits)
        if carry is None:
            return None
        loaded.durability = carry.durability
        loaded.directory = None if carry.directory is None else Path(carry.directory)
        collector.settle()  # before the start, in which the processors begin
        engine = WorkerEngine(self, loaded, carry)
        self._running = running = GraphRun(loaded, engine, (self.tell,), self._disk_low)
        running.set_disk_low(self._disk_low)  # it may have changed during the start
        if self._drained.is_set():  # the message came during the start
            running.end_sources()
        if self._halted.is_set():
            running.halt()
        return engine

    def _report(self, running: GraphRun, engine: WorkerEngine) -> None:
        """Send the status of the processors whenever it changes, until the end."""
        sent: wire.StatusReply | None = None
        while not running.halted and not engine.dispossessed:
            reply = engine.reply()
            if reply != sent:
                self.channel.send(reply)
                sent = reply
                self._halted.wait(REPORT_S)
            with running.changes:
                running.changes.wait(REPORT_S)
            if self.joining and not running.halted:
                more = self.expect(wire.More)
                if more is not None:
                    engine.join_units(more.units)
                    self.joining -= len(more.units)


class _LogsTo(logging.Handler):
    """Sends log records that no other handler takes to the supervisor, which gives them to its own handlers."""

    def __init__(self, channel: wire.Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    @override
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(wire.Logged(record.name, record.levelno, self.format(record), logs.facts_of(record)))
