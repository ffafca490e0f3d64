"""The placing of keys: Kafka's own vectors, an independent slow implementation, and the moves when a queue grows."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import seeds

import cues
from cues import groups
from cues.errors import InvalidArgument
from cues.queues.partitioners import NAMES, Missing, Router, fnv1a32, key_bytes, name_of

KAFKA = {
    b"21": -973_932_308,
    b"foobar": -790_332_482,
    b"a-little-bit-long-string": -985_981_536,
    b"a-little-bit-longer-string": -1_486_304_829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58_897_971,
    b"abc": 479_470_107,
}
"""From Kafka's UtilsTest.testMurmur2."""


def slow_murmur2(data: bytes) -> int:
    """Written after Kafka's Java line by line, with Java's signed arithmetic: slow, and in nothing like ours."""

    def int32(value: int) -> int:
        value &= 0xFFFFFFFF
        return value - 0x100000000 if value >= 0x80000000 else value

    def shift(value: int, by: int) -> int:
        return (value & 0xFFFFFFFF) >> by

    length = len(data)
    m, r = 0x5BD1E995, 24
    h = int32(int32(0x9747B28C) ^ length)
    for i in range(length // 4):
        k = 0
        for j in range(4):
            k = int32(k + int32(data[i * 4 + j] << 8 * j))
        k = int32(k * m)
        k = int32(k ^ shift(k, r))
        k = int32(k * m)
        h = int32(h * m)
        h = int32(h ^ k)
    rest = length % 4
    base = length & ~3
    if rest == 3:
        h = int32(h ^ (data[base + 2] << 16))
    if rest >= 2:
        h = int32(h ^ (data[base + 1] << 8))
    if rest >= 1:
        h = int32(h ^ data[base])
        h = int32(h * m)
    h = int32(h ^ shift(h, 13))
    h = int32(h * m)
    return int32(h ^ shift(h, 15))


def test_murmur2_is_kafkas() -> None:
    for data, expected in KAFKA.items():
        assert groups.murmur2(data) == expected == slow_murmur2(data)


def test_murmur2_is_a_slow_implementation_s() -> None:
    seed = seeds.new()
    rng = random.Random(seed)
    for size in [*range(70), 1000]:
        for _ in range(20):
            data = rng.randbytes(size)
            assert groups.murmur2(data) == slow_murmur2(data), data
            n = rng.randrange(1, 300)
            assert groups.partition_for(data, n) == (slow_murmur2(data) & 0x7FFFFFFF) % n


def test_partition_for_takes_bytes_and_utf8() -> None:
    assert groups.partition_for("héllo", 12) == groups.partition_for("héllo".encode(), 12)
    assert 0 <= groups.partition_for(b"", 7) < 7
    assert {groups.partition_for(str(i), 1) for i in range(100)} == {0}
    for bad in (None, 5, 1.0, ["a"]):
        with pytest.raises(InvalidArgument):
            groups.partition_for(bad, 4)  # type: ignore[arg-type]
    for n in (0, -1, True, 2.0, None):
        with pytest.raises(ValueError, match="number of partitions"):
            groups.partition_for("a", n)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="surrogate"):
        groups.partition_for("\ud800", 4)


def test_fnv1a_has_its_authors_vectors() -> None:
    assert fnv1a32(b"") == 0x811C9DC5
    assert fnv1a32(b"a") == 0xE40C292C
    assert fnv1a32(b"foobar") == 0xBF9CF968


def test_what_is_not_bytes_is_not_hashed() -> None:
    wrong: Any
    for wrong in ("21", None, 21):
        with pytest.raises(InvalidArgument, match="The hash takes bytes"):
            groups.murmur2(wrong)


def test_the_default_places_as_kafka_does() -> None:
    keys = [f"user-{i}" for i in range(500)]
    router = Router(12, "user", None)
    placed = router.place([{"user": key} for key in keys])
    assert placed == [groups.partition_for(key, 12) for key in keys]
    assert placed == router.place([{"user": key} for key in keys])  # remembered ones too
    assert Router(12, lambda m: m["user"].encode(), "murmur2").place([{"user": key} for key in keys]) == placed


@pytest.mark.parametrize("partitioner", ["murmur2", "murmur2-sticky", "fnv1a-modulo", "rendezvous"])
def test_keys_of_any_type_stay_together_and_spread(partitioner: str) -> None:
    router = Router(8, "k", partitioner)
    keys: list[Any] = [*range(500), *(str(i) for i in range(500)), *(bytes([i % 256, i // 256]) for i in range(500))]
    keys += [("a", i) for i in range(500)]
    first = router.place([{"k": key} for key in keys])
    assert Router(8, "k", partitioner).place([{"k": key} for key in keys]) == first
    counts = Counter(first)
    assert len(counts) == 8
    assert max(counts.values()) < 2 * min(counts.values()), counts


def test_rendezvous_moves_only_keys_that_go_to_the_new_partition() -> None:
    messages = [{"k": f"key-{i}"} for i in range(2_000)]
    before = Router(8, "k", "rendezvous").place(messages)
    after = Router(9, "k", "rendezvous").place(messages)
    moved = [now for was, now in zip(before, after) if was != now]
    assert set(moved) == {8}
    assert 100 < len(moved) < 400  # a ninth of 2,000 is 222


def test_a_message_without_a_key_is_placed_only_if_that_was_asked_for() -> None:
    """By field and by function, for a missing key and for None: each append takes the next partition."""
    keyed = [{"user": f"u{n}"} for n in range(20)]
    keyless: list[dict[str, Any]] = [{}, {"user": None}, {"x": 1}]
    for key in ("user", lambda message: message.get("user")):
        plain, router = Router(5, key, "murmur2"), Router(5, key, "murmur2-sticky", start=3)
        with pytest.raises(InvalidArgument, match="None"):
            plain.place([*keyed, {"user": None}])
        assert router.place(keyed) == plain.place(keyed)
        mixed = [keyed[0], *keyless, keyed[1]]
        first, *turns, last = router.place(mixed)
        assert [first, last] == plain.place(keyed[:2])
        assert turns == [3, 3, 3]
        assert router.place(keyless) == [4, 4, 4]
        assert router.place(keyed) == plain.place(keyed)
        assert router.place(keyless) == [0, 0, 0]
    with pytest.raises(InvalidArgument, match="places messages by their key"):
        cues.QueueOptions(partitioner="murmur2-sticky")


def test_round_robin_and_sticky_take_turns() -> None:
    turns = Router(3, None, "round-robin", start=2)
    assert turns.place([{}] * 4) == [2, 0, 1, 2]
    assert turns.place([{}]) == [0]
    sticky = Router(3, None, None, start=1)
    assert sticky.place([{}] * 4) == [1] * 4
    assert sticky.place([{}] * 2) == [2] * 2


def test_a_function_places_and_is_checked() -> None:
    assert Router(4, None, lambda message, n: message["x"] % n).place([{"x": 6}, {"x": 3}]) == [2, 3]
    for wrong in (4, -1, None, "0", True):
        with pytest.raises(InvalidArgument, match="from 0 to 3") as caught:
            Router(4, None, lambda message, n, w=wrong: w if message["x"] else 0).place([{"x": 0}, {"x": 1}])
        assert caught.value.offset == 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError) as error:
        Router(4, lambda message: message["nothing"], None).place([{}])
    assert "messages[0]" in error.value.__notes__[0]


def test_a_message_without_a_key_is_refused() -> None:
    for message in ({"x": 1}, {"user": None}):
        with pytest.raises(InvalidArgument, match="'user'"):
            Router(4, "user", None).place([message])


def test_functions_are_stored_by_name(tmp_path: Any) -> None:
    with cues.open(tmp_path / "store") as store:
        store.queue("q", partitions=2, key=key_bytes, partitioner=len)
    with cues.open(tmp_path / "store") as store:
        options = store.queue("q").options
        assert options.key == Missing("cues.queues.partitioners:key_bytes")
        assert options.placing == ("cues.queues.partitioners:key_bytes", "builtins:len")
        assert name_of(options.key) == name_of(key_bytes)
        with pytest.raises(InvalidArgument, match="partitioners:key_bytes"):
            options.key({})  # type: ignore[operator]
        assert cues.QueueOptions.from_dict(options.to_dict()) == options


def test_options_say_what_places() -> None:
    assert cues.QueueOptions(key="user").placing == ("user", "murmur2")
    assert cues.QueueOptions().placing == (None, "sticky")
    for name in NAMES:
        assert cues.QueueOptions(key="user", partitioner=name).placing == ("user", name)
    assert cues.QueueOptions().to_dict() == {}


def by_parity(message: dict[str, Any], n: int) -> int:
    return int(message["n"]) % n


def test_a_graph_as_plain_data_finds_its_functions_again() -> None:
    queues = {"q": cues.QueueOptions(partitions=2, partitioner=by_parity)}
    graph = cues.Graph("g", [cues.Source("q")], queues=queues)
    again = cues.Graph.from_dict(graph.to_dict())
    assert again.queues == queues
    assert again.to_dict() == graph.to_dict()
