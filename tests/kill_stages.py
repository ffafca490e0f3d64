"""Three graphs that share queues, each run by a process of its own, for the kill loop.

    first     numbers (a source)
    second    numbers ──▸ count (keyed state, fan-out, errors) ──▸ even, odd
    third     even, odd ──▸ merge ──▸ merged
              even, odd ──▸ save ──▸ a SQLite table, transactional

The source continues until the file ``count`` says how many there are to be. CUES_TEST_ROOT is the
directory of it all. CUES_TEST_STORES gives each stage a store of its own, CUES_TEST_FAST drops the pauses,
CUES_TEST_BREAK breaks commits (broken_commits.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import broken_commits

import cues
from cues.processors import sql

STAGES = ("first", "second", "third")
KEYS = 7
NUMBERS_PAUSE_S = 0.001
CALL_PAUSE_S = 0.0003

Message = dict[str, Any]


class Layout(NamedTuple):
    """The paths under the root of one run."""

    stores: dict[str, Path]
    """By stage."""
    queues: dict[str, Path]
    """The store of every queue."""
    table: Path
    count: Path


def layout(root: Path) -> Layout:
    """All stages in one store; with CUES_TEST_STORES each in its own, and what the second writes in a fourth."""
    several = bool(os.environ.get("CUES_TEST_STORES"))
    stores = {stage: root / (stage if several else "store") for stage in STAGES}
    between = root / "between" if several else stores["second"]
    queues = {"numbers": stores["first"], "merged": stores["third"]}
    return Layout(
        stores=stores,
        queues={**queues, **dict.fromkeys(("even", "odd", "errors"), between)},
        table=root / "table.db",
        count=root / "count",
    )


QUEUES = {
    "first": ("numbers",),
    "second": ("numbers", "even", "odd", "errors"),
    "third": ("even", "odd", "merged"),
}
"""The names of each stage."""


ROOT = Path(os.environ.get("CUES_TEST_ROOT", "."))
FAST = bool(os.environ.get("CUES_TEST_FAST"))
where = layout(ROOT)
db = sql.SQLite(where.table, "create table if not exists saved (n integer, count integer, part integer)")


def made(stage: str, **options: Any) -> cues.Graph:
    home = where.stores[stage]
    elsewhere = {queue: where.queues[queue] for queue in QUEUES[stage] if where.queues[queue] != home}
    queues = {queue: cues.QueueOptions(path=path) for queue, path in elsewhere.items()}
    return cues.Graph(stage, store=home, durability="process", queues=queues, **options)


def pause(seconds: float) -> None:
    if not FAST:
        time.sleep(seconds)


first = made("first")


@first.source("numbers", batch_size=40)
def numbers(position: int | None) -> Iterator[tuple[int, Message]]:
    n = position or 0
    while not where.count.exists() or n < int(where.count.read_text()):
        pause(NUMBERS_PAUSE_S)
        yield n + 1, {"n": n}
        n += 1


second = made("second", errors="errors")
second.source("numbers")


@second.stream("numbers", {"even": "even", "odd": "odd"}, key=lambda message: message["n"] % KEYS, batch_size=20)
def count(message: Message, process: Any) -> dict[str, list[Message]]:
    pause(CALL_PAUSE_S)
    if message["n"] % 11 == 0:
        raise ValueError(message["n"])
    state = process.state
    state["count"] = state.get("count", 0) + 1
    made = [{"n": message["n"], "count": state["count"], "part": part} for part in range(message["n"] % 3)]
    return {"odd" if message["n"] % 2 else "even": made}


third = made("third")
third.source("even")
third.source("odd")


@third.stream(cues.AnyOf("even", "odd"), "merged", batch_size=30)
def merge(message: Message) -> Message:
    pause(CALL_PAUSE_S)
    return message


@third.sink(cues.AnyOf("even", "odd"), batch=True, batch_size=25)
def save(messages: list[Message], process: Any) -> None:
    with db.transaction(process) as tx:
        for message in tx.fresh(messages):
            pause(CALL_PAUSE_S)
            tx.execute("insert into saved values (:n, :count, :part)", message)


def expected(total: int) -> tuple[dict[str, list[Message]], dict[int, int]]:
    """The final content of the queues, and the counts by key, computed without Cues."""
    counts = dict.fromkeys(range(KEYS), 0)
    queues: dict[str, list[Message]] = {
        "numbers": [{"n": n} for n in range(total)],
        "even": [],
        "odd": [],
        "errors": [],
    }
    for n in range(total):
        if n % 11 == 0:
            queues["errors"].append({"n": n})
            continue
        counts[n % KEYS] += 1
        queues["odd" if n % 2 else "even"] += [
            {"n": n, "count": counts[n % KEYS], "part": part} for part in range(n % 3)
        ]
    return queues, counts


broken_commits.break_commits()
