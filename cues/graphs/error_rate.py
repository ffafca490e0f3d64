"""The limit of ``max_errors=``: a number of error messages within a time, such as ``"100/min"``."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from cues.errors import InvalidArgument

_UNITS_S: Final = {
    **dict.fromkeys(("s", "sec", "second"), 1),
    **dict.fromkeys(("m", "min", "minute"), 60),
    **dict.fromkeys(("h", "hour"), 3600),
    **dict.fromkeys(("d", "day"), 86_400),
}
_RATE: Final = r"([\d_]+)\s*/\s*(\d*)\s*([a-z]+)"


class ErrorRate(NamedTuple):
    """At most ``most`` error messages within ``seconds``."""

    most: int
    seconds: int

    @staticmethod
    def parse(value: Any) -> ErrorRate:
        """Return the rate of a text such as ``"100/min"`` or ``"20/10s"``. Raises :class:`InvalidArgument`."""
        match = re.fullmatch(_RATE, value.strip().lower()) if isinstance(value, str) else None
        unit = _UNITS_S.get(match[3]) if match else None
        count, many = (int(match[1].strip("_") or 0), int(match[2] or 1)) if match else (0, 0)
        if unit is None or not count or not many:
            raise InvalidArgument(
                f"max_errors={value!r} is not a number of error messages within a time.",
                "write a count from 1, a slash and a time: '100/min', '5/s', '20/10m', '1000/h' or '5000/d'.",
            )
        return ErrorRate(count, many * unit)
