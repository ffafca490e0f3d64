"""The soak (tests/soak): everything at once for a bounded time, and the controls of its judge.

The judge must name each queue that is spoiled, and the whole soak must find commits that were taken apart.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import seeds
from soak import model
from soak.judge import Bounds, Judge, Partition
from soak.measures import SAMPLES_MIN, Measures
from soak.model import Message, Place

import cues
from cues import testing

ROOT = Path(__file__).parent.parent
ROWS, BOOKINGS = 150, 12
END = Bounds(ROWS, 3 * len(model.ORIGINS), BOOKINGS)
Spoil = Callable[[list[Any]], list[Any]]


def honest() -> dict[str, list[Message]]:
    """The queues and tables of a life, as they must be."""
    rows = [model.row(n) for n in range(ROWS)]
    good = [row for row in rows if not model.is_wrong(row["id"])]
    full = [model.enriched(row["id"]) for row in good]
    booked = [message for t in range(BOOKINGS) for message in model.bookings(t)]
    figures = []
    for origin in model.ORIGINS:
        mine = [flight["delay"] for flight in full if flight["origin"] == origin]
        figures += [
            {"origin": origin, "flights": n, "delay": sum(mine[:n])} for n in range(1, len(mine) + 1) if n % 3 == 0
        ]
        if len(mine) % 3:
            figures.append({"origin": origin, "flights": len(mine), "delay": sum(mine)})
    return {
        "rows": rows,
        "flights": good,
        "weather": [model.weather(n) for n in range(END.weather)],
        **dict.fromkeys(("enriched", "audited", "seen", "shipped"), full),
        **{name: [flight for flight in full if model.result(flight) == name] for name in model.RESULTS},
        "errors": [{"err.proc/messages": {"rows": [row]}} for row in rows if model.is_wrong(row["id"])],
        "figures": figures,
        **dict.fromkeys(("booked", "booked abroad", "confirmed"), booked),
        "table flights": full,
        "table rejected": [row for row in rows if model.is_wrong(row["id"])],
    }


def store(place: Place, contents: dict[str, list[Message]]) -> None:
    """Write the contents as they are, and count them with the graph's report."""
    with cues.open(place.main, durability="process") as main, cues.open(place.other, durability="process") as other:
        for name, messages in contents.items():
            if not name.startswith("table"):
                home = other if name in ("shipped", "booked abroad") else main
                placing: dict[str, Any] = {"partitions": 4, "key": "origin"} if name in model.SPREAD else {}
                home.queue(name.removesuffix(" abroad"), **placing).appender().write_many(messages)
        graph = cues.Graph("soak")

        @graph.sink(cues.AnyOf(figures="figures", errors="errors"), batch=True)
        def report(messages: list[Message], process: Any) -> None:
            process.state[process.binding] = process.state.get(process.binding, 0) + len(messages)
            model.put(place.report, str(dict(process.state)))

        testing.run_until_idle(graph, main)
    with closing(sqlite3.connect(place.table)) as db, db:
        db.executescript(model.TABLES)
        insert = "insert into flights (id, origin, wind) values (:id, :origin, :wind)"
        db.executemany(insert, contents["table flights"])
        db.executemany("insert into rejected (id) values (:id)", contents["table rejected"])


def judged(place: Place, contents: dict[str, list[Message]]) -> list[str]:
    place.main.parent.mkdir()
    store(place, contents)
    with Judge(place) as judge:
        return judge.collect() + judge.judge(END)


def test_the_judge_finds_nothing_wrong_with_an_honest_life(tmp_path: Path) -> None:
    assert judged(Place(tmp_path), honest()) == []


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("lost", lambda messages: messages[:4] + messages[5:]),
        ("duplicated", lambda messages: messages[:5] + messages[4:]),
        ("reordered", lambda messages: messages[::-1]),
        ("unexpected", lambda messages: [{**messages[0], **dict.fromkeys(messages[0], 77)}, *messages[1:]]),
    ],
)
def test_the_judge_names_everything_that_is_spoiled(what: str, spoil: Spoil, tmp_path: Path) -> None:
    """All queues and tables are spoiled in the same way; each is named, with the kind of its finding."""
    contents = honest()
    errors = [{"err.proc/messages": {"rows": [row]}} for row in spoil(contents["table rejected"])]
    problems = judged(Place(tmp_path), {**{name: spoil(each) for name, each in contents.items()}, "errors": errors})
    for name in set(contents) - {"audited", "figures"}:  # the first is compared with what was enriched: below
        mine = [problem for problem in problems if problem.startswith(f"{name}: ")]
        assert mine and what in mine[0], f"{name}: {problems}"
    if what != "lost":  # a figure more or less says nothing, as long as the last one comes
        assert any(problem.startswith("figures: ") for problem in problems)


def partition(audited: list[int], *seeks: int) -> Partition:
    """Ten flights, and what was audited of them, as indices."""
    messages = deque([{"id": index} for index in range(1, 11)], maxlen=10)
    return Partition(messages, end=11, audited=deque({"id": index} for index in audited), seeks=list(seeks))


def test_a_seek_back_is_seen_once_and_from_its_place() -> None:
    all = list(range(1, 11))
    assert (done := partition([*all, *all[3:]], 4)).follow() is None and done.is_done
    assert (short := partition(all, 4)).follow() is None and short.seeks == [4], "it has not been repeated yet"
    assert not short.is_done
    assert (twice := partition([*all, 10])).follow() is None and not twice.is_done, "the last one is there twice"
    for audited, seeks in (
        ([*all[:6], *all[3:]], ()),  # without a seek
        ([*all[:6], *all[4:]], (4,)),  # from another place
        ([*all[:6], *all[3:8], *all[3:]], (4,)),  # twice
        ([*all[:4], *all[5:]], ()),  # one is left out
    ):
        assert partition(audited, *seeks).follow(), audited


def test_a_series_that_grows_is_named() -> None:
    measures = Measures()
    measures.samples["store main"] = [10.0 + n / SAMPLES_MIN * 40 for n in range(SAMPLES_MIN)]
    measures.samples["memory of the run"] = [10.0 + n % 20 for n in range(SAMPLES_MIN)]
    assert [text.partition(" grows")[0] for text in measures.growths()] == ["store main"]


def soak(*options: str, timeout_s: float, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.soak", *options, "--seed", str(seeds.new())]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_at_once_for_a_short_time() -> None:
    status, output = soak("--seconds", "8", "--life", "8", "--pace", "1", "--rate", "100", timeout_s=590)
    assert status == 0, output[-8000:]
    assert re.search("[1-9] lives", output), output  # a short one leaves time for another


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_everything_at_once_for_ten_minutes() -> None:
    status, output = soak("--minutes", "10", "--pace", "2", timeout_s=1700)
    assert status == 0, output[-8000:]


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["before", "after"])
def test_negative_control_positions_in_a_transaction_of_their_own(order: str) -> None:
    """Positions that are written before the outputs lose messages, those written after them double some."""
    for _ in range(10):
        options = ("--seconds", "60", "--life", "30", "--pace", "0.7", "--begins", "process")
        status, output = soak(*options, timeout_s=1000, SOAK_BREAK=order)
        if status:
            assert re.search("lost|duplicated|not all came through|middle of a transaction|expected", output), output
            return
    raise AssertionError("nothing wrong was found with a broken commit")
