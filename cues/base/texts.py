"""Parts of texts for people: sizes, and the words of commands that a shell reads."""

from __future__ import annotations

import shlex


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
    plain = text.replace("#", "")
    return text if not text.startswith("#") and plain == shlex.quote(plain) else shlex.quote(text)
