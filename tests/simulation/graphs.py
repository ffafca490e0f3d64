"""A random graph over two stores, and a naive model of it: the functions, applied to whole lists.

    q0 ─▶ s0 ─▶ q1 ─▶ s1 ─▶ … ─▶ q<k> ─▶ sink ─▶ target
          └──▶ aside0, fired0, errors           └─▶ jobs, for the members of a group, and moves, for transactions

Messages are ``{"n": number, "i": its place on q0}``. Each queue is in the home store or in another one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import cues
from cues import AnyOf, Graph, Sink, Source, Stream, testing
from cues.checkpoints import deliveries
from cues.checkpoints.deliveries import Row

Message = dict[str, Any]

ORDERED: Final = ("map", "some", "sum", "fork", "fail", "batch", "filter", "join")
"""Kinds of stages that keep the order; the model of "sum" and "join" needs an input in order."""
ANY_ORDER: Final = ("map", "some", "fork", "fail", "filter", "delay", "alts")
LATEST_S: Final = 100
"""Delays and timers are due within this time."""


class Target:
    """A database with one table and the rows of positions, as :func:`deliveries.write_once` uses it."""

    where = "the simulated database"

    def __init__(self) -> None:
        self.rows: list[Message] = []
        self.positions: dict[str, Row] = {}
        self._owner: Any = None

    @contextlib.contextmanager
    def begin(self) -> Iterator[dict[str, Any]]:
        """Lock the row, as "select for update" does; the lock of a killed process is free."""
        process = self.world.current
        while self._owner is not None and not self._owner.killed and self._owner is not process:
            if process is None or self.world.calm:
                raise AssertionError("the target is locked by a process that does not run")
            process.park("waits for the target")
        self._owner = process
        try:
            change: dict[str, Any] = {"rows": [], "positions": dict(self.positions)}
            yield change
            self.rows += change["rows"]
            self.positions = change["positions"]
        finally:
            if self._owner is process:
                self._owner = None

    world: Any = None

    def read(self, change: dict[str, Any], processor: str, *, lock: bool) -> Row | None:
        return change["positions"].get(processor)  # type: ignore[no-any-return]

    def write(self, change: dict[str, Any], processor: str, row: Row, *, insert: bool) -> bool:
        change["positions"][processor] = row
        return True

    def is_open(self, change: dict[str, Any]) -> bool:
        return True

    def processors(self, change: dict[str, Any]) -> list[str]:
        return list(change["positions"])


@dataclass
class Expected:
    """The results of a stage, or of all."""

    on: list[Message] = field(default_factory=list)
    aside: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    fired: list[Message] = field(default_factory=list)


class Stage:
    """A stream from q<i> to q<i+1>."""

    def __init__(self, chance: random.Random, number: int, in_order: bool) -> None:
        self.number = number
        kinds = ORDERED if in_order else ()
        self.kind = "timer" if number == 0 and chance.random() < 0.25 else chance.choice((*kinds, *ANY_ORDER))
        self.in_order = in_order and self.kind not in ("delay", "alts")
        self.modulus = chance.randint(2, 5)
        self.others = [{"n": chance.randint(0, 30), "i": 1000 + i} for i in range(chance.randint(5, 25))]
        """The messages of the other input of "join" and "alts"."""
        self.options: dict[str, Any] = {
            "id": f"s{number}",
            "batch_size": chance.choice((1, 2, 3, 7)),
            "side_effects": chance.random() < 0.4,
        }
        if self.kind in ("map", "some", "fork", "filter") and chance.random() < 0.3:
            self.options["across"] = "pending"

    @property
    def has_other(self) -> bool:
        return self.kind in ("join", "alts")

    def model(self, messages: list[Message]) -> Expected:
        """The results for a list of messages."""
        k, all, sums = self.modulus, Expected(), dict[int, int]()
        for message in messages:
            n = message["n"]
            if self.kind in ("map", "batch"):
                all.on.append(message | {"n": n + 1})
            elif self.kind == "some":
                all.on += [message] * (n % k)
            elif self.kind == "sum":
                sums[n % k] = sums.get(n % k, 0) + n
                all.on.append(message | {"n": sums[n % k]})
            elif self.kind == "fork":
                (all.aside if n % k == 0 else all.on).append(message)
            elif self.kind == "fail":
                (all.failed if n % k == 0 else all.on).append(message)
            elif self.kind == "filter":
                all.on += [message] if n % k else []
            elif self.kind == "timer":
                all.on.append(message)
                all.fired.append({"n": n + 1, "i": message["i"]})
            else:
                all.on.append(message)
        if self.kind == "alts":
            all.on += self.others
        if self.kind == "join":
            all.on = [left | {"n": left["n"] + right["n"]} for left, right in zip(messages, self.others)]
        return all

    def stream(self, **more: Any) -> Stream:
        k, number, options = self.modulus, self.number, self.options | more
        here, there, other = f"q{number}", f"q{number + 1}", f"x{number}"

        def summed(message: Message, process: Any) -> Message:
            process.state["sum"] = process.state.get("sum", 0) + message["n"]
            return message | {"n": process.state["sum"]}

        def fails(message: Message) -> Message:
            if message["n"] % k == 0:
                raise ValueError(message["n"])
            return message

        def batched(messages: list[Message]) -> list[Message]:
            return [message | {"n": message["n"] + 1} for message in messages]

        def delayed(message: Message) -> Any:
            return cues.delayed(message, delay=timedelta(seconds=message["n"] % 7)) if message["n"] % k else message

        def set_timer(message: Message, process: Any) -> dict[str, Message]:
            process.state["n"] = message["n"]
            process.timer(message["i"], process.now + timedelta(seconds=message["n"] % 20))
            return {"on": message}

        def fire(timer: Message, process: Any) -> dict[str, Message]:
            return {"fired": {"n": process.state["n"] + 1, "i": timer["key"]}}

        if self.kind == "map":
            return Stream(lambda message: message | {"n": message["n"] + 1}, here, there, **options)
        if self.kind == "some":
            return Stream(lambda message: [message] * (message["n"] % k), here, there, **options)
        if self.kind == "sum":
            return Stream(summed, here, there, key=lambda message: message["n"] % k, **options)
        if self.kind == "fork":
            to = {"on": there, "aside": f"aside{number}"}
            return Stream(lambda message: {"on" if message["n"] % k else "aside": message}, here, to, **options)
        if self.kind == "fail":
            return Stream(fails, here, there, **options)
        if self.kind == "batch":
            return Stream(batched, here, there, batch=True, **options)
        if self.kind == "filter":
            return Stream(lambda message: message, here, there, where=lambda message: message["n"] % k, **options)
        if self.kind == "delay":
            return Stream(delayed, here, there, **options)
        if self.kind == "timer":
            return Stream(set_timer, here, {"on": there, "fired": f"fired{number}"}, key="i", timer=fire, **options)
        if self.kind == "alts":
            return Stream(lambda message: message, AnyOf(here, other), there, **options)
        return Stream(
            lambda left, right: left | {"n": left["n"] + right["n"]}, {"left": here, "right": other}, there, **options
        )


class Plan:
    """The graph of one run, the messages that come in, and the expected results."""

    def __init__(self, chance: random.Random, place: Path) -> None:
        self.home, self.away = str(place / "home"), str(place / "away")
        self.durability = chance.choice(("process", "process", "disk"))
        in_order, self.stages = True, list[Stage]()
        for number in range(chance.randint(1, 3)):
            self.stages.append(stage := Stage(chance, number, in_order))
            in_order = stage.in_order
        self.in_order = in_order
        self.messages = [{"n": chance.randint(0, 30), "i": i} for i in range(chance.randint(5, 40))]
        self.has_source = chance.random() < 0.3
        self.last = f"q{len(self.stages)}"
        self.target = Target()
        self.queues: dict[str, dict[str, Any]] = {"jobs": {"partitions": 2, "key": "i"}}
        self.trimmed = set[str]()
        self.pending = set[str]()
        """Queues in the other store whose writer commits by acknowledgements."""
        self.sink_options = {"batch_size": chance.choice((1, 3, 8))}
        names = [f"q{stage.number + 1}" for stage in self.stages]
        kinds = [stage.kind for stage in self.stages]
        for stage, before, after in zip(self.stages, ["", *kinds], [*kinds[1:], ""]):
            if after == "join" or before == "delay":  # refused: such a join, and messages that would be held
                stage.options.pop("across", None)
            if "across" in stage.options:
                self.pending |= {f"q{stage.number + 1}", f"aside{stage.number}"}
                self.queues[f"q{stage.number + 1}"] = {"path": self.away}
        for name in [*names, *(f"aside{stage.number}" for stage in self.stages if stage.kind == "fork")]:
            if chance.random() < 0.35:
                self.queues.setdefault(name, {})["path"] = self.away
            if name[0] == "q" and name != self.last and chance.random() < 0.3:
                self.queues.setdefault(name, {})["retention"] = "read"
                self.trimmed.add(name)

    def graph(self) -> Graph:
        """Return the graph, made anew for each start."""
        messages, target = self.messages, self.target

        def source(position: int | None) -> Iterator[tuple[int, Message]]:
            for at in range(position or 0, len(messages)):
                yield at + 1, messages[at]

        def save(message: Message, process: Any) -> None:
            with deliveries.write_once(target, process, deliveries.Transaction) as transaction:
                transaction.connection["rows"] += transaction.fresh([message])

        def reads(queue: str) -> dict[str, Any]:
            return {"isolation": "committed"} if queue in self.pending else {}

        last, end = self.last, reads(self.last)
        processors: list[Any] = [stage.stream(**reads(f"q{stage.number}")) for stage in self.stages]
        processors.append(Stream(lambda message: message, last, "jobs", id="jobber", batch_size=5, **end))
        processors.append(Stream(lambda message: message, last, "moves", id="mover", batch_size=2, **end))
        processors.append(Sink(save, last, id="saver", **self.sink_options, **end))
        if self.has_source:
            processors.append(Source("q0", source, batch_size=3))
        return Graph("g", processors, errors="errors", queues=self.queues, durability=self.durability)

    @property
    def waits(self) -> int:
        """The number of times that a message may be delayed on its way, or wait for a timer."""
        return sum(stage.kind in ("delay", "timer") for stage in self.stages)

    @property
    def fed(self) -> dict[str, list[Message]]:
        """The messages that a program appends, by queue."""
        fed = {f"x{stage.number}": stage.others for stage in self.stages if stage.has_other}
        return fed if self.has_source else {"q0": self.messages, **fed}

    def differences(self, home: cues.Store, away: cues.Store) -> list[str]:
        """Compare all queues, and the target, with the model."""
        found: list[str] = []
        ids = home.queues(), away.queues()

        def compare(name: str, expected: list[Message], in_order: bool) -> None:
            store = home if name in ids[0] else away
            isolation: Any = "committed" if name in self.pending and store is away else "uncommitted"
            there = list(store.queue(name).tailer(isolation=isolation)) if name in ids[0] or name in ids[1] else []
            judge(name, expected, there, in_order)

        def judge(what: str, expected: list[Message], there: list[Message], in_order: bool) -> None:
            history = testing.check_history(expected, there, ordered=in_order)
            if not history.exact:
                found.append(f"{what}: {history}")

        series, failed, in_order = self.messages, list[Message](), True
        for stage in self.stages:
            results = stage.model(series)
            series, in_order = results.on, in_order and stage.in_order
            failed += results.failed
            if f"q{stage.number + 1}" not in self.trimmed:
                compare(f"q{stage.number + 1}", series, in_order)
            compare(f"aside{stage.number}", results.aside, in_order)
            compare(f"fired{stage.number}", results.fired, False)
        errors = testing.messages(home, "errors") if "errors" in ids[0] else []
        judge("errors", failed, [m for error in errors for m in next(iter(error["err.proc/messages"].values()))], False)
        judge("target", series, self.target.rows, in_order)
        compare("jobs", series, False)
        compare("done", series, False)
        compare("moved", series, in_order)
        return found
