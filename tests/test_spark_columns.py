"""Which values of a message fit which column, in both modes; without a session, since Spark only calls these."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgpack
import numpy
import pytest
from small import DECODERS, ENCODERS

import cues
from cues.errors import CodecError, Diverged, InvalidArgument, MessagesPurged, Unsupported

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")


from pyspark.sql import types as T

from cues.spark.columns import Column, Encoder
from cues.spark.options import READ, READ_STREAM, ReadOptions, WriteOptions
from cues.spark.place import Pinned
from cues.spark.reading import ROW, QueueReader, ReadSlice

AT = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
ID = UUID("00000000-0000-0000-0000-00000000002a")
LONG, INT, BYTE, TEXT, REAL = T.LongType(), T.IntegerType(), T.ByteType(), T.StringType(), T.DoubleType()
STRUCT = T.StructType([T.StructField("a", LONG), T.StructField("b", TEXT)])

FITS: list[tuple[T.DataType, Any, Any]] = [
    (TEXT, "é", "é"),
    (TEXT, ID, str(ID)),
    (LONG, -(2**63), -(2**63)),
    (LONG, numpy.int16(7), 7),
    (BYTE, 127, 127),
    (REAL, 1, 1.0),
    (REAL, numpy.float32(0.5), 0.5),
    (T.FloatType(), 0.5, 0.5),
    (T.BooleanType(), True, True),
    (T.BooleanType(), numpy.bool_(True), True),
    (T.BinaryType(), b"\0\xff", b"\0\xff"),
    (T.DecimalType(5, 2), Decimal("123.45"), Decimal("123.45")),
    (T.DecimalType(5, 2), Decimal("1.500"), Decimal("1.50")),
    (T.DecimalType(5, 2), 999, Decimal("999.00")),
    (T.DecimalType(5, 2), Decimal("0"), Decimal("0.00")),
    (T.DateType(), date(2026, 1, 31), date(2026, 1, 31)),
    (T.TimestampType(), AT, AT),
    (T.TimestampType(), AT.astimezone(timezone(timedelta(hours=5))), AT),
    (T.TimestampNTZType(), AT.replace(tzinfo=None), AT.replace(tzinfo=None)),
    (T.TimeType(), time(12, 30, 1, 5), time(12, 30, 1, 5)),
    (T.DayTimeIntervalType(), timedelta(days=-1, microseconds=1), timedelta(days=-1, microseconds=1)),
    (T.ArrayType(LONG), [1, None, 2], [1, None, 2]),
    (T.ArrayType(LONG), (1, 2), [1, 2]),
    (T.ArrayType(LONG), {1}, [1]),
    (T.ArrayType(REAL), numpy.array([1.0, 2.0]), [1.0, 2.0]),
    (T.ArrayType(T.ArrayType(LONG)), [[1], []], [[1], []]),
    (T.MapType(TEXT, LONG), {"x": 1}, [("x", 1)]),
    (T.MapType(LONG, STRUCT), {1: {"a": 2, "b": "c"}}, [(1, {"a": 2, "b": "c"})]),
    (STRUCT, {"a": 1, "more": 2}, {"a": 1, "b": None}),
]
MISFITS: list[tuple[T.DataType, Any]] = [
    (TEXT, 7),
    (TEXT, b"bytes"),
    (LONG, 1.0),
    (LONG, True),
    (LONG, "1"),
    (LONG, 2**63),
    (INT, 2**31),
    (BYTE, 128),
    (REAL, "1.5"),
    (REAL, True),
    (REAL, 10**400),
    (T.BooleanType(), 1),
    (T.BinaryType(), "text"),
    (T.DecimalType(5, 2), Decimal("1234.5")),
    (T.DecimalType(5, 2), Decimal("1.005")),
    (T.DecimalType(5, 2), Decimal("NaN")),
    (T.DecimalType(5, 2), 1.5),
    (T.DateType(), AT),
    (T.TimestampType(), AT.replace(tzinfo=None)),
    (T.TimestampType(), 0),
    (T.TimestampNTZType(), AT),
    (T.TimeType(), time(1, tzinfo=UTC)),
    (T.DayTimeIntervalType(), time(1)),
    (T.ArrayType(LONG), "text"),
    (T.ArrayType(LONG), {"a": 1}),
    (T.MapType(TEXT, LONG), [1]),
    (T.MapType(TEXT, LONG), {1: 1}),
    (STRUCT, [1, "b"]),
    (TEXT, msgpack.ExtType(42, b"not registered here")),
]


def column(kind: T.DataType, values: list[Any], strict: bool) -> list[Any]:
    found = Column(T.StructField("x", kind), strict).array([{"x": value} for value in values], lambda at: 100 + at)
    return list(found.to_pylist())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("kind", "value", "expected"), FITS, ids=str)
def test_a_value_that_fits_is_there_in_both_modes(kind: T.DataType, value: Any, expected: Any, strict: bool) -> None:
    assert column(kind, [value, None], strict) == [expected, None]


@pytest.mark.parametrize(("kind", "value"), MISFITS, ids=str)
def test_a_value_that_does_not_fit_is_null_or_an_error_with_index_and_field(kind: T.DataType, value: Any) -> None:
    fitting = next((v for k, v, _ in FITS if type(k) is type(kind)), None)
    assert column(kind, [fitting, value], strict=False)[1] is None
    with pytest.raises(CodecError, match=r"Message 101, field x"):
        column(kind, [fitting, value], strict=True)


def test_inside_others_only_the_innermost_value_is_null_and_strict_names_the_place() -> None:
    kind = T.StructType([T.StructField("items", T.ArrayType(STRUCT)), T.StructField("by", T.MapType(TEXT, LONG))])
    value = {"items": [{"a": "no", "b": "yes"}, 7], "by": {"k": "no"}}
    assert column(kind, [value], strict=False) == [
        {"items": [{"a": None, "b": "yes"}, None], "by": [("k", None)]},
    ]
    with pytest.raises(CodecError, match=r"Message 100, field x\.items\[0\]\.a: found str \('no'\), expected an int"):
        column(kind, [value], strict=True)


def test_a_missing_value_in_a_column_that_is_not_null_is_an_error_in_both_modes() -> None:
    for strict in (False, True):
        needed = Column(T.StructField("x", LONG, nullable=False), strict)
        assert needed.array([{"x": 1}], lambda at: 7).to_pylist() == [1]
        with pytest.raises(CodecError, match="Message 8, field x: found nothing that fits"):
            needed.array([{"x": 1}, {}], lambda at: 7 + at)


def test_a_type_that_no_message_has_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="variant"):
        Column(T.StructField("x", T.VariantType()), strict=False)
    with pytest.raises(Unsupported, match="variant"):
        Encoder(T.StructType([T.StructField("x", T.VariantType())]))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "The options name no queue"),
        ({"path": "data/flights"}, "without a store before '#'"),
        ({"path": "hdfs://host/x#q"}, "local disk"),
        ({"path": "a#b", "store": "c", "queue": "b"}, "The options name no queue"),
        ({"path": "a#b", "maxMessagesPerTriger": "7"}, "no option 'maxMessagesPerTriger'.*maxMessagesPerTrigger"),
        ({"path": "a#b", "mode": "loose"}, "mode='loose'.*permissive or strict"),
        ({"path": "a#b", "partitions": "0"}, "an integer from 1 on"),
        ({"path": "a#b", "failOnDataLoss": "no"}, "true or false"),
        ({"path": "a#b", "startingPosition": "0"}, "an index from 1 on"),
        ({"path": "a#b", "startingPosition": "2026-01-31T12:00:00"}, "no time zone"),
        ({"path": "a#b", "resumeFrom": "x"}, "without a store before '#'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        ReadOptions.of(options, READ_STREAM)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"id": "x"}, "found id"),
        ({"start": "1", "end": "2"}, "found start, end"),
        ({"id": "x", "start": "3", "end": "2"}, "ends before it starts"),
        ({"id": "a/b", "start": "1", "end": "2"}, "a slash"),
    ],
)
def test_a_batch_write_names_its_whole_position_or_none(options: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        WriteOptions.of_batch({"path": "a#b", **options})


def test_a_stream_is_named_or_says_that_it_may_write_twice() -> None:
    with pytest.raises(InvalidArgument, match="needs a name"):
        WriteOptions.of_stream({"path": "a#b", "checkpointLocation": "c"})
    with pytest.raises(InvalidArgument, match="checkpoint"):
        WriteOptions.of_stream({"path": "a#b", "id": "x"})
    assert WriteOptions.of_stream({"path": "a#b", "delivery": "at-least-once"}).id is None


def test_a_path_may_be_written_as_spark_users_write_it() -> None:
    for path in ("/data/x#q", "file:/data/x#q", "file:///data/x#q"):
        assert ReadOptions.of({"path": path}, READ).place.store == "/data/x"
    found = ReadOptions.of({"store": "/data/x", "queue": "flights.enrich"}, READ).place
    assert (found.store, found.queue) == ("/data/x", "flights.enrich")


# --- reading, as a task does it -----------------------------------------------------------------


def reader(store: Path, schema: T.StructType = ROW, **options: str) -> QueueReader:
    return QueueReader(schema, ReadOptions.of({"path": f"{store}#q", **options}, READ), 2)


def rows(found: QueueReader) -> list[dict[str, Any]]:
    return [row for part in found.partitions() for some in found.read(part) for row in some.to_pylist()]


def test_values_are_the_bytes_on_the_queue_whatever_is_in_them(tmp_path: Path) -> None:
    """Messages of every size, cut ones too, read from everywhere to everywhere."""
    written = [
        {"n": n, "text": "x" * (n * n % 9000), "at": AT, "who": ID, "f": [1.5, None, {"k": -n}]} for n in range(120)
    ]
    with cues.open(tmp_path / "s", durability="process") as store:
        appender = store.queue("q").appender()
        appender.write_many(written[:50])
        for message in written[50:60]:
            appender.write(message)
        appender.write_many(written[60:])
    found = rows(reader(tmp_path / "s", partitions="7"))
    assert [row["index"] for row in found] == list(range(1, 121))
    assert [cues.codec.unpack(row["value"]) for row in found] == written
    assert [row["value"] for row in found] == [cues.codec.pack(message) for message in written]
    assert {row["hash"] for row in found} == {None}
    for start, end in [(1, 2), (3, 51), (50, 61), (55, 56), (119, 121), (121, 121), (7, 7)]:
        part = rows(reader(tmp_path / "s", startingPosition=str(start), endingPosition=str(end)))
        assert part == found[start - 1 : end - 1]


def test_time_and_hash_come_from_the_record(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s")
    graph.source("q")
    graph.add(cues.Stream(lambda m: {"x": m["x"] + 1}, "q", "out", id="add"))
    with graph.start() as running:
        for x in range(20):
            running.send("q", {"x": x})
        assert running.wait_idle(timeout=30)
    with cues.open(tmp_path / "s", readonly=True) as store:
        tailer = store.queue("out").tailer()
        expected = []
        while tailer.read() is not None:
            envelope = tailer.envelope
            assert envelope is not None
            expected.append((envelope.index, envelope.time, envelope.hash))
    options = ReadOptions.of({"path": f"{tmp_path / 's'}#out"}, READ)
    assert [(r["index"], r["time"], r["hash"]) for r in rows(QueueReader(ROW, options, 2))] == expected


def test_positions_by_index_and_time_and_an_index_beyond_the_end(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        for n in range(1, 7):
            store.queue("q").appender().write({"n": n})
    found = rows(reader(tmp_path / "s"))
    middle = found[3]["time"].isoformat()
    assert [r["index"] for r in rows(reader(tmp_path / "s", startingPosition=middle))] == [
        r["index"] for r in found if r["time"] >= found[3]["time"]
    ]
    assert rows(reader(tmp_path / "s", startingPosition="latest")) == []
    with pytest.raises(InvalidArgument, match="ends before 7"):
        reader(tmp_path / "s", startingPosition="8")


def test_columns_and_parts_of_the_row_stand_in_the_declared_order(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("q").appender().write_many([{"index": "mine", "x": 1}, {"x": 2}])
    schema = T.StructType([T.StructField("x", LONG), T.StructField("index", LONG), T.StructField("none", TEXT)])
    assert rows(reader(tmp_path / "s", schema)) == [
        {"x": 1, "index": 1, "none": None},
        {"x": 2, "index": 2, "none": None},
    ]
    own = T.StructType([T.StructField("index", TEXT)])
    assert rows(reader(tmp_path / "s", own, rowColumns="false")) == [{"index": "mine"}, {"index": None}]
    with pytest.raises(InvalidArgument, match=r"declared string.*it is bigint"):
        reader(tmp_path / "s", own)


def test_an_extension_that_is_not_registered_here_spoils_nothing_but_its_field(tmp_path: Path) -> None:
    class Money:
        pass

    with cues.open(tmp_path / "s", durability="process") as store:
        cues.codec.register(Money, 7, lambda m: b"!", lambda b: Money())
        store.queue("q").appender().write_many([{"m": Money(), "x": 1}, {"m": "text", "x": 2}])
    del ENCODERS[Money], DECODERS[7]
    schema = T.StructType([T.StructField("m", TEXT), T.StructField("x", LONG)])
    assert rows(reader(tmp_path / "s", schema)) == [{"m": None, "x": 1}, {"m": "text", "x": 2}]
    with pytest.raises(CodecError, match="Message 1, field m: found ExtType"):
        rows(reader(tmp_path / "s", schema, mode="strict"))


def test_a_purge_between_plan_and_read_is_an_error_or_a_jump(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": n, "x": "x" * 300} for n in range(100)])
        strict, lenient = reader(tmp_path / "s"), reader(tmp_path / "s", failOnDataLoss="false")
        queue.purge(before=31)
        with pytest.raises(MessagesPurged, match=r"messages 1 to 30 of .* were purged") as caught:
            rows(strict)
        assert (caught.value.first, caught.value.last) == (1, 30)
        assert [row["index"] for row in rows(lenient)] == list(range(31, 101))
        with pytest.raises(MessagesPurged):
            reader(tmp_path / "s", startingPosition="5")
        assert len(rows(reader(tmp_path / "s", startingPosition="5", failOnDataLoss="false"))) == 70
        assert len(rows(reader(tmp_path / "s"))) == 70  # earliest is what is there
        queue.delete()
        assert rows(lenient) == []


def test_another_queue_under_the_same_path_is_not_mistaken_for_the_one_that_was_planned(tmp_path: Path) -> None:
    for place in ("s", "other"):
        with cues.open(tmp_path / place, durability="process") as store:
            store.queue("q").appender().write({"of": place})
    planned = reader(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "s")
    with pytest.raises(Diverged, match="has identity"):
        list(planned.read(ReadSlice((1,), (2,))))


def test_an_executor_on_another_machine_is_told_why_it_cannot_read(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("q").appender().write({"x": 1})
    planned = reader(tmp_path / "s")
    pinned = planned.pinned
    planned.pinned = Pinned(pinned.place, "driver-host", "another boot", pinned.identity)
    with pytest.raises(Unsupported, match=r"An executor on .* cannot read the store .* on driver-host"):
        list(planned.read(ReadSlice((1,), (2,))))


@pytest.mark.parametrize("zone", ["UTC", "Europe/Zurich", "+05:30"])
def test_rows_of_a_frame_are_packed_by_column_as_their_dicts_are(zone: str) -> None:
    """Flat columns have a table with the same messages; nested ones, and reserved names, are left to dicts."""
    import pyarrow as pa

    from cues.records.packed import packed_rows

    at = datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=UTC)
    flat: dict[str, tuple[T.DataType, pa.Array]] = {
        "long": (LONG, pa.array([1, None, -(2**63)])),
        "byte": (BYTE, pa.array([1, None, -128], pa.int8())),
        "text": (TEXT, pa.array(["é", None, ""])),
        "real": (REAL, pa.array([0.1, None, float("nan")])),
        "float": (T.FloatType(), pa.array([0.1, None, 2.0], pa.float32())),
        "bool": (T.BooleanType(), pa.array([True, None, False])),
        "binary": (T.BinaryType(), pa.array([b"\0", None, b""])),
        "day": (T.DateType(), pa.array([at.date(), None, date.min])),
        "at": (T.TimestampType(), pa.array([at, None, datetime(1, 1, 3, tzinfo=UTC)], pa.timestamp("us", zone))),
        "naive": (T.TimestampNTZType(), pa.array([datetime(2026, 1, 1), None, datetime.max], pa.timestamp("us"))),
        "span": (T.DayTimeIntervalType(), pa.array([timedelta(1, 2, 3), None, timedelta(0)])),
        "price": (T.DecimalType(9, 2), pa.array([Decimal("1.50"), None, Decimal("-0.01")], pa.decimal128(9, 2))),
        "nothing": (T.NullType(), pa.nulls(3)),
    }

    def made(columns: dict[str, tuple[T.DataType, pa.Array]]) -> tuple[Encoder, pa.RecordBatch]:
        schema = T.StructType([T.StructField(name, kind) for name, (kind, _) in columns.items()])
        return Encoder(schema), pa.RecordBatch.from_pydict({name: array for name, (_, array) in columns.items()})

    encoder, rows = made(flat)
    table = encoder.table(rows)
    assert table is not None
    assert packed_rows(table) == [cues.codec.pack(message) for message in encoder.messages(rows)]
    others: dict[str, tuple[T.DataType, pa.Array]] = {
        "list": (T.ArrayType(LONG), pa.array([[1], None, []])),
        "map": (T.MapType(TEXT, LONG), pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64()))),
        "q/type": (TEXT, pa.array(["a", "b", "c"])),
    }
    for name, column in others.items():
        encoder, rows = made({name: column})
        assert encoder.table(rows) is None
