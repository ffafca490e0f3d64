"""Messages as text that a browser may show: JSON, indented, whole or cut.

Control characters and those that change the direction of the text around them are escaped, so a message cannot look
like another one. A message may be as deep as msgpack allows, deeper than Python's recursion, so nothing here recurses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cues import jsontext

PREVIEW_CHARACTERS: Final = 240
INDENT_MAX: Final = 24
"""Levels that are indented; deeper ones begin at the same column, or a deep message would be mostly spaces."""

# C0, C1 and the marks, embeddings, overrides and isolates of the bidirectional algorithm; also the line separators of
# JavaScript, characters without width, and halves of surrogate pairs.
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def safe(text: str) -> str:
    """A text whose invisible and reordering characters are written as ``\\u202e``."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def pretty(value: Any) -> str:
    """A message as JSON over several lines."""
    return safe("".join(_pieces(value, indented=True)))


def preview(value: Any, limit: int = PREVIEW_CHARACTERS) -> tuple[str, bool]:
    """The first ``limit`` characters of a message as JSON on one line, and whether some were cut."""
    parts: list[str] = []
    left = limit
    for piece in _pieces(value, indented=False, limit=limit):
        parts.append(piece[: max(0, left)])
        left -= len(piece)
        if left < 0:
            break
    return safe("".join(parts)), left < 0


def _pieces(value: Any, indented: bool, limit: int | None = None) -> Iterator[str]:
    """The pieces of a JSON text. With a ``limit``, texts inside are cut a little after it."""
    stack: list[tuple[Iterator[tuple[str, Any]], str]] = [(iter([("", value)]), "")]
    began = False  # the container on top of the stack has an item
    while stack:
        items, end = stack[-1]
        try:
            key, item = next(items)
        except StopIteration:
            stack.pop()
            if end:
                yield (_line(len(stack) - 1) if indented and began else "") + end
            began = True
            continue
        if end:
            comma = "," if began else ""
            yield comma + (_line(len(stack) - 1) if indented else " " if comma else "")
        yield key
        if isinstance(item, Mapping) and item:
            yield "{"
            stack.append((_fields(item, limit), "}"))
            began = False
        elif isinstance(item, (list, tuple)) and item:
            yield "["
            stack.append(((("", each) for each in item), "]"))
            began = False
        else:
            yield _scalar(item, limit)
            began = True


def _fields(item: Mapping[Any, Any], limit: int | None) -> Iterator[tuple[str, Any]]:
    return ((f"{_scalar(_name(key), limit)}: ", each) for key, each in item.items())


def _name(key: Any) -> str:
    return key if isinstance(key, str) else preview(key)[0]


def _scalar(value: Any, limit: int | None) -> str:
    if isinstance(value, str) and limit is not None:
        value = value[: limit + 1]
    if isinstance(value, (bytes, bytearray, memoryview)) and limit is not None:
        value = bytes(value[: limit + 1])
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, (list, tuple)):
        return "[]"
    try:
        return jsontext.show(value)
    except (TypeError, ValueError, RecursionError):  # an integer of thousands of digits, a set of deep values
        return json.dumps(f"<{type(value).__name__}>")


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, INDENT_MAX)
