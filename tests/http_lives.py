"""Lives of HTTP processors for children that a test kills (forks.py): the server is in the test's process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cues
from cues import testing
from cues.processors.http_sink import Requests
from cues.processors.http_source import Poll
from cues.processors.webhook import Webhook

COUNT = 5


def graph_of(url: str, concurrency: int = 1, **options: Any) -> cues.Graph:
    graph = cues.Graph("g", errors="errors")
    graph.source("orders")
    graph.add(Requests(f"{url}/orders", **options).sink("orders", batch_size=3, concurrency=concurrency, step_s=None))
    return graph


def prepare(path: str) -> None:
    with cues.open(path, durability="process", map_size=16 << 20) as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(COUNT)])


def send(path: str, url: str, concurrency: int = 1) -> None:
    with cues.open(path, durability="process") as store:
        testing.run_until_idle(graph_of(url, concurrency), store)


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


def hook(path: str, where: str, site: tuple[str, int] | None, remember: int, early: bool) -> None:
    """Serve until the file ``where``.stop is there; the file ``where`` has the URL.

    ``early`` answers before the commit, which waits for the file ``where``.go.
    """
    from cues.processors import webhook

    class Early(Webhook):
        def __call__(self, position: Any, process: Any = None) -> Iterator[Any]:
            for item in super().__call__(position, process):
                while not os.path.exists(f"{where}.go"):
                    time.sleep(0.002)
                yield item

    async def at_once(self: Any, number: int) -> bool:
        return True

    if early:
        webhook.Serving.wait = at_once  # type: ignore[method-assign]
    source = (Early if early else Webhook)(port=0, id="X-Id", remember=remember)
    graph = cues.Graph("h", [cues.Source("events", source)], errors="errors")
    with (
        cues.open(path, durability="process", map_size=16 << 20) as store,
        testing.crash(*site) if site else contextlib.nullcontext(),
        graph.start(store=store),
    ):
        while source.url is None:
            time.sleep(0.002)
        Path(f"{where}.part").write_text(source.url)
        os.rename(f"{where}.part", where)
        while not os.path.exists(f"{where}.stop"):
            time.sleep(0.005)
