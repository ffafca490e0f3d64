"""JSON of messages: one module for sources and sinks, commands, the page, and the framing of transactions.

    value                          for other programs (encode)        for people and Cues (show)
    text, bool, int, None          the same                           the same
    float                          the same                           the same
    NaN, infinity                  refused: JSON has no such number   {"$float": "nan"}
    datetime, date, time           ISO 8601, with the offset          ISO 8601, UTC as Z
    Decimal, UUID                  text, so no digit is lost          text
    a scalar or array of numpy     as the value of Python             as the value of Python
    bytes                          refused                            {"$bytes": "<base64>"}
    timedelta                      refused                            seconds
    a set                          refused                            a list
    all else                       refused                            its text
    keys that are not text         text; two that become one (1 and "1") are refused, or the later one is shown

All readers use :func:`decode`, which is strict. For ``cues send`` it reads ``$bytes`` and ``$float`` back.
The framing of ``cues export`` refuses what ``cues import`` would read as another type, UUIDs apart (``exact=True``).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from typing import TYPE_CHECKING, Any, Final, Never
from uuid import UUID

from cues.imported import loaded

if TYPE_CHECKING:
    from decimal import Decimal

_TOO_DEEP = "it is nested too deep"
DEPTH_MAX: Final = 500
"""Levels of lists and objects in a text that is read. A message has room for some more around them; Python reads 1,000
or more, which depends on its version and on the call."""


def encode(value: Any, *, compact: bool = False, exact: bool = False) -> str:
    """Return a value as JSON. Raises TypeError for a type without a form, and ValueError for a value without one.

    ``exact``: a type that would be read back as another one has no form either, a UUID apart.
    """
    try:
        _check_keys(value)
        return json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":") if compact else None,
            default=_uuid if exact else _plain,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def decode(text: str | bytes, *, shown: bool = False) -> Any:
    """Read JSON; with ``shown`` in the forms of :func:`show`.

    Raises json.JSONDecodeError for other text, and other ValueErrors for NaN, Infinity, a number that a float cannot
    hold (1e400), bytes that are not UTF-8, and nesting of more than :data:`DEPTH_MAX` levels.
    """
    try:
        hook = _restored if shown else None
        value = json.loads(text, parse_constant=_refused, parse_float=_float, object_hook=hook)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if is_deeper(text, value, DEPTH_MAX):
        raise ValueError(_TOO_DEEP)
    return value


def is_deeper(text: str | bytes, value: Any, levels: int) -> bool:
    """Return whether the value of a text has more levels of lists and objects. Costs nothing if the text is short."""
    if len(text) <= 2 * levels:
        return False
    brackets = (text.count("[") + text.count("{")) if isinstance(text, str) else (text.count(b"[") + text.count(b"{"))
    if brackets <= levels:
        return False
    level = [value] if type(value) in (dict, list) else []
    for _ in range(levels):
        parts = (each.values() if type(each) is dict else each for each in level)
        level = [part for each in parts for part in each if type(part) in (dict, list)]
        if not level:
            return False
    return True


def show(value: Any, *, compact: bool = False, ascii_only: bool = False) -> str:
    """Return any value as JSON, in the forms for people and for Cues."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, default=_shown, ensure_ascii=ascii_only, allow_nan=False, separators=separators)
    except (TypeError, ValueError):  # a key that is not text, or a nan
        return json.dumps(plain(value), ensure_ascii=ascii_only, separators=separators)


def plain(value: Any) -> Any:
    """Return a value with all parts replaced by types of JSON, in the forms of :func:`show`."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(_shown(value))


def iso(value: date | time) -> str:
    """ISO 8601, with Z for UTC."""
    return value.isoformat().replace("+00:00", "Z")


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


def _is_decimal(value: Any) -> bool:
    decimal = loaded("decimal", "Decimal")
    return decimal is not None and isinstance(value, decimal)


def _plain(value: Any) -> Any:
    if isinstance(value, (date, time, UUID)) or _is_decimal(value):
        return text_of(value)
    if type(value).__module__ == "numpy" and value.dtype.kind in "biuf":
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON; convert it to text, a number, a list or a dict")


def _shown(value: Any) -> Any:
    if isinstance(value, (date, time)):
        return iso(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:
            return sorted(value, key=repr)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return str(value)


def _restored(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "$bytes" and isinstance(item, str):
            return base64.b64decode(item, validate=True)
        if key == "$float" and item in ("nan", "inf", "-inf"):
            return float(item)
    return value


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    text = plain(key)
    return text if isinstance(text, str) else json.dumps(text)


def _uuid(value: Any) -> str:
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} would be read back as another type")


def _refused(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large for a float")
    return number
