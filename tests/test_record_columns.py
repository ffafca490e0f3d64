"""Tables in queues: whatever can be written comes back equal, as a table and as messages; the rest is refused."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pandas
import pyarrow as pa
import pytest
import seeds

from cues import codec
from cues.errors import CuesError, InvalidArgument, MessageTooLarge, ReservedKey
from cues.records import batch, columns
from cues.records.packed import packed_rows
from cues.records.provenance import Provenance

UNITS = ("s", "ms", "us", "ns")
ZONES = (None, "UTC", "+02:00", "Europe/Zurich")


def scalar_type(dice: random.Random) -> pa.DataType:
    return dice.choice(
        [
            pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
            pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.string_view(),
            pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.date32(), pa.date64(),
            pa.time32(dice.choice(UNITS[:2])), pa.time64(dice.choice(UNITS[2:])),
            pa.timestamp(dice.choice(UNITS), dice.choice(ZONES)), pa.duration(dice.choice(UNITS)),
            pa.decimal128(dice.randint(6, 38), 2), pa.decimal256(50, 4), pa.decimal32(7, 2), pa.decimal64(12, 3),
        ]
    )  # fmt: skip


def random_type(dice: random.Random, depth: int = 0) -> pa.DataType:
    if depth > 2 or dice.random() < 0.6:
        return scalar_type(dice)
    inner = random_type(dice, depth + 1)
    kind = dice.choice(["list", "large_list", "fixed", "struct", "map", "dictionary", "view"])
    if kind == "struct":
        names = dice.sample(string.ascii_lowercase, dice.randint(1, 3))
        return pa.struct([(name, random_type(dice, depth + 1)) for name in names])
    if kind == "map":
        return pa.map_(dice.choice([pa.string(), pa.int64()]), inner)
    if kind == "dictionary":
        return pa.dictionary(pa.int32(), dice.choice([pa.string(), pa.int64(), pa.binary()]))
    made = {"list": pa.list_, "large_list": pa.large_list, "view": pa.list_view}.get(kind)
    return made(inner) if made else pa.list_(inner, 2)


def value(dice: random.Random, kind: pa.DataType) -> Any:
    """A value of a type: often at its limits; sometimes one that Python does not have."""
    types = pa.types
    if types.is_null(kind) or dice.random() < 0.1:
        return None
    if types.is_boolean(kind):
        return dice.random() < 0.5
    if types.is_integer(kind):
        signed, bits = types.is_signed_integer(kind), kind.bit_width
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return dice.choice([low, high, 0, 1, dice.randint(low, high)])
    if types.is_floating(kind):
        return dice.choice([0.0, -0.0, 1.5, -2.25, math.inf])
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "".join(dice.choices(["a", "é", "\x00", "中", "q/"], k=dice.randint(0, 20)))
    if types.is_fixed_size_binary(kind):
        return dice.randbytes(kind.byte_width)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return dice.randbytes(dice.randint(0, 20))
    if types.is_date(kind):
        return dice.choice([date.min, date.max, date(1970, 1, 1), date(2026, 2, 28)])
    if types.is_time(kind):
        return dice.choice([time.min, time(23, 59, 59), time(12, 30)])
    if types.is_timestamp(kind):
        span = 2**63 if dice.random() < 0.02 else 10**18 if kind.unit == "ns" else 10**10
        return dice.randint(-span, span - 1)
    if types.is_duration(kind):
        return timedelta(days=dice.randint(-1000, 1000), seconds=dice.randint(0, 86_399))
    if types.is_decimal(kind):
        return Decimal(dice.randint(-9, 9)).scaleb(-kind.scale)
    if types.is_struct(kind):
        return {field.name: value(dice, field.type) for field in kind}
    if types.is_map(kind):
        keys = {f"k{dice.randint(0, 5)}" if types.is_string(kind.key_type) else dice.randint(0, 5) for _ in range(3)}
        return [(key, value(dice, kind.item_type)) for key in keys]
    if types.is_dictionary(kind):
        return value(dice, kind.value_type)
    count = kind.list_size if types.is_fixed_size_list(kind) else dice.randint(0, 4)
    return [value(dice, kind.value_type) for _ in range(count)]


def random_table(seed: int) -> pa.Table:
    """A table of any types, sizes and chunks; also without columns or rows, and cut out of a larger one."""
    dice = random.Random(seed)
    rows = dice.choice([0, 1, 2, 7, 60, 300])
    fields = [pa.field(f"f{at}", random_type(dice)) for at in range(dice.choice([0, 1, 2, 5]))]
    chunks = []
    for _ in range(dice.randint(1, 3)):
        arrays = [pa.array([value(dice, field.type) for _ in range(rows)], field.type) for field in fields]
        chunks.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
    table = pa.Table.from_batches(chunks)
    return table.slice(dice.randint(0, 2)) if dice.random() < 0.3 else table


def stored(table: pa.Table, **options: Any) -> list[batch.Batch]:
    """The records of a table, as they are read from a log."""
    index, opened = 5, []
    for page in batch.build_table(table, 1 << 20, **options):
        found = batch.Batch(
            index, batch.seal(page, index, 7), [batch.seal_piece(p, n) for n, p in enumerate(page.pieces)]
        )
        assert found.is_complete() and found.schema_hash == batch.checksum(page.schema)
        found.schema = columns.stored_schema(page.schema)
        opened.append(found)
        index = found.next
    return opened


@pytest.mark.parametrize("seed", seeds.among(range(100), fast=1))
def test_any_table_comes_back_equal_or_is_refused(seed: int) -> None:
    refused = 0
    for number in range(100):
        table = random_table(seed * 100 + number)
        try:
            batch.build_table(table, 1 << 20)
        except InvalidArgument as error:
            if "years 1 to 9999" not in error.message:
                raise
            refused += 1
        else:
            compare(table, random.Random(number).choice([None, *columns.COMPRESSIONS]))
    assert refused < 30


def compare(table: pa.Table, compression: str | None) -> None:
    records = stored(table, compression=compression)
    tables = [record.table() for record in records]
    assert sum(each.num_rows for each in tables) == table.num_rows
    if table.num_rows and table.num_columns:
        assert pa.Table.from_batches(tables).equals(table.combine_chunks())
    messages = [message for record in records for message in record.messages()]
    assert [list(message) for message in messages] == [table.column_names] * table.num_rows
    codec.unpack(codec.pack(messages))  # what was read can be written again
    assert messages == short(table.to_pylist())


def short(found: Any) -> Any:
    """Values of Arrow with microseconds, as Python's types have them: nanoseconds come as types of pandas."""
    if isinstance(found, dict):
        return {name: short(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(short(each) for each in found)
    if isinstance(found, pandas.Timestamp):
        early = found.value < 0 and found.nanosecond > 0  # a cast of Arrow cuts towards 1970
        return (found + pandas.Timedelta(1000 if early else 0)).to_pydatetime(warn=False)
    return found.to_pytimedelta() if isinstance(found, pandas.Timedelta) else found


@pytest.mark.parametrize(
    ("table", "part"),
    [
        (lambda: pa.table([[1], [2]], ["a", "a"]), "two columns 'a'"),
        (lambda: pa.table({"a": pa.array([None], pa.month_day_nano_interval())}), "'a' is month_day_nano_interval"),
        (lambda: pa.table({"a": pa.array([], pa.struct([("b", pa.month_day_nano_interval())]))}), "'a.b'"),
        (lambda: pa.table({"a": pa.array([10**18], pa.timestamp("s"))}), "years 1 to 9999"),
        (lambda: pa.table({"a": pa.array([[10**18]], pa.list_(pa.timestamp("s")))}), "years 1 to 9999"),
        (lambda: pa.table({"a": pa.array([1], pa.int64()).cast(pa.timestamp("ms")).view(pa.date64())}), "whole day"),
    ],
)  # fmt: skip
def test_what_no_message_can_have_is_refused_by_name(table: Callable[[], pa.Table], part: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        batch.build_table(table(), 1 << 20)
    assert part in caught.value.message


@pytest.mark.parametrize("name", ["q/meta", "q/uuid", "q/own"])
def test_reserved_columns_are_refused(name: str) -> None:
    with pytest.raises(ReservedKey, match=name):
        batch.build_table(pa.table({name: [1]}), 1 << 20)
    assert len(batch.build_table(pa.table({"q/type": ["a"]}), 1 << 20)) == 1


def test_a_row_beyond_the_limit_is_named() -> None:
    table = pa.table({"text": ["a" * 10] * 700 + ["b" * 5_000] + ["c"] * 300})
    with pytest.raises(MessageTooLarge) as caught:
        batch.build_table(table, 4_000)
    assert caught.value.offset == 700  # type: ignore[attr-defined]
    assert sum(page.count for page in batch.build_table(table, 6_000)) == 1_001


@pytest.mark.parametrize("rows", [1, 65_535, 65_536, 200_000])
def test_a_record_has_at_most_the_rows_that_its_header_can_count(rows: int) -> None:
    records = stored(pa.table({"n": range(rows)}))
    counts = [record.head.count for record in records]
    assert sum(counts) == rows and len(counts) == -(-rows // 65_535) and max(counts) <= 65_535
    assert [n for record in records for n in record.table().column(0).to_pylist()] == list(range(rows))


def test_provenance_of_many_rows_is_in_the_body() -> None:
    count = 20_000
    came = Provenance(count, {"in": ([1 + 3 * n for n in range(count)], [9] * count)})
    records = stored(pa.table({"n": range(count)}), hash=b"h" * 16, provenance=came)
    assert len(records) == 1 and records[0].head.hash == b"h" * 16
    assert records[0].provenance("", frozenset()).columns["in"] == (came.columns["in"][0], 9)


def test_nanoseconds_stay_in_tables_and_are_cut_in_messages(caplog: pytest.LogCaptureFixture) -> None:
    (record,) = stored(pa.table({"at_ns": pa.array([1_500_000_000_000_000_123], pa.timestamp("ns"))}))
    assert record.table().column(0).cast("int64").to_pylist() == [1_500_000_000_000_000_123]
    assert record.messages() == [{"at_ns": datetime(2017, 7, 14, 2, 40)}]
    assert "'at_ns' is timestamp[ns]; its nanoseconds are cut" in caplog.text


def test_a_table_is_what_has_the_stream_interface_of_arrow() -> None:
    polars = pytest.importorskip("polars")
    expected = pa.table({"n": [1, 2]})
    frame = pandas.DataFrame({"n": [1, 2]}, index=[7, 8])
    for given in (expected, expected.to_batches()[0], expected.to_reader(), polars.DataFrame({"n": [1, 2]}), frame):
        assert columns.table_of(given).to_pylist() == expected.to_pylist()
    with pytest.raises(InvalidArgument, match="found list"):
        columns.table_of([{"n": 1}])
    assert issubclass(InvalidArgument, CuesError)


@pytest.mark.parametrize("zone", ["UTC", "+02:00", "-05:30", "Europe/Zurich", "America/New_York", "Pacific/Auckland"])
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_of_the_first_and_the_last_day_are_taken_as_messages_have_them(unit: str, zone: str) -> None:
    """A table takes an instant if Python has it in its zone; then ``write`` takes the same time."""
    each = {"s": 1, "ms": 1_000, "us": 1_000_000}[unit]
    first, last = -62_135_596_800 * each, 253_402_300_800 * each - 1
    taken = 0
    for hours in [-1, 0, 1, 2, 5, 5.5, 6, 12, 13, 14, 23, 24, 25]:
        for number in (first + round(hours * 3_600 * each), last - round(hours * 3_600 * each)):
            table = pa.table({"at": pa.array([0, number, None], pa.timestamp(unit, zone))})
            try:
                expected = [{"at": at} for at in table["at"].to_pylist()]
            except OverflowError:
                with pytest.raises(InvalidArgument, match="years 1 to 9999"):
                    batch.build_table(table, 1 << 20)
                continue
            (record,) = stored(table)
            assert record.messages() == expected == codec.unpack(codec.pack(expected))
            taken += 1
    assert 4 <= taken < 26


@pytest.mark.parametrize("seed", seeds.among(range(60), fast=2))
def test_rows_are_packed_as_the_codec_packs_messages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 3 == 0:
        monkeypatch.setattr(columns, "has_numpy", lambda: False)
    for number in range(40):
        table = random_table(seed * 100 + number)
        try:
            columns.checked(table)
        except InvalidArgument:
            continue
        assert packed_rows(table) == [codec.pack(row) for batch in table.to_batches() for row in columns.rows(batch)]


@pytest.mark.slow
def test_each_size_of_a_number_and_a_text_is_packed_as_the_codec_packs_it() -> None:
    edges = [sign * (1 << bits) + more for bits in range(64) for more in (-33, -32, -1, 0, 1) for sign in (1, -1)]
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        low, high = (-(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1) if str(kind)[0] == "i" else (0, 1 << 64)
        high = min(high, (1 << kind.bit_width) - 1)
        numbers = [low, high, *(edge for edge in edges if low <= edge <= high), None]
        assert packed_rows(pa.table({"n": pa.array(numbers, kind)})) == [codec.pack({"n": n}) for n in numbers]
    texts = ["\u0640" * n for n in [*range(140), 32_768, 33_000]] + ["x" * n for n in (31, 32, 255, 256, 65_536)]
    assert packed_rows(pa.table({"t": texts})) == [codec.pack({"t": text}) for text in texts]
    floats = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 0.1]
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        table = pa.table({"x": pa.array(floats, pa.float64()).cast(kind)})
        assert packed_rows(table) == [codec.pack(row) for row in columns.rows(table.to_batches()[0])]
    many = pa.table({f"f{n}": [n, None] for n in range(70_000)})
    assert packed_rows(many) == [codec.pack(row) for row in columns.rows(many.to_batches()[0])]
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xc3"))
    with pytest.raises(pa.ArrowInvalid):
        packed_rows(pa.table({"t": broken}))
