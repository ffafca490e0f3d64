"""Delta tables as sources: snapshots and versions, the change data feed, restarts, bounded memory, refusals, kill -9.

The contracts of all sources (test_contracts_sources.py) run over a Delta table, too.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import mirrors
import object_store
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sets import bounded
from small import until

import cues
from cues import testing
from cues.errors import Away, Diverged, InvalidArgument, ProcessorStopped
from cues.processors import lake
from cues.processors.delta_source import DeltaSource

deltalake = pytest.importorskip("deltalake")

FEED = {"delta.enableChangeDataFeed": "true"}


def add(path: Any, rows: list[dict[str, Any]] | pa.Table, **options: Any) -> None:
    """Write rows as one version of a table."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    deltalake.write_deltalake(path, table, **{"mode": "append", **options})


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in numbers]


def read(source: DeltaSource, store: cues.Store, name: str = "rows") -> list[dict[str, Any]]:
    """Run a source to its end; return all messages of its queue."""
    testing.run_until_idle(cues.Graph("g", [cues.Source(name, source)]), store)
    return list(testing.messages(store, name))


def stopped(source: DeltaSource, store: cues.Store) -> str:
    with pytest.raises(ProcessorStopped) as error:
        read(source, store)
    assert isinstance(error.value.__cause__, (Diverged, InvalidArgument))
    return str(error.value.__cause__)


def ns(messages: list[dict[str, Any]]) -> list[int]:
    return [message["n"] for message in messages]


# --- versions -----------------------------------------------------------------------------------


def test_the_snapshot_comes_first_and_then_each_version_once(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    add(path, numbered(1, 2))
    add(path, numbered(3))
    assert sorted(ns(read(DeltaSource(path), store))) == [1, 2, 3]
    assert len(read(DeltaSource(path), store)) == 3
    add(path, numbered(4, 5))
    add(path, numbered(6))
    assert ns(read(DeltaSource(path), store))[3:] == [4, 5, 6]


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        ({}, [1, 2, 3], [4]),
        ({"begin": 1}, [1, 2, 3], [4]),
        ({"begin": 0}, [1, 2, 3], [4]),
        ({"snapshot": False}, [], [4]),
        ({"begin": 0, "snapshot": False}, [1, 2, 3], [4]),
        ({"begin": 1, "snapshot": False}, [2, 3], [4]),
        ({"begin": 3, "snapshot": False}, [], [4]),
        ({"begin": datetime(2020, 1, 1, tzinfo=UTC), "snapshot": False}, [1, 2, 3], [4]),
        ({"begin": datetime(2200, 1, 1, tzinfo=UTC), "snapshot": False}, [], [4]),
        ({"begin": datetime(2200, 1, 1, tzinfo=UTC)}, [1, 2, 3], [4]),
    ],
    ids=str,
)
def test_a_source_begins_where_it_is_told_to(
    tmp_path: Path, store: cues.Store, options: dict[str, Any], first: list[int], later: list[int]
) -> None:
    for n in (1, 2, 3):
        add(tmp_path / "t", numbered(n))
    source = DeltaSource(tmp_path / "t", **options)
    assert sorted(ns(read(source, store))) == first
    add(tmp_path / "t", numbered(4))
    assert ns(read(source, store))[len(first) :] == later


def test_a_time_between_two_versions_is_the_one_before_it(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    for n in (1, 2, 3):
        add(path, numbered(n))
        log = path / "_delta_log" / f"{n - 1:020}.json"
        at = int(datetime(2024, 1, n, tzinfo=UTC).timestamp())
        log.write_text(re.sub(r'"timestamp":\d+', f'"timestamp":{at}000', log.read_text()))
        os.utime(log, (at, at))
    noon = datetime(2024, 1, 2, 12, tzinfo=UTC)
    assert ns(read(DeltaSource(path, begin=noon, snapshot=False), store, "since")) == [3]
    assert ns(read(DeltaSource(path, begin=noon - timedelta(hours=12), snapshot=False), store, "at")) == [2, 3]
    with testing.temporary_store() as other:
        source = DeltaSource(path, begin=noon)
        (_, _), *items = source(None)
        assert [message["n"] for position, message in items if message and position[3] == "snapshot"] in (
            [2, 1],
            [1, 2],
        )
        assert sorted(ns(read(source, other))) == [1, 2, 3]


def test_compaction_and_vacuum_between_two_runs_change_nothing(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    for n in range(10):
        add(path, numbered(n))
    assert sorted(ns(read(DeltaSource(path), store))) == list(range(10))
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    table.create_checkpoint()
    add(path, numbered(10))
    assert sorted(ns(read(DeltaSource(path), store))) == list(range(11))


def test_a_source_that_follows_sees_versions_and_ends_with_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "t"
    add(path, numbered(0))
    graph = cues.Graph("g", [cues.Source("rows", DeltaSource(path, follow=True, poll_s=0.01))], durability="process")
    with graph.start(store=tmp_path / "store") as running:
        for n in range(1, 6):
            until(lambda n=n: len(running.messages("rows")) == n)
            add(path, numbered(n))
        until(lambda: len(running.messages("rows")) == 6)
        assert ns(running.messages("rows")) == list(range(6))


# --- versions that delete or change rows --------------------------------------------------------


def changed(path: Path, configuration: dict[str, str] | None = None) -> None:
    """A table with an insert, an update, a delete, a merge, and a delete of a whole file."""
    rows = [{"n": n, "p": "ab"[n % 2], "v": 0} for n in range(6)]
    add(path, rows, partition_by="p", configuration=configuration)
    deltalake.DeltaTable(path).update(predicate="n = 2", updates={"v": "5"})
    deltalake.DeltaTable(path).delete("n = 3")
    source = pa.Table.from_pylist([{"n": 4, "p": "a", "v": 9}, {"n": 7, "p": None, "v": 9}])
    merge = deltalake.DeltaTable(path).merge(source, "t.n = s.n", "s", "t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    deltalake.DeltaTable(path).delete("p = 'b'")
    deltalake.DeltaTable(path).optimize.compact()
    add(path, [{"n": 8, "p": "b", "v": 1}])


def test_a_version_that_changes_rows_is_refused_by_name_and_can_be_skipped(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    changed(path)
    source = DeltaSource(path, begin=0)
    text = stopped(source, store)
    assert "version 1" in text and "UPDATE" in text and "changes='skip'" in text and "'feed'" not in text
    assert "no change data feed" in stopped(DeltaSource(path, begin=0, changes="feed"), store)
    found = read(DeltaSource(path, begin=0, changes="skip"), store)
    assert sorted(ns(found)) == [0, 1, 2, 3, 4, 5, 8]


def test_the_feed_has_what_the_reader_of_delta_rs_has(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    changed(path, FEED)
    assert "changes='feed'" in stopped(DeltaSource(path, begin=0), store)
    found = read(DeltaSource(path, begin=0, snapshot=False, changes="feed"), store, "feed")
    wanted = pa.table(deltalake.DeltaTable(path).load_cdf(starting_version=0)).to_pylist()
    assert sorted(map(repr, map(plain, found))) == sorted(map(repr, map(plain, wanted)))
    # The changes of each row, one after the other, make the table that is there.
    rows: dict[int, Any] = {}
    for message in sorted(
        found, key=lambda m: (m["_commit_version"], m["_change_type"] in ("insert", "update_postimage"))
    ):
        if message["_change_type"] in ("insert", "update_postimage"):
            rows[message["n"]] = message["v"]
        else:
            assert rows.pop(message["n"]) == message["v"]
    there = pa.table(deltalake.QueryBuilder().register("t", deltalake.DeltaTable(path)).execute("select n, v from t"))
    assert rows == {row["n"]: row["v"] for row in there.to_pylist()}


def plain(row: dict[str, Any]) -> list[Any]:
    return sorted((name, value) for name, value in row.items() if name != "_commit_timestamp")


def test_the_snapshot_of_a_feed_is_inserts(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    add(path, numbered(1), configuration=FEED)
    add(path, numbered(2))
    deltalake.DeltaTable(path).delete("n = 1")
    source = DeltaSource(path, begin=1, changes="feed")
    found = [(m["_change_type"], m["n"], m["_commit_version"]) for m in read(source, store)]
    assert sorted(found[:2]) == [("insert", 1, 1), ("insert", 2, 1)] and found[2:] == [("delete", 1, 2)]


def test_another_changes_in_the_middle_of_a_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    add(path, numbered(0), configuration=FEED)
    add(path, numbered(1, 2))
    items = [*DeltaSource(path, begin=1, snapshot=False)(None)]
    middle, end = items[1][0], items[-1][0]
    with pytest.raises(Diverged, match=r"inside of version 1.*'refuse', not 'feed'"):
        [*DeltaSource(path, changes="feed")(middle)]
    assert [*DeltaSource(path, changes="feed")(end)] == []


# --- columns and values -------------------------------------------------------------------------


def test_a_version_has_the_columns_that_the_table_has_then(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    add(path, [{"n": 1, "s": {"a": 1}}])
    source = DeltaSource(path)
    read(source, store)
    add(path, [{"n": 2, "s": {"a": 2}, "city": "Oslo"}], schema_mode="merge")
    add(path, numbered(3), schema_mode="merge")
    wanted = [
        {"n": 1, "s": {"a": 1}},
        {"n": 2, "s": {"a": 2}, "city": "Oslo"},
        {"n": 3, "s": None, "city": None},
    ]
    assert read(source, store) == wanted
    with testing.temporary_store() as other:  # files of earlier versions get the later columns
        again = read(source, other)
    assert sorted(again, key=lambda row: row["n"]) == [{"n": 1, "s": {"a": 1}, "city": None}, *wanted[1:]]


@pytest.mark.parametrize("by", [[], ["p", "q"]], ids=["whole", "divided"])
def test_columns_are_chosen(tmp_path: Path, store: cues.Store, by: list[str]) -> None:
    add(tmp_path / "t", [{"n": 1, "p": "x", "q": 2, "r": 3}], partition_by=by)
    assert read(DeltaSource(tmp_path / "t", columns=["q", "p"]), store) == [{"q": 2, "p": "x"}]
    assert "has no column 'z'" in stopped(DeltaSource(tmp_path / "t", columns=["z"]), store)


VALUES = [
    (pa.int8(), -5), (pa.int64(), -(1 << 63)), (pa.float32(), 1.5), (pa.float64(), 0.1), (pa.bool_(), True),
    (pa.bool_(), False), (pa.string(), "a/b=c ü%41"), (pa.string(), "null"), (pa.date32(), date(1, 1, 1)),
    (pa.timestamp("us"), datetime(2024, 2, 29, 1, 2, 3, 4)), (pa.timestamp("us"), datetime(2024, 2, 29)),
    (pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, UTC)), (pa.decimal128(38, 4), Decimal("1.5000")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=str)
def test_a_value_is_the_same_in_a_column_and_in_a_directory(
    tmp_path: Path, store: cues.Store, kind: Any, value: Any
) -> None:
    rows = [{"n": 1, "v": value}, {"n": 2, "v": None}]
    for name, by in (("column", None), ("directory", ["v"])):
        add(tmp_path / name, pa.Table.from_pylist(rows, pa.schema({"n": pa.int64(), "v": kind})), partition_by=by)
        found = read(DeltaSource(tmp_path / name, begin=0), store, f"snapshot-{name}")
        assert sorted(found, key=lambda row: row["n"]) == rows
        found = read(DeltaSource(tmp_path / name, begin=0, snapshot=False), store, f"versions-{name}")
        assert sorted(found, key=lambda row: row["n"]) == rows


def test_times_of_spark_outside_of_nanoseconds_are_read(tmp_path: Path, store: cues.Store) -> None:
    """Spark writes the times of a Parquet file as INT96, which pyarrow reads as nanoseconds, with an overflow."""
    add(tmp_path / "t", pa.table({"at": pa.array([datetime(1, 1, 1)], pa.timestamp("us", "UTC"))}))
    (file,) = (tmp_path / "t").glob("*.parquet")
    table = pa.table({"at": pa.array([datetime(1, 1, 1), datetime(9999, 1, 1)], pa.timestamp("us"))})
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)
    assert [row["at"].year for row in read(DeltaSource(tmp_path / "t"), store)] == [1, 9999]


@pytest.mark.slow
def test_rows_come_as_columns_and_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t"
    text = "x" * 10_000
    deltalake.write_deltalake(path, pa.table({"n": range(20_000), "s": [text] * 20_000}))
    (file,) = path.glob("*.parquet")
    pq.write_table(pa.table({"n": range(20_000), "s": [f"{n}{text}" for n in range(20_000)]}), file)
    before = pa.total_allocated_bytes()
    most, sizes = 0, []
    for _, rows in DeltaSource(path).in_columns(None):
        if rows is not None:
            sizes.append(len(rows))
            most = max(most, pa.total_allocated_bytes() - before)
    assert sum(sizes) == 20_000 and max(sizes) < 10_000 and most < 150 << 20
    sizes = [len(rows) for _, rows in DeltaSource(path, columns=["n"], batch_rows=300).in_columns(None) if rows]
    assert max(sizes) == 300


# --- positions ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["skip", "feed"])
def test_from_each_position_the_rest_follows(tmp_path: Path, changes: str) -> None:
    path = tmp_path / "t"
    changed(path, FEED)
    for options in ({"begin": 0}, {"snapshot": False, "begin": 0}, {}):
        source = DeltaSource(path, changes=changes, batch_rows=1, **options)
        items = [*source(None)]
        for at, (position, _) in enumerate(items):
            assert [*source(json.loads(json.dumps(position)))] == items[at + 1 :]
        tables = [(position, table) for position, table in source.in_columns(None) if table is not None]
        assert [row for _, table in tables for row in table.to_pylist()] == [m for _, m in items if m is not None]


def test_what_the_table_has_forgotten_is_said(tmp_path: Path, store: cues.Store) -> None:
    path = tmp_path / "t"
    add(path, numbered(*range(10)))
    source = DeltaSource(path, batch_rows=3)
    items = [*source(None)]
    middle = next(position for position, message in items if message == {"n": 4})
    deltalake.DeltaTable(path).optimize.compact()
    add(path, numbered(10), mode="overwrite")
    table = deltalake.DeltaTable(path)
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(Diverged, match=r"forgotten rows.*is gone, as vacuum(.|\n)*another id"):
        [*source(middle)]
    for n in range(11, 14):
        add(path, numbered(n))
    deltalake.DeltaTable(path).create_checkpoint()
    for name in range(3):
        (path / "_delta_log" / f"{name:020}.json").unlink()
    with pytest.raises(Diverged, match=r"the log (has|does)"):
        [*source(items[-1][0])]


def test_another_table_and_a_table_that_went_back_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    add(path, numbered(1))
    add(path, numbered(2))
    source = DeltaSource(path)
    position = [*source(None)][-1][0]
    shutil.rmtree(path)
    add(path, numbered(1))
    with pytest.raises(Diverged, match="is another one"):
        [*source(position)]
    position[1] = str(deltalake.DeltaTable(path).metadata().id)
    with pytest.raises(Diverged, match="newest version"):
        [*source(position)]
    for strange in ([1], 5, [2, *position[1:]]):
        with pytest.raises(Diverged, match="is not one of"):
            [*source(strange)]


@pytest.mark.parametrize("versions", [1, 3, 6])
def test_a_table_that_is_made_again_while_it_is_followed_is_refused(tmp_path: Path, versions: int) -> None:
    """The new table has fewer, as many or more versions than were read: no row of it is a message."""
    path = tmp_path / "t"
    for n in range(3):
        add(path, numbered(n))
    items = DeltaSource(path, follow=True, poll_s=0)(None)
    position: Any = None
    while position is None or position[2] < 3:
        position, _ = next(items)
    shutil.rmtree(path)
    for n in range(100, 100 + versions):
        add(path, numbered(n))
    with pytest.raises(Diverged, match="is another one: its id is"):
        next(items)


def test_a_table_that_is_made_again_before_the_second_of_two_new_versions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    add(path, numbered(0))
    items = DeltaSource(path, begin=0, follow=True, poll_s=0)(None)
    position: Any = None
    while position is None or position[2] < 1:
        position, _ = next(items)
    add(path, numbered(1))
    add(path, numbered(2))
    assert next(items)[1] == {"n": 1} and next(items)[1] is None
    shutil.rmtree(path)
    for n in range(100, 104):
        add(path, numbered(n))
    with pytest.raises(Diverged, match="is another one: its id is"):
        next(items)


def test_a_restored_table_with_another_version_is_refused_while_it_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    add(path, numbered(0))
    shutil.copytree(path, tmp_path / "backup")
    add(path, numbered(1))
    items = DeltaSource(path, follow=True, poll_s=0)(None)
    position: Any = None
    while position is None or position[2] < 2:
        position, _ = next(items)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    add(path, numbered(2))
    with pytest.raises(Diverged, match=r"The version 1 of .* is another one than that which was read"):
        next(items)


def test_a_copy_with_new_times_of_files_begins_at_the_times_of_its_versions(tmp_path: Path) -> None:
    for n in range(4):
        add(tmp_path / "t", numbered(n))
    logs = sorted((tmp_path / "t" / "_delta_log").glob("*.json"))
    for day, log in enumerate(logs, 1):
        at = int(datetime(2024, 1, day, tzinfo=UTC).timestamp())
        log.write_text(re.sub(r'"timestamp":\d+', f'"timestamp":{at}000', log.read_text()))
    for day in range(5):
        begin = datetime(2024, 1, 1, 12, tzinfo=UTC) + timedelta(days=day - 1)
        found = [message for _, message in DeltaSource(tmp_path / "t", begin=begin, snapshot=False)(None) if message]
        assert ns(found) == list(range(day, 4))


@pytest.mark.parametrize("name", ["t", "connection refused", "503 Service", "status 500"])
def test_a_broken_file_is_named_and_is_no_outage(tmp_path: Path, name: str) -> None:
    add(tmp_path / name, numbered(1))
    [file] = (tmp_path / name).glob("*.parquet")
    file.write_bytes(b"not a file of Parquet")
    for source in (DeltaSource(tmp_path / name), DeltaSource(tmp_path / name).in_columns):
        with pytest.raises(InvalidArgument, match=f"{file.name} of the Delta table .*{name} cannot be read"):
            [*source(None)]


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("Client error with status 503: no body", True),
        ("Server returned non-2xx status code: 429 Too Many Requests: x", True),
        ("503 Server Error: Service Unavailable for url: http://a/b", True),
        ("AWS Error SLOW_DOWN during PutObject operation", True),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Couldn't connect to server", True),
        ("error sending request for url (http://127.0.0.1:9/lake/t)", True),
        ("Generic S3 error: Connection reset by peer (os error 104)", True),
        ("Requested snapshot version 500 is not available", False),
        ("Unable to open file /lake/500/_delta_log/00000000000000000503.json", False),
        ("Permission denied: file:///data/tcp%20connect/timeout/t", False),
        ("Schema error: No field named connection. Valid fields are 503", False),
        ("The table lake/my timed out orders has no such file", False),
    ],
)
def test_an_outage_is_known_by_words_and_not_by_names_and_numbers(text: str, away: bool) -> None:
    assert lake.says_away(text, "lake/my timed out orders") is away


# --- refusals -----------------------------------------------------------------------------------


def edited(path: Path, old: str, new: str, version: int = 0) -> None:
    log = path / "_delta_log" / f"{version:020}.json"
    text = re.sub(old, new, log.read_text())
    assert text != log.read_text()
    log.write_text(text)


def deletion_vector(*rows: int) -> dict[str, Any]:
    """A deletion vector as the protocol of Delta has it inside of the log: a portable Roaring bitmap in Z85."""
    bits = struct.pack(f"<IQIIIHHI{len(rows)}H", 1681511377, 1, 0, 12346, 1, 0, len(rows) - 1, 16, *rows)
    bits += b"\0" * (-len(bits) % 4)
    signs = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    words = struct.unpack(f">{len(bits) // 4}I", bits)
    text = "".join(signs[word // 85**power % 85] for word in words for power in range(4, -1, -1))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(bits), "cardinality": len(rows)}


@pytest.mark.parametrize("snapshot", [True, False])
def test_features_that_are_not_read_are_refused_by_name(tmp_path: Path, store: cues.Store, snapshot: bool) -> None:
    vector = f'"deletionVector":{json.dumps(deletion_vector(3, 4))},"dataChange"'
    protocol = '"protocol":{"minReaderVersion":3,"minWriterVersion":7,"readerFeatures":[F],"writerFeatures":[F]}'
    for feature, old, new in (
        ("deletionVectors", '"dataChange"', vector),
        ("columnMapping", '"configuration":{}', '"configuration":{"delta.columnMapping.mode":"name"}'),
        ("variantType", '"x"', '"y"'),
    ):
        path = tmp_path / feature
        add(path, [{"n": n, "t": "x"} for n in range(40)])
        edited(path, r'"protocol":\{[^}]*\}', protocol.replace("F]", f'"{feature}"]'))
        if feature == "deletionVectors":
            edited(path, re.escape(old), new)
        if feature == "columnMapping":
            edited(path, r'"configuration":\{\}', new)
            edited(
                path,
                r'\\"metadata\\":\{\}',
                r'\\"metadata\\":{\\"delta.columnMapping.id\\":1,\\"delta.columnMapping.physicalName\\":\\"n\\"}',
            )
        text = stopped(DeltaSource(path, begin=0, snapshot=snapshot), store)
        assert {"deletionVectors": "deletion vector", "columnMapping": "column mapping"}.get(feature, feature) in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"begin": -1}, "begin"),
        ({"begin": True}, "begin"),
        ({"begin": datetime(2024, 1, 1)}, "time zone"),
        ({"changes": "all"}, "refuse, skip, feed"),
        ({"snapshot": 1}, "True or False"),
        ({"columns": []}, "no column"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"reserved": ["q/meta"]}, "reserved"),
    ],
    ids=str,
)
def test_a_mistake_is_told_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        DeltaSource("t", **options)


def test_a_table_that_is_not_there_and_a_version_to_come_are_refused(tmp_path: Path, store: cues.Store) -> None:
    assert "There is no Delta table" in stopped(DeltaSource(tmp_path / "none"), store)
    add(tmp_path / "t", numbered(1))
    assert "newest version" in stopped(DeltaSource(tmp_path / "t", begin=1), store)
    assert "newest version" in stopped(DeltaSource(tmp_path / "t", begin=2, snapshot=False), store)
    add(tmp_path / "feed", [{"n": 1, "_change_type": "x"}])
    assert "_change_type" in stopped(DeltaSource(tmp_path / "feed", changes="feed"), store)


# --- an object store, and kill -9 ---------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with object_store.bucket("lake") as variables:
        yield variables


@pytest.mark.slow
def test_a_table_in_an_object_store(s3: dict[str, str], store: cues.Store) -> None:
    where = "s3://lake/t"
    add(where, [{"n": 1, "p": "a/b=c ü%41"}], partition_by=["p"], storage_options=s3, configuration=FEED)
    add(where, [{"n": 2, "p": "x"}], storage_options=s3)
    deltalake.DeltaTable(where, storage_options=s3).delete("n = 1")
    source = DeltaSource(where, begin=1, changes="feed", storage_options=s3)
    found = [(row["_change_type"], row["n"], row["p"]) for row in read(source, store)]
    first, second = ("insert", 1, "a/b=c ü%41"), ("insert", 2, "x")
    assert sorted(found[:2]) == [first, second] and found[2:] == [("delete", *first[1:])]
    away = {**s3, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "max_retries": "0"}
    with pytest.raises(Away, match="cannot be reached"):
        [*DeltaSource(where, storage_options=away)(None)]


def mirror(path: str) -> None:
    """Read the table to its newest version in this process; a test kills it on the way."""
    source = DeltaSource(Path(path, "t"), begin=3, changes="feed", batch_rows=4)
    graph = cues.Graph("g", [cues.Source("rows", source, batch_size=5)])
    graph.add(cues.Sink(lambda message: print(".", flush=True) if message["n"] % 10 == 0 else None, "rows", id="tell"))
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(graph, store)
    os._exit(0)


CODE = "import sys; from test_processors_delta_source import mirror; mirror(*sys.argv[1:])"


def model(path: Path, versions: int, dice: random.Random) -> None:
    """A table with changes of all kinds, made at random."""
    for version in range(versions):
        kind = dice.choice(["add", "add", "delete", "update"]) if version > 3 else "add"
        if kind == "add":
            numbers = range(version * 20, version * 20 + 20)
            add(path, [{"n": n, "p": n % 3, "v": 0} for n in numbers], partition_by=["p"], configuration=FEED)
        elif kind == "delete":
            deltalake.DeltaTable(path).delete(f"n % 7 = {dice.randrange(7)}")
        else:
            deltalake.DeltaTable(path).update(predicate=f"n % 5 = {dice.randrange(5)}", updates={"v": str(version)})
        if dice.random() < 0.2:
            deltalake.DeltaTable(path).optimize.compact()


@bounded("rounds", 5, 25)
def test_a_source_that_is_killed_at_any_time_has_each_change_once(rounds: int, tmp_path: Path) -> None:
    """Another process changes the table at the same time. The reader of delta-rs says which changes there were."""
    path = tmp_path / "t"
    model(path, 5, random.Random(1))
    writer = threading.Thread(target=model_of_changes, args=(path,))
    writer.start()
    mirrors.killed(CODE, tmp_path, rounds=rounds)
    writer.join()
    mirrors.killed(CODE, tmp_path, rounds=0)
    with cues.open(tmp_path / "store") as store:
        found = list(testing.messages(store, "rows"))
    wanted = pa.table(deltalake.DeltaTable(path).load_cdf(starting_version=4)).to_pylist()
    later = [row for row in found if row["_commit_version"] > 3]
    assert sorted(map(repr, map(plain, later))) == sorted(map(repr, map(plain, wanted)))
    first = [row["n"] for row in found if row["_commit_version"] == 3]
    assert len(first) == len(set(first)) and len(first) + len(later) == len(found)


def model_of_changes(path: Path) -> None:
    dice = random.Random(2)
    for version in range(20, 60):
        if dice.random() < 0.6:
            add(path, [{"n": n, "p": n % 3, "v": 0} for n in range(version * 20, version * 20 + 20)])
        elif dice.random() < 0.5:
            deltalake.DeltaTable(path).delete(f"n % 7 = {dice.randrange(7)}")
        else:
            deltalake.DeltaTable(path).update(predicate=f"n % 5 = {dice.randrange(5)}", updates={"v": str(version)})


@pytest.mark.slow
@pytest.mark.parametrize("point", ["commit.inside", "commit.after"])
def test_a_source_that_is_killed_at_a_point_has_each_row_once(tmp_path: Path, point: str) -> None:
    model(tmp_path / "t", 6, random.Random(3))
    mirrors.killed_at(point, CODE, tmp_path, hits=(2,))
    with cues.open(tmp_path / "store") as store:
        found = list(testing.messages(store, "rows"))
    with testing.temporary_store() as other:
        assert found == read(DeltaSource(tmp_path / "t", begin=3, changes="feed"), other)


@pytest.mark.slow
def test_100_000_rows_of_many_files(tmp_path: Path, store: cues.Store) -> None:
    for first in range(0, 100_000, 10_000):
        add(tmp_path / "t", pa.table({"n": range(first, first + 10_000)}))
    assert sorted(ns(read(DeltaSource(tmp_path / "t", batch_rows=999), store))) == list(range(100_000))
