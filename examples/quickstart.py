"""Two orders, a price, and an error: ``python examples/quickstart.py``."""

import tempfile

import cues

graph = cues.Graph("quickstart", store=tempfile.mkdtemp(), errors="errors")
graph.source("orders")  # fed by send()


@graph.stream("orders", "priced")
def price(order):
    return {**order, "total": order["count"] * order["price"]}


@graph.sink("priced")
def save(order, process):
    print(f"saved {order['total']}, delivery {process.delivery_hash[:8]}")


if __name__ == "__main__":  # `cues show` imports the file
    with graph.start() as running:
        running.send("orders", {"count": 3, "price": 4})
        running.send("orders", {"count": "three"})
        running.wait_idle(timeout=10)
        print(running.messages("priced"), running.messages("errors")[0]["err/cause"][0]["type"])
