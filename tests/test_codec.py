"""A written message is read back equal, with its types. A message that cannot be written is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import sys
import types
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sets import slow_except
from small import DECODERS, ENCODERS

import cues
from cues import codec, jsontext
from cues.errors import CodecError, InvalidArgument
from cues.schemas import schema_of
from cues.steps import tracing


def round_trip(value: Any) -> Any:
    return codec.unpack(codec.pack(value))


@pytest.fixture
def registry() -> Iterator[None]:
    """Whatever a test registers is forgotten afterwards."""
    encoders, decoders = dict(ENCODERS), dict(DECODERS)
    yield
    ENCODERS.clear()
    ENCODERS.update(encoders)
    DECODERS.clear()
    DECODERS.update(decoders)


BERLIN = ZoneInfo("Europe/Berlin")

VALUES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    2**200,
    -(2**200),
    1.5,
    math.inf,
    "",
    "größe \U0001f600",
    b"",
    b"\0\xff",
    [],
    {},
    {1: 2, b"k": 3, None: 4, (1, 2): 5, 2.5: 6},
    [[1, [2, {"a": []}]]],
    (),
    (1, (2, [3, (4,)])),
    {1, "a", (2, 3)},
    frozenset({frozenset({1}), 2}),
    Decimal("1.10"),
    Decimal("-Infinity"),
    uuid.UUID(int=7),
    date(2013, 1, 31),
    datetime(2013, 1, 31, 12, 30, 1, 123456),
    datetime(2013, 1, 31, 12, tzinfo=UTC),
    datetime(2013, 1, 31, 12, tzinfo=timezone(timedelta(hours=-5, minutes=-30, seconds=7))),
    datetime(2013, 7, 1, 12, tzinfo=BERLIN),
    datetime.max,
    datetime.min,
    time(12, 30),
    time(12, 30, 1, 5, tzinfo=UTC),
    timedelta(days=-1, microseconds=1),
    timedelta.max,
]


@pytest.mark.parametrize(
    "value",
    VALUES,
    ids=lambda value: (
        f"{type(value).__name__}:{sorted(map(repr, value))}" if isinstance(value, (set, frozenset)) else repr(value)
    ),
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    found = round_trip({"value": value})["value"]
    assert found == value
    assert type(found) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip(math.nan))
    assert round_trip(Decimal("sNaN")).is_snan()


@pytest.mark.parametrize("fold", [0, 1])
def test_the_hour_that_comes_twice_keeps_its_fold_and_zone(fold: int) -> None:
    """02:30 happens twice when summer time ends; isoformat alone would lose which one, and the zone's name."""
    when = datetime(2023, 10, 29, 2, 30, tzinfo=BERLIN, fold=fold)
    found = round_trip(when)
    assert (found.fold, found.tzinfo, found.utcoffset()) == (fold, BERLIN, when.utcoffset())
    assert round_trip(when.timetz()) == when.timetz()
    assert (round_trip(when.timetz()).fold, round_trip(when.timetz()).tzinfo) == (fold, BERLIN)


def test_a_subclass_without_a_code_comes_back_as_its_base() -> None:
    class Name(str):
        def __str__(self) -> str:
            return "not what it holds"

    class Count(int):
        pass

    Point = collections.namedtuple("Point", "x y")
    cases: list[tuple[Any, Any]] = [
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (Name("x"), "x"),
        (Count(5), 5),
        (Count(2**63), 2**63),
        (Count(-(2**70)), -(2**70)),
        (Point(1, 2), (1, 2)),
    ]
    for value, expected in cases:
        found = round_trip([value])[0]
        assert found == expected
        assert type(found) is type(expected)


class Color(enum.IntEnum):
    RED = 1


class Plain:
    pass


@pytest.mark.parametrize(
    ("message", "path", "type_name"),
    [
        ({"x": object()}, "x", "object"),
        ({"items": [1, 2, {"price": 1j}]}, "items[2].price", "complex"),
        ({"a": {"b": {"c": Plain()}}}, "a.b.c", "Plain"),
        ({"a": (1, {2: Plain()})}, "a[1][2]", "Plain"),
        ({"s": {Plain}}, "s[0]", "type"),
        ({"color": Color.RED}, "color", "Color"),
        ({("k", Plain): 1}, "[key ('k', <class 'test_codec.Plain'>)][1]", "type"),
        ({"x": ["ok", "\ud800"]}, "x[1]", "str"),
        ({"f": open}, "f", "builtin_function_or_method"),
    ],
)
def test_what_cannot_be_encoded_is_named_by_path_and_type(message: Any, path: str, type_name: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec.pack(message)
    assert (caught.value.path, caught.value.type_name) == (path, type_name)
    assert path in str(caught.value)
    assert codec.pack({"x": 1}) == b"\x81\xa1x\x01", "the packer is usable afterwards"


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append({"again": value})
    with pytest.raises(CodecError, match="contains itself"):
        codec.pack({"x": value})


@pytest.mark.parametrize("depth", [64, 65, 500, 20_000])
def test_tuples_in_tuples_are_written_only_as_deep_as_they_can_be_read(depth: int) -> None:
    """Each level of extensions costs the reader 45 KB of C stack: 200 tuples in one another killed it."""
    value: Any = ()
    for _ in range(depth - 1):
        value = (value,)
    if depth <= codec.NESTING_MAX:
        assert round_trip({"x": value})["x"] == value
    else:
        with pytest.raises(CodecError, match="nested too deeply"):
            codec.pack({"x": value})


def test_each_part_is_tried_once_when_what_is_wrong_is_looked_for() -> None:
    """Each level was packed anew with all that is in it: 1,100 levels took three seconds."""
    tried = []
    codec.register(Money, 7, lambda money: tried.append(money) or b"", lambda packed: None)
    value: Any = {"money": Money(1), "wrong": object()}
    for _ in range(400):
        value = {"a": value}
    with pytest.raises(CodecError) as caught:
        codec.pack(value)
    assert caught.value.path == "a" + ".a" * 399 + ".wrong"
    assert len(tried) == 2  # by the packer, and in the search


def test_lists_nest_as_deep_as_msgpack_goes() -> None:
    value: Any = []
    for _ in range(500):
        value = [value]
    assert round_trip(value) == value


# --- types of the user's -------------------------------------------------------------------------


class Money:
    def __init__(self, cents: int, notes: Any = None) -> None:
        self.cents = cents
        self.notes = notes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and (self.cents, self.notes) == (other.cents, other.notes)

    __hash__ = None  # type: ignore[assignment]


def encode_money(value: Money) -> bytes:
    return codec.pack([value.cents, value.notes])


def decode_money(data: bytes) -> Money:
    return Money(*codec.unpack(data))


def test_a_registered_type_comes_back_also_inside_itself(registry: None, tmp_path: Path) -> None:
    """Its encoder calls codec.pack() in the middle of a message that is being packed."""
    codec.register(Money, 7, encode_money, decode_money)
    value = {"before": [1], "price": Money(5, {"of": (Money(6), {"deep": [Money(7)]})}), "after": "x"}
    assert round_trip(value) == value
    with cues.open(tmp_path / "store") as store:
        queue = store.queue("q")
        queue.appender().write_many([value] * 40)
        assert queue.tailer().read_many(100) == [value] * 40


def test_an_unknown_code_is_an_error_when_read_and_moves_nothing(registry: None, tmp_path: Path) -> None:
    codec.register(Money, 7, encode_money, decode_money)
    with cues.open(tmp_path / "store") as store:
        queue = store.queue("q")
        queue.appender().write_many([{"n": 1}])
        queue.appender().write({"price": Money(5)})
        del DECODERS[7]
        tailer = queue.tailer()
        assert tailer.read() == {"n": 1}
        for _ in range(2):
            with pytest.raises(CodecError, match=r"cues.codec.register\(<type>, 7"):
                tailer.read()
            assert (tailer.index, tailer.last_read_index) == (2, 1)
        DECODERS[7] = decode_money
        assert tailer.read() == {"price": Money(5)}


@pytest.mark.interpreted
def test_clashing_and_impossible_registrations_are_refused(registry: None) -> None:
    class Other:
        pass

    codec.register(Money, 7, encode_money, decode_money)
    codec.register(Money, 7, encode_money, decode_money)
    for type_, code, word in [
        (Other, 7, "already belongs to Money"),
        (Other, 100, "not one of 0 to 99"),
        (Other, -1, "not one of"),
        (Other, "7", "not one of"),
        (Other, True, "not one of"),
        (dict, 8, "msgpack writes dict itself"),
        (str, 8, "msgpack writes str itself"),
    ]:
        with pytest.raises(InvalidArgument, match=word):
            codec.register(type_, code, encode_money, decode_money)  # type: ignore[arg-type]


def test_a_module_that_was_loaded_again_registers_its_class_again(registry: None) -> None:
    codec.register(Money, 7, encode_money, decode_money)
    again = type("Money", (Money,), {"__module__": Money.__module__, "__qualname__": Money.__qualname__})
    codec.register(again, 7, encode_money, decode_money)
    assert round_trip(again(3)) == Money(3)
    with pytest.raises(CodecError):
        codec.pack(Money(3))


def test_an_encoder_that_raises_is_named(registry: None) -> None:
    codec.register(Money, 7, lambda value: bytes(1 // 0), decode_money)
    with pytest.raises(CodecError, match="ZeroDivisionError") as caught:
        codec.pack({"a": [Money(1)]})
    assert (caught.value.path, caught.value.type_name) == ("a[0]", "Money")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    codec.register(Money, 7, lambda value: "text", decode_money)  # type: ignore[arg-type, return-value]
    with pytest.raises(CodecError, match=r"must be bytes|bytes object expected"):
        codec.pack({"a": Money(1)})


# --- numpy ---------------------------------------------------------------------------------------


def test_numpy_values_come_back_with_dtype_and_shape() -> None:
    numpy = pytest.importorskip("numpy")
    aligned = numpy.dtype([("a", "i1"), ("b", "i4", (2,)), ("c", [("d", "U3")])], align=True)
    for value in [
        numpy.float64(1.5),
        numpy.bool_(True),
        numpy.int8(-3),
        numpy.str_("é"),
        numpy.str_(""),
        numpy.datetime64("2020-01-01T00:00", "ns"),
        numpy.complex64(1j),
        numpy.zeros(1, dtype=[("a", "i1")])[0],
        numpy.array(5),
        numpy.array([]),
        numpy.zeros((0, 3)),
        numpy.arange(12).reshape(3, 4)[:, ::2],
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.array(["a", "bb"]),
        numpy.arange(3, dtype=">u2"),
        numpy.zeros(2, dtype=aligned),
    ]:
        found = round_trip({"x": [value]})["x"][0]
        assert type(found) is type(value)
        assert found.dtype.names == value.dtype.names
        assert (found.dtype, found.shape) == (value.dtype, value.shape) or value.dtype.names
        assert repr(found.tolist()) == repr(value.tolist())
        if isinstance(value, numpy.ndarray):
            assert found.flags.writeable


def test_numpy_values_that_bytes_do_not_hold_are_refused() -> None:
    """A masked array would come back without its mask."""
    numpy = pytest.importorskip("numpy")
    for value in [numpy.array([1, None]), numpy.ma.array([1, 2], mask=[0, 1])]:
        with pytest.raises(CodecError) as caught:
            codec.pack({"x": value})
        assert caught.value.path == "x"


# --- anything ------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.just(BERLIN))
    | st.times()
    | st.timedeltas()
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
ANYTHING = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("examples", slow_except([20], [20, 100]))
def test_whatever_can_be_written_comes_back(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(ANYTHING)
    def check_one(value: Any) -> None:
        assert round_trip(value) == value

    check_one()


def test_whatever_depth_can_be_written_can_be_read(tmp_path: Path) -> None:
    """msgpack writes 1,024 levels and reads 1,023: one message stopped every reader for good."""

    def deep(levels: int) -> dict[str, Any]:
        value: Any = (1, {"text": "é", "bytes": b"x", "none": None})
        for level in range(levels):
            value = [value] if level % 2 else {"k": value, 5: [1.5]}
        return {"x": value}

    written = 0
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q")
        for levels in range(1000, 1030):
            try:
                queue.appender().write(deep(levels))
            except cues.errors.CodecError:
                break
            written += 1
        queue.appender().write({"x": 1})
        found = list(queue.tailer())
        assert 10 < written < 30
        assert len(found) == written + 1 and found[-1] == {"x": 1}
        innermost = found[written - 1]["x"]
        depth = 0
        while not isinstance(innermost, tuple):
            innermost = innermost["k"] if isinstance(innermost, dict) else innermost[0]
            depth += 1
        assert depth == 1000 + written - 1
        assert innermost == (1, {"text": "é", "bytes": b"x", "none": None})


# --- what pack() does not write --------------------------------------------------------------------


def extension(code: int, *parts: Any) -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(code, msgpack.packb(list(parts)))})


def raw_extension(code: int, data: bytes) -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(code, data)})


FORGED = {
    "scalar of an object": extension(110, "|O", b"A" * 8),
    "array of objects": extension(111, "|O", [1], b"A" * 8),
    "structure with an object": extension(111, [["n", "<i8"], ["o", "|O"]], [1], bytes(16)),
    "structure of lists, not tuples": extension(111, [["n", "<i8"]], [1], bytes(8)),
    "text of size 0, 2**34 times": extension(111, "|S0", [1 << 34], b""),
    "nothing, 10**9 times": extension(111, "|V0", [10**9], b""),
    "more bytes than the shape": extension(111, "<i8", [1], bytes(80)),
    "fewer bytes than the shape": extension(111, "<i8", [11], bytes(80)),
    "a shape below zero": extension(111, "<i8", [-1, -1], bytes(8)),
    "a shape that is no list of integers": extension(111, "<i8", [1.0], bytes(8)),
    "another text for the dtype": extension(111, "i8", [1], bytes(8)),
    "several fields in a text": extension(111, "i8,i8", [1], bytes(16)),
    "a text of numpy's own kind": extension(111, "|T16", [1], bytes(16)),
    "another datetime text": extension(100, "20200101T000000", None, 0),
    "a fold of 7": extension(100, "2020-01-01T00:00:00", None, 7),
    "a zone that is not there": extension(100, "2020-01-01T00:00:00+00:00", "Europe/Nowhere", 0),
    "a zone without an offset": extension(100, "2020-01-01T00:00:00", "Europe/Berlin", 0),
    "two parts of a datetime": extension(100, "2020-01-01T00:00:00", None),
    "another date text": raw_extension(101, b"20200101"),
    "another time text": raw_extension(102, b"1230"),
    "a time as a list that needs none": extension(102, "12:30:00", None, 0),
    "hours in a timedelta": extension(103, 0, 90_000, 0),
    "a float in a timedelta": extension(103, 1.0, 0, 0),
    "another decimal text": raw_extension(104, b" 1_0 "),
    "a short uuid": raw_extension(105, b"short"),
    "a tuple that is a map": raw_extension(106, msgpack.packb({1: 2})),
    "a set with equal items": extension(107, 1, 1),
    "a set of lists": extension(107, [1]),
    "a small integer": raw_extension(109, b"\x05"),
    "an integer of too many bytes": raw_extension(109, bytes(2) + b"\x7f" + bytes(8)),
    "no bytes at all": raw_extension(111, b""),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_extension_that_pack_does_not_write_is_refused(name: str) -> None:
    pytest.importorskip("numpy")
    with pytest.raises(CodecError, match="bytes that Cues does not write"):
        codec.unpack(FORGED[name])


@pytest.mark.parametrize("code", [106, 107, 108, 7])
def test_more_levels_than_pack_writes_are_refused(registry: None, code: int) -> None:
    """20,000 tuples inside one another would overflow the C stack of the process that reads them."""
    codec.register(Money, 7, encode_money, decode_money)
    data = b"\x90"
    for _ in range(20_000):
        data = b"\x91" + msgpack.packb(msgpack.ExtType(code, data))
        if len(data) > 200_000:
            break
    with pytest.raises(CodecError, match="more than 64 extension types"):
        codec.unpack(data)
    assert round_trip((1, (2,))) == (1, (2,)), "the depth is counted anew"


class Word(str):
    """Looked up among the types of other modules before it is taken for its base."""


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize("module", ["zoneinfo", "decimal", "numpy", "pydantic", "msgspec", "opentelemetry.trace"])
def test_a_module_that_another_thread_is_importing_is_none_yet(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the loaded modules, and has no names: whoever looks into it must not fail."""
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    message = {"at": datetime(2026, 11, 29, tzinfo=UTC), "word": Word("x"), "pair": (1, "x")}
    assert round_trip(message) == message
    assert jsontext.encode(message["at"]) == '"2026-11-29T00:00:00+00:00"'
    assert schema_of(Point) is not None
    assert tracing.tracer() is None
    tracing.flush()


def test_numpy_values_of_other_types_are_refused() -> None:
    """Texts of numpy's variable-width type are addresses, and items of the size 0 take memory that no byte shows."""
    numpy = pytest.importorskip("numpy")
    values = [numpy.zeros(3, dtype="V0")]
    if hasattr(numpy.dtypes, "StringDType"):
        values.append(numpy.array(["a"], dtype=numpy.dtypes.StringDType()))
    for value in values:
        with pytest.raises(CodecError) as caught:
            codec.pack({"x": value})
        assert caught.value.path == "x"


def test_a_text_of_numpy_that_unicode_does_not_have_is_refused_both_ways() -> None:
    """numpy keeps code points as they come, and raises SystemError when such a text is read."""
    numpy = pytest.importorskip("numpy")
    bad = numpy.frombuffer(b"\xff\xff\xff\x7f", "<U1")
    nested = numpy.zeros(1, [("a", "i1"), ("b", [("c", "<U1")])])
    nested["b"]["c"] = bad
    for array, good in ((bad, numpy.array(["a"])), (nested, numpy.zeros_like(nested))):
        with pytest.raises(CodecError):
            codec.pack(array)
        for written in map(msgpack.unpackb, (codec.pack(good), codec.pack(good[0]))):
            forged = written.data[: -array.itemsize] + array.tobytes()
            with pytest.raises(CodecError):
                codec.unpack(msgpack.packb(msgpack.ExtType(written.code, forged)))


@pytest.mark.parametrize("examples", slow_except([60], [60, 300]))
def test_what_is_decoded_is_written_again_as_the_same_value(examples: int) -> None:
    """Bytes of an extension are changed at random: they are refused, or pack() writes it for their value."""

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check_one(data: st.DataObject) -> None:
        numpy = pytest.importorskip("numpy")
        arrays = [
            numpy.arange(3, dtype="<i2"),
            numpy.int16(5),
            numpy.str_(""),
            numpy.zeros(2, [("a", "i1"), ("b", "U2")]),
        ]
        value = data.draw(SCALARS | HASHABLE | st.sampled_from(arrays))
        written = msgpack.unpackb(codec.pack(value), strict_map_key=False)
        if not isinstance(written, msgpack.ExtType):
            return
        payload = bytearray(written.data)
        for _ in range(data.draw(st.integers(1, 3)) if payload else 0):
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = codec.unpack(msgpack.packb(msgpack.ExtType(written.code, bytes(payload))))
        except CodecError:
            return
        again = msgpack.unpackb(codec.pack(found), strict_map_key=False)
        assert again.code == written.code
        assert repr(codec.unpack(codec.pack(found))) == repr(found)

    check_one()
