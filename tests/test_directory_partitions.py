"""Partitions of queues in a shared directory: order and state by key, units, growth, deaths. No Spark, no Java."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import pyarrow as pa
import seeds
import terminal
from deltalake import DeltaTable, QueryBuilder
from directory_steps import DriverRun, FaultyFiles, HostRun, Message, RandomDeaths, data_file, messages_of_log
from pyspark.sql import types as T
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from sets import slow_except

import cues
from cues import Graph, QueueOptions, Source, Stream, codec, testing
from cues.errors import CuesError, Diverged, GraphError, InvalidArgument, QueueNotFound, QueueOptionsError
from cues.queues.base import views_of
from cues.queues.partitioners import partition_for
from cues.spark.cluster import inspection
from cues.spark.cluster.data import Writer
from cues.spark.cluster.directory import DataFile, PartitionLog, QueueDirectory, read_table
from cues.spark.cluster.files import ID
from cues.spark.cluster.ledger import FORMAT, Ledger, LedgerRecord
from cues.spark.cluster.maintenance import Maintenance
from cues.spark.cluster.shared import SharedQueue
from cues.spark.options import READ, READ_STREAM, QueueAddress, ReadOptions
from cues.spark.reading import QueueReader, row_of
from cues.spark.streams import QueueStream


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


def by_user(partitions: int, **options: Any) -> QueueOptions:
    return QueueOptions(partitions=partitions, key="user", **options)


def orders(count: int, seed: int = 1) -> list[Message]:
    chance = random.Random(seed)
    return [{"i": i, "user": f"user-{chance.randrange(12)}"} for i in range(1, count + 1)]


def counted(message: Message, process: Any) -> Message:
    """The count of a key, and what the function sees of its unit."""
    if message["i"] % 11 == 3:
        raise ValueError("bad")
    process.state["n"] = process.state.get("n", 0) + 1
    return {**message, "n": process.state["n"], "unit": process.partition, "hash": process.delivery_hash}


def same(message: Message) -> Message:
    return message


def seen(message: Message, process: Any) -> Message:
    process.state["n"] = process.state.get("n", 0) + 1
    return {**message, "seen": process.state["n"]}


def joined(a: Message, b: Message) -> Message:
    return {"user": a["user"], "a": a["i"], "b": b["i"]}


def parted(loose: int = 2) -> Graph:
    """Units of each kind: with state by key, with side effects, and without a key."""
    streams = [
        Stream(counted, "src", "counts", id="count", key="user"),
        Stream(seen, "counts", "effects", id="effect", side_effects=True),
        Stream(joined, {"a": "counts", "b": "counts-2"}, "pairs", id="join"),
        Stream(same, "counts", "counts-2", id="copy"),
        Stream(same, "src", "loose", id="spread"),
        Stream(same, "loose", "end", id="after"),
    ]
    queues = {
        "src": by_user(3, metadata={"t"}),
        "counts": by_user(4),
        "counts-2": by_user(4),
        "errors": QueueOptions(partitions=2),
        "effects": by_user(2, partitioner="rendezvous"),
        "loose": QueueOptions(partitions=loose, partitioner="round-robin"),
    }
    return Graph("g", streams, errors="errors", queues=queues)


def logs(driver: DriverRun, queue: str) -> list[list[Message]]:
    return [messages_of_log(log) for log in driver.queues[queue].logs]


def of_users(messages: Sequence[Message], *fields: str) -> dict[str, list[Any]]:
    users: dict[str, list[Any]] = defaultdict(list)
    for message in messages:
        users[message["user"]].append(tuple(message[field] for field in fields))
    return users


def judge(driver: DriverRun, given: list[Message]) -> None:
    """Each message once, those of a key in order, its state that of the key alone, errors on the unit's partition."""
    users: dict[str, list[int]] = defaultdict(list)
    for message in given:
        if message["i"] % 11 != 3:
            users[message["user"]].append(message["i"])
    counts = {user: [(i, n, partition_for(user, 3)) for n, i in enumerate(all, 1)] for user, all in users.items()}
    for partition, log in enumerate(logs(driver, "counts")):
        here = {user: rows for user, rows in counts.items() if partition_for(user, 4) == partition}
        assert of_users(log, "i", "n", "unit") == here
    effects = [message for log in logs(driver, "effects") for message in log]
    in_order = sorted(effects, key=lambda message: (message["user"], message["n"]))
    assert of_users(effects, "i") == of_users(in_order, "i")
    assert Counter(m["i"] for m in effects) == Counter(i for all in users.values() for i in all)
    copies = [log[: len(log)] for log in logs(driver, "counts-2")]
    assert copies == logs(driver, "counts")
    pairs = sorted((m["a"], m["b"]) for m in driver.messages("pairs"))
    assert pairs == sorted((m["i"], m["i"]) for m in driver.messages("counts"))
    for partition, log in enumerate(logs(driver, "errors")):
        failed = [error["err.proc/messages"]["src"][0] for error in log]
        bad = [m for m in given if m["i"] % 11 == 3 and partition_for(m["user"], 3) % 2 == partition]
        assert Counter(m["i"] for m in failed) == Counter(m["i"] for m in bad)
    assert Counter(m["i"] for m in driver.messages("end")) == Counter(m["i"] for m in given)


@pytest.mark.slow
@pytest.mark.parametrize("cores", slow_except([2], [1, 2]))
def test_units_keep_order_and_state_of_each_key_through_stages(files: FaultyFiles, cores: int) -> None:
    given = orders(300)
    driver = DriverRun(files, parted(), cores, lambda: 37).feed("src", given, lambda: 30).claim().run()
    assert len(driver.stages) == 3 + 4 + 4 + 4 + 3 + 2
    judge(driver, given)
    assert {len(log) > 30 for log in logs(driver, "loose")} == {True}
    assert inspection.problems_of(files.url) == []


def test_a_unit_gives_the_messages_and_hashes_of_the_embedded_engine(files: FaultyFiles) -> None:
    given = orders(200)
    with testing.temporary_store() as store:
        graph = Graph("g", [Stream(counted, "src", "counts", id="count", key="user")], errors="errors",
                      queues={"src": by_user(3, metadata={"t"}), "counts": by_user(4)})  # fmt: skip
        source = store.queue("src", partitions=3, key="user", metadata={"t"})
        source.appender().write_many(given)
        testing.run_until_idle(graph, store)
        identity = source.core.row().identity
        embedded = [list(view.tailer(meta=False)) for view in views_of(store.queue("counts"))]
    QueueDirectory(files, "src", by_user(3), identity)
    driver = DriverRun(files, graph, 2, lambda: 41).feed("src", given, lambda: 30).claim().run()
    for one, other in zip(logs(driver, "counts"), embedded):
        assert of_users(one, "i", "n", "unit", "hash") == of_users(other, "i", "n", "unit", "hash")


class DeadlyPartitions(RandomDeaths):
    """An operator lets the queue ``loose`` grow at random moments, also while drivers sleep."""

    MOST = 5

    def graph(self) -> Graph:
        grown = QueueDirectory(self.files, "loose", QueueOptions()).options.partitions
        return parted(max(2, grown))

    def given(self) -> list[Message]:
        return orders(70)

    def between(self, driver: DriverRun) -> None:
        if self.chance.random() < 0.2:
            loose = QueueDirectory(self.files, "loose", QueueOptions())  # an operator's process
            if loose.options.partitions < self.MOST:
                loose.grow(loose.options.partitions + 1)
        driver.queues["loose"].read_on()
        driver.growth.take_in(lambda nodes: [stage.claim() for stage in driver.take_in(nodes)])

    def compare(self, driver: DriverRun) -> None:
        judge(driver, self.given())
        assert inspection.problems_of(self.files.url) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*seeds.among(range(10), fast=2), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 300))]
)
def test_units_that_die_or_sleep_while_queues_grow_lose_and_repeat_nothing(files: FaultyFiles, seed: int) -> None:
    DeadlyPartitions(seed, files).finish()


def test_random_deaths_find_a_unit_that_begins_with_the_records_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: all units of a processor share one ledger."""
    make = Ledger.__init__

    def shared(ledger: Ledger, files: Any, processor: str, owner: str) -> None:
        make(ledger, files, processor.partition("/")[0], owner)

    monkeypatch.setattr(Ledger, "__init__", shared)
    with pytest.raises((CuesError, AssertionError)):
        for seed in range(5):
            DeadlyPartitions(seed, FaultyFiles(str(tmp_path / str(seed)))).finish()


# --- growth and options ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_queue_grows_while_a_driver_runs_and_new_units_take_over_their_part(files: FaultyFiles) -> None:
    driver = DriverRun(files, parted(), 1).feed("src", orders(100)).claim().run()
    QueueDirectory(files, "loose", QueueOptions()).grow(6)
    driver.queues["loose"].read_on()
    new = driver.growth.take_in(lambda nodes: [stage.claim() for stage in driver.take_in(nodes)])
    assert [node.id for node in new] == [f"g.after/{n}" for n in range(2, 6)]
    assert "reads 4 more partitions from now on" in str(driver.events[-1])
    driver.feed("src", orders(200)).run()
    judge(driver, orders(200))
    assert all(logs(driver, "loose")[2:])
    with pytest.raises(QueueOptionsError, match="has 6 partitions and cannot have fewer, such as 2"):
        DriverRun(files, parted())
    again = DriverRun(files, parted(6)).claim().run()
    judge(again, orders(200))


def test_partitions_that_the_graph_and_the_directory_see_otherwise_are_refused_by_name(files: FaultyFiles) -> None:
    def open_queue(**options: Any) -> QueueDirectory:
        directory = QueueDirectory(files, "q", QueueOptions(**options))
        directory.own("g")
        return directory

    assert open_queue(partitions=3, key="user").options.partitions == 3
    assert open_queue().options.placing == ("user", "murmur2")  # what is not given stays
    with pytest.raises(QueueOptionsError, match="has 3 partitions, not 4") as refused:
        open_queue(partitions=4, key="user")
    assert f"run cues grow {files.place}#q 4" in refused.value.hint
    with pytest.raises(QueueOptionsError, match=r"places its messages by key='user', which cannot change"):
        open_queue(partitions=3, key="other")
    with pytest.raises(QueueOptionsError, match="cannot have fewer, such as 2"):
        open_queue().grow(2)
    with pytest.raises(GraphError, match="partitions that do not meet"):
        Graph("g", [Stream(joined, {"a": "x", "b": "y"}, "z")], queues={"x": by_user(2), "y": by_user(3)}).plan()


def test_an_operator_and_a_driver_that_add_entries_at_once_both_succeed(files: FaultyFiles) -> None:
    """The driver's entry and the operator's have one number; who is second reads on and writes again."""
    first, second = (QueueDirectory(files, "q", by_user(2)) for _ in range(2))
    first.own("g")
    second.load()
    first.grow(4)
    file = data_file(second, "g.p", 0, orders(3), 1)
    second.publish("g.p", 0, second.numbered([file]))
    first.grow(5)
    second.read_on()
    assert [log.next for log in second.logs] == [1, 4, 1, 1, 1]
    assert [log.next for log in QueueDirectory(files, "q", QueueOptions()).logs] == [1, 4, 1, 1, 1]


def test_a_table_of_the_version_before_is_a_queue_of_one_partition(
    files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueDirectory, "metadata_of", _old_metadata(QueueDirectory.metadata_of))
    directory = QueueDirectory(files, "q", QueueOptions())
    directory.own("g")
    directory.publish("g.p", 0, directory.numbered([data_file(directory, "g.p", 0, orders(4))]))
    monkeypatch.undo()
    reader = inspection.QueueReader(files.url, "q")
    assert [read.message for read in reader.read(reader.last(2))] == orders(4)[2:]
    again = QueueDirectory(files, "q", QueueOptions())
    again.own("g")
    again.grow(2)
    assert [log.next for log in again.logs] == [5, 1]
    fields = {"format": 2, "kind": "step", "owner": "o", "epoch": 1, "ends": {"q": 5},
              "files": {"q": [{"name": "f", "first": 5, "count": 1, "size": 1, "modified_ms": 1}]}}  # fmt: skip
    record = LedgerRecord.of(7, fields)
    assert record.ends_after() == {"q": 6}
    with pytest.raises(Diverged, match=rf"has format {FORMAT + 1}; this version reads 2 to {FORMAT}\."):
        LedgerRecord.of(7, fields | {"format": FORMAT + 1})


def _old_metadata(now: Any) -> Any:
    def metadata(directory: QueueDirectory, *given: Any) -> dict[str, Any]:
        return {**now(directory, *given), "configuration": {}}

    return metadata


# --- reading --------------------------------------------------------------------------------------


def filled(files: FaultyFiles, given: Sequence[Message], size: int = 10, partitions: int = 3) -> QueueDirectory:
    """A queue with files of ``size`` messages, in the order of time; times are distinct."""
    files.ensure(ID, b'{"id": "1"}')
    directory = QueueDirectory(files, "q", by_user(partitions))
    directory.own("g")
    for number, low in enumerate(range(0, len(given), size)):
        some = given[low : low + size]
        shares = [[m for m in some if partition_for(m["user"], partitions) == p] for p in range(partitions)]
        new = [timed(directory, number, share, p) for p, share in enumerate(shares) if share]
        directory.publish("g.p", number, directory.numbered(new))
    return directory


def timed(directory: QueueDirectory, number: int, share: Sequence[Message], partition: int) -> DataFile:
    target = Writer(directory.files, directory.folder, "g.p", number, 0, directory.columns, partition)
    target.add([codec.pack(m) for m in share], [None] * len(share), None, [m["i"] * 1_000_000 for m in share])
    file = target.close()
    assert file is not None
    return replace(file, modified_ms=share[0]["i"] * 1000)


def test_a_whole_queue_is_read_in_the_order_of_time_and_a_partition_alone(files: FaultyFiles) -> None:
    given = orders(100)
    filled(files, given)
    reader = inspection.QueueReader(files.url, "q")
    assert [each.message["i"] for each in reader.read(reader.last(None))] == list(range(1, 101))
    assert [each.message["i"] for each in reader.read(reader.last(7))] == list(range(94, 101))
    odd = lambda message: message["i"] % 2  # noqa: E731
    matching = [each.message["i"] for each in reader.read(reader.last(3, odd)) if odd(each.message)]
    assert matching == [95, 97, 99]
    alone = inspection.QueueReader(files.url, "q/1")
    mine = [m["i"] for m in given if partition_for(m["user"], 3) == 1]
    assert [each.message["i"] for each in alone.read(alone.last(None))] == mine
    assert [(each.partition, each.index) for each in alone.read([2])] == [(1, n) for n in range(2, len(mine) + 1)]
    with pytest.raises(CuesError, match="has 3 partitions, and an index belongs to one"):
        reader.place_of(3, "--from")
    with pytest.raises(QueueNotFound, match="has no partition 3; it has 3"):
        inspection.QueueReader(files.url, "q/3")
    assert not reader.has_more(reader.place_of("end", "--from"))
    assert reader.has_more(reader.last(1))


@pytest.mark.parametrize("count", [1, 9, 10, 11, 50, 99, 100])
def test_a_cut_has_the_count_that_was_asked_for_and_the_older_files_first(files: FaultyFiles, count: int) -> None:
    given = orders(100)
    filled(files, given)
    queue = SharedQueue(QueueAddress(str(files.place), "q", shared=True))
    start, end = queue.ends()
    place = queue.cut(start, end, count)
    assert sum(place) - sum(start) == count
    taken = {m["i"] for log, low, high in zip(queue.logs, start, place) for m in _range(log, low, high)}
    whole = count // 10 * 10
    assert set(range(1, whole + 1)) <= taken <= set(range(1, whole + 11))
    edges = queue.edges(start, end, 7)
    assert (edges[0], edges[-1]) == (start, end)
    assert all(a <= b for one, next in itertools.pairwise(edges) for a, b in zip(one, next))


def _range(log: PartitionLog, low: int, high: int) -> list[Message]:
    return messages_of_log(log)[low - 1 : high - 1]


@pytest.mark.slow
def test_files_of_one_partition_are_merged_and_retention_acts_on_each(files: FaultyFiles) -> None:
    given = orders(400)
    driver = DriverRun(files, Graph("g", [Stream(same, "src", "out", id="s")],
                                    queues={"src": by_user(3, retention=20)}))  # fmt: skip
    driver.feed("src", given, lambda: 2).claim().run()
    before = logs(driver, "src")
    keeper: Maintenance = driver.maintenance
    keeper.merge_files = 4
    for _ in range(40):
        keeper.step()
    for log, messages in zip(driver.queues["src"].logs, before):
        assert {file.partition for file in log.live} == {log.partition}
        assert len(log.live) < 60 and 20 <= log.next - log.first <= 24
        assert messages_of_log(log) == messages[log.first - 1 :]
    table, _ = read_table(files, "src")
    assert set(table.get_add_actions(flatten=True)["partition.partition"].to_pylist()) == {0, 1, 2}


# --- the command ----------------------------------------------------------------------------------


def cues_grow(*arguments: str) -> terminal.Result:
    return terminal.cues("grow", *arguments, "--json")


@pytest.mark.slow
def test_grow_asks_refuses_and_tells_what_it_did(files: FaultyFiles, tmp_path: Path) -> None:
    filled(files, orders(20), partitions=2)
    place = str(files.place)
    asked = cues_grow(f"{place}#q", "4")
    assert asked.code == 2 and "later messages of many keys go to another partition" in asked.err
    assert len(QueueDirectory(files, "q", QueueOptions()).logs) == 2
    done = cues_grow(f"{place}#q", "4", "--yes")
    assert json.loads(done.out) == {"queue": "q", "partitions": 4, "before": 2}
    assert "If the graph file has partitions= for q, write partitions=4 there before the next start." in done.err
    assert [log.next - 1 for log in QueueDirectory(files, "q", QueueOptions()).logs][2:] == [0, 0]
    for arguments, said in (
        ((f"{place}#q", "3"), "has 4 partitions and cannot have fewer, such as 3"),
        ((f"{place}#q", "0", "--yes"), "cannot have fewer, such as 0"),
        ((f"{place}#q/1", "8", "--yes"), "q/1 is a partition"),
        ((f"{place}#nothing", "8", "--yes"), "nothing"),
    ):
        refused = cues_grow(*arguments)
        assert refused.code in (1, 2) and said in refused.err, arguments
    with cues.open(tmp_path / "s") as store:
        store.queue("orders", partitions=2, key="user")
    assert json.loads(cues_grow(f"{tmp_path}/s#orders", "3", "--yes").out)["partitions"] == 3
    with cues.open(tmp_path / "s", readonly=True) as store:
        assert store.queue("orders").partitions == 3


def test_a_queue_that_is_copied_from_a_store_grows_there(files: FaultyFiles) -> None:
    graph = Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": by_user(2)})
    DriverRun(files, graph).feed("src", orders(10))
    refused = cues_grow(f"{files.place}#src", "4", "--yes")
    assert refused.code == 1 and "is copied from the store of the graph 'g'" in refused.err


def test_seek_moves_all_units_or_the_one_that_is_named(files: FaultyFiles) -> None:
    graph = Graph("g", [Stream(same, "src", "out", id="s")], queues={"src": by_user(3)})
    DriverRun(files, graph).feed("src", orders(60)).claim().run()
    ends = [log.next for log in QueueDirectory(files, "src", QueueOptions()).logs]

    def positions() -> list[int]:
        lasts = inspection.processors_of(files.url)
        return [next(iter(last.positions.values())) for last in lasts if not last.is_feeder]

    assert positions() == ends
    moved = terminal.cues("seek", f"{files.place}#s", "--to", "start", "--yes", "--json")
    assert moved.code == 0 and len(moved.out.splitlines()) == 3, moved
    assert positions() == [1, 1, 1]
    refused = terminal.cues("seek", f"{files.place}#s", "--to", "4", "--yes")
    assert refused.code == 2 and "reads 3 partitions, and an index belongs to one" in refused.err
    assert terminal.cues("seek", f"{files.place}#s/2", "--to", "4", "--yes").code == 0
    assert terminal.cues("seek", f"{files.place}#s/0", "--to", "3", "--yes").code == 0
    assert positions() == [3, 1, 4]
    again = DriverRun(files, graph).claim().run()
    assert len(again.messages("out")) == 60 + sum(ends) - sum((3, 1, 4))


# --- the format -----------------------------------------------------------------------------------


def options_of(files: FaultyFiles, known: tuple[str, ...], queue: str = "q", **more: str) -> ReadOptions:
    return ReadOptions.of({"path": f"{files.place}#{queue}", **more}, known)


def rows_of(reader: Any, slices: Any) -> list[Any]:
    return [row for part in slices for rows in reader.read(part) for row in rows.to_pylist()]


def test_the_format_reads_all_partitions_or_one(files: FaultyFiles) -> None:
    given = orders(100)
    filled(files, given)
    schema = T.StructType([*row_of(True).fields, T.StructField("i", T.LongType())])
    reader = QueueReader(schema, options_of(files, READ, partitions="4"), 2)
    assert reader.pinned.spread and len(reader.partitions()) == 4
    rows = rows_of(reader, reader.partitions())
    assert sorted(row["i"] for row in rows) == list(range(1, 101))
    assert {(row["partition"], row["index"]) for row in rows} == {
        (log.partition, index) for log in reader.pinned.logs for index in range(log.first, log.next)
    }
    for row in rows:
        assert row["partition"] == partition_for(codec.unpack(row["value"])["user"], 3)
    alone = QueueReader(row_of(False), options_of(files, READ, "q/2", startingPosition="3"), 2)
    assert [row["index"] for row in rows_of(alone, alone.partitions())] == list(range(3, alone._next[0]))
    with pytest.raises(InvalidArgument, match="each of the 3 partitions of 'q' has indices of its own"):
        QueueReader(schema, options_of(files, READ, startingPosition="3"), 2)


def test_a_stream_follows_partitions_that_are_added_and_a_merge_repeats_nothing(files: FaultyFiles) -> None:
    driver = DriverRun(files, Graph("g", [Stream(same, "q", "out", id="s")], queues={"q": by_user(1)}))
    driver.feed("q", orders(40), lambda: 3)
    schema = T.StructType([T.StructField("i", T.LongType())])
    stream = QueueStream(schema, options_of(files, READ_STREAM), 2)
    at, taken = stream.initialOffset(), []
    for count, partitions in ((40, 1), (90, 3), (150, 5)):
        directory = driver.queues["q"]
        directory.grow(partitions)
        if count > 40:
            more = orders(count)[count - 50 :]
            for partition in range(partitions):
                share = [m for m in more if m["i"] % partitions == partition]
                number = directory.published("g.x") + 1
                file = data_file(directory, "g.x", number, share, partition)
                directory.publish("g.x", number, directory.numbered([file]))
        while (end := stream.latestOffset(at, ReadMaxRows(17))) != at:
            batch = [row["i"] for row in rows_of(stream, stream.partitions(at, end))]
            assert 0 < len(batch) <= 17
            taken += batch
            at = end
            driver.maintenance.merge_files = 3
            for log in directory.logs:
                driver.maintenance.merge(log)
    assert sorted(taken) == [m["i"] for m in orders(150)][:40] + list(range(41, 91)) + list(range(101, 151))
    again = QueueStream(schema, options_of(files, READ_STREAM), 2)
    assert again.latestOffset(at, ReadAllAvailable()) == at


# --- failover -------------------------------------------------------------------------------------


def users(position: Any) -> Any:
    for i in range((position or 0) + 1, 201):
        yield i, {"i": i, "user": f"user-{i % 9}"}


def fed(partitions: int = 2) -> Graph:
    return Graph(
        "g",
        [Source("src", users), Stream(same, "src", "out", id="s")],
        queues={"src": by_user(partitions), "out": by_user(3)},
        durability="process",
    )


def test_a_driver_with_an_empty_store_continues_all_partitions_also_those_that_were_added(
    files: FaultyFiles, tmp_path: Path
) -> None:
    first = HostRun(files, fed(), tmp_path / "a")
    (source,) = first.sources
    assert first.pull(source, 30) and first.feeder.step()
    first.assembly.queues["src"].grow(4)
    assert first.pull(source, 30) and first.feeder.step()
    assert first.pull(source, 30)  # these are only in the store that is lost
    first.close()
    second = HostRun(files, fed(4), tmp_path / "b")
    assert [log.next for log in second.queues["src"].logs] == [view.core.row().next for view in
                                                               views_of(second.assembly.queues["src"])]  # fmt: skip
    second.claim().run()
    for queue in ("src", "out"):
        held = [message for log in logs(second, queue) for message in log]
        assert Counter(m["i"] for m in held) == Counter(range(1, 201)), queue
        assert len(logs(second, queue)) == (4 if queue == "src" else 3)
    for log in logs(second, "src"):
        for user, rows in of_users(log, "i").items():
            assert rows == sorted(rows), user
    second.close()
    with pytest.raises(Diverged, match="does not continue the one in"):
        HostRun(files, fed(4), tmp_path / "a")


def test_a_copy_takes_in_partitions_that_its_store_got_and_a_store_with_fewer_is_refused(
    files: FaultyFiles, tmp_path: Path
) -> None:
    run = HostRun(files, fed(), tmp_path / "a").claim()
    run.assembly.queues["src"].grow(5)
    run.run()
    assert [len(log) > 0 for log in logs(run, "src")].count(True) > 2  # the feeder has grown the directory itself
    assert len(run.queues["src"].logs) == 5 and not run.feeder.ready()
    run.close()
    with cues.open(tmp_path / "other", durability="process") as store:
        store.queue("src", partitions=2, key="user").appender().write({"i": 0, "user": "x"})
    with pytest.raises(Diverged, match="it is another queue"):
        HostRun(files, fed(), tmp_path / "other")


# --- purge and typed columns ----------------------------------------------------------------------


def test_a_purge_by_time_acts_on_each_partition_and_by_index_on_one(files: FaultyFiles) -> None:
    given = orders(100)
    filled(files, given)
    refused = terminal.cues("purge", f"{files.place}#q", "--before", "5", "--yes")
    assert refused.code != 0 and "has 3 partitions, and an index belongs to one" in refused.err
    done = terminal.cues("purge", f"{files.place}#q", "--before", "1970-01-01T00:00:41Z", "--yes", "--json")
    assert done.code == 0 and json.loads(done.out)["messages"] == 40, done
    reader = inspection.QueueReader(files.url, "q")
    assert [each.message["i"] for each in reader.read(reader.last(None))] == list(range(41, 101))
    (first,) = inspection.QueueReader(files.url, "q/1").last(None)
    assert terminal.cues("purge", f"{files.place}#q/1", "--before", str(first + 2), "--yes").code == 0
    logs = QueueDirectory(files, "q", QueueOptions()).logs
    assert sum(log.next - log.first for log in logs) == 58 and logs[1].first == first + 2
    assert {file.partition for file in logs[1].live} == {1}


def test_partitions_have_typed_columns_and_grow_with_them(files: FaultyFiles) -> None:
    def graph(partitions: int) -> Graph:
        queues = {"src": by_user(2), "out": by_user(partitions, schema={"i": int, "user": str})}
        return Graph("g", [Stream(same, "src", "out", id="s")], queues=queues)

    DriverRun(files, graph(2)).feed("src", orders(50)).claim().run()
    QueueDirectory(files, "out", QueueOptions()).grow(4)
    DriverRun(files, graph(4)).feed("src", orders(100)).claim().run()
    table = DeltaTable(str(Path(files.place) / "out"))
    rows = QueryBuilder().register("q", table).execute('select partition, i, "user" from q').read_all()
    held = pa.table(rows).to_pylist()
    assert sorted(row["i"] for row in held) == list(range(1, 101))
    assert {row["partition"] for row in held if row["i"] > 50} == {0, 1, 2, 3}
    for row in held:
        assert row["partition"] == partition_for(row["user"], 2 if row["i"] <= 50 else 4)
