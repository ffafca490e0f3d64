"""What a step of one message costs: calls, and rows that LMDB reads and writes. Both may only get fewer."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cues import Graph, Store, Stream
from cues.engine.assembly import assemble

WARM, STEPS = 600, 512
"""Steps before the count, and those that are counted: the try log is trimmed twice in them."""
CALLS_MAX = 141


def calls_of_a_step(path: Path) -> Counter[str]:
    """The calls of Python and C functions of one step, by the name of the function, as a mean."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    with Store(path, durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(WARM + STEPS)])
        assembly = assemble(Graph("g", [Stream(lambda message: message, "in", "out", id="s", batch_size=1)]), store)
        (stepper,) = assembly.steppers
        for _ in range(WARM):
            stepper.step()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(STEPS):
                stepper.step()
        finally:
            sys.setprofile(before)
        assert len(store.queue("out")) == WARM + STEPS
        assembly.close()
    return calls


@pytest.mark.interpreted
def test_a_step_of_one_message_makes_few_calls_and_touches_few_rows(tmp_path: Path) -> None:
    """It writes the message, the attempt, the rows of both logs, and the row of the processor: each of them once."""
    calls = calls_of_a_step(tmp_path / "s")
    assert calls.total() / STEPS <= CALLS_MAX
    assert calls["Transaction.put"] // STEPS == 5
    assert calls["Transaction.get"] // STEPS == 5
