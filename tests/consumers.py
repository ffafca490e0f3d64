"""A consumer over two stores and a PostgreSQL, for tests that kill it everywhere; and what it is without each rule.

    a     "orders", which it reads; "left", which it publishes to       (durability disk)
    b     "right", which it publishes to                                (durability process)
    ledger in the database: a row for each order, in the checkpoint's transaction

Orders go to the left, to the right, to both, so that one transaction (4 and 5) writes to one store only. A
transaction takes two orders.

A life runs in a child of forks.py: :func:`live` until everything is done, or until it dies. What a power cut
takes is stood for by an older copy of b: what was there at its last sync, kept beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg  # noqa: F401  (loaded here, once for all children)
import sqlalchemy as sa
import sqlalchemy.dialects.postgresql.psycopg

import cues
from cues import testing
from cues.checkpoints import SQLCheckpoint
from cues.checkpoints.fence import RestoredFence
from cues.producers.sequencer import AckIntent, Checkpoint, Envelope
from cues.queues.store import Store
from cues.txn.consumer import Consumer, Defer
from cues.txn.publisher import Publisher
from cues.txn.reader import ReadCommitted

ORDERS = 8
SCHEMA = "create table if not exists ledger (life text, n integer)"
MAP_BYTES = 4 << 20
LEASE_S = 0.5
SLOW_S = 0.3
"""The time that a slow commit waits for a message that may not come."""


LEFT = [0, 2, 4, 6]
RIGHT = [0, 1, 3, 6, 7]


class Transfers:
    """The application: two orders a transaction."""

    def __init__(self, life: str, left: Any, right: Any) -> None:
        self._life = life
        self._left, self._right = left, right
        self._rows: list[dict[str, Any]] = []
        self.full = threading.Event()
        """The transaction has its two orders."""

    def consume(self, envelope: Envelope, publisher: Publisher) -> None:
        if len(self._rows) == 2:
            self.full.set()
            raise Defer
        n = envelope.message["n"]
        if n in LEFT:
            publisher.publish_uncommitted(lambda _: self._left, {"n": n})
        if n in RIGHT:
            publisher.publish_uncommitted(lambda _: self._right, {"n": n})
        self._rows.append({"life": self._life, "n": n})

    def finalize(self, publisher: Publisher) -> Callable[[sa.Connection], None]:
        rows, self._rows = self._rows, []
        self.full.clear()
        return lambda connection: connection.execute(sa.text("insert into ledger values (:life, :n)"), rows) and None


# --- without a rule ------------------------------------------------------------------------------


class Unfenced(SQLCheckpoint):
    """Commits under whatever fence there is, and does not hear of a takeover by its lease."""

    def set_lease(self, text: str) -> None:
        pass

    def commit(self, checkpoint: Checkpoint, work: Any = None) -> None:
        with self._begin() as connection:
            found = connection.execute(
                sa.text("select fence from cues_checkpoints where name = :name"), {"name": self.name}
            ).scalar_one()
        self._held = RestoredFence.now(found)
        super().commit(checkpoint, work)


class Hasty(Consumer):
    """Acknowledges before it commits."""

    def _commit_in_thread(self, made: Checkpoint, work: Any, intents: list[AckIntent]) -> None:
        assert self._publisher is not None
        self._publisher.append_ack_intents(intents)
        super()._commit_in_thread(made, work, [])


class Forgetful(Consumer):
    """Begins without repeating the acknowledgements of the checkpoint."""

    def _start(self) -> None:
        restore = self._checkpoint.restore

        class Without:
            def restore(self, *fence: Any) -> Checkpoint | None:
                found = restore(*fence)
                return found and Checkpoint(found.offsets, found.producers)

        real, self._checkpoint = self._checkpoint, Without()  # type: ignore[assignment]
        super()._start()
        self._checkpoint = real


class Slow(Consumer):
    """Commits only when the next transaction has all its orders: their messages are appended, or wait."""

    def _commit_in_thread(self, made: Checkpoint, work: Any, intents: list[AckIntent]) -> None:
        self._app.full.wait(SLOW_S)  # type: ignore[attr-defined]
        super()._commit_in_thread(made, work, intents)


class Still(Consumer):
    """Commits while nothing else of it writes, so that whoever stops it there stops no writer of a store."""

    def _commit_in_thread(self, made: Checkpoint, work: Any, intents: list[AckIntent]) -> None:
        self._app.full.wait(SLOW_S)  # type: ignore[attr-defined]
        assert self._publisher is not None
        for one in self._publisher.all_writers():  # what is left waits for the acknowledgements of this commit
            one.wait(lambda one=one: bool(one.acknowledged_first() or not one.left_appends()), 60, "the writer")
        super()._commit_in_thread(made, work, intents)


class Impatient(Slow):
    """Publishes the next transaction's messages in front of this one's acknowledgements."""

    def _start(self) -> None:
        super()._start()
        publisher = self._publisher
        assert publisher is not None
        build = publisher.build_ack_intents

        def building(timeout: float | None = None) -> list[AckIntent]:
            found = build(timeout)
            publisher.due.clear()
            return found

        publisher.build_ack_intents = building  # type: ignore[method-assign]


@contextlib.contextmanager
def without_sync_of(rule: str) -> Any:
    """Stores do not sync before the commit ("unsynced"), or after an acknowledgement ("unsynced acknowledgement")."""
    if not rule.startswith("unsynced"):
        yield
        return
    real = Store.sync
    building = Publisher.build_ack_intents
    before = [False]

    def build(self: Publisher, timeout: float | None = None) -> Any:
        before[0] = True
        try:
            return building(self, timeout)
        finally:
            before[0] = False

    def sync(self: Store) -> None:
        if before[0] == (rule == "unsynced acknowledgement"):
            real(self)

    Publisher.build_ack_intents = build  # type: ignore[method-assign]
    Store.sync = sync  # type: ignore[method-assign]
    yield


KINDS = {"hasty": Hasty, "forgetful": Forgetful, "slow": Slow, "impatient": Impatient}

# --- a life --------------------------------------------------------------------------------------


def prepare(place: str) -> None:
    """The stores with their queues and the orders; to be copied."""
    with opened(place) as (a, b):
        a.queue("left")
        b.queue("right")
        a.queue("orders").appender().write_many([{"n": n} for n in range(ORDERS)])
    shutil.copytree(Path(place, "b"), Path(place, "b.durable"))


@contextlib.contextmanager
def opened(place: str) -> Any:
    with (
        cues.open(Path(place, "a"), durability="disk", map_size=MAP_BYTES) as a,
        cues.open(Path(place, "b"), durability="process", map_size=MAP_BYTES) as b,
    ):
        yield a, b


def remember_syncs(place: str) -> None:
    """Keep, beside b, what of it is on the disk: what was there when a sync of it began."""
    real = Store.sync
    file = Path(place, "b.durable", "data.mdb")

    def sync(self: Store) -> None:
        if Path(self.path).name == "b":
            pieces: list[bytes] = []
            self.core.dump(pieces.append)
            file.with_suffix(".next").write_bytes(b"".join(pieces))
            os.replace(file.with_suffix(".next"), file)
        real(self)

    Store.sync = sync  # type: ignore[method-assign]


def live(place: str, url: str, life: str, rule: str = "", kind: type[Consumer] = Consumer) -> None:
    """Do what is left to do. ``rule`` names one that it lives without."""
    kind = KINDS.get(rule, kind)
    remember_syncs(place)
    with (
        opened(place) as (a, b),
        (Unfenced if rule == "unfenced" else SQLCheckpoint)(url, life, SCHEMA) as checkpoint,
        without_sync_of(rule),
    ):
        app = Transfers(life, a.queue("left"), b.queue("right"))
        with kind(app, [a.queue("orders")], checkpoint, lease_s=LEASE_S) as consumer:
            consumer.drain()


def sites(place: str, url: str, life: str) -> list[tuple[str, int]]:
    return testing.crash_sites(lambda: live(place, url, life))


def crash(place: str, url: str, life: str, rule: str, point: str, hit: int) -> None:
    with testing.crash(point, hit):
        live(place, url, life, rule)


def zombie(place: str, url: str, life: str, rule: str, point: str, hit: int) -> str:
    """Stop at the point until another process continues it; return the outcome."""
    try:
        with testing.crash(point, hit, how="stop"):
            live(place, url, life, rule, Still)
    except BaseException as error:
        return type(error).__name__
    return "finished"


def lose_power(place: str) -> None:
    """Remove the part of b that was not synced."""
    shutil.copy(Path(place, "b.durable", "data.mdb"), Path(place, "b", "data.mdb"))
    for left in ("lock.mdb", "open"):
        Path(place, "b", left).unlink(missing_ok=True)


def committed(place: str) -> tuple[list[int], list[int]]:
    """The committed messages on the left and on the right."""
    with opened(place) as (a, b):
        assert not a.check() and not b.check()
        left, right = (
            [envelope.message["n"] for envelope in ReadCommitted(queue) if not envelope.acknowledgement]
            for queue in (a.queue("left"), b.queue("right"))
        )
    return left, right
