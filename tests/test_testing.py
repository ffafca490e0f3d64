"""The testing help itself: a judge that misjudges would make every other test worthless."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cues
from cues import Graph, Source, Stream, faults, testing
from cues.base import clock
from cues.errors import InvalidArgument, ProcessorStopped
from cues.records import batch
from cues.steps import tries


def verdict(history: testing.History) -> dict[str, list[Any]]:
    kinds = ("lost", "duplicated", "reordered", "unexpected")
    return {kind: [f.message for f in getattr(history, kind)] for kind in kinds if getattr(history, kind)}


@pytest.mark.parametrize(
    ("expected", "found", "wrong"),
    [
        ("abc", "abc", {}),
        ("", "", {}),
        ("abc", "", {"lost": ["a", "b", "c"]}),
        ("abc", "ac", {"lost": ["b"]}),
        ("abc", "abbc", {"duplicated": ["b"]}),
        ("abc", "abcabc", {"duplicated": ["a", "b", "c"]}),
        ("abc", "acb", {"reordered": ["c"]}),
        ("abcdef", "fabcde", {"reordered": ["f"]}),
        ("abc", "abxc", {"unexpected": ["x"]}),
        ("aab", "aab", {}),
        ("aab", "ab", {"lost": ["a"]}),
        ("aab", "aaab", {"duplicated": ["a"]}),
        ("abc", "cxca", {"lost": ["b"], "duplicated": ["c"], "reordered": ["c"], "unexpected": ["x"]}),
    ],
)
def test_histories_by_name(expected: str, found: str, wrong: dict[str, list[str]]) -> None:
    history = testing.check_history(expected, found)
    assert verdict(history) == wrong and bool(history) == history.exact == (not wrong)
    assert history.at_least_once == (not set(wrong) & {"lost", "reordered", "unexpected"})
    assert history.at_most_once == (not set(wrong) & {"duplicated", "reordered", "unexpected"})
    if wrong:
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            history.expect_exact()
    assert verdict(testing.check_history(expected, found, ordered=False)) == {
        k: v for k, v in wrong.items() if k != "reordered"
    }


def judged_naively(expected: list[int], found: list[int]) -> dict[str, Counter[int]]:
    """The judgement by counting, and by trying every way to leave messages out of the order."""
    wanted, came = Counter(expected), Counter(found)
    known = Counter({message: count for message, count in came.items() if message in wanted})
    seen: Counter[int] = Counter()
    first = []
    for message in found:
        seen[message] += 1
        if seen[message] <= wanted[message]:
            first.append(message)
    kept = max(
        len(some)
        for size in range(len(first) + 1)
        for some in itertools.combinations(first, size)
        if is_inside(some, expected)
    )
    return {
        "lost": wanted - came,
        "duplicated": known - wanted,
        "unexpected": came - known,
        "reordered": Counter({0: len(first) - kept}),
    }


def is_inside(some: Sequence[int], series: Iterable[int]) -> bool:
    """Return True if ``some`` are in ``series``, in that order."""
    rest = iter(series)
    return all(message in rest for message in some)


@given(st.lists(st.integers(0, 3), max_size=7), st.lists(st.integers(0, 4), max_size=8))
@example([0, 1, 0], [1, 0])  # the first 0 is lost, and nothing is out of order
@example([1, 0, 2, 0], [0, 1, 0, 2])  # one 0 is, not two messages
def test_any_history_is_classified_as_counting_does(expected: list[int], found: list[int]) -> None:
    """Any two series, with messages that are expected, lost and found several times."""
    history = testing.check_history(expected, found)
    naive = judged_naively(expected, found)
    for kind in ("lost", "duplicated", "unexpected"):
        assert Counter(finding.message for finding in getattr(history, kind)) == naive[kind], kind
    assert len(history.reordered) == naive["reordered"][0]
    assert history.exact == (expected == found)
    assert (history.expected, history.found) == (len(expected), len(found))
    # Every finding is at its place, and what is found wrong is all that is wrong.
    assert all(expected[f.place] == f.message for f in history.lost)
    wrong = [*history.duplicated, *history.unexpected, *history.reordered]
    assert all(found[f.place] == f.message for f in wrong) and len({f.place for f in wrong}) == len(wrong)
    right = [message for at, message in enumerate(found) if at not in {f.place for f in wrong}]
    assert is_inside(right, expected)
    if not history.reordered:
        lost = {f.place for f in history.lost}
        assert right == [message for place, message in enumerate(expected) if place not in lost]
    assert testing.check_history(expected, found, ordered=False).reordered == ()


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_what_was_done_to_a_history_is_found_and_nothing_else(data: st.DataObject, sizes: list[int]) -> None:
    """Streams are mixed; messages are taken out, moved to the front, repeated, and foreign ones put in."""
    streams = {name: [(name, n) for n in range(size)] for name, size in enumerate(sizes)}
    left = {name: list(series) for name, series in streams.items()}
    mixed: list[Any] = []
    while any(left.values()):
        mixed.append(left[data.draw(st.sampled_from([name for name in left if left[name]]))].pop(0))
    assert testing.check_history(streams, mixed).exact
    lost = set(data.draw(st.lists(st.sampled_from(mixed), max_size=2)))
    found = [message for message in mixed if message not in lost]
    moved = []
    if len(found) > 1 and data.draw(st.booleans()):
        message = data.draw(st.sampled_from(found))
        others = [one for one in found if one[0] == message[0] and one < message]
        if others:  # to the front: it alone is out of order, unless two would do as well
            found.remove(message)
            found.insert(found.index(others[0]), message)
            moved = [message] if len(others) > 1 else [message, others[0]]
    duplicated, unexpected = [], []
    for number in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(found)))
        found.insert(at, ("foreign", number))
        unexpected.append(("foreign", number))
    known = [message for message in found if message not in unexpected]
    for message in data.draw(st.lists(st.sampled_from(known), max_size=3)) if known else []:
        found.insert(data.draw(st.integers(found.index(message) + 1, len(found))), message)
        duplicated.append(message)
    history = testing.check_history(streams, found)
    assert {f.message for f in history.lost} == lost and len(history.lost) == len(lost)
    assert Counter(f.message for f in history.duplicated) == Counter(duplicated)
    assert {f.message for f in history.unexpected} == set(unexpected)
    assert len(history.reordered) == bool(moved) and all(f.message in moved for f in history.reordered)
    for finding in (*history.lost, *history.duplicated, *history.reordered):
        assert finding.stream == finding.message[0]
    assert history.at_least_once == (not lost and not moved and not unexpected)
    assert history.at_most_once == (not duplicated and not moved and not unexpected)


@given(st.permutations(range(7)), st.lists(st.integers(0, 9), max_size=5))
def test_any_disorder_is_found_and_no_more_than_there_is(order: list[int], more: list[int]) -> None:
    history = testing.check_history(range(7), order + more)
    assert len(history.duplicated) + len(history.unexpected) == len(more) and not history.lost
    kept = [m for i, m in enumerate(order) if i not in {f.place for f in history.reordered}]
    assert kept == sorted(kept)
    assert bool(history.reordered) == (order != sorted(order))


@given(st.data())
def test_streams_may_be_mixed_in_any_way_but_not_inside(data: st.DataObject) -> None:
    streams = {"a": [("a", n) for n in range(4)], "b": [("b", n) for n in range(3)]}
    left = {name: list(series) for name, series in streams.items()}
    mixed = []
    while any(left.values()):
        name = data.draw(st.sampled_from([name for name, series in left.items() if series]))
        mixed.append(left[name].pop(0))
    assert testing.check_history(streams, mixed)
    swapped = [{("a", 1): ("a", 2), ("a", 2): ("a", 1)}.get(m, m) for m in mixed]
    (finding,) = testing.check_history(streams, swapped).reordered
    assert finding.stream == "a"


def test_keys_identify_messages() -> None:
    found = [{"n": 1, "time": 5}, {"n": 2, "time": 6}]
    assert testing.check_history([{"n": 1}, {"n": 2}], found, key="n")
    assert testing.check_history([1, 2], found, key=lambda m: m["n"] if isinstance(m, dict) else m)
    assert not testing.check_history([{"n": 1}, {"n": 2}], found)
    nested: Any = {"a": [1, {"b": {1, 2}, "c": (1, [2])}], "d": bytearray(b"x")}
    assert testing.check_history([nested], [nested])
    assert testing.check_history([{"n": float("nan")}], [{"n": float("nan")}])
    with pytest.raises(InvalidArgument, match="key="):
        testing.check_history({"a": [1], "b": [1]}, [1, 1])


def test_arrays_are_compared_whole() -> None:
    """The repr of a long one leaves most of it out."""
    numpy = pytest.importorskip("numpy")
    long, other = numpy.zeros(5000), numpy.zeros(5000)
    other[2500] = 1
    assert repr(long) == repr(other)
    assert testing.check_history([{"a": long}], [{"a": long.copy()}])
    assert not testing.check_history([{"a": long}], [{"a": other}])


def test_the_report_of_a_long_history_is_short() -> None:
    text = str(testing.check_history(range(1000), []))
    assert "1000 lost" in text and "995 more" in text and len(text) < 1000


def test_hashes() -> None:
    assert testing.check_hashes([(1, "x"), (2, "y"), (1, "x")]) == []
    assert len(testing.check_hashes([(1, "x"), (1, "y")])) == 1
    assert len(testing.check_hashes([({"n": 1}, "x"), ({"n": 2}, "x")])) == 1


@pytest.mark.damages_stores
def test_attempts_that_do_not_hold_are_found(tmp_path: Path) -> None:
    """An attempt is forged: its ranges have another hash, and so has the message that it names."""
    with cues.open(tmp_path / "store") as store:
        store.queue("a").appender().write_many([{"n": n} for n in range(3)])
        testing.run_until_idle(Graph("g", [Stream(lambda m: m, "a", "out", id="s")]), store)
        assert testing.check_attempts(store) == []
        log = store.queue("g.s").core.log
        pages = tries.TryRecords("g.s").step(tries.Taking(("g.s.a",), (4,), (5,)), b"x" * 16, {"out": 1}, False)
        store.core.commit(lambda txn: log.append(txn, pages))
        assert len(testing.check_attempts(store)) == 2
        assert store.check()


@pytest.mark.damages_stores
def test_attempts_that_name_what_is_not_there_are_found(tmp_path: Path) -> None:
    """Behind the end of a queue, on no queue at all, and a second attempt of one snapshot."""
    with cues.open(tmp_path / "store") as store:
        store.queue("a").appender().write_many([{"n": n} for n in range(3)])
        testing.run_until_idle(
            Graph("g", [Stream(lambda m: m, "a", "out", id="s", side_effects=True, step_s=None)]), store
        )
        assert testing.check_attempts(store) == []
        log = store.queue("g.s").core.log
        (attempt,) = [record for record in testing.messages(store, "g.s") if "attempt" in record["q/type"]]
        forged = {**attempt, "q.try/message-index": {"out": 9, "nowhere": 1}}
        pages = batch.build([forged], batch.OWN_BYTES_MAX, reserved=True)
        store.core.commit(lambda txn: log.append(txn, pages))
        second, there, queue = testing.check_attempts(store)
        assert "second" in second and "9 of out, which is not there" in there and "nowhere, a queue" in queue
        assert "nowhere" not in store.queues()


def test_the_clock_stands_advances_and_is_set(tmp_path: Path) -> None:
    start = datetime(2026, 1, 31, tzinfo=UTC)
    real = (clock.now_ns, clock.monotonic_ns)
    with cues.open(tmp_path / "store") as store, testing.Clock(start) as now:
        queue = store.queue("a")
        queue.appender().write({"n": 1})
        monotonic = clock.monotonic_ns()
        assert now.advance(90) == start + timedelta(seconds=90) == now.now
        queue.appender().write({"n": 2})
        now.set(start - timedelta(days=1))  # a wall clock stepped back: appends do not go below the last
        queue.appender().write({"n": 3})
        now.advance(timedelta(days=2))
        queue.appender().write({"n": 4})
        tailer = queue.tailer()
        times = []
        while tailer.read() is not None:
            assert tailer.envelope is not None
            times.append(tailer.envelope.time - start)
        assert [t.total_seconds() for t in times] == [0, 90, 90, 86_400]
        assert clock.monotonic_ns() - monotonic == (90 + 2 * 86_400) * 10**9
        with pytest.raises(InvalidArgument):
            now.advance(-1)
    assert (clock.now_ns, clock.monotonic_ns) == real


def test_crash_sites_are_those_that_a_run_passes(tmp_path: Path) -> None:
    graph = Graph("g", [Source("a"), Stream(lambda m: m, "a", "out", id="s", batch_size=2)])

    def run() -> None:
        with cues.open(tmp_path / "store", durability="process") as store:
            store.queue("a").appender().write_many([{"n": n} for n in range(3)])
            testing.run_until_idle(graph, store)

    sites = testing.crash_sites(run)
    assert ("commit.inside", 2) in sites and ("commit.inside", 3) not in sites
    assert ("function.before", 3) in sites and ("append.after", 1) in sites
    assert [p for p, _ in sites] == sorted([p for p, _ in sites], key=list(faults.POINTS).index)
    assert not faults.active


def test_a_simulated_crash_leaves_nothing_of_its_transaction() -> None:
    with testing.temporary_store() as store:
        graph = Graph("g", [Stream(lambda m: m, "a", "out", id="s")])
        store.queue("a").appender().write({"n": 1})
        for point, hit in testing.crash_sites(lambda: None) or [("commit.inside", 1), ("commit.before", 1)]:
            with testing.crash(point, hit, how="raise"), pytest.raises(testing.Crashed, match=point):
                testing.run_until_idle(graph, store)
            assert testing.messages(store, "out") == []
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "out") == [{"n": 1}]
    assert not faults.active
    with pytest.raises(InvalidArgument), testing.crash("commit.inside", how="politely"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match=r"commit\.inside"), testing.crash("commit"):
        pass


def test_runs_report_what_they_did() -> None:
    def f(message: Any) -> Any:
        if message["n"] == 2:
            raise ValueError
        return message

    with testing.temporary_store() as store:
        store.queue("a").appender().write_many([{"n": n} for n in range(5)])
        graph = Graph("g", [Stream(f, "a", "out", batch_size=1, retries=2), Stream(lambda m: m, "out", "b", id="s")])
        report = testing.run_until_idle(graph, store, stopped="return")
        assert report.decisions == {"f": "fresh", "s": "fresh"} and report.steps == {"f": 2, "s": 2}
        assert isinstance(report.stopped["f"], ProcessorStopped) and len(report.waits_s) == 2
        assert report.counters["s"].taken == 2
        contents = testing.contents(store)
        assert contents["positions"] == {"g.f.a": 3, "g.s.out": 3} and set(contents["queues"]) == {"a", "out", "b"}
        with pytest.raises(ProcessorStopped):
            testing.run_until_idle(graph, store)


def test_a_source_that_never_ends_is_cut_by_steps_max() -> None:
    def forever(position: Any) -> Any:
        n = position or 0
        while True:
            n += 1
            yield n, {"n": n}

    with testing.temporary_store() as store:
        report = testing.run_until_idle(Graph("g", [Source("a", forever, batch_size=3)]), store, steps_max=4)
        assert report.steps == {"a": 4} and len(testing.messages(store, "a")) == 12


def test_one_seed_one_interleaving() -> None:
    def order(seed: int | None) -> list[Any]:
        with testing.temporary_store() as store:
            store.queue("a").appender().write_many([{"n": n} for n in range(6)])
            store.queue("b").appender().write_many([{"n": 10 + n} for n in range(6)])
            streams = [Stream(lambda m: m, queue, "out", id=queue, batch_size=1) for queue in ("a", "b")]
            testing.run_until_idle(Graph("g", streams), store, seed=seed)
            return [m["n"] for m in testing.messages(store, "out")]

    assert order(None) == [0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15]
    assert order(7) == order(7)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_a_temporary_store_is_checked_on_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="a hole"), testing.temporary_store() as store:
        monkeypatch.setattr(type(store), "check", lambda self: ["a hole"])
    assert not Path(store.path).exists()
