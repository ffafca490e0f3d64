"""CSV through a schema and a lookup into Parquet and a database: ``python examples/import_orders.py [URL]``."""

import sys
from dataclasses import dataclass

import sqlalchemy as sa

import cues
from cues.checkpoints import SQLCheckpoint
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files
from cues.schemas import parsed


@dataclass
class Order:
    id: int
    sku: str
    count: int


PRICES = {"pen": 1.5, "ink": 7.0}  # a lookup; an unknown sku is a KeyError, and the order is in the error queue
TABLE = "create table if not exists orders (id integer primary key, sku text, total double precision)"
db = SQLCheckpoint(sys.argv[1] if len(sys.argv) > 1 else "orders.db", schema=TABLE)
parquet = FileSink("out", "parquet")
graph = cues.Graph("import", store="data", errors="errors")
graph.add(cues.Source("orders", Files("in/*.csv"), schema=parsed(Order)))
graph.add(parquet.sink("priced", id="files"))


@graph.stream("orders", "priced")
def price(order: Order):
    return {"id": order.id, "sku": order.sku, "total": order.count * PRICES[order.sku]}


@graph.sink("priced", batch=True, checkpoint=db)
def save(orders, process):
    process.connection.execute(sa.text("insert into orders values (:id, :sku, :total)"), orders)


if __name__ == "__main__":  # twice the same run is once the same rows
    with graph.start() as running:
        running.wait_idle(timeout=60)
        print(f"{len(running.messages('priced'))} priced, {len(running.messages('errors'))} errors")
    print(*parquet.finish())
