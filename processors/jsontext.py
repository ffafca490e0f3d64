"""JSON of messages for readers that are not Cues: one form for all sinks, and one strict reader for all sources.

    value                          in JSON
    text, bool, int, None          the same
    float                          the same; NaN and infinity are refused, since JSON has no number for them
    datetime, date, time           text in ISO 8601, with the offset if there is one
    Decimal, UUID                  text, so no digit is lost
    a scalar or array of numpy     as the value of Python
    bytes and all else             refused

Keys that are not text become text as JSON writes them; two keys that become one, such as 1 and "1", are refused.
"""

from __future__ import annotations

import json
import math
from datetime import date, time
from decimal import Decimal
from typing import Any, Never
from uuid import UUID


def encode(value: Any, *, compact: bool = False) -> str:
    """Return a value as JSON. Raises TypeError for a type without a form, and ValueError for a value without one."""
    _check_keys(value)
    separators = (",", ":") if compact else None
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, default=_plain)


def decode(text: str | bytes) -> Any:
    """Read JSON. Raises ValueError for NaN, Infinity, and a number that a float cannot hold, such as 1e400."""
    return json.loads(text, parse_constant=_refused, parse_float=_float)


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            names: dict[str, Any] = {}
            for key in value:
                name = key if isinstance(key, str) else next(iter(json.loads(json.dumps({key: 0}))))
                if name in names:
                    raise ValueError(f"the keys {names[name]!r} and {key!r} are one key in JSON; rename one of them")
                names[name] = key
        for item in value.values():
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def text_of(value: date | time | Decimal | UUID) -> str:
    """Return the text of a value without a form of its own. Raises ValueError if the text does not say all of it."""
    if not isinstance(value, (date, time)):
        return str(value)
    if getattr(value, "fold", 0) and value.utcoffset() is None:  # type: ignore[union-attr]
        raise ValueError(f"{value!r} is the second of two equal times, and its text does not say so; give it a zone")
    return value.isoformat()


def _plain(value: Any) -> Any:
    if isinstance(value, (date, time, Decimal, UUID)):
        return text_of(value)
    if type(value).__module__ == "numpy" and value.dtype.kind in "biuf":
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON; convert it to text, a number, a list or a dict")


def _refused(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large for a float")
    return number
