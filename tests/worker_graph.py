"""The three stages of kill_stages.py as one graph, for runs in worker processes; every call prints something.

A print must not fail when no process reads it any more, as in the moment between the death of a
supervisor and that of its workers: a message whose function failed would be on the error queue.
"""

from __future__ import annotations

import kill_stages

import cues

processors = [
    processor
    for stage in (kill_stages.first, kill_stages.second, kill_stages.third)
    for processor in stage.processors.values()
    if processor.fn is not None
]
graph = cues.Graph("work", processors, store=kill_stages.where.stores["first"], durability="process", errors="errors")

_pause = kill_stages.pause


def _pause_and_print(seconds: float) -> None:
    print("." * 50)
    _pause(seconds)


kill_stages.pause = _pause_and_print
