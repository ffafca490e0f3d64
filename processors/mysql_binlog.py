"""The binlog of MySQL and MariaDB: the connection that streams it, its events, and the values of rows.

    Gtid       begins a transaction in MariaDB
    Query      BEGIN, COMMIT, and each statement that is logged as text
    TableMap   the columns of a table, before its rows; ``binlog_row_metadata=FULL`` gives their names and the key
    Rows       inserted, updated or deleted rows of one table
    Xid        ends a transaction
    Heartbeat  nothing was written for a while
    Incident   the server lost changes

The stream is PyMySQL's connection with the command for replicas. (The package ``mysql-replication`` is not used: it
connects again by itself, at a place that its caller does not see, and gives None for dates with zeros.)

(MySQL: Replication Protocol; MariaDB: Replication Protocol)
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from cues.errors import CuesError
from cues.imported import package

QUERY, ROTATE, FORMAT, XID, TABLE_MAP, HEARTBEAT, PREPARE, GTID = 2, 4, 15, 16, 19, 27, 38, 162
ROWS: Final = {23: "insert", 24: "update", 25: "delete", 30: "insert", 31: "update", 32: "delete"}
REFUSED: Final = {
    17: "a statement of LOAD DATA in the place of rows (set binlog_format = ROW for all sessions)",
    18: "a statement of LOAD DATA in the place of rows (set binlog_format = ROW for all sessions)",
    26: "an incident: the server lost changes before they were in its log (LOST_EVENTS)",
    39: "an update of a part of JSON (set binlog_row_value_options = '')",
    40: "a compressed transaction (set binlog_transaction_compression = OFF)",
    **dict.fromkeys(range(165, 172), "a compressed event (set log_bin_compress = OFF)"),
}
"""Events that are not read, by number, and how the server is told not to write them."""
HELD_BYTES: Final = 8 << 20
"""Bytes of a transaction that are kept until its end; a larger one is read a second time."""

_CODECS: Final = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "ascii": "ascii", "latin1": "latin1", "ucs2": "utf-16-be",
    "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be", "binary": "",
}  # fmt: skip
"""Character sets whose texts are decoded surely."""
_WINDOWS: Final = {bytes([n]): bytes([n]).decode("cp1252", "ignore") or chr(n) for n in range(128, 160)}
"""The characters of MySQL's latin1 that are not those of ISO 8859-1."""


_HASH: Final = re.compile(r"DB_ROW_HASH_\d+")


class Header(NamedTuple):
    """The kind of an event, its time in seconds, its server, and the places in the log after it and before it."""

    kind: int
    time: int
    server: int
    end: int
    begin: int


class Column(NamedTuple):
    """A column of a table: its name, and the function that returns its value in an event and the place after it."""

    name: str
    read: Callable[[bytes, int], tuple[Any, int]]

    @property
    def is_hidden(self) -> bool:
        """True if MariaDB added it for itself, for a unique key of a long text: no query shows it."""
        return _HASH.fullmatch(self.name) is not None


class Table(NamedTuple):
    """A table as its event describes it. ``key`` has the names of the columns of the primary key."""

    name: str
    columns: list[Column]
    """The columns of an event. The rows that are read do not have the hidden ones."""
    key: list[str]
    problem: str | None
    """Why its rows cannot be read surely."""
    fixed: frozenset[str] = frozenset()
    """The columns of 4 or 16 bytes: BINARY, or INET and UUID of MariaDB, which the log does not distinguish."""

    @property
    def names(self) -> list[str]:
        """The names of the values of a row."""
        return [column.name for column in self.columns if not column.is_hidden]


def pymysql() -> Any:
    """Return the module pymysql. Raises :class:`NotInstalled`."""
    return package("MySQL needs PyMySQL", "mysql", "pymysql")


def rotation(body: bytes) -> tuple[str, int]:
    """Return the file and the place of a Rotate event."""
    return body[8:].decode(), struct.unpack_from("<Q", body)[0]


def query(body: bytes) -> tuple[str, str]:
    """Return the database and the text of a Query event."""
    size, (more,) = body[8], struct.unpack_from("<H", body, 11)
    at = 13 + more
    return body[at : at + size].decode(), body[at + size + 1 :].decode(errors="replace")


def gtid(body: bytes) -> tuple[int, int, bool, bool]:
    """Return the number and the domain of a Gtid event of MariaDB; whether it is of one statement, and of XA."""
    number, domain, flags = struct.unpack_from("<QIB", body)
    return number, domain, bool(flags & 1), bool(flags & _PREPARED)


ENDS: Final = ("COMMIT", "ROLLBACK", "XA COMMIT", "XA ROLLBACK")
"""Statements that end a transaction, with one that begins alike: ``ROLLBACK TO``."""
_PREPARED: Final = 64
"""The flag of a transaction that is not yet committed: it was only prepared (XA)."""


class Transaction:
    """A transaction from its first event on: whether its end was read, and which of its events were undone."""

    def __init__(self, file: str, begin: int, is_single: bool) -> None:
        self.file, self.begin, self.is_ended, self.count = file, begin, False, 0
        self._is_single = is_single
        self._savepoints: dict[str, int] = {}
        self._undone: list[tuple[int, int]] = []

    def add(self, header: Header, body: bytes) -> None:
        """Read the next event. Raises for a savepoint that the transaction did not set."""
        if header.kind in (XID, PREPARE):
            self.is_ended = True
        elif header.kind == QUERY:
            text = query(body)[1].rstrip()
            name = text.rpartition("`")[0].partition("`")[2].casefold()
            if text.startswith("SAVEPOINT "):
                self._savepoints[name] = self.count
            elif text.startswith("ROLLBACK TO "):
                if name not in self._savepoints:
                    raise CuesError(
                        f"The transaction at {self.file}:{self.begin} goes back to a savepoint that it does not have.",
                        "report this as a bug of Cues, with the events of the transaction.",
                    )
                self._undo(self._savepoints[name], self.count + 1)
            elif self._is_single or text.startswith(ENDS):
                self.is_ended = True
                if text.startswith("ROLLBACK"):
                    self._undo(1, self.count)
        self.count += 1

    def _undo(self, since: int, until: int) -> None:
        self._savepoints = {name: at for name, at in self._savepoints.items() if at <= since}
        while self._undone and self._undone[-1][0] >= since:
            self._undone.pop()
        self._undone.append((since, until))

    def has(self, number: int) -> bool:
        """Return whether an event of the transaction is in force; of one without an end none is."""
        place = bisect_right(self._undone, (number, self.count + 1)) - 1
        return self.is_ended and (place < 0 or number >= self._undone[place][1])


Packets = Iterator[tuple[Header, bytes]]


def settled(events: Packets, ahead: Callable[[str, int], Packets]) -> Packets:
    """Yield the events, but those of a transaction only when its end is known, without the ones that were undone.

    MariaDB logs a transaction with its ROLLBACK if it has made a temporary table; and a server that was killed leaves
    the begin of one at the end of a file. ``ahead`` returns the events after a place on another connection: by it the
    end of a transaction is found that is too large to be held. If that stream ends, so does this one.
    """
    file = ""
    opened = fate = None
    held: list[tuple[int, Header, bytes]] = []
    size = 0
    for header, body in events:
        if header.kind in (ROTATE, FORMAT):
            opened = None
            if header.kind == ROTATE:
                file = rotation(body)[0]
        elif opened is None:
            opened, fate, size = _begun(file, header, body), None, 0
            held.clear()
        if opened is None or header.kind in REFUSED:
            yield header, body
            continue
        if header.kind == HEARTBEAT:
            yield header._replace(end=0), body
            continue
        held.append((opened.count, header, body))
        opened.add(header, body)
        size += len(body)
        if opened.is_ended:
            fate = fate or opened
        elif fate is None and size > HELD_BYTES:
            fate = _fate(ahead(file, opened.begin))
            if fate is None:
                return
        if fate is not None:
            yield from ((header, body) for number, header, body in held if fate.has(number))
            held.clear()
        if opened.is_ended:
            opened = None


def _begun(file: str, header: Header, body: bytes) -> Transaction | None:
    if header.kind == GTID:
        return Transaction(file, header.begin, gtid(body)[2])
    if header.kind == QUERY and ((text := query(body)[1]) == "BEGIN" or text.startswith("XA START")):
        return Transaction(file, header.begin, False)
    return None


def _fate(events: Packets) -> Transaction | None:
    """Return the first transaction of a stream, read to its end or to the end of its file; None if the stream ends."""
    found: Transaction | None = None
    for header, body in events:
        if found is None:
            found = _begun("", header, body)
        elif header.kind in (ROTATE, FORMAT):
            return found
        if found is not None and header.kind != HEARTBEAT:
            found.add(header, body)
            if found.is_ended:
                return found
    return None


_SIGNED: Final = (1, 2, 3, 4, 5, 8, 9, 246)
"""Types of which a table tells whether they are unsigned."""
_TEXTS: Final = (15, 253, 252, 254)
"""Types of which a table tells the collation."""


class Decoder:
    """Decodes the tables and rows of a stream. ``charsets`` has the name of the character set of each collation."""

    def __init__(self, charsets: dict[int, str], *, is_mariadb: bool) -> None:
        self._charsets = charsets
        # MariaDB tells also the sign of a YEAR, and the character set of a geometry; MySQL does not.
        self._signed = (*_SIGNED, 13) if is_mariadb else _SIGNED
        self._texts = (*_TEXTS, 255) if is_mariadb else _TEXTS
        self._tables: dict[int, Table] = {}
        self._known: dict[bytes, Table] = {}

    def table_map(self, body: bytes) -> Table:
        """Keep a table; return it. The same description is the same object."""
        id, described = int.from_bytes(body[:6], "little"), body[8:]
        if described not in self._known:
            self._known[described] = self._table(described)
        self._tables[id] = self._known[described]
        return self._tables[id]

    def forget(self) -> None:
        """Forget the numbers of tables: another file begins."""
        self._tables.clear()

    def rows(self, kind: int, body: bytes) -> tuple[str, Table, Iterator[tuple[list[Any] | None, list[Any] | None]]]:
        """Return the operation, the table, and each row before and after."""
        id, at = int.from_bytes(body[:6], "little"), 8
        if kind >= 30:
            at += int.from_bytes(body[8:10], "little")
        if id not in self._tables:
            raise CuesError("The log has rows of a table that it did not describe.", "report this as a bug of Cues.")
        table = self._tables[id]
        return ROWS[kind], table, self._each(ROWS[kind], table, body, at)

    def _each(self, operation: str, table: Table, body: bytes, at: int) -> Iterator[Any]:
        count, at = _length(body, at)
        size = (count + 7) // 8
        masks = []
        for _ in range(2 if operation == "update" else 1):
            masks.append(body[at : at + size])
            at += size
        if any(int.from_bytes(mask, "little") & (1 << count) - 1 != (1 << count) - 1 for mask in masks):
            raise CuesError(
                f"A change of {table.name} does not have all columns: it was written with another binlog_row_image.",
                "run `set global binlog_row_image = 'FULL'`, end the sessions that have another one, and begin anew.",
            )
        hidden = [n for n, column in enumerate(table.columns) if column.is_hidden]
        while at < len(body):
            images: list[list[Any]] = []
            for _ in masks:
                nulls, at = int.from_bytes(body[at : at + size], "little"), at + size
                row: list[Any] = []
                try:
                    for n, column in enumerate(table.columns):
                        if nulls >> n & 1:
                            row.append(None)
                        else:
                            value, at = column.read(body, at)
                            row.append(value)
                except UnicodeDecodeError as error:
                    name = table.columns[len(row)].name
                    raise CuesError(
                        f"The column {name} of {table.name} has a text that Python cannot decode: {error}.",
                        "leave the table out of tables=; or correct the text, and begin anew: another id.",
                    ) from error
                for n in reversed(hidden):
                    del row[n]
                images.append(row)
            if operation == "insert":
                yield None, images[0]
            else:
                yield images[0], images[1] if operation == "update" else None

    def _table(self, body: bytes) -> Table:
        at = 1 + body[0] + 1
        schema, name = body[1 : at - 1].decode(), body[at + 1 : at + 1 + body[at]].decode()
        at += body[at] + 2
        count, at = _length(body, at)
        types, at = list(body[at : at + count]), at + count
        size, at = _length(body, at)
        metas, at = _metas(types, body[at : at + size]), at + size + (count + 7) // 8
        facts: dict[int, bytes] = {}
        while at < len(body):
            kind = body[at]
            size, at = _length(body, at + 1)
            facts[kind], at = body[at : at + size], at + size
        return self._described(f"{schema}.{name}", types, metas, facts)

    def _described(self, table: str, types: list[int], metas: list[int], facts: dict[int, bytes]) -> Table:
        real = [_real(type, meta) for type, meta in zip(types, metas)]
        names = _texts(facts.get(4, b""))
        if len(names) != len(types):
            return Table(table, [], [], "the log does not have the names of its columns")
        numeric = [n for n, type in enumerate(real) if type in self._signed]
        signs = facts.get(1, b"")
        unsigned = {n for place, n in enumerate(numeric) if signs[place // 8] & 0x80 >> place % 8}
        sets = _charsets(facts, 2, 3, [n for n, type in enumerate(real) if type in self._texts])
        sets |= _charsets(facts, 10, 11, [n for n, type in enumerate(real) if type in (247, 248)])
        members: dict[int, list[bytes]] = {}
        for kind, type in ((5, 248), (6, 247)):
            lists = iter(_lists(facts.get(kind, b"")))
            members |= {n: next(lists, []) for n, found in enumerate(real) if found == type}
        columns, problems, fixed = [], [], set()
        for n, (name, type, meta) in enumerate(zip(names, real, metas)):
            charset = self._charsets.get(sets.get(n, 63), "unknown")
            codec = _CODECS.get(charset)
            if codec is None:
                problems.append(f"the column {name.decode()} has the character set {charset}")
                codec = ""
            values = [_decoded(value, codec) for value in members.get(n, [])]
            read = _reader(type, meta, codec, n in unsigned, values)
            if read is None:
                problems.append(f"the column {name.decode()} has the type {type} of the log")
                read = _nothing
            if type == 254 and not codec and meta & 255 in (4, 16):
                fixed.add(name.decode())
            columns.append(Column(name.decode(), read))
        key = [n for n, _ in _pairs(facts.get(8, b""), 1)] or [n for n, _ in _pairs(facts.get(9, b""), 2)]
        return Table(
            table, columns, [columns[n].name for n in key], problems[0] if problems else None, frozenset(fixed)
        )


def _nothing(data: bytes, at: int) -> tuple[Any, int]:
    raise CuesError("A row has a column whose type is unknown.", "leave its table out of tables=.")


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Return a packed number, and the place after it."""
    first = data[at]
    if first < 251:
        return first, at + 1
    size = {252: 2, 253: 3, 254: 8}[first]
    return int.from_bytes(data[at + 1 : at + 1 + size], "little"), at + 1 + size


def _texts(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size, at = _length(data, at)
        found.append(data[at : at + size])
        at += size
    return found


def _lists(data: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at < len(data):
        count, at = _length(data, at)
        found = []
        for _ in range(count):
            size, at = _length(data, at)
            found.append(data[at : at + size])
            at += size
        yield found


def _pairs(data: bytes, size: int) -> list[tuple[int, int]]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _length(data, at)
        numbers.append(number)
    return [(numbers[n], numbers[n + size - 1]) for n in range(0, len(numbers), size)]


def _charsets(facts: dict[int, bytes], default: int, each: int, columns: list[int]) -> dict[int, int]:
    """Return the collation of each column of text: one for all but some, or one for each."""
    if each in facts:
        return {n: collation for n, (collation, _) in zip(columns, _pairs(facts[each], 1))}
    if default not in facts:
        return {}
    most, at = _length(facts[default], 0)
    others = dict(_pairs(facts[default][at:], 2))
    return {n: others.get(place, most) for place, n in enumerate(columns)}


def _metas(types: list[int], data: bytes) -> list[int]:
    found, at = [], 0
    for type in types:
        size = {4: 1, 5: 1, 252: 1, 255: 1, 245: 1, 17: 1, 18: 1, 19: 1, 140: 1, 15: 2, 253: 2, 254: 2, 246: 2, 16: 2,
                141: 2, 247: 2, 248: 2}.get(type, 0)  # fmt: skip
        found.append(int.from_bytes(data[at : at + size], "big" if type in (254, 246, 247, 248) else "little"))
        at += size
    return found


def _real(type: int, meta: int) -> int:
    """Return the type of a column: an ENUM and a SET are in a CHAR."""
    return meta >> 8 if type == 254 and meta >> 8 in (247, 248) else type


def _decoded(data: bytes, codec: str) -> Any:
    if codec == "latin1":
        return "".join(_WINDOWS.get(data[n : n + 1]) or chr(data[n]) for n in range(len(data)))
    return data.decode(codec) if codec else data


Read = Callable[[bytes, int], tuple[Any, int]]


def _reader(type: int, meta: int, codec: str, unsigned: bool, values: list[Any]) -> Read | None:
    if sizes := {1: 1, 2: 2, 9: 3, 3: 4, 8: 8}.get(type):
        return lambda data, at: (int.from_bytes(data[at : at + sizes], "little", signed=not unsigned), at + sizes)
    match type:
        case 4:
            return lambda data, at: (shortest(struct.unpack_from("<f", data, at)[0]), at + 4)
        case 5:
            return lambda data, at: (struct.unpack_from("<d", data, at)[0], at + 8)
        case 246:
            return lambda data, at: _decimal(data, at, meta >> 8, meta & 255)
        case 13:
            return lambda data, at: (data[at] and 1900 + data[at], at + 1)
        case 10:
            return _date
        case 17:
            return lambda data, at: _timestamp(data, at, meta)
        case 18:
            return lambda data, at: _datetime(data, at, meta)
        case 19:
            return lambda data, at: _time(data, at, meta)
        case 15 | 253:
            return _text_reader(1 if meta < 256 else 2, codec)
        case 254:
            size = ((meta >> 8 & 0x30 ^ 0x30) << 4) | meta & 255
            read = _text_reader(1 if size < 256 else 2, codec)
            if codec:
                return read

            def padded(data: bytes, at: int) -> tuple[Any, int]:
                value, at = read(data, at)
                return value.ljust(size, b"\0"), at

            return padded
        case 252 | 255:
            return _text_reader(meta, codec if type == 252 else "")
        case 16:
            whole = (meta >> 8) + ((meta & 255) > 0)
            return lambda data, at: (data[at : at + whole], at + whole)
        case 247:
            size, empty = meta & 255, "" if codec else b""

            def one(data: bytes, at: int) -> tuple[Any, int]:
                number = int.from_bytes(data[at : at + size], "little")
                return values[number - 1] if number else empty, at + size

            return one
        case 248:
            size = meta & 255

            def several(data: bytes, at: int) -> tuple[Any, int]:
                bits = int.from_bytes(data[at : at + size], "little")
                comma: Any = "," if codec else b","
                return comma.join(value for n, value in enumerate(values) if bits >> n & 1), at + size

            return several
    return None


def _text_reader(width: int, codec: str) -> Read:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        begin = at + width
        end = begin + int.from_bytes(data[at:begin], "little")
        return _decoded(data[begin:end], codec), end

    return read


def shortest(value: float) -> float:
    """Return a float of four bytes as the number with the fewest digits that is it, as a text would have."""
    for digits in range(6, 9):
        found = float(f"{value:.{digits}g}")
        if abs(found) <= 3.4028234663852886e38 and struct.unpack("<f", struct.pack("<f", found))[0] == value:
            return found
    return float(f"{value:.9g}")


def _decimal(data: bytes, at: int, digits: int, scale: int) -> tuple[Decimal, int]:
    """Nine digits are four bytes, fewer have fewer; the first bit is 1 for numbers from 0 on, else all are inverted."""
    sizes = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    first, last = digits - scale, scale
    groups = [*([first % 9] if first % 9 else []), *[9] * (first // 9)]
    after = [*[9] * (last // 9), *([last % 9] if last % 9 else [])]
    total = sum(sizes[n] for n in (*groups, *after))
    raw = bytearray(data[at : at + total])
    negative = not raw[0] & 0x80
    raw[0] ^= 0x80
    if negative:
        raw = bytearray(byte ^ 0xFF for byte in raw)
    texts, place = ["", ""], 0
    for side, parts in enumerate((groups, after)):
        for count in parts:
            number = int.from_bytes(raw[place : place + sizes[count]], "big")
            texts[side] += f"{number:0{count}}"
            place += sizes[count]
    return Decimal(f"{'-' if negative else ''}{texts[0] or '0'}{'.' + texts[1] if texts[1] else ''}"), at + total


def _date(data: bytes, at: int) -> tuple[Any, int]:
    packed = int.from_bytes(data[at : at + 3], "little")
    year, month, day = packed >> 9, packed >> 5 & 15, packed & 31
    try:
        return date(year, month, day), at + 3
    except ValueError:
        return f"{year:04}-{month:02}-{day:02}", at + 3


def _fraction(data: bytes, at: int, digits: int) -> tuple[int, int]:
    """Return microseconds, and the place after them."""
    size = (digits + 1) // 2
    return int.from_bytes(data[at : at + size], "big") * 10 ** (6 - 2 * size), at + size


def _as_text(digits: int, microseconds: int) -> str:
    return f".{microseconds:06}"[: digits + 1] if digits else ""


def _timestamp(data: bytes, at: int, digits: int) -> tuple[Any, int]:
    seconds = int.from_bytes(data[at : at + 4], "big")
    microseconds, end = _fraction(data, at + 4, digits)
    if not seconds and not microseconds:
        return "0000-00-00 00:00:00" + _as_text(digits, 0), end
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds), end


def _datetime(data: bytes, at: int, digits: int) -> tuple[Any, int]:
    packed = int.from_bytes(data[at : at + 5], "big") - (1 << 39)
    microseconds, end = _fraction(data, at + 5, digits)
    days, clock = packed >> 17, packed & 0x1FFFF
    months, day = days >> 5, days & 31
    parts = months // 13, months % 13, day, clock >> 12, clock >> 6 & 63, clock & 63
    try:
        return datetime(*parts, microseconds), end
    except ValueError:
        year, month, day, hour, minute, second = parts
        text = f"{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}"
        return text + _as_text(digits, microseconds), end


def _time(data: bytes, at: int, digits: int) -> tuple[timedelta, int]:
    size = 3 + (digits + 1) // 2
    shift = 8 * (size - 3)
    packed = int.from_bytes(data[at : at + size], "big") - (1 << 23 + shift)
    negative, packed = packed < 0, abs(packed)
    whole, part = packed >> shift, packed & (1 << shift) - 1
    microseconds = part * 10 ** (6 - 2 * (size - 3)) if shift else 0
    found = timedelta(hours=whole >> 12 & 0x3FF, minutes=whole >> 6 & 63, seconds=whole & 63, microseconds=microseconds)
    return -found if negative else found, at + size
