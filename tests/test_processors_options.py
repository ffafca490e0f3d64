"""Every ready-made processor with every option: refused at its declaration, or the results are those without it."""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sets import slow_except
from test_processors_docs import declared, loaded

import cues
from cues import testing
from cues.base import names
from cues.errors import CuesError, GraphError
from cues.graphs.options import OPTION_NAMES
from cues.processors import event_time, file_sink, joins, shape, sql, sql_sink, windows
from cues.processors.aggregates import aggregate
from cues.processors.delta_source import DeltaSource
from cues.processors.file_source import Files
from cues.processors.reducers import count
from cues.processors.sql_source import Rows

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
Message = dict[str, Any]


@dataclass
class Order:
    i: int
    t: float
    k: str


def nothing(timer: Message) -> None:
    """Take a timer."""


VALUES: dict[str, tuple[Any, ...]] = {
    "id": ("other",),
    "opts": ({"n": 1},),
    "types": ("order", {"a": "order", "b": {"order"}}),
    "topics": (["orders"],),
    "where": (lambda message: message["i"] >= 0,),
    "errors": ("bad",),
    "strategy": ("exactly-once", "at-most-once"),
    "retries": (2, cues.Retry(3)),
    "outage": ("stop", "30m", cues.Outage("fail")),
    "batch": (True, "arrow", "pandas", "polars"),
    "bisect": (False,),
    "fields": ("i long",),
    "output_mode": ("append", "step"),
    "trigger": ("1 second",),
    "batch_size": (1, 3),
    "step_s": (None, 1.0),
    "linger_s": (0.001,),
    "key": ("k",),
    "instances": (2,),
    "concurrency": (4,),
    "timeout_s": (60.0,),
    "side_effects": (True,),
    "resume": ("skip", "again"),
    "tailers": ({"x": "b"}, ["c"]),
    "appenders": (["x"],),
    "checkpoint": (object(), sql.SQLite("other.db")),
    "across": ("pending",),
    "isolation": ("committed",),
    "renamed_from": ("older",),
    "schema": (Order, {"type": "object", "required": ["i"]}),
    "timer": (nothing,),
    "ttl": ("1m", 3600.0),
    "rate": ("10000/s",),
    "on_error": ("pause",),
    "max_errors": ("100/min",),
}
"""Of each option: values that some processor takes, and that change no result of messages that are all right."""


def test_every_option_has_a_value() -> None:
    assert set(VALUES) == set(OPTION_NAMES)


BOTH: dict[str, Any] = {"l": "a", "r": "b"}
TIMES: dict[str, Any] = {"key": "k", "time": "t", "late": "late"}
EACH = {**TIMES, "reduce": {"n": count()}}


def stream(fn: Any, inputs: Any = "a", outputs: Any = "out") -> Callable[..., Any]:
    return lambda **options: cues.Stream(fn, inputs, outputs, **options)


def without_id(options: Message) -> Message:
    """The options of a source, whose id is its first argument."""
    return {name: value for name, value in options.items() if name != "id"}


def files_read(**options: Any) -> Any:
    Path("in").mkdir(exist_ok=True)
    Path("in/a.jsonl").write_text("".join(f'{{"i": {i}, "t": {i}, "k": "k"}}\n' for i in range(6)))
    return cues.Source("out", Files("in/*.jsonl"), **without_id(options))


def rows_read(**options: Any) -> Any:
    with contextlib.closing(sqlite3.connect("rows.db")) as db, db:
        db.execute("create table if not exists r (i integer primary key, t real, k text)")
        db.executemany("insert or ignore into r values (?, ?, 'k')", [(i, i) for i in range(1, 6)])
    return cues.Source("out", Rows("rows.db", "r", cursor="i"), **without_id(options))


def delta_read(**options: Any) -> Any:
    if not Path("table").exists():
        import pyarrow as pa
        from deltalake import write_deltalake

        write_deltalake("table", pa.table({"i": range(6), "t": [float(i) for i in range(6)], "k": ["k"] * 6}))
    return cues.Source("out", DeltaSource("table"), **without_id(options))


def files_written(**options: Any) -> Any:
    return file_sink.FileSink("files", "jsonl", roll_bytes=0).sink("a", **options)


def rows_written(**options: Any) -> Any:
    columns = {"i": "integer", "t": "float", "k": "text", "q/type": "text", "q/topics": "json"}
    return sql_sink.Table("t.db", "orders", columns).sink("a", **options)


def found_in_files() -> list[str]:
    return sorted(line for file in Path("files").glob("*.jsonl") for line in file.read_text().splitlines())


def found_in_rows() -> list[Any]:
    with contextlib.closing(sqlite3.connect("t.db")) as db:
        return sorted(db.execute("select i, t, k from orders"))


KITS: dict[str, Callable[..., Any]] = {
    "windows:tumbling": lambda **o: windows.tumbling("a", "out", "2s", **{**EACH, **o}),
    "windows:tumbling, idle": lambda **o: windows.tumbling("a", "out", "2s", idle="1h", **{**EACH, **o}),
    "windows:hopping": lambda **o: windows.hopping("a", "out", "4s", "2s", **{**EACH, **o}),
    "windows:sessions": lambda **o: windows.sessions("a", "out", "1s", **{**EACH, **o}),
    "windows:counted": lambda **o: windows.counted(
        "a", "out", 2, **{"time": "t", "key": "k", "within": "1m", "reduce": {"n": count()}, **o}
    ),
    "windows:tumbling, early": lambda **o: windows.tumbling("a", "out", "2s", early="1s", **{**EACH, **o}),
    "windows:hopping, early": lambda **o: windows.hopping("a", "out", "4s", "2s", early="update", **{**EACH, **o}),
    "windows:sessions, early": lambda **o: windows.sessions("a", "out", "1s", early="1s", **{**EACH, **o}),
    "windows:counted, every": lambda **o: windows.counted(
        "a", "out", 3, **{"every": 2, "early": "1s", "time": "t", "key": "k", "reduce": {"n": count()}, **o}
    ),
    "joins:lookup": lambda **o: joins.lookup(
        BOTH, "out", **{"key": "i", "how": "left", "combine": lambda left, right: left, **o}
    ),
    "joins:latest": lambda **o: joins.latest(
        BOTH, "out", **{"key": "i", "how": "full", "combine": lambda left, right: {"i": 1}, **o}
    ),
    "joins:as_of": lambda **o: joins.as_of(BOTH, "out", **{**TIMES, **o}),
    "joins:interval": lambda **o: joins.interval(BOTH, "out", after="1s", how="full", **{**TIMES, **o}),
    "shape:dedupe": stream(shape.dedupe("k", within="1h")),
    "shape:debounce": lambda **o: shape.debounce("a", "out", **{"key": "k", "quiet": 60, **o}),
    "shape:enrich": stream(shape.enrich("i", "more", lambda value: {"twice": 2 * value}, ttl="1h")),
    "shape:flat_map": stream(shape.flat_map(lambda message: [message, message])),
    "shape:split": stream(shape.split(low=lambda m: m["i"] < 2, other="rest"), "a", {"low": "out", "rest": "late"}),
    "shape:sample": stream(shape.sample(0.5, by="i")),
    "shape:merge": stream(shape.merge("t", "l", "r"), cues.AnyOf(l="a", r="b")),
    "file_source:Files": files_read,
    "sql_source:Rows": rows_read,
    "delta_source:DeltaSource": delta_read,
    "aggregates:aggregate": lambda **o: aggregate("a", "out", **{"by": "k", "reduce": {"n": count()}, **o}),
    "file_sink:FileSink": files_written,
    "sql_sink:Table": rows_written,
}
"""The ready-made processors that need no server. The others have the same allow-lists (see the test of the page)."""

SERVED = {
    "postgres_changes", "mysql_changes", "kafka_source", "kafka_sink", "mqtt", "rabbitmq", "sqs", "kinesis",
    "redis_streams", "nats_streams", "http_sink", "http_source", "event_stream", "websocket", "webhook", "link",
    "delta", "iceberg",
}  # fmt: skip
"""Modules whose processors need a server, or tables that take a second for each run; they have tests of their own."""


def test_every_declared_processor_has_a_kit_or_is_named() -> None:
    kits = {kit.partition(",")[0] for kit in KITS}
    places = {place.removeprefix("cues.processors.") for place in declared().values()}
    lacking = {
        place
        for place in places - kits
        if place.partition(":")[0] not in SERVED and place.replace(":", ".") not in OF_YOUR_FUNCTION
    }
    assert not lacking, "add a kit for each of these"
    assert kits <= places and {place.partition(":")[0] for place in places} >= SERVED


GIVEN = [
    {"q/type": "order", "q/topics": ["orders"], "i": i, "t": NOON.timestamp() + i, "k": "xy"[i % 2]} for i in range(8)
]


def results(make: Callable[..., Any], timed: bool, options: Mapping[str, Any]) -> Any:
    """The queues and the target after a run; None if the declaration is refused."""
    try:
        graph = cues.Graph("g", [make(**options), cues.Source("a"), cues.Source("b")], errors="errors")
    except CuesError:
        return None
    with testing.Clock(NOON) as clock, cues.open("s", durability="process", map_size=1 << 24) as store:
        for queue in ("b", "a"):
            store.queue(queue).appender().write_many([*GIVEN, *[windows.watermark(None)] * timed])
        for wait in [1] * (40 if "rate" in options else 2) + [100, 1]:
            clock.advance(wait)
            try:
                testing.run_until_idle(graph, store)
            except GraphError:
                assert {"instances", "across", "strategy"} & set(options)  # at the start: it knows queues and graph
                return None
        found = {q: testing.messages(store, q) for q in ("out", "late", "errors", "bad", "x") if q in store.queues()}
    # Early results are at times of the clock, which some options move.
    found = {
        queue: [message for message in messages if message.get("final", True)] for queue, messages in found.items()
    }
    found = {queue: messages for queue, messages in found.items() if messages}
    target = found_in_files() if Path("files").exists() else found_in_rows() if Path("t.db").exists() else None
    return found, target


@pytest.mark.parametrize("kit", slow_except([*KITS][::3], KITS))
def test_an_option_is_refused_or_changes_no_result(kit: str, tmp_path: Path) -> None:
    make, kinds = KITS[kit], dict[str, str]()
    expected: Any = None
    for name, value in [("", None), *[(name, value) for name, values in VALUES.items() for value in values]]:
        place = tmp_path / f"{len(kinds)}-{name}"
        place.mkdir()
        with contextlib.chdir(place):
            given = results(make, kit.startswith(("windows", "joins")), {name: value} if name else {})
        kinds[f"{name}={value!r}"] = "refused" if given is None else "taken"
        if not name:
            expected = given
            assert given is not None and (given[0].get("out") or given[1]) and "errors" not in given[0], given
        elif given is not None:
            assert given == expected, f"{name}={value!r}"
    taken = {option.partition("=")[0] for option, kind in kinds.items() if kind == "taken"} - {""}
    kind = loaded(f"cues.processors.{kit.partition(',')[0]}")
    own = {"key", "id"} & set(inspect.signature(kind).parameters)
    assert taken - own <= set(kind.takes), taken
    assert set(kind.takes) - taken <= {"checkpoint", "instances", "across"}, taken


OF_YOUR_FUNCTION = {"files.read_csv", "files.read_jsonl", "sql.SQLite", "databases.DuckDB"}
"""Parts of a function of the user, whose declaration has its own options."""


def test_every_ready_made_processor_says_the_options_that_it_takes() -> None:
    silent = {place for place in declared().values() if not hasattr(loaded(place), "takes")}
    assert {place.removeprefix("cues.processors.").replace(":", ".") for place in silent} == OF_YOUR_FUNCTION


def test_a_refusal_names_the_option_and_the_way_out() -> None:
    with pytest.raises(GraphError, match=r"takes no option 'ttl'; it takes across, .*Try: leave ttl= out; a stream"):
        cues.Stream(shape.dedupe("k", within="1d"), "a", "out", ttl="1m")
    with pytest.raises(GraphError, match=r"needs batch=True or False, and was given 'arrow'"):
        file_sink.FileSink("files").sink("a", batch="arrow")
    graph = cues.Graph("g", [windows.tumbling("a", "out", "2s", **EACH), cues.Source("a")])
    with pytest.raises(GraphError, match="takes no option 'timer'"):
        graph.timer("out")(nothing)


# --- watermarks -----------------------------------------------------------------------------------


def closed(source: cues.Source, *given: Message, queues: Any = None, **options: Any) -> list[int]:
    """The counts of the windows that have closed, in order."""
    window = windows.tumbling("a", "out", "1h", time="t", late="late", reduce={"n": count()}, **options)
    with testing.temporary_store() as store:
        graph = cues.Graph("g", [window, source], queues=queues)
        with graph.start(store=store) as running:
            for message in given:
                running.send("a", message)
            assert running.wait_done(30) if source.fn else running.wait_idle(30)
            return sorted(m["n"] for m in running.messages("out"))


@pytest.mark.parametrize("name", ["types", "topics", "where"])
def test_no_filter_takes_a_watermark_away(name: str) -> None:
    (value, *_) = VALUES[name]
    assert closed(cues.Source("a"), *GIVEN, windows.watermark(None), **{name: value}) == [8]
    assert closed(cues.Source("a"), *GIVEN, windows.watermark(None), **{name: {"a": value}}) == [8]


@pytest.mark.parametrize("partitioner", [None, "rendezvous", "murmur2-sticky", "sticky", lambda m, n: m["i"] % n])
def test_a_watermark_is_on_every_partition(partitioner: Any) -> None:
    key = None if partitioner == "sticky" or callable(partitioner) else "i"
    queues = {"a": cues.QueueOptions(partitions=3, key=key, partitioner=partitioner)}

    def numbers(position: int | None) -> Any:
        yield from [(n, message) for n, message in enumerate([*GIVEN, windows.watermark(None)])]

    for counts in (
        closed(cues.Source("a"), *GIVEN, windows.watermark(None), queues=queues),
        closed(cues.Source("a", numbers), queues=queues),
    ):
        assert sum(counts) == 8
    with testing.temporary_store() as store:
        queue = store.queue("a", partitions=3, key=key, partitioner=partitioner)
        places = queue.appender().write_many([GIVEN[0], windows.watermark(None), GIVEN[1]])
        assert len(places) == 3 and len(queue) == 5
        queue.appender().write(windows.watermark(None))
        assert [len([m for m in queue.partition(n).tailer() if "watermark" in m]) for n in range(3)] == [2, 2, 2]


def test_a_schema_of_a_source_lets_a_watermark_through() -> None:
    def orders(position: int | None) -> Any:
        yield from [(n, message) for n, message in enumerate([*GIVEN, windows.watermark(None)])]

    assert closed(cues.Source("a", orders, schema=Order)) == [8]
    assert closed(cues.Source("a", schema=Order), *GIVEN, windows.watermark(None)) == [8]


def test_the_type_of_a_watermark_has_one_name() -> None:
    assert names.WATERMARK == event_time.WATERMARK
