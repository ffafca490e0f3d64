"""Rows of a table as packed messages: the bytes of :func:`cues.codec.pack`, made by column, without a dict for a row.

A packed dict is a head and, for each field, the packed name and the packed value. So a column becomes an array of
packed values, and the rows are these arrays joined. Numbers are packed by numpy. Texts and timestamps get the bytes
before and after them from one packed value of the same length. Each value of another type is packed by the codec.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from cues import codec
from cues.buffers import array_of, repeated, texts_of_times
from cues.records import columns

_ROWS: Final = 16_384
"""Rows that are packed at once: an array of Arrow has 2 GiB at most."""
_NULL: Final = codec.pack(None)
_SIZES: Final = (8, 4, 2, 1)
"""Bytes of integers beyond those of one byte, which are -32 to 127."""


def packed_rows(table: Any) -> list[bytes]:
    """Return the rows of a table as packed messages."""
    found: list[bytes] = []
    for array in packed_arrays(table):
        found += array.to_pylist()
    return found


def packed_arrays(table: Any) -> list[Any]:
    """Return the rows of a table as packed messages, in arrays of bytes."""
    return [_packed(batch) for batch in table.to_batches(max_chunksize=_ROWS) if batch.num_rows]


def unpacked(packed: Any, unpack: Callable[[bytes], Any] = codec.unpack) -> list[Any]:
    """Return the messages of an array of packed ones, which may have chunks. Many are decoded in one call."""
    found: list[Any] = []
    for chunk in getattr(packed, "chunks", [packed]):
        for low in range(0, len(chunk), _ROWS):
            some = chunk[low : low + _ROWS]
            _, ends, data = some.buffers()
            edges = memoryview(ends).cast("i")[some.offset : some.offset + len(some) + 1]
            head = b"\xdd" + len(some).to_bytes(4, "big")  # an array of msgpack, with a length of 32 bits
            found += unpack(head + memoryview(data or b"")[edges[0] : edges[-1]])
    return found


def _packed(batch: Any) -> Any:
    """The rows of a batch, as an array of packed messages."""
    names = batch.schema.names
    keys = [codec.pack(name) for name in names]
    whole = codec.pack(dict.fromkeys(names))
    before = whole[: len(whole) - sum(len(key) + len(_NULL) for key in keys)]
    parts = []
    for name, key, values in zip(names, keys, batch.columns):
        parts += [_scalar(before + key), _column(values, name)]
        before = b""
    if not parts:
        return repeated(_bytes([whole]), [batch.num_rows])
    return columns.arrow().compute.binary_join_element_wise(*parts, _scalar(b""))


def _column(values: Any, name: str) -> Any:
    """The packed values of an array, as an array of bytes."""
    pa = columns.arrow()
    kind, types = values.type, pa.types
    if types.is_date32(kind):  # many rows have one day
        values = values.dictionary_encode()
        packed = _one_by_one(values.dictionary, name).take(values.indices)
    elif types.is_dictionary(kind):
        packed = _column(values.dictionary, name).take(values.indices)
    elif (make := _way(values)) is None:
        return _one_by_one(values, name)
    elif values.null_count:
        places = itertools.accumulate(values.is_valid().to_pylist(), initial=-1)
        next(places)
        taken = pa.compute.if_else(values.is_valid(), columns.integers(places), pa.nulls(1, pa.int64())[0])
        packed = make(values.drop_null(), name).take(taken)
    else:
        return make(values, name)
    return pa.compute.coalesce(packed, _scalar(_NULL)) if packed.null_count else packed


def _one_by_one(values: Any, name: str) -> Any:
    return _bytes(list(map(codec.pack, columns.values(values, name))))


def _way(values: Any) -> Any:
    """The function that packs an array without nulls; None if each value is packed on its own."""
    kind, types = values.type, columns.arrow().types
    if len(values) == values.null_count:
        return None
    if types.is_string(kind) or types.is_large_string(kind):
        return _texts
    if types.is_timestamp(kind):
        return _times
    if types.is_boolean(kind):
        return _booleans
    if types.is_integer(kind) and columns.has_numpy():
        return _integers
    return _floats if (types.is_float64(kind) or types.is_float32(kind)) and columns.has_numpy() else None


def _booleans(values: Any, name: str) -> Any:
    return columns.arrow().compute.if_else(values, *(_scalar(codec.pack(each)) for each in (True, False)))


def _texts(values: Any, name: str) -> Any:
    values.validate(full=True)
    return _between(values, values, name)


def _times(values: Any, name: str) -> Any:
    texts = texts_of_times(values)
    return _one_by_one(values, name) if texts is None else _between(values, texts, name)


def _between(values: Any, texts: Any, name: str) -> Any:
    """The texts of values with what the codec writes before and after them, which depends on their length only."""
    pa = columns.arrow()
    raws = texts.cast(pa.binary())
    sizes = pa.compute.binary_length(raws).dictionary_encode()
    places = {number: at for at, number in enumerate(sizes.indices.to_pylist())}
    heads, tails = [], []
    for number in range(len(sizes.dictionary)):
        at = places[number]
        packed, raw = codec.pack(columns.values(values.slice(at, 1), name)[0]), raws[at].as_py()
        start = packed.rindex(raw)
        heads.append(packed[:start])
        tails.append(packed[start + len(raw) :])
    before, after = (_bytes(some).take(sizes.indices) for some in (heads, tails))
    return pa.compute.binary_join_element_wise(before, raws, after, _scalar(b""))


def _integers(values: Any, name: str) -> Any:
    """Integers in the fewest bytes, as msgpack has them."""
    import numpy as np

    signed = columns.arrow().types.is_signed_integer(values.type)
    numbers = values.to_numpy(zero_copy_only=False).astype(np.int64 if signed else np.uint64)
    parts = numbers.astype(">i8" if signed else ">u8").view(np.uint8).reshape(-1, 8)
    cells, sizes = np.empty((len(numbers), 9), np.uint8), np.ones(len(numbers), np.int32)
    cells[:, 0] = parts[:, 7]
    for sign, first in ((1, 0xCC), (-1, 0xD0)) if signed else ((1, 0xCC),):
        outside = numbers > 127 if sign > 0 else numbers < -32
        if not outside.any():
            continue
        for size in _SIZES:
            limit = 1 << 8 * size if sign > 0 else -(1 << 8 * size - 1)
            fits = outside if size == 8 else outside & (numbers < limit if sign > 0 else numbers >= limit)
            cells[fits, 0] = first + size.bit_length() - 1
            cells[fits, 1 : 1 + size] = parts[fits, 8 - size :]
            sizes[fits] = 1 + size
    return _binary(cells[np.arange(9) < sizes[:, None]], sizes)


def _floats(values: Any, name: str) -> Any:
    import numpy as np

    numbers = values.to_numpy(zero_copy_only=False).astype(">f8")
    cells = np.empty((len(numbers), 9), np.uint8)
    cells[:, 0] = codec.pack(0.0)[0]
    cells[:, 1:] = numbers.view(np.uint8).reshape(-1, 8)
    return _binary(cells, np.full(len(numbers), 9, np.int32))


def _binary(data: Any, sizes: Any) -> Any:
    """An array of bytes, from all of them and the size of each, as arrays of numpy."""
    import numpy as np

    pa = columns.arrow()
    ends = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _bytes(given: Sequence[bytes]) -> Any:
    return array_of(given, columns.arrow().binary())


def _scalar(given: bytes) -> Any:
    return _bytes((given,))[0]
