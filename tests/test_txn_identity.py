"""Identities and mappings: the values of Gazette's own tests, and what does not fit is refused."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import uuid
from typing import Any

import pytest

from cues.errors import InvalidArgument
from cues.txn import (
    Clock,
    Envelope,
    Flags,
    NoPartitions,
    ProducerID,
    build_uuid,
    fnv1a32,
    modulo_mapping,
    parse_uuid,
    random_mapping,
    rendezvous_mapping,
)

P = ProducerID(bytes.fromhex("010203040506"))
SECOND = 1_000_000_000


def test_a_producer_is_drawn_with_the_multicast_bit_or_holds_six_bytes() -> None:
    drawn = {ProducerID() for _ in range(200)}
    assert len(drawn) == 200
    assert all(len(one) == 6 and one[0] & 1 for one in drawn)
    assert bytes(P) == bytes.fromhex("010203040506") and bytes(P) == P
    assert pickle.loads(pickle.dumps(P)) == P and type(copy.copy(P)) is ProducerID
    for wrong in (b"", b"12345", b"1234567", "123456", 6):
        with pytest.raises(InvalidArgument, match="6 bytes"):
            ProducerID(wrong)  # type: ignore[arg-type]


def test_a_clock_ticks_by_a_microsecond_and_never_goes_back() -> None:
    clock = Clock()
    assert [clock.tick(), clock.tick(), int(clock)] == [160, 320, 320]
    for nanos, value in ((300, 0x1B21DD21AA84E030), (399, 0x1B21DD21AA84E030), (299, 0x1B21DD21AA84E020),
                         (400, 0x1B21DD21AA84E040), (1300, 0x1B21DD21AA84E0D0)):  # fmt: skip
        clock = Clock()
        clock.update(12 * SECOND + nanos)
        assert int(clock) == value
    clock = Clock()
    clock.update(12 * SECOND + 300)
    assert clock.tick() == 0x1B21DD21AA84E0D0
    clock.update(11 * SECOND + 100)
    assert int(clock) == 0x1B21DD21AA84E0D0
    clock.update(12 * SECOND + 5000)
    assert int(clock) == 0x1B21DD21AA84E320
    clock = Clock()
    clock.update(1567304621 * SECOND + 981273734)
    assert int(clock) == 0x1E9CC5F83FC2F810
    clock.tick()
    assert clock.tick() == 0x1E9CC5F83FC2F950
    counting = Clock(7)
    counting.update(-(10**18) * 20)  # before the clock's own epoch
    assert int(counting) == 7
    for wrong in (-1, 1 << 64):
        with pytest.raises(InvalidArgument, match="64 bits"):
            Clock(wrong)
    with pytest.raises(InvalidArgument, match="64 bits"):
        Clock((1 << 64) - 1).tick()
    with pytest.raises(InvalidArgument, match="64 bits"):
        counting.update(1 << 80)
    assert int(counting) == 7


def test_threads_that_tick_one_clock_get_different_values() -> None:
    clock = Clock()
    found: list[int] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: found.extend(clock.tick() for _ in range(5000))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(found) == list(range(160, 160 * 20_001, 160))


@pytest.mark.parametrize(
    ("clock", "flags", "text"),
    [
        (0x1E9CC5F83FC2F950, 682, "83fc2f95-cc5f-11e9-82aa-010203040506"),
        (1, 0, "00000000-0000-1000-8400-010203040506"),
        (1, 1, "00000000-0000-1000-8401-010203040506"),
        (15, 2, "00000000-0000-1000-bc02-010203040506"),
        (160, Flags.OUTSIDE_TXN, "0000000a-0000-1000-8000-010203040506"),
        (160, Flags.CONTINUE_TXN, "0000000a-0000-1000-8001-010203040506"),
        (480, Flags.ACK_TXN, "0000001e-0000-1000-8002-010203040506"),
    ],
)
def test_uuids_have_the_layout_of_gazette(clock: int, flags: int, text: str) -> None:
    assert str(build_uuid(P, clock, flags)) == text
    assert parse_uuid(uuid.UUID(text)) == (P, clock, flags)


def test_the_uuids_of_gazettes_documentation_are_read_and_built_again() -> None:
    for text, clock, flags in (
        ("0d2b9119-f9b7-11e9-8c01-6fb7f64cdd31", 0x1E9F9B70D2B91193, Flags.CONTINUE_TXN),
        ("0d2b9119-f9b7-11e9-9002-6fb7f64cdd31", 0x1E9F9B70D2B91194, Flags.ACK_TXN),
        ("032aa58b-f9b7-11e9-b400-0d04970419de", 0x1E9F9B7032AA58BD, Flags.OUTSIDE_TXN),
    ):
        producer, found, flag = parse_uuid(uuid.UUID(text))
        assert (producer.hex(), found, flag) == (text[-12:], clock, flags) and type(flag) is Flags
        assert str(build_uuid(producer, Clock(found), flag)) == text


def test_what_does_not_fit_a_uuid_is_refused_and_every_bit_comes_back() -> None:
    full = build_uuid(ProducerID(b"\xff" * 6), (1 << 64) - 1, 0x3FF)
    assert str(full) == "ffffffff-ffff-1fff-bfff-ffffffffffff"
    assert parse_uuid(full) == (b"\xff" * 6, (1 << 64) - 1, 0x3FF)
    for bit in range(64):
        assert parse_uuid(build_uuid(P, 1 << bit, 0)) == (P, 1 << bit, 0)
    for bit in range(10):
        assert parse_uuid(build_uuid(P, 0, 1 << bit)) == (P, 0, 1 << bit)
    for producer, clock, flags in ((P, 1, 0x400), (P, 1, -1), (P, 1 << 64, 0), (P, -1, 0), (b"12345", 1, 0)):
        with pytest.raises(InvalidArgument):
            build_uuid(producer, clock, flags)


def test_what_is_of_another_type_is_refused_and_not_taken_for_something() -> None:
    wrong: Any
    for wrong in (("123456", 1, 0), ([1, 2, 3, 4, 5, 6], 1, 0), (None, 1, 0), (P, "15", 0), (P, 1.5, 0), (P, 1, "0")):
        with pytest.raises(InvalidArgument):
            build_uuid(*wrong)
    for wrong in ("0000000a-0000-1000-8000-010203040506", b"x" * 16, None):
        with pytest.raises(InvalidArgument, match=r"uuid\.UUID"):
            parse_uuid(wrong)
        with pytest.raises(InvalidArgument, match=r"uuid\.UUID"):
            Envelope("a", 0, 1, wrong, {})
    for wrong in ("5", 1.5, None):
        with pytest.raises(InvalidArgument, match="integer"):
            Clock(wrong)
        with pytest.raises(InvalidArgument, match="nanoseconds"):
            Clock().update(wrong)
        with pytest.raises(InvalidArgument, match="The hash takes bytes"):
            fnv1a32(wrong)
    for wrong in ("pageviews", None, 5):
        with pytest.raises(InvalidArgument, match="partitions"):
            random_mapping(wrong)
        with pytest.raises(InvalidArgument, match="partitions"):
            modulo_mapping(str.encode, wrong)
    wrong = "user"
    with pytest.raises(InvalidArgument, match="called"):
        rendezvous_mapping(wrong, ["a"])


VECTORS = """
It always|5e1f62fd|119|21
seems|2cde002c|54|179
impossible|45dbd4d8|308|50
until|bab5214f|97|13
it is done.|fd0a5982|179|337
- Nelson Mandela|4485d979|437|29
Shall I compare|2f3fac75|84|110
thee to|fbbccc00|300|395
a summer's day?|1dc72d82|214|192
Thou art more|f26fb5bd|135|394
lovely and more|804202b0|118|344
temperate - Shakespeare|341c3515|228|75
"""


@pytest.mark.parametrize("line", VECTORS.strip().splitlines())
def test_mappings_choose_as_gazettes_do(line: str) -> None:
    key, hashed, modulo, rendezvous = line.split("|")
    names = [f"a/topic/part-{n:03d}" for n in range(500)]
    assert fnv1a32(key.encode()) == int(hashed, 16)
    assert modulo_mapping(str.encode, names[:443])(key) == names[int(modulo)]
    partitions = names[:400]
    chosen = rendezvous_mapping(str.encode, lambda: partitions)
    assert chosen(key) == names[int(rendezvous)]
    partitions.extend(names[400:])  # the list grows under the mapping
    assert chosen(key) == names[int(rendezvous)]


def test_fnv1a() -> None:
    assert [fnv1a32(text) for text in (b"", b"a", b"foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_a_random_mapping_reaches_every_partition_and_refuses_an_empty_list() -> None:
    names: list[str] = []
    for mapping in (
        random_mapping(lambda: names),
        modulo_mapping(str.encode, lambda: names),
        rendezvous_mapping(str.encode, lambda: names),
    ):
        names[:] = []
        with pytest.raises(NoPartitions):
            mapping("x")
        names[:] = ["only"]
        assert mapping("x") == "only"  # asked again, it is there
    names[:] = list("abcd")
    mapping = random_mapping(names)
    assert {mapping("x") for _ in range(500)} == set("abcd")
