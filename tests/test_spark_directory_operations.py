"""An operator's commands on a shared directory, a path or an object store, without Spark."""

from __future__ import annotations

import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    pass

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import terminal
from test_spark_queues import filled

import cues
from cues import codec
from cues.spark.cluster.data import Writer, numbered
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.driver import Driver
from cues.spark.cluster.files import open_files
from cues.spark.cluster.ledger import Ledger


def made(place: Path | str, count: int) -> None:
    """A directory as a driver leaves it, with the messages n = 0 … of the queue ``in``."""
    files = open_files(str(place))
    Driver(None, files, "g", None, lambda event: None, lambda seconds: False)
    filled(place, count)  # type: ignore[arg-type]
    feeder = Ledger(files, "g.in.feed", "nobody")
    assert feeder.claim(None, {"in": ("00", 1)})
    feeder.commit("step", positions={"in": ("00", count + 1)})


def add(place: Path | str, *numbers: int, record: int = 2, time_us: int = 0) -> None:
    """Append messages to ``in``, as a feeder does."""
    directory = QueueDirectory(open_files(str(place)), "in", cues.QueueOptions())
    writer = Writer(directory.files, "in", "g.in.feed", record, time_us)
    writer.add([codec.pack({"n": n}) for n in numbers], [None] * len(numbers), None)
    file = writer.close()
    assert file is not None
    directory.publish("g.in.feed", record, numbered([file], directory.next))


def printed(*arguments: object) -> list[Any]:
    """The lines of JSON that a command prints; it succeeds."""
    result = terminal.cues(*arguments)
    assert result.code == 0, result
    return [json.loads(line) for line in result.out.splitlines()]


def tail(*arguments: object) -> list[int]:
    return [message["n"] for message in printed("tail", *arguments)]


def refused(code: int, *arguments: object) -> str:
    """The error of a command, which names what to try."""
    result = terminal.cues(*arguments)
    assert result.code == code and result.out == "" and "Try: " in result.err, result
    return result.err


# --- reading ------------------------------------------------------------------------------------


def test_the_commands_read_an_object_store(object_store: str) -> None:
    made(object_store, 20)
    assert tail(f"{object_store}#in", "-n", 3) == [17, 18, 19]
    assert printed("status", object_store)[0]["messages"] == 20
    (queue,) = printed("queues", object_store)
    assert (queue["queue"], queue["first_index"], queue["last_index"], queue["graph"]) == ("in", 1, 20, "g")
    assert printed("check", object_store) == [{"store": object_store, "problems": 0}]
    files = open_files(object_store)
    (name,) = [name for name in files.names("in") if name.endswith(".parquet")]
    files.delete(f"in/{name}")
    damage = terminal.cues("check", object_store)
    assert damage.code == 1 and json.loads(damage.out)["problem"] == f"{name} of queue 'in' is missing."
    nothing = f"{object_store}-of-nobody"
    assert f"no directory of cues run --queues at {nothing}" in refused(1, "tail", f"{nothing}#in")
    assert open_files(nothing).names("") == []
    assert "hdfs:// is not supported" in refused(1, "status", "hdfs://flights")


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    for place in (tmp_path / "none", f"file://{tmp_path}/none"):
        for command in ("status", "check", "queues"):
            assert "There is no store at" in refused(1, command, place)
        assert "There is no store at" in refused(1, "tail", f"{place}#in")
    assert not (tmp_path / "none").exists()


def test_commands_for_stores_refuse_a_directory(tmp_path: Path) -> None:
    made(tmp_path, 3)
    (tmp_path / "read me").write_text("a file of somebody else")
    before = sorted(tmp_path.rglob("*"))
    for command in (["send", "--create"], ["export"], ["import"], ["compact"]):
        more = ["x.jsonl"] if command == ["import"] else ["n=1"] if command[0] == "send" else []
        target = tmp_path if command == ["compact"] else f"{tmp_path}#in"
        assert "is for stores" in refused(2, *command, target, *more)
    assert "is for stores" in refused(2, "queues", tmp_path, "--all")
    assert sorted(tmp_path.rglob("*")) == before


def test_queues_are_listed(tmp_path: Path) -> None:
    made(tmp_path, 3)
    (row,) = printed("queues", f"file://{tmp_path}")
    assert row["queue"] == "in" and row["messages"] == 3 and row["files"] == 1 and row["graph"] == "g"
    assert printed("queues", f"{tmp_path}#in") == [row]
    titles, line = terminal.cues("queues", tmp_path, "--table").out.splitlines()
    assert titles.endswith("WRITTEN BY") and line.split()[:4] == ["in", "3", "1", "3"]
    assert f"cues queues {tmp_path}#in" in refused(1, "queues", f"{tmp_path}#inn")
    shutil.rmtree(tmp_path / "in")
    assert "has no queues yet" in terminal.cues("queues", tmp_path, "--table").out


def test_tail_begins_at_an_index_or_a_time(tmp_path: Path) -> None:
    made(tmp_path, 5)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    add(tmp_path, 5, 6, time_us=int(noon.timestamp() * 1e6))
    add(tmp_path, 7, 8, record=3, time_us=int(noon.timestamp() * 1e6) + 1)
    queue = f"{tmp_path}#in"
    assert tail(queue, "-n", 2) == [7, 8]
    assert tail(queue, "--from", "start", "-n", 3) == [0, 1, 2]
    assert tail(queue, "--from", "8") == [7, 8]
    assert tail(queue, "--from", "end") == []
    assert tail(queue, "--from", noon.isoformat()) == [5, 6, 7, 8]
    assert tail(queue, "--from", "2026-01-31T12:00:00.000001Z") == [7, 8]
    assert tail(queue, "--from", "2026-01-31T12:00:01Z") == []
    assert tail(queue, "--where", "n % 2 == 0", "-n", 3) == [4, 6, 8]
    assert tail(queue, "--where", "n % 2 == 0", "--from", "start", "-n", 2) == [0, 2]
    assert "the queue ends before 10" in refused(1, "tail", queue, "--from", "11")
    assert "has only one" in refused(2, "tail", f"{queue}/3")
    assert tail(f"{queue}/0", "-n", 1) == [8]


def test_tail_follows_a_queue_until_it_is_interrupted_or_the_queue_is_gone(tmp_path: Path) -> None:
    made(tmp_path, 3)
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "-n", "2") as following:
        following.until('{"n": 2}\n')
        add(tmp_path, 3)
        appended = time.monotonic()
        following.until('{"n": 3}\n')
        assert time.monotonic() - appended < 3  # a second, and some for a busy machine
        following.signal()
        assert following.wait() == 130
        assert following.text == "".join(f'{{"n": {n}}}\n' for n in (1, 2, 3))
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "--from", "end", "-n", "1") as one:
        until_it_reads(tmp_path, one)
        assert one.wait() == 0
    with terminal.Command("tail", "-f", f"{tmp_path}#in", "-n", "1") as orphan:
        orphan.until("\n")
        shutil.rmtree(tmp_path / "in")
        assert orphan.wait() == 1
        assert "The queue 'in' is not in" in orphan.text and "Try: " in orphan.text


def until_it_reads(place: Path, command: terminal.Command) -> None:
    """Append messages until the command, which waits for one, has printed it."""
    for record in range(10, 100):
        add(place, record, record=record)
        time.sleep(0.2)
        if command.process.poll() is not None:
            return
