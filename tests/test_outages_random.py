"""Several services that are away at random times, against lists: each message once, and the run never ends by itself.

    pull ─▶ in ─▶ look ─▶ mid ─▶ geo (four calls at once) ─▶ wide ─▶ bank, a database with the position of the sink
             └──▶ batch ─▶ whole

Each processor calls a service of its own. A service goes away after a random number of calls, with an error that is
taken at random from those that say so; before the error, it may have done its work. Some lives end in an outage.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from sets import bounded
from small import until
from test_outages import ERRORS

import cues
from cues.checkpoints import SQLCheckpoint
from cues.errors import ProcessorStopped
from cues.graphs.outage import Outage
from cues.tools import metrics

AWAY = [error for error, away in ERRORS if away and not getattr(error, "again", False)]
"""Without a commit that another one overtook: it is tried 20 times at once, before the processor waits."""
EACH = 40
"""Messages of a life; more than any service answers before it goes away."""


class Service:
    """A service that answers, until it is armed and has answered so many calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[int] = []
        self.lost: set[int] = set()
        """The calls whose work was done, and whose answer was an error."""
        self._guard = threading.Lock()
        self._error: Exception | None = None
        self._after, self._works = 0, False
        self.tried = threading.Event()

    def arm(self, error: Exception, after: int, works: bool) -> None:
        with self._guard:
            self._error, self._after, self._works = error, after, works
            self.tried.clear()

    def restore(self) -> None:
        with self._guard:
            self._error = None

    def __call__(self, n: int) -> None:
        with self._guard:
            if self._error is not None and self._after == 0:
                if self._works:
                    self.calls.append(n)
                    self.lost.add(n)
                self.tried.set()
                raise self._error
            self._after -= 1
            self.calls.append(n)


def is_bad(n: int) -> bool:
    """Return whether a message fails, which no wait mends."""
    return n % 11 == 7


class World:
    def __init__(self, place: Path) -> None:
        self.place, self.count = place, 0
        self.services = {name: Service(name) for name in ("in", "look", "geo", "batch", "bank")}

    def graph(self) -> cues.Graph:
        services, count = self.services, self.count
        graph = cues.Graph("g", store=self.place / "s", errors="errors", durability="process")

        @graph.source("in")
        def pull(position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
            for n in range(position or 0, count):
                services["in"](n)
                yield n + 1, {"n": n, "k": n % 3}

        @graph.stream("in", "mid", id="look", key="k")
        def look(message: Any, process: Any) -> Any:
            services["look"](message["n"])
            if is_bad(message["n"]):
                raise ValueError(message["n"])
            process.state["sum"] = process.state.get("sum", 0) + message["n"]
            return {**message, "sum": process.state["sum"]}

        @graph.stream("mid", "wide", id="geo", concurrency=4)
        def geo(message: Any) -> Any:
            services["geo"](message["n"])
            return message

        @graph.stream("in", "whole", id="batch", batch=True, batch_size=7)
        def batch(messages: Any) -> Any:
            for message in messages:
                services["batch"](message["n"])
            return messages

        checkpoint = SQLCheckpoint(self.place / "bank.db", schema="create table if not exists rows (n integer)")

        @graph.sink("wide", id="bank", checkpoint=checkpoint, batch_size=5)
        def bank(message: Any, process: Any) -> None:
            process.connection.exec_driver_sql("insert into rows values (?)", (message["n"],))
            services["bank"](message["n"])

        return graph

    def live(self, chance: random.Random) -> int:
        """Run until everything has passed, or end while something is away; return the number of outages."""
        self.count += EACH
        armed = chance.sample(list(self.services.values()), chance.randint(1, len(self.services)))
        for service in armed:
            service.arm(chance.choice(AWAY), chance.randint(0, EACH - 10), chance.random() < 0.3)
        ends_away, outages = chance.random() < 0.25, 0
        # A run that is ended in an outage says so at its end, and no other one does.
        with contextlib.suppress(*[ProcessorStopped] * ends_away), self.graph().start() as running:
            while armed:
                service = chance.choice(until(lambda: [service for service in armed if service.tried.is_set()]))
                told = until(lambda: running.counters()[f"g.{service.name}"].away)
                assert " since " in told and not running.idle(), told
                if not outages:
                    until(lambda: [unit.away for unit in metrics.of_store(running.store).figures() if unit.away])
                outages += 1
                if ends_away:
                    break
                service.restore()
                armed.remove(service)
                until(lambda: not running.counters()[f"g.{service.name}"].away)
            else:
                assert running.wait_done()
                self.judge(running)
        for service in armed:
            service.restore()
        return outages

    def judge(self, running: Any) -> None:
        sums, mid = [0, 0, 0], []
        for n in range(self.count):
            if not is_bad(n):
                sums[n % 3] += n
                mid.append({"n": n, "k": n % 3, "sum": sums[n % 3]})
        bad = [n for n in range(self.count) if is_bad(n)]
        found = {name: running.messages(name) for name in ("in", "mid", "wide", "whole")}
        assert [message["n"] for message in found["in"]] == list(range(self.count))
        assert found["mid"] == found["wide"] == mid
        assert [message["n"] for message in found["whole"]] == list(range(self.count))
        failed = [error["err.proc/messages"].values() for error in running.messages("errors")]
        assert [message["n"] for messages in failed for each in messages for message in each] == bad
        with sqlite3.connect(self.place / "bank.db") as session:
            assert session.execute("select n from rows").fetchall() == [(message["n"],) for message in mid]
        session.close()
        look = self.services["look"]
        assert sorted({*look.calls}) == list(range(self.count))
        assert [n for n in look.calls if n not in look.lost] == sorted({*look.calls} - look.lost), "called twice"


@bounded("lives", 3, 200)
def test_outages_at_random_lose_and_double_nothing(tmp_path: Path, lives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outage, "wait_s", staticmethod(lambda failures, error=None: 0.02))
    chance, world = random.Random(seeds.new()), World(tmp_path)
    assert sum(world.live(chance) for _ in range(lives)) >= lives
    with world.graph().start() as running:
        assert running.wait_done()
        world.judge(running)
