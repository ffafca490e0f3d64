"""Measurements of a store from outside: lag, rates, failures, owner."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from terminal import cues as command

import cues
from cues import testing
from cues.engine import record
from cues.tools import metrics


def test_the_rate_of_a_queue_is_over_ten_seconds_or_since_it_began(tmp_path: Path) -> None:
    with testing.Clock(datetime(2026, 1, 31, tzinfo=UTC)) as clock, cues.open(tmp_path / "s") as store:
        appender = store.queue("q").appender()
        assert metrics.of_queue(store, "q").rate == 0
        assert metrics.of_queue(store, "q").appended is None
        appender.write({})
        assert metrics.of_queue(store, "q").rate == 1  # not a million, although it came just now
        for _ in range(20):
            clock.advance(1)
            appender.write_many([{}] * 3)
        found = metrics.of_queue(store, "q")
        assert found.rate == pytest.approx(3, rel=0.15)
        assert (found.messages, found.first, found.last) == (61, 1, 61)
        assert found.appended == clock.now
        clock.advance(11)
        assert metrics.of_queue(store, "q").rate == 0


def test_lag_failures_and_owner(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", durability="process", errors="errors")
    graph.source("orders")

    @graph.stream("orders", "priced")
    def price(order: dict[str, int]) -> dict[str, int]:
        return {"total": 10 // order["n"]}

    began = time.monotonic()
    with graph.start() as running:
        running.store.queue("orders").appender().write_many([{"n": n} for n in (1, 0, 2, 0)])
        assert running.wait_idle(timeout=60)
        (found,) = metrics.of_processors(running.store)
        passed_s = time.monotonic() - began
        assert found.owner is not None
        assert found.owner.pid == os.getpid()
        assert found.owner.lease_s > 0
        assert (found.lag, found.errors) == (0, 2)
        assert found.rate is not None
        assert 4 / max(1.0, passed_s) <= found.rate <= 4  # over the time since the first step, and at least a second
        assert found.last_error is not None
        assert (found.last_error.queue, found.last_error.index) == ("errors", 2)
        assert found.last_error.type == "ZeroDivisionError"
    with cues.open(tmp_path / "s") as store:
        store.queue("orders").appender().write_many([{"n": 1}] * 5)
        (found,) = metrics.of_processors(store)
        assert found.owner is None
        assert found.lag == 5


def test_a_step_with_side_effects_is_counted_once(tmp_path: Path) -> None:
    """It writes its snapshot twice: before the function runs, and with the attempt."""
    graph = cues.Graph("g", store=tmp_path / "s", durability="process")

    @graph.source("n", resume="skip")
    def n():  # type: ignore[no-untyped-def]
        yield from ({"n": i} for i in range(100))

    @graph.sink("n", batch_size=10)
    def take(message: dict[str, int]) -> None: ...

    graph.run()
    with cues.open(tmp_path / "s", readonly=True) as store:
        found = {p.processor: p for p in metrics.of_processors(store)}
        assert 0 < (found["g.take"].rate or 0) <= 100
        assert found["g.n"].rate is None


def test_status_says_why_a_processor_stopped_last_and_whether_it_was_started_again(tmp_path: Path) -> None:
    """Also when nothing runs any more, and without workers."""
    divisors = [0]

    def fails(message: dict[str, Any]) -> dict[str, Any]:
        return {"n": 1 // divisors[0]}

    path = str(tmp_path / "store")
    graph = cues.Graph("g", [cues.Stream(fails, "in", "out", id="p")], source="in", durability="process", store=path)
    running = graph.start()
    running.send({"n": 0})
    with pytest.raises(cues.ProcessorStopped):
        running.wait_idle(60)
    running.close()
    shown = command("status", path, "--table").out
    assert "g.p stopped, " in shown and "ZeroDivisionError" in shown and "; not started again" in shown
    record.keep_stop(path, "g", "g.p", "stopped: ZeroDivisionError: all that it did is committed.")
    assert "all that it did is committed; not started again" in command("status", path, "--table").out
    divisors[0] = 1
    graph.start().close()
    again = command("status", path, "--table").out
    assert "ZeroDivisionError" in again and "; started again " in again and "not started again" not in again
    store, processor = map(json.loads, command("status", path, "--json").out.splitlines())
    assert processor["last_stop"]["restarted"] > processor["last_stop"]["time"]
    assert "ZeroDivisionError" in store["workers"]["g"]["stopped"]["g.p"]["text"]
