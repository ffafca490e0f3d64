"""The files of a store are opened through storage/door.py: no link is followed, and no file gets the numbers 0 to 2."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import cues
from cues.engine.record import WorkersRecord, note_queues
from cues.errors import StoreForeign, StoreShared
from cues.operate import fresh
from cues.queues import backpressure
from cues.storage import door, leases, locks, retirement
from cues.storage.lmdb_map import open_lmdb

ROOT = Path(cues.__file__).parent
BELOW_THE_COMMANDS = (
    "base", "records", "storage", "queues", "graphs", "forwarding", "steps", "checkpoints", "txn", "groups", "engine",
    "tools", "spark",
)  # fmt: skip

NO_FILES_OF_STORES = {
    "storage.door": "the door",
    "storage.lmdb_map.open_lmdb": "the only call of lmdb.open, after a look at LMDB's files",
    "storage.datafile.sync_directory": "a directory, which cannot be written",
    "storage.leases.of_process": "/proc",
    "storage.locks.process_state": "/proc",
    "base.clock.boot_id": "/proc and /etc",
    "txn.turns._process": "/proc",
    "txn.journals.stamp": "the user's own file",
    "checkpoints.jsonfile.JSONFileCheckpoint._read": "the file that the user names",
    "tools.doctor": "files in a directory that it has just made, and /proc",
    "tools.backup": "files of a backup; new ones are made with O_EXCL",
    "storage.backup_manifest": "the manifest of a backup",
    "tools.follower.redo": "a file of a copy that this user makes",
    "spark.pages": "a place, not a file",
    "spark.java": "the user's own installation of Java",
    "spark.checkpoint": "the user's own checkpoint of Spark",
    "spark.session": "a file in a directory that it has just made",
    "spark.cluster.files": "files of a shared directory: they are written with door.opener",
    "spark.cluster.batch_stream": "files in a directory that the driver has just made",
}
"""Functions that open other files than those of a store, and why."""

OPENERS = {"open", "mkfifo", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "copyfile"}


def openers(path: Path) -> set[str]:
    """The functions of a module that open a file without the door, by qualified name."""
    found = set()

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            place = f"{place}.{node.name}"
        if isinstance(node, ast.Call):
            call = node.func
            name = call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""
            of = call.value.id if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) else ""
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            is_safe = modes[:1] in (["x"], ["xb"], ["x+b"]) or any(word.arg == "opener" for word in node.keywords)
            is_path = isinstance(call, ast.Name) or of in ("os", "io", "lmdb") or modes or not node.args
            if name in OPENERS and of != "door" and not is_safe and (name != "open" or is_path):
                found.add(place)
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    visit(ast.parse(path.read_text()), ".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found


@pytest.mark.interpreted
def test_files_of_stores_are_opened_through_the_door() -> None:
    found = set[str]().union(*(openers(path) for name in BELOW_THE_COMMANDS for path in (ROOT / name).rglob("*.py")))
    known = {name: {at for at in found if f"{at}.".startswith(f"{name}.")} for name in NO_FILES_OF_STORES}
    assert found - set().union(*known.values()) == set(), "use door.opened, door.read_text, door.replace or door.new"
    assert [name for name in known if not known[name]] == [], "entries that are not needed any more"


KINDS = ("a link", "a FIFO", "a directory")


def put(kind: str, place: Path, victim: Path) -> None:
    """Put something else in the place of a file."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    if kind == "a link":
        place.symlink_to(victim)
    elif kind == "a FIFO":
        os.mkfifo(place)
    else:
        place.mkdir()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"precious\n" * 3000)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with cues.open(tmp_path / "s") as store:
        store.queue("q").appender().write({"n": 1})
    return tmp_path / "s"


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "locks", "wake", "mark", "open", "retired"])
def test_a_file_of_a_store_that_is_none_is_refused(
    place: Path, victim: Path, name: str, kind: str, readonly: bool
) -> None:
    """Nothing is written to the target of a link, and no open of a FIFO waits."""
    before = victim.read_bytes()
    if name == "retired":  # it is read when the data file is gone
        (place / "data.mdb").unlink()
    put(kind, place / name, victim)
    if name == "mark" and readonly:  # a reader does not need it
        cues.open(place, readonly=True).close()
        return
    with pytest.raises(StoreForeign, match=rf"{name} is {'a symbolic link' if kind == 'a link' else kind}"):
        cues.open(place, readonly=readonly)
    assert victim.read_bytes() == before


def test_bells_in_another_directory_are_refused(place: Path, tmp_path: Path) -> None:
    """A reader would delete the file with the number of its bell."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "0").write_text("mine")
    put("a link", place / "bells", other)
    with pytest.raises(StoreForeign, match="bells"):
        cues.open(place)
    assert (other / "0").read_text() == "mine"


def test_a_bell_that_is_a_link_is_not_rung(place: Path, victim: Path) -> None:
    """The owner of a store replaces the FIFO of a sleeper. A commit does not fail, and writes nothing there."""
    before = victim.read_bytes()
    with cues.open(place) as store:
        bells = store.core.environment.doorbells
        assert bells is not None
        bell = bells.acquire()
        assert bell is not None
        put("a link", place / "bells" / str(bell.slot), victim)
        bell.listen(-1 % (1 << 64))
        store.queue("q").appender().write({"n": 2})
        assert not bells.mapping[512 + bell.slot], "rung"
        assert len(store.queue("q")) == 2
        bells.release(bell)
    assert victim.read_bytes() == before


def test_folders_in_which_files_are_deleted_may_not_be_links(place: Path, tmp_path: Path) -> None:
    """``cues run --fresh`` deletes in ``bells``, and a Spark writer deletes folders of ended writers in ``staged``."""
    other = tmp_path / "other"
    (other / "photos-of-2025").mkdir(parents=True)
    (other / "0").write_text("mine")
    put("a link", place / "bells", other)
    with pytest.raises(StoreForeign, match="bells"):
        fresh.delete_store(place)
    if find_spec("pyspark"):
        staging = importlib.import_module("cues.spark.staging")
        put("a link", place / "staged", other)
        with pytest.raises(StoreForeign, match="staged"):
            staging.sweep(str(place))
    assert sorted(path.name for path in other.iterdir()) == ["0", "photos-of-2025"]
    assert (place / "data.mdb").exists()


def test_a_file_of_a_shared_directory_is_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    files = importlib.import_module("cues.spark.cluster.files").LocalFiles(str(tmp_path / "shared"))
    before = victim.read_bytes()
    put("a link", tmp_path / "shared" / "one", victim)
    with pytest.raises(StoreForeign, match="one"):
        files.write("one", b"1")
    with pytest.raises(StoreForeign, match="one"), files.create("one"):
        pass
    files.write("two", b"2")
    assert files.read("two") == b"2"
    assert victim.read_bytes() == before


def test_waits_in_another_directory_are_refused(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    put("a link", place / "waits", other)
    with pytest.raises(StoreForeign, match="waits"):
        backpressure.Gate("writer", [], str(place), reads=[str(place)]).take_over()


@pytest.mark.parametrize("name", ["mark", "open", "retired", "workers-g.json", "queues-g.json"])
def test_a_new_file_does_not_follow_a_link(place: Path, victim: Path, name: str) -> None:
    """Files that are replaced as a whole: a link at their name, or at that of the new file, is itself replaced."""
    before = victim.read_bytes()
    part = place / f"{name}.{os.getpid()}-{threading.get_native_id()}.part"
    for linked in (place / name, part):
        put("a link", linked, victim)
    if name == "workers-g.json":
        WorkersRecord("g", 1).save(str(place))
    elif name == "queues-g.json":
        note_queues(str(place), "g", "elsewhere")
    else:
        door.replace(place / name, json.dumps(1))
    assert victim.read_bytes() == before
    assert (place / name).is_file() and not (place / name).is_symlink()
    assert not part.is_symlink()


def test_a_lease_and_a_lock_file_do_not_follow_a_link(place: Path, victim: Path) -> None:
    before = victim.read_bytes()
    with cues.open(place) as store:
        put("a link", place / "lease-01", victim)
        with pytest.raises(StoreForeign, match="lease-01"):
            leases.Lease(store, b"\1")
        # A link to the locks of a store that is open here is not that lock file.
        put("a link", victim.parent / "locks", place / "locks")
        with pytest.raises(StoreForeign, match="locks"):
            locks.open_locks(victim.parent / "locks")
    assert victim.read_bytes() == before


def test_a_new_data_file_does_not_follow_a_link(tmp_path: Path, victim: Path) -> None:
    before = victim.read_bytes()
    (tmp_path / "s").mkdir()
    for name in (f"data.{os.getpid()}.new", "data.mdb"):
        put("a link", tmp_path / "s" / name, victim)
    with pytest.raises(StoreForeign, match=r"data\.mdb"):
        cues.open(tmp_path / "s")
    with pytest.raises(StoreForeign, match=r"new is a symbolic link"):
        open_lmdb(tmp_path / "s" / f"data.{os.getpid()}.new", subdir=False)
    (tmp_path / "s" / "data.mdb").unlink()
    cues.open(tmp_path / "s").close()
    retirement.put_back(tmp_path / "s")
    assert victim.read_bytes() == before


def test_the_directory_of_a_store_may_be_a_link(place: Path) -> None:
    link = place.with_name("link")
    link.symlink_to(place)
    with cues.open(link) as store:
        store.queue("q").appender().write({"n": 2})
    with cues.open(place) as store:
        assert len(store.queue("q")) == 2


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_of_a_store_has_the_number_of_stderr(tmp_path: Path, closed: str) -> None:
    """A process is started with stdout and stderr closed, and a library in C writes a line on descriptor 2."""
    code = """if 1:
        import os, sys, cues
        with cues.open(sys.argv[1], durability="disk") as store:
            store.queue("q").appender().write({"n": 1})
            os.write(2, b"a line of a library" * 10)
            assert store.queue("q").tailer().read() == {"n": 1}
            store.queue("q").appender().write({"n": 2})
            names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)] if sys.platform == "linux" else []
            assert not any(name.startswith(sys.argv[1]) for name in names), names
    """
    child = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(tmp_path / "s")]
    assert subprocess.run(child, timeout=60).returncode == 0
    with cues.open(tmp_path / "s") as store:
        assert len(store.queue("q")) == 2


def test_two_containers_with_one_pid_are_told_what_it_is(place: Path) -> None:
    """Another process has the lock of this process number, as in another pid namespace."""
    code = """if 1:
        import fcntl, os, sys
        fd = os.open(sys.argv[1], os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, int(sys.argv[2]))
        print(flush=True)
        sys.stdin.read()
    """
    child = [sys.executable, "-c", code, str(place / "lock.mdb"), str(os.getpid())]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        for readonly in (False, True):
            with pytest.raises(StoreShared, match=rf"same number \({os.getpid()}\).*container.*--pid=container"):
                cues.open(place, readonly=readonly)
        other.stdin.close()
    with cues.open(place) as store:
        assert len(store.queue("q")) == 1
    assert locks.process_state(0) == "in another container"  # the system gives this number for its processes
