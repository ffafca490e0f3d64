"""Checks of arguments of declarations: a wrong value is refused in words, never by an error of Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cues.errors import InvalidArgument

NEWER: Final = "install a newer version of Cues (pip install -U cues-streams)."


def version_hint(found: Any, known: int, otherwise: str) -> str:
    """Return the hint of an error about stored bytes: a newer Cues for a version above ``known``.

    ``found`` is the version, or a list that begins with it. Another name or place would lose what is stored.
    """
    version = found[0] if isinstance(found, list) and found else found
    return NEWER if type(version) is int and version > known else otherwise


def check_number(name: str, value: Any, least: float, most: float = 1 << 62, *, whole: bool = False) -> None:
    """Raise :class:`InvalidArgument` for a value that is not a number from ``least`` to ``most``."""
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not least <= value <= most:
        kind = "an integer" if whole else "a number"
        raise InvalidArgument(f"{name}={value!r:.60}.", f"give {kind} from {least:,} to {most:,}.")


def text_of(name: str, value: Any) -> str:
    """Return a text. Raises :class:`InvalidArgument` for others, and for text that UTF-8 does not have."""
    if not isinstance(value, str) or (not value.isascii() and value.encode(errors="replace").decode() != value):
        raise InvalidArgument(f"{name}={value!r:.60}.", "give a text.")
    return value


def texts_of(name: str, value: Any) -> list[str]:
    """Return a text, or texts, as a list. Raises :class:`InvalidArgument` for others."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [text_of(name, value)]
    return [text_of(name, each) for each in value]


def path_of(name: str, value: Any) -> str:
    """Return a path as text. Raises :class:`InvalidArgument` for a value that is neither a text nor a path."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    try:
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidArgument(f"{name}={value!r:.60} is not a path.", "give a text, or a pathlib.Path.")


def options_of(name: str, value: Any, reserved: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return options by name as a dict, empty for None. Raises :class:`InvalidArgument` for others.

    ``reserved``: the options that the processor sets itself, each with what to do instead.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name}={value!r:.60}.", "give a dict of options by name.")
    for key in value:
        if reserved and key in reserved:
            raise InvalidArgument(f"{name}= has {key!r}, which the processor sets.", reserved[key])
    return {text_of(name, key): option for key, option in value.items()}
