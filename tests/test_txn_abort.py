"""A consumer whose application aborts a transaction; and the options that it passes to its reader and publisher."""

from __future__ import annotations

import signal
import threading
import uuid as uuids
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from children import Child

import cues
from cues import faults
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint
from cues.errors import CheckpointError, InvalidArgument
from cues.queues.store import Store
from cues.txn import ZERO_UUID, Abort, Clock, Consumer, Defer, MessageType, Publisher, ReadUncommitted

COUNT = 12


class Restless:
    """Publishes each number to one of three queues, five a transaction; aborts at chosen numbers, once each."""

    def __init__(self, store: Store, aborts: set[Any], inside: bool) -> None:
        self._outs = [store.queue(f"out-{n}") for n in range(3)]
        self._aborts = set(aborts)
        self._inside = inside
        self._now: list[int] = []
        self.aborted: list[list[int]] = []

    def consume(self, envelope: Any, publisher: Any, *writes: Any) -> None:
        n = envelope.message["n"]
        if len(self._now) == 5:
            raise Defer
        self._now.append(n)
        publisher.publish_uncommitted(lambda _: self._outs[n % 3], {"n": n})
        if writes:
            writes[0].setdefault("seen", []).append(n)
        self._may_abort(n)

    def finalize(self, publisher: Any) -> Any:
        publisher.flush()
        self._may_abort(("end", self._now[-1]))
        numbers, self._now = self._now, []
        return None if self._inside else lambda state: state.setdefault("seen", []).extend(numbers)

    def finish(self, commit: Any) -> None:
        if commit.done() and isinstance(commit.exception(), Abort):
            self.aborted.append(self._now)
            self._now = []

    def _may_abort(self, at: Any) -> None:
        if at in self._aborts:
            self._aborts.remove(at)
            raise Abort


ABORTS = {0, 3, 7, ("end", 9), COUNT - 1}


def live(store: Store, path: Path, inside: bool = False) -> Restless:
    app = Restless(store, ABORTS, inside)
    with Consumer(app, [store.queue("in")], JSONFileCheckpoint(path), inside=inside) as consumer:
        consumer.drain()
    return app


def expect_all(store: Store, path: Path) -> None:
    """Each number once, in order, in its queue and in the state; and nothing is pending anywhere."""
    assert JSONFileCheckpoint(path)._read()["state"] == {"seen": list(range(COUNT))}  # type: ignore[index]
    for n in range(3):
        queue = store.queue(f"out-{n}")
        committed = [message["n"] for message in queue.tailer(isolation="committed")]
        assert committed == list(range(n, COUNT, 3))
        assert list(ReadUncommitted(queue))[-1].acknowledgement  # what was dropped is settled too


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(COUNT)])
        yield store


@pytest.mark.parametrize("inside", [False, True])
def test_an_aborted_transaction_leaves_nothing_and_is_taken_again(store: Store, tmp_path: Path, inside: bool) -> None:
    """In its first message, in the middle, at its end, and while the last transaction is being committed."""
    app = live(store, tmp_path / "c.json", inside)
    assert len(app.aborted) == len(ABORTS) and not app._aborts
    expect_all(store, tmp_path / "c.json")


def test_an_abort_in_a_store_keeps_the_state_of_the_last_commit(store: Store) -> None:
    class Sums:
        def __init__(self) -> None:
            self.aborts = 0

        def consume(self, envelope: Any, publisher: Any, writes: Any) -> None:
            writes.state["sum"] = writes.state.get("sum", 0) + envelope.message["n"]
            writes.append(store.queue("log"), [envelope.message])
            if envelope.message["n"] == 5 and self.aborts < 3:
                self.aborts += 1
                raise Abort

        def finalize(self, publisher: Any) -> None:
            return None

    checkpoint = LMDBCheckpoint(store, "sums")
    with Consumer(Sums(), [store.queue("in")], checkpoint, inside=True) as consumer:
        consumer.drain()
    assert checkpoint.state == {"sum": sum(range(COUNT))} and len(store.queue("log")) == COUNT


RUNS = """
import sys, cues
from pathlib import Path
from test_txn_abort import live
with cues.open(sys.argv[1]) as store:
    live(store, Path(sys.argv[2]), sys.argv[3] == "True")
"""


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("point", [*faults.ABORT_POINTS, "consumer.before", "consumer.committed"])
def test_death_around_an_abort(store: Store, tmp_path: Path, inside: bool, point: str) -> None:
    for hit in (1, 2):
        with Child(RUNS, store.path, tmp_path / "c.json", inside, CUES_FAULT=f"{point}:{hit}") as child:
            assert child.returncode() == -signal.SIGKILL
    live(store, tmp_path / "c.json", inside)
    expect_all(store, tmp_path / "c.json")


class Fails:
    """Publishes to two queues that no checkpoint has named, and fails."""

    def __init__(self, store: Store, error: BaseException) -> None:
        self._outs = [store.queue("out-0"), store.queue("out-1")]
        self._error = error

    def consume(self, envelope: Any, publisher: Any) -> None:
        for out in self._outs:
            publisher.publish_uncommitted(lambda _, out=out: out, envelope.message)
        publisher.flush()
        raise self._error

    def finalize(self, publisher: Any) -> None:
        return None


def pending(store: Store) -> list[bool]:
    return [not list(ReadUncommitted(store.queue(f"out-{n}")))[-1].acknowledgement for n in range(2)]


def test_an_instance_that_fails_drops_what_it_published_on_every_queue(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Consumer(
            Fails(store, ZeroDivisionError()), [store.queue("in")], JSONFileCheckpoint(tmp_path / "c.json")
        ).drain()
    assert pending(store) == [False, False]


@pytest.mark.parametrize("inside", [False, True])
def test_messages_of_a_commit_whose_outcome_is_unknown_are_not_dropped(
    store: Store, tmp_path: Path, inside: bool
) -> None:
    """The checkpoint is committed, but the instance is told that it failed. Its successor acknowledges."""

    class Lying(JSONFileCheckpoint):
        def commit(self, checkpoint: Any, work: Any = None) -> None:
            super().commit(checkpoint, work)
            raise CheckpointError("The answer was lost.", where="")

    app = Restless(store, set(), inside)
    with pytest.raises(CheckpointError):
        Consumer(app, [store.queue("in")], Lying(tmp_path / "c.json"), inside=inside).drain()
    app = Restless(store, set(), inside)
    with Consumer(app, [store.queue("in")], JSONFileCheckpoint(tmp_path / "c.json"), inside=inside) as consumer:
        consumer.drain()
    expect_all(store, tmp_path / "c.json")


def test_a_signal_handler_that_raises_after_a_commit_began_drops_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is under way, and the thread that began it does not know of it."""
    dropped = threading.Event()
    abort = Publisher.abort

    def aborting(publisher: Publisher, timeout: float | None = None) -> None:
        abort(publisher, timeout)
        dropped.set()

    class Slow(JSONFileCheckpoint):
        def commit(self, checkpoint: Any, work: Any = None) -> None:
            dropped.wait(0.2)
            super().commit(checkpoint, work)

    submit = ThreadPoolExecutor.submit

    def interrupted(*arguments: Any, **options: Any) -> Any:
        submit(*arguments, **options)
        raise TimeoutError

    monkeypatch.setattr(Publisher, "abort", aborting)
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(ThreadPoolExecutor, "submit", interrupted)
        Consumer(Restless(store, set(), False), [store.queue("in")], Slow(tmp_path / "c.json")).drain()
    live(store, tmp_path / "c.json")
    expect_all(store, tmp_path / "c.json")


@dataclass
class Order:
    """A message that is not a dict."""

    n: int
    uuid: uuids.UUID | None = field(default=None, compare=False)


ORDERS = MessageType(
    get_uuid=lambda order: order.uuid,
    set_uuid=lambda order, uuid: setattr(order, "uuid", uuid),
    new_acknowledgement=lambda journal: Order(-1),
    new=lambda fields: Order(fields["n"]),
    fields=lambda order: {"n": order.n},
)


class Doubles:
    """Publishes twice the number."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.seen: list[Any] = []

    def consume(self, envelope: Any, publisher: Any) -> None:
        self.seen.append(envelope.message)
        publisher.publish_uncommitted(lambda _: self._target, Order(2 * envelope.message.n))

    def finalize(self, publisher: Any) -> None:
        return None


def test_messages_have_the_type_the_check_and_the_clock_of_the_consumer(store: Store, tmp_path: Path) -> None:
    target, clock = store.queue("doubles"), Clock()
    clock.update(10**18)
    app = Doubles(target)
    options: dict[str, Any] = {"message_type": ORDERS, "clock": clock}
    with Consumer(app, [store.queue("in")], JSONFileCheckpoint(tmp_path / "c.json"), **options) as consumer:
        consumer.drain()
    assert app.seen == [Order(n) for n in range(COUNT)] and app.seen[0].uuid in (None, ZERO_UUID)
    assert [m["n"] for m in target.tailer(isolation="committed")] == [2 * n for n in range(COUNT)]
    first = next(ReadUncommitted(target))
    assert first.clock >> 4 == 10**18 // 100 + 0x01B21DD213814000 + 10  # the first tick

    def small(order: Order) -> None:
        if order.n > 4:
            raise OverflowError(order.n)

    app = Doubles(target)
    with pytest.raises(OverflowError):
        Consumer(
            app, [store.queue("in")], JSONFileCheckpoint(tmp_path / "d.json"), validate=small, message_type=ORDERS
        ).drain()
    for wrong in ({"clock": 5}, {"validate": 5}, {"message_type": dict}):
        with pytest.raises(InvalidArgument):
            Consumer(app, [store.queue("in")], JSONFileCheckpoint(tmp_path / "d.json"), **wrong)  # type: ignore[arg-type]
