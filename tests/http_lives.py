"""Lives of HTTP processors for children that a test kills (forks.py): the server is in the test's process."""

from __future__ import annotations

from typing import Any

import cues
from cues import testing
from cues.processors.http_sink import Requests
from cues.processors.http_source import Poll

COUNT = 5


def graph_of(url: str, concurrency: int = 1, **options: Any) -> cues.Graph:
    graph = cues.Graph("g", errors="errors")
    graph.source("orders")
    graph.add(Requests(f"{url}/orders", **options).sink("orders", batch_size=3, concurrency=concurrency))
    return graph


def prepare(path: str) -> None:
    with cues.open(path, durability="process", map_size=16 << 20) as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(COUNT)])


def send(path: str, url: str, concurrency: int = 1) -> None:
    with cues.open(path, durability="process") as store:
        testing.run_until_idle(graph_of(url, concurrency), store)


def sites(path: str, url: str) -> list[tuple[str, int]]:
    prepare(path)
    return testing.crash_sites(lambda: send(path, url))


def crash(path: str, url: str, concurrency: int, point: str, hit: int) -> None:
    prepare(path)
    with testing.crash(point, hit):
        send(path, url, concurrency)


def poll(path: str, url: str, ends: bool) -> None:
    """Ask a list again and again, until the test kills this process; or once more, to the end."""
    graph = cues.Graph("p", durability="process")
    source = Poll(f"{url}/list", id="n", interval_s=None if ends else 0.001)
    graph.add(cues.Source("items", source, batch_size=3))
    with cues.open(path, durability="process", map_size=16 << 20) as store:
        if ends:
            testing.run_until_idle(graph, store)
        else:
            with graph.start(store=store) as running:
                running.wait_done()
