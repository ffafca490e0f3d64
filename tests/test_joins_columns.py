"""Joins over tables: results, late messages, provenance and state are those of the same messages one by one."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import seeds
from sets import slow_except
from test_windows_columns import Counted, as_messages, sized

import cues
from cues import testing
from cues.errors import StoreError
from cues.processors import event_time, joins, kept, vectors
from cues.storage import datafile

TWO = {"left": "l", "right": "r"}
Rounds = list[tuple[str, Any]]
"""Tables, and messages of watermarks, each with the queue that it is written to, when all before it was taken."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the calls with columns that were not refused; few rows are not."""
    made: list[int] = []
    monkeypatch.setattr(vectors, "ROWS_FEW", 1)
    monkeypatch.setattr(vectors, "RESULTS_FEW", 2)
    monkeypatch.setattr(kept, "FEW", 2)
    monkeypatch.setattr(kept, "BLOCK_ROWS", 5)
    monkeypatch.setattr(Counted, "made", made)
    return made


class Plain:
    """A state in memory, with what :meth:`expand` needs of one."""

    def __init__(self, rows: Mapping[Any, Any]) -> None:
        self.rows = dict(rows)

    def get(self, field: Any, default: Any = None) -> Any:
        return self.rows.get(field, default)

    def __getitem__(self, field: Any) -> Any:
        return self.rows[field]

    def __setitem__(self, field: Any, value: Any) -> None:
        self.rows[field] = value

    def __delitem__(self, field: Any) -> None:
        del self.rows[field]

    def range(self, low: bytes, high: bytes, limit: int | None = None) -> list[tuple[bytes, Any]]:
        fields = [f for f in self.rows if isinstance(f, bytes) and len(f) == len(low) and low <= f < high]
        return [(field, self.rows[field]) for field in sorted(fields)[:limit]]


def state_of(store: cues.Store, fn: Any) -> str:
    """The state in the form of messages: without blocks, and with the last time at which a key expires alone."""
    state = Plain(testing.state(store, "g.out"))
    fn.expand(event_time.Call(state, None), event_time.END_US)
    expiries = sorted(f for f in state.rows if isinstance(f, bytes) and len(f) == 34 and f[9] == 2)
    last = {row[18:]: row for row in expiries}
    for row in expiries:
        if last[row[18:]] != row:
            del state[row]
    if expiries:  # the first of them is in the row of the processor
        head = state[0]
        state[0] = (head[0], None, *head[2:])
    return repr(sorted(state.rows.items(), key=repr))


def found(store: cues.Store, fn: Any) -> list[str]:
    seen = []
    for name in ("out", "late", "errors"):
        if name in store.queues():
            for message in store.queue(name).tailer(meta=True):
                message["q/meta"].pop("q/hash", None)
                seen.append(repr({"on": name, **message}))
    text = "zoneinfo.ZoneInfo(key='UTC')"
    return [each.replace(text, "datetime.timezone.utc") for each in (*seen, state_of(store, fn))]


def run(
    make: Callable[[int], cues.Stream], rounds: Rounds, size: Callable[[int], int], tables: Callable[[int], bool]
) -> list[str]:
    """Take the rounds one after another, by columns where ``tables`` says so; ``make`` gets the number of the round."""
    with testing.temporary_store() as store:
        for place, (name, given) in enumerate(rounds):
            graph = cues.Graph("g", errors="errors")
            graph.source("l")
            graph.source("r")
            stream = make(place)
            graph.add(sized(stream, size(place)))
            appender = store.queue(name, metadata={"t"}).appender()
            if isinstance(given, dict):
                appender.write(given)
            elif tables(place):
                appender.write_table(given)
            else:
                appender.write_many(as_messages(given))
            testing.run_until_idle(graph, store)
        assert store.check() == []
        return found(store, make(len(rounds) - 1).fn)


def compared(make: Callable[[int], cues.Stream], rounds: Rounds, dice: random.Random, mixed: bool = False) -> list[str]:
    """Run both ways; with ``mixed`` some tables are messages, so the state goes from one form to the other and back."""
    chosen = [not mixed or dice.random() < 0.6 for _ in rounds]
    sizes = [dice.choice([1, 3, 10, 1_000]) for _ in rounds]
    wanted = run(make, rounds, lambda place: 1_000, lambda place: False)
    got = run(make, rounds, sizes.__getitem__, chosen.__getitem__)
    for one, other in zip(wanted, got):
        assert one == other
    assert len(wanted) == len(got)
    return wanted


T0 = datetime(2026, 1, 31, tzinfo=UTC)
TIMES: dict[str, Callable[[int], Any]] = {
    "integers": lambda n: n,
    "floats": lambda n: n / 7,
    "utc": lambda n: T0 + timedelta(seconds=n),
    "naive": lambda n: datetime(2026, 1, 31) + timedelta(microseconds=n),
}
KEYS: dict[str, Callable[[int], Any]] = {
    "text": lambda n: f"k{n}",
    "integer": lambda n: n - 1,
    "boolean": lambda n: n == 0,
    "several": lambda n: f"k{n % 2}",
}
FAR = {"integers": 1, "floats": 1 / 7, "utc": 1, "naive": 1e-6}


def random_rounds(dice: random.Random, times: str, keys: str, count: int = 12) -> Rounds:
    """Tables of both queues, with ties, late rows, nulls, and columns that come and go."""
    rounds: Rounds = []
    now = {"l": 0, "r": 0}
    for number in range(count):
        name = dice.choice("lr")
        rows = []
        for _ in range(dice.choice([1, 4, 12, 30])):
            now[name] += dice.choice([0, 0, 1, 2])
            at = max(0, now[name] - dice.choice([0, 0, 0, 1, 3, 15]))
            row = {"t": TIMES[times](at), "k": KEYS[keys](dice.randrange(3)), "j": dice.randrange(2)}
            row |= {
                "v": dice.choice([None, 1, 2]),
                "f": dice.choice([0.5, -0.0, float("inf")]),
                "i": f"{name} {number}",
            }
            rows.append(row)
        if dice.random() < 0.3:
            rows = [{key: row[key] for key in row if key != "v"} for row in rows]
        rounds.append((name, pa.Table.from_pylist(rows)))
    if dice.random() < 0.5:
        rounds += [("l", event_time.watermark(None)), ("r", event_time.watermark(None))]
    return rounds


def random_join(dice: random.Random, times: str, keys: str) -> Callable[[int], cues.Stream]:
    far = FAR[times]
    given: dict[str, Any] = {
        "key": ["k", "j"] if keys == "several" else "k",
        "time": "t",
        "late": "late",
        "delay": dice.choice([0, 0, 2, 5]) * far,
    }
    if dice.random() < 0.5:
        tolerance = dice.choice([None, 0, 1, 4, 30])
        given |= {"how": dice.choice(["inner", "left"]), "tolerance": None if tolerance is None else tolerance * far}
        return lambda _: joins.as_of(TWO, "out", **given)
    given |= {"before": dice.choice([0, 1, 9]) * far, "after": dice.choice([0, 2, 12]) * far}
    given["how"] = dice.choice(["inner", "left", "right", "full"])
    return lambda _: joins.interval(TWO, "out", **given)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", seeds.among(range(300), fast=4))
def test_tables_are_joined_as_messages_are(seed: int, mixed: bool, calls: list[int], monkeypatch: Any) -> None:
    """Values, order, provenance, late messages and state; the state of one way continues in the other, and back."""
    dice = random.Random(seed)
    times, keys = dice.choice([*TIMES]), dice.choice([*KEYS])
    monkeypatch.setattr(kept, "FEW", dice.choice([1, 4, 256]))
    monkeypatch.setattr(kept, "BLOCK_ROWS", dice.choice([1, 3, 4096]))
    monkeypatch.setattr(vectors, "RESULTS_FEW", dice.choice([1, 5, 64]))
    few = dice.choice([1, 1, 8])
    monkeypatch.setattr(vectors, "ROWS_FEW", few)
    compared(random_join(dice, times, keys), random_rounds(dice, times, keys), dice, mixed)
    assert calls or mixed or few > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds.among(range(100), fast=2))
def test_a_join_whose_options_change_continues_both_forms(seed: int, calls: list[int]) -> None:
    """A message waits as long as the options said when it came; the others are those of the moment."""
    dice = random.Random(seed)
    rounds = random_rounds(dice, "integers", "text", 16)
    some = [
        {"before": dice.choice([0, 1, 9]), "after": dice.choice([0, 2, 12]), "how": dice.choice(["inner", "full"])}
        for _ in rounds
    ]
    given: Any = {"key": "k", "time": "t", "late": "late", "delay": dice.choice([0, 4])}
    compared(lambda place: joins.interval(TWO, "out", **given, **some[place]), rounds, dice, True)
    delays = [dice.choice([0, 3]) for _ in rounds]
    given |= {"how": "left", "tolerance": 5}
    compared(lambda place: joins.as_of(TWO, "out", **given | {"delay": delays[place]}), rounds, dice, True)
    assert calls


def usual(name: str) -> Callable[[int], cues.Stream]:
    given: Any = {"key": "k", "time": "t", "late": "late", "delay": 2}
    if name == "as-of":
        return lambda _: joins.as_of(TWO, "out", how="left", tolerance=9, **given)
    return lambda _: joins.interval(TWO, "out", how="full", before=1, after=3, **given)


VALUES: dict[str, tuple[Any, bool]] = {
    "nan": (pa.array([float("nan"), 1.0] * 10), True),
    "float32": (pa.array([0.1, None] * 10, pa.float32()), True),
    "uint64": (pa.array([2**64 - 1, 0] * 10, pa.uint64()), True),
    "null": (pa.nulls(20), True),
    "day": (pa.array([date(1, 1, 1), date(9999, 12, 31)] * 10), True),
    "nanoseconds": (pa.array([1_234_567, None] * 10, pa.int64()).cast(pa.timestamp("ns", "UTC")), True),
    "seconds": (pa.array([1_234_567, -1] * 10, pa.int64()).cast(pa.timestamp("s")), True),
    "zone": (pa.array([0, None] * 10, pa.int64()).cast(pa.timestamp("us", "Europe/Oslo")), False),
    "large text": (pa.array(["\u00e9\U0001f600", None] * 10, pa.large_string()), True),
    "view": (pa.array(["a", "a text of more than twelve bytes"] * 10, pa.string_view()), True),
    "dictionary": (pa.array(["a", None] * 10).dictionary_encode(), False),
    "decimal": (pa.array([Decimal("1.10"), None] * 10), False),
    "bytes": (pa.array([b"\xff", None] * 10), False),
    "list": (pa.array([[1, None], []] * 10), False),
    "struct": (pa.array([{"a": 1}, {"a": None}] * 10), False),
}


@pytest.mark.parametrize("join", ["as-of", "interval"])
@pytest.mark.parametrize("name", slow_except(list(VALUES)[::4], VALUES))
def test_values_of_each_type_are_joined_as_messages_have_them(join: str, name: str, calls: list[int]) -> None:
    """Those that could be others after the state, or that Python does not have, are called one by one."""
    dice = random.Random(f"{join} {name}")
    values, columns = VALUES[name]
    rounds: Rounds = []
    for start in (0, 7, 30):
        for queue in "lr":
            rows = pa.table({"t": [start + dice.random() * 20 for _ in range(20)], "k": dice.choices("ab", k=20)})
            rounds.append((queue, rows.append_column("v", values)))
    assert len(compared(usual(join), rounds, dice)) > 40
    assert bool(calls) == columns


@pytest.mark.slow
@pytest.mark.parametrize("join", slow_except(["as-of"], ["as-of", "interval"]))
def test_many_rows_are_blocks_and_tables_of_results(join: str, calls: list[int], monkeypatch: Any) -> None:
    """With the sizes of a real run: blocks of which a part is complete, and partners that an earlier step has kept."""
    dice = random.Random(join)
    monkeypatch.setattr(vectors, "ROWS_FEW", 24)
    monkeypatch.setattr(vectors, "RESULTS_FEW", 64)
    monkeypatch.setattr(kept, "FEW", 256)
    monkeypatch.setattr(kept, "BLOCK_ROWS", 1_000)
    made: list[int] = []
    table_from = vectors.table_from
    monkeypatch.setattr(
        vectors, "table_from", lambda arrays, names: made.append(len(arrays[0])) or table_from(arrays, names)
    )
    rounds: Rounds = []
    for start in (0, 1_000, 2_000):
        for queue in "lr":
            at = [start + dice.random() * 1_200 for _ in range(2_500)]
            rounds.append((queue, pa.table({"t": at, "k": dice.choices(range(200), k=2_500), "v": [*range(2_500)]})))
    rounds = [*rounds[:1], *rounds[2:3], *rounds[1:2], *rounds[3:]]  # one input is ahead
    given: Any = {"key": "k", "time": "t", "late": "late", "delay": 150}

    def make() -> cues.Stream:
        if join == "as-of":
            return joins.as_of(TWO, "out", how="left", **given)
        return joins.interval(TWO, "out", how="full", after=20, **given)

    found = [run(lambda _: make(), rounds, lambda _: 2_000, lambda _: by_columns) for by_columns in (False, True)]
    assert found[0] == found[1] and len(found[0]) > 5_000
    assert sum(calls) == 15_000 and sum(made) > 5_000


@pytest.mark.parametrize("join", ["as-of", "interval"])
@pytest.mark.parametrize("name", ["type", "null key", "no key", "null time", "nan time", "float key", "watermark"])
def test_rows_that_need_a_call_of_their_own_get_one(join: str, name: str) -> None:
    """Wrong rows are on the error queue, with the others joined."""
    rounds: Rounds = []
    for start in (0, 10):
        for queue in "lr":
            rows: list[dict[str, Any]] = [{"t": float(start + n), "k": "ab"[n % 2], "v": n} for n in range(12)]
            if name == "type":
                rows[3]["q/type"] = "x"
            elif name == "watermark":
                rows[3] |= event_time.watermark(start + 9)
            elif name == "null key":
                rows[5]["k"] = None
            elif name == "no key" and queue == "r":
                rows = [{"t": row["t"], "v": row["v"]} for row in rows]
            elif name == "null time":
                rows[5]["t"] = None
            elif name == "nan time":
                rows[5]["t"] = float("nan")
            elif name == "float key":
                rows = [row | {"k": n % 2 + 0.5} for n, row in enumerate(rows)]
            rounds.append((queue, pa.Table.from_pylist(rows)))
    found = compared(usual(join), rounds, random.Random(name))
    assert len(found) > (1 if name == "no key" else 12)


def source(name: str, given: list[Any]) -> cues.Source:
    def rows(position: int | None) -> Any:
        for number in range(position or 0, len(given)):
            yield number + 1, given[number]

    return cues.Source(name, rows)


@pytest.mark.parametrize("join", ["as-of", "interval"])
def test_the_end_of_the_sources_closes_what_waits_in_blocks(join: str, monkeypatch: Any) -> None:
    """The next run continues after it, with its messages before that late."""
    read: list[bytes] = []
    unpacked = kept.unpacked
    monkeypatch.setattr(kept, "unpacked", lambda block, *given: read.append(block) or unpacked(block, *given))
    rows = {
        name: [[{"t": start + n, "k": keys[n % 3], "v": n} for n in range(30)] for start in (0, 20)]
        for name, keys in (("l", "abc"), ("r", "abd"))
    }
    sides = []
    for as_tables in (True, False):
        given = {
            name: [[pa.Table.from_pylist(some)] if as_tables else some for some in both] for name, both in rows.items()
        }
        with testing.temporary_store() as store:
            for runs in (1, 2):
                graph = cues.Graph("g")
                for name in "lr":
                    graph.add(source(name, [each for some in given[name][:runs] for each in some]))
                graph.add(usual(join)(0))
                with graph.start(store=store) as running:
                    assert running.wait_done()
                assert not [row for row in testing.state(store, "g.out") if row == b"b"]
            late = [m["message"] for m in testing.messages(store, "late")]
            sides.append([sorted(map(repr, testing.messages(store, "out"))), sorted(map(repr, late))])
    assert sides[0] == sides[1] and len(sides[0][0]) > 40 and len(sides[0][1]) > 10 and len(read) > 10


@pytest.mark.slow
@pytest.mark.parametrize("join", ["as-of", "interval"])
def test_a_crash_anywhere_changes_no_result_of_blocks(join: str, calls: list[int]) -> None:
    def filled(store: cues.Store) -> cues.Store:
        dice = random.Random(join)
        for start in (0, 8):
            for queue in "lr":
                rows = [{"t": start + dice.randrange(9), "k": dice.choice("ab"), "v": n} for n in range(8)]
                store.queue(queue).appender().write_table(pa.Table.from_pylist(rows))
        return store

    def once(store: cues.Store) -> None:
        graph = cues.Graph("g")
        graph.source("l")
        graph.source("r")
        given: Any = {"key": "k", "time": "t", "late": "late", "delay": 6}
        graph.add(
            sized(joins.as_of(TWO, "out", how="left", tolerance=9, **given), 8)
            if join == "as-of"
            else sized(joins.interval(TWO, "out", how="full", before=1, after=3, **given), 8)
        )
        testing.run_until_idle(graph, store)

    def seen(store: cues.Store) -> list[Any]:
        """Which input is read first is open; after the ends of both, nothing depends on it."""
        for queue in "lr":
            store.queue(queue).appender().write(event_time.watermark(None))
        once(store)
        assert list(testing.state(store, "g.out")) == [0]
        return [sorted(map(repr, testing.messages(store, name))) for name in ("out", "late") if name in store.queues()]

    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: once(filled(store)))
        assert any(isinstance(row, bytes) and len(row) == 26 for row in testing.state(store, "g.out"))
        wanted = seen(store)
    assert calls and len(wanted[0]) > 10 and len({point for point, _ in sites}) > 5
    for point, hit in sites:
        if not point.startswith("append"):
            with testing.temporary_store() as store:
                filled(store)
                with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                    once(store)
                once(store)
                assert seen(store) == wanted, (point, hit)


@pytest.mark.parametrize("join", ["as_of", "interval"])
def test_a_version_without_blocks_refuses_the_store_of_a_join(tmp_path: Path, join: str, monkeypatch: Any) -> None:
    with cues.open(tmp_path / "store") as store:
        for name in TWO.values():
            store.queue(name).appender().write({"k": 1, "t": datetime(2024, 1, 1, tzinfo=UTC)})
    joined = getattr(joins, join)(TWO, "out", key="k", time="t", late="late")
    graph = cues.Graph("g", [cues.Source("l"), cues.Source("r"), joined], store=tmp_path / "store")
    with graph.start() as running:
        running.wait_idle()
    monkeypatch.setattr(datafile, "FEATURES", datafile.FEATURES - {"blocks"})
    with pytest.raises(StoreError, match="requires blocks"):
        cues.open(tmp_path / "store")


BY_TIME: dict[str, Any] = {"time": "t", "delay": 1, "late": "late"}


@pytest.mark.parametrize(
    "made",
    [
        lambda combine: joins.lookup(TWO, "out", key="k", how="left", combine=combine),
        lambda combine: joins.latest(TWO, "out", key="k", how="full", combine=combine),
        lambda combine: joins.as_of(TWO, "out", key="k", how="left", combine=combine, **BY_TIME),
        lambda combine: joins.interval(TWO, "out", key="k", how="full", after=9, combine=combine, **BY_TIME),
    ],
    ids=["lookup", "latest", "as_of", "interval"],
)
def test_a_function_of_combine_changes_no_kept_message(made: Any) -> None:
    """It changes values in place, also nested ones; results and state are those of one that does not."""

    def combine(left: Any, right: Any) -> dict[str, Any]:
        for side in (left, right):
            if side is not None:
                side["seen"].append(len(side["seen"]))
                side["deep"]["x"][0] += 1
                side["n"] += 100
        return {"left": left, "right": right}

    def careful(left: Any, right: Any) -> dict[str, Any]:
        return combine(copy.deepcopy(left), copy.deepcopy(right))

    sides = []
    for function in (combine, careful):
        graph = cues.Graph("g")
        for name in TWO.values():
            graph.source(name)
        graph.add(made(function))
        with testing.temporary_store() as store:
            for low in (0, 6, 12):
                for name in TWO.values():
                    some = range(low, low + 6)
                    rows = [{"t": n, "k": f"k{n % 2}", "n": n, "seen": [], "deep": {"x": [n]}} for n in some]
                    store.queue(name).appender().write_many(rows)
                testing.run_until_idle(graph, store)
            sides.append([testing.messages(store, "out"), testing.state(store, "g.out")])
    assert sides[0] == sides[1] and len(sides[0][0]) > 5
