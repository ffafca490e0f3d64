"""Every ready-made source and stream with every ready-made sink: each message arrives, or is refused by its column."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from contracts_sinks import database
from sets import slow_except
from test_processors_options import KITS, NOON
from test_processors_tables import change

import cues
from cues import testing
from cues.processors import http_sink, kafka, windows
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

pytest.importorskip("pyarrow")
pytest.importorskip("sqlalchemy")

Message = dict[str, Any]
GIVEN: list[Message] = [
    {
        "i": i, "t": NOON.timestamp() + i, "k": "xy"[i % 2], "at": NOON + timedelta(seconds=i), "ok": i > 2,
        "price": Decimal(i) / 4, "id": uuid.UUID(int=i), "day": date(2026, 1, 31), "hour": time(i), "none": None,
        "tags": ["a", "b"], "of": {"a": i},
    }
    for i in range(8)
]  # fmt: skip
SCALAR = [{name: value for name, value in each.items() if name not in ("tags", "of")} for each in GIVEN]


def files_of(format: str) -> Callable[[], cues.Source]:
    """A source of files that our own sink wrote."""

    def read() -> cues.Source:
        with testing.temporary_store() as store:
            if format == "text":
                given: list[Message] = [{"line": each["k"]} for each in GIVEN]
            else:
                given = SCALAR if format == "csv" else GIVEN
            out = FileSink("in", format)
            store.queue("q").appender().write_many(given)
            testing.run_until_idle(cues.Graph("w", [cues.Source("q"), out.sink("q")]), store)
            return cues.Source("out", Files(sorted(out.finish())[0]))

    return read


def rows_of(target: str, types: str) -> Callable[[], cues.Source]:
    def read() -> cues.Source:
        if target == "in.duckdb":
            pytest.importorskip("duckdb")
            pytest.importorskip("pytz")
        blob = "'a'::blob" if target == "in.duckdb" else "x'ff'"
        insert = f"insert into t values (1, 1.5, 'x', '2026-01-31 12:00:00', '1.25', {blob})"
        change(target, f"create table t (i integer primary key, {types})", insert)
        return cues.Source("out", Rows(target, "t", "i"))

    return read


MAKERS: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in KITS.items() if name.startswith(("windows", "joins", "shape"))},
    **{f"Files {format}": files_of(format) for format in ("text", "jsonl", "csv", "parquet", "arrow")},
    "Rows sqlite": rows_of("in.db", "f real, s text, seen timestamp, d numeric, raw blob"),
    "Rows duckdb": rows_of("in.duckdb", "f double, s text, seen timestamptz, d decimal(5, 2), raw blob"),
}

FAMILIES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "float", str: "text", Decimal: "decimal", datetime: "timestamp",
    date: "date", time: "time", uuid.UUID: "uuid", list: "json", dict: "json", bytes: "bytes", type(None): "text",
}  # fmt: skip


def columns_of(messages: list[Message]) -> dict[str, str]:
    found: dict[str, str] = {}
    for message in messages:
        for name, value in message.items():
            if name not in found or value is not None:
                found[name] = FAMILIES[type(value)]
    return found


def in_files(format: str) -> Callable[..., tuple[cues.Sink, Callable[[], int]]]:
    def make(messages: list[Message], url: Any) -> tuple[cues.Sink, Callable[[], int]]:
        out = FileSink("made", format)
        return out.sink("out"), lambda: sum(1 for name in out.finish() for _ in Files(name)(None))

    return make


def in_table(kind: str) -> Callable[..., tuple[cues.Sink, Callable[[], int]]]:
    def make(messages: list[Message], url: Any) -> tuple[cues.Sink, Callable[[], int]]:
        if kind == "duckdb":
            pytest.importorskip("duckdb")
        table = Table(url(kind), "made", columns_of(messages))
        return table.sink("out"), lambda: (table.close(), change(url(kind), "select count(*) from made")[0][0])[1]

    return make


def encoded(encode: Callable[[Any], bytes]) -> Callable[..., tuple[cues.Sink, Callable[[], int]]]:
    """The request that the sink sends, without its server."""

    def make(messages: list[Message], url: Any) -> tuple[cues.Sink, Callable[[], int]]:
        sent: list[bytes] = []
        return cues.Sink(lambda message: sent.append(encode(message)), "out", id="save"), lambda: len(sent)

    return make


SINKS: dict[str, Callable[..., tuple[cues.Sink, Callable[[], int]]]] = {
    **{f"FileSink {format}": in_files(format) for format in ("text", "jsonl", "csv", "parquet", "arrow")},
    **{f"Table {kind}": in_table(kind) for kind in ("db", "duckdb", "postgres")},
    "Topic": encoded(kafka.encoded),
    "Requests": encoded(http_sink.as_json),
}


def refused(source: str, sink: str) -> str | None:
    """The words of the refusal of a pair, which are in docs/processors.md; None for a pair that works."""
    if sink == "FileSink text":
        return None if source == "Files text" else "a row of text is"
    nested = (source.startswith(("joins", "shape")) and source != "joins:latest") or source in (
        "Files jsonl",
        "Files parquet",
        "Files arrow",
    )
    if sink == "FileSink csv" and nested:
        return "expected text, a number, a date or None"
    if source.startswith("Rows") and sink in ("FileSink jsonl", "FileSink csv", "Topic", "Requests"):
        return "bytes"
    return None


def run(made: Any, timed: bool, *sinks: cues.Sink) -> tuple[list[Message], list[Message]]:
    graph = cues.Graph("g", [made, cues.Source("a"), cues.Source("b"), *sinks], errors="errors")
    with testing.Clock(NOON) as clock, testing.temporary_store() as store:
        for queue in ("b", "a"):
            store.queue(queue).appender().write_many([*GIVEN, *[windows.watermark(None)] * timed])
        for wait in (1, 100):
            clock.advance(wait)
            testing.run_until_idle(graph, store)
        return testing.messages(store, "out"), testing.messages(store, "errors")


PAIRS = list(itertools.product(MAKERS, SINKS))
SOME = [pair for pair in PAIRS[::7] if pair[1] != "Table postgres"]
assert {source for source, _ in SOME} == {*MAKERS} and {sink for _, sink in SOME} == {*SINKS} - {"Table postgres"}


@pytest.mark.parametrize(("source", "sink"), slow_except(SOME, PAIRS, names=2))
def test_every_message_of_a_pair_arrives_or_is_refused_by_name(
    source: str, sink: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    timed = source.startswith(("windows", "joins"))
    if sink == "Table postgres":
        postgres = request.getfixturevalue("postgres").database()

    def url(kind: str) -> str:
        return postgres if kind == "postgres" else database(Path(), kind)

    with contextlib.chdir(tmp_path):
        made = MAKERS[source]()
        messages, errors = run(made, timed)
        assert messages and not errors
        saved, count = SINKS[sink](messages, url)
        again, errors = run(made, timed, saved)
        problem = refused(source, sink)
        texts = [error["err/cause"][0]["message"] for error in errors]
        assert again == messages
        if problem is None:
            assert not texts and count() == len(messages)
        else:
            assert texts and all(problem in text for text in texts) and count() == len(messages) - len(texts)
