"""The file source and the file sink on objects of an S3 server (moto, on loopback), through fsspec."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import object_store
import proxies
import pytest

import cues
from cues import testing
from cues.processors import places
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("moto")
obstore = pytest.importorskip("obstore.fsspec")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("s3")]
ROWS = [{"n": n} for n in range(9)]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """The filesystem ``s3`` of fsspec through obstore: s3fs and moto ask for different versions of botocore."""
    from fsspec.registry import _registry

    former = dict(_registry)
    with object_store.running() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        object_store.make_bucket("files")
        obstore.register("s3")
        try:
            yield fsspec.filesystem("s3")
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            _registry.clear()
            _registry.update(former)


def graph(place: str, sink: FileSink) -> cues.Graph:
    graph = cues.Graph("g")
    graph.add(cues.Source("rows", Files(f"s3://files/{place}/*.jsonl")))
    graph.add(sink.sink("rows", batch_size=4, step_s=None))
    return graph


def filled(s3: Any, place: str) -> None:
    for number in range(3):
        lines = "".join(f'{{"n": {row["n"]}}}\n' for row in ROWS[3 * number : 3 * number + 3])
        s3.pipe_file(f"s3://files/{place}/{number}.jsonl", lines.encode())


def test_a_crash_anywhere_leaves_each_row_in_one_object(s3: Any) -> None:
    """From objects to objects: the rows are in the finished objects once, in their order, after any crash."""

    def run(place: str, store: Any) -> None:
        with contextlib.closing(FileSink(f"s3://files/{place}-out", "jsonl")) as sink:
            testing.run_until_idle(graph(place, sink), store)

    filled(s3, "in")
    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: run("in", store))
    assert len(sites) > 15
    assert len(list(Files("s3://files/in-out/*.jsonl")(None))) == 9
    # an S3 server answers in milliseconds, so a fifth of the points; all are in test_contracts_sinks.py, in memory
    for number, (point, hit) in enumerate(sites[::5]):
        place = f"at-{number}"
        filled(s3, place)
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                run(place, store)
            run(place, store)
            assert testing.messages(store, "rows") == ROWS, (point, hit)
        read = [row for _, row in Files(f"s3://files/{place}-out/*.jsonl")(None)]
        assert read == ROWS, (point, hit)


def test_a_source_continues_on_objects_at_each_position(s3: Any) -> None:
    filled(s3, "positions")
    whole = [row for _, row in Files("s3://files/positions")(None)]
    assert whole == ROWS
    for stop in range(1, len(whole) + 1):
        process = SimpleNamespace(state={}, stopping=False)
        before = list(itertools.islice(Files("s3://files/positions")(None, process), stop))
        after = [row for _, row in Files("s3://files/positions")(before[-1][0], process)]
        assert [row for _, row in before] + after == ROWS
    s3.pipe_file("s3://files/positions/3.jsonl", b'{"n": 9}\n')  # a later object is read by the next run
    assert [row for _, row in Files("s3://files/positions")(before[-1][0], process)] == [{"n": 9}]


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_store_that_is_away_is_waited_for(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore has one exception for all that fails; a connection that is refused is an outage, and no fault."""
    server = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    closed = proxies.Proxy(server, b"no such word")
    closed.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.port}")
    type(s3).clear_instance_cache()
    filled(s3, "away")
    graph = cues.Graph("g", [cues.Source("rows", Files("s3://files/away/*.jsonl", watch=True))])
    with testing.temporary_store() as store, graph.start(store=store) as running:
        until(lambda: running.counters()["g.rows"].away)
        with contextlib.closing(proxies.Proxy(server, b"no such word", closed.port)):
            until(lambda: store.queue("rows").last_index == len(ROWS))
        assert testing.messages(store, "rows") == ROWS
    type(s3).clear_instance_cache()


def test_a_bucket_is_listed_for_a_tenth_of_the_time_at_most(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(s3, "rest")
    entries, looks = places.Remote.entries, []

    def slow(self: places.Remote, pattern: str) -> Any:
        time.sleep(0.1)
        looks.append(pattern)
        return entries(self, pattern)

    monkeypatch.setattr(places.Remote, "entries", slow)
    begun = time.monotonic()
    assert len([*Files("s3://files/rest/*.jsonl", watch=True, poll_s=0, idle_exit_s=3)(None)]) >= len(ROWS)
    assert 2 <= len(looks) <= 2 + (time.monotonic() - begun) / 1.0
