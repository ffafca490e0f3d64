"""Tables that change while a source reads them: a replay of its messages, writers, interruptions, kills, an example.

The tests of the sources of MySQL and PostgreSQL share it. A database of theirs has ``run(*statements)`` and
``connect()``.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds

import cues
from cues import testing

Rows = dict[str, dict[Any, dict[str, Any]]]


def replayed(
    messages: list[dict[str, Any]],
    rows: Rows | None = None,
    key_of: Callable[[dict[str, Any]], Any] = lambda key: tuple(key.values()),
) -> Rows:
    """The tables after the messages. Each message must fit to the rows that are there."""
    rows = {} if rows is None else rows
    places = [(m.get("lsn") or m["log"], m["number"]) for m in messages if m["operation"] != "snapshot"]
    assert len(set(places)) == len(places)
    for message in messages:
        table, key, operation = rows.setdefault(message["table"], {}), key_of(message["key"]), message["operation"]
        assert message["before"] is None or table[key] == message["before"], message
        if operation in ("snapshot", "insert"):
            assert key not in table, message
            table[key] = message["row"]
        elif operation == "update":
            table[key] = message["row"] | {name: table[key][name] for name in message.get("unchanged", ())}
        elif operation == "delete":
            del table[key]
        else:
            table.clear()
    return rows


def a_process() -> Any:
    return SimpleNamespace(state={}, stopping=False)


def read(source: Any, position: Any = None, process: Any = None) -> list[Any]:
    return [message for _, message in source(position, process or a_process()) if message is not None]


def drained(source: Any, store: cues.Store) -> list[Any]:
    """All messages on the queue after one more run."""
    testing.run_until_idle(cues.Graph("g", [cues.Source("q", source)]), store)
    return testing.messages(store, "q")


def between(before: list[Any], insert: str) -> list[str]:
    """Statements between two parts of a snapshot of a table t (k, n, x): rows change, move, come and go.

    ``before`` are the keys (k, n) that are there, in their order, with k as a literal of SQL.
    """
    (first, _), (last, _) = before[0], before[-1]
    return [
        *(
            f"update t set n = {n + 10} where k = {k} and n = {n}" if at % 2 else
            f"update t set x = 1 where k = {k} and n = {n}" for at, (k, n) in enumerate(before)
        ),
        f"{insert} values ({first}, 0, 0), ({last}, 99, 0)",
        f"delete from t where k = {first} and n = 1",
        f"update t set k = {last}, n = 50 where k = {first} and n = 12",
        f"update t set k = {first}, n = 51 where k = {last} and n = 12",
    ]  # fmt: skip


class Writers(ABC):
    """Threads that run random transactions on the tables t and u: several rows, rollbacks, savepoints, moved keys."""

    def __init__(self, db: Any, count: int = 3, pause_s: float = 0.001) -> None:
        self._db, self._ends, self._pause_s = db, threading.Event(), pause_s
        self._errors: list[BaseException] = []
        seed = seeds.new()
        self._threads = [threading.Thread(target=self._run, args=(seed + n,)) for n in range(count)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._errors, self._errors

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with contextlib.closing(self._db.connect()) as session:
                while not self._ends.is_set():
                    self.transaction(session, chance, chance.choice([1, 1, 2, 5, 30]))
                    time.sleep(chance.random() * self._pause_s)
        except BaseException as error:
            self._errors.append(error)

    @abstractmethod
    def transaction(self, session: Any, chance: random.Random, statements: int) -> None:
        """Run a transaction, which may be rolled back."""

    @staticmethod
    def place(chance: random.Random) -> tuple[str, int, int]:
        """A table, and two ids."""
        return chance.choice("tu"), chance.randint(1, 400), chance.randint(1, 400)


def interrupted(source: Callable[..., Any], writers: Writers) -> list[Any]:
    """The messages of 25 parts of random lengths, each with the state and the position of the one before."""
    chance, process, position, found = random.Random(seeds.new()), a_process(), None, list[Any]()
    with writers:
        for _ in range(25):
            items = source(follow=True)(position, process)
            part = list(itertools.islice(items, chance.randint(1, 60)))
            position = part[-1][0]
            found += [message for _, message in part if message is not None]
            items.close()
    found += read(source(), position, process)
    assert {m["operation"] for m in found} == {"snapshot", "insert", "update", "delete"}
    return found


MIRROR = """
import sys, cues
from cues.processors.{module} import Changes

path, url, tables, options = sys.argv[1], sys.argv[2], sys.argv[3].split(), dict(a.split("=") for a in sys.argv[4:])
graph = cues.Graph("g", [cues.Source("q", Changes(url, tables, **options), batch_size=7)], durability="process")

@graph.sink("q", batch=True, batch_size=20)
def tell(messages):
    print(len(messages), flush=True)

with graph.start(store=path) as running:
    running.wait_done()
"""
"""A program that copies tables to a queue in steps of 7, up to the end of the log."""


def on_queue(path: Path) -> list[Any]:
    with cues.open(path, durability="process") as store:
        return testing.messages(store, "q")


def timed_100_000(run: Callable[[], list[Any]], change: Callable[[], None]) -> list[Any]:
    """The messages of two runs, of a snapshot of 50,000 rows and of a change of each."""
    began = time.monotonic()
    run()
    middle = time.monotonic()
    change()
    written = time.monotonic()
    found = run()
    print(f"snapshot {middle - began:.1f} s, changes {time.monotonic() - written:.1f} s")
    assert len(found) == 100_000
    return found


@contextlib.contextmanager
def example(page: str, rows: Callable[[], list[Any]], run: Callable[..., None], **replaced: str) -> Iterator[Any]:
    """Run the example of a page, a replica in DuckDB of a table of orders, and compare it; yield its graph."""
    duckdb = pytest.importorskip("duckdb")
    code = (Path(__file__).parent.parent / "docs" / "how-to" / page).read_text().split("# replica.py\n")[1]
    code = code.split("```")[0].replace(", follow=True", "")
    for old, new in replaced.items():
        code = code.replace(old, new)
    found: dict[str, Any] = {}
    exec(code, found)
    with cues.open("store", durability="process") as store:
        for statements in (
            (),
            ("update orders set total = 0 where id < 5", "delete from orders where id in (6, 7)"),
            ("delete from orders where id = 8", "insert into orders values (8, 'milk', 1), (21, null, null)"),
            ("update orders set id = 30 where id = 1", "update orders set id = 1 where id = 2"),
        ):
            run(*statements)
            testing.run_until_idle(found["graph"], store)
            with duckdb.connect("replica.duckdb") as copy:
                assert copy.execute("select * from orders order by id").fetchall() == rows()
        yield lambda: testing.run_until_idle(found["graph"], store, stopped="return")
