"""Small graphs over one store, run in the test's own thread: what many tests begin and end with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import Graph, codec, testing
from cues.base import names
from cues.queues.store import Store
from cues.records.log_row import LogRow, put_row
from cues.storage import locks


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of this test; the fixture of all tests whose file has no other."""
    with cues.open(tmp_path / "store", durability="process") as found:
        yield found
        if not (found.closed or request.node.get_closest_marker("delivers_again")):
            assert not testing.check_attempts(found)


def until(condition: Callable[[], Any], otherwise: str = "it did not happen", limit_s: float = 120.0) -> Any:
    """Wait for an event without a signal, such as the end of a lease; returns the first result that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{otherwise} within {limit_s} s"
        time.sleep(0.005)
    return found


ENCODERS, DECODERS = codec._encoders, codec._decoders
"""The tables of the codec, for tests that take a type out of them."""


def queue_of(running: cues.Running, name: str) -> Any:
    """A queue of a running graph, in the store that it is in."""
    return running._queue(name)


def has_ended(pid: int) -> bool:
    """True for a process that is gone, or that only its parent has not noticed yet."""
    return locks.process_state(pid) in ("gone", "dead, not reaped")


def halted_at_end(running: cues.Running) -> AbstractContextManager[cues.Running]:
    """A run that is halted at the end of the block, and not drained: what it needs may be away again by then."""
    return contextlib.closing(running)


def feed(store: Store, **queues: Any) -> None:
    """Append to queues, by name: messages, or values that become ``{"n": value}``."""
    for queue, values in queues.items():
        store.queue(queue).appender().write_many([v if isinstance(v, dict) else {"n": v} for v in values])


def run(store: Store, *processors: Any, **options: Any) -> testing.Report:
    """Run the graph ``g`` of these processors until it is idle; options of the graph, or of the run."""
    ours = ("stopped", "seed", "steps_max", "accept_topology")
    keywords = {name: options.pop(name) for name in ours if name in options}
    return testing.run_until_idle(Graph("g", list(processors), **options), store, **keywords)


def finish(graph: Graph, store: Store, crash: tuple[str, int] | None) -> None:
    """Run a graph until it is idle, and once more after the crash that the test asked for."""
    try:
        testing.run_until_idle(graph, store)
    except testing.Crashed:
        assert crash is not None
        testing.run_until_idle(graph, store)


def numbers(store: Store, queue: str) -> list[Any]:
    """The ``n`` of every message that is on a queue."""
    return [message["n"] for message in testing.messages(store, queue)]


def replace(store: Store, queue: str, messages: list[dict[str, Any]]) -> None:
    """Let a queue hold other messages under the same identity and indices, as a copy that went another way would."""
    log = store.queue(queue).core.log

    def empty(txn: Any) -> None:
        row = log.row(txn)
        log.delete_before(txn, row, row.next)
        put_row(txn, names.row_key(queue, 0), LogRow(row.identity, 1, 1, row.time_ns, row.version))

    store.core.commit(empty)
    store.queue(queue).appender().write_many(messages)
