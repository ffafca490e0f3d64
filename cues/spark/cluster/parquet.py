"""Parquet files of a shared directory: everything that reads or writes one does it here, so flipped bits are found.

Each page has a checksum of Parquet. The headers of pages and the footer have none, so the metadata in the footer has
two fields more, which other readers ignore:

    cues.body    the xxh3 of all bytes before the footer
    cues.seal    the xxh3 of the footer with zeros in the place of this value

:class:`StoredFile` verifies the footer, and the pages that are read; its method ``verify`` reads the whole file. Files
of earlier versions have neither checksums nor these fields. They are read too.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from cues.errors import CuesError, Diverged
from cues.overrides import override

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

_BODY: Final = "cues.body"
_SEAL: Final = "cues.seal"
_SCHEMA: Final = "ARROW:schema"
"""The key under which Arrow keeps the types of its columns."""
_ZEROS: Final = "0" * 16
_PAIR: Final = _SEAL.encode() + b"\x18\x10"
"""The key of the seal, and the beginning of a text of 16 bytes in the encoding of the footer (Thrift's compact one)."""
_END_BYTES: Final = 8
"""After the footer: its length in four bytes, and the magic number."""
_TAIL_BYTES: Final = 64 << 10
"""Bytes from the end of a file that are read first. Nearly every footer is in them."""
_CHUNK_BYTES: Final = 1 << 20


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


# --- writing ------------------------------------------------------------------------------------


class FileWriter:
    """Writes one file. :meth:`close` ends it; without that it cannot be read."""

    def __init__(
        self,
        target: Any,
        schema: pa.Schema,
        dictionaries: Sequence[str],
        statistics: Sequence[str],
        shown: pa.Schema | None = None,
    ) -> None:
        """``target`` is a file of :meth:`Files.create`; ``dictionaries`` and ``statistics`` name columns.

        ``shown`` is the schema that a reader gets, if a column of ``schema`` is a dictionary only to be written fast.
        Integers without a dictionary are written as differences, which costs half of what compression does.
        """
        self._sink = _Sink(target)
        self._shown = base64.b64encode((shown or schema).serialize()).decode()
        integers = [field.name for field in schema if pa.types.is_integer(field.type)]
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            use_dictionary=list(dictionaries) or False,
            column_encoding={name: "DELTA_BINARY_PACKED" for name in integers if name not in dictionaries} or None,
            write_statistics=list(statistics) or False,
            write_page_checksum=True,
            store_schema=False,
        )

    def write(self, table: pa.Table, group_rows: int) -> None:
        """Write row groups of at most ``group_rows`` rows."""
        self._writer.write_table(table, group_rows)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the footer, with this metadata."""
        self._writer.add_key_value_metadata(
            {**metadata, _SCHEMA: self._shown, _BODY: self._sink.body.hexdigest(), _SEAL: _ZEROS}
        )
        self._sink.footer = bytearray()
        self._writer.close()
        self._sink.seal()


class _Sink(io.RawIOBase):
    """The target of a writer. It holds the footer back until its checksum is known."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.body = xxhash.xxh3_64()
        self.footer: bytearray | None = None

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        if self.footer is not None:
            self.footer += data
        else:
            self.body.update(data)
            self._target.write(data)
        return len(data)

    def seal(self) -> None:
        footer = self.footer or bytearray()
        length = int.from_bytes(footer[-_END_BYTES:-4], "little")
        at = footer.rfind(_PAIR + _ZEROS.encode()) + len(_PAIR)
        if at < len(_PAIR) or length + _END_BYTES != len(footer):
            raise AssertionError("pyarrow writes another footer than this version of Cues knows")
        footer[at : at + len(_ZEROS)] = _digest(bytes(footer[:length])).encode()
        self._target.write(bytes(footer))


# --- reading ------------------------------------------------------------------------------------


class StoredFile:
    """A file that is open. Used in a ``with`` block.

    Damage raises :class:`Diverged` with the name of the file. Errors of the filesystem pass, and
    :class:`FileNotFoundError` does.
    """

    def __init__(self, files: Files, name: str, role: str, columns: pa.Schema) -> None:
        """``role`` says in an error what the file is. The file has at least these columns."""
        self._files = files
        self._name = name
        self._role = role
        place = files.open(name)
        self._source: Any = pa.OSFile(place) if isinstance(place, str) else place
        try:
            with self._judged():
                self._open(columns)
        except BaseException:
            self._source.close()
            raise

    def _open(self, columns: pa.Schema) -> None:
        footer = self._footer()
        metadata = pq.read_metadata(pa.BufferReader(footer))
        self._file = pq.ParquetFile(self._source, metadata=metadata, page_checksum_verification=True)
        self.metadata: dict[bytes, bytes] = dict(metadata.metadata or {})
        self.sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        """The number of rows of each row group."""
        self.schema = self._file.schema_arrow
        if sum(self.sizes) != metadata.num_rows:
            raise self.damaged(f"has {sum(self.sizes)} rows in its row groups, and {metadata.num_rows} in all")
        for column in columns:
            at = self.schema.get_field_index(column.name)
            if at < 0 or self.schema.field(at).type != column.type:
                found = "does not have" if at < 0 else f"has {self.schema.field(at).type} in"
                raise self.damaged(f"{found} the column {column.name}, which is {column.type}")

    def _footer(self) -> bytes:
        """The footer and what follows it. Raises :class:`Diverged` if it has a seal that is wrong."""
        size = self._source.size()
        tail = self._tail(size, min(size, _TAIL_BYTES))
        length = int.from_bytes(tail[-_END_BYTES:-4], "little")
        if length + _END_BYTES > size or tail[-4:] != b"PAR1":
            raise self.damaged("cannot be read (it does not end as a Parquet file)")
        if length + _END_BYTES > len(tail):
            tail = self._tail(size, length + _END_BYTES)
        tail = tail[-length - _END_BYTES :]
        self._body_bytes = size - len(tail)
        self.is_sealed = _SEAL.encode() in tail
        if self.is_sealed:
            at = tail.rfind(_PAIR) + len(_PAIR)
            end = at + len(_ZEROS)
            if tail[at:end] != _digest(tail[:at] + _ZEROS.encode() + tail[end:-_END_BYTES]).encode():
                raise self.damaged("cannot be read (the checksum of its footer fails)")
        return tail

    def _tail(self, size: int, count: int) -> bytes:
        self._source.seek(size - count)
        return bytes(self._source.read(count))

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def bounds(self, column: int) -> list[tuple[int, int]]:
        """The least and the greatest integer in a column, by row group."""
        found = []
        with self._judged():
            for number in range(len(self.sizes)):
                statistics = self._file.metadata.row_group(number).column(column).statistics
                if statistics is None or not statistics.has_min_max:
                    raise self.damaged(f"has no statistics of its column {self.schema.names[column]}")
                found.append((int(statistics.min_raw), int(statistics.max_raw)))
        return found

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these row groups, with those of the columns that the file has; None: with all."""
        with self._judged():
            # Several tasks run in one process of Spark: more threads for each would only change turns.
            names = None if columns is None else list(columns)
            return self._file.read_row_groups(list(groups), columns=names, use_threads=False)

    def verify(self) -> None:
        """Read the whole file. Of one without a seal, this decodes all rows."""
        if not self.is_sealed:
            for number in range(len(self.sizes)):
                self.read([number])
            return
        body = xxhash.xxh3_64()
        self._source.seek(0)
        left = self._body_bytes
        while left and (data := self._source.read(min(left, _CHUNK_BYTES))):
            body.update(data)
            left -= len(data)
        if body.hexdigest().encode() != self.metadata.get(_BODY.encode()):
            raise self.damaged("cannot be read (the checksum of its contents fails)")

    def damaged(self, what: str) -> Diverged:
        return Diverged(f"{self._files.url}/{self._name}, {self._role}, {what}.", "restore the directory from a copy.")

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Turn an error of pyarrow into one of damage, if the bytes of the file are the reason.

        Pyarrow raises OSError for both. So the file is read once more, which fails if the filesystem does.
        """
        try:
            yield
        except (CuesError, FileNotFoundError, MemoryError):
            raise
        except Exception as error:
            data = self._files.read(self._name)
            if data is None:
                raise FileNotFoundError(self._name) from error
            try:
                pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
            except Exception as reason:
                raise self.damaged(f"cannot be read ({reason})") from error
            raise
