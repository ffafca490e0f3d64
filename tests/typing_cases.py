"""Right and wrong uses of the public names, for test_typing.py: each wrong line names the code of mypy's error.

This file is checked by mypy and never run. Linters and the project's own mypy leave it alone.
"""

from pathlib import Path
from typing import Any

import cues
from cues.checkpoints import SQLCheckpoint
from cues.processors import sql

Order = dict[str, Any]


def price(order: Order) -> Order:
    return {**order, "price": 1}


def prices(orders: list[Order]) -> list[Order]:
    return orders


def save(order: Order, process: cues.Process) -> None:
    process.connection.execute("…", (process.delivery.hash,))


# --- declarations ---

cues.Source("orders", errors=None, resume="skip", batch_size=100)
cues.Stream(price, "orders", "priced", id="p", concurrency=8, retries=cues.Retry(3), timeout_s=1.5, key="customer")
cues.Stream(prices, "orders", "priced", batch=True, linger_s=2, errors="failed", across="pending", instances=4)
cues.Stream(price, cues.AnyOf(a="x", b="y"), ["c", "d"], types={"a": "order", "b": ["order", "refund"]})
cues.Stream(price, "orders", "priced", types={"order"}, where=lambda order: order["x"] > 1, strategy="at-most-once")
cues.Stream(price, "orders", None, appenders=["late"], tailers={"t": "rates"}, key=lambda order: order["x"])
cues.Sink(save, "priced", checkpoint=SQLCheckpoint("sqlite:///x.db"), step_s=None)
cues.Sink(save, "priced", checkpoint=sql.SQLite("x.db"), opts={"any": "thing"}, side_effects=True)
cues.broadcast("orders", ["a", "b"], id="copy", where=lambda order: True)

cues.Source("orders", key="customer")  # E: call-arg
cues.Source("orders", resume="later")  # E: arg-type
cues.Stream(price, "orders", "priced", batch_sise=3)  # E: call-arg
cues.Stream(price, "orders", "priced", concurrency="8")  # E: arg-type
cues.Stream(price, "orders", "priced", strategy="exactly_once")  # E: arg-type
cues.Stream(price, "orders", "priced", across="later")  # E: arg-type
cues.Stream(price, "orders", "priced", batch="yes")  # E: arg-type
cues.Stream(price, "orders", "priced", resume="skip")  # E: call-arg
cues.Stream(price, "orders", "priced", where="x > 1")  # E: arg-type
cues.Stream(price, "orders")  # E: call-arg
cues.Sink(save, "priced", appenders=["late"])  # E: call-arg
cues.Sink(save, "priced", checkpoint="x.db")  # E: arg-type
cues.Sink(save, "priced", timeout=3)  # E: call-arg
cues.broadcast("orders", ["a"], concurency=2)  # E: call-arg

# --- graphs ---

graph = cues.Graph("shop", errors="failed", queues={"orders": cues.QueueOptions(partitions=3, retention="10d")})
cues.Graph("shop", strategy="once")  # E: arg-type
cues.Graph("shop", error="failed")  # E: call-arg
cues.QueueOptions(partitons=3)  # E: call-arg
cues.Retention(age="10d", count=3)
cues.Retention(days=3)  # E: call-arg

graph.source("orders")


@graph.source("more", batch_size=10)
def more(position: int | None) -> Any:
    yield 1, {"x": 1}


@graph.stream("orders", "priced", retries=3, errors="inherit")
def declared(order: Order) -> Order:
    return order


@graph.sink("priced", id="save", instances=2)
def saved(order: Order) -> None: ...


@graph.frame("orders", "priced", "origin string", batch_size=10, strategy="exactly-once")
def frame(df: Any) -> Any:
    return df


graph.broadcast("orders", ["a", "b"], id="copies", types="order")
declared({"x": 1})["x"]
declared("text")  # E: arg-type

graph.source("orders", linger_s=3)  # E: call-arg
graph.stream("orders", "priced", batch_sise=3)  # E: call-arg
graph.stream("orders", "priced", concurrency="8")  # E: arg-type
graph.stream("orders", "priced", checkpoint=sql.SQLite("x.db"))  # E: call-arg
graph.sink("priced", retry=3)  # E: call-arg
graph.sink("priced", step_s="1s")  # E: arg-type
graph.frame("orders", "priced", key="customer")  # E: call-arg
graph.broadcast("orders", ["a"], keys="customer")  # E: call-arg

cues.Graph.from_dict(graph.to_dict(), store="data", system=object(), errors=None)
cues.Graph.from_dict(graph.to_dict(), stor="data")  # E: call-arg
cues.Graph.from_dict(graph.to_dict(), strategy="never")  # E: arg-type

# --- starts ---

running: cues.Running = graph.start(store=Path("data"), take_over=True)
graph.start(workers="auto", target="graph.py:make(3)", listeners=(print,))
graph.start(engine="spark", master="local[2]", queues="/shared", backfill=False, conf={"spark.cores.max": "2"})
graph.run(workers=4, accept_topology=True)
with graph.start() as inside:
    inside.wait_done()
    inside.redrive().resolved[0][1].bit_length(), inside.resume()[0].text, inside.standings()[0].counters.steps
    inside.store.id, inside.plan.fed, inside.send("orders", {"x": 1}).bit_length()
    inside.resume()[0].texts  # E: attr-defined
    inside.redrive(queues="orders")  # E: call-arg

graph.start(engin="spark")  # E: call-arg
graph.start(engine="flink")  # E: arg-type
graph.start(workers="all")  # E: arg-type
graph.start(backfill="yes")  # E: arg-type
graph.run(worker=4)  # E: call-arg
graph.run(engine="flink")  # E: arg-type

# --- stores ---

with cues.open("data") as store:
    store.queue("q", partitions=3, key="customer", retention=cues.Retention(count=10), metadata={"t"})
    store.queue("q", partitioner=lambda message, n: 0, max_message_bytes=1 << 20, metadata=True)
    store.queue("q").appender().write({"x": 1})
    store.queue("q", partitons=3)  # E: call-arg
    store.queue("q", partitions="3")  # E: arg-type
    store.queue("q", retention=1.5)  # E: arg-type
    store.queue("q", path="data/other")  # E: call-arg
    store.seek("shop.priced", "start", plan=True)[0].inputs[0].again.bit_length()
    store.backup("backups").stores[0].name.upper()
    store.seek("shop.priced", 1.5)  # E: arg-type
    store.backup("backups").numbers  # E: attr-defined
    with store.transaction() as transaction:
        opened: cues.Transaction = transaction
        opened.write("q", {"x": opened.tailer("q", "copy").read()})
        opened.indices["q"].start, opened.hash
        opened.write("q", 3)  # E: arg-type
cues.open("data", read_only=True)  # E: call-arg

# --- names ---

try:
    cues.txn.Consumer, cues.groups.Member, cues.checkpoints.JSONFileCheckpoint, cues.testing, cues.codec
except (cues.CuesError, cues.errors.StoreFull):
    pass
cues.Grap("x")  # E: attr-defined
cues.errors.Nothing  # E: attr-defined
cues.txn.Consumr  # E: attr-defined
cues.groups.Membr  # E: attr-defined
cues.checkpoints.SQLCheckpont  # E: attr-defined
