"""bytewax: files of JSON lines in and out, with recovery. FileSource and FileSink are its own durable connectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import orjson
from bytewax.connectors.files import FileSink, FileSource
from bytewax.dataflow import Dataflow
from bytewax.operators import windowing
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import run_main
from harness import Contender, Room, Work
from starts import rows as starts_of
from work import BATCH, EVENTS_S, WINDOW_S, messages, minutes, must_be, running_totals, total

START = datetime(2026, 1, 1, tzinfo=UTC)


def flow(room: Room, steps: Callable[[Any], Any], batch: int, epoch_s: float) -> Callable[[], None]:
    source, sink = room.path / "in.jsonl", room.path / "out.jsonl"
    source.write_bytes(b"".join(orjson.dumps(message) + b"\n" for message in messages(room.count)))
    recovery = room.path / "recovery"
    recovery.mkdir()
    init_db_dir(recovery, 1)
    graph = Dataflow("bench")
    lines = op.input("in", graph, FileSource(source, batch_size=batch))
    written = op.map("write", steps(lines), lambda message: ("0", orjson.dumps(message).decode()))
    op.output("out", written, FileSink(sink))
    return lambda: run_main(graph, epoch_interval=timedelta(seconds=epoch_s), recovery_config=RecoveryConfig(recovery))


def result(path: Path) -> Iterator[Any]:
    with (path / "out.jsonl").open("rb") as lines:
        yield from map(orjson.loads, lines)


def pipeline(epoch_s: float, batch: int) -> Contender:
    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        yield flow(room, lambda lines: op.map("total", lines, lambda line: total(orjson.loads(line))), batch, epoch_s)
        must_be(result(room.path), map(total, messages(room.count)))

    return contender


@contextmanager
def keyed(room: Room) -> Iterator[Work]:
    def add(state: tuple[int, int] | None, order: Any) -> tuple[tuple[int, int], Any]:
        count, size = state or (0, 0)
        state = (count + 1, size + order["size"])
        return state, {"id": order["id"], "symbol": order["symbol"], "count": state[0], "sum": state[1]}

    def steps(lines: Any) -> Any:
        orders = op.map("parse", lines, orjson.loads)
        sums = op.stateful_map("sum", op.key_on("key", orders, lambda order: str(order["symbol"])), add)
        return op.map("value", sums, lambda pair: pair[1])

    yield flow(room, steps, BATCH, 10)
    # its keys are not in the order of the input: the order of one key is
    must_be(sorted(result(room.path), key=lambda m: m["id"]), running_totals(messages(room.count)))


@contextmanager
def window(room: Room) -> Iterator[Work]:
    clock = windowing.EventClock(
        lambda order: START + timedelta(seconds=order["id"] / EVENTS_S), wait_for_system_duration=timedelta(seconds=10)
    )
    windower = windowing.TumblingWindower(length=timedelta(seconds=WINDOW_S), align_to=START)

    def steps(lines: Any) -> Any:
        orders = op.map("parse", lines, orjson.loads)
        counts = windowing.count_window("count", orders, clock, windower, key=lambda order: str(order["symbol"]))
        return op.map("value", counts.down, lambda pair: {"symbol": pair[0], "minute": pair[1][0], "count": pair[1][1]})

    yield flow(room, steps, BATCH, 10)
    counts = Counter({(m["symbol"], m["minute"]): m["count"] for m in result(room.path)})
    assert counts == minutes(messages(room.count)), "other counts"


CONTENDERS = {
    "pipeline": {"bytewax, commit every 10 s": pipeline(10, BATCH)},
    "step-one": {"bytewax, commit a message": pipeline(0, 1)},
    "keyed": {"bytewax": keyed},
    "window": {"bytewax": window},
    **starts_of("bytewax"),
}
