"""The sentence that ends ``cues run``: a table of the ways a run ends, with what waits, how many and for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from small import until

import cues
from cues.cli.output import CommandOutput
from cues.cli.summary import Before, Ending, Summary
from cues.engine import pausing


def away(message: Any) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


def fails(message: Any) -> None:
    raise ValueError("no")


def works(message: Any) -> None:
    pass


def ended(running: Any) -> None:
    running.wait_idle(60)


def drained_while_away(running: Any) -> None:
    until(lambda: running.counters()["g.save"].away)
    running.drain(60)


def halted_while_away(running: Any) -> None:
    until(lambda: running.counters()["g.save"].away)
    running.halt()


def stopped(running: Any) -> None:
    until(lambda: running.stopped)


AGAIN = "cues run graph.py continues"
AWAY = "; save was waiting for "
CASES: dict[str, tuple[Callable[[Any], None], bool, int, Callable[[Any], None], Ending, list[str], list[str]]] = {
    # case: function of the sink, paused before, messages sent, until, ending, what the sentence says, and what not
    "done": (works, False, 3, ended, "done", ["g: 3 rows processed in ", ", kept in "], ["wait"]),
    "idle": (works, False, 3, ended, "idle", ["g: 3 rows processed in "], ["wait"]),
    "nothing new": (works, False, 0, ended, "done", ["nothing to do"], ["wait"]),
    "nothing new, paused": (
        works, True, 2, ended, "done", ["g: nothing new; 2 messages for save wait"], ["starts over"],
    ),
    "drained": (works, False, 3, ended, "drained", ["all input (3 rows) is processed. " + AGAIN], ["wait"]),
    "drained, nothing came": (works, False, 0, ended, "drained", ["all input (no message) is processed"], ["wait"]),
    "drained, paused": (
        works, True, 1, ended, "drained", ["nothing is lost; 1 message for save waits. " + AGAIN], ["is processed"],
    ),
    "drained, away": (
        away, False, 3, drained_while_away, "drained",
        ["g: interrupted after ", "nothing is lost; 3 messages for save wait" + AWAY, "Connection refused. " + AGAIN],
        ["is processed"],
    ),
    "aborted, away": (
        away, False, 2, halted_while_away, "aborted",
        ["g: interrupted after ", "; 2 messages for save wait" + AWAY, AGAIN], ["is processed"],
    ),
    "aborted": (works, False, 3, ended, "aborted", ["no message waits on its queues. " + AGAIN], ["is processed"]),
    "stopped": (
        fails, False, 4, stopped, "stopped",
        ["g: stopped by an error after ", "nothing is lost; 4 messages for save wait. " + AGAIN], ["is processed"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_end_of_a_run_says_what_waits_and_for_what(store: cues.Store, case: str) -> None:
    function, is_paused, sent, until_end, ending, says, not_said = CASES[case]
    graph = cues.Graph("g", [cues.Source("rows"), cues.Sink(function, "rows", id="save")])
    heard: list[str] = []
    graph.start(store=store).close()
    if is_paused:
        pausing.pause(store, processor="save")
    running = graph.start(store=store)
    try:
        summary = Summary(running, "graph.py", Before({}, {}), None)
        for n in range(sent):
            running.send("rows", {"n": n})
        until_end(running)
        summary.finish()
    finally:
        running.close()
    summary.show(CommandOutput("json"), ending, heard.append)
    assert all(text in heard[0] for text in says) and not any(text in heard[0] for text in not_said), heard
