"""Wall clocks that step back and forward between runs of one graph, at random, against plain lists.

    in (some messages are delayed) ─▶ p, with state that expires ─▶ out

Each round sets the clock, sends messages, and runs the graph to its end. The lists say which messages are due by the
clock of the round: exactly these are delivered, once. A value of the state may be seen if it is the last one that was
written, and has not expired by the clock. It must be seen if it has not expired in any round since its write: a clock
that was ahead may have removed it.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import seeds
from sets import bounded

import cues
from cues import Graph, testing

START = datetime(2026, 1, 31, tzinfo=UTC)
TTL_S = 60
STEPS_S = [0, 1, 30, 59, 60, 61, 600, 86_400, -1, -30, -61, -600, -86_400]
"""Steps of the clock. Those back are as long as those forward, so the clock passes the same times again and again."""


class Value(NamedTuple):
    n: int
    written: datetime
    expired: bool
    """True if it had expired in some round."""


def handle(message: dict[str, Any], process: Any) -> dict[str, Any]:
    seen = dict(process.state)
    process.state[message["field"]] = message["n"]
    return {"n": message["n"], "seen": seen}


def graph() -> Graph:
    return Graph("g", [cues.Source("in"), cues.Stream(handle, "in", "out", id="p", key="key", ttl=TTL_S)])


class Lists:
    """The messages and values, as plain lists and dicts."""

    def __init__(self) -> None:
        self.sent: dict[int, dict[str, Any]] = {}
        self.waiting: dict[int, datetime] = {}
        self.values: dict[tuple[str, str], Value] = {}

    def expire(self, now: datetime) -> None:
        for place, value in self.values.items():
            if value.written + timedelta(seconds=TTL_S) <= now:
                self.values[place] = value._replace(expired=True)

    def take(self, out: list[dict[str, Any]], now: datetime) -> None:
        """Compare what a round has delivered, in its order."""
        due = sorted(n for n, at in self.waiting.items() if at <= now)
        assert sorted(one["n"] for one in out) == due, "each message that is due, once, and no other"
        for one in out:
            del self.waiting[one["n"]]
            message = self.sent[one["n"]]
            mine = {field: value for (key, field), value in self.values.items() if key == message["key"]}
            must = {field: value.n for field, value in mine.items() if not value.expired}
            may = {f: value.n for f, value in mine.items() if value.written + timedelta(seconds=TTL_S) > now}
            assert must.items() <= one["seen"].items() <= may.items(), (must, one, may)
            self.values[message["key"], message["field"]] = Value(one["n"], now, False)


@bounded("rounds", 60, 2_000)
def test_messages_are_due_and_values_expire_by_a_clock_that_steps_back_and_forward(
    cues_store: cues.Store, rounds: int
) -> None:
    dice, lists, taken = random.Random(seeds.new()), Lists(), 0
    back = 0
    with testing.Clock(START) as clock:
        for _ in range(rounds):
            step = dice.choice(STEPS_S)
            back += step < 0
            clock.set(clock.now + timedelta(seconds=step))
            lists.expire(clock.now)
            with cues_store.queue("in").appender() as appender:
                for _ in range(dice.randrange(4)):
                    n = len(lists.sent)
                    message = {"n": n, "key": dice.choice("xyz"), "field": dice.choice("abc")}
                    lists.sent[n], lists.waiting[n] = message, clock.now
                    if dice.random() < 0.4:
                        lists.waiting[n] = clock.now + timedelta(seconds=dice.choice(STEPS_S))
                        appender.write(cues.delayed(message, deliver_at=lists.waiting[n]))
                    else:
                        appender.write(message)
            testing.run_until_idle(graph(), cues_store)
            out = testing.messages(cues_store, "out")
            lists.take(out[taken:], clock.now)
            taken = len(out)
        clock.set(max([clock.now, *lists.waiting.values()]))
        lists.expire(clock.now)
        testing.run_until_idle(graph(), cues_store)
        lists.take(testing.messages(cues_store, "out")[taken:], clock.now)
    assert not lists.waiting and back > rounds // 5
    assert cues_store.check() == []
    print(f"{rounds} rounds, {back} steps back, {len(lists.sent)} messages")
