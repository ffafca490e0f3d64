"""Columns of tables in files: the type of every value, what widens, what is refused by name, what a file then has."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import cues
from cues import testing
from cues.errors import InvalidArgument
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

pa = pytest.importorskip("pyarrow")

EAST = timezone(timedelta(hours=2))
ID = UUID("12345678-1234-5678-1234-567812345678")
SAME: list[Any] = [
    None, True, 0, -(2**63), 2**63 - 1, 1.5, float("inf"), "x", "", b"\xff", date(9999, 12, 31), time(1, 2, 3, 4),
    datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=EAST),
    timedelta(days=-1, microseconds=1), Decimal("1.50"), Decimal("-123456789012345678901234567890.1"), [], [1, None],
    [["a"]], {"a": {"b": [1.5]}},
]  # fmt: skip
PLAINER = [(ID, str(ID)), ((1, 2), [1, 2]), (bytearray(b"x"), b"x")]
REFUSED = [2**63, {}, [{}], {"a": {}}, {1: 2}, {1}, Decimal("NaN"), Decimal(10) ** 80]
WIDER = [
    ([1, 2.5], [1.0, 2.5]),
    ([None, 1], [None, 1]),
    ([Decimal("1.5"), Decimal("100"), 7], [Decimal("1.5"), Decimal(100), Decimal(7)]),
    ([[], ["a"]], [[], ["a"]]),
    ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
    ([datetime(2026, 1, 2, tzinfo=EAST), datetime(2026, 1, 2, tzinfo=UTC)],) * 2,
]
APART = [
    [1, "n/a"], [2**60, 1.5], [1.5, 2**60 + 1], [True, 1], [b"b", "a"], [date(2026, 1, 1), datetime(2026, 1, 1)],
    [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)], [time(1), date(2026, 1, 1)], [[1], 1],
]  # fmt: skip


def written(
    path: Path, format: str, values: Sequence[Any], batch: int, schema: Any = None
) -> tuple[list[Any], list[str]]:
    """The values of the column ``v`` in all finished files, and the messages of the errors."""
    out = FileSink(path / f"{format}-{batch}", format, durability="process", schema=schema)
    graph = cues.Graph("g", [cues.Source("q", None), out.sink("q", batch_size=batch)], errors="errors")
    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([{"v": value} for value in values])
        testing.run_until_idle(graph, store)
        errors = [error["err/cause"][0]["message"] for error in testing.messages(store, "errors")]
    found: list[Any] = []
    for name in out.finish():
        if format == "parquet":
            table = __import__("pyarrow.parquet").parquet.read_table(name)
        else:
            table = pa.ipc.open_file(name).read_all()
        found += table.column("v").to_pylist()
    return found, errors


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize(("value", "kept"), [*((value, value) for value in SAME), *PLAINER], ids=repr)
def test_a_value_is_in_the_file_as_it_was_sent_or_in_its_plainer_form(
    value: Any, kept: Any, format: str, tmp_path: Path
) -> None:
    found, errors = written(tmp_path, format, [value], 1)
    assert not errors and found == [kept] and type(found[0]) is type(kept)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_a_value_without_a_type_is_refused_with_its_column_and_the_others_are_in_the_file(
    value: Any, format: str, tmp_path: Path
) -> None:
    found, errors = written(tmp_path, format, ["a", value, "b"], 100)
    assert found == ["a", "b"]
    assert len(errors) == 1 and "'v" in errors[0]


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize(("values", "kept"), WIDER, ids=repr)
def test_columns_widen_in_one_file_whatever_the_size_of_a_step(
    values: list[Any], kept: list[Any], batch: int, tmp_path: Path
) -> None:
    found, errors = written(tmp_path, "parquet", values, batch)
    assert not errors and found == kept
    assert len(list((tmp_path / f"parquet-{batch}").glob("*.parquet"))) == 1


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("values", APART, ids=repr)
def test_a_value_of_another_type_is_refused_and_changes_nothing(values: list[Any], batch: int, tmp_path: Path) -> None:
    found, errors = written(tmp_path, "parquet", values, batch)
    assert len(errors) == 1 and "'v'" in errors[0]
    assert found == values[:1] and type(found[0]) is type(values[0])


SCHEMAS = [
    (pa.int8(), 5, 5), (pa.uint64(), 2**64 - 1, 2**64 - 1), (pa.int32(), 2.0, 2), (pa.float32(), 1.5, 1.5),
    (pa.float64(), 3, 3.0), (pa.decimal128(38, 2), Decimal("1.5"), Decimal("1.50")), (pa.large_string(), "x", "x"),
    (pa.timestamp("ms", "UTC"), datetime(2026, 1, 1, tzinfo=EAST), datetime(2026, 1, 1, tzinfo=EAST)),
    (pa.list_(pa.int8()), [1], [1]), (pa.map_(pa.string(), pa.int8()), [("a", 1)], [("a", 1)]),
    (pa.binary(2), b"ab", b"ab"),
]  # fmt: skip
MISFITS = [
    (pa.int8(), 128), (pa.int64(), 1.5), (pa.int64(), True), (pa.uint8(), -1), (pa.float64(), 2**53 + 1),
    (pa.float32(), 1e300), (pa.date32(), datetime(2026, 1, 1, 12)),
    (pa.timestamp("us"), datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.timestamp("s"), datetime(2026, 1, 1, 0, 0, 0, 1)), (pa.decimal128(5, 1), Decimal("1.55")),
    (pa.string(), b"x"), (pa.binary(2), b"abc"), (pa.struct({"x": pa.int64()}), {"x": 1, "y": 2}),
    (pa.time64("us"), time(1, tzinfo=UTC)), (pa.null(), 1), (pa.list_(pa.int8()), [300]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "kept"), SCHEMAS, ids=repr)
def test_a_schema_takes_what_it_holds_exactly(kind: Any, value: Any, kept: Any, tmp_path: Path) -> None:
    assert written(tmp_path, "parquet", [value, None], 100, pa.schema({"v": kind})) == ([kept, None], [])


@pytest.mark.parametrize(("kind", "value"), MISFITS, ids=repr)
def test_a_schema_cuts_and_rounds_nothing(kind: Any, value: Any, tmp_path: Path) -> None:
    found, errors = written(tmp_path, "parquet", [None, value, None], 100, pa.schema({"v": kind}))
    assert found == [None, None]
    assert len(errors) == 1 and "'v" in errors[0]


def test_what_is_never_null_is_not_null(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    found, errors = written(tmp_path, "parquet", [1, None, 2], 100, schema)
    assert found == [1, 2] and len(errors) == 1 and "never null" in errors[0]


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.struct([]), pa.list_(pa.struct([]))])
def test_a_schema_that_no_finished_file_can_have_is_refused_at_the_declaration(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"schema=: .*'?v"):
        FileSink(tmp_path / "out", "parquet", schema=pa.schema({"v": kind}))


def test_a_row_without_columns_is_refused(tmp_path: Path) -> None:
    for format in ("parquet", "arrow", "csv"):
        out = FileSink(tmp_path / format, format, durability="process")
        graph = cues.Graph("g", [cues.Source("q", None), out.sink("q")], errors="errors")
        with testing.temporary_store() as store:
            store.queue("q").appender().write_many([{}])
            testing.run_until_idle(graph, store)
            assert len(testing.messages(store, "errors")) == 1


def test_types_stay_from_file_to_file(tmp_path: Path) -> None:
    """All files of a sink are one dataset: a column that was widened stays so in the next file."""
    out = FileSink(tmp_path / "out", "parquet", durability="process", roll_bytes=0)
    graph = cues.Graph("g", [cues.Source("q", None), out.sink("q", batch_size=1)], errors="errors")
    with testing.temporary_store() as store:
        store.queue("q").appender().write_many([{"v": 1.5}, {"v": 2}, {"w": "x"}, {"v": 3}])
        testing.run_until_idle(graph, store)
    parquet = __import__("pyarrow.parquet").parquet
    schemas = [parquet.read_schema(name) for name in sorted(out.finish())]
    assert [str(schema.field("v").type) for schema in schemas] == ["double"] * 4
    assert [schema.names for schema in schemas] == [["v"], ["v"], ["v", "w"], ["v", "w"]]


def test_an_open_file_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    """It noted the schema alone; its integers may be of any size, so that they do not become floats."""
    import json

    out = FileSink(tmp_path / "out", "parquet", durability="process")
    graph = cues.Graph("g", [cues.Source("q", None), out.sink("q", batch_size=1)], errors="errors")
    with testing.temporary_store() as store:
        appender = store.queue("q").appender()
        appender.write({"v": 1})
        testing.run_until_idle(graph, store)
        (row,) = (tmp_path / "out" / "_cues").rglob("*.json")
        state = json.loads(row.read_text())
        (open_file,), (layout,) = state["open"], state["layouts"]
        former = {name: state[name] for name in ("format", "ending", "row", "next", "finishing")}
        former["open"] = {"layout": layout["schema"]} | {
            name: open_file[name] for name in ("number", "length", "since")
        }
        row.write_text(json.dumps(former | {"cues": 1}))
        appender.write_many([{"v": 2}, {"v": 2.5}, {"v": 3, "w": 1}])
        testing.run_until_idle(graph, store)
        assert len(testing.messages(store, "errors")) == 1
    (name,) = out.finish()
    found = __import__("pyarrow.parquet").parquet.read_table(name).to_pylist()
    assert found == [{"v": 1, "w": None}, {"v": 2, "w": None}, {"v": 3, "w": 1}]


# --- files that others have written ---------------------------------------------------------------

NANOSECONDS = [
    (pa.timestamp("ns"), 1_700_000_000_000_000_789, datetime(2023, 11, 14, 22, 13, 20), True),
    (pa.timestamp("ns", "UTC"), 1_700_000_000_000_001_000, datetime(2023, 11, 14, 22, 13, 20, 1, tzinfo=UTC), False),
    (pa.duration("ns"), 1_500_000_001, timedelta(seconds=1.5), True),
    (pa.time64("ns"), 3_600_000_000_123, time(1), True),
    (pa.list_(pa.timestamp("ns")), [1_000], [datetime(1970, 1, 1, 0, 0, 0, 1)], False),
]


@pytest.mark.parametrize(("kind", "value", "read", "cut"), NANOSECONDS, ids=str)
def test_nanoseconds_are_read_as_microseconds_and_a_cut_is_said_once(
    kind: Any, value: Any, read: Any, cut: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.parquet"
    __import__("pyarrow.parquet").parquet.write_table(pa.table({"v": pa.array([value, None, value], kind)}), file)
    found, errors = read_all(file)
    assert found == [{"v": read}, {"v": None}, {"v": read}] and not errors
    assert sum("cut to microseconds" in record.getMessage() for record in caplog.records) == cut


def test_a_date_beyond_python_is_an_error_of_its_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    dates = pa.array([0, 10_000_000, 1], pa.int32()).cast(pa.date32())
    __import__("pyarrow.parquet").parquet.write_table(pa.table({"v": dates}), file)
    found, errors = read_all(file)
    assert found == [{"v": date(1970, 1, 1)}, {"v": date(1970, 1, 2)}]
    assert len(errors) == 1 and "the column 'v' is date32" in errors[0]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["v", "v"])
    with pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    found, errors = read_all(file)
    assert not found and len(errors) == 1 and "two columns 'v'" in errors[0] and "rows.arrow" in errors[0]


def read_all(file: Path) -> tuple[list[Any], list[str]]:
    graph = cues.Graph("g", [cues.Source("q", Files(file))], errors="errors")
    with testing.temporary_store() as store:
        testing.run_until_idle(graph, store)
        errors = [error["err/cause"][0]["message"] for error in testing.messages(store, "errors")]
        return testing.messages(store, "q"), errors
