"""Queues in other stores: what a user sees of them, and what happens where they do not fit together.

That nothing is lost or doubled whatever dies when is shown by test_crashes.py and test_power.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import terminal
from forks import Forks

import cues
from cues import Graph, QueueOptions, Sink, Source, Stream, faults, testing
from cues.base import events, names
from cues.engine.assembly import assemble
from cues.errors import Diverged, ProcessorStopped, QueueNotFound, StoreNotFound, TopologyChanged
from cues.forwarding import forwarder, low_water, marks, other_stores
from cues.forwarding.forwarder import Forwarder
from cues.queues import backpressure
from cues.queues.options import kept_in_store
from cues.steps import ownership
from cues.storage import format_record
from cues.storage.base_store import BaseStore

Message = dict[str, Any]


def numbers(stop: int, start: int = 0) -> list[Message]:
    return [{"n": n} for n in range(start, stop)]


def same(message: Message) -> Message:
    return message


def graph(tmp_path: Path, *processors: Any, queues: tuple[str, ...] = ("out",), id: str = "g", **options: Any) -> Graph:
    """A graph whose home is ``home``, and whose ``queues`` are in ``other``."""
    elsewhere = {queue: QueueOptions(path=tmp_path / "other") for queue in queues}
    return Graph(id, processors, store=tmp_path / id, queues={**elsewhere, **options.pop("more", {})}, **options)


def read(path: Path, queue: str) -> list[Message]:
    with cues.open(path, readonly=True) as store:
        return testing.messages(store, queue)


def feed(path: Path, queue: str, messages: list[Message]) -> None:
    with cues.open(path) as store:
        store.queue(queue).appender().write_many(messages)


# --- what a user sees -----------------------------------------------------------------------------


def test_a_running_graph_writes_to_and_reads_from_another_store(tmp_path: Path) -> None:
    there = graph(tmp_path, Stream(same, "in", "out", id="go"), Stream(same, "out", "back", id="come"))
    with there.start() as running:
        for message in numbers(50):
            running.send("in", message)
        assert running.wait_idle(timeout=30)
        assert running.messages("out") == running.messages("back") == numbers(50)
    assert read(tmp_path / "other", "out") == numbers(50)
    with cues.open(tmp_path / "g", readonly=True) as home:
        assert "out" not in home.queues() and "back" in home.queues()


def test_idle_means_that_everything_has_been_forwarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forwarder that is held up keeps the graph busy, though all its processors have nothing to take."""
    let_go = threading.Event()
    real = Forwarder.step
    monkeypatch.setattr(Forwarder, "step", lambda self: let_go.wait(0.01) and real(self))
    with graph(tmp_path, Stream(same, "in", "out")).start() as running:
        running.send("in", {"n": 0})
        while not running.counters()["g.same"].taken:
            time.sleep(0.001)
        assert not running.wait_idle(timeout=0.3)
        assert running.counters()["g.same"].taken == 1 and running.messages("out") == []
        let_go.set()
        assert running.wait_idle(timeout=30)
        assert running.messages("out") == [{"n": 0}]


def test_relative_paths_are_beside_the_graph_file_or_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = Graph("g", [Stream(same, "in", "out")], queues={"out": QueueOptions(path="data/shared")})
    testing.run_until_idle(made, tmp_path / "home")
    assert (tmp_path / "data" / "shared" / "data.mdb").exists()
    made.directory = tmp_path / "elsewhere"
    testing.run_until_idle(made, tmp_path / "home2")
    assert (tmp_path / "elsewhere" / "data" / "shared" / "data.mdb").exists()


def test_another_store_that_its_owner_is_making_gets_the_durability_of_the_graph(tmp_path: Path) -> None:
    """The data file is there before the record that says the durability."""
    (tmp_path / "other").mkdir()
    format_record.make_data_file(tmp_path / "other")
    made = Graph(
        "g",
        [Stream(same, "in", "out")],
        durability="process",
        queues={"out": QueueOptions(path=tmp_path / "other")},
    )
    testing.run_until_idle(made, tmp_path / "home")
    with cues.open(tmp_path / "other", durability="process") as store:  # as its owner, who is a moment later
        assert store.durability == "process"


def test_a_path_that_is_the_graphs_own_store_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "g")
    made = Graph(
        "g", [Stream(same, "in", "out")], store=tmp_path / "g", queues={"out": QueueOptions(path=tmp_path / "link")}
    )
    with quick_store(tmp_path / "g") as store:
        store.queue("in").appender().write_many(numbers(3))
        testing.run_until_idle(made, store)
        assert testing.messages(store, "out") == numbers(3)
        assert not [name for name in store.queues(all=True) if "fork" in name]


def quick_store(path: Path) -> cues.Store:
    return cues.open(path, durability="process")


def test_the_path_is_the_graphs_and_not_the_queues(tmp_path: Path) -> None:
    testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out"), more={"in": QueueOptions(retention=5)}))
    with cues.open(tmp_path / "other") as other:
        assert other.queue("out").options == QueueOptions()
    assert Graph.from_dict(graph(tmp_path, Source("out")).to_dict()).queues["out"].path == str(tmp_path / "other")


def test_messages_abroad_carry_hash_and_provenance_like_those_at_home(tmp_path: Path) -> None:
    made = graph(
        tmp_path,
        Stream(lambda m: {"home": m, "abroad": m}, "in", {"home": "near", "abroad": "out"}, id="both"),
        more={"in": QueueOptions(metadata={"t", "time", "tx"})},
    )
    with quick_store(tmp_path / "g") as home:
        home.queue("in").appender().write_many(numbers(5))
        testing.run_until_idle(made, home)
        near = [envelope(home, "near", index) for index in range(1, 6)]
    with cues.open(tmp_path / "other") as other:
        far = [envelope(other, "out", index) for index in range(1, 6)]
    assert near == far and near[2][0] is not None
    assert near[2][1]["q/queue"]["in"]["q/t"] == near[2][1]["tx/t"] == 3


def envelope(store: cues.Store, queue: str, index: int) -> tuple[str | None, Message]:
    tailer = store.queue(queue).tailer()
    tailer.to_index(index)
    tailer.read()
    assert tailer.envelope is not None
    return tailer.envelope.hash, tailer.envelope.metadata


def test_the_attempt_names_the_fork_queue_and_its_message_carries_the_hash(tmp_path: Path) -> None:
    with quick_store(tmp_path / "g") as home:
        home.queue("in").appender().write_many(numbers(2))
        testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out")), home)
        with cues.open(tmp_path / "other") as other:
            fork = f"g.same.fork.{other.id.hex()}"
        attempt = testing.messages(home, "g.same")[-1]
        assert attempt["q.try/message-index"] == {fork: 1}
        assert envelope(home, fork, 1)[0] == attempt["q/hash"]
        assert not testing.check_attempts(home)
        assert home.queue(fork).tailer().read() == {"q/type": "q.type.fork/step", "q.fork/counts": {"out": 2}}


def test_a_message_larger_than_a_page_and_a_step_larger_than_a_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "BYTES_MAX", 20_000)
    large = [{"n": n, "body": os.urandom(5_000 * (n % 4))} for n in range(40)]
    with quick_store(tmp_path / "g") as home:
        home.queue("in").appender().write_many(large)
        testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out")), home)
    assert read(tmp_path / "other", "out") == large


def test_several_graphs_write_to_one_queue_and_another_reads_it(tmp_path: Path) -> None:
    """A queue is the output of two graphs and the input of a third, each with a store of its own, all running."""
    counts = {"a": 300, "b": 200}

    def source(id: str) -> Callable[..., Any]:
        def rows(position: int | None) -> Iterator[tuple[int, Message]]:
            for n in range(position or 0, counts[id]):
                yield n + 1, {"from": id, "n": n}

        return rows

    writers = [
        graph(tmp_path, Source(f"rows-{id}", source(id)), Stream(same, f"rows-{id}", "out"), id=id) for id in "ab"
    ]
    reader = graph(tmp_path, Stream(same, "out", "all"), id="c")
    with writers[0].start() as a, writers[1].start() as b, reader.start() as c:
        for running in (a, b, c):
            assert running.wait_idle(timeout=30)
        assert c.wait_idle(timeout=30)
        found = c.messages("all")
    testing.check_history(
        {id: [{"from": id, "n": n} for n in range(count)] for id, count in counts.items()}, found
    ).expect_exact()


def test_the_error_queue_may_be_shared_by_graphs_in_a_store_of_its_own(tmp_path: Path) -> None:
    def fails(message: Message) -> Message:
        raise ValueError(message["n"])

    for id in ("a", "b"):
        feed(tmp_path / id, "in", numbers(3))
        testing.run_until_idle(graph(tmp_path, Stream(fails, "in", "out"), id=id, queues=("errors",), errors="errors"))
    found = read(tmp_path / "other", "errors")
    assert [m["err.proc/config"]["id"] for m in found] == ["a.fails"] * 3 + ["b.fails"] * 3


def test_stores_that_differ_in_durability_say_what_holds_for_both(tmp_path: Path) -> None:
    with cues.open(tmp_path / "other", durability="process"):
        pass
    report = testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out")))
    said = [event.text for event in report.events if "durability" in event.text]
    assert len(said) == 1 and str(tmp_path / "other") in said[0]
    report = testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out"), id="h", durability="process"))
    assert not [event for event in report.events if "durability" in event.text]


# --- retention ------------------------------------------------------------------------------------


def test_read_retention_waits_for_a_reader_whose_position_is_in_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "MARK_S", 0.0)
    made = graph(
        tmp_path,
        Sink(lambda m: None, "out", id="save"),
        more={"out": QueueOptions(path=tmp_path / "other", retention="read")},
    )
    testing.run_until_idle(made)
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out")
        for n in range(50):
            out.appender().write({"n": n})
        assert out.first_index == 1, "nobody has read it"
        testing.run_until_idle(made)
        out.appender().write({"n": 50})
        assert out.first_index == 51, "it is past all but the last"


def test_a_step_under_way_from_another_store_holds_back_every_policy(tmp_path: Path) -> None:
    """The sink is killed in its function; until it has taken the messages again no policy lets go of them."""
    made = graph(
        tmp_path,
        Sink(lambda m: None, "out", id="save"),
        more={"out": QueueOptions(path=tmp_path / "other", retention=2)},
    )
    testing.run_until_idle(made)
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out")
        for n in range(3):
            out.appender().write({"n": n})
        with testing.crash("function.after", how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(made)
        first = out.first_index
        for n in range(3, 30):
            out.appender().write({"n": n})
        assert out.first_index == first
        report = testing.run_until_idle(made)
        assert report.decisions == {"save": "rewind"}
        out.appender().write({"n": 30})
        assert out.first_index >= 29


def test_a_reader_that_was_taken_over_does_not_move_its_followers_mark(tmp_path: Path) -> None:
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out", retention="read")
        old = low_water.LowWater(out, marks.ForeignReader(b"8bytes!!", "g.save", 1))
        new = low_water.LowWater(out, marks.ForeignReader(b"8bytes!!", "g.save", 2))
        new.publish(7)
        old.publish(9)
        with other.core.view() as txn:
            ((reader, mark),) = marks.of_log(txn, out.core.log)
        assert (reader.name, mark.epoch, mark.next) == ("g.save", 2, 7)


def test_an_input_that_is_read_no_more_takes_its_mark_along(tmp_path: Path) -> None:
    testing.run_until_idle(graph(tmp_path, Stream(lambda a: a, "out", "x", id="s")))
    with cues.open(tmp_path / "other") as other:
        assert marked(other, "out") == ["g.s"]
        changed = graph(tmp_path, Stream(lambda a: a, "near", "out", id="s"))
        with pytest.raises(TopologyChanged):
            testing.run_until_idle(changed)
        assert marked(other, "out") == ["g.s"]
        testing.run_until_idle(changed, accept_topology=True)
        assert marked(other, "out") == []


def marked(store: cues.Store, queue: str) -> list[str]:
    with store.core.view() as txn:
        return [reader.name for reader, _ in marks.of_log(txn, store.queue(queue).core.log)]


def reader_of(tmp_path: Path, fn: Callable[[Message], None] = lambda m: None) -> Graph:
    """A sink of a queue in another store, which keeps messages that a reader has not read."""
    return graph(
        tmp_path, Sink(fn, "out", id="s"), more={"out": QueueOptions(path=tmp_path / "other", retention="read")}
    )


def test_a_seek_back_keeps_what_was_sought_in_the_other_store(tmp_path: Path) -> None:
    """Although another reader continues and retention by reading is active, before the graph runs again."""
    seen: list[int] = []
    made = reader_of(tmp_path, lambda m: seen.append(m["n"]))
    fast = graph(tmp_path, Sink(lambda m: None, "out", id="f"), id="fast")
    testing.run_until_idle(made)
    testing.run_until_idle(fast)
    for n in range(5):
        feed(tmp_path / "other", "out", [{"n": n}])
    with cues.open(tmp_path / "other") as other:
        tailer = other.queue("out").tailer("slow")
        testing.run_until_idle(made)
        testing.run_until_idle(fast)
        with cues.open(tmp_path / "g") as home:
            ownership.seek(home, "g.s", {"g.s.out": 1})
        tailer.to_end()
        for n in range(5, 8):
            feed(tmp_path / "other", "out", [{"n": n}])
            testing.run_until_idle(fast)
    testing.run_until_idle(made)
    assert seen == [*range(5), *range(8)]


def test_a_seek_back_does_not_raise_a_mark_that_lags(tmp_path: Path) -> None:
    """A mark shows the durable position at home. A seek to a later place does not move it."""
    made = reader_of(tmp_path)
    feed(tmp_path / "other", "out", numbers(10))
    testing.run_until_idle(made)
    with cues.open(tmp_path / "other") as other, cues.open(tmp_path / "g") as home:
        low_water.lower_mark(other, "out", marks.ForeignReader(home.id, "g.s", 1), 3)
        ownership.seek(home, "g.s", {"g.s.out": 6})
        with other.core.view() as txn:
            ((_, mark),) = marks.of_log(txn, other.queue("out").core.log)
        assert mark.next == 3


def test_a_home_store_that_was_put_back_can_still_hold_what_it_reads(tmp_path: Path) -> None:
    """Its epochs are lower than what the other store has seen; claimed above them, its marks count again."""
    made = reader_of(tmp_path)
    for n in range(5):
        feed(tmp_path / "other", "out", [{"n": n}])
    testing.run_until_idle(made)
    kept = copy_of(tmp_path / "g")
    for n in range(5, 9):
        feed(tmp_path / "other", "out", [{"n": n}])
        testing.run_until_idle(made)
    put_back(tmp_path / "g", kept)
    testing.run_until_idle(made, steps_max=0)
    with cues.open(tmp_path / "other") as other, other.core.view() as txn:
        ((_, mark),) = marks.of_log(txn, other.queue("out").core.log)
    with cues.open(tmp_path / "g") as home:
        assert mark.next == testing.contents(home)["positions"]["g.s.out"]


def test_a_graph_that_was_closed_holds_nothing_back(tmp_path: Path) -> None:
    """Closed directly after a commit, before an idle look at the queue."""
    made = graph(
        tmp_path, Sink(lambda m: None, "out", id="s"), more={"out": QueueOptions(path=tmp_path / "other", retention=2)}
    )
    feed(tmp_path / "other", "out", numbers(3))
    testing.run_until_idle(made, steps_max=1)
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out")
        for n in range(3, 20):
            out.appender().write({"n": n})
        assert len(out) <= 3


def test_a_start_that_is_refused_leaves_no_mark(tmp_path: Path) -> None:
    testing.run_until_idle(graph(tmp_path, Stream(same, "near", "x", id="s"), queues=()))
    with pytest.raises(TopologyChanged):
        testing.run_until_idle(graph(tmp_path, Stream(same, "out", "x", id="s")))
    with cues.open(tmp_path / "other") as other:
        assert marked(other, "out") == []


def test_a_mark_goes_with_its_input_though_the_graph_names_the_store_no_more(tmp_path: Path) -> None:
    testing.run_until_idle(graph(tmp_path, Stream(same, "out", "x", id="s")))
    testing.run_until_idle(graph(tmp_path, Stream(same, "near", "x", id="s"), queues=()), accept_topology=True)
    with cues.open(tmp_path / "other") as other:
        assert marked(other, "out") == []


def test_holding_further_back_lowers_a_mark_that_is_held_already(tmp_path: Path) -> None:
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out", retention=5)
        mark = low_water.LowWater(out, marks.ForeignReader(b"8bytes!!", "g.s", 1))
        mark.hold(100)
        mark.publish(100)
        mark.release()
        mark.hold(1)
        with other.core.view() as txn:
            assert [found for _, found in marks.of_log(txn, out.core.log)] == [marks.Mark(1, 1, True)]


def test_a_processor_of_a_store_that_is_gone_can_be_forgotten(tmp_path: Path) -> None:
    made = reader_of(tmp_path)
    feed(tmp_path / "other", "out", numbers(3))
    testing.run_until_idle(made)
    with cues.open(tmp_path / "g") as home:
        id = home.id.hex()
    shutil.rmtree(tmp_path / "g")
    with cues.open(tmp_path / "other") as other:
        assert marked(other, "out") == ["g.s"]
        assert other_stores.forget(other, f"{id}/g.s") == [f"{id}/g.s"]
        assert marked(other, "out") == []


def test_a_name_that_two_stores_have_gives_up_neither(tmp_path: Path) -> None:
    """The store of one is lost, and the other one lives: the hint of a writer that waits names the lost one alone."""
    ids = []
    for home in ("g", "lives"):
        feed(tmp_path / "other", "out", numbers(3))
        testing.run_until_idle(reader_of(tmp_path), tmp_path / home)
        with cues.open(tmp_path / home) as store:
            ids.append(store.id.hex())
    place = str(tmp_path / "other")
    refused = terminal.cues("compact", place, "--forget", "g.s", "--yes")
    assert refused.code == 2 and all(f"{id}/g.s" in refused.err for id in ids)
    wrong = terminal.cues("compact", place, "--forget", "g.t", "--yes")
    assert wrong.code == 2 and "--forget" not in wrong.err
    with cues.open(place) as other:
        out = other.queue("out")
        with other.core.view() as txn:
            (lost,) = [one.reader for one in backpressure.lags(txn, out.core.log) if one.reader.home.hex() == ids[0]]
    hint = shlex.split(lost.kind.hint(lost, "out", place))
    assert hint[0] == "cues" and terminal.cues(*hint[1:], "--yes").code == 0
    with cues.open(place) as other:
        out = other.queue("out")
        with other.core.view() as txn:
            assert [one.reader.home.hex() for one in backpressure.lags(txn, out.core.log)] == [ids[1]]


# --- positions ------------------------------------------------------------------------------------


def test_a_queue_that_moved_to_another_store_stops_the_start(tmp_path: Path) -> None:
    feed(tmp_path / "g", "out", numbers(3))
    testing.run_until_idle(graph(tmp_path, Stream(same, "out", "x"), queues=()))
    with pytest.raises(TopologyChanged, match=r"on a queue of another store: g\.same\.out"):
        testing.run_until_idle(graph(tmp_path, Stream(same, "out", "x")))
    feed(tmp_path / "other", "out", numbers(5, 3))
    testing.run_until_idle(graph(tmp_path, Stream(same, "out", "x")), accept_topology=True)
    assert read(tmp_path / "g", "x") == numbers(5)


def test_seek_moves_a_position_on_a_queue_of_another_store(tmp_path: Path) -> None:
    made = graph(tmp_path, Stream(same, "out", "x"))
    feed(tmp_path / "other", "out", numbers(5))
    testing.run_until_idle(made)
    with cues.open(tmp_path / "g") as home:
        ownership.seek(home, "g.same", {"g.same.out": 4})
    testing.run_until_idle(made)
    assert read(tmp_path / "g", "x") == [*numbers(5), *numbers(5, 3)]
    shutil.rmtree(tmp_path / "other")
    with cues.open(tmp_path / "g") as home, pytest.raises(StoreNotFound, match="other"):
        ownership.seek(home, "g.same", {"g.same.out": 1})


def test_a_purge_abroad_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    feed(tmp_path / "other", "out", numbers(10))
    made = graph(tmp_path, Stream(same, "out", "x", batch_size=3))
    testing.run_until_idle(made, steps_max=1)
    with cues.open(tmp_path / "other") as other:
        other.queue("out").purge(before=8)
    testing.run_until_idle(made)
    assert read(tmp_path / "g", "x") == [*numbers(3), *numbers(10, 7)]


# --- what does not fit together -------------------------------------------------------------------


def ready(tmp_path: Path) -> Graph:
    """A graph that has forwarded three messages."""
    made = graph(tmp_path, Stream(same, "in", "out"))
    feed(tmp_path / "g", "in", numbers(3))
    testing.run_until_idle(made)
    return made


def test_another_store_that_is_gone_stops_the_start(tmp_path: Path) -> None:
    made = ready(tmp_path)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(Diverged, match="is gone") as caught:
        testing.run_until_idle(made)
    assert "--accept-topology" in caught.value.hint and not (tmp_path / "other").exists()
    feed(tmp_path / "g", "in", numbers(5, 3))
    testing.run_until_idle(made, accept_topology=True)
    assert read(tmp_path / "other", "out") == numbers(5, 3)
    feed(tmp_path / "g", "in", numbers(6, 5))
    testing.run_until_idle(made)
    assert read(tmp_path / "other", "out") == numbers(6, 3)


def test_another_store_that_was_made_anew_stops_the_start(tmp_path: Path) -> None:
    made = ready(tmp_path)
    shutil.rmtree(tmp_path / "other")
    feed(tmp_path / "other", "out", numbers(1))
    with pytest.raises(Diverged, match="another one than the one that this graph has used"):
        testing.run_until_idle(made)


def test_what_was_not_forwarded_is_forwarded_though_the_graph_writes_there_no_more(tmp_path: Path) -> None:
    made = graph(tmp_path, Stream(same, "in", "out"))
    feed(tmp_path / "g", "in", numbers(3))
    with testing.crash("forward.read", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(made)
    assert read(tmp_path / "other", "out") == []
    testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out"), queues=()))
    assert read(tmp_path / "other", "out") == numbers(3)


def copy_of(path: Path) -> Path:
    """The store as it is now, to be put back later."""
    kept = path.with_suffix(".kept")
    shutil.copytree(path, kept, ignore=shutil.ignore_patterns("bells", "lock.mdb", "wake", "open", "lease-*"))
    return kept


def put_back(path: Path, kept: Path) -> None:
    shutil.rmtree(path)
    kept.rename(path)


def test_a_home_store_from_a_backup_is_refused_where_the_other_store_is_ahead(tmp_path: Path) -> None:
    made = ready(tmp_path)
    kept = copy_of(tmp_path / "g")
    feed(tmp_path / "g", "in", numbers(5, 3))
    testing.run_until_idle(made)
    put_back(tmp_path / "g", kept)
    with pytest.raises(Diverged, match="the fork queue ends before"):
        testing.run_until_idle(made)


def test_a_home_store_that_went_another_way_is_refused(tmp_path: Path) -> None:
    """The same step at the same place is not enough: its record must be the one that was forwarded."""
    made = ready(tmp_path)
    kept = copy_of(tmp_path / "g")
    feed(tmp_path / "g", "in", numbers(5, 3))
    testing.run_until_idle(made)
    put_back(tmp_path / "g", kept)
    feed(tmp_path / "g", "in", numbers(5, 3))
    shutil.move(tmp_path / "other", tmp_path / "aside")  # out of sight, so that home goes its way
    with cues.open(tmp_path / "g") as home:
        assembly_without_forwarding(made, home)
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    shutil.move(tmp_path / "aside", tmp_path / "other")
    with pytest.raises(Diverged, match="but another one is here"):
        testing.run_until_idle(made)


def assembly_without_forwarding(made: Graph, home: cues.Store) -> None:
    """One step of the graph, and nothing forwarded, over a copy of the other store."""
    shutil.copytree(str(made.queues["out"].path).replace("other", "aside"), str(made.queues["out"].path))
    real = Forwarder.compare
    try:
        Forwarder.compare = lambda self: None  # type: ignore[method-assign]
        assembled = assemble(made, home)
    finally:
        Forwarder.compare = real  # type: ignore[method-assign]
    for stepper in assembled.steppers:
        stepper.step()
    assembled.forwarders.clear()
    assembled.close()


def test_another_store_from_a_backup_gets_what_it_lacks_as_long_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ready(tmp_path)
    kept = copy_of(tmp_path / "other")
    feed(tmp_path / "g", "in", numbers(5, 3))
    with monkeypatch.context() as patch:
        patch.setattr(Forwarder, "tidy", lambda self: None)  # killed before: the fork queue keeps what it forwarded
        testing.run_until_idle(made)
    put_back(tmp_path / "other", kept)
    testing.run_until_idle(made)
    assert read(tmp_path / "other", "out") == numbers(5)


def test_another_store_from_an_older_backup_is_refused(tmp_path: Path) -> None:
    made = ready(tmp_path)
    kept = copy_of(tmp_path / "other")
    for n in range(3, 6):
        feed(tmp_path / "g", "in", numbers(n + 1, n))
        testing.run_until_idle(made)
    put_back(tmp_path / "other", kept)
    with pytest.raises(Diverged, match="were trimmed"):
        testing.run_until_idle(made)


def test_a_copy_of_the_home_store_is_not_another_store(tmp_path: Path) -> None:
    """``cp -r`` keeps the id; taken for the home store, messages would go to the wrong one without a word."""
    made = graph(tmp_path, Stream(same, "in", "out"), queues=())
    testing.run_until_idle(made)
    shutil.copytree(
        tmp_path / "g", tmp_path / "other", ignore=shutil.ignore_patterns("lock.mdb", "wake", "bells", "open")
    )
    with pytest.raises(Diverged, match="is a copy of"):
        testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out")))


def test_two_copies_of_one_store_are_not_two_stores(tmp_path: Path) -> None:
    feed(tmp_path / "other", "a", numbers(1))
    shutil.copytree(
        tmp_path / "other", tmp_path / "twin", ignore=shutil.ignore_patterns("lock.mdb", "wake", "bells", "open")
    )
    twins = {"a": QueueOptions(path=tmp_path / "other"), "b": QueueOptions(path=tmp_path / "twin")}
    with pytest.raises(Diverged, match="is a copy of"):
        testing.run_until_idle(graph(tmp_path, Stream(same, "a", "b"), queues=(), more=twins))


def test_what_a_graph_does_not_say_of_a_shared_queue_stays(tmp_path: Path) -> None:
    there = {"out": QueueOptions(path=tmp_path / "other", retention=100, metadata={"t"}, max_message_bytes=1000)}
    testing.run_until_idle(graph(tmp_path, Stream(same, "in", "out"), more=there, id="a"))
    report = testing.run_until_idle(graph(tmp_path, Sink(lambda m: None, "out", id="s"), id="b"))
    with cues.open(tmp_path / "other") as other:
        assert other.queue("out").options == kept_in_store(there["out"])
    assert not [event for event in report.events if "changed for all" in event.text]
    longer = {"out": QueueOptions(path=tmp_path / "other", retention=200)}
    report = testing.run_until_idle(graph(tmp_path, Sink(lambda m: None, "out", id="s"), more=longer, id="b"))
    assert [event for event in report.events if "retention from {'count': 100} to {'count': 200}" in event.text]


def test_a_running_graph_follows_the_options_of_its_outputs_abroad(tmp_path: Path) -> None:
    small = {"out": QueueOptions(path=tmp_path / "other", max_message_bytes=200)}
    made = graph(tmp_path, Stream(same, "in", "out"), more=small, errors="errors")
    with made.start() as running, cues.open(tmp_path / "other") as other:
        running.send("in", {"n": 0, "body": "x" * 500})
        running.wait_idle(timeout=30)
        other.queue("out", max_message_bytes=10_000)
        for n in (1, 2):  # the first append tells of the change
            running.send("in", {"n": n, "body": "x" * 50 * n})
            running.wait_idle(timeout=30)
        running.send("in", {"n": 3, "body": "x" * 500})
        running.wait_idle(timeout=30)
        assert [m["n"] for m in running.messages("out")] == [1, 2, 3]
        assert len(running.messages("errors")) == 1


def test_a_fork_queue_takes_no_options(tmp_path: Path) -> None:
    ready(tmp_path)
    with cues.open(tmp_path / "g") as home:
        (fork,) = [name for name in home.queues(all=True) if names.split_fork(name)]
        with pytest.raises(cues.errors.InvalidArgument, match="is a fork queue"):
            home.queue(fork, retention=1)


def test_check_names_what_the_next_start_would_refuse(tmp_path: Path) -> None:
    from cues.tools.check import check_others

    made = ready(tmp_path)
    kept = copy_of(tmp_path / "g")
    with cues.open(tmp_path / "g") as home:
        assert check_others(home) == []
    feed(tmp_path / "g", "in", numbers(5, 3))
    testing.run_until_idle(made)
    put_back(tmp_path / "g", kept)
    with cues.open(tmp_path / "g") as home:
        (problem,) = check_others(home)
        assert "the fork queue ends before" in problem
        shutil.rmtree(tmp_path / "other")
        (problem,) = check_others(home)
        assert "is missing" in problem


# --- forwarders -----------------------------------------------------------------------------------


@pytest.mark.interpreted
def test_a_store_is_synced_before_the_other_store_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home before its steps are forwarded, and before its positions are marks; the other one before a trim at home."""
    noted: list[str] = []
    real = BaseStore.sync

    def sync(store: BaseStore) -> None:
        noted.append(f"sync {Path(store.path).name}")
        real(store)

    monkeypatch.setattr(BaseStore, "sync", sync)
    monkeypatch.setattr(forwarder, "TRIM_MESSAGES", 0)
    made = graph(tmp_path, Stream(same, "in", "out", id="go"), Stream(same, "out", "back", id="come"))
    for count in range(3):
        feed(tmp_path / "g", "in", numbers(3 * count + 3, 3 * count))
        faults.watch(noted.append)
        testing.run_until_idle(made)
        faults.disarm()

    def before(point: str, since: str) -> list[str]:
        """What happened before the last time at ``point``, since the last ``since`` before it."""
        noted_before = noted[: len(noted) - 1 - noted[::-1].index(point)]
        return noted_before[len(noted_before) - 1 - noted_before[::-1].index(since) :]

    assert "sync g" in before("forward.inside", "forward.read")
    assert "sync other" in before("trim.inside", "forward.after")
    assert "sync g" in before("mark.inside", "commit.after")


def test_a_look_beside_a_forwarder_that_trims_is_not_mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the producer row and that at the fork queue the step may be forwarded and trimmed."""
    made = ready(tmp_path)
    monkeypatch.setattr(forwarder, "TRIM_MESSAGES", 0)
    feed(tmp_path / "g", "in", numbers(9, 3))
    with cues.open(tmp_path / "g") as home, cues.open(tmp_path / "other") as other:
        assembly = assemble(made, home)
        (stepper,), (works,) = assembly.steppers, assembly.forwarders
        looks = Forwarder(home, other, ["g.same"])
        real = looks._row

        def row(one: Any) -> bytes | None:
            found = real(one)
            monkeypatch.setattr(looks, "_row", real)
            stepper.step()
            works.step()
            return found

        monkeypatch.setattr(looks, "_row", row)
        with home.core.view() as txn:
            ends = looks.ends(txn)
        assert looks.done(ends)
        assembly.close()


@pytest.mark.parametrize("control", [False, True], ids=["as it is", "control: a row that is not compared"])
def test_a_forwarder_that_is_overtaken_between_its_look_and_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """It is stopped with steps to forward, and continues when another has forwarded them: it must find another row."""
    made = graph(tmp_path, Stream(same, "in", "out", batch_size=2))
    feed(tmp_path / "g", "in", numbers(6))
    with cues.open(tmp_path / "g") as home, cues.open(tmp_path / "other") as other:
        assembly = assemble(made, home)
        (stepper,) = assembly.steppers
        while stepper.step() == "committed":
            pass
        slow, fast = (Forwarder(home, other, ["g.same"]) for _ in range(2))
        monkeypatch.setattr(slow, "settle", lambda: fast.step())
        if control:
            compared = slow.append_steps
            monkeypatch.setattr(
                slow, "append_steps", lambda txn, one, expected, *rest: compared(txn, one, txn.get(one.key), *rest)
            )
        slow.forward(slow.forks[0])
        assert testing.messages(other, "out") == (numbers(6) * 2 if control else numbers(6))
        assembly.forwarders.clear()
        assembly.close()


def test_two_forwarders_of_the_same_queue_do_no_harm(tmp_path: Path) -> None:
    """Two take the same steps; the one that commits second finds another row, and looks again."""
    made = graph(tmp_path, Stream(same, "in", "out", batch_size=1))
    with quick_store(tmp_path / "g") as home, cues.open(tmp_path / "other") as other:
        home.queue("in").appender().write_many(numbers(200))
        assembly = assemble(made, home)
        processors = ["g.same"]
        forwarders = [Forwarder(home, other, processors) for _ in range(3)]
        (stepper,) = assembly.steppers
        done = threading.Event()

        def forward(one: Forwarder) -> None:
            while one.step() or not done.is_set():
                time.sleep(0)

        threads = [threading.Thread(target=forward, args=(one,)) for one in forwarders]
        for thread in threads:
            thread.start()
        while stepper.step() == "committed":
            pass
        done.set()
        for thread in threads:
            thread.join()
        assert testing.messages(other, "out") == numbers(200)
        assert sum(one.forwarded for one in forwarders) == 200
        assembly.close()


def test_a_forwarder_that_cannot_write_stops_with_an_error_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cues.open(tmp_path / "other", max_map_size=1 << 20):
        pass
    made = graph(tmp_path, Stream(same, "in", "out"))
    heard: list[events.Event] = []
    running = made.start()
    running.bus.listeners.append(heard.append)
    with pytest.raises(ProcessorStopped, match="not forwarded any more") as caught, running:
        for n in range(60):
            running.send("in", {"n": n, "body": os.urandom(50_000)})
        running.wait_idle(timeout=60)
    assert type(caught.value.__cause__).__name__ == "StoreFull"
    assert [event for event in heard if isinstance(event, events.Stopped)]
    forwarded = [message["n"] for message in read(tmp_path / "other", "out")]
    assert forwarded == list(range(len(forwarded))) and len(forwarded) < 60
    with cues.open(tmp_path / "other", map_size=1 << 26):
        testing.run_until_idle(made)
    assert [message["n"] for message in read(tmp_path / "other", "out")] == list(range(60))


def test_the_fork_queue_stays_small_while_much_passes(tmp_path: Path) -> None:
    made = graph(tmp_path, Stream(same, "in", "out", batch_size=100), durability="process")
    with quick_store(tmp_path / "g") as home:
        fork = None
        for round in range(30):
            home.queue("in").appender().write_many(numbers(1000))
            testing.run_until_idle(made, home)
            (fork,) = [home.queue(name) for name in home.queues(all=True) if names.split_fork(name)]
            assert len(fork) <= 2 * forwarder.TRIM_MESSAGES, round
        assert fork is not None and fork.last_index > 30_000


# --- ownership ------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["commit.before", "forward.read", "forward.synced", "forward.after", "trim.synced"])
def test_a_process_that_was_stopped_and_taken_over_commits_nothing_in_either_store(
    point: str, forks: Forks, tmp_path: Path
) -> None:
    made = graph(tmp_path, Stream(same, "in", "out", batch_size=2))
    with cues.open(tmp_path / "g", durability="process") as home:
        home.queue("in").appender().write_many(numbers(10))
    pid = forks.start("test_two_stores:stop_at", str(tmp_path), point)
    assert forks.wait(pid).stopped
    for lease in (tmp_path / "g").glob("lease-*"):
        lease.write_bytes(bytes(8))  # it has run out
    testing.run_until_idle(made, take_over=True)
    expected = numbers(10)
    assert read(tmp_path / "other", "out") == expected
    before = snapshot(tmp_path)
    forks.kill(pid, signal.SIGCONT)
    outcome = forks.wait(pid)
    if point == "commit.before":
        assert "Fenced" in outcome.error
    assert read(tmp_path / "other", "out") == expected
    assert snapshot(tmp_path) == before
    with cues.open(tmp_path / "g") as home:
        home.queue("in").appender().write_many(numbers(12, 10))
    testing.run_until_idle(made)
    assert read(tmp_path / "other", "out") == numbers(12)


def snapshot(tmp_path: Path) -> dict[str, Any]:
    with cues.open(tmp_path / "g") as home, cues.open(tmp_path / "other") as other:
        return {"home": testing.contents(home), "other": testing.contents(other)["queues"]}


def stop_at(path: str, point: str) -> None:
    """In a child: run the graph, and be stopped at ``point``."""
    forwarder.TRIM_MESSAGES = 2  # type: ignore[misc]
    with testing.crash(point, 1, how="stop"):
        testing.run_until_idle(graph(Path(path), Stream(same, "in", "out", batch_size=2)))


def test_a_queue_of_another_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with graph(tmp_path, Stream(same, "in", "out")).start() as running, pytest.raises(QueueNotFound):
        running.messages("outt")
