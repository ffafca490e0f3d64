"""Timers whose processor is forgotten, backed up, or failed: their rows are deleted, kept, and redriven."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import Graph, faults, testing
from cues.base import names
from cues.cli.app import run as cli
from cues.engine import redriving
from cues.operate import processors as operate
from cues.queues.log import Log
from cues.steps import copies
from cues.steps import redrive as redrives

START = datetime(2026, 1, 31, tzinfo=UTC)
Message = dict[str, Any]


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    with testing.Clock(START) as clock:
        yield clock


def handle(message: Message, process: cues.Process) -> None:
    process.state["n"] = message["n"]
    process.timer(message["k"], process.now + timedelta(seconds=message["after"]), message.get("name"))


def fire(timer: Message, process: cues.Process) -> Message:
    return {"k": timer["key"], "n": process.state["n"], "at": timer["at"]}


def graph_of(fire: Any = fire, **options: Any) -> Graph:
    stream = cues.Stream(handle, "in", "out", id="p", key="k", timer=fire, **options)
    return Graph("g", [cues.Source("in"), stream], errors="errors")


def send(store: cues.Store, *messages: Message) -> None:
    store.queue("in").appender().write_many(messages)


def test_forget_deletes_timers_that_are_set_and_those_that_are_due(clock: testing.Clock, store: cues.Store) -> None:
    send(store, {"k": "x", "n": 1, "after": 1}, {"k": "y", "n": 2, "after": 50})
    testing.run_until_idle(graph_of(), store)
    clock.advance(2)
    with testing.crash("timer.moved", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph_of(), store)
    assert len(testing.messages(store, "g.p.timer.due")) == 1
    testing.run_until_idle(Graph("g", [cues.Source("in")]), store)
    operate.forget(store, "g.p")
    with store.core.view() as txn:
        assert txn.get(names.redriver_key("g.p.timer")) is None
        assert txn.get(names.redriver_inputs_key("g.p.timer")) is None
    for queue in ("g.p.timer.due", "g.p.timer", "g.p"):
        assert testing.messages(store, queue) == []
    assert "g.p" not in testing.contents(store)["state"]
    clock.advance(100)
    testing.run_until_idle(graph_of(), store)  # a new processor of this name: it reads the queue from its start
    assert testing.messages(store, "out") == []
    clock.advance(100)
    testing.run_until_idle(graph_of(), store)
    assert [message["k"] for message in testing.messages(store, "out")] == ["x", "y"]


# --- redrives ------------------------------------------------------------------------------------

broken = True


def fails(timer: Message, process: cues.Process) -> Message:
    process.state["fired"] = process.state.get("fired", 0) + 1
    if broken or timer["key"] == "bad":
        raise ValueError("no")
    return {**fire(timer, process), "fired": process.state["fired"]}


def failed(store: cues.Store, clock: testing.Clock, **options: Any) -> Graph:
    """A store with two timers that failed, and a graph whose function is repaired but for one key."""
    global broken
    broken = True
    graph = graph_of(fails, **options)
    send(store, {"k": "x", "n": 1, "after": 1}, {"k": "bad", "n": 2, "after": 2})
    testing.run_until_idle(graph, store)
    clock.advance(5)
    testing.run_until_idle(graph, store)
    assert len(testing.messages(store, "errors")) == 2 and not testing.messages(store, "out")
    broken = False
    return graph


DONE = [{"k": "x", "n": 1, "at": START + timedelta(seconds=1), "fired": 1}]


def states(store: cues.Store) -> list[str]:
    return [record.state for record in cues.list_errors(store, settled=True)]


def test_a_timer_that_failed_is_redriven(clock: testing.Clock, store: cues.Store) -> None:
    """Its outputs, state and resolution are one commit; one that fails again is an error message that names the old."""
    graph = failed(store, clock)
    result = cues.redrive(graph, store=store, all=True)
    assert result.resolved == (("errors", 1),) and result.failed_again == (("errors", 2),) and not result.refused
    assert testing.messages(store, "out") == DONE
    again = testing.messages(store, "errors")[2]
    assert again[names.ERR_REDRIVEN] == [{"queue": "errors", "index": 2}]
    assert again[names.ERR_MESSAGES]["timer"][0]["key"] == "bad"
    result = cues.redrive(graph, store=store, all=True)
    assert result.failed_again == (("errors", 3),) and not result.resolved
    testing.run_until_idle(graph, store)
    assert testing.messages(store, "out") == DONE
    assert testing.state(store, "g.p", "x") == {"n": 1, "fired": 1}


def test_a_redriven_timer_that_was_replaced_or_cancelled_is_resolved_without_a_call(
    clock: testing.Clock, store: cues.Store
) -> None:
    graph = failed(store, clock)
    send(store, {"k": "x", "n": 7, "after": 50})
    testing.run_until_idle(graph, store)
    result = cues.redrive(graph, store=store, index=[1])
    assert result.resolved == (("errors", 1),)
    assert testing.messages(store, "out") == []
    clock.advance(60)
    testing.run_until_idle(graph, store)
    assert [message["n"] for message in testing.messages(store, "out")] == [7]


@pytest.mark.slow
def test_a_running_graph_takes_redriven_timers(store: cues.Store) -> None:
    with testing.Clock(START) as clock:
        graph = failed(store, clock)
    with graph.start(store=store):
        result = cues.redrive(graph, store=store, all=True, timeout=60)
        assert len(result.resolved) == 1 and len(result.failed_again) == 1
    assert testing.messages(store, "out") == DONE


def test_a_graph_without_timers_refuses_them(clock: testing.Clock, store: cues.Store) -> None:
    failed(store, clock)
    stream = cues.Stream(lambda message: message, "in", "out", id="p", key="k")
    result = cues.redrive(Graph("g", [cues.Source("in"), stream], errors="errors"), store=store, all=True)
    assert len(result.refused) == 2 and "has no timer= any more" in result.refused[0][2]


def test_redrives_whose_messages_are_gone_are_refused(clock: testing.Clock, store: cues.Store) -> None:
    """As an older version leaves them, which takes the messages and knows nothing of their redrives."""
    graph = failed(store, clock)
    with redriving.ErrorLogs(store, {"errors"}) as logs:
        redrives.ask(store, redriving.select(logs, None, (1,), None))
    log = Log(store, "g.p.timer.due")
    store.core.commit(lambda txn: log.move_front(txn, log.row(txn), log.row(txn).next))
    testing.run_until_idle(graph, store)
    assert states(store) == ["refused", "unresolved"]
    cues.redrive(graph, store=store, index=[1])
    assert testing.messages(store, "out") == DONE


@pytest.mark.slow
def test_death_at_each_point_of_a_redrive_of_timers_redrives_each_once(tmp_path: Path) -> None:
    points = (*faults.STEP_POINTS, *faults.TIMER_POINTS, *faults.REDRIVE_POINTS)
    with testing.Clock(START) as clock:
        with cues.open(tmp_path / "base", durability="process", map_size=4 << 20) as store:
            graph = failed(store, clock)

        def run(crash: object = None) -> Any:
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(tmp_path / "base", tmp_path / "copy")
            with cues.open(tmp_path / "copy") as store:
                for _ in range(3):
                    try:
                        with redriving.ErrorLogs(store, {"errors"}) as logs:
                            chosen = redriving.select(logs, None, (1, 2), None)
                        redrives.ask(store, [record for record in chosen if not record.settled])
                        testing.run_until_idle(graph, store)
                    except testing.Crashed:
                        assert crash is not None
                assert not testing.check_attempts(store)
                found = testing.contents(store)
                return found["queues"]["out"], found["state"], len(found["queues"]["errors"]), states(store)

        expected = run()
        assert expected[0] == DONE and expected[2:] == (3, ["resolved", "failed again", "unresolved"])
        sites = testing.crash_sites(run, points)
        assert {point for point, _ in sites} >= {"timer.inside", "redrive.asking", "redrive.asked", "commit.inside"}
        for point, hit in sites:
            with testing.crash(point, hit, how="raise"):
                assert run(point) == expected, (point, hit)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_backup_has_the_timers_that_are_set_and_those_that_are_due(clock: testing.Clock, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process", map_size=4 << 20) as store:
        send(store, {"k": "x", "n": 1, "after": 1}, {"k": "y", "n": 2, "after": 50})
        testing.run_until_idle(graph_of(), store)
        clock.advance(2)
        with testing.crash("timer.moved", how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(graph_of(), store)
    assert cli(["backup", str(tmp_path / "store"), str(tmp_path / "backup")]) == 0
    assert cli(["restore", str(tmp_path / "backup"), str(tmp_path / "restored")]) == 0
    clock.advance(60)
    for path in ("store", "restored"):
        with cues.open(tmp_path / path) as store:
            testing.run_until_idle(graph_of(), store)
            assert [message["k"] for message in testing.messages(store, "out")] == ["x", "y"], path
            assert store.check() == []


@pytest.mark.slow
def test_a_replay_sets_the_timers_by_its_own_clock(tmp_path: Path) -> None:
    with testing.Clock(START) as clock, cues.open(tmp_path / "store", durability="process", map_size=4 << 20) as store:
        send(store, {"k": "x", "n": 1, "after": 3600}, {"k": "y", "n": 2, "after": -10})
        testing.run_until_idle(graph_of(), store)
        clock.advance(4000)
        testing.run_until_idle(graph_of(), store)
        assert [message["k"] for message in testing.messages(store, "out")] == ["y", "x"]
    given = graph_of()
    graph = Graph("g", list(given.processors.values()), errors="errors", store=tmp_path / "store")
    cues.replay(graph, into=tmp_path / "replayed")
    with cues.open(tmp_path / "replayed") as store, testing.Clock() as clock:
        assert [message["k"] for message in testing.messages(store, "out")] == ["y"]
        clock.advance(4000)
        testing.run_until_idle(graph_of(), store)
        assert [message["k"] for message in testing.messages(store, "out")] == ["y", "x"]


@pytest.mark.interpreted
def test_control_a_redriven_timer_that_is_not_settled_in_its_commit(
    clock: testing.Clock, store: cues.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fires, and its error message looks unresolved."""
    monkeypatch.setattr(copies.RedrivenCopies, "_settle_one", lambda self, *arguments: 0)
    graph = failed(store, clock)
    result = cues.redrive(graph, store=store, index=[1], timeout=30)
    assert not result.resolved and testing.messages(store, "out") == DONE
