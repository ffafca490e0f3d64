"""Graphs that are run on both engines and must leave the same; in a module of its own, as a user's functions are.

Functions say under which hash they were called, at which index, by which binding.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

import polars
import pyarrow as pa
import pyarrow.compute as pc

import cues
from cues import AnyOf, Graph, Sink, Source, Stream
from cues.processors import joins, reducers, shape, windows

Message = dict[str, Any]
COUNT = 400


def numbers(position: int | None) -> Iterator[tuple[int, Message]]:
    for n in range(position or 0, COUNT):
        yield n + 1, {"n": n, "body": "x" * (n % 50 * 40)}


def plain(message: Message) -> Message:
    return {"n": message["n"] * 2}


def several(message: Message, process: Any) -> list[Message]:
    """Nothing, one message, or two."""
    seen = {"hash": process.delivery_hash, "index": process.index, "opts": process.opts, "system": process.system}
    came = process.metadata.get("q/queue")  # its q/hash is the source's step's, and how a source is cut is free
    return [{"n": message["n"], **seen, "came": came}] * (message["n"] % 3)


def nothing(message: Message) -> None:
    return None


class Refused(Exception):
    def __init__(self, n: int, why: str) -> None:
        super().__init__(f"{n} {why}")


def picky(message: Message) -> Any:
    """Fails at some, returns what cannot be written for one, and something else than a message for one."""
    with cues.error_context(n=message["n"]):
        if message["n"] % 50 == 7:
            raise Refused(message["n"], "is not wanted")  # which pickle cannot make again
    if message["n"] == 100:
        return {"n": object()}
    return 7 if message["n"] == 200 else message


def refuses(message: Message) -> Message:
    raise ValueError("not any")


def lacks_a_package(message: Message) -> Message:
    """No other message would succeed either, so no error queue takes the message."""
    if message["n"] == 100:
        raise cues.errors.Unsupported("there is no package for this.", "install it.")
    return message


def first_of_error(message: Message) -> Message:
    (failed,) = message["err.proc/messages"]["in"]
    return dict(failed)


def mended(message: Message) -> Message:
    return message


def sends_more(message: Message, process: Any) -> Message:
    """Another program continues to send while this graph runs."""
    with cues.open(message["store"]) as store:
        store.queue("in").appender().write(message)
    return message


def parity(message: Message) -> dict[str, Any]:
    return {"odd" if message["n"] % 2 else "even": message}


def pairs(left: Message, right: Message, process: Any) -> Message:
    return {"n": left["n"], "right": right["n"], "hash": process.delivery_hash, "index": process.index}


def tagged(message: Message, process: Any) -> Message:
    return {"n": message["n"], "from": process.binding, "hash": process.delivery_hash}


def batches(messages: list[Message], process: Any) -> list[Message]:
    return [{"count": len(messages), "hash": process.delivery_hash, "indices": process.indices}]


def poisoned(messages: list[Message], process: Any) -> list[Message]:
    """Two messages of a hundred fail, in any batch that has one."""
    if any(message["n"] % 50 == 7 for message in messages):
        raise ValueError("poison")
    return [{"n": message["n"], "index": index} for message, index in zip(messages, process.indices)]


def counted(message: Message, process: Any) -> Message:
    process.state["count"] = process.state.get("count", 0) + 1
    return {"n": message["n"], "count": process.state["count"]}


def counted_by_key(message: Message, process: Any) -> Message:
    return {"n": message["n"], "count": counted(message, process)["count"]}


def outside(message: Message) -> None:
    pass


async def awaited(message: Message) -> Message:
    return message


def wanted(message: Message) -> bool:
    return message["n"] % 3 == 0


def dies_once(message: Message) -> Message:
    """The worker process is killed in the middle of a part, once."""
    flag = Path(os.environ["CUES_TEST_FLAG"])
    if message["n"] == 250 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return message


def held(message: Message, process: Any) -> Message:
    """Writes its calls down; at one message, the first time, it is held in the middle of a part, until ``go`` is there.

    ``opts`` is the folder of these notes; ``held`` holds the worker's pid.
    """
    folder = Path(process.opts)
    with open(folder / "calls", "a") as calls:
        calls.write(f"{message['n']}\n")
    if message["n"] == 250 and not (folder / "held").exists():
        draft = folder / f"held.{os.getpid()}"
        draft.write_text(str(os.getpid()))
        draft.rename(folder / "held")
        for _ in range(1200):
            if (folder / "go").exists():
                break
            time.sleep(0.05)
        else:
            raise TimeoutError("held for a minute, and neither killed nor let go")
    return message


def pays(message: Message, process: Any) -> None:
    """Has a state, and writes its calls down. At one message, the first time, it kills its executor.

    ``opts`` is the folder of these notes.
    """
    process.state["count"] = process.state.get("count", 0) + 1
    folder = Path(process.opts)
    with open(folder / "calls", "a") as calls:
        calls.write(f"{message['n']}\n")
    if message["n"] == 250 and not (folder / "killed").exists():
        (folder / "killed").touch()
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()  # of the daemon that forks Python workers
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(60)


@dataclass
class Body:
    text: str


@dataclass
class Item:
    """Of two fields that a message has, and one with a default. No executor has the module of the annotations."""

    n: Third
    body: Text | None = None
    unit: str = "piece"


class Third(enum.IntEnum):
    """Most messages do not fit."""

    ZERO, THREE, SIX = 0, 3, 6


Text = str


class Columns(TypedDict):
    n: Number


Number = int


def checked(item: Item) -> Item:
    return item


def checked_pairs(left: Item, right: Message) -> Message:
    return {"n": left.n, "unit": left.unit, "right": right["n"]}


def checked_batch(items: list[Item]) -> list[Item]:
    return items


def columns(table: Any) -> Any:
    return table


def widened(table: pa.Table, process: Any) -> pa.Table:
    """Columns with nulls, a nested one, a dictionary, and one without a value."""
    numbers = table["n"].to_pylist()
    nested = [None if n % 5 == 0 else [{"n": n, "text": f"t{n}"}] * (n % 3) for n in numbers]
    return pa.table(
        {
            "n": table["n"],
            "kind": pa.array([None if n % 7 == 0 else f"kind {n % 4}" for n in numbers]).dictionary_encode(),
            "half": pa.array([None if n % 2 else n / 2 for n in numbers], pa.float64()),
            "nested": pa.array(nested, pa.list_(pa.struct([("n", pa.int64()), ("text", pa.string())]))),
            "none": pa.nulls(len(numbers), pa.string()),
            "index": pa.array(process.indices, pa.int64()),
        }
    )


def odd_rows(table: Any, process: Any) -> Any:
    """Of any kind of table. No row of some steps."""
    if isinstance(table, polars.DataFrame):
        return table.filter(polars.col("n") % 2 == 1)
    if not isinstance(table, pa.Table):
        return table[table["n"] % 2 == 1]
    table = table.append_column("at", pa.array(process.indices, pa.int64()))
    return table.filter(pc.equal(pc.bit_wise_and(table["n"], 1), 1))


def poisoned_rows(table: pa.Table, process: Any) -> pa.Table:
    """Two rows of a hundred fail, in any table that has one."""
    if any(n % 50 == 7 for n in table["n"].to_pylist()):
        raise ValueError("poison")
    return table.append_column("at", pa.array(process.indices, pa.int64()))


def parity_of_rows(table: pa.Table) -> dict[str, Any]:
    odd = pc.equal(pc.bit_wise_and(table["n"], 1), 1)
    return {"odd": table.filter(odd), "even": table.filter(pc.invert(odd)), "none": table.slice(0, 0), "no": None}


def told_rows(table: Any, process: Any) -> Any:
    """Under which hash it was called; of any kind of table. One row fails in the end, if ``opts`` says so."""
    numbers = table["n"].to_pylist() if isinstance(table, pa.Table) else list(table["n"])
    if process.opts == "poison" and 207 in numbers:
        raise ValueError("poison")
    if isinstance(table, pa.Table):
        return table.append_column("hash", pa.array([process.delivery_hash] * len(table)))
    if isinstance(table, polars.DataFrame):
        return table.with_columns(hash=polars.lit(process.delivery_hash))
    return table.assign(hash=process.delivery_hash)


def few_rows(message: Message) -> bool:
    return message["n"] % 40 == 3


def as_they_are(messages: list[Message]) -> list[Message]:
    return messages


def dies_once_in_a_table(table: pa.Table) -> pa.Table:
    for message in table.to_pylist():
        dies_once(message)
    return table


def with_tables(*processors: Any, **options: Any) -> Callable[[], Graph]:
    """The messages of the source as columns in ``wide``."""
    return graph(Stream(widened, "in", "wide", batch="arrow", batch_size=60), *processors, **options)


def graph(*processors: Any, **options: Any) -> Callable[[], Graph]:
    return lambda: Graph("g", [Source("in", numbers, batch_size=150), *processors], durability="process", **options)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": graph(Stream(plain, "in", "out")),
    "several": graph(
        Stream(several, "in", "out", opts={"a": 1}), system="system", queues={"in": cues.QueueOptions(metadata=True)}
    ),
    "partitions": graph(
        Stream(several, "in", "out"),
        Stream(counted, "out", "counts", key="n"),
        queues={queue: cues.QueueOptions(partitions=3, key="n") for queue in ("in", "out", "counts")},
    ),
    "all filtered out": graph(Stream(nothing, "in", "out")),
    "filter": graph(Stream(plain, "in", "out", where=wanted)),
    "error queue": graph(Stream(picky, "in", "out", retries=cues.Retry(3, 0.0)), errors="errors"),
    "no error queue": graph(Stream(picky, "in", "out")),
    "fork": graph(Stream(parity, "in", {"even": "even", "odd": "odd"})),
    "join": graph(Stream(plain, "in", "out"), Stream(pairs, {"left": "in", "right": "out"}, "joined")),
    "alts": graph(Stream(plain, "in", "out"), Stream(tagged, AnyOf("in", "out"), "tagged")),
    "batch function": graph(Stream(batches, "in", "out", batch=True, batch_size=60)),
    "batch function that fails": graph(Stream(parity, "in", "out", batch=True, batch_size=60), errors="errors"),
    "batches that are halved": graph(
        Stream(poisoned, "in", "out", batch=True, batch_size=60, retries=cues.Retry(2, 0.0)), errors="errors"
    ),
    "keyed state": graph(Stream(counted, "in", "out", key="n")),
    "state": graph(Stream(counted, "in", "out")),
    "side effects": graph(Stream(several, "in", "out", side_effects=True)),
    "at most once": graph(Stream(plain, "in", "out", strategy="at-most-once")),
    "concurrent calls": graph(Stream(several, "in", "out", concurrency=4)),
    "async function": graph(Stream(awaited, "in", "out", concurrency=4)),
    "broadcast": graph(cues.broadcast("in", ["a", "b"])),
    "schema": graph(Stream(checked, "in", "out"), errors="errors"),
    "schema of a join": graph(
        Stream(plain, "in", "out"), Stream(checked_pairs, {"left": "in", "right": "out"}, "joined"), errors="errors"
    ),
    "schema of a batch": graph(Stream(checked_batch, "in", "out", batch=True, batch_size=60), errors="errors"),
    "schema of a table": graph(Stream(columns, "in", "out", batch="arrow", batch_size=60, schema=Columns)),
    "tables": with_tables(
        Stream(odd_rows, "wide", "out", batch="arrow", batch_size=60),
        Stream(as_they_are, "out", "dicts", batch=True, batch_size=60),
        queues={"wide": cues.QueueOptions(metadata=True)},
    ),
    "tables of polars and pandas": with_tables(
        Stream(odd_rows, "wide", "polars", id="polars", batch="polars", batch_size=60),
        Stream(odd_rows, "wide", "pandas", id="pandas", batch="pandas", batch_size=60),
    ),
    "filtered tables": with_tables(
        Stream(odd_rows, "wide", "some", id="some", batch="arrow", batch_size=60, where=pc.field("n") > 300),
        Stream(odd_rows, "wide", "few", id="few", batch="arrow", batch_size=60, where=few_rows),
    ),
    "tables that are halved": with_tables(
        Stream(poisoned_rows, "wide", "out", batch="arrow", batch_size=60, retries=cues.Retry(2, 0.0)), errors="errors"
    ),
    "tables in a fork": with_tables(
        Stream(
            parity_of_rows, "wide", {each: each for each in ("odd", "even", "none", "no")}, batch="arrow", batch_size=60
        ),
        queues={
            "odd": cues.QueueOptions(partitions=3, key="n", metadata=True),
            "even": cues.QueueOptions(metadata={"t"}, compression=None),
        },
    ),
    "chain": graph(Stream(plain, "in", "a"), Stream(several, "a", "b"), Sink(outside, "b")),
}


def by_ten(message: Message) -> int:
    return message["n"] % 10  # type: ignore[no-any-return]


def noted(message: Message, process: Any) -> None:
    """Into a database that keeps positions; its path is in the environment of the worker."""
    from cues.processors import sql

    db = sql.SQLite(os.environ["CUES_TEST_NOTES"], "create table if not exists notes (n integer, hash text)")
    with db.transaction(process) as tx:
        rows = [(m["n"], process.delivery_hash) for m in tx.fresh([message])]
        tx.executemany("insert into notes values (?, ?)", rows)
    db.close()


def paused_by(n: int) -> Callable[..., Message]:
    def refuses_one(message: Message) -> Message:
        if message["n"] == n:
            raise Refused(n, "is not wanted")
        return message

    return refuses_one


def reads_by_itself(message: Message, process: Any) -> None:
    """Writes each tenth message by itself, with the message that it reads by itself at the same place."""
    other = process.tailers["other"].read()
    if message["n"] % 10 == 0:
        process.appenders["log"].write({"n": message["n"], "other": other["n"]})


STORE_GRAPHS: dict[str, Callable[[], Graph]] = {
    "rate": graph(Stream(several, "in", "out", rate="5000/s"), Stream(plain, "out", "more")),
    "imperative": graph(
        Stream(plain, "in", "doubled"),
        Stream(reads_by_itself, "doubled", None, tailers={"other": "in"}, appenders={"log": "log"}),
        Stream(mended, "log", "out"),
    ),
    "committed messages only": graph(Stream(several, "in", "out", isolation="committed")),
    "pause": graph(Stream(paused_by(207), "in", "out", id="p", on_error="pause"), errors="errors"),
    "pause of a batch": graph(
        Stream(poisoned, "in", "out", batch=True, batch_size=60, on_error="pause"), errors="errors"
    ),
    "pause at the first message": graph(Stream(paused_by(0), "in", "out", id="p", on_error="pause"), errors="errors"),
    "pause after some errors": graph(Stream(picky, "in", "out", max_errors="3/h"), errors="errors"),
    "pause after the errors of a batch": graph(
        Stream(poisoned, "in", "out", batch=True, batch_size=60, max_errors="5/h"), errors="errors"
    ),
    "errors below the limit": graph(Stream(picky, "in", "out", max_errors="100/h"), errors="errors"),
}
"""Graphs with options that a processor has on Spark only with its queues in a store."""


# --- what is due ----------------------------------------------------------------------------------------


def sets_timers(message: Message, process: Any) -> dict[str, Message]:
    """One for each key, which each message replaces, or cancels."""
    counted(message, process)
    n = message["n"]
    process.timer(n % 25, None if n % 50 == 49 else process.now + timedelta(seconds=n % 20 + 1))
    return {"out": {"n": n, "count": process.state["count"]}}


def fires(timer: Message, process: Any) -> dict[str, Message]:
    """Fails for one key, and sets a further timer at its first call for another one."""
    if timer["key"] == 7:
        raise Refused(7, "is not wanted")
    fired = process.state["fired"] = process.state.get("fired", 0) + 1
    if timer["key"] == 11 and fired == 1:
        process.timer(11, timer["at"] + timedelta(seconds=5), "again")
    came = {"key": timer["key"], "name": timer["name"], "at": timer["at"], "hash": process.delivery_hash}
    return {"fired": {**came, "count": process.state["count"], "fired": fired}}


def told_of(timer: Message, process: Any) -> Message:
    return {"key": timer["key"], "hash": process.delivery_hash, "index": process.index}


def sets_timers_by_time(message: Message, process: Any) -> dict[str, Message]:
    """As :func:`sets_timers`, by the field of the message: an executor has its own clock."""
    counted(message, process)
    n, at = message["n"], START + timedelta(seconds=message["at"])
    process.timer(n % 25, None if n % 50 == 49 else at + timedelta(seconds=n % 20 + 1))
    return {"out": {"n": n, "count": process.state["count"]}}


def by_25(message: Message) -> int:
    return message["n"] % 25  # type: ignore[no-any-return]


def delays(message: Message) -> Any:
    """Two of three are due later, some of them at the same time. An executor has its own clock, so by their field."""
    at = START + timedelta(seconds=message["at"] + message["n"] % 7)
    return cues.delayed(message, deliver_at=at) if message["n"] % 3 else message


def due(*processors: Any, **options: Any) -> Callable[[], Graph]:
    sources = [Source("in"), Source("quiet")]
    return lambda: Graph("g", [*sources, *processors], durability="process", errors="errors", **options)


_FORK = {"out": "out", "fired": "fired"}
_IDLE: Any = {"time": "n", "idle": "10s"}
DUE_GRAPHS: dict[str, Callable[[], Graph]] = {
    "timers": due(
        Stream(plain, "in", "plain"),
        Stream(sets_timers, "plain", _FORK, key=by_25, timer=fires),
        Stream(told_of, "fired", "told"),
    ),
    "after a death": due(Stream(dies_once, "in", "plain"), Stream(sets_timers, "plain", _FORK, key="n", timer=fires)),
    "timers by their messages": due(
        Stream(sets_timers_by_time, "in", _FORK, key=by_25, timer=fires, ttl="1h"), Stream(told_of, "fired", "told")
    ),
    "timers without a key": due(Stream(sets_timers, "in", _FORK, timer=fires)),
    "timers of partitions": due(
        Stream(sets_timers, "in", _FORK, key="n", timer=fires),
        queues={queue: cues.QueueOptions(partitions=2, key="n") for queue in ("in", "out")},
    ),
    "time to live": due(Stream(counted, "in", "out", key=by_25, ttl="10m"), Stream(several, "out", "more")),
    "time to live without a key": due(Stream(counted, "in", "out", ttl="50s")),
    "debounce": due(
        shape.debounce("in", "settled", key=by_25, quiet="5s", count="of"), Stream(plain, "settled", "out")
    ),
    "idle window": due(
        windows.sessions(AnyOf("in", "quiet"), "out", 10, late="late", reduce={"count": reducers.count()}, **_IDLE)
    ),
    "idle join": due(
        joins.interval({"left": "in", "right": "quiet"}, "out", key="n", how="left", late="late", **_IDLE)
    ),
    "delayed messages": due(Stream(delays, "in", "later"), Stream(several, "later", "out")),
    "delayed messages with state": due(Stream(delays, "in", "later"), Stream(counted, "later", "out", key=by_25)),
}
"""Graphs with work that is due at a time."""

START = datetime(2026, 1, 31, tzinfo=UTC)


def _sent(at: float, low: int, high: int) -> tuple[float, list[Message]]:
    return at, [{"n": n, "at": at} for n in range(low, high)]


PLAY: list[tuple[float, list[Message]]] = [
    _sent(0, 200, 300),
    (30, []),
    _sent(60, 250, 350),
    (7200, []),
    _sent(7210, 200, 220),
    (7300, []),
]
"""Seconds, and the messages that are sent then. Nothing is due when messages are sent, so the order is one."""
