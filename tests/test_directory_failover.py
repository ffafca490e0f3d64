"""A driver on another host continues where the directory ends, sources included. No Spark, no Java.

A host is a store. Drivers die or sleep at any access of the directory; the next one runs on a new host, on the same
one, or on one that was used before. See directory_steps.py.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

import seeds
from directory_steps import FaultyFiles, HostRun, Message, data_file, messages_of

import cues
from cues import Graph, Source, Stream
from cues.errors import CuesError, Diverged, Fenced
from cues.spark.cluster import feeder as feeder_module
from cues.spark.cluster import operations
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.feeder import Feeder
from cues.spark.cluster.ledger import Ledger
from cues.spark.cluster.publish import publish
from cues.steps.feed import SourceStepper

COUNT = 60


@pytest.fixture
def files(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(str(tmp_path / "queues"))


# --- the graph ------------------------------------------------------------------------------------


def counted(position: int | None) -> Iterator[tuple[int, Message]]:
    """One position. Some messages cannot be written, and are on the error queue."""
    for i in range(position or 0, COUNT):
        yield i + 1, {"i": i} if i % 9 != 4 else {"i": i, "bad": object()}


def polled(position: list[int] | None) -> Iterator[tuple[list[int], Message]]:
    """Three partitions. Which one has a message next is another one in each run."""
    at = list(position or [0, 0, 0])
    while left := [p for p in range(3) if at[p] < COUNT // 3]:
        p = random.choice(left)
        at[p] += 1
        yield list(at), {"p": p, "n": at[p]}


def bare() -> Iterator[Message]:
    """Messages without positions; those that are committed are skipped."""
    yield from ({"i": i} for i in range(COUNT))


def same(message: Message) -> Message:
    if message.get("i") == 7:
        raise ValueError("seven")
    return message


def graph() -> Graph:
    sources = [Source("counted", counted), Source("polled", polled), Source("bare", bare, resume="skip")]
    streams = [Stream(same, queue, f"{queue}-out", id=f"{queue}-same") for queue in ("counted", "polled", "sent")]
    return Graph("g", [*sources, Source("sent"), *streams], errors="errors", durability="process")


def expect_all(run: HostRun) -> None:
    """Each message of the sources is in the directory once, in the order of its source, or of its partition."""
    written = [{"i": i} for i in range(COUNT) if i % 9 != 4]
    assert run.messages("counted") == written
    assert run.messages("counted-out") == [m for m in written if m["i"] != 7]
    assert run.messages("bare") == [{"i": i} for i in range(COUNT)]
    by_partition = defaultdict(list)
    for message in run.messages("polled"):
        by_partition[message["p"]].append(message["n"])
    assert by_partition == {p: list(range(1, COUNT // 3 + 1)) for p in range(3)}
    assert run.messages("polled-out") == run.messages("polled")
    failed: dict[str, list[str]] = defaultdict(list)
    for error in run.messages("errors"):
        (messages,) = error["err.proc/messages"].values()
        failed[error["err.proc/config"]["kind"]] += [str(message.get("repr", message)) for message in messages]
    refused = [text.partition(",")[0] for text in failed.pop("source")]
    assert refused == [f"{{'i': {i}" for i in range(COUNT) if i % 9 == 4]
    assert failed == {"stream": ["{'i': 7}"]}
    sent: dict[str, list[int]] = defaultdict(list)
    for message in run.messages("sent"):
        sent[message["host"]].append(message["n"])
    assert all(numbers == sorted(set(numbers)) for numbers in sent.values())
    assert run.messages("sent-out") == run.messages("sent")


# --- one failover at a time -----------------------------------------------------------------------


def test_another_host_continues_and_the_first_is_refused_after_that(files: FaultyFiles, tmp_path: Path) -> None:
    a = HostRun(files, graph(), tmp_path / "a")
    for source in a.sources:
        a.pull(source, 20)
    assert a.feeder.step()
    for source in a.sources:
        a.pull(source, 10)  # only A has these
    a.assembly.queues["sent"].appender().write({"host": "a", "n": 0})
    b = HostRun(files, graph(), tmp_path / "b")  # while the driver on A sleeps
    with pytest.raises(Fenced):
        a.feeder.step()
    a.close()
    assert [source.position for source in b.sources][::2] == [(20, 0), (None, 20)]
    assert sum(b.sources[1].position[0]) == 20
    assert len(b.assembly.queues["counted"]) == 0
    assert b.assembly.queues["counted"].last_index == len(messages_of(b.queues["counted"])) == 18
    b.claim().run()
    expect_all(b)
    b.close()
    with pytest.raises(Diverged, match=r"does not continue the one .* it ends with message 27") as refused:
        HostRun(files, graph(), tmp_path / "a")
    assert "start with an empty store (--store DIR)" in refused.value.hint
    assert str(tmp_path / "a") in str(refused.value)
    for store in ("b", "c"):
        again = HostRun(files, graph(), tmp_path / store)
        assert not again.feeder.ready()
        expect_all(again.claim())
        again.close()
    with pytest.raises(Diverged, match="does not continue"):
        HostRun(files, graph(), tmp_path / "a")


def test_a_host_with_other_messages_at_these_indices_is_refused(files: FaultyFiles, tmp_path: Path) -> None:
    a = HostRun(files, graph(), tmp_path / "a")
    a.pull(a.sources[0], 20)
    assert a.feeder.step()
    a.pull(a.sources[0], 20)
    a.close()
    b = HostRun(files, graph(), tmp_path / "b")
    b.pull(b.sources[0], 10)
    assert b.feeder.step()
    b.close()
    with pytest.raises(Diverged, match="it has another message 27"):
        HostRun(files, graph(), tmp_path / "a")


def test_a_host_returns_if_the_other_one_copied_nothing(files: FaultyFiles, tmp_path: Path) -> None:
    a = HostRun(files, graph(), tmp_path / "a")
    a.pull(a.sources[0], 20)
    assert a.feeder.step()
    a.assembly.queues["sent"].appender().write({"host": "a", "n": 0})
    a.close()
    b = HostRun(files, graph(), tmp_path / "b")
    b.pull(b.sources[0], 20)  # only B has these
    b.close()
    a = HostRun(files, graph(), tmp_path / "a")
    a.claim().run()
    expect_all(a)
    assert a.messages("sent") == [{"host": "a", "n": 0}]
    a.close()
    with pytest.raises(Diverged, match="does not continue"):
        HostRun(files, graph(), tmp_path / "b")


def test_a_host_that_purged_what_it_copied_is_refused_after_another(files: FaultyFiles, tmp_path: Path) -> None:
    """Then no batch tells whether its messages are those of the directory; the id of the store does."""
    a = HostRun(files, graph(), tmp_path / "a")
    for number in range(3):  # the last one is not copied
        a.assembly.queues["sent"].appender().write({"host": "a", "n": number})
        if number == 1:
            assert a.feeder.step()
    a.assembly.queues["sent"].purge(3)
    a.close()
    HostRun(files, graph(), tmp_path / "a").close()
    b = HostRun(files, graph(), tmp_path / "b")
    b.close()
    with pytest.raises(Diverged, match="another store has been used since"):
        HostRun(files, graph(), tmp_path / "a")
    b = HostRun(files, graph(), tmp_path / "b")
    b.assembly.queues["sent"].appender().write({"host": "b", "n": 0})
    b.claim().run()
    assert b.messages("sent") == [{"host": "a", "n": 0}, {"host": "a", "n": 1}, {"host": "b", "n": 0}]
    b.close()


def test_a_store_without_messages_begins_anew_after_the_graph_was_started_over(
    files: FaultyFiles, tmp_path: Path
) -> None:
    """It had the positions of the sources in the deleted part, and would have begun there."""
    a = HostRun(files, graph(), tmp_path / "a")
    a.pull(a.sources[0], 20)
    assert a.feeder.step()
    a.close()
    HostRun(files, graph(), tmp_path / "b").close()
    part = operations.files_of(files, "g")
    assert part is not None
    operations.remove(files, "g", part)
    b = HostRun(files, graph(), tmp_path / "b")
    b.claim().run()
    expect_all(b)
    b.close()
    with pytest.raises(Diverged, match="it is another queue"):
        HostRun(files, graph(), tmp_path / "a")


def test_a_backlog_is_one_copy_of_many_files(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no cut inside. A gap of purged messages stays a gap."""
    monkeypatch.setattr(feeder_module, "FEED_MESSAGES", 4)
    a = HostRun(files, graph(), tmp_path / "a")
    for _ in range(6):
        a.pull(a.sources[0], 5)
    a.assembly.queues["counted"].purge(8)
    real = a.feeder.read_runs

    def late(*arguments: Any) -> Any:
        if arguments[1] == 12:
            a.assembly.queues["counted"].purge(18)
        return real(*arguments)

    monkeypatch.setattr(a.feeder, "read_runs", late)
    assert a.feeder.step() and not a.feeder.step()
    live = a.queues["counted"].live
    assert [(file.first, file.count) for file in live] == [(8, 4), (18, 4), (22, 4), (26, 2)]
    record = a.feeder.ledger.now
    assert record.number == 1 and record.positions["counted"][1] == 28
    assert len([event for event in a.events if "were purged before they were copied" in event.text]) == 2
    a.close()
    b = HostRun(files, graph(), tmp_path / "b")
    assert b.sources[0].position == (30, 0)
    b.close()


def test_copies_stay_short_while_sources_are_faster(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut is noted after each file. So a copy ends there, and not at the end of all that came meanwhile."""
    monkeypatch.setattr(feeder_module, "FEED_MESSAGES", 4)
    a = HostRun(files, graph(), tmp_path / "a")
    real = a.feeder.write_runs

    def meanwhile(*arguments: Any) -> Any:
        a.pull(a.sources[2], 6)
        return real(*arguments)

    monkeypatch.setattr(a.feeder, "write_runs", meanwhile)
    a.pull(a.sources[2], 6)
    ends = [1]
    while a.feeder.step():
        ends.append(a.feeder.ledger.now.positions["bare"][1])
    assert ends[-1] == COUNT + 1 and max(y - x for x, y in itertools.pairwise(ends)) <= 12
    assert a.messages("bare") == [{"i": i} for i in range(COUNT)]
    a.close()


@pytest.mark.slow
def test_a_driver_that_died_before_it_copied_anything(files: FaultyFiles, tmp_path: Path) -> None:
    """Its queues are in the directory, with their identities, and no record."""
    for access in range(100):
        left = [access]

        def die(kind: str, name: str, left: list[int] = left) -> None:
            left[0] -= kind != "read"
            if left[0] < 0:
                raise Died

        files.interrupt = die
        host = None
        try:
            host = HostRun(files, graph(), tmp_path / str(access))
            host.close()
            break
        except Died:
            pass
        finally:
            files.interrupt = lambda access, name: None
    else:
        raise AssertionError("the start has more accesses")
    assert access > 10
    last = HostRun(files, graph(), tmp_path / "last")
    last.claim().run()
    expect_all(last)
    last.close()


def test_a_directory_of_an_earlier_version_continues_with_its_store_only(files: FaultyFiles, tmp_path: Path) -> None:
    """There was a feeder for each queue, whose records have no positions of sources."""
    plain = Graph("g", [Source("in"), Stream(same, "in", "out")], durability="process")
    with cues.open(tmp_path / "a", durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(5)])
        identity = store.queue("in").core.row().identity
    directory = QueueDirectory(files, "in", cues.QueueOptions(), identity)
    directory.own("g")
    old = Ledger(files, "g.in.feed", "old")
    assert old.claim(None, {"in": (identity.hex(), 1)})
    file = data_file(directory, "g.in.feed", 1, [{"n": 0}, {"n": 1}])
    publish(old, {directory: [file]}, positions={"in": (identity.hex(), 3)})
    for number in range(2):
        with pytest.raises(Diverged, match="it is another queue"):
            HostRun(files, plain, tmp_path / f"b{number}")
        HostRun(files, plain, tmp_path / "a").close()  # a start that copies nothing
    a = HostRun(files, plain, tmp_path / "a")
    a.claim().run()
    assert a.messages("out") == a.messages("in") == [{"n": n} for n in range(5)]
    a.close()
    b = HostRun(files, plain, tmp_path / "c")
    b.assembly.queues["in"].appender().write({"n": 5})
    b.claim().run()
    assert b.messages("out") == [{"n": n} for n in range(6)]
    b.close()


def test_a_queue_in_a_store_of_its_own_does_not_continue_elsewhere(files: FaultyFiles, tmp_path: Path) -> None:
    """Its messages and the rows of the sources are in two stores, so there is no cut through both."""

    def made(place: str) -> Graph:
        queues = {"counted": {"path": str(tmp_path / f"{place}-other")}}
        streams = [Stream(same, "counted", "out")]
        return Graph("g", [Source("counted", counted), *streams], errors="errors", queues=queues, durability="process")

    a = HostRun(files, made("a"), tmp_path / "a")
    a.pull(a.sources[0], 20)
    for forwarder in a.assembly.forwarders:
        while forwarder.step():
            pass
    assert a.feeder.step() and a.queues["counted"].log(0).next > 1
    a.close()
    with pytest.raises(Diverged, match="it is another queue"):
        HostRun(files, made("b"), tmp_path / "b")
    again = HostRun(files, made("a"), tmp_path / "a")
    assert not again.feeder.step()
    again.close()


# --- random deaths --------------------------------------------------------------------------------


class Died(BaseException):
    """The driver is gone."""


class Life:
    """A driver on a host, from its start until it has nothing to do."""

    def __init__(self, run: RandomRun, host: int, fresh: bool) -> None:
        self.host = host
        self.fresh = fresh
        self.opened: HostRun | None = None
        self.turns = run.turns(self)
        self.alone = True


class RandomRun:
    """Drivers of one graph on several hosts. Each dies at a random access of the directory, or sleeps there.

    While a driver sleeps, one on another host starts or continues, and makes some turns.
    """

    ENDS = 12

    def __init__(self, seed: int, files: FaultyFiles, place: Path) -> None:
        print(f"{seeds.VARIABLE}={seed}")
        self.chance = random.Random(seed)
        self.files = files
        self.place = place
        self.refusals = 0
        self.ends = 0
        self._hosts: list[int] = []
        """Those that may be used again: they were not refused."""
        self._made = 0
        self._sent = 0
        self._lives: list[Life] = []
        self._awake: list[Life] = []
        self._count_down()
        files.interrupt = self._interrupt

    def finish(self) -> None:
        try:
            ended = False
            while not ended:
                life = self.chance.choice(self._lives) if self._lives else self._start()
                ended = self._turn(life)
            while self._lives:
                self._turn(self._lives[0])
        finally:
            self.files.interrupt = lambda access, name: None
            for life in list(self._lives):
                self._end(life)
        with contextlib.closing(HostRun(self.files, graph(), self.place / "last")) as last:
            last.claim().run()
            expect_all(last)

    def turns(self, life: Life) -> Iterator[None]:
        size = lambda: self.chance.randint(1, 25)  # noqa: E731
        place = self.place / f"host-{life.host}"
        life.opened = run = HostRun(self.files, graph(), place, self.chance.choice((1, 2)), size)
        for stage in run.stages:
            yield
            stage.claim()
        yield
        run.sweep()
        run.maintenance.merge_files = 5
        busy = True
        while busy:
            busy = False
            sends = self.chance.random() < 0.2
            if sends and self.ends < self.ENDS:
                self._sent += 1
                run.assembly.queues["sent"].appender().write({"host": life.host, "n": self._sent})
            parts: list[Any] = [*run.sources, run.feeder, *run.stages]
            for part in self.chance.sample(parts, len(parts)):
                yield
                is_source = isinstance(part, SourceStepper)
                busy |= run.pull(part, self.chance.randint(1, 8)) if is_source else part.step()
            run.maintenance.merge(self.chance.choice(list(run.queues.values())).log(0))

    def _start(self) -> Life:
        free = [host for host in self._hosts if host not in {life.host for life in self._lives}]
        new = not free or self.chance.random() < 0.4
        if new:
            self._made += 1
            self._hosts.append(self._made)
        host = self._made if new else self.chance.choice([free[-1], *free])
        life = Life(self, host, new)
        self._lives.append(life)
        if len(self._lives) > 1:
            for each in self._lives:
                each.alone = False
        return life

    def _end(self, life: Life) -> None:
        self._lives.remove(life)
        if life.opened is not None:
            life.opened.close()

    def _turn(self, life: Life) -> bool:
        """Let a driver make a turn. Return True if it had nothing to do any more."""
        self._awake.append(life)
        try:
            next(life.turns)
        except (StopIteration, Died, CuesError) as error:
            self._end(life)
            refused = isinstance(error, Diverged) and life.opened is None
            if isinstance(error, CuesError) and not isinstance(error, (Fenced, Diverged)):
                raise
            if isinstance(error, CuesError) and life.alone and (not refused or life.fresh):
                raise  # only a store that was used before may be refused
            if refused and not life.fresh:
                self.refusals += 1
                self._hosts.remove(life.host)
            return isinstance(error, StopIteration)
        finally:
            self._awake.pop()
        return False

    def _count_down(self) -> None:
        self._left = self.chance.randint(1, 150) if self.ends < self.ENDS else 0

    def _interrupt(self, access: str, name: str) -> None:
        run = self._awake[-1].opened if self._awake else None
        if run is not None and self.chance.random() < 0.1:  # sources have threads of their own
            run.pull(self.chance.choice(run.sources), self.chance.randint(1, 5))
        if access == "read" or not self._left:
            return
        self._left -= 1
        if self._left:
            return
        self.ends += 1
        self._count_down()
        if self.chance.random() < 0.6:
            raise Died
        asleep = [life for life in self._lives if life not in self._awake]
        life = self.chance.choice([*asleep, None]) or self._start()
        for _ in range(self.chance.randint(1, 30)):
            if life in self._lives:
                self._turn(life)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "FEED_MESSAGES", 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*seeds.among(range(12), fast=3), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 300))]
)
def test_hosts_that_die_or_sleep_at_any_access_lose_and_repeat_nothing(
    files: FaultyFiles, tmp_path: Path, small_files: None, seed: int
) -> None:
    RandomRun(seed, files, tmp_path).finish()


def without_sources(feeder: Feeder, last: Any) -> bool:
    """As if the positions of the sources were not in the record."""
    return REAL_RESTORE(feeder, last and feeder_module.replace(last, sources={}))


def sources_of_later(feeder: Feeder, id: str, queue: Any, end: int) -> Any:
    """As if the positions of the sources were read at the end of a copy."""
    files = REAL_COPY(feeder, id, queue, end)
    feeder.look()
    feeder.cuts[0].sources.update(feeder.cuts[-1].sources)
    return files


REAL_RESTORE, REAL_COPY = Feeder.restore_from, Feeder.copy
CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "sources begin anew": (Feeder, "restore_from", without_sources),
    "sources are read after the queues": (Feeder, "copy", sources_of_later),
    "any store continues": (Feeder, "_compare", lambda feeder, id, queue, identity, next, last: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_hosts_find_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_files: None, control: str
) -> None:
    """Without one of the protections, some run of a few ends with other messages, or cannot go on."""
    monkeypatch.setattr(*CONTROLS[control])
    for seed in range(30):
        place = tmp_path / str(seed)
        try:
            RandomRun(seed, FaultyFiles(str(place / "queues")), place).finish()
        except (CuesError, AssertionError) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail("no run was wrong")
