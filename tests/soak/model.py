"""The messages of the soak, by their numbers, and the places of its files. All is computed without Cues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

ORIGINS: Final = ("EWR", "JFK", "LGA", "BOS", "PHL", "IAD")
EACH: Final = 10
"""Flights of each origin in an hour."""
HOUR: Final = EACH * len(ORIGINS)
"""Rows of an hour."""
RESULTS: Final = ("cancelled", "delayed", "on-time")
SPREAD: Final = ("flights", "weather", "enriched", "audited", "seen")
"""Queues with partitions."""
PLAIN: Final = ("rows", "errors", "figures", "booked", "confirmed", *RESULTS)
LONG: Final = ("seen", "cancelled")
"""Queues that keep more messages than the others, for Spark, which takes a minute to read them."""
TABLES: Final = """
create table if not exists flights (n integer primary key autoincrement, id integer, origin text, wind integer);
create table if not exists rejected (n integer primary key autoincrement, id integer);
"""

Message = dict[str, Any]


class Place:
    """The files of a soak under one directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.main, self.other = self.root / "stores" / "main", self.root / "stores" / "other"
        self.table = self.root / "flights.db"
        self.report = self.root / "report.json"
        self.hour = self.root / "hour"
        self.pause = self.root / "pause"
        self.checkpoint = self.root / "checkpoint.json"
        self.logs = self.root / "logs"

    def idle(self, role: str) -> Path:
        """The file in which a paused role says the number that it has reached."""
        return self.root / f"{role}.idle"


def put(path: Path, text: str) -> None:
    """Replace a file in one moment."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


# --- flights --------------------------------------------------------------------------------------


def row(number: int) -> Message:
    """The row that the writer writes as its ``number``-th, from 0."""
    hour, place = divmod(number, HOUR)
    made = {"id": number, "origin": ORIGINS[place % len(ORIGINS)], "hour": hour, "text": "x" * (number * 31 % 150)}
    return {**made, "delay": "five"} if is_wrong(number) else {**made, "delay": number * 7919 % 100 - 20}


def is_wrong(number: int) -> bool:
    """True for a row that is refused."""
    return number % 13 == 7


def is_last(flight: Message) -> bool:
    """True if no more flights of this origin and hour follow."""
    return not any(
        not is_wrong(n) for n in range(flight["id"] + len(ORIGINS), (flight["hour"] + 1) * HOUR, len(ORIGINS))
    )


def has_flights(origin: str, hour: int) -> bool:
    first = hour * HOUR + ORIGINS.index(origin)
    return any(not is_wrong(n) for n in range(first, (hour + 1) * HOUR, len(ORIGINS)))


def weather(number: int) -> Message:
    """The observation that the source yields as its ``number``-th, from 0."""
    hour, place = divmod(number, len(ORIGINS))
    return {"origin": ORIGINS[place], "hour": hour, "wind": number * 13 % 40}


def enriched(number: int) -> Message:
    flight = row(number)
    observed = weather(flight["hour"] * len(ORIGINS) + ORIGINS.index(flight["origin"]))
    return {**flight, "wind": observed["wind"]}


def result(flight: Message) -> str:
    """The queue of a flight's result."""
    if flight["id"] % 11 == 3:
        return "cancelled"
    return "delayed" if flight["delay"] >= 15 else "on-time"


# --- transactions ---------------------------------------------------------------------------------


def bookings(number: int) -> list[Message]:
    """The messages of a transaction in one queue."""
    of = 1 + number * 7 % 5
    return [{"t": number, "part": part, "of": of} for part in range(of)]
