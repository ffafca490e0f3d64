"""Two graphs that share a queue in a third store. They may run in one process or in two.

    cues run examples/shared_queue.py:collect     sensors → readings, which is in data/shared
    cues run examples/shared_queue.py:report      readings → the hottest of each sensor so far

Each graph has a store of its own, so neither waits for the other's writes, and either can be stopped,
killed or rebuilt while the other runs. Messages of ``collect`` for ``readings`` are committed in its own
store first and forwarded from there, exactly once. ``cues show`` marks queues in other stores.

``python examples/shared_queue.py`` runs both with temporary stores and prints the result.
"""

import tempfile
from pathlib import Path

import cues

SHARED = {"readings": cues.QueueOptions(path="data/shared", retention="read")}
"""Both graphs name the store of the queue. It keeps messages until all readers, of any store, have read them."""

collect = cues.Graph("collect", queues=SHARED)
report = cues.Graph("report", queues=SHARED)


@collect.source("sensors")
def sensors(position):
    """Yield a measurement with the position after it."""
    for number in range(position or 0, 300):
        yield number + 1, {"sensor": number % 3, "celsius": 15 + number * 7 % 23 + number % 3}


@collect.stream("sensors", "readings")
def clean(measurement):
    """Drop impossible temperatures."""
    return measurement if -50 < measurement["celsius"] < 60 else None


@report.stream("readings", "records", key="sensor")
def hottest(reading, process):
    """Return a message for each new record."""
    if reading["celsius"] <= process.state.get("celsius", -273):
        return None
    process.state["celsius"] = reading["celsius"]
    return reading


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        collect.directory = report.directory = Path(folder)
        with (
            collect.start(store=f"{folder}/collect") as collecting,
            report.start(store=f"{folder}/report") as reporting,
        ):
            collecting.wait_done()
            reporting.wait_idle()
            records = {reading["sensor"]: reading["celsius"] for reading in reporting.messages("records")}
    for sensor, celsius in sorted(records.items()):
        print(f"sensor {sensor}: {celsius} °C")
