"""A file of a source that is open: its records after a place in it, and what it is known by."""

from __future__ import annotations

import codecs
import errno
import functools
import hashlib
import io
import lzma
import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any, Final, Protocol

from cues.errors import CuesError, InvalidArgument
from cues.processors import blocks, columns, documents, files, foreign, json_columns, places
from cues.processors.known_files import Identity, Progress

FINGERPRINT_BYTES: Final = 1_024
"""Bytes at the start of a file by which it is known. More would cost more at each look at a growing file."""

_PARSERS: Final[dict[str, Callable[[files.Shape, frozenset[str]], Callable[[str, bytes], files.Parser]]]] = {
    "csv": files.csv_parser,
    "json": files.jsonl_parser,
    "jsonl": files.jsonl_parser,
    "text": files.text_parser,
}

TABLES: Final = ("parquet", "arrow")
"""Formats of columns."""
PACKED: Final = (*TABLES, "xlsx")
"""Formats that are compressed by themselves."""
NUMBERED: Final = (*PACKED, "json", "avro")
"""Formats whose records have numbers, and no lines."""

_DAMAGE: Final = (
    EOFError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that libraries raise for damaged bytes."""
_OBSTORE: Final = re.compile(
    r"Generic \w+ error: |The operation lacked |Object at location |Operation .*not .*supported"
)
"""The beginnings of errors of obstore's files: they are plain OSErrors, as those of bz2 are."""
_ROWS: Final = 1_000
_BLOCK_ROWS: Final = 65_535
"""As many as one record has: rows of a batch of Parquet that become messages, and of one that is written as columns."""
_REFUSED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ELOOP))
"""Errors of the system that are about one file."""


Piece = blocks.Block | files.Record


class Source(Protocol):
    """The options of :class:`cues.processors.file_source.Files` that are needed here."""

    pattern: str
    shape: files.Shape
    may: frozenset[str]
    tails: bool
    grace_s: float
    columns: list[str] | None
    sheet: str | None
    schema: Any
    types: Any
    """The schema that is in force: ``schema``, or the one that was inferred."""

    @property
    def is_typed(self) -> bool: ...

    def format_of(self, name: str) -> str: ...


def is_damage(error: Exception, remote: bool) -> bool:
    """Return whether an error is about the file that is read, and not about this process, its machine or a network."""
    if isinstance(error, CuesError):
        return isinstance(error, files.FileChanged)
    if isinstance(error, OSError):
        if error.errno is None:  # of a library: bz2, gzip, Arrow; and of obstore, about its requests
            return not isinstance(error, (TimeoutError, ConnectionError)) and not _OBSTORE.match(str(error))
        return not remote and error.errno in _REFUSED
    return isinstance(error, _DAMAGE)


class Opened:
    """An open file, and the place in it from which it is read."""

    def __init__(self, source: Source, where: places.Place, name: str, place: Progress) -> None:
        """Open the file at ``place``; raise :class:`files.FileChanged` if it is not the file that was read up to there.

        For a file that is followed the caller compares instead (:meth:`is_same`).
        """
        self.name, self.start = name, place
        self.whole = False
        """The file was rotated, and is read to its end."""
        self.waits = False
        """The last record of several lines may go on, because the file grew within ``grace_s``."""
        self._source, self._where = source, where
        self._format = source.format_of(source.pattern if source.tails else name)
        self._parse: files.Parser | None = None
        self.names: list[str] = []
        """The columns of a CSV file."""
        self.offset, self.line = place.offset, place.line
        with ExitStack() as stack:
            self._open(stack, place)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, place: Progress) -> None:
        source, where, name = self._source, self._where, self.name
        self._file = stack.enter_context(where.open(name))
        self._is_table = self._format in TABLES
        self._is_numbered = self._format in NUMBERED
        self._compressed = places.compression_of(name) is not None and self._format not in PACKED
        self._plain = places.open_plain(self._file, name, stack) if self._compressed else self._file
        self.start_stat = places.Stat(0, 0, 0, 0.0) if where.remote else _fstat(self._file)
        self._print: tuple[int, bytes] = (0, b"")
        current = place.current
        if current is not None:
            self._print = (current.size, current.print)
            if not source.tails and not (self.is_same(place.offset) and self.is_line_end()):
                raise self._changed(place)
        if self._is_numbered:  # its bytes are read in another order than the records
            head = self._head(FINGERPRINT_BYTES)
            self._print = len(head), checksum(head)

    def stat(self) -> places.Stat:
        return _fstat(self._file)

    def grace_s(self) -> float:
        """Seconds without growth until a rotated file is whole: none if it was last written long ago."""
        limit = self._source.grace_s
        return 0.0 if self._compressed or time.time() - self.stat().modified >= limit else limit

    def records(self, complete: bool) -> Iterator[files.Record]:
        """Yield the records that are there after those that were yielded."""
        if self._is_numbered:
            yield from self._rows() if self._is_table else self._documents(_Counted(self._plain))
            return
        if self._parse is None and not self._begin(complete):
            return
        assert self._parse is not None
        self._plain.seek(self.offset)
        if self._is_typed:
            for piece in self._blocks(complete):
                yield from piece.records() if isinstance(piece, blocks.Block) else (piece,)
            return
        self.waits, shape = False, self._source.shape
        lines_max = shape.record_lines_max if self._format == "csv" else 1
        if shape.begins is not None:
            found = files.begun(
                self._plain, self.offset, self.line, self._parse, shape, lambda: complete or self._is_quiet()
            )
        else:
            found = files.records(self._plain, self.offset, self.line, self._parse, shape, lines_max, complete)
        for record in found:
            self.offset, self.line = record.offset, record.line
            yield record

    def _is_quiet(self) -> bool:
        """Return whether the file did not grow for ``grace_s``. A time of the future counts as one of long ago."""
        self.waits = abs(time.time() - self.stat().modified) < self._source.grace_s
        return not self.waits

    def pieces(self) -> Iterator[Piece]:
        """Yield the records of a file that does not grow, many at once where this is possible and worth it."""
        if self._is_table:
            yield from self._table_pieces()
        elif self._is_numbered:
            yield from self._lists(self._documents(counted := _Counted(self._plain)), counted)
        elif (self._parse is not None or self._begin(True)) and self._has_blocks():
            self._plain.seek(self.offset)
            yield from self._blocks(True)
        else:
            yield from self.records(True)

    @property
    def _is_typed(self) -> bool:
        """True if rows have the types of a schema. JSON lines of which no field is known have none."""
        return self._source.is_typed and (self._format == "csv" or bool(self._source.types))

    def _has_blocks(self) -> bool:
        """Return whether the rows of text may be read by blocks."""
        if self._is_typed:
            return True
        if self._source.shape.begins is not None:
            return False
        known = codecs.lookup(self._source.shape.encoding).name in files.ASCII_BYTES
        return known and (self._format != "csv" or (blocks.may_be_columns(self.names) and places.has("pyarrow")))

    def _blocks(self, complete: bool) -> Iterator[Piece]:
        """Yield the records of a text file as they are in blocks."""
        source = self._source
        assert self._parse is not None
        is_given = source.schema != blocks.INFER
        reader: blocks.Typed | blocks.Lines
        if self._format == "csv":
            blocks.check_names(self.names, source.columns, source.schema if is_given else None, self.name)
            reader = blocks.Columns(source.shape, self.names, self._parse, source.types, source.columns)
        elif self._is_typed:
            blocks.check_names(source.types.names, source.columns, None, self.name)
            only = source.columns is None and not is_given
            reader = json_columns.JsonColumns(source.shape, self._parse, source.types, source.columns, only)
        else:
            reader = blocks.Lines(source.shape, self._format == "jsonl", self._parse)
        yield from self._noted(blocks.of_file(self._plain, self.offset, self.line, reader, complete))

    def _noted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.offset, self.line = piece.offset, piece.line
            yield piece

    def inferred(self) -> Any:
        """Return the schema of the first records of CSV or JSON lines; None if they have none, and for other files."""
        if self._format not in ("csv", "jsonl") or (self._parse is None and not self._begin(True)):
            return None
        assert self._parse is not None
        shape = self._source.shape
        self._plain.seek(self.offset)
        data = self._plain.read(blocks.SAMPLE_BYTES)
        if self._format == "jsonl":
            found = files.records(io.BytesIO(data[: data.rfind(b"\n") + 1 or len(data)]), 0, 0, self._parse, shape)
            return json_columns.inferred(record.row for record in found if record.row is not None)
        reader = blocks.Columns(shape, self.names, self._parse)
        return reader.infer(data[: reader.complete(data) or len(data)])

    def _begin(self, complete: bool) -> bool:
        """Read the header; False if there is none yet."""
        source, header = self._source, b""
        if self._format == "csv" and source.shape.header is None:
            self._plain.seek(0)
            header = self._plain.readline(source.shape.line_bytes_max)
            is_whole = complete or header.endswith(b"\n") or len(header) >= source.shape.line_bytes_max
            if not header or not is_whole:
                return False
            if not self.offset:
                self.offset, self.line = len(header), 1
        if self._format == "csv":
            self.names = files.csv_names(source.shape, source.may, self.name, header)
        self._parse = _PARSERS[self._format](source.shape, source.may)(self.name, header)
        return True

    def _documents(self, file: _Counted) -> Iterator[files.Record]:
        """Yield the records of a JSON document or an Avro file: a record's number is its offset and its line."""
        source = self._source
        self._plain.seek(0)
        parse = files.jsonl_parser(source.shape, source.may)(self.name, b"")
        read: Any = file
        may, read = source.may, self._plain if self._format in PACKED else file
        for record in documents.records_of(self._format, read, self.offset, parse, source.shape, may, source.sheet):
            self.offset = self.line = record.offset
            yield record

    def _lists(self, records: Iterator[files.Record], file: _Counted) -> Iterator[Piece]:
        """Yield records in lists, for which a few parts of the file were read, and bad ones by themselves."""
        held: list[files.Record] = []
        begun = 0
        try:
            for record in records:
                if record.row is not None:
                    held.append(record)
                if record.row is None or len(held) >= blocks.LINES or file.size - begun >= blocks.BLOCK_BYTES:
                    yield from _listed(held)
                    held, begun = [], file.size
                if record.row is None:
                    yield record
        except Exception:
            yield from _listed(held)  # those before the damage
            raise
        yield from _listed(held)

    def _rows(self) -> Iterator[files.Record]:
        """Yield the rows of a table: a row's number is its offset and its line."""
        for first, batch in tables(self._file, self._format, self.offset, self._source.columns, self.name, _ROWS):
            yield from self._rows_of(first, batch)

    def _rows_of(self, first: int, batch: Any) -> Iterator[files.Record]:
        """Yield the rows of a record batch, before which the file has ``first`` rows."""
        for number, row in enumerate(columns.rows_of(batch, self.name), first + 1):
            self.offset = self.line = number
            try:
                if isinstance(row, ValueError):
                    raise row
                foreign.check(row, self._source.may)
            except ValueError as error:
                problem = error.message if isinstance(error, InvalidArgument) else str(error)
                shown = "" if error is row else repr(row)[:1_000]
                yield files.Record(number, number, number, None, problem, shown)
            else:
                yield files.Record(number, number, number, row, "", "")

    def _table_pieces(self) -> Iterator[Piece]:
        """Yield the rows of a table as columns."""
        pa = places.arrow()
        for first, batch in tables(self._file, self._format, self.offset, self._source.columns, self.name, _BLOCK_ROWS):
            if not blocks.may_be_columns(batch.schema.names) or not batch.num_columns:
                yield from self._rows_of(first, batch)
                continue
            self.offset = self.line = first + batch.num_rows
            records = functools.partial(self._rows_of, first, batch)
            yield blocks.Block(pa.Table.from_batches([batch]), self.offset, self.line, first + 1, records)

    def identity(self, offset: int) -> Identity:
        """Return the identity of the file, of which ``offset`` bytes were read."""
        size = min(offset, FINGERPRINT_BYTES)
        if self._print[0] < size and not self._is_numbered:
            head = self._head(size)
            self._print = len(head), checksum(head)
        return Identity(self.name, self.start_stat.device, self.start_stat.inode, *self._print)

    def is_same(self, offset: int) -> bool:
        """Return whether the file has ``offset`` bytes, and still begins with those that were read."""
        size, known = self._print
        if not (self._compressed or self._is_numbered or self._where.remote) and self.stat().size < offset:
            return False
        head = self._head(size)
        return len(head) == size and (not size or checksum(head) == known)

    def check_end(self, place: Progress) -> None:
        """Raise :class:`files.FileChanged` if the file was cut or written anew while it was read up to ``place``."""
        if not self._where.remote and self.stat() != self.start_stat and not self.is_same(place.offset):
            raise self._changed(place)

    def _changed(self, place: Progress) -> files.FileChanged:
        return files.FileChanged(
            f"{self.name} has changed: it is not the file that was read up to byte {place.offset:,}.",
            "restore the file; or give the source another id, which begins at the start.",
            path=self.name,
            position=place.packed(),
        )

    def end(self) -> bytes:
        """Return the checksum of the last bytes of the file as they are stored; empty in an object store."""
        return b"" if self._where.remote else end_of(self._file)

    @property
    def stored(self) -> IO[bytes]:
        """The bytes of the file as they are stored."""
        return self._file

    @property
    def compressed(self) -> bool:
        return self._compressed

    def is_line_end(self) -> bool:
        """Return whether the position is at the end of a line, or of the file."""
        if not self.offset or self._is_numbered:
            return True
        self._plain.seek(self.offset - 1)
        before = self._plain.read(1)
        return before == b"\n" or (bool(before) and not self._plain.read(1))

    def is_at(self, path: str) -> bool:
        """Return whether this file is at the path."""
        return is_inode(stat_of(places.Local(), path), self.start_stat)

    def _head(self, size: int) -> bytes:
        """The first bytes of the uncompressed file. The place in the file stays as it is."""
        if not self._compressed and not self._where.remote:
            return os.pread(self._file.fileno(), size, 0)
        at = self._plain.tell()  # records that were read ahead may end after the offset
        self._plain.seek(0)
        head = self._plain.read(size)
        self._plain.seek(at)
        return head

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Counted:
    """A file that counts the bytes that are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        return data

    def tell(self) -> int:
        """The bytes that were read; fastavro asks for it."""
        return self.size


def _listed(records: list[files.Record]) -> Iterator[Piece]:
    if records:
        first, last = records[0], records[-1]
        of_numbers = first.line if last.line - first.line == len(records) - 1 else 0
        rows = [record.row for record in records]
        yield blocks.Block(rows, last.offset, last.line, of_numbers, lambda: iter(records))


def open_file(source: Source, where: places.Place, name: str, place: Progress) -> Opened | None:
    """Open a file; None if it is not there."""
    try:
        return Opened(source, where, name, place)
    except FileNotFoundError:
        return None


def is_inode(found: places.Stat | None, other: Identity | places.Stat) -> bool:
    return found is not None and (found.device, found.inode) == (other.device, other.inode)


def stat_of(where: places.Place, name: str) -> places.Stat | None:
    try:
        return where.stat(name)
    except FileNotFoundError:
        return None


def checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def end_of(file: IO[bytes]) -> bytes:
    """Return the checksum of the last bytes of an open file of this machine."""
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    return checksum(os.pread(descriptor, FINGERPRINT_BYTES, max(0, size - FINGERPRINT_BYTES)))


def _fstat(file: IO[bytes]) -> places.Stat:
    found = os.fstat(file.fileno())
    return places.Stat(found.st_dev, found.st_ino, found.st_size, found.st_mtime)


def tables(
    file: IO[bytes], format: str, skip: int, names: Sequence[str] | None, name: str, size: int
) -> Iterator[tuple[int, Any]]:
    """Yield ``(rows before, record batch)`` of a Parquet or Arrow file after its first ``skip`` rows.

    ``names``: its columns to be read, None for all. ``size``: the rows of a batch of Parquet.
    """
    pa = places.arrow()
    chosen = None if names is None else list(names)
    if format == "parquet":
        import pyarrow.parquet as pq

        parquet = pq.ParquetFile(file)
        blocks.check_names(parquet.schema_arrow.names, chosen, None, name)
        yield from parquet_rows(parquet, skip, chosen, size)
        return
    file.seek(0)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    blocks.check_names(reader.schema.names, chosen, None, name)
    found = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else reader
    yield from _after(skip, 0, _validated(found), chosen)


def _validated(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a file without checksums. Raises ValueError for one whose values would end the process."""
    try:
        for batch in batches:
            batch.validate(full=True)
            yield batch
    except LookupError as error:  # of Arrow: a dictionary that is missing, or has no such index
        raise ValueError(str(error)) from None


def parquet_rows(
    parquet: Any, skip: int, chosen: list[str] | None, size: int, *, use_threads: bool = True
) -> Iterator[tuple[int, Any]]:
    """Yield ``(rows before, record batch)`` of a ``pyarrow.parquet.ParquetFile`` after its first ``skip`` rows."""
    before = 0
    groups: list[int] = []
    for group in range(parquet.num_row_groups):
        count = parquet.metadata.row_group(group).num_rows
        if not groups and before + count <= skip:
            before += count
            continue
        groups.append(group)
    if groups:
        found = parquet.iter_batches(batch_size=size, row_groups=groups, columns=chosen, use_threads=use_threads)
        yield from _after(skip, before, found, chosen)


def _after(skip: int, before: int, found: Iterable[Any], chosen: list[str] | None) -> Iterator[tuple[int, Any]]:
    for batch in found:
        if before + batch.num_rows > skip:
            done = max(skip - before, 0)
            rows = batch.slice(done)
            yield before + done, rows if chosen is None else rows.select(chosen)
        before += batch.num_rows
