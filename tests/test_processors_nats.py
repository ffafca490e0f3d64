"""NATS JetStream: a stream read, a subject written, exactly once; what left the stream unread; outages, kill -9.

The server is that of tests/nats_server.py. The contracts of all sources and sinks (test_contracts_sources.py,
test_contracts_sinks.py) run over NATS, too, without the help of the duplicate window.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
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
from nats_server import NatsServer, running
from proxies import Proxy
from sets import amounts, bounded
from small import until

import cues
from cues import testing
from cues.base.away import is_away
from cues.errors import Away, CheckpointError, CuesError, Diverged, InvalidArgument, NotInstalled
from cues.processors import nats_streams
from cues.processors.nats_streams import NatsStream, NatsSubject

pytest.importorskip("nats")


def read(source: NatsStream, position: Any = None) -> list[Any]:
    return [message for _, message in source(position)]


def encoded(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


# --- the source ---------------------------------------------------------------------------------


def test_a_message_has_its_subject_headers_and_data(nats: NatsServer) -> None:
    stream = nats.stream()
    nats.publish(f"{stream}.a", b"\xff", headers={"kind": "é"})
    nats.publish(f"{stream}.b", b"2")
    first, second = read(NatsStream(nats.url, stream))
    assert first.pop("time").tzinfo is not None and second.pop("time") is not None
    assert first == {"subject": f"{stream}.a", "sequence": 1, "headers": [["kind", "é"]], "data": b"\xff"}
    assert second == {"subject": f"{stream}.b", "sequence": 2, "headers": [], "data": b"2"}


def test_data_as_messages_have_the_rest_in_their_metadata(nats: NatsServer, store: cues.Store) -> None:
    stream, seen = nats.stream(), []
    nats.publish(f"{stream}.a", b'{"n": 1}', b"no JSON", b"[1]", b'{"n": 2}')
    source = cues.Source("q", NatsStream(nats.url, stream, data="json", shape="value"))
    graph = cues.Graph("g", [source], errors="errors")

    @graph.sink("q")
    def save(message: Any, process: cues.Process) -> None:
        seen.append((message, process.metadata["nats"]["sequence"], process.metadata["nats"]["subject"]))

    testing.run_until_idle(graph, store)
    assert seen == [({"n": 1}, 1, f"{stream}.a"), ({"n": 2}, 4, f"{stream}.a")]
    failed = [str(error) for error in testing.messages(store, "errors")]
    assert len(failed) == 2 and "The message 2 of the stream" in failed[0] and "list, not an object" in failed[1]


@pytest.mark.parametrize("start", ["oldest", "newest"])
def test_a_following_source_waits_and_ends_with_a_drain(start: str, nats: NatsServer) -> None:
    stream, process, seen = nats.stream(), SimpleNamespace(stopping=False), []
    nats.publish(f"{stream}.a", b"0")
    source = NatsStream(nats.url, stream, data="json", follow=True, start=start)
    thread = threading.Thread(target=lambda: seen.extend(m["data"] for _, m in source(None, process)))
    thread.start()
    count = 1
    try:
        while len(seen) < 3:
            nats.publish(f"{stream}.a", str(count).encode())
            count += 1
            time.sleep(0.05)
    finally:
        process.stopping = True
        thread.join(60)
    assert not thread.is_alive() and seen == list(range(seen[0], seen[0] + len(seen)))
    assert (seen[0] == 0) is (start == "oldest")


@pytest.mark.parametrize("on_gap", ["raise", "fail"])
def test_messages_that_were_purged_unread_are_named(on_gap: str, nats: NatsServer, store: cues.Store) -> None:
    stream = nats.stream()
    nats.publish(f"{stream}.a", b"1", b"2")
    source = NatsStream(nats.url, stream, data="json", on_gap=on_gap)
    graph = cues.Graph("g", [cues.Source("q", source)], errors="errors")
    testing.run_until_idle(graph, store)
    nats.publish(f"{stream}.a", b"3", b"4", b"5", b"6")
    nats.ask(lambda js: js.purge_stream(stream, seq=5))
    if on_gap == "raise":
        report = testing.run_until_idle(graph, store, stopped="return")
        gap = report.stopped["q"].__cause__
        assert isinstance(gap, cues.MessagesPurged) and (gap.first, gap.last) == (3, 4)
    else:
        for _ in range(2):
            testing.run_until_idle(graph, store)
        assert [message["data"] for message in testing.messages(store, "q")] == [1, 2, 5, 6]
        (error,) = testing.messages(store, "errors")
        assert "The messages 3 to 4 of the stream" in str(error)


def test_messages_that_are_purged_while_the_source_reads_are_named(nats: NatsServer) -> None:
    """The source has taken a part; the next ones leave the stream before they are fetched."""
    stream = nats.stream()
    nats.publish(f"{stream}.a", *encoded(*range(1, 2001)))
    reading = NatsStream(nats.url, stream, data="json", on_gap="fail")(None)
    first = [next(reading)[1]["data"] for _ in range(400)]
    nats.ask(lambda js: js.purge_stream(stream, seq=1990))
    rest = [message if isinstance(message, cues.MessagesPurged) else message["data"] for _, message in reading]
    (gap,) = [message for message in rest if isinstance(message, cues.MessagesPurged)]
    numbers = [*first, *(message for message in rest if not isinstance(message, cues.MessagesPurged))]
    assert gap.first <= 901 and gap.last == 1989  # it fetches up to 500, and on a slow machine fewer at a time
    assert numbers == [*range(1, gap.first), *range(1990, 2001)]


def test_a_full_stream_and_compacted_subjects_are_told_apart(nats: NatsServer) -> None:
    """What a later message of its subject has replaced is not told: the stream was made so."""
    stream = nats.stream(max_msgs_per_subject=1)
    for n in range(1, 7):
        nats.publish(f"{stream}.{'ab'[n % 2]}", str(n).encode())
    nats.publish(f"{stream}.c", b"7")
    nats.publish(f"{stream}.a", b"8")
    whole = list(NatsStream(nats.url, stream, data="json")(None))
    assert [message["data"] for _, message in whole] == [5, 7, 8]
    assert [m["data"] for m in read(NatsStream(nats.url, stream, data="json"), whole[0][0])] == [7, 8]


def test_a_client_that_drops_messages_reads_them_again(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer numbers what it delivers, so a hole is seen."""
    from nats.js.client import JetStreamContext

    stream = nats.stream()
    nats.publish(f"{stream}.a", *encoded(*range(60)))
    real, dropped = JetStreamContext.PullSubscription.fetch, []

    async def fetch(self: Any, *arguments: Any, **options: Any) -> Any:
        found = await real(self, *arguments, **options)
        if len(dropped) < 2:
            dropped.append(found.pop(len(found) // 2 if not dropped else -1))
        return found

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", fetch)
    assert [message["data"] for message in read(NatsStream(nats.url, stream, data="json"))] == list(range(60))
    assert len(dropped) == 2


def test_a_consumer_that_the_server_forgot_is_made_again(nats: NatsServer) -> None:
    stream = nats.stream()
    nats.publish(f"{stream}.a", *encoded(*range(5)))
    process = SimpleNamespace(stopping=False)
    reading = NatsStream(nats.url, stream, data="json", follow=True)(None, process)
    assert [next(reading)[1]["data"] for _ in range(5)] == list(range(5))

    async def forget(js: Any) -> None:
        for consumer in await js.consumers_info(stream):
            await js.delete_consumer(stream, consumer.name)

    nats.ask(forget)
    nats.publish(f"{stream}.a", b"5")
    assert next(reading)[1]["data"] == 5
    reading.close()


def test_a_stream_that_was_created_again_is_refused(nats: NatsServer) -> None:
    stream = nats.stream()
    nats.publish(f"{stream}.a", b"1", b"2")
    source = NatsStream(nats.url, stream)
    *_, (position, _) = source(None)
    with pytest.raises(Diverged, match="ends at 2, before the position 9"):
        read(source, [1, position[1], 9])
    nats.ask(lambda js: js.delete_stream(stream))
    nats.ask(lambda js: js.add_stream(name=stream, subjects=[f"{stream}.>"]))
    nats.publish(f"{stream}.a", b"1", b"2", b"3")
    with pytest.raises(Diverged, match=r"was created at .*Try:"):
        read(source, position)
    for wrong in ([2, "", 1], "x", [1, 1, 1], [1, ""], 7):
        with pytest.raises(Diverged, match="version 1"):
            read(source, wrong)


def test_options_that_do_not_fit_are_refused(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = nats.url
    for call in (
        lambda: NatsStream("localhost", "s"),
        lambda: NatsStream([], "s"),
        lambda: NatsStream(url, ""),
        lambda: NatsStream(url, "s", data="xml"),
        lambda: NatsStream(url, "s", shape="value"),
        lambda: NatsStream(url, "s", start="middle"),
        lambda: NatsStream(url, "s", config={"allow_reconnect": True}),
        lambda: read(NatsStream(url, "s", config={"no_such_option": 1})),
        lambda: NatsSubject(url, "s", ""),
        lambda: NatsSubject(url, "s", "a.*"),
        lambda: NatsSubject(url, "s", "a", shape="rows"),
    ):
        with pytest.raises(InvalidArgument, match="Try:"):
            call()
    with pytest.raises(InvalidArgument) as refused:
        NatsStream("http://me:secret@h", "s")
    assert "secret" not in str(refused.value)
    with pytest.raises(CuesError, match=r"cannot be read: .*stream not found.*Try:"):
        read(NatsStream(url, "MISSING"))
    with pytest.raises(CheckpointError, match="stream not found"):
        NatsSubject(url, "MISSING", "a").__cues_prepare__()
    with pytest.raises(CheckpointError, match="does not have the subject 'elsewhere'"):
        NatsSubject(url, nats.stream(), "elsewhere").__cues_prepare__()
    with pytest.raises(CheckpointError, match="which removes messages"):
        NatsSubject(url, stream := nats.stream(retention="workqueue"), f"{stream}.a").__cues_prepare__()
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(NotInstalled, match=r"pip install 'cues-streams\[nats\]'"):
        read(NatsStream(url, "s"))


# --- the target ---------------------------------------------------------------------------------


def a_target(server: NatsServer, **options: Any) -> NatsSubject:
    stream = server.stream()
    return NatsSubject(server.url, stream, f"{stream}.numbers", **options)


def numbers(server: NatsServer, target: NatsSubject) -> list[int]:
    return [json.loads(data)["n"] for data in server.messages(target.stream)]


def test_records_go_round(nats: NatsServer, store: cues.Store) -> None:
    """Headers and data are kept; those of the server and of the sink are not copied."""
    target = a_target(nats, shape="record")
    source = nats.stream()
    nats.publish(f"{source}.a", b"\xff", b"", headers={"kind": "x", "Nats-Msg-Id": "1"})
    nats.publish(f"{source}.a", b"text")
    graph = cues.Graph("g", [cues.Source("q", NatsStream(nats.url, source)), target.sink("q")])
    testing.run_until_idle(graph, store)
    found = read(NatsStream(nats.url, target.stream))
    assert [message["data"] for message in found] == [b"\xff", b"text"]  # the id of the second one is a repetition
    kept = [name for name, _ in found[0]["headers"] if not name.startswith("Nats-")]
    assert kept == ["kind", "Cues-Position"]


def test_messages_that_do_not_fit_go_to_the_error_queue(nats: NatsServer, store: cues.Store) -> None:
    target = a_target(nats)
    store.queue("q", max_message_bytes=4_000_000).appender().write_many(
        [{"n": 1}, {"n": b"\xff"}, {"n": "x" * 1_100_000}, {"n": 2}]
    )
    graph = cues.Graph("g", [cues.Source("q", None), target.sink("q", batch_size=1)], errors="errors")
    testing.run_until_idle(graph, store)
    assert numbers(nats, target) == [1, 2]
    first, second = (str(error) for error in testing.messages(store, "errors"))
    assert "is not one for" in first and "bytes, and the servers take" in second


def test_a_message_function_and_a_filter_keep_the_places(nats: NatsServer, store: cues.Store) -> None:
    target = a_target(nats)
    graph = cues.Graph("g", [cues.Source("q", None)])
    graph.add(target.sink("q", batch=False, where=lambda message: message["n"] % 3))
    store.queue("q").appender().write_many([{"n": n} for n in range(20)])
    for hit in (1, 3, 2):
        with testing.crash("nats.published", hit, how="raise"), contextlib.suppress(testing.Crashed):
            testing.run_until_idle(graph, store)
    testing.run_until_idle(graph, store)
    assert numbers(nats, target) == [n for n in range(20) if n % 3]


def test_other_subjects_of_the_stream_disturb_nothing(nats: NatsServer) -> None:
    """Sequences are guessed, so a message of another subject in between has the rest sent again."""
    target = a_target(nats)
    done = threading.Event()

    def noise() -> None:
        while not done.is_set():
            nats.publish(f"{target.stream}.noise", *[b"{}"] * 50)

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        for start in range(1, 1500, 300):
            deliver(target, start, start + 300)
    finally:
        done.set()
        thread.join()
    found = nats.messages(target.stream, target.subject)
    assert [json.loads(data)["n"] for data in found] == list(range(1, 1501))


def test_the_first_messages_of_a_step_are_found_after_a_crash(nats: NatsServer) -> None:
    """The step is then delivered as it was, cut otherwise, or under another owner."""
    target = a_target(nats)
    with testing.crash("nats.published", 2, how="raise"), contextlib.suppress(testing.Crashed):
        deliver(target, 1, 20)
    assert numbers(nats, target) == [1, 2, 3]
    other = pickle.loads(pickle.dumps(target))
    deliver(other, 1, 3)
    deliver(other, 2, 8, epoch=2)
    with pytest.raises(cues.Fenced):
        deliver(a_copy(other), 8, 9, epoch=1)
    deliver(other, 1, 20, epoch=2)
    assert numbers(nats, target) == list(range(1, 20))
    deliver(other, 1, 4, epoch=2, generation=1)  # asked for again
    assert numbers(nats, target) == [*range(1, 20), 1, 2, 3]


def a_copy(target: NatsSubject) -> NatsSubject:
    copy: NatsSubject = pickle.loads(pickle.dumps(target))
    return copy


def test_two_owners_at_once_write_once(nats: NatsServer) -> None:
    target = a_target(nats)
    other = a_copy(target)

    def between(connection: Any, fresh: Any) -> None:
        connection.write(fresh)
        other.identity = lambda processor, delivery, index: f"other {index}"  # type: ignore[method-assign]
        deliver(other, 1, 4)

    target.identity = lambda processor, delivery, index: f"own {index}"  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="another process published") as refused:
        deliver(target, 1, 4, between)
    assert refused.value.again and is_away(refused.value)
    deliver(target, 1, 6)
    assert numbers(nats, target) == [1, 2, 3, 4, 5]


def test_a_subject_of_another_writer_or_processor_is_refused(nats: NatsServer) -> None:
    target = a_target(nats)
    nats.publish(target.subject, b'{"n": 0}')
    with pytest.raises(Diverged, match="belongs to it alone"):
        deliver(target, 1, 3)
    nats.ask(lambda js: js.purge_stream(target.stream))
    deliver(target, 1, 3)
    assert target.holds(["g.save", "g.other"]) == ["g.save"]
    with pytest.raises(Diverged, match=r"not one of g\.other"):
        deliver(a_copy(target), 1, 3, id="g.other")
    with pytest.raises(Diverged, match="written from the store"):
        deliver(a_copy(target), 3, 5, store="cd" * 8)


def test_a_function_writes_each_message_that_it_is_given(nats: NatsServer) -> None:
    target = a_target(nats)
    with pytest.raises(InvalidArgument, match="wrote 1 messages of the 2"):
        deliver(target, 1, 3, lambda connection, fresh: connection.write(fresh[0]))
    with pytest.raises(ValueError, match="mine"):
        deliver(target, 1, 3, fails)
    assert numbers(nats, target) == []


def fails(connection: Any, fresh: Any) -> None:
    connection.write(fresh)
    raise ValueError("mine")


def test_the_duplicate_window_helps_where_the_last_message_is_gone(nats: NatsServer) -> None:
    """Without the row, the ids of the messages are what the server knows; the next message follows them."""
    target = a_target(nats)
    deliver(target, 1, 4)
    nats.ask(lambda js: js.purge_stream(target.stream))
    deliver(a_copy(target), 1, 6)
    assert numbers(nats, target) == [4, 5]


# --- outages ------------------------------------------------------------------------------------


def test_a_wrong_password_is_a_fault_and_a_server_that_is_away_is_none() -> None:
    with running("--user", "me", "--pass", "right") as server:
        for url in (server.url, server.url.replace("//", "//me:wrong@")):
            with pytest.raises(CuesError, match="Authorization Violation") as refused:
                read(NatsStream(url, "S"))
            assert not isinstance(refused.value, Away)
            with pytest.raises(CheckpointError, match="Authorization Violation") as stopped:
                deliver(NatsSubject(url, "S", "s"), 1, 2)
            assert not is_away(stopped.value)
    with pytest.raises(Away, match="cannot be read"):
        read(NatsStream([server.url, server.url], "S"))
    with pytest.raises(CheckpointError) as gone:
        deliver(NatsSubject(server.url, "S", "s"), 3, 4)
    assert is_away(gone.value)


def test_what_counts_as_away() -> None:
    import nats

    errors, js = nats.errors, nats.js.errors
    for kind in (
        errors.NoServersError, errors.ConnectionClosedError, errors.StaleConnectionError, errors.TimeoutError,
        errors.NoRespondersError, js.ServiceUnavailableError,
    ):  # fmt: skip
        assert is_away(kind()) and nats_streams.is_away(kind()), kind
    for fault in (errors.AuthorizationError(), js.NotFoundError(), js.BadRequestError(), errors.BadSubjectError()):
        assert not is_away(fault) and not nats_streams.is_away(fault), fault


def test_answers_that_are_lost_repeat_and_lose_nothing(nats: NatsServer, tmp_path: Path) -> None:
    """Messages of a step were published, and nobody was told: the last one of the subject says how many."""
    target = a_target(nats)
    proxy = Proxy(nats.port, b"HPUB")
    lossy = NatsSubject(f"nats://127.0.0.1:{proxy.port}", target.stream, target.subject)
    lossy.identity = lambda *_: str(random.random())  # type: ignore[method-assign]  # no help of the duplicate window
    graph = cues.Graph("g", [cues.Source("q", None), lossy.sink("q", batch_size=25)])
    with contextlib.closing(proxy), graph.start(store=tmp_path / "store") as started:
        proxy.armed = 5
        for n in range(100):
            started.send("q", {"n": n})
        assert started.wait_idle(60)
    assert proxy.lost == 5 and numbers(nats, target) == list(range(100))


def mirror_graph(url: str, source: str, target: str, *, follow: bool = False) -> cues.Graph:
    graph = cues.Graph("mirror")
    records = NatsStream(url, source, data="json", shape="value", follow=follow)
    graph.add(cues.Source("messages", records, batch_size=7))

    @graph.sink("messages", id="save", batch=True, batch_size=5, checkpoint=NatsSubject(url, target, f"{target}.n"))
    def save(messages: Any, process: cues.Process) -> None:
        process.connection.write(messages)
        print(len(messages), flush=True)

    return graph


def test_a_server_that_ends_in_the_middle_is_waited_for(tmp_path: Path) -> None:
    """It is killed by its pid, and started again on its data, while a source follows and a sink writes."""
    count = 60
    with running() as server:
        source, target = server.stream(), server.stream()
        with mirror_graph(server.url, source, target, follow=True).start(store=tmp_path / "store") as started:
            for round in range(3):
                server.publish(f"{source}.a", *encoded(*({"n": n} for n in range(round * 20, round * 20 + 10))))
                until(lambda: len(server.messages(target)) >= round * 20 + 5)
                server.publish(f"{source}.a", *encoded(*({"n": n} for n in range(round * 20 + 10, round * 20 + 20))))
                server.kill()
                assert "127.0.0.1" in until(lambda: started.counters()["mirror.messages"].away)
                server.start()
            until(lambda: len(server.messages(target)) >= count)
            until(started.idle)
        assert [json.loads(data)["n"] for data in server.messages(target)] == list(range(count))


# --- kill -9 ------------------------------------------------------------------------------------


def mirror(path: str, url: str, source: str, target: str) -> None:
    """Mirror a stream to its end in this process; a test kills it on the way."""
    NatsSubject.identity = lambda *_: str(random.random())  # type: ignore[method-assign]  # no help of the window
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(mirror_graph(url, source, target), store)


CODE = "import sys; from test_processors_nats import mirror; mirror(*sys.argv[1:])"


def killed(server: NatsServer, path: Path, rounds: int, count: int) -> None:
    source, target = server.stream(), server.stream()
    server.publish(f"{source}.a", *encoded(*({"n": n} for n in range(count))))
    mirrors.killed(CODE, path, server.url, source, target, rounds=rounds)
    assert [json.loads(data)["n"] for data in server.messages(target)] == list(range(count))


@pytest.mark.slow
def test_a_mirror_that_is_killed_has_each_message_once(nats: NatsServer, tmp_path: Path) -> None:
    killed(nats, tmp_path, rounds=2, count=60)


@bounded("rounds", 5, 25)
def test_a_mirror_that_is_killed_at_any_time_has_each_message_once(
    rounds: int, nats: NatsServer, tmp_path: Path
) -> None:
    killed(nats, tmp_path, rounds=rounds, count=600)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["nats.published", "checkpoint.inside", "checkpoint.after", "commit.inside"])
def test_a_mirror_that_is_killed_at_a_point_has_each_message_once(point: str, nats: NatsServer, tmp_path: Path) -> None:
    source, target = nats.stream(), nats.stream()
    nats.publish(f"{source}.a", *encoded(*({"n": n} for n in range(40))))
    mirrors.killed_at(point, CODE, tmp_path, nats.url, source, target)
    assert [json.loads(data)["n"] for data in nats.messages(target)] == list(range(40))


@pytest.fixture(params=amounts(10_000, 100_000))
def filled(request: pytest.FixtureRequest, nats: NatsServer) -> Iterator[tuple[str, str, int]]:
    """A stream of so many messages, and an empty one; both are removed at the end."""
    source, target = nats.stream(), nats.stream()

    async def fill(js: Any) -> None:
        for begin in range(0, request.param, 1_000):
            sent = [await js.publish_async(f"{source}.a", b'{"n": %d}' % n) for n in range(begin, begin + 1_000)]
            for answer in sent:
                await answer

    nats.ask(fill)
    yield source, target, request.param
    for stream in (source, target):
        nats.ask(lambda js: js.delete_stream(stream))


def test_many_messages(nats: NatsServer, filled: tuple[str, str, int], store: cues.Store) -> None:
    source, target, count = filled
    graph = cues.Graph("g", [cues.Source("q", NatsStream(nats.url, source, data="json", shape="value"))])
    graph.add(NatsSubject(nats.url, target, f"{target}.n").sink("q"))
    began = time.monotonic()
    testing.run_until_idle(graph, store)
    print(f"{time.monotonic() - began:.1f} s")
    assert [json.loads(data)["n"] for data in nats.messages(target)] == list(range(count))
