"""The other processes of the races: ``python children.py NAME ARGUMENTS``.

They are not in core.py, so that a process whose start is measured imports only what a user's process imports.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from typing import Any

import cues
from cues import Graph, QueueOptions, Sink, Source, Stream

KEEPS = QueueOptions(metadata=frozenset({"t", "time"}))


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def memory_mb(field: str) -> float:
    """``RssAnon`` is the process's own memory; ``VmRSS`` also counts the pages of the store that it mapped."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    raise KeyError(field)


# --- hops: read `count` messages that have the time of their sending, print the time of each ------


def hop_cues(path: str, count: str) -> None:
    with cues.open(path) as store:
        tailer = store.queue("hops").tailer()
        say(ready=True)
        took = []
        for _ in range(int(count)):
            message = tailer.read(block=True)
            now = time.monotonic_ns()
            assert message is not None
            took.append(now - message["sent"])
    say(took=took)


def hop_lmdb(path: str, count: str) -> None:
    """Read messages from LMDB; a byte in a FIFO tells that there is one."""
    import lmdb
    import msgpack

    env = lmdb.open(path, map_size=1 << 30, lib_version=0)
    fd = os.open(os.path.join(path, "fifo"), os.O_RDWR)
    say(ready=True)
    took: list[int] = []
    while len(took) < int(count):
        select.select([fd], [], [])
        os.read(fd, 4096)
        messages = []
        with env.begin() as txn:
            cursor = txn.cursor()
            alive = cursor.set_key(len(took).to_bytes(8, "big"))
            while alive:
                messages.append(msgpack.unpackb(cursor.value()))
                alive = cursor.next()
        now = time.monotonic_ns()
        took += [now - message["sent"] for message in messages]
    say(took=took)


def hop_fifo(path: str, count: str) -> None:
    """Read messages from the FIFO itself. They are lost when the reader dies."""
    import msgpack

    fd = os.open(os.path.join(path, "fifo"), os.O_RDWR)
    say(ready=True)
    unpacker = msgpack.Unpacker()
    took: list[int] = []
    while len(took) < int(count):
        unpacker.feed(os.read(fd, 4096))
        messages = list(unpacker)
        now = time.monotonic_ns()
        took += [now - message["sent"] for message in messages]
    say(took=took)


# --- a start ------------------------------------------------------------------------------------


def start_import() -> None:
    """Import the modules of a graph that runs."""
    import cues.engine.local  # noqa: F401

    say(at=time.monotonic_ns(), anon_mb=memory_mb("RssAnon"))


def start_graph(path: str) -> None:
    """Start the graph on the store of a killed process; print the time at which its function gets the first message."""
    reported = False

    def double(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal reported
        if not reported:
            reported = True
            say(at=time.monotonic_ns(), anon_mb=memory_mb("RssAnon"))
        return {**message, "double": message["id"] * 2}

    graph = Graph("restart", [Source("in"), Stream(double, "in", "out")], store=path, queues={"*": KEEPS})
    with graph.start() as running:
        running.wait_idle()


# --- memory -------------------------------------------------------------------------------------


def memory_graph(path: str, count: str, durability: str) -> None:
    """Run a source, a stream and a sink; print their highest memory."""

    def numbers(position: int | None) -> Any:
        for number in range(position or 0, int(count)):
            yield number + 1, {"id": number, "text": f"message {number}"}

    def double(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "double": message["id"] * 2}

    seen = 0

    def take(message: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1

    processors = [Source("in", numbers), Stream(double, "in", "out"), Sink(take, "out")]
    graph = Graph("memory", processors, store=path, durability=durability, queues={"*": KEEPS})
    done = threading.Event()
    anon: list[float] = []

    def watch() -> None:
        while not done.wait(0.01):
            anon.append(memory_mb("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with graph.start() as running:
        running.wait_done()
    done.set()
    watcher.join()
    assert seen == int(count)
    say(anon_mb=max(anon), rss_mb=memory_mb("VmHWM"))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
