"""Messages in files and streams: framings, by content type.

    application/x-protobuf-fixed    66 33 93 36, length (4 bytes, little-endian), payload
    application/x-ndjson            one JSON object, line feed
    text/csv                        a record of fields, the UUID first, line feed

The bytes are those of Gazette (``message/framing_*.go``), except that JSON leaves ``&``, ``<`` and ``>`` as they
are. A framing reads one frame at a time and never beyond it, so several may take turns on a stream.

    EOFError          the clean end, between two frames
    UnexpectedEOF     the stream ends inside a frame
    Desynchronised    the bytes are not the beginning of a frame (fixed framing); the reader skips to the next frame
    FramingError      a line that cannot be decoded; the reader is after it, and the next line may be good
    MessageTooLarge   a frame above 64 MiB, which is not read

Not guaranteed: that a damaged payload is noticed. Fixed framing has no checksum.
"""

from __future__ import annotations

import csv
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from cues import jsontext
from cues.errors import Desynchronised, FramingError, InvalidArgument, MessageTooLarge, UnexpectedEOF

FIXED: Final = "application/x-protobuf-fixed"
JSON_LINES: Final = "application/x-ndjson"
CSV: Final = "text/csv"

FRAME_BYTES_MAX: Final = 64 << 20
"""The limit of a frame, in bytes. Without it a damaged length could demand 4 GiB of memory."""
BUFFER_BYTES: Final = 64 << 10

_MAGIC: Final = b"\x66\x33\x93\x36"
_HEADER_BYTES: Final = 8


class ByteStream(Protocol):
    """The source of frames: any binary file."""

    def read(self, size: int = -1, /) -> bytes | None: ...


class FrameReader:
    """Reads a stream through a buffer of ``buffer`` bytes, at least 16. ``offset`` is the number of bytes read so far.

    :attr:`memory` is for the values that a framing keeps for its stream.
    """

    def __init__(self, stream: ByteStream, buffer: int = BUFFER_BYTES) -> None:
        self._stream = stream
        self._capacity = max(16, buffer)
        self._buffer = b""
        self._ended = False
        self.offset = 0
        self.memory: dict[str, Any] = {}

    def peek(self, size: int) -> bytes:
        """Return all of the buffer, at least ``size`` bytes unless the stream ends earlier, without taking it."""
        while len(self._buffer) < size and (read := self._read(max(size, self._capacity) - len(self._buffer))):
            self._buffer += read
        return self._buffer

    def _read(self, size: int) -> bytes:
        """Read up to ``size`` bytes of the stream; none after its end, which is not read again."""
        read = b"" if self._ended else self._stream.read(size) or b""
        self._ended = not read
        return read

    def take(self, size: int) -> bytes:
        """Take the next ``size`` bytes; fewer only at the end of the stream."""
        self.peek(min(size, self._capacity))
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        parts = [taken]
        left = size - len(taken)
        while left and (read := self._read(min(left, 1 << 20))):
            parts.append(read)
            left -= len(read)
        data = b"".join(parts)
        self.offset += len(data)
        return data

    def line(self) -> bytes:
        """Take the next line, with its line feed, up to 64 MiB.

        Raises EOFError if there is none, and :class:`UnexpectedEOF` if it has no line feed.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            buffered = self.peek(1)
            if not buffered:
                if size:
                    raise UnexpectedEOF(
                        f"The stream ends after {size:,} bytes of a line, without a line feed.",
                        "use the complete file, or add a line feed at its end.",
                        data=b"".join(parts),
                    )
                raise EOFError
            end = buffered.find(b"\n") + 1
            parts.append(self.take(end or len(buffered)))
            size += len(parts[-1])
            if end:
                return b"".join(parts)
            if size > FRAME_BYTES_MAX:
                raise _too_large(size, "line", " or more")


class Framing(Protocol):
    """The encoding of messages of one content type in a stream."""

    @property
    def content_type(self) -> str: ...

    def encode(self, message: Any) -> bytes:
        """Return the frame of a message. Raises :class:`FramingError` for a message that it cannot encode."""

    def decode(self, reader: FrameReader) -> Any:
        """Read one frame and nothing after it. Raises the errors that the module lists."""


class Fixed:
    """Fixed framing of payload bytes, or of messages that ``dumps`` and ``loads`` convert (protobuf, for example)."""

    def __init__(
        self,
        content_type: str = FIXED,
        dumps: Callable[[Any], bytes] | None = None,
        loads: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.content_type = content_type
        self._dumps = dumps
        self._loads = loads

    def encode(self, message: Any) -> bytes:
        payload = message if self._dumps is None else self._dumps(message)
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise FramingError(
                f"A payload of {self.content_type} is bytes, found {type(payload).__name__}.",
                "register a converter: register_framing(Fixed(dumps=…, loads=…)).",
            )
        payload = bytes(payload)
        if len(payload) > FRAME_BYTES_MAX:
            raise _too_large(len(payload), "payload")
        return _MAGIC + len(payload).to_bytes(4, "little") + payload

    def decode(self, reader: FrameReader) -> Any:
        buffered = reader.peek(_HEADER_BYTES)
        if not buffered:
            raise EOFError
        if len(buffered) < _HEADER_BYTES:
            if buffered == b"\n":  # a text editor added it; it stays in the stream, because it is not part of a frame
                raise EOFError
            raise UnexpectedEOF(
                f"The stream ends inside the header of a frame ({len(buffered)} of 8 bytes).", data=buffered
            )
        if buffered[:4] != _MAGIC:
            raise self._desynchronised(reader, buffered)
        size = int.from_bytes(buffered[4:8], "little")
        if size > FRAME_BYTES_MAX:
            raise _too_large(size, "frame")
        frame = reader.take(_HEADER_BYTES + size)
        if len(frame) < _HEADER_BYTES + size:
            raise UnexpectedEOF(
                f"The stream ends inside a frame (size {_HEADER_BYTES + size}): {len(frame)} bytes are there.",
                "use the complete file.",
                data=frame,
            )
        payload = frame[_HEADER_BYTES:]
        return payload if self._loads is None else self._loads(payload)

    def _desynchronised(self, reader: FrameReader, buffered: bytes) -> Desynchronised:
        """Skip to the next magic number in the buffer; its last 3 bytes may be the beginning of one."""
        at = buffered.find(_MAGIC, 1)
        junk = reader.take(at if at > 0 else len(buffered) - (len(_MAGIC) - 1))
        return Desynchronised(
            f"{len(junk)} bytes before offset {reader.offset:,} are not a frame of {self.content_type}.",
            "call decode again, which reads the next frame; or use another content type.",
            junk=junk,
        )


class JSONLines:
    """One JSON object in each line, by :func:`cues.jsontext.encode`. UUIDs are written and read as text."""

    content_type = JSON_LINES

    def encode(self, message: Any) -> bytes:
        try:
            return jsontext.encode(message, compact=True, exact=True).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise FramingError(f"The message cannot be written as JSON: {error}.", "use plain values only.") from None

    def decode(self, reader: FrameReader) -> Any:
        line = reader.line()
        try:
            return jsontext.decode(line)
        except ValueError as error:
            raise FramingError(
                f"The line that ends at offset {reader.offset:,} is not JSON: {error}.", "correct or remove the line."
            ) from None


class CSVRecords:
    """Records of text fields; the first field is the UUID. All records have as many fields as the first one."""

    content_type = CSV

    def encode(self, message: Sequence[Any]) -> bytes:
        if isinstance(message, (str, bytes)) or not isinstance(message, Sequence):
            raise FramingError(f"A record is a list of fields, found {type(message).__name__}.", "pass [uuid, …].")
        if not message:
            raise FramingError("The record has no fields.", "pass [uuid, …].")
        _check_uuid(str(message[0]))
        text = ",".join(_quoted("" if field is None else str(field)) for field in message) + "\n"
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise FramingError(f"The record cannot be written as UTF-8: {error}.", "remove the surrogates.") from None

    def decode(self, reader: FrameReader) -> list[str]:
        memory = reader.memory
        record: list[str] = []
        while not record:  # an empty line is not a record
            start = reader.offset
            try:
                record = next(csv.reader(self._lines(reader), strict=True))
            except (csv.Error, UnicodeDecodeError) as error:
                memory["records"] = memory.get("records", 0) + 1
                raise FramingError(f"The record at offset {start:,} cannot be read: {error}.", "correct it.") from None
        number = memory["records"] = memory.get("records", 0) + 1
        width = memory.setdefault("width", len(record))
        if len(record) != width:
            raise FramingError(
                f"Record {number}: wrong number of fields ({len(record)}; the first has {width}).", "correct it."
            )
        _check_uuid(record[0])
        return record

    @staticmethod
    def _lines(reader: FrameReader) -> Iterator[str]:
        """Read the lines of one record: the csv module takes a further line only inside quotes."""
        size = 0
        data = b""
        while size <= FRAME_BYTES_MAX:
            try:
                line = reader.line()
            except EOFError:
                if not size:
                    raise
                raise UnexpectedEOF(
                    "The stream ends inside a quoted field.", "use the complete file.", data=data
                ) from None
            size += len(line)
            data += line
            yield line.decode()
        raise _too_large(size, "record", " or more")


_framings: dict[str, Framing] = {}


def register_framing(framing: Framing) -> None:
    """Use ``framing`` for its content type from now on, instead of any other."""
    _framings[framing.content_type] = framing


def framing_for(content_type: str) -> Framing:
    """Return the framing of a content type. Raises :class:`InvalidArgument` if none is registered."""
    framing = _framings.get(content_type)
    if framing is None:
        raise InvalidArgument(
            f"Unrecognized content type ({content_type}); there are {', '.join(sorted(_framings))}.",
            "use one of those, or call register_framing(...).",
        )
    return framing


for _framing in (Fixed(), JSONLines(), CSVRecords()):
    register_framing(_framing)

# The csv module refuses fields above 128 KiB unless it is told otherwise, for all of the process.
csv.field_size_limit(max(csv.field_size_limit(), FRAME_BYTES_MAX))


def _quoted(field: str) -> str:
    """Return a field as Go's ``encoding/csv`` writes it.

    The csv module leaves a carriage return bare, and then refuses to read it.
    """
    if field == "\\." or field[:1].isspace() or any(char in field for char in ',"\r\n'):
        return '"' + field.replace('"', '""') + '"'
    return field


def _check_uuid(text: str) -> None:
    try:
        uuid.UUID(text)
    except ValueError:
        raise FramingError(
            f"The first field is an invalid UUID (length {len(text)}): {text[:40]!r}.", "run cues import --stamp."
        ) from None


def _too_large(size: int, what: str, more: str = "") -> MessageTooLarge:
    return MessageTooLarge(
        f"A {what} of {size:,} bytes{more} is above the limit of {FRAME_BYTES_MAX:,}.",
        "use another content type, or a file that is not damaged.",
        size_bytes=size,
        limit_bytes=FRAME_BYTES_MAX,
    )
