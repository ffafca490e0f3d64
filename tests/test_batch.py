"""Record batches: every message in exactly one, no value above a page, no bit that may change unseen."""

from __future__ import annotations

import random
import re
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cues import codec
from cues.base import names
from cues.errors import CodecError, InvalidArgument, MessageTooLarge, ReservedKey
from cues.records import batch
from cues.records.batch import Batch, Page
from cues.records.provenance import Provenance

LIMIT = 1 << 20


def sealed(pages: list[Page], first: int = 1, time_ns: int = 0) -> list[Batch]:
    """The record that a log would store, opened again."""
    found = []
    for page in pages:
        value = batch.seal(page, first, time_ns)
        pieces = [batch.seal_piece(piece, number) for number, piece in enumerate(page.pieces, 1)]
        assert all(len(part) <= batch.VALUE_BYTES_MAX for part in (value, *pieces))
        assert batch.intact(value, first) and all(batch.intact(p, n) for n, p in enumerate(pieces, 1))
        found.append(Batch(first, value, pieces))
        assert found[-1].is_complete()
        first += page.count
    return found


def bodies(batches: list[Batch]) -> list[dict[str, Any]]:
    return [message for one in batches for message in one.messages()]


SIZES = st.lists(st.sampled_from([0, 1, 100, 1000, 2000, 4000, 4050, 4060, 4072, 8000, 30_000]), max_size=30)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.booleans(), st.booleans(), st.booleans())
def test_any_mix_of_sizes_comes_back_in_order(sizes: list[int], hashed: bool, traced: bool, packed: bool) -> None:
    messages = [{"n": i, "x": b"x" * size} for i, size in enumerate(sizes)]
    provenance = Provenance(len(messages), {"from": (range(5, 5 + len(messages)), 7)}) if traced else None
    digest = b"h" * 16 if hashed else None
    encoded = [codec.pack(m) for m in messages] if packed else None
    batches = sealed(batch.build([] if packed else messages, LIMIT, digest, provenance, encoded))
    assert bodies(batches) == messages
    assert {one.head.hash for one in batches} <= {digest}
    seen = [one.provenance("to", frozenset()).at(o) for one in batches for o in range(one.head.count)]
    if traced:
        assert [m["q/queue"]["from"]["q/t"] for m in seen] == list(range(5, 5 + len(messages)))


def test_pages_are_filled() -> None:
    """10,000 small messages take few more pages than their bytes do, whatever the guesses on the way were."""
    for size in (0, 10, 100, 500):
        messages = [{"n": i, "x": "x" * (size + i % 7)} for i in range(10_000)]
        pages = batch.build(messages, LIMIT)
        needed = sum(len(codec.pack(m)) for m in messages) / (batch.VALUE_BYTES_MAX - batch.PREFIX_BYTES)
        assert len(pages) < needed * 1.2 + 2


@pytest.mark.parametrize("size", range(3990, 4100))
def test_around_the_end_of_a_page_nothing_is_cut_too_late_or_lost(size: int) -> None:
    message = {"x": b"x" * size}
    pages = batch.build([message], LIMIT)
    assert bodies(sealed(pages)) == [message]
    fits = batch.PREFIX_BYTES + len(codec.pack([message])) <= batch.VALUE_BYTES_MAX
    assert bool(pages[0].pieces) is not fits
    assert (batch.plain(message) is not None) is fits


def test_the_short_way_writes_the_same_bytes() -> None:
    for message in ({}, {"x": 1}, {"x": "y" * 3000}):
        body = batch.plain(message)
        assert body is not None
        assert batch.seal_plain(body, 9, 123) == batch.seal(batch.build([message], LIMIT)[0], 9, 123)


@pytest.mark.parametrize("message", [{"q/type": "a"}, {"n": "q/"}, {"x": object()}, [1], None, {"x": "y" * 4090}])
def test_the_short_way_leaves_alone_what_it_cannot_judge(message: Any) -> None:
    assert batch.plain(message) is None


# --- damage --------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_record_is_found() -> None:
    value = batch.seal(batch.build([{"n": 1}, {"n": 2}], LIMIT, b"h" * 16)[0], 5, 1)
    assert batch.intact(value, 5)
    for bit in range(len(value) * 8):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not batch.intact(bytes(flipped), 5), f"bit {bit}"


def test_a_record_at_another_index_or_cut_short_is_not_intact() -> None:
    value = batch.seal(batch.build([{"n": 1}], LIMIT)[0], 5, 1)
    assert not batch.intact(value, 6)
    assert not any(batch.intact(value[:n], 5) for n in range(len(value)))
    piece = batch.seal_piece(b"x" * 100, 2)
    assert not batch.intact(piece, 1)


def test_pieces_that_are_missing_or_in_another_order_are_found() -> None:
    page = batch.build([{"x": b"x" * 20_000}], LIMIT)[0]
    value = batch.seal(page, 1, 0)
    pieces = [batch.seal_piece(piece, number) for number, piece in enumerate(page.pieces, 1)]
    assert len(pieces) >= 4
    assert Batch(1, value, pieces).is_complete()
    assert not Batch(1, value, pieces[:-1]).is_complete()
    assert not Batch(1, value, ()).is_complete()
    assert not batch.intact(pieces[1], 1)


def test_a_record_of_a_newer_format_is_refused_not_guessed_at() -> None:
    for version, flags in ((2, 0), (1, 0x80)):
        rest = batch.HEAD.pack(version, flags, 1, 0) + codec.pack([{}])
        value = batch.checksum(rest, seed=1) + rest
        assert batch.intact(value, 1)
        with pytest.raises(CodecError, match="newer version"):
            Batch(1, value)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3, 49])
@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"x": object()}, CodecError),
        ({"q/hash": "x"}, ReservedKey),
        ({"q/": 1}, ReservedKey),
        ({"q/uuid": "x"}, InvalidArgument),
        ({"q/meta": 1}, InvalidArgument),
        ({"q/meta": {"a": object()}}, CodecError),
        ({"q/meta": {"a": "x" * 5000}}, InvalidArgument),
        ({"q/meta": {"a": "x" * 70_000}}, InvalidArgument),
        ({"x": b"x" * (LIMIT + 1)}, MessageTooLarge),
        ([1], InvalidArgument),
        (None, InvalidArgument),
        ("text", InvalidArgument),
    ],
    ids=lambda v: re.sub(r" at 0x\w+", "", repr(v))[:30],  # the same in every process
)
def test_the_message_at_fault_is_named_by_its_place(place: int, bad: Any, kind: type[Exception]) -> None:
    messages: list[Any] = [{"n": i, "x": "x" * 300} for i in range(50)]
    messages[place] = bad
    with pytest.raises(kind) as caught:
        batch.build(messages, LIMIT)
    assert caught.value.offset == place  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [10, 100, 4000, 4080, 5000])
def test_the_limit_holds_below_and_above_a_page(limit: int) -> None:
    """A limit below a page was not looked at, since only what fits no page was measured."""
    body = limit - len(codec.pack({"x": b"y" * 256})) + 256
    exact = {"x": b"y" * body} if limit > 300 else {"x": b"y" * (limit - 5)}
    assert len(codec.pack(exact)) <= limit
    over = {"x": b"y" * limit}
    assert bodies(sealed(batch.build([{}, exact, {}], limit))) == [{}, exact, {}]
    for messages in ([over], [{}, over]):
        with pytest.raises(MessageTooLarge) as caught:
            batch.build(messages, limit)
        assert caught.value.limit_bytes == limit < caught.value.size_bytes == len(codec.pack(over))
        with pytest.raises(MessageTooLarge):
            batch.build([], limit, encoded=[codec.pack(m) for m in messages])


def test_users_write_type_and_topics_and_meta_is_taken_out() -> None:
    messages = [
        {"q/type": "a", "q/topics": ["t"], "n": 0},
        {"n": 1, "q/meta": {"tx/t": 7, "q/hash": "forged", "mine": {"a": 1}}},
        {"n": 2, "q/meta": {}},
        {"n": 3, b"q/bytes": "not a text key", "text": "q/hash"},
    ]
    [one] = sealed(batch.build(messages, LIMIT))
    assert one.messages() == [messages[0], {"n": 1}, {"n": 2}, messages[3]]
    found = [one.provenance("q", frozenset()).at(o) for o in range(4)]
    assert found == [{}, {"tx/t": 7, "mine": {"a": 1}}, {}, {}]


def test_meta_is_laid_over_what_a_message_came_with() -> None:
    came = Provenance(2, {"a": (range(5, 7), 10**9)})
    messages = [{"n": 1, "q/meta": {"q/queue": {"a": {"mine": 1}}, "x": 1}}, {"n": 2}]
    [one] = sealed(batch.build(messages, LIMIT, None, came))
    first, second = (one.provenance("q", frozenset()).at(o) for o in range(2))
    assert first["x"] == 1
    assert first["q/queue"]["a"]["q/t"] == 5 and first["q/queue"]["a"]["mine"] == 1
    assert second["q/queue"]["a"]["q/t"] == 6 and "x" not in second


def test_stripping_drops_metadata_and_never_the_hash() -> None:
    came = Provenance(1, {"a": (range(5, 6), 1)})
    [one] = sealed(batch.build([{"n": 1, "q/meta": {"x": 1}}], LIMIT, b"h" * 16, came, strips=True))
    assert one.messages() == [{"n": 1}]
    assert one.head.hash == b"h" * 16
    assert one.provenance("q", frozenset()).at(0) == {}


def test_what_the_appender_keeps_of_metadata_grows_with_options() -> None:
    [one] = sealed(batch.build([{"n": 1}, {"n": 2}], LIMIT), first=9, time_ns=10**9)
    assert one.provenance("q", frozenset({"t"})).at(1) == {"q/queue": {"q": {"q/t": 10}}}
    assert list(one.provenance("q", frozenset({"time"})).at(1)["q/queue"]["q"]) == ["q/time"]
    assert one.provenance("q", frozenset({"tx"})).at(1) == {"tx/t": 10}


def test_ten_megabytes_make_one_message_of_many_pieces() -> None:
    message = {"x": random.Random(1).randbytes(10 << 20)}
    [page] = batch.build([message], 64 << 20)
    assert len(page.pieces) > 2500
    assert bodies(sealed([page])) == [message]


def test_names_of_the_header_are_where_the_format_says() -> None:
    value = batch.seal(batch.build([{"n": 1}, {}], LIMIT, b"h" * 16)[0], 3, 77)
    assert struct.unpack_from(">BBHQ", value, 8) == (1, batch.HASH, 2, 77)
    assert value[20:36] == b"h" * 16
    assert codec.unpack(value[36:]) == [{"n": 1}, {}]
    assert frozenset({names.TYPE, names.TOPICS}) == names.USER_KEYS
