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

from cues.buffers import DAY_US, in_years, texts_of_times
from cues.processors import columns, places

_PLAIN: Final = (1e-4, 1e10)
"""Floats from the first to below the second number are written alike by Arrow and Python, apart from ``.0``."""


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
        return values.cast(pa.string()) if in_years(values.cast(pa.int32()), DAY_US) else None
    return texts_of_times(values) if types.is_timestamp(kind) else None


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
