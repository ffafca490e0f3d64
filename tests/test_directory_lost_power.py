"""Names in a shared directory that a process made, which died before it synced them: the next one syncs them first.

Whole drivers that die so, and the states of the disk after them, are the workload "drivers that die before a sync" of
test_disk_states.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from directory_steps import DriverRun, data_file, messages_of
from syncs import Call, noted

import cues
from cues import Graph, Stream, testing
from cues.spark.cluster import files as files_module
from cues.spark.cluster import operations
from cues.spark.cluster.batches import Batches
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.driver import id_of_graph
from cues.spark.cluster.files import ID, LocalFiles
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.publish import publish
from cues.spark.cluster.state_files import folder_of_state

STEPS, LOG = "_cues/steps/g.x", "q/_delta_log"


def same(message: dict[str, Any]) -> dict[str, Any]:
    return message


GRAPH = Graph("g", [Stream(same, "src", "q", id="x", errors=None)])


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(str(tmp_path / "queues"))


@pytest.fixture
def noting(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Call]]:
    """Begin to note the calls of the next process. Every folder is one whose name it has not synced."""
    monkeypatch.setattr(files_module, "_durable", set())
    return lambda: noted(monkeypatch, Path(files.url))


def made(calls: list[Call], folder: str) -> int:
    """The place of the first file that got its name in a folder."""
    return next(at for at, (call, name) in enumerate(calls) if call == "link" and os.path.dirname(name) == folder)


def die_at(point: str, act: Callable[[], object]) -> None:
    with testing.crash(point, how="raise"), pytest.raises(testing.Crashed):
        act()


@pytest.mark.parametrize("ours", [True, False])
def test_a_name_that_is_taken_is_durable_when_put_returns(
    files: LocalFiles, noting: Callable[[], list[Call]], ours: bool
) -> None:
    """Also that of a put which is repeated, because its answer was lost."""
    assert files.put("q/a.json", b"1")
    calls = noting()
    assert files.put("q/a.json", b"1" if ours else b"2") == ours
    assert calls[-1] == ("fsync", "q")


def test_a_file_that_is_found_is_durable_when_ensure_returns(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    """It is the identity of a queue, the id of a directory or the lineage of batches."""
    files.ensure("q/a.json", b"1")
    calls = noting()
    assert files.ensure("q/a.json", b"2") == b"1"
    assert calls == [("fsync", "q")]


def test_a_file_is_replaced_as_a_whole(files: LocalFiles, noting: Callable[[], list[Call]]) -> None:
    files.replace("q/a.json", b"1")
    calls = noting()
    files.replace("q/a.json", b"2")
    (at,) = (at for at, call in enumerate(calls) if call == ("replace", "q/a.json"))
    assert calls[at - 1][0] == "fsync" and calls[at - 1][1].startswith("q/.a.json.")
    assert calls[at + 1 :] == [("fsync", "q")] and files.read("q/a.json") == b"2"


def test_a_replacement_that_fails_leaves_the_old_file_alone(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.replace("q/a.json", b"1")

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", full)
        files.replace("q/a.json", b"2")
    assert files.read("q/a.json") == b"1" and os.listdir(files.path("q")) == ["a.json"]


def test_a_record_is_durable_before_its_files_are_forwarded(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    """Else the log may have the files of a record that is gone, and the directory is refused."""
    driver = DriverRun(files, GRAPH).claim()
    (stage,), queue = driver.stages, driver.queues["q"]
    die_at("spark.recorded", lambda: publish(stage.ledger, {queue: [data_file(queue, "g.x", 1, [{"i": 1}])]}))
    again = DriverRun(files, GRAPH)
    calls = noting()
    again.claim()
    assert calls.index(("fsync", STEPS)) < made(calls, LOG) < made(calls, STEPS)
    assert [message["i"] for message in messages_of(again.queues["q"])] == [1]


def test_an_entry_is_durable_before_its_processor_has_another_record(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    """Only the files of the last record are forwarded, so the messages of the entry would be lost with it."""
    driver = DriverRun(files, GRAPH).claim()
    (stage,), queue = driver.stages, driver.queues["q"]
    die_at("spark.forwarded", lambda: publish(stage.ledger, {queue: [data_file(queue, "g.x", 1, [{"i": 1}])]}))
    calls = noting()
    DriverRun(files, GRAPH).claim()
    assert ("fsync", LOG) in calls[: made(calls, STEPS)] and ("link", LOG) not in calls


def test_an_entry_that_is_read_on_is_durable(files: LocalFiles, noting: Callable[[], list[Call]]) -> None:
    reader = DriverRun(files, GRAPH).queues["q"]
    driver = DriverRun(files, GRAPH).claim()
    (stage,), queue = driver.stages, driver.queues["q"]
    publish(stage.ledger, {queue: [data_file(queue, "g.x", 1, [{"i": 1}])]})
    calls = noting()
    reader.read_on()
    assert calls == [("fsync", LOG)] and len(reader.live) == 1
    calls.clear()
    reader.read_on()
    assert calls == [], "nothing was read"


@pytest.mark.parametrize("again", [True, False])
def test_a_record_whose_sync_failed_counts_after_another_sync(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The put reports an error, and the record is there: its name may not be on the disk."""
    ledger = Ledger(files, "g.x", "driver")
    assert ledger.claim(None, {})
    sync, left = os.fsync, [1 if again else 2]

    def fails(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(STEPS) and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "EIO")
        sync(file)

    monkeypatch.setattr(os, "fsync", fails)
    if again:
        ledger.commit("step")
        assert ledger.now.number == 1 and left == [0]
    else:
        with pytest.raises(OSError, match="EIO"):
            ledger.commit("step")
        assert ledger.now.number == 0


def test_a_batch_that_another_driver_has_written_down_is_durable_before_it_is_committed(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    earlier = Batches(files, "g.x")
    earlier.begin({"id": "1", "settings": {}})
    batch = earlier.put(0, {"src": (1, 5)})
    batches = Batches(files, "g.x")
    calls = noting()
    batches.begin({"id": "2", "settings": {}})
    assert calls == [("fsync", batches.folder)]
    calls.clear()
    assert batches.found(0) == batch and calls == [("fsync", batches.folder)]  # it may have come since
    calls.clear()
    assert batches.put(0, {"src": (1, 7)}) == batch and ("fsync", batches.folder) in calls
    calls.clear()
    batches.change({"id": "1", "settings": {"a": "b"}})
    assert calls[-2:] == [("replace", f"{batches.folder}/plan.json"), ("fsync", batches.folder)]


def test_what_has_read_messages_is_durable_before_they_are_purged(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    """A reader of another graph may have died before it synced the record with its position."""
    DriverRun(files, GRAPH).claim().feed("src", [{"i": n} for n in range(9)], lambda: 3).run()
    calls = noting()
    with operations.running_none(files, "g") as driver:
        operations.purge(driver, "src", 4)
    assert calls.index(("fsync", STEPS)) < made(calls, "src/_delta_log")


def test_the_new_id_of_a_graph_is_durable_before_its_files_go_and_they_are_durably_gone_at_the_end(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    """With the old id, a target would take the graph that begins anew for the old one, and miss its messages.

    The store from which the directory was fed is deleted next; the directory would refuse another one.
    """
    DriverRun(files, GRAPH).claim().feed("src", [{"i": 1}]).run()
    found = operations.files_of(files, "g")
    assert found is not None
    files.put(f"{folder_of_state('g.x')}/x", b"")
    calls = noting()
    operations.remove(files, "g", found)
    name = id_of_graph("g")
    assert calls.index(("replace", name)) < calls.index(("fsync", "_cues"))
    first = next(at for at, (call, path) in enumerate(calls) if call == "unlink")
    assert ("fsync", "_cues") in calls[calls.index(("replace", name)) : first]
    gone = [call for call in calls if call[0] == "fsync"][-3:]
    assert gone == [("fsync", "."), ("fsync", "_cues"), ("fsync", "_cues/steps")]


def test_the_id_of_a_graph_is_durable_when_a_driver_has_it(files: LocalFiles, noting: Callable[[], list[Call]]) -> None:
    """Targets outside of the directory get it."""
    files.put(ID, b'{"id": "1"}')
    files.replace(id_of_graph("g"), b'{"id": "2"}')
    calls = noting()
    driver = DriverRun(files, GRAPH).driver
    assert driver.store_id == "2" and calls[0] == ("fsync", "_cues")


def test_the_identity_of_a_queue_is_durable_when_a_driver_has_it(
    files: LocalFiles, noting: Callable[[], list[Call]]
) -> None:
    identity = QueueDirectory(files, "q", cues.QueueOptions()).identity
    calls = noting()
    assert QueueDirectory(files, "q", cues.QueueOptions()).identity == identity
    assert calls == [("fsync", "q/_cues")]
