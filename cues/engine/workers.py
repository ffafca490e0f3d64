"""A worker: a process that carries some of a graph's processors, for a supervisor.

    1. end with the supervisor, whatever ends it
    2. import the graph, and compare it with the one that the supervisor has
    3. own the units that it is given: the same moves as in any start (assembly.py)
    4. run them: the embedded engine (threads.py)

It is spawned, never forked: a store must not be used in a child of the process that opened it. It
knows nothing of other workers. What keeps two of them apart, one that was given up and its
successor say, are lock and epoch of each unit, as between any two processes.

Signals are for the supervisor: a Ctrl-C reaches the whole terminal, and SIGTERM may be sent to a
whole service; a worker that ended by itself then would not let the others finish what is there.

Nothing of the command line is imported here: a restart waits for every import.
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

from cues.base import events
from cues.engine import origin, wire
from cues.engine.growth import divide
from cues.engine.running import Running
from cues.engine.threads import Host, Worker
from cues.engine.wire import WORDS
from cues.errors import CuesError, Fenced
from cues.graphs import graph, graphfile
from cues.steps.failure import stop_event, stopped_by
from cues.steps.feed import SourceStepper
from cues.steps.stepper import Stepper

REPORT_S: Final = 0.05
"""How far apart a worker says how its processors do, where that has changed."""
TIMED_OUT: Final = 75
"""Exit code of a worker that ends to end a call (EX_TEMPFAIL: it is started again)."""
CLOSE_S: Final = 3600.0
"""How long a worker waits for its steps under way; the supervisor, which ends it before, decides."""


def main(reads: int, writes: int, marks: int, supervisor: int) -> None:
    """Be a worker. The arguments are descriptors, and the pid of the supervisor."""
    _end_with(supervisor)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker = _WorkerProcess(wire.Channel(reads, writes), memoryview(mmap.mmap(marks, 0)).cast("Q"))
    code = worker.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the user's must not keep it


def _end_with(supervisor: int) -> None:
    """Let the kernel kill this process when the supervisor's thread that started it is gone (Linux).

    It works where the pipe does not: in a process that is stopped, or that a function keeps from running
    any other thread.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


class WorkerEngine(Running):
    """The embedded engine over the units of one worker: it waits for the word before it runs them."""

    patient = True

    def __init__(self, worker: _WorkerProcess, graph: graph.Graph, carry: wire.AssignUnits) -> None:
        self._process = worker
        self._carry = carry
        self._marked = {unit: place for place, unit in enumerate(carry.units)}
        super().__init__(
            graph,
            units=carry.units,
            listeners=(worker.tell,),
            store=carry.store,
            accept_topology=carry.accept_topology,
            take_over=carry.take_over,
        )

    def _start_threads(self) -> None:
        self._process.channel.send(wire.Ready())
        go = self._process.expect(wire.Begin)
        if go is None:
            self.halt()
        elif go.draining:
            self.end_sources()
        super()._start_threads()

    def _worker(self, delivery: Stepper) -> Worker:
        carry, unit = self._carry, delivery.node.id
        delivery.be_careful(carry.careful.get(unit, {}), carry.verdicts.get(unit))
        return _Watched(self, delivery, self._process.marks, self._marked[delivery.node.id])

    def keep_stop(self, event: events.Stopped) -> None:
        """The supervisor does, which hears of it."""

    def _forget_stops(self) -> None:
        """The supervisor has."""

    def join(self, units: tuple[str, ...]) -> None:
        """Own and run more units. Where that fails they are stopped, and the others go on."""
        for unit in units:
            self._marked[unit] = len(self._marked)
        try:
            self._take_in([node for node in divide(self.plan, self.queues) if node.id in units])
        except Exception as error:
            for unit in units:
                self.emit(stop_event(unit, stopped_by(unit, error)))

    def stand(self, number: int = 0) -> wire.StatusReply:
        """How the processors do; asked for by the supervisor where ``number`` is not 0."""
        busy = any(worker.busy for worker in self.workers if not isinstance(worker.delivery, SourceStepper))
        standings = [worker.standing for worker in self.workers]
        standings = [dataclasses.replace(s, counters=events.Counters(**vars(s.counters))) for s in standings]
        if number:
            self.hurry()
        idle = bool(number) and not self._process.joining and self.idle()
        return wire.StatusReply(number, idle, busy, tuple(standings))

    def wait_changed(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait(seconds)

    @property
    def dispossessed(self) -> bool:
        """Whether every unit was taken over: this process was given up, and has come back."""
        return bool(self.workers) and all(
            isinstance(worker.stopped, Fenced) and worker.stopped.reason == "takeover" for worker in self.workers
        )


class _Watched(Worker):
    """Marks in the shared memory that its unit is in a step, and in which: child.py says what for."""

    def __init__(self, running: Host, delivery: Stepper, marks: memoryview[int], place: int) -> None:
        self._marks = marks
        self._place = place * WORDS
        super().__init__(running, delivery)
        delivery.watch = self._mark_step

    def _mark_step(self, chosen: int, start: int, count: int) -> None:
        marks, place = self._marks, self._place
        marks[place + 3] = 0  # a death between the lines must not tell of a step that never was
        marks[place + 1], marks[place + 2] = chosen, start
        marks[place + 3] = count

    def _turn(self) -> bool:
        moved = super()._turn()
        runner = self.delivery.runner
        if runner is not None and runner.abandoned:
            # What the step made of the call that took too long is committed; only this ends the call itself.
            text = f"ends its worker (process {os.getpid()}), and with it a call that took longer than timeout_s"
            self.running.emit(events.Event(self.id, text, logging.WARNING))
            os._exit(TIMED_OUT)
        return moved

    def _mark(self, busy: bool) -> None:
        super()._mark(busy)
        pulls = isinstance(self.delivery, SourceStepper) and not self.delivery.feed.ended
        self._marks[self._place] = busy or pulls


class _WorkerProcess:
    """What a worker does from its first message to its last."""

    def __init__(self, channel: wire.Channel, marks: memoryview[int]) -> None:
        self.channel = channel
        self.marks = marks
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._halted = threading.Event()
        self._drained = threading.Event()
        self._carrier: WorkerEngine | None = None
        self.joining = 0
        """Units that are not run yet, which came after the start."""
        threading.Thread(target=self._listen, name="cues supervisor", daemon=True).start()

    def run(self) -> int:
        """Until the supervisor says so; returns the exit code."""
        try:
            loaded = self._load()
            carrier = None if loaded is None else self._carry(loaded)
        except Exception as error:
            self.channel.send(wire.Refused(wire.ErrorReport.of(error, graphfile.users_trace)))
            return 1
        if carrier is not None:
            self._report(carrier)
            carrier.close(CLOSE_S)
            self.channel.send(carrier.stand())
        self.channel.send(wire.Departure())
        return 0

    def tell(self, event: events.Event) -> None:
        self.channel.send(wire.EventReport.of(event, graphfile.users_trace))

    def expect(self, kind: type[Any]) -> Any:
        """The next message, which is of that kind; None where the graph is halted before."""
        message = self._inbox.get()
        return message if isinstance(message, kind) else None

    # --- the supervisor's words ---

    def _listen(self) -> None:
        try:
            while True:
                message = self.channel.receive()
                carrier = self._carrier
                if isinstance(message, wire.Halt):
                    self._halted.set()
                    self._inbox.put(message)
                elif isinstance(message, wire.Drain):
                    self._drained.set()
                if isinstance(message, wire.More):
                    self.joining += len(message.units)
                if isinstance(message, (wire.LoadGraph, wire.AssignUnits, wire.Begin, wire.More)):
                    self._inbox.put(message)
                elif carrier is not None:
                    self._obey(carrier, message)
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)

    def _obey(self, carrier: WorkerEngine, message: Any) -> None:
        if isinstance(message, wire.StatusRequest):
            with contextlib.suppress(CuesError):  # closing: nobody is asked any more
                self.channel.send(carrier.stand(message.number))
        elif isinstance(message, wire.Drain):
            carrier.end_sources()
        elif isinstance(message, wire.Halt):
            carrier.halt()

    # --- work ---

    def _load(self) -> graph.Graph | None:
        load = self.expect(wire.LoadGraph)
        if load is None:
            return None
        threading.current_thread().name = load.worker
        sys.argv = list(load.argv)
        events.log.disabled = True  # the supervisor logs what it is told
        graph.importing_for_worker = True
        try:
            found: graph.Graph = load.origin.load()
        finally:
            graph.importing_for_worker = False
        origin.compare(found, load.digests, origin.digests(found.plan()))
        if not logging.root.handlers:
            logging.root.addHandler(_LogsTo(self.channel))
        self.channel.send(wire.Loaded())
        return found

    def _carry(self, found: graph.Graph) -> WorkerEngine | None:
        carry = self.expect(wire.AssignUnits)
        if carry is None:
            return None
        found.durability = carry.durability
        found.directory = None if carry.directory is None else Path(carry.directory)
        carrier = WorkerEngine(self, found, carry)
        self._carrier = carrier
        if self._drained.is_set():  # what was said before it was there
            carrier.end_sources()
        if self._halted.is_set():
            carrier.halt()
        return carrier

    def _report(self, carrier: WorkerEngine) -> None:
        """Say how the processors do, where that changes, until the end."""
        said: wire.StatusReply | None = None
        while not carrier.halted and not carrier.dispossessed:
            stand = carrier.stand()
            if stand != said:
                self.channel.send(stand)
                said = stand
                self._halted.wait(REPORT_S)
            carrier.wait_changed(REPORT_S)
            if self.joining and not carrier.halted:
                more = self.expect(wire.More)
                if more is not None:
                    carrier.join(more.units)
                    self.joining -= len(more.units)


class _LogsTo(logging.Handler):
    """Sends records that nobody else takes to the supervisor, which gives them to its own handlers."""

    def __init__(self, channel: wire.Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(wire.Logged(record.name, record.levelno, self.format(record)))
