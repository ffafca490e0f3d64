"""A store that is called in the middle of a call of the same thread, as by a signal handler or a __del__.

It is refused with an error, and does not wait without end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.errors import ConcurrentUse

NESTED: dict[str, Callable[[cues.Store], Any]] = {
    "write": lambda store: store.queue("q").appender().write({"n": 2}),
    "close": lambda store: store.close(),
    "queue": lambda store: store.queue("new"),
    "purge": lambda store: store.queue("q").purge(before=2),
    "named tailer": lambda store: next(iter(store.queue("q").tailer("reader"))),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("nested", NESTED)
def test_a_call_in_the_middle_of_a_commit_is_refused_and_the_commit_is_made(
    nested: str, durability: str, tmp_path: Path
) -> None:
    refused: list[ConcurrentUse] = []
    with cues.open(tmp_path / "s", durability=durability) as store:
        queue = store.queue("q")
        queue.appender().write({"n": 1})

        def work(txn: Any) -> str:
            txn.put(b"\0test", b"written")
            with pytest.raises(ConcurrentUse, match="signal handler") as caught:
                NESTED[nested](store)
            refused.append(caught.value)
            return "done"

        assert store.core.commit(work) == "done"
        assert len(refused) == 1
        with store.core.view() as txn:
            assert txn.get(b"\0test") == b"written"
        assert queue.last_index == 1
        NESTED[nested](store)  # afterwards it works


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_handlers_that_write_at_any_moment_lose_and_double_nothing(durability: str, tmp_path: Path) -> None:
    """The alarm comes 300 times, also inside of commits; what was not refused is there once."""
    written: list[int] = []

    def handle(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        number = alarms  # another alarm may come in this handler
        try:
            others.write({"handler": number})
            written.append(number)
        except ConcurrentUse:
            pass

    alarms = own = 0
    with cues.open(tmp_path / "s", durability=durability) as store:
        queue = store.queue("q")
        appender, others = queue.appender(), queue.appender()
        before = signal.signal(signal.SIGVTALRM, handle)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
        try:
            while alarms < 300:
                appender.write({"own": own})
                own += 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        found = list(queue.tailer())
    assert [message["own"] for message in found if "own" in message] == list(range(own))
    assert sorted(message["handler"] for message in found if "handler" in message) == sorted(written)


def test_threads_still_wait_for_one_another(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        appender = store.queue("q").appender()
        inside, go = threading.Event(), threading.Event()

        def work(txn: Any) -> None:
            inside.set()
            assert go.wait(30)

        first = threading.Thread(target=store.core.commit, args=(work,))
        first.start()
        assert inside.wait(30)
        second = threading.Thread(target=appender.write, args=({"n": 1},))
        second.start()
        go.set()
        first.join(30)
        second.join(30)
        assert store.queue("q").last_index == 1
