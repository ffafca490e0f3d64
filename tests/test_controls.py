"""The negative controls: the pieces of the protocol are removed, one at a time.

Each story is told twice and judged the same way: the code as it is passes, and the code without the
piece is found wrong. A judge that passes both shows nothing.

    unfenced snapshot                       a stopped owner's snapshot puts its old row back
    unfenced commit                         a stopped owner's step is written a second time
    rewind on a missing message             a purged output is taken for a step that did not commit
    a target that keeps only the last hash  retries and stopped owners present older ones
    next index derived from the last key    an emptied queue begins again, and its readers miss what comes
    position without seal                   messages replaced by others under the same indices

Those of outputs in another store (a fork queue trimmed before the other store is synced; forwarding
before the home store is synced, with alts) are with the tests of forwarding. Controls of a whole
mechanism are with its torture test: positions in a transaction of their own in
test_kill_loop.py and test_kill_stages.py, broken stores in test_model.py, a sink that asks for
nothing in test_processors_sql.py.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_ownership
from forks import Forks
from sets import slow_except
from small import replace
from test_ownership import COUNT, everything, feed, numbers

import cues
from cues import Graph, Sink, Source, Store, Stream, testing
from cues.checkpoints import deliveries
from cues.errors import Diverged, Fenced, ProcessorStopped, StoreDamaged
from cues.processors import sql
from cues.queues.log import KEY, Log
from cues.records.log_row import put_row
from cues.records.positions import NO_SEAL, Position
from cues.steps.commit import Committer
from cues.steps.fence import Fence
from cues.steps.ownership import LEASE_S
from cues.steps.recovery import Decision, Recovery
from cues.steps.taking import Slice


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with cues.open(tmp_path / "store", durability="process", map_size=4 << 20) as store:
        yield store


def as_it_is() -> None:
    """The code as it is."""


def with_control(broken: str) -> list[Any]:
    """The parameters of a story. Compiled code does not see what is replaced in its modules, so it has no control."""
    return [
        pytest.param(False, id="as it is"),
        pytest.param(True, id=broken, marks=pytest.mark.interpreted),
    ]


# --- the fence ----------------------------------------------------------------------------------


def unfenced_commit() -> None:
    real, check = Committer.write_step, Fence.check

    def write(self: Committer, *arguments: Any) -> None:
        Fence.check = lambda self, txn: None  # type: ignore[method-assign]
        try:
            real(self, *arguments)
        finally:
            Fence.check = check  # type: ignore[method-assign]

    Committer.write_step = write  # type: ignore[method-assign]


def unfenced_snapshot() -> None:
    """The commit after it is compared, and passes: the row is the one that the snapshot put back."""

    def write(self: Committer, txn: Any, pages: Any, row: bytes) -> None:
        self.write_tries(txn, pages)
        txn.put(self.fence.key, row)

    Committer.write_snapshot = write  # type: ignore[method-assign]


def stop_broken(path: str, point: str, options: dict[str, Any], broken: str) -> str:
    """:func:`test_ownership.stop_here` in a process whose code is broken."""
    globals()[broken]()
    return test_ownership.stop_here(path, point, 3, options)


FENCES = [
    ("unfenced_commit", "commit.before", {}),
    ("unfenced_commit", "commit.before", {"side_effects": True}),
    ("unfenced_commit", "commit.before", {"kind": "sink"}),
    ("unfenced_commit", "commit.before", {"kind": "source"}),
    ("unfenced_snapshot", "take.after", {"side_effects": True}),
    ("unfenced_snapshot", "take.after", {"kind": "sink"}),
    ("unfenced_snapshot", "take.after", {"strategy": "at-most-once"}),
]


@pytest.mark.parametrize("control", [False, True], ids=["as it is", "control"])
@pytest.mark.parametrize(("broken", "point", "options"), slow_except(FENCES[3:5], FENCES, names=3), ids=str)
@pytest.mark.interpreted
def test_a_stopped_owner_continues(
    store: Store, forks: Forks, tmp_path: Path, broken: str, point: str, options: dict[str, Any], control: bool
) -> None:
    """It is stopped in its step, another takes over and does everything, and it is continued.

    The judge looks whether it has committed anything, and at the queue that it writes to.
    """
    kind = options.get("kind", "stream")
    if kind != "source":
        feed(store)
    store.close()
    path = str(tmp_path / "store")
    pid = forks.start("test_controls:stop_broken", path, point, options, broken if control else "as_it_is")
    assert forks.wait(pid).stopped
    forks.run("test_ownership:take_over", path, options)
    before = everything(path)
    forks.kill(pid, signal.SIGCONT)
    outcome = forks.wait(pid)
    assert not outcome.error, outcome.error
    assert (everything(path) != before) is control
    if kind != "sink" and options.get("strategy") is None:  # a sink and at-most-once write nothing twice here
        with cues.open(path) as again:
            history = testing.check_history(range(COUNT), numbers(again, "out" if kind == "stream" else "a"))
        assert history.exact is not control, history


# --- a missing message --------------------------------------------------------------------------


@pytest.mark.parametrize("control", with_control("control: rewind on a missing message"))
def test_what_was_read_is_purged_while_its_writer_is_down(
    store: Store, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """A stream commits and is killed; its output is read and purged; the next start must not write it again.

    A recovery that takes the missing message for a step that did not commit does the step once more.
    """
    real = Recovery.decide

    def decide(self: Recovery, txn: Any, snapshot: Any, attempt: Any, positions: Any, *rest: Any) -> Decision:
        if attempt is not None and any(
            index < store.queue(queue).core.log.row(txn).first for queue, index in attempt.indices.items()
        ):
            for tailer, index in snapshot.start.items():
                positions[tailer] = Position(positions[tailer].identity, index, NO_SEAL)
            return Decision("rewind", "the message is not there", snapshot)
        return real(self, txn, snapshot, attempt, positions, *rest)

    if control:
        monkeypatch.setattr(Recovery, "decide", decide)
    stream = Graph("g", [Stream(lambda message: message, "a", "out", id="s", batch_size=2)])
    delivered: list[int] = []
    for n in range(0, COUNT, 2):
        store.queue("a").appender().write_many([{"n": n}, {"n": n + 1}])
        with testing.crash("commit.after", how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(stream, store)
        delivered += numbers(store)
        store.queue("out").delete()
    testing.run_until_idle(stream, store)
    history = testing.check_history(range(COUNT), delivered + numbers(store))
    assert bool(history.duplicated) is control and not history.lost and not history.unexpected, history
    assert history.exact is not control


# --- a target -----------------------------------------------------------------------------------


def last_hash_only(processor: str, row: deliveries.Row | None, delivery: cues.Delivery) -> dict[str, int]:
    """Skip a delivery that has the hash of the last one, and accept every other."""
    return dict(delivery.end if row is not None and row.hash == delivery.hash else delivery.start)


ADMIT: dict[bool, Callable[..., dict[str, int]]] = {False: deliveries.admit, True: last_hash_only}


def saving(path: Path | str) -> tuple[sql.SQLite, Graph]:
    """A graph whose sink saves every message in a transaction of its own."""
    db = sql.SQLite(path, "create table if not exists numbers (n integer)")

    def save(message: Any, process: cues.Process) -> None:
        with db.transaction(process) as tx:
            tx.executemany("insert into numbers values (:n)", tx.fresh([message]))

    return db, Graph("g", [Source("a"), Sink(save, "a", batch_size=4)])


def saved(path: Path | str) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [n for (n,) in connection.execute("select n from numbers order by rowid")]


@pytest.mark.parametrize("control", with_control("control: the last hash only"))
def test_a_retry_presents_older_deliveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool) -> None:
    """Killed after each call in turn: the step is taken again from its first message, not from its last."""
    monkeypatch.setattr(deliveries, "admit", ADMIT[control])
    found = []
    for hit in range(1, COUNT + 1):
        table = tmp_path / f"{hit}.db"
        with testing.temporary_store() as store:
            feed(store)
            db, graph = saving(table)
            with testing.crash("function.after", hit, how="raise"), pytest.raises(testing.Crashed):
                testing.run_until_idle(graph, store)
            testing.run_until_idle(graph, store)
            db.close()
        found.append(testing.check_history(range(COUNT), saved(table)))
    assert not any(history.lost or history.unexpected for history in found)
    assert any(history.duplicated for history in found) is control, found
    assert all(found) is not control


def save_stopped(path: str, table: str, hit: int, control: bool) -> str:
    """Stop in front of a call of the sink; when continued, finish and say how it ended."""
    deliveries.admit = ADMIT[control]
    with cues.open(path) as store, testing.crash("function.before", hit, how="stop"):
        try:
            testing.run_until_idle(saving(table)[1], store)
        except (Fenced, ProcessorStopped) as error:
            return type(error).__name__
        return "finished"


def save_after_takeover(path: str, table: str, control: bool) -> None:
    deliveries.admit = ADMIT[control]
    with cues.open(path) as store, testing.Clock() as clock:
        clock.advance(LEASE_S + 1)
        testing.run_until_idle(saving(table)[1], store, take_over=True)


@pytest.mark.parametrize("control", with_control("control: the last hash only"))
def test_a_stopped_owner_presents_an_older_delivery(store: Store, forks: Forks, tmp_path: Path, control: bool) -> None:
    """The fence of the store comes too late for a target: the row in the target must refuse what is old."""
    feed(store)
    store.close()
    path, table = str(tmp_path / "store"), str(tmp_path / "table.db")
    pid = forks.start("test_controls:save_stopped", path, table, 3, control)
    assert forks.wait(pid).stopped
    forks.run("test_controls:save_after_takeover", path, table, control)
    assert set(saved(table)) == set(range(COUNT))
    forks.kill(pid, signal.SIGCONT)
    assert forks.wait(pid).value in ("Fenced", "ProcessorStopped")
    history = testing.check_history(range(COUNT), saved(table))
    assert bool(history.duplicated) is control and history.exact is not control, history


# --- indices ------------------------------------------------------------------------------------


@pytest.mark.damages_stores
@pytest.mark.parametrize("control", with_control("control: from the last key"))
def test_an_emptied_queue_continues_and_its_reader_misses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """A named reader has read everything, the queue is emptied, more comes: the reader must see all of that."""
    append = Log.append_plain

    def append_behind_the_last_key(log: Log, txn: Any, body: bytes, *rest: Any) -> Any:
        row = log.row(txn)
        cursor = txn.cursor(log.database)
        last = KEY.unpack(cursor.key())[0] if cursor.last() else 0
        put_row(txn, log.key, row._replace(first=min(row.first, last + 1), next=last + 1))
        return append(log, txn, body, *rest)

    if control:
        monkeypatch.setattr(Log, "append_plain", append_behind_the_last_key)
    queue = store.queue("q")
    read: list[int] = []
    for some in (range(5), range(5, 8)):
        for n in some:
            queue.appender().write({"n": n})
        try:
            read += [message["n"] for message in queue.tailer("reader")]
        except StoreDamaged:  # the position is behind the end of the queue, which is noticed
            assert control
        queue.delete()
    history = testing.check_history(range(8), read)
    assert history.exact is not control, history


# --- the seal -----------------------------------------------------------------------------------


@pytest.mark.damages_stores
@pytest.mark.parametrize("control", with_control("control: position without seal"))
def test_the_last_commits_were_taken_back_and_written_differently(
    store: Store, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """Messages 0 to 4 were processed; then the queue comes back with others in their place, and more after them.

    The position has a right identity and a right index, and is after a message that was never
    processed. Without the seal the start continues there, and the messages that differ are lost.
    """
    if control:
        monkeypatch.setattr(Slice, "seal", lambda self: NO_SEAL)
    delivered: list[int] = []
    sink = Graph("g", [Sink(lambda message: delivered.append(message["n"]), "a", id="s")])
    feed(store, 5)
    testing.run_until_idle(sink, store)
    replace(store, "a", [{"n": n} for n in [0, 1, 2, *range(100, 105)]])
    with contextlib.suppress(Diverged) if control else pytest.raises(Diverged, match="another message"):
        testing.run_until_idle(sink, store)
    # Judged is what was said to be done: refused, it is the old history; gone on with, it must be the new one.
    wanted = [0, 1, 2, *range(100, 105)] if len(delivered) > 5 else range(5)
    history = testing.check_history(wanted, delivered)
    assert history.exact is not control, history
    assert bool(history.lost) is control
