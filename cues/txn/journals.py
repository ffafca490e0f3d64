"""Journals: files of framed messages with identities, brought into queues and out of them.

    application/x-ndjson           a message is an object, its UUID a field of it (q/uuid, if nothing else is said)
    text/csv                       UUID, then the message's columns; without names {"fields": […]}
    application/x-msgpack-fixed    fixed frames of msgpack, UUID under q/uuid: every type comes back as it was
    application/x-protobuf-fixed   fixed frames of bytes nobody looks into: {"payload": …}, without identity

An import appends what the queue does not have (``stamped.py``), so it may be cut off and repeated. For that
every message needs an identity. A file without is stamped first: a copy of it is written, whole or
not at all, and from then on the copy is what is imported (:func:`stamp`).

An export gives messages that have no identity one of their own: of the queue and their index. So its
files may be imported again and again as well, and two exports of a message are the same message.
"""

from __future__ import annotations

import csv
import io
import os
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from cues import clock, codec, names
from cues.batch import checksum
from cues.errors import CuesError, FramingError, InvalidArgument
from cues.txn.framing import CSV, FIXED, JSON_LINES, Fixed, FrameReader, framing_for, register_framing
from cues.txn.identity import TICK, ZERO_UUID, Clock, Flags, ProducerID, as_uuid, build_uuid, split
from cues.txn.reader import ReadCommitted, ReadUncommitted
from cues.txn.stamped import append_stamped, check_one_log

if TYPE_CHECKING:
    from cues.queue import Queue
    from cues.txn.sequencer import Envelope

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
"""How many messages of a file are one transaction."""

register_framing(Fixed(MSGPACK_FIXED, dumps=codec.pack, loads=codec.unpack))

Pair = tuple[uuids.UUID, dict[str, Any]]
Progress = Callable[[int, int], None]
"""Called with messages and bytes so far."""


@dataclass(frozen=True)
class Form:
    """How the messages of a queue lie in a journal."""

    content_type: str
    uuid_key: str = names.UUID
    """The field that holds the UUID (JSON)."""
    columns: tuple[str, ...] = ()
    """Names of the fields behind the UUID (CSV)."""

    def __post_init__(self) -> None:
        if self.content_type not in (JSON_LINES, CSV, MSGPACK_FIXED, FIXED):
            framing_for(self.content_type)  # says which there are
            raise InvalidArgument(
                f"Nobody says how messages of {self.content_type} lie on a queue.", f"{', '.join(SUFFIXES.values())}."
            )

    def encode(self, uuid: uuids.UUID, message: dict[str, Any]) -> bytes:
        """The frame of a message; raises :class:`FramingError` for one that does not fit the form."""
        framing = framing_for(self.content_type)
        if self.content_type == CSV:
            fields = self._fields(message) if message else [""] * max(1, len(self.columns))
            return framing.encode([str(uuid), *fields])
        if self.content_type == FIXED:
            if set(message) != {"payload"}:
                raise FramingError(
                    f"A message of {FIXED} is its payload, found the fields {', '.join(map(repr, message)) or 'none'}.",
                    f"{MSGPACK_FIXED}.",
                )
            return framing.encode(message["payload"])
        return framing.encode({self.uuid_key: str(uuid) if self.content_type == JSON_LINES else uuid, **message})

    def _fields(self, message: dict[str, Any]) -> list[Any]:
        if not self.columns:
            if set(message) == {"fields"} and isinstance(message["fields"], list):
                return message["fields"]
            raise FramingError(
                f"The message has the fields {', '.join(map(repr, message))}.", "their names as columns."
            )
        unknown = [name for name in message if name not in self.columns]
        if unknown:
            raise FramingError(f"The message has a field {unknown[0]!r} that is no column.", "its name as a column.")
        return [message.get(name, "") for name in self.columns]

    def decode(self, reader: FrameReader) -> Pair:
        """The next message and its UUID, the zero UUID where it has none."""
        found = framing_for(self.content_type).decode(reader)
        if self.content_type == FIXED:
            return ZERO_UUID, {"payload": found}
        if self.content_type == CSV:
            return uuids.UUID(found[0]), self._named(found[1:])
        if not isinstance(found, dict):
            raise FramingError(f"A message is an object, found {type(found).__name__}.", '{"key": 1}.')
        uuid = as_uuid(found.pop(self.uuid_key, None))
        return uuid, found

    def _named(self, fields: Sequence[str]) -> dict[str, Any]:
        if not self.columns:
            return {"fields": list(fields)}
        if len(fields) != len(self.columns):
            raise FramingError(
                f"The record has {len(fields)} fields behind its UUID, and {len(self.columns)} columns are named.",
                "as many names as there are.",
            )
        return dict(zip(self.columns, fields))


def content_type_of(path: Path) -> str | None:
    """What a file holds by its suffix; None where that says nothing."""
    return SUFFIXES.get(Path(str(path).removesuffix(STAMPED)).suffix)


# --- in -------------------------------------------------------------------------------------------


def read(stream: BinaryIO, form: Form) -> Iterator[tuple[int, Pair]]:
    """The messages of a journal, each with the offset behind it.

    An error says the message's number and where it ends; ``number`` is an attribute of it.
    """
    reader = FrameReader(stream)
    number = 0
    while True:
        number += 1
        try:
            found = form.decode(reader)
        except EOFError:
            return
        except CuesError as error:
            error.message = f"Message {number}, before offset {reader.offset:,}: {error.message}"
            error.__dict__["number"] = number
            raise
        yield reader.offset, found


def bring(
    queue: Queue,
    stream: BinaryIO,
    form: Form,
    unstamped: bool = False,
    progress: Progress = lambda n, size: None,
    seen: dict[int, int] | None = None,
) -> tuple[int, int]:
    """Append the messages of a journal that a queue does not have; returns how many it got, and how many it had.

    A message without an identity is refused, unless ``unstamped`` says that it may come once more with
    every import. Where the journal is damaged, what is before that is in the queue. ``seen`` is one dict for
    all files of a journal that lies in several (see :func:`append_stamped`).
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
                    "stamp the file first (--stamp), or say that it does not matter (--unstamped).",
                )
            pairs.append((uuid, message))
            total += 1
            if len(pairs) == COMMIT_MESSAGES:
                commit()
                progress(total, offset)
    finally:
        commit()
    return appended, total - appended


# --- stamping -------------------------------------------------------------------------------------


def stamp(path: Path, form: Form) -> tuple[Path, int]:
    """Give every message of a file an identity, in a copy beside it; returns the copy, and how many it has.

    The copy is written whole or not at all. One that is there is used again, and the count is then 0: the identities
    must be the same. Raises :class:`InvalidArgument` where the file has changed since.
    """
    copy = path.with_name(path.name + STAMPED)
    if copy.exists():
        if path.stat().st_mtime_ns > copy.stat().st_mtime_ns:
            raise InvalidArgument(
                f"{path} has changed since its stamped copy {copy.name} was made.",
                f"{copy.name} without {path.name}, to import what was stamped; or remove it, to import all as new.",
            )
        return copy, 0
    part = copy.with_name(f"{copy.name}.{os.getpid()}.part")
    producer, ticking = ProducerID(), Clock()
    ticking.update(clock.now_ns())
    number = 0
    try:
        with path.open("rb") as source, part.open("xb") as target:
            for frame in _stamped(source, form, producer, ticking):
                target.write(frame)
                number += 1
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, copy)
    finally:
        part.unlink(missing_ok=True)
    return copy, number


def _stamped(source: BinaryIO, form: Form, producer: ProducerID, ticking: Clock) -> Iterator[bytes]:
    def new() -> uuids.UUID:
        return build_uuid(producer, ticking.tick(), Flags.OUTSIDE_TXN)

    if form.content_type == FIXED:
        raise InvalidArgument(f"A payload of {FIXED} has no place for an identity.", "--unstamped, or another form.")
    if form.content_type == CSV:
        framing = framing_for(CSV)
        text = io.TextIOWrapper(source, encoding="utf-8", newline="")
        try:
            for record in csv.reader(text, strict=True):
                if record:
                    yield framing.encode([str(new()), *record])
        except (csv.Error, UnicodeDecodeError) as error:
            raise FramingError(f"The file cannot be read as CSV: {error}.", "mend it.") from None
        return
    for offset, (uuid, message) in read(source, form):
        if uuid.int:
            raise InvalidArgument(
                f"The message before offset {offset:,} is stamped already.", "import the file as it is."
            )
        yield form.encode(new(), message)


# --- out ------------------------------------------------------------------------------------------


def take_out(
    queue: Queue,
    write: Callable[[bytes], object],
    form: Form,
    begin: int | None = None,
    committed: bool = False,
    progress: Progress = lambda n, size: None,
) -> int:
    """Write the messages of a queue from index ``begin`` on as a journal; returns how many.

    As they lie there, pending and acknowledgements included, or with ``committed`` those that are committed,
    each then outside of transactions. Ends where the queue ended when it began.
    """
    check_one_log(queue)
    end = queue.row().next
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
    """A message's own, or one of its queue and index."""
    if not envelope.clock:
        return build_uuid(producer, envelope.begin * TICK, Flags.OUTSIDE_TXN)
    if committed:
        found, value, _ = split(envelope.uuid)
        return build_uuid(found.to_bytes(6, "big"), value, Flags.OUTSIDE_TXN)
    return envelope.uuid


def _of_log(queue: Queue) -> ProducerID:
    """The producer of messages without one: of the log's identity and partition, the same at every export."""
    raw = bytearray(checksum(queue.row().identity + queue.log.partition.to_bytes(4, "big"))[:6])
    raw[0] |= 0x01
    return ProducerID(bytes(raw))
