"""Renamed processors: ``renamed_from=`` moves what a processor has in one commit; orphans are told and deleted."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import rename_graphs
from click.testing import CliRunner
from forks import Forks
from small import feed, numbers, run

import cues
from cues import Graph, QueueOptions, Sink, Source, Store, Stream, testing
from cues.cli.app import commands
from cues.engine.assembly import assemble
from cues.errors import AlreadyRunning, Fenced, GraphError, TopologyChanged
from cues.graphs.processor_rows import key_of, read_row
from cues.operate.shape import shape_of_store
from cues.processors import joins, reducers, shape, windows
from cues.processors.sql import SQLite
from cues.storage.replica import same_moment
from cues.tools import metrics
from cues.tools.changes import cut_of


def total(message: Any, process: Any) -> dict[str, Any]:
    process.state["sum"] = process.state.get("sum", 0) + message["n"]
    return {"n": process.state["sum"], "hash": process.delivery_hash}


def test_a_renamed_stream_continues_with_its_state_and_hashes(store: Store) -> None:
    feed(store, a=[1, 2])
    run(store, Stream(total, "a", "out", id="old"))
    feed(store, a=[3])
    report = run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
    assert numbers(store, "out") == [1, 3, 6]
    assert [event.text for event in report.events if "was g.old" in event.text]
    assert testing.state(store, "g.new") == {"sum": 6}
    hashes = [message["hash"] for message in testing.messages(store, "out")]
    identity = store.queue("a").core.row().identity
    assert hashes == [testing.delivery_hash("g.old", 0, [("g.old.a", identity, n, n + 1)]) for n in (1, 2, 3)]
    feed(store, a=[4])
    run(store, Stream(total, "a", "out", id="new", renamed_from="old"))  # the option may stay
    feed(store, a=[5])
    run(store, Stream(total, "a", "out", id="new"))  # and may go
    assert numbers(store, "out") == [1, 3, 6, 10, 15]


def test_names_that_come_back_begin_anew_and_share_nothing(store: Store) -> None:
    """A chain of renames, one back to the first name, and a new processor that has a former name."""
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="one"))
    for id, former in (("two", "one"), ("three", "two"), ("one", "three"), ("two", "one")):
        feed(store, a=[1])
        run(store, Stream(total, "a", "out", id=id, renamed_from=former))
    assert numbers(store, "out") == [1, 2, 3, 4, 5]
    run(store, Stream(total, "a", "out", id="two"), Stream(total, "a", "more", id="one"))
    assert numbers(store, "more") == [1, 2, 3, 4, 5] and numbers(store, "out") == [1, 2, 3, 4, 5]
    with store.core.view() as txn:
        assert (key_of(txn, "g.two"), key_of(txn, "g.one")) == ("g.one", "g.one~2")
    both = [m["hash"] for queue in ("out", "more") for m in testing.messages(store, queue)]
    assert len(set(both)) == 10  # a target that keys by the hash sees ten messages, not five
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="two"), Stream(total, "a", "more", id="one"))
    assert numbers(store, "more")[-1] == numbers(store, "out")[-1] == 6


def test_a_renamed_source_continues_at_its_position(store: Store) -> None:
    def numbers_from(position: Any) -> Any:
        for n in range(position or 0, 3 if position is None else 5):
            yield n + 1, {"n": n}

    run(store, Source("old", numbers_from))
    run(store, Source("new", numbers_from, renamed_from="old"))
    assert numbers(store, "old") == [0, 1, 2] and numbers(store, "new") == [3, 4]


def test_a_transactional_target_takes_each_message_once_across_a_rename(store: Store, tmp_path: Path) -> None:
    target = SQLite(tmp_path / "target.db")

    def save(message: Any, process: Any) -> None:
        process.connection.execute("create table if not exists rows (n)")
        process.connection.execute("insert into rows values (?)", (message["n"],))

    feed(store, a=[1, 2])
    run(store, Sink(save, "a", id="old", checkpoint=target))
    feed(store, a=[3])
    run(store, Sink(save, "a", id="new", renamed_from="old", checkpoint=target))
    with contextlib.closing(sqlite3.connect(tmp_path / "target.db")) as database:
        assert [n for (n,) in database.execute("select n from rows order by rowid")] == [1, 2, 3]
        assert [row for (row,) in database.execute("select processor from cues_positions")] == ["g.old"]


def test_declarations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(GraphError, match="renamed_from='x'"):
        Stream(total, "a", "out", id="x", renamed_from="x")
    with pytest.raises(GraphError, match="renamed_from="):
        Stream(total, "a", "out", id="x", renamed_from="g.y")
    for processors, words in (
        ([Stream(total, "a", "o", id="x", renamed_from="y"), Stream(total, "a", "p", id="y")], "is in the graph too"),
        ([Stream(total, "a", "o", id=i, renamed_from="y") for i in "xz"], "former name of g.x"),
        ([Source("a", renamed_from="b"), Stream(total, "a", "o", id="x")], "has no function"),
    ):
        with pytest.raises(GraphError, match=words):
            Graph("g", processors).plan()
    graph = Graph("g", [Stream(total, "a", "o", id="x", renamed_from="y")])
    assert Graph.from_dict(graph.to_dict()).processors["x"].options.renamed_from == "y"


def test_a_rename_together_with_other_inputs_is_refused_and_renames_nothing(store: Store) -> None:
    feed(store, a=[1], b=[2])
    run(store, Stream(total, "a", "out", id="old"))
    with pytest.raises(TopologyChanged, match=r"inputs of g.new have changed"):
        run(store, Stream(total, "b", "out", id="new", renamed_from="old"))
    with pytest.raises(TopologyChanged, match=r"was a stream and is a sink"):
        run(store, Sink(lambda message: None, "a", id="new", renamed_from="old"))
    feed(store, a=[3])
    run(store, Stream(total, "a", "out", id="old"))
    assert numbers(store, "out") == [1, 4]


def test_both_names_in_the_store_is_told_and_changes_nothing(store: Store) -> None:
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="old"))
    run(store, Stream(total, "a", "out", id="new"), accept_topology=True)
    report = run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
    assert [e.text for e in report.events if "has no effect" in e.text]
    assert numbers(store, "out") == [1, 1]


def test_the_old_version_after_a_rename_is_refused_and_can_be_renamed_back(store: Store) -> None:
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="old"))
    run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
    with pytest.raises(TopologyChanged, match="renamed_from='new'"):
        run(store, Stream(total, "a", "out", id="old"))
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="old", renamed_from="new"))
    assert numbers(store, "out") == [1, 2]
    with store.core.view() as txn:
        assert key_of(txn, "g.old") == "g.old"


def test_a_processor_that_runs_under_its_former_name_is_not_renamed(store: Store) -> None:
    feed(store, a=[1])
    running = assemble(Graph("g", [Stream(total, "a", "out", id="old")]), store)
    try:
        with pytest.raises(AlreadyRunning, match=r"g\.old is already run"):
            run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
        (stepper,) = running.steppers
        stepper.step()
    finally:
        running.close()
    assert numbers(store, "out") == [1]


def test_an_owner_that_was_stopped_is_fenced_by_the_rename(store: Store) -> None:
    feed(store, a=[1])
    stopped = assemble(Graph("g", [Stream(total, "a", "out", id="old")]), store)
    stopped.ownership.release()  # as if its process were gone; its step continues
    run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
    with pytest.raises(Fenced):
        stopped.steppers[0].step()
    stopped.close()
    assert numbers(store, "out") == [1]


def test_a_start_whose_processor_is_renamed_meanwhile_is_refused(store: Store, monkeypatch: Any) -> None:
    """The old version looks its keys up, the new version renames, the old one claims: it must not share the try log."""
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="old"))
    from cues.engine import assembly

    prepare = assembly.prepare_units

    def then_rename(stores: Any, units: Any) -> Any:
        keyed = prepare(stores, units)
        monkeypatch.setattr(assembly, "prepare_units", prepare)
        run(store, Stream(total, "a", "out", id="new", renamed_from="old"))
        return keyed

    monkeypatch.setattr(assembly, "prepare_units", then_rename)
    with pytest.raises(TopologyChanged, match="renamed by another start"):
        run(store, Stream(total, "a", "out", id="old"))
    with store.core.view() as txn:
        assert read_row(txn, "g.old") is None


def test_retention_by_reading_follows_the_new_name(store: Store) -> None:
    queues = {"a": QueueOptions(retention="read")}
    store.queue("a", retention="read")
    feed(store, a=[1, 2, 3])
    run(store, Stream(total, "a", "out", id="old"), queues=queues)
    run(store, Stream(total, "a", "out", id="new", renamed_from="old"), queues=queues)
    feed(store, a=range(4, 3000))
    run(store, Stream(total, "a", "out", id="new"), queues=queues)
    feed(store, a=[1])
    assert store.queue("a").first_index > 1000  # nothing waits for g.old


def test_a_reader_of_another_store_follows_its_new_name(store: Store, tmp_path: Path) -> None:
    """Its writer waits for at most 3 messages, and the messages that were read are deleted."""
    queues = {"mid": QueueOptions(path=str(tmp_path / "other"), max_lag=3, retention="read")}
    first = Stream(lambda message: message, "a", "mid", id="first")
    for id, former in (("old", None), ("new", "old"), ("new", None)):
        feed(store, a=range(10))
        run(store, first, Stream(total, "mid", "out", id=id, renamed_from=former), queues=queues)
    assert len(numbers(store, "out")) == 30
    with cues.open(tmp_path / "other") as other:
        assert [(reader.processor, reader.position) for reader in metrics.of_readers(other)] == [("g.old", 31)]


def test_a_processor_never_waits_for_itself_under_a_new_name(store: Store, tmp_path: Path) -> None:
    """It reads what it writes, on a queue with a bound in another store, which knows it by its key."""
    queues = {"loop": QueueOptions(path=str(tmp_path / "other"), max_lag=1)}
    down = lambda message: {"n": message["n"] - 1} if message["n"] else None  # noqa: E731
    begin = Stream(lambda message: message, "a", "loop", id="begin")
    for id, former in (("old", None), ("new", "old")):
        feed(store, a=[2])
        run(store, begin, Stream(down, "loop", "loop", id=id, renamed_from=former), queues=queues)
    with cues.open(tmp_path / "other") as other:
        assert numbers(other, "loop") == [2, 1, 0, 2, 1, 0]


def test_a_changed_key_of_a_processor_with_state_is_told_once(tmp_path: Path) -> None:
    def count(message: Any, process: Any) -> None:
        process.state["n"] = process.state.get("n", 0) + 1

    def told(key: Any, **options: Any) -> list[str]:
        heard: list[str] = []
        sink = Sink(count, "in", **{"id": "count", "key": key, **options})
        graph = Graph("g", [Source("in"), sink], store=tmp_path / "s", durability="process")
        with graph.start(listeners=[lambda event: heard.append(f"{event.processor}: {event.text}")]) as running:
            running.send("in", {"a": 1, "b": 2})
            assert running.wait_idle(60)
        return [text.partition(": state")[0] for text in heard if "key=" in text]

    def by_a(message: Any) -> Any:
        return message["a"]

    assert told("a") == told("a") == []
    assert told("b") == ["g.count: key= was 'a' at the last start, and is 'b'"] and told("b") == []
    assert told(lambda m: m["a"], id="new", renamed_from="count") == [
        "g.new: key= was 'b' at the last start, and is a lambda of 'a'"
    ]
    assert told(lambda m: m["a"], id="new") == []
    assert told(by_a, id="new") == ["g.new: key= was a lambda of 'a' at the last start, and is the function by_a"]
    assert told(None, id="new") == ["g.new: key= was the function by_a at the last start, and is None"]


@pytest.mark.parametrize("made", ["windows", "join", "dedupe"])
def test_a_changed_key_of_a_ready_made_processor_is_told(store: Store, made: str) -> None:
    def processor(key: Any) -> Any:
        if made == "windows":
            reduce = {"n": reducers.count()}
            return windows.tumbling("a", "out", "1m", time="t", key=key, reduce=reduce, late="late", id="p")
        if made == "join":
            return joins.lookup({"left": "a", "table": "b"}, "out", key=key, id="p")
        return Stream(shape.dedupe(key, "1h"), "a", "out", id="p")

    feed(store, a=[{"t": 1, "x": 1, "y": 2}], b=[{"t": 1, "x": 1, "y": 2}])
    told: list[str] = []
    for key in ("x", "x", "y"):
        with Graph("g", [processor(key)]).start(store=store, listeners=[lambda e: told.append(e.text)]) as running:
            assert running.wait_idle(60)
        assert [text.partition(": state")[0] for text in told if "key=" in text] == (
            ["key= was 'x' at the last start, and is 'y'"] if key == "y" else []
        )


def test_tools_find_what_a_renamed_processor_has_under_its_key(store: Store) -> None:
    """Tries, the figures of its failures, the page's shape and the guards of incremental copies."""

    def fail_at_two(message: Any, process: Any) -> Any:
        process.state["last"] = message["n"]
        return message if message["n"] != 2 else 1 / 0

    feed(store, a=[1, 2, 3])
    run(store, Stream(fail_at_two, "a", "out", id="old", errors="failed"))
    feed(store, a=[4])
    new = Stream(fail_at_two, "a", "out", id="new", renamed_from="old", errors="failed")
    run(store, new)
    assert testing.check_attempts(store) == []
    records = testing.messages(store, "g.new")
    assert records and records == list(store.queue("g.old").tailer())
    (measured,) = metrics.of_processors(store)
    assert (measured.processor, measured.errors) == ("g.new", 1)
    assert [(each.id, each.outputs, each.errors) for each in shape_of_store(store).processors] == [
        ("g.new", ["out"], "failed")
    ]
    assert set(testing.contents(store)["state"]) == {"g.new"}
    assert CliRunner().invoke(commands, ["tail", f"{store.path}#g.new", "--json"]).exit_code == 0
    with same_moment([store]) as (moment,):
        assert cut_of(moment, store.id, 1).rows[b"state:g.old"].guard


@pytest.mark.slow
def test_a_rename_dies_at_every_point_and_happens_once(forks: Forks, tmp_path: Path) -> None:
    """Partitions, state, an output abroad and a sink with a step under way; killed at each point of the first start."""
    made = str(tmp_path / "made")
    os.mkdir(made)
    forks.run("rename_graphs:prepare", made)
    stays = rename_graphs.copy(made, str(tmp_path / "stays"))
    forks.run("rename_graphs:finish", stays, True)
    expected = forks.run("rename_graphs:examine", stays).value
    counted = rename_graphs.copy(made, str(tmp_path / "counted"))
    sites = forks.run("rename_graphs:sites", counted).value
    names = {name for name, _ in sites}
    assert {"rename.inside", "rename.after", "claim.inside"} <= names
    chosen = [site for site in sites if site[0].startswith(("rename", "claim"))]
    chosen += [(name, 1) for name in names if not name.startswith(("rename", "claim", "function", "append"))]
    for name, hit in chosen:
        place = rename_graphs.copy(made, str(tmp_path / re.sub(r"\W", "-", f"{name}-{hit}")))
        assert forks.run("rename_graphs:die_at", place, name, hit).killed, (name, hit)
        forks.run("rename_graphs:finish", place)
        found = forks.run("rename_graphs:examine", place).value
        found.pop("repeated")
        assert found == {key: value for key, value in expected.items() if key != "repeated"}, (name, hit)
