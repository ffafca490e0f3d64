"""The messages of pgoutput, PostgreSQL's plugin for logical replication, and the values in them.

A transaction is sent after its commit, in one piece (version 1 of the protocol):

    Begin      LSN and time of the commit, transaction id
    Relation   columns of a table; sent before the first change of the table, and again when the columns have changed
    Insert, Update, Delete, Truncate
    Commit     LSN of the end of the transaction

Values are texts of PostgreSQL's output functions. :class:`Values` makes them values of Python, with the loaders of
psycopg: bool, int, float, Decimal, str, bytes, date, time, datetime, timedelta, UUID, JSON, and lists of these. All
other types, and values that Python does not have (``infinity``, an interval with months), are the text of PostgreSQL.

(PostgreSQL: Logical Replication Message Formats)
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from cues import codec, jsontext
from cues.errors import CodecError, CuesError
from cues.imported import package

EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_LOADED: Final = (
    "bool", "int2", "int4", "int8", "oid", "float4", "float8", "numeric", "text", "varchar", "bpchar", "bytea", "date",
    "time", "timetz", "timestamp", "timestamptz", "interval", "uuid", "json", "jsonb",
)  # fmt: skip
_MONTHS: Final = re.compile(rb"mon|year")


class Unchanged:
    """The value of a large field that an update did not change: PostgreSQL does not send it."""


UNCHANGED: Final = Unchanged()

Field = bytes | None | Unchanged
"""A value as text, NULL, or a value that was not sent."""


class Column(NamedTuple):
    """A column of a table. ``in_identity``: the replica identity has it."""

    name: str
    in_identity: bool
    read: Callable[[bytes], Any]


class Relation(NamedTuple):
    """A table as a Relation message describes it. ``identity`` is d (default), n (nothing), f (full) or i (index)."""

    id: int
    table: str
    identity: str
    columns: list[Column]


class Begin(NamedTuple):
    """The begin of a transaction: LSN and time of its commit, and its id of 32 bits."""

    lsn: int
    time: datetime
    transaction: int


class Commit(NamedTuple):
    """The end of a transaction, and the LSN after it."""

    end: int


class Change(NamedTuple):
    """A change: the kind of its message (I, U, D, T), its tables, the old fields that were sent, and the new fields.

    ``old_is_whole``: ``old`` has all fields; otherwise it has those of the replica identity.
    """

    kind: str
    relations: Sequence[int]
    old: list[Field] | None = None
    new: list[Field] | None = None
    old_is_whole: bool = False


def psycopg() -> Any:
    """Return the module psycopg. Raises :class:`NotInstalled`."""
    return package("PostgreSQL needs psycopg", "sql", "psycopg")


def lsn_text(lsn: int) -> str:
    """Return a position in the log of PostgreSQL as PostgreSQL writes it, such as ``0/16B3748``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_of(text: str) -> int:
    """Return the number of a position that PostgreSQL wrote."""
    high, low = text.split("/")
    return (int(high, 16) << 32) | int(low, 16)


class Values:
    """The types of a connection: for each OID the function that makes a text a value."""

    def __init__(self, connection: Any) -> None:
        adapt, types = importlib.import_module("psycopg.adapt"), psycopg().postgres.types
        self._transformer = adapt.Transformer(connection)
        self._names = {types[name].oid: name for name in _LOADED}
        self._arrays = {types[name].array_oid: name for name in _LOADED}
        self._types = types
        self._domains: dict[int, int] = {}
        self._known: dict[int, Callable[[bytes], Any]] = {}

    def domain(self, oid: int, schema: str, base: str) -> None:
        """Read the values of a type as those of another one: PostgreSQL sends the base type of each domain."""
        name = base.removeprefix("_")  # an array of it
        if schema in ("", "pg_catalog") and name in _LOADED:
            self._domains[oid] = self._types[name].oid if name == base else self._types[name].array_oid
            self._known.pop(oid, None)

    def reader(self, oid: int) -> Callable[[bytes], Any]:
        """Return the function for the texts of a type."""
        if oid not in self._known:
            self._known[oid] = self._reader(self._domains.get(oid, oid))
        return self._known[oid]

    def _reader(self, oid: int) -> Callable[[bytes], Any]:
        name, of_array = self._names.get(oid), self._arrays.get(oid)
        kind = name or of_array
        if kind in (None, "text", "varchar", "bpchar") and of_array is None:
            return bytes.decode
        load = self._transformer.get_loader(oid, importlib.import_module("psycopg.pq").Format.TEXT).load
        if name in ("bool", "int2", "int4", "int8", "oid", "float4", "float8", "numeric", "bytea", "uuid"):
            return load  # type: ignore[no-any-return]
        errors = (psycopg().DataError, ValueError, RecursionError, CodecError)

        def read(text: bytes) -> Any:
            if (kind == "interval" and _MONTHS.search(text)) or (of_array and text.startswith(b"[")):
                return text.decode()  # months would be 30 days; bounds other than 1 would be lost
            try:
                value = load(text)
                if b"\\u" in text:
                    codec.pack(value)  # JSON may have half of a character, which no message can have
                return text.decode() if jsontext.is_deeper(text, value, jsontext.DEPTH_MAX) else value
            except errors:  # infinity, 24:00:00, a year outside of Python's, JSON that Python cannot read
                return text.decode()

        return read


class Decoder:
    """Decodes the messages of one connection, whose relations and domains it knows."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.relations: dict[int, Relation] = {}

    def decode(self, data: bytes) -> Begin | Commit | Change | None:
        """Return what a message says; None for one that only describes types and tables."""
        kind = data[:1]
        if kind == b"I":
            (relation,) = _ID.unpack_from(data, 1)
            new, _ = _fields(data, 6)
            return Change("I", (relation,), new=new)
        if kind == b"U":
            (relation,) = _ID.unpack_from(data, 1)
            old, whole, at = None, False, 5
            if data[5:6] != b"N":
                whole = data[5:6] == b"O"
                old, at = _fields(data, 6)
            new, _ = _fields(data, at + 1)
            return Change("U", (relation,), old, new, whole)
        if kind == b"D":
            (relation,) = _ID.unpack_from(data, 1)
            old, _ = _fields(data, 6)
            return Change("D", (relation,), old, old_is_whole=data[5:6] == b"O")
        if kind == b"B":
            lsn, time, transaction = _BEGIN.unpack_from(data, 1)
            return Begin(lsn, EPOCH + timedelta(microseconds=time), transaction)
        if kind == b"C":
            (end,) = _LSN.unpack_from(data, 10)
            return Commit(end)
        if kind == b"T":
            (count,) = _ID.unpack_from(data, 1)
            return Change("T", struct.unpack_from(f">{count}I", data, 6))
        if kind == b"R":
            self._relation(data)
        elif kind == b"Y":
            (oid,) = _ID.unpack_from(data, 1)
            schema, at = _text(data, 5)
            base, _ = _text(data, at)
            self._values.domain(oid, schema, base)
        elif kind not in (b"O", b"M"):  # an origin; a message of pg_logical_emit_message
            raise CuesError(f"pgoutput sent a message {kind!r}, which is unknown.", "report this as a bug of Cues.")
        return None

    def _relation(self, data: bytes) -> None:
        (id,) = _ID.unpack_from(data, 1)
        schema, at = _text(data, 5)
        name, at = _text(data, at)
        identity, (count,) = data[at : at + 1].decode(), _COUNT.unpack_from(data, at + 1)
        at += 3
        columns = []
        for _ in range(count):
            flags = data[at]
            column, at = _text(data, at + 1)
            (oid,) = _ID.unpack_from(data, at)
            at += 8  # the type and its modifier
            columns.append(Column(column, bool(flags & 1), self._values.reader(oid)))
        self.relations[id] = Relation(id, f"{schema or 'pg_catalog'}.{name}", identity, columns)


_ID: Final = struct.Struct(">I")
_COUNT: Final = struct.Struct(">H")
_LSN: Final = struct.Struct(">Q")
_BEGIN: Final = struct.Struct(">QqI")


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\0", at)
    return data[at:end].decode(), end + 1


def _fields(data: bytes, at: int) -> tuple[list[Field], int]:
    """Return the fields of a tuple, and the place after it."""
    (count,) = _COUNT.unpack_from(data, at)
    at += 2
    fields: list[Field] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t
            (size,) = _ID.unpack_from(data, at)
            at += 4
            fields.append(data[at : at + size])
            at += size
        else:
            fields.append(None if kind == 0x6E else UNCHANGED)
    return fields, at
