"""Pauses (``on_error="pause"``, ``max_errors=``, cues pause): a naive model, deaths at each point, and kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import seeds
from small import until
from test_workers import WAIT_S, Write, write  # noqa: F401

import cues
from cues import Graph, Sink, Source, Store, Stream, faults, testing
from cues.cli.app import run as cli
from cues.engine import pausing, supervisor
from cues.errors import GraphError, InvalidArgument, ProcessorStopped
from cues.graphs.error_rate import ErrorRate
from cues.graphs.pause import ProcessorPause
from cues.steps import commit

START = datetime(2026, 1, 31, tzinfo=UTC)
POINTS = (*faults.STEP_POINTS, *faults.PAUSE_POINTS)
Play = list[tuple[str, Any]]
"""send: numbers; break, mend: a number whose message fails, or not; wait: seconds; run, resume, pause: None."""
Seen = tuple[list[tuple[int, int]], list[int], int | None]
"""The outputs with the state, the numbers on the error queue, and the index before which the processor is paused."""


class Shop:
    """A graph whose function fails for some numbers."""

    def __init__(self, **options: Any) -> None:
        self.bad: set[int] = set()
        self.calls: list[int] = []
        batch = options.get("batch", False)

        def price(order: Any, process: Any) -> Any:
            outputs = []
            for message in order if batch else [order]:
                self.calls.append(message["n"])
                process.state["seen"] = process.state.get("seen", 0) + 1
                if message["n"] in self.bad:
                    raise ValueError(f"{message['n']} is bad")
                outputs.append({"n": message["n"], "seen": process.state["seen"]})
            return outputs if batch else outputs[0]

        self.stream = Stream(price, "in", "out", id="price", **options)
        self.graph = Graph("shop", [Source("in"), self.stream], errors="errors")

    def do(self, store: Store, clock: testing.Clock, verb: str, what: Any) -> None:
        if verb == "send":
            store.queue("in").appender().write_many([{"n": n, "k": "k"} for n in what])
        elif verb == "break":
            self.bad |= {what}
        elif verb == "mend":
            self.bad -= {what}
        elif verb == "wait":
            clock.advance(what)
        elif verb == "run":
            testing.run_until_idle(self.graph, store)
        elif verb == "resume":
            cues.resume(store)
        else:
            cues.pause(store, processor="price")

    def play(self, store: Store, play: Play, crash: tuple[str, int] | None = None) -> list[Seen]:
        """Do all; after a crash do the same once more. Return what is there after each run."""
        seen = []
        with testing.Clock(START) as clock:
            for verb, what in play:
                try:
                    self.do(store, clock, verb, what)
                except testing.Crashed:
                    assert crash is not None
                    self.do(store, clock, verb, what)
                if verb == "run":
                    seen.append(look(store))
        assert not testing.check_attempts(store)
        assert not store.check()
        return seen


def look(store: Store) -> Seen:
    out = [(message["n"], message["seen"]) for message in testing.messages(store, "out")]
    failed = [m["n"] for error in testing.messages(store, "errors") for m in error["err.proc/messages"]["in"]]
    (paused, *_) = pausing.list_pauses(store) or [None]
    return out, failed, (paused.next[0][1] if paused.next else 0) if paused is not None else None


def model(play: Play, limit: ErrorRate | None) -> list[Seen]:
    """One message after another. ``limit`` is max_errors=, None is on_error="pause"."""
    queue: list[int] = []
    bad: set[int] = set()
    out: list[tuple[int, int]] = []
    failed: list[int] = []
    at, now, began, count = 0, 0.0, 0.0, 0
    paused: int | None = None
    seen = []
    for verb, what in play:
        if verb == "send":
            queue += what
        elif verb == "break":
            bad.add(what)
        elif verb == "mend":
            bad.discard(what)
        elif verb == "wait":
            now += what
        elif verb == "resume" and paused is not None:
            paused, count = None, 0
        elif verb == "pause" and paused is None:
            paused = 0
        elif verb == "run":
            while at < len(queue) and paused is None:
                if queue[at] not in bad:
                    out.append((queue[at], len(out) + 1))
                elif limit is None:
                    paused = at + 1
                    break
                else:
                    failed.append(queue[at])
                    if not count or now - began >= limit.seconds:
                        began, count = now, 0
                    count += 1
                    if count == limit.most:
                        paused = at + 2
                at += 1
            seen.append((list(out), list(failed), paused))
    return seen


def at_random(chance: random.Random, rounds: int) -> Play:
    play: Play = [("send", [0]), ("run", None)]
    n = 1
    for _ in range(rounds):
        verb = chance.choice(("send", "send", "mend", "mend", "wait", "resume", "resume", "pause"))
        what: Any = None
        if verb == "send":
            what = list(range(n, n + chance.randrange(1, 9)))
            n = what[-1] + 1
            play += [("break", number) for number in what if chance.random() < 0.3]
        elif verb == "mend":
            what = chance.randrange(n)
        elif verb == "wait":
            what = chance.choice((1, 5, 11))
        play.append((verb, what))
        if chance.random() < 0.7:
            play.append(("run", None))
    return [*play, ("resume", None), ("run", None)]


LIMIT = "3/10s"
KINDS: dict[str, dict[str, Any]] = {
    "pause": {"on_error": "pause"},
    "pause, retries": {"on_error": "pause", "retries": cues.Retry(2, backoff_s=0)},
    "pause, effects": {"on_error": "pause", "side_effects": True, "batch_size": 3},
    "pause, at once": {"on_error": "pause", "concurrency": 4, "key": "k"},
    "limit": {"max_errors": LIMIT},
    "limit, effects": {"max_errors": LIMIT, "side_effects": True},
    "limit, small": {"max_errors": LIMIT, "batch_size": 2},
    "limit, at once": {"max_errors": LIMIT, "concurrency": 4, "key": "k"},
    "limit, timed": {"max_errors": LIMIT, "timeout_s": 60},
}


def check_at_random(kind: str, rounds: int) -> None:
    options = KINDS[kind]
    play = at_random(random.Random(seeds.new()), rounds)
    with testing.temporary_store() as store:
        seen = Shop(**options).play(store, play)
    expected = model(play, ErrorRate.parse(options["max_errors"]) if "max_errors" in options else None)
    assert seen == expected, play


@pytest.mark.parametrize("kind", ["pause", "limit"])
def test_plays_at_random_end_as_the_model_says(kind: str) -> None:
    check_at_random(kind, 15)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_plays_at_random_end_as_the_model_says(kind: str) -> None:
    for _ in range(8):
        check_at_random(kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_runs_meanwhile_ends_as_the_model_says(kind: str) -> None:
    """One start for the whole play: the owner notices each resume, and continues as after a start."""
    options = {**KINDS[kind], "batch_size": 2}
    if "max_errors" in options:
        options["max_errors"] = "3/h"
    play: Play = []
    for verb, what in at_random(random.Random(seeds.new()), 30):
        if verb in ("send", "break", "mend", "resume"):
            play += [(verb, what), *([("run", None)] if verb in ("send", "resume") else [])]
    shop = Shop(**options)
    seen = []
    with testing.temporary_store() as store, shop.graph.start(store=store) as running:
        for verb, what in play:
            if verb == "run":
                assert running.wait_idle(WAIT_S)
                seen.append(look(store))
            else:
                shop.do(store, testing.Clock(START), verb, what)
        assert not testing.check_attempts(store)
    assert seen == model(play, ErrorRate.parse(options["max_errors"]) if "max_errors" in options else None), play


# --- crashes --------------------------------------------------------------------------------------

PLAY: Play = [
    ("send", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    *[("break", n) for n in (3, 4, 5, 7, 8)],
    ("run", None),
    ("mend", 3),
    ("resume", None),
    ("run", None),
    ("mend", 4),
    ("mend", 5),
    ("resume", None),
    ("pause", None),
    ("run", None),
    ("resume", None),
    ("send", [10]),
    ("run", None),
]
CRASHED = {kind: KINDS[kind] for kind in ("pause", "pause, effects", "limit", "limit, effects", "limit, small")}


def check_crashes(options: dict[str, Any], points: tuple[str, ...] = POINTS, least: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    def played(crash: tuple[str, int] | None = None) -> tuple[list[Seen], Any, Any]:
        with testing.temporary_store() as store:
            seen = Shop(**options).play(store, PLAY, crash)
            return seen, testing.contents(store)["state"], pausing.list_pauses(store)

    expected = played()
    sites = testing.crash_sites(played, points)
    assert {point for point, _ in sites} >= least
    for point, hit in sites:
        with testing.crash(point, hit, how="raise"):
            assert played((point, hit)) == expected, (point, hit)


@pytest.mark.parametrize("kind", ["pause", "limit"])
def test_death_at_each_point_of_a_pause_changes_nothing(kind: str) -> None:
    """Failing, pausing, resuming: what the user sees after each run is the same."""
    check_crashes(CRASHED[kind], tuple(faults.PAUSE_POINTS), set(faults.PAUSE_POINTS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CRASHED)
def test_death_at_every_point_of_the_steps_around_a_pause_changes_nothing(kind: str) -> None:
    check_crashes(CRASHED[kind])


@pytest.mark.interpreted
def test_control_a_count_that_is_not_in_the_commit_of_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death between the commits loses the count, and too many messages go to the error queue."""
    real = commit.Committer.commit_parts

    def apart(self: commit.Committer, *arguments: Any) -> None:
        rows, self.failures.rows = self.failures.rows, {}
        real(self, *arguments)
        self.failures.rows = rows
        faults.point("pause.after")
        if rows:
            self.patience.call(self.store.core.commit, self.write_pause)

    monkeypatch.setattr(commit.Committer, "commit_parts", apart)
    with testing.temporary_store() as store:
        assert Shop(max_errors=LIMIT).play(store, PLAY)[0][2] == 6  # without a death it is right
    with pytest.raises(AssertionError, match=r"pause\.after"):
        check_crashes({"max_errors": LIMIT}, ("pause.after",))


@pytest.mark.interpreted
def test_control_a_step_that_goes_on_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from cues.steps.pauses import ErrorWindow

    real = ErrorWindow.left.fget  # type: ignore[attr-defined]
    unlimited = property(lambda self: real(self) if sys._getframe(1).f_code.co_name != "errors_left" else None)
    monkeypatch.setattr(ErrorWindow, "left", unlimited)
    with testing.temporary_store() as store:
        shop = Shop(max_errors=LIMIT)
        assert shop.play(store, PLAY) != model(PLAY, ErrorRate.parse(LIMIT))


# --- what a pause is ------------------------------------------------------------------------------


@pytest.mark.parametrize("bisect", [True, False])
def test_a_batch_that_fails_pauses_before_the_message_that_fails_alone_or_as_a_whole(bisect: bool) -> None:
    shop = Shop(on_error="pause", batch=True, batch_size=4, bisect=bisect)
    shop.bad = {6}
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(1, 10)])
        testing.run_until_idle(shop.graph, store)
        (pause,) = pausing.list_pauses(store)
        first, count = (6, 1) if bisect else (5, 4)
        assert (pause.next, pause.messages, pause.error) == ((("in", first),), count, "ValueError: 6 is bad")
        more = "" if bisect else ", with 3 more in its batch"
        assert f"before message {first} of in{more}, which failed: ValueError: 6 is bad" in pause.text
        assert look(store) == ([(n, n) for n in range(1, first)], [], first)
        shop.bad.clear()
        assert cues.resume(store, processor="shop.price") == [pause]
        testing.run_until_idle(shop.graph, store)
        assert look(store) == ([(n, n) for n in range(1, 10)], [], None)


def test_a_paused_processor_calls_its_function_again_only_after_the_resume() -> None:
    shop = Shop(on_error="pause", retries=cues.Retry(3, backoff_s=0))
    shop.bad = {2}
    other: list[int] = []
    graph = Graph(
        "shop",
        [Source("in"), shop.stream, Sink(lambda message: other.append(message["n"]), "in", id="other")],
        errors="errors",
    )
    with testing.temporary_store() as store, graph.start(store=store) as running:
        for n in (1, 2, 3):
            running.send("in", {"n": n})
        assert running.wait_idle(WAIT_S)
        assert (shop.calls, other) == ([1, 2, 2, 2], [1, 2, 3])
        assert {unit.processor: unit.state for unit in running.standings()}["shop.price"] == "paused"
        (pause,) = running.pauses()
        assert running.resume() == [pause]
        until(running.pauses)
        assert running.wait_idle(WAIT_S)
        assert shop.calls == [1, 2, 2, 2, 2, 2, 2]
        shop.bad.clear()
        assert [pause.calls for pause in running.resume("price")] == [3]
        assert running.wait_idle(WAIT_S)
        assert shop.calls[7:] == [2, 3] and not running.pauses()


def test_redrives_are_made_during_a_pause_and_fail_as_errors() -> None:
    shop = Shop(max_errors="1/h", batch_size=10)
    shop.bad = {1, 2}
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in (1, 2, 3)])
        testing.run_until_idle(shop.graph, store)
        assert look(store) == ([], [1], 2)
        assert cues.redrive(shop.graph, store=store, all=True).failed_again == (("errors", 1),)
        shop.bad = {2}
        assert cues.redrive(shop.graph, store=store, all=True).resolved == (("errors", 2),)
        assert look(store) == ([(1, 1)], [1, 1], 2)


def test_errors_from_before_the_option_are_redriven_to_the_error_queue() -> None:
    """Several failed messages in one step of the redriver: one fails again, and does not stop those after it."""
    before, after = Shop(), Shop(on_error="pause")
    before.bad, after.bad = {1, 2, 3}, {2}
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in (1, 2, 3)])
        testing.run_until_idle(before.graph, store)
        result = cues.redrive(after.graph, store=store, all=True)
        assert (result.resolved, result.failed_again) == ((("errors", 1), ("errors", 3)), (("errors", 2),))
        assert look(store) == ([(1, 1), (3, 2)], [1, 2, 3, 2], None)


def test_a_timer_that_fails_pauses_its_processor_and_fires_after_the_resume() -> None:
    bad = [True]

    def handle(message: Any, process: Any) -> None:
        process.timer(message["key"], process.now, "t")

    def fire(timer: Any, process: Any) -> Any:
        if bad:
            raise ValueError("not now")
        process.state["fired"] = process.state.get("fired", 0) + 1
        return {"key": timer["key"], "fired": process.state["fired"]}

    stream = Stream(handle, "in", "out", id="p", key="key", timer=fire, on_error="pause")
    graph = Graph("g", [Source("in"), stream], errors="errors")
    with testing.Clock(START) as clock, testing.temporary_store() as store:
        store.queue("in").appender().write({"key": "x"})
        for _ in range(2):
            testing.run_until_idle(graph, store)
            clock.advance(1)
        (pause,) = pausing.list_pauses(store)
        assert pause.text == "before its next timer, which failed: ValueError: not now"
        store.queue("in").appender().write({"key": "y"})
        testing.run_until_idle(graph, store)
        assert not testing.messages(store, "out") + testing.messages(store, "errors")
        bad.clear()
        cues.resume(store)
        testing.run_until_idle(graph, store)
        clock.advance(1)
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "out") == [{"key": "x", "fired": 1}, {"key": "y", "fired": 1}]
        assert not store.check()


def test_a_pause_goes_with_its_processor(tmp_path: Path) -> None:
    """A rename and a backup keep it, a seek keeps it, and to forget the processor deletes it."""
    shop = Shop(on_error="pause")
    shop.bad = {2}
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in (1, 2, 3)])
        testing.run_until_idle(shop.graph, store)
        store.backup(tmp_path / "copy")
        renamed = Graph(
            "shop",
            [Source("in"), Stream(shop.stream.fn, "in", "out", id="cost", renamed_from="price", on_error="pause")],
        )
        testing.run_until_idle(renamed, store)
        assert [(pause.processor, pause.next) for pause in pausing.list_pauses(store)] == [("shop.cost", (("in", 2),))]
        from cues.operate import processors as operate

        operate.seek(store, operate.plan_seek(store, "shop.cost", 3), reset_state=False)
        assert pausing.list_pauses(store)
        cues.resume(store)
        testing.run_until_idle(renamed, store)
        assert look(store) == ([(1, 1), (3, 2)], [], None)
        cues.pause(store, processor="cost")
        testing.run_until_idle(Graph("shop", [Source("in")]), store)
        operate.forget(store, "shop.cost")
        assert not pausing.list_pauses(store) and not store.check()
    from cues.tools.backup import restore

    restore(str(tmp_path / "copy"), str(tmp_path / "again"))
    with cues.open(tmp_path / "again") as again:
        assert [pause.next for pause in pausing.list_pauses(again)] == [(("in", 2),)]


def test_a_replay_has_no_limit_and_ends_at_a_message_that_fails(tmp_path: Path) -> None:
    """Run again with a corrected function, it continues at this message."""
    limited, strict = Shop(max_errors="2/d"), Shop(on_error="pause")
    limited.bad, strict.bad = {1, 2, 3, 4}, {3}
    with testing.temporary_store() as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(6)])
        for _ in range(3):
            testing.run_until_idle(limited.graph, store)
            cues.resume(store)
        expected = look(store)
        assert expected == ([(0, 1), (5, 2)], [1, 2, 3, 4], None)
        assert cues.replay(limited.graph, into=tmp_path / "limited", store=store.path).equal
        with pytest.raises(ProcessorStopped, match=r"In the replay, shop\.price is paused before message 4 of in"):
            cues.replay(strict.graph, into=tmp_path / "strict", store=store.path)
        strict.bad = set()
        cues.replay(strict.graph, into=tmp_path / "strict", store=store.path)
        with cues.open(tmp_path / "strict") as new:
            assert look(new) == ([(n, n + 1) for n in range(6)], [], None)
        assert look(store) == expected


def test_a_target_that_fails_stops_its_processor_also_with_the_option() -> None:
    from cues.errors import CheckpointError

    def fails(message: Any) -> None:
        raise CheckpointError("The target is away.", "wait.")

    graph = Graph("g", [Source("in"), Sink(fails, "in", id="s", on_error="pause")])
    with testing.temporary_store() as store:
        store.queue("in").appender().write({"n": 1})
        with pytest.raises(ProcessorStopped):
            testing.run_until_idle(graph, store)
        assert not pausing.list_pauses(store)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100/min", (100, 60)), ("20/10s", (20, 10)), ("1000 / 2 h", (1000, 7200)), ("1_000/day", (1000, 86_400))],
)
def test_rates(text: str, rate: tuple[int, int]) -> None:
    assert tuple(ErrorRate.parse(text)) == rate


@pytest.mark.parametrize(
    "value", ["", "100", "100/", "0/min", "/min", "1/0s", "1/fortnight", "-1/s", "1.5/s", 100, "_/s"]
)
def test_rates_that_are_none(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a number of error messages within a time") as found:
        ErrorRate.parse(value)
    assert "'100/min'" in found.value.hint


@pytest.mark.parametrize(
    ("options", "errors", "text"),
    [
        ({"on_error": "stop"}, "errors", "has on_error='stop'"),
        ({"max_errors": "many"}, "errors", "max_errors='many' is not a number of error messages"),
        ({"max_errors": "1/s", "on_error": "pause"}, "errors", "pauses at the first failure"),
        ({"max_errors": "1/s"}, None, "no error queue"),
        ({"on_error": "pause", "strategy": "at-most-once"}, None, "at-most-once, which takes no message a second time"),
        ({"max_errors": "1/s", "strategy": "at-most-once"}, "errors", "at-most-once, which takes no message"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], errors: str | None, text: str) -> None:
    with pytest.raises(GraphError, match=text):
        Graph("g", [Source("in"), Stream(lambda m: m, "in", "out", id="p", **options)], errors=errors).plan()
    with pytest.raises(GraphError, match="takes no option 'on_error'"):
        Source("in", list, on_error="pause")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("of_graph", "reads", "own", "hint"),
    [
        (None, "in", {}, r"give the graph an error queue: cues.Graph\(…, errors='errors'\)"),
        ("bad", "in", {"errors": None}, "give it an error queue of its own: errors='errors-of-s'"),
        ("bad", "bad", {}, "give it an error queue of its own: errors='errors-of-s'"),
    ],
)
def test_the_advice_to_give_an_error_queue_fits_the_graph(
    of_graph: str | None, reads: str, own: dict[str, Any], hint: str
) -> None:
    """At the declaration, and when the processor stops."""

    def fails(message: Any) -> None:
        raise ValueError("no")

    with pytest.raises(GraphError, match=hint):
        Graph("g", [Source("in"), Sink(fails, reads, id="s", max_errors="2/d", **own)], errors=of_graph).plan()
    with testing.temporary_store() as store:
        store.queue(reads).appender().write({"n": 1})
        with pytest.raises(ProcessorStopped, match=hint):
            testing.run_until_idle(
                Graph("g", [Source("in"), Sink(fails, reads, id="s", **own)], errors=of_graph), store
            )


def test_a_processor_with_an_error_queue_that_stops_is_not_told_to_get_one() -> None:
    from cues.errors import CheckpointError

    def fails(message: Any) -> None:
        raise CheckpointError("The target is away.", "wait.")

    with testing.temporary_store() as store:
        store.queue("in").appender().write({"n": 1})
        with pytest.raises(ProcessorStopped) as stopped:
            testing.run_until_idle(Graph("g", [Source("in"), Sink(fails, "in", id="s")], errors="bad"), store)
        assert "error queue" not in stopped.value.hint


def test_sources_and_unknown_processors_cannot_be_paused() -> None:
    shop = Shop()
    graph = Graph("shop", [Source("in", lambda: iter([{"n": 1}]), resume="skip"), shop.stream])
    with testing.temporary_store() as store:
        testing.run_until_idle(graph, store)
        with pytest.raises(InvalidArgument, match=r"shop\.in is a source"):
            cues.pause(store, processor="in")
        with pytest.raises(InvalidArgument, match=r"no processor 'prise'; it has shop\.in, shop\.price"):
            cues.resume(store, processor="prise")
        assert [pause.processor for pause in cues.pause(store)] == ["shop.price"]
        assert cues.pause(store) == [] and len(cues.resume(store)) == 1 and cues.resume(store) == []


def test_errors_of_a_processor_that_was_renamed_twice_are_under_its_last_name() -> None:
    def fails(message: Any) -> Any:
        raise ValueError(message["n"])

    names = [("one", None), ("two", "one"), ("three", "two")]
    with testing.temporary_store() as store:
        for n, (id, former) in enumerate(names):
            store.queue("in").appender().write({"n": n})
            graph = Graph("g", [Source("in"), Stream(fails, "in", "out", id=id, renamed_from=former)], errors="errors")
            testing.run_until_idle(graph, store)
        assert [record.processor for record in cues.list_errors(store)] == ["g.three"] * 3
        mended = Graph("g", [Source("in"), Stream(lambda m: m, "in", "out", id="three")], errors="errors")
        assert len(cues.redrive(mended, store=store, processor="three").resolved) == 3
        assert [message["n"] for message in testing.messages(store, "out")] == [0, 1, 2]


# --- the command line -----------------------------------------------------------------------------

FILE = """
import pathlib
import cues

HERE = pathlib.Path(__file__).parent
graph = cues.Graph("shop", errors="errors", store=str(HERE / "store"), durability="process")
graph.source("orders")

@graph.stream("orders", "priced", OPTIONS)
def price(order):
    if order["n"] % 7 == 3 and not (HERE / "mended").exists():
        raise ValueError(f"order {order['n']}\\nwith more")
    return {"n": order["n"]}
"""


def test_a_run_ends_says_what_is_paused_and_fails_on_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shop.py"
    path.write_text(FILE.replace("OPTIONS", 'on_error="pause"'))
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(20)])

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli([*arguments])
        return (code, *capsys.readouterr())

    code, out, _ = run("run", str(path), "--idle-exit", "0", "--table")
    assert code == 0
    assert "shop.price is paused, " in out and "before message 4 of orders, which failed: ValueError: order 3 …" in out
    assert f"cues resume {path} --processor shop.price" in out
    code, out, _ = run("run", str(path), "--idle-exit", "0", "--fail-on-errors", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert code == 1 and summary["paused"][0]["next"] == [{"queue": "orders", "index": 4}]
    _, out, _ = run("status", str(path), "--table")
    assert "shop.price is paused" in out and "cues resume" in out
    _, out, _ = run("status", str(path), "--json")
    (row,) = [json.loads(line) for line in out.splitlines() if '"shop.price"' in line]
    assert row["paused"]["error"] == "ValueError: order 3 …" and "line" in row["paused"]["trace"]
    _, out, _ = run("metrics", str(path))
    values = [line.split()[-1] for line in out.splitlines() if line.startswith("cues_processor_paused")]
    assert sorted(map(float, values)) == [0.0, 1.0] or list(map(float, values)) == [1.0]
    (tmp_path / "mended").touch()
    code, out, _ = run("resume", str(path), "--processor", "price", "--table")
    assert code == 0 and "shop.price goes on" in out
    code, out, _ = run("resume", str(path), "--table")
    assert code == 0 and "no processor is paused" in out
    code, out, _ = run("run", str(path), "--idle-exit", "0", "--fail-on-errors", "--table")
    assert code == 0 and "paused" not in out
    code, out, _ = run("pause", str(path), "--processor", "price", "--reason", "look", "--table")
    assert code == 0 and "shop.price is paused. To continue: cues resume" in out
    assert ": look" in run("status", str(path), "--table")[1]
    code, _, err = run("resume", str(path), "--processor", "prise")
    assert code == 1 and "no processor 'prise'" in err and "Try:" in err
    with cues.open(tmp_path / "store") as store:
        assert [message["n"] for message in testing.messages(store, "priced")] == list(range(20))


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cues", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", ['on_error="pause", batch_size=3', 'max_errors="2/h", batch_size=5'])
def test_runs_that_are_killed_and_resumed_lose_and_double_nothing(tmp_path: Path, options: str) -> None:
    """kill -9 at a random moment after a message came; cues resume from another process each time."""
    chance = random.Random(seeds.new())
    slow = FILE.replace("OPTIONS", options).replace("    if order", "    import time; time.sleep(0.01)\n    if order")
    (tmp_path / "shop.py").write_text(slow)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(60)])

    def place() -> int:
        with cues.open(tmp_path / "store", readonly=True) as store:
            if "priced" not in store.queues():
                return 0
            return sum(len(store.queue(name)) for name in ("priced", "errors") if name in store.queues())

    for life in range(4):
        before = place()
        process = subprocess.Popen(
            [sys.executable, "-m", "cues", "run", "shop.py", "--quiet"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: place() > before or paused(tmp_path))
            time.sleep(chance.random() * 0.2)  # any moment is as good as another
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, 9)
            process.wait()
        if life % 2:
            assert command(tmp_path, "resume", "shop.py").returncode == 0
    if "pause" in options:
        (tmp_path / "mended").touch()
    for _ in range(12):
        assert command(tmp_path, "run", "shop.py", "--idle-exit", "0").returncode == 0
        if not paused(tmp_path):
            break
        assert command(tmp_path, "resume", "shop.py").returncode == 0
    with cues.open(tmp_path / "store") as store:
        assert not store.check() and not pausing.list_pauses(store)
        out = [message["n"] for message in testing.messages(store, "priced")]
        failed = [e["err.proc/messages"]["orders"][0]["n"] for e in testing.messages(store, "errors")]
        bad = [] if "pause" in options else [n for n in range(60) if n % 7 == 3]
        assert (out, failed) == ([n for n in range(60) if n not in bad], bad)


def paused(folder: Path) -> list[ProcessorPause]:
    with cues.open(folder / "store", readonly=True) as store:
        return pausing.list_pauses(store)


# --- worker processes -----------------------------------------------------------------------------

KILLS = """
graph = cues.Graph("bad", store=HERE + "/store", durability="process", errors="errors")
graph.source("in")

@graph.stream("in", "out", OPTIONS)
def crash(message):
    if message["n"] == 5 and not os.path.exists(HERE + "/mended"):
        with open(HERE + "/deaths", "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    if message["n"] == 7 and not os.path.exists(HERE + "/good"):
        raise ValueError("seven")
    return message

@graph.stream("in", "other")
def other(message):
    return message
"""


# The first death is in a batch, so the next one is before another message, and counts from one. And if the other
# processor was in a step at the last death, too, the one at fault gets a worker of its own, which must die once more.
MOST_DEATHS = supervisor.DEATHS_MAX + 2


def deaths(folder: Path) -> int:
    path = folder / "deaths"
    return len(path.read_text()) if path.exists() else 0


@pytest.mark.slow
def test_a_message_that_kills_its_worker_pauses_its_processor_and_is_tried_again(
    write: Write,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paused after some deaths in its call; after a resume it kills as many workers; then it is mended."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    graph = write(KILLS.replace("OPTIONS", 'on_error="pause"'))
    with cues.open(str(graph.store), durability="process") as store:
        store.queue("in").appender().write_many({"n": n} for n in range(20))
    with graph.start(workers=1) as running:
        until(lambda: [pause.next for pause in running.pauses()] == [(("in", 6),)])
        assert running.wait_idle(WAIT_S)
        first = deaths(tmp_path)
        assert first <= MOST_DEATHS and "killed by SIGKILL" in running.pauses()[0].error
        assert len(running.messages("other")) == 20
        running.resume("crash")
        until(lambda: deaths(tmp_path) >= first + supervisor.DEATHS_MAX and running.pauses())
        assert running.wait_idle(WAIT_S)
        assert not running.stopped
        (tmp_path / "mended").touch()
        running.resume("crash")
        until(lambda: [pause.next for pause in running.pauses()] == [(("in", 8),)])
        (tmp_path / "good").touch()
        running.resume()
        assert running.wait_idle(WAIT_S)
        assert [message["n"] for message in running.messages("out")] == list(range(20))
        assert not running.messages("errors")


@pytest.mark.slow
def test_a_redriven_message_that_kills_its_worker_is_an_error_again(
    write: Write,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails first, is redriven, and kills some workers, while the processor goes on with other messages."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    graph = write(
        KILLS.replace("OPTIONS", "batch_size=1").replace(
            "    if message",
            "    if not os.path.exists(HERE + '/begun') and message['n'] in (4, 5):\n"
            "        raise ValueError('not yet')\n    if message",
            1,
        )
    )
    with cues.open(str(graph.store), durability="process") as store:
        store.queue("in").appender().write_many({"n": n} for n in range(20))
    (tmp_path / "good").touch()
    with graph.start(workers=1) as running:
        assert running.wait_idle(WAIT_S)
        assert [error["err.proc/messages"]["in"][0]["n"] for error in running.messages("errors")] == [4, 5]
        (tmp_path / "begun").touch()
        for n in range(20, 60):
            running.send("in", {"n": n})
        result = running.redrive(all=True, timeout=WAIT_S)
        assert (result.resolved, result.failed_again) == ((("errors", 1),), (("errors", 2),)), result
        assert running.wait_idle(WAIT_S) and not running.stopped
        *_, again = running.messages("errors")
        assert again["err/redriven"] == [{"queue": "errors", "index": 2}]
        died = deaths(tmp_path)
        assert supervisor.DEATHS_MAX <= died <= MOST_DEATHS
        assert "times in a row" in again["err/cause"][0]["message"]
        assert "killed by SIGKILL" in again["err/cause"][0]["message"]
        (tmp_path / "mended").touch()
        assert running.redrive(all=True, timeout=WAIT_S).resolved == (("errors", 3),)
        assert sorted(message["n"] for message in running.messages("out")) == list(range(60))


@pytest.mark.slow
def test_a_timer_that_kills_its_worker_is_an_error(
    write: Write,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    graph = write(
        """
        graph = cues.Graph("bad", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        @graph.stream("in", "out", key="n")
        def later(message, process):
            process.timer(message["n"], process.now)

        @graph.timer("later")
        def fire(timer):
            if timer["key"] == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"n": timer["key"]}
        """
    )
    with cues.open(str(graph.store), durability="process") as store:
        store.queue("in").appender().write_many({"n": n} for n in range(10))
    with graph.start(workers=1) as running:
        until(lambda: len(running.messages("out")) == 9 and running.messages("errors"))
        assert running.wait_idle(WAIT_S) and not running.stopped
        assert sorted(message["n"] for message in running.messages("out")) == [n for n in range(10) if n != 5]
        (failed,) = running.messages("errors")
        assert failed["err.proc/messages"]["timer"][0]["key"] == 5
        assert "killed by SIGKILL" in failed["err/cause"][0]["message"]
