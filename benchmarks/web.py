"""Messages a second through the HTTP processors, on loopback: ``python benchmarks/web.py [MESSAGES]``.

The other side is a process of its own. The times are wall times on a machine that both sides share, so they tell what a
message costs at most here, and not what a network allows.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import cues
from cues import testing
from cues.processors.http_sink import Requests
from cues.processors.http_source import Poll
from cues.processors.webhook import Webhook

PAGE = 100


def serve(total: int, told: Any) -> None:
    """A server that takes anything, and lists ``total`` items in pages."""
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        first = int(scope["query_string"].decode().partition("=")[2] or 0)
        items = [{"id": n, "name": "flight"} for n in range(first, min(total, first + PAGE))]
        following = f"/?first={first + PAGE}" if first + PAGE < total else None
        body = json.dumps({"items": items, "next": following}).encode() if scope["method"] == "GET" else b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        told.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    asyncio.run(run())


@contextmanager
def other_side(total: int) -> Iterator[str]:
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(total, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}/"
    finally:
        process.terminate()
        process.join()


def sending(url: str, count: int, concurrency: int) -> float:
    graph = cues.Graph("g", [cues.Source("in"), Requests(url).sink("in", concurrency=concurrency)])
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"id": n, "name": "flight"} for n in range(count)])
        with graph.start(store=store) as running:
            start = time.perf_counter()
            running.wait_idle()
            return count / (time.perf_counter() - start)


def polling(url: str, count: int) -> float:
    graph = cues.Graph("g", [cues.Source("in", Poll(url, items="items", next="next", interval_s=None))])
    with testing.temporary_store() as store, graph.start(store=store) as running:
        start = time.perf_counter()
        running.wait_done()
        spent = time.perf_counter() - start
        assert len(running.messages("in")) == count
    return count / spent


def receiving(count: int, clients: int) -> float:
    hook = Webhook(port=0, id="X-Id")
    graph = cues.Graph("g", [cues.Source("in", hook)])

    async def send() -> None:
        numbers = iter(range(count))

        async def one(client: httpx.AsyncClient) -> None:
            for n in numbers:
                answer = await client.post(str(hook.url), json={"id": n}, headers={"X-Id": str(n)})
                assert answer.status_code == 200

        async with httpx.AsyncClient() as client:
            await asyncio.gather(*(one(client) for _ in range(clients)))

    with testing.temporary_store() as store, graph.start(store=store) as running:
        while hook.url is None:
            time.sleep(0.01)
        start = time.perf_counter()
        asyncio.run(send())
        spent = time.perf_counter() - start
        assert len(running.messages("in")) == count
    return count / spent


def main(count: int) -> None:
    print("| | messages/s |\n|---|---|")
    with other_side(count * 10) as url:
        for concurrency in (1, 8):
            print(f"| `Requests`, concurrency {concurrency} | {sending(url, count, concurrency):,.0f} |", flush=True)
        print(f"| `Poll`, pages of {PAGE} | {polling(url, count * 10):,.0f} |", flush=True)
    for clients in (1, 8):
        print(f"| `Webhook`, {clients} clients | {receiving(count, clients):,.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
