"""A lane of one's own: one class and one entry in the list, and the unit gives it its turns."""

from __future__ import annotations

from typing import Any

import pytest

from cues import Graph, QueueOptions, Stream, testing
from cues.engine import assembly
from cues.overrides import override
from cues.steps.lanes import Lane


class Sixth(Lane):
    """Has ten things to do, and may do each before or between the messages."""

    left = 10
    turns: list[str]

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        self.armed = True

    @override
    def waits(self) -> bool:
        return self.left > 0

    @override
    def step(self) -> bool:
        self.left -= 1
        self.armed = self.left > 0
        self.turns.append("lane")
        return True


@pytest.mark.interpreted
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_and_the_inputs_take_turns(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def take(message: Any) -> Any:
        turns.append("input")
        return message

    monkeypatch.setattr(Sixth, "turns", turns, raising=False)
    monkeypatch.setattr(assembly, "LANES", (*assembly.LANES, *[Sixth] * lanes))
    graph = Graph("g", [Stream(take, "in", "out", id="take", batch_size=1)], queues={"in": QueueOptions()})
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(5)])
        testing.run_until_idle(graph, store)
        assert len(testing.messages(store, "out")) == 5
    assert turns == ([*["lane"] * lanes, "input"]) * 5 + ["lane"] * 5 * lanes
