"""A graph whose processors get other names, for test_renames.py: its children are killed at every crash point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cues
from cues import Graph, QueueOptions, Sink, Stream, faults, testing
from cues.engine import standing
from cues.testing import messages

COUNT = 12
MAP_BYTES = 4 << 20


def graph(place: str, renamed: bool, *, stays: bool = False) -> Graph:
    """Orders over two partitions to a stream with keyed state and an output in another store, and a sink with a log.

    ``stays``: its processors keep their first names. ``renamed``: they have ``renamed_from=``.
    """
    log = Path(place, "delivered")

    def count(order: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["seen"] = process.state.get("seen", 0) + 1
        return {"n": order["n"], "seen": process.state["seen"], "hash": process.delivery_hash}

    def deliver(order: dict[str, Any], process: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps([order["n"], process.delivery_hash, process.id, process.delivery.end]) + "\n")

    old = stays or not renamed
    options: Any = {} if old else {"renamed_from": "count"}
    sink: Any = {} if old else {"renamed_from": "deliver"}
    queues = {
        "orders": QueueOptions(partitions=2, key="k"),
        "counted": QueueOptions(path=str(Path(place, "abroad"))),
        "here": QueueOptions(partitions=2, key="n"),
    }
    return Graph(
        "shop",
        [
            Stream(
                lambda order, process: dict.fromkeys(("counted", "here"), count(order, process)),
                "orders",
                ["counted", "here"],
                id="count" if old else "tally",
                key="k",
                batch_size=2,
                **options,
            ),
            Sink(deliver, "orders", id="deliver" if old else "ship", batch_size=1, **sink),
        ],
        queues=queues,
    )


def prepare(place: str) -> None:
    """The first half of the messages, by the first names; the last step of the sink is recorded, and did not end."""
    with cues.open(Path(place, "store"), durability="process", map_size=MAP_BYTES) as store:
        queue = store.queue("orders", partitions=2, key="k")
        queue.appender().write_many([{"n": n, "k": n % 5} for n in range(COUNT // 2)])
        testing.run_until_idle(graph(place, False), store)
        queue.appender().write_many([{"n": n, "k": n % 5} for n in range(COUNT // 2, COUNT)])

        class Died(BaseException):
            pass

        def die(name: str) -> None:
            raise Died

        faults.arm("function.before", 1, die)  # the stream's
        faults.arm("snapshot.after", 1, die)  # the sink's: its messages are taken again under the same hash
        try:
            testing.run_until_idle(graph(place, False), store)
        except Died:
            pass
        finally:
            faults.disarm()


def finish(place: str, stays: bool = False) -> None:
    with cues.open(Path(place, "store"), map_size=MAP_BYTES) as store:
        testing.run_until_idle(graph(place, True, stays=stays), store)


def sites(place: str) -> list[tuple[str, int]]:
    """Every crash point that the run under the new names reaches, and how often."""
    faults.count()
    finish(place)
    return [(name, hit) for name, count in faults.hits().items() for hit in range(1, count + 1)]


def die_at(place: str, name: str, hit: int) -> None:
    faults.arm(name, hit)
    finish(place)


def examine(place: str) -> dict[str, Any]:
    """Queues with their hashes, state and positions, by what does not depend on the names."""
    with cues.open(Path(place, "store")) as store, cues.open(Path(place, "abroad")) as abroad:
        assert store.check() == []
        assert abroad.check() == []
        known = standing.processors(store)
        units = [unit for unit in known if unit.startswith(("shop.count", "shop.tally"))]
        states = [[testing.state(store, unit, key) for key in range(5)] for unit in units]
        assert len(known) == 4, known
        contents = testing.contents(store)
        delivered = Path(place, "delivered").read_text().splitlines()
        return {
            "here": messages(store, "here"),
            "counted": sorted(messages(abroad, "counted"), key=lambda message: message["n"]),
            "states": states,
            "positions": contents["positions"],
            "delivered": sorted(set(delivered)),
            "repeated": len(delivered) - len(set(delivered)),
        }


def copy(place: str, to: str) -> str:
    return str(shutil.copytree(place, to))
