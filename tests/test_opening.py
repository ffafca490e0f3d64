"""Opening a store: beside a writer, after a kill, by a user who may not write it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.operate import fresh
from cues.storage import environment, leases, open_mark, replica, timeline
from cues.tools import compaction

GROWING = """
import sys, cues
store = cues.open(sys.argv[1], durability="process")
appender = store.queue("q").appender()
bodies = [{"n": i, "x": "y" * 1000} for i in range(64)]
print("ok", flush=True)
while store.info()["used"] < int(sys.argv[2]):
    appender.write_many(bodies)
print("grown", flush=True)
"""
OPENS = {
    "open": "with cues.open(path): pass",
    "readonly": "with cues.open(path, readonly=True): pass",
    "status": "run('status', path)",
    "tail": "run('tail', path + '#q', '-n', '1')",
    "worker": "worker()",
}
OPENER = """
import sys, contextlib, io, cues
path, count = sys.argv[1], int(sys.argv[2])
def run(*arguments):
    from cues.cli.app import run
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run(arguments)
    assert code == 0, (code, out.getvalue())
def worker():
    with cues.open(path) as store, store.queue("q") as queue:
        queue.tailer("worker").read()
for _ in range(count):
    {what}
print("opened", flush=True)
"""


def _opens(path: Path, what: str, count: int, bytes_max: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", GROWING, str(path), str(bytes_max)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ok\n"
        code = OPENER.replace("{what}", OPENS[what])
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(count)], capture_output=True, text=True, check=False
        )
        assert done.stdout == "opened\n", done.stderr[-2000:]
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("what", OPENS)
def test_no_open_fails_beside_a_writer_that_grows_the_store(tmp_path: Path, what: str) -> None:
    """An open that maps less than others write meanwhile fails now and then above 10 MiB: one of three."""
    _opens(tmp_path / "s", what, 20, 1 << 30)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", OPENS)
def test_none_of_ten_thousand_opens_fails_beside_a_writer_that_grows_the_store_to_2_gib(
    tmp_path: Path, what: str
) -> None:
    left = 10_000
    for turn in range(5):
        _opens(tmp_path / str(turn), what, left // 5, 2 << 30)


def test_a_map_is_as_large_as_that_of_others_whatever_is_asked(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", map_size=64 << 20):
        pass
    with cues.open(tmp_path / "s", map_size=1 << 20) as store:
        assert store.map_size >= 64 << 20


def test_a_data_file_that_was_cut_to_nothing_is_not_begun_anew(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s") as store:
        store.queue("q").appender().write({"n": 1})
    os.truncate(tmp_path / "s" / "data.mdb", 0)
    with pytest.raises(cues.errors.StoreDamaged, match="truncated"):
        cues.open(tmp_path / "s")
    assert (tmp_path / "s" / "data.mdb").stat().st_size == 0
    os.unlink(tmp_path / "s" / "data.mdb")


LOOK = """
import os, sys, cues, cues.queues.store
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # here, as that user may not start this interpreter
with cues.open(sys.argv[1], readonly=True) as store:
    print([m["n"] for m in store.queue("q").tailer()])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as another user")
def test_a_user_who_may_not_write_a_store_can_read_it_while_no_process_writes() -> None:
    with tempfile.TemporaryDirectory() as place:  # outside of tmp_path, which others may not enter
        os.chmod(place, 0o755)
        path = Path(place) / "s"
        with cues.open(path) as store:
            store.queue("q").appender().write({"n": 1})
            path.chmod(0o755)
            for file in ("data.mdb", "lock.mdb", "locks", "wake", "open", "mark"):
                os.chmod(path / file, 0o644)
            look = [sys.executable, "-c", LOOK, str(path)]
            while_written = subprocess.run(look, capture_output=True, text=True, check=False)
            assert f"Process {os.getpid()} has the store" in while_written.stderr
            assert "chmod a+rw" in while_written.stderr
            os.chmod(path / "lock.mdb", 0o666)
            beside = subprocess.run(look, capture_output=True, text=True, check=False)
            assert beside.stdout == "[1]\n", beside.stderr
            os.chmod(path / "lock.mdb", 0o644)
        alone = subprocess.run(look, capture_output=True, text=True, check=False)
        assert alone.stdout == "[1]\n", alone.stderr


RUN = """
import os, sys, tempfile, cues

def write(path):
    with cues.open(path) as store:
        store.queue("q").appender().write({"n": 1})
        return len(store.queue("q"))

with tempfile.TemporaryDirectory() as place:
    write(place + "/s")  # imports all that it needs, as the other user may not start this interpreter
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(write(sys.argv[1]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files for another user")
@pytest.mark.parametrize("missing", ["lock.mdb", "locks wake", "lock.mdb locks wake open mark bells"])
@pytest.mark.parametrize("what", ["look", "write", "compact"])
def test_what_root_makes_in_a_store_belongs_to_the_owner_of_the_store(what: str, missing: str) -> None:
    """Root looked at a store which a service was making; the lock file was root's, and the service stopped."""
    with tempfile.TemporaryDirectory() as place:  # outside of tmp_path, which others may not enter
        os.chmod(place, 0o777)
        path = Path(place) / "s"
        run = [sys.executable, "-c", RUN, str(path)]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "1\n"
        for name in missing.split():
            if name == "bells":
                shutil.rmtree(path / name)
            else:
                (path / name).unlink(missing_ok=True)
        with cues.open(path, readonly=what == "look") as store:
            if what == "write":
                store.queue("q").appender().write({"n": 2})
                assert store.queue("q").tailer().read(block=True, timeout=1) == {"n": 1}
            owners = {file.stat().st_uid for file in (path, *path.rglob("*"))}
        if what == "compact":
            compaction.compact(path)
        owners |= {file.stat().st_uid for file in (path, *path.rglob("*"))}
        assert owners == {65534}
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.stdout == ("3\n" if what == "write" else "2\n"), done.stderr


KILLED = """
import sys, time, cues
store = cues.open(sys.argv[1])
with store.core.view() as txn:
    print(txn.id(), flush=True)
    sys.stdin.read()
"""


def test_a_reader_that_was_killed_does_not_make_the_store_grow(tmp_path: Path) -> None:
    """Its slot pinned every page that was freed since, until another process opened the store."""
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q", retention=5)
        appender = queue.appender()
        appender.write({"n": 0})
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline()
        child.kill()
        child.communicate()
        for n in range(3000):
            appender.write({"n": n, "x": "y" * 2000})
        assert store.info()["used"] < 8 << 20


def test_a_purge_of_a_store_whose_map_is_full_gives_the_space_back(tmp_path: Path) -> None:
    """It moved the front, said that nothing was written, and advised to purge."""
    with cues.open(tmp_path / "s", durability="process", max_map_size=1 << 20) as store:
        queue = store.queue("q")
        appender = queue.appender()
        count = 0
        with pytest.raises(cues.errors.StoreFull):
            while True:
                appender.write({"x": "y" * 300})
                count += 1
        assert queue.purge(before=count // 2) == count // 2 - 1
        assert queue.first_index == count // 2
        for _ in range(count // 4):
            appender.write({"x": "y" * 300})


def test_a_store_at_a_relative_path_is_used_after_a_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with cues.open("s", durability="process") as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        graph = cues.Graph("g", store=store)
        graph.source("in")
        graph.stream("in", "out", id="f")(lambda message: message)
        with graph.start() as running:
            running.send("in", {"n": 1})
            assert running.wait_idle(60)
        assert list(store.queue("out").tailer()) == [{"n": 1}]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_path_need_not_be_utf_8_and_a_queue_may_have_any_name(tmp_path: Path) -> None:
    """The second name was what holes in the records of steps looked like."""
    graph = cues.Graph("g", store=os.fsdecode(bytes(tmp_path) + b"/\xff\xfe"), durability="process")
    graph.source("in")
    graph.stream("in", "fedcba98765432100123456789abcdef", id="f")(lambda message: message)
    with graph.start() as running:
        running.send("in", {"n": 1})
        assert running.wait_idle(60)
        assert running.messages("fedcba98765432100123456789abcdef") == [{"n": 1}]


@pytest.mark.interpreted
def test_the_names_of_a_new_store_are_durable_before_its_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """A file system may lose the name of a file in a power cut, and with it commits that were acknowledged."""
    steps, write = synced, environment.write_format
    shop = tmp_path / "new" / "shop"
    names = {str(shop), str(tmp_path / "new"), str(tmp_path)}

    def noting(lock: Any) -> Any:
        begin = lock._begin
        lock._begin = lambda *arguments: (steps.append("begin"), begin(*arguments))[1]
        return lock

    monkeypatch.setattr(environment, "write_format", lambda lock, *arguments: write(noting(lock), *arguments))
    with cues.open(shop, durability="disk"):
        assert str(shop) in steps[: steps.index("begin")]
        assert names <= set(steps), "nothing of a caller is committed yet"
    steps.clear()
    with cues.open(shop) as store:
        assert not steps, "nothing is acknowledged yet"
        noting(store.core.environment.writer_lock)
        appender = store.queue("in").appender()
        appender.write({"n": 1})
        before = steps[: steps.index("begin")]
        assert before == [str(shop)], "a restore or a compaction may have died before it synced the name"
        steps.clear()
        appender.write({"n": 2})
        assert not names & set(steps), "once in a process"
    with cues.open(tmp_path / "fast", durability="process") as store:
        assert {str(tmp_path / "fast"), str(tmp_path)} <= set(steps)
    steps.clear()
    with cues.open(tmp_path / "fast") as store:  # of a compaction that died before it synced the name
        store.sync()
        assert steps == [str(tmp_path / "fast")]
    open_mark.write(tmp_path / "fast", durable=True)  # by a process that dies now
    steps.clear()
    with cues.open(tmp_path / "fast") as store:
        noting(store.core.environment.writer_lock)
        store.queue("in").appender().write({"n": 1})
        assert str(tmp_path / "fast") in steps[: steps.index("begin")]


@pytest.mark.interpreted
@pytest.mark.parametrize("way", ["made and not marked", "copied", "restored"])
def test_the_directories_of_a_store_whose_files_are_others_are_durable_before_its_mark(
    tmp_path: Path, way: str, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that made the directories may have died before it synced them; a later one trusts the mark."""
    shop = tmp_path / "new" / "shop"
    names = {str(shop), str(shop.parent), str(tmp_path)}
    cues.open(shop if way == "made and not marked" else tmp_path / "old").close()
    mark = timeline.mark

    def marking(directory: Path) -> None:
        synced.append("marked")
        mark(directory)

    if way == "made and not marked":
        (shop / timeline.FILE).unlink()
    elif way == "copied":
        shutil.copytree(tmp_path / "old", shop)
    synced.clear()
    monkeypatch.setattr(timeline, "mark", marking)
    if way == "restored":
        replica.put_in_place(Path(shutil.copytree(tmp_path / "old", shop / ".restoring")) / "data.mdb", shop)
    cues.open(shop).close()
    assert names <= set(synced[: synced.index("marked")])
    if way == "restored":
        assert synced[synced.index("marked") + 1] == str(shop), "the name of the data file"


@pytest.mark.interpreted
def test_a_store_that_is_deleted_is_gone_before_its_mark(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could bring a "process" store back that was being written, and is not checked."""
    path, real = tmp_path / "s", Path.unlink
    cues.open(path, durability="process").close()

    def unlink(file: Path, missing_ok: bool = False) -> None:
        synced.append(file.name)
        real(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    fresh.delete_store(path)
    assert synced.index("data.mdb") < len(synced) - 1 - synced[::-1].index(str(path)) < synced.index("open")


def test_a_lease_that_finds_no_room_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any, *arguments: Any, **options: Any) -> int:
        if "lease-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments, **options)

    real = os.open
    monkeypatch.setattr(os, "open", full)
    with (
        cues.open(tmp_path / "s", durability="process") as store,
        pytest.raises(cues.errors.StoreFull, match=r"disk of the store .* is full"),
    ):
        leases.Lease(store, b"owner")
