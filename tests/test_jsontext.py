"""One form of JSON for all sinks, one strict reader for all sources."""

import io
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import cues
from cues import codec, jsontext
from cues.cli import send
from cues.processors import files, formats, kafka
from cues.processors.http_sink import as_json
from cues.processors.sql_sink import Table
from cues.txn.framing import FrameReader, framing_for

ENCODERS: dict[str, Any] = {
    "jsonl": lambda value: formats.make("jsonl", None, None, None, ",").add(True, None, [value]).data,
    "kafka": kafka.encoded,
    "http": as_json,
}
READERS: dict[str, Callable[[bytes], Any]] = {
    "a source": jsontext.decode,
    "kafka": kafka.json_of,
    "files": files.jsonl_parser(files.Shape())("x", b""),
    "a framing": lambda line: framing_for("application/x-ndjson").decode(FrameReader(io.BytesIO(line + b"\n"))),
    "an object of send": send.message_of,
    "a value of send": lambda line: send.arguments_of(["v=" + line[6:-1].decode()]),
}
PLAIN = [
    (datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00+00:00"),
    (date(2026, 1, 31), "2026-01-31"),
    (Decimal("12.50"), "12.50"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (1.5, 1.5),
    ("\u00fc", "\u00fc"),
]


@pytest.mark.parametrize("sink", ENCODERS)
@pytest.mark.parametrize(("value", "expected"), PLAIN)
def test_each_sink_writes_a_value_in_the_same_form(sink: str, value: Any, expected: Any) -> None:
    assert jsontext.decode(ENCODERS[sink]({"v": [value]})) == {"v": [expected]}


@pytest.mark.parametrize("sink", ENCODERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"a", {1: "a", "1": "b"}, {True: 1, "true": 2}])
def test_each_sink_refuses_what_json_cannot_hold(sink: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ENCODERS[sink]({"v": value})


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_json_are_refused(text: str) -> None:
    line = f'{{"v": {text}}}'.encode()
    for read in READERS.values():
        with pytest.raises(Exception, match=r"is not JSON|too large"):
            read(line)
    assert jsontext.decode(b"[1e300, 1]") == [1e300, 1]


@pytest.mark.parametrize("value", [{"doc": {"x": float("nan")}}, {"n": float("nan")}, {"doc": {1: 1, "1": 2}}])
def test_a_table_names_the_column_of_a_value_that_it_would_change(value: dict[str, Any], tmp_path: Path) -> None:
    table = Table(tmp_path / "db.sqlite", "t", {"id": "integer", "n": "float", "doc": "json"})
    graph = cues.Graph("g", store=str(tmp_path / "s"), durability="process", errors="errors")
    graph.source("q")
    graph.add(table.sink("q"))
    with graph.start() as running:
        running.send("q", {"id": 1, "n": 1.0, "doc": {}} | value)
        running.wait_done(idle_exit_s=0.1)
        (error,) = running.messages("errors")
    assert f"The column {next(iter(value))!r}" in str(error)


def test_csv_has_a_uuid_as_text() -> None:
    added = formats.make("csv", None, None, None, ",").add(False, None, [{"id": UUID(int=1)}])
    assert b"00000000-0000-0000-0000-000000000001" in added.data


def test_every_value_is_shown_and_read_back() -> None:
    """For people and for Cues itself there is a form for each value; for other programs there is not."""
    value = {"a": b"x", "n": float("-inf"), "s": {2, 1}, "t": timedelta(seconds=1), 5: (1, Decimal("1.0")), "o": object}
    for compact in (True, False):
        found = jsontext.decode(jsontext.show(value, compact=compact, ascii_only=True), shown=True)
        assert found == {"a": b"x", "n": float("-inf"), "s": [1, 2], "t": 1.0, "5": [1, "1.0"], "o": str(object)}


@pytest.mark.slow
@pytest.mark.parametrize(("open", "close"), [("[", "]"), ('{"a":', "}"), ('[1,{"b":[', "]}]")])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_what_is_read_fits_a_message_whatever_the_interpreter_could_read(
    open: str, close: str, encode: Callable[[str], Any]
) -> None:
    """A document of PostgreSQL that Python 3.13 can read, and no message can hold, stopped its source."""
    levels = open.count("[") + open.count("{")
    most = jsontext.DEPTH_MAX // levels
    # Brackets in texts are no levels, nor are lists beside each other.
    for inside in ("0", '"[[{{"', "[" + "[]," * 600 + "0]"):
        few = most - 2 if inside[0] == "[" else most
        value = jsontext.decode(encode(open * few + inside + close * few))
        assert codec.unpack(codec.pack([{"row": {"column": value}}])) == [{"row": {"column": value}}]
        for deeper in (most + 1, most + 150):
            with pytest.raises(ValueError, match="nested too deep"):
                jsontext.decode(encode(open * deeper + inside + close * deeper))
    with pytest.raises(ValueError, match="nested too deep"):
        jsontext.decode(encode("[" * 100_000 + "]" * 100_000))


def test_nesting_that_is_too_deep_is_a_value_error() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for act in (lambda: jsontext.encode(deep), lambda: jsontext.decode("[" * 100_000)):
        with pytest.raises(ValueError, match="nested too deep"):
            act()
