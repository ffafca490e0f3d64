"""The decisions of a start: every row of the table of docs/guarantees.md, and the changes that are allowed.

``Report.decisions`` names the row: fresh, resume, rewind, void. A store that contradicts itself is
refused with Diverged, and a changed topology with TopologyChanged, before anything ran.
"""

from __future__ import annotations

from typing import Any

import pytest
from small import feed, numbers, replace, run

import cues
from cues import AnyOf, Graph, Sink, Source, Store, Stream, testing
from cues.base import names
from cues.base.names import HASH, TYPE
from cues.engine.assembly import assemble
from cues.errors import Diverged, ProcessorStopped, TopologyChanged
from cues.graphs.processor_rows import ProcessorRow, read_row
from cues.records import sealed
from cues.records.log_row import ROW
from cues.records.positions import Position
from cues.steps import ownership, tries
from cues.steps.hashes import delivery_hash

Message = dict[str, Any]


def crash(store: Store, point: str, *processors: Any, hit: int = 1, **options: Any) -> None:
    with testing.crash(point, hit, how="raise"), pytest.raises(testing.Crashed):
        run(store, *processors, **options)


class Seen:
    """A function that keeps what it was given, and the hashes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, str]] = []

    def __call__(self, message: Message, process: Any) -> Message:
        self.calls.append((process.binding, message["n"], process.delivery_hash))
        return message

    @property
    def numbers(self) -> list[Any]:
        return [n for _, n, _ in self.calls]


def row_of(store: Store, processor: str) -> ProcessorRow:
    with store.core.view() as txn:
        row = read_row(txn, processor)
    assert row is not None
    return row


# --- the rows -----------------------------------------------------------------------------------


def test_nothing_found_starts_at_the_start_of_the_queue(store: Store) -> None:
    feed(store, a=range(3))
    store.queue("a").purge(before=2)
    seen = Seen()
    assert run(store, Sink(seen, "a", id="s")).decisions == {"s": "fresh"}
    assert seen.numbers == [1, 2]


@pytest.mark.parametrize("side_effects", [False, True])
def test_a_whole_step_resumes_from_the_positions(store: Store, side_effects: bool) -> None:
    stream = Stream(lambda m: m, "a", "out", id="s", side_effects=side_effects)
    feed(store, a=range(3))
    run(store, stream)
    feed(store, a=range(3, 5))
    assert run(store, stream).decisions == {"s": "resume"}
    assert numbers(store, "out") == [0, 1, 2, 3, 4]


@pytest.mark.interpreted
def test_a_trim_of_the_try_log_keeps_the_snapshot_of_the_step_under_way(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is trimmed with the snapshot of the third step, and the process dies before the attempt."""
    monkeypatch.setattr(tries, "KEEP_MESSAGES", 5)
    monkeypatch.setattr(tries, "TRIM_MESSAGES", 0)
    feed(store, a=range(9))
    sink = Sink(Seen(), "a", id="s", batch_size=1)
    crash(store, "snapshot.after", sink, hit=3)
    assert run(store, sink).decisions == {"s": "rewind"}


@pytest.mark.parametrize("kind", ["attempt", "nil-attempt", "error-attempt"])
def test_an_attempt_of_any_kind_makes_a_step_whole(store: Store, kind: str) -> None:
    def f(message: Message) -> Any:
        return {"attempt": message, "nil-attempt": None, "error-attempt": 7}[kind]

    feed(store, a=range(2))
    run(store, Stream(f, "a", "out"), errors="errors")
    assert testing.messages(store, "g.f")[-1][TYPE].endswith(f"/{kind}")
    assert run(store, Stream(f, "a", "out"), errors="errors").decisions == {"f": "resume"}
    assert len(testing.messages(store, "out")) == 2 * (kind == "attempt")
    assert len(testing.messages(store, "errors")) == 2 * (kind == "error-attempt")


def test_a_pending_snapshot_is_rewound_to_and_taken_again_exactly(store: Store) -> None:
    """Killed in its function with messages 0–2 taken; then more come, the batch size and the filters change."""
    first, second = Seen(), Seen()
    feed(store, a=range(3))
    crash(store, "function.after", Stream(first, "a", "out", id="s", side_effects=True, step_s=None), hit=2)
    feed(store, a=range(3, 6))
    snapshot = testing.messages(store, "g.s")[-1]
    report = run(
        store, Stream(second, "a", "out", id="s", side_effects=True, batch_size=2, where=lambda m: m["n"] != 0)
    )
    assert report.decisions == {"s": "rewind"}
    assert second.numbers == [1, 2, 3, 4, 5] and second.calls[0] == first.calls[1]
    again = testing.messages(store, "g.s")
    # The same range under the same hash, in one step although the batch size is smaller now.
    at = again.index(snapshot)
    assert again[at + 1] == again[at + 2] == snapshot and again[at + 3][HASH] is not None
    assert not testing.check_attempts(store)
    assert numbers(store, "out") == [1, 2, 3, 4, 5]


def test_a_rewound_alts_step_takes_from_the_same_input(store: Store) -> None:
    """The second of two inputs was chosen; the declaration turns their order round, and more comes on both."""
    for chosen in ("a", "b"):
        first, second = Seen(), Seen()
        id = f"s-{chosen}"
        feed(store, **{f"a-{id}": range(3), f"b-{id}": range(10, 13)})
        inputs = {"a": f"a-{id}", "b": f"b-{id}"}
        sink = Sink(first, AnyOf(**inputs), id=id, batch_size=3)
        crash(store, "function.before", sink, hit=2 if chosen == "a" else 5)
        feed(store, **{f"a-{id}": range(3, 5), f"b-{id}": range(13, 15)})
        assert run(store, Sink(second, AnyOf(b=inputs["b"], a=inputs["a"]), id=id)).decisions == {id: "rewind"}
        start = 0 if chosen == "a" else 10
        assert second.calls[:3] and [c[:2] for c in second.calls[:3]] == [(chosen, n) for n in range(start, start + 3)]
        assert not testing.check_hashes([(c[:2], c[2]) for c in first.calls + second.calls])


def test_a_seek_voids_a_pending_snapshot(store: Store) -> None:
    feed(store, a=range(4))
    crash(store, "snapshot.after", Sink(Seen(), "a", id="s", batch_size=2))
    ownership.seek(store, "g.s", {"g.s.a": 4})
    seen = Seen()
    assert run(store, Sink(seen, "a", id="s")).decisions == {"s": "void"}
    assert seen.numbers == [3]


def test_at_most_once_voids_the_snapshot(store: Store) -> None:
    feed(store, a=range(4))
    crash(store, "function.before", Sink(Seen(), "a", id="s", batch_size=2, strategy="at-most-once"))
    seen = Seen()
    assert run(store, Sink(seen, "a", id="s", strategy="at-most-once")).decisions == {"s": "void"}
    assert seen.numbers == [2, 3]


@pytest.mark.delivers_again
def test_a_seek_that_asks_for_delivery_again_gives_other_hashes(store: Store) -> None:
    seen = Seen()
    feed(store, a=range(2))
    run(store, Sink(seen, "a", id="s"))
    ownership.seek(store, "g.s", {"g.s.a": 1})
    run(store, Sink(seen, "a", id="s"))
    ownership.seek(store, "g.s", {"g.s.a": 1}, again=True)
    run(store, Sink(seen, "a", id="s"))
    hashes = [hash for _, _, hash in seen.calls]
    assert hashes[0:2] == hashes[2:4] and not set(hashes[0:2]) & set(hashes[4:6])
    assert row_of(store, "g.s").generation == 1


def test_a_try_log_is_read_like_any_queue_and_written_by_its_processor_only(store: Store) -> None:
    """A user's message after a pending snapshot would hide it: the start would say fresh and cut the step anew."""
    feed(store, a=range(4))
    crash(store, "snapshot.after", Sink(Seen(), "a", id="s", batch_size=2))
    with pytest.raises(cues.errors.InvalidArgument, match="try log"):
        store.queue("g.s").appender()
    for emptied in (lambda: store.queue("g.s").delete(), lambda: store.queue("g.s").purge(before=2)):
        with pytest.raises(cues.errors.InvalidArgument, match="try log"):
            emptied()
    assert run(store, Sink(Seen(), "a", id="s")).decisions == {"s": "rewind"}


# --- purges -------------------------------------------------------------------------------------


def test_a_seek_to_the_very_start_of_a_pending_snapshot_voids_it_too(store: Store) -> None:
    """Delivery is asked for again: the same messages come under the new generation's hashes, none under the old."""
    feed(store, a=range(3))
    before: list[str] = []

    def batch(messages: list[Message], process: Any) -> None:
        before.append(process.delivery_hash)

    sink = Sink(batch, "a", id="s", batch=True, step_s=None)
    crash(store, "function.after", sink)
    ownership.seek(store, "g.s", {"g.s.a": 1}, again=True)
    report = run(store, sink)
    assert report.decisions == {"s": "void"}
    assert len(before) == 2 and before[0] != before[1]
    assert testing.check_attempts(store) == []


def test_a_purged_part_of_a_pending_range_is_counted_and_the_rest_is_a_new_step(store: Store) -> None:
    feed(store, a=range(5))
    first, second = Seen(), Seen()
    crash(store, "function.before", Sink(first, "a", id="s", step_s=None), hit=5)
    snapshot = testing.messages(store, "g.s")[-1]
    store.queue("a").purge(before=3)
    report = run(store, Sink(second, "a", id="s"))
    assert second.numbers == [2, 3, 4]
    assert any("2 messages of a" in event.text and "purged" in event.text for event in report.events)
    assert testing.messages(store, "g.s")[-1][HASH] != snapshot.get(HASH)
    assert not testing.check_hashes([(c[:2], c[2]) for c in first.calls + second.calls])
    assert not testing.check_attempts(store)


def test_a_pending_range_that_was_purged_whole(store: Store) -> None:
    feed(store, a=range(3))
    crash(store, "snapshot.after", Sink(Seen(), "a", id="s"))
    store.queue("a").delete()
    feed(store, a=[3, 4])
    seen = Seen()
    run(store, Sink(seen, "a", id="s"))
    assert seen.numbers == [3, 4]
    assert run(store, Sink(seen, "a", id="s")).decisions == {"s": "resume"}


def test_a_purge_between_the_start_and_the_first_step_makes_the_rest_a_new_step(store: Store) -> None:
    """Else the step would take as many messages as the snapshot, others, under the snapshot's hash."""
    calls: list[tuple[list[int], str]] = []

    def pairs(left: list[Message], right: list[Message], process: Any) -> None:
        calls.append(([m["n"] for m in left], process.delivery_hash))

    graph = Graph("g", [Sink(pairs, {"left": "a", "right": "b"}, batch=True, batch_size=4)])
    feed(store, a=range(10), b=range(10))
    with testing.crash("snapshot.after", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(graph, store)
    assembled = assemble(graph, store)
    store.queue("b").purge(before=3)
    (stepper,) = assembled.steppers
    while stepper.step() != "idle":
        pass
    tailers = {"g.pairs.a": store.queue("a"), "g.pairs.b": store.queue("b")}
    starts = [(1, 3), (5, 7)]
    for (given, hash), (a, b) in zip(calls, starts):
        ranges = [
            (tailer, queue.core.row().identity, start, start + 4)
            for (tailer, queue), start in zip(tailers.items(), (a, b))
        ]
        assert hash == delivery_hash("g.pairs", 0, ranges)
        assert given == list(range(a - 1, a + 3))
    assert len(calls) == 2
    assembled.close()
    assert not testing.check_attempts(store)


def test_an_output_that_was_purged_is_not_lost(store: Store) -> None:
    stream = Stream(lambda m: m, "a", "out", id="s")
    feed(store, a=range(3))
    run(store, stream)
    store.queue("out").delete()
    store.queue("a").delete()
    assert run(store, stream).decisions == {"s": "resume"}
    feed(store, a=[3])
    run(store, stream)
    assert numbers(store, "out") == [3]


def test_retention_keeps_what_a_pending_snapshot_names(store: Store) -> None:
    """A sink is killed with messages 0–2 taken; then 500 more are appended to a queue that keeps 10."""
    first, second = Seen(), Seen()
    store.queue("a", retention=10)
    for n in range(3):
        feed(store, a=[n])
    crash(store, "snapshot.after", Sink(first, "a", id="s"))
    for n in range(3, 503):
        feed(store, a=[n])
    assert store.queue("a").first_index == 1
    run(store, Sink(second, "a", id="s"))
    assert second.numbers == list(range(503))
    feed(store, a=[503])
    assert store.queue("a").first_index > 400


# --- contradictions -----------------------------------------------------------------------------


def put(store: Store, key: bytes, value: bytes) -> None:
    store.core.commit(lambda txn: sealed.put(txn, key, value))


def refused(store: Store, *processors: Any) -> str:
    before = testing.contents(store)
    with pytest.raises(Diverged) as caught:
        run(store, *processors)
    assert testing.contents(store) == before, "a refused start changed something"
    assert caught.value.processor == "g.s"
    with pytest.raises(Diverged):  # and gives its locks back
        run(store, *processors)
    return str(caught.value)


@pytest.mark.damages_stores
def test_another_queue_under_the_same_name_is_refused(store: Store) -> None:
    sink = Sink(Seen(), "a", id="s")
    feed(store, a=range(3))
    run(store, sink)
    row = store.queue("a").core.row()
    put(store, names.row_key("a", 0), ROW.pack(*row._replace(identity=b"another!")))
    text = refused(store, sink)
    assert row.identity.hex() in text and b"another!".hex() in text


@pytest.mark.damages_stores
def test_a_queue_that_ends_before_the_position_is_refused(store: Store) -> None:
    sink = Sink(Seen(), "a", id="s")
    feed(store, a=range(3))
    run(store, sink)
    row = store.queue("a").core.row()
    put(store, names.row_key("a", 0), ROW.pack(row.identity, 1, 2, row.time_ns, row.version))
    assert "ends before 2" in refused(store, sink)


@pytest.mark.damages_stores
def test_another_message_before_the_position_is_refused(store: Store) -> None:
    """The store was replaced by a copy that continued differently: same queue, same index, another message."""
    sink = Sink(Seen(), "a", id="s")
    feed(store, a=range(3))
    run(store, sink)
    row = row_of(store, "g.s")
    (position,) = row.positions
    moved = row._replace(positions=(Position(position.identity, position.next, b"\1" * 8),))
    put(store, names.processor_key("g.s"), moved.pack())
    assert "another message" in refused(store, sink)


@pytest.mark.damages_stores
@pytest.mark.delivers_again
def test_an_output_with_another_hash_is_refused(store: Store) -> None:
    """The output queue was replaced: another writer wrote the message at the attempt's index."""
    stream = Stream(lambda m: m, "a", "out", id="s")
    feed(store, a=range(3))
    run(store, stream)
    replace(store, "out", [{"n": 7}] * 3)
    assert "carries no hash" in refused(store, stream)


# --- topology -----------------------------------------------------------------------------------


def test_a_new_input_stops_the_start_until_it_is_accepted(store: Store) -> None:
    feed(store, a=range(3), b=range(10, 12))
    store.queue("b").purge(before=2)
    run(store, Sink(Seen(), AnyOf("a"), id="s"))
    seen = Seen()
    sink = Sink(seen, AnyOf("a", "b"), id="s")
    with pytest.raises(TopologyChanged) as caught:
        run(store, sink)
    assert "g.s.b" in str(caught.value) and "accept" in str(caught.value) and caught.value.processor == "g.s"
    assert seen.calls == []
    run(store, sink, accept_topology=True)
    assert seen.numbers == [11]  # from the start of its queue, and a from where it stood
    run(store, sink)


def test_a_removed_input_stops_the_start_until_it_is_accepted(store: Store) -> None:
    feed(store, a=range(3), b=range(10, 12))
    run(store, Sink(Seen(), AnyOf("a", "b"), id="s"))
    with pytest.raises(TopologyChanged, match=r"g\.s\.b"):
        run(store, Sink(Seen(), "a", id="s"))
    feed(store, a=[3])
    seen = Seen()
    run(store, Sink(seen, "a", id="s"), accept_topology=True)
    assert seen.numbers == [3]
    with store.core.view() as txn:  # a queue without readers holds nothing back
        assert txn.get(names.subscription_key("b", "g.s")) is None


def test_an_input_that_points_at_another_queue_stops_the_start(store: Store) -> None:
    feed(store, a=range(3), b=range(10, 12))
    run(store, Sink(lambda x: None, {"x": "a"}, id="s"))
    with pytest.raises(TopologyChanged, match=r"g\.s\.b.*g\.s\.a"):
        run(store, Sink(lambda x: None, {"x": "b"}, id="s"))


def test_a_processor_of_another_kind_stops_the_start(store: Store) -> None:
    feed(store, a=range(3))
    run(store, Sink(Seen(), "a", id="s"))
    with pytest.raises(TopologyChanged, match="was a sink and is a stream"):
        run(store, Stream(Seen(), "a", "out", id="s"))


def test_a_refused_start_claims_nothing(store: Store) -> None:
    feed(store, a=range(3), b=range(3))
    run(store, Sink(Seen(), "a", id="s"), Sink(Seen(), "a", id="t"))
    before = row_of(store, "g.t")
    with pytest.raises(TopologyChanged):
        run(store, Sink(Seen(), "b", id="s"), Sink(Seen(), "a", id="t"))
    assert row_of(store, "g.t") == before


def test_outputs_may_change_freely(store: Store) -> None:
    feed(store, a=range(2))
    run(store, Stream(lambda m: m, "a", "out", id="s"))
    feed(store, a=[2])
    assert run(store, Stream(lambda m: {"x": m}, "a", {"x": "elsewhere"}, id="s")).decisions == {"s": "resume"}
    assert numbers(store, "out") == [0, 1] and numbers(store, "elsewhere") == [2]


def test_processors_may_come_and_go(store: Store) -> None:
    feed(store, a=range(2))
    run(store, Stream(lambda m: m, "a", "out", id="s"))
    feed(store, a=[2])
    seen = Seen()
    report = run(store, Sink(seen, "a", id="t"), accept_topology=True)  # it might be "s" under another name
    assert report.decisions == {"t": "fresh"} and seen.numbers == [0, 1, 2]
    run(store, Stream(lambda m: m, "a", "out", id="s"))
    assert numbers(store, "out") == [0, 1, 2]


@pytest.mark.parametrize(("before", "after"), [("join", "alts"), ("alts", "join")])
def test_a_pending_step_of_another_shape_is_void(store: Store, before: str, after: str) -> None:
    """A sink is killed in its function; then a join of two queues becomes an alts of them, or the other way round.

    The ranges of the one do not fit the other: taken again unchanged, an alts step would be given
    two inputs and call the function for the first only.
    """
    seen: list[Any] = []

    def join(a: Message, b: Message) -> None:
        seen.append((a["n"], b["n"]))

    def alts(message: Message, process: Any) -> None:
        seen.append((process.binding, message["n"]))

    sinks = {
        "join": Sink(join, {"a": "a", "b": "b"}, id="s"),
        "alts": Sink(alts, AnyOf("a", "b"), id="s"),
    }
    feed(store, a=range(2), b=range(10, 12))
    crash(store, "snapshot.after", sinks[before])
    assert run(store, sinks[after]).decisions == {"s": "void"}
    assert sorted(seen) == ([("a", 0), ("a", 1), ("b", 10), ("b", 11)] if after == "alts" else [(0, 10), (1, 11)])
    assert not testing.check_attempts(store)


def test_a_new_input_voids_a_pending_join(store: Store) -> None:
    seen: list[Any] = []
    feed(store, a=range(2), b=range(10, 12))
    crash(store, "snapshot.after", Sink(lambda a: None, {"a": "a"}, id="s"))
    both = Sink(lambda a, b: seen.append((a["n"], b["n"])), {"a": "a", "b": "b"}, id="s")
    run(store, both, accept_topology=True)
    assert seen == [(0, 10), (1, 11)]


# --- what may change between crash and restart --------------------------------------------------


@pytest.mark.parametrize("side_effects", [False, True])
@pytest.mark.parametrize("point", ["take.after", "function.after", "commit.outputs", "commit.inside", "commit.after"])
def test_code_batch_size_and_order_of_declarations_may_change(store: Store, point: str, side_effects: bool) -> None:
    """Killed at a point; before the next start the functions, the batch sizes and the order of everything change."""

    def old(left: Message, right: Message) -> dict[str, Any]:
        return {"x": {"n": left["n"]}, "y": {"n": right["n"]}}

    def new(right: Message, left: Message, process: Any) -> dict[str, Any]:
        return {"y": {"n": right["n"]}, "x": {"n": left["n"]}}

    feed(store, a=range(6), b=range(10, 16))
    ins, outs = {"left": "a", "right": "b"}, {"x": "out-x", "y": "out-y"}
    first = [
        Stream(old, ins, outs, id="join", batch_size=3, side_effects=side_effects),
        Stream(lambda m: m, "out-x", "end", id="copy", batch_size=2, side_effects=side_effects),
    ]
    second = [
        Stream(lambda m: dict(m), "out-x", "end", id="copy", batch_size=1000, side_effects=not side_effects),
        Stream(new, dict(reversed(ins.items())), dict(reversed(outs.items())), id="join", batch_size=1),
    ]
    crash(store, point, *first, hit=2)
    run(store, *second)
    assert numbers(store, "out-x") == numbers(store, "end") == list(range(6))
    assert numbers(store, "out-y") == list(range(10, 16))
    assert not testing.check_attempts(store)


def test_strategy_may_change(store: Store) -> None:
    seen = Seen()
    feed(store, a=range(6))
    crash(store, "function.after", Sink(seen, "a", id="s", batch_size=2), hit=3)
    run(store, Sink(seen, "a", id="s", batch_size=2, strategy="at-most-once"))
    assert sorted(set(seen.numbers)) == list(range(6))
    feed(store, a=[6])
    run(store, Sink(seen, "a", id="s"))
    assert seen.numbers[-1] == 6


def test_a_processor_that_stopped_starts_at_the_message_with_mended_code(store: Store) -> None:
    first, second = Seen(), Seen()

    def broken(message: Message, process: Any) -> None:
        first(message, process)
        if message["n"] == 3:
            raise ValueError

    feed(store, a=range(6))
    with pytest.raises(ProcessorStopped):
        run(store, Sink(broken, "a", id="s"))
    run(store, Sink(second, "a", id="s"))
    assert first.numbers == [0, 1, 2, 3] and second.numbers == [3, 4, 5]
    assert second.calls[0] == first.calls[3]


def test_recovery_reads_a_constant_number_of_records(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from cues.queues.log import Log

    def cost() -> int:
        reads = 0
        real = Log.read

        def read(self: Log, *arguments: Any, **keywords: Any) -> Any:
            nonlocal reads
            found = real(self, *arguments, **keywords)
            reads += len(found)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Log, "read", read)
            run(store, Stream(lambda m: m, "a", "out", id="s", batch_size=10))
        return reads

    feed(store, a=range(10))
    run(store, Stream(lambda m: m, "a", "out", id="s", batch_size=10))
    few = cost()
    feed(store, a=range(20_000))
    run(store, Stream(lambda m: m, "a", "out", id="s", batch_size=100))
    assert cost() == few < 10


def test_every_decision_is_reported_in_one_line(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    feed(store, a=range(3))
    with caplog.at_level("INFO", "cues"), Graph("g", [Sink(Seen(), "a", id="s")]).start(store=store) as running:
        running.wait_idle(timeout=60)
    lines = [r.getMessage() for r in caplog.records if "g.s" in r.getMessage()]
    assert len(lines) == 1 and "fresh" in lines[0] and "g.s.a 1" in lines[0]


def test_a_source_resumes_after_a_death_at_every_point_of_its_commit(store: Store) -> None:
    def source(position: int | None) -> Any:
        for n in range(position or 0, 6):
            yield n + 1, {"n": n}

    for hit, point in enumerate(("take.after", "commit.inside", "commit.after", "ring.after"), 1):
        crash(store, point, Source("a", source, batch_size=1))
        assert numbers(store, "a") == list(range(max(0, hit - 2)))
    run(store, Source("a", source, batch_size=1))
    assert numbers(store, "a") == list(range(6))
