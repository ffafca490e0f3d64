"""Queues of a shared directory as other tools read them: every reader of Delta tables, without hints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder
from directory_steps import messages_of, messages_of_log
from pages import run_page
from test_format import GOLDEN, golden

import cues
from cues import codec
from cues.spark.cluster import cleaning
from cues.spark.cluster.data import Writer
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.files import Files, open_files

Row = tuple[Any, ...]
SQL = 'select partition, first + "offset" as "index", n, value from {} order by 1, 2'
DAY = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)


def queried(table: DeltaTable, text: str) -> list[Row]:
    found = pa.table(QueryBuilder().register("queue", table).execute(text).read_all())
    return [tuple(row.values()) for row in found.to_pylist()]


def by_pyarrow(table: DeltaTable) -> list[Row]:
    rows = table.to_pyarrow_table(columns=["partition", "first", "offset", "n", "value"]).to_pylist()
    return sorted((r["partition"], r["first"] + r["offset"], r["n"], r["value"]) for r in rows)


def by_polars(table: DeltaTable, **how: Any) -> list[Row]:
    rows = pl.scan_delta(table.table_uri, **how).sort("partition", "first", "offset")
    return rows.select("partition", pl.col("first") + pl.col("offset"), "n", "value").collect().rows()


def by_duckdb(table: DeltaTable) -> list[Row]:
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    try:
        connection.load_extension("delta")
    except duckdb.Error as error:
        pytest.skip(f"DuckDB has no extension delta here: {error}")
    return connection.sql(SQL.format(f"delta_scan('{table.table_uri}')")).fetchall()


def by_duckdb_of_rows(table: DeltaTable) -> list[Row]:
    rows = duckdb.from_arrow(pa.table(table.scan().read_all()))
    return rows.query("queue", SQL.format("queue")).fetchall()


READERS: dict[str, Callable[[DeltaTable], list[Row]]] = {
    "delta-rs": lambda table: queried(table, SQL.format("queue")),
    "delta-rs, pyarrow": by_pyarrow,
    "polars": by_polars,
    "polars, pyarrow": partial(by_polars, use_pyarrow=True),
    "DuckDB": by_duckdb,
    "DuckDB, delta-rs": by_duckdb_of_rows,
}
"""Readers of other projects: each returns partition, index, a field and the packed message, in order."""


def expected(files: Files, queue: str) -> list[Row]:
    """The rows as Cues reads them."""
    return [
        (log.partition, index, message["n"], codec.pack(message))
        for log in QueueDirectory(files, queue, cues.QueueOptions()).logs
        for index, message in enumerate(messages_of_log(log), log.first)
    ]


@pytest.fixture(scope="module", params=["new", "continued"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this version; and one of an earlier version, which this version has continued, and merged."""
    path = tmp_path_factory.mktemp("shared") / "directory"
    if request.param == "continued":
        shutil.copytree(GOLDEN / "v1-shared", path)
        golden.make_shared(path, 30)
    golden.make_shared(path, 40)
    files = open_files(str(path))
    if request.param == "continued":
        assert {file.is_placed for file in QueueDirectory(files, "priced", cues.QueueOptions()).live} == {True, False}
        assert READERS["delta-rs"](DeltaTable(str(path / "priced"))) == expected(files, "priced")
        cleaning.merge(files, cleaning.plan_merge(files, "priced"))
    return path


@pytest.mark.parametrize("reader", READERS)
def test_one_queue_is_the_same_rows_for_every_reader(place: Path, reader: str) -> None:
    """Partitions, indices, a field and the messages, in a queue that one step wrote with several files."""
    rows = READERS[reader](DeltaTable(str(place / "priced")))
    assert rows == expected(open_files(str(place)), "priced")
    assert len(rows) == 40 and {n for _, _, n, _ in rows} == set(range(40))


def test_a_directory_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    """Killed there between its last commit and the log; its files stay where they are, and new ones are beside them."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(GOLDEN / "v1-shared", old)
    (old / "totals/_delta_log/00000000000000000005.json").unlink()
    before = {path.relative_to(old) for path in old.rglob("*.parquet")}
    golden.make_shared(old, 40)
    golden.make_shared(new, 40)
    for queue, key in (("orders", "n"), ("priced", "n"), ("totals", "total")):
        opened = (QueueDirectory(open_files(str(path)), queue, cues.QueueOptions()) for path in (old, new))
        kept, made = (sorted(messages_of(each), key=lambda m: (m["user"], m[key])) for each in opened)
        assert kept == made and len(kept) == 40
    assert {name for name in before if name.parts[0] != "_cues"} <= {path.relative_to(old) for path in old.rglob("*")}


def test_an_earlier_version_can_remove_files_by_their_paths(tmp_path: Path) -> None:
    """Its ``cues optimize`` quotes the names that it has read. Another path would leave the messages twice."""
    golden.make_shared(tmp_path, 40)
    files = open_files(str(tmp_path))
    gone = QueueDirectory(files, "priced", cues.QueueOptions()).live[0]
    entries = sorted((tmp_path / "priced/_delta_log").glob("*.json"))
    actions = [json.loads(line) for entry in entries for line in entry.read_text().split("\n")]
    assert quote(gone.name) in [action["add"]["path"] for action in actions if "add" in action]
    remove = {"remove": {"path": quote(gone.name), "deletionTimestamp": 1, "dataChange": True}}
    entries[-1].with_name(f"{len(entries):020d}.json").write_text(json.dumps(remove))
    table = DeltaTable(str(tmp_path / "priced"))
    assert table.to_pyarrow_table().num_rows == 40 - gone.count == len(READERS["polars"](table))


@pytest.mark.parametrize("last", [False, True], ids=["files", "one file"])
def test_optimize_moves_files_of_an_earlier_version(tmp_path: Path, last: bool) -> None:
    """Also a single one, and the last one. Then no reader sees NULL; no message has changed; a graph goes on."""
    shutil.copytree(GOLDEN / "v1-shared", tmp_path / "d")
    files = open_files(str(tmp_path / "d"))
    directory = QueueDirectory(files, "priced", cues.QueueOptions())
    if last:
        for log in directory.logs:
            directory.exchange(log.live[:-1], [])
    kept = expected(files, "priced")
    merged = cleaning.merge(files, cleaning.plan_merge(files, "priced"))
    assert merged.runs and not cleaning.plan_merge(files, "priced").runs
    table = DeltaTable(str(tmp_path / "d/priced"))
    assert by_polars(table) == kept == READERS["delta-rs"](table)
    golden.make_shared(tmp_path / "d", 25)
    rows = expected(files, "priced")
    assert len(rows) == len(kept) + 5 and set(kept) <= set(rows)


# --- statistics ---------------------------------------------------------------------------------


def filled(path: Path, *given: tuple[datetime, list[dict[str, Any]]], schema: dict[str, str]) -> QueueDirectory:
    """A queue with a file of each of these: the time of its messages, and the messages."""
    files = open_files(str(path))
    files.ensure("_cues/id.json", b'{"id": "1"}')
    directory = QueueDirectory(files, "in", cues.QueueOptions(schema=schema))
    directory.own("g")
    for number, (time, messages) in enumerate(given):
        writer = Writer(files, directory.folder, "g.f", number, 0, directory.columns)
        times = [int((time - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))] * len(messages)
        writer.add([codec.pack(m) for m in messages], [f"{number:032x}"] * len(messages), None, times)
        file = writer.close()
        assert file is not None
        directory.publish("g.f", number, directory.numbered([file]))
    return directory


def days(count: int) -> list[tuple[datetime, list[dict[str, Any]]]]:
    """Files of a day each, of which the later ones are longer."""
    return [
        (DAY + timedelta(days=day), [{"n": day * 100 + n, "name": f"day {day}"} for n in range(day + 1)])
        for day in range(count)
    ]


FILTERS: dict[str, tuple[str, pl.Expr, int]] = {
    "time": ("time >= timestamp '2026-01-04T00:00:00.123456Z'", pl.col("time") >= DAY + timedelta(days=3), 3),
    "offset": ('"offset" = 3', pl.col("offset") == 3, 3),
    "first": ("first = 7", pl.col("first") == 7, 3),
    "hash": (f"hash = '{3:032x}'", pl.col("hash") == f"{3:032x}", 3),
    "a field": ("n > 299", pl.col("n") > 299, 3),
    "a text": ("name = 'day 1'", pl.col("name") == "day 1", 1),
}


@pytest.mark.parametrize("filter", FILTERS)
def test_a_filter_skips_files_by_statistics(tmp_path: Path, filter: str) -> None:
    """The files that it skips are gone, which nobody notices; a query without a filter does."""
    text, expression, day = FILTERS[filter]
    directory = filled(tmp_path, *days(4), schema={"n": "long", "name": "string"})
    for file in directory.live:
        if f"-{day:012d}-" not in file.name:
            (tmp_path / "in" / file.name).unlink()
    rows = list(range(day * 100, day * 100 + day + 1))
    wanted = rows if filter != "offset" else rows[3:]
    table = DeltaTable(str(tmp_path / "in"))
    assert [n for (n,) in queried(table, f"select n from queue where {text} order by n")] == wanted
    assert pl.scan_delta(str(tmp_path / "in")).filter(expression).select("n").collect().to_series().to_list() == wanted
    with pytest.raises(Exception, match=r"(?i)not ?found|no such file"):
        queried(table, "select n from queue")
    with pytest.raises(FileNotFoundError):
        pl.scan_delta(str(tmp_path / "in")).select("n").collect()


VALUES: dict[str, list[Any]] = {
    "long": [-(2**63), 2**63 - 1, 2**53 + 1, 0],
    "byte": [-128, 127],
    "double": [0.1, -0.0, 0.0, 1e308, -1e-300, float("inf"), float("-inf"), float("nan")],
    "float": [0.5, -2.0],
    "string": [
        "",
        "a",
        "é",
        "z" * 32,
        "z" * 33,
        "z" * 40,
        "z" * 32 + "\U0010ffff" * 2,
        "\U0001f600",
        "\uffff",
        "a\x00b",
        '"\\\n',
    ],
    "date": [date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31)],
    "timestamp": [
        DAY,
        DAY + timedelta(microseconds=1),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
    "boolean": [True, False],
    "decimal(20,2)": [Decimal("123456789012345678.91"), Decimal("-0.01")],
    "decimal(4,2)": [Decimal("-99.99"), Decimal("-0.01"), Decimal("98.01")],
    "struct<a:long>": [{"a": 1}, {"a": None}],
}


@pytest.mark.parametrize("kind", VALUES)
def test_statistics_hide_no_row(tmp_path: Path, kind: str) -> None:
    """The least and the largest values of each type, alone in a file, with NULL, and together: each is found."""
    values = VALUES[kind]
    groups: list[list[Any]] = [*([value] for value in values), [None], [None, values[0]], values, [*values, None]]
    given = [(DAY, [{"n": at, "v": v} for v in group]) for at, group in enumerate(groups)]
    filled(tmp_path, *given, schema={"n": "long", "v": kind})
    path = str(tmp_path / "in")
    for entry in (tmp_path / "in/_delta_log").glob("*.json"):
        assert [json.loads(line) for line in entry.read_text("utf-8").splitlines()]
    everything = DeltaTable(path).to_pyarrow_table().select(["n", "v"])
    rows = list(zip(everything["n"].to_pylist(), everything["v"].to_pylist()))
    assert sorted(n for n, _ in rows) == sorted(at for at, group in enumerate(groups) for _ in group)
    dataset = DeltaTable(path).to_pyarrow_dataset()
    for chosen, keep in (("is_null", True), ("is_valid", False)):
        found = dataset.to_table(["n"], getattr(ds.field("v"), chosen)())["n"].to_pylist()
        assert sorted(found) == sorted(n for n, v in rows if (v is None) is keep)
    for value in values if "<" not in kind else []:
        alike = dataset.to_table(["n"], ds.field("v") == pa.scalar(value, everything["v"].type))["n"].to_pylist()
        assert sorted(alike) == sorted(n for n, v in rows if v == value), value
        wanted = sorted(n for n, v in rows if v == value or (v != v and value != value))
        column = pl.col("v")
        same = column.is_nan() if value != value else column == pl.lit(value, pl.read_delta(path).schema["v"])
        assert sorted(pl.scan_delta(path).filter(same).collect()["n"]) == wanted, value
        assert sorted(pl.scan_delta(path).filter(column >= value).collect()["n"]) == sorted(at_least(rows, value))
    nulls = sorted(n for n, v in rows if v is None)
    assert sorted(pl.scan_delta(path).filter(pl.col("v").is_null()).collect()["n"]) == nulls
    assert [n for (n,) in queried(DeltaTable(path), "select n from queue where v is null order by n")] == nulls


def at_least(rows: Iterable[tuple[int, Any]], value: Any) -> list[int]:
    """The rows whose value is not less; NaN is the largest number in polars."""
    nan = value != value
    return [n for n, v in rows if v is not None and (v != v or (not nan and v >= value))]


def test_the_page_for_other_tools_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden.make_shared(tmp_path / "shared", 40)
    page = Path(__file__).parent.parent / "docs/spark-tables.md"
    assert run_page(page, tmp_path, monkeypatch, capsys) == 3
