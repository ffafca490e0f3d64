"""Imperative functions: what they read and write by themselves commits with the step, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from small import feed, numbers, run

import cues
from cues import AnyOf, Graph, Retry, Sink, Store, Stream, testing
from cues.base.names import HASH, MESSAGE_INDEX, SNAPSHOT, TAILER_INDICES, TYPE
from cues.engine.assembly import assemble
from cues.errors import (
    CodecError,
    Diverged,
    GraphError,
    InvalidArgument,
    MessageTooLarge,
    ProcessorStopped,
    ReservedKey,
    ReturnError,
    TopologyChanged,
)
from cues.graphs import draw
from cues.graphs.processor_rows import read_row
from cues.records import sealed
from cues.steps import ownership

Message = dict[str, Any]


def positions(store: Store) -> dict[str, int]:
    return testing.contents(store)["positions"]


def priced(message: Message, process: Any) -> Message:
    """One rate a message, and a line in the log."""
    rate = process.tailers["rates"].read()
    process.appenders["log"].write({"n": message["n"]})
    return {"n": (message["n"], rate and rate["n"])}


def stream(function: Callable[..., Any] = priced, **options: Any) -> Stream:
    keywords = {"id": "s", "tailers": "rates", "appenders": "log", **options}
    return Stream(function, "a", "out", **keywords)


# --- one commit ---------------------------------------------------------------------------------


def test_moves_and_writes_are_part_of_the_steps_commit(store: Store) -> None:
    """Nothing is to be seen while the step runs; then all of it, under the step's hash, named in its attempt."""
    during = []

    def look(message: Message, process: Any) -> Message:
        found = priced(message, process)
        during.append((positions(store), numbers(store, "log"), process.tailers["rates"].index))
        return found

    feed(store, a=range(3), rates=range(100, 102))
    run(store, stream(look))
    start = {"g.s.a": 1, "g.s.rates": 1}
    assert during == [(start, [], 2), (start, [], 3), (start, [], 3)]
    assert numbers(store, "out") == [(0, 100), (1, 101), (2, None)]
    assert numbers(store, "log") == [0, 1, 2]
    assert positions(store) == {"g.s.a": 4, "g.s.rates": 3}
    snapshot, attempt = testing.messages(store, "g.s")
    assert snapshot[TAILER_INDICES] == {"g.s.a": 1}  # what it takes; the rest is the function's own business
    assert attempt[MESSAGE_INDEX] == {"out": 1, "log": 1}
    for queue in ("out", "log"):
        tailer = store.queue(queue).tailer()
        for _ in tailer:
            assert tailer.envelope is not None and tailer.envelope.hash == attempt[HASH]


def test_a_new_step_and_a_new_start_continue_from_the_committed_positions(store: Store) -> None:
    feed(store, a=range(4), rates=range(100, 110))
    run(store, stream(batch_size=1), steps_max=2)
    run(store, stream(batch_size=1))
    assert numbers(store, "out") == [(n, 100 + n) for n in range(4)]


def test_the_hash_does_not_depend_on_what_is_read_imperatively(store: Store) -> None:
    """A retry after a death finds more on the queue than the try that died; its hash is the same."""
    hashes = []

    def look(message: Message, process: Any) -> Message:
        hashes.append((process.delivery_hash, process.delivery.start, len(process.tailers["rates"].read_many(100))))
        return message

    feed(store, a=range(2), rates=range(3))
    graph = Graph("g", [stream(look, appenders=None, side_effects=True, step_s=None)])
    with testing.crash("commit.inside", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph, store)
    feed(store, rates=range(3))
    report = testing.run_until_idle(graph, store)
    assert report.decisions == {"s": "rewind"}
    assert hashes[2:] == [(hashes[0][0], {"g.s.a": 1}, 6), (hashes[1][0], {"g.s.a": 2}, 0)]
    assert hashes[0][2] == 3 and positions(store) == {"g.s.a": 3, "g.s.rates": 7}


@pytest.mark.parametrize("side_effects", [False, True])
def test_a_call_that_fails_after_writing_and_reading_leaves_nothing(store: Store, side_effects: bool) -> None:
    """Of two calls in a step the second fails: the first's doings commit, and the third reads what the second had."""

    def fails(message: Message, process: Any) -> Message:
        found = priced(message, process)
        if message["n"] == 1:
            raise ValueError("one")
        return found

    feed(store, a=range(3), rates=range(100, 110))
    run(store, stream(fails, side_effects=side_effects), errors="errors")
    assert numbers(store, "out") == [(0, 100), (2, 101)] and numbers(store, "log") == [0, 2]
    assert positions(store) == {"g.s.a": 4, "g.s.rates": 3}
    assert len(testing.messages(store, "errors")) == 1


def test_without_an_error_queue_the_step_is_cut_in_front_of_the_failure(store: Store) -> None:
    def fails(message: Message, process: Any) -> Message:
        found = priced(message, process)
        if message["n"] == 2:
            raise ValueError("two")
        return found

    feed(store, a=range(5), rates=range(100, 110))
    report = run(store, stream(fails), stopped="return")
    assert isinstance(report.stopped["s"].__cause__, ValueError)
    assert numbers(store, "out") == [(0, 100), (1, 101)] and numbers(store, "log") == [0, 1]
    assert positions(store) == {"g.s.a": 3, "g.s.rates": 3}
    run(store, stream())
    assert numbers(store, "out") == [(n, 100 + n) for n in range(5)] and numbers(store, "log") == list(range(5))


def test_a_call_that_is_retried_begins_where_it_began(store: Store) -> None:
    tries: list[tuple[Any, ...]] = []

    def fails_twice(message: Message, process: Any) -> Message:
        tailer = process.tailers["rates"]
        tries.append((message["n"], tailer.index, tailer.direction, tailer.last_read_index, tailer.envelope))
        tailer.to_end()
        tailer.direction = "backward"
        assert tailer.read() == {"n": 109}
        process.appenders["log"].write_many([{"n": message["n"]}, {"n": len(tries)}])
        if len(tries) in (1, 2, 4):
            raise ValueError("again")
        return {"n": tailer.index}

    feed(store, a=range(2), rates=range(100, 110))
    run(store, stream(fails_twice, retries=Retry(3, 0)))
    fresh = ("forward", None, None)
    assert tries == [(0, 1, *fresh), (0, 1, *fresh), (0, 1, *fresh), (1, 10, *fresh), (1, 10, *fresh)]
    assert numbers(store, "log") == [0, 3, 1, 5] and numbers(store, "out") == [10, 10]


@pytest.mark.parametrize("result", [{"n": object()}, 7, {"q/mine": 1}], ids=["no codec", "no message", "reserved"])
@pytest.mark.parametrize("errors", ["errors", None])
def test_a_result_that_cannot_be_written_takes_the_calls_doings_with_it(
    store: Store, result: Any, errors: str | None
) -> None:
    def bad(message: Message, process: Any) -> Any:
        found = priced(message, process)
        return result if message["n"] == 1 else found

    feed(store, a=range(3), rates=range(100, 110))
    run(store, stream(bad), errors=errors, stopped="return")
    if errors:
        assert numbers(store, "out") == [(0, 100), (2, 101)] and numbers(store, "log") == [0, 2]
    else:
        assert numbers(store, "out") == [(0, 100)] and numbers(store, "log") == [0]
        assert positions(store) == {"g.s.a": 2, "g.s.rates": 2}


@pytest.mark.parametrize("point", ["commit.before", "commit.outputs", "commit.inside"])
def test_a_step_that_does_not_commit_leaves_nothing_and_is_done_again(store: Store, point: str) -> None:
    feed(store, a=range(3), rates=range(100, 110))
    graph = Graph("g", [stream()])
    assembly = assemble(graph, store)
    try:
        (stepper,) = assembly.steppers
        with testing.crash(point, how="raise"), pytest.raises(testing.Crashed):
            stepper.step()
        assert positions(store) == {"g.s.a": 1, "g.s.rates": 1} and numbers(store, "log") == []
        assert stepper.step() == "committed"  # the same object, which must not remember
    finally:
        assembly.close()
    assert numbers(store, "out") == [(0, 100), (1, 101), (2, 102)] and numbers(store, "log") == [0, 1, 2]


# --- shapes -------------------------------------------------------------------------------------


def test_a_stream_may_have_no_outputs_but_its_appenders(store: Store) -> None:
    def routed(message: Message, process: Any) -> None:
        process.appenders["odd" if message["n"] % 2 else "even"].write(message)

    feed(store, a=range(5))
    graph = Graph("g", [Stream(routed, "a", None, appenders=("odd", "even"))])
    testing.run_until_idle(graph, store)
    assert numbers(store, "odd") == [1, 3] and numbers(store, "even") == [0, 2, 4]
    for outputs in ((), [], {}):
        assert Stream(routed, "a", outputs, appenders="odd").outputs is None


def test_what_a_stream_without_outputs_returns_is_refused(store: Store) -> None:
    def returns(message: Message, process: Any) -> Message:
        process.appenders["log"].write(message)
        return message

    feed(store, a=[1])
    report = run(store, Stream(returns, "a", None, appenders="log"), stopped="return")
    assert isinstance(report.stopped["returns"].__cause__, ReturnError)
    assert numbers(store, "log") == []


def test_an_appender_on_an_output_queue_writes_after_the_returned_messages(store: Store) -> None:
    def both(message: Message, process: Any) -> Message:
        process.appenders["more"].write({"n": -message["n"]})
        return message

    feed(store, a=[1, 2])
    run(store, Stream(both, "a", "out", appenders={"more": "out"}))
    assert numbers(store, "out") == [1, 2, -1, -2]
    assert testing.messages(store, "g.both")[1][MESSAGE_INDEX] == {"out": 1}


def test_a_sink_reads_and_takes_no_appenders(store: Store) -> None:
    seen = []

    def look(message: Message, process: Any) -> None:
        seen.append((message["n"], process.tailers["r"].read()))

    feed(store, a=range(2), rates=[7])
    run(store, Sink(look, "a", tailers={"r": "rates"}))
    assert seen == [(0, {"n": 7}), (1, None)] and positions(store) == {"g.look.a": 3, "g.look.rates": 2}
    with pytest.raises(GraphError, match="takes no option 'appenders'"):
        Sink(look, "a", appenders="log")


def test_joins_alts_forks_and_state_beside_it(store: Store) -> None:
    def join(left: Message, right: Message, process: Any) -> dict[str, Any]:
        process.state["n"] = process.state.get("n", 0) + 1
        rate = process.tailers["rates"].read()
        process.appenders["log"].write({"n": process.state["n"]})
        return {"x": {"n": left["n"] + right["n"]}, "y": {"n": rate["n"]} if rate else None}

    def alts(message: Message, process: Any) -> Message:
        process.appenders["log"].write({"n": process.binding})
        return {"n": process.tailers["rates"].peek()["n"]}

    feed(store, a=range(2), b=range(10, 12), rates=[100])
    run(
        store,
        Stream(join, {"left": "a", "right": "b"}, {"x": "x", "y": "y"}, tailers="rates", appenders="log"),
        Stream(alts, AnyOf("a", "b"), "z", tailers="rates", appenders="log"),
    )
    assert numbers(store, "x") == [10, 12] and numbers(store, "y") == [100] and numbers(store, "z") == [100] * 4
    assert sorted(numbers(store, "log"), key=str) == [1, 2, "a", "a", "b", "b"]


def test_a_batch_function_is_imperative_as_a_whole(store: Store) -> None:
    calls = []

    def batched(messages: list[Message], process: Any) -> list[Message]:
        calls.append([m["n"] for m in messages])
        rates = process.tailers["rates"].read_many(len(messages))
        process.appenders["log"].write_many(rates)
        if len(calls) == 1 or messages[0]["n"] == 2:
            raise ValueError("again")
        return [{"n": (m["n"], r["n"])} for m, r in zip(messages, rates)]

    feed(store, a=range(6), rates=range(100, 110))
    run(store, stream(batched, batch=True, batch_size=2, bisect=False, retries=Retry(2, 0)), errors="errors")
    assert numbers(store, "out") == [(0, 100), (1, 101), (4, 102), (5, 103)]
    assert numbers(store, "log") == [100, 101, 102, 103]
    assert positions(store) == {"g.s.a": 7, "g.s.rates": 5}
    assert len(testing.messages(store, "errors")) == 1


@pytest.mark.parametrize("bisect", [False, True])
def test_a_batch_whose_output_cannot_be_written_reads_and_writes_nothing(store: Store, bisect: bool) -> None:
    """Nor does a part of it. Message 1, alone, reads the next two."""

    def batched(messages: list[Message], process: Any) -> list[Message]:
        process.appenders["log"].write_many(process.tailers["rates"].read_many(2))
        return [{"n": object()}] if messages[0]["n"] == 0 else messages

    feed(store, a=range(4), rates=range(100, 110))
    run(store, stream(batched, batch=True, batch_size=2, bisect=bisect), errors="errors")
    assert numbers(store, "out") == [*[1] * bisect, 2, 3] and numbers(store, "log") == [100, 101, *[102, 103] * bisect]
    assert positions(store) == {"g.s.a": 5, "g.s.rates": 5 if bisect else 3}


def test_an_async_function_is_imperative_too(store: Store) -> None:
    async def waits(message: Message, process: Any) -> Message:
        await asyncio.sleep(0)
        return priced(message, process)

    feed(store, a=range(3), rates=range(100, 110))
    run(store, stream(waits))
    assert numbers(store, "out") == [(n, 100 + n) for n in range(3)] and numbers(store, "log") == [0, 1, 2]


def test_at_most_once_commits_the_moves_with_the_attempt(store: Store) -> None:
    """A death loses the step that took the message; what it had read imperatively is read by the next."""
    feed(store, a=range(4), rates=range(100, 110))
    graph = Graph("g", [stream(strategy="at-most-once", batch_size=1)])
    with testing.crash("commit.before", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph, store)
    assert positions(store) == {"g.s.a": 2, "g.s.rates": 1}
    testing.run_until_idle(graph, store)
    assert numbers(store, "out") == [(1, 100), (2, 101), (3, 102)] and numbers(store, "log") == [1, 2, 3]
    assert positions(store) == {"g.s.a": 5, "g.s.rates": 4}


def test_a_filter_that_stops_a_message_moves_nothing(store: Store) -> None:
    feed(store, a=range(4), rates=range(100, 110))
    run(store, stream(where=lambda message: message["n"] % 2))
    assert numbers(store, "out") == [(1, 100), (3, 101)]


def test_metadata_travels_with_what_is_written(store: Store) -> None:
    feed(store, a=[1], rates=[100])
    run(store, stream(), queues={"*": {"metadata": ["t", "tx"]}})
    log = store.queue("log").tailer(meta=True).read()
    out = store.queue("out").tailer(meta=True).read()
    assert log is not None and out is not None
    assert log["q/meta"]["q/queue"]["a"] == out["q/meta"]["q/queue"]["a"] == {"q/t": 1}
    assert log["q/meta"]["tx/t"] == 1


# --- the tailer ---------------------------------------------------------------------------------


def test_a_tailer_goes_anywhere_and_the_next_call_begins_there(store: Store) -> None:
    seen = []

    def wander(message: Message, process: Any) -> None:
        tailer = process.tailers["rates"]
        n = message["n"]
        begin = tailer.index
        if n == 0:
            tailer.to_index(4)
        elif n == 1:
            seen.append([tailer.read(), tailer.peek(), tailer.last_read_index, tailer.envelope.index])
        elif n == 2:
            tailer.to_start()
            seen.append(list(tailer))
        elif n == 3:
            tailer.direction = "backward"
            seen.append(tailer.read_many(2))
        elif n == 4:
            tailer.to_time(datetime.now(UTC))
        elif n == 5:
            tailer.to_end()
            with tailer:  # closing is nothing that a function could do
                pass
        seen.append((begin, tailer.index))

    feed(store, a=range(6), rates=range(6))
    run(store, Sink(wander, "a", tailers="rates", batch_size=2))
    rates = [{"n": n} for n in range(6)]
    assert seen == [
        (1, 4),
        [rates[3], rates[4], 4, 4],
        (4, 5),
        rates,
        (5, 7),
        [rates[5], rates[4]],
        (7, 5),
        (5, 7),
        (7, 7),
    ]


@pytest.mark.parametrize(
    "how", [lambda t: t.read(block=True), lambda t: t.read(block=True, timeout=0), lambda t: next(t.follow())]
)
def test_a_tailer_never_waits(store: Store, how: Callable[[Any], Any]) -> None:
    def waits(message: Message, process: Any) -> None:
        how(process.tailers["rates"])

    feed(store, a=[1])
    report = run(store, Sink(waits, "a", tailers="rates"), stopped="return")
    cause = report.stopped["waits"].__cause__
    assert isinstance(cause, InvalidArgument) and "do not wait" in str(cause) and "as an input" in str(cause)


def test_a_read_sees_the_queue_as_it_is_and_not_the_steps_own_writes(store: Store) -> None:
    seen = []

    def look(message: Message, process: Any) -> None:
        process.appenders["log"].write(message)
        seen.append((len(process.tailers["log"].read_many(100)), numbers(store, "log")))
        store.queue("log").appender().write({"n": "from outside"})

    feed(store, a=range(3))
    run(store, Stream(look, "a", None, tailers="log", appenders="log", batch_size=2))
    assert [count for count, _ in seen] == [0, 1, 4 - 1]
    assert positions(store)["g.look.log"] == 5 and numbers(store, "log") == (
        ["from outside"] * 2 + [0, 1] + ["from outside", 2]
    )


def test_messages_that_were_purged_are_not_read(store: Store) -> None:
    feed(store, a=range(2), rates=range(100, 110))
    run(store, stream(batch_size=1), steps_max=1)
    store.queue("rates").purge(before=6)
    run(store, stream())
    assert numbers(store, "out") == [(0, 100), (1, 105)] and positions(store)["g.s.rates"] == 7


def test_a_message_that_a_function_changes_is_read_again_as_it_is(store: Store) -> None:
    def changes(message: Message, process: Any) -> Message:
        rate = process.tailers["rates"].read()
        rate["n"] += message["n"]
        process.tailers["rates"].to_start()
        return rate

    feed(store, a=[1, 2], rates=[100])
    run(store, stream(changes))
    assert numbers(store, "out") == [101, 102]


# --- the appender -------------------------------------------------------------------------------


WRONG = [
    ({"n": object()}, CodecError),
    ("text", InvalidArgument),
    ({"q/mine": 1}, ReservedKey),
    ({"n": "x" * 200}, MessageTooLarge),
]


@pytest.mark.parametrize(("message", "error"), WRONG, ids=[error.__name__ for _, error in WRONG])
def test_a_message_that_cannot_be_written_is_refused_at_once(
    store: Store, message: Any, error: type[Exception]
) -> None:
    caught = []

    def writes(_: Message, process: Any) -> None:
        log = process.appenders["log"]
        for write in (lambda: log.write(message), lambda: log.write_many([{"n": 1}, message])):
            with pytest.raises(error) as found:
                write()
            caught.append(found)
        assert log.write({"n": "fine"}) is None and log.write_many([{"n": "too"}]) is None

    feed(store, a=[1])
    run(store, Stream(writes, "a", None, appenders="log"), queues={"log": {"max_message_bytes": 100}})
    assert len(caught) == 2 and numbers(store, "log") == ["fine", "too"]


@pytest.mark.parametrize("meta", [{}, {"q/meta": {"mine": {"x": 1}}}])
def test_a_message_is_written_as_it_was_when_it_was_given(store: Store, meta: Message) -> None:
    def reuses(message: Message, process: Any) -> None:
        reused = {"n": 0, "list": [0], **meta}
        for n in range(3):
            reused["n"], reused["list"][0] = n, n
            process.appenders["log"].write(reused)

    feed(store, a=[1])
    run(store, Stream(reuses, "a", None, appenders="log"))
    assert testing.messages(store, "log") == [{"n": n, "list": [n]} for n in range(3)]
    envelope = store.queue("log").tailer()
    envelope.read()
    assert envelope.envelope is not None and envelope.envelope.metadata.get("mine") == meta.get("q/meta", {}).get(
        "mine"
    )


def test_many_large_writes_of_one_step(store: Store) -> None:
    def writes(message: Message, process: Any) -> None:
        process.appenders["log"].write_many({"n": (message["n"], i), "text": "x" * 5000 * (i % 3)} for i in range(50))

    feed(store, a=range(4))
    run(store, Stream(writes, "a", None, appenders="log"))
    assert numbers(store, "log") == [(n, i) for n in range(4) for i in range(50)]


def test_the_error_of_an_unknown_binding_lists_the_known_ones(store: Store) -> None:
    def asks(message: Message, process: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"no tailer 'rate'; it has 'rates'.*Try: use 'rates'"):
            process.tailers["rate"]
        with pytest.raises(InvalidArgument, match=r"no appender 'log'; it has none.*Try: declare it with appenders="):
            process.appenders["log"]
        assert "log" not in process.appenders and list(process.tailers) == ["rates"]

    feed(store, a=[1])
    run(store, Sink(asks, "a", tailers="rates"))


def test_neither_can_be_had_outside_a_call(store: Store) -> None:
    kept = []

    def keeps(message: Message, process: Any) -> None:
        kept.append(process)

    feed(store, a=[1])
    run(store, Sink(keeps, "a", tailers="rates"))
    for name in ("tailers", "appenders"):
        with pytest.raises(cues.CuesError, match="no current message"):
            getattr(kept[0], name)


# --- positions: fenced, recovered, kept ---------------------------------------------------------


def test_a_seek_moves_an_imperative_tailer(store: Store) -> None:
    feed(store, a=range(2), rates=range(100, 110))
    run(store, stream())
    ownership.seek(store, "g.s", {"g.s.rates": 9})
    feed(store, a=[2])
    run(store, stream())
    assert numbers(store, "out")[-1] == (2, 108)


def test_a_seek_while_a_step_runs_drops_it_and_its_moves(store: Store) -> None:
    seeks = []

    def sought(message: Message, process: Any) -> Message:
        found = priced(message, process)
        if not seeks:
            seeks.append(ownership.seek(store, "g.s", {"g.s.rates": 6}))
        return found

    feed(store, a=[0], rates=range(100, 110))
    run(store, stream(sought))
    assert numbers(store, "out") == [(0, 105)] and numbers(store, "log") == [0]


def test_another_queue_of_that_name_is_diverged(store: Store, tmp_path: Path) -> None:
    feed(store, a=[0], rates=range(100, 110))
    run(store, stream())
    with store.core.view() as txn:
        row = read_row(txn, "g.s")
    assert row is not None
    spoiled = (row.positions[0], row.positions[1]._replace(identity=b"elsewher"))  # in the order of tailer ids
    store.core.commit(
        lambda txn: sealed.put(txn, cues.base.names.processor_key("g.s"), row._replace(positions=spoiled).pack())
    )
    with pytest.raises(Diverged, match="rates"):
        run(store, stream())
    store.core.commit(lambda txn: sealed.put(txn, cues.base.names.processor_key("g.s"), row.pack()))


@pytest.mark.parametrize("before", [None, "rates", ["rates", "more"]])
@pytest.mark.parametrize("after", [None, "rates", ["rates", "more"]])
def test_other_tailers_are_another_topology(store: Store, before: Any, after: Any) -> None:
    def fine(message: Message, process: Any) -> Message:
        return {"n": {binding: tailer.index for binding, tailer in process.tailers.items()}}

    feed(store, a=[0], rates=range(3), more=range(3))
    run(store, stream(fine, tailers=before, appenders=None))
    feed(store, a=[1])
    if before != after:
        with pytest.raises(TopologyChanged, match=r"rates|more"):
            run(store, stream(fine, tailers=after, appenders=None))
    run(store, stream(fine, tailers=after, appenders=None), accept_topology=True)
    assert numbers(store, "out")[-1] == dict.fromkeys([after] if isinstance(after, str) else after or [], 1)


@pytest.mark.parametrize("alts", [False, True])
def test_a_pending_step_of_an_input_that_is_read_imperatively_now_is_void(store: Store, alts: bool) -> None:
    """The tailers are the same, so the topology is; but no step takes from that queue any more."""

    def look(message: Message, process: Any) -> Message:
        return {"n": (message["n"], [tailer.read() for tailer in process.tailers.values()])}

    def die(message: Message, process: Any) -> Message:
        raise testing.Crashed

    def joined(a: Message, b: Message) -> Message:
        raise testing.Crashed

    feed(store, a=[1], b=[2])
    inputs: Any = AnyOf("b", "a") if alts else {"a": "a", "b": "b"}
    with pytest.raises(testing.Crashed):
        run(store, Stream(die if alts else joined, inputs, "out", id="s", side_effects=True))
    report = run(store, Stream(look, AnyOf("a"), "out", id="s", tailers="b"))
    assert report.decisions == {"s": "void"}
    assert numbers(store, "out") == [(1, [{"n": 2}])]


def test_retention_by_reading_waits_for_an_imperative_tailer(store: Store) -> None:
    """And for what a step that is under way has read through it, but not committed."""
    firsts = []

    def reads(message: Message, process: Any) -> None:
        process.tailers["rates"].read_many(100)
        store.queue("rates").appender().write_many([{"n": 0, "text": "x" * 4000}])
        firsts.append(store.queue("rates").first_index)

    queues = {"rates": {"retention": "read"}}
    feed(store, a=[0])
    run(store, Sink(reads, "a", tailers="rates"), queues=queues)
    for n in range(1, 4):
        feed(store, a=[n])
        run(store, Sink(reads, "a", tailers="rates"), queues=queues)
    # A call sees what the last step had left to be read, and that stays until its own step has committed.
    assert firsts == [1, 1, 2, 3]


def test_a_graph_is_idle_when_only_imperative_tailers_have_more(store: Store) -> None:
    feed(store, rates=range(100, 110))
    with Graph("g", [stream()]).start(store=store) as running:
        assert running.wait_idle(30)
        running.send("a", {"n": 1})
        assert running.wait_idle(30)
        assert running.messages("out") == [{"n": (1, 100)}]
    assert positions(store) == {"g.s.a": 2, "g.s.rates": 2}


def test_a_reader_of_the_queue_of_an_appender_is_woken(store: Store) -> None:
    def writes(message: Message, process: Any) -> None:
        process.appenders["log"].write(message)

    with Graph("g", [Stream(writes, "a", None, appenders="log"), Stream(lambda m: m, "log", "out", id="t")]).start(
        store=store
    ) as running:
        for n in range(5):
            running.send("a", {"n": n})
        assert running.wait_idle(30)
        assert [m["n"] for m in running.messages("out")] == list(range(5))


# --- declarations -------------------------------------------------------------------------------


def none(message: Message) -> None: ...


REFUSED: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("no such form", lambda: stream(tailers=7), ("tailers=", "int", "{binding: queue}")),
    ("a name that is none", lambda: stream(tailers="a/b"), ("'s'", "a/b")),
    ("a binding that is none", lambda: stream(appenders={"x.y": "log"}), ("'s'", "x.y")),
    ("a queue twice", lambda: stream(tailers=["x", "x"]), ("tailers=", "'x'", "twice")),
    ("a queue under two bindings", lambda: stream(appenders={"x": "q", "y": "q"}), ("appenders=", "'q'", "twice")),
    ("an input", lambda: stream(tailers={"again": "a"}), ("'s'", "'a'", "input")),
    ("calls at once", lambda: stream(concurrency=2), ("'s'", "concurrency=2", "tailers= and appenders=", "no order")),
    ("no process", lambda: stream(none), ("'s'", "'process'", "def none(…, process)")),
    ("no outputs", lambda: Stream(priced, "a", None, tailers="rates"), ("priced", "outputs")),
    ("no outputs at all", lambda: Stream(priced, "a", ()), ("priced", "no outputs", "appenders=")),
    ("a source", lambda: cues.Source("x", none, tailers="y"), ("'x'", "tailers")),
]


@pytest.mark.parametrize(("build", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_errors_are_raised_at_the_declaration(build: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert " Try: " in str(caught.value)


def test_it_survives_plain_data_and_is_drawn() -> None:
    graph = Graph("g", [Stream(priced, "a", None, tailers={"rates": "r"}, appenders=["log"]), Sink(none, "log")])
    again = Graph.from_dict(graph.to_dict())
    assert again.to_dict() == graph.to_dict() and again.plan() == graph.plan()
    assert graph.to_dict()["processors"][0]["tailers"] == {"rates": "r"}
    plan = graph.plan()
    assert set(plan.queues) == {"a", "r", "log"} and plan.fed == ("a", "r")
    assert graph.topology().edges == {("priced", "log", "none")}
    assert "exactly-once · imperative: reads r as rates, writes log\n" in draw.text(plan)
    mermaid = draw.mermaid(plan)
    assert '-- "imperative: rates" --> p0' in mermaid and 'p0 -- "imperative: log" -->' in mermaid
    (described, _) = draw.describe(plan)
    assert described["tailers"] == {"rates": "r"} and described["appenders"] == {"log": "log"}


def test_an_error_message_names_them(store: Store) -> None:
    def fails(message: Message, process: Any) -> None:
        raise ValueError

    feed(store, a=[1])
    run(store, Stream(fails, "a", None, tailers="rates", appenders={"x": "log"}), errors="errors")
    (error,) = testing.messages(store, "errors")
    assert error["err.proc/config"]["tailers"] == {"rates": "rates"}
    assert error["err.proc/config"]["appenders"] == {"x": "log"}
    assert testing.messages(store, "g.fails")[0][TYPE] == SNAPSHOT


def test_a_processor_that_stops_is_reported(store: Store) -> None:
    def fails(message: Message, process: Any) -> None:
        process.appenders["log"].write(message)
        raise ValueError("never")

    feed(store, a=[1])
    with pytest.raises(ProcessorStopped, match="never"):
        run(store, Stream(fails, "a", None, appenders="log"))
    assert numbers(store, "log") == []
