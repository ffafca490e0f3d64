"""Windows and joins over tables: the results, late messages and state of the same messages one by one."""

from __future__ import annotations

import builtins
import contextlib
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import seeds
from contracts_windows import TIMED, WINDOWS, Message, found, graph_of, messages
from sets import slow_except

import cues
from cues import testing
from cues.graphs import processor
from cues.processors import aggregates, joins, shape, vectors, windows
from cues.processors.reducers import (
    collect,
    count,
    distinct,
    earliest,
    latest,
    max,
    mean,
    min,
    quantiles,
    stddev,
    sum,
    top,
)
from cues.queues import tables

COLUMNS = {
    "tumbling", "hopping", "tumbling-of-two", "sessions", "counted", "counted-within", "counted-every",
    "counted-every-within", "aggregate-every",
    "aggregate-every-of-two", "lookup-left", "as-of", "as-of-tolerance", "interval-inner", "interval-left",
    "interval-right", "interval-full",
}  # fmt: skip
"""The cases that have a form for columns. The others are called with messages."""
NUMBERS = {
    "n": count(),
    "some": count("v"),
    "sum": sum("v"),
    "mean": mean("v"),
    "min": min("v"),
    "max": max("v"),
    "q": quantiles("v", exact=None),
    "d": distinct("v", exact=None),
    "top": top("v", 3),
    "spread": stddev("v"),
    "early": earliest("v", "t"),
    "late": latest("v", "t"),
    "list": collect("v", most=5),
    "all": len,
    "twice": sum(lambda m: 2 * m["v"] if m.get("v") is not None else None),
}


SINGLE = {name: reducer for name, reducer in NUMBERS.items() if name not in ("q", "top", "list")}
"""Those whose results are single values."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the calls with columns that were not refused; few rows are not."""
    made: list[int] = []
    monkeypatch.setattr(vectors, "ROWS_FEW", 1)
    monkeypatch.setattr(vectors, "RESULTS_FEW", 2)
    monkeypatch.setattr(Counted, "made", made)
    return made


class Counted:
    """A function whose calls with columns are counted."""

    made: ClassVar[list[int]] = []

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, message: Message, process: cues.Process) -> Any:
        return self.fn(message, process)

    @property
    def never_filtered(self) -> Any:
        return getattr(self.fn, "never_filtered", ())

    @property
    def by_columns(self) -> Any:
        return None if getattr(self.fn, "by_columns", None) is None else self._counted

    def _counted(self, columns: Any, process: cues.Process) -> Any:
        result = self.fn.by_columns(columns, process)
        self.made.append(len(columns))
        return result


def write_tables(queue: Any, rows: pa.Table | list[Message], dice: random.Random, messages: float = 0.2) -> None:
    """Write rows as tables of random sizes, and some of them as messages."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    at = 0
    while at < table.num_rows:
        some = table.slice(at, dice.choice([1, 3, 20, 1_000]))
        if at and dice.random() < messages:
            queue.appender().write_many(as_messages(some))
        else:
            queue.appender().write_table(some)
        at += some.num_rows


def as_messages(table: pa.Table) -> list[Message]:
    """The rows as a queue gives them."""
    with testing.temporary_store() as store:
        store.queue("q").appender().write_table(table)
        return testing.messages(store, "q")


def sized(stream: cues.Stream, size: int) -> cues.Stream:
    return cues.Stream(Counted(stream.fn), stream.inputs, stream.outputs, id=stream.id, batch_size=size)


def everything(store: cues.Store, id: str) -> list[str]:
    """All queues of results with where each message came from, and the state; equal texts are equal bits."""
    seen = []
    for name in ("out", "late", "errors"):
        if name in store.queues():
            for message in store.queue(name).tailer(meta=True):
                message["q/meta"].pop("q/hash", None)
                text = repr({"on": name, **message})
                seen.append(text.replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc"))
    return [*seen, repr(testing.state(store, f"g.{id}"))]


def compared(
    stream: Callable[[], cues.Stream],
    rows: pa.Table | list[Message],
    dice: random.Random,
    size: int = 1_000,
    messages: float = 0.2,
) -> list[str]:
    """Run both ways; return all that is there afterwards."""
    sides = []
    given = as_messages(rows) if isinstance(rows, pa.Table) else rows
    for as_tables in (False, True):
        graph = cues.Graph("g", errors="errors")
        graph.source("m")
        made = stream()
        graph.add(sized(made, size if as_tables else 1_000))
        with testing.temporary_store() as store:
            queue = store.queue("m", metadata={"t"})
            if as_tables:
                write_tables(queue, rows, dice, messages)
            else:
                queue.appender().write_many(given)
            testing.run_until_idle(graph, store)
            sides.append(everything(store, made.id or ""))
    for one, other in zip(*sides):
        assert one == other
    assert len(sides[0]) == len(sides[1])
    return sides[0]


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("seed", seeds.among(range(10), fast=1))
def test_the_model_of_messages_is_that_of_tables(name: str, seed: int, calls: list[int]) -> None:
    case = WINDOWS[name]
    dice = random.Random(f"{name} {seed}")
    taken: Any = []
    stream = sized(case.stream(), dice.choice([3, 20, 1_000]))
    with testing.temporary_store() as store:
        for queue, given in messages(seed, 150, case.inputs).items():
            write_tables(store.queue(queue), given, dice)
        testing.run_until_idle(graph_of(stream, case.inputs, taken), store, seed=seed)
        wanted, wanted_late = case.model(taken)
        results, late = found(store)
        key: Any = None if case.ordered else repr
        assert (results if case.ordered else sorted(results, key=key)) == (
            wanted if case.ordered else sorted(wanted, key=key)
        )
        assert late == wanted_late
    assert bool(calls) == (name in COLUMNS)


ONE_INPUT = [name for name, case in WINDOWS.items() if case.inputs == ("m",)]


@pytest.mark.parametrize("name", ONE_INPUT)
@pytest.mark.parametrize("seed", seeds.among(range(20), fast=1))
def test_tables_have_the_results_order_provenance_and_state_of_messages(name: str, seed: int) -> None:
    dice = random.Random(f"{name} {seed}")
    (rows,) = messages(seed, 200, ("m",)).values()
    assert len(compared(WINDOWS[name].stream, rows, dice, dice.choice([2, 30, 1_000]))) > 20


def random_numbers(dice: random.Random, count: int) -> list[Message]:
    """Floats whose sum depends on the order of the additions."""
    exponents = [dice.choice([-300, -3, 0, 1, 16, 300]) for _ in range(count)]
    return [
        {"t": n + dice.random() * 9, "k": f"k{dice.randrange(4)}", "v": dice.uniform(-1, 1) * 10.0**exponent}
        for n, exponent in enumerate(exponents)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(20), fast=1))
def test_sums_of_floats_are_those_of_their_order(seed: int, calls: list[int]) -> None:
    dice = random.Random(seed)
    rows = random_numbers(dice, 400)
    for at in range(0, 400, 37):
        rows[at]["v"] = dice.choice([None, float("inf"), float("-inf"), -0.0, 0.0])
    fixed: Any = {"reduce": NUMBERS, **TIMED}
    gap = dice.choice([1, 3, 6, 20])
    for stream in (
        lambda: windows.tumbling("m", "out", 40, **fixed),
        lambda: windows.hopping("m", "out", "50s", "20s", offset=7, **fixed),
        lambda: windows.counted("m", "out", 7, key="k", reduce=NUMBERS),
        lambda: windows.sessions("m", "out", gap, **fixed),
        lambda: windows.counted("m", "out", 1, time="t", reduce=NUMBERS),
        lambda: windows.counted("m", "out", 5, time="t", key="k", within=gap, delay=2, reduce=NUMBERS),
    ):
        compared(stream, rows, dice, dice.choice([5, 50, 1_000]))
    assert calls


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(20), fast=1))
def test_aggregates_of_floats_are_those_of_their_order(seed: int, calls: list[int]) -> None:
    dice = random.Random(seed)
    rows = random_numbers(dice, 400)
    for at in range(0, 400, 37):
        rows[at]["v"] = dice.choice([None, -0.0, 0.0])
    for key, every in (("k", None), (None, None), ("k", "90s"), (["k", "v"], 20)):
        rows = [row for row in rows if row["v"] is not None or not isinstance(key, list)]
        names: Any = NUMBERS if every is not None else SINGLE
        more: Any = {} if every is None else {"every": every, "time": "t", "delay": 2}
        found = compared(
            lambda: aggregates.aggregate("m", "out", by=key, reduce=names, **more),
            rows,
            dice,
            dice.choice([5, 50, 1_000]),
        )
        assert len(found) > (400 if every is None else 4)
        assert bool(calls) == (not isinstance(key, list))  # floats are no keys of columns
        calls.clear()


def test_each_row_may_have_a_result_that_is_none_or_fails(calls: list[int]) -> None:
    """Infinities of both signs have no sum: the result of such a row has the reason."""
    values = [[1, 2, 3], [0.5, float("inf"), 1.0], [float("-inf"), 2.0, 1.0], [None, None], [2**62] * 4, ["x", 1.5]]
    for some in values:
        rows = [{"k": "a", "v": v, "w": -7} for v in some for _ in range(2)]
        table = pa.table({name: pa.array([row[name] for row in rows]) for name in ("k", "w")})
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):
            table = table.append_column("v", pa.array([row["v"] for row in rows]))
        compared(lambda: aggregates.aggregate("m", "out", by="k", reduce=SINGLE), table, random.Random(1), messages=0)
    assert calls


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("seed", seeds.among(range(60), fast=2))
def test_counted_windows_with_a_time_are_those_of_messages(key: str | None, seed: int, calls: list[int]) -> None:
    """Full ones, ended ones, and those that end in a step before, in or after a row of their key."""
    dice = random.Random(f"{key} {seed}")
    keys = dice.choice([1, 2, 9, 60])
    rows: list[Message] = [
        {"t": n * dice.choice([0.5, 3]) + dice.random() * 9, "k": f"k{dice.randrange(keys)}", "v": n}
        for n in range(300)
    ]
    table = pa.Table.from_pylist(rows)
    if dice.random() < 0.3:
        ended = windows.watermark(None)["q/type"]
        table = table.append_column("q/type", pa.array([ended if n == 250 else None for n in range(300)]))
    size, within, delay = dice.choice([1, 2, 5, 40]), dice.choice([0.001, 2, 10, 100, 10**9]), dice.choice([0, 1, 9])
    found = compared(
        lambda: windows.counted("m", "out", size, time="t", key=key, within=within, delay=delay, reduce=NUMBERS),
        table,
        dice,
        dice.choice([2, 7, 40, 1_000]),
    )
    assert found and (calls or "q/type" in table.column_names)


def test_a_counted_window_that_is_full_leaves_nothing_open() -> None:
    rows = [{"t": n, "k": f"k{n % 3}", "v": n} for n in range(12)]
    for as_tables in (True, False):
        graph = cues.Graph("g")
        graph.source("m")
        made = windows.counted("m", "out", 4, time="t", key="k", within=100, reduce={"n": count()})
        graph.add(made)
        with testing.temporary_store() as store:
            if as_tables:
                store.queue("m").appender().write_table(pa.Table.from_pylist(rows))
            else:
                store.queue("m").appender().write_many(rows)
            testing.run_until_idle(graph, store)
            assert len(testing.messages(store, "out")) == 3
            assert not made.fn.__cues_open__(testing.state(store, "g.out"))


OPTIONS: list[list[dict[str, Any]]] = [
    [{}, {"size": 2}], [{"size": 2}, {"size": 7}], [{"within": 3}, {}], [{}, {"within": 3}],
    [{"within": 3, "delay": 5}, {}, {"within": 6}], [{"within": 8}, {"within": 2, "size": 3}],
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_counted_windows_whose_options_change(options: list[dict[str, Any]]) -> None:
    rows = [{"t": n, "k": f"k{n % 3}", "v": n} for n in range(14)]
    sides = []
    for as_tables in (True, False):
        with testing.temporary_store() as store:
            for some in options:
                given: Any = {"time": "t", "key": "k", "reduce": NUMBERS, **some}
                graph = cues.Graph("g")
                graph.source("m")
                graph.add(windows.counted("m", "out", given.pop("size", 4), **given))
                appender = store.queue("m").appender()
                if as_tables:
                    appender.write_table(pa.Table.from_pylist(rows))
                else:
                    appender.write_many(rows)
                testing.run_until_idle(graph, store)
            sides.append(everything(store, "out"))
    assert sides[0] == sides[1] and len(sides[0]) > 3


def test_results_in_columns_are_placed_on_partitions_and_in_other_stores(tmp_path: Path) -> None:
    rows = [{"t": n, "k": f"k{n % 5}", "v": n} for n in range(300)]
    sides = []
    for as_tables in (True, False):
        options = cues.QueueOptions(partitions=3, key="k", path=str(tmp_path / f"other {as_tables}"), metadata={"t"})
        graph = cues.Graph("g", queues={"out": options})
        graph.source("m")
        graph.add(aggregates.aggregate("m", "out", by="k", reduce=SINGLE))
        with cues.open(tmp_path / str(as_tables), durability="process") as store:
            queue = store.queue("m", metadata={"t"})
            if as_tables:
                queue.appender().write_table(pa.Table.from_pylist(rows))
            else:
                queue.appender().write_many(rows)
            testing.run_until_idle(graph, store)
            assert store.check() == []
        with cues.open(tmp_path / f"other {as_tables}") as other:
            out = other.queue("out")
            found = [list(out.partition(n).tailer(meta=True)) for n in range(3)]
            for message in [message for some in found for message in some]:
                message["q/meta"].pop("q/hash")
            sides.append(found)
    assert sides[0] == sides[1] and builtins.sum(map(len, sides[0])) == 300


def test_aggregates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(cues.errors.GraphError, match="are for every="):
        aggregates.aggregate("m", "out", by="k", reduce=SINGLE, time="t")
    with pytest.raises(cues.errors.GraphError, match="needs event time"):
        aggregates.aggregate("m", "out", by="k", reduce=SINGLE, every="1m")
    with pytest.raises(cues.errors.GraphError, match="inputs of an aggregate"):
        aggregates.aggregate(["m"], "out", by="k", reduce=SINGLE)  # type: ignore[arg-type]


def test_after_the_end_of_its_input_each_message_writes_its_aggregate() -> None:
    rows = [{"t": n, "k": "a", "v": n} for n in range(3)]
    graph = cues.Graph("g")
    graph.source("m")
    graph.add(aggregates.aggregate("m", "out", by="k", reduce={"n": count()}, every=10, time="t"))
    with testing.temporary_store() as store:
        for message in (*rows, windows.watermark(None), *rows):
            store.queue("m").appender().write(message)
        store.queue("m").appender().write_table(pa.Table.from_pylist(rows))
        testing.run_until_idle(graph, store)
        assert [m["n"] for m in testing.messages(store, "out")] == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", seeds.among(range(30), fast=4))
def test_dedupe_passes_the_same_rows_with_the_same_state(seed: int, calls: list[int]) -> None:
    """With times that make messages expire, or the clock, which moves between two runs; keys of two types."""
    dice = random.Random(seed)
    field = dice.choice(["at", "when", "n", None])
    rows: list[Message] = [{"at": n * 0.5 + dice.random() * 4, "k": dice.randrange(30)} for n in range(300)]
    for n, each in enumerate(rows):
        each |= {"when": datetime.fromtimestamp(each["at"], UTC), "n": int(each["at"]), "x": f"x {n}"}
        each["k"] = each["k"] if n < 200 else f"key {each['k']}" if n < 250 else each["k"] % 2 == 0
    within = dice.choice([2, 6, 30, 500])
    moves = {low: within * dice.choice([0.3, 1, 2.5]) for low in (0, 100, 200, 250)}
    sides = []
    for as_tables in (True, False):
        with testing.Clock(T0) as clock, testing.temporary_store() as store:
            for low, move in moves.items():
                graph = cues.Graph("g", errors="errors")
                graph.source("m")
                made: Any = shape.dedupe("k", within=within, time=field)
                graph.add(cues.Stream(Counted(made), "m", "out", id="dedupe", batch_size=100))
                some = rows[low : low + (50 if low >= 200 else 100)]
                if as_tables:
                    store.queue("m", metadata={"t"}).appender().write_table(pa.Table.from_pylist(some))
                else:
                    store.queue("m", metadata={"t"}).appender().write_many(some)
                testing.run_until_idle(graph, store)
                clock.advance(move)
            state = [testing.state(store, "g.dedupe", part) for part in ("keys", "order", "row")]
            sides.append([*everything(store, "dedupe"), *map(repr, state)])
    assert sides[0] == sides[1]
    assert calls or (field is not None and within == 2)  # else some messages of each step are late


@pytest.mark.parametrize("how", ["inner", "left"])
def test_lookups_of_tables_in_tables(how: Any, calls: list[int]) -> None:
    dice = random.Random(how)
    parts = [
        (side, [{"k": f"k{dice.randrange(12)}", "j": n % 2, side: n} for n in range(40)])
        for side in ("right", "left", "right", "left")
    ]
    sides = []
    for as_tables in (True, False):
        graph = cues.Graph("g")
        for name in ("left", "right"):
            graph.source(name)
        join = joins.lookup({"left": "left", "right": "right"}, "out", key=["k", "j"], how=how)
        graph.add(sized(join, 1_000))
        with testing.temporary_store() as store:
            for queue, rows in parts:
                appender = store.queue(queue, metadata={"t"}).appender()
                if as_tables:
                    appender.write_table(pa.Table.from_pylist(rows))
                else:
                    appender.write_many(rows)
                testing.run_until_idle(graph, store)
            sides.append(everything(store, "out"))
    assert sides[0] == sides[1] and len(sides[0]) > 40 and len(calls) == 4


T0 = datetime(2026, 1, 31, 12, tzinfo=UTC)
TIMES = [T0 + timedelta(seconds=3 * n, microseconds=n) for n in range(40)]
COLUMN_TYPES: dict[str, dict[str, Any]] = {
    "int keys, bool values": {"k": pa.array([n % 3 for n in range(40)]), "v": pa.array([True, False] * 20)},
    "several keys": {"k": pa.array(["a", "b"] * 20), "j": pa.array([n % 3 for n in range(40)], pa.int8())},
    "dictionary keys": {"k": pa.array(["a", "b", "c", "d"] * 10).dictionary_encode()},
    "float keys": {"k": pa.array([0.5, 1.0] * 20)},
    "views of text": {"k": pa.array(["a", "b"] * 20, pa.string_view()), "v": pa.array(["x", None] * 20)},
    "bool keys": {"k": pa.array([True, False] * 20)},
    "a null key": {"k": pa.array(["a", "b", None, "c"] * 10)},
    "a null in the dictionary of keys": {
        "k": pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 2] * 10), pa.array(["a", "b", None]))
    },
    "a null in the dictionary of values": {
        "v": pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 2] * 10), pa.array([3, 4, None]))
    },
    "no key": {"j": pa.array(["x"] * 40)},
    "small integers": {"v": pa.array(range(40), pa.uint8())},
    "large integers": {"v": pa.array([2**62, 2**62 - 1, -(2**63), 1] * 10)},
    "unsigned integers": {"v": pa.array([2**63, 2**64 - 1, 0, 1] * 10, pa.uint64())},
    "decimals": {"v": pa.array([Decimal("0.10"), Decimal("-3.25")] * 20)},
    "float32": {"v": pa.array([0.1, 0.2, None, 1e30] * 10, pa.float32())},
    "nan": {"v": pa.array([1.0, 2.0, float("nan"), 3.0] * 10)},
    "negative zero": {"v": pa.array([-0.0, 0.0] * 20)},
    "infinities": {"v": pa.array([float("inf"), 1.0, float("-inf"), 2.0] * 10)},
    "no values": {"v": pa.nulls(40)},
    "lists": {"v": pa.array([[1], [2]] * 20)},
    "a null time": {"t": pa.array([None if n == 9 else time for n, time in enumerate(TIMES)])},
    "ISO times": {"t": pa.array([time.isoformat() for time in TIMES])},
    "naive times": {"t": pa.array([time.replace(tzinfo=None) for time in TIMES], pa.timestamp("ms"))},
    "times of a zone": {"t": pa.array(TIMES, pa.timestamp("us", "Asia/Kolkata"))},
    "nanoseconds": {"t": pa.array([-1, 1, 999, 10**9 + 7] * 10, pa.timestamp("ns"))},
    "seconds": {"t": pa.array([round(time.timestamp()) for time in TIMES])},
    "seconds as floats": {"t": pa.array([time.timestamp() for time in TIMES])},
    "seconds as float32": {"t": pa.array([float(n) + 0.3 for n in range(40)], pa.float32())},
    "milliseconds": {"t": pa.array([round(time.timestamp() * 1000) for time in TIMES])},
    "seconds at the ends": {"t": pa.array([-62_135_596_800, 253_402_300_799, 0, 253_402_300_800] * 10)},
    "floats at the ends": {"t": pa.array([-62_135_596_800.0, 253_402_300_799.0, 253_402_300_799.5, 1.0] * 10)},
    "nan times": {"t": pa.array([1.0, float("nan")] * 20)},
    "watermarks": {
        "q/type": pa.array([None, "x", windows.watermark(None)["q/type"], None] * 10),
        "watermark": pa.array([None, None, T0, None] * 10),
    },
    "other types": {"q/type": pa.array(["x", None] * 20)},
}


REFUSED = {
    "float keys", "no key", "ISO times", "times of a zone", "int keys, bool values", "views of text", "lists", "nan",
    "a null in the dictionary of keys", "a null key", "a null time", "nan times", "milliseconds", "seconds at the ends",
    "floats at the ends", "watermarks",
}  # fmt: skip
"""Columns that have no form for columns, or a wrong message in each step."""


@pytest.mark.parametrize("name", slow_except(list(COLUMN_TYPES)[::4], COLUMN_TYPES))
def test_every_type_of_a_column_has_the_results_of_messages(name: str, calls: list[int]) -> None:
    base = {"t": pa.array(TIMES), "k": pa.array(["a", "b"] * 20), "v": pa.array([1, 2, None, -7] * 10)}
    given = {**base, **COLUMN_TYPES[name]}
    if name == "no key":
        del given["k"]
    key: Any = ["k", "j"] if name == "several keys" else "k"
    for reduce in (NUMBERS, {"n": count(), "s": sum("v")}):
        for size, every in ((30, 30), (20, 8)):
            compared(
                lambda: windows.hopping(
                    "m", "out", size, every, time="t", key=key, delay=5, late="late", reduce=reduce
                ),
                pa.table(given),
                random.Random(name),
                messages=0,
            )  # fmt: skip
    assert bool(calls) == (name not in REFUSED)


def test_a_type_that_changes_between_tables() -> None:
    """Sums of integers, then of floats, then of integers again; a field that is new, and gone."""
    rows = [{"t": n, "k": "a", "v": v} for n, v in enumerate([1, 2, 3, None])]
    more = [{"t": 4 + n, "k": "a", "v": v, "w": 1.5} for n, v in enumerate([0.1, 0.2, -0.0, 1e300])]
    tables = [pa.Table.from_pylist(some) for some in (rows, more, rows, [{"t": 9, "k": "a"}] * 5)]
    sides = []
    for as_tables in (True, False):
        graph = cues.Graph("g")
        graph.source("m")
        graph.add(windows.tumbling("m", "out", 1000, time="t", key="k", late="late", reduce={**NUMBERS, "w": sum("w")}))
        with testing.temporary_store() as store:
            for table in tables:
                appender = store.queue("m").appender()
                if as_tables:
                    appender.write_table(table)
                else:
                    appender.write_many(as_messages(table))
                testing.run_until_idle(graph, store)
            store.queue("m").appender().write(windows.watermark(None))
            testing.run_until_idle(graph, store)
            sides.append(everything(store, "out"))
    assert sides[0] == sides[1]


def test_a_wrong_message_does_not_keep_the_others_from_columns(calls: list[int]) -> None:
    """Among 20,000 rows two have no key: most rows are in calls with columns all the same."""
    rows = [{"t": n / 10, "k": f"k{n % 7}", "v": n} for n in range(20_000)]
    rows[9_001]["k"] = rows[15_500]["k"] = None
    table = pa.Table.from_pylist(rows)
    graph = cues.Graph("g", errors="errors")
    graph.source("m")
    graph.add(sized(windows.tumbling("m", "out", "1m", time="t", key="k", late="late", reduce=NUMBERS), 1_000))
    with testing.temporary_store() as store:
        store.queue("m").appender().write_table(table)
        store.queue("m").appender().write(windows.watermark(None))
        testing.run_until_idle(graph, store)
        assert len(testing.messages(store, "errors")) == 2
        assert builtins.sum(m["n"] for m in testing.messages(store, "out")) == 19_998
    assert 10_000 < builtins.sum(calls) < 19_000


@pytest.mark.parametrize("name", sorted(COLUMNS.intersection(ONE_INPUT)))
@pytest.mark.parametrize("seed", seeds.among(range(20), fast=1))
def test_an_expression_in_where_is_evaluated_on_columns(name: str, seed: int, calls: list[int]) -> None:
    """With the results, provenance and state of a filter that is a function; watermarks pass both."""
    dice = random.Random(f"{name} {seed}")
    (rows,) = messages(seed, 200, ("m",)).values()
    least, ends = dice.choice([-100, 0, 1, 3, 1_000]), dice.random() < 0.5
    passes: Any = {
        False: lambda m: m["v"] is not None and m["v"] >= least,
        True: pc.field("v") >= least,
    }
    sides = []
    for as_tables in (False, True):
        graph = cues.Graph("g", errors="errors")
        graph.source("m")
        made = WINDOWS[name].stream()
        size, fn = dice.choice([2, 30, 1_000]), Counted(made.fn)
        graph.add(cues.Stream(fn, "m", made.outputs, id=made.id, batch_size=size, where=passes[as_tables]))
        with testing.temporary_store() as store:
            queue = store.queue("m", metadata={"t"})
            if as_tables:
                write_tables(queue, rows, dice)
            else:
                queue.appender().write_many(rows)
            if ends:
                queue.appender().write(windows.watermark(None))
            testing.run_until_idle(graph, store)
            sides.append(everything(store, made.id or ""))
    assert sides[0] == sides[1] and (least > 3 or len(sides[0]) > 2)
    assert bool(calls) == (least <= 3)


def test_few_rows_that_pass_are_called_one_by_one(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the expression is evaluated on columns all the same, once a step."""
    monkeypatch.setattr(vectors, "ROWS_FEW", 20)
    looked: list[int] = []
    chosen = tables.Columns.where
    monkeypatch.setattr(tables.Columns, "where", lambda own, where: looked.append(len(own)) or chosen(own, where))
    monkeypatch.setattr(processor.ByExpression, "__call__", lambda own, message: pytest.fail("one message"))
    graph = cues.Graph("g")
    graph.source("m")
    where = pc.field("n").isin([7, 107, 207])
    graph.add(aggregates.aggregate("m", "out", by="k", reduce={"n": count()}, where=where))
    with testing.temporary_store() as store:
        store.queue("m").appender().write_table(pa.table({"n": range(300), "k": ["a"] * 300}))
        testing.run_until_idle(graph, store)
        assert [m["n"] for m in testing.messages(store, "out")] == [1, 2, 3]
        assert builtins.sum(looked) >= 300 and not calls


@pytest.mark.parametrize("options", [{"where": lambda m: m["v"] != 1}, {"types": ["x"]}, {"idle": "5s"}])
def test_options_that_need_messages_get_them(options: Any) -> None:
    rows = [{"t": n, "k": "a", "v": n % 3, "q/type": "x"} for n in range(60)]
    graph = cues.Graph("g")
    graph.source("m")
    graph.add(windows.tumbling("m", "out", 10, **{"reduce": {"n": count()}, **TIMED, **options}))
    with testing.temporary_store() as store:
        store.queue("m").appender().write_table(pa.Table.from_pylist(rows))
        counters = testing.run_until_idle(graph, store).counters["out"]
        assert counters.calls >= 40 and testing.messages(store, "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tumbling", "hopping"])
def test_a_crash_anywhere_changes_no_result_of_tables(name: str, calls: list[int]) -> None:
    (rows,) = messages(5, 24, ("m",), disorder=20).values()
    tables = [pa.Table.from_pylist(rows[at : at + 8]) for at in (0, 8, 16)]

    def run(store: cues.Store) -> None:
        graph = cues.Graph("g")
        graph.source("m")
        graph.add(sized(WINDOWS[name].stream(), 8))
        testing.run_until_idle(graph, store)

    def filled(store: cues.Store) -> cues.Store:
        for table in tables:
            store.queue("m").appender().write_table(table)
        return store

    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: run(filled(store)))
        wanted = [testing.messages(store, "out"), testing.messages(store, "late"), testing.state(store, "g.out")]
    assert calls and wanted[0] and len({point for point, _ in sites}) > 5
    for point, hit in sites:
        if not point.startswith("append"):
            with testing.temporary_store() as store:
                filled(store)
                with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                    run(store)
                run(store)
                assert wanted == [
                    testing.messages(store, "out"), testing.messages(store, "late"), testing.state(store, "g.out")
                ], (point, hit)  # fmt: skip
