"""Retention: what leaves the front by itself, and what stays whatever the policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import Graph, Sink, retention, testing

HOUR = timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[cues.Store]:
    retention._said.clear()
    with cues.open(tmp_path / "store", durability="process") as store:
        yield store


def numbers(queue: cues.Queue) -> list[Any]:
    return [message["n"] for message in queue.tailer()]


@pytest.mark.parametrize("age", ["2h", 7200, HOUR * 2], ids=repr)
def test_by_age_what_is_older_goes_at_the_next_append(store: cues.Store, age: Any) -> None:
    queue = store.queue("q", retention=cues.Retention(age=age))
    appender = queue.appender()
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for n in range(6):
            appender.write({"n": n})
            clock.advance(HOUR)
        # The last look was at 5:00, when what was written before 3:00 went.
        assert numbers(queue) == [3, 4, 5]
        clock.advance(HOUR * 100)
        assert numbers(queue) == [3, 4, 5]
        appender.write({"n": 6})
        assert numbers(queue) == [6] and queue.first_index == 7


def test_by_bytes_the_file_stays_bounded(store: cues.Store) -> None:
    """Twenty times the bound passes; what stays is about the bound, and the newest."""
    queue = store.queue("q", retention="400KB")
    appender = queue.appender()
    for start in range(0, 40_000, 500):
        appender.write_many([{"n": n, "text": "x" * 180} for n in range(start, start + 500)])
    kept = numbers(queue)
    assert kept == list(range(kept[0], 40_000))
    assert 1_000 <= len(kept) <= 2_500
    assert store.info()["used"] < 4 * 400_000


def test_by_reading_waits_for_every_known_reader(store: cues.Store) -> None:
    """A processor and a named tailer read at their own pace; what both have read goes."""
    queue = store.queue("q", retention="read")
    appender = queue.appender()
    for n in range(10):
        appender.write({"n": n})
    assert len(queue) == 10, "nobody is known to read it"
    slow = queue.tailer("slow")
    slow.read_many(4)
    appender.write({"n": 10})
    assert queue.first_index == 5
    testing.run_until_idle(Graph("g", [Sink(lambda m: None, "q", id="s")]), store)
    appender.write({"n": 11})
    assert queue.first_index == 5, "the tailer is behind"
    slow.read_many(100)
    appender.write({"n": 12})
    assert queue.first_index == 12, "the processor has not read 12"


def test_a_policy_that_passes_a_reader_says_so_once(store: cues.Store, caplog: pytest.LogCaptureFixture) -> None:
    queue = store.queue("q", retention=5)
    queue.tailer("slow").to_index(1)
    with caplog.at_level(logging.WARNING, "cues"):
        for n in range(20):
            queue.appender().write({"n": n})
    assert numbers(queue) == [15, 16, 17, 18, 19]
    assert [r.getMessage() for r in caplog.records] == ["retention of q lets go of messages that slow has not read"]


@pytest.mark.parametrize("policy", [3, "1s", "8KB"])
def test_what_a_pending_step_took_stays_and_it_is_said(
    store: cues.Store, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """A sink dies in its function: the messages of its snapshot stay until it has taken them again."""
    queue = store.queue("q", retention=policy)
    seen: list[int] = []
    sink = Sink(lambda m: seen.append(m["n"]), "q", id="s", batch_size=2)
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        queue.appender().write_many([{"n": n} for n in range(2)])
        with testing.crash("function.after", 2, how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(Graph("g", [sink]), store)
        with caplog.at_level(logging.WARNING, "cues"):
            for n in range(2, 60):
                clock.advance(timedelta(seconds=5))
                queue.appender().write({"n": n, "text": "x" * 500})
        assert queue.first_index == 1
        assert "waits for a step of g.s" in caplog.text
        seen.clear()
        testing.run_until_idle(Graph("g", [sink]), store)
        assert seen == list(range(60))
        clock.advance(timedelta(seconds=5))
        queue.appender().write({"n": 60, "text": "x" * 500})
        assert queue.first_index > 2


def test_the_policy_survives_reopening_and_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with cues.open(path) as store:
        store.queue("q", retention="10d")
    with cues.open(path) as store:
        assert store.queue("q").options.retention == cues.Retention(age=864_000)
        store.queue("q", retention=cues.Retention(bytes="2GiB", read=True))
        assert store.queue("q").options.retention == cues.Retention(bytes=2 << 30, read=True)
