"""Checkpoints in a database of the user: the fence, the user's writes in the same transaction, and zombies.

What holds for each kind is asked of each kind. ``Kept`` gives a checkpoint, what its commits write for the user, and
what an outsider finds of that.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from children import Child, run
from sets import slow_except

import cues
from cues import testing
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint, packing
from cues.producers.sequencer import AckIntent, Checkpoint, ProducerState
from cues.records.identity import ProducerID

SCHEMA = "create table if not exists written (n integer)"
KINDS = ["sqlite", "postgresql", "file", "store"]


def at(n: int) -> Checkpoint:
    """A checkpoint whose position is ``n``."""
    producer = ProducerState("q@s", ProducerID(b"\x01\x02\x03\x04\x05\x06"), n, n - 1)
    return Checkpoint({"q@s": n, "a": 1 << 62}, (producer,), (AckIntent("out", bytes(range(n % 256))),))


class Kept:
    """One kind of checkpoint, made as often as asked over the same place."""

    def __init__(self, kind: str, place: str) -> None:
        self.kind = kind
        self.place = place
        self._opened: list[Any] = []

    def make(self, **options: Any) -> Any:
        found: Any
        if self.kind == "store":
            store = cues.open(self.place)
            self._opened.append(store)
            found = LMDBCheckpoint(store, "name")
        elif self.kind == "file":
            found = JSONFileCheckpoint(self.place, **options)
        else:
            found = SQLCheckpoint(self.place, "name", SCHEMA, **options)
        self._opened.append(found)
        return found

    def work(self, n: int) -> Callable[[Any], None]:
        """The user's write of one number."""

        def work(transaction: Any) -> None:
            if self.kind == "store":
                transaction.state["count"] = transaction.state.get("count", 0) + 1
                transaction.append(self._opened[0].queue("written"), [{"n": n}])
            elif self.kind == "file":
                transaction.setdefault("written", []).append(n)
            else:
                transaction.execute(sa.text("insert into written values (:n)"), {"n": n})

        return work

    def written(self) -> list[int]:
        """The results of the user's writes, read by another connection."""
        if self.kind == "store":
            with cues.open(self.place) as store:
                return [message["n"] for message in store.queue("written").tailer()]
        if self.kind == "file":
            state = json.loads(Path(self.place).read_text())["state"]
            return state.get("written", [])  # type: ignore[no-any-return]
        engine = sa.create_engine(self.place if "://" in self.place else f"sqlite:///{self.place}")
        with engine.connect() as connection:
            found = [n for (n,) in connection.execute(sa.text("select n from written"))]
        engine.dispose()
        return found

    def close(self) -> None:
        for one in reversed(self._opened):
            one.close()


def kept_at(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Kept:
    if kind == "postgresql":
        return Kept(kind, request.getfixturevalue("postgres").database())
    return Kept(kind, str(tmp_path / "deep" / "place"))


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    found = kept_at(request.param, tmp_path, request)
    yield found
    found.close()


# --- what holds for each kind -------------------------------------------------------------------


def test_a_commit_is_restored_whole_and_replaces_the_last(kept: Kept) -> None:
    first = kept.make()
    assert first.restore() is None
    first.commit(at(7), kept.work(1))
    first.commit(at(300), kept.work(2))
    first.commit(at(5))
    assert kept.make().restore() == at(5)
    assert kept.written() == [1, 2]


def test_an_earlier_owner_is_refused_and_writes_nothing(kept: Kept) -> None:
    old, new = kept.make(), kept.make()
    old.restore()
    old.commit(at(1), kept.work(1))
    assert new.restore() == at(1)
    for _ in range(2):
        with pytest.raises(cues.Fenced) as error:
            old.commit(at(2), kept.work(2))
        assert error.value.reason == "takeover" and "Try:" in str(error.value)
    new.commit(at(3), kept.work(3))
    assert kept.make().restore() == at(3)
    assert kept.written() == [1, 3]


def test_an_earlier_owner_without_a_commit_is_refused_as_well(kept: Kept) -> None:
    """Both find no checkpoint; the fence alone tells them apart."""
    old, new = kept.make(), kept.make()
    assert old.restore() is None and new.restore() is None
    with pytest.raises(cues.Fenced):
        old.commit(at(1), kept.work(1))
    new.commit(at(2), kept.work(2))
    assert kept.written() == [2]


def test_work_that_raises_leaves_neither_checkpoint_nor_writes(kept: Kept) -> None:
    checkpoint = kept.make()
    checkpoint.restore()
    checkpoint.commit(at(1), kept.work(1))

    def work(transaction: Any) -> None:
        kept.work(2)(transaction)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint.commit(at(2), work)
    checkpoint.commit(at(3), kept.work(3))  # and it is usable
    assert kept.written() == [1, 3]
    assert kept.make().restore() == at(3)


def test_a_commit_before_a_restore_is_refused(kept: Kept) -> None:
    with pytest.raises(cues.CuesError, match=r"restore\(\) first"):
        kept.make().commit(at(1))


def test_a_forked_child_is_refused_before_it_does_harm(kept: Kept) -> None:
    checkpoint = kept.make()
    checkpoint.restore()
    checkpoint.commit(at(1), kept.work(1))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = "nothing"
        try:
            checkpoint.commit(at(2), kept.work(2))
        except BaseException as error:
            told = type(error).__name__
        os.write(writer, told.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"Forked"
    os.close(reader)
    os.close(writer)
    checkpoint.commit(at(3), kept.work(3))
    assert kept.written() == [1, 3]


def test_a_race_of_restores_leaves_one_owner(kept: Kept) -> None:
    """Eight restore at once, some of them before there is a place at all; then each commits. One may."""
    checkpoints = [kept.make() for _ in range(8)]
    refused: list[Any] = []
    start = threading.Barrier(8)

    def own(checkpoint: Any, n: int) -> None:
        start.wait()
        checkpoint.restore()
        start.wait()
        try:
            checkpoint.commit(at(n), kept.work(n))
        except cues.Fenced:
            refused.append(n)

    threads = [threading.Thread(target=own, args=(checkpoint, n)) for n, checkpoint in enumerate(checkpoints)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    (left,) = set(range(8)) - set(refused)
    assert kept.written() == [left]


# --- crashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_in_a_commit_leaves_it_whole_or_not_at_all(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Die at every point × every hit of restore, commit, commit; what is restored fits what was written."""

    def life(kept: Kept) -> None:
        checkpoint = kept.make()
        found = checkpoint.restore()
        for n in range(found.offsets["q@s"] + 1 if found else 1, 4):
            checkpoint.commit(at(n), kept.work(n))

    count = itertools.count()

    def fresh() -> Kept:
        return kept_at(kind, tmp_path / str(next(count)), request)

    first = fresh()
    sites = testing.crash_sites(lambda: life(first))
    first.close()
    assert {point for point, _ in sites} >= {"checkpoint.restored", "checkpoint.inside", "checkpoint.after"}
    for point, hit in sites:
        kept = fresh()
        with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
            life(kept)
        life(kept)
        assert kept.written() == [1, 2, 3], (point, hit)
        kept.close()


LIFE = """
import sys, test_checkpoints as t
kept = t.Kept(sys.argv[1], sys.argv[2])
checkpoint = kept.make()
found = checkpoint.restore()
for n in range(found.offsets["q@s"] + 1 if found else 1, 4):
    checkpoint.commit(t.at(n), kept.work(n))
kept.close()
"""


@pytest.mark.parametrize("kind", slow_except(["sqlite"], ["sqlite", "postgresql", "file"]))
@pytest.mark.parametrize("site", ["checkpoint.restored:1", "checkpoint.inside:2", "checkpoint.after:2"])
def test_kill_9_in_a_commit_leaves_it_whole_or_not_at_all(
    site: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept = kept_at(kind, tmp_path, request)
    with Child(LIFE, kind, kept.place, CUES_FAULT=site) as child:
        assert child.returncode() == -signal.SIGKILL
    run(LIFE, kind, kept.place)
    assert kept.written() == [1, 2, 3]


# --- zombies ------------------------------------------------------------------------------------

ZOMBIE = """
import sys, cues, test_checkpoints as t
kept = t.Kept(sys.argv[1], sys.argv[2])
checkpoint = kept.make(timeout_s=4)
checkpoint.restore()
checkpoint.commit(t.at(1), kept.work(1))
print("ready")
sys.stdin.readline()
try:
    checkpoint.commit(t.at(2), kept.work(2))
    print("committed")
except cues.CuesError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("kind", slow_except(["sqlite", "file"], ["sqlite", "postgresql", "file"]))
def test_a_zombie_is_refused(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGSTOP between two commits, takeover, SIGCONT: it does not know that it was stopped, and must hear it."""
    kept = kept_at(kind, tmp_path, request)
    with Child(ZOMBIE, kind, kept.place) as child:
        assert child.line() == "ready"
        child.signal(signal.SIGSTOP)
        child.say()
        taker = kept.make()
        assert taker.restore() == at(1)
        taker.commit(at(10), kept.work(10))
        child.signal(signal.SIGCONT)
        assert child.line() == "Fenced"
        taker.commit(at(11), kept.work(11))
    assert kept.written() == [1, 10, 11]
    assert kept.make().restore() == at(11)
    kept.close()


@pytest.mark.slow
def test_a_zombie_inside_its_transaction_is_ended_by_postgresql(tmp_path: Path, postgres: Any) -> None:
    """SIGSTOP after the check of the fence, with the row locked: the server ends the transaction; takeover works."""
    kept = Kept("postgresql", postgres.database())
    with Child(ZOMBIE, "postgresql", kept.place, CUES_FAULT="checkpoint.inside:2:stop") as child:
        assert child.line() == "ready"
        child.say()
        child.wait_stopped()
        taker = kept.make()
        assert taker.restore() == at(1)  # waits for the server to end the other transaction, after two seconds
        taker.commit(at(10), kept.work(10))
        child.signal(signal.SIGCONT)
        assert child.line() == "CheckpointError"
    assert kept.written() == [1, 10]
    kept.close()


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_zombie_inside_its_commit_holds_a_file_until_it_is_killed(kind: str, tmp_path: Path) -> None:
    """Only a kill can end it. The next owner gets an error, and never commits before that."""
    kept = Kept(kind, str(tmp_path / "place"))
    with Child(
        ZOMBIE,
        kind,
        kept.place,
        CUES_FAULT="checkpoint.inside:3:stop" if kind == "file" else "checkpoint.inside:2:stop",
    ) as child:
        assert child.line() == "ready"
        child.say()
        child.wait_stopped()
        taker = kept.make(timeout_s=0.2)
        with pytest.raises(cues.errors.CheckpointError) as error:
            taker.restore()
        if kind == "file":
            assert f"process {child.pid} (stopped)" in str(error.value)
        child.kill()
        assert taker.restore() == at(1)
        taker.commit(at(10), kept.work(10))
    assert kept.written() == [1, 10]
    kept.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "file", "store"])
def test_without_the_fence_a_zombie_overwrites_its_successor(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The negative control: an owner that learns the new fence without restoring takes its successor's place."""
    kept = kept_at(kind, tmp_path, request)
    old, new = kept.make(), kept.make()
    old.restore()
    new.restore()
    new.commit(at(2), kept.work(2))
    old._held = new._held
    if kind == "file":
        old.state = {}
    old.commit(at(1), kept.work(1))
    assert kept.make().restore() == at(1)
    kept.close()


# --- databases ----------------------------------------------------------------------------------


def test_consumers_of_one_database_are_told_apart_by_name(tmp_path: Path) -> None:
    one, other = (SQLCheckpoint(tmp_path / "x.db", name) for name in ("one", "other"))
    assert one.restore() is None and other.restore() is None
    one.commit(at(1))
    other.commit(at(2))
    assert (one.restore(), other.restore()) == (at(1), at(2))
    with pytest.raises(cues.errors.InvalidArgument, match="no name"):
        SQLCheckpoint(tmp_path / "x.db").restore()
    one.close()
    other.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("statement", ["commit", "rollback"])
def test_work_that_ends_the_transaction_is_reported(
    statement: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept = kept_at(kind, tmp_path, request)
    checkpoint = kept.make()
    checkpoint.restore()

    def work(connection: Any) -> None:
        kept.work(1)(connection)
        getattr(connection, statement)()

    with pytest.raises(cues.CuesError, match="transaction itself"):
        checkpoint.commit(at(1), work)
    # A commit took both, a rollback neither: whatever the user did, they are together.
    assert (kept.written(), kept.make().restore()) in (([1], at(1)), ([], None))
    kept.close()


def test_a_lost_server_is_reported_without_the_password(postgres: Any) -> None:
    url = sa.make_url(postgres.database()).set(password="secret", query={"host": "/nowhere"})
    with pytest.raises(cues.errors.CheckpointError) as error:
        SQLCheckpoint(url, "name").restore()
    assert "nowhere" in str(error.value) and "secret" not in str(error.value) and "Try:" in str(error.value)


def test_a_connection_that_broke_between_two_commits_is_made_anew(postgres: Any) -> None:
    kept = Kept("postgresql", postgres.database())
    checkpoint = kept.make()
    checkpoint.restore()
    checkpoint.commit(at(1), kept.work(1))
    engine = sa.create_engine(kept.place)
    with engine.begin() as connection:
        end = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
        connection.execute(sa.text(f"{end} and datname = current_database()"))
    engine.dispose()
    checkpoint.commit(at(2), kept.work(2))
    assert kept.written() == [1, 2]
    kept.close()


# --- files --------------------------------------------------------------------------------------


def test_the_file_is_readable_and_a_leftover_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "place"
    (tmp_path / "place.next").write_text("half a fi")
    checkpoint = JSONFileCheckpoint(path)
    checkpoint.restore()
    checkpoint.commit(at(7), lambda state: state.update(total=3, name="ü"))
    found = json.loads(path.read_text())
    assert found["fence"] == 1 and found["state"] == {"total": 3, "name": "ü"} == checkpoint.state
    assert found["checkpoint"]["producers"] == [["q@s", "010203040506", 7, 6]]
    again = JSONFileCheckpoint(path)
    assert again.restore() == at(7) and again.state == {"total": 3, "name": "ü"}


def test_the_state_is_at_once_what_a_restore_gives(tmp_path: Path) -> None:
    checkpoint = JSONFileCheckpoint(tmp_path / "place")
    checkpoint.restore()
    checkpoint.commit(at(1), lambda state: state.update({1: (2, 3)}))
    assert checkpoint.state == {"1": [2, 3]}


def test_what_json_cannot_hold_is_refused_and_nothing_written(tmp_path: Path) -> None:
    checkpoint = JSONFileCheckpoint(tmp_path / "place")
    checkpoint.restore()
    before = checkpoint.path.read_text()
    for value in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            checkpoint.commit(at(1), lambda state, value=value: state.update(value=value))  # type: ignore[misc]
    assert checkpoint.path.read_text() == before and checkpoint.state == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cues": 2}', '"text"', "\0"])
def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    path.write_text(text)
    with pytest.raises(cues.errors.CheckpointError, match=r"not a checkpoint|version 2"):
        JSONFileCheckpoint(path).restore()
    assert path.read_text() == text


# --- stores -------------------------------------------------------------------------------------


def test_a_statement_that_cannot_run_is_named_as_one_possible_cause(tmp_path: Path) -> None:
    with pytest.raises(cues.errors.CheckpointError, match=r"near \"tabel\".*statement that cannot run"):
        SQLCheckpoint(str(tmp_path / "x.db"), "name", "create tabel x").restore()


def test_a_file_that_is_not_a_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("a text, and no database at all " * 100)
    before = path.read_bytes()
    with pytest.raises(cues.errors.CheckpointError, match=r"ledger\.db cannot be read: .*not a database"):
        SQLCheckpoint(str(path), "name").restore()
    assert path.read_bytes() == before


def test_a_commit_in_a_store_holds_state_and_messages_and_large_checkpoints(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store") as store:
        checkpoint = LMDBCheckpoint(store, "name")
        checkpoint.restore()
        large = Checkpoint({f"journal {n}": n for n in range(5_000)})

        def work(writes: Any) -> None:
            writes.state["sums"] = {"a": 1}
            writes.append(store.queue("out"), ({"n": n} for n in range(3)))

        checkpoint.commit(large, work)
        assert checkpoint.state == {"sums": {"a": 1}}
        assert [m["n"] for m in store.queue("out").tailer()] == [0, 1, 2]
        checkpoint.commit(at(1), lambda writes: writes.state["sums"].update(b=2))
        assert checkpoint.state == {"sums": {"a": 1, "b": 2}}
    with cues.open(tmp_path / "store") as store:
        again = LMDBCheckpoint(store, "name")
        assert again.restore() == at(1) and again.state == {"sums": {"a": 1, "b": 2}}


@pytest.mark.interpreted
def test_the_name_of_a_queue_is_not_a_queue(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store") as store:
        store.queue("out")
        checkpoint = LMDBCheckpoint(store, "name")
        checkpoint.restore()
        with pytest.raises(cues.errors.InvalidArgument, match=r"found 'out'.*store\.queue"):
            checkpoint.commit(at(1), lambda writes: writes.append("out", [{"n": 1}]))  # type: ignore[arg-type]
        assert checkpoint.restore() is None


def test_a_queue_of_another_store_is_refused(tmp_path: Path) -> None:
    with cues.open(tmp_path / "one") as one, cues.open(tmp_path / "other") as other:
        checkpoint = LMDBCheckpoint(one, "name")
        checkpoint.restore()
        with pytest.raises(cues.CuesError, match="publish_uncommitted"):
            checkpoint.commit(at(1), lambda writes: writes.append(other.queue("q"), [{"n": 1}]))
        assert checkpoint.restore() is None


# --- the form -----------------------------------------------------------------------------------


def test_a_checkpoint_has_one_text() -> None:
    assert packing.pack(at(2)) == (
        '{"cues":1,"offsets":{"a":4611686018427387904,"q@s":2},'
        '"producers":[["q@s","010203040506",2,1]],"ack_intents":[["out","AAE="]]}'
    )
    for n in (0, 1, 255, 1 << 40):
        assert packing.unpack(packing.pack(at(n))) == at(n)
    assert packing.unpack(packing.pack(Checkpoint())) == Checkpoint()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"cues":2,"offsets":{},"producers":[],"ack_intents":[]}',
        '{"cues":1,"offsets":{},"producers":[]}',
        '{"cues":1,"offsets":{},"producers":[],"ack_intents":[],"more":1}',
        '{"cues":1,"offsets":[],"producers":[],"ack_intents":[]}',
        '{"cues":1,"offsets":{"q":null},"producers":[],"ack_intents":[]}',
        '{"cues":1,"offsets":{},"producers":[["q","01",1,1]],"ack_intents":[]}',
        '{"cues":1,"offsets":{},"producers":[["q"]],"ack_intents":[]}',
        '{"cues":1,"offsets":{},"producers":[],"ack_intents":[["q","@"]]}',
    ],
)
def test_a_text_that_is_not_a_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(cues.errors.CheckpointError, match=r"^The stored checkpoint "):
        packing.unpack(text)


# --- the page -------------------------------------------------------------------------------------


def test_every_python_block_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, "checkpoints.md", "exec"), {"__name__": "page"})
        promised = re.findall(r"print\(.*\) +# (.*)", block)
        assert promised and capsys.readouterr().out.splitlines() == promised
