"""Processors from outside: the plan of a seek, a seek that deletes state, and orphans."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import terminal
from small import feed, numbers, run

import cues
from cues import Graph, QueueOptions, Sink, Store, Stream, faults, testing
from cues.cli.app import run as cli
from cues.engine import causes, redriving
from cues.engine.assembly import assemble
from cues.errors import AlreadyRunning, InvalidArgument
from cues.graphs.processor_rows import read_row
from cues.operate import processors as operate
from cues.steps import delays
from cues.testing import run_until_idle

FILE = """
import cues

graph = cues.Graph("g", errors="errors")

def total(message, process):
    process.state["sum"] = process.state.get("sum", 0) + message["n"]
    return {"n": process.state["sum"]}

graph.stream("a", "out", id="total")(total)
graph.sink("out", id="save")(lambda message: None)
"""


def total(message: Any, process: Any) -> dict[str, Any]:
    process.state["sum"] = process.state.get("sum", 0) + message["n"]
    return {"n": process.state["sum"]}


@pytest.fixture
def graph_file(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    path = tmp_path / "graph.py"
    path.write_text(FILE)
    with cues.open(tmp_path / "data" / "g", durability="process") as store:
        feed(store, a=[1, 2, 3])
    assert cli(["run", "graph.py", "--idle-exit", "0", "--quiet"]) == 0
    return path


def command(code: int, *words: str) -> Any:
    """Run a command in a process of its own, which imports the graph file as it is now."""
    done = terminal.cues(*words)
    assert done.code == code, done
    return done


# --- seek -----------------------------------------------------------------------------------------


def test_a_seek_with_reset_state_gives_the_results_of_a_fresh_run(store: Store) -> None:
    feed(store, a=[1, 2, 3])
    stream = Stream(total, "a", "out", id="total")
    run(store, stream)
    (plan,) = store.seek("g.total", "start", plan=True)
    assert plan.counts_twice and plan.state_values == 1 and plan.inputs[0].again == 3
    assert [(output.name, output.effect) for output in plan.outputs] == [("out", "appended again")]
    with pytest.raises(InvalidArgument, match="count twice"):
        store.seek("g.total", "start")
    run(store, stream)
    assert numbers(store, "out") == [1, 3, 6]  # neither the plan nor the refusal moved anything
    store.seek("g.total", "start", reset_state=True)
    assert testing.state(store, "g.total") == {}
    run(store, stream)
    store.seek("g.total", "start", reset_state=False)
    run(store, stream)
    assert numbers(store, "out") == [1, 3, 6, 1, 3, 6, 7, 9, 12]


@pytest.mark.parametrize("hit", ["seek.inside"])
def test_positions_and_state_change_in_one_commit(store: Store, hit: str) -> None:
    feed(store, a=[1, 2, 3])
    run(store, Stream(total, "a", "out", id="total"))

    def die(name: str) -> None:
        raise KeyboardInterrupt

    faults.arm(hit, 1, die)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.seek("g.total", "start", reset_state=True)
    finally:
        faults.disarm()
    with store.core.view() as txn:
        row = read_row(txn, "g.total")
    assert row is not None and row.positions[0].next == 4 and testing.state(store, "g.total") == {"sum": 6}


def test_a_running_owner_drops_the_state_that_it_has_in_memory(store: Store) -> None:
    feed(store, a=[1, 2, 3])
    with Graph("g", [Stream(total, "a", "out", id="total")]).start(store=store) as running:
        assert running.wait_idle(30)
        store.seek("g.total", "start", reset_state=True)
        feed(store, a=[4])
        assert running.wait_idle(30)
    assert numbers(store, "out") == [1, 3, 6, 1, 3, 6, 10]


def test_all_units_of_a_processor_are_moved_and_reset(store: Store) -> None:
    queues = {"a": QueueOptions(partitions=3, key="n")}
    store.queue("a", partitions=3, key="n")
    feed(store, a=range(30))
    stream = Stream(lambda m, process: total(m, process) | {"u": process.id}, "a", "out", id="total", key="n")
    run(store, stream, queues=queues)
    plans = store.seek("g.total", "start", reset_state=True)
    assert len(plans) == 3 and sum(plan.inputs[0].again for plan in plans) == 30
    run(store, stream, queues=queues)
    assert sorted(numbers(store, "out")) == sorted([*range(30), *range(30)])
    with pytest.raises(InvalidArgument, match="an index belongs to one"):
        store.seek("g.total", 3)
    store.seek("g.total/1", 1, reset_state=False)


def test_the_command_shows_the_plan_and_asks(graph_file: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert cli(["seek", "graph.py#total", "--to", "start", "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["state"]["counts_twice"] is True and plan["outputs"][0]["name"] == "out"
    assert plan["inputs"]["g.total.a"] == {
        "tailer": "g.total.a", "queue": "a", "position": 4, "to": 1, "again": 3, "skipped": 0,
    }  # fmt: skip
    assert cli(["seek", "graph.py#total", "--to", "start"]) == 2
    shown = capsys.readouterr().err
    assert "3 messages of a will be delivered again" in shown and "COUNT TWICE" in shown and "add --yes" in shown
    assert cli(["seek", "graph.py#save", "--to", "start", "--plan"]) == 0
    (delivered,) = json.loads(capsys.readouterr().out)["outputs"]
    assert delivered == {"name": "g.save", "effect": "delivered again", "store": ""}
    assert cli(["seek", "graph.py#total", "--to", "start", "--reset-state", "--yes"]) == 0
    assert "will be deleted" in capsys.readouterr().err
    assert cli(["run", "graph.py", "--idle-exit", "0", "--quiet"]) == 0
    with cues.open("data/g") as store:
        assert numbers(store, "out") == [1, 3, 6, 1, 3, 6]


# --- orphans --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_orphan_is_shown_and_deleted_and_retention_goes_on(graph_file: Path) -> None:
    graph_file.write_text(FILE.replace('id="total"', 'id="sum"'))
    done = command(1, "run", "graph.py", "--idle-exit", "0", "--quiet")
    shown = done.err
    assert "renamed_from='total'" in shown and "--accept-topology" in shown
    done = command(0, "run", "graph.py", "--idle-exit", "0", "--quiet", "--accept-topology")
    for target in ("graph.py", "data/g"):
        done = command(0, "status", target, "--json")
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert {row["processor"] for row in rows if row.get("orphan")} == {"g.total"}
    done = command(1, "forget", "graph.py", "sum", "--yes")
    assert "is a processor of its graph" in done.err
    done = command(1, "forget", "data/g", "g.sum", "--yes")
    done = command(2, "forget", "graph.py", "total")  # it asks
    done = command(0, "forget", "graph.py", "total", "--yes")
    with cues.open("data/g") as store:
        with store.core.view() as txn:
            assert read_row(txn, "g.total") is None and read_row(txn, "g.sum") is not None
        assert testing.state(store, "g.total") == {} and testing.state(store, "g.sum") == {"sum": 6}
        assert store.check() == []
    done = command(1, "forget", "graph.py", "total", "--yes")


def test_retention_waits_for_an_orphan_until_it_is_deleted(store: Store) -> None:
    queues = {"a": QueueOptions(retention="read")}
    store.queue("a", retention="read")
    feed(store, a=[1])
    run(store, Stream(total, "a", "out", id="old"), queues=queues)
    run(store, Stream(total, "a", "out", id="new"), queues=queues, accept_topology=True)
    for _ in range(3):
        feed(store, a=range(2000))
        run(store, Stream(total, "a", "out", id="new"), queues=queues)
    feed(store, a=[1])
    assert store.queue("a").first_index <= 2
    graph = Graph("g", [Stream(total, "a", "out", id="new")], queues=queues)
    assert operate.plan_forget(store, "g.old", graph).unread == 6001
    operate.forget(store, "g.old", graph)
    feed(store, a=[1])
    assert store.queue("a").first_index > 1000


def test_nothing_is_left_of_a_deleted_processor(store: Store) -> None:
    """Held messages were left, as state of no processor, and the check refused the store from then on."""
    broken = True

    def handle(message: Any, process: Any) -> None:
        if message["n"] == 2 and broken:
            raise ValueError("no")
        process.timer("k", process.now.timestamp() + message["n"])
        process.state["n"] = message["n"]

    def fire(timer: Any, process: Any) -> None:
        process.state["fired"] = 1

    graph = Graph("g", [Stream(handle, "a", "out", id="p", timer=fire)], errors="errors")
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        feed(store, a=[1, 2, 3, 4000])
        feed(store, a=[cues.delayed({"n": n}, delay=n) for n in (5, 1000, 2000)])
        testing.run_until_idle(graph, store)
        broken = False
        assert len(redriving.redrive(graph, store=store, all=True).resolved) == 1
        clock.advance(10)
        testing.run_until_idle(graph, store)
    left = "redrive", "redrive.a", "timer", "timer.due", "delayed", "delayed.a"
    assert {f"g.p.{id}" for id in left} <= set(store.queues(all=True))
    without = Graph("g", [Stream(total, "a", "out", id="q")])
    plan = operate.plan_forget(store, "g.p", without)
    assert (plan.unread, plan.held) == (0, 2)
    operate.forget(store, "g.p", without)
    assert store.check() == []
    assert {name: n for name, n in store.core.entries() if b"g.p" in name and n} == {}
    with store.core.view() as txn:
        rows = [bytes(key) for key, _ in txn.cursor() if b"g.p" in key and key.startswith(b"\0")]
    assert {row.split(b"\0")[1] for row in rows} == {b"queue", b"row"}  # names are not used again
    feed(store, a=[cues.delayed({"n": 1}, delay=1000)])
    testing.run_until_idle(graph, store)
    (held,) = delays.waiting(store)
    assert (held.unit, held.messages) == ("g.p", 1)


def test_a_processor_that_comes_back_after_it_was_deleted_begins_anew(store: Store) -> None:
    feed(store, a=[1, 2])
    seen: list[str] = []
    sink = Sink(lambda message, process: seen.append(process.delivery_hash), "a", id="x")
    run(store, sink)
    operate.forget(store, "g.x", Graph("g", [Stream(total, "a", "out", id="total")]))
    run(store, sink)
    run(store, sink)
    assert len(seen) == len(set(seen)) == 4


def test_a_processor_that_runs_or_whose_messages_wait_is_not_deleted(store: Store, tmp_path: Path) -> None:
    feed(store, a=[1])
    other = Graph("g", [Stream(total, "b", "out", id="other")])
    queues = {"out": QueueOptions(path=str(tmp_path / "abroad"))}
    graph = Graph("g", [Stream(total, "a", "out", id="old")], queues=queues)
    running = assemble(graph, store)
    try:
        with pytest.raises(AlreadyRunning, match=r"g\.old is run by process"):
            operate.forget(store, "g.old", other)
        running.steppers[0].step()
    finally:
        running.close()
    with pytest.raises(cues.errors.QueueInUse, match="wait to be forwarded"):
        operate.forget(store, "g.old", other)
    run_until_idle(graph, store)
    operate.forget(store, "g.old", other)
    with cues.open(tmp_path / "abroad") as abroad:
        assert numbers(abroad, "out") == [1]


@pytest.mark.slow
def test_workers_find_a_renamed_processor_at_its_positions(graph_file: Path) -> None:
    graph_file.write_text(FILE.replace('id="total"', 'id="sum", renamed_from="total"'))
    command(0, "send", "graph.py#a", "n=4")
    command(0, "run", "graph.py", "--workers", "2", "--idle-exit", "0.5", "--quiet")
    with cues.open("data/g") as store:
        assert numbers(store, "out") == [1, 3, 6, 10]
        assert testing.state(store, "g.sum") == {"sum": 10}


@pytest.mark.slow
def test_fresh_finds_the_rows_of_a_renamed_sink_in_its_target(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    text = """
import cues
from cues.processors.sql import SQLite

graph = cues.Graph("g")
graph.source("a")

@graph.sink("a", OPTIONS, checkpoint=SQLite("target.db"))
def save(message, process):
    process.connection.execute("create table if not exists rows (n)")
"""
    Path("graph.py").write_text(text.replace("OPTIONS", 'id="old"'))
    command(0, "send", "graph.py#a", "n=1", "--create")
    command(0, "run", "graph.py", "--idle-exit", "0", "--quiet")
    Path("graph.py").write_text(text.replace("OPTIONS", 'id="new", renamed_from="old"'))
    command(0, "run", "graph.py", "--idle-exit", "0", "--quiet")
    refused = command(1, "run", "graph.py", "--fresh", "--yes", "--idle-exit", "0")
    assert "target.db" in refused.err and "'g.old'" in refused.err


def test_causes_that_differ_in_a_code_are_different_groups() -> None:
    for text in ("GET https://x/1 answered 404: '7'", "OSError: [Errno 28] disk full", "psycopg: SQLSTATE 23505"):
        assert re.search(r"\b(404|28|23505)\b", causes.normalised(text)), text
    same = [causes.normalised(f"ValueError: order {n} of 'a{n}' at 0x7f{n} costs {n}.5") for n in (1, 23)]
    assert same[0] == same[1] == "ValueError: order N of '…' at N costs N"
