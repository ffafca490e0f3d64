"""Backups, restores and followers: the same store again, also after a death at each of their crash points."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
from children import Child
from forks import Forks
from sets import slow_except
from terminal import cues as command

import cues
from cues import Graph, QueueOptions, Source, Stream, testing
from cues.base import names
from cues.errors import StoreDamaged, StoreError, StoreNotFound
from cues.storage import replica, retirement
from cues.tools import backup, check, follower, salvage
from cues.tools.check import check_others


@pytest.fixture(autouse=True)
def checks_are_forked(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a restore check each store in a forked process, not in a new interpreter (test_check.py has that)."""
    monkeypatch.setattr(check, "walk", lambda path, progress=None: forks.run("conftest:problems_of", path).value)


def counted(message: Any, process: Any) -> Any:
    process.state["n"] = process.state.get("n", 0) + message["n"]
    return {"n": message["n"], "sum": process.state["n"]}


def copied(message: Any) -> Any:
    return message


def graph(root: Path) -> Graph:
    """From the home store to another one, and from there back: a fork, and an input of another store."""
    return Graph(
        "g",
        [
            Source("in"),
            Stream(counted, "in", "mid", key=lambda m: m["n"] % 50, batch_size=40),
            Stream(copied, "mid", "out"),
        ],
        queues={"mid": QueueOptions(path=str(root / "o"))},
    )


def run(root: Path, start: int, stop: int) -> None:
    with cues.open(root / "s", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(start, stop)])
        store.queue("in").tailer("reader").read_many(7)
        testing.run_until_idle(graph(root), store)


def everything(root: Path) -> dict[str, Any]:
    """Messages, positions, state and tries of both stores, which are checked."""
    found: dict[str, Any] = {}
    for name in ("s", "o"):
        with cues.open(root / name) as store:
            assert not store.check() and not check_others(store)
            logs = {queue: store.queue(queue).core.row() for queue in store.queues(all=True)}
            found[name] = (testing.contents(store), logs, store.id)
            if name == "s":
                found["state"] = testing.state(store, "g.counted")
                found["tries"] = list(store.queue("g.counted").tailer())
                found["reader"] = store.queue("in").tailer("reader").index
    return found


def to_there(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    return root


def make_backup(root: Path, dest: Path, since: int | str | None = None) -> backup.Backup:
    with cues.open(root / "s") as store:
        return store.backup(dest, since)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run(to_there(tmp_path / "a"), 0, 300)
    return tmp_path / "a"


@pytest.mark.slow
def test_a_chain_of_increments_restores_the_same_stores_which_continue(root: Path, tmp_path: Path) -> None:
    dest, moments = tmp_path / "b", []
    make_backup(root, dest)
    moments.append(everything(root))
    for turn in range(1, 4):
        run(root, 300 * turn, 300 * turn + 300)
        if turn == 2:
            with cues.open(root / "s") as store:
                store.queue("in").purge(before=450)
                store.queue("new").appender().write({"x": "y" * 20_000})
        moments.append(everything(root))
        made = make_backup(root, dest, "auto")
        assert made.since == turn and not any(stored.is_whole for stored in made.stores)
    for at, expected in enumerate(moments, 1):
        there = to_there(tmp_path / f"r{at}")
        assert backup.restore(dest, there / "s", at).chain == list(range(1, at + 1))
        assert everything(there) == expected
    shutil.rmtree(root)  # the last one continues as the original would
    run(there, 1200, 1500)
    with cues.open(there / "s") as store:
        assert [m["n"] for m in store.queue("out").tailer()] == list(range(1500))


def test_an_increment_has_only_what_is_new(root: Path, tmp_path: Path) -> None:
    whole = make_backup(root, tmp_path / "b")
    same = make_backup(root, tmp_path / "b", 1)
    assert sum(stored.records for stored in same.stores) == 0 < sum(stored.records for stored in whole.stores)


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_a_store_that_was_put_back_is_copied_again_and_not_mixed(tmp_path: Path, durability: str) -> None:
    def send(text: str, count: int) -> None:
        with cues.open(tmp_path / "s", durability=durability) as store:
            store.queue("in").appender().write_many([{text: n} for n in range(count)])

    send("first", 10)
    subprocess.run(["cp", "-r", "--sparse=always", tmp_path / "s", tmp_path / "kept"], check=True)
    send("lost", 5)
    make_backup(tmp_path, tmp_path / "b")
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "kept").rename(tmp_path / "s")
    for _ in range(4):
        send("again", 5)  # more commits and messages than the backup has
    make_backup(tmp_path, tmp_path / "b", "auto")
    backup.restore(tmp_path / "b", tmp_path / "r")
    with cues.open(tmp_path / "s") as ours, cues.open(tmp_path / "r") as theirs:
        assert testing.contents(ours) == testing.contents(theirs)


def test_new_messages_of_a_restored_store_have_other_hashes(root: Path, tmp_path: Path) -> None:
    from cues.storage import timeline

    make_backup(root, tmp_path / "b")
    backup.restore(tmp_path / "b", to_there(tmp_path / "r") / "s")
    with cues.open(tmp_path / "r" / "s") as store, store.core.view() as txn:
        assert [first for first, _ in timeline.read(txn, "in")] == [301]


def test_refusals_name_what_to_do_and_leave_nothing(root: Path, tmp_path: Path) -> None:
    dest = tmp_path / "b"
    with pytest.raises(StoreNotFound, match="There is no backup"):
        backup.restore(dest, tmp_path / "r")
    make_backup(root, dest)
    with pytest.raises(StoreError, match="There is a store at"):
        backup.restore(dest, root / "s")
    with pytest.raises(StoreNotFound, match="no backup 7; it has 1"):
        backup.restore(dest, tmp_path / "r", 7)
    with pytest.raises(StoreNotFound, match="no backup 7"):
        make_backup(root, dest, 7)
    with cues.open(tmp_path / "else") as other, pytest.raises(StoreError, match="backups of another store"):
        other.backup(dest)
    part = dest / "000001" / "s.part"
    raw = bytearray(part.read_bytes())
    raw[len(raw) // 2] ^= 1
    part.write_bytes(raw)
    with pytest.raises(StoreDamaged, match=r"s\.part of a backup is damaged"):
        backup.restore(dest, tmp_path / "r")
    assert not (tmp_path / "r").exists() and not (tmp_path / "o").exists()


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("wrong", slow_except(["gone"], ["", "{}", "gone"]))
def test_a_damaged_manifest_hinders_only_the_backups_that_need_it(root: Path, tmp_path: Path, wrong: str) -> None:
    """1 and 2 are a chain, 3 and 4 another; the manifest of 1 is damaged."""
    dest = tmp_path / "b"
    moments = {}
    for number, since in ((1, None), (2, 1), (3, None), (4, 3)):
        run(root, 10 * number, 10 * number + 5)
        make_backup(root, dest, since)
        moments[number] = everything(root)
    manifest = dest / "000001" / backup.MANIFEST
    manifest.unlink() if wrong == "gone" else manifest.write_text(wrong)
    for number in (1, 2):
        with pytest.raises(StoreDamaged, match=r"000001/manifest.json cannot be used.*restore backup 4 \(--at 4\)"):
            backup.restore(dest, to_there(tmp_path / f"r{number}") / "s", number)
    for number in (3, 4):
        backup.restore(dest, to_there(tmp_path / f"r{number}") / "s", number)
        assert everything(tmp_path / f"r{number}") == moments[number]
    assert [number for number, made in backup.listed(dest) if isinstance(made, backup.Backup)] == [2, 3, 4]
    (dest / "000003" / backup.MANIFEST).write_text("")
    with pytest.raises(StoreDamaged, match="no backup here can be restored"):
        backup.restore(dest, to_there(tmp_path / "r") / "s")
    made = make_backup(root, dest, "auto")
    assert (made.number, made.since) == (5, None), "an increment to a chain that is broken could not be restored"
    backup.restore(dest, to_there(tmp_path / "r5") / "s")
    assert everything(tmp_path / "r5") == everything(root)
    assert (make_backup(root, dest, "auto").since, make_backup(root, dest, 5).since) == (5, 5)
    with pytest.raises(StoreDamaged):
        make_backup(root, dest, 4)


@pytest.mark.interpreted
def test_a_commit_between_two_transactions_is_in_both_stores_or_in_none(root: Path) -> None:
    """Without the comparison, the transaction of the first store would be older than that of the second."""
    with cues.open(root / "s") as first, cues.open(root / "o") as second:
        first.queue("in").appender().write({"n": 1})  # its databases are open from here on
        begin, late = second.core.view, [True]

        def begin_late() -> Any:
            if late.pop() if late else False:
                first.queue("in").appender().write({"n": 2})
            return begin()

        second.core.view = begin_late  # type: ignore[method-assign]
        for store in (first, second):
            replica.open_databases(store)
        late[:] = [True]
        with replica.same_moment([first, second]) as moments:
            assert not late
            assert moments[0].number == replica.last_commit(first)


IN_TURN = """
import sys, cues
with cues.open(sys.argv[1]) as first, cues.open(sys.argv[2]) as second:
    for n in range(10**9):
        for store in (first, second):
            store.queue("in").appender().write({"n": n})
        print(n, flush=True)
"""


@pytest.mark.interpreted
def test_a_moment_is_found_between_commits_that_never_pause(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup of stores that commit all the time holds them up for a moment, and does not fail."""
    places = [str(root / name) for name in ("first", "second")]
    with cues.open(places[0]) as first, cues.open(places[1]) as second:
        code = [sys.executable, "-c", IN_TURN, *places]
        with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "0\n"
                for store in (first, second):
                    replica.open_databases(store)
                monkeypatch.setattr(replica, "_ATTEMPTS", 1)
                monkeypatch.setattr(replica, "_ATTEMPTS_BESIDE", 0)
                for _ in range(300):
                    with replica.same_moment([second, first]) as moments:
                        ends = [moment.entries(b"log:in") for moment in moments]
                    assert ends[1] - ends[0] in (0, 1), ends
            finally:
                writer.kill()


CHILD = """
import sys, cues
from pathlib import Path
from cues.tools import backup, check, follower, salvage
verb, root, dest = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if verb == "restore":
    backup.restore(root, dest / "s")
elif verb == "promote":
    follower.promote(dest)
else:
    with cues.open(root / "s", readonly=True) as store:
        if verb == "backup":
            store.backup(dest, "auto")
        else:
            with follower.Follower(store, dest) as copy:
                copy.step()
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "s"
    damage.make(path)
    return path


def restored_only_by_option(spoil: Any) -> bool:
    """Rows that contradict each other, with the right checksums: no earlier step can have written them."""
    return "beyond" in spoil.__name__ or spoil in (
        damage.delete_piece, damage.other_identity, damage.position_on_another_queue,
        damage.position_behind_another_batch, damage.topology_gone, damage.topology_alone, damage.reader_unknown,
        damage.wrong_hash, damage.state_piece_gone, damage.record_of_no_messages,
    )  # fmt: skip


@pytest.mark.damages_stores
@pytest.mark.parametrize(
    "spoil",
    slow_except([damage.delete_record, damage.processor_flipped, damage.wrong_hash], damage.DAMAGES),
    ids=lambda spoil: spoil.__name__,
)
def test_a_backup_of_a_damaged_store_is_refused_or_can_be_restored(sound: Path, tmp_path: Path, spoil: Any) -> None:
    """A gap is restored, and a promoted copy has it too; a checksum that fails is told when the backup is made."""
    store, dest, new = tmp_path / "s", tmp_path / "b", tmp_path / "new"
    store.mkdir()
    shutil.copy(sound / "data.mdb", store)
    with cues.open(store) as opened:
        for name, _ in opened.core.entries():
            opened.core.database(name)
        opened.core.commit(lambda txn: spoil(opened, txn))
    try:
        with cues.open(store) as opened:
            opened.backup(dest)
    except StoreDamaged:
        assert not [*dest.glob("0*")]
        return
    found = check.walk(str(store))
    assert any(damage.DAMAGES[spoil] in problem for problem in found)
    by_option = restored_only_by_option(spoil)
    if by_option:
        with pytest.raises(StoreDamaged, match="--damaged"):
            backup.restore(dest, new)
        assert not new.exists()
    done = backup.restore(dest, new, damaged=by_option)
    assert check.walk(str(new)) == done.problems == found
    if not by_option:
        with cues.open(store) as opened, follower.Follower(opened, tmp_path / "f") as copy:
            copy.step()
        follower.promote(tmp_path / "f", abandon=True)
        assert check.walk(str(tmp_path / "f")) == found


@pytest.mark.damages_stores
def test_a_salvaged_store_is_backed_up_and_restored_with_its_gap(tmp_path: Path) -> None:
    """Also by an increment: the messages that are missing were in the backup before."""
    store, dest, new = tmp_path / "s", tmp_path / "b", tmp_path / "new"
    with cues.open(store) as opened:
        for n in range(9):
            opened.queue("in").appender().write({"n": n})
        opened.backup(dest)
        log = opened.core.database(names.log_database("in", 0))
        opened.core.commit(lambda txn: txn.put((4).to_bytes(8, "big"), b"no record at all", db=log))
        opened.queue("other")  # a commit, so that the damage is in both states
    with cues.open(store) as opened, pytest.raises(StoreDamaged, match="cues salvage"):
        opened.backup(tmp_path / "refused")
    salvage.salvage(store, tmp_path / "salvaged")
    shutil.rmtree(store)
    (tmp_path / "salvaged").rename(store)
    with cues.open(store) as opened:
        for n in range(40):  # so that the new store has more commits than the one before
            opened.queue("other").appender().write({"n": n})
        opened.backup(dest, since="auto")
        opened.queue("in").appender().write({"n": 9})
        opened.backup(dest, since="auto")
    result = command("restore", dest, new)
    assert result.code == 0
    assert "The messages 4 to 4 of queue in are missing. It was so when the backup was made." in result.err
    with cues.open(new) as opened:
        tailer = opened.queue("in").tailer()
        tailer.to_index(5)
        assert [m["n"] for m in tailer] == [4, 5, 6, 7, 8, 9]
        assert opened.check() == ["The messages 4 to 4 of queue in are missing."]


def child(verb: str, root: Path, dest: Path, fault: str = "") -> None:
    """Run one of them in a process; with ``fault`` it must die there."""
    env = os.environ | {"CUES_FAULT": fault}
    ended = subprocess.run([sys.executable, "-c", CHILD, verb, str(root), str(dest)], env=env, check=False)
    assert ended.returncode == (-signal.SIGKILL if fault else 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["backup.writing:1", "backup.writing:9", "backup.copied", "backup.written"])
def test_a_backup_that_was_killed_is_none_and_the_next_one_is_whole(root: Path, tmp_path: Path, fault: str) -> None:
    dest = tmp_path / "b"
    make_backup(root, dest)
    before = everything(root)
    run(root, 300, 600)
    child("backup", root, dest, fault)
    assert [made.number for made in backup.backups(dest)] == [1]
    backup.restore(dest, to_there(tmp_path / "r1") / "s")
    assert everything(tmp_path / "r1") == before
    child("backup", root, dest)
    assert not list(dest.glob("*.unfinished"))
    backup.restore(dest, to_there(tmp_path / "r2") / "s")
    assert everything(tmp_path / "r2") == everything(root)


RESTORE_FAULTS = ["restore.filling:5", "restore.complete"] + [
    f"restore.{point}:{hit}" for point in ("filled", "named", "deleted") for hit in (1, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", RESTORE_FAULTS)
def test_a_restore_that_was_killed_is_completed_by_the_next(root: Path, tmp_path: Path, fault: str) -> None:
    make_backup(root, tmp_path / "b")
    there = to_there(tmp_path / "r")
    child("restore", tmp_path / "b", there, fault)
    child("restore", tmp_path / "b", there)
    assert everything(there) == everything(root)
    assert not list(there.glob("**/.resto*"))
    with pytest.raises(StoreError, match="There is a store at"):
        backup.restore(tmp_path / "b", there / "s")


@pytest.mark.interpreted
def test_a_restore_that_was_killed_at_any_deletion_is_completed_by_the_next(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stores were in place, and the next restore was refused, because a store was there."""
    made = make_backup(root, tmp_path / "b")
    deaths = 0
    for number in itertools.count(1):
        there, left = to_there(tmp_path / f"r{number}"), number

        def dying(name: str, real: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any, **options: Any) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
                real(*arguments, **options)

            return call

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            real = backup.put_in_place

            def named(file: Path, place: Path, real: Any = real, there: Path = there, patch: Any = patch) -> None:
                real(file, place)
                if place == there / "s":  # the last one
                    for name in ("unlink", "rmdir"):
                        patch.setattr(os, name, dying(name, getattr(os, name)))

            patch.setattr(backup, "put_in_place", named)
            backup.restore(tmp_path / "b", there / "s")
            break
        deaths += 1
        assert backup.restore(tmp_path / "b", there / "s").backup == made, number
        assert not list(there.glob("**/.resto*"))
        with pytest.raises(StoreError, match="There is a store at"):
            backup.restore(tmp_path / "b", there / "s")
    assert deaths >= 3, "two directories and the note"
    assert everything(tmp_path / "r1") == everything(root)


@pytest.mark.interpreted
def test_a_restore_of_another_backup_does_not_continue_the_one_that_was_killed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that finds a note, and no data file: somebody moved the store away."""
    make_backup(root, tmp_path / "b")
    run(root, 300, 600)
    make_backup(root, tmp_path / "b", "auto")
    there = to_there(tmp_path / "r")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def move_away(name: str) -> None:
        for store in ("s", "o"):
            (there / store / "data.mdb").rename(tmp_path / f"{store}.{name}")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backup, "put_in_place", killed)
        backup.restore(tmp_path / "b", there / "s", 2)
    assert (there / "s/.restored").exists()
    backup.restore(tmp_path / "b", there / "s", 1)
    move_away("first")
    with testing.crash("restore.deleted", 2, how="raise"), pytest.raises(testing.Crashed):
        backup.restore(tmp_path / "b", there / "s", 2)
    assert (there / "s/.restored").exists()
    move_away("second")
    backup.restore(tmp_path / "b", there / "s", 2)
    assert everything(there) == everything(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["follow.kept", "follow.inside:1", "follow.applied:1", "follow.inside:2", "follow.applied:2"]
)
def test_a_follower_that_was_killed_has_one_moment_and_goes_on(root: Path, tmp_path: Path, fault: str) -> None:
    dest = tmp_path / "f"
    child("follow", root, dest)
    run(root, 300, 600)
    child("follow", root, dest, fault)
    kept = tmp_path / "kept"
    shutil.copytree(dest, kept)
    later = everything(root)
    assert follower.promote(kept, abandon=True).retired == []
    (kept / "others" / "o").rename(tmp_path / "p_o")
    with cues.open(kept) as store:
        assert testing.contents(store) == later["s"][0]
    run(root, 600, 700)
    child("follow", root, dest)
    shutil.rmtree(root)
    done = follower.promote(dest)
    with cues.open(done.store) as store, cues.open(done.places[1]) as other:
        assert not store.check() and not check_others(store)
        assert [m["n"] for m in store.queue("out").tailer()] == list(range(700))
        assert other.queue("mid").last_index == 700


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["", "promote.retired:1", "promote.retired:2", "promote.begun", "promote.named:1", "promote.named:2"]
)
def test_a_promotion_copies_the_last_commits_and_retires_the_originals(root: Path, tmp_path: Path, fault: str) -> None:
    """A later opening is refused, and names the copy; so no new store is made there."""
    dest = tmp_path / "f"
    child("follow", root, dest)
    run(root, 300, 600)
    expected = everything(root)
    if fault:
        child("promote", root, dest, fault)
    done = follower.promote(dest)
    assert done.retired == [str(root / "s"), str(root / "o")]
    with pytest.raises(StoreNotFound, match="was retired"):
        cues.open(root / "s")
    with cues.open(dest) as store, cues.open(done.places[1]) as other:
        assert testing.contents(store) == expected["s"][0] and testing.contents(other) == expected["o"][0]
        assert not store.check() and not other.check() and not check_others(store)


@pytest.mark.slow
def test_no_store_is_begun_in_a_directory_of_copies_or_backups(root: Path, tmp_path: Path) -> None:
    """Such a store would be taken for a promotion that had begun, and the last commits would be lost."""
    dest = tmp_path / "f"
    with cues.open(root / "s", readonly=True) as store, follower.Follower(store, dest) as copy:
        store.backup(tmp_path / "b")
        copy.step()
    for directory in (dest, dest / "others" / "o", dest / ".following", tmp_path / "b"):
        before = sorted(directory.iterdir())
        with pytest.raises(cues.errors.StoreForeign, match=r"has backups|copy of a follower"):
            cues.open(directory)
        assert sorted(directory.iterdir()) == before
    run(root, 300, 310)
    expected = everything(root)
    done = follower.promote(dest)
    assert len(done.retired) == 2
    with cues.open(dest) as store:
        assert testing.contents(store) == expected["s"][0]


@pytest.mark.parametrize("with_id", ["another", "the same"])
def test_a_store_in_the_way_of_a_promotion_is_named_and_nothing_is_retired(
    root: Path, tmp_path: Path, with_id: str
) -> None:
    """A version before this one began stores in directories of copies; a backup may have been restored there."""
    dest = tmp_path / "f"
    with cues.open(root / "s", readonly=True) as store, follower.Follower(store, dest) as copy:
        copy.step()
    if with_id == "another":
        cues.open(tmp_path / "new", durability="disk").close()
    source = (tmp_path / "new" if with_id == "another" else root / "s") / "data.mdb"
    subprocess.run(["cp", "--sparse=always", source, dest], check=True)  # it may be as large as its map, with holes
    with pytest.raises(cues.errors.StoreForeign, match="not of this promotion") as caught:
        follower.promote(dest)
    assert "data.mdb" in caught.value.hint
    run(root, 300, 310)  # the originals are not retired
    (dest / "data.mdb").unlink()
    assert len(follower.promote(dest).retired) == 2


def test_a_follower_does_not_continue_a_copy_whose_promotion_has_begun(root: Path, tmp_path: Path) -> None:
    dest = tmp_path / "f"
    with cues.open(root / "s", readonly=True) as store, follower.Follower(store, dest) as copy:
        copy.step()
        state = follower.Following.load(dest)
        assert state is not None and not state.promoting
    state.promoting = True
    state.save(dest / "follow.json")
    with (
        cues.open(root / "s", readonly=True) as store,
        pytest.raises(cues.errors.StoreError, match=r"promotion of the copy .* was begun"),
    ):
        follower.Follower(store, dest)
    assert follower.promote(dest).retired == []


def test_a_follower_continues_after_a_death_in_the_deletion_of_a_turn(root: Path, tmp_path: Path) -> None:
    """The kill left changes that every copy has, and not the file that names them."""
    dest = tmp_path / "f"
    for stop in (310, 320):
        with cues.open(root / "s", readonly=True) as store, follower.Follower(store, dest) as copy:
            assert not (dest / "redo").exists()
            copy.step()
            (dest / "redo").mkdir()
            (dest / "redo" / f"{store.id.hex()}.part").write_bytes(b"changes")
        run(root, stop - 10, stop)
    expected = everything(root)
    done = follower.promote(dest)
    with cues.open(done.store) as store, cues.open(done.places[1]) as other:
        assert testing.contents(store) == expected["s"][0] and testing.contents(other) == expected["o"][0]
        assert not check_others(store)


@pytest.mark.interpreted
def test_the_state_of_a_follower_and_the_names_of_its_copies_are_durable(
    root: Path, tmp_path: Path, synced: list[str]
) -> None:
    """A process may have died after it made them; the next one continues, and syncs them."""
    dest = tmp_path / "f"
    copies = {str(dest / ".following"), str(dest / "others" / "o" / ".following")}
    for _ in range(2):
        synced.clear()
        with cues.open(root / "s", readonly=True) as store, follower.Follower(store, dest) as copy:
            copy.step()
            copy.step()
        assert copies | {str(dest), str(dest / "others" / "o"), str(tmp_path)} <= set(synced)
        assert any(Path(name).name.startswith("follow.json.") for name in synced)


@pytest.mark.interpreted
def test_the_note_of_a_retired_store_and_the_name_of_one_that_is_put_back_are_durable(
    root: Path, synced: list[str]
) -> None:
    synced.clear()
    retirement.retire(root / "s", "the copy")
    assert Path(synced[0]).name.startswith("retired.") and synced[1] == str(root / "s")
    synced.clear()
    retirement.put_back(root / "s")
    assert synced == [str(root / "s")]


@pytest.mark.interpreted
def test_a_restore_is_durable_in_all_its_places_before_a_store_gets_its_name(
    root: Path, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backup(root, tmp_path / "b")
    there = to_there(tmp_path / "r")
    real = backup.put_in_place

    def named(file: Path, place: Path) -> None:
        synced.append("named")
        real(file, place)

    monkeypatch.setattr(backup, "put_in_place", named)
    synced.clear()
    backup.restore(tmp_path / "b", there / "s")
    places = [there / "s", there / "o"]
    expected = {str(path) for place in places for path in (place / ".restoring", place, there, tmp_path)}
    note = synced.index(str(there / "s" / ".restored"))
    assert expected <= set(synced[:note]) and synced[note + 1 : note + 3] == [str(there / "s"), "named"]
    assert synced[-1] == str(there / "s"), "the note is durably gone"


HOLDER = """
import sys, cues
with cues.open(sys.argv[1], durability="process") as store:
    appender = store.queue("late").appender()
    appender.write({"n": 1})
    print("open", flush=True)
    input()
    try:
        print("index", appender.write({"n": 2}), flush=True)
    except cues.CuesError as error:
        print("refused", type(error).__name__, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_has_a_retired_original_open_gets_no_commit_acknowledged(root: Path, tmp_path: Path) -> None:
    dest = tmp_path / "f"
    child("follow", root, dest)
    with Child(HOLDER, root / "s") as holder:
        assert holder.line() == "open"
        follower.promote(dest)
        holder.say("go on")
        assert holder.line().startswith("refused ")
    with cues.open(dest) as store:
        assert [m["n"] for m in store.queue("late").tailer()] == [1]


WRITER = """
import sys, cues
from cues import testing
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_backup import graph
root = Path(sys.argv[1])
with cues.open(root / "s", durability="process") as store:
    appender = store.queue("in").appender()
    n = store.queue("in").last_index
    while True:
        appender.write_many([{"n": i} for i in range(n, n + 20)])
        n += 20
        testing.run_until_idle(graph(root), store)
"""


@pytest.mark.slow
def test_backups_of_a_loaded_graph_with_kills_restore_and_resume_exactly(root: Path, tmp_path: Path) -> None:
    """Each backup opens, is clean in both stores, and the graph continues from it: every message once, in order."""
    dest = tmp_path / "b"

    def writer() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WRITER, str(root), str(Path(__file__).parent)])

    running = writer()
    try:
        for turn in range(8):
            if turn % 2:
                running.kill()
                running.wait()
                running = writer()
            if turn in (2, 5):
                child("backup", root, dest, f"backup.writing:{turn}")
            child("backup", root, dest)
    finally:
        running.kill()
        running.wait()
    assert len(backup.backups(dest)) == 8
    for made in backup.backups(dest):
        there = to_there(tmp_path / f"r{made.number}")
        backup.restore(dest, there / "s", made.number)
        with cues.open(there / "s") as store, cues.open(there / "o"):
            assert not store.check() and not check_others(store)
            count = store.queue("in").last_index
        run(there, count, count + 10)
        with cues.open(there / "s") as store:
            assert [m["n"] for m in store.queue("out").tailer()] == list(range(count + 10))


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_leaves_the_earlier_backup(root: Path, tmp_path: Path) -> None:
    dest = tmp_path / "b"
    make_backup(root, dest)
    run(root, 300, 3000)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    ended = subprocess.run(
        [sys.executable, "-c", limited + CHILD, "backup", str(root), str(dest)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "StoreFull" in ended.stderr and "earlier ones are as they were" in ended.stderr, ended.stderr
    assert [path.name for path in sorted(dest.iterdir())] == ["000001", "lock"]
    backup.restore(dest, to_there(tmp_path / "r") / "s")
