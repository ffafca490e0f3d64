"""``cues doctor``: what each check says of a machine that is well, and of one that is not; a store is never changed."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child
from terminal import cues as command

import cues
from cues import errors
from cues.cli.app import run
from cues.spark import java
from cues.storage import locks, read_slots
from cues.storage.free_space import Space
from cues.tools import doctor


def findings(path: Path, check: str) -> dict[str, doctor.Finding]:
    with doctor.place(path) as place:
        return {finding.check: finding for finding in doctor.CHECKS[check](place)}


@pytest.fixture(autouse=True)
def quick_java(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Java that only says its version, so that no test starts one."""
    home = tmp_path_factory.mktemp("java")
    (home / "bin").mkdir()
    (home / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one message."""
    path = tmp_path / "store"
    with cues.open(path) as opened:
        opened.queue("q").appender().write({"n": 1})
    return path


def test_a_place_without_a_store_is_examined_and_nothing_is_left(tmp_path: Path) -> None:
    found = command("doctor", tmp_path / "not" / "yet", "--json")
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert {row["state"] for row in rows} <= {"ok", "warning", "problem"}
    by_check = {row["check"]: row for row in rows}
    for check in ("platform", "python", "packages", "locks", "shared memory", "monotonic clock", "store"):
        assert by_check[check]["state"] == "ok", by_check[check]
    assert "there is none yet" in by_check["store"]["text"]
    assert found.code == any(row["state"] == "problem" for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_read_and_no_byte_of_its_data_changes(store: Path) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        # Any opening touches "wake"; the times of "locks" show whether a store was copied.
        kept = {
            name: ((store / name).stat().st_mtime_ns, (store / name).read_bytes()) for name in ("data.mdb", "locks")
        }
        return kept | {"wake": (0, (store / "wake").read_bytes())}

    before, names = files(), sorted(os.listdir(store))
    found = findings(store, "store")
    assert [finding.state for finding in found.values()] == ["ok", "ok", "ok", "ok"]
    assert found["store"].facts["durability"] == "disk"
    with doctor.place(store) as place:
        assert place.probes is not None and place.probes.parent == store.parent
        doctor.examine(place)
    assert files() == before and sorted(os.listdir(store)) == names
    assert os.listdir(store.parent) == ["store"]


READS = """
import sys, cues
with cues.open(sys.argv[1]) as store, store.core.view() as txn:
    print("reads")
    sys.stdin.read()
"""


def test_a_read_transaction_that_does_not_end_is_named(tmp_path: Path) -> None:
    """Of another process, by status and doctor; the file grows meanwhile. Not named: a young one, one that ended."""
    store = tmp_path / "s"

    def commits(count: int) -> int:
        with cues.open(store, durability="process") as opened:
            for n in range(count):
                opened.core.commit(lambda txn, n=n: txn.put(b"\0sub\0q\0none", b"%d" % n))
            return opened.info()["used"]

    def told() -> tuple[bool, dict[str, Any] | None, doctor.Finding]:
        text, line = command("status", store, "--table").out, command("status", store, "--json").out.splitlines()[0]
        return "OLD READ" in text and "Try: " in text, json.loads(line)["old_read"], findings(store, "store")["readers"]

    before = commits(50)
    assert commits(50) == before
    with Child(READS, store) as child:
        assert child.line() == "reads"
        commits(50)
        assert told()[:2] == (False, None)
        grown = commits(read_slots.OLD_COMMITS)
        shown, row, finding = told()
        assert shown and finding.state == "warning" and f"process {child.pid} (" in finding.text
        assert row is not None and row["pid"] == child.pid and row["commits"] >= read_slots.OLD_COMMITS + 50
        child.signal(signal.SIGSTOP)
        child.wait_stopped()
        assert f"kill -CONT {child.pid}" in findings(store, "store")["readers"].hint
        child.signal(signal.SIGCONT)
        child.end()
    assert grown > before + (64 << 20)
    assert told()[:2] == (False, None)
    assert commits(50) == grown


def test_the_process_that_runs_a_graph_is_named(tmp_path: Path) -> None:
    graph = cues.Graph("shop", store=tmp_path / "store")
    graph.source("orders")

    @graph.stream("orders", "priced")
    def price(order: dict[str, Any]) -> dict[str, Any]:
        return order

    with graph.start():
        found = findings(tmp_path / "store", "store")
    assert found["owner"].facts["pids"] == [os.getpid()]
    assert "shop.price" in found["owner"].text


@pytest.mark.damages_stores
@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_store_that_cannot_be_opened_is_a_problem_with_its_own_hint(store: Path, damage: str) -> None:
    data = store / "data.mdb"
    data.write_bytes(data.read_bytes()[:5000] if damage == "truncated" else b"x" * 20000)
    found = command("doctor", store, "--json")
    (row,) = [row for row in map(json.loads, found.out.splitlines()) if row["check"] == "store"]
    assert found.code == 1 and row["state"] == "problem" and row["hint"]
    assert "problem" in found.err and "Try:" in found.err


@pytest.mark.parametrize(
    ("kind", "state"),
    [("nfs4", "problem"), ("fuse.sshfs", "problem"), ("tmpfs", "warning"), ("overlay", "warning"), ("ext4", "ok")],
)
def test_the_file_system_decides(kind: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = doctor.linux_mounts(
        f"1 0 8:1 / / rw shared:1 - xfs /dev/a rw\n2 1 0:5 / {tmp_path.resolve()} rw - {kind} host:/x rw\n"
    )
    monkeypatch.setattr(doctor, "_mounts", lambda: mounts)
    (finding,) = findings(tmp_path / "data", "file system").values()
    assert finding.state == state and finding.facts["type"] == kind.removeprefix("fuse.")
    assert bool(finding.hint) == (state != "ok")


def test_a_mount_point_with_a_space_and_the_last_mount_of_a_point(tmp_path: Path) -> None:
    mounts = doctor.linux_mounts(
        "1 0 8:1 / /a\\040b rw - ext4 /dev/a rw\n2 1 8:2 / /a\\040b rw opt:1 x:2 - nfs h:/ rw\n"
    )
    assert mounts == [("/a b", "ext4"), ("/a b", "nfs")]
    assert doctor.longest_mount(Path("/a b/c"), mounts) == ("nfs", "/a b")
    assert doctor.longest_mount(Path("/a bc"), mounts) == ("unknown", "")


def test_locks_that_other_processes_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a mount with local locks only: the lock succeeds here, and in the other process too."""
    monkeypatch.setattr(locks.fcntl, "lockf", lambda *_: None)
    assert findings(tmp_path, "locks")["locks"].state == "problem"


def test_a_file_system_that_refuses_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, kind: int, *_: int) -> None:
        if kind != locks.fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    assert findings(tmp_path, "locks")["locks"].state == "problem"


@pytest.mark.parametrize(
    ("answer", "check"),
    [({"seen": 0}, "shared memory"), ({"monotonic_ns": 0}, "monotonic clock")],
)
def test_memory_and_clock_of_two_processes(
    answer: dict[str, int], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.other_process
    monkeypatch.setattr(doctor, "other_process", lambda *given: real(*given) | answer)
    found = findings(tmp_path, "locks")
    assert {name for name, finding in found.items() if finding.state == "problem"} == {check}


@pytest.mark.parametrize(
    ("limit", "value", "check", "state"),
    [
        (resource.RLIMIT_NOFILE, 100, "open files", "warning"),
        (resource.RLIMIT_AS, 8 << 30, "address space", "warning"),
        (resource.RLIMIT_AS, 1 << 20, "address space", "problem"),
        (resource.RLIMIT_FSIZE, 1 << 20, "file size", "problem"),
    ],
)
def test_limits(
    limit: int, value: int, check: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (value if asked == limit else infinite, infinite))
    found = findings(tmp_path, "limits")
    assert found.pop(check).state == state
    assert {finding.state for finding in found.values()} == {"ok"}


def test_a_full_disk_a_slow_disk_and_a_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((1 << 20, "problem"), (512 << 20, "warning"), (1 << 40, "ok")):
        monkeypatch.setattr(doctor.free_space, "look", lambda _, free=free: Space(free, 64 << 20))
        assert findings(tmp_path, "disk")["disk"].state == state
    monkeypatch.setattr(doctor, "SYNC_SLOW_S", -1.0)
    assert findings(tmp_path, "write")["write"].state == "warning"
    now = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now() - 3600)
    clock = findings(tmp_path, "clock")["clock"]
    assert clock.state == "warning" and clock.facts["skew_s"] > 3000


def test_a_place_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> Iterator[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    assert findings(tmp_path, "write")["write"].state == "problem"
    assert findings(tmp_path, "locks") == {}


@pytest.mark.parametrize(
    ("installed", "check", "state", "words"),
    [
        ({"lmdb": "2.9"}, "packages", "problem", "lmdb 2.9 (needed: >=3.0)"),
        ({"rich": None}, "extra watch", "ok", "not installed"),
        ({"pyspark": None}, "extra spark", "warning", "pyspark is missing"),
        ({"pandas": "3.0.1"}, "extra spark", "warning", "pandas 3.0.1"),
    ],
)
def test_packages(
    installed: dict[str, str | None],
    check: str,
    state: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = ["lmdb>=3.0", 'rich>=13; extra == "watch"', 'moto[server]>=5; extra == "test"']
    needed += ['pyspark>=4.2; extra == "spark"', 'pandas<3,>=2.2; extra == "spark"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: needed)
    versions = dict.fromkeys(("lmdb", "rich", "pandas"), "3.0") | {"pandas": "2.3"} | installed
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, "99"))
    finding = findings(tmp_path, "packages")[check]
    assert finding.state == state and words in finding.text and "pip install -U 'cues-streams" in finding.hint


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("3.0", ">=3", True),
        ("2.10", ">=2.9", True),
        ("3.0rc1", "<3,>=2.2", False),
        ("2.1", ">=2.2", False),
        ("1", "", True),
    ],
)
def test_versions(version: str, bounds: str, fits: bool) -> None:
    assert doctor.fits(version, bounds) == fits


def test_java_is_asked_only_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> java.Java:
        raise errors.JavaNotFound("Spark needs Java.", "install one.", looked=["PATH: no java"])

    monkeypatch.setattr(java, "find", missing)
    monkeypatch.setattr(doctor, "_version", lambda package: "4.2")
    assert findings(tmp_path, "java")["java"].state == "warning"
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert findings(tmp_path, "java") == {}


def test_a_check_that_fails_is_a_problem_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(where: doctor.Place) -> Iterator[doctor.Finding]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    kept = {"write": broken, "disk": doctor.CHECKS["disk"]}
    monkeypatch.setattr(doctor, "CHECKS", kept)
    assert run(["doctor", str(tmp_path), "--table"]) == 1
    printed = capsys.readouterr()
    assert "Input/output error" in printed.out and "disk" in printed.out and "1 problem: write." in printed.err


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    found = command("doctor", tmp_path / "x.txt")
    assert found.code == 1 and "is not a Python file" in found.err and "Try:" in found.err
