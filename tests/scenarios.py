"""Small graphs, one for each kind of step, that the crash tests kill everywhere.

    prepare   make the store with its queues once, so that every case starts from the same identities
    drive     feed what is not there yet, run until idle; the same again, on another start, for the rest
    examine   everything durable, and what functions saw, as plain data

They run in children of forks.py. What functions see and sinks do outside is written, a line each,
to a file beside the store, which like the outside world keeps what a killed process did to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import cues
from cues import AnyOf, Graph, QueueOptions, Sink, Source, Stream, testing
from cues.base.names import ERR_CAUSE, HASH, SNAPSHOT, TAILER_ID, TAILER_INDICES, TO_INDICES, TYPE, split_fork
from cues.engine.assembly import assemble
from cues.forwarding import forwarder
from cues.processors import reducers, vectors, windows
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps import tries
from cues.tools import compaction

Message = dict[str, Any]
CHILD_S = 100
"""A child that hangs is ended by SIGALRM, which no test mistakes for a crash that it asked for."""
MAP_BYTES = 2 << 20
"""Small, since every case copies its store."""


@dataclass(frozen=True)
class Scenario:
    """A graph, the messages that are sent to it in each run, and its guarantee."""

    build: Callable[[], Graph]
    feed: dict[str, list[Message]] = field(default_factory=dict)
    goes: int = 2
    merges: tuple[str, ...] = ()
    """Queues with several writers or after alts: the order between their inputs is free."""
    at_most_once: bool = False
    repeats: bool = False
    """A sink or ``side_effects``: what it does outside may happen again."""
    durability: str = "process"
    durability_abroad: str = "process"
    neighbour: tuple[Message, ...] = ()
    """The messages that another writer appends to the queue "out" between the runs."""
    purges: tuple[str, ...] = ()
    """Queues whose first messages are purged between the runs."""
    compacts: bool = False
    """Between the runs a queue is made, and removed again by a compaction of the store."""
    grows: tuple[tuple[str, int], ...] = ()
    """Queues that have so many partitions from the second run on."""
    tables: bool = False
    """Messages are fed as tables, not as dicts."""
    keep: tuple[int, int] | None = None
    """KEEP_MESSAGES and TRIM_MESSAGES of the try log, to see it trimmed."""


_outside = ""


def tell(process: Any, what: Any) -> None:
    """Leave a line outside: who, about what, under which hash."""
    line = json.dumps([process.id, what, process.delivery_hash]) + "\n"
    fd = os.open(_outside, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def told() -> list[list[Any]]:
    path = Path(_outside)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(start: int, stop: int, **more: Any) -> list[Message]:
    return [{"n": n, **more} for n in range(start, stop)]


# --- the functions ------------------------------------------------------------------------------


def counted_tables(position: int | None, process: Any) -> Iterator[tuple[int, Any]]:
    """Tables of one to three rows, messages between them, and a state that counts what was yielded."""
    for number in range(position or 0, 5):
        process.state["yields"] = process.state.get("yields", 0) + 1
        rows = [{"n": 10 * number + row, "yields": process.state["yields"]} for row in range(number % 3 + 1)]
        yield number + 1, rows[0] if number == 3 else pa.Table.from_pylist(rows)


def counted(position: int | None) -> Iterator[tuple[int, Message]]:
    for n in range(position or 0, 7):
        yield n + 1, {"n": n}


def keyed(position: int | None) -> Iterator[tuple[int, Message]]:
    for n in range(position or 0, 7):
        yield n + 1, {"n": n, "key": "adfa"[n % 4]}


def bare() -> Iterator[Message]:
    yield from numbers(0, 7)


class Opaque:
    """An object that no message can hold."""

    def __repr__(self) -> str:
        return "<opaque>"


def spoiled(position: int | None) -> Iterator[tuple[int, Message]]:
    for n in range(position or 0, 7):
        yield n + 1, {"n": Opaque()} if n in (2, 3) else {"n": n}


def several(message: Message, process: Any) -> list[Message]:
    """Nothing, one message, or two."""
    tell(process, message["n"])
    return [{"n": message["n"], "part": part} for part in range(message["n"] % 3)]


def outside(message: Message, process: Any) -> None:
    tell(process, message["n"])


def passed(message: Message, process: Any) -> Message:
    tell(process, message["n"])
    return message


def totals(message: Message, process: Any) -> Message:
    """A sum by key, and a list that is changed in place."""
    tell(process, message["n"])
    state = process.state
    state["sum"] = state.get("sum", 0) + message["n"]
    seen = state.setdefault("seen", [])
    seen.append(message["n"])
    if len(seen) == 2:
        del state["seen"]
    found = {"n": message["n"], "sum": state["sum"], "seen": list(seen)}
    return found | {"key": message["key"]} if "key" in message else found


def picky(message: Message, process: Any) -> Message:
    """Fails at some, returns what cannot be encoded for one, and something else than a message for one."""
    tell(process, message["n"])
    process.state["tried"] = process.state.get("tried", 0) + 1
    with cues.error_context(n=message["n"]):
        if message["n"] % 3 == 1:
            raise ValueError(f"not {message['n']}")
    if message["n"] == 3:
        return {"n": [1, Opaque()]}
    if message["n"] == 6:
        return "no message"  # type: ignore[return-value]
    found = {"n": message["n"], "tried": process.state["tried"]}
    return found | {"from": process.partition} if "key" in message else found


def refused(message: Message, process: Any) -> None:
    tell(process, message["n"])
    if message["n"] % 3 == 1:
        raise ValueError(f"not {message['n']}")


def batches(messages: list[Message], process: Any) -> list[Message]:
    tell(process, [m["n"] for m in messages])
    found = []
    for message, index in zip(messages, process.indices):
        state = process.state_of(message["n"] % 2)
        state["count"] = state.get("count", 0) + 1
        found.append({"n": message["n"], "count": state["count"], "index": index})
    return found


def batches_fail(messages: list[Message], process: Any) -> list[Message]:
    tell(process, [m["n"] for m in messages])
    process.state["steps"] = process.state.get("steps", 0) + 1
    if any(m["n"] == 3 for m in messages):
        raise ValueError("three")
    return messages


def batches_halved(messages: list[Message], process: Any) -> dict[str, Any]:
    """Two messages fail in any batch that has one of them, when the state has changed already."""
    tell(process, [m["n"] for m in messages])
    found: dict[str, Any] = {"even": [], "odd": []}
    for message, index in zip(messages, process.indices):
        state = process.state_of(message["n"] % 2)
        state["count"] = state.get("count", 0) + 1
        state.setdefault("seen", []).append(message["n"])
        found["odd" if message["n"] % 2 else "even"].append(
            {"n": message["n"], "count": state["count"], "seen": list(state["seen"]), "index": index}
        )
        if message["n"] in (1, 4):
            raise ValueError("poison")
    return found


def tables(table: Any, process: Any) -> Any:
    """Columns with the place and the number of each row, and one row less."""
    tell(process, table["n"].to_pylist())
    before = process.state.get("rows", 0)
    process.state["rows"] = before + table.num_rows
    table = table.append_column("twice", pc.multiply(table["n"], 2))
    table = table.append_column("index", pa.array(process.indices))
    table = table.append_column("row", pa.array(range(before, before + table.num_rows)))
    return table.filter(pc.not_equal(table["n"], 2))


def tables_halved(table: Any, process: Any) -> dict[str, Any]:
    """Two messages fail in any table that has one of them, when the state has changed already."""
    numbers = list(table["n"]) if hasattr(table, "to_dicts") else table["n"].to_pylist()
    tell(process, numbers)
    seen = [*process.state.get("seen", []), *numbers]
    process.state["seen"] = seen
    if {1, 4} & set(numbers):
        raise ValueError("poison")
    rows = [{"n": n, "seen": seen[: seen.index(n) + 1]} for n in numbers]
    schema = pa.schema([("n", pa.int64()), ("seen", pa.list_(pa.int64()))])
    parts = {name: [row for row in rows if row["n"] % 2 == odd] for odd, name in enumerate(("even", "odd"))}
    return {name: pa.Table.from_pylist(part, schema) for name, part in parts.items()}


def pairs(left: Message, right: Message, process: Any) -> Message:
    tell(process, [left["n"], right["n"]])
    found = {"left": left["n"], "right": right["n"]}
    return found | {"from": left["key"]} if "key" in left else found


def parity(message: Message, process: Any) -> dict[str, Any]:
    tell(process, message["n"])
    if message["n"] == 4:
        return {}
    if message["n"] == 5:
        return {"even": [{"n": 50}, {"n": 52}], "odd": message}
    return {"odd" if message["n"] % 2 else "even": message}


def parity_of_sum(left: Message, right: Message, process: Any) -> dict[str, Any]:
    total = left["n"] + right["n"]
    tell(process, [left["n"], right["n"]])
    return {"even": None if total % 2 else {"n": total}, "odd": {"n": total} if total % 2 else None}


def tagged(message: Message, process: Any) -> Message:
    tell(process, [process.binding, message["n"]])
    return {"from": process.binding, "n": message["n"]}


def tagged_parity(message: Message, process: Any) -> dict[str, Any]:
    tell(process, [process.binding, message["n"]])
    return {"odd" if message["n"] % 2 else "even": {"from": process.binding, "n": message["n"]}}


def tagged_key(message: Message, process: Any) -> Message:
    """Return the key of a message, the same in any unit."""
    tell(process, message["n"])
    return {"from": message["key"], "n": message["n"]}


def recounted(message: Message, process: Any) -> list[Message]:
    """A count by key, to several partitions at once."""
    tell(process, message["n"])
    process.state["count"] = process.state.get("count", 0) + 1
    return [{"from": message["key"], "n": message["n"] + part, "part": part} for part in range(2)]


def countdown(message: Message) -> Message | None:
    return {"n": message["n"], "left": message["left"] - 1} if message["left"] else None


def summed(message: Message, process: Any) -> Message:
    process.state["total"] = process.state.get("total", 0) + message["n"]
    return {"n": message["n"], "total": process.state["total"]}


async def awaited(message: Message, process: Any) -> list[Message]:
    """:func:`several`, letting go of the event loop in between."""
    await asyncio.sleep(0)
    return several(message, process)


def looked_up(message: Message, process: Any) -> Message:
    """Reads another queue during the step, writes to another one, and looks without moving."""
    tell(process, message["n"])
    rate = process.tailers["rate"].read()
    process.appenders["log"].write({"n": message["n"], "rate": rate and rate["n"]})
    if message["n"] % 2:
        process.appenders["log"].write_many([{"n": message["n"], "odd": True}])
    ahead = process.tailers["rate"].peek()
    return {"n": message["n"], "rate": rate and rate["n"], "ahead": ahead and ahead["n"]}


def looked_up_picky(message: Message, process: Any) -> Message:
    """Fails at some, when it has read and written already; and returns what cannot be encoded for one."""
    found = looked_up(message, process)
    if message["n"] % 3 == 1:
        raise ValueError(f"not {message['n']}")
    return {"n": Opaque()} if message["n"] == 3 else found


def wanted(message: Message) -> bool:
    return message["n"] % 2 == 0


# --- the scenarios ------------------------------------------------------------------------------


def graph(*processors: Any, **options: Any) -> Callable[[], Graph]:
    return lambda: Graph("g", list(processors), **options)


def windows_of_columns() -> Graph:
    """Windows, some of them missed, of tables of a few rows."""
    vectors.ROWS_FEW = 1
    reduce = {"count": reducers.count(), "sum": reducers.sum("n")}
    stream = windows.hopping("in", "out", 6, 4, time="at", delay=2, late="late", reduce=reduce)
    return Graph("g", [stream], queues=abroad("late"))


def abroad(*queues: str, **options: Any) -> dict[str, QueueOptions]:
    """These queues are in another store."""
    return {queue: QueueOptions(path="abroad", **options) for queue in queues}


def parted(*queues: str) -> dict[str, QueueOptions]:
    """These queues have two partitions."""
    return {queue: QueueOptions(partitions=2, key="key") for queue in queues}


KEYED = {"in": [{"n": n, "key": "adfa"[n % 4]} for n in range(7)]}
"""Of which partition 0 has those with key a, and partition 1 the others."""
AB = {"a": numbers(0, 5), "b": [{"n": n} for n in (10, 12, 13, 15)]}
IN = {"in": numbers(0, 7)}
RATES = {"rates": numbers(100, 108), "in": numbers(0, 7)}
"""The rates first: what a function reads by itself must be there whenever its input is."""

SCENARIOS: dict[str, Scenario] = {
    "source": Scenario(graph(Source("in", counted, batch_size=3), Stream(several, "in", "out", batch_size=2)), goes=1),
    "source of bare messages": Scenario(
        graph(Source("in", bare, batch_size=3, resume="skip"), Sink(outside, "in")), goes=1, repeats=True
    ),
    "source of tables": Scenario(
        graph(Source("in", counted_tables, batch_size=2), Stream(several, "in", "out", batch_size=2)), goes=1
    ),
    "source of tables, in partitions": Scenario(
        graph(
            Source("in", counted_tables, batch_size=3),
            Stream(passed, "in", "out", batch_size=2),
            queues={name: QueueOptions(partitions=2, key="n") for name in ("in", "out")},
        ),
        goes=1,
    ),
    "source of tables abroad": Scenario(
        graph(Source("in", counted_tables, batch_size=3), Sink(outside, "in"), queues=abroad("in")),
        goes=1,
        repeats=True,
    ),
    "source with an error step": Scenario(graph(Source("in", spoiled, batch_size=4), errors="errors"), goes=1),
    "stream": Scenario(graph(Stream(several, "in", "out", batch_size=3)), IN),
    "stream on disk": Scenario(graph(Stream(several, "in", "out", batch_size=3)), IN, goes=1, durability="disk"),
    "stream with a filter": Scenario(graph(Stream(several, "in", "out", where=wanted, batch_size=3)), IN),
    "stream with side effects": Scenario(
        graph(Stream(totals, "in", "out", batch_size=3, side_effects=True)), IN, repeats=True
    ),
    "sink": Scenario(graph(Sink(outside, "in", batch_size=3)), IN, repeats=True),
    "join": Scenario(graph(Stream(pairs, {"left": "a", "right": "b"}, "out", batch_size=2)), AB),
    "alts": Scenario(graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2)), AB, merges=("out",)),
    "alts with side effects": Scenario(
        graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2, side_effects=True)),
        AB,
        merges=("out",),
        repeats=True,
    ),
    "alts with messages on both": Scenario(
        graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2, side_effects=True)),
        {"a": numbers(0, 6), "b": numbers(10, 16)},
        goes=1,
        merges=("out",),
        repeats=True,
    ),
    "fork": Scenario(graph(Stream(parity, "in", {"even": "q0", "odd": "q1"}, batch_size=3)), IN),
    "join and fork": Scenario(
        graph(Stream(parity_of_sum, {"left": "a", "right": "b"}, {"even": "q0", "odd": "q1"}, batch_size=2)), AB
    ),
    "alts and fork": Scenario(
        graph(Stream(tagged_parity, AnyOf("a", "b"), {"even": "q0", "odd": "q1"}, batch_size=2)),
        AB,
        merges=("q0", "q1"),
    ),
    "state": Scenario(
        graph(Stream(totals, "in", "out", key="key", batch_size=3)),
        {"in": [{"n": n, "key": n % 2} for n in range(7)]},
    ),
    "concurrent calls": Scenario(graph(Stream(several, "in", "out", concurrency=3, batch_size=5)), IN),
    "concurrent calls of a sink with an error step": Scenario(
        graph(Sink(refused, "in", concurrency=3, batch_size=5, retries=1), errors="errors"), IN, repeats=True
    ),
    "async function": Scenario(graph(Stream(awaited, "in", "out", batch_size=3)), IN),
    "concurrent calls of an async function": Scenario(
        graph(Stream(awaited, "in", "out", concurrency=4, batch_size=5, side_effects=True)), IN, repeats=True
    ),
    "keyed state with concurrent calls": Scenario(
        graph(Stream(totals, "in", "out", key="key", concurrency=3, batch_size=5)),
        {"in": [{"n": n, "key": n % 2} for n in range(7)]},
    ),
    "imperative": Scenario(
        graph(Stream(looked_up, "in", "out", tailers={"rate": "rates"}, appenders="log", batch_size=3)), RATES
    ),
    "imperative with an error step": Scenario(
        graph(
            Stream(looked_up_picky, "in", "out", tailers={"rate": "rates"}, appenders="log", batch_size=5, retries=1),
            errors="errors",
        ),
        RATES,
    ),
    "imperative with side effects": Scenario(
        graph(
            Stream(looked_up, "in", "out", tailers={"rate": "rates"}, appenders="log", batch_size=3, side_effects=True)
        ),
        RATES,
        repeats=True,
    ),
    "error step": Scenario(graph(Stream(picky, "in", "out", batch_size=5, retries=1), errors="errors"), IN),
    "error step with side effects": Scenario(
        graph(Stream(picky, "in", "out", batch_size=5, side_effects=True), errors="errors"), IN, repeats=True
    ),
    "error step of a sink": Scenario(
        graph(Sink(refused, "in", batch_size=5, retries=1), errors="errors"), IN, repeats=True
    ),
    "batch function": Scenario(graph(Stream(batches, "in", "out", batch=True, batch_size=3)), IN),
    "batch function with an error step": Scenario(
        graph(Stream(batches_fail, "in", "out", batch=True, batch_size=2), errors="errors"), IN, goes=1
    ),
    "batch function that is halved": Scenario(
        graph(
            Stream(batches_halved, "in", {"even": "q0", "odd": "q1"}, batch=True, batch_size=7, step_s=None, retries=1),
            errors="errors",
        ),
        IN,
        goes=1,
    ),
    "batch function with side effects that is halved": Scenario(
        graph(
            Stream(batches_halved, "in", {"even": "q0", "odd": "q1"}, batch=True, step_s=None, side_effects=True),
            errors="errors",
        ),
        IN,
        goes=1,
        repeats=True,
    ),
    "table function": Scenario(
        graph(Stream(tables, "in", "out", batch="arrow", batch_size=3), Stream(passed, "out", "rows")), IN, tables=True
    ),
    "windows of columns": Scenario(
        windows_of_columns, {"in": [{"n": n, "at": n + 9 * (n % 3)} for n in range(9)]}, tables=True
    ),
    "table function of messages that is halved": Scenario(
        graph(
            Stream(
                tables_halved, "in", {"even": "q0", "odd": "q1"}, batch="polars", batch_size=7, step_s=None, retries=1
            ),
            errors="errors",
            queues=abroad("q1", "errors") | {"q0": QueueOptions(partitions=2, key="n")},
        ),
        IN,
        goes=1,
    ),
    "table function abroad with side effects that is halved": Scenario(
        graph(
            Stream(tables_halved, "in", {"even": "q0", "odd": "q1"}, batch="arrow", step_s=None, side_effects=True),
            errors="errors",
            queues=abroad("in", "q0"),
        ),
        IN,
        goes=1,
        repeats=True,
        tables=True,
    ),
    "batch function abroad that is halved": Scenario(
        graph(
            Stream(batches_halved, "in", {"even": "q0", "odd": "q1"}, batch=True, step_s=None),
            errors="errors",
            queues=abroad("in", "q1", "errors"),
        ),
        IN,
        goes=1,
    ),
    "at most once": Scenario(
        graph(Stream(passed, "in", "out", batch_size=2, strategy="at-most-once")), IN, at_most_once=True
    ),
    "at most once sink": Scenario(
        graph(Sink(outside, "in", batch_size=1, strategy="at-most-once")), IN, at_most_once=True
    ),
    "cycle": Scenario(
        graph(Stream(countdown, "in", "in", batch_size=2)), {"in": [{"n": 1, "left": 3}, {"n": 2, "left": 2}]}, goes=1
    ),
    "chain": Scenario(
        graph(
            Source("in", counted, batch_size=3),
            Stream(parity, "in", {"even": "q0", "odd": "q1"}, batch_size=2),
            Stream(summed, "q1", "out", batch_size=2),
            Sink(refused, "out", errors="errors"),
        ),
        goes=1,
        repeats=True,
    ),
    "compaction": Scenario(graph(Stream(totals, "in", "out", batch_size=2)), IN, goes=2, purges=("in",), compacts=True),
    "purge": Scenario(graph(Stream(totals, "in", "out", batch_size=2)), IN, purges=("in", "out")),
    # Across two stores.
    "source abroad": Scenario(
        graph(
            Source("in", counted, batch_size=3), Stream(several, "in", "out", batch_size=2), queues=abroad("in", "out")
        ),
        goes=1,
    ),
    "source with an error step abroad": Scenario(
        graph(Source("in", spoiled, batch_size=4), errors="errors", queues=abroad("errors")), goes=1
    ),
    "stream abroad": Scenario(graph(Stream(several, "in", "out", batch_size=3), queues=abroad("out")), IN),
    "stream abroad on disk": Scenario(
        graph(Stream(several, "in", "out", batch_size=3), queues=abroad("out")),
        IN,
        goes=1,
        durability="disk",
        durability_abroad="disk",
    ),
    "stream from abroad": Scenario(graph(Stream(several, "in", "out", batch_size=3), queues=abroad("in")), IN),
    "stream abroad and back": Scenario(
        graph(
            Stream(several, "in", "there", batch_size=3),
            Stream(summed, "there", "out", batch_size=2),
            queues=abroad("there"),
        ),
        IN,
    ),
    "side effects from abroad": Scenario(
        graph(Stream(totals, "in", "out", batch_size=3, side_effects=True), queues=abroad("in", "out", retention=100)),
        IN,
        repeats=True,
    ),
    "sink from abroad": Scenario(
        graph(Sink(outside, "in", batch_size=3), queues=abroad("in", retention=100)), IN, repeats=True
    ),
    "join across stores": Scenario(
        graph(Stream(pairs, {"left": "a", "right": "b"}, "out", batch_size=2), queues=abroad("b")), AB
    ),
    "alts across stores": Scenario(
        graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2), queues=abroad("b", "out")), AB, merges=("out",)
    ),
    "alts across stores with messages on both": Scenario(
        graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2, side_effects=True), queues=abroad("b", "out")),
        {"a": numbers(0, 6), "b": numbers(10, 16)},
        goes=1,
        merges=("out",),
        repeats=True,
    ),
    "alts to abroad": Scenario(
        graph(Stream(tagged, AnyOf("a", "b"), "out", batch_size=2), queues=abroad("out")),
        {"a": numbers(0, 5), "b": numbers(10, 15)},
        merges=("out",),
    ),
    "fork at home and abroad": Scenario(
        graph(Stream(parity, "in", {"even": "q0", "odd": "q1"}, batch_size=3), queues=abroad("q1")), IN
    ),
    "fork abroad": Scenario(
        graph(Stream(parity, "in", {"even": "q0", "odd": "q1"}, batch_size=3), queues=abroad("q0", "q1")), IN
    ),
    "join and fork across stores": Scenario(
        graph(
            Stream(parity_of_sum, {"left": "a", "right": "b"}, {"even": "q0", "odd": "q1"}, batch_size=2),
            queues=abroad("a", "q1"),
        ),
        AB,
    ),
    "state abroad": Scenario(
        graph(Stream(totals, "in", "out", key="key", batch_size=3), queues=abroad("out")),
        {"in": [{"n": n, "key": n % 2} for n in range(7)]},
    ),
    "error step abroad": Scenario(
        graph(Stream(picky, "in", "out", batch_size=5, retries=1), errors="errors", queues=abroad("out", "errors")),
        IN,
    ),
    "batch function abroad": Scenario(
        graph(Stream(batches, "in", "out", batch=True, batch_size=3), queues=abroad("in", "out")), IN
    ),
    "at most once abroad": Scenario(
        graph(Stream(passed, "in", "out", batch_size=2, strategy="at-most-once"), queues=abroad("out")),
        IN,
        at_most_once=True,
    ),
    "cycle across stores": Scenario(
        graph(Stream(countdown, "in", "in", batch_size=2), queues=abroad("in")),
        {"in": [{"n": 1, "left": 3}, {"n": 2, "left": 2}]},
        goes=1,
    ),
    "imperative abroad": Scenario(
        graph(
            Stream(looked_up, "in", "out", tailers={"rate": "rates"}, appenders="log", batch_size=3),
            queues=abroad("rates", "log"),
        ),
        RATES,
    ),
    "concurrent calls abroad": Scenario(
        graph(
            Stream(totals, "in", "out", key="key", concurrency=3, batch_size=5, side_effects=True),
            queues=abroad("in", "out", retention=100),
        ),
        {"in": [{"n": n, "key": n % 2} for n in range(7)]},
        repeats=True,
    ),
    "another writer abroad": Scenario(
        graph(Stream(tagged, "in", "out", batch_size=2), queues=abroad("out")),
        IN,
        merges=("out",),
        neighbour=tuple(numbers(100, 103, **{"from": "neighbour"})),
    ),
    "purge abroad": Scenario(
        graph(Stream(totals, "in", "out", batch_size=2), queues=abroad("in", "out")), IN, purges=("in", "out")
    ),
    "partitions": Scenario(
        graph(Stream(totals, "in", "out", key="key", batch_size=2), queues=parted("in", "out")), KEYED
    ),
    "partitions with an error step": Scenario(
        graph(Stream(picky, "in", "out", batch_size=5, retries=1), errors="errors", queues=parted("in", "errors")),
        KEYED,
        merges=("out",),
    ),
    "partitions of a sink": Scenario(
        graph(Sink(outside, "in", batch_size=3, instances=2), queues=parted("in")), KEYED, repeats=True
    ),
    "partitions of a sink, at most once": Scenario(
        graph(Stream(passed, "in", "out", batch_size=1, strategy="at-most-once"), queues=parted("in", "out")),
        {"in": KEYED["in"][:5]},
        goes=1,
        at_most_once=True,
    ),
    "partitions joined": Scenario(
        graph(Stream(pairs, {"left": "a", "right": "b"}, "out", batch_size=2), queues=parted("a", "b")),
        {"a": KEYED["in"], "b": [{**message, "n": message["n"] + 10} for message in KEYED["in"]]},
        merges=("out",),
    ),
    "source into partitions, and others": Scenario(
        graph(
            Source("in", keyed, batch_size=3),
            Stream(recounted, "in", "out", key="key", batch_size=2, side_effects=True),
            queues={**parted("in"), "out": QueueOptions(partitions=3, key="n", partitioner="rendezvous")},
        ),
        goes=1,
        merges=("out/0", "out/1", "out/2"),
        repeats=True,
    ),
    "partitions abroad": Scenario(
        graph(
            Stream(totals, "in", "out", key="key", batch_size=2),
            queues={name: QueueOptions(path="abroad", partitions=2, key="key") for name in ("in", "out")},
        ),
        KEYED,
    ),
    "partitions that become more": Scenario(
        graph(Stream(tagged_key, "in", "out", batch_size=2), queues={"in": QueueOptions(key="key")}),
        KEYED,
        merges=("out",),
        grows=(("in", 3),),
    ),
    "trimmed try log": Scenario(graph(Stream(totals, "in", "out", batch_size=1)), IN, keep=(4, 2)),
}


PAIRINGS = (("process", "process"), ("process", "disk"), ("disk", "process"))
"""Durabilities of the home store and of the other one, of which a power cut can take something back."""
PAIRED = {
    f"{name} ({home}, {other})": replace(scenario, durability=home, durability_abroad=other)
    for name, scenario in SCENARIOS.items()
    for home, other in PAIRINGS
}
"""Every scenario again under each pairing; the pair means nothing to those of one store."""


def find(name: str) -> Scenario:
    return SCENARIOS.get(name) or PAIRED[name]


# --- in a child ---------------------------------------------------------------------------------


def _set(scenario: Scenario, path: str) -> None:
    global _outside
    _outside = path + ".outside"
    if scenario.keep is not None:
        tries.KEEP_MESSAGES, tries.TRIM_MESSAGES = scenario.keep  # type: ignore[misc]
    # Small and quick, so that a few messages pass everything that many would.
    forwarder.TRIM_MESSAGES, forwarder.MARK_S = 2, 0.0  # type: ignore[misc]


class Stores:
    """The stores of a scenario: home, and inside its directory, so that both are copied together, the other one."""

    def __init__(self, scenario: Scenario, path: str) -> None:
        self.graph = scenario.build()
        self.graph.directory = Path(path)
        self.home = cues.open(path, durability=scenario.durability, map_size=MAP_BYTES)
        self.abroad: Store | None = None
        if any(options.path for options in self.graph.queues.values()):
            self.abroad = cues.open(
                self.graph.place("abroad"), durability=scenario.durability_abroad, map_size=MAP_BYTES
            )

    def queue(self, name: str) -> Queue:
        options = self.graph.queues.get(name)
        store = self.abroad if options is not None and options.path else self.home
        assert store is not None
        return store.queue(name)

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        if self.abroad is not None:
            self.abroad.close()
        self.home.close()


def prepare(name: str, path: str) -> None:
    """Make the stores, their queues and the rows of the processors; nothing is fed or run."""
    scenario = find(name)
    _set(scenario, path)
    with Stores(scenario, path) as stores:
        assemble(stores.graph, stores.home).close()


def drive(name: str, path: str) -> None:
    """Do what is left to do. Doing it twice is the same as doing it once."""
    scenario = find(name)
    _set(scenario, path)
    for go in range(1, scenario.goes + 1):
        with Stores(scenario, path) as stores:
            for queue, messages in scenario.feed.items():
                upto = len(messages) * go // scenario.goes
                opened = stores.queue(queue)
                while missing := messages[min(sum(row.next - 1 for row in opened.core.rows()), upto) : upto]:
                    appender = opened.appender()
                    if scenario.tables:
                        appender.write_table(pa.Table.from_pylist(missing[:2]))
                    elif len(missing) > 2:
                        appender.write_many(missing[:2])
                    else:
                        appender.write(missing[0])
            testing.run_until_idle(stores.graph, stores.home)
            if go < scenario.goes:
                if scenario.neighbour:
                    out = stores.queue("out")
                    there = [message for message in out.tailer() if message in scenario.neighbour]
                    for message in scenario.neighbour[len(there) :]:
                        out.appender().write(message)
                for queue, partitions in scenario.grows:
                    stores.queue(queue).grow(partitions)
                for queue in scenario.purges:
                    opened = stores.queue(queue)
                    if opened.first_index < 3 <= opened.last_index + 1:
                        opened.purge(before=3)
                if scenario.compacts:
                    stores.home.queue("gone").tailer("reader").close()
        if scenario.compacts and go < scenario.goes:
            compaction.compact(path, remove=["gone"])


def crash(name: str, path: str, point: str, hit: int) -> None:
    with testing.crash(point, hit):
        drive(name, path)


def sites(name: str, path: str) -> list[tuple[str, int]]:
    return testing.crash_sites(lambda: drive(name, path))


def examine(name: str, path: str) -> dict[str, Any]:
    """The final content of the queues."""
    scenario = find(name)
    _set(scenario, path)
    with Stores(scenario, path) as stores:
        store = stores.home
        found = {**testing.contents(store), "told": told(), "problems": testing.check_attempts(store)}
        found["check"] = store.check()
        if stores.abroad is not None:
            found["queues"] |= testing.contents(stores.abroad)["queues"]
            found["check"] += stores.abroad.check()
        for messages in found["queues"].values():
            for message in messages:
                for cause in message.get(ERR_CAUSE, ()):
                    del cause["trace"]  # it names lines of the engine, which has a short way when no point is armed
        found["steps"] = {
            processor: [m[HASH] for m in testing.messages(store, processor) if m[TYPE] != SNAPSHOT]
            for processor in store.queues(all=True)
            if "." in processor and split_fork(processor) is None
        }
        return found


def crash_and_finish(name: str, made: str, cases: list[list[tuple[str, int]]]) -> Iterator[dict[str, Any]]:
    """For each case a copy of the store ``made``: its crashes, one start each, and then a start that finishes."""
    for number, crashes in enumerate(cases):
        path = copy(made, f"case-{number}")
        died = [_in_child(crash, name, path, point, hit) for point, hit in crashes]
        drive(name, path)
        yield {"died": died, **examine(name, path)}
        shutil.rmtree(path)
        Path(path + ".outside").unlink(missing_ok=True)


def copy(made: str, name: str) -> str:
    """A copy of a closed store beside it: all copies have the same identities, and so the same hashes."""
    path = str(Path(made).parent / name)
    shutil.copytree(made, path, ignore=shutil.ignore_patterns("bells", "lock.mdb", "wake", "open", "lease-*"))
    return path


def _in_child(function: Callable[..., Any], *arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)  # a fork does not inherit its parent's
        try:
            function(*arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def pending(name: str, path: str) -> dict[str, Any]:
    """The snapshot that waits for its attempt: the tailer it chose, its messages, and what waits elsewhere."""
    scenario = find(name)
    _set(scenario, path)
    with Stores(scenario, path) as stores:
        store = stores.home
        (processor,) = [p for p in store.queues(all=True) if "." in p and split_fork(p) is None]
        last = testing.messages(store, processor)[-1]
        assert last[TYPE] == SNAPSHOT, last
        tailer = last[TAILER_ID]
        start, end = last[TAILER_INDICES][tailer], last[TO_INDICES][tailer]
        positions = testing.contents(store)["positions"]
        other = next(t for t in positions if t != tailer)
        waiting = stores.queue(other.rpartition(".")[2]).last_index + 1 - positions[other]
        messages = list(stores.queue(tailer.rpartition(".")[2]).tailer())
        taken = [m["n"] for m in messages[start - 1 : end - 1]]
        return {"tailer": tailer, "messages": taken, "waiting": waiting}
