"""One process writes orders, two readers of one name share a position: ``python examples/produce_consume.py``.

A named tailer keeps its position in the store, so the second reader continues after the first. The position moves
when a message is read: if the reader dies before its work is done, the work is not done again. Programs that must
not lose it read in a transaction of the store (examples/invoices.py).
"""

import subprocess
import sys
import tempfile

import cues

PRODUCER = """
import sys, time, cues
with cues.open(sys.argv[1]) as store:
    appender = store.queue("orders").appender()
    for n in range(1, 11):
        appender.write({"order": n})  # on the disk when write returns
"""


def consume(place, count):
    """Wait for messages, and return the numbers of ``count`` orders."""
    seen = []
    with cues.open(place) as store:
        tailer = store.queue("orders").tailer("billing")
        while len(seen) < count:
            message = tailer.read(block=True, timeout=30)
            assert message is not None, "the producer has ended early"
            seen.append(message["order"])
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        producer = subprocess.Popen([sys.executable, "-c", PRODUCER, place])
        print("the first reader:", consume(place, 4))
        print("the second reader:", consume(place, 6))
        producer.wait()
