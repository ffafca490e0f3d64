"""Redis streams: read, written and mirrored exactly once; what was removed unread; outages of the server, kill -9.

The server is that of tests/redis_server.py. The contracts of all sources and sinks (test_contracts_sources.py,
test_contracts_sinks.py) run over Redis, too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mirrors
import pytest
from mirrors import deliver
from proxies import Proxy
from redis_server import RedisServer, running
from sets import amounts, bounded
from small import until

import cues
from cues import testing
from cues.base.away import is_away
from cues.errors import Away, CheckpointError, CuesError, Diverged, InvalidArgument, NotInstalled
from cues.processors.redis_streams import Extent, Mark, RedisStream, RedisTarget

pytest.importorskip("redis")


def read(source: RedisStream, position: Any = None) -> list[Any]:
    return [
        {name: value for name, value in message.items() if name != "q/meta"} if isinstance(message, dict) else message
        for _, message in source(position)
    ]


def target_of(server: RedisServer, stream: str | None = None, **options: Any) -> RedisTarget:
    """A target with positions of its own."""
    return RedisTarget(server.url, stream, prefix=options.pop("prefix", server.stream()), **options)


# --- the source ---------------------------------------------------------------------------------


def test_an_entry_has_its_fields_and_its_place(redis: RedisServer, store: cues.Store) -> None:
    stream, seen = redis.stream(), []
    (id,) = redis.add(stream, {"n": 1, "s": "é"})
    graph = cues.Graph("g", [cues.Source("q", RedisStream(redis.url, stream))])

    @graph.sink("q")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["redis"]["id"], process.metadata["redis"]["stream"]))

    testing.run_until_idle(graph, store)
    assert seen == [({"n": "1", "s": "é"}, id, stream)]


def test_fields_are_decoded_as_the_source_says(redis: RedisServer) -> None:
    stream = redis.stream()
    redis.add(stream, {"data": '{"n": 1}', "raw": b"\xff"}, {"data": "[1]", "raw": "7"}, {"other": '"x"'})
    as_bytes = read(RedisStream(redis.url, stream, fields="bytes"))
    assert as_bytes == [{"data": b'{"n": 1}', "raw": b"\xff"}, {"data": b"[1]", "raw": b"7"}, {"other": b'"x"'}]
    first, second, third = read(RedisStream(redis.url, stream, fields="json"))
    assert isinstance(first, InvalidArgument) and "utf-8" in str(first)  # and it names the entry
    assert (second, third) == ({"data": [1], "raw": 7}, {"other": "x"})
    first, second, third = read(RedisStream(redis.url, stream, field="data"))
    assert first == {"n": 1}
    assert "has list, not an object" in str(second) and "has no field 'data'" in str(third)


def test_a_following_source_waits_and_ends_with_a_drain(redis: RedisServer) -> None:
    """It begins before the stream is there."""
    stream, process, seen = redis.stream(), SimpleNamespace(stopping=False), []
    source = RedisStream(redis.url, stream, follow=True)
    thread = threading.Thread(target=lambda: seen.extend(m["n"] for _, m in source(None, process)))
    thread.start()
    try:
        for n in range(3):
            redis.add(stream, {"n": n})
            until(lambda: len(seen) > n or not thread.is_alive())
    finally:
        process.stopping = True
        thread.join(60)
    assert not thread.is_alive() and seen == ["0", "1", "2"]


def test_the_newest_entries_begin_where_the_stream_ends(redis: RedisServer) -> None:
    stream = redis.stream()
    redis.add(stream, {"n": 1})
    source = RedisStream(redis.url, stream, start="newest", follow=True)
    reading = source(None, process := SimpleNamespace(stopping=False))
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(message["n"] for _, message in reading))
    thread.start()
    count = 1
    while not seen:  # until it has begun
        count += 1
        redis.add(stream, {"n": count})
        time.sleep(0.02)
    process.stopping = True
    thread.join(60)
    assert seen == [str(n) for n in range(int(seen[0]), count + 1)] and "1" not in seen


def extent(first: int | None, last: int, **facts: Any) -> Extent:
    given = {"length": 0 if first is None else last - first + 1, "added": None, "deleted": (0, 0), **facts}
    return Extent(first=None if first is None else (first, 0), last=(last, 0), **given)


@pytest.mark.parametrize(
    ("mark", "now", "told"),
    [
        # Redis 6: the entry of the position is there, or nothing is sure.
        (Mark((5, 0), None, (0, 0)), extent(1, 9), None),
        (Mark((5, 0), None, (0, 0)), extent(5, 9), None),
        (Mark((5, 0), None, (0, 0)), extent(6, 9), "may have been removed"),
        (Mark((5, 0), None, (0, 0)), extent(None, 5), None),
        (Mark((5, 0), None, (0, 0)), extent(None, 6), "may have been removed"),
        # Redis 7 counts.
        (Mark((5, 0), 5, (0, 0)), extent(6, 9, added=9), None),
        (Mark((5, 0), 5, (0, 0)), extent(8, 9, added=9), "2 entries"),
        (Mark((5, 0), 5, (0, 0)), extent(None, 9, added=9), "4 entries"),
        (Mark((5, 0), 5, (0, 0)), extent(None, 5, added=5), None),
        (Mark((5, 0), 5, (0, 0)), extent(1, 9, added=9, deleted=(7, 0)), "The entry 7-0"),
        (Mark((5, 0), 5, (7, 0)), extent(1, 9, added=9, deleted=(7, 0)), None),
        (Mark((5, 0), 5, (0, 0)), extent(1, 9, added=9, deleted=(4, 0)), None),
    ],
)
def test_the_facts_of_a_stream_tell_what_was_removed(mark: Mark, now: Extent, told: str | None) -> None:
    found = mark.gap(now)
    assert (found is None) if told is None else (found is not None and told in found[0])
    if found is not None:
        assert found[1].gap(now) is None  # it is told once
        assert Mark.of(found[1].position) == found[1]


@pytest.mark.parametrize("on_gap", ["raise", "fail"])
def test_entries_that_were_trimmed_unread_are_told(on_gap: str, redis: RedisServer, store: cues.Store) -> None:
    stream = redis.stream()
    redis.add(stream, {"n": 0}, {"n": 1})
    graph = cues.Graph("g", [cues.Source("q", RedisStream(redis.url, stream, on_gap=on_gap))], errors="errors")
    testing.run_until_idle(graph, store)
    redis.add(stream, *({"n": n} for n in range(2, 6)))
    with contextlib.closing(redis.client) as client:
        client.xtrim(stream, maxlen=2, approximate=False)
    if on_gap == "raise":
        report = testing.run_until_idle(graph, store, stopped="return")
        assert isinstance(report.stopped["q"].__cause__, cues.MessagesPurged)
        assert "on_gap='fail'" in str(report.stopped["q"])
    else:
        for _ in range(2):
            testing.run_until_idle(graph, store)
        assert [message["n"] for message in testing.messages(store, "q")] == ["0", "1", "4", "5"]
        (error,) = testing.messages(store, "errors")
        assert "removed from the stream" in str(error)


def test_a_stream_that_keeps_few_entries_is_read_where_the_server_counts(redis: RedisServer) -> None:
    """Each new entry trims the one before it, which was read: nothing is lost. Redis 6 cannot tell."""
    stream = redis.stream()
    redis.add(stream, {"n": 0}, maxlen=1, approximate=False)
    with contextlib.closing(redis.client) as client:
        counts = "entries-added" in client.xinfo_stream(stream)
    source, position = RedisStream(redis.url, stream), None
    for n in range(4):
        redis.add(stream, *[{"n": n}] * (n > 0), maxlen=1, approximate=False)
        if n and not counts:
            with pytest.raises(cues.MessagesPurged, match="may have been removed"):
                list(source(position))
            return
        ((position, message),) = source(position)
        assert message["n"] == str(n)
    redis.add(stream, {"n": 5}, {"n": 6}, maxlen=1, approximate=False)
    with pytest.raises(cues.MessagesPurged, match="1 entries between"):
        list(source(position))


def test_a_stream_that_is_gone_or_ends_too_early_is_refused(redis: RedisServer) -> None:
    stream = redis.stream()
    redis.add(stream, {"n": 0}, {"n": 1})
    source = RedisStream(redis.url, stream)
    *_, (position, _) = source(None)
    with contextlib.closing(redis.client) as client:
        client.delete(stream)
        with pytest.raises(Diverged, match="is not there"):
            list(source(position))
        client.xadd(stream, {"n": 0}, id="1-1")
    with pytest.raises(Diverged, match=r"ends at 1-1, before the position.*Try:"):
        list(source(position))
    for wrong in ([2, "1-1", None, "0-0"], "x", [1, "1-x", None, "0-0"], [1, "1-1"], 7):
        with pytest.raises(Diverged, match="version 1"):
            list(source(wrong))


def test_options_that_do_not_fit_are_refused(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = redis.url
    for call in (
        lambda: RedisStream("localhost", "s"),
        lambda: RedisStream("redis://", "s"),
        lambda: RedisStream("redis://h:x", "s"),
        lambda: RedisStream(url, ""),
        lambda: RedisStream(url, "s", fields="xml"),
        lambda: RedisStream(url, "s", fields="bytes", field="data"),
        lambda: RedisStream(url, "s", start="middle"),
        lambda: RedisStream(url, "s", config={"decode_responses": True}),
        lambda: read(RedisStream(url, "s", config={"no_such_option": 1})),
        lambda: RedisTarget(url, fields="bytes"),
        lambda: RedisTarget(url, maxlen=0),
        lambda: RedisTarget(url).sink("q"),
    ):
        with pytest.raises(InvalidArgument, match="Try:"):
            call()
    with pytest.raises(InvalidArgument) as refused:
        RedisStream("http://me:secret@h", "s")
    assert "secret" not in str(refused.value)
    stream = redis.stream()
    with contextlib.closing(redis.client) as client:
        client.set(stream, "text")
    with pytest.raises(CuesError, match=r"cannot be read: .*WRONGTYPE.*Try:"):
        read(RedisStream(url, stream))
    with pytest.raises(CheckpointError, match=r"is a string, not a stream"):
        target_of(redis, stream).__cues_prepare__()
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(NotInstalled, match=r"pip install 'cues-streams\[redis\]'"):
        read(RedisStream(url, "s"))


# --- the target ---------------------------------------------------------------------------------


def numbers(server: RedisServer, stream: str) -> list[int]:
    return [int(fields[b"n"]) for fields in server.entries(stream)]


def test_entries_go_round(redis: RedisServer, store: cues.Store) -> None:
    """What a sink writes is what a source reads, in each form."""
    messages = [{"n": 1, "s": "é", "list": [1, {"a": None}]}, {"s": "", "f": 1.5, "none": None}]
    for options in ({"fields": "json"}, {"field": "data"}):
        stream, name = redis.stream(), next(iter(options))
        store.queue(name).appender().write_many(messages)
        sink = target_of(redis, stream, **options).sink(name)
        testing.run_until_idle(cues.Graph(f"g-{name}", [cues.Source(name, None), sink]), store)
        assert read(RedisStream(redis.url, stream, **options)) == messages  # type: ignore[arg-type]


def test_a_message_that_is_no_entry_goes_to_the_error_queue(redis: RedisServer, store: cues.Store) -> None:
    stream = redis.stream()
    store.queue("q").appender().write_many([{"n": 1}, {"n": None}, {}, {"n": b"\xff"}, {"n": 2}])
    graph = cues.Graph("g", [cues.Source("q", None), target_of(redis, stream).sink("q", batch_size=1)], errors="errors")
    testing.run_until_idle(graph, store)
    assert redis.entries(stream) == [{b"n": b"1"}, {b"n": b"\xff"}, {b"n": b"2"}]
    first, second = (str(error) for error in testing.messages(store, "errors"))
    assert "Redis has no null" in first and "it has no field" in second


def test_commands_of_a_function_are_in_the_transaction(redis: RedisServer, store: cues.Store) -> None:
    """Effects that a repetition would change: a counter and a list."""
    key, prefix = redis.stream(), redis.stream()
    store.queue("q").appender().write_many([{"n": n} for n in range(1, 8)])

    def graph() -> cues.Graph:
        made = cues.Graph("g", [cues.Source("q", None)])

        @made.sink("q", checkpoint=target_of(redis, prefix=prefix), batch_size=3)
        def save(message: Any, process: cues.Process) -> None:
            process.connection.hincrby(key, "total", message["n"])
            process.connection.rpush(f"{key}.list", message["n"])

        return made

    for hit in (1, 2, 3):
        with testing.crash("checkpoint.after", hit, how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(graph(), store)
    testing.run_until_idle(graph(), store)
    with contextlib.closing(redis.client) as client:
        assert client.hgetall(key) == {b"total": b"28"}
        assert [int(n) for n in client.lrange(f"{key}.list", 0, -1)] == [1, 2, 3, 4, 5, 6, 7]


def test_two_owners_at_once_write_once(redis: RedisServer) -> None:
    """The row is watched: who reads it first and commits last is refused, and its repetition finds no new message."""
    stream = redis.stream()
    target = target_of(redis, stream)
    other = RedisTarget(redis.url, stream, prefix=target.prefix)

    def between(connection: Any, fresh: Any) -> None:
        connection.write(fresh)
        deliver(other, 1, 4)

    with pytest.raises(CheckpointError) as refused:
        deliver(target, 1, 4, between)
    assert refused.value.again and is_away(refused.value)
    deliver(target, 1, 6)
    assert numbers(redis, stream) == [1, 2, 3, 4, 5]


def test_a_failure_in_the_function_writes_nothing(redis: RedisServer) -> None:
    stream = redis.stream()
    target = target_of(redis, stream)

    def fails(connection: Any, fresh: Any) -> None:
        connection.write({"n": 1})
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        deliver(target, 1, 3, fails)
    with pytest.raises(AttributeError, match="begins and ends the transaction"):
        deliver(target, 1, 3, lambda connection, fresh: connection.execute())
    with pytest.raises(CuesError, match="ended its transaction itself"):
        deliver(target_of(redis, stream), 1, 3, lambda connection, fresh: connection.set(stream + ".x", 1).execute())
    assert numbers(redis, stream) == [] and target.holds(["g.save"]) == []
    deliver(target, 1, 3)
    assert numbers(redis, stream) == [1, 2] and target.holds(["g.save", "g.other"]) == ["g.save"]


def test_a_command_that_fails_inside_the_transaction_stops_the_sink_by_name(redis: RedisServer) -> None:
    """Redis does not roll back; the error says what was done, and the step is not repeated."""
    stream = redis.stream()
    target = target_of(redis, stream)

    def wrong(connection: Any, fresh: Any) -> None:
        connection.write(fresh[0])
        connection.incr(stream)  # a stream is no number

    with pytest.raises(CheckpointError, match=r"WRONGTYPE.*does not roll back.*are written") as stopped:
        deliver(target, 1, 2, wrong)
    assert not is_away(stopped.value)
    deliver(target, 1, 3)
    assert numbers(redis, stream) == [1, 2]

    def unknown(connection: Any, fresh: Any) -> None:
        connection.write({"n": 3})
        connection.execute_command("NOSUCH")

    with pytest.raises(CheckpointError, match="unknown command"):  # refused as a whole
        deliver(target, 3, 4, unknown)
    assert numbers(redis, stream) == [1, 2]


def test_a_row_of_another_program_is_refused(redis: RedisServer) -> None:
    target = target_of(redis, redis.stream())
    with contextlib.closing(redis.client) as client:
        client.hset(target.key("g.save"), mapping={"x": 1})
        with pytest.raises(Diverged, match="is not the row of a sink"):
            deliver(target, 1, 2)
        client.delete(target.key("g.save"))
        client.set(target.key("g.save"), "x")
    with pytest.raises(CheckpointError, match="WRONGTYPE"):
        deliver(target, 1, 2)


# --- outages ------------------------------------------------------------------------------------


def test_what_counts_as_away(tmp_path: Path) -> None:
    import redis as library

    errors = library.exceptions
    away = (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError, errors.ReadOnlyError)
    assert all(is_away(kind("x")) for kind in (*away, errors.OutOfMemoryError, errors.MaxConnectionsError))
    faults = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError, errors.DataError)
    assert not any(is_away(kind("x")) for kind in (*faults, errors.ResponseError))


def test_a_wrong_password_is_a_fault_and_a_server_that_is_away_is_none() -> None:
    with running("--requirepass", "right") as server:
        stream = server.stream()
        for url, text in ((server.url, "Authentication required"), (server.url.replace("//", "//:no@"), "password")):
            with pytest.raises(CuesError, match=text) as refused:
                read(RedisStream(url, stream))
            assert not isinstance(refused.value, Away)
            with pytest.raises(CheckpointError, match=text) as stopped:
                deliver(RedisTarget(url, stream), 1, 2)
            assert not is_away(stopped.value)
        url = server.url.replace("//", "//:right@")
        deliver(RedisTarget(url, stream), 1, 3)
        assert [message["n"] for message in read(RedisStream(url, stream))] == ["1", "2"]
    with pytest.raises(Away, match="cannot be read"):
        read(RedisStream(url, stream))
    with pytest.raises(CheckpointError) as gone:
        deliver(RedisTarget(url, stream), 3, 4)
    assert is_away(gone.value)


def test_an_answer_that_is_lost_repeats_and_loses_nothing(redis: RedisServer, tmp_path: Path) -> None:
    """The commit was done, and nobody was told: the row says so."""
    source, target = redis.stream(), redis.stream()
    redis.add(source, *({"n": n} for n in range(40)))
    proxy = Proxy(redis.port, b"EXEC")
    graph = cues.Graph("g", [cues.Source("q", RedisStream(redis.url, source))])
    graph.add(RedisTarget(f"redis://127.0.0.1:{proxy.port}", target, prefix=target + ".p").sink("q", batch_size=5))
    proxy.armed = 3
    with contextlib.closing(proxy), graph.start(store=tmp_path / "store") as started:
        assert started.wait_done(60)
    assert proxy.lost == 3 and numbers(redis, target) == list(range(40))


def mirror_graph(url: str, source: str, target: str, count: int = 0) -> cues.Graph:
    """A stream into another one, and a counter of the entries in the same transaction."""
    into = RedisTarget(url, target, prefix=target + ".p")
    graph = cues.Graph("mirror")
    graph.add(cues.Source("entries", RedisStream(url, source, follow=bool(count)), batch_size=7))

    @graph.sink("entries", id="save", batch=True, batch_size=5, checkpoint=into)
    def save(entries: Any, process: cues.Process) -> None:
        process.connection.write(entries)
        process.connection.incrby(f"{target}.count", len(entries))
        print(len(entries), flush=True)

    return graph


def test_a_server_that_ends_in_the_middle_is_waited_for(tmp_path: Path) -> None:
    """It is killed by its pid, and started again on its data, while a source follows and a sink writes."""
    count = 60
    with running() as server:
        source, target = server.stream(), server.stream()
        graph = mirror_graph(server.url, source, target, count)
        with graph.start(store=tmp_path / "store") as running_graph:
            for round in range(3):
                server.add(source, *({"n": n} for n in range(round * 20, round * 20 + 10)))
                until(lambda: len(server.entries(target)) >= round * 20 + 5)
                server.add(source, *({"n": n} for n in range(round * 20 + 10, round * 20 + 20)))
                server.kill()
                waiting = until(lambda: running_graph.counters()["mirror.entries"].away)
                assert "127.0.0.1" in waiting
                server.start()
            until(lambda: len(server.entries(target)) >= count)
            until(running_graph.idle)
        assert numbers(server, target) == list(range(count))
        with contextlib.closing(server.client) as client:
            assert int(client.get(f"{target}.count")) == count


# --- kill -9 ------------------------------------------------------------------------------------


def mirror(path: str, url: str, source: str, target: str) -> None:
    """Mirror a stream to its end in this process; a test kills it on the way."""
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(mirror_graph(url, source, target), store)


CODE = "import sys; from test_processors_redis import mirror; mirror(*sys.argv[1:])"


def killed(server: RedisServer, path: Path, rounds: int, count: int) -> None:
    """Kill a mirror at random moments, then let it end: each entry, and its count, is there once."""
    source, target = server.stream(), server.stream()
    server.add(source, *({"n": n} for n in range(count)))
    mirrors.killed(CODE, path, server.url, source, target, rounds=rounds)
    assert numbers(server, target) == list(range(count))
    with contextlib.closing(server.client) as client:
        assert int(client.get(f"{target}.count")) == count


@pytest.mark.slow
def test_a_mirror_that_is_killed_has_each_entry_once(redis: RedisServer, tmp_path: Path) -> None:
    killed(redis, tmp_path, rounds=2, count=60)


@bounded("rounds", 5, 25)
def test_a_mirror_that_is_killed_at_any_time_has_each_entry_once(
    rounds: int, redis: RedisServer, tmp_path: Path
) -> None:
    killed(redis, tmp_path, rounds=rounds, count=600)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint.inside", "checkpoint.after", "commit.inside", "commit.after"])
def test_a_mirror_that_is_killed_at_a_point_has_each_entry_once(point: str, redis: RedisServer, tmp_path: Path) -> None:
    source, target = redis.stream(), redis.stream()
    redis.add(source, *({"n": n} for n in range(30)))
    mirrors.killed_at(point, CODE, tmp_path, redis.url, source, target)
    assert numbers(redis, target) == list(range(30))


@pytest.fixture(params=amounts(10_000, 100_000))
def filled(request: pytest.FixtureRequest, redis: RedisServer) -> Iterator[tuple[str, str, int]]:
    """A stream of so many entries, and an empty one; both are removed at the end."""
    source, target = redis.stream(), redis.stream()
    for begin in range(0, request.param, 10_000):
        redis.add(source, *({"n": n} for n in range(begin, begin + 10_000)))
    yield source, target, request.param
    with contextlib.closing(redis.client) as client:
        client.delete(source, target)


def test_many_entries(redis: RedisServer, filled: tuple[str, str, int], store: cues.Store) -> None:
    source, target, count = filled
    graph = cues.Graph("g", [cues.Source("q", RedisStream(redis.url, source))])
    graph.add(target_of(redis, target).sink("q"))
    began = time.monotonic(), time.process_time()
    testing.run_until_idle(graph, store)
    print(f"{time.monotonic() - began[0]:.1f} s, CPU {time.process_time() - began[1]:.1f} s")
    assert numbers(redis, target) == list(range(count))
