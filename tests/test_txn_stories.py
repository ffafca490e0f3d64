"""Stories of Gazette about the end of a transaction: intents half written, and an output store that is away."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.errors import StoreNotFound
from cues.txn import Consumer, ReadCommitted
from cues.txn.publisher import Publisher


class Both:
    """Publishes each message to two queues of different stores."""

    def __init__(self, *targets: Any) -> None:
        self._targets = targets

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        for target in self._targets:
            publisher.publish_uncommitted(lambda _, target=target: target, {"n": envelope.message["n"]})

    def finalize(self, publisher: Publisher) -> None:
        return None


def live(place: str, written: int | None = None) -> None:
    """Copy what is left. With ``written``: die after so many acknowledgements of the first transaction."""
    real = Publisher.append_ack_intents

    def append(self: Publisher, intents: Any, *rest: Any) -> Any:
        if written is not None and intents:
            real(self, list(intents)[:written])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, intents, *rest)

    Publisher.append_ack_intents = append  # type: ignore[method-assign]
    with cues.open(Path(place, "a"), "process") as a, cues.open(Path(place, "b"), "process") as b:
        app = Both(a.queue("left"), b.queue("right"))
        with Consumer(app, [a.queue("in")], JSONFileCheckpoint(Path(place, "c.json")), lease_s=0) as consumer:
            consumer.drain()


def prepared(place: Path) -> str:
    with cues.open(place / "a", "process") as a, cues.open(place / "b", "process") as b:
        a.queue("left")
        b.queue("right")
        a.queue("in").appender().write_many([{"n": n} for n in range(4)])
    return str(place)


def outputs(place: str) -> list[list[int]]:
    with cues.open(Path(place, "a"), "process") as a, cues.open(Path(place, "b"), "process") as b:
        return [
            [envelope.message["n"] for envelope in ReadCommitted(queue) if not envelope.acknowledgement]
            for queue in (a.queue("left"), b.queue("right"))
        ]


@pytest.mark.slow
@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_successor_completes_intents_that_are_half_written(written: int, forks: Forks, tmp_path: Path) -> None:
    """The checkpoint is committed, some of the two acknowledgements are appended, and the process dies."""
    place = prepared(tmp_path)
    assert forks.run("test_txn_stories:live", place, written).killed
    assert sorted(map(len, outputs(place))) == [4 * (written == 2), 4 * (written > 0)]
    forks.run("test_txn_stories:live", place)
    assert outputs(place) == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
def test_a_transaction_whose_output_store_is_away_is_completed_when_it_is_back(forks: Forks, tmp_path: Path) -> None:
    """A start without the store fails by name and loses nothing, also if it is repeated."""
    place = prepared(tmp_path)
    assert forks.run("test_txn_stories:live", place, 0).killed
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    for _ in range(2):
        with cues.open(tmp_path / "a", "process") as a:
            app = Both(a.queue("left"))
            consumer = Consumer(app, [a.queue("in")], JSONFileCheckpoint(tmp_path / "c.json"), lease_s=0)
            with consumer, pytest.raises(StoreNotFound):
                consumer.drain()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    forks.run("test_txn_stories:live", place)
    assert outputs(place) == [[0, 1, 2, 3]] * 2
