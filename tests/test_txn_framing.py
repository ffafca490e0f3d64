"""Framings: Gazette's bytes, every way a stream can end or be damaged, and never a byte too many."""

from __future__ import annotations

import io
import random
import uuid
from typing import Any

import pytest
import seeds

from cues.errors import Desynchronised, FramingError, InvalidArgument, MessageTooLarge, UnexpectedEOF
from cues.txn import framing_for, register_framing
from cues.txn.framing import Fixed, FrameReader, Framing

FIXED = framing_for("application/x-protobuf-fixed")
JSON = framing_for("application/x-ndjson")
CSV = framing_for("text/csv")
ID = "0d2b9119-f9b7-11e9-8c01-6fb7f64cdd31"
FOO = bytes.fromhex("66339336 03000000 666f6f")


class Dribble(io.RawIOBase):
    """A stream that gives few bytes at a time, as a socket does."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.most = data, most

    def read(self, size: int = -1) -> bytes:
        found, self.data = self.data[: min(size, self.most)], self.data[min(size, self.most) :]
        return found


def reader(data: bytes, buffer: int = 16) -> FrameReader:
    return FrameReader(io.BytesIO(data), buffer)


def everything(framing: Framing, found: FrameReader) -> list[Any]:
    """Messages, and errors by their class, to the clean end."""
    got: list[Any] = []
    while True:
        try:
            got.append(framing.decode(found))
        except EOFError:
            return got
        except (FramingError, MessageTooLarge) as error:
            got.append(type(error))
            if not isinstance(error, Desynchronised) and (type(error) is not FramingError):
                return got


def test_fixed_frames_have_gazettes_bytes() -> None:
    assert FIXED.encode(b"foo") == FOO and FIXED.encode(b"") == FOO[:4] + bytes(4)
    found = reader(FOO + FIXED.encode(b"") + FIXED.encode(b"x" * 100) + b"\n")
    assert [FIXED.decode(found) for _ in range(3)] == [b"foo", b"", b"x" * 100]
    end = found.offset
    for _ in range(2):
        with pytest.raises(EOFError):  # exactly one line feed is left, which belongs to no frame and is not read
            FIXED.decode(found)
        assert found.offset == end and found.peek(1) == b"\n"
    with pytest.raises(FramingError, match="bytes, found dict"):
        FIXED.encode({})


@pytest.mark.parametrize("length", range(1, 11))
def test_a_fixed_frame_that_is_cut_is_an_unexpected_end(length: int) -> None:
    with pytest.raises(UnexpectedEOF) as caught:
        FIXED.decode(reader(FOO[:length]))
    assert not isinstance(caught.value, EOFError) and caught.value.data == FOO[:length]
    with pytest.raises(UnexpectedEOF, match=r"size 28"):
        FIXED.decode(reader(FIXED.encode(b"x" * 20)[:-1]))


def test_junk_is_passed_over_up_to_the_next_frame_in_the_buffer() -> None:
    found = reader(b"x" * 21 + FOO)
    junk = []
    for _ in range(2):
        with pytest.raises(Desynchronised) as caught:
            FIXED.decode(found)
        junk.append(caught.value.junk)
    assert junk == [b"x" * 13, b"x" * 8]  # of 16 bytes the last 3 may begin a frame
    assert FIXED.decode(found) == b"foo"
    # A magic inside of junk is looked for from the second byte on.
    found = reader(FOO[:3] + FOO, 64)
    with pytest.raises(Desynchronised) as caught:
        FIXED.decode(found)
    assert caught.value.junk == FOO[:3] and FIXED.decode(found) == b"foo"


def test_a_damaged_length_does_not_ask_for_memory() -> None:
    with pytest.raises(MessageTooLarge, match="4,294,967,295 bytes"):
        FIXED.decode(reader(FOO[:4] + b"\xff\xff\xff\xff" + b"x" * 100))
    with pytest.raises(MessageTooLarge):
        FIXED.encode(bytes((64 << 20) + 1))


def test_the_users_codec_frames_other_messages() -> None:
    mine = Fixed("application/x-mine", dumps=lambda m: repr(m).encode(), loads=lambda b: eval(b))
    with pytest.raises(InvalidArgument, match=r"Unrecognized content type \(application/x-mine\)"):
        framing_for("application/x-mine")
    register_framing(mine)
    assert framing_for("application/x-mine") is mine
    assert mine.decode(reader(mine.encode({"a": (1, 2)}))) == {"a": (1, 2)}


def test_json_lines() -> None:
    message = {"q/uuid": uuid.UUID(ID), "text": "<größe> & \n", "n": 1.5, "none": None}
    data = JSON.encode(message)
    assert data == (
        b'{"q/uuid":"0d2b9119-f9b7-11e9-8c01-6fb7f64cdd31","text":"<gr\xc3\xb6\xc3\x9fe> & \\n","n":1.5,"none":null}\n'
    )
    assert JSON.decode(reader(data)) == {**message, "q/uuid": ID}
    for bad in (object(), {"x": b"bytes"}, {"x": float("nan")}, {(1, 2): 3}):
        with pytest.raises(FramingError, match="cannot be written as JSON"):
            JSON.encode(bad)
    found = reader(b'{"a":1}\n{"b":\n\xff\n{"c":3}\n' + b'{"long":"' + b"x" * 500 + b'"}\n{"cut":1}')
    assert JSON.decode(found) == {"a": 1}
    for _ in range(2):
        with pytest.raises(FramingError, match="is not JSON"):
            JSON.decode(found)
    assert JSON.decode(found) == {"c": 3}  # a bad line was read, the next is good
    assert JSON.decode(found) == {"long": "x" * 500}
    with pytest.raises(UnexpectedEOF) as caught:
        JSON.decode(found)
    assert caught.value.data == b'{"cut":1}'


def test_csv_records() -> None:
    record = [ID, "plain", 'quo"ted', "com,ma", "line\nfeed", "", "in side", " space", "car\rriage", "\\.", "\\"]
    data = CSV.encode(record)
    assert data == ID.encode() + b',plain,"quo""ted","com,ma","line\nfeed",,in side," space","car\rriage","\\.",\\\n'
    assert CSV.encode([uuid.UUID(ID), 5]) == ID.encode() + b",5\n"
    found = reader(data + b"\n" + data)
    assert [CSV.decode(found), CSV.decode(found)] == [record, record]
    with pytest.raises(EOFError):
        CSV.decode(found)
    for wrong, text in (
        ([], "no fields"),
        ("text", "list of fields"),
        (["not a uuid"], r"length 10"),
        (5, "int"),
        ([ID, "\ud800"], "UTF-8"),
    ):
        with pytest.raises(FramingError, match=text):
            CSV.encode(wrong)  # type: ignore[arg-type]


def test_invalid_csv_records_are_reported_and_passed() -> None:
    one = f"{ID},a\n".encode()
    found = reader(one + f"{ID},a,b\n".encode() + b"not a uuid,b\n" + f'{ID},"x"y\n'.encode() + b"\xff\n" + one)
    assert CSV.decode(found) == [ID, "a"]
    for text in ("Record 2: wrong number of fields", r"invalid UUID \(length 10\)", "cannot be read", "cannot be read"):
        with pytest.raises(FramingError, match=text):
            CSV.decode(found)
    assert CSV.decode(found) == [ID, "a"]
    for cut in (f"{ID},a".encode(), f'{ID},"open\nfield\n'.encode()):
        with pytest.raises(UnexpectedEOF) as caught:
            CSV.decode(reader(cut))
        assert caught.value.data == cut
    large = [ID, "x" * 300_000]
    assert CSV.decode(reader(CSV.encode(large))) == large


MESSAGES: dict[str, list[Any]] = {
    "application/x-protobuf-fixed": [b"", b"x" * 5000, b"\n", FOO, FOO[:4] * 3],
    "application/x-ndjson": [{}, {"a": "x" * 5000}, {"b": [1, None, "é\n"]}, {"q/uuid": ID}],
    "text/csv": [[ID, ""], [ID, "x" * 5000], [ID, 'a"\n,b'], [ID, "é"]],
}


@pytest.mark.parametrize("content_type", sorted(MESSAGES))
def test_frames_are_read_back_whatever_the_buffer_and_never_beyond_their_end(content_type: str) -> None:
    framing = framing_for(content_type)
    messages = MESSAGES[content_type] * 3
    data = b"".join(map(framing.encode, messages))
    for buffer in (1, 16, 17, 100, 1 << 16):
        for stream in (io.BytesIO(data), Dribble(data, 1), Dribble(data, 7)):
            found, end = FrameReader(stream, buffer), 0
            for message in messages:
                end += len(framing.encode(message))
                assert framing.decode(found) == message
                assert found.offset == end
            with pytest.raises(EOFError):
                framing.decode(found)


@pytest.mark.parametrize("content_type", sorted(MESSAGES))
def test_damaged_and_cut_streams_end_and_never_give_a_message_that_was_cut(content_type: str) -> None:
    framing = framing_for(content_type)
    data = b"".join(map(framing.encode, MESSAGES[content_type]))
    seed = seeds.new()
    rng = random.Random(seed)
    for cut in (*range(60), *(rng.randrange(len(data)) for _ in range(60))):
        found = everything(framing, FrameReader(io.BytesIO(data[:cut]), 16))
        whole = [one for one in found if not isinstance(one, type)]
        assert whole == MESSAGES[content_type][: len(whole)]
    for _ in range(150):
        noise = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        everything(framing, FrameReader(io.BytesIO(noise), rng.choice((16, 64, 4096))))
        everything(framing, FrameReader(io.BytesIO(rng.randbytes(300)), 16))
