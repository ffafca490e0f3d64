"""pathway: files of JSON lines in and out, with its file system persistence. Its output has no order.

``id`` is a name of its own, so the field is ``number`` here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pathway as pw
from harness import Room, Work
from work import messages, must_be, total


class Order(pw.Schema):
    number: int
    symbol: str
    side: str
    size: int
    price: float


@contextmanager
def pipeline(room: Room) -> Iterator[Work]:
    source = room.path / "in"
    source.mkdir()
    given = ({"number" if name == "id" else name: m[name] for name in m} for m in messages(room.count))
    (source / "orders.jsonl").write_bytes(b"".join(orjson.dumps(order) + b"\n" for order in given))
    orders = pw.io.jsonlines.read(str(source), schema=Order, mode="static", name="orders")
    totals = orders.select(*pw.this, total=pw.apply_with_type(lambda s, p: s * p, float, pw.this.size, pw.this.price))
    pw.io.jsonlines.write(totals, str(room.path / "out.jsonl"))
    backend = pw.persistence.Backend.filesystem(str(room.path / "kept"))

    def work() -> None:
        pw.run(monitoring_level=pw.MonitoringLevel.NONE, persistence_config=pw.persistence.Config(backend))

    yield work
    lines = (orjson.loads(line) for line in (room.path / "out.jsonl").read_bytes().splitlines())
    kept: list[Any] = [
        {"id" if name == "number" else name: line[name] for name in line if name not in ("diff", "time")}
        for line in lines
    ]
    must_be(sorted(kept, key=lambda m: m["id"]), map(total, messages(room.count)))


CONTENDERS = {"pipeline": {"pathway (no order, at least once)": pipeline}}
