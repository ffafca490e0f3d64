"""Rows by the values of some of their columns, in directories as Hive, Spark, polars, DuckDB and pyarrow read them.

    By(["day", "city"]).split([{"day": date(2026, 1, 31), "city": "Zug", "n": 1}])
        the directory ``day=2026-01-31/city=Zug`` with the row ``{"n": 1}``

The text of a value is its name in the directory: numbers in digits, dates and times in ISO 8601, true and false. A
character that a name cannot have, or that readers would read otherwise, is written as ``%`` and its number: ``/`` is
``%2F``. So no value leaves its directory, and each value is read back. None and a missing field are
``__HIVE_DEFAULT_PARTITION__``.

Not guaranteed: the type of a value, which a name does not have. Readers find it from the names, or are told. On a
filesystem that does not tell capital letters from small ones, values that differ in nothing else share a directory.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from cues import jsontext
from cues.arguments import texts_of
from cues.errors import InvalidArgument
from cues.processors import columns, places

Row = dict[str, Any]

NULL: Final = "__HIVE_DEFAULT_PARTITION__"
"""The name of None."""
NAME_BYTES_MAX: Final = 255
"""Bytes of a name in most filesystems."""
PATH_BYTES_MAX: Final = 2_000
"""Bytes of the names of a partition together. Linux takes 4,096 of a whole path, and object stores about 1,000."""

_ESCAPED: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""The characters that Hive and Spark escape. All others are as they are."""
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^._][^\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]*")
"""Names of columns: without escapes, which not every reader undoes, and with no beginning that readers leave out."""


class By:
    """The directories of rows: by the names of columns, or by a function of a row; None: one directory."""

    def __init__(self, given: Any) -> None:
        self.function: Callable[[Row], Row] | None = given if callable(given) else None
        self.names = [] if given is None or self.function else texts_of("partition_by", given)
        self.is_one = given is None
        if not (self.is_one or self.function or self.names):
            raise InvalidArgument("partition_by= names no column.", "leave it out, for one directory.")
        for name in self.names:
            try:
                _check_name(name)
            except ValueError as error:
                raise InvalidArgument(f"partition_by=: {error}.", "name other columns.") from None
        if len(set(self.names)) < len(self.names):
            raise InvalidArgument(f"partition_by={self.names} names a column twice.", "name it once.")

    @property
    def shown(self) -> Any:
        """The part of the option that decides the columns of the files, as JSON."""
        return "function" if self.function else self.names

    def check(self, option: str, names: Iterable[str] | None) -> None:
        """Raise :class:`InvalidArgument` for a column of the files that is a directory."""
        both = [name for name in names or () if name in self.names]
        if both:
            raise InvalidArgument(
                f"{option}= has {both[0]!r}, which partition_by= has too.",
                f"leave it out of {option}=: its values are in the names of directories.",
            )

    def split(self, rows: Any) -> Iterator[tuple[str, Any]]:
        """Yield directories and their rows, a list of dicts or a table as ``rows`` are, in the order of the first rows.

        Raises ValueError for a value that has no name.
        """
        if self.is_one:
            yield "", rows
        elif isinstance(rows, list):
            yield from self._split_rows(rows)
        else:
            yield from self._split_table(rows)

    def _split_rows(self, rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
        found: dict[str, list[Row]] = {}
        for row in rows:
            if self.function is None:
                values = {name: row.get(name) for name in self.names}
                row = {name: value for name, value in row.items() if name not in values}
            else:
                values = self._called(self.function, row)
            found.setdefault(directory_of(values), []).append(row)
        yield from found.items()

    @staticmethod
    def _called(function: Callable[[Row], Row], row: Row) -> Row:
        values = function(row)
        if not isinstance(values, dict) or not values:
            raise ValueError(f"partition_by= returned {values!r:.60}, expected a dict of values by name")
        for name in values:
            _check_name(name)
            if name in row:
                raise ValueError(f"partition_by= returned {name!r}, which is a column of the row, too")
        return values

    def _split_table(self, table: Any) -> Iterator[tuple[str, Any]]:
        """The same by columns: only the different values become values of Python."""
        pa = places.arrow()
        table = columns.in_files(table)
        try:
            grouped = self._grouped(table) if self.function is None and places.has("numpy") else None
        except pa.ArrowException:  # of a type that has no groups
            grouped = None
        if grouped is None:
            yield from self._split_rows(columns.dicts(table, "a message"))
        else:
            yield from grouped

    def _grouped(self, table: Any) -> list[tuple[str, Any]] | None:
        """Return the tables of all directories; None if only rows can tell."""
        import numpy

        pa = places.arrow()
        rest = table.select([name for name in table.column_names if name not in self.names])
        if not rest.num_columns or len(set(table.column_names)) < table.num_columns:
            return None
        codes: Any = numpy.zeros(table.num_rows, numpy.int64)
        for name in self.names:
            if name in table.column_names:
                column = table.column(name).combine_chunks()
                column = column.dictionary_encode(null_encoding="encode")
                indices = numpy.frombuffer(column.indices.buffers()[1], numpy.int32)[: len(column)]
                codes = codes * len(column.dictionary) + indices
                codes = numpy.unique(codes, return_inverse=True)[1]  # small again, for the next column
        _, first, codes = numpy.unique(codes, return_index=True, return_inverse=True)
        chosen = table.select([name for name in self.names if name in table.column_names])
        values = columns.dicts(chosen.take(_indices(pa, first)), "a message") if chosen.num_columns else [Row()]
        texts = [directory_of({name: row.get(name) for name in self.names}) for row in values]
        ordered = list(dict.fromkeys(texts[at] for at in numpy.argsort(first)))
        if len(ordered) == 1:
            return [(ordered[0], rest)]
        numbers = {text: number for number, text in enumerate(ordered)}
        codes = numpy.asarray([numbers[text] for text in texts])[codes]
        rest = rest.take(_indices(pa, numpy.argsort(codes, kind="stable")))
        ends = numpy.cumsum(numpy.bincount(codes)).tolist()
        return [
            (text, rest.slice(begin, end - begin)) for text, begin, end in zip(ordered, [0, *ends], ends, strict=False)
        ]


def _indices(pa: Any, numbers: Any) -> Any:
    """An array of int64, not through pandas."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(array("q", numbers.tolist()))])


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"readers do not take {name!r} as the name of a partition: it begins with '.' or '_', or has a sign such as"
            " / = % : or a quote"
        )


def directory_of(values: Row) -> str:
    """Return the directory for values by name. Raises ValueError for a value that has no name."""
    names = [f"{name}={_text(name, value)}" for name, value in values.items()]
    for name in names:
        if len(name.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"the partition {name[:40]}… has more than {NAME_BYTES_MAX} bytes, which no name has")
    path = "/".join(names)
    if len(path.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"the partition {path[:40]}… has more than {PATH_BYTES_MAX:,} bytes")
    return path


def _text(name: str, value: Any) -> str:
    value = columns.plain(value)
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (date, time, UUID)):
        value = jsontext.text_of(value)
    if not isinstance(value, (str, int, Decimal)):
        raise ValueError(
            f"the column {name!r} of partition_by= has a {type(value).__name__}, expected text, a whole number, a date"
            " or None"
        )
    text = str(value)
    if text == NULL:
        raise ValueError(f"the column {name!r} of partition_by= has the text {NULL}, which is the name of None")
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)
