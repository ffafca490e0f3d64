"""A stream that writes to two other stores by pending messages: the runs that test_pending.py kills and stops.

    prepare    make the stores, their queues and the rows of the processor
    drive      feed what is not there yet and run until idle; doing it twice is the same as doing it once
    examine    what readers of what is committed see, what is left pending, and what home holds

They run in children of forks.py. A *break* takes one rule away: the control.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import scenarios
from scenarios import MAP_BYTES, Message, numbers

import cues
from cues import Graph, QueueOptions, Stream, testing
from cues.engine.assembly import assemble
from cues.errors import Diverged, Fenced
from cues.producers import clocks
from cues.queues.base import views_of
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps import pending
from cues.steps.ownership import LEASE_S
from cues.steps.pending import PendingMessages, Settling

COUNT = 8
OTHERS = ("x", "y")


def spread(message: Message, process: Any) -> dict[str, Any]:
    """To three stores, not always to each: nothing, one or two to "a"; a sum to "b"; itself at home."""
    state = process.state
    state["sum"] = state.get("sum", 0) + message["n"]
    found: dict[str, Any] = {"a": [{"n": message["n"], "part": part} for part in range(message["n"] % 3)]}
    if message["n"] < 5:
        found["b"] = {"n": message["n"], "sum": state["sum"]}
    return found | {"home": message}


def picky(message: Message, process: Any) -> dict[str, Any]:
    """Fails at some; keeps a count by key, and says which unit it was."""
    state = process.state
    state["count"] = state.get("count", 0) + 1
    if message["n"] % 3 == 1:
        raise ValueError(f"not {message['n']}")
    return {"a": {"n": message["n"], "key": message["key"], "from": process.partition, "count": state["count"]}}


def _spread() -> Graph:
    return Graph(
        "g",
        [Stream(spread, "in", {"a": "a", "b": "b", "home": "home"}, id="s", across="pending", batch_size=3)],
        queues={"a": QueueOptions(path="x"), "b": QueueOptions(path="y")},
    )


def _picky() -> Graph:
    """Units over two partitions, to partitions in another store; errors to a third one; snapshots."""
    parted = {"partitions": 2, "key": "key"}
    return Graph(
        "g",
        [Stream(picky, "in", {"a": "a"}, id="s", across="pending", key="key", batch_size=3, side_effects=True)],
        errors="errors",
        queues={
            "in": QueueOptions(**parted),
            "a": QueueOptions(path="x", **parted),
            "errors": QueueOptions(path="y"),
        },
    )


def _once() -> Graph:
    return Graph(
        "g",
        [Stream(scenarios.countdown, "in", "a", id="s", across="pending", strategy="at-most-once", batch_size=1)],
        queues={"a": QueueOptions(path="x")},
    )


FEEDS = {
    "once": numbers(0, COUNT, left=1),
    "spread": numbers(0, COUNT),
    "picky": [{"n": n, "key": "adfa"[n % 4]} for n in range(COUNT)],
}
GRAPHS: dict[str, Callable[[], Graph]] = {"spread": _spread, "picky": _picky, "once": _once}


def graph_at(name: str, path: str) -> Graph:
    graph = GRAPHS[name]()
    graph.directory = Path(path)
    return graph


class Stores:
    """Home, and the other stores inside its directory, so that all are copied together."""

    def __init__(self, path: str, durability: str = "process") -> None:
        self._opened = ExitStack()
        places = {"": Path(path)} | {other: Path(path, other) for other in OTHERS}
        self.by_name: dict[str, Store] = {
            name: self._opened.enter_context(cues.open(place, durability=durability, map_size=MAP_BYTES))
            if not (place / "data.mdb").exists()
            else self._opened.enter_context(cues.open(place))
            for name, place in places.items()
        }
        self.home = self.by_name[""]

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def prepare(name: str, path: str, durability: str = "process") -> None:
    with Stores(path, durability) as stores:
        assemble(graph_at(name, path), stores.home).close()


def drive(name: str, path: str, break_it: str = "", **options: Any) -> None:
    """Two runs, so that the second one finds positions and rows of the first."""
    BREAKS[break_it]()
    for go in (1, 2):
        with Stores(path) as stores:
            messages = FEEDS[name][: COUNT * go // 2 + 1]
            opened = stores.home.queue("in")
            there = sum(row.next - 1 for row in opened.core.rows())
            for message in messages[there:]:
                opened.appender().write(message)
            testing.run_until_idle(graph_at(name, path), stores.home, **options)


def sites(name: str, path: str) -> list[tuple[str, int]]:
    return testing.crash_sites(lambda: drive(name, path))


def die(name: str, path: str, point: str, hit: int, break_it: str = "") -> None:
    with testing.crash(point, hit):
        drive(name, path, break_it)


def stop(name: str, path: str, point: str, hit: int, break_it: str = "", take_over: bool = False) -> str:
    """Run, and stop (SIGSTOP) at a point; when continued, finish and say how it ended."""
    with ExitStack() as around:
        if take_over:
            around.enter_context(testing.Clock()).advance(LEASE_S + 1)
        around.enter_context(testing.crash(point, hit, how="stop"))
        try:
            drive(name, path, break_it, **({"take_over": True} if take_over else {}))
        except Fenced as error:
            return f"fenced: {error.reason}"
        return "finished"


def take_over(name: str, path: str) -> None:
    """Another process, when the lease is over."""
    with testing.Clock() as clock:
        clock.advance(LEASE_S + 1)
        drive(name, path, take_over=True)


def committed(queue: Queue) -> dict[str, list[Message]]:
    return {view.core.log.id: list(view.tailer(isolation="committed")) for view in views_of(queue)}


def examine(name: str, path: str) -> dict[str, Any]:
    with Stores(path) as stores:
        home = testing.contents(stores.home)
        found: dict[str, Any] = {
            "queues": {queue: messages for queue, messages in home["queues"].items() if queue == "home"},
            "positions": home["positions"],
            "state": home["state"],
            "wrong": testing.check_attempts(stores.home),
            "pending": [],
        }
        for other in stores.by_name.values():
            found["wrong"] += other.check()
        for other in (stores.by_name[id] for id in OTHERS):
            for queue in other.queues():
                for log, messages in committed(other.queue(queue)).items():
                    found["queues"][log] = [_said(message) for message in messages]
                    found["pending"] += [p for p, written in clocks.rows(other, log) if written.begin]
        return found


def _said(message: Message) -> Message:
    """A message without what names lines of the code."""
    if "err/cause" not in message:
        return message
    bindings = message["err.proc/messages"]
    return {"failed": bindings, "from": bindings["in"][0]["key"]}


def every_death(name: str, made: str, cases: Sequence[Sequence[tuple[str, int]]], break_it: str = "") -> list[Any]:
    """For each case a copy of ``made``: its deaths, one start each, and a start that finishes; what is there then.

    Of several deaths a later one may find nothing to do that it could die at. A start may refuse (:class:`Diverged`)
    only where a rule is broken.
    """
    found = []
    for number, deaths in enumerate(cases):
        path = scenarios.copy(made, f"case-{number}")
        for point, hit in deaths:
            died = scenarios._in_child(die, name, path, point, hit, break_it)
            assert died == signal.SIGKILL or (died == 0 and len(deaths) > 1), (deaths, point, hit, died)
        refused = scenarios._in_child(drive, name, path, break_it) != 0
        assert not refused or break_it
        found.append({"refused": refused, **examine(name, path)})
        shutil.rmtree(path)
    return found


# --- power ------------------------------------------------------------------------------------------


def _keep(store: Store) -> None:
    shutil.copyfile(Path(store.path, "data.mdb"), Path(store.path, "image"))


def die_with_images(name: str, path: str, point: str, hit: int, break_it: str) -> None:
    """Die; each sync has left the file of its store as a power cut would find it."""
    with Stores(path) as stores:
        for store in stores.by_name.values():
            _keep(store)
    real = Store.sync

    def sync(self: Store) -> None:
        real(self)
        _keep(self)

    Store.sync = sync  # type: ignore[method-assign]
    die(name, path, point, hit, break_it)


def cut_power(
    name: str, made: str, cases: Sequence[tuple[str, int]], cut: Sequence[str], break_it: str = ""
) -> list[Any]:
    """For each case: die there, put the stores of ``cut`` back to their last sync, finish; or what the start said."""
    found: list[Any] = []
    for number, (point, hit) in enumerate(cases):
        path = scenarios.copy(made, f"cut-{number}")
        assert scenarios._in_child(die_with_images, name, path, point, hit, break_it) == signal.SIGKILL
        for store in cut:
            place = Path(path, store)
            shutil.copyfile(place / "image", place / "data.mdb")
        try:
            drive(name, path)
            found.append(examine(name, path))
        except Diverged as error:
            found.append({"diverged": error.message})
        shutil.rmtree(path)
    return found


# --- controls -----------------------------------------------------------------------------------------


def _acknowledge_first() -> None:
    real = PendingMessages.write_away

    def write(self: PendingMessages, *arguments: Any) -> Any:
        found = real(self, *arguments)
        self._settling.acknowledge(found)
        return found

    PendingMessages.write_away = write  # type: ignore[method-assign]


def _repeat_nothing() -> None:
    """At the start nothing is acknowledged that was committed; what is pending is dropped all the same."""

    def settle(self: Settling, row: pending.PendingRow, give_up: bool = False) -> dict[Any, str]:
        for log in self._logs().values():
            self.roll_back(log, row.producer)
        return {}

    Settling.settle = settle  # type: ignore[method-assign]


def _drop_nothing() -> None:
    """One producer for all owners, and what a dead one left pending stays."""
    _one_producer()
    Settling.roll_back = lambda self, log, producer: None  # type: ignore[method-assign]


def _one_producer() -> None:
    pending._producer = lambda owner, processor: 0x0123456789AB


def _acknowledge_late() -> None:
    """The acknowledgement of a step is appended after the messages of the next one."""
    real = Settling.acknowledge
    held: dict[int, Any] = {}

    def acknowledge(self: Settling, pairs: Any) -> None:
        real(self, held.get(id(self), []))
        held[id(self)] = pairs

    Settling.acknowledge = acknowledge  # type: ignore[method-assign]


def _no_sync(home: bool) -> Callable[[], None]:
    def break_it() -> None:
        real = PendingMessages.sync

        def sync(self: PendingMessages, store: Store) -> None:
            if (store is self.store) is not home:
                real(self, store)

        PendingMessages.sync = sync  # type: ignore[method-assign]

    return break_it


BREAKS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "acknowledged before the commit": _acknowledge_first,
    "not repeated at the start": _repeat_nothing,
    "not dropped at the start": _drop_nothing,
    "acknowledged after the next step": _acknowledge_late,
    "one producer for all owners": _one_producer,
    "no sync before the commit": _no_sync(home=False),
    "no sync after the commit": _no_sync(home=True),
}
