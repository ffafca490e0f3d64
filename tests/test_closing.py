"""The end of a run closes windows, joins and files: when, in which order, how far, and under kills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import seeds

import cues
from cues import Graph, Source, faults, testing
from cues.cli import app
from cues.errors import GraphError
from cues.operate import processors as operate
from cues.processors import aggregates, joins, windows
from cues.processors.event_time import moment
from cues.processors.file_sink import FileSink
from cues.processors.reducers import count, sum

MINUTE = 60


def times(*seconds: int, key: str = "a") -> list[dict[str, Any]]:
    return [{"at": second, "key": key, "n": 1} for second in seconds]


def source(id: str, messages: list[dict[str, Any]]) -> Source:
    def rows(position: int | None) -> Any:
        for number in range(position or 0, len(messages)):
            yield number + 1, messages[number]

    return Source(id, rows)


def two_levels(messages: list[dict[str, Any]], **options: Any) -> Graph:
    """Minutes, and hours of minutes: the hours close after the minutes."""
    graph = Graph("g", errors="errors")
    graph.add(source("rows", messages))
    shared: dict[str, Any] = {"key": "key", **options}
    graph.add(windows.tumbling("rows", "minutes", "1m", time="at", reduce={"n": count()}, late="late", **shared))
    graph.add(windows.tumbling("minutes", "hours", "1h", time="start", reduce={"n": sum("n")}, late="later", **shared))
    return graph


def starts(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(int(message["start"].timestamp()), message["n"]) for message in messages]


def run(graph: Graph, store: cues.Store, **options: Any) -> dict[str, Any]:
    """Run to the end; return the counters."""
    with graph.start(store=store, **options) as running:
        assert running.wait_done()
        return running.counters()


def test_the_end_closes_windows_in_the_order_of_the_graph_and_no_further(store: cues.Store) -> None:
    graph = two_levels(times(5, 65, 70))
    counters = run(graph, store)
    assert starts(testing.messages(store, "minutes")) == [(0, 1), (60, 2)]
    assert starts(testing.messages(store, "hours")) == [(0, 3)]
    assert counters["g.minutes"].taken == 3  # the request is no message
    # The watermark of the minutes is at 120, and that of the hours at 3,600.
    graph = two_levels([*times(5, 65, 70), *times(120, 119, 3600)])
    run(graph, store)
    assert starts(testing.messages(store, "minutes"))[2:] == [(120, 1), (3600, 1)]
    (late,) = testing.messages(store, "late")
    assert (late["message"]["at"], late["watermark"]) == (119, moment(120 * 10**6))
    assert starts(testing.messages(store, "hours")) == [(0, 3), (3600, 1)]
    assert [m["message"]["n"] for m in testing.messages(store, "later")] == [1]  # the minute of 120


def test_a_run_with_nothing_new_makes_no_step(store: cues.Store) -> None:
    run(two_levels(times(5)), store)
    counters = run(two_levels(times(5)), store)
    assert not any(counter.steps for counter in counters.values())


def test_what_is_kept_is_open_for_the_next_run_and_is_closed_by_hand(store: cues.Store) -> None:
    run(two_levels(times(5), at_end="keep"), store)
    assert not testing.messages(store, "minutes")
    graph = two_levels(times(5, 6), at_end="keep")
    run(graph, store)
    assert not testing.messages(store, "minutes")
    with graph.start(store=store, sources=False) as running:
        assert running.close_open()
        assert starts(running.messages("hours")) == [(0, 2)]
        assert running.close_open()  # nothing is open
    assert starts(testing.messages(store, "minutes")) == [(0, 2)]


def test_without_sources_no_source_is_called(store: cues.Store) -> None:
    def never(position: Any) -> Any:
        raise AssertionError

    graph = Graph("g", [Source("rows", never)])
    graph.add(cues.Stream(lambda message: message, "rows", "out", id="same"))
    with graph.start(store=store, sources=False) as running:
        assert running.wait_done()
    assert not testing.messages(store, "out")


def test_a_graph_that_is_fed_closes_nothing_by_itself(store: cues.Store) -> None:
    graph = two_levels([])
    fed = Graph("g", [each for each in graph.processors.values() if each.kind != "source"], errors="errors")
    fed.source("rows")
    with fed.start(store=store) as running:
        running.send("rows", times(5)[0])
        assert running.wait_done(idle_exit_s=0.05)
        assert not running.messages("minutes")
        assert running.close_open()
        assert starts(running.messages("hours")) == [(0, 1)]


def test_a_paused_processor_and_those_after_it_stay_open(store: cues.Store) -> None:
    testing.run_until_idle(two_levels(times(5)), store)
    run(two_levels(times(5, 65), at_end="keep"), store)  # a minute is in its hour
    assert starts(testing.messages(store, "minutes")) == [(0, 1)]
    cues.pause(store, processor="minutes")
    told: list[Any] = []
    run(two_levels(times(5, 65)), store, listeners=(told.append,))
    texts = [event.text for event in told]
    assert "stays open at the end of the run: it is paused" in texts
    assert "stays open at the end of the run: minutes is paused" in texts
    with two_levels(times(5, 65)).start(store=store, sources=False) as running:
        assert not running.close_open()
    assert starts(testing.messages(store, "minutes")) == [(0, 1)] and not testing.messages(store, "hours")
    cues.resume(store, processor="minutes")
    run(two_levels(times(5, 65)), store)
    assert starts(testing.messages(store, "hours")) == [(0, 2)] and not testing.messages(store, "later")


def test_what_depends_on_a_processor_that_is_kept_open_stays_open(store: cues.Store) -> None:
    def graph_of(*seconds: int) -> Graph:
        graph = two_levels(times(*seconds))
        graph.processors["minutes"].fn.at_end = "keep"
        return graph

    for seconds in ((5,), (5, 65), (5, 65, 125)):
        run(graph_of(*seconds), store)
        assert not testing.messages(store, "hours")
    with graph_of(5, 65, 125).start(store=store, sources=False) as running:
        assert running.close_open()
    assert starts(testing.messages(store, "hours")) == [(0, 3)] and not testing.messages(store, "later")


def test_each_partition_is_closed(store: cues.Store) -> None:
    messages = [message for at in (5, 65) for key in "abcdefgh" for message in times(at, key=key)]
    graph = two_levels(messages)
    graph.queues["rows"] = cues.QueueOptions(partitions=3, key="key")
    run(graph, store)
    assert len(testing.messages(store, "minutes")) == 16
    assert sorted(m["key"] for m in testing.messages(store, "hours")) == list("abcdefgh")


def test_files_of_all_partitions_are_finished(store: cues.Store, tmp_path: Path) -> None:
    graph = Graph("g", [source("rows", [message for key in "abcdefgh" for message in times(5, key=key)])])
    graph.queues["rows"] = cues.QueueOptions(partitions=3, key="key")
    out = FileSink(tmp_path / "out", "jsonl")
    graph.add(out.sink("rows"))
    run(graph, store)
    assert len(out.finished()) == 3


def test_results_of_joins_that_wait_are_written_and_an_inner_join_keeps_its_messages(store: cues.Store) -> None:
    def graph_of(lefts: list[dict[str, Any]], rights: list[dict[str, Any]]) -> Graph:
        graph = Graph("g", [source("left", lefts), source("right", rights)])
        inputs: dict[str, Any] = {"l": "left", "r": "right"}
        shared: dict[str, Any] = {"key": "key", "time": "at"}
        graph.add(joins.interval(inputs, "inner", after="1h", late="late1", **shared))
        graph.add(joins.interval(inputs, "outer", after="1h", how="left", late="late2", **shared))
        graph.add(joins.as_of(inputs, "as-of", tolerance="1d", how="left", late="late3", **shared))
        return graph

    lefts, rights = times(100), times(50)
    run(graph_of(lefts, rights), store)
    assert not testing.messages(store, "inner")
    assert [(m["l"]["at"], m["r"]) for m in testing.messages(store, "outer")] == [(100, None)]
    assert [(m["l"]["at"], m["r"]["at"]) for m in testing.messages(store, "as-of")] == [(100, 50)]
    run(graph_of([*lefts, *times(101)], [*rights, *times(200)]), store)
    assert [(m["l"]["at"], m["r"]["at"]) for m in testing.messages(store, "inner")] == [(100, 200), (101, 200)]
    assert sorted(m["message"]["at"] for m in testing.messages(store, "late2")) == [
        101,
        200,
    ]  # the outer join has moved on
    assert not testing.messages(store, "late1") and not testing.messages(store, "late3")
    assert [(m["l"]["at"], m["r"]["at"]) for m in testing.messages(store, "as-of")] == [(100, 50), (101, 50)]


def test_a_wrong_end_is_refused() -> None:
    with pytest.raises(GraphError, match="at_end='later' is unknown"):
        two_levels([], at_end="later")


KINDS = {
    "tumbling": lambda: windows.tumbling("rows", "out", "1m", **SHARED),
    "hopping": lambda: windows.hopping("rows", "out", "1m", "20s", **SHARED),
    "sessions": lambda: windows.sessions("rows", "out", "30s", **SHARED),
    "counted": lambda: windows.counted(
        "rows", "out", 5, within="1m", **{name: each for name, each in SHARED.items() if name != "late"}
    ),
    "every": lambda: aggregates.aggregate("rows", "out", by="key", time="at", every="1m", reduce={"n": count()}),
}
SHARED: dict[str, Any] = {"time": "at", "key": "key", "late": "late", "delay": "10s", "reduce": {"n": count()}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("days", [1, 3])
def test_the_end_gives_what_the_end_of_time_gives(kind: str, days: int) -> None:
    """A run whose windows are closed, against one whose watermark is moved to the end by a message."""
    chance = random.Random(seeds.new())
    messages = times(*[chance.randrange(600) for _ in range(60)])
    for message in messages:
        message["key"] = chance.choice("abc")

    def results(end: bool) -> list[Any]:
        with testing.temporary_store() as store:
            graph = Graph("g", [KINDS[kind]()], errors="errors")
            graph.source("rows")
            appender = store.queue("rows").appender()
            appender.write_many(messages)
            if end:
                testing.run_until_idle(graph, store, close_open=True)
            else:
                appender.write(windows.watermark(None))
                testing.run_until_idle(graph, store)
            assert not testing.messages(store, "errors")
            return testing.messages(store, "out")

    assert sorted(results(True), key=repr) == sorted(results(False), key=repr) != []


@pytest.mark.slow
def test_death_at_each_point_closes_once() -> None:
    def played(site: tuple[str, int] | None = None) -> list[Any]:
        with testing.temporary_store() as store:
            for _ in range(3):  # the second run is the one after the kill, the third has nothing to do
                try:
                    testing.run_until_idle(two_levels(times(5, 65, 70)), store, close_open=True)
                except testing.Crashed:
                    assert site is not None
            return [starts(testing.messages(store, name)) for name in ("minutes", "hours")]

    points = (*faults.CLOSING_POINTS, *faults.STEP_POINTS)
    sites = testing.crash_sites(played, points)
    assert {point for point, _ in sites} >= {*faults.CLOSING_POINTS, "commit.inside"}
    for point, hit in sites:
        with testing.crash(point, hit, how="raise"):
            assert played((point, hit)) == [[(0, 1), (60, 2)], [(0, 3)]], (point, hit)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_it_is_the_same_in_workers(workers: int | None, tmp_path: Path) -> None:
    file = tmp_path / "graph.py"
    folder = str(Path(__file__).parent)
    file.write_text(
        f"import sys; sys.path.insert(0, {folder!r})\nimport test_closing\n"
        "graph = test_closing.two_levels(test_closing.times(5, 65, 70))\n"
    )
    given = [] if workers is None else ["--workers", str(workers)]
    assert app.run(["run", str(file), "--store", str(tmp_path / "s"), "--json", *given]) == 0
    with cues.Store(tmp_path / "s", readonly=True) as store:
        assert starts(testing.messages(store, "hours")) == [(0, 3)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "graph.py", str(tmp_path / "s")
    file.write_text(
        "import cues\nfrom cues.processors import windows\nfrom cues.processors.reducers import count\n"
        "from cues.processors.file_sink import FileSink\n"
        "graph = cues.Graph('g')\n"
        "@graph.source('rows')\n"
        "def rows(position):\n    if position is None:\n        yield 1, {'at': 5}\n"
        "graph.add(windows.tumbling('rows', 'out', '1m', time='at', reduce={'n': count()}, late='l', at_end='keep'))\n"
        f"graph.add(FileSink({str(tmp_path / 'out')!r}, at_end='keep').sink('out'))\n"
    )
    words = [str(file), "--store", store]
    assert app.run(["close", *words]) == 1
    assert "There is no store" in capsys.readouterr().err
    assert app.run(["run", *words, "--quiet"]) == 0
    capsys.readouterr()
    cues.pause(store, processor="out")
    assert app.run(["close", *words, "--table"]) == 1
    captured = capsys.readouterr()
    assert (
        "not all is closed" in captured.out and "g.out stays open at the end of the run: it is paused" in captured.err
    )
    cues.resume(store, processor="out")
    assert app.run(["close", *words, "--table"]) == 0
    shown = capsys.readouterr().out
    assert "g: closed; 1 message written" in shown and "finished " in shown
    (path,) = (tmp_path / "out").glob("*.jsonl")
    assert '"n": 1' in path.read_text() or '"n":1' in path.read_text()
    assert app.run(["close", *words, "--table"]) == 0
    assert capsys.readouterr().out == "g: nothing was open\n"


def test_forget_deletes_a_request_that_waits(store: cues.Store) -> None:
    with testing.crash("closing.asked", how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(two_levels(times(5)), store, close_open=True)
    assert len(testing.messages(store, "g.minutes.closing.asked")) == 1
    testing.run_until_idle(Graph("g", [Source("rows")]), store)
    operate.forget(store, "g.minutes")
    assert testing.messages(store, "g.minutes.closing.asked") == testing.messages(store, "g.minutes.closing") == []
    testing.run_until_idle(two_levels(times(5)), store)  # a new processor of this name was asked for nothing
    assert testing.messages(store, "minutes") == []


def test_a_replay_closes_what_was_closed(tmp_path: Path) -> None:
    for closes in (True, False):
        graph = two_levels(times(5, 65, 70), at_end="close" if closes else "keep")
        with cues.open(tmp_path / f"old{closes}") as store:
            run(graph, store)
        report = cues.replay(graph, store=tmp_path / f"old{closes}", into=tmp_path / f"new{closes}")
        assert report.equal
        with cues.Store(tmp_path / f"new{closes}", readonly=True) as new:
            assert starts(testing.messages(new, "hours")) == ([(0, 3)] if closes else [])
