"""A consumer that works inside the transaction of its checkpoint: it reads a row, and then decides what to publish."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child
from sqlalchemy import text

import cues
from cues import faults
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint
from cues.errors import Fenced, InvalidArgument
from cues.queues.store import Store
from cues.txn import Checkpoint, Consumer, Defer

IDS = 12
SCHEMA = "create table if not exists seen (id integer primary key)"


class Firsts:
    """Publishes the first order of each id, which it knows from the rows; three orders a transaction."""

    def __init__(self, target: Any, fail_at: int | None = None) -> None:
        self._target = target
        self._fail_at = fail_at
        self._count = 0

    def consume(self, envelope: Any, publisher: Any, writes: Any) -> None:
        if self._count == 3:
            raise Defer
        self._count += 1
        id = envelope.message["id"]
        if not self._known(id, writes):
            publisher.publish_uncommitted(lambda _: self._target, {"id": id})
        if id == self._fail_at:
            raise ZeroDivisionError

    def _known(self, id: int, writes: Any) -> bool:
        if hasattr(writes, "execute"):
            known = writes.execute(text("select 1 from seen where id = :id"), {"id": id}).first() is not None
            if not known:
                writes.execute(text("insert into seen values (:id)"), {"id": id})
            return known
        state = getattr(writes, "state", writes)
        known = str(id) in state
        state[str(id)] = True
        return known

    def finalize(self, publisher: Any) -> None:
        self._count = 0


def orders(store: Store) -> None:
    """Each id twice, mostly in different transactions."""
    store.queue("orders").appender().write_many([{"id": n // 2} for n in range(IDS)] + [{"id": n} for n in range(IDS)])


def firsts(store: Store) -> list[int]:
    return [message["id"] for message in store.queue("firsts").tailer(isolation="committed")]


def checkpoint_of(kind: str, place: Any, store: Store) -> Any:
    if kind == "json":
        return JSONFileCheckpoint(Path(place, "c.json"))
    return LMDBCheckpoint(store, "c") if kind == "lmdb" else SQLCheckpoint(Path(place, "c.db"), "c", SCHEMA)


@pytest.fixture(params=["json", "lmdb", "sql"])
def make(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> Callable[[], Any]:
    return lambda: checkpoint_of(request.param, tmp_path, store)


def drain(store: Store, checkpoint: Any, **options: Any) -> None:
    app = Firsts(store.queue("firsts"), **options)
    with Consumer(app, [store.queue("orders")], checkpoint, inside=True) as consumer:
        consumer.drain()


def test_what_is_published_depends_on_the_rows_also_of_the_same_transaction(
    make: Callable[[], Any], store: Store
) -> None:
    orders(store)
    drain(store, make())
    assert firsts(store) == list(range(IDS))


def test_an_error_rolls_the_rows_back_and_a_successor_decides_again(make: Callable[[], Any], store: Store) -> None:
    orders(store)
    checkpoint = make()
    with pytest.raises(ZeroDivisionError):
        drain(store, checkpoint, fail_at=4)
    assert firsts(store) == [0, 1, 2, 3, 4][: len(firsts(store))] and 4 not in firsts(store)
    drain(store, checkpoint)
    assert firsts(store) == list(range(IDS))


def test_a_begun_commit_is_fenced_committed_or_rolled_back(make: Callable[[], Any]) -> None:
    old, new = make(), make()
    with pytest.raises(cues.CuesError, match=r"restore\(\) first"):
        old.begin()
    old.restore()
    opened = old.begin()
    opened.roll_back()
    opened.roll_back()
    old.begin().commit(Checkpoint({"j": 1}))
    new.restore()
    with pytest.raises(Fenced):
        old.begin()
    assert new.read() == Checkpoint({"j": 1})


def test_a_takeover_between_reading_and_the_commit_is_refused(tmp_path: Path, store: Store) -> None:
    """For a file and a store, which hold no lock meanwhile; a database makes the successor wait."""
    for kind in ("json", "lmdb"):
        old, new = (checkpoint_of(kind, tmp_path, store) for _ in range(2))
        old.restore()
        opened = old.begin()
        new.restore()
        with pytest.raises(Fenced):
            opened.commit(Checkpoint({"j": 1}))
        assert new.read() is None


def test_a_function_that_ends_the_transaction_itself_is_refused(tmp_path: Path, store: Store) -> None:
    orders(store)

    class Commits(Firsts):
        def consume(self, envelope: Any, publisher: Any, writes: Any) -> None:
            super().consume(envelope, publisher, writes)
            writes.commit()

    checkpoint = checkpoint_of("sql", tmp_path, store)
    with (
        pytest.raises(Exception, match="transaction"),
        Consumer(Commits(store.queue("firsts")), [store.queue("orders")], checkpoint, inside=True) as consumer,
    ):
        consumer.drain()
    assert firsts(store) == [] and checkpoint.read() is None


def test_a_checkpoint_that_cannot_begin_is_refused(store: Store) -> None:
    class Plain:
        def restore(self) -> None: ...
        def commit(self, checkpoint: Any, work: Any = None) -> None: ...

    with pytest.raises(InvalidArgument, match="has no begin"):
        Consumer(Firsts(None), [store.queue("orders")], Plain(), inside=True)  # type: ignore[arg-type]


RUNS = """
import sys, cues
from test_txn_inside import checkpoint_of, drain
with cues.open(sys.argv[1]) as store:
    drain(store, checkpoint_of(sys.argv[2], sys.argv[3], store))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "lmdb", "sql"])
@pytest.mark.parametrize("point", [*faults.CHECKPOINT_POINTS, *faults.CONSUMER_POINTS, "publish.after"])
def test_death_at_every_point(point: str, kind: str, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        orders(store)
    for hit in (1, 2):
        with Child(RUNS, tmp_path / "store", kind, tmp_path, CUES_FAULT=f"{point}:{hit}") as child:
            died = child.returncode() == -signal.SIGKILL
            at_start = ("checkpoint.restored", "consumer.restored", "consumer.repeated", "consumer.dropped")
            assert died or (hit == 2 and point in at_start)
    with cues.open(tmp_path / "store") as store:
        drain(store, checkpoint_of(kind, tmp_path, store))
        assert firsts(store) == list(range(IDS))
        assert not store.check()
