"""Reserved keys of messages that come from outside: strangers may not decide them.

Keys that begin with ``q/`` are of Cues: ``q/uuid`` names a producer, ``q/meta`` the metadata, ``q/deliver-at`` a time,
``q/type`` the kind and ``q/topics`` the topics of a message. Who writes a file, a record or a request decides only what
is *in* a message. So every ready-made source has each message checked here, and refuses one with

    a key that begins with q/        ``q/type`` and ``q/topics`` can be allowed: ``reserved=["q/type"]``
    a kind of Cues in ``q/type``     watermarks, errors, malformed lines; allowed with ``reserved=["q/type"]``

A ``q/type`` of a graph's own kinds, such as ``"order/paid"``, is data like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cues.errors import InvalidArgument

MAY_BE_ALLOWED: Final = ("q/type", "q/topics")

MALFORMED: Final = "malformed"
"""The ``q/type`` of a line that could not be read."""

_OWN_KINDS: Final = "q.type."


def allowed(reserved: Iterable[str]) -> frozenset[str]:
    """Return ``reserved=`` of a source as a set. Raises :class:`InvalidArgument` for a key that none may allow."""
    keys = reserved if isinstance(reserved, Iterable) and not isinstance(reserved, str) else (None,)
    if not all(key in MAY_BE_ALLOWED for key in keys):
        raise InvalidArgument(
            f"reserved={reserved!r}: expected a list of {' and '.join(map(repr, MAY_BE_ALLOWED))}.",
            "name the keys that strangers may set, such as reserved=['q/type']. For others, set them in a stream.",
        )
    return frozenset(reserved)


def check_keys(keys: Iterable[Any], may: frozenset[str] = frozenset()) -> None:
    """Raise :class:`InvalidArgument` if one of the keys is reserved. For columns, before there are rows."""
    for key in keys:
        if isinstance(key, str) and key.startswith("q/") and key != "q/type" and key not in may:
            raise InvalidArgument(
                f"reserved key, {key!r}: only Cues sets it.",
                f"allow it with reserved=[{key!r}]." if key in MAY_BE_ALLOWED else "give it another name.",
            )


def shaped(source: Any, system: str, fields: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the message of a record: its fields and ``name``, its value; or the value, with the fields as metadata.

    ``source.shape`` decides. Raises ValueError for a value that is not an object, and the errors of :func:`check`.
    """
    if source.shape == "record":
        return {**fields, name: value}
    if not isinstance(value, dict):
        raise ValueError(f"the {name} is {type(value).__name__}, not an object")
    check(value, source.may)
    return {**value, "q/meta": {system: fields}}


def check(message: Mapping[Any, Any], may: frozenset[str] = frozenset()) -> None:
    """Raise :class:`InvalidArgument` if the message sets what a stranger may not set; ``may`` is :func:`allowed`."""
    check_keys(message, may)
    kind = message.get("q/type")
    if kind is None or "q/type" in may:
        return
    if not isinstance(kind, str) or kind.startswith(_OWN_KINDS) or kind == MALFORMED:
        raise InvalidArgument(
            f"reserved type, {kind!r:.60}: messages of this 'q/type' are made by Cues only.",
            "give it another type; or allow it with reserved=['q/type'].",
        )
