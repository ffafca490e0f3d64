"""Every source, killed at every point: each record is on the queue once, in order."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from children import Child
from contracts_sinks import KAFKA, MARIADB, NATS, POSTGRES, REDIS
from contracts_sources import HTTP, KINESIS, ROWS, SOURCES, SourceCase, begun, graph_over, http_answer
from http_servers import serving
from sets import slow_except, thinned

import cues
from cues import codec, testing

FAST = ("jsonl", "tail", "rows-sqlite")
SERVERS = (
    "rows-duckdb", "rows-postgres", "rows-mariadb", "kafka", "redis", "nats", "kinesis", "http-list", "http-pages",
    "http-cursor", "http-post", "postgres-snapshot", "postgres-changes", "mysql-snapshot", "mysql-changes",
)  # fmt: skip

CONTROLLED = [name for name in SOURCES if not name.startswith("mysql")]
"""The control is about the tests, and the sources of MySQL take the longest: half a minute each."""


@pytest.fixture(scope="module")
def http_rows() -> Iterator[str]:
    with serving(http_answer) as server:
        yield server.url


@pytest.fixture(params=slow_except([name for name in SOURCES if name not in SERVERS], SOURCES))
def case(request: pytest.FixtureRequest) -> SourceCase:
    for module in SOURCES[request.param].needs:
        pytest.importorskip(module)
    if "postgres" in request.param:
        POSTGRES[:] = [request.getfixturevalue("postgres")]
    if "mariadb" in request.param or "mysql" in request.param:
        MARIADB[:] = [request.getfixturevalue("mariadb")]
    if request.param == "kafka":
        KAFKA[:] = [request.getfixturevalue("kafka")]
    if request.param == "redis":
        REDIS[:] = [request.getfixturevalue("redis")]
    if request.param == "nats":
        NATS[:] = [request.getfixturevalue("nats")]
    if request.param == "kinesis":
        KINESIS[:] = [request.getfixturevalue("kinesis")]
    if "http" in request.param:
        HTTP[:] = [request.getfixturevalue("http_rows")]
    return SOURCES[request.param]


def test_from_every_position_the_rest_follows(case: SourceCase, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = case.make(tmp_path)

    def read(position: Any, process: Any) -> Iterator[tuple[Any, Any]]:
        for after, message in begun(source, position, process):
            yield codec.unpack(codec.pack(after)), None if message is None else case.row(message)

    def rows(items: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [row for _, row in items if row is not None]

    whole = list(read(None, SimpleNamespace(state={}, stopping=False)))
    assert rows(whole) == ROWS
    # Each round of a server is a connection. One source of HTTP begins at every position.
    name = request.node.name
    stride = 6 if any(server in name for server in SERVERS) and "http-post" not in name else 1
    for stop in range(len(whole))[::-stride]:
        process = SimpleNamespace(state={}, stopping=False)
        before = list(itertools.islice(read(None, process), stop + 1))
        assert rows(before) + rows(read(before[-1][0], process)) == ROWS
    assert max(len(codec.pack(position)) for position, _ in whole) < 2_000


def crashes(
    case: SourceCase, path: Path, stride: int, wrap: Any = lambda source: source
) -> Iterator[tuple[str, int, list[Any]]]:
    """What is on the queue after a crash at each point, and a restart."""
    source = wrap(case.make(path))
    with testing.temporary_store() as store:
        sites = testing.crash_sites(lambda: testing.run_until_idle(graph_over(source), store))
    assert len(sites) > 10
    for point, hit in thinned(sites, stride):
        with testing.temporary_store() as store:
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph_over(source), store)
            testing.run_until_idle(graph_over(source), store)
            yield point, hit, list(map(case.row, testing.messages(store, "rows")))


@pytest.mark.parametrize("case", slow_except(FAST, SOURCES), indirect=True)
def test_a_crash_anywhere_leaves_each_record_once(case: SourceCase, stride: int, tmp_path: Path) -> None:
    for point, hit, found in crashes(case, tmp_path, stride):
        assert found == ROWS, (point, hit)


@pytest.mark.parametrize("case", slow_except(FAST, CONTROLLED), indirect=True)
def test_the_control_with_the_position_after_the_next_record_loses(case: SourceCase, tmp_path: Path) -> None:
    """A source that reads ahead by one, and yields the position up to which it has read."""

    def ahead(source: Any) -> Any:
        def pairs(position: Any, process: Any) -> Iterator[Any]:
            read = [] if position == "end" else list(begun(source, position, process))
            if not read:
                return
            for (_, message), (after, _) in zip(read, [*read[1:], ("end", None)], strict=True):
                yield after, message

        return pairs

    assert any(found != ROWS for _, _, found in crashes(case, tmp_path, 1, ahead))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["read-csv", "jsonl", "jsonl-gzip", "tail", "rows-sqlite", "rows-duckdb", "kafka", "redis", "nats", "kinesis"],
)
def test_random_kills_leave_each_record_once(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    chance = random.Random(seeds.new())
    (tmp_path / "data").mkdir()
    if name == "kafka":
        KAFKA[:] = [request.getfixturevalue("kafka")]
        SOURCES[name].make(tmp_path / "data")
    if name == "redis":
        REDIS[:] = [request.getfixturevalue("redis")]
        SOURCES[name].make(tmp_path / "data")
    if name == "nats":
        NATS[:] = [request.getfixturevalue("nats")]
        SOURCES[name].make(tmp_path / "data")
    if name == "kinesis":
        KINESIS[:] = [request.getfixturevalue("kinesis")]
        SOURCES[name].make(tmp_path / "data")
    code = "import sys; from contracts_sources import run_child; run_child(sys.argv[1], sys.argv[2])"
    for _ in range(4):
        with Child(code, name, tmp_path) as child, contextlib.suppress(AssertionError):
            for _ in range(chance.randint(1, 12)):
                child.line()
            child.kill()
    with Child(code, name, tmp_path) as child:
        child.end()
    with cues.open(tmp_path / "store") as store:
        assert list(map(SOURCES[name].row, testing.messages(store, "rows"))) == ROWS
