"""A store and a directory as operators use them: the same methods, and the same measurement of the same graph."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake", reason="deltalake is not installed (pip install 'cues-streams[test]')")

from directory_steps import DriverRun, FaultyFiles, Message

import cues
from cues import Graph, QueueOptions, Stream
from cues.errors import BatchDamaged, QueueNotFound, Unsupported
from cues.operate.directories import DirectoryPlace
from cues.operate.directory_reader import DirectoryReader
from cues.operate.place import Place, message_at, place_of
from cues.operate.reading import FoundMessage, StoreReader
from cues.operate.refused import Refused
from cues.operate.seeking import SeekRequest
from cues.operate.stores import StorePlace
from cues.operate.target import resolve
from cues.testing import run_until_idle
from cues.tools.figures import values

ONLY_STORES = {"changing", "error_logs", "graph", "home", "opened", "queue", "store"}
"""What commands use that are for stores alone."""
ONLY_DIRECTORIES = {"files", "location", "merge", "merges", "queue_of", "vacuum", "vacuums"}


def positive(message: Message) -> Message:
    if message["n"] < 0:
        raise ValueError("negative")
    return message


def graph(**options: Any) -> Graph:
    parted = QueueOptions(partitions=3, key="n")
    return Graph("g", [Stream(positive, "in", "out", id="p")], errors="errors", queues={"in": parted}, **options)


GIVEN = [{"n": n} for n in [*range(1, 31), -1, -2]]


@pytest.fixture(params=["store", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The place on which the graph has taken 30 messages, and two that failed."""
    where = tmp_path / "place"
    if request.param == "directory":
        DriverRun(FaultyFiles(str(where)), graph()).feed("in", GIVEN).claim().run()
    else:
        made = graph(store=where, durability="process")
        with cues.open(where, durability="process") as store:
            store.queue("in", partitions=3, key="n").appender().write_many(GIVEN)
        run_until_idle(made)
    return place_of(resolve(str(where)))


def at(place: Place, name: str) -> Place:
    """The same place, with a name after the ``#``."""
    return place_of(resolve(f"{place.target.path}#{name}", command="cues test"))


def surface(cls: type) -> dict[str, list[str]]:
    """The public names of a class, with the parameters of its methods."""
    found = {}
    for name, value in inspect.getmembers(cls):
        if not name.startswith("_"):
            found[name] = list(inspect.signature(value).parameters) if inspect.isfunction(value) else []
    return found


@pytest.mark.parametrize(
    ("one", "other", "alone"),
    [(StorePlace, DirectoryPlace, ONLY_STORES | ONLY_DIRECTORIES), (StoreReader, DirectoryReader, {"queue"})],
)
def test_both_kinds_have_the_same_methods(one: type, other: type, alone: set[str]) -> None:
    first, second = surface(one), surface(other)
    assert first.keys() ^ second.keys() <= alone
    for name in first.keys() & second.keys():
        assert first[name] == second[name], name


def test_a_measurement_has_the_sums_of_the_units_of_a_processor(place: Place) -> None:
    with place:
        seen = place.measure()
        (figures,) = [each for each in seen.figures() if each.processor == "g.p"]
        assert [unit.processor for unit in figures.units] == ["g.p", "g.p/1", "g.p/2"]
        assert (figures.lag, figures.errors, figures.taken, figures.is_running) == (0, 2, 32, False)
        assert figures.last_error is not None and figures.last_error.type == "ValueError"
        (read,) = figures.inputs
        assert (read.queue, read.position, read.lag) == ("in", None, 0)
        known = {"lag": 0, "rate": None, "errors": 2, "errors_more": False, "p99": None}
        assert values(figures) | {"rate": None} == known
        queues = {queue.queue: queue for queue in seen.queues}
        assert (queues["in"].messages, queues["errors"].messages) == (32, 2)
        assert [part.queue for part in queues["in"].partitions] == ["in/0", "in/1", "in/2"]
        lines = [line for line in place.lines(seen) if line.get("processor") in ("g.p", "g.p/1", "g.p/2")]
        assert len(lines) == 3 and sum(line["errors"] for line in lines) == 2


def test_readers_go_forward_and_back_over_partitions(place: Place) -> None:
    with place:
        reader = place.reader_of("in")
        forward = list(reader.forward())
        assert forward.pop() is None and not any(isinstance(found, BatchDamaged) for found in forward)
        known = {(f.partition, f.index): f.message for f in forward if isinstance(f, FoundMessage)}
        assert sorted(message["n"] for message in known.values()) == sorted(m["n"] for m in GIVEN)
        assert reader.positions == {number: next for number, (_, next) in reader.ends().items()}
        backward = {(f.partition, f.index): f.message for f in reader.backward() if isinstance(f, FoundMessage)}
        assert backward == known and reader.positions == {0: 1, 1: 1, 2: 1}
        again = place.reader_of("in")
        again.back(2, lambda message: message["n"] < 0)
        rest = [f.message["n"] for f in again.forward() if isinstance(f, FoundMessage)]
        assert [n for n in rest if n < 0] == [n for n in rest if n < 0][:2] and len([n for n in rest if n < 0]) == 2
        (partition, index), message = next(iter(known.items()))
        assert message_at(place.reader_of("in", partition), index).message == message
        for wrong in (lambda: place.reader_of("in", 7), lambda: place.reader_of("no")):
            with pytest.raises(QueueNotFound):
                wrong()
        with pytest.raises(QueueNotFound, match="has no message 99"):
            message_at(place.reader_of("in", 0), 99)


def test_plans_change_nothing_and_then_do_what_they_say(place: Place) -> None:
    named = at(place, "g.p")
    with named, named.seeking(SeekRequest("start")) as seek:
        assert seek.subject == "g.p"
        assert place.measure().figures(["g.p"])[0].lag == 0
        moved = [facts["processor"] for _, facts in seek.apply()]
    assert moved == ["g.p", "g.p/1", "g.p/2"]
    with place:
        lag = place.measure().figures(["g.p"])[0].lag
    assert lag == 32
    with pytest.raises(Refused, match="an index belongs to one"), at(place, "g.p").seeking(SeekRequest(3)):
        pass
    out = at(place, "out")
    with out, out.growing() as growth:
        assert (growth.queue, growth.partitions) == ("out", 1)
        growth.apply(2)
    with place:
        (grown,) = [queue for queue in place.measure().queues if queue.queue == "out"]
        assert len(grown.partitions) == 2
        assert place.check(lambda what, done, total: None) == []


def test_failed_messages_of_both_kinds(place: Place) -> None:
    with place, place.errors() as failed:
        records = list(failed.records())
        assert sorted(record.inputs["in"][0]["n"] for record in records) == [-2, -1]
        assert [record.type for record in failed.at(records[0].index)] == ["ValueError"]


def test_what_a_directory_lacks_is_refused_by_name(tmp_path: Path) -> None:
    DriverRun(FaultyFiles(str(tmp_path / "d")), graph()).feed("in", GIVEN).claim().run()
    place = at(place_of(resolve(str(tmp_path / "d"))), "in")
    assert isinstance(place, DirectoryPlace)
    refusals = [
        lambda: place.only_stores("cues redrive is", "…"),
        lambda: place.queues(everything=True),
        lambda: place.reader("committed"),
        lambda: place.seeking(SeekRequest("start", again=True)).__enter__(),
        lambda: place.seeking(SeekRequest("start", plan_only=True)).__enter__(),
    ]
    for refused in refusals:
        with pytest.raises(Refused):
            refused()
    with pytest.raises(Unsupported):
        place.state(place.processors()[0], b"", 1)
