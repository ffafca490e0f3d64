"""Arrays of Arrow as Python has their values: numbers, read from their buffers, and the texts of times.

A conversion by pyarrow is slower, or imports pandas.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

_FORMATS: Final = dict(
    zip(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "double"), "bhiqBHIQd", strict=True)
)
"""The formats of numbers in the buffers of Arrow, as :mod:`struct` names them, by the name of their type."""


def numbers_of(values: Any) -> list[Any] | None:
    """Return the numbers of an Arrow array; None if it has nulls, or is not of integers or 64-bit floats."""
    kind = values.type
    format = _FORMATS.get(str(kind))
    if format is None or values.null_count:
        return None
    size = kind.bit_width // 8
    data = memoryview(values.buffers()[1] or b"")[values.offset * size :][: len(values) * size]
    return data.cast("B").cast(format).tolist()  # type: ignore[call-overload, no-any-return]


DAY_US: Final = 86_400_000_000
_YEARS: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last microsecond that Python has."""


def in_years(numbers: Any, unit: int) -> bool:
    """Return whether numbers of this many microseconds are in the years of Python; False if there is none."""
    import pyarrow.compute as pc

    ends = pc.min_max(numbers).as_py()
    return ends["min"] is not None and _YEARS[0] <= ends["min"] * unit <= ends["max"] * unit <= _YEARS[1]


def texts_of_times(times: Any) -> Any:
    """Return the texts of timestamps as ``isoformat`` of the values has them, null for null.

    None for nanoseconds, for zones other than UTC, and for times that Python does not have.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    unit, zone = times.type.unit, times.type.tz
    if unit == "ns" or zone not in (None, "UTC", "+00:00"):
        return None
    try:
        whole = times.cast(pa.timestamp("us", zone)).cast(pa.timestamp("us"))
    except pa.ArrowException:  # beyond 64 bits
        return None
    if not in_years(whole.cast(pa.int64()), 1):
        return None
    try:
        texts = whole.cast(pa.timestamp("s")).cast(pa.string())
    except pa.ArrowException:  # of a part of a second
        texts = pc.replace_substring(whole.cast(pa.string()), ".000000", "")
    texts = pc.binary_replace_slice(texts, 10, 11, "T")
    if zone is None:
        return texts
    return pc.binary_join_element_wise(texts, *(array_of([part], pa.string())[0] for part in (b"+00:00", b"")))


def repeated(values: Any, counts: Iterable[int]) -> Any:
    """Return an array that has each value of an array as many times as its count says; no count is 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    edges = array("i", itertools.accumulate(counts))
    ends = pa.Array.from_buffers(pa.int32(), len(edges), [None, pa.py_buffer(edges)])
    kind = pa.run_end_encoded(pa.int32(), values.type)
    return pc.run_end_decode(pa.Array.from_buffers(kind, edges[-1], [None], children=[ends, values]))


def array_of(raws: Sequence[bytes], kind: Any) -> Any:
    """Return an array of strings or binary values. ``pa.array`` and ``pa.scalar`` import pandas, if it is installed."""
    import pyarrow as pa

    ends = array("i", itertools.accumulate(map(len, raws), initial=0))
    return pa.Array.from_buffers(kind, len(raws), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(raws))])
