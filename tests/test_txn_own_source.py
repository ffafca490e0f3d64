"""Sources of the user's own: positions in the checkpoint, replay, deaths, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import Forks

import cues
from cues import errors, faults, testing
from cues.base import names
from cues.checkpoints import JSONFileCheckpoint, LMDBCheckpoint, SQLCheckpoint
from cues.records.identity import TICK
from cues.txn import Consumer, Flags, ProducerID, build_uuid
from cues.txn.publisher import Publisher


class Lines:
    """The numbers in a file, one a line; a position is an offset in bytes."""

    def __init__(self, path: Path) -> None:
        self.journal = "lines"
        self.path = path

    def read(self, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        with self.path.open("rb") as file:
            file.seek(begin)
            while (end is None or file.tell() < end) and (line := file.readline()).endswith(b"\n"):
                yield file.tell(), {"n": int(line)}


class Listed:
    """Messages of a list, whose numbers are the positions; notes what is read."""

    def __init__(self, *messages: Any) -> None:
        self.journal = "listed"
        self.messages = list(messages)
        self.reads: list[tuple[int, int | None]] = []

    def read(self, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
        self.reads.append((begin, end))
        for number in range(begin, len(self.messages) if end is None else end):
            yield number + 1, dict(self.messages[number])


class Copies:
    """Publishes each message to a queue, and keeps its number."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.taken: list[int] = []

    def consume(self, envelope: Any, publisher: Publisher) -> None:
        publisher.publish_uncommitted(lambda _: self._out, {"n": envelope.message["n"]})
        self.taken.append(envelope.message["n"])

    def finalize(self, publisher: Publisher) -> None:
        return None


def numbers(store: cues.Store) -> list[int]:
    return [message["n"] for message in store.queue("out").tailer(isolation="committed")]


@pytest.mark.parametrize("kind", ["json", "lmdb", "sql"])
def test_the_position_is_in_the_checkpoint_and_a_successor_continues(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("0\n10\n200\n3")  # the last line is not complete
    with cues.open(tmp_path / "s", "process") as store:
        checkpoint: Any = {
            "json": lambda: JSONFileCheckpoint(tmp_path / "c.json"),
            "lmdb": lambda: LMDBCheckpoint(store, "c"),
            "sql": lambda: SQLCheckpoint(f"sqlite:///{tmp_path / 'c.db'}", "c"),
        }[kind]()
        with (
            contextlib.closing(checkpoint),
            Consumer(Copies(store.queue("out")), [Lines(file)], checkpoint) as consumer,
        ):
            consumer.drain()
            assert consumer.read_through == {"lines": 9}
            with file.open("a") as more:
                more.write("00\n4\n")
            consumer.drain()
            with file.open("a") as more:
                more.write("5\n")
            consumer.close()
            with Consumer(Copies(store.queue("out")), [Lines(file)], checkpoint) as successor:
                successor.drain()
        assert numbers(store) == [0, 10, 200, 300, 4, 5]


def test_it_is_read_beside_a_queue(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", "process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(10)])
        source = Listed(*({"n": n} for n in range(100, 110)))
        sources = [store.queue("in"), source]
        app = Copies(store.queue("out"))
        with Consumer(app, sources, JSONFileCheckpoint(tmp_path / "c.json")) as consumer:
            consumer.drain()
        assert sorted(app.taken) == [*range(10), *range(100, 110)]
        assert app.taken != sorted(app.taken), "they take turns"


def stamped(n: int, clock: int, flags: Flags, producer: bytes = b"\x01abcde") -> dict[str, Any]:
    return {"n": n, names.UUID: build_uuid(ProducerID(producer), clock * TICK, flags)}


@pytest.mark.parametrize("ring", [2, 100])
def test_pending_messages_wait_for_their_acknowledgement_and_are_replayed(ring: int, tmp_path: Path) -> None:
    """Five pending messages, one outside of the transaction, then the acknowledgement; then the same five again."""
    pending = [stamped(n, n + 1, Flags.CONTINUE_TXN) for n in range(5)]
    source = Listed(*pending, {"n": 9})
    with cues.open(tmp_path / "s", "process") as store:
        out = store.queue("out")
        checkpoint = JSONFileCheckpoint(tmp_path / "c.json")
        with Consumer(Copies(out), [source], checkpoint, ring=ring) as consumer:
            consumer.drain()
        assert numbers(store) == [9]
        source.messages += [stamped(0, 5, Flags.ACK_TXN), *pending]
        with Consumer(Copies(out), [source], checkpoint, ring=ring) as consumer:
            consumer.drain()
        assert numbers(store) == [9, 0, 1, 2, 3, 4]
        assert (0, 6) in source.reads or any(end is not None for _, end in source.reads), "a successor replays"


def test_an_error_of_a_source_ends_the_consumer_and_its_successor_continues(tmp_path: Path) -> None:
    class Fails(Listed):
        def read(self, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
            yield from super().read(begin, end)
            raise OSError("away")

    with cues.open(tmp_path / "s", "process") as store:
        checkpoint = JSONFileCheckpoint(tmp_path / "c.json")
        failing = Consumer(Copies(store.queue("out")), [Fails({"n": 0})], checkpoint)
        with failing, pytest.raises(OSError, match="away"):
            failing.drain()
        with Consumer(Copies(store.queue("out")), [Listed({"n": 0})], checkpoint) as consumer:
            consumer.drain()
        assert numbers(store) == [0]


@pytest.mark.parametrize("item", [(0, {}), (1.5, {}), {"n": 1}, (True, {}), None.__class__])
def test_what_is_no_position_and_message_is_refused(item: Any, tmp_path: Path) -> None:
    class Wrong:
        journal = "wrong"

        def read(self, begin: int, end: int | None) -> Iterator[Any]:
            yield item

    with cues.open(tmp_path / "s", "process") as store:
        checkpoint = JSONFileCheckpoint(tmp_path / "c.json")
        consumer = Consumer(Copies(store.queue("out")), [Wrong()], checkpoint)
        with consumer, pytest.raises(errors.InvalidArgument, match="'wrong' yielded"):
            consumer.drain()


def test_sources_without_a_name_or_with_one_name_are_refused(tmp_path: Path) -> None:
    nameless = Listed()
    nameless.journal = ""
    for sources, said in ([nameless], "no journal"), ([Listed(), Listed()], "each once"):
        with pytest.raises(errors.InvalidArgument, match=said):
            Consumer(Copies(None), sources, JSONFileCheckpoint(tmp_path / "c.json"))


# --- deaths ---------------------------------------------------------------------------------------------

POINTS = (*faults.CONSUMER_POINTS, *faults.CHECKPOINT_POINTS, "publish.inside", "publish.after", "intents.built")

ONCE = ("consumer.restored", "consumer.repeated", "consumer.dropped", "consumer.noted", "checkpoint.restored")


def live(place: str, point: str = "", hit: int = 0) -> None:
    with cues.open(Path(place, "s"), "process") as store:
        consumer = Consumer(
            Copies(store.queue("out")), [Lines(Path(place, "lines"))], JSONFileCheckpoint(Path(place, "c.json")),
            max_s=1e-9, lease_s=0,
        )  # fmt: skip
        with consumer:
            if point:
                with testing.crash(point, hit):
                    consumer.drain()
            else:
                consumer.drain()


@pytest.mark.slow
def test_a_death_at_every_point_loses_and_doubles_nothing(forks: Forks, tmp_path: Path) -> None:
    killed = 0
    for point in POINTS:
        place = tmp_path / point
        place.mkdir()
        (place / "lines").write_text("".join(f"{n}\n" for n in range(5)))
        hit = 1 if point in ONCE else 3
        killed += forks.run("test_txn_own_source:live", str(place), point, hit).killed
        forks.run("test_txn_own_source:live", str(place))
        with cues.open(place / "s") as store:
            assert numbers(store) == list(range(5)), point
    assert killed > len(POINTS) / 2
