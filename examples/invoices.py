"""Orders become invoices, while the program is killed again and again: ``python examples/invoices.py [--seed N]``.

    orders ──► a transaction of the store ──► invoices, audit

A transaction reads orders with a named tailer, and writes an invoice and a line of the audit for each. Its commit
appends them and moves the position, or does nothing. So each order has one invoice, wherever the program dies. If not,
the exit code is 1.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading

import cues

ORDERS, DEATHS = 300, 6


def bill(place, deadline_s):
    """Write invoices until there are no more orders. With a deadline, die at that moment."""
    if deadline_s:
        threading.Timer(deadline_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with cues.open(place, durability="process") as store:
        while True:
            with store.transaction() as t:
                orders = list(itertools.islice(t.tailer("orders", "billing"), 5))
                for order in orders:
                    t.write("invoices", {"order": order["id"], "total": order["count"] * 10})
                    t.write("audit", {"billed": order["id"]})
            if not orders:
                return


def main(seed):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        with cues.open(place, durability="process") as store:
            store.queue("invoices"), store.queue("audit")
            orders = [{"id": n, "count": n % 7} for n in range(1, ORDERS + 1)]
            store.queue("orders").appender().write_many(orders)
        for _ in range(DEATHS):
            subprocess.run([sys.executable, __file__, "--in", place, "--die", str(chance.uniform(0.15, 0.6))])
        bill(place, 0)
        with cues.open(place, readonly=True) as store:
            invoices = [message["order"] for message in store.queue("invoices").tailer()]
            audit = [message["billed"] for message in store.queue("audit").tailer()]
    right = invoices == audit == [order["id"] for order in orders]
    print(
        f"{len(invoices)} invoices for {ORDERS} orders, {DEATHS} starts that died or finished:",
        "right" if right else "WRONG",
    )
    return 0 if right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in", dest="place")
    parser.add_argument("--die", type=float, default=0.0)
    given = parser.parse_args()
    sys.exit(bill(given.place, given.die) if given.place else main(given.seed))
