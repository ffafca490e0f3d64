"""Columns as texts: each value as Python writes it, without making the value.

    of         numbers, texts, dates and times, as ``str`` and ``isoformat`` of the values have them
    has_any    whether texts have some signs: a pass over their bytes
    joined     texts one after another

Arrow writes floats in other forms than Python, such as 1e-5: of these, and of none else, the values are made. A type
whose texts Arrow does not have exactly is left to the caller. All functions take arrays, without chunks.
"""

from __future__ import annotations

import functools
from array import array
from typing import Any, Final

from cues.processors import columns, places

_PLAIN: Final = (1e-4, 1e10)
"""Floats from the first to below the second number are written alike by Arrow and Python, apart from ``.0``."""
_YEARS: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last microsecond that Python has."""
_DAY_US: Final = 86_400_000_000


def of(values: Any) -> Any:
    """Return the texts of an array, null for null; None for a type or for times whose texts Arrow does not have.

    Raises ``pyarrow.ArrowInvalid`` for texts that are not UTF-8.
    """
    pa = places.arrow()
    kind, types = values.type, pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        if types.is_dictionary(values.type) and types.is_string_view(kind):
            return None
        texts = values.cast(pa.string())
        if not joined(texts).isascii():
            texts.validate(full=True)
        return texts
    if types.is_dictionary(values.type):
        return None
    if types.is_integer(kind):
        return values.cast(pa.string())
    if types.is_float32(kind) or types.is_float64(kind):
        return _floats(values.cast(pa.float64()))
    if types.is_date32(kind):
        days = _in_years(values.cast(pa.int32()), _DAY_US)
        return values.cast(pa.string()) if days else None
    return _times(values) if types.is_timestamp(kind) and kind.unit != "ns" and kind.tz in (None, "UTC") else None


def compute() -> Any:
    """Return the module ``pyarrow.compute``, which ``import pyarrow`` does not load."""
    import pyarrow.compute

    return pyarrow.compute


@functools.cache
def _numbers() -> Any:
    """0, and the numbers of :data:`_PLAIN`, as an array: ``pa.scalar`` would import pandas, if it is installed."""
    pa = places.arrow()
    return pa.Array.from_buffers(pa.float64(), 3, [None, pa.py_buffer(array("d", (0.0, *_PLAIN)))])


def _floats(values: Any) -> Any:
    """The texts of floats as ``repr`` makes them."""
    pa, pc = places.arrow(), compute()
    zero, low, high = _numbers()
    size = pc.abs(values)
    plain = pc.or_(pc.equal(size, zero), pc.and_(pc.greater_equal(size, low), pc.less(size, high)))
    texts = values.cast(pa.string())
    whole = pc.equal(pc.floor(values), values)
    if pc.any(whole).as_py():
        longer = pc.binary_join_element_wise(texts, columns.text(".0"), columns.text(""))
        texts = pc.if_else(whole, longer, texts)
    if not pc.all(plain).as_py():
        others = pc.and_kleene(pc.invert(plain), values.is_valid())
        made = columns.texts(map(repr, values.filter(others).to_pylist()))
        texts = pc.replace_with_mask(texts, others, made)
    return texts


def _in_years(numbers: Any, unit: int) -> bool:
    """Whether numbers of this many microseconds are in the years of Python; False if there is none."""
    ends = compute().min_max(numbers).as_py()
    return ends["min"] is not None and _YEARS[0] <= ends["min"] * unit <= ends["max"] * unit <= _YEARS[1]


def _times(values: Any) -> Any:
    """The texts of timestamps without a zone, or in UTC."""
    pa, pc, zone = places.arrow(), compute(), values.type.tz
    try:
        whole = values.cast(pa.timestamp("us", zone)).cast(pa.timestamp("us"))
    except pa.ArrowException:  # beyond 64 bits
        return None
    if not _in_years(whole.cast(pa.int64()), 1):
        return None
    try:
        texts = whole.cast(pa.timestamp("s")).cast(pa.string())
    except pa.ArrowException:  # of a part of a second
        texts = pc.replace_substring(whole.cast(pa.string()), ".000000", "")
    texts = pc.binary_replace_slice(texts, 10, 11, "T")
    if zone is None:
        return texts
    return pc.binary_join_element_wise(texts, columns.text("+00:00"), columns.text(""))


def joined(texts: Any) -> bytes:
    """Return the texts of an array of strings, one after another."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return b""
    ends = memoryview(offsets).cast("i")
    return bytes(memoryview(data)[ends[texts.offset] : ends[texts.offset + len(texts)]])


def has_any(texts: Any, signs: bytes) -> bool:
    """Return whether an array of strings has one of these bytes."""
    data = joined(texts)
    return len(data.translate(None, signs)) < len(data)
