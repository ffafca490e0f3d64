"""The judge of a soak: at the end of each life everything that came through is compared with the model.

It reads each queue with a named tailer, so that retention keeps what it has not read. Between two lives it keeps only
counts, and the last messages of ``enriched``, to which a seek of ``audit`` may return.
"""

from __future__ import annotations

import ast
import sqlite3
from collections import defaultdict, deque
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import cues
from cues import testing
from cues.queues.queue import Queue

from . import model
from .model import Message, Place

CHAINS = ("rows", "flights", "enriched", "shipped", "seen", *model.RESULTS)
"""Queues whose messages are those of flights, in the order of each origin."""
REMEMBERED = 1000
"""Audited messages of each partition of ``enriched`` that are remembered for seeks."""


@dataclass
class Bounds:
    """The numbers before which a life begins or ends."""

    rows: int = 0
    weather: int = 0
    bookings: int = 0


@dataclass
class Partition:
    """One partition of ``enriched``, and the progress of ``audited`` over it."""

    messages: deque[Message] = field(default_factory=deque)
    end: int = 1
    """The index after the last message."""
    next: int = 1
    """The index of the message that ``audited`` must show next."""
    audited: deque[Message] = field(default_factory=deque)
    """Those that are not compared yet."""
    seeks: list[int] = field(default_factory=list)
    """The places to which ``audit`` was moved and that ``audited`` does not show yet."""

    @property
    def is_done(self) -> bool:
        """Whether ``audited`` shows all that was enriched, each seek back, and nothing more."""
        return self.next == self.end and not self.seeks and not self.audited

    def at(self, index: int) -> Message | None:
        place = index - self.end + len(self.messages)
        return self.messages[place] if 0 <= place < len(self.messages) else None

    def follow(self) -> str | None:
        """Compare what was audited with what was enriched; return the problem."""
        while self.audited:
            message = self.audited[0]
            if message == self.at(self.next):
                self.next += 1
            elif to := [place for place in self.seeks if self.at(place) == message]:
                self.seeks = self.seeks[self.seeks.index(to[0]) + 1 :]
                self.next = to[0] + 1
            elif self.next >= self.end:
                return None  # its flight was appended after the judge had read ``enriched``
            else:
                return f"audited has {message}; expected {self.at(self.next)}, or one of {self.seeks}"
            self.audited.popleft()
        while self.end - len(self.messages) + REMEMBERED < self.next:
            self.messages.popleft()
        return None


class Judge:
    """Reads, and compares. A context manager: leaving it closes the stores, and another ``with`` continues."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.begin = Bounds()
        self.found: dict[str, list[Message]] = defaultdict(list)
        self.tailers: dict[str, Any] = {}
        self.partitions: dict[int, Partition] = defaultdict(Partition)
        self.delays: dict[str, list[int]] = {origin: [0] for origin in model.ORIGINS}
        """By origin: the number of flights and the sums after each flight, of figures that may still come."""
        self.flights = dict.fromkeys(model.ORIGINS, 0)
        self.reported = {"figures": 0, "errors": 0}
        self.judged = 0

    def __enter__(self) -> Judge:
        self.main = cues.open(self.place.main)
        self.other = cues.open(self.place.other)
        self.tailers = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.main.close()
        self.other.close()

    def queues(self) -> dict[str, Queue]:
        named = {name: self.main.queue(name) for name in self.main.queues() if name not in ("orders", "priced")}
        return {**named, "shipped": self.other.queue("shipped"), "booked abroad": self.other.queue("booked")}

    # --- reading ----------------------------------------------------------------------------------

    def collect(self) -> list[str]:
        """Read all that is new; return what is wrong with it at once."""
        problems = []
        for name, queue in self.queues().items():
            for number in range(queue.partitions):
                key = f"{name}/{number}"
                if key not in self.tailers:
                    isolation = "committed" if name.startswith("booked") else "uncommitted"
                    self.tailers[key] = queue.partition(number).tailer("judge", isolation=isolation)
                while new := self.tailers[key].read_many(1000):
                    self.take(name, number, new)
            if name.startswith("booked") and self.found[name]:
                last = self.found[name][-1]
                if last.get("part", 0) != last.get("of", 1) - 1:
                    problems.append(f"{name} ends in the middle of a transaction: {last}")
        return problems + [problem for part in self.partitions.values() if (problem := part.follow())]

    def take(self, name: str, number: int, messages: list[Message]) -> None:
        if name == "audited":
            self.partitions[number].audited.extend(messages)
            return
        if name == "enriched":
            self.partitions[number].messages.extend(messages)
            self.partitions[number].end += len(messages)
        self.found[name] += messages

    # --- expectations ------------------------------------------------------------------------------

    def expected(self, end: Bounds) -> dict[str, dict[Any, list[Message]]]:
        """The streams of each queue between two lives."""
        rows = [model.row(n) for n in range(self.begin.rows, end.rows)]
        good = [row for row in rows if not model.is_wrong(row["id"])]
        full = [model.enriched(row["id"]) for row in good]
        chains = {"rows": rows, "flights": good, **dict.fromkeys(("enriched", "shipped", "seen"), full)}
        chains |= {name: [flight for flight in full if model.result(flight) == name] for name in model.RESULTS}
        chains["weather"] = [model.weather(n) for n in range(self.begin.weather, end.weather)]
        made = {name: by_origin(messages) for name, messages in chains.items()}
        made["rows"] = {"all": rows}
        made["errors"] = {"all": [row for row in rows if model.is_wrong(row["id"])]}
        booked = [message for t in range(self.begin.bookings, end.bookings) for message in model.bookings(t)]
        return {**made, **{name: {"all": booked} for name in ("booked", "booked abroad", "confirmed")}}

    def missing(self, end: Bounds) -> dict[str, str]:
        """The queues that do not have all messages yet."""
        wanted = {name: sum(map(len, streams.values())) for name, streams in self.expected(end).items()}
        short = {
            name: f"{len(self.found[name])} of {count}"
            for name, count in wanted.items()
            if len(self.found[name]) < count
        }
        for number, part in self.partitions.items():
            if not part.is_done:
                more = f"{len(part.audited)} more" if part.audited else f"seeks to {part.seeks}"
                short[f"audited/{number}"] = f"{part.next} of {part.end}, {more}"
        figures = {message["origin"]: message["flights"] for message in self.found["figures"]}
        for origin, messages in self.expected(end)["enriched"].items():
            if messages and figures.get(origin) != self.flights[origin] + len(messages):
                short[f"figures of {origin}"] = f"{figures.get(origin)}"
        with closing(sqlite3.connect(self.place.table, timeout=60)) as db:
            for table, queue in (("flights", "enriched"), ("rejected", "errors")):
                if (rows := db.execute(f"select count(*) from {table}").fetchone()[0]) < wanted[queue]:
                    short[f"table {table}"] = f"{rows} of {wanted[queue]}"
        counts = {name: self.reported[name] + len(self.found[name]) for name in self.reported}
        if self.report() != counts:
            short["report"] = f"{self.report()}, expected {counts}"
        return short

    def report(self) -> dict[str, int]:
        return {"figures": 0, "errors": 0, **testing.state(self.main, "soak.report")}

    # --- judgement ---------------------------------------------------------------------------------

    def judge(self, end: Bounds) -> list[str]:
        """Compare a life, whose messages have all come through; return the problems, and begin the next life."""
        found = {**self.found, "errors": [e["err.proc/messages"]["rows"][0] for e in self.found["errors"]]}
        streams = self.expected(end)
        problems = []
        for name, expected in streams.items():
            if not (history := testing.check_history(expected, found.get(name, []))).exact:
                problems.append(f"{name}: {history}")
            self.judged += history.found
        problems += self.figures(streams["enriched"])
        problems += self.tables(streams)
        if (shown := ast.literal_eval(self.place.report.read_text())) and {**self.report(), **shown} != self.report():
            problems.append(f"report.json has {shown}, the state {self.report()}")
        self.reported = self.report()
        for store in (self.main, self.other):
            problems += [f"check of {store.path}: {problem}" for problem in store.check()]
            problems += [f"{store.path}: {problem}" for problem in testing.check_attempts(store)]
        self.begin = end
        self.found.clear()
        return problems

    def figures(self, enriched: dict[Any, list[Message]]) -> list[str]:
        """Each figure is the sum over a first part of the flights of its origin; parts grow; the last is all."""
        problems = [f"figures: {figure}" for figure in self.found["figures"] if figure["origin"] not in enriched]
        for origin, messages in enriched.items():
            sums = self.delays[origin]
            for message in messages:
                sums.append(sums[-1] + message["delay"])
            before = last = self.flights[origin]
            for figure in self.found["figures"]:
                if figure["origin"] == origin:
                    count = figure["flights"]
                    if not last < count <= before + len(messages) or figure["delay"] != sums[count - before]:
                        problems.append(f"figures: {figure} after {last} of {before + len(messages)} flights")
                        break
                    last = count
            else:
                if last != before + len(messages):
                    problems.append(f"figures: the last of {origin} has {last} of {before + len(messages)} flights")
            self.flights[origin] += len(messages)
            self.delays[origin] = sums[-1:]
        return problems

    def tables(self, streams: dict[str, dict[Any, list[Message]]]) -> list[str]:
        """Compare the rows of the database, and delete them."""
        problems = []
        with closing(sqlite3.connect(self.place.table, timeout=60)) as db, db:
            for table, queue, columns in (
                ("flights", "enriched", ("id", "origin", "wind")),
                ("rejected", "errors", ("id",)),
            ):
                rows = db.execute(f"select {', '.join(columns)} from {table} order by n").fetchall()
                expected = {
                    key: [{name: message[name] for name in columns} for message in messages]
                    for key, messages in streams[queue].items()
                }
                history = testing.check_history(expected, [dict(zip(columns, row)) for row in rows])
                if not history.exact:
                    problems.append(f"table {table}: {history}")
                self.judged += history.found
                db.execute(f"delete from {table}")
        return problems


def by_origin(messages: list[Message]) -> dict[Any, list[Message]]:
    return {origin: [m for m in messages if m["origin"] == origin] for origin in model.ORIGINS}
