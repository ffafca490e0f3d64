"""Provenance columns against the plain thing: a list with one metadata map a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sets import slow_except

from cues.base import clock
from cues.records import provenance
from cues.records.provenance import Provenance


def maps(found: Provenance) -> list[dict[str, Any]]:
    return [found.at(offset) for offset in range(found.count)]


COUNTS = st.integers(1, 20)
BIG = st.sampled_from([0, 1, 255, 256, 70_000, 1 << 33, (1 << 63) - 50])


@st.composite
def runs(draw: st.DrawFn, count: int | None = None) -> Provenance:
    """Any provenance that batches can have."""
    n = draw(COUNTS) if count is None else count
    columns = {}
    for queue in draw(st.sets(st.sampled_from(["a", "b", "tx/t"]))):
        start = draw(st.integers(1, 1000))
        t: Any = draw(
            st.sampled_from(["range", "list", "int"] if queue == "tx/t" else ["range", "list", "int", "none"])
        )
        t = {"range": range(start, start + n), "int": start, "none": None}.get(t, "list")
        if t == "list":
            t = [start + draw(BIG) for _ in range(n)]
        time = None
        if queue != "tx/t":
            time = draw(st.none() | st.just(10**18) | st.lists(st.integers(0, 10**19), min_size=n, max_size=n))
            if t is None and time is None:
                time = 5
        columns[queue] = (t, time)
    extra = draw(
        st.none()
        | st.just({"x": 1})
        | st.lists(st.none() | st.just({"q/queue": {"a": {"y": 2}}}), min_size=n, max_size=n)
    )
    return Provenance(n, columns, extra)


@pytest.mark.parametrize("examples", slow_except([30], [30, 150]))
def test_encoding_keeps_every_map(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(runs())
    def check_one(found: Provenance) -> None:
        assert maps(provenance.decode(found.encode(), found.count)) == maps(found)

    check_one()


@pytest.mark.parametrize("examples", slow_except([30], [30, 150]))
def test_slices_selections_and_spreads_are_those_of_the_list(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(runs(), st.data())
    def check_one(found: Provenance, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, found.count))
        stop = data.draw(st.integers(start, found.count))
        assert maps(found.slice(start, stop)) == maps(found)[start:stop]
        offsets = data.draw(st.lists(st.integers(0, found.count - 1), min_size=1, max_size=10))
        assert maps(found.select(offsets)) == [maps(found)[o] for o in offsets]
        assert maps(found.spread(3)) == [maps(found)[-1]] * 3
        if start < stop:
            part = found.slice(start, stop)
            assert maps(provenance.decode(part.encode(), part.count)) == maps(found)[start:stop]

    check_one()


@pytest.mark.parametrize("examples", slow_except([30], [30, 150]))
def test_a_join_has_what_each_side_had_and_the_first_says(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check_one(data: st.DataObject) -> None:
        count = data.draw(COUNTS)
        left, right = data.draw(runs(count)), data.draw(runs(count))
        for offset, found in enumerate(maps(provenance.merge([left, right]))):
            mine, theirs = left.at(offset), right.at(offset)
            for queue in ("a", "b"):
                came = {}
                for side in (
                    theirs,
                    mine,
                ):  # both indices and times of one side, never the index of one and the time of another
                    entry = side.get("q/queue", {}).get(queue, {})
                    if "q/t" in entry or "q/time" in entry:
                        came = {key: value for key, value in entry.items() if key != "y"}
                entry = found.get("q/queue", {}).get(queue, {})
                assert {key: value for key, value in entry.items() if key != "y"} == came
            assert found.get("tx/t") == mine.get("tx/t", theirs.get("tx/t"))

    check_one()


def test_batches_of_one_queue_join_to_one_range() -> None:
    parts = [Provenance(3, {"a": (range(5, 8), 7)}), Provenance(2, {"a": (range(8, 10), 7)})]
    joined = provenance.concat(parts)
    assert joined.columns == {"a": (range(5, 10), 7)}
    assert maps(joined) == [m for part in parts for m in maps(part)]


@pytest.mark.parametrize("examples", slow_except([30], [30, 150]))
def test_consecutive_runs_keep_their_maps(examples: int) -> None:
    """Messages that came another way than their neighbours do not get an index 0 of the year 1970."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(runs(), min_size=1, max_size=3))
    def check_one(parts: list[Provenance]) -> None:
        assert maps(provenance.concat(parts)) == [m for part in parts for m in maps(part)]

    check_one()


def test_a_column_takes_the_bytes_that_its_spread_needs() -> None:
    near = Provenance(100, {"a": ([10**12 + i * 2 for i in range(100)], None)})
    far = Provenance(100, {"a": ([10**12 + i * 500 for i in range(100)], None)})
    assert len(near.encode()) < 130 < 210 < len(far.encode()) < 240
    assert len(Provenance(100, {"a": (range(7, 107), 5)}).encode()) < 12


def test_times_are_shown_as_aware_datetimes() -> None:
    found = Provenance(1, {"a": (None, 1_359_633_600_000_000_000)}).at(0)
    assert found == {"q/queue": {"a": {"q/time": clock.to_datetime(1_359_633_600_000_000_000)}}}
    assert found["q/queue"]["a"]["q/time"].utcoffset() is not None


def test_what_users_write_wins_inside_maps_only_where_it_says() -> None:
    found = Provenance(1, {"a": (range(3, 4), None)}, {"q/queue": {"a": {"note": "x"}, "b": 1}, "tx/t": 9})
    assert found.at(0) == {"q/queue": {"a": {"q/t": 3, "note": "x"}, "b": 1}, "tx/t": 9}


def test_nothing_is_false_and_an_empty_extra_is_something() -> None:
    assert not Provenance(3, {})
    assert Provenance(3, {}, [None, None, {}])
