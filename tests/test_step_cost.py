"""The cost of a step of one message: calls, and rows that LMDB reads and writes. Both may only get fewer."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

import cues
from cues import Graph, Store, Stream
from cues.engine.assembly import assemble
from cues.errors import Fenced
from cues.steps import ownership
from cues.steps.commit import Committer
from cues.steps.stepper import Stepper

WARM, STEPS = 600, 512
"""Steps before the count, and those that are counted: the try log is trimmed twice in them."""
CALLS_MAX = 110


@contextlib.contextmanager
def stepping(path: Path, durability: Literal["disk", "process"] = "process") -> Iterator[tuple[Store, Stepper]]:
    """The stepper of a processor whose steps have one message each, with messages for all steps of a test."""
    with Store(path, durability=durability) as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(WARM + STEPS)])
        assembly = assemble(Graph("g", [Stream(lambda message: message, "in", "out", id="s", batch_size=1)]), store)
        try:
            yield store, assembly.steppers[0]
        finally:
            assembly.close()


def calls_of_a_step(path: Path, durability: Literal["disk", "process"]) -> Counter[str]:
    """The calls of Python and C functions of one step, by the name of the function, as a mean."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    with stepping(path, durability) as (store, stepper):
        for _ in range(WARM):
            stepper.step()
        # How often latency is measured, and the files are looked at, depends on the speed of the machine.
        stepper.meter.left = STEPS + 1
        store.core.environment.look_at = float("inf")
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(STEPS):
                stepper.step()
        finally:
            sys.setprofile(before)
        assert len(store.queue("out")) == WARM + STEPS
    return calls


@pytest.mark.interpreted
@pytest.mark.parametrize(("durability", "reads"), [("process", 2), ("disk", 5)])
def test_a_step_of_one_message_makes_few_calls_and_touches_few_rows(
    tmp_path: Path, durability: Literal["disk", "process"], reads: int
) -> None:
    """It writes the message, the attempt, the rows of both logs, and the row of the processor: each of them once.

    It reads the rows of both logs. On a "disk" store, whose transactions are shared, it also reads the row of the
    processor, its pause, and its redrives.
    """
    calls = calls_of_a_step(tmp_path / "s", durability)
    assert calls["Transaction.put"] // STEPS == 5
    assert calls["Transaction.get"] // STEPS == reads
    if durability == "process":
        assert calls.total() / STEPS <= CALLS_MAX


def test_a_step_notices_a_commit_after_the_last_step(tmp_path: Path) -> None:
    """The rows that others write are not read if nobody has committed. A pause and a seek are commits."""
    with stepping(tmp_path / "s") as (store, stepper):
        assert [stepper.step() for _ in range(3)] == ["committed"] * 3
        cues.pause(store, processor="s")
        assert [stepper.step() for _ in range(2)] == ["committed", "paused"]
        cues.resume(store)
        assert [stepper.step() for _ in range(3)] == ["committed"] * 3
        ownership.seek(store, "g.s", {"g.s.in": 2})
        with pytest.raises(Fenced):
            stepper.step()
        assert len(store.queue("out")) == 7


@pytest.mark.interpreted
def test_a_step_notices_a_commit_with_the_number_of_its_own_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB gives the number of a transaction that was not committed to the next one."""

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    with stepping(tmp_path / "s") as (store, stepper):
        assert [stepper.step() for _ in range(3)] == ["committed"] * 3
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Committer, "write_tries", fail)
            stepper.step()
        cues.pause(store, processor="s")
        assert stepper.step() == "paused"
