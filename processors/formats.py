"""Formats of files that sinks write: text lines, JSON lines, CSV, Parquet, Arrow IPC.

A file grows while it is open, and a crash may leave more bytes than were committed. So each format has a form that can
be appended to, and cut at the end of any commit; when the file is finished it gets the form that readers see:

    format              while it is open              finished
    text, jsonl, csv    the same lines                the lines, compressed if ``compression=`` says so
    arrow               a stream of record batches    an Arrow IPC file
    parquet             a stream of record batches    a Parquet file

A *layout* is what all rows of one file have in common: the columns of CSV, the schema of a table. It is JSON, and is
kept with the open file. Rows that do not fit the layout of a file begin a new file.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import IO, Any, Final, Protocol

from cues.errors import InvalidArgument
from cues.processors import places

Row = dict[str, Any]

FORMATS: Final = ("text", "jsonl", "csv", "parquet", "arrow")


class Format(Protocol):
    """One format. ``ending`` is that of finished files."""

    ending: str
    is_plain: bool
    """Whether a finished file has the bytes of the open one."""

    def layout(self, rows: Sequence[Row]) -> Any:
        """Return the layout of a new file that begins with these rows; None if the format has none."""

    def fits(self, layout: Any, rows: Sequence[Row]) -> bool:
        """Return whether a file with this layout can take the rows."""

    def begin(self, layout: Any) -> bytes:
        """Return the bytes with which a file begins."""

    def encode(self, layout: Any, rows: Sequence[Row]) -> bytes:
        """Return the bytes of the rows. Raises ValueError or TypeError for a row that the format cannot hold."""

    def finish(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Write the finished form of an open file."""


def make(name: str, compression: str | None, columns: Sequence[str] | None, schema: Any, delimiter: str) -> Format:
    """Return a format by its name. Raises :class:`cues.errors.InvalidArgument` for options that it does not have."""
    if name not in FORMATS:
        raise InvalidArgument(f"The format {name!r} is unknown.", f"use one of {', '.join(FORMATS)}.")
    table = name in ("parquet", "arrow")
    if compression is not None and (compression not in places.COMPRESSIONS or table):
        raise InvalidArgument(
            f"compression={compression!r} cannot be used with the format {name!r}.",
            "leave it out: Parquet files are compressed by themselves." if table else "use gzip, bz2, xz or zstd.",
        )
    for option, value, of in (("columns", columns, name == "csv"), ("schema", schema, table)):
        if value is not None and not of:
            raise InvalidArgument(f"The format {name!r} has no {option}=.", f"leave {option}= out.")
    if table:
        return _Table(name, schema)
    if compression == "zstd":
        places.arrow()
    return _CSV(compression, columns, delimiter) if name == "csv" else _Lines(name, compression)


class _Plain:
    """Formats of lines."""

    def __init__(self, name: str, compression: str | None) -> None:
        self.ending = f".{'txt' if name == 'text' else name}{places.COMPRESSIONS[compression] if compression else ''}"
        self.is_plain = compression is None
        self._name, self._compression = name, compression

    def finish(self, source: IO[bytes], target: IO[bytes]) -> None:
        with places.compressing(target, self._compression) as out:
            while piece := source.read(1 << 20):
                out.write(piece)


class _Lines(_Plain):
    """Text and JSON lines."""

    def layout(self, rows: Sequence[Row]) -> Any:
        return None

    def fits(self, layout: Any, rows: Sequence[Row]) -> bool:
        return True

    def begin(self, layout: Any) -> bytes:
        return b""

    def encode(self, layout: Any, rows: Sequence[Row]) -> bytes:
        return "".join(map(self._text if self._name == "text" else _json, rows)).encode()

    @staticmethod
    def _text(row: Row) -> str:
        line = row.get("line")
        if not isinstance(line, str) or "\n" in line or "\r" in line:
            raise ValueError(f"a row of text is {{'line': text}} without line ends, not {str(row)[:80]}")
        return line + "\n"


class _CSV(_Plain):
    def __init__(self, compression: str | None, columns: Sequence[str] | None, delimiter: str) -> None:
        super().__init__("csv", compression)
        self._columns, self._delimiter = list(columns) if columns is not None else None, delimiter

    def layout(self, rows: Sequence[Row]) -> Any:
        return self._columns or list(dict.fromkeys(key for row in rows for key in row))

    def fits(self, layout: Any, rows: Sequence[Row]) -> bool:
        known = set(layout)
        return self._columns is not None or all(known.issuperset(row) for row in rows)

    def begin(self, layout: Any) -> bytes:
        return self._line(layout)

    def encode(self, layout: Any, rows: Sequence[Row]) -> bytes:
        known, lines = set(layout), []
        for row in rows:
            if not known.issuperset(row):
                raise ValueError(f"the row has {sorted(set(row) - known)}, which are not among columns={layout}")
            lines.append(self._line([_cell(name, row.get(name)) for name in layout]))
        return b"".join(lines)

    def _line(self, cells: Sequence[Any]) -> bytes:
        out = io.StringIO()
        csv.writer(out, delimiter=self._delimiter, lineterminator="\n").writerow(cells)
        return out.getvalue().encode()


class _Table:
    """Parquet and Arrow."""

    is_plain = False

    def __init__(self, name: str, schema: Any) -> None:
        self.ending = f".{name}"
        self._pa: Any = places.arrow()
        self._name, self._schema = name, schema

    def layout(self, rows: Sequence[Row]) -> Any:
        schema = self._schema if self._schema is not None else self._inferred(rows).schema
        return base64.b64encode(schema.serialize().to_pybytes()).decode()

    def fits(self, layout: Any, rows: Sequence[Row]) -> bool:
        if self._schema is not None:
            return True
        schema = self._parsed(layout)
        if not set(schema.names).issuperset(key for row in rows for key in row):
            return False
        return all(
            field.type == schema.field(field.name).type or self._pa.types.is_null(field.type)
            for field in self._inferred(rows).schema
        )

    def begin(self, layout: Any) -> bytes:
        return base64.b64decode(layout)

    def encode(self, layout: Any, rows: Sequence[Row]) -> bytes:
        schema = self._parsed(layout)
        unknown = {key for row in rows for key in row} - set(schema.names)
        if unknown:
            raise ValueError(f"the row has {sorted(unknown)}, which are not in schema=: {', '.join(schema.names)}")
        batch = self._pa.RecordBatch.from_pylist(list(rows), schema=schema)
        return bytes(batch.serialize().to_pybytes())

    def finish(self, source: IO[bytes], target: IO[bytes]) -> None:
        with self._pa.ipc.open_stream(source) as reader:
            if self._name == "arrow":
                with self._pa.ipc.new_file(target, reader.schema) as out:
                    for batch in reader:
                        out.write_batch(batch)
                return
            import pyarrow.parquet as pq

            with pq.ParquetWriter(target, reader.schema) as writer:
                # Row groups of a useful size, whatever the size of the commits.
                for rows in _grouped(reader):
                    writer.write_table(self._pa.Table.from_batches(rows, reader.schema))

    def _inferred(self, rows: Sequence[Row]) -> Any:
        names = list(dict.fromkeys(key for row in rows for key in row))
        return self._pa.RecordBatch.from_pydict({name: [row.get(name) for row in rows] for name in names})

    def _parsed(self, layout: Any) -> Any:
        return self._pa.ipc.read_schema(self._pa.py_buffer(base64.b64decode(layout)))


_GROUP_ROWS: Final = 100_000
"""Rows of a row group of a Parquet file. All of them are in memory when the file is finished."""


def _grouped(batches: Any) -> Any:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(b.num_rows for b in group) >= _GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def _json(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _cell(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool, Decimal)):
        return value
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise ValueError(f"the column {name!r} has a {type(value).__name__}, expected text, a number, a date or None")
