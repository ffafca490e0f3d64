"""The numbers of Arrow arrays, read from their buffers: a conversion by pyarrow is slower, or imports pandas."""

from __future__ import annotations

from typing import Any, Final

_FORMATS: Final = dict(
    zip(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "double"), "bhiqBHIQd", strict=True)
)
"""The formats of numbers in the buffers of Arrow, as :mod:`struct` names them, by the name of their type."""


def numbers_of(array: Any) -> list[Any] | None:
    """Return the numbers of an Arrow array; None if it has nulls, or is not of integers or 64-bit floats."""
    kind = array.type
    format = _FORMATS.get(str(kind))
    if format is None or array.null_count:
        return None
    size = kind.bit_width // 8
    data = memoryview(array.buffers()[1] or b"")[array.offset * size :][: len(array) * size]
    return data.cast("B").cast(format).tolist()  # type: ignore[call-overload, no-any-return]
