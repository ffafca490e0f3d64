"""Cases of all connectors to a log: a target that is presented with numbers, and a mirror of a log that is killed."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from typing import Any, cast

import seeds
from children import Child
from test_processors_sql import Presented

import cues
from cues import testing


def deliver(target: Any, start: int, end: int, inside: Any = None, **options: Any) -> None:
    """Present the messages of the numbers [start, end) to a target; ``inside`` is called instead of its ``write``."""
    presented = cast(cues.Process, Presented({"g.save.q": (start, end)}, **options))
    with target.transaction(presented) as transaction:
        fresh = [{"n": n} for n in transaction.fresh(presented.indices)]
        if inside is not None:
            inside(transaction.connection, fresh)
        else:
            transaction.connection.write(fresh)


def run(target: Any, messages: Any, store: cues.Store, **options: Any) -> list[Any]:
    """Write messages, or a table of Arrow, through a graph with a sink into a target; return the errors."""
    graph = cues.Graph("g", [cues.Source("q"), target.sink("q", **options)], errors="errors")
    appender = store.queue("q").appender()
    (appender.write_many if isinstance(messages, list) else appender.write_table)(messages)
    testing.run_until_idle(graph, store)
    return list(testing.messages(store, "errors")) if "errors" in store.queues() else []


def kill(code: str, *arguments: object, rounds: int, lines: int = 3, pause_s: float = 0.01) -> None:
    """Kill a program, which prints a line a step, at random moments: after up to so many lines."""
    chance = random.Random(seeds.new())
    for _ in range(rounds):
        with Child(code, *arguments) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(0, lines)):
                child.line()
            time.sleep(chance.uniform(0, pause_s))
            child.signal(signal.SIGKILL)


def killed(code: str, *arguments: object, rounds: int) -> None:
    """Kill a program at random moments; then let it end."""
    kill(code, *arguments, rounds=rounds)
    with Child(code, *arguments) as child:
        child.end()


def killed_at(point: str, code: str, *arguments: object, hits: tuple[int, ...] = (1, 2)) -> None:
    """Kill a program at a point, once for each of ``hits``; then let it end."""
    for hit in hits:
        with Child(code, *arguments, CUES_FAULT=f"{point}:{hit}") as child:
            assert child.returncode() == -9
    with Child(code, *arguments) as child:
        child.end()
