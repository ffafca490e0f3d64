"""Checks that several ready-made processors make: options with few values, and positions of sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cues.arguments import version_hint
from cues.errors import Diverged, InvalidArgument
from cues.overrides import override


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


class Unshared:
    """The base of an object with attributes of one process, such as a lock or a connection, which no pickle has."""

    def _reset(self) -> None:
        """Set these attributes, and no others: in the constructor, and in each process that loads a pickle."""
        raise NotImplementedError

    @override
    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        fresh._reset()
        return {name: value for name, value in self.__dict__.items() if name not in fresh.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


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


class Reads(Owned):
    """The base of a source that has one reading at a time.

    A reading has three methods: ``messages()`` yields pairs of a position and a message; ``end()`` follows a complete
    one, and may return before all is closed; ``close()`` ends it at once, also a second time.
    """

    _reading: Any = None

    def _new_reading(self, position: Any, process: Any) -> Any:
        raise NotImplementedError

    def failed(self, error: BaseException) -> BaseException:
        """Return the error to raise for one of a reading."""
        return error

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_owner": ""}

    def _read(self, position: Any, process: Any) -> Iterator[tuple[Any, Any]]:
        self.own(process)
        if self._reading is not None:  # the engine calls a source anew, for example after an outage
            self._reading.close()
        self._reading = reading = self._new_reading(position, process)
        try:
            yield from reading.messages()
        except BaseException as error:
            reading.close()
            if (raised := self.failed(error)) is error:
                raise
            raise raised from error
        reading.end()


BEGIN: Final = "give the source another id, which begins at the start."


def foreign_position(position: Any, module: str, version: int, hint: str = BEGIN) -> Diverged:
    """Return the error for a position that is not of a module, or of another version of it."""
    text = f"The position {str(position)[:80]} is not one of {module}, version {version}."
    return Diverged(text, version_hint(position, version, hint))


def position_of(position: Any, module: str, length: int, hint: str = BEGIN) -> None:
    """Raise :class:`Diverged` for a position that is not of a module.

    A position is None, or a list of so many items, of which the first one is the version 1.
    """
    if position is not None and (not isinstance(position, list) or len(position) != length or position[0] != 1):
        raise foreign_position(position, module, 1, hint)
