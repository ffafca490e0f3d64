"""Parts of texts for people: sizes, counts, times, and the words of commands that a shell reads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+=:,./-#")
"""The characters of words that a shell reads as they are."""


def size(count: int) -> str:
    """A number of bytes, as people read it."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def quoted(word: object) -> str:
    """A word of a command as a shell reads it. A ``#`` inside of a word (``data/shop#orders``) needs no quotes."""
    text = str(word)
    if text and text[0] != "#" and _PLAIN.issuperset(text):
        return text
    import shlex

    return shlex.quote(text)


def duration(seconds: float) -> str:
    """A time span, as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ago(when: datetime | None) -> str | None:
    """The time since ``when``, as text."""
    if when is None:
        return None
    seconds = (datetime.now(UTC) - when).total_seconds()
    return "now" if seconds < 1 else f"{duration(seconds)} ago"


def count(number: int, noun: str) -> str:
    """A count with its noun: ``1 message``, ``27,004 messages``."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def brief(seconds: float) -> str:
    """A time span in at most six characters."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f}ms" if seconds < 0.01 else f"{seconds * 1000:.0f}ms"
    for limit, unit in ((60, "s"), (3600, "min"), (86400, "h"), (float("inf"), "d")):
        if seconds < limit:
            scale = {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
            return f"{seconds / scale:.1f}{unit}" if seconds / scale < 9.95 else f"{seconds / scale:.0f}{unit}"
    raise AssertionError
