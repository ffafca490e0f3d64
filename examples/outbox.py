"""A webhook outbox: orders that come in by a webhook go on to another system, signed, each once by its key.

    SECRET=whsec_… TARGET=https://example.com/hooks cues run examples/outbox.py
    curl -H 'X-Id: 1' -d '{"id": 1, "total": 12}' http://127.0.0.1:8080/orders

An order is answered 200 when it is on the queue. While the target is down it waits there, and is tried again; an order
that the target refuses is on the queue ``errors``, with the status and the body of the answer.
"""

import os

import cues
from cues.processors.http import Signature
from cues.processors.http_sink import Requests
from cues.processors.webhook import Webhook

signature = Signature(os.environ.get("SECRET", "whsec_YSBzZWNyZXQgb2YgYm90aCBzaWRlcw=="), "standard")
orders = Webhook(port=int(os.environ.get("PORT", 8080)), path="/orders", id="X-Id")
outbox = Requests(
    os.environ.get("TARGET", "http://127.0.0.1:9000/hooks"),
    json=lambda order: {"type": "order.created", "data": order},
    sign=signature,
    attempts=20,
)

graph = cues.Graph("outbox", errors="errors")
graph.add(cues.Source("orders", orders))
graph.add(outbox.sink("orders", concurrency=4))
