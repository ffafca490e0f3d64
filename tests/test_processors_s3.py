"""The file source and the file sink on objects of an S3 server (moto, on loopback), through fsspec."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import object_store
import proxies
import pytest
import seeds
from small import halted_at_end, until

import cues
from cues import testing
from cues.processors import listings, places
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
    with object_store.bucket("files"):
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


def test_a_store_that_is_away_is_waited_for(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore has one exception for all that fails; a connection that is refused is an outage, and no fault."""
    filled(s3, "away")
    server = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    closed = proxies.Proxy(server, b"no such word")
    closed.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.port}")
    type(s3).clear_instance_cache()
    graph = cues.Graph("g", [cues.Source("rows", Files("s3://files/away/*.jsonl", watch=True))])
    with testing.temporary_store() as store, halted_at_end(graph.start(store=store)) as running:
        until(lambda: running.counters()["g.rows"].away)
        with contextlib.closing(proxies.Proxy(server, b"no such word", closed.port)):
            until(lambda: store.queue("rows").last_index == len(ROWS))
        assert testing.messages(store, "rows") == ROWS
    type(s3).clear_instance_cache()


def test_a_bucket_is_listed_for_a_tenth_of_the_time_at_most(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(s3, "rest")
    entries, looks = listings.Looks.entries, []

    def slow(self: listings.Looks, again: Any) -> Any:
        time.sleep(0.1)
        looks.append(again)
        return entries(self, again)

    monkeypatch.setattr(listings.Looks, "entries", slow)
    begun = time.monotonic()
    assert len([*Files("s3://files/rest/*.jsonl", watch=True, poll_s=0, idle_exit_s=3)(None)]) >= len(ROWS)
    assert 2 <= len(looks) <= 2 + (time.monotonic() - begun) / 1.0


def put(s3: Any, names: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: s3.pipe_file(f"s3://files/{name}", b'{"n": "%s"}\n' % name.encode()), names))


@contextlib.contextmanager
def counted(s3: Any) -> Iterator[proxies.Proxy]:
    """A proxy before the server, which counts the calls that list."""
    server = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    with contextlib.closing(proxies.Proxy(server, b"list-type=2")) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        type(s3).clear_instance_cache()
        try:
            yield proxy
        finally:
            type(s3).clear_instance_cache()


def test_patterns_find_what_fsspec_finds(s3: Any) -> None:
    """In whole listings, and after each name."""
    names = [
        "a-1.csv",
        "a-2.csv",
        "a-10.csv",
        "a/x.csv",
        "a/b/x.csv",
        "a/b/c/x.csv",
        "b.csv",
        "_c.csv",
        "a-é.csv",
        "0",
        "a b.csv",
    ]
    put(s3, [f"found/{name}" for name in names])
    patterns = "* a* a-*.csv a-[12].csv */x.csv a/*/*.csv **/x.csv ** a/**/x.csv 0* a?* é* a-?.csv z*"
    for pattern in patterns.split():
        where = places.Remote(f"s3://files/found/{pattern}")
        wanted = where.entries(f"s3://files/found/{pattern}")
        path = where.path(f"s3://files/found/{pattern}")
        pages = listings.pages_of(where.system, path)
        assert pages is not None
        found = listings.matching(where.system, pages, path, "")
        assert [(name, stat.size, stat.tag) for name, stat in found.items()] == [
            (name, stat.size, stat.tag) for name, stat in wanted.items()
        ]
        for after in found:
            later = listings.matching(where.system, pages, path, after)
            assert later == {name: stat for name, stat in found.items() if name > after}, (pattern, after)


@pytest.mark.parametrize("objects", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_look_lists_only_the_names_after_those_that_are_known(s3: Any, objects: int) -> None:
    """After one whole listing each look is one call; other objects of the folder, and folders, add at most two."""
    place, others = f"count-{objects}", objects // 8
    put(s3, [f"{place}/part-{n:06}.jsonl" for n in range(objects)])
    put(s3, [f"{place}/a-{n}" for n in range(others)] + [f"{place}/part-x/{n}" for n in range(others)])
    pattern, calls = f"s3://files/{place}/part-*.jsonl", []
    with counted(s3) as proxy:
        looks = listings.Looks(places.place_of(pattern), pattern, by_name=True)
        for number in range(6):
            before = proxy.seen
            assert len(looks.entries()) == objects + number
            calls.append(proxy.seen - before)
            put(s3, [f"{place}/part-{objects + number:06}.jsonl"])
    print(f"{objects:,} objects: {calls[0]} calls at the first look, {calls[1:]} at the others")
    assert calls[0] <= objects // 1_000 + 4 and max(calls[1:]) <= 3, calls


def test_names_before_others_are_found_by_a_whole_listing(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "WHOLE_S", 0.5)
    put(s3, ["late/5.jsonl"])
    source = Files("s3://files/late", watch=True, poll_s=0.02, idle_exit_s=10)
    found = (item["n"] for _, item in source(None) if item)
    assert next(found) == "late/5.jsonl"
    for name in ("late/6.jsonl", "late/1.jsonl", "late/7.jsonl", "late/3.jsonl"):
        put(s3, [name])
        assert next(found) == name


KILLED = """
import os, signal, sys, threading
import cues
import obstore.fsspec
from cues.processors import places
from cues.processors.file_source import Files

obstore.fsspec.register("s3")
if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
graph = cues.Graph("g", errors="errors")
graph.add(cues.Source("rows", Files("s3://files/PLACE/*", after=AFTER, poll_s=0.01)))
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kills", "after"), [(3, "move"), pytest.param(25, "move", marks=LONG), pytest.param(25, "delete", marks=LONG)]
)
def test_killed_at_any_time(kills: int, after: str, s3: Any, tmp_path: Path) -> None:
    """Objects are put again under the same names between the kills; each of them is on the queue once."""
    dice = random.Random(seeds.new())
    place = f"killed-{after}-{kills}"
    value = after if after == "delete" else f"move:s3://files/{place}-done"
    (tmp_path / "graph.py").write_text(KILLED.replace("PLACE", place).replace("AFTER,", f"{value!r},"))
    command = [str(Path(sys.executable).with_name("cues")), "run", "graph.py"]
    command += ["--store", "store", "--durability", "process"]
    written = 0
    for kill in range(kills + 1):
        there = {name.rpartition("/")[2] for name in s3.find(f"s3://files/{place}")}
        for number in range(30):
            if f"{number}.jsonl" not in there:
                rows = "".join(f'{{"n": {written + n}}}\n' for n in range(20))
                s3.pipe_file(f"s3://files/{place}/{number}.jsonl", rows.encode())
                written += 20
        environment = os.environ | ({"KILL_AFTER": str(0.3 + dice.random() * 1.2)} if kill < kills else {})
        process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr.decode()
    assert process.returncode == 0 and not s3.find(f"s3://files/{place}")
    with cues.open(tmp_path / "store") as store:
        assert sorted(row["n"] for row in testing.messages(store, "rows")) == [*range(written)]
    if after == "move":
        moved = s3.find(f"s3://files/{place}-done")
        assert len(moved) == written // 20 == len({s3.cat_file(name) for name in moved})


@pytest.mark.filterwarnings("ignore:.*AbstractBufferedFile.__del__")  # obstore: a file that could not be opened
@pytest.mark.parametrize("after", ["delete", pytest.param("move:s3://files/outage-done", marks=LONG)])
def test_a_store_that_is_away_before_deletions_is_waited_for(after: str, s3: Any) -> None:
    """The answers to some deletions and copies are lost, too."""
    server = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    put(s3, [f"outage/{n}.jsonl" for n in range(20)])
    with pytest.MonkeyPatch.context() as patch, testing.temporary_store() as store:
        proxy = proxies.Proxy(server, b"DELETE /" if after == "delete" else b"copy-source")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        type(s3).clear_instance_cache()
        proxy.armed = 2
        source = Files("s3://files/outage/*", after=after, watch=True, poll_s=0.01)
        with halted_at_end(cues.Graph("g", [cues.Source("rows", source)]).start(store=store)) as running:
            until(lambda: store.queue("rows").last_index >= 10)
            proxy.close()
            until(lambda: running.counters()["g.rows"].away)
            with contextlib.closing(proxies.Proxy(server, b"no such word", proxy.port)) as again:
                until(lambda: store.queue("rows").last_index >= 20)
                until(lambda: not s3.find("s3://files/outage"))
                running.wait_idle()
                assert again.port
        assert sorted(row["n"] for row in testing.messages(store, "rows")) == sorted(
            f"outage/{n}.jsonl" for n in range(20)
        )
    type(s3).clear_instance_cache()
    assert len(s3.find("s3://files/outage-done")) == (0 if after == "delete" else 20)
