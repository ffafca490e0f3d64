"""Make the golden stores with rows of every kind:  python tests/golden/everything.py

    v1-all/home/data.mdb.gz      the home store of a graph, in the middle of its work
    v1-all/other/data.mdb.gz     the store of three of its queues
    v1-all/replay/data.mdb.gz    a store that a replay made
    v1-all-keys/                 the same three, whose checksums cover the keys of the rows

    in ─▶ f ─▶ away ─▶ back ─▶ part ─▶ parted ─▶ units ─▶ done        away, pended, moved are in the other store
     ├──▶ later, alarm, seen, pend ─▶ pended
     └──▶ save (paused)                    jobs ─▶ a member of a group       journal ─▶ a consumer ─▶ moved

The files are copied while the member has its claims and the consumer is inside of its third transaction. They are
made once and never again, as those of make.py. A kind of row that is added gets golden stores of its own.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cues
from cues import testing
from cues.checkpoints import LMDBCheckpoint
from cues.forwarding import external_writers
from cues.groups import Member
from cues.txn import Consumer, Publisher

HERE = Path(__file__).parent
STORES = ("home", "other", "replay")
START = datetime(2026, 1, 31, 12, tzinfo=UTC)
CUT = 12
"""The number of messages of the source when the files were made."""
COUNT = 20
"""The number of them in the end."""
JOBS = [{"n": n, "k": n % 3} for n in range(10)]
JOURNAL = [1, 2, 3, 4]
MAP_BYTES = 4 << 20

Message = dict[str, Any]


def graph(place: Path, count: int, broken: bool) -> cues.Graph:
    """The graph over the stores in ``place``, after so many messages of its source; ``broken`` fails at 3 and 5."""
    away, parted = cues.QueueOptions(path=place / "other"), cues.QueueOptions(partitions=2, key="k")
    graph = cues.Graph(
        "g",
        store=place / "home",
        errors="errors",
        queues={"away": away, "pended": away, "parted": parted},
    )

    @graph.source("in")
    def numbers(position: int | None) -> Iterator[tuple[int, Message]]:
        yield from ((n + 1, {"n": n, "k": n % 3}) for n in range(position or 0, count))

    @graph.stream("in", "away", id="f", key="k", max_errors="5/h")
    def f(message: Message, process: Any) -> Message:
        if broken and message["n"] in (3, 5):
            raise ValueError(f"no {message['n']}")
        process.state["seen"] = [*process.state.get("seen", []), message["n"]]
        return message

    @graph.stream("parted", "done", id="units", key="k")
    def units(message: Message, process: Any) -> Message:
        process.state["count"] = process.state.get("count", 0) + 1
        return {**message, "count": process.state["count"]}

    @graph.stream("in", "later", id="delay")
    def delay(message: Message) -> Any:
        return cues.delayed(message, delay=timedelta(hours=1)) if message["n"] % 2 else message

    def fire(timer: Message) -> Message:
        return {"fired": {"n": timer["key"]}}

    @graph.stream("in", {"fired": "fired"}, id="alarm", key="n", timer=fire)
    def alarm(message: Message, process: Any) -> None:
        process.timer(message["n"], process.now + timedelta(hours=1))

    @graph.stream("in", "seen", id="see", key="k", ttl="1d")
    def see(message: Message, process: Any) -> Message:
        process.state["last"] = message["n"]
        process.state["long"] = "x" * 5000
        return {"n": message["n"], "last": process.state["last"]}

    graph.stream("away", "back", id="back")(lambda message: message)
    graph.stream("back", "parted", id="part")(lambda message: message)
    graph.stream("in", "pended", id="pend", across="pending")(lambda message: message)
    graph.sink("in", id="save")(lambda message: None)
    return graph


class Mover:
    """Publish each message of the journal in the other store, one in a transaction; ``at`` is called inside of each."""

    def __init__(self, moved: cues.Queue, at: Any = None) -> None:
        self._moved, self._at = moved, at

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        if self._at is not None and envelope.message["n"] == 3:
            publisher.publish_uncommitted(lambda _: self._moved, {"n": -1}).wait()
            self._at()
            raise InterruptedError
        publisher.publish_uncommitted(lambda _: self._moved, envelope.message)

    def finalize(self, publisher: Publisher) -> Any:
        return lambda writes: writes.state.update(done=writes.state.get("done", 0) + 1)


def make(place: Path, target: Path) -> None:
    """Make the stores in ``place``, and copy their files into ``target``."""
    import pyarrow as pa

    replayed = cues.Graph("r", store=place / "old")
    replayed.stream("in", "out", id="double")(lambda message: {"n": message["n"] * 2})
    with cues.open(place / "old", map_size=MAP_BYTES) as old:
        old.queue("in").appender().write_many([{"n": n} for n in range(5)])
        testing.run_until_idle(replayed, old)
    with testing.Clock(START) as clock:
        cues.replay(replayed, into=place / "replay")
        with cues.open(place / "home", durability="disk", map_size=MAP_BYTES) as home:
            home.queue("old", retention="1h").appender().write_many([{"n": 1}, {"n": 2}])
            home.queue("old").tailer("reader").read()
        (place / "home" / "mark").unlink()  # as in a copy: a timeline begins
        opened = (cues.open(place / "home"), cues.open(place / "other", durability="disk", map_size=MAP_BYTES))
        with opened[0] as home, opened[1] as other, Publisher() as publisher:
            testing.run_until_idle(graph(place, CUT - 6, broken=True), home)
            cues.redrive(graph(place, CUT - 6, broken=False), store=home, index=[1])
            cues.pause(home, processor="save", reason="golden")
            testing.run_until_idle(graph(place, CUT - 3, broken=True), home)
            cues.redrive(graph(place, CUT - 3, broken=True), store=home, index=[2])
            with contextlib.suppress(testing.Crashed), testing.crash("forward.after", how="raise"):
                testing.run_until_idle(graph(place, CUT, broken=True), home)
            home.queue("table").appender().write_table(pa.table({"n": [1, 2, 3]}))
            loaded = external_writers.SourceRow("table", 4, ["range", 3])
            home.core.commit(lambda txn: external_writers.put(txn, "job", loaded))
            clock.set(START + timedelta(days=60))  # a clock that is wrong for one message
            home.queue("old").appender().write({"n": 3})
            clock.set(START)
            home.queue("old").appender().write({"n": 4})
            journal, moved = home.queue("journal"), other.queue("moved")
            for n in JOURNAL:
                publisher.publish_uncommitted(lambda _: journal, {"n": n})
                publisher.append_ack_intents(publisher.build_ack_intents())
                if n == 2:
                    Consumer(Mover(moved), [journal], LMDBCheckpoint(home, "mover"), lease_s=0).drain()
            publisher.publish_uncommitted(lambda _: journal, {"n": 5}).wait()
            home.queue("jobs", partitions=2, key="k").appender().write_many(JOBS)
            home.queue("worked")

            def copy() -> None:
                for name in STORES:
                    with cues.open(place / name, readonly=True) as store:
                        data = (place / name / "data.mdb").read_bytes()[: store.info()["used"]]
                    (target / name).mkdir(parents=True)
                    (target / name / "data.mdb.gz").write_bytes(gzip.compress(data, mtime=0))

            with Member(home, "jobs", "team", name="gone") as member:
                with member.session() as session:
                    session.write_many("worked", session.read_many(4))
                    session.end(cues.groups.TRY_COMMIT)
                with contextlib.suppress(InterruptedError):
                    Consumer(Mover(moved, copy), [journal], LMDBCheckpoint(home, "mover"), lease_s=0).drain()


def go_on(place: Path) -> None:
    """Continue everything in ``place`` to its end: graph, redrive, pause, member and consumer, two hours later."""
    with (
        testing.Clock(START + timedelta(hours=2)) as clock,
        cues.open(place / "home") as home,
        cues.open(place / "other") as other,
    ):
        home.queue("old").appender().write({"n": 5})
        cues.resume(home, processor="save")
        testing.run_until_idle(graph(place, COUNT, broken=False), home)
        cues.redrive(graph(place, COUNT, broken=False), store=home, all=True)
        clock.advance(timedelta(hours=2))
        testing.run_until_idle(graph(place, COUNT, broken=False), home)
        with Member(home, "jobs", "team") as member:
            while messages := member.read_many(100):
                home.queue("worked").appender().write_many(messages)
        Consumer(Mover(other.queue("moved")), [home.queue("journal")], LMDBCheckpoint(home, "mover"), lease_s=0).drain()


if __name__ == "__main__":
    if (HERE / "v1-all-keys").exists():
        sys.exit("The golden files of this version exist. A format that differs from them is a new version.")
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory), HERE / "v1-all-keys")
