"""Checks that several ready-made processors make: options with few values, and positions of sources."""

from __future__ import annotations

from typing import Any

from cues.errors import Diverged, InvalidArgument


def one_of(name: str, given: Any, known: tuple[Any, ...]) -> None:
    """Raise :class:`InvalidArgument` for an option whose value is none of those that are known."""
    if not any(type(given) is type(each) and given == each for each in known):
        raise InvalidArgument(f"{name}={given!r:.60} is unknown.", f"use one of {', '.join(map(repr, known))}.")


def decoded(shape: str, name: str, decoding: str) -> None:
    """Raise :class:`InvalidArgument` for ``shape="value"``, whose message is a JSON object, with another decoding."""
    if shape == "value" and decoding != "json":
        raise InvalidArgument(
            f"shape='value' with {name}={decoding!r}: a message is an object.", f"use {name}='json', or shape='record'."
        )


class Owned:
    """The base of a source that keeps what is open, or what it acknowledges: it is the function of one processor."""

    _owner = ""
    """The id of the processor; empty: it is not known yet."""

    def own(
        self,
        process: Any,
        shown: str = "",
        hint: str = "give each source an object of its own: one acknowledges messages that the other did not commit.",
    ) -> None:
        """Note the processor of ``process``. Raises :class:`InvalidArgument` for a second one."""
        owner = str(getattr(process, "id", ""))
        if owner and self._owner not in ("", owner):
            shown = shown or f"One {type(self).__name__}"
            raise InvalidArgument(f"{shown} is the function of {self._owner} and of {owner}.", hint)
        self._owner = owner or self._owner


def position_of(
    position: Any, module: str, length: int, hint: str = "give the source another id, which begins at the start."
) -> None:
    """Raise :class:`Diverged` for a position that is not of a module.

    A position is None, or a list of so many items, of which the first one is the version 1.
    """
    if position is not None and (not isinstance(position, list) or len(position) != length or position[0] != 1):
        raise Diverged(f"The position {str(position)[:80]} is not one of {module}, version 1.", hint)
