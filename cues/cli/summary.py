"""The summary that ``cues run`` prints at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from cues.base import events
from cues.base.data import dataclass
from cues.base.texts import count, duration
from cues.cli.again import errors_of, paused, run_again
from cues.cli.output import CommandOutput, TableColumn
from cues.cli.printing import out
from cues.errors import CuesError
from cues.graphs.graphfile import shown
from cues.graphs.pause import ProcessorPause
from cues.graphs.running import Running
from cues.operate.runs import end_of, positions_of, queues_of, rows_of
from cues.queues.backpressure import WARN_S
from cues.queues.store import Store
from cues.steps.delays import Waiting, waiting, waiting_of

Ending = Literal["done", "idle", "drained", "aborted", "stopped"]
"""done: everything processed; idle: --idle-exit; drained, aborted: Ctrl-C once, twice; stopped: an error."""

_COLUMNS = (
    TableColumn("processor", "processor"),
    TableColumn("in", "taken", right=True),
    TableColumn("out", "written", right=True),
    TableColumn("failed", "failed", right=True, optional=True),
    TableColumn("retried", "retries", right=True, optional=True),
    TableColumn("waited", "waited", right=True, optional=True),
    TableColumn("to", "outputs", optional=True),
)


@dataclass
class Before:
    """The content of a store before the run."""

    ends: dict[str, int]
    """The number of messages that were ever on a queue."""
    positions: dict[str, int]
    """The position, by tailer id."""

    @staticmethod
    def of(path: Path, elsewhere: Mapping[str, Path]) -> Before:
        """Read the store at ``path``, and queues in other stores; skip those that are missing or cannot be read."""
        ends: dict[str, int] = {}
        positions: dict[str, int] = {}
        for place in {path, *elsewhere.values()}:
            if not (place / "data.mdb").exists():
                continue
            with contextlib.suppress(CuesError), Store(place, readonly=True) as store:  # the start reports the reason
                here = [name for name in store.queues() if elsewhere.get(name, path) == place]
                ends |= {name: end_of(store.queue(name)) for name in here}
                if place == path:
                    positions = positions_of(store)
        return Before(ends, positions)


class Summary:
    """Compares the store before and after. Finished before the graph closes."""

    def __init__(self, running: Running, target: str, before: Before, store: str | None) -> None:
        """``target`` is the graph file, ``store`` the value of ``--store``."""
        self._running = running
        self._queues = queues_of(running)
        named, known = self._queues.named, self._queues.before
        self._again = run_again(target, named, store)
        self._errors = errors_of(named or target, None if named else store)
        self._before = Before({**before.ends, **known.ends}, {**before.positions, **known.positions})
        self._started_at = time.monotonic()
        self.seconds = 0.0
        self._positions: dict[str, int] = {}
        self._ends_after: dict[str, int] = {}
        self._messages: dict[str, int] = {}
        self.unresolved: dict[str, int] = {}
        """Failed messages by error queue, of this run and earlier ones, that no processor of the graph has taken."""
        self.held: list[Waiting] = []
        """The delayed messages that wait for a later run."""
        self.left: dict[str, int] = {}
        """By processor: the messages that it has not taken."""
        self.away: dict[str, str] = {}
        """By processor: what it waits for."""
        self.paused: list[ProcessorPause] = []
        """The processors of the graph that are paused at the end."""
        self._target, self._store = target, store
        self._earlier: dict[str, int] = {}
        """The same, of earlier runs only."""

    def finish(self) -> None:
        """Read the figures at the end of the run."""
        self.seconds = time.monotonic() - self._started_at
        self.left = {row["processor"]: row["lag"] for row in rows_of(self._running, self._queues) if row["lag"]}
        plan = self._running.plan
        self.away = {plan.node(id).name: c.away for id, c in self._running.counters().items() if c.away}
        if not self._running.store.closed:
            self.held = waiting(self._running.store)
            from cues.engine.pausing import list_pauses

            self.paused = list_pauses(self._running.store, self._running.plan.id)
        now = self._queues.now()
        self.held += [waiting_of(unit, *held) for unit, held in now.delayed.items()]
        self._ends_after, self._positions, self._messages = now.ends, now.positions, now.messages
        for name, records in self._unresolved_records().items():
            earlier = max(0, records - self.new.get(name, 0))
            self.unresolved[name] = self._queues.failed_on(name, records)
            self._earlier[name] = self.unresolved[name] - self._queues.failed_on(name, records - earlier)

    @property
    def new(self) -> dict[str, int]:
        """The number of messages appended to each queue."""
        return {name: end - self._before.ends.get(name, 0) for name, end in self._ends_after.items()}

    @property
    def inputs(self) -> dict[str, int]:
        """The number of new input messages: written by sources, or taken from queues that are fed from outside."""
        inputs: dict[str, int] = {}
        for name in self.sources:
            from_outside = name in self._running.plan.fed or not self._running.pulls
            inputs[name] = self._taken(name, self._before.positions) if from_outside else self.new.get(name, 0)
        return inputs

    def _taken(self, queue: str, since: Mapping[str, int]) -> int:
        """The number of messages that the first of the readers of a queue has taken since then, on all partitions."""
        taken = [0]
        for node in self._running.plan.running:
            prefix = f"{node.id}.{queue}"
            mine = [(tailer, at) for tailer, at in self._positions.items() if tailer.partition("/")[0] == prefix]
            taken.append(sum(at - since.get(tailer, 1) for tailer, at in mine))  # a new tailer begins at 1
        return max(taken)

    @property
    def sources(self) -> list[str]:
        """The queues that bring messages into the graph."""
        plan = self._running.plan
        sources = [node.outputs[0].queue for node in plan.nodes if node.kind == "source"]
        return list(dict.fromkeys([*sources, *plan.fed]))

    @property
    def failed(self) -> int:
        """The number of messages that failed for good in this run."""
        return sum(counter.failed for counter in self._running.counters().values())

    def _unresolved_records(self) -> dict[str, int]:
        """The number of unresolved records on each error queue that no processor of the graph has taken."""
        left: dict[str, int] = {}
        for queue in sorted({node.errors for node in self._running.plan.nodes if node.errors}):
            left[queue] = min(self._messages.get(queue, 0), self._ends_after.get(queue, 0) - self._taken(queue, {}))
            left[queue] = self._queues.unresolved(queue, left[queue])
        return {queue: records for queue, records in left.items() if records > 0}

    def show(self, output: CommandOutput, ending: Ending, say: Callable[[str], None]) -> None:
        """Print the summary; also print its sentences on stderr if stdout is for programs."""
        counters = self._running.counters()
        nothing_new = not any(counter.steps for counter in counters.values())
        sentence = self._sentence(ending, nothing_new)
        notes = self._notes()
        if output.json:
            for each in (sentence, *notes):
                say(each)
            output.say(
                sentence,
                graph=self._running.plan.id,
                store=shown(self._running.store.path),
                **self._queues.facts,
                outcome=ending,
                nothing_new=nothing_new,
                seconds=round(self.seconds, 3),
                failed=self.failed,
                unresolved=self.unresolved,
                left=self.left,
                away=self.away,
                delayed={held.unit: {"messages": held.messages, "next": held.next} for held in self.held},
                paused=[pause.facts() for pause in self.paused],
                processors={id: _plain(counter) for id, counter in counters.items()},
                queues={name: {"messages": self._messages[name], "new": new} for name, new in self.new.items()},
            )
            return
        if not nothing_new:
            output.rows(self._rows(), _COLUMNS)
            out()
        out(sentence)
        for note in notes:
            out(note)

    def _notes(self) -> list[str]:
        """The next things to do, a sentence each."""
        notes = [f"{held}: run again then" for held in self.held]
        if self.failed:
            notes.append(f"{count(self.failed, 'message')} failed: {self._errors}")
        for queue, messages in self.unresolved.items():
            before = self._earlier[queue]
            some = "all" if before == messages else f"{before:,}"
            earlier = f", {some} of them in earlier runs" if before > 0 else ""
            notes.append(f"{count(messages, 'failed message')} unresolved on {queue}{earlier}: {self._errors}")
        return notes + [paused(pause, self._target, self._store) for pause in self.paused]

    def _rows(self) -> list[dict[str, Any]]:
        writers: dict[str, int] = {}
        plan = self._running.plan
        for node in plan.nodes:
            for port in node.outputs:
                writers[port.queue] = writers.get(port.queue, 0) + 1
        rows = []
        for id, counter in self._running.counters().items():
            node = plan.node(id)
            outputs = []
            for port in node.outputs:
                alone = writers[port.queue] == 1 and len(node.outputs) > 1
                outputs.append(f"{port.queue} {self.new.get(port.queue, 0):,}" if alone else port.queue)
            target = getattr(node.options.checkpoint, "where", None)
            if target is not None:
                outputs.append(target if "://" in target else shown(target))
            rows.append(
                {
                    "processor": node.name,
                    "taken": counter.taken if node.kind != "source" else None,
                    "written": counter.written if node.outputs else None,
                    "failed": counter.failed or None,
                    "retries": counter.retries or None,
                    "waited": duration(counter.waited_s) if counter.waited_s >= WARN_S else None,
                    "outputs": ", ".join(outputs),
                }
            )
        return rows

    def _sentence(self, ending: Ending, nothing_new: bool) -> str:
        graph = self._running.plan.id
        if ending in ("done", "idle") and nothing_new:
            processed = _counted({name: self._ends_after.get(name, 0) for name in self.sources})
            if not processed:
                if not self._running.pulls:
                    return f"{graph}: its queues are empty, and a backfill runs no source; nothing to do."
                return f"{graph}: no source yielded a message; nothing to do."
            anew = "--fresh"
            from cues.operate import fresh

            with contextlib.suppress(CuesError):  # an unreachable target is reported by the run that needs it
                if targets := fresh.filled(self._running.plan, Path(self._running.store.directory)):
                    anew = f"Without {_and(list(targets))}, {anew}"
            if self.left or self.away:
                return f"{graph}: nothing new{self._waiting}"
            return f"{_and(processed)} already processed; nothing new. {anew} starts over"
        took = duration(self.seconds)
        place = self._queues.place
        inputs = _and(_counted(self.inputs))
        what = inputs or "the remaining messages"
        if ending in ("done", "idle"):
            return f"{graph}: {what} processed in {took}, kept in {place}{self._waiting}"
        again = f"{self._again} continues"
        how = "stopped by an error" if ending == "stopped" else "interrupted"
        if ending == "stopped" or self.left or self.away:
            return f"{graph}: {how} after {took}; nothing is lost{self._waiting}. {again}"
        if ending == "drained":
            return f"{graph}: {how} after {took}; all input ({inputs or 'no message'}) is processed. {again}"
        return f"{graph}: {how} after {took}; no message waits on its queues. {again}"

    @property
    def _waiting(self) -> str:
        """The messages that no processor has taken, and what processors wait for; "" if there is neither."""
        left = [f"{count(number, 'message')} for {name}" for name, number in self.left.items()]
        waits = f"; {_and(left)} {'waits' if list(self.left.values()) == [1] else 'wait'}" if left else ""
        return waits + "".join(f"; {name} was waiting for {what}" for name, what in self.away.items())


def _plain(counters: events.Counters) -> dict[str, Any]:
    """The counters, with quantiles instead of the histograms."""
    numbers = {name: value for name, value in vars(counters).items() if type(value) is int}
    latency, sizes = counters.latency.quantiles(1e-6), counters.sizes.quantiles()
    return {**numbers, "latency_s": latency, "batch": sizes}


def _counted(numbers: dict[str, int]) -> list[str]:
    """Counts such as ``27,004 flights``: messages are named after their queue."""
    return [f"{n:,} {name}" if n > 1 else f"1 message of {name}" for name, n in numbers.items() if n]


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
