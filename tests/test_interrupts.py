"""The end of a source in a long call: it is interrupted, and its thread has ended before the process does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import until

import cues
from cues.processors.sql_source import Rows


class Slow:
    """A source in a call that only ``interrupt`` ends, as one in native code."""

    __name__ = "slow"

    def __init__(self) -> None:
        self.inside, self.told = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self, position: int | None) -> Iterator[tuple[int, dict[str, int]]]:
        self.thread = threading.current_thread()
        yield 1, {"n": 1}
        self.inside.set()
        assert self.told.wait(60)
        yield 2, {"n": 2}

    def interrupt(self) -> None:
        self.told.set()


def test_a_source_is_interrupted_and_its_thread_has_ended_when_the_graph_has(tmp_path: Path) -> None:
    source = Slow()
    graph = cues.Graph("g", [cues.Source("q", source)], durability="process")
    with graph.start(store=tmp_path / "s"):
        assert source.inside.wait(60)
    assert source.thread is not None and not source.thread.is_alive()


def test_a_query_of_duckdb_ends_with_the_graph(tmp_path: Path) -> None:
    """The query would take minutes; a process that ends inside of it is aborted."""
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(tmp_path / "x.duckdb")) as database:
        database.execute("create table t as select range as n from range(200000)")
        database.execute("create view slow as select a.n from t a, t b where md5((a.n + b.n)::varchar) = '' order by 1")
    rows, before = Rows(tmp_path / "x.duckdb", "slow", "n"), set(threading.enumerate())
    with cues.Graph("g", [cues.Source("q", rows)], durability="process").start(store=tmp_path / "s"):
        until(lambda: rows._reader is not None and rows._reader._interrupt is not None)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.endswith("generator")]
