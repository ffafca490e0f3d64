"""Frames that keep state commit each batch once, whatever happens to the driver and to Spark's checkpoint.

Spark's part is simulated, without Java: offsets, state and finished batches in a checkpoint, in the order in which
Spark writes them. The sources of the query, the commits and the directory are those of the engine.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sets import slow_except

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import pyarrow as pa
from click.testing import CliRunner
from directory_steps import DriverRun, FaultyFiles, Frame, Message, messages_of, metadata_of
from pyspark.sql import types as T

import cues
from cues import Graph
from cues.cli.seek import seek
from cues.errors import CuesError, Diverged, Fenced, GraphError, MessagesPurged, TopologyChanged
from cues.queues.options import Retention
from cues.spark.cluster import batches as batches_module
from cues.spark.cluster import engine, inspection, operations
from cues.spark.cluster.batch_stream import BatchStream
from cues.spark.cluster.batches import Batches
from cues.spark.cluster.queries import FrameQuery
from cues.spark.options import READ_STREAM, ReadOptions
from cues.spark.plans import QueryPlan
from cues.spark.reading import ROW

OUT = T.StructType([T.StructField("k", T.LongType()), T.StructField("n", T.LongType())])
FINAL = -1
"""The key of the row that gives the number of all messages, in the batch that closes."""


class Death(BaseException):
    """The process ends at this point."""


class ConcurrentUpdate(Exception):
    """Spark finds that two queries write one checkpoint."""


class Rows(Frame):
    """The rows of a batch."""

    @property
    def write(self) -> Any:
        writer = SimpleNamespace(save=lambda: None)
        writer.mode = writer.format = lambda text: writer
        return writer


class Spark:
    """A query that counts the messages of each key. The state after a batch is a file of the checkpoint."""

    def __init__(self, stage: FrameQuery, sources: tuple[str, ...] = ()) -> None:
        stage.prepare({})
        self.stage = stage
        self.files = stage.driver.files
        names = sources or tuple(port.binding for port in stage.node.inputs)
        options = [ReadOptions.of(stage.options_of(name), READ_STREAM) for name in names]
        self.streams = [BatchStream(ROW, each, 1) for each in options]
        self.folder = stage.checkpoint
        self.ran: list[int] = []

    def run(self, most: int = 1000) -> Spark:
        """Run batches until there are no more, as a query does that starts with this checkpoint."""
        numbers = [int(name) for name in self.files.names(f"{self.folder}/offsets")]
        at = max(numbers, default=-1)
        if at >= 0 and self.files.size(f"{self.folder}/commits/{at}") is None:
            self.batch(at)
        while len(self.ran) < most:
            before = self.offsets(at)
            after = [stream.latestOffset(offset, None) for stream, offset in zip(self.streams, before)]  # type: ignore[arg-type]
            if after == before:
                break
            at += 1
            lines = ["v1", "{}", *map(json.dumps, after)]
            if not self.files.put(f"{self.folder}/offsets/{at}", "\n".join(lines).encode()):
                raise ConcurrentUpdate
            self.batch(at)
        return self

    def offsets(self, number: int) -> list[dict[str, Any]]:
        if number < 0:
            return [stream.initialOffset() for stream in self.streams]
        raw = self.files.read(f"{self.folder}/offsets/{number}")
        assert raw is not None
        return [json.loads(line) for line in raw.decode().splitlines()[2:]]

    def batch(self, number: int) -> None:
        counts: Counter[str] = Counter()
        if number:
            raw = self.files.read(f"{self.folder}/state/{number - 1}.json")
            assert raw is not None, "the state is missing"
            counts.update(json.loads(raw))
        changed: dict[str, None] = {}
        for stream, start, end in zip(self.streams, self.offsets(number - 1), self.offsets(number)):
            for part in stream.partitions(start, end):
                for rows in stream.read(part):
                    for index in rows.column("index").to_pylist():
                        key = str(index % 5)
                        counts[key] += 1
                        changed[key] = None
        found = [(int(key), counts[key]) for key in sorted(changed)] or [(FINAL, sum(counts.values()))]
        table = pa.record_batch({"k": [k for k, _ in found], "n": [n for _, n in found]})
        state = f"{self.folder}/state/{number}.json"
        text = json.dumps(dict(sorted(counts.items()))).encode()
        before = self.files.read(state)
        assert before is None or before == text, "a repeated batch has another state"
        self.files.put(state, text)
        self.stage.commit_batch(Rows([[table]], OUT), number)
        self.files.put(f"{self.folder}/commits/{number}", b"v1")
        self.ran.append(number)


COUNT = 24
GIVEN: list[Message] = [{"i": index} for index in range(1, COUNT + 1)]


def graph(size: int = 15, inputs: Any = "src", **options: Any) -> Graph:
    made = Graph("g", **options)
    made.frame(inputs, "out", id="f", batch_size=size)(lambda *given, **named: given)
    return made


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def opened(files: FaultyFiles, made: Graph | None = None, closes: bool = True) -> DriverRun:
    return DriverRun(files, made or graph(), queries={"g.f": QueryPlan("update", closes)})


def started(files: FaultyFiles, count: int = COUNT, made: Graph | None = None) -> Spark:
    """A driver whose source queue has ``count`` messages, with its query."""
    return Spark(opened(files, made).feed("src", GIVEN[:count]).claim().stage)


def expect_exact(files: FaultyFiles, count: int = COUNT) -> None:
    """Every count of a key is there once, in order, and the last one is that of all messages."""
    run = opened(files)
    rows = [(m["k"], m["n"]) for m in messages_of(run.queues["out"])]
    assert len(rows) == len(set(rows)), "rows twice"
    by_key: dict[int, list[int]] = {}
    for key, n in rows:
        by_key.setdefault(key, []).append(n)
    assert all(counts == sorted(counts) for counts in by_key.values())
    assert by_key.pop(FINAL)[-1] == count
    assert {key: counts[-1] for key, counts in by_key.items()} == Counter(index % 5 for index in range(1, count + 1))


def checkpoint(files: FaultyFiles) -> Path:
    return Path(files.path("_cues/checkpoints/g.f"))


# --- crashes --------------------------------------------------------------------------------------


def changes(seen: list[tuple[str, str]]) -> Callable[[str, str], None]:
    """An interruption that notes the changes of the directory."""

    def note(access: str, name: str) -> None:
        if access in ("put", "was put", "create", "was created", "delete"):
            seen.append((access, name))

    return note


def deadly(number: int) -> Callable[[str, str], None]:
    """An interruption that ends the process at the change of this number, before it or after it."""
    left = iter(range(number))

    def die(access: str, name: str) -> None:
        if access in ("put", "was put", "create", "was created", "delete") and next(left, None) is None:
            raise Death(f"{access} {name}")

    return die


def kept(files: FaultyFiles, place: Path) -> None:
    """The checkpoint is there."""


def deleted(files: FaultyFiles, place: Path) -> None:
    """The checkpoint is gone."""
    shutil.rmtree(checkpoint(files), ignore_errors=True)


def put_back(files: FaultyFiles, place: Path) -> None:
    """An older copy of the checkpoint was put back."""
    deleted(files, place)
    shutil.copytree(place / "older", checkpoint(files))


@pytest.mark.slow
@pytest.mark.parametrize("damage", slow_except([put_back], [kept, deleted, put_back]))
def test_a_driver_that_dies_anywhere_and_loses_its_checkpoint_is_exact(tmp_path: Path, damage: Any) -> None:
    """It dies before and after every change of the directory: offsets, state, files, record, log, end of the batch."""
    template = FaultyFiles(str(tmp_path / "template"))
    started(template, 10).run()
    shutil.copytree(checkpoint(template), tmp_path / "older")
    seen: list[tuple[str, str]] = []
    run = opened(template).feed("src", GIVEN[:10])
    shutil.copytree(template.url, tmp_path / "before")
    template.interrupt = changes(seen)
    Spark(run.feed("src", GIVEN).claim().stage).run()
    template.interrupt = lambda access, name: None
    expect_exact(template)
    points = [number for number, (access, name) in enumerate(seen) if "feed" not in name]
    assert len(points) > 20
    for number in points:
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", place)
        files = FaultyFiles(str(place))
        with pytest.raises((Death, CuesError)):
            run = opened(files)
            files.interrupt = deadly(number)
            Spark(run.feed("src", GIVEN).claim().stage).run()
            raise AssertionError
        files.interrupt = lambda access, name: None
        damage(files, tmp_path)
        started(files).run()
        expect_exact(files)
        shutil.rmtree(place)


@pytest.mark.slow
def test_a_driver_that_another_one_overtakes_anywhere_commits_nothing_more(tmp_path: Path) -> None:
    """Both use one checkpoint for a moment. The second runs to its end at each change that the first one makes."""
    template = FaultyFiles(str(tmp_path / "template"))
    started(template, 10).run()
    seen: list[tuple[str, str]] = []
    shutil.copytree(template.url, tmp_path / "before")
    run = opened(template).feed("src", GIVEN).claim()
    template.interrupt = changes(seen)
    Spark(run.stage).run()
    fenced = 0
    for number in range(len(seen)):
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", place)
        files = FaultyFiles(str(place))
        first = opened(files).feed("src", GIVEN).claim()
        left = iter(range(number))

        def overtake(access: str, name: str, files: FaultyFiles = files, left: Any = left) -> None:
            if access in ("put", "was put", "create", "was created", "delete") and next(left, None) is None:
                files.interrupt = lambda access, name: None
                Spark(opened(files).claim().stage).run()

        files.interrupt = overtake
        try:
            Spark(first.stage).run()
        except Fenced:
            fenced += 1
        except ConcurrentUpdate:
            pass
        files.interrupt = lambda access, name: None
        Spark(opened(files).claim().stage).run()
        expect_exact(files)
        shutil.rmtree(place)
    assert fenced > 10


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["_cues/checkpoints/g.f", "_cues"])
def test_a_checkpoint_that_is_ahead_of_the_records_is_not_used(files: FaultyFiles, tmp_path: Path, part: str) -> None:
    """An older copy of the directory was put back, without the checkpoint. Its rows would never be written."""
    started(files, 10).run()
    shutil.copytree(files.url, tmp_path / "older")
    started(files, 20).run()
    newer = tmp_path / "newer"
    shutil.copytree(files.path(part), newer)
    shutil.rmtree(files.url)
    shutil.copytree(tmp_path / "older", files.url)
    if part == "_cues":  # also the batches are newer
        shutil.rmtree(newer / "steps")
        shutil.copytree(files.path("_cues/steps"), newer / "steps")
    shutil.rmtree(files.path(part))
    shutil.copytree(newer, files.path(part))
    again = started(files, COUNT).run()
    assert again.ran[0] == 0  # from the start
    expect_exact(files)


def test_a_checkpoint_of_other_batches_is_not_used(files: FaultyFiles, tmp_path: Path) -> None:
    """After an older copy of the directory, the batches of the same numbers were cut in another way."""
    started(files, 5).run()
    shutil.copytree(files.url, tmp_path / "older")
    started(files, COUNT).run()
    other = tmp_path / "other"
    shutil.copytree(checkpoint(files), other)
    shutil.rmtree(files.url)
    shutil.copytree(tmp_path / "older", files.url)
    for count in (8, 12, 16, 20):
        started(files, count).run()
    shutil.rmtree(checkpoint(files))
    shutil.copytree(other, checkpoint(files))
    again = started(files, COUNT).run()
    assert again.ran[0] == 0
    expect_exact(files)


def test_a_checkpoint_that_fits_is_used_and_no_batch_runs_twice(files: FaultyFiles) -> None:
    first = started(files, 10).run()
    second = started(files, COUNT).run()
    assert first.ran + second.ran == list(range(len(first.ran) + len(second.ran)))
    assert first.folder == second.folder
    expect_exact(files)


@pytest.mark.parametrize("damage", [deleted, put_back])
def test_messages_that_a_rebuild_needs_and_that_were_purged_are_an_error(
    files: FaultyFiles, tmp_path: Path, damage: Any
) -> None:
    """Never silently counted anew. With the newest checkpoint the query goes on."""
    started(files, 5).run()
    shutil.copytree(checkpoint(files), tmp_path / "older")
    run = opened(files).feed("src", GIVEN[:10]).claim()
    Spark(run.stage).run()
    for count in (12, 14):  # a file each; the last one stays
        run = opened(files).feed("src", GIVEN[:count]).claim()
        Spark(run.stage).run()
    run.maintenance.retain(run.queues["src"].log(0), Retention(count=1))
    assert run.queues["src"].log(0).first > 10
    shutil.copytree(checkpoint(files), tmp_path / "newest")
    damage(files, tmp_path)
    records = sorted(files.names("_cues/steps/g.f"))
    with pytest.raises(MessagesPurged, match=r"g\.f cannot make its state again: .*messages \d+ to \d+ of 'src'"):
        opened(files).claim()
    assert sorted(files.names("_cues/steps/g.f")) == records  # before anything is written
    deleted(files, tmp_path)
    shutil.copytree(tmp_path / "newest", checkpoint(files))
    started(files).run()
    expect_exact(files)


def test_retention_leaves_the_messages_of_the_last_batch(files: FaultyFiles) -> None:
    """Spark runs the batch again, if it died before it wrote that the batch is done."""
    run = opened(files).feed("src", GIVEN, lambda: 3).claim()
    spark = Spark(run.stage)
    files.interrupt = lambda access, name: die_at(access, name, "/commits/1")
    with pytest.raises(Death):
        spark.run()
    files.interrupt = lambda access, name: None
    policy = Retention(read=True)
    run.maintenance.retain(run.queues["src"].log(0), policy)
    assert run.queues["src"].log(0).first == 16  # the second batch is [16, 25)
    started(files).run()
    expect_exact(files)


def test_retention_leaves_the_messages_of_a_rebuild_under_way(files: FaultyFiles) -> None:
    """The positions are at the end already; the batches that make the state again still read."""
    Spark(opened(files).feed("src", GIVEN, lambda: 3).claim().stage).run()
    files.delete("_cues/checkpoints")
    run = opened(files).claim()
    spark = Spark(run.stage)
    policy = Retention(read=True)
    run.maintenance.retain(run.queues["src"].log(0), policy)
    assert run.queues["src"].log(0).first == 1
    spark.run(2)
    run.maintenance.retain(run.queues["src"].log(0), policy)
    assert run.queues["src"].log(0).first == 16
    spark.run()
    expect_exact(files)


def die_at(access: str, name: str, end: str) -> None:
    if access == "put" and name.endswith(end):
        raise Death(name)


# --- batches --------------------------------------------------------------------------------------


def test_sources_of_one_query_get_the_same_batches(files: FaultyFiles) -> None:
    """Messages may come between the questions to two sources. Both then wait for the next round."""
    made = graph(5, {"a": "left", "b": "right"})
    run = DriverRun(files, made, queries={"g.f": QueryPlan("append", True)}).feed("left", GIVEN[:3]).claim()
    spark = Spark(run.stage, ("a", "b", "a"))  # the third one is that of a join with itself
    fed = [4]
    latest = BatchStream.latestOffset

    def slow(self: BatchStream, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        offset = latest(self, start, limit)
        if offset == start and fed[0] < 20:
            run.feed("right", GIVEN[: fed[0]])
            fed[0] += 1
        return offset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchStream, "latestOffset", slow)
        while fed[0] < 20:
            spark.run(len(spark.ran) + 1)
    spark.run()
    assert len(spark.ran) > 3
    for number in spark.ran:
        assert len({json.dumps(offset) for offset in spark.offsets(number)}) == 1
    last = run.stage.ledger.now
    assert {tailer: next for tailer, (_, next) in last.positions.items()} == {"g.f.left": 4, "g.f.right": 20}


def test_a_batch_that_disappears_is_not_cut_anew(files: FaultyFiles) -> None:
    """Another driver may put old batches into one file, or somebody deletes one, while the query makes its state."""
    started(files, made=graph(5)).run()
    files.delete("_cues/checkpoints")
    spark = started(files, made=graph(5))
    spark.run(1)
    files.delete("_cues/batches/g.f/000000000001.json")
    with pytest.raises(Diverged, match=r"Batch 1 of g\.f is missing"):
        spark.run()


def test_a_batch_has_one_hash_and_the_provenance_of_its_last_message(files: FaultyFiles) -> None:
    """Also the batch without messages, which closes; after a rebuild nothing has changed."""
    made = graph(queues={"src": cues.QueueOptions(metadata=True), "out": cues.QueueOptions(metadata=True)})
    Spark(opened(files, made).feed("src", GIVEN).claim().stage).run()
    run = opened(files, made)
    seen = [(m["q/queue"]["src"]["q/t"]) for m in metadata_of(run.queues["out"])]
    assert seen == [15] * 5 + [24] * 6
    reader = inspection.QueueReader(files.place, "out")
    hashes = [message.hash for message in reader.read([1])]
    assert [hashes.count(each) for each in dict.fromkeys(hashes)] == [5, 5, 1]
    shutil.rmtree(checkpoint(files))
    Spark(opened(files, made).claim().stage).run()
    assert [message.hash for message in inspection.QueueReader(files.place, "out").read([1])] == hashes


def test_without_a_watermark_no_batch_is_empty(files: FaultyFiles) -> None:
    run = opened(files, closes=False).feed("src", GIVEN).claim()
    spark = Spark(run.stage).run()
    assert spark.ran == [0, 1] and not run.stage.ready()
    assert all(message["k"] != FINAL for message in messages_of(run.queues["out"]))


def test_old_batches_are_put_together_and_read_as_before(files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that slept may put a file of its own under a number that is free again. The block counts."""
    monkeypatch.setattr(batches_module, "BLOCK", 4)
    Spark(opened(files, graph(1)).feed("src", GIVEN).claim().stage).run()
    names = [name for name in files.names("_cues/batches/g.f") if name != "plan.json"]
    assert len(names) < COUNT and names[0] == "000000000000-.json"
    files.put("_cues/batches/g.f/000000000002.json", b'[{"src": [7, 9]}, "other"]')
    assert Batches(files, "g.f").need(2).ranges == {"src": (3, 4)}
    batches = Batches(files, "g.f")
    assert [batches.need(number).ranges["src"] for number in range(COUNT)] == [(n, n + 1) for n in range(1, COUNT + 1)]
    shutil.rmtree(checkpoint(files))
    assert len(started(files, made=graph(1)).run().ran) == COUNT + 1
    expect_exact(files)


@pytest.mark.parametrize("gone", ["_cues/batches/g.f/000000000001.json", "_cues/batches/g.f"])
def test_missing_batches_are_an_error_and_nothing_is_written(files: FaultyFiles, gone: str) -> None:
    started(files).run()
    files.delete(gone)
    files.delete("_cues/checkpoints")
    records = files.names("_cues/steps/g.f")
    with pytest.raises(Diverged, match=r"Batch \d+ of g\.f is missing"):
        started(files)
    assert files.names("_cues/steps/g.f") == records
    assert any("Batch" in problem for problem in inspection.problems_of(files.place))


def test_batches_of_another_run_are_an_error(files: FaultyFiles, tmp_path: Path) -> None:
    """The folder of the batches was put back from a copy of another directory."""
    started(files).run()
    other = FaultyFiles(str(tmp_path / "other"))
    started(other).run()
    files.delete("_cues/batches")
    shutil.copytree(other.path("_cues/batches"), files.path("_cues/batches"))
    with pytest.raises(Diverged, match=r"Batch 2 of g\.f in .* is not the one that its last record"):
        started(files)


# --- changes of the graph and of positions --------------------------------------------------------


def test_a_frame_that_gets_or_loses_its_state_needs_another_id(files: FaultyFiles, tmp_path: Path) -> None:
    started(files).run()
    with pytest.raises(TopologyChanged, match=r"g\.f has run as a query"):
        DriverRun(files, graph()).claim()
    steps = FaultyFiles(str(tmp_path / "steps"))
    run = DriverRun(steps, graph()).feed("src", GIVEN).claim()
    run.stage.ledger.commit("step", positions={"g.f.src": (run.queues["src"].identity.hex(), 11)})
    with pytest.raises(TopologyChanged, match=r"g\.f has run in steps, and its plan keeps state now"):
        opened(steps).claim()
    with pytest.raises(TopologyChanged, match="its state belongs to the former"):
        DriverRun(files, graph(inputs="more"), queries={"g.f": QueryPlan("append", True)}).stage.claim(True)


def test_a_query_cannot_be_moved_and_a_fresh_start_removes_all_of_it(files: FaultyFiles) -> None:
    started(files).run()
    refused = CliRunner().invoke(seek, [f"{files.url}#g.f", "--to", "3", "--yes"])
    assert refused.exit_code == 1 and "g.f is a frame that keeps state" in str(refused.exception)
    part = operations.files_of(files, "g")
    assert part is not None
    operations.remove(files, "g", part)
    assert not files.names("_cues/batches") and not files.names("_cues/checkpoints")
    assert started(files).run().ran == [0, 1, 2]
    expect_exact(files)


def test_options_of_a_frame_are_checked_at_its_declaration() -> None:
    for options in ({"output_mode": "sometimes"}, {"trigger": 10}, {"fields": {"other": "k long"}}):
        with pytest.raises(GraphError, match=r"output_mode|trigger|does not read"):
            Graph("g").frame("a", "b", id="f", **options)(lambda rows: rows)
    with pytest.raises(GraphError, match="has trigger= and runs in steps"):
        Graph("g").frame("a", "b", id="f", trigger="1 second", output_mode="step")(lambda rows: rows)
    with pytest.raises(GraphError, match="output_mode"):
        cues.Stream(len, "a", "b", output_mode="append")


def test_a_frame_that_keeps_state_over_partitions_is_refused_by_name() -> None:
    parted = graph(queues={"src": cues.QueueOptions(partitions=2, key="n")}).plan()
    with pytest.raises(GraphError, match=r"reads a queue with several partitions \(src\)"):
        engine.refuse_partitions(parted, [node.id for node in parted.running])
