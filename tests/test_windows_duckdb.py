"""Windows and joins over real flights, shuffled and delayed at random, are what DuckDB computes over the same rows.

The flights of January 2013 are in examples/data. ``FLIGHTS_DATA`` names a directory with the tables of the whole year
(examples/flights.py).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import testing
from cues.processors import files, joins, windows
from cues.processors.reducers import count, distinct, max, mean, min, quantiles, sum, top

duckdb = pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("FLIGHTS_DATA", Path(__file__).parent.parent / "examples" / "data"))
HOUR = 3600
DELAY_S = 3 * HOUR
Row = dict[str, Any]


def table(name: str) -> Iterator[Row]:
    for _, row in files.read_csv(next(DATA.glob(f"{name}.csv*"))):
        yield row


def whole(text: str) -> int | None:
    return None if text == "NA" else int(text)


@pytest.fixture(scope="module")
def flights() -> list[Row]:
    rows = []
    for n, row in enumerate(table("flights")):
        time = int(datetime.fromisoformat(row["time_hour"]).timestamp()) + int(row["minute"]) * 60
        fields = {name: row[name] for name in ("carrier", "origin", "dest", "tailnum")}
        rows.append({"n": n, "time": time, "delay": whole(row["dep_delay"]), **fields})
    return sorted(rows, key=lambda row: row["time"])


@pytest.fixture(scope="module")
def weather() -> list[Row]:
    rows = []
    for n, row in enumerate(table("weather")):
        time = int(datetime.fromisoformat(row["time_hour"]).timestamp())
        rows.append({"n": n, "time": time, "origin": row["origin"], "visib": float(row["visib"])})
    first: dict[Any, Row] = {}
    for row in rows:  # in the autumn an hour is there twice
        first.setdefault((row["time"], row["origin"]), row)
    return sorted(first.values(), key=lambda row: row["time"])


def shuffled(rows: list[Row], delay_s: float = DELAY_S) -> list[Row]:
    """The rows in a random order, in which none comes more than ``delay_s`` after a row of a later time."""
    chance = random.Random(seeds.new())
    return sorted(rows, key=lambda row: row["time"] + chance.uniform(0, delay_s * 0.999))


def run(stream: cues.Stream, queues: dict[str, list[Row]]) -> tuple[list[Row], list[Row]]:
    """The results and the late messages, after all windows have closed."""
    graph = cues.Graph("g")
    with testing.temporary_store(map_size=2 << 30) as store:
        for name, rows in queues.items():
            graph.source(name)
            store.queue(name).appender().write_many([*rows, windows.watermark(None)])
        graph.add(stream)
        testing.run_until_idle(graph, store)
        state = testing.state(store, f"g.{stream.id}")
        assert all(type(field) is not bytes or field[:1] == b"t" for field in state), "rows were left in the state"
        return testing.messages(store, "out"), testing.messages(store, "late")


def query(sql: str, **tables: list[Row]) -> list[Row]:
    with duckdb.connect() as connection:
        for name, rows in tables.items():
            connection.register(name, pa.Table.from_pylist(rows))
        result = connection.execute(sql)
        columns = [column[0] for column in result.description]
        return [dict(zip(columns, row)) for row in result.fetchall()]


def same(found: list[Row], wanted: list[Row], key: tuple[str, ...]) -> None:
    """Compare all rows: floats up to rounding, all others exactly."""
    assert len(found) == len(wanted)
    place = lambda row: tuple(str(row[name]) for name in key)  # noqa: E731
    for one, other in zip(sorted(found, key=place), sorted(wanted, key=place)):
        assert set(one) == set(other)
        for name, value in one.items():
            if isinstance(value, float):
                assert math.isclose(value, other[name], rel_tol=1e-9, abs_tol=1e-9), (name, one, other)
            elif isinstance(value, list) and value and isinstance(value[0], float):
                assert value == pytest.approx(other[name], rel=1e-9, abs=1e-9)
            else:
                assert value == (list(other[name]) if isinstance(value, list) else other[name]), (name, one, other)


def seconds(rows: list[Row]) -> list[Row]:
    """The results with start and end as unix seconds."""
    return [
        row | {name: int(row[name].timestamp()) for name in ("start", "end") if name in row} for row in rows
    ]  # fmt: skip


REDUCE = {
    "flights": count(),
    "departed": count("delay"),
    "total": sum("delay"),
    "mean": mean("delay"),
    "least": min("delay"),
    "most": max("delay"),
    "quantiles": quantiles("delay", at=(0.25, 0.5, 0.99), exact=None),
    "places": distinct("dest"),
    "top": top("dest", 3, capacity=200),
}
AGGREGATES = """
    count(*) as flights, count(delay) as departed, sum(delay)::bigint as total, avg(delay) as mean,
    min(delay) as least, max(delay) as most, quantile_cont(delay, [0.25, 0.5, 0.99]) as quantiles,
    count(distinct dest) as places
"""


def with_top(rows: list[Row], counts: list[Row], key: tuple[str, ...]) -> list[Row]:
    """The rows with the three most frequent places, from the counts by place."""
    best: dict[Any, list[Any]] = {}
    for row in sorted(counts, key=lambda row: (-row["n"], row["dest"])):
        best.setdefault(tuple(row[name] for name in key), []).append([row["dest"], row["n"]])
    return [row | {"top": best[tuple(row[name] for name in key)][:3]} for row in rows]


@pytest.mark.parametrize("every", [6, 2], ids=["tumbling", "hopping"])
def test_windows_of_flights(flights: list[Row], every: int) -> None:
    key = ("carrier", "origin", "start")
    if every == 6:
        stream = windows.tumbling(
            "m", "out", "6h", time="time", key=["carrier", "origin"], delay=DELAY_S, late="late", reduce=REDUCE
        )
    else:
        stream = windows.hopping(
            "m", "out", "6h", "2h", time="time", key=["carrier", "origin"], delay=DELAY_S, late="late", reduce=REDUCE
        )
    found, late = run(stream, {"m": shuffled(flights)})
    assert not late
    hop = every * HOUR
    first = f"(time // {hop} * {hop} - 6 * {HOUR} + {hop})::bigint"
    each = f"with f as (select *, unnest(generate_series({first}, time, {hop})) as start from m)"
    wanted = query(f'{each} select carrier, origin, start, start + 6*{HOUR} as "end", {AGGREGATES} from f'
                   " group by all", m=flights)  # fmt: skip
    counts = query(f"{each} select carrier, origin, start, dest, count(*) as n from f group by all", m=flights)
    same(seconds(found), with_top(wanted, counts, key), key)


def test_sessions_of_planes(flights: list[Row]) -> None:
    stream = windows.sessions(
        "m", "out", "9h", time="time", key="tailnum", delay=DELAY_S, late="late", reduce=REDUCE
    )  # fmt: skip
    found, late = run(stream, {"m": shuffled(flights)})
    assert not late
    each = f"""
        with g as (
            select *, time - lag(time) over (partition by tailnum order by time) >= 9*{HOUR} as first from m
        ),
        s as (select *, sum(coalesce(first, false)::int) over (partition by tailnum order by time) as session from g)
    """
    wanted = query(f'{each} select tailnum, session, min(time) as start, max(time) + 9*{HOUR} as "end", {AGGREGATES}'
                   " from s group by tailnum, session", m=flights)  # fmt: skip
    counts = query(f"{each} select tailnum, session, dest, count(*) as n from s group by all", m=flights)
    wanted = with_top(wanted, counts, ("tailnum", "session"))
    same(seconds(found), [{k: v for k, v in row.items() if k != "session"} for row in wanted], ("tailnum", "start"))


def test_what_is_late_is_on_the_late_queue_and_in_no_window(flights: list[Row]) -> None:
    """With a delay that is too short: results and late messages together are all flights."""
    stream = windows.tumbling(
        "m", "out", "1h", time="time", key="origin", delay="30m", late="late", reduce={"n": count(), "t": sum("n")}
    )
    found, late = run(stream, {"m": shuffled(flights)})
    gone = {row["message"]["n"] for row in late}
    assert len(gone) == len(late) > 100 and [row["number"] for row in late] == list(range(1, len(late) + 1))
    wanted = query(
        f'select origin, time // {HOUR} * {HOUR} as start, start + {HOUR} as "end", count(*) as n, sum(n)::bigint as t'
        " from m group by origin, start",
        m=[row for row in flights if row["n"] not in gone],
    )
    same(seconds(found), wanted, ("origin", "start"))


@pytest.mark.parametrize("how", ["left"])
def test_flights_as_of_the_weather(flights: list[Row], weather: list[Row], how: str) -> None:
    weather = [row for row in weather if row["n"] % 3 == 0]
    queues = {"f": shuffled(flights), "w": shuffled(weather)}
    combine = lambda flight, row: {"n": flight["n"], "w": None if row is None else row["n"]}  # noqa: E731
    given: Any = {"key": "origin", "time": "time", "delay": DELAY_S, "late": "late", "how": how, "combine": combine}
    sql = f"select f.n, w.n as w from f asof {how} join w on f.origin = w.origin and f.time >= w.time"
    found, late = run(joins.as_of({"f": "f", "w": "w"}, "out", **given), queues)
    assert not late
    wanted = query(sql, f=flights, w=weather)
    same(found, wanted, ("n",))
    found, late = run(joins.as_of({"f": "f", "w": "w"}, "out", tolerance="90m", **given), queues)
    assert not late
    times = {row["n"]: row["time"] for row in flights}
    rows = {row["n"]: row["time"] for row in weather}
    near = [row for row in wanted if row["w"] is not None and times[row["n"]] - rows[row["w"]] <= 90 * 60]
    far = [{"n": n, "w": None} for n in times.keys() - {row["n"] for row in near}] if how == "left" else []
    assert near and len(near) < len(wanted)
    same(found, near + far, ("n",))


@pytest.mark.parametrize("how", ["full"])
def test_flights_and_weather_within_an_interval(flights: list[Row], weather: list[Row], how: str) -> None:
    weather = [row for row in weather if row["n"] % 3 == 0]
    stream = joins.interval(
        {"f": "f", "w": "w"},
        "out",
        key="origin",
        time="time",
        before="20m",
        after="10m",
        delay={"f": DELAY_S, "w": "1h"},
        late="late",
        how=how,  # type: ignore[arg-type]
        combine=lambda f, w: {"n": f and f["n"], "w": w and w["n"]},
    )
    found, late = run(stream, {"f": shuffled(flights), "w": shuffled(weather, HOUR)})
    assert not late
    sql = f"""select f.n, w.n as w from f {how} join w
        on f.origin = w.origin and w.time between f.time - 1200 and f.time + 600"""
    same(found, query(sql, f=flights, w=weather), ("n", "w"))


def test_a_lookup_in_a_table_that_is_complete(flights: list[Row]) -> None:
    names = [{"carrier": row["carrier"], "name": row["name"]} for row in table("airlines") if row["carrier"] != "UA"]
    graph = cues.Graph("g")
    graph.source("f")
    graph.source("a")
    combine = lambda f, a: {"n": f["n"], "name": a and a["name"]}  # noqa: E731
    graph.add(joins.lookup({"f": "f", "a": "a"}, "out", key="carrier", how="left", combine=combine))
    with testing.temporary_store(map_size=2 << 30) as store:
        store.queue("a").appender().write_many(names)
        testing.run_until_idle(graph, store)
        store.queue("f").appender().write_many(flights)
        testing.run_until_idle(graph, store)
        found = testing.messages(store, "out")
    same(found, query("select f.n, a.name from f left join a using (carrier)", f=flights, a=names), ("n",))


def test_sketches_are_as_close_as_they_say(flights: list[Row]) -> None:
    """One window with all flights: the rank of a quantile within 2 %, distinct planes within four standard errors."""
    at = (0.01, 0.25, 0.5, 0.75, 0.99)
    reduce = {"q": quantiles("delay", at=at), "d": distinct("tailnum"), "t": top("dest", 5)}
    stream = windows.tumbling(
        "m", "out", "800d", time="time", delay=DELAY_S, late="late", offset="500d", reduce=reduce
    )  # fmt: skip
    found, _ = run(stream, {"m": shuffled(flights)})
    assert len(found) == 1
    delays = sorted(row["delay"] for row in flights if row["delay"] is not None)
    for q, value in zip(at, found[0]["q"]):
        below = len([d for d in delays if d < value - 0.5]) / len(delays)
        upto = len([d for d in delays if d <= value + 0.5]) / len(delays)
        assert below - 0.02 <= q <= upto + 0.02
    planes = len({row["tailnum"] for row in flights})
    assert planes > 2_000 and abs(found[0]["d"] - planes) < 4 * 0.016 * planes
    counts = query("select dest, count(*) as n from m group by dest order by n desc, dest limit 5", m=flights)
    places = len({row["dest"] for row in flights})
    if places <= 100:
        assert found[0]["t"] == [[row["dest"], row["n"]] for row in counts]
