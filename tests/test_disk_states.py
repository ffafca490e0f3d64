"""The power goes at any moment: the states of the disk that are possible then, each opened and continued.

A workload runs in a process whose writes and syncs are recorded (disk_states.py). Beside them it leaves marks that say
what was acknowledged (disk_workloads.py).

Each state is opened by the code of Cues. A "disk" store has everything that was marked, and its check finds nothing. A
"process" store has everything up to its last sync, or is refused. Then the workload continues, and its results are
those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import disk_states
import forks
import pytest
import scenarios
from disk_states import AT_ONCE, LINK, MARK, RENAME, SYNC, UNLINK, Record, kind_of
from disk_workloads import APPENDS, message
from sets import bounded
from test_crashes import judge
from test_power import by_message

import cues
from cues.errors import StoreDamaged
from cues.storage import timeline
from cues.storage.pages import DataFile

pytestmark = [
    pytest.mark.interpreted,  # marks are made at the crash points of the core
    pytest.mark.skipif(disk_states.compiler() is None, reason="no C compiler (cc) for tests/disk_recorder.c"),
]

# --- the judge ----------------------------------------------------------------------------------


def latest(marks: list[str], kind: str) -> dict[str, Any]:
    """The last marks of a kind, by store or file."""
    found: dict[str, Any] = {}
    for each in map(json.loads, marks):
        for where, value in each.get(kind, {}).items():
            found[where] = {**found[where], **value} if isinstance(value, dict) and where in found else value
    return found


def wrong_with(marks: list[str], found: dict[str, Any], durabilities: dict[str, str]) -> str:
    """Say what is lost of that which was acknowledged; empty, if nothing is."""
    for kind, durability in (("disk", "disk"), ("synced", "process")):
        for where, logs in latest(marks, kind).items():
            if durabilities[where] != durability:
                continue
            store = found["stores"].get(where)
            if store is None:
                return f"store {where} is lost"
            if "refused" in store:
                if durability == "disk":
                    return f"store {where}: {store['refused']}"
                continue
            if store["check"]:
                return f"store {where}: {store['check']}"
            lost = {log: (end, store["ends"].get(log)) for log, end in logs.items() if store["ends"].get(log, 0) < end}
            if lost:
                return f"store {where} has lost messages, which end before: {lost}"
    for name, content in latest(marks, "files").items():
        if found["files"].get(name) != content:
            return f"file {name} is lost or changed"
    for name, count in latest(marks, "has").items():
        if "has" in found and found["has"].get(name, 0) < count:
            return f"{name}: {count} were acknowledged, and {found['has'].get(name, 0)} are there"
    return ""


class Workload:
    """A workload by its name: how it is recorded and continued, and how its results are judged."""

    def __init__(
        self, run: str, argument: str, module: str = "disk_workloads", needs: str = "", **durabilities: str
    ) -> None:
        """``needs``: modules that the children import only once; without the first one it is skipped."""
        self.run, self.argument, self.module, self.needs, self.durabilities = run, argument, module, needs, durabilities

    def judge(self, expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
        after = found["after"]
        if self.run == "scenario":
            if self.durabilities["abroad"] == "process":  # it does not know that a timeline has begun in another store
                after["problems"] = [each for each in after["problems"] if "follows a snapshot" not in each]
            judge(scenarios.find(self.argument), by_message(expected, expected), by_message(expected, after), where)
        elif self.run in ("files", "cut"):
            assert after == {**expected, "changed": []}, where
        elif self.module == "disk_targets":
            assert after == expected, f"{where}: {after}, not {expected}"
        else:
            assert after["end"] >= APPENDS, where
            assert after["found"] == [{"wrong": [], "check": []}] * 2, where

    @property
    def may_be_refused(self) -> bool:
        return "process" in self.durabilities.values()


def of_graph(name: str, home: str, abroad: str) -> Workload:
    return Workload(
        "scenario", name + ("" if home == abroad == "disk" else f" ({home}, {abroad})"), home=home, abroad=abroad
    )


def beside(run: str, argument: str, needs: str = "") -> Workload:
    durability = argument if argument == "process" else "disk"
    return Workload(run, argument, "disk_targets", needs, home=durability)


WORKLOADS = {
    "appends to a disk store": Workload("appends", "disk", home="disk"),
    "few appends": Workload("small", "disk", home="disk"),
    "appends to a process store": Workload("appends", "process", home="process"),
    "files": Workload("files", "", home="disk"),
    "files, compressed": Workload("files", "gzip", home="disk"),
    "files, one cut": Workload("cut", "", home="disk"),
    "files that are deleted": beside("consumed", "delete"),
    "files that are moved": beside("consumed", "move"),
    "a graph": Workload("scenario", "stream on disk", home="disk", abroad="disk"),
    "forwarding": of_graph("stream abroad on disk", "disk", "disk"),
    "forwarding to a process store": of_graph("stream abroad", "disk", "process"),
    "forwarding from a process store": of_graph("stream abroad", "process", "disk"),
    "forwarding between process stores": of_graph("stream abroad", "process", "process"),
    "reading from a process store": of_graph("stream from abroad", "disk", "process"),
    "a shared directory": beside("directory", "disk", "pyspark directory_steps deltalake"),
    "a shared directory of a process store": beside("directory", "process", "pyspark directory_steps deltalake"),
    "drivers that die before a sync": beside("unsynced", "disk", "pyspark directory_steps deltalake"),
    "makers that die before a sync": beside("makers", "disk"),
    "backups and restores": beside("backup", "disk"),
    "compaction": beside("compact", "disk"),
    "compaction of a process store": beside("compact", "process"),
    "a compaction that fails": beside("full", "disk"),
    "a sink into SQLite": beside("sink", "sqlite"),
    "a table in SQLite": beside("sink", "table-sqlite", "sqlalchemy"),
    "a Delta table": beside("sink", "delta", "deltalake"),
    "an Iceberg table": beside("sink", "iceberg", "pyiceberg pyiceberg.catalog.sql pyiceberg.io.pyarrow"),
}


def children_of(workload: Workload) -> forks.Forks:
    return forks.shared(*(workload.needs.split() and [*workload.needs.split(), workload.module]))


class Recording(NamedTuple):
    """What a workload did, and its results without a loss of power."""

    workload: Workload
    records: list[Record]
    expected: dict[str, Any]


SEED = 1
Recorder = Callable[[str], Recording]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Record a workload, once, and compare the records with the files that it left."""
    directory = tmp_path_factory.mktemp("recordings")

    @functools.cache
    def make(name: str) -> Recording:
        workload = WORKLOADS[name]
        if workload.needs:
            pytest.importorskip(workload.needs.split()[0])
        beside = directory / str(len(list(directory.iterdir())))
        beside.mkdir()
        root = beside / "root"
        made = disk_states.record(f"{workload.module}:run_{workload.run}", root, beside, workload.argument)
        missed = disk_states.differences(disk_states.whole(made), root, beside / "copy")
        assert not missed, f"the recorder has missed writes to {missed}"
        assert not (silent := unmarked(made, workload, root)), f"{name}: {silent}"
        children = children_of(workload)
        continued = children.run(f"{workload.module}:continue_{workload.run}", str(root), workload.argument)
        return Recording(workload, made, continued.value)

    return make


def unmarked(records: list[Record], workload: Workload, root: Path) -> str:
    """Say which store has messages that no mark acknowledges, though it was closed: its judge would not miss them."""
    marks = [record.first for record in records if record.kind == MARK]
    closed, committed = latest(marks, "synced"), latest(marks, "disk")
    for where, durability in workload.durabilities.items():
        path = root / "store" / ("abroad" if where == "abroad" else "")
        if not (path / "data.mdb").exists():
            continue
        ends = closed.get(where, {})
        marked = committed.get(where, {}) if durability == "disk" else ends
        if not ends or any(marked.get(log, 0) < end for log, end in ends.items() if end > 1):
            return f"store {where} was closed with logs that end before {ends}; acknowledged were {marked}"
    return ""


def happened(record: Record) -> bool:
    return False


def lose_power(
    recording: Recording,
    directory: Path,
    most: int | None = None,
    ignored: Callable[[Record], bool] = happened,
    within: range | None = None,
    chosen: Any = disk_states.choices,
) -> tuple[Counter[str], str]:
    """Count the states that are exact and that are refused; and say what is wrong with the first other one."""
    workload, records, expected = recording
    found: Counter[str] = Counter()
    wanted = disk_states.states(records, SEED, most, ignored, chosen)
    if within is not None:
        wanted = [state for state in wanted if state.at in within]
    for state, marks, outcome in judged(workload, disk_states.replay(records, wanted, directory, ignored), directory):
        where = f"seed {SEED}, after record {state.at} of {len(records)}, {state.choice}"
        if outcome.value is None:
            return found, f"{where}: signal {outcome.signal} {outcome.error}"
        if wrong := wrong_with(marks, outcome.value, workload.durabilities):
            return found, f"{where}: {wrong}"
        if "refused" in outcome.value:
            if not workload.may_be_refused:
                return found, f"{where}: {outcome.value['refused']}"
            found["refused"] += 1
            continue
        try:
            workload.judge(expected, outcome.value, where)
        except AssertionError as error:
            return found, str(error)
        found["exact"] += 1
    return found, ""


AT_A_TIME = 32
"""So many states are written before they are judged."""


def judged(
    workload: Workload, replayed: Iterator[tuple[disk_states.State, Path, list[str]]], directory: Path
) -> Iterator[tuple[disk_states.State, list[str], forks.Outcome]]:
    """Open and continue each state in a child, which it may kill.

    A child takes many states, since its first one costs ten times as much as a later one: a forked process copies each
    page that it touches, imports modules and makes its templates. After a state that ends the child nothing follows.
    """
    children, results = children_of(workload), directory / "results"
    while waiting := list(itertools.islice(replayed, AT_A_TIME)):
        while waiting:
            paths = [str(path) for _, path, _ in waiting]
            arguments = (workload.module, workload.run, paths, workload.argument, workload.durabilities, str(results))
            results.write_bytes(b"")  # the child may end before it writes one
            outcome = children.wait(children.start("disk_workloads:look_and_continue_all", *arguments))
            found = [*unpickled(results)]
            for (state, path, marks), value in zip(waiting, found, strict=False):
                shutil.rmtree(path)
                yield state, marks, outcome._replace(value=value)
            del waiting[: len(found)]
            if outcome.value is None:
                state, _, marks = waiting[0]
                yield state, marks, outcome
                return


def unpickled(path: Path) -> Iterator[Any]:
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):  # its writer may have died
        while True:
            yield pickle.load(file)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A directory for states. It is in memory if the machine has that: the syncs of a judge wait for no disk then."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="cues-states-") as name:
        yield Path(name)


# --- tests --------------------------------------------------------------------------------------


FEW = {
    "files, compressed": 10,
    "files, one cut": 4,
    "files that are deleted": 4,
    "files that are moved": 4,
    "forwarding": 10,
    "reading from a process store": 10,
    "a shared directory": 3,
    "backups and restores": 4,
    "compaction of a process store": 5,
    "a sink into SQLite": 8,
    "a Delta table": 4,
    "an Iceberg table": 4,
}
"""The numbers of states in the slow set; the long set has all workloads, with a thousand."""


def few_and_many(slow: Iterable[Any], values: Iterable[Any], few: int, many: int) -> list[Any]:
    """Return values of a test with a number of states: some with few in the slow set, all with many in the long set."""
    return [pytest.param(value, few, marks=pytest.mark.slow) for value in slow] + [
        pytest.param(value, many, marks=pytest.mark.long) for value in values
    ]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(pytest.param(name, most, marks=pytest.mark.slow) for name, most in FEW.items()),
        *(pytest.param(name, 1000, marks=pytest.mark.long) for name in WORKLOADS),
    ],
)
def test_every_state_after_a_lost_power_is_exact_or_refused(
    name: str, most: int, recording: Recorder, quick: Path
) -> None:
    """What a "disk" store and a sink of files have acknowledged is there; nothing is lost or doubled."""
    found, wrong = lose_power(recording(name), quick, most)
    assert not wrong, f"{name}: {wrong}"
    assert found["exact"], found
    print(f"{name}: {dict(found)}")


@bounded("most", 40, None)  # type: ignore[arg-type]
def test_all_states_of_a_small_workload(most: int | None, recording: Recorder, quick: Path) -> None:
    """At each moment each subset of up to ten writes and names; the long set makes all of these states."""
    found, wrong = lose_power(recording("few appends"), quick, most, chosen=disk_states.every_choice)
    assert not wrong, wrong
    print(f"few appends, all states: {dict(found)}")
    assert found["exact"] >= 40


DYING = {
    "drivers that die before a sync": re.compile(r"/(_delta_log|_cues/steps/[^/]*)/\d+\.json$"),
    "makers that die before a sync": re.compile(r"/(data\.mdb|store|\d+|made|restored|compacted)$"),
}
"""Workloads of processes that die before a sync, and the names that the next process relies on: records and entries of
logs; data files and the directories above."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DYING)
def test_a_name_that_a_process_did_not_sync_before_it_died_is_not_lost_later(
    name: str, recording: Recorder, quick: Path
) -> None:
    """Each such name is lost alone, after the next process has gone on from it."""
    chosen = functools.partial(disk_states.old_names, wanted=DYING[name])
    found, wrong = lose_power(recording(name), quick, 40, chosen=chosen)
    assert not wrong, wrong
    print(dict(found))
    assert found["exact"]


MOMENTS = {
    "a store gets its data file": ("forwarding", LINK, "/store/data.mdb"),
    "a compressed file is finished": ("files, compressed", UNLINK, "1.open"),
    "an append after a compaction that failed": ("a compaction that fails", MARK, '{"in": 7}}, "files": {}}'),
    "a file that was cut is finished": ("files, one cut", RENAME, "/out/g.save-0-00000001.jsonl"),
    "deleted files are forgotten": ("files that are deleted", UNLINK, "/store/open"),
    "moved files are forgotten": ("files that are moved", UNLINK, "/store/open"),
    "a new process store is closed": ("reading from a process store", UNLINK, "/store/abroad/open"),
}
"""Moments at which files were lost or refused; each with its workload, and the record in its middle."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_all_states_around_one_moment(moment: str, recording: Recorder, quick: Path) -> None:
    name, kind, ending = MOMENTS[moment]
    made = recording(name)
    at = next(
        at for at, each in enumerate(made.records) if each.kind == kind and (each.second or each.first).endswith(ending)
    )
    found, wrong = lose_power(made, quick, within=range(at - 1, at + 3))
    assert not wrong, wrong
    print(f"{moment}: {dict(found)}")
    assert found["exact"] > 5


CONTROLS = [
    ("forwarding", "fdatasync data.mdb"),
    ("files, compressed", "fsync N-N.next"),
    ("forwarding", "write at once"),
    ("forwarding", "fsync store"),
    ("appends to a disk store", "fdatasync data.mdb"),
    ("appends to a disk store", "write at once"),
    ("files", "fsync N-N.open"),
    ("files", "fsync N.json.next"),
    ("files", "fsync g.save"),
    ("files, one cut", "fsync N-N.open"),
    ("files that are deleted", "fsync in"),
    ("files that are moved", "fsync to"),
    ("a shared directory", "fsync .N.json.N"),
    ("a shared directory", "fsync N.checkpoint.parquet"),
    ("backups and restores", "fsync backups"),
    ("compaction", "fsync data.mdb.compact"),
    ("a sink into SQLite", "fdatasync target.db-wal"),
    ("a Delta table", "fsync N.json"),
    ("an Iceberg table", "fdatasync target"),
]
"""A workload, and a kind of its syncs that has not happened."""


@pytest.mark.parametrize(("control", "most"), few_and_many(CONTROLS[:2], CONTROLS, 40, 1000))
def test_a_sync_that_is_left_out_is_found(
    control: tuple[str, str], most: int, recording: Recorder, quick: Path
) -> None:
    """The control: the same judge over the same records, but these syncs make nothing durable."""
    name, kind = control
    made = recording(name)
    assert any(kind_of(record) == kind for record in made.records if record.kind == SYNC or record.flags & AT_ONCE)
    found, wrong = lose_power(made, quick, most, lambda record: kind_of(record) == kind)
    print(f"{name} without {kind}: after {sum(found.values())} states")
    assert wrong, f"{name}: no state is wrong without {kind}"


@pytest.mark.damages_stores
@pytest.mark.parametrize("behind", [1, 5], ids=["the last two commits", "commits with a gap"])
def test_pages_of_different_moments_are_refused_before_lmdb_follows_them(tmp_path: Path, behind: int) -> None:
    """The power goes in the middle of a "process" store's writes; LMDB would end the process at such a page.

    The pages of the two last commits may be from different moments too, which hinders no count of the pages.
    """
    path = tmp_path / "store"
    with cues.open(path, durability="process", map_size=scenarios.MAP_BYTES) as store:
        appender = store.queue("in").appender()
        for n in range(40):
            appender.write(message(n))
            if n == 40 - behind - 1:
                early = (path / "data.mdb").read_bytes()
        assert store.check() == []
        whole = (path / "data.mdb").read_bytes()
        with (path / "data.mdb").open("rb") as file:
            (_, before) = DataFile(file.fileno()).metas
    (path / "open").write_text(" ".join(["another-boot", *timeline.inodes(path)]))
    data = bytearray(whole)
    data[20 * 4096 : 21 * 4096] = whole[22 * 4096 : 23 * 4096]
    if behind > 1:
        older = before.txnid % 2  # the page in which LMDB keeps it
        data[older * 4096 : (older + 1) * 4096] = early[older * 4096 : (older + 1) * 4096]
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(StoreDamaged, match="page"):
        cues.open(path)
    with cues.open(path, readonly=True) as store:  # the check ends after the count of the pages
        assert store.check()[-1].startswith("The rest was not checked")
