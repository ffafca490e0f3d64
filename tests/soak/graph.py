"""The graph of the soak, for ``cues run``.

SOAK_PLACE is the directory of it all, SOAK_BATCH the size of steps. SOAK_BREAK breaks commits (broken_commits.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import broken_commits

import cues
from cues.processors import sql
from soak import model
from soak.model import Message, Place

broken_commits.break_commits(os.environ.get("SOAK_BREAK", ""))

PLACE = Place(os.environ.get("SOAK_PLACE", "."))
BATCH = int(os.environ.get("SOAK_BATCH", 50))
PARTITIONS = 4


def kept(queue: str) -> cues.Retention:
    """The last messages, and all that a reader has not read."""
    return cues.Retention(count=5000 if queue in model.LONG else 500, unread=True)


def spread(queue: str) -> cues.QueueOptions:
    """The options of a queue with partitions."""
    return cues.QueueOptions(partitions=PARTITIONS, key="origin", retention=kept(queue))


graph = cues.Graph(
    "soak",
    store=PLACE.main,
    errors="errors",
    queues={
        **{name: spread(name) for name in model.SPREAD if name != "seen"},
        **{name: cues.QueueOptions(retention=kept(name)) for name in model.PLAIN},
        "shipped": cues.QueueOptions(path=PLACE.other, retention=kept("shipped")),
    },
)
graph.source("rows")
graph.source("booked")


@graph.stream("rows", "flights", batch_size=BATCH)
def check(row: Message) -> Message:
    if not isinstance(row["delay"], int):
        raise ValueError(f"delay {row['delay']!r} is not a whole number")
    return row


@graph.source("weather")
def weather(position: int | None) -> Iterator[tuple[int, Message]]:
    """All hours that the writer has begun."""
    number = position or 0
    while True:
        hours = int(PLACE.hour.read_text()) if PLACE.hour.exists() else 0
        while number < hours * len(model.ORIGINS):
            yield number + 1, model.weather(number)
            number += 1
        time.sleep(0.1)


@graph.stream(
    cues.AnyOf(flight="flights", weather="weather"),
    "enriched",
    key=lambda message: f"{message['origin']} {message['hour']}",
    instances=2,
    batch_size=BATCH,
)
def enrich(message: Message, process: Any) -> list[Message]:
    """A flight that arrives before its weather waits in the state, which is empty after the last flight of an hour."""
    state = process.state
    if process.binding == "weather":
        state["wind"] = message["wind"]
        ready = state.pop("waiting", [])
        if not ready and model.has_flights(message["origin"], message["hour"]):
            return []
    elif "wind" in state:
        ready = [message]
    else:
        state["waiting"] = [*state.get("waiting", []), message]
        return []
    made = [{**flight, "wind": state["wind"]} for flight in ready]
    if not ready or model.is_last(ready[-1]):
        state.clear()
    return made


@graph.stream("enriched", {name: name for name in model.RESULTS}, batch_size=BATCH)
def sort(flight: Message) -> dict[str, Message]:
    return {model.result(flight): flight}


@graph.stream("enriched", "figures", batch=True, batch_size=BATCH)
def measure(flights: list[Message], process: Any) -> list[Message]:
    figures = {}
    for flight in flights:
        state = process.state_of(flight["origin"])
        state["flights"] = state.get("flights", 0) + 1
        state["delay"] = state.get("delay", 0) + flight["delay"]
        figures[flight["origin"]] = {"origin": flight["origin"], **state}
    return list(figures.values())


@graph.stream("enriched", "audited", instances=2, batch_size=BATCH)
def audit(flight: Message) -> Message:
    return flight


@graph.stream("enriched", "shipped", batch_size=BATCH)
def ship(flight: Message) -> Message:
    return flight


@graph.stream("booked", "confirmed", isolation="committed", batch_size=BATCH)
def confirm(booking: Message) -> Message:
    return booking


db = sql.SQLite(PLACE.table, schema=model.TABLES)


@graph.sink("enriched", batch=True, errors=None, checkpoint=db, batch_size=BATCH)
def save(flights: list[Message], process: Any) -> None:
    process.connection.executemany("insert into flights (id, origin, wind) values (:id, :origin, :wind)", flights)


@graph.sink("errors", batch=True, errors=None, checkpoint=db)
def reject(errors: list[Message], process: Any) -> None:
    rows = [error["err.proc/messages"]["rows"][0] for error in errors]
    process.connection.executemany("insert into rejected (id) values (:id)", rows)


@graph.sink(cues.AnyOf(figures="figures", errors="errors"), batch=True, errors=None)
def report(messages: list[Message], process: Any) -> None:
    process.state[process.binding] = process.state.get(process.binding, 0) + len(messages)
    model.put(PLACE.report, str(dict(process.state)))
