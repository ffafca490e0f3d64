"""The state of one key, as functions use it: ``process.state``.

The compiler cannot give a class of its own to a mapping of the standard library, so this module is not compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol

from cues import codec
from cues.errors import InvalidArgument
from cues.overrides import override
from cues.steps.state_keys import ABSENT, HASHED, key_segment

_RANGE_BYTES_MAX: Final = 190
_ROWS_MAX: Final = 64
_NAMES: Final = frozenset((str, int, bytes))
"""The types of fields whose rows are kept. Values of different ones are never equal."""


class Fields(Protocol):
    """The values that one call sees, by row (:class:`cues.steps.state.Layer`)."""

    def get(self, row: bytes) -> Any:
        """The value of a row, or ABSENT."""

    def load(self, rows: list[bytes]) -> None:
        """Read rows in one transaction, if they are not in memory."""

    def set(self, row: bytes, value: Any) -> None: ...

    def rows(self, prefix: bytes) -> list[bytes]: ...

    def range(self, low: bytes, high: bytes) -> Iterator[bytes]: ...


class State(MutableMapping[Any, Any]):
    """The state of one key: a mutable mapping from field to value.

    Fields and values have the types that messages may have. Changes are written with the step, or not
    at all.
    """

    __slots__ = ("_layer", "_prefix", "_rows")

    def __init__(self, layer: Fields, prefix: bytes) -> None:
        self._layer = layer
        self._prefix = prefix
        self._rows: dict[str | int | bytes, bytes] = {}
        """The rows of fields that were used: functions use the same few ones for each message."""

    def _row_of(self, field: str | int | bytes) -> bytes | None:
        """The row of a field; None if it is too long for a row."""
        segment = key_segment(field)
        if segment[0] == HASHED:
            return None
        if len(self._rows) == _ROWS_MAX:
            self._rows.clear()
        row = self._rows[field] = self._prefix + segment
        return row

    # A field too long for LMDB's key is found by its hash; its value is then [field, value].

    @override
    def __getitem__(self, field: Any) -> Any:
        value = self.get(field, ABSENT)
        if value is ABSENT:
            raise KeyError(field)
        return value

    @override
    def get(self, field: Any, default: Any = None) -> Any:
        if type(field) in _NAMES and (row := self._rows.get(field) or self._row_of(field)) is not None:
            value = self._layer.get(row)
            return default if value is ABSENT else value
        segment = key_segment(field)
        value = self._layer.get(self._prefix + segment)
        if value is ABSENT:
            return default
        return value[1] if segment[0] == HASHED else value

    @override
    def __setitem__(self, field: Any, value: Any) -> None:
        if type(field) in _NAMES and (row := self._rows.get(field) or self._row_of(field)) is not None:
            self._layer.set(row, value)
            return
        segment = key_segment(field)
        self._layer.set(self._prefix + segment, [field, value] if segment[0] == HASHED else value)

    @override
    def __delitem__(self, field: Any) -> None:
        row = self._prefix + key_segment(field)
        if self._layer.get(row) is ABSENT:
            raise KeyError(field)
        self._layer.set(row, ABSENT)

    @override
    def __iter__(self) -> Iterator[Any]:
        at = len(self._prefix)
        for row in self._layer.rows(self._prefix):
            yield self._layer.get(row)[0] if row[at] == HASHED else codec.unpack(row[at + 1 :])

    @override
    def __len__(self) -> int:
        return len(self._layer.rows(self._prefix))

    def range(self, low: bytes, high: bytes, limit: int | None = None) -> list[tuple[bytes, Any]]:
        """Return the fields from ``low`` to before ``high`` with their values, in order; at most ``limit`` of them.

        For fields that are bytes of one length, such as times as 8 big-endian bytes. ``low`` and ``high`` have that
        length too, at most 190 bytes; fields of other lengths are not returned. Only the rows that are returned are
        read, so the cost does not depend on the size of the state. Raises :class:`InvalidArgument` for other bounds.
        """
        if not (type(low) is type(high) is bytes and len(low) == len(high) <= _RANGE_BYTES_MAX):
            raise InvalidArgument(
                f"state.range was called with {low!r} and {high!r}.",
                f"give two bytes objects of the length of the fields, at most {_RANGE_BYTES_MAX} bytes.",
            )
        at = len(self._prefix)
        bounds = (self._prefix + key_segment(low), self._prefix + key_segment(high))
        rows = list(itertools.islice(self._layer.range(*bounds), limit))
        return [(codec.unpack(row[at + 1 :]), self._layer.get(row)) for row in rows]

    def get_many(self, fields: Sequence[Any]) -> list[Any]:
        """Return the values of several fields, None where there is none: those of :meth:`get`, read at once."""
        rows, layer, at = self._rows_of(fields), self._layer, len(self._prefix)
        layer.load(rows)
        values = []
        for row in rows:
            value = layer.get(row)
            values.append(None if value is ABSENT else value[1] if row[at] == HASHED else value)
        return values

    def set_many(self, values: Mapping[Any, Any]) -> None:
        """Set several fields, as ``update`` does."""
        set_row, at = self._layer.set, len(self._prefix)
        for row, (field, value) in zip(self._rows_of(list(values)), values.items()):
            set_row(row, [field, value] if row[at] == HASHED else value)

    def _rows_of(self, fields: Sequence[Any]) -> list[bytes]:
        size = len(fields[0]) if fields and type(fields[0]) is bytes else 0
        if not 0 < size <= _RANGE_BYTES_MAX or any(type(field) is not bytes or len(field) != size for field in fields):
            return [self._prefix + key_segment(field) for field in fields]
        head = self._prefix + key_segment(fields[0])[:-size]  # they differ only in their own bytes
        return [head + field for field in fields]

    @override
    def __repr__(self) -> str:
        return f"<cues.State {dict(self)!r}>"
