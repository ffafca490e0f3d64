"""JSON lines as columns, with the types of ``schema=``: the rows and the errors are those of the lines one by one.

    a record    what Python reads of the line, with the types that Arrow makes of it
    a block     Arrow reads many lines at once, if each is one object, and Python refuses none of them
    a block that Arrow must not read alone, or cannot read    halves, down to the record at fault

Arrow accepts some things that are no JSON lines: several objects in a line, an object of several lines, NaN. Others it
does not look at: the length of a line, its depth, bytes that are not UTF-8, keys that are reserved. A block with a sign
of one of these is read in smaller parts.

Values keep their type: a number is not a text, and 1.0 is not an integer. Dates and times are texts in ISO 8601. A
field that is missing is null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from cues.overrides import override
from cues.processors import blocks, columns, files, places

_NOT_A_NUMBER: Final = re.compile(rb"[:\[,]\s*-?(?:NaN|Inf)")
_RESERVED: Final = (b"q\\/", b"\\u007", b"\\u002")
"""Signs of ``q/`` at the beginning of a key that is written with escapes."""
_CHANGED: Final = re.compile(r"JSON parse error: Column\(/(.*)\) changed from (\w+) to (\w+) in row \d+")
_TEMPORAL: Final = ("date", "time", "timestamp", "dictionary")
"""Kinds of types that are read as text first: Arrow's JSON reader knows no dates, and ignores zones."""


class JsonColumns(blocks.Typed):
    """Reads blocks of one file of JSON lines."""

    typed = True

    def __init__(
        self, shape: files.Shape, parse: files.Parser, schema: Any, keep: Sequence[str] | None, only: bool
    ) -> None:
        """``schema`` has the types; ``keep``: the columns of it, None for all; ``only``: a record has no other fields.

        Raises ValueError for a type that JSON does not have.
        """
        pa = places.arrow()
        from pyarrow import json as arrow_json

        self._json: Any = arrow_json
        self._schema = schema if keep is None else pa.schema([field for field in schema if field.name in keep])
        super().__init__(shape, parse, 1, self._schema.names)
        self._read_as = pa.schema([field.with_type(_in_json(pa, field.type)) for field in self._schema])
        self._only = only
        self._options = arrow_json.ParseOptions(
            explicit_schema=self._read_as, unexpected_field_behavior="error" if only else "ignore"
        )
        self._read(b"{}")

    @override
    def table(self, data: bytes) -> tuple[Any, int]:
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        self._check_lengths(data)
        text = data if self._is_utf8 else data.decode(self.shape.encoding).encode()
        self._check(text, lines)
        found = self._read(text)
        if found.num_rows != lines:
            raise blocks.Odd("another number of records")
        return found, lines

    @override
    def one(self, raw: bytes, row: files.Row) -> Any:
        if self._only and (others := [name for name in row if name not in self._schema.names]):
            raise ValueError(f"the field {others[0]!r} is not one of those of the first records, which schema= has")
        return self._read(raw if self._is_utf8 else raw.decode(self.shape.encoding).encode())

    @override
    def ends(self, data: bytes, complete: bool) -> list[int]:
        ends = [found.end() for found in re.finditer(b"\n", data)]
        return [*ends, len(data)] if complete and not data.endswith(b"\n") else ends

    @override
    def complete(self, data: bytes) -> int:
        return data.rfind(b"\n") + 1

    def _read(self, text: bytes) -> Any:
        try:
            found = self._json.read_json(
                self.pa.BufferReader(text),
                read_options=self._json.ReadOptions(block_size=max(len(text) + 1, 1024), use_threads=False),
                parse_options=self._options,
            )
            return found.cast(self._schema)
        except self.pa.ArrowException as error:
            raise ValueError(_said(str(error))) from None

    def _check(self, text: bytes, lines: int) -> None:
        """Raise for lines that Arrow may read and Python does not."""
        objects = 1 + text.count(b"}\n{") + (text.count(b"}\r\n{") if b"\r" in text else 0)
        if not text.startswith(b"{") or not text[-3:].rstrip(b"\r\n").endswith(b"}") or objects != lines:
            raise blocks.Odd("a line that is not one object")
        if not text.isascii():
            text.decode()
        # A search for one byte takes a tenth of the time of one for several, so it comes first.
        is_named = (b"N" in text and b"NaN" in text) or (b"I" in text and b"Inf" in text)
        if is_named and _NOT_A_NUMBER.search(text):
            raise blocks.Odd("a number that is none")
        if blocks.has_large(text, False):
            raise blocks.Odd("a number that no float holds")
        if (b"/" in text and b'"q/' in text) or (b"\\" in text and any(sign in text for sign in _RESERVED)):
            raise blocks.Odd("a key that is reserved")
        if text.count(b"{") + text.count(b"[") > lines and any(
            line.count(b"{") + line.count(b"[") > files.DEPTH_MAX for line in text.split(b"\n")
        ):
            raise blocks.Odd("a line that may be nested too deep")


def _in_json(pa: Any, kind: Any) -> Any:
    """Return the type in which Arrow reads a type from JSON."""
    types = pa.types
    if any(getattr(types, f"is_{name}")(kind) for name in _TEMPORAL):
        return pa.string()
    if types.is_list(kind):
        return pa.list_(_in_json(pa, kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_json(pa, field.type)) for field in kind])
    return kind


def _said(error: str) -> str:
    """The text of an error of Arrow about a record, with the name of the column."""
    found = _CHANGED.fullmatch(error)
    if found is not None:
        return f"the column {found[1]!r} is {found[2]}, and the record has {found[3]}"
    return error.removeprefix("JSON parse error: ")


def inferred(rows: Iterable[files.Row]) -> Any:
    """Return the schema of the first records, as a ``pyarrow.Schema``; None if they have no fields.

    Whole numbers and floats are floats. A field that is always null is text; so is a list that is always empty one of
    texts. Of values of two other types the first one is the type, and records with another one do not fit.
    """
    types: dict[str, Any] = {}
    wide: set[str] = set()
    pa = places.arrow()
    for row in rows:
        for name, value in row.items():
            try:
                kind = columns.type_of(value, name, wide)
                types[name] = columns.widened(types.get(name, pa.null()), kind, name, wide)
            except ValueError:
                types.setdefault(name, pa.null())
    return pa.schema([(name, _without_null(pa, kind)) for name, kind in types.items()]) if types else None


def _without_null(pa: Any, kind: Any) -> Any:
    types = pa.types
    if types.is_list(kind):
        return pa.list_(_without_null(pa, kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_null(pa, field.type)) for field in kind])
    return pa.string() if types.is_null(kind) else kind
