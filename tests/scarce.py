"""A graph that runs with little room, descriptors or memory: it is a program of its own (test_scarce.py starts it).

    python -m scarce WHAT DURABILITY PLACE FIRST END STEP

For each amount from FIRST to END: a new store is filled and run with so much of WHAT, until the run ends or stops.
Then there is enough again, and it is finished. The queues must be those of a run without limits. It prints the amounts
and how the first run ended, as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cues
from cues import testing
from cues.errors import CuesError

PAGE = 4096
BODY = "x" * 9000
COUNT = 40
MIB = 1 << 20


def graph() -> cues.Graph:
    """State, two outputs, a snapshot before each step, an error queue, and a queue between processors."""
    made = cues.Graph("g", errors="errors")

    @made.stream("a", ["b", "c"], key=lambda message: message["n"] % 3, batch_size=4)
    def count(message: Any, process: Any) -> Any:
        process.state["count"] = process.state.get("count", 0) + 1
        if message["n"] % 10 == 7:
            raise ValueError(f"{message['n']} is refused")
        return {"b": {**message, "count": process.state["count"]}, "c": message}

    @made.stream("b", "d", side_effects=True, batch_size=3)
    def same(message: Any) -> Any:
        return message

    return made


def contents(store: cues.Store) -> dict[str, list[Any]]:
    """The messages of each queue; of failed ones, their numbers."""
    queues = {name: list(store.queue(name).tailer()) for name in "bcd"}
    failed = [message["err.proc/messages"]["a"][0]["n"] for message in store.queue("errors").tailer()]
    return {**queues, "errors": failed}


@contextlib.contextmanager
def limited(kind: int, amount: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def ballast(place: Path, free: int) -> Iterator[None]:
    """Fill the file system at ``place`` until only so many bytes are free."""
    status = os.statvfs(place)
    (place / "ballast").write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free)))
    try:
        yield
    finally:
        (place / "ballast").unlink()


def used_map() -> int:
    """The address space of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


LIMITS: dict[str, Callable[[Path, int], Any]] = {
    "map": lambda place, amount: contextlib.nullcontext(),
    "file": lambda place, amount: limited(resource.RLIMIT_FSIZE, amount * PAGE),
    "disk": lambda place, amount: ballast(place, amount * PAGE),
    "descriptors": lambda place, amount: limited(resource.RLIMIT_NOFILE, amount),
    "memory": lambda place, amount: limited(resource.RLIMIT_AS, used_map() + amount * MIB),
}


def attempt(place: Path, durability: str, what: str, amount: int) -> str:
    """Fill and run a store with little of ``what``; returns the error, or ``done``."""
    options: dict[str, Any] = {"durability": durability, "min_free": 0}
    if what == "map":
        options["map_size"] = options["max_map_size"] = MIB + amount * PAGE
    elif what != "memory":
        options["map_size"] = options["max_map_size"] = 16 * MIB
    try:
        with LIMITS[what](place, amount), cues.open(place / "s", **options) as store:
            for n in range(store.queue("a").last_index, COUNT):
                store.queue("a").appender().write({"n": n, "x": BODY})
            testing.run_until_idle(graph(), store)
        return "done"
    except CuesError as error:
        cause = error.__cause__ if isinstance(error, cues.ProcessorStopped) else error
        return f"{type(cause).__name__}: {error}"


def main(what: str, durability: str, folder: str, *bounds: str) -> None:
    place = Path(folder)
    expected = None
    for amount in [1 << 12, *range(*map(int, bounds))]:
        shutil.rmtree(place / "s", ignore_errors=True)
        ended = attempt(place, durability, what, amount)
        with cues.open(place / "s", durability=durability, min_free=0, max_map_size=64 * MIB) as store:
            for n in range(store.queue("a").last_index, COUNT):
                store.queue("a").appender().write({"n": n, "x": BODY})
            testing.run_until_idle(graph(), store)
            found = contents(store)
            problems = store.check()
        if expected is None:
            assert ended == "done", ended
            assert len(found["d"]) == COUNT - 4 and found["errors"] == [7, 17, 27, 37]
            expected = found
        assert found == expected and not problems, (amount, ended, problems)
        print(json.dumps([amount, ended]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
