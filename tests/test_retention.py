"""Retention: what leaves the front by itself, and what stays whatever the policy."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import Graph, Sink, groups, testing
from cues.queues import retention
from cues.queues.options import changed
from cues.storage import format_record
from cues.tools import metrics

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """Two tests may have a store at the same path."""
    retention.said.clear()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[cues.Store]:
    with cues.open(tmp_path / "store", durability="process") as store:
        yield store


def test_a_process_that_only_appends_knows_readers_of_all_kinds() -> None:
    """It imports no group and no graph; their rows are in its store all the same, and retention waits for them."""
    code = "import cues; cues.Store; from cues.queues import readers; print(*[kind.name for kind in readers.kinds()])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(out.stdout.split()) == ["group", "other", "processor", "tailer"]


def test_what_a_group_has_not_read_stays_although_the_writer_opens_no_group(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("q", retention="read").appender().write_many([{"n": n} for n in range(3)])
        with groups.Member(store, "q", "g"):
            pass
    write = "store.queue('q').tailer('t').read_many(9); store.queue('q').appender().write({'n': 3})"
    code = f"import cues, sys\nwith cues.open(sys.argv[1]) as store: {write}"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True)
    with cues.open(tmp_path / "store") as store:
        assert numbers(store.queue("q")) == [0, 1, 2, 3]


def numbers(queue: cues.Queue) -> list[Any]:
    return [message["n"] for message in queue.tailer()]


@pytest.mark.parametrize("age", ["2h", 7200, HOUR * 2], ids=repr)
def test_by_age_what_is_older_goes_at_the_next_append(store: cues.Store, age: Any) -> None:
    queue = store.queue("q", retention=cues.Retention(age=age))
    appender = queue.appender()
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for n in range(6):
            appender.write({"n": n})
            clock.advance(HOUR)
        # The last look was at 5:00, when what was written before 3:00 went.
        assert numbers(queue) == [3, 4, 5]
        clock.advance(HOUR * 100)
        assert numbers(queue) == [3, 4, 5]
        appender.write({"n": 6})
        assert numbers(queue) == [6] and queue.first_index == 7


def test_by_bytes_the_file_stays_bounded(store: cues.Store) -> None:
    """Twenty times the bound passes; what stays is about the bound, and the newest."""
    queue = store.queue("q", retention="400KB")
    appender = queue.appender()
    for start in range(0, 40_000, 500):
        appender.write_many([{"n": n, "text": "x" * 180} for n in range(start, start + 500)])
    kept = numbers(queue)
    assert kept == list(range(kept[0], 40_000))
    assert 1_000 <= len(kept) <= 2_500
    assert store.info()["used"] < 4 * 400_000


def test_by_reading_waits_for_every_known_reader(store: cues.Store) -> None:
    """A processor and a named tailer read at their own pace; messages that both have read are removed."""
    queue = store.queue("q", retention="read")
    appender = queue.appender()
    for n in range(10):
        appender.write({"n": n})
    assert len(queue) == 10, "nobody is known to read it"
    slow = queue.tailer("slow")
    slow.read_many(4)
    appender.write({"n": 10})
    assert queue.first_index == 5
    testing.run_until_idle(Graph("g", [Sink(lambda m: None, "q", id="s")]), store)
    appender.write({"n": 11})
    assert queue.first_index == 5, "the tailer is behind"
    slow.read_many(100)
    appender.write({"n": 12})
    assert queue.first_index == 12, "the processor has not read 12"


def test_a_policy_that_passes_a_reader_warns_once(store: cues.Store, caplog: pytest.LogCaptureFixture) -> None:
    queue = store.queue("q", retention=5)
    queue.tailer("slow").to_index(1)
    with caplog.at_level(logging.WARNING, "cues"):
        for n in range(20):
            queue.appender().write({"n": n})
    assert numbers(queue) == [15, 16, 17, 18, 19]
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("retention of q deletes messages that slow has not read: it is at ")


@pytest.mark.parametrize("policy", [3, "1s", "8KB"])
def test_the_messages_of_a_pending_step_stay_and_this_is_reported(
    store: cues.Store, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """A sink dies in its function: the messages of its snapshot stay until it has taken them again."""
    queue = store.queue("q", retention=policy)
    seen: list[int] = []
    sink = Sink(lambda m: seen.append(m["n"]), "q", id="s", batch_size=2)
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        queue.appender().write_many([{"n": n} for n in range(2)])
        with testing.crash("function.after", 2, how="raise"), pytest.raises(testing.Crashed):
            testing.run_until_idle(Graph("g", [sink]), store)
        with caplog.at_level(logging.WARNING, "cues"):
            for n in range(2, 60):
                clock.advance(timedelta(seconds=5))
                queue.appender().write({"n": n, "text": "x" * 500})
        assert queue.first_index == 1
        assert "waits for a step of g.s" in caplog.text
        seen.clear()
        testing.run_until_idle(Graph("g", [sink]), store)
        assert seen == list(range(60))
        clock.advance(timedelta(seconds=5))
        queue.appender().write({"n": 60, "text": "x" * 500})
        assert queue.first_index > 2


def test_the_policy_survives_reopening_and_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with cues.open(path) as store:
        store.queue("q", retention="10d")
    with cues.open(path) as store:
        assert store.queue("q").options.retention == cues.Retention(age=864_000)
        store.queue("q", retention=cues.Retention(bytes="2GiB", read=True))
        assert store.queue("q").options.retention == cues.Retention(bytes=2 << 30, read=True)


def test_a_policy_with_reading_and_a_count_says_when_it_passes_a_reader(
    store: cues.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part of the policy removes messages: the count does not wait for the reader that "read" would wait for."""
    queue = store.queue("q", retention=cues.Retention(read=True, count=5))
    slow = queue.tailer("slow")
    slow.to_index(1)
    with caplog.at_level(logging.WARNING, "cues"):
        for n in range(5):
            queue.appender().write({"n": n})
        assert not caplog.records
        for n in range(5, 20):
            queue.appender().write({"n": n})
    assert numbers(queue) == [15, 16, 17, 18, 19]
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("retention of q deletes messages that slow has not read: it is at ")
    assert slow.read() == {"n": 15}


@pytest.mark.parametrize("policy", [5, "1s", "40KB"], ids=["count", "age", "bytes"])
def test_a_policy_that_passes_a_processor_warns_and_the_processor_continues_after_it(
    store: cues.Store, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """The processor is at a commit, with nothing under way; it takes the remaining messages once, in order."""
    queue = store.queue("q", retention=policy)
    taken: list[int] = []
    graph = Graph("g", [Sink(lambda m: taken.append(m["n"]), "q", id="s")])
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        queue.appender().write({"n": 0})
        testing.run_until_idle(graph, store)
        with caplog.at_level(logging.WARNING, "cues"):
            for n in range(1, 200):
                clock.advance(timedelta(milliseconds=200))
                queue.appender().write({"n": n, "text": "x" * 1000})
        left = numbers(queue)
        assert 0 < len(left) < 100
        (told,) = [r.getMessage() for r in caplog.records]
        assert told.startswith("retention of q deletes messages that g.s has not read: it is at ")
        testing.run_until_idle(graph, store)
    assert taken == [0, *left]


def test_by_reading_a_step_that_has_not_committed_is_waited_for(store: cues.Store) -> None:
    """A sink dies in its function; another reader is far ahead, and nothing that the sink took may go."""
    queue = store.queue("q", retention="read")
    seen: list[int] = []
    sink = Sink(lambda m: seen.append(m["n"]), "q", id="s", batch_size=4)
    queue.appender().write_many([{"n": n} for n in range(4)])
    with testing.crash("function.after", 3, how="raise"), pytest.raises(testing.Crashed):
        testing.run_until_idle(Graph("g", [sink]), store)
    ahead = queue.tailer("ahead")
    for n in range(4, 30):
        queue.appender().write({"n": n})
        ahead.read_many(100)
    assert queue.first_index == 1
    seen.clear()
    testing.run_until_idle(Graph("g", [sink]), store)
    assert seen == list(range(30))
    queue.appender().write({"n": 30})
    assert queue.first_index == 31


# --- clocks that step back --------------------------------------------------------------------------


def test_a_clock_that_steps_back_loses_no_place_in_time(store: cues.Store) -> None:
    """Messages that are written while the clock is late have the last time: seeks and purges by time stay exact."""
    queue = store.queue("q")
    ten = datetime(2026, 1, 1, 10, tzinfo=UTC)
    with testing.Clock(ten) as clock:
        queue.appender().write_many([{"n": n} for n in range(3)])  # 1 to 3, at ten
        clock.set(ten - 2 * HOUR)
        queue.appender().write({"n": 3})  # 4 and 5, as of ten
        clock.advance(HOUR)
        queue.appender().write_many([{"n": 4}])
        clock.set(ten + HOUR)
        queue.appender().write({"n": 5})  # 6, at eleven
        tailer = queue.tailer()
        for when, index in (
            (ten - 3 * HOUR, 1),
            (ten - HOUR, 1),
            (ten, 1),
            (ten + timedelta(microseconds=1), 6),
            (ten + HOUR, 6),
            (ten + 2 * HOUR, 7),
        ):
            tailer.to_time(when)
            assert tailer.index == index, when
        times = []
        tailer.to_start()
        for _ in tailer:
            assert tailer.envelope is not None
            times.append(tailer.envelope.time)
        assert times == [ten] * 5 + [ten + HOUR]
        clock.set(ten - 9 * HOUR)
        assert queue.purge(before=ten) == 0
        assert queue.purge(before=ten + HOUR) == 5
        assert numbers(queue) == [5]


def test_age_counts_from_the_time_that_was_written_down(store: cues.Store) -> None:
    """While the clock is late nothing is old or removed too early; when it is right again old messages are removed."""
    queue = store.queue("q", retention="1h")
    appender = queue.appender()
    ten = datetime(2026, 1, 1, 10, tzinfo=UTC)
    with testing.Clock(ten) as clock:
        appender.write({"n": 0})
        clock.set(ten - 48 * HOUR)
        for n in range(1, 4):
            appender.write({"n": n})  # as of ten
            clock.advance(2 * HOUR)
        assert numbers(queue) == [0, 1, 2, 3]
        clock.set(ten + HOUR)
        appender.write({"n": 4})
        assert numbers(queue) == [0, 1, 2, 3, 4], "an hour old, not older"
        clock.set(ten + HOUR + timedelta(seconds=1))
        appender.write({"n": 5})
        assert numbers(queue) == [4, 5]


def test_a_lease_does_not_care_for_the_wall_clock(store: cues.Store) -> None:
    """A graph runs on, and another start is refused, while the clock jumps a year back and forth."""
    seen: list[int] = []
    graph = Graph("g", [Sink(lambda m: seen.append(m["n"]), "q", id="s")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with testing.Clock(start) as clock, graph.start(store=store) as running:
        for n, days in enumerate((0, -365, 365, -1)):
            clock.set(start + timedelta(days=days))
            with pytest.raises(cues.AlreadyRunning):
                graph.start(store=store, take_over=True)
            running.send("q", {"n": n})
            assert running.wait_idle(timeout=60)
            (found,) = metrics.of_processors(store)
            assert found.owner is not None and found.owner.lease_s > 0
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_a_log_handler_may_write_to_the_store_whose_retention_it_hears_of(tmp_path: Path, durability: str) -> None:
    """The warning was logged inside the write transaction, so the handler waited for itself."""
    heard: list[str] = []

    class ToQueue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            logs.write({"text": record.getMessage()})

    handler = ToQueue()
    with cues.open(tmp_path / "s", durability=durability) as store:
        logs = store.queue("logs").appender()
        queue = store.queue("q", retention=2)
        queue.appender().write({"n": 0})
        queue.tailer("slow").read()
        logging.getLogger("cues").addHandler(handler)
        try:
            for n in range(6):
                queue.appender().write({"n": n})
        finally:
            logging.getLogger("cues").removeHandler(handler)
        assert any("slow" in text for text in heard)
        assert [m["text"] for m in store.queue("logs").tailer()] == heard


def test_one_append_by_a_clock_that_is_a_year_ahead_empties_nothing_and_stops_no_retention(store: cues.Store) -> None:
    """A thousand messages an hour are kept for one hour; the clock is wrong once, in the middle of two days."""
    queue = store.queue("q", retention="1h")
    appender = queue.appender()
    kept: list[int] = []
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for quarter in range(4 * 48):
            if quarter == 40:
                before = len(queue)
                right = clock.now
                clock.set(right + timedelta(days=365))
                appender.write({"n": "glitch"})
                assert len(queue) == before + 1
                clock.set(right)
            appender.write_many([{"n": quarter}] * 250)
            kept.append(len(queue))
            clock.advance(timedelta(minutes=15))
    assert max(kept) <= 250 * 8 and min(kept[8:]) >= 250 * 4
    assert not store.check()


def test_a_late_clock_that_is_corrected_removes_old_messages_a_little_later(store: cues.Store) -> None:
    queue = store.queue("q", retention="1h")
    appender = queue.appender()
    found: list[list[int]] = []
    with testing.Clock(datetime(2000, 1, 1, tzinfo=UTC)) as clock:
        appender.write({"n": 0})
        clock.advance(timedelta(days=9000))
        for n in range(1, 5):
            appender.write({"n": n})
            found.append(numbers(queue))
            clock.advance(timedelta(minutes=4))
    assert found == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


# --- what is unread, and the default of graphs ---


def test_what_is_unread_stays_although_it_is_old(store: cues.Store) -> None:
    queue = store.queue("q", retention=cues.Retention(age="2h", unread=True))
    appender, tailer = queue.appender(), queue.tailer("t")
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for n in range(4):
            appender.write({"n": n})
        assert [message["n"] for message in tailer.read_many(2)] == [0, 1]
        clock.advance(HOUR * 3)
        appender.write({"n": 4})
        assert numbers(queue) == [2, 3, 4]
        assert [message["n"] for message in tailer.read_many(9)] == [2, 3, 4]
        clock.advance(HOUR * 3)
        appender.write({"n": 5})
        assert numbers(queue) == [5]


def test_many_old_messages_go_with_the_next_appends_and_not_one_batch_a_second(store: cues.Store) -> None:
    """A policy with an age only is looked at again after a while, but not while there is something to delete."""
    queue = store.queue("q", retention=cues.Retention(age="2h", unread=True))
    appender = queue.appender()
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for n in range(2500):
            appender.write({"n": n})
        clock.advance(HOUR * 3)
        for n in range(3):
            appender.write({"n": n})
        assert numbers(queue) == [0, 1, 2]


def test_a_partition_that_was_added_keeps_what_its_processor_has_not_begun_to_read(store: cues.Store) -> None:
    queue = store.queue("q", key="n", retention=cues.Retention(age="2h", unread=True))
    graph = Graph("g")
    graph.sink("q", id="s")(lambda message: None)
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        queue.appender().write({"n": 0})
        testing.run_until_idle(graph, store)
        queue.grow(2)
        queue.appender().write_many([{"n": n} for n in range(40)])
        clock.advance(HOUR * 3)
        queue.appender().write_many([{"n": n} for n in range(40)])
        assert sorted(numbers(queue))[-80:] == sorted([*range(40), *range(40)])
        testing.run_until_idle(graph, store)
        clock.advance(HOUR * 3)
        queue.appender().write_many([{"n": n} for n in range(40)])
        assert sorted(numbers(queue)) == list(range(40))


def test_of_two_graphs_that_are_merged_the_one_that_keeps_everything_is_heard() -> None:
    said = Graph("a", queues={"rows": cues.QueueOptions(retention=None)})
    silent = Graph("b", queues={"rows": cues.QueueOptions()})
    for graph in (said, silent):
        graph.stream("rows", f"{graph.id}-out", id=f"{graph.id}-copy")(lambda row: row)
    for pair in ((said, silent), (silent, said)):
        assert cues.merge("both", *pair).queues["rows"].keeps_all


def test_unread_alone_deletes_nothing_and_is_refused() -> None:
    with pytest.raises(cues.InvalidArgument, match="no limit"):
        cues.Retention(unread=True)


def test_an_earlier_version_refuses_a_store_with_such_a_queue(store: cues.Store) -> None:
    def needs() -> list[str]:
        with store.core.view() as txn:
            return list(format_record.record_of(txn)["requires"])

    store.queue("q", retention="7d")
    assert "unread" not in needs()
    store.queue("q", retention=cues.Retention(age="7d", unread=True))
    assert "unread" in needs()


def orders(**queues: cues.QueueOptions) -> Graph:
    """Rows that arrive a day each, a sink, results that no processor reads, and failures that one does."""
    graph = Graph("shop", queues=queues, errors="errors")

    @graph.source("rows")
    def rows(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        at = (position or 0) + 1
        yield from ((at * 10 + n, {"n": n, "day": at}) for n in range(10)) if at < 2 else ()

    @graph.stream("rows", {"good": "good", "result": "result"})
    def sort(row: dict[str, Any]) -> Any:
        if row["n"] == 3:
            raise ValueError("three")
        return {"good": row, "result": row}

    graph.sink("good", id="save")(lambda row: None)
    graph.sink("errors", id="report")(lambda row: None)
    graph.sink("orders", id="fed")(lambda row: None)
    return graph


def kept_by(path: Path) -> dict[str, cues.Retention | None]:
    with cues.open(path) as store:
        return {name: store.queue(name).options.retention for name in store.queues()}


def test_a_new_queue_between_processors_keeps_seven_days_and_what_is_unread(tmp_path: Path) -> None:
    with orders().start(store=tmp_path / "store") as running:
        running.wait_idle(60)
    between = cues.Retention(age="7d", unread=True)
    assert kept_by(tmp_path / "store") == {
        "rows": between,
        "good": between,
        "result": None,  # no processor reads it: people and other programs may
        "errors": None,  # they are there until they are redriven or discarded
        "orders": None,  # written from outside
    }


def test_a_retention_that_is_given_holds_and_none_keeps_everything(tmp_path: Path) -> None:
    given = {"rows": cues.QueueOptions(retention=None), "good": cues.QueueOptions(retention=5)}
    for _ in range(2):
        with orders(**given).start(store=tmp_path / "store") as running:
            running.wait_idle(60)
        kept = kept_by(tmp_path / "store")
        assert kept["rows"] is None and kept["good"] == cues.Retention(count=5)
    with orders().start(store=tmp_path / "store") as running:  # says nothing of them any more
        running.wait_idle(60)
    assert kept_by(tmp_path / "store") == kept
    everything = Graph("all", queues={"*": cues.QueueOptions(retention=None, metadata={"t"})})
    everything.stream("rows", "more", id="copy")(lambda row: row)
    everything.sink("more", id="end")(lambda row: None)
    with everything.start(store=tmp_path / "all") as running:
        running.wait_idle(60)
    assert set(kept_by(tmp_path / "all").values()) == {None}


def test_an_existing_queue_keeps_what_it_kept(tmp_path: Path) -> None:
    with cues.open(tmp_path / "store") as store:
        store.queue("rows")
        store.queue("good", retention="10d")
    with orders(good=cues.QueueOptions(metadata={"t"})).start(store=tmp_path / "store") as running:
        running.wait_idle(60)
    kept = kept_by(tmp_path / "store")
    assert kept["rows"] is None and kept["good"] == cues.Retention(age="10d")


def test_options_say_as_plain_data_whether_a_retention_was_given() -> None:
    for options, plain in (
        (cues.QueueOptions(), {}),
        (cues.QueueOptions(retention=None), {"retention": None}),
        (cues.QueueOptions(retention="7d"), {"retention": {"age": 604_800.0}}),
    ):
        assert options.to_dict() == plain
        assert cues.QueueOptions.from_dict(plain).to_dict() == plain
        assert changed(options, {"partitions": 2}).to_dict() == plain | {"partitions": 2}


def test_a_run_a_day_leaves_the_rows_of_seven_days(tmp_path: Path) -> None:
    """By cron: each run takes a hundred rows. The rows of the last week stay, and the failures of all days."""
    graph, day = Graph("daily", errors="errors"), 0

    @graph.source("rows")
    def rows(position: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from ((n, {"n": n}) for n in range((position or 0) + 1, day * 100 + 1))

    @graph.stream("rows", "good")
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] % 100 == 0:
            raise ValueError("a hundred")
        return row

    graph.sink("good", id="save")(lambda row: None)
    with testing.Clock(datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        for today in range(1, 21):
            day = today
            testing.run_until_idle(graph, tmp_path / "store")
            clock.advance(HOUR * 24)
    with cues.open(tmp_path / "store") as store:
        # Whole record batches go, with the append of a day: those of seven days and of this one stay.
        assert [n for n in numbers(store.queue("rows")) if n <= 1200] == []
        assert numbers(store.queue("rows"))[-700:] == list(range(1301, 2001))
        assert len(numbers(store.queue("good"))) < 900
        assert len(list(store.queue("errors").tailer())) == 20
