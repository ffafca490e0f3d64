"""Journals: files of framed messages with identities, brought into queues and out of them.

    application/x-ndjson           a message is an object; its UUID is a field (q/uuid by default)
    text/csv                       the UUID, then the columns of the message; without column names {"fields": […]}
    application/x-msgpack-fixed    fixed frames of msgpack, UUID under q/uuid; keeps every type
    application/x-protobuf-fixed   fixed frames of opaque bytes: {"payload": …}, without identity

An import appends the messages that the queue does not have (``stamped.py``), so it may be interrupted and repeated.
For that every message needs an identity. A file without identities is stamped first: :func:`stamp` writes a copy, whole
or not at all, and from then on the copy is imported.

An export makes an identity for messages that have none, from the queue and the index. So its files can also be imported
repeatedly, and two exports of a message have the same identity.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from cues import codec
from cues.base import clock, names
from cues.base.data import dataclass
from cues.errors import CuesError, FramingError, InvalidArgument
from cues.producers.sequencer import Envelope
from cues.queues.queue import Queue
from cues.queues.stamped import append_stamped, check_one_log
from cues.records.batch import checksum
from cues.records.identity import TICK, ZERO_UUID, Clock, Flags, ProducerID, as_uuid, build_uuid, split
from cues.storage.datafile import sync_file, sync_names
from cues.txn.framing import CSV, FIXED, JSON_LINES, Fixed, FrameReader, framing_for, register_framing
from cues.txn.reader import ReadCommitted, ReadUncommitted

MSGPACK_FIXED: Final = "application/x-msgpack-fixed"
SUFFIXES: Final = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".csv": CSV,
    ".msgpack": MSGPACK_FIXED,
    ".fixed": FIXED,
}
"""Content types by the suffix of a file's name."""
STAMPED: Final = ".stamped"
COMMIT_MESSAGES: Final = 1000
"""The number of messages of a file that are imported in one transaction."""

register_framing(Fixed(MSGPACK_FIXED, dumps=codec.pack, loads=codec.unpack))

Pair = tuple[uuids.UUID, dict[str, Any]]
Progress = Callable[[int, int], None]
"""Called with the number of messages and bytes so far."""


@dataclass(frozen=True)
class Form:
    """The form of a queue's messages in a journal."""

    content_type: str
    uuid_key: str = names.UUID
    """The field that holds the UUID (JSON)."""
    columns: tuple[str, ...] = ()
    """The names of the fields after the UUID (CSV)."""

    def __post_init__(self) -> None:
        if self.content_type not in (JSON_LINES, CSV, MSGPACK_FIXED, FIXED):
            framing_for(self.content_type)  # raises an error that lists the known ones
            raise InvalidArgument(
                f"No form is known for messages of {self.content_type}.", f"use one of {', '.join(SUFFIXES.values())}."
            )

    def encode(self, uuid: uuids.UUID, message: dict[str, Any]) -> bytes:
        """Return the frame of a message. Raises :class:`FramingError` for a message that does not fit the form."""
        framing = framing_for(self.content_type)
        if self.content_type == CSV:
            fields = self._fields(message) if message else [""] * max(1, len(self.columns))
            return framing.encode([str(uuid), *fields])
        if self.content_type == FIXED:
            if set(message) != {"payload"}:
                raise FramingError(
                    f"A message of {FIXED} is its payload, found the fields {', '.join(map(repr, message)) or 'none'}.",
                    f"use {MSGPACK_FIXED}.",
                )
            return framing.encode(message["payload"])
        return framing.encode({self.uuid_key: str(uuid) if self.content_type == JSON_LINES else uuid, **message})

    def _fields(self, message: dict[str, Any]) -> list[Any]:
        if not self.columns:
            if set(message) == {"fields"} and isinstance(message["fields"], list):
                return message["fields"]
            raise FramingError(
                f"The message has the fields {', '.join(map(repr, message))}.", "pass their names as columns."
            )
        unknown = [name for name in message if name not in self.columns]
        if unknown:
            raise FramingError(
                f"The message has a field {unknown[0]!r}, which is not a column.", "pass its name as a column."
            )
        return [message.get(name, "") for name in self.columns]

    def decode(self, reader: FrameReader) -> Pair:
        """Read the next message and its UUID, the zero UUID if it has none."""
        message = framing_for(self.content_type).decode(reader)
        if self.content_type == FIXED:
            return ZERO_UUID, {"payload": message}
        if self.content_type == CSV:
            return uuids.UUID(message[0]), self._named(message[1:])
        if not isinstance(message, dict):
            raise FramingError(f"A message is an object, found {type(message).__name__}.", 'use an object: {"key": 1}.')
        uuid = as_uuid(message.pop(self.uuid_key, None))
        return uuid, message

    def _named(self, fields: Sequence[str]) -> dict[str, Any]:
        if not self.columns:
            return {"fields": list(fields)}
        if len(fields) != len(self.columns):
            raise FramingError(
                f"The record has {len(fields)} fields after its UUID, but {len(self.columns)} columns are named.",
                "name a column for each field.",
            )
        return dict(zip(self.columns, fields))


def content_type_of(path: Path) -> str | None:
    """Return the content type for the suffix of a file; None for an unknown suffix."""
    return SUFFIXES.get(Path(str(path).removesuffix(STAMPED)).suffix)


def read(stream: BinaryIO, form: Form) -> Iterator[tuple[int, Pair]]:
    """Read the messages of a journal, each with the offset after it.

    An error names the number of the message and the offset after it; it has an attribute ``number``.
    """
    reader = FrameReader(stream)
    number = 0
    while True:
        number += 1
        try:
            pair = form.decode(reader)
        except EOFError:
            return
        except CuesError as error:
            error.message = f"Message {number}, before offset {reader.offset:,}: {error.message}"
            error.__dict__["number"] = number
            raise
        yield reader.offset, pair


def bring(
    queue: Queue,
    stream: BinaryIO,
    form: Form,
    unstamped: bool = False,
    progress: Progress = lambda n, size: None,
    seen: dict[int, int] | None = None,
) -> tuple[int, int]:
    """Append the messages of a journal that a queue does not have; return the numbers of new and of known messages.

    A message without an identity is refused, unless ``unstamped`` allows every import to append it again. If the
    journal is damaged, the messages before the damage are appended. ``seen`` is one dict for all files of a journal
    that has several (see :func:`append_stamped`).
    """
    pairs: list[Pair] = []
    seen = {} if seen is None else seen
    appended = total = 0

    def commit() -> None:
        nonlocal appended
        some, before = list(pairs), dict(seen)
        pairs.clear()
        try:
            appended += append_stamped(queue, some, seen)
        except CuesError as error:
            offset = getattr(error, "offset", None)
            if offset is not None:
                appended += append_stamped(queue, some[:offset], before)
                text = error.message.partition("]: ")[2]
                error.message = f"Message {total - len(some) + offset + 1} cannot be imported: {text}"
            raise

    try:
        for offset, (uuid, message) in read(stream, form):
            if not uuid.int and not unstamped:
                where = "" if form.content_type == FIXED else f" under {form.uuid_key!r}"
                raise FramingError(
                    f"Message {total + 1} has no UUID{where}: importing it again would append it again.",
                    "stamp the file first (--stamp), or allow repeated messages (--unstamped).",
                )
            pairs.append((uuid, message))
            total += 1
            if len(pairs) == COMMIT_MESSAGES:
                commit()
                progress(total, offset)
    finally:
        commit()
    return appended, total - appended


def stamp(path: Path, form: Form) -> tuple[Path, int]:
    """Write a copy of a file in which every message has an identity; return its path and number of messages.

    The copy has its name only when it is complete. An existing copy is used again, because the identities must stay
    the same; the number is then 0. So the copy is durable before an import commits one of them.
    Raises :class:`InvalidArgument` if the file has changed since.
    """
    copy = path.with_name(path.name + STAMPED)
    if copy.exists():
        if path.stat().st_mtime_ns > copy.stat().st_mtime_ns:
            raise InvalidArgument(
                f"{path} has changed since its stamped copy {copy.name} was made.",
                f"import {copy.name} without {path.name}; or remove {copy.name}, to import all messages as new.",
            )
        sync_file(copy)  # its writer may have died before it synced the name
        return copy, 0
    producer, ticking = ProducerID(), Clock()
    ticking.update(clock.now_ns())
    number = 0
    with path.open("rb") as source, written_whole(copy) as target:
        for frame in _stamped(source, form, producer, ticking):
            target.write(frame)
            number += 1
    return copy, number


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file that has its name only when it is complete. The file and its name are durable at the end."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_names(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _stamped(source: BinaryIO, form: Form, producer: ProducerID, ticking: Clock) -> Iterator[bytes]:
    def new() -> uuids.UUID:
        return build_uuid(producer, ticking.tick(), Flags.OUTSIDE_TXN)

    if form.content_type == FIXED:
        raise InvalidArgument(
            f"A payload of {FIXED} has no place for an identity.", "use --unstamped, or another form."
        )
    if form.content_type == CSV:
        framing = framing_for(CSV)
        text = io.TextIOWrapper(source, encoding="utf-8", newline="")
        try:
            for record in csv.reader(text, strict=True):
                if record:
                    yield framing.encode([str(new()), *record])
        except (csv.Error, UnicodeDecodeError) as error:
            raise FramingError(f"The file cannot be read as CSV: {error}.", "correct it.") from None
        return
    for offset, (uuid, message) in read(source, form):
        if uuid.int:
            raise InvalidArgument(
                f"The message before offset {offset:,} is stamped already.", "import the file as it is."
            )
        yield form.encode(new(), message)


def take_out(
    queue: Queue,
    write: Callable[[bytes], object],
    form: Form,
    begin: int | None = None,
    committed: bool = False,
    progress: Progress = lambda n, size: None,
) -> int:
    """Write the messages of a queue from index ``begin`` on as a journal; return their number.

    Writes every message, also pending ones and acknowledgements; with ``committed`` only the committed messages, each
    outside of transactions. Ends at the index that was the end of the queue when the call began.
    """
    check_one_log(queue)
    end = queue.core.row().next
    reader: Iterable[Envelope]
    if committed:
        reader = ReadCommitted(queue, begin=begin, end=end, message_type=None)
    else:
        reader = ReadUncommitted(queue, begin, end, message_type=None)
    producer = _of_log(queue)
    number = size = 0
    for envelope in reader:
        if committed and envelope.acknowledgement:
            continue
        frame = form.encode(_identity(envelope, producer, committed), envelope.message)
        write(frame)
        number += 1
        size += len(frame)
        if number % COMMIT_MESSAGES == 0:
            progress(number, size)
    return number


def _identity(envelope: Envelope, producer: ProducerID, committed: bool) -> uuids.UUID:
    """Return the UUID of a message, or one made from its queue and index."""
    if not envelope.clock:
        return build_uuid(producer, envelope.begin * TICK, Flags.OUTSIDE_TXN)
    if committed:
        own, value, _ = split(envelope.uuid)
        return build_uuid(own.to_bytes(6, "big"), value, Flags.OUTSIDE_TXN)
    return envelope.uuid


def _of_log(queue: Queue) -> ProducerID:
    """Make a producer id from the log's identity and partition, for messages without one. It never changes."""
    raw = bytearray(checksum(queue.core.row().identity + queue.core.log.partition.to_bytes(4, "big"))[:6])
    raw[0] |= 0x01
    return ProducerID(bytes(raw))
