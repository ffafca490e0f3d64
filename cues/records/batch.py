"""Record batches: the form in which messages are stored.

    offset  bytes
    0       8       checksum: xxh3-64 of everything after it, seeded with the record's index
    8       1       format version (1)
    9       1       flags
    10      2       count of messages
    12      8       append time, nanoseconds since the epoch: max(now, the log's last)
    20      16      delivery hash              when flagged HASH
            16 …    producer, clock, flags     when flagged PRODUCER (records/stamps.py: also CLOCKS, MIXED)
            2 + n   length, provenance         when flagged PROVENANCE
            4       length of the whole body   when flagged CONTINUED
            rest    body: one msgpack array of the messages; when flagged COLUMNS, a table (records/columns.py), which
                    has the provenance too

All integers are big-endian. A value is at most one LMDB page. Values of several pages need free pages in
a row, which are rare when other queues free pages too; then each costs 4 ms instead of 20 µs. So a message
that does not fit is cut. The first record, flagged CONTINUED, has the beginning of the body and the length
of the whole body. Pieces follow; the key of a piece is the index and a number, its value is a checksum
(seeded with the number) and up to 4,072 bytes.

A batch is made in two steps. :func:`build` packs messages into :class:`Page` objects outside any
transaction. Inside the transaction :func:`seal` adds the index and the time, which are known only there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgpack
import xxhash

from cues import codec
from cues.base import clock, names
from cues.errors import CodecError, CuesError, InvalidArgument, MessageTooLarge, ReservedKey, StoreDamaged, Unsupported
from cues.native import mypyc_attr
from cues.overrides import override
from cues.records import columns, provenance
from cues.records import stamps as stamping
from cues.records.identity import as_uuid
from cues.records.provenance import Provenance
from cues.records.stamps import Stamps

VERSION: Final = 1
VALUE_BYTES_MAX: Final = 4080
"""An LMDB page of 4,096 bytes less its header: a value above this takes a second page."""

OWN_BYTES_MAX: Final = 1 << 31
"""The limit for messages that Cues writes itself (errors, tries): they are not refused for their size."""

HASH: Final = 0x01
PRODUCER: Final = 0x02
PROVENANCE: Final = 0x04
CONTINUED: Final = 0x08
COLUMNS: Final = 0x40
KNOWN_FLAGS: Final = HASH | PRODUCER | PROVENANCE | CONTINUED | COLUMNS | stamping.CLOCKS | stamping.MIXED
"""Flags that this version can read."""

HEAD: Final = struct.Struct(">BBHQ")
_pack_head = HEAD.pack
PREFIX_BYTES: Final = 8 + HEAD.size
_PLAIN_BYTES_MAX: Final = VALUE_BYTES_MAX - PREFIX_BYTES
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_COUNT_MAX: Final = 0xFFFF
_PIECE_BYTES: Final = VALUE_BYTES_MAX - 8

DELAY_MARK: Final = names.DELIVER_AT.encode()
"""Bytes that are in the provenance of a record if a message has a time of delivery; rarely also if none has."""

HEADER_KEYS: Final = (names.META, names.UUID)
"""Keys that users write into a message and that the header keeps."""

checksum: Callable[..., bytes] = xxhash.xxh3_64_digest


@mypyc_attr(allow_interpreted_subclasses=True)
class Page:
    """One record batch before it has an index and a time."""

    __slots__ = ("count", "flags", "pieces", "schema", "tail")

    def __init__(
        self, flags: int, count: int, tail: bytes, pieces: tuple[bytes, ...] = (), schema: bytes = b""
    ) -> None:
        """``tail``: the header after the append time, and the body. ``pieces``: the continuation pieces of a body
        that does not fit in one page. ``schema``: that of columns, which the log of the page must have."""
        self.flags = flags
        self.count = count
        self.tail = tail
        self.pieces = pieces
        self.schema = schema

    def with_tail(self, tail: bytes) -> Page:
        """Return the same messages with another header after the append time."""
        return Page(self.flags, self.count, tail, self.pieces, self.schema)


@dataclass(slots=True)
class Header:
    """The header of a record batch."""

    flags: int
    count: int
    time_ns: int
    hash: bytes | None
    provenance: bytes | None
    length: int
    """Bytes of the whole body when CONTINUED, else 0."""
    body_at: int
    stamps_at: int
    """The offset of the stamps; 0 if there are none."""
    acknowledges: bool
    """True if the record is an acknowledgement, and not a message."""


def seal(page: Page, index: int, time_ns: int) -> bytes:
    """Return the bytes of the record; its first 8 are the seal that position rows keep."""
    rest = _pack_head(VERSION, page.flags, page.count, time_ns) + page.tail
    return checksum(rest, index) + rest


def page_of(batch: Batch, pieces: Sequence[bytes]) -> Page:
    """Return the page of a record, to be sealed for another log; ``pieces`` as they are stored."""
    schema = b"" if batch.schema is None else batch.schema.packed
    own = tuple(piece[8:] for piece in pieces)
    return Page(batch.head.flags, batch.head.count, batch.value[PREFIX_BYTES:], own, schema)


def seal_piece(piece: bytes, number: int) -> bytes:
    return checksum(piece, seed=number) + piece


def intact(value: bytes, index: int) -> bool:
    """Return whether the record is unchanged, and at the index for which it was written."""
    return checksum(memoryview(value)[8:], seed=index) == value[:8]


def count_of(value: bytes) -> int:
    """Return the number of messages in an intact record."""
    return int(HEAD.unpack_from(value, 8)[2])


def acknowledges(value: bytes) -> bool:
    """Return whether a record is an acknowledgement, which has no message; the record may be damaged."""
    if len(value) < PREFIX_BYTES:
        return False
    version, flags, _, _ = HEAD.unpack_from(value, 8)
    at = PREFIX_BYTES + 16 if flags & HASH else PREFIX_BYTES
    return version == VERSION and bool(flags & PRODUCER) and stamping.acknowledges(value, at)


def is_pending(value: bytes, producer: bytes | None = None) -> bool:
    """Return whether a record has pending messages, of this producer; the record may be damaged."""
    if len(value) < PREFIX_BYTES or not value[9] & PRODUCER:
        return False
    at = PREFIX_BYTES + 16 if value[9] & HASH else PREFIX_BYTES
    return stamping.pending(value, at) and (producer is None or value[at : at + len(producer)] == producer)


def stamps_of(value: bytes) -> Stamps:
    """Return the identities of the messages of an intact record that has some."""
    _, flags, count, _ = HEAD.unpack_from(value, 8)
    return stamping.decode(value, PREFIX_BYTES + 16 if flags & HASH else PREFIX_BYTES, count, flags)


def header(value: bytes) -> Header:
    """Decode the header of an intact record."""
    version, flags, count, time_ns = HEAD.unpack_from(value, 8)
    if version != VERSION or flags & ~KNOWN_FLAGS:
        raise CodecError(
            f"A record batch has format {version} and flags {flags:#x}; this version reads format {VERSION}.",
            "install a newer version of Cues (pip install -U cues-streams).",
            path="",
            type_name="record batch",
        )
    at = PREFIX_BYTES
    hash = provenance = None
    length = stamps_at = 0
    acknowledging = False
    if flags & HASH:
        hash = value[at : at + 16]
        at += 16
    if flags & PRODUCER:
        stamps_at = at
        acknowledging = stamping.acknowledges(value, at)
        at += stamping.size(value, at, count, flags)
    if flags & PROVENANCE and not flags & COLUMNS:
        (size,) = _U16.unpack_from(value, at)
        provenance = value[at + 2 : at + 2 + size]
        at += 2 + size
    if flags & CONTINUED:
        (length,) = _U32.unpack_from(value, at)
        at += 4
    return Header(flags, count, time_ns, hash, provenance, length, at, stamps_at, acknowledging)


# --- building -----------------------------------------------------------------------------------


def build(
    messages: Sequence[Any],
    limit_bytes: int,
    hash: bytes | None = None,
    provenance: Provenance | None = None,
    encoded: Sequence[bytes] | None = None,
    strips: bool = False,
    reserved: bool = False,
    stamps: Stamps | None = None,
) -> list[Page]:
    """Pack ``messages`` into as few pages as possible.

    ``encoded`` gives their bytes if they were packed before. ``provenance`` and ``stamps`` have an entry for
    each message; without ``stamps`` the ``q/uuid`` of the messages are used. ``strips`` drops the provenance
    and the ``q/meta`` of users. ``reserved`` permits reserved keys, for messages that Cues writes itself.
    Raises :class:`CodecError`, :class:`ReservedKey`, :class:`MessageTooLarge` or :class:`InvalidArgument`
    (not a dict); the attribute ``offset`` is the place of the bad message. Nothing is half-built.
    """
    pages: list[Page] = []
    total = len(messages) if encoded is None else len(encoded)
    start = 0
    guess = min(total, 32)
    examined = reserved or encoded is not None
    if strips:
        provenance = None
    while start < total:
        stop = min(total, start + guess)
        if encoded is None:
            body = _pack_array(messages if stop - start == total else messages[start:stop], start)
            if not examined and SLASH in body and has_mark(body):
                examined = True
                clean = _extract(messages, start, total, provenance, strips)
                if clean is not None:
                    messages, provenance, uuids = clean
                    if strips:
                        provenance = None
                    if uuids is not None and stamps is None:
                        return pages + _build_runs(messages, start, uuids, limit_bytes, hash, provenance)
                    continue
        else:
            count = stop - start
            array = bytes((0x90 | count,)) if count < 16 else b"\xdc" + _U16.pack(count)
            body = array + b"".join(encoded[start:stop])
        own = None if stamps is None else stamps.slice(start, stop)
        chosen = None if provenance is None else provenance.slice(start, stop)
        flags, optional = _optional(hash, own, chosen, start)
        size = PREFIX_BYTES + len(optional) + len(body)
        count = stop - start
        if size <= VALUE_BYTES_MAX:
            if len(body) > limit_bytes:
                for offset in range(start, stop):
                    message = encoded[offset] if encoded is not None else codec.pack(messages[offset])
                    _check_size(len(message), offset, limit_bytes)
            pages.append(Page(flags, count, optional + body))
            start = stop
            if start == total:
                break
            # A little below the estimate: a page that overflows is packed twice, one that is
            # 95 % full wastes 200 bytes.
            guess = max(1, min(_COUNT_MAX, count * VALUE_BYTES_MAX * 31 // (size * 32)))
            if count < guess <= count + (count >> 4):
                guess = count
        elif count > 1:
            guess = max(1, min(count - 1, count * VALUE_BYTES_MAX * 15 // (size * 16)))
        else:
            _check_size(len(body) - 1, start, limit_bytes)
            pages.append(_cut(flags | CONTINUED, optional, body, start))
            start = stop
            guess = 8
    return pages


def build_table(
    table: Any,
    limit_bytes: int,
    hash: bytes | None = None,
    provenance: Provenance | None = None,
    strips: bool = False,
    compression: str | None = None,
) -> list[Page]:
    """Build the pages of a ``pyarrow.Table``: records of columns.

    Raises the errors of :func:`columns.checked` and :class:`MessageTooLarge`, as :func:`build` does.
    """
    pages: list[Page] = []
    table = columns.with_small_dictionaries(columns.checked(table))
    schema = columns.packed_schema(table.schema)
    flags, optional = (COLUMNS | HASH, hash) if hash is not None else (COLUMNS, b"")
    start = 0
    for rows in columns.cut(table, limit_bytes):
        stop = start + rows.num_rows
        packed = b""
        if provenance and not strips:
            packed = provenance.slice(start, stop).encode()
        own = flags | PROVENANCE if packed else flags
        body = columns.body_of(rows, schema, packed, compression)
        if PREFIX_BYTES + len(optional) + len(body) <= VALUE_BYTES_MAX:
            pages.append(Page(own, rows.num_rows, optional + body, (), schema.packed))
        else:
            room = VALUE_BYTES_MAX - PREFIX_BYTES - len(optional) - _U32.size
            pieces = tuple(body[at : at + _PIECE_BYTES] for at in range(room, len(body), _PIECE_BYTES))
            tail = optional + _U32.pack(len(body)) + body[:room]
            pages.append(Page(own | CONTINUED, rows.num_rows, tail, pieces, schema.packed))
        start = stop
    return pages


def build_one(packed: bytes, hash: bytes | None, provenance: Provenance | None, stamps: Stamps | None) -> Page | None:
    """Return what :func:`build` makes of one packed message; None if it does not fit one page."""
    if hash is not None and stamps is None and provenance is None:
        flags, optional = HASH, hash
    else:
        flags, optional = _optional(hash, stamps, provenance, 0)
    tail = optional + b"\x91" + packed
    return Page(flags, 1, tail) if len(tail) <= _PLAIN_BYTES_MAX else None


def _optional(
    hash: bytes | None, stamps: Stamps | None, provenance: Provenance | None, start: int
) -> tuple[int, bytes]:
    """Return the flags and the optional fields of the header of a record; ``start`` is the offset of its messages."""
    flags, optional = (HASH, hash) if hash is not None else (0, b"")
    if stamps is not None:
        flags |= PRODUCER | stamps.form
        optional += stamps.encode()
    if provenance:
        try:
            packed = provenance.encode()
        except CodecError as error:
            raise _at(start, error) from None
        flags |= PROVENANCE
        optional += _U16.pack(min(len(packed), 0xFFFF)) + packed  # longer provenance does not fit in a page
    return flags, optional


SLASH: Final = 0x2F
"""Packed messages without this byte have no mark (:func:`has_mark`). It is an integer, because ``b"/" in packed`` takes
ten times as long: there Python makes an exception and drops it."""
_PROBES: Final = 16


def has_mark(packed: bytes) -> bool:
    """Return whether packed messages have ``q/`` in them, as keys have that users may not write, or the header keeps.

    One byte is found a hundred times faster than two in a row, and packed numbers are a ``/`` here and there.
    """
    at = packed.find(b"/")
    for _ in range(_PROBES):
        if at <= 0:
            return False
        if packed[at - 1] == 0x71:
            return True
        at = packed.find(b"/", at + 1)
    return at > 0 and packed.find(b"q/", at - 1) >= 0


def _build_runs(
    messages: Sequence[Any],
    start: int,
    uuids: Sequence[Any],
    limit_bytes: int,
    hash: bytes | None,
    provenance: Provenance | None,
) -> list[Page]:
    """Build the pages of the messages from ``start`` on, some of which have a UUID."""
    identities: list[stamping.Identity | None] = []
    for offset in range(start, len(uuids)):
        try:
            identities.append(stamping.checked(uuids[offset]))
        except InvalidArgument as error:
            raise _at(offset, error) from None
    pages: list[Page] = []
    for first, stop, stamps in stamping.runs(identities):
        first, stop = start + first, start + stop
        origins = provenance.slice(first, stop) if provenance else None
        try:
            pages += build(messages[first:stop], limit_bytes, hash, origins, stamps=stamps, reserved=True)
        except CuesError as error:
            raise _at(first + getattr(error, "offset", 0), error) from None
    return pages


def plain(message: Any) -> bytes | None:
    """Encode the body of a record with only this message; None when the message needs :func:`build`.

    Most appends are of this kind: no hash, no provenance, no reserved key.
    """
    if type(message) is dict:
        try:
            body = codec.pack([message])
        except CodecError:
            return None  # build() names the path inside the message
        if len(body) <= _PLAIN_BYTES_MAX and not (SLASH in body and has_mark(body)):
            return body
    return None


def seal_plain(body: bytes, index: int, time_ns: int) -> bytes:
    """Return the record of a :func:`plain` body."""
    rest = _pack_head(VERSION, 0, 1, time_ns) + body
    return checksum(rest, index) + rest


def pack_one(message: Any, limit_bytes: int, strips: bool) -> bytes | dict[str, Any]:
    """Check and encode one message for ``build(encoded=...)``. Raises the errors of :func:`build`.

    A message with ``q/meta`` or ``q/uuid`` is returned as it is, because these are not part of its body.
    """
    if not isinstance(message, dict):
        raise _at(0, not_a_dict(message))
    try:
        body = codec.pack([message])[1:]  # at the same depth as in the array of its record
    except CodecError as error:
        raise _at(0, error) from None
    if has_mark(body) and _extract([message], 0, 1, None, strips) is not None:
        build([message], limit_bytes, strips=strips)
        return message
    _check_size(len(body), 0, limit_bytes)
    return body


def split_meta(message: Any, provenance: Provenance, delays: bool = False) -> tuple[dict[str, Any], Provenance]:
    """Return a message without its ``q/meta``, and the provenance of one message with it.

    ``q/uuid`` is refused, and without ``delays`` a time of delivery too.
    """
    extracted = _extract([message], 0, 1, provenance)
    if extracted is None:
        return message, provenance
    (plain, *_), with_meta, uuids = extracted
    if uuids is not None:
        raise InvalidArgument(
            f"The message has a {names.UUID!r}, which queues in a shared directory do not keep.", "leave it out."
        )
    if not delays and with_meta is not None and any(with_meta.times()):
        raise Unsupported(
            "The message has a time of delivery, and a frame reads its queue: frames hold no messages.",
            "write it to another queue, and let a stream give it on to the queue of the frame when it is due.",
        )
    return plain, with_meta or provenance


def _check_size(size_bytes: int, offset: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        codec.thread_packer(renew=True)  # the buffer of the old one has room for this message, and would keep it
        raise _at(
            offset,
            MessageTooLarge(
                f"The message has {size_bytes:,} bytes, the queue's limit is {limit_bytes:,}.",
                "send a smaller message, put the large part into a file, or set a larger max_message_bytes=.",
                size_bytes=size_bytes,
                limit_bytes=limit_bytes,
            ),
        )


def _pack_array(chunk: Sequence[Any], start: int) -> bytes:
    """Encode messages as one msgpack array; errors carry the offset, counted from ``start``."""
    if set(map(type, chunk)) != {dict}:
        for offset, message in enumerate(chunk):
            if not isinstance(message, dict):
                raise _at(start + offset, not_a_dict(message))
    try:
        return codec.pack(chunk)
    except CodecError:
        for offset, message in enumerate(chunk):
            try:
                codec.pack(message)
            except CodecError as error:
                raise _at(start + offset, error) from None
        raise


def _cut(flags: int, optional: bytes, body: bytes, offset: int) -> Page:
    room = VALUE_BYTES_MAX - PREFIX_BYTES - len(optional) - 4
    if room < 0:
        raise _at(
            offset,
            InvalidArgument(
                f"The metadata of one message has {len(optional):,} bytes and does not fit in a page.",
                "put fewer or smaller values into q/meta.",
            ),
        )
    pieces = tuple(body[at : at + _PIECE_BYTES] for at in range(room, len(body), _PIECE_BYTES))
    return Page(flags, 1, optional + _U32.pack(len(body)) + body[:room], pieces)


def _extract(
    messages: Sequence[Any], start: int, stop: int, provenance: Provenance | None, strips: bool = False
) -> tuple[list[dict[str, Any]], Provenance | None, list[Any] | None] | None:
    """Take ``q/meta`` and ``q/uuid`` out of messages, and refuse reserved keys that users may not write.

    Returns the messages without them, the provenance with the content of ``q/meta``, and the UUIDs, if any
    message has one. Returns None if no message has either key.
    """
    clean: list[dict[str, Any]] | None = None
    extras: list[dict[str, Any] | None] | None = None
    uuids: list[Any] | None = None
    for offset in range(start, stop):
        message = messages[offset]
        taken = False
        for key in message:
            if not isinstance(key, str) or key[:2] != "q/" or key in names.USER_KEYS:
                continue
            if key not in HEADER_KEYS:
                raise _at(offset, _reserved(key))
            taken = True
        if not taken:
            continue
        if clean is None:
            clean = list(messages)
        clean[offset] = {k: v for k, v in message.items() if k not in HEADER_KEYS}
        if names.META in message:
            extras = extras or [None] * len(clean)
            extras[offset] = meta = _meta(message[names.META], offset)
            if strips and names.DELIVER_AT in meta:
                text = "The message has a time of delivery, which is metadata, and the queue drops all metadata."
                hint = "declare the queue without metadata=False; or send the message without a time of delivery."
                raise _at(offset, InvalidArgument(text, hint))
        if names.UUID in message:
            uuids = uuids or [None] * len(clean)
            try:
                uuids[offset] = as_uuid(message[names.UUID])
            except InvalidArgument as error:
                raise _at(offset, error) from None
    if clean is None:
        return None
    if extras is None:
        return clean, provenance, uuids
    if provenance is None:
        return clean, Provenance(len(clean), {}, extras), uuids
    old = provenance.extra
    kept = old if isinstance(old, list) else [old] * len(clean)
    both = [new if new is not None else before for new, before in zip(extras, kept)]
    return clean, Provenance(provenance.count, provenance.columns, both), uuids


def _meta(meta: object, offset: int) -> dict[str, Any]:
    if not isinstance(meta, dict):
        text = f"q/meta must be a dict, found {type(meta).__name__}."
        raise _at(offset, InvalidArgument(text, "write a dict, such as {'q/meta': {'tx/t': 7}}."))
    kept = {k: v for k, v in meta.items() if k != names.HASH}
    if names.DELIVER_AT in kept:
        try:
            at = kept[names.DELIVER_AT]
            at = datetime.fromisoformat(at) if isinstance(at, str) else at  # as cues tail --meta prints it
            kept[names.DELIVER_AT] = clock.instant_ns(clock.to_datetime(clock.to_ns(at)), names.DELIVER_AT)
        except (CuesError, ValueError) as error:
            text = f"{names.DELIVER_AT} in q/meta is {kept[names.DELIVER_AT]!r}: {error}"
            raise _at(offset, InvalidArgument(text, "use cues.delayed(message, deliver_at=…).")) from None
    return kept


def _reserved(key: str) -> ReservedKey:
    return ReservedKey(
        f"The key {key!r} is reserved: of the keys that begin with 'q/', users may write only q/type, q/topics,"
        " q/meta and q/uuid.",
        f"use another name, such as {key[2:]!r}.",
        key=key,
    )


def not_a_dict(message: object) -> InvalidArgument:
    """Return the error for a message of another type."""
    return InvalidArgument(
        f"A message is a dict, found {type(message).__name__} ({str(message)[:60]!r}).",
        "write a dict, such as {'value': …}.",
    )


def _at(offset: int, error: Any) -> Any:
    error.offset = offset
    error.__suppress_context__ = True  # the compiler does not keep "from None"
    return error


# --- reading ------------------------------------------------------------------------------------


Damage: TypeAlias = Callable[[int, int, str], StoreDamaged]
"""Returns the error for the record of the messages from the first number to the second one."""

FOREIGN: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
    struct.error,
)
"""Errors of msgpack, Arrow and Python in a record with the right checksum that no version of Cues wrote."""
_DICT: Final = {dict}

ACKNOWLEDGEMENT: Final[dict[str, Any]] = {}
"""The placeholder of an acknowledgement among messages. Users never get it; compare it with ``is``."""


def _is_msgpack(body: bytes | memoryview) -> bool:
    try:
        codec.unpack_known(body)
    except FOREIGN:
        return False
    return True


class Batch:
    """One record as it was read: its place, its header, and, when asked for, its messages."""

    __slots__ = ("_body", "_origins", "_stamps", "_table", "damage", "first", "head", "next", "schema", "seal", "value")

    def __init__(self, first: int, value: bytes, pieces: Sequence[bytes] = ()) -> None:
        """``value`` must be intact."""
        self.damage: Damage | None = None
        """Makes the error of the log for a record of another form (:meth:`foreign`)."""
        self.first = first
        self.value = value
        self.next = first + 1
        try:
            self.head = header(value)
        except FOREIGN as error:
            raise self.foreign(error) from None
        if not self.head.count:
            raise self.foreign("it has no messages")
        self.next = first + self.head.count
        self.seal = value[:8]
        self._body: bytes | None = None
        self._table: Any = None
        self._stamps: Stamps | None = None
        self._origins: tuple[frozenset[str], Provenance] | None = None
        """The last result of :meth:`_provenance`, and its argument ``kept``."""
        self.schema: columns.StoredSchema | None = None
        """The schema of a record of columns. It is not in the record: the log gives it (log.py)."""
        if self.head.length or self.head.flags & COLUMNS:
            self._body = value[self.head.body_at :] + b"".join(piece[8:] for piece in pieces)
            if self.head.flags & COLUMNS and self.head.flags & PROVENANCE:
                try:
                    self.head.provenance = columns.provenance_of(self._body)
                except FOREIGN as error:
                    raise self.foreign(error) from None

    def messages(self) -> list[dict[str, Any]]:
        """Decode the body into a new list of new dicts; for an acknowledgement, :data:`ACKNOWLEDGEMENT`."""
        count = self.head.count
        if self.head.acknowledges:
            return [ACKNOWLEDGEMENT] * count
        body = memoryview(self.value)[self.head.body_at :] if self._body is None else self._body
        try:
            found = self._rows() if self.head.flags & COLUMNS else codec.unpack(body)
        except FOREIGN as error:
            if not self.head.flags & COLUMNS and _is_msgpack(body):
                raise  # it is the error of a decoder that the user registered
            raise self.foreign(error) from None
        # Slices, because a call costs more, and each step makes one here.
        if type(found) is not list or {*map(type, found)} != _DICT or found[count:] or not found[count - 1 :]:
            many = (
                f"it has {len(found)} messages, and its header says {count}" if type(found) is list else "it is no list"
            )
            raise self.foreign(f"{many}; dicts are expected, found {found!r:.80}")
        return found

    def foreign(self, why: object) -> StoreDamaged:
        """Return the error for a record with the right checksum that no version of Cues wrote."""
        kind = f"{type(why).__name__}: " if isinstance(why, Exception) else ""
        what = f"has the right checksum, and another form than any version of Cues writes ({kind}{why})"
        if self.damage is not None:
            return self.damage(self.first, self.next - 1, what)
        return StoreDamaged(
            f"The record batch of the messages {self.first} to {self.next - 1} {what}.",
            "run cues check on the store, then restore a backup.",
            path="",
        )

    @property
    def schema_hash(self) -> bytes | None:
        """The hash of the schema of a record of columns; None for other records."""
        if not self.head.flags & COLUMNS:
            return None
        assert self._body is not None
        try:
            return columns.schema_hash(self._body)
        except FOREIGN as error:
            raise self.foreign(error) from None

    def _rows(self) -> list[dict[str, Any]]:
        table = self.table()
        table.validate(full=True)  # else a value of another form than Arrow writes may end the process
        return columns.rows(table)

    def table(self) -> Any:
        """Return the ``pyarrow.RecordBatch`` of a record of columns, which no dict was made of."""
        if self._table is None:
            assert self._body is not None and self.schema is not None
            try:
                self._table = columns.opened(self._body, self.schema)
            except FOREIGN as error:
                raise self.foreign(error) from None
            if self._table.num_rows != self.head.count:
                raise self.foreign(f"it should have {self.head.count} rows, found {self._table.num_rows}")
        return self._table

    @property
    def source(self) -> tuple[Batch, int]:
        """The record of the messages, and the offset of the first of them there; see :class:`Shown`."""
        return self, 0

    def index(self, offset: int) -> int:
        """Return the index of a message in its log."""
        record, low = self.source
        return record.first + low + offset

    @property
    def shown_ns(self) -> int:
        """The time at which readers could first see the messages."""
        return self.head.time_ns

    def body(self) -> memoryview:
        """The msgpack array of the messages."""
        if self.head.flags & COLUMNS:
            return memoryview(codec.pack(self.messages()))
        return memoryview(self.value)[self.head.body_at :] if self._body is None else memoryview(self._body)

    @property
    def stamps(self) -> Stamps | None:
        """The identities of the messages, or None."""
        head = self.head
        if self._stamps is None and head.stamps_at:
            try:
                self._stamps = stamping.decode(self.value, head.stamps_at, head.count, head.flags)
            except FOREIGN as error:
                raise self.foreign(error) from None
        return self._stamps

    @property
    def delays(self) -> bool:
        """True if a message may have a time of delivery."""
        head = self.head
        return head.provenance is not None and DELAY_MARK in head.provenance and not head.acknowledges

    def cuts(self) -> list[int]:
        """Return the offsets in :meth:`body` at which each message begins, and the offset at which the last one ends.

        Nothing is decoded: msgpack skips a message five times faster than it decodes one.
        """
        walker = msgpack.Unpacker(max_buffer_size=0)
        walker.feed(self.body())
        walker.read_array_header()
        skip, tell = walker.skip, walker.tell
        offsets = [tell()]
        for _ in range(self.head.count):
            skip()
            offsets.append(tell())
        return offsets

    def provenance(self, queue: str, kept: frozenset[str], start: int = 0, stop: int | None = None) -> Provenance:
        """The provenance of the messages, with their places on ``queue``, whose option ``metadata`` is ``kept``.

        ``start`` and ``stop`` are the offsets of a part of the messages.
        """
        if stop is None:
            stop = self.head.count
        if self.head.provenance is None and "tx" not in kept:  # the usual case: only their positions
            t = range(self.first + start, self.first + stop) if "t" in kept else None
            time = self.head.time_ns if "time" in kept else None
            return Provenance(stop - start, {queue: (t, time)} if kept else {})
        return self._provenance(queue, kept).slice(start, stop)

    def _provenance(self, queue: str, kept: frozenset[str]) -> Provenance:
        if self._origins is not None and self._origins[0] == kept:
            return self._origins[1]
        head = self.head
        try:
            stored = provenance.decode(head.provenance, head.count) if head.provenance else None
        except FOREIGN as error:
            raise self.foreign(error) from None
        columns: dict[str, tuple[Any, Any]] = dict(stored.columns) if stored else {}
        indices = range(self.first, self.next)
        if "t" in kept or "time" in kept:
            columns[queue] = (indices if "t" in kept else None, head.time_ns if "time" in kept else None)
        if "tx" in kept and names.TX not in columns:
            columns[names.TX] = (indices, None)
        origins = Provenance(head.count, columns, stored.extra if stored else None)
        self._origins = (kept, origins)
        return origins

    def is_complete(self) -> bool:
        """Return whether all pieces of a cut message are there."""
        return self._body is None or not self.head.length or len(self._body) == self.head.length


class Shown(Batch):
    """Messages of a record at the places that they have for a reader of committed messages.

    ``first`` and ``next`` are places, ``seal`` is that of the record at these places: of a transaction, its
    acknowledgement. ``head.acknowledges`` is true for messages that are passed over.
    """

    __slots__ = ("_low", "_record", "_shown_ns")

    def __init__(
        self, record: Batch, low: int, count: int, place: int, hidden: bool, seal: bytes, time_ns: int
    ) -> None:
        self._record = record
        self._low = low
        self._shown_ns = time_ns
        self.value = record.value
        self.first = place
        self.next = place + count
        self.seal = seal
        self.head = replace(record.head, count=count, acknowledges=hidden)
        self._body = self._origins = None
        self.schema = record.schema

    @override
    @property
    def source(self) -> tuple[Batch, int]:
        return self._record, self._low

    @override
    @property
    def shown_ns(self) -> int:
        return self._shown_ns

    @override
    def messages(self) -> list[dict[str, Any]]:
        if self.head.acknowledges:
            return [ACKNOWLEDGEMENT] * self.head.count
        return self._record.messages()[self._low : self._low + self.head.count]

    @override
    def table(self) -> Any:
        return self._record.table().slice(self._low, self.head.count)

    @override
    @property
    def stamps(self) -> Stamps | None:
        stamps = self._record.stamps
        return None if stamps is None else stamps.slice(self._low, self._low + self.head.count)

    @override
    def provenance(self, queue: str, kept: frozenset[str], start: int = 0, stop: int | None = None) -> Provenance:
        if self.head.acknowledges:
            return Provenance((self.head.count if stop is None else stop) - start, {})
        stop = self.head.count if stop is None else stop
        return self._record.provenance(queue, kept, self._low + start, self._low + stop)
